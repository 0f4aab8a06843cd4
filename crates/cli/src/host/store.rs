//! `spillway store`.

use super::{Daemon, table};
use crate::error::Failure;
use clap::Subcommand;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use spillway_api::{List, Name, StoreClass, StoreDetails, StoreFolder};
use spillway_control::bytes;
use std::path::PathBuf;

/// What to do with stores.
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// List stores
    List,
    /// Add a folder in which spillwayd keeps images or disks
    Add {
        /// Name of the store
        name: Name,
        /// Absolute path of the folder, which is created if necessary
        path: PathBuf,
        /// Class of the store: shared (images), local (images, disks), cache and temp (private copies)
        #[arg(long, value_parser = class())]
        class: StoreClass,
    },
}

const CLASSES: [(&str, StoreClass); 4] = [
    ("shared", StoreClass::Shared),
    ("local", StoreClass::Local),
    ("cache", StoreClass::Cache),
    ("temp", StoreClass::Temp),
];

fn class() -> impl TypedValueParser<Value = StoreClass> {
    PossibleValuesParser::new(CLASSES.map(|(word, _)| word))
        .map(|word| CLASSES.iter().find(|(known, _)| *known == word).expect("no other word is possible").1)
}

/// Does it.
pub fn store(daemon: &Daemon, command: StoreCommand) -> Result<(), Failure> {
    let client = daemon.client()?;
    let stores = match command {
        StoreCommand::List => client.list::<StoreDetails>("/v1/stores")?,
        StoreCommand::Add { name, path, class } => {
            let folder = client.post("/v1/stores", &StoreFolder { name, path, class })?;
            List { items: vec![StoreDetails::new(folder, None)] }
        }
    };
    daemon.show(&stores, |stores| {
        let rows = stores.items.iter().map(|store| {
            let class = CLASSES.iter().find(|(_, class)| *class == store.class).map_or("", |(word, _)| word);
            let free = store.space.as_ref().map_or("-".into(), |space| {
                format!("{} of {}", bytes(space.free_bytes), bytes(space.total_bytes))
            });
            [store.name.to_string(), class.to_owned(), free, store.path.display().to_string()]
        });
        table(["NAME", "CLASS", "FREE", "FOLDER"], rows)
    })
}
