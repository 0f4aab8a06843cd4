//! Typed objects in the store: each kind has a key prefix and is stored as JSON. Owns no object and decides nothing.
//!
//! Invariant: a change is committed only if what it was based on is unchanged; else it is decided anew. A record that
//! cannot be read is neither changed nor replaced nor deleted.

use super::{ChangeNotice, Expect, RECORDS_VERSION, Revision, Store, StoreEntry, StoreError, Transaction};
use serde::Serialize;
use serde::de::DeserializeOwned;
use spillway_api::UnreadableRecord;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use tokio::sync::broadcast;
use utoipa::ToSchema;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;

/// A kind of stored object.
pub trait StoredRecord: Serialize + DeserializeOwned {
    /// Prefix of its keys, with a slash at the end.
    const PREFIX: &'static str;
    /// Word for it in messages.
    const WORD: &'static str;
    /// Whether an unreadable record may be overwritten, because it is a mark whose content does not matter once it is
    /// lost.
    const IS_A_MARK: bool = false;

    /// Tells an object the revision that wrote it, for kinds that show it.
    fn written_by(&mut self, _revision: Revision) {}
}

/// An object at a revision.
#[derive(Clone, Debug)]
pub struct Object<T> {
    /// Name of the object: its key without the prefix.
    pub name: String,
    /// The object.
    pub value: T,
    /// Revision that last wrote it.
    pub revision: Revision,
}

/// A page of the objects of a kind.
pub struct ObjectPage<T> {
    /// The readable objects.
    pub objects: Vec<Object<T>>,
    /// Last name on the page if there may be more: the next page follows it.
    pub next: Option<String>,
}

/// Description of a kind, for code that handles all kinds.
pub struct RecordKind {
    /// Prefix of its keys.
    pub prefix: &'static str,
    /// Word for it in messages.
    pub word: &'static str,
    /// Checks that a value can be read.
    check: fn(&[u8]) -> Result<(), serde_json::Error>,
    /// Returns the schema of its values.
    pub schema: fn() -> RecordSchema,
}

/// Schema of a stored type, and of all types that it refers to by name.
pub type RecordSchema = (RefOr<Schema>, Vec<(String, RefOr<Schema>)>);

impl RecordKind {
    /// Describes this type.
    pub const fn of<T: StoredRecord + ToSchema>() -> RecordKind {
        RecordKind { prefix: T::PREFIX, word: T::WORD, check: check::<T>, schema: schema::<T> }
    }
}

fn check<T: StoredRecord>(value: &[u8]) -> Result<(), serde_json::Error> {
    serde_json::from_slice::<T>(value).map(drop)
}

/// Returns the schema of this type.
pub fn schema<T: ToSchema>() -> RecordSchema {
    let mut named = Vec::new();
    T::schemas(&mut named);
    (T::schema(), named)
}

/// A record that cannot be read. It is set aside: nothing acts on its object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// Key of the record.
    pub key: String,
    /// Version of the records when it was written.
    pub version: u32,
    /// Why it cannot be read.
    pub why: String,
}

impl Unreadable {
    fn error(&self) -> StoreError {
        StoreError::Unreadable { key: self.key.clone(), why: self.why.clone(), advice: self.advice() }
    }

    /// Converts it for the API.
    pub fn describe(self) -> UnreadableRecord {
        let advice = self.advice();
        UnreadableRecord { key: self.key, version: self.version, why: self.why, advice }
    }

    /// Returns what to do about it.
    pub fn advice(&self) -> String {
        match self.version > RECORDS_VERSION {
            true => format!(
                "Version {} of the records wrote it, and this spillwayd reads them up to version {RECORDS_VERSION}: start the \
                 spillwayd that wrote it",
                self.version
            ),
            false => "It is damaged: restore a backup ('spillwayd restore')".into(),
        }
    }
}

/// Number of records that are read at once.
const PAGE: usize = 256;
/// How often a change is attempted concurrently with others.
const TRIES_BESIDE_OTHERS: u32 = 8;
/// How often it is attempted alone. Then only another process can interfere.
const TRIES_ALONE: u32 = 56;

/// All objects of a store. A clone is the same store.
#[derive(Clone)]
pub struct Objects {
    store: Arc<dyn Store>,
    /// Shared by concurrent changes; exclusive for a change that has conflicted repeatedly, so that a slow one is not
    /// starved by quick ones.
    turn: Arc<RwLock<()>>,
    /// Records that could not be read, by key.
    unreadable: Arc<Mutex<BTreeMap<String, Unreadable>>>,
}

impl Objects {
    /// Creates the objects of a store.
    pub fn new(store: Arc<dyn Store>) -> Objects {
        Objects { store, turn: Arc::default(), unreadable: Arc::default() }
    }

    /// Reads all records once. Sets aside those that cannot be read or are of an unknown kind.
    pub fn look_at_all(&self, kinds: &[RecordKind]) -> Result<Vec<Unreadable>, StoreError> {
        let (entries, _) = self.store.list("")?;
        for entry in entries {
            let kind = kinds.iter().find(|kind| entry.key.starts_with(kind.prefix));
            let why = match kind.map(|kind| (kind.check)(&entry.value)) {
                Some(Ok(())) => continue,
                Some(Err(why)) => why.to_string(),
                None => "it is of no kind that is known here".into(),
            };
            self.set_aside(&entry, why);
        }
        Ok(self.set_aside_below(""))
    }

    /// Returns the unreadable records with this key prefix.
    pub fn set_aside_below(&self, prefix: &str) -> Vec<Unreadable> {
        let unreadable = self.unreadable();
        unreadable.values().filter(|record| record.key.starts_with(prefix)).cloned().collect()
    }

    /// Returns the names of a kind's unreadable records.
    pub fn unreadable_names<T: StoredRecord>(&self) -> Vec<String> {
        let names = self.set_aside_below(T::PREFIX).into_iter();
        names.map(|record| record.key[T::PREFIX.len()..].to_owned()).collect()
    }

    fn set_aside(&self, entry: &StoreEntry, why: String) -> StoreError {
        let record = Unreadable { key: entry.key.clone(), version: entry.version, why };
        let error = record.error();
        self.unreadable().insert(entry.key.clone(), record);
        error
    }

    fn unreadable(&self) -> MutexGuard<'_, BTreeMap<String, Unreadable>> {
        self.unreadable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read<T: StoredRecord>(&self, entry: StoreEntry) -> Result<Object<T>, StoreError> {
        let name = entry.key[T::PREFIX.len()..].to_owned();
        match serde_json::from_slice::<T>(&entry.value) {
            Ok(mut value) => {
                value.written_by(entry.revision);
                Ok(Object { name, value, revision: entry.revision })
            }
            Err(why) => Err(self.set_aside(&entry, why.to_string())),
        }
    }

    /// Subscribes to all later transactions.
    pub fn watch(&self) -> broadcast::Receiver<ChangeNotice> {
        self.store.watch()
    }

    /// Returns an object if it exists. Fails if it cannot be read.
    pub fn get<T: StoredRecord>(&self, name: &str) -> Result<Option<Object<T>>, StoreError> {
        self.store.get(&key::<T>(name))?.map(|entry| self.read(entry)).transpose()
    }

    /// Does the same, but treats an unreadable object as missing.
    pub fn get_readable<T: StoredRecord>(&self, name: &str) -> Result<Option<Object<T>>, StoreError> {
        match self.get(name) {
            Err(StoreError::Unreadable { .. }) => Ok(None),
            found => found,
        }
    }

    /// Returns all readable objects of a kind, in the order of their names.
    pub fn list<T: StoredRecord>(&self) -> Result<Vec<Object<T>>, StoreError> {
        self.list_below("")
    }

    /// Returns all readable objects of a kind with this name prefix.
    pub fn list_below<T: StoredRecord>(&self, prefix: &str) -> Result<Vec<Object<T>>, StoreError> {
        let (entries, _) = self.store.list(&key::<T>(prefix))?;
        Ok(entries.into_iter().filter_map(|entry| self.read(entry).ok()).collect())
    }

    /// Reads a page of at most `most` objects after this name, in the order of their names. The first page follows the
    /// empty name. Unreadable objects are left out.
    pub fn page<T: StoredRecord>(&self, after: &str, most: usize) -> Result<ObjectPage<T>, StoreError> {
        let entries = self.store.page(T::PREFIX, &key::<T>(after), most)?;
        let last = entries.last().filter(|_| entries.len() == most);
        let next = last.map(|last| last.key[T::PREFIX.len()..].to_owned());
        let objects = entries.into_iter().filter_map(|entry| self.read(entry).ok()).collect();
        Ok(ObjectPage { objects, next })
    }

    /// Iterates over the readable objects after this name, in the order of their names. They are read page by page, so
    /// that memory does not grow with their number; each is current when its page is read.
    pub fn each_after<T: StoredRecord>(
        &self,
        after: &str,
    ) -> impl Iterator<Item = Result<Object<T>, StoreError>> + use<'_, T> {
        let (mut next, mut read) = (Some(after.to_owned()), Vec::new().into_iter());
        std::iter::from_fn(move || {
            loop {
                if let Some(object) = read.next() {
                    return Some(Ok(object));
                }
                match self.page::<T>(&next.take()?, PAGE) {
                    Ok(page) => (read, next) = (page.objects.into_iter(), page.next),
                    Err(e) => return Some(Err(e)),
                }
            }
        })
    }

    /// Counts the objects of a kind.
    pub fn count<T: StoredRecord>(&self) -> Result<u64, StoreError> {
        self.store.count(T::PREFIX)
    }

    /// Runs a transaction: `decide` reads and changes objects with [`Changes`]. It runs again from the start whenever
    /// what it has read was changed meanwhile, so it must have no other effect.
    pub fn change<R, E: From<StoreError>>(
        &self,
        decide: impl FnMut(&mut Changes) -> Result<R, E>,
    ) -> Result<R, E> {
        self.change_at(decide).map(|(result, _)| result)
    }

    /// Does the same, and returns the revision of the transaction; `None` without changes.
    pub fn change_at<R, E: From<StoreError>>(
        &self,
        mut decide: impl FnMut(&mut Changes) -> Result<R, E>,
    ) -> Result<(R, Option<Revision>), E> {
        let mut last = None;
        for attempt in 0..TRIES_BESIDE_OTHERS + TRIES_ALONE {
            // The lock guards no data that a panic could leave inconsistent.
            let beside = attempt < TRIES_BESIDE_OTHERS;
            let _beside = beside.then(|| self.turn.read().unwrap_or_else(PoisonError::into_inner));
            let _alone = (!beside).then(|| self.turn.write().unwrap_or_else(PoisonError::into_inner));
            let mut changes = Changes::new(self);
            let result = decide(&mut changes)?;
            match changes.commit() {
                Err(conflict @ StoreError::Conflict(_)) => last = Some(conflict),
                Err(error) => return Err(error.into()),
                Ok(revision) => return Ok((result, revision)),
            }
        }
        Err(last.expect("one attempt was made at least").into())
    }
}

/// A transaction in progress: its changes, and what it has read.
pub struct Changes<'a> {
    objects: &'a Objects,
    transaction: Transaction,
    /// An unreadable record that the transaction tries to change.
    refused: Option<Unreadable>,
}

impl Changes<'_> {
    fn new(objects: &Objects) -> Changes<'_> {
        Changes { objects, transaction: Transaction::default(), refused: None }
    }

    /// Returns an object if it exists. The transaction fails if the object changes before the commit.
    pub fn get<T: StoredRecord>(&mut self, name: &str) -> Result<Option<Object<T>>, StoreError> {
        let object = self.objects.get(name)?;
        let expect = object.as_ref().map_or(Expect::Absent, |o: &Object<T>| Expect::Unchanged(o.revision));
        self.transaction.expects.push((key::<T>(name), expect));
        Ok(object)
    }

    /// Returns all objects with this name prefix; fails if one of them cannot be read, since it might matter. The
    /// transaction fails if one of them changes before the commit, but not if another is added. To detect that, read
    /// first an object that every addition writes.
    pub fn list_below<T: StoredRecord>(&mut self, prefix: &str) -> Result<Vec<Object<T>>, StoreError> {
        let found = self.list_readable_below(prefix)?;
        match self.objects.set_aside_below(&key::<T>(prefix)).first() {
            None => Ok(found),
            Some(record) => Err(record.error()),
        }
    }

    /// Does the same for the readable ones, where the others do not matter.
    pub fn list_readable_below<T: StoredRecord>(
        &mut self,
        prefix: &str,
    ) -> Result<Vec<Object<T>>, StoreError> {
        let objects: Vec<Object<T>> = self.objects.list_below(prefix)?;
        let expects = objects.iter().map(|o| (key::<T>(&o.name), Expect::Unchanged(o.revision)));
        self.transaction.expects.extend(expects);
        Ok(objects)
    }

    /// Writes an object, whether it exists or not.
    pub fn put<T: StoredRecord>(&mut self, name: &str, value: &T) {
        let value = serde_json::to_vec(value).expect("objects are plain data");
        self.change::<T>(name, Some(value));
    }

    /// Deletes an object.
    pub fn delete<T: StoredRecord>(&mut self, name: &str) {
        self.change::<T>(name, None);
    }

    fn change<T: StoredRecord>(&mut self, name: &str, value: Option<Vec<u8>>) {
        let key = key::<T>(name);
        let mut unreadable = self.objects.unreadable();
        match T::IS_A_MARK {
            true => _ = unreadable.remove(&key),
            false => self.refused = self.refused.take().or(unreadable.get(&key).cloned()),
        }
        drop(unreadable);
        self.transaction.changes.push((key, value));
    }

    /// Drops all changes.
    pub fn forget(&mut self) {
        self.transaction.changes.clear();
        self.refused = None;
    }

    fn commit(self) -> Result<Option<Revision>, StoreError> {
        if self.transaction.changes.is_empty() {
            return Ok(None);
        }
        if let Some(record) = self.refused {
            return Err(record.error());
        }
        self.objects.store.commit(&self.transaction).map(Some)
    }
}

fn key<T: StoredRecord>(name: &str) -> String {
    format!("{}{name}", T::PREFIX)
}
