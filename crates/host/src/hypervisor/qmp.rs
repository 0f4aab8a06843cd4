//! QEMU's machine protocol (docs/interop/qmp-spec of QEMU): one connection to one VMM. Owns the events that were received
//! and not read yet.
//!
//! Invariant: a VMM that violates the protocol, sends too much, or does not answer causes an error, never a panic or an
//! endless wait.

use crate::json_lines::JsonLines;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::time::timeout;

/// Longest line.
const MAX_LINE_BYTES: usize = 1 << 20;
/// Number of events that are kept until they are read.
const MOST_EVENTS: usize = 64;
/// Names of the events that are used. A guest can cause any number of others (`BLOCK_IO_ERROR`, `RTC_CHANGE`), which are
/// dropped.
const KEPT_EVENTS: [&str; 2] = ["SHUTDOWN", "WATCHDOG"];
/// Longest time of an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection.
#[derive(Debug)]
pub struct Qmp {
    lines: JsonLines,
    events: VecDeque<Event>,
}

/// An event of a VMM.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Event {
    /// Name, such as `SHUTDOWN`.
    #[serde(rename = "event")]
    pub name: String,
    /// Data of the event.
    #[serde(default)]
    pub data: Value,
}

impl Qmp {
    /// Connects and negotiates the protocol.
    pub async fn connect(socket: &Path) -> io::Result<Qmp> {
        let lines = JsonLines::connect(socket, MAX_LINE_BYTES).await?;
        let mut qmp = Qmp { lines, events: VecDeque::new() };
        let greeting = timeout(PATIENCE, qmp.lines.next()).await??;
        if greeting.get("QMP").is_none() {
            return Err(strange("it does not greet"));
        }
        qmp.execute("qmp_capabilities").await?;
        Ok(qmp)
    }

    /// Runs a command without arguments and returns its result.
    pub async fn execute(&mut self, command: &str) -> io::Result<Value> {
        let exchange = async {
            self.lines.send(&json!({ "execute": command })).await?;
            loop {
                let mut message = self.lines.next().await?;
                if let Some(answer) = message.get_mut("return") {
                    return Ok(answer.take());
                }
                if let Some(error) = message.get("error") {
                    let why = error.get("desc").and_then(Value::as_str).unwrap_or("it says no");
                    return Err(io::Error::other(format!("{command}: {why}")));
                }
                self.keep(message)?;
            }
        };
        timeout(PATIENCE, exchange).await?
    }

    /// Waits for the next used event. Cancel safe.
    pub async fn event(&mut self) -> io::Result<Event> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            let message = self.lines.next().await?;
            self.keep(message)?;
        }
    }

    /// Events that were received and not read yet, in order.
    pub fn pending_events(&self) -> impl Iterator<Item = &Event> {
        self.events.iter()
    }

    fn keep(&mut self, message: Value) -> io::Result<()> {
        let event: Event = serde_json::from_value(message).map_err(|_| strange("it says something else"))?;
        if !KEPT_EVENTS.contains(&event.name.as_str()) {
            return Ok(());
        }
        if self.events.len() == MOST_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
        Ok(())
    }
}

fn strange(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("this is not QEMU's monitor: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    const GREETING: &str = "{\"QMP\":{}}\r\n{\"return\":{}}\r\n";

    /// Connects to somebody who says all this and then ends.
    async fn connected(said: &str) -> io::Result<Qmp> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let said = said.to_owned();
        let other = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.write_all(said.as_bytes()).await;
            let mut pending_events = Vec::new();
            let _ = stream.read_to_end(&mut pending_events).await;
        });
        let qmp = Qmp::connect(&path).await;
        if qmp.is_err() {
            other.abort();
        }
        qmp
    }

    #[tokio::test]
    async fn events_between_a_command_and_its_answer_are_kept() {
        let said = format!(
            "{GREETING}{{\"event\":\"STOP\"}}\n{{\"event\":\"SHUTDOWN\",\"data\":{{\"guest\":true}}}}\n{{\"return\":7}}\n"
        );
        let mut qmp = connected(&said).await.unwrap();
        assert_eq!(qmp.execute("query-status").await.unwrap(), 7);
        let event = qmp.event().await.unwrap();
        assert_eq!((event.name.as_str(), &event.data["guest"]), ("SHUTDOWN", &Value::Bool(true)));
    }

    /// A guest whose disk is full causes one with each request.
    #[tokio::test]
    async fn events_that_a_guest_causes_wake_nobody_and_displace_none() {
        let noise = "{\"event\":\"BLOCK_IO_ERROR\",\"data\":{}}\n".repeat(2 * MOST_EVENTS);
        let shutdown = "{\"event\":\"SHUTDOWN\",\"data\":{\"guest\":true}}\n";
        let said = format!("{GREETING}{shutdown}{noise}{{\"return\":7}}\n{noise}{shutdown}");
        let mut qmp = connected(&said).await.unwrap();
        qmp.execute("query-status").await.unwrap();
        for _ in 0..2 {
            assert_eq!(qmp.event().await.unwrap().name, "SHUTDOWN");
        }
    }

    #[tokio::test]
    async fn nonsense_is_an_error() {
        for said in ["", "hello\n", "{}\n", "{\"QMP\":{}}\n[]\n", "{\"QMP\":{}}\n{\"error\":{}}\n"] {
            assert!(connected(said).await.is_err(), "{said}");
        }
        let long = format!("{GREETING}{}", "x".repeat(2 * MAX_LINE_BYTES));
        assert!(
            connected(&long).await.unwrap().event().await.unwrap_err().to_string().contains("does not end")
        );
        let error = format!("{GREETING}{{\"error\":{{\"class\":\"X\",\"desc\":\"no such\"}}}}\n");
        let refused = connected(&error).await.unwrap().execute("x").await.unwrap_err();
        assert_eq!(refused.to_string(), "x: no such");
    }
}
