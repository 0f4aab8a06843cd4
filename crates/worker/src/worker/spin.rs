//! How long the loop polls after its last work before it sleeps: as long as that pays. Owns the times; reads no clock.
//!
//! A client on another processor that pauses for less than the longest poll is found by polling. A client that waits for
//! this very processor runs only once the loop sleeps, however long it has polled, and then wakes it as soon. Trials tell
//! the two apart. What wakes the loop while an operation is under way may be its completion, and tells of no client.
//!
//! Invariant: polling that has not paid is halved each time, or left out for more and more wake-ups, so that slow stores,
//! rare requests and clients on the same processor cost next to nothing.

/// The shortest poll, unless the client seems to wait for this processor.
const LEAST_NS: u64 = 2_000;
/// Work that comes after so many polls was found by polling. After fewer, the client had the processor in between, or is
/// so fast that many pieces of work come without a sleep.
const POLLS_THAT_PAY: u32 = 8;
const WORK_THAT_PAYS: u32 = 64;
/// Most wake-ups from a trial in vain to the next one.
const MOST_WITHOUT_TRIAL: u32 = 256;

/// A time that adapts.
struct Spin {
    ns: u64,
    most_ns: u64,
    /// How long the loop has polled in vain before it slept last.
    vain_ns: u64,
    /// Early wake-ups after which nothing is polled, and how many there will be after the next trial in vain.
    unpolled: u32,
    pause: u32,
}

impl Spin {
    /// It begins with the most.
    const fn new(most_ns: u64) -> Spin {
        Spin { ns: most_ns, most_ns, vain_ns: 0, unpolled: 0, pause: 1 }
    }

    /// How long now.
    fn ns(&self) -> u64 {
        self.ns
    }

    /// Work was found by polling.
    fn has_paid(&mut self) {
        self.pause = 1;
    }

    /// The loop sleeps. If it has polled, nothing came in that time.
    fn sleeps(&mut self, has_polled: bool) {
        self.vain_ns = if has_polled { self.ns } else { 0 };
        self.ns = (self.ns / 2).max(LEAST_NS);
    }

    /// A client, or with an operation under way (`busy`) perhaps that, has woken the loop after so long a sleep. If that was
    /// short, it would have paid to poll a little longer, unless the client came because the loop slept.
    fn was_woken_after(&mut self, ns: u64, busy: bool) {
        if ns >= self.most_ns || busy && self.vain_ns + ns >= self.most_ns {
            return;
        }
        if !busy && self.vain_ns == self.most_ns {
            self.unpolled = self.pause;
            self.pause = (self.pause * 2).min(MOST_WITHOUT_TRIAL);
        }
        self.ns = if self.unpolled > 0 { 0 } else { self.most_ns };
        if !busy {
            self.unpolled = self.unpolled.saturating_sub(1);
        }
    }
}

/// How long it polls at most after the last work: to wake a client on a processor that rests takes up to half of it in a
/// virtual machine.
const MOST_NS: u64 = 100_000;
/// With so many reads of the store under way the next one ends soon: it is polled for longer, if that pays.
const MANY_READS: usize = 8;
const MOST_FOR_READS_NS: u64 = 200_000;

/// How long the loop has had nothing to do.
pub struct Idle {
    /// By whether many reads are under way.
    spins: [Spin; 2],
    /// Which of them the last poll was of.
    of: usize,
    last_work_ns: u64,
    /// Polls since the last work, and pieces of work since the last sleep.
    polls: u32,
    works: u32,
    /// The last turn in which something was done; a wake-up in vain is none.
    quiet_since_ns: u64,
}

impl Idle {
    /// Not yet.
    pub fn new() -> Idle {
        let spins = [Spin::new(MOST_NS), Spin::new(MOST_FOR_READS_NS)];
        Idle { spins, of: 0, last_work_ns: 0, polls: 0, works: 0, quiet_since_ns: 0 }
    }

    /// Something was done in the turn that ends now.
    pub fn worked(&mut self, now_ns: u64) {
        self.works = self.works.saturating_add(1);
        if self.polls >= POLLS_THAT_PAY || self.works >= WORK_THAT_PAYS {
            self.spins[self.of].has_paid();
        }
        self.polls = 0;
        (self.last_work_ns, self.quiet_since_ns) = (now_ns, now_ns);
    }

    /// Whether to poll on, with so many reads under way.
    pub fn polls_on(&mut self, now_ns: u64, reads: usize) -> bool {
        self.polls = self.polls.saturating_add(1);
        self.of = usize::from(reads >= MANY_READS);
        now_ns.saturating_sub(self.last_work_ns) < self.spins[self.of].ns()
    }

    /// It sleeps, with so many reads under way.
    pub fn sleeps(&mut self, reads: usize) {
        self.of = usize::from(reads >= MANY_READS);
        self.spins[self.of].sleeps(self.polls >= POLLS_THAT_PAY);
        (self.polls, self.works) = (0, 0);
    }

    /// It was woken after so long, before its own deadline; `busy`: with operations under way.
    pub fn was_woken(&mut self, now_ns: u64, after_ns: u64, busy: bool) {
        self.spins[self.of].was_woken_after(after_ns, busy);
        self.last_work_ns = now_ns;
    }

    /// Its sleep has ended at its deadline.
    pub fn has_slept(&mut self, now_ns: u64) {
        self.last_work_ns = now_ns;
    }

    /// Since when nothing was done.
    pub fn quiet_since_ns(&self) -> u64 {
        self.quiet_since_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a loop and its client do, in imagined time: a turn without work takes 200 ns.
    struct World {
        idle: Idle,
        now_ns: u64,
        polled_ns: u64,
    }

    impl World {
        fn new() -> World {
            World { idle: Idle::new(), now_ns: 0, polled_ns: 0 }
        }

        /// Something comes `after_ns` after the last work, or so long after the sleep begins if `waits_for_sleep`. Whether
        /// it was found by polling.
        fn next(&mut self, after_ns: u64, waits_for_sleep: bool, busy: bool) -> bool {
            self.idle.worked(self.now_ns);
            let begin = self.now_ns;
            while self.idle.polls_on(self.now_ns, 0) {
                self.now_ns += 200;
                self.polled_ns += 200;
                if !waits_for_sleep && self.now_ns >= begin + after_ns {
                    return true;
                }
            }
            self.idle.sleeps(0);
            let end = if waits_for_sleep { self.now_ns + after_ns } else { begin + after_ns };
            self.idle.was_woken(end, end - self.now_ns, busy);
            self.now_ns = end;
            false
        }
    }

    #[test]
    fn a_client_on_another_processor_is_found_by_polling() {
        for pause_ns in [3_000, 30_000, 90_000] {
            let mut world = World::new();
            let found = (0..1000).filter(|_| world.next(pause_ns, false, false)).count();
            assert!(found >= 999, "{pause_ns}: {found}");
        }
    }

    #[test]
    fn a_client_that_waits_for_this_processor_is_polled_for_less_and_less() {
        let mut world = World::new();
        (0..2000).for_each(|_| _ = world.next(5_000, true, false));
        // After the first poll and after 1, 2, 4, ... 256, 256, ... wake-ups.
        assert_eq!(world.polled_ns / MOST_NS, 1 + 8 + 6, "{}", world.polled_ns);
        // It is elsewhere from now on.
        let found = (0..1000).filter(|_| world.next(30_000, false, false)).count();
        assert!(found >= 1000 - MOST_WITHOUT_TRIAL as usize - 2, "{found}");
    }

    #[test]
    fn a_rare_client_costs_next_to_nothing() {
        let mut world = World::new();
        (0..1000).for_each(|_| _ = world.next(1_000_000, false, false));
        assert!(world.polled_ns < 1000 * 2 * LEAST_NS + 2 * MOST_NS, "{}", world.polled_ns);
    }

    /// Each request waits for a store, and the next one comes soon after that.
    #[test]
    fn a_store_is_no_client() {
        for store_ns in [80_000, 110_000, 150_000, 300_000] {
            let mut world = World::new();
            let mut found = 0;
            for _ in 0..1000 {
                world.next(store_ns, false, true);
                found += u32::from(world.next(10_000, false, false));
            }
            assert!(found >= 400, "{store_ns}: {found}");
        }
    }
}
