//! What the NBD tests share: a disk that is a plain byte array, a way to drive one connection by hand, and a
//! client's side of the protocol, written from the protocol document and not from the server's constants.
#![allow(dead_code, reason = "each test program uses its part")]

pub mod server;
pub mod wire;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spillway_core::{Errno, GuestBuffers, Operation, Request};
use spillway_export::nbd::{Budget, Connection, Disconnect, ExportInfo, ExtentKind, Work};
use std::io::{ErrorKind, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;

/// A small deterministic generator: tests print their seed.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n
    }

    pub fn range(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// When the disk completes its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Inside the submission.
    AtOnce,
    /// A random one of those waiting, when told to.
    Later,
}

/// A byte array that takes requests like a disk, with faults on order.
pub struct Disk {
    pub bytes: Vec<u8>,
    pub pace: Pace,
    pub waiting: Vec<Request>,
    /// Operations on these sectors fail.
    pub fault: Option<(Range<u64>, Errno)>,
    /// Every operation in the order in which it was carried out.
    pub log: Vec<Request>,
    pub keep_log: bool,
    /// Something was completed: the reactor has a turn without asking the socket.
    pub completed: bool,
}

impl Disk {
    pub fn new(size: usize) -> Disk {
        Disk {
            bytes: vec![0; size],
            pace: Pace::AtOnce,
            waiting: Vec::new(),
            fault: None,
            log: Vec::new(),
            keep_log: true,
            completed: false,
        }
    }

    pub fn submit(&mut self, connection: &mut Connection, request: Request) {
        match self.pace {
            Pace::AtOnce => self.carry_out(connection, request),
            Pace::Later => self.waiting.push(request),
        }
    }

    /// Completes one of the waiting requests.
    pub fn complete_one(&mut self, connection: &mut Connection, rng: &mut Rng) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        self.complete_at(connection, rng.below(self.waiting.len() as u64) as usize);
        true
    }

    pub fn complete_at(&mut self, connection: &mut Connection, index: usize) {
        let request = self.waiting.swap_remove(index);
        self.carry_out(connection, request);
    }

    pub fn complete_all(&mut self, connection: &mut Connection) {
        for request in std::mem::take(&mut self.waiting) {
            self.carry_out(connection, request);
        }
    }

    fn carry_out(&mut self, connection: &mut Connection, request: Request) {
        let Request { token, operation, sector, sectors } = request;
        self.completed = true;
        if self.keep_log {
            self.log.push(request);
        }
        let sectors_range = sector..sector + u64::from(sectors);
        if let Some((bad, errno)) = &self.fault
            && bad.start < sectors_range.end
            && sectors_range.start < bad.end
        {
            return connection.complete(token, Err(*errno));
        }
        let range = sector as usize * 512..(sector + u64::from(sectors)) as usize * 512;
        let bytes = &mut self.bytes[range];
        let result = match operation {
            // In odd portions, as a disk of blocks does it.
            Operation::Read => {
                let mut at = 0;
                bytes.chunks(4096 * 3).try_for_each(|part| {
                    at += part.len();
                    connection.copy_to_guest(token, (at - part.len()) as u32, part)
                })
            }
            Operation::Write { .. } => {
                let mut at = 0;
                bytes.chunks_mut(4096 * 3).try_for_each(|part| {
                    at += part.len();
                    connection.copy_from_guest(token, (at - part.len()) as u32, part)
                })
            }
            Operation::Flush => Ok(()),
            Operation::Discard | Operation::WriteZeroes { .. } => {
                bytes.fill(0);
                Ok(())
            }
        };
        connection.complete(token, result);
    }

    /// Extents of 4 KiB granularity from `offset` on, past the end of the range as a disk may tell them.
    pub fn extents(&self, offset: u64) -> impl Iterator<Item = (u64, ExtentKind)> + '_ {
        let mut at = offset as usize;
        std::iter::from_fn(move || {
            if at >= self.bytes.len() {
                return None;
            }
            let end = ((at / 4096 + 1) * 4096).min(self.bytes.len());
            let zero = self.bytes[at..end].iter().all(|&byte| byte == 0);
            let len = (end - at) as u64;
            at = end;
            Some((len, if zero { ExtentKind::Zero } else { ExtentKind::Data }))
        })
    }

    pub fn work(&mut self, connection: &mut Connection, work: Work) {
        match work {
            Work::Request(request) => self.submit(connection, request),
            Work::BlockStatus { id, offset, len, one: _ } => {
                assert!(len > 0 && offset + len <= self.bytes.len() as u64);
                connection.answer_block_status(id, self.extents(offset));
            }
        }
    }
}

/// What a turn of the reactor does with one connection and a disk.
pub fn turn(connection: &mut Connection, disk: &mut Disk, ready: PollFlags) -> Result<(), Disconnect> {
    if ready.contains(PollFlags::OUT) {
        connection.on_writable()?;
    }
    if ready.contains(PollFlags::IN) {
        connection.on_readable()?;
    }
    while let Some(work) = connection.next() {
        disk.work(connection, work);
    }
    connection.flush_output()
}

/// One connection driven by hand, with the client's end of its socket.
pub struct Bench {
    pub connection: Connection,
    pub client: UnixStream,
    pub disk: Disk,
    /// What the client has received.
    pub received: Vec<u8>,
    pub ended: Option<Disconnect>,
}

pub const NAME: &str = "disk of a test";
pub const DESCRIPTION: &str = "a byte array";

pub fn info(size: usize) -> ExportInfo {
    ExportInfo { size_bytes: size as u64, name: NAME.into(), description: DESCRIPTION.into() }
}

impl Bench {
    pub fn new(size: usize) -> Bench {
        Bench::with(info(size))
    }

    pub fn with(info: ExportInfo) -> Bench {
        Bench::sharing(info, &Budget::new())
    }

    /// Beside other connections of the same budget.
    pub fn sharing(info: ExportInfo, budget: &Budget) -> Bench {
        let (server, client) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        let size = info.size_bytes as usize;
        Bench {
            connection: Connection::new(server.into(), info, 7, budget).unwrap(),
            client,
            disk: Disk::new(size),
            received: Vec::new(),
            ended: None,
        }
    }

    /// Past the handshake, with nothing received yet.
    pub fn negotiated(size: usize, structured: bool, contexts: bool) -> Bench {
        Bench::agreed_within(size, structured, contexts, &Budget::new())
    }

    /// The same with a budget.
    pub fn agreed_within(size: usize, structured: bool, contexts: bool, budget: &Budget) -> Bench {
        let mut bench = Bench::sharing(info(size), budget);
        bench.agree(structured, contexts);
        bench
    }

    /// Goes through the handshake.
    pub fn agree(&mut self, structured: bool, contexts: bool) {
        self.send(&wire::client_flags(3));
        if structured {
            self.send(&wire::option(wire::OPT_STRUCTURED_REPLY, &[]));
        }
        if contexts {
            let queries = wire::context_query("", &["base:allocation"]);
            self.send(&wire::option(wire::OPT_SET_META_CONTEXT, &queries));
        }
        self.send(&wire::option(wire::OPT_GO, &wire::go("", &[])));
        self.settle();
        assert!(self.ended.is_none(), "{:?}", self.ended);
        assert!(self.connection.handshake_deadline().is_none());
        self.received.clear();
    }

    /// Lets the socket hold hardly anything of the replies, so that the connection has to.
    pub fn shrink_socket(&mut self) {
        rustix::net::sockopt::set_socket_send_buffer_size(self.connection.fd(), 4096).unwrap();
    }

    /// One turn, if a reactor that sleeps in `poll` would have one: for what the connection wants of its socket, or
    /// after completions: says whether. Keeps the reason when the connection ends.
    pub fn turn(&mut self) -> bool {
        if self.ended.is_some() {
            return false;
        }
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, self.connection.wants_read());
        wanted.set(PollFlags::OUT, self.connection.wants_write());
        let mut fd = [PollFd::from_borrowed_fd(self.connection.fd(), wanted)];
        poll(&mut fd, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        let ready = fd[0].revents() & wanted;
        let due = !ready.is_empty() || self.disk.completed;
        if due {
            self.ended = turn(&mut self.connection, &mut self.disk, ready).err();
            // What was completed at once inside the turn is no reason for another.
            self.disk.completed = false;
        }
        due
    }

    /// Receives what there is. Says whether there was anything.
    pub fn receive(&mut self) -> bool {
        let before = self.received.len();
        let mut part = vec![0; 1 << 20];
        loop {
            match self.client.read(&mut part) {
                Ok(0) => break,
                Ok(n) => self.received.extend_from_slice(&part[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                Err(error) => panic!("{error}"),
            }
        }
        self.received.len() > before
    }

    /// Turns until nothing moves any more.
    pub fn settle(&mut self) {
        let mut turns = 0;
        while self.turn() | self.receive() {
            turns += 1;
            assert!(turns < 1_000_000, "the connection keeps the reactor awake");
        }
    }

    /// Sends everything, with turns and receiving in between whenever the socket is full.
    pub fn send(&mut self, bytes: &[u8]) {
        self.send_in_parts(bytes, usize::MAX, true);
    }

    pub fn send_in_parts(&mut self, mut bytes: &[u8], part: usize, receiving: bool) {
        let mut stuck = 0;
        while !bytes.is_empty() && self.ended.is_none() {
            match self.client.write(&bytes[..part.min(bytes.len())]) {
                Ok(n) => {
                    bytes = &bytes[n..];
                    stuck = 0;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => stuck += 1,
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return,
                Err(error) => panic!("{error}"),
            }
            self.turn();
            if receiving && self.receive() {
                stuck = 0;
            }
            assert!(stuck < 1000, "the server takes no more input: {} bytes left", bytes.len());
        }
    }

    /// Sends as much as the server takes while nobody reads replies and nothing completes. Says how much.
    pub fn send_until_stuck(&mut self, bytes: &[u8]) -> usize {
        let mut sent = 0;
        let mut stuck = 0;
        while sent < bytes.len() && stuck < 3 {
            match self.client.write(&bytes[sent..]) {
                Ok(n) => {
                    sent += n;
                    stuck = 0;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => stuck += 1,
                Err(error) => panic!("{error}"),
            }
            self.turn();
        }
        sent
    }

    /// Sends and takes the replies to what was sent.
    pub fn exchange(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.received.clear();
        self.send(bytes);
        self.settle();
        std::mem::take(&mut self.received)
    }

    /// Sends a request and takes its whole reply in the structured form.
    pub fn ask(&mut self, bytes: &[u8]) -> wire::Answer {
        let reply = self.exchange(bytes);
        assert!(self.ended.is_none(), "{:?}", self.ended);
        let mut answers = wire::Answers::default();
        // A simple reply has no data here: to a read it would not be allowed, and what follows it not be parsed.
        let left = answers.take(&reply, |_| 0);
        assert_eq!(left, reply.len(), "half a reply");
        assert_eq!(answers.done.len(), 1, "one answer to one request");
        answers.done.pop().unwrap()
    }
}
