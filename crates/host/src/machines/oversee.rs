//! Reconciles what concerns several machines: the warm count, expired claims, drained machines. Owns no state: reads
//! records and observed states, and records new desired states.
//!
//! Invariant: each step is idempotent, and changes only what nobody has changed since it was read.

use super::claims::free;
use super::closing::HostGate;
use super::desired_writer::DesiredStateWriter;
use super::rolling::Rollouts;
use super::shared::MachineServices;
use super::views::{MachineReader, by_catalog};
use super::{View, blocking};
use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::store::Revision;
use spillway_api::{Catalog, EventKind, Name, Power, Selector};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Shortest and longest interval between two passes.
const LEAST: Duration = Duration::from_millis(100);
const MOST: Duration = Duration::from_secs(30);
/// The interval is at least this many times as long as the last pass took.
const LOOKS: u32 = 4;

/// Reasons why machines of catalogs cannot be reconciled.
type Failures = BTreeMap<Name, String>;

/// Reconciles what concerns several machines.
#[derive(Clone)]
pub struct Overseer {
    shared: Arc<MachineServices>,
    reader: MachineReader,
    catalogs: Catalogs,
    desired: DesiredStateWriter,
    gate: HostGate,
    rollouts: Arc<Rollouts>,
}

impl Overseer {
    /// Creates the overseer of these machines.
    pub fn new(
        shared: Arc<MachineServices>,
        reader: MachineReader,
        catalogs: Catalogs,
        desired: DesiredStateWriter,
        gate: HostGate,
        rollouts: Arc<Rollouts>,
    ) -> Overseer {
        Overseer { shared, reader, catalogs, desired, gate, rollouts }
    }

    /// Runs for as long as the daemon does.
    pub async fn oversee(self) {
        let mut told = Failures::new();
        loop {
            let (looking, begun) = (self.clone(), Instant::now());
            let looked = blocking(move || looking.reconcile()).await;
            let took = begun.elapsed();
            let pause = match looked {
                Ok((pause, failures)) => {
                    self.report_failures(&told, &failures);
                    told = failures;
                    pause
                }
                Err(e) => {
                    let text = format!("catalogs cannot be reconciled: {e}");
                    self.shared.events.raise(EventKind::Failed, "host", text);
                    MOST
                }
            };
            // Do not occupy a whole core when many machines change often.
            tokio::time::sleep(LEAST.max(took * LOOKS)).await;
            let _ = tokio::time::timeout(pause, self.shared.registry.wait_for_change()).await;
        }
    }

    /// Raises an event for each catalog that cannot be reconciled, once for each reason.
    fn report_failures(&self, told: &Failures, failures: &Failures) {
        for (catalog, why) in failures.iter().filter(|(catalog, why)| told.get(*catalog) != Some(why)) {
            let text = format!("its machines cannot be reconciled: {why}");
            self.shared.events.raise(EventKind::Failed, &format!("catalog/{catalog}"), text);
        }
    }

    /// Makes one pass over all catalogs. Returns the time until the next one is needed, and the failures: a failure of
    /// one catalog does not affect the others.
    pub(super) fn reconcile(&self) -> Result<(Duration, Failures), HostError> {
        // Read catalogs before machines: a machine that reports its version now has not read an older catalog since.
        let catalogs = self.catalogs.list()?;
        let rests = self.gate.is_closed()?;
        if rests && self.gate.stop_all()? {
            return Ok((LEAST, Failures::new()));
        }
        let mut of = by_catalog(self.reader.views(&Selector::default())?);
        let next = self.shared.order.update(&catalogs, |name| of.get(name).map_or(&[], Vec::as_slice));
        let next = next.map(|next| next.saturating_duration_since(Instant::now()));
        let (mut pause, mut failures) = (next.map_or(MOST, |next| next.min(MOST)), Failures::new());
        for view in of.values().flatten() {
            if let Err(e) = self.drain(view) {
                failures.insert(view.machine.catalog.clone(), e.message);
            }
        }
        let mut rollouts = HashSet::new();
        for catalog in catalogs {
            let views = of.remove(&catalog.name).unwrap_or_default();
            match self.reconcile_catalog(&catalog, &views, rests) {
                Ok(at_most) => pause = pause.min(at_most),
                Err(e) => _ = failures.insert(catalog.name.clone(), e.message),
            }
            if !rests && catalog.rollout.is_some() {
                rollouts.insert(catalog.name);
            }
        }
        self.rollouts.keep(&rollouts);
        Ok((pause, failures))
    }

    /// Makes one pass over the machines of one catalog. While the host is closed only claims are ended.
    fn reconcile_catalog(
        &self,
        catalog: &Catalog,
        views: &[View],
        rests: bool,
    ) -> Result<Duration, HostError> {
        let mut pause = MOST;
        for view in views {
            pause = pause.min(self.end_claim(catalog, view, views)?);
        }
        if rests {
            return Ok(pause);
        }
        self.start_by_itself(catalog, views)?;
        self.keep_warm(catalog, views)?;
        match &catalog.rollout {
            Some(rollout) => Ok(pause.min(self.rollouts.roll_out(catalog, rollout, views)?)),
            None => Ok(pause),
        }
    }

    /// Releases a machine whose claim has expired. Returns the remaining time of the claim.
    fn end_claim(&self, catalog: &Catalog, view: &View, views: &[View]) -> Result<Duration, HostError> {
        let Some(left) = view.wanted.claim.as_ref().and_then(|claim| claim.remaining()) else {
            return Ok(MOST);
        };
        // Count free machines only when a claim has expired.
        if !left.is_zero() {
            return Ok(left);
        }
        let free = free(views, Some(&view.machine.name));
        if self.desired.change(view, |wanted| wanted.release(&catalog.spec, free))? {
            let object = format!("machine/{}", view.machine.name);
            self.shared.events.raise(EventKind::Released, &object, "its claim is over");
        }
        Ok(left)
    }

    /// Starts machines that have no desired state yet, if the catalog starts them by itself.
    fn start_by_itself(&self, catalog: &Catalog, views: &[View]) -> Result<(), HostError> {
        let new = |view: &&View| view.revision == Revision::default();
        for view in views.iter().filter(|_| catalog.spec.autostart).filter(new) {
            self.desired.change(view, |wanted| wanted.power = Power::On)?;
        }
        Ok(())
    }

    fn drain(&self, view: &View) -> Result<(), HostError> {
        let wanted = &view.wanted;
        if wanted.drained && wanted.claim.is_none() && wanted.power == Power::On {
            self.desired.change(view, |wanted| wanted.power = Power::Off)?;
        }
        Ok(())
    }

    /// Starts as many machines as are missing. Never stops a surplus one, which somebody may have started.
    fn keep_warm(&self, catalog: &Catalog, views: &[View]) -> Result<(), HostError> {
        let warm = free(views, None);
        let missing = (catalog.spec.warm as usize).saturating_sub(warm);
        let startable = |view: &&View| {
            view.wanted.power == Power::Off && view.wanted.claim.is_none() && !view.wanted.drained
        };
        for view in views.iter().filter(startable).take(missing) {
            self.desired.change(view, |wanted| wanted.start_fresh(&catalog.spec))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::desired_state::DesiredState;
    use crate::machines::testing::TestHost;
    use crate::resources::budget::NO_LIMITS;
    use crate::store::failing::FailingStore;
    use serde_json::json;

    #[tokio::test]
    async fn a_catalog_that_cannot_be_looked_after_keeps_no_other_from_it() {
        let host = TestHost::with_store(NO_LIMITS, |store| {
            let is_bad = |(key, _): &(String, _)| key.starts_with("wanted/bad-");
            Arc::new(FailingStore::new(store, move |transaction| !transaction.changes.iter().any(is_bad)))
        });
        for name in ["bad", "good"] {
            host.catalog(name, json!({ "warm": 1 }));
        }
        let desired = DesiredStateWriter::new(host.objects.clone());
        let (reader, catalogs) = (host.reader.clone(), host.catalogs.clone());
        let shared = Arc::clone(&host.shared);
        let gate = HostGate::new(Arc::clone(&shared), reader.clone(), catalogs.clone(), desired.clone());
        let rollouts = Rollouts::new(catalogs.clone(), desired.clone(), shared.events.clone());
        let overseer = Overseer::new(shared, reader, catalogs, desired, gate, Arc::new(rollouts));
        let (_, failures) = overseer.reconcile().unwrap();
        assert_eq!(failures.keys().map(Name::as_str).collect::<Vec<_>>(), ["bad"]);
        let is_on = |name: &str| {
            host.objects
                .get::<DesiredState>(name)
                .unwrap()
                .is_some_and(|wanted| wanted.value.power == Power::On)
        };
        assert!(is_on("good-001") && !is_on("bad-001"));
        let told = || host.shared.events.count(EventKind::Failed);
        overseer.report_failures(&Failures::new(), &failures);
        overseer.report_failures(&failures, &failures);
        assert_eq!(told(), 1, "once");
    }
}
