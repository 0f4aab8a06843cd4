//! The probe of a machine whose guest is waited for. Owns the task that finds out when it is ready, and what that has found out and
//! nobody has recorded yet.
//!
//! Invariant: what was found out is of the VMM that runs: it is forgotten with it.

use std::future::pending;
use tokio::task::JoinHandle;

/// Finds out when a guest is ready.
#[derive(Default)]
pub struct ReadinessProbe {
    running: Option<JoinHandle<Option<String>>>,
    /// It is ready, and perhaps where it is.
    answer: Option<Option<String>>,
}

impl ReadinessProbe {
    /// Whether one runs.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Begins with this question.
    pub fn begin(&mut self, question: impl Future<Output = Option<String>> + Send + 'static) {
        self.running = Some(tokio::spawn(question));
    }

    /// What was found out, which is to be recorded: it is ready, and perhaps where it is.
    pub fn answer(&self) -> Option<Option<String>> {
        self.answer.clone()
    }

    /// What was found out is of a VMM that is no more, or is recorded.
    pub fn stop(&mut self) {
        self.answer = None;
        if let Some(running) = self.running.take() {
            running.abort();
        }
    }

    /// Until it has found something out; for ever, if it does not run.
    pub async fn answers(&mut self) {
        let Some(running) = &mut self.running else { return pending().await };
        // It ends by itself only when it knows; one that has panicked knows nothing.
        let found = running.await.unwrap_or(None);
        (self.running, self.answer) = (None, Some(found));
    }
}
