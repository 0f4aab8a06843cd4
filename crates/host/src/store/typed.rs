//! Objects in the store: each kind under a prefix of its own, as JSON. Owns no object and decides nothing.
//!
//! Invariant: what is changed was looked at, and has not been changed since; else the change is decided anew. A record
//! that cannot be read is neither changed nor replaced nor deleted.

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

/// A kind of object.
pub trait StoredRecord: Serialize + DeserializeOwned {
    /// What its keys begin with, a slash at the end.
    const PREFIX: &'static str;
    /// What it is called when people are told of it.
    const WORD: &'static str;
    /// Whether one that cannot be read may be written anew: it is a mark that says nothing once it is lost.
    const IS_A_MARK: bool = false;

    /// Tells an object that was read what wrote it: for those that show it.
    fn written_by(&mut self, _revision: Revision) {}
}

/// An object as it was at a revision.
#[derive(Clone, Debug)]
pub struct Object<T> {
    /// Its name, the rest of its key.
    pub name: String,
    /// What it is.
    pub value: T,
    /// What wrote it last.
    pub revision: Revision,
}

/// A page of the records of a kind.
pub struct ObjectPage<T> {
    /// Those that can be read.
    pub objects: Vec<Object<T>>,
    /// The last name on the page if there may be more: the next page comes after it.
    pub next: Option<String>,
}

/// A kind as those know it who look at all of them.
pub struct RecordKind {
    /// What its keys begin with.
    pub prefix: &'static str,
    /// What it is called when people are told of it.
    pub word: &'static str,
    /// Whether a value can be read.
    check: fn(&[u8]) -> Result<(), serde_json::Error>,
    /// What a value looks like.
    pub schema: fn() -> RecordSchema,
}

/// What a stored type looks like, and all that it refers to by name.
pub type RecordSchema = (RefOr<Schema>, Vec<(String, RefOr<Schema>)>);

impl RecordKind {
    /// Of this type.
    pub const fn of<T: StoredRecord + ToSchema>() -> RecordKind {
        RecordKind { prefix: T::PREFIX, word: T::WORD, check: check::<T>, schema: schema::<T> }
    }
}

fn check<T: StoredRecord>(value: &[u8]) -> Result<(), serde_json::Error> {
    serde_json::from_slice::<T>(value).map(drop)
}

/// Of this type.
pub fn schema<T: ToSchema>() -> RecordSchema {
    let mut named = Vec::new();
    T::schemas(&mut named);
    (T::schema(), named)
}

/// A record that cannot be read. It is set aside: nothing is done about what it is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// Where it is.
    pub key: String,
    /// The version of the records that wrote it.
    pub version: u32,
    /// Why.
    pub why: String,
}

impl Unreadable {
    fn error(&self) -> StoreError {
        StoreError::Unreadable { key: self.key.clone(), why: self.why.clone(), advice: self.advice() }
    }

    /// As others see it.
    pub fn describe(self) -> UnreadableRecord {
        let advice = self.advice();
        UnreadableRecord { key: self.key, version: self.version, why: self.why, advice }
    }

    /// What to do.
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

/// Records that are read together.
const PAGE: usize = 256;
/// How often a change is decided beside others.
const TRIES_BESIDE_OTHERS: u32 = 8;
/// How often it is decided alone: then only another process can be faster.
const TRIES_ALONE: u32 = 56;

/// All objects. A clone is the same store.
#[derive(Clone)]
pub struct Objects {
    store: Arc<dyn Store>,
    /// Shared by those who change, held alone by one who others were faster than again and again: what takes long to
    /// decide would else never be done beside what is quick.
    turn: Arc<RwLock<()>>,
    /// Records that could not be read, by key.
    unreadable: Arc<Mutex<BTreeMap<String, Unreadable>>>,
}

impl Objects {
    /// Those of a store.
    pub fn new(store: Arc<dyn Store>) -> Objects {
        Objects { store, turn: Arc::default(), unreadable: Arc::default() }
    }

    /// Looks at all records once: those that cannot be read, or are of no kind that is known, are set aside.
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

    /// Records that could not be read, whose keys begin so.
    pub fn set_aside_below(&self, prefix: &str) -> Vec<Unreadable> {
        let unreadable = self.unreadable();
        unreadable.values().filter(|record| record.key.starts_with(prefix)).cloned().collect()
    }

    /// The names of those of a kind that could not be read.
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

    /// Every transaction from now on.
    pub fn watch(&self) -> broadcast::Receiver<ChangeNotice> {
        self.store.watch()
    }

    /// One, if there is. An error if it cannot be read.
    pub fn get<T: StoredRecord>(&self, name: &str) -> Result<Option<Object<T>>, StoreError> {
        self.store.get(&key::<T>(name))?.map(|entry| self.read(entry)).transpose()
    }

    /// The same, where one that cannot be read is as good as none.
    pub fn get_readable<T: StoredRecord>(&self, name: &str) -> Result<Option<Object<T>>, StoreError> {
        match self.get(name) {
            Err(StoreError::Unreadable { .. }) => Ok(None),
            found => found,
        }
    }

    /// All of a kind that can be read, in the order of their names.
    pub fn list<T: StoredRecord>(&self) -> Result<Vec<Object<T>>, StoreError> {
        self.list_below("")
    }

    /// All of a kind that can be read and whose name begins so.
    pub fn list_below<T: StoredRecord>(&self, prefix: &str) -> Result<Vec<Object<T>>, StoreError> {
        let (entries, _) = self.store.list(&key::<T>(prefix))?;
        Ok(entries.into_iter().filter_map(|entry| self.read(entry).ok()).collect())
    }

    /// Reads a page of a kind in the order of the names: `most` records after this name at most. For the first page the name
    /// is empty. Records that cannot be read are left out.
    pub fn page<T: StoredRecord>(&self, after: &str, most: usize) -> Result<ObjectPage<T>, StoreError> {
        let entries = self.store.page(T::PREFIX, &key::<T>(after), most)?;
        let last = entries.last().filter(|_| entries.len() == most);
        let next = last.map(|last| last.key[T::PREFIX.len()..].to_owned());
        let objects = entries.into_iter().filter_map(|entry| self.read(entry).ok()).collect();
        Ok(ObjectPage { objects, next })
    }

    /// Those of a kind that can be read and whose names come after this one, in the order of their names. They are read a page
    /// at a time, so that memory does not grow with their number; each is as it was when it was read.
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

    /// How many of a kind there are.
    pub fn count<T: StoredRecord>(&self) -> Result<u64, StoreError> {
        self.store.count(T::PREFIX)
    }

    /// Decides on changes by what is stored and makes them together. Decided anew, from the start, whenever somebody
    /// else has changed meanwhile what the decision looked at with [`Changes`]. A decision makes no other change itself.
    pub fn change<R, E: From<StoreError>>(
        &self,
        decide: impl FnMut(&mut Changes) -> Result<R, E>,
    ) -> Result<R, E> {
        self.change_at(decide).map(|(result, _)| result)
    }

    /// The same, and the revision that the changes have made: none if there were none.
    pub fn change_at<R, E: From<StoreError>>(
        &self,
        mut decide: impl FnMut(&mut Changes) -> Result<R, E>,
    ) -> Result<(R, Option<Revision>), E> {
        let mut last = None;
        for attempt in 0..TRIES_BESIDE_OTHERS + TRIES_ALONE {
            // Nothing is behind the lock that a panic could have left half done.
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

/// Changes that are to happen together, and what they were decided on.
pub struct Changes<'a> {
    objects: &'a Objects,
    transaction: Transaction,
    /// A record that would be changed, and cannot be read.
    refused: Option<Unreadable>,
}

impl Changes<'_> {
    fn new(objects: &Objects) -> Changes<'_> {
        Changes { objects, transaction: Transaction::default(), refused: None }
    }

    /// One, if there is. That it is as it is becomes a condition.
    pub fn get<T: StoredRecord>(&mut self, name: &str) -> Result<Option<Object<T>>, StoreError> {
        let object = self.objects.get(name)?;
        let expect = object.as_ref().map_or(Expect::Absent, |o: &Object<T>| Expect::Unchanged(o.revision));
        self.transaction.expects.push((key::<T>(name), expect));
        Ok(object)
    }

    /// All whose name begins so; an error if one of them cannot be read: it might be what decides. That each of them is as it
    /// is becomes a condition; that no other is added does not. Who must know that reads before this list an object that
    /// whoever adds one writes.
    pub fn list_below<T: StoredRecord>(&mut self, prefix: &str) -> Result<Vec<Object<T>>, StoreError> {
        let found = self.list_readable_below(prefix)?;
        match self.objects.set_aside_below(&key::<T>(prefix)).first() {
            None => Ok(found),
            Some(record) => Err(record.error()),
        }
    }

    /// The same of those that can be read, where others decide nothing.
    pub fn list_readable_below<T: StoredRecord>(
        &mut self,
        prefix: &str,
    ) -> Result<Vec<Object<T>>, StoreError> {
        let objects: Vec<Object<T>> = self.objects.list_below(prefix)?;
        let expects = objects.iter().map(|o| (key::<T>(&o.name), Expect::Unchanged(o.revision)));
        self.transaction.expects.extend(expects);
        Ok(objects)
    }

    /// Writes one, whether there is one or not.
    pub fn put<T: StoredRecord>(&mut self, name: &str, value: &T) {
        let value = serde_json::to_vec(value).expect("objects are plain data");
        self.change::<T>(name, Some(value));
    }

    /// There is to be none.
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

    /// Nothing is to be written after all.
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
