//! A worker of the test's: asks for chunks, and reads them where they are.

use crate::scene::SIZE;
use rustix::fs::{FlockOperation, flock};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType, connect, recvmsg, send, sendmsg, socket,
};
use spillway_image::Residency;
use spillway_image::asks::{Answer, Opened, answered, ask, open};
use spillway_registry::serve::{ControlReply, ControlRequest};
use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// What came.
#[derive(Debug)]
pub enum Got {
    Resident,
    Passed(Vec<u8>),
    Damaged,
}

pub struct Client {
    socket: OwnedFd,
    image: Option<(File, Residency)>,
    size_bytes: u64,
}

impl Drop for Client {
    /// Lets go of the image at once. A program that another test is starting has copies of all descriptors until it runs, and a lock
    /// that only closes with its last copy.
    fn drop(&mut self) {
        if let Some((file, _)) = &self.image {
            flock(file, FlockOperation::Unlock).unwrap();
        }
    }
}

impl Client {
    pub fn connect(path: &Path) -> Client {
        Client::try_connect(path).expect("it listens")
    }

    pub fn try_connect(path: &Path) -> Option<Client> {
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).ok()?;
        Some(Client { socket, image: None, size_bytes: SIZE })
    }

    pub fn open(path: &Path, root: &[u8; 32]) -> Client {
        Client::open_sized(path, root, SIZE)
    }

    /// Opens an image of another size.
    pub fn open_sized(path: &Path, root: &[u8; 32], size_bytes: u64) -> Client {
        let mut client = Client::connect(path);
        client.size_bytes = size_bytes;
        send(&client.socket, &open(root), SendFlags::NOSIGNAL).unwrap();
        let (packet, mut fds) = client.receive();
        let opened = Opened { size_bytes, chunk_bytes: 1 << 20 };
        assert_eq!(Opened::parse(&packet), Some(opened));
        let (memory, file) = (fds.pop().unwrap(), File::from(fds.pop().unwrap()));
        let residency = Residency::open(memory.as_fd(), size_bytes.div_ceil(1 << 20)).unwrap();
        client.image = Some((file, residency));
        client
    }

    /// Sends a request as the daemon does.
    pub fn control(&self, request: &ControlRequest, fds: &[BorrowedFd<'_>]) -> ControlReply {
        let packet = serde_json::to_vec(request).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        sendmsg(&self.socket, &[IoSlice::new(&packet)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
        serde_json::from_slice(&self.receive().0).unwrap()
    }

    fn receive(&self) -> (Vec<u8>, Vec<OwnedFd>) {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        );
        let len = got.map_or(0, |got| got.bytes);
        let rights = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        (bytes[..len].to_vec(), rights.flatten().collect())
    }

    /// Sends a packet, and returns what comes; nothing if the other side has gone.
    pub fn say(&self, packet: &[u8]) -> Vec<u8> {
        send(&self.socket, packet, SendFlags::NOSIGNAL).unwrap();
        self.receive().0
    }

    pub fn ask(&mut self, chunk: u32) {
        assert!(self.try_ask(chunk), "it is there");
    }

    /// False: the other side has gone.
    pub fn try_ask(&mut self, chunk: u32) -> bool {
        send(&self.socket, &ask(chunk), SendFlags::NOSIGNAL).is_ok()
    }

    /// The next answer; none if the other side has gone.
    pub fn try_answer(&mut self) -> Option<(u32, Got)> {
        let (packet, mut fds) = self.receive();
        let (chunk, kind) = answered(&packet)?;
        let got = match kind {
            Answer::Resident => Got::Resident,
            Answer::Damaged => Got::Damaged,
            Answer::Passed => {
                let file = File::from(fds.pop().unwrap());
                let mut bytes = vec![0; self.chunk_len(chunk)];
                file.read_exact_at(&mut bytes, 0).unwrap();
                Got::Passed(bytes)
            }
        };
        Some((chunk, got))
    }

    pub fn answer(&mut self) -> (u32, Got) {
        self.try_answer().expect("it is there")
    }

    pub fn get(&mut self, chunk: u32) -> Got {
        self.ask(chunk);
        let (of, got) = self.answer();
        assert_eq!(of, chunk);
        got
    }

    fn chunk_len(&self, chunk: u32) -> usize {
        (self.size_bytes - (u64::from(chunk) << 20)).min(1 << 20) as usize
    }

    pub fn has(&self, chunk: u32) -> bool {
        self.image.as_ref().unwrap().1.has(chunk.into())
    }

    pub fn read(&self, chunk: u32) -> Vec<u8> {
        let mut bytes = vec![0; self.chunk_len(chunk)];
        self.image.as_ref().unwrap().0.read_exact_at(&mut bytes, u64::from(chunk) << 20).unwrap();
        bytes
    }
}
