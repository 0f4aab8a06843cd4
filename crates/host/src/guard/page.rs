//! The page that the daemon and the guard share: a file of one page in the state folder. Owns its mapping and its layout.
//!
//! Invariant: whatever the file contains, a deadline of another boot of the host, or of another layout, is over.

#![expect(unsafe_code, reason = "a shared mapping")]

use crate::processes::boot_id;
use rustix::mm::{MapFlags, ProtFlags, mlock, mmap, munmap};
use rustix::time::{ClockId, clock_gettime};
use spillway_fleet::Moment;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Size of the file.
const BYTES: usize = 4096;
/// What the file begins with: the version of its layout, and the boot of the host.
const MAGIC: &[u8; 8] = b"SPWGRD1\n";
const DEADLINE_AT: usize = 64;
const LOOKED_AT: usize = 128;

/// The shared page.
#[derive(Debug)]
pub struct GuardPage {
    file: File,
    base: NonNull<c_void>,
}

// SAFETY: the mapping lives as long as the value, and is only accessed by atomic operations.
unsafe impl Send for GuardPage {}
// SAFETY: the same.
unsafe impl Sync for GuardPage {}

impl GuardPage {
    /// Opens the page, or makes it. One of another boot, or of another layout, becomes an empty one.
    ///
    /// # Errors
    /// The file cannot be made or mapped.
    pub fn open(path: &Path) -> io::Result<GuardPage> {
        let file =
            File::options().create(true).truncate(false).read(true).write(true).mode(0o600).open(path)?;
        let header = [MAGIC.as_slice(), &boot_id()?].concat();
        let mut found = vec![0; header.len()];
        let is_whole = file.metadata()?.len() == BYTES as u64;
        if !is_whole || file.read_exact_at(&mut found, 0).is_err() || found != header {
            let mut page = [0; BYTES];
            page[..header.len()].copy_from_slice(&header);
            // Its length is never less: who has mapped it would be killed.
            file.write_all_at(&page, 0)?;
            file.set_len(BYTES as u64)?;
        }
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping of a file of this length.
        let base = unsafe { mmap(std::ptr::null_mut(), BYTES, prot, flags, &file, 0) }?;
        // It is to be readable when the disk is not. Without the right to do so it stays in the page cache.
        // SAFETY: the mapping was just made.
        let _ = unsafe { mlock(base, BYTES) };
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("the page is mapped nowhere"))?;
        Ok(GuardPage { file, base })
    }

    fn number(&self, at: usize) -> &AtomicU64 {
        // SAFETY: within the mapping, aligned, and accessed as an atomic number by everybody.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().cast::<u8>().add(at).cast()) }
    }

    /// Moment at which machines are ended.
    pub fn deadline(&self) -> Moment {
        Moment(self.number(DEADLINE_AT).load(Ordering::Acquire))
    }

    /// Moves the deadline on.
    pub fn set_deadline(&self, deadline: Moment) {
        self.number(DEADLINE_AT).store(deadline.0, Ordering::Release);
    }

    /// Whether the deadline is over. A process that was just forked may ask, too.
    pub fn is_over(&self) -> bool {
        now() >= self.deadline()
    }

    /// When the guard has last looked.
    pub fn looked(&self) -> Moment {
        Moment(self.number(LOOKED_AT).load(Ordering::Acquire))
    }

    /// Notes that the guard looks now.
    pub fn look(&self, now: Moment) {
        self.number(LOOKED_AT).store(now.0, Ordering::Release);
    }

    /// Whether the file is still there, under any name.
    pub fn is_linked(&self) -> bool {
        self.file.metadata().is_ok_and(|found| found.nlink() > 0)
    }
}

impl Drop for GuardPage {
    fn drop(&mut self) {
        // SAFETY: nobody else has the mapping.
        let _ = unsafe { munmap(self.base.as_ptr(), BYTES) };
    }
}

/// The present moment, on the clock that goes on during a suspension.
pub fn now() -> Moment {
    let time = clock_gettime(ClockId::Boottime);
    Moment(time.tv_sec.unsigned_abs() * 1000 + time.tv_nsec.unsigned_abs() / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_shared_and_one_of_another_boot_is_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("page");
        let one = GuardPage::open(&path).unwrap();
        assert!(one.is_over(), "nobody has promised anything");
        let two = GuardPage::open(&path).unwrap();
        one.set_deadline(now().after_ms(60_000));
        assert!(!two.is_over());
        two.look(Moment(7));
        assert_eq!(one.looked(), Moment(7));
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"0", 9).unwrap();
        assert!(GuardPage::open(&path).unwrap().is_over(), "it is of another boot");
        std::fs::write(&path, "short").unwrap();
        assert!(GuardPage::open(&path).unwrap().is_over());
        assert!(one.is_linked());
        std::fs::remove_file(&path).unwrap();
        assert!(!one.is_linked());
    }
}
