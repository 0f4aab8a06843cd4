//! The base image as it is read: what is in the page cache at once, the rest by the engine or, where it takes more than a
//! read (clusters of a format, digests), by the image's own thread; what is missing of a streamed image, when it has come.
//!
//! Owns the image, its thread's jobs, and the reads that wait for a chunk. Invariants: the thread has a bounded number of jobs;
//! more wait here, in their order. A read of a streamed image lies in one chunk, for which the core and the least size of chunks
//! care.

use super::block_status::MAP_JOB;
use super::io::IoResult;
use super::transfers::Transfers;
use spillway_core::{Counters, Errno, OpId, add, set};
use spillway_image::{Arrival, BaseImage, BaseReader, Extent, ExtentCache, ExtentKind, Finished, RawImage};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// Jobs of the base image's thread at a time; more wait here.
const BASE_JOBS: usize = 32;

/// How long a chunk may be missing until that is told: 10 seconds, but for the time until the guest is stopped then. Guests give up a
/// disk that does not answer for 30 seconds.
const STALL_NS: u64 = 9_700_000_000;

/// The base image.
pub struct BaseReads {
    image: BaseImage,
    extents: ExtentCache,
    /// What the thread has found out for the question that was asked.
    mapped: Option<Vec<Extent>>,
    waiting: VecDeque<(OpId, u64, u32)>,
    spare: Vec<Vec<u8>>,
    bounce: Vec<u8>,
    /// Where the image was found not to be what its digests say.
    damaged: Vec<u64>,
    missing: Missing,
    used: UsedChunks,
}

/// The chunks of a streamed image that were read since the start or the last reset.
#[derive(Default)]
struct UsedChunks {
    /// A bit for each chunk; empty for other images.
    bits: Vec<u64>,
    /// In the order of their first use, until somebody has asked for it.
    order: Option<Vec<u32>>,
    /// Since the counters were published: chunks that were there at their first use, and their bytes.
    found: u64,
    found_bytes: u64,
}

impl UsedChunks {
    /// Whether this is a use of a chunk after the first.
    #[inline]
    fn has(&self, chunk: u32) -> bool {
        self.bits.get(chunk as usize / 64).is_none_or(|bits| bits >> (chunk % 64) & 1 == 1)
    }

    /// Notes the first use of a chunk of so many bytes, which is there or is not.
    fn add(&mut self, chunk: u32, len: u64, is_there: bool) {
        self.bits[chunk as usize / 64] |= 1 << (chunk % 64);
        if let Some(order) = self.order.as_mut().filter(|order| order.len() < MOST_TOUCHED) {
            order.push(chunk);
        }
        if is_there {
            (self.found, self.found_bytes) = (self.found + 1, self.found_bytes + len);
        }
    }
}

/// Chunks whose order of first use is noted.
const MOST_TOUCHED: usize = 8192;

/// The chunks of a streamed image that were asked for.
#[derive(Default)]
struct Missing {
    /// Who waits for each, and since when.
    chunks: HashMap<u32, Waiting>,
    /// Reads whose chunk has come with its content, or will not come.
    ended: VecDeque<IoResult>,
    /// One has not come for [`STALL_NS`].
    is_stalled: bool,
    /// Since the counters were published: chunks that were asked for, stalls, and how long chunks took.
    asked: u64,
    stalls: u64,
    took_ns: Vec<u64>,
}

impl Missing {
    /// Since when the chunk is asked for that has been missing for longest.
    fn since_ns(&self) -> Option<u64> {
        self.chunks.values().map(|waiting| waiting.since_ns).min()
    }
}

struct Waiting {
    since_ns: u64,
    /// Operation, place in the image, length.
    reads: Vec<(OpId, u64, u32)>,
}

/// What is at a place of the image and can be served at once.
pub enum Now<'a> {
    Bytes(&'a [u8]),
    Zeroes,
}

impl BaseReads {
    pub fn new(image: BaseImage) -> BaseReads {
        let mut reads = BaseReads {
            image,
            extents: ExtentCache::new(),
            mapped: None,
            waiting: VecDeque::new(),
            spare: Vec::new(),
            bounce: Vec::new(),
            damaged: Vec::new(),
            missing: Missing::default(),
            used: UsedChunks::default(),
        };
        reads.note_touches();
        reads
    }

    /// Notes which chunks of a streamed image are read from now on.
    pub fn note_touches(&mut self) {
        let BaseImage::Streamed(image) = &self.image else { return };
        self.used.bits = vec![0; image.chunks().div_ceil(64) as usize];
        self.used.order = Some(Vec::new());
    }

    /// The chunks that were read since then, in the order of their first use. Their order is noted no longer.
    pub fn take_touched(&mut self) -> Vec<u32> {
        self.used.order.take().unwrap_or_default()
    }

    /// Notes that a chunk of a streamed image is read.
    #[inline]
    fn touch(&mut self, offset: u64) {
        let BaseImage::Streamed(image) = &self.image else { return };
        let chunk = image.chunk_at(offset);
        if !self.used.has(chunk) {
            let at = image.offset_of(chunk);
            let len = (image.offset_of(chunk + 1)).min(image.file().size_bytes()) - at;
            self.used.add(chunk, len, image.has(offset));
        }
    }

    /// The connection on which missing chunks are asked for, if there is one.
    pub fn connection(&self) -> Option<BorrowedFd<'_>> {
        match &self.image {
            BaseImage::Streamed(image) => image.connection(),
            BaseImage::Raw { .. } | BaseImage::Read(_) => None,
        }
    }

    /// Goes on with another connection and its memory.
    pub fn connect(&mut self, connection: OwnedFd, memory: OwnedFd) -> io::Result<()> {
        match &mut self.image {
            BaseImage::Streamed(image) => image.connect(connection, memory.as_fd()),
            BaseImage::Raw { .. } | BaseImage::Read(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Whether reads wait for chunks.
    pub fn chunks_are_missing(&self) -> bool {
        !self.missing.chunks.is_empty()
    }

    /// When it is to be told that a chunk does not come.
    pub fn stall_due_ns(&self) -> Option<u64> {
        let since_ns = self.missing.since_ns().filter(|_| !self.missing.is_stalled)?;
        Some(since_ns + STALL_NS)
    }

    /// Whether a chunk has been missing for so long that it must be told, or no longer is; if that is new.
    #[inline]
    pub fn stall_change(&mut self, now_ns: u64) -> Option<bool> {
        let missing = &mut self.missing;
        if missing.chunks.is_empty() && !missing.is_stalled {
            return None;
        }
        let is_stalled = missing.since_ns().is_some_and(|since_ns| since_ns + STALL_NS <= now_ns);
        if is_stalled == missing.is_stalled {
            return None;
        }
        missing.is_stalled = is_stalled;
        missing.stalls += u64::from(is_stalled);
        Some(is_stalled)
    }

    /// Adds what was seen of missing chunks to the counters.
    pub fn publish(&mut self, c: &Counters) {
        let BaseImage::Streamed(_) = self.image else { return };
        let missing = &mut self.missing;
        add(&c.chunks_asked, std::mem::take(&mut missing.asked));
        add(&c.chunk_stalls, std::mem::take(&mut missing.stalls));
        add(&c.chunks_found, std::mem::take(&mut self.used.found));
        add(&c.chunks_found_bytes, std::mem::take(&mut self.used.found_bytes));
        set(&c.chunks_missing, missing.chunks.len() as u64);
        set(&c.is_chunk_stalled, u64::from(missing.is_stalled));
        missing.took_ns.drain(..).for_each(|ns| c.chunk_latency.record(ns, 1));
    }

    /// The thread, if the image needs one.
    pub fn thread(&self) -> Option<&BaseReader> {
        self.image.reader()
    }

    /// What is known of where the image lies.
    pub fn extents(&self) -> &ExtentCache {
        &self.extents
    }

    /// What the thread has found out for the question that was asked, once.
    pub fn take_mapped(&mut self) -> Option<Vec<Extent>> {
        self.mapped.take()
    }

    /// Where the image was found to be damaged since it was asked last.
    pub fn take_damaged(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.damaged)
    }

    /// Asks the thread where the image lies in this range; [`BaseReads::take_mapped`] has the answer, once. False: there is no
    /// thread to ask.
    pub fn map(&mut self, offset: u64, len: u64) -> bool {
        let Some(reader) = self.image.reader_mut() else { return false };
        reader.submit_map(MAP_JOB, offset, len);
        true
    }

    /// Whether a raw image is known to have a hole there. Of one whose holes nobody has asked for, nothing is.
    #[inline]
    fn is_hole(&self, offset: u64, len: u32) -> bool {
        !self.extents.is_empty() && self.plain(offset, u64::from(len)) == Some(ExtentKind::Zero)
    }

    /// Where a range of such an image lies in one plain piece of its file, or that it is zero; if that is known.
    fn plain(&self, offset: u64, len: u64) -> Option<ExtentKind> {
        let extent = self.extents.lookup(offset)?;
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

    /// What can be served without waiting. `None`: it would have to wait.
    pub fn now(&mut self, offset: u64, len: u32) -> Option<Result<Now<'_>, Errno>> {
        self.touch(offset);
        let (image, offset) = match &self.image {
            BaseImage::Raw { .. } if self.is_hole(offset, len) => return Some(Ok(Now::Zeroes)),
            BaseImage::Raw { image, .. } => (image, offset),
            BaseImage::Streamed(image) if image.has(offset) => (image.file(), offset),
            BaseImage::Streamed(_) => return None,
            BaseImage::Read(reader) => match self.plain(offset, u64::from(len))? {
                ExtentKind::Raw { file_offset } => (reader.file(), file_offset),
                ExtentKind::Zero => return Some(Ok(Now::Zeroes)),
                ExtentKind::Compressed => return None,
            },
        };
        let read = resident(image, &mut self.bounce, offset, len)?;
        Some(read.map(|()| Now::Bytes(&self.bounce[..len as usize])))
    }

    /// Reads what has to be waited for.
    pub fn read(&mut self, transfers: &mut Transfers, op: OpId, offset: u64, len: u32) {
        self.touch(offset);
        let file = match &self.image {
            BaseImage::Raw { image, .. } => Some((image, offset)),
            BaseImage::Streamed(image) if image.has(offset) => Some((image.file(), offset)),
            BaseImage::Streamed(_) => return self.wait_for_chunk(transfers.now_ns, op, offset, len),
            BaseImage::Read(reader) => match self.plain(offset, u64::from(len)) {
                Some(ExtentKind::Raw { file_offset }) => Some((reader.file(), file_offset)),
                _ => None,
            },
        };
        if let Some((image, offset)) = file {
            read_file(transfers, image, op, offset, len);
        } else if self.jobs(transfers) < BASE_JOBS {
            self.submit(transfers, op, offset, len);
        } else {
            self.waiting.push_back((op, offset, len));
        }
    }

    /// Asks for the chunk of a streamed image that a read needs, unless that was done.
    #[cold]
    fn wait_for_chunk(&mut self, now_ns: u64, op: OpId, offset: u64, len: u32) {
        let BaseImage::Streamed(image) = &mut self.image else { return };
        let chunk = image.chunk_at(offset);
        let Missing { chunks, asked, .. } = &mut self.missing;
        let waiting = chunks.entry(chunk).or_insert_with(|| {
            image.ask(chunk);
            *asked += 1;
            Waiting { since_ns: now_ns, reads: Vec::new() }
        });
        waiting.reads.push((op, offset, len));
    }

    /// Takes in the chunks that have come.
    fn take_arrivals(&mut self, transfers: &mut Transfers) {
        let BaseImage::Streamed(image) = &mut self.image else { return };
        while let Some((chunk, arrival)) = image.arrival() {
            let Some(waiting) = self.missing.chunks.remove(&chunk) else { continue };
            self.missing.took_ns.push(transfers.now_ns.saturating_sub(waiting.since_ns));
            if matches!(arrival, Arrival::Damaged) {
                self.damaged.push(image.offset_of(chunk));
            }
            for (op, offset, len) in waiting.reads {
                let came = match &arrival {
                    Arrival::Resident => {
                        read_file(transfers, image.file(), op, offset, len);
                        continue;
                    }
                    Arrival::Passed(file) => {
                        let mut bytes = self.spare.pop().unwrap_or_default();
                        bytes.resize(len as usize, 0);
                        let read = file.read_exact_at(&mut bytes, offset - image.offset_of(chunk));
                        read.map(|()| bytes).map_err(|_| Errno::IO)
                    }
                    Arrival::Damaged => Err(Errno::IO),
                };
                self.missing.ended.push_back(IoResult::Owned(op, came));
            }
        }
    }

    /// What the thread has finished, and is not held; or a read whose chunk has come.
    pub fn finished(&mut self, transfers: &mut Transfers) -> Option<IoResult> {
        if let BaseImage::Streamed(_) = self.image {
            self.take_arrivals(transfers);
            return self.missing.ended.pop_front();
        }
        loop {
            let reader = self.image.reader_mut()?;
            let Finished { job, buffer, result, store_reads, extents, damaged_at } = reader.finished()?;
            self.damaged.extend(damaged_at);
            for extent in &extents {
                self.extents.insert(*extent);
            }
            let bytes = store_reads.iter().map(|read| read.len).sum::<u64>();
            transfers.count_store_reads(store_reads.len() as u64, bytes);
            if job == MAP_JOB {
                self.mapped = Some(extents);
                self.next(transfers);
                continue;
            }
            let (op, came) = (OpId(job as u32), result.map(|()| buffer).map_err(Errno));
            let now_ns = transfers.now_ns;
            let came = match &mut transfers.models {
                Some(models) => models.job_done(op, now_ns, &store_reads, came),
                None => Some(came),
            };
            if let Some(came) = came {
                self.next(transfers);
                return Some(IoResult::Owned(op, came));
            }
        }
    }

    /// A read of the thread's that was held is due.
    pub fn due(&mut self, transfers: &mut Transfers, n: u32) -> Option<IoResult> {
        let came = transfers.models.as_mut()?.job_due(n)?;
        self.next(transfers);
        Some(IoResult::Owned(OpId(n), came))
    }

    /// The core has used what the thread has read.
    pub fn give(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < BASE_JOBS {
            self.spare.push(buffer);
        }
    }

    /// Jobs of the thread's are not answered. What waits for a missing chunk does not count: nothing of it is under way here.
    pub fn are_busy(&self, transfers: &Transfers) -> bool {
        self.jobs(transfers) + self.waiting.len() > 0
    }

    /// One is answered: the next that waits is the thread's.
    fn next(&mut self, transfers: &mut Transfers) {
        if let Some((op, offset, len)) = self.waiting.pop_front() {
            self.submit(transfers, op, offset, len);
        }
    }

    fn submit(&mut self, transfers: &mut Transfers, op: OpId, offset: u64, len: u32) {
        let reader = self.image.reader_mut().expect("what is not plain has a thread to read it");
        let now_ns = transfers.now_ns;
        if let Some(models) = &mut transfers.models {
            models.job(op, now_ns);
        }
        let spare = self.spare.pop().unwrap_or_default();
        reader.submit(u64::from(op.0), offset, len, spare);
    }

    /// Jobs of the thread that are not answered.
    fn jobs(&self, transfers: &Transfers) -> usize {
        let held = transfers.models.as_ref().map_or(0, |models| models.jobs());
        self.image.reader().map_or(0, BaseReader::unfinished).max(held)
    }
}

/// Reads from the file of an image.
fn read_file(transfers: &mut Transfers, image: &RawImage, op: OpId, offset: u64, len: u32) {
    let (align, in_memory) = (u64::from(image.dio_align()), image.in_memory());
    transfers.read_base_file(op, align, in_memory, offset, len);
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
