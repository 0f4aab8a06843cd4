//! Answers that are reused for a while. Owns the last answer to each question.
//!
//! Invariant: however many ask the same, it is asked once at a time and at most once in that while; a question that hangs delays
//! only those who ask the same. What is kept is dropped when it is not reused any more.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;

/// The last answer to one question, and its time.
type Slot<V> = tokio::sync::Mutex<Option<(Instant, Arc<V>)>>;

/// Answers by question, each of which is reused for the same while.
pub struct RecentAnswers<K, V> {
    fresh: Duration,
    slots: Mutex<HashMap<K, Arc<Slot<V>>>>,
}

impl<K: Eq + Hash, V> RecentAnswers<K, V> {
    /// Answers are reused for so long.
    pub fn new(fresh: Duration) -> RecentAnswers<K, V> {
        RecentAnswers { fresh, slots: Mutex::default() }
    }

    /// Returns a recent answer to this question, or asks. Errors are not kept.
    pub async fn get<E>(&self, question: K, ask: impl Future<Output = Result<V, E>>) -> Result<Arc<V>, E> {
        let slot = self.slot(question);
        let mut last = slot.lock().await;
        if let Some((at, answer)) = &*last
            && at.elapsed() < self.fresh
        {
            return Ok(Arc::clone(answer));
        }
        let answer = Arc::new(ask.await?);
        *last = Some((Instant::now(), Arc::clone(&answer)));
        Ok(answer)
    }

    fn slot(&self, question: K) -> Arc<Slot<V>> {
        let mut slots = self.slots.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let is_fresh = |slot: &Slot<V>| {
            slot.try_lock().is_ok_and(|last| last.as_ref().is_some_and(|(at, _)| at.elapsed() < self.fresh))
        };
        // Whoever is waiting for an answer holds its slot.
        slots.retain(|_, slot| Arc::strong_count(slot) > 1 || is_fresh(slot));
        Arc::clone(slots.entry(question).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Asks twice at the same time for one answer, and once for another. Returns how often it was asked.
    async fn ask(answers: &RecentAnswers<&str, u32>, asked: &AtomicU32) -> u32 {
        let ask = |question| {
            answers.get(question, async {
                tokio::task::yield_now().await;
                Ok::<_, ()>(asked.fetch_add(1, Ordering::Relaxed))
            })
        };
        let (one, again, other) = tokio::join!(ask("a"), ask("a"), ask("b"));
        assert!(one.unwrap() != other.unwrap() && again.is_ok());
        asked.load(Ordering::Relaxed)
    }

    #[tokio::test]
    async fn the_same_is_asked_once_in_a_while() {
        let (answers, asked) = (RecentAnswers::new(Duration::from_secs(3600)), AtomicU32::new(0));
        assert_eq!((ask(&answers, &asked).await, ask(&answers, &asked).await), (2, 2));
        assert_eq!(answers.slots.lock().unwrap().len(), 2);
        // Without a while it is asked each time, and what is not reused any more is dropped.
        let (answers, asked) = (RecentAnswers::new(Duration::ZERO), AtomicU32::new(0));
        assert_eq!((ask(&answers, &asked).await, ask(&answers, &asked).await), (3, 6));
        assert_eq!(*answers.get("c", async { Ok::<_, ()>(1) }).await.unwrap(), 1);
        assert_eq!(answers.slots.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn what_hangs_or_fails_delays_nobody_else() {
        let answers = RecentAnswers::<_, u32>::new(Duration::from_secs(3600));
        {
            let hangs = answers.get("a", pending::<Result<u32, ()>>());
            let other = answers.get("b", async { Ok::<_, ()>(5) });
            tokio::select! {
                biased;
                _ = hangs => panic!("it does not end"),
                other = other => assert_eq!(other.as_deref(), Ok(&5)),
            }
        }
        assert_eq!(answers.get("a", async { Err(7) }).await, Err(7));
        assert_eq!(answers.get("a", async { Ok::<_, u32>(8) }).await.as_deref(), Ok(&8));
    }
}
