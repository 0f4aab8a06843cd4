//! The hosts of the fleet, as etcd has listed them last. Owns the list; never asks etcd itself.
//!
//! Invariant: a certificate belongs to one host. The list stays as it is while nobody replaces it, so that hosts know each other while
//! etcd is away.

use super::identity::CertificateDigest;
use spillway_api::{Name, nearest};
use spillway_fleet::records::{AliveRecord, DoorRecord};
use spillway_fleet::view::FleetView;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

/// Longest address of a host, in bytes.
const MOST_ADDRESS_BYTES: usize = 300;

/// A host of the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Address of its daemon for other hosts, `HOST:PORT`.
    pub address: String,
    /// Digest of the certificate that it shows.
    pub certificate: CertificateDigest,
    /// Revision of etcd that created its record `alive/HOST`; 0 if this daemon has never seen that.
    pub epoch: i64,
    /// Address at which it sends chunks of streamed images, `HOST:PORT`; none: it sends none.
    pub peers: Option<String>,
}

/// Whether an address is `HOST:PORT` that can be part of a URL and of a log.
fn is_address(address: &str) -> bool {
    let has_port = address
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port != 0));
    has_port && address.bytes().all(|byte| byte.is_ascii_graphic()) && address.len() <= MOST_ADDRESS_BYTES
}

impl Member {
    /// Reads the record of a host.
    ///
    /// # Errors
    /// What is wrong with the record.
    pub fn of(record: &AliveRecord, epoch: i64) -> Result<Member, String> {
        let address = record.address.clone();
        if !is_address(&address) {
            return Err("its address is not HOST:PORT".into());
        }
        let certificate = record.certificate.parse().map_err(|e| format!("{e}"))?;
        let peers = record.peers.clone().filter(|address| is_address(address));
        Ok(Member { address, certificate, epoch, peers })
    }

    /// Reads where a host was last, of which there is no record `alive/HOST`.
    fn last(record: &DoorRecord) -> Option<Member> {
        let certificate = record.certificate.parse().ok()?;
        let address = record.address.clone();
        is_address(&address).then_some(Member { address, certificate, epoch: 0, peers: None })
    }
}

/// All hosts of the fleet. A clone is the same list.
#[derive(Clone, Debug, Default)]
pub struct Members(Arc<RwLock<MemberTable>>);

#[derive(Debug, Default)]
struct MemberTable {
    by_name: BTreeMap<Name, Member>,
    by_certificate: BTreeMap<CertificateDigest, Name>,
}

impl Members {
    /// Replaces the list. Who is missing in the new one is refused from its next request on. If two hosts have one certificate, it
    /// belongs to the one that has come last.
    pub fn replace(&self, members: BTreeMap<Name, Member>) {
        let mut by_certificate: BTreeMap<CertificateDigest, Name> = BTreeMap::new();
        for (name, member) in &members {
            let other = by_certificate.get(&member.certificate).and_then(|other| members.get(other));
            if other.is_none_or(|other| other.epoch < member.epoch) {
                by_certificate.insert(member.certificate, name.clone());
            }
        }
        let table = MemberTable { by_name: members, by_certificate };
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = table;
    }

    /// Replaces the list by that of these records. Only hosts that have a record `hosts/HOST` are members. One whose lease has ended may still
    /// answer, and is asked about by others: it is a member for as long as it is not removed.
    pub fn follow(&self, view: &FleetView) {
        let mut members = BTreeMap::new();
        for (name, record) in &view.hosts {
            let alive = view.alive.get(name);
            // A record that cannot be read is no member.
            let member = alive.and_then(|alive| Member::of(&alive.value, alive.created).ok());
            let last = || record.value.door.as_ref().and_then(Member::last);
            let earlier = || self.get(name);
            let is_there = |last: &Member, earlier: &Member| {
                (&last.address, last.certificate) == (&earlier.address, earlier.certificate)
            };
            let member = member.or_else(|| match (last(), earlier()) {
                (Some(last), Some(earlier)) if is_there(&last, &earlier) => Some(earlier),
                (Some(last), _) => Some(last),
                (None, earlier) => earlier,
            });
            members.extend(member.map(|member| (name.clone(), member)));
        }
        // What a later version has written says nothing.
        for key in view.unreadable.keys() {
            let name = key.strip_prefix("hosts/").and_then(|name| name.parse::<Name>().ok());
            members.extend(name.and_then(|name| Some((name.clone(), self.get(&name)?))));
        }
        self.replace(members);
    }

    /// Returns the host of this name.
    pub fn get(&self, host: &Name) -> Option<Member> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).by_name.get(host).cloned()
    }

    /// Returns the host that a certificate belongs to.
    pub fn of_certificate(&self, digest: CertificateDigest) -> Option<Name> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).by_certificate.get(&digest).cloned()
    }

    /// Returns the names of all hosts, and where those of them that exchange chunks of streamed images do that.
    pub fn peers(&self) -> BTreeMap<Name, Option<(String, CertificateDigest)>> {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let of = |member: &Member| Some((member.peers.clone()?, member.certificate));
        table.by_name.iter().map(|(name, member)| (name.clone(), of(member))).collect()
    }

    /// Returns the name that is most like an unknown one, if one is.
    pub fn nearest(&self, name: &str) -> Option<String> {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        nearest(name, table.by_name.keys().map(Name::as_str)).map(str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use spillway_api::Hypervisor;
    use spillway_fleet::view::{Entry, Update};

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn record(address: &str, certificate: &str) -> AliveRecord {
        AliveRecord {
            instance: "i".into(),
            boot_id: "b".into(),
            address: address.into(),
            certificate: certificate.into(),
            version: "1".into(),
            hypervisor: Hypervisor::None,
            peers: None,
            lease: 0,
        }
    }

    #[test]
    fn records_are_checked() {
        let digest = "5a".repeat(32);
        for address in ["host-a:9444", "192.0.2.1:1", "[2001:db8::1]:65535"] {
            assert_eq!(Member::of(&record(address, &digest), 7).unwrap().address, address);
        }
        let long = format!("{}:1", "a".repeat(300));
        for address in ["", "host-a", "host-a:", ":1", "host-a:0", "host-a:65536", "a b:1", "a\r\n:1", &long]
        {
            assert!(Member::of(&record(address, &digest), 7).is_err(), "{address:?}");
        }
        assert!(Member::of(&record("host-a:1", "5a"), 7).is_err());
        for (peers, taken) in [("host-a:2", true), ("host-a", false), ("a\n:1", false), (&long, false)] {
            let record = AliveRecord { peers: Some(peers.into()), ..record("host-a:1", &digest) };
            assert_eq!(Member::of(&record, 7).unwrap().peers.is_some(), taken, "{peers:?}");
        }
    }

    #[test]
    fn hosts_of_the_list_are_members_also_when_their_leases_have_ended() {
        let (digest, later) = ("1a".repeat(32), "2b".repeat(32));
        let host = |certificate: &str| json!({ "host_id": "h", "zone": "z", "door": { "address": "a:1", "certificate": certificate } });
        let alive = |certificate: &str| serde_json::to_value(record("a:1", certificate)).unwrap();
        let follow = |members: &Members, records: &[(&str, Value)]| {
            let entry =
                |value: &Value| Entry { value: value.to_string().into_bytes(), created: 5, modified: 5 };
            let entries = records.iter().map(|(key, value)| ((*key).to_owned(), entry(value)));
            let mut view = FleetView::default();
            view.apply(Update::Whole(5, entries.collect()));
            members.follow(&view);
            members.get(&name("a")).map(|member| (member.epoch, member.certificate.to_string()))
        };
        let members = Members::default();
        assert_eq!(follow(&members, &[("alive/a", alive(&digest))]), None, "it was removed, or never joined");
        assert_eq!(
            follow(&members, &[("hosts/a", host(&digest))]),
            Some((0, digest.clone())),
            "a daemon that was started since"
        );
        let both = [("hosts/a", host(&digest)), ("alive/a", alive(&digest))];
        assert_eq!(follow(&members, &both), Some((5, digest.clone())));
        assert_eq!(follow(&members, &both[..1]), Some((5, digest.clone())), "its lease has ended");
        assert_eq!(follow(&members, &[("hosts/a", json!([]))]), Some((5, digest)), "nothing is known");
        assert_eq!(follow(&members, &[("hosts/a", host(&later))]), Some((0, later)));
        assert_eq!(follow(&members, &[("hosts/a", host("1"))]).map(|(epoch, _)| epoch), Some(0));
        assert_eq!(follow(&members, &[]), None);
    }

    #[test]
    fn a_certificate_belongs_to_the_host_that_came_last() {
        let member = |digit: &str, epoch| Member {
            address: "h:1".into(),
            certificate: digit.repeat(64).parse().unwrap(),
            epoch,
            peers: (digit == "2").then(|| "h:2".into()),
        };
        let members = Members::default();
        let list = [("new", member("1", 9)), ("old", member("1", 3)), ("other", member("2", 5))];
        members.replace(list.into_iter().map(|(host, member)| (name(host), member)).collect());
        assert_eq!(members.of_certificate(member("1", 0).certificate), Some(name("new")));
        assert_eq!(members.of_certificate(member("2", 0).certificate), Some(name("other")));
        let peers: Vec<_> = members.peers().into_values().flatten().collect();
        assert_eq!(peers, [("h:2".to_owned(), member("2", 0).certificate)]);
        assert_eq!(members.nearest("othr").as_deref(), Some("other"));
        members.clone().replace(BTreeMap::new());
        assert_eq!(
            (members.get(&name("new")), members.of_certificate(member("1", 0).certificate)),
            (None, None)
        );
    }
}
