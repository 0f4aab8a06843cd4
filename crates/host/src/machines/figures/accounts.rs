//! Sums of the disks' counters since the daemon started, by machine and by catalog. Asks no disk itself.
//!
//! Invariant: counters never decrease. A new disk of a machine starts at 0 while the counts of the last one stay in the
//! sums; what a disk counted before the daemon started is left out.

use super::trend::FillTrend;
use jiff::Timestamp;
use spillway_api::{DiskCounters, DiskLevels, Figure, Machine, Name};
use std::collections::{HashMap, HashSet};
use std::time::Instant;

/// Identity of a disk: the process id of its supervisor, and its start time in the kernel's ticks. No other process can have both: in
/// one tick the kernel does not come back to a process id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskId {
    pub pid: i32,
    pub begun: u64,
}

/// Figures that a disk reported.
#[derive(Clone, Copy, Debug)]
pub struct DiskReport {
    pub disk: DiskId,
    /// It was said by the disk, and may come late; otherwise it is what the disk counts at this moment.
    pub is_said: bool,
    pub counters: DiskCounters,
    pub levels: DiskLevels,
}

/// Sum of counters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Account {
    pub counters: DiskCounters,
    /// Bytes that RAM tiers held when the daemon started: written before, and not to a disk.
    held_bytes: u64,
}

impl Account {
    fn add(&mut self, growth: &Account) {
        self.counters.add(&growth.counters);
        self.held_bytes.add(&growth.held_bytes);
    }

    /// Bytes that guests wrote and no disk received, without what a RAM tier holds and may still write back.
    pub fn spared_bytes(&self, ram_used_bytes: u64) -> u64 {
        let written = self.counters.guest.written_bytes.saturating_add(self.held_bytes);
        written.saturating_sub(self.counters.overflow.written_bytes).saturating_sub(ram_used_bytes)
    }
}

/// Sum of a machine's disks.
#[derive(Clone, Debug)]
pub struct MachineAccount {
    catalog: Name,
    uuid: String,
    disk: Option<DiskId>,
    /// Last counters of the current disk.
    said: DiskCounters,
    /// Last levels of the current disk; zero once it has ended.
    pub levels: DiskLevels,
    trend: FillTrend,
    /// Seconds until the write cache of the current disk is full; `None` if it does not grow.
    pub seconds_to_full: Option<u64>,
    pub account: Account,
}

/// Whose disk has reported: of several machines of one name, one after the other, each has its own UUID.
#[derive(Clone, Copy)]
pub struct Whose<'a> {
    pub catalog: &'a Name,
    pub uuid: &'a str,
}

impl Whose<'_> {
    pub fn of(machine: &Machine) -> Whose<'_> {
        Whose { catalog: &machine.catalog, uuid: &machine.identity.uuid }
    }
}

/// Sums of all machines and catalogs.
#[derive(Debug)]
pub struct Accounts {
    /// When the daemon started.
    pub since: Timestamp,
    /// The same in the kernel's ticks: disks with an earlier start time existed before.
    begun: u64,
    pub machines: HashMap<Name, MachineAccount>,
    pub catalogs: HashMap<Name, Account>,
}

impl Accounts {
    pub fn new(begun: u64) -> Accounts {
        Accounts { since: Timestamp::now(), begun, machines: HashMap::new(), catalogs: HashMap::new() }
    }

    /// Adds the report of a machine's disk.
    pub fn note(&mut self, machine: &Name, Whose { catalog, uuid }: Whose, report: &DiskReport) {
        let new = || MachineAccount {
            catalog: catalog.clone(),
            uuid: uuid.to_owned(),
            disk: None,
            said: DiskCounters::default(),
            levels: DiskLevels::default(),
            trend: FillTrend::default(),
            seconds_to_full: None,
            account: Account::default(),
        };
        let of = self.machines.entry(machine.clone()).or_insert_with(new);
        if of.uuid != uuid || of.catalog != *catalog {
            // A new machine has this name.
            *of = new();
        }
        let same = of.disk == Some(report.disk);
        if same && report.is_said && report.counters.is_behind(&of.said) {
            // It was asked before, and answered later, than when it was noted last.
            return;
        }
        let growth = match same {
            true => Account { counters: report.counters.since(&of.said), held_bytes: 0 },
            false if report.disk.begun < self.begun && of.disk.is_none() => {
                Account { counters: DiskCounters::default(), held_bytes: report.levels.ram_used_bytes }
            }
            false => Account { counters: report.counters, held_bytes: 0 },
        };
        if !same || report.counters.resets != of.said.resets {
            of.trend = FillTrend::default();
        }
        of.seconds_to_full = of.trend.add(Instant::now(), &report.levels);
        (of.disk, of.said, of.levels) = (Some(report.disk), report.counters, report.levels);
        of.account.add(&growth);
        self.catalogs.entry(catalog.clone()).or_default().add(&growth);
    }

    /// Notes that a machine has no disk any more.
    pub fn remove_disk(&mut self, machine: &Name) {
        if let Some(of) = self.machines.get_mut(machine) {
            of.levels = DiskLevels::default();
            (of.trend, of.seconds_to_full) = (FillTrend::default(), None);
        }
    }

    /// Returns the catalog and the UUID of the machine of this name that has reported.
    pub fn whose(&self, machine: &Name) -> Option<(Name, String)> {
        self.machines.get(machine).map(|of| (of.catalog.clone(), of.uuid.clone()))
    }

    /// Forgets the machines and catalogs that are not recorded any more.
    pub fn keep(&mut self, machines: &HashSet<&Name>, catalogs: &HashSet<&Name>) {
        self.machines.retain(|name, _| machines.contains(name));
        self.catalogs.retain(|name, _| catalogs.contains(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn of(catalog: &Name) -> Whose<'_> {
        Whose { catalog, uuid: "u" }
    }

    fn report(pid: i32, begun: u64, written: u64, evicted: u64, ram: u64) -> DiskReport {
        let mut counters = DiskCounters::default();
        (counters.guest.written_bytes, counters.overflow.written_bytes) = (written, evicted);
        let levels = DiskLevels { ram_used_bytes: ram, ..DiskLevels::default() };
        DiskReport { disk: DiskId { pid, begun }, is_said: true, counters, levels }
    }

    /// Bytes written and bytes spared, of the catalog.
    fn sums(accounts: &Accounts) -> (u64, u64) {
        let account = accounts.catalogs[&name("desk")];
        let ram = accounts.machines.values().map(|of| of.levels.ram_used_bytes).sum();
        (account.counters.guest.written_bytes, account.spared_bytes(ram))
    }

    #[test]
    fn counters_go_on_when_disks_end_and_others_begin() {
        let mut accounts = Accounts::new(100);
        let desk = name("desk");
        accounts.note(&name("a"), of(&desk), &report(1, 200, 50, 10, 30));
        assert_eq!(sums(&accounts), (50, 10));
        accounts.note(&name("a"), of(&desk), &report(1, 200, 60, 10, 30));
        accounts.note(&name("a"), of(&desk), &report(1, 200, 60, 10, 30));
        assert_eq!(sums(&accounts), (60, 20));
        // What its RAM tier held went nowhere.
        accounts.remove_disk(&name("a"));
        assert_eq!(sums(&accounts), (60, 50));
        accounts.note(&name("a"), of(&desk), &report(2, 300, 5, 0, 5));
        accounts.note(&name("b"), of(&desk), &report(3, 300, 7, 0, 0));
        assert_eq!(sums(&accounts), (72, 57));
        // The same number again: but of another moment.
        accounts.note(&name("b"), of(&desk), &report(3, 301, 6, 0, 0));
        assert_eq!(sums(&accounts), (78, 63));
        // An answer that comes late is not counted a second time.
        accounts.note(&name("b"), of(&desk), &report(3, 301, 5, 0, 0));
        assert_eq!(sums(&accounts), (78, 63));
        assert_eq!(accounts.machines[&name("b")].account.counters.guest.written_bytes, 13);
        // One that is removed leaves what it did with its catalog.
        accounts.keep(&HashSet::from([&name("a")]), &HashSet::from([&desk]));
        assert_eq!((sums(&accounts), accounts.machines.len()), ((78, 63), 1));
        accounts.keep(&HashSet::new(), &HashSet::new());
        assert!(accounts.catalogs.is_empty());
    }

    #[test]
    fn a_counter_that_was_wrong_for_a_moment_stops_no_other() {
        let mut accounts = Accounts::new(100);
        let seen =
            |written, evicted, ram| DiskReport { is_said: false, ..report(1, 200, written, evicted, ram) };
        for seen in [seen(50, 0, 5), seen(60, 1 << 63, 6), seen(70, 10, 7), seen(80, 11, 8)] {
            accounts.note(&name("a"), of(&name("desk")), &seen);
        }
        let of = &accounts.machines[&name("a")];
        assert_eq!((of.account.counters.guest.written_bytes, of.levels.ram_used_bytes), (80, 8));
        assert_eq!(of.account.counters.overflow.written_bytes, (1 << 63) + 1);
    }

    #[test]
    fn what_was_before_the_daemon_is_left_out() {
        let mut accounts = Accounts::new(100);
        let desk = name("desk");
        accounts.note(&name("a"), of(&desk), &report(1, 99, 1000, 400, 300));
        assert_eq!(sums(&accounts), (0, 0));
        accounts.note(&name("a"), of(&desk), &report(1, 99, 1010, 450, 260));
        assert_eq!(sums(&accounts), (10, 0), "what it wrote to the disk it had written before");
        accounts.note(&name("a"), of(&desk), &report(1, 99, 1010, 450, 0));
        assert_eq!(sums(&accounts), (10, 260));
    }

    #[test]
    fn another_machine_of_the_same_name_starts_anew() {
        let mut accounts = Accounts::new(100);
        accounts.note(&name("a"), of(&name("old")), &report(1, 200, 50, 0, 0));
        accounts.note(&name("a"), of(&name("desk")), &report(2, 300, 5, 0, 0));
        assert_eq!(sums(&accounts), (5, 5));
        let written =
            |accounts: &Accounts| accounts.machines[&name("a")].account.counters.guest.written_bytes;
        assert_eq!(written(&accounts), 5);
        // Of the same catalog: what the earlier one wrote stays the catalog's.
        let desk = name("desk");
        accounts.note(&name("a"), Whose { catalog: &desk, uuid: "another" }, &report(3, 400, 7, 0, 0));
        assert_eq!((sums(&accounts).0, written(&accounts)), (12, 7));
    }

    #[test]
    fn a_forecast_is_of_one_generation_of_one_disk() {
        let mut accounts = Accounts::new(100);
        let mut to_full = |pid: i32, resets: u64, ram: u64| {
            let mut report = report(pid, 200, ram, 0, ram);
            report.levels.ram_limit_bytes = 1000;
            report.counters.resets = resets;
            accounts.note(&name("a"), of(&name("desk")), &report);
            accounts.machines[&name("a")].seconds_to_full
        };
        assert_eq!(to_full(1, 0, 10), None);
        assert!(to_full(1, 0, 20).is_some());
        assert_eq!(to_full(1, 1, 30), None, "it was reset, and filled again");
        assert!(to_full(1, 1, 40).is_some());
        assert_eq!(to_full(2, 1, 50), None, "another disk");
        assert!(to_full(2, 1, 60).is_some());
        accounts.remove_disk(&name("a"));
        assert_eq!(accounts.machines[&name("a")].seconds_to_full, None);
    }
}
