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
use rustix::io::Errno;
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
use tokio::sync::Notify;

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
            let length = match rustix::net::recv(hub, &mut packet, RecvFlags::DONTWAIT) {
                // The hub had not read all of our packets. The kernel says so once, before what the hub has sent.
                Err(Errno::CONNRESET) => rustix::net::recv(hub, &mut packet, RecvFlags::DONTWAIT)?.0,
                received => received?.0,
            };
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

/// The clients of the API of all machines. A clone is the same table.
#[derive(Clone, Default)]
pub struct Clients(Arc<Mutex<ClientTable>>);

#[derive(Default)]
struct ClientTable {
    /// In the order in which they came.
    open: BTreeMap<(Name, View), Vec<OpenClient>>,
    next_id: u64,
}

struct OpenClient {
    id: u64,
    is_admin: bool,
    /// It was told to close, and does not count any more.
    is_closing: bool,
    close: Arc<Notify>,
}

/// A place among the clients of a machine, which is free again when this is dropped.
pub struct ClientPlace {
    clients: Clients,
    key: (Name, View),
    id: u64,
    close: Arc<Notify>,
}

impl Consoles {
    /// Creates the consoles of these machines.
    pub(super) fn new(reader: MachineReader, folders: MachineFolders) -> Consoles {
        Consoles { reader, folders, clients: Clients::default() }
    }

    /// Finds the folder of a machine that has this, and takes a place among its clients. Blocks.
    pub fn admit(
        &self,
        name: &Name,
        view: View,
        is_admin: bool,
    ) -> Result<(PathBuf, ClientPlace), HostError> {
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
        let place = self.clients.take(name, view, is_admin)?;
        Ok((self.folders.of(name).path().to_owned(), place))
    }
}

impl Clients {
    /// Takes a place. If all are taken, an administrator gets that of the client of another role that came first.
    pub fn take(&self, name: &Name, view: View, is_admin: bool) -> Result<ClientPlace, HostError> {
        let key = (name.clone(), view);
        let mut table = self.table();
        let id = table.next_id;
        table.next_id += 1;
        let clients = table.open.entry(key.clone()).or_default();
        let mut open: Vec<_> = clients.iter_mut().filter(|client| !client.is_closing).collect();
        if open.len() >= view.most() {
            let oldest = open.iter_mut().find(|client| is_admin && !client.is_admin).ok_or_else(|| {
                let (count, view) = (view.most(), view.word());
                let message =
                    format!("{name} has {count} clients of its {view}, which is the most: close one");
                HostError::new(ErrorCode::Busy, message)
            })?;
            oldest.is_closing = true;
            oldest.close.notify_one();
        }
        let close = Arc::new(Notify::new());
        clients.push(OpenClient { id, is_admin, is_closing: false, close: Arc::clone(&close) });
        drop(table);
        Ok(ClientPlace { clients: self.clone(), key, id, close })
    }

    fn table(&self) -> MutexGuard<'_, ClientTable> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl ClientPlace {
    /// Waits until the place is needed for an administrator. Cancel safe.
    pub async fn closed(&self) {
        self.close.notified().await;
    }
}

impl Drop for ClientPlace {
    fn drop(&mut self) {
        let mut table = self.clients.table();
        if let Some(clients) = table.open.get_mut(&self.key) {
            clients.retain(|client| client.id != self.id);
            if clients.is_empty() {
                table.open.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn is_closed(place: &ClientPlace) -> bool {
        place.closed().now_or_never().is_some()
    }

    #[test]
    fn a_machine_has_so_many_clients_of_each_kind() {
        let clients = Clients::default();
        let [one, other]: [Name; 2] = ["desk-001", "desk-002"].map(|name| name.parse().unwrap());
        for view in [View::Console, View::Screen] {
            let mut places: Vec<_> =
                (0..view.most()).map(|_| clients.take(&one, view, false).unwrap()).collect();
            let error = clients.take(&one, view, false).err().unwrap();
            assert_eq!(error.code, ErrorCode::Busy, "{error}");
            drop(clients.take(&other, view, false).unwrap());
            places.pop();
            drop(clients.take(&one, view, false).unwrap());
        }
        assert!(clients.table().open.is_empty());
    }

    #[test]
    fn an_administrator_gets_the_place_of_who_came_first() {
        let (clients, name) = (Clients::default(), "desk-001".parse().unwrap());
        let most = View::Screen.most();
        let take = |is_admin| clients.take(&name, View::Screen, is_admin);
        let admin = take(true).unwrap();
        let places: Vec<_> = (1..most).map(|_| take(false).unwrap()).collect();
        let mut admins = vec![admin];
        for place in &places {
            admins.push(take(true).unwrap());
            assert!(is_closed(place) && take(false).is_err());
        }
        assert!(take(true).is_err(), "administrators have all of them");
        assert!(!admins.iter().chain(&places).any(is_closed), "each was told once");
        // Whoever was told to close and has not done so yet takes no place.
        admins.pop();
        assert!(take(false).is_ok());
        drop((admins, places));
        assert!(clients.table().open.is_empty());
    }

    /// A hub that ends with keys on their way resets the connection, which says nothing of what it has sent before.
    #[tokio::test]
    async fn the_last_packets_of_a_hub_are_received() {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, accept, bind, listen, send, socket};
        use spillway_control::console::FromHub;
        let dir = tempfile::tempdir().unwrap();
        let hub = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        bind(&hub, &SocketAddrUnix::new(dir.path().join(qemu::CONSOLE)).unwrap()).unwrap();
        listen(&hub, 1).unwrap();
        let client = ConsoleClient::connect(dir.path()).unwrap();
        let connection = accept(&hub).unwrap();
        client.send(ToHub::Input(b"unread")).await.unwrap();
        send(&connection, &FromHub::Output(b"last words").packet(), SendFlags::empty()).unwrap();
        drop(connection);
        let packet = client.receive().await.unwrap();
        assert_eq!(FromHub::parse(&packet), Some(FromHub::Output(b"last words")));
        assert_eq!(client.receive().await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
