//! Which hosts are alive, and which of the others count as lost. Owns what the placer has seen of leases, what other hosts have
//! answered about silent ones, and the brake.
//!
//! It decides nothing about machines and sends no requests. It names the hosts that the caller must ask.
//!
//! Invariant: a host is never lost on the word of etcd alone. Somebody has declared it dead, or others were asked and do not reach it.

mod ask;

use crate::Moment;
use crate::keys::Key;
use crate::transaction::Revision;
use crate::view::{FleetView, LeaseEnd};
use ask::Inquiry;
pub use ask::{ANSWER_MS, Ask, VALID_MS};
use spillway_api::Name;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Time of a host's lease.
pub const LEASE_MS: u64 = 15_000;
/// Time without trouble of the store before a host counts as lost.
pub const QUIET_MS: u64 = 30_000;

/// How etcd is, as this daemon sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreHealth {
    /// When etcd last had no leader, had another leader than before, or did not answer in time; none: not since the daemon began.
    pub trouble: Option<Moment>,
}

/// What is known of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It has a lease.
    Alive,
    /// Its lease has ended.
    Silent {
        /// Time since its last sign of life, at least.
        for_ms: u64,
        /// What other hosts say.
        reach: Reach,
    },
    /// Somebody has declared it dead, and it has not come back.
    DeclaredDead {
        /// Time since its last sign of life, at least.
        for_ms: u64,
    },
    /// It was announced, and has never had a lease or machines.
    NeverSeen,
    /// Somebody has removed its record.
    Removed {
        /// Time since its last sign of life, at least.
        for_ms: u64,
    },
    /// A record of it cannot be read, so that nothing is known.
    Unreadable,
}

/// What other hosts say about a silent one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Nobody was asked lately.
    Unknown,
    /// It answers another host.
    Answers,
    /// None of those asked reaches it.
    Unreachable,
}

/// Why no host counts as lost now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Brake {
    /// Too many hosts are silent at the same time.
    ManySilent {
        /// Hosts that are silent.
        silent: usize,
        /// Hosts that there are.
        of: usize,
    },
    /// etcd was in trouble lately.
    StoreTrouble,
}

impl fmt::Display for Brake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Brake::ManySilent { silent, of } => write!(
                f,
                "{silent} of {of} hosts are silent at the same time, so that etcd or the network may be the fault"
            ),
            Brake::StoreTrouble => write!(
                f,
                "etcd had no leader, changed its leader or did not answer within the last {} s",
                QUIET_MS / 1000
            ),
        }
    }
}

/// The last that was seen of a host.
#[derive(Debug)]
enum Sign {
    Alive,
    Silent { since: Moment, end: LeaseEnd, inquiry: Inquiry },
    NeverSeen,
    Unreadable,
}

#[derive(Debug)]
struct Track {
    sign: Sign,
    is_dead: bool,
    is_removed: bool,
    /// Epoch that the host had when it was last seen alive.
    last_epoch: Option<Revision>,
    /// Revision that created the host's record, and when it was first seen. Another host may take the name of one that was removed.
    recorded: Option<(Revision, Moment)>,
}

/// What a daemon has seen of the hosts. It need not look at all records in time: a view tells which leases have ended meanwhile.
#[derive(Debug, Default)]
pub struct Liveness {
    tracks: BTreeMap<Name, Track>,
    silent: usize,
    counted: usize,
    trouble: Option<Moment>,
    last_step: Option<Moment>,
    changes: u64,
}

impl Liveness {
    /// Takes the time and the state of etcd. The placer calls it once in each step, at least once a second.
    ///
    /// A daemon that stood still has missed answers: all questions count as not asked.
    pub fn tick(&mut self, health: &StoreHealth, now: Moment) {
        let braked = self.brake(now);
        let stood_still = self.last_step.is_some_and(|last| now.since_ms(last) > ANSWER_MS);
        self.trouble = health.trouble.max(self.trouble);
        self.last_step = Some(now);
        let mut changed = braked != self.brake(now);
        for track in self.tracks.values_mut() {
            if let Sign::Silent { inquiry, .. } = &mut track.sign {
                changed |= if stood_still { inquiry.forget() } else { inquiry.tick(now) };
            }
        }
        self.changes += u64::from(changed);
    }

    /// Takes the records as they are now.
    pub fn observe(&mut self, view: &FleetView, now: Moment) {
        let mut before = std::mem::take(&mut self.tracks);
        let names = view.named.values().flat_map(BTreeMap::values);
        let with_names: BTreeSet<&Name> = names.filter_map(|name| name.value.host.as_ref()).collect();
        let unreadable = view.unreadable.keys().filter_map(|text| match text.parse() {
            Ok(Key::Share(host, _)) => Some(host),
            _ => None,
        });
        let unreadable: BTreeSet<Name> = unreadable.collect();
        let holders = view.shares.keys().chain(view.places.keys()).chain(with_names.iter().copied());
        let holders = holders.chain(&unreadable);
        let without_record = holders.filter(|host| !view.hosts.contains_key(*host));
        // One of them may have shares and names.
        let all: BTreeSet<&Name> = view.hosts.keys().chain(without_record).collect();
        for host in all {
            let track = before.remove(host);
            self.tracks.insert(host.clone(), seen(view, host, with_names.contains(host), track, now));
        }
        let counted =
            |track: &&Track| !track.is_dead && !track.is_removed && !matches!(track.sign, Sign::NeverSeen);
        let is_silent = |track: &&Track| matches!(track.sign, Sign::Silent { .. });
        self.counted = self.tracks.values().filter(counted).count();
        self.silent = self.tracks.values().filter(counted).filter(is_silent).count();
        self.changes += 1;
    }

    /// A number that changes with all that is known, except for the time for which hosts are silent.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// What is known of a host.
    pub fn standing(&self, host: &Name, now: Moment) -> Standing {
        let Some(track) = self.tracks.get(host) else { return Standing::Unreadable };
        let for_ms = match &track.sign {
            // Its lease began before it was declared dead, or ends soon.
            Sign::Alive | Sign::Unreadable => 0,
            Sign::Silent { since, .. } => now.since_ms(*since),
            // It has nothing.
            Sign::NeverSeen => u64::MAX,
        };
        match &track.sign {
            Sign::Unreadable => Standing::Unreadable,
            _ if track.is_removed => Standing::Removed { for_ms },
            _ if track.is_dead => Standing::DeclaredDead { for_ms },
            Sign::Alive => Standing::Alive,
            Sign::NeverSeen => Standing::NeverSeen,
            Sign::Silent { inquiry, .. } => Standing::Silent { for_ms, reach: inquiry.reach() },
        }
    }

    /// Time since the record of a host was made, at least. Whoever had its name before had no lease then.
    pub fn recorded_for_ms(&self, host: &Name, now: Moment) -> u64 {
        let recorded = self.tracks.get(host).and_then(|track| track.recorded);
        recorded.map_or(0, |(_, since)| now.since_ms(since))
    }

    /// Why no host counts as lost now, unless somebody has declared it dead.
    pub fn brake(&self, now: Moment) -> Option<Brake> {
        if self.trouble.is_some_and(|trouble| now.since_ms(trouble) < QUIET_MS) {
            return Some(Brake::StoreTrouble);
        }
        let (silent, of) = (self.silent, self.counted);
        (silent >= 2 && 3 * silent > of).then_some(Brake::ManySilent { silent, of })
    }

    /// Hosts that are to be asked now. `stakes` has the hosts whose machines would be replaced if they were lost, and the time after
    /// which they are, in milliseconds. `own` is the host of the placer, which is asked only if there are not two others.
    pub fn asks(
        &mut self,
        stakes: &BTreeMap<Name, u64>,
        view: &FleetView,
        own: &Name,
        now: Moment,
    ) -> Vec<Ask> {
        if self.brake(now).is_some() {
            return Vec::new();
        }
        let mut due = Vec::new();
        for (host, lost_after_ms) in stakes {
            let Some(track) = self.tracks.get(host).filter(|track| !track.is_dead) else { continue };
            let Sign::Silent { since, inquiry, .. } = &track.sign else { continue };
            if now.since_ms(*since).saturating_add(ANSWER_MS) >= *lost_after_ms && inquiry.is_due(now) {
                due.push((host, ask::witnesses(host, inquiry.rounds(), view, own, |of| self.is_alive(of))));
            }
        }
        let due = due.into_iter().filter(|(_, of)| !of.is_empty());
        let due: Vec<_> = due.map(|(about, of)| Ask { about: about.clone(), of }).collect();
        for ask in &due {
            if let Some(Track { sign: Sign::Silent { inquiry, .. }, .. }) = self.tracks.get_mut(&ask.about) {
                inquiry.begin(&ask.of, now);
            }
        }
        due
    }

    /// Takes the answer of a host about another one.
    pub fn answered(&mut self, about: &Name, by: &Name, reaches: bool, now: Moment) {
        if let Some(Track { sign: Sign::Silent { inquiry, .. }, .. }) = self.tracks.get_mut(about)
            && inquiry.answer(by, reaches, now)
        {
            self.changes += 1;
        }
    }

    /// The next moment at which a question counts as answered, or an answer counts no more.
    pub fn next(&self, now: Moment) -> Option<Moment> {
        let of_inquiries = self.tracks.values().filter_map(|track| match &track.sign {
            Sign::Silent { inquiry, .. } => inquiry.next(now),
            _ => None,
        });
        let quiet = self.trouble.map(|trouble| trouble.after_ms(QUIET_MS));
        of_inquiries.chain(quiet).filter(|moment| *moment > now).min()
    }

    fn is_alive(&self, host: &Name) -> bool {
        let track = self.tracks.get(host);
        track.is_some_and(|track| matches!(track.sign, Sign::Alive) && !track.is_dead && !track.is_removed)
    }
}

/// What is known of a host after these records, where so much was known before.
fn seen(view: &FleetView, host: &Name, has_names: bool, before: Option<Track>, now: Moment) -> Track {
    let is_unreadable = |folder: &str| {
        !view.unreadable.is_empty() && view.unreadable.contains_key(&format!("{folder}/{host}"))
    };
    let record = view.hosts.get(host);
    let epoch = view.alive.get(host).map(|alive| alive.created);
    let last_epoch = epoch.or(before.as_ref().and_then(|track| track.last_epoch));
    let dead_epoch = record.and_then(|record| record.value.dead_epoch);
    let is_dead = dead_epoch.is_some_and(|dead| last_epoch.is_none_or(|epoch| epoch <= dead));
    let end = view.lease_end(host);
    let begins = |since: Moment| Sign::Silent { since, end, inquiry: Inquiry::default() };
    // Its lease was not renewed for so long when it ended.
    let last_lease = Moment(now.0.saturating_sub(LEASE_MS));
    let has_been = has_names
        || view.statuses.contains_key(host)
        || view.shares.contains_key(host)
        || view.places.contains_key(host);
    let before_recorded = before.as_ref().and_then(|track| track.recorded);
    let recorded = record.map(|record| {
        before_recorded.filter(|(created, _)| *created == record.created).unwrap_or((record.created, now))
    });
    let sign = match before.map(|track| track.sign) {
        _ if is_unreadable("hosts") || is_unreadable("alive") => Sign::Unreadable,
        _ if epoch.is_some() => Sign::Alive,
        Some(Sign::Silent { since, end: before, inquiry }) if before == end => {
            Sign::Silent { since, end, inquiry }
        }
        Some(Sign::Alive | Sign::Silent { .. }) => begins(last_lease),
        _ if has_been => begins(now),
        _ => Sign::NeverSeen,
    };
    Track { sign, is_dead, is_removed: record.is_none(), last_epoch, recorded }
}

#[cfg(test)]
mod tests;
