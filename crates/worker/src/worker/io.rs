//! Does what the core asks: copies between guests and slots, reads of the base image, I/O on the overflow file.
//!
//! Owns the slots and the connections' buffers, and hands each request to who does it. Invariant: each operation of
//! the core is answered exactly once, and never from inside the call that starts it.

use super::barrier::{Barrier, punched};
use super::base_reads::{BaseReads, Now};
use super::calibrate::past_caches_is_faster;
use super::clients::Clients;
use super::engine::{Done, Engine, File, Files, Tag};
use super::error::Error;
use super::events::state_of;
use super::models::Models;
use super::slots::Slots;
use super::staging::Buffer;
use super::transfers::{Read, Transfers};
use spillway_core::{BLOCK_BYTES, Disk, Errno, Event, GuestBuffers, Io, OpId, PartId, Slot, Token, is_zero};
use spillway_image::BaseImage;
use spillway_layout::persistent_file;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};

/// A read or an operation that has ended, for the core.
pub enum IoResult {
    /// Bytes in a buffer of ours.
    Staged(OpId, Result<(Buffer, usize, usize), Errno>),
    /// Bytes from the base image's thread.
    Owned(OpId, Result<Vec<u8>, Errno>),
    /// No bytes.
    Plain(OpId, Result<(), Errno>),
}

/// Everything that the core's requests are done with, each by its owner.
pub struct DiskIo {
    /// First, as its engine's I/O must end before what it uses goes.
    pub transfers: Transfers,
    pub base: BaseReads,
    pub barrier: Barrier,
    pub clients: Clients,
    slots: Option<Slots>,
    /// Guest data goes into slots past the caches: that is faster on this processor.
    past_caches: bool,
    meta: OwnedFd,
    /// Where in the file the core's offset 0 is.
    data_at: u64,
    events: Vec<Event>,
    /// The write that the disk is taking, and which pieces of it are all zeroes: by byte and length within it.
    taking: Token,
    zeroes: Vec<(u32, u32)>,
}

/// What outlives the worker, as it is used here.
pub struct DiskResources {
    /// The RAM tier.
    pub slots: Option<Slots>,
    pub meta: OwnedFd,
    /// The overflow or difference file, and how long it has to be.
    pub file: Option<OwnedFd>,
    pub file_bytes: u64,
    /// Where in it the core's offset 0 is.
    pub data_at: u64,
    /// pidfds of dead workers that have not ended.
    pub predecessors: Vec<OwnedFd>,
    /// How slow the stores are to be, if they are.
    pub(super) models: Option<Box<Models>>,
}

impl DiskIo {
    pub fn new(mut engine: Engine, held: DiskResources, base: BaseImage) -> Result<DiskIo, Error> {
        let DiskResources { slots, meta, file, file_bytes, data_at, predecessors, models } = held;
        let overflow = file.as_ref().map(AsRawFd::as_raw_fd);
        engine.start(Files { base: base.file().fd().as_raw_fd(), overflow })?;
        let barrier = Barrier::new(predecessors, file.as_ref(), file_bytes)?;
        Ok(DiskIo {
            transfers: Transfers::new(engine, file, models)?,
            base: BaseReads::new(base),
            barrier,
            clients: Clients::default(),
            past_caches: slots.is_some() && past_caches_is_faster(),
            slots,
            meta,
            data_at,
            events: Vec::new(),
            taking: Token(u64::MAX),
            zeroes: Vec::new(),
        })
    }

    /// The time of the turn.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.transfers.now_ns
    }

    /// Hands an answer to the core.
    pub fn deliver(&mut self, disk: &mut Disk, answer: IoResult) {
        match answer {
            IoResult::Plain(op, result) => disk.op_done(self, op, result),
            IoResult::Staged(op, Err(errno)) => disk.read_done(self, op, Err(errno)),
            IoResult::Staged(op, Ok((buffer, skip, len))) => {
                // SAFETY: the buffer is taken, its read has ended, and it is given back only below.
                let bytes = unsafe { self.transfers.filled(buffer, skip, len) };
                disk.read_done(self, op, Ok(bytes));
                self.transfers.give(buffer);
            }
            IoResult::Owned(op, result) => {
                disk.read_done(self, op, result.as_deref().map_err(|e| *e));
                if let Ok(buffer) = result {
                    self.base.give(buffer);
                }
            }
        }
    }

    /// What a completion of the engine's means for the core. `None`: nothing yet.
    pub fn completed(&mut self, done: Done) -> Option<IoResult> {
        match done.tag {
            Tag::Read(i) => self.transfers.read_completed(i, done.result),
            Tag::Write(i) => self.transfers.write_completed(i, done.result),
            Tag::Job(n) => self.base.due(&mut self.transfers, n),
            Tag::Op(n) => {
                let result = if done.result < 0 { Err(Errno(-done.result)) } else { Ok(()) };
                Some(IoResult::Plain(OpId(n), result))
            }
            Tag::Barrier(n) => punched(&mut self.transfers, OpId(n), done.result),
            Tag::Watch(_) | Tag::Polls | Tag::Ignore => None,
        }
    }

    /// What the base image's thread has finished.
    pub fn base_finished(&mut self) -> Option<IoResult> {
        self.base.finished(&mut self.transfers)
    }

    /// I/O under way or waiting for a buffer.
    pub fn is_busy(&self) -> bool {
        self.transfers.are_busy() || self.base.are_busy(&self.transfers)
    }

    /// Publishes the disk's figures, with what only this side sees.
    pub fn publish_figures(&mut self, disk: &Disk) {
        disk.publish_gauges();
        self.transfers.publish(disk.counters());
        self.base.publish(disk.counters());
    }

    /// What has happened since it was asked last.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// The disk takes this request: which pieces of it are all zeroes is noted until [`DiskIo::taken`].
    #[inline]
    pub fn takes(&mut self, token: Token) {
        self.taking = token;
    }

    /// It has. What is decided later is not looked at.
    #[inline]
    pub fn taken(&mut self) -> &mut Vec<(u32, u32)> {
        self.taking = Token(u64::MAX);
        &mut self.zeroes
    }
}

impl GuestBuffers for DiskIo {
    #[inline]
    fn copy_from_guest(&mut self, token: Token, at: u32, to: &mut [u8]) -> Result<(), Errno> {
        self.clients.copy_from_guest(token, at, to)
    }

    #[inline]
    fn copy_to_guest(&mut self, token: Token, at: u32, from: &[u8]) -> Result<(), Errno> {
        self.clients.copy_to_guest(token, at, from)
    }

    #[inline]
    fn guest_is_zero(&mut self, token: Token, at: u32, len: u32) -> Result<bool, Errno> {
        self.clients.guest_is_zero(token, at, len)
    }

    #[inline]
    fn zero_guest(&mut self, token: Token, at: u32, len: u32) -> Result<(), Errno> {
        self.clients.zero_guest(token, at, len)
    }

    #[inline]
    fn complete(&mut self, token: Token, result: Result<(), Errno>) {
        self.clients.complete(token, result);
    }
}

impl Io for DiskIo {
    #[inline]
    fn slot(&mut self, slot: Slot) -> &mut [u8] {
        let slots = self.slots.as_mut().expect("the core uses slots only in modes with a RAM tier");
        slots.bytes(slot)
    }

    #[inline]
    fn prefetch_slot(&self, slot: Slot) {
        if let Some(slots) = &self.slots {
            slots.prefetch(slot);
        }
    }

    #[inline]
    fn guest_to_slot(
        &mut self,
        token: Token,
        at: u32,
        slot: Slot,
        slot_at: usize,
        len: usize,
    ) -> Result<bool, Errno> {
        let slots = self.slots.as_mut().expect("the core uses slots only in modes with a RAM tier");
        let to = &mut slots.bytes(slot)[slot_at..slot_at + len];
        let zero = if self.past_caches {
            self.clients.store_from_guest(token, at, to)?
        } else {
            self.clients.copy_from_guest(token, at, to)?;
            is_zero(to)
        };
        if zero && token == self.taking {
            self.zeroes.push((at, len as u32));
        }
        Ok(zero)
    }

    fn guest_to_slots(
        &mut self,
        token: Token,
        at: u32,
        first: Slot,
        blocks: u32,
        fresh: bool,
    ) -> Result<(), Errno> {
        let slots = self.slots.as_mut().expect("the core uses slots only in modes with a RAM tier");
        let (mut stored, len) = (0, blocks * BLOCK_BYTES as u32);
        if fresh && slots.store_is_faster() {
            let clients = &mut self.clients;
            // SAFETY: these are the request's own buffers, which it keeps until its completion.
            stored = unsafe { slots.store(first, blocks, |each| clients.pieces(token, at, len, each)) }?;
            if stored == len as usize {
                return Ok(());
            }
            // A copy of our own says what is wrong: with the guest's memory to its connection, with the host's to us.
        }
        let to = &mut slots.run(first, blocks)[stored..];
        if self.past_caches {
            self.clients.store_from_guest(token, at + stored as u32, to).map(drop)
        } else {
            self.clients.copy_from_guest(token, at + stored as u32, to)
        }
    }

    #[inline]
    fn slot_to_guest(
        &mut self,
        token: Token,
        at: u32,
        slot: Slot,
        slot_at: usize,
        len: usize,
    ) -> Result<(), Errno> {
        let slots = self.slots.as_mut().expect("the core uses slots only in modes with a RAM tier");
        let from = &slots.bytes(slot)[slot_at..slot_at + len];
        self.clients.copy_to_guest(token, at, from)
    }

    #[inline]
    fn guest_to_part(
        &mut self,
        token: Token,
        at: u32,
        part: PartId,
        part_at: usize,
        len: usize,
    ) -> Result<(), Errno> {
        let to = &mut self.transfers.part(part)[part_at..part_at + len];
        self.clients.copy_from_guest(token, at, to)
    }

    #[inline]
    fn slot_to_part(&mut self, slot: Slot, part: PartId, part_at: usize) {
        let slots = self.slots.as_mut().expect("the core uses slots only in modes with a RAM tier");
        let from = slots.bytes(slot);
        self.transfers.part(part)[part_at..part_at + BLOCK_BYTES].copy_from_slice(from);
    }

    #[inline]
    fn part(&mut self, part: PartId) -> &mut [u8] {
        self.transfers.part(part)
    }

    fn populate_slots(&mut self, first: Slot, n: u32) {
        if let Some(slots) = &mut self.slots {
            slots.populate(first, n);
        }
    }

    fn release_slots(&mut self, slots: &[Slot]) {
        let memory = self.slots.as_ref().expect("the core uses slots only in modes with a RAM tier");
        for run in slots.chunk_by(|a, b| a.0 + 1 == b.0) {
            memory.punch(run[0], run.len() as u32);
        }
    }

    fn release_meta(&mut self, pages: Range<u64>) {
        use rustix::fs::{FallocateFlags, fallocate};
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // It cannot fail on a memfd with arguments in range; if it did, the memory would stay, which is no harm.
        let _ = fallocate(&self.meta, flags, pages.start, pages.end - pages.start);
    }

    fn base_to_guest(&mut self, token: Token, at: u32, offset: u64, len: u32) -> Option<Result<(), Errno>> {
        Some(self.base.now(offset, len)?.and_then(|found| match found {
            Now::Bytes(bytes) => self.clients.copy_to_guest(token, at, bytes),
            Now::Zeroes => self.clients.zero_guest(token, at, len),
        }))
    }

    fn read_base(&mut self, op: OpId, offset: u64, len: u32) {
        self.base.read(&mut self.transfers, op, offset, len);
    }

    fn read_overflow(&mut self, op: OpId, offset: u64, len: u32) {
        let len = len as usize;
        self.transfers.start_read(Read {
            op,
            file: File::Overflow,
            offset: self.data_at + offset,
            skip: 0,
            len,
            need: len,
            ask: len,
            align: BLOCK_BYTES,
            got: 0,
            in_memory: false,
            buffer: None,
            start_ns: 0,
            due_ns: 0,
        });
    }

    fn write_overflow(&mut self, op: OpId, part: PartId, part_at: usize, offset: u64, len: u32, sync: bool) {
        self.transfers.start_write(op, part, part_at, self.data_at + offset, len as usize, sync);
    }

    fn write_map(&mut self, op: OpId, part: PartId, part_at: usize, page: u32, pages: u32, sync: bool) {
        let offset = persistent_file::DURABLE_AT + u64::from(page) * BLOCK_BYTES as u64;
        self.transfers.start_write(op, part, part_at, offset, pages as usize * BLOCK_BYTES, sync);
    }

    fn punch_overflow(&mut self, op: OpId, offset: u64, len: u64) {
        self.transfers.punch(self.data_at + offset, len, Tag::Op(op.0));
    }

    fn drain_overflow(&mut self, op: OpId) {
        self.barrier.begin(&mut self.transfers, op);
    }

    fn sync_overflow(&mut self, op: OpId) {
        self.transfers.sync(op);
    }

    fn event(&mut self, event: Event) {
        if self.events.len() < 64 || state_of(&event).is_some() {
            self.events.push(event);
        }
    }
}
