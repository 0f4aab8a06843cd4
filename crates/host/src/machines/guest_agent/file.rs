//! Files that a guest agent reads and writes (QEMU, qga/qapi-schema.json: `guest-file-open` and others). Owns the open file.
//!
//! Invariant: a file that was opened is closed whatever happens, unless its VMM has ended or the agent does not answer; a machine has
//! one open file at a time; and no more bytes are taken than a file may have.

use super::{AgentCall, AgentError};
use base64ct::{Base64, Encoding};
use serde_json::{Value, json};
use spillway_api::MOST_GUEST_FILE_BYTES;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Longest time for all pieces of a file.
const PATIENCE: Duration = Duration::from_secs(120);
/// Most bytes that are read by one question.
const READ_BYTES: usize = 256 << 10;
/// Most bytes that are written by one question, which libvirt takes as a line.
const WRITE_BYTES: usize = 64 << 10;
/// How often in a row nothing may be read without the end of the file, and the pause after that.
const MAX_EMPTY_READS: u32 = 10;
const EMPTY_PAUSE: Duration = Duration::from_millis(100);

/// Reads a file.
pub async fn read(call: &AgentCall, path: &str) -> Result<Vec<u8>, AgentError> {
    let _turn = call.file_turn().await?;
    let file = OpenFile::open(call, path, "rb").await?;
    let read = timeout(PATIENCE, file.read()).await.unwrap_or(Err(AgentError::Late));
    // What was read is whole, whether the agent can close the file or not.
    let _ = file.close(read.as_ref().err()).await;
    read
}

/// Writes a file, in place of what was there. If it fails the file may have a part of the content.
pub async fn write(call: &AgentCall, path: &str, content: &[u8]) -> Result<(), AgentError> {
    let _turn = call.file_turn().await?;
    let file = OpenFile::open(call, path, "wb").await?;
    let written = timeout(PATIENCE, file.write(content)).await.unwrap_or(Err(AgentError::Late));
    let closed = file.close(written.as_ref().err()).await;
    written.and(closed)
}

/// A file that the agent has open.
struct OpenFile<'a> {
    call: &'a AgentCall,
    handle: i64,
}

impl OpenFile<'_> {
    async fn open<'a>(call: &'a AgentCall, path: &str, mode: &str) -> Result<OpenFile<'a>, AgentError> {
        let arguments = json!({ "path": path, "mode": mode });
        let answer = call.ask(&json!({ "execute": "guest-file-open", "arguments": arguments })).await?;
        let handle = answer.as_i64().ok_or(AgentError::Nonsense("no handle of a file"))?;
        Ok(OpenFile { call, handle })
    }

    async fn ask(&self, command: &str, mut arguments: Value) -> Result<Value, AgentError> {
        arguments["handle"] = self.handle.into();
        self.call.ask(&json!({ "execute": command, "arguments": arguments })).await
    }

    async fn read(&self) -> Result<Vec<u8>, AgentError> {
        let (mut content, mut empty_reads) = (Vec::new(), 0);
        loop {
            let answer = self.ask("guest-file-read", json!({ "count": READ_BYTES })).await?;
            let piece = answer["buf-b64"].as_str().unwrap_or_default();
            let piece = Base64::decode_vec(piece)
                .map_err(|_| AgentError::Nonsense("a piece of a file that is not base64"))?;
            if answer["count"].as_u64() != Some(piece.len() as u64) || piece.len() > READ_BYTES {
                return Err(AgentError::Nonsense("a piece of a file of another length"));
            }
            if content.len() + piece.len() > MOST_GUEST_FILE_BYTES {
                return Err(AgentError::FileTooLarge);
            }
            content.extend_from_slice(&piece);
            match answer["eof"].as_bool() {
                Some(true) => return Ok(content),
                Some(false) => {}
                None => return Err(AgentError::Nonsense("not whether a file ends")),
            }
            if piece.is_empty() {
                empty_reads += 1;
                if empty_reads >= MAX_EMPTY_READS {
                    return Err(AgentError::Nonsense("a file without content or end"));
                }
                sleep(EMPTY_PAUSE).await;
            } else {
                empty_reads = 0;
            }
        }
    }

    async fn write(&self, content: &[u8]) -> Result<(), AgentError> {
        for piece in content.chunks(WRITE_BYTES) {
            let answer =
                self.ask("guest-file-write", json!({ "buf-b64": Base64::encode_string(piece) })).await?;
            // One that writes less has an error to say: no space is one of those.
            if answer["count"].as_u64() != Some(piece.len() as u64) {
                return Err(AgentError::Nonsense("another length than it was to write"));
            }
        }
        self.ask("guest-file-flush", json!({})).await.map(drop)
    }

    /// Closes it, after this error if there was one.
    async fn close(self, error: Option<&AgentError>) -> Result<(), AgentError> {
        match error {
            Some(AgentError::Over) => Ok(()),
            _ => self.ask("guest-file-close", json!({})).await.map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::scripted::{ScriptedAgent, returned};
    use super::*;
    use std::sync::{Arc, Mutex};

    fn piece(bytes: &[u8], eof: bool) -> Value {
        json!({ "count": bytes.len(), "buf-b64": Base64::encode_string(bytes), "eof": eof })
    }

    /// A guest with one file.
    fn guest(content: Arc<Mutex<Vec<u8>>>) -> ScriptedAgent {
        let mut at = 0;
        ScriptedAgent::new(move |asked| {
            let (mut content, arguments) = (content.lock().unwrap(), &asked["arguments"]);
            let answer = match asked["execute"].as_str().unwrap() {
                "guest-file-open" => {
                    at = 0;
                    if arguments["mode"] == "wb" {
                        content.clear();
                    }
                    json!(1000)
                }
                "guest-file-read" => {
                    let end = content.len().min(at + arguments["count"].as_u64().unwrap() as usize);
                    let is_end = end < at + arguments["count"].as_u64().unwrap() as usize;
                    let from = std::mem::replace(&mut at, end);
                    piece(&content[from..end], is_end)
                }
                "guest-file-write" => {
                    let bytes = Base64::decode_vec(arguments["buf-b64"].as_str().unwrap()).unwrap();
                    content.extend(&bytes);
                    json!({ "count": bytes.len(), "eof": false })
                }
                _ => json!({}),
            };
            Some(returned(&answer))
        })
    }

    #[tokio::test]
    async fn a_file_is_written_and_read_in_pieces() {
        for length in [0, 1, WRITE_BYTES, READ_BYTES, 3 * READ_BYTES + 1] {
            let content: Vec<u8> = (0..length).map(|n| (n * 7 + n / 251) as u8).collect();
            let stored = Arc::<Mutex<Vec<u8>>>::default();
            let agent = guest(Arc::clone(&stored));
            write(&agent.call(), "/f", &content).await.unwrap();
            assert!(*stored.lock().unwrap() == content, "{length}");
            assert_eq!(agent.commands().last().unwrap(), "guest-file-close");
            assert!(agent.commands().contains(&"guest-file-flush".to_owned()));
            assert!(read(&agent.call(), "/f").await.unwrap() == content, "{length}");
            assert_eq!(agent.commands().last().unwrap(), "guest-file-close");
        }
    }

    #[tokio::test]
    async fn files_of_a_machine_are_written_one_after_the_other() {
        let stored = Arc::<Mutex<Vec<u8>>>::default();
        let agent = Arc::new(guest(Arc::clone(&stored)));
        let writes = [b'a', b'b', b'c'].map(|byte| {
            let agent = Arc::clone(&agent);
            tokio::spawn(async move { write(&agent.call(), "/f", &[byte; 3 * WRITE_BYTES]).await.unwrap() })
        });
        for write in writes {
            write.await.unwrap();
        }
        let stored = stored.lock().unwrap();
        assert!(stored.len() == 3 * WRITE_BYTES && stored.iter().all(|byte| *byte == stored[0]));
        let open = |command: &String| ["guest-file-open", "guest-file-close"].contains(&command.as_str());
        let order: Vec<_> = agent.commands().into_iter().filter(open).collect();
        assert_eq!(order, ["guest-file-open", "guest-file-close"].repeat(3));
    }

    #[tokio::test]
    async fn a_file_that_never_ends_is_closed_and_refused() {
        let full = piece(&vec![0; READ_BYTES], false);
        for (endless, want) in [
            (full, AgentError::FileTooLarge),
            (piece(b"", false), AgentError::Nonsense("a file without content or end")),
        ] {
            let agent = ScriptedAgent::new(move |asked| {
                Some(match asked["execute"].as_str().unwrap() {
                    "guest-file-open" => returned(&json!(5)),
                    "guest-file-read" => returned(&endless),
                    _ => returned(&json!({})),
                })
            });
            assert_eq!(read(&agent.call(), "/dev/zero").await, Err(want));
            let commands = agent.commands();
            assert_eq!(commands.last().unwrap(), "guest-file-close");
            assert!(commands.len() < MOST_GUEST_FILE_BYTES / READ_BYTES + 5, "{}", commands.len());
        }
    }

    #[tokio::test]
    async fn what_makes_no_sense_is_refused_and_the_file_closed() {
        let long = json!({ "count": READ_BYTES + 1, "buf-b64": Base64::encode_string(&vec![0; READ_BYTES + 1]), "eof": true });
        for wrong in [
            json!({}),
            json!(7),
            json!({ "count": 2, "buf-b64": "AA==", "eof": true }),
            json!({ "count": -1, "buf-b64": "AA==", "eof": true }),
            json!({ "count": 1, "buf-b64": "AA", "eof": true }),
            json!({ "count": 1, "buf-b64": "AA==" }),
            long,
        ] {
            let agent = ScriptedAgent::returning([json!(5), wrong.clone(), json!({})]);
            let error = read(&agent.call(), "/f").await.unwrap_err();
            assert!(matches!(error, AgentError::Nonsense(_)), "{error:?}");
            assert_eq!(agent.commands(), ["guest-file-open", "guest-file-read", "guest-file-close"]);
            assert_eq!(agent.arguments(2), json!({ "handle": 5 }));
        }
        for wrong in [json!({}), json!({ "count": 0 }), json!({ "count": 4 })] {
            let agent = ScriptedAgent::returning([json!(5), wrong, json!({})]);
            let error = write(&agent.call(), "/f", b"abc").await.unwrap_err();
            assert!(matches!(error, AgentError::Nonsense(_)), "{error:?}");
            assert_eq!(agent.commands(), ["guest-file-open", "guest-file-write", "guest-file-close"]);
        }
        let agent = ScriptedAgent::returning([json!("x")]);
        let error = read(&agent.call(), "/f").await.unwrap_err();
        assert!(matches!(error, AgentError::Nonsense(_)), "{error:?}");
        assert_eq!(agent.commands(), ["guest-file-open"]);
    }

    #[tokio::test]
    async fn an_error_at_the_flush_or_the_close_of_a_written_file_is_one() {
        let full = b"{\"error\":{\"desc\":\"No space left on device\"}}\n".to_vec();
        for at in ["guest-file-flush", "guest-file-close"] {
            let full = full.clone();
            let agent = ScriptedAgent::new(move |asked| match asked["execute"].as_str().unwrap() {
                command if command == at => Some(full.clone()),
                "guest-file-open" => Some(returned(&json!(5))),
                _ => Some(returned(&json!({ "count": 3 }))),
            });
            assert_eq!(
                write(&agent.call(), "/f", b"abc").await,
                Err(AgentError::refused("No space left on device"))
            );
            assert_eq!(agent.commands().last().unwrap(), "guest-file-close");
        }
    }

    #[tokio::test]
    async fn no_piece_is_written_to_or_read_of_another_vmms_guest() {
        let (ends, end) = std::sync::mpsc::channel::<Arc<std::sync::atomic::AtomicBool>>();
        let agent = ScriptedAgent::new(move |asked| match asked["execute"].as_str().unwrap() {
            "guest-file-open" => Some(returned(&json!(5))),
            _ => {
                end.recv().unwrap().store(true, std::sync::atomic::Ordering::Relaxed);
                Some(returned(&json!({ "count": WRITE_BYTES })))
            }
        });
        ends.send(Arc::clone(&agent.is_over)).unwrap();
        let content = vec![0; WRITE_BYTES * 3];
        assert_eq!(write(&agent.call(), "/f", &content).await, Err(AgentError::Over));
        assert_eq!(agent.commands(), ["guest-file-open", "guest-file-write"]);
    }
}
