//! Which of the two maps in the file of a persistent disk a start goes by.
//!
//! Owns that rule, and how a page cache is named; who finds out its name is the supervisor. Invariant: the live map counts only
//! in the very page cache in which it was written. Anywhere else it may be newer than the content that it tells of: the kernel
//! writes it to the file at any time, while the file system's journal keeps the extents of new blocks back. Why:
//! `docs/design/031-persistent.md`.

/// Names the page cache of one file: that inode, in one mounted instance of its file system, in one boot of one kernel. No other
/// page cache ever has the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheId(pub [u8; 16]);

/// One of the two maps in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileMap {
    /// All that was completed.
    Live,
    /// What was flushed.
    Durable,
}

impl FileMap {
    /// The map that tells where each block is, of a file that says in which page cache it was last served, and that now is in
    /// this one. `None`: it is not known.
    pub fn to_start_from(recorded: Option<CacheId>, now: Option<CacheId>) -> FileMap {
        match (recorded, now) {
            (Some(recorded), Some(now)) if recorded == now => FileMap::Live,
            _ => FileMap::Durable,
        }
    }
}
