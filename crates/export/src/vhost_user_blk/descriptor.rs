//! Which descriptors a front end may hand over: eventfds, and shared memory, which are all that the protocol has a use
//! for.
//!
//! Any other file is somebody's: what fstat, mmap and close do is for its file system to say, and with FUSE that is a program
//! of whoever mounted it, perhaps the front end, which need never answer. So the kind is found out before anything else is done with
//! a descriptor, by calls that do not go to its file system. Owns the question; never closes anything.
//!
//! Invariant: what is called harmless is answered for by the kernel alone.

use super::signal::is_eventfd;
use std::os::fd::BorrowedFd;

/// Whether it is an eventfd or shared memory; if not, why it is refused.
pub(super) fn is_harmless(fd: BorrowedFd<'_>) -> Result<(), String> {
    // Only files of shared memory (memfd, tmpfs) and of hugetlbfs have seals; the kernel looks at nothing else.
    if rustix::fs::fcntl_get_seals(fd).is_ok() {
        return Ok(());
    }
    match is_eventfd(fd) {
        Ok(true) => Ok(()),
        Ok(false) => Err(
            "a file descriptor that is neither an eventfd nor shared memory (memfd, tmpfs or hugetlbfs): \
             give the machine shared memory, such as memory-backend-memfd with share=on"
                .into(),
        ),
        Err(e) => Err(format!("a file descriptor that may be no eventfd: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, epoll, eventfd};
    use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};
    use std::os::fd::{AsFd, OwnedFd};

    #[test]
    fn eventfds_and_shared_memory_are_harmless_whatever_their_rights() {
        let fds: [OwnedFd; 4] = [
            eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
            memfd_create("t", MemfdFlags::CLOEXEC).unwrap(),
            memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB).unwrap(),
            tempfile::tempfile_in("/dev/shm").unwrap().into(),
        ];
        for fd in &fds {
            is_harmless(fd.as_fd()).unwrap();
        }
    }

    #[test]
    fn all_else_is_refused_in_words() {
        let fds: [OwnedFd; 6] = [
            rustix::pipe::pipe().unwrap().0,
            std::os::unix::net::UnixStream::pair().unwrap().0.into(),
            epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
            tempfile::tempfile_in("/var/tmp").unwrap().into(),
            open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap(),
            // Shared memory, but nothing that could be mapped.
            open("/dev/shm", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap(),
        ];
        for fd in &fds {
            assert!(is_harmless(fd.as_fd()).unwrap_err().contains("neither an eventfd nor"), "{fd:?}");
        }
    }
}
