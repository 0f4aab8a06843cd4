//! The memory of a guest, as its driver reaches it: by guest addresses, in two regions, as QEMU has it below and above 4 GiB.
//!
//! Owns the memory and the rules of its addresses; knows nothing of what lies where. Invariant: every access lies in one
//! region, else it panics: a driver that is wrong about its own memory tests nothing.

use crate::shared::SharedMemory;
use anyhow::Result;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicU16;

/// Guest address of the first region.
const LOW: u64 = 0x10_0000;
/// Guest address of the second region.
const HIGH: u64 = 0x1_0000_0000;
/// What the VMM's addresses are above the guest's: mixing the two up shows.
const USER: u64 = 0x7e00_0000_0000;

/// A region as SET_MEM_TABLE describes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub guest: u64,
    pub bytes: u64,
    pub user: u64,
    pub file_offset: u64,
}

pub(super) struct GuestMemory {
    shared: SharedMemory,
    regions: [Region; 2],
}

impl GuestMemory {
    /// So many bytes in each region, zeroed.
    pub(super) fn new(low_bytes: u64, high_bytes: u64) -> Result<GuestMemory> {
        let shared = SharedMemory::new((low_bytes + high_bytes) as usize)?;
        let region = |guest, bytes, file_offset| Region { guest, bytes, user: guest + USER, file_offset };
        Ok(GuestMemory { shared, regions: [region(LOW, low_bytes, 0), region(HIGH, high_bytes, low_bytes)] })
    }

    pub(super) fn regions(&self) -> [Region; 2] {
        self.regions
    }

    pub(super) fn fd(&self) -> RawFd {
        self.shared.raw_fd()
    }

    /// First guest address of each region.
    pub(super) fn starts(&self) -> [u64; 2] {
        self.regions.map(|region| region.guest)
    }

    /// The VMM's address of a guest address.
    pub(super) fn user(guest: u64) -> u64 {
        guest + USER
    }

    fn at(&self, guest: u64, bytes: usize) -> usize {
        let inside = |r: &&Region| guest >= r.guest && guest + bytes as u64 <= r.guest + r.bytes;
        let region = self.regions.iter().find(inside);
        let region = region.unwrap_or_else(|| panic!("{bytes} bytes at {guest:#x} are not guest memory"));
        (guest - region.guest + region.file_offset) as usize
    }

    pub(super) fn write(&mut self, guest: u64, bytes: &[u8]) {
        let at = self.at(guest, bytes.len());
        self.shared.slice(at, bytes.len()).copy_from_slice(bytes);
    }

    pub(super) fn read(&mut self, guest: u64, to: &mut [u8]) {
        let at = self.at(guest, to.len());
        to.copy_from_slice(self.shared.slice(at, to.len()));
    }

    pub(super) fn fill(&mut self, guest: u64, bytes: usize, with: u8) {
        let at = self.at(guest, bytes);
        self.shared.slice(at, bytes).fill(with);
    }

    pub(super) fn holds_only(&mut self, guest: u64, bytes: usize, byte: u8) -> bool {
        let at = self.at(guest, bytes);
        self.shared.slice(at, bytes).iter().all(|&b| b == byte)
    }

    /// A word that the device reads or writes at any time. `guest` is even.
    pub(super) fn word(&self, guest: u64) -> &AtomicU16 {
        let at = self.at(guest, 2);
        assert!(at.is_multiple_of(2), "{guest:#x} is odd");
        // SAFETY: two bytes inside the mapping, which lives as long as `self`, at an even address.
        unsafe { &*self.shared.as_ptr().wrapping_add(at).cast::<AtomicU16>() }
    }
}
