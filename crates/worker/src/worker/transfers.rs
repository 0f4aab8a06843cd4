//! Reads and writes of files by the engine, from the core's request to its answer: buffers, short transfers, another try.
//! Owns the engine, the staging buffers and what is remembered of each transfer under way; decides nothing.
//!
//! Invariant: a buffer or a part is the kernel's from the submission until the completion, and nobody else's.

use super::engine::{Done, Engine, File, Operation, Tag};
use super::error::Error;
use super::io::IoResult;
use super::models::Models;
use super::staging::{Buffer, Staging};
use spillway_core::{BLOCK_BYTES, Counters, Errno, OpId, PartId, add};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

/// A read under way: the kernel fills `need` bytes of the buffer from `offset` on, of which `len` from `skip` on
/// are what was asked for.
#[derive(Clone, Copy)]
pub struct Read {
    pub op: OpId,
    pub file: File,
    pub offset: u64,
    pub skip: usize,
    pub len: usize,
    /// Bytes until the last that was asked for: a read past the end of the file may be shorter than its buffer.
    pub need: usize,
    pub ask: usize,
    /// What offsets must be a multiple of.
    pub align: usize,
    pub got: usize,
    /// It reaches no store.
    pub in_memory: bool,
    pub buffer: Option<Buffer>,
    pub start_ns: u64,
    /// No answer before that; 0 without a storage model.
    pub due_ns: u64,
}

#[derive(Clone, Copy)]
struct Write {
    pub op: OpId,
    pub part: PartId,
    pub part_at: usize,
    pub offset: u64,
    pub len: usize,
    pub done: usize,
    pub sync: bool,
    pub start_ns: u64,
    /// As of [`Read`].
    pub due_ns: u64,
}

/// What a completion means.
enum Outcome {
    /// So many bytes are done, the rest is to be submitted.
    GoesOn(usize),
    Ended(Result<(), Errno>),
}

/// Judges the completion of a transfer of `need` bytes of which `done` had been done before.
fn outcome(result: i32, done: usize, need: usize, align: usize) -> Outcome {
    match result {
        n if n > 0 && done + (n as usize) < need => {
            // Short: it goes on from an aligned place, as O_DIRECT wants it; if there is one.
            let now = (done + n as usize) / align * align;
            if now == done { Outcome::Ended(Err(Errno::IO)) } else { Outcome::GoesOn(now) }
        }
        n if n > 0 => Outcome::Ended(Ok(())),
        // The file ends before what was asked for: it has shrunk.
        0 => Outcome::Ended(Err(Errno::IO)),
        e if e == -libc::EAGAIN || e == -libc::EINTR => Outcome::GoesOn(done),
        e => Outcome::Ended(Err(Errno(-e))),
    }
}

/// Traffic of the base store and latencies, which the core cannot see; added to the counters once a turn.
#[derive(Default)]
struct Traffic {
    store_reads: u64,
    store_read_bytes: u64,
    overflow_reads: Vec<u64>,
    overflow_writes: Vec<u64>,
    base_reads: Vec<u64>,
}

/// What is under way, each with a number of its own.
struct Numbered<T> {
    all: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Numbered<T> {
    fn new() -> Numbered<T> {
        Numbered { all: Vec::new(), free: Vec::new() }
    }

    fn insert(&mut self, item: T) -> u32 {
        let i = self.free.pop().unwrap_or_else(|| {
            self.all.push(None);
            self.all.len() as u32 - 1
        });
        self.all[i as usize] = Some(item);
        i
    }

    fn get(&mut self, i: u32) -> &mut T {
        self.all[i as usize].as_mut().expect("a number is of what is under way")
    }

    fn remove(&mut self, i: u32) -> T {
        self.free.push(i);
        self.all[i as usize].take().expect("a number is of what is under way")
    }

    fn len(&self) -> usize {
        self.all.len() - self.free.len()
    }
}

/// All transfers. The engine comes first: it is dropped before the memory and the files that its I/O uses.
pub struct Transfers {
    pub engine: Engine,
    staging: Staging,
    /// The overflow or difference file; the engine's operations are on it.
    _file: Option<OwnedFd>,
    reads: Numbered<Read>,
    /// Reads that wait for a buffer.
    unbuffered: VecDeque<u32>,
    writes: Numbered<Write>,
    traffic: Traffic,
    /// Of a disk that has any.
    pub models: Option<Box<Models>>,
    /// The time of the turn.
    pub now_ns: u64,
}

impl Transfers {
    /// None under way. The engine has been started.
    pub fn new(
        engine: Engine,
        file: Option<OwnedFd>,
        models: Option<Box<Models>>,
    ) -> Result<Transfers, Error> {
        Ok(Transfers {
            engine,
            staging: Staging::new()?,
            _file: file,
            reads: Numbered::new(),
            unbuffered: VecDeque::new(),
            writes: Numbered::new(),
            traffic: Traffic::default(),
            models,
            now_ns: 0,
        })
    }

    /// A whole staging buffer for writes.
    #[inline]
    pub fn part(&mut self, part: PartId) -> &mut [u8] {
        self.staging.part(part)
    }

    /// What a read has brought. The slice is not bound to the borrow of `self`, because the core is handed it together with
    /// everything else.
    ///
    /// # Safety
    /// The answer with this buffer is the last that was taken, and the buffer is given back only after the slice was used.
    pub unsafe fn filled<'a>(&self, buffer: Buffer, skip: usize, len: usize) -> &'a [u8] {
        // SAFETY: the buffer is taken and its read has ended; the rest is promised by the caller.
        unsafe { self.staging.filled(buffer, skip, len) }
    }

    /// Some are under way, or wait for a buffer.
    pub fn are_busy(&self) -> bool {
        self.reads.len() + self.writes.len() > 0
    }

    /// Gives a range of the overflow file back.
    pub fn punch(&mut self, offset: u64, len: u64, tag: Tag) {
        // SAFETY: it names no memory.
        unsafe { self.engine.push(Operation::Punch { len, offset }, tag) };
    }

    /// fdatasync of the overflow file.
    pub fn sync(&mut self, op: OpId) {
        // SAFETY: it names no memory.
        unsafe { self.engine.push(Operation::Sync, Tag::Op(op.0)) };
    }

    /// Reads of the base image's store that somebody else has done.
    pub fn count_store_reads(&mut self, reads: u64, bytes: u64) {
        self.traffic.store_reads += reads;
        self.traffic.store_read_bytes += bytes;
    }

    /// Adds what was seen to the counters.
    pub fn publish(&mut self, c: &Counters) {
        add(&c.store_reads, std::mem::take(&mut self.traffic.store_reads));
        add(&c.store_read_bytes, std::mem::take(&mut self.traffic.store_read_bytes));
        self.traffic.overflow_reads.drain(..).for_each(|ns| c.overflow_read_latency.record(ns, 1));
        self.traffic.overflow_writes.drain(..).for_each(|ns| c.overflow_write_latency.record(ns, 1));
        self.traffic.base_reads.drain(..).for_each(|ns| c.base_read_latency.record(ns, 1));
    }

    /// What was held and is due.
    pub fn take_due(&mut self, out: &mut Vec<Done>) {
        if let Some(models) = &mut self.models {
            models.take_due(self.now_ns, out);
        }
    }

    /// When to wake for what is due next.
    pub fn wake_ns(&self) -> Option<u64> {
        self.models.as_ref().and_then(|models| models.wake_ns())
    }

    pub fn start_read(&mut self, mut read: Read) {
        read.start_ns = self.now_ns;
        let i = self.reads.insert(read);
        if !self.unbuffered.is_empty() || !self.submit_read(i) {
            self.unbuffered.push_back(i);
        }
    }

    /// Submits a read, or what is left of it. False: there is no buffer for it.
    fn submit_read(&mut self, i: u32) -> bool {
        let read = self.reads.get(i);
        let Some(buffer) = read.buffer.or_else(|| self.staging.take(read.ask)) else { return false };
        if read.buffer.replace(buffer).is_none()
            && let Some(models) = &mut self.models
            && !read.in_memory
        {
            read.due_ns = models.begin_read(self.now_ns, read.file, read.offset, read.need as u64);
        }
        let left = read.ask - read.got;
        let operation = Operation::Read {
            file: read.file,
            to: self.staging.address(buffer, read.got, left),
            len: left as u32,
            offset: read.offset + read.got as u64,
        };
        // SAFETY: the buffer is this read's until its completion.
        unsafe { self.engine.push(operation, Tag::Read(i)) };
        true
    }

    /// Writes from a staging buffer to a place of the file.
    pub fn start_write(
        &mut self,
        op: OpId,
        part: PartId,
        part_at: usize,
        offset: u64,
        len: usize,
        sync: bool,
    ) {
        let start_ns = self.now_ns;
        let due_ns = match &mut self.models {
            Some(models) => models.begin_write(start_ns, offset, len as u64),
            None => 0,
        };
        let write = Write { op, part, part_at, offset, len, done: 0, sync, start_ns, due_ns };
        let i = self.writes.insert(write);
        self.submit_write(i);
    }

    fn submit_write(&mut self, i: u32) {
        let write = *self.writes.get(i);
        let from = &self.staging.part(write.part)[write.part_at + write.done..write.part_at + write.len];
        let operation = Operation::Write {
            from: from.as_ptr(),
            len: from.len() as u32,
            offset: write.offset + write.done as u64,
            sync: write.sync,
        };
        // SAFETY: the core leaves the part alone until the write is done.
        unsafe { self.engine.push(operation, Tag::Write(i)) };
    }

    /// Reads of files that the store has not done. Of what is held it is known when it comes.
    pub fn reads_under_way(&self) -> usize {
        let held = self.models.as_ref().map_or(0, |models| models.held_reads());
        self.reads.len() - held
    }

    /// A read's completion. `None`: it goes on, or is held.
    pub fn read_completed(&mut self, i: u32, result: i32) -> Option<IoResult> {
        let read = self.reads.get(i);
        let outcome = match outcome(result, read.got, read.need, read.align) {
            Outcome::GoesOn(got) => {
                read.got = got;
                self.submit_read(i);
                return None;
            }
            Outcome::Ended(outcome) => outcome,
        };
        if read.due_ns > self.now_ns
            && let Some(models) = &mut self.models
        {
            models.hold(read.due_ns, Tag::Read(i), result);
            return None;
        }
        let read = self.reads.remove(i);
        let ns = self.now_ns.saturating_sub(read.start_ns);
        let seen = match read.file {
            File::Base => &mut self.traffic.base_reads,
            File::Overflow => &mut self.traffic.overflow_reads,
        };
        seen.push(ns);
        let buffer = read.buffer.expect("it was submitted");
        let filled = outcome.map(|()| (buffer, read.skip, read.len));
        if filled.is_err() {
            self.give(buffer);
        }
        Some(IoResult::Staged(read.op, filled))
    }

    /// A write's completion. `None`: it goes on, or is held.
    pub fn write_completed(&mut self, i: u32, result: i32) -> Option<IoResult> {
        let write = self.writes.get(i);
        let outcome = match outcome(result, write.done, write.len, BLOCK_BYTES) {
            Outcome::GoesOn(done) => {
                write.done = done;
                self.submit_write(i);
                return None;
            }
            Outcome::Ended(outcome) => outcome,
        };
        if write.due_ns > self.now_ns
            && let Some(models) = &mut self.models
        {
            models.hold(write.due_ns, Tag::Write(i), result);
            return None;
        }
        let write = self.writes.remove(i);
        self.traffic.overflow_writes.push(self.now_ns.saturating_sub(write.start_ns));
        Some(IoResult::Plain(write.op, outcome))
    }

    /// Gives back the buffer of a read whose content was used.
    pub fn give(&mut self, buffer: Buffer) {
        self.staging.give(buffer);
        while let Some(&i) = self.unbuffered.front() {
            if !self.submit_read(i) {
                break;
            }
            self.unbuffered.pop_front();
        }
    }

    /// Reads a range of the base image's file that is not in the page cache, or whose file is open O_DIRECT.
    pub fn read_base_file(&mut self, op: OpId, align: u64, in_memory: bool, offset: u64, len: u32) {
        let skip = offset % align;
        let need = skip as usize + len as usize;
        let ask = need.next_multiple_of(align as usize);
        if !in_memory {
            self.count_store_reads(1, len.into());
        }
        self.start_read(Read {
            op,
            file: File::Base,
            offset: offset - skip,
            skip: skip as usize,
            len: len as usize,
            need,
            ask,
            align: align as usize,
            got: 0,
            in_memory,
            buffer: None,
            start_ns: 0,
            due_ns: 0,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_transfers_go_on_from_an_aligned_place_and_others_end() {
        let went = |result, done| match outcome(result, done, 8192, 512) {
            Outcome::GoesOn(done) => Ok(done),
            Outcome::Ended(result) => Err(result),
        };
        assert_eq!(went(8192, 0), Err(Ok(())));
        assert_eq!(went(4096, 4096), Err(Ok(())));
        assert_eq!(went(1000, 4096), Ok(4096 + 512));
        assert_eq!(went(511, 4096), Err(Err(Errno::IO)), "not even a sector: it would go on for ever");
        assert_eq!(went(0, 4096), Err(Err(Errno::IO)));
        assert_eq!((went(-libc::EAGAIN, 512), went(-libc::EINTR, 0)), (Ok(512), Ok(0)));
        assert_eq!(went(-libc::ENOSPC, 0), Err(Err(Errno(libc::ENOSPC))));
    }
}
