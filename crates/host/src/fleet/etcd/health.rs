//! How etcd fares: whether it is reached, by which member, with which leader, and what it complains about. Owns this state, and asks for
//! it every [`INTERVAL`].
//!
//! Invariant: `trouble` is never earlier than the last moment at which etcd was not known to have the leader that it had before.

use super::error::MemberFailure;
use super::link::Link;
use super::{now, random_below, transaction};
use etcd_client::StatusResponse;
use spillway_fleet::Moment;
use spillway_fleet::transaction::Transaction;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// Time between two questions.
const INTERVAL: Duration = Duration::from_secs(5);
/// Time until a failed question is repeated.
const PAUSE: Duration = Duration::from_secs(1);
/// A time without answers that is so long may have hidden an election.
const GAP_MS: u64 = 12_000;
/// How long a term is remembered: until then, answers of earlier terms do not count.
const TERM_MEMORY_MS: u64 = 30_000;
/// Time from a refused change until it is looked whether it would be refused again, and the longest time between two looks, in milliseconds.
const LEAST_LOOK_MS: u64 = 5_000;
const LONGEST_LOOK_MS: u64 = 300_000;
/// The oldest version that has all that is needed: progress of watches on request, and alarms in the status.
const OLDEST: (u32, u32) = (3, 4);

/// Whether etcd is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EtcdReach {
    /// A member answers.
    Reached {
        /// Since when members have answered.
        since: Moment,
        /// Address of the one that is asked now, `HOST:PORT`.
        member: String,
    },
    /// None does.
    Away {
        /// Since when.
        since: Moment,
        /// Which members do not, and why.
        why: String,
    },
}

/// An alarm of etcd, which stays until somebody disarms it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EtcdAlarm {
    /// The database has reached its quota: etcd takes no writes.
    NoSpace,
    /// A member's data are not those of the others.
    Corrupt,
}

/// How etcd fares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdHealth {
    /// Whether it is reached.
    pub reach: EtcdReach,
    /// What the last member that answered has said.
    pub last: Option<Observation>,
    /// The last moment at which etcd had no leader, another leader or term than before, or did not answer. None: never asked.
    pub trouble: Option<Moment>,
    /// Why the records are not followed now, if they should be.
    pub follow_failure: Option<String>,
    /// Why etcd has refused the last change of this host: its user may not make it.
    pub write_failure: Option<String>,
}

/// What a member says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// When it has answered.
    pub at: Moment,
    /// Its version.
    pub version: String,
    /// Identity of the cluster.
    pub cluster: u64,
    /// Identity of the member that is leader.
    pub leader: u64,
    /// Number of elections until now.
    pub term: u64,
    /// Alarms, each once.
    pub alarms: Vec<EtcdAlarm>,
    /// Size of the database file, in bytes.
    pub database_bytes: u64,
    /// Size at which etcd takes no more writes, in bytes. None: the member does not tell (before 3.6).
    pub quota_bytes: Option<u64>,
}

impl Observation {
    /// Reads a status.
    ///
    /// # Errors
    /// The member cannot be used: it is kine, is too old, or has no leader.
    pub fn new(status: &StatusResponse) -> Result<Observation, MemberFailure> {
        // kine fills in no header.
        let header = status.header().filter(|header| header.member_id() != 0 && header.cluster_id() != 0);
        let Some(header) = header else { return Err(MemberFailure::Kine) };
        let version: String = status.version().chars().filter(|c| c.is_ascii_graphic()).take(64).collect();
        if read_version(&version).is_none_or(|version| version < OLDEST) {
            return Err(MemberFailure::TooOld(version));
        }
        if status.leader() == 0 {
            return Err(MemberFailure::NoLeader);
        }
        let alarms = [(EtcdAlarm::NoSpace, "alarm:NOSPACE"), (EtcdAlarm::Corrupt, "alarm:CORRUPT")];
        let is_on = |text: &str| status.errors().iter().any(|error| error.contains(text));
        Ok(Observation {
            at: now(),
            version,
            cluster: header.cluster_id(),
            leader: status.leader(),
            term: status.raft_term(),
            alarms: alarms.into_iter().filter(|(_, text)| is_on(text)).map(|(alarm, _)| alarm).collect(),
            database_bytes: status.db_size().unsigned_abs(),
            quota_bytes: u64::try_from(status.db_size_quota()).ok().filter(|bytes| *bytes != 0),
        })
    }
}

fn read_version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The state, as its writers have it.
pub struct Health {
    state: watch::Sender<EtcdHealth>,
    refused: Mutex<Option<RefusedChange>>,
}

/// The last change, which was refused.
struct RefusedChange {
    change: Transaction,
    /// When it is looked whether they may be written now.
    due: Moment,
    /// Time until the next look, in milliseconds.
    pause_ms: u64,
}

impl Health {
    /// Nothing has been asked yet.
    pub fn new() -> Health {
        let reach = EtcdReach::Away { since: now(), why: "it has not been asked yet".into() };
        let health =
            EtcdHealth { reach, last: None, trouble: None, follow_failure: None, write_failure: None };
        Health { state: watch::Sender::new(health), refused: Mutex::default() }
    }

    /// For readers.
    pub fn subscribe(&self) -> watch::Receiver<EtcdHealth> {
        self.state.subscribe()
    }

    /// A member has said how it fares.
    pub fn observe(&self, member: &str, observation: Observation) {
        self.state.send_modify(|health| health.observe(member, observation));
    }

    /// A member has not answered, or has no leader.
    pub fn note_trouble(&self) {
        self.state.send_modify(|health| health.trouble = Some(now()));
    }

    /// No member answers.
    pub fn note_away(&self, why: String) {
        self.state.send_modify(|health| {
            let since = match &health.reach {
                EtcdReach::Away { since, .. } => *since,
                EtcdReach::Reached { .. } => now(),
            };
            health.reach = EtcdReach::Away { since, why };
            health.trouble = Some(now());
        });
    }

    /// Following has failed, or works.
    pub fn note_follow(&self, failure: Option<String>) {
        self.state.send_if_modified(|health| {
            let changes = health.follow_failure != failure;
            health.follow_failure = failure;
            changes
        });
    }

    /// This change was made, or would have been if the records had been others. It says nothing of a change of other records that was refused.
    pub fn note_allowed(&self, change: &Transaction) {
        let mut refused = self.refused();
        let is_written = |key| change.writes.iter().any(|write| write.key() == key);
        if refused.as_ref().is_some_and(|last| last.change.writes.iter().all(|write| is_written(write.key())))
        {
            *refused = None;
            self.note_write(None);
        }
    }

    /// This change was refused to this host, for this reason.
    pub fn note_refused(&self, why: String, change: &Transaction) {
        let mut refused = self.refused();
        let (pause_ms, due) = refused
            .as_ref()
            .map_or_else(|| (LEAST_LOOK_MS, now().after_ms(LEAST_LOOK_MS)), |last| (last.pause_ms, last.due));
        *refused = Some(RefusedChange { change: change.clone(), due, pause_ms });
        self.note_write(Some(why));
    }

    /// The change that was refused, if it is time to look whether it would be now. Looks get rarer, because each costs etcd as much as a change.
    pub fn due_look(&self) -> Option<Transaction> {
        let mut refused = self.refused();
        let refused = refused.as_mut().filter(|refused| now() >= refused.due)?;
        refused.pause_ms = (2 * refused.pause_ms).min(LONGEST_LOOK_MS);
        refused.due = now().after_ms(refused.pause_ms - random_below(refused.pause_ms / 4));
        Some(refused.change.clone())
    }

    fn refused(&self) -> MutexGuard<'_, Option<RefusedChange>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_write(&self, failure: Option<String>) {
        self.state.send_if_modified(|health| {
            let changes = health.write_failure != failure;
            health.write_failure = failure;
            changes
        });
    }

    /// Whether an answer of this term is out of date: members have lately answered for a later one.
    pub fn is_earlier_term(&self, cluster: u64, term: u64) -> Option<MemberFailure> {
        let health = self.state.borrow();
        let last = health.last.as_ref()?;
        let counts = last.cluster == cluster && now().since_ms(last.at) < TERM_MEMORY_MS;
        (counts && term < last.term).then_some(MemberFailure::EarlierTerm(term, last.term))
    }
}

impl EtcdHealth {
    fn observe(&mut self, member: &str, observation: Observation) {
        let at = observation.at;
        let is_same = self.last.as_ref().is_some_and(|last| {
            (last.cluster, last.leader, last.term)
                == (observation.cluster, observation.leader, observation.term)
                && at.since_ms(last.at) < GAP_MS
        });
        if !is_same {
            self.trouble = Some(at);
        }
        let since = match &self.reach {
            EtcdReach::Reached { since, .. } => *since,
            EtcdReach::Away { .. } => at,
        };
        self.reach = EtcdReach::Reached { since, member: member.to_owned() };
        self.last = Some(observation);
    }
}

/// Asks for as long as the store is open.
pub async fn keep_observing(link: Arc<Link>) {
    loop {
        let pause = match link.member().await {
            Err(error) if error.is_permanent() => INTERVAL,
            Err(_) => PAUSE,
            Ok(member) => match member.observe().await {
                Ok(observation) => {
                    link.observe(&member, observation);
                    if let Some(change) = link.health.due_look() {
                        transaction::look_whether_allowed(&link, change).await;
                    }
                    INTERVAL
                }
                Err(failure) => {
                    link.health.note_trouble();
                    link.leave(&member, &failure);
                    // The next one is asked as it is connected.
                    Duration::ZERO
                }
            },
        };
        tokio::time::sleep(pause.max(Duration::from_millis(50))).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_fleet::keys::Key;
    use spillway_fleet::transaction::Write;

    fn observation(at: u64, leader: u64, term: u64) -> Observation {
        Observation {
            at: Moment(at),
            version: "3.4.23".into(),
            cluster: 1,
            leader,
            term,
            alarms: Vec::new(),
            database_bytes: 0,
            quota_bytes: None,
        }
    }

    #[test]
    fn another_leader_or_term_and_a_gap_are_trouble() {
        let health = Health::new();
        let trouble = |at, leader, term| {
            health.observe("a:1", observation(at, leader, term));
            health.subscribe().borrow().trouble
        };
        assert_eq!(trouble(1_000, 7, 2), Some(Moment(1_000)), "nobody knows what was before");
        assert_eq!(trouble(6_000, 7, 2), Some(Moment(1_000)));
        assert_eq!(trouble(7_000, 8, 3), Some(Moment(7_000)));
        assert_eq!(trouble(8_000, 8, 4), Some(Moment(8_000)), "the same leader was elected once more");
        assert_eq!(trouble(13_000, 8, 4), Some(Moment(8_000)));
        assert_eq!(trouble(25_000, 8, 4), Some(Moment(25_000)), "nobody has looked meanwhile");
    }

    #[test]
    fn it_is_known_since_when_etcd_is_reached_and_away() {
        let health = Health::new();
        let reach = || health.subscribe().borrow().reach.clone();
        health.observe("a:1", observation(1_000, 7, 2));
        health.observe("b:1", observation(2_000, 7, 2));
        assert_eq!(reach(), EtcdReach::Reached { since: Moment(1_000), member: "b:1".into() });
        health.note_away("x".into());
        let EtcdReach::Away { since, .. } = reach() else { panic!("it is away") };
        health.note_away("y".into());
        assert_eq!(reach(), EtcdReach::Away { since, why: "y".into() });
        assert!(health.subscribe().borrow().trouble >= Some(since));
    }

    #[test]
    fn a_refused_change_is_over_when_one_of_the_same_records_is_allowed() {
        let health = Health::new();
        let change = |key| Transaction { comparisons: Vec::new(), writes: vec![Write::Delete(key)] };
        let said = || health.subscribe().borrow().write_failure.clone();
        health.note_refused("x".into(), &change(Key::Placer));
        health.note_allowed(&change(Key::Meta));
        assert_eq!((said(), health.due_look()), (Some("x".into()), None), "a look costs as much as a change");
        health.refused().as_mut().unwrap().due = Moment(0);
        assert_eq!(health.due_look(), Some(change(Key::Placer)));
        health.note_refused("y".into(), &change(Key::Placer));
        assert_eq!((said(), health.due_look()), (Some("y".into()), None));
        health.note_allowed(&change(Key::Placer));
        assert_eq!(said(), None);
    }

    #[test]
    fn an_earlier_term_counts_as_out_of_date_for_a_while() {
        let health = Health::new();
        let is_old = |cluster, term| health.is_earlier_term(cluster, term).is_some();
        assert!(!is_old(1, 1));
        health.observe("a:1", observation(now().0, 7, 5));
        assert!(is_old(1, 4) && !is_old(1, 5) && !is_old(1, 6));
        assert!(!is_old(2, 4), "another cluster counts on its own");
        health.observe("a:1", observation(now().0.saturating_sub(TERM_MEMORY_MS), 7, 5));
        assert!(!is_old(1, 4), "etcd may have been restored");
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert!(read_version("3.10.0").is_some_and(|version| version > OLDEST));
        assert!(read_version("3.3.27").is_some_and(|version| version < OLDEST));
        assert_eq!(read_version("3.4.23"), Some(OLDEST));
        assert_eq!(read_version("not known"), None);
    }
}
