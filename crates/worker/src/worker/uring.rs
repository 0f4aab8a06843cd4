//! The engine that does I/O by an io_uring: submits operations, reaps completions, sleeps. Owns the ring and what
//! waits for space in it; never interprets results.
//!
//! The ring can do what the worker does and nothing else: it is made disabled, restricted to a handful of
//! operations on the three files that it was given, and enabled; no system call of the sandbox undoes that. Sockets and eventfds
//! are watched by epoll, and the ring watches the epoll instance, unless the loop sleeps most of the time and no operation
//! is under way: then it sleeps in epoll itself, which takes one system call less. Invariants: every pushed entry is
//! submitted, and one that finds the submission queue full waits in `backlog`; the loop never sleeps in the ring unless
//! that watches the epoll instance, nor in epoll while an operation is under way.

use super::engine::{Done, File, Files, Operation, Tag};
use super::error::{Error, ErrorKind};
use super::polls::Polls;
use io_uring::register::Restriction;
use io_uring::squeue::{Entry, Flags};
use io_uring::{Builder, IoUring, opcode, types};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

/// The ring.
pub struct Uring {
    ring: IoUring,
    polls: Polls,
    backlog: VecDeque<Entry>,
    unsubmitted: bool,
    /// Operations on files that have not completed.
    under_way: usize,
    /// The ring's poll of the epoll instance is on.
    polls_epoll: bool,
    /// Turns since the loop has slept.
    turns: u32,
    /// Sleeps that epoll would have served, each soon after the one before.
    sleeps: u32,
}

const ENTRIES: u32 = 256;
/// Places of the files in the ring's table.
const BASE: types::Fixed = types::Fixed(0);
const OVERFLOW: types::Fixed = types::Fixed(1);
const POLLS: types::Fixed = types::Fixed(2);
/// All that the worker asks of its ring.
const OPERATIONS: [u8; 6] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Fallocate::CODE,
    opcode::Fsync::CODE,
    opcode::PollAdd::CODE,
    opcode::PollRemove::CODE,
];
/// linux/io_uring.h: the one registration that the ring allows once it is enabled.
pub const UNREGISTER_FILES: u8 = 3;
/// After so many turns without a sleep the ring watches the epoll instance again: to see that there is nothing takes two
/// loads then. Until that one turn in `LOOK_EVERY` looks for itself.
const AWAKE_TURNS: u32 = 64;
const LOOK_EVERY: u32 = 8;
/// After so many sleeps with fewer turns in between it no longer does.
const SLEEPS: u32 = 4;
/// The shortest timeout that is left to epoll, which rounds it up to milliseconds.
const LEAST_EPOLL_NS: u64 = 100_000_000;
/// How often the end of the ring's poll is asked for before the process ends, and how long each may take.
const POLL_ENDS: usize = 8;
const POLL_END_NS: u64 = 100_000_000;

impl Uring {
    /// A ring for this thread alone, not yet enabled. Kernels before 6.0 get one without the newer flags; those before 5.13,
    /// which cannot poll more than once, none.
    pub fn new() -> Result<Uring, Error> {
        let builder = |set: fn(&mut Builder) -> &mut Builder| {
            let mut builder = IoUring::builder();
            builder.setup_cqsize(ENTRIES * 4);
            set(&mut builder);
            builder.build(ENTRIES)
        };
        let ring =
            builder(|b| b.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag().setup_r_disabled())
                .or_else(|_| builder(Builder::setup_r_disabled))
                .map_err(|e| {
                    failed("cannot make an io_uring", e)
                        .advice("check /proc/sys/kernel/io_uring_disabled and the seccomp profile")
                })?;
        if !ring.params().is_feature_resource_tagging() {
            return Err(Error::new(ErrorKind::Engine, "cannot make an io_uring: this kernel's is too old")
                .advice("Linux 5.13 has one that fits"));
        }
        Ok(Uring {
            ring,
            polls: Polls::new()?,
            backlog: VecDeque::new(),
            unsubmitted: false,
            under_way: 0,
            polls_epoll: false,
            turns: 0,
            sleeps: 0,
        })
    }

    /// Takes the files in, restricts the ring and enables it.
    pub fn start(&mut self, files: Files) -> Result<(), Error> {
        let refused = |e| failed("cannot restrict the io_uring to the disk's files (io_uring_register)", e);
        let submitter = self.ring.submitter();
        let own = [files.base, files.overflow.unwrap_or(-1), self.polls.fd().as_raw_fd()];
        submitter.register_files(&own).map_err(refused)?;
        let mut allowed = Vec::from(OPERATIONS.map(Restriction::sqe_op));
        // Files of its table and no others, and no other flag.
        allowed.push(Restriction::sqe_flags_allowed(Flags::FIXED_FILE.bits()));
        allowed.push(Restriction::sqe_flags_required(Flags::FIXED_FILE.bits()));
        allowed.push(Restriction::register_op(UNREGISTER_FILES));
        submitter.register_restrictions(&mut allowed).map_err(refused)?;
        submitter.register_enable_rings().map_err(refused)?;
        self.watch_polls();
        Ok(())
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

    /// Watches an fd once, or each change (`multi`).
    pub fn watch(&mut self, fd: RawFd, flags: i16, multi: bool, tag: Tag) {
        self.polls.watch(fd, flags, multi, tag);
    }

    /// Ends a watch.
    pub fn unwatch(&mut self, tag: Tag) {
        self.polls.unwatch(tag);
    }

    /// From here on the ring tells when a watch has found something.
    fn watch_polls(&mut self) {
        let entry = opcode::PollAdd::new(POLLS, libc::POLLIN as u32).multi(true).build();
        // SAFETY: a poll touches no memory of ours.
        unsafe { self.push_entry(entry, Tag::Polls) };
        (self.polls_epoll, self.sleeps) = (true, 0);
    }

    /// Asks the kernel to end the ring's poll and sees whether it has. It refuses while it is about to tell of an event, and
    /// the poll goes on then. No operation may be under way, unless nobody waits for its completion any more.
    fn end_poll(&mut self) -> Result<(), Error> {
        let entry = opcode::PollRemove::new(Tag::Polls.pack()).build().flags(Flags::FIXED_FILE);
        // SAFETY: it touches no memory of ours.
        unsafe { self.push_entry(entry, Tag::Ignore) };
        let mut refused = false;
        while self.polls_epoll && !refused {
            let ts = types::Timespec::new().nsec(POLL_END_NS as u32);
            let args = types::SubmitArgs::new().timespec(&ts);
            match self.ring.submitter().submit_with_args(1, &args) {
                Err(e) if e.raw_os_error() == Some(libc::ETIME) => refused = true,
                Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {}
                Err(e) => return Err(cannot_enter(e)),
                Ok(_) => {}
            }
            self.unsubmitted = !self.backlog.is_empty();
            for cqe in self.ring.completion() {
                match Tag::unpack(cqe.user_data()) {
                    Tag::Polls => self.polls_epoll &= io_uring::cqueue::more(cqe.flags()),
                    Tag::Ignore => refused |= cqe.result() < 0,
                    _ => {}
                }
            }
        }
        self.sleeps = 0;
        // What the poll has told of meanwhile is still there to be found.
        self.polls.look(Some(0)).map(drop)
    }

    /// Empties the ring's table of files. The kernel takes a ring apart some 30 ms after its process has ended, and
    /// what is in the table then is in use until that: locks are held, space is taken, file systems are busy.
    pub fn release_files(&mut self) {
        // Kernels before 6.13 wait for whatever uses a file of the table, as the poll does. Should it not end, the files are
        // released with the ring.
        for _ in 0..POLL_ENDS {
            if self.polls_epoll && self.submit().and_then(|()| self.end_poll()).is_err() {
                return;
            }
        }
        if !self.polls_epoll {
            let _in_use_still = self.ring.submitter().unregister_files();
        }
    }

    /// Queues an entry.
    ///
    /// # Safety
    /// Memory and fd that the entry names stay valid until its completion.
    unsafe fn push_entry(&mut self, entry: Entry, tag: Tag) {
        let entry = entry.user_data(tag.pack());
        self.under_way += usize::from(!matches!(tag, Tag::Polls | Tag::Ignore));
        // SAFETY: promised by the caller.
        if !self.backlog.is_empty() || unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.backlog.push_back(entry);
        }
        self.unsubmitted = true;
    }

    /// Submits what is queued, without waiting.
    pub fn submit(&mut self) -> Result<(), Error> {
        while self.unsubmitted {
            match self.ring.submit() {
                Ok(_) => {}
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => continue,
                // The completion queue is full: what is reaped first makes space.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) => return Ok(()),
                Err(e) => return Err(cannot_enter(e)),
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
    pub fn wait(&mut self, timeout_ns: Option<u64>) -> Result<(), Error> {
        if self.polls.has_found() {
            return self.submit();
        }
        let idle = self.under_way == 0 && timeout_ns.is_none_or(|ns| ns >= LEAST_EPOLL_NS);
        self.sleeps = if idle && self.turns < AWAKE_TURNS { self.sleeps.saturating_add(1) } else { 0 };
        self.turns = 0;
        if self.polls_epoll && self.sleeps >= SLEEPS {
            self.submit()?;
            self.end_poll()?;
            if self.polls.has_found() {
                return Ok(());
            }
        }
        if idle && !self.polls_epoll {
            self.submit()?;
            return self.polls.look(timeout_ns).map(drop);
        }
        if !self.polls_epoll {
            self.watch_polls();
        }
        self.submit()?;
        let slept = match timeout_ns {
            None => self.ring.submitter().submit_and_wait(1).map(drop),
            Some(ns) => {
                let ts = types::Timespec::new().sec(ns / 1_000_000_000).nsec((ns % 1_000_000_000) as u32);
                let args = types::SubmitArgs::new().timespec(&ts);
                self.ring.submitter().submit_with_args(1, &args).map(drop)
            }
        };
        match slept {
            Ok(()) => Ok(()),
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN) => Ok(()),
                _ => Err(cannot_enter(e)),
            },
        }
    }

    /// Takes completions. While polling this costs two loads when there is nothing.
    #[inline]
    pub fn reap(&mut self, out: &mut Vec<Done>) -> Result<(), Error> {
        if self.ring.submission().taskrun() {
            // Completions are ready but want a visit to the kernel.
            match self.ring.submitter().submit_and_wait(0) {
                Ok(_) => {}
                Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {}
                Err(e) => return Err(cannot_enter(e)),
            }
        }
        let mut found = self.polls.has_more();
        for cqe in self.ring.completion() {
            match Tag::unpack(cqe.user_data()) {
                Tag::Polls => {
                    found = true;
                    self.polls_epoll &= io_uring::cqueue::more(cqe.flags());
                    if cqe.result() < 0 && cqe.result() != -libc::ECANCELED {
                        let e = io::Error::from_raw_os_error(-cqe.result());
                        return Err(failed("the io_uring cannot poll", e));
                    }
                }
                Tag::Ignore => {}
                tag => {
                    self.under_way -= 1;
                    out.push(Done { tag, result: cqe.result(), more: false });
                }
            }
        }
        self.turns = self.turns.saturating_add(1);
        if found || !self.polls_epoll && self.turns.is_multiple_of(LOOK_EVERY) {
            self.polls.look(Some(0))?;
        }
        if !self.polls_epoll && self.turns >= AWAKE_TURNS {
            self.watch_polls();
        }
        self.polls.take(out);
        Ok(())
    }
}

#[cold]
fn failed(reason: &'static str, source: io::Error) -> Error {
    Error::new(ErrorKind::Engine, reason).because(source)
}

#[cold]
fn cannot_enter(source: io::Error) -> Error {
    failed("the io_uring has failed (io_uring_enter)", source)
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

    /// Watches of both kinds, more than one look fetches, beside an operation.
    #[test]
    fn watches_are_told_by_the_ring() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let mut ring = Uring::new().unwrap();
        ring.start(Files { base: null.as_raw_fd(), overflow: None }).unwrap();
        let pairs: Vec<_> = (0..100).map(|_| std::os::unix::net::UnixStream::pair().unwrap()).collect();
        for (n, (here, _)) in (0..).zip(&pairs) {
            ring.watch(here.as_raw_fd(), libc::POLLIN, n % 2 == 0, Tag::Watch(n));
        }
        let mut done = Vec::new();
        ring.reap(&mut done).unwrap();
        assert_eq!(done.len(), 0);
        for round in 1..=3 {
            pairs.iter().for_each(|(_, there)| _ = rustix::io::write(there, b"x").unwrap());
            let expected = if round == 1 { 100 } else { 50 };
            while done.len() < expected {
                ring.wait(None).unwrap();
                ring.reap(&mut done).unwrap();
            }
            assert_eq!(done.len(), expected, "round {round}");
            for d in done.drain(..) {
                let Tag::Watch(n) = d.tag else { panic!("{d:?}") };
                assert_eq!((d.more, d.result & i32::from(libc::POLLIN)), (n % 2 == 0, 1), "{d:?}");
            }
        }
        ring.unwatch(Tag::Watch(0));
        rustix::io::write(&pairs[0].1, b"x").unwrap();
        ring.watch(null.as_raw_fd(), libc::POLLIN, false, Tag::Watch(200));
        ring.wait(Some(10_000_000)).unwrap();
        ring.reap(&mut done).unwrap();
        let left: Vec<_> = done.iter().map(|d| (d.tag, d.result, d.more)).collect();
        assert_eq!(left, [(Tag::Watch(200), -libc::EPERM, false)], "what cannot be watched says so");
    }

    /// Asleep in epoll or in the ring, beside an operation or not, what comes next ends each sleep, and nothing else does.
    #[test]
    fn every_sleep_ends_with_what_comes_next() {
        let (mut there, ours) = std::os::unix::net::UnixStream::pair().unwrap();
        there.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let mut ring = Uring::new().unwrap();
        ring.start(Files { base: ours.as_raw_fd(), overflow: None }).unwrap();
        ring.watch(event.as_raw_fd(), libc::POLLIN, true, Tag::Watch(1));
        // How many sleeps it takes until what `wake` does in another thread a little later is there.
        let sleeps_until = |ring: &mut Uring, pause_us: u64, wake: &mut (dyn FnMut() + Send)| {
            let mut done = Vec::new();
            let mut sleeps = 0;
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(std::time::Duration::from_micros(pause_us));
                    wake();
                });
                while done.is_empty() {
                    ring.wait(if pause_us.is_multiple_of(2) { None } else { Some(10_000_000_000) }).unwrap();
                    ring.reap(&mut done).unwrap();
                    sleeps += 1;
                }
            });
            (done, sleeps)
        };
        let (mut to, mut none) = ([0u8; 1], Vec::new());
        let (mut in_epoll, mut in_ring, mut sleeps) = (0, 0, 0);
        for round in 0..200 {
            // Some rounds begin with an operation, some after many turns without a sleep.
            let (reads, awake) = (round % 8 == 5, round % 16 == 11);
            if reads {
                let read =
                    Operation::Read { file: File::Base, to: to.as_mut_ptr(), len: 1, offset: u64::MAX };
                // SAFETY: `to` lives until the read has completed, below.
                unsafe { ring.push(read, Tag::Read(7)) };
            }
            for _ in 0..if awake { 2 * AWAKE_TURNS } else { 0 } {
                ring.reap(&mut none).unwrap();
                ring.submit().unwrap();
            }
            assert!(none.is_empty(), "round {round}: {none:?}");
            let raise = &mut || _ = rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
            let (done, n) = sleeps_until(&mut ring, 37 * round % 400, raise);
            sleeps += n;
            if ring.polls_epoll {
                in_ring += 1;
            } else {
                in_epoll += 1;
            }
            assert_eq!(done.iter().map(|d| d.tag).collect::<Vec<_>>(), [Tag::Watch(1)], "round {round}");
            if reads {
                let write = &mut || io::Write::write_all(&mut there, b"x").unwrap();
                let (done, n) = sleeps_until(&mut ring, 100, write);
                sleeps += n;
                assert_eq!((done[0].tag, done[0].result, done.len()), (Tag::Read(7), 1, 1), "round {round}");
            }
        }
        assert!(in_ring > 50 && in_epoll > 50, "{in_ring} in the ring, {in_epoll} in epoll");
        assert!(sleeps < 235, "{sleeps} sleeps until 225 things came");
        for ms in [5, 150] {
            let begin = std::time::Instant::now();
            ring.wait(Some(ms * 1_000_000)).unwrap();
            assert!(begin.elapsed().as_millis() >= u128::from(ms), "{ms} ms: {:?}", begin.elapsed());
        }
        ring.release_files();
        drop(ours);
        assert_eq!(io::Read::read(&mut there, &mut [0]).unwrap(), 0, "the ring has closed the file");
    }

    /// Also while a poll is on one of them. Another process sees that a file is not open any more.
    #[test]
    fn released_files_are_closed_though_the_ring_lives() {
        let (ours, mut there) = std::os::unix::net::UnixStream::pair().unwrap();
        there.set_nonblocking(true).unwrap();
        let mut ring = Uring::new().unwrap();
        ring.start(Files { base: ours.as_raw_fd(), overflow: None }).unwrap();
        ring.submit().unwrap();
        drop(ours);
        let mut closed = || io::Read::read(&mut there, &mut [0]);
        assert_eq!(closed().unwrap_err().kind(), io::ErrorKind::WouldBlock, "the ring has it open");
        ring.release_files();
        assert_eq!(closed().unwrap(), 0);
    }

    #[test]
    fn the_ring_does_what_the_worker_does_and_nothing_else() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let mut ring = Uring::new().unwrap();
        ring.start(Files { base: null.as_raw_fd(), overflow: None }).unwrap();
        assert_eq!(
            completes(&mut ring, opcode::Fsync::new(BASE).build()),
            -libc::EINVAL,
            "no such thing here"
        );
        let sockets = std::os::unix::net::UnixStream::pair().unwrap();
        let socket = types::Fd(sockets.0.as_raw_fd());
        let file = types::Fd(null.as_raw_fd());

        let path = c"/dev/null".as_ptr();
        let refused = [
            opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path).build(),
            opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(),
            opcode::Connect::new(socket, std::ptr::null(), 0).build(),
            opcode::UnlinkAt::new(types::Fd(libc::AT_FDCWD), path).build(),
            opcode::Close::new(socket).build(),
            opcode::Nop::new().build(),
            // Operations that are allowed, on what is not in its table, be it a file that is.
            opcode::Read::new(socket, std::ptr::null_mut(), 0).build(),
            opcode::Read::new(file, std::ptr::null_mut(), 0).build(),
            opcode::Write::new(file, std::ptr::null(), 0).build(),
            opcode::Fsync::new(file).build(),
            opcode::PollAdd::new(socket, libc::POLLOUT as u32).build(),
            // One with a flag that is not.
            opcode::Fsync::new(BASE).build().flags(Flags::IO_LINK),
        ];
        for (i, entry) in refused.into_iter().enumerate() {
            assert_eq!(completes(&mut ring, entry), -libc::EACCES, "number {i}");
        }
        let more = ring.ring.submitter().register_files_update(0, &[sockets.0.as_raw_fd()]);
        assert_eq!(more.unwrap_err().raw_os_error(), Some(libc::EACCES), "nothing more is registered");
    }
}
