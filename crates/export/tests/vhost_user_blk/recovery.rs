//! The in-flight table: what a new back end does with what an earlier one left (vhost-user, "Inflight I/O
//! tracking").

use crate::vmm::*;
use rustix::fs::{SealFlags, fcntl_get_seals};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use spillway_core::{Errno, GuestBuffers, Request};
use spillway_export::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};

const DATA: u64 = READ_DATA;

/// The table as the VMM keeps it.
pub struct InflightTable {
    pub fd: OwnedFd,
    pub description: Vec<u8>,
    base: *mut u8,
    len: usize,
}

impl InflightTable {
    pub fn create(rig: &mut Rig, queues: u16, size: u16) -> InflightTable {
        let mut wanted = vec![0; 16];
        wanted.extend_from_slice(&queues.to_ne_bytes());
        wanted.extend_from_slice(&size.to_ne_bytes());
        wanted.resize(24, 0);
        rig.tell(31, &wanted, &[]);
        let (request, description, mut fds) = rig.vmm.reply().unwrap();
        assert_eq!((request, description.len(), fds.len()), (31, 24, 1));
        assert_eq!(description[16..20], wanted[16..20]);
        let len = u64::from_ne_bytes(description[..8].try_into().unwrap()) as usize;
        let fd = fds.remove(0);
        // SAFETY: a new mapping.
        let base = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &fd, 0).unwrap().cast()
        };
        InflightTable { fd, description, base, len }
    }

    pub fn give(&self, rig: &mut Rig) {
        let fd = self.fd.try_clone().unwrap();
        assert!(rig.try_tell(32, &self.description, &[fd.as_fd()]));
    }

    /// A copy of all of it.
    pub fn bytes(&self) -> Vec<u8> {
        // SAFETY: the mapping; the export runs on this thread.
        unsafe { std::slice::from_raw_parts(self.base, self.len).to_vec() }
    }

    /// Overwrites all of it.
    pub fn set(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base, self.len) }
    }

    fn half(&self, at: usize) -> u16 {
        u16::from_ne_bytes(self.bytes()[at..at + 2].try_into().unwrap())
    }

    pub fn header(&self) -> (u16, u16, u16, u16) {
        (self.half(8), self.half(10), self.half(12), self.half(14))
    }

    pub fn inflight(&self) -> Vec<u16> {
        let entries = (self.len - 16) / 16;
        (0..entries as u16).filter(|&head| self.bytes()[16 + usize::from(head) * 16] == 1).collect()
    }

    fn counter(&self, head: u16) -> u64 {
        let at = 16 + usize::from(head) * 16 + 8;
        u64::from_ne_bytes(self.bytes()[at..at + 8].try_into().unwrap())
    }
}

impl Drop for InflightTable {
    fn drop(&mut self) {
        // SAFETY: the mapping of `create`.
        unsafe { munmap(self.base.cast(), self.len).unwrap() }
    }
}

fn rig_with_table() -> (Rig, InflightTable) {
    let mut rig = Rig::unconnected(16, ALL_FEATURES);
    rig.negotiate();
    rig.add_memory();
    let table = InflightTable::create(&mut rig, 1, 16);
    table.give(&mut rig);
    rig.start_queue(0);
    assert!(rig.frontend.is_live(0));
    (rig, table)
}

/// The back end dies; the VMM connects again and hands the table over. QEMU takes the used index as the base.
fn restart(rig: &mut Rig, table: &InflightTable) {
    rig.reconnect();
    table.give(rig);
    let used = rig.memory.u16(rig.driver.used + 2).load(std::sync::atomic::Ordering::Relaxed);
    rig.start_queue(used);
    assert!(rig.frontend.is_live(0), "{:?}", rig.frontend.take_notice());
}

fn sectors(requests: &[Request]) -> Vec<u64> {
    requests.iter().map(|r| r.sector).collect()
}

#[test]
fn the_table_has_the_layout_of_the_specification_and_is_sealed() {
    let (mut rig, table) = rig_with_table();
    assert_eq!(table.header(), (1, 16, 0, 0), "version, desc_num, last_batch_head, used_idx");
    let seals = fcntl_get_seals(&table.fd).unwrap();
    assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW));
    let heads: Vec<u16> = (0..3).map(|n| rig.offer(n)).collect();
    let requests: Vec<Request> = (0..3).map(|_| rig.frontend.next(0).unwrap()).collect();
    let mut marked = heads.clone();
    marked.sort_unstable();
    assert_eq!(table.inflight(), marked);
    assert_eq!(heads.iter().map(|&h| table.counter(h)).collect::<Vec<_>>(), [0, 1, 2]);
    // Finished, not yet given back: still in flight, linked as a batch.
    rig.finish(&requests[2]);
    rig.finish(&requests[0]);
    assert_eq!(table.inflight(), marked);
    assert_eq!(table.header().2, heads[0]);
    let next_at = 16 + usize::from(heads[0]) * 16 + 6;
    assert_eq!(table.half(next_at), heads[2]);
    rig.frontend.publish(0);
    assert_eq!(table.inflight(), [heads[1]]);
    assert_eq!(table.header().3, 2);
}

#[test]
fn tables_that_make_no_sense_are_not_made() {
    for (queues, size) in [(0u16, 16u16), (17, 16), (1, 0), (1, 1025), (0xffff, 0xffff)] {
        let mut rig = Rig::unconnected(16, ALL_FEATURES);
        rig.negotiate();
        let mut wanted = vec![0; 16];
        wanted.extend_from_slice(&queues.to_ne_bytes());
        wanted.extend_from_slice(&size.to_ne_bytes());
        wanted.resize(24, 0);
        rig.vmm.send(31, &wanted, &[]);
        let error = fault(rig.frontend.on_readable(&mut rig.changes));
        assert_eq!((error.kind, error.context.object), (ErrorKind::Protocol, Some("in-flight table")));
    }
}

#[test]
fn what_was_taken_and_not_given_back_is_resubmitted_in_order() {
    let (mut rig, table) = rig_with_table();
    // Heads in another order than the requests.
    rig.driver.free.reverse();
    for n in 0..5 {
        rig.offer(n);
    }
    let requests: Vec<Request> = (0..4).map(|_| rig.frontend.next(0).unwrap()).collect();
    // Out of order: 2 is given back, 1 is finished but was not yet published when the end came.
    rig.finish(&requests[2]);
    rig.frontend.publish(0);
    rig.finish(&requests[1]);
    drain(&rig.driver.call);
    restart(&mut rig, &table);
    assert_eq!(drain(&rig.driver.call), 1, "the interrupt for the last batch may have got lost");
    assert!(rig.frontend.has_work(0));
    let taken = rig.process();
    assert_eq!(sectors(&taken), [0, 1, 3, 4], "the unfinished ones by counter, then the new one");
    assert_eq!(table.inflight(), [] as [u16; 0]);
    let mut used = Vec::new();
    while let Some((head, len)) = rig.driver.take_used(&rig.memory) {
        assert_eq!(len, 513);
        used.push(head);
    }
    assert_eq!(used.len(), 5);
    used.sort_unstable();
    used.dedup();
    assert_eq!(used.len(), 5, "each exactly once");
    assert_eq!(rig.memory.read(DATA, 5 * 512), rig.disk[..5 * 512]);
}

#[test]
fn a_batch_whose_used_index_moved_is_not_done_again() {
    // The end came between the used index and the marks: put the table back to what it was just before.
    let (mut rig, table) = rig_with_table();
    for n in 0..4 {
        rig.offer(n);
    }
    let requests: Vec<Request> = (0..4).map(|_| rig.frontend.next(0).unwrap()).collect();
    for n in [3, 0, 2] {
        rig.finish(&requests[n]);
    }
    let mut before = table.bytes();
    rig.frontend.publish(0);
    // One mark was cleared, the others were not.
    before[16 + usize::from(requests[3].token.0 as u16) * 16] = 0;
    table.set(&before);
    assert_eq!(table.inflight().len(), 3);
    restart(&mut rig, &table);
    assert_eq!(sectors(&rig.process()), [1]);
    assert_eq!(table.header().3, 4);
}

#[test]
fn recovery_may_itself_be_interrupted() {
    let (mut rig, table) = rig_with_table();
    for n in 0..4 {
        rig.offer(n);
    }
    let requests: Vec<Request> = (0..4).map(|_| rig.frontend.next(0).unwrap()).collect();
    rig.finish(&requests[1]);
    rig.frontend.publish(0);
    for _ in 0..3 {
        restart(&mut rig, &table);
        // It takes some and dies again.
        let again: Vec<Request> = (0..2).map(|_| rig.frontend.next(0).unwrap()).collect();
        assert_eq!(sectors(&again), [0, 2]);
    }
    restart(&mut rig, &table);
    assert_eq!(sectors(&rig.process()), [0, 2, 3]);
    // New requests after all that get higher counters.
    rig.offer(4);
    let new = rig.frontend.next(0).unwrap();
    assert!(table.counter(new.token.0 as u16) >= 4);
}

#[test]
fn an_end_at_any_moment_loses_and_repeats_nothing_that_was_given_back() {
    let mut random = Random::new(seed("an_end_at_any_moment"));
    for _ in 0..300 {
        let (mut rig, table) = rig_with_table();
        // How often each head's latest request was given back.
        let mut offered = 0u64;
        let mut outstanding: Vec<(u16, u64)> = Vec::new();
        let mut pending: Vec<Request> = Vec::new();
        for _ in 0..60 {
            match random.below(9) {
                0 | 1 if outstanding.len() < 5 => {
                    let n = offered % 16;
                    let head = rig.offer(n);
                    outstanding.push((head, n));
                    offered += 1;
                }
                2 | 3 => pending.extend(rig.frontend.next(0)),
                4 | 5 if !pending.is_empty() => {
                    let at = random.below(pending.len() as u64) as usize;
                    let request = pending.remove(at);
                    rig.finish(&request);
                }
                6 => {
                    if random.one_in(2) {
                        rig.frontend.publish(0);
                    } else {
                        // Dies between the used index and some of the marks.
                        let before = table.bytes();
                        rig.frontend.publish(0);
                        if random.one_in(2) {
                            table.set(&before);
                        }
                        pending.clear();
                        restart(&mut rig, &table);
                    }
                }
                // QEMU stops the machine and lets it go on. Requests that take too long are left undone.
                7 => {
                    rig.tell(11, &Rig::vring(0, 0), &[]);
                    for request in pending.drain(..) {
                        match random.one_in(2) {
                            true => rig.finish(&request),
                            false => rig.frontend.complete(request.token, Err(Errno::CANCELED)),
                        }
                    }
                    rig.frontend.finish_stops(&mut rig.changes).unwrap();
                    let (_, state, _) = rig.vmm.reply().expect("nothing is unfinished");
                    table.give(&mut rig);
                    rig.start_queue(u16::from_ne_bytes([state[4], state[5]]));
                }
                _ => {
                    while let Some((head, len)) = rig.driver.take_used(&rig.memory) {
                        assert_eq!(len, 513);
                        let at = outstanding.iter().position(|o| o.0 == head);
                        let (_, n) = outstanding.remove(at.expect("given back twice, or never offered"));
                        let at = n as usize * 512;
                        assert_eq!(rig.memory.read(DATA + n * 512, 512), rig.disk[at..at + 512]);
                        // Chains of this driver have three descriptors in a row.
                        let mut index = head;
                        for _ in 0..3 {
                            rig.driver.free.push(index);
                            let next =
                                rig.memory.read(rig.driver.descriptors + u64::from(index) * 16 + 14, 2);
                            index = u16::from_le_bytes(next.try_into().unwrap());
                        }
                    }
                }
            }
        }
        pending.clear();
        restart(&mut rig, &table);
        rig.process();
        while let Some((head, _)) = rig.driver.take_used(&rig.memory) {
            let at = outstanding.iter().position(|o| o.0 == head);
            outstanding.remove(at.expect("given back twice, or never offered"));
        }
        assert_eq!(outstanding, [], "lost");
        assert_eq!(table.inflight(), [] as [u16; 0]);
    }
}

#[test]
fn a_hostile_table_never_panics() {
    let mut random = Random::new(seed("a_hostile_table"));
    for _ in 0..2000 {
        let (mut rig, table) = rig_with_table();
        for n in 0..3 {
            rig.offer(n);
        }
        rig.frontend.next(0);
        let mut bytes = table.bytes();
        for byte in &mut bytes {
            match random.below(4) {
                0 => *byte = random.next() as u8,
                1 => *byte = random.below(2) as u8,
                _ => {}
            }
        }
        table.set(&bytes);
        rig.reconnect();
        table.give(&mut rig);
        rig.start_queue(random.below(4) as u16);
        for _ in 0..40 {
            if let Some(request) = rig.frontend.next(0) {
                rig.finish(&request);
                if random.one_in(3) {
                    bytes.fill_with(|| random.next() as u8);
                    table.set(&bytes);
                }
            }
            rig.frontend.publish(0);
        }
    }
}

#[test]
fn a_table_made_for_fewer_queues_is_not_used_for_the_others() {
    let mut rig = Rig::unconnected(16, ALL_FEATURES);
    rig.negotiate();
    rig.add_memory();
    // For queues of 8: too small for this one of 16, which gets private memory instead.
    let table = InflightTable::create(&mut rig, 1, 8);
    table.give(&mut rig);
    rig.start_queue(0);
    assert_eq!(rig.simple(4, 0, None), Some((0, 1)));
    assert!(table.bytes().iter().all(|&b| b == 0));
}
