//! A simulated etcd: revisions, leases, a history that is compacted, and times without a leader.

use super::sample;
use spillway_fleet::transaction::{Comparison, Outcome, Revision, Transaction, Write};
use spillway_fleet::view::{Entry, Update};
use std::collections::BTreeMap;

pub type LeaseId = u64;

#[derive(Default)]
pub struct Store {
    pub entries: BTreeMap<String, Entry>,
    /// Keys that go with a lease.
    of_lease: BTreeMap<LeaseId, Vec<String>>,
    /// When leases end, in milliseconds of true time.
    leases: BTreeMap<LeaseId, u64>,
    last_lease: LeaseId,
    pub revision: Revision,
    compacted: Revision,
    history: BTreeMap<Revision, Vec<(String, Option<Entry>)>>,
    /// Until when there is no leader.
    pub leaderless_until: u64,
    /// Leaders that there were.
    pub leaders: u64,
    /// Writes of records, without leases.
    pub writes: u64,
}

/// Time of leases.
const TTL_MS: u64 = 15_000;

impl Store {
    pub fn has_leader(&self, now: u64) -> bool {
        now >= self.leaderless_until
    }

    /// The leader is lost. The next one either gives all leases their whole time again, or ends them together.
    pub fn lose_leader(&mut self, now: u64, for_ms: u64, ends_leases: bool) {
        self.leaderless_until = now + for_ms;
        self.leaders += 1;
        let end = now + for_ms + if ends_leases { 0 } else { TTL_MS };
        self.leases.values_mut().for_each(|expires| *expires = end);
    }

    pub fn tick(&mut self, now: u64) {
        if !self.has_leader(now) {
            return;
        }
        let ended: Vec<LeaseId> =
            self.leases.iter().filter(|(_, end)| **end <= now).map(|(id, _)| *id).collect();
        for id in ended {
            self.leases.remove(&id);
            let keys = self.of_lease.remove(&id).unwrap_or_default();
            let keys: Vec<String> = keys.into_iter().filter(|key| self.entries.contains_key(key)).collect();
            if !keys.is_empty() {
                self.revision += 1;
                keys.iter().for_each(|key| self.write(key, None));
            }
        }
    }

    pub fn grant(&mut self, now: u64) -> LeaseId {
        self.last_lease += 1;
        self.leases.insert(self.last_lease, now + TTL_MS);
        self.last_lease
    }

    /// Renews a lease. Whether it is still there.
    pub fn renew(&mut self, id: LeaseId, now: u64) -> bool {
        let Some(expires) = self.leases.get_mut(&id) else { return false };
        *expires = now + TTL_MS;
        true
    }

    fn write(&mut self, key: &str, value: Option<Vec<u8>>) {
        let entry = value.map(|value| {
            let created = self.entries.get(key).map_or(self.revision, |entry| entry.created);
            Entry { value, created, modified: self.revision }
        });
        match &entry {
            Some(entry) => drop(self.entries.insert(key.to_owned(), entry.clone())),
            None => drop(self.entries.remove(key)),
        }
        self.history.entry(self.revision).or_default().push((key.to_owned(), entry));
        self.writes += 1;
    }

    pub fn put(&mut self, key: &str, value: &str) {
        self.revision += 1;
        self.write(key, Some(value.as_bytes().to_vec()));
    }

    fn holds(&self, comparison: &Comparison) -> bool {
        match comparison {
            Comparison::Created(key, at) => {
                self.entries.get(&key.to_string()).map_or(0, |entry| entry.created) == *at
            }
            Comparison::Modified(key, at) => {
                self.entries.get(&key.to_string()).map_or(0, |entry| entry.modified) == *at
            }
        }
    }

    /// Carries out a transaction. None: it has no leader, or the lease has ended.
    pub fn commit(&mut self, transaction: &Transaction, lease: Option<LeaseId>, now: u64) -> Option<Outcome> {
        sample::check(transaction);
        if !self.has_leader(now) {
            return None;
        }
        if !transaction.comparisons.iter().all(|comparison| self.holds(comparison)) {
            return Some(Outcome::Conflict);
        }
        let leased = transaction.writes.iter().any(|write| matches!(write, Write::PutWithLease(..)));
        let lease = lease.filter(|id| self.leases.contains_key(id));
        if leased && lease.is_none() {
            return None;
        }
        self.revision += 1;
        for write in &transaction.writes {
            match write {
                Write::Put(key, value) => self.write(&key.to_string(), Some(value.clone())),
                Write::PutWithLease(key, value) => {
                    let key = key.to_string();
                    self.write(&key, Some(value.clone()));
                    self.of_lease.entry(lease?).or_default().push(key);
                }
                Write::Delete(key) => {
                    let key = key.to_string();
                    if self.entries.contains_key(&key) {
                        self.write(&key, None);
                    }
                }
            }
        }
        Some(Outcome::Applied(self.revision))
    }

    /// Deletes a record, as the end of its lease does.
    pub fn revoke(&mut self, key: &spillway_fleet::keys::Key) {
        let key = key.to_string();
        if self.entries.contains_key(&key) {
            self.revision += 1;
            self.write(&key, None);
        }
    }

    pub fn compact(&mut self) {
        self.compacted = self.revision;
        self.history.clear();
    }

    /// What a watch from after a revision tells up to another one: the changes, or all where those are gone.
    pub fn since(&self, seen: Revision, up_to: Revision) -> Option<Update> {
        if seen == 0 || seen < self.compacted {
            let all = self.entries.iter().map(|(key, entry)| (key.clone(), entry.clone()));
            return Some(Update::Whole(self.revision, all.collect()));
        }
        if up_to <= seen {
            return None;
        }
        let changes = self.history.range(seen + 1..=up_to).flat_map(|(_, changes)| changes.clone());
        let changes: Vec<_> = changes.collect();
        (!changes.is_empty()).then_some(Update::Changes(up_to, changes))
    }
}
