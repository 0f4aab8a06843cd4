//! O_DIRECT for the files that whoever starts a disk names. Owns the try: a disk that cannot be written so is an error before
//! anything is served, not inside the guest.

use rustix::fs::OFlags;
use spillway_control::{ErrorKind, SupervisorError};
use spillway_core::Mode;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The alignment that the worker keeps; a file system that wants more is used through the page cache.
pub(super) const ALIGNMENT: usize = 4096;

/// One block, aligned for O_DIRECT.
#[repr(align(4096))]
pub(super) struct Block([u8; ALIGNMENT]);

impl Block {
    pub fn zeroed() -> Block {
        Block([0; ALIGNMENT])
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// From here on it is read and written O_DIRECT, which is tried.
pub(super) fn past_the_cache(file: File, path: &Path, mode: Mode) -> Result<File, SupervisorError> {
    let missing = || {
        let what = format!(
            "its file system takes no O_DIRECT reads and writes of 4 KiB, and --mode {mode} writes past the page cache: \
             name a file on ext4 or XFS with --disk"
        );
        SupervisorError::new(ErrorKind::Create, format!("disk {}: {what}", path.display()))
    };
    rustix::fs::fcntl_setfl(&file, OFlags::DIRECT).map_err(|_| missing())?;
    let mut block = Block::zeroed();
    // A file that is shorter than a block is a block long afterwards, as it must be to be served.
    match read_start(&file, block.bytes()).and_then(|()| file.write_all_at(block.bytes(), 0)) {
        Ok(()) => Ok(file),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Err(missing()),
        Err(e) => {
            let advice = "see that there is space, or name another with --disk";
            Err(SupervisorError::on_path(ErrorKind::Create, "cannot write disk", path, e, advice))
        }
    }
}

/// Fills the block with the file's first bytes, as many as there are.
fn read_start(file: &File, block: &mut [u8]) -> io::Result<()> {
    loop {
        match file.read_at(block, 0) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // Of a file that goes on O_DIRECT gives all of a block.
            Ok(n) if n < block.len() && file.metadata()?.len() >= block.len() as u64 => {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            result => return result.map(drop),
        }
    }
}
