//! The chunks of a disk's streamed image: opens the image at `spillway-streamd`, and gives each worker a connection to it. Owns
//! these connections until a worker has them, and the wait for that process while it is away.
//!
//! Invariant: what comes from that process is compared with what the disk has before a worker gets it. A disk that is served goes
//! on without it, as far as the chunks are there.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl, fstat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, send, socket_with,
};
use spillway_control::{ErrorKind, Streamed, SupervisorError};
use spillway_image::asks::{self, OPENED_BYTES, Opened};
use spillway_image::digests::{ChunkDigest, root_of as root_of_text};
use spillway_image::{OpenedImage, Residency, size_fault};
use spillway_layout::{BaseCache, ImageFormat};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long the start of a disk waits for the process, which may be about to be started itself.
const START_PATIENCE: Duration = Duration::from_secs(20);
/// How long an answer of it may take.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);
/// Pause before the next try of what a person has to mend.
const MENDING: Duration = Duration::from_secs(10);
/// Pause before the next try.
const PAUSE: Duration = Duration::from_millis(50);

/// A streamed image, as that process has opened it.
#[derive(Debug)]
pub(super) struct OpenedStream {
    /// Its file, in which the chunks that are missing are holes.
    pub image: OpenedImage,
    /// The memory that says which chunks are there.
    pub residency: OwnedFd,
    /// Size of its chunks, in bytes.
    pub chunk_bytes: u64,
    /// The connection on which chunks can be asked for.
    pub connection: OwnedFd,
}

/// The connection for chunks of the worker's that serves.
#[derive(Debug)]
pub(super) struct Chunks {
    at: Streamed,
    root: ChunkDigest,
    state: State,
}

#[derive(Debug)]
enum State {
    /// There is none: the next try is due then.
    None(Instant),
    /// The process has been asked, and may answer until then.
    Asked(OwnedFd, Instant),
    /// The worker has it.
    Given,
}

fn root_of(at: &Streamed) -> Result<ChunkDigest, SupervisorError> {
    root_of_text(&at.digest).ok_or_else(|| {
        let message = format!("'{}' is no digest of an image: give 'sha256:' and 64 digits", at.digest);
        SupervisorError::new(ErrorKind::Options, message)
    })
}

/// Opens the image when the disk is started.
///
/// # Errors
/// The process does not answer in time, or does not have the image.
pub(super) fn open(at: &Streamed, cache: BaseCache) -> Result<OpenedStream, SupervisorError> {
    let root = root_of(at)?;
    let deadline = Instant::now() + START_PATIENCE;
    let opened = loop {
        let tried = ask(at, &root).and_then(|connection| {
            let until = (Instant::now() + ANSWER_PATIENCE).min(deadline);
            wait_for(&connection, until)?;
            answer(connection)
        });
        match tried {
            Ok(opened) => break opened,
            Err(e) if Instant::now() + PAUSE > deadline => {
                let what = format!(
                    "spillway-streamd at {}, which has the image {}, does not open it",
                    at.socket.display(),
                    at.digest
                );
                let advice = "see whether spillwayd runs, and what it says in its log";
                return Err(SupervisorError::caused(ErrorKind::Unavailable, what, e, advice));
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    };
    set_cache(&opened.image, cache)?;
    Ok(opened)
}

/// Has the image read through the host's page cache or past it.
///
/// # Errors
/// The file system of the cache cannot.
pub(super) fn set_cache(image: &OpenedImage, cache: BaseCache) -> Result<(), SupervisorError> {
    if cache != BaseCache::None {
        return Ok(());
    }
    fcntl_setfl(&image.file, OFlags::DIRECT).map_err(|e| {
        let what =
            "the cache of streamed images cannot be read past the page cache, as --base-cache none asks";
        let advice = "use --base-cache host, or put the cache on a file system that has O_DIRECT (ext4, xfs)";
        SupervisorError::caused(ErrorKind::Image, what, e, advice)
    })
}

/// Connects, and names the image.
fn ask(at: &Streamed, root: &ChunkDigest) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connection = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&connection, &SocketAddrUnix::new(&at.socket)?)?;
    send(&connection, &asks::open(root), SendFlags::NOSIGNAL)?;
    Ok(connection)
}

fn wait_for(connection: &OwnedFd, until: Instant) -> io::Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::new(connection, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Reads the answer, which has come.
fn answer(connection: OwnedFd) -> io::Result<OpenedStream> {
    let mut packet = [0; OPENED_BYTES + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(&connection, &mut [IoSliceMut::new(&mut packet)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why);
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(invalid("its answer is too long"));
    }
    let opened =
        Opened::parse(&packet[..received.bytes]).ok_or_else(|| invalid("it does not know the image"))?;
    let [file, residency] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| invalid("its answer lacks files"))?;
    let Opened { size_bytes, chunk_bytes } = opened;
    if chunk_bytes == 0 || size_bytes == 0 || size_fault(size_bytes).is_some() {
        return Err(invalid("its answer has numbers that no image has"));
    }
    if fstat(&file)?.st_size as u64 != size_bytes {
        return Err(invalid("the file in its cache has another size than the image"));
    }
    Residency::open(residency.as_fd(), size_bytes.div_ceil(chunk_bytes))?;
    let image = OpenedImage { file, format: ImageFormat::Raw, virtual_size_bytes: size_bytes };
    Ok(OpenedStream { image, residency, chunk_bytes, connection })
}

impl Chunks {
    /// Of a disk with this image, whose worker has no connection yet.
    pub fn new(at: &Streamed) -> Result<Chunks, SupervisorError> {
        Ok(Chunks { at: at.clone(), root: root_of(at)?, state: State::None(Instant::now()) })
    }

    /// The connection on which an answer is waited for.
    pub fn asked(&self) -> Option<BorrowedFd<'_>> {
        match &self.state {
            State::Asked(connection, _) => Some(connection.as_fd()),
            State::None(_) | State::Given => None,
        }
    }

    /// When [`Chunks::keep`] must be called at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::None(at) | State::Asked(_, at) => Some(at),
            State::Given => None,
        }
    }

    /// Another worker serves, or the worker has lost its connection.
    pub fn lost(&mut self) {
        self.state = State::None(Instant::now());
    }

    /// There is none; the next try is due after a pause, since it may be lost again and again.
    pub fn try_later(&mut self) {
        self.state = State::None(Instant::now() + PAUSE);
    }

    /// What was opened cannot be used, and a person has to mend that.
    pub fn try_after_mending(&mut self) {
        self.state = State::None(Instant::now() + MENDING);
    }

    /// Asks for a connection when it is due.
    pub fn keep(&mut self) {
        if self.deadline().is_none_or(|at| Instant::now() < at) {
            return;
        }
        // One that was asked has not answered.
        let asked = match self.state {
            State::None(_) => ask(&self.at, &self.root).ok(),
            State::Asked(..) | State::Given => None,
        };
        match asked {
            Some(connection) => self.state = State::Asked(connection, Instant::now() + ANSWER_PATIENCE),
            None => self.try_later(),
        }
    }

    /// Takes the answer, which has come. The connection is the worker's then.
    pub fn take(&mut self) -> Option<OpenedStream> {
        let State::Asked(connection, _) = std::mem::replace(&mut self.state, State::Given) else {
            return None;
        };
        let opened = answer(connection).ok();
        if opened.is_none() {
            self.try_later();
        }
        opened
    }
}
