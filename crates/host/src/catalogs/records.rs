//! Records of machines: as many as the catalog says, each with a name and an identity.
//!
//! Invariant: a name belongs to one machine of the host; an identity is used once.

use super::named::is_named;
use super::naming::NamePattern;
use super::{Catalogs, ChangedBy, spec};
use crate::error::HostError;
use crate::machines::MachineDeleteTerms;
use crate::machines::desired_state::DesiredState;
use crate::machines::leftovers;
use crate::store::{Changes, StoredRecord};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use spillway_api::{
    Catalog, CatalogSpec, DiskMode, ErrorCode, Identity, ImageVersion, Machine, Name, NewMachine, VmmKind,
    size_text,
};
use std::collections::{HashMap, HashSet};
use std::sync::MutexGuard;
use utoipa::ToSchema;

/// Number of records that one transaction writes at most.
const BATCH: usize = 256;
/// Number of machines that are searched for a similar name, for the error message.
const LOOKED_AT: usize = 256;

impl Catalogs {
    /// Returns all machines, or those of a catalog, in the order of their names.
    pub fn machines(&self, catalog: Option<&Name>) -> Result<Vec<Machine>, HostError> {
        let is_of = |machine: &Machine| catalog.is_none_or(|catalog| machine.catalog == *catalog);
        let mut found = Vec::new();
        for machine in self.objects.each_after::<Machine>("") {
            found.extend(Some(machine?.value).filter(is_of));
        }
        Ok(found)
    }

    /// Returns a machine.
    pub fn machine(&self, name: &Name) -> Result<Machine, HostError> {
        match self.objects.get::<Machine>(name.as_str())? {
            Some(machine) => Ok(machine.value),
            None => {
                // Looking up a missing machine must not cost more than an existing one.
                let some = self.objects.page::<Machine>("", LOOKED_AT)?;
                let names = some.objects.iter().map(|machine| machine.name.as_str());
                Err(HostError::not_found(Machine::WORD, name.as_str(), names))
            }
        }
    }

    /// Refuses if a machine of another catalog has a name that this catalog's machines would get.
    pub(super) fn check_names_free(&self, name: &Name, spec: &CatalogSpec) -> Result<(), HostError> {
        let naming = spec::naming(name, spec)?;
        let (own, others): (Vec<Machine>, Vec<Machine>) =
            self.machines(None)?.into_iter().partition(|machine| machine.catalog == *name);
        let owners: HashMap<&str, &Name> = others.iter().map(|m| (m.name.as_str(), &m.catalog)).collect();
        let taken = self.taken_numbers(&naming, &own, spec.count);
        for number in differ(own, &taken, spec.count).missing {
            let machine = naming.name(number)?;
            if let Some(owner) = owners.get(machine.as_str()) {
                let message =
                    format!("a machine '{machine}' is in the catalog '{owner}': give another naming");
                return Err(HostError::new(ErrorCode::Exists, message));
            }
        }
        Ok(())
    }

    /// Records missing machines, and removes those beyond the count, under the recorded conditions.
    pub(super) fn count(&self, counting: &MutexGuard<()>, catalog: &Catalog) -> Result<(), HostError> {
        if is_named(catalog) {
            return self.remove(counting, &catalog.name, &[]);
        }
        self.check_names_free(&catalog.name, &catalog.spec)?;
        let naming = spec::naming(&catalog.name, &catalog.spec)?;
        let count = catalog.spec.count;
        let own = self.machines(Some(&catalog.name))?;
        let taken = self.taken_numbers(&naming, &own, count);
        let MachineCountDifference { surplus, missing } = differ(own, &taken, count);
        self.remove(counting, &catalog.name, &surplus)?;
        for numbers in missing.chunks(BATCH) {
            self.objects.change(|changes| {
                for &number in numbers {
                    let machine = Machine {
                        name: naming.name(number)?,
                        catalog: catalog.name.clone(),
                        number,
                        identity: identity(),
                        size_bytes: None,
                        created: Timestamp::now(),
                    };
                    changes.put(machine.name.as_str(), &machine);
                }
                Ok::<_, HostError>(())
            })?;
        }
        Ok(())
    }

    /// Refuses if one of these machines is claimed, unless `force` is set.
    pub(super) fn check_none_claimed(
        &self,
        changes: &mut Changes,
        machines: &[Machine],
        force: bool,
    ) -> Result<(), HostError> {
        for machine in machines.iter().filter(|_| !force) {
            let wanted = changes.get::<DesiredState>(machine.name.as_str())?;
            if wanted.is_some_and(|wanted| wanted.value.claim.is_some()) {
                let name = &machine.name;
                let message = format!(
                    "{name} is claimed: release it first ('spillway machine release {name}'), or say that this does not \
                     matter (--force)"
                );
                return Err(HostError::new(ErrorCode::InUse, message));
            }
        }
        Ok(())
    }

    /// Returns the machines beyond this count.
    pub(super) fn surplus(&self, catalog: &Name, count: u32) -> Result<Vec<Machine>, HostError> {
        let machines = self.machines(Some(catalog))?;
        let taken = match self.objects.get::<Catalog>(catalog.as_str())? {
            // They are given up one by one.
            Some(found) if is_named(&found.value) => return Ok(Vec::new()),
            Some(found) => self.taken_numbers(&spec::naming(catalog, &found.value.spec)?, &machines, count),
            None => TakenNumbers::default(),
        };
        Ok(differ(machines, &taken, count).surplus)
    }

    /// Returns the numbers that no new machine may have, besides those of the catalog's own machines.
    fn taken_numbers(&self, naming: &NamePattern, own: &[Machine], count: u32) -> TakenNumbers {
        // A machine that was given its name may have one of the pattern with another number.
        let named = own.iter().filter_map(|machine| naming.number(&machine.name)).collect();
        TakenNumbers { unreadable: self.unreadable_numbers(naming, count), named }
    }

    /// Returns the numbers of machines of this pattern whose records cannot be read. They count as existing, since
    /// something of them may run.
    fn unreadable_numbers(&self, naming: &NamePattern, count: u32) -> HashSet<u32> {
        let names: HashSet<String> = self.objects.unreadable_names::<Machine>().into_iter().collect();
        let most = count.saturating_add(u32::try_from(names.len()).unwrap_or(u32::MAX));
        let is_one = |number: &u32| naming.name(*number).is_ok_and(|name| names.contains(name.as_str()));
        if names.is_empty() { HashSet::new() } else { (1..=most).filter(is_one).collect() }
    }

    /// Removes the records of a catalog's machines and their desired states. Their kept files stay unless the catalog's
    /// removal record says otherwise. Then ends the removal.
    pub(super) fn remove(
        &self,
        _counting: &MutexGuard<()>,
        catalog: &Name,
        machines: &[Machine],
    ) -> Result<(), HostError> {
        let removal = self.objects.get::<Removal>(catalog.as_str())?;
        let with_data = removal.as_ref().is_some_and(|removal| removal.value.with_data);
        for batch in machines.chunks(BATCH) {
            self.objects
                .change(|changes| batch.iter().try_for_each(|machine| forget(changes, machine, with_data)))?;
        }
        if removal.is_some() {
            self.objects.change(|changes| {
                changes.delete::<Removal>(catalog.as_str());
                Ok::<_, HostError>(())
            })?;
        }
        Ok(())
    }

    /// Removes one machine and lowers its catalog's count. `may_go` may refuse: the tag is not checked here.
    pub fn delete_machine(
        &self,
        machine: &Machine,
        terms: MachineDeleteTerms,
        mut may_go: impl FnMut(&mut Changes) -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        let _counting = self.counting();
        self.objects.change(|changes| {
            may_go(changes)?;
            let mut catalog = self.found(changes, &machine.catalog, None, terms.by)?;
            catalog.spec.count = catalog.spec.count.saturating_sub(1);
            if matches!(terms.by, ChangedBy::Fleet { .. }) {
                // The fleet gives each host its part of the warm machines, which is at most its share.
                catalog.spec.warm = catalog.spec.warm.min(catalog.spec.count);
            }
            spec::check(&catalog.name, &catalog.spec)?;
            changes.put(catalog.name.as_str(), &catalog);
            forget(changes, machine, terms.with_data)?;
            if terms.dry_run {
                changes.forget();
            }
            Ok(())
        })
    }
}

impl Catalogs {
    /// Adds a machine of this name to a catalog of external machines, and raises its count by one. The flag is `true` if the
    /// catalog has such a machine already.
    pub fn add_machine(&self, catalog: &Name, new: &NewMachine) -> Result<(Machine, bool), HostError> {
        let _counting = self.counting();
        let others = self.machines(Some(catalog))?;
        self.objects.change(|changes| {
            let mut found = whole(changes, catalog)?;
            if let Some(there) = changes.get::<Machine>(new.name.as_str())?.map(|there| there.value) {
                return match there.catalog == *catalog && there.size_bytes == new.size_bytes {
                    true => Ok((there, true)),
                    false => Err(already_there(&there, catalog)),
                };
            }
            if found.spec.hardware.vmm != VmmKind::External {
                let message = format!(
                    "catalog {catalog}: its machines are made by its count: machines are added by name where vmm is external"
                );
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            self.check_size(changes, &found, &new.name, new.size_bytes)?;
            let naming = spec::naming(catalog, &found.spec)?;
            let taken = self.taken_numbers(&naming, &others, found.spec.count);
            let count = found.spec.count.saturating_add(1);
            found.spec.count = count;
            spec::check(catalog, &found.spec)?;
            let number = differ(others.clone(), &taken, count).missing.first().copied();
            // The records of some machines cannot be read: one beyond all.
            let number = number.unwrap_or_else(|| others.iter().map(|other| other.number).max().unwrap_or(0) + 1);
            let machine = Machine {
                name: new.name.clone(),
                catalog: catalog.clone(),
                number: naming.number(&new.name).filter(|own| !is_used(&others, *own)).unwrap_or(number),
                identity: identity(),
                size_bytes: new.size_bytes,
                created: Timestamp::now(),
            };
            changes.put(catalog.as_str(), &found);
            changes.put(machine.name.as_str(), &machine);
            Ok((machine, false))
        })
    }

    /// Gives a machine's disk another size. `may_change` may refuse.
    pub fn resize_machine(
        &self,
        name: &Name,
        size_bytes: u64,
        mut may_change: impl FnMut(&mut Changes) -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        self.objects.change(|changes| {
            let found = changes.get::<Machine>(name.as_str())?;
            let mut machine =
                found.ok_or_else(|| HostError::not_found(Machine::WORD, name.as_str(), []))?.value;
            if machine.size_bytes == Some(size_bytes) {
                return Ok(());
            }
            may_change(changes)?;
            let catalog = whole(changes, &machine.catalog)?;
            if catalog.spec.hardware.vmm != VmmKind::External {
                let message =
                    format!("{name}: its disk has the size of its image: sizes are for external machines");
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            if machine.size_bytes.is_some_and(|before| before > size_bytes) {
                let message =
                    format!("{name}: its disk cannot shrink: what is behind its new end would be lost");
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            self.check_size(changes, &catalog, name, Some(size_bytes))?;
            machine.size_bytes = Some(size_bytes);
            changes.put(name.as_str(), &machine);
            Ok(())
        })
    }

    /// Refuses a size that a disk of this catalog cannot have.
    fn check_size(
        &self,
        changes: &mut Changes,
        catalog: &Catalog,
        name: &Name,
        size_bytes: Option<u64>,
    ) -> Result<(), HostError> {
        let Some(size_bytes) = size_bytes else { return Ok(()) };
        let mode = catalog.spec.mode();
        if catalog.spec.keeps_writes() {
            let message =
                format!("{name}: a disk that is kept while its machine is off has the size of its image");
            return Err(HostError::invalid(message));
        }
        if matches!(mode, DiskMode::Persistent | DiskMode::Ephemeral) {
            let mode = mode.name();
            return Err(HostError::invalid(format!(
                "{name}: a disk of mode {mode} has the size of its image"
            )));
        }
        let image = &catalog.spec.image.name;
        let version = changes.get::<ImageVersion>(&crate::images::key(image, catalog.version))?;
        let least = version.map_or(0, |version| version.value.size_bytes);
        match size_bytes < least {
            true => Err(HostError::invalid(format!(
                "{name}: {} is less than the {} of {image}:{}",
                size_text(size_bytes),
                size_text(least),
                catalog.version
            ))),
            false => Ok(()),
        }
    }
}

fn is_used(machines: &[Machine], number: u32) -> bool {
    machines.iter().any(|machine| machine.number == number)
}

fn already_there(there: &Machine, catalog: &Name) -> HostError {
    let Machine { name, catalog: owner, .. } = there;
    let message = match owner == catalog {
        true => {
            format!("a machine '{name}' is in the catalog already, and its disk has another size: resize it")
        }
        false => format!("a machine '{name}' is in the catalog '{owner}': give another name"),
    };
    HostError::new(ErrorCode::Exists, message)
}

/// Record of a removal of machines in progress. It is written with the change of the count and deleted at the end, so
/// that an interrupted removal is completed under the same conditions.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(super) struct Removal {
    /// Whether the machines' kept files are deleted too.
    pub with_data: bool,
}

impl StoredRecord for Removal {
    const PREFIX: &'static str = "removals/";
    const WORD: &'static str = "removal";
}

/// Returns a catalog none of whose machines is being removed. The transaction fails if that changes before its commit.
pub(crate) fn whole(changes: &mut Changes, catalog: &Name) -> Result<Catalog, HostError> {
    let found = changes.get::<Catalog>(catalog.as_str())?;
    let found = found.ok_or_else(|| HostError::not_found("catalog", catalog.as_str(), []))?;
    match changes.get::<Removal>(catalog.as_str())? {
        None => Ok(found.value),
        Some(_) => Err(being_removed_error(catalog.as_str())),
    }
}

fn being_removed_error(catalog: &str) -> HostError {
    let message = format!("machines of the catalog '{catalog}' are being removed: try again");
    HostError::new(ErrorCode::Conflict, message)
}

/// Refuses while machines are being removed, because their leftovers are not recorded yet.
pub(crate) fn check_no_removal(changes: &mut Changes) -> Result<(), HostError> {
    match changes.list_below::<Removal>("")?.first() {
        None => Ok(()),
        Some(removal) => Err(being_removed_error(&removal.name)),
    }
}

/// Difference between a catalog's machines and its count.
struct MachineCountDifference {
    /// Surplus machines, those with the highest numbers.
    surplus: Vec<Machine>,
    /// Numbers of missing machines: the lowest free ones, none above the count.
    missing: Vec<u32>,
}

/// Numbers that no new machine may have.
#[derive(Debug, Default)]
struct TakenNumbers {
    /// Of machines whose records cannot be read. They count as machines.
    unreadable: HashSet<u32>,
    /// In names of machines that have other numbers.
    named: HashSet<u32>,
}

fn differ(mut machines: Vec<Machine>, taken: &TakenNumbers, count: u32) -> MachineCountDifference {
    machines.sort_by_key(|machine| machine.number);
    let (has, count) = (machines.len(), (count as usize).saturating_sub(taken.unreadable.len()));
    let numbers = machines.iter().map(|machine| machine.number);
    let known: HashSet<u32> =
        numbers.chain(taken.unreadable.iter().copied()).chain(taken.named.iter().copied()).collect();
    let missing = (1..).filter(|number| !known.contains(number)).take(count.saturating_sub(has)).collect();
    MachineCountDifference { surplus: machines.split_off(count.min(has)), missing }
}

/// Removes the records of a machine.
pub(super) fn forget(changes: &mut Changes, machine: &Machine, with_data: bool) -> Result<(), HostError> {
    changes.delete::<Machine>(machine.name.as_str());
    // Nothing runs of a machine without a desired state, so no task needs to be woken.
    if changes.get::<DesiredState>(machine.name.as_str())?.is_some() {
        changes.delete::<DesiredState>(machine.name.as_str());
    }
    leftovers::record(changes, machine, with_data)
}

/// Creates a unique identity.
fn identity() -> Identity {
    let uuid = uuid::Uuid::new_v4();
    let [a, b, c, d, e, ..] = uuid::Uuid::new_v4().into_bytes();
    // A locally administered unicast address.
    Identity { uuid: uuid.to_string(), mac: format!("02:{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogs::HostSettings;
    use crate::machines::belongings::Belongings;
    use crate::machines::leftovers::check_no_leftover_needs;
    use crate::resources::budget::NO_LIMITS;
    use crate::store::{Objects, SqliteStore};
    use crate::stores::Stores;
    use serde_json::json;
    use spillway_api::Hypervisor;
    use std::sync::Arc;

    /// The daemon was killed when the catalog was gone, and its machines, which keep something, were not yet.
    #[test]
    fn a_removal_that_was_broken_off_goes_on_as_it_was_meant() {
        let dir = tempfile::tempdir().unwrap();
        for (n, with_data) in [true, false].into_iter().enumerate() {
            let objects = SqliteStore::open(&dir.path().join(format!("db{n}"))).unwrap();
            let objects = Objects::new(Arc::new(objects));
            let stores = Stores::open(objects.clone(), &dir.path().join(format!("store{n}"))).unwrap();
            let machine = |number: u32| -> Machine {
                let identity = json!({ "uuid": format!("uuid-{number}"), "mac": "02:00:00:00:00:01" });
                let name = format!("own-{number}");
                let machine = json!({
                    "name": name, "catalog": "own", "number": number, "identity": identity, "created": Timestamp::now(),
                });
                serde_json::from_value(machine).unwrap()
            };
            let had = |number: u32, image: &str| -> Belongings {
                let disk = json!({
                    "path": "/nowhere/disk", "made": true, "image": image, "version": 3, "resets": 0,
                });
                let host_key = json!({ "private": "", "public": "" });
                let had = json!({ "uuid": format!("uuid-{number}"), "host_key": host_key, "data": null, "disk": disk });
                serde_json::from_value(had).unwrap()
            };
            objects
                .change(|changes| {
                    for number in [1, 2] {
                        changes.put(&format!("own-{number}"), &machine(number));
                        changes.put(&format!("own-{number}"), &had(number, "debian"));
                    }
                    changes.put("own", &Removal { with_data });
                    Ok::<_, HostError>(())
                })
                .unwrap();
            let image = "debian".parse().unwrap();
            let is_busy = objects.change(check_no_removal).unwrap_err();
            assert_eq!(is_busy.code, ErrorCode::Conflict);
            let host = HostSettings {
                capacity: NO_LIMITS,
                hypervisor: Hypervisor::None,
                machines: "/machines".into(),
                takes_calls: false,
                fleet: None,
            };
            let images = crate::images::Images::of_whole(&objects, &stores);
            let catalogs =
                Catalogs::open(objects.clone(), stores, images, host, &mut |line| panic!("{line}")).unwrap();
            assert_eq!(catalogs.machines(None).unwrap(), []);
            assert!(objects.list::<Belongings>().unwrap().is_empty());
            objects.change(check_no_removal).unwrap();
            let needed =
                objects.change(|changes| check_no_leftover_needs(changes, &image, Some(3))).unwrap_err();
            assert_eq!(needed.code, ErrorCode::InUse, "until its file is gone");
            objects.change(|changes| check_no_leftover_needs(changes, &image, Some(2))).unwrap();
            let removed = objects.list::<leftovers::LeftoverFiles>().unwrap();
            let removed: Vec<bool> = removed.iter().map(|left| left.value.is_to_be_removed()).collect();
            assert_eq!(removed, [with_data; 2]);
        }
    }
}
