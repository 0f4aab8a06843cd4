//! What concerns more than one machine: how many are kept warm, claims that end, machines that are drained. Owns no state: it looks at what is recorded and what runs, and records what is wanted next.
//!
//! Invariant: each step may be done again, and changes only what nobody has changed since it looked.

use super::act::free;
use super::closing::is_closed;
use super::wanted::Wanted;
use super::{Machines, View, blocking};
use crate::error::HostError;
use crate::store::{Changes, Revision};
use spillway_api::{Catalog, EventKind, Machine, Name, Power, Selector};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// Between two looks when much happens, and when nothing does.
const LEAST: Duration = Duration::from_millis(100);
const MOST: Duration = Duration::from_secs(30);
/// Between two looks so many times as long as the last one took passes at least.
const LOOKS: u32 = 4;

/// For as long as the daemon lives.
pub async fn oversee(machines: Machines) {
    loop {
        let (looking, begun) = (machines.clone(), Instant::now());
        let next = blocking(move || looking.look_after()).await;
        let took = begun.elapsed();
        let pause = next.unwrap_or_else(|e| {
            let text = format!("catalogs are not looked after: {e}");
            machines.shared.events.raise(EventKind::Failed, "host", text);
            MOST
        });
        // With many machines, of which much happens, it does not keep a core to itself.
        tokio::time::sleep(LEAST.max(took * LOOKS)).await;
        let _ = tokio::time::timeout(pause, machines.shared.stir.notified()).await;
    }
}

impl Machines {
    /// Records what is to be wanted next. How long nothing else is, unless something changes.
    fn look_after(&self) -> Result<Duration, HostError> {
        // Before the machines: one that says now what it runs with has not read an older catalog since.
        let catalogs = self.catalogs.list()?;
        let rests = self.host_is_closed()?;
        if rests && self.stop_all()? {
            return Ok(LEAST);
        }
        let mut of: HashMap<Name, Vec<View>> = HashMap::new();
        for view in self.views(&Selector::default())? {
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
                pause = pause.min(self.roll_out(&catalog, rollout, &views)?);
                rollouts.insert(catalog.name);
            }
        }
        self.shared.rollouts().retain(|catalog, _| rollouts.contains(catalog));
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
        if self.changes(view, |wanted| wanted.release(&catalog.spec, free))? {
            let object = format!("machine/{}", view.machine.name);
            self.shared.events.raise(EventKind::Released, &object, "its claim is over");
        }
        Ok(left)
    }

    /// Starts machines of which nothing was wanted yet, where the catalog says that they start by themselves.
    fn start_by_itself(&self, catalog: &Catalog, views: &[View]) -> Result<(), HostError> {
        let new = |view: &&View| view.revision == Revision::default();
        for view in views.iter().filter(|_| catalog.spec.autostart).filter(new) {
            self.changes(view, |wanted| wanted.power = Power::On)?;
        }
        Ok(())
    }

    fn drain(&self, view: &View) -> Result<(), HostError> {
        let wanted = &view.wanted;
        if wanted.drained && wanted.claim.is_none() && wanted.power == Power::On {
            self.changes(view, |wanted| wanted.power = Power::Off)?;
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
            self.changes(view, |wanted| wanted.start_anew(&catalog.spec))?;
        }
        Ok(())
    }

    /// Changes what is wanted of a machine, unless somebody has since it was looked at.
    pub(super) fn changes(&self, seen: &View, change: impl Fn(&mut Wanted)) -> Result<bool, HostError> {
        self.shared.objects.change(|changes| self.change_wanted(changes, seen, &change))
    }

    /// The same, as a part of a change.
    pub(super) fn change_wanted(
        &self,
        changes: &mut Changes,
        seen: &View,
        change: impl Fn(&mut Wanted),
    ) -> Result<bool, HostError> {
        let name = seen.machine.name.as_str();
        let is = changes.get::<Wanted>(name)?;
        // One that is gone is not to leave a wish behind for the next one of its name.
        let machine = changes.get::<Machine>(name)?.map(|machine| machine.value.identity);
        if is.as_ref().map(|wanted| wanted.revision).unwrap_or_default() != seen.revision
            || machine.as_ref() != Some(&seen.machine.identity)
        {
            return Ok(false);
        }
        let mut wanted = is.map(|wanted| wanted.value).unwrap_or_default();
        change(&mut wanted);
        if wanted.power == Power::On && is_closed(changes)? {
            return Ok(false);
        }
        changes.put(name, &wanted);
        Ok(true)
    }
}
