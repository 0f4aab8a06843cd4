//! `spillway catalog`.

use super::words::{NetworkWord, word, words};
use super::{Daemon, table};
use crate::error::Failure;
use crate::output;
use clap::{Args, Subcommand};
use spillway_api::{
    BaseCache, Catalog, CatalogKind, CatalogSpec, DiskMode, Empty, FullPolicy, ImageRef, List, Name,
    NewCatalog, ResetEvent, parse_size,
};
use std::collections::BTreeMap;

/// The words of options, as the interface has them.
pub const MODES: &[&str] = &["ram+overflow", "ram", "overflow", "direct", "ephemeral", "persistent"];
/// Types.
pub const KINDS: &[&str] = &["pooled", "dedicated"];
/// Policies.
pub const FULL: &[&str] = &["pause", "fail"];
/// How the image is read.
pub const BASE_CACHES: &[&str] = &["host", "none"];
/// What resets.
pub const RESETS: &[&str] = &["power-cycle", "guest-reboot", "never"];

/// What to do with catalogs.
#[derive(Debug, Subcommand)]
pub enum CatalogCommand {
    /// Make a catalog: so many machines of an image
    Create(Box<Create>),
    /// List catalogs
    List,
    /// Show a catalog and all its settings
    Show {
        /// The catalog
        name: Name,
    },
    /// Change how many machines there are: those with the highest numbers go
    Scale {
        /// The catalog
        name: Name,
        /// How many
        count: u32,
    },
    /// Delete a catalog and its machines
    Delete {
        /// The catalog
        name: Name,
    },
}

/// Options of `catalog create`.
#[derive(Debug, Args)]
pub struct Create {
    /// Its name
    pub name: Name,
    /// The image: debian follows the published version, debian:2 does not
    #[arg(long, value_name = "IMAGE[:VERSION]")]
    image: ImageRef,
    /// How many machines
    #[arg(long, default_value_t = 0)]
    count: u32,
    /// pooled machines forget what is written, dedicated ones keep it
    #[arg(long = "type", value_parser = words::<CatalogKind>(KINDS), default_value = "pooled")]
    kind: CatalogKind,
    /// Where disks' writes go [default: ram+overflow; of dedicated machines persistent]
    #[arg(long, value_parser = words::<DiskMode>(MODES))]
    mode: Option<DiskMode>,
    /// Limit of a disk's RAM tier [default: 256M, in modes that have one]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    ram: Option<u64>,
    /// What of it a disk always has
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    ram_guarantee: u64,
    /// Limit of a disk's overflow file [default: 10G, in modes that have one]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    overflow: Option<u64>,
    /// The store for overflow files [default: the first of class local]
    #[arg(long, value_name = "STORE")]
    overflow_store: Option<Name>,
    /// What happens to a write when the cache is full
    #[arg(long, value_name = "POLICY", value_parser = words::<FullPolicy>(FULL), default_value = "pause")]
    full: FullPolicy,
    /// Read the image through the host's page cache, or past it
    #[arg(long, value_name = "HOW", value_parser = words::<BaseCache>(BASE_CACHES), default_value = "host")]
    base_cache: BaseCache,
    /// Processors of a machine
    #[arg(long, value_name = "N", default_value_t = 1)]
    vcpus: u32,
    /// Memory of a machine
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "1G")]
    memory: u64,
    /// user, none or bridge=NAME
    #[arg(long, default_value = "user")]
    network: NetworkWord,
    /// Names of machines, with # for a digit of the number [default: its name and three digits]
    #[arg(long, value_name = "PATTERN")]
    naming: Option<String>,
    /// What throws away what a machine has written
    #[arg(long, value_name = "EVENT", value_parser = words::<ResetEvent>(RESETS), default_value = "power-cycle")]
    reset: ResetEvent,
    /// Machines that are kept started, ready and unclaimed
    #[arg(long, value_name = "N", default_value_t = 0)]
    warm: u32,
    /// Start its machines when spillwayd starts
    #[arg(long)]
    autostart: bool,
    /// For people and selectors; again for more
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(Name, String)>,
}

fn label(text: &str) -> Result<(Name, String), String> {
    let (key, value) = text.split_once('=').ok_or("a label is KEY=VALUE")?;
    Ok((key.parse().map_err(|e| format!("{e}"))?, value.to_owned()))
}

impl Create {
    fn request(self) -> NewCatalog {
        let spec = CatalogSpec {
            image: self.image,
            count: self.count,
            kind: self.kind,
            mode: self.mode,
            ram_bytes: self.ram,
            ram_guarantee_bytes: self.ram_guarantee,
            overflow_bytes: self.overflow,
            overflow_store: self.overflow_store,
            full: self.full,
            base_cache: self.base_cache,
            vcpus: self.vcpus,
            memory_bytes: self.memory,
            network: self.network.0,
            naming: self.naming,
            reset: self.reset,
            warm: self.warm,
            autostart: self.autostart,
            labels: self.labels.into_iter().collect::<BTreeMap<_, _>>(),
        };
        NewCatalog { name: self.name, spec }
    }
}

/// Does it.
pub fn catalog(daemon: &Daemon, command: CatalogCommand) -> Result<(), Failure> {
    let client = daemon.client()?;
    match command {
        CatalogCommand::Create(create) => {
            let created: Catalog = client.post("/v1/catalogs", &create.request())?;
            warn(&created);
            show(daemon, &created)
        }
        CatalogCommand::List => {
            let catalogs: List<Catalog> = client.get("/v1/catalogs")?;
            daemon.show(&catalogs, |catalogs| {
                let rows = catalogs.items.iter().map(|catalog| {
                    let spec = &catalog.spec;
                    let mode = spec.mode.map_or("-".into(), |mode| word(&mode));
                    let image = format!("{}:{}", spec.image.name, catalog.version);
                    [catalog.name.to_string(), image, spec.count.to_string(), word(&spec.kind), mode]
                });
                table(["NAME", "IMAGE", "MACHINES", "TYPE", "MODE"], rows)
            })
        }
        CatalogCommand::Show { name } => show(daemon, &client.get(&format!("/v1/catalogs/{name}"))?),
        CatalogCommand::Scale { name, count } => {
            let path = format!("/v1/catalogs/{name}");
            let found: Catalog = client.get(&path)?;
            let changed: Catalog = client.put(&path, &CatalogSpec { count, ..found.spec })?;
            warn(&changed);
            daemon.show(&changed, |changed| format!("{} has {} machines\n", changed.name, changed.spec.count))
        }
        CatalogCommand::Delete { name } => {
            client.delete::<Empty>(&format!("/v1/catalogs/{name}"))?;
            output::print(&format!("{name} is deleted\n")).map(drop)
        }
    }
}

fn warn(catalog: &Catalog) {
    catalog.warnings.iter().for_each(|warning| output::complain("warning", warning));
}

/// All of it: the settings are the ones that a file for the interface has.
fn show(daemon: &Daemon, catalog: &Catalog) -> Result<(), Failure> {
    daemon.show(catalog, |catalog| {
        let settings = serde_json::to_value(&catalog.spec).expect("settings are plain data");
        let rows = settings.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
        let mut text = format!(
            "{}, machines take {}:{} at their next start\n\n",
            catalog.name, catalog.spec.image.name, catalog.version
        );
        text += &table(["SETTING", "VALUE"], rows.map(|(name, value)| [name.clone(), plain(value)]));
        text.push('\n');
        let history = catalog.history.iter().map(|entry| {
            [format!("{}:{}", entry.image, entry.version), entry.since.strftime("%Y-%m-%d %H:%M").to_string()]
        });
        text + &table(["HISTORY", "SINCE"], history)
    })
}

fn plain(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
