//! Summaries of refused and failed requests: the first of a kind is written in full, further ones are counted. Owns the
//! counts.
//!
//! Invariant: whatever clients do, at most [`MOST_KINDS`] kinds are distinguished, at most [`MOST_OF_ONE`] of them per
//! caller, and few lines an hour are written for each; no request goes uncounted.

use super::act::ActionObject;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Number of kinds that are distinguished at a time. Others are counted together.
const MOST_KINDS: usize = 64;
/// Number of kinds per token or user, so that one caller with many refusals does not hide others.
const MOST_OF_ONE: usize = 16;
/// Time from the first line of a kind to its summary. It doubles with each summary, up to the longest.
const FIRST: Duration = Duration::from_secs(60);
const LONGEST: Duration = Duration::from_secs(3600);

/// Properties by which refused requests are counted together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct RefusalKind {
    /// Name of the token, or the user; `unknown` without a known token; `others` beyond the bound.
    pub who: String,
    /// Address of the peer, or `local`.
    pub from: String,
    /// Verb, if the caller's role was sufficient.
    pub verb: Option<String>,
    /// Object, if the caller's role was sufficient.
    pub object: Option<ActionObject>,
    /// Status of the response.
    pub status: u16,
}

/// Count of refusals since the last line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RefusalSummary {
    /// Kind of the refusals.
    #[serde(flatten)]
    pub kind: RefusalKind,
    /// Number of refusals.
    pub count: u64,
    /// Period in seconds.
    pub seconds: u64,
}

struct RefusalCount {
    since: Instant,
    window: Duration,
    count: u64,
}

/// Counts of refusals, by kind.
#[derive(Default)]
pub struct Refusals(BTreeMap<RefusalKind, RefusalCount>);

impl Refusals {
    /// Counts a refusal. Returns whether it should be written in full, because it is the first of its kind for an hour.
    pub fn record(&mut self, kind: RefusalKind, now: Instant) -> bool {
        let is_known = self.0.contains_key(&kind);
        let has_room = is_known || self.0.len() < MOST_KINDS && self.of(&kind.who) < MOST_OF_ONE;
        let kind = if has_room { kind } else { self.summed(kind) };
        match self.0.get_mut(&kind) {
            Some(known) => {
                known.count += 1;
                false
            }
            None => {
                // A collective kind is counted from its first refusal, since a line would name one of many only.
                let count = u64::from(!has_room);
                self.0.insert(kind, RefusalCount { since: now, window: FIRST, count });
                has_room
            }
        }
    }

    /// Number of kinds that are distinguished for one caller.
    fn of(&self, who: &str) -> usize {
        self.0.keys().filter(|kind| kind.who == who).count()
    }

    /// Collective kind for refusals beyond the bounds: of the same caller, or of all.
    fn summed(&self, kind: RefusalKind) -> RefusalKind {
        let who = if self.of(&kind.who) < MOST_OF_ONE { "others".into() } else { kind.who };
        RefusalKind { who, from: "anywhere".into(), verb: None, object: None, status: kind.status }
    }

    /// Returns the counts that are due. Forgets kinds without a refusal for an hour.
    pub fn due(&mut self, now: Instant) -> Vec<RefusalSummary> {
        let mut sums = Vec::new();
        self.0.retain(|kind, count| {
            let passed = now.saturating_duration_since(count.since);
            if count.count > 0 && passed >= count.window {
                sums.push(RefusalSummary {
                    kind: kind.clone(),
                    count: count.count,
                    seconds: passed.as_secs(),
                });
                *count = RefusalCount { since: now, window: (count.window * 2).min(LONGEST), count: 0 };
            }
            count.count > 0 || now.saturating_duration_since(count.since) < LONGEST
        });
        sums
    }

    /// Returns all counts, at the end.
    pub fn rest(&mut self, now: Instant) -> Vec<RefusalSummary> {
        let all = std::mem::take(&mut self.0).into_iter().filter(|(_, count)| count.count > 0);
        let seconds = |count: &RefusalCount| now.saturating_duration_since(count.since).as_secs();
        all.map(|(kind, count)| RefusalSummary { kind, count: count.count, seconds: seconds(&count) })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(who: &str) -> RefusalKind {
        RefusalKind { who: who.into(), from: "192.0.2.1".into(), verb: None, object: None, status: 403 }
    }

    #[test]
    fn the_first_is_written_and_the_others_are_counted() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(refusals.record(kind("eve"), start));
        assert!((0..30_000).all(|_| !refusals.record(kind("eve"), after(1))));
        assert!(refusals.record(kind("bob"), after(1)));
        assert_eq!(refusals.due(after(59)), []);
        let sums = refusals.due(after(60));
        assert_eq!(sums, [RefusalSummary { kind: kind("eve"), count: 30_000, seconds: 60 }]);
        // It goes on: the next line comes after twice as long.
        refusals.record(kind("eve"), after(61));
        assert_eq!((refusals.due(after(179)).len(), refusals.due(after(180)).len()), (0, 1));
        refusals.record(kind("eve"), after(181));
        assert_eq!(refusals.rest(after(182)), [RefusalSummary { kind: kind("eve"), count: 1, seconds: 2 }]);
    }

    #[test]
    fn one_that_is_refused_in_many_ways_hides_nobody_else() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let way = |n: usize| RefusalKind { from: format!("192.0.2.{n}"), ..kind("eve") };
        let written = (0..100).filter(|n| refusals.record(way(*n), start)).count();
        assert_eq!(written, MOST_OF_ONE);
        assert!(refusals.record(kind("bob"), start), "what another one was refused is written");
        let sums = refusals.rest(start);
        let of_eve = RefusalKind { from: "anywhere".into(), ..kind("eve") };
        assert_eq!(sums, [RefusalSummary { kind: of_eve, count: 100 - MOST_OF_ONE as u64, seconds: 0 }]);
    }

    /// Whoever asks without end, and pauses as is best for it, fills no disk.
    #[test]
    fn lines_are_bounded_whatever_comes() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let (mut lines, mut counted, hours) = (0, 0, 5);
        for second in (0..hours * 3600).step_by(10) {
            let now = start + Duration::from_secs(second);
            for who in 0..100 {
                lines += usize::from(refusals.record(kind(&format!("{who}-{}", second % 7)), now));
            }
            let sums = refusals.due(now);
            lines += sums.len();
            counted += sums.iter().map(|sum| sum.count).sum::<u64>();
        }
        assert!(lines < MOST_KINDS * (8 + usize::try_from(hours).unwrap()), "{lines}");
        counted += refusals.rest(start).iter().map(|sum| sum.count).sum::<u64>();
        // Each is counted, or was the first of its kind.
        assert_eq!(counted + MOST_KINDS as u64, hours * 360 * 100);
    }
}
