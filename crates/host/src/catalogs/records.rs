//! The records of machines: as many as the catalog says, each with its name and its identity.
//!
//! Invariant: a name is of one machine of the host; an identity is given once.

use super::{Catalogs, spec};
use crate::error::HostError;
use crate::machines::belongings::Belongings;
use crate::machines::wanted::Wanted;
use crate::store::Kind;
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

    /// Refuses if a machine of another catalog has a name that this one's would have.
    pub(super) fn names_are_free(&self, name: &Name, spec: &CatalogSpec) -> Result<(), HostError> {
        let naming = spec::naming(name, spec)?;
        let machines = self.machines(None)?;
        let owners: HashMap<&str, &Name> = machines.iter().map(|m| (m.name.as_str(), &m.catalog)).collect();
        for number in 1..=spec.count {
            let machine = naming.name(number)?;
            if let Some(owner) = owners.get(machine.as_str()).filter(|owner| **owner != name) {
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
        let machines = self.machines(Some(&catalog.name))?;
        let (_, surplus): (Vec<_>, Vec<_>) =
            machines.iter().cloned().partition(|machine| machine.number <= catalog.spec.count);
        self.remove(&surplus, with_data)?;
        let known: HashSet<u32> = machines.iter().map(|machine| machine.number).collect();
        let missing: Vec<u32> = (1..=catalog.spec.count).filter(|number| !known.contains(number)).collect();
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
                for machine in batch {
                    let name = machine.name.as_str();
                    changes.delete::<Machine>(name);
                    changes.delete::<Wanted>(name);
                    match changes.get::<Belongings>(name)? {
                        Some(kept) if with_data => {
                            changes.put(name, &Belongings { doomed: true, ..kept.value });
                        }
                        Some(_) => changes.delete::<Belongings>(name),
                        None => {}
                    }
                }
                Ok::<_, HostError>(())
            })?;
        }
        Ok(())
    }
}

/// One that no other machine has.
fn identity() -> Identity {
    let uuid = uuid::Uuid::new_v4();
    let [a, b, c, d, e, ..] = uuid::Uuid::new_v4().into_bytes();
    // Administered locally, for one card.
    Identity { uuid: uuid.to_string(), mac: format!("02:{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}") }
}
