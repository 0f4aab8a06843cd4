//! How an eventfd of the front end is raised. Owns the thread's AIO context; never waits.
//!
//! write(2) to an eventfd waits while its counter is full, unless its file is non-blocking, and both are in the
//! hands of whoever shares the file. A look before the write does not help: a hostile front end fills the counter in
//! between. The kernel's own way to raise an eventfd never waits; vhost in the kernel interrupts a guest by it.
//! Linux AIO has it too: the kernel raises the eventfd that a request names when the request completes. So an eventfd
//! is raised by a poll of itself, which is always ready for one of the two directions. This needs no io_uring, which
//! some hosts forbid and which a sandboxed process cannot set up again. One context serves all eventfds; all that
//! it could do besides is to read and write descriptors of this process.
//!
//! Invariant: nothing that the front end does to its eventfd makes [`Signal::raise`] wait.

use super::error::{Error, last_errno};
use crate::ErrorKind;
use libc::iocb;
use rustix::io::Errno;
use std::cell::OnceCell;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::thread::LocalKey;
use std::time::{Duration, Instant};

/// Completions that the kernel keeps for certain until they are fetched. It counts them for all contexts of the host, up to
/// `fs.aio-max-nr`, which is 65,536 where nobody changed it.
const ENTRIES: usize = 16;
/// How long a thread that is to raise eventfds waits, once, for the host to be below that limit: the process before may
/// still be giving its own back.
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
    /// For this eventfd, of which it keeps its own reference; any other file is an error.
    pub(super) fn new(eventfd: impl AsFd) -> Result<Signal, Error> {
        let patience = if WAITED.replace(true) { Duration::ZERO } else { PATIENCE };
        let context = Context::of_thread(&CONTEXT, ENTRIES, patience)?;
        if !context.is_eventfd(eventfd.as_fd())? {
            return Err(not_an_eventfd());
        }
        let eventfd = eventfd.as_fd().try_clone_to_owned();
        let eventfd = eventfd.map_err(|e| Error::from_io("its descriptor cannot be duplicated", &e))?;
        Ok(Signal { eventfd, context })
    }

    /// From here on it is for another eventfd. After an error it is for the same one as before.
    pub(super) fn set(&mut self, eventfd: impl AsFd) -> Result<(), Error> {
        *self = Signal::new(eventfd)?;
        Ok(())
    }

    /// Adds one to the eventfd's counter, or leaves it where it is when it is full.
    pub(super) fn raise(&mut self) {
        let _ = self.context.submit(&mut request(POLL, self.eventfd.as_fd()));
    }
}

/// Whether this is an eventfd. It never waits, whatever it is: no operation of the file's own is called.
pub(super) fn is_eventfd(fd: BorrowedFd<'_>) -> Result<bool, Error> {
    Context::of_thread(&PROBES, 1, Duration::ZERO)?.is_eventfd(fd)
}

/// Why a file descriptor is refused where an eventfd belongs.
pub(super) fn not_an_eventfd() -> Error {
    Error::new(ErrorKind::WrongDescriptor, "the file descriptor is not an eventfd")
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
    /// For [`is_eventfd`]: no request of it ever completes.
    static PROBES: Cell = const { OnceCell::new() };
    static WAITED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

impl Context {
    fn of_thread(
        place: &'static LocalKey<Cell>,
        entries: usize,
        patience: Duration,
    ) -> Result<Rc<Context>, Error> {
        place.with(|cell| match cell.get() {
            Some(context) => Ok(Rc::clone(context)),
            None => {
                let context = Rc::new(Context::new(entries, patience)?);
                Ok(Rc::clone(cell.get_or_init(|| context)))
            }
        })
    }

    fn new(entries: usize, patience: Duration) -> Result<Context, Error> {
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes one number, to a place of ours that holds zero as it wants it.
        let setup = || match unsafe { libc::syscall(libc::SYS_io_setup, entries, &raw mut id) } {
            0 => Ok(()),
            _ => Err(last_errno()),
        };
        with_patience(patience, setup).map_err(|errno| {
            let reason =
                "io_setup failed (raise /proc/sys/fs/aio-max-nr, or allow it in the seccomp profile)";
            Error::io(reason, errno)
        })?;
        Ok(Context { id })
    }

    /// Whether the kernel takes it for an eventfd.
    fn is_eventfd(&self, fd: BorrowedFd<'_>) -> Result<bool, Error> {
        // The kernel checks the eventfd first, and then refuses a flag that does not exist.
        let mut request = request(READ, fd);
        request.aio_rw_flags = 1 << 30;
        match self.submit(&mut request) {
            Err(Errno::OPNOTSUPP) => Ok(true),
            // EBADF is for a file that is open as a path only (O_PATH).
            Err(Errno::INVAL | Errno::BADF) => Ok(false),
            Err(errno) => Err(Error::io("io_submit failed", errno)),
            Ok(()) => Err(Error::new(ErrorKind::Io, "this kernel does not check the flags of io_submit")),
        }
    }

    fn submit(&self, request: &mut iocb) -> Result<(), Errno> {
        let mut requests = [&raw mut *request];
        // SAFETY: one request, which the kernel copies; it names no memory of ours.
        let mut submit = || unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1, requests.as_mut_ptr()) };
        let mut submitted = submit();
        if submitted < 0 && last_errno() == Errno::AGAIN {
            // There is no space for its completion: earlier ones have to be fetched.
            self.fetch_completions();
            submitted = submit();
        }
        if submitted == 1 { Ok(()) } else { Err(last_errno()) }
    }

    /// Fetches completions, of which none matters.
    fn fetch_completions(&self) {
        // `struct io_event` is four numbers of 8 bytes.
        let mut events = [[0u64; 4]; ENTRIES];
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes at most as many events as there is space for, and does not wait for any.
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

/// Tries again for a while when the host has as many contexts as it allows.
fn with_patience(patience: Duration, mut setup: impl FnMut() -> Result<(), Errno>) -> Result<(), Errno> {
    let until = Instant::now() + patience;
    loop {
        match setup() {
            Err(Errno::AGAIN) if Instant::now() < until => {
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
    fn only_the_limit_of_the_host_is_worth_another_try() {
        let fails = |errno: Errno, times: u32| {
            let mut tries = 0;
            let result = with_patience(PATIENCE, || {
                tries += 1;
                if tries > times { Ok(()) } else { Err(errno) }
            });
            (tries, result.is_ok())
        };
        assert_eq!(fails(Errno::AGAIN, 5), (6, true));
        assert_eq!(fails(Errno::PERM, 5), (1, false));
        let begun = Instant::now();
        assert!(!fails(Errno::AGAIN, u32::MAX).1 && begun.elapsed() >= PATIENCE);
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
            assert_eq!(rustix::io::read(&fd, &mut [0; 8]), Err(Errno::AGAIN));
            signal.raise();
            rustix::io::read(&fd, &mut [0; 8]).unwrap();
        }
        assert_eq!(rustix::io::read(&fd, &mut [0; 8]), Err(Errno::AGAIN));
    }
}
