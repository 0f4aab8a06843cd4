//! The signals that end a server, as a readable fd. Never handles a signal asynchronously.
//!
//! Invariant: a signal that this process was started to ignore (nohup, a shell's background job) stays ignored; but for
//! SIGCHLD: who ignores it is never told how a child has ended.

use crate::error::SupervisorError;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// SIGTERM, SIGINT and SIGHUP, blocked and collected.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
}

impl Signals {
    /// Blocks the signals in this thread, and in those that it starts from now on.
    pub fn new() -> Result<Signals, SupervisorError> {
        Signals::blocked().map_err(|e| SupervisorError::internal("cannot wait for signals", e))
    }

    fn blocked() -> io::Result<Signals> {
        // SAFETY: every pointer is to a live local that the call fills or reads; a new fd is owned by nobody.
        unsafe {
            if libc::signal(libc::SIGCHLD, libc::SIG_DFL) == libc::SIG_ERR {
                return Err(io::Error::last_os_error());
            }
            let mut set = MaybeUninit::uninit();
            libc::sigemptyset(set.as_mut_ptr());
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                let mut action = MaybeUninit::<libc::sigaction>::uninit();
                let known = libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0;
                if signal == libc::SIGTERM || !known || action.assume_init_ref().sa_sigaction != libc::SIG_IGN
                {
                    libc::sigaddset(set.as_mut_ptr(), signal);
                }
            }
            if libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) < 0 {
                return Err(io::Error::last_os_error());
            }
            let fd = libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Signals { fd: OwnedFd::from_raw_fd(fd) })
        }
    }

    /// Takes one signal that has arrived.
    pub fn take(&self) -> Option<i32> {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.fd, &mut info) {
            Ok(n) if n == info.len() => Some(i32::from_ne_bytes([info[0], info[1], info[2], info[3]])),
            _ => None,
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
