//! The console hub with real guests: several clients, `ready = serial:`, daemons that come and go, WebSockets, screens.

use crate::world::{BOOT, World};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::OpenptFlags;
use serde_json::Value;
use spillway_testkit::console::Console;
use spillway_testkit::disk;
use spillway_testkit::process::wait_until;
use spillway_testkit::websocket::{self, Message, WebSocket};
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// `spillway machine console`, and what it shows.
struct Cli {
    child: Child,
    stdin: Box<dyn Write>,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl Cli {
    /// On a terminal of its own.
    fn on_terminal(world: &World, name: &str) -> Cli {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let keyboard = rustix::pty::openpt(flags).unwrap();
        rustix::pty::grantpt(&keyboard).unwrap();
        rustix::pty::unlockpt(&keyboard).unwrap();
        let path = rustix::pty::ptsname(&keyboard, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let terminal = File::from(rustix::fs::open(path.as_c_str(), flags, Mode::empty()).unwrap());
        let mut command = Command::new(disk::program().unwrap());
        command.args(["machine", "console", name]).env("SPILLWAY_SOCKET", world.path("sock"));
        command.stdin(terminal.try_clone().unwrap()).stdout(terminal.try_clone().unwrap()).stderr(terminal);
        let child = command.spawn().unwrap();
        let keyboard = File::from(keyboard);
        let cli = Cli::of(child, Box::new(keyboard.try_clone().unwrap()), [Box::new(keyboard)]);
        // From then on the terminal itself does nothing with keys.
        cli.until_shows("Ctrl-] leaves the console");
        cli
    }

    /// Whose input comes from a pipe.
    fn new(world: &World, name: &str, more: &[&str]) -> Cli {
        let mut command = Command::new(disk::program().unwrap());
        command.args(["machine", "console", name]).args(more).env("SPILLWAY_SOCKET", world.path("sock"));
        let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = pipes.spawn().unwrap();
        let outputs: [Box<dyn Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        let stdin = Box::new(child.stdin.take().unwrap());
        Cli::of(child, stdin, outputs)
    }

    fn of<const N: usize>(child: Child, stdin: Box<dyn Write>, outputs: [Box<dyn Read + Send>; N]) -> Cli {
        let shown = Arc::new(Mutex::new(Vec::new()));
        for mut output in outputs {
            let shown = Arc::clone(&shown);
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(length @ 1..) = output.read(&mut buffer) {
                    shown.lock().unwrap().extend_from_slice(&buffer[..length]);
                }
            });
        }
        Cli { stdin, child, shown }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    fn types(&mut self, text: &str) {
        self.stdin.write_all(text.as_bytes()).unwrap();
    }

    #[track_caller]
    fn until_shows(&self, text: &str) {
        let shows = || self.text().contains(text).then_some(());
        wait_until(BOOT, shows).unwrap_or_else(|| panic!("'{text}' is not shown: {}", self.text()));
    }

    /// Leaves with the key for that. Returns whether it ends well.
    fn leaves(mut self) -> bool {
        self.types("\x1d");
        wait_until(PATIENCE, || self.child.try_wait().unwrap()).expect("it leaves").success()
    }
}

impl Drop for Cli {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Connects to the console of a machine as soon as it has one.
fn console(world: &World, name: &str) -> Console {
    wait_until(PATIENCE, || world.console(name)).expect("a console")
}

/// Starts a machine that is ready when its console says so. Returns clients that were there before that.
fn start_watched(world: &World, name: &str) -> [Cli; 2] {
    world.ok(&["machine", "start", name]);
    let hub = console(world, name);
    // The command looks for the machine's run first.
    world.until(name, "there", |machine| !machine["status"]["run"]["disk_pid"].is_null());
    drop(hub);
    [(); 2].map(|()| Cli::new(world, name, &[]))
}

fn clients_share_a_guest_with_its_readiness(hypervisor: &'static str) {
    let Some(world) = World::new(hypervisor) else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 1, &["--image", "golden", "--ready", "serial:^WORKS"]);
    let [mut first, mut second] = start_watched(&world, "desk-001");
    world.until("desk-001", "ready", |machine| machine["status"]["ready"] == true);
    for client in [&first, &second] {
        client.until_shows("WORKS");
    }
    first.types("state 71\n");
    for client in [&first, &second] {
        client.until_shows("boot=");
        client.until_shows("#71");
    }
    // What the second types waits until the first has left.
    second.until_shows("another client has the keyboard");
    second.types("state 72\n");
    first.types("state 73\n");
    first.until_shows("#73");
    assert!(!second.text().contains("#72"), "{}", second.text());
    assert!(first.leaves());
    second.until_shows("#72");
    // What a program has written before it leaves arrives, and from one that takes the keyboard, too.
    let mut script = Cli::new(&world, "desk-001", &["--take"]);
    script.types("state 75\n\x1d");
    second.until_shows("#75");
    wait_until(PATIENCE, || script.child.try_wait().unwrap()).expect("it leaves");
    let mut patient = Cli::new(&world, "desk-001", &[]);
    second.types("state 76\n");
    second.until_shows("#76");
    patient.types("state 77\n\x1d");
    patient.until_shows("the input waits until it is free");
    assert!(patient.child.try_wait().unwrap().is_none(), "it waits");
    assert!(second.leaves());
    wait_until(PATIENCE, || patient.child.try_wait().unwrap()).expect("it leaves");
    let second = Cli::new(&world, "desk-001", &[]);
    second.until_shows("#77");
    // One that takes the keyboard has it, and who comes late sees all of it.
    let mut third = Cli::new(&world, "desk-001", &["--take"]);
    third.types("state 74\n");
    for client in [&second, &third] {
        ["WORKS", "#71", "#72", "#73", "#74", "#75", "#77"].iter().for_each(|text| client.until_shows(text));
    }

    // A reset is another VMM on the same hub: the clients stay, and what was before is marked off.
    world.ok(&["machine", "reset", "desk-001", "--wait"]);
    third.until_shows("the machine has been started again");
    world.until("desk-001", "ready", |machine| machine["status"]["ready"] == true);
    let mut late = console(&world, "desk-001");
    let is_up = |client: &Console| {
        let begun = client.begins_at.map(|at| String::from_utf8_lossy(&client.output[at..]).into_owned());
        begun.is_some_and(|text| text.contains("WORKS"))
    };
    assert!(late.until(PATIENCE, is_up), "{}", late.text());
    let before = late.begins_at.unwrap();
    assert!(String::from_utf8_lossy(&late.output[..before]).contains("#74"), "{}", late.text());

    // The end of the disk is that of its clients.
    world.ok(&["machine", "stop", "desk-001", "--force", "--wait"]);
    assert!(late.until(PATIENCE, |client| client.has_ended) || late.has_ended);
    let ended = wait_until(PATIENCE, || third.child.try_wait().unwrap()).expect("it ends");
    assert!(ended.success(), "{}", third.text());
}

#[test]
fn clients_share_a_guest_of_qemu_with_its_readiness() {
    clients_share_a_guest_with_its_readiness("qemu");
}

#[test]
fn clients_share_a_guest_of_libvirt_with_its_readiness() {
    clients_share_a_guest_with_its_readiness("libvirt");
}

#[test]
fn a_guest_that_virsh_resets_goes_on_with_its_vmm() {
    let Some(mut world) = World::new("libvirt") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 1, &["--image", "golden", "--ready", "serial:^WORKS"]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    let mut client = console(&world, "desk-001");
    let boots = |client: &Console| client.text().matches("WORKS").count();
    assert!(client.until(BOOT, |client| boots(client) == 1), "{}", client.text());
    let (pid, begun) = (world.pid("desk-001", "vmm_pid"), client.begins_at);
    world.libvirtd().unwrap().virsh(&["reset", "spillway-desk-001"]);
    assert!(client.until(BOOT, |client| boots(client) == 2), "{}", client.text());
    assert!(!client.text().contains("has been started again"), "{}", client.text());
    assert_eq!((world.pid("desk-001", "vmm_pid"), client.begins_at), (pid, begun));
    assert_eq!(world.machine("desk-001")["status"]["ready"], true);
}

#[test]
fn what_a_guest_has_said_outlives_daemons_and_is_what_makes_it_ready() {
    let Some(mut world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 1, &["--image", "golden", "--ready", "serial:^WORKS"]);
    world.ok(&["machine", "start", "desk-001"]);
    world.until("desk-001", "with a VMM", |machine| !machine["status"]["run"]["vmm_pid"].is_null());
    let is_ready = world.machine("desk-001")["status"]["ready"] == true;
    world.kill_daemon();
    assert!(!is_ready, "the guest was ready too early for this test");
    // The line that makes it ready comes while there is no daemon.
    let mut witness = console(&world, "desk-001");
    assert!(witness.until(BOOT, |client| client.text().contains("WORKS")), "{}", witness.text());
    world.start_daemon();
    world.until("desk-001", "ready", |machine| machine["status"]["ready"] == true);

    // A client is not disturbed by what happens to daemons, and others find what was said.
    let mut client = Cli::new(&world, "desk-001", &[]);
    client.types("state 81\n");
    client.until_shows("#81");
    let daemon = Pid::from_raw(i32::try_from(world.daemon_pid()).unwrap()).unwrap();
    kill_process(daemon, Signal::TERM).unwrap();
    world.kill_daemon();
    client.types("state 82\n");
    client.until_shows("#82");
    world.start_daemon();
    // The daemon answers when it knows what runs.
    let machine = world.machine("desk-001");
    assert!(
        machine["status"]["phase"] == "running" && !machine["status"]["run"]["disk_pid"].is_null(),
        "{machine:#}"
    );
    let late = Cli::new(&world, "desk-001", &[]);
    ["WORKS", "#81", "#82"].iter().for_each(|text| late.until_shows(text));
    client.types("state 83\n");
    late.until_shows("#83");
}

#[test]
fn the_keyboard_goes_from_one_terminal_to_another() {
    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 1, &["--image", "golden"]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    world.tell("desk-001", "state", "STATE");
    let [mut first, mut second] = [(); 2].map(|()| Cli::on_terminal(&world, "desk-001"));
    first.types("state 61\n");
    second.until_shows("#61");
    second.until_shows("another client has the keyboard: Ctrl-T takes it");
    second.types("state 62\n");
    second.types("\x14");
    second.until_shows("you have the keyboard");
    first.until_shows("another client has the keyboard");
    second.types("state 63\n");
    for client in [&first, &second] {
        client.until_shows("#63");
        assert!(!client.text().contains("#62"), "{}", client.text());
    }
    assert!(second.leaves());
    first.until_shows("the keyboard is free");
    // The key that takes is the guest's while nobody else has the keyboard: with it, this is no word that it knows.
    first.types("\x14state 64\nstate 65\n");
    first.until_shows("#65");
    assert!(!first.text().contains("#64"), "{}", first.text());
    assert!(first.leaves());
}

#[test]
fn a_guest_that_floods_its_console_and_a_client_that_does_not_read_disturb_nobody() {
    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 1, &["--image", "golden"]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    world.tell("desk-001", "state", "STATE");
    let mut lazy = console(&world, "desk-001");
    assert!(lazy.until(PATIENCE, |client| client.keyboard.is_some()));
    let mut busy = console(&world, "desk-001");
    busy.take().and_then(|()| busy.keys(b"flood 1\n")).unwrap();
    assert!(busy.until(BOOT, |client| client.text().contains("FLOODED #1")), "{}", busy.text().len());
    assert!(busy.output.len() > 700_000, "{}", busy.output.len());
    // Its disk was served meanwhile, and its supervisor still answers.
    world.ok(&["machine", "stats", "desk-001"]);
    let kept = |client: &Console| client.text().contains("FLOODED #1");
    assert!(lazy.until(PATIENCE, kept) && lazy.lost_bytes > 0, "{}", lazy.lost_bytes);
}

/// A WebSocket of a machine's.
fn websocket(world: &World, path: &str, headers: &[(&str, &str)]) -> Result<WebSocket, String> {
    websocket::open(&world.path("sock"), &format!("/v1/machines/{path}"), headers).unwrap()
}

/// Receives until there is what is looked for.
#[track_caller]
fn until<T>(socket: &mut WebSocket, what: &str, mut is: impl FnMut(Message) -> Option<T>) -> T {
    let until = Instant::now() + BOOT;
    while Instant::now() < until {
        match socket.receive(Duration::from_secs(1)).unwrap() {
            Some(Message::Gone) => panic!("it is gone before: {what}"),
            Some(message) => {
                if let Some(found) = is(message) {
                    return found;
                }
            }
            None => {}
        }
    }
    panic!("there is never: {what}");
}

/// Receives until the output has this.
#[track_caller]
fn until_shows(socket: &mut WebSocket, text: &str) {
    let mut output = Vec::new();
    until(socket, text, |message| {
        if let Message::Binary(bytes) = message {
            output.extend(bytes);
        }
        String::from_utf8_lossy(&output).contains(text).then_some(())
    });
}

#[track_caller]
fn until_keyboard(socket: &mut WebSocket, state: &str) {
    let expected = format!(r#"{{"keyboard": "{state}"}}"#);
    until(socket, &expected, |message| (message == Message::Text(expected.clone())).then_some(()));
}

/// The audit log's lines of a verb.
fn audited(world: &World, verb: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(world.path("state/audit.log")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["verb"] == verb).collect()
}

#[test]
fn a_console_is_a_websocket_of_pages_of_the_daemons_own() {
    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 1, &["--image", "golden"]);
    let refused = |path: &str, headers: &[(&str, &str)], words: &[&str]| {
        let answer = websocket(&world, path, headers).expect_err("it is refused");
        assert!(words.iter().all(|word| answer.contains(word)), "{words:?}: {answer}");
    };
    refused("desk-001/console", &[], &[" 409 ", "start it first"]);
    refused("desk-009/console", &[], &[" 404 "]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    world.tell("desk-001", "state", "STATE");
    for origin in ["https://evil.example", "null", "https://host.example.evil.example"] {
        for path in ["desk-001/console", "desk-001/screen"] {
            refused(path, &[("Origin", origin)], &[" 403 ", "another origin"]);
        }
    }
    refused("desk-001/screen", &[], &[" 409 ", "has no screen"]);
    assert_eq!(audited(&world, "open console of").iter().filter(|line| line["status"] == 101).count(), 0);

    let mut first = websocket(&world, "desk-001/console", &[("Origin", "https://host.example")]).unwrap();
    let mut second = websocket(&world, "desk-001/console", &[]).unwrap();
    until_keyboard(&mut first, "free");
    until_keyboard(&mut second, "free");
    until_shows(&mut second, "WORKS");
    first.binary(b"state 91\n").unwrap();
    until_keyboard(&mut second, "taken");
    until_shows(&mut first, "#91");
    second.binary(b"state 92\n").unwrap();
    second.text(r#"{"take": true}"#).unwrap();
    until_keyboard(&mut second, "yours");
    second.binary(b"state 93\n").unwrap();
    let mut output = Vec::new();
    until(&mut second, "#93", |message| {
        if let Message::Binary(bytes) = message {
            output.extend(bytes);
        }
        String::from_utf8_lossy(&output).contains("#93").then_some(())
    });
    assert!(!String::from_utf8_lossy(&output).contains("#92"), "keys of one without the keyboard");

    // So many and no more, and none that says what it may not.
    let mut more: Vec<_> =
        (0..6).map(|_| websocket(&world, "desk-001/console", &[]).expect("a place")).collect();
    refused("desk-001/console", &[], &["8 clients", "\"code\":\"busy\""]);
    more[0].text("?").unwrap();
    let code = |message| if let Message::Close(code, _) = message { Some(code) } else { None };
    assert_eq!(until(&mut more[0], "its end", code), 1003);
    more[1].binary(&[b'x'; (16 << 10) + 1]).unwrap();
    assert_eq!(until(&mut more[1], "its end", code), 1009);
    drop(more);
    let opened = || audited(&world, "open console of").iter().filter(|line| line["status"] == 101).count();
    let closed = || audited(&world, "close console of").len();
    wait_until(PATIENCE, || (closed() == 6).then_some(())).expect("each has a line at its end");
    assert_eq!(opened(), 8);
    let line = audited(&world, "open console of").remove(0);
    assert_eq!((&line["object"]["name"], &line["who"]), (&"desk-001".into(), &"uid 0".into()));

    world.ok(&["machine", "stop", "desk-001", "--force", "--wait"]);
    for socket in [&mut first, &mut second] {
        let end = until(socket, "its end", |message| match message {
            Message::Close(code, reason) => Some((code, reason)),
            _ => None,
        });
        assert_eq!(end, (1001, "the machine's run has ended".into()));
    }
    wait_until(PATIENCE, || (closed() == 8).then_some(())).expect("each has a line at its end");
}

/// A viewer of a screen: RFB 3.8 (RFC 6143) over a WebSocket.
struct Viewer {
    socket: WebSocket,
    received: Vec<u8>,
    width: usize,
    height: usize,
}

impl Viewer {
    /// Shakes hands: no security, a shared session, pixels as they come.
    fn new(world: &World, name: &str) -> Viewer {
        let headers = [("Sec-WebSocket-Protocol", "binary")];
        let socket = websocket(world, &format!("{name}/screen"), &headers).unwrap();
        assert!(
            socket.head.to_ascii_lowercase().contains("sec-websocket-protocol: binary"),
            "{}",
            socket.head
        );
        let mut viewer = Viewer { socket, received: Vec::new(), width: 0, height: 0 };
        assert_eq!(viewer.read(12), b"RFB 003.008\n");
        viewer.write(b"RFB 003.008\n");
        let count = viewer.read(1)[0];
        assert!(viewer.read(count.into()).contains(&1), "no security is offered");
        viewer.write(&[1]);
        assert_eq!(viewer.read(4), [0; 4], "the security result");
        viewer.write(&[1]);
        let init = viewer.read(24);
        let number = |at: usize| usize::from(u16::from_be_bytes([init[at], init[at + 1]]));
        (viewer.width, viewer.height) = (number(0), number(2));
        assert_eq!(init[4], 32, "bits of a pixel");
        let name_length = u32::from_be_bytes([init[20], init[21], init[22], init[23]]);
        viewer.read(name_length as usize);
        // SetEncodings: raw, and DesktopSize.
        viewer.write(&[2, 0, 0, 2, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0x21]);
        viewer
    }

    fn write(&mut self, bytes: &[u8]) {
        self.socket.binary(bytes).unwrap();
    }

    fn read(&mut self, length: usize) -> Vec<u8> {
        while self.received.len() < length {
            match self.socket.receive(PATIENCE).unwrap() {
                Some(Message::Binary(bytes)) => self.received.extend(bytes),
                other => panic!("no more of the screen: {other:?}"),
            }
        }
        self.received.drain(..length).collect()
    }

    /// The whole screen, four bytes a pixel.
    fn pixels(&mut self) -> Vec<u8> {
        'again: loop {
            let [w, h] = [self.width, self.height].map(|side| (side as u16).to_be_bytes());
            self.write(&[3, 0, 0, 0, 0, 0, w[0], w[1], h[0], h[1]]);
            let mut screen = vec![0; self.width * self.height * 4];
            let head = self.read(4);
            assert_eq!(head[0], 0, "an update");
            for _ in 0..u16::from_be_bytes([head[2], head[3]]) {
                let head = self.read(12);
                let number = |at: usize| usize::from(u16::from_be_bytes([head[at], head[at + 1]]));
                let (x, y, width, height) = (number(0), number(2), number(4), number(6));
                if head[8..] == [0xff, 0xff, 0xff, 0x21] {
                    (self.width, self.height) = (width, height);
                    continue 'again;
                }
                assert_eq!(head[8..], [0; 4], "raw");
                for line in y..y + height {
                    let pixels = self.read(width * 4);
                    let at = (line * self.width + x) * 4;
                    screen[at..at + pixels.len()].copy_from_slice(&pixels);
                }
            }
            return screen;
        }
    }

    fn key(&mut self, key: u8) {
        for is_down in [1, 0] {
            self.write(&[4, is_down, 0, 0, 0, 0, 0, key]);
        }
    }
}

/// How many pixels differ; all of them if the sizes do.
fn difference(one: &[u8], other: &[u8]) -> usize {
    match one.len() == other.len() {
        true => one.chunks(4).zip(other.chunks(4)).filter(|(a, b)| a[..3] != b[..3]).count(),
        false => usize::MAX,
    }
}

/// A boot sector that shows each key that is typed: services 16h and 10h of the firmware.
const ECHO: [u8; 10] = [0xb4, 0x00, 0xcd, 0x16, 0xb4, 0x0e, 0xcd, 0x10, 0xeb, 0xf6];

fn a_screen_is_a_websocket(hypervisor: &'static str) {
    /// More than a cursor that blinks, and less than the keys' letters.
    const CURSOR_PIXELS: usize = 200;
    let Some(world) = World::new(hypervisor) else { return };
    let mut image = ECHO.to_vec();
    image.resize(510, 0);
    image.extend([0x55, 0xaa]);
    image.resize(16 << 20, 0);
    std::fs::write(world.path("image.raw"), image).unwrap();
    world.ok(&["image", "import", "echo", world.path("image.raw").to_str().unwrap(), "--format", "raw"]);
    let options = ["--image", "echo", "--count", "1", "--memory", "256M", "--network", "none"];
    world.ok(&[&["catalog", "create", "desk", "--display", "vnc"], &options[..]].concat());
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    assert_eq!(world.machine("desk-001")["status"]["run"]["display"], "vnc");
    // Nobody but root may write where the socket is, now that the guest runs.
    let folder = world.machines().join("desk-001/vnc");
    let found = std::fs::metadata(&folder).unwrap();
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    assert_eq!((found.permissions().mode() & 0o777, found.uid()), (0o710, 0));

    let mut viewer = Viewer::new(&world, "desk-001");
    let before = wait_until(PATIENCE, || {
        let [one, other] = [(); 2].map(|()| {
            std::thread::sleep(Duration::from_millis(700));
            viewer.pixels()
        });
        (difference(&one, &other) < CURSOR_PIXELS).then_some(other)
    });
    let before = before.expect("the screen of a guest that waits for a key is still");
    assert!(before.chunks(4).any(|pixel| pixel[..3] != before[..3]), "the firmware has written something");
    let changes = || {
        // The firmware holds few keys at a time, and loses them when it hands over to what it has loaded.
        "qwertyui".bytes().for_each(|key| viewer.key(key));
        let now = viewer.pixels();
        (difference(&before, &now) > CURSOR_PIXELS).then_some(())
    };
    wait_until(PATIENCE, changes).expect("keys appear on the screen");

    let mut more: Vec<Viewer> = (0..3).map(|_| Viewer::new(&world, "desk-001")).collect();
    let refused = websocket(&world, "desk-001/screen", &[]).expect_err("there are as many as can be");
    assert!(refused.contains("4 clients"), "{refused}");
    more.iter_mut().for_each(|viewer| drop(viewer.pixels()));
    drop(more);
    world.ok(&["machine", "stop", "desk-001", "--force", "--wait"]);
    let end = until(&mut viewer.socket, "its end", |message| match message {
        Message::Close(code, reason) => Some((code, reason)),
        _ => None,
    });
    assert_eq!(end, (1001, "the machine's run has ended".into()));
    wait_until(PATIENCE, || (audited(&world, "close screen of").len() == 4).then_some(()))
        .expect("all lines");
}

#[test]
fn a_screen_of_qemu_is_a_websocket() {
    a_screen_is_a_websocket("qemu");
}

#[test]
fn a_screen_of_libvirt_is_a_websocket() {
    a_screen_is_a_websocket("libvirt");
}
