//! Catalogs of a fleet whose machines have names of the fleet: exactly those that it has placed on this host, with their numbers and
//! identities.
//!
//! Owns their records. Invariant: no machine of such a catalog is made here; a machine of the same name and another identity is removed
//! before the new one is recorded.

use super::Catalogs;
use super::records::{forget, whole};
use crate::error::HostError;
use crate::machines::desired_state::DesiredState;
use crate::store::Changes;
use jiff::Timestamp;
use spillway_api::{Catalog, ErrorCode, Machine, Name};
use spillway_fleet::named::PlacedMachine;
use std::collections::BTreeMap;

/// Whether the machines of a catalog are those that a fleet has placed here.
pub(super) fn is_named(catalog: &Catalog) -> bool {
    catalog.fleet.as_ref().is_some_and(|owner| owner.named.is_some())
}

/// What keeps a catalog from having the machines that it is to have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlacedLeft {
    /// Machines that are to be given up, and are claimed.
    pub claimed: Vec<Name>,
    /// Machines of which an earlier one of the same name is still there.
    pub waiting: Vec<Name>,
}

/// Makes the machines of a catalog these. One that is to be given up stays while it is claimed; others are removed at once.
///
/// # Errors
/// A machine of another catalog has one of the names, or the records cannot be changed.
pub fn place_machines(
    catalogs: &Catalogs,
    catalog: &Name,
    placed: &[PlacedMachine],
) -> Result<PlacedLeft, HostError> {
    let _counting = catalogs.counting();
    let placed: BTreeMap<&Name, &PlacedMachine> =
        placed.iter().map(|placed| (&placed.machine, placed)).collect();
    let there = catalogs.machines(Some(catalog))?;
    let mut left = PlacedLeft::default();
    catalogs.objects.change(|changes| {
        left = PlacedLeft::default();
        let mut found = whole(changes, catalog)?;
        let mut count = 0;
        let mut stays = BTreeMap::new();
        for machine in &there {
            let placed = placed.get(&machine.name).filter(|placed| placed.identity == machine.identity);
            let keeps = match placed {
                Some(placed) if placed.is_leaving => {
                    let is_claimed = is_claimed(changes, machine)?;
                    left.claimed.extend(is_claimed.then(|| machine.name.clone()));
                    is_claimed
                }
                other => other.is_some(),
            };
            match keeps {
                true => count += 1,
                false => forget(changes, machine, true)?,
            }
            stays.insert(&machine.name, keeps);
        }
        for (name, placed) in placed.iter().filter(|(_, placed)| !placed.is_leaving) {
            match stays.get(name) {
                Some(true) => continue,
                // The record of the new one comes when this one is gone.
                Some(false) => left.waiting.push((*name).clone()),
                None => {
                    record(changes, catalog, placed)?;
                    count += 1;
                }
            }
        }
        if found.spec.count != count {
            found.spec.count = count;
            changes.put(catalog.as_str(), &found);
        }
        Ok::<_, HostError>(())
    })?;
    Ok(left)
}

fn is_claimed(changes: &mut Changes, machine: &Machine) -> Result<bool, HostError> {
    let wanted = changes.get::<DesiredState>(machine.name.as_str())?;
    Ok(wanted.is_some_and(|wanted| wanted.value.claim.is_some()))
}

fn record(changes: &mut Changes, catalog: &Name, placed: &PlacedMachine) -> Result<(), HostError> {
    let name = &placed.machine;
    if let Some(other) = changes.get::<Machine>(name.as_str())? {
        let message = format!("a machine '{name}' is in the catalog '{}' of this host", other.value.catalog);
        return Err(HostError::new(ErrorCode::Exists, message));
    }
    let machine = Machine {
        name: name.clone(),
        catalog: catalog.clone(),
        number: placed.number,
        identity: placed.identity.clone(),
        size_bytes: None,
        created: Timestamp::now(),
    };
    changes.put(name.as_str(), &machine);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::desired_state::ClaimRecord;
    use crate::machines::testing::{TestHost, spec};
    use crate::resources::budget::NO_LIMITS;
    use serde_json::json;
    use spillway_api::{FleetOwner, Identity, IsolationAction};

    fn placed(number: u32, uuid: &str, is_leaving: bool) -> PlacedMachine {
        PlacedMachine {
            machine: format!("desk-{number:03}").parse().unwrap(),
            number,
            identity: Identity { uuid: uuid.into(), mac: "02:00:00:00:00:01".into() },
            on_isolation: IsolationAction::Stop,
            is_leaving,
        }
    }

    #[test]
    fn a_catalog_has_the_machines_that_the_fleet_has_placed() {
        let host = TestHost::new(NO_LIMITS);
        let name: Name = "desk".parse().unwrap();
        let owner =
            FleetOwner { fleet: "site".parse().unwrap(), generation: 1, named: Some(IsolationAction::Stop) };
        host.catalogs.create_for_fleet(&name, &spec(json!({ "count": 2 })), owner).unwrap();
        let machines = || -> Vec<(String, String)> {
            let all = host.catalogs.machines(Some(&name)).unwrap();
            all.into_iter().map(|machine| (machine.name.to_string(), machine.identity.uuid)).collect()
        };
        assert_eq!(machines(), [], "none is made here");
        let place = |placed: &[PlacedMachine]| place_machines(&host.catalogs, &name, placed).unwrap();
        assert_eq!(place(&[placed(7, "a", false), placed(3, "b", false)]), PlacedLeft::default());
        let both = [("desk-003".to_owned(), "b".to_owned()), ("desk-007".to_owned(), "a".to_owned())];
        assert_eq!(machines(), both);
        assert_eq!(host.catalogs.get(&name).unwrap().spec.count, 2);
        // Another machine of the name.
        let other = [placed(7, "a", false), placed(3, "c", false)];
        assert_eq!(place(&other).waiting.len(), 1);
        assert_eq!(place(&other), PlacedLeft::default());
        assert_eq!(machines()[0].1, "c");
        let claim = |is_claimed: bool| {
            let claim = is_claimed.then(|| ClaimRecord::new(None, false, "ci"));
            let put = |changes: &mut Changes| {
                changes.put("desk-007", &DesiredState { claim: claim.clone(), ..DesiredState::default() });
                Ok::<_, HostError>(())
            };
            host.objects.change(put).unwrap();
        };
        claim(true);
        assert_eq!(place(&[placed(7, "a", true)]).claimed.len(), 1, "it stays while it is claimed");
        assert_eq!(machines().len(), 1);
        assert_eq!(place(&[]), PlacedLeft::default());
        assert_eq!(machines(), [], "another host has it, whoever has claimed it here");
    }
}
