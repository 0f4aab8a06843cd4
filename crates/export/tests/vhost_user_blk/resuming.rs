//! A session that outlives the process that serves it: a supervisor relays the messages and tells the next process
//! what the last one had carried out. In a relayed rig a process dies around every single message.

use crate::vmm::*;
use spillway_core::Request;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

const DATA: u64 = READ_DATA;

/// Set up through the supervisor, in the order of each kind of front end.
fn rig(features: u64) -> Rig {
    let mut rig = Rig::relayed(16, features);
    rig.negotiate();
    rig.add_memory();
    rig.start_queue(0);
    assert!(rig.frontend.is_live(0), "{:?}", rig.frontend.take_notice());
    rig
}

fn used(rig: &mut Rig) -> Vec<u16> {
    std::iter::from_fn(|| rig.driver.take_used(&rig.memory).map(|(head, _)| head)).collect()
}

#[test]
fn a_session_is_set_up_although_a_process_dies_around_every_message() {
    for features in [ALL_FEATURES, VERSION_1] {
        let mut rig = rig(features);
        for n in 0..40 {
            let read = rig.simple(0, n, Some((DATA, 512, true)));
            assert_eq!(read, Some((0, 513)), "sector {n}");
            assert_eq!(rig.memory.read(DATA, 512), rig.disk[n as usize * 512..][..512]);
            if n % 7 == 0 {
                rig.die();
            }
        }
    }
}

#[test]
fn requests_in_flight_are_done_by_the_next_process_without_a_table_of_the_front_end() {
    let mut rig = rig(ALL_FEATURES);
    // The ring goes round more than once before, and after.
    for round in 0..50 {
        let free = rig.driver.free.clone();
        let heads: Vec<u16> = (0..5).map(|n| rig.offer(n)).collect();
        let requests: Vec<Request> = (0..4).map(|_| rig.frontend.next(0).unwrap()).collect();
        // Out of order: 2 is given back; 1 is finished but was not yet published when the end came.
        rig.finish(&requests[2]);
        rig.frontend.publish(0);
        rig.finish(&requests[1]);
        rig.die();
        assert!(rig.frontend.is_live(0) && rig.frontend.has_work(0), "round {round}");
        let taken = rig.process();
        assert_eq!(taken.iter().map(|r| r.sector).collect::<Vec<_>>(), [0, 1, 3, 4], "round {round}");
        let mut given_back = used(&mut rig);
        given_back.sort_unstable();
        let mut offered = heads.clone();
        offered.sort_unstable();
        assert_eq!(given_back, offered, "round {round}: each once");
        rig.driver.free = free;
    }
}

#[test]
fn a_queue_that_features_enabled_is_enabled_in_the_next_process() {
    let mut rig = rig(ALL_FEATURES);
    rig.tell(18, &Rig::vring(0, 0), &[]);
    rig.tell(2, &(ALL_FEATURES & !PROTOCOL_FEATURES).to_ne_bytes(), &[]);
    rig.die();
    assert!(rig.frontend.is_live(0));
}

#[test]
fn a_queue_that_was_stopped_starts_where_the_front_end_says() {
    let mut rig = rig(ALL_FEATURES);
    assert!(rig.simple(0, 1, Some((DATA, 512, true))).is_some());
    let state = rig.ask(11, &Rig::vring(0, 0));
    assert_eq!(state, Rig::vring(0, 1), "one request was taken");
    rig.die();
    assert!(!rig.frontend.is_live(0), "stopped stays stopped");
    // As after a reboot of the guest: a new ring, from its beginning.
    rig.memory.u16(rig.driver.used + 2).store(0, Ordering::Relaxed);
    rig.memory.u16(rig.driver.available + 2).store(0, Ordering::Relaxed);
    rig.driver = Driver::new(16, RING_AT, true);
    rig.start_queue(0);
    for n in 0..5 {
        assert!(rig.simple(0, n, Some((DATA, 512, true))).is_some());
        rig.die();
    }
}

#[test]
fn regions_that_went_and_a_device_that_was_reset_stay_so() {
    let mut rig = rig(ALL_FEATURES);
    let records = |rig: &Rig| rig.relay.as_ref().unwrap().record.packets().count();
    let all = records(&rig);
    for n in 0..5 {
        assert!(rig.simple(0, n, Some((DATA, 512, true))).is_some());
    }
    let mut region = vec![0; 8];
    region.extend_from_slice(&rig.memory.region());
    rig.tell(38, &region, &[]);
    assert_eq!(records(&rig), all - 1);
    rig.die();
    assert!(!rig.frontend.is_live(0), "its ring is not mapped");
    rig.add_memory();
    assert!(rig.frontend.is_live(0), "and now it is");
    assert!(!rig.frontend.has_work(0), "nothing that was answered is done again");
    assert!(rig.simple(0, 3, Some((DATA, 512, true))).is_some());

    // SET_MEM_TABLE takes the place of all.
    let mut table = 1u64.to_ne_bytes().to_vec();
    table.extend_from_slice(&rig.memory.region());
    let fd = rig.memory.fd.try_clone().unwrap();
    rig.tell(5, &table, &[fd.as_fd()]);
    assert_eq!(records(&rig), all);
    rig.die();
    assert!(rig.simple(0, 4, Some((DATA, 512, true))).is_some());

    rig.tell(34, &[], &[]);
    rig.die();
    assert!(!rig.frontend.is_live(0));
    assert_eq!(records(&rig), 3, "its owner, protocol features and memory outlive the reset of the device");
}

#[test]
fn a_table_cannot_be_lent_to_a_queue_that_runs() {
    let mut rig = rig(ALL_FEATURES);
    let mut description = 16448u64.to_ne_bytes().to_vec();
    description.extend_from_slice(&0u64.to_ne_bytes());
    description.extend_from_slice(&[1, 0, 16, 0, 0, 0, 0, 0]);
    let fd = rig.memory.fd.try_clone().unwrap();
    assert!(!rig.try_tell(32, &description, &[fd.as_fd()]), "its requests are in another");
    rig.die();
    assert!(rig.simple(0, 3, Some((DATA, 512, true))).is_some());
}

#[test]
fn surplus_descriptors_are_not_kept() {
    let mut rig = rig(ALL_FEATURES);
    let kept = |rig: &Rig| rig.relay.as_ref().unwrap().record.packets().map(|p| p.fds.len()).sum::<usize>();
    let before = kept(&rig);
    let fd = rig.memory.fd.try_clone().unwrap();
    for request in [2, 18] {
        let payload = if request == 2 { ALL_FEATURES.to_ne_bytes().to_vec() } else { Rig::vring(0, 1) };
        rig.tell(request, &payload, &[fd.as_fd(); 8]);
    }
    // A kick that says that none comes with it.
    rig.tell(14, &(1u64 << 8).to_ne_bytes(), &[fd.as_fd(); 8]);
    assert_eq!(kept(&rig), before);
}

#[test]
fn what_was_refused_is_not_remembered() {
    let mut rig = rig(ALL_FEATURES);
    let before = rig.relay.as_ref().unwrap().record.packets().count();
    assert!(!rig.try_tell(8, &Rig::vring(0, 32), &[]), "a started queue keeps its size");
    assert!(!rig.try_tell(10, &Rig::vring(99, 0), &[]), "no such queue");
    assert_eq!(rig.relay.as_ref().unwrap().record.packets().count(), before);
    rig.die();
    assert!(rig.simple(0, 3, Some((DATA, 512, true))).is_some());
}
