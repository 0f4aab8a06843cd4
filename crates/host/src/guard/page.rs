//! The page that the daemon and the guard share: a file of one page in the state folder. Owns its mapping and its layout.
//!
//! Invariant: whatever the file contains, a deadline of another boot of the host, or of another layout, is over. Who only reads the page
//! waits for no disk: it is locked in memory. Who writes it may have to wait for the file system.

#![expect(unsafe_code, reason = "a shared mapping")]

use crate::processes::boot_id;
use rustix::mm::{MapFlags, ProtFlags, mlock, mmap, munmap};
use rustix::time::{ClockId, clock_gettime};
use spillway_fleet::Moment;
use std::ffi::c_void;
use std::fs::{self, File};
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
/// Where the first guard says that it looks. Another one, which takes its place, does so in the next slot.
const SLOTS_AT: usize = 128;
const SLOT_BYTES: usize = 64;
/// Number of guards that may run at the same time.
pub const SLOTS: usize = 2;
/// Time since its last look after which a guard counts as none.
const FRESH_MS: u64 = 2_000;

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
        GuardPage::map(file)
    }

    /// Makes a page with this deadline, which takes the place of whatever is at this path.
    ///
    /// # Errors
    /// The file cannot be made or mapped.
    pub fn replace(path: &Path, deadline: Moment) -> io::Result<GuardPage> {
        let new = path.with_extension("new");
        match fs::remove_file(&new) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let page = GuardPage::open(&new)?;
        // A guard that finds it finds its deadline.
        page.set_deadline(deadline);
        fs::rename(&new, path)?;
        Ok(page)
    }

    fn map(file: File) -> io::Result<GuardPage> {
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

    /// Whether a guard of this kind has looked lately, in this slot.
    pub fn is_fresh(&self, slot: usize, kind: u64) -> bool {
        let [looked, is] = self.slot(slot).map(|number| number.load(Ordering::Acquire));
        is == kind && now().since_ms(Moment(looked)) < FRESH_MS
    }

    /// Notes that a guard of this kind has looked at this moment.
    pub fn look(&self, slot: usize, kind: u64, at: Moment) {
        let [looked, is] = self.slot(slot);
        is.store(kind, Ordering::Release);
        looked.store(at.0, Ordering::Release);
    }

    fn slot(&self, slot: usize) -> [&AtomicU64; 2] {
        let at = SLOTS_AT + slot.min(SLOTS - 1) * SLOT_BYTES;
        [self.number(at), self.number(at + 8)]
    }

    /// Whether the file is still there, under any name. One that cannot be looked at is.
    pub fn is_linked(&self) -> bool {
        self.file.metadata().map_or(true, |found| found.nlink() > 0)
    }

    /// Whether the file is the one at this path, as far as anybody can tell.
    pub fn is_at(&self, path: &Path) -> bool {
        let identity = |found: fs::Metadata| (found.dev(), found.ino());
        match (self.file.metadata(), fs::metadata(path)) {
            (Ok(own), Ok(there)) => identity(own) == identity(there),
            (_, Err(e)) => e.kind() != io::ErrorKind::NotFound,
            (Err(_), _) => true,
        }
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
        two.look(1, 7, now());
        assert_eq!(
            [(0, 7), (1, 6), (1, 7)].map(|(slot, kind)| one.is_fresh(slot, kind)),
            [false, false, true]
        );
        two.look(1, 7, Moment(now().0 - FRESH_MS));
        assert!(!one.is_fresh(1, 7));
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"0", 9).unwrap();
        assert!(GuardPage::open(&path).unwrap().is_over(), "it is of another boot");
        fs::write(&path, "short").unwrap();
        assert!(GuardPage::open(&path).unwrap().is_over());
        assert!(one.is_linked());
        fs::remove_file(&path).unwrap();
        assert!(!one.is_linked());
    }

    #[test]
    fn a_page_that_was_removed_or_replaced_is_made_again_with_its_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("page");
        let one = GuardPage::open(&path).unwrap();
        assert!(one.is_at(&path));
        let deadline = now().after_ms(60_000);
        for _ in 0..2 {
            fs::remove_file(&path).unwrap();
            assert!(!one.is_at(&path));
            fs::write(&path, "somebody else's").unwrap();
            assert!(!one.is_at(&path));
            let two = GuardPage::replace(&path, deadline).unwrap();
            assert!(two.is_at(&path) && two.is_linked());
            assert_eq!(GuardPage::open(&path).unwrap().deadline(), deadline);
        }
    }
}
