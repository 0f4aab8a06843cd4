//! Objects in the store: each kind under a prefix of its own, as JSON. Owns no object and decides nothing.
//!
//! Invariant: what is changed was looked at, and has not been changed since; else the change is decided anew.

use super::{Changed, Entry, Expect, Revision, Store, StoreError, Transaction};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::{Arc, PoisonError, RwLock};
use tokio::sync::broadcast;

/// A kind of object.
pub trait Kind: Serialize + DeserializeOwned {
    /// What its keys begin with, a slash at the end.
    const PREFIX: &'static str;
    /// What it is called when people are told of it.
    const WORD: &'static str;

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

/// Objects that are read together.
const PART: usize = 256;
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
}

impl Objects {
    /// Those of a store.
    pub fn new(store: Arc<dyn Store>) -> Objects {
        Objects { store, turn: Arc::default() }
    }

    /// Every transaction from now on.
    pub fn watch(&self) -> broadcast::Receiver<Changed> {
        self.store.watch()
    }

    /// One, if there is.
    pub fn get<T: Kind>(&self, name: &str) -> Result<Option<Object<T>>, StoreError> {
        self.store.get(&key::<T>(name))?.map(read).transpose()
    }

    /// All of a kind in the order of their names.
    pub fn list<T: Kind>(&self) -> Result<Vec<Object<T>>, StoreError> {
        self.list_below("")
    }

    /// All of a kind whose name begins so.
    pub fn list_below<T: Kind>(&self, prefix: &str) -> Result<Vec<Object<T>>, StoreError> {
        let (entries, _) = self.store.list(&key::<T>(prefix))?;
        entries.into_iter().map(read).collect()
    }

    /// The first of a kind whose names come after this one, `most` of them at most, in the order of their names. For the
    /// first page the name is empty.
    pub fn page<T: Kind>(&self, after: &str, most: usize) -> Result<Vec<Object<T>>, StoreError> {
        let entries = self.store.page(T::PREFIX, &key::<T>(after), most)?;
        entries.into_iter().map(read).collect()
    }

    /// Those of a kind whose names come after this one, in the order of their names. They are read some at a time, so that
    /// it does not matter how many there are; each is as it was when it was read.
    pub fn each_after<T: Kind>(
        &self,
        after: &str,
    ) -> impl Iterator<Item = Result<Object<T>, StoreError>> + use<'_, T> {
        let (mut after, mut read, mut is_last) = (after.to_owned(), Vec::new().into_iter(), false);
        std::iter::from_fn(move || {
            if read.len() == 0 && !is_last {
                match self.page::<T>(&after, PART) {
                    Ok(part) => {
                        is_last = part.len() < PART;
                        if let Some(last) = part.last() {
                            after.clone_from(&last.name);
                        }
                        read = part.into_iter();
                    }
                    Err(e) => {
                        is_last = true;
                        return Some(Err(e));
                    }
                }
            }
            read.next().map(Ok)
        })
    }

    /// How many of a kind there are.
    pub fn count<T: Kind>(&self) -> Result<u64, StoreError> {
        self.store.count(T::PREFIX)
    }

    /// Decides on changes by what is stored and makes them together. Decided anew, from the start, whenever somebody
    /// else has changed meanwhile what the decision looked at with [`Changes`]. A decision makes no other change itself.
    pub fn change<R, E: From<StoreError>>(
        &self,
        mut decide: impl FnMut(&mut Changes) -> Result<R, E>,
    ) -> Result<R, E> {
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
                Ok(()) => return Ok(result),
            }
        }
        Err(last.expect("one attempt was made at least").into())
    }
}

/// Changes that are to happen together, and what they were decided on.
pub struct Changes<'a> {
    objects: &'a Objects,
    transaction: Transaction,
}

impl Changes<'_> {
    fn new(objects: &Objects) -> Changes<'_> {
        Changes { objects, transaction: Transaction::default() }
    }

    /// One, if there is. That it is as it is becomes a condition.
    pub fn get<T: Kind>(&mut self, name: &str) -> Result<Option<Object<T>>, StoreError> {
        let object = self.objects.get(name)?;
        let expect = object.as_ref().map_or(Expect::Absent, |o: &Object<T>| Expect::Unchanged(o.revision));
        self.transaction.expects.push((key::<T>(name), expect));
        Ok(object)
    }

    /// All whose name begins so. That each of them is as it is becomes a condition; that no other is added does not. Who
    /// must know that reads before this list an object that whoever adds one writes.
    pub fn list_below<T: Kind>(&mut self, prefix: &str) -> Result<Vec<Object<T>>, StoreError> {
        let objects: Vec<Object<T>> = self.objects.list_below(prefix)?;
        let expects = objects.iter().map(|o| (key::<T>(&o.name), Expect::Unchanged(o.revision)));
        self.transaction.expects.extend(expects);
        Ok(objects)
    }

    /// Writes one, whether there is one or not.
    pub fn put<T: Kind>(&mut self, name: &str, value: &T) {
        let value = serde_json::to_vec(value).expect("objects are plain data");
        self.transaction.changes.push((key::<T>(name), Some(value)));
    }

    /// There is to be none.
    pub fn delete<T: Kind>(&mut self, name: &str) {
        self.transaction.changes.push((key::<T>(name), None));
    }

    /// Nothing is to be written after all.
    pub fn forget(&mut self) {
        self.transaction.changes.clear();
    }

    fn commit(self) -> Result<(), StoreError> {
        if self.transaction.changes.is_empty() {
            return Ok(());
        }
        self.objects.store.commit(&self.transaction).map(drop)
    }
}

fn key<T: Kind>(name: &str) -> String {
    format!("{}{name}", T::PREFIX)
}

fn read<T: Kind>(entry: Entry) -> Result<Object<T>, StoreError> {
    let name = entry.key[T::PREFIX.len()..].to_owned();
    match serde_json::from_slice::<T>(&entry.value) {
        Ok(mut value) => {
            value.written_by(entry.revision);
            Ok(Object { name, value, revision: entry.revision })
        }
        Err(source) => Err(StoreError::Damaged { key: entry.key, source }),
    }
}
