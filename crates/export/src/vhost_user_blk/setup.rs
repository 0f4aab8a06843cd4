//! What the front end has set of a queue before it starts. Data: the messages write it, the queue reads it.
//!
//! Invariant: a size is 0 or a power of two up to [`MAX_QUEUE_SIZE`].

use super::error::Error;
use super::message::VringAddr;
use super::ring::MAX_QUEUE_SIZE;
use super::signal::Signal;
use crate::ErrorKind;
use std::os::fd::OwnedFd;

/// How the driver announces new requests.
pub(super) enum Kick {
    /// It raises this eventfd.
    Fd(OwnedFd),
    /// It does not: the queue is polled.
    Poll,
}

/// The ring features that the driver has negotiated.
#[derive(Clone, Copy, Default)]
pub(super) struct RingFeatures {
    /// `VIRTIO_F_EVENT_IDX`.
    pub event_idx: bool,
    /// `VIRTIO_F_INDIRECT_DESC`.
    pub indirect: bool,
}

/// What the front end has set by messages. Data: the queue uses it when it starts.
#[derive(Default)]
pub(super) struct Setup {
    /// SET_VRING_NUM: descriptors, a power of two; 0 until it comes.
    pub size: u16,
    /// SET_VRING_BASE: the next available index to take.
    pub base: u16,
    /// SET_VRING_ADDR.
    pub addresses: Option<VringAddr>,
    /// SET_VRING_ENABLE, once it has come.
    pub enabled: Option<bool>,
    /// SET_VRING_KICK.
    pub kick: Option<Kick>,
    /// SET_VRING_CALL: interrupts the driver.
    pub call: Option<Signal>,
    /// SET_VRING_ERR: raised when the queue breaks.
    pub error: Option<OwnedFd>,
    /// An earlier process has served this queue since it was set up: its table holds, whatever the base.
    pub resumed: bool,
}

impl Setup {
    /// Whether a queue can be started with it.
    pub(super) fn is_complete(&self) -> bool {
        self.kick.is_some() && self.addresses.is_some() && self.size > 0
    }
}

/// Checks the size that a front end gives a queue (2.7: a power of two).
pub(super) fn check_size(num: u32) -> Result<u16, Error> {
    match u16::try_from(num) {
        Ok(size) if size.is_power_of_two() && size <= MAX_QUEUE_SIZE => Ok(size),
        _ if num > u32::from(MAX_QUEUE_SIZE) => {
            Err(Error::new(ErrorKind::Limit, "the size is too large").above(num, MAX_QUEUE_SIZE))
        }
        _ => Err(Error::protocol("the size is not a power of two (virtio 2.7)").found(num)),
    }
}
