//! `run` with a real QEMU and a real guest: a boot sector that writes to its disk through the firmware, reads that
//! back, says so on the serial port, waits for a key there, and ends QEMU with it.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{PATIENCE, World, alive, refuses, spillway, until};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal};
use rustix::pty::OpenptFlags;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

/// 16-bit code for 0x7c00 and what it says. The read goes to 0x8000, so the text comes from what was read back.
#[rustfmt::skip]
const GUEST: &[u8] = &[
    // segments and stack
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0, 0xbc, 0x00, 0x7c,
    // int 13h: write one sector from 0x7c00 to the third sector; halt on error
    0xb8, 0x01, 0x03, 0xb9, 0x03, 0x00, 0xb6, 0x00, 0xbb, 0x00, 0x7c, 0xcd, 0x13, 0x72, 0x2c,
    // read it to 0x8000
    0xb8, 0x01, 0x02, 0xb9, 0x03, 0x00, 0xb6, 0x00, 0xbb, 0x00, 0x80, 0xcd, 0x13, 0x72, 0x1d,
    // print the text at 0x8049 to the serial port at 0x3f8, without the firmware's interrupts between
    0xfa, 0xbe, 0x49, 0x80, 0xba, 0xf8, 0x03, 0xac, 0x84, 0xc0, 0x74, 0x03, 0xee, 0xeb, 0xf8,
    // wait for a byte there, give it to the debug-exit device at 0xf4
    0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xfb, 0xba, 0xf8, 0x03, 0xec, 0xe6, 0xf4,
    // halt
    0xf4, 0xeb, 0xfd,
    b'u', b'p', b' ', b'a', b'n', b'd', b' ', b'w', b'r', b'i', b't', b't', b'e', b'n', b'\r', b'\n', 0,
];
const SAYS: &str = "up and written";

fn world() -> World {
    let world = World::new();
    let mut image = vec![0; 1 << 20];
    image[..GUEST.len()].copy_from_slice(GUEST);
    image[510..512].copy_from_slice(&[0x55, 0xaa]);
    std::fs::write(world.path("base.raw"), image).unwrap();
    std::fs::create_dir(world.path("run")).unwrap();
    world
}

fn run(world: &World) -> Command {
    let mut command = Command::new("setsid");
    // A session of its own, so that the terminal of the test is its controlling one.
    command.arg("--ctty").arg(spillway().get_program());
    command.arg("run").arg("--image").arg(world.path("base.raw")).args(["--memory", "64M"]);
    command.arg("--overflow-dir").arg(world.dir.path());
    command.env("XDG_RUNTIME_DIR", world.path("run"));
    command
}

const DEBUG_EXIT: [&str; 3] = ["--", "-device", "isa-debug-exit,iobase=0xf4,iosize=1"];

/// A terminal, and what has been written to it.
struct Terminal {
    keyboard: File,
    line: File,
    seen: Arc<Mutex<String>>,
}

impl Terminal {
    fn open() -> Terminal {
        let keyboard =
            rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        rustix::pty::grantpt(&keyboard).unwrap();
        rustix::pty::unlockpt(&keyboard).unwrap();
        let name = rustix::pty::ptsname(&keyboard, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let line = File::from(rustix::fs::open(&name, flags, Mode::empty()).unwrap());
        let keyboard = File::from(keyboard);
        let seen = Arc::new(Mutex::new(String::new()));
        let (mut screen, to) = (keyboard.try_clone().unwrap(), Arc::clone(&seen));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n) = screen.read(&mut buffer) {
                to.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..n]));
            }
        });
        Terminal { keyboard, line, seen }
    }

    fn spawn(&self, command: &mut Command) -> Child {
        let line = || Stdio::from(self.line.try_clone().unwrap());
        command.stdin(line()).stdout(line()).stderr(line()).spawn().unwrap()
    }

    fn wait_for(&self, what: &str) {
        let deadline = std::time::Instant::now() + PATIENCE;
        while !self.text().contains(what) {
            assert!(std::time::Instant::now() < deadline, "'{what}' was not seen: {}", self.text());
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    fn text(&self) -> String {
        self.seen.lock().unwrap().clone()
    }

    fn settings(&self) -> String {
        format!("{:?}", rustix::termios::tcgetattr(&self.line).unwrap())
    }
}

#[test]
fn a_machine_boots_writes_gets_ctrl_c_and_passes_on_its_exit_code() {
    let world = world();
    let before = std::fs::read(world.path("base.raw")).unwrap();
    let terminal = Terminal::open();
    let settings = terminal.settings();
    let mut child =
        terminal.spawn(run(&world).args(["--control"]).arg(world.path("control")).args(DEBUG_EXIT));
    terminal.wait_for(SAYS);
    let stats = spillway().arg("stats").arg(world.path("control")).output().unwrap();
    assert!(stats.status.success(), "figures while it runs");
    // Ctrl-C is for the guest, which ends with it: QEMU's exit code is twice the byte plus one.
    (&terminal.keyboard).write_all(&[3]).unwrap();
    let status = child.wait().unwrap();
    terminal.wait_for("base image");
    let text = terminal.text();
    assert_eq!(status.code(), Some(7), "{text}");
    let guest = text.lines().find(|l| l.starts_with("guest ")).unwrap_or_else(|| panic!("{text}"));
    let words: Vec<_> = guest.split_whitespace().collect();
    assert!(words[2] == "1" && words[5..7] == ["512", "B"], "one write of 512 bytes: {guest}");
    assert_eq!(terminal.settings(), settings, "the terminal is as it was");
    assert_eq!(std::fs::read_dir(world.path("run")).unwrap().count(), 0, "no private folder stays");
    assert_eq!(world.left(), ["base.raw", "run"]);
    assert!(std::fs::read(world.path("base.raw")).unwrap() == before, "the image is never written");
}

#[test]
fn a_signal_ends_machine_and_disk() {
    let world = world();
    let terminal = Terminal::open();
    let settings = terminal.settings();
    let mut child = terminal.spawn(&mut run(&world));
    terminal.wait_for(SAYS);
    // setsid executes the program in its place.
    rustix::process::kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let status = child.wait().unwrap();
    terminal.wait_for("base image");
    assert_eq!(status.code(), Some(0), "{}", terminal.text());
    assert_eq!(terminal.settings(), settings);
    assert_eq!(std::fs::read_dir(world.path("run")).unwrap().count(), 0);
    assert_eq!(world.left(), ["base.raw", "run"]);
}

/// The processes that this one started, by id, with their command lines.
fn children(of: u32) -> Vec<(Pid, String)> {
    let processes = std::fs::read_dir("/proc").unwrap();
    let ids = processes.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse::<i32>().ok());
    let child = |id: i32| {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?;
        let line = std::fs::read(format!("/proc/{id}/cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        (parent == of.to_string()).then_some((Pid::from_raw(id)?, line))
    };
    ids.filter_map(child).collect()
}

#[test]
fn worker_and_machine_go_with_their_killed_parent() {
    let world = world();
    let said = world.path("said");
    // Without a terminal, whose end would end them too.
    let mut command = spillway();
    command.arg("run").arg("--image").arg(world.path("base.raw")).args(["--memory", "64M", "--queues", "3"]);
    command.arg("--overflow-dir").arg(world.dir.path()).env("XDG_RUNTIME_DIR", world.path("run"));
    // What is temporary goes where its sockets go.
    command.env("TMPDIR", "/nonexistent");
    let file = File::create(&said).unwrap();
    command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
    let mut child = command.spawn().unwrap();
    until("the machine runs", || std::fs::read_to_string(&said).unwrap().contains(SAYS));
    let both = children(child.id());
    assert_eq!(both.len(), 2, "worker and QEMU: {both:?}");
    let machine = both.iter().find(|(_, line)| line.starts_with("qemu")).unwrap();
    assert!(machine.1.contains("num-queues=3"), "{machine:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    until("they follow", || both.iter().all(|(pid, _)| !alive(*pid)));
}

#[test]
fn a_kernel_is_booted_instead_of_the_disk() {
    let world = world();
    // The least that QEMU takes for a kernel: a multiboot header that says load all of it at 1 MiB and begin behind
    // it; then mov al, 0x15; out 0xf4, al; hlt.
    let (magic, flags) = (0x1bad_b002_u32, 1u32 << 16);
    let checksum = 0u32.wrapping_sub(magic).wrapping_sub(flags);
    let at = 1u32 << 20;
    let header = [magic, flags, checksum, at, at, 0, 0, at + 32];
    let mut kernel: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
    kernel.extend([0xb0, 0x15, 0xe6, 0xf4, 0xf4]);
    std::fs::write(world.path("kernel"), kernel).unwrap();
    let terminal = Terminal::open();
    let mut command = run(&world);
    command.arg("--kernel").arg(world.path("kernel")).args(["--append", "-x console=ttyS0"]);
    let status = terminal.spawn(command.args(DEBUG_EXIT)).wait().unwrap();
    assert_eq!(status.code(), Some(0x15 << 1 | 1), "{}", terminal.text());
}

/// In the place of QEMU: once it is asked to end, or ends by itself, it looks for a while whether its disk still serves.
const STAND_IN: &str = r#"#!/bin/sh
case "$*" in *probe.raw*) exit 43 ;; esac
ends() {
    trap '' INT TERM HUP
    for n in 1 2 3 4 5; do
        "$SPILLWAY" stats "$CONTROL" >/dev/null 2>&1 && echo served || echo gone
        sleep 0.05
    done >"$SEEN"
    exit 0
}
trap ends INT TERM HUP
echo runs
until [ -e "$END" ]; do sleep 0.05; done
ends
"#;

/// Runs that, lets it end, and asserts that the disk has served until then.
fn ends_before_its_disk(what: &str, end: impl Fn(&World, Pid)) {
    let world = world();
    std::fs::write(world.path("script"), STAND_IN).unwrap();
    std::fs::create_dir(world.path("bin")).unwrap();
    // By another process: while this one had it open to write, a child of another test could inherit that.
    let mut install = Command::new("install");
    install.args(["-m", "755"]).arg(world.path("script")).arg(world.path("bin/qemu-system-x86_64"));
    assert!(install.status().unwrap().success());
    let mut command = spillway();
    let path = format!("{}:{}", world.path("bin").display(), std::env::var("PATH").unwrap());
    let program = command.get_program().to_owned();
    command.env("PATH", path).env("SPILLWAY", program).env("XDG_RUNTIME_DIR", world.path("run"));
    for (variable, name) in [("CONTROL", "control"), ("SEEN", "seen"), ("END", "end")] {
        command.env(variable, world.path(name));
    }
    command.arg("run").arg("--image").arg(world.path("base.raw")).args(["--memory", "64M"]);
    command.arg("--overflow-dir").arg(world.dir.path()).arg("--control").arg(world.path("control"));
    let said = File::create(world.path("said")).unwrap();
    command.process_group(0).stdin(Stdio::null()).stdout(said.try_clone().unwrap()).stderr(said);
    let mut child = command.spawn().unwrap();
    let text = || std::fs::read_to_string(world.path("said")).unwrap();
    until("the machine runs", || text().contains("runs\n"));
    end(&world, Pid::from_child(&child));
    assert_eq!(child.wait().unwrap().code(), Some(0), "{what}: {}", text());
    let seen = std::fs::read_to_string(world.path("seen")).unwrap();
    assert_eq!(seen, "served\n".repeat(5), "{what}: {}", text());
    assert!(text().contains("where the I/O went"), "{what}: {}", text());
    assert!(!world.path("control").exists(), "{what}: the disk has ended");
}

#[test]
fn the_machine_ends_before_its_disk() {
    ends_before_its_disk("SIGTERM", |_, run| rustix::process::kill_process(run, Signal::TERM).unwrap());
    // What a terminal sends goes to all processes of its foreground group.
    for signal in [Signal::INT, Signal::HUP] {
        ends_before_its_disk("the terminal", |_, run| {
            rustix::process::kill_process_group(run, signal).unwrap();
        });
    }
    ends_before_its_disk("its own end", |world, _| std::fs::write(world.path("end"), "").unwrap());
}

#[test]
fn arguments_that_qemu_refuses_end_with_its_words_and_code() {
    let world = world();
    let terminal = Terminal::open();
    let mut child = terminal.spawn(run(&world).args(["--", "-device", "no-such-device"]));
    assert_eq!(child.wait().unwrap().code(), Some(1));
    terminal.wait_for("no-such-device");
    assert_eq!(world.left(), ["base.raw", "run"]);
}

#[test]
fn without_qemu_it_says_what_to_install() {
    let world = world();
    let mut command = spillway();
    command.arg("run").arg("--image").arg(world.path("base.raw")).arg("--overflow-dir").arg(world.dir.path());
    refuses(command.env("PATH", "/nonexistent"), 69, &["qemu-system-x86_64", "apt install"]);
    assert_eq!(world.left(), ["base.raw", "run"]);
}
