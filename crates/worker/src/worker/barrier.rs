//! The barrier behind a dead worker: when it has ended, no I/O that this worker had begun can land any more.
//!
//! Owns the pidfds of dead workers that have not ended. Invariant: the barrier is not asked of the file system before the last
//! of them has.

use super::engine::Tag;
use super::error::{Error, ErrorKind};
use super::io::IoResult;
use super::transfers::Transfers;
use rustix::fs::fstat;
use spillway_core::{BLOCK_BYTES, Errno, OpId};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// See above.
pub struct Barrier {
    /// pidfds of dead workers that have not ended.
    predecessors: Vec<OwnedFd>,
    /// It is wanted, and they have not.
    early: Option<OpId>,
    /// Where the block of the file lies that the disk does not use, if it is long enough to have one.
    spare_block_at: Option<u64>,
}

impl Barrier {
    /// On a file that has to be so long.
    pub fn new(
        predecessors: Vec<OwnedFd>,
        file: Option<&OwnedFd>,
        file_bytes: u64,
    ) -> Result<Barrier, Error> {
        let spare_block_at = match file {
            Some(fd) => {
                let have = fstat(fd).map_err(|e| {
                    Error::new(ErrorKind::Store, "the length of the disk's file cannot be read").because(e)
                })?;
                let len = have.st_size as u64 / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
                (len >= file_bytes).then(|| len - BLOCK_BYTES as u64)
            }
            None => None,
        };
        Ok(Barrier { predecessors, early: None, spare_block_at })
    }

    /// Those whose end is to be told of.
    pub fn predecessors(&self) -> Vec<RawFd> {
        self.predecessors.iter().map(AsRawFd::as_raw_fd).collect()
    }

    /// One has ended. After the last one the barrier, if it is wanted already, need not wait any more.
    pub fn predecessor_ended(&mut self, transfers: &mut Transfers, pidfd: RawFd) {
        self.predecessors.retain(|fd| fd.as_raw_fd() != pidfd);
        if self.predecessors.is_empty()
            && let Some(op) = self.early.take()
        {
            self.begin(transfers, op);
        }
    }

    /// Once the dead process is gone nothing of it can be begun any more; what its ring had handed to the block
    /// layer may still be under way. ext4 and XFS let a punch wait for all O_DIRECT I/O on the file; on btrfs the
    /// fdatasync waits for ordered extents, in which such writes end. Through the page cache the order of the
    /// file's lock is enough. What is punched is a block that the disk never uses.
    pub fn begin(&mut self, transfers: &mut Transfers, op: OpId) {
        if !self.predecessors.is_empty() {
            self.early = Some(op);
            return;
        }
        match self.spare_block_at {
            Some(at) => transfers.punch(at, BLOCK_BYTES as u64, Tag::Barrier(op.0)),
            None => transfers.sync(op),
        }
    }
}

/// The punch of a barrier has ended: its fdatasync follows. A file system that cannot punch has only that.
pub fn punched(transfers: &mut Transfers, op: OpId, result: i32) -> Option<IoResult> {
    if result < 0 && ![libc::EOPNOTSUPP, libc::ENOSYS].contains(&-result) {
        return Some(IoResult::Plain(op, Err(Errno(-result))));
    }
    transfers.sync(op);
    None
}
