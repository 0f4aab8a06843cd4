//! Options of `spillway catalog create`: one option for each setting of a catalog.
//!
//! Invariant: a setting without an option has its default.

use super::file::{self, NewObject};
use super::hardware::HardwareOptions;
use super::kind::FileSettings;
use super::{show, warn};
use crate::args::settings::DiskOptions;
use crate::error::Failure;
use crate::host::Daemon;
use crate::host::words::{RESIDENCIES, label, number, size, words};
use crate::output;
use clap::{Arg, Args};
use spillway_api::client::Client;
use spillway_api::{
    Catalog, CatalogKind, CatalogSpec, ImageRef, Name, Ready, ResetEvent, Residency, ScratchFormat, bounds,
    parse_ttl,
};
use std::path::PathBuf;

/// Types.
pub const KINDS: &[&str] = &["pooled", "dedicated"];
/// What resets.
pub const RESETS: &[&str] = &["power-cycle", "guest-reboot", "never"];

/// Options of `catalog create`.
#[derive(Debug, Args)]
pub struct Create {
    /// Name of the catalog
    #[arg(required_unless_present = "file")]
    name: Option<Name>,
    /// Read the settings from a file, TOML or JSON; - for standard input. Without a name, the file must have one catalog
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Check everything, create nothing
    #[arg(long)]
    dry_run: bool,
    /// What is wanted.
    #[command(flatten)]
    settings: Settings,
}

/// Refuses an option of a setting beside a file, which has all settings. A group of options does not have those of its parts.
pub fn not_with_file(option: Arg) -> Arg {
    match option.get_id().as_str() {
        "name" | "file" | "dry_run" => option,
        _ => option.conflicts_with("file"),
    }
}

/// What is wanted.
#[derive(Debug, Args)]
struct Settings {
    /// The image. debian:2 is this version. debian follows the published version; in a fleet it is the highest one now, which the
    /// catalog then stays on
    #[arg(long, value_name = "IMAGE[:VERSION]", required_unless_present = "file")]
    image: Option<ImageRef>,
    /// Chunks of a streamed image that are brought before a disk needs them, at least [default: those that the version was
    /// imported with]
    #[arg(long, value_name = "HOW", value_parser = words::<Residency>(RESIDENCIES))]
    residency: Option<Residency>,
    #[arg(long, default_value_t = 0, value_parser = number(&bounds::MACHINES), help = bounds::MACHINES.help("Number of machines"))]
    count: u32,
    /// pooled machines are reset, dedicated ones keep their data
    #[arg(long = "type", value_parser = words::<CatalogKind>(KINDS), default_value = "pooled")]
    kind: CatalogKind,
    /// Settings of the disks.
    #[command(flatten)]
    disk: DiskOptions,
    #[arg(
        long, value_name = "SIZE", value_parser = size(&bounds::RAM_GUARANTEE_BYTES), default_value = "0",
        help = bounds::RAM_GUARANTEE_BYTES.help("Part of the RAM tier that each disk is guaranteed")
    )]
    ram_guarantee: u64,
    /// Store for overflow files [default: the first of class local]
    #[arg(long, value_name = "STORE")]
    overflow_store: Option<Name>,
    /// Verify each MiB of the image against its digest before its first use. No effect on streamed versions: they always are
    #[arg(long)]
    verify_reads: bool,
    #[arg(
        long, value_name = "SIZE", value_parser = size(&bounds::DISK_BYTES),
        help = bounds::DISK_BYTES.help("Size of a second disk of each machine, which keeps its data over resets [default: no such disk]")
    )]
    data_disk: Option<u64>,
    /// Store for data disks [default: the first of class local]
    #[arg(long, value_name = "STORE")]
    data_disk_store: Option<Name>,
    #[arg(
        long, value_name = "SIZE", value_parser = size(&bounds::DISK_BYTES),
        help = bounds::DISK_BYTES.help("Size of a scratch disk, which is empty after each reset, in a store of class temp [default: no such disk]")
    )]
    scratch_disk: Option<u64>,
    /// File system of the scratch disk: ntfs:LABEL or ext4:LABEL [default: the disk is blank]
    #[arg(long, value_name = "SYSTEM:LABEL", requires = "scratch_disk")]
    scratch_format: Option<ScratchFormat>,
    /// Hardware of the machines.
    #[command(flatten)]
    hardware: HardwareOptions,
    /// Names of the machines, with # for each digit of their number, such as desk-###; by default NAME-###
    #[arg(long, value_name = "PATTERN")]
    naming: Option<String>,
    /// Event that discards what a machine has written [default: power-cycle; of dedicated machines never]
    #[arg(long, value_name = "EVENT", value_parser = words::<ResetEvent>(RESETS))]
    reset: Option<ResetEvent>,
    /// When a machine counts as ready: agent, phone-home, tcp:PORT or serial:REGEX [default: as soon as it runs]
    #[arg(long, value_name = "WHEN")]
    ready: Option<Ready>,
    #[arg(
        long, value_name = "SECONDS", default_value_t = 60, value_parser = number(&bounds::GRACE_SECONDS),
        help = bounds::GRACE_SECONDS.help("How long a guest has to shut down by itself")
    )]
    grace: u32,
    #[arg(
        long, value_name = "N", default_value_t = 0, value_parser = number(&bounds::MACHINES),
        help = bounds::MACHINES.help("Machines that are kept started, ready and unclaimed")
    )]
    warm: u32,
    /// Default duration of a claim, such as 30m, 2h or 7d; none: until it is released [default: --claim-ttl of spillwayd]
    #[arg(long, value_name = "TIME", value_parser = parse_ttl)]
    claim_ttl: Option<u32>,
    /// Start machines when they are created and when the host boots, and again when their guest ends. One that was stopped stays off until then
    #[arg(long)]
    autostart: bool,
    #[arg(
        long, value_name = "N", default_value_t = 0, value_parser = number(&bounds::START_ORDER),
        help = bounds::START_ORDER.help("With --autostart: machines start once those of catalogs with a lower number are ready or have failed")
    )]
    start_order: u32,
    #[arg(
        long, value_name = "SECONDS", default_value_t = 0, value_parser = number(&bounds::START_DELAY_SECONDS),
        help = bounds::START_DELAY_SECONDS.help("With --start-order: how long they wait after that")
    )]
    start_delay: u32,
    /// File with user data for cloud-init
    #[arg(long, value_name = "FILE")]
    user_data: Option<PathBuf>,
    /// File with the public SSH keys that cloud-init authorizes, one a line
    #[arg(long, value_name = "FILE")]
    authorized_keys: Option<PathBuf>,
    /// Label of the catalog, for --label of other commands; may be given more than once
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(Name, String)>,
}

impl Create {
    /// Makes it.
    pub fn run(self, daemon: &Daemon, client: &Client) -> Result<(), Failure> {
        let dry_run = self.dry_run;
        let new = self.request(|spec| spec)?;
        let question = if dry_run { "?dry_run=true" } else { "" };
        let created: Catalog = client.post(&format!("/v1/catalogs{question}"), &new)?;
        warn(&created);
        if dry_run && !daemon.json {
            return output::print(&format!("{} can be made\n", new.name)).map(drop);
        }
        show(daemon, &created)
    }

    /// Whether the request is only checked, and nothing is created.
    pub fn dry_run(&self) -> bool {
        self.dry_run
    }

    /// Returns the catalog of the options, whose settings are completed, or that of the file.
    pub fn request<S: FileSettings>(
        self,
        complete: impl FnOnce(CatalogSpec) -> S,
    ) -> Result<NewObject<S>, Failure> {
        let Some(file) = self.file else {
            let name = self.name.ok_or_else(|| {
                Failure::usage("the catalog needs a name: give one, such as 'create desk --image debian'")
            })?;
            return Ok(NewObject { name, spec: complete(self.settings.spec()?) });
        };
        let mut catalogs = file::read::<S>(&file)?;
        let names = catalogs.iter().map(|new| new.name.as_str()).collect::<Vec<_>>().join(", ");
        let which = match &self.name {
            Some(name) => catalogs.iter().position(|new| new.name == *name),
            None => (catalogs.len() == 1).then_some(0),
        };
        let which = which.ok_or_else(|| {
            let file = file.display();
            Failure::usage(format!(
                "{file}: which catalog? It has {names} ('catalog apply' makes all of them)"
            ))
        })?;
        Ok(catalogs.swap_remove(which))
    }
}

impl Settings {
    fn spec(self) -> Result<CatalogSpec, Failure> {
        let image = self.image.ok_or_else(|| {
            Failure::usage("the catalog needs an image: give one with --image, such as --image debian")
        })?;
        let keys = self.authorized_keys.as_deref().map(file::text).transpose()?.unwrap_or_default();
        let keys = keys.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        Ok(CatalogSpec {
            image,
            residency: self.residency,
            count: self.count,
            kind: self.kind,
            disk: self.disk.settings(),
            ram_guarantee_bytes: self.ram_guarantee,
            overflow_store: self.overflow_store,
            verify_reads: self.verify_reads,
            data_disk_bytes: self.data_disk,
            data_disk_store: self.data_disk_store,
            scratch_disk_bytes: self.scratch_disk,
            scratch_format: self.scratch_format,
            hardware: self.hardware.hardware()?,
            naming: self.naming,
            reset: self.reset,
            ready: self.ready,
            grace_seconds: self.grace,
            warm: self.warm,
            claim_ttl_seconds: self.claim_ttl,
            autostart: self.autostart,
            start_order: self.start_order,
            start_delay_seconds: self.start_delay,
            user_data: self.user_data.as_deref().map(file::text).transpose()?,
            authorized_keys: keys.map(str::to_owned).collect(),
            labels: self.labels.into_iter().collect(),
            redacted: Vec::new(),
        })
    }
}
