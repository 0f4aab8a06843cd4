//! Rules of the virtio (1.3) and vhost-user specifications that no other file here is about, by clause.
//! `docs/virtio-blk-conformance.md` lists all rules with their tests.

use crate::vmm::*;
use spillway_core::{GuestBuffers, Operation};
use std::os::fd::AsFd;

const STATUS: u64 = SCRATCH + 16;
const DATA: u64 = SCRATCH + 4096;
const TABLE: u64 = SCRATCH + 0x2000;
const CONFIG_BYTES: u32 = 60;
const WRITEBACK: usize = 32;

fn config_space(rig: &mut Rig) -> Vec<u8> {
    let payload: Vec<u8> = [0, CONFIG_BYTES, 0].iter().flat_map(|n| n.to_ne_bytes()).collect();
    rig.ask(24, &payload)[12..].to_vec()
}

fn u64_of(payload: &[u8]) -> u64 {
    u64::from_ne_bytes(payload.try_into().unwrap())
}

/// Offers a flush, and leaves the queue to the caller.
fn offer_flush(rig: &mut Rig) {
    rig.memory.write(SCRATCH, &Rig::header(4, 0));
    let free = rig.driver.free.clone();
    let head = rig.driver.chain(&rig.memory, &[(SCRATCH, 16, false), (STATUS, 1, true)], None);
    rig.driver.offer(&rig.memory, head);
    rig.driver.free = free;
}

/// The kind of a write that the driver offers now.
fn write(rig: &mut Rig) -> Operation {
    rig.memory.write(SCRATCH, &Rig::header(1, 0));
    let free = rig.driver.free.clone();
    let buffers = [(SCRATCH, 16, false), (DATA, 512, false), (STATUS, 1, true)];
    let head = rig.driver.chain(&rig.memory, &buffers, None);
    rig.driver.offer(&rig.memory, head);
    rig.driver.free = free;
    rig.process()[0].operation
}

#[test]
fn features_2_2_2_are_those_that_are_supported_and_any_of_them_are_accepted() {
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    let offered = u64_of(&rig.ask(1, &[]));
    // Nothing reserved, nothing of another device or transport; what needs another bit comes with it.
    let expected = [2, 6, 9, 10, 11, 12, 13, 14, 28, 29, 30, 32].iter().fold(0, |bits, bit| bits | 1 << bit);
    assert_eq!(offered, expected);
    let mut random = Random::new(seed("features_2_2_2"));
    for _ in 0..300 {
        let subset = offered & random.next();
        let mut rig = Rig::new(8, subset);
        assert_eq!(rig.simple(0, 1, Some((DATA, 512, true))), Some((0, 513)), "{subset:#x}");
        // The same features again after a reset.
        rig.tell(34, &[], &[]);
        rig.tell(2, &subset.to_ne_bytes(), &[]);
        rig.memory.write(RING_AT, &[0; 0x1000]);
        rig.driver = Driver::new(8, RING_AT, subset & EVENT_IDX != 0);
        rig.start_queue(0);
        assert_eq!(rig.simple(0, 1, Some((DATA, 512, true))), Some((0, 513)), "{subset:#x}, after a reset");
    }
}

#[test]
fn nothing_happens_before_a_queue_has_started_2_1_2() {
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    rig.negotiate();
    rig.add_memory();
    rig.tell(8, &Rig::vring(0, 8), &[]);
    rig.tell(10, &Rig::vring(0, 0), &[]);
    let addresses = rig.vring_address(0);
    rig.tell(9, &addresses, &[]);
    let call = rig.driver.call.try_clone().unwrap();
    rig.tell(13, &0u64.to_ne_bytes(), &[call.as_fd()]);
    rig.tell(18, &Rig::vring(0, 1), &[]);
    offer_flush(&mut rig);
    let before = rig.memory.read(GPA, 0x20000);
    assert_eq!(rig.process(), []);
    assert!(rig.memory.read(GPA, 0x20000) == before, "the ring was touched");
    assert_eq!(drain(&rig.driver.call), 0);
    let kick = rig.driver.kick.try_clone().unwrap();
    rig.tell(12, &0u64.to_ne_bytes(), &[kick.as_fd()]);
    assert_eq!(rig.process().len(), 1, "what was there before the start is found");
    assert!(rig.driver.take_used(&rig.memory).is_some());
}

/// 2.4.2; vhost-user, "Suspended device state".
#[test]
fn a_stopped_device_2_4_2_writes_nothing_and_interrupts_nobody() {
    for request in [11, 34] {
        let mut rig = Rig::new(8, ALL_FEATURES);
        assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
        match request {
            11 => assert_eq!(rig.ask(11, &Rig::vring(0, 0))[4..], 1u32.to_ne_bytes()),
            _ => rig.tell(34, &[], &[]),
        }
        drain(&rig.driver.call);
        rig.driver.want_interrupt(&rig.memory, true);
        offer_flush(&mut rig);
        let before = rig.memory.read(GPA, 0x20000);
        let call = event();
        rig.tell(13, &0u64.to_ne_bytes(), &[call.as_fd()]);
        rig.driver.kick();
        assert!(!rig.frontend.has_work(0) && !rig.frontend.enable_notifications(0));
        rig.frontend.disable_notifications(0);
        assert_eq!(rig.process(), [], "{request}");
        assert!(rig.memory.read(GPA, 0x20000) == before, "{request}: guest memory was written");
        assert_eq!((drain(&rig.driver.call), drain(&call)), (0, 0), "{request}");
        assert!(rig.vmm.reply().is_none(), "{request}: nobody asked");
        assert_ne!(u64_of(&rig.ask(1, &[])), 0, "{request}: questions are answered");
    }
}

#[test]
fn all_of_the_configuration_2_5_2_can_be_read_before_features_are_chosen() {
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    let before = config_space(&mut rig);
    rig.negotiate();
    assert_eq!(config_space(&mut rig), before);
    // 5.2.5.2: the padding is zero. 5.2.6.2: write-zeroes may give space back.
    assert_eq!((before[33], &before[57..60]), (0, &[0; 3][..]));
    assert_eq!(before[56], 1, "write_zeroes_may_unmap");
}

#[test]
fn writeback_5_2_5_2_is_0_where_nothing_can_be_flushed() {
    for (features, shown) in [
        (ALL_FEATURES, 1),
        (ALL_FEATURES & !FLUSH, 0),
        // Not negotiated, the field says nothing to the driver.
        (ALL_FEATURES & !FLUSH & !CONFIG_WCE, 1),
    ] {
        let mut rig = Rig::new(8, features);
        assert_eq!(config_space(&mut rig)[WRITEBACK], shown, "{features:#x}");
        assert_eq!(write(&mut rig), Operation::Write { fua: features & FLUSH == 0 }, "{features:#x}");
        // The next driver, say the system after its boot loader, gets the disk's own setting.
        rig.tell(34, &[], &[]);
        rig.tell(2, &ALL_FEATURES.to_ne_bytes(), &[]);
        assert_eq!(config_space(&mut rig)[WRITEBACK], 1, "{features:#x}");
        assert!(rig.frontend.writeback(), "{features:#x}");
    }
}

#[test]
fn a_driver_that_has_chosen_no_features_5_2_6_2_writes_through() {
    let mut rig = Rig::unconnected(8, 0);
    rig.add_memory();
    rig.start_queue(0);
    assert_eq!(write(&mut rig), Operation::Write { fua: true });
}

#[test]
fn what_was_not_offered_5_2_6_2_is_unsupported_and_moves_nothing() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    let disk = rig.disk.clone();
    // Lifetime, secure erase, then all requests of zones.
    for kind in [10, 14, 15, 16, 18, 20, 22, 24, 26] {
        for writable in [false, true] {
            rig.memory.write(DATA, &[0x5a; 512]);
            let used = u32::from(!writable);
            assert_eq!(rig.simple(kind, 0, Some((DATA, 512, writable))), Some((2, used)), "{kind}");
            assert_eq!(rig.memory.read(DATA, 512), [0x5a; 512], "{kind}");
        }
    }
    assert!(rig.disk == disk);
}

#[test]
fn descriptors_and_readable_buffers_2_7_5_1_are_never_written() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    for kind in [0, 1, 4, 8, 11, 13, 99] {
        for indirect in [false, true] {
            let mut readable = Rig::header(kind, 0);
            let (mut range, content) = ([0; 16], [0x77; 1024]);
            range[8] = 8;
            match kind {
                1 => readable.extend_from_slice(&content),
                11 | 13 => readable.extend_from_slice(&range),
                _ => {}
            }
            rig.memory.write(DATA, &readable);
            let mut buffers = vec![(DATA, readable.len() as u32, false)];
            match kind {
                0 => buffers.push((DATA + 0x800, 1024, true)),
                8 => buffers.push((DATA + 0x800, 20, true)),
                _ => {}
            }
            buffers.push((STATUS, 1, true));
            rig.memory.write(STATUS, &[0xee]);
            let free = rig.driver.free.clone();
            let head = rig.driver.chain(&rig.memory, &buffers, indirect.then_some(TABLE));
            let seen = |rig: &Rig| {
                let tables = (rig.memory.read(RING_AT, 8 * 16), rig.memory.read(TABLE, 64));
                (tables, rig.memory.read(DATA, readable.len()))
            };
            let before = seen(&rig);
            rig.driver.offer(&rig.memory, head);
            rig.process();
            assert!(rig.driver.take_used(&rig.memory).is_some(), "{kind}");
            assert!(rig.memory.read(STATUS, 1) != [0xee], "{kind}");
            assert_eq!(seen(&rig), before, "{kind}, indirect {indirect}");
            rig.driver.free = free;
        }
    }
}

#[test]
fn interrupts_2_7_7_2_follow_the_mode_that_was_negotiated() {
    for (features, event_idx) in [(ALL_FEATURES, true), (ALL_FEATURES & !EVENT_IDX, false)] {
        let mut rig = Rig::new(8, features);
        let (flags, used_event) = (rig.driver.available, rig.driver.available + 4 + 8 * 2);
        let interrupts = |rig: &mut Rig, flag: u16, event: u16| {
            drain(&rig.driver.call);
            rig.memory.write(flags, &flag.to_le_bytes());
            rig.memory.write(used_event, &event.to_le_bytes());
            assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
            drain(&rig.driver.call) == 1
        };
        for _ in 0..20 {
            let (now, passed) = (rig.driver.used_index, rig.driver.used_index.wrapping_sub(1));
            assert!(interrupts(&mut rig, u16::from(event_idx), if event_idx { now } else { passed }));
            let (now, passed) = (rig.driver.used_index, rig.driver.used_index.wrapping_sub(1));
            assert!(!interrupts(&mut rig, u16::from(!event_idx), if event_idx { passed } else { now }));
        }
    }
}

#[test]
fn the_used_ring_s_flags_2_7_10_2_are_0_with_event_idx_and_else_0_or_1() {
    for features in [ALL_FEATURES, ALL_FEATURES & !EVENT_IDX] {
        let mut rig = Rig::new(8, features);
        let mut seen = std::collections::BTreeSet::new();
        for round in 0..40 {
            match round % 4 {
                0 => rig.frontend.disable_notifications(0),
                1 => drop(rig.frontend.enable_notifications(0)),
                _ => assert_eq!(rig.simple(4, 0, None), Some((0, 1))),
            }
            seen.insert(rig.memory.u16(rig.driver.used).load(std::sync::atomic::Ordering::Relaxed));
        }
        let expected: &[u16] = if features & EVENT_IDX != 0 { &[0] } else { &[0, 1] };
        assert!(seen.iter().eq(expected), "{seen:?}");
    }
}

#[test]
fn spurious_notifications_2_7_10_2_are_nothing() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
    drain(&rig.driver.call);
    rig.driver.want_interrupt(&rig.memory, true);
    let before = rig.memory.read(GPA, 0x20000);
    for _ in 0..100 {
        rig.driver.kick();
        assert_eq!(rig.process(), []);
    }
    assert!(rig.memory.read(GPA, 0x20000) == before);
    assert_eq!(drain(&rig.driver.call), 0);
    assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
}

/// 2.7.8.2: element and content first, then the index.
#[test]
fn used_elements_2_7_8_2_are_whole_before_the_index_moves() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    rig.memory.write(SCRATCH, &Rig::header(0, 3));
    let buffers = [(SCRATCH, 16, false), (DATA, 512, true), (STATUS, 1, true)];
    let head = rig.driver.chain(&rig.memory, &buffers, None);
    rig.driver.offer(&rig.memory, head);
    let request = rig.frontend.next(0).unwrap();
    rig.perform(&request).unwrap();
    rig.frontend.complete(request.token, Ok(()));
    let element = [u32::from(head).to_le_bytes(), 513u32.to_le_bytes()].concat();
    assert_eq!(rig.memory.read(rig.driver.used + 4, 8), element);
    assert_eq!(rig.memory.read(DATA, 512), rig.disk[3 * 512..4 * 512]);
    assert_eq!(rig.memory.read(STATUS, 1), [0]);
    assert_eq!(rig.driver.take_used(&rig.memory), None, "the index has not moved");
    rig.frontend.publish(0);
    assert_eq!(rig.driver.take_used(&rig.memory), Some((head, 513)));
}

/// vhost-user, "Ring states": enabling is kept track of while the ring is stopped.
#[test]
fn a_stopped_ring_can_be_enabled_and_disabled() {
    for enabled in [false, true] {
        let mut rig = Rig::new(8, ALL_FEATURES);
        rig.ask(11, &Rig::vring(0, 0));
        rig.tell(18, &Rig::vring(0, u32::from(!enabled)), &[]);
        rig.tell(18, &Rig::vring(0, u32::from(enabled)), &[]);
        let kick = rig.driver.kick.try_clone().unwrap();
        rig.tell(12, &0u64.to_ne_bytes(), &[kick.as_fd()]);
        assert_eq!(rig.frontend.is_live(0), enabled);
        offer_flush(&mut rig);
        assert_eq!(rig.process().len(), usize::from(enabled));
        rig.tell(18, &Rig::vring(0, 1), &[]);
        assert_eq!(rig.process().len(), usize::from(!enabled), "a disabled ring keeps what is on it");
    }
}

/// vhost-user, "Ring states": a disabled ring is enabled by features without VHOST_USER_F_PROTOCOL_FEATURES.
#[test]
fn features_without_the_protocol_enable_all_rings() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    rig.tell(18, &Rig::vring(0, 0), &[]);
    assert!(!rig.frontend.is_live(0));
    rig.tell(2, &(ALL_FEATURES & !PROTOCOL_FEATURES).to_ne_bytes(), &[]);
    assert!(rig.frontend.is_live(0));
    rig.tell(2, &ALL_FEATURES.to_ne_bytes(), &[]);
    rig.tell(18, &Rig::vring(0, 0), &[]);
    assert!(!rig.frontend.is_live(0));
}

/// vhost-user, GET_PROTOCOL_FEATURES and SET_PROTOCOL_FEATURES.
#[test]
fn protocol_features_come_before_features_too() {
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    let offered = rig.ask(15, &[]);
    rig.tell(16, &offered, &[]);
    assert!(rig.try_tell(2, &ALL_FEATURES.to_ne_bytes(), &[]), "REPLY_ACK holds from here on");
    rig.add_memory();
    rig.start_queue(0);
    assert!(rig.frontend.is_live(0));
}

/// vhost-user, REPLY_ACK.
#[test]
fn an_acknowledgement_comes_where_it_was_negotiated_and_asked_for_and_no_reply_twice() {
    let mut rig = Rig::unconnected(8, ALL_FEATURES);
    let send = |rig: &mut Rig, request: u32, flags: u32, payload: &[u8]| {
        rig.vmm.send_bytes(&Vmm::message(request, flags, payload), &[]);
        rig.frontend.on_readable(&mut rig.changes).unwrap();
        let reply = rig.vmm.reply();
        assert!(rig.vmm.reply().is_none(), "one reply at most");
        reply.map(|(answered, payload, _)| (answered, payload))
    };
    assert_eq!(send(&mut rig, 3, 1 | 8, &[]), None, "not negotiated");
    let offered = send(&mut rig, 15, 1, &[]).unwrap().1;
    send(&mut rig, 16, 1, &offered);
    let zero = 0u64.to_ne_bytes().to_vec();
    assert_eq!(send(&mut rig, 3, 1 | 8, &[]), Some((3, zero)));
    assert_eq!(send(&mut rig, 3, 1, &[]), None, "not asked for");
    for request in [1, 15, 17, 36] {
        let asked = send(&mut rig, request, 1 | 8, &[]);
        assert_eq!(asked, send(&mut rig, request, 1, &[]), "{request}");
        assert!(asked.is_some_and(|(answered, payload)| answered == request && u64_of(&payload) != 0));
    }
}

/// vhost-user, RESET_OWNER: to be ignored, or to disable rings; never to lose the connection's state.
#[test]
fn reset_owner_loses_nothing() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    rig.tell(4, &[], &[]);
    assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
}

/// vhost-user, ADD_MEM_REG and REM_MEM_REG.
#[test]
fn a_region_is_removed_by_its_addresses_and_size_whatever_the_offset() {
    let mut rig = Rig::new(8, ALL_FEATURES);
    let other = GuestMemory::new(8192, 0x1000, 0x9000_0000);
    let payload = |words: [u64; 4]| -> Vec<u8> {
        std::iter::once(0).chain(words).flat_map(|word: u64| word.to_ne_bytes()).collect()
    };
    let fd = other.fd.try_clone().unwrap();
    assert!(rig.try_tell(37, &payload([other.gpa, 4096, other.user, 4096]), &[fd.as_fd()]));
    assert_eq!(rig.simple(0, 2, Some((other.gpa, 512, true))), Some((0, 513)));
    assert_eq!(other.read(other.gpa + 4096, 512), rig.disk[2 * 512..3 * 512], "from its offset on");
    for wrong in [[other.gpa + 4096, 4096, other.user, 4096], [other.gpa, 8192, other.user, 4096]] {
        assert!(!rig.try_tell(38, &payload(wrong), &[]));
    }
    assert!(!rig.try_tell(38, &payload([other.gpa, 4096, other.user + 4096, 4096]), &[]));
    assert_eq!(rig.simple(0, 2, Some((other.gpa, 512, true))), Some((0, 513)));
    assert!(rig.try_tell(38, &payload([other.gpa, 4096, other.user, 0]), &[]), "the offset is ignored");
    assert_eq!(rig.simple(0, 2, Some((other.gpa, 512, true))), Some((1, 0)));
}

#[test]
fn the_document_names_tests_that_are_there() {
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap();
    let document = read(crates.join("../docs/virtio-blk-conformance.md"));
    let here = std::fs::read_dir(crates.join("export/tests/vhost_user_blk")).unwrap();
    let more = [
        "export/tests/vhost_user_blk_driver.rs",
        "cli/tests/serving.rs",
        "../tests/system/hostile.rs",
        "../tests/system/vmms.rs",
        "../tests/system/firmware.rs",
        "../tests/system/viostor.rs",
    ];
    let more = more.map(|p| crates.join(p));
    let tests: String = here.map(|entry| entry.unwrap().path()).chain(more).map(read).collect();
    let names: Vec<_> = document
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|name| {
            name.matches('_').count() > 1
                && name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'_' | b'0'..=b'9'))
                && *name != "write_zeroes_may_unmap"
        })
        .collect();
    assert!(names.len() > 90, "{}", names.len());
    for name in names {
        assert!(tests.contains(&format!("fn {name}()")), "{name} is not a test");
    }
}
