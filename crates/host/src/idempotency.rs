//! Idempotency keys: records what requests with an `Idempotency-Key` have made, so that repeating a request makes it
//! once. Owns these records.
//!
//! Invariant: a key belongs to one caller and one route, and is recorded in the transaction that makes what it is for.
//! Each of the last `MOST` keys is kept for a day, and that of a claim at least as long as the claim.

use crate::error::HostError;
use crate::machines::held_claims;
use crate::store::{Changes, Objects, RecordKind, Revision, StoredRecord};
use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use spillway_api::ErrorCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
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

/// A request that may have an idempotency key. Of one without a key nothing is known and nothing recorded.
#[derive(Clone, Debug, Default)]
pub struct IdempotentRequest(Option<KeyDigests>);

#[derive(Clone, Debug)]
struct KeyDigests {
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
        let body = serde_json::to_vec(body).expect("a body is plain data");
        IdempotentRequest(Some(KeyDigests {
            name: key_digest(caller, route, key),
            request: short_digest(Sha256::new_with_prefix(body)),
        }))
    }

    /// Whether the request has a key.
    pub fn has_key(&self) -> bool {
        self.0.is_some()
    }

    /// Returns what was made with this key, if anything. The transaction fails if that changes before its commit.
    pub fn made<T: DeserializeOwned>(&self, changes: &mut Changes) -> Result<Option<T>, HostError> {
        Ok(self.made_while(changes, |_, _| Ok(false))?.map(|(made, _)| made))
    }

    /// Does the same, and returns the revision of the transaction that has recorded it. What has become too old counts as long as `lasts`
    /// says so.
    pub fn made_while<T: DeserializeOwned>(
        &self,
        changes: &mut Changes,
        lasts: impl FnOnce(&mut Changes, &T) -> Result<bool, HostError>,
    ) -> Result<Option<(T, Revision)>, HostError> {
        let Some(KeyDigests { name, request }) = &self.0 else { return Ok(None) };
        let Some(found) = changes.get::<RecordedAnswer>(name)? else { return Ok(None) };
        let is_old = is_old(&found.value);
        let made: Result<T, _> = serde_json::from_value(found.value.answer);
        let counts = match &made {
            Ok(made) if is_old => lasts(changes, made)?,
            _ => !is_old,
        };
        if !counts {
            return Ok(None);
        }
        if found.value.request != *request {
            let message = "this Idempotency-Key was given for another request: take a new key for each";
            return Err(HostError::new(ErrorCode::KeyReused, message));
        }
        let damaged =
            |e| HostError::new(ErrorCode::Damaged, format!("what this key has made cannot be read: {e}"));
        made.map(|made| Some((made, found.revision))).map_err(damaged)
    }

    /// Records what is made with this key, in the transaction that makes it.
    pub fn record(&self, changes: &mut Changes, answer: &impl Serialize) {
        let Some(KeyDigests { name, request }) = &self.0 else { return };
        let answer = serde_json::to_value(answer).expect("an answer is plain data");
        changes.put(name, &RecordedAnswer { at: Timestamp::now(), request: request.clone(), answer });
    }

    /// Removes the record, in the transaction that undoes what was made with this key.
    pub fn forget(&self, changes: &mut Changes) {
        if let Some(KeyDigests { name, .. }) = &self.0 {
            changes.delete::<RecordedAnswer>(name);
        }
    }
}

/// Returns the key under which what belongs to a request is recorded.
pub fn key_digest(caller: &str, route: &str, key: &str) -> String {
    let mut name = Sha256::new();
    for part in [caller, route, key] {
        name.update((part.len() as u64).to_le_bytes());
        name.update(part);
    }
    short_digest(name)
}

/// The first half of the digest, in hexadecimal. Short, so that a machine can be stopped with a key on a full disk
/// (`SMALL_BYTES` of the store).
fn short_digest(of: Sha256) -> String {
    let mut text = format!("{:x}", of.finalize());
    text.truncate(32);
    text
}

fn is_old(made: &RecordedAnswer) -> bool {
    Timestamp::now().duration_since(made.at).unsigned_abs() > KEPT
}

/// The idempotency keys of a host. A clone is the same keys.
#[derive(Clone)]
pub struct Idempotency {
    objects: Objects,
    /// Number of keys since old ones were removed.
    added: Arc<AtomicUsize>,
}

impl Idempotency {
    /// Creates the value for these records.
    pub fn new(objects: Objects) -> Idempotency {
        // The first new key removes old ones.
        Idempotency { objects, added: Arc::new(AtomicUsize::new(TIDY_EACH)) }
    }

    /// Notes that a request was carried out. Removes keys that are too old or too many, from time to time.
    pub fn note(&self, key: &IdempotentRequest) {
        if key.has_key() && self.added.fetch_add(1, Ordering::Relaxed) >= TIDY_EACH {
            self.added.store(0, Ordering::Relaxed);
            // The request has succeeded whether this does or not. A later key tries again.
            let _ = self.forget_old_keys();
        }
    }

    fn forget_old_keys(&self) -> Result<(), HostError> {
        let mut all = self.objects.list::<RecordedAnswer>()?;
        // Read after the keys: a claim that has ended meanwhile is none, and one that was made since has a new key.
        let held = held_claims(&self.objects)?;
        all.retain(|made| {
            !made.value.answer.get("claim").and_then(Value::as_str).is_some_and(|id| held.contains(id))
        });
        all.sort_by_key(|made| made.value.at);
        let surplus = all.len().saturating_sub(MOST);
        let old = all.into_iter().enumerate().filter(|(n, made)| *n < surplus || is_old(&made.value));
        let old: Vec<String> = old.map(|(_, made)| made.name).collect();
        for names in old.chunks(TIDY_EACH) {
            self.objects.change(|changes| {
                names.iter().for_each(|name| changes.delete::<RecordedAnswer>(name));
                Ok::<_, HostError>(())
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::desired_state::{ClaimRecord, DesiredState};
    use crate::machines::made_claim;
    use crate::store::SqliteStore;

    fn objects() -> (tempfile::TempDir, Objects) {
        let dir = tempfile::tempdir().unwrap();
        let objects = Objects::new(Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap()));
        (dir, objects)
    }

    /// What has been made with the key: this number, unless it is something else already.
    fn make(objects: &Objects, key: &IdempotentRequest, value: u32) -> Result<u32, ErrorCode> {
        let made = objects.change(|changes| match key.made(changes)? {
            Some(made) => Ok(made),
            None => {
                key.record(changes, &value);
                Ok::<_, HostError>(value)
            }
        });
        made.map_err(|e| e.code)
    }

    #[test]
    fn a_key_makes_one_thing_for_its_caller_and_route() {
        let (_dir, objects) = objects();
        let key = IdempotentRequest::new("ci", "import/debian", "1", &"body");
        assert_eq!((make(&objects, &key, 1), make(&objects, &key, 2)), (Ok(1), Ok(1)));
        for other in
            [("cd", "import/debian", "1"), ("ci", "import/debian2", "1"), ("ci", "import/debian", "2")]
        {
            let other = IdempotentRequest::new(other.0, other.1, other.2, &"body");
            assert_eq!(make(&objects, &other, 4), Ok(4));
        }
        let other = IdempotentRequest::new("ci", "import/debian", "1", &"other");
        assert_eq!(make(&objects, &other, 5), Err(ErrorCode::KeyReused));
        let none = IdempotentRequest::default();
        assert_eq!((make(&objects, &none, 6), make(&objects, &none, 7)), (Ok(6), Ok(7)));
        // Parts do not run into each other.
        let name = |caller, route| IdempotentRequest::new(caller, route, "", &()).0.unwrap().name;
        assert_ne!(name("a", "bc"), name("ab", "c"));
        // What was undone can be made again.
        let forget = |changes: &mut Changes| {
            key.forget(changes);
            Ok::<_, HostError>(())
        };
        objects.change(forget).unwrap();
        assert_eq!(make(&objects, &key, 8), Ok(8));
    }

    /// The store takes twice `SMALL_BYTES` for the two records that such an action changes.
    #[test]
    fn a_machine_with_a_long_name_can_be_stopped_with_a_key_on_a_full_disk() {
        let (_dir, objects) = objects();
        let key = IdempotentRequest::new("ci", "machine-actions", "1", &());
        let progress = serde_json::json!({ "last": "m".repeat(63), "is_complete": false });
        let record = |changes: &mut Changes| {
            key.record(changes, &progress);
            Ok::<_, HostError>(())
        };
        objects.change(record).unwrap();
        let made = objects.list::<RecordedAnswer>().unwrap().remove(0);
        let bytes =
            RecordedAnswer::PREFIX.len() + made.name.len() + serde_json::to_vec(&made.value).unwrap().len();
        assert!(bytes + 16 <= 2 * 128, "{bytes}");
    }

    #[test]
    fn keys_are_forgotten_after_a_day_and_when_there_are_too_many() {
        let (_dir, objects) = objects();
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
        Idempotency::new(objects.clone()).note(&IdempotentRequest::new("ci", "x", "1", &()));
        let left = objects.list::<RecordedAnswer>().unwrap();
        assert_eq!((left.len(), left[0].name.as_str()), (MOST, "00000020"));
    }

    /// Forgotten, a repeated request would claim a second machine.
    #[test]
    fn the_key_of_a_claim_is_kept_as_long_as_the_claim() {
        let (_dir, objects) = objects();
        let key = IdempotentRequest::new("ci", "claims/desk", "1", &());
        let claim = ClaimRecord::new(None, false, "ci");
        let answer = serde_json::json!({ "machine": "desk-001", "claim": claim.id });
        let ages = [Duration::from_secs(2 * 86_400), Duration::from_secs(60)];
        for at in ages.map(|age| Timestamp::now() - age) {
            let KeyDigests { name, request } = key.0.clone().unwrap();
            let put = |changes: &mut Changes| {
                let made = RecordedAnswer { at, request: request.clone(), answer: answer.clone() };
                changes.put(&name, &made);
                changes
                    .put("desk-001", &DesiredState { claim: Some(claim.clone()), ..DesiredState::default() });
                for number in 0..MOST {
                    let made =
                        RecordedAnswer { at: Timestamp::now(), request: String::new(), answer: Value::Null };
                    changes.put(&format!("{number:08}"), &made);
                }
                Ok::<_, HostError>(())
            };
            objects.change(put).unwrap();
            let made =
                || objects.change(|changes| made_claim(&key, changes)).unwrap().map(|(made, _)| made.claim);
            let note = || Idempotency::new(objects.clone()).note(&key);
            note();
            assert_eq!(made(), Some(claim.id.clone()));
            let other = IdempotentRequest::new("ci", "claims/desk", "1", &"other");
            let reused = objects.change(|changes| made_claim(&other, changes)).err().map(|e| e.code);
            assert_eq!(reused, Some(ErrorCode::KeyReused));
            let release = |changes: &mut Changes| {
                changes.put("desk-001", &DesiredState::default());
                Ok::<_, HostError>(())
            };
            objects.change(release).unwrap();
            note();
            assert_eq!(made(), None);
            assert!(objects.get::<RecordedAnswer>(&name).unwrap().is_none());
        }
    }
}
