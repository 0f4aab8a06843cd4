//! What a front end or its guest can take of memory, address space and time.

use crate::vmm::*;
use std::os::fd::AsFd;

fn region(gpa: u64, len: u64, user: u64) -> Vec<u8> {
    [0, gpa, len, user, 0].iter().flat_map(|n: &u64| n.to_ne_bytes()).collect()
}

#[test]
fn address_space_is_bounded_with_what_unfinished_requests_hold() {
    let mut rig = Rig::new(16, ALL_FEATURES);
    let tib = 1u64 << 40;
    let huge = rustix::fs::memfd_create("huge", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&huge, 7 * tib).unwrap();
    let nth = |n: u64| region(n * 8 * tib, 7 * tib, n * 8 * tib);
    assert!(rig.try_tell(37, &nth(1), &[huge.as_fd()]) && rig.try_tell(37, &nth(2), &[huge.as_fd()]));
    assert!(!rig.try_tell(37, &nth(3), &[huge.as_fd()]));
    assert!(rig.frontend.take_notice().unwrap().contains("16 TiB"));
    // What an unfinished request may point into still counts.
    rig.memory.write(SCRATCH, &Rig::header(4, 0));
    let head = rig.driver.chain(&rig.memory, &[(SCRATCH, 16, false), (SCRATCH + 16, 1, true)], None);
    rig.driver.offer(&rig.memory, head);
    let request = rig.frontend.next(0).unwrap();
    assert!(rig.try_tell(38, &nth(1), &[]));
    assert!(!rig.try_tell(37, &nth(3), &[huge.as_fd()]));
    spillway_core::GuestBuffers::complete(&mut rig.frontend, request.token, Ok(()));
    assert!(rig.try_tell(37, &nth(3), &[huge.as_fd()]));
}

#[test]
fn a_request_in_very_many_pieces_is_an_io_error() {
    let mut rig = Rig::unconnected(16, ALL_FEATURES);
    rig.negotiate();
    rig.add_memory();
    // Buffers across the border of two regions are two pieces each.
    let second = GuestMemory::new(4096, GPA + MEMORY_BYTES, 0x2000_0000);
    let fd = second.fd.try_clone().unwrap();
    assert!(rig.try_tell(37, &region(second.gpa, second.len, second.user), &[fd.as_fd()]));
    rig.start_queue(0);
    let (table, status) = (SCRATCH + 0x10000, SCRATCH + 16);
    rig.memory.write(SCRATCH, &Rig::header(0, 0));
    for (buffers, expected) in [(512, Some((0, 1025))), (1020, Some((1, 0)))] {
        let mut chain = vec![(SCRATCH, 16, false)];
        chain.extend((0..buffers - 1).map(|_| (second.gpa - 1, 2, true)));
        chain.push((SCRATCH + 32, if buffers == 512 { 2 } else { 10 }, true));
        chain.push((status, 1, true));
        assert_eq!(rig.run(&chain, Some(table), status), expected, "{buffers} buffers");
    }
}

#[test]
fn bad_requests_are_answered_a_bounded_number_at_a_time() {
    let mut rig = Rig::new(256, ALL_FEATURES);
    rig.memory.write(SCRATCH, &Rig::header(99, 0));
    for _ in 0..100 {
        let head = rig.driver.chain(&rig.memory, &[(SCRATCH, 16, false), (SCRATCH + 16, 1, true)], None);
        rig.driver.offer(&rig.memory, head);
    }
    let mut answered = Vec::new();
    while rig.frontend.has_work(0) {
        // However often it is asked between two publications.
        for _ in 0..3 {
            assert!(rig.frontend.next(0).is_none());
        }
        rig.frontend.publish(0);
        answered.push(std::iter::from_fn(|| rig.driver.take_used(&rig.memory)).count());
    }
    assert_eq!(answered, [32, 32, 32, 4]);
}

#[test]
fn a_front_end_that_says_nothing_can_be_told() {
    let mut rig = Rig::unconnected(16, ALL_FEATURES);
    rig.vmm.send_bytes(&[1, 0, 0, 0], &[]);
    rig.frontend.on_readable(&mut rig.changes).unwrap();
    assert!(!rig.frontend.has_spoken(), "a third of a header");
    rig.vmm.send_bytes(&[1, 0, 0, 0, 0, 0, 0, 0], &[]);
    rig.frontend.on_readable(&mut rig.changes).unwrap();
    assert!(rig.frontend.has_spoken());
}
