//! The space of the cache. Owns the count of its bytes.
//!
//! Invariants: nothing is counted anew beyond the budget (it may have become smaller than what is there), and every chunk that may be
//! in a file is counted: it is counted before it is written, and no longer counted after it was removed.

use std::sync::Mutex;

/// Blocks in which file systems give out space.
const BLOCK_BYTES: u64 = 4096;

/// Part of a budget in which a file system keeps where the chunks are: 256 bytes for each MiB. Extents of ext4, XFS and Btrfs have 12 to
/// 53 bytes, and a chunk is one of them, or a few on a file system with little free space.
const RECORDS_SHARE: u64 = 4096;
/// Least bytes for that: one block for each of 16 images.
const LEAST_RECORDS: u64 = 16 * BLOCK_BYTES;

/// The count.
#[derive(Debug)]
pub struct Budget {
    most_bytes: u64,
    used_bytes: Mutex<u64>,
    /// Part of these that is of images which are not served.
    others_bytes: Mutex<u64>,
}

impl Budget {
    /// Files may take so many bytes, with what the file system itself needs for them.
    pub fn of_files(most_bytes: u64) -> Budget {
        let records = (most_bytes / RECORDS_SHARE).max(LEAST_RECORDS);
        Budget::new(most_bytes.saturating_sub(records.next_multiple_of(BLOCK_BYTES)))
    }

    /// Chunks may take so many bytes.
    pub fn new(most_bytes: u64) -> Budget {
        Budget { most_bytes, used_bytes: Mutex::default(), others_bytes: Mutex::default() }
    }

    /// Space that a chunk takes.
    pub fn space(len: u64) -> u64 {
        len.next_multiple_of(BLOCK_BYTES)
    }

    fn used(&self) -> std::sync::MutexGuard<'_, u64> {
        self.used_bytes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Counts a chunk of this length, if there is space for it.
    pub fn take(&self, len: u64) -> bool {
        let mut used = self.used();
        let after = used.saturating_add(Budget::space(len));
        if after > self.most_bytes {
            return false;
        }
        *used = after;
        true
    }

    /// Counts a chunk that is there already.
    pub fn count(&self, len: u64) {
        *self.used() += Budget::space(len);
    }

    /// A chunk of this length was removed, or was not written.
    pub fn give_back(&self, len: u64) {
        let mut used = self.used();
        *used = used.checked_sub(Budget::space(len)).expect("it was counted");
    }

    /// Files of images that are not served take so many bytes, in place of what they took before.
    pub fn set_others(&self, bytes: u64) {
        let mut others = self.others_bytes.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut used = self.used();
        *used = *used - *others + bytes;
        *others = bytes;
    }

    /// Bytes that chunks may take.
    pub fn most_bytes(&self) -> u64 {
        self.most_bytes
    }

    /// Bytes in use beyond the budget.
    pub fn surplus_bytes(&self) -> u64 {
        self.used().saturating_sub(self.most_bytes)
    }

    /// Bytes in use.
    pub fn used_bytes(&self) -> u64 {
        *self.used()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_held_back_for_what_the_file_system_keeps_of_the_files() {
        let chunks = |bytes| Budget::of_files(bytes).most_bytes();
        assert_eq!([0, 4096, 64 << 10, (64 << 10) + 4096].map(chunks), [0, 0, 0, 4096]);
        assert_eq!(chunks(100 << 20), (100 << 20) - (64 << 10));
        assert_eq!(chunks(10 << 30), (10 << 30) - (10 << 18));
    }

    #[test]
    fn it_is_never_exceeded_and_counts_whole_blocks() {
        let budget = Budget::new(3 << 20);
        assert!(budget.take(1 << 20) && budget.take(1 << 20) && budget.take(512));
        assert_eq!(budget.used_bytes(), (2 << 20) + 4096);
        assert!(!budget.take(1 << 20) && budget.take((1 << 20) - 4096) && !budget.take(1));
        budget.give_back(512);
        assert_eq!(budget.used_bytes(), (3 << 20) - 4096);
        assert!(!budget.take(u64::MAX - 4096));
        budget.set_others(8192);
        assert_eq!((budget.used_bytes(), budget.surplus_bytes()), ((3 << 20) + 4096, 4096));
        budget.set_others(0);
        assert_eq!(budget.used_bytes(), (3 << 20) - 4096);
    }
}
