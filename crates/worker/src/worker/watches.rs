//! What the loop is woken by: what the watches find on sockets and eventfds, and what they lead to. Owns the numbers
//! of the watches; takes no requests.
//!
//! Invariant: before the loop sleeps every connection has a watch for what it waits for, and none that would wake
//! it at once and again.

use super::clients::NbdClient;
use super::engine::{Done, Tag};
use super::reactor::Reactor;
use spillway_core::Errno;
use spillway_export::nbd;
use spillway_export::vhost_user_blk::{Change, Disconnect, Frontend};
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
    /// A dead worker's pidfd.
    Predecessor(i32),
    /// A VMM's control socket, by the supervisor's number.
    Vmm(u64),
    /// A queue's kick eventfd.
    Kick(u64, u16),
    /// An NBD client, by its number in tokens.
    Nbd(u16),
}

impl Reactor {
    pub(super) fn watch(&mut self, fd: i32, flags: i16, multi: bool, target: Target) -> u32 {
        // Some watches live as long as the worker, and numbers come round.
        while self.watches.contains_key(&self.next_watch) {
            self.next_watch = self.next_watch.wrapping_add(1);
        }
        let serial = self.next_watch;
        self.next_watch = self.next_watch.wrapping_add(1);
        self.watches.insert(serial, target);
        self.doer.engine.watch(fd, flags, multi, Tag::Watch(serial));
        serial
    }

    pub(super) fn unwatch(&mut self, serial: u32) {
        self.watches.remove(&serial);
        self.doer.engine.unwatch(Tag::Watch(serial));
    }

    pub(super) fn watch_fired(&mut self, serial: u32, done: Done) -> Result<(), String> {
        let Some(&target) = self.watches.get(&serial) else { return Ok(()) };
        if !done.more {
            self.watches.remove(&serial);
        }
        match target {
            Target::Channel => {
                self.take_messages()?;
                if !done.more && !self.orphaned {
                    self.watch(self.channel.as_raw_fd(), POLLIN, true, Target::Channel);
                }
            }
            Target::BaseReader => {
                if !done.more
                    && let Some(reader) = self.doer.base.reader()
                {
                    let fd = reader.wake_fd().as_raw_fd();
                    self.watch(fd, POLLIN, true, Target::BaseReader);
                }
            }
            Target::Predecessor(fd) => {
                if done.result < 0 || done.result & i32::from(POLLIN) == 0 {
                    return Err("the end of the worker before this one cannot be waited for".into());
                }
                self.doer.predecessor_ended(fd);
            }
            Target::Vmm(id) => {
                if let Some(i) = self.doer.clients.vmms.iter().position(|v| v.id == id) {
                    self.doer.clients.vmms[i].watch = None;
                    self.control(i, |frontend, changes| frontend.on_readable(changes));
                }
            }
            Target::Kick(id, queue) => {
                // The queue is looked at in this turn, as every live one is. A watch that ended is renewed.
                let Some(i) = self.doer.clients.vmms.iter().position(|v| v.id == id) else { return Ok(()) };
                if self.doer.clients.vmms[i].frontend.kicked(queue) {
                    self.tell_notices(i);
                }
                let vmm = &mut self.doer.clients.vmms[i];
                let kick = &mut vmm.kicks[usize::from(queue)];
                if !done.more
                    && let Some((_, fd)) = kick.take_if(|(watch, _)| *watch == serial)
                {
                    if done.result < 0 {
                        // It cannot be watched: what the driver does can be seen only by looking.
                        vmm.polled |= 1 << queue;
                    } else {
                        let watch = self.watch(fd, POLLIN, true, Target::Kick(id, queue));
                        self.doer.clients.vmms[i].kicks[usize::from(queue)] = Some((watch, fd));
                    }
                }
            }
            Target::Nbd(n) => {
                // If it can be written to, it may be told of what has just been done.
                self.doer.publish_figures(&self.disk);
                if let Some(client) = self.doer.clients.nbd[usize::from(n)].as_mut() {
                    if !done.more {
                        client.watch = None;
                    }
                    if done.result < 0 {
                        let e = std::io::Error::from_raw_os_error(-done.result);
                        client.ended.get_or_insert(format!("its socket cannot be watched: {e}"));
                        return Ok(());
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
                        nbd_ended(client, &e);
                    }
                }
            }
        }
        Ok(())
    }

    /// Control messages of a VMM, and what they change here. `None`: its connection has ended.
    pub(super) fn control<T>(
        &mut self,
        i: usize,
        handle: impl FnOnce(&mut Frontend, &mut Vec<Change>) -> Result<T, Disconnect>,
    ) -> Option<T> {
        let mut changes = std::mem::take(&mut self.changes);
        // A queue that stops is told of what has just been done.
        self.doer.publish_figures(&self.disk);
        let vmm = &mut self.doer.clients.vmms[i];
        let outcome = handle(&mut vmm.frontend, &mut changes);
        let (id, session) = (vmm.id, vmm.session);
        if let Err(why) = &outcome {
            let left = matches!(why, Disconnect::Left);
            self.end_vmm(i, if left { String::new() } else { why.to_string() });
        }
        self.tell_notices(i);
        for change in changes.drain(..) {
            match change {
                Change::Kick { queue, fd } => {
                    let serial = self.watch(fd, POLLIN, true, Target::Kick(id, queue));
                    self.doer.clients.vmms[i].kicks[usize::from(queue)] = Some((serial, fd));
                }
                Change::Poll { queue } => self.doer.clients.vmms[i].polled |= 1 << queue,
                Change::Unkick { queue } => {
                    let vmm = &mut self.doer.clients.vmms[i];
                    vmm.polled &= !(1 << queue);
                    if let Some((serial, _)) = vmm.kicks[usize::from(queue)].take() {
                        self.unwatch(serial);
                    }
                }
                // Every live queue is looked at in every turn, this one included.
                Change::Stop { queue } => {
                    self.disk.cancel(&mut self.doer, Errno::CANCELED, |t| {
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
        if self.resetting || self.stopping {
            // No requests are taken any more: what is waited for are completions.
            return false;
        }
        let mut more = false;
        for vmm in self.doer.clients.vmms.iter_mut().filter(|v| v.ended.is_none()) {
            more |= vmm.polled != 0;
            for queue in 0..vmm.frontend.queue_count() {
                more |= vmm.frontend.is_live(queue) && vmm.frontend.enable_notifications(queue);
            }
            more |= vmm.frontend.poisoned();
        }
        more | self.doer.clients.nbd.iter().flatten().any(|c| c.ended.is_none() && c.active)
    }

    /// Every connection has a watch for what it waits for. A poll on a socket whose peer has hung up (or half)
    /// says so at once, whatever it was asked for; from then on the watch is one that tells of changes only.
    pub(super) fn keep_watches(&mut self) {
        for i in 0..self.doer.clients.vmms.len() {
            let vmm = &self.doer.clients.vmms[i];
            // While there is a supervisor the socket is its to read.
            if self.orphaned && vmm.ended.is_none() && vmm.watch.is_none() && vmm.frontend.wants_read() {
                let (fd, id) = (vmm.frontend.fd().as_raw_fd(), vmm.id);
                let serial = self.watch(fd, POLLIN, false, Target::Vmm(id));
                self.doer.clients.vmms[i].watch = Some(serial);
            }
        }
        // Under a rate limit what waits to be taken wakes nobody.
        let takes_work = !self.resetting && !self.stopping && self.wait_ns(self.doer.now_ns) == 0;
        for n in 0..self.doer.clients.nbd.len() {
            let Some(client) = self.doer.clients.nbd[n].as_ref().filter(|c| c.ended.is_none()) else {
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
            self.doer.clients.nbd[n].as_mut().expect("looked at above").watch =
                Some((serial, (flags, multi)));
        }
    }
}

pub(super) fn nbd_ended(client: &mut NbdClient, why: &nbd::Disconnect) {
    client.ended.get_or_insert(if why.is_ordinary() { String::new() } else { why.to_string() });
}
