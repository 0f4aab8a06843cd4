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
