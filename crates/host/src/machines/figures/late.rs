//! A blocking query whose answer may come too late for its caller. Owns the query that runs.
//!
//! Invariant: at most one runs, however often it is asked: what hangs costs one thread.

use std::sync::{Mutex, MutexGuard};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// A blocking query of which at most one runs.
pub struct LateQuery<T>(Mutex<Option<JoinHandle<T>>>);

impl<T> Default for LateQuery<T> {
    fn default() -> LateQuery<T> {
        LateQuery(Mutex::new(None))
    }
}

impl<T: Send + 'static> LateQuery<T> {
    /// Returns the answer if it comes in time; the answer of an earlier query if that still runs.
    pub async fn answer(&self, until: Instant, ask: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let running = self.running().take();
        let mut asking = running.unwrap_or_else(|| tokio::task::spawn_blocking(ask));
        match tokio::time::timeout_at(until, &mut asking).await {
            Ok(found) => found.ok(),
            Err(_) => {
                *self.running() = Some(asking);
                None
            }
        }
    }

    fn running(&self) -> MutexGuard<'_, Option<JoinHandle<T>>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[tokio::test]
    async fn what_hangs_is_asked_once_and_its_answer_is_taken_later() {
        let query = LateQuery::default();
        let (sender, receiver) = mpsc::channel();
        assert_eq!(query.answer(Instant::now(), move || receiver.recv().unwrap()).await, None);
        assert_eq!(query.answer(Instant::now(), || panic!("it is asked already")).await, None);
        sender.send(7).unwrap();
        let until = Instant::now() + std::time::Duration::from_secs(60);
        assert_eq!(query.answer(until, || panic!("it is asked already")).await, Some(7));
        assert_eq!(query.answer(until, || 8).await, Some(8));
    }
}
