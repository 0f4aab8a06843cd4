//! An NBD connection between a hostile client and a disk of bytes: `nbd_handshake` sends options of any shape,
//! `nbd_transmission` agrees as it should and then sends commands of any shape. What comes back is taken apart by
//! the export tests' client, which panics on anything that the protocol does not allow a server to say.

use crate::input::Input;
use crate::wire;
use spillway_core::{Errno, GuestBuffers, Operation, Request};
use spillway_export::nbd::{Budget, Connection, ExportInfo, ExtentKind, Work};
use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

/// An odd number of blocks and sectors, more than two of the pieces that long commands are cut in.
const DISK: usize = 1301 * 512;
const STEPS: usize = 512;

struct Rig {
    connection: Connection,
    client: UnixStream,
    disk: Vec<u8>,
    unfinished: Vec<Request>,
    received: Vec<u8>,
    ended: bool,
}

impl Rig {
    fn new(budget: &Budget) -> Rig {
        let (server, client) = UnixStream::pair().expect("a socket pair can be made");
        client.set_nonblocking(true).expect("a socket can be made non-blocking");
        let info = ExportInfo { size_bytes: DISK as u64, name: "fuzz".into(), description: "bytes".into() };
        Rig {
            connection: Connection::new(server.into(), info, 3, budget)
                .expect("a connected socket is enough"),
            client,
            disk: vec![7; DISK],
            unfinished: Vec::new(),
            received: Vec::new(),
            ended: false,
        }
    }

    /// Sends all of it, with turns in between. Ends with the connection.
    fn send(&mut self, mut bytes: &[u8]) {
        let mut stuck = 0;
        while !bytes.is_empty() && !self.ended {
            match self.client.write(&bytes[..bytes.len().min(32 << 10)]) {
                Ok(n) => {
                    bytes = &bytes[n..];
                    stuck = 0;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    stuck += 1;
                    assert!(stuck < 10_000, "the server takes no more and answers nothing");
                    self.finish_all();
                }
                Err(_) => return,
            }
            self.turn();
        }
    }

    /// What a turn of the reactor does with a connection.
    fn turn(&mut self) {
        if self.ended {
            return;
        }
        if self.connection.wants_read() {
            self.ended |= self.connection.on_readable().is_err();
        }
        while let Some(work) = self.connection.next() {
            self.work(work);
        }
        self.ended |= self.ended || self.connection.flush_output().is_err();
        self.receive();
    }

    fn work(&mut self, work: Work) {
        match work {
            Work::Request(request) => {
                let end = request.sector.checked_add(u64::from(request.sectors));
                assert!(
                    end.is_some_and(|end| end <= (DISK / 512) as u64),
                    "{request:?} lies outside the disk"
                );
                assert!(self.unfinished.iter().all(|other| other.token != request.token), "one token twice");
                self.unfinished.push(request);
            }
            Work::BlockStatus { id, offset, len, one: _ } => {
                assert!(len > 0 && offset + len <= DISK as u64);
                let extents = (0..).map(|n| {
                    (1024 + 512 * (n % 3), if n % 2 == 0 { ExtentKind::Data } else { ExtentKind::Zero })
                });
                let mut left = DISK as u64 - offset;
                let inside = extents.map_while(move |(n, kind)| {
                    let n = left.min(n);
                    left -= n;
                    (n > 0).then_some((n, kind))
                });
                self.connection.answer_block_status(id, inside);
            }
        }
    }

    fn receive(&mut self) {
        let mut part = [0; 64 << 10];
        while let Ok(n) = self.client.read(&mut part) {
            if n == 0 {
                break;
            }
            self.received.extend_from_slice(&part[..n]);
        }
    }

    /// Carries one of the unfinished requests out.
    fn finish(&mut self, which: usize) {
        if self.unfinished.is_empty() {
            return;
        }
        let at = which % self.unfinished.len();
        let Request { token, operation, sector, sectors } = self.unfinished.swap_remove(at);
        let start = sector as usize * 512;
        let range = &mut self.disk[start..start + sectors as usize * 512];
        let result = match operation {
            _ if which % 16 == 15 => Err(if which & 16 == 0 { Errno::IO } else { Errno::NO_SPACE }),
            Operation::Read => self.connection.copy_to_guest(token, 0, range),
            Operation::Write { .. } => self.connection.copy_from_guest(token, 0, range),
            Operation::Flush => Ok(()),
            Operation::Discard | Operation::WriteZeroes { .. } => {
                range.fill(0);
                Ok(())
            }
        };
        self.connection.complete(token, result);
    }

    fn finish_all(&mut self) {
        while !self.unfinished.is_empty() {
            self.finish(0);
        }
    }

    /// Turns until nothing moves any more.
    fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 3 {
            let before = (self.received.len(), self.unfinished.len());
            self.finish_all();
            self.turn();
            quiet = if (self.received.len(), self.unfinished.len()) == before { quiet + 1 } else { 0 };
        }
    }

    /// Everything comes to its end.
    fn end(mut self) {
        self.settle();
        self.finish_all();
        if self.ended {
            assert!(self.connection.next().is_none(), "an ended connection hands out work");
        }
        self.connection.release_idle_memory();
    }
}

/// Options, with the right magic number or as raw bytes.
pub fn nbd_handshake(data: &[u8]) {
    let mut input = Input(data);
    let mut rig = Rig::new(&Budget::new());
    rig.turn();
    assert_eq!(rig.received, wire::GREETING);
    rig.send(&wire::client_flags(if input.u8() & 1 == 0 { 3 } else { input.u32() }));
    for _ in 0..STEPS {
        if input.is_empty() || rig.ended {
            break;
        }
        let (kind, len) = (input.u8(), input.u16() as usize);
        let bytes = match kind {
            0..=223 => wire::option(u32::from(kind % 16), input.bytes(len)),
            // An option longer than what follows.
            224..=239 => {
                let mut bytes = wire::option(u32::from(kind % 16), &[]);
                bytes[12..16].copy_from_slice(&(len as u32 * 16).to_be_bytes());
                bytes.extend_from_slice(input.bytes(len));
                bytes
            }
            _ => input.bytes(len).to_vec(),
        };
        rig.received.clear();
        rig.send(&bytes);
        // What leads to the transmission phase may be no option reply: EXPORT_NAME, and replies to commands.
        if rig.connection.handshake_deadline().is_some() {
            wire::option_replies(&rig.received);
        }
        rig.finish(usize::from(kind));
    }
    rig.end();
}

/// Commands, well formed or raw, and completions in the order that the input says.
pub fn nbd_transmission(data: &[u8]) {
    let mut input = Input(data);
    let setup = input.u8();
    let structured = setup & 1 == 0;
    // Long reads without structured replies are gathered, or stream, or whichever there is room for.
    let budget = Budget::with_gathered_bytes([16 << 20, 0, 2 << 20][usize::from(setup >> 1) % 3]);
    let mut rig = Rig::new(&budget);
    rig.send(&wire::client_flags(3));
    if structured {
        rig.send(&wire::option(wire::OPT_STRUCTURED_REPLY, &[]));
        let queries = wire::context_query("", &["base:allocation"]);
        rig.send(&wire::option(wire::OPT_SET_META_CONTEXT, &queries));
    }
    rig.send(&wire::option(wire::OPT_GO, &wire::go("", &[])));
    rig.turn();
    assert!(!rig.ended && rig.connection.handshake_deadline().is_none(), "a good handshake was refused");
    rig.received.clear();

    // Commands sent whole, with the bytes that a simple reply to them carries.
    let mut sent: HashMap<u64, usize> = HashMap::new();
    let mut understood = true;
    let mut left = false;
    for _ in 0..STEPS {
        if input.is_empty() || rig.ended {
            break;
        }
        match input.u8() % 8 {
            0..=4 => {
                let (command, flags) = (input.u8(), input.u8());
                let (sector, sectors) = (u64::from(input.u16()), u32::from(input.u16()));
                let shift = u64::from(flags >> 5) * 100;
                let command = u16::from(command % 9);
                let (offset, len) = match flags >> 6 {
                    // Mostly inside the disk.
                    0..=2 => (sector % 1310 * 512, sectors % 1310 * 512),
                    _ => (sector << 40 | shift, sectors << 16 | u32::from(flags)),
                };
                let cookie = sent.len() as u64 + 1;
                let flags = u16::from(flags & 0x1f);
                if command == wire::WRITE {
                    // Data that is cut short is the last thing that is sent.
                    let whole = len as usize <= DISK;
                    let fill = vec![input.u8(); (len as usize).min(DISK)];
                    rig.send(&wire::write(
                        flags,
                        cookie,
                        offset,
                        &fill[..if whole { fill.len() } else { 0 }],
                    ));
                    if !whole {
                        understood = false;
                    }
                    sent.insert(cookie, 0);
                } else {
                    rig.send(&wire::request(flags, command, cookie, offset, len));
                    sent.insert(cookie, if command == wire::READ { len as usize } else { 0 });
                    left |= command == wire::DISC;
                }
            }
            5 => {
                let len = input.u8() as usize;
                let bytes = input.bytes(len);
                understood &= bytes.is_empty();
                rig.send(bytes);
            }
            6 => rig.finish(usize::from(input.u8())),
            _ => {
                rig.connection.set_disk_full(input.u8() & 1 == 1);
                rig.turn();
            }
        }
    }
    rig.connection.set_disk_full(false);
    rig.settle();
    if understood {
        let mut answers = wire::Answers::default();
        answers.take(&rig.received, |cookie| if structured { 0 } else { sent[&cookie] });
        let mut answered = std::collections::HashSet::new();
        for answer in &answers.done {
            assert!(sent.contains_key(&answer.cookie), "an answer to nothing: {answer:?}");
            assert!(answered.insert(answer.cookie), "answered twice: {answer:?}");
        }
        assert!(
            rig.ended || left || answered.len() == sent.len(),
            "{} of {} answered",
            answered.len(),
            sent.len()
        );
    }
    rig.end();
}
