//! The client's side of the protocol: builds options and requests, takes replies apart. Panics on anything that
//! the protocol does not allow a server to send.

use std::collections::HashMap;

pub const OPT_EXPORT_NAME: u32 = 1;
pub const OPT_ABORT: u32 = 2;
pub const OPT_LIST: u32 = 3;
pub const OPT_STARTTLS: u32 = 5;
pub const OPT_INFO: u32 = 6;
pub const OPT_GO: u32 = 7;
pub const OPT_STRUCTURED_REPLY: u32 = 8;
pub const OPT_LIST_META_CONTEXT: u32 = 9;
pub const OPT_SET_META_CONTEXT: u32 = 10;

pub const ACK: u32 = 1;
pub const SERVER: u32 = 2;
pub const INFO: u32 = 3;
pub const META_CONTEXT: u32 = 4;
pub const ERR_UNSUP: u32 = 0x8000_0001;
pub const ERR_INVALID: u32 = 0x8000_0003;
pub const ERR_UNKNOWN: u32 = 0x8000_0006;
pub const ERR_TOO_BIG: u32 = 0x8000_0009;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;

pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;
pub const DF: u16 = 4;
pub const REQ_ONE: u16 = 8;
pub const FAST_ZERO: u16 = 16;

pub const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\x00\x03";

pub fn client_flags(flags: u32) -> Vec<u8> {
    flags.to_be_bytes().to_vec()
}

pub fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

pub fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

/// Data of GO and INFO.
pub fn go(name: &str, requests: &[u16]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend((requests.len() as u16).to_be_bytes());
    requests.iter().for_each(|request| bytes.extend(request.to_be_bytes()));
    bytes
}

/// Data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub fn context_query(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| bytes.extend(string(query)));
    bytes
}

pub fn request(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

pub fn write(flags: u16, cookie: u64, offset: u64, data: &[u8]) -> Vec<u8> {
    let mut bytes = request(flags, WRITE, cookie, offset, data.len() as u32);
    bytes.extend(data);
    bytes
}

pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().unwrap())
}

pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// One reply to an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptionReply {
    pub option: u32,
    pub kind: u32,
    pub data: Vec<u8>,
}

/// Takes whole option replies apart.
pub fn option_replies(mut bytes: &[u8]) -> Vec<OptionReply> {
    let mut replies = Vec::new();
    while !bytes.is_empty() {
        assert_eq!(u64_at(bytes, 0), 0x0003_e889_0455_65a9);
        let len = u32_at(bytes, 16) as usize;
        let data = bytes[20..20 + len].to_vec();
        check_form(u32_at(bytes, 12), &data);
        replies.push(OptionReply { option: u32_at(bytes, 8), kind: u32_at(bytes, 12), data });
        bytes = &bytes[20 + len..];
    }
    replies
}

/// The lengths and strings that a reply of that kind may have.
fn check_form(kind: u32, data: &[u8]) {
    match kind {
        ACK => assert_eq!(data, [0; 0]),
        SERVER => {
            let (name, description) = data[4..].split_at(u32_at(data, 0) as usize);
            check_string(name);
            check_string(description);
        }
        INFO => match (u16_at(data, 0), data.len()) {
            (0, 12) | (3, 14) => {}
            (1 | 2, 2..) => check_string(&data[2..]),
            (kind, len) => panic!("information {kind} of {len} bytes"),
        },
        META_CONTEXT => check_string(&data[4..]),
        error => {
            assert!(error & 0x8000_0000 != 0, "reply {error}");
            check_string(data);
        }
    }
}

/// UTF-8 without NUL, at most 4096 bytes: what every string is.
fn check_string(bytes: &[u8]) {
    assert!(bytes.len() <= 4096, "a string of {} bytes", bytes.len());
    assert!(std::str::from_utf8(bytes).is_ok_and(|text| !text.contains('\0')), "{bytes:?}");
}

/// The whole answer to one command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub cookie: u64,
    /// 0 when it succeeded.
    pub error: u32,
    /// Content chunks as they came.
    pub chunks: Vec<(u64, Vec<u8>)>,
    /// Extents of (length, flags).
    pub extents: Vec<(u32, u32)>,
    /// In a structured reply.
    pub structured: bool,
}

impl Answer {
    /// The chunks put together; panics unless they cover the range without overlap.
    pub fn data(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut chunks = self.chunks.clone();
        chunks.sort();
        let mut bytes = Vec::with_capacity(len);
        for (at, chunk) in chunks {
            assert_eq!(at, offset + bytes.len() as u64, "a gap or an overlap");
            bytes.extend(chunk);
        }
        assert_eq!(bytes.len(), len);
        bytes
    }
}

/// Answers that are being put together from replies.
#[derive(Default)]
pub struct Answers {
    pub done: Vec<Answer>,
    open: HashMap<u64, Answer>,
}

impl Answers {
    /// Takes as many whole replies from the front of `bytes` as are there and says how many bytes that was.
    /// `simple_len` knows how much data follows a successful simple reply.
    pub fn take(&mut self, bytes: &[u8], mut simple_len: impl FnMut(u64) -> usize) -> usize {
        let mut at = 0;
        loop {
            let rest = &bytes[at..];
            if rest.len() < 16 {
                return at;
            }
            let cookie = u64_at(rest, 8);
            if u32_at(rest, 0) == 0x6744_6698 {
                let error = u32_at(rest, 4);
                let len = if error == 0 { simple_len(cookie) } else { 0 };
                if rest.len() < 16 + len {
                    return at;
                }
                assert!(!self.open.contains_key(&cookie), "a simple reply within a structured one");
                let chunks = if len > 0 { vec![(u64::MAX, rest[16..16 + len].to_vec())] } else { Vec::new() };
                self.done.push(Answer { cookie, error, chunks, ..Default::default() });
                at += 16 + len;
                continue;
            }
            assert_eq!(u32_at(rest, 0), 0x668e_33ef, "neither kind of reply");
            if rest.len() < 20 || rest.len() < 20 + u32_at(rest, 16) as usize {
                return at;
            }
            let (flags, kind) = (u16_at(rest, 4), u16_at(rest, 6));
            let data = &rest[20..20 + u32_at(rest, 16) as usize];
            at += 20 + data.len();
            let answer = self.open.entry(cookie).or_default();
            answer.cookie = cookie;
            answer.structured = true;
            match kind {
                0 => assert!(data.is_empty() && flags == 1),
                1 => {
                    assert!(data.len() >= 9 && data.len() <= (32 << 20) + 8);
                    answer.chunks.push((u64_at(data, 0), data[8..].to_vec()));
                }
                5 => {
                    assert!(answer.extents.is_empty() && data.len() >= 12 && data.len() % 8 == 4);
                    assert_eq!(u32_at(data, 0), 1, "the context's number");
                    let extents = data[4..].chunks(8).map(|extent| (u32_at(extent, 0), u32_at(extent, 4)));
                    answer.extents = extents.collect();
                    assert!(answer.extents.iter().all(|extent| extent.0 > 0 && extent.1 <= 3));
                }
                0x8001 => {
                    let text = u16_at(data, 4) as usize;
                    assert_eq!(data.len(), 6 + text);
                    check_string(&data[6..]);
                    assert_eq!(answer.error, 0, "one error chunk");
                    answer.error = u32_at(data, 0);
                    assert_ne!(answer.error, 0);
                }
                other => panic!("chunk type {other}"),
            }
            match flags {
                0 => {}
                1 => {
                    let answer = self.open.remove(&cookie).unwrap();
                    self.done.push(answer);
                }
                other => panic!("chunk flags {other}"),
            }
        }
    }
}
