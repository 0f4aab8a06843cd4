//! The queue of unsent replies: small pieces and whole data buffers, in order. Never blocks and never raises SIGPIPE.
//!
//! Invariant: `bytes` is the number of unsent bytes; data buffers go back to the pool when they are sent.

use super::buffer::{Buffer, Pool};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::collections::VecDeque;
use std::io::IoSlice;

/// Pieces of memory in one system call: 32 replies of header and data.
const SLICES: usize = 64;
/// A store of small pieces that has grown past this is compacted, or freed when empty.
const KEPT_SMALL_BYTES: usize = 64 << 10;

enum Segment {
    /// The next so many bytes of `small`.
    Small(usize),
    /// The first so many bytes of a buffer.
    Data(Buffer, usize),
}

/// Replies that wait to be sent.
pub struct Output {
    segments: VecDeque<Segment>,
    /// Bytes of the first segment that have been sent.
    front_sent: usize,
    /// The bytes of all small segments, sent ones first.
    small: Vec<u8>,
    /// Where the first unsent small segment starts.
    small_start: usize,
    /// Unsent bytes in all.
    bytes: usize,
}

impl Output {
    pub fn new() -> Self {
        Output { segments: VecDeque::new(), front_sent: 0, small: Vec::new(), small_start: 0, bytes: 0 }
    }

    /// Unsent bytes.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Unsent small bytes.
    pub fn small_bytes(&self) -> usize {
        self.small.len() - self.small_start
    }

    /// Drops everything: nobody will read it.
    pub fn clear(&mut self, pool: &mut Pool) {
        for segment in std::mem::replace(self, Output::new()).segments {
            if let Segment::Data(buffer, _) = segment {
                pool.give(buffer);
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Queues a copy of `bytes`.
    #[inline]
    pub fn small(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.small.extend_from_slice(bytes);
        self.bytes += bytes.len();
        if let Some(Segment::Small(len)) = self.segments.back_mut() {
            *len += bytes.len();
        } else {
            self.segments.push_back(Segment::Small(bytes.len()));
        }
    }

    /// Queues the first `len` bytes of a buffer. `len` is not 0.
    #[inline]
    pub fn data(&mut self, buffer: Buffer, len: usize) {
        self.bytes += len;
        self.segments.push_back(Segment::Data(buffer, len));
    }

    /// Sends until everything is sent or the socket takes no more.
    pub fn send(&mut self, socket: BorrowedFd<'_>, pool: &mut Pool) -> Result<(), Errno> {
        while self.bytes > 0 {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let mut count = 0;
            let mut offered = 0;
            let mut small_at = self.small_start;
            for segment in self.segments.iter().take(SLICES) {
                let skip = if count == 0 { self.front_sent } else { 0 };
                let unsent = match segment {
                    Segment::Small(len) => {
                        small_at += len;
                        &self.small[small_at - len + skip..small_at]
                    }
                    Segment::Data(buffer, len) => &buffer.bytes(*len)[skip..],
                };
                slices[count] = IoSlice::new(unsent);
                offered += unsent.len();
                count += 1;
            }
            let mut none = SendAncillaryBuffer::default();
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(socket, &slices[..count], &mut none, flags) {
                Ok(sent) => {
                    self.sent(sent, pool);
                    if sent < offered {
                        // A stream socket takes less only when it is full.
                        return Ok(());
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn sent(&mut self, mut n: usize, pool: &mut Pool) {
        self.bytes -= n;
        n += self.front_sent;
        while let Some(&(Segment::Small(len) | Segment::Data(_, len))) = self.segments.front() {
            if n < len {
                break;
            }
            n -= len;
            match self.segments.pop_front() {
                Some(Segment::Small(len)) => self.small_start += len,
                Some(Segment::Data(buffer, _)) => pool.give(buffer),
                None => {}
            }
        }
        self.front_sent = n;
        if self.segments.is_empty() {
            self.small.clear();
            self.small_start = 0;
            self.small.shrink_to(KEPT_SMALL_BYTES);
        } else if self.small_start > KEPT_SMALL_BYTES {
            self.small.drain(..self.small_start);
            self.small_start = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::buffer::Budget;
    use super::*;
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn what_is_queued_arrives_in_order_while_the_queue_never_empties() {
        let (server, mut client) = UnixStream::pair().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&server, 4096).unwrap();
        client.set_nonblocking(true).unwrap();
        let (mut output, mut pool) = (Output::new(), Pool::new(&Budget::new()));
        let (mut sent, mut seen) = (0u32, 0u32);
        let mut left = Vec::new();
        let mut small_was_large = false;
        for round in 0..40_000usize {
            for word in 0..round * 7 % 40 {
                // Words one after the other, small and in buffers of several.
                if word % 5 == 0 {
                    let words = 1 + round % 300;
                    let mut buffer = pool.take(words * 4);
                    for word in buffer.bytes_mut(words * 4).chunks_exact_mut(4) {
                        word.copy_from_slice(&sent.to_be_bytes());
                        sent += 1;
                    }
                    output.data(buffer, words * 4);
                } else {
                    output.small(&sent.to_be_bytes());
                    sent += 1;
                }
            }
            small_was_large |= output.small_start > KEPT_SMALL_BYTES / 2;
            output.send(server.as_fd(), &mut pool).unwrap();
            // The reader takes what there is whenever the queue is long, and never all.
            while output.bytes() > 200_000 {
                let mut part = [0; 1000];
                let n = client.read(&mut part).unwrap();
                left.extend_from_slice(&part[..n]);
                output.send(server.as_fd(), &mut pool).unwrap();
            }
            let whole = left.len() / 4 * 4;
            for word in left[..whole].chunks_exact(4) {
                assert_eq!(u32::from_be_bytes(word.try_into().unwrap()), seen, "round {round}");
                seen += 1;
            }
            left.drain(..whole);
            assert!(output.small.len() < 600_000, "{}", output.small.len());
        }
        assert!(small_was_large && seen > 1_000_000);
    }

    #[test]
    fn a_peer_that_has_gone_is_an_error_and_no_signal() {
        let (server, client) = UnixStream::pair().unwrap();
        drop(client);
        let mut output = Output::new();
        output.small(b"anybody?");
        assert_eq!(output.send(server.as_fd(), &mut Pool::new(&Budget::new())), Err(Errno::PIPE));
    }
}
