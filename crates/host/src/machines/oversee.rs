//! What concerns more than one machine: how many are kept warm, claims that end, machines that are drained, updates that
//! are rolled out. Owns no state: it looks at what is recorded and what runs, and records what is wanted next.
//!
//! Invariant: each step may be done again, and changes only what nobody has changed since it looked.

use super::act::free;
use super::closing::is_closed;
use super::rollout::{self, Has, Step};
use super::wanted::Wanted;
use super::{Machines, View, blocking};
use crate::error::HostError;
use crate::store::{Changes, Revision};
use jiff::Timestamp;
use spillway_api::{Catalog, EventKind, Machine, Name, Phase, Power, Rollout, Selector};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Between two looks when much happens, and when nothing does.
const LEAST: Duration = Duration::from_millis(100);
const MOST: Duration = Duration::from_secs(30);

/// For as long as the daemon lives.
pub async fn oversee(machines: Machines) {
    loop {
        let looking = machines.clone();
        let next = blocking(move || looking.look_after()).await;
        let pause = next.unwrap_or_else(|e| {
            let text = format!("catalogs are not looked after: {e}");
            machines.shared.events.raise(EventKind::Failed, "host", text);
            MOST
        });
        tokio::time::sleep(LEAST).await;
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
            }
        }
        Ok(pause)
    }

    /// Releases a machine whose claim is over. How long it still lasts.
    fn end_claim(&self, catalog: &Catalog, view: &View, views: &[View]) -> Result<Duration, HostError> {
        let Some(left) = view.wanted.claim.as_ref().and_then(|claim| claim.left()) else { return Ok(MOST) };
        let free = free(views, Some(&view.machine.name));
        if left.is_zero() && self.changes(view, |wanted| wanted.release(&catalog.spec, free))? {
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

    /// Restarts machines that run with something else, as many at a time as is wanted. How long it waits for a claim.
    fn roll_out(&self, catalog: &Catalog, rollout: &Rollout, views: &[View]) -> Result<Duration, HostError> {
        let on: Vec<&View> = views.iter().filter(|view| view.wanted.power == Power::On).collect();
        // What they say of themselves may be older than the catalog.
        let has = |view: &View| Has::of(view, rollout, &catalog.spec);
        // One that has not stopped yet may be wanted again, and go on with what it has.
        let is_stopping = |view: &&View| {
            view.wanted.power == Power::Off && !(view.status.settled && view.status.phase == Phase::Stopped)
        };
        let stays_behind = views.iter().filter(is_stopping).any(|view| has(view) == Has::Other);
        let spared = rollout.grace_seconds.map(|grace| self.left_of(&catalog.name, rollout, grace));
        let spares = spared != Some(Duration::ZERO);
        let steps: Vec<Step> = on.iter().map(|view| Step::of(view, has(view), spares)).collect();
        for view in rollout::next(&steps, rollout.strategy).into_iter().map(|i| on[i]) {
            let grace_seconds = catalog.spec.grace_seconds;
            self.changes(view, |wanted| {
                wanted.restarts += 1;
                wanted.grace_seconds = grace_seconds;
            })?;
        }
        if !stays_behind && steps.iter().all(Step::is_done) {
            self.catalogs.is_rolled_out(&catalog.name, Revision(catalog.revision))?;
            let kept = steps.iter().filter(|step| step.has == Has::Kept).count();
            let but = match kept {
                0 => String::new(),
                _ => format!(" but {kept}, whose disks stay on their version"),
            };
            let text = format!("{}:{} has reached all machines{but}", rollout.image, rollout.version);
            self.shared.events.raise(EventKind::RolledOut, &format!("catalog/{}", catalog.name), text);
        }
        Ok(spared.filter(|spared| !spared.is_zero()).unwrap_or(MOST))
    }

    /// How long machines that are claimed are spared still. The wall clock is asked once in a daemon's life: it may be set.
    fn left_of(&self, catalog: &Name, rollout: &Rollout, grace_seconds: u32) -> Duration {
        let mut graces = self.shared.graces.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (since, end) = graces.entry(catalog.clone()).or_insert((Timestamp::MIN, Instant::now()));
        if *since != rollout.since {
            let passed = Timestamp::now().duration_since(rollout.since).as_secs();
            let left = u64::from(grace_seconds).saturating_sub(u64::try_from(passed).unwrap_or(0));
            (*since, *end) = (rollout.since, Instant::now() + Duration::from_secs(left));
        }
        end.saturating_duration_since(Instant::now())
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
