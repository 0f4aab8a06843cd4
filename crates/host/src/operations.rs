//! Operations: long work that continues without its client, such as imports, commits and checks of digests. Owns their
//! progress in memory; their results are in the objects that they change.
//!
//! Invariant: an operation ends once, and is listed for a while after it has ended.

use crate::error::HostError;
use spillway_api::{ErrorCode, ImageRef, Operation, OperationOutcome, OperationState};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::watch;

/// Number of operations that may run at the same time.
const MOST_RUNNING: usize = 8;
/// Number of ended operations that are listed.
const REMEMBERED: usize = 1000;

/// All operations since the daemon started. A clone is the same operations.
#[derive(Clone)]
pub struct Operations(Arc<Mutex<OperationTable>>);

impl Default for Operations {
    fn default() -> Operations {
        // Ids differ from those of an earlier daemon, which clients may still know. Numbers in JSON have 53 bits.
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
    image: Option<ImageRef>,
    progress: Arc<Progress>,
    state: watch::Sender<OperationState>,
}

/// Progress and cancellation of an operation.
#[derive(Default)]
pub struct Progress {
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    /// What earlier phases have done.
    earlier_bytes: AtomicU64,
    cancelled: AtomicBool,
    outcome: Mutex<Option<OperationOutcome>>,
}

impl Progress {
    /// Sets the total.
    pub fn set_total(&self, bytes: u64) {
        self.total_bytes.store(self.earlier(bytes), Ordering::Relaxed);
    }

    /// Sets what is done.
    pub fn set_done(&self, bytes: u64) {
        self.done_bytes.store(self.earlier(bytes), Ordering::Relaxed);
    }

    /// Begins another phase: from now on totals and what is done are added to what was done before.
    pub fn begin_phase(&self) {
        self.earlier_bytes.store(self.done_bytes.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn earlier(&self, bytes: u64) -> u64 {
        self.earlier_bytes.load(Ordering::Relaxed).saturating_add(bytes)
    }

    /// Adds to what is done.
    pub fn add_done(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Sets the result, before the end.
    pub fn set_outcome(&self, outcome: OperationOutcome) {
        *self.outcome() = Some(outcome);
    }

    fn outcome(&self) -> MutexGuard<'_, Option<OperationOutcome>> {
        self.outcome.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns an error if the operation was cancelled.
    pub fn goes_on(&self) -> Result<(), HostError> {
        match self.cancelled.load(Ordering::Relaxed) {
            true => Err(HostError::new(ErrorCode::Cancelled, "it was cancelled")),
            false => Ok(()),
        }
    }
}

impl Operations {
    /// Describes a new operation. It starts with `begin`.
    pub fn describe(&self, what: String, image: Option<ImageRef>) -> Operation {
        let mut table = self.table();
        table.last += 1;
        Operation {
            id: table.last,
            what,
            image,
            state: OperationState::Running,
            done_bytes: 0,
            total_bytes: 0,
            outcome: None,
        }
    }

    /// Starts an operation on a thread of its own; it runs to its end whoever waits for it. Refused while too many run.
    pub fn begin(
        &self,
        operation: Operation,
        work: impl FnOnce(&Progress) -> Result<(), HostError> + Send + 'static,
    ) -> Result<Operation, HostError> {
        let known = {
            let mut table = self.table();
            let running = table.known.values().filter(|known| !known.state.borrow().has_ended()).count();
            if running >= MOST_RUNNING {
                let message = format!("{running} operations are running: wait for one of them to end");
                return Err(HostError::new(ErrorCode::Exhausted, message));
            }
            let Operation { id, what, image, state, .. } = operation;
            let (progress, state) = (Arc::new(Progress::default()), watch::Sender::new(state));
            let known = Arc::new(TrackedOperation { id, what, image, progress, state });
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

    /// Returns an operation when it has ended, or after this time.
    pub async fn wait(&self, id: u64, at_most: std::time::Duration) -> Option<Operation> {
        let known = Arc::clone(self.table().known.get(&id)?);
        let mut state = known.state.subscribe();
        let _ = tokio::time::timeout(at_most, state.wait_for(OperationState::has_ended)).await;
        Some(known.describe())
    }

    /// Returns all known operations, oldest first.
    pub fn list(&self) -> Vec<Operation> {
        self.table().known.values().map(|known| known.describe()).collect()
    }

    /// Cancels an operation. Returns `false` if it does not exist.
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

/// Sets how an operation has ended, even if its thread panics.
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
            let message = format!("{} was interrupted by a fault: please report this", known.what);
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
            outcome: self.progress.outcome().clone(),
        }
    }
}
