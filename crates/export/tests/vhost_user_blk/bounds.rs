//! What a front end or its guest can take of memory, address space and time.

use crate::vmm::*;
use spillway_core::{Errno, GuestBuffers, Request};
use spillway_export::ErrorKind;
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
    let error = rig.frontend.take_notice().unwrap();
    assert!(error.kind == ErrorKind::Limit && error.to_string().contains("16 TiB"), "{error}");
    // What an unfinished request may point into still counts.
    rig.memory.write(SCRATCH, &Rig::header(4, 0));
    let head = rig.driver.chain(&rig.memory, &[(SCRATCH, 16, false), (SCRATCH + 16, 1, true)], None);
    rig.driver.offer(&rig.memory, head);
    let request = rig.frontend.next(0).unwrap();
    assert!(rig.try_tell(38, &nth(1), &[]));
    assert!(!rig.try_tell(37, &nth(3), &[huge.as_fd()]));
    rig.frontend.complete(request.token, Ok(()));
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

/// Pieces that a read of 4 KiB is offered in, by [`offer_pieces`]: with header and status the longest table.
const PIECES: u64 = 1022;
/// What the unfinished requests of two queues may take of memory, and one of each that is let in at the last moment.
const MOST_BYTES: u64 = (2 << 20) + 2 * (256 << 10) + 2 * (PIECES * 16 + 512);

const TABLES: u64 = SCRATCH + 0x100000;
const PIECES_DATA: u64 = SCRATCH + 0x200000;

/// Fills the driver's queue with reads of the first eight blocks, each in very many pieces.
fn offer_pieces(rig: &mut Rig) {
    for n in (0..8).cycle().take(usize::from(rig.driver.size)) {
        let (at, table, data) = (SCRATCH + n * 32, TABLES + n * 0x4000, PIECES_DATA + n * 4096);
        rig.memory.write(at, &Rig::header(0, n * 8));
        let mut chain = vec![(at, 16, false)];
        chain.extend((0..PIECES).map(|i| (data + i * 4, if i + 1 < PIECES { 4 } else { 12 }, true)));
        chain.push((at + 16, 1, true));
        let head = rig.driver.chain(&rig.memory, &chain, Some(table));
        rig.driver.offer(&rig.memory, head);
    }
}

/// All requests that a queue gives, by as many publications as it takes.
fn take_all(rig: &mut Rig, queue: u16) -> Vec<Request> {
    let mut taken = Vec::new();
    while rig.frontend.has_work(queue) {
        taken.extend(std::iter::from_fn(|| rig.frontend.next(queue)));
        rig.frontend.publish(queue);
    }
    assert!(rig.frontend.next(queue).is_none());
    taken
}

#[test]
fn what_unfinished_requests_hold_is_bounded_and_none_is_lost() {
    let mut rig = Rig::new(256, ALL_FEATURES);
    offer_pieces(&mut rig);
    let mut taken = take_all(&mut rig, 0);
    assert!(taken.len() >= 100 && taken.len() as u64 * PIECES * 16 <= MOST_BYTES, "{} taken", taken.len());
    assert!(!rig.frontend.enable_notifications(0), "it may sleep");

    // The others have a part of their own, whatever the first one holds.
    let first = std::mem::replace(&mut rig.driver, Driver::new(256, RING_AT + 0x4000, true));
    rig.start_queue_as(1, 0);
    offer_pieces(&mut rig);
    let mut of_second = take_all(&mut rig, 1);
    assert!(!of_second.is_empty(), "one queue keeps another from being read");
    assert!((taken.len() + of_second.len()) as u64 * PIECES * 16 <= MOST_BYTES);

    // The end of any request is what brings the next.
    let (mut drivers, mut done) = ([first, rig.driver], [0, 0]);
    rig.driver = Driver::new(16, RING_AT, true);
    while let Some(request) = of_second.pop().or_else(|| taken.pop()) {
        rig.finish(&request);
        taken.extend(take_all(&mut rig, 0));
        of_second.extend(take_all(&mut rig, 1));
        assert!((taken.len() + of_second.len()) as u64 * PIECES * 16 <= MOST_BYTES);
        for (n, driver) in drivers.iter_mut().enumerate() {
            rig.frontend.publish(n as u16);
            done[n] += std::iter::from_fn(|| driver.take_used(&rig.memory))
                .map(|(_, len)| assert_eq!(len, 4097))
                .count();
        }
    }
    assert_eq!(done, [256, 256], "each once");
    assert_eq!(rig.frontend.unfinished(), 0);
    assert_eq!(rig.memory.read(PIECES_DATA, 8 * 4096), rig.disk[..8 * 4096]);
}

#[test]
fn a_queue_that_is_not_read_for_want_of_room_stops_and_goes_on_from_there() {
    for dies in [false, true] {
        let mut rig =
            if dies { Rig::relayed(256, ALL_FEATURES) } else { Rig::unconnected(256, ALL_FEATURES) };
        rig.negotiate();
        rig.add_memory();
        rig.start_queue(0);
        offer_pieces(&mut rig);
        let taken = take_all(&mut rig, 0);
        assert!(taken.len() < 256);
        if dies {
            rig.die();
        } else {
            rig.tell(11, &Rig::vring(0, 0), &[]);
            for request in &taken {
                rig.frontend.complete(request.token, Err(Errno::CANCELED));
            }
            rig.frontend.finish_stops(&mut rig.changes).unwrap();
            let (_, answer, _) = rig.vmm.reply().expect("nothing is unfinished");
            assert_eq!(answer, Rig::vring(0, taken.len() as u32), "what was not read is not taken");
            rig.start_queue(taken.len() as u16);
        }
        // What was taken comes again, then the rest, and all of it fits.
        let mut all = Vec::new();
        while rig.frontend.has_work(0) {
            let again = take_all(&mut rig, 0);
            assert!(again.len() as u64 * PIECES * 16 <= MOST_BYTES);
            again.iter().for_each(|request| rig.finish(request));
            rig.frontend.publish(0);
            all.extend(again.iter().map(|request| request.token.0 as u16));
        }
        assert!(
            taken.iter().zip(&all).all(|(request, head)| request.token.0 as u16 == *head),
            "in their order"
        );
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..256), "each once");
        assert_eq!(std::iter::from_fn(|| rig.driver.take_used(&rig.memory)).count(), 256);
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
    assert!(!rig.frontend.has_received(), "a third of a header");
    rig.vmm.send_bytes(&[1, 0, 0, 0, 0, 0, 0, 0], &[]);
    rig.frontend.on_readable(&mut rig.changes).unwrap();
    assert!(rig.frontend.has_received());
}
