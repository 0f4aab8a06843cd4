//! Records of closed attempts: which attempts of a request of the fleet can make no claim on this host any more. Owns how many are kept,
//! and for how long.
//!
//! Invariant: a closed attempt is never forgotten to make space for another one. A host that has too many closes no further ones.

use crate::error::HostError;
use crate::store::{Changes, Objects, StoredRecord};
use serde::{Deserialize, Serialize};
use spillway_api::ErrorCode;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::Instant;
use utoipa::ToSchema;

/// How long a closed attempt is kept. A question that comes later is too old ([`MOST_AGE`]), or a repeat that has not closed this host.
const KEPT: Duration = Duration::from_secs(6 * 60);
/// Number of requests whose closed attempts are kept.
const MOST: usize = 65_536;
/// Old ones are removed after so many closings.
const TIDY_EACH: usize = 256;
/// Longest age of a first request, by the clocks of both hosts. [`KEPT`] is longer, so that a request of which this host has forgotten that
/// it was closed is too old.
const MOST_AGE: Duration = Duration::from_secs(60);

/// Numbers of first attempts are lower, and those of repeats are not.
pub const FIRST_REPEAT: u64 = 1 << 22;

/// Record of the attempts that are closed for a request.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(super) struct ClosedAttempts {
    /// Attempts with lower numbers make no claim.
    least: u64,
}

impl StoredRecord for ClosedAttempts {
    const PREFIX: &'static str = "closed-attempts/";
    const WORD: &'static str = "closed attempt";
}

/// Whether an attempt may make a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttemptState {
    /// It may.
    Open,
    /// It is closed: this one or a later one may.
    Closed(u64),
    /// It may have been closed so long ago that nothing is known of it any more.
    Stale,
}

/// When attempts were closed, or found by this process.
#[derive(Default)]
struct ClosingTimes {
    /// By request.
    all: HashMap<String, Instant>,
    /// None is older.
    oldest: Option<Instant>,
    /// Number of closings since old ones were looked for.
    added: usize,
}

/// The closed attempts of a host. A clone is the same.
#[derive(Clone)]
pub(super) struct ClosedAttemptLog {
    objects: Objects,
    /// `None`: the records were not read yet.
    times: Arc<Mutex<Option<ClosingTimes>>>,
    most: usize,
}

impl ClosedAttemptLog {
    pub(super) fn new(objects: Objects) -> ClosedAttemptLog {
        ClosedAttemptLog { objects, times: Arc::default(), most: MOST }
    }

    /// Makes space for a record of this request. To be called before [`ClosedAttemptLog::close`].
    ///
    /// # Errors
    /// `busy`: there are too many that are not old. Nothing can be closed.
    pub(super) fn admit(&self, request: &str) -> Result<(), HostError> {
        let mut guard = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        if guard.is_none() {
            *guard = Some(self.found()?);
        }
        let times = guard.as_mut().expect("they were read above");
        // Its time begins anew before old ones are removed: what is about to be recorded is not.
        if let Some(since) = times.all.get_mut(request) {
            *since = Instant::now();
        }
        self.forget_old(times)?;
        if !times.all.contains_key(request) && times.all.len() >= self.most {
            let message = format!(
                "this host keeps {} closed attempts of claims of the fleet for {} minutes, and has so many: ask again later",
                self.most,
                KEPT.as_secs() / 60
            );
            return Err(HostError::new(ErrorCode::Busy, message));
        }
        let now = Instant::now();
        times.all.insert(request.to_owned(), now);
        times.oldest.get_or_insert(now);
        times.added += 1;
        Ok(())
    }

    /// Those that an earlier process has recorded: their time begins now.
    fn found(&self) -> Result<ClosingTimes, HostError> {
        let found = self.objects.list::<ClosedAttempts>()?.into_iter().map(|record| record.name);
        let unreadable = self.objects.unreadable_names::<ClosedAttempts>();
        let now = Instant::now();
        let all = found.chain(unreadable).map(|name| (name, now)).collect();
        Ok(ClosingTimes { all, oldest: Some(now), added: 0 })
    }

    /// Removes old ones, from time to time, and if there is no space.
    fn forget_old(&self, times: &mut ClosingTimes) -> Result<(), HostError> {
        let is_due = times.oldest.is_some_and(|oldest| oldest.elapsed() > KEPT);
        if !is_due || (times.added < TIDY_EACH && times.all.len() < self.most) {
            return Ok(());
        }
        let old = times.all.iter().filter(|(_, since)| since.elapsed() > KEPT).map(|(name, _)| name.clone());
        let old: Vec<String> = old.collect();
        for names in old.chunks(TIDY_EACH) {
            self.objects.change(|changes| {
                names.iter().for_each(|name| changes.delete::<ClosedAttempts>(name));
                Ok::<_, HostError>(())
            })?;
            names.iter().for_each(|name| _ = times.all.remove(name));
        }
        (times.oldest, times.added) = (times.all.values().min().copied(), 0);
        Ok(())
    }

    /// Records in a transaction that attempts before this one make no claim. Returns a later one if it has been closed up to that.
    pub(super) fn close(
        &self,
        changes: &mut Changes,
        request: &str,
        attempt: u64,
    ) -> Result<Option<u64>, HostError> {
        let least = changes.get::<ClosedAttempts>(request)?.map_or(0, |closed| closed.value.least);
        if least < attempt {
            changes.put(request, &ClosedAttempts { least: attempt });
        }
        Ok((least > attempt).then_some(least))
    }

    /// Up to which number attempts of this request are closed.
    ///
    /// # Errors
    /// The record cannot be read.
    pub(super) fn closed(&self, request: &str) -> Result<Option<u64>, HostError> {
        Ok(self.objects.get::<ClosedAttempts>(request)?.map(|closed| closed.value.least))
    }

    /// Whether an attempt may make a claim, in the transaction that makes it. `sent`: when the request came, by its sender's clock.
    pub(super) fn look(
        &self,
        changes: &mut Changes,
        request: &str,
        attempt: u64,
        sent: SystemTime,
    ) -> Result<AttemptState, HostError> {
        let least = changes.get::<ClosedAttempts>(request)?.map_or(0, |closed| closed.value.least);
        Ok(match () {
            () if least > attempt => AttemptState::Closed(least),
            // A repeat has closed the attempts before at this host: if it is not known any more, neither is what has come since.
            () if attempt >= FIRST_REPEAT && least < attempt => AttemptState::Stale,
            () if attempt < FIRST_REPEAT && age(sent) > MOST_AGE => AttemptState::Stale,
            () => AttemptState::Open,
        })
    }
}

/// Difference between this time and the host's clock.
fn age(sent: SystemTime) -> Duration {
    let now = SystemTime::now();
    now.duration_since(sent).unwrap_or_else(|ahead| ahead.duration())
}

/// A time on the wire: milliseconds since 1970.
pub fn unix_ms(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// The time of a number of milliseconds since 1970.
pub fn from_unix_ms(ms: u64) -> SystemTime {
    UNIX_EPOCH.checked_add(Duration::from_millis(ms)).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::SqliteStore;

    fn log(most: usize) -> (tempfile::TempDir, ClosedAttemptLog) {
        let dir = tempfile::tempdir().unwrap();
        let objects = Objects::new(Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap()));
        (dir, ClosedAttemptLog { most, ..ClosedAttemptLog::new(objects) })
    }

    fn close(log: &ClosedAttemptLog, request: &str, attempt: u64) -> Result<Option<u64>, ErrorCode> {
        log.admit(request).map_err(|e| e.code)?;
        log.objects.change(|changes| log.close(changes, request, attempt)).map_err(|e| e.code)
    }

    fn look(log: &ClosedAttemptLog, request: &str, attempt: u64, sent: SystemTime) -> AttemptState {
        log.objects.change(|changes| log.look(changes, request, attempt, sent)).unwrap()
    }

    fn age_all(log: &ClosedAttemptLog, by: Duration) {
        let mut guard = log.times.lock().unwrap();
        let times = guard.as_mut().unwrap();
        times
            .all
            .values_mut()
            .chain(&mut times.oldest)
            .for_each(|since| *since = since.checked_sub(by).unwrap());
    }

    #[test]
    fn an_attempt_is_open_until_a_later_one_closes_it() {
        let (_dir, log) = log(10);
        let (now, repeat) = (SystemTime::now(), FIRST_REPEAT + 5);
        assert_eq!(look(&log, "a", 0, now), AttemptState::Open);
        assert_eq!(close(&log, "a", 1), Ok(None));
        assert_eq!(look(&log, "a", 0, now), AttemptState::Closed(1));
        assert_eq!(look(&log, "a", 1, now), AttemptState::Open);
        assert_eq!(look(&log, "a", repeat, now), AttemptState::Stale, "it has not closed those before");
        assert_eq!(close(&log, "a", repeat), Ok(None));
        assert_eq!(look(&log, "a", repeat, now), AttemptState::Open);
        assert_eq!(look(&log, "a", repeat + 1, now), AttemptState::Stale);
        assert_eq!(close(&log, "a", 1), Ok(Some(repeat)));
        assert_eq!(look(&log, "a", 1, now), AttemptState::Closed(repeat));
        assert_eq!(look(&log, "b", 1, now), AttemptState::Open, "it is another request");
    }

    #[test]
    fn what_was_closed_and_forgotten_is_too_old() {
        let (_dir, log) = log(1);
        let repeat = FIRST_REPEAT;
        close(&log, "a", repeat).unwrap();
        age_all(&log, KEPT + Duration::from_secs(1));
        close(&log, "b", repeat).unwrap();
        assert_eq!(log.objects.list::<ClosedAttempts>().unwrap().len(), 1);
        let sent = |seconds: u64| SystemTime::now() - Duration::from_secs(seconds);
        assert_eq!(look(&log, "a", 0, sent(KEPT.as_secs())), AttemptState::Stale);
        // Also if the clock of its daemon is ahead by less than five minutes.
        assert_eq!(look(&log, "a", 0, sent(KEPT.as_secs() - 5 * 60 + 1)), AttemptState::Stale);
        assert_eq!(look(&log, "a", repeat, sent(0)), AttemptState::Stale);
        assert_eq!(look(&log, "a", 0, sent(0)), AttemptState::Open);
        let ahead = SystemTime::now() + Duration::from_secs(20 * 60);
        assert_eq!(look(&log, "a", 0, ahead), AttemptState::Stale, "one of the clocks is wrong");
        assert_eq!(look(&log, "a", 0, from_unix_ms(u64::MAX)), AttemptState::Stale);
        assert_eq!(from_unix_ms(unix_ms(from_unix_ms(7))), from_unix_ms(7));
    }

    #[test]
    fn old_ones_go_after_some_closings_though_there_is_space() {
        let (_dir, log) = log(MOST);
        for request in 0..10 {
            close(&log, &format!("old-{request}"), 7).unwrap();
        }
        age_all(&log, KEPT + Duration::from_secs(1));
        for request in 0..TIDY_EACH {
            close(&log, &format!("new-{request}"), 7).unwrap();
        }
        assert_eq!(log.objects.list::<ClosedAttempts>().unwrap().len(), TIDY_EACH);
    }

    #[test]
    fn too_many_close_no_more_and_forget_nothing() {
        let (_dir, log) = log(3);
        for request in ["a", "b", "c"] {
            assert_eq!(close(&log, request, 7), Ok(None));
        }
        assert_eq!(close(&log, "d", 7), Err(ErrorCode::Busy));
        assert_eq!(close(&log, "a", 8), Ok(None), "of a request that is known a later one can be closed");
        assert_eq!(look(&log, "b", 0, SystemTime::now()), AttemptState::Closed(7));
        // A daemon that starts again knows them, and counts their time from then.
        let again = ClosedAttemptLog { most: 3, ..ClosedAttemptLog::new(log.objects.clone()) };
        assert_eq!(close(&again, "d", 7), Err(ErrorCode::Busy));
        age_all(&again, KEPT + Duration::from_secs(1));
        assert_eq!(close(&again, "a", 9), Ok(None), "its time begins anew");
        assert_eq!(close(&again, "d", 7), Ok(None));
        let left = again.objects.list::<ClosedAttempts>().unwrap();
        assert_eq!(left.into_iter().map(|record| record.name).collect::<Vec<_>>(), ["a", "d"]);
    }
}
