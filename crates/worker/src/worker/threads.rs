//! The engine of hosts without io_uring: files are read and written by a few threads with plain calls, watches and
//! sleep are epoll's. Owns the threads; never interprets results.
//!
//! The reactor is woken by an eventfd, and only if it said that it sleeps. Invariant: the queue to the threads is
//! bounded; what finds it full waits in `backlog`, and each completion is followed by another look at that.

use super::engine::{Done, File, Files, Operation, Tag};
use super::error::{Error, ErrorKind};
use super::polls::Polls;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// As many reads or writes are on their way to a file at a time.
const THREADS: usize = 4;
/// Operations that wait for a thread.
const QUEUE: usize = 256;
/// They hold a few numbers, and what std takes to start a thread and to tell of a panic.
const STACK_BYTES: usize = 128 << 10;
/// While the reactor polls, one turn in so many looks at the watches: that is a system call.
const LOOK_EVERY: u32 = 8;

struct Job {
    operation: Operation,
    tag: Tag,
}

// SAFETY: the memory that an operation names is lent to it until its completion, by the contract of `push`.
unsafe impl Send for Job {}

/// What wakes the reactor.
struct Alarm {
    eventfd: OwnedFd,
    /// The reactor sleeps, or is about to and will look once more.
    asleep: AtomicBool,
}

/// The threads, and the watches.
pub struct Threads {
    jobs: Option<SyncSender<Job>>,
    done: Receiver<Done>,
    backlog: VecDeque<Job>,
    alarm: Arc<Alarm>,
    threads: Vec<JoinHandle<()>>,
    polls: Polls,
    /// Found while something else was looked for.
    ready: Vec<Done>,
    turns: u32,
    /// Before `start`: the threads' ends.
    unstarted: Option<(Receiver<Job>, Sender<Done>)>,
}

impl Threads {
    /// Without its threads yet.
    pub fn new() -> Result<Threads, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = eventfd(0, flags).map_err(|e| {
            Error::new(ErrorKind::Resources, "cannot make the eventfd of the I/O threads")
                .because(e)
                .advice("see that file descriptors are left (ulimit -n)")
        })?;
        let polls = Polls::new()?;
        polls.add_alarm(&wake)?;
        let (jobs, jobs_in) = sync_channel(QUEUE);
        let (done_out, done) = channel();
        Ok(Threads {
            jobs: Some(jobs),
            done,
            backlog: VecDeque::new(),
            alarm: Arc::new(Alarm { eventfd: wake, asleep: AtomicBool::new(false) }),
            threads: Vec::new(),
            polls,
            ready: Vec::new(),
            turns: 0,
            unstarted: Some((jobs_in, done_out)),
        })
    }

    /// Starts the threads. The fds stay open as long as `self`.
    pub fn start(&mut self, files: Files) -> Result<(), Error> {
        let (jobs, done) = self.unstarted.take().expect("started once");
        let jobs = Arc::new(Mutex::new(jobs));
        for n in 0..THREADS {
            let (jobs, done, alarm) = (Arc::clone(&jobs), done.clone(), Arc::clone(&self.alarm));
            let thread = thread::Builder::new()
                .name(format!("io-{n}"))
                .stack_size(STACK_BYTES)
                .spawn(move || serve(files, &jobs, &done, &alarm))
                .map_err(|e| {
                    Error::new(ErrorKind::Resources, "cannot start a thread for I/O")
                        .because(e)
                        .advice("see that memory and processes are left (free, ulimit -u)")
                })?;
            self.threads.push(thread);
        }
        Ok(())
    }

    /// Hands an operation to the threads.
    ///
    /// # Safety
    /// As of [`super::engine::Engine::push`].
    pub unsafe fn push(&mut self, operation: Operation, tag: Tag) {
        self.backlog.push_back(Job { operation, tag });
        self.submit();
    }

    /// Hands over what waited for space.
    pub fn submit(&mut self) {
        let jobs = self.jobs.as_ref().expect("taken by drop only");
        while let Some(job) = self.backlog.pop_front() {
            match jobs.try_send(job) {
                Ok(()) => {}
                Err(TrySendError::Full(job)) => {
                    self.backlog.push_front(job);
                    return;
                }
                Err(TrySendError::Disconnected(_)) => unreachable!("the threads end after `jobs`"),
            }
        }
    }

    /// Watches an fd once, or each change (`multi`).
    pub fn watch(&mut self, fd: RawFd, flags: i16, multi: bool, tag: Tag) {
        self.polls.watch(fd, flags, multi, tag);
    }

    /// Ends a watch.
    pub fn unwatch(&mut self, tag: Tag) {
        self.polls.unwatch(tag);
    }

    /// Sleeps until something completes or `timeout_ns` have passed.
    pub fn wait(&mut self, timeout_ns: Option<u64>) -> Result<(), Error> {
        self.submit();
        self.alarm.asleep.store(true, Ordering::Relaxed);
        // A thread puts its completion down and then asks whether we sleep; we say so and then look.
        fence(Ordering::SeqCst);
        self.ready.extend(self.done.try_iter());
        let found = !self.ready.is_empty() || self.polls.has_found();
        let slept = if found { Ok(()) } else { self.look(timeout_ns) };
        self.alarm.asleep.store(false, Ordering::Relaxed);
        slept
    }

    /// Takes completions.
    #[inline]
    pub fn reap(&mut self, out: &mut Vec<Done>) -> Result<(), Error> {
        out.extend(self.done.try_iter());
        self.turns = self.turns.wrapping_add(1);
        if self.polls.has_more() || self.turns.is_multiple_of(LOOK_EVERY) && self.ready.is_empty() {
            self.look(Some(0))?;
        }
        out.append(&mut self.ready);
        self.polls.take(out);
        Ok(())
    }

    /// Asks what the watches have found.
    fn look(&mut self, timeout_ns: Option<u64>) -> Result<(), Error> {
        if self.polls.look(timeout_ns)? {
            // Completions made before this are in the queue by now, later ones raise it anew.
            let _empty_already = rustix::io::read(&self.alarm.eventfd, &mut [0; 8]);
        }
        self.ready.extend(self.done.try_iter());
        Ok(())
    }
}

impl Drop for Threads {
    /// The memory of what is under way is taken back only when it has ended.
    fn drop(&mut self) {
        self.jobs = None;
        self.backlog.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve(files: Files, jobs: &Mutex<Receiver<Job>>, done: &Sender<Done>, alarm: &Alarm) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Job { operation, tag }) = job else { return };
        let result = carry_out(files, operation).unwrap_or_else(|e| -e.raw_os_error());
        if done.send(Done { tag, result, more: false }).is_err() {
            return;
        }
        fence(Ordering::SeqCst);
        if alarm.asleep.swap(false, Ordering::Relaxed) {
            // It fails only with the counter full, and then it is readable anyway.
            let _full = rustix::io::write(&alarm.eventfd, &1u64.to_ne_bytes());
        }
    }
}

/// Does it, here and now. Bytes, or 0 for what moves none.
fn carry_out(files: Files, operation: Operation) -> Result<i32, Errno> {
    let fd = match operation {
        Operation::Read { file: File::Base, .. } => files.base,
        _ => files.overflow.ok_or(Errno::BADF)?,
    };
    // SAFETY: open as long as the engine, which joins its threads before it goes.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let fd = fd.as_fd();
    match operation {
        Operation::Read { to, len, offset, .. } => {
            // SAFETY: the memory is the operation's until it completes.
            let read = unsafe { libc::pread64(raw(fd), to.cast(), len as usize, offset as i64) };
            transferred(read)
        }
        Operation::Write { from, len, offset, sync } => {
            let piece = libc::iovec { iov_base: from.cast_mut().cast(), iov_len: len as usize };
            let flags = if sync { libc::RWF_DSYNC } else { 0 };
            // SAFETY: the memory is the operation's until it completes, and is only read.
            let written = unsafe { libc::pwritev2(raw(fd), &raw const piece, 1, offset as i64, flags) };
            transferred(written)
        }
        Operation::Punch { len, offset } => {
            fallocate(fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len).map(|()| 0)
        }
        Operation::Sync => fdatasync(fd).map(|()| 0),
    }
}

fn raw(fd: BorrowedFd<'_>) -> RawFd {
    std::os::fd::AsRawFd::as_raw_fd(&fd)
}

fn transferred(n: isize) -> Result<i32, Errno> {
    match i32::try_from(n) {
        Ok(n) if n >= 0 => Ok(n),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}
