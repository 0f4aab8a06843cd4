//! A guest's side of a disk without a guest: vhost-user-blk queues, driven by the crate `virtio-driver`.
//!
//! Owns the connection, the queues and the memory that requests point into; knows nothing of what it measures
//! (`load`) or of what a disk should hold (`oracle`). Invariant: a buffer belongs to one request from its
//! submission to its completion, and is touched by nobody else between.

use crate::oracle::Oracle;
use crate::shared::SharedMemory;
use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport,
    VirtioFeatureFlags,
};

/// Settings of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Request queues. A buffer's requests always take the same one.
    pub queues: usize,
    /// Most requests in flight, over all queues.
    pub depth: usize,
    /// Bytes in the largest request.
    pub request_bytes: usize,
    /// How long a request may take before the disk counts as hung.
    pub deadline: Duration,
}

impl Default for Shape {
    fn default() -> Self {
        Shape { queues: 1, depth: 64, request_bytes: 1 << 20, deadline: Duration::from_secs(30) }
    }
}

/// One request, as a load asks for it. Offsets and lengths are bytes, multiples of 512.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Read from the disk into the buffer.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: usize,
    },
    /// Write the buffer to the disk.
    Write {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: usize,
    },
    /// Discard a range: its content is not needed any more.
    Discard {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Whether its space may be released.
        unmap: bool,
    },
    /// Everything completed before is stable.
    Flush,
}

/// Buffer of a request that is in flight: one of `Shape::depth`.
pub type Buffer = usize;

struct Queue {
    ring: VirtioBlkQueue<'static, Buffer>,
    notifier: Box<dyn QueueNotifier>,
    completion: Arc<EventFd>,
    /// Something was put in since the last kick.
    new: bool,
}

/// A connection to a vhost-user-blk disk.
pub struct Driver {
    // Fields drop in this order: the queues point into memory that the transport holds.
    queues: Vec<Queue>,
    /// The queue that is looked at first for a completion.
    next: usize,
    _transport: Box<VirtioBlkTransport>,
    memory: SharedMemory,
    free: Vec<Buffer>,
    /// Seen completed while another request was waited for.
    early: Vec<(Buffer, i32)>,
    shape: Shape,
    socket: PathBuf,
    capacity_bytes: u64,
}

impl Driver {
    /// Connects with the default [`Shape`].
    pub fn connect(socket: &Path) -> Result<Driver> {
        Driver::connect_with(socket, Shape::default())
    }

    /// Connects, negotiates, and sets up the queues.
    pub fn connect_with(socket: &Path, shape: Shape) -> Result<Driver> {
        ensure!(shape.depth > 0 && shape.depth <= 256, "a queue depth is 1 to 256, not {}", shape.depth);
        ensure!(shape.queues > 0 && shape.queues <= shape.depth, "{} queues are too many", shape.queues);
        let features = VirtioFeatureFlags::VERSION_1.bits()
            | VirtioFeatureFlags::RING_EVENT_IDX.bits()
            | (VirtioBlkFeatureFlags::SIZE_MAX
                | VirtioBlkFeatureFlags::SEG_MAX
                | VirtioBlkFeatureFlags::BLK_SIZE
                | VirtioBlkFeatureFlags::FLUSH
                | VirtioBlkFeatureFlags::TOPOLOGY
                | VirtioBlkFeatureFlags::MQ
                | VirtioBlkFeatureFlags::DISCARD
                | VirtioBlkFeatureFlags::WRITE_ZEROES
                | VirtioBlkFeatureFlags::RO)
                .bits();
        let path = socket.to_str().with_context(|| format!("{}: not UTF-8", socket.display()))?;
        let vhost = VhostUser::new(path, features)
            .with_context(|| format!("{}: cannot connect as a vhost-user front end", socket.display()))?;
        let mut transport: Box<VirtioBlkTransport> = Box::new(vhost);
        let config = transport
            .get_config()
            .with_context(|| format!("{}: no device configuration", socket.display()))?;
        // A request is a header, its data and a status byte: three descriptors, since none are indirect.
        let queue_size = (shape.depth * 3).next_power_of_two().max(128) as u16;
        let rings = VirtioBlkQueue::setup_queues(&mut *transport, shape.queues, queue_size)
            .with_context(|| format!("{}: cannot set up {} queues", socket.display(), shape.queues))?;
        let memory = SharedMemory::new(shape.depth * shape.request_bytes)?;
        transport
            .map_mem_region(memory.as_ptr() as usize, memory.len(), memory.raw_fd(), 0)
            .with_context(|| format!("{}: the disk refused the data memory", socket.display()))?;
        let queue = |(i, ring)| Queue {
            ring,
            notifier: transport.get_submission_notifier(i),
            completion: transport.get_completion_fd(i),
            new: false,
        };
        Ok(Driver {
            queues: rings.into_iter().enumerate().map(queue).collect(),
            next: 0,
            capacity_bytes: config.capacity.to_native().saturating_mul(512),
            _transport: transport,
            memory,
            free: (0..shape.depth).rev().collect(),
            early: Vec::new(),
            shape,
            socket: socket.to_path_buf(),
        })
    }

    /// Size of the disk.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Most requests in flight.
    pub fn depth(&self) -> usize {
        self.shape.depth
    }

    /// Bytes in the largest request.
    pub fn request_bytes(&self) -> usize {
        self.shape.request_bytes
    }

    /// How long a request may take before the disk counts as hung.
    pub(crate) fn deadline(&self) -> Duration {
        self.shape.deadline
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.shape.depth - self.free.len()
    }

    /// Takes a free buffer, if one is left.
    pub fn take(&mut self) -> Option<Buffer> {
        self.free.pop()
    }

    /// Gives a taken buffer back.
    pub fn give(&mut self, buffer: Buffer) {
        debug_assert!(!self.free.contains(&buffer));
        self.free.push(buffer);
    }

    /// The content of a taken buffer that no request is using.
    pub fn content(&mut self, buffer: Buffer) -> &mut [u8] {
        let bytes = self.shape.request_bytes;
        self.memory.slice(buffer * bytes, bytes)
    }

    /// Puts a request in its ring, with a taken buffer. The disk need not look before [`Driver::kick`].
    pub fn submit(&mut self, ask: Ask, buffer: Buffer) -> Result<()> {
        let at = self.memory.as_ptr().wrapping_add(buffer * self.shape.request_bytes);
        let fits = |len: usize| {
            ensure!(len > 0 && len <= self.shape.request_bytes, "a request of {len} bytes does not fit");
            Ok(())
        };
        let i = buffer % self.queues.len();
        let queue = &mut self.queues[i];
        queue.new = true;
        match ask {
            Ask::Read { offset, len } => {
                fits(len)?;
                // SAFETY: `at..at + len` lies in `memory`, which lives as long as the queue, in a buffer that
                // this request owns until its completion.
                unsafe { queue.ring.read_raw(offset, at, len, buffer) }
            }
            Ask::Write { offset, len } => {
                fits(len)?;
                // SAFETY: as above.
                unsafe { queue.ring.write_raw(offset, at, len, buffer) }
            }
            Ask::Discard { offset, len } => queue.ring.discard(offset, len, buffer),
            Ask::WriteZeroes { offset, len, unmap } => queue.ring.write_zeroes(offset, len, unmap, buffer),
            Ask::Flush => queue.ring.flush(buffer),
        }
        .with_context(|| format!("{}: cannot submit {ask:?}", self.socket.display()))
    }

    /// Tells the disk of submitted requests, if it asks to be told. Call once after each batch.
    #[inline]
    pub fn kick(&mut self) -> Result<()> {
        for queue in self.queues.iter_mut().filter(|q| q.new) {
            queue.new = false;
            if queue.ring.avail_notif_needed() {
                queue.notifier.notify().with_context(|| format!("{}: cannot kick", self.socket.display()))?;
            }
        }
        Ok(())
    }

    /// Whether a completion waits.
    #[inline]
    pub(crate) fn ready(&mut self) -> bool {
        self.queues.iter_mut().any(|q| q.ring.completions().has_next())
    }

    /// Hands out one completion: its buffer, still taken, and 0 or a negative errno.
    #[inline]
    pub fn completed(&mut self) -> Option<(Buffer, i32)> {
        for _ in 0..self.queues.len() {
            if let Some(c) = self.queues[self.next].ring.completions().next() {
                return Some((c.context, c.ret));
            }
            self.next = (self.next + 1) % self.queues.len();
        }
        None
    }

    /// Polls (the disk need not signal completions) or sleeps.
    pub fn polling(&mut self, polling: bool) {
        self.queues.iter_mut().for_each(|q| q.ring.set_used_notif_enabled(!polling));
    }

    /// Sleeps until a completion waits; an error when none came within the deadline.
    pub fn sleep(&mut self) -> Result<()> {
        let until = Instant::now() + self.shape.deadline;
        while !self.ready() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return self.hung();
            }
            self.doze(left)?;
        }
        Ok(())
    }

    /// Sleeps until a completion waits, or until then. The disk signals completions: no polling.
    pub fn sleep_until(&mut self, until: Instant) -> Result<()> {
        while !self.ready() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.doze(left)?;
        }
        Ok(())
    }

    /// Sleeps until a completion is signalled, so long at most.
    fn doze(&mut self, most: Duration) -> Result<()> {
        let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
        let mut fds: Vec<_> =
            self.queues.iter().map(|q| PollFd::new(&*q.completion, PollFlags::IN)).collect();
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => {
                for (fd, queue) in fds.iter().zip(&self.queues) {
                    if fd.revents().contains(PollFlags::IN) {
                        queue.completion.read().context("cannot read a completion eventfd")?;
                    }
                }
            }
            Err(e) => return Err(e).context("cannot wait for a completion"),
        }
        Ok(())
    }

    /// The error for a disk that does not answer.
    pub(crate) fn hung(&self) -> Result<()> {
        bail!(
            "{}: no answer within {:?} to {} requests in flight",
            self.socket.display(),
            self.shape.deadline,
            self.in_flight()
        )
    }

    /// Starts one request and leaves it in flight; `fill` makes the content of a write. [`Driver::finish`] ends
    /// it. Not while a load runs.
    pub fn start(&mut self, ask: Ask, fill: impl FnOnce(&mut [u8])) -> Result<Buffer> {
        let buffer = self.take().context("as many requests are in flight as there can be")?;
        fill(self.content(buffer));
        self.polling(false);
        if let Err(e) = self.submit(ask, buffer) {
            self.give(buffer);
            return Err(e);
        }
        self.kick()?;
        Ok(buffer)
    }

    /// Whether a started request has ended.
    pub fn is_finished(&mut self, buffer: Buffer) -> bool {
        while let Some(done) = self.completed() {
            self.early.push(done);
        }
        self.early.iter().any(|(done, _)| *done == buffer)
    }

    /// Waits, asleep, for a started request, and looks at its content if it succeeded. 0 or a negative errno;
    /// after a deadline the disk may still use the buffer, which stays taken.
    pub fn finish(&mut self, buffer: Buffer, look: impl FnOnce(&[u8])) -> Result<i32> {
        while !self.is_finished(buffer) {
            self.sleep()?;
        }
        let i = self.early.iter().position(|(done, _)| *done == buffer).context("it has finished")?;
        let (_, ret) = self.early.swap_remove(i);
        if ret == 0 {
            look(self.content(buffer));
        }
        self.give(buffer);
        Ok(ret)
    }

    /// One request with a buffer of its own. A failed request's error has an `io::Error` as its source.
    fn alone(&mut self, ask: Ask, fill: impl FnOnce(&mut [u8]), look: impl FnOnce(&[u8])) -> Result<()> {
        let buffer = self.start(ask, fill)?;
        let ret = self.finish(buffer, look)?;
        self.outcome(ask, ret)
    }

    /// Truncates the memory of the requests while the disk uses it, as a VMM that does not seal its memory can. Do not
    /// access the buffers after this: only requests whose content is not read are possible.
    pub fn shrink_memory(&self) -> Result<()> {
        self.memory.truncate()
    }

    /// An error for a request that did not succeed.
    pub(crate) fn outcome(&self, ask: Ask, ret: i32) -> Result<()> {
        if ret == 0 {
            return Ok(());
        }
        Err(std::io::Error::from_raw_os_error(-ret))
            .with_context(|| format!("{}: {ask:?} failed", self.socket.display()))
    }

    /// Reads, in pieces of at most [`Driver::request_bytes`].
    pub fn read_at(&mut self, mut offset: u64, to: &mut [u8]) -> Result<()> {
        for piece in to.chunks_mut(self.shape.request_bytes) {
            let len = piece.len();
            self.alone(Ask::Read { offset, len }, |_| {}, |content| piece.copy_from_slice(&content[..len]))?;
            offset += len as u64;
        }
        Ok(())
    }

    /// Writes, in pieces of at most [`Driver::request_bytes`].
    pub fn write_at(&mut self, mut offset: u64, from: &[u8]) -> Result<()> {
        for piece in from.chunks(self.shape.request_bytes) {
            let len = piece.len();
            self.alone(Ask::Write { offset, len }, |content| content[..len].copy_from_slice(piece), |_| {})?;
            offset += len as u64;
        }
        Ok(())
    }

    /// Discards a range.
    pub fn discard(&mut self, offset: u64, len: u64) -> Result<()> {
        self.alone(Ask::Discard { offset, len }, |_| {}, |_| {})
    }

    /// Makes a range read as zeroes.
    pub fn write_zeroes(&mut self, offset: u64, len: u64, unmap: bool) -> Result<()> {
        self.alone(Ask::WriteZeroes { offset, len, unmap }, |_| {}, |_| {})
    }

    /// Everything completed before is stable.
    pub fn flush(&mut self) -> Result<()> {
        self.alone(Ask::Flush, |_| {}, |_| {})
    }

    /// Reads the whole disk and checks it.
    pub fn verify(&mut self, oracle: &Oracle) -> Result<()> {
        let mut content = vec![0; self.shape.request_bytes];
        for (offset, len) in oracle.pieces(content.len()) {
            self.read_at(offset, &mut content[..len])?;
            oracle.check(offset, &content[..len])?;
        }
        Ok(())
    }
}
