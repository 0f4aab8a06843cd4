//! Full copies: the versions of images of which a host is to have all, whether or not it has machines of them. Each host decides for itself.
//!
//! Owns the choice of hosts. Invariant: hosts that see the same records, and the same hosts as lost, choose the same ones. A host that goes or
//! comes moves only copies that it has or gets.

use crate::Moment;
use crate::agent::ImageSource;
use crate::liveness::{Liveness, Standing, StoreHealth};
use crate::rendezvous::score;
use crate::view::FleetView;
use spillway_api::Name;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Time without a sign of life after which another host makes the copy, in milliseconds.
pub const LOST_AFTER_MS: u64 = 45_000;

/// Which hosts have copies of a digest, in the order in which they are chosen.
pub fn holders<'a>(digest: &str, copies: u32, hosts: impl Iterator<Item = &'a Name>) -> Vec<&'a Name> {
    let mut hosts: Vec<&Name> = hosts.collect();
    hosts.sort_by_cached_key(|host| (Reverse(score(digest, host.as_str())), *host));
    hosts.truncate(copies as usize);
    hosts
}

/// What a host knows of the others, to decide what it has to have all of.
#[derive(Debug, Default)]
pub struct CopyHolders {
    liveness: Liveness,
    /// Hosts that count as lost until they have a lease again.
    lost: BTreeSet<Name>,
}

impl CopyHolders {
    /// Takes the records and the time. To be called at least once in some seconds.
    ///
    /// Nobody is asked about a host that is silent, as for machines: a copy too many does no harm. While too many hosts are silent at once, or
    /// etcd was in trouble lately, none is lost that was not before.
    pub fn observe(&mut self, view: &FleetView, health: &StoreHealth, now: Moment) {
        self.liveness.observe(view, now);
        self.liveness.tick(health, now);
        let braked = self.liveness.brake(now).is_some();
        self.lost.retain(|host| view.hosts.contains_key(host));
        for host in view.hosts.keys() {
            let is_lost = match self.liveness.standing(host, now) {
                Standing::Alive => false,
                Standing::DeclaredDead { .. } => true,
                Standing::Silent { for_ms, .. } if for_ms >= LOST_AFTER_MS && !braked => true,
                _ => continue,
            };
            match is_lost {
                true => drop(self.lost.insert(host.clone())),
                false => drop(self.lost.remove(host)),
            }
        }
    }

    /// Hosts that may have copies: those that have been alive, are not lost, and are not about to go.
    fn candidates<'a>(&'a self, view: &'a FleetView, now: Moment) -> impl Iterator<Item = &'a Name> {
        let may = move |host: &&Name| {
            let standing = self.liveness.standing(host, now);
            let is_there = matches!(standing, Standing::Alive | Standing::Silent { .. });
            let is_draining = view.hosts.get(*host).is_some_and(|host| host.value.is_draining);
            is_there && !is_draining && !self.lost.contains(*host)
        };
        view.hosts.keys().filter(may)
    }

    /// The versions of which this host is to have all, with their sources.
    pub fn wanted(&self, view: &FleetView, own: &Name, now: Moment) -> BTreeMap<(Name, u32), ImageSource> {
        let mut wanted = BTreeMap::new();
        for ((name, version), image) in view.images.iter().filter(|(_, image)| image.value.full_copies > 0) {
            let image = &image.value;
            if holders(&image.digest, image.full_copies, self.candidates(view, now)).contains(&own) {
                wanted.insert((name.clone(), *version), ImageSource::of(view, image));
            }
        }
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Fleet, name};
    use serde_json::json;

    const START: Moment = Moment(1_000_000);
    const QUIET: StoreHealth = StoreHealth { trouble: None };

    fn names(count: usize) -> Vec<Name> {
        (0..count).map(|n| name(&format!("host-{n}"))).collect()
    }

    #[test]
    fn a_host_that_goes_moves_only_its_own_copies() {
        let hosts = names(20);
        for digest in (0..500).map(|n| format!("sha256:{n}")) {
            let before = holders(&digest, 3, hosts.iter());
            assert_eq!(before.len(), 3);
            for gone in &hosts {
                let after = holders(&digest, 3, hosts.iter().filter(|host| *host != gone));
                let stays: Vec<_> = before.iter().filter(|host| **host != gone).collect();
                assert!(stays.iter().all(|host| after.contains(host)), "{digest} without {gone}");
                assert!(before.contains(&gone) || before == after);
            }
        }
        assert_eq!(holders("x", 30, hosts.iter()).len(), 20);
        assert!(holders("x", 0, hosts.iter()).is_empty());
    }

    /// A fleet of hosts `a` to `f` with one image, what `a` knows of them, and the time.
    struct World {
        fleet: Fleet,
        holders: CopyHolders,
        now: Moment,
    }

    impl World {
        fn new(copies: u32) -> World {
            let mut fleet = Fleet::new();
            ["a", "b", "c", "d", "e", "f"].iter().for_each(|host| fleet.host(host, "z"));
            let image = json!({
                "digest": "sha256:0", "registry": "hub", "name": "debian", "size_bytes": 1, "full_copies": copies,
            });
            fleet.put("images/debian/3", &image.to_string());
            World { fleet, holders: CopyHolders::default(), now: START }
        }

        /// Who has copies, as each host sees it.
        fn chosen(&mut self) -> Vec<Name> {
            self.holders.observe(self.fleet.view(), &QUIET, self.now);
            let (view, holders) = (self.fleet.view(), &self.holders);
            let has = |host: &&Name| {
                let wanted = holders.wanted(view, host, self.now);
                wanted.contains_key(&(name("debian"), 3))
            };
            view.hosts.keys().filter(has).cloned().collect()
        }

        fn after_s(&mut self, seconds: u64) -> Vec<Name> {
            for _ in 0..seconds {
                self.now = self.now.after_ms(1000);
                self.chosen();
            }
            self.chosen()
        }
    }

    #[test]
    fn a_silent_host_is_replaced_by_the_next_after_its_time() {
        let mut world = World::new(2);
        let first = world.chosen();
        assert_eq!(first.len(), 2);
        world.fleet.end_lease(first[0].as_str());
        // The lease had 15 s when its end was seen.
        assert_eq!(world.after_s(29), first);
        let second = world.after_s(2);
        assert!(second.len() == 2 && second.contains(&first[1]) && !second.contains(&first[0]), "{second:?}");
        world.fleet.begin_lease(first[0].as_str());
        assert_eq!(world.chosen(), first, "it comes back to its copy");
        world.fleet.set(&format!("hosts/{}", first[1]), json!({ "is_draining": true }));
        assert!(!world.chosen().contains(&first[1]), "who is about to go has no copy");
    }

    #[test]
    fn nothing_moves_when_many_hosts_are_silent_at_once_or_etcd_is_in_trouble() {
        let mut world = World::new(2);
        let first = world.chosen();
        ["a", "b", "c"].iter().for_each(|host| world.fleet.end_lease(host));
        assert_eq!(world.after_s(300), first);
        let mut world = World::new(2);
        world.chosen();
        world.fleet.end_lease(first[0].as_str());
        for _ in 0..100 {
            world.now = world.now.after_ms(1000);
            let trouble = StoreHealth { trouble: Some(world.now) };
            world.holders.observe(world.fleet.view(), &trouble, world.now);
        }
        assert_eq!(world.chosen(), first);
        assert!(!world.after_s(31).contains(&first[0]), "the trouble is over");
    }

    #[test]
    fn who_is_removed_or_declared_dead_counts_no_more() {
        for removes in [true, false] {
            let mut world = World::new(1);
            let first = world.chosen();
            let key = format!("hosts/{}", first[0]);
            world.fleet.end_lease(first[0].as_str());
            match removes {
                true => world.fleet.delete(&key),
                false => drop(world.fleet.set(&key, json!({ "dead_epoch": world.fleet.revision() }))),
            }
            let second = world.chosen();
            assert!(second.len() == 1 && second != first, "{second:?}");
        }
    }

    #[test]
    fn an_image_without_a_minimum_is_nowhere_whole() {
        assert!(World::new(0).chosen().is_empty());
        assert_eq!(World::new(9).chosen().len(), 6);
    }
}
