//! The control socket's protocol: one JSON object a line, one answer a line, in order; to those that listen also one
//! line for each event. Owns a connection's buffers; never waits for anybody.
//!
//! Invariant: a connection holds at most one line, and one answer or [`MAX_WAITING_BYTES`] of events; a client that
//! does not read its answer is not read from, and a subscriber that does not read is disconnected.

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use spillway_control::{Answer, Request};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Longest line that is taken.
const MAX_LINE_BYTES: usize = 4096;
/// Events that may wait for a client to read them.
const MAX_WAITING_BYTES: usize = 64 << 10;

/// One connection.
#[derive(Debug)]
pub(super) struct Peer {
    fd: OwnedFd,
    input: Vec<u8>,
    output: Vec<u8>,
    /// A request is being carried out; its answer comes later.
    waiting: bool,
    /// It is told of events, and asks nothing more.
    listens: bool,
    /// It records, and asks nothing more. Its ring goes with the answer.
    records: bool,
    ring: Option<OwnedFd>,
    /// Nothing more will be read.
    at_end: bool,
    gone: bool,
}

impl Peer {
    pub fn new(fd: OwnedFd) -> Peer {
        Peer {
            fd,
            input: Vec::new(),
            output: Vec::new(),
            waiting: false,
            listens: false,
            records: false,
            ring: None,
            at_end: false,
            gone: false,
        }
    }

    /// What to poll for. A hang-up shows in any case.
    pub fn interest(&self) -> PollFlags {
        if !self.output.is_empty() {
            PollFlags::OUT
        } else if self.waiting || self.asks_no_more() || self.at_end {
            PollFlags::empty()
        } else {
            PollFlags::IN
        }
    }

    /// Whether it is of the supervisor's own user, or root.
    pub fn is_owner(&self) -> bool {
        let own = rustix::process::geteuid();
        rustix::net::sockopt::socket_peercred(&self.fd)
            .is_ok_and(|peer| peer.uid.is_root() || peer.uid == own)
    }

    /// Whether there is nothing left to do for it.
    pub fn is_done(&self) -> bool {
        self.gone || self.at_end && !self.waiting && self.output.is_empty() && !self.has_line()
    }

    /// Moves bytes as poll said that it can.
    pub fn ready(&mut self, flags: PollFlags) {
        if flags.intersects(PollFlags::ERR)
            || (self.waiting || self.asks_no_more()) && flags.contains(PollFlags::HUP)
        {
            self.gone = true;
        } else if !self.output.is_empty() {
            self.flush();
        } else if !self.at_end {
            self.fill();
        }
    }

    /// The next request, when the last has been answered and its answer read. What is no request is answered here.
    pub fn next_request(&mut self) -> Option<Request> {
        while !self.gone && !self.waiting && !self.asks_no_more() && self.output.is_empty() {
            let Some(end) = self.input.iter().position(|&b| b == b'\n') else {
                if self.input.len() > MAX_LINE_BYTES {
                    self.input.clear();
                    self.at_end = true;
                    self.answer(&Answer::error(
                        "invalid",
                        format!("a line has at most {MAX_LINE_BYTES} bytes"),
                    ));
                }
                return None;
            };
            let line: Vec<u8> = self.input.drain(..=end).collect();
            if line.trim_ascii().is_empty() {
                continue;
            }
            match serde_json::from_slice(&line) {
                Ok(request) => {
                    self.waiting = true;
                    return Some(request);
                }
                Err(e) => self.answer(&Answer::error(
                    "invalid",
                    format!("not a request ({e}): send {{\"command\":\"ping\"}}, \"stats\", \"dirty\", \"reset\", \"set\", \"events\", \"trace\", \"curve\" or \"upgrade\""),
                )),
            }
        }
        None
    }

    /// Answers the request that was taken last.
    pub fn answer(&mut self, answer: &Answer) {
        self.waiting = false;
        self.output = serde_json::to_vec(answer).expect("an answer is plain data with text keys");
        self.output.push(b'\n');
        self.flush();
    }

    /// Answers with the ring that it reads from here on.
    pub fn record(&mut self, ring: OwnedFd, answer: &Answer) {
        (self.records, self.ring) = (true, Some(ring));
        self.answer(answer);
    }

    /// Whether it records.
    pub fn records(&self) -> bool {
        self.records && !self.gone
    }

    fn asks_no_more(&self) -> bool {
        self.listens || self.records
    }

    /// From here on it is told of events.
    pub fn listen(&mut self) {
        self.listens = true;
    }

    /// Tells of an event, if it listens.
    pub fn tell(&mut self, line: &[u8]) {
        if !self.listens || self.gone {
            return;
        }
        self.output.extend_from_slice(line);
        self.flush();
        self.gone |= self.output.len() > MAX_WAITING_BYTES;
    }

    fn has_line(&self) -> bool {
        self.input.contains(&b'\n')
    }

    fn fill(&mut self) {
        let mut buffer = [0; MAX_LINE_BYTES];
        match rustix::net::recv(&self.fd, &mut buffer[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => self.at_end = true,
            Ok((_, n)) => self.input.extend_from_slice(&buffer[..n.min(MAX_LINE_BYTES)]),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.gone = true,
        }
    }

    /// Sends what there is room for; the ring goes with the first byte.
    fn send(&mut self) -> Result<usize, Errno> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let Some(ring) = &self.ring else { return rustix::net::send(&self.fd, &self.output, flags) };
        let rights = [ring.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&rights)), "the space is made for one");
        let sent = rustix::net::sendmsg(&self.fd, &[IoSlice::new(&self.output)], &mut control, flags)?;
        self.ring = None;
        Ok(sent)
    }

    fn flush(&mut self) {
        while !self.output.is_empty() {
            match self.send() {
                Ok(n) => drop(self.output.drain(..n)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => {
                    self.gone = true;
                    return;
                }
            }
        }
    }
}

impl AsFd for Peer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;

    fn peer() -> (UnixStream, Peer) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (ours, Peer::new(theirs.into()))
    }

    fn line(stream: &UnixStream) -> Answer {
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    #[test]
    fn requests_come_one_at_a_time_and_in_order() {
        let (mut us, mut peer) = peer();
        us.write_all(b"{\"command\":\"ping\"}\n\n{\"command\":\"reset\",\"force\":true}\n{\"command\":\"re")
            .unwrap();
        peer.ready(PollFlags::IN);
        assert_eq!(peer.next_request(), Some(Request::Ping));
        assert_eq!(peer.next_request(), None);
        assert!(peer.interest().is_empty());
        peer.answer(&Answer::Ok(1.into()));
        assert_eq!(line(&us), Answer::Ok(1.into()));
        assert_eq!(peer.next_request(), Some(Request::Reset { force: true, discard_data: false }));
        peer.answer(&Answer::error("refused", "no"));
        assert_eq!(line(&us), Answer::error("refused", "no"));
        assert_eq!(peer.next_request(), None);
        us.write_all(b"set\"}\n").unwrap();
        us.shutdown(std::net::Shutdown::Write).unwrap();
        peer.ready(PollFlags::IN);
        peer.ready(PollFlags::IN);
        assert!(!peer.is_done());
        assert_eq!(peer.next_request(), Some(Request::Reset { force: false, discard_data: false }));
        peer.answer(&Answer::Ok(2.into()));
        assert!(peer.is_done());
    }

    #[test]
    fn garbage_is_answered_and_a_long_line_ends_it() {
        let (mut us, mut peer) = peer();
        us.write_all(b"\xff\x00{}\n{\"command\":\"format\"}\n").unwrap();
        peer.ready(PollFlags::IN);
        for _ in 0..2 {
            assert_eq!(peer.next_request(), None);
        }
        let mut lines = BufReader::new(us.try_clone().unwrap()).lines();
        for _ in 0..2 {
            assert!(lines.next().unwrap().unwrap().contains("\"invalid\""));
        }
        for _ in 0..3 {
            us.write_all(&[b'x'; 4000]).unwrap();
            peer.ready(PollFlags::IN);
            assert_eq!(peer.next_request(), None);
        }
        assert!(peer.is_done());
    }

    #[test]
    fn who_does_not_read_is_not_read_from() {
        let (mut us, mut peer) = peer();
        let request = b"{\"command\":\"stats\"}\n";
        let mut answered = 0;
        // More than the socket's buffers hold.
        let answer = Answer::Ok("x".repeat(64 << 10).into());
        us.set_nonblocking(true).unwrap();
        for _ in 0..1000 {
            let _ = us.write(request);
            if peer.interest().contains(PollFlags::IN) {
                peer.ready(PollFlags::IN);
            }
            while peer.next_request().is_some() {
                peer.answer(&answer);
                answered += 1;
            }
        }
        assert!(answered < 100 && peer.interest() == PollFlags::OUT);
        assert!(peer.input.len() <= 2 * MAX_LINE_BYTES && !peer.is_done());
    }
}
