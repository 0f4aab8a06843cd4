//! An event of a trace: one request of a disk, and the blocks that it touches.
//!
//! Owns the bounds of an event and the rule of which blocks are touched and which removed; knows no file format.
//! Invariant: an event that passed [`Event::check`] is of at most [`MAX_REQUEST_BLOCKS`] steps, whatever it says.

use std::ops::Range;

/// Bytes in a block, the unit of everything that is counted here.
pub const BLOCK_BYTES: u64 = 4096;
/// The end of the largest disk that a trace can be of: 8 TiB, so that blocks have 31 bits.
pub const MAX_DISK_BYTES: u64 = 1 << 43;
/// Most bytes of a read or write: 1 GiB. Discards and zeroes reach as far as the disk.
pub const MAX_REQUEST_BYTES: u64 = 1 << 30;
/// Most blocks that a read or write touches one by one.
pub const MAX_REQUEST_BLOCKS: u64 = MAX_REQUEST_BYTES / BLOCK_BYTES + 1;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Operation {
    /// Reads.
    Read = 0,
    /// Writes.
    Write = 1,
    /// Writes zeroes, exactly as far as it says.
    WriteZeroes = 2,
    /// Discards whole blocks; those at the edges that it covers in part stay as they are.
    Discard = 3,
    /// Flushes earlier writes. Has no range.
    Flush = 4,
    /// Discards everything written since the image. Has no range.
    Reset = 5,
}

impl Operation {
    /// All operations, by their number.
    pub const ALL: [Operation; 6] = [
        Operation::Read,
        Operation::Write,
        Operation::WriteZeroes,
        Operation::Discard,
        Operation::Flush,
        Operation::Reset,
    ];

    /// Whether it has an offset and a length.
    pub fn has_range(self) -> bool {
        !matches!(self, Operation::Flush | Operation::Reset)
    }
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Microseconds since the trace's begin.
    pub time_us: u64,
    /// What it does.
    pub operation: Operation,
    /// First byte; 0 where the operation has no range.
    pub offset_bytes: u64,
    /// Bytes; 0 where the operation has no range.
    pub len_bytes: u64,
}

/// What an event means for the blocks of a write cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A block is read.
    Read(u32),
    /// A block is written; with `whole` nothing of its old content is needed.
    Write {
        /// The block.
        block: u32,
        /// Whether all of the block is written, as far as it lies on the disk.
        whole: bool,
    },
    /// Blocks are discarded.
    Remove(Range<u32>),
    /// All blocks are discarded.
    Reset,
}

impl Event {
    /// Checks that this can be an event of a disk of this size.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self, disk_bytes: u64) -> Result<(), String> {
        let Event { operation, offset_bytes, len_bytes, .. } = *self;
        if !operation.has_range() {
            return match (offset_bytes, len_bytes) {
                (0, 0) => Ok(()),
                _ => Err(format!("{operation:?} has no range, and says {len_bytes} bytes at {offset_bytes}")),
            };
        }
        let disk_bytes = disk_bytes.min(MAX_DISK_BYTES);
        if offset_bytes.checked_add(len_bytes).is_none_or(|end| end > disk_bytes) {
            return Err(format!(
                "{operation:?} of {len_bytes} bytes at {offset_bytes} reaches beyond {disk_bytes}, the disk's end"
            ));
        }
        if len_bytes > MAX_REQUEST_BYTES && matches!(operation, Operation::Read | Operation::Write) {
            return Err(format!(
                "{operation:?} of {len_bytes} bytes at {offset_bytes}: the most is {MAX_REQUEST_BYTES}"
            ));
        }
        Ok(())
    }

    /// Calls `step` for each block or range, in the order of the blocks. The last block of a disk may be a short one, and is whole when the event
    /// reaches the disk's end.
    #[inline]
    pub fn steps(&self, disk_bytes: u64, mut step: impl FnMut(Step)) {
        if self.operation == Operation::Reset {
            return step(Step::Reset);
        }
        if self.len_bytes == 0 {
            return;
        }
        let (start, end) = (self.offset_bytes, self.offset_bytes + self.len_bytes);
        let touched = (start / BLOCK_BYTES) as u32..end.div_ceil(BLOCK_BYTES) as u32;
        let whole_end = if end == disk_bytes { touched.end } else { (end / BLOCK_BYTES) as u32 };
        let whole = start.div_ceil(BLOCK_BYTES) as u32..whole_end;
        match self.operation {
            Operation::Read => touched.for_each(|block| step(Step::Read(block))),
            Operation::Write => {
                touched.for_each(|block| step(Step::Write { block, whole: whole.contains(&block) }));
            }
            Operation::Discard if whole.is_empty() => {}
            Operation::Discard => step(Step::Remove(whole)),
            Operation::WriteZeroes => {
                // At most one block before the whole ones and one after them.
                if !whole.contains(&touched.start) {
                    step(Step::Write { block: touched.start, whole: false });
                }
                if !whole.is_empty() {
                    step(Step::Remove(whole.clone()));
                }
                let last = touched.end - 1;
                if last != touched.start && !whole.contains(&last) {
                    step(Step::Write { block: last, whole: false });
                }
            }
            Operation::Flush | Operation::Reset => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(operation: Operation, offset_bytes: u64, len_bytes: u64, disk: u64) -> Vec<Step> {
        let mut steps = Vec::new();
        Event { time_us: 0, operation, offset_bytes, len_bytes }.steps(disk, |s| steps.push(s));
        steps
    }

    #[test]
    fn a_range_is_cut_in_blocks() {
        let part = |block| Step::Write { block, whole: false };
        let whole = |block| Step::Write { block, whole: true };
        let disk = 10 * BLOCK_BYTES + 512;
        assert_eq!(steps(Operation::Read, 4095, 2, disk), [Step::Read(0), Step::Read(1)]);
        assert_eq!(steps(Operation::Write, 2048, 8192, disk), [part(0), whole(1), part(2)]);
        assert_eq!(steps(Operation::Write, 512, 512, disk), [part(0)]);
        assert_eq!(steps(Operation::Write, 10 * 4096, 512, disk), [whole(10)], "the disk's short end");
        assert_eq!(steps(Operation::Discard, 1, 8191, disk), [Step::Remove(1..2)]);
        assert_eq!(steps(Operation::Discard, 1, 4096, disk), [], "edges alone");
        assert_eq!(steps(Operation::Discard, 9 * 4096, 4608, disk), [Step::Remove(9..11)]);
        assert_eq!(steps(Operation::WriteZeroes, 1, 8192, disk), [part(0), Step::Remove(1..2), part(2)]);
        assert_eq!(steps(Operation::WriteZeroes, 1, 4096, disk), [part(0), part(1)]);
        assert_eq!(steps(Operation::WriteZeroes, 8, 8, disk), [part(0)]);
        assert_eq!(steps(Operation::Flush, 0, 0, disk), []);
        assert_eq!(steps(Operation::Reset, 0, 0, disk), [Step::Reset]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let event =
            |operation, offset_bytes, len_bytes| Event { time_us: 0, operation, offset_bytes, len_bytes };
        assert!(event(Operation::Read, u64::MAX, 2).check(u64::MAX).is_err());
        assert!(event(Operation::Read, 0, 4097).check(4096).is_err());
        assert!(event(Operation::Write, 0, MAX_REQUEST_BYTES + 1).check(u64::MAX).is_err());
        assert!(event(Operation::Discard, 0, MAX_DISK_BYTES).check(u64::MAX).is_ok());
        assert!(event(Operation::Flush, 1, 0).check(u64::MAX).is_err());
    }
}
