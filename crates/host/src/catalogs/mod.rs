//! Catalogs and the records of their machines. Owns how many there are and what they are called; starts none.
//!
//! Invariant: a machine's record is of a catalog that has one; what was not finished when the daemon ended is finished
//! when it starts.

mod naming;
mod spec;

use crate::error::HostError;
use crate::store::{Changes, Kind, Objects};
use crate::stores::Stores;
use jiff::Timestamp;
use spillway_api::{
    Catalog, CatalogSpec, ErrorCode, HistoryEntry, Identity, Image, ImageVersion, Machine, Name, VersionState,
};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

/// Records written in one transaction.
const BATCH: usize = 256;

impl Kind for Catalog {
    const PREFIX: &'static str = "catalogs/";
    const WORD: &'static str = "catalog";
}

impl Kind for Machine {
    const PREFIX: &'static str = "machines/";
    const WORD: &'static str = "machine";
}

/// The catalogs of a host. A clone is the same.
#[derive(Clone)]
pub struct Catalogs {
    objects: Objects,
    stores: Stores,
    /// Held while machines are recorded or removed: two catalogs must not take one name.
    counting: Arc<Mutex<()>>,
}

impl Catalogs {
    /// Those that the records name, each with as many machines as it wants.
    pub fn open(objects: Objects, stores: Stores) -> Result<Catalogs, HostError> {
        let catalogs = Catalogs { objects, stores, counting: Arc::default() };
        let all = catalogs.list()?;
        let known: Vec<&Name> = all.iter().map(|catalog| &catalog.name).collect();
        let machines = catalogs.machines(None)?;
        let lost: Vec<Machine> = machines.into_iter().filter(|m| !known.contains(&&m.catalog)).collect();
        catalogs.remove(&lost)?;
        all.iter().try_for_each(|catalog| catalogs.count(&catalogs.counting(), catalog))?;
        Ok(catalogs)
    }

    /// All, in the order of their names.
    pub fn list(&self) -> Result<Vec<Catalog>, HostError> {
        Ok(self.objects.list()?.into_iter().map(|catalog| catalog.value).collect())
    }

    /// One of them.
    pub fn get(&self, name: &Name) -> Result<Catalog, HostError> {
        match self.objects.get::<Catalog>(name.as_str())? {
            Some(catalog) => Ok(catalog.value),
            None => Err(self.none(name)),
        }
    }

    /// A new one. It is there, with its machines, when this returns.
    pub fn create(&self, name: &Name, spec: &CatalogSpec) -> Result<Catalog, HostError> {
        let counting = self.counting();
        let warnings = self.check(name, spec)?;
        self.names_are_free(name, spec)?;
        let catalog = self.objects.change(|changes| {
            if changes.get::<Catalog>(name.as_str())?.is_some() {
                return Err(HostError::new(
                    ErrorCode::Exists,
                    format!("there is a catalog '{name}' already"),
                ));
            }
            let version = self.version(changes, spec)?;
            let since = Timestamp::now();
            let catalog = Catalog {
                name: name.clone(),
                spec: spec.clone(),
                version,
                history: vec![HistoryEntry { image: spec.image.name.clone(), version, since }],
                created: since,
                warnings: warnings.clone(),
            };
            changes.put(name.as_str(), &catalog);
            Ok(catalog)
        })?;
        self.count(&counting, &catalog)?;
        Ok(catalog)
    }

    /// Other settings. Machines are recorded and removed as the count says.
    pub fn change(&self, name: &Name, spec: &CatalogSpec) -> Result<Catalog, HostError> {
        let counting = self.counting();
        let warnings = self.check(name, spec)?;
        let catalog = self.objects.change(|changes| {
            let Some(found) = changes.get::<Catalog>(name.as_str())? else { return Err(self.none(name)) };
            let mut catalog = found.value;
            let fixed = |what: &str| {
                HostError::new(
                    ErrorCode::Conflict,
                    format!("catalog {name}: its {what} cannot be changed: make another"),
                )
            };
            if catalog.spec.naming != spec.naming {
                return Err(fixed("naming"));
            }
            if catalog.spec.kind != spec.kind {
                return Err(fixed("type"));
            }
            let version = self.version(changes, spec)?;
            if (&catalog.spec.image.name, catalog.version) != (&spec.image.name, version) {
                let (image, since) = (spec.image.name.clone(), Timestamp::now());
                catalog.history.push(HistoryEntry { image, version, since });
            }
            (catalog.spec, catalog.version, catalog.warnings) = (spec.clone(), version, warnings.clone());
            changes.put(name.as_str(), &catalog);
            Ok(catalog)
        })?;
        self.count(&counting, &catalog)?;
        Ok(catalog)
    }

    /// Removes a catalog and its machines.
    pub fn delete(&self, name: &Name) -> Result<(), HostError> {
        let _counting = self.counting();
        // Machines without a catalog are removed at the next start, should this one not get there.
        self.objects.change(|changes| {
            if changes.get::<Catalog>(name.as_str())?.is_none() {
                return Err(self.none(name));
            }
            changes.delete::<Catalog>(name.as_str());
            Ok(())
        })?;
        self.remove(&self.machines(Some(name))?)
    }

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

    fn check(&self, name: &Name, spec: &CatalogSpec) -> Result<Vec<String>, HostError> {
        if let Some(store) = &spec.overflow_store {
            self.stores.get(store)?;
        }
        spec::check(name, spec)
    }

    /// The version that a catalog's machines take, which must be ready and stay so until the change is made.
    fn version(&self, changes: &mut Changes, spec: &CatalogSpec) -> Result<u32, HostError> {
        let image = &spec.image;
        let Some(found) = changes.get::<Image>(image.name.as_str())? else {
            let images = self.objects.list::<Image>()?;
            let names = images.iter().map(|image| image.name.as_str());
            return Err(HostError::not_found(Image::WORD, image.name.as_str(), names));
        };
        let published = || {
            let message = format!("no version of {} is published yet", image.name);
            found.value.published.ok_or_else(|| HostError::new(ErrorCode::Conflict, message))
        };
        let version = image.version.map_or_else(published, |version| Ok(version.get()))?;
        let record = changes.get::<ImageVersion>(&crate::images::key(&image.name, version))?;
        match record.map(|record| record.value.state) {
            Some(VersionState::Ready) => Ok(version),
            Some(_) => {
                let message = format!("{}:{version} is being imported or deleted", image.name);
                Err(HostError::new(ErrorCode::Conflict, message))
            }
            None => {
                let message = format!("there is no version {version} of {}", image.name);
                Err(HostError::new(ErrorCode::NotFound, message))
            }
        }
    }

    fn names_are_free(&self, name: &Name, spec: &CatalogSpec) -> Result<(), HostError> {
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

    /// Records machines that are missing, and removes those beyond the count.
    fn count(&self, _counting: &MutexGuard<()>, catalog: &Catalog) -> Result<(), HostError> {
        self.names_are_free(&catalog.name, &catalog.spec)?;
        let naming = spec::naming(&catalog.name, &catalog.spec)?;
        let machines = self.machines(Some(&catalog.name))?;
        let (_, surplus): (Vec<_>, Vec<_>) =
            machines.iter().cloned().partition(|machine| machine.number <= catalog.spec.count);
        self.remove(&surplus)?;
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

    fn remove(&self, machines: &[Machine]) -> Result<(), HostError> {
        for batch in machines.chunks(BATCH) {
            self.objects.change(|changes| {
                batch.iter().for_each(|machine| changes.delete::<Machine>(machine.name.as_str()));
                Ok::<_, HostError>(())
            })?;
        }
        Ok(())
    }

    fn counting(&self) -> MutexGuard<'_, ()> {
        self.counting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn none(&self, name: &Name) -> HostError {
        let catalogs = self.list().unwrap_or_default();
        let names = catalogs.iter().map(|catalog| catalog.name.as_str());
        HostError::not_found(Catalog::WORD, name.as_str(), names)
    }
}

/// One that no other machine has.
fn identity() -> Identity {
    let uuid = uuid::Uuid::new_v4();
    let [a, b, c, d, e, ..] = uuid::Uuid::new_v4().into_bytes();
    // Administered locally, for one card.
    Identity { uuid: uuid.to_string(), mac: format!("02:{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}") }
}
