//! Readiness probe of a guest. Owns the task that waits for the guest, its result until that is recorded, and the task that answers
//! the calls of a guest that phones home.
//!
//! Invariant: a result and a secret belong to the VMM that runs, and are forgotten with it.

use std::future::pending;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// Finds out when a guest is ready.
#[derive(Default)]
pub struct ReadinessProbe {
    running: Option<JoinHandle<Option<String>>>,
    /// Result: the guest is ready, and its address if that is known.
    answer: Option<Option<String>>,
    /// Answers the guest's calls for as long as its VMM runs: it may boot again in it, or may not have received an answer.
    phone: Option<PhoneAnswers>,
}

/// The task that answers the calls of a guest.
struct PhoneAnswers {
    secret: String,
    /// Notified of each call.
    called: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Drop for PhoneAnswers {
    fn drop(&mut self) {
        self.task.abort();
    }
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

    /// Answers the calls with this secret, unless that is done already. Returns what is notified of each call.
    pub fn answer_calls<T: Future<Output = ()> + Send + 'static>(
        &mut self,
        secret: &str,
        answers: impl FnOnce(Arc<Notify>) -> T,
    ) -> Arc<Notify> {
        if let Some(phone) = self.phone.as_ref().filter(|phone| phone.secret == secret) {
            return Arc::clone(&phone.called);
        }
        let called = Arc::<Notify>::default();
        let task = tokio::spawn(answers(Arc::clone(&called)));
        self.phone = Some(PhoneAnswers { secret: secret.to_owned(), called: Arc::clone(&called), task });
        called
    }

    /// Stops the probe and forgets all that belongs to a VMM that has ended.
    pub fn end(&mut self) {
        self.stop();
        self.phone = None;
    }

    /// Stops the probe and forgets its result. Calls of the guest are answered nevertheless.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn calls_are_answered_until_the_vmm_ends_whether_the_guest_is_ready_or_not() {
        let mut probe = ReadinessProbe::default();
        let is_answering = Arc::new(());
        let answer = |probe: &mut ReadinessProbe, secret: &str| {
            let held = Arc::clone(&is_answering);
            probe.answer_calls(secret, |_| async move {
                let _held = held;
                pending().await
            })
        };
        let called = answer(&mut probe, "one");
        let ready = Arc::clone(&called);
        probe.begin(async move {
            ready.notified().await;
            None
        });
        called.notify_one();
        probe.answers().await;
        assert_eq!(probe.answer(), Some(None));
        probe.stop();
        tokio::task::yield_now().await;
        assert_eq!((probe.answer(), Arc::strong_count(&is_answering)), (None, 2));
        assert!(Arc::ptr_eq(&called, &answer(&mut probe, "one")), "it goes on");
        assert!(!Arc::ptr_eq(&called, &answer(&mut probe, "two")), "the next VMM has a secret of its own");
        probe.end();
        while Arc::strong_count(&is_answering) > 1 {
            tokio::task::yield_now().await;
        }
    }
}
