//! What takes long and goes on while its client may leave: imports, commits, checks of digests. Owns how far they are, in
//! memory: what they come to is in the objects that they change.
//!
//! Invariant: an operation ends once, and is known for a while after it has.

use crate::error::HostError;
use spillway_api::{ErrorCode, ImageRef, Operation, OperationState};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::watch;

/// Those that go on at a time.
const MOST_RUNNING: usize = 8;
/// Ended ones that are remembered.
const REMEMBERED: usize = 1000;

/// All operations since the daemon began. A clone is the same.
#[derive(Clone)]
pub struct Operations(Arc<Mutex<OperationTable>>);

impl Default for Operations {
    fn default() -> Operations {
        // A client must not take one for another that an earlier daemon told it of. JSON's numbers have 53 bits.
        let last = (jiff::Timestamp::now().as_second() as u64) << 20;
        Operations(Arc::new(Mutex::new(OperationTable { last, known: BTreeMap::new() })))
    }
}

struct OperationTable {
    last: u64,
    known: BTreeMap<u64, Arc<TrackedOperation>>,
}

struct TrackedOperation {
    id: u64,
    what: String,
    image: ImageRef,
    progress: Arc<Progress>,
    state: watch::Sender<OperationState>,
}

/// How far an operation is, and whether it is to stop.
#[derive(Default)]
pub struct Progress {
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    cancelled: AtomicBool,
}

impl Progress {
    /// So much in all.
    pub fn set_total(&self, bytes: u64) {
        self.total_bytes.store(bytes, Ordering::Relaxed);
    }

    /// So much is done.
    pub fn set_done(&self, bytes: u64) {
        self.done_bytes.store(bytes, Ordering::Relaxed);
    }

    /// So much more is done.
    pub fn add_done(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Whether it may go on: it may have been told to stop.
    pub fn goes_on(&self) -> Result<(), HostError> {
        match self.cancelled.load(Ordering::Relaxed) {
            true => Err(HostError::new(ErrorCode::Cancelled, "it was told to stop")),
            false => Ok(()),
        }
    }
}

impl Operations {
    /// Begins one on a thread of its own. It goes on until it ends, whoever waits for it. Refused while many do.
    pub fn begin(
        &self,
        what: String,
        image: ImageRef,
        work: impl FnOnce(&Progress) -> Result<(), HostError> + Send + 'static,
    ) -> Result<Operation, HostError> {
        let known = {
            let mut table = self.table();
            let running = table.known.values().filter(|known| !known.state.borrow().has_ended()).count();
            if running >= MOST_RUNNING {
                let message = format!("{running} operations go on: wait for one of them to end");
                return Err(HostError::new(ErrorCode::Exhausted, message));
            }
            table.last += 1;
            let progress = Arc::new(Progress::default());
            let state = watch::Sender::new(OperationState::Running);
            let known = Arc::new(TrackedOperation { id: table.last, what, image, progress, state });
            table.known.insert(known.id, Arc::clone(&known));
            table.forget();
            known
        };
        let described = known.describe();
        let ending = CompletionGuard(Some(known));
        let thread = std::thread::Builder::new().name("operation".into()).spawn(move || ending.after(work));
        let failed = |e| HostError::new(ErrorCode::Exhausted, format!("no thread can be started: {e}"));
        thread.map(|_| described).map_err(failed)
    }

    /// One of them when it has ended, or so late.
    pub async fn wait(&self, id: u64, at_most: std::time::Duration) -> Option<Operation> {
        let known = Arc::clone(self.table().known.get(&id)?);
        let mut state = known.state.subscribe();
        let _ = tokio::time::timeout(at_most, state.wait_for(OperationState::has_ended)).await;
        Some(known.describe())
    }

    /// All that are known, oldest first.
    pub fn list(&self) -> Vec<Operation> {
        self.table().known.values().map(|known| known.describe()).collect()
    }

    /// Asks one to stop. False: there is none.
    pub fn cancel(&self, id: u64) -> bool {
        let table = self.table();
        let known = table.known.get(&id);
        known.inspect(|known| known.progress.cancelled.store(true, Ordering::Relaxed)).is_some()
    }

    fn table(&self) -> MutexGuard<'_, OperationTable> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl OperationTable {
    fn forget(&mut self) {
        let ended = self.known.values().filter(|known| known.state.borrow().has_ended());
        let surplus = ended.clone().count().saturating_sub(REMEMBERED);
        let ids: Vec<u64> = ended.take(surplus).map(|known| known.id).collect();
        ids.iter().for_each(|id| _ = self.known.remove(id));
    }
}

/// Says how an operation has ended, whatever happens to its thread.
struct CompletionGuard(Option<Arc<TrackedOperation>>);

impl CompletionGuard {
    fn after(mut self, work: impl FnOnce(&Progress) -> Result<(), HostError>) {
        let Some(known) = self.0.as_ref() else { return };
        let end = match work(&known.progress) {
            Ok(()) => OperationState::Done,
            Err(error) => OperationState::Failed { error: error.problem() },
        };
        known.state.send_replace(end);
        self.0 = None;
    }
}

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        if let Some(known) = self.0.take() {
            let message = format!("{} was broken off: please report this", known.what);
            let error = HostError::new(ErrorCode::Internal, message).problem();
            known.state.send_replace(OperationState::Failed { error });
        }
    }
}

impl TrackedOperation {
    fn describe(&self) -> Operation {
        Operation {
            id: self.id,
            what: self.what.clone(),
            image: self.image.clone(),
            state: self.state.borrow().clone(),
            done_bytes: self.progress.done_bytes.load(Ordering::Relaxed),
            total_bytes: self.progress.total_bytes.load(Ordering::Relaxed),
        }
    }
}
