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
        let asking = Some(running.unwrap_or_else(|| tokio::task::spawn_blocking(ask)));
        let mut waiting = Waiting { query: self, asking };
        let found = tokio::time::timeout_at(until, waiting.asking.as_mut()?).await.ok()?;
        waiting.asking = None;
        found.ok()
    }

    fn running(&self) -> MutexGuard<'_, Option<JoinHandle<T>>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Somebody who waits for the query, and leaves it to the next one if there is no answer.
struct Waiting<'a, T: Send + 'static> {
    query: &'a LateQuery<T>,
    asking: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> Drop for Waiting<'_, T> {
    fn drop(&mut self) {
        if let Some(asking) = self.asking.take() {
            *self.query.running() = Some(asking);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::sync::mpsc;

    #[tokio::test]
    async fn what_hangs_is_asked_once_and_its_answer_is_taken_later() {
        let query = LateQuery::default();
        let (sender, receiver) = mpsc::channel();
        assert_eq!(query.answer(Instant::now(), move || receiver.recv().unwrap()).await, None);
        assert_eq!(query.answer(Instant::now(), || panic!("it is asked already")).await, None);
        // One who goes away while it waits leaves the query as well.
        let far = Instant::now() + std::time::Duration::from_secs(60);
        assert!(query.answer(far, || panic!("it is asked already")).now_or_never().is_none());
        assert_eq!(query.answer(Instant::now(), || panic!("it is asked already")).await, None);
        sender.send(7).unwrap();
        let until = Instant::now() + std::time::Duration::from_secs(60);
        assert_eq!(query.answer(until, || panic!("it is asked already")).await, Some(7));
        assert_eq!(query.answer(until, || 8).await, Some(8));
    }
}
