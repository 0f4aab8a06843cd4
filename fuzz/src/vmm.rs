//! A VMM as small as can be: a control socket, guest memory in a memfd that is written through the file, and the
//! messages that set a queue up. Shares no code with the export.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Bytes of guest memory. It lies at guest address 0, so that small numbers are addresses.
pub const MEMORY: u64 = 64 << 10;
/// The VMM's own address of it.
pub const USER: u64 = 0x10_0000;
/// Most file descriptors with one message.
const MAX_FDS: usize = 16;

pub mod code {
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}

/// The VMM's end of the control socket.
pub struct Vmm(OwnedFd);

/// A reply: the message that it answers, its payload, its descriptors.
pub type Reply = (u32, Vec<u8>, Vec<OwnedFd>);

impl Vmm {
    /// Both ends.
    pub fn pair() -> (Vmm, OwnedFd) {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .expect("a socket pair can be made");
        (Vmm(ours), theirs)
    }

    /// Sends bytes as they are. False: the other side does not take them (now, or any more).
    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "the space is made for them");
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, flags) == Ok(bytes.len())
    }

    /// Sends a message; `flags` as in its header.
    pub fn send(&self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut bytes = words32(&[request, flags, payload.len() as u32]);
        bytes.extend_from_slice(payload);
        self.send_bytes(&bytes, fds)
    }

    /// The next reply that has arrived. Panics on what a back end may not send.
    pub fn reply(&self) -> Option<Reply> {
        let mut header = [0; 12];
        let mut fds = Vec::new();
        if !self.receive(&mut header, &mut fds) {
            return None;
        }
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("four bytes"));
        assert_eq!(word(4), 1 | 4, "a reply's flags are version 1 and the reply bit");
        let mut payload = vec![0; word(8) as usize];
        assert!(payload.len() <= 512 && (payload.is_empty() || self.receive(&mut payload, &mut fds)));
        Some((word(0), payload, fds))
    }

    fn receive(&self, to: &mut [u8], fds: &mut Vec<OwnedFd>) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let len = to.len();
        let Ok(received) = recvmsg(&self.0, &mut [IoSliceMut::new(to)], &mut control, flags) else {
            return false;
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        assert!(received.bytes == 0 || received.bytes == len, "half a reply");
        received.bytes > 0
    }
}

pub fn words32(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

pub fn words64(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

/// A memfd of so many bytes.
pub fn memory(bytes: u64) -> File {
    let fd = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd can be made");
    ftruncate(&fd, bytes).expect("and sized");
    fd.into()
}

/// An eventfd on which a write would wait: it is full and not non-blocking.
pub fn event() -> OwnedFd {
    let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd can be made");
    rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).expect("an empty eventfd takes that");
    fd
}

/// The whole of guest memory as ADD_MEM_REG and REM_MEM_REG carry it.
pub fn region() -> Vec<u8> {
    words64(&[0, 0, MEMORY, USER, 0])
}

/// The lower half of guest memory, with the queue, or the upper: at user addresses that do not touch.
pub fn half(upper: bool) -> Vec<u8> {
    [vec![0; 8], half_region(upper)].concat()
}

fn half_region(upper: bool) -> Vec<u8> {
    let at = if upper { MEMORY / 2 } else { 0 };
    words64(&[at, MEMORY / 2, USER + 2 * at, at])
}

/// Both halves as SET_MEM_TABLE carries them.
pub fn both_halves() -> Vec<u8> {
    [words32(&[2, 0]), half_region(false), half_region(true)].concat()
}

/// Entries of the queue that [`set_up`] makes.
pub const QUEUE: u16 = 16;
/// Where its areas lie in guest memory.
pub const DESCRIPTORS: u64 = 0;
pub const AVAILABLE: u64 = 0x100;
pub const USED: u64 = 0x200;

/// SET_VRING_NUM, _ADDR, _BASE, _CALL, _KICK and _ENABLE of queue 0.
pub fn start_queue(vmm: &Vmm, base: u32) -> bool {
    let event = event();
    let addresses = [0, USER + DESCRIPTORS, USER + USED, USER + AVAILABLE, 0];
    vmm.send(code::SET_VRING_NUM, 1, &words32(&[0, u32::from(QUEUE)]), &[])
        && vmm.send(code::SET_VRING_BASE, 1, &words32(&[0, base]), &[])
        && vmm.send(code::SET_VRING_ADDR, 1, &words64(&addresses), &[])
        && vmm.send(code::SET_VRING_CALL, 1, &words64(&[0]), &[event.as_fd()])
        && vmm.send(code::SET_VRING_KICK, 1, &words64(&[0]), &[event.as_fd()])
        && vmm.send(code::SET_VRING_ENABLE, 1, &words32(&[0, 1]), &[])
}
