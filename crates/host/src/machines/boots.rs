//! Gives machines turns to boot, and wakes those whose turn it is. Owns the turns.
//!
//! Invariant: whoever ends a turn wakes the machines that are next.

use super::registry::MachineRegistry;
use crate::resources::boots::{Boot, BootRank, BootTurns, BootWait};
use spillway_api::Name;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How many machines boot at the same time, and how long each of them counts.
#[derive(Clone, Copy, Debug)]
pub struct BootLimits {
    /// Number of machines; 0: no limit.
    pub at_once: usize,
    /// How long a machine that is not ready counts as booting.
    pub patience: Duration,
}

/// The turns of the machines of a host.
pub struct BootQueue {
    turns: Mutex<BootTurns>,
    registry: Arc<MachineRegistry>,
}

impl BootQueue {
    /// Creates a queue in which nobody waits.
    pub fn new(limits: BootLimits, registry: Arc<MachineRegistry>) -> BootQueue {
        BootQueue { turns: Mutex::new(BootTurns::new(limits.at_once, limits.patience)), registry }
    }

    /// Gives the machine a turn if it is next, or puts it in the queue.
    pub fn take(&self, boot: Boot<'_>, rank: BootRank) -> Result<(), BootWait> {
        self.with(|turns, now| turns.take(boot, rank, now))
    }

    /// Records that a machine boots, whether it has a turn or not.
    pub fn note(&self, boot: Boot<'_>) {
        self.with(|turns, now| turns.note(boot, now));
    }

    /// Ends the turn of a machine, or its wait.
    pub fn end(&self, name: &Name) {
        self.with(|turns, now| turns.end(name, now));
    }

    /// Until when a machine counts as booting, if it does.
    pub fn counts_until(&self, name: &Name) -> Option<Instant> {
        self.with(|turns, now| turns.counts_until(name, now))
    }

    fn with<T>(&self, act: impl FnOnce(&mut BootTurns, Instant) -> T) -> T {
        let mut turns = self.turns.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let done = act(&mut turns, Instant::now());
        let told = turns.told();
        drop(turns);
        self.registry.wake(&told);
        done
    }
}

/// What people read of a machine that waits.
impl fmt::Display for BootWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.booting + self.before {
            0 => f.write_str("it boots next"),
            1 => f.write_str("1 machine boots before it"),
            others => write!(f, "{others} machines boot before it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_waits_says_for_how_many() {
        let text = |booting, before| BootWait { booting, before, until: None }.to_string();
        assert_eq!(text(2, 1), "3 machines boot before it");
        assert_eq!((text(1, 0), text(0, 0)), ("1 machine boots before it".into(), "it boots next".into()));
    }
}
