//! A worker's lifeline: a word of shared memory by which its supervisor learns of its death before the kernel has
//! taken its memory apart.
//!
//! A process has ended, for its parent and for a pidfd, only when its mappings are gone: 150 ms with 3 GiB of small
//! pages. A robust futex is given up before that, when the thread that holds it runs no instruction of its own any more
//! (set_robust_list(2)). Owns the word; draws no conclusion from it.
//!
//! Invariant: the word says dead only when the one thread of the worker that touches shared memory has left user mode for
//! ever. Other threads of it, and I/O that it has begun, may still be there: that is what the pidfd tells.

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const LEN: usize = 4096;
/// Changes of the word that are followed at once.
const PATIENCE: u32 = 16;
/// linux/futex.h: bits of the word beside the thread's number.
const FUTEX_WAITERS: u32 = 0x8000_0000;
const FUTEX_OWNER_DIED: u32 = 0x4000_0000;

/// The word, mapped until the value is dropped.
#[derive(Debug)]
struct Word(*mut AtomicU32);

// SAFETY: an address of an atomic that is valid wherever it is used, until `drop`.
unsafe impl Send for Word {}
// SAFETY: the same.
unsafe impl Sync for Word {}

impl Word {
    fn map(fd: BorrowedFd<'_>, prot: ProtFlags) -> io::Result<Word> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), LEN, prot, MapFlags::SHARED, fd, 0) }?;
        Ok(Word(base.cast()))
    }

    fn get(&self) -> &AtomicU32 {
        // SAFETY: mapped, aligned to a page, sealed against shrinking.
        unsafe { &*self.0 }
    }

    /// Sleeps until somebody wakes the word, unless it has changed already.
    fn wait(&self, seen: u32) {
        // SAFETY: the kernel reads a mapped word. Whatever it returns, the caller looks again.
        unsafe { libc::syscall(libc::SYS_futex, self.0, libc::FUTEX_WAIT, seen, std::ptr::null::<u8>()) };
    }

    fn wake(&self) {
        // SAFETY: the address of a mapped word is all that it takes.
        unsafe { libc::syscall(libc::SYS_futex, self.0, libc::FUTEX_WAKE, i32::MAX) };
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which no reference is left.
        let _ = unsafe { rustix::mm::munmap(self.0.cast(), LEN) };
    }
}

/// All signals, blocked in this thread for a while: threads that it starts meanwhile never get one.
struct Signals(libc::sigset_t);

impl Signals {
    fn block() -> io::Result<Signals> {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: both are filled by the calls that they are given to.
        let error = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr())
        };
        match error {
            // SAFETY: filled.
            0 => Ok(Signals(unsafe { before.assume_init() })),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: the set is one that this thread had. Nothing can fail then.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}

/// The supervisor's end.
#[derive(Debug)]
pub struct Lifeline {
    shared: OwnedFd,
    death: Arc<OwnedFd>,
    word: Arc<Word>,
    given_up: Arc<AtomicBool>,
    waiter: Option<JoinHandle<()>>,
}

impl Lifeline {
    /// Memory for a worker to come, and a thread that waits for its death: there is no other way to wait for a futex
    /// and for files at once that every kernel has.
    pub fn new() -> io::Result<Lifeline> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let shared = rustix::fs::memfd_create("spillway-lifeline", flags)?;
        rustix::fs::ftruncate(&shared, LEN as u64)?;
        rustix::fs::fcntl_add_seals(&shared, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let word = Arc::new(Word::map(shared.as_fd(), ProtFlags::READ)?);
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let death = Arc::new(rustix::event::eventfd(0, flags)?);
        let given_up = Arc::new(AtomicBool::new(false));
        let signals = Signals::block()?;
        let waiter = std::thread::Builder::new().name("lifeline".into()).stack_size(64 << 10).spawn({
            let (word, death, given_up) = (word.clone(), death.clone(), given_up.clone());
            move || {
                for turn in 0.. {
                    if given_up.load(Ordering::Acquire) {
                        return;
                    }
                    if turn > PATIENCE {
                        // It changes once in the life of an honest worker.
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    let seen = word.get().load(Ordering::Acquire);
                    if seen & FUTEX_OWNER_DIED != 0 {
                        // An eventfd takes a 1 unless it is at its end already.
                        let _ = rustix::io::write(&death, &1u64.to_ne_bytes());
                        return;
                    }
                    word.wait(seen);
                }
            }
        });
        drop(signals);
        let waiter = waiter?;
        Ok(Lifeline { shared, death, word, given_up, waiter: Some(waiter) })
    }

    /// What the worker is to be given.
    pub fn shared(&self) -> BorrowedFd<'_> {
        self.shared.as_fd()
    }

    /// Readable from the worker's death on.
    pub fn death(&self) -> BorrowedFd<'_> {
        self.death.as_fd()
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        self.given_up.store(true, Ordering::Release);
        let Some(waiter) = self.waiter.take() else { return };
        // It may be on its way to sleep.
        while !waiter.is_finished() {
            self.word.wake();
            std::thread::sleep(Duration::from_micros(50));
        }
        let _ = waiter.join();
    }
}

/// linux/futex.h: an entry of a thread's list, of which the kernel knows where from it the word lies.
#[repr(C)]
struct Entry {
    next: *const Entry,
}

#[repr(C)]
struct Head {
    list: Entry,
    futex_offset: libc::c_long,
    list_op_pending: *const Entry,
}

/// Holds the lifeline in this thread's name from here on, for good. The thread can use no robust mutex besides.
pub fn hold(shared: OwnedFd) -> io::Result<()> {
    let word = Word::map(shared.as_fd(), ProtFlags::READ | ProtFlags::WRITE)?;
    let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    word.get().store(thread | FUTEX_WAITERS, Ordering::Release);
    // Until the thread has ended the kernel may follow these.
    let head = Box::leak(Box::new(Head {
        list: Entry { next: std::ptr::null() },
        futex_offset: 0,
        list_op_pending: std::ptr::null(),
    }));
    let entry: &Entry = Box::leak(Box::new(Entry { next: &raw const head.list }));
    head.futex_offset =
        (word.0.addr() as libc::c_long).wrapping_sub((&raw const *entry).addr() as libc::c_long);
    head.list.next = entry;
    std::mem::forget(word);
    // SAFETY: head, entry and word stay where they are; the list is closed, and the word aligned to 4.
    match unsafe { libc::syscall(libc::SYS_set_robust_list, &raw const *head, size_of::<Head>()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn tells_within(lifeline: &Lifeline, ms: i64) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(lifeline.death(), PollFlags::IN)];
        let timeout = Timespec { tv_sec: 0, tv_nsec: ms * 1_000_000 };
        poll(&mut fds, Some(&timeout)).unwrap() == 1
    }

    #[test]
    fn a_death_is_told_and_nothing_else_is() {
        let lifeline = Lifeline::new().unwrap();
        let shared = lifeline.shared().try_clone_to_owned().unwrap();
        let (die, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            hold(shared).unwrap();
            wait.recv().unwrap();
        });
        assert!(!tells_within(&lifeline, 50), "it lives");
        lifeline.word.wake();
        assert!(!tells_within(&lifeline, 50), "a false alarm");
        die.send(()).unwrap();
        thread.join().unwrap();
        assert!(tells_within(&lifeline, 900));
    }

    #[test]
    fn a_lifeline_that_nobody_held_is_released() {
        for _ in 0..100 {
            drop(Lifeline::new().unwrap());
        }
    }
}
