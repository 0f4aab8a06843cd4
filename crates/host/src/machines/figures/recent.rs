//! Answers that are reused for a while. Owns the last answer to each question.
//!
//! Invariant: however many ask the same, it is asked once at a time and at most once in that while; a question that hangs delays
//! only those who ask the same. What is kept is dropped when it is not reused any more.

use crate::error::HostError;
use spillway_api::ErrorCode;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;

/// Longest time for which it is reused that somebody did not answer.
const UNAVAILABLE_FRESH: Duration = Duration::from_secs(2);

/// The last answer to one question, and until when it is reused.
type Slot<V> = tokio::sync::Mutex<Option<(Instant, Result<Arc<V>, HostError>)>>;

/// Answers by question, each of which is reused for the same while.
pub struct RecentAnswers<K, V> {
    fresh: Duration,
    slots: Mutex<HashMap<K, Arc<Slot<V>>>>,
}

impl<K: Eq + Hash, V> RecentAnswers<K, V> {
    /// Answers are reused for so long, and the error `unavailable` for at most 2 seconds of it. Other errors are not reused: they come
    /// before anybody is asked.
    pub fn new(fresh: Duration) -> RecentAnswers<K, V> {
        RecentAnswers { fresh, slots: Mutex::default() }
    }

    /// Returns a recent answer to this question, or asks.
    pub async fn get(
        &self,
        question: K,
        ask: impl Future<Output = Result<V, HostError>>,
    ) -> Result<Arc<V>, HostError> {
        let slot = self.slot(question);
        let mut last = slot.lock().await;
        if let Some((until, answer)) = &*last
            && Instant::now() < *until
        {
            return answer.clone();
        }
        let answer = ask.await.map(Arc::new);
        let fresh = match &answer {
            Ok(_) => self.fresh,
            Err(e) if e.code == ErrorCode::Unavailable => self.fresh.min(UNAVAILABLE_FRESH),
            Err(_) => Duration::ZERO,
        };
        *last = Some((Instant::now() + fresh, answer.clone()));
        answer
    }

    fn slot(&self, question: K) -> Arc<Slot<V>> {
        let mut slots = self.slots.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let now = Instant::now();
        let is_fresh = |slot: &Slot<V>| {
            slot.try_lock().is_ok_and(|last| last.as_ref().is_some_and(|(until, _)| now < *until))
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
                Ok(asked.fetch_add(1, Ordering::Relaxed))
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
        assert_eq!(*answers.get("c", async { Ok(1) }).await.unwrap(), 1);
        assert_eq!(answers.slots.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn what_hangs_delays_nobody_else() {
        let answers = RecentAnswers::<_, u32>::new(Duration::from_secs(3600));
        {
            let hangs = answers.get("a", pending());
            let other = answers.get("b", async { Ok(5) });
            tokio::select! {
                biased;
                _ = hangs => panic!("it does not end"),
                other = other => assert_eq!(*other.unwrap(), 5),
            }
        }
        assert_eq!(*answers.get("a", async { Ok(8) }).await.unwrap(), 8);
    }

    #[tokio::test]
    async fn who_does_not_answer_is_asked_again_only_after_a_moment() {
        let answers = RecentAnswers::<_, u32>::new(Duration::from_secs(3600));
        let fail = |code| async move { Err(HostError::new(code, "no answer")) };
        let unavailable = || fail(ErrorCode::Unavailable);
        assert!(answers.get("a", fail(ErrorCode::Conflict)).await.is_err());
        assert!(answers.get("a", unavailable()).await.is_err());
        let again = answers.get("a", async { panic!("it was asked a moment ago") }).await;
        assert_eq!(again.unwrap_err().code, ErrorCode::Unavailable);
        let slot = Arc::clone(&answers.slots.lock().unwrap()["a"]);
        slot.lock().await.as_mut().unwrap().0 -= UNAVAILABLE_FRESH;
        assert_eq!(*answers.get("a", async { Ok(8) }).await.unwrap(), 8);
        // Where answers are reused for less, errors are too.
        let answers = RecentAnswers::<_, u32>::new(Duration::ZERO);
        assert!(answers.get("a", unavailable()).await.is_err());
        assert_eq!(*answers.get("a", async { Ok(9) }).await.unwrap(), 9);
    }
}
