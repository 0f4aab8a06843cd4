//! Idempotency keys: records what requests with an `Idempotency-Key` have made, so that repeating a request makes it
//! once. Owns these records.
//!
//! Invariant: a key belongs to one caller and one route. Each of the last `MOST` keys is kept for a day; the key of a
//! claim is recorded in the same transaction as the claim.

use crate::error::HostError;
use crate::store::{Changes, Objects, RecordKind, StoredRecord};
use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use spillway_api::ErrorCode;
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use utoipa::ToSchema;

/// Kinds of records of this module.
pub(crate) const RECORDS: [RecordKind; 1] = [RecordKind::of::<RecordedAnswer>()];

/// How long a key is kept.
const KEPT: Duration = Duration::from_secs(86_400);
/// Number of keys that are kept; beyond it the oldest are removed.
const MOST: usize = 16_384;
/// Number of new keys after which old ones are removed.
const TIDY_EACH: usize = 256;

/// A request with an idempotency key.
#[derive(Clone, Debug)]
pub struct IdempotentRequest {
    /// Digest of caller, route and key.
    name: String,
    /// Digest of the request: another request with the same key is an error.
    request: String,
}

/// Record of what a request has made.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
struct RecordedAnswer {
    #[schema(value_type = String, format = DateTime)]
    at: Timestamp,
    request: String,
    answer: Value,
}

impl StoredRecord for RecordedAnswer {
    const PREFIX: &'static str = "idempotency/";
    const WORD: &'static str = "answer";
}

impl IdempotentRequest {
    /// Creates the value for this caller, route, key and body.
    pub fn new(caller: &str, route: &str, key: &str, body: &impl Serialize) -> IdempotentRequest {
        let mut name = Sha256::new();
        for part in [caller, route, key] {
            name.update((part.len() as u64).to_le_bytes());
            name.update(part);
        }
        let body = serde_json::to_vec(body).expect("a body is plain data");
        IdempotentRequest {
            name: format!("{:x}", name.finalize()),
            request: format!("{:x}", Sha256::digest(body)),
        }
    }

    /// Returns what was made with this key, if anything. The transaction fails if that changes before its commit.
    pub fn made<T: DeserializeOwned>(&self, changes: &mut Changes) -> Result<Option<T>, HostError> {
        let found = changes.get::<RecordedAnswer>(&self.name)?.map(|made| made.value);
        let Some(made) = found.filter(|made| !is_old(made)) else { return Ok(None) };
        if made.request != self.request {
            let message = "this Idempotency-Key was given for another request: take a new key for each";
            return Err(HostError::new(ErrorCode::KeyReused, message));
        }
        let damaged =
            |e| HostError::new(ErrorCode::Damaged, format!("what this key has made cannot be read: {e}"));
        serde_json::from_value(made.answer).map(Some).map_err(damaged)
    }

    /// Records what is made with this key, in the transaction that makes it.
    pub fn record(&self, changes: &mut Changes, answer: &impl Serialize) {
        let answer = serde_json::to_value(answer).expect("an answer is plain data");
        let made = RecordedAnswer { at: Timestamp::now(), request: self.request.clone(), answer };
        changes.put(&self.name, &made);
    }
}

fn is_old(made: &RecordedAnswer) -> bool {
    Timestamp::now().duration_since(made.at).unsigned_abs() > KEPT
}

/// The idempotency keys of a host. A clone is the same keys.
#[derive(Clone)]
pub struct Idempotency(Arc<Inner>);

struct Inner {
    objects: Objects,
    /// Names of keys whose requests are in progress.
    answering: Mutex<HashSet<String>>,
    added: AtomicUsize,
}

impl Idempotency {
    /// Creates the value for these records.
    pub fn new(objects: Objects) -> Idempotency {
        // The first new key removes old ones.
        let added = AtomicUsize::new(TIDY_EACH);
        Idempotency(Arc::new(Inner { objects, answering: Mutex::default(), added }))
    }

    /// Calls `make` once for a key: returns what it made before, and `true`, if the key is known. Errors are not
    /// recorded. If the daemon dies in between, the object may have been made without a record.
    pub fn once<T: Serialize + DeserializeOwned>(
        &self,
        key: Option<&IdempotentRequest>,
        make: impl FnOnce() -> Result<T, HostError>,
    ) -> Result<(T, bool), HostError> {
        let Some(key) = key else { return Ok((make()?, false)) };
        if !self.answering().insert(key.name.clone()) {
            let message = "a request with this Idempotency-Key is being answered: ask again in a moment";
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        let _answering = KeyInFlight(self, &key.name);
        if let Some(made) = self.0.objects.change(|changes| key.made(changes))? {
            return Ok((made, true));
        }
        let made = make()?;
        self.0.objects.change(|changes| {
            key.record(changes, &made);
            Ok::<_, HostError>(())
        })?;
        self.forget_old_keys()?;
        Ok((made, false))
    }

    /// Notes a new key. Removes keys that are too old or too many, from time to time.
    pub fn forget_old_keys(&self) -> Result<(), HostError> {
        if self.0.added.fetch_add(1, Ordering::Relaxed) < TIDY_EACH {
            return Ok(());
        }
        self.0.added.store(0, Ordering::Relaxed);
        let mut all = self.0.objects.list::<RecordedAnswer>()?;
        all.sort_by_key(|made| made.value.at);
        let surplus = all.len().saturating_sub(MOST);
        let old = all.into_iter().enumerate().filter(|(n, made)| *n < surplus || is_old(&made.value));
        let old: Vec<String> = old.map(|(_, made)| made.name).collect();
        for names in old.chunks(TIDY_EACH) {
            self.0.objects.change(|changes| {
                names.iter().for_each(|name| changes.delete::<RecordedAnswer>(name));
                Ok::<_, HostError>(())
            })?;
        }
        Ok(())
    }

    fn answering(&self) -> MutexGuard<'_, HashSet<String>> {
        self.0.answering.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Marks a key's request as in progress, until this is dropped.
struct KeyInFlight<'a>(&'a Idempotency, &'a str);

impl Drop for KeyInFlight<'_> {
    fn drop(&mut self) {
        self.0.answering().remove(self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::SqliteStore;

    fn world() -> (tempfile::TempDir, Objects, Idempotency) {
        let dir = tempfile::tempdir().unwrap();
        let objects = Objects::new(Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap()));
        let keys = Idempotency::new(objects.clone());
        (dir, objects, keys)
    }

    fn made(keys: &Idempotency, key: &IdempotentRequest, value: u32) -> Result<(u32, bool), ErrorCode> {
        keys.once(Some(key), || Ok(value)).map_err(|e| e.code)
    }

    #[test]
    fn a_key_makes_one_thing_for_its_caller_and_route() {
        let (_dir, objects, keys) = world();
        let key = IdempotentRequest::new("ci", "import/debian", "1", &"body");
        assert_eq!(made(&keys, &key, 1), Ok((1, false)));
        assert_eq!(made(&keys, &key, 2), Ok((1, true)));
        assert_eq!(made(&Idempotency::new(objects), &key, 3), Ok((1, true)), "another daemon");
        for other in
            [("cd", "import/debian", "1"), ("ci", "import/debian2", "1"), ("ci", "import/debian", "2")]
        {
            let other = IdempotentRequest::new(other.0, other.1, other.2, &"body");
            assert_eq!(made(&keys, &other, 4), Ok((4, false)));
        }
        assert_eq!(
            made(&keys, &IdempotentRequest::new("ci", "import/debian", "1", &"other"), 5),
            Err(ErrorCode::KeyReused)
        );
        assert_eq!(keys.once(None, || Ok(6)).unwrap(), (6, false));
        // Parts do not run into each other.
        assert_ne!(
            IdempotentRequest::new("a", "bc", "", &()).name,
            IdempotentRequest::new("ab", "c", "", &()).name
        );
    }

    #[test]
    fn what_fails_may_be_asked_again_and_what_goes_on_may_not() {
        let (_dir, _objects, keys) = world();
        let key = IdempotentRequest::new("ci", "x", "1", &());
        let failed: Result<(u32, bool), _> = keys.once(Some(&key), || {
            assert_eq!(made(&keys, &key, 1), Err(ErrorCode::Conflict), "while it is answered");
            Err(HostError::invalid("no"))
        });
        assert_eq!(failed.unwrap_err().code, ErrorCode::Invalid);
        assert_eq!(made(&keys, &key, 2), Ok((2, false)));
    }

    #[test]
    fn keys_are_forgotten_after_a_day_and_when_there_are_too_many() {
        let (_dir, objects, keys) = world();
        let now = Timestamp::now();
        let put = |range: std::ops::Range<usize>, at: Timestamp| {
            let made = RecordedAnswer { at, request: String::new(), answer: Value::Null };
            objects.change(|changes| {
                range.clone().for_each(|n| changes.put(&format!("{n:08}"), &made));
                Ok::<_, HostError>(())
            })
        };
        let day = Duration::from_secs(86_400);
        put(0..10, now - day - Duration::from_secs(1)).unwrap();
        put(10..20, now - Duration::from_secs(60)).unwrap();
        put(20..20 + MOST, now).unwrap();
        keys.forget_old_keys().unwrap();
        let left = objects.list::<RecordedAnswer>().unwrap();
        assert_eq!((left.len(), left[0].name.as_str()), (MOST, "00000020"));
    }
}
