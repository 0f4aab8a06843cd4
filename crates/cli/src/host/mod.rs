//! Commands that send requests to `spillwayd`. Owns the mapping of its errors to exit codes, and the format of lists.
//!
//! Invariant: nothing is decided here; the daemon's response is shown.

mod catalog;
mod claim;
mod console;
mod daemon;
mod event;
mod fleet;
mod image;
mod itself;
mod leftover;
pub mod libvirt;
mod machine;
mod operation;
mod progress;
mod registry;
mod sign;
mod store;
pub mod words;

pub use words::word;

pub use catalog::{CatalogCommand, catalog};
pub use daemon::{Daemon, GlobalDaemonOptions, only_local};
pub use event::{Events, event};
pub use fleet::{FleetCommand, fleet};
pub use image::{ImageCommand, image};
pub use itself::{HostCommand, host};
pub use leftover::{LeftoverCommand, leftover};
pub use libvirt::{LibvirtCommand, libvirt};
pub use machine::{MachineCommand, machine};
pub use operation::{OperationCommand, operation};
pub use registry::{RegistryCommand, registry};
pub use store::{StoreCommand, store};

use crate::error::Failure;
use clap::Args;
use comfy_table::{Table, presets};
use spillway_api::Name;
use spillway_api::client::{self, ClientError};
use std::collections::BTreeMap;

/// Which objects of a list.
#[derive(Debug, Args)]
pub struct Labels {
    /// Only objects with this label; if given several times, with all of them
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = words::label)]
    labels: Vec<(Name, String)>,
}

/// How much of a list.
#[derive(Clone, Copy, Debug, Args)]
pub struct Limit {
    /// Show the first N at most [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
}

impl Limit {
    /// Number of objects that are shown at most.
    fn most(self) -> usize {
        self.limit.map_or(usize::MAX, |limit| limit as usize)
    }
}

impl Labels {
    /// Whether an object with these labels is one of them, for lists that the daemon does not filter.
    fn fit(&self, labels: &BTreeMap<Name, String>) -> bool {
        self.labels.iter().all(|(key, value)| labels.get(key) == Some(value))
    }

    /// Builds the query, with further parameters.
    fn query<'a>(&self, more: impl IntoIterator<Item = (&'a str, String)>) -> String {
        let labels = self.labels.iter().map(|(key, value)| ("label", format!("{key}={value}")));
        client::query(more.into_iter().chain(labels))
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        Failure::new(error.exit(), error.to_string())
    }
}

/// Formats a table with a heading and without frames, as other tools do.
pub fn table<const N: usize>(columns: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(columns);
    rows.into_iter().for_each(|row| _ = table.add_row(row));
    table.column_iter_mut().for_each(|column| _ = column.set_padding((0, 2)));
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}
