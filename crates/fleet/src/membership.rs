//! How a host takes part in a fleet: what it writes about itself, and when it may not.
//!
//! Owns the rules for its records `hosts/HOST` and `alive/HOST`. Invariant: a host never takes a name that another one has, nor the epoch of
//! another boot, and a daemon whose name another daemon has taken steps aside until it is started again.

use crate::Moment;
use crate::keys::Key;
use crate::liveness::LEASE_MS;
use crate::records::{AliveRecord, DoorRecord, FORMAT, HostRecord, MetaRecord};
use crate::transaction::{Comparison, Revision, Transaction, Write};
use crate::view::{FleetView, Versioned};
use serde::Serialize;
use spillway_api::Name;
use std::collections::BTreeMap;

/// Time after which the record of an earlier boot of this host has gone with its lease; a record that is still there is renewed by another host.
const OTHER_BOOT_MS: u64 = LEASE_MS + 5_000;

/// Whether a host may act on these records: they are those of the fleet that it has joined, in a format that it knows, and have the host with
/// this identity as a member.
pub fn takes_part(view: &FleetView, fleet_id: &str, host: &Name, host_id: &str) -> bool {
    let is_fleet = |meta: &MetaRecord| meta.format == FORMAT && meta.fleet_id == fleet_id;
    view.meta.as_ref().is_some_and(|meta| is_fleet(&meta.value))
        && view.hosts.get(host).is_some_and(|record| record.value.host_id == host_id)
}

/// Whether these records can be those of the fleet with the identity `joined` that a host is in, or of any fleet if it is in none: if not, it
/// neither acts on them nor changes them for anybody.
///
/// # Errors
/// They cannot, for this reason.
pub fn check_records(view: &FleetView, joined: Option<&str>) -> Result<(), String> {
    let Some(meta) = view.meta.as_ref().map(|meta| &meta.value) else {
        return match (view.unreadable.get(&Key::Meta.to_string()), joined) {
            (Some(why), _) => {
                Err(format!("the record of the fleet cannot be read ({why}): a later version may have written it"))
            }
            (None, Some(_)) => Err(
                "the records of the fleet are gone from etcd, and the machines stay as they are: restore a backup of etcd. If there is none, \
                 'spillwayd leave-fleet' on each host comes before another fleet"
                    .into(),
            ),
            (None, None) => Ok(()),
        };
    };
    if meta.format != FORMAT {
        return Err(format!(
            "the records of the fleet have format {}, and this spillwayd knows {FORMAT}: use the same version on all hosts",
            meta.format
        ));
    }
    match joined {
        Some(joined) if joined != meta.fleet_id => Err(format!(
            "this host is in the fleet with the identity {joined}, and etcd has another one of the same name ({}): give the right --fleet, or \
             end the earlier membership with 'spillwayd leave-fleet'",
            meta.fleet_id
        )),
        _ => Ok(()),
    }
}

/// What a host says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnHost {
    /// Name of the host.
    pub name: Name,
    /// Identity of the host, which it keeps.
    pub host_id: String,
    /// Zone of the host.
    pub zone: Name,
    /// Labels of the host.
    pub labels: BTreeMap<Name, String>,
    /// What it writes while it has a lease.
    pub alive: AliveRecord,
}

/// The lease of a host, as far as it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownLease {
    /// Its identity in etcd.
    pub id: i64,
    /// Moment until which the lease certainly lasts.
    pub until: Moment,
}

/// State of the membership.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The records were not read yet.
    Connecting,
    /// There is no fleet of this name.
    NoFleet,
    /// The host has no lease, or has not written its records yet.
    Joining,
    /// It is a member, with this epoch.
    Member {
        /// Revision that created its record `alive/HOST`.
        epoch: Revision,
    },
    /// It had a lease, and cannot renew it.
    Isolated,
    /// It may not take part, for this reason.
    Refused(String),
}

/// The membership of a host in a fleet.
#[derive(Debug)]
pub struct HostMembership {
    own: OwnHost,
    /// Identity of the fleet that the host has joined; none before.
    fleet_id: Option<String>,
    /// Whether this process has written its record `alive/HOST`, and seen that.
    was_alive: bool,
    /// Whether the record `hosts/HOST` was there since this process began.
    was_recorded: bool,
    /// Boot of another host, or of this one before, whose record `alive/HOST` is there, and when it was first seen.
    other_boot: Option<(String, Moment)>,
    /// Why the host holds still, if it does: etcd has older records than it has acted on.
    held: Option<String>,
}

impl HostMembership {
    /// Creates the membership of a host that has joined the fleet with this identity, or none.
    pub fn new(own: OwnHost, fleet_id: Option<String>) -> HostMembership {
        HostMembership { own, fleet_id, was_alive: false, was_recorded: false, other_boot: None, held: None }
    }

    /// Keeps the host from taking part, for this reason, until its daemon is started again.
    pub fn hold(&mut self, why: String) {
        self.held = Some(why);
    }

    /// What the host says about itself.
    pub fn own(&self) -> &OwnHost {
        &self.own
    }

    /// Identity of the fleet that the host has joined.
    pub fn fleet_id(&self) -> Option<&str> {
        self.fleet_id.as_deref()
    }

    /// Returns the standing of the host, and what it has to write for that.
    pub fn step(
        &mut self,
        view: &FleetView,
        lease: Option<KnownLease>,
        now: Moment,
    ) -> (Standing, Option<Transaction>) {
        let refused = |why: String| (Standing::Refused(why), None);
        if view.revision == 0 {
            return (Standing::Connecting, None);
        }
        if let Err(why) = check_records(view, self.fleet_id.as_deref()) {
            return refused(why);
        }
        let Some(meta) = &view.meta else {
            // The next fleet of this name has not removed it.
            self.was_recorded = false;
            return (Standing::NoFleet, None);
        };
        if let Some(why) = &self.held {
            return refused(why.clone());
        }
        let missing = if self.was_alive { Standing::Isolated } else { Standing::Joining };
        let Some(lease) = lease.filter(|lease| now < lease.until) else { return (missing, None) };
        let change = match self.record(view) {
            Ok(change) => change,
            Err(why) => return refused(why),
        };
        // Who has no right to the name writes nothing about it.
        match self.check_alive(view, now) {
            Err(why) => return refused(why),
            Ok(false) => return (missing, None),
            Ok(true) => {}
        }
        if change.is_some() {
            return (missing, change);
        }
        let (standing, change) = self.announce(view, lease, missing);
        if matches!(standing, Standing::Member { .. }) {
            self.fleet_id = Some(meta.value.fleet_id.clone());
        }
        (standing, change)
    }

    /// Writes the record `alive/HOST`, unless it is there as it should be.
    fn announce(
        &mut self,
        view: &FleetView,
        lease: KnownLease,
        missing: Standing,
    ) -> (Standing, Option<Transaction>) {
        let (alive, host) = (Key::Alive(self.own.name.clone()), Key::Host(self.own.name.clone()));
        let record = AliveRecord { lease: lease.id, ..self.own.alive.clone() };
        let found = view.alive.get(&self.own.name);
        if let Some(found) = found.filter(|found| found.value.instance == record.instance) {
            self.was_alive = true;
            if found.value.lease == lease.id {
                return (Standing::Member { epoch: found.created }, None);
            }
        }
        // The key of a daemon that was started again keeps its epoch, and gets the lease of this process: it goes when an earlier lease
        // ends, whatever becomes of this one.
        let before = match found {
            Some(found) => Comparison::Modified(alive.clone(), found.modified),
            None => Comparison::Created(alive.clone(), 0),
        };
        let recorded = view.hosts.get(&self.own.name).map_or(0, |record| record.modified);
        let transaction = Transaction {
            comparisons: vec![Comparison::Modified(host, recorded), before],
            writes: vec![Write::PutWithLease(alive, json(&record))],
        };
        (missing, Some(transaction))
    }

    /// Whether this daemon may write `alive/HOST` now; not while the record of another boot is there.
    fn check_alive(&mut self, view: &FleetView, now: Moment) -> Result<bool, String> {
        let key = Key::Alive(self.own.name.clone()).to_string();
        if view.unreadable.contains_key(&key) {
            return Err(format!("the record {key} cannot be read: a later version may have written it"));
        }
        let own = &self.own.alive;
        let found = view.alive.get(&self.own.name).map(|found| &found.value);
        let Some(found) = found.filter(|found| found.instance != own.instance) else {
            self.other_boot = None;
            return Ok(true);
        };
        if self.was_alive {
            return Err(format!(
                "another daemon has taken the name {} of this host (at {}, version {}): one of them must go. Start this one again to take the name back",
                self.own.name, found.address, found.version
            ));
        }
        if found.boot_id == own.boot_id {
            self.other_boot = None;
            return Ok(true);
        }
        let other = self.other_boot.take().filter(|(boot, _)| *boot == found.boot_id);
        let (boot, since) = other.unwrap_or_else(|| (found.boot_id.clone(), now));
        self.other_boot = Some((boot, since));
        if now.since_ms(since) < OTHER_BOOT_MS {
            return Ok(false);
        }
        Err(format!(
            "another host runs with the identity of this one ({}): it is at {}, and has records of its own (boot and file {}; those of this host \
             are {}). If one of them was cloned from the other, stop its daemon, and start it with a state folder of its own",
            self.own.name, found.address, found.boot_id, own.boot_id
        ))
    }

    /// Returns the change of the record `hosts/HOST` that is missing.
    fn record(&mut self, view: &FleetView) -> Result<Option<Transaction>, String> {
        let OwnHost { name, host_id, zone, labels, alive } = &self.own;
        let door = DoorRecord { address: alive.address.clone(), certificate: alive.certificate.clone() };
        let key = Key::Host(name.clone());
        let found = view.hosts.get(name);
        if found.is_none() && view.unreadable.contains_key(&key.to_string()) {
            return Err(format!("the record {key} cannot be read: a later version may have written it"));
        }
        let put = |record: &HostRecord, modified| Transaction {
            comparisons: vec![Comparison::Modified(key.clone(), modified)],
            writes: vec![Write::Put(key.clone(), json(record))],
        };
        let Some(Versioned { value, modified, .. }) = found else {
            if self.was_recorded {
                return Err(format!(
                    "the host {name} was removed from the fleet. To join again, start spillwayd again"
                ));
            }
            let record = HostRecord {
                host_id: host_id.clone(),
                zone: zone.clone(),
                labels: labels.clone(),
                is_cordoned: false,
                is_draining: false,
                dead_epoch: None,
                door: Some(door),
            };
            return Ok(Some(put(&record, 0)));
        };
        if value.host_id != *host_id {
            return Err(format!(
                "the fleet has another host with the name {name}: give this one another ('--host-name'), or remove the other \
                 ('spillway fleet host remove {name}')"
            ));
        }
        self.was_recorded = true;
        let record =
            HostRecord { zone: zone.clone(), labels: labels.clone(), door: Some(door), ..value.clone() };
        if record == *value {
            return Ok(None);
        }
        Ok(Some(put(&record, *modified)))
    }
}

fn json(record: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(record).expect("a record is plain data")
}

#[cfg(test)]
mod tests;
