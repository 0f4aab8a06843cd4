//! What requests with an `Idempotency-Key` have made, so that the same request makes it once. Owns these records.
//!
//! Invariant: a key is of one caller and one route. Of the last `MOST` keys, each is known for a day; which of a claim
//! is recorded together with the claim itself.

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

/// What is stored of them.
pub(crate) const RECORDS: [RecordKind; 1] = [RecordKind::of::<RecordedAnswer>()];

/// How long a key is known.
const KEPT: Duration = Duration::from_secs(86_400);
/// Keys that are known at most: beyond that the oldest are forgotten.
const MOST: usize = 16_384;
/// Keys that come between two looks at which are to be forgotten.
const TIDY_EACH: usize = 256;

/// A key of a request, and what the request asks.
#[derive(Clone, Debug)]
pub struct IdempotentRequest {
    /// Of caller, route and key.
    name: String,
    /// A digest of what is asked: another question with the same key is a mistake.
    request: String,
}

/// What a request has made.
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
    /// A key that this caller gives for this route, with a body.
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

    /// What was made with it, if anything was. That this stays so becomes a condition of the change.
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

    /// Records what is made with it, as a part of the change that makes it.
    pub fn record(&self, changes: &mut Changes, answer: &impl Serialize) {
        let answer = serde_json::to_value(answer).expect("an answer is plain data");
        let made = RecordedAnswer { at: Timestamp::now(), request: self.request.clone(), answer };
        changes.put(&self.name, &made);
    }
}

fn is_old(made: &RecordedAnswer) -> bool {
    Timestamp::now().duration_since(made.at).unsigned_abs() > KEPT
}

/// The keys of a host. A clone is the same.
#[derive(Clone)]
pub struct Idempotency(Arc<Inner>);

struct Inner {
    objects: Objects,
    /// The names of keys whose requests are being answered.
    answering: Mutex<HashSet<String>>,
    added: AtomicUsize,
}

impl Idempotency {
    /// The keys that are recorded.
    pub fn new(objects: Objects) -> Idempotency {
        // The first key that comes is a reason to look.
        let added = AtomicUsize::new(TIDY_EACH);
        Idempotency(Arc::new(Inner { objects, answering: Mutex::default(), added }))
    }

    /// Makes something, unless the key has made it already: then it is what was made, and `true`. What fails is not
    /// recorded. If the daemon dies in between, it may have been made.
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

    /// A key was recorded. Now and then those are forgotten that are too old or too many.
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

/// A key's request is being answered, until this is dropped.
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
