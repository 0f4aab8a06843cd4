//! How long the loop polls after its last work before it sleeps: as long as that pays. Owns the two times; reads no
//! clock.
//!
//! Invariant: polling that has not paid is halved each time, so that slow stores and rare requests cost next to nothing.

/// The least.
const LEAST_NS: u64 = 2_000;

/// A time that adapts.
struct Spin {
    ns: u64,
    most_ns: u64,
}

impl Spin {
    /// It begins with the most.
    const fn new(most_ns: u64) -> Spin {
        Spin { ns: most_ns, most_ns }
    }

    /// How long now.
    fn ns(&self) -> u64 {
        self.ns
    }

    /// Nothing came in that time.
    fn was_in_vain(&mut self) {
        self.ns = (self.ns / 2).max(LEAST_NS);
    }

    /// Something came after so long a sleep: if that was short, it would have paid to poll a little longer.
    fn was_woken_after(&mut self, ns: u64) {
        if ns < self.most_ns {
            self.ns = self.most_ns;
        }
    }
}

/// How long it polls at most after the last work.
const MOST_NS: u64 = 50_000;
/// With so many reads of the store under way the next one ends soon: it is polled for longer, if that pays.
const MANY_READS: usize = 8;
const MOST_FOR_READS_NS: u64 = 200_000;

/// How long the loop has had nothing to do.
pub struct Idle {
    /// By whether many reads are under way.
    spins: [Spin; 2],
    last_work_ns: u64,
    /// The last turn in which something was done; a wake-up in vain is none.
    quiet_since_ns: u64,
}

impl Idle {
    /// Not yet.
    pub fn new() -> Idle {
        let spins = [Spin::new(MOST_NS), Spin::new(MOST_FOR_READS_NS)];
        Idle { spins, last_work_ns: 0, quiet_since_ns: 0 }
    }

    fn spin(&mut self, reads: usize) -> &mut Spin {
        &mut self.spins[usize::from(reads >= MANY_READS)]
    }

    /// Something was done in the turn that ends now.
    pub fn worked(&mut self, now_ns: u64) {
        (self.last_work_ns, self.quiet_since_ns) = (now_ns, now_ns);
    }

    /// Whether to poll on, with so many reads under way.
    pub fn polls_on(&mut self, now_ns: u64, reads: usize) -> bool {
        now_ns.saturating_sub(self.last_work_ns) < self.spin(reads).ns()
    }

    /// It sleeps: to have polled was in vain.
    pub fn sleeps(&mut self, reads: usize) {
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
}
