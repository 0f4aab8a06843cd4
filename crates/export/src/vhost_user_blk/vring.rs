//! The control messages about one queue (`VHOST_USER_SET_VRING_*` and `VHOST_USER_GET_VRING_BASE`), and the rule by which
//! a queue starts. Owns no state: it is a part of [`Frontend`].
//!
//! Invariant: a queue starts once it has a size, addresses, a kick and memory that holds its ring, in whatever order they
//! come.

use super::Change;
use super::config::feature;
use super::error::Error;
use super::frontend::Frontend;
use super::message::{F_PROTOCOL_FEATURES, VringAddr, VringFd, VringState};
use super::queue::Queue;
use super::setup::{Kick, RingFeatures, check_size};
use super::signal::{Signal, not_an_eventfd};
use crate::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};

impl Frontend {
    pub(super) fn set_vring_size(&mut self, VringState { index, num }: VringState) -> Result<(), Error> {
        let queue = self.stopped_queue(index)?;
        queue.setup.size = check_size(num).map_err(|error| error.on_queue(index))?;
        Ok(())
    }

    pub(super) fn set_vring_base(&mut self, VringState { index, num }: VringState) -> Result<(), Error> {
        let queue = self.stopped_queue(index)?;
        queue.setup.base = u16::try_from(num).map_err(|_| {
            Error::protocol("the index has more than 16 bits").above(num, u16::MAX).on_queue(index)
        })?;
        Ok(())
    }

    pub(super) fn set_vring_addresses(&mut self, addresses: VringAddr) -> Result<(), Error> {
        let index = addresses.index;
        let queue = queue_at(&mut self.queues, index)?;
        queue.setup.addresses = Some(addresses);
        queue.move_ring(&self.memory);
        self.refresh(index as u16);
        Ok(())
    }

    pub(super) fn set_vring_enabled(&mut self, VringState { index, num }: VringState) -> Result<(), Error> {
        let queue = queue_at(&mut self.queues, index)?;
        if num > 1 {
            return Err(Error::protocol("it is neither 0 nor 1").found(num).on_queue(index));
        }
        queue.setup.enabled = Some(num == 1);
        self.refresh(index as u16);
        Ok(())
    }

    pub(super) fn set_vring_kick(
        &mut self,
        vring: VringFd,
        fds: Vec<OwnedFd>,
        changes: &mut Vec<Change>,
    ) -> Result<(), Error> {
        let queue = queue_at(&mut self.queues, vring.index)?;
        let index = vring.index as u16;
        let kick = eventfd(fds, vring)?.map_or(Kick::Poll, Kick::Fd);
        let change = match &kick {
            Kick::Fd(fd) => Change::Kick { queue: index, fd: fd.as_raw_fd() },
            Kick::Poll => Change::Poll { queue: index },
        };
        if queue.setup.kick.replace(kick).is_some() {
            changes.push(Change::Unkick { queue: index });
        }
        changes.push(change);
        queue.setup.resumed |= self.replaying && !queue.started;
        self.refresh(index);
        let queue = &mut self.queues[usize::from(index)];
        if !queue.setup.is_complete() {
            let reason = "it has a kick, and lacks its size or its addresses to start";
            queue.notice = Some(Error::new(ErrorKind::WrongState, reason));
        }
        Ok(())
    }

    pub(super) fn set_vring_call(&mut self, vring: VringFd, fds: Vec<OwnedFd>) -> Result<(), Error> {
        let queue = queue_at(&mut self.queues, vring.index)?;
        let fd = eventfd(fds, vring)?;
        let set = match (&mut queue.setup.call, &fd) {
            (Some(call), Some(fd)) => call.set(fd),
            (None, Some(fd)) => Signal::new(fd).map(|call| queue.setup.call = Some(call)),
            (call, None) => {
                *call = None;
                Ok(())
            }
        };
        set.map_err(|error| error.of("call eventfd").on_queue(vring.index))?;
        if queue.started {
            // The driver may sleep on an interrupt that went to the eventfd before this one.
            queue.signal();
        }
        Ok(())
    }

    pub(super) fn set_vring_error(&mut self, vring: VringFd, fds: Vec<OwnedFd>) -> Result<(), Error> {
        queue_at(&mut self.queues, vring.index)?.setup.error = eventfd(fds, vring)?;
        Ok(())
    }

    /// GET_VRING_BASE: takes no more requests from a queue. Returns its number; it has stopped once none is unfinished.
    pub(super) fn begin_vring_stop(
        &mut self,
        VringState { index, .. }: VringState,
        changes: &mut Vec<Change>,
    ) -> Result<u16, Error> {
        let queue = queue_at(&mut self.queues, index)?;
        let index = index as u16;
        (queue.stopping, queue.live) = (true, false);
        if queue.setup.kick.take().is_some() {
            changes.push(Change::Unkick { queue: index });
        }
        changes.push(Change::Stop { queue: index });
        Ok(index)
    }

    /// RESET_DEVICE: abandons the requests of all queues.
    pub(super) fn abandon_queues(&mut self, changes: &mut Vec<Change>) {
        for (index, queue) in (0..).zip(&mut self.queues) {
            queue.abandon();
            if queue.setup.kick.take().is_some() {
                changes.push(Change::Unkick { queue: index });
            }
            changes.push(Change::Stop { queue: index });
        }
    }

    fn stopped_queue(&mut self, index: u32) -> Result<&mut Queue, Error> {
        let queue = queue_at(&mut self.queues, index)?;
        if queue.started {
            let reason = "the queue is started: stop it with GET_VRING_BASE first";
            return Err(Error::new(ErrorKind::WrongState, reason).on_queue(index));
        }
        Ok(queue)
    }

    /// Starts a queue that has all it needs, and decides whether requests may be taken from it.
    pub(super) fn refresh(&mut self, index: u16) {
        let negotiated = |bit| self.features & bit != 0;
        let queue = &mut self.queues[usize::from(index)];
        if queue.setup.is_complete() && !queue.started && !queue.stopping {
            let features = RingFeatures {
                event_idx: negotiated(feature::RING_EVENT_IDX),
                indirect: negotiated(feature::RING_INDIRECT_DESC),
            };
            let of_front_end = self.table.as_ref().and_then(|table| table.queue(index, queue.setup.size));
            let inflight = of_front_end.or_else(|| self.own_table.queue(index, queue.setup.size));
            let inflight = inflight.expect("our own table has a place for every queue of every size");
            match queue.start(&self.memory, inflight, features) {
                Ok(()) => {}
                Err(_) if self.memory.is_empty() => {
                    self.report_not_shared("the VMM's memory is not shared: it has handed over no memory");
                }
                Err(error) => queue.notice = Some(error),
            }
        }
        let enabled_by_default = self.features & F_PROTOCOL_FEATURES == 0;
        let queue = &mut self.queues[usize::from(index)];
        let enabled = queue.setup.enabled.unwrap_or(enabled_by_default);
        queue.live = queue.started && queue.ring.is_some() && enabled && !queue.stopping && !queue.broken;
    }
}

fn queue_at(queues: &mut [Queue], index: u32) -> Result<&mut Queue, Error> {
    let offered = queues.len() as u32;
    queues.get_mut(index as usize).ok_or_else(|| {
        Error::new(ErrorKind::OutOfBounds, "the device has no such queue")
            .on_queue(index)
            .above(index, offered - 1)
    })
}

/// The eventfd of a SET_VRING_KICK, _CALL or _ERR. A file that is clearly none is refused.
fn eventfd(fds: Vec<OwnedFd>, vring: VringFd) -> Result<Option<OwnedFd>, Error> {
    let Some(fd) = fds.into_iter().next().filter(|_| vring.has_fd) else { return Ok(None) };
    let file = rustix::fs::fstat(&fd).map_err(|e| Error::io("fstat failed", e).on_queue(vring.index))?;
    // An eventfd has no file type at all.
    if file.st_mode & libc::S_IFMT != 0 {
        return Err(not_an_eventfd().on_queue(vring.index));
    }
    Ok(Some(fd))
}
