//! A streamed image in the worker: the file of the cache, which chunks are in it, and the connection on which missing ones are
//! asked for. Owns that connection and the questions on it; never waits for an answer.
//!
//! Invariant: a question that a lost connection took with it is asked again on the next one, so that each is answered once.

use super::asks::{ANSWER_BYTES, Answer, MOST_ASKED, answered, ask};
use super::raw::RawImage;
use super::residency::Residency;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, recvmsg, send,
};
use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The image.
pub struct StreamedImage {
    file: RawImage,
    residency: Residency,
    chunk_bytes: u64,
    chunks: u64,
    connection: Option<OwnedFd>,
    /// Asked for on the connection, and not answered.
    asked: HashSet<u32>,
    /// To be asked for.
    unasked: VecDeque<u32>,
}

/// What became of a chunk that was asked for.
#[derive(Debug)]
pub enum Arrival {
    /// It can be read from the file.
    Resident,
    /// Its bytes, which the cache had no space for, from the start of this file.
    Passed(File),
    /// No source has it as its digest says.
    Damaged,
}

impl StreamedImage {
    /// An image as the supervisor has it: its file, the memory of its [`Residency`], and the size of its chunks. Nothing can be
    /// asked for before [`StreamedImage::connect`].
    ///
    /// # Errors
    /// The memory is not that of such an image.
    pub fn new(file: RawImage, memory: BorrowedFd<'_>, chunk_bytes: u64) -> io::Result<StreamedImage> {
        if chunk_bytes == 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let chunks = file.size_bytes().div_ceil(chunk_bytes);
        let residency = Residency::open(memory, chunks)?;
        let (asked, unasked) = (HashSet::new(), VecDeque::new());
        Ok(StreamedImage { file, residency, chunk_bytes, chunks, connection: None, asked, unasked })
    }

    /// Its file, in which the chunks that are not there are holes.
    pub fn file(&self) -> &RawImage {
        &self.file
    }

    /// The chunk in which a byte lies.
    #[inline]
    pub fn chunk_at(&self, offset: u64) -> u32 {
        (offset / self.chunk_bytes) as u32
    }

    /// How many chunks it has.
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// Where a chunk begins, in bytes.
    pub fn offset_of(&self, chunk: u32) -> u64 {
        u64::from(chunk) * self.chunk_bytes
    }

    /// Whether the chunk in which a byte lies can be read from the file.
    #[inline]
    pub fn has(&self, offset: u64) -> bool {
        self.residency.has(offset / self.chunk_bytes)
    }

    /// The connection, for a poll; none if it was lost.
    pub fn connection(&self) -> Option<BorrowedFd<'_>> {
        self.connection.as_ref().map(AsFd::as_fd)
    }

    /// Goes on with another connection, which does not block, and the memory that came with it. What was not answered is asked
    /// for again.
    ///
    /// # Errors
    /// As of [`StreamedImage::new`]; the old connection is ended all the same.
    pub fn connect(&mut self, connection: OwnedFd, memory: BorrowedFd<'_>) -> io::Result<()> {
        self.lose();
        self.residency = Residency::open(memory, self.chunks)?;
        self.connection = Some(connection);
        self.send();
        Ok(())
    }

    /// Asks for a chunk. Until it has arrived, it must not be asked for again.
    pub fn ask(&mut self, chunk: u32) {
        self.unasked.push_back(chunk);
        self.send();
    }

    /// The next answer. `None`: there is none yet, or the connection is lost (see [`StreamedImage::connection`]).
    pub fn arrival(&mut self) -> Option<(u32, Arrival)> {
        loop {
            match receive(self.connection.as_ref()?) {
                Ok(Some((chunk, arrival))) => {
                    // An answer to no question is none.
                    if self.asked.remove(&chunk) {
                        self.send();
                        return Some((chunk, arrival));
                    }
                }
                Ok(None) => return None,
                Err(_) => {
                    self.lose();
                    return None;
                }
            }
        }
    }

    fn lose(&mut self) {
        self.connection = None;
        let mut again: Vec<_> = self.asked.drain().collect();
        again.sort_unstable();
        again.into_iter().rev().for_each(|chunk| self.unasked.push_front(chunk));
    }

    /// Asks for what is to be asked for, as far as there is space on the connection.
    fn send(&mut self) {
        while let (Some(connection), Some(&chunk)) = (&self.connection, self.unasked.front())
            && self.asked.len() < MOST_ASKED
        {
            match send(connection, &ask(chunk), SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(_) => {}
                // So few questions always have space on a connection of which the other side is alive and reads.
                Err(Errno::AGAIN) if !self.asked.is_empty() => return,
                Err(_) => return self.lose(),
            }
            self.unasked.pop_front();
            self.asked.insert(chunk);
        }
    }
}

/// The next packet; `None`: there is none yet.
fn receive(connection: &OwnedFd) -> io::Result<Option<(u32, Arrival)>> {
    let mut packet = [0; ANSWER_BYTES + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut whole = [IoSliceMut::new(&mut packet)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match recvmsg(connection, &mut whole, &mut ancillary, flags) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            received => break received?,
        }
    };
    let mut file = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            file = rights.last();
        }
    }
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(invalid());
    }
    let (chunk, answer) = answered(&packet[..received.bytes]).ok_or_else(invalid)?;
    let arrival = match (answer, file) {
        (Answer::Resident, None) => Arrival::Resident,
        (Answer::Passed, Some(file)) => Arrival::Passed(file.into()),
        (Answer::Damaged, None) => Arrival::Damaged,
        _ => return Err(invalid()),
    };
    Ok(Some((chunk, arrival)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asks::{answer, asked};
    use crate::residency::ResidencyWriter;
    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::io::IoSlice;
    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SocketFlags, SocketType, sendmsg,
        socketpair,
    };
    use std::io::Write;

    const CHUNK: u64 = 1 << 20;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    fn image(chunks: u64, memory: BorrowedFd<'_>) -> StreamedImage {
        let file: File = memfd_create("t", MemfdFlags::CLOEXEC).unwrap().into();
        file.set_len(chunks * CHUNK).unwrap();
        StreamedImage::new(RawImage::new(file.into(), chunks * CHUNK, false), memory, CHUNK).unwrap()
    }

    fn questions(server: &OwnedFd) -> Vec<u32> {
        let mut all = Vec::new();
        let mut packet = [0; 64];
        while let Ok((len, _)) = rustix::net::recv(server, &mut packet[..], RecvFlags::DONTWAIT)
            && len > 0
        {
            all.push(asked(&packet[..len]).unwrap());
        }
        all
    }

    fn reply(server: &OwnedFd, chunk: u32, kind: Answer, file: Option<&File>) {
        let fds: Vec<_> = file.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        sendmsg(server, &[IoSlice::new(&answer(chunk, kind))], &mut ancillary, SendFlags::empty()).unwrap();
    }

    #[test]
    fn what_was_not_answered_is_asked_again_after_the_connection_was_lost() {
        let writer = ResidencyWriter::new(1000).unwrap();
        let mut image = image(1000, writer.memory());
        writer.set(9);
        assert!(image.has(9 * CHUNK) && image.has(10 * CHUNK - 1) && !image.has(10 * CHUNK));
        // Before there is a connection, questions wait.
        [7, 3].into_iter().for_each(|chunk| image.ask(chunk));
        let (client, server) = pair();
        image.connect(client, writer.memory()).unwrap();
        assert_eq!(questions(&server), [7, 3]);
        image.ask(8);
        assert_eq!(questions(&server), [8]);
        reply(&server, 4, Answer::Resident, None);
        reply(&server, 3, Answer::Resident, None);
        assert!(matches!(image.arrival(), Some((3, Arrival::Resident))), "nobody has asked for 4");
        assert!(image.arrival().is_none() && image.connection().is_some());
        drop(server);
        assert!(image.arrival().is_none() && image.connection().is_none());
        image.ask(1);
        let (client, server) = pair();
        image.connect(client, writer.memory()).unwrap();
        assert_eq!(questions(&server), [7, 8, 1]);
        let mut passed: File = memfd_create("t", MemfdFlags::CLOEXEC).unwrap().into();
        passed.write_all(b"content").unwrap();
        reply(&server, 8, Answer::Passed, Some(&passed));
        reply(&server, 7, Answer::Damaged, None);
        assert!(matches!(image.arrival(), Some((8, Arrival::Passed(_)))));
        assert!(matches!(image.arrival(), Some((7, Arrival::Damaged))));
    }

    #[test]
    fn no_more_are_asked_for_than_the_other_side_reads_and_nonsense_ends_the_connection() {
        let writer = ResidencyWriter::new(1000).unwrap();
        let mut image = image(1000, writer.memory());
        let (client, server) = pair();
        image.connect(client, writer.memory()).unwrap();
        (0..1000).for_each(|chunk| image.ask(chunk));
        let first: Vec<u32> = questions(&server);
        assert_eq!(first, (0..MOST_ASKED as u32).collect::<Vec<_>>());
        reply(&server, 5, Answer::Resident, None);
        assert!(image.arrival().is_some());
        assert_eq!(questions(&server), [MOST_ASKED as u32]);
        let file: File = memfd_create("t", MemfdFlags::CLOEXEC).unwrap().into();
        for nonsense in 0..4 {
            let (client, server) = pair();
            image.connect(client, writer.memory()).unwrap();
            match nonsense {
                0 => reply(&server, 6, Answer::Passed, None),
                1 => reply(&server, 6, Answer::Resident, Some(&file)),
                2 => _ = send(&server, &[0; 3], SendFlags::empty()).unwrap(),
                _ => _ = send(&server, &[0; 99], SendFlags::empty()).unwrap(),
            }
            assert!(image.arrival().is_none() && image.connection().is_none(), "{nonsense}");
        }
        assert!(image.connect(pair().0, ResidencyWriter::new(8).unwrap().memory()).is_err());
        assert!(image.connection().is_none());
    }
}
