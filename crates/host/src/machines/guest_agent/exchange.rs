//! One question to a guest agent and its answer, over the agent's socket or libvirt. Owns no connection afterwards: QEMU serves one
//! client of the socket at a time, and others wait only for the current question.
//!
//! Invariant: the length of an answer and the time for it are bounded, and answers to the questions of others are not taken for it.

use super::clipped::{ClippedLine, LineTooLong, MAX_LINE_BYTES};
use super::error::AgentError;
use crate::hypervisor::libvirt::Libvirt;
use crate::hypervisor::qemu;
use crate::short_path::ShortPath;
use serde_json::{Value, json};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Longest time for a question and its answer. An agent sends up to 43 MiB in one line, which takes a guest without KVM seconds.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Longest time until an agent has shown that it listens.
const GREETING: Duration = Duration::from_secs(5);
/// Pause before the next attempt to connect to a socket with many clients.
const TURN: Duration = Duration::from_millis(50);
/// Most bytes of an answer: base64 of the 16 MiB of each output that an agent keeps, and what is left of an earlier answer.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Number of complete answers to earlier questions that are skipped.
const MAX_STRAY_ANSWERS: usize = 100;
/// Byte before the answer to `guest-sync-delimited`, and what makes an agent forget half a question. It is in no UTF-8 text.
const DELIMITER: u8 = 0xff;
const PIECE_BYTES: usize = 64 << 10;

/// Asks by the agent's socket in this folder, unless that is over when it is connected. Returns what the agent returns. Sets `is_sent`
/// when the agent may have the question.
pub(super) async fn by_socket(
    folder: &Path,
    question: &Value,
    is_over: &(dyn Fn() -> bool + Send + Sync),
    is_sent: &AtomicBool,
) -> Result<Value, AgentError> {
    let ask = async {
        let connected = timeout(GREETING, AgentStream::connect(folder, MAX_LINE_BYTES)).await;
        let mut agent = connected.map_err(|_| AgentError::Silent)??;
        // No VMM of a machine begins before the last one has ended: this is a connection to the one that has not.
        if is_over() {
            return Err(AgentError::Over);
        }
        is_sent.store(true, Ordering::Relaxed);
        agent.send(question).await?;
        agent.answer().await
    };
    timeout(PATIENCE, ask).await.map_err(|_| AgentError::Silent)?
}

/// Connects. Others may wait for their turn: QEMU serves one, and the kernel keeps few.
async fn connect(socket: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(socket).await {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(TURN).await,
            connected => return connected,
        }
    }
}

/// Asks by the agent commands of libvirt, in this run of a domain. Sets `is_sent` as `by_socket` does.
pub(super) async fn by_libvirt(
    libvirt: &Libvirt,
    run: &str,
    question: &Value,
    is_sent: &AtomicBool,
) -> Result<Value, AgentError> {
    is_sent.store(true, Ordering::Relaxed);
    let asked = timeout(PATIENCE * 2, libvirt.ask_agent(run, PATIENCE, question)).await;
    let answer = asked.map_err(|_| AgentError::Silent)?.map_err(|e| {
        is_sent.store(!is_unsent(&e.message), Ordering::Relaxed);
        of_libvirt(&e.message)
    })?;
    let mut line = ClippedLine::new(MAX_LINE_BYTES);
    let too_long = |LineTooLong| AgentError::Nonsense("its answer does not end");
    let (_, whole) = line.take(format!("{answer}\n").as_bytes()).map_err(too_long)?;
    returned(parse(&whole.unwrap_or_default())?)
}

/// What libvirt says of an agent to which it has lost the connection, until the domain ends.
const CONNECTION_LOST: &str = "not available due to an error";

/// Whether libvirt has not passed a question on, by its message.
fn is_unsent(message: &str) -> bool {
    [CONNECTION_LOST, "not connected", "failed to connect", "failed to get domain", "is not installed"]
        .iter()
        .any(|text| message.contains(text))
}

/// Understands what libvirt says of an agent. Its messages may be in another language, and are passed on then.
fn of_libvirt(message: &str) -> AgentError {
    let said = message
        .split_once("unable to execute QEMU agent command '")
        .and_then(|(_, rest)| rest.split_once("': "));
    let is_silent =
        || ["not responding", "not available", "not connected"].iter().any(|text| message.contains(text));
    match said {
        Some((_, words)) => AgentError::refused(words),
        None if message.contains(CONNECTION_LOST) => AgentError::ConnectionLost,
        None if is_silent() => AgentError::Silent,
        None => AgentError::unreachable(message),
    }
}

/// Returns the value of an answer, or the agent's refusal.
fn returned(mut answer: Value) -> Result<Value, AgentError> {
    if let Some(error) = answer.get("error").filter(|error| !error.is_null()) {
        return Err(AgentError::refused(error["desc"].as_str().unwrap_or("it refuses")));
    }
    match answer.get_mut("return") {
        Some(value) => Ok(value.take()),
        None => Err(AgentError::Nonsense("its answer is none")),
    }
}

fn parse(line: &[u8]) -> Result<Value, AgentError> {
    serde_json::from_slice(line).map_err(|_| AgentError::Nonsense("its answer is not JSON"))
}

/// A connection to an agent.
pub(super) struct AgentStream {
    stream: UnixStream,
    line: ClippedLine,
    max_line_bytes: usize,
    /// What was received, and how much of it was taken.
    received: Vec<u8>,
    at: usize,
    /// How many bytes may still be received.
    bytes_left: usize,
}

impl AgentStream {
    /// Connects to the agent whose socket is in this folder, and skips what is left of the answers to earlier questions. A longer
    /// line is refused.
    pub(super) async fn connect(folder: &Path, max_line_bytes: usize) -> Result<AgentStream, AgentError> {
        let socket = ShortPath::of(folder, qemu::AGENT).map_err(AgentError::unreachable)?;
        let stream = connect(socket.path()).await.map_err(AgentError::unreachable)?;
        let mut agent = AgentStream {
            stream,
            line: ClippedLine::new(max_line_bytes),
            max_line_bytes,
            received: Vec::new(),
            at: 0,
            bytes_left: MAX_ANSWER_BYTES,
        };
        agent.greet().await?;
        Ok(agent)
    }

    async fn greet(&mut self) -> Result<(), AgentError> {
        let id =
            u64::from(std::process::id()) << 16 | jiff::Timestamp::now().subsec_nanosecond() as u64 & 0xffff;
        let sync = json!({ "execute": "guest-sync-delimited", "arguments": { "id": id } });
        self.write(&[&[DELIMITER], sync.to_string().as_bytes(), b"\n"].concat()).await?;
        for _ in 0..MAX_STRAY_ANSWERS {
            self.skip_to_delimiter().await?;
            // A delimiter may be that of somebody else's question, whose answer may end where the next one begins.
            let line = self.line().await?;
            let answer = line.rsplit(|byte| *byte == DELIMITER).next().unwrap_or_default();
            if parse(answer).is_ok_and(|answer| answer["return"] == id) {
                return Ok(());
            }
        }
        Err(AgentError::Nonsense("it answers other questions"))
    }

    /// Sends a question.
    pub(super) async fn send(&mut self, question: &Value) -> Result<(), AgentError> {
        self.write(format!("{question}\n").as_bytes()).await
    }

    /// Receives the answer to it. Returns what the agent returns.
    pub(super) async fn answer(&mut self) -> Result<Value, AgentError> {
        returned(parse(&self.line().await?)?)
    }

    async fn write(&mut self, text: &[u8]) -> Result<(), AgentError> {
        self.stream.write_all(text).await.map_err(AgentError::unreachable)
    }

    async fn skip_to_delimiter(&mut self) -> Result<(), AgentError> {
        loop {
            match self.received[self.at..].iter().position(|byte| *byte == DELIMITER) {
                Some(at) => {
                    self.at += at + 1;
                    self.line = ClippedLine::new(self.max_line_bytes);
                    return Ok(());
                }
                None => self.receive().await?,
            }
        }
    }

    /// Receives the next line.
    async fn line(&mut self) -> Result<Vec<u8>, AgentError> {
        loop {
            let (taken, line) = self
                .line
                .take(&self.received[self.at..])
                .map_err(|LineTooLong| AgentError::Nonsense("its answer does not end"))?;
            self.at += taken;
            match line {
                Some(line) => return Ok(line),
                None => self.receive().await?,
            }
        }
    }

    /// Receives more, in place of what was taken.
    async fn receive(&mut self) -> Result<(), AgentError> {
        self.received.resize(PIECE_BYTES, 0);
        self.at = 0;
        let received = self.stream.read(&mut self.received).await;
        self.received.truncate(*received.as_ref().unwrap_or(&0));
        match received {
            Err(e) => Err(AgentError::unreachable(e)),
            Ok(0) => Err(AgentError::unreachable("the connection to it has ended")),
            Ok(bytes) => {
                let too_much = AgentError::Nonsense("its answer does not end");
                self.bytes_left = self.bytes_left.checked_sub(bytes).ok_or(too_much)?;
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::scripted::{ScriptedAgent, returned, scripted_libvirt};
    use super::*;

    fn ping() -> Value {
        json!({ "execute": "guest-ping" })
    }

    #[tokio::test]
    async fn what_is_left_of_earlier_answers_is_skipped() {
        let sync = |id: u64| [&[DELIMITER], returned(&json!(id)).as_slice()].concat();
        let half = br#"{"return":{"out-data":"AAAA"#;
        for before in [
            Vec::new(),
            returned(&json!({})),
            half.to_vec(),
            vec![DELIMITER],
            [DELIMITER, DELIMITER].to_vec(),
            // The beginning of the answer to another greeting.
            [&[DELIMITER], &half[..5]].concat(),
            // Half a line between two delimiters, and the answers to other greetings.
            [half.as_slice(), &sync(1), half, &sync(2)].concat(),
            sync(1).repeat(MAX_STRAY_ANSWERS - 1),
            vec![b'x'; 40 << 20],
        ] {
            let agent = ScriptedAgent::new(|_| Some(returned(&json!(7))));
            agent.says_first(before.clone());
            let answer = agent.call().ask(&ping()).await;
            assert_eq!(
                answer,
                Ok(json!(7)),
                "{:?}",
                String::from_utf8_lossy(&before[..before.len().min(99)])
            );
        }
        for (before, want) in [
            (sync(1).repeat(MAX_STRAY_ANSWERS), AgentError::Nonsense("it answers other questions")),
            (vec![b'x'; MAX_ANSWER_BYTES + 1], AgentError::Nonsense("its answer does not end")),
        ] {
            let agent = ScriptedAgent::new(|_| Some(returned(&json!(7))));
            agent.says_first(before);
            assert_eq!(agent.call().ask(&ping()).await, Err(want));
            assert!(agent.commands().is_empty());
        }
    }

    #[tokio::test]
    async fn what_libvirt_answers_is_understood() {
        let agent = "error: internal error: unable to execute QEMU agent command 'guest-exec': Command guest-exec has been disabled";
        for (script, want, is_passed_on) in [
            (
                r#"echo 'virsh # qemu-agent-command x'; echo '{"return":{"a":1}}'"#,
                Ok(json!({ "a": 1 })),
                true,
            ),
            (r#"echo '{"error":{"desc":"no"}}'"#, Err(AgentError::refused("no")), true),
            ("echo '{\"return\":'", Err(AgentError::Nonsense("its answer is not JSON")), true),
            (
                &format!("echo \"{agent}\" >&2"),
                Err(AgentError::refused("Command guest-exec has been disabled")),
                true,
            ),
            (
                "echo 'error: Guest agent is not responding: Guest agent not available for now' >&2",
                Err(AgentError::Silent),
                true,
            ),
            (
                "echo 'error: Guest agent is not responding: QEMU guest agent is not connected' >&2",
                Err(AgentError::Silent),
                false,
            ),
            (
                "echo 'error: Guest agent is not responding: QEMU guest agent is not available due to an error' >&2",
                Err(AgentError::ConnectionLost),
                false,
            ),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let is_sent = AtomicBool::new(false);
            let libvirt =
                scripted_libvirt(dir.path(), &format!("cat >'{}/asked'; {script}", dir.path().display()));
            let answer = by_libvirt(&libvirt, "+7", &ping(), &is_sent).await;
            assert_eq!((answer, is_sent.load(Ordering::Relaxed)), (want, is_passed_on), "{script}");
            let asked = std::fs::read_to_string(dir.path().join("asked")).unwrap();
            assert_eq!(asked, "qemu-agent-command +7 --timeout 30 '{\"execute\":\"guest-ping\"}'\n");
        }
    }
}
