//! Unpacks gzip while it is read. Holds a window and a buffer.
//!
//! Invariants: each member's checksum and length are compared at its end; a file that is cut off is an error, never
//! a short file.

use super::packed::cut_off;
use miniz_oxide::inflate::stream::{InflateState, inflate};
use miniz_oxide::{DataFormat, MZError, MZFlush, MZStatus};
use std::io::{self, BufRead, Read};

/// Flags of a member's head.
const CHECKSUM: u8 = 2;
const EXTRA: u8 = 4;
const NAME: u8 = 8;
const COMMENT: u8 = 16;
/// Most bytes of a name or a comment.
const MAX_TEXT: usize = 64 << 10;

/// Unpacks gzip. Also of files of several members, as log rotation and parallel packers make them.
pub struct Gunzip<R: BufRead> {
    from: R,
    state: Box<InflateState>,
    in_member: bool,
    crc: u32,
    len: u32,
    any: bool,
}

impl<R: BufRead> Gunzip<R> {
    /// Starts to unpack.
    pub fn new(from: R) -> Gunzip<R> {
        let state = InflateState::new_boxed(DataFormat::Raw);
        Gunzip { from, state, in_member: false, crc: 0, len: 0, any: false }
    }

    /// The head of the next member. False: there is none.
    fn begin_member(&mut self) -> io::Result<bool> {
        if self.from.fill_buf()?.is_empty() {
            return if self.any { Ok(false) } else { Err(bad("it is empty")) };
        }
        let mut head = [0; 10];
        self.from.read_exact(&mut head)?;
        let [a, b, method, flags, ..] = head;
        if [a, b] != [0x1F, 0x8B] {
            return Err(bad(if self.any { "something else follows it" } else { "it is not packed by gzip" }));
        }
        if method != 8 || flags & !(1 | CHECKSUM | EXTRA | NAME | COMMENT) != 0 {
            return Err(bad("it is packed in a way that is not known"));
        }
        if flags & EXTRA != 0 {
            let mut len = [0; 2];
            self.from.read_exact(&mut len)?;
            self.skip(usize::from(u16::from_le_bytes(len)))?;
        }
        for flag in [NAME, COMMENT] {
            if flags & flag != 0 {
                self.skip_text()?;
            }
        }
        if flags & CHECKSUM != 0 {
            self.skip(2)?;
        }
        self.state.reset(DataFormat::Raw);
        (self.in_member, self.crc, self.len, self.any) = (true, !0, 0, true);
        Ok(true)
    }

    fn skip(&mut self, n: usize) -> io::Result<()> {
        let skipped = io::copy(&mut (&mut self.from).take(n as u64), &mut io::sink())?;
        if skipped == n as u64 { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    fn skip_text(&mut self) -> io::Result<()> {
        for _ in 0..MAX_TEXT {
            let mut byte = [0];
            self.from.read_exact(&mut byte)?;
            if byte == [0] {
                return Ok(());
            }
        }
        Err(bad("its name has no end"))
    }

    fn end_member(&mut self) -> io::Result<()> {
        let mut tail = [0; 8];
        self.from.read_exact(&mut tail)?;
        let word = |at: usize| u32::from_le_bytes([tail[at], tail[at + 1], tail[at + 2], tail[at + 3]]);
        self.in_member = false;
        if (word(0), word(4)) == (!self.crc, self.len) { Ok(()) } else { Err(bad("its checksum is wrong")) }
    }
}

impl<R: BufRead> Read for Gunzip<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.unpack(to).map_err(|e| cut_off("gzip", e))
    }
}

impl<R: BufRead> Gunzip<R> {
    fn unpack(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if to.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.in_member && !self.begin_member()? {
                return Ok(0);
            }
            let input = self.from.fill_buf()?;
            let at_end = input.is_empty();
            let result = inflate(&mut self.state, input, to, MZFlush::None);
            self.from.consume(result.bytes_consumed);
            let written = result.bytes_written;
            self.crc = crc32(self.crc, &to[..written]);
            self.len = self.len.wrapping_add(written as u32);
            match result.status {
                Ok(MZStatus::StreamEnd) => self.end_member()?,
                Ok(_) | Err(MZError::Buf) if !at_end || written > 0 => {}
                Ok(_) | Err(MZError::Buf) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(_) => return Err(bad("it is damaged")),
            }
            if written > 0 {
                return Ok(written);
            }
        }
    }
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("gzip: {what}"))
}

/// Continues the checksum of gzip over more bytes.
fn crc32(mut crc: u32, bytes: &[u8]) -> u32 {
    for &byte in bytes {
        crc = TABLE[usize::from(crc as u8 ^ byte)] ^ crc >> 8;
    }
    crc
}

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let (mut crc, mut bit) = (i as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { 0xEDB8_8320 ^ crc >> 1 } else { crc >> 1 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    /// A member as gzip writes it, with a name.
    fn packed(content: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x1F, 0x8B, 8, NAME, 0, 0, 0, 0, 0, 3];
        bytes.extend(b"trace.csv\0");
        bytes.extend(miniz_oxide::deflate::compress_to_vec(content, 6));
        bytes.extend((!crc32(!0, content)).to_le_bytes());
        bytes.extend((content.len() as u32).to_le_bytes());
        bytes
    }

    fn unpacked(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        Gunzip::new(io::BufReader::with_capacity(7, bytes)).read_to_end(&mut out)?;
        Ok(out)
    }

    #[test]
    fn what_was_packed_comes_out() {
        assert_eq!(!crc32(!0, b"123456789"), 0xCBF4_3926, "the checksum's own test");
        let content: Vec<u8> = (0..200_000_u32).flat_map(|i| (i / 7).to_le_bytes()).collect();
        let bytes = packed(&content);
        assert_eq!(unpacked(&bytes).expect("it is whole"), content);
        let two = [&bytes[..], &packed(b"more")].concat();
        assert_eq!(unpacked(&two).expect("both are").len(), content.len() + 4);
        assert!(unpacked(&packed(b"")).is_ok_and(|out| out.is_empty()));
    }

    #[test]
    fn damage_is_an_error() {
        let bytes = packed(&vec![7; 5000]);
        for cut in 0..bytes.len() {
            assert!(unpacked(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        let mut bad = bytes.clone();
        *bad.last_mut().expect("it is long") ^= 1;
        assert!(unpacked(&bad).is_err());
        assert!(unpacked(b"Timestamp,Response").is_err());
    }
}
