//! What concerns more than one machine: how many are kept warm, claims that end, machines that are drained. Owns no state: it looks at what is recorded and what runs, and records what is wanted next.
//!
//! Invariant: each step may be done again, and changes only what nobody has changed since it looked.

use super::claims::free;
use super::closing::HostGate;
use super::desired::DesiredState;
use super::rolling::Rollouts;
use super::shared::Shared;
use super::views::MachineReader;
use super::{View, blocking};
use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::store::Revision;
use spillway_api::{Catalog, EventKind, Name, Power, Selector};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two looks when much happens, and when nothing does.
const LEAST: Duration = Duration::from_millis(100);
const MOST: Duration = Duration::from_secs(30);
/// Between two looks so many times as long as the last one took passes at least.
const LOOKS: u32 = 4;

/// Looks after what concerns more than one machine.
#[derive(Clone)]
pub struct Overseer {
    shared: Arc<Shared>,
    reader: MachineReader,
    catalogs: Catalogs,
    desired: DesiredState,
    gate: HostGate,
    rollouts: Arc<Rollouts>,
}

impl Overseer {
    /// Of the machines that these see and change.
    pub fn new(
        shared: Arc<Shared>,
        reader: MachineReader,
        catalogs: Catalogs,
        desired: DesiredState,
        gate: HostGate,
        rollouts: Arc<Rollouts>,
    ) -> Overseer {
        Overseer { shared, reader, catalogs, desired, gate, rollouts }
    }

    /// For as long as the daemon lives.
    pub async fn oversee(self) {
        loop {
            let (looking, begun) = (self.clone(), Instant::now());
            let next = blocking(move || looking.look_after()).await;
            let took = begun.elapsed();
            let pause = next.unwrap_or_else(|e| {
                let text = format!("catalogs are not looked after: {e}");
                self.shared.events.raise(EventKind::Failed, "host", text);
                MOST
            });
            // With many machines, of which much happens, it does not keep a core to itself.
            tokio::time::sleep(LEAST.max(took * LOOKS)).await;
            let _ = tokio::time::timeout(pause, self.shared.registry.stirred()).await;
        }
    }

    /// Records what is to be wanted next. How long nothing else is, unless something changes.
    fn look_after(&self) -> Result<Duration, HostError> {
        // Before the machines: one that says now what it runs with has not read an older catalog since.
        let catalogs = self.catalogs.list()?;
        let rests = self.gate.is_closed()?;
        if rests && self.gate.stop_all()? {
            return Ok(LEAST);
        }
        let mut of: HashMap<Name, Vec<View>> = HashMap::new();
        for view in self.reader.views(&Selector::default())? {
            of.entry(view.machine.catalog.clone()).or_default().push(view);
        }
        let mut pause = MOST;
        for view in of.values().flatten() {
            self.drain(view)?;
        }
        let mut rollouts = HashSet::new();
        for catalog in catalogs {
            let views = of.remove(&catalog.name).unwrap_or_default();
            for view in &views {
                pause = pause.min(self.end_claim(&catalog, view, &views)?);
            }
            if rests {
                continue;
            }
            self.start_by_itself(&catalog, &views)?;
            self.keep_warm(&catalog, &views)?;
            if let Some(rollout) = &catalog.rollout {
                pause = pause.min(self.rollouts.roll_out(&catalog, rollout, &views)?);
                rollouts.insert(catalog.name);
            }
        }
        self.rollouts.keep(&rollouts);
        Ok(pause)
    }

    /// Releases a machine whose claim is over. How long it still lasts.
    fn end_claim(&self, catalog: &Catalog, view: &View, views: &[View]) -> Result<Duration, HostError> {
        let Some(left) = view.wanted.claim.as_ref().and_then(|claim| claim.left()) else { return Ok(MOST) };
        // Not counted for each one whose claim goes on.
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

    /// Starts machines of which nothing was wanted yet, where the catalog says that they start by themselves.
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

    /// Starts as many machines as are missing. None is stopped for being one too many: somebody may have started it.
    fn keep_warm(&self, catalog: &Catalog, views: &[View]) -> Result<(), HostError> {
        let warm = free(views, None);
        let missing = (catalog.spec.warm as usize).saturating_sub(warm);
        let startable = |view: &&View| {
            view.wanted.power == Power::Off && view.wanted.claim.is_none() && !view.wanted.drained
        };
        for view in views.iter().filter(startable).take(missing) {
            self.desired.change(view, |wanted| wanted.start_anew(&catalog.spec))?;
        }
        Ok(())
    }
}
