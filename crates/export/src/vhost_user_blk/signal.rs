//! How an eventfd of the front end is raised. Owns the thread's AIO context; never waits.
//!
//! write(2) to an eventfd waits while its counter is full, unless its file is non-blocking, and both are in the
//! hands of whoever shares the file: to look before the write does not help, a hostile front end fills it in
//! between. The kernel's own way to raise an eventfd never waits; it is how vhost in the kernel interrupts a guest.
//! Linux AIO gives it to us: a request that names an eventfd has it raised when it completes. So an eventfd is
//! raised by a poll of itself, which is always ready for one of the two directions. That needs no io_uring, which hosts forbid and a sandbox cannot let a process
//! make anew: one context serves all eventfds, and what it can do besides is to read and write fds of ours.
//!
//! Invariant: nothing that the front end does to its eventfd makes [`Signal::raise`] wait.

use libc::iocb;
use std::cell::OnceCell;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::thread::LocalKey;
use std::time::{Duration, Instant};

/// Completions that the kernel keeps for certain until they are fetched. It counts them for all contexts of the host, up to
/// `fs.aio-max-nr`, which is 65,536 where nobody changed it.
const ENTRIES: usize = 16;
/// How long a thread that is to raise eventfds waits for room below that, once: the process before may still be giving its own
/// back.
const PATIENCE: Duration = Duration::from_secs(1);
/// `IOCB_CMD_PREAD`, `IOCB_CMD_POLL`, `IOCB_FLAG_RESFD` of linux/aio_abi.h.
const READ: u16 = 0;
const POLL: u16 = 5;
const RAISE_EVENTFD: u32 = 1;

/// An eventfd that can be raised.
pub(super) struct Signal {
    eventfd: OwnedFd,
    context: Rc<Context>,
}

impl Signal {
    /// For this eventfd; anything else is an error. It keeps its own reference.
    pub(super) fn new(eventfd: impl AsFd) -> io::Result<Signal> {
        let patience = if WAITED.replace(true) { Duration::ZERO } else { PATIENCE };
        let context = Context::of_thread(&CONTEXT, ENTRIES, patience)?;
        match context.knows(eventfd.as_fd())? {
            true => Ok(Signal { eventfd: eventfd.as_fd().try_clone_to_owned()?, context }),
            false => Err(io::Error::other("it is no eventfd")),
        }
    }

    /// For another eventfd from here on. After an error it is for the same as before.
    pub(super) fn set(&mut self, eventfd: impl AsFd) -> io::Result<()> {
        *self = Signal::new(eventfd)?;
        Ok(())
    }

    /// Adds one to the eventfd's counter, or leaves it where it is when it is full.
    pub(super) fn raise(&mut self) {
        let _ = self.context.submit(&mut request(POLL, self.eventfd.as_fd()));
    }
}

/// Whether this is an eventfd. It never waits, whatever it is: no operation of the file's own is called.
pub(super) fn is_eventfd(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Context::of_thread(&QUESTIONS, 1, Duration::ZERO)?.knows(fd)
}

fn request(operation: u16, eventfd: BorrowedFd<'_>) -> iocb {
    let eventfd = eventfd.as_raw_fd() as u32;
    // SAFETY: plain numbers, for all of which zero is valid.
    let mut request: iocb = unsafe { zeroed() };
    request.aio_lio_opcode = operation;
    request.aio_fildes = eventfd;
    request.aio_buf = (libc::POLLIN | libc::POLLOUT) as u64;
    request.aio_flags = RAISE_EVENTFD;
    request.aio_resfd = eventfd;
    request
}

/// A context of Linux AIO. A thread makes one and keeps it: to destroy one takes the kernel milliseconds.
struct Context {
    id: libc::c_ulong,
}

type Cell = OnceCell<Rc<Context>>;

thread_local! {
    static CONTEXT: Cell = const { OnceCell::new() };
    /// To ask what a descriptor is: nothing ever completes there.
    static QUESTIONS: Cell = const { OnceCell::new() };
    static WAITED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

impl Context {
    fn of_thread(
        place: &'static LocalKey<Cell>,
        entries: usize,
        patience: Duration,
    ) -> io::Result<Rc<Context>> {
        place.with(|cell| match cell.get() {
            Some(context) => Ok(Rc::clone(context)),
            None => {
                let context = Rc::new(Context::new(entries, patience)?);
                Ok(Rc::clone(cell.get_or_init(|| context)))
            }
        })
    }

    fn new(entries: usize, patience: Duration) -> io::Result<Context> {
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes one number, to a place of ours that holds zero as it wants it.
        let setup = || match unsafe { libc::syscall(libc::SYS_io_setup, entries, &raw mut id) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        with_patience(patience, setup).map_err(|e| {
            let advice = "raise /proc/sys/fs/aio-max-nr, or allow it in the seccomp profile";
            io::Error::new(e.kind(), format!("io_setup: {e}; {advice}"))
        })?;
        Ok(Context { id })
    }

    /// Whether the kernel takes it for an eventfd.
    fn knows(&self, fd: BorrowedFd<'_>) -> io::Result<bool> {
        // The kernel looks at the eventfd first, and then stumbles over a flag that there is not.
        let mut request = request(READ, fd);
        request.aio_rw_flags = 1 << 30;
        match self.submit(&mut request) {
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(true),
            // Of a file that is open as a place only, the kernel says that it is not open.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EBADF)) => Ok(false),
            Err(e) => Err(e),
            Ok(()) => Err(io::Error::other("this kernel does not check it")),
        }
    }

    fn submit(&self, request: &mut iocb) -> io::Result<()> {
        let mut requests = [&raw mut *request];
        // SAFETY: one request, which the kernel copies; it names no memory of ours.
        let mut submit = || unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1, requests.as_mut_ptr()) };
        let mut submitted = submit();
        if submitted < 0 && io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock {
            // No room for its completion: earlier ones are to be fetched.
            self.forget_completions();
            submitted = submit();
        }
        if submitted == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn forget_completions(&self) {
        // `struct io_event` is four numbers of 8 bytes.
        let mut events = [[0u64; 4]; ENTRIES];
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes at most as many events as there is room for, and does not wait for any.
        unsafe {
            libc::syscall(libc::SYS_io_getevents, self.id, 0, ENTRIES, events.as_mut_ptr(), &raw const now)
        };
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is ours and nothing of it is under way: its requests complete when submitted.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
    }
}

/// Tries again for a while when the host has no room.
fn with_patience(patience: Duration, mut setup: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let until = Instant::now() + patience;
    loop {
        match setup() {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    #[test]
    fn only_a_lack_of_room_is_worth_another_try() {
        let fails = |errno: i32, times: u32| {
            let mut tries = 0;
            let result = with_patience(PATIENCE, || {
                tries += 1;
                if tries > times { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) }
            });
            (tries, result.is_ok())
        };
        assert_eq!(fails(libc::EAGAIN, 5), (6, true));
        assert_eq!(fails(libc::EPERM, 5), (1, false));
        let begun = Instant::now();
        assert!(!fails(libc::EAGAIN, u32::MAX).1 && begun.elapsed() >= PATIENCE);
    }

    /// Many more than the kernel keeps completions of.
    #[test]
    fn each_raise_counts_and_a_full_counter_stays_full() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let mut signal = Signal::new(&fd).unwrap();
        let counter = || {
            let mut bytes = [0; 8];
            rustix::io::read(&fd, &mut bytes).unwrap();
            u64::from_ne_bytes(bytes)
        };
        (0..5000).for_each(|_| signal.raise());
        assert_eq!(counter(), 5000);
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        (0..5000).for_each(|_| signal.raise());
        assert_eq!(counter(), u64::MAX);
    }

    #[test]
    fn only_an_eventfd_will_do_and_it_is_not_raised_by_the_question() {
        let memfd = memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
        assert!(Signal::new(&memfd).is_err_and(|e| e.to_string().contains("eventfd")));
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let mut signal = Signal::new(&fd).unwrap();
        // Whatever the number of completions that wait to be fetched.
        for _ in 0..300 {
            signal.set(&fd).unwrap();
            assert_eq!(rustix::io::read(&fd, &mut [0; 8]), Err(rustix::io::Errno::AGAIN));
            signal.raise();
            rustix::io::read(&fd, &mut [0; 8]).unwrap();
        }
        assert_eq!(rustix::io::read(&fd, &mut [0; 8]), Err(rustix::io::Errno::AGAIN));
    }
}
