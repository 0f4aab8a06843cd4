//! The records of a fleet as a host sees them. Owns the copies, with the revisions that wrote them.
//!
//! Invariant: a view is the records at one revision. Records that cannot be read are set aside: nothing acts on them, and none counts as
//! absent.

use crate::boot::BootRecord;
use crate::keys::{ImageDigest, Key};
use crate::records::{
    AliveRecord, CatalogRecord, HostRecord, ImageRecord, MetaRecord, NamedRecord, PlaceRecord, PlacerRecord,
    RegistryRecord, RolloutRecord, ShareRecord, StatusRecord,
};
use crate::transaction::Revision;
use serde::de::DeserializeOwned;
use spillway_api::Name;
use std::collections::BTreeMap;

/// A record, and when it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Versioned<T> {
    /// The record.
    pub value: T,
    /// Revision that created its key.
    pub created: Revision,
    /// Revision that last wrote it.
    pub modified: Revision,
}

/// An entry of the store: a record before it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Bytes of the record.
    pub value: Vec<u8>,
    /// Revision that created its key.
    pub created: Revision,
    /// Revision that last wrote it.
    pub modified: Revision,
}

/// What a watch of the records tells. Keys are without the prefix of the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    /// All records at this revision: what is not here is not there.
    Whole(Revision, Vec<(String, Entry)>),
    /// What has changed up to this revision. None: the record was deleted.
    Changes(Revision, Vec<(String, Option<Entry>)>),
}

/// Shares of a host, by catalog.
pub type Shares = BTreeMap<Name, Versioned<ShareRecord>>;

/// Machines with names of the fleet that a host is to have, by catalog and machine.
pub type Places = BTreeMap<(Name, Name), Versioned<PlaceRecord>>;

/// The records of a fleet at a revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetView {
    /// Revision of the records; 0: none were read yet.
    pub revision: Revision,
    /// What all hosts must understand.
    pub meta: Option<Versioned<MetaRecord>>,
    /// Hosts.
    pub hosts: BTreeMap<Name, Versioned<HostRecord>>,
    /// Hosts that renew their leases.
    pub alive: BTreeMap<Name, Versioned<AliveRecord>>,
    /// What hosts have reported.
    pub statuses: BTreeMap<Name, Versioned<StatusRecord>>,
    /// Catalogs.
    pub catalogs: BTreeMap<Name, Versioned<CatalogRecord>>,
    /// Shares, by host and catalog.
    pub shares: BTreeMap<Name, Shares>,
    /// Rollouts, by catalog.
    pub rollouts: BTreeMap<Name, Versioned<RolloutRecord>>,
    /// Machines with names of the fleet, by catalog and machine.
    pub named: BTreeMap<Name, BTreeMap<Name, Versioned<NamedRecord>>>,
    /// Machines with names of the fleet that hosts are to have, by host.
    pub places: BTreeMap<Name, Places>,
    /// Versions of images.
    pub images: BTreeMap<(Name, u32), Versioned<ImageRecord>>,
    /// Registries.
    pub registries: BTreeMap<Name, Versioned<RegistryRecord>>,
    /// Boot sets, by digest of the image and catalog.
    pub boots: BTreeMap<(ImageDigest, Name), Versioned<BootRecord>>,
    /// Who places.
    pub placer: Option<Versioned<PlacerRecord>>,
    /// Keys of records that cannot be read, with the reasons.
    pub unreadable: BTreeMap<String, String>,
    /// Revision at which all records were last listed.
    pub listed: Revision,
    /// Hosts whose leases have ended since then, and that have none now, with the revision at which that was seen.
    pub ended: BTreeMap<Name, Revision>,
}

/// The end of a host's lease, as far as it was seen. If it is another one at the next look, the host may have had a lease meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseEnd {
    listed: Revision,
    ended: Option<Revision>,
}

impl FleetView {
    /// Takes an update. One that is older than the view is ignored.
    pub fn apply(&mut self, update: Update) {
        match update {
            Update::Whole(revision, entries) => {
                *self = FleetView { revision, listed: revision, ..FleetView::default() };
                entries.into_iter().for_each(|(key, entry)| self.set(&key, Some(entry)));
            }
            Update::Changes(revision, changes) if revision >= self.revision => {
                self.revision = revision;
                changes.into_iter().for_each(|(key, entry)| self.set(&key, entry));
            }
            Update::Changes(..) => {}
        }
    }

    /// Whether a host has a record, be it one that cannot be read.
    pub fn has_host(&self, host: &Name) -> bool {
        self.hosts.contains_key(host) || self.unreadable.contains_key(&Key::Host(host.clone()).to_string())
    }

    /// The share of a host of a catalog, if there is one.
    pub fn share(&self, host: &Name, catalog: &Name) -> Option<&Versioned<ShareRecord>> {
        self.shares.get(host)?.get(catalog)
    }

    /// A machine with a name of the fleet, if it has a record.
    pub fn name(&self, catalog: &Name, machine: &Name) -> Option<&Versioned<NamedRecord>> {
        self.named.get(catalog)?.get(machine)
    }

    /// What a host is told about a machine with a name of the fleet.
    pub fn place(&self, host: &Name, catalog: &Name, machine: &Name) -> Option<&Versioned<PlaceRecord>> {
        self.places.get(host)?.get(&(catalog.clone(), machine.clone()))
    }

    /// When the last lease of a host that has none has ended.
    pub fn lease_end(&self, host: &Name) -> LeaseEnd {
        LeaseEnd { listed: self.listed, ended: self.ended.get(host).copied() }
    }

    fn set(&mut self, text: &str, entry: Option<Entry>) {
        self.unreadable.remove(text);
        let Ok(key) = text.parse::<Key>() else {
            if entry.is_some() {
                self.unreadable.insert(text.to_owned(), "its key is of no kind that is known here".into());
            }
            return;
        };
        let done = match key {
            Key::Meta => set_one(&mut self.meta, entry),
            Key::Placer => set_one(&mut self.placer, entry),
            Key::Host(host) => set_in(&mut self.hosts, host, entry),
            Key::Alive(host) => {
                match entry {
                    Some(_) => self.ended.remove(&host),
                    None => self.ended.insert(host.clone(), self.revision),
                };
                set_in(&mut self.alive, host, entry)
            }
            Key::Status(host) => set_in(&mut self.statuses, host, entry),
            Key::Catalog(catalog) => set_in(&mut self.catalogs, catalog, entry),
            Key::Rollout(catalog) => set_in(&mut self.rollouts, catalog, entry),
            Key::Image(image, version) => set_in(&mut self.images, (image, version), entry),
            Key::Registry(registry) => set_in(&mut self.registries, registry, entry),
            Key::Boot(digest, catalog) => set_in(&mut self.boots, (digest, catalog), entry),
            Key::Share(host, catalog) => set_below(&mut self.shares, host, catalog, entry),
            Key::Named(catalog, machine) => set_below(&mut self.named, catalog, machine, entry),
            Key::Place(host, catalog, machine) => {
                set_below(&mut self.places, host, (catalog, machine), entry)
            }
        };
        if let Err(why) = done {
            self.unreadable.insert(text.to_owned(), why.to_string());
        }
    }
}

fn read<T: DeserializeOwned>(entry: Entry) -> Result<Versioned<T>, serde_json::Error> {
    let Entry { value, created, modified } = entry;
    serde_json::from_slice(&value).map(|value| Versioned { value, created, modified })
}

fn set_one<T: DeserializeOwned>(
    place: &mut Option<Versioned<T>>,
    entry: Option<Entry>,
) -> Result<(), serde_json::Error> {
    *place = None;
    *place = entry.map(read).transpose()?;
    Ok(())
}

/// The same, in a map of maps of which none is empty.
fn set_below<K: Ord, T: DeserializeOwned>(
    all: &mut BTreeMap<Name, BTreeMap<K, Versioned<T>>>,
    folder: Name,
    key: K,
    entry: Option<Entry>,
) -> Result<(), serde_json::Error> {
    let records = all.entry(folder.clone()).or_default();
    let done = set_in(records, key, entry);
    if records.is_empty() {
        all.remove(&folder);
    }
    done
}

fn set_in<K: Ord, T: DeserializeOwned>(
    records: &mut BTreeMap<K, Versioned<T>>,
    key: K,
    entry: Option<Entry>,
) -> Result<(), serde_json::Error> {
    let record = entry.map(read).transpose();
    match record {
        Ok(Some(record)) => drop(records.insert(key, record)),
        Ok(None) => drop(records.remove(&key)),
        Err(why) => {
            records.remove(&key);
            return Err(why);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(value: &str, created: Revision, modified: Revision) -> Entry {
        Entry { value: value.as_bytes().to_vec(), created, modified }
    }

    #[test]
    fn a_view_follows_the_records() {
        let share = r#"{"count": 5, "version": 3, "generation": 1}"#;
        let placer = r#"{"host": "a", "instance": "x"}"#;
        let mut view = FleetView::default();
        let key = |text: &str| text.to_owned();
        let all =
            vec![(key("share/a/desk"), entry(share, 4, 7)), (key("leader/placer"), entry(placer, 5, 5))];
        view.apply(Update::Whole(7, all.clone()));
        let (a, desk): (Name, Name) = ("a".parse().unwrap(), "desk".parse().unwrap());
        let found = view.share(&a, &desk).unwrap();
        assert_eq!((found.value.count, found.created, found.modified), (5, 4, 7));
        assert_eq!(view.placer.as_ref().map(|placer| placer.created), Some(5));
        // What is older than the view tells nothing.
        let before = view.clone();
        view.apply(Update::Changes(6, vec![(key("share/a/desk"), None)]));
        assert_eq!(view, before);
        view.apply(Update::Changes(9, vec![(key("share/a/desk"), None), (key("leader/placer"), None)]));
        assert_eq!(view, FleetView { revision: 9, listed: 7, ..FleetView::default() });
        view.apply(Update::Whole(7, all));
        assert_eq!(
            view, before,
            "a list counts, whatever was known before: the store may have been restored"
        );
    }

    #[test]
    fn what_cannot_be_read_is_set_aside() {
        let mut view = FleetView::default();
        let changes = [("hosts/a", "{"), ("alive/a", "{}"), ("cats/x", "1"), ("share/a/desk", "[]")];
        let changes = changes.map(|(key, value)| (key.to_owned(), Some(entry(value, 1, 1))));
        view.apply(Update::Changes(1, changes.to_vec()));
        let keys: Vec<_> = view.unreadable.keys().map(String::as_str).collect();
        assert_eq!(keys, ["alive/a", "cats/x", "hosts/a", "share/a/desk"]);
        assert!(view.hosts.is_empty() && view.shares.is_empty());
        view.apply(Update::Changes(2, changes.map(|(key, _)| (key, None)).to_vec()));
        let ended = BTreeMap::from([("a".parse().unwrap(), 2)]);
        assert_eq!(view, FleetView { revision: 2, ended, ..FleetView::default() });
    }
}
