//! An NBD client that stays connected: qemu-io, asked for one piece after another.
//!
//! Owns its process and notes what it has written. Invariant: a piece holds the pattern of its newest write.

use crate::world::MIB;
use spillway_testkit::Disk;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Whether it connects again when it has lost its connection, and repeats what was not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    Reconnect,
    Fail,
}

/// What it does fails the test where the disk says no.
pub struct NbdClient {
    qemu_io: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// Where its pieces lie on the disk, in MiB.
    pieces: Range<u64>,
    /// How often it has written.
    writes: u64,
}

impl NbdClient {
    /// Connects to write pieces of 1 MiB there.
    pub fn connect(disk: &Disk, pieces: Range<u64>, lost: Lost) -> NbdClient {
        let mut target = format!(
            "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={}",
            disk.nbd().display()
        );
        if lost == Lost::Reconnect {
            target.push_str(",file.reconnect-delay=60");
        }
        // Should it hang, its end is what the test hears of.
        let mut qemu_io = Command::new("timeout")
            .args(["900", "qemu-io", "--image-opts", &target])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (commands, answers) = (qemu_io.stdin.take().unwrap(), qemu_io.stdout.take().unwrap());
        let mut client = NbdClient { qemu_io, commands, answers: BufReader::new(answers), pieces, writes: 0 };
        client.ask(&format!("read {}M 4k", client.pieces.start));
        client
    }

    /// Has qemu-io do this to the disk.
    pub fn ask(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
        let mut output = String::new();
        // The last line of what succeeds tells how fast it was.
        while !output.contains(" ops; ") && !output.contains("failed") {
            let bytes = self.answers.read_line(&mut output).unwrap();
            assert!(bytes > 0, "{command}: qemu-io has ended: {output}");
        }
        assert!(!output.contains("failed") && !output.contains("error"), "{command}: {output}");
    }

    fn pattern(write: u64) -> u64 {
        write % 251 + 1
    }

    fn piece(&self, write: u64) -> u64 {
        self.pieces.start + write * 7 % (self.pieces.end - self.pieces.start)
    }

    /// Writes the next piece and reads it back.
    pub fn step(&mut self) {
        let (pattern, piece) = (Self::pattern(self.writes), self.piece(self.writes));
        self.ask(&format!("write -P {pattern} {piece}M 1M"));
        self.ask(&format!("read -P {pattern} {piece}M 1M"));
        self.writes += 1;
    }

    /// Reads all that it has written.
    pub fn verify(&mut self) {
        let count = self.pieces.end - self.pieces.start;
        for write in self.writes.saturating_sub(count)..self.writes {
            self.ask(&format!("read -P {} {}M 1M", Self::pattern(write), self.piece(write)));
        }
    }

    /// The bytes of its pieces that must be, for another client to look for.
    pub fn content(&self) -> Vec<(u64, u8)> {
        let count = self.pieces.end - self.pieces.start;
        let newest = self.writes.saturating_sub(count)..self.writes;
        newest.map(|write| (self.piece(write) * MIB, Self::pattern(write) as u8)).collect()
    }

    /// Disconnects as the protocol wants it.
    pub fn leave(mut self) {
        self.commands.write_all(b"quit\n").unwrap();
        assert!(self.qemu_io.wait().unwrap().success());
    }
}
