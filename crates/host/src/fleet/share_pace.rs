//! When the shares of this host are carried out again. Owns the two intervals for that.
//!
//! Invariant: other shares than before are carried out at once. The same ones are due at a moment that no wake-up between moves.

use spillway_fleet::agent::WantedShares;
use std::time::{Duration, Instant};

/// Time until shares are carried out again of which something is left to do. Records change more often than that, most of them for others.
const LEFT: Duration = Duration::from_secs(1);
/// The same if nothing is left: what somebody has changed on the host is brought back.
const REST: Duration = Duration::from_secs(30);

/// The shares that were carried out last, and when they are carried out again.
#[derive(Debug, Default)]
pub(super) struct SharePace(Option<(WantedShares, Instant)>);

impl SharePace {
    /// Whether these shares are to be carried out now.
    pub fn is_due(&self, shares: &WantedShares, now: Instant) -> bool {
        self.0.as_ref().is_none_or(|(last, due)| last != shares || now >= *due)
    }

    /// Notes that these shares were carried out, or that this was tried, and whether something is left to do.
    pub fn note(&mut self, shares: WantedShares, is_left: bool, now: Instant) {
        self.0 = Some((shares, now + if is_left { LEFT } else { REST }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds at which shares are carried out by a host that looks at them ten times a second, for a minute.
    fn carried_out(is_left: bool, shares_at: impl Fn(u64) -> WantedShares) -> Vec<f64> {
        let (mut pace, begin, mut at) = (SharePace::default(), Instant::now(), Vec::new());
        for tenth in 0..600 {
            let now = begin + Duration::from_millis(100 * tenth);
            let shares = shares_at(tenth);
            if pace.is_due(&shares, now) {
                pace.note(shares, is_left, now);
                at.push(tenth as f64 / 10.0);
            }
        }
        at
    }

    #[test]
    fn wake_ups_bring_the_same_shares_neither_sooner_nor_later() {
        let same = |_| WantedShares::default();
        assert_eq!(carried_out(false, same), [0.0, 30.0]);
        assert_eq!(carried_out(true, same), (0..60).map(f64::from).collect::<Vec<_>>());
    }

    #[test]
    fn other_shares_are_carried_out_at_once() {
        let changed = |tenth| {
            let mut shares = WantedShares::default();
            if tenth >= 123 {
                shares.unknown.insert("desk".parse().unwrap(), "it cannot be read".into());
            }
            shares
        };
        assert_eq!(carried_out(false, changed), [0.0, 12.3, 42.3]);
    }
}
