//! What a guest has written last. Positions count the bytes since the disk began, so that a reader's position stays valid
//! when older bytes are dropped.
//!
//! Invariant: at most [`KEPT_BYTES`] are kept, the newest ones; memory is allocated as it is used.

use std::collections::VecDeque;

/// Bytes that are kept.
pub(super) const KEPT_BYTES: usize = 256 << 10;

/// The kept bytes.
#[derive(Debug, Default)]
pub(super) struct History {
    bytes: VecDeque<u8>,
    /// Position of the oldest kept byte.
    start: u64,
}

impl History {
    /// Position of the oldest kept byte.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Position behind the newest byte.
    pub fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// Appends bytes, and drops the oldest ones beyond the limit.
    pub fn append(&mut self, bytes: &[u8]) {
        let skipped = bytes.len().saturating_sub(KEPT_BYTES);
        let bytes = &bytes[skipped..];
        let dropped = (self.bytes.len() + bytes.len()).saturating_sub(KEPT_BYTES);
        self.bytes.drain(..dropped);
        self.start += (dropped + skipped) as u64;
        if self.bytes.capacity() < self.bytes.len() + bytes.len() {
            // Twice as much each time, but never more than can be used.
            let wanted = (2 * self.bytes.len()).max(bytes.len()).min(KEPT_BYTES - self.bytes.len());
            self.bytes.reserve_exact(wanted.max(bytes.len()));
        }
        self.bytes.extend(bytes);
    }

    /// Whether the byte before a position is kept and ends a line.
    pub fn ends_line(&self, at: u64) -> bool {
        let before = at.checked_sub(1).and_then(|before| before.checked_sub(self.start));
        before.and_then(|before| self.bytes.get(before as usize)) == Some(&b'\n')
    }

    /// At most `limit` bytes from a position that is kept: some if there are any.
    pub fn from(&self, at: u64, limit: usize) -> &[u8] {
        let skip = at.saturating_sub(self.start).min(self.bytes.len() as u64) as usize;
        let (front, back) = self.bytes.as_slices();
        let found = if skip < front.len() { &front[skip..] } else { &back[skip - front.len()..] };
        &found[..found.len().min(limit)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(history: &History, mut at: u64, limit: usize) -> Vec<u8> {
        let mut read = Vec::new();
        while at < history.end() {
            let found = history.from(at, limit);
            assert!(!found.is_empty() && found.len() <= limit);
            read.extend_from_slice(found);
            at += found.len() as u64;
        }
        read
    }

    #[test]
    fn the_newest_bytes_are_kept_whatever_their_pieces() {
        for piece in [1, 7, 4096, KEPT_BYTES - 1, KEPT_BYTES, KEPT_BYTES + 1, 3 * KEPT_BYTES] {
            let all: Vec<u8> = (0..KEPT_BYTES * 5 / 2).map(|i| (i % 251) as u8).collect();
            let mut history = History::default();
            for piece in all.chunks(piece) {
                history.append(piece);
                assert!(history.bytes.len() <= KEPT_BYTES);
            }
            assert_eq!(history.end(), all.len() as u64);
            assert_eq!(history.start(), (all.len() - KEPT_BYTES) as u64);
            assert!(read(&history, history.start(), 1000) == all[all.len() - KEPT_BYTES..], "{piece}");
            let late = history.end() - 10;
            assert_eq!(read(&history, late, 3), all[all.len() - 10..]);
            assert!(history.from(history.end(), 1).is_empty() && history.from(u64::MAX, 1).is_empty());
        }
    }

    #[test]
    fn little_output_takes_little_memory() {
        let mut history = History::default();
        assert_eq!(history.bytes.capacity(), 0);
        history.append(&[0; 100]);
        assert!(history.bytes.capacity() < 1024);
        (0..100_000).for_each(|_| history.append(&[0; 100]));
        assert!(history.bytes.capacity() <= KEPT_BYTES);
    }
}
