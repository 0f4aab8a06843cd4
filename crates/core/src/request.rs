//! A request of an export to a disk. Knows no transport: an export's own state is in the opaque [`Token`].
//!
//! Invariant: each accepted [`Request`] is completed exactly once, with its errno.

/// An export's name for one of its unfinished requests. The core carries it and never looks inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// What a request is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fill the request's buffers with the newest content.
    Read,
    /// Take the request's buffers as the newest content. With `fua`, stable before completion (where the
    /// mode honours FLUSH).
    Write {
        /// Force unit access: this write is stable when it completes.
        fua: bool,
    },
    /// Everything completed before is stable (where the mode honours FLUSH).
    Flush,
    /// Whole blocks in the range read as zeroes afterwards and their space is freed; partial edges stay.
    Discard,
    /// Exactly this range reads as zeroes afterwards.
    WriteZeroes {
        /// As in [`Operation::Write`].
        fua: bool,
    },
}

/// One request. The range is in sectors; `Flush` has an empty one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The export's name for it.
    pub token: Token,
    /// What a request is to do.
    pub operation: Operation,
    /// First sector.
    pub sector: u64,
    /// Number of sectors; at most 4 GiB - 512 bytes' worth.
    pub sectors: u32,
}
