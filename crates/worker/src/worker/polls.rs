//! The watches of both engines, on epoll. Owns the fds that are watched, as duplicates; never touches what they carry.
//!
//! Invariant: a watch that is not `multi` is over with the first thing it finds, as one that could not be set up is.

use super::engine::{Done, Tag};
use super::error::{Error, ErrorKind};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

/// Events that one call fetches.
const EVENTS: usize = 64;

/// The longest sleep, a day: the system call for more than 24 days is not among those of the sandbox.
const LONGEST_NS: u64 = 86_400_000_000_000;

pub(super) struct Polls {
    epoll: OwnedFd,
    /// By tag: the fd, a duplicate, so that whoever owns the original may close it first; and whether it goes on.
    watches: HashMap<u64, (OwnedFd, bool)>,
    /// Found, and not yet taken.
    ready: Vec<Done>,
    /// The last look has not seen all.
    more: bool,
}

impl Polls {
    pub fn new() -> Result<Polls, Error> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)
            .map_err(|e| failed("cannot make the fd that watches the others (epoll_create)", e))?;
        Ok(Polls { epoll, watches: HashMap::new(), ready: Vec::new(), more: false })
    }

    /// Readable while there is something to [`Polls::look`] for.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Takes in an eventfd that is no watch: [`Polls::look`] says when it is raised.
    pub fn add_alarm(&self, eventfd: impl AsFd) -> Result<(), Error> {
        let tag = EventData::new_u64(Tag::Ignore.pack());
        epoll::add(&self.epoll, eventfd, tag, EventFlags::IN)
            .map_err(|e| failed("cannot watch the threads' alarm (epoll_ctl)", e))
    }

    /// Watches an fd once, or each change (`multi`).
    pub fn watch(&mut self, fd: RawFd, flags: i16, multi: bool, tag: Tag) {
        // A hung-up peer shows whether it is asked for or not.
        let mode = if multi { EventFlags::ET } else { EventFlags::ONESHOT };
        let wanted = EventFlags::from_bits_retain(u32::from(flags as u16)) | EventFlags::RDHUP | mode;
        // SAFETY: the caller has it open during this call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let added =
            fd.try_clone_to_owned().map_err(|e| e.raw_os_error().unwrap_or(libc::EIO)).and_then(|own| {
                epoll::add(&self.epoll, &own, EventData::new_u64(tag.pack()), wanted)
                    .map_err(Errno::raw_os_error)?;
                Ok(own)
            });
        match added {
            Ok(own) => _ = self.watches.insert(tag.pack(), (own, multi)),
            Err(errno) => self.ready.push(Done { tag, result: -errno, more: false }),
        }
    }

    /// Ends a watch. What it has found already may still come.
    pub fn unwatch(&mut self, tag: Tag) {
        if let Some((fd, _)) = self.watches.remove(&tag.pack()) {
            // Closing does not do it: others may hold the file. It is there, so that it cannot fail.
            let _ = epoll::delete(&self.epoll, fd);
        }
    }

    /// Whether something was found that was not taken, or is there to be found.
    pub fn has_found(&self) -> bool {
        self.more || !self.ready.is_empty()
    }

    /// Whether there is more than the last look has seen.
    pub fn has_more(&self) -> bool {
        self.more
    }

    /// Gives out what was found.
    pub fn take(&mut self, out: &mut Vec<Done>) {
        out.append(&mut self.ready);
    }

    /// Asks epoll what there is, and waits for it so long (`None`: for ever). Whether the alarm is raised. It sees a bounded
    /// number of events, as whoever shares a kick may raise it without end.
    pub fn look(&mut self, timeout_ns: Option<u64>) -> Result<bool, Error> {
        let timeout = timeout_ns
            .map(|ns| ns.min(LONGEST_NS))
            .map(|ns| Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 });
        let mut alarm = false;
        let mut space = [MaybeUninit::<Event>::uninit(); EVENTS];
        let events = match epoll::wait(&self.epoll, &mut space, timeout.as_ref()) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(false),
            Err(e) => return Err(failed("cannot wait for sockets and eventfds (epoll_wait)", e)),
        };
        self.more = events.len() == EVENTS;
        for event in events {
            let (flags, data) = (event.flags, event.data.u64());
            let tag = Tag::unpack(data);
            alarm |= tag == Tag::Ignore;
            let Some(&(_, more)) = self.watches.get(&data) else { continue };
            if !more {
                self.unwatch(tag);
            }
            self.ready.push(Done { tag, result: (flags.bits() & 0xffff) as i32, more });
        }
        Ok(alarm)
    }
}

#[cold]
fn failed(reason: &'static str, source: Errno) -> Error {
    Error::new(ErrorKind::Engine, reason).because(source)
}
