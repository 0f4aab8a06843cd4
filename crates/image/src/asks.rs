//! What a worker and `spillway-streamd` say to each other about a streamed image: one packet of a SEQPACKET socket for each
//! chunk that is asked for, and one for each answer, in any order. Owns the form of these packets.
//!
//! A connection is of one image, which its first packet names ([`open`]). The answer to that ([`Opened`]) has, as descriptors,
//! the image's file and the memory of its [`crate::Residency`]. The supervisor opens the connection and gives it to the worker,
//! which can then ask for chunks of that image and for nothing else.

use crate::digests::ChunkDigest;

/// First word of the packet that opens an image, and of its answer.
const OPEN: &[u8; 4] = b"open";

/// Bytes of a question.
pub const ASK_BYTES: usize = 4;
/// Bytes of an answer.
pub const ANSWER_BYTES: usize = 8;
/// Bytes of the answer to [`open`].
pub const OPENED_BYTES: usize = 20;
/// Questions of a connection that are not answered, at most.
pub const MOST_ASKED: usize = 64;

/// What is said of an image that was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Size of the image, in bytes.
    pub size_bytes: u64,
    /// Size of its chunks, in bytes; the last may be shorter.
    pub chunk_bytes: u64,
}

/// The packet that opens the image with this digest.
pub fn open(root: &ChunkDigest) -> [u8; 36] {
    let mut packet = [0; 36];
    packet[..4].copy_from_slice(OPEN);
    packet[4..].copy_from_slice(root);
    packet
}

/// Reads such a packet.
pub fn opens(packet: &[u8]) -> Option<ChunkDigest> {
    packet.strip_prefix(OPEN)?.try_into().ok()
}

impl Opened {
    /// As a packet.
    pub fn packet(&self) -> [u8; OPENED_BYTES] {
        let mut packet = [0; OPENED_BYTES];
        packet[..4].copy_from_slice(OPEN);
        packet[4..12].copy_from_slice(&self.size_bytes.to_le_bytes());
        packet[12..].copy_from_slice(&self.chunk_bytes.to_le_bytes());
        packet
    }

    /// Reads such a packet.
    pub fn parse(packet: &[u8]) -> Option<Opened> {
        let numbers: &[u8; 16] = packet.strip_prefix(OPEN)?.try_into().ok()?;
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|n| numbers[at + n]));
        Some(Opened { size_bytes: number(0), chunk_bytes: number(8) })
    }
}

/// What is answered about a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Answer {
    /// It is in the file, and its bit is set.
    Resident = 0,
    /// The cache has no space for it: its bytes are in the file that comes with the answer, from the start.
    Passed = 1,
    /// No source has it as its digest says.
    Damaged = 2,
}

/// The packet that asks for a chunk.
pub fn ask(chunk: u32) -> [u8; ASK_BYTES] {
    chunk.to_le_bytes()
}

/// Reads such a packet.
pub fn asked(packet: &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(packet.try_into().ok()?))
}

/// The packet that answers it.
pub fn answer(chunk: u32, answer: Answer) -> [u8; ANSWER_BYTES] {
    let mut packet = [0; ANSWER_BYTES];
    packet[..4].copy_from_slice(&chunk.to_le_bytes());
    packet[4..].copy_from_slice(&(answer as u32).to_le_bytes());
    packet
}

/// Reads such a packet.
pub fn answered(packet: &[u8]) -> Option<(u32, Answer)> {
    let (chunk, kind) = packet.split_first_chunk::<4>()?;
    let answer = match u32::from_le_bytes(kind.try_into().ok()?) {
        0 => Answer::Resident,
        1 => Answer::Passed,
        2 => Answer::Damaged,
        _ => return None,
    };
    Some((u32::from_le_bytes(*chunk), answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_read_as_they_are_written() {
        assert_eq!(asked(&ask(7)), Some(7));
        for kind in [Answer::Resident, Answer::Passed, Answer::Damaged] {
            assert_eq!(answered(&answer(u32::MAX, kind)), Some((u32::MAX, kind)));
        }
        let opened = Opened { size_bytes: 3, chunk_bytes: u64::MAX };
        assert_eq!(Opened::parse(&opened.packet()), Some(opened));
        assert_eq!(opens(&open(&[7; 32])), Some([7; 32]));
        for packet in [&[][..], &[0; 3], &[0; 7], &[0; 9], &[0, 0, 0, 0, 3, 0, 0, 0]] {
            assert!(asked(packet).is_none() && answered(packet).is_none(), "{packet:?}");
            assert!(opens(packet).is_none() && Opened::parse(packet).is_none(), "{packet:?}");
        }
    }
}
