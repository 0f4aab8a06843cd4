//! `spillway fleet registry`. Decides nothing, and shows what the daemon answers.

use super::FLEET;
use crate::error::Failure;
use crate::host::Daemon;
use crate::host::registry::{Add, show};
use clap::Subcommand;
use spillway_api::client::Client;
use spillway_api::{Empty, List, Name, Registry};

const ADD: &str = "\
The host that is asked tries the address and the credentials, and makes an empty place a registry. The other hosts use the registry
when they need an image from it, under this name. A host that has a registry of its own with this name and another address refuses the
fleet's images from it: remove the host's ('spillway registry remove').

The file of --credentials is not copied: each host needs one, at the same path. The fleet keeps only the path.

A registry that was added cannot be changed: remove it, and add it again.

Examples:
  spillway fleet registry add hub s3://images/golden --endpoint https://s3.example.org --credentials /etc/spillway/hub
  spillway fleet registry add share file:///srv/images";

const REMOVE: &str = "\
It is refused while the fleet has an image from the registry. Hosts that know the registry keep it.

Example:
  spillway fleet registry remove hub";

/// What to do with registries of the fleet.
#[derive(Debug, Subcommand)]
pub enum FleetRegistryCommand {
    /// Add a registry for all hosts of the fleet
    #[command(after_help = ADD)]
    Add(Add),
    /// List registries of the fleet
    List,
    /// Remove a registry from the fleet; what is in it stays
    #[command(after_help = REMOVE)]
    Remove {
        /// The registry
        #[arg(value_name = "REGISTRY")]
        name: Name,
    },
}

/// Does it.
pub fn registry(daemon: &Daemon, client: &Client, command: FleetRegistryCommand) -> Result<(), Failure> {
    let path = format!("{FLEET}/registries");
    match command {
        FleetRegistryCommand::Add(add) => {
            let added: Registry = client.post(&path, &add.registry(daemon)?)?;
            show(daemon, &List { items: vec![added] })
        }
        FleetRegistryCommand::List => show(daemon, &client.get(&path)?),
        FleetRegistryCommand::Remove { name } => {
            let removed: Empty = client.delete(&format!("{path}/{name}"))?;
            daemon
                .show(&removed, |_| format!("{name} is removed from the fleet; hosts that know it keep it\n"))
        }
    }
}
