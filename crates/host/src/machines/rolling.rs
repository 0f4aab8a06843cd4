//! Rollouts in progress: restarts machines, reports the progress and the machines in the way. Owns their deadlines in
//! memory: a new daemon begins them anew.
//!
//! Invariant: a rollout without progress within its deadline reports that once, and continues by itself when it can.

use super::desired_writer::DesiredStateWriter;
use super::rollout::{self, RolloutMember, RolloutTally, VersionMatch};
use super::views::View;
use super::word;
use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::events::Events;
use crate::store::Revision;
use jiff::Timestamp;
use spillway_api::{
    BlockingMachine, Catalog, EventKind, Name, Phase, Power, Rollout, RolloutProgress, RolloutState,
};
use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Longest interval between two passes.
const MOST: Duration = Duration::from_secs(30);
/// Number of machines that are named as being in the way.
const MOST_NAMED: usize = 16;
/// Longest reason for each of them, in characters.
const MOST_LETTERS: usize = 300;

/// Progress of one rollout.
#[derive(Debug)]
struct TrackedRollout {
    /// Identity of the rollout: when it was requested, and the version that it brings.
    of: (Timestamp, Name, u32),
    /// Until when claimed machines are spared; `None`: until they are released.
    spares_until: Option<Instant>,
    /// Highest number of machines that were done.
    best: u32,
    /// When the rollout last made progress, or did not need to.
    moved: Instant,
    progress: RolloutProgress,
}

impl TrackedRollout {
    /// Begins to track a rollout. Only this reads the wall clock, which may be set.
    fn new(rollout: &Rollout) -> TrackedRollout {
        let (wall, now) = (Timestamp::now(), Instant::now());
        let passed = u64::try_from(wall.duration_since(rollout.since).as_secs()).unwrap_or(0);
        let left = |grace: u32| Duration::from_secs(u64::from(grace).saturating_sub(passed));
        TrackedRollout {
            of: identity(rollout),
            spares_until: rollout.claim_grace_seconds.map(|grace| now + left(grace)),
            best: 0,
            moved: now,
            progress: RolloutProgress {
                state: RolloutState::Running,
                reason: None,
                done: 0,
                of: 0,
                restarting: 0,
                failed: 0,
                waiting: 0,
                progressed: wall,
                in_the_way: Vec::new(),
            },
        }
    }

    /// How long claimed machines are still spared; `None`: until they are released.
    fn spares(&self) -> Option<Duration> {
        Some(self.spares_until?.saturating_duration_since(Instant::now()))
    }

    /// Processes a count of the machines. Returns the text of an event, if there is one.
    fn look(
        &mut self,
        rollout: &Rollout,
        tally: RolloutTally,
        restarted: usize,
        in_the_way: Vec<BlockingMachine>,
        now: Instant,
    ) -> Option<String> {
        let is_left_to_others = tally.is_left_to_others(rollout.max_failed);
        let moves = tally.done > self.best || restarted > 0;
        self.best = self.best.max(tally.done);
        if moves || rollout.paused || is_left_to_others {
            self.moved = now;
        }
        let state = match () {
            () if rollout.paused => RolloutState::Paused,
            () if is_left_to_others => RolloutState::Waiting,
            () if now.saturating_duration_since(self.moved) >= deadline(rollout) => RolloutState::Stalled,
            () => RolloutState::Running,
        };
        let was_stalled = self.progress.state == RolloutState::Stalled;
        let RolloutTally { done, of, restarting, failed, waiting } = tally;
        let first =
            in_the_way.first().map(|one| format!(": {}: {}", one.machine, one.why)).unwrap_or_default();
        let reason = match state {
            RolloutState::Running => None,
            RolloutState::Paused => Some("paused by request".into()),
            RolloutState::Waiting if waiting == 1 => {
                Some("waiting for the release of one claimed machine".into())
            }
            RolloutState::Waiting => Some(format!("waiting for the release of {waiting} claimed machines")),
            RolloutState::Stalled => Some(format!(
                "no progress in {} s: {failed} machines have failed and {restarting} are not ready{first}",
                rollout.deadline_seconds
            )),
        };
        let progressed = if moves { Timestamp::now() } else { self.progress.progressed };
        self.progress =
            RolloutProgress { state, reason, done, of, restarting, failed, waiting, progressed, in_the_way };
        let what = format!("the rollout of {}:{}", rollout.image, rollout.version);
        match (was_stalled, state == RolloutState::Stalled, &self.progress.reason) {
            (false, true, Some(reason)) => {
                Some(format!("{what} is stalled, {done} of {of} machines are done: {reason}"))
            }
            (true, false, _) => Some(format!("{what} continues: {done} of {of} machines are done")),
            _ => None,
        }
    }

    /// Time until the rollout counts as stalled.
    fn until_stalled(&self, rollout: &Rollout) -> Duration {
        match self.progress.state {
            RolloutState::Running => deadline(rollout).saturating_sub(self.moved.elapsed()),
            RolloutState::Waiting | RolloutState::Stalled | RolloutState::Paused => MOST,
        }
    }
}

fn identity(rollout: &Rollout) -> (Timestamp, Name, u32) {
    (rollout.since, rollout.image.clone(), rollout.version)
}

fn deadline(rollout: &Rollout) -> Duration {
    Duration::from_secs(rollout.deadline_seconds.into())
}

/// Drives the rollouts in progress.
pub struct Rollouts {
    /// Tracked rollouts, by catalog.
    rolling: Mutex<HashMap<Name, TrackedRollout>>,
    catalogs: Catalogs,
    desired: DesiredStateWriter,
    events: Events,
}

impl Rollouts {
    /// Creates the driver of the rollouts of these catalogs.
    pub fn new(catalogs: Catalogs, desired: DesiredStateWriter, events: Events) -> Rollouts {
        Rollouts { rolling: Mutex::default(), catalogs, desired, events }
    }

    /// Restarts machines that run another version, as many at a time as the strategy allows. Returns the time until the
    /// next pass is needed.
    pub(super) fn roll_out(
        &self,
        catalog: &Catalog,
        rollout: &Rollout,
        views: &[View],
    ) -> Result<Duration, HostError> {
        let on: Vec<&View> = views.iter().filter(|view| view.wanted.power == Power::On).collect();
        // The observed state may be older than the catalog.
        let has = |view: &View| VersionMatch::of(view, (&rollout.image, rollout.version), &catalog.spec);
        // A machine that has not stopped yet may be started again, and continue with its old version.
        let is_stopping = |view: &&View| {
            let has_stopped = view.status.settled && view.status.phase == Phase::Stopped;
            view.wanted.power == Power::Off && !has_stopped && has(view) == VersionMatch::Outdated
        };
        let stopping: Vec<&View> = views.iter().filter(is_stopping).collect();
        let spared = self.look(catalog, rollout, |rolling| rolling.spares());
        let spares = spared != Some(Duration::ZERO);
        let steps: Vec<RolloutMember> =
            on.iter().map(|view| RolloutMember::of(view, has(view), spares)).collect();
        let next = match rollout.paused {
            true => Vec::new(),
            false => rollout::next(&steps, rollout.strategy, rollout.max_failed),
        };
        let mut restarted = 0;
        for view in next.into_iter().map(|i| on[i]) {
            let grace_seconds = catalog.spec.grace_seconds;
            restarted += usize::from(self.desired.change(view, |wanted| {
                (wanted.restarts, wanted.requested) = (wanted.restarts + 1, false);
                wanted.grace_seconds = grace_seconds;
            })?);
        }
        let tally = RolloutTally::of(&steps, stopping.len());
        let (object, version) =
            (format!("catalog/{}", catalog.name), format!("{}:{}", rollout.image, rollout.version));
        if tally.is_over(rollout.max_failed) {
            self.catalogs.end_rollout(&catalog.name, Revision(catalog.revision))?;
            let kept = steps.iter().filter(|step| step.has == VersionMatch::Pinned).count();
            let mut text = format!("{version} has reached all machines");
            if kept > 0 {
                text += &format!(" but {kept}, whose disks stay on their version");
            }
            if tally.failed > 0 {
                text += &format!("; {} have failed, which max_failed allows", tally.failed);
            }
            self.events.raise(EventKind::RolledOut, &object, text);
            return Ok(MOST);
        }
        let in_the_way = in_the_way(&on, &steps, &stopping);
        let (told, left) = self.look(catalog, rollout, |rolling| {
            let told = rolling.look(rollout, tally, restarted, in_the_way, Instant::now());
            (told, rolling.until_stalled(rollout))
        });
        told.into_iter().for_each(|text| self.events.raise(EventKind::Rollout, &object, text));
        Ok(spared.filter(|spared| !spared.is_zero()).unwrap_or(MOST).min(left))
    }

    /// Adds the progress of its rollout to a catalog.
    pub fn with_progress(&self, mut catalog: Catalog) -> Catalog {
        if let Some(rollout) = &mut catalog.rollout {
            let rollouts = self.lock();
            let rolling = rollouts.get(&catalog.name).filter(|rolling| rolling.of == identity(rollout));
            rollout.progress = rolling.map(|rolling| rolling.progress.clone());
        }
        catalog
    }

    /// Forgets the rollouts of catalogs that do not exist any more.
    pub fn keep(&self, catalogs: &HashSet<Name>) {
        self.lock().retain(|catalog, _| catalogs.contains(catalog));
    }

    /// Calls `ask` with the tracked rollout of a catalog.
    fn look<T>(&self, catalog: &Catalog, rollout: &Rollout, ask: impl FnOnce(&mut TrackedRollout) -> T) -> T {
        let mut rollouts = self.lock();
        let rolling = rollouts.entry(catalog.name.clone()).or_insert_with(|| TrackedRollout::new(rollout));
        if rolling.of != identity(rollout) {
            *rolling = TrackedRollout::new(rollout);
        }
        ask(rolling)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Name, TrackedRollout>> {
        self.rolling.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Returns the machines that are neither done nor next, with reasons; failed ones first.
fn in_the_way(on: &[&View], steps: &[RolloutMember], stopping: &[&View]) -> Vec<BlockingMachine> {
    let mut all: Vec<(u8, &View)> = Vec::new();
    for (view, step) in on.iter().zip(steps) {
        let place = match () {
            () if step.has_failed() => 0,
            () if step.is_on_its_way() => 1,
            () if step.is_left_alone() => 2,
            () => continue,
        };
        all.push((place, *view));
    }
    all.extend(stopping.iter().map(|view| (1, *view)));
    all.sort_by_key(|(place, view)| (*place, view.machine.number));
    all.truncate(MOST_NAMED);
    all.into_iter()
        .map(|(_, view)| BlockingMachine { machine: view.machine.name.clone(), why: why(view) })
        .collect()
}

fn why(view: &View) -> String {
    let status = &view.status;
    let phase = match status.phase {
        Phase::Running => "its guest is not ready".to_owned(),
        phase => format!("it is {}", word(phase)),
    };
    let mut text = match (status.message.as_ref().or(view.failure.as_ref()), &view.wanted.claim) {
        (Some(message), _) => message.clone(),
        (None, Some(claim)) => format!("it is claimed since {:.0}", claim.since),
        (None, None) => match status.since {
            Some(since) => format!("{phase} since {since:.0}"),
            None => phase,
        },
    };
    let crashes = status.run.as_ref().map_or(0, |run| run.crashes);
    if crashes > 0 {
        text += &format!("; its VMM has ended by itself {crashes} times");
    }
    text.chars().take(MOST_LETTERS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rollout(deadline_seconds: u32, max_failed: u32) -> Rollout {
        let rollout = serde_json::json!({
            "strategy": { "batch": 1 }, "claim_grace_seconds": null, "deadline_seconds": deadline_seconds,
            "max_failed": max_failed, "paused": false, "since": Timestamp::now(), "image": "debian", "version": 3,
        });
        serde_json::from_value(rollout).unwrap()
    }

    fn failed() -> Vec<BlockingMachine> {
        vec![BlockingMachine { machine: "desk-002".parse().unwrap(), why: "no space".into() }]
    }

    #[test]
    fn a_rollout_that_makes_no_progress_says_so_once_and_goes_on() {
        let rollout = rollout(600, 0);
        let mut rolling = TrackedRollout::new(&rollout);
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let tally = |done, failed| RolloutTally { done, of: 5, restarting: 0, failed, waiting: 0 };
        assert_eq!(rolling.look(&rollout, tally(0, 0), 1, vec![], at(0)), None);
        assert_eq!(rolling.look(&rollout, tally(1, 0), 1, vec![], at(100)), None);
        assert_eq!(rolling.look(&rollout, tally(1, 1), 0, failed(), at(699)), None);
        assert_eq!((rolling.progress.state, &rolling.progress.reason), (RolloutState::Running, &None));
        assert_eq!(rolling.progress.in_the_way, failed(), "it is seen before the deadline");
        let told = rolling.look(&rollout, tally(1, 1), 0, failed(), at(700)).unwrap();
        assert_eq!(
            told,
            "the rollout of debian:3 is stalled, 1 of 5 machines are done: no progress in 600 s: 1 machines have failed \
             and 0 are not ready: desk-002: no space"
        );
        assert_eq!(rolling.progress.state, RolloutState::Stalled);
        // One that is done and not any more, and done again, is no progress.
        for (done, seconds) in [(1, 701), (0, 702), (1, 703)] {
            assert_eq!(rolling.look(&rollout, tally(done, 1), 0, failed(), at(seconds)), None);
        }
        let told = rolling.look(&rollout, tally(2, 0), 1, vec![], at(800)).unwrap();
        assert_eq!(told, "the rollout of debian:3 continues: 2 of 5 machines are done");
        assert_eq!(rolling.progress.state, RolloutState::Running);
        assert_eq!(rolling.look(&rollout, tally(2, 0), 0, vec![], at(1399)), None);
        assert!(rolling.look(&rollout, tally(2, 0), 0, vec![], at(1400)).unwrap().contains("stalled"));
    }

    #[test]
    fn who_is_paused_or_waits_for_claims_is_not_stalled() {
        let mut rollout = rollout(10, 1);
        let mut rolling = TrackedRollout::new(&rollout);
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let claimed = RolloutTally { done: 3, of: 5, restarting: 0, failed: 1, waiting: 1 };
        for seconds in [0, 1000] {
            assert_eq!(rolling.look(&rollout, claimed, 0, vec![], at(seconds)), None);
            assert_eq!(rolling.progress.state, RolloutState::Waiting);
            let reason = rolling.progress.reason.as_deref();
            assert_eq!(reason, Some("waiting for the release of one claimed machine"));
        }
        let stuck = RolloutTally { done: 3, of: 5, restarting: 1, failed: 0, waiting: 0 };
        rollout.paused = true;
        assert_eq!(rolling.look(&rollout, stuck, 0, vec![], at(2000)), None);
        assert_eq!(rolling.progress.state, RolloutState::Paused);
        // The deadline begins anew.
        rollout.paused = false;
        assert_eq!(rolling.look(&rollout, stuck, 0, vec![], at(2009)), None);
        assert!(rolling.look(&rollout, stuck, 0, vec![], at(2010)).is_some());
    }
}
