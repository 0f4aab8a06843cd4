//! A host of the simulated fleet: its records, what carries out its shares, and its machines.

use super::sample::{GIB, identity, name};
use super::{BAD, GOOD, MISSING};
use crate::events::Events;
use crate::fleet::boot_set_waits::BootSetWaits;
use crate::fleet::pulls::FleetPulls;
use crate::fleet::report::ReportCut;
use crate::fleet::share_pace::SharePace;
use crate::fleet::shares::{ShareReconciler, UnfinishedShares};
use crate::images::Images;
use crate::machines::MachineShares;
use crate::machines::imagined::ImaginedMachines;
use crate::machines::testing::TestHost;
use crate::operations::Operations;
use crate::registries::Registries;
use crate::resources::budget::Capacity;
use spillway_api::{Hypervisor, Machine, Name};
use spillway_fleet::Moment;
use spillway_fleet::named::{Belief, HostNames, NamedOrders};
use spillway_fleet::placer::Placer;
use spillway_fleet::transaction::{Revision, Transaction};
use spillway_fleet::view::FleetView;

/// How a host is at this time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Up,
    /// It reaches etcd no more, and others reach it.
    CutOff,
    /// It is without power.
    Off,
}

pub struct SimulatedHost {
    pub name: Name,
    pub zone: Name,
    pub records: TestHost,
    pub reconciler: ShareReconciler,
    pub machines: ImaginedMachines,
    pub pace: SharePace,
    pub unfinished: UnfinishedShares,
    pub placer: Placer,
    pub names: HostNames,
    /// Highest epoch that its records have.
    pub highest_epoch: Revision,
    /// When the guard ends machines with names of the fleet.
    pub deadline: Moment,
    /// Until when its lease is valid.
    pub valid_until: Moment,
    /// The records as it has last seen them.
    pub shown: FleetView,
    pub state: State,
    /// Turns until it is as before, and since it has renewed its lease.
    pub back_in: u64,
    pub silent_for: u64,
    pub reported: u64,
}

/// Zone of a host.
pub fn zone(number: usize) -> Name {
    name(&format!("z{}", number % 2))
}

impl SimulatedHost {
    pub fn new(number: usize) -> SimulatedHost {
        let capacity = Capacity {
            ram_bytes: 20 * GIB,
            ram_percent: 100,
            host_bytes: 20 * GIB,
            reserve_bytes: 0,
            memory_percent: 100,
            host_cpus: 64,
            vcpu_percent: 100,
        };
        let records = TestHost::new(capacity);
        for version in GOOD.into_iter().skip(1).chain([BAD]) {
            records.version(version, 2 << 20);
        }
        if number >= 2 {
            records.version(MISSING, 2 << 20);
        }
        let reconciler = ShareReconciler {
            fleet: name("site"),
            catalogs: records.catalogs.clone(),
            machines: MachineShares::of(&records.reader, &records.catalogs),
            images: Images::of_whole(&records.objects, &records.stores),
            registries: Registries::new(records.objects.clone(), Operations::default(), "/nowhere".into()),
            pulls: FleetPulls::default(),
            boot_sets: BootSetWaits::default(),
            capacity,
            hypervisor: Hypervisor::Qemu,
            events: Events::open(&records.path("events-of-fleet"), &mut |why| panic!("{why}")),
            cut: ReportCut::default(),
        };
        let name = name(&format!("h{number}"));
        SimulatedHost {
            machines: ImaginedMachines::new(&records),
            placer: Placer::new(identity(name.as_str())),
            names: HostNames::new(name.clone(), 0, Moment(0)),
            highest_epoch: 0,
            deadline: Moment(0),
            valid_until: Moment(0),
            zone: zone(number),
            name,
            records,
            reconciler,
            pace: SharePace::default(),
            unfinished: UnfinishedShares::default(),
            shown: FleetView::default(),
            state: State::Up,
            back_in: 0,
            silent_for: 0,
            reported: 0,
        }
    }

    /// It loses its power, and its daemon begins anew with nothing but its records.
    pub fn lose_power(&mut self) {
        self.machines.lose_power(&self.records);
        self.placer = Placer::new(identity(self.name.as_str()));
        self.names = HostNames::new(self.name.clone(), self.highest_epoch, Moment(0)).of_other_boot();
        (self.deadline, self.valid_until) = (Moment(0), Moment(0));
        (self.pace, self.unfinished) = (SharePace::default(), UnfinishedShares::default());
        self.shown = FleetView::default();
    }

    /// What it may do with machines that have names of the fleet, and what it tells the fleet that it has given up.
    pub fn obey(&mut self, now: Moment) -> (NamedOrders, Option<Transaction>) {
        if now >= self.deadline {
            self.machines.end_named();
        }
        let alive = self.shown.alive.get(&self.name).filter(|_| now < self.valid_until);
        let belief = alive.map(|alive| Belief { epoch: alive.created, until: self.valid_until });
        let orders = self.names.step(&self.shown, belief, &self.machines.named(), now);
        if let Some(epoch) = orders.record_epoch {
            self.highest_epoch = epoch;
            self.names.recorded(epoch);
        }
        if orders.record_boot {
            self.names.recorded_boot();
        }
        self.deadline = orders.deadline.unwrap_or(self.deadline);
        let mut gone = self.names.leaving(&self.shown);
        let running = self.machines.named();
        gone.retain(|machine, _| {
            let is_there = self.records.objects.get::<Machine>(machine.as_str()).unwrap().is_some();
            !is_there && !running.contains_key(machine)
        });
        let release = self.names.confirm(&self.shown, belief, &gone, now);
        (orders, release)
    }

    /// Machines of a catalog in its records.
    pub fn count(&self, catalog: &Name) -> usize {
        self.records.catalogs.machines(Some(catalog)).unwrap_or_default().len()
    }

    /// Machines of a catalog whose guests are ready.
    pub fn ready_of(&self, catalog: &Name) -> usize {
        let machines = self.records.catalogs.machines(Some(catalog)).unwrap_or_default();
        self.machines.ready().filter(|name| machines.iter().any(|machine| machine.name == **name)).count()
    }

    /// What it has, in its records and otherwise.
    pub fn describe(&self) -> String {
        let catalogs = self.records.catalogs.list().unwrap();
        let catalogs = catalogs.iter().map(|of| {
            let counts = self.reconciler.machines.counts(of).unwrap();
            format!("{}:{} {:?} {counts:?}", of.name, of.version, of.rollout)
        });
        let catalogs: Vec<String> = catalogs.collect();
        format!("{} {:?}: {} left {:?}", self.name, self.state, catalogs.join("; "), self.unfinished)
    }
}
