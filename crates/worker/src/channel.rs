//! What supervisor and worker say to each other: one JSON message with its fds per packet of a SEQPACKET
//! socket. The supervisor owns every fd and every path; the worker is given fds and knows no path.

use crate::worker::ReportedError;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use spillway_control::DiskSettings;
use spillway_layout::ImageFormat;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Most bytes of one message. A sender of longer text is refused; the other side never sees half a message.
pub const MAX_MESSAGE_BYTES: usize = 64 << 10;
/// Workers that may have died without having ended, until the next is started: each has a pidfd.
pub const MOST_DEAD: usize = 3;
/// Most fds that come with one message: those of [`Start`].
pub const MAX_FDS: usize = 9 + MOST_DEAD;

/// Version of the messages: supervisor and worker must have the same.
pub const PROTOCOL_VERSION: u32 = 10;

/// A way in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClientKind {
    /// A VMM's connection.
    VhostUser,
    /// An NBD client's.
    Nbd,
}

/// The disk that a worker is to serve. Its fds come with it in this order: `meta`, base image, the digests of its
/// chunks (with `digests`), the memory that says which of its chunks are there (with `chunk_bytes`), `data` (modes with a RAM tier), overflow or difference file (modes with one), the storage models of
/// the base image's store and of that file (with `base_model` and `overflow_model`), the worker's lifeline, and a pidfd of each
/// worker before it that has died and not ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Start {
    /// How many workers before it have not ended: I/O of theirs may still be begun.
    pub predecessors: u8,
    /// The disk's number, which its `meta` memory names too.
    pub disk_id: u64,
    /// Size that the guest sees.
    pub size_bytes: u64,
    /// Virtual size of the base image.
    pub base_bytes: u64,
    /// What the disk is like, every setting said that its mode has.
    pub settings: DiskSettings,
    /// Format of the base image.
    pub format: ImageFormat,
    /// Its chunks are compared with their digests before they are used.
    pub digests: bool,
    /// The base image is streamed: size of its chunks, in bytes. Those that are missing are asked for on the connection that
    /// comes with [`ToWorker::Chunks`].
    pub chunk_bytes: Option<u64>,
    /// The base image's store is as slow as a storage model says.
    pub base_model: bool,
    /// The store of the overflow or difference file is.
    pub overflow_model: bool,
    /// NBD clients may come, who ask which parts of the disk are zero.
    pub nbd: bool,
    /// Name of the NBD export, beside the empty one: that of each worker of this supervisor, and of no other's. A client that names it
    /// is not connected to a later disk at the same socket, which has other content. Empty from supervisors that know no name.
    #[serde(default)]
    pub export: String,
    /// Request queues offered on vhost-user.
    pub queues: u16,
    /// Serial number that the guest sees; at most 20 bytes of ASCII.
    pub serial: String,
    /// What the guest chose the last time, write-back or write-through.
    pub writeback: bool,
}

/// From the supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum ToWorker {
    /// The first message.
    Start(Start),
    /// An accepted connection; its fd comes with it. The worker answers `ClientGone` when it has let go,
    /// at once if it refuses it (a second VMM). With a VMM's comes the table of its requests in flight, perhaps
    /// of an earlier worker's; its socket is the supervisor's to serve as long as there is one.
    Client {
        /// The supervisor's number for it.
        id: u64,
        /// Which protocol it speaks.
        kind: ClientKind,
    },
    /// A VMM's message that an earlier worker has carried out, with its fds.
    Replay {
        /// As in `Client`.
        id: u64,
        /// The whole message.
        bytes: Vec<u8>,
    },
    /// A VMM's message, with its fds. Answered by `Answered` before the next one comes.
    Message {
        /// As in `Client`.
        id: u64,
        /// The whole message.
        bytes: Vec<u8>,
    },
    /// A VMM has closed its connection, or sent what cannot be followed. Answered by `ClientGone`.
    Left {
        /// As in `Client`.
        id: u64,
        /// Why its connection is ended; none when it left by itself.
        error: Option<ReportedError>,
    },
    /// Chunks of the streamed image can be asked for on the connection that comes with it, from here on, and the memory that
    /// comes second says which are there.
    Chunks,
    /// Throw away everything written. Answered by `ResetDone`.
    Reset {
        /// Disconnect clients first; without it a connected client refuses the reset.
        force: bool,
    },
    /// These settings from here on, which differ from those before in limits alone: all of them, or none. Answered by
    /// `SetDone`.
    Set(DiskSettings),
    /// Somebody records what the disk is asked, from here on, in the ring that comes with it; or nobody any more.
    Trace {
        /// Whether somebody does.
        on: bool,
    },
    /// What every size of the RAM tier would do. Answered by `Curve`.
    Curve {
        /// The share of the written bytes that it should absorb.
        goal: Option<f64>,
    },
    /// Which chunks of the streamed image were read. Answered by `Touched`.
    Touched,
    /// Complete what was accepted, leave what waits for space unanswered, and exit with 0.
    Stop {
        /// Another worker goes on with the disk. Without one the files are free when the worker has ended.
        disk_goes_on: bool,
    },
}

/// From the worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum FromWorker {
    /// What it is: its first message, before it has read any.
    Hello {
        /// [`PROTOCOL_VERSION`].
        protocol: u32,
        /// `spillway_core::LAYOUT_VERSION`.
        layout: u64,
        /// The program's.
        version: String,
    },
    /// It serves.
    Ready {
        /// How it does I/O: a word of [`crate::worker::Kind`].
        engine: String,
        /// Version of the Landlock that confines it; 0 for none.
        landlock: u32,
    },
    /// It cannot serve. It exits after this.
    Failed {
        /// Why.
        error: ReportedError,
    },
    /// The answer to `Message`; what goes to the VMM with it has its fd, if any, beside it.
    Answered {
        /// As in `Client`.
        id: u64,
        /// It was carried out. Else it has changed nothing.
        accepted: bool,
        /// What the VMM is to be told.
        answer: Option<Vec<u8>>,
        /// What the guest has chosen now: write-back or write-through.
        writeback: bool,
    },
    /// A connection has ended or was refused.
    ClientGone {
        /// As in `Client`.
        id: u64,
        /// Why, for the log; none when the client left by itself.
        error: Option<ReportedError>,
    },
    /// The answer to `Reset`.
    ResetDone {
        /// The new generation, or why it was refused.
        result: Result<u64, ReportedError>,
    },
    /// The answer to `Set`.
    SetDone {
        /// Or why nothing has changed.
        result: Result<(), ReportedError>,
    },
    /// The connection for chunks of the streamed image is lost.
    ChunksLost,
    /// The answer to `Curve`.
    Curve {
        /// `spillway_advisor::curve::Curve`, and how long it has gone along.
        curve: serde_json::Value,
    },
    /// The answer to `Touched`.
    Touched {
        /// In the order of their first use.
        chunks: Vec<u32>,
    },
    /// Something worth a line in the log, and telling those that listen.
    Event {
        /// For programs: a word that stays the same.
        kind: String,
        /// For people.
        text: String,
    },
}

/// Why a message was not sent, or not received.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The socket has failed, has nothing to give or no space to take it (`AGAIN`), or is closed.
    #[error(transparent)]
    Socket(#[from] Errno),
    /// The message is longer than one may be.
    #[error(
        "the message has {bytes} bytes and {fds} file descriptors: at most {MAX_MESSAGE_BYTES} and {MAX_FDS} are allowed"
    )]
    TooLarge {
        /// Its length.
        bytes: usize,
        /// The file descriptors that were to go with it.
        fds: usize,
    },
    /// What came is a part of a message.
    #[error("a part of a message came, not the whole")]
    CutShort,
    /// What came, or was to be sent, is no message of this channel.
    #[error("this is not a message of the channel: {0}")]
    NoMessage(#[from] serde_json::Error),
}

impl ChannelError {
    /// Nothing is wrong: on an end that does not block there is no message, or no space for one, now.
    pub fn would_block(&self) -> bool {
        matches!(self, ChannelError::Socket(Errno::AGAIN))
    }

    /// The process at the other end has gone.
    pub fn is_closed(&self) -> bool {
        matches!(self, ChannelError::Socket(Errno::PIPE | Errno::CONNRESET))
    }
}

impl From<ChannelError> for io::Error {
    fn from(error: ChannelError) -> io::Error {
        match error {
            ChannelError::Socket(errno) => errno.into(),
            error => io::Error::new(io::ErrorKind::InvalidData, error),
        }
    }
}

/// A new channel: its two ends, both blocking and closed on exec.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Sends one message with its fds. All of it is sent, or nothing.
pub fn send<T: Serialize>(
    channel: impl AsFd,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> Result<(), ChannelError> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_MESSAGE_BYTES || fds.len() > MAX_FDS {
        return Err(ChannelError::TooLarge { bytes: bytes.len(), fds: fds.len() });
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(fds));
        assert!(fits, "the space is made for MAX_FDS");
    }
    loop {
        match rustix::net::sendmsg(&channel, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return sent.map(|_| ()).map_err(ChannelError::from),
        }
    }
}

/// Receives one message with its fds, which are closed on exec. `None` when the other side has gone.
pub fn receive<T: DeserializeOwned>(channel: impl AsFd) -> Result<Option<(T, Vec<OwnedFd>)>, ChannelError> {
    let mut bytes = vec![0; MAX_MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut whole = [IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(&channel, &mut whole, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    // Taken in any case, so that fds that come with a bad message are closed.
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(ChannelError::CutShort);
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&bytes[..received.bytes])?, fds)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::ErrorKind;
    use rustix::io::{FdFlags, fcntl_getfd};
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    #[test]
    fn a_message_arrives_with_its_fds_in_order() {
        let (a, b) = pair().unwrap();
        let mut files: Vec<File> = (0..4)
            .map(|_| rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into())
            .collect();
        for (i, file) in files.iter_mut().enumerate() {
            writeln!(file, "{i}").unwrap();
            file.rewind().unwrap();
        }
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send(&a, &ToWorker::Client { id: 7, kind: ClientKind::Nbd }, &fds).unwrap();
        let (message, got) = receive::<ToWorker>(&b).unwrap().unwrap();
        assert!(matches!(message, ToWorker::Client { id: 7, kind: ClientKind::Nbd }));
        assert_eq!(got.len(), 4);
        for (i, fd) in got.into_iter().enumerate() {
            assert!(fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
            let mut text = String::new();
            File::from(fd).read_to_string(&mut text).unwrap();
            assert_eq!(text, format!("{i}\n"));
        }
    }

    #[test]
    fn messages_keep_their_borders() {
        let (a, b) = pair().unwrap();
        send(&a, &FromWorker::Ready { engine: "threads".into(), landlock: 6 }, &[]).unwrap();
        let refusal = ReportedError::new(ErrorKind::Refused, "a client is connected");
        send(&a, &FromWorker::ResetDone { result: Err(refusal.clone()) }, &[]).unwrap();
        assert!(matches!(receive::<FromWorker>(&b).unwrap().unwrap().0, FromWorker::Ready { .. }));
        match receive::<FromWorker>(&b).unwrap().unwrap().0 {
            FromWorker::ResetDone { result: Err(error) } => assert_eq!(error, refusal),
            other => panic!("{other:?}"),
        }
        drop(a);
        assert!(receive::<FromWorker>(&b).unwrap().is_none());
        let ready = FromWorker::Ready { engine: String::new(), landlock: 0 };
        assert!(send(&b, &ready, &[]).unwrap_err().is_closed());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let (a, b) = pair().unwrap();
        rustix::net::send(&a, b"{\"message\":\"no such\"}", SendFlags::empty()).unwrap();
        assert!(matches!(receive::<ToWorker>(&b), Err(ChannelError::NoMessage(_))));
        rustix::net::send(&a, &vec![b' '; MAX_MESSAGE_BYTES + 1], SendFlags::empty()).unwrap();
        assert!(matches!(receive::<ToWorker>(&b), Err(ChannelError::CutShort)));
        let long = FromWorker::Event { kind: "notice".into(), text: "x".repeat(MAX_MESSAGE_BYTES) };
        assert!(matches!(send(&a, &long, &[]), Err(ChannelError::TooLarge { .. })));
    }
}
