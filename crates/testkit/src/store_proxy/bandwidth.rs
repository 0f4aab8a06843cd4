//! A limit of bytes a second that connections share. Owns until when what has passed is paid for, as storage models of disks do.
//!
//! Invariant: pieces pass in the order in which they were asked for. A connection asks for one piece at a time, so those that have
//! something to send take turns.

use std::sync::Mutex;
use std::time::{Duration, Instant};
use tokio::time::sleep_until;

/// A body that was held up for less, by a timer or a scheduler that was late, is not slower for it.
const LATE: Duration = Duration::from_millis(5);
/// Largest piece, in bytes, and the smallest.
const PIECES: (u64, u64) = (64 << 10, 512);
/// Share of a second that a piece takes, if that is no smaller or larger piece.
const PIECES_A_SECOND: u64 = 200;

/// One direction of the link.
#[derive(Default)]
pub struct Bandwidth {
    paid_until: Mutex<Option<Instant>>,
}

impl Bandwidth {
    /// Size of the pieces in which a body passes at this rate.
    pub fn piece_bytes(bytes_per_second: u64) -> usize {
        match bytes_per_second {
            0 => PIECES.0 as usize,
            rate => (rate / PIECES_A_SECOND).clamp(PIECES.1, PIECES.0) as usize,
        }
    }

    /// Waits until a piece has passed. `goes_on`: the body that it is of had a piece before.
    pub async fn pass(&self, bytes: usize, bytes_per_second: u64, goes_on: bool) {
        if bytes_per_second > 0 {
            let until = self.admit(Instant::now(), bytes, bytes_per_second, goes_on);
            sleep_until(until.into()).await;
        }
    }

    /// Says when a piece that is asked for now has passed.
    fn admit(&self, now: Instant, bytes: usize, bytes_per_second: u64, goes_on: bool) -> Instant {
        let time = Duration::from_secs_f64(bytes as f64 / bytes_per_second as f64);
        let mut paid = self.paid_until.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let from = if goes_on { now.checked_sub(LATE).unwrap_or(now) } else { now };
        let until = paid.map_or(from, |paid| paid.max(from)) + time;
        *paid = Some(until);
        until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u64 = 1_000_000;

    /// Sends bodies, given by their begin in milliseconds and their size, in imagined time with timers that are up to 2 ms late.
    /// Returns how many milliseconds each took.
    fn send(bodies: &[(u64, usize)]) -> Vec<f64> {
        let (bandwidth, begin) = (Bandwidth::default(), Instant::now());
        let piece = Bandwidth::piece_bytes(RATE);
        let mut random = crate::Rng::new(1);
        let mut asks: Vec<_> =
            bodies.iter().map(|(at, bytes)| (begin + Duration::from_millis(*at), bytes / piece)).collect();
        let mut ends = vec![begin; bodies.len()];
        while let Some(next) = (0..asks.len()).filter(|n| asks[*n].1 > 0).min_by_key(|n| asks[*n].0) {
            let goes_on = ends[next] > begin;
            let late = Duration::from_micros(random.below(2000));
            let until = bandwidth.admit(asks[next].0, piece, RATE, goes_on) + late;
            ends[next] = until;
            asks[next] = (until, asks[next].1 - 1);
        }
        let took = |(end, (at, _)): (&Instant, &(u64, usize))| {
            end.duration_since(begin).as_secs_f64() * 1e3 - *at as f64
        };
        ends.iter().zip(bodies).map(took).collect()
    }

    #[test]
    fn bodies_share_the_rate_and_take_turns() {
        let close = |took: f64, expected: f64| (took - expected).abs() < expected / 50.0;
        assert!(close(send(&[(0, 1_000_000)])[0], 1000.0), "{:?}", send(&[(0, 1_000_000)]));
        let four = send(&[(0, 250_000); 4]);
        assert!(four.iter().all(|took| close(*took, 1000.0)), "{four:?}");
        // A small one beside a large one does not wait for its end: it has half of the rate.
        let two = send(&[(0, 1_000_000), (50, 20_000)]);
        assert!(two[1] < 60.0 && close(two[0], 1020.0), "{two:?}");
    }
}
