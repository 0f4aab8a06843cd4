//! The hub's loop: accepts the VMM and the clients, passes output to all clients and the keys of one of them to the VMM.
//!
//! What the guest writes is always read, at most [`BUDGET_BYTES`] per [`REFILL`] and once per [`GATHER`], so that a guest
//! cannot take a whole processor of the host: a serial port writes each byte by itself. There are at most [`MAX_CLIENTS`] clients; each has the history as its queue. At most
//! [`MAX_INPUT_BYTES`] keys wait for the VMM; the connection of the client that has the keyboard is not read meanwhile.
//!
//! Invariants: no call of this thread blocks but poll(2). A client is accepted only after all that VMMs of before have
//! written is in the history, so a client never takes an old VMM's output for that of the VMM that is connected now.

use super::client::{Beginning, Client, Received, refuse};
use super::history::History;
use crate::supervisor::socket::{Listener, Rights};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketType};
use spillway_control::console::{ConsoleSockets, Keyboard};
use spillway_control::{ServeSettings, SupervisorError};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Largest number of clients.
const MAX_CLIENTS: usize = 32;
/// Bytes of keys from which on no further ones are accepted.
const MAX_INPUT_BYTES: usize = 16 << 10;
/// Bytes of output that are read before others have their turn.
const TURN_BYTES: usize = 64 << 10;
/// Bytes of output that are read per [`REFILL`].
const BUDGET_BYTES: usize = 256 << 10;
const REFILL: Duration = Duration::from_millis(100);
/// Pause after output was read, in which more of it gathers. Not longer: the VMM's socket holds some 270 single bytes.
const GATHER: Duration = Duration::from_millis(1);
/// More than the buffer of a socket whose other end is closed.
const LAST_BYTES: usize = 4 << 20;
/// Most packets of one client before others have their turn.
const MAX_PACKETS: usize = 16;
/// VMMs that have come and gone unseen. More cannot wait in the queue of a listening socket.
const MAX_VMMS: usize = 256;
/// Pause in accepting connections after the host had no fds or memory for one.
const REST: Duration = Duration::from_secs(1);
/// What separates the outputs of two VMMs: ends the line, and the colours of the last one.
const SEPARATOR: &[u8] = b"\x1b[0m\r\n[spillway: the machine has been started again]\r\n";

/// The console hub of a disk. Clients see the end of their connections when it is dropped.
#[derive(Debug)]
pub struct ConsoleHub {
    /// Closed to end the thread.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl ConsoleHub {
    /// Creates the sockets, and starts the thread. Only this process's user may connect; whoever shall run the VMM is let
    /// in by others.
    pub fn start(settings: &ServeSettings) -> Result<Option<ConsoleHub>, SupervisorError> {
        match &settings.console {
            Some(sockets) => ConsoleHub::on(sockets).map(Some),
            None => Ok(None),
        }
    }

    fn on(sockets: &ConsoleSockets) -> Result<ConsoleHub, SupervisorError> {
        let rights = Rights { mode: 0o600, group: None };
        let clients = Listener::bind_as(&sockets.clients, &rights, SocketType::SEQPACKET)?;
        let vmms = Listener::bind(&sockets.vmm, &rights)?;
        let cannot = |e| SupervisorError::internal("cannot start the console", e);
        let (stopped, stop) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|e| cannot(std::io::Error::from(e)))?;
        let hub = Hub::new(clients, vmms);
        let thread = std::thread::Builder::new().name("console".into());
        let thread = thread.spawn(move || hub.run(stopped.as_fd())).map_err(cannot)?;
        Ok(ConsoleHub { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for ConsoleHub {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Clone, Copy)]
enum Source {
    Stop,
    Vmm,
    Vmms,
    Clients,
    Client(u64),
}

/// State of the thread.
struct Hub {
    listener: Listener,
    vmm_listener: Listener,
    vmm: Option<OwnedFd>,
    history: History,
    beginning: Beginning,
    /// Whether something was written since the last separator.
    has_output: bool,
    clients: BTreeMap<u64, Client>,
    next_id: u64,
    /// The client that has the keyboard.
    holder: Option<u64>,
    /// Keys that wait for the VMM.
    input: VecDeque<u8>,
    budget_bytes: usize,
    refilled: Instant,
    /// Until when no output is read.
    gathers_until: Option<Instant>,
    /// Until when no connection is accepted.
    rests_until: Option<Instant>,
}

impl Hub {
    fn new(listener: Listener, vmm_listener: Listener) -> Hub {
        Hub {
            listener,
            vmm_listener,
            vmm: None,
            history: History::default(),
            beginning: Beginning::default(),
            has_output: false,
            clients: BTreeMap::new(),
            next_id: 1,
            holder: None,
            input: VecDeque::new(),
            budget_bytes: BUDGET_BYTES,
            refilled: Instant::now(),
            gathers_until: None,
            rests_until: None,
        }
    }

    fn run(mut self, stop: BorrowedFd<'_>) {
        while self.turn(stop) {}
    }

    /// Waits for events, and handles all that have come. False: the hub has to end.
    fn turn(&mut self, stop: BorrowedFd<'_>) -> bool {
        let now = Instant::now();
        self.rests_until = self.rests_until.filter(|&until| until > now);
        self.gathers_until = self.gathers_until.filter(|&until| until > now);
        if now.duration_since(self.refilled) >= REFILL {
            (self.budget_bytes, self.refilled) = (BUDGET_BYTES, now);
        }
        for (source, flags) in self.wait(stop, now) {
            match source {
                Source::Stop => return false,
                Source::Vmm => self.on_vmm(flags),
                Source::Vmms => drop(self.accept_vmm()),
                Source::Clients => self.accept_client(),
                Source::Client(id) => self.on_client(id, flags),
            }
        }
        true
    }

    fn wait(&self, stop: BorrowedFd<'_>, now: Instant) -> Vec<(Source, PollFlags)> {
        let mut sources = vec![(Source::Stop, stop, PollFlags::IN)];
        if let Some(vmm) = &self.vmm {
            let mut interest = PollFlags::empty();
            interest.set(PollFlags::IN, self.budget_bytes > 0 && self.gathers_until.is_none());
            interest.set(PollFlags::OUT, !self.input.is_empty());
            sources.push((Source::Vmm, vmm.as_fd(), interest));
        }
        if self.rests_until.is_none() {
            if self.vmm.is_none() {
                sources.push((Source::Vmms, self.vmm_listener.as_fd(), PollFlags::IN));
            }
            sources.push((Source::Clients, self.listener.as_fd(), PollFlags::IN));
        }
        for (&id, client) in &self.clients {
            let reads = self.holder != Some(id) || self.input.len() < MAX_INPUT_BYTES;
            if client.has_left && !reads {
                continue;
            }
            let interest = client.interest(&self.history, self.beginning, self.keyboard(id), reads);
            sources.push((Source::Client(id), client.fd(), interest));
        }
        let refill = (self.budget_bytes == 0).then_some(self.refilled + REFILL);
        let gathered = self.gathers_until.filter(|_| self.vmm.is_some());
        let until = [refill, gathered, self.rests_until].into_iter().flatten().min();
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(now);
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        let mut fds: Vec<_> =
            sources.iter().map(|(_, fd, interest)| PollFd::from_borrowed_fd(*fd, *interest)).collect();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Vec::new(),
            Err(_) => {
                // The host has no memory: this must not take a processor until it has.
                std::thread::sleep(REFILL);
                return Vec::new();
            }
        }
        let events = sources.iter().zip(&fds).map(|((source, ..), fd)| (*source, fd.revents()));
        events.filter(|(_, flags)| !flags.is_empty()).collect()
    }

    /// State of the keyboard as this client sees it.
    fn keyboard(&self, id: u64) -> Keyboard {
        match self.holder {
            None => Keyboard::Free,
            Some(holder) if holder == id => Keyboard::Yours,
            Some(_) => Keyboard::Taken,
        }
    }

    fn on_vmm(&mut self, flags: PollFlags) {
        if flags.intersects(PollFlags::HUP | PollFlags::ERR) {
            return self.end_vmm();
        }
        if flags.contains(PollFlags::IN) {
            let most = TURN_BYTES.min(self.budget_bytes);
            let Some(read) = self.read_vmm(most) else { return self.end_vmm() };
            self.budget_bytes -= read.min(most);
            self.gathers_until = (read < most).then(|| Instant::now() + GATHER);
        }
        if flags.contains(PollFlags::OUT) {
            self.write_vmm();
        }
    }

    /// Reads at most so many bytes. Returns how many; `None`: the connection has ended.
    fn read_vmm(&mut self, most: usize) -> Option<usize> {
        let Some(vmm) = &self.vmm else { return Some(0) };
        let mut buffer = [0; 8 << 10];
        let mut read = 0;
        while read < most {
            let piece = buffer.len().min(most - read);
            match rustix::net::recv(vmm, &mut buffer[..piece], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return None,
                Ok((length, _)) => {
                    self.history.append(&buffer[..length]);
                    self.has_output = true;
                    read += length;
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => return None,
            }
        }
        Some(read)
    }

    fn write_vmm(&mut self) {
        let Some(vmm) = &self.vmm else { return };
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(vmm, self.input.as_slices().0, flags) {
            Ok(sent) => drop(self.input.drain(..sent.min(self.input.len()))),
            Err(Errno::AGAIN | Errno::INTR) => {}
            // Also if it has only ended its reading side, which poll(2) does not show: it would be writable for ever.
            Err(_) => self.end_vmm(),
        }
    }

    /// Reads the last output of a VMM that has closed its connection. Keys that wait for it are dropped.
    fn end_vmm(&mut self) {
        let _ = self.read_vmm(LAST_BYTES);
        self.vmm = None;
        self.input.clear();
    }

    /// Accepts the next VMM, if one waits and none is connected. Returns whether it has.
    fn accept_vmm(&mut self) -> bool {
        if self.vmm.is_some() {
            return false;
        }
        match self.vmm_listener.accept() {
            Ok(None) => return false,
            Ok(Some(socket)) => {
                if self.has_output {
                    self.history.append(SEPARATOR);
                    self.has_output = false;
                }
                self.beginning = Beginning { at: self.history.end(), number: self.beginning.number + 1 };
                self.vmm = Some(socket);
                return true;
            }
            Err(_) => self.rests_until = Some(Instant::now() + REST),
        }
        false
    }

    fn accept_client(&mut self) {
        // The VMM that runs now may have connected after poll(2) looked at it, and before this client.
        for _ in 0..MAX_VMMS {
            if self.vmm.as_ref().is_some_and(has_hung_up) {
                self.end_vmm();
            }
            if self.vmm.is_some() || !self.accept_vmm() {
                break;
            }
        }
        // A VMM that could not be accepted may be before this client.
        if self.rests_until.is_some() {
            return;
        }
        match self.listener.accept() {
            Ok(None) => {}
            Ok(Some(socket)) if self.clients.len() >= MAX_CLIENTS => refuse(socket),
            Ok(Some(socket)) => {
                self.clients.insert(self.next_id, Client::new(socket, &self.history));
                self.next_id += 1;
            }
            Err(_) => self.rests_until = Some(Instant::now() + REST),
        }
    }

    fn on_client(&mut self, id: u64, flags: PollFlags) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.has_left |= flags.intersects(PollFlags::HUP | PollFlags::ERR);
        let reads = client.has_left || flags.contains(PollFlags::IN);
        // The last keys of one that has left are still passed on, up to the end of the connection.
        if reads && !self.read_client(id) {
            self.clients.remove(&id);
            self.holder = self.holder.filter(|&holder| holder != id);
            return;
        }
        let keyboard = self.keyboard(id);
        if let Some(client) = self.clients.get_mut(&id).filter(|_| flags.contains(PollFlags::OUT)) {
            client.send(&self.history, self.beginning, keyboard);
        }
    }

    /// Handles what a client has sent. False: the connection has ended.
    fn read_client(&mut self, id: u64) -> bool {
        for _ in 0..MAX_PACKETS {
            let Some(client) = self.clients.get(&id) else { return false };
            match client.receive() {
                Err(_) => return false,
                Ok(None) => break,
                Ok(Some(Received::Take)) => self.holder = Some(id),
                Ok(Some(Received::Input(keys))) => {
                    if *self.holder.get_or_insert(id) != id {
                        continue;
                    }
                    // Nobody is there to read them.
                    if self.vmm.is_some() {
                        self.input.extend(keys);
                    }
                    if self.input.len() >= MAX_INPUT_BYTES {
                        break;
                    }
                }
            }
        }
        true
    }
}

/// Whether the other end of a connection is closed.
fn has_hung_up(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

#[cfg(test)]
mod tests;
