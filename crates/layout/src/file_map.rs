//! Chooses which of the two maps in the file of a persistent disk is used at a start.
//!
//! Owns that rule, and the name of a page cache, which the supervisor finds out. Invariant: the live map is used only in the very
//! page cache in which it was written. Anywhere else it may be newer than the content that it names: the kernel
//! writes it to the file at any time, while the file system's journal keeps the extents of new blocks back. Why:
//! `docs/design/031-persistent.md`.

/// Names the page cache of one file: that inode, in one mounted instance of its file system, in one boot of one kernel. No other
/// page cache ever has the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheId(pub [u8; 16]);

/// One of the two maps in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileMap {
    /// The live map: all completed writes.
    Live,
    /// The durable map: all flushed writes.
    Durable,
}

impl FileMap {
    /// The map to use, for a file that names the page cache in which it was last served and is now in this one. `None`: the page
    /// cache is not known.
    pub fn to_start_from(recorded: Option<CacheId>, now: Option<CacheId>) -> FileMap {
        match (recorded, now) {
            (Some(recorded), Some(now)) if recorded == now => FileMap::Live,
            _ => FileMap::Durable,
        }
    }
}
