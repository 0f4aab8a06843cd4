//! What a worker and `spillway-streamd` say to each other: packets, and descriptors of memory, with either side hostile. A question is
//! answered once, however often the connection is lost; memory that could be cut off is never mapped.
//!
//! The input is steps, as [`Course::step`] reads them.

use crate::input::Input;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    recv, sendmsg, socketpair,
};
use spillway_image::asks::{Answer, MOST_ASKED, Opened, answer, answered, ask, asked, open, opens};
use spillway_image::{Arrival, RawImage, Residency, ResidencyWriter, StreamedImage};
use std::collections::HashSet;
use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

const CHUNK: u64 = 1 << 20;
/// Steps of a course, so that one input does not take long.
const MOST_STEPS: usize = 400;

/// Reads the bytes as packets, and as a course of events between both sides.
pub fn stream_packets(data: &[u8]) {
    packets(&data[..data.len().min(64)]);
    let mut input = Input(data);
    let chunks = 1 + u64::from(input.u16()) % 2000;
    let mut course = Course::new(chunks);
    for _ in 0..MOST_STEPS {
        if input.is_empty() {
            break;
        }
        course.step(&mut input);
    }
    course.finish();
}

/// What a packet is read as is what it says.
fn packets(packet: &[u8]) {
    assert!(opens(packet).is_none_or(|root| open(&root) == packet));
    assert!(Opened::parse(packet).is_none_or(|opened| opened.packet() == packet));
    assert!(asked(packet).is_none_or(|chunk| ask(chunk) == packet));
    assert!(answered(packet).is_none_or(|(chunk, kind)| answer(chunk, kind) == packet));
}

fn memfd(flags: MemfdFlags, bytes: u64) -> OwnedFd {
    let memory = memfd_create("fuzz", MemfdFlags::CLOEXEC | flags).expect("memory");
    ftruncate(&memory, bytes).expect("it is new");
    memory
}

/// A descriptor of something, for the memory of an image with this many chunks.
fn hostile(input: &mut Input<'_>, chunks: u64) -> OwnedFd {
    let len = chunks.div_ceil(8).max(1);
    let len = match input.u8() % 4 {
        0 => len + 1 + u64::from(input.u8()),
        1 => u64::from(input.u8()),
        _ => len,
    };
    match input.u8() % 8 {
        0 => memfd(MemfdFlags::empty(), len),
        1 => eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
        2 => std::io::pipe().expect("a pipe").0.into(),
        3 => File::open("/dev/zero").expect("it is there").into(),
        4 => File::open("/proc/self").expect("it is there").into(),
        _ => {
            let memory = File::from(memfd(MemfdFlags::ALLOW_SEALING, len));
            let most = usize::from(input.u8()).min(len as usize);
            memory.write_all_at(input.bytes(most), 0).expect("it is inside");
            // Those against being sealed, cut off, extended and written, in this order.
            let seals = SealFlags::from_bits_retain(u32::from(input.u8()) & 0x1F);
            fcntl_add_seals(&memory, seals).expect("it may be sealed");
            memory.into()
        }
    }
}

/// Maps a descriptor only if nobody can cut it off, and reads its bits.
fn opens_residency(memory: BorrowedFd<'_>, chunks: u64) -> bool {
    let Ok(residency) = Residency::open(memory, chunks) else { return false };
    let seals = fcntl_get_seals(memory).expect("it is memory");
    let len = chunks.div_ceil(8).max(1);
    assert!(seals.contains(SealFlags::SHRINK) && fstat(memory).expect("it is open").st_size as u64 == len);
    assert!(ftruncate(memory, len - 1).is_err(), "a bit would be a fault");
    let mut bits = vec![0; len as usize];
    let file = File::from(memory.try_clone_to_owned().expect("a descriptor"));
    file.read_exact_at(&mut bits, 0).expect("it is as long");
    for chunk in 0..chunks + 9 {
        let is_set = bits.get((chunk / 8) as usize).is_some_and(|byte| byte >> (chunk % 8) & 1 != 0);
        assert_eq!(residency.has(chunk), chunk < chunks && is_set);
    }
    assert!(!residency.has(u64::MAX));
    true
}

/// A worker's image, and what the other side of its connection has seen.
struct Course {
    image: StreamedImage,
    writer: ResidencyWriter,
    chunks: u64,
    set: HashSet<u64>,
    /// Asked for by the test, and not arrived.
    waiting: HashSet<u32>,
    /// The other side of the connection.
    server: Option<OwnedFd>,
    /// Received by it, and not answered.
    questions: HashSet<u32>,
    /// It has answered what it was not asked: then it may receive questions that were answered already.
    is_early: bool,
}

impl Course {
    fn new(chunks: u64) -> Course {
        let writer = ResidencyWriter::new(chunks).expect("memory");
        let file = RawImage::new(memfd(MemfdFlags::empty(), chunks * CHUNK), chunks * CHUNK, false);
        let image = StreamedImage::new(file, writer.memory(), CHUNK).expect("its own memory");
        let (set, waiting, questions) = (HashSet::new(), HashSet::new(), HashSet::new());
        Course { image, writer, chunks, set, waiting, server: None, questions, is_early: false }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() % 10 {
            0 | 1 => self.ask(u32::from(input.u16()) % (self.chunks as u32 + 2)),
            2 => self.receive(),
            3 => {
                let first = self.questions.iter().min().copied();
                let chunk = if input.u8() % 4 == 0 { Some(input.u32()) } else { first };
                if let Some(chunk) = chunk {
                    let kind =
                        [Answer::Resident, Answer::Passed, Answer::Damaged][usize::from(input.u8()) % 3];
                    self.reply(chunk, kind);
                }
            }
            4 => {
                let len = usize::from(input.u8()) % 20;
                let fds = usize::from(input.u8()) % 3;
                self.send(input.bytes(len), fds);
            }
            5 => while self.arrives() {},
            6 => self.server = None,
            7 => self.connect(),
            8 => {
                let chunk = u64::from(input.u16());
                self.writer.set(chunk);
                self.set.extend(Some(chunk).filter(|chunk| *chunk < self.chunks));
                assert!((0..self.chunks).all(|chunk| self.writer.has(chunk) == self.set.contains(&chunk)));
                assert!(self.set.iter().all(|chunk| self.image.has(chunk * CHUNK)));
            }
            _ => self.connect_hostile(input),
        }
        let is_lost = self.image.connection().is_none();
        assert!(!is_lost || self.image.arrival().is_none());
    }

    /// Asks for a chunk that is not waited for, as the worker does.
    fn ask(&mut self, chunk: u32) {
        if self.waiting.insert(chunk) {
            self.image.ask(chunk);
        }
    }

    /// The other side reads its questions: each is one that is waited for, and comes once, unless it was answered before it was
    /// read.
    fn receive(&mut self) {
        let mut packet = [0; 64];
        while let Some(server) = &self.server
            && let Ok((len, _)) = recv(server, &mut packet[..], RecvFlags::DONTWAIT)
            && len > 0
        {
            let chunk = asked(&packet[..len]).expect("a worker says nothing else");
            let is_new = self.questions.insert(chunk);
            assert!(self.is_early || (self.waiting.contains(&chunk) && is_new), "{chunk} is asked for twice");
        }
        assert!(self.is_early || self.questions.len() <= MOST_ASKED);
    }

    fn reply(&mut self, chunk: u32, kind: Answer) {
        let fds = usize::from(kind == Answer::Passed);
        if self.send(&answer(chunk, kind), fds) {
            self.questions.remove(&chunk);
        }
    }

    /// Sends a packet with so many descriptors. False: nobody is there.
    fn send(&mut self, packet: &[u8], fds: usize) -> bool {
        self.is_early |= answered(packet).is_none_or(|(chunk, _)| !self.questions.contains(&chunk));
        let Some(server) = &self.server else { return false };
        let file = memfd(MemfdFlags::empty(), 1);
        let fds = vec![file.as_fd(); fds];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(server, &[IoSlice::new(packet)], &mut ancillary, flags).is_ok()
    }

    /// Takes one answer: of a chunk that is waited for, in its form.
    fn arrives(&mut self) -> bool {
        let Some((chunk, arrival)) = self.image.arrival() else { return false };
        assert!(self.waiting.remove(&chunk), "{chunk} was not asked for");
        if let Arrival::Passed(file) = arrival {
            assert_eq!(file.metadata().expect("it is open").len(), 1);
        }
        true
    }

    fn connect(&mut self) {
        let (ours, theirs) = pair();
        self.image.connect(ours, self.writer.memory()).expect("its own memory");
        (self.server, self.questions, self.is_early) = (Some(theirs), HashSet::new(), false);
    }

    /// Connects with memory that may be anything: it is taken only if it is safe to read.
    fn connect_hostile(&mut self, input: &mut Input<'_>) {
        let any = match input.u8() % 4 {
            0 => input.u64(),
            _ => u64::from(input.u16()),
        };
        let other = hostile(input, any % (1 << 20));
        opens_residency(other.as_fd(), any % (1 << 20));
        assert!(Residency::open(other.as_fd(), any | 1 << 40).is_err(), "it is not as long");
        let memory = hostile(input, self.chunks);
        let is_safe = opens_residency(memory.as_fd(), self.chunks);
        let (ours, theirs) = pair();
        let done = self.image.connect(ours, memory.as_fd());
        assert_eq!(done.is_ok(), is_safe);
        drop(theirs);
        // Its bits are of another memory: the next steps are with the right one.
        self.connect();
    }

    /// After all that, each question that is waited for is answered.
    fn finish(mut self) {
        self.connect();
        while !self.waiting.is_empty() {
            self.receive();
            assert!(!self.questions.is_empty(), "{} are never asked for", self.waiting.len());
            let mut questions: Vec<_> = self.questions.iter().copied().collect();
            questions.sort_unstable();
            questions.into_iter().for_each(|chunk| self.reply(chunk, Answer::Resident));
            while self.arrives() {}
        }
    }
}

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a socket pair")
}

/// Packets, and courses in which all goes well, or most.
pub fn seeds() -> Vec<Vec<u8>> {
    let ask = |chunk: u16| [&[0][..], &chunk.to_le_bytes()].concat();
    let begin = [&999u16.to_le_bytes()[..], &[7]].concat();
    let well = [begin.clone(), ask(3), ask(4), vec![2, 3, 1, 0, 8, 4, 0, 3, 1, 1, 5]].concat();
    let lost = [begin.clone(), ask(9), ask(8), vec![2, 6, 5, 7, 2, 3, 1, 2, 5]].concat();
    let many =
        [begin.clone(), (0..200).flat_map(ask).collect(), vec![2, 5], [3, 1, 0, 5, 2].repeat(40)].concat();
    let nonsense =
        [begin.clone(), ask(1), vec![2, 4, 8, 1, 1, 0, 0, 0, 0, 0, 0, 0, 5, 7, 4, 3, 0, 1, 2, 3, 5]].concat();
    let memory =
        [begin, ask(1), vec![9, 1, 8, 0, 2, 7, 2, 255, 255, 15, 2, 7, 0, 15, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8]]
            .concat();
    let opened = Opened { size_bytes: 5 << 20, chunk_bytes: 1 << 20 };
    vec![
        well,
        lost,
        many,
        nonsense,
        memory,
        open(&[7; 32]).to_vec(),
        opened.packet().to_vec(),
        spillway_image::asks::ask(7).to_vec(),
        answer(7, Answer::Passed).to_vec(),
    ]
}
