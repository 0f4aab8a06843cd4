//! The guest agent of a machine: asks it for the guest's address, for a shutdown, and to run programs and to read and write files
//! (`program`, `file`). Owns no connection between questions.
//!
//! Invariant: the agent's answers are a guest's: their length, their number and the time for them are bounded, and nothing
//! depends on what they say but the machine itself.

mod clipped;
mod error;
mod exchange;
pub mod file;
pub mod program;
#[cfg(test)]
mod scripted;

use super::neighbours::is_unicast;
use crate::hypervisor::libvirt::Libvirt;
use crate::hypervisor::qemu;
use crate::json_lines::JsonLines;
use crate::short_path::ShortPath;
pub use error::AgentError;
use serde_json::{Value, json};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::timeout;

/// Longest wait for an answer.
pub const PATIENCE: Duration = Duration::from_secs(3);
/// How long an agent may take to refuse a shutdown. It says nothing if it carries it out.
const REFUSAL: Duration = Duration::from_secs(1);
const MAX_LINE_BYTES: usize = 64 << 10;
/// Number of answers to earlier questions that are skipped.
const MAX_STRAY_ANSWERS: usize = 100;

/// The channel to a guest agent.
#[derive(Clone)]
pub enum GuestAgent {
    /// The agent's socket in the machine's folder.
    Socket,
    /// The agent commands of libvirt, for a domain.
    Libvirt(Arc<Libvirt>, String),
}

/// What asks the agent of one guest until the guest's VMM ends.
pub struct AgentCall {
    /// The channel.
    pub agent: GuestAgent,
    /// The machine's folder.
    pub folder: PathBuf,
    /// Whoever has it asks the agent. Others wait for the end of a question, not of a program.
    pub turn: Arc<Mutex<()>>,
    /// Bounds how many answers, of all guests, are received at a time.
    pub answers: Arc<Semaphore>,
    /// Whether the VMM has ended. A machine's next VMM never begins before that.
    pub is_over: Box<dyn Fn() -> bool + Send + Sync>,
}

impl AgentCall {
    /// Asks a question. An answer is of the VMM that the call is for: what another one answers is an error.
    pub async fn ask(&self, question: &Value) -> Result<Value, AgentError> {
        let turn = timeout(exchange::PATIENCE * 2, self.turn.lock()).await;
        let _turn = turn.map_err(|_| AgentError::Silent)?;
        let answers = timeout(exchange::PATIENCE * 2, self.answers.acquire()).await;
        let _answer = answers.map_err(|_| AgentError::Late)?;
        if (self.is_over)() {
            return Err(AgentError::Over);
        }
        let answer = match &self.agent {
            GuestAgent::Socket => exchange::by_socket(&self.folder, question).await,
            GuestAgent::Libvirt(libvirt, domain) => exchange::by_libvirt(libvirt, domain, question).await,
        };
        if (self.is_over)() { Err(AgentError::Over) } else { answer }
    }
}

impl GuestAgent {
    /// Asks the agent for the guest's address.
    pub async fn address(&self, folder: &Path) -> io::Result<Option<String>> {
        match self {
            GuestAgent::Socket => {
                let ask = async {
                    let mut agent = connect(folder).await?;
                    agent.send(&json!({ "execute": "guest-network-get-interfaces" })).await?;
                    Ok(address(&agent.next().await?["return"]))
                };
                timeout(PATIENCE, ask).await?
            }
            GuestAgent::Libvirt(libvirt, domain) => {
                let answer = ask_by_libvirt(libvirt, domain, "guest-network-get-interfaces").await?;
                Ok(address(&answer["return"]))
            }
        }
    }

    /// Asks the agent to shut the guest down. An error: it does not answer, or refuses.
    pub async fn shut_down(&self, folder: &Path) -> io::Result<()> {
        match self {
            GuestAgent::Socket => {
                let ask = async {
                    let mut agent = connect(folder).await?;
                    let mode = json!({ "mode": "powerdown" });
                    agent.send(&json!({ "execute": "guest-shutdown", "arguments": mode })).await?;
                    Ok::<_, io::Error>(agent)
                };
                let mut agent = timeout(PATIENCE, ask).await??;
                match timeout(REFUSAL, agent.next()).await {
                    Ok(Ok(answer)) if !answer["error"].is_null() => Err(refused()),
                    _ => Ok(()),
                }
            }
            GuestAgent::Libvirt(libvirt, domain) => {
                ask_by_libvirt(libvirt, domain, "guest-ping").await?;
                // virsh waits until the guest is down. A slow one goes on when it is not waited for any more: libvirt may
                // not have been told yet.
                let (libvirt, domain) = (Arc::clone(libvirt), domain.clone());
                let asks =
                    tokio::spawn(async move { libvirt.ask(&["shutdown", &domain, "--mode", "agent"]).await });
                match timeout(REFUSAL, asks).await {
                    Ok(Ok(asked)) => asked.map(drop).map_err(io::Error::other),
                    Ok(Err(e)) => Err(io::Error::other(e)),
                    Err(_) => Ok(()),
                }
            }
        }
    }
}

fn refused() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "it refuses")
}

/// Asks a small question. An answer that is longer than a line of the socket may be is not parsed.
async fn ask_by_libvirt(libvirt: &Libvirt, domain: &str, question: &str) -> io::Result<Value> {
    let question = json!({ "execute": question }).to_string();
    let seconds = PATIENCE.as_secs().to_string();
    let asked = ["qemu-agent-command", domain, "--timeout", &seconds, &question];
    let answer = libvirt.ask(&asked).await.map_err(io::Error::other)?;
    if answer.len() > MAX_LINE_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "its answer is too long"));
    }
    Ok(serde_json::from_str(&answer)?)
}

/// Connects to the agent, and skips the answers to earlier questions.
async fn connect(folder: &Path) -> io::Result<JsonLines> {
    let socket = ShortPath::of(folder, qemu::AGENT).map_err(io::Error::other)?;
    let mut agent = JsonLines::connect(socket.path(), MAX_LINE_BYTES).await?;
    let id = u64::from(std::process::id()) << 16 | jiff::Timestamp::now().subsec_nanosecond() as u64 & 0xffff;
    agent.send(&json!({ "execute": "guest-sync", "arguments": { "id": id } })).await?;
    let mut strays = 0;
    while agent.next().await?["return"] != id {
        strays += 1;
        if strays > MAX_STRAY_ANSWERS {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    Ok(agent)
}

/// Returns the first address of this list that others can reach.
fn address(interfaces: &Value) -> Option<String> {
    let of = |interface: &Value| interface["ip-addresses"].as_array().cloned().unwrap_or_default();
    let all = interfaces.as_array()?.iter().flat_map(of);
    let mut addresses = all.filter_map(|entry| entry["ip-address"].as_str()?.parse::<IpAddr>().ok());
    addresses
        .find(|address| match address {
            IpAddr::V4(v4) => is_unicast(*v4),
            IpAddr::V6(_) => false,
        })
        .map(|address| address.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::UnixListener;

    /// Serves one connection: an agent that answers a question with this many lines of its own, the last one to the point,
    /// and a shutdown with this, if it answers that. Returns the questions.
    async fn agent(listener: UnixListener, strays: usize, refusal: Option<Value>) -> Vec<String> {
        let (mut stream, _) = listener.accept().await.unwrap();
        let (input, mut output) = stream.split();
        let mut lines = BufReader::new(input).lines();
        let mut asked = Vec::new();
        while let Ok(Some(line)) = lines.next_line().await {
            let question: Value = serde_json::from_str(&line).unwrap();
            asked.push(question["execute"].as_str().unwrap().to_owned());
            let stray = format!("{}\n", json!({ "return": 1 })).repeat(strays);
            let answer = match question["arguments"]["id"].as_u64() {
                Some(id) => Some(json!({ "return": id })),
                None => refusal.clone(),
            };
            let answer = answer.map(|answer| format!("{answer}\n")).unwrap_or_default();
            if output.write_all((stray + &answer).as_bytes()).await.is_err() {
                break;
            }
        }
        asked
    }

    #[tokio::test]
    async fn a_shutdown_is_asked_for_unless_the_agent_refuses_or_says_too_much() {
        let refusal = json!({ "error": { "class": "CommandNotFound", "desc": "disabled" } });
        for (strays, refusal, is_asked) in
            [(0, None, true), (99, None, true), (0, Some(refusal), false), (200, None, false)]
        {
            let dir = tempfile::tempdir().unwrap();
            let listener = UnixListener::bind(dir.path().join(qemu::AGENT)).unwrap();
            let served = tokio::spawn(agent(listener, strays, refusal.clone()));
            let done = GuestAgent::Socket.shut_down(dir.path()).await;
            assert_eq!(done.is_ok(), is_asked, "{strays} {refusal:?} {done:?}");
            let asked = served.await.unwrap();
            assert_eq!(asked.last().is_some_and(|last| last == "guest-shutdown"), strays < 100, "{asked:?}");
        }
    }

    /// A libvirt whose virsh is this script.
    fn scripted_libvirt(dir: &Path, script: &str) -> GuestAgent {
        let virsh = dir.join("virsh");
        // A process of its own writes it: a program that some process has open for writing cannot be started.
        let write = "printf '#!/bin/sh\n%s\n' \"$1\" >\"$0\" && chmod 700 \"$0\"";
        let written = std::process::Command::new("sh").args(["-c", write]).arg(&virsh).arg(script).status();
        assert!(written.unwrap().success());
        let libvirt = Libvirt::by(virsh.to_str().unwrap().into(), "qemu:///system".into());
        GuestAgent::Libvirt(Arc::new(libvirt), "u".into())
    }

    #[tokio::test]
    async fn libvirt_is_told_of_a_shutdown_however_slow_its_client_is() {
        let dir = tempfile::tempdir().unwrap();
        let script = format!(
            "case \"$*\" in *shutdown*) sleep 3; : >'{}';; *) echo '{{\"return\":{{}}}}';; esac",
            dir.path().join("told").display()
        );
        scripted_libvirt(dir.path(), &script).shut_down(dir.path()).await.unwrap();
        let begun = Instant::now();
        while !dir.path().join("told").exists() {
            assert!(begun.elapsed() < REFUSAL * 30, "it is never told");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let refuses = "case \"$*\" in *shutdown*) exit 1;; *) echo '{\"return\":{}}';; esac";
        scripted_libvirt(dir.path(), refuses).shut_down(dir.path()).await.unwrap_err();
    }

    #[tokio::test]
    async fn an_answer_by_libvirt_is_as_long_as_one_by_the_socket_may_be() {
        let dir = tempfile::tempdir().unwrap();
        let list =
            r#"{\"return\":[{\"ip-addresses\":[{\"ip-address\":\"10.0.2.15\"}]}]%s}"#.replace('\\', "");
        for (padding, is_taken) in [(60_000, true), (70_000, false), (4 << 20, false)] {
            let script = format!("printf '{list}\\n' \"$(head -c {padding} /dev/zero | tr '\\0' ' ')\"");
            let found = scripted_libvirt(dir.path(), &script).address(dir.path()).await;
            match is_taken {
                true => assert_eq!(found.unwrap(), Some("10.0.2.15".into())),
                false => assert_eq!(found.unwrap_err().kind(), io::ErrorKind::InvalidData),
            }
        }
    }

    #[tokio::test]
    async fn an_agent_that_says_nothing_or_never_ends_a_line_is_not_waited_for() {
        let begun = Instant::now();
        for talks in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let listener = UnixListener::bind(dir.path().join(qemu::AGENT)).unwrap();
            let served = tokio::spawn(async move {
                let (mut stream, _) = listener.accept().await.unwrap();
                while talks && stream.write_all(&[b'x'; 4096]).await.is_ok() {}
                std::future::pending::<()>().await;
            });
            GuestAgent::Socket.shut_down(dir.path()).await.unwrap_err();
            served.abort();
        }
        assert!(begun.elapsed() < PATIENCE * 3);
    }

    #[test]
    fn an_address_is_one_that_others_reach() {
        let of = |list: &str| address(&serde_json::from_str(list).unwrap());
        assert_eq!(of("{}"), None);
        assert_eq!(of(r#"[{"name":"lo","ip-addresses":[{"ip-address":"127.0.0.1"}]},{}]"#), None);
        let two = r#"[{"ip-addresses":[{"ip-address":"169.254.1.1"},{"ip-address":"fe80::1"},{"ip-address":"x"},
            {"ip-address":"10.0.2.15"}]}]"#;
        assert_eq!(of(two), Some("10.0.2.15".into()));
    }
}
