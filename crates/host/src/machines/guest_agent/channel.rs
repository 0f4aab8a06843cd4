//! The agent of one machine, as its calls share it, and one call. Owns whose turn it is.
//!
//! Invariant: questions to an agent are asked one after the other, and none reaches the guest of another run than the one that the
//! call began with. A call ends when its VMM ends, and when its guest is asked to shut down.

use super::started::StartedPrograms;
use super::{AgentError, GuestAgent, exchange};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard, Semaphore, watch};
use tokio::time::timeout;

/// Longest wait for the file of another call.
const FILE_TURN: Duration = Duration::from_secs(120);

/// Whether the VMM of a call has ended. A machine's next VMM never begins before that.
pub type IsOver = Arc<dyn Fn() -> bool + Send + Sync>;

/// What the calls to one machine's agent share.
pub struct AgentChannel {
    /// Whoever has it asks the agent. Others wait for the end of a question, not of a program.
    turn: Mutex<()>,
    /// Whoever has it has a file open. An agent that has lost its state gives the number of an open file to the next one, so there
    /// is only one.
    file: Mutex<()>,
    /// Programs whose results the agent still has.
    pub programs: StartedPrograms,
    /// Notified when the guest is asked to shut down.
    stops: watch::Sender<()>,
}

impl Default for AgentChannel {
    fn default() -> AgentChannel {
        let (turn, file, programs) = Default::default();
        AgentChannel { turn, file, programs, stops: watch::Sender::new(()) }
    }
}

impl AgentChannel {
    /// Ends the calls that are under way.
    pub fn end_calls(&self) {
        self.stops.send_replace(());
    }
}

/// What asks the agent of one guest until the guest's VMM ends.
pub struct AgentCall {
    agent: GuestAgent,
    /// The machine's folder.
    folder: PathBuf,
    pub channel: Arc<AgentChannel>,
    /// Bounds how many answers, of all guests, are received at a time.
    answers: Arc<Semaphore>,
    pub is_over: IsOver,
    stops: watch::Receiver<()>,
    /// Whether the last question may have reached the agent.
    is_sent: AtomicBool,
}

impl AgentCall {
    /// Begins a call. A domain of libvirt is named by the id of its run.
    pub fn new(
        agent: GuestAgent,
        folder: PathBuf,
        channel: Arc<AgentChannel>,
        answers: Arc<Semaphore>,
        is_over: IsOver,
    ) -> AgentCall {
        let stops = channel.stops.subscribe();
        AgentCall { agent, folder, channel, answers, is_over, stops, is_sent: AtomicBool::new(false) }
    }

    /// Asks a question. An answer is of the VMM that the call is for: what another one answers is an error.
    pub async fn ask(&self, question: &Value) -> Result<Value, AgentError> {
        self.ask_for(question, || false, Ok).await
    }

    /// Asks a question unless it is `void` when its turn comes. `take` understands the answer before the next question's turn.
    pub async fn ask_for<T>(
        &self,
        question: &Value,
        is_void: impl Fn() -> bool + Send + Sync,
        take: impl FnOnce(Value) -> Result<T, AgentError> + Send,
    ) -> Result<T, AgentError> {
        self.is_sent.store(false, Ordering::Relaxed);
        let is_over = || (self.is_over)() || is_void();
        let ask = async {
            let turn = timeout(exchange::PATIENCE * 2, self.channel.turn.lock()).await;
            let _turn = turn.map_err(|_| AgentError::Silent)?;
            let answers = timeout(exchange::PATIENCE * 2, self.answers.acquire()).await;
            let _answer = answers.map_err(|_| AgentError::Late)?;
            if is_over() {
                return Err(AgentError::Over);
            }
            let answer = match &self.agent {
                GuestAgent::Socket => {
                    exchange::by_socket(&self.folder, question, &is_over, &self.is_sent).await
                }
                GuestAgent::Libvirt(libvirt, run) => {
                    exchange::by_libvirt(libvirt, run, question, &self.is_sent).await
                }
            };
            if is_over() { Err(AgentError::Over) } else { take(answer?) }
        };
        let mut stops = self.stops.clone();
        tokio::select! {
            answer = ask => answer,
            _ = stops.changed() => Err(AgentError::Over),
        }
    }

    /// Whether the last question may have reached the agent.
    pub fn is_sent(&self) -> bool {
        self.is_sent.load(Ordering::Relaxed)
    }

    /// Waits until no other call of the machine has a file open.
    pub async fn file_turn(&self) -> Result<MutexGuard<'_, ()>, AgentError> {
        timeout(FILE_TURN, self.channel.file.lock()).await.map_err(|_| AgentError::Late)
    }
}

#[cfg(test)]
mod tests {
    use super::super::scripted::{ScriptedAgent, returned};
    use super::*;
    use serde_json::json;

    #[tokio::test]
    async fn a_stop_ends_a_call_whose_question_is_not_answered() {
        let (asked, mut is_asked) = tokio::sync::mpsc::unbounded_channel();
        let agent = ScriptedAgent::new(move |_| {
            asked.send(()).unwrap();
            None
        });
        let call = Arc::new(agent.call());
        let waits = tokio::spawn({
            let call = Arc::clone(&call);
            async move { call.ask(&json!({ "execute": "guest-ping" })).await }
        });
        is_asked.recv().await.unwrap();
        assert!(call.is_sent());
        call.channel.end_calls();
        assert_eq!(waits.await.unwrap(), Err(AgentError::Over));
        assert_eq!(
            call.ask(&json!({ "execute": "guest-ping" })).await,
            Err(AgentError::Over),
            "it has ended"
        );
        assert!(!call.is_sent());
    }

    #[tokio::test]
    async fn a_call_that_begins_after_a_stop_was_asked_for_is_answered() {
        let agent = ScriptedAgent::new(|_| Some(returned(&json!(7))));
        agent.call().channel.end_calls();
        assert_eq!(agent.call().ask(&json!({ "execute": "guest-ping" })).await, Ok(json!(7)));
    }

    #[tokio::test]
    async fn no_question_is_sent_on_a_connection_that_may_be_to_the_next_vmm() {
        let agent = ScriptedAgent::new(|_| Some(returned(&json!(7))));
        let looks = std::sync::atomic::AtomicU32::new(0);
        // The VMM ends after the first look, before the connection is there.
        let is_over: IsOver = Arc::new(move || looks.fetch_add(1, Ordering::Relaxed) > 0);
        let call = AgentCall { is_over, ..agent.call() };
        assert_eq!(call.ask(&json!({ "execute": "guest-ping" })).await, Err(AgentError::Over));
        assert!(agent.commands().is_empty() && !call.is_sent());
    }
}
