//! A guest that rewrites what it asked for, after it was read and while it is.

use crate::vmm::*;
use spillway_core::Operation;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

const STATUS: u64 = SCRATCH + 16;
const DATA: u64 = SCRATCH + 4096;
const TABLE: u64 = SCRATCH + 0x2000;
const IN: u32 = 0;
const ZEROES: u32 = 13;

fn range(sector: u64, sectors: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat()
}

#[test]
fn what_is_rewritten_after_it_was_taken_changes_nothing() {
    for table in [None, Some(TABLE)] {
        for kind in [IN, ZEROES] {
            let mut rig = Rig::new(8, ALL_FEATURES);
            let before = rig.disk.clone();
            rig.memory.write(SCRATCH, &Rig::header(kind, 9));
            rig.memory.write(DATA, &range(17, 3));
            let data = if kind == IN { (DATA, 4096, true) } else { (DATA, 16, false) };
            let buffers = [(SCRATCH, 16, false), data, (STATUS, 1, true)];
            let head = rig.driver.chain(&rig.memory, &buffers, table);
            rig.driver.offer(&rig.memory, head);
            let request = rig.frontend.next(0).expect("a request");

            // Header, range, descriptors and table: all of it now points somewhere else.
            let all = rig.memory.read(GPA, MEMORY_BYTES as usize);
            rig.memory.write(SCRATCH, &Rig::header(1, 4));
            rig.memory.write(DATA, &range(0, 2000));
            for at in [rig.driver.descriptors, TABLE] {
                for index in 0..8 {
                    Driver::set_descriptor(&rig.memory, at, index, (SCRATCH + 0x8000, 64, true), 0, index);
                }
            }
            rig.finish(&request);
            rig.frontend.publish(0);

            let len = if kind == IN { 4097 } else { 1 };
            assert_eq!(rig.driver.take_used(&rig.memory), Some((head, len)));
            assert_eq!(rig.memory.read(STATUS, 1), [0]);
            let aside = (SCRATCH + 0x8000 - GPA) as usize;
            assert_eq!(rig.memory.read(SCRATCH + 0x8000, 64), all[aside..aside + 64]);
            if kind == IN {
                assert_eq!(rig.memory.read(DATA, 4096), before[9 * 512..9 * 512 + 4096]);
                assert_eq!(rig.disk, before);
            } else {
                assert!(matches!(request.operation, Operation::WriteZeroes { .. }));
                assert_eq!((request.sector, request.sectors), (17, 3));
            }
        }
    }
}

#[test]
fn what_changes_while_it_is_read_is_one_or_the_other_or_refused() {
    const REQUESTS: usize = 300_000;
    let rig_on = |memory: GuestMemory| {
        let mut rig = Rig::unconnected(8, ALL_FEATURES);
        rig.memory = memory;
        rig.negotiate();
        rig.add_memory();
        rig.start_queue(0);
        let buffers = [(SCRATCH, 16, false), (DATA, 512, true), (STATUS, 1, true)];
        let head = rig.driver.chain(&rig.memory, &buffers, Some(TABLE));
        (rig, head)
    };
    let first = GuestMemory::new(MEMORY_BYTES, GPA, USER);
    let again = || GuestMemory::of(first.fd.try_clone().unwrap(), MEMORY_BYTES, GPA, USER);
    let (flipping, mut random) = (again(), Random::new(seed("what_changes")));
    let over = AtomicBool::new(false);
    let (mut right, mut refused, mut broken) = (0, 0, 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let good = [(TABLE, SCRATCH, 16), (TABLE + 16, DATA, 512), (TABLE + 32, STATUS, 1)];
            while !over.load(Ordering::Relaxed) {
                let (at, address, len) = good[random.below(3) as usize];
                let wild = random.one_in(2);
                match random.below(5) {
                    0 if wild => flipping.write(at, &(GPA + MEMORY_BYTES - 8).to_le_bytes()),
                    0 => flipping.write(at, &u64::to_le_bytes(address)),
                    1 if wild => flipping.write(at + 8, &0xffff_fff0u32.to_le_bytes()),
                    1 => flipping.write(at + 8, &u32::to_le_bytes(len)),
                    2 if wild => flipping.write(SCRATCH, &Rig::header(IN, u64::MAX / 512)),
                    2 => flipping.write(SCRATCH, &Rig::header(IN, 9)),
                    3 if wild => flipping.write(SCRATCH, &Rig::header(ZEROES, 0)),
                    3 => flipping.write(SCRATCH, &Rig::header(IN, 9)),
                    _ if wild => flipping.write(DATA, &range(DISK_BYTES / 512 - 1, 0xffff)),
                    _ => flipping.write(DATA, &range(3, 1)),
                }
            }
        });
        let (mut rig, mut head) = rig_on(again());
        for _ in 0..REQUESTS {
            rig.driver.offer(&rig.memory, head);
            let taken = rig.process();
            for request in &taken {
                assert!((request.sector + u64::from(request.sectors)) * 512 <= DISK_BYTES, "{request:?}");
            }
            match rig.driver.take_used(&rig.memory) {
                Some((id, _)) => {
                    assert_eq!(id, head);
                    *(if taken.is_empty() { &mut refused } else { &mut right }) += 1;
                }
                // What no driver may do stops the queue.
                None => {
                    assert!(!rig.frontend.is_live(0) && taken.is_empty());
                    broken += 1;
                    let memory = again();
                    memory.write(RING_AT, &[0; 4096]);
                    (rig, head) = rig_on(memory);
                }
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    println!("{right} carried out, {refused} refused, {broken} stopped the queue");
    assert!(right > 100 && refused > 100, "{right} carried out, {refused} refused: it tries too little");
}
