//! People of the simulated fleet, and what befalls its hosts.

use super::host::State;
use super::sample::{GIB, name};
use super::{BAD, CATALOGS, GOOD, HOSTS, KEPT, MISSING, NAMED, OWN, Seen, World};
use crate::catalogs::CatalogChangeTerms;
use crate::machines::imagined::{claim, claimed};
use crate::machines::testing::spec;
use jiff::Timestamp;
use serde_json::json;
use spillway_api::{FleetCatalogUpdate, FleetHostAction, FleetRolloutState, Name, RolloutAction};
use spillway_fleet::changes::{
    ChangeError, change_host, create_catalog, delete_catalog, replace_catalog, roll_back_catalog,
    update_catalog,
};
use spillway_fleet::rollout::change_rollout;
use spillway_fleet::transaction::{Outcome, Transaction};
use spillway_fleet::view::FleetView;

impl World {
    /// People ask for a change. Whether it was made.
    pub(super) fn ask(
        &mut self,
        decide: impl Fn(&FleetView) -> Result<Option<Transaction>, ChangeError>,
    ) -> bool {
        let Ok(Some(change)) = decide(self.fleet.view()) else { return false };
        matches!(self.commit(&change), Outcome::Applied(_))
    }

    pub(super) fn create(&mut self, n: usize) {
        let count = 2 + self.random.below(8);
        let mut spec = json!({"image": "debian:1", "count": count, "ram_bytes": GIB / 2, "memory_bytes": GIB / 2,
            "lost_after_seconds": 20, "waves": ["1", "50%", "100%"], "autostart": n != 1});
        spec["zones"] = json!(self.zones(n));
        spec["warm"] = json!(if n == 1 { count / 2 } else { 0 });
        spec["min_ready"] =
            json!(if [0, NAMED].contains(&n) && self.random.chance(2) { count / 2 } else { 0 });
        if n == KEPT {
            spec["type"] = json!("dedicated");
            (spec["ram_bytes"], spec["memory_bytes"]) = (json!(null), json!(GIB));
        }
        if n == NAMED {
            spec["identity"] = json!("named");
            spec["on_isolation"] = json!(self.random.pick(&["stop", "pause"]));
        }
        let spec = serde_json::from_value(spec).unwrap();
        self.ask(|view| create_catalog(view, &name(CATALOGS[n]), &spec, Timestamp::UNIX_EPOCH).map(Some));
    }

    pub(super) fn update(&mut self, catalog: &Name, version: u32) -> bool {
        let update =
            FleetCatalogUpdate { version, strategy: None, max_failed: 0, deadline_seconds: Some(60) };
        self.ask(|view| update_catalog(view, catalog, &update, None, Timestamp::UNIX_EPOCH).map(Some))
    }

    pub(super) fn scale(&mut self, catalog: &Name, count: u32) {
        self.ask(|view| {
            let Some(found) = view.catalogs.get(catalog) else { return Ok(None) };
            let mut spec = found.value.spec.clone();
            spec.catalog.count = count;
            spec.catalog.warm = spec.catalog.warm.min(count);
            spec.fleet.min_ready = spec.fleet.min_ready.min(count / 2);
            replace_catalog(view, catalog, &spec, None, Timestamp::UNIX_EPOCH)
        });
    }

    /// Settings that machines take when they are started next.
    pub(super) fn set(&mut self, catalog: &Name) {
        let vcpus = 1 + self.random.below(3) as u32;
        self.ask(|view| {
            let Some(found) = view.catalogs.get(catalog) else { return Ok(None) };
            let mut spec = found.value.spec.clone();
            spec.catalog.hardware.vcpus = vcpus;
            replace_catalog(view, catalog, &spec, None, Timestamp::UNIX_EPOCH)
        });
    }

    /// Zones for a catalog. In the end only one catalog is kept to some hosts, so that there is space for all.
    fn zones(&mut self, n: usize) -> Vec<Name> {
        let is_kept_to = (self.has_faults || n == 1) && self.random.chance(2);
        let zone = self.random.below(2);
        is_kept_to.then(|| name(&format!("z{zone}"))).into_iter().collect()
    }

    /// A catalog is kept to other hosts.
    pub(super) fn move_to_zones(&mut self, n: usize) {
        let zones = self.zones(n);
        self.ask(|view| {
            let Some(found) = view.catalogs.get(&name(CATALOGS[n])) else { return Ok(None) };
            let mut spec = found.value.spec.clone();
            spec.fleet.zones.clone_from(&zones);
            replace_catalog(view, &name(CATALOGS[n]), &spec, None, Timestamp::UNIX_EPOCH)
        });
    }

    /// A host gets more machines of its own, or fewer.
    pub(super) fn change_own(&mut self, n: usize) {
        let count = if self.has_faults { self.random.below(5) } else { 0 };
        let (host, local) = (&self.hosts[n].records, name(OWN));
        let settings = json!({ "count": count, "ram_bytes": GIB / 2, "memory_bytes": GIB / 2 });
        match host.catalogs.get(&local) {
            Err(_) => drop(host.catalog(OWN, settings)),
            Ok(_) => host
                .catalogs
                .change(&local, &spec(settings), CatalogChangeTerms::default())
                .map(drop)
                .unwrap(),
        }
    }

    /// People, and what befalls hosts.
    pub(super) fn meddle(&mut self, seen: &mut Seen) {
        let n = self.random.below(CATALOGS.len() as u64) as usize;
        let catalog = name(CATALOGS[n]);
        let host = self.random.below(HOSTS as u64) as usize;
        let of = self.hosts[host].name.clone();
        match self.random.below(90) {
            0 | 1 => {
                let version = *self.random.pick(&[1, 2, BAD, MISSING, 5]);
                self.update(&catalog, version);
            }
            2 => {
                let actions = [RolloutAction::Pause, RolloutAction::Resume, RolloutAction::Abort];
                let action = *self.random.pick(&actions);
                self.ask(|view| change_rollout(view, &catalog, action, Timestamp::UNIX_EPOCH));
            }
            3 => {
                self.ask(|view| roll_back_catalog(view, &catalog, None, Timestamp::UNIX_EPOCH).map(Some));
            }
            4 | 5 => {
                let count = self.random.below(11) as u32;
                self.scale(&catalog, count);
            }
            6 if self.random.chance(3) => {
                self.ask(|view| delete_catalog(view, &catalog).map(Some));
            }
            7 => self.create(n),
            8 => {
                let action = *self.random.pick(&[FleetHostAction::Drain, FleetHostAction::Cordon]);
                self.ask(|view| change_host(view, &of, action).map(Some));
            }
            9 | 10 => _ = self.ask(|view| change_host(view, &of, FleetHostAction::Uncordon).map(Some)),
            11 => {
                self.ask(|view| change_host(view, &of, FleetHostAction::DeclareDead).map(Some));
            }
            12 if self.hosts[host].state == State::Up => {
                let state = *self.random.pick(&[State::CutOff, State::Off]);
                self.stop(host, state);
            }
            13..=20 => self.claim(host, seen),
            21 | 22 => self.set(&catalog),
            23 => self.change_own(host),
            24 => self.move_to_zones(n),
            _ => {}
        }
    }

    /// A host is cut off, or off, for some time. A daemon that begins anew knows nothing but its records.
    pub(super) fn stop(&mut self, n: usize, state: State) {
        let turns = 5 + self.random.below(80);
        let host = &mut self.hosts[n];
        (host.state, host.back_in) = (state, turns);
        if state == State::Off {
            host.lose_power();
            self.starts[n] += 1;
        }
    }

    /// Somebody claims a machine that is ready, or releases one.
    pub(super) fn claim(&mut self, n: usize, seen: &mut Seen) {
        let host = &self.hosts[n];
        if host.state == State::Off {
            return;
        }
        let held: Vec<&Name> = self.claimed.keys().filter(|(of, _)| *of == n).map(|(_, name)| name).collect();
        if self.has_faults && !held.is_empty() && self.random.chance(2) {
            let machine = (*self.random.pick(&held)).clone();
            self.release(n, &machine);
            return;
        }
        let there = host.records.catalogs.machines(None).unwrap();
        let is_there = |name: &Name| there.iter().any(|machine| machine.name == *name);
        let free = host.machines.ready().filter(|name| !held.contains(name) && is_there(name));
        let free: Vec<Name> = free.cloned().collect();
        if !free.is_empty() {
            let machine = self.random.pick(&free).clone();
            claim(&host.records, &machine, true);
            let is = claimed(&host.records, &machine).unwrap();
            self.claimed.insert((n, machine), is);
            seen.claims += 1;
        }
    }

    pub(super) fn release(&mut self, n: usize, machine: &Name) {
        claim(&self.hosts[n].records, machine, false);
        self.claimed.remove(&(n, machine.clone()));
    }

    /// An update that has stopped goes on, or another good version is given.
    pub(super) fn give_good_version(&mut self, n: usize) {
        let catalog = name(CATALOGS[n]);
        let rollout = self.fleet.view().rollouts.get(&catalog).map(|rollout| &rollout.value);
        let goes_on = rollout.is_some_and(|of| {
            let is_aborted = of.state == FleetRolloutState::Aborted;
            of.is_open() && !is_aborted && GOOD.contains(&of.to.version)
        });
        if goes_on && self.random.chance(2) {
            self.ask(|view| change_rollout(view, &catalog, RolloutAction::Resume, Timestamp::UNIX_EPOCH));
            return;
        }
        let is = self.fleet.view().catalogs[&catalog].value.version;
        let good: Vec<u32> = GOOD.into_iter().filter(|version| *version != is).collect();
        let version = *self.random.pick(&good);
        assert!(self.update(&catalog, version));
    }
}
