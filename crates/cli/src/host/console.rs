//! Connects this terminal to a machine's serial console. Owns the terminal's settings meanwhile.
//!
//! Invariant: at the end the terminal's settings are restored.

use crate::error::{Exit, Failure};
use crate::output;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// The escape character Ctrl-], as in telnet and virsh.
const LEAVE: u8 = 0x1d;

/// Runs until the user leaves, or the machine ends.
pub fn console(socket: &Path) -> Result<(), Failure> {
    let failed = |e: io::Error| Failure::new(Exit::Unavailable, format!("{}: {e}", socket.display()));
    // A socket address holds 107 bytes; its path may be longer.
    let folder = File::open(socket.parent().unwrap_or(Path::new("/"))).map_err(failed)?;
    let name = socket.file_name().unwrap_or_default();
    let short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    let mut machine = UnixStream::connect(short).map_err(failed)?;
    let _terminal = Terminal::raw();
    output::complain(
        "notice",
        "Ctrl-] leaves the console, which serves one client at a time: if nothing appears, another is connected\r",
    );
    let (mut keys, mut screen) = (io::stdin(), io::stdout());
    let mut keyboard = true;
    let mut buffer = [0; 4096];
    loop {
        let typing = if keyboard { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = [
            PollFd::from_borrowed_fd(machine.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(keys.as_fd(), typing),
        ];
        match poll(&mut fds, None) {
            Err(Errno::INTR) => continue,
            polled => polled.map_err(|e| failed(e.into()))?,
        };
        let [said, typed] = [0, 1].map(|i| !fds[i].revents().is_empty());
        if said {
            let n = machine.read(&mut buffer).map_err(failed)?;
            if n == 0 || screen.write_all(&buffer[..n]).and_then(|()| screen.flush()).is_err() {
                return Ok(());
            }
        }
        if typed && keyboard {
            let n = keys.read(&mut buffer).map_err(failed)?;
            let typed = &buffer[..n];
            let end = typed.iter().position(|byte| *byte == LEAVE);
            machine.write_all(&typed[..end.unwrap_or(n)]).map_err(failed)?;
            if end.is_some() {
                return Ok(());
            }
            // The piped input has ended; output of the machine is still shown.
            keyboard = n > 0;
        }
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
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = rustix::termios::tcsetattr(io::stdin(), OptionalActions::Now, before);
            let _ = output::print("\n");
        }
    }
}
