//! What Windows' driver `viostor` wants of a disk, and what of its known faults depends on the disk. Requests are laid out as
//! the driver lays them out (July 2026; `crates/testkit/src/viostor` has all of it). Issues and pull requests are those of
//! virtio-win/kvm-guest-drivers-windows.

use crate::vmm::*;
use spillway_core::{Operation, Request};
use spillway_export::vhost_user_blk::{DeviceConfig, Frontend};

const OK: u8 = 0;
const IOERR: u8 = 1;
const IN: u32 = 0;
const OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const TOPOLOGY: u64 = 1 << 10;

/// What it acknowledges of what is offered: `RhelSetGuestFeatures`, without what this device does not have.
const ACKNOWLEDGED: u64 =
    1 << 2 | 1 << 6 | FLUSH | CONFIG_WCE | 1 << 12 | 1 << 13 | 1 << 14 | INDIRECT | EVENT_IDX | VERSION_1;
/// With the bit that is the VMM's.
const FEATURES: u64 = ACKNOWLEDGED | PROTOCOL_FEATURES;

/// An SRB extension: header and status byte side by side, the indirect table at 8 past a multiple of 16, ranges behind it.
const EXTENSION: u64 = SCRATCH;
const HEADER: u64 = EXTENSION + 24;
const STATUS: u64 = EXTENSION + 40;
const TABLE: u64 = EXTENSION + 8312;
const RANGES: u64 = EXTENSION + 16552;
/// Pages of buffers.
const PAGES: u64 = GPA + 0x10_0000;
const PAGE: u64 = 4096;

fn windows() -> Rig {
    Rig::new(128, FEATURES)
}

/// A field of the configuration, read by its own message as the driver reads it.
fn field<const N: usize>(rig: &mut Rig, offset: u32) -> [u8; N] {
    let mut question: Vec<u8> = [offset, N as u32, 0].iter().flat_map(|n| n.to_ne_bytes()).collect();
    question.resize(12 + N, 0);
    rig.ask(24, &question)[12..].try_into().unwrap()
}

fn word(rig: &mut Rig, offset: u32) -> u32 {
    u32::from_le_bytes(field(rig, offset))
}

fn parts(data: &[Buffer]) -> Vec<Buffer> {
    [&[(HEADER, 16, false)], data, &[(STATUS, 1, true)]].concat()
}

/// One request by an indirect table.
fn request(rig: &mut Rig, kind: u32, sector: u64, data: &[Buffer]) -> Option<(u8, u32)> {
    rig.memory.write(HEADER, &Rig::header(kind, sector));
    rig.run(&parts(data), Some(TABLE), STATUS)
}

/// The same, and what reached the disk.
fn taken(rig: &mut Rig, kind: u32, sector: u64, data: &[Buffer]) -> Vec<Request> {
    rig.memory.write(HEADER, &Rig::header(kind, sector));
    let free = rig.driver.free.clone();
    let head = rig.driver.chain(&rig.memory, &parts(data), Some(TABLE));
    rig.driver.offer(&rig.memory, head);
    let taken = rig.process();
    assert_eq!(rig.driver.take_used(&rig.memory).map(|used| used.0), Some(head));
    assert_eq!(rig.memory.read(STATUS, 1), [OK]);
    rig.driver.free = free;
    taken
}

/// A buffer of `bytes` in pages that are not adjacent, `lead` bytes into the first of them.
fn scattered(lead: u64, bytes: u64, writable: bool) -> Vec<Buffer> {
    let mut at = lead;
    let mut buffers = Vec::new();
    while at < lead + bytes {
        let len = (PAGE - at % PAGE).min(lead + bytes - at);
        buffers.push((PAGES + at / PAGE * 2 * PAGE + at % PAGE, len as u32, writable));
        at += len;
    }
    buffers
}

fn content(rig: &Rig, buffers: &[Buffer]) -> Vec<u8> {
    buffers.iter().flat_map(|&(at, len, _)| rig.memory.read(at, len as usize)).collect()
}

fn unmap(rig: &mut Rig, ranges: &[(u64, u32)]) -> Buffer {
    for (i, &(sector, sectors)) in (0..).zip(ranges) {
        let range = [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat();
        rig.memory.write(RANGES + i * 16, &range);
    }
    (RANGES, ranges.len() as u32 * 16, false)
}

/// `NumberOfPhysicalBreaks` and `MaximumTransferLength`, from `seg_max` as pull request 753 has it (issue 692).
fn limits(rig: &mut Rig) -> (u64, u64) {
    let seg_max = u64::from(word(rig, 12));
    assert!(seg_max > 2, "seg_max - 1 pages are the longest transfer");
    (seg_max, (seg_max - 1) * PAGE)
}

#[test]
fn viostor_reads_topology_that_it_does_not_acknowledge_2_2_2() {
    let mut rig = Rig::unconnected(128, FEATURES);
    let offered = u64::from_ne_bytes(rig.ask(1, &[]).try_into().unwrap());
    // Whatever it would acknowledge and is not offered, it does without.
    let would = 1 << 0 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 27 | 1 << 33 | 1 << 34 | 1 << 36;
    assert_eq!(offered & (ACKNOWLEDGED | would), ACKNOWLEDGED);
    // Pull request 312: `LogicalPerPhysicalExponent` is that of physical blocks of 4 KiB.
    assert_ne!(offered & TOPOLOGY, 0);
    for mut rig in [rig, windows()] {
        let exponent: [u8; 1] = field(&mut rig, 24);
        assert_eq!((exponent, u16::from_le_bytes(field(&mut rig, 26)), word(&mut rig, 28)), ([3], 8, 0));
        assert_eq!(u64::from_le_bytes(field(&mut rig, 0)), DISK_BYTES / 512);
    }
}

/// Issue 513: with logical blocks of 4 KiB, drivers before pull request 514 discarded the wrong sectors.
#[test]
fn logical_blocks_have_512_bytes_issue_513() {
    let mut rig = windows();
    let block = u64::from(word(&mut rig, 20));
    assert_eq!(block, 512);
    // The driver's block and the device's sector are the same, with either version's arithmetic.
    for (lba, count) in [(8, 8), (9, 30), (1, 1), (2047, 1)] {
        let with_factor = (lba * (block / 512), count * (block / 512) as u32);
        let range = unmap(&mut rig, &[with_factor]);
        let [request] = taken(&mut rig, DISCARD, 0, &[range])[..] else { panic!("one request") };
        assert_eq!((request.operation, request.sector, request.sectors), (Operation::Discard, lba, count));
    }
}

/// Issue 666, pull requests 824, 847 and 858: without a granularity, or with one below 4 KiB, "Optimize drive" writes all files anew.
/// Pull request 927: with an alignment of 0 the disk is no thin one to Windows.
#[test]
fn discards_can_be_cut_at_their_limits_issue_666() {
    let mut rig = windows();
    let [sectors, ranges, alignment] = [36, 40, 44].map(|at| word(&mut rig, at));
    assert_eq!(
        alignment, 8,
        "that of the blocks which can be given back, and what the driver raises others to"
    );
    assert_eq!(ranges, 1, "the driver takes 16 at most, and sends no more than the device says");
    // Windows' class driver cuts at the limit, whatever the granularity: what follows must begin with a block again.
    assert!(sectors.is_multiple_of(alignment), "{sectors}");
    assert!(sectors >= 1 << 22, "2 GiB at least, so that a large volume takes few requests: {sectors}");
}

#[test]
fn a_serial_number_of_20_bytes_has_no_zero_behind_it_5_2_6() {
    for (serial, id) in [
        ("0123456789abcdefghij-and-more", &b"0123456789abcdefghij"[..]),
        ("0123456789abcdefghij", b"0123456789abcdefghij"),
        ("short", b"short\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
    ] {
        let mut rig = Rig::unconnected(128, FEATURES);
        let (vmm, socket) = Vmm::pair();
        rig.vmm = vmm;
        rig.frontend = Frontend::new(socket, DeviceConfig { serial: serial.into(), ..config() }, 1).unwrap();
        rig.negotiate();
        rig.add_memory();
        rig.start_queue(0);
        // In the adapter extension, with other variables behind.
        rig.memory.write(PAGES, &[0xa5; 32]);
        assert_eq!(request(&mut rig, GET_ID, 0, &[(PAGES, 20, true)]), Some((OK, 21)));
        assert_eq!(rig.memory.read(PAGES, 20), id);
        assert_eq!(rig.memory.read(PAGES + 20, 12), [0xa5; 12], "{serial}");
    }
}

/// Issue 692: the driver's longest transfer is what `seg_max` allows, one page for each segment but one.
#[test]
fn the_longest_transfer_fills_seg_max_issue_692() {
    let mut rig = windows();
    let (breaks, bytes) = limits(&mut rig);
    assert_eq!((breaks, bytes), (126, 512_000));
    for lead in [0, 4, 2048, 4092] {
        let data = scattered(lead, bytes, true);
        assert_eq!(data.len() as u64, breaks - u64::from(lead == 0));
        assert_eq!(request(&mut rig, IN, 1, &data), Some((OK, bytes as u32 + 1)), "{lead}");
        assert!(content(&rig, &data) == rig.disk[512..512 + bytes as usize], "{lead}");
        let mut expected = rig.disk.clone();
        expected.copy_within(512..512 + bytes as usize, 1024);
        let data = scattered(lead, bytes, false);
        assert_eq!(request(&mut rig, OUT, 2, &data), Some((OK, 1)), "{lead}");
        assert!(rig.disk == expected, "{lead}");
    }
}

/// Drivers before pull request 753 do not look at `seg_max`: 512 pages (`MAX_PHYS_SEGMENTS`), and one more where a buffer does not
/// begin with a page.
#[test]
fn a_table_of_515_descriptors_is_served_pr_753() {
    let mut rig = windows();
    for segments in [512, 513] {
        // As many sectors as pages, so that they fit this disk; where there is one segment more, the first is cut in two.
        let page = |i: u64| (PAGES + i % 256 * 2 * PAGE + i / 256 * 512, 512, true);
        let mut data: Vec<Buffer> = (0..512).map(page).collect();
        if segments == 513 {
            data.splice(..1, [(PAGES + 2048, 4, true), (PAGES + 3072, 508, true)]);
        }
        assert_eq!(data.len(), segments);
        assert_eq!(request(&mut rig, IN, 0, &data), Some((OK, 512 * 512 + 1)), "{segments}");
        assert!(content(&rig, &data) == rig.disk[..512 * 512], "{segments}");
    }
}

/// `AlignmentMask` is 3: a buffer begins at any multiple of 4, and segments have any length.
#[test]
fn segments_of_odd_lengths_at_multiples_of_4_2_7_4() {
    let mut rig = windows();
    for (lead, sectors) in [(4, 1), (4092, 1), (3588, 1), (4, 16), (1028, 9)] {
        let data = scattered(lead, sectors * 512, true);
        let used = sectors as u32 * 512 + 1;
        assert_eq!(request(&mut rig, IN, 3, &data), Some((OK, used)), "{lead} {sectors}");
        assert!(content(&rig, &data) == rig.disk[3 * 512..][..sectors as usize * 512], "{lead} {sectors}");
        assert_eq!(rig.memory.read(HEADER, 16), Rig::header(IN, 3), "the header beside the status byte");
    }
}

/// Pull request 1563: "force unit access" is a write and then a flush, by the same header and status byte, unless Windows has turned
/// the write cache off by `writeback`.
#[test]
fn a_forced_write_is_a_write_and_a_flush_pr_1563() {
    let mut rig = windows();
    let write = Operation::Write { fua: false };
    let data = [(PAGES, 512, false)];
    let operation = |taken: &[Request]| taken.iter().map(|r| r.operation).collect::<Vec<_>>();
    assert_eq!(field(&mut rig, 32), [1], "MODE SENSE: the write cache is on");
    assert_eq!(operation(&taken(&mut rig, OUT, 8, &data)), [write]);
    assert_eq!(operation(&taken(&mut rig, T_FLUSH, 0, &[])), [Operation::Flush]);
    // MODE SELECT: one byte.
    let select = |rig: &mut Rig, on: u8| {
        let payload = [&[32u32, 1, 0].map(u32::to_ne_bytes).concat()[..], &[on]].concat();
        assert!(rig.try_tell(25, &payload, &[]));
    };
    select(&mut rig, 0);
    assert_eq!(field(&mut rig, 32), [0]);
    assert_eq!(
        operation(&taken(&mut rig, OUT, 8, &data)),
        [Operation::Write { fua: true }],
        "without a flush"
    );
    select(&mut rig, 1);
    assert_eq!(operation(&taken(&mut rig, OUT, 8, &data)), [write]);
    // Earlier drivers do not acknowledge CONFIG_WCE: whatever it was set to, the cache is on, and they flush.
    select(&mut rig, 0);
    rig.tell(34, &[], &[]);
    rig.features = FEATURES & !CONFIG_WCE;
    rig.tell(2, &(FEATURES & !CONFIG_WCE).to_ne_bytes(), &[]);
    rig.memory.write(RING_AT, &[0; 0x1000]);
    rig.driver = Driver::new(128, RING_AT, true);
    rig.start_queue(0);
    assert_eq!(operation(&taken(&mut rig, OUT, 8, &data)), [write]);
}

/// Pull request 1504: UNMAP comes from users too, with any number of ranges. Without one, the driver sends a buffer of no bytes.
#[test]
fn unmaps_of_nothing_and_of_too_much_are_errors_and_no_more_pr_1504() {
    let mut rig = windows();
    let before = rig.disk.clone();
    let nothing = unmap(&mut rig, &[]);
    assert_eq!(nothing.1, 0);
    assert_eq!(request(&mut rig, DISCARD, 0, &[nothing]), Some((IOERR, 1)));
    let many = unmap(&mut rig, &[(8, 8); 16]);
    assert_eq!(request(&mut rig, DISCARD, 0, &[many]), Some((IOERR, 1)));
    let empty = unmap(&mut rig, &[(8, 0)]);
    assert_eq!(request(&mut rig, DISCARD, 0, &[empty]), Some((OK, 1)));
    assert!(rig.disk == before);
    let range = unmap(&mut rig, &[(8, 8)]);
    assert_eq!(request(&mut rig, DISCARD, 0, &[range]), Some((OK, 1)), "the queue goes on");
    assert!(rig.frontend.take_notice().is_none(), "and nothing is said of it");
}

/// Issue 907, pull requests 1326 and 1493: when a request has timed out, the driver resets its device and completes all itself. From
/// the end of the stop on their memory is used for other things.
#[test]
fn a_reset_takes_the_memory_of_all_requests_back_pr_1493() {
    let mut rig = windows();
    // Under way: a read and a write, each with an extension and a page of its own.
    let step = 0x5000;
    let mut heads = Vec::new();
    for (i, kind) in [(0, IN), (1, OUT)] {
        let at = EXTENSION + i * step;
        rig.memory.write(at + 24, &Rig::header(kind, 64 + i * 8));
        let buffers = [(at + 24, 16, false), (PAGES + i * PAGE, 4096, kind == IN), (at + 40, 1, true)];
        heads.push(rig.driver.chain(&rig.memory, &buffers, Some(at + 8312)));
        rig.driver.offer(&rig.memory, heads[i as usize]);
    }
    let requests: Vec<Request> = std::iter::from_fn(|| rig.frontend.next(0)).collect();
    assert_eq!(requests.len(), 2);
    rig.vmm.send(18, &Rig::vring(0, 0), &[]);
    rig.vmm.send(11, &Rig::vring(0, 0), &[]);
    rig.frontend.on_readable(&mut rig.changes).unwrap();
    assert!(rig.vmm.reply().is_none(), "the stop waits for both");
    rig.finish(&requests[0]);
    rig.frontend.finish_stops(&mut rig.changes).unwrap();
    assert!(rig.vmm.reply().is_none(), "and for the second one");
    rig.finish(&requests[1]);
    rig.frontend.finish_stops(&mut rig.changes).unwrap();
    assert!(rig.vmm.reply().is_some_and(|(request, ..)| request == 11));
    // All of it is something else's now.
    rig.memory.write(EXTENSION, &vec![0xd7; 2 * step as usize]);
    rig.memory.write(PAGES, &vec![0xd7; 2 * PAGE as usize]);
    let disk = rig.disk.clone();
    rig.frontend.publish(0);
    assert_eq!(rig.process(), []);
    assert_eq!(rig.memory.read(EXTENSION, 2 * step as usize), vec![0xd7; 2 * step as usize]);
    assert_eq!(rig.memory.read(PAGES, 2 * PAGE as usize), vec![0xd7; 2 * PAGE as usize]);
    assert!(rig.disk == disk);
    // The same driver again: features, rings where they were, from index 0.
    rig.tell(2, &FEATURES.to_ne_bytes(), &[]);
    rig.memory.write(RING_AT, &[0; 0x2000]);
    rig.driver = Driver::new(128, RING_AT, true);
    rig.start_queue(0);
    assert_eq!(rig.process(), [], "what the last one had left is forgotten");
    assert_eq!(request(&mut rig, IN, 1, &[(PAGES, 512, true)]), Some((OK, 513)));
}

/// The driver of crash dumps and hibernation acknowledges indirect descriptors and uses none: its longest transfer fills the queue.
#[test]
fn a_crash_dump_fills_a_queue_of_128_without_tables() {
    let mut rig = windows();
    let (breaks, bytes) = limits(&mut rig);
    let data = scattered(4, bytes, false);
    assert_eq!(data.len() as u64, breaks);
    rig.memory.write(HEADER, &Rig::header(OUT, 0));
    let chain = parts(&data);
    assert_eq!(chain.len(), 128);
    assert_eq!(rig.run(&chain, None, STATUS), Some((OK, 1)));
    assert!(rig.disk[..bytes as usize] == content(&rig, &data));
}
