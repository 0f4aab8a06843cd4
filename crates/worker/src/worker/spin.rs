//! How long the loop polls after its last work before it sleeps: as long as that pays. Owns the times; reads no clock.
//!
//! A client on another processor that pauses for less than the longest poll is found by polling. A client that waits for
//! this very processor runs only once the loop sleeps, however long it has polled, and then wakes it as soon. Trials tell
//! the two apart.
//!
//! Invariant: polling that has not paid is halved each time, or left out for more and more wake-ups, so that slow stores,
//! rare requests and clients on the same processor cost next to nothing.

/// The shortest poll, unless the client seems to wait for this processor.
const LEAST_NS: u64 = 2_000;
/// Work that comes after so many polls was found by polling. After fewer, the client had the processor in between.
const POLLS_THAT_PAY: u32 = 8;
/// Most wake-ups from a trial in vain to the next one.
const MOST_WITHOUT_TRIAL: u32 = 256;

/// A time that adapts.
struct Spin {
    ns: u64,
    most_ns: u64,
    /// The last poll took the longest time and was in vain.
    most_was_in_vain: bool,
    /// Early wake-ups after which nothing is polled, and how many there will be after the next trial in vain.
    unpolled: u32,
    pause: u32,
}

impl Spin {
    /// It begins with the most.
    const fn new(most_ns: u64) -> Spin {
        Spin { ns: most_ns, most_ns, most_was_in_vain: false, unpolled: 0, pause: 1 }
    }

    /// How long now.
    fn ns(&self) -> u64 {
        self.ns
    }

    /// Work was found by polling.
    fn has_paid(&mut self) {
        self.pause = 1;
    }

    /// Nothing came in that time.
    fn was_in_vain(&mut self) {
        self.most_was_in_vain = self.ns == self.most_ns;
        self.ns = (self.ns / 2).max(LEAST_NS);
    }

    /// Something came after so long a sleep. If that was short, it would have paid to poll a little longer, unless it came
    /// because the loop slept.
    fn was_woken_after(&mut self, ns: u64) {
        if ns >= self.most_ns {
            return;
        }
        if self.most_was_in_vain {
            self.unpolled = self.pause;
            self.pause = (self.pause * 2).min(MOST_WITHOUT_TRIAL);
        }
        self.ns = if self.unpolled > 0 { 0 } else { self.most_ns };
        self.unpolled = self.unpolled.saturating_sub(1);
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
    last_work_ns: u64,
    /// Polls since the last work or sleep.
    polls: u32,
    /// The last turn in which something was done; a wake-up in vain is none.
    quiet_since_ns: u64,
}

impl Idle {
    /// Not yet.
    pub fn new() -> Idle {
        let spins = [Spin::new(MOST_NS), Spin::new(MOST_FOR_READS_NS)];
        Idle { spins, last_work_ns: 0, polls: 0, quiet_since_ns: 0 }
    }

    fn spin(&mut self, reads: usize) -> &mut Spin {
        &mut self.spins[usize::from(reads >= MANY_READS)]
    }

    /// Something was done in the turn that ends now.
    pub fn worked(&mut self, now_ns: u64, reads: usize) {
        if self.polls >= POLLS_THAT_PAY {
            self.spin(reads).has_paid();
        }
        self.polls = 0;
        (self.last_work_ns, self.quiet_since_ns) = (now_ns, now_ns);
    }

    /// Whether to poll on, with so many reads under way.
    pub fn polls_on(&mut self, now_ns: u64, reads: usize) -> bool {
        self.polls += 1;
        now_ns.saturating_sub(self.last_work_ns) < self.spin(reads).ns()
    }

    /// It sleeps: to have polled was in vain.
    pub fn sleeps(&mut self, reads: usize) {
        self.polls = 0;
        self.spin(reads).was_in_vain();
    }

    /// It was woken after so long.
    pub fn was_woken(&mut self, now_ns: u64, after_ns: u64, reads: usize) {
        self.spin(reads).was_woken_after(after_ns);
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

    #[test]
    fn it_stays_long_while_it_pays_and_only_then() {
        let mut spin = Spin::new(50_000);
        spin.was_in_vain();
        spin.was_woken_after(60_000);
        assert_eq!(spin.ns(), 25_000);
        (0..20).for_each(|_| spin.was_in_vain());
        assert_eq!(spin.ns(), LEAST_NS);
        spin.was_woken_after(49_999);
        assert_eq!(spin.ns(), 50_000);
    }

    /// How many of so many wake-ups by a client that waits for this processor came after a poll.
    fn polled_of(wake_ups: u32, spin: &mut Spin) -> u32 {
        (0..wake_ups)
            .map(|_| {
                let polled = spin.ns() > 0;
                spin.was_in_vain();
                spin.was_woken_after(5_000);
                u32::from(polled)
            })
            .sum()
    }

    #[test]
    fn a_client_that_waits_for_this_processor_is_polled_for_less_and_less() {
        let mut spin = Spin::new(50_000);
        assert_eq!(polled_of(1000, &mut spin), 11);
        // 1, 2, 4, ... 128 and then 256 each.
        assert_eq!(polled_of(10 * 257, &mut spin), 10);
    }

    #[test]
    fn a_client_elsewhere_is_polled_for_again_soon() {
        let mut spin = Spin::new(50_000);
        polled_of(1000, &mut spin);
        while spin.ns() == 0 {
            spin.was_in_vain();
            spin.was_woken_after(5_000);
        }
        // It pays now, and a single sleep changes nothing.
        spin.has_paid();
        assert_eq!(spin.ns(), 50_000);
        assert_eq!(polled_of(3, &mut spin), 2);
    }
}
