//! Limits that a driver learns from a feature: enforced on nobody who has not acknowledged it, and kept wide enough for
//! every VMM's queue.

use crate::vmm::*;
use spillway_core::{Errno, GuestBuffers, Operation, Request};
use spillway_export::vhost_user_blk::{DeviceConfig, Frontend};
use std::os::fd::AsFd;

const SIZE_MAX: u64 = 1 << 1;
const SEG_MAX: u64 = 1 << 2;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;
const STATUS: u64 = SCRATCH + 16;
const GIB: u64 = 1 << 30;
const BIG_DISK_BYTES: u64 = 1 << 40;
/// What lies in [`big_memory`], which is as long as the longest descriptor and one region.
const BIG_GPA: u64 = 0x100_0000_0000;
const BIG_BYTES: u64 = 4 * GIB;

/// A VMM with 4 GiB of memory beside that of the ring, and a disk of 1 TiB that nobody carries anything out on.
fn big(features: u64) -> (Rig, GuestMemory) {
    let mut rig = Rig::unconnected(128, features);
    let (vmm, socket) = Vmm::pair();
    rig.vmm = vmm;
    let config = DeviceConfig { size_bytes: BIG_DISK_BYTES, ..config() };
    rig.frontend = Frontend::new(socket, config, 1).unwrap();
    rig.negotiate();
    rig.add_memory();
    let memory = GuestMemory::new(BIG_BYTES, BIG_GPA, 0x1000_0000_0000);
    let mut region = vec![0; 8];
    region.extend_from_slice(&memory.region());
    let fd = memory.fd.try_clone().unwrap();
    rig.tell(37, &region, &[fd.as_fd()]);
    rig.start_queue(0);
    assert!(rig.frontend.is_live(0), "{:?}", rig.frontend.take_notice());
    (rig, memory)
}

/// Offers one chain, with the usual header and status, and takes what becomes of it.
fn take(rig: &mut Rig, kind: u32, data: &[Buffer]) -> Option<Request> {
    rig.memory.write(SCRATCH, &Rig::header(kind, 8));
    let mut chain = vec![(SCRATCH, 16, false)];
    chain.extend_from_slice(data);
    chain.push((STATUS, 1, true));
    let free = rig.driver.free.clone();
    let head = rig.driver.chain(&rig.memory, &chain, None);
    rig.driver.free = free;
    rig.driver.offer(&rig.memory, head);
    let request = rig.frontend.next(0);
    rig.frontend.publish(0);
    request
}

fn end(rig: &mut Rig, request: &Request) -> (u8, u32) {
    rig.frontend.complete(request.token, Ok(()));
    rig.frontend.publish(0);
    let (_, len) = rig.driver.take_used(&rig.memory).unwrap();
    (rig.memory.read(STATUS, 1)[0], len)
}

/// 5.2.3, SIZE_MAX. UEFI's driver negotiates it not and reads a whole file by one descriptor.
#[test]
fn without_size_max_5_2_3_a_descriptor_may_be_as_long_as_it_can() {
    for features in [ALL_FEATURES, ALL_FEATURES & !INDIRECT & !EVENT_IDX, VERSION_1 | PROTOCOL_FEATURES] {
        assert_eq!(features & (SIZE_MAX | SEG_MAX), 0);
        let (mut rig, memory) = big(features);
        for len in [128 << 10, (32 << 20) + 512, 40 << 20, GIB as u32, u32::MAX - 511] {
            for (kind, writable) in [(0, true), (1, false)] {
                let request = take(&mut rig, kind, &[(BIG_GPA, len, writable)]).expect("it is served");
                assert_eq!((request.sector, request.sectors), (8, len / 512));
                // All of it can be reached, and nothing behind it.
                let last = len - 512;
                memory.write(BIG_GPA + u64::from(last), &[0x5a; 512]);
                let mut bytes = [0; 512];
                rig.frontend.copy_from_guest(request.token, last, &mut bytes).unwrap();
                assert_eq!(bytes, [0x5a; 512]);
                assert_eq!(rig.frontend.zero_guest(request.token, last, 513), Err(Errno::FAULT));
                let used = if writable { len + 1 } else { 1 };
                assert_eq!(end(&mut rig, &request), (0, used), "{kind} {len}");
            }
        }
    }
}

/// 2.7.5.2: a chain has at most 2^32 bytes.
#[test]
fn data_of_4_gib_or_more_2_7_5_2_is_an_io_error() {
    let (mut rig, _memory) = big(ALL_FEATURES);
    for data in [vec![2 * GIB as u32; 2], vec![u32::MAX - 511, 512], vec![GIB as u32; 100]] {
        for (kind, writable) in [(0, true), (1, false)] {
            let data: Vec<Buffer> = data.iter().map(|&len| (BIG_GPA, len, writable)).collect();
            assert_eq!(take(&mut rig, kind, &data), None);
            assert!(rig.driver.take_used(&rig.memory).is_some(), "it is answered");
            assert_eq!(rig.memory.read(STATUS, 1), [1]);
        }
    }
    assert!(take(&mut rig, 0, &[(BIG_GPA, 2 * GIB as u32, true), (BIG_GPA, GIB as u32, true)]).is_some());
}

/// 5.2.3, SEG_MAX: what is promised fits the smallest queue that VMMs make, without indirect descriptors.
#[test]
fn seg_max_5_2_4_segments_fit_a_queue_of_128_without_tables() {
    let mut rig = Rig::new(128, ALL_FEATURES & !INDIRECT);
    let asked = rig.ask(24, &[12u32, 4, 0].map(u32::to_ne_bytes).concat());
    let seg_max = u32::from_le_bytes(asked[12..].try_into().unwrap());
    assert_eq!(seg_max + 2, 128, "header and status take one each");
    for kind in [0, 1] {
        rig.memory.write(SCRATCH, &Rig::header(kind, 0));
        let data = (0..u64::from(seg_max)).map(|n| (SCRATCH + 0x10000 + n * 1024, 512, kind == 0));
        let chain: Vec<Buffer> =
            [(SCRATCH, 16, false)].into_iter().chain(data).chain([(STATUS, 1, true)]).collect();
        let used = if kind == 0 { seg_max * 512 + 1 } else { 1 };
        assert_eq!(rig.run(&chain, None, STATUS), Some((0, used)), "{kind}");
    }
}

/// 5.2.3, SEG_MAX: not acknowledged, and acknowledged by a driver that keeps no count.
#[test]
fn more_segments_than_seg_max_5_2_3_are_served() {
    for features in [ALL_FEATURES, ALL_FEATURES | SEG_MAX] {
        let mut rig = Rig::new(128, features);
        for segments in [127, 254, 1022] {
            rig.memory.write(SCRATCH, &Rig::header(0, 0));
            let data = (0..segments).map(|n| (SCRATCH + 0x10000 + n * 1024, 512, true));
            let chain: Vec<Buffer> =
                [(SCRATCH, 16, false)].into_iter().chain(data).chain([(STATUS, 1, true)]).collect();
            let used = Some((0, segments as u32 * 512 + 1));
            assert_eq!(rig.run(&chain, Some(SCRATCH + 0x4000), STATUS), used, "{segments}");
        }
    }
}

/// 5.2.3, DISCARD and WRITE_ZEROES: their limits are those of the ranges that a request can name.
#[test]
fn discards_and_write_zeroes_5_2_3_need_no_acknowledgement() {
    for features in [ALL_FEATURES, ALL_FEATURES | DISCARD | WRITE_ZEROES] {
        let (mut rig, _memory) = big(features);
        for (kind, operation) in [(11, Operation::Discard), (13, Operation::WriteZeroes { fua: false })] {
            // As many sectors as `max_discard_sectors` and `max_write_zeroes_sectors` say.
            let range = [8u64.to_le_bytes(), u64::from((1u32 << 23) - 1).to_le_bytes()].concat();
            rig.memory.write(SCRATCH + 64, &range);
            let request = take(&mut rig, kind, &[(SCRATCH + 64, 16, false)]).unwrap();
            assert_eq!((request.operation, request.sectors), (operation, (1 << 23) - 1));
            assert_eq!(end(&mut rig, &request), (0, 1));
        }
    }
}

/// Long requests hold no memory, but whoever waits for them: a reset, the other queues.
#[test]
fn the_data_under_way_is_bounded() {
    let (mut rig, _memory) = big(ALL_FEATURES);
    let mut taken = Vec::new();
    for _ in 0..40 {
        let head = rig.driver.chain(
            &rig.memory,
            &[(SCRATCH, 16, false), (BIG_GPA, GIB as u32, true), (STATUS, 1, true)],
            None,
        );
        rig.memory.write(SCRATCH, &Rig::header(0, 8));
        rig.driver.offer(&rig.memory, head);
        taken.extend(rig.frontend.next(0));
    }
    assert_eq!(taken.len(), 2, "of 1 GiB each");
    assert!(!rig.frontend.has_work(0) && !rig.frontend.enable_notifications(0), "it may sleep");
    let mut done = 0;
    while let Some(request) = taken.pop() {
        rig.frontend.complete(request.token, Ok(()));
        rig.frontend.publish(0);
        done += 1;
        taken.extend(rig.frontend.next(0));
    }
    assert_eq!(done, 40, "the end of one is what brings the next");
}
