//! Lines of JSON over a unix socket: monitors of VMMs, guest agents, control sockets of disks. Owns the bytes of an
//! incomplete line.
//!
//! Invariant: a line that is too long or not JSON is an error; waiting for a line is cancel safe.

use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io;
use std::path::Path;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Memory for what is received, before it has to grow.
const USUAL_BYTES: usize = 8 << 10;

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
        Ok(JsonLines {
            stream: UnixStream::connect(socket).await?,
            input: Vec::with_capacity(USUAL_BYTES),
            longest_bytes,
        })
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
        self.next_as().await
    }

    /// Receives the next value as one of this type. It is not a [`Value`] in between: that costs more than all the rest.
    pub async fn next_as<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let strange = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        loop {
            if let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
                let value = serde_json::from_slice(&self.input[..end]);
                self.input.drain(..=end);
                return value.map_err(|_| strange("it does not speak JSON, or not as expected"));
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
