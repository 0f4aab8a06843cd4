//! Readiness probe of a guest. Owns the task that waits for the guest, and its result until that is recorded.
//!
//! Invariant: a result belongs to the VMM that runs, and is forgotten with it.

use std::future::pending;
use tokio::task::JoinHandle;

/// Finds out when a guest is ready.
#[derive(Default)]
pub struct ReadinessProbe {
    running: Option<JoinHandle<Option<String>>>,
    /// Result: the guest is ready, and its address if that is known.
    answer: Option<Option<String>>,
}

impl ReadinessProbe {
    /// Whether the probe runs.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Starts the probe.
    pub fn begin(&mut self, question: impl Future<Output = Option<String>> + Send + 'static) {
        self.running = Some(tokio::spawn(question));
    }

    /// Returns the result that should be recorded: the guest is ready, and its address if that is known.
    pub fn answer(&self) -> Option<Option<String>> {
        self.answer.clone()
    }

    /// Stops the probe and forgets its result.
    pub fn stop(&mut self) {
        self.answer = None;
        if let Some(running) = self.running.take() {
            running.abort();
        }
    }

    /// Waits for the result; forever, if the probe does not run.
    pub async fn answers(&mut self) {
        let Some(running) = &mut self.running else { return pending().await };
        // The task ends only with a result; one that has panicked has none.
        let found = running.await.unwrap_or(None);
        (self.running, self.answer) = (None, Some(found));
    }
}
