//! The messages of a session that a later process has to repeat before it can go on with it. Owns copies of them, with
//! their fds; never looks at guest memory.
//!
//! Invariant: replayed in order, the packets bring a new [`super::Frontend`] to the state of the one that accepted the
//! last message. Each packet is one that was accepted, or takes the place of several.

use super::connection::Packet;
use super::message::{self, F_PROTOCOL_FEATURES, MemoryRegion, Message, VringState, code, request};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

/// The subject of a kept message, of which only the last one matters. In the order of the replay: a queue starts with the last of what it needs, its
/// kick, when all else is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Owner,
    ProtocolFeatures,
    Features,
    Config,
    Inflight,
    /// By guest address, of which no two are the same.
    Region(u64),
    Queue(u32, Part),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Size,
    Base,
    Addresses,
    Error,
    Call,
    Enable,
    Kick,
}

/// The messages of a session that still matter.
#[derive(Debug, Default)]
pub struct Record {
    kept: BTreeMap<Key, Packet>,
}

impl Record {
    /// Takes note of a message that was accepted; `answer` is what it was answered with.
    pub fn update(&mut self, packet: Packet, answer: Option<&[u8]>) {
        let parsed =
            message::split(&packet.bytes).and_then(|(h, payload)| Message::parse(h.request, payload));
        // A message that was accepted can be parsed.
        let Ok(message) = parsed else { return };
        let key = match message {
            Message::SetProtocolFeatures(_) => Key::ProtocolFeatures,
            Message::SetFeatures(features) => {
                if features & F_PROTOCOL_FEATURES == 0 {
                    // It has enabled all queues.
                    self.kept.retain(|key, _| !matches!(key, Key::Queue(_, Part::Enable)));
                }
                Key::Features
            }
            Message::SetOwner => {
                // Another device on the same connection, by the rule of `Frontend::begin_session`.
                let kicks = self.kept.keys().any(|key| matches!(key, Key::Queue(_, Part::Kick)));
                if self.kept.contains_key(&Key::Owner) && !kicks {
                    self.kept.retain(|key, _| *key == Key::ProtocolFeatures);
                }
                Key::Owner
            }
            // Of the configuration space one byte can be written.
            Message::SetConfig(..) => Key::Config,
            Message::SetInflightFd(_) => Key::Inflight,
            Message::SetMemTable(regions) => {
                self.kept.retain(|key, _| !matches!(key, Key::Region(_)));
                for (region, fd) in regions.into_iter().zip(packet.fds) {
                    self.add_region(region, fd);
                }
                return;
            }
            Message::AddMemReg(region) => {
                if let Some(fd) = packet.fds.into_iter().next() {
                    self.add_region(region, fd);
                }
                return;
            }
            Message::RemMemReg(region) => {
                self.kept.remove(&Key::Region(region.guest_address));
                return;
            }
            Message::SetVringNum(VringState { index, .. }) => Key::Queue(index, Part::Size),
            Message::SetVringBase(VringState { index, .. }) => Key::Queue(index, Part::Base),
            Message::SetVringAddr(addresses) => Key::Queue(addresses.index, Part::Addresses),
            Message::SetVringEnable(VringState { index, .. }) => Key::Queue(index, Part::Enable),
            Message::SetVringKick(vring) => Key::Queue(vring.index, Part::Kick),
            Message::SetVringCall(vring) => Key::Queue(vring.index, Part::Call),
            Message::SetVringErr(vring) => Key::Queue(vring.index, Part::Error),
            Message::GetVringBase(VringState { index, .. }) => {
                self.kept.remove(&Key::Queue(index, Part::Kick));
                // The answer has the shape of SET_VRING_BASE.
                let base = answer.and_then(|bytes| bytes.get(message::HEADER_BYTES..));
                if let Some(base) = base.filter(|base| base.len() == 8 && base[..4] == index.to_ne_bytes()) {
                    let bytes = request(code::SET_VRING_BASE, base);
                    self.kept.insert(Key::Queue(index, Part::Base), Packet { bytes, fds: Vec::new() });
                }
                return;
            }
            Message::ResetDevice => {
                self.kept.retain(|key, _| match key {
                    Key::Features | Key::Inflight => false,
                    Key::Queue(_, part) => *part == Part::Error,
                    Key::Owner | Key::ProtocolFeatures | Key::Config | Key::Region(_) => true,
                });
                return;
            }
            Message::GetFeatures
            | Message::ResetOwner
            | Message::GetProtocolFeatures
            | Message::GetQueueNum
            | Message::GetMaxMemSlots
            | Message::GetConfig(_)
            | Message::GetInflightFd(_) => return,
        };
        self.kept.insert(key, packet);
    }

    fn add_region(&mut self, region: MemoryRegion, fd: OwnedFd) {
        let bytes = request(code::ADD_MEM_REG, &region.to_bytes());
        self.kept.insert(Key::Region(region.guest_address), Packet { bytes, fds: vec![fd] });
    }

    /// What to replay, in this order.
    pub fn packets(&self) -> impl Iterator<Item = &Packet> {
        self.kept.values()
    }
}
