//! The records as placing needs them: hosts with what is left of their budgets, and the shares of each catalog. Owns the order of hosts
//! and catalogs, by which all else refers to them.
//!
//! Invariant: what a host has of a catalog counts even if its share has fallen: claimed machines stay until they are released.

use super::Situation;
use super::space::Amounts;
use crate::keys::Key;
use crate::liveness::Standing;
use crate::records::{CatalogRecord, CatalogStatus, HostRecord, ShareRecord, StatusRecord};
use crate::transaction::Revision;
use crate::view::{FleetView, Versioned};
use spillway_api::{Hypervisor, IdentityKind, Name, Need};
use std::collections::{BTreeMap, BTreeSet};

pub(super) struct Host<'a> {
    pub(super) name: &'a Name,
    /// None: there is no record of it, or none that can be read.
    pub(super) record: Option<&'a HostRecord>,
    pub(super) zone: usize,
    pub(super) standing: Standing,
    pub(super) status: Option<&'a StatusRecord>,
    pub(super) budget: Amounts,
    pub(super) left: Amounts,
    pub(super) hypervisor: Hypervisor,
}

/// What a host has, and is to have, of a catalog.
#[derive(Clone, Copy)]
pub(super) struct Cell<'a> {
    pub(super) host: usize,
    /// The share as the records have it.
    pub(super) share: Option<&'a ShareRecord>,
    /// What the host has reported.
    pub(super) status: Option<&'a CatalogStatus>,
    /// Count of the share, or the one that was just written.
    pub(super) count: u32,
    /// Machines with names of the fleet that it has, or has just been given.
    pub(super) names: u32,
    /// The smaller and the greater of both counts: what was just written may not be applied.
    pub(super) least: u32,
    pub(super) most: u32,
    /// Revision that last wrote it; 0 if it is not there.
    pub(super) modified: Revision,
    /// Whether its generation is the catalog's, and it says of which image its version is.
    pub(super) is_current: bool,
    /// Whether it was just written, so that it is left alone.
    pub(super) is_busy: bool,
    /// Whether its record cannot be read, so that it is left alone, too: the host keeps what it has.
    pub(super) is_unreadable: bool,
    /// Whether nothing says how many machines the host has: its share cannot be read, and it has reported none of the catalog.
    pub(super) is_open: bool,
    /// What the host has reported: machines, ready ones with those that are off as they should be, claimed ones.
    pub(super) reported: u32,
    pub(super) ready: u32,
    pub(super) claimed: u32,
}

impl Cell<'_> {
    /// A host without a share.
    pub(super) fn empty(host: usize) -> Cell<'static> {
        Cell {
            host,
            share: None,
            status: None,
            count: 0,
            names: 0,
            least: 0,
            most: 0,
            modified: 0,
            is_current: true,
            is_busy: false,
            is_unreadable: false,
            is_open: false,
            reported: 0,
            ready: 0,
            claimed: 0,
        }
    }

    /// Whether it is left alone.
    pub(super) fn is_fixed(&self) -> bool {
        self.is_busy || self.is_unreadable
    }
}

pub(super) struct Catalog<'a> {
    pub(super) name: &'a Name,
    pub(super) record: &'a CatalogRecord,
    /// Need of a machine on a host with QEMU, with libvirt, and with neither.
    needs: [Amounts; 3],
    /// In the order of the hosts.
    pub(super) cells: Vec<Cell<'a>>,
}

impl Catalog<'_> {
    pub(super) fn need(&self, on: Hypervisor) -> Amounts {
        self.needs[match on {
            Hypervisor::Qemu => 0,
            Hypervisor::Libvirt => 1,
            Hypervisor::None => 2,
        }]
    }
}

pub(super) struct Table<'a> {
    /// In the order of their names.
    pub(super) hosts: Vec<Host<'a>>,
    /// In the order of their names.
    pub(super) catalogs: Vec<Catalog<'a>>,
    pub(super) zones: usize,
    pub(super) unreadable: &'a Unreadable,
    /// Shares of catalogs that there are not.
    pub(super) unknown: Vec<Unknown<'a>>,
}

/// A share of a catalog that there is not.
pub(super) struct Unknown<'a> {
    pub(super) host: &'a Name,
    pub(super) catalog: &'a Name,
    pub(super) share: &'a Versioned<ShareRecord>,
}

/// Finds the numbers of catalogs. Quickest if it is asked in the order of their names, in which records are.
struct Numbers<'t, 'a> {
    names: &'t [&'a Name],
    next: usize,
}

impl Numbers<'_, '_> {
    fn of(&mut self, name: &Name) -> Option<usize> {
        let is_next = self.names.get(self.next).is_some_and(|next| *next == name);
        let found = if is_next { self.next } else { self.names.binary_search(&name).ok()? };
        self.next = found + 1;
        Some(found)
    }
}

/// What cannot be read, as placing needs it.
#[derive(Default)]
pub(super) struct Unreadable {
    /// Hosts with such records: catalogs of which that is so for the share, or for the place of a machine. The host leaves the whole catalog
    /// as it is. None: the host's own record.
    pub(super) of_hosts: BTreeMap<Name, BTreeSet<Name>>,
    /// Catalogs with such records of machines with names of the fleet.
    pub(super) named: BTreeSet<Name>,
    /// The names of these machines.
    pub(super) machines: BTreeSet<Name>,
}

pub(super) fn unreadable(view: &FleetView) -> Unreadable {
    let mut all = Unreadable::default();
    for key in view.unreadable.keys().filter_map(|text| text.parse().ok()) {
        match key {
            // What a host that was removed has left stays for ever.
            Key::Share(host, catalog) | Key::Place(host, catalog, _) if view.has_host(&host) => {
                _ = all.of_hosts.entry(host).or_default().insert(catalog);
            }
            Key::Host(host) => _ = all.of_hosts.entry(host).or_default(),
            Key::Named(catalog, machine) => {
                all.named.insert(catalog);
                all.machines.insert(machine);
            }
            _ => {}
        }
    }
    all
}

impl<'a> Table<'a> {
    pub(super) fn of(situation: &Situation<'a>, unreadable: &'a Unreadable) -> Table<'a> {
        let (hosts, zones) = hosts(situation, unreadable);
        let catalogs = situation.view.catalogs.iter().map(|(name, record)| {
            let spec = &record.value.spec.catalog;
            let kinds = [Hypervisor::Qemu, Hypervisor::Libvirt, Hypervisor::None];
            let needs = kinds.map(|kind| Amounts::of_machine(Need::of(spec, kind)));
            Catalog { name, record: &record.value, needs, cells: Vec::new() }
        });
        let mut table = Table { hosts, catalogs: catalogs.collect(), zones, unreadable, unknown: Vec::new() };
        let names: Vec<&Name> = table.catalogs.iter().map(|catalog| catalog.name).collect();
        for host in 0..table.hosts.len() {
            table.fill(situation, host, &names);
        }
        table
    }

    /// Takes the shares of a host, and what it has reported.
    fn fill(&mut self, situation: &Situation<'a>, number: usize, names: &[&Name]) {
        let host = &mut self.hosts[number];
        let mut numbers = Numbers { names, next: 0 };
        let mut cells: BTreeMap<usize, Cell<'a>> = BTreeMap::new();
        let empty: Cell<'a> = Cell::empty(number);
        for (name, share) in situation.view.shares.get(host.name).into_iter().flatten() {
            let Some(catalog) = numbers.of(name) else {
                self.unknown.push(Unknown { host: host.name, catalog: name, share });
                continue;
            };
            let record = self.catalogs[catalog].record;
            let is_current = share.value.image.is_some() && share.value.generation == record.generation;
            let (count, modified, share) = (share.value.count, share.modified, Some(&share.value));
            let (least, most) = (count, count);
            cells.insert(catalog, Cell { share, count, least, most, modified, is_current, ..empty });
        }
        for (name, count) in situation.written.get(host.name).into_iter().flatten() {
            let Some(catalog) = numbers.of(name) else { continue };
            let cell = cells.entry(catalog).or_insert(empty);
            (cell.least, cell.most) = (cell.least.min(*count), cell.most.max(*count));
            (cell.count, cell.is_busy) = (*count, true);
        }
        for (name, count) in situation.names.get(host.name).into_iter().flatten() {
            let Some(catalog) = numbers.of(name) else { continue };
            cells.entry(catalog).or_insert(empty).names = *count;
        }
        for (name, status) in host.status.iter().flat_map(|status| &status.catalogs) {
            let Some(catalog) = numbers.of(name) else { continue };
            let cell = cells.entry(catalog).or_insert(empty);
            let ready = status.ready.saturating_add(status.off);
            (cell.reported, cell.ready, cell.claimed) = (status.count, ready, status.claimed);
            cell.status = Some(status);
        }
        for name in self.unreadable.of_hosts.get(host.name).into_iter().flatten() {
            let Some(catalog) = numbers.of(name) else { continue };
            let cell = cells.entry(catalog).or_insert(empty);
            // What it is to have is not known. It has what it has reported.
            let share = Key::Share(host.name.clone(), name.clone()).to_string();
            cell.is_open = cell.status.is_none() && situation.view.unreadable.contains_key(&share);
            (cell.least, cell.most) = (0, cell.most.max(cell.reported));
            (cell.count, cell.is_unreadable) = (cell.most, true);
        }
        let deleted = situation.known.len() > names.len();
        let is_deleted = |name: &Name| deleted && names.binary_search(&name).is_err();
        for (name, known) in situation.known.iter().filter(|(name, _)| is_deleted(name)) {
            let share = situation.view.share(host.name, name).map_or(0, |share| share.value.count);
            let reported = host.status.and_then(|status| status.catalogs.get(name)).map_or(0, |of| of.count);
            let need = Need::of(&known.value.spec.catalog, host.hypervisor);
            host.left.take(Amounts::of_machine(need), share.max(reported));
        }
        for (catalog, cell) in cells {
            let catalog = &mut self.catalogs[catalog];
            // A share that follows names may be lowered later than they go.
            let is_named = catalog.record.spec.fleet.identity == IdentityKind::Named;
            let given = if is_named { cell.names } else { cell.most.max(cell.names) };
            host.left.take(catalog.need(host.hypervisor), given.max(cell.reported));
            catalog.cells.push(cell);
        }
    }
}

/// All hosts that have a record or shares, whether or not they can be read, and the number of zones.
fn hosts<'a>(situation: &Situation<'a>, unreadable: &'a Unreadable) -> (Vec<Host<'a>>, usize) {
    let view = situation.view;
    let all: BTreeSet<&Name> =
        view.hosts.keys().chain(view.shares.keys()).chain(unreadable.of_hosts.keys()).collect();
    let mut zones: BTreeMap<Option<&Name>, usize> = BTreeMap::new();
    let hosts = all.into_iter().map(|name| {
        let record = view.hosts.get(name).map(|record| &record.value);
        let status = view.statuses.get(name).map(|status| &status.value);
        let budget = status.map_or_else(Amounts::default, |status| Amounts::of_budget(&status.budget));
        let next = zones.len();
        Host {
            name,
            record,
            zone: *zones.entry(record.map(|record| &record.zone)).or_insert(next),
            standing: (situation.standing)(name),
            status,
            budget,
            left: budget,
            hypervisor: view.alive.get(name).map_or(Hypervisor::None, |alive| alive.value.hypervisor),
        }
    });
    (hosts.collect(), zones.len())
}
