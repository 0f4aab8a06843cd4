//! The records of machines: as many as the catalog says, each with its name and its identity.
//!
//! Invariant: a name is of one machine of the host; an identity is given once.

use super::{Catalogs, spec};
use crate::error::HostError;
use crate::machines::belongings::Belongings;
use crate::machines::wanted::Wanted;
use crate::store::{Changes, Kind};
use jiff::Timestamp;
use spillway_api::{Catalog, CatalogSpec, ErrorCode, Identity, Machine, Name};
use std::collections::{HashMap, HashSet};
use std::sync::MutexGuard;

/// Records written in one transaction.
const BATCH: usize = 256;

impl Catalogs {
    /// All machines, or those of a catalog, in the order of their names.
    pub fn machines(&self, catalog: Option<&Name>) -> Result<Vec<Machine>, HostError> {
        let all = self.objects.list::<Machine>()?.into_iter().map(|machine| machine.value);
        Ok(all.filter(|machine| catalog.is_none_or(|catalog| machine.catalog == *catalog)).collect())
    }

    /// One machine.
    pub fn machine(&self, name: &Name) -> Result<Machine, HostError> {
        match self.objects.get::<Machine>(name.as_str())? {
            Some(machine) => Ok(machine.value),
            None => {
                let all = self.machines(None)?;
                let names = all.iter().map(|machine| machine.name.as_str());
                Err(HostError::not_found(Machine::WORD, name.as_str(), names))
            }
        }
    }

    /// Refuses if a machine of another catalog has a name that a machine would have which this one is to get.
    pub(super) fn names_are_free(&self, name: &Name, spec: &CatalogSpec) -> Result<(), HostError> {
        let naming = spec::naming(name, spec)?;
        let (own, others): (Vec<Machine>, Vec<Machine>) =
            self.machines(None)?.into_iter().partition(|machine| machine.catalog == *name);
        let owners: HashMap<&str, &Name> = others.iter().map(|m| (m.name.as_str(), &m.catalog)).collect();
        for number in differ(own, spec.count).missing {
            let machine = naming.name(number)?;
            if let Some(owner) = owners.get(machine.as_str()) {
                let message =
                    format!("a machine '{machine}' is in the catalog '{owner}': give another naming");
                return Err(HostError::new(ErrorCode::Exists, message));
            }
        }
        Ok(())
    }

    /// Records machines that are missing, and removes those beyond the count; what they keep too, if that is said.
    pub(super) fn count(
        &self,
        _counting: &MutexGuard<()>,
        catalog: &Catalog,
        with_data: bool,
    ) -> Result<(), HostError> {
        self.names_are_free(&catalog.name, &catalog.spec)?;
        let naming = spec::naming(&catalog.name, &catalog.spec)?;
        let Difference { surplus, missing } = differ(self.machines(Some(&catalog.name))?, catalog.spec.count);
        self.remove(&surplus, with_data)?;
        for numbers in missing.chunks(BATCH) {
            self.objects.change(|changes| {
                for &number in numbers {
                    let machine = Machine {
                        name: naming.name(number)?,
                        catalog: catalog.name.clone(),
                        number,
                        identity: identity(),
                        created: Timestamp::now(),
                    };
                    changes.put(machine.name.as_str(), &machine);
                }
                Ok::<_, HostError>(())
            })?;
        }
        Ok(())
    }

    /// Removes the records of machines and what was wanted of them. The files that they keep stay unless it is said that
    /// they go.
    pub(super) fn remove(&self, machines: &[Machine], with_data: bool) -> Result<(), HostError> {
        for batch in machines.chunks(BATCH) {
            self.objects.change(|changes| {
                batch.iter().try_for_each(|machine| forget(changes, &machine.name, with_data))
            })?;
        }
        Ok(())
    }

    /// Removes one machine, and its catalog's count goes down by it. `may_go` refuses, or becomes a condition.
    pub fn delete_machine(
        &self,
        machine: &Machine,
        with_data: bool,
        mut may_go: impl FnMut(&mut Changes) -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        let _counting = self.counting();
        self.objects.change(|changes| {
            may_go(changes)?;
            let mut catalog = self.found(changes, &machine.catalog, None)?;
            catalog.spec.count = catalog.spec.count.saturating_sub(1);
            spec::check(&catalog.name, &catalog.spec)?;
            changes.put(catalog.name.as_str(), &catalog);
            forget(changes, &machine.name, with_data)
        })
    }
}

/// How a catalog's machines differ from what it wants.
struct Difference {
    /// Those that it has too many: of the highest numbers.
    surplus: Vec<Machine>,
    /// The numbers of those that it has too few: the lowest that no machine has. None is higher than the count.
    missing: Vec<u32>,
}

fn differ(mut machines: Vec<Machine>, count: u32) -> Difference {
    machines.sort_by_key(|machine| machine.number);
    let (has, count) = (machines.len(), count as usize);
    let known: HashSet<u32> = machines.iter().map(|machine| machine.number).collect();
    let missing = (1..).filter(|number| !known.contains(number)).take(count.saturating_sub(has)).collect();
    Difference { surplus: machines.split_off(count.min(has)), missing }
}

/// Removes what is recorded of a machine.
fn forget(changes: &mut Changes, name: &Name, with_data: bool) -> Result<(), HostError> {
    let name = name.as_str();
    changes.delete::<Machine>(name);
    changes.delete::<Wanted>(name);
    match changes.get::<Belongings>(name)? {
        Some(kept) if with_data => changes.put(name, &Belongings { doomed: true, ..kept.value }),
        Some(_) => changes.delete::<Belongings>(name),
        None => {}
    }
    Ok(())
}

/// One that no other machine has.
fn identity() -> Identity {
    let uuid = uuid::Uuid::new_v4();
    let [a, b, c, d, e, ..] = uuid::Uuid::new_v4().into_bytes();
    // Administered locally, for one card.
    Identity { uuid: uuid.to_string(), mac: format!("02:{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}") }
}
