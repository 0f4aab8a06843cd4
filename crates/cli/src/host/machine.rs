//! `spillway machine`.

use super::{Daemon, table};
use crate::error::Failure;
use clap::Subcommand;
use spillway_api::{List, Machine, Name};

/// What to do with machines.
#[derive(Debug, Subcommand)]
pub enum MachineCommand {
    /// List machines
    List {
        /// Those of this catalog
        #[arg(long, value_name = "NAME")]
        catalog: Option<Name>,
    },
    /// Show a machine
    Show {
        /// The machine
        name: Name,
    },
}

/// Does it.
pub fn machine(daemon: &Daemon, command: MachineCommand) -> Result<(), Failure> {
    let client = daemon.client()?;
    match command {
        MachineCommand::List { catalog } => {
            let which = catalog.map_or(String::new(), |catalog| format!("?catalog={catalog}"));
            let machines: List<Machine> = client.get(&format!("/v1/machines{which}"))?;
            daemon.show(&machines, |machines| rows(&machines.items))
        }
        MachineCommand::Show { name } => {
            let machine: Machine = client.get(&format!("/v1/machines/{name}"))?;
            daemon.show(&machine, |machine| rows(std::slice::from_ref(machine)))
        }
    }
}

fn rows(machines: &[Machine]) -> String {
    let rows = machines.iter().map(|machine| {
        let identity = &machine.identity;
        [machine.name.to_string(), machine.catalog.to_string(), identity.mac.clone(), identity.uuid.clone()]
    });
    table(["NAME", "CATALOG", "MAC", "UUID"], rows)
}
