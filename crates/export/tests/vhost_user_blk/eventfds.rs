//! Eventfds that the front end made so that a write to them would wait.

use crate::vmm::*;
use rustix::event::{EventfdFlags, eventfd};
use spillway_export::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::channel;
use std::time::Duration;

/// Blocking, and full.
fn blocking() -> OwnedFd {
    let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    fd
}

/// Runs it on a thread of its own, to see that it ends.
fn ends(what: impl FnOnce() + Send + 'static) {
    let (done, finished) = channel();
    std::thread::spawn(move || {
        what();
        done.send(()).unwrap();
    });
    finished
        .recv_timeout(Duration::from_secs(20))
        .expect("the thread that owns the disk waits for a front end");
}

#[test]
fn an_interrupt_never_waits() {
    for features in [ALL_FEATURES, ALL_FEATURES & !EVENT_IDX] {
        ends(move || {
            let mut rig = Rig::new(16, features);
            let call = blocking();
            rig.tell(13, &0u64.to_ne_bytes(), &[call.as_fd()]);
            for _ in 0..3 {
                assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
            }
            assert!(wait(&call, 0), "it is raised all the same");
            // And the next one works as ever.
            let call = event();
            rig.tell(13, &0u64.to_ne_bytes(), &[call.as_fd()]);
            drain(&call);
            rig.driver.want_interrupt(&rig.memory, true);
            assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
            assert_eq!(drain(&call), 1);
        });
    }
}

#[test]
fn telling_of_a_broken_queue_never_waits() {
    ends(|| {
        let mut rig = Rig::new(16, ALL_FEATURES);
        let error = blocking();
        rig.tell(14, &0u64.to_ne_bytes(), &[error.as_fd()]);
        rig.driver.offer(&rig.memory, 16);
        rig.process();
        assert!(!rig.frontend.is_live(0));
        assert!(wait(&error, 0));
    });
}

#[test]
fn what_is_no_eventfd_is_refused() {
    let mut rig = Rig::new(16, ALL_FEATURES);
    let memory = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert!(!rig.try_tell(13, &0u64.to_ne_bytes(), &[memory.as_fd()]));
    assert_eq!(rig.frontend.take_notice().unwrap().kind, ErrorKind::WrongDescriptor);
    // The queue goes on, without interrupts.
    assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
}
