//! The three areas of a split virtqueue in guest memory (virtio 2.7), as raw pointers. Owns the layout and the
//! memory orderings; never decides anything, and trusts nothing that it reads.
//!
//! Invariant: every access stays inside the areas that [`Ring::new`] translated, whatever index it is given,
//! because indices are masked by the queue size.

use super::error::Error;
use super::memory::Memory;
use super::message::VringAddr;
use crate::ErrorKind;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// `VIRTQ_DESC_F_NEXT`.
pub(super) const F_NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`.
pub(super) const F_WRITE: u16 = 2;
/// `VIRTQ_DESC_F_INDIRECT`.
pub(super) const F_INDIRECT: u16 = 4;
/// Bytes of a descriptor.
pub(super) const DESCRIPTOR_BYTES: u32 = 16;
/// Largest queue.
pub(super) const MAX_QUEUE_SIZE: u16 = 1024;

const F_NO_NOTIFY: u16 = 1;
const F_NO_INTERRUPT: u16 = 1;

/// A copy of a descriptor (2.7.5).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Descriptor {
    pub address: u64,
    pub len: u32,
    pub flags: u16,
    pub next: u16,
}

impl Descriptor {
    /// From the two words that it is read as.
    #[inline(always)]
    pub(super) fn from_words(low: u64, high: u64) -> Descriptor {
        let high = u64::from_le(high);
        Descriptor {
            address: u64::from_le(low),
            len: high as u32,
            flags: (high >> 32) as u16,
            next: (high >> 48) as u16,
        }
    }
}

/// Pointers to descriptor table, available ring and used ring.
#[derive(Clone, Copy)]
pub(super) struct Ring {
    descriptors: *const AtomicU64,
    available: *const AtomicU16,
    used: *const AtomicU16,
    mask: u16,
}

impl Ring {
    /// Finds the areas of a queue of `size` descriptors, a power of two. The ring may be used as long as the
    /// memory regions do not change.
    pub(super) fn new(memory: &Memory, addresses: &VringAddr, size: u16) -> Result<Ring, Error> {
        let entries = u64::from(size);
        let area = |what, address, len, align: usize| match memory.translate_user(address, len) {
            Some(at) if (at as usize).is_multiple_of(align) => Ok(at),
            Some(_) => Err(Error::protocol(
                "its address is not a multiple of the alignment that virtio 2.7 asks for",
            )
            .of(what)
            .at(address, len)
            .found(align as u64)),
            None => Err(Error::new(ErrorKind::NoMemoryRegion, "it lies in no memory region")
                .of(what)
                .at(address, len)),
        };
        Ok(Ring {
            descriptors: area("descriptor table", addresses.descriptor, entries * 16, 16)?.cast(),
            available: area("available ring", addresses.available, entries * 2 + 6, 2)?.cast(),
            used: area("used ring", addresses.used, entries * 8 + 6, 4)?.cast(),
            mask: size - 1,
        })
    }

    /// Descriptors of the queue, a power of two.
    #[inline(always)]
    pub(super) fn size(&self) -> u16 {
        self.mask + 1
    }

    /// Whether neither side has written anything: the first descriptor, the index and the first element are zero.
    pub(super) fn is_untouched(&self) -> bool {
        let first = self.descriptor(0);
        let used = (1..6).all(|index| self.used_field(index).load(Ordering::Relaxed) == 0);
        used && first.len == 0 && first.address == 0 && self.available_index() == 0
    }

    #[inline(always)]
    fn available_field(&self, index: usize) -> &AtomicU16 {
        // SAFETY: `new` translated 2 * size + 6 bytes, index is at most size + 2; aligned by the check there.
        unsafe { &*self.available.add(index) }
    }

    #[inline(always)]
    fn used_field(&self, index: usize) -> &AtomicU16 {
        // SAFETY: `new` translated 8 * size + 6 bytes, index is at most 4 * size + 2; aligned by the check.
        unsafe { &*self.used.add(index) }
    }

    /// A copy of a descriptor; the index is taken modulo the queue size.
    #[inline(always)]
    pub(super) fn descriptor(&self, index: u16) -> Descriptor {
        let at = usize::from(index & self.mask) * 2;
        // SAFETY: `new` translated 16 bytes for each of `mask + 1` descriptors, aligned to 16.
        let (low, high) = unsafe { (&*self.descriptors.add(at), &*self.descriptors.add(at + 1)) };
        Descriptor::from_words(low.load(Ordering::Relaxed), high.load(Ordering::Relaxed))
    }

    /// Asks the processor to fetch a descriptor.
    #[inline(always)]
    pub(super) fn prefetch_descriptor(&self, index: u16) {
        prefetch(self.descriptors.wrapping_add(usize::from(index & self.mask) * 2).cast());
    }

    /// How far the driver has come. What it wrote before is visible after.
    #[inline(always)]
    pub(super) fn available_index(&self) -> u16 {
        u16::from_le(self.available_field(1).load(Ordering::Acquire))
    }

    /// A head that the driver made available.
    #[inline(always)]
    pub(super) fn available_head(&self, index: u16) -> u16 {
        u16::from_le(self.available_field(2 + usize::from(index & self.mask)).load(Ordering::Relaxed))
    }

    /// Whether the driver wants no interrupts (2.7.7, without EVENT_IDX).
    #[inline]
    pub(super) fn interrupts_suppressed(&self) -> bool {
        u16::from_le(self.available_field(0).load(Ordering::Relaxed)) & F_NO_INTERRUPT != 0
    }

    /// `used_event`: the driver wants an interrupt when this used index is passed (2.7.7, with EVENT_IDX).
    #[inline]
    pub(super) fn used_event(&self) -> u16 {
        u16::from_le(self.available_field(3 + usize::from(self.mask)).load(Ordering::Relaxed))
    }

    /// Writes an element of the used ring.
    #[inline(always)]
    pub(super) fn set_used(&self, index: u16, head: u16, len: u32) {
        let at = 2 + usize::from(index & self.mask) * 4;
        let word = |at| {
            // SAFETY: inside the used ring as in `used_field`; 4 + 8 * n is aligned to 4 with the ring.
            unsafe { &*self.used.add(at).cast::<AtomicU32>() }
        };
        word(at).store(u32::from(head).to_le(), Ordering::Relaxed);
        word(at + 2).store(len.to_le(), Ordering::Relaxed);
    }

    /// The used index that the driver sees.
    pub(super) fn used_index(&self) -> u16 {
        u16::from_le(self.used_field(1).load(Ordering::Relaxed))
    }

    /// Publishes all used elements before this index.
    #[inline(always)]
    pub(super) fn set_used_index(&self, index: u16) {
        self.used_field(1).store(index.to_le(), Ordering::Release);
    }

    /// Asks the driver for notifications, or not (2.7.10, without EVENT_IDX).
    #[inline]
    pub(super) fn set_notify(&self, wanted: bool) {
        let flags = if wanted { 0 } else { F_NO_NOTIFY };
        self.used_field(0).store(flags.to_le(), Ordering::Relaxed);
    }

    /// `avail_event`: asks for a notification when this available index is passed (2.7.10, with EVENT_IDX).
    #[inline]
    pub(super) fn set_available_event(&self, index: u16) {
        self.used_field(2 + (usize::from(self.mask) + 1) * 4).store(index.to_le(), Ordering::Relaxed);
    }
}

/// Asks the processor to fetch a line of memory; has no other effect, whatever the address.
#[inline(always)]
pub(super) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetching accesses no memory in the sense of the language and never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
