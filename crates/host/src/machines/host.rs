//! What the host's state means for its machines: caches shrink when memory is short, and machines are not given away when
//! the store of their overflow is nearly full. Owns what was seen of the stores.
//!
//! Invariant: a change of state is told once.

use super::{Shared, blocking};
use crate::error::HostError;
use crate::resources::memory::{Squeeze, available_bytes};
use crate::resources::space::{self, Room};
use spillway_api::{CatalogSpec, EventKind, Name, Space, SpaceLevel, StoreDetails, StoreFolder};
use spillway_control::bytes;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MEMORY_EACH: Duration = Duration::from_secs(1);
const SPACE_EACH: Duration = Duration::from_secs(10);

/// Stores by name, as they were seen last.
pub type Rooms = HashMap<Name, (Room, Option<Space>)>;

/// Keeps an eye on memory for as long as the daemon lives.
pub async fn watch_memory(shared: Arc<Shared>) {
    loop {
        if let Ok(available) = available_bytes() {
            let before = shared.squeeze();
            let after = before.after(available, shared.parts.memory_floor_bytes);
            if after != before {
                *shared.squeeze.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = after;
                shared.poke_kept(|_| true);
            }
            let (left, floor) = (bytes(available), bytes(shared.parts.memory_floor_bytes));
            let told = match (before.is_on(), after.is_on()) {
                (false, true) => Some(format!("{left} are available, less than {floor}: caches shrink")),
                (true, false) => Some(format!("{left} are available: caches have what they had")),
                _ => None,
            };
            told.into_iter().for_each(|text| shared.events.raise(EventKind::Memory, "host", text));
        }
        tokio::time::sleep(MEMORY_EACH).await;
    }
}

/// Keeps an eye on the stores for as long as the daemon lives.
pub async fn watch_space(shared: Arc<Shared>) {
    loop {
        let looking = Arc::clone(&shared);
        if let Err(error) = blocking(move || looking.look_at_stores()).await {
            shared.events.raise(EventKind::Failed, "host", format!("stores are not watched: {error}"));
        }
        tokio::time::sleep(SPACE_EACH).await;
    }
}

impl Shared {
    /// How much of what is above their guarantees caches may have now.
    pub(super) fn squeeze(&self) -> Squeeze {
        *self.squeeze.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn look_at_stores(&self) -> Result<(), HostError> {
        for store in self.stores.list()? {
            // One that is not mounted is told of when it is used.
            let Ok((total, free)) = space::of(&store.path) else { continue };
            let mut rooms = self.rooms.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let room = &mut rooms.entry(store.name.clone()).or_default().0;
            let (space, changed) = room.look(Instant::now(), total, free);
            if changed {
                let object = format!("store/{}", store.name);
                self.events.raise(EventKind::Space, &object, space::words(&space));
            }
            if let Some((_, last)) = rooms.get_mut(&store.name) {
                *last = Some(space);
            }
        }
        Ok(())
    }

    /// The stores, each as it was seen last.
    pub(super) fn store_details(&self) -> Result<Vec<StoreDetails>, HostError> {
        let stores = self.stores.list()?;
        let rooms = self.rooms.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let details = |folder: StoreFolder| {
            let space = rooms.get(&folder.name).and_then(|(_, space)| space.clone());
            StoreDetails::new(folder, space)
        };
        Ok(stores.into_iter().map(details).collect())
    }

    /// Whether the store that a machine's overflow would be in is nearly full.
    pub(super) fn has_no_room(&self, spec: &CatalogSpec) -> Result<bool, HostError> {
        let store = self.stores.for_disks(spec.overflow_store.as_ref())?;
        let rooms = self.rooms.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Ok(rooms.get(&store.name).is_some_and(|(_, space)| {
            space.as_ref().is_some_and(|space| space.level == SpaceLevel::Critical)
        }))
    }
}
