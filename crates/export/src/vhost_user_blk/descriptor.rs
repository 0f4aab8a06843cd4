//! Which descriptors a front end may hand over: eventfds, and shared memory, which are all that the protocol has a use
//! for.
//!
//! What fstat, mmap and close do with any other file is up to its file system. With FUSE that is a program of whoever
//! mounted it, perhaps the front end, and it need never answer. So the kind of a descriptor is found out before
//! anything else is done with it, by calls that do not reach its file system. Never closes anything.
//!
//! Invariant: every operation on a descriptor that is called harmless is carried out by the kernel alone.

use super::error::Error;
use super::signal::is_eventfd;
use crate::ErrorKind;
use std::os::fd::BorrowedFd;

/// Refuses a descriptor that is neither an eventfd nor shared memory.
pub(super) fn check_harmless(fd: BorrowedFd<'_>) -> Result<(), Error> {
    // Only files of shared memory (memfd, tmpfs) and of hugetlbfs have seals; the kernel looks at nothing else.
    if rustix::fs::fcntl_get_seals(fd).is_ok() {
        return Ok(());
    }
    let checked = match is_eventfd(fd) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::new(
            ErrorKind::WrongDescriptor,
            "it is neither an eventfd nor shared memory (memfd, tmpfs or hugetlbfs): \
             give the machine shared memory, such as memory-backend-memfd with share=on",
        )),
        Err(error) => Err(error),
    };
    checked.map_err(|error| error.of("file descriptor"))
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
            check_harmless(fd.as_fd()).unwrap();
        }
    }

    #[test]
    fn all_else_is_refused() {
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
            let error = check_harmless(fd.as_fd()).unwrap_err();
            assert_eq!(error.kind, ErrorKind::WrongDescriptor, "{fd:?}");
        }
    }
}
