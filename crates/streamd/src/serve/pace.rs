//! How long a source takes to answer. Owns the times of its last answers.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

/// Answers of which the time is remembered.
const REMEMBERED: usize = 64;
/// Time before enough answers have come.
const UNKNOWN: Duration = Duration::from_secs(1);
/// Answers that are enough.
const ENOUGH: usize = 16;

/// The times.
pub struct Pace {
    took: Mutex<VecDeque<Duration>>,
    least: Duration,
}

impl Pace {
    /// Of a source of which nothing is known; another is never asked before this time.
    pub fn new(least: Duration) -> Pace {
        Pace { took: Mutex::default(), least }
    }

    /// An answer took so long.
    pub fn took(&self, time: Duration) {
        let mut took = self.took.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if took.len() == REMEMBERED {
            took.pop_front();
        }
        took.push_back(time);
    }

    /// Time without an answer after which another source is asked, too: twice of what 19 of 20 take.
    pub fn hedge(&self) -> Duration {
        let took = self.took.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if took.len() < ENOUGH {
            return UNKNOWN.max(self.least);
        }
        let mut sorted: Vec<_> = took.iter().collect();
        sorted.sort_unstable();
        (*sorted[sorted.len() * 19 / 20] * 2).max(self.least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hedge_follows_what_answers_take() {
        let pace = Pace::new(Duration::from_millis(200));
        assert_eq!(pace.hedge(), UNKNOWN);
        (0..32).for_each(|_| pace.took(Duration::from_millis(20)));
        assert_eq!(pace.hedge(), Duration::from_millis(200));
        (0..8).for_each(|_| pace.took(Duration::from_millis(300)));
        assert_eq!(pace.hedge(), Duration::from_millis(600));
        (0..REMEMBERED).for_each(|_| pace.took(Duration::from_millis(110)));
        assert_eq!(pace.hedge(), Duration::from_millis(220));
        assert_eq!(Pace::new(Duration::from_secs(600)).hedge(), Duration::from_secs(600));
    }
}
