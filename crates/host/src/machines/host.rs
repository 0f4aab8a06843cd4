//! Effects of the host's state on its machines: caches shrink when memory is short, and machines cannot be claimed when
//! the store of their overflow is nearly full. Owns the last readings of memory and stores.
//!
//! Invariant: each change of state raises one event.

use super::blocking;
use super::registry::MachineRegistry;
use crate::error::HostError;
use crate::events::Events;
use crate::resources::memory::{CachePressure, available_bytes};
use crate::resources::space::{self, SpaceHistory};
use crate::stores::Stores;
use spillway_api::{CatalogSpec, EventKind, Name, Space, SpaceLevel, StoreDetails, StoreFolder};
use spillway_control::bytes;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

const MEMORY_EACH: Duration = Duration::from_secs(1);
const SPACE_EACH: Duration = Duration::from_secs(10);

/// Watches the host's available memory.
pub struct MemoryWatch {
    squeeze: Mutex<CachePressure>,
    /// Caches shrink when less than this is available.
    floor_bytes: u64,
    events: Events,
    registry: Arc<MachineRegistry>,
}

impl MemoryWatch {
    /// Creates a watch without a reading.
    pub fn new(floor_bytes: u64, events: Events, registry: Arc<MachineRegistry>) -> MemoryWatch {
        MemoryWatch { squeeze: Mutex::default(), floor_bytes, events, registry }
    }

    /// Returns how much caches must currently shrink towards their guarantees.
    pub fn squeeze(&self) -> CachePressure {
        *self.lock()
    }

    /// Watches memory for as long as the daemon runs.
    pub async fn watch(self: Arc<MemoryWatch>) {
        loop {
            if let Ok(available) = available_bytes() {
                self.look(available);
            }
            tokio::time::sleep(MEMORY_EACH).await;
        }
    }

    /// Processes a reading of the available memory.
    pub(super) fn look(&self, available: u64) {
        let before = self.squeeze();
        let after = before.after(available, self.floor_bytes);
        if after != before {
            *self.lock() = after;
            self.registry.wake_all();
        }
        let (left, floor) = (bytes(available), bytes(self.floor_bytes));
        let told = match (before.is_on(), after.is_on()) {
            (false, true) => Some(format!("{left} are available, less than {floor}: caches shrink")),
            (true, false) => Some(format!("{left} are available: caches have their full limits again")),
            _ => None,
        };
        told.into_iter().for_each(|text| self.events.raise(EventKind::Memory, "host", text));
    }

    fn lock(&self) -> MutexGuard<'_, CachePressure> {
        self.squeeze.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Last reading of each store, by name; none while it cannot be read.
type StoreLevels = HashMap<Name, (SpaceHistory, Option<Space>)>;

/// Watches how full the stores are.
pub struct SpaceWatch {
    levels: Mutex<StoreLevels>,
    stores: Stores,
    events: Events,
}

impl SpaceWatch {
    /// Watches these stores from now on.
    pub fn watched(stores: Stores, events: Events) -> Arc<SpaceWatch> {
        let watch = Arc::new(SpaceWatch { levels: Mutex::default(), stores, events });
        tokio::spawn(Arc::clone(&watch).watch());
        watch
    }

    /// Watches the stores for as long as the daemon runs.
    async fn watch(self: Arc<SpaceWatch>) {
        loop {
            let looking = Arc::clone(&self);
            if let Err(error) = blocking(move || looking.look()).await {
                self.events.raise(EventKind::Failed, "host", format!("stores are not watched: {error}"));
            }
            tokio::time::sleep(SPACE_EACH).await;
        }
    }

    /// Returns the host's stores with their last readings.
    pub fn details(&self) -> Result<Vec<StoreDetails>, HostError> {
        let stores = self.stores.list()?;
        let levels = self.levels();
        let details = |folder: StoreFolder| {
            let space = levels.get(&folder.name).and_then(|(_, space)| space.clone());
            StoreDetails::new(folder, space)
        };
        Ok(stores.into_iter().map(details).collect())
    }

    /// Whether the store that would hold a machine's overflow is nearly full.
    pub fn is_nearly_full(&self, spec: &CatalogSpec) -> Result<bool, HostError> {
        let store = self.stores.for_disks(spec.overflow_store.as_ref())?;
        Ok(self.levels().get(&store.name).is_some_and(|(_, space)| {
            space.as_ref().is_some_and(|space| space.level == SpaceLevel::Critical)
        }))
    }

    fn look(&self) -> Result<(), HostError> {
        for store in self.stores.list()? {
            // Of a store that is not mounted, the folder is on another file system.
            let found = self.stores.check(&store).ok().and_then(|()| space::of(&store.path).ok());
            let mut levels = self.levels();
            let (history, last) = levels.entry(store.name.clone()).or_default();
            // It raises an event when it is used.
            let Some((total, free)) = found else {
                *last = None;
                continue;
            };
            let (space, changed) = history.look(Instant::now(), total, free);
            if changed {
                let object = format!("store/{}", store.name);
                self.events.raise(EventKind::Space, &object, space::words(&space));
            }
            *last = Some(space);
        }
        Ok(())
    }

    fn levels(&self) -> MutexGuard<'_, StoreLevels> {
        self.levels.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Objects, SqliteStore};

    #[test]
    fn the_space_of_a_store_that_is_not_mounted_is_not_known() {
        let dir = tempfile::tempdir().unwrap();
        let objects = Objects::new(Arc::new(SqliteStore::open(&dir.path().join("db")).unwrap()));
        let [folder, elsewhere] = ["store", "elsewhere"].map(|name| dir.path().join(name));
        let stores = Stores::open(objects, &folder).unwrap();
        let watch = SpaceWatch { levels: Mutex::default(), stores, events: Events::default() };
        let is_known = || {
            watch.look().unwrap();
            watch.details().unwrap()[0].space.is_some()
        };
        assert!(is_known());
        std::fs::rename(&folder, &elsewhere).unwrap();
        assert!(!is_known());
        // As after an unmount.
        std::fs::create_dir(&folder).unwrap();
        assert!(!is_known());
        std::fs::remove_dir(&folder).unwrap();
        std::fs::rename(&elsewhere, &folder).unwrap();
        assert!(is_known());
    }
}
