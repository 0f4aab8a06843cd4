//! Which way of copying into cold memory is faster here: past the caches or through them. Processors differ by
//! more than half of a request's time, and in both directions (`docs/design/007-copies-past-the-caches.md`).

/// Blocks that a round copies: enough to outlast the clock's reading, few enough to take no time.
#[cfg(target_arch = "x86_64")]
const BLOCKS: usize = 64;
#[cfg(target_arch = "x86_64")]
const ROUNDS: usize = 5;

/// Measures for about a millisecond.
#[cfg(target_arch = "x86_64")]
pub fn past_caches_is_faster() -> bool {
    use spillway_core::{BLOCK_BYTES, copy_past_caches};
    use std::arch::x86_64::{_mm_clflush, _mm_mfence};

    #[repr(align(4096))]
    struct Block([u8; BLOCK_BYTES]);
    let mut to: Vec<Block> = (0..BLOCKS).map(|_| Block([1; BLOCK_BYTES])).collect();
    let from: Vec<Block> = (0..4).map(|i| Block([i + 2; BLOCK_BYTES])).collect();
    let mut time = |copy: &dyn Fn(&[u8], &mut [u8])| {
        for block in &to {
            for line in block.0.chunks(64) {
                // SAFETY: a line of our own memory; its content stays.
                unsafe { _mm_clflush(line.as_ptr()) };
            }
        }
        // SAFETY: a fence has no other effect; SSE2 is part of x86-64.
        unsafe { _mm_mfence() };
        let begin = std::time::Instant::now();
        for i in 0..BLOCKS {
            // In an order that is odd to a prefetcher, as guests write: in a row it would hide the misses.
            copy(&from[i % from.len()].0, &mut to[i * 37 % BLOCKS].0);
        }
        // SAFETY: as above. What is still in flight counts.
        unsafe { _mm_mfence() };
        begin.elapsed()
    };
    let mut best = [std::time::Duration::MAX; 2];
    for _ in 0..ROUNDS {
        best[0] = best[0].min(time(&|from, to| to.copy_from_slice(from)));
        best[1] = best[1].min(time(&|from, to| {
            // SAFETY: both are slices of one block.
            unsafe { copy_past_caches(from.as_ptr(), to) };
        }));
    }
    best[1] < best[0]
}

/// There is only one way.
#[cfg(not(target_arch = "x86_64"))]
pub fn past_caches_is_faster() -> bool {
    false
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_takes_no_time() {
        let begin = std::time::Instant::now();
        let past = super::past_caches_is_faster();
        let took = begin.elapsed();
        println!("past the caches is faster: {past}, found out in {took:?}");
        assert!(took < std::time::Duration::from_millis(500));
    }
}
