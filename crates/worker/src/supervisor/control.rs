//! The control socket's protocol: one JSON object a line, one answer a line, in order; to subscribers also one line
//! for each event. Owns a connection's buffers; never waits for a client.
//!
//! Invariant: a connection holds at most one line, and one answer or [`MAX_WAITING_BYTES`] of events; a client that
//! does not read its answer is not read from, and a subscriber that does not read is disconnected.

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use spillway_control::{Request, Response};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Longest line that is accepted.
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
    /// It has subscribed to events, and sends no further request.
    is_subscribed: bool,
    /// It records, and sends no further request.
    records: bool,
    /// Memory to pass with the answer.
    memory: Option<OwnedFd>,
    /// The client has closed its direction, or has sent a line that is too long.
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
            is_subscribed: false,
            records: false,
            memory: None,
            at_end: false,
            gone: false,
        }
    }

    /// What to poll for. A hang-up shows in any case.
    pub fn interest(&self) -> PollFlags {
        if !self.output.is_empty() {
            PollFlags::OUT
        } else if self.waiting || self.is_stream() || self.at_end {
            PollFlags::empty()
        } else {
            PollFlags::IN
        }
    }

    /// Whether the client runs as the supervisor's user or as root.
    pub fn is_owner(&self) -> bool {
        let own = rustix::process::geteuid();
        rustix::net::sockopt::socket_peercred(&self.fd)
            .is_ok_and(|peer| peer.uid.is_root() || peer.uid == own)
    }

    /// Whether the connection can be closed.
    pub fn is_done(&self) -> bool {
        self.gone || self.at_end && !self.waiting && self.output.is_empty() && !self.has_line()
    }

    /// Reads or writes, as poll(2) has reported.
    pub fn ready(&mut self, flags: PollFlags) {
        if flags.intersects(PollFlags::ERR)
            || (self.waiting || self.is_stream()) && flags.contains(PollFlags::HUP)
        {
            self.gone = true;
        } else if !self.output.is_empty() {
            self.flush();
        } else if !self.at_end {
            self.fill();
        }
    }

    /// Returns the next request, once the answer to the last one has been sent. Answers invalid requests itself.
    pub fn next_request(&mut self) -> Option<Request> {
        while !self.gone && !self.waiting && !self.is_stream() && self.output.is_empty() {
            let Some(end) = self.input.iter().position(|&b| b == b'\n') else {
                if self.input.len() > MAX_LINE_BYTES {
                    self.input.clear();
                    self.at_end = true;
                    self.answer(&Response::error(
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
                Err(e) => self.answer(&Response::error(
                    "invalid",
                    format!("not a request ({e}): send {{\"command\":\"ping\"}}, \"stats\", \"counters\", \"latency\", \"dirty\", \"reset\", \"set\", \"events\", \"trace\", \"curve\" or \"upgrade\""),
                )),
            }
        }
        None
    }

    /// Answers the last request.
    pub fn answer(&mut self, answer: &Response) {
        self.waiting = false;
        self.output = serde_json::to_vec(answer).expect("an answer is plain data with text keys");
        self.output.push(b'\n');
        self.flush();
    }

    /// Answers the last request, and passes this memory with it.
    pub fn answer_with(&mut self, memory: OwnedFd, answer: &Response) {
        self.memory = Some(memory);
        self.answer(answer);
    }

    /// The same of the ring buffer: the client records from now on.
    pub fn record(&mut self, ring: OwnedFd, answer: &Response) {
        self.records = true;
        self.answer_with(ring, answer);
    }

    /// Whether the client records.
    pub fn records(&self) -> bool {
        self.records && !self.gone
    }

    fn is_stream(&self) -> bool {
        self.is_subscribed || self.records
    }

    /// Sends events to this connection from now on.
    pub fn subscribe(&mut self) {
        self.is_subscribed = true;
    }

    /// Sends an event, if the client has subscribed.
    pub fn send_event(&mut self, line: &[u8]) {
        if !self.is_subscribed || self.gone {
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

    /// Sends what there is room for; memory goes with the first byte.
    fn send(&mut self) -> Result<usize, Errno> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let Some(memory) = &self.memory else { return rustix::net::send(&self.fd, &self.output, flags) };
        let rights = [memory.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&rights)), "the space is made for one");
        let sent = rustix::net::sendmsg(&self.fd, &[IoSlice::new(&self.output)], &mut control, flags)?;
        self.memory = None;
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

    fn line(stream: &UnixStream) -> Response {
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
        peer.answer(&Response::Ok(1.into()));
        assert_eq!(line(&us), Response::Ok(1.into()));
        assert_eq!(peer.next_request(), Some(Request::Reset { force: true, discard_data: false }));
        peer.answer(&Response::error("refused", "no"));
        assert_eq!(line(&us), Response::error("refused", "no"));
        assert_eq!(peer.next_request(), None);
        us.write_all(b"set\"}\n").unwrap();
        us.shutdown(std::net::Shutdown::Write).unwrap();
        peer.ready(PollFlags::IN);
        peer.ready(PollFlags::IN);
        assert!(!peer.is_done());
        assert_eq!(peer.next_request(), Some(Request::Reset { force: false, discard_data: false }));
        peer.answer(&Response::Ok(2.into()));
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
    fn memory_goes_with_one_answer_and_requests_go_on() {
        let (mut us, mut peer) = peer();
        us.write_all(b"{\"command\":\"counters\"}\n{\"command\":\"ping\"}\n").unwrap();
        peer.ready(PollFlags::IN);
        assert_eq!(peer.next_request(), Some(Request::Counters));
        let (memory, _other) = rustix::pipe::pipe().unwrap();
        peer.answer_with(memory, &Response::Ok(1.into()));
        let receive = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
            let mut bytes = [0; 100];
            let mut whole = [std::io::IoSliceMut::new(&mut bytes)];
            rustix::net::recvmsg(&us, &mut whole, &mut control, RecvFlags::empty()).unwrap();
            control.drain().count()
        };
        assert_eq!(receive(), 1);
        assert_eq!(peer.next_request(), Some(Request::Ping));
        peer.answer(&Response::Ok(2.into()));
        assert_eq!(receive(), 0);
        assert!(!peer.records() && !peer.is_done());
    }

    #[test]
    fn who_does_not_read_is_not_read_from() {
        let (mut us, mut peer) = peer();
        let request = b"{\"command\":\"stats\"}\n";
        let mut answered = 0;
        // More than the socket's buffers hold.
        let answer = Response::Ok("x".repeat(64 << 10).into());
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
