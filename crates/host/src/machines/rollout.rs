//! Which machines a rollout restarts next. Decides, and does nothing.
//!
//! Invariant: of those that a rollout may restart no more are away at a time than it may take, but for those that were away before.

use super::View;
use spillway_api::{Phase, Rollout, RolloutStrategy};

/// A machine that is to run, as a rollout sees it.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// It runs, and was looked at since something was wanted of it.
    runs: bool,
    /// It is as it is wanted, its guest too.
    settled: bool,
    ready: bool,
    outdated: bool,
    /// Somebody has it whose time is not over.
    spared: bool,
}

impl Step {
    /// As it is known.
    pub fn of(view: &View, outdated: bool, spares: bool) -> Step {
        Step {
            runs: view.is_seen && view.status.phase == Phase::Running,
            settled: view.status.settled,
            ready: view.status.ready,
            outdated,
            spared: spares && view.wanted.claim.is_some(),
        }
    }

    /// It is to be restarted. One whose guest is not ready may never be, with what it has.
    fn is_due(&self) -> bool {
        !self.spared && self.runs && self.outdated
    }

    /// It is waited for. Not the guest of somebody who is spared.
    pub fn is_on_its_way(&self) -> bool {
        !self.spared && !(self.runs && (self.settled || self.outdated))
    }
}

/// Whether a machine runs with something else than what is rolled out. `keeps_writes`: a restart brings such disks another image,
/// and no other version.
pub fn is_outdated(view: &View, rollout: &Rollout, keeps_writes: bool) -> bool {
    view.status
        .run
        .as_ref()
        .is_some_and(|run| run.image != rollout.image || (run.version != rollout.version && !keeps_writes))
}

/// The places of those that are restarted now.
pub fn next(steps: &[Step], strategy: RolloutStrategy) -> Vec<usize> {
    let away = steps.iter().filter(|step| step.is_on_its_way()).count();
    let room = match strategy {
        RolloutStrategy::NextStart => 0,
        RolloutStrategy::Now => usize::MAX,
        RolloutStrategy::Batch(machines) => (machines as usize).saturating_sub(away),
    };
    let mut due: Vec<usize> = (0..steps.len()).filter(|&i| steps[i].is_due()).collect();
    // Those first that nobody can use.
    due.sort_by_key(|&i| steps[i].ready);
    due.truncate(room);
    due
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Step = Step { runs: true, settled: true, ready: true, outdated: true, spared: false };
    const NEW: Step = Step { outdated: false, ..OLD };
    /// It has what is rolled out, and its guest boots.
    const BOOTS: Step = Step { settled: false, ready: false, ..NEW };
    /// With what it has its guest does not come up.
    const STUCK: Step = Step { settled: false, ready: false, ..OLD };
    /// Between two runs; what it has been is known still.
    const AWAY: Step = Step { runs: false, settled: false, ready: false, ..OLD };

    fn spared(step: Step) -> Step {
        Step { spared: true, ..step }
    }

    #[test]
    fn a_batch_is_as_many_as_are_away() {
        let batch = |machines, steps: &[Step]| next(steps, RolloutStrategy::Batch(machines));
        assert_eq!(batch(2, &[OLD, OLD, OLD]), [0, 1]);
        assert_eq!(batch(2, &[AWAY, OLD, OLD]), [1]);
        assert_eq!(batch(2, &[AWAY, BOOTS, OLD]), [0; 0], "until its guest is ready");
        assert_eq!(batch(2, &[NEW, BOOTS, OLD]), [2]);
        assert_eq!(batch(1, &[OLD, STUCK, OLD]), [1], "first what nobody can use");
        assert_eq!(batch(1, &[NEW, NEW]), [0; 0]);
        assert_eq!(next(&[OLD, AWAY, STUCK, NEW], RolloutStrategy::Now), [2, 0]);
        assert_eq!(next(&[OLD, STUCK], RolloutStrategy::NextStart), [0; 0]);
    }

    #[test]
    fn who_is_spared_is_neither_restarted_nor_waited_for() {
        for step in [OLD, STUCK, AWAY, BOOTS] {
            assert_eq!(next(&[spared(step), OLD], RolloutStrategy::Batch(1)), [1], "{step:?}");
            assert!(!spared(step).is_on_its_way());
        }
        let waited_for = [OLD, NEW, BOOTS, STUCK, AWAY].map(|step| step.is_on_its_way());
        assert_eq!(waited_for, [false, false, true, false, true]);
    }
}
