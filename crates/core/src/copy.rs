//! Copies of block size that detect zeroes and bypass the processor's caches.

/// Whether all bytes are zero. Ends at the first that is not: on ordinary data within a cache line.
#[inline]
pub fn is_zero(bytes: &[u8]) -> bool {
    let (head, rest) = bytes.split_at(bytes.len().min(64));
    head.iter().all(|&b| b == 0) && rest.chunks(512).all(|c| c.iter().fold(0, |or, &b| or | b) == 0)
}

/// Whether all bytes of memory that others may write to are zero just now, each byte read at most once.
///
/// # Safety
/// `at..at + len` must be readable.
#[inline]
pub unsafe fn is_zero_now(at: *const u8, len: usize) -> bool {
    let (words, rest) = (len / 8, len % 8);
    let mut seen = 0;
    for i in 0..words {
        // SAFETY: inside `at..at + len`, as the caller promises.
        seen |= unsafe { at.cast::<u64>().add(i).read_unaligned() };
        // A cache line at a time: on ordinary data the first one decides.
        if i % 8 == 7 && seen != 0 {
            return false;
        }
    }
    for i in len - rest..len {
        // SAFETY: as above.
        seen |= u64::from(unsafe { at.add(i).read() });
    }
    seen == 0
}

/// Copies into memory that nobody is about to read, each byte read once; returns whether all were zero.
///
/// Whole cache lines go past the cache: a slot is cold, and to fetch its lines only to overwrite them costs more
/// than the rest of a request. The stores are ordered before what this thread writes later only by its next
/// fence; every publication of used indices has one, and no other thread reads slots.
///
/// # Safety
/// `from..from + to.len()` must be readable and not overlap `to`; others may write to it meanwhile.
#[inline]
pub unsafe fn copy_past_caches(from: *const u8, to: &mut [u8]) -> bool {
    #[cfg(target_arch = "x86_64")]
    if !to.is_empty() && to.as_ptr().addr().is_multiple_of(64) && to.len().is_multiple_of(64) {
        // SAFETY: promised by the caller; alignment and length were checked; SSE2 is part of x86-64.
        return unsafe { stream(from, to) };
    }
    // SAFETY: promised by the caller.
    unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
    is_zero(to)
}

/// # Safety
/// As [`copy_past_caches`]; `to` is whole, aligned cache lines.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn stream(from: *const u8, to: &mut [u8]) -> bool {
    use std::arch::x86_64::{
        __m128i, _mm_cmpeq_epi8, _mm_loadu_si128, _mm_movemask_epi8, _mm_or_si128, _mm_setzero_si128,
        _mm_stream_si128,
    };
    // SAFETY: SSE2 is part of x86-64.
    let zero = unsafe { _mm_setzero_si128() };
    let mut seen = zero;
    for at in (0..to.len()).step_by(64) {
        // SAFETY: 64 bytes from `at` on lie inside both, the destination's start is aligned to 64.
        unsafe {
            let from = from.add(at).cast::<__m128i>();
            let to = to.as_mut_ptr().add(at).cast::<__m128i>();
            for i in 0..4 {
                let bytes = _mm_loadu_si128(from.add(i));
                seen = _mm_or_si128(seen, bytes);
                _mm_stream_si128(to.add(i), bytes);
            }
        }
    }
    // SAFETY: SSE2 is part of x86-64.
    unsafe { _mm_movemask_epi8(_mm_cmpeq_epi8(seen, zero)) == 0xFFFF }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_anywhere_is_not_zero() {
        let mut block = [0u8; 4096];
        assert!(is_zero(&block));
        for i in [0, 7, 63, 64, 511, 575, 576, 4095] {
            block[i] = 1;
            assert!(!is_zero(&block), "bit in byte {i}");
            block[i] = 0;
        }
        assert!(is_zero(&block[..5]));
        for (at, len) in [(0, 4096), (1, 4095), (3, 70), (0, 63), (9, 1), (0, 0)] {
            // SAFETY: inside `block`.
            assert!(unsafe { is_zero_now(block[at..].as_ptr(), len) }, "{at} {len}");
            for bit in at..at + len {
                block[bit] = 0x10;
                // SAFETY: as above.
                assert!(!unsafe { is_zero_now(block[at..].as_ptr(), len) }, "{at} {len}, byte {bit}");
                block[bit] = 0;
            }
        }
    }

    #[repr(align(64))]
    struct Lines([u8; 4096]);

    #[test]
    fn every_byte_arrives_and_zeroes_are_found_at_any_alignment() {
        let pattern: Vec<u8> =
            (0..4200u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 | 1).collect();
        let ranges = [(0, 4096), (64, 128), (64, 64), (0, 512), (1, 64), (512, 17), (4095, 1), (64, 0)];
        for (at, len) in ranges {
            for skew in [0, 1, 16, 63] {
                let mut to = Lines([0xEE; 4096]);
                // SAFETY: `pattern` is longer than what is read of it.
                let zero = unsafe { copy_past_caches(pattern[skew..].as_ptr(), &mut to.0[at..at + len]) };
                assert_eq!(zero, len == 0, "{at} {len}");
                assert_eq!(to.0[at..at + len], pattern[skew..skew + len], "{at} {len} {skew}");
                assert!(to.0[..at].iter().chain(&to.0[at + len..]).all(|&b| b == 0xEE), "outside {at} {len}");
                let mut from = vec![0u8; len];
                // SAFETY: as long as the destination.
                assert!(unsafe { copy_past_caches(from.as_ptr(), &mut to.0[at..at + len]) });
                for bit in [0, len / 2, len.saturating_sub(1)] {
                    let Some(byte) = from.get_mut(bit) else { continue };
                    *byte = 0x80;
                    // SAFETY: as above.
                    assert!(!unsafe { copy_past_caches(from.as_ptr(), &mut to.0[at..at + len]) });
                    from[bit] = 0;
                }
            }
        }
    }
}
