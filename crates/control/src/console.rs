//! Packets between the hub of a machine's console, which the supervisor of its disk runs, and the hub's clients: `spillway
//! machine console`, the daemon. Owns the format, and the connection of a client.
//!
//! The socket is a unix socket of type `SOCK_SEQPACKET`, so each packet arrives whole. Its first byte is its kind:
//!
//! | from | kind | rest of the packet |
//! | --- | --- | --- |
//! | hub | `o` | what the guest has written, 1 to 8,192 bytes: first what is kept of it, then what comes |
//! | hub | `b` | empty: what follows is from the VMM that is connected now, or was connected last, and begins a line |
//! | hub | `l` | how many bytes this client has lost because it reads too slowly: 8 bytes, little endian |
//! | hub | `k` | who has the keyboard: `y` this client, `f` nobody, `t` another client. Sent first, and at each change |
//! | hub | `x` | empty: the hub has its most clients, and closes this connection |
//! | client | `i` | keys, 1 to 8,192 bytes. They are ignored if another client has the keyboard; else this client has it from now on |
//! | client | `t` | empty: takes the keyboard from whoever has it |
//!
//! The hub closes the connection of a client that sends anything else. The end of a connection is the end of the disk.
//!
//! Invariant: a packet that is not listed here is no message, whoever sent it.

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Most bytes of output or of keys in one packet.
pub const MAX_DATA_BYTES: usize = 8 << 10;
/// Longest packet.
pub const MAX_PACKET_BYTES: usize = MAX_DATA_BYTES + 1;

/// The two sockets of a hub.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleSockets {
    /// Where clients connect.
    pub clients: PathBuf,
    /// Where the VMM connects its serial port: a stream socket, one connection at a time.
    pub vmm: PathBuf,
}

/// A packet of the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromHub<'a> {
    /// What the guest has written.
    Output(&'a [u8]),
    /// What follows is from the VMM that is connected now, or was connected last, and begins a line.
    Begin,
    /// How many bytes the client has lost.
    Lost(u64),
    /// Who has the keyboard.
    Keyboard(Keyboard),
    /// The hub has its most clients.
    Full,
}

/// Who has the keyboard, as one client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keyboard {
    /// This client.
    Yours,
    /// Nobody: the first client that sends keys gets it.
    Free,
    /// Another client.
    Taken,
}

/// A packet of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToHub<'a> {
    /// Keys.
    Input(&'a [u8]),
    /// Takes the keyboard.
    Take,
}

impl<'a> FromHub<'a> {
    /// Parses a packet. `None`: it is not a message.
    pub fn parse(packet: &'a [u8]) -> Option<FromHub<'a>> {
        let (&kind, rest) = packet.split_first()?;
        match (kind, rest) {
            (b'o', data) => is_data(data).then_some(FromHub::Output(data)),
            (b'b', []) => Some(FromHub::Begin),
            (b'l', count) => Some(FromHub::Lost(u64::from_le_bytes(count.try_into().ok()?))),
            (b'k', b"y") => Some(FromHub::Keyboard(Keyboard::Yours)),
            (b'k', b"f") => Some(FromHub::Keyboard(Keyboard::Free)),
            (b'k', b"t") => Some(FromHub::Keyboard(Keyboard::Taken)),
            (b'x', []) => Some(FromHub::Full),
            _ => None,
        }
    }

    /// The packet of this message.
    pub fn packet(&self) -> Vec<u8> {
        match self {
            FromHub::Output(data) => packet(b'o', data),
            FromHub::Begin => packet(b'b', &[]),
            FromHub::Lost(count) => packet(b'l', &count.to_le_bytes()),
            FromHub::Keyboard(Keyboard::Yours) => packet(b'k', b"y"),
            FromHub::Keyboard(Keyboard::Free) => packet(b'k', b"f"),
            FromHub::Keyboard(Keyboard::Taken) => packet(b'k', b"t"),
            FromHub::Full => packet(b'x', &[]),
        }
    }
}

impl<'a> ToHub<'a> {
    /// Parses a packet. `None`: it is not a message.
    pub fn parse(packet: &'a [u8]) -> Option<ToHub<'a>> {
        let (&kind, rest) = packet.split_first()?;
        match (kind, rest) {
            (b'i', data) => is_data(data).then_some(ToHub::Input(data)),
            (b't', []) => Some(ToHub::Take),
            _ => None,
        }
    }

    /// The packet of this message.
    pub fn packet(&self) -> Vec<u8> {
        match self {
            ToHub::Input(data) => packet(b'i', data),
            ToHub::Take => packet(b't', &[]),
        }
    }
}

fn is_data(data: &[u8]) -> bool {
    (1..=MAX_DATA_BYTES).contains(&data.len())
}

fn packet(kind: u8, rest: &[u8]) -> Vec<u8> {
    let mut packet = Vec::with_capacity(1 + rest.len());
    packet.push(kind);
    packet.extend_from_slice(rest);
    packet
}

/// Connects to a hub as a client. The path has at most 107 bytes. Reads and writes of the connection block unless
/// `is_nonblocking`. `EPROTOTYPE`: the socket is no hub's.
pub fn connect(path: &Path, is_nonblocking: bool) -> io::Result<OwnedFd> {
    let flags =
        SocketFlags::CLOEXEC | if is_nonblocking { SocketFlags::NONBLOCK } else { SocketFlags::empty() };
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_what_its_packet_says() {
        let data = [7; MAX_DATA_BYTES];
        for message in [
            FromHub::Output(b"x"),
            FromHub::Output(&data),
            FromHub::Begin,
            FromHub::Lost(u64::MAX - 3),
            FromHub::Keyboard(Keyboard::Yours),
            FromHub::Keyboard(Keyboard::Free),
            FromHub::Keyboard(Keyboard::Taken),
            FromHub::Full,
        ] {
            assert_eq!(FromHub::parse(&message.packet()), Some(message));
            assert!(message.packet().len() <= MAX_PACKET_BYTES);
        }
        for message in [ToHub::Input(b"x"), ToHub::Input(&data), ToHub::Take] {
            assert_eq!(ToHub::parse(&message.packet()), Some(message));
        }
    }

    #[test]
    fn anything_else_is_no_message() {
        let long = [b'i'; MAX_PACKET_BYTES + 1];
        for packet in [&b""[..], b"i", b"tx", b"?", b"o", &long] {
            assert_eq!(ToHub::parse(packet), None);
        }
        for packet in [&b""[..], b"o", b"bx", b"l1234567", b"l123456789", b"k", b"kz", b"kyy", b"x1", b"i1"] {
            assert_eq!(FromHub::parse(packet), None, "{packet:?}");
        }
    }
}
