//! Machines that run in the records of a test's host only: what is wanted of each is decided by the daemon's own pass over all catalogs, and a
//! machine that is wanted is a run that begins with what its catalog says then. One that has a name of the fleet runs as far as its orders go.
//!
//! Invariant: nothing is started.

use super::View;
use super::closing::HostGate;
use super::desired_state::{ClaimRecord, DesiredState, boot_id};
use super::desired_writer::DesiredStateWriter;
use super::oversee::Overseer;
use super::rolling::Rollouts;
use super::run::RunRecord;
use super::status::{ObservedMachine, Status};
use super::testing::TestHost;
use crate::error::HostError;
use serde_json::json;
use spillway_api::{Catalog, IsolationAction, Name, Phase, Power, Selector};
use spillway_fleet::named::{NameOrder, NamedOrders, RunningName};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What becomes of a machine that boots, or has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boot {
    /// It stays as it is for now.
    Later,
    /// Its guest is ready, or it is started again if it has failed.
    GoesOn,
    /// It fails.
    Fails,
}

/// What a machine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Boots,
    Ready,
    Failed,
}

/// A VMM.
struct Run {
    record: RunRecord,
    progress: Progress,
    /// What becomes of it when its host is isolated, if it has a name of the fleet.
    named: Option<IsolationAction>,
}

/// The imagined machines of a host.
pub struct ImaginedMachines {
    overseer: Overseer,
    runs: BTreeMap<Name, Run>,
    /// Versions of disks that are kept, by the UUIDs of their machines.
    kept: BTreeMap<String, u32>,
}

impl ImaginedMachines {
    /// No machine of this host runs yet.
    pub fn new(host: &TestHost) -> ImaginedMachines {
        let desired = DesiredStateWriter::new(host.objects.clone());
        let (reader, catalogs, shared) =
            (host.reader.clone(), host.catalogs.clone(), Arc::clone(&host.shared));
        let gate = HostGate::new(Arc::clone(&shared), reader.clone(), catalogs.clone(), desired.clone());
        let rollouts = Rollouts::new(catalogs.clone(), desired.clone(), shared.events.clone());
        let overseer = Overseer::new(shared, reader, catalogs, desired, gate, Arc::new(rollouts));
        ImaginedMachines { overseer, runs: BTreeMap::new(), kept: BTreeMap::new() }
    }

    /// The daemon makes a pass over its catalogs, and each machine takes a step. `orders`: those for machines with names of the fleet. `boots`:
    /// what becomes of one with this version, which has failed or not.
    pub fn step(&mut self, host: &TestHost, orders: &NamedOrders, mut boots: impl FnMut(u32, bool) -> Boot) {
        let (_, failures) = self.overseer.reconcile().unwrap();
        assert!(failures.is_empty(), "{failures:?}");
        let catalogs = host.catalogs.list().unwrap();
        let catalogs: BTreeMap<&Name, &Catalog> = catalogs.iter().map(|of| (&of.name, of)).collect();
        let views = host.reader.views(&Selector::default()).unwrap();
        let there: BTreeSet<Name> = views.iter().map(|view| view.machine.name.clone()).collect();
        let gone = self.runs.keys().filter(|name| !there.contains(*name)).cloned().collect::<Vec<_>>();
        for name in gone {
            self.runs.remove(&name);
            host.shared.registry.begin_with([(name, ObservedMachine::default())]);
        }
        for view in &views {
            self.step_one(host, view, catalogs[&view.machine.catalog], orders, &mut boots);
        }
    }

    fn step_one(
        &mut self,
        host: &TestHost,
        view: &View,
        catalog: &Catalog,
        orders: &NamedOrders,
        boots: &mut impl FnMut(u32, bool) -> Boot,
    ) {
        let (name, wanted) = (&view.machine.name, &view.wanted);
        let uuid = &view.machine.identity.uuid;
        let mut observed = host.shared.registry.observed(name);
        let order = self.order(view, catalog, orders);
        let is_kept_from =
            order == NameOrder::End || order != NameOrder::Run && !self.runs.contains_key(name);
        if wanted.power == Power::Off || is_kept_from {
            self.runs.remove(name);
            let phase = if wanted.power == Power::Off { Phase::Stopped } else { Phase::Waiting };
            observed.update(Status::new(phase).settled(), view.revision);
            host.shared.registry.begin_with([(name.clone(), observed)]);
            return;
        }
        let kept = &mut self.kept;
        let named = catalog.fleet.as_ref().and_then(|owner| owner.named);
        let named = named.map(|here| orders.on_isolation.get(name).copied().unwrap_or(here));
        let mut begun = || Run { record: run(uuid, wanted, catalog, kept), progress: Progress::Boots, named };
        let is_old = |run: &Run| {
            let is_asked = run.record.restarts < wanted.restarts || run.record.resets < wanted.resets;
            is_asked || run.record.uuid != *uuid
        };
        let known = self.runs.entry(name.clone()).or_insert_with(&mut begun);
        if order == NameOrder::Run && is_old(known) {
            *known = begun();
        }
        let goes_on = matches!(order, NameOrder::Run | NameOrder::GoOn);
        if known.progress != Progress::Ready && goes_on {
            match (boots(known.record.version, known.progress == Progress::Failed), known.progress) {
                (Boot::Later, _) => {}
                (Boot::Fails, _) => known.progress = Progress::Failed,
                (Boot::GoesOn, Progress::Failed) if order == NameOrder::Run => *known = begun(),
                (Boot::GoesOn, Progress::Failed) => {}
                (Boot::GoesOn, _) => (known.record.ready, known.progress) = (true, Progress::Ready),
            }
        }
        let Run { record: run, progress, .. } = &self.runs[name];
        let folder = host.shared.folders.of(name);
        match progress {
            Progress::Failed => {
                observed.record_failure(&HostError::invalid("it does not boot"), view.revision)
            }
            Progress::Boots => {
                observed.update(Status::new(Phase::Running).of(run, &folder), view.revision);
            }
            Progress::Ready => {
                let status = Status::new(Phase::Running).of(run, &folder).ready(run);
                observed.update(status.with_pending(run.pending(catalog)).settled(), view.revision);
            }
        }
        host.shared.registry.begin_with([(name.clone(), observed)]);
    }

    /// What a machine is to do, if it has a name of the fleet. Others run.
    fn order(&self, view: &View, catalog: &Catalog, orders: &NamedOrders) -> NameOrder {
        let Some(here) = catalog.fleet.as_ref().and_then(|owner| owner.named) else { return NameOrder::Run };
        let name = &view.machine.name;
        let told = orders.on_isolation.get(name).copied();
        let begun = self.runs.get(name).and_then(|run| run.named);
        orders.order(name, Some(&view.machine.identity.uuid), begun.or(told).unwrap_or(here))
    }

    /// Machines with names of the fleet that run.
    pub fn named(&self) -> BTreeMap<Name, RunningName> {
        let named = self.runs.iter().filter_map(|(name, run)| {
            let uuid = Some(run.record.uuid.clone());
            Some((name.clone(), RunningName { on_isolation: run.named?, uuid }))
        });
        named.collect()
    }

    /// The guard ends all machines with names of the fleet, those excepted that are kept.
    pub fn end_named(&mut self) {
        self.runs.retain(|_, run| run.named.is_none_or(|of| of == IsolationAction::Keep));
    }

    /// The host loses its power: nothing runs any more.
    pub fn lose_power(&mut self, host: &TestHost) {
        let off = |name: Name| (name, ObservedMachine::default());
        host.shared.registry.begin_with(std::mem::take(&mut self.runs).into_keys().map(off));
    }

    /// Machines that run, with their versions.
    pub fn versions(&self) -> impl Iterator<Item = (&Name, u32)> {
        self.runs.iter().map(|(name, run)| (name, run.record.version))
    }

    /// Names of the machines whose guests are ready.
    pub fn ready(&self) -> impl Iterator<Item = &Name> {
        let ready = self.runs.iter().filter(|(_, run)| run.progress == Progress::Ready);
        ready.map(|(name, _)| name)
    }
}

/// A run that begins now. A disk that is kept stays on its version.
fn run(uuid: &str, wanted: &DesiredState, catalog: &Catalog, kept: &mut BTreeMap<String, u32>) -> RunRecord {
    let keeps = catalog.spec.keeps_writes();
    let version = match keeps {
        true => *kept.entry(uuid.to_owned()).or_insert(catalog.version),
        false => catalog.version,
    };
    serde_json::from_value(json!({
        "uuid": uuid, "boot": boot_id(), "image": catalog.spec.image.name, "version": version, "spec": catalog.spec,
        "hypervisor": "qemu", "restarts": wanted.restarts, "resets": wanted.resets, "queues": 1, "kept": keeps.then_some("/disk"), "asked": false,
        "ready": false,
    }))
    .unwrap()
}

/// The UUID of a claimed machine, and how often it was restarted and reset; none: it is not there, or not claimed.
pub fn claimed(host: &TestHost, machine: &Name) -> Option<(String, u64, u64)> {
    let uuid = host.catalogs.machine(machine).ok()?.identity.uuid;
    let wanted = host.objects.get::<DesiredState>(machine.as_str()).unwrap()?.value;
    wanted.claim.is_some().then_some((uuid, wanted.restarts, wanted.resets))
}

/// Somebody claims a machine, or releases it.
pub fn claim(host: &TestHost, machine: &Name, is_claimed: bool) {
    let is = host.objects.get::<DesiredState>(machine.as_str()).unwrap();
    let mut wanted = is.map(|is| is.value).unwrap_or_default();
    if is_claimed {
        wanted.claim = Some(ClaimRecord::new(None, false, "ann"));
    } else {
        let catalog = host.catalogs.machine(machine).unwrap().catalog;
        wanted.release(&host.catalogs.get(&catalog).unwrap().spec, 0);
    }
    host.put(machine.as_str(), &wanted);
}
