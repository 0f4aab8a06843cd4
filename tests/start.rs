//! `docs/start.md`, followed to the letter: its commands run in one shell, in its order, against a daemon and machines of the
//! test's own.
//!
//! Owns the guest, which is one sector, and what stands in for the network: `curl`, which gives that guest. Invariant: each
//! command of the page is run, but for the block that installs, and the first one that fails ends the test.
#![allow(clippy::unwrap_used)]

use spillway_testkit::daemon::Daemon;
use spillway_testkit::process::wait_until;
use spillway_testkit::{disk, has_program, skip};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PAGE: &str = include_str!("../docs/start.md");
/// What installs is not run here: the same is done in a guest by `tests/package`.
const INSTALLS: &str = "apt install build-essential curl\nmake deb\napt install ./target/deb/spillway_*.deb\nsystemctl status spillwayd --no-pager\n";
/// How long a guest may take on a busy host.
const PATIENCE: Duration = Duration::from_secs(300);

/// The code of the guest's only sector. On its serial port it says what `HELLO` has. Then it takes lines: `echo WORDS > note`
/// writes the words to the next sector of its disk, `cat note` says what is there, all others do nothing; then it prompts.
/// Interrupts are off but for the disk's: the firmware would take what is typed for keys.
///
/// ```text
///           cli; xor ax, ax; mov ds, ax; mov es, ax; mov ss, ax; mov sp, 0x7c00; cld
///           mov si, HELLO; call say
///     line: mov di, 0x8000
///      key: mov dx, 0x3fd; in al, dx; test al, 1; jz key            # until a byte has come in
///           mov dl, 0xf8; in al, dx; call put; stosb
///           cmp al, 13; je end; cmp al, 10; jne key
///      end: mov byte [di], 0; mov si, 0x8000
///           cmp byte [si], 'e'; jne 1f
///           mov di, 0x9000; mov cx, 256; xor ax, ax; rep stosw      # the sector to write: zeroes,
///           mov si, 0x8005; mov di, 0x9000                          # and the words from behind 'echo ' up to '>'
///       2:  lodsb; cmp al, '>'; je 3f; cmp al, 13; jbe 3f; stosb; jmp 2b
///       3:  mov ax, 0x301; call disk; jmp prompt
///       1:  cmp byte [si], 'c'; jne prompt
///           mov ax, 0x201; call disk; mov si, 0x9000
///           cmp byte [si], 0; jne 4f; mov si, NONE
///       4:  call say
///   prompt: mov si, PROMPT; call say; jmp line
///     disk: mov dl, 0x80; mov bx, 0x9000; mov cx, 2; mov dh, 0; sti; int 0x13; cli; ret
///      say: lodsb; test al, al; jz 5f; call put; jmp say
///      put: push ax; mov dx, 0x3fd
///       6:  in al, dx; test al, 0x20; jz 6b                         # until a byte may go out
///           pop ax; mov dl, 0xf8; out dx, al
///       5:  ret
/// ```
const CODE: [u8; 164] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0xfc, 0xbe, 0x11, 0x11, 0xe8,
    0x79, 0x00, 0xbf, 0x00, 0x80, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf8, 0xb2, 0xf8, 0xec, 0xe8,
    0x72, 0x00, 0xaa, 0x3c, 0x0d, 0x74, 0x04, 0x3c, 0x0a, 0x75, 0xe9, 0xc6, 0x05, 0x00, 0xbe, 0x00, 0x80,
    0x80, 0x3c, 0x65, 0x75, 0x24, 0xbf, 0x00, 0x90, 0xb9, 0x00, 0x01, 0x31, 0xc0, 0xf3, 0xab, 0xbe, 0x05,
    0x80, 0xbf, 0x00, 0x90, 0xac, 0x3c, 0x3e, 0x74, 0x07, 0x3c, 0x0d, 0x76, 0x03, 0xaa, 0xeb, 0xf4, 0xb8,
    0x01, 0x03, 0xe8, 0x23, 0x00, 0xeb, 0x19, 0x80, 0x3c, 0x63, 0x75, 0x14, 0xb8, 0x01, 0x02, 0xe8, 0x16,
    0x00, 0xbe, 0x00, 0x90, 0x80, 0x3c, 0x00, 0x75, 0x03, 0xbe, 0x22, 0x22, 0xe8, 0x17, 0x00, 0xbe, 0x33,
    0x33, 0xe8, 0x11, 0x00, 0xeb, 0x96, 0xb2, 0x80, 0xbb, 0x00, 0x90, 0xb9, 0x02, 0x00, 0xb6, 0x00, 0xfb,
    0xcd, 0x13, 0xfa, 0xc3, 0xac, 0x84, 0xc0, 0x74, 0x12, 0xe8, 0x02, 0x00, 0xeb, 0xf6, 0x50, 0xba, 0xfd,
    0x03, 0xec, 0xa8, 0x20, 0x74, 0xfb, 0x58, 0xb2, 0xf8, 0xee, 0xc3,
];
/// Where in the code the addresses of the texts are.
const HELLO_AT: usize = 0xe;
const NONE_AT: usize = 0x70;
const PROMPT_AT: usize = 0x76;
const HELLO: &str = "\r\nCloud-init v. 0 finished\r\ndebian login: \0";
const NONE: &str = "cat: note: No such file or directory\0";
const PROMPT: &str = "\r\n$ \0";

/// The guest's disk.
fn guest() -> Vec<u8> {
    let mut sector = CODE.to_vec();
    for (at, text) in [(HELLO_AT, HELLO), (NONE_AT, NONE), (PROMPT_AT, PROMPT)] {
        let address = 0x7c00 + u16::try_from(sector.len()).unwrap();
        sector[at..at + 2].copy_from_slice(&address.to_le_bytes());
        sector.extend(text.bytes());
    }
    assert!(sector.len() <= 510, "a sector");
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector.resize(16 << 20, 0);
    sector
}

/// A fenced block of the page: what follows the fence, and its lines.
struct Block {
    kind: String,
    text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for line in page.lines() {
        match (line.strip_prefix("```"), open.as_mut()) {
            (Some(kind), None) => open = Some(Block { kind: kind.to_owned(), text: String::new() }),
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some(block)) => block.text += &format!("{line}\n"),
            (None, None) => {
                assert!(
                    !line.starts_with("    "),
                    "a command outside of a fenced block would not be run: {line}"
                );
            }
        }
    }
    assert!(open.is_none(), "a block is not closed");
    blocks
}

/// What the shell and its commands say, both streams together.
#[derive(Clone, Default)]
struct Screen(Arc<Mutex<String>>);

impl Screen {
    fn follow(&self, mut from: impl Read + Send + 'static) {
        let screen = self.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut buffer) {
                screen.0.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..n]));
            }
        });
    }

    fn text(&self) -> String {
        self.0.lock().unwrap().clone()
    }

    /// Waits until this is said behind `from`, and answers where it ends.
    fn wait(&self, shell: &mut Child, from: usize, text: &str) -> usize {
        let found = wait_until(PATIENCE, || {
            if let Some(at) = self.text()[from..].find(text) {
                return Some(Some(from + at + text.len()));
            }
            shell.try_wait().unwrap().map(|_| None)
        });
        found.flatten().unwrap_or_else(|| panic!("'{}' never came:\n{}", text.escape_debug(), self.text()))
    }
}

/// Does in the console what a block of the page shows: types what stands behind a prompt, and waits for what stands between.
/// Answers how far the screen was followed.
fn type_in(shell: &mut Child, screen: &Screen, from: usize, session: &str) -> usize {
    let mut at = screen.wait(shell, from, "Ctrl-] leaves the console");
    let enter = |shell: &mut Child, at: usize, line: &str| {
        shell.stdin.as_mut().unwrap().write_all(format!("{line}\r").as_bytes()).unwrap();
        screen.wait(shell, at, PROMPT.trim_end_matches('\0'))
    };
    at = enter(shell, at, "");
    let mut from = at;
    for line in session.lines() {
        match ["login: ", "Password: ", "$ "].iter().find_map(|prompt| Some(line.split_once(prompt)?.1)) {
            Some(typed) => (from, at) = (at, enter(shell, at, typed)),
            None => assert!(screen.text()[from..at].contains(line), "no '{line}' in:\n{}", screen.text()),
        }
    }
    shell.stdin.as_mut().unwrap().write_all(&[0x1d]).unwrap();
    at
}

/// All commands as one script, in which nothing may fail.
fn script(blocks: &[Block]) -> String {
    let mut script = "set -euo pipefail\n\
        trap 'echo \"FAILED ($?): $BASH_COMMAND\"' ERR\n\
        cd() { :; }\n\
        curl() { cp guest.qcow2 \"${2##*/}\"; }\n"
        .to_owned();
    for block in blocks {
        match block.kind.as_str() {
            "sh" => script += &block.text,
            "sh install" => assert_eq!(block.text, INSTALLS, "tests/package does what installs"),
            "console" => {}
            other => panic!("the page has a block of '{other}': say here whether it is run"),
        }
    }
    script
}

/// A shell in a folder that asks the daemon there, and finds the programs under test first.
fn shell(dir: &Path, script: &str) -> Child {
    std::fs::write(dir.join("guest.raw"), guest()).unwrap();
    std::fs::write(dir.join("script"), script).unwrap();
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-O", "qcow2", "guest.raw", "guest.qcow2"]).current_dir(dir);
    assert!(convert.status().unwrap().success());
    let programs = disk::program().unwrap();
    let path = format!("{}:{}", programs.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("bash");
    shell.args(["-c", "exec 2>&1; . ./script"]).current_dir(dir).env("PATH", path);
    shell.env("SPILLWAY_SOCKET", dir.join("sock")).stdin(Stdio::piped()).stdout(Stdio::piped());
    shell.spawn().unwrap()
}

#[test]
fn the_start_page_works_as_it_is_written() {
    for program in ["qemu-system-x86_64", "qemu-img", "debugfs"] {
        if !has_program(program) && !Path::new("/sbin").join(program).is_file() {
            return skip(&format!("{program} is not installed: run 'make install-deps'"));
        }
    }
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    // QEMUs that are users of their own go through it.
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    let daemon = Daemon::start(&disk::program().unwrap(), dir.path(), &[]).unwrap();
    let blocks = blocks(PAGE);
    let mut shell = shell(dir.path(), &script(&blocks));
    let screen = Screen::default();
    screen.follow(shell.stdout.take().unwrap());
    let mut at = 0;
    for (before, session) in blocks.iter().zip(&blocks[1..]).filter(|(_, block)| block.kind == "console") {
        assert!(before.text.contains("spillway machine console"), "a session without its command");
        at = type_in(&mut shell, &screen, at, &session.text);
    }
    let status = wait_until(PATIENCE, || shell.try_wait().unwrap()).expect("the page's commands end");
    assert!(status.success(), "{status}:\n{}", screen.text());
    let images = daemon.json(&["image", "list"]).unwrap();
    assert!(images["items"].as_array().unwrap().is_empty(), "the page cleans up: {images}");
    println!("{}", screen.text());
}
