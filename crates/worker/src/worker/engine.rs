//! How the worker does I/O without waiting for it: io_uring, or threads where the host forbids that. Owns the words
//! that both speak, and the choice; never interprets results.
//!
//! Invariant: each operation is answered by one [`Done`], never from inside the call that starts it.

use super::error::{Error, ErrorKind};
use super::threads::Threads;
use super::uring::Uring;
use std::os::fd::RawFd;

/// What a completion belongs to, packed into its user data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tag {
    /// A watch on an fd, by serial number.
    Watch(u32),
    /// A read, by its place in the table of reads.
    Read(u32),
    /// A write, by its place in the table of writes.
    Write(u32),
    /// Another operation of the core, by its number.
    Op(u32),
    /// The punch before a drain's fdatasync, by the number of the operation.
    Barrier(u32),
    /// A read by the base image's thread that was held, by the number of the operation.
    Job(u32),
    /// Some watches have found something.
    Polls,
    /// Nobody waits for it.
    Ignore,
}

impl Tag {
    pub(super) fn pack(self) -> u64 {
        match self {
            Tag::Ignore => 0,
            Tag::Watch(n) => 1 << 32 | u64::from(n),
            Tag::Read(n) => 2 << 32 | u64::from(n),
            Tag::Write(n) => 3 << 32 | u64::from(n),
            Tag::Op(n) => 4 << 32 | u64::from(n),
            Tag::Barrier(n) => 5 << 32 | u64::from(n),
            Tag::Polls => 6 << 32,
            Tag::Job(n) => 7 << 32 | u64::from(n),
        }
    }

    pub(super) fn unpack(data: u64) -> Tag {
        let n = data as u32;
        match data >> 32 {
            1 => Tag::Watch(n),
            2 => Tag::Read(n),
            3 => Tag::Write(n),
            4 => Tag::Op(n),
            5 => Tag::Barrier(n),
            6 => Tag::Polls,
            7 => Tag::Job(n),
            _ => Tag::Ignore,
        }
    }
}

/// A completion.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// Whose.
    pub tag: Tag,
    /// Bytes, poll flags, or a negative errno.
    pub result: i32,
    /// The watch goes on by itself.
    pub more: bool,
}

/// The files that operations are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum File {
    /// The base image's.
    Base,
    /// The overflow or difference file.
    Overflow,
}

/// The fds of those files, which stay open as long as the engine.
#[derive(Clone, Copy, Debug)]
pub struct Files {
    pub base: RawFd,
    /// Not in mode `ram`.
    pub overflow: Option<RawFd>,
}

/// An operation on a file.
#[derive(Clone, Copy, Debug)]
pub enum Operation {
    /// Bytes into memory.
    Read { file: File, to: *mut u8, len: u32, offset: u64 },
    /// Bytes from memory into the overflow file; `sync`: done when they are on the disk.
    Write { from: *const u8, len: u32, offset: u64, sync: bool },
    /// Gives a range of the overflow file back to the file system.
    Punch { len: u64, offset: u64 },
    /// Everything written to the overflow file is on the disk afterwards.
    Sync,
}

/// One of the two engines.
pub enum Engine {
    Uring(Uring),
    Threads(Threads),
}

/// The two engines by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A ring for files, and for the epoll instance that watches the rest.
    IoUring,
    /// Threads for files, epoll for the rest.
    Threads,
}

impl Kind {
    /// Its word, in the setting and in the figures.
    pub fn name(self) -> &'static str {
        match self {
            Kind::IoUring => "io_uring",
            Kind::Threads => "threads",
        }
    }
}

/// Which engine is wanted: a word in the environment, for tests and to compare the two.
const SETTING: &str = "SPILLWAY_ENGINE";

impl Engine {
    /// Makes what takes the rights of whoever started the worker. Threads come with [`Engine::start`]. What is worth
    /// telling goes into `notices`.
    pub fn new(notices: &mut Vec<String>) -> Result<Engine, Error> {
        let setting = std::env::var_os(SETTING);
        match setting.as_ref().map(|w| w.to_string_lossy()).as_deref() {
            None | Some("") => {}
            Some("io_uring") => return Uring::new().map(Engine::Uring),
            Some("threads") => return Threads::new().map(Engine::Threads),
            Some(other) => {
                return Err(Error::new(ErrorKind::Settings, "there is no such engine")
                    .of(format!("{SETTING}={other}"))
                    .advice("use `io_uring` or `threads`, or unset it"));
            }
        }
        match Uring::new() {
            Ok(ring) => Ok(Engine::Uring(ring)),
            Err(e) => {
                let slower = "reads and writes of files go through threads, which is slower";
                notices.push(format!("{e}; {slower}"));
                Threads::new().map(Engine::Threads)
            }
        }
    }

    /// From here on it takes operations, on these files and no others.
    pub fn start(&mut self, files: Files) -> Result<(), Error> {
        match self {
            Engine::Uring(ring) => ring.start(files),
            Engine::Threads(threads) => threads.start(files),
        }
    }

    /// Starts an operation, with the next [`Engine::submit`] or [`Engine::wait`] at the latest.
    ///
    /// # Safety
    /// The memory that the operation names stays valid, and nobody else touches it, until its completion.
    pub unsafe fn push(&mut self, operation: Operation, tag: Tag) {
        match self {
            // SAFETY: promised by the caller.
            Engine::Uring(ring) => unsafe { ring.push(operation, tag) },
            // SAFETY: the same.
            Engine::Threads(threads) => unsafe { threads.push(operation, tag) },
        }
    }

    /// Watches an fd once, or each change until it is told to stop (`multi`).
    pub fn watch(&mut self, fd: RawFd, flags: i16, multi: bool, tag: Tag) {
        match self {
            Engine::Uring(ring) => ring.watch(fd, flags, multi, tag),
            Engine::Threads(threads) => threads.watch(fd, flags, multi, tag),
        }
    }

    /// Ends a watch. Its fd may have been closed.
    pub fn unwatch(&mut self, tag: Tag) {
        match self {
            Engine::Uring(ring) => ring.unwatch(tag),
            Engine::Threads(threads) => threads.unwatch(tag),
        }
    }

    /// Submits what is queued, without waiting.
    pub fn submit(&mut self) -> Result<(), Error> {
        match self {
            Engine::Uring(ring) => ring.submit(),
            Engine::Threads(threads) => {
                threads.submit();
                Ok(())
            }
        }
    }

    /// Sleeps until something completes or `timeout_ns` have passed.
    pub fn wait(&mut self, timeout_ns: Option<u64>) -> Result<(), Error> {
        match self {
            Engine::Uring(ring) => ring.wait(timeout_ns),
            Engine::Threads(threads) => threads.wait(timeout_ns),
        }
    }

    /// Takes completions. While polling this costs a few loads when there is nothing.
    #[inline]
    pub fn reap(&mut self, out: &mut Vec<Done>) -> Result<(), Error> {
        match self {
            Engine::Uring(ring) => ring.reap(out),
            Engine::Threads(threads) => threads.reap(out),
        }
    }

    /// Lets go of the files of [`Engine::start`] before the process ends. No operation may follow.
    pub fn release_files(&mut self) {
        match self {
            Engine::Uring(ring) => ring.release_files(),
            // Its threads use fds of this process, which the kernel closes before it tells of the end.
            Engine::Threads(_) => {}
        }
    }

    /// Which it is.
    pub fn kind(&self) -> Kind {
        match self {
            Engine::Uring(_) => Kind::IoUring,
            Engine::Threads(_) => Kind::Threads,
        }
    }
}

/// Makes a ring as a worker does, and throws it away.
pub fn probe_uring() -> Result<(), Error> {
    Uring::new().map(drop)
}
