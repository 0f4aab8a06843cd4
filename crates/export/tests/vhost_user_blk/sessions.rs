//! What a connection keeps when another device comes on it, as when a disk is unplugged from a running QEMU and plugged in
//! again on the same character device: SET_OWNER comes anew.

use crate::vmm::*;
use spillway_core::{Errno, GuestBuffers, Operation};
use spillway_export::ErrorKind;
use std::os::fd::AsFd;

/// Stops a queue as a VMM does; where it stood.
fn stop(rig: &mut Rig, index: u32) -> u32 {
    let answer = rig.ask(11, &Rig::vring(index, 0));
    u32::from_ne_bytes(answer[4..].try_into().unwrap())
}

/// The front end of another device: first what QEMU says before SET_OWNER, then that.
fn another_device(rig: &mut Rig) {
    rig.ask(1, &[]);
    let offered = rig.ask(15, &[]);
    rig.tell(16, &offered, &[]);
    rig.ask(17, &[]);
    rig.ask(36, &[]);
    rig.tell(3, &[], &[]);
}

fn write(rig: &mut Rig) -> Operation {
    rig.memory.write(SCRATCH, &Rig::header(1, 0));
    let free = rig.driver.free.clone();
    let buffers = [(SCRATCH, 16, false), (SCRATCH + 4096, 512, false), (SCRATCH + 16, 1, true)];
    let head = rig.driver.chain(&rig.memory, &buffers, None);
    rig.driver.offer(&rig.memory, head);
    rig.driver.free = free;
    rig.process()[0].operation
}

fn inflight(rig: &mut Rig) -> std::os::fd::OwnedFd {
    let wanted: Vec<u8> = [&[0; 16][..], &1u16.to_ne_bytes(), &8u16.to_ne_bytes(), &[0; 4]].concat();
    rig.tell(31, &wanted, &[]);
    let (_, described, mut fds) = rig.vmm.reply().unwrap();
    let fd = fds.pop().unwrap();
    rig.tell(32, &described, &[fd.as_fd()]);
    fd
}

fn each(mut test: impl FnMut(Rig)) {
    // Served by the process that has the socket, and by processes each of which hears of one message.
    for relayed in [false, true] {
        test(if relayed { Rig::relayed(8, ALL_FEATURES) } else { Rig::unconnected(8, ALL_FEATURES) });
    }
}

#[test]
fn another_device_has_nothing_of_the_last_one_s() {
    each(|mut rig| {
        rig.negotiate();
        rig.add_memory();
        let table = inflight(&mut rig);
        rig.start_queue(0);
        // The first device's driver wants its writes through, and leaves two requests in flight.
        let payload = [32u32, 1, 0].map(u32::to_ne_bytes).concat();
        rig.tell(25, &[&payload[..], &[0]].concat(), &[]);
        assert_eq!(write(&mut rig), Operation::Write { fua: true });
        assert!(rig.driver.take_used(&rig.memory).is_some());
        assert_eq!(stop(&mut rig, 0), 1);
        drop(table);

        another_device(&mut rig);
        // Its memory lies where that of the last one was, and there is no overlap.
        let mut region = vec![0; 8];
        region.extend_from_slice(&rig.memory.region());
        let fd = rig.memory.fd.try_clone().unwrap();
        assert!(rig.try_tell(37, &region, &[fd.as_fd()]), "{:?}", rig.frontend.take_notice());
        assert!(rig.frontend.writeback(), "the choice was the other driver's");

        // A kick does not bring the old ring to life.
        let kick = rig.driver.kick.try_clone().unwrap();
        rig.tell(12, &0u64.to_ne_bytes(), &[kick.as_fd()]);
        assert!(!rig.frontend.is_live(0));
        assert_eq!(rig.frontend.take_notice().unwrap().kind, ErrorKind::WrongState);
        assert_eq!(stop(&mut rig, 0), 0, "nor is the last one's base");

        // Features are not acknowledged, and rings not enabled, before they are again.
        rig.memory.write(RING_AT, &[0; 0x1000]);
        rig.driver = Driver::new(8, RING_AT, false);
        rig.features = PROTOCOL_FEATURES | VERSION_1;
        let features = rig.features.to_ne_bytes();
        rig.tell(2, &features, &[]);
        rig.tell(8, &Rig::vring(0, 8), &[]);
        rig.tell(10, &Rig::vring(0, 0), &[]);
        let addresses = rig.vring_address(0);
        rig.tell(9, &addresses, &[]);
        rig.tell(12, &0u64.to_ne_bytes(), &[kick.as_fd()]);
        assert!(!rig.frontend.is_live(0), "the last device's queue was enabled, this one is not");
        rig.tell(18, &Rig::vring(0, 1), &[]);
        assert!(rig.frontend.is_live(0), "{:?}", rig.frontend.take_notice());
        assert_eq!(write(&mut rig), Operation::Write { fua: true }, "no FLUSH, so it writes through");
        assert_eq!(rig.driver.take_used(&rig.memory).map(|(_, len)| len), Some(1));
    });
}

#[test]
fn what_the_last_device_left_in_flight_is_not_done_on_another() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    stop(&mut rig, 0);
    let _table = inflight(&mut rig);
    rig.start_queue(0);
    let heads = [rig.offer(0), rig.offer(1)];
    let taken = heads.map(|_| rig.frontend.next(0).unwrap());
    rig.tell(11, &Rig::vring(0, 0), &[]);
    taken.iter().for_each(|request| rig.frontend.complete(request.token, Err(Errno::CANCELED)));
    rig.frontend.finish_stops(&mut rig.changes).unwrap();
    assert!(rig.vmm.reply().is_some());
    // Started again for the same device they would come again; another one lends no table.
    another_device(&mut rig);
    rig.memory.write(RING_AT, &[0; 0x1000]);
    rig.driver = Driver::new(8, RING_AT, true);
    let features = ALL_FEATURES.to_ne_bytes();
    rig.tell(2, &features, &[]);
    rig.add_memory();
    rig.start_queue(0);
    assert!(rig.frontend.is_live(0), "{:?}", rig.frontend.take_notice());
    assert!(!rig.frontend.has_work(0), "its ring is empty");
    assert_eq!(rig.simple(0, 3, Some((READ_DATA, 512, true))), Some((0, 513)));
}

#[test]
fn set_owner_changes_nothing_while_a_queue_is_kicked_nor_the_first_time() {
    each(|mut rig| {
        // The first one may come late.
        let features = ALL_FEATURES.to_ne_bytes();
        rig.tell(2, &features, &[]);
        rig.add_memory();
        rig.start_queue(0);
        for _ in 0..3 {
            rig.tell(3, &[], &[]);
            assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
        }
        assert_eq!(write(&mut rig), Operation::Write { fua: false });
    });
}

#[test]
fn another_process_knows_of_the_first_device() {
    let mut rig = Rig::relayed(8, ALL_FEATURES);
    rig.negotiate();
    rig.add_memory();
    rig.start_queue(0);
    assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
    stop(&mut rig, 0);
    rig.die();
    another_device(&mut rig);
    rig.die();
    rig.memory.write(RING_AT, &[0; 0x1000]);
    rig.driver = Driver::new(8, RING_AT, true);
    let features = ALL_FEATURES.to_ne_bytes();
    rig.tell(2, &features, &[]);
    rig.add_memory();
    rig.start_queue(0);
    rig.die();
    assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
}
