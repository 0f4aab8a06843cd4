//! The loop: completions, requests, the core's turn, publication, sleep. Owns the disk, its connections and the
//! channel to the supervisor; touches no content.
//!
//! While requests come in it polls: rings are looked at without a system call and the driver need not kick. The
//! time for which it goes on polling after the last request adapts, from 0 to 100 us, to whether that paid, and is
//! longer while the store owes it many reads; then it asks for kicks, looks once more, and sleeps in the engine.
//! Invariant: before it sleeps, every source that could have work has been looked at after its notification was armed.

use super::attach::{Attached, attach, spec_of};
use super::block_status::{Question, Questions};
use super::clients::NbdClient;
use super::engine::{Done, Engine, Tag};
use super::error::{Error, ErrorKind};
use super::events::Telling;
use super::io::{DiskIo, DiskResources};
use super::memory::Shared;
use super::models::Models;
use super::rate::{Throttle, from};
use super::spin::Idle;
use super::supervision::channel_nonblocking;
use super::tap::Tap;
use super::watches::{POLLIN, Target, Watches};
use super::{Fds, cannot_duplicate, now_ns};
use crate::channel::Start;
use spillway_core::{BLOCK_BYTES, Disk, Mode, Request};
use spillway_export::vhost_user_blk::Change;
use spillway_export::{Figures, nbd};
use spillway_image::{BaseImage, RawImage, StreamedImage};
use spillway_layout::BaseCache;
use spillway_layout::persistent_file;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Requests taken from a queue before others get their turn; a batch shares its clock readings and its
/// publication.
const BATCH: usize = 32;
/// How long NBD clients' spare buffers are kept after the last work.
const SPARE_NS: u64 = 1_000_000_000;

/// Where the worker is in its life.
#[derive(Default)]
pub(super) struct Stage {
    /// Clients are let go; then the disk forgets.
    pub resetting: bool,
    pub stopping: bool,
    /// Set when the worker stops for an upgrade: another one has the same files.
    pub disk_goes_on: bool,
    /// The supervisor has gone: serve on until the last client leaves.
    pub orphaned: bool,
    /// While the disk stops or is reset, and chunks of its image are missing: when to look again at who waits for them.
    pub abandon_at_ns: Option<u64>,
}

impl Stage {
    /// No request is taken any more.
    pub fn takes_none(&self) -> bool {
        self.resetting || self.stopping
    }
}

pub struct Reactor {
    pub(super) io: DiskIo,
    pub(super) disk: Disk,
    /// Keeps the memory that `disk` points into; dropped after it.
    _meta: Shared,
    _live: Option<Shared>,
    pub(super) channel: OwnedFd,
    pub(super) start: Start,
    pub(super) watches: Watches,
    pub(super) next_session: u8,
    done: Vec<Done>,
    batch: Vec<Request>,
    pub(super) changes: Vec<Change>,
    pub(super) stage: Stage,
    idle: Idle,
    /// What all NBD clients together hold.
    pub(super) nbd_budget: nbd::Budget,
    pub(super) telling: Telling,
    pub(super) disk_full: bool,
    /// The guest's choice of write-back or write-through outlives its VMM's connection.
    pub(super) writeback: bool,
    pub(super) throttle: Throttle,
    pub(super) tap: Tap,
    /// What NBD clients want to know of the base image, and wait for.
    pub(super) questions: Questions,
}

/// The base image, as the supervisor has opened it.
fn open_base(
    start: &Start,
    file: OwnedFd,
    digests: Option<OwnedFd>,
    residency: Option<OwnedFd>,
) -> Result<BaseImage, Error> {
    let cannot = || Error::new(ErrorKind::Image, "the disk cannot be served");
    let direct = start.settings.base_cache() == BaseCache::None;
    if let (Some(memory), Some(chunk_bytes)) = (residency, start.chunk_bytes) {
        let file = RawImage::new(file, start.base_bytes, direct);
        let image = StreamedImage::new(file, memory.as_fd(), chunk_bytes);
        return image.map(BaseImage::Streamed).map_err(|e| cannot().because(e));
    }
    BaseImage::open(file, start.format, start.base_bytes, direct, digests, start.nbd)
        .map_err(|e| cannot().because(e))
}

impl Reactor {
    pub(super) fn new(channel: OwnedFd, start: &Start, fds: Fds, engine: Engine) -> Result<Reactor, Error> {
        let spec = spec_of(start)?;
        let meta_file = fds.meta.try_clone().map_err(cannot_duplicate)?;
        // Whoever returns early drops them in the reverse order: the disk first.
        let Attached { slots, live, meta, disk } =
            attach(fds.meta, fds.data, fds.file.as_ref(), spec, start)?;
        let base = open_base(start, fds.base, fds.digests, fds.residency)?;
        let (found, most) = (u64::from(base.file().dio_align()), BLOCK_BYTES as u64);
        if found > most {
            let reason = "its store wants O_DIRECT reads aligned to more bytes than a block has";
            return Err(Error::new(ErrorKind::Image, reason)
                .of("the base image")
                .figures(Figures::Above { found, most })
                .advice("use --base-cache host"));
        }
        let data_at = if spec.mode == Mode::Persistent { persistent_file::DATA_AT } else { 0 };
        let held = DiskResources {
            slots,
            meta: meta_file,
            file: fds.file,
            file_bytes: data_at + spec.file_bytes(),
            data_at,
            predecessors: fds.predecessors,
            models: Models::open(fds.base_model, fds.overflow_model, start.disk_id)?,
        };
        let io = DiskIo::new(engine, held, base)?;
        channel_nonblocking(&channel)?;
        let tap = Tap::new(start.size_bytes, disk.fill(), now_ns());
        let mut reactor = Reactor {
            io,
            disk,
            _meta: meta,
            _live: live,
            channel,
            start: start.clone(),
            watches: Watches::new(),
            next_session: 0,
            done: Vec::with_capacity(1024),
            batch: Vec::with_capacity(BATCH),
            changes: Vec::new(),
            stage: Stage::default(),
            idle: Idle::new(),
            nbd_budget: nbd::Budget::new(),
            telling: Telling::new(),
            disk_full: false,
            writeback: start.writeback,
            throttle: Throttle::new(start.settings.rate()),
            tap,
            questions: Questions::default(),
        };
        reactor.watch(reactor.channel.as_raw_fd(), POLLIN, true, Target::Channel);
        for fd in reactor.io.barrier.predecessors() {
            reactor.watch(fd, POLLIN, false, Target::Predecessor(fd));
        }
        if let Some(reader) = reactor.io.base.thread() {
            let fd = reader.wake_fd().as_raw_fd();
            reactor.watch(fd, POLLIN, true, Target::BaseReader);
        }
        Ok(reactor)
    }

    /// Serves until told to stop. Unless the disk goes on, no file of it is in use any more when this process has ended.
    pub fn run(&mut self) -> Result<(), Error> {
        self.serve()?;
        if !self.stage.disk_goes_on {
            self.io.transfers.engine.release_files();
        }
        Ok(())
    }

    fn serve(&mut self) -> Result<(), Error> {
        self.take_messages()?;
        loop {
            let begin = now_ns();
            self.io.transfers.now_ns = begin;
            self.disk.begin_turn(begin);
            let mut worked = self.take_completions()?;
            worked |= self.answer_block_status();
            worked |= self.take_requests();
            self.abandon_base_reads();
            let end = if worked { now_ns() } else { begin };
            // What is done is told, and what is asked of the disk begins, before eviction takes its step.
            worked |= self.publish();
            self.io.transfers.engine.submit()?;
            let more = self.disk.end_turn(&mut self.io, end);
            worked |= self.publish();
            self.release_ended_clients();
            self.keep_chunks();
            self.tell_events(end);
            if self.is_over()? {
                return Ok(());
            }
            if self.advance_reset() {
                continue;
            }
            self.keep_watches();
            self.io.publish_figures(&self.disk);
            self.io.transfers.engine.submit()?;
            if worked {
                self.idle.worked(end);
            }
            if worked || more {
                continue;
            }
            if self.io.transfers.wake_ns().is_some_and(|ns| ns <= end) {
                std::hint::spin_loop();
                continue;
            }
            if self.throttle.wait_ns(end) > 0 {
                // Whatever else is asked waits too, and needs not be told of.
                self.sleep(end)?;
                continue;
            }
            if self.may_spin() && self.idle.polls_on(end, self.io.transfers.reads_under_way()) {
                std::hint::spin_loop();
                continue;
            }
            if self.arm_notifications() {
                continue;
            }
            self.sleep(end)?;
        }
    }

    /// Polling pays only for guests: NBD clients are behind a system call anyway.
    fn may_spin(&self) -> bool {
        self.io.clients.vmms.iter().any(|v| v.ended.is_none())
    }

    fn sleep(&mut self, now: u64) -> Result<(), Error> {
        let spare = (self.nbd_budget.kept_bytes() > 0).then_some(self.idle.quiet_since_ns() + SPARE_NS);
        if spare.is_some_and(|ns| ns <= now) {
            self.io.clients.nbd.iter_mut().flatten().for_each(|c| c.connection.release_idle_memory());
            return Ok(());
        }
        let clients = &self.io.clients;
        let silent = clients.vmms.iter().filter(|v| v.ended.is_none() && !v.frontend.has_received());
        let shaking = clients.nbd.iter().flatten().filter(|c| c.connection.handshake_deadline().is_some());
        let handshakes = silent.map(|v| v.deadline_ns).chain(shaking.map(|c| c.deadline_ns));
        let others =
            self.disk.deadline_ns().into_iter().chain(spare).chain(self.telling.states.deadline_ns());
        let others = others.chain(self.io.transfers.wake_ns()).chain(self.io.base.stall_due_ns());
        let others = others.chain(self.stage.abandon_at_ns);
        let others = others.chain(clients.vmms.iter().filter_map(|v| v.abandon_at_ns));
        let deadline = handshakes.chain(others).min();
        let limit = Some(self.throttle.wait_ns(now)).filter(|wait| *wait > 0).map(|wait| now + wait);
        let deadline = deadline.into_iter().chain(limit).min();
        self.idle.sleeps(self.io.transfers.reads_under_way());
        if let Some(ns) = deadline
            && ns <= now
        {
            return Ok(());
        }
        let busy = self.io.is_busy();
        self.io.transfers.engine.wait(deadline.map(|ns| ns - now))?;
        let woken = now_ns();
        match deadline {
            Some(ns) if ns <= woken => self.idle.has_slept(woken),
            _ => self.idle.was_woken(woken, woken - now, busy),
        }
        Ok(())
    }

    fn take_completions(&mut self) -> Result<bool, Error> {
        let mut done = std::mem::take(&mut self.done);
        self.io.transfers.engine.reap(&mut done)?;
        self.io.transfers.take_due(&mut done);
        let mut worked = !done.is_empty();
        for d in done.drain(..) {
            if let Tag::Watch(serial) = d.tag {
                self.watch_fired(serial, d)?;
                continue;
            }
            let answer = self.io.completed(d);
            if let Some(answer) = answer {
                self.io.deliver(&mut self.disk, answer);
            }
        }
        self.done = done;
        while let Some(answer) = self.io.base_finished() {
            worked = true;
            self.io.deliver(&mut self.disk, answer);
        }
        Ok(worked)
    }

    /// Takes requests from everyone who has some. Returns whether there were any.
    fn take_requests(&mut self) -> bool {
        if self.stage.takes_none() {
            return false;
        }
        if !self.may_begin() {
            return self.shake_hands();
        }
        self.throttle.begin_turn();
        let nbd_first = self.throttle.is_nbd_first();
        let mut worked = nbd_first && self.take_from_nbd();
        for i in 0..self.io.clients.vmms.len() {
            if self.io.clients.vmms[i].ended.is_none() {
                worked |= self.take_from_vmm(i);
            }
        }
        worked |= !nbd_first && self.take_from_nbd();
        self.tap.publish();
        worked
    }

    fn submit(&mut self, request: Request) {
        self.io.takes(request.token);
        self.disk.submit(&mut self.io, request);
        let now_ns = self.io.now_ns();
        self.tap.request(&request, self.io.taken(), now_ns);
    }

    fn take_from_vmm(&mut self, i: usize) -> bool {
        let now = self.io.now_ns();
        let mut worked = false;
        for queue in from(self.throttle.first().0, self.io.clients.vmms[i].frontend.queue_count()) {
            let frontend = &mut self.io.clients.vmms[i].frontend;
            if !frontend.is_live(queue) || !frontend.has_work(queue) {
                continue;
            }
            worked = true;
            frontend.disable_notifications(queue);
            while self.batch.len() < BATCH
                && self.throttle.lets_begin(now)
                && let Some(request) = frontend.next(queue)
            {
                self.throttle.begins_of_queue(&request, queue);
                self.disk.prefetch(&request);
                self.batch.push(request);
            }
            self.io.clients.vmms[i].dirty |= 1 << queue;
            let mut batch = std::mem::take(&mut self.batch);
            for request in &batch {
                self.disk.prefetch_slot(&self.io, request);
            }
            for request in batch.drain(..) {
                self.submit(request);
            }
            self.batch = batch;
        }
        worked
    }

    fn take_from_nbd(&mut self) -> bool {
        let mut extents_left = nbd::MAX_EXTENTS;
        let clients = self.io.clients.nbd.len();
        from(self.throttle.first().1, clients as u16)
            .fold(false, |worked, n| self.take_nbd(usize::from(n), &mut extents_left) | worked)
    }

    /// Handshakes go on while no request may begin.
    fn shake_hands(&mut self) -> bool {
        let mut extents_left = 0;
        (0..self.io.clients.nbd.len()).fold(false, |worked, n| {
            (shakes(&self.io.clients.nbd[n]) && self.take_nbd(n, &mut extents_left)) | worked
        })
    }

    /// `extents_left` is what the turn may still look up of extents, beside the first of each client: each may
    /// take a look at 512 entries of the map.
    fn take_nbd(&mut self, n: usize, extents_left: &mut usize) -> bool {
        let Some(client) = self.io.clients.nbd[n].as_mut() else { return false };
        if !client.active || client.ended.is_some() {
            return false;
        }
        client.touched = true;
        let mut worked = false;
        // Bounded, so that one client does not keep others waiting; what is left comes in the next turn.
        for _ in 0..BATCH {
            // A handshake asks nothing of the disk.
            if !shakes(&self.io.clients.nbd[n]) && !self.throttle.lets_begin(self.io.now_ns()) {
                break;
            }
            let client = self.io.clients.nbd[n].as_mut().expect("looked at above");
            match client.connection.next() {
                Some(nbd::Work::Request(request)) => {
                    self.throttle.begins_of_nbd(&request, n as u16);
                    self.submit(request);
                }
                Some(nbd::Work::BlockStatus { id, offset, len, one }) => {
                    self.take_block_status(Question::new(n, id, offset, len, one), extents_left);
                    // The client stays active; its next request has the next turn.
                    return true;
                }
                None => {
                    client.active = false;
                    break;
                }
            }
            worked = true;
        }
        worked
    }

    /// Publishes completions: used rings, and replies to NBD clients; before them the figures, so that whoever has an answer
    /// finds it there. Returns whether there were any.
    pub(super) fn publish(&mut self) -> bool {
        if self.io.clients.have_answers() {
            self.io.publish_figures(&self.disk);
        }
        let mut worked = false;
        for i in 0..self.io.clients.vmms.len() {
            let vmm = &mut self.io.clients.vmms[i];
            let mut dirty = std::mem::take(&mut vmm.dirty);
            let served = dirty != 0;
            let mut stopped = false;
            while dirty != 0 {
                let queue = dirty.trailing_zeros() as u16;
                vmm.frontend.publish(queue);
                stopped |= !vmm.frontend.is_live(queue);
                dirty &= dirty - 1;
            }
            worked |= served;
            if vmm.ended.is_some() {
                continue;
            }
            if vmm.frontend.poisoned() {
                self.end_vmm(i, Error::new(ErrorKind::Client, "its guest memory has shrunk").into());
            } else if stopped {
                // Broken, and it says why; or being stopped.
                self.finish_stops(i);
            }
        }
        for client in self.io.clients.nbd.iter_mut().flatten().filter(|c| c.ended.is_none()) {
            if !std::mem::take(&mut client.touched) {
                continue;
            }
            let had_output = client.connection.wants_write();
            worked |= had_output;
            if let Err(e) = client.connection.flush_output() {
                client.end(e.into());
            } else if had_output {
                // Room may have come free: buffered input may hold more.
                client.active = true;
            }
        }
        worked
    }
}

fn shakes(client: &Option<NbdClient>) -> bool {
    client.as_ref().is_some_and(|client| client.connection.handshake_deadline().is_some())
}
