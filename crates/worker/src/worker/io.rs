//! Does what the core asks: copies between guests and slots, reads of the base image, I/O on the overflow file.
//!
//! Owns the slots, the staging buffers, the files and the table of I/O under way. Invariant: each operation of
//! the core is answered exactly once, and never from inside the call that starts it.

use super::block_status::MAP_JOB;
use super::calibrate::past_caches_is_faster;
use super::clients::Clients;
use super::engine::{Engine, File, Files, Operation, Tag};
use super::events::state_of;
use super::models::Models;
use super::slots::Slots;
use super::staging::{Buffer, Staging};
use super::transfers::{Read, Write};
use crate::base::{BaseImage, BaseReader, Extent, ExtentCache, ExtentKind, Finished, RawImage};
use crate::persistent_file;
use spillway_core::{
    BLOCK_BYTES, Disk, Errno, Event, GuestBuffers, Io, OpId, PartId, Slot, Token, add, is_zero,
};
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};

/// Jobs of the base image's thread at a time; more wait here.
const BASE_JOBS: usize = 32;

/// A read or an operation that has ended, for the core.
pub enum Answer {
    /// Bytes in a buffer of ours.
    Staged(OpId, Result<(Buffer, usize, usize), Errno>),
    /// Bytes from the base image's thread.
    Owned(OpId, Result<Vec<u8>, Errno>),
    /// No bytes.
    Plain(OpId, Result<(), Errno>),
}

/// Traffic of the base store and latencies, which the core cannot see; added to the counters once a turn.
#[derive(Default)]
pub(super) struct Seen {
    pub store_reads: u64,
    pub store_read_bytes: u64,
    pub overflow_reads: Vec<u64>,
    pub overflow_writes: Vec<u64>,
    pub base_reads: Vec<u64>,
}

/// Everything that the core's wishes are done with. The engine comes first: it is dropped before the memory that
/// its I/O uses.
pub struct Doer {
    pub engine: Engine,
    pub clients: Clients,
    slots: Option<Slots>,
    /// Guest data goes into slots past the caches: that is faster on this processor.
    past_caches: bool,
    meta: OwnedFd,
    pub(super) staging: Staging,
    pub base: BaseImage,
    pub(super) extents: ExtentCache,
    /// What the base image's thread has found out for the question that was asked.
    pub(super) mapped: Option<Vec<Extent>>,
    /// The overflow or difference file; the engine's operations are on it.
    _file: Option<OwnedFd>,
    data_at: u64,
    /// Where the block of the file lies that the disk does not use, if it is long enough to have one.
    spare_block_at: Option<u64>,
    /// pidfds of dead workers that have not ended, and the barrier that waits for that.
    pub predecessors: Vec<OwnedFd>,
    early_barrier: Option<OpId>,
    pub(super) reads: Vec<Option<Read>>,
    pub(super) free_reads: Vec<u32>,
    /// Reads that wait for a buffer.
    pub(super) unbuffered: VecDeque<u32>,
    pub(super) writes: Vec<Option<Write>>,
    pub(super) free_writes: Vec<u32>,
    base_waiting: VecDeque<(OpId, u64, u32)>,
    spare_vecs: Vec<Vec<u8>>,
    bounce: Vec<u8>,
    pub(super) seen: Seen,
    /// Of a disk that has any.
    pub(super) models: Option<Box<Models>>,
    pub now_ns: u64,
    pub events: Vec<Event>,
    /// Where the base image was found not to be what its digests say.
    pub damaged: Vec<u64>,
    /// The write that the disk is taking, and which pieces of it are all zeroes: by byte and length within it.
    pub taking: Token,
    pub zeroes: Vec<(u32, u32)>,
}

/// What outlives the worker, as it is used here.
pub struct Held {
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

impl Doer {
    pub fn new(mut engine: Engine, held: Held, base: BaseImage) -> Result<Doer, String> {
        let Held { slots, meta, file, file_bytes, data_at, predecessors, models } = held;
        let image = base.file();
        let overflow = file.as_ref().map(AsRawFd::as_raw_fd);
        engine.start(Files { base: image.fd().as_raw_fd(), overflow })?;
        let spare_block_at = match &file {
            Some(fd) => {
                let have =
                    rustix::fs::fstat(fd).map_err(|e| format!("cannot measure the overflow file: {e}"))?;
                let len = have.st_size as u64 / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
                (len >= file_bytes).then(|| len - BLOCK_BYTES as u64)
            }
            None => None,
        };
        Ok(Doer {
            engine,
            clients: Clients::default(),
            past_caches: slots.is_some() && past_caches_is_faster(),
            slots,
            meta,
            staging: Staging::new()?,
            base,
            extents: ExtentCache::new(),
            mapped: None,
            _file: file,
            data_at,
            spare_block_at,
            predecessors,
            early_barrier: None,
            reads: Vec::new(),
            free_reads: Vec::new(),
            unbuffered: VecDeque::new(),
            writes: Vec::new(),
            free_writes: Vec::new(),
            base_waiting: VecDeque::new(),
            spare_vecs: Vec::new(),
            bounce: Vec::new(),
            seen: Seen::default(),
            models,
            now_ns: 0,
            events: Vec::new(),
            damaged: Vec::new(),
            taking: Token(u64::MAX),
            zeroes: Vec::new(),
        })
    }

    /// A dead worker has ended. After the last one the barrier, if it is wanted already, need not wait any more.
    pub fn predecessor_ended(&mut self, pidfd: i32) {
        self.predecessors.retain(|fd| fd.as_raw_fd() != pidfd);
        if self.predecessors.is_empty()
            && let Some(op) = self.early_barrier.take()
        {
            self.drain_overflow(op);
        }
    }

    /// Hands an answer to the core.
    pub fn deliver(&mut self, disk: &mut Disk, answer: Answer) {
        match answer {
            Answer::Plain(op, result) => disk.op_done(self, op, result),
            Answer::Staged(op, Err(errno)) => disk.read_done(self, op, Err(errno)),
            Answer::Staged(op, Ok((buffer, skip, len))) => {
                // SAFETY: the buffer is taken, its read has ended, and it is given back only below.
                let bytes = unsafe { self.staging.filled(buffer, skip, len) };
                disk.read_done(self, op, Ok(bytes));
                self.give(buffer);
            }
            Answer::Owned(op, result) => {
                disk.read_done(self, op, result.as_deref().map_err(|e| *e));
                if let Ok(buffer) = result
                    && self.spare_vecs.len() < BASE_JOBS
                {
                    self.spare_vecs.push(buffer);
                }
            }
        }
    }

    /// What the base image's thread has finished, and is not held.
    pub fn base_finished(&mut self) -> Option<Answer> {
        loop {
            let reader = self.base.reader_mut()?;
            let Finished { job, buffer, result, store_reads, extents, damaged_at } = reader.finished()?;
            self.damaged.extend(damaged_at);
            for extent in &extents {
                self.extents.insert(*extent);
            }
            self.seen.store_reads += store_reads.len() as u64;
            self.seen.store_read_bytes += store_reads.iter().map(|read| read.len).sum::<u64>();
            if job == MAP_JOB {
                self.mapped = Some(extents);
                self.next_base_job();
                continue;
            }
            let (op, came) = (OpId(job as u32), result.map(|()| buffer).map_err(Errno));
            let came = match &mut self.models {
                Some(models) => models.job_done(op, self.now_ns, &store_reads, came),
                None => Some(came),
            };
            if let Some(came) = came {
                self.next_base_job();
                return Some(Answer::Owned(op, came));
            }
        }
    }

    /// One is answered: the next that waits is the thread's.
    pub(super) fn next_base_job(&mut self) {
        if let Some((op, offset, len)) = self.base_waiting.pop_front() {
            self.submit_base_job(op, offset, len);
        }
    }

    fn submit_base_job(&mut self, op: OpId, offset: u64, len: u32) {
        let reader = self.base.reader_mut().expect("what is not plain has a thread to read it");
        if let Some(models) = &mut self.models {
            models.job(op, self.now_ns);
        }
        let spare = self.spare_vecs.pop().unwrap_or_default();
        reader.submit(u64::from(op.0), offset, len, spare);
    }

    /// Jobs of the base image's thread that are not answered.
    fn base_jobs(&self) -> usize {
        let held = self.models.as_ref().map_or(0, |models| models.jobs());
        self.base.reader().map_or(0, BaseReader::unfinished).max(held)
    }

    /// I/O under way or waiting for a buffer.
    pub fn is_busy(&self) -> bool {
        let read = self.base_jobs() + self.base_waiting.len();
        self.free_reads.len() < self.reads.len() || self.free_writes.len() < self.writes.len() || read > 0
    }

    fn punch(&mut self, offset: u64, len: u64, tag: Tag) {
        // SAFETY: it names no memory.
        unsafe { self.engine.push(Operation::Punch { len, offset }, tag) };
    }

    /// The punch of a drain has ended: its fdatasync follows. A file system that cannot punch has only that.
    pub fn barrier_punched(&mut self, op: OpId, result: i32) -> Option<Answer> {
        if result < 0 && ![libc::EOPNOTSUPP, libc::ENOSYS].contains(&-result) {
            return Some(Answer::Plain(op, Err(Errno(-result))));
        }
        self.sync_overflow(op);
        None
    }

    /// Publishes the disk's figures, with what only this side sees.
    pub fn publish_figures(&mut self, disk: &Disk) {
        disk.publish_gauges();
        let c = disk.counters();
        add(&c.store_reads, std::mem::take(&mut self.seen.store_reads));
        add(&c.store_read_bytes, std::mem::take(&mut self.seen.store_read_bytes));
        self.seen.overflow_reads.drain(..).for_each(|ns| c.overflow_read_latency.record(ns, 1));
        self.seen.overflow_writes.drain(..).for_each(|ns| c.overflow_write_latency.record(ns, 1));
        self.seen.base_reads.drain(..).for_each(|ns| c.base_read_latency.record(ns, 1));
    }

    /// Where a range of such an image lies in one plain piece of its file, or that it is zero; if that is known.
    pub(super) fn plain(extents: &ExtentCache, offset: u64, len: u64) -> Option<ExtentKind> {
        let extent = extents.lookup(offset)?;
        if extent.end() < offset + len {
            return None;
        }
        match extent.kind {
            ExtentKind::Raw { file_offset } => {
                Some(ExtentKind::Raw { file_offset: file_offset + (offset - extent.offset) })
            }
            kind => Some(kind),
        }
    }
}

fn resident(image: &RawImage, bounce: &mut Vec<u8>, offset: u64, len: u32) -> Option<Result<(), Errno>> {
    if bounce.len() < len as usize {
        bounce.resize(len as usize, 0);
    }
    match image.read_now(&mut bounce[..len as usize], offset)? {
        Ok(n) if n == len as usize => Some(Ok(())),
        Ok(_) => Some(Err(Errno::IO)),
        Err(e) => Some(Err(Errno(e.raw_os_error().unwrap_or(libc::EIO)))),
    }
}

impl GuestBuffers for Doer {
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

impl Io for Doer {
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
        let to = &mut self.staging.part(part)[part_at..part_at + len];
        self.clients.copy_from_guest(token, at, to)
    }

    #[inline]
    fn slot_to_part(&mut self, slot: Slot, part: PartId, part_at: usize) {
        let slots = self.slots.as_mut().expect("the core uses slots only in modes with a RAM tier");
        let from = slots.bytes(slot);
        self.staging.part(part)[part_at..part_at + BLOCK_BYTES].copy_from_slice(from);
    }

    #[inline]
    fn part(&mut self, part: PartId) -> &mut [u8] {
        self.staging.part(part)
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
        let read = match &self.base {
            BaseImage::Raw { image, .. } => match self.known_hole(offset, len) {
                true => return Some(self.clients.zero_guest(token, at, len)),
                false => resident(image, &mut self.bounce, offset, len)?,
            },
            BaseImage::Read(reader) => match Doer::plain(&self.extents, offset, u64::from(len))? {
                ExtentKind::Raw { file_offset } => {
                    resident(reader.file(), &mut self.bounce, file_offset, len)?
                }
                ExtentKind::Zero => return Some(self.clients.zero_guest(token, at, len)),
                ExtentKind::Compressed => return None,
            },
        };
        Some(read.and_then(|()| self.clients.copy_to_guest(token, at, &self.bounce[..len as usize])))
    }

    fn read_base(&mut self, op: OpId, offset: u64, len: u32) {
        let file = match &self.base {
            BaseImage::Raw { image, .. } => Some((image, offset)),
            BaseImage::Read(reader) => match Doer::plain(&self.extents, offset, u64::from(len)) {
                Some(ExtentKind::Raw { file_offset }) => Some((reader.file(), file_offset)),
                _ => None,
            },
        };
        if let Some((image, offset)) = file {
            let (align, in_memory) = (u64::from(image.dio_align()), image.in_memory());
            self.read_base_file(op, align, in_memory, offset, len);
            return;
        }
        if self.base_jobs() < BASE_JOBS {
            self.submit_base_job(op, offset, len);
        } else {
            self.base_waiting.push_back((op, offset, len));
        }
    }

    fn read_overflow(&mut self, op: OpId, offset: u64, len: u32) {
        let len = len as usize;
        self.start_read(Read {
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
        self.start_write(op, part, part_at, self.data_at + offset, len as usize, sync);
    }

    fn write_map(&mut self, op: OpId, part: PartId, part_at: usize, page: u32, pages: u32, sync: bool) {
        let offset = persistent_file::DURABLE_AT + u64::from(page) * BLOCK_BYTES as u64;
        self.start_write(op, part, part_at, offset, pages as usize * BLOCK_BYTES, sync);
    }

    fn punch_overflow(&mut self, op: OpId, offset: u64, len: u64) {
        self.punch(self.data_at + offset, len, Tag::Op(op.0));
    }

    /// Once the dead process is gone nothing of it can be begun any more; what its ring had handed to the block
    /// layer may still be under way. ext4 and XFS let a punch wait for all O_DIRECT I/O on the file; on btrfs the
    /// fdatasync waits for ordered extents, in which such writes end. Through the page cache the order of the
    /// file's lock is enough. What is punched is a block that the disk never uses.
    fn drain_overflow(&mut self, op: OpId) {
        if !self.predecessors.is_empty() {
            self.early_barrier = Some(op);
            return;
        }
        match self.spare_block_at {
            Some(at) => self.punch(at, BLOCK_BYTES as u64, Tag::Barrier(op.0)),
            None => self.sync_overflow(op),
        }
    }

    fn sync_overflow(&mut self, op: OpId) {
        // SAFETY: it names no memory.
        unsafe { self.engine.push(Operation::Sync, Tag::Op(op.0)) };
    }

    fn event(&mut self, event: Event) {
        if self.events.len() < 64 || state_of(&event).is_some() {
            self.events.push(event);
        }
    }
}
