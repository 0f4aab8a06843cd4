//! A client of a machine's console hub, as another program would write it: packets of a `SOCK_SEQPACKET` socket whose first
//! byte is their kind. Owns the connection, and what has come over it.

use crate::process::wait_until;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send,
    socket_with, sockopt,
};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// Most bytes of keys in one packet.
const MOST_BYTES: usize = 8 << 10;

/// A client.
#[derive(Debug)]
pub struct Console {
    socket: OwnedFd,
    /// What the guest has written, as far as it was received.
    pub output: Vec<u8>,
    /// Where in it the output of the present VMM begins.
    pub begins_at: Option<usize>,
    /// Bytes that were lost.
    pub lost_bytes: u64,
    /// Who has the keyboard: `y` this client, `f` nobody, `t` another one.
    pub keyboard: Option<u8>,
    /// Whether the hub has closed the connection.
    pub has_ended: bool,
}

impl Console {
    /// Connects.
    pub fn connect(path: &Path) -> io::Result<Console> {
        // A socket address holds 107 bytes.
        let folder = File::open(path.parent().unwrap_or(Path::new("/")))?;
        let name = path.file_name().unwrap_or_default();
        let short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        connect(&socket, &SocketAddrUnix::new(short)?)?;
        let (output, begins_at) = (Vec::new(), None);
        Ok(Console { socket, output, begins_at, lost_bytes: 0, keyboard: None, has_ended: false })
    }

    /// Sends keys.
    pub fn keys(&self, keys: &[u8]) -> io::Result<()> {
        for piece in keys.chunks(MOST_BYTES) {
            self.packet(&[b"i", piece].concat())?;
        }
        Ok(())
    }

    /// Takes the keyboard.
    pub fn take(&self) -> io::Result<()> {
        self.packet(b"t")
    }

    /// Sends a packet, whatever it is.
    pub fn packet(&self, packet: &[u8]) -> io::Result<()> {
        send(&self.socket, packet, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Waits so long for the next packet. False: none came, or the connection has ended.
    pub fn receive(&mut self, patience: Duration) -> io::Result<bool> {
        sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(patience))?;
        let mut packet = vec![0; 64 << 10];
        let length = match recv(&self.socket, &mut packet, RecvFlags::empty()) {
            Ok((length, _)) => length,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(Errno::CONNRESET) => 0,
            Err(e) => return Err(e.into()),
        };
        let strange = || io::Error::other(format!("no packet of a hub: {:?}", &packet[..length.min(20)]));
        match packet[..length].split_first() {
            None => self.has_ended = true,
            Some((b'o', output)) => self.output.extend_from_slice(output),
            Some((b'b', [])) => self.begins_at = Some(self.output.len()),
            Some((b'k', [keyboard])) => self.keyboard = Some(*keyboard),
            Some((b'l', lost)) => {
                self.lost_bytes += u64::from_le_bytes(lost.try_into().map_err(|_| strange())?);
            }
            Some(_) => return Err(strange()),
        }
        Ok(!self.has_ended)
    }

    /// What the guest has written, as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.output).into_owned()
    }

    /// Receives until this holds, or so much time is over. Returns whether it does.
    pub fn until(&mut self, patience: Duration, is: impl Fn(&Console) -> bool) -> bool {
        let look = || {
            if is(self) || self.has_ended {
                return Some(is(self));
            }
            let _ = self.receive(Duration::from_millis(100));
            None
        };
        wait_until(patience, look).unwrap_or(false)
    }
}
