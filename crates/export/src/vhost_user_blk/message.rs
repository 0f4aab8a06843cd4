//! The messages of the vhost-user protocol, from bytes to a typed value and back. Owns the numbers of the
//! specification (docs/interop/vhost-user.rst in QEMU's tree) and the check of every payload's size; never
//! touches a socket, a file descriptor or guest memory.
//!
//! The definitions are our own: the dozen messages that a block device needs are fixed little structs, and the
//! `vhost` crate would bring its own endpoint, memory model and blocking reads with them.
//!
//! Invariant: [`Message::parse`] accepts a payload only if its size is the one that the specification gives
//! (or one of the sizes that known front ends send), and reads no byte beyond it.

use super::error::Error;
use crate::ErrorKind;

/// Bytes of a message header.
pub(super) const HEADER_BYTES: usize = 12;
/// Largest payload of any message that is known here: 8 regions, or 256 bytes of configuration.
pub(super) const MAX_PAYLOAD: usize = 512;
/// Most file descriptors that a message may carry (SET_MEM_TABLE).
pub(super) const MAX_FDS: usize = 8;
/// Bytes of configuration space that GET_CONFIG and SET_CONFIG may address.
pub(super) const MAX_CONFIG: usize = 256;
/// Bytes before the payload of GET_CONFIG and SET_CONFIG: offset, size, flags.
pub(super) const CONFIG_HEADER_BYTES: usize = 12;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// Bit 8 of SET_VRING_KICK, _CALL and _ERR: no file descriptor comes with it.
const VRING_NOFD: u64 = 1 << 8;
const VRING_INDEX_MASK: u64 = 0xff;

/// `VHOST_USER_F_PROTOCOL_FEATURES`, among the virtio features.
pub(super) const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// Protocol features (`VHOST_USER_PROTOCOL_F_*`) by the names of the specification.
pub(super) mod protocol {
    pub(in super::super) const MQ: u64 = 1 << 0;
    pub(in super::super) const REPLY_ACK: u64 = 1 << 3;
    pub(in super::super) const CONFIG: u64 = 1 << 9;
    pub(in super::super) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(in super::super) const RESET_DEVICE: u64 = 1 << 13;
    pub(in super::super) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
}

/// Declares the request codes, and the way back from a code to its name.
macro_rules! request_codes {
    ($($name:ident = $code:literal,)*) => {
        /// Request codes (`VHOST_USER_*`) by the names of the specification.
        pub(super) mod code {
            $(pub(in super::super) const $name: u32 = $code;)*
        }

        /// The name of a request code, if this device knows it.
        pub(super) fn name(code: u32) -> Option<&'static str> {
            match code {
                $($code => Some(stringify!($name)),)*
                _ => None,
            }
        }
    };
}

request_codes! {
    GET_FEATURES = 1,
    SET_FEATURES = 2,
    SET_OWNER = 3,
    RESET_OWNER = 4,
    SET_MEM_TABLE = 5,
    SET_VRING_NUM = 8,
    SET_VRING_ADDR = 9,
    SET_VRING_BASE = 10,
    GET_VRING_BASE = 11,
    SET_VRING_KICK = 12,
    SET_VRING_CALL = 13,
    SET_VRING_ERR = 14,
    GET_PROTOCOL_FEATURES = 15,
    SET_PROTOCOL_FEATURES = 16,
    GET_QUEUE_NUM = 17,
    SET_VRING_ENABLE = 18,
    GET_CONFIG = 24,
    SET_CONFIG = 25,
    GET_INFLIGHT_FD = 31,
    SET_INFLIGHT_FD = 32,
    RESET_DEVICE = 34,
    GET_MAX_MEM_SLOTS = 36,
    ADD_MEM_REG = 37,
    REM_MEM_REG = 38,
}

/// A message header that has been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub request: u32,
    pub need_reply: bool,
    pub size: usize,
}

impl Header {
    /// Checks version, direction and size. An `Err` means that the stream cannot be followed any further.
    pub(super) fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Error> {
        let mut reader = Reader(bytes);
        let (request, flags, size) = (reader.u32(), reader.u32(), reader.u32());
        let broken = |reason| Error::protocol(reason).in_message(request);
        let version = flags & VERSION_MASK;
        if version != VERSION {
            return Err(broken("wrong protocol version").unequal(version as usize, VERSION as usize));
        }
        if flags & FLAG_REPLY != 0 {
            return Err(broken("it is marked as a reply, but this side has asked nothing"));
        }
        if size as usize > MAX_PAYLOAD {
            return Err(broken("it announces more payload bytes than any message has")
                .above(size, MAX_PAYLOAD as u64));
        }
        Ok(Header { request, need_reply: flags & FLAG_NEED_REPLY != 0, size: size as usize })
    }
}

/// A reply as it goes over the socket.
pub(super) fn reply(request: u32, payload: &[u8]) -> Vec<u8> {
    message(request, FLAG_REPLY, payload)
}

/// A message that asks for no acknowledgement, as a front end sends it.
pub(super) fn request(request: u32, payload: &[u8]) -> Vec<u8> {
    message(request, 0, payload)
}

fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    for word in [request, VERSION | flags, payload.len() as u32] {
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    bytes.extend_from_slice(payload);
    bytes
}

/// Whether file descriptors belong to a whole message.
pub(super) fn takes_fds(bytes: &[u8]) -> bool {
    split(bytes).is_ok_and(|(header, payload)| {
        Message::parse(header.request, payload).is_ok_and(|message| message.fds() > 0)
    })
}

/// Takes a whole message apart: its header and its payload.
pub(super) fn split(bytes: &[u8]) -> Result<(Header, &[u8]), Error> {
    let short = || {
        Error::protocol("a message is shorter than its header").below(bytes.len() as u64, HEADER_BYTES as u64)
    };
    let (head, payload) = bytes.split_first_chunk().ok_or_else(short)?;
    let header = Header::parse(head)?;
    if payload.len() != header.size {
        return Err(Error::protocol("the payload has another size than the header announces")
            .unequal(payload.len(), header.size)
            .in_message(header.request));
    }
    Ok((header, payload))
}

/// "A vring state description".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VringState {
    pub index: u32,
    pub num: u32,
}

impl VringState {
    pub(super) fn to_bytes(self) -> [u8; 8] {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&self.index.to_ne_bytes());
        bytes[4..].copy_from_slice(&self.num.to_ne_bytes());
        bytes
    }
}

/// "A vring address description": user addresses of the three areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VringAddr {
    pub index: u32,
    pub descriptor: u64,
    pub used: u64,
    pub available: u64,
}

/// Payload of SET_VRING_KICK, _CALL and _ERR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VringFd {
    pub index: u32,
    pub has_fd: bool,
}

/// "Memory region description".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryRegion {
    pub guest_address: u64,
    pub size: u64,
    pub user_address: u64,
    pub mmap_offset: u64,
}

impl MemoryRegion {
    /// The payload of ADD_MEM_REG.
    pub(super) fn to_bytes(self) -> [u8; 40] {
        let mut bytes = [0; 40];
        let words = [self.guest_address, self.size, self.user_address, self.mmap_offset];
        for (to, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

/// "Inflight description". QEMU sends it padded to 24 bytes, the bare fields are 20.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Inflight {
    pub mmap_size: u64,
    pub mmap_offset: u64,
    pub num_queues: u16,
    pub queue_size: u16,
}

impl Inflight {
    pub(super) fn to_bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.mmap_size.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.mmap_offset.to_ne_bytes());
        bytes[16..18].copy_from_slice(&self.num_queues.to_ne_bytes());
        bytes[18..20].copy_from_slice(&self.queue_size.to_ne_bytes());
        bytes
    }
}

/// "Virtio device config space": which bytes are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConfigRange {
    pub offset: u32,
    pub size: u32,
    pub flags: u32,
}

/// A message from the front end whose payload has the right shape. Whether it makes sense now is for the
/// connection's owner to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    GetMaxMemSlots,
    SetMemTable(Vec<MemoryRegion>),
    AddMemReg(MemoryRegion),
    RemMemReg(MemoryRegion),
    SetVringNum(VringState),
    SetVringAddr(VringAddr),
    SetVringBase(VringState),
    GetVringBase(VringState),
    SetVringEnable(VringState),
    SetVringKick(VringFd),
    SetVringCall(VringFd),
    SetVringErr(VringFd),
    GetConfig(ConfigRange),
    SetConfig(ConfigRange, Vec<u8>),
    GetInflightFd(Inflight),
    SetInflightFd(Inflight),
    ResetDevice,
}

impl Message {
    /// Turns a payload into a message. `Err` says what is wrong with it; the caller adds which message it is.
    pub(super) fn parse(request: u32, payload: &[u8]) -> Result<Message, Error> {
        let exactly = |size: usize| {
            if payload.len() == size {
                Ok(Reader(payload))
            } else {
                Err(Error::protocol("the payload has the wrong size in bytes").unequal(payload.len(), size))
            }
        };
        // Front ends fill the payload of a question with anything.
        let question = |message| Ok(message);
        match request {
            code::GET_FEATURES => question(Message::GetFeatures),
            code::SET_FEATURES => Ok(Message::SetFeatures(exactly(8)?.u64())),
            code::SET_OWNER => question(Message::SetOwner),
            code::RESET_OWNER => question(Message::ResetOwner),
            code::GET_PROTOCOL_FEATURES => question(Message::GetProtocolFeatures),
            code::SET_PROTOCOL_FEATURES => Ok(Message::SetProtocolFeatures(exactly(8)?.u64())),
            code::GET_QUEUE_NUM => question(Message::GetQueueNum),
            code::GET_MAX_MEM_SLOTS => question(Message::GetMaxMemSlots),
            code::SET_MEM_TABLE => memory_table(payload).map(Message::SetMemTable),
            code::ADD_MEM_REG => Ok(Message::AddMemReg(exactly(40)?.single_region())),
            code::REM_MEM_REG => Ok(Message::RemMemReg(exactly(40)?.single_region())),
            code::SET_VRING_NUM => Ok(Message::SetVringNum(exactly(8)?.vring_state())),
            code::SET_VRING_ADDR => Ok(Message::SetVringAddr(exactly(40)?.vring_addr())),
            code::SET_VRING_BASE => Ok(Message::SetVringBase(exactly(8)?.vring_state())),
            code::GET_VRING_BASE => Ok(Message::GetVringBase(exactly(8)?.vring_state())),
            code::SET_VRING_ENABLE => Ok(Message::SetVringEnable(exactly(8)?.vring_state())),
            code::SET_VRING_KICK => Ok(Message::SetVringKick(exactly(8)?.vring_fd())),
            code::SET_VRING_CALL => Ok(Message::SetVringCall(exactly(8)?.vring_fd())),
            code::SET_VRING_ERR => Ok(Message::SetVringErr(exactly(8)?.vring_fd())),
            code::GET_CONFIG => config_range(payload).map(|(range, _)| Message::GetConfig(range)),
            code::SET_CONFIG => {
                let (range, bytes) = config_range(payload)?;
                if bytes.len() != range.size as usize {
                    return Err(Error::protocol("the payload has another size than its own header says")
                        .unequal(bytes.len(), range.size as usize));
                }
                Ok(Message::SetConfig(range, bytes.to_vec()))
            }
            code::GET_INFLIGHT_FD => inflight(payload).map(Message::GetInflightFd),
            code::SET_INFLIGHT_FD => inflight(payload).map(Message::SetInflightFd),
            code::RESET_DEVICE => question(Message::ResetDevice),
            _ => Err(Error::new(ErrorKind::UnknownMessage, "this device has no such message")),
        }
    }

    /// How many file descriptors must come with it. Surplus ones of a message that needs none are closed.
    pub(super) fn fds(&self) -> usize {
        match self {
            Message::SetMemTable(regions) => regions.len(),
            Message::AddMemReg(_) | Message::SetInflightFd(_) => 1,
            Message::SetVringKick(vring) | Message::SetVringCall(vring) | Message::SetVringErr(vring) => {
                usize::from(vring.has_fd)
            }
            _ => 0,
        }
    }

    /// Whether the message has a reply of its own, so that a plain acknowledgement cannot stand in for it.
    pub(super) fn has_reply(request: u32) -> bool {
        matches!(
            request,
            code::GET_FEATURES
                | code::GET_PROTOCOL_FEATURES
                | code::GET_QUEUE_NUM
                | code::GET_MAX_MEM_SLOTS
                | code::GET_VRING_BASE
                | code::GET_CONFIG
                | code::GET_INFLIGHT_FD
        )
    }
}

fn memory_table(payload: &[u8]) -> Result<Vec<MemoryRegion>, Error> {
    let short = |least: usize| {
        Error::protocol("the payload has too few bytes").below(payload.len() as u64, least as u64)
    };
    let (head, regions) = payload.split_at_checked(8).ok_or_else(|| short(8))?;
    let count = Reader(head).u32() as usize;
    if count > MAX_FDS {
        let error = Error::new(ErrorKind::Limit, "it has more memory regions than one message may have");
        return Err(error.above(count as u64, MAX_FDS as u64));
    }
    // Some front ends send the whole array of eight whatever the count says.
    let mut reader = Reader(regions.get(..count * 32).ok_or_else(|| short(8 + count * 32))?);
    Ok((0..count).map(|_| reader.region()).collect())
}

fn config_range(payload: &[u8]) -> Result<(ConfigRange, &[u8]), Error> {
    let (head, bytes) = payload.split_at_checked(CONFIG_HEADER_BYTES).ok_or_else(|| {
        Error::protocol("the payload has too few bytes")
            .below(payload.len() as u64, CONFIG_HEADER_BYTES as u64)
    })?;
    let mut reader = Reader(head);
    Ok((ConfigRange { offset: reader.u32(), size: reader.u32(), flags: reader.u32() }, bytes))
}

fn inflight(payload: &[u8]) -> Result<Inflight, Error> {
    if payload.len() != 20 && payload.len() != 24 {
        return Err(Error::protocol("the payload has neither 20 nor 24 bytes").found(payload.len() as u64));
    }
    let mut reader = Reader(payload);
    Ok(Inflight {
        mmap_size: reader.u64(),
        mmap_offset: reader.u64(),
        num_queues: reader.u16(),
        queue_size: reader.u16(),
    })
}

/// Takes numbers off the front of a slice whose size was checked before.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_first_chunk::<N>().expect("the payload's size was checked");
        self.0 = rest;
        *head
    }

    fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.take())
    }

    fn vring_state(&mut self) -> VringState {
        VringState { index: self.u32(), num: self.u32() }
    }

    fn vring_addr(&mut self) -> VringAddr {
        let index = self.u32();
        let _log_flags = self.u32();
        VringAddr { index, descriptor: self.u64(), used: self.u64(), available: self.u64() }
    }

    fn vring_fd(&mut self) -> VringFd {
        let word = self.u64();
        VringFd { index: (word & VRING_INDEX_MASK) as u32, has_fd: word & VRING_NOFD == 0 }
    }

    fn region(&mut self) -> MemoryRegion {
        MemoryRegion {
            guest_address: self.u64(),
            size: self.u64(),
            user_address: self.u64(),
            mmap_offset: self.u64(),
        }
    }

    fn single_region(&mut self) -> MemoryRegion {
        let _padding = self.u64();
        self.region()
    }
}
