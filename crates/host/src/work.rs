//! Work that may block, on threads for that. A thread cannot be stopped: what was begun for a request goes on when its
//! client has gone. Owns what such work keeps meanwhile.
//!
//! Invariant: what is done for a request keeps the request's place, so that the limits of requests bound it, too; of what
//! is done for responses that are under way, little is done at a time.

use std::any::Any;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::JoinError;

tokio::task_local! {
    /// Place of the request that is being answered.
    static PLACE: Arc<dyn Any + Send + Sync>;
}

/// Answers a request, whose place is free again when neither the answer nor any work for it goes on.
pub async fn for_request<T>(place: impl Any + Send + Sync, answer: impl Future<Output = T>) -> T {
    PLACE.scope(Arc::new(place), answer).await
}

/// Does work on a thread for blocking work.
///
/// # Errors
/// The work has panicked.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    let place = PLACE.try_with(Arc::clone).ok();
    let work = move || {
        let done = work();
        drop(place);
        done
    };
    tokio::task::spawn_blocking(work).await
}

/// Work of which only so much is done at a time, whoever still waits for it. A clone is the same.
#[derive(Clone)]
pub struct BoundedWork(Arc<Semaphore>);

impl BoundedWork {
    /// With so many pieces of work at a time.
    pub fn new(most: usize) -> BoundedWork {
        BoundedWork(Arc::new(Semaphore::new(most)))
    }

    /// Does work when it is its turn.
    ///
    /// # Errors
    /// The work has panicked.
    pub async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let turn = Arc::clone(&self.0).acquire_owned().await;
        let work = move || {
            let done = work();
            drop(turn);
            done
        };
        tokio::task::spawn_blocking(work).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::sync::mpsc;
    use std::time::Duration;

    #[tokio::test]
    async fn work_of_a_request_that_nobody_waits_for_keeps_its_place() {
        let place = Arc::new(());
        let (go_on, goes_on) = mpsc::channel::<()>();
        let mut answer = Box::pin(for_request(Arc::clone(&place), blocking(move || goes_on.recv())));
        assert!((&mut answer).now_or_never().is_none(), "it waits");
        drop(answer);
        assert_eq!(Arc::strong_count(&place), 2);
        go_on.send(()).unwrap();
        let done = async {
            while Arc::strong_count(&place) > 1 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), done).await.expect("the place is free");
        assert_eq!(blocking(|| 7).await.unwrap(), 7, "for nobody");
    }

    #[tokio::test]
    async fn work_that_nobody_waits_for_has_its_turn_to_its_end() {
        let work = BoundedWork::new(1);
        let (go_on, goes_on) = mpsc::channel::<()>();
        let mut first = Box::pin(work.blocking(move || goes_on.recv()));
        assert!((&mut first).now_or_never().is_none());
        drop(first);
        let mut second = Box::pin(work.blocking(|| 7));
        let early = tokio::time::timeout(Duration::from_millis(100), &mut second).await;
        assert!(early.is_err(), "it is not its turn");
        go_on.send(()).unwrap();
        assert_eq!(second.await.unwrap(), 7);
    }
}
