//! Parses the 28 bytes of a request header and checks the command against the export. Decides from the header alone;
//! keeps nothing.
//!
//! Invariant: an accepted range lies inside the export and is whole sectors; no arithmetic here can overflow.

use super::protocol::*;

/// A request header as it was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
}

impl Header {
    /// `None`: the magic number is wrong, nothing that follows can be trusted.
    #[inline]
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<Header> {
        fn field<const N: usize>(bytes: &[u8; REQUEST_BYTES], at: usize) -> [u8; N] {
            *bytes[at..].first_chunk().expect("fields lie inside the header")
        }
        if u32::from_be_bytes(field(bytes, 0)) != REQUEST_MAGIC {
            return None;
        }
        Some(Header {
            flags: u16::from_be_bytes(field(bytes, 4)),
            command: u16::from_be_bytes(field(bytes, 6)),
            cookie: u64::from_be_bytes(field(bytes, 8)),
            offset: u64::from_be_bytes(field(bytes, 16)),
            len: u32::from_be_bytes(field(bytes, 24)),
        })
    }
}

/// The results of the handshake that requests depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    pub size_bytes: u64,
    pub structured: bool,
    pub block_status: bool,
}

/// Action that a request requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Submit it to the disk.
    Accept(Kind),
    /// Nothing to do: reply with success.
    Nothing,
    /// Answer with this error. A write's payload still follows and is to be skipped.
    Refuse(u32),
    /// NBD_CMD_DISC: the client disconnects.
    Disconnect,
    /// The payload is longer than allowed: end the connection.
    TooLong,
}

/// Kinds of command with what their flags say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write { fua: bool },
    Flush,
    Trim { fua: bool },
    WriteZeroes { fua: bool, fast: bool },
    BlockStatus { one: bool },
}

/// Checks a request against the export.
#[inline]
pub fn check(header: &Header, negotiated: &Negotiated) -> Verdict {
    let &Header { flags, command, offset, len, .. } = header;
    let fua = flags & CMD_FLAG_FUA != 0;
    // FUA has a meaning for writes only, but is to be accepted with every command.
    let (kind, allowed, beyond) = match command {
        CMD_READ => (Kind::Read, if negotiated.structured { CMD_FLAG_DF } else { 0 }, EINVAL),
        CMD_WRITE if len > MAX_PAYLOAD_BYTES => return Verdict::TooLong,
        CMD_WRITE => (Kind::Write { fua }, 0, ENOSPC),
        CMD_DISC => return Verdict::Disconnect,
        CMD_FLUSH => (Kind::Flush, 0, EINVAL),
        CMD_TRIM => (Kind::Trim { fua }, 0, EINVAL),
        CMD_WRITE_ZEROES => {
            let fast = flags & CMD_FLAG_FAST_ZERO != 0;
            // NO_HOLE is accepted and changes nothing, against the protocol: zeroes never take space here, see
            // docs/nbd-conformance.md.
            (Kind::WriteZeroes { fua, fast }, CMD_FLAG_NO_HOLE | CMD_FLAG_FAST_ZERO, ENOSPC)
        }
        CMD_BLOCK_STATUS if negotiated.block_status => {
            (Kind::BlockStatus { one: flags & CMD_FLAG_REQ_ONE != 0 }, CMD_FLAG_REQ_ONE, EINVAL)
        }
        _ => return Verdict::Refuse(EINVAL),
    };
    if flags & !(allowed | CMD_FLAG_FUA) != 0 {
        return Verdict::Refuse(EINVAL);
    }
    if kind == Kind::Flush {
        return if offset == 0 && len == 0 { Verdict::Accept(kind) } else { Verdict::Refuse(EINVAL) };
    }
    let sector = u64::from(MIN_BLOCK_BYTES);
    if !offset.is_multiple_of(sector) || !u64::from(len).is_multiple_of(sector) {
        return Verdict::Refuse(EINVAL);
    }
    if offset.checked_add(u64::from(len)).is_none_or(|end| end > negotiated.size_bytes) {
        return Verdict::Refuse(beyond);
    }
    match kind {
        // Zero length is unspecified: done at once, but there is no block status without an extent.
        Kind::BlockStatus { .. } if len == 0 => Verdict::Refuse(EINVAL),
        _ if len == 0 => Verdict::Nothing,
        // One content chunk is one piece.
        Kind::Read if flags & CMD_FLAG_DF != 0 && len > PIECE_BYTES => Verdict::Refuse(EOVERFLOW),
        Kind::Read if len > MAX_PAYLOAD_BYTES => {
            Verdict::Refuse(if negotiated.structured { EOVERFLOW } else { EINVAL })
        }
        _ => Verdict::Accept(kind),
    }
}
