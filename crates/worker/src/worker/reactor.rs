//! The loop: completions, requests, the core's turn, publication, sleep. Owns the disk, its connections and the
//! channel to the supervisor; touches no content.
//!
//! While requests come in it polls: rings are looked at without a system call and the driver need not kick. The
//! time for which it goes on polling after the last request adapts, from 2 to 50 us, to whether that paid, and is
//! longer while the store owes it many reads; then it asks for kicks, looks once more, and sleeps in the ring.
//! Invariant: before it sleeps, every source that could have work has been looked at after its notification was armed.

use super::block_status::{Question, Questions};
use super::clients::NbdClient;
use super::engine::{Done, Engine, Tag};
use super::events::{Pace, States};
use super::io::{Answer, Doer, Held};
use super::memory::Shared;
use super::models::Models;
use super::rate::{Limiter, Turn, from};
use super::slots::Slots;
use super::spin::Spin;
use super::supervision::channel_nonblocking;
use super::tap::Tap;
use super::watches::{POLLIN, Target, nbd_ended};
use super::{Fds, now_ns};
use crate::base::BaseImage;
use crate::channel::{BaseCache, Start};
use crate::persistent_file;
use spillway_core::{
    DataMemory, Disk, DiskSpec, Errno, Layout, LogShape, Meta, Mode, Request, StateMap, Thresholds, Token,
    state_map_bytes,
};
use spillway_export::nbd;
use spillway_export::vhost_user_blk::Change;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};

/// Requests taken from a queue before others get their turn; a batch shares its clock readings and its
/// publication.
const BATCH: usize = 32;
/// How long it polls at most after the last work.
const SPIN_NS: u64 = 50_000;
/// With so many reads of the store under way the next one ends soon: it is polled for longer, if that pays.
const MANY_READS: usize = 8;
const SPIN_READS_NS: u64 = 200_000;
/// How long NBD clients' spare buffers are kept after the last work.
const SPARE_NS: u64 = 1_000_000_000;

pub struct Reactor {
    pub(super) doer: Doer,
    pub(super) disk: Disk,
    /// Keeps the memory that `disk` points into; dropped after it.
    _meta: Shared,
    _live: Option<Shared>,
    pub(super) channel: OwnedFd,
    pub(super) start: Start,
    pub(super) watches: HashMap<u32, Target>,
    pub(super) next_watch: u32,
    pub(super) next_session: u8,
    done: Vec<Done>,
    batch: Vec<Request>,
    pub(super) changes: Vec<Change>,
    /// Clients are let go; then the disk forgets.
    pub(super) resetting: bool,
    pub(super) stopping: bool,
    /// Set when the worker stops for an upgrade: another one has the same files.
    pub(super) disk_goes_on: bool,
    /// The supervisor has gone: serve on until the last client leaves.
    pub(super) orphaned: bool,
    /// By whether many reads are under way.
    spins: [Spin; 2],
    last_work_ns: u64,
    /// The last turn in which something was done.
    quiet_since_ns: u64,
    /// What all NBD clients together hold.
    pub(super) nbd_budget: nbd::Budget,
    pub(super) pace: Pace,
    pub(super) states: States,
    pub(super) disk_full: bool,
    /// The guest's choice of write-back or write-through outlives its VMM's connection.
    pub(super) writeback: bool,
    /// Of a disk that has one.
    pub(super) limiter: Option<Limiter>,
    turn: Turn,
    /// Since when the rate limit lets nothing begin.
    pub(super) throttled_since: Option<u64>,
    pub(super) tap: Tap,
    /// What NBD clients want to know of the base image, and wait for.
    pub(super) questions: Questions,
}

impl Reactor {
    pub(super) fn new(channel: OwnedFd, start: &Start, fds: Fds, engine: Engine) -> Result<Reactor, String> {
        let spec = DiskSpec {
            size_bytes: start.size_bytes,
            base_bytes: start.base_bytes,
            mode: start.mode.parse()?,
            full: start.full.parse()?,
            ram_limit_bytes: start.ram_limit_bytes,
            overflow_limit_bytes: start.overflow_limit_bytes,
            shape: LogShape::default(),
        };
        spec.check().map_err(|e| e.to_string())?;
        let layout = Layout::of(&spec);
        let meta_file = fds.meta.try_clone().map_err(|e| format!("cannot duplicate an fd: {e}"))?;
        let memory = Shared::map(fds.meta, layout.len_bytes(), "meta")?;
        let slots = fds.data.map(|fd| Shared::map(fd, spec.ram_limit_bytes, "data")).transpose()?;
        let data = DataMemory {
            bytes: slots.as_ref().map_or(0, Shared::len_bytes),
            huge_pages: slots.as_ref().is_some_and(Shared::use_huge_pages),
        };
        // SAFETY: the mapping is as long as the layout, lives as long as the disk (`_meta`), and its writer is
        // this process alone; the supervisor only reads.
        let (meta, existing) =
            unsafe { Meta::open(memory.base(), &spec, start.disk_id) }.map_err(|e| e.to_string())?;
        let live = match (spec.mode, &fds.file) {
            (Mode::Persistent, Some(file)) => Some(map_live(file, &spec)?),
            _ => None,
        };
        let attached = match &live {
            Some(live) => {
                // SAFETY: the mapping is as long as the map, lives as long as the disk (`_live`), and is this process's alone:
                // the file is locked by those that hold it.
                let states = unsafe { StateMap::new(live.base(), spec.blocks()) };
                Disk::attach_persistent(meta, existing, spec, states)
            }
            None => Disk::attach(meta, existing, spec, data),
        };
        let mut disk = attached.map_err(|e| e.to_string())?;
        let thresholds = Thresholds { warning_percent: start.warn_at, critical_percent: start.critical_at };
        disk.set_thresholds(thresholds).map_err(|e| e.to_string())?;
        let direct = start.base_cache == BaseCache::None;
        let (file, size_bytes) = (fds.base, start.base_bytes);
        let holes = start.nbd;
        let base = BaseImage::open(file, start.format, size_bytes, direct, fds.digests, holes)?;
        let image = base.file();
        if image.dio_align() as usize > spillway_core::BLOCK_BYTES {
            return Err(format!(
                "the base image's store wants O_DIRECT reads aligned to {} bytes, more than a block: use --base-cache host",
                image.dio_align()
            ));
        }
        let data_at = if spec.mode == Mode::Persistent { persistent_file::DATA_AT } else { 0 };
        let (file_bytes, predecessors) = (data_at + spec.file_bytes(), fds.predecessors);
        let models = Models::open(fds.base_model, fds.overflow_model, start.disk_id)?;
        let held = Held {
            slots: slots.map(|memory| Slots::new(memory, data.huge_pages)),
            meta: meta_file,
            file: fds.file,
            file_bytes,
            data_at,
            predecessors,
            models,
        };
        let doer = Doer::new(engine, held, base)?;
        channel_nonblocking(&channel)?;
        let tap = Tap::new(start.size_bytes, disk.fill(), now_ns());
        let mut reactor = Reactor {
            doer,
            disk,
            _meta: memory,
            _live: live,
            channel,
            start: start.clone(),
            watches: HashMap::new(),
            next_watch: 1,
            next_session: 0,
            done: Vec::with_capacity(1024),
            batch: Vec::with_capacity(BATCH),
            changes: Vec::new(),
            resetting: false,
            stopping: false,
            disk_goes_on: false,
            orphaned: false,
            spins: [Spin::new(SPIN_NS), Spin::new(SPIN_READS_NS)],
            last_work_ns: 0,
            quiet_since_ns: 0,
            nbd_budget: nbd::Budget::new(),
            pace: Pace::new(),
            states: States::new(),
            disk_full: false,
            writeback: start.writeback,
            limiter: Limiter::new(start.rate),
            turn: Turn::default(),
            throttled_since: None,
            tap,
            questions: Questions::default(),
        };
        reactor.watch(reactor.channel.as_raw_fd(), POLLIN, true, Target::Channel);
        let predecessors: Vec<_> = reactor.doer.predecessors.iter().map(AsRawFd::as_raw_fd).collect();
        for fd in predecessors {
            reactor.watch(fd, POLLIN, false, Target::Predecessor(fd));
        }
        if let Some(reader) = reactor.doer.base.reader() {
            let fd = reader.wake_fd().as_raw_fd();
            reactor.watch(fd, POLLIN, true, Target::BaseReader);
        }
        Ok(reactor)
    }

    /// Serves until told to stop. Unless the disk goes on, no file of it is in use any more when this process has ended.
    pub fn run(&mut self) -> Result<(), String> {
        self.serve()?;
        if !self.disk_goes_on {
            self.doer.engine.release_files();
        }
        Ok(())
    }

    fn serve(&mut self) -> Result<(), String> {
        self.take_messages()?;
        loop {
            let begin = now_ns();
            self.doer.now_ns = begin;
            self.disk.begin_turn(begin);
            let mut worked = self.take_completions()?;
            worked |= self.answer_block_status();
            worked |= self.take_requests();
            let end = if worked { now_ns() } else { begin };
            // What is done is told, and what is asked of the disk begins, before eviction takes its step.
            worked |= self.publish();
            self.doer.engine.submit()?;
            let more = self.disk.end_turn(&mut self.doer, end);
            worked |= self.publish();
            self.let_go();
            self.tell_events(end);
            if self.is_over()? {
                return Ok(());
            }
            if self.advance_reset() {
                continue;
            }
            self.keep_watches();
            self.doer.publish_figures(&self.disk);
            self.doer.engine.submit()?;
            if worked {
                (self.last_work_ns, self.quiet_since_ns) = (end, end);
            }
            if worked || more {
                continue;
            }
            if self.doer.is_due_soon(end) {
                std::hint::spin_loop();
                continue;
            }
            if self.wait_ns(end) > 0 {
                // Whatever else is asked waits too, and needs not be told of.
                self.sleep(end)?;
                continue;
            }
            if self.may_spin() && end.saturating_sub(self.last_work_ns) < self.spin().ns() {
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
        self.doer.clients.vmms.iter().any(|v| v.ended.is_none())
    }

    fn spin(&mut self) -> &mut Spin {
        &mut self.spins[usize::from(self.doer.reads_under_way() >= MANY_READS)]
    }

    fn sleep(&mut self, now: u64) -> Result<(), String> {
        let spare = (self.nbd_budget.kept_bytes() > 0).then_some(self.quiet_since_ns + SPARE_NS);
        if spare.is_some_and(|ns| ns <= now) {
            self.doer.clients.nbd.iter_mut().flatten().for_each(|c| c.connection.release_idle_memory());
            return Ok(());
        }
        let clients = &self.doer.clients;
        let silent = clients.vmms.iter().filter(|v| v.ended.is_none() && !v.frontend.has_spoken());
        let shaking = clients.nbd.iter().flatten().filter(|c| c.connection.handshake_deadline().is_some());
        let handshakes = silent.map(|v| v.deadline_ns).chain(shaking.map(|c| c.deadline_ns));
        let others = self.disk.deadline_ns().into_iter().chain(spare).chain(self.states.deadline_ns());
        let others = others.chain(self.doer.wake_ns());
        let deadline = handshakes.chain(others).min();
        let limit = Some(self.wait_ns(now)).filter(|wait| *wait > 0).map(|wait| now + wait);
        let deadline = deadline.into_iter().chain(limit).min();
        self.spin().was_in_vain();
        if let Some(ns) = deadline
            && ns <= now
        {
            return Ok(());
        }
        self.doer.engine.wait(deadline.map(|ns| ns - now))?;
        let woken = now_ns();
        self.spin().was_woken_after(woken - now);
        self.last_work_ns = woken;
        Ok(())
    }

    fn take_completions(&mut self) -> Result<bool, String> {
        let mut done = std::mem::take(&mut self.done);
        self.doer.engine.reap(&mut done)?;
        self.doer.take_due(&mut done);
        let mut worked = !done.is_empty();
        for d in done.drain(..) {
            let answer = match d.tag {
                Tag::Read(i) => self.doer.read_completed(i, d.result),
                Tag::Write(i) => self.doer.write_completed(i, d.result),
                Tag::Job(n) => self.doer.job_due(n),
                Tag::Op(n) => {
                    let result = if d.result < 0 { Err(Errno(-d.result)) } else { Ok(()) };
                    Some(Answer::Plain(spillway_core::OpId(n), result))
                }
                Tag::Barrier(n) => self.doer.barrier_punched(spillway_core::OpId(n), d.result),
                Tag::Watch(serial) => {
                    self.watch_fired(serial, d)?;
                    None
                }
                Tag::Polls | Tag::Ignore => None,
            };
            if let Some(answer) = answer {
                self.doer.deliver(&mut self.disk, answer);
            }
        }
        self.done = done;
        while let Some(answer) = self.doer.base_finished() {
            worked = true;
            self.doer.deliver(&mut self.disk, answer);
        }
        Ok(worked)
    }

    /// Takes requests from everyone who has some. Returns whether there were any.
    fn take_requests(&mut self) -> bool {
        if self.resetting || self.stopping {
            return false;
        }
        if !self.may_begin() {
            return self.shake_hands();
        }
        let nbd_first = self.turn.nbd_first;
        let mut worked = nbd_first && self.take_from_nbd();
        for i in 0..self.doer.clients.vmms.len() {
            if self.doer.clients.vmms[i].ended.is_none() {
                worked |= self.take_from_vmm(i);
            }
        }
        worked |= !nbd_first && self.take_from_nbd();
        self.tap.publish();
        worked
    }

    fn submit(&mut self, request: Request) {
        self.doer.taking = request.token;
        self.disk.submit(&mut self.doer, request);
        // What is decided later is not looked at.
        self.doer.taking = Token(u64::MAX);
        self.tap.request(&request, &mut self.doer.zeroes, self.doer.now_ns);
    }

    fn take_from_vmm(&mut self, i: usize) -> bool {
        let now = self.doer.now_ns;
        let mut worked = false;
        for queue in from(self.turn.queue, self.doer.clients.vmms[i].frontend.queue_count()) {
            let frontend = &mut self.doer.clients.vmms[i].frontend;
            if !frontend.is_live(queue) || !frontend.has_work(queue) {
                continue;
            }
            worked = true;
            frontend.disable_notifications(queue);
            while self.batch.len() < BATCH
                && self.limiter.as_mut().is_none_or(|limiter| limiter.wait_ns(now) == 0)
                && let Some(request) = frontend.next(queue)
            {
                if let Some(limiter) = &mut self.limiter {
                    limiter.begin(&request);
                    (self.turn.queue, self.turn.nbd_first) = (queue + 1, true);
                }
                self.disk.prefetch(&request);
                self.batch.push(request);
            }
            self.doer.clients.vmms[i].dirty |= 1 << queue;
            let mut batch = std::mem::take(&mut self.batch);
            for request in &batch {
                self.disk.prefetch_slot(&self.doer, request);
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
        let clients = self.doer.clients.nbd.len();
        from(self.turn.nbd, clients as u16)
            .fold(false, |worked, n| self.take_nbd(usize::from(n), &mut extents_left) | worked)
    }

    /// Handshakes go on while no request may begin.
    fn shake_hands(&mut self) -> bool {
        let mut extents_left = 0;
        (0..self.doer.clients.nbd.len()).fold(false, |worked, n| {
            (shakes(&self.doer.clients.nbd[n]) && self.take_nbd(n, &mut extents_left)) | worked
        })
    }

    /// `extents_left` is what the turn may still look up of extents, beside the first of each client: each may
    /// take a look at 512 entries of the map.
    fn take_nbd(&mut self, n: usize, extents_left: &mut usize) -> bool {
        let Some(client) = self.doer.clients.nbd[n].as_mut() else { return false };
        if !client.active || client.ended.is_some() {
            return false;
        }
        client.touched = true;
        let mut worked = false;
        // Bounded, so that one client does not keep others waiting; what is left comes in the next turn.
        for _ in 0..BATCH {
            // A handshake asks nothing of the disk.
            if !shakes(&self.doer.clients.nbd[n]) && self.wait_ns(self.doer.now_ns) > 0 {
                break;
            }
            let client = self.doer.clients.nbd[n].as_mut().expect("looked at above");
            match client.connection.next() {
                Some(nbd::Work::Request(request)) => {
                    if let Some(limiter) = &mut self.limiter {
                        limiter.begin(&request);
                        (self.turn.nbd, self.turn.nbd_first) = (n as u16 + 1, false);
                    }
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
        if self.doer.clients.have_answers() {
            self.doer.publish_figures(&self.disk);
        }
        let mut worked = false;
        for i in 0..self.doer.clients.vmms.len() {
            let vmm = &mut self.doer.clients.vmms[i];
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
                self.end_vmm(i, "its guest memory has shrunk".into());
            } else if stopped {
                // Broken, and it says why; or being stopped.
                self.finish_stops(i);
            }
        }
        for client in self.doer.clients.nbd.iter_mut().flatten().filter(|c| c.ended.is_none()) {
            if !std::mem::take(&mut client.touched) {
                continue;
            }
            let had_output = client.connection.wants_write();
            worked |= had_output;
            if let Err(e) = client.connection.flush_output() {
                nbd_ended(client, &e);
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

fn map_live(file: &OwnedFd, spec: &DiskSpec) -> Result<Shared, String> {
    let own = file.try_clone().map_err(|e| format!("cannot duplicate an fd: {e}"))?;
    Shared::map_file(
        own,
        persistent_file::LIVE_AT,
        state_map_bytes(spec.blocks()),
        "the disk's map in its file",
    )
}
