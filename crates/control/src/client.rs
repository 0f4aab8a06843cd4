//! The client of a control socket: one line out, one line back. Never waits forever.
//!
//! Invariant: a server that answers anything but one whole line of the protocol is an error, not a panic.

use crate::error::{ErrorKind, SupervisorError};
use crate::messages::{Request, Response};
use crate::trace_ring::Reader;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use serde_json::Value;
use std::io::{self, BufRead, BufReader, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest answer that is taken.
const MAX_ANSWER_BYTES: u64 = 1 << 20;
/// How long an answer may take. A forced reset completes what was accepted first.
const PATIENCE: Duration = Duration::from_secs(60);
const SEE_WHETHER_IT_RUNS: &str = "see whether 'spillway serve' still runs";

/// Somebody who records what a disk is asked.
pub struct Recorder {
    /// What it is: `size_bytes`, `serial`, and `live_bytes`: what was written before, and is not known to the recording.
    pub disk: Value,
    /// Its requests.
    pub ring: Reader,
    /// Readable when the disk ends.
    pub connection: UnixStream,
    memory: OwnedFd,
}

impl Recorder {
    /// What was given, which the ring is read from.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// A connection to a control socket.
pub struct Client {
    path: PathBuf,
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects.
    pub fn connect(path: &Path) -> Result<Client, SupervisorError> {
        let stream = UnixStream::connect(path).map_err(|e| {
            let at = path.display();
            match e.kind() {
                io::ErrorKind::PermissionDenied => SupervisorError::new(
                    ErrorKind::Permission,
                    format!("control socket {at}: permission denied: run as its owner, or serve with --socket-group"),
                ),
                io::ErrorKind::NotFound => SupervisorError::new(
                    ErrorKind::Unavailable,
                    format!("control socket {at}: no such socket: give the path that 'serve --control' was given"),
                ),
                io::ErrorKind::ConnectionRefused => SupervisorError::new(
                    ErrorKind::Unavailable,
                    format!("control socket {at}: nobody serves it: start 'spillway serve' with --control {at}"),
                ),
                _ => {
                    SupervisorError::caused(ErrorKind::Unavailable, format!("control socket {at}"), e, "check the path")
                }
            }
        })?;
        let client = Client { path: path.to_owned(), stream: BufReader::new(stream) };
        let stream = client.stream.get_ref();
        stream
            .set_read_timeout(Some(PATIENCE))
            .and_then(|()| stream.set_write_timeout(Some(PATIENCE)))
            .map_err(|e| client.lost(e))?;
        Ok(client)
    }

    /// Asks, and waits for the answer.
    pub fn ask(&mut self, request: &Request) -> Result<Value, SupervisorError> {
        let mut line = serde_json::to_vec(request).expect("a request is plain data");
        line.push(b'\n');
        self.stream.get_mut().write_all(&line).map_err(|e| self.lost(e))?;
        let mut answer = Vec::new();
        let read = (&mut self.stream).take(MAX_ANSWER_BYTES).read_until(b'\n', &mut answer);
        read.map_err(|e| self.lost(e))?;
        if answer.last() != Some(&b'\n') {
            return Err(self.broken("it closed the connection"));
        }
        self.value(&answer)
    }

    fn value(&self, answer: &[u8]) -> Result<Value, SupervisorError> {
        match serde_json::from_slice(answer) {
            Ok(Response::Ok(value)) => Ok(value),
            Ok(Response::Error { code, message }) => {
                let kind = match code.as_str() {
                    "refused" | "busy" => ErrorKind::Refused,
                    _ => ErrorKind::Internal,
                };
                Err(SupervisorError::new(kind, format!("{}: {message}", self.path.display())))
            }
            Err(_) => Err(SupervisorError::new(
                ErrorKind::Unavailable,
                format!("{}: this is not a spillway control socket: check the path", self.path.display()),
            )),
        }
    }

    /// Begins to record: what the disk is asked from here on, and what it said of itself.
    pub fn trace(mut self) -> Result<Recorder, SupervisorError> {
        let mut line = serde_json::to_vec(&Request::Trace).expect("a request is plain data");
        line.push(b'\n');
        self.stream.get_mut().write_all(&line).map_err(|e| self.lost(e))?;
        // The ring comes with the first byte, and the line is shorter than a packet.
        let mut answer = vec![0; MAX_ANSWER_BYTES as usize];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut whole = [IoSliceMut::new(&mut answer)];
        let received =
            rustix::net::recvmsg(self.stream.get_ref(), &mut whole, &mut control, RecvFlags::CMSG_CLOEXEC)
                .map_err(|e| self.lost(io::Error::from(e)))?;
        let ring = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
            _ => None,
        });
        answer.truncate(received.bytes);
        let disk = self.value(&answer)?;
        let memory = ring.ok_or_else(|| self.broken("no memory came with its answer"))?;
        let ring = Reader::open(&memory).map_err(|e| {
            let what = format!("control socket {}", self.path.display());
            SupervisorError::caused(ErrorKind::Unavailable, what, e, SEE_WHETHER_IT_RUNS)
        })?;
        Ok(Recorder { disk, ring, connection: self.stream.into_inner(), memory })
    }

    /// The next event, after [`Request::Events`]; `None` when the server has ended.
    pub fn next_event(&mut self) -> Result<Option<Value>, SupervisorError> {
        // Days may pass.
        self.stream.get_ref().set_read_timeout(None).map_err(|e| self.lost(e))?;
        let mut line = Vec::new();
        let read = (&mut self.stream).take(MAX_ANSWER_BYTES).read_until(b'\n', &mut line);
        if read.map_err(|e| self.lost(e))? == 0 {
            return Ok(None);
        }
        match serde_json::from_slice::<Value>(&line) {
            Ok(mut value) => Ok(Some(value["event"].take())),
            Err(e) => {
                let what = format!("control socket {}: what came is no event", self.path.display());
                Err(SupervisorError::caused(ErrorKind::Unavailable, what, e, SEE_WHETHER_IT_RUNS))
            }
        }
    }

    /// The connection has failed.
    fn lost(&self, error: io::Error) -> SupervisorError {
        if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) {
            return self.broken(&format!("no answer in {} s", PATIENCE.as_secs()));
        }
        let what = format!("control socket {}", self.path.display());
        SupervisorError::caused(ErrorKind::Unavailable, what, error, SEE_WHETHER_IT_RUNS)
    }

    /// The server does not do what it should.
    fn broken(&self, why: &str) -> SupervisorError {
        let what = format!("control socket {}: {why}: {SEE_WHETHER_IT_RUNS}", self.path.display());
        SupervisorError::new(ErrorKind::Unavailable, what)
    }
}
