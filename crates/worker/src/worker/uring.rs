//! The io_uring of the worker: submits operations and polls, reaps completions, sleeps. Owns the ring and what
//! waits for room in it; never interprets results.
//!
//! Invariant: every pushed entry is submitted; one that finds the submission queue full waits in `backlog`.

use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};
use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

/// What a completion belongs to, packed into its user data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// A watch on an fd, by serial number.
    Watch(u32),
    /// A read, by its place in the table of reads.
    Read(u32),
    /// A write, by its place in the table of writes.
    Write(u32),
    /// Another operation of the core, by its number.
    Op(u32),
    /// Nobody waits for it.
    Ignore,
}

impl Tag {
    fn pack(self) -> u64 {
        match self {
            Tag::Ignore => 0,
            Tag::Watch(n) => 1 << 32 | u64::from(n),
            Tag::Read(n) => 2 << 32 | u64::from(n),
            Tag::Write(n) => 3 << 32 | u64::from(n),
            Tag::Op(n) => 4 << 32 | u64::from(n),
        }
    }

    fn unpack(data: u64) -> Tag {
        let n = data as u32;
        match data >> 32 {
            1 => Tag::Watch(n),
            2 => Tag::Read(n),
            3 => Tag::Write(n),
            4 => Tag::Op(n),
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

/// The ring.
pub struct Uring {
    ring: IoUring,
    backlog: VecDeque<Entry>,
    unsubmitted: bool,
}

const ENTRIES: u32 = 256;

impl Uring {
    /// A ring for this thread alone. Older kernels get one without the newer flags.
    pub fn new() -> Result<Uring, String> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .setup_cqsize(ENTRIES * 4)
            .build(ENTRIES)
            .or_else(|_| IoUring::builder().setup_cqsize(ENTRIES * 4).build(ENTRIES));
        let ring = ring.map_err(|e| {
            format!("cannot make an io_uring: {e}; check /proc/sys/kernel/io_uring_disabled and the seccomp profile")
        })?;
        Ok(Uring { ring, backlog: VecDeque::new(), unsubmitted: false })
    }

    /// Queues an entry; it is submitted with the next [`Uring::submit`] or [`Uring::wait`].
    ///
    /// # Safety
    /// Memory and fd that the entry names stay valid until its completion.
    pub unsafe fn push(&mut self, entry: Entry, tag: Tag) {
        let entry = entry.user_data(tag.pack());
        // SAFETY: promised by the caller.
        if !self.backlog.is_empty() || unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.backlog.push_back(entry);
        }
        self.unsubmitted = true;
    }

    /// Watches an fd once, or until it is told to stop (`multi`).
    pub fn watch(&mut self, fd: RawFd, flags: i16, multi: bool, tag: Tag) {
        let entry = opcode::PollAdd::new(types::Fd(fd), flags as u16 as u32).multi(multi).build();
        // SAFETY: a poll touches no memory of ours and holds its own reference to the file.
        unsafe { self.push(entry, tag) };
    }

    /// Ends a watch.
    pub fn unwatch(&mut self, tag: Tag) {
        let entry = opcode::PollRemove::new(tag.pack()).build();
        // SAFETY: touches no memory of ours.
        unsafe { self.push(entry, Tag::Ignore) };
    }

    /// Submits what is queued, without waiting.
    pub fn submit(&mut self) -> Result<(), String> {
        while self.unsubmitted {
            match self.ring.submit() {
                Ok(_) => {}
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => continue,
                // The completion queue is full: what is reaped first makes room.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) => return Ok(()),
                Err(e) => return Err(format!("io_uring_enter: {e}")),
            }
            let mut queue = self.ring.submission();
            while let Some(entry) = self.backlog.front() {
                // SAFETY: promised when it was pushed.
                if unsafe { queue.push(entry) }.is_err() {
                    break;
                }
                self.backlog.pop_front();
            }
            self.unsubmitted = !queue.is_empty();
        }
        Ok(())
    }

    /// Sleeps until something completes or `timeout_ns` have passed.
    pub fn wait(&mut self, timeout_ns: Option<u64>) -> Result<(), String> {
        self.submit()?;
        let slept = match timeout_ns {
            None => self.ring.submitter().submit_and_wait(1).map(drop),
            Some(ns) => {
                let ts = types::Timespec::new().sec(ns / 1_000_000_000).nsec((ns % 1_000_000_000) as u32);
                let args = types::SubmitArgs::new().timespec(&ts);
                self.ring.submitter().submit_with_args(1, &args).map(drop)
            }
        };
        match slept.as_ref().map_err(io::Error::raw_os_error) {
            Ok(()) | Err(Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN)) => Ok(()),
            Err(_) => Err(format!("io_uring_enter: {}", slept.expect_err("matched"))),
        }
    }

    /// Takes completions. While polling this costs two loads when there is nothing.
    #[inline]
    pub fn reap(&mut self, out: &mut Vec<Done>) -> Result<(), String> {
        if self.ring.submission().taskrun() {
            // Completions are ready but want a visit to the kernel.
            match self.ring.submitter().submit_and_wait(0) {
                Ok(_) => {}
                Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {}
                Err(e) => return Err(format!("io_uring_enter: {e}")),
            }
        }
        for cqe in self.ring.completion() {
            let more = io_uring::cqueue::more(cqe.flags());
            out.push(Done { tag: Tag::unpack(cqe.user_data()), result: cqe.result(), more });
        }
        Ok(())
    }
}
