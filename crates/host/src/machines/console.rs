//! Connections to what a machine shows: its console hub, and its screen. Owns the connections, and how many clients of the
//! API each machine has.
//!
//! Invariants: neither the guest nor another client can block a thread of the daemon. The daemon never speaks with a
//! process that is not the machine's VMM for its screen, whatever that VMM puts in place of its socket.

use super::run::MachineFolders;
use super::views::MachineReader;
use crate::error::HostError;
use crate::hypervisor::qemu;
use crate::short_path::ShortPath;
use rustix::net::{RecvFlags, SendFlags};
use spillway_api::{DisplayKind, ErrorCode, Name};
use spillway_control::console::{MAX_PACKET_BYTES, ToHub, connect};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

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

    /// Sends a message, as soon as the hub reads it. Cancel safe.
    pub async fn send(&self, message: ToHub<'_>) -> io::Result<()> {
        let packet = message.packet();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        self.0.async_io(Interest::WRITABLE, |hub| Ok(rustix::net::send(hub, &packet, flags)?)).await.map(drop)
    }
}

/// A connection to the screen of a machine, over which RFB is spoken.
pub struct Screen(UnixStream);

impl Screen {
    /// Connects to the screen of the machine that runs in this folder.
    pub async fn connect(folder: &Path) -> io::Result<Screen> {
        let folder = folder.join(qemu::SCREEN_FOLDER);
        let expected = std::fs::metadata(&folder)?.gid();
        let socket = ShortPath::of(&folder, qemu::SCREEN).map_err(io::Error::other)?;
        let connected = UnixStream::connect(socket.path()).await?;
        // The VMM may write in this folder, and could lead the way to a socket of somebody else. No other process is of the
        // folder's group.
        if connected.peer_cred()?.gid() != expected {
            return Err(io::Error::other("another process than its VMM serves it"));
        }
        Ok(Screen(connected))
    }

    /// Reads some bytes; 0: the end. Cancel safe.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.async_io(Interest::READABLE, || self.0.try_read(buffer)).await
    }

    /// Writes some bytes. Cancel safe.
    pub async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.0.async_io(Interest::WRITABLE, || self.0.try_write(bytes)).await
    }
}

/// What a machine shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum View {
    /// The serial console.
    Console,
    /// The screen.
    Screen,
}

impl View {
    /// Most clients of the API that a machine has at a time.
    fn most(self) -> usize {
        match self {
            View::Console => 8,
            View::Screen => 4,
        }
    }

    /// Name of the view.
    pub fn word(self) -> &'static str {
        match self {
            View::Console => "console",
            View::Screen => "screen",
        }
    }
}

/// The consoles and screens of all machines.
pub struct Consoles {
    reader: MachineReader,
    folders: MachineFolders,
    clients: Clients,
}

type Clients = Arc<Mutex<BTreeMap<(Name, View), usize>>>;

/// A place among the clients of a machine, which is free again when this is dropped.
pub struct ClientPlace {
    clients: Clients,
    key: (Name, View),
}

impl Consoles {
    /// Creates the consoles of these machines.
    pub(super) fn new(reader: MachineReader, folders: MachineFolders) -> Consoles {
        Consoles { reader, folders, clients: Clients::default() }
    }

    /// Finds the folder of a machine that has this, and takes a place among its clients. Blocks.
    pub fn admit(&self, name: &Name, view: View) -> Result<(PathBuf, ClientPlace), HostError> {
        let machine = self.reader.get(name)?;
        let conflict = |why: &str| HostError::new(ErrorCode::Conflict, format!("{name} {why}"));
        let Some(run) = machine.status.run.filter(|run| run.vmm_pid.is_some()) else {
            return Err(conflict("does not run: start it first"));
        };
        if run.console_socket.is_none() {
            return Err(conflict("has no console or screen here: who runs its VMM has it"));
        }
        if view == View::Screen && run.display == DisplayKind::None {
            return Err(conflict("has no screen: set 'display = \"vnc\"' in its catalog, and restart it"));
        }
        let place = take(&self.clients, (name.clone(), view))?;
        Ok((self.folders.of(name).path().to_owned(), place))
    }
}

fn take(clients: &Clients, key: (Name, View)) -> Result<ClientPlace, HostError> {
    let mut table = lock(clients);
    let count = table.entry(key.clone()).or_default();
    if *count >= key.1.most() {
        let (name, view) = key;
        let message =
            format!("{name} has {count} clients of its {}, which is the most: close one", view.word());
        return Err(HostError::new(ErrorCode::Busy, message));
    }
    *count += 1;
    drop(table);
    Ok(ClientPlace { clients: Arc::clone(clients), key })
}

fn lock(clients: &Clients) -> MutexGuard<'_, BTreeMap<(Name, View), usize>> {
    clients.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Drop for ClientPlace {
    fn drop(&mut self) {
        let mut table = lock(&self.clients);
        if let Some(count) = table.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                table.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_so_many_clients_of_each_kind() {
        let clients = Clients::default();
        let [one, other]: [Name; 2] = ["desk-001", "desk-002"].map(|name| name.parse().unwrap());
        for view in [View::Console, View::Screen] {
            let mut places: Vec<_> =
                (0..view.most()).map(|_| take(&clients, (one.clone(), view)).unwrap()).collect();
            let error = take(&clients, (one.clone(), view)).err().unwrap();
            assert_eq!(error.code, ErrorCode::Busy, "{error}");
            drop(take(&clients, (other.clone(), view)).unwrap());
            places.pop();
            drop(take(&clients, (one.clone(), view)).unwrap());
        }
        assert!(lock(&clients).is_empty());
    }
}
