//! One question to a guest agent and its answer, over the agent's socket or libvirt. Owns no connection afterwards: QEMU serves one
//! client of the socket at a time, and others wait only for the current question.
//!
//! Invariant: the length of an answer and the time for it are bounded, and answers to the questions of others are not taken for it.

use super::clipped::{ClippedLine, LineTooLong};
use super::error::AgentError;
use crate::hypervisor::libvirt::Libvirt;
use crate::hypervisor::qemu;
use crate::short_path::ShortPath;
use serde_json::{Value, json};
use std::io;
use std::path::Path;
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

/// Asks by the agent's socket in this folder. Returns what the agent returns.
pub(super) async fn by_socket(folder: &Path, question: &Value) -> Result<Value, AgentError> {
    let ask = async {
        let socket = ShortPath::of(folder, qemu::AGENT).map_err(AgentError::unreachable)?;
        let stream = connect(socket.path()).await.map_err(AgentError::unreachable)?;
        let mut agent = AgentStream {
            stream,
            line: ClippedLine::default(),
            received: Vec::new(),
            at: 0,
            bytes_left: MAX_ANSWER_BYTES,
        };
        timeout(GREETING, agent.greet()).await.map_err(|_| AgentError::Silent)??;
        agent.send(&[], question).await?;
        returned(agent.next().await?)
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

/// Asks by the agent commands of libvirt.
pub(super) async fn by_libvirt(
    libvirt: &Libvirt,
    domain: &str,
    question: &Value,
) -> Result<Value, AgentError> {
    let asked = timeout(PATIENCE * 2, libvirt.ask_agent(domain, PATIENCE, question)).await;
    let answer = asked.map_err(|_| AgentError::Silent)?.map_err(|e| of_libvirt(&e.message))?;
    let mut line = ClippedLine::default();
    let too_long = |LineTooLong| AgentError::Nonsense("its answer does not end");
    let (_, whole) = line.take(format!("{answer}\n").as_bytes()).map_err(too_long)?;
    returned(parse(&whole.unwrap_or_default())?)
}

/// Understands what libvirt says of an agent. Its messages may be in another language, and are passed on then.
fn of_libvirt(message: &str) -> AgentError {
    let said = message
        .split_once("unable to execute QEMU agent command '")
        .and_then(|(_, rest)| rest.split_once("': "));
    match said {
        Some((_, words)) => AgentError::refused(words),
        None if ["not responding", "not available", "not connected"]
            .iter()
            .any(|text| message.contains(text)) =>
        {
            AgentError::Silent
        }
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
struct AgentStream {
    stream: UnixStream,
    line: ClippedLine,
    /// What was received, and how much of it was taken.
    received: Vec<u8>,
    at: usize,
    /// How many bytes may still be received.
    bytes_left: usize,
}

impl AgentStream {
    /// Skips what is left of the answers to earlier questions.
    async fn greet(&mut self) -> Result<(), AgentError> {
        let id =
            u64::from(std::process::id()) << 16 | jiff::Timestamp::now().subsec_nanosecond() as u64 & 0xffff;
        let sync = json!({ "execute": "guest-sync-delimited", "arguments": { "id": id } });
        self.send(&[DELIMITER], &sync).await?;
        for _ in 0..MAX_STRAY_ANSWERS {
            self.skip_to_delimiter().await?;
            // A delimiter may be that of somebody else's question.
            if self.next().await.is_ok_and(|answer| answer["return"] == id) {
                return Ok(());
            }
        }
        Err(AgentError::Nonsense("it answers other questions"))
    }

    async fn send(&mut self, before: &[u8], question: &Value) -> Result<(), AgentError> {
        let text = [before, question.to_string().as_bytes(), b"\n"].concat();
        self.stream.write_all(&text).await.map_err(AgentError::unreachable)
    }

    async fn skip_to_delimiter(&mut self) -> Result<(), AgentError> {
        loop {
            match self.received[self.at..].iter().position(|byte| *byte == DELIMITER) {
                Some(at) => {
                    self.at += at + 1;
                    self.line = ClippedLine::default();
                    return Ok(());
                }
                None => self.receive().await?,
            }
        }
    }

    /// Receives the next answer.
    async fn next(&mut self) -> Result<Value, AgentError> {
        loop {
            let (taken, line) = self
                .line
                .take(&self.received[self.at..])
                .map_err(|LineTooLong| AgentError::Nonsense("its answer does not end"))?;
            self.at += taken;
            match line {
                Some(line) => return parse(&line),
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
