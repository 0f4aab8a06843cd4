//! The VMM's end of the connection: the messages that QEMU sends when a guest's driver starts its device, asks for its
//! configuration, or resets it.
//!
//! Owns the socket and the table of requests in flight; knows nothing of requests. Invariant: each message that has an answer, or
//! asks for an acknowledgement, is answered before the next one is sent, but for the stop of a device.

use super::memory::GuestMemory;
use super::ring::Ring;
use anyhow::{Context, Result, bail, ensure};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long an answer may take. A stop waits for requests, and they for a worker that has to be started.
const PATIENCE: Duration = Duration::from_secs(60);

const VERSION: u32 = 1;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;
/// VHOST_USER_F_PROTOCOL_FEATURES.
const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// MQ, REPLY_ACK, CONFIG, INFLIGHT_SHMFD: without CONFIGURE_MEM_SLOTS the memory comes as a table.
const PROTOCOL_FEATURES: u64 = 1 << 0 | 1 << 3 | 1 << 9 | 1 << 12;

/// Numbers of messages.
mod code {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
}

pub(super) struct Session {
    socket: UnixStream,
    /// QEMU keeps it until the device is reset.
    table: Option<OwnedFd>,
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|n| n.to_ne_bytes()).collect()
}

impl Session {
    pub(super) fn connect(path: &Path) -> Result<Session> {
        let socket =
            UnixStream::connect(path).with_context(|| format!("{}: cannot connect", path.display()))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let mut session = Session { socket, table: None };
        let offered = session.features()?;
        ensure!(offered & F_PROTOCOL_FEATURES != 0, "no protocol features are offered");
        let protocol = session.number(code::GET_PROTOCOL_FEATURES)?;
        ensure!(protocol & PROTOCOL_FEATURES == PROTOCOL_FEATURES, "{protocol:#x} does not suffice");
        session.send(code::SET_PROTOCOL_FEATURES, 0, &PROTOCOL_FEATURES.to_ne_bytes(), &[])?;
        session.tell(code::SET_OWNER, &[], &[])?;
        Ok(session)
    }

    /// Features that the device offers.
    pub(super) fn features(&mut self) -> Result<u64> {
        self.number(code::GET_FEATURES)
    }

    /// Queues that the device offers.
    pub(super) fn queues(&mut self) -> Result<u64> {
        self.number(code::GET_QUEUE_NUM)
    }

    /// A field of the configuration.
    pub(super) fn config<const N: usize>(&mut self, offset: u32) -> Result<[u8; N]> {
        let size = N as u32;
        let question = [words(&[offset, size, 0]), vec![0; N]].concat();
        let (answer, _) = self.ask(code::GET_CONFIG, &question)?;
        ensure!(answer.len() == 12 + N, "a field of {N} bytes came as {} bytes", answer.len());
        Ok(answer[12..].try_into()?)
    }

    /// Writes one byte of the configuration.
    pub(super) fn set_config(&mut self, offset: u32, byte: u8) -> Result<()> {
        self.tell(code::SET_CONFIG, &[words(&[offset, 1, 0]), vec![byte]].concat(), &[])
    }

    /// Starts the device with these features of the driver's choice, and the queues that it has made.
    pub(super) fn start(&mut self, features: u64, memory: &GuestMemory, rings: &[Ring]) -> Result<()> {
        self.tell(code::SET_FEATURES, &(features | F_PROTOCOL_FEATURES).to_ne_bytes(), &[])?;
        self.lend_table(rings.len() as u16, rings[0].size())?;
        self.lend_memory(memory)?;
        for (i, ring) in (0u32..).zip(rings) {
            self.tell(code::SET_VRING_NUM, &words(&[i, u32::from(ring.size())]), &[])?;
            self.tell(code::SET_VRING_BASE, &words(&[i, 0]), &[])?;
            let [descriptors, available, used] = ring.areas().map(GuestMemory::user);
            let mut addresses = words(&[i, 0]);
            [descriptors, used, available, 0].iter().for_each(|n| addresses.extend(n.to_ne_bytes()));
            self.tell(code::SET_VRING_ADDR, &addresses, &[])?;
            let index = u64::from(i).to_ne_bytes();
            self.tell(code::SET_VRING_KICK, &index, &[ring.kick.as_fd()])?;
            self.tell(code::SET_VRING_CALL, &index, &[ring.call.as_fd()])?;
        }
        (0..rings.len() as u32).try_for_each(|i| self.tell(code::SET_VRING_ENABLE, &words(&[i, 1]), &[]))
    }

    /// Stops the queues, as a write of 0 to the device's status does, and drops the table. `while_waiting` runs when the
    /// device has been asked and has perhaps not answered yet.
    pub(super) fn stop(&mut self, queues: u32, while_waiting: impl FnOnce()) -> Result<()> {
        for i in 0..queues {
            self.send(code::SET_VRING_ENABLE, 0, &words(&[i, 0]), &[])?;
        }
        let mut while_waiting = Some(while_waiting);
        for i in 0..queues {
            self.send(code::GET_VRING_BASE, 0, &words(&[i, 0]), &[])?;
            while_waiting.take().into_iter().for_each(|run| run());
            let (answer, _) = self.answer(code::GET_VRING_BASE).context("a queue does not stop")?;
            ensure!(answer.len() == 8 && answer[..4] == i.to_ne_bytes(), "the answer is of another queue");
        }
        self.table = None;
        Ok(())
    }

    fn lend_table(&mut self, queues: u16, size: u16) -> Result<()> {
        let mut wanted = vec![0; 16];
        [queues, size].iter().for_each(|n| wanted.extend(n.to_ne_bytes()));
        wanted.resize(24, 0);
        let (description, fd) = self.ask(code::GET_INFLIGHT_FD, &wanted)?;
        let fd = fd.context("the table of requests in flight came without its memory")?;
        self.tell(code::SET_INFLIGHT_FD, &description, &[fd.as_fd()])?;
        self.table = Some(fd);
        Ok(())
    }

    fn lend_memory(&mut self, memory: &GuestMemory) -> Result<()> {
        let regions = memory.regions();
        let mut table = words(&[regions.len() as u32, 0]);
        for region in regions {
            let fields = [region.guest, region.bytes, region.user, region.file_offset];
            fields.iter().for_each(|n| table.extend(n.to_ne_bytes()));
        }
        // SAFETY: the memory lives as long as its borrow, and with it the descriptor.
        let fd = unsafe { BorrowedFd::borrow_raw(memory.fd()) };
        self.tell(code::SET_MEM_TABLE, &table, &[fd; 2])
    }

    fn number(&mut self, request: u32) -> Result<u64> {
        let (answer, _) = self.ask(request, &[])?;
        Ok(u64::from_ne_bytes(answer[..].try_into().context("the answer is no number")?))
    }

    fn tell(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send(request, NEED_REPLY, payload, fds)?;
        let (answer, _) = self.answer(request)?;
        ensure!(answer == [0; 8], "message {request} was refused");
        Ok(())
    }

    fn ask(&mut self, request: u32, payload: &[u8]) -> Result<(Vec<u8>, Option<OwnedFd>)> {
        self.send(request, 0, payload, &[])?;
        self.answer(request)
    }

    fn send(&mut self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let message = [words(&[request, VERSION | flags, payload.len() as u32]), payload.to_vec()].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        ensure!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)), "too many descriptors");
        let sent = sendmsg(&self.socket, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL);
        let sent = sent.with_context(|| format!("cannot send message {request}"))?;
        ensure!(sent == message.len(), "message {request} was sent in part");
        Ok(())
    }

    fn answer(&mut self, request: u32) -> Result<(Vec<u8>, Option<OwnedFd>)> {
        let mut header = [0; 12];
        let mut fd = None;
        self.receive(&mut header, &mut fd).with_context(|| format!("no answer to message {request}"))?;
        let [answered, flags, size] = header.as_chunks::<4>().0 else { bail!("a header has three words") };
        let [answered, flags, size] = [answered, flags, size].map(|word| u32::from_ne_bytes(*word));
        ensure!(answered == request && flags == VERSION | REPLY, "message {answered} answers {request}");
        ensure!(size <= 4096, "an answer of {size} bytes");
        let mut payload = vec![0; size as usize];
        if size > 0 {
            self.receive(&mut payload, &mut fd)?;
        }
        Ok((payload, fd))
    }

    fn receive(&mut self, to: &mut [u8], fd: &mut Option<OwnedFd>) -> Result<()> {
        let mut got = 0;
        while got < to.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(&mut to[got..])];
            let received = match recvmsg(&self.socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => continue,
                other => other?,
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(mut fds) = message {
                    *fd = fds.next();
                }
            }
            ensure!(received.bytes > 0, "the disk has closed the connection");
            got += received.bytes;
        }
        Ok(())
    }
}
