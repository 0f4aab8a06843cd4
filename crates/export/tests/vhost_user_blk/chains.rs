//! Chains and requests, by clause of the virtio specification (1.3).

use crate::vmm::*;
use spillway_core::{Errno, GuestBuffers, Operation};
use spillway_export::ErrorKind;
use spillway_export::vhost_user_blk::Error;
use std::os::fd::AsFd;

const STATUS: u64 = SCRATCH + 16;
const DATA: u64 = SCRATCH + 4096;
const TABLE: u64 = SCRATCH + 0x2000;
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH_OP: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const ZEROES: u32 = 13;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend_from_slice(&sectors.to_le_bytes());
    bytes.extend_from_slice(&flags.to_le_bytes());
    bytes
}

/// Whether the queue was stopped, and why.
fn broken(rig: &mut Rig) -> Error {
    assert!(!rig.frontend.is_live(0), "the queue still runs");
    assert!(rig.frontend.next(0).is_none());
    rig.frontend.take_notice().expect("a notice")
}

#[test]
fn read_and_write_5_2_6() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    let content: Vec<u8> = (0..4096u32).map(|at| (at * 7) as u8).collect();
    rig.memory.write(DATA, &content);
    assert_eq!(rig.simple(OUT, 9, Some((DATA, 4096, false))), Some((OK, 1)));
    assert_eq!(rig.disk[9 * 512..9 * 512 + 4096], content);
    rig.memory.write(DATA, &[0; 8192]);
    assert_eq!(rig.simple(IN, 8, Some((DATA, 8192, true))), Some((OK, 8193)));
    assert_eq!(rig.memory.read(DATA, 8192), rig.disk[8 * 512..8 * 512 + 8192]);
}

#[test]
fn flush_and_unknown_types_5_2_6() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    assert_eq!(rig.simple(FLUSH_OP, 0, None), Some((OK, 1)));
    // SCSI commands, barriers, lifetime, secure erase, zones, nonsense.
    for kind in [2, 3, 5, 10, 12, 14, 15, 18, 99, 0x8000_0000, u32::MAX] {
        assert_eq!(rig.simple(kind, 0, None), Some((UNSUPP, 1)), "{kind}");
        assert_eq!(rig.simple(kind, 0, Some((DATA, 512, true))), Some((UNSUPP, 0)), "{kind}");
    }
}

#[test]
fn get_id_5_2_6() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    let mut id = b"spillway-test".to_vec();
    id.resize(20, 0);
    for (room, written) in [(20, 21), (8, 9), (64, 20), (1, 2)] {
        rig.memory.write(DATA, &[0xaa; 64]);
        assert_eq!(rig.simple(GET_ID, 0, Some((DATA, room, true))), Some((OK, written)));
        let got = rig.memory.read(DATA, 64);
        let n = room.min(20) as usize;
        assert_eq!(got[..n], id[..n]);
        assert!(got[n..].iter().all(|&b| b == 0xaa), "only what was asked for");
    }
}

#[test]
fn discard_and_write_zeroes_5_2_6() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    let capacity = DISK_BYTES / 512;
    let cases = [
        (DISCARD, range(8, 16, 0), OK),
        (ZEROES, range(64, 1, 0), OK),
        (ZEROES, range(72, 8, 1), OK),
        (ZEROES, range(0, 0, 0), OK),
        (DISCARD, range(capacity, 0, 0), OK),
        // Unmap makes no sense on a discard; the other bits are reserved.
        (DISCARD, range(8, 8, 1), UNSUPP),
        (DISCARD, range(8, 8, 2), UNSUPP),
        (ZEROES, range(8, 8, 2), UNSUPP),
        (ZEROES, range(8, 8, 0x8000_0001), UNSUPP),
        (DISCARD, range(capacity, 1, 0), IOERR),
        (DISCARD, range(capacity - 1, 2, 0), IOERR),
        (DISCARD, range(u64::MAX, 1, 0), IOERR),
        (ZEROES, range(u64::MAX - 7, 8, 0), IOERR),
        (ZEROES, range(0, u32::MAX, 0), IOERR),
        // One range in a request was offered, and a range has 16 bytes.
        (DISCARD, [range(0, 8, 0), range(8, 8, 0)].concat(), IOERR),
        (DISCARD, range(0, 8, 0)[..15].to_vec(), IOERR),
        (ZEROES, vec![], IOERR),
    ];
    for (kind, bytes, status) in cases {
        rig.memory.write(DATA, &bytes);
        let data = (!bytes.is_empty()).then_some((DATA, bytes.len() as u32, false));
        let before = rig.disk.clone();
        assert_eq!(rig.simple(kind, 0, data), Some((status, 1)), "{kind} {bytes:?}");
        let changed = rig.disk != before;
        assert_eq!(changed, status == OK && bytes[8] != 0, "{kind} {bytes:?}");
    }
    assert!(rig.disk[8 * 512..24 * 512].iter().all(|&b| b == 0));
    assert!(rig.disk[64 * 512..65 * 512].iter().all(|&b| b == 0));
}

#[test]
fn bounds_and_lengths_5_2_6_2() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    let capacity = DISK_BYTES / 512;
    for (sector, len) in [
        (capacity, 512),
        (capacity - 1, 1024),
        (u64::MAX, 512),
        (u64::MAX - 1, 1024),
        (u64::MAX / 512 + 1, 512),
        (0, 511),
        (0, 513),
        (0, 1),
        (0, DISK_BYTES as u32 + 512),
        (0, u32::MAX),
        (0, u32::MAX - 511),
    ] {
        assert_eq!(rig.simple(IN, sector, Some((DATA, len, true))), Some((IOERR, 0)), "{sector} {len}");
        assert_eq!(rig.simple(OUT, sector, Some((DATA, len, false))), Some((IOERR, 1)), "{sector} {len}");
    }
    assert_eq!(rig.simple(IN, 0, None), Some((IOERR, 1)));
    assert_eq!(rig.simple(OUT, 0, None), Some((IOERR, 1)));
    assert_eq!(rig.simple(IN, capacity - 1, Some((DATA, 512, true))), Some((OK, 513)));
}

#[test]
fn data_in_the_wrong_direction_5_2_6() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    // A read into a buffer that the device may not write, a write from one that it may not read.
    assert_eq!(rig.simple(IN, 0, Some((DATA, 512, false))), Some((IOERR, 1)));
    assert_eq!(rig.simple(OUT, 0, Some((DATA, 512, true))), Some((IOERR, 0)));
}

#[test]
fn a_disk_error_becomes_a_status_5_2_6() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    for (errno, status) in
        [(Errno::IO, IOERR), (Errno::NO_SPACE, IOERR), (Errno::NOT_SUPPORTED, UNSUPP), (Errno::FAULT, IOERR)]
    {
        for (kind, writable, len) in [(IN, true, 0), (OUT, false, 1)] {
            rig.memory.write(SCRATCH, &Rig::header(kind, 0));
            let buffers = [(SCRATCH, 16, false), (DATA, 512, writable), (STATUS, 1, true)];
            let free = rig.driver.free.clone();
            let head = rig.driver.chain(&rig.memory, &buffers, None);
            rig.driver.offer(&rig.memory, head);
            let request = rig.frontend.next(0).unwrap();
            rig.frontend.complete(request.token, Err(errno));
            assert_eq!(rig.driver.take_used(&rig.memory), None, "not before it is published");
            rig.frontend.publish(0);
            assert_eq!(rig.driver.take_used(&rig.memory), Some((head, len)));
            assert_eq!(rig.memory.read(STATUS, 1), [status]);
            rig.driver.free = free;
        }
    }
}

#[test]
fn message_framing_2_7_4_any_layout_means_the_same() {
    let mut random = Random::new(seed("message_framing_2_7_4"));
    // Two regions that touch, so that buffers straddle them.
    let mut rig = Rig::unconnected(256, ALL_FEATURES);
    rig.negotiate();
    rig.add_memory();
    let second = GuestMemory::new(1 << 20, GPA + MEMORY_BYTES, 0x2000_0000);
    let mut payload = vec![0; 8];
    payload.extend_from_slice(&second.region());
    rig.tell(37, &payload, &[second.fd.try_clone().unwrap().as_fd()]);
    rig.start_queue(0);
    let border = second.gpa;
    let write = |rig: &Rig, gpa: u64, bytes: &[u8]| {
        for (gpa, byte) in (gpa..).zip(bytes) {
            let memory = if gpa < border { &rig.memory } else { &second };
            memory.write(gpa, &[*byte]);
        }
    };
    let read = |rig: &Rig, gpa: u64, len: usize| -> Vec<u8> {
        (gpa..gpa + len as u64)
            .map(|gpa| if gpa < border { rig.memory.read(gpa, 1)[0] } else { second.read(gpa, 1)[0] })
            .collect()
    };
    for round in 0..1500 {
        let kind = [IN, OUT, GET_ID, DISCARD, ZEROES, FLUSH_OP][random.below(6) as usize];
        let sector = random.below(DISK_BYTES / 512 - 64);
        let sectors = 1 + random.below(24) as usize;
        let content: Vec<u8> = (0..sectors * 512).map(|_| random.next() as u8).collect();
        let (mut readable, mut writable) = (Rig::header(kind, sector), 0);
        match kind {
            OUT => readable.extend_from_slice(&content),
            IN => writable = content.len(),
            GET_ID => writable = 20,
            DISCARD | ZEROES => readable.extend_from_slice(&range(sector, sectors as u32, 0)),
            _ => {}
        }
        // Pieces lie one behind the other, anywhere around the border, cut anywhere.
        let start = border - random.below(readable.len() as u64 + writable as u64 + 200) - 100;
        write(&rig, start, &readable);
        let cut = |random: &mut Random, from: u64, len: usize, writable: bool, to: &mut Vec<Buffer>| {
            let mut at = 0;
            while at < len {
                let piece = match random.below(4) {
                    0 => 1 + random.below(4) as usize,
                    1 => 16,
                    2 => 1 + random.below(2000) as usize,
                    _ => len,
                };
                let piece = piece.min(len - at);
                if random.one_in(10) {
                    to.push((from + at as u64, 0, writable));
                }
                to.push((from + at as u64, piece as u32, writable));
                at += piece;
            }
        };
        let mut buffers = Vec::new();
        cut(&mut random, start, readable.len(), false, &mut buffers);
        let writable_at = start + readable.len() as u64;
        cut(&mut random, writable_at, writable + 1, true, &mut buffers);
        let table = random.one_in(2).then_some(TABLE).or((buffers.len() > 200).then_some(TABLE));
        if buffers.len() > 1000 {
            continue;
        }
        let before = rig.disk.clone();
        write(&rig, writable_at, &vec![0xcc; writable + 1]);
        let free = rig.driver.free.clone();
        let head = rig.driver.chain(&rig.memory, &buffers, table);
        rig.driver.offer(&rig.memory, head);
        let taken = rig.process();
        let used = rig.driver.take_used(&rig.memory);
        assert_eq!(
            used,
            Some((head, writable as u32 + 1)),
            "round {round}: {:?}",
            rig.frontend.take_notice()
        );
        rig.driver.free = free;
        assert_eq!(read(&rig, writable_at + writable as u64, 1), [OK]);
        let (from, to) = (sector as usize * 512, (sector as usize + sectors) * 512);
        let mut expected = before;
        match kind {
            OUT => {
                expected[from..to].copy_from_slice(&content);
                assert_eq!(taken[0].operation, Operation::Write { fua: false });
            }
            IN => assert_eq!(read(&rig, writable_at, writable), expected[from..to], "round {round}"),
            GET_ID => assert_eq!(read(&rig, writable_at, 13), b"spillway-test"),
            DISCARD | ZEROES => expected[from..to].fill(0),
            _ => assert_eq!(taken[0].operation, Operation::Flush),
        }
        assert!(rig.disk == expected, "round {round}");
    }
}

#[test]
fn only_the_request_s_data_can_be_reached() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    rig.memory.write(SCRATCH, &Rig::header(IN, 0));
    let buffers = [(SCRATCH, 16, false), (DATA, 100, true), (DATA + 200, 413, true)];
    let head = rig.driver.chain(&rig.memory, &buffers, None);
    rig.driver.offer(&rig.memory, head);
    let token = rig.frontend.next(0).unwrap().token;
    rig.memory.write(DATA, &[0xaa; 1024]);
    assert!(rig.frontend.owns(token));
    for (at, len) in [(0, 513), (512, 1), (511, 2), (u32::MAX, 1), (u32::MAX, 0x1000)] {
        assert_eq!(rig.frontend.copy_to_guest(token, at, &vec![1; len]), Err(Errno::FAULT), "{at} {len}");
        assert_eq!(rig.frontend.copy_from_guest(token, at, &mut vec![1; len]), Err(Errno::FAULT));
        assert_eq!(rig.frontend.zero_guest(token, at, len as u32), Err(Errno::FAULT));
    }
    rig.frontend.zero_guest(token, 90, 20).unwrap();
    let memory = rig.memory.read(DATA, 1024);
    assert_eq!(memory[90..100], [0; 10]);
    assert_eq!(memory[200..210], [0; 10]);
    rig.frontend.complete(token, Ok(()));
    assert_eq!(rig.frontend.copy_to_guest(token, 0, &[1]), Err(Errno::FAULT), "after completion");
    // A second completion is ignored.
    rig.frontend.complete(token, Ok(()));
    rig.frontend.publish(0);
    assert!(rig.driver.take_used(&rig.memory).is_some());
    assert!(rig.driver.take_used(&rig.memory).is_none());
}

#[test]
fn addresses_outside_guest_memory_2_7_5() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    let end = GPA + MEMORY_BYTES;
    for data in [0, GPA - 1, end - 511, end, u64::MAX - 511, u64::MAX, USER] {
        assert_eq!(rig.simple(IN, 0, Some((data, 512, true))), Some((IOERR, 0)), "{data:#x}");
        assert_eq!(rig.simple(OUT, 0, Some((data, 512, false))), Some((IOERR, 1)), "{data:#x}");
        let header = [(data, 16, false), (STATUS, 1, true)];
        if data != end - 511 {
            assert_eq!(rig.run(&header, None, STATUS), Some((IOERR, 1)), "{data:#x}");
        }
    }
    // A header that is too short.
    assert_eq!(rig.run(&[(SCRATCH, 15, false), (STATUS, 1, true)], None, STATUS), Some((IOERR, 1)));
    assert_eq!(rig.run(&[(STATUS, 1, true)], None, STATUS), Some((IOERR, 1)));
    assert!(rig.frontend.is_live(0));
    // A status that cannot be written leaves no answer to give.
    for status in [0, end, u64::MAX] {
        let mut rig = Rig::new(8, ALL_FEATURES);
        assert_eq!(rig.run(&[(SCRATCH, 16, false), (status, 1, true)], None, STATUS), None);
        let error = broken(&mut rig);
        assert_eq!((error.kind, error.context.object), (ErrorKind::NoMemoryRegion, Some("status byte")));
    }
}

#[test]
fn broken_chains_2_7_5_stop_their_queue() {
    let good = |rig: &mut Rig| rig.memory.write(SCRATCH, &Rig::header(FLUSH_OP, 0));
    type Setup = fn(&mut Rig) -> u16;
    let cases: [(&str, &str, Setup); 12] = [
        ("2.7.5.1: a loop", "loop", |rig| {
            Driver::set_descriptor(&rig.memory, RING_AT, 0, (SCRATCH, 16, false), F_NEXT, 1);
            Driver::set_descriptor(&rig.memory, RING_AT, 1, (SCRATCH, 16, false), F_NEXT, 0);
            0
        }),
        ("2.7.5: next beyond the table", "beyond the table", |rig| {
            Driver::set_descriptor(&rig.memory, RING_AT, 0, (SCRATCH, 16, false), F_NEXT, 8);
            0
        }),
        ("2.7.5: next far beyond", "beyond the table", |rig| {
            Driver::set_descriptor(&rig.memory, RING_AT, 0, (SCRATCH, 16, false), F_NEXT, 0xffff);
            0
        }),
        ("2.7.13: a head beyond the table", "beyond", |_| 8),
        ("2.7.4.2: readable after writable", "readable", |rig| {
            let buffers = [(SCRATCH, 16, false), (STATUS, 1, true), (DATA, 512, false), (STATUS, 1, true)];
            rig.driver.chain(&rig.memory, &buffers, None)
        }),
        ("5.2.6: nothing writable", "status", |rig| {
            rig.driver.chain(&rig.memory, &[(SCRATCH, 16, false)], None)
        }),
        ("2.7.5.3.1: indirect and next", "indirect and has a next", |rig| {
            Driver::set_descriptor(&rig.memory, RING_AT, 0, (TABLE, 48, false), F_INDIRECT | F_NEXT, 1);
            0
        }),
        ("2.7.5.3: an empty table", "indirect table", |rig| {
            Driver::set_descriptor(&rig.memory, RING_AT, 0, (TABLE, 0, false), F_INDIRECT, 0);
            0
        }),
        ("2.7.5.3: half a descriptor", "indirect table", |rig| {
            Driver::set_descriptor(&rig.memory, RING_AT, 0, (TABLE, 40, false), F_INDIRECT, 0);
            0
        }),
        ("2.7.5.3: 4 GiB of table", "indirect table", |rig| {
            Driver::set_descriptor(&rig.memory, RING_AT, 0, (TABLE, 0xffff_fff0, false), F_INDIRECT, 0);
            0
        }),
        ("2.7.5.3.1: a table in a table", "inside an indirect", |rig| {
            Driver::set_descriptor(&rig.memory, TABLE, 0, (TABLE, 48, false), F_INDIRECT, 0);
            Driver::set_descriptor(&rig.memory, RING_AT, 0, (TABLE, 48, false), F_INDIRECT, 0);
            0
        }),
        ("2.7.5.1: a loop in a table", "loop", |rig| {
            Driver::set_descriptor(&rig.memory, TABLE, 0, (SCRATCH, 16, false), F_NEXT, 1);
            Driver::set_descriptor(&rig.memory, TABLE, 1, (SCRATCH, 16, false), F_NEXT, 0);
            Driver::set_descriptor(&rig.memory, RING_AT, 0, (TABLE, 32, false), F_INDIRECT, 0);
            0
        }),
    ];
    for (what, expected, setup) in cases {
        let mut rig = Rig::new(8, ALL_FEATURES);
        good(&mut rig);
        let head = setup(&mut rig);
        let error_event = event();
        rig.tell(14, &0u64.to_ne_bytes(), &[error_event.as_fd()]);
        rig.driver.offer(&rig.memory, head);
        assert_eq!(rig.process(), [], "{what}");
        assert_eq!(rig.driver.take_used(&rig.memory), None, "{what}");
        let error = broken(&mut rig);
        assert!(error.to_string().contains(expected), "{what}: {error}");
        assert_eq!(drain(&error_event), 1, "{what}: the front end is told");
        // Only a new set-up brings it back.
        rig.tell(18, &Rig::vring(0, 1), &[]);
        assert!(!rig.frontend.is_live(0), "{what}");
        rig.ask(11, &Rig::vring(0, 0));
        rig.driver = Driver::new(8, RING_AT, true);
        rig.memory.write(RING_AT, &[0; 0x1000]);
        rig.start_queue(0);
        assert_eq!(rig.simple(FLUSH_OP, 0, None), Some((OK, 1)), "{what}");
    }
}

#[test]
fn indirect_2_7_5_3_only_if_negotiated_and_after_other_descriptors() {
    let mut rig = Rig::new(8, ALL_FEATURES & !INDIRECT);
    rig.memory.write(SCRATCH, &Rig::header(IN, 0));
    let buffers = [(SCRATCH, 16, false), (DATA, 512, true), (STATUS, 1, true)];
    assert_eq!(rig.run(&buffers, Some(TABLE), STATUS), None);
    assert_eq!(broken(&mut rig).kind, ErrorKind::NotNegotiated);

    // 2.7.5.3.2: normal descriptors, then one that refers to a table.
    let mut rig = Rig::new(8, ALL_FEATURES);
    rig.memory.write(SCRATCH, &Rig::header(IN, 2));
    Driver::set_descriptor(&rig.memory, TABLE, 0, (DATA, 512, true), F_NEXT, 1);
    Driver::set_descriptor(&rig.memory, TABLE, 1, (STATUS, 1, true), 0, 0);
    Driver::set_descriptor(&rig.memory, RING_AT, 5, (SCRATCH, 16, false), F_NEXT, 3);
    Driver::set_descriptor(&rig.memory, RING_AT, 3, (TABLE, 32, false), F_INDIRECT, 0);
    rig.driver.offer(&rig.memory, 5);
    rig.process();
    assert_eq!(rig.driver.take_used(&rig.memory), Some((5, 513)));
    assert_eq!(rig.memory.read(DATA, 512), rig.disk[1024..1536]);

    // An indirect table need not be aligned, and its WRITE flag in the ring is to be ignored.
    Driver::set_descriptor(&rig.memory, TABLE + 1, 0, (SCRATCH, 16, false), F_NEXT, 1);
    Driver::set_descriptor(&rig.memory, TABLE + 1, 1, (DATA, 512, true), F_NEXT, 2);
    Driver::set_descriptor(&rig.memory, TABLE + 1, 2, (STATUS, 1, true), 0, 0);
    Driver::set_descriptor(&rig.memory, RING_AT, 5, (TABLE + 1, 48, true), F_INDIRECT, 0);
    rig.driver.offer(&rig.memory, 5);
    rig.process();
    assert_eq!(rig.driver.take_used(&rig.memory), Some((5, 513)));
}

#[test]
fn more_segments_in_a_table_than_the_queue_is_long() {
    // What Linux does on a queue of 8 that has indirect descriptors.
    let mut rig = Rig::new(8, ALL_FEATURES);
    rig.memory.write(SCRATCH, &Rig::header(IN, 0));
    let mut buffers = vec![(SCRATCH, 16, false)];
    buffers.extend((0..254).map(|n| (DATA + 0x10000 + n * 1024, 512, true)));
    buffers.push((STATUS, 1, true));
    assert_eq!(rig.run(&buffers, Some(TABLE), STATUS), Some((OK, 254 * 512 + 1)));
    for n in 0..254 {
        let at = n as usize * 512;
        assert_eq!(rig.memory.read(DATA + 0x10000 + n * 1024, 512), rig.disk[at..at + 512]);
    }
}

#[test]
fn available_index_2_7_13_2_may_not_jump() {
    for jump in [9u16, 1000, 0x8000, 0xffff] {
        let mut rig = Rig::new(8, ALL_FEATURES);
        let index = rig.memory.u16(rig.driver.available + 2);
        index.store(jump, std::sync::atomic::Ordering::Release);
        assert!(rig.frontend.has_work(0));
        assert!(rig.frontend.next(0).is_none());
        assert_eq!(broken(&mut rig).context.object, Some("available index"));
        assert!(!rig.frontend.has_work(0), "a reactor must not spin on it");
    }
}

#[test]
fn a_head_is_not_taken_twice() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    rig.memory.write(SCRATCH, &Rig::header(FLUSH_OP, 0));
    let head = rig.driver.chain(&rig.memory, &[(SCRATCH, 16, false), (STATUS, 1, true)], None);
    rig.driver.offer(&rig.memory, head);
    let request = rig.frontend.next(0).unwrap();
    rig.driver.offer(&rig.memory, head);
    assert!(rig.frontend.next(0).is_none());
    let error = broken(&mut rig);
    assert_eq!((error.kind, error.context.head), (ErrorKind::Protocol, Some(head)));
    // The first is answered all the same.
    rig.frontend.complete(request.token, Ok(()));
    rig.frontend.publish(0);
    assert_eq!(rig.driver.take_used(&rig.memory), Some((head, 1)));

    // Completed but not published is not the driver's yet either.
    let mut rig = Rig::new(8, ALL_FEATURES);
    rig.memory.write(SCRATCH, &Rig::header(FLUSH_OP, 0));
    let head = rig.driver.chain(&rig.memory, &[(SCRATCH, 16, false), (STATUS, 1, true)], None);
    rig.driver.offer(&rig.memory, head);
    let request = rig.frontend.next(0).unwrap();
    rig.frontend.complete(request.token, Ok(()));
    rig.driver.offer(&rig.memory, head);
    assert!(rig.frontend.next(0).is_none());
    let error = broken(&mut rig);
    assert_eq!((error.kind, error.context.head), (ErrorKind::Protocol, Some(head)));
}

#[test]
fn a_flood_of_bad_requests_does_not_hold_the_thread() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    rig.memory.write(SCRATCH, &Rig::header(77, 0));
    // 20 times around the ring; each call may look at one ring's worth only.
    let mut heads = Vec::new();
    for _ in 0..4 {
        heads.push(rig.driver.chain(&rig.memory, &[(SCRATCH, 16, false), (STATUS, 1, true)], None));
    }
    for _ in 0..20 {
        for &head in &heads {
            rig.driver.offer(&rig.memory, head);
        }
        assert!(rig.frontend.next(0).is_none());
        rig.frontend.publish(0);
        for &head in &heads {
            assert_eq!(rig.driver.take_used(&rig.memory), Some((head, 1)));
        }
    }
    assert!(rig.frontend.is_live(0));
}

#[test]
fn a_hostile_driver_never_panics_nor_leaves_the_disk() {
    let mut random = Random::new(seed("a_hostile_driver"));
    let mut submitted = 0;
    for _ in 0..10_000 {
        let mut rig = Rig::new(8, ALL_FEATURES);
        // Two good chains of three, one of them in a table; then some of it is spoilt.
        let buffers = [(SCRATCH, 16, false), (DATA, 1024, random.one_in(2)), (STATUS, 1, true)];
        rig.driver.chain(&rig.memory, &buffers, None);
        rig.driver.chain(&rig.memory, &buffers, Some(TABLE));
        let end = GPA + MEMORY_BYTES;
        for _ in 0..random.below(4) {
            let address = match random.below(8) {
                0 => random.next(),
                1 => end - random.below(600),
                2 => TABLE,
                3 => SCRATCH,
                _ => SCRATCH + random.below(0x4000),
            };
            let len = match random.below(8) {
                0 => random.next() as u32,
                1 => 512 * random.below(10) as u32,
                2 => 1,
                3 => 48,
                4 => 128,
                _ => 16,
            };
            let flags = if random.one_in(4) { random.next() as u16 } else { random.below(8) as u16 };
            let at = if random.one_in(2) { TABLE } else { RING_AT } + 16 * random.below(4);
            match random.below(4) {
                0 => rig.memory.write(at, &address.to_le_bytes()),
                1 => rig.memory.write(at + 8, &len.to_le_bytes()),
                2 => rig.memory.write(at + 12, &flags.to_le_bytes()),
                _ => rig.memory.write(at + 14, &(random.below(9) as u16).to_le_bytes()),
            }
        }
        let kind = [0, 1, 4, 8, 11, 13, 5][random.below(7) as usize];
        rig.memory.write(SCRATCH, &Rig::header(kind, random.below(2100)));
        rig.memory.write(DATA, &range(random.below(2100), random.below(100) as u32, 0));
        for _ in 0..1 + random.below(4) {
            let head = if random.one_in(8) { random.below(9) as u16 } else { 3 * random.below(2) as u16 };
            rig.driver.offer(&rig.memory, head);
        }
        for request in rig.process() {
            submitted += 1;
            assert!((request.sector + u64::from(request.sectors)) * 512 <= DISK_BYTES);
        }
    }
    assert!(submitted > 1000, "only {submitted} requests were valid: the test is too wild");
}
