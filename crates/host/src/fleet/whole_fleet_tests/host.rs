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
use spillway_api::{Hypervisor, Name};
use spillway_fleet::placer::Placer;
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
    pub records: TestHost,
    pub reconciler: ShareReconciler,
    pub machines: ImaginedMachines,
    pub pace: SharePace,
    pub unfinished: UnfinishedShares,
    pub placer: Placer,
    /// The records as it has last seen them.
    pub shown: FleetView,
    pub state: State,
    /// Turns until it is as before, and since it has renewed its lease.
    pub back_in: u64,
    pub silent_for: u64,
    pub reported: u64,
}

impl SimulatedHost {
    pub fn new(number: usize) -> SimulatedHost {
        let capacity = Capacity {
            ram_bytes: 12 * GIB,
            ram_percent: 100,
            host_bytes: 12 * GIB,
            reserve_bytes: 0,
            memory_percent: 100,
            host_cpus: 64,
            vcpu_percent: 100,
        };
        let records = TestHost::new(capacity);
        for version in GOOD.into_iter().skip(1).chain([BAD]) {
            records.version(version, 2 << 20);
        }
        if number != 0 {
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

    /// Machines of a catalog in its records.
    pub fn count(&self, catalog: &Name) -> usize {
        self.records.catalogs.machines(Some(catalog)).unwrap_or_default().len()
    }

    /// What it has, in its records and otherwise.
    pub fn describe(&self) -> String {
        let catalogs = self.records.catalogs.list().unwrap();
        let catalogs = catalogs.iter().map(|of| {
            let counts = self.reconciler.machines.counts(&of.name).unwrap();
            format!("{}:{} {:?} {counts:?}", of.name, of.version, of.rollout)
        });
        let catalogs: Vec<String> = catalogs.collect();
        format!("{} {:?}: {} left {:?}", self.name, self.state, catalogs.join("; "), self.unfinished)
    }
}
