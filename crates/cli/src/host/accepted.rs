//! Whether the other side has accepted a connection of a Unix socket, by sock_diag(7): a client cannot see it on its own
//! socket. Owns the two messages of that interface.
//!
//! Invariant: where the kernel does not answer, this says that it does not know.

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};
use std::os::fd::AsFd;

/// Netlink messages and their fields, of linux/netlink.h, sock_diag.h and unix_diag.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const REQUEST_DUMP: u16 = 0x301;
const ERROR: u16 = 2;
const DONE: u16 = 3;
const AF_UNIX: u8 = 1;
/// Sockets in the state TCP_LISTEN.
const LISTENING: u32 = 1 << 10;
/// The inodes of clients that a listener has not accepted.
const SHOW_ICONS: u32 = 8;
const ICONS: u16 = 3;
const HEADER_BYTES: usize = 16;
/// `struct unix_diag_msg`.
const BODY_BYTES: usize = 16;

/// Whether this connection waits to be accepted. `None`: the kernel does not say.
pub fn is_pending(connection: impl AsFd) -> Option<bool> {
    let inode = u32::try_from(rustix::fs::fstat(connection).ok()?.st_ino).ok()?;
    let family = AddressFamily::NETLINK;
    let kernel = socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG)).ok()?;
    send(&kernel, &request(), SendFlags::empty()).ok()?;
    let mut buffer = vec![0; 64 << 10];
    loop {
        // The kernel writes the answer in the call that asks for it: there is nothing to wait for.
        let (bytes, _) = recv(&kernel, &mut buffer[..], RecvFlags::DONTWAIT).ok()?;
        if let Some(found) = search(&buffer[..bytes], inode)? {
            return Some(found);
        }
    }
}

fn request() -> Vec<u8> {
    let mut bytes = Vec::with_capacity(40);
    bytes.extend(40_u32.to_ne_bytes());
    bytes.extend([SOCK_DIAG_BY_FAMILY, REQUEST_DUMP].map(u16::to_ne_bytes).concat());
    bytes.extend([0; 8]);
    bytes.extend([AF_UNIX, 0, 0, 0]);
    bytes.extend([LISTENING, 0, SHOW_ICONS, 0, 0].map(u32::to_ne_bytes).concat());
    bytes
}

/// Searches the messages of one read. `Some(None)`: the dump goes on. `None`: it is not an answer.
fn search(mut messages: &[u8], inode: u32) -> Option<Option<bool>> {
    while !messages.is_empty() {
        let length = number(messages, 0)? as usize;
        let kind = half(messages, 4)?;
        let message = messages.get(..length).filter(|_| length >= HEADER_BYTES)?;
        match kind {
            DONE => return Some(Some(false)),
            ERROR => return None,
            _ if pending(message, inode) => return Some(Some(true)),
            _ => messages = messages.get(length.next_multiple_of(4)..).unwrap_or_default(),
        }
    }
    Some(None)
}

/// Whether the inode is among the pending ones of a listener.
fn pending(message: &[u8], inode: u32) -> bool {
    let mut attributes = message.get(HEADER_BYTES + BODY_BYTES..).unwrap_or_default();
    while let (Some(length), Some(kind)) = (half(attributes, 0), half(attributes, 2)) {
        let Some(content) = attributes.get(4..length.into()) else { return false };
        if kind == ICONS && content.chunks_exact(4).any(|chunk| number(chunk, 0) == Some(inode)) {
            return true;
        }
        attributes = attributes.get(usize::from(length).next_multiple_of(4)..).unwrap_or_default();
    }
    false
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_connection_is_pending_until_it_is_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let [first, second] = [(); 2].map(|()| UnixStream::connect(dir.path().join("s")).unwrap());
        assert_eq!([is_pending(&first), is_pending(&second)], [Some(true); 2]);
        let _served = listener.accept().unwrap();
        assert_eq!([is_pending(&first), is_pending(&second)], [Some(false), Some(true)]);
    }

    #[test]
    fn what_is_no_answer_is_not_known() {
        let mut cut_off = request();
        cut_off.truncate(30);
        for answer in [&cut_off[..], &[0; 40], &[1; 3]] {
            assert_eq!(search(answer, 1), None);
        }
    }
}
