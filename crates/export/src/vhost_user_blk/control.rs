//! The control messages about the device as a whole (vhost-user, "Front-end message types"): features, memory,
//! configuration space, in-flight table. Those about one queue are in `vring.rs`. Owns no state: it is the half of
//! [`Frontend`] that the VMM talks to.
//!
//! Invariant: a message that is refused has changed nothing, and the front end learns of it: by a negative
//! acknowledgement where it asked for one, else by the end of the connection.

use super::config::{FEATURES, PROTOCOL_FEATURES, WRITEBACK_AT};
use super::connection::{Packet, Reply};
use super::error::Error;
use super::frontend::{Frontend, Handled, PendingReply};
use super::inflight::{self, InflightTable};
use super::memory::{MAX_REGIONS, Memory};
use super::message::{
    self, CONFIG_HEADER_BYTES, ConfigRange, F_PROTOCOL_FEATURES, Header, Inflight, MAX_CONFIG, Message,
    protocol, reply as reply_to,
};
use super::queue::Queue;
use super::{Change, Disconnect};
use crate::ErrorKind;
use std::os::fd::OwnedFd;

/// Highest flags of SET_CONFIG. 0 says that the guest has written a field and 1 that a live migration sets it; VMMs that
/// use rust-vmm's `vhost` crate, such as Cloud Hypervisor, send 1 for what the guest has written.
const MAX_CONFIG_FLAGS: u32 = 1;
/// Where the configuration space of virtio-mmio begins. Cloud Hypervisor up to v50 adds it to every offset.
const MMIO_CONFIG_AT: u32 = 0x100;

/// Outcome of a message that was accepted.
enum Outcome {
    /// By an acknowledgement, if one was asked for.
    Done,
    /// By this payload, and perhaps a descriptor.
    With(Vec<u8>, Option<OwnedFd>),
    /// By `pending`, when no request is unfinished any more.
    Pending,
}

impl Outcome {
    fn number(n: u64) -> Outcome {
        Outcome::With(n.to_ne_bytes().to_vec(), None)
    }
}

impl Frontend {
    /// Handles a message. A pending answer comes from [`Frontend::take_pending`].
    pub(super) fn dispatch(
        &mut self,
        packet: Packet,
        changes: &mut Vec<Change>,
    ) -> Result<Handled, Disconnect> {
        let (header, payload) = message::split(&packet.bytes)?;
        let Header { request, need_reply, .. } = header;
        let acknowledge = need_reply && self.protocol & protocol::REPLY_ACK != 0;
        let acknowledgement = |failed: bool| match acknowledge {
            true => Some(Reply { bytes: reply_to(request, &u64::from(failed).to_ne_bytes()), fd: None }),
            false => None,
        };
        let reply = Message::parse(request, payload).and_then(|message| {
            if message.fds() > 0 && message.fds() != packet.fds.len() {
                let error = Error::protocol("it has the wrong number of file descriptors");
                return Err(error.unequal(packet.fds.len(), message.fds()));
            }
            self.handle(message, packet.fds, acknowledge, changes)
        });
        match reply {
            Ok(Outcome::With(payload, fd)) => {
                Ok(Handled::Accepted(Some(Reply { bytes: reply_to(request, &payload), fd })))
            }
            Ok(Outcome::Done) => Ok(Handled::Accepted(acknowledgement(false))),
            Ok(Outcome::Pending) => match self.take_pending() {
                Some(answer) => Ok(Handled::Accepted(answer)),
                None => Ok(Handled::Pending),
            },
            Err(error) if acknowledge && !Message::has_reply(request) => {
                self.notice.get_or_insert(error.in_message(request));
                Ok(Handled::Refused(acknowledgement(true)))
            }
            Err(error) => Err(error.in_message(request).into()),
        }
    }

    fn handle(
        &mut self,
        message: Message,
        fds: Vec<OwnedFd>,
        acknowledge: bool,
        changes: &mut Vec<Change>,
    ) -> Result<Outcome, Error> {
        match message {
            Message::GetFeatures => return Ok(Outcome::number(FEATURES)),
            Message::GetProtocolFeatures => return Ok(Outcome::number(PROTOCOL_FEATURES)),
            Message::GetQueueNum => return Ok(Outcome::number(self.queues.len() as u64)),
            Message::GetMaxMemSlots => return Ok(Outcome::number(MAX_REGIONS as u64)),
            Message::GetConfig(range) => return Ok(Outcome::With(self.config(range), None)),
            Message::GetInflightFd(wanted) => {
                let (described, fd) = inflight::create(&wanted, self.queue_count())?;
                return Ok(Outcome::With(described.to_bytes().to_vec(), Some(fd)));
            }
            Message::SetFeatures(features) => self.set_features(features)?,
            Message::SetProtocolFeatures(features) => {
                self.protocol = check_offered(features, PROTOCOL_FEATURES)?;
            }
            Message::SetOwner => self.begin_session()?,
            // "It is recommended that back-ends ignore this message".
            Message::ResetOwner => {}
            Message::SetMemTable(regions) => {
                self.change_memory(|memory| memory.replace(&regions, &fds))?;
            }
            Message::AddMemReg(region) => self.change_memory(|memory| memory.add(&region, &fds[0]))?,
            Message::RemMemReg(region) => self.change_memory(|memory| memory.remove(&region))?,
            Message::SetConfig(range, bytes) => self.set_config(range, &bytes)?,
            Message::SetInflightFd(table) => self.set_inflight(&table, &fds[0])?,
            Message::SetVringNum(state) => self.set_vring_size(state)?,
            Message::SetVringBase(state) => self.set_vring_base(state)?,
            Message::SetVringAddr(addresses) => self.set_vring_addresses(addresses)?,
            Message::SetVringEnable(state) => self.set_vring_enabled(state)?,
            Message::SetVringKick(vring) => self.set_vring_kick(vring, fds, changes)?,
            Message::SetVringCall(vring) => self.set_vring_call(vring, fds)?,
            Message::SetVringErr(vring) => self.set_vring_error(vring, fds)?,
            Message::GetVringBase(state) => {
                let queue = self.begin_vring_stop(state, changes)?;
                self.pending = Some(PendingReply::Base(queue));
                return Ok(Outcome::Pending);
            }
            Message::ResetDevice => {
                self.abandon_queues(changes);
                self.pending = Some(PendingReply::Reset { acknowledge });
                return Ok(Outcome::Pending);
            }
        }
        Ok(Outcome::Done)
    }

    fn set_features(&mut self, features: u64) -> Result<(), Error> {
        self.features = check_offered(features, FEATURES)?;
        self.device.set_features(features);
        if features & F_PROTOCOL_FEATURES == 0 {
            // All rings are enabled, including those that a SET_VRING_ENABLE had disabled.
            self.queues.iter_mut().for_each(|queue| queue.setup.enabled = None);
        }
        for queue in 0..self.queue_count() {
            self.refresh(queue);
        }
        Ok(())
    }

    /// SET_OWNER, the "session start". The first one finds the state that [`Frontend::new`] made. With a later one
    /// another device has taken the place of the last one on this connection, as when a disk is unplugged from a running QEMU
    /// and plugged in again: no state of the last one may reach it. Protocol features stay, as QEMU sends them
    /// first. A front end that still has queues to kick has not changed its device.
    fn begin_session(&mut self) -> Result<(), Error> {
        let is_first = !std::mem::replace(&mut self.owner_set, true);
        if is_first || self.queues.iter().any(|queue| queue.setup.kick.is_some()) {
            return Ok(());
        }
        self.memory.replace::<OwnedFd>(&[], &[])?;
        self.queues.iter_mut().for_each(Queue::reset_for_new_device);
        self.features = 0;
        self.table = None;
        self.device.writeback = true;
        self.device.set_features(0);
        Ok(())
    }

    /// Changes the memory regions and finds the rings in them. The regions stay as they were after an error.
    fn change_memory(&mut self, change: impl FnOnce(&mut Memory) -> Result<(), Error>) -> Result<(), Error> {
        change(&mut self.memory)?;
        self.not_shared_reported &= self.memory.is_empty();
        for index in 0..self.queue_count() {
            self.queues[usize::from(index)].move_ring(&self.memory);
            self.refresh(index);
        }
        Ok(())
    }

    fn set_inflight(&mut self, table: &Inflight, fd: &OwnedFd) -> Result<(), Error> {
        if let Some(index) = self.queues.iter().position(|queue| queue.started) {
            let reason = "the queue is started: stop it with GET_VRING_BASE first";
            return Err(Error::new(ErrorKind::WrongState, reason).on_queue(index as u32));
        }
        let table = InflightTable::map(table, fd, self.queue_count(), self.memory.guard())?;
        self.table = Some(table);
        Ok(())
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
        let mut payload = Vec::with_capacity(CONFIG_HEADER_BYTES + size);
        for word in [range.offset, range.size, range.flags] {
            payload.extend_from_slice(&word.to_ne_bytes());
        }
        payload.extend_from_slice(&space[offset..offset + size]);
        payload
    }

    /// SET_CONFIG: only `writeback` may be written (5.2.4).
    fn set_config(&mut self, range: ConfigRange, bytes: &[u8]) -> Result<(), Error> {
        if range.flags > MAX_CONFIG_FLAGS {
            return Err(Error::protocol("unknown flags").bits(u64::from(range.flags)));
        }
        match (config_offset(&range), bytes) {
            (WRITEBACK_AT, [byte @ (0 | 1)]) => {
                self.device.writeback = *byte == 1;
                self.device.set_features(self.features);
                Ok(())
            }
            _ => Err(Error::protocol("only writeback may be written, as one byte 0 or 1 at offset 0x20")
                .at(u64::from(range.offset), u64::from(range.size))),
        }
    }
}

/// The offset of a configuration message in `struct virtio_blk_config`.
fn config_offset(range: &ConfigRange) -> usize {
    range.offset.checked_sub(MMIO_CONFIG_AT).unwrap_or(range.offset) as usize
}

fn check_offered(wanted: u64, offered: u64) -> Result<u64, Error> {
    match wanted & !offered {
        0 => Ok(wanted),
        more => Err(Error::new(ErrorKind::NotNegotiated, "these bits were not offered").bits(more)),
    }
}
