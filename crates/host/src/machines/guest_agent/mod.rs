//! The guest agent of a machine: asks it for the guest's address, for a shutdown, and to run programs and to read and write files
//! (`program`, `file`). Owns no connection between questions.
//!
//! Invariant: the agent's answers are a guest's: their length, their number and the time for them are bounded, and nothing
//! depends on what they say but the machine itself.

mod channel;
mod clipped;
mod error;
mod exchange;
pub mod file;
pub mod program;
#[cfg(test)]
mod scripted;
mod started;

use super::neighbours::is_unicast;
use crate::hypervisor::libvirt::Libvirt;
pub use channel::{AgentCall, AgentChannel};
pub use error::AgentError;
use exchange::AgentStream;
use serde_json::{Value, json};
pub use started::StartedProgram;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Longest wait for an answer.
pub const PATIENCE: Duration = Duration::from_secs(3);
/// How long an agent may take to refuse a shutdown. It says nothing if it carries it out.
const REFUSAL: Duration = Duration::from_secs(1);
/// Longest answer to a question that is the daemon's own.
const MAX_LINE_BYTES: usize = 64 << 10;

/// The channel to a guest agent.
#[derive(Clone)]
pub enum GuestAgent {
    /// The agent's socket in the machine's folder.
    Socket,
    /// The agent commands of libvirt, for the domain with this UUID, or a run of it (`Libvirt::run_of`).
    Libvirt(Arc<Libvirt>, String),
}

impl GuestAgent {
    /// Asks the agent for the guest's address.
    pub async fn address(&self, folder: &Path) -> io::Result<Option<String>> {
        match self {
            GuestAgent::Socket => {
                let ask = async {
                    let mut agent = AgentStream::connect(folder, MAX_LINE_BYTES).await?;
                    agent.send(&json!({ "execute": "guest-network-get-interfaces" })).await?;
                    agent.answer().await
                };
                Ok(address(&timeout(PATIENCE, ask).await?.map_err(failed)?))
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
                    let mut agent = AgentStream::connect(folder, MAX_LINE_BYTES).await?;
                    let mode = json!({ "mode": "powerdown" });
                    agent.send(&json!({ "execute": "guest-shutdown", "arguments": mode })).await?;
                    Ok::<_, AgentError>(agent)
                };
                let mut agent = timeout(PATIENCE, ask).await?.map_err(failed)?;
                match timeout(REFUSAL, agent.answer()).await {
                    Ok(Err(e @ AgentError::Refused(_))) => Err(failed(e)),
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

/// Nobody is told of it: the caller asks again, or does something else.
fn failed(error: AgentError) -> io::Error {
    io::Error::other(format!("{error:?}"))
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
    use crate::hypervisor::qemu;
    use std::time::Instant;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::UnixListener;

    /// Serves one connection: an agent that answers a question with this many lines of its own, the last one to the point,
    /// and a shutdown with this, if it answers that. Returns the questions.
    async fn agent(listener: UnixListener, strays: usize, refusal: Option<Value>) -> Vec<String> {
        let (mut stream, _) = listener.accept().await.unwrap();
        let (input, mut output) = stream.split();
        let mut lines = BufReader::new(input).split(b'\n');
        let mut asked = Vec::new();
        while let Ok(Some(line)) = lines.next_segment().await {
            let line = line.strip_prefix(b"\xff").unwrap_or(&line);
            let question: Value = serde_json::from_slice(line).unwrap();
            asked.push(question["execute"].as_str().unwrap().to_owned());
            let delimited = |answer: &Value| [b"\xff".as_slice(), format!("{answer}\n").as_bytes()].concat();
            let answer = match question["arguments"]["id"].as_u64() {
                Some(id) => [
                    // Half a line of 40 MiB that somebody has not waited for.
                    vec![b'A'; 40 << 20],
                    delimited(&json!({ "return": 1 })).repeat(strays),
                    delimited(&json!({ "return": id })),
                ]
                .concat(),
                None => refusal.as_ref().map(|answer| format!("{answer}\n").into_bytes()).unwrap_or_default(),
            };
            if output.write_all(&answer).await.is_err() {
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

    /// The agent of a libvirt whose virsh is this script.
    fn scripted_libvirt(dir: &Path, script: &str) -> GuestAgent {
        GuestAgent::Libvirt(scripted::scripted_libvirt(dir, script), "u".into())
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
