//! The share of this host of a fleet's catalog: which machines it gives up, and what its machines do. Owns the order in which
//! machines go.
//!
//! Invariant: a claimed machine is never given up. It goes when its claim has ended.

use super::act::MachineDeleteTerms;
use super::desired_state::DesiredState;
use super::rollout::VersionMatch;
use super::views::{MachineReader, View};
use crate::catalogs::{Catalogs, ChangedBy};
use crate::error::HostError;
use crate::images::check_none_committed;
use spillway_api::{Catalog, ErrorCode, Name, Phase, Power, Selector};

/// Counts of the machines of a catalog.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShareCounts {
    /// All machines.
    pub count: u32,
    /// Those that are ready.
    pub ready: u32,
    /// Those that are off, and nobody has asked for them.
    pub off: u32,
    /// Ready ones, and ones that are off, that have or will take the version of the catalog.
    pub updated: u32,
    /// Those that are claimed.
    pub claimed: u32,
    /// Claimed ones that are neither updated nor failed.
    pub spared: u32,
    /// Those that cannot be started.
    pub failed: u32,
}

/// Machines of catalogs that a fleet shares among hosts.
#[derive(Clone)]
pub struct MachineShares {
    reader: MachineReader,
    catalogs: Catalogs,
}

impl MachineShares {
    /// Creates the shares of the machines that `reader` sees.
    pub(super) fn new(reader: MachineReader, catalogs: Catalogs) -> MachineShares {
        MachineShares { reader, catalogs }
    }

    /// Creates the shares of a host of a test.
    #[cfg(test)]
    pub fn of(reader: &MachineReader, catalogs: &Catalogs) -> MachineShares {
        MachineShares::new(reader.clone(), catalogs.clone())
    }

    fn views(&self, catalog: &Name) -> Result<Vec<View>, HostError> {
        self.reader.views(&Selector { catalog: Some(catalog.clone()), ..Selector::default() })
    }

    /// Counts the machines of a catalog, whose version and settings are as they were read before.
    pub fn counts(&self, catalog: &Catalog) -> Result<ShareCounts, HostError> {
        let mut counts = ShareCounts::default();
        let Catalog { name, spec, version, .. } = catalog;
        for view in self.views(name)? {
            // Other settings that wait for a restart are no other version.
            let is_outdated =
                VersionMatch::of(&view, (&spec.image.name, *version), spec) == VersionMatch::Outdated;
            let View { wanted, status, .. } = view;
            let is_ready = wanted.power == Power::On && status.settled && status.ready;
            let is_off = wanted.power == Power::Off && status.settled && status.phase == Phase::Stopped;
            counts.count += 1;
            counts.ready += u32::from(is_ready);
            counts.off += u32::from(is_off);
            let is_updated = (is_ready || is_off) && !is_outdated;
            let (is_claimed, has_failed) = (wanted.claim.is_some(), status.phase == Phase::Failed);
            counts.updated += u32::from(is_updated);
            counts.claimed += u32::from(is_claimed);
            counts.spared += u32::from(is_claimed && !is_updated && !has_failed);
            counts.failed += u32::from(has_failed);
        }
        Ok(counts)
    }

    /// Removes machines that nobody has claimed until the catalog has at most this many: first those that are not ready, then those
    /// with the highest numbers. Returns how many are left. Files that machines keep stay in their store.
    pub fn shrink(&self, catalog: &Name, count: u32, generation: u64) -> Result<u32, HostError> {
        let views = self.views(catalog)?;
        let mut left = u32::try_from(views.len()).unwrap_or(u32::MAX);
        let mut free: Vec<View> = views.into_iter().filter(|view| view.wanted.claim.is_none()).collect();
        free.sort_by_key(|view| (view.status.ready, std::cmp::Reverse(view.machine.number)));
        let by = ChangedBy::Fleet { generation };
        for view in free {
            if left <= count {
                break;
            }
            let name = &view.machine.name;
            let terms = MachineDeleteTerms { by, ..MachineDeleteTerms::default() };
            let removed = self.catalogs.delete_machine(&view.machine, terms, |changes| {
                let wanted = changes.get::<DesiredState>(name.as_str())?;
                if wanted.is_some_and(|wanted| wanted.value.claim.is_some()) {
                    return Err(HostError::new(ErrorCode::Conflict, format!("{name} is claimed")));
                }
                check_none_committed(changes, [name])
            });
            match removed {
                Ok(()) => left -= 1,
                // Somebody has just claimed it, or its disk is being copied: another one may go.
                Err(e) if e.code == ErrorCode::Conflict => {}
                Err(e) => return Err(e),
            }
        }
        Ok(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogs::CatalogChangeTerms;
    use crate::machines::desired_state::ClaimRecord;
    use crate::machines::imagined::{Boot, ImaginedMachines};
    use crate::machines::testing::{TestHost, spec};
    use crate::resources::budget::NO_LIMITS;
    use serde_json::json;
    use spillway_api::{CatalogUpdate, FleetOwner, RolloutStrategy};
    use spillway_fleet::named::NamedOrders;

    fn shares(host: &TestHost) -> MachineShares {
        MachineShares::of(&host.reader, &host.catalogs)
    }

    fn owner() -> FleetOwner {
        FleetOwner { fleet: "site".parse().unwrap(), generation: 1, named: None }
    }

    #[test]
    fn claimed_machines_stay_and_the_highest_numbers_go_first() {
        let host = TestHost::new(NO_LIMITS);
        let desk: Name = "desk".parse().unwrap();
        host.catalogs.create_for_fleet(&desk, &spec(json!({ "count": 5 })), owner()).unwrap();
        let claim = |name: &str| {
            let claim = Some(ClaimRecord::new(None, false, "ci"));
            host.put(name, &DesiredState { claim, ..DesiredState::default() });
        };
        claim("desk-005");
        let shares = shares(&host);
        let names = || -> Vec<String> {
            let machines = host.catalogs.machines(Some(&desk)).unwrap();
            machines.iter().map(|machine| machine.name.to_string()).collect()
        };
        assert_eq!(shares.shrink(&desk, 3, 2).unwrap(), 3);
        assert_eq!(names(), ["desk-001", "desk-002", "desk-005"]);
        claim("desk-001");
        assert_eq!(shares.shrink(&desk, 0, 2).unwrap(), 2);
        assert_eq!(names(), ["desk-001", "desk-005"]);
        assert_eq!(host.catalogs.get(&desk).unwrap().spec.count, 2);
        let counts = shares.counts(&host.catalogs.get(&desk).unwrap()).unwrap();
        assert_eq!((counts.count, counts.claimed, counts.ready), (2, 2, 0));
    }

    /// A share may fall below what was warm on the host.
    #[test]
    fn warm_machines_are_given_up_like_others() {
        let host = TestHost::new(NO_LIMITS);
        let desk: Name = "desk".parse().unwrap();
        host.catalogs.create_for_fleet(&desk, &spec(json!({ "count": 4, "warm": 3 })), owner()).unwrap();
        for (count, warm) in [(3, 3), (1, 1), (0, 0)] {
            assert_eq!(shares(&host).shrink(&desk, count, 2).unwrap(), count);
            let is = host.catalogs.get(&desk).unwrap().spec;
            assert_eq!((is.count, is.warm), (count, warm));
        }
    }

    /// A rollout of the fleet would wait for machines that nobody restarts.
    #[test]
    fn other_settings_that_wait_for_a_restart_are_no_other_version() {
        let host = TestHost::new(NO_LIMITS);
        host.version(2, 1 << 20);
        let desk: Name = "desk".parse().unwrap();
        let catalog = |vcpus: u32| spec(json!({ "count": 2, "autostart": true, "vcpus": vcpus }));
        host.catalogs.create_for_fleet(&desk, &catalog(1), owner()).unwrap();
        let mut machines = ImaginedMachines::new(&host);
        let mut counts = || {
            (0..2).for_each(|_| machines.step(&host, &NamedOrders::default(), |_, _| Boot::GoesOn));
            let pending = host.reader.views(&Selector::default()).unwrap();
            let pending = pending.iter().filter(|view| view.status.run.as_ref().unwrap().outdated).count();
            let counts = shares(&host).counts(&host.catalogs.get(&desk).unwrap()).unwrap();
            (counts.ready, counts.updated, pending)
        };
        assert_eq!(counts(), (2, 2, 0));
        let terms =
            CatalogChangeTerms { by: ChangedBy::Fleet { generation: 2 }, ..CatalogChangeTerms::default() };
        host.catalogs.change(&desk, &catalog(2), terms).unwrap();
        assert_eq!(counts(), (2, 2, 2));
        let update = CatalogUpdate {
            image: "debian:2".parse().unwrap(),
            rollout: RolloutStrategy::NextStart,
            claim_grace_seconds: None,
            deadline_seconds: None,
            max_failed: 0,
            discard_data: false,
        };
        host.catalogs.update(&desk, &update, terms).unwrap();
        assert_eq!(counts(), (2, 0, 2));
    }

    #[test]
    fn what_is_the_hosts_own_is_not_given_up() {
        let host = TestHost::new(NO_LIMITS);
        host.catalog("own", json!({ "count": 2 }));
        let own: Name = "own".parse().unwrap();
        let refused = shares(&host).shrink(&own, 0, 1).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Exists, "{refused}");
        assert_eq!(host.catalogs.machines(Some(&own)).unwrap().len(), 2);
    }
}
