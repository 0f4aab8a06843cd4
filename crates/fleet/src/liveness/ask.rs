//! Questions to hosts about another one that is silent. Owns who is asked, when, and for how long an answer counts.
//!
//! Invariant: a host is unreachable only if a host that was asked has said so, and none has said that it reaches it. Where nobody answers,
//! the placer itself may be cut off, and nothing is known.

use crate::Moment;
use crate::view::FleetView;
use spillway_api::Name;

/// Time in which a host must answer; then it counts as one that does not reach the silent host, if another has answered.
pub const ANSWER_MS: u64 = 5_000;
/// Time for which answers count.
pub const VALID_MS: u64 = 10_000;
/// Hosts that are asked about one.
const WITNESSES: usize = 2;
/// Pause before the second question about a host. Each further one is twice as long.
const FIRST_PAUSE_MS: u64 = 10_000;
const MOST_PAUSE_MS: u64 = 320_000;

/// A question to hosts: does the daemon of this host answer you?
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Host that is silent.
    pub about: Name,
    /// Hosts that are asked: two, or one where there are no others.
    pub of: Vec<Name>,
}

/// All questions about a host since its lease has ended.
#[derive(Debug, Default)]
pub(super) struct Inquiry {
    /// Those who were asked and have not answered, and when they were asked.
    open: Option<(Vec<Name>, Moment)>,
    /// Whether one of those who were asked last has said that it does not reach the host.
    is_denied: bool,
    /// Whether somebody reaches the host, and when that was known.
    result: Option<(bool, Moment)>,
    rounds: u32,
    /// The next question is not earlier than this.
    pause_until: Moment,
}

impl Inquiry {
    pub(super) fn rounds(&self) -> u32 {
        self.rounds
    }

    pub(super) fn is_due(&self, now: Moment) -> bool {
        self.open.is_none() && now >= self.pause_until
    }

    pub(super) fn begin(&mut self, of: &[Name], now: Moment) {
        self.open = Some((of.to_vec(), now));
        self.is_denied = false;
        let pause = FIRST_PAUSE_MS.saturating_mul(1 << self.rounds.min(16)).min(MOST_PAUSE_MS);
        self.pause_until = now.after_ms(ANSWER_MS.saturating_add(pause));
        self.rounds = self.rounds.saturating_add(1);
    }

    /// Takes an answer. Whether that changed what is known.
    ///
    /// That somebody reaches the host counts even if it comes late, or unasked.
    pub(super) fn answer(&mut self, by: &Name, reaches: bool, now: Moment) -> bool {
        if reaches {
            self.open = None;
            self.result = Some((true, now));
            return true;
        }
        let Some((open, _)) = &mut self.open else { return false };
        let before = open.len();
        open.retain(|host| host != by);
        self.is_denied |= open.len() < before;
        open.is_empty() && self.conclude(now)
    }

    /// Ends questions whose time is over. Whether that changed what is known.
    pub(super) fn tick(&mut self, now: Moment) -> bool {
        let is_over = self.open.as_ref().is_some_and(|(_, asked)| now.since_ms(*asked) >= ANSWER_MS);
        let is_old = self.result.is_some_and(|(_, at)| now.since_ms(at) >= VALID_MS);
        if is_old {
            self.result = None;
        }
        if is_over {
            self.conclude(now);
        }
        is_over || is_old
    }

    /// Takes all questions as not asked, and all answers as not given. Whether there were any.
    pub(super) fn forget(&mut self) -> bool {
        let had = self.open.is_some() || self.result.is_some();
        *self = Inquiry { rounds: self.rounds, ..Inquiry::default() };
        had
    }

    pub(super) fn reach(&self) -> super::Reach {
        match self.result {
            Some((true, _)) => super::Reach::Answers,
            Some((false, _)) => super::Reach::Unreachable,
            None => super::Reach::Unknown,
        }
    }

    pub(super) fn next(&self, now: Moment) -> Option<Moment> {
        let over = self.open.as_ref().map(|(_, asked)| asked.after_ms(ANSWER_MS));
        let old = self.result.map(|(_, at)| at.after_ms(VALID_MS));
        let due = Some(self.pause_until);
        [over, old, due].into_iter().flatten().filter(|moment| *moment > now).min()
    }

    fn conclude(&mut self, now: Moment) -> bool {
        self.open = None;
        if self.is_denied {
            self.result = Some((false, now));
        }
        self.is_denied
    }
}

/// Hosts to ask about a silent one: one of its zone and one of another, so that a broken connection between zones is seen from both
/// sides; others in each round.
pub(super) fn witnesses(
    about: &Name,
    round: u32,
    view: &FleetView,
    own: &Name,
    is_alive: impl Fn(&Name) -> bool,
) -> Vec<Name> {
    let zone_of = |host: &Name| view.hosts.get(host).map(|record| &record.value.zone);
    let zone = zone_of(about);
    let all = view.hosts.keys().filter(|host| *host != about && *host != own && is_alive(host));
    let (near, far): (Vec<_>, Vec<_>) = all.partition(|host| zone_of(host) == zone);
    let start = about.as_str().bytes().fold(round as usize, |sum, b| sum.wrapping_mul(31) + usize::from(b));
    let turned = |hosts: &[&Name]| {
        let order = (0..hosts.len()).map(|n| (n + start % hosts.len()) % hosts.len());
        order.map(|n| hosts[n].clone()).take(WITNESSES).collect::<Vec<_>>()
    };
    let (near, far) = (turned(&near), turned(&far));
    let first = near.iter().take(1).chain(far.iter().take(1)).cloned();
    let more = near.iter().skip(1).chain(far.iter().skip(1)).cloned();
    let last = is_alive(own).then(|| own.clone());
    first.chain(more).chain(last).take(WITNESSES).collect()
}
