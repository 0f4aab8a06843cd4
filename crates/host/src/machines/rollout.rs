//! Decides which machines a rollout restarts next. Has no side effects.
//!
//! Invariant: a rollout restarts a machine only if fewer machines are unavailable than its strategy allows; machines that
//! were unavailable before do not count.

use super::View;
use super::run::DiskKind;
use spillway_api::{CatalogSpec, Name, Phase, RolloutStrategy};

/// State of a machine that should run, for a rollout.
#[derive(Clone, Copy, Debug)]
pub struct RolloutMember {
    /// It runs, and its task has read the latest desired state.
    runs: bool,
    /// It has reached its desired state, and its guest is ready.
    settled: bool,
    ready: bool,
    /// How its version compares with the rollout's.
    pub has: VersionMatch,
    /// It is claimed, and the grace of the claim is not over.
    spared: bool,
    /// Its last start has failed.
    failed: bool,
}

impl RolloutMember {
    /// Derives the state from an observed machine.
    pub fn of(view: &View, has: VersionMatch, spares: bool) -> RolloutMember {
        RolloutMember {
            runs: view.is_seen && view.status.phase == Phase::Running,
            settled: view.status.settled,
            ready: view.status.ready,
            has,
            spared: spares && view.wanted.claim.is_some(),
            failed: view.failure.is_some(),
        }
    }

    /// Whether it should be restarted. A guest that is not ready may never be with its old version.
    fn is_due(&self) -> bool {
        !self.spared && self.runs && self.has == VersionMatch::Outdated
    }

    /// Whether it needs no restart and no waiting.
    pub fn is_done(&self) -> bool {
        self.has != VersionMatch::Outdated && !self.is_on_its_way()
    }

    /// Whether the rollout waits for it. It does not wait for the guest of a spared machine.
    pub fn is_on_its_way(&self) -> bool {
        // A failed machine that runs has crashed repeatedly and may crash again.
        let stays = self.settled && !self.failed;
        !self.spared && !(self.runs && (stays || self.has == VersionMatch::Outdated))
    }

    /// Whether the rollout waits for it although it has failed.
    pub fn has_failed(&self) -> bool {
        self.failed && self.is_on_its_way()
    }

    /// Whether it is spared for now and runs another version.
    pub fn is_left_alone(&self) -> bool {
        self.spared && self.has == VersionMatch::Outdated
    }
}

/// Counts of machines by their progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RolloutTally {
    pub done: u32,
    pub of: u32,
    pub restarting: u32,
    pub failed: u32,
    /// Machines that are spared.
    pub waiting: u32,
}

impl RolloutTally {
    /// Counts these members, and `stopping` machines that should be off and have not stopped yet.
    pub fn of(steps: &[RolloutMember], stopping: usize) -> RolloutTally {
        let count = |is: fn(&RolloutMember) -> bool| steps.iter().filter(|step| is(step)).count() as u32;
        let (failed, stopping) = (count(RolloutMember::has_failed), stopping as u32);
        RolloutTally {
            done: count(RolloutMember::is_done),
            of: steps.len() as u32 + stopping,
            restarting: count(RolloutMember::is_on_its_way) - failed + stopping,
            failed,
            waiting: count(RolloutMember::is_left_alone),
        }
    }

    /// Whether the rollout is complete, except for at most `max_failed` failed machines.
    pub fn is_over(&self, max_failed: u32) -> bool {
        self.failed <= max_failed && self.done + self.failed == self.of
    }

    /// Whether only spared machines remain, and at most `max_failed` failed ones.
    pub fn is_left_to_others(&self, max_failed: u32) -> bool {
        let left = self.waiting > 0 && self.restarting == 0 && self.failed <= max_failed;
        left && self.done + self.failed + self.waiting == self.of
    }
}

/// How a machine's version compares with the one that machines of its catalog get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionMatch {
    /// It runs that version, or nothing.
    Current,
    /// It runs another version, which its kept disk stays on.
    Pinned,
    /// It runs another version, which a restart replaces.
    Outdated,
}

impl VersionMatch {
    /// Derives it from an observed machine, and the image and version that machines get.
    pub fn of(view: &View, gets: (&Name, u32), spec: &CatalogSpec) -> VersionMatch {
        let run = view.status.run.as_ref().map(|run| (&run.image, run.version));
        VersionMatch::beside(run, view.disk.as_ref(), gets, spec)
    }

    fn beside(
        run: Option<(&Name, u32)>,
        disk: Option<&DiskKind>,
        gets: (&Name, u32),
        spec: &CatalogSpec,
    ) -> VersionMatch {
        match run {
            None => VersionMatch::Current,
            Some(run) if run == gets => VersionMatch::Current,
            Some(_) if disk.is_some_and(|disk| disk.stays(spec)) => VersionMatch::Pinned,
            Some(_) => VersionMatch::Outdated,
        }
    }
}

/// Indexes of the machines to restart now. Up to `max_failed` failed machines take no place of a batch.
pub fn next(steps: &[RolloutMember], strategy: RolloutStrategy, max_failed: u32) -> Vec<usize> {
    let failed = steps.iter().filter(|step| step.has_failed()).count();
    let away = steps.iter().filter(|step| step.is_on_its_way()).count() - failed.min(max_failed as usize);
    let space = match strategy {
        RolloutStrategy::NextStart => 0,
        RolloutStrategy::Now => usize::MAX,
        RolloutStrategy::Batch(machines) => (machines as usize).saturating_sub(away),
    };
    let mut due: Vec<usize> = (0..steps.len()).filter(|&i| steps[i].is_due()).collect();
    // Restart those first that nobody can use.
    due.sort_by_key(|&i| steps[i].ready);
    due.truncate(space);
    due
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: RolloutMember = RolloutMember {
        runs: true,
        settled: true,
        ready: true,
        has: VersionMatch::Outdated,
        spared: false,
        failed: false,
    };
    const NEW: RolloutMember = RolloutMember { has: VersionMatch::Current, ..OLD };
    /// It has what is rolled out, and its guest boots.
    const BOOTS: RolloutMember = RolloutMember { settled: false, ready: false, ..NEW };
    /// With what it has its guest does not come up.
    const STUCK: RolloutMember = RolloutMember { settled: false, ready: false, ..OLD };
    /// Between two runs; what it has been is known still.
    const AWAY: RolloutMember = RolloutMember { runs: false, settled: false, ready: false, ..OLD };

    fn spared(step: RolloutMember) -> RolloutMember {
        RolloutMember { spared: true, ..step }
    }

    #[test]
    fn a_disk_that_stays_on_its_version_is_not_outdated() {
        let [debian, other]: [Name; 2] = ["debian", "other"].map(|name| name.parse().unwrap());
        let spec = |text: &str| serde_json::from_str::<CatalogSpec>(text).unwrap();
        let pooled = spec(r#"{"image":"debian"}"#);
        let dedicated = spec(r#"{"image":"debian","reset":"never"}"#);
        let of_other = spec(r#"{"image":"other","reset":"never"}"#);
        let disk = |spec: &CatalogSpec| DiskKind {
            image: debian.clone(),
            mode: spec.mode(),
            keeps_writes: spec.keeps_writes(),
            has_data: false,
        };
        let has = |disk, spec, image, version| {
            VersionMatch::beside(Some((&debian, 1)), Some(disk), (image, version), spec)
        };
        let (forgets, keeps) = (disk(&pooled), disk(&dedicated));
        assert_eq!(has(&forgets, &pooled, &debian, 1), VersionMatch::Current);
        assert_eq!(has(&forgets, &pooled, &debian, 2), VersionMatch::Outdated);
        assert_eq!(has(&keeps, &dedicated, &debian, 2), VersionMatch::Pinned);
        assert_eq!(has(&keeps, &of_other, &other, 2), VersionMatch::Outdated);
        // Settings that have changed since it was started.
        assert_eq!(
            has(&forgets, &dedicated, &debian, 2),
            VersionMatch::Outdated,
            "it kept nothing until now"
        );
        assert_eq!(has(&keeps, &pooled, &debian, 2), VersionMatch::Outdated, "it keeps nothing from now on");
        assert_eq!(VersionMatch::beside(None, None, (&debian, 2), &pooled), VersionMatch::Current);
    }

    #[test]
    fn a_batch_is_as_many_as_are_away() {
        let batch = |machines, steps: &[RolloutMember]| next(steps, RolloutStrategy::Batch(machines), 0);
        assert_eq!(batch(2, &[OLD, OLD, OLD]), [0, 1]);
        assert_eq!(batch(2, &[AWAY, OLD, OLD]), [1]);
        assert_eq!(batch(2, &[AWAY, BOOTS, OLD]), [0; 0], "until its guest is ready");
        assert_eq!(batch(2, &[NEW, BOOTS, OLD]), [2]);
        assert_eq!(batch(1, &[OLD, STUCK, OLD]), [1], "first what nobody can use");
        assert_eq!(batch(1, &[NEW, NEW]), [0; 0]);
        assert_eq!(next(&[OLD, AWAY, STUCK, NEW], RolloutStrategy::Now, 0), [2, 0]);
        assert_eq!(next(&[OLD, STUCK], RolloutStrategy::NextStart, 0), [0; 0]);
    }

    /// One that cannot be started holds its place, so that a bad version does not reach all; so many as are said are
    /// passed over.
    #[test]
    fn those_that_fail_hold_a_place_or_are_passed_over() {
        const FAILED: RolloutMember = RolloutMember { failed: true, has: VersionMatch::Current, ..AWAY };
        let batch = |steps: &[RolloutMember], max_failed| next(steps, RolloutStrategy::Batch(1), max_failed);
        assert_eq!(batch(&[FAILED, OLD, OLD], 0), [0; 0]);
        assert_eq!(batch(&[FAILED, OLD, OLD], 1), [1]);
        assert_eq!(batch(&[FAILED, FAILED, OLD], 1), [0; 0], "one more than may");
        assert_eq!(batch(&[FAILED, BOOTS, OLD], 1), [0; 0], "another is away");
        let crashes =
            [FAILED, RolloutMember { failed: true, ..NEW }, RolloutMember { failed: true, ..BOOTS }];
        for step in crashes {
            assert_eq!(
                RolloutTally::of(&[step], 0),
                RolloutTally { of: 1, failed: 1, ..RolloutTally::default() },
                "{step:?}"
            );
        }
        assert_eq!(batch(&[RolloutMember { failed: true, ..OLD }], 0), [0], "another version may mend it");
        let tally = RolloutTally::of(&[NEW, FAILED, BOOTS, OLD, spared(OLD)], 1);
        assert_eq!(tally, RolloutTally { done: 1, of: 6, restarting: 2, failed: 1, waiting: 1 });
        let over = |steps: &[RolloutMember], stopping, max| RolloutTally::of(steps, stopping).is_over(max);
        assert!(over(&[NEW, NEW], 0, 0) && over(&[NEW, FAILED], 0, 1) && !over(&[NEW, FAILED], 0, 0));
        assert!(!over(&[NEW], 1, 0), "it may be wanted again with what it has");
        assert!(!over(&[NEW, spared(OLD)], 0, 0) && !over(&[NEW, OLD], 0, 0));
        assert!(RolloutTally::of(&[NEW, FAILED, spared(OLD)], 0).is_left_to_others(1));
        assert!(!RolloutTally::of(&[NEW, FAILED, spared(OLD)], 0).is_left_to_others(0));
        assert!(!RolloutTally::of(&[OLD, spared(OLD)], 0).is_left_to_others(0));
    }

    #[test]
    fn who_is_spared_is_neither_restarted_nor_waited_for() {
        for step in [OLD, STUCK, AWAY, BOOTS] {
            assert_eq!(next(&[spared(step), OLD], RolloutStrategy::Batch(1), 0), [1], "{step:?}");
            assert!(!spared(step).is_on_its_way());
        }
        let waited_for = [OLD, NEW, BOOTS, STUCK, AWAY].map(|step| step.is_on_its_way());
        assert_eq!(waited_for, [false, false, true, false, true]);
        // Of somebody who is spared what is older is to be done still.
        let done =
            [OLD, NEW, BOOTS, spared(OLD), spared(BOOTS), RolloutMember { has: VersionMatch::Pinned, ..OLD }];
        assert_eq!(done.map(|step| step.is_done()), [false, true, false, false, true, true]);
    }
}
