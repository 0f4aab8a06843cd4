//! The wire format of what the server sends: option replies, simple replies, structured reply chunks. Builds bytes;
//! decides nothing.
//!
//! Invariant: the length in each header is the length of what follows it.

use super::output::Output;
use super::protocol::*;

/// The greeting that opens the handshake.
pub fn greeting(output: &mut Output) {
    let mut bytes = [0; 18];
    bytes[..8].copy_from_slice(&NBDMAGIC.to_be_bytes());
    bytes[8..16].copy_from_slice(&IHAVEOPT.to_be_bytes());
    bytes[16..].copy_from_slice(&(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
    output.small(&bytes);
}

/// A reply to an option; its data is the concatenation of `parts`.
pub fn option(output: &mut Output, option: u32, reply: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    let mut header = [0; 20];
    header[..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    header[8..12].copy_from_slice(&option.to_be_bytes());
    header[12..16].copy_from_slice(&reply.to_be_bytes());
    header[16..].copy_from_slice(&(len as u32).to_be_bytes());
    output.small(&header);
    for part in parts {
        output.small(part);
    }
}

/// A simple reply without data.
#[inline]
pub fn simple(output: &mut Output, cookie: u64, error: u32) {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    output.small(&bytes);
}

#[inline]
fn chunk(cookie: u64, flags: u16, kind: u16, len: u32) -> [u8; 20] {
    let mut bytes = [0; 20];
    bytes[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// The last chunk of a successful reply without data.
pub fn none(output: &mut Output, cookie: u64) {
    output.small(&chunk(cookie, REPLY_FLAG_DONE, REPLY_NONE, 0));
}

/// The head of a content chunk; the caller queues the `len` bytes of data (not 0) behind it.
#[inline]
pub fn offset_data(output: &mut Output, cookie: u64, done: bool, offset: u64, len: u32) {
    let mut bytes = [0; 28];
    let flags = if done { REPLY_FLAG_DONE } else { 0 };
    bytes[..20].copy_from_slice(&chunk(cookie, flags, REPLY_OFFSET_DATA, len + 8));
    bytes[20..].copy_from_slice(&offset.to_be_bytes());
    output.small(&bytes);
}

/// The last chunk of a reply that failed, with a text for people.
pub fn error(output: &mut Output, cookie: u64, error: u32) {
    let text = match error {
        EINVAL => "the request is not valid for this export (range, alignment, flags or command)",
        ENOSPC => "the disk has no space for this write, or it goes beyond the end",
        EOVERFLOW => "the read is too long to be answered as asked",
        ENOTSUP => "not supported",
        _ => "the server could not read or write its storage",
    };
    output.small(&chunk(cookie, REPLY_FLAG_DONE, REPLY_ERROR, 6 + text.len() as u32));
    output.small(&error.to_be_bytes());
    output.small(&(text.len() as u16).to_be_bytes());
    output.small(text.as_bytes());
}

/// The whole reply to a block status request: extents of (length, state), at least one.
pub fn block_status(output: &mut Output, cookie: u64, extents: &[(u32, u32)]) {
    output.small(&chunk(cookie, REPLY_FLAG_DONE, REPLY_BLOCK_STATUS, 4 + 8 * extents.len() as u32));
    output.small(&BASE_ALLOCATION_ID.to_be_bytes());
    for (len, state) in extents {
        output.small(&len.to_be_bytes());
        output.small(&state.to_be_bytes());
    }
}
