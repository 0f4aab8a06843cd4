//! The hub over its sockets, with VMMs and clients of the test's own.

use super::super::history::KEPT_BYTES;
use super::*;
use rustix::net::{RecvFlags, recv, send, sockopt};
use spillway_control::console::{FromHub, MAX_DATA_BYTES, MAX_PACKET_BYTES, ToHub, connect};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// Longest time until something is there that has to come.
const PATIENCE: Duration = Duration::from_secs(20);

struct World {
    hub: Option<ConsoleHub>,
    sockets: ConsoleSockets,
    _dir: tempfile::TempDir,
}

/// A client, and what it has received.
struct Reader {
    socket: OwnedFd,
    output: Vec<u8>,
    /// Length of the output at the last beginning.
    begun: Option<usize>,
    /// Packets with output.
    packets: usize,
    lost: u64,
    keyboard: Option<Keyboard>,
    is_refused: bool,
    has_ended: bool,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let path = |name| dir.path().join(name);
        let sockets = ConsoleSockets { clients: path("console.sock"), vmm: path("serial.sock") };
        World { hub: Some(ConsoleHub::on(&sockets).unwrap()), sockets, _dir: dir }
    }

    fn vmm(&self) -> UnixStream {
        let vmm = UnixStream::connect(&self.sockets.vmm).unwrap();
        vmm.set_read_timeout(Some(PATIENCE)).unwrap();
        vmm
    }

    fn client(&self) -> Reader {
        let socket = connect(&self.sockets.clients, false).unwrap();
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
        Reader {
            socket,
            output: Vec::new(),
            begun: None,
            packets: 0,
            lost: 0,
            keyboard: None,
            is_refused: false,
            has_ended: false,
        }
    }
}

impl Reader {
    fn send(&self, message: ToHub<'_>) {
        send(&self.socket, &message.packet(), SendFlags::NOSIGNAL).unwrap();
    }

    fn receive(&mut self) {
        let mut packet = [0; MAX_PACKET_BYTES + 1];
        let (length, _) = recv(&self.socket, &mut packet, RecvFlags::empty()).expect("something comes");
        if length == 0 {
            self.has_ended = true;
            return;
        }
        match FromHub::parse(&packet[..length]).expect("a message") {
            FromHub::Output(output) => {
                self.output.extend_from_slice(output);
                self.packets += 1;
            }
            FromHub::Begin => self.begun = Some(self.output.len()),
            FromHub::Lost(count) => self.lost += count,
            FromHub::Keyboard(keyboard) => self.keyboard = Some(keyboard),
            FromHub::Full => self.is_refused = true,
        }
    }

    fn until(&mut self, is: impl Fn(&Reader) -> bool) -> &mut Reader {
        while !is(self) {
            assert!(!self.has_ended, "the hub has closed: {:?}", String::from_utf8_lossy(&self.output));
            self.receive();
        }
        self
    }

    fn until_shows(&mut self, text: &str) -> &mut Reader {
        self.until(|reader| reader.output.ends_with(text.as_bytes()))
    }

    fn until_keyboard(&mut self, keyboard: Keyboard) {
        self.until(|reader| reader.keyboard == Some(keyboard));
    }

    fn ends(&mut self) {
        while !self.has_ended {
            self.receive();
        }
    }
}

fn heard(vmm: &mut UnixStream, keys: &[u8]) {
    let mut read = vec![0; keys.len()];
    vmm.read_exact(&mut read).unwrap();
    assert!(read == keys, "{}", String::from_utf8_lossy(&read));
}

#[test]
fn every_client_gets_the_history_and_what_comes() {
    let mut world = World::new();
    let mut early = world.client();
    early.until_keyboard(Keyboard::Free);
    let mut vmm = world.vmm();
    vmm.write_all(b"one ").unwrap();
    early.until_shows("one ");
    assert_eq!(early.begun, Some(0));
    let mut late = world.client();
    late.until_shows("one ");
    vmm.write_all(b"two").unwrap();
    for reader in [&mut early, &mut late] {
        assert_eq!((reader.until_shows("one two").lost, reader.begun), (0, Some(0)));
    }
    world.hub = None;
    early.ends();
    late.ends();
    assert!(!world.sockets.clients.exists() && !world.sockets.vmm.exists());
}

#[test]
fn a_new_vmm_begins_behind_a_separator_and_is_never_taken_for_the_last() {
    let world = World::new();
    let mut witness = world.client();
    for boot in 0..50 {
        let mut vmm = world.vmm();
        // It ends at once: all that it has written is there nevertheless, and before the next one.
        vmm.write_all(format!("boot {boot}").repeat(200).as_bytes()).unwrap();
        drop(vmm);
        let _next = world.vmm();
        let mut reader = world.client();
        reader.until(|reader| reader.begun.is_some());
        let separator = String::from_utf8_lossy(SEPARATOR).into_owned();
        assert!(reader.output.ends_with(format!("boot {boot}{separator}").as_bytes()), "{boot}");
    }
    let separators = |reader: &Reader| {
        reader.output.windows(SEPARATOR.len()).filter(|window| *window == SEPARATOR).count()
    };
    // A VMM that has written nothing is not separated.
    witness.until(|reader| separators(reader) == 50);
}

#[test]
fn a_slow_reader_loses_the_oldest_and_is_told_how_much_and_nobody_waits_for_it() {
    let world = World::new();
    let (mut slow, mut quick) = (world.client(), world.client());
    let mut vmm = world.vmm();
    slow.until(|reader| reader.begun.is_some());
    let total = KEPT_BYTES * 6;
    let text: Vec<u8> = (0..total as u32 / 4).flat_map(u32::to_le_bytes).collect();
    let written = text.clone();
    let writer = std::thread::spawn(move || {
        vmm.write_all(&written).unwrap();
        vmm
    });
    quick.until(|reader| reader.output.len() as u64 + reader.lost == total as u64);
    let _vmm = writer.join().unwrap();
    slow.until(|reader| reader.output.len() as u64 + reader.lost == total as u64);
    assert!(slow.lost > 0 && slow.output.len() >= KEPT_BYTES);
    assert!(slow.output.ends_with(&text[total - KEPT_BYTES..]), "the newest are whole");
    let mut late = world.client();
    late.until(|reader| reader.output.len() == KEPT_BYTES);
    assert!(late.output == text[total - KEPT_BYTES..] && late.lost == 0);
}

/// Whoever looks for a line after *begin* must not take the end of one for a line.
#[test]
fn the_output_of_a_vmm_begins_with_a_whole_line_also_if_it_began_long_ago() {
    let world = World::new();
    let mut vmm = world.vmm();
    let mut first = world.client();
    // The oldest kept byte is in the middle of a line.
    let lines = KEPT_BYTES / 10 * 2;
    vmm.write_all("no WORKS!\n".repeat(lines).as_bytes()).unwrap();
    first.until(|reader| reader.output.len() as u64 + reader.lost == 10 * lines as u64);
    assert_eq!(first.begun, Some(0));
    let mut late = world.client();
    late.until(|reader| reader.output.len() == KEPT_BYTES);
    let begun = late.begun.expect("the VMM is connected");
    assert!(begun > 0 && late.output[..begun] == b"no WORKS!\n"[10 - begun..], "{begun}");
    // Of one long line nothing is the beginning, until it ends.
    vmm.write_all(&[b'x'; KEPT_BYTES]).unwrap();
    first.until(|reader| reader.output.len() as u64 + reader.lost == (10 * lines + KEPT_BYTES) as u64);
    let mut late = world.client();
    late.until(|reader| reader.output.len() == KEPT_BYTES);
    assert_eq!(late.begun, None);
    vmm.write_all(b"\nlogin: ").unwrap();
    late.until(|reader| reader.output.ends_with(b"login: "));
    assert_eq!(late.begun, Some(KEPT_BYTES + 1));
}

#[test]
fn one_client_has_the_keyboard() {
    let world = World::new();
    let mut vmm = world.vmm();
    let (mut first, mut second) = (world.client(), world.client());
    first.until_keyboard(Keyboard::Free);
    first.send(ToHub::Input(b"abc"));
    heard(&mut vmm, b"abc");
    first.until_keyboard(Keyboard::Yours);
    second.until_keyboard(Keyboard::Taken);
    second.send(ToHub::Input(b"ignored"));
    second.send(ToHub::Take);
    second.until_keyboard(Keyboard::Yours);
    first.until_keyboard(Keyboard::Taken);
    first.send(ToHub::Input(b"ignored"));
    second.send(ToHub::Input(b"def"));
    heard(&mut vmm, b"def");
    // Its last keys arrive, and then nobody has it.
    second.send(ToHub::Input(b"bye"));
    drop(second);
    heard(&mut vmm, b"bye");
    first.until_keyboard(Keyboard::Free);
    first.send(ToHub::Input(b"ghi"));
    heard(&mut vmm, b"ghi");
}

#[test]
fn keys_wait_for_a_guest_that_does_not_read_within_a_bound_and_others_go_on() {
    /// Turns of the hub in which nothing more is accepted.
    const TURNS: usize = 50;
    let world = World::new();
    let mut vmm = world.vmm();
    let (writer, mut other) = (world.client(), world.client());
    let keys: Vec<u8> = (0..(4 << 20) / 4_u32).flat_map(u32::to_le_bytes).collect();
    let (mut sent, mut turns) = (0, 0);
    while sent < keys.len() && turns < TURNS {
        let piece = &keys[sent..(sent + MAX_DATA_BYTES).min(keys.len())];
        match send(&writer.socket, &ToHub::Input(piece).packet(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(_) => (sent, turns) = (sent + piece.len(), 0),
            Err(Errno::AGAIN) => {
                // What goes there and back again proves that the hub has had its turn, and is not held up.
                turns += 1;
                let text = format!("turn {turns} of {sent};");
                vmm.write_all(text.as_bytes()).unwrap();
                other.until_shows(&text);
            }
            Err(e) => panic!("{e}"),
        }
    }
    assert!(sent < keys.len(), "all of them are kept somewhere");
    assert_eq!(other.keyboard, Some(Keyboard::Taken));
    // The writer leaves with keys on their way: they arrive.
    drop(writer);
    heard(&mut vmm, &keys[..sent]);
    other.until_keyboard(Keyboard::Free);
}

#[test]
fn single_bytes_gather_and_an_echo_does_not_wait() {
    let world = World::new();
    let (mut vmm, mut client) = (world.vmm(), world.client());
    let begun = Instant::now();
    for _ in 0..5000 {
        vmm.write_all(b"x").unwrap();
    }
    vmm.write_all(b"end").unwrap();
    client.until_shows("end");
    let turns = begun.elapsed().as_millis() as usize / GATHER.as_millis() as usize;
    assert!(client.packets <= turns + 2, "{} packets in {turns} ms", client.packets);
    let mut echo = vmm.try_clone().unwrap();
    std::thread::spawn(move || {
        let mut key = [0];
        while let Ok(1) = echo.read(&mut key) {
            echo.write_all(&key).unwrap();
        }
    });
    let mut times: Vec<Duration> = (b'a'..=b'z')
        .map(|key| {
            let begun = Instant::now();
            client.send(ToHub::Input(&[key]));
            client.until(|client| client.output.ends_with(&[key]));
            begun.elapsed()
        })
        .collect();
    times.sort();
    assert!(times[times.len() / 2] < Duration::from_millis(20), "{times:?}");
}

#[test]
fn a_client_that_reads_no_more_is_closed_and_its_keys_arrive() {
    let world = World::new();
    let (mut vmm, mut client) = (world.vmm(), world.client());
    client.until(|client| client.begun.is_some());
    client.send(ToHub::Input(b"last keys"));
    rustix::net::shutdown(&client.socket, rustix::net::Shutdown::Read).unwrap();
    vmm.write_all(b"nobody reads this").unwrap();
    heard(&mut vmm, b"last keys");
    let until = Instant::now() + PATIENCE;
    while send(&client.socket, &ToHub::Take.packet(), SendFlags::NOSIGNAL).is_ok() {
        assert!(Instant::now() < until, "its place is never free");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Nobody has the keyboard any more.
    world.client().until_keyboard(Keyboard::Free);
}

#[test]
fn there_are_so_many_clients_and_no_more() {
    let world = World::new();
    let mut clients: Vec<_> = (0..MAX_CLIENTS).map(|_| world.client()).collect();
    clients.iter_mut().for_each(|client| client.until_keyboard(Keyboard::Free));
    let mut refused = world.client();
    refused.ends();
    assert!(refused.is_refused && refused.keyboard.is_none());
    clients.pop();
    let until = Instant::now() + PATIENCE;
    loop {
        let mut next = world.client();
        next.receive();
        if !next.is_refused {
            break;
        }
        assert!(Instant::now() < until, "a place is never free");
    }
}

#[test]
fn a_client_that_sends_anything_else_is_closed_and_nobody_else() {
    let world = World::new();
    let mut vmm = world.vmm();
    let mut good = world.client();
    for packet in [&b"x"[..], b"i", b"take", &[b'i'; MAX_PACKET_BYTES + 1], &[b'i'; 60_000]] {
        let mut bad = world.client();
        send(&bad.socket, packet, SendFlags::NOSIGNAL).unwrap();
        bad.ends();
    }
    vmm.write_all(b"goes on").unwrap();
    good.until_shows("goes on");
}

#[test]
fn a_second_vmm_waits_for_the_end_of_the_first() {
    let world = World::new();
    let (mut first, mut reader) = (world.vmm(), world.client());
    first.write_all(b"first").unwrap();
    reader.until_shows("first");
    let mut second = world.vmm();
    second.write_all(b"second").unwrap();
    first.write_all(b" again").unwrap();
    reader.until_shows("first again");
    drop(first);
    reader.until_shows("second");
}

#[test]
fn a_vmm_that_reads_no_more_is_let_go() {
    let world = World::new();
    let mut vmm = world.vmm();
    let mut client = world.client();
    vmm.write_all(b"up").unwrap();
    while client.output != b"up" {
        client.receive();
    }
    vmm.shutdown(std::net::Shutdown::Read).unwrap();
    // A key for it ends its connection: to wait until it can be written would be to wait without a pause.
    client.send(ToHub::Input(b"x"));
    let mut next = world.vmm();
    next.write_all(b"next").unwrap();
    while !client.output.ends_with(b"next") {
        client.receive();
    }
}
