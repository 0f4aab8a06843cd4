//! An etcd of one revision after the other, with leases and a log of what each revision has changed.

use spillway_fleet::transaction::{Comparison, Outcome, Revision, Transaction, Write};
use spillway_fleet::view::{Entry, Update};
use std::collections::BTreeMap;

/// Time of a lease, on etcd's clock.
const LEASE_MS: f64 = 15_000.0;

pub struct Store {
    entries: BTreeMap<String, (Entry, i64)>,
    pub revision: Revision,
    /// Moments of true time at which leases end.
    leases: BTreeMap<i64, u64>,
    last_lease: i64,
    /// How fast etcd's clock goes.
    rate: f64,
    /// Changes, with the moment of true time at which they were made.
    log: Vec<(u64, Update)>,
}

impl Store {
    pub fn new(rate: f64) -> Store {
        let (entries, leases) = (BTreeMap::new(), BTreeMap::new());
        Store { entries, revision: 0, leases, last_lease: 0, rate, log: Vec::new() }
    }

    fn lease_ends(&self, now: u64) -> u64 {
        now + (LEASE_MS / self.rate) as u64
    }

    pub fn grant(&mut self, now: u64) -> i64 {
        self.last_lease += 1;
        self.leases.insert(self.last_lease, self.lease_ends(now));
        self.last_lease
    }

    /// Renews a lease. Whether there is one.
    pub fn renew(&mut self, id: i64, now: u64) -> bool {
        let ends = self.lease_ends(now);
        self.leases.get_mut(&id).map(|lease| *lease = ends).is_some()
    }

    /// Ends the leases whose time is over.
    pub fn tick(&mut self, now: u64) {
        while let Some(id) = self.leases.iter().find(|(_, ends)| **ends <= now).map(|(id, _)| *id) {
            self.end_lease(id, now);
        }
    }

    pub fn end_lease(&mut self, id: i64, now: u64) {
        self.leases.remove(&id);
        let keys = self.entries.iter().filter(|(_, (_, lease))| *lease == id).map(|(key, _)| key.clone());
        let keys: Vec<String> = keys.collect();
        if !keys.is_empty() {
            self.revision += 1;
            let changes = keys.iter().map(|key| (key.clone(), None)).collect();
            keys.iter().for_each(|key| drop(self.entries.remove(key)));
            self.log.push((now, Update::Changes(self.revision, changes)));
        }
    }

    pub fn lease_of(&self, key: &str) -> Option<i64> {
        self.entries.get(key).map(|(_, lease)| *lease)
    }

    /// Carries out a transaction; none: etcd refuses it, since its lease is gone.
    pub fn commit(&mut self, transaction: &Transaction, lease: i64, now: u64) -> Option<Outcome> {
        let holds = |comparison: &Comparison| {
            let of = |key: &str, field: fn(&Entry) -> Revision| {
                self.entries.get(key).map_or(0, |(entry, _)| field(entry))
            };
            match comparison {
                Comparison::Created(key, at) => of(&key.to_string(), |entry| entry.created) == *at,
                Comparison::Modified(key, at) => of(&key.to_string(), |entry| entry.modified) == *at,
            }
        };
        if !transaction.comparisons.iter().all(holds) {
            return Some(Outcome::Conflict);
        }
        let needs_lease = transaction.writes.iter().any(|write| matches!(write, Write::PutWithLease(..)));
        if needs_lease && !self.leases.contains_key(&lease) {
            return None;
        }
        self.revision += 1;
        let mut changes = Vec::new();
        for write in &transaction.writes {
            let (key, value, lease) = match write {
                Write::Put(key, value) => (key, Some(value), 0),
                Write::PutWithLease(key, value) => (key, Some(value), lease),
                Write::Delete(key) => (key, None, 0),
            };
            let key = key.to_string();
            let entry = value.map(|value| {
                let created = self.entries.get(&key).map_or(self.revision, |(entry, _)| entry.created);
                Entry { value: value.clone(), created, modified: self.revision }
            });
            match &entry {
                Some(entry) => drop(self.entries.insert(key.clone(), (entry.clone(), lease))),
                None => drop(self.entries.remove(&key)),
            }
            changes.push((key, entry));
        }
        self.log.push((now, Update::Changes(self.revision, changes)));
        Some(Outcome::Applied(self.revision))
    }

    /// The next change of the log, if it was made by this moment.
    pub fn change(&self, number: usize, made_by: u64) -> Option<&Update> {
        self.log.get(number).filter(|(at, _)| *at <= made_by).map(|(_, update)| update)
    }
}
