//! Data buffers of requests, and the pool that keeps some for the next. Never looks at content.
//!
//! Invariant: a buffer is as large as the power of two above its request, and the pool keeps at most
//! [`KEPT_BYTES`].

use super::protocol::PIECE_BYTES;

/// Memory for one request's data.
pub struct Buffer(Box<[u8]>);

impl Buffer {
    /// The first `len` bytes.
    #[inline]
    pub fn bytes(&self, len: usize) -> &[u8] {
        &self.0[..len]
    }

    /// The first `len` bytes.
    #[inline]
    pub fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        &mut self.0[..len]
    }
}

const SMALLEST: usize = 512;
const LARGEST: usize = PIECE_BYTES as usize;
const CLASSES: usize = (LARGEST / SMALLEST).trailing_zeros() as usize + 1;
/// What the pool keeps at most.
const KEPT_BYTES: usize = 1 << 20;

/// Free buffers by size: 512 bytes, 1 KiB, ... 256 KiB.
pub struct Pool {
    free: [Vec<Buffer>; CLASSES],
    kept: usize,
}

impl Pool {
    pub fn new() -> Self {
        Pool { free: Default::default(), kept: 0 }
    }

    /// A buffer of at least `len` bytes; `len` is at most [`PIECE_BYTES`]. Its content is left over from earlier
    /// requests of the same connection.
    pub fn take(&mut self, len: usize) -> Buffer {
        let size = size_for(len);
        if let Some(buffer) = self.free[class(size)].pop() {
            self.kept -= size;
            return buffer;
        }
        Buffer(vec![0; size].into_boxed_slice())
    }

    pub fn give(&mut self, buffer: Buffer) {
        let size = buffer.0.len();
        if self.kept + size <= KEPT_BYTES {
            self.kept += size;
            self.free[class(size)].push(buffer);
        }
    }

    /// Gives everything kept back to the host.
    pub fn clear(&mut self) {
        *self = Pool::new();
    }
}

/// What a buffer for `len` bytes takes.
#[inline]
pub fn size_for(len: usize) -> usize {
    len.next_power_of_two().max(SMALLEST)
}

fn class(size: usize) -> usize {
    (size / SMALLEST).trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_fit_their_request_and_are_reused() {
        let mut pool = Pool::new();
        for len in [1, 512, 513, 4096, 4097, 65536, LARGEST - 512, LARGEST] {
            let mut buffer = pool.take(len);
            buffer.bytes_mut(len).fill(7);
            assert_eq!(buffer.0.len(), len.next_power_of_two().max(512));
            pool.give(buffer);
            assert_eq!(pool.take(len).bytes(len)[0], 7, "the buffer of {len} comes back");
        }
    }

    #[test]
    fn the_pool_keeps_a_bounded_amount() {
        let mut pool = Pool::new();
        let out: Vec<_> = (0..10).map(|_| pool.take(LARGEST)).collect();
        out.into_iter().for_each(|buffer| pool.give(buffer));
        assert_eq!(pool.kept, KEPT_BYTES);
        assert_eq!(pool.free[CLASSES - 1].len(), 4);
        pool.clear();
        assert_eq!(pool.kept, 0);
    }
}
