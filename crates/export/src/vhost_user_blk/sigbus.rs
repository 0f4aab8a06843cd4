//! Survives guest memory that shrinks under our feet. Owns the process's SIGBUS action and a static table of
//! the address ranges that a front end lent us; never allocates, locks or formats inside the signal handler.
//!
//! A front end can truncate the file behind its memory at any time. The next access beyond the new end raises
//! SIGBUS. If the address lies in a range of the table, the signal handler puts anonymous zero pages in place of that
//! whole range, marks its [`Guard`] as poisoned, and lets the instruction run again. The access then reads
//! zeroes or writes to nowhere, and whoever made it looks at the guard before believing the result.
//! Any other SIGBUS gets the default action.
//!
//! Invariant: a range is in the table exactly as long as its mapping exists, so the signal handler never maps over
//! memory that is not a front end's.

use super::error::{Error, last_errno};
use crate::ErrorKind;
use rustix::io::Errno;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering, compiler_fence};

const MAX_RANGES: usize = 4096;
const MAX_GUARDS: usize = 256;

struct Range {
    /// 0 while the entry is free or being written.
    start: AtomicUsize,
    len: AtomicUsize,
    guard: AtomicUsize,
    taken: AtomicBool,
}

struct Flag {
    taken: AtomicBool,
    poisoned: AtomicU8,
}

static RANGES: [Range; MAX_RANGES] = [const {
    Range {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        guard: AtomicUsize::new(0),
        taken: AtomicBool::new(false),
    }
}; MAX_RANGES];
static FLAGS: [Flag; MAX_GUARDS] =
    [const { Flag { taken: AtomicBool::new(false), poisoned: AtomicU8::new(0) } }; MAX_GUARDS];
static INSTALL: Once = Once::new();

/// One front end's flag: poisoned once any of its ranges has shrunk.
pub(super) struct Guard {
    index: usize,
    flag: &'static Flag,
}

impl Guard {
    /// Takes a flag, and installs the signal handler when it is the first.
    pub(super) fn new() -> Result<Guard, Error> {
        let mut installed = Ok(());
        INSTALL.call_once(|| installed = install());
        installed.map_err(|errno| Error::io("the signal handler of SIGBUS cannot be installed", errno))?;
        for (index, flag) in FLAGS.iter().enumerate() {
            if !flag.taken.swap(true, Ordering::AcqRel) {
                flag.poisoned.store(0, Ordering::Relaxed);
                return Ok(Guard { index, flag });
            }
        }
        let error = Error::new(ErrorKind::Limit, "there are too many front ends in this process");
        Err(error.above(MAX_GUARDS as u64 + 1, MAX_GUARDS as u64))
    }

    /// Whether an access has hit memory that is gone. Asked after each access, before its result is used.
    #[inline(always)]
    pub(super) fn poisoned(&self) -> bool {
        // The flag is set by a signal on this very thread: only the compiler must be kept from asking early.
        compiler_fence(Ordering::SeqCst);
        self.flag.poisoned.load(Ordering::Relaxed) != 0
    }

    /// Enters a mapping in the table. `start` and `len` are what `mmap` was called with, in whole pages.
    pub(super) fn register(&self, start: *mut u8, len: usize) -> Result<Registration, Error> {
        for (index, range) in RANGES.iter().enumerate() {
            if !range.taken.swap(true, Ordering::AcqRel) {
                range.len.store(len, Ordering::Relaxed);
                range.guard.store(self.index, Ordering::Relaxed);
                range.start.store(start as usize, Ordering::Release);
                return Ok(Registration { index });
            }
        }
        let error = Error::new(ErrorKind::Limit, "there are too many guest memory regions in this process");
        Err(error.above(MAX_RANGES as u64 + 1, MAX_RANGES as u64))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.flag.taken.store(false, Ordering::Release);
    }
}

/// A range's place in the table. Dropped before the range is unmapped.
pub(super) struct Registration {
    index: usize,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let range = &RANGES[self.index];
        range.start.store(0, Ordering::Release);
        range.taken.store(false, Ordering::Release);
    }
}

fn install() -> Result<(), Errno> {
    // SAFETY: `action` is fully initialised; `on_sigbus` has the signature that SA_SIGINFO asks for and does
    // only what is allowed inside a signal handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        if libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) != 0 {
            return Err(last_errno());
        }
    }
    Ok(())
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel hands a valid siginfo to an SA_SIGINFO signal handler; errno is this thread's own.
    let (address, code, errno_at) =
        unsafe { ((*info).si_addr() as usize, (*info).si_code, libc::__errno_location()) };
    // SAFETY: as above.
    let errno = unsafe { *errno_at };
    // A positive code comes from the kernel, for an access; others from a process.
    let contained = code > 0 && contain(address);
    if !contained {
        // SAFETY: async-signal-safe calls; the default action is always valid. A fault comes again when the
        // instruction runs again, a signal that a process sent has to be raised again.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = libc::SIG_DFL;
            libc::sigaction(signal, &action, std::ptr::null_mut());
            if code <= 0 {
                libc::raise(signal);
            }
        }
    }
    // SAFETY: as above.
    unsafe { *errno_at = errno };
}

/// Replaces the range that holds `address`. False if there is none, or the kernel refuses.
fn contain(address: usize) -> bool {
    for range in &RANGES {
        let start = range.start.load(Ordering::Acquire);
        if start == 0 {
            continue;
        }
        let len = range.len.load(Ordering::Relaxed);
        let guard = range.guard.load(Ordering::Relaxed);
        // The entry was rewritten by another thread meanwhile: then it is not the one of this access.
        if range.start.load(Ordering::Acquire) != start || address.wrapping_sub(start) >= len {
            continue;
        }
        // SAFETY: start and len are a whole mapping of a front end's memory, made by this process and alive
        // while its registration is; replacing it keeps every pointer into it valid. mmap is a bare system call.
        let mapped = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return false;
        }
        if let Some(flag) = FLAGS.get(guard) {
            flag.poisoned.store(1, Ordering::Relaxed);
        }
        return true;
    }
    false
}
