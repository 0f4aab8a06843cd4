//! Control messages: good, odd, broken and hostile ones.

use crate::vmm::*;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::pipe::pipe;
use spillway_core::Operation;
use spillway_export::ErrorKind;
use spillway_export::vhost_user_blk::{Change, Connection, Disconnect, Frontend};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

fn u64_of(payload: &[u8]) -> u64 {
    u64::from_ne_bytes(payload.try_into().unwrap())
}

/// How often this process, with all that its threads do, has this file open.
fn times_open(file: &OwnedFd) -> usize {
    let which = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let wanted = which(rustix::fs::fstat(file).unwrap());
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    // Other threads close theirs meanwhile.
    all.flatten().filter(|fd| rustix::fs::stat(fd.path()).is_ok_and(|stat| which(stat) == wanted)).count()
}

/// Shared memory of its own.
fn some_memory() -> OwnedFd {
    let fd = memfd_create("some", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 1 << 20).unwrap();
    fd
}

#[test]
fn offers_what_the_drivers_need() {
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    let features = u64_of(&rig.ask(1, &[]));
    for bit in [2, 6, 9, 10, 11, 12, 13, 14, 28, 29, 30, 32] {
        assert!(features & 1 << bit != 0, "feature {bit}");
    }
    // SIZE_MAX, with which FreeBSD refuses a disk, RO, SCSI, LOG_ALL (live migration), packed rings.
    for bit in [1, 5, 7, 26, 34] {
        assert!(features & 1 << bit == 0, "feature {bit}");
    }
    let protocol = u64_of(&rig.ask(15, &[]));
    assert_eq!(protocol, 1 << 0 | 1 << 3 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15);
    assert_eq!(u64_of(&rig.ask(17, &[])), 16);
    assert!(u64_of(&rig.ask(36, &[])) >= 32);
}

#[test]
fn config_space_5_2_4_at_odd_offsets_and_sizes() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    let mut get = |offset: u32, size: u32, with_room: bool| {
        let mut payload: Vec<u8> = [offset, size, 0].iter().flat_map(|n| n.to_ne_bytes()).collect();
        if with_room {
            payload.resize(12 + size.min(256) as usize, 0xaa);
        }
        rig.ask(24, &payload)
    };
    let whole = get(0, 60, true);
    assert_eq!(whole.len(), 72);
    assert_eq!(whole[12..20], (DISK_BYTES / 512).to_le_bytes());
    assert_eq!(whole[12 + 8..12 + 12], [0; 4], "size_max, of which nothing is said");
    assert_eq!(whole[12 + 12..12 + 16], 126u32.to_le_bytes(), "seg_max");
    assert_eq!(whole[12 + 20..12 + 24], 512u32.to_le_bytes(), "blk_size");
    assert_eq!(whole[12 + 24], 3, "physical_block_exp");
    assert_eq!(whole[12 + 32], 1, "writeback");
    assert_eq!(whole[12 + 34..12 + 36], 16u16.to_le_bytes(), "num_queues");
    assert_eq!(whole[12 + 40..12 + 44], 1u32.to_le_bytes(), "max_discard_seg");
    for (offset, size) in [(0, 1), (3, 7), (32, 1), (59, 1), (0, 256), (57, 100), (256, 0), (200, 56)] {
        for with_room in [false, true] {
            let part = get(offset, size, with_room);
            assert_eq!(part.len(), 12 + size as usize, "{offset} {size}");
            for (at, &byte) in part[12..].iter().enumerate() {
                let at = offset as usize + at;
                assert_eq!(byte, if at < 60 { whole[12 + at] } else { 0 }, "byte {at}");
            }
        }
    }
    for (offset, size) in [(0, 257), (1, u32::MAX)] {
        assert_eq!(get(offset, size, false), [], "{offset} {size} is an error");
    }
    // As Cloud Hypervisor up to v50 asks: from where virtio-mmio has the configuration.
    for (offset, size) in [(0x100, 60), (0x100, 256), (0x103, 7), (0x120, 1)] {
        let part = get(offset, size, true);
        assert_eq!(part[..8], [offset, size].map(u32::to_ne_bytes).concat(), "what was asked for");
        let same = get(offset - 0x100, size, true);
        assert!(part[12..] == same[12..], "{offset:#x} {size}");
    }
    for offset in [61, 255, 0x13c, 0x1ff, 0x200, 0x1000, u32::MAX - 1, u32::MAX] {
        assert!(get(offset, 16, true)[12..] == [0; 16], "{offset:#x}");
    }
}

#[test]
fn writeback_5_2_6_2_decides_whether_writes_are_forced() {
    let write = |rig: &mut Rig| {
        rig.memory.write(SCRATCH, &Rig::header(1, 0));
        let buffers = [(SCRATCH, 16, false), (SCRATCH + 512, 512, false), (SCRATCH + 16, 1, true)];
        let head = rig.driver.chain(&rig.memory, &buffers, None);
        rig.driver.offer(&rig.memory, head);
        rig.process()[0].operation
    };
    let set_as = |rig: &mut Rig, offset: u32, bytes: &[u8], flags: u32| {
        let mut payload: Vec<u8> =
            [offset, bytes.len() as u32, flags].iter().flat_map(|n| n.to_ne_bytes()).collect();
        payload.extend_from_slice(bytes);
        rig.try_tell(25, &payload, &[])
    };
    let set = |rig: &mut Rig, offset, bytes: &[u8]| set_as(rig, offset, bytes, 0);
    let mut rig = Rig::new(64, ALL_FEATURES);
    assert_eq!(write(&mut rig), Operation::Write { fua: false });
    assert!(set(&mut rig, 32, &[0]));
    assert!(!rig.frontend.writeback());
    assert_eq!(write(&mut rig), Operation::Write { fua: true });
    assert!(set(&mut rig, 32, &[1]));
    assert_eq!(write(&mut rig), Operation::Write { fua: false });
    // Nothing else may be written.
    assert!(!set(&mut rig, 32, &[2]));
    assert!(!set(&mut rig, 0, &[0]));
    assert!(!set(&mut rig, 32, &[0, 0]));
    // Nor for a reason that does not exist.
    assert!(!set_as(&mut rig, 32, &[0], 2));
    assert_eq!(write(&mut rig), Operation::Write { fua: false });
    // Cloud Hypervisor says 1 for what its guest has written, and in its time counted from 0x100.
    assert!(set_as(&mut rig, 32, &[0], 1));
    assert_eq!(write(&mut rig), Operation::Write { fua: true });
    assert!(set_as(&mut rig, 0x120, &[1], 1));
    assert_eq!(write(&mut rig), Operation::Write { fua: false });

    let mut rig = Rig::new(64, ALL_FEATURES & !FLUSH & !CONFIG_WCE);
    assert_eq!(write(&mut rig), Operation::Write { fua: true }, "a driver that cannot flush");
}

#[test]
fn a_message_may_arrive_byte_by_byte() {
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    let fd = rig.memory.fd.try_clone().unwrap();
    rig.negotiate();
    let mut payload = vec![0; 8];
    payload.extend_from_slice(&rig.memory.region());
    let message = Vmm::message(37, 1 | 8, &payload);
    for (at, byte) in message.iter().enumerate() {
        assert!(rig.vmm.reply().is_none());
        let fds: &[_] = if at == 0 { &[fd.as_fd()] } else { &[] };
        rig.vmm.send_bytes(&[*byte], fds);
        rig.frontend.on_readable(&mut rig.changes).unwrap();
    }
    assert_eq!(u64_of(&rig.vmm.reply().unwrap().1), 0);
    rig.start_queue(0);
    assert!(rig.frontend.is_live(0));
}

#[test]
fn many_messages_at_once_keep_their_descriptors() {
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    rig.negotiate();
    rig.add_memory();
    // All of a queue's set-up in one go, unread until the end.
    let (kick, call) = (rig.driver.kick.try_clone().unwrap(), rig.driver.call.try_clone().unwrap());
    let addresses = rig.vring_address(0);
    rig.vmm.send(8, &Rig::vring(0, 8), &[]);
    rig.vmm.send(10, &Rig::vring(0, 0), &[]);
    rig.vmm.send(9, &addresses, &[]);
    rig.vmm.send(12, &0u64.to_ne_bytes(), &[kick.as_fd()]);
    rig.vmm.send(13, &0u64.to_ne_bytes(), &[call.as_fd()]);
    rig.vmm.send(18, &Rig::vring(0, 1), &[]);
    rig.vmm.send(1, &[], &[]);
    rig.frontend.on_readable(&mut rig.changes).unwrap();
    assert_eq!(rig.vmm.reply().unwrap().0, 1);
    assert!(rig.frontend.is_live(0));
    let Some(Change::Kick { fd, .. }) = rig.changes.iter().find(|c| matches!(c, Change::Kick { .. })) else {
        panic!("{:?}", rig.changes)
    };
    // It is the driver's kick, not its call.
    rig.driver.kick();
    // SAFETY: the frontend holds it open.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(*fd) };
    assert_eq!(drain(fd), 1);
    drain(&rig.driver.call);
    assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
    assert_eq!(drain(&rig.driver.call), 1);
}

#[test]
fn kicks_are_watched_polled_and_released() {
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    rig.negotiate();
    rig.add_memory();
    rig.start_queue(0);
    assert!(matches!(rig.changes[..], [Change::Kick { queue: 0, .. }]), "{:?}", rig.changes);
    rig.changes.clear();
    let kick = event();
    rig.tell(12, &0u64.to_ne_bytes(), &[kick.as_fd()]);
    assert!(matches!(rig.changes[..], [Change::Unkick { queue: 0 }, Change::Kick { queue: 0, .. }]));
    rig.changes.clear();
    // Bit 8: no descriptor, so poll.
    rig.tell(12, &(1u64 << 8).to_ne_bytes(), &[]);
    assert_eq!(rig.changes, [Change::Unkick { queue: 0 }, Change::Poll { queue: 0 }]);
    rig.tell(18, &Rig::vring(0, 0), &[]);
    assert!(!rig.frontend.is_live(0));
    assert!(rig.frontend.next(0).is_none());
}

#[test]
fn without_protocol_features_rings_start_enabled() {
    let rig = Rig::new(8, ALL_FEATURES & !PROTOCOL_FEATURES);
    assert!(rig.frontend.is_live(0));
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    rig.negotiate();
    rig.add_memory();
    rig.tell(8, &Rig::vring(0, 8), &[]);
    let addresses = rig.vring_address(0);
    rig.tell(9, &addresses, &[]);
    let kick = rig.driver.kick.try_clone().unwrap();
    rig.tell(12, &0u64.to_ne_bytes(), &[kick.as_fd()]);
    assert!(!rig.frontend.is_live(0), "with protocol features SET_VRING_ENABLE has to come");
}

#[test]
fn memory_that_comes_last_starts_the_queue() {
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    rig.negotiate();
    rig.start_queue(0);
    assert!(!rig.frontend.is_live(0));
    assert_eq!(rig.frontend.take_notice().unwrap().kind, ErrorKind::NotShared);
    rig.add_memory();
    assert!(rig.frontend.is_live(0));
}

#[test]
fn memory_that_is_not_shared_is_told_as_such_once() {
    let names_remedy = |notice: &str| {
        ["not shared", "share=on", "<access mode='shared'/>", "shared=on"].iter().all(|w| notice.contains(w))
    };
    // QEMU without a memory backend: it hands over nothing.
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    rig.negotiate();
    for queue in 0..4 {
        rig.start_queue_as(queue, 0);
    }
    let notice = rig.frontend.take_notice().unwrap().to_string();
    assert!(names_remedy(&notice) && notice.contains("no memory"), "{notice}");
    assert_eq!(rig.frontend.take_notice(), None, "once for all queues");

    // With share=off: it hands over a file of which it has a private copy, so that the rings stay empty for us. QEMU
    // raises a kick itself when it starts a queue.
    let mut rig = Rig::new(8, ALL_FEATURES);
    rig.driver.kick();
    assert!(!rig.frontend.kicked(0) && rig.process().is_empty());
    rig.driver.kick();
    assert!(rig.frontend.kicked(0));
    let notice = rig.frontend.take_notice().unwrap().to_string();
    assert!(names_remedy(&notice) && notice.contains("empty"), "{notice}");
    rig.driver.kick();
    rig.driver.kick();
    assert!(rig.frontend.kicked(0), "it stays so");
    assert_eq!(rig.frontend.take_notice(), None, "once");

    // Some of it is shared: where the rings are is not.
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    rig.negotiate();
    rig.driver.user_offset = rig.driver.user_offset.wrapping_add(MEMORY_BYTES);
    rig.add_memory();
    rig.start_queue(0);
    let notice = rig.frontend.take_notice().unwrap().to_string();
    assert!(notice.contains("memory region") && notice.contains("shared?"), "{notice}");
}

#[test]
fn kicks_of_a_ring_that_is_in_use_say_nothing_of_memory() {
    for first_kick_waits in [false, true] {
        let mut rig = Rig::new(8, ALL_FEATURES);
        for _ in 0..5 {
            rig.driver.kick();
        }
        if first_kick_waits {
            rig.offer(0);
        } else {
            assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
        }
        assert!(!rig.frontend.kicked(0), "its first request is there");
        // Another queue that the VMM has kicked by itself.
        rig.driver = Driver::new(8, RING_AT + 0x4000, true);
        rig.start_queue_as(1, 0);
        rig.driver.kick();
        rig.driver.kick();
        assert!(!rig.frontend.kicked(1) && !rig.frontend.kicked(99));
        assert_eq!(rig.frontend.take_notice(), None);
    }
}

#[test]
fn wrong_messages_are_refused_and_harm_nothing() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    let (other, kick) = (some_memory(), event());
    let table = |count: u32, regions: usize| {
        let mut payload = count.to_ne_bytes().to_vec();
        payload.extend_from_slice(&[0; 4]);
        payload.resize(8 + 32 * regions, 0);
        payload
    };
    let mut region = vec![0; 8];
    region.extend_from_slice(&rig.memory.region());
    let with = |field: usize, value: u64| {
        let mut changed = region.clone();
        changed[8 + 8 * field..16 + 8 * field].copy_from_slice(&value.to_ne_bytes());
        changed
    };
    let memory = rig.memory.fd.try_clone().unwrap();
    let good: &[_] = &[memory.as_fd()];
    let no_event: &[_] = &[other.as_fd()];
    let no_memory: &[_] = &[kick.as_fd()];
    let both = [memory.as_fd(), other.as_fd()];
    let two: &[_] = &both;
    let none: &[_] = &[];
    let inflight = |size: u64, queues: u16, entries: u16| {
        let mut payload = size.to_ne_bytes().to_vec();
        payload.extend_from_slice(&0u64.to_ne_bytes());
        payload.extend_from_slice(&queues.to_ne_bytes());
        payload.extend_from_slice(&entries.to_ne_bytes());
        payload.resize(24, 0);
        payload
    };
    let mut beyond = inflight(4096, 1, 8);
    beyond[8..16].copy_from_slice(&(MEMORY_BYTES - 64).to_ne_bytes());
    let cases: Vec<(&str, u32, Vec<u8>, &[_])> = vec![
        ("an unknown message", 99, vec![], none),
        ("SET_STATUS, not negotiated", 39, vec![0; 8], none),
        ("features that were not offered", 2, (1u64 << 26 | ALL_FEATURES).to_ne_bytes().to_vec(), none),
        ("protocol features that were not offered", 16, (1u64 << 14).to_ne_bytes().to_vec(), none),
        ("a short payload", 2, vec![0; 7], none),
        ("a long payload", 2, vec![0; 9], none),
        ("an address message too short", 9, vec![0; 39], none),
        ("a queue beyond the last", 8, Rig::vring(16, 8), none),
        ("a queue far beyond", 18, Rig::vring(u32::MAX, 1), none),
        ("a size while started", 8, Rig::vring(0, 8), none),
        ("no power of two", 8, Rig::vring(1, 12), none),
        ("size 0", 8, Rig::vring(1, 0), none),
        ("size 2048", 8, Rig::vring(1, 2048), none),
        ("size 65536", 8, Rig::vring(1, 65536), none),
        ("a base of more than 16 bits", 10, Rig::vring(1, 65536), none),
        ("enable 2", 18, Rig::vring(1, 2), none),
        ("a kick without descriptor", 12, 1u64.to_ne_bytes().to_vec(), none),
        ("a kick that is memory", 12, 1u64.to_ne_bytes().to_vec(), no_event),
        ("a call that is memory", 13, 1u64.to_ne_bytes().to_vec(), no_event),
        ("a kick for queue 255", 12, 255u64.to_ne_bytes().to_vec(), none),
        ("two descriptors for one region", 37, with(0, 0), two),
        ("a region without descriptor", 37, with(0, 0), none),
        ("a region that overlaps", 37, region.clone(), good),
        ("a region at the same user address", 37, with(0, 0), good),
        ("an empty region", 37, with(1, 0), good),
        ("a region larger than its file", 37, with(3, 4096), good),
        ("an offset that wraps", 37, with(3, u64::MAX - 4095), good),
        ("a guest address that wraps", 37, with(0, u64::MAX - 4095), good),
        ("a user address that wraps", 37, with(2, u64::MAX - 4095), good),
        ("memory that is an eventfd", 37, with(0, 0), no_memory),
        ("removal of what is not there", 38, with(0, 0), none),
        ("9 regions", 5, table(9, 9), none),
        ("fewer regions than announced", 5, table(2, 1), good),
        ("a table with too few descriptors", 5, table(2, 2), good),
        ("a table without count", 5, vec![0; 7], none),
        ("an in-flight table without descriptor", 32, inflight(4096, 1, 8), none),
        ("an in-flight table that is too small", 32, inflight(64, 1, 8), good),
        ("an in-flight table for 17 queues", 32, inflight(1 << 20, 17, 8), good),
        ("an in-flight table beyond its file", 32, beyond, good),
        ("an in-flight table that is an eventfd", 32, inflight(4096, 1, 8), no_memory),
        ("a short in-flight description", 32, vec![0; 16], good),
    ];
    for (what, request, payload, fds) in cases {
        assert!(!rig.try_tell(request, &payload, fds), "{what} was accepted");
        assert!(rig.frontend.take_notice().is_some(), "{what}");
        assert!(rig.frontend.is_live(0), "{what}");
        assert_eq!(rig.simple(4, 0, None), Some((0, 1)), "{what}");
    }
    assert_eq!(times_open(&other), 1, "a descriptor of a refused message is still open");
}

#[test]
fn what_cannot_be_acknowledged_ends_the_connection() {
    // Without need_reply there is no other way to say no.
    let mut rig = Rig::new(8, ALL_FEATURES);
    rig.vmm.send(99, &[], &[]);
    let error = fault(rig.frontend.on_readable(&mut rig.changes));
    assert_eq!((error.kind, error.context.message), (ErrorKind::UnknownMessage, Some(99)));
    assert!(!rig.frontend.is_live(0));
    assert_eq!(fault(rig.frontend.on_readable(&mut rig.changes)), error, "it keeps saying so");
    // A question has a reply of its own, which no acknowledgement can stand in for.
    let mut rig = Rig::new(8, ALL_FEATURES);
    rig.vmm.send_bytes(&Vmm::message(11, 1 | 8, &Rig::vring(77, 0)), &[]);
    let error = fault(rig.frontend.on_readable(&mut rig.changes));
    let context = error.context;
    assert_eq!((error.kind, context.message, context.queue), (ErrorKind::OutOfBounds, Some(11), Some(77)));
    assert_eq!(
        error.to_string(),
        "GET_VRING_BASE, queue 77: the device has no such queue: 77, at most 15 is allowed"
    );
}

#[test]
fn broken_framing_ends_the_connection() {
    let header = |request: u32, flags: u32, size: u32| {
        [request, flags, size].iter().flat_map(|n| n.to_ne_bytes()).collect::<Vec<u8>>()
    };
    for (what, bytes, expected) in [
        ("version 0", header(1, 0, 0), "version"),
        ("version 2", header(1, 2, 0), "version"),
        ("a reply", header(1, 1 | 4, 0), "reply"),
        ("513 bytes", header(2, 1, 513), "513"),
        ("4 GiB", header(2, 1, u32::MAX), "announces"),
    ] {
        let mut rig = Rig::unconnected(8, ALL_FEATURES);
        rig.vmm.send_bytes(&bytes, &[]);
        let error = fault(rig.frontend.on_readable(&mut rig.changes));
        assert_eq!(error.kind, ErrorKind::Protocol, "{what}");
        assert!(error.to_string().contains(expected), "{what}: {error}");
    }
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    rig.vmm.send_bytes(&header(2, 1, 8), &[]);
    rig.frontend.on_readable(&mut rig.changes).unwrap();
    drop(std::mem::replace(&mut rig.vmm, Vmm::pair().0));
    let error = fault(rig.frontend.on_readable(&mut rig.changes));
    assert!(error.reason.contains("in the middle of a message"), "{error}");
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    drop(std::mem::replace(&mut rig.vmm, Vmm::pair().0));
    assert_eq!(rig.frontend.on_readable(&mut rig.changes), Err(Disconnect::Left));
}

#[test]
fn unexpected_descriptors_are_closed_and_too_many_end_the_connection() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    let memory = some_memory();
    // A message that needs none; REM_MEM_REG with one is even known from real front ends.
    rig.tell(3, &[], &[memory.as_fd(), memory.as_fd()]);
    rig.ask(1, &[]);
    assert_eq!(times_open(&memory), 1);

    for count in [9, 10, 30] {
        let mut rig = Rig::new(8, ALL_FEATURES);
        rig.vmm.send(3, &[], &vec![memory.as_fd(); count]);
        let error = fault(rig.frontend.on_readable(&mut rig.changes));
        assert!(error.reason.contains("more than 8 file descriptors"), "{error}");
        drop(rig);
        assert_eq!(times_open(&memory), 1);
    }
    // Few at a time, but more than 8 within one message.
    let mut rig = Rig::new(8, ALL_FEATURES);
    let message = Vmm::message(2, 1, &[0; 8]);
    for byte in &message[..4] {
        rig.vmm.send_bytes(&[*byte], &[memory.as_fd(); 3]);
    }
    let error = fault(rig.frontend.on_readable(&mut rig.changes));
    assert!(error.reason.contains("more than 8 file descriptors"), "{error}");
}

/// Any other file is its file system's, and that may be a program that never answers: nothing is asked of it, and it is
/// left to be closed by whoever can wait.
#[test]
fn a_descriptor_that_is_neither_eventfd_nor_shared_memory_ends_the_connection() {
    let (reader, writer) = pipe().unwrap();
    for request in [3, 5, 12, 13, 32, 37] {
        let (vmm, socket) = Vmm::pair();
        let mut connection = Connection::new(socket).unwrap();
        vmm.send(request, &[], &[reader.as_fd(), writer.as_fd()]);
        assert_eq!(fault(connection.receive().map(drop)).kind, ErrorKind::WrongDescriptor, "{request}");
        let unclosable = connection.take_unclosable();
        assert_eq!((unclosable.len(), connection.take_unclosable().len()), (2, 0));
        drop(connection);
        assert_eq!(times_open(&reader), 4, "it is not closed by the way");
    }
    let mut rig = Rig::new(8, ALL_FEATURES);
    rig.vmm.send(12, &0u64.to_ne_bytes(), &[writer.as_fd()]);
    assert!(fault(rig.frontend.on_readable(&mut rig.changes)).to_string().contains("memory-backend-memfd"));
    drop(rig);
    assert_eq!(times_open(&writer), 3, "nobody took it: it stays open");
}

#[test]
fn a_front_end_that_reads_no_replies_is_disconnected() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    for _ in 0..100_000 {
        rig.vmm.send(1, &[], &[]);
        if let Err(disconnect) = rig.frontend.on_readable(&mut rig.changes) {
            assert!(disconnect.to_string().contains("does not read its replies"), "{disconnect}");
            return;
        }
    }
    panic!("100000 replies were kept for a front end that reads none");
}

#[test]
fn garbage_never_panics() {
    let mut random = Random::new(seed("garbage_never_panics"));
    for _ in 0..3000 {
        let mut rig = Rig::unconnected(8, ALL_FEATURES);
        if random.one_in(2) {
            rig.negotiate();
            rig.add_memory();
            rig.start_queue(0);
        }
        for _ in 0..random.below(20) {
            let request = random.below(42) as u32;
            let size = match random.below(4) {
                0 => random.below(64) as usize,
                1 => 40,
                2 => 24,
                _ => 8,
            };
            // Small numbers reach further into the code than random ones.
            let payload: Vec<u8> =
                (0..size).map(|_| if random.one_in(6) { random.next() as u8 } else { 0 }).collect();
            let flags = 1 | if random.one_in(2) { 8 } else { 0 };
            let fd = if random.one_in(2) { rig.memory.fd.try_clone().unwrap() } else { event() };
            let fds = vec![fd.as_fd(); random.below(3) as usize];
            rig.vmm.send_bytes(&Vmm::message(request, flags, &payload), &fds);
            if rig.frontend.on_readable(&mut rig.changes).is_err() {
                break;
            }
            while let Some(request) = rig.frontend.next(0) {
                rig.frontend.publish(0);
                use spillway_core::GuestBuffers;
                rig.frontend.complete(request.token, Ok(()));
            }
            rig.frontend.publish(0);
            let _ = rig.frontend.finish_stops(&mut rig.changes);
            rig.vmm.reply();
        }
    }
}

#[test]
fn raw_noise_never_panics() {
    let mut random = Random::new(seed("raw_noise_never_panics"));
    for _ in 0..2000 {
        let mut rig = Rig::unconnected(8, ALL_FEATURES);
        let bytes: Vec<u8> = (0..random.below(600))
            .map(|_| if random.one_in(3) { random.next() as u8 } else { random.below(3) as u8 })
            .collect();
        for chunk in bytes.chunks(1 + random.below(100) as usize) {
            rig.vmm.send_bytes(chunk, &[]);
            if rig.frontend.on_readable(&mut rig.changes).is_err() {
                break;
            }
        }
    }
}

#[test]
fn file_backed_and_offset_memory_is_accepted() {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(MEMORY_BYTES + 3 * 4096 + 512).unwrap();
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    rig.negotiate();
    // The region starts in the middle of a page of the file; the guest's view of it is shifted by as much.
    let shift = 512u64;
    let mut region = vec![0; 8];
    for number in [GPA, MEMORY_BYTES, USER, 4096 + shift] {
        region.extend_from_slice(&number.to_ne_bytes());
    }
    rig.memory = GuestMemory::of(file.into(), 4096 + shift + MEMORY_BYTES, GPA - 4096 - shift, 0);
    let fd = rig.memory.fd.try_clone().unwrap();
    assert!(rig.try_tell(37, &region, &[fd.as_fd()]));
    rig.start_queue(0);
    assert!(rig.frontend.is_live(0), "{:?}", rig.frontend.take_notice());
    assert_eq!(rig.simple(0, 3, Some((SCRATCH + 512, 512, true))), Some((0, 513)));
    assert_eq!(rig.memory.read(SCRATCH + 512, 512), rig.disk[3 * 512..4 * 512]);
}

#[test]
fn the_whole_table_at_once_as_older_vmms_send_it() {
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    rig.negotiate();
    let high = GuestMemory::new(1 << 20, GPA + MEMORY_BYTES, 0x1000_0000);
    let mut table = 2u32.to_ne_bytes().to_vec();
    table.extend_from_slice(&[0; 4]);
    table.extend_from_slice(&high.region());
    table.extend_from_slice(&rig.memory.region());
    let fds = [high.fd.try_clone().unwrap(), rig.memory.fd.try_clone().unwrap()];
    assert!(rig.try_tell(5, &table, &[fds[0].as_fd(), fds[1].as_fd()]));
    rig.start_queue(0);
    assert_eq!(rig.simple(0, 0, Some((high.gpa, 4096, true))), Some((0, 4097)));
    assert_eq!(high.read(high.gpa, 4096), rig.disk[..4096]);
    // The same table again, while running, as for memory hot-plug.
    assert!(rig.try_tell(5, &table, &[fds[0].as_fd(), fds[1].as_fd()]));
    assert!(rig.frontend.is_live(0));
    assert_eq!(rig.simple(0, 8, Some((high.gpa, 4096, true))), Some((0, 4097)));
    assert_eq!(high.read(high.gpa, 4096), rig.disk[4096..8192]);
    // A table that is refused leaves the earlier one in place.
    let bad = event();
    assert!(!rig.try_tell(5, &table, &[fds[0].as_fd(), bad.as_fd()]));
    assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
}

#[test]
fn queues_from_1_to_64() {
    for (queues, works) in [(0, false), (1, true), (64, true), (65, false), (256, false)] {
        let (_vmm, socket) = Vmm::pair();
        let config = spillway_export::vhost_user_blk::DeviceConfig { queues, ..config() };
        let frontend = Frontend::new(socket, config, 0);
        assert_eq!(frontend.is_ok(), works, "{queues}");
        if let Ok(frontend) = frontend {
            assert!(frontend.fd().as_raw_fd() >= 0);
        }
    }
}
