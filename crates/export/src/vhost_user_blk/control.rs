//! What each control message does (vhost-user, "Front-end message types"). Owns no state: it is the half of
//! [`Frontend`] that the VMM talks to.
//!
//! Invariant: a message that is refused has changed nothing, and says why: by a negative acknowledgement where
//! the front end asked for one, else by the end of the connection.

use super::config::{FEATURES, PROTOCOL_FEATURES, WRITEBACK_AT, feature};
use super::connection::{Answer, Packet};
use super::frontend::{Frontend, Handled, HeldReply};
use super::inflight::{self, Table};
use super::memory::MAX_REGIONS;
use super::message::{
    self, ConfigRange, F_PROTOCOL_FEATURES, Header, MAX_CONFIG, Message, VringFd, VringState, protocol,
    reply as reply_to,
};
use super::queue::{Kick, Queue, check_size};
use super::signal::Signal;
use super::{Change, Disconnect};
use std::os::fd::{AsRawFd, OwnedFd};

/// Highest flags of SET_CONFIG. 0 says that the guest has written a field and 1 that a live migration sets it; VMMs that
/// use rust-vmm's `vhost` crate, such as Cloud Hypervisor, send 1 for what the guest has written.
const MAX_CONFIG_FLAGS: u32 = 1;
/// Where the configuration space of virtio-mmio begins. Cloud Hypervisor up to v50 adds it to every offset.
const MMIO_CONFIG_AT: u32 = 0x100;

/// How a message is answered.
enum Reply {
    /// By an acknowledgement, if one was asked for.
    Done,
    /// By this payload, and perhaps a descriptor.
    With(Vec<u8>, Option<OwnedFd>),
    /// Later, by `held`.
    Later,
}

impl Frontend {
    /// Handles a message. An answer that comes later comes from [`Frontend::take_held`].
    pub(super) fn dispatch(
        &mut self,
        packet: Packet,
        changes: &mut Vec<Change>,
    ) -> Result<Handled, Disconnect> {
        let (header, payload) = message::split(&packet.bytes).map_err(Disconnect::Fault)?;
        let Header { request, need_reply, .. } = header;
        let acknowledge = need_reply && self.protocol & protocol::REPLY_ACK != 0;
        let acknowledgement = |failed: bool| match acknowledge {
            true => Some(Answer { bytes: reply_to(request, &u64::from(failed).to_ne_bytes()), fd: None }),
            false => None,
        };
        let reply = Message::parse(request, payload).and_then(|message| {
            if message.fds() > 0 && message.fds() != packet.fds.len() {
                let (want, got) = (message.fds(), packet.fds.len());
                return Err(format!("message {request} has {got} file descriptors, not {want}"));
            }
            self.handle(message, packet.fds, acknowledge, changes)
        });
        match reply {
            Ok(Reply::With(payload, fd)) => {
                Ok(Handled::Accepted(Some(Answer { bytes: reply_to(request, &payload), fd })))
            }
            Ok(Reply::Done) => Ok(Handled::Accepted(acknowledgement(false))),
            Ok(Reply::Later) => match self.take_held() {
                Some(answer) => Ok(Handled::Accepted(answer)),
                None => Ok(Handled::Held),
            },
            Err(why) if acknowledge && !Message::has_reply(request) => {
                self.notice.get_or_insert(why);
                Ok(Handled::Refused(acknowledgement(true)))
            }
            Err(why) => Err(Disconnect::Fault(why)),
        }
    }

    fn handle(
        &mut self,
        message: Message,
        fds: Vec<OwnedFd>,
        acknowledge: bool,
        changes: &mut Vec<Change>,
    ) -> Result<Reply, String> {
        let number = |n: u64| Ok(Reply::With(n.to_ne_bytes().to_vec(), None));
        match message {
            Message::GetFeatures => return number(FEATURES),
            Message::SetFeatures(features) => self.set_features(features)?,
            Message::SetOwner => self.begin_session()?,
            // "It is recommended that back-ends ignore this message".
            Message::ResetOwner => {}
            Message::GetProtocolFeatures => return number(PROTOCOL_FEATURES),
            Message::SetProtocolFeatures(features) => {
                self.protocol = offered("protocol feature", features, PROTOCOL_FEATURES)?;
            }
            Message::GetQueueNum => return number(self.queues.len() as u64),
            Message::GetMaxMemSlots => return number(MAX_REGIONS as u64),
            Message::SetMemTable(regions) => {
                let result = self.memory.replace(&regions, &fds);
                self.on_new_memory();
                result?;
            }
            Message::AddMemReg(region) => {
                self.memory.add(&region, &fds[0])?;
                self.on_new_memory();
            }
            Message::RemMemReg(region) => {
                self.memory.remove(&region)?;
                self.on_new_memory();
            }
            Message::SetVringNum(VringState { index, num }) => {
                let queue = self.stopped_queue(index)?;
                queue.size = check_size(num)?;
            }
            Message::SetVringBase(VringState { index, num }) => {
                let queue = self.stopped_queue(index)?;
                queue.base = u16::try_from(num)
                    .map_err(|_| format!("queue {index}: the base {num} has more than 16 bits"))?;
            }
            Message::SetVringAddr(addresses) => {
                let memory = &self.memory;
                let index = addresses.index;
                let queue = queue_at(&mut self.queues, index)?;
                queue.addresses = Some(addresses);
                queue.move_ring(memory);
                self.refresh(index as u16);
            }
            Message::GetVringBase(VringState { index, .. }) => {
                let queue = queue_at(&mut self.queues, index)?;
                (queue.stopping, queue.live) = (true, false);
                if queue.kick.take().is_some() {
                    changes.push(Change::Unkick { queue: index as u16 });
                }
                changes.push(Change::Stop { queue: index as u16 });
                self.held = Some(HeldReply::Base(index as u16));
                return Ok(Reply::Later);
            }
            Message::SetVringEnable(VringState { index, num }) => {
                let queue = queue_at(&mut self.queues, index)?;
                queue.enabled = match num {
                    0 => Some(false),
                    1 => Some(true),
                    _ => return Err(format!("SET_VRING_ENABLE of queue {index} with {num}, not 0 or 1")),
                };
                self.refresh(index as u16);
            }
            Message::SetVringKick(vring) => self.set_kick(vring, fds, changes)?,
            Message::SetVringCall(vring) => {
                let queue = queue_at(&mut self.queues, vring.index)?;
                let fd = eventfd(fds, vring)?;
                let set = match (&mut queue.call, &fd) {
                    (Some(call), Some(fd)) => call.set(fd),
                    (None, Some(fd)) => Signal::new(fd).map(|call| queue.call = Some(call)),
                    (call, None) => {
                        *call = None;
                        Ok(())
                    }
                };
                if let Err(e) = set {
                    return Err(format!("queue {}: its call eventfd cannot be used: {e}", vring.index));
                }
                if queue.started {
                    // The driver may sleep on an interrupt that went to the eventfd before this one.
                    queue.signal();
                }
            }
            Message::SetVringErr(vring) => {
                queue_at(&mut self.queues, vring.index)?.error = eventfd(fds, vring)?;
            }
            Message::GetConfig(range) => return Ok(Reply::With(self.config(range), None)),
            Message::SetConfig(range, bytes) => self.set_config(range, &bytes)?,
            Message::GetInflightFd(wanted) => {
                let (described, fd) = inflight::create(&wanted, self.queue_count())?;
                return Ok(Reply::With(described.to_bytes().to_vec(), Some(fd)));
            }
            Message::SetInflightFd(table) => {
                if let Some(index) = self.queues.iter().position(|queue| queue.started) {
                    return Err(format!("an in-flight table while queue {index} is started; stop it first"));
                }
                let guard = self.memory.guard();
                self.table = Some(Table::map(&table, &fds[0], self.queues.len() as u16, guard)?);
            }
            Message::ResetDevice => {
                for (index, queue) in (0..).zip(&mut self.queues) {
                    queue.abandon();
                    if queue.kick.take().is_some() {
                        changes.push(Change::Unkick { queue: index });
                    }
                    changes.push(Change::Stop { queue: index });
                }
                self.held = Some(HeldReply::Reset { acknowledge });
                return Ok(Reply::Later);
            }
        }
        Ok(Reply::Done)
    }

    fn set_features(&mut self, features: u64) -> Result<(), String> {
        self.features = offered("feature", features, FEATURES)?;
        self.device.set_features(features);
        if features & F_PROTOCOL_FEATURES == 0 {
            // All rings are enabled, those too that a SET_VRING_ENABLE had disabled.
            self.queues.iter_mut().for_each(|queue| queue.enabled = None);
        }
        for queue in 0..self.queue_count() {
            self.refresh(queue);
        }
        Ok(())
    }

    /// SET_OWNER, the "session start". The first one finds the state that [`Frontend::new`] made. With a later one
    /// another device has taken the place of the last one on this connection, as when a disk is unplugged from a running QEMU
    /// and plugged in again: nothing that the last one left may reach it. Protocol features stay, as QEMU sends
    /// them first. A front end that still has queues to kick has not changed its device.
    fn begin_session(&mut self) -> Result<(), String> {
        let is_first = !std::mem::replace(&mut self.owned, true);
        if is_first || self.queues.iter().any(|queue| queue.kick.is_some()) {
            return Ok(());
        }
        self.memory.replace::<OwnedFd>(&[], &[])?;
        self.queues.iter_mut().for_each(Queue::renew);
        self.features = 0;
        self.table = None;
        self.device.writeback = true;
        self.device.set_features(0);
        Ok(())
    }

    fn on_new_memory(&mut self) {
        self.told_not_shared &= self.memory.is_empty();
        for index in 0..self.queue_count() {
            self.queues[usize::from(index)].move_ring(&self.memory);
            self.refresh(index);
        }
    }

    fn set_kick(
        &mut self,
        vring: VringFd,
        fds: Vec<OwnedFd>,
        changes: &mut Vec<Change>,
    ) -> Result<(), String> {
        let queue = queue_at(&mut self.queues, vring.index)?;
        let index = vring.index as u16;
        let kick = eventfd(fds, vring)?.map_or(Kick::Poll, Kick::Fd);
        let change = match &kick {
            Kick::Fd(fd) => Change::Kick { queue: index, fd: fd.as_raw_fd() },
            Kick::Poll => Change::Poll { queue: index },
        };
        if queue.kick.replace(kick).is_some() {
            changes.push(Change::Unkick { queue: index });
        }
        changes.push(change);
        queue.resumed |= self.replaying && !queue.started;
        self.refresh(index);
        let queue = &mut self.queues[usize::from(index)];
        if queue.size == 0 || queue.addresses.is_none() {
            queue.notice = Some("has a kick, and lacks its size or its addresses to start".into());
        }
        Ok(())
    }

    fn stopped_queue(&mut self, index: u32) -> Result<&mut Queue, String> {
        let queue = queue_at(&mut self.queues, index)?;
        if queue.started {
            Err(format!("queue {index} is started; stop it with GET_VRING_BASE"))
        } else {
            Ok(queue)
        }
    }

    /// Starts a queue that has all it needs, and settles whether requests may be taken from it.
    fn refresh(&mut self, index: u16) {
        let negotiated = |bit| self.features & bit != 0;
        let queue = &mut self.queues[usize::from(index)];
        let complete = queue.kick.is_some() && queue.addresses.is_some() && queue.size > 0;
        if complete && !queue.started && !queue.stopping {
            let event_idx = negotiated(feature::RING_EVENT_IDX);
            let indirect = negotiated(feature::RING_INDIRECT_DESC);
            let lent = self.table.as_ref().and_then(|table| table.marks(index, queue.size));
            let marks = lent.or_else(|| self.own_table.marks(index, queue.size));
            let marks = marks.expect("our own table has room for every queue of every size");
            match queue.start(&self.memory, marks, event_idx, indirect) {
                Ok(()) => {}
                Err(_) if self.memory.is_empty() => self.tell_not_shared("it has handed over no memory"),
                Err(why) => queue.notice = Some(why),
            }
        }
        let enabled_by_default = self.features & F_PROTOCOL_FEATURES == 0;
        let queue = &mut self.queues[usize::from(index)];
        let enabled = queue.enabled.unwrap_or(enabled_by_default);
        let live = queue.started && queue.ring.is_some() && enabled && !queue.stopping && !queue.broken;
        queue.live = live;
    }

    /// GET_CONFIG: up to 256 bytes at any offset; what lies beyond the structure is zero. A larger size is answered by an
    /// empty payload, which the specification takes for an error.
    fn config(&self, range: ConfigRange) -> Vec<u8> {
        let (offset, size) = (config_offset(&range).min(MAX_CONFIG), range.size as usize);
        if size > MAX_CONFIG {
            return Vec::new();
        }
        let mut space = [0; 2 * MAX_CONFIG];
        let structure = self.device.space();
        space[..structure.len()].copy_from_slice(&structure);
        let mut payload = Vec::with_capacity(12 + size);
        for word in [range.offset, range.size, range.flags] {
            payload.extend_from_slice(&word.to_ne_bytes());
        }
        payload.extend_from_slice(&space[offset..offset + size]);
        payload
    }

    /// SET_CONFIG: only `writeback` may be written (5.2.4).
    fn set_config(&mut self, range: ConfigRange, bytes: &[u8]) -> Result<(), String> {
        if range.flags > MAX_CONFIG_FLAGS {
            return Err(format!("SET_CONFIG with flags {:#x}, which do not exist", range.flags));
        }
        match (config_offset(&range), bytes) {
            (WRITEBACK_AT, [byte @ (0 | 1)]) => {
                self.device.writeback = *byte == 1;
                self.device.set_features(self.features);
                Ok(())
            }
            _ => Err(format!(
                "SET_CONFIG of {} bytes at {}: only writeback, one byte 0 or 1 at {WRITEBACK_AT}, may be written",
                range.size, range.offset
            )),
        }
    }
}

/// The offset of a configuration message in `struct virtio_blk_config`.
fn config_offset(range: &ConfigRange) -> usize {
    range.offset.checked_sub(MMIO_CONFIG_AT).unwrap_or(range.offset) as usize
}

fn queue_at(queues: &mut [Queue], index: u32) -> Result<&mut Queue, String> {
    let count = queues.len();
    queues.get_mut(index as usize).ok_or_else(|| format!("there is no queue {index}; {count} are offered"))
}

fn offered(what: &str, wanted: u64, offered: u64) -> Result<u64, String> {
    match wanted & !offered {
        0 => Ok(wanted),
        more => Err(format!("{what} bits {more:#x} were not offered")),
    }
}

/// The eventfd of a SET_VRING_KICK, _CALL or _ERR. What clearly is none is refused.
fn eventfd(fds: Vec<OwnedFd>, vring: VringFd) -> Result<Option<OwnedFd>, String> {
    let Some(fd) = fds.into_iter().next().filter(|_| vring.has_fd) else { return Ok(None) };
    let file = rustix::fs::fstat(&fd).map_err(|e| format!("queue {}: fstat: {e}", vring.index))?;
    // An eventfd has no file type at all.
    if file.st_mode & libc::S_IFMT != 0 {
        return Err(format!("queue {}: the file descriptor is not an eventfd", vring.index));
    }
    Ok(Some(fd))
}
