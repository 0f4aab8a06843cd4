//! The io_uring of the worker: submits operations and polls, reaps completions, sleeps. Owns the ring and what
//! waits for room in it; never interprets results.
//!
//! The ring can do what the worker does and nothing else: it is made disabled, restricted to a handful of
//! operations, and enabled; no system call of the sandbox undoes that. Invariant: every pushed entry is submitted; one
//! that finds the submission queue full waits in `backlog`.

use super::engine::{Done, File, Files, Operation, Tag};
use io_uring::register::Restriction;
use io_uring::squeue::{Entry, Flags};
use io_uring::{Builder, IoUring, opcode, types};
use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

/// The ring.
pub struct Uring {
    ring: IoUring,
    /// It takes nothing before it is enabled.
    disabled: bool,
    backlog: VecDeque<Entry>,
    unsubmitted: bool,
}

const ENTRIES: u32 = 256;
/// Places of the files in the ring's table.
const BASE: types::Fixed = types::Fixed(0);
const OVERFLOW: types::Fixed = types::Fixed(1);
/// All that the worker asks of its ring.
const OPERATIONS: [u8; 6] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Fallocate::CODE,
    opcode::Fsync::CODE,
    opcode::PollAdd::CODE,
    opcode::PollRemove::CODE,
];

impl Uring {
    /// A ring for this thread alone, not yet enabled. Older kernels get one without the newer flags.
    pub fn new() -> io::Result<Uring> {
        let builder = |set: fn(&mut Builder) -> &mut Builder| {
            let mut builder = IoUring::builder();
            builder.setup_cqsize(ENTRIES * 4);
            set(&mut builder);
            builder.build(ENTRIES)
        };
        let (ring, disabled) =
            builder(|b| b.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag().setup_r_disabled())
                .or_else(|_| builder(Builder::setup_r_disabled))
                .map(|ring| (ring, true))
                .or_else(|_| builder(|b| b).map(|ring| (ring, false)))?;
        Ok(Uring { ring, disabled, backlog: VecDeque::new(), unsubmitted: false })
    }

    /// Takes the files in, restricts the ring and enables it.
    pub fn start(&mut self, files: Files, notices: &mut Vec<String>) -> Result<(), String> {
        let said = |e| format!("io_uring_register: {e}");
        let submitter = self.ring.submitter();
        submitter.register_files(&[files.base, files.overflow.unwrap_or(-1)]).map_err(said)?;
        let mut allowed = Vec::from(OPERATIONS.map(Restriction::sqe_op));
        // Polls are on sockets that come and go, so that the flag cannot be required of every entry.
        allowed.push(Restriction::sqe_flags_allowed(Flags::FIXED_FILE.bits()));
        let restricted = if self.disabled {
            submitter.register_restrictions(&mut allowed)
        } else {
            Err(io::Error::from_raw_os_error(libc::ENOSYS))
        };
        if let Err(e) = restricted {
            notices.push(format!("the sandbox is weaker: this kernel cannot restrict an io_uring ({e})"));
        }
        if self.disabled { submitter.register_enable_rings().map_err(said) } else { Ok(()) }
    }

    /// Queues an operation; it is submitted with the next [`Uring::submit`] or [`Uring::wait`].
    ///
    /// # Safety
    /// As of [`super::engine::Engine::push`].
    pub unsafe fn push(&mut self, operation: Operation, tag: Tag) {
        let entry = match operation {
            Operation::Read { file, to, len, offset } => {
                let file = if file == File::Base { BASE } else { OVERFLOW };
                opcode::Read::new(file, to, len).offset(offset).build()
            }
            Operation::Write { from, len, offset, sync } => {
                let flags = if sync { libc::RWF_DSYNC } else { 0 };
                opcode::Write::new(OVERFLOW, from, len).offset(offset).rw_flags(flags).build()
            }
            Operation::Punch { len, offset } => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(OVERFLOW, len).offset(offset).mode(mode).build()
            }
            Operation::Sync => opcode::Fsync::new(OVERFLOW).flags(types::FsyncFlags::DATASYNC).build(),
        };
        // SAFETY: promised by the caller.
        unsafe { self.push_entry(entry, tag) };
    }

    /// Watches an fd once, or until it is told to stop (`multi`).
    pub fn watch(&mut self, fd: RawFd, flags: i16, multi: bool, tag: Tag) {
        let entry = opcode::PollAdd::new(types::Fd(fd), flags as u16 as u32).multi(multi).build();
        // SAFETY: a poll touches no memory of ours and holds its own reference to the file.
        unsafe { self.push_entry(entry, tag) };
    }

    /// Ends a watch.
    pub fn unwatch(&mut self, tag: Tag) {
        let entry = opcode::PollRemove::new(tag.pack()).build();
        // SAFETY: touches no memory of ours.
        unsafe { self.push_entry(entry, Tag::Ignore) };
    }

    /// Queues an entry.
    ///
    /// # Safety
    /// Memory and fd that the entry names stay valid until its completion.
    unsafe fn push_entry(&mut self, entry: Entry, tag: Tag) {
        let entry = entry.user_data(tag.pack());
        // SAFETY: promised by the caller.
        if !self.backlog.is_empty() || unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.backlog.push_back(entry);
        }
        self.unsubmitted = true;
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn completes(ring: &mut Uring, entry: Entry) -> i32 {
        // SAFETY: the entries of these tests name memory that lives for ever, or none.
        unsafe { ring.push_entry(entry, Tag::Op(1)) };
        let mut done = Vec::new();
        while done.is_empty() {
            ring.wait(None).unwrap();
            ring.reap(&mut done).unwrap();
        }
        done[0].result
    }

    #[test]
    fn the_ring_does_what_the_worker_does_and_nothing_else() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let mut notices = Vec::new();
        let mut ring = Uring::new().unwrap();
        ring.start(Files { base: null.as_raw_fd(), overflow: None }, &mut notices).unwrap();
        assert_eq!(notices, [""; 0]);
        assert_eq!(
            completes(&mut ring, opcode::Fsync::new(BASE).build()),
            -libc::EINVAL,
            "no such thing here"
        );
        let sockets = std::os::unix::net::UnixStream::pair().unwrap();
        let socket = types::Fd(sockets.0.as_raw_fd());
        assert_eq!(
            completes(&mut ring, opcode::PollAdd::new(socket, libc::POLLOUT as u32).build()),
            i32::from(libc::POLLOUT)
        );

        let path = c"/dev/null".as_ptr();
        let refused = [
            opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path).build(),
            opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(),
            opcode::Connect::new(socket, std::ptr::null(), 0).build(),
            opcode::UnlinkAt::new(types::Fd(libc::AT_FDCWD), path).build(),
            opcode::Close::new(socket).build(),
            opcode::Nop::new().build(),
            // An operation that is allowed, with a flag that is not.
            opcode::PollAdd::new(socket, libc::POLLOUT as u32).build().flags(Flags::IO_LINK),
        ];
        for (i, entry) in refused.into_iter().enumerate() {
            assert_eq!(completes(&mut ring, entry), -libc::EACCES, "number {i}");
        }
        let more = ring.ring.submitter().register_files_update(0, &[sockets.0.as_raw_fd()]);
        assert_eq!(more.unwrap_err().raw_os_error(), Some(libc::EACCES), "nothing more is registered");
    }
}
