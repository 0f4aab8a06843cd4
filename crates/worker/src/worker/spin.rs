//! How long the loop polls after its last work before it sleeps: as long as that pays. Owns the two times; reads no
//! clock.
//!
//! Invariant: polling that has not paid is halved each time, so that slow stores and rare requests cost next to nothing.

/// The least.
const LEAST_NS: u64 = 2_000;

/// A time that adapts.
pub struct Spin {
    ns: u64,
    most_ns: u64,
}

impl Spin {
    /// It begins with the most.
    pub const fn new(most_ns: u64) -> Spin {
        Spin { ns: most_ns, most_ns }
    }

    /// How long now.
    pub fn ns(&self) -> u64 {
        self.ns
    }

    /// Nothing came in that time.
    pub fn was_in_vain(&mut self) {
        self.ns = (self.ns / 2).max(LEAST_NS);
    }

    /// Something came after so long a sleep: if that was short, it would have paid to poll a little longer.
    pub fn was_woken_after(&mut self, ns: u64) {
        if ns < self.most_ns {
            self.ns = self.most_ns;
        }
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
