//! The memory of a disk on real memfds: how long a reset takes, and that all of it comes back, in short steps.
//!
//! Resets and memory that comes back are timed by the wall clock, as who waits for them does, with bounds for a machine
//! with two cores that are busy with other things: of five resets the middle one has what is asked, 10 ms, and none takes
//! 100 ms; a GiB is back in 2 s each time. Steps are timed by the processor, and each by the shortest of five lives
//! that do the same: so the longest of them all is the work's own, whatever the kernel or the host put in between.
//! Arrays come fresh from the kernel, as those of a worker, which has one disk and no past; `tests/system/resets.rs`
//! times the worker itself.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstat, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::time::{ClockId, clock_gettime};
use spillway_core::{
    BLOCK_BYTES, BLOCK_SECTORS, DataMemory, Disk, DiskSpec, Errno, Event, FullPolicy, GuestBuffers, Io,
    Layout, LogShape, Meta, Mode, OpId, Operation, PartId, REGION_BYTES, Request, Slot, Token,
};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A memfd, mapped.
struct Memory {
    file: OwnedFd,
    base: *mut u8,
    len: usize,
}

impl Memory {
    fn new(len: u64) -> Memory {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len).unwrap();
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        let len = len as usize;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap(std::ptr::null_mut(), len, prot, flags, &file, 0) }.unwrap().cast();
        Memory { file, base, len }
    }

    fn bytes(&mut self, at: u64, len: usize) -> &mut [u8] {
        assert!(at as usize + len <= self.len);
        // SAFETY: inside the mapping (checked), borrowed with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at as usize), len) }
    }

    fn punch(&self, at: u64, len: u64) {
        fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len).unwrap();
    }

    /// Memory that it takes.
    fn held_bytes(&self) -> u64 {
        fstat(&self.file).unwrap().st_blocks as u64 * 512
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: ours, and nothing borrows from it any more.
        unsafe { munmap(self.base.cast(), self.len) }.unwrap();
    }
}

/// A disk in mode `ram` over an empty image, whose only client writes whole blocks of one pattern.
struct Machine {
    disk: Option<Disk>,
    host: Host,
    now_ns: u64,
}

struct Host {
    meta: Memory,
    data: Memory,
    completed: u64,
    pattern: [u8; BLOCK_BYTES],
}

impl Machine {
    fn new(size_bytes: u64, ram_limit_bytes: u64) -> Machine {
        let spec = DiskSpec {
            size_bytes,
            base_bytes: 0,
            mode: Mode::Ram,
            full: FullPolicy::Fail,
            ram_limit_bytes,
            overflow_limit_bytes: 0,
            shape: LogShape::default(),
        };
        let meta = Memory::new(Layout::of(&spec).len_bytes());
        let host = Host { meta, data: Memory::new(32 << 30), completed: 0, pattern: [0x77; BLOCK_BYTES] };
        let mut machine = Machine { disk: None, host, now_ns: 0 };
        machine.attach(spec);
        machine
    }

    fn attach(&mut self, spec: DiskSpec) {
        // SAFETY: the mapping is as long as the layout and outlives the disk; nobody else writes to it.
        let (meta, existing) = unsafe { Meta::open(self.host.meta.base, &spec, 1) }.unwrap();
        let data = DataMemory { bytes: self.host.data.len as u64, huge_pages: false };
        self.disk = Some(Disk::attach(meta, existing, spec, data).unwrap());
    }

    /// The process dies, another attaches.
    fn crash(&mut self) {
        let spec = *self.disk.take().unwrap().spec();
        self.attach(spec);
    }

    /// Writes block after block, `stride` apart, until so many slots are in use.
    fn write(&mut self, blocks: u64, stride: u64) {
        let disk = self.disk.as_mut().unwrap();
        for i in 0..blocks {
            let sector = i * stride * BLOCK_SECTORS;
            let operation = Operation::Write { fua: false };
            if i % 32 == 0 {
                disk.end_turn(&mut self.host, self.now_ns);
                disk.begin_turn(self.now_ns);
            }
            disk.submit(&mut self.host, Request { token: Token(i), operation, sector, sectors: 8 });
        }
        assert_eq!(std::mem::take(&mut self.host.completed), blocks);
    }

    /// One turn; whether there is more to do.
    fn turn(&mut self, now_ns: u64) -> bool {
        self.now_ns = now_ns;
        let disk = self.disk.as_mut().unwrap();
        disk.begin_turn(now_ns);
        disk.end_turn(&mut self.host, now_ns)
    }

    /// Turns until nothing moves, now and a second later.
    fn rest(&mut self) -> Rest {
        let (start, mut steps) = (Instant::now(), Vec::new());
        loop {
            let before = cpu();
            let more = self.turn(self.now_ns);
            steps.push(cpu() - before);
            if let (false, Some(ns)) = (more, self.disk.as_ref().unwrap().deadline_ns()) {
                self.now_ns = ns;
            } else if !more {
                return Rest { wall: start.elapsed(), steps };
            }
        }
    }

    fn reset(&mut self) -> Duration {
        let before = Instant::now();
        assert!(self.disk.as_mut().unwrap().reset(&mut self.host));
        before.elapsed()
    }
}

/// How long it took until nothing moved.
struct Rest {
    wall: Duration,
    /// Processor time of each step, in their order.
    steps: Vec<Duration>,
}

/// The longest step of lives that did the same, each by the life in which it was shortest; and the longest that was seen.
fn longest_step<'a>(lives: impl Iterator<Item = &'a [Duration]>) -> (Duration, Duration) {
    let (mut shortest, mut seen) = (Vec::new(), Duration::ZERO);
    for steps in lives {
        seen = seen.max(steps.iter().copied().max().unwrap_or_default());
        if shortest.is_empty() {
            shortest = steps.to_vec();
        }
        assert_eq!(shortest.len(), steps.len(), "they do the same");
        shortest.iter_mut().zip(steps).for_each(|(least, &step)| *least = step.min(*least));
    }
    (shortest.into_iter().max().unwrap_or_default(), seen)
}

/// Processor time of this thread.
fn cpu() -> Duration {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

impl GuestBuffers for Host {
    fn copy_from_guest(&mut self, _: Token, _: u32, to: &mut [u8]) -> Result<(), Errno> {
        to.copy_from_slice(&self.pattern[..to.len()]);
        Ok(())
    }
    fn copy_to_guest(&mut self, _: Token, _: u32, _: &[u8]) -> Result<(), Errno> {
        Ok(())
    }
    fn zero_guest(&mut self, _: Token, _: u32, _: u32) -> Result<(), Errno> {
        Ok(())
    }
    fn complete(&mut self, _: Token, result: Result<(), Errno>) {
        result.unwrap();
        self.completed += 1;
    }
}

impl Io for Host {
    fn slot(&mut self, slot: Slot) -> &mut [u8] {
        self.data.bytes(slot.offset_bytes(), BLOCK_BYTES)
    }
    fn guest_to_slot(&mut self, _: Token, _: u32, slot: Slot, at: usize, len: usize) -> Result<bool, Errno> {
        let pattern = self.pattern;
        self.slot(slot)[at..at + len].copy_from_slice(&pattern[..len]);
        Ok(false)
    }
    fn slot_to_guest(&mut self, _: Token, _: u32, _: Slot, _: usize, _: usize) -> Result<(), Errno> {
        Ok(())
    }
    fn guest_to_part(&mut self, _: Token, _: u32, _: PartId, _: usize, _: usize) -> Result<(), Errno> {
        unreachable!("mode `ram` writes no parts")
    }
    fn slot_to_part(&mut self, _: Slot, _: PartId, _: usize) {
        unreachable!("mode `ram` writes no parts")
    }
    fn part(&mut self, _: PartId) -> &mut [u8] {
        unreachable!("mode `ram` writes no parts")
    }
    fn populate_slots(&mut self, first: Slot, n: u32) {
        let (at, len) = (first.offset_bytes() as usize, n as usize * BLOCK_BYTES);
        // SAFETY: inside the mapping: these are slots of the disk's.
        unsafe { madvise(self.data.base.add(at).cast(), len, Advice::LinuxPopulateWrite) }.unwrap();
    }
    fn release_slots(&mut self, slots: &[Slot]) {
        for run in slots.chunk_by(|a, b| a.0 + 1 == b.0) {
            self.data.punch(run[0].offset_bytes(), (run.len() * BLOCK_BYTES) as u64);
        }
    }
    fn release_meta(&mut self, pages: Range<u64>) {
        self.meta.punch(pages.start, pages.end - pages.start);
    }
    fn base_to_guest(&mut self, _: Token, _: u32, _: u64, _: u32) -> Option<Result<(), Errno>> {
        unreachable!("the image is empty")
    }
    fn read_base(&mut self, _: OpId, _: u64, _: u32) {
        unreachable!("the image is empty")
    }
    fn read_overflow(&mut self, _: OpId, _: u64, _: u32) {
        unreachable!("there is no file")
    }
    fn write_overflow(&mut self, _: OpId, _: PartId, _: usize, _: u64, _: u32, _: bool) {
        unreachable!("there is no file")
    }
    fn punch_overflow(&mut self, _: OpId, _: u64, _: u64) {
        unreachable!("there is no file")
    }
    fn drain_overflow(&mut self, _: OpId) {}
    fn sync_overflow(&mut self, _: OpId) {
        unreachable!("there is no file")
    }
    fn event(&mut self, _: Event) {}
}

const GIB: u64 = 1 << 30;

/// Both tests map and unmap much in one address space: one's step would wait for the other's.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

const LIVES: usize = 5;
const MOST_RESET: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(100)];
const MOST_BACK_PER_GIB: Duration = Duration::from_secs(2);
const MOST_STEP: Duration = Duration::from_millis(1);

#[test]
fn a_reset_is_one_store_and_the_memory_comes_back_in_short_steps() {
    let _alone = alone();
    // Else the arrays of the last disk that was dropped decide what glibc takes from its heap and zeroes at once.
    #[cfg(target_env = "gnu")]
    // SAFETY: it changes a number of the allocator's, to what it is in a process that has just begun.
    assert_eq!(unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10) }, 1);
    // Disk, RAM limit, blocks written and how far apart.
    for (size, limit, blocks, stride) in [
        (4 * GIB, GIB / 4, GIB / 4 / 4096, 1),
        (4 * GIB, GIB, GIB / 4096, 1),
        (4 * GIB, 3 * GIB, 3 * GIB / 4096, 1),
        // One block in every region, in every second one, and in the first of every 4,096.
        (4096 * GIB, 9 * GIB, 4096 * GIB / REGION_BYTES / 16, 512),
        (4096 * GIB, 9 * GIB, 4096 * GIB / REGION_BYTES / 32, 1024),
        (4096 * GIB, 9 * GIB, 512, 512 * 4096),
    ] {
        let lives: Vec<Life> = (0..LIVES).map(|_| a_life(size, limit, blocks, stride)).collect();
        let mut resets: Vec<Duration> = lives.iter().map(|life| life.reset).collect();
        resets.sort_unstable();
        let back = lives.iter().map(|life| life.back.wall).max().unwrap();
        let steps = [
            longest_step(lives.iter().map(|life| &life.filled.steps[..])),
            longest_step(lives.iter().map(|life| &life.back.steps[..])),
        ];
        let summary = format!(
            "disk {} GiB, {blocks} blocks {stride} apart in {} MiB of RAM: resets {resets:?}; memory back in {back:?} \
             at most; {} and {} steps, the longest (and longest seen) {steps:?}",
            size / GIB,
            limit >> 20,
            lives[0].filled.steps.len(),
            lives[0].back.steps.len(),
        );
        println!("{summary}");
        assert!(resets[LIVES / 2] < MOST_RESET[0] && resets[LIVES - 1] < MOST_RESET[1], "{summary}");
        let held = (blocks * 4096).max(GIB);
        assert!(back.as_secs_f64() < MOST_BACK_PER_GIB.as_secs_f64() * held as f64 / GIB as f64, "{summary}");
        assert!(steps.iter().all(|(longest, _)| *longest < MOST_STEP), "{summary}");
    }
}

/// What a life took.
struct Life {
    /// The rest after it was written to.
    filled: Rest,
    reset: Duration,
    /// Until its memory was back.
    back: Rest,
}

/// A disk is written to and reset.
fn a_life(size: u64, limit: u64, blocks: u64, stride: u64) -> Life {
    let mut machine = Machine::new(size, limit);
    machine.rest();
    let empty = machine.host.meta.held_bytes();
    machine.write(blocks, stride);
    let filled = machine.rest();
    assert_eq!(machine.host.data.held_bytes() / 4096, blocks);
    let reset = machine.reset();
    let back = machine.rest();
    assert_eq!(machine.host.data.held_bytes(), 0);
    let meta = machine.host.meta.held_bytes();
    assert!(meta <= empty + (2 << 20), "{meta} bytes of `meta` are held, {empty} at first");
    Life { filled, reset, back }
}

#[test]
fn a_process_that_dies_while_memory_comes_back_leaves_none_behind() {
    let _alone = alone();
    let mut machine = Machine::new(64 * GIB, GIB);
    machine.rest();
    let empty = machine.host.meta.held_bytes();
    for kill_after in [0, 1, 2, 5, 20, 50] {
        machine.write(20_000, 800);
        machine.reset();
        (0..kill_after).for_each(|_| assert!(machine.turn(0), "it was over too soon"));
        machine.crash();
        machine.write(10, 777_777);
        machine.rest();
        let (data, meta) = (machine.host.data.held_bytes(), machine.host.meta.held_bytes());
        assert_eq!(data, 10 * 4096, "killed after {kill_after} steps");
        assert!(meta <= empty + 10 * 4096 + (1 << 16), "killed after {kill_after} steps: {meta}, {empty}");
    }
}
