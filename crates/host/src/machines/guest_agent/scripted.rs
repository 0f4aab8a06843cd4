//! A guest agent of a test's own, which answers as the test says.

use super::{AgentCall, AgentChannel, GuestAgent};
use crate::hypervisor::libvirt::Libvirt;
use crate::hypervisor::qemu;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// End of an answer after which the connection is closed.
const HANG_UP: &[u8] = b"\0hang up";

/// An agent, its questions, and whether the VMM of its guest has ended.
pub struct ScriptedAgent {
    dir: TempDir,
    asked: Arc<Mutex<Vec<Value>>>,
    first: Arc<Mutex<Vec<u8>>>,
    channel: Arc<AgentChannel>,
    pub is_over: Arc<AtomicBool>,
}

impl ScriptedAgent {
    /// Begins one that sends what this returns for a question; `None`: nothing, ever.
    pub fn new(answer: impl FnMut(&Value) -> Option<Vec<u8>> + Send + 'static) -> ScriptedAgent {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join(qemu::AGENT)).unwrap();
        let asked = Arc::<Mutex<Vec<Value>>>::default();
        let first = Arc::<Mutex<Vec<u8>>>::default();
        tokio::spawn(serve(listener, Arc::clone(&asked), Arc::clone(&first), answer));
        ScriptedAgent { dir, asked, first, channel: Arc::default(), is_over: Arc::default() }
    }

    /// Begins one that returns these values, one after the other.
    pub fn returning(values: impl IntoIterator<Item = Value, IntoIter: Send + 'static>) -> ScriptedAgent {
        let mut values = values.into_iter();
        ScriptedAgent::new(move |_| values.next().map(|value| returned(&value)))
    }

    /// An answer after which it closes the connection.
    pub fn hang_up(text: &[u8]) -> Vec<u8> {
        [text, HANG_UP].concat()
    }

    /// Sends these bytes before each answer to a greeting.
    pub fn says_first(&self, bytes: Vec<u8>) {
        *self.first.lock().unwrap() = bytes;
    }

    pub fn call(&self) -> AgentCall {
        let is_over = Arc::clone(&self.is_over);
        AgentCall::new(
            GuestAgent::Socket,
            self.dir.path().to_owned(),
            Arc::clone(&self.channel),
            Arc::new(Semaphore::new(1)),
            Arc::new(move || is_over.load(Ordering::Relaxed)),
        )
    }

    /// Names of the commands that were asked.
    pub fn commands(&self) -> Vec<String> {
        self.asked.lock().unwrap().iter().map(|asked| asked["execute"].as_str().unwrap().to_owned()).collect()
    }

    /// Arguments of a question.
    pub fn arguments(&self, n: usize) -> Value {
        self.asked.lock().unwrap()[n]["arguments"].clone()
    }
}

/// A line that returns a value.
pub fn returned(value: &Value) -> Vec<u8> {
    format!("{}\n", json!({ "return": value })).into_bytes()
}

/// Serves one connection after the other, as QEMU does.
async fn serve(
    listener: UnixListener,
    asked: Arc<Mutex<Vec<Value>>>,
    first: Arc<Mutex<Vec<u8>>>,
    mut answer: impl FnMut(&Value) -> Option<Vec<u8>>,
) {
    while let Ok((stream, _)) = listener.accept().await {
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        while stream.read_until(b'\n', &mut line).await.is_ok_and(|n| n > 0) {
            let question: Value =
                serde_json::from_slice(line.strip_prefix(&[0xff]).unwrap_or(&line)).unwrap();
            line.clear();
            let first = first.lock().unwrap().clone();
            if !reply(&mut stream, &question, (&asked, &first), &mut answer).await {
                break;
            }
        }
    }
}

async fn reply(
    stream: &mut BufReader<UnixStream>,
    question: &Value,
    (asked, first): (&Mutex<Vec<Value>>, &[u8]),
    answer: &mut impl FnMut(&Value) -> Option<Vec<u8>>,
) -> bool {
    let text = match question["execute"].as_str() {
        Some("guest-sync-delimited") => {
            Some([first, &[0xff], returned(&question["arguments"]["id"]).as_slice()].concat())
        }
        _ => {
            asked.lock().unwrap().push(question.clone());
            answer(question)
        }
    };
    match text {
        Some(text) => match text.strip_suffix(HANG_UP) {
            Some(text) => {
                let _ = stream.write_all(text).await;
                false
            }
            None => stream.write_all(&text).await.is_ok(),
        },
        None => true,
    }
}

/// A libvirt whose virsh is this script.
pub fn scripted_libvirt(dir: &Path, script: &str) -> Arc<Libvirt> {
    let virsh = dir.join("virsh");
    // A process of its own writes it: a program that some process has open for writing cannot be started.
    let write = "printf '#!/bin/sh\n%s\n' \"$1\" >\"$0\" && chmod 700 \"$0\"";
    let written = std::process::Command::new("sh").args(["-c", write]).arg(&virsh).arg(script).status();
    assert!(written.unwrap().success());
    Arc::new(Libvirt::by(virsh.to_str().unwrap().into(), "qemu:///system".into(), dir.join("cache")))
}
