//! Notifications: none too few (a lost wake-up is a hang), and not too many.

use crate::vmm::*;
use spillway_core::GuestBuffers;
use spillway_export::vhost_user_blk::Change;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const STATUS: u64 = SCRATCH + 16;

#[test]
fn event_idx_2_7_7_interrupts_only_when_asked() {
    for features in [ALL_FEATURES, ALL_FEATURES & !EVENT_IDX] {
        let mut rig = Rig::new(16, features);
        drain(&rig.driver.call);
        rig.driver.want_interrupt(&rig.memory, false);
        for _ in 0..100 {
            assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
        }
        assert_eq!(drain(&rig.driver.call), 0, "nobody asked");
        rig.driver.want_interrupt(&rig.memory, true);
        assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
        assert_eq!(drain(&rig.driver.call), 1);
        if features & EVENT_IDX != 0 {
            // What was asked for is done: no more until it is asked again, across the wrap of the index as well.
            for _ in 0..100 {
                assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
            }
            assert_eq!(drain(&rig.driver.call), 0);
        }
    }
}

#[test]
fn one_interrupt_for_a_batch() {
    let mut rig = Rig::new(64, ALL_FEATURES);
    drain(&rig.driver.call);
    rig.driver.want_interrupt(&rig.memory, true);
    rig.memory.write(SCRATCH, &Rig::header(4, 0));
    for _ in 0..16 {
        let head = rig.driver.chain(&rig.memory, &[(SCRATCH, 16, false), (STATUS, 1, true)], None);
        rig.driver.offer(&rig.memory, head);
    }
    assert_eq!(rig.process().len(), 16);
    assert_eq!(drain(&rig.driver.call), 1);
}

#[test]
fn kicks_2_7_10_are_wanted_only_at_rest() {
    for features in [ALL_FEATURES, ALL_FEATURES & !EVENT_IDX] {
        let mut rig = Rig::new(16, features);
        let old = rig.driver.available_index;
        let offer = |rig: &mut Rig| {
            rig.memory.write(SCRATCH, &Rig::header(4, 0));
            let free = rig.driver.free.clone();
            let head = rig.driver.chain(&rig.memory, &[(SCRATCH, 16, false), (STATUS, 1, true)], None);
            rig.driver.offer(&rig.memory, head);
            rig.driver.free = free;
        };
        offer(&mut rig);
        assert!(rig.driver.must_kick(&rig.memory, old), "a queue that has just started is at rest");
        rig.frontend.disable_notifications(0);
        rig.process();
        for _ in 0..50 {
            let old = rig.driver.available_index;
            offer(&mut rig);
            assert!(!rig.driver.must_kick(&rig.memory, old), "it polls");
            rig.process();
        }
        assert!(!rig.frontend.enable_notifications(0), "nothing came meanwhile");
        let old = rig.driver.available_index;
        offer(&mut rig);
        assert!(rig.driver.must_kick(&rig.memory, old));
        assert!(rig.frontend.enable_notifications(0), "look again");
    }
}

#[test]
fn a_new_call_eventfd_is_raised_at_once() {
    let mut rig = Rig::new(16, ALL_FEATURES);
    let call = event();
    rig.tell(13, &0u64.to_ne_bytes(), &[call.as_fd()]);
    assert_eq!(drain(&call), 1, "the interrupt may have gone to the one before");
    // Without one nothing is raised, and nothing breaks.
    rig.tell(13, &(1u64 << 8).to_ne_bytes(), &[]);
    assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
    assert_eq!(drain(&call), 0);
}

/// Ends the back end's thread, also when the test fails.
struct End<'a> {
    stop: &'a AtomicBool,
    kick: OwnedFd,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }
}

/// A driver that sleeps on its call eventfd after each few requests, against a back end that sleeps on the kick
/// eventfd whenever the ring is empty. Any wake-up that gets lost leaves both asleep.
fn ping_pong(features: u64, rounds: u32) {
    let stop = AtomicBool::new(false);
    let (to_test, from_backend) = std::sync::mpsc::channel();
    let memory = GuestMemory::new(MEMORY_BYTES, GPA, USER);
    let memory_fd = memory.fd.try_clone().unwrap();
    std::thread::scope(|scope| {
        let stop = &stop;
        scope.spawn(move || {
            let mut rig = Rig::unconnected(8, features);
            rig.memory = GuestMemory::of(memory_fd, MEMORY_BYTES, GPA, USER);
            rig.negotiate();
            rig.add_memory();
            rig.start_queue(0);
            let kick = rig.changes.iter().find_map(|change| match change {
                Change::Kick { fd, .. } => Some(*fd),
                _ => None,
            });
            // SAFETY: the frontend holds it open.
            let kick = unsafe { BorrowedFd::borrow_raw(kick.unwrap()) };
            let driver =
                std::mem::replace(&mut rig.driver, Driver::new(8, RING_AT, features & EVENT_IDX != 0));
            to_test.send(driver).unwrap();
            let mut random = Random::new(seed("ping_pong, back end"));
            while !stop.load(Ordering::Relaxed) {
                rig.frontend.disable_notifications(0);
                while let Some(request) = rig.frontend.next(0) {
                    rig.frontend.complete(request.token, Ok(()));
                }
                rig.frontend.publish(0);
                // It polls for a while, as a real one does, and falls asleep at a moment of its own.
                let patience = Instant::now() + Duration::from_micros(random.below(30));
                while !rig.frontend.has_work(0) && Instant::now() < patience {}
                if !rig.frontend.has_work(0) && !rig.frontend.enable_notifications(0) {
                    // Long enough to be told from a lost wake-up, short enough to see `stop`.
                    wait(kick, 60);
                    drain(kick);
                }
            }
        });
        let mut driver = from_backend.recv().unwrap();
        let _end = End { stop, kick: driver.kick.try_clone().unwrap() };
        let mut random = Random::new(seed("ping_pong"));
        let header = SCRATCH;
        memory.write(header, &Rig::header(4, 0));
        let mut kicks = 0;
        for round in 0..rounds {
            let batch = 1 + random.below(3);
            let old = driver.available_index;
            let free = driver.free.clone();
            driver.want_interrupt(&memory, false);
            for _ in 0..batch {
                let head = driver.chain(&memory, &[(header, 16, false), (STATUS, 1, true)], None);
                driver.offer(&memory, head);
            }
            if driver.must_kick(&memory, old) {
                driver.kick();
                kicks += 1;
            }
            let mut left = batch;
            let patience = Instant::now() + Duration::from_micros(random.below(200));
            while left > 0 {
                while driver.take_used(&memory).is_some() {
                    left -= 1;
                }
                // Often it only polls, so that its next request meets a back end that is just falling asleep.
                if left == 0 || Instant::now() < patience {
                    continue;
                }
                if !driver.want_interrupt(&memory, true) {
                    assert!(wait(&driver.call, 20), "round {round}: lost wake-up, {left} of {batch} missing");
                    drain(&driver.call);
                }
            }
            driver.free = free;
            // Sometimes it pauses before the next.
            for _ in 0..random.below(400) {
                std::hint::spin_loop();
            }
        }
        println!("{rounds} rounds, {kicks} kicks");
    });
}

#[test]
fn no_wake_up_is_lost_with_event_idx() {
    ping_pong(ALL_FEATURES, 60_000);
}

#[test]
fn no_wake_up_is_lost_with_flags() {
    ping_pong(ALL_FEATURES & !EVENT_IDX, 60_000);
}
