//! `spillway fleet top`: where the I/O of all hosts goes, live. Owns how figures of hosts become rows; the screen is that of `top`.
//!
//! Invariant: a host that cannot be asked keeps its row, with its state.

use super::super::Daemon;
use crate::error::{Exit, Failure};
use crate::top::{self, Top};
use clap::{Args, ValueEnum};
use spillway_api::client::Client;
use spillway_api::{
    CatalogFigures, DiskCounters, DiskLevels, Figure, Figures, FleetFigures, HostFigures, MachineCounts, Name,
};
use std::collections::BTreeMap;

/// What a row of `fleet top` is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum FleetBy {
    /// A host
    #[default]
    Host,
    /// A catalog, on all hosts
    Catalog,
}

/// Options of `fleet top`.
#[derive(Debug, Args)]
#[group(skip)]
pub struct FleetTop {
    /// What a row is
    #[arg(long = "per", value_enum, default_value_t)]
    per: FleetBy,
    /// How rows are sorted and shown.
    #[command(flatten)]
    top: Top,
}

/// Shows it.
pub fn top(daemon: &Daemon, client: Client, args: FleetTop) -> Result<(), Failure> {
    let FleetTop { per, top } = args;
    let ask = move || {
        let figures: FleetFigures = client.get("/v1/fleet/figures")?;
        let none = || Failure::new(Exit::Unavailable, "no host of the fleet answers");
        joined(&figures, per).ok_or_else(none)
    };
    top::show(daemon, &top.by_catalog(), ask)
}

/// All hosts' figures as those of one host: a row is a catalog there. `None`: no host answers.
fn joined(fleet: &FleetFigures, per: FleetBy) -> Option<Figures> {
    let mut rows: BTreeMap<Name, CatalogFigures> = BTreeMap::new();
    for host in &fleet.hosts {
        if per == FleetBy::Host {
            rows.insert(host.host.clone(), empty(&host.host));
        }
        for catalog in host.figures.iter().flat_map(|figures| &figures.catalogs) {
            let name = if per == FleetBy::Host { &host.host } else { &catalog.name };
            add(rows.entry(name.clone()).or_insert_with(|| empty(name)), catalog);
        }
    }
    let known = || fleet.hosts.iter().filter_map(|host: &HostFigures| host.figures.as_ref());
    Some(Figures {
        time: known().map(|figures| figures.time).max()?,
        // A daemon that was started again counts anew: so do all sums.
        since: known().map(|figures| figures.since).max()?,
        catalogs: rows.into_values().collect(),
        machines: Vec::new(),
        stores: Vec::new(),
        stream: None,
    })
}

fn empty(name: &Name) -> CatalogFigures {
    CatalogFigures {
        name: name.clone(),
        machines: MachineCounts::default(),
        warm: 0,
        disks: 0,
        unresponsive_disks: 0,
        levels: DiskLevels::default(),
        counters: DiskCounters::default(),
        spared_bytes: 0,
        fullest: None,
        first_full: None,
    }
}

fn add(sum: &mut CatalogFigures, more: &CatalogFigures) {
    sum.machines.add(&more.machines);
    sum.warm = sum.warm.saturating_add(more.warm);
    sum.disks += more.disks;
    sum.unresponsive_disks += more.unresponsive_disks;
    sum.levels.add(&more.levels);
    sum.counters.add(&more.counters);
    sum.spared_bytes = sum.spared_bytes.saturating_add(more.spared_bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_api::HostState;

    fn host(name: &str, catalogs: &[(&str, u64)]) -> HostFigures {
        let of = |(catalog, stalls): &(&str, u64)| {
            let counters = DiskCounters { stalls: *stalls, ..DiskCounters::default() };
            CatalogFigures { counters, disks: 1, ..empty(&catalog.parse().unwrap()) }
        };
        let time = "2026-01-01T00:00:00Z".parse().unwrap();
        let catalogs = catalogs.iter().map(of).collect();
        let figures = Figures { time, since: time, catalogs, machines: vec![], stores: vec![], stream: None };
        HostFigures {
            host: name.parse().unwrap(),
            zone: "z".parse().unwrap(),
            state: HostState::Alive,
            figures: Some(figures),
            unreachable: None,
        }
    }

    #[test]
    fn a_row_is_the_sum_of_a_host_or_of_a_catalog() {
        let mut gone = host("c", &[]);
        (gone.figures, gone.unreachable) = (None, Some("it is gone".into()));
        let fleet = FleetFigures {
            hosts: vec![host("a", &[("desk", 1), ("lab", 2)]), host("b", &[("desk", 4)]), gone],
        };
        let rows = |per| -> Vec<(String, u64, u64)> {
            let joined = joined(&fleet, per).unwrap();
            joined.catalogs.iter().map(|row| (row.name.to_string(), row.counters.stalls, row.disks)).collect()
        };
        let row = |name: &str, stalls, disks| (name.to_owned(), stalls, disks);
        assert_eq!(rows(FleetBy::Host), [row("a", 3, 2), row("b", 4, 1), row("c", 0, 0)]);
        assert_eq!(rows(FleetBy::Catalog), [row("desk", 5, 2), row("lab", 2, 1)]);
    }
}
