//! Readiness of a machine: its guest agent answers, a service of it speaks, or its console shows a line. Owns the probes;
//! the catalog chooses one.
//!
//! Invariant: a guest can only delay its own readiness: its output is bounded and not trusted. The host never connects to
//! an address only because a guest names it.

use super::console::ConsoleClient;
use super::guest_agent::GuestAgent;
use super::neighbours::check_owner;
use crate::catalogs::serial_pattern;
use regex::bytes::Regex;
use spillway_api::Ready;
use spillway_control::console::FromHub;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};

/// Pause between two probes.
const PAUSE: Duration = Duration::from_millis(500);
/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// Longest part of a console line that is matched.
const MAX_CONSOLE_LINE_BYTES: usize = 4 << 10;
/// SeaBIOS's last line before a kernel given by the host. It writes the end of a line only with what it writes next, so a kernel
/// that never returns to it (an unpacked one, by its PVH entry) continues this line.
const FIRMWARE_LAST_LINE: &str = "Booting from ROM..";
/// Pause between two reads of the console: a guest with much output costs no more than one with little.
const LOOK: Duration = Duration::from_millis(20);
/// Most packets of the console between two pauses: more than the hub reads of the guest meanwhile.
const MAX_PACKETS: usize = 16;
/// Number of refused addresses before the user is told: a new address may belong to its last owner for a moment.
const REFUSALS: u32 = 3;

/// How this host reaches a machine's network.
#[derive(Clone, Debug)]
pub enum GuestNetwork {
    /// Through this port of the host's loopback, which is forwarded to the guest.
    Forwarded(u16),
    /// On this bridge, by the machine's MAC address.
    Bridge(String, String),
    /// Not at all.
    Nowhere,
}

/// Waits until a machine is ready. Returns its address if that is known. Calls `tell` once with the reason if the address that the guest names is
/// refused repeatedly.
pub async fn until_ready(
    folder: &Path,
    agent: &GuestAgent,
    ready: &Ready,
    place: &GuestNetwork,
    tell: impl Fn(&str),
) -> Option<String> {
    let mut refused = 0;
    loop {
        let tried = match ready {
            Ready::Agent => agent.address(folder).await,
            Ready::Tcp(guest_port) => match place {
                GuestNetwork::Forwarded(port) => speaks(SocketAddr::from((Ipv4Addr::LOCALHOST, *port))).await,
                GuestNetwork::Bridge(bridge, mac) => {
                    takes_connections(folder, agent, guest_port.get(), (bridge, mac)).await
                }
                GuestNetwork::Nowhere => {
                    Err(not_its_own("it has no network in which a port could be reached"))
                }
            },
            Ready::Serial(pattern) => read_console(folder, pattern).await,
            // It is not asked: it calls.
            Ready::PhoneHome => Err(io::ErrorKind::Unsupported.into()),
        };
        match tried {
            Ok(address) => return address,
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                refused += 1;
                if refused == REFUSALS {
                    tell(&format!("it is not ready: {e}"));
                }
            }
            Err(_) => {}
        }
        sleep(PAUSE).await;
    }
}

fn not_its_own(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

/// Connects and waits for the first byte. QEMU accepts the connection before the guest does, so a connection alone proves
/// nothing.
async fn speaks(address: SocketAddr) -> io::Result<Option<String>> {
    let listen = async {
        let mut stream = TcpStream::connect(address).await?;
        match stream.read(&mut [0; 1]).await? {
            0 => Err(io::ErrorKind::ConnectionReset.into()),
            _ => Ok(Some(address.to_string())),
        }
    };
    timeout(PATIENCE, listen).await?
}

/// Connects to the address that the guest names, after the host has checked it, and only over the bridge.
async fn takes_connections(
    folder: &Path,
    agent: &GuestAgent,
    port: u16,
    (bridge, mac): (&str, &str),
) -> io::Result<Option<String>> {
    let Some(named) = agent.address(folder).await? else {
        return Err(io::ErrorKind::AddrNotAvailable.into());
    };
    let address: Ipv4Addr = named.parse().map_err(io::Error::other)?;
    check_owner(address, bridge, mac).await.map_err(|why| not_its_own(&why))?;
    let socket = TcpSocket::new_v4()?;
    socket.bind_device(Some(bridge.as_bytes()))?;
    timeout(PATIENCE, socket.connect((address, port).into())).await??;
    Ok(Some(named))
}

/// Reads the console until a line of the VMM that runs now matches, or the console ends. What the guest has written before
/// counts, as far as the hub keeps it.
async fn read_console(folder: &Path, pattern: &str) -> io::Result<Option<String>> {
    let pattern = serial_pattern(pattern).map_err(io::Error::other)?;
    let console = ConsoleClient::connect(folder)?;
    let mut lines = ConsoleLines::default();
    let mut has_begun = false;
    loop {
        for _ in 0..MAX_PACKETS {
            let packet = console.receive().await?;
            match FromHub::parse(&packet) {
                Some(FromHub::Output(output)) => {
                    if lines.show(&pattern, output) && has_begun {
                        return Ok(None);
                    }
                }
                Some(FromHub::Begin) => {
                    has_begun = true;
                    lines.text.clear();
                }
                Some(FromHub::Lost(_)) => lines = ConsoleLines { text: Vec::new(), is_cut: true },
                Some(FromHub::Full) => return Err(io::ErrorKind::ConnectionRefused.into()),
                Some(FromHub::Keyboard(_)) | None => {}
            }
        }
        sleep(LOOK).await;
    }
}

/// The line that a console shows now.
#[derive(Default)]
struct ConsoleLines {
    /// Its beginning.
    text: Vec<u8>,
    /// Its beginning was lost, so nothing of it is matched.
    is_cut: bool,
}

impl ConsoleLines {
    /// Whether a line matches that this output belongs to.
    fn show(&mut self, pattern: &Regex, output: &[u8]) -> bool {
        for piece in output.split_inclusive(|byte| *byte == b'\n') {
            if !self.is_cut && self.continues(pattern, without_end(piece)) {
                return true;
            }
            if piece.ends_with(b"\n") {
                *self = ConsoleLines::default();
            }
        }
        false
    }

    /// Whether the line matches with this piece. The last line may be a prompt without a line end.
    fn continues(&mut self, pattern: &Regex, piece: &[u8]) -> bool {
        // The beginning of a line is enough to match it.
        let space = MAX_CONSOLE_LINE_BYTES.saturating_sub(self.text.len());
        self.text.extend_from_slice(&piece[..piece.len().min(space)]);
        space > 0 && fits(pattern, &plain(&self.text))
    }
}

/// Whether the pattern matches this line, or the part of it that the guest wrote after the firmware's last line.
fn fits(pattern: &Regex, line: &str) -> bool {
    // SeaBIOS sometimes writes a dot more.
    let guests = line.strip_prefix(FIRMWARE_LAST_LINE).map(|rest| rest.strip_prefix('.').unwrap_or(rest));
    pattern.is_match(line.as_bytes()) || guests.is_some_and(|line| pattern.is_match(line.as_bytes()))
}

fn without_end(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// Removes control sequences from a line (ECMA-48, 5.4): firmware clears and colours the screen before a kernel's first
/// line, and its last line may have no end.
fn plain(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let mut plain = String::with_capacity(text.len());
    let mut left = text.chars();
    while let Some(c) = left.next() {
        match c {
            '\x1b' => {
                let mut parameters = String::new();
                let clears = match left.next() {
                    // RIS, 8.3.105.
                    Some('c') => true,
                    // Parameters, then a final byte: ED of the whole screen, 8.3.39.
                    Some('[') => {
                        let end = left.find(|c| {
                            let ends = ('@'..='~').contains(c);
                            parameters.extend((!ends).then_some(*c));
                            ends
                        });
                        (end, parameters.as_str()) == (Some('J'), "2")
                    }
                    _ => false,
                };
                if clears {
                    plain.clear();
                }
            }
            c if c.is_control() && c != '\t' => {}
            c => plain.push(c),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypervisor::qemu;
    use rustix::net::{
        AddressFamily, SendFlags, SocketAddrUnix, SocketType, accept, bind, listen, send, socket,
    };
    use serde_json::{Value, json};
    use std::os::fd::OwnedFd;
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, UnixListener};

    fn hub(path: &Path) -> OwnedFd {
        let hub = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        bind(&hub, &SocketAddrUnix::new(path).unwrap()).unwrap();
        listen(&hub, 9).unwrap();
        hub
    }

    #[tokio::test]
    async fn a_console_is_read_until_a_line_fits() {
        let dir = tempfile::tempdir().unwrap();
        let hub = hub(&dir.path().join(qemu::CONSOLE));
        let (last, is_last) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let said = |packets: &[FromHub<'_>]| {
                let client = accept(&hub).unwrap();
                for packet in packets {
                    send(&client, &packet.packet(), SendFlags::empty()).unwrap();
                }
                client
            };
            use FromHub::{Begin, Keyboard, Output};
            let free = Keyboard(spillway_control::console::Keyboard::Free);
            // The prompt of a VMM of before does not count.
            said(&[free, Output(b"host login: "), Begin, Output(b"starting\nlogin is off\n")]);
            said(&[FromHub::Full]);
            // What is on both sides of lost bytes is not one line, and what follows them is no line's beginning.
            let lost = [FromHub::Lost(7), Output(b"in: \n"), FromHub::Lost(7), Output(b"host login: ")];
            said(&[&[free, Begin, Output(b"\nhost log")][..], &lost].concat());
            said(&[free, FromHub::Lost(7), Begin, Output(b"host login: ")]);
            let _last = said(&[free, Begin, FromHub::Lost(7), Output(b"x\nhost log"), Output(b"in: ")]);
            last.send(()).unwrap();
            std::thread::sleep(Duration::from_secs(60));
        });
        let ready = Ready::Serial("^[a-z]+ login: $".into());
        assert_eq!(
            timeout(
                PATIENCE * 2,
                until_ready(dir.path(), &GuestAgent::Socket, &ready, &GuestNetwork::Nowhere, |_| ())
            )
            .await
            .unwrap(),
            None
        );
        is_last.recv_timeout(PATIENCE).expect("what was before does not count");
    }

    #[test]
    fn a_guests_first_line_may_continue_that_of_its_firmware() {
        for dots in ["..", "..."] {
            let seen = format!("\x1bc\x1b[?7l\x1b[2J\x1b[0mBooting from ROM{dots}GUEST-UP 1.20");
            let fits = |pattern: &str| fits(&serial_pattern(pattern).unwrap(), &plain(seen.as_bytes()));
            assert!(fits("^GUEST-UP") && fits("^Booting from ROM") && !fits("^ROM"), "{dots}");
        }
    }

    #[tokio::test]
    async fn a_service_that_says_nothing_is_not_there_yet() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            drop(listener.accept().await);
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(b"SSH-2.0-x\r\n").await.unwrap();
        });
        let ready = Ready::Tcp(22.try_into().unwrap());
        let found = timeout(
            PATIENCE * 2,
            until_ready(Path::new("/"), &GuestAgent::Socket, &ready, &GuestNetwork::Forwarded(port), |_| ()),
        )
        .await
        .unwrap();
        assert_eq!(found, Some(format!("127.0.0.1:{port}")));
    }

    /// A guest whose agent names the daemon's own host, where somebody listens.
    #[tokio::test]
    async fn an_address_that_the_guest_names_is_not_connected_to() {
        let dir = tempfile::tempdir().unwrap();
        let elsewhere = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let port = elsewhere.local_addr().unwrap().port();
        // Any address of this host's that is no loopback one, if it has one: the one that it would go out by.
        let own = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        let own = own.connect("192.0.2.1:9").and_then(|()| own.local_addr());
        let own = own.map_or("198.51.100.1".into(), |own| own.ip().to_string());
        let agent = UnixListener::bind(dir.path().join(qemu::AGENT)).unwrap();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = agent.accept().await.unwrap();
                let mut asked = vec![0; 4096];
                let n = stream.read(&mut asked).await.unwrap();
                let sync: Value = serde_json::from_slice(asked[..n].strip_prefix(b"\xff").unwrap()).unwrap();
                let answer = json!({ "return": sync["arguments"]["id"] });
                stream.write_all(b"\xff").await.unwrap();
                stream.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
                let _ = stream.read(&mut asked).await.unwrap();
                let answer = json!({ "return": [{ "ip-addresses": [{ "ip-address": own }] }] });
                stream.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
            }
        });
        let ready = Ready::Tcp(port.try_into().unwrap());
        let mac = "52:54:00:12:34:56".to_owned();
        for place in [GuestNetwork::Bridge("no-bridge".into(), mac), GuestNetwork::Nowhere] {
            let (told, mut heard) = tokio::sync::mpsc::unbounded_channel();
            let tell = move |why: &str| told.send(why.to_owned()).unwrap();
            let probe = until_ready(dir.path(), &GuestAgent::Socket, &ready, &place, tell);
            tokio::select! {
                found = probe => panic!("it is ready on {found:?}"),
                connected = elsewhere.accept() => panic!("it was connected to: {connected:?}"),
                why = heard.recv() => assert!(why.unwrap().starts_with("it is not ready: "), "{place:?}"),
            }
        }
    }

    #[test]
    fn a_line_is_what_people_see() {
        assert_eq!(plain(b"\x1bc\x1b[?7l\x1b[2J\x1b[0mGUEST-UP\r"), "GUEST-UP");
        assert_eq!(plain(b"Booting from ROM..\x1bc\x1b[?7l\x1b[2JGUEST-UP"), "GUEST-UP");
        assert_eq!(plain(b"Booting..\x1b[2JGUEST-UP"), "GUEST-UP");
        assert_eq!(plain(b"/ # \x1b[J\x1b[6n"), "/ # ");
        assert_eq!(plain(b"a\x1b[1;32mb\x1b[\x07 cd\xff\x1b"), "abd\u{fffd}");
        assert_eq!(plain(b"\x1b["), "");
    }
}
