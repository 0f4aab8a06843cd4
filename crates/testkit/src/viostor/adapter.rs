//! `viostor` itself: what it negotiates, which limits it derives from the configuration, how commands become requests, and
//! that it completes all of them itself when it resets its device.
//!
//! Owns rings, requests and their memory; never chooses or repeats a command. Invariant: a slot belongs to one command from
//! [`Adapter::start_io`] until [`Adapter::release`], or until a reset.

use super::layout::{
    DATA_BYTES, EXTENSION_BYTES, EXTENSION_STEP, MOST_PARTS, MOST_RANGES, PAGE, Place, Scatter, Segment,
};
use super::memory::GuestMemory;
use super::ring::Ring;
use super::session::Session;
use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::path::Path;
use std::time::Duration;

const SECTOR: u64 = 512;
const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const T_GET_ID: u32 = 8;
const T_DISCARD: u32 = 11;

const SIZE_MAX: u64 = 1 << 1;
const SEG_MAX: u64 = 1 << 2;
const BLK_SIZE: u64 = 1 << 6;
const FLUSH: u64 = 1 << 9;
const TOPOLOGY: u64 = 1 << 10;
const CONFIG_WCE: u64 = 1 << 11;
const MQ: u64 = 1 << 12;
const DISCARD: u64 = 1 << 13;
const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;
/// What it acknowledges if it is offered: BARRIER, SIZE_MAX, SEG_MAX, GEOMETRY, RO, BLK_SIZE, FLUSH, CONFIG_WCE, MQ, DISCARD,
/// WRITE_ZEROES, ANY_LAYOUT, INDIRECT_DESC, EVENT_IDX, VERSION_1, ACCESS_PLATFORM, ORDER_PLATFORM; with VERSION_1 packed rings
/// too, which this one does not make. Not TOPOLOGY, whose fields it reads all the same.
const ACKNOWLEDGED: u64 = 1 << 0
    | SIZE_MAX
    | SEG_MAX
    | 1 << 4
    | 1 << 5
    | BLK_SIZE
    | FLUSH
    | CONFIG_WCE
    | MQ
    | DISCARD
    | 1 << 14
    | 1 << 27
    | INDIRECT_DESC
    | EVENT_IDX
    | VERSION_1
    | 1 << 33
    | 1 << 36;

/// `BLOCK_SERIAL_STRLEN`.
const SERIAL_BYTES: u32 = 20;
/// In the byte behind the serial number, which belongs to another variable.
const BEHIND_SERIAL: u8 = 0xa5;
/// In a status byte until the device writes it.
const UNWRITTEN: u8 = 0xee;
/// In what a request had when its device was reset: the device must have let go of it.
const POISON: u8 = 0xd7;
/// `MIN_DISCARD_SECTOR_ALIGNMENT`.
const LEAST_ALIGNMENT: u32 = 8;

/// What the class driver asks for, in sectors of 512 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// SCSI READ.
    Read {
        /// First sector.
        sector: u64,
        /// Sectors.
        sectors: u32,
    },
    /// SCSI WRITE.
    Write {
        /// First sector.
        sector: u64,
        /// Sectors.
        sectors: u32,
        /// With "force unit access": a flush follows it, if the write cache is on.
        fua: bool,
    },
    /// SCSI UNMAP of these ranges: first sector and sectors. Without a range, the request has a buffer of no bytes.
    Unmap(Vec<(u64, u32)>),
    /// SCSI SYNCHRONIZE CACHE.
    Synchronize,
    /// The page of INQUIRY with the serial number.
    SerialNumber,
}

/// Which of the two drivers in `viostor.sys` has the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The usual one.
    Running,
    /// That of crash dumps and hibernation: one queue, no indirect tables.
    Dump,
}

/// What the driver tells Windows of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sectors of the disk.
    pub capacity_sectors: u64,
    /// Bytes of a logical block.
    pub block_bytes: u32,
    /// `LogicalPerPhysicalExponent`.
    pub physical_block_exp: u8,
    /// `OptimalTransferLengthGranularity`, in logical blocks.
    pub granularity_blocks: u16,
    /// `OptimalTransferLength`, in logical blocks. 0: none is better than another.
    pub optimal_blocks: u32,
    /// `MaximumTransferLength`.
    pub transfer_bytes: u64,
    /// `NumberOfPhysicalBreaks`: most segments of a request.
    pub segments: usize,
    /// Commands that Windows may send at once.
    pub depth: usize,
    /// Most sectors in an UNMAP, by which the class driver cuts.
    pub unmap_sectors: u32,
    /// Most ranges in an UNMAP.
    pub unmap_ranges: usize,
    /// `OptimalUnmapGranularity`, in logical blocks. 0: not a thin disk.
    pub unmap_granularity_blocks: u32,
}

struct Request {
    command: Command,
    segments: Vec<Segment>,
    queue: usize,
    /// A flush is to follow.
    flush_follows: bool,
    /// Number of the request, as `srbExt->id`.
    number: u64,
    /// The worst status so far.
    status: u8,
}

/// A disk with `viostor` on it.
pub struct Adapter {
    session: Session,
    memory: GuestMemory,
    rings: Vec<Ring>,
    requests: Vec<Option<Request>>,
    free: Vec<usize>,
    done: VecDeque<(usize, u8)>,
    /// What each slot had when its device was reset.
    poisoned: Vec<Vec<Segment>>,
    features: u64,
    limits: Limits,
    mode: Mode,
    queue_size: u16,
    queues: usize,
    writeback: bool,
    next_number: u64,
    strays: u64,
}

impl Adapter {
    /// Finds the disk and starts it, in a guest of so many processors whose VMM makes queues of so many descriptors.
    pub fn connect(socket: &Path, cpus: usize, queue_size: u16) -> Result<Adapter> {
        let mut session = Session::connect(socket)?;
        let slots = usize::from(queue_size);
        let most_queues = session.queues()?;
        let rings = (Ring::bytes(queue_size).next_multiple_of(PAGE)) * most_queues;
        let low = PAGE + rings + slots as u64 * EXTENSION_STEP;
        let memory = GuestMemory::new(low.next_multiple_of(PAGE), slots as u64 * DATA_BYTES)?;
        let limits = read_limits(&mut session, queue_size, Mode::Running)?;
        let features = session.features()? & ACKNOWLEDGED;
        let writeback = match features & CONFIG_WCE {
            0 => features & FLUSH != 0,
            _ => session.config::<1>(32)? != [0],
        };
        let queues = match features & MQ {
            0 => 1,
            _ => usize::from(u16::from_le_bytes(session.config(34)?)).min(cpus),
        };
        ensure!(queues >= 1 && queues as u64 <= most_queues, "{queues} of {most_queues} queues");
        let mut adapter = Adapter {
            session,
            memory,
            rings: Vec::new(),
            requests: (0..slots).map(|_| None).collect(),
            free: (0..slots).rev().collect(),
            done: VecDeque::new(),
            poisoned: vec![Vec::new(); slots],
            features,
            limits,
            mode: Mode::Running,
            queue_size,
            queues,
            writeback,
            next_number: 1,
            strays: 0,
        };
        adapter.start()?;
        Ok(adapter)
    }

    /// `VirtIoHwInitialize`: the queues, where they always are.
    fn start(&mut self) -> Result<()> {
        let [low, _] = self.memory.starts();
        self.memory.write(low + u64::from(SERIAL_BYTES), &[BEHIND_SERIAL]);
        let step = Ring::bytes(self.queue_size).next_multiple_of(PAGE);
        let count = if self.mode == Mode::Dump { 1 } else { self.queues };
        let ring = |i: usize| Ring::new(&mut self.memory, low + PAGE + i as u64 * step, self.queue_size);
        self.rings = (0..count).map(ring).collect::<Result<_>>()?;
        self.session.start(self.features, &self.memory, &self.rings)
    }

    /// What the driver tells Windows.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Features that were negotiated.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Queues in use.
    pub fn queues(&self) -> usize {
        self.rings.len()
    }

    /// Commands under way.
    pub fn in_flight(&self) -> usize {
        self.requests.len() - self.free.len()
    }

    /// How often the device has changed what was not its own any more.
    pub fn strays(&self) -> u64 {
        self.strays
    }

    /// MODE SELECT, by which Windows turns the write cache on or off.
    pub fn set_write_cache(&mut self, on: bool) -> Result<()> {
        self.session.set_config(32, u8::from(on))?;
        self.writeback = on;
        Ok(())
    }

    fn place(&self, slot: usize) -> Place {
        let [low, high] = self.memory.starts();
        let step = Ring::bytes(self.queue_size).next_multiple_of(PAGE);
        let extensions =
            (low + self.memory.regions()[0].bytes - self.requests.len() as u64 * EXTENSION_STEP) / 16 * 16;
        debug_assert!(extensions >= low + PAGE + step * self.queues as u64);
        Place { extension: extensions + slot as u64 * EXTENSION_STEP, data: high + slot as u64 * DATA_BYTES }
    }

    /// Sends a command from a processor, with the content of a write; its buffer lies as `scatter` says, `lead` bytes into its
    /// first page. The command's slot, or `None`: no descriptors are left (`StorPortBusy`).
    pub(super) fn start_io(
        &mut self,
        cpu: usize,
        command: Command,
        content: &[u8],
        (scatter, lead): (Scatter, u64),
    ) -> Result<Option<usize>> {
        let Some(&slot) = self.free.last() else { return Ok(None) };
        self.look_for_strays(slot);
        let place = self.place(slot);
        let queue = cpu % self.rings.len();
        let mut segments = Vec::new();
        let (kind, at) = match &command {
            Command::Read { sector, sectors } | Command::Write { sector, sectors, .. } => {
                let bytes = u64::from(*sectors) * SECTOR;
                ensure!(bytes > 0 && bytes <= self.limits.transfer_bytes, "{command:?} is too long");
                ensure!(
                    sector + u64::from(*sectors) <= self.limits.capacity_sectors,
                    "{command:?} is outside"
                );
                segments = place.segments(scatter, lead, bytes);
                ensure!(segments.len() <= self.limits.segments, "{} segments", segments.len());
                let mut from = content;
                for part in segments.iter().filter(|_| matches!(command, Command::Write { .. })) {
                    let (now, later) = from.split_at(part.bytes as usize);
                    self.memory.write(part.at, now);
                    from = later;
                }
                (if matches!(command, Command::Read { .. }) { T_IN } else { T_OUT }, *sector)
            }
            Command::Unmap(ranges) => {
                ensure!(ranges.len() <= MOST_RANGES.min(self.limits.unmap_ranges), "{command:?}: too many");
                segments.push(place.ranges(ranges.len()));
                let bytes = ranges.iter().flat_map(|&(sector, sectors)| {
                    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat()
                });
                self.memory.write(segments[0].at, &bytes.collect::<Vec<_>>());
                (T_DISCARD, 0)
            }
            Command::Synchronize => (T_FLUSH, 0),
            Command::SerialNumber => {
                segments.push(Segment { at: self.memory.starts()[0], bytes: SERIAL_BYTES });
                (T_GET_ID, 0)
            }
        };
        let flush_follows = self.writeback && matches!(command, Command::Write { fua: true, .. });
        let number = self.next_number;
        let request = Request { command, segments, queue, flush_follows, number, status: 0 };
        if !self.add(slot, kind, at, &request)? {
            return Ok(None);
        }
        self.next_number += 1;
        self.free.pop();
        self.requests[slot] = Some(request);
        // StorPort may have the driver look for completions when it starts a read or a write.
        if matches!(kind, T_IN | T_OUT) && queue % 2 == 1 {
            self.complete(queue)?;
        }
        Ok(Some(slot))
    }

    /// Puts a request into its queue, as header, data and status.
    fn add(&mut self, slot: usize, kind: u32, sector: u64, request: &Request) -> Result<bool> {
        let place = self.place(slot);
        let data = if kind == T_FLUSH { &[][..] } else { &request.segments };
        let parts: Vec<Segment> = [&[place.header()], data, &[place.status()]].concat();
        ensure!(parts.len() <= MOST_PARTS as usize, "{} parts", parts.len());
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.memory.write(place.header().at, &header);
        self.memory.write(place.status().at, &[UNWRITTEN]);
        let read = if matches!(kind, T_OUT | T_DISCARD) { 1 + data.len() } else { 1 };
        let has_tables = self.features & INDIRECT_DESC != 0 && self.mode == Mode::Running;
        let ring = &mut self.rings[request.queue];
        let added = ring.add(&mut self.memory, &parts, read, has_tables.then(|| place.table()), slot);
        if added {
            ring.kick(&self.memory)?;
        }
        Ok(added)
    }

    /// Waits for an interrupt, so long at most, and handles those that have come: each is of one queue.
    pub fn wait(&mut self, most: Duration) -> Result<()> {
        if !self.done.is_empty() {
            return Ok(());
        }
        let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
        let mut fds: Vec<_> = self.rings.iter().map(|ring| PollFd::new(&ring.call, PollFlags::IN)).collect();
        match poll(&mut fds, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => return Ok(()),
            other => other.context("cannot wait for an interrupt")?,
        };
        let interrupted: Vec<usize> =
            (0..fds.len()).filter(|&i| fds[i].revents().contains(PollFlags::IN)).collect();
        for queue in interrupted {
            rustix::io::read(&self.rings[queue].call, &mut [0; 8]).context("cannot take an interrupt")?;
            self.complete(queue)?;
        }
        Ok(())
    }

    /// `VioStorCompleteRequest`.
    fn complete(&mut self, queue: usize) -> Result<()> {
        loop {
            self.rings[queue].disable_interrupts();
            while let Some(slot) = self.rings[queue].take(&mut self.memory)? {
                self.finish(slot)?;
            }
            if self.rings[queue].enable_interrupts(&self.memory) {
                return Ok(());
            }
        }
    }

    fn finish(&mut self, slot: usize) -> Result<()> {
        let mut status = [0];
        self.memory.read(self.place(slot).status().at, &mut status);
        ensure!(status != [UNWRITTEN], "a request was given back without a status");
        let mut request =
            self.requests[slot].take().context("a request came back that was completed before")?;
        request.status = request.status.max(status[0]);
        if std::mem::take(&mut request.flush_follows) {
            // The flush has the request's header and status byte.
            ensure!(self.add(slot, T_FLUSH, 0, &request)?, "no descriptor is left for a flush");
        } else {
            self.done.push_back((slot, request.status));
        }
        self.requests[slot] = Some(request);
        Ok(())
    }

    /// A command that was completed, and its status byte. Its slot is to be released.
    pub fn completed(&mut self) -> Option<(usize, u8)> {
        self.done.pop_front()
    }

    /// The content of a read that was completed.
    pub fn content(&mut self, slot: usize, to: &mut [u8]) -> Result<()> {
        let request = self.requests[slot].as_ref().context("no such request")?;
        let mut to = to;
        for part in &request.segments {
            let (now, later) = to.split_at_mut(part.bytes as usize);
            self.memory.read(part.at, now);
            to = later;
        }
        Ok(())
    }

    /// The serial number that the disk has answered.
    pub fn serial_number(&mut self) -> Result<[u8; SERIAL_BYTES as usize]> {
        let (mut serial, mut behind) = ([0; SERIAL_BYTES as usize], [0]);
        let at = self.memory.starts()[0];
        self.memory.read(at, &mut serial);
        self.memory.read(at + u64::from(SERIAL_BYTES), &mut behind);
        ensure!(behind == [BEHIND_SERIAL], "what lies behind the serial number was changed");
        Ok(serial)
    }

    /// Frees the slot of a command that was completed.
    pub fn release(&mut self, slot: usize) {
        debug_assert!(self.requests[slot].is_some());
        self.requests[slot] = None;
        self.free.push(slot);
    }

    /// `VioStorResetBus`: stops the device, completes what is under way with "bus reset", whether the device has done it or not,
    /// and starts it again. `while_waiting` runs when the device has been asked to stop. Returns the slots of what was
    /// completed so, which are free, queue by queue in their order.
    pub fn reset(&mut self, mode: Mode, while_waiting: impl FnOnce()) -> Result<Vec<usize>> {
        self.session.stop(self.rings.len() as u32, while_waiting)?;
        self.done.clear();
        let mut pending: Vec<usize> =
            (0..self.requests.len()).filter(|&i| self.requests[i].is_some()).collect();
        pending.sort_by_key(|&slot| self.requests[slot].as_ref().map(|r| (r.queue, r.number)));
        for &slot in &pending {
            self.poison(slot);
            self.release(slot);
        }
        self.mode = mode;
        let limits = read_limits(&mut self.session, self.queue_size, mode)?;
        let same = Limits { transfer_bytes: 0, segments: 0, depth: 0, ..limits };
        ensure!(
            same == Limits { transfer_bytes: 0, segments: 0, depth: 0, ..self.limits },
            "the disk has changed: {limits:?}, before {:?}",
            self.limits
        );
        self.limits = limits;
        self.features = self.session.features()? & ACKNOWLEDGED;
        self.start()?;
        Ok(pending)
    }

    /// The memory of a request is Windows' again, and holds something else.
    fn poison(&mut self, slot: usize) {
        let extension = Segment { at: self.place(slot).extension, bytes: EXTENSION_BYTES as u32 };
        let request = self.requests[slot].as_ref();
        let is_transfer =
            request.is_some_and(|r| matches!(r.command, Command::Read { .. } | Command::Write { .. }));
        let mut parts = request.filter(|_| is_transfer).map_or_else(Vec::new, |r| r.segments.clone());
        parts.push(extension);
        parts.iter().for_each(|part| self.memory.fill(part.at, part.bytes as usize, POISON));
        self.poisoned[slot] = parts;
    }

    fn look_for_strays(&mut self, slot: usize) {
        for part in std::mem::take(&mut self.poisoned[slot]) {
            self.strays += u64::from(!self.memory.holds_only(part.at, part.bytes as usize, POISON));
        }
    }

    /// Looks at all that requests had when the device was reset, and has not been used since.
    pub fn look_for_all_strays(&mut self) -> u64 {
        (0..self.poisoned.len()).for_each(|slot| self.look_for_strays(slot));
        self.strays
    }
}

/// `RhelGetDiskGeometry` and what `VirtIoFindAdapter` makes of it.
fn read_limits(session: &mut Session, queue_size: u16, mode: Mode) -> Result<Limits> {
    let offered = session.features()?;
    for (bit, what) in [(VERSION_1, "VERSION_1"), (EVENT_IDX, "EVENT_IDX"), (INDIRECT_DESC, "INDIRECT_DESC")]
    {
        ensure!(offered & bit != 0, "{what} is not offered, without which this driver was not written");
    }
    let has = |bit| offered & bit != 0;
    let mut number = |bit, at, without| -> Result<u32> {
        if has(bit) { Ok(u32::from_le_bytes(session.config(at)?)) } else { Ok(without) }
    };
    let size_max = number(SIZE_MAX, 8, PAGE as u32)?;
    let seg_max = number(SEG_MAX, 12, 0)?;
    let block_bytes = number(BLK_SIZE, 20, SECTOR as u32)?;
    let unmap_alignment = number(DISCARD, 44, 0)?;
    let unmap_sectors = number(DISCARD, 36, 0)?;
    let unmap_ranges = number(DISCARD, 40, 0)?;
    let capacity_sectors = u64::from_le_bytes(session.config(0)?);
    let (mut physical_block_exp, mut granularity_blocks, mut optimal_blocks) = (0, 0, 0);
    if has(TOPOLOGY) {
        [physical_block_exp] = session.config(24)?;
        let [first_aligned] = session.config(25)?;
        ensure!(first_aligned == 0, "the first {first_aligned} blocks lie before a physical one");
        granularity_blocks = u16::from_le_bytes(session.config(26)?);
        optimal_blocks = u32::from_le_bytes(session.config(28)?);
    }
    if block_bytes == 0 || !u64::from(block_bytes).is_multiple_of(SECTOR) {
        bail!("a logical block of {block_bytes} bytes");
    }
    let queue_size = usize::from(queue_size);
    let (mut breaks, depth) = match mode {
        Mode::Running => (512, queue_size),
        Mode::Dump => {
            let breaks = (queue_size / 4).max(16);
            (breaks, (queue_size / breaks).saturating_sub(1).max(1))
        }
    };
    if seg_max > 0 && size_max > 0 {
        let pages = u64::from(size_max).next_multiple_of(PAGE);
        breaks = (u64::from(seg_max) * u64::from(size_max) / pages) as usize - 1;
    }
    Ok(Limits {
        capacity_sectors,
        block_bytes,
        physical_block_exp,
        granularity_blocks,
        optimal_blocks,
        transfer_bytes: breaks as u64 * PAGE,
        segments: breaks + 1,
        depth,
        unmap_sectors: if unmap_sectors == 0 { u32::MAX } else { unmap_sectors },
        unmap_ranges: (unmap_ranges as usize).min(MOST_RANGES),
        unmap_granularity_blocks: match unmap_alignment {
            0 => 0,
            sectors => sectors.max(LEAST_ALIGNMENT) * SECTOR as u32 / block_bytes,
        },
    })
}
