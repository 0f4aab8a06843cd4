//! Guest memory that shrinks under our feet: SIGBUS for real.

use crate::recovery::InflightTable;
use crate::vmm::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use spillway_core::{Errno, GuestBuffers};
use spillway_export::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;

const DATA: u64 = SCRATCH + 0x10_0000;

/// Takes a request of one block at `DATA`.
fn take(rig: &mut Rig, kind: u32) -> spillway_core::Request {
    rig.memory.write(SCRATCH, &Rig::header(kind, 0));
    let buffers = [(SCRATCH, 16, false), (DATA, 4096, kind == 0), (SCRATCH + 16, 1, true)];
    let head = rig.driver.chain(&rig.memory, &buffers, None);
    rig.driver.offer(&rig.memory, head);
    rig.frontend.next(0).unwrap()
}

/// The connection is lost, and nothing but that.
fn lost(rig: &mut Rig) {
    assert!(rig.frontend.poisoned());
    assert!(!rig.frontend.is_live(0));
    assert!(rig.frontend.next(0).is_none());
    rig.vmm.send(1, &[], &[]);
    assert_eq!(fault(rig.frontend.on_readable(&mut rig.changes)).kind, ErrorKind::MemoryShrunk);
    assert_eq!(rig.frontend.next(0), None);
}

#[test]
fn in_the_middle_of_a_copy() {
    let bystander = Rig::new(8, ALL_FEATURES);
    for kind in [0, 1] {
        let mut rig = Rig::new(8, ALL_FEATURES);
        let request = take(&mut rig, kind);
        ftruncate(&rig.memory.fd, DATA - GPA).unwrap();
        let result = match kind {
            0 => rig.frontend.copy_to_guest(request.token, 0, &[7; 4096]),
            _ => rig.frontend.copy_from_guest(request.token, 0, &mut [7; 4096]),
        };
        assert_eq!(result, Err(Errno::FAULT));
        assert_eq!(rig.frontend.zero_guest(request.token, 0, 4096), Err(Errno::FAULT));
        rig.frontend.complete(request.token, result);
        rig.frontend.publish(0);
        assert_eq!(rig.frontend.unfinished(), 0);
        // The ring is still there, and says nothing.
        assert_eq!(rig.driver.take_used(&rig.memory), None);
        lost(&mut rig);
    }
    let mut bystander = bystander;
    assert!(!bystander.frontend.poisoned());
    assert_eq!(bystander.simple(4, 0, None), Some((0, 1)));
}

#[test]
fn under_the_rings() {
    // All of it goes: whatever is touched first must survive.
    let mut rig = Rig::new(8, ALL_FEATURES);
    take(&mut rig, 0);
    ftruncate(&rig.memory.fd, 0).unwrap();
    assert!(rig.frontend.next(0).is_none());
    lost(&mut rig);

    let mut rig = Rig::new(8, ALL_FEATURES);
    ftruncate(&rig.memory.fd, 0).unwrap();
    rig.frontend.has_work(0);
    lost(&mut rig);

    let mut rig = Rig::new(8, ALL_FEATURES);
    ftruncate(&rig.memory.fd, 0).unwrap();
    rig.frontend.enable_notifications(0);
    lost(&mut rig);

    let mut rig = Rig::new(8, ALL_FEATURES);
    let request = take(&mut rig, 1);
    ftruncate(&rig.memory.fd, 0).unwrap();
    rig.frontend.complete(request.token, Ok(()));
    rig.frontend.publish(0);
    lost(&mut rig);
}

#[test]
fn under_the_header_and_the_indirect_table() {
    for table in [None, Some(DATA + 64)] {
        let mut rig = Rig::new(8, ALL_FEATURES);
        rig.memory.write(DATA, &Rig::header(0, 0));
        let buffers = [(DATA, 16, false), (SCRATCH, 512, true), (SCRATCH + 512, 1, true)];
        let head = rig.driver.chain(&rig.memory, &buffers, table);
        rig.driver.offer(&rig.memory, head);
        ftruncate(&rig.memory.fd, DATA - GPA).unwrap();
        assert!(rig.frontend.next(0).is_none());
        rig.frontend.publish(0);
        assert_eq!(rig.driver.take_used(&rig.memory), None, "no answer to a request that was not read");
        lost(&mut rig);
    }
}

#[test]
fn under_the_in_flight_table() {
    let mut rig = Rig::unconnected(16, ALL_FEATURES);
    rig.negotiate();
    rig.add_memory();
    let table = InflightTable::create(&mut rig, 1, 16);
    // Ours is sealed; a front end may hand over one that is not.
    let fd = memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, 4096).unwrap();
    assert!(rig.try_tell(32, &table.description, &[fd.as_fd()]));
    rig.start_queue(0);
    assert!(rig.frontend.is_live(0));
    ftruncate(&fd, 0).unwrap();
    rig.memory.write(SCRATCH, &Rig::header(4, 0));
    let head = rig.driver.chain(&rig.memory, &[(SCRATCH, 16, false), (SCRATCH + 16, 1, true)], None);
    rig.driver.offer(&rig.memory, head);
    assert!(rig.frontend.next(0).is_none());
    lost(&mut rig);
}

#[test]
fn a_new_session_after_it_works() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    let request = take(&mut rig, 0);
    ftruncate(&rig.memory.fd, DATA - GPA).unwrap();
    assert_eq!(rig.frontend.copy_to_guest(request.token, 0, &[7; 4096]), Err(Errno::FAULT));
    rig.frontend.complete(request.token, Err(Errno::FAULT));
    drop(rig);
    for _ in 0..300 {
        // More sessions than there are places for at once.
        let mut rig = Rig::new(8, ALL_FEATURES);
        assert!(!rig.frontend.poisoned());
        assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
    }
}

#[test]
fn any_other_sigbus_still_kills() {
    const CHILD: &str = "SPILLWAY_TEST_SIGBUS";
    match std::env::var(CHILD).as_deref() {
        Ok("fault") => {
            let _rig = Rig::new(8, ALL_FEATURES);
            let memory = GuestMemory::new(8192, 0, 0);
            ftruncate(&memory.fd, 0).unwrap();
            memory.read(0, 1);
            unreachable!();
        }
        Ok("signal") => {
            let _rig = Rig::new(8, ALL_FEATURES);
            // SAFETY: raising a signal.
            unsafe { libc::raise(libc::SIGBUS) };
            unreachable!();
        }
        _ => {}
    }
    for way in ["fault", "signal"] {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "shrinking::any_other_sigbus_still_kills", "--nocapture"])
            .env(CHILD, way)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{way}: {status:?}");
    }
}
