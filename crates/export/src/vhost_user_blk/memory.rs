//! Guest memory: the regions that a front end lends us, and the way from a guest address to one of ours. Owns
//! the mappings; never makes a reference into them, only raw pointers, because the guest writes there at will.
//!
//! Invariant: a pointer handed out stays mapped until the request that got it has been released, even when the
//! front end takes the region away meanwhile: a region that goes is kept with the *generation* of requests that
//! may still point into it.

use super::error::Error;
use super::message::MemoryRegion;
use super::sigbus::{Guard, Registration};
use crate::ErrorKind;
use rustix::fs::{fstat, fstatfs};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::collections::VecDeque;
use std::os::fd::AsFd;

/// Regions that a front end may have at a time (GET_MAX_MEM_SLOTS).
pub(super) const MAX_REGIONS: usize = 509;
/// How often the table may change while requests of the earlier ones are unfinished.
const MAX_GENERATIONS: usize = 64;
/// Address space that a front end may take, with the regions that unfinished requests still hold: an eighth of
/// what a process has.
const MAX_MAPPED_BYTES: u64 = 16 << 40;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Most pieces that the data of a request may lie in: the longest table that is taken, and some of its buffers
/// crossing from one region into the next. The configuration space asks for 254.
const MAX_SEGMENTS: usize = 1100;

/// A piece of guest memory at our address.
#[derive(Clone, Copy)]
pub(super) struct Segment {
    pub at: *mut u8,
    pub len: u32,
}

/// A mapping of a file that belongs to someone else, entered in the SIGBUS table while it lives.
pub(super) struct Mapping {
    base: *mut u8,
    len: usize,
    /// Where the wanted bytes begin: the offset in the file need not be a whole page.
    skip: usize,
    registration: Option<Registration>,
}

impl Mapping {
    /// Maps `size` bytes from `offset` on, shared, for reading and writing.
    pub(super) fn new(fd: impl AsFd, offset: u64, size: u64, guard: &Guard) -> Result<Mapping, Error> {
        let out_of_bounds = |reason| Error::new(ErrorKind::OutOfBounds, reason).at(offset, size);
        let end = offset.checked_add(size).filter(|_| size > 0);
        let end = end.ok_or_else(|| out_of_bounds("its offset and size are no range in a file"))?;
        let file = fstat(&fd).map_err(|errno| Error::io("fstat failed", errno))?;
        let file_bytes = file.st_size as u64;
        if file_bytes < end {
            return Err(out_of_bounds("its file is too short").below(file_bytes, end));
        }
        let page = fstatfs(&fd)
            .ok()
            .filter(|fs| fs.f_type as u64 == HUGETLBFS_MAGIC)
            .map_or(rustix::param::page_size() as u64, |fs| fs.f_bsize as u64);
        let start = offset / page * page;
        let len = (end - start).checked_next_multiple_of(page).and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or_else(|| out_of_bounds("it has too many bytes to be mapped"))?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe {
            let flags = MapFlags::SHARED | MapFlags::NORESERVE;
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags, &fd, start)
        };
        let base = base.map_err(|errno| Error::io("mmap failed", errno).at(offset, size))?.cast::<u8>();
        // SAFETY: the range was just mapped. A guest's memory has no place in our core dumps.
        let _ = unsafe { madvise(base.cast(), len, Advice::LinuxDontDump) };
        let mut mapping = Mapping { base, len, skip: (offset - start) as usize, registration: None };
        mapping.registration = Some(guard.register(base, len)?);
        Ok(mapping)
    }

    /// The first of the bytes that were asked for.
    pub(super) fn start(&self) -> *mut u8 {
        self.base.wrapping_add(self.skip)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.registration = None;
        // SAFETY: base and len are what mmap returned; the users of this mapping are gone (see the invariant).
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

struct Region {
    guest: u64,
    size: u64,
    host: *mut u8,
    user: u64,
    _mapping: Mapping,
}

impl Region {
    fn new(region: &MemoryRegion, fd: impl AsFd, guard: &Guard) -> Result<Region, Error> {
        let MemoryRegion { guest_address: guest, size, user_address: user, mmap_offset } = *region;
        if guest.checked_add(size).is_none() || user.checked_add(size).is_none() {
            let reason = "it wraps around at the end of the address space";
            return Err(Error::new(ErrorKind::OutOfBounds, reason).of("memory region").at(guest, size));
        }
        let mapping =
            Mapping::new(fd, mmap_offset, size, guard).map_err(|e| e.of("file of a memory region"))?;
        Ok(Region { guest, size, host: mapping.start(), user, _mapping: mapping })
    }

    fn overlaps(&self, other: &Region) -> bool {
        let apart = |a: u64, b: u64| a >= b.saturating_add(other.size) || b >= a.saturating_add(self.size);
        !(apart(self.guest, other.guest) && apart(self.user, other.user))
    }
}

/// Mappings that are no longer in the table, and how many requests of their generation are unfinished.
struct Retired {
    generation: u32,
    unfinished: usize,
    regions: Vec<Region>,
}

/// Remembers which region an address of some kind was found in the last time.
#[derive(Clone, Copy, Default)]
pub(super) struct Hint(usize);

/// All regions of one front end.
pub(super) struct Memory {
    /// Sorted by guest address, disjoint.
    regions: Vec<Region>,
    generation: u32,
    unfinished: usize,
    retired: VecDeque<Retired>,
    /// Last, so that it goes after all mappings.
    guard: Guard,
}

impl Memory {
    pub(super) fn new(guard: Guard) -> Memory {
        Memory { regions: Vec::new(), generation: 0, unfinished: 0, retired: VecDeque::new(), guard }
    }

    /// The flag that tells of memory that has shrunk.
    #[inline(always)]
    pub(super) fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// ADD_MEM_REG.
    pub(super) fn add(&mut self, region: &MemoryRegion, fd: impl AsFd) -> Result<(), Error> {
        if self.regions.len() >= MAX_REGIONS {
            let error = Error::new(ErrorKind::Limit, "there are too many memory regions");
            return Err(error.above(self.regions.len() as u64 + 1, MAX_REGIONS as u64));
        }
        self.check_mapped_bytes([region])?;
        let region = Region::new(region, fd, &self.guard)?;
        insert(&mut self.regions, region)
    }

    /// REM_MEM_REG. The offset in the file is ignored, as the specification says.
    pub(super) fn remove(&mut self, region: &MemoryRegion) -> Result<(), Error> {
        let at = self.regions.iter().position(|r| {
            r.guest == region.guest_address && r.user == region.user_address && r.size == region.size
        });
        let at = at.ok_or_else(|| {
            Error::protocol("there is no such memory region").at(region.guest_address, region.size)
        })?;
        self.may_retire()?;
        let gone = self.regions.remove(at);
        self.retire(vec![gone]);
        Ok(())
    }

    /// SET_MEM_TABLE: all or nothing.
    pub(super) fn replace<F: AsFd>(&mut self, table: &[MemoryRegion], fds: &[F]) -> Result<(), Error> {
        self.may_retire()?;
        self.check_mapped_bytes(table)?;
        let mut regions = Vec::with_capacity(table.len());
        for (region, fd) in table.iter().zip(fds) {
            insert(&mut regions, Region::new(region, fd, &self.guard)?)?;
        }
        let gone = std::mem::replace(&mut self.regions, regions);
        self.retire(gone);
        Ok(())
    }

    /// Whether these may be mapped too.
    fn check_mapped_bytes<'a>(&self, more: impl IntoIterator<Item = &'a MemoryRegion>) -> Result<(), Error> {
        let kept = self.retired.iter().flat_map(|retired| &retired.regions).chain(&self.regions);
        let mapped = kept.map(|region| region.size).chain(more.into_iter().map(|region| region.size));
        let mapped = mapped.fold(0, u64::saturating_add);
        if mapped > MAX_MAPPED_BYTES {
            let reason =
                "the memory regions, with those that unfinished requests still use, are more than 16 TiB";
            return Err(Error::new(ErrorKind::Limit, reason).above(mapped, MAX_MAPPED_BYTES));
        }
        Ok(())
    }

    fn may_retire(&self) -> Result<(), Error> {
        if self.retired.len() >= MAX_GENERATIONS {
            let reason = "the memory regions change too often while requests are unfinished";
            return Err(Error::new(ErrorKind::Limit, reason)
                .above(self.retired.len() as u64 + 1, MAX_GENERATIONS as u64));
        }
        Ok(())
    }

    fn retire(&mut self, regions: Vec<Region>) {
        if self.unfinished == 0 && self.retired.is_empty() {
            return;
        }
        let (generation, unfinished) = (self.generation, self.unfinished);
        self.retired.push_back(Retired { generation, unfinished, regions });
        self.generation = self.generation.wrapping_add(1);
        self.unfinished = 0;
    }

    /// A request begins to use pointers. Its generation goes back to [`Memory::release`].
    #[inline]
    pub(super) fn acquire(&mut self) -> u32 {
        self.unfinished += 1;
        self.generation
    }

    /// A request has stopped using its pointers.
    #[inline]
    pub(super) fn release(&mut self, generation: u32) {
        if generation == self.generation {
            self.unfinished -= 1;
        } else {
            self.release_retired(generation);
        }
    }

    #[cold]
    fn release_retired(&mut self, generation: u32) {
        if let Some(retired) = self.retired.iter_mut().find(|r| r.generation == generation) {
            retired.unfinished -= 1;
        }
        // A region may be in use by any request that is older than its going.
        while self.retired.front().is_some_and(|r| r.unfinished == 0) {
            self.retired.pop_front();
        }
    }

    /// Our address of `len` bytes at guest address `guest`, if they lie in one region.
    #[inline(always)]
    pub(super) fn translate(&self, hint: &mut Hint, guest: u64, len: u32) -> Option<*mut u8> {
        if let Some(region) = self.regions.get(hint.0) {
            let offset = guest.wrapping_sub(region.guest);
            if offset < region.size && u64::from(len) <= region.size - offset {
                return Some(region.host.wrapping_add(offset as usize));
            }
        }
        self.search(hint, guest, len)
    }

    #[inline(never)]
    fn search(&self, hint: &mut Hint, guest: u64, len: u32) -> Option<*mut u8> {
        let segment = self.find(hint, guest)?;
        (u64::from(len) <= segment.1).then_some(segment.0)
    }

    /// The region that holds a guest address: our address, and how many bytes it goes on.
    fn find(&self, hint: &mut Hint, guest: u64) -> Option<(*mut u8, u64)> {
        let at = self.regions.partition_point(|r| r.guest <= guest).checked_sub(1)?;
        let region = &self.regions[at];
        let offset = guest - region.guest;
        if offset >= region.size {
            return None;
        }
        hint.0 = at;
        Some((region.host.wrapping_add(offset as usize), region.size - offset))
    }

    /// Appends the pieces of `len` bytes at `guest`, which may cross from one region into the next. False, and
    /// possibly some pieces, if not all of them is guest memory, or there are more than [`MAX_SEGMENTS`].
    pub(super) fn segments(&self, hint: &mut Hint, guest: u64, len: u32, to: &mut Vec<Segment>) -> bool {
        let (mut guest, mut left) = (guest, len);
        while left > 0 {
            let Some((at, mapped)) = self.find(hint, guest).filter(|_| to.len() < MAX_SEGMENTS) else {
                return false;
            };
            let len = mapped.min(u64::from(left)) as u32;
            to.push(Segment { at, len });
            left -= len;
            match guest.checked_add(u64::from(len)) {
                Some(next) => guest = next,
                None => return left == 0,
            }
        }
        true
    }

    /// Our address of `len` bytes at the front end's own address `user` (ring addresses come as those).
    pub(super) fn translate_user(&self, user: u64, len: u64) -> Option<*mut u8> {
        self.regions.iter().find_map(|region| {
            let offset = user.checked_sub(region.user)?;
            let fits = offset < region.size && len <= region.size - offset;
            fits.then(|| region.host.wrapping_add(offset as usize))
        })
    }
}

fn insert(regions: &mut Vec<Region>, region: Region) -> Result<(), Error> {
    if let Some(other) = regions.iter().find(|r| r.overlaps(&region)) {
        return Err(Error::protocol("it overlaps the memory region at guest address")
            .of("memory region")
            .at(region.guest, region.size)
            .bits(other.guest));
    }
    let at = regions.partition_point(|r| r.guest < region.guest);
    regions.insert(at, region);
    Ok(())
}

/// Copies out of guest memory.
///
/// # Safety
/// `from..from + to.len()` must be mapped guest memory.
#[inline(always)]
pub(super) unsafe fn copy_from_guest(from: *const u8, to: &mut [u8]) {
    // SAFETY: the caller vouches for `from`; guest memory never overlaps memory that Rust references point to.
    unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) }
}

/// Copies into guest memory.
///
/// # Safety
/// `to..to + from.len()` must be mapped guest memory.
#[inline(always)]
pub(super) unsafe fn copy_to_guest(from: &[u8], to: *mut u8) {
    // SAFETY: as in `copy_from_guest`.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
}

/// Reads 16 bytes, each exactly once.
///
/// # Safety
/// `from..from + 16` must be mapped guest memory.
#[inline(always)]
pub(super) unsafe fn read_16(from: *const u8) -> [u8; 16] {
    let mut bytes = [0; 16];
    if (from as usize).is_multiple_of(8) {
        // SAFETY: mapped by the caller's word, aligned by the check; volatile, so read once.
        let (low, high) = unsafe {
            let from = from.cast::<u64>();
            (from.read_volatile(), from.add(1).read_volatile())
        };
        bytes[..8].copy_from_slice(&low.to_ne_bytes());
        bytes[8..].copy_from_slice(&high.to_ne_bytes());
    } else {
        for (at, byte) in bytes.iter_mut().enumerate() {
            // SAFETY: mapped by the caller's word.
            *byte = unsafe { from.add(at).read_volatile() };
        }
    }
    bytes
}
