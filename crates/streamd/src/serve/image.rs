//! An image in the cache: a sparse file with each chunk at its own offset, and a map of the chunks that may be in it. Owns both
//! files, and the memory in which users see what they may read.
//!
//! Invariants: a chunk is named in the map's file, then written, then its bit in the memory is set. So the map's file names every
//! chunk that takes space or that anybody may read, also after this process was killed. What it names may be anything, for
//! example after a loss of power: each process compares a chunk before it sets its bit in the memory.
//!
//! Nothing is removed from the file of an image that somebody uses: users hold a shared lock, which ends with the last
//! descriptor of theirs, not with this process.

use super::budget::Budget;
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use spillway_image::ResidencyWriter;
use spillway_image::digests::{ChunkDigest, hex, of_chunk, unhex};
use spillway_registry::Index;
use spillway_registry::serve::{Fill, ImageFigures};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, IoSliceMut};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

const DISK: &str = "disk.raw";
const MAP: &str = "map";
/// Extension of folders that are being removed.
const REMOVED: &str = "removed";

/// The image.
pub struct CachedImage {
    folder: PathBuf,
    index: Index,
    disk: File,
    map: File,
    /// A byte for each chunk, 1 if it may be in the file. The map's file says so of these, and of what is being written or removed.
    /// Anybody reads it; it is written with the changes locked.
    present: Vec<AtomicU8>,
    changes: Mutex<Changes>,
    residency: Mutex<Arc<ResidencyWriter>>,
    /// What is not removed to make space.
    pinned: Mutex<Fill>,
    is_whole: AtomicBool,
}

/// Locked while chunks are kept or removed.
#[derive(Default)]
struct Changes {
    /// The image is served no longer, and its files are another's to remove.
    is_over: bool,
}

/// What became of a chunk that was brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// It is in the file.
    Yes,
    /// The cache has no space for it.
    NoSpace,
    /// The file system of the cache has none.
    DiskFull,
    /// The image is served no longer.
    Gone,
}

/// Files of an image that is served no longer. They are counted until they are removed.
pub struct Aside {
    folder: PathBuf,
    disk: File,
    /// Lengths of the chunks that are counted.
    counted: Vec<u64>,
}

impl Aside {
    /// Where they are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Removes the files.
    pub fn remove(&self, budget: &Budget) -> io::Result<()> {
        // Whoever still has it open, what it took is free, and the last to close it has nothing to do.
        self.disk.set_len(0)?;
        match fs::remove_dir_all(&self.folder) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        self.counted.iter().for_each(|len| budget.give_back(*len));
        Ok(())
    }
}

/// What a write has become that failed for this reason.
fn disk_full(error: io::Error) -> io::Result<Kept> {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Ok(Kept::DiskFull),
        _ => Err(error),
    }
}

/// The memory of an image of which nothing is known to be in its file but its zeroes, which are holes.
fn new_residency(index: &Index) -> io::Result<Arc<ResidencyWriter>> {
    let residency = ResidencyWriter::new(index.digests.len() as u64)?;
    let zeroes = (0..index.digests.len()).filter(|chunk| index.is_zero(*chunk));
    zeroes.for_each(|chunk| residency.set(chunk as u64));
    Ok(Arc::new(residency))
}

/// The folder of an image.
pub fn folder_of(cache: &Path, root: &ChunkDigest) -> PathBuf {
    cache.join(hex(root))
}

/// Whether a folder has the name of an image's, or of one that is being removed. All others are somebody else's.
pub fn is_named_as_an_image(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (stem, rest) = name.split_once('.').unwrap_or((name, ""));
    let is_removed = || {
        let number = rest.strip_suffix(REMOVED).and_then(|rest| rest.strip_suffix('.'));
        number.is_some_and(|number| number.parse::<u64>().is_ok())
    };
    unhex(stem).is_some_and(|root| hex(&root) == stem) && (rest.is_empty() || is_removed())
}

/// Gives a folder a name that no other has.
pub fn set_aside(path: &Path) -> io::Result<PathBuf> {
    static LAST: AtomicU64 = AtomicU64::new(0);
    if path.extension().is_some_and(|extension| extension == REMOVED) {
        return Ok(path.to_owned());
    }
    // Others may be left from a process that ended before it was done.
    loop {
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        let aside = path.with_extension(format!("{number}.{REMOVED}"));
        if !aside.exists() {
            fs::rename(path, &aside)?;
            return Ok(aside);
        }
    }
}

/// Bytes that the files in the folder of an image take. An image that is not there has none.
pub fn bytes_in(folder: &Path) -> u64 {
    fs::metadata(folder.join(DISK)).map_or(0, |file| file.blocks() * 512)
}

impl CachedImage {
    /// Opens the image's folder, or makes it. Counts what is there already.
    ///
    /// # Errors
    /// A file cannot be made or read.
    pub fn open(cache: &Path, index: Index, budget: &Budget) -> io::Result<CachedImage> {
        let folder = folder_of(cache, &index.root());
        fs::create_dir_all(&folder)?;
        let open = |name| {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false).open(folder.join(name))
        };
        let chunks = index.digests.len();
        let mut in_map = vec![0; chunks];
        let (mut disk, mut map) = (open(DISK)?, open(MAP)?);
        if map.metadata()?.len() == chunks as u64 && disk.metadata()?.len() == index.size_bytes {
            map.read_exact_at(&mut in_map, 0)?;
        } else {
            // Other files of these names: whoever uses the old one keeps it as it is.
            [DISK, MAP].iter().try_for_each(|name| fs::remove_file(folder.join(name)))?;
            (disk, map) = (open(DISK)?, open(MAP)?);
            disk.set_len(index.size_bytes)?;
            map.set_len(chunks as u64)?;
        }
        let image = CachedImage {
            folder,
            disk,
            map,
            present: in_map.into_iter().map(AtomicU8::new).collect(),
            changes: Mutex::default(),
            residency: Mutex::new(new_residency(&index)?),
            pinned: Mutex::default(),
            is_whole: AtomicBool::new(false),
            index,
        };
        // After a loss of power there may be more in the file than is named.
        if let Some(_alone) = image.lock_alone()? {
            image.punch_absent()?;
        }
        // Last, as nothing is given back if this fails.
        image.present_chunks().for_each(|chunk| budget.count(image.index.len_of(chunk)));
        Ok(image)
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its chunks.
    pub fn index(&self) -> &Index {
        &self.index
    }

    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whether a chunk is named in the map.
    fn is_present(&self, chunk: usize) -> bool {
        self.present.get(chunk).is_some_and(|byte| byte.load(Ordering::Acquire) != 0)
    }

    /// The chunks that are named in the map.
    fn present_chunks(&self) -> impl Iterator<Item = usize> {
        (0..self.present.len()).filter(|chunk| self.is_present(*chunk))
    }

    /// The memory of this image as it is now.
    pub fn residency(&self) -> Arc<ResidencyWriter> {
        Arc::clone(&self.residency.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// The file for another user, who keeps it from being emptied as long as the descriptor lives, and the memory.
    pub fn for_user(&self) -> io::Result<(File, Arc<ResidencyWriter>)> {
        let changes = self.changes();
        if changes.is_over {
            // It is served no longer: what is at its path now is another one's.
            return Err(io::ErrorKind::NotFound.into());
        }
        let file = File::open(self.folder.join(DISK))?;
        flock(&file, FlockOperation::NonBlockingLockShared)?;
        Ok((file, self.residency()))
    }

    /// Whether the chunk may be in the file, or is zeroes.
    pub fn may_have(&self, chunk: usize) -> bool {
        self.index.is_zero(chunk) || self.is_present(chunk)
    }

    /// Whether the chunk is in the file as its digest says. Its bit is set then.
    pub fn verify(&self, chunk: usize) -> io::Result<bool> {
        // The memory first: of a chunk that is removed from now on, the bit is set where nobody looks any more.
        let residency = self.residency();
        if residency.has(chunk as u64) {
            return Ok(true);
        }
        let is_good = self.read_verified(chunk)?.is_some();
        if is_good {
            residency.set(chunk as u64);
        }
        Ok(is_good)
    }

    /// Reads a whole chunk. None: it is not in the file as its digest says. The chunk may be removed meanwhile.
    pub fn read_verified(&self, chunk: usize) -> io::Result<Option<Vec<u8>>> {
        if !self.is_present(chunk) {
            return Ok(None);
        }
        let mut bytes = vec![0; self.index.len_of(chunk) as usize];
        self.disk.read_exact_at(&mut bytes, chunk as u64 * self.index.chunk_bytes)?;
        Ok(Some(bytes).filter(|bytes| of_chunk(bytes) == self.index.digests[chunk]))
    }

    /// Whether a chunk may be read now: its bit is set.
    pub fn is_resident(&self, chunk: usize) -> bool {
        self.residency().has(chunk as u64)
    }

    /// Reads a part of a chunk, if its bit is set. False: it is not, or not any more. Nothing is removed meanwhile.
    pub fn read_resident(&self, chunk: usize, at: u64, bytes: &mut [u8]) -> io::Result<bool> {
        let changes = self.changes();
        // A hole of zeroes is in the file as long as that is there.
        let is_there = !changes.is_over && self.is_resident(chunk);
        if is_there {
            self.disk.read_exact_at(bytes, chunk as u64 * self.index.chunk_bytes + at)?;
        }
        Ok(is_there)
    }

    /// The same if it is in memory, and nobody changes the image. False: it cannot be done now, and nothing is known; the kernel may
    /// have begun to read it.
    pub fn read_resident_now(&self, chunk: usize, at: u64, bytes: &mut [u8]) -> bool {
        let changes = match self.changes.try_lock() {
            Ok(changes) => changes,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if changes.is_over || !self.is_resident(chunk) {
            return false;
        }
        let (at, len) = (chunk as u64 * self.index.chunk_bytes + at, bytes.len());
        // It ends with less where something is not in memory, and with an error on a file system that cannot tell.
        preadv2(&self.disk, &mut [IoSliceMut::new(bytes)], at, ReadWriteFlags::NOWAIT) == Ok(len)
    }

    /// Which chunks may be read: bit n of byte n / 8 is chunk n.
    pub fn residency_bits(&self) -> Vec<u8> {
        let residency = self.residency();
        let mut bits = vec![0; self.index.digests.len().div_ceil(8)];
        for chunk in (0..self.index.digests.len()).filter(|chunk| residency.has(*chunk as u64)) {
            bits[chunk / 8] |= 1 << (chunk % 8);
        }
        bits
    }

    /// Keeps a chunk whose bytes were found to be right.
    pub fn keep(&self, chunk: usize, bytes: &[u8], budget: &Budget) -> io::Result<Kept> {
        let changes = self.changes();
        let Some(present) = self.present.get(chunk).filter(|_| !changes.is_over) else {
            return Ok(Kept::Gone);
        };
        let is_new = !self.is_present(chunk);
        if is_new && !budget.take(bytes.len() as u64) {
            return Ok(Kept::NoSpace);
        }
        if let Err(e) = self.map.write_all_at(&[1], chunk as u64) {
            if is_new {
                budget.give_back(bytes.len() as u64);
            }
            return disk_full(e);
        }
        // From here on it is counted, until it was removed. Who compares chunks finds it when it is whole: what was written of it before
        // an error is removed, and could be all but zeroes at its end.
        match self.disk.write_all_at(bytes, chunk as u64 * self.index.chunk_bytes) {
            Ok(()) => {
                present.store(1, Ordering::Release);
                self.residency().set(chunk as u64);
                Ok(Kept::Yes)
            }
            Err(e) => {
                match is_new && self.remove_chunk(chunk).is_ok() {
                    true => budget.give_back(bytes.len() as u64),
                    false => present.store(1, Ordering::Release),
                }
                disk_full(e)
            }
        }
    }

    fn pinned(&self) -> MutexGuard<'_, Fill> {
        self.pinned.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Sets what is not removed to make space.
    pub fn pin(&self, fill: &Fill) {
        *self.pinned() = fill.clone();
    }

    /// Whether this is what is not removed to make space.
    pub fn is_pinned(&self, fill: &Fill) -> bool {
        *self.pinned() == *fill
    }

    /// Bytes that the chunks take that are not removed to make space, whether they are there or not.
    pub fn pinned_bytes(&self) -> u64 {
        let pinned = self.pinned().clone();
        self.bytes_of(&pinned)
    }

    /// Bytes that these chunks take in the cache.
    pub fn bytes_of(&self, fill: &Fill) -> u64 {
        let bytes = |chunk: usize| {
            if self.index.is_zero(chunk) { 0 } else { Budget::space(self.index.len_of(chunk)) }
        };
        self.chunks_of(fill).into_iter().map(bytes).sum()
    }

    /// The chunks that are to be there before a disk needs them, in their order.
    pub fn filled(&self) -> Vec<usize> {
        let pinned = self.pinned().clone();
        self.chunks_of(&pinned)
    }

    fn chunks_of(&self, fill: &Fill) -> Vec<usize> {
        let chunks = self.index.digests.len();
        match fill {
            Fill::Nothing => Vec::new(),
            Fill::All => (0..chunks).collect(),
            Fill::Chunks(some) => some.iter().map(|chunk| *chunk as usize).filter(|n| *n < chunks).collect(),
        }
    }

    /// Everything is in the file: brings it to the medium, so that from now on nothing else is needed as long as all of it is to stay.
    pub fn make_durable(&self) -> io::Result<()> {
        self.disk.sync_data()?;
        self.map.sync_data()?;
        let _changes = self.changes();
        let is_whole =
            self.is_pinned(&Fill::All) && (0..self.index.digests.len()).all(|chunk| self.may_have(chunk));
        self.is_whole.store(is_whole, Ordering::Release);
        Ok(())
    }

    /// Takes all files out of the image's folder, if nobody uses the image. None: somebody does.
    pub fn set_aside(&self) -> io::Result<Option<Aside>> {
        let mut changes = self.changes();
        let Some(_alone) = self.lock_alone()? else { return Ok(None) };
        let disk = self.disk.try_clone()?;
        let folder = set_aside(&self.folder)?;
        changes.is_over = true;
        let counted = self.present_chunks().map(|chunk| self.index.len_of(chunk)).collect();
        self.present.iter().for_each(|byte| byte.store(0, Ordering::Release));
        Ok(Some(Aside { folder, disk, counted }))
    }

    /// What is in the cache.
    pub fn figures(&self) -> ImageFigures {
        // As it is between two changes.
        let _changes = self.changes();
        let chunks = self.index.digests.len();
        let zeroes = (0..chunks).filter(|chunk| self.index.is_zero(*chunk)).count();
        let count = |(chunks, bytes), chunk| (chunks + 1, bytes + self.index.len_of(chunk));
        let (present_chunks, present_bytes) = self.present_chunks().fold((0, 0), count);
        ImageFigures {
            chunks: chunks as u64,
            present_chunks: present_chunks + zeroes as u64,
            present_bytes,
            unfilled_chunks: self.filled().into_iter().filter(|chunk| !self.may_have(*chunk)).count() as u64,
            // What does not have to stay may go.
            is_whole: self.is_pinned(&Fill::All) && self.is_whole.load(Ordering::Acquire),
        }
    }

    /// Removes chunks of so many bytes or a little more, if nobody uses the file. Returns how many were removed.
    pub fn shrink(&self, bytes: u64, budget: &Budget) -> io::Result<u64> {
        self.evict_from((0..self.index.digests.len()).rev(), bytes, budget)
    }

    /// Removes this chunk, if nobody uses the file. Returns how many were removed.
    pub fn evict_chunk(&self, chunk: usize, budget: &Budget) -> io::Result<u64> {
        self.evict_from([chunk].into_iter(), 1, budget)
    }

    fn evict_from(
        &self,
        mut chunks: impl Iterator<Item = usize>,
        bytes: u64,
        budget: &Budget,
    ) -> io::Result<u64> {
        let changes = self.changes();
        if self.is_pinned(&Fill::All) || changes.is_over {
            return Ok(0);
        }
        let Some(_alone) = self.lock_alone()? else { return Ok(0) };
        let pinned: HashSet<usize> = self.filled().into_iter().collect();
        let (mut freed, mut removed) = (0, Vec::new());
        while freed < bytes
            && let Some(chunk) = chunks.next()
        {
            if self.is_present(chunk) && !pinned.contains(&chunk) {
                freed += Budget::space(self.index.len_of(chunk));
                removed.push(chunk);
            }
        }
        if removed.is_empty() {
            return Ok(0);
        }
        // Nobody has the old memory any more; the next user gets one without these chunks.
        let (before, after) = (self.residency(), new_residency(&self.index)?);
        let gone: HashSet<usize> = removed.iter().copied().collect();
        let stays = |chunk: &usize| before.has(*chunk as u64) && !gone.contains(chunk);
        // Who compares a chunk of these from now on does not find it; who does so already sets its bit in the old memory.
        removed.iter().for_each(|chunk| self.present[*chunk].store(0, Ordering::Release));
        (0..self.present.len()).filter(stays).for_each(|chunk| after.set(chunk as u64));
        *self.residency.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = after;
        self.is_whole.store(false, Ordering::Release);
        for (n, chunk) in removed.iter().enumerate() {
            if let Err(e) = self.remove_chunk(*chunk) {
                // What is left is still in the file, and counted.
                removed[n..].iter().for_each(|chunk| self.present[*chunk].store(1, Ordering::Release));
                return if n > 0 { Ok(n as u64) } else { Err(e) };
            }
            budget.give_back(self.index.len_of(*chunk));
        }
        Ok(removed.len() as u64)
    }

    /// A lock that lasts as long as its file and is had only if nobody uses the image.
    fn lock_alone(&self) -> io::Result<Option<File>> {
        let file = File::open(self.folder.join(DISK))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(file)),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Removes a chunk that nobody can read: first from the file, then from the map. With the changes locked.
    fn remove_chunk(&self, chunk: usize) -> io::Result<()> {
        self.punch(chunk as u64 * self.index.chunk_bytes, self.index.len_of(chunk))?;
        self.map.write_all_at(&[0], chunk as u64)?;
        self.present[chunk].store(0, Ordering::Release);
        Ok(())
    }

    /// Removes what the map does not name.
    fn punch_absent(&self) -> io::Result<()> {
        let chunks: Vec<_> = (0..self.present.len()).collect();
        for run in chunks.chunk_by(|a, b| self.is_present(*a) == self.is_present(*b)) {
            let at = run[0] as u64 * self.index.chunk_bytes;
            let end = (at + run.len() as u64 * self.index.chunk_bytes).min(self.index.size_bytes);
            if !self.is_present(run[0]) {
                self.punch(at, end - at)?;
            }
        }
        Ok(())
    }

    fn punch(&self, at: u64, len: u64) -> io::Result<()> {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.disk, mode, at, len)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_image::Residency;
    use spillway_image::digests::CHUNK_BYTES;
    use std::os::unix::fs::MetadataExt;

    const SIZE: u64 = 4 * CHUNK_BYTES + 512;

    fn chunk(n: usize) -> Vec<u8> {
        let len = if n == 4 { 512 } else { CHUNK_BYTES };
        (0..len).map(|at| (at as usize * 7 + n) as u8).collect()
    }

    fn index() -> Index {
        Index {
            size_bytes: SIZE,
            chunk_bytes: CHUNK_BYTES,
            digests: (0..5).map(|n| of_chunk(&chunk(n))).collect(),
        }
    }

    #[test]
    fn what_is_kept_is_found_again_and_compared_again() {
        let dir = tempfile::tempdir().unwrap();
        let budget = Budget::new(SIZE * 2);
        let image = CachedImage::open(dir.path(), index(), &budget).unwrap();
        assert!(!image.verify(1).unwrap());
        let (file, memory) = image.for_user().unwrap();
        for n in [1, 4] {
            assert_eq!(image.keep(n, &chunk(n), &budget).unwrap(), Kept::Yes);
        }
        let seen = Residency::open(memory.memory(), 5).unwrap();
        assert_eq!([0, 1, 2, 3, 4].map(|n| seen.has(n)), [false, true, false, false, true]);
        let mut read = vec![0; CHUNK_BYTES as usize];
        file.read_exact_at(&mut read, CHUNK_BYTES).unwrap();
        assert!(read == chunk(1));
        assert_eq!((budget.used_bytes(), image.figures().present_chunks), (CHUNK_BYTES + 4096, 2));

        // Another process: each chunk is compared anew, and what was damaged meanwhile is not taken.
        drop(image);
        let path = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        File::options()
            .write(true)
            .open(path.join(DISK))
            .unwrap()
            .write_all_at(b"x", CHUNK_BYTES + 9)
            .unwrap();
        let budget = Budget::new(SIZE * 2);
        let image = CachedImage::open(dir.path(), index(), &budget).unwrap();
        assert_eq!(budget.used_bytes(), CHUNK_BYTES + 4096);
        let (_, memory) = image.for_user().unwrap();
        assert!(!memory.has(1) && !memory.has(4));
        assert!(!image.verify(1).unwrap() && image.verify(4).unwrap());
        assert!(!memory.has(1) && memory.has(4));
        assert_eq!(image.keep(1, &chunk(1), &budget).unwrap(), Kept::Yes);
        assert!(image.verify(1).unwrap());
        assert_eq!(budget.used_bytes(), CHUNK_BYTES + 4096, "it was counted already");
    }

    #[test]
    fn only_names_of_images_are_taken_for_their_folders() {
        let root = hex(&[0xab; 32]);
        for name in
            [root.clone(), format!("{root}.0.removed"), format!("{root}.18446744073709551615.removed")]
        {
            assert!(is_named_as_an_image(&Path::new("/cache").join(&name)), "{name}");
        }
        let (upper, longer) = (root.to_uppercase(), format!("{root}0"));
        for name in [
            "",
            "lost+found",
            "backups",
            "x.0.removed",
            &root[1..],
            &upper,
            &longer,
            &format!("{root}.removed"),
            &format!("{root}.x.removed"),
            &format!("{root}.0.kept"),
            &format!("{root}.0.removed.old"),
        ] {
            assert!(!is_named_as_an_image(&Path::new("/cache").join(name)), "{name}");
        }
    }

    #[test]
    fn what_is_compared_while_it_is_removed_is_not_said_to_be_there() {
        let dir = tempfile::tempdir().unwrap();
        let budget = Budget::new(SIZE * 2);
        let image = CachedImage::open(dir.path(), index(), &budget).unwrap();
        let chunks: Vec<_> = (0..4).map(chunk).collect();
        let rounds_end = AtomicBool::new(false);
        // Also after a failed assertion.
        struct Ends<'a>(&'a AtomicBool);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        std::thread::scope(|threads| {
            let _ends = Ends(&rounds_end);
            for _ in 0..2 {
                threads.spawn(|| {
                    while !rounds_end.load(Ordering::Relaxed) {
                        (0..4).for_each(|n| _ = image.verify(n).unwrap());
                    }
                });
            }
            for _ in 0..300 {
                for (n, bytes) in chunks.iter().enumerate() {
                    assert_eq!(image.keep(n, bytes, &budget).unwrap(), Kept::Yes);
                }
                assert_eq!(image.shrink(u64::MAX, &budget).unwrap(), 4);
                // Long enough for who began to compare before to end.
                std::thread::sleep(std::time::Duration::from_millis(2));
                let said = (0..4).filter(|n| image.is_resident(*n)).count();
                assert_eq!(said, 0, "nothing is in the file");
            }
        });
        assert_eq!((budget.used_bytes(), bytes_in(image.folder())), (0, 0));
    }

    #[test]
    fn who_has_a_file_keeps_it_when_its_map_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let budget = Budget::new(SIZE);
        let image = CachedImage::open(dir.path(), index(), &budget).unwrap();
        let (file, memory) = image.for_user().unwrap();
        assert_eq!(image.keep(1, &chunk(1), &budget).unwrap(), Kept::Yes);
        fs::remove_file(image.folder.join(MAP)).unwrap();
        drop(image);
        let image = CachedImage::open(dir.path(), index(), &Budget::new(SIZE)).unwrap();
        assert_eq!(image.figures().present_chunks, 0);
        let mut read = vec![0; CHUNK_BYTES as usize];
        file.read_exact_at(&mut read, CHUNK_BYTES).unwrap();
        assert!(memory.has(1) && read == chunk(1));
    }

    #[test]
    fn nothing_is_removed_while_somebody_has_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let budget = Budget::new(2 * CHUNK_BYTES);
        let image = CachedImage::open(dir.path(), index(), &budget).unwrap();
        let (file, memory) = image.for_user().unwrap();
        assert_eq!(image.keep(0, &chunk(0), &budget).unwrap(), Kept::Yes);
        assert_eq!(image.keep(1, &chunk(1), &budget).unwrap(), Kept::Yes);
        assert_eq!(image.keep(2, &chunk(2), &budget).unwrap(), Kept::NoSpace);
        assert!(!memory.has(2));
        assert_eq!(image.shrink(u64::MAX, &budget).unwrap(), 0);
        // A process that was killed has not taken the lock with it.
        let other = file.try_clone().unwrap();
        drop((file, image));
        let budget = Budget::new(CHUNK_BYTES);
        let image = CachedImage::open(dir.path(), index(), &budget).unwrap();
        assert_eq!(image.shrink(u64::MAX, &budget).unwrap(), 0);
        assert!(memory.has(0) && memory.has(1), "who has the old memory may still read");
        drop(other);
        image.make_durable().unwrap();
        let removed = image.shrink(1, &budget).unwrap();
        assert_eq!((removed, image.figures().present_chunks), (1, 1));
        assert!(!image.figures().is_whole);
        image.pin(&Fill::Chunks(vec![0]));
        assert_eq!((image.evict_chunk(0, &budget).unwrap(), image.evict_chunk(1, &budget).unwrap()), (0, 0));
        image.pin(&Fill::Nothing);
        assert_eq!(image.evict_chunk(0, &budget).unwrap(), 1);
        assert_eq!(budget.used_bytes(), 0);
        let (file, memory) = image.for_user().unwrap();
        assert!(!memory.has(0) && file.metadata().unwrap().blocks() == 0);
        assert_eq!(image.keep(0, &chunk(0), &budget).unwrap(), Kept::Yes);
        assert!(image.set_aside().unwrap().is_none(), "it is used");
        drop(file);
        let mut read = [0; 8];
        assert_eq!(image.residency_bits(), [0b00001]);
        assert!(image.read_resident(0, 64, &mut read).unwrap() && read == chunk(0)[64..72]);
        assert!(!image.read_resident(1, 0, &mut read).unwrap());
        assert!(!image.read_resident_now(1, 0, &mut read));
        {
            let _changes = image.changes();
            assert!(!image.read_resident_now(0, 64, &mut read), "it waits for nobody");
        }
        let aside = image.set_aside().unwrap().unwrap();
        assert!(!image.folder().exists() && !image.read_resident(0, 64, &mut read).unwrap());
        assert_eq!(budget.used_bytes(), CHUNK_BYTES, "it still takes space");
        assert!(image.disk.metadata().unwrap().blocks() > 0);
        aside.remove(&budget).unwrap();
        assert_eq!(image.disk.metadata().unwrap().blocks(), 0, "although it is open here");
        assert_eq!((budget.used_bytes(), fs::read_dir(dir.path()).unwrap().count()), (0, 0));
        // Who was still bringing a chunk finds no image any more.
        assert_eq!(image.keep(0, &chunk(0), &budget).unwrap(), Kept::Gone);
    }
}
