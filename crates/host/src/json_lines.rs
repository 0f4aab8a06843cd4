//! Lines of JSON over a unix socket: monitors of VMMs, guest agents, control sockets of disks. Owns the bytes of an
//! incomplete line.
//!
//! Invariant: a line that is too long or not JSON is an error; waiting for a line is cancel safe.

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
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
        loop {
            if let Some(value) = self.take()? {
                return Ok(value);
            }
            if self.stream.read_buf(&mut self.input).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// The same, with a descriptor that is passed with it. Of several, the last is kept.
    pub async fn next_with_fd<T: DeserializeOwned>(&mut self) -> io::Result<(T, Option<OwnedFd>)> {
        let mut fd = None;
        loop {
            if let Some(value) = self.take()? {
                return Ok((value, fd));
            }
            let (stream, input) = (&self.stream, &mut self.input);
            let received = stream.async_io(Interest::READABLE, || receive(stream, input, &mut fd)).await?;
            if received == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Takes a value from what was received, if it is whole.
    fn take<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let strange = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        if let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
            let value = serde_json::from_slice(&self.input[..end]);
            self.input.drain(..=end);
            return value.map(Some).map_err(|_| strange("it does not speak JSON, or not as expected"));
        }
        match self.input.len() > self.longest_bytes {
            true => Err(strange("its line does not end")),
            false => Ok(None),
        }
    }
}

/// Receives what there is, and a descriptor that comes with it.
fn receive(stream: &UnixStream, input: &mut Vec<u8>, fd: &mut Option<OwnedFd>) -> io::Result<usize> {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?.bytes;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            *fd = rights.last().or(fd.take());
        }
    }
    input.extend_from_slice(&bytes[..received.min(bytes.len())]);
    Ok(received)
}
