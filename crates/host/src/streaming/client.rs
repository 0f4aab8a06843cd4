//! The control connection to `spillway-streamd serve`. Owns the socket.
//!
//! Invariant: no call waits longer than its deadline.

use crate::error::HostError;
use crate::short_path::ShortPath;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket_with,
};
use spillway_api::ErrorCode;
use spillway_registry::serve::{CONTROL, ControlReply, ControlRequest, MOST_CONTROL_BYTES};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest time for an answer: the process may open an image of which it counts all chunks.
const ANSWER: Duration = Duration::from_secs(30);

/// A connection.
pub struct ControlClient(OwnedFd);

impl ControlClient {
    /// Connects to the process that was started in a folder.
    pub fn connect(folder: &Path) -> Result<ControlClient, HostError> {
        let path = ShortPath::of(folder, CONTROL)?;
        let connected = || {
            let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
            [Timeout::Recv, Timeout::Send]
                .iter()
                .try_for_each(|way| set_socket_timeout(&socket, *way, Some(ANSWER)))?;
            connect(&socket, &SocketAddrUnix::new(path.path())?)?;
            Ok::<_, Errno>(socket)
        };
        connected().map(ControlClient).map_err(|e| failed(&e.into()))
    }

    /// Sends a request with descriptors, and waits for the answer, which may be a refusal.
    pub fn ask(&self, request: &ControlRequest, fds: &[BorrowedFd<'_>]) -> Result<ControlReply, HostError> {
        let answered = || {
            let packet = serde_json::to_vec(request)?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            sendmsg(&self.0, &[IoSlice::new(&packet)], &mut ancillary, SendFlags::NOSIGNAL)?;
            let mut answer = vec![0; MOST_CONTROL_BYTES];
            let (len, _) = recv(&self.0, &mut answer[..], RecvFlags::empty())?;
            match len {
                0 => Err(io::ErrorKind::UnexpectedEof.into()),
                len => Ok(serde_json::from_slice(&answer[..len])?),
            }
        };
        answered().map_err(|e: io::Error| failed(&e))
    }

    /// The same; a refusal is an error.
    pub fn order(&self, request: &ControlRequest, fds: &[BorrowedFd<'_>]) -> Result<ControlReply, HostError> {
        match self.ask(request, fds)? {
            ControlReply::Refused(why) => {
                Err(HostError::new(ErrorCode::Unavailable, format!("spillway-streamd: {why}")))
            }
            reply => Ok(reply),
        }
    }

    /// Waits until the process has gone, or one of the others is readable, or this time has come. True: it has gone.
    pub fn is_gone(&self, other: BorrowedFd<'_>, until: Option<Instant>) -> bool {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left =
            left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
        let mut fds = [PollFd::new(&self.0, PollFlags::IN), PollFd::new(&other, PollFlags::IN)];
        // Interrupted, it is called again.
        let _ = poll(&mut fds, left.as_ref());
        // It says nothing that it was not asked.
        !fds[0].revents().is_empty()
    }
}

fn failed(error: &io::Error) -> HostError {
    let message = format!("spillway-streamd, which brings chunks of images, does not answer: {error}");
    HostError::new(ErrorCode::Unavailable, message)
}
