//! The election of the placer: whether this host tries for it, and whether it is the placer.
//!
//! Owns both rules. It never knows whether a lease holds: the caller, which has the clock of its requests, says so.
//!
//! Invariant: the key of the placer is only ever created. A placer that has lost it writes nothing, since each of its transactions
//! compares the revision that created the key.

use crate::keys::Key;
use crate::records::{FORMAT, PlacerRecord};
use crate::transaction::{Comparison, Revision, Transaction, Write};
use crate::view::FleetView;
use spillway_api::Name;

/// A daemon, as the records name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Host of the daemon.
    pub host: Name,
    /// Identity of its process.
    pub instance: String,
}

/// Whether Spillway places the machines of this fleet, in a format that this program knows.
pub fn places(view: &FleetView) -> bool {
    view.meta.as_ref().is_some_and(|meta| meta.value.placer && meta.value.format == FORMAT)
}

/// The transaction by which this daemon becomes the placer; none if there is a placer, or if this daemon must not be it.
///
/// `lease_holds` says whether the lease of this host was renewed so lately that it cannot have ended.
pub fn candidacy(view: &FleetView, own: &Identity, lease_holds: bool) -> Option<Transaction> {
    let is_free = view.placer.is_none() && !view.unreadable.contains_key(&Key::Placer.to_string());
    let alive = view.alive.get(&own.host).filter(|alive| alive.value.instance == own.instance)?;
    if !lease_holds || !is_free || !places(view) {
        return None;
    }
    let meta = view.meta.as_ref()?.modified;
    let record = PlacerRecord { host: own.host.clone(), instance: own.instance.clone() };
    let bytes = serde_json::to_vec(&record).expect("a record of two texts is JSON");
    Some(Transaction {
        comparisons: vec![
            Comparison::Created(Key::Placer, 0),
            Comparison::Created(Key::Alive(own.host.clone()), alive.created),
            Comparison::Modified(Key::Meta, meta),
        ],
        writes: vec![Write::PutWithLease(Key::Placer, bytes)],
    })
}

/// The term of this daemon as the placer; none if it is not the placer.
pub fn term(view: &FleetView, own: &Identity) -> Option<Revision> {
    let placer = view.placer.as_ref()?;
    let is_own = placer.value.host == own.host && placer.value.instance == own.instance;
    (is_own && places(view)).then_some(placer.created)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Fleet, identity, name};

    fn fleet() -> Fleet {
        let mut fleet = Fleet::new();
        fleet.host("a", "z");
        fleet
    }

    #[test]
    fn a_host_with_a_lease_tries_for_a_key_that_is_not_there() {
        let fleet = fleet();
        let own = identity("a");
        let transaction = candidacy(fleet.view(), &own, true).unwrap();
        let epoch = fleet.view().alive[&name("a")].created;
        assert_eq!(
            transaction.comparisons,
            [
                Comparison::Created(Key::Placer, 0),
                Comparison::Created(Key::Alive(name("a")), epoch),
                Comparison::Modified(Key::Meta, 1),
            ]
        );
        let [Write::PutWithLease(Key::Placer, bytes)] = &transaction.writes[..] else { panic!() };
        let record: PlacerRecord = serde_json::from_slice(bytes).unwrap();
        assert_eq!((record.host, record.instance), (own.host, own.instance));
    }

    #[test]
    fn a_host_without_a_lease_of_its_own_does_not_try() {
        let mut fleet = fleet();
        let own = identity("a");
        assert!(candidacy(fleet.view(), &own, false).is_none(), "its lease may have ended");
        let other = Identity { instance: "another process".into(), ..own.clone() };
        assert!(candidacy(fleet.view(), &other, true).is_none(), "the name of the host is another's");
        fleet.end_lease("a");
        assert!(candidacy(fleet.view(), &own, true).is_none());
    }

    #[test]
    fn nobody_tries_where_there_is_a_placer_or_none_is_wanted() {
        let own = identity("a");
        let mut placed = fleet();
        placed.placer("b");
        assert!(candidacy(placed.view(), &own, true).is_none());
        let mut broken = fleet();
        broken.put("leader/placer", "{");
        assert!(candidacy(broken.view(), &own, true).is_none(), "a key that cannot be read is there");
        for meta in [r#""format": 1, "placer": false"#, r#""format": 2, "placer": true"#] {
            let mut fleet = fleet();
            fleet.put("meta", &format!(r#"{{{meta}, "fleet_id": "x", "created": "2026-01-01T00:00:00Z"}}"#));
            assert!(candidacy(fleet.view(), &own, true).is_none(), "{meta}");
            fleet.placer("a");
            assert_eq!(term(fleet.view(), &own), None, "{meta}");
        }
    }

    #[test]
    fn the_term_is_the_revision_that_created_the_key() {
        let mut fleet = fleet();
        assert_eq!(term(fleet.view(), &identity("a")), None);
        let created = fleet.placer("a");
        assert_eq!(term(fleet.view(), &identity("a")), Some(created));
        assert_eq!(term(fleet.view(), &identity("b")), None);
        let other = Identity { instance: "another process".into(), ..identity("a") };
        assert_eq!(term(fleet.view(), &other), None);
    }
}
