//! Input of the client that has not been parsed yet. Never holds more than [`INPUT_BYTES`].
//!
//! Invariant: bytes are taken out in the order in which they were received.

/// Size of the input buffer: one receive fetches many small requests.
pub const INPUT_BYTES: usize = 64 << 10;

/// A fixed buffer with a window of unread bytes.
pub struct Input {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Input {
    pub fn new() -> Self {
        Input { bytes: vec![0; INPUT_BYTES].into_boxed_slice(), start: 0, end: 0 }
    }

    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// The unread bytes.
    #[inline]
    pub fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// The first `n` unread bytes, if they are there.
    #[inline]
    pub fn peek<const N: usize>(&self) -> Option<&[u8; N]> {
        self.unread().first_chunk()
    }

    /// Drops the first `n` unread bytes.
    #[inline]
    pub fn consume(&mut self, n: usize) {
        assert!(n <= self.len());
        self.start += n;
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Moves as many unread bytes as fit into `to`. Returns how many.
    pub fn move_to(&mut self, to: &mut [u8]) -> usize {
        let n = self.len().min(to.len());
        to[..n].copy_from_slice(&self.unread()[..n]);
        self.consume(n);
        n
    }

    /// The free space, to be received into. Moves unread bytes to the front when there is little space behind them.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start > 0 && self.bytes.len() - self.end < self.bytes.len() / 2 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.bytes[self.end..]
    }

    /// `n` bytes were received into [`Input::space`].
    pub fn received(&mut self, n: usize) {
        assert!(n <= self.bytes.len() - self.end);
        self.end += n;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_leave_in_order_across_the_end_of_the_buffer() {
        let mut input = Input::new();
        let (mut sent, mut seen) = (0u32, 0u32);
        for round in 1..2000usize {
            let space = input.space();
            let n = (round * 37 % 900).min(space.len() / 4) * 4;
            for four in space[..n].chunks_exact_mut(4) {
                four.copy_from_slice(&sent.to_be_bytes());
                sent += 1;
            }
            input.received(n);
            for _ in 0..round * 13 % 700 {
                let Some(four) = input.peek::<4>() else { break };
                assert_eq!(u32::from_be_bytes(*four), seen);
                seen += 1;
                input.consume(4);
            }
        }
        assert!(seen > 100_000);
    }
}
