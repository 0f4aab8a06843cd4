//! Connects this terminal to a machine's serial console, over the hub of the machine's disk. Owns the terminal's settings
//! meanwhile.
//!
//! Invariant: at the end the terminal's settings are restored. The key that leaves always works, whether the guest reads
//! its keys or not.

use crate::error::{Exit, Failure};
use crate::output;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::termios::{OptionalActions, Termios};
use spillway_control::console::{FromHub, Keyboard, MAX_DATA_BYTES, MAX_PACKET_BYTES, ToHub, connect};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

/// The escape character Ctrl-], as in telnet and virsh.
const LEAVE: u8 = 0x1d;
/// Ctrl-T, which takes the keyboard while another client has it. Otherwise it is a key for the guest.
const TAKE: u8 = 0x14;
/// Bytes of keys from which on no further ones are read.
const MAX_WAITING_BYTES: usize = 64 << 10;

/// Runs until the user leaves, or the machine's disk ends. `takes`: whether the keyboard is taken from another client.
pub fn console(socket: &Path, takes: bool) -> Result<(), Failure> {
    let failed = |e: io::Error| Failure::new(Exit::Unavailable, format!("{}: {e}", socket.display()));
    // A socket address holds 107 bytes; its path may be longer.
    let folder = File::open(socket.parent().unwrap_or(Path::new("/"))).map_err(failed)?;
    let name = socket.file_name().unwrap_or_default();
    let short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    let hub = connect(&short, false).map_err(|e| match Errno::from_io_error(&e) {
        Some(Errno::PROTOTYPE) => {
            let message =
                "the machine was started by another version of spillwayd: stop it, and start it again";
            Failure::new(Exit::Refused, message)
        }
        _ => failed(e),
    })?;
    let terminal = Terminal::raw();
    output::complain("notice", "Ctrl-] leaves the console\r");
    let mut session = Session {
        hub,
        keys: VecDeque::new(),
        keyboard: None,
        leaves: false,
        must_take: takes || !terminal.is_terminal(),
        is_terminal: terminal.is_terminal(),
    };
    if takes {
        session.send(ToHub::Take).map_err(failed)?;
    }
    session.run().map_err(failed)
}

/// A connection to a hub.
struct Session {
    hub: OwnedFd,
    /// Keys that are not sent yet.
    keys: VecDeque<u8>,
    /// Who has the keyboard, once the hub has said it.
    keyboard: Option<Keyboard>,
    /// Whether the key that leaves was typed.
    leaves: bool,
    /// Whether keys are sent only once this client is known to have the keyboard, so that none is lost: input of a program
    /// is not typed again.
    must_take: bool,
    is_terminal: bool,
}

impl Session {
    fn run(&mut self) -> io::Result<()> {
        let mut stdin = io::stdin();
        let mut has_input = true;
        // What a program has written before it leaves is sent first; a person does not wait.
        while !self.leaves || !self.is_terminal && !self.keys.is_empty() {
            let mut here = PollFlags::empty();
            here.set(PollFlags::IN, !self.leaves && self.keys.len() < MAX_WAITING_BYTES);
            let mut there = PollFlags::IN;
            there.set(PollFlags::OUT, self.may_send());
            let mut fds = [
                PollFd::from_borrowed_fd(self.hub.as_fd(), there),
                PollFd::from_borrowed_fd(stdin.as_fd(), here),
            ];
            // Once its input has ended, poll(2) reports that again and again.
            let fds = if has_input && !here.is_empty() { &mut fds[..] } else { &mut fds[..1] };
            match poll(fds, None) {
                Err(Errno::INTR) => continue,
                polled => polled?,
            };
            let events = fds.iter().map(PollFd::revents).collect::<Vec<_>>();
            if events[0].intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) && !self.receive()? {
                return Ok(());
            }
            if events[0].contains(PollFlags::OUT) {
                self.send_keys()?;
            }
            if events.get(1).is_some_and(|typed| !typed.is_empty()) && !here.is_empty() {
                let mut buffer = [0; 4096];
                let length = stdin.read(&mut buffer)?;
                // Output of the machine is still shown.
                has_input = length > 0;
                self.typed(&buffer[..length])?;
            }
        }
        Ok(())
    }

    fn may_send(&self) -> bool {
        let may = matches!(self.keyboard, Some(Keyboard::Yours | Keyboard::Free));
        may && !self.keys.is_empty()
    }

    /// Handles keys.
    fn typed(&mut self, keys: &[u8]) -> io::Result<()> {
        let end = keys.iter().position(|key| *key == LEAVE);
        self.leaves = end.is_some();
        let keys = &keys[..end.unwrap_or(keys.len())];
        if self.is_terminal && self.keyboard == Some(Keyboard::Taken) {
            if keys.contains(&TAKE) {
                self.send(ToHub::Take)?;
            }
        } else {
            self.keys.extend(keys);
        }
        if self.leaves && self.may_send() {
            self.send_keys()?;
        }
        Ok(())
    }

    /// Sends keys as far as the hub reads them.
    fn send_keys(&mut self) -> io::Result<()> {
        if self.must_take && self.keyboard == Some(Keyboard::Free) {
            // The answer comes as the state of the keyboard.
            self.send(ToHub::Take)?;
            self.must_take = false;
            return Ok(());
        }
        while !self.keys.is_empty() {
            let (first, _) = self.keys.as_slices();
            let piece = &first[..first.len().min(MAX_DATA_BYTES)];
            let length = piece.len();
            match self.send_now(ToHub::Input(piece)) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                sent => sent?,
            }
            self.keys.drain(..length);
        }
        Ok(())
    }

    fn send_now(&self, message: ToHub<'_>) -> io::Result<()> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(&self.hub, &message.packet(), flags) {
            // What it has said last is read first.
            Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    fn send(&self, message: ToHub<'_>) -> io::Result<()> {
        match rustix::net::send(&self.hub, &message.packet(), SendFlags::NOSIGNAL) {
            Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Handles a packet of the hub. False: it has ended the connection, or nobody sees the output any more.
    fn receive(&mut self) -> io::Result<bool> {
        let mut packet = [0; MAX_PACKET_BYTES + 1];
        let length = match rustix::net::recv(&self.hub, &mut packet, RecvFlags::empty()) {
            Ok((length, _)) => length,
            // The hub had not read all keys. The kernel says so once, before what the hub has sent.
            Err(Errno::INTR | Errno::CONNRESET) => return Ok(true),
            Err(e) => return Err(e.into()),
        };
        if length == 0 {
            return Ok(false);
        }
        match packet.get(..length).and_then(FromHub::parse) {
            Some(FromHub::Output(output)) => {
                let mut screen = io::stdout();
                return Ok(screen.write_all(output).and_then(|()| screen.flush()).is_ok());
            }
            Some(FromHub::Keyboard(keyboard)) => self.on_keyboard(keyboard),
            Some(FromHub::Lost(bytes)) => {
                let text = format!(
                    "{bytes} bytes of the console were lost: they came faster than they were shown\r"
                );
                output::complain("notice", &text);
            }
            Some(FromHub::Full) => {
                return Err(io::Error::other("it has as many clients as it can have: end another one first"));
            }
            Some(FromHub::Begin) | None => {}
        }
        Ok(true)
    }

    fn on_keyboard(&mut self, keyboard: Keyboard) {
        let text = match (self.keyboard, keyboard) {
            (_, Keyboard::Taken) if self.is_terminal => {
                Some("another client has the keyboard: Ctrl-T takes it\r")
            }
            (_, Keyboard::Taken) => {
                Some("another client has the keyboard: the input waits until it is free\r")
            }
            (Some(Keyboard::Taken), Keyboard::Free) => Some("the keyboard is free: whoever types has it\r"),
            (Some(Keyboard::Taken), Keyboard::Yours) => Some("you have the keyboard\r"),
            (_, Keyboard::Free | Keyboard::Yours) => None,
        };
        if let Some(text) = text {
            output::complain("notice", text);
        }
        self.must_take |= !self.is_terminal && keyboard != Keyboard::Yours;
        self.keyboard = Some(keyboard);
    }
}

/// Puts the terminal into raw mode until this is dropped.
struct Terminal(Option<Termios>);

impl Terminal {
    fn raw() -> Terminal {
        let before = rustix::termios::tcgetattr(io::stdin()).ok();
        if let Some(before) = &before {
            let mut raw = before.clone();
            raw.make_raw();
            let _ = rustix::termios::tcsetattr(io::stdin(), OptionalActions::Now, &raw);
        }
        Terminal(before)
    }

    fn is_terminal(&self) -> bool {
        self.0.is_some()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = rustix::termios::tcsetattr(io::stdin(), OptionalActions::Now, before);
            let _ = output::print("\n");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn what_a_hub_has_sent_last_is_read_after_a_reset() {
        let (hub, ours) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let mut session = Session {
            hub: ours,
            keys: VecDeque::new(),
            keyboard: None,
            leaves: false,
            must_take: false,
            is_terminal: true,
        };
        session.send(ToHub::Input(b"unread")).unwrap();
        let last = FromHub::Keyboard(Keyboard::Free).packet();
        rustix::net::send(&hub, &last, SendFlags::NOSIGNAL).unwrap();
        drop(hub);
        while session.receive().unwrap() {}
        assert_eq!(session.keyboard, Some(Keyboard::Free));
    }
}
