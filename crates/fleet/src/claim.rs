//! Claims of machines of a fleet: which host is asked next, and which host counts as lost for a claim.
//!
//! Owns what a daemon has taken of hosts since their last reports, and since when it has seen no lease of them. Never asks anybody: a host
//! decides about its machines itself. Invariant: the order depends on the records, on the request, on what was taken and when, and on nothing
//! else.

use crate::Moment;
use crate::records::CatalogStatus;
use crate::transaction::Revision;
use crate::view::{FleetView, LeaseEnd};
use spillway_api::Name;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Number of hosts that are asked although their last report has no machine for the claim. Reports are up to ten seconds old.
pub const MOST_UNLIKELY: usize = 8;
/// Number of hosts and catalogs of which it is kept what was taken.
const MOST_TAKEN: usize = 16_384;
/// How long it counts what was taken, in milliseconds. A report that shows it has come by then. One that would say what the last one says is
/// not written: what was taken has been released, or there is a machine again.
const TAKEN_MS: u64 = 15_000;

/// A host that may have a machine for a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The host.
    pub host: Name,
    /// Whether the machine must be ready.
    pub ready_only: bool,
    /// Revision that created the record of its lease, by the records that were looked at.
    pub epoch: Revision,
}

/// Returns the hosts that are asked for a machine of a catalog, in this order. With `any`, also for machines that are not ready.
///
/// Hosts whose reports have a ready machine come first. Of equal ones, the hash of request and host decides.
pub fn candidates(
    view: &FleetView,
    catalog: &Name,
    request: &str,
    any: bool,
    taken: &TakenMachines,
    now: Moment,
) -> Vec<Candidate> {
    let none = CatalogStatus::default();
    let of = |host: &Name| {
        let status = view.statuses.get(host)?;
        let catalog = status.value.catalogs.get(catalog).unwrap_or(&none);
        (catalog.count > 0).then_some((catalog, status.modified))
    };
    let mut hosts: Vec<(&Name, &CatalogStatus, u32)> = view
        .alive
        .keys()
        .filter(|host| takes_claims(view, host))
        .filter_map(|host| {
            let (is, reported) = of(host)?;
            Some((host, is, taken.since(host, catalog, reported, now)))
        })
        .collect();
    hosts.sort_by_cached_key(|(host, ..)| Reverse(weight(request, host)));
    let is_ready = |is: &CatalogStatus, taken: u32| is.ready.saturating_sub(is.claimed) > taken;
    let is_free = |is: &CatalogStatus, taken: u32| is.count.saturating_sub(is.claimed) > taken;
    let with = |ready_only: bool, holds: &dyn Fn(&CatalogStatus, u32) -> bool| -> Vec<Candidate> {
        let hosts = hosts.iter().filter(|(_, is, taken)| holds(is, *taken));
        let of = |host: &Name| Candidate { host: host.clone(), ready_only, epoch: view.alive[host].created };
        hosts.map(|(host, ..)| of(host)).collect()
    };
    let mut order = with(true, &is_ready);
    let unlikely = if any {
        order.extend(with(false, &is_free));
        with(false, &|is, taken| !is_free(is, taken))
    } else {
        with(true, &|is, taken| !is_ready(is, taken))
    };
    order.extend(unlikely.into_iter().take(MOST_UNLIKELY));
    order
}

/// Whether a host that has a lease is asked for machines: nobody wants it to give them up.
fn takes_claims(view: &FleetView, host: &Name) -> bool {
    view.hosts.get(host).is_some_and(|record| !record.value.is_draining) && !is_dead(view, host)
}

fn is_dead(view: &FleetView, host: &Name) -> bool {
    let dead = view.hosts.get(host).and_then(|record| record.value.dead_epoch);
    dead.is_some_and(|dead| view.alive.get(host).is_none_or(|alive| alive.created <= dead))
}

/// Hosts that may have a claim of a request: all that have, or have had, a lease. Those that count as lost are among them, and those whose
/// records cannot be read.
pub fn possible_holders(view: &FleetView) -> BTreeSet<Name> {
    let has_been = |host: &&Name| {
        view.alive.contains_key(*host) || view.statuses.contains_key(*host) || view.shares.contains_key(*host)
    };
    let unreadable = view.unreadable.keys().filter_map(|key| {
        let (folder, host) = key.split_once('/')?;
        ["hosts", "alive", "status"].contains(&folder).then(|| host.parse().ok())?
    });
    view.hosts.keys().filter(has_been).cloned().chain(unreadable).collect()
}

/// Weight of a host for a request (FNV-1a, then the last steps of SplitMix64): the host with the largest one is asked first.
fn weight(request: &str, host: &Name) -> u64 {
    let bytes = request.bytes().chain([0]).chain(host.as_str().bytes());
    let mut hash = bytes
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

/// What a daemon has taken of hosts since their last reports.
#[derive(Clone, Debug, Default)]
pub struct TakenMachines(BTreeMap<(Name, Name), Taken>);

/// What was taken of a host of a catalog.
#[derive(Clone, Debug, Default)]
struct Taken {
    /// Revision of the report since which it was taken.
    reported: Revision,
    /// When the host has given machines.
    claims: Vec<Moment>,
    /// When the host has said last that it has none, whatever it has reported.
    refused: Option<Moment>,
}

impl TakenMachines {
    /// Notes that a host has given a machine of a catalog.
    pub fn note_claim(&mut self, view: &FleetView, host: &Name, catalog: &Name, now: Moment) {
        let taken = self.since_report(view, host, catalog);
        taken.claims.retain(|at| counts(*at, now));
        taken.claims.push(now);
    }

    /// Notes that a host has none, whatever it has reported.
    pub fn note_refusal(&mut self, view: &FleetView, host: &Name, catalog: &Name, now: Moment) {
        self.since_report(view, host, catalog).refused = Some(now);
    }

    /// What was taken since the last report of a host.
    fn since_report(&mut self, view: &FleetView, host: &Name, catalog: &Name) -> &mut Taken {
        let reported = view.statuses.get(host).map_or(0, |status| status.modified);
        if self.0.len() >= MOST_TAKEN {
            self.0.clear();
        }
        let taken = self.0.entry((host.clone(), catalog.clone())).or_default();
        if taken.reported != reported {
            *taken = Taken { reported, ..Taken::default() };
        }
        taken
    }

    /// Number of machines taken since the report of this revision.
    fn since(&self, host: &Name, catalog: &Name, reported: Revision, now: Moment) -> u32 {
        let taken = self.0.get(&(host.clone(), catalog.clone())).filter(|taken| taken.reported == reported);
        let Some(taken) = taken else { return 0 };
        if taken.refused.is_some_and(|at| counts(at, now)) {
            return u32::MAX;
        }
        let claims = taken.claims.iter().filter(|at| counts(**at, now)).count();
        u32::try_from(claims).unwrap_or(u32::MAX)
    }
}

/// Whether it still counts what was taken at this moment.
fn counts(at: Moment, now: Moment) -> bool {
    now.since_ms(at) < TAKEN_MS
}

/// Since when this daemon has seen no lease of hosts, and by which end of one.
#[derive(Clone, Debug, Default)]
pub struct Departures(BTreeMap<Name, (Moment, LeaseEnd)>);

impl Departures {
    /// Takes the records as they are now.
    pub fn observe(&mut self, view: &FleetView, now: Moment) {
        let gone = |host: &Name| !view.alive.contains_key(host) && !is_dead(view, host);
        self.0.retain(|host, _| view.hosts.contains_key(host) && gone(host));
        for host in possible_holders(view).into_iter().filter(gone) {
            let end = view.lease_end(&host);
            let (since, before) = self.0.entry(host).or_insert((now, end));
            // It may have been back meanwhile.
            if std::mem::replace(before, end) != end {
                *since = now;
            }
        }
    }

    /// Whether a host that this daemon does not reach counts as lost: somebody says so, or it has had no lease for this time.
    pub fn is_lost(&self, view: &FleetView, host: &Name, lost_after_ms: u64, now: Moment) -> bool {
        if !view.hosts.contains_key(host) {
            return !view.unreadable.contains_key(&format!("hosts/{host}"));
        }
        if view.unreadable.contains_key(&format!("alive/{host}")) {
            return false;
        }
        let silent = self.0.len();
        let counted = possible_holders(view).into_iter().filter(|host| !is_dead(view, host)).count();
        let is_braked = silent >= 2 && 3 * silent > counted;
        // It may be back since the records were observed last.
        let is_over = |(since, end): &(Moment, LeaseEnd)| {
            *end == view.lease_end(host) && now.since_ms(*since) >= lost_after_ms
        };
        let is_silent = !view.alive.contains_key(host) && self.0.get(host).is_some_and(is_over);
        is_dead(view, host) || is_silent && !is_braked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{Entry, Update};
    use serde_json::{Value, json};

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    /// Records of hosts: name, epoch (0: not alive), number, ready and claimed of their machines.
    fn view(hosts: &[(&str, i64, [u32; 3])]) -> FleetView {
        let mut entries = Vec::new();
        let mut put = |key: String, value: Value, created: i64| {
            entries.push((key, Entry { value: value.to_string().into_bytes(), created, modified: created }));
        };
        for (host, epoch, [count, ready, claimed]) in hosts {
            put(format!("hosts/{host}"), json!({ "host_id": host, "zone": "z" }), 1);
            let desk = json!({ "generation": 1, "count": count, "ready": ready, "claimed": claimed });
            let budget = json!({ "guarantee_bytes": 1, "limit_bytes": 1, "memory_bytes": 1, "vcpus": 1 });
            put(format!("status/{host}"), json!({ "budget": budget, "catalogs": { "desk": desk } }), 7);
            if *epoch > 0 {
                let alive = json!({ "instance": "i", "boot_id": "b", "address": "a:1", "certificate": "0", "version": "1",
                    "hypervisor": "none" });
                put(format!("alive/{host}"), alive, *epoch);
            }
        }
        let mut view = FleetView::default();
        view.apply(Update::Whole(9, entries));
        assert!(view.unreadable.is_empty(), "{:?}", view.unreadable);
        view
    }

    fn order(view: &FleetView, request: &str, any: bool, taken: &TakenMachines) -> Vec<(String, bool)> {
        order_at(view, request, any, taken, Moment(0))
    }

    fn order_at(
        view: &FleetView,
        request: &str,
        any: bool,
        taken: &TakenMachines,
        now: Moment,
    ) -> Vec<(String, bool)> {
        let order = candidates(view, &name("desk"), request, any, taken, now);
        order.into_iter().map(|of| (of.host.to_string(), of.ready_only)).collect()
    }

    #[test]
    fn hosts_with_ready_machines_come_first_in_an_order_that_each_request_has_for_itself() {
        let hosts: Vec<String> = (0..20).map(|n| format!("h{n:02}")).collect();
        let view = view(&hosts.iter().map(|host| (host.as_str(), 3, [4, 4, 0])).collect::<Vec<_>>());
        let none = TakenMachines::default();
        let mut first: BTreeMap<String, u32> = BTreeMap::new();
        for request in 0..2000 {
            let order = order(&view, &format!("r{request}"), false, &none);
            assert_eq!((order.len(), order.iter().collect::<BTreeSet<_>>().len()), (20, 20));
            *first.entry(order[0].0.clone()).or_default() += 1;
        }
        // 100 each are expected: the chance of 50 or of 160 is below one in a million.
        assert!(first.len() == 20 && first.values().all(|count| (50..160).contains(count)), "{first:?}");
        // A host that goes takes nothing from the order of the others.
        let mut fewer = view.clone();
        fewer.apply(Update::Changes(10, vec![("alive/h07".into(), None)]));
        for request in ["a", "b", "c"] {
            let mut all = order(&view, request, false, &none);
            all.retain(|(host, _)| host != "h07");
            assert_eq!(all, order(&fewer, request, false, &none));
        }
    }

    #[test]
    fn what_a_report_lacks_is_asked_for_last() {
        let hosts = [
            ("ready", 3, [2, 2, 1]),
            ("starts", 3, [2, 1, 1]),
            ("full", 3, [2, 2, 2]),
            ("none", 3, [0, 0, 0]),
            ("gone", 0, [2, 2, 0]),
        ];
        let mut view = view(&hosts);
        let taken = TakenMachines::default();
        let asked = |order: &[(String, bool)], range: std::ops::Range<usize>| -> BTreeSet<String> {
            order[range].iter().map(|(host, _)| host.clone()).collect()
        };
        let strict = order(&view, "r", false, &taken);
        assert_eq!(strict[0], ("ready".into(), true));
        assert_eq!(asked(&strict, 1..3), BTreeSet::from(["starts".into(), "full".into()]));
        assert!(strict.len() == 3 && strict.iter().all(|(_, ready_only)| *ready_only));
        let any = order(&view, "r", true, &taken);
        assert_eq!((any[0].clone(), any[3].clone()), (("ready".into(), true), ("full".into(), false)));
        assert_eq!(asked(&any, 1..3), BTreeSet::from(["ready".into(), "starts".into()]));
        // A host that drains, and one that was declared dead, give nothing.
        for more in [json!({ "is_draining": true }), json!({ "dead_epoch": 3 })] {
            let mut record = json!({ "host_id": "ready", "zone": "z" });
            record.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let entry = Entry { value: record.to_string().into_bytes(), created: 1, modified: 12 };
            view.apply(Update::Changes(12, vec![("hosts/ready".into(), Some(entry))]));
            assert_eq!(order(&view, "r", false, &taken).len(), 2, "{record}");
        }
    }

    #[test]
    fn what_was_taken_counts_until_the_next_report() {
        let (a, desk) = (name("a"), name("desk"));
        let mut view = view(&[("a", 3, [2, 2, 0]), ("b", 3, [2, 1, 0])]);
        let mut taken = TakenMachines::default();
        let likely = |view: &FleetView, taken: &TakenMachines| {
            let all = order(view, "r", true, taken);
            all.into_iter().filter(|(_, ready)| *ready).map(|(host, _)| host).collect::<BTreeSet<_>>()
        };
        taken.note_claim(&view, &a, &desk, Moment(0));
        assert_eq!(likely(&view, &taken).len(), 2);
        taken.note_claim(&view, &a, &desk, Moment(0));
        assert_eq!(likely(&view, &taken), BTreeSet::from(["b".into()]));
        let later = |view: &mut FleetView, revision| {
            let value = serde_json::to_vec(&view.statuses[&a].value).unwrap();
            let entry = Entry { value, created: 7, modified: revision };
            view.apply(Update::Changes(revision, vec![("status/a".into(), Some(entry))]));
        };
        later(&mut view, 20);
        assert_eq!(likely(&view, &taken).len(), 2);
        taken.note_refusal(&view, &a, &desk, Moment(0));
        assert_eq!(likely(&view, &taken), BTreeSet::from(["b".into()]));
        later(&mut view, 21);
        assert_eq!(likely(&view, &taken).len(), 2);
    }

    /// A host whose report would say the same as the last one writes none.
    #[test]
    fn what_was_taken_counts_for_a_time_though_no_report_comes() {
        let (a, desk) = (name("a"), name("desk"));
        let view = view(&[("a", 3, [2, 2, 0]), ("b", 3, [2, 1, 0])]);
        let is_likely = |taken: &TakenMachines, now: u64| {
            let all = order_at(&view, "r", true, taken, Moment(now));
            all.contains(&("a".to_owned(), true))
        };
        let mut taken = TakenMachines::default();
        taken.note_claim(&view, &a, &desk, Moment(0));
        taken.note_claim(&view, &a, &desk, Moment(9_000));
        assert!(!is_likely(&taken, 14_999) && is_likely(&taken, 15_000));
        // Each machine counts for its own time, however many are taken and released.
        taken.note_claim(&view, &a, &desk, Moment(16_000));
        assert!(!is_likely(&taken, 23_999) && is_likely(&taken, 24_000));
        taken.note_refusal(&view, &a, &desk, Moment(25_000));
        assert!(!is_likely(&taken, 39_999) && is_likely(&taken, 40_000));
        assert!(taken.0.values().all(|taken| taken.claims.len() <= 2), "{taken:?}");
    }

    #[test]
    fn few_hosts_are_asked_against_what_they_have_reported() {
        let hosts: Vec<String> = (0..30).map(|n| format!("h{n:02}")).collect();
        let view = view(&hosts.iter().map(|host| (host.as_str(), 3, [4, 4, 4])).collect::<Vec<_>>());
        for any in [false, true] {
            assert_eq!(order(&view, "r", any, &TakenMachines::default()).len(), MOST_UNLIKELY);
        }
    }

    #[test]
    fn a_host_is_lost_after_a_time_without_lease_unless_many_are() {
        let all = [("a", 3, [1; 3]), ("b", 3, [1; 3]), ("c", 3, [1; 3]), ("d", 3, [1; 3]), ("e", 3, [1; 3])];
        let mut view = view(&all);
        let mut departures = Departures::default();
        let (now, c) = (Moment(100_000), name("c"));
        departures.observe(&view, now);
        assert!(!departures.is_lost(&view, &c, 0, now), "it has a lease");
        let leave = |view: &mut FleetView, host: &str| {
            let revision = view.revision + 1;
            view.apply(Update::Changes(revision, vec![(format!("alive/{host}"), None)]));
        };
        leave(&mut view, "c");
        departures.observe(&view, now);
        assert!(!departures.is_lost(&view, &c, 45_000, now.after_ms(44_999)));
        assert!(departures.is_lost(&view, &c, 45_000, now.after_ms(45_000)));
        // It was back between two looks.
        leave(&mut view, "c");
        assert!(!departures.is_lost(&view, &c, 45_000, now.after_ms(45_000)));
        departures.observe(&view, now.after_ms(10_000));
        assert!(!departures.is_lost(&view, &c, 45_000, now.after_ms(54_999)));
        assert!(departures.is_lost(&view, &c, 45_000, now.after_ms(55_000)));
        leave(&mut view, "d");
        departures.observe(&view, now);
        let later = now.after_ms(60_000);
        assert!(!departures.is_lost(&view, &c, 45_000, later), "two of five are silent");
        // What somebody has declared dead is lost at once, and what was removed.
        let record = json!({ "host_id": "d", "zone": "z", "dead_epoch": 3 });
        let entry = Entry { value: record.to_string().into_bytes(), created: 1, modified: 30 };
        view.apply(Update::Changes(30, vec![("hosts/d".into(), Some(entry))]));
        departures.observe(&view, later);
        assert!(
            departures.is_lost(&view, &name("d"), 45_000, now)
                && departures.is_lost(&view, &c, 45_000, later)
        );
        view.apply(Update::Changes(31, vec![("hosts/e".into(), None)]));
        assert!(departures.is_lost(&view, &name("e"), 45_000, now));
        let broken = Entry { value: b"{".to_vec(), created: 1, modified: 32 };
        view.apply(Update::Changes(32, vec![("hosts/c".into(), Some(broken))]));
        assert!(!departures.is_lost(&view, &c, 45_000, later), "a record that cannot be read says nothing");
    }

    #[test]
    fn all_hosts_that_have_had_a_lease_may_have_a_claim() {
        let mut view = view(&[("a", 3, [1; 3]), ("b", 0, [1; 3])]);
        let record = json!({ "host_id": "new", "zone": "z" });
        let entry = Entry { value: record.to_string().into_bytes(), created: 1, modified: 10 };
        view.apply(Update::Changes(10, vec![("hosts/new".into(), Some(entry))]));
        assert_eq!(possible_holders(&view), BTreeSet::from([name("a"), name("b")]));
        let broken = Entry { value: b"{".to_vec(), created: 1, modified: 11 };
        view.apply(Update::Changes(11, vec![("hosts/new".into(), Some(broken))]));
        assert_eq!(possible_holders(&view), BTreeSet::from([name("a"), name("b"), name("new")]));
    }
}
