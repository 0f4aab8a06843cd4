//! A split virtqueue as `VirtIORing.c` keeps it: a list of unused descriptors that lies in the descriptors, one indirect
//! descriptor for each request if there is a table for it, and the event indices of both sides.
//!
//! Owns the driver's side of one queue; knows nothing of what requests mean. Invariant: a head that the device gives back is one
//! that it has, else [`Ring::take`] is an error.

use super::layout::Segment;
use super::memory::GuestMemory;
use anyhow::{Context, Result, ensure};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};

const F_NEXT: u16 = 1;
const F_WRITE: u16 = 2;
const F_INDIRECT: u16 = 4;
const DESCRIPTOR_BYTES: u64 = 16;

pub(super) struct Ring {
    size: u16,
    descriptors: u64,
    available: u64,
    used: u64,
    first_unused: u16,
    unused: u16,
    available_index: u16,
    added_since_kick: u16,
    last_used: u16,
    interrupts: bool,
    /// What was given to [`Ring::add`], by head.
    opaque: Vec<Option<usize>>,
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
}

impl Ring {
    /// Bytes that a ring takes.
    pub(super) fn bytes(size: u16) -> u64 {
        let size = u64::from(size);
        (size * DESCRIPTOR_BYTES + size * 2 + 6).next_multiple_of(64) + size * 8 + 6
    }

    /// A new ring at `at`, which is zeroed.
    pub(super) fn new(memory: &mut GuestMemory, at: u64, size: u16) -> Result<Ring> {
        memory.fill(at, Ring::bytes(size) as usize, 0);
        let available = at + u64::from(size) * DESCRIPTOR_BYTES;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("no eventfd");
        let ring = Ring {
            size,
            descriptors: at,
            available,
            used: (available + u64::from(size) * 2 + 6).next_multiple_of(64),
            first_unused: 0,
            unused: size,
            available_index: 0,
            added_since_kick: 0,
            last_used: 0,
            interrupts: true,
            opaque: vec![None; usize::from(size)],
            kick: event()?,
            call: event()?,
        };
        (0..size).for_each(|i| ring.write(memory, ring.descriptors, i, Segment::default(), F_NEXT, i + 1));
        Ok(ring)
    }

    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// Descriptors, available ring, used ring.
    pub(super) fn areas(&self) -> [u64; 3] {
        [self.descriptors, self.available, self.used]
    }

    fn write(&self, memory: &mut GuestMemory, table: u64, index: u16, part: Segment, flags: u16, next: u16) {
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        bytes[..8].copy_from_slice(&part.at.to_le_bytes());
        bytes[8..12].copy_from_slice(&part.bytes.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        memory.write(table + u64::from(index) * DESCRIPTOR_BYTES, &bytes);
    }

    fn next(&self, memory: &GuestMemory, index: u16) -> u16 {
        memory.word(self.descriptors + u64::from(index) * DESCRIPTOR_BYTES + 14).load(Ordering::Relaxed)
    }

    /// Adds a request of `out` parts that the device reads and then such that it writes, in the table at `table` or, without
    /// one, in descriptors of the ring. False: they do not suffice.
    pub(super) fn add(
        &mut self,
        memory: &mut GuestMemory,
        parts: &[Segment],
        out: usize,
        table: Option<u64>,
        opaque: usize,
    ) -> bool {
        let flags = |i: usize| {
            let next = if i + 1 < parts.len() { F_NEXT } else { 0 };
            next | if i < out { 0 } else { F_WRITE }
        };
        let head = self.first_unused;
        if let (Some(table), true) = (table, self.unused > 0) {
            self.first_unused = self.next(memory, head);
            self.unused -= 1;
            for (i, &part) in parts.iter().enumerate() {
                self.write(memory, table, i as u16, part, flags(i), i as u16 + 1);
            }
            let all = Segment { at: table, bytes: parts.len() as u32 * DESCRIPTOR_BYTES as u32 };
            self.write(memory, self.descriptors, head, all, F_INDIRECT, 0);
        } else {
            if parts.len() > usize::from(self.unused) {
                return false;
            }
            for (i, &part) in parts.iter().enumerate() {
                let index = self.first_unused;
                self.first_unused = self.next(memory, index);
                self.write(memory, self.descriptors, index, part, flags(i), self.first_unused);
            }
            self.unused -= parts.len() as u16;
        }
        self.opaque[usize::from(head)] = Some(opaque);
        let slot = self.available + 4 + u64::from(self.available_index % self.size) * 2;
        memory.word(slot).store(head, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.available_index = self.available_index.wrapping_add(1);
        memory.word(self.available + 2).store(self.available_index, Ordering::Release);
        self.added_since_kick += 1;
        true
    }

    /// Tells the device of what was added, if it wants to be told.
    pub(super) fn kick(&mut self, memory: &GuestMemory) -> Result<()> {
        fence(Ordering::SeqCst);
        let new = self.available_index;
        let old = new.wrapping_sub(std::mem::take(&mut self.added_since_kick));
        let event = memory.word(self.used + 4 + u64::from(self.size) * 8).load(Ordering::Relaxed);
        if new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old) {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).context("cannot kick")?;
        }
        Ok(())
    }

    /// Takes the next request that the device has given back.
    pub(super) fn take(&mut self, memory: &mut GuestMemory) -> Result<Option<usize>> {
        if memory.word(self.used + 2).load(Ordering::Acquire) == self.last_used {
            return Ok(None);
        }
        let mut bytes = [0; 4];
        memory.read(self.used + 4 + u64::from(self.last_used % self.size) * 8, &mut bytes);
        let head = u32::from_le_bytes(bytes);
        let opaque = self.opaque.get_mut(head as usize).and_then(Option::take);
        let opaque =
            opaque.with_context(|| format!("head {head} came back, which the device does not have"))?;
        self.put_back(memory, head as u16)?;
        self.last_used = self.last_used.wrapping_add(1);
        if self.interrupts {
            self.ask_for_interrupt(memory);
        }
        Ok(Some(opaque))
    }

    fn put_back(&mut self, memory: &mut GuestMemory, head: u16) -> Result<()> {
        let mut last = head;
        let flags = |memory: &GuestMemory, index: u16| {
            let at = self.descriptors + u64::from(index) * DESCRIPTOR_BYTES + 12;
            memory.word(at).load(Ordering::Relaxed)
        };
        let mut count = 1;
        while flags(memory, last) & F_NEXT != 0 {
            last = self.next(memory, last);
            count += 1;
            ensure!(count <= self.size, "the descriptors of head {head} were changed: they are a loop");
        }
        self.write(memory, self.descriptors, last, Segment::default(), F_NEXT, self.first_unused);
        self.first_unused = head;
        self.unused += count;
        Ok(())
    }

    fn ask_for_interrupt(&self, memory: &GuestMemory) {
        memory.word(self.available + 4 + u64::from(self.size) * 2).store(self.last_used, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// No interrupts from now on: they would be for what is taken anyway.
    pub(super) fn disable_interrupts(&mut self) {
        self.interrupts = false;
    }

    /// An interrupt for the next request that is given back. False: one was given back already.
    pub(super) fn enable_interrupts(&mut self, memory: &GuestMemory) -> bool {
        self.interrupts = true;
        self.ask_for_interrupt(memory);
        memory.word(self.used + 2).load(Ordering::Acquire) == self.last_used
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u16 = 8;

    fn ring() -> (GuestMemory, Ring) {
        let mut memory = GuestMemory::new(1 << 16, 1 << 16).unwrap();
        let [at, _] = memory.starts();
        let ring = Ring::new(&mut memory, at, SIZE).unwrap();
        (memory, ring)
    }

    /// What the device sees of the n-th request: the descriptors from its head on, as flags and next.
    fn chain(memory: &mut GuestMemory, ring: &Ring, n: u64) -> Vec<(u16, u16)> {
        let mut index = memory.word(ring.available + 4 + n * 2).load(Ordering::Relaxed);
        let mut seen = Vec::new();
        loop {
            let at = ring.descriptors + u64::from(index) * 16;
            let [flags, next] = [12, 14].map(|offset| memory.word(at + offset).load(Ordering::Relaxed));
            seen.push((flags, next));
            if flags & F_NEXT == 0 {
                return seen;
            }
            index = next;
        }
    }

    /// The device gives the n-th request back as its n-th.
    fn give_back(memory: &mut GuestMemory, ring: &Ring, n: u64) {
        let head = memory.word(ring.available + 4 + n * 2).load(Ordering::Relaxed);
        memory.write(ring.used + 4 + n * 8, &u32::from(head).to_le_bytes());
        memory.word(ring.used + 2).store(n as u16 + 1, Ordering::Release);
    }

    #[test]
    fn a_request_takes_one_descriptor_with_a_table_and_all_of_its_own_without() {
        let (mut memory, mut ring) = ring();
        let parts =
            [Segment { at: 1, bytes: 16 }, Segment { at: 2, bytes: 512 }, Segment { at: 3, bytes: 1 }];
        let [_, table] = memory.starts();
        assert!(ring.add(&mut memory, &parts, 1, Some(table + 8), 40));
        assert_eq!(chain(&mut memory, &ring, 0), [(F_INDIRECT, 0)]);
        assert!(ring.add(&mut memory, &parts, 1, None, 41));
        let flags: Vec<u16> = chain(&mut memory, &ring, 1).iter().map(|seen| seen.0).collect();
        assert_eq!(flags, [F_NEXT, F_NEXT | F_WRITE, F_WRITE]);
        assert!(ring.add(&mut memory, &parts, 2, None, 42));
        assert!(!ring.add(&mut memory, &parts, 1, None, 43), "one descriptor is left");
        assert_eq!(ring.take(&mut memory).unwrap(), None);
        (0..3).for_each(|n| give_back(&mut memory, &ring, n));
        let taken: Vec<_> = std::iter::from_fn(|| ring.take(&mut memory).unwrap()).collect();
        assert_eq!(taken, [40, 41, 42]);
        assert!(ring.add(&mut memory, &[Segment::default(); SIZE as usize], 1, None, 44), "all are back");
    }

    #[test]
    fn what_the_device_does_not_have_does_not_come_back() {
        let (mut memory, mut ring) = ring();
        assert!(ring.add(&mut memory, &[Segment::default(); 2], 1, None, 40));
        give_back(&mut memory, &ring, 0);
        assert_eq!(ring.take(&mut memory).unwrap(), Some(40));
        memory.write(ring.used + 4 + 8, &[0; 4]);
        memory.word(ring.used + 2).store(2, Ordering::Release);
        assert!(ring.take(&mut memory).is_err());
    }

    #[test]
    fn the_device_is_kicked_when_it_asks_to_be() {
        let (mut memory, mut ring) = ring();
        let event = ring.used + 4 + u64::from(SIZE) * 8;
        for (asked_for, kicks) in [(0, true), (0, false), (2, true)] {
            memory.word(event).store(asked_for, Ordering::Relaxed);
            assert!(ring.add(&mut memory, &[Segment::default()], 0, None, 40));
            ring.kick(&memory).unwrap();
            assert_eq!(rustix::io::read(&ring.kick, &mut [0; 8]).is_ok(), kicks, "{asked_for}");
        }
    }
}
