//! Stopping, resetting, memory that comes and goes, and the end of a connection, with requests unfinished.

use crate::vmm::*;
use spillway_core::{Errno, GuestBuffers, Request, Token};
use spillway_export::ErrorKind;
use spillway_export::vhost_user_blk::{Change, Disconnect};
use std::os::fd::AsFd;

const DATA: u64 = SCRATCH + 4096;

/// Offers a read of one sector per number, and takes it.
fn take(rig: &mut Rig, count: u64) -> Vec<Request> {
    (0..count)
        .map(|n| {
            let header = SCRATCH + n * 32;
            rig.memory.write(header, &Rig::header(0, n));
            let buffers = [(header, 16, false), (DATA + n * 512, 512, true), (header + 16, 1, true)];
            let head = rig.driver.chain(&rig.memory, &buffers, None);
            rig.driver.offer(&rig.memory, head);
            rig.frontend.next(0).unwrap()
        })
        .collect()
}

fn base(rig: &Rig) -> Option<u16> {
    let (request, payload, _) = rig.vmm.reply()?;
    assert_eq!((request, &payload[..4]), (11, &[0; 4][..]));
    Some(u32::from_ne_bytes(payload[4..].try_into().unwrap()) as u16)
}

#[test]
fn a_stop_waits_for_what_is_unfinished() {
    let mut rig = Rig::new(16, ALL_FEATURES);
    let requests = take(&mut rig, 3);
    rig.changes.clear();
    rig.tell(11, &Rig::vring(0, 0), &[]);
    assert_eq!(rig.changes, [Change::Unkick { queue: 0 }, Change::Stop { queue: 0 }]);
    assert!(!rig.frontend.is_live(0));
    assert!(!rig.frontend.wants_read());
    // Neither the reply nor the answer to a later question comes before.
    rig.tell(1, &[], &[]);
    for (n, request) in requests.iter().enumerate() {
        assert_eq!(base(&rig), None);
        assert_eq!(rig.frontend.unfinished(), 3 - n);
        let result = rig.perform(request);
        rig.frontend.complete(request.token, result);
        rig.frontend.finish_stops(&mut rig.changes).unwrap();
    }
    assert_eq!(base(&rig), Some(3));
    assert_eq!(rig.vmm.reply().unwrap().0, 1, "then the question that waited");
    assert!(rig.frontend.wants_read());
    // All three were given back before the reply.
    for _ in 0..3 {
        let (_, len) = rig.driver.take_used(&rig.memory).unwrap();
        assert_eq!(len, 513);
    }
    assert_eq!(rig.memory.read(DATA, 1536), rig.disk[..1536]);
    // And on it goes from there.
    rig.start_queue(3);
    assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
}

#[test]
fn cancelled_requests_come_back_when_the_queue_starts_again() {
    // A paused VM whose disk is full: its parked writes must not get lost.
    for with_table in [false, true] {
        let mut rig = Rig::new(16, ALL_FEATURES);
        let mut table = None;
        if with_table {
            rig.ask(11, &Rig::vring(0, 0));
            table = Some(crate::recovery::InflightTable::create(&mut rig, 1, 16));
            table.as_ref().unwrap().give(&mut rig);
            rig.start_queue(0);
        }
        let requests = take(&mut rig, 4);
        rig.tell(11, &Rig::vring(0, 0), &[]);
        rig.frontend.complete(requests[1].token, Err(Errno::CANCELED));
        let result = rig.perform(&requests[2]);
        rig.frontend.complete(requests[2].token, result);
        rig.frontend.complete(requests[3].token, Err(Errno::CANCELED));
        rig.frontend.complete(requests[0].token, Err(Errno::CANCELED));
        rig.frontend.finish_stops(&mut rig.changes).unwrap();
        assert_eq!(base(&rig), Some(4));
        let (head, _) = rig.driver.take_used(&rig.memory).unwrap();
        assert_eq!(head, requests[2].token.0 as u16);
        assert_eq!(rig.driver.take_used(&rig.memory), None);

        rig.start_queue(4);
        assert!(rig.frontend.has_work(0), "with table: {with_table}");
        let again = rig.process();
        let sectors: Vec<u64> = again.iter().map(|r| r.sector).collect();
        assert_eq!(sectors, [0, 1, 3], "in the order in which they were taken first");
        for _ in 0..3 {
            assert!(rig.driver.take_used(&rig.memory).is_some());
        }
        assert_eq!(rig.memory.read(DATA, 2048), rig.disk[..2048]);
        drop(table);
    }
}

#[test]
fn what_a_stop_may_leave_undone_is_what_the_front_end_keeps_a_table_of() {
    for with_table in [false, true] {
        let mut rig = Rig::new(16, ALL_FEATURES);
        rig.ask(11, &Rig::vring(0, 0));
        let table = crate::recovery::InflightTable::create(&mut rig, 1, 16);
        if with_table {
            table.give(&mut rig);
        }
        rig.start_queue(0);
        let request = take(&mut rig, 1)[0];
        assert!(rig.frontend.may_abandon().is_none(), "nothing is stopped");
        rig.tell(11, &Rig::vring(0, 0), &[]);
        assert_eq!(rig.frontend.may_abandon().is_some(), with_table);
        if let Some(which) = rig.frontend.may_abandon() {
            let of_another_queue = Token(request.token.0 | 1 << 32);
            let of_another_session = Token(request.token.0 ^ 1 << 48);
            assert_eq!(
                [request.token, of_another_queue, of_another_session].map(which),
                [true, false, false]
            );
        }
        let before = rig.memory.read(GPA, 0x20000);
        rig.frontend.complete(request.token, Err(Errno::CANCELED));
        rig.frontend.finish_stops(&mut rig.changes).unwrap();
        assert_eq!(base(&rig), Some(1));
        assert_eq!(rig.perform(&request), Err(Errno::FAULT), "its buffers may be anything now");
        assert!(rig.memory.read(GPA, 0x20000) == before);

        // What a reset of the device abandons is not done again.
        rig.start_queue(1);
        let request = rig.frontend.next(0).unwrap();
        rig.tell(34, &[], &[]);
        assert!(rig.frontend.may_abandon().is_some_and(|which| which(request.token)));
    }
}

#[test]
fn a_guest_that_was_reset_gets_nothing_back() {
    // The VMM stops the queue with cancelled requests, the guest reboots, the ring starts at 0.
    let mut rig = Rig::new(16, ALL_FEATURES);
    let requests = take(&mut rig, 2);
    rig.tell(11, &Rig::vring(0, 0), &[]);
    for request in requests {
        rig.frontend.complete(request.token, Err(Errno::CANCELED));
    }
    rig.frontend.finish_stops(&mut rig.changes).unwrap();
    assert_eq!(base(&rig), Some(2));
    rig.memory.write(RING_AT, &[0; 0x1000]);
    rig.driver = Driver::new(16, RING_AT, true);
    rig.start_queue(0);
    assert!(!rig.frontend.has_work(0));
    assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
}

#[test]
fn a_queue_that_never_started_stops_too() {
    let mut rig = Rig::unconnected(16, ALL_FEATURES);
    rig.negotiate();
    rig.tell(10, &Rig::vring(0, 77), &[]);
    rig.tell(11, &Rig::vring(0, 0), &[]);
    assert_eq!(base(&rig), Some(77));
}

#[test]
fn reset_device_waits_and_touches_guest_memory_no_more() {
    for acknowledge in [false, true] {
        let mut rig = Rig::new(16, ALL_FEATURES);
        let mut writeback: Vec<u8> = [32u32, 1, 0].iter().flat_map(|n| n.to_ne_bytes()).collect();
        writeback.push(0);
        assert!(rig.try_tell(25, &writeback, &[]));
        let error = event();
        rig.tell(14, &0u64.to_ne_bytes(), &[error.as_fd()]);
        let requests = take(&mut rig, 2);
        let before = rig.memory.read(GPA, 0x20000);
        rig.changes.clear();
        rig.vmm.send_bytes(&Vmm::message(34, if acknowledge { 9 } else { 1 }, &[]), &[]);
        rig.frontend.on_readable(&mut rig.changes).unwrap();
        assert!(rig.changes.contains(&Change::Stop { queue: 0 }));
        assert!(rig.changes.contains(&Change::Unkick { queue: 0 }));
        assert!(rig.vmm.reply().is_none());
        for request in &requests {
            assert_eq!(rig.perform(request), Err(Errno::FAULT));
            rig.frontend.complete(request.token, Ok(()));
            rig.frontend.publish(0);
        }
        rig.frontend.finish_stops(&mut rig.changes).unwrap();
        assert_eq!(rig.vmm.reply().is_some(), acknowledge);
        assert!(rig.memory.read(GPA, 0x20000) == before, "guest memory was written after a reset");
        assert!(!rig.frontend.writeback(), "the front end has a copy and does not say it again");
        // It starts again like new.
        rig.memory.write(RING_AT, &[0; 0x1000]);
        rig.driver = Driver::new(16, RING_AT, true);
        let features = rig.features.to_ne_bytes();
        rig.tell(2, &features, &[]);
        rig.start_queue(0);
        assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
        // The eventfd for errors came once.
        rig.driver.offer(&rig.memory, 16);
        rig.process();
        assert_eq!(drain(&error), 1);
    }
}

#[test]
fn memory_stays_mapped_while_requests_point_into_it() {
    let mut rig = Rig::new(16, ALL_FEATURES);
    let other = GuestMemory::new(1 << 20, 0x1000, 0x1000);
    let mut region = vec![0; 8];
    region.extend_from_slice(&other.region());
    let fd = other.fd.try_clone().unwrap();
    assert!(rig.try_tell(37, &region, &[fd.as_fd()]));
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
    let inode = rustix::fs::fstat(&other.fd).unwrap().st_ino.to_string();
    let mappings = || maps().lines().filter(|line| line.contains(&format!(" {inode} "))).count();
    assert_eq!(mappings(), 2, "the driver's and ours");

    rig.memory.write(SCRATCH, &Rig::header(0, 5));
    let buffers = [(SCRATCH, 16, false), (other.gpa, 512, true), (SCRATCH + 16, 1, true)];
    let head = rig.driver.chain(&rig.memory, &buffers, None);
    rig.driver.offer(&rig.memory, head);
    let request = rig.frontend.next(0).unwrap();
    // With one descriptor, as some front ends send it.
    assert!(rig.try_tell(38, &region, &[fd.as_fd()]));
    assert_eq!(mappings(), 2, "a request still points there");
    // A request of the time after does not keep it.
    let later = take(&mut rig, 1);
    rig.perform(&request).unwrap();
    rig.frontend.complete(request.token, Ok(()));
    assert_eq!(mappings(), 1);
    assert_eq!(other.read(other.gpa, 512), rig.disk[5 * 512..6 * 512]);
    rig.perform(&later[0]).unwrap();
    rig.frontend.complete(later[0].token, Ok(()));
    rig.frontend.publish(0);
    // It is gone for new requests.
    assert!(rig.driver.take_used(&rig.memory).is_some());
    assert!(rig.driver.take_used(&rig.memory).is_some());
    assert_eq!(rig.simple(0, 0, Some((other.gpa, 512, true))), Some((1, 0)));
}

#[test]
fn a_region_that_goes_takes_the_status_first() {
    let mut rig = Rig::new(16, ALL_FEATURES);
    let other = GuestMemory::new(4096, 0x1000, 0x1000);
    let mut region = vec![0; 8];
    region.extend_from_slice(&other.region());
    let fd = other.fd.try_clone().unwrap();
    assert!(rig.try_tell(37, &region, &[fd.as_fd()]));
    rig.memory.write(SCRATCH, &Rig::header(0, 5));
    let buffers = [(SCRATCH, 16, false), (DATA, 512, true), (other.gpa, 1, true)];
    let head = rig.driver.chain(&rig.memory, &buffers, None);
    rig.driver.offer(&rig.memory, head);
    let request = rig.frontend.next(0).unwrap();
    assert!(rig.try_tell(38, &region, &[]));
    other.write(other.gpa, &[0xee]);
    rig.perform(&request).unwrap();
    // The region goes with this request, and not before its status has been written.
    rig.frontend.complete(request.token, Ok(()));
    rig.frontend.publish(0);
    assert_eq!(other.read(other.gpa, 1), [0]);
    assert_eq!(rig.driver.take_used(&rig.memory), Some((head, 513)));
}

#[test]
fn memory_that_changes_too_often_is_refused() {
    let mut rig = Rig::new(16, ALL_FEATURES);
    let requests = take(&mut rig, 1);
    let other = GuestMemory::new(4096, 0x1000, 0x1000);
    let mut region = vec![0; 8];
    region.extend_from_slice(&other.region());
    let fd = other.fd.try_clone().unwrap();
    let mut rounds = 0;
    while rig.try_tell(37, &region, &[fd.as_fd()]) && rig.try_tell(38, &region, &[]) {
        rounds += 1;
        assert!(rounds < 1000, "mappings pile up without bound");
    }
    assert!(rounds >= 16);
    assert!(rig.frontend.take_notice().unwrap().reason.contains("too often"));
    rig.perform(&requests[0]).unwrap();
    rig.frontend.complete(requests[0].token, Ok(()));
    assert!(rig.try_tell(38, &region, &[]), "with nothing unfinished it works again");
}

#[test]
fn a_ring_whose_memory_goes_is_not_touched() {
    let mut rig = Rig::new(16, ALL_FEATURES);
    let requests = take(&mut rig, 2);
    let mut region = vec![0; 8];
    region.extend_from_slice(&rig.memory.region());
    assert!(rig.try_tell(38, &region, &[]));
    assert!(!rig.frontend.is_live(0));
    assert!(!rig.frontend.has_work(0));
    assert_eq!(rig.frontend.take_notice().unwrap().kind, ErrorKind::NoMemoryRegion);
    let before = rig.memory.read(GPA, 0x1000);
    rig.frontend.complete(requests[1].token, Ok(()));
    rig.frontend.complete(requests[0].token, Err(Errno::IO));
    rig.frontend.publish(0);
    assert!(rig.memory.read(GPA, 0x1000) == before);
    // It comes back with its memory, and what could not be answered is done anew.
    rig.add_memory();
    assert!(rig.frontend.is_live(0) && rig.frontend.has_work(0));
    assert_eq!(rig.process().iter().map(|r| r.sector).collect::<Vec<_>>(), [1, 0]);
    for n in [1, 0] {
        assert_eq!(rig.driver.take_used(&rig.memory), Some((requests[n].token.0 as u16, 513)));
    }
    assert_eq!(rig.memory.read(DATA, 1024), rig.disk[..1024]);
    // And after that the next one.
    rig.driver.free = (6..16).collect();
    assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
}

#[test]
fn after_a_disconnect_of_ours_guest_memory_is_not_touched() {
    let mut rig = Rig::new(16, ALL_FEATURES);
    let requests = take(&mut rig, 2);
    rig.frontend.complete(requests[0].token, Ok(()));
    rig.frontend.disconnect();
    let before = rig.memory.read(GPA, 0x20000);
    rig.frontend.publish(0);
    assert!(!rig.frontend.is_live(0) && !rig.frontend.wants_read());
    assert_eq!(rig.frontend.on_readable(&mut rig.changes), Err(Disconnect::Left));
    assert_eq!(rig.perform(&requests[1]), Err(Errno::FAULT));
    rig.frontend.complete(requests[1].token, Ok(()));
    rig.frontend.publish(0);
    assert_eq!(rig.frontend.unfinished(), 0);
    assert!(rig.memory.read(GPA, 0x20000) == before);
}

#[test]
fn after_a_disconnect_guest_memory_is_not_touched() {
    let mut rig = Rig::new(16, ALL_FEATURES);
    let requests = take(&mut rig, 3);
    rig.frontend.complete(requests[0].token, Ok(()));
    let before = rig.memory.read(GPA, 0x20000);
    drop(std::mem::replace(&mut rig.vmm, Vmm::pair().0));
    assert_eq!(rig.frontend.on_readable(&mut rig.changes), Err(Disconnect::Left));
    assert!(!rig.frontend.is_live(0));
    assert_eq!(rig.frontend.unfinished(), 2);
    assert_eq!(rig.perform(&requests[1]), Err(Errno::FAULT));
    rig.frontend.complete(requests[1].token, Ok(()));
    rig.frontend.complete(requests[2].token, Err(Errno::CANCELED));
    rig.frontend.publish(0);
    assert_eq!(rig.frontend.unfinished(), 0);
    assert_eq!(rig.frontend.finish_stops(&mut rig.changes), Ok(()));
    assert!(rig.memory.read(GPA, 0x20000) == before);
}

#[test]
fn a_disconnect_during_a_stop_ends_the_wait() {
    let mut rig = Rig::new(16, ALL_FEATURES);
    let requests = take(&mut rig, 1);
    rig.tell(11, &Rig::vring(0, 0), &[]);
    drop(std::mem::replace(&mut rig.vmm, Vmm::pair().0));
    rig.frontend.complete(requests[0].token, Ok(()));
    assert_eq!(rig.frontend.finish_stops(&mut rig.changes), Err(Disconnect::Left));
}

#[test]
fn dropping_closes_everything() {
    let inode = |fd: &std::os::fd::OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino.to_string();
    let rig = Rig::new(16, ALL_FEATURES);
    let Rig { memory, frontend, vmm, driver, .. } = rig;
    let mappings = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains(&format!(" {} ", inode(&memory.fd)))).count()
    };
    assert_eq!(mappings(), 2);
    drop(frontend);
    assert_eq!(mappings(), 1);
    assert!(wait(&vmm.socket, 5), "the socket's other end is closed");
    assert_eq!(drain(&driver.kick), 0);
}
