//! Lines of JSON over a unix socket: monitors of VMMs, guest agents, control sockets of disks. Owns the bytes of an
//! incomplete line.
//!
//! Invariant: a line that is too long or not JSON is an error; waiting for a line is cancel safe.

use serde_json::Value;
use std::io;
use std::path::Path;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// A connection.
#[derive(Debug)]
pub struct JsonLines {
    stream: UnixStream,
    input: Vec<u8>,
    longest_bytes: usize,
}

impl JsonLines {
    /// Connects. A longer line is an error.
    pub async fn connect(socket: &Path, longest_bytes: usize) -> io::Result<JsonLines> {
        Ok(JsonLines { stream: UnixStream::connect(socket).await?, input: Vec::new(), longest_bytes })
    }

    /// Id of the listening process.
    pub fn peer_pid(&self) -> Option<i32> {
        self.stream.peer_cred().ok()?.pid()
    }

    /// Sends a value.
    pub async fn send(&mut self, value: &Value) -> io::Result<()> {
        self.stream.write_all(format!("{value}\n").as_bytes()).await
    }

    /// Receives the next value.
    pub async fn next(&mut self) -> io::Result<Value> {
        let strange = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        loop {
            if let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.input.drain(..=end).collect();
                return serde_json::from_slice(&line).map_err(|_| strange("it does not speak JSON"));
            }
            if self.input.len() > self.longest_bytes {
                return Err(strange("its line does not end"));
            }
            if self.stream.read_buf(&mut self.input).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}
