//! A guest agent of a test's own, which answers as the test says.

use super::{AgentCall, GuestAgent};
use crate::hypervisor::qemu;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// An agent, its questions, and whether the VMM of its guest has ended.
pub struct ScriptedAgent {
    dir: TempDir,
    asked: Arc<Mutex<Vec<Value>>>,
    pub is_over: Arc<AtomicBool>,
}

impl ScriptedAgent {
    /// Begins one that sends what this returns for a question; `None`: nothing, ever.
    pub fn new(answer: impl FnMut(&Value) -> Option<Vec<u8>> + Send + 'static) -> ScriptedAgent {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join(qemu::AGENT)).unwrap();
        let asked = Arc::<Mutex<Vec<Value>>>::default();
        tokio::spawn(serve(listener, Arc::clone(&asked), answer));
        ScriptedAgent { dir, asked, is_over: Arc::default() }
    }

    /// Begins one that returns these values, one after the other.
    pub fn returning(values: impl IntoIterator<Item = Value, IntoIter: Send + 'static>) -> ScriptedAgent {
        let mut values = values.into_iter();
        ScriptedAgent::new(move |_| values.next().map(|value| returned(&value)))
    }

    pub fn call(&self) -> AgentCall {
        let is_over = Arc::clone(&self.is_over);
        AgentCall {
            agent: GuestAgent::Socket,
            folder: self.dir.path().to_owned(),
            turn: Arc::default(),
            answers: Arc::new(Semaphore::new(1)),
            is_over: Box::new(move || is_over.load(Ordering::Relaxed)),
        }
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
    mut answer: impl FnMut(&Value) -> Option<Vec<u8>>,
) {
    while let Ok((stream, _)) = listener.accept().await {
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        while stream.read_until(b'\n', &mut line).await.is_ok_and(|n| n > 0) {
            let question: Value =
                serde_json::from_slice(line.strip_prefix(&[0xff]).unwrap_or(&line)).unwrap();
            line.clear();
            if !reply(&mut stream, &question, &asked, &mut answer).await {
                break;
            }
        }
    }
}

async fn reply(
    stream: &mut BufReader<UnixStream>,
    question: &Value,
    asked: &Mutex<Vec<Value>>,
    answer: &mut impl FnMut(&Value) -> Option<Vec<u8>>,
) -> bool {
    let text = match question["execute"].as_str() {
        Some("guest-sync-delimited") => {
            Some([&[0xff], returned(&question["arguments"]["id"]).as_slice()].concat())
        }
        _ => {
            asked.lock().unwrap().push(question.clone());
            answer(question)
        }
    };
    match text {
        Some(text) => stream.write_all(&text).await.is_ok(),
        None => true,
    }
}
