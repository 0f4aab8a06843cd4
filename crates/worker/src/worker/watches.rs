//! What the loop is woken by: what the watches find on sockets and eventfds, and what they lead to. Owns the numbers
//! of the watches; takes no requests.
//!
//! Invariant: before the loop sleeps every connection has a watch for what it waits for, and none that would wake
//! it at once and again.

use super::engine::{Done, Engine, Tag};
use super::error::{ConnectionEnd, Error, ErrorKind};
use super::reactor::Reactor;
use spillway_core::Errno;
use spillway_export::vhost_user_blk::{Change, Disconnect, Frontend};
use std::collections::HashMap;
use std::os::fd::AsRawFd;

pub(super) const POLLIN: i16 = libc::POLLIN;
const POLLOUT: i16 = libc::POLLOUT;
/// What a watch reports whether it is asked for or not.
const HUNG_UP: i16 = libc::POLLHUP | libc::POLLRDHUP;

/// What a watch is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Channel,
    BaseReader,
    /// The connection for chunks of a streamed image.
    Chunks,
    /// A dead worker's pidfd.
    Predecessor(i32),
    /// A VMM's control socket, by the supervisor's number.
    Vmm(u64),
    /// A queue's kick eventfd.
    Kick(u64, u16),
    /// An NBD client, by its number in tokens.
    Nbd(u16),
}

/// The watches by their numbers.
pub(super) struct Watches {
    targets: HashMap<u32, Target>,
    next: u32,
    /// The one on the connection for chunks of a streamed image, which the supervisor knows to be there.
    pub(super) chunks: Option<u32>,
}

impl Watches {
    pub(super) fn new() -> Watches {
        Watches { targets: HashMap::new(), next: 1, chunks: None }
    }

    fn add(&mut self, engine: &mut Engine, fd: i32, flags: i16, multi: bool, target: Target) -> u32 {
        // Some watches live as long as the worker, and numbers come round.
        while self.targets.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let serial = self.next;
        self.next = self.next.wrapping_add(1);
        self.targets.insert(serial, target);
        engine.watch(fd, flags, multi, Tag::Watch(serial));
        serial
    }

    fn remove(&mut self, engine: &mut Engine, serial: u32) {
        self.targets.remove(&serial);
        engine.unwatch(Tag::Watch(serial));
    }

    /// What a watch that has found something is on. One that does not go on is no more.
    fn fired(&mut self, serial: u32, goes_on: bool) -> Option<Target> {
        let target = self.targets.get(&serial).copied();
        if !goes_on {
            self.targets.remove(&serial);
        }
        target
    }
}

impl Reactor {
    pub(super) fn watch(&mut self, fd: i32, flags: i16, multi: bool, target: Target) -> u32 {
        self.watches.add(&mut self.io.transfers.engine, fd, flags, multi, target)
    }

    /// Watches the connection for chunks, if there is one.
    pub(super) fn watch_chunks(&mut self) {
        if let Some(connection) = self.io.base.connection() {
            let fd = connection.as_raw_fd();
            self.watches.chunks = Some(self.watch(fd, POLLIN, true, Target::Chunks));
        }
    }

    pub(super) fn unwatch(&mut self, serial: u32) {
        self.watches.remove(&mut self.io.transfers.engine, serial);
    }

    pub(super) fn watch_fired(&mut self, serial: u32, done: Done) -> Result<(), Error> {
        let Some(target) = self.watches.fired(serial, done.more) else { return Ok(()) };
        match target {
            Target::Channel => {
                self.take_messages()?;
                if !done.more && !self.stage.orphaned {
                    self.watch(self.channel.as_raw_fd(), POLLIN, true, Target::Channel);
                }
            }
            Target::BaseReader => {
                if !done.more
                    && let Some(reader) = self.io.base.thread()
                {
                    let fd = reader.wake_fd().as_raw_fd();
                    self.watch(fd, POLLIN, true, Target::BaseReader);
                }
            }
            // What has come is taken in every turn.
            Target::Chunks => {
                if !done.more {
                    self.watch_chunks();
                }
            }
            Target::Predecessor(fd) => {
                if done.result < 0 || done.result & i32::from(POLLIN) == 0 {
                    let reason = "the end of the worker before this one cannot be waited for";
                    return Err(Error::new(ErrorKind::Engine, reason));
                }
                self.io.barrier.predecessor_ended(&mut self.io.transfers, fd);
            }
            Target::Vmm(id) => {
                if let Some(i) = self.io.clients.vmms.iter().position(|v| v.id == id) {
                    self.io.clients.vmms[i].watch = None;
                    self.control(i, |frontend, changes| frontend.on_readable(changes));
                }
            }
            Target::Kick(id, queue) => self.kicked(serial, done, id, queue),
            Target::Nbd(n) => self.nbd_socket_fired(usize::from(n), done),
        }
        Ok(())
    }

    /// A driver has kicked. The queue is looked at in this turn, as every live one is. A watch that ended is renewed.
    fn kicked(&mut self, serial: u32, done: Done, id: u64, queue: u16) {
        let Some(i) = self.io.clients.vmms.iter().position(|v| v.id == id) else { return };
        if self.io.clients.vmms[i].frontend.kicked(queue) {
            self.tell_notices(i);
        }
        let vmm = &mut self.io.clients.vmms[i];
        let kick = &mut vmm.kicks[usize::from(queue)];
        if !done.more
            && let Some((_, fd)) = kick.take_if(|(watch, _)| *watch == serial)
        {
            if done.result < 0 {
                // It cannot be watched: what the driver does can be seen only by looking.
                vmm.polled |= 1 << queue;
            } else {
                let watch = self.watch(fd, POLLIN, true, Target::Kick(id, queue));
                self.io.clients.vmms[i].kicks[usize::from(queue)] = Some((watch, fd));
            }
        }
    }

    /// An NBD client's socket can be read or written, or has been hung up.
    fn nbd_socket_fired(&mut self, n: usize, done: Done) {
        // If it can be written to, it may be told of what has just been done.
        self.io.publish_figures(&self.disk);
        let Some(client) = self.io.clients.nbd[n].as_mut() else { return };
        if !done.more {
            client.watch = None;
        }
        if done.result < 0 {
            let e = std::io::Error::from_raw_os_error(-done.result);
            client.end(Error::new(ErrorKind::Engine, "its socket cannot be watched").because(e).into());
            return;
        }
        client.active = true;
        client.touched = true;
        let flags = done.result as i16;
        client.hung_up |= flags & HUNG_UP != 0;
        let c = &mut client.connection;
        let mut outcome = Ok(());
        if flags & POLLOUT != 0 {
            outcome = c.on_writable();
        }
        if outcome.is_ok() && flags & libc::POLLHUP != 0 {
            outcome = c.on_hangup();
        }
        if outcome.is_ok() && c.wants_read() {
            outcome = c.on_readable();
        }
        if let Err(e) = outcome {
            client.end(e.into());
        }
    }

    /// Control messages of a VMM, and what they change here. `None`: its connection has ended.
    pub(super) fn control<T>(
        &mut self,
        i: usize,
        handle: impl FnOnce(&mut Frontend, &mut Vec<Change>) -> Result<T, Disconnect>,
    ) -> Option<T> {
        let mut changes = std::mem::take(&mut self.changes);
        // A queue that stops is told of what has just been done.
        self.io.publish_figures(&self.disk);
        let vmm = &mut self.io.clients.vmms[i];
        let outcome = handle(&mut vmm.frontend, &mut changes);
        let (id, session) = (vmm.id, vmm.session);
        if let Err(why) = &outcome {
            self.end_vmm(i, ConnectionEnd::from(*why));
        }
        self.tell_notices(i);
        for change in changes.drain(..) {
            match change {
                Change::Kick { queue, fd } => {
                    let serial = self.watch(fd, POLLIN, true, Target::Kick(id, queue));
                    self.io.clients.vmms[i].kicks[usize::from(queue)] = Some((serial, fd));
                }
                Change::Poll { queue } => self.io.clients.vmms[i].polled |= 1 << queue,
                Change::Unkick { queue } => {
                    let vmm = &mut self.io.clients.vmms[i];
                    vmm.polled &= !(1 << queue);
                    if let Some((serial, _)) = vmm.kicks[usize::from(queue)].take() {
                        self.unwatch(serial);
                    }
                }
                // Every live queue is looked at in every turn, this one included.
                Change::Stop { queue } => {
                    self.disk.cancel(&mut self.io, Errno::CANCELED, |t| {
                        t.0 >> 48 == session && Frontend::queue_of(t) == queue
                    });
                }
            }
        }
        self.changes = changes;
        outcome.ok()
    }

    /// Asks for kicks before sleeping. True: something came meanwhile.
    pub(super) fn arm_notifications(&mut self) -> bool {
        if self.stage.takes_none() {
            // No requests are taken any more: what is waited for are completions.
            return false;
        }
        let mut more = false;
        for vmm in self.io.clients.vmms.iter_mut().filter(|v| v.ended.is_none()) {
            more |= vmm.polled != 0;
            for queue in 0..vmm.frontend.queue_count() {
                more |= vmm.frontend.is_live(queue) && vmm.frontend.enable_notifications(queue);
            }
            more |= vmm.frontend.poisoned();
        }
        more | self.io.clients.nbd.iter().flatten().any(|c| c.ended.is_none() && c.active)
    }

    /// Every connection has a watch for what it waits for. A poll on a socket whose peer has hung up (or half)
    /// says so at once, whatever it was asked for; from then on the watch is one that tells of changes only.
    pub(super) fn keep_watches(&mut self) {
        for i in 0..self.io.clients.vmms.len() {
            let vmm = &self.io.clients.vmms[i];
            // While there is a supervisor the socket is its to read.
            if self.stage.orphaned && vmm.ended.is_none() && vmm.watch.is_none() && vmm.frontend.wants_read()
            {
                let (fd, id) = (vmm.frontend.fd().as_raw_fd(), vmm.id);
                let serial = self.watch(fd, POLLIN, false, Target::Vmm(id));
                self.io.clients.vmms[i].watch = Some(serial);
            }
        }
        // Under a rate limit what waits to be taken wakes nobody.
        let takes_work = !self.stage.takes_none() && self.throttle.wait_ns(self.io.now_ns()) == 0;
        for n in 0..self.io.clients.nbd.len() {
            let Some(client) = self.io.clients.nbd[n].as_ref().filter(|c| c.ended.is_none()) else {
                continue;
            };
            let c = &client.connection;
            let writes = if takes_work { c.wants_write() } else { c.has_output() };
            let flags = if c.wants_read() { POLLIN } else { 0 } | if writes { POLLOUT } else { 0 };
            let multi = client.hung_up && !c.wants_read();
            let (fd, current) = (c.fd().as_raw_fd(), client.watch);
            if let Some((serial, armed)) = current {
                if armed == (flags, multi) {
                    continue;
                }
                self.unwatch(serial);
            }
            let serial = self.watch(fd, flags, multi, Target::Nbd(n as u16));
            self.io.clients.nbd[n].as_mut().expect("looked at above").watch = Some((serial, (flags, multi)));
        }
    }
}
