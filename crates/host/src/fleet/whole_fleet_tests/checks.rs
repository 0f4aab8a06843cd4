//! What holds in the simulated fleet at each moment, and what does in the end.

use super::host::SimulatedHost;
use super::sample::name;
use super::{CATALOGS, KEPT, NAMED, OWN, Seen, World};
use crate::machines::imagined::claimed;
use spillway_api::Name;
use std::collections::BTreeMap;

impl World {
    /// What holds at each moment.
    pub(super) fn check_always(&mut self) {
        let seat = name(CATALOGS[NAMED]);
        // A name that others were given meanwhile is not kept for whoever has claimed it.
        let is_kept = |(n, machine): &(usize, Name), was: &(String, u64, u64)| {
            let record = self.fleet.view().name(&seat, machine);
            let is_others = record.is_none_or(|of| of.value.host.as_ref() != Some(&self.hosts[*n].name));
            let may_go = machine.as_str().starts_with(CATALOGS[NAMED]) && is_others;
            let is = claimed(&self.hosts[*n].records, machine);
            let is_same = is.as_ref() == Some(was);
            assert!(is_same || may_go, "{machine} was claimed as {was:?}, and host {n} has {is:?}");
            is_same
        };
        let kept = self.claimed.iter().filter(|(of, was)| is_kept(of, was));
        self.claimed = kept.map(|(of, was)| (of.clone(), was.clone())).collect();
        for host in &self.hosts {
            let machines = host.records.catalogs.machines(None).unwrap();
            let catalog_of: BTreeMap<&Name, &Name> =
                machines.iter().map(|machine| (&machine.name, &machine.catalog)).collect();
            for (machine, version) in host.machines.versions() {
                let Some(catalog) = catalog_of.get(machine).filter(|of| of.as_str() != OWN) else { continue };
                let told = self.told.get(&(host.name.clone(), (*catalog).clone()));
                let is_told = told.is_some_and(|told| told.contains(&version));
                assert!(is_told, "{machine} runs version {version}, and {} was told {told:?}", host.name);
            }
        }
    }

    /// Each name runs on one host.
    pub(super) fn check_names(&mut self, seen: &mut Seen) {
        let mut run_on: BTreeMap<Name, usize> = BTreeMap::new();
        for (n, host) in self.hosts.iter().enumerate() {
            for machine in host.machines.named().into_keys() {
                let before = run_on.insert(machine.clone(), n);
                assert_eq!(before, None, "turn {}: {machine} runs on {} too", self.turn, host.name);
                let last = self.ran_on.insert(machine, n);
                seen.moved += u64::from(last.is_some_and(|last| last != n));
            }
        }
    }

    /// No update takes more machines than `min_ready` allows once they are there.
    pub(super) fn check_ready(&mut self) {
        for (catalog, record) in &self.fleet.view().catalogs {
            let least = record.value.spec.fleet.min_ready as usize;
            let ready: usize = self.hosts.iter().map(|host| host.ready_of(catalog)).sum();
            if ready >= least {
                self.were_ready.insert(catalog.clone());
            } else if self.were_ready.contains(catalog) {
                let hosts: Vec<String> = self.hosts.iter().map(SimulatedHost::describe).collect();
                panic!(
                    "turn {}: {catalog} has {ready} ready machines, less than {least}\n{}",
                    self.turn,
                    hosts.join("\n")
                );
            }
        }
    }

    /// Versions that machines of a catalog run on a host.
    fn versions(&self, host: &SimulatedHost, catalog: &Name) -> Vec<u32> {
        let machines = host.records.catalogs.machines(Some(catalog)).unwrap();
        let is_there = |name: &Name| machines.iter().any(|machine| machine.name == *name);
        host.machines.versions().filter(|(name, _)| is_there(name)).map(|(_, version)| version).collect()
    }

    /// A rollout that is not at its end.
    pub(super) fn why_not_rolled(&self) -> Option<String> {
        let rollouts = &self.fleet.view().rollouts;
        let open = rollouts.iter().find(|(_, rollout)| rollout.value.is_open());
        open.map(|(catalog, rollout)| format!("{catalog}: {:?}", rollout.value))
    }

    /// Whether each catalog has as many machines as it should have, with its version, and nobody has anything left to do.
    pub(super) fn why_not_whole(&self) -> Option<String> {
        let view = self.fleet.view();
        for host in &self.hosts {
            let reported = view.statuses.get(&host.name).map(|status| &status.value);
            if reported != Some(&host.reconciler.status(&host.unfinished).unwrap()) {
                return Some(format!("{} has not reported", host.name));
            }
        }
        for catalog in CATALOGS.map(name) {
            let record = view.catalogs.get(&catalog).map(|record| &record.value);
            let count = record.map_or(0, |record| record.spec.catalog.count as usize);
            let all: usize = self.hosts.iter().map(|host| host.count(&catalog)).sum();
            if all != count {
                return Some(format!("{catalog} has {all} of {count} machines"));
            }
            let shares = view.shares.values().filter_map(|shares| shares.get(&catalog));
            let shares: Vec<usize> = shares.map(|share| share.value.count as usize).collect();
            let names = view.named.get(&catalog).map_or(0, BTreeMap::len);
            let is_named = catalog.as_str() == CATALOGS[NAMED];
            let is_counted = shares.iter().sum::<usize>() == count && !shares.contains(&0);
            if !is_counted || is_named && names != count {
                return Some(format!("{catalog}: shares {shares:?} and {names} names of {count} machines"));
            }
            let Some(record) = record else { continue };
            let rollout = view.rollouts.get(&catalog).map(|rollout| &rollout.value);
            if rollout.is_some_and(|rollout| rollout.is_open()) {
                return Some(format!("{catalog}: {rollout:?}"));
            }
            for host in self.hosts.iter().filter(|host| host.count(&catalog) > 0) {
                let of = host.records.catalogs.get(&catalog).unwrap();
                if of.fleet.as_ref().is_none_or(|owner| owner.generation != record.generation) {
                    return Some(format!("{catalog} on {} has {:?}", host.name, of.fleet));
                }
                let zones = &record.spec.fleet.zones;
                let is_kept = catalog.as_str() == CATALOGS[KEPT];
                if !zones.is_empty() && !zones.contains(&host.zone) && !is_kept {
                    return Some(format!("{catalog} has machines on {} outside of {zones:?}", host.name));
                }
                let counts = host.reconciler.machines.counts(&of).unwrap();
                let has = self.versions(host, &catalog);
                let is_new = is_kept || has.iter().all(|version| *version == record.version);
                let is_done = is_new && counts.ready + counts.off == counts.count && of.rollout.is_none();
                if of.version != record.version || !is_done || !host.unfinished.is_empty() {
                    return Some(format!("{catalog} on {}: {counts:?}", host.name));
                }
            }
        }
        None
    }

    /// Revisions of all catalogs on all hosts.
    pub(super) fn revisions(&self) -> Vec<u64> {
        let catalogs = self.hosts.iter().flat_map(|host| host.records.catalogs.list().unwrap());
        catalogs.map(|catalog| catalog.revision).collect()
    }
}
