//! The command line: its options, what they mean, and which of them go together. Never opens anything.
//!
//! Invariant: an option that would have no effect is an error, so that nobody believes in one that does nothing.

use crate::error::{EXIT_CODES, Failure};
use crate::examples::{
    ATTACH_EXAMPLES, DOCTOR_EXAMPLES, EVENTS_EXAMPLES, RESET_EXAMPLES, RUN_EXAMPLES, SERVE_EXAMPLES,
    SET_EXAMPLES, STATS_EXAMPLES, TOP_EXAMPLES, UPGRADE_EXAMPLES,
};
use crate::host::{CatalogCommand, Daemon, ImageCommand, MachineCommand, OperationCommand, StoreCommand};
use crate::man::Man;
use crate::token::TokenCommand;
use crate::top::Top;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use spillway_worker::supervisor::{BaseCache, Dirty, FullPolicy, ImageFormat, Mode, Options};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

const WARN_DEFAULT: u8 = 80;
const CRITICAL_DEFAULT: u8 = 90;
const RAM_DEFAULT: u64 = 256 << 20;
const OVERFLOW_DEFAULT: u64 = 10 << 30;
const OVERFLOW_DIR_DEFAULT: &str = "/var/tmp";
/// Queues offered when nothing is said: QEMU asks for one per vCPU.
const QUEUES_DEFAULT: u16 = 16;
const MAX_QUEUES: i64 = 64;
const SOCKET_MODE_DEFAULT: u32 = 0o600;
/// In mode `ephemeral` the disk is a copy of one.
const NEED_AN_IMAGE: [(&str, &str); 5] = [
    ("mode", "ram+overflow"),
    ("mode", "ram"),
    ("mode", "overflow"),
    ("mode", "direct"),
    ("mode", "persistent"),
];

/// Disposable disks for virtual machines: a shared, read-only base image, a bounded RAM write cache, and an
/// overflow to local disk.
#[derive(Debug, Parser)]
#[command(name = "spillway", version, after_help = format!("{EXAMPLES}\n\n{EXIT_CODES}"))]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  Boot a throw-away machine from an image, in this terminal:
    spillway run --image debian.qcow2
  Serve a disk to a VMM, with figures at any time:
    spillway serve --image debian.raw --vhost-user /run/vm1.sock --control /run/vm1.ctl
    spillway attach --vhost-user /run/vm1.sock --for qemu
    spillway stats /run/vm1.ctl --watch";

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve one disk until SIGTERM or Ctrl-C
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(Serve),
    /// Boot a virtual machine on a disk, its serial console in this terminal
    #[command(after_help = RUN_EXAMPLES)]
    Run(Run),
    /// Show where the I/O of a disk went
    #[command(after_help = STATS_EXAMPLES)]
    Stats(Stats),
    /// Throw away everything written since the image: a new generation of the disk
    #[command(after_help = RESET_EXAMPLES)]
    Reset(Reset),
    /// Change the limits of a disk while it is used
    #[command(after_help = SET_EXAMPLES)]
    Set(Set),
    /// Follow what happens to a disk: full, nearly full, degraded, restarted...
    #[command(after_help = EVENTS_EXAMPLES)]
    Events(Events),
    /// Let another version serve a disk while its machine goes on
    #[command(after_help = UPGRADE_EXAMPLES)]
    Upgrade(Upgrade),
    /// Catalogs: so many machines of an image
    Catalog {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: CatalogCommand,
    },
    /// Machines of catalogs
    Machine {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: MachineCommand,
    },
    /// Images and their versions, kept by spillwayd
    Image {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: ImageCommand,
    },
    /// What goes on in spillwayd: imports, checks of digests
    Operation {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: OperationCommand,
    },
    /// Folders that spillwayd keeps images and disks in
    Store {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: StoreCommand,
    },
    /// Show where the I/O of all machines goes, live
    #[command(after_help = TOP_EXAMPLES)]
    Top {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// How.
        #[command(flatten)]
        top: Top,
    },
    /// Look whether this host has what machines and disks need, and say what to do
    #[command(after_help = DOCTOR_EXAMPLES)]
    Doctor {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
    },
    /// Tokens for those who ask spillwayd over TCP
    Token {
        /// What to do.
        #[command(subcommand)]
        command: TokenCommand,
    },
    /// Print what to paste into a VMM's configuration
    #[command(after_help = ATTACH_EXAMPLES)]
    Attach(Attach),
    /// Print the completion script for a shell
    #[command(after_help = "Example:\n  spillway completion bash > /etc/bash_completion.d/spillway")]
    Completion {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Write the man pages, one for each command
    #[command(after_help = "Example:\n  spillway man /usr/local/share/man/man1")]
    Man(Man),
}

/// A disk and its sockets: the options that `serve` and `run` share.
#[derive(Debug, Args)]
pub struct Disk {
    /// Base image: shared, only read (all modes but ephemeral)
    #[arg(long, value_name = "PATH", required_if_eq_any = NEED_AN_IMAGE)]
    pub image: Option<PathBuf>,
    /// Format of the image [default: by the extension .raw or .qcow2]
    #[arg(long, value_name = "FORMAT", value_parser = format())]
    pub format: Option<ImageFormat>,
    /// Size of the disk; larger than the image, the rest reads as zeroes [default: the image's]
    #[arg(long, value_parser = spillway_api::parse_size)]
    pub size: Option<u64>,
    /// Where writes go
    #[arg(long, value_parser = mode(), default_value = "ram+overflow")]
    pub mode: Mode,
    /// The disk's own file: kept, and made if it is not there (mode persistent); a raw copy of the image, which goes
    /// with the disk (mode ephemeral)
    #[arg(long, value_name = "PATH", required_if_eq_any = [("mode", "persistent"), ("mode", "ephemeral")])]
    pub disk: Option<PathBuf>,
    /// Which image it is, so that the disk is never put on another (mode persistent) [default: its size and time]
    #[arg(long, value_name = "TEXT")]
    pub image_id: Option<String>,
    /// Read the image through the host's page cache, or past it [default: host]
    #[arg(long, value_name = "HOW", value_parser = base_cache())]
    pub base_cache: Option<BaseCache>,
    /// Limit of the RAM tier (modes ram+overflow, ram) [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size)]
    pub ram: Option<u64>,
    /// Limit of the overflow file (modes ram+overflow, overflow) [default: 10G]
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size)]
    pub overflow: Option<u64>,
    /// Directory on a local disk for the overflow file (modes ram+overflow, overflow, direct) [default: /var/tmp]
    #[arg(long, value_name = "DIR")]
    pub overflow_dir: Option<PathBuf>,
    /// What happens to a write when the cache is full (modes ram+overflow, ram, overflow) [default: pause]
    #[arg(long, value_name = "POLICY", value_parser = full())]
    pub full: Option<FullPolicy>,
    /// Warn when so much of the write cache is used (modes ram+overflow, ram, overflow) [default: 80]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub warn_at: Option<u8>,
    /// Call it critical when so much is used (modes ram+overflow, ram, overflow) [default: 90]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub critical_at: Option<u8>,
    /// Socket for a VMM
    #[arg(long, value_name = "SOCK")]
    pub vhost_user: Option<PathBuf>,
    /// Request queues offered to the VMM [default: 16; with run as many as --vcpus]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_QUEUES))]
    pub queues: Option<u16>,
    /// Socket for NBD clients
    #[arg(long, value_name = "SOCK")]
    pub nbd: Option<PathBuf>,
    /// Socket for 'spillway stats', 'reset', 'set', 'events' and 'upgrade'
    #[arg(long, value_name = "SOCK")]
    pub control: Option<PathBuf>,
    /// Rights of the sockets [default: 0600]
    #[arg(long, value_name = "MODE", value_parser = socket_mode)]
    pub socket_mode: Option<u32>,
    /// Group of the sockets, by name or number [default: this process's]
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
}

/// Options of `serve`.
#[derive(Debug, Args)]
pub struct Serve {
    #[command(flatten)]
    pub disk: Disk,
    /// Print one JSON object when ready
    #[arg(long)]
    pub json: bool,
}

/// Options of `run`.
#[derive(Debug, Args)]
pub struct Run {
    #[command(flatten)]
    pub disk: Disk,
    /// Memory of the machine
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size, default_value = "1G")]
    pub memory: u64,
    /// Processors of the machine
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_QUEUES), default_value_t = 1)]
    pub vcpus: u16,
    /// Kernel to boot instead of the disk's boot loader
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Its initrd
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initrd: Option<PathBuf>,
    /// Its command line
    #[arg(long, value_name = "STRING", requires = "kernel", allow_hyphen_values = true)]
    pub append: Option<String>,
    /// More arguments for QEMU
    #[arg(last = true, value_name = "QEMU ARGS")]
    pub qemu: Vec<OsString>,
}

/// Options of `stats`.
#[derive(Debug, Args)]
pub struct Stats {
    /// Control socket of the disk
    #[arg(value_name = "SOCK")]
    pub control: PathBuf,
    /// All figures as JSON
    #[arg(long, conflicts_with = "prometheus")]
    pub json: bool,
    /// All figures as Prometheus text, once
    #[arg(long)]
    pub prometheus: bool,
    /// Only the figures that users of MCS storage optimization know, by their names (table or --json)
    #[arg(long, value_name = "NAMES")]
    pub names: Option<Names>,
    /// Again every second until Ctrl-C: a table with rates, or with --json an object a line
    #[arg(long)]
    pub watch: bool,
    /// Where the guest wrote most since the last reset, to find what fills the cache (table or --json)
    #[arg(long, conflicts_with_all = ["prometheus", "names", "watch"])]
    pub dirty: bool,
    /// With --dirty: how many ranges, most first [default: 20]
    #[arg(long, value_name = "N", requires = "dirty", value_parser = clap::value_parser!(u32).range(1..=i64::from(Dirty::MAX_ROWS)))]
    pub top: Option<u32>,
}

/// Vocabularies of figures.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Names {
    /// Citrix MCS Storage Driver
    Mcsio,
}

/// Options of `reset`.
#[derive(Debug, Args)]
pub struct Reset {
    /// Control socket of the disk
    #[arg(value_name = "SOCK")]
    pub control: PathBuf,
    /// Complete what was accepted and disconnect all clients first
    #[arg(long)]
    pub force: bool,
    /// In mode persistent: throw away the data that is kept
    #[arg(long)]
    pub discard_data: bool,
}

/// Options of `set`.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("what").required(true).multiple(true)
    .args(["ram", "overflow", "full", "warn_at", "critical_at"])))]
pub struct Set {
    /// Control socket of the disk
    #[arg(value_name = "SOCK")]
    pub control: PathBuf,
    /// Limit of the RAM tier: less is evicted and given back, more counts at once
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size)]
    pub ram: Option<u64>,
    /// Limit of the overflow file
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size)]
    pub overflow: Option<u64>,
    /// What happens to a write when the cache is full, those that wait now included
    #[arg(long, value_name = "POLICY", value_parser = full())]
    pub full: Option<FullPolicy>,
    /// Warn when so much of the write cache is used
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub warn_at: Option<u8>,
    /// Call it critical when so much is used
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub critical_at: Option<u8>,
    /// Print the limits that hold now as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Options of `events`.
#[derive(Debug, Args)]
pub struct Events {
    /// Control socket of the disk
    #[arg(value_name = "SOCK")]
    pub control: PathBuf,
    /// One JSON object a line: kind, text, unix_ms
    #[arg(long)]
    pub json: bool,
}

/// Options of `upgrade`.
#[derive(Debug, Args)]
pub struct Upgrade {
    /// Control socket of the disk
    #[arg(value_name = "SOCK")]
    pub control: PathBuf,
    /// The program that is to serve [default: this one]
    #[arg(long, value_name = "PATH")]
    pub binary: Option<PathBuf>,
    /// Print one JSON object: version, worker_pid, pause_ms
    #[arg(long)]
    pub json: bool,
}

/// Options of `attach`.
#[derive(Debug, Args)]
pub struct Attach {
    /// Socket that 'spillway serve' was given
    #[arg(long, value_name = "SOCK")]
    pub vhost_user: PathBuf,
    /// Which VMM
    #[arg(long = "for", value_name = "VMM")]
    pub vmm: Vmm,
}

/// VMMs that can take a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Vmm {
    Qemu,
    Libvirt,
    CloudHypervisor,
    Firecracker,
}

fn mode() -> impl TypedValueParser<Value = Mode> {
    PossibleValuesParser::new(Mode::ALL.map(Mode::name)).try_map(|word| word.parse())
}

fn full() -> impl TypedValueParser<Value = FullPolicy> {
    PossibleValuesParser::new([FullPolicy::Pause.name(), FullPolicy::Fail.name()])
        .try_map(|word| word.parse())
}

fn format() -> impl TypedValueParser<Value = ImageFormat> {
    PossibleValuesParser::new(["raw", "qcow2"]).map(|word| match word.as_str() {
        "raw" => ImageFormat::Raw,
        _ => ImageFormat::Qcow2,
    })
}

fn base_cache() -> impl TypedValueParser<Value = BaseCache> {
    PossibleValuesParser::new(["host", "none"]).map(|word| match word.as_str() {
        "host" => BaseCache::Host,
        _ => BaseCache::None,
    })
}

fn socket_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text.strip_prefix("0o").unwrap_or(text), 8) {
        Ok(mode) if mode <= 0o777 && !text.starts_with('+') => Ok(mode),
        _ => Err("rights are an octal number up to 0777, such as 0660".into()),
    }
}

impl Disk {
    /// The supervisor's options, or why these do not go together.
    pub fn options(&self) -> Result<Options, Failure> {
        let mode = self.mode;
        let unused = [
            ("--ram", self.ram.is_some() && !mode.has_ram(), "it has no RAM tier"),
            (
                "--overflow",
                self.overflow.is_some() && !mode.has_log(),
                match mode.writes_in_place() {
                    true => "its file is as large as the disk",
                    false => "it has no overflow",
                },
            ),
            (
                "--overflow-dir",
                self.overflow_dir.is_some() && (mode.has_named_file() || !mode.has_file()),
                match mode.has_named_file() {
                    true => "its file is that of --disk",
                    false => "it has no overflow",
                },
            ),
            ("--full", self.full.is_some() && mode.writes_in_place(), "its limit is the file system's"),
            ("--warn-at", self.warn_at.is_some() && mode.writes_in_place(), "it has no write cache"),
            ("--critical-at", self.critical_at.is_some() && mode.writes_in_place(), "it has no write cache"),
            ("--image", self.image.is_some() && mode == Mode::Ephemeral, "its disk is a full copy of one"),
            ("--format", self.format.is_some() && mode == Mode::Ephemeral, "its disk is raw"),
            (
                "--base-cache",
                self.base_cache.is_some() && mode == Mode::Ephemeral,
                "it has no image to read, and its disk is read past the cache",
            ),
            ("--disk", self.disk.is_some() && !mode.has_named_file(), "it has no file that is kept"),
            (
                "--image-id",
                self.image_id.is_some() && mode != Mode::Persistent,
                "it knows no image of an earlier start",
            ),
        ];
        if let Some((option, _, why)) = unused.into_iter().find(|(_, given, _)| *given) {
            return Err(Failure::usage(format!(
                "{option} is not for --mode {mode}: {why}: leave {option} out or choose another mode"
            )));
        }
        for (i, (option, path)) in self.sockets().enumerate() {
            if let (Some(path), Some((other, _))) = (path, self.sockets().take(i).find(|(_, p)| *p == path)) {
                return Err(Failure::usage(format!(
                    "{other} and {option} are both {}: give each a socket of its own",
                    path.display()
                )));
            }
        }
        // One that is given moves the other's default out of its way.
        let warn_at = self.warn_at.unwrap_or(self.critical_at.unwrap_or(100).min(WARN_DEFAULT));
        let critical_at = self.critical_at.unwrap_or(warn_at.max(CRITICAL_DEFAULT));
        if warn_at > critical_at {
            return Err(Failure::usage(format!(
                "--warn-at {warn_at} is above --critical-at {critical_at}: the warning comes first"
            )));
        }
        if self.socket_group.as_deref() == Some("") {
            return Err(Failure::usage("--socket-group is empty: name a group or leave it out"));
        }
        let image = self
            .image
            .as_ref()
            .or(self.disk.as_ref())
            .ok_or_else(|| Failure::usage("nothing to serve: name the base image with --image"))?;
        Ok(Options {
            image: image.clone(),
            disk: self.disk.clone(),
            image_id: self.image_id.clone(),
            format: self.format,
            base_cache: self.base_cache.unwrap_or(BaseCache::Host),
            size_bytes: self.size,
            mode,
            full: self.full.unwrap_or(FullPolicy::Pause),
            warn_at,
            critical_at,
            ram_limit_bytes: self.ram.unwrap_or(RAM_DEFAULT),
            overflow_limit_bytes: self.overflow.unwrap_or(OVERFLOW_DEFAULT),
            overflow_dir: self.overflow_dir.clone().unwrap_or_else(|| Path::new(OVERFLOW_DIR_DEFAULT).into()),
            queues: self.queues.unwrap_or(QUEUES_DEFAULT),
            vhost_user: self.vhost_user.clone(),
            nbd: self.nbd.clone(),
            control: self.control.clone(),
            socket_mode: self.socket_mode.unwrap_or(SOCKET_MODE_DEFAULT),
            socket_group: self.socket_group.clone(),
            identity: self.identity().unwrap_or(image).clone(),
        })
    }

    /// What is the same at each start of the disk, and no other's.
    fn identity(&self) -> Option<&PathBuf> {
        // A persistent disk may be served elsewhere.
        let own = self.disk.as_ref().filter(|_| self.mode == Mode::Persistent);
        own.or_else(|| self.sockets().find_map(|(_, path)| path.as_ref()))
    }

    /// The sockets that other programs connect to.
    fn sockets(&self) -> impl Iterator<Item = (&'static str, &Option<PathBuf>)> {
        [("--vhost-user", &self.vhost_user), ("--nbd", &self.nbd), ("--control", &self.control)].into_iter()
    }
}

impl Serve {
    /// As [`Disk::options`], with at least one way in.
    pub fn options(&self) -> Result<Options, Failure> {
        if self.disk.vhost_user.is_none() && self.disk.nbd.is_none() {
            return Err(Failure::usage(
                "nobody could reach this disk: give --vhost-user SOCK for a VMM, --nbd SOCK for NBD clients, or both",
            ));
        }
        if self.disk.queues.is_some() && self.disk.vhost_user.is_none() {
            return Err(Failure::usage("--queues is for --vhost-user: leave it out or give both"));
        }
        self.disk.options()
    }
}

impl Run {
    /// As [`Disk::options`], for a machine of our own.
    pub fn options(&self) -> Result<Options, Failure> {
        if self.memory == 0 || !self.memory.is_multiple_of(1 << 20) {
            return Err(Failure::usage(
                "--memory is not a whole number of MiB: write, for instance, 1G or 512M",
            ));
        }
        let disk = &self.disk;
        if disk.sockets().all(|(_, path)| path.is_none()) {
            let rights = [
                ("--socket-mode", disk.socket_mode.is_some()),
                ("--socket-group", disk.socket_group.is_some()),
            ];
            if let Some((option, _)) = rights.into_iter().find(|(_, given)| *given) {
                return Err(Failure::usage(format!(
                    "{option} is for sockets that others connect to: give --vhost-user, --nbd or --control, or \
                     leave {option} out"
                )));
            }
        }
        Ok(Options { queues: self.queues(), ..disk.options()? })
    }

    /// Request queues between the machine and its disk.
    pub fn queues(&self) -> u16 {
        self.disk.queues.unwrap_or(self.vcpus)
    }
}

impl Stats {
    /// Whether these go together.
    pub fn check(&self) -> Result<(), Failure> {
        let refuse = |option: &str, why: &str| {
            Err(Failure::usage(format!("{option} is not for --prometheus: {why}: leave one of them out")))
        };
        match self.prometheus {
            true if self.names.is_some() => refuse("--names", "those are no names that Prometheus takes"),
            true if self.watch => refuse("--watch", "a scrape is of one moment, and who scrapes repeats it"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_commands_are_well_formed() {
        Cli::command().debug_assert();
    }

    fn run(more: &[&str]) -> Options {
        let words = ["spillway", "run", "--image", "i.raw"].iter().chain(more);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Run(args) => args.options().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_machine_has_the_same_disk_at_each_start() {
        // Its private socket has another path each time.
        assert_eq!(run(&[]).identity, Path::new("i.raw"));
        assert_eq!(run(&["--control", "c"]).identity, Path::new("c"));
        assert_eq!(run(&["--control", "c", "--vhost-user", "v"]).identity, Path::new("v"));
    }

    #[test]
    fn a_machine_has_a_queue_for_each_processor_unless_told_otherwise() {
        assert_eq!(run(&[]).queues, 1);
        assert_eq!(run(&["--vcpus", "4"]).queues, 4);
        assert_eq!(run(&["--vcpus", "4", "--queues", "2"]).queues, 2);
    }

    #[test]
    fn rights_are_octal() {
        assert_eq!(socket_mode("0660"), Ok(0o660));
        assert_eq!(socket_mode("600"), Ok(0o600));
        for bad in ["", "0888", "1777", "rw", "+600", "-1"] {
            assert!(socket_mode(bad).is_err(), "{bad}");
        }
    }
}
