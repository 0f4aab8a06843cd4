//! The thread that reads an image of which not every byte lies plain in its file, or has not been checked yet. Owns the
//! image and the two queues; never opens a file, never writes, and never makes the reactor wait: jobs go in and come back,
//! an eventfd says when.
//!
//! Invariant: each submitted job comes back exactly once with its buffer, unless the reader is dropped first.
//!
//! The thread reads one job at a time. That is enough for what only it can do, compressed clusters, the first touch of a
//! page of tables or of a chunk that has a digest; for the rest each finished job says where the image lies around it
//! ([`Finished::extents`]), and the reactor reads those stretches by itself, many at a time.

use super::checked::Checked;
use super::error::{ImageError, ImageErrorKind};
use super::extents::Extent;
use super::holes::Holes;
use super::qcow2::Image;
use super::raw::RawImage;
use super::source::StoreRead;
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// Most bytes of one job.
pub const MAX_JOB_BYTES: u32 = 256 * 1024;

/// An image as the thread reads it.
pub(super) trait Contents: Send {
    /// Fills `out` with the image's content from `offset` on. The range lies inside the image, else EINVAL.
    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()>;
    /// Where the image lies from there on, as far as that is known: at most 64.
    fn extents(&mut self, offset: u64) -> Vec<Extent>;
    /// The same, as far as it can be found out with little work: for who asks for `len` bytes of it, not for one cluster.
    /// What lies between two of them, or before the first, is not known to be zero.
    fn map(&mut self, offset: u64, _len: u64) -> Vec<Extent> {
        self.extents(offset)
    }
    /// Reads of the store since the last call.
    fn take_traffic(&mut self) -> Vec<StoreRead>;
    /// What the last read has found out to be not what it should be, if that is new: the first byte.
    fn take_damage(&mut self) -> Option<u64> {
        None
    }
}

/// What came of a job.
pub struct Finished {
    /// The caller's number of it.
    pub job: u64,
    /// The buffer, as long as the job asked, empty if it asked for extents; its content means something only with `Ok`.
    pub buffer: Vec<u8>,
    /// An errno if it failed: EIO for a damaged image, EINVAL for a range outside it.
    pub result: Result<(), i32>,
    /// What had to come from the store.
    pub store_reads: Vec<StoreRead>,
    /// Where the image lies from the job's first byte on, for an [`crate::ExtentCache`]; at most 64.
    pub extents: Vec<Extent>,
    /// The image is not what its digests say from this byte on, which is told once.
    pub damaged_at: Option<u64>,
}

struct Job {
    job: u64,
    offset: u64,
    asks: Asks,
}

enum Asks {
    /// For the content, into a buffer that is brought to so many bytes.
    Content(u32, Vec<u8>),
    /// For the extents of so many bytes.
    Map(u64),
}

/// What both sides see.
struct Shared {
    /// Readable when something is finished.
    wake: OwnedFd,
    /// How often the thread has written it.
    wakes: AtomicU64,
    /// The reader is gone: stop after the job at hand.
    stop: AtomicBool,
}

/// An image with its thread.
pub struct BaseReader {
    virtual_size: u64,
    file: RawImage,
    jobs: Sender<Job>,
    done: Receiver<Finished>,
    shared: Arc<Shared>,
    wakes_seen: u64,
    unfinished: usize,
}

impl BaseReader {
    /// A qcow2 image. Checks its header again, against the size that the supervisor found, and starts the thread.
    /// `direct` says that the file is open O_DIRECT. Reads the header here and now: call it before serving.
    pub fn qcow2(file: OwnedFd, virtual_size: u64, direct: bool) -> Result<BaseReader, ImageError> {
        let file = File::from(file);
        let image = Image::open(share(&file)?, direct)?;
        if image.virtual_size() != virtual_size {
            return Err(ImageError::new(
                ImageErrorKind::Changed,
                format!(
                    "has changed since its disk was started: it has {} bytes now, it had {virtual_size}",
                    image.virtual_size()
                ),
                "bring the image back as it was, and keep programs from writing to an image in use",
            ));
        }
        BaseReader::start(file, virtual_size, direct, Box::new(image))
    }

    /// A raw image of which each chunk is compared with its digest before anything of it is handed out for the first
    /// time. `digests` is the list that the supervisor has checked.
    pub fn checked(
        file: OwnedFd,
        size_bytes: u64,
        direct: bool,
        digests: OwnedFd,
    ) -> Result<BaseReader, ImageError> {
        let file = File::from(file);
        let image = Checked::new(share(&file)?, size_bytes, direct, File::from(digests))?;
        BaseReader::start(file, size_bytes, direct, Box::new(image))
    }

    /// The thread of a raw image that is read without it: it says where the file has holes.
    pub fn holes(file: OwnedFd, size_bytes: u64, direct: bool) -> Result<BaseReader, ImageError> {
        let file = File::from(file);
        let image = Holes::new(share(&file)?, size_bytes, direct)?;
        BaseReader::start(file, size_bytes, direct, Box::new(image))
    }

    fn start(
        mut file: File,
        virtual_size: u64,
        direct: bool,
        image: Box<dyn Contents>,
    ) -> Result<BaseReader, ImageError> {
        let file_bytes = file.seek(SeekFrom::End(0)).map_err(|e| ImageError::io("cannot be measured", &e))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| ImageError::resources("cannot be read: its reader got no eventfd", &e.into()))?;
        let shared = Arc::new(Shared { wake, wakes: AtomicU64::new(0), stop: AtomicBool::new(false) });
        let (jobs, jobs_in) = channel();
        let (done_out, done) = channel();
        let shared_out = Arc::clone(&shared);
        thread::Builder::new()
            .name("base-reader".into())
            .spawn(move || serve(image, &jobs_in, &done_out, &shared_out))
            .map_err(|e| ImageError::resources("cannot be read: its reader got no thread", &e))?;
        let file = RawImage::new(file.into(), file_bytes, direct);
        Ok(BaseReader { virtual_size, file, jobs, done, shared, wakes_seen: 0, unfinished: 0 })
    }

    /// Size that a disk sees of the image.
    pub fn size_bytes(&self) -> u64 {
        self.virtual_size
    }

    /// The image file itself, in which the extents of kind [`crate::ExtentKind::Raw`] lie: for the reactor's
    /// own reads, at once or asynchronously, at the extents' file offsets.
    pub fn file(&self) -> &RawImage {
        &self.file
    }

    /// Jobs submitted and not yet taken from [`Self::finished`].
    pub fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// Asks for `len` bytes, at most [`MAX_JOB_BYTES`], from `offset` on. Never blocks. The caller bounds the
    /// number of unfinished jobs. `buffer` is brought to `len` bytes.
    pub fn submit(&mut self, job: u64, offset: u64, len: u32, buffer: Vec<u8>) {
        self.ask(Job { job, offset, asks: Asks::Content(len, buffer) });
    }

    /// Asks for the extents of `len` bytes from `offset` on, or of the first of them. Never blocks.
    pub fn submit_map(&mut self, job: u64, offset: u64, len: u64) {
        self.ask(Job { job, offset, asks: Asks::Map(len) });
    }

    fn ask(&mut self, job: Job) {
        self.unfinished += 1;
        // The thread ends only after `stop`, which is set by dropping this side.
        self.jobs.send(job).expect("the thread lives as long as its reader");
    }

    /// An eventfd that is readable when something is finished. Only [`Self::finished`] reads it.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    /// Takes a finished job. Call it until it says `None` whenever [`Self::wake_fd`] is readable; when polling,
    /// at any time: with nothing new it costs no system call.
    pub fn finished(&mut self) -> Option<Finished> {
        let mut taken = self.done.try_recv().ok();
        if taken.is_none() {
            let wakes = self.shared.wakes.load(Ordering::Acquire);
            if wakes != self.wakes_seen {
                self.wakes_seen = wakes;
                // What is finished before this is in the queue, what is finished after it wakes anew.
                let mut count = [0; 8];
                let _empty_already = rustix::io::read(&self.shared.wake, &mut count);
                taken = self.done.try_recv().ok();
            }
        }
        self.unfinished -= usize::from(taken.is_some());
        taken
    }
}

impl Drop for BaseReader {
    fn drop(&mut self) {
        // Dropping `jobs` then wakes the thread. It is not joined: it may sit in a read of a slow store.
        self.shared.stop.store(true, Ordering::Release);
    }
}

fn share(file: &File) -> Result<File, ImageError> {
    file.try_clone().map_err(|e| ImageError::resources("cannot be opened a second time", &e))
}

fn serve(mut image: Box<dyn Contents>, jobs: &Receiver<Job>, done: &Sender<Finished>, shared: &Shared) {
    for job in jobs {
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        if done.send(read(&mut *image, job)).is_err() {
            return;
        }
        // It fails only with the counter full, and then it is readable anyway.
        let _full = rustix::io::write(&shared.wake, &1u64.to_ne_bytes());
        shared.wakes.fetch_add(1, Ordering::Release);
    }
}

fn read(image: &mut dyn Contents, job: Job) -> Finished {
    let Job { job, offset, asks } = job;
    let (buffer, result, extents) = match asks {
        Asks::Map(len) => (Vec::new(), Ok(()), image.map(offset, len)),
        Asks::Content(len, buffer) if len > MAX_JOB_BYTES => (buffer, Err(libc::EINVAL), Vec::new()),
        Asks::Content(len, mut buffer) => {
            buffer.resize(len as usize, 0);
            let read = image.read(offset, &mut buffer);
            let extents = if read.is_ok() { image.extents(offset) } else { Vec::new() };
            (buffer, read.map_err(|e| e.raw_os_error().unwrap_or(libc::EIO)), extents)
        }
    };
    let store_reads = image.take_traffic();
    let damaged_at = image.take_damage();
    Finished { job, buffer, result, store_reads, extents, damaged_at }
}
