//! A client of a machine's console hub. Owns the connection.
//!
//! Invariant: neither the guest nor another client of the hub can block a thread of the daemon.

use crate::hypervisor::qemu;
use crate::short_path::ShortPath;
use rustix::net::RecvFlags;
use spillway_control::console::{MAX_PACKET_BYTES, connect};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A connection to a console hub.
pub struct ConsoleClient(AsyncFd<OwnedFd>);

impl ConsoleClient {
    /// Connects to the hub of the machine that runs in this folder.
    pub fn connect(folder: &Path) -> io::Result<ConsoleClient> {
        let socket = ShortPath::of(folder, qemu::CONSOLE).map_err(io::Error::other)?;
        let connection = connect(socket.path(), true)?;
        // SAFETY: the descriptor is owned, so it stays open and the same as long as it is registered.
        Ok(ConsoleClient(unsafe { AsyncFd::register(connection) }?))
    }

    /// Receives the next packet. An error: the disk has ended, or the hub has closed the connection. Cancel safe.
    pub async fn receive(&self) -> io::Result<Vec<u8>> {
        let receive = |hub: &OwnedFd| {
            let mut packet = vec![0; MAX_PACKET_BYTES + 1];
            let (length, _) = rustix::net::recv(hub, &mut packet, RecvFlags::DONTWAIT)?;
            packet.truncate(length);
            Ok(packet)
        };
        let packet = self.0.async_io(Interest::READABLE, receive).await?;
        match packet.is_empty() {
            true => Err(io::ErrorKind::UnexpectedEof.into()),
            false => Ok(packet),
        }
    }
}
