//! The numbers of the NBD protocol, by the names of `doc/proto.md`, and the limits that this server adds.
//! Decides nothing.
//!
//! Invariant: everything on the wire is big-endian.

/// First magic number of the server's greeting, ASCII `NBDMAGIC`.
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second magic number of the greeting and first of every option, ASCII `IHAVEOPT`.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// Starts every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Starts every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Starts a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Starts a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags, and the client's, which have the same bits.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
pub const FLAG_NO_ZEROES: u16 = 1 << 1;

/// Transmission flags.
pub const FLAG_HAS_FLAGS: u16 = 1 << 0;
pub const FLAG_SEND_FLUSH: u16 = 1 << 2;
pub const FLAG_SEND_FUA: u16 = 1 << 3;
pub const FLAG_SEND_TRIM: u16 = 1 << 5;
pub const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
pub const FLAG_SEND_DF: u16 = 1 << 7;
pub const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
pub const FLAG_SEND_FAST_ZERO: u16 = 1 << 11;

/// Options.
pub const OPT_EXPORT_NAME: u32 = 1;
pub const OPT_ABORT: u32 = 2;
pub const OPT_LIST: u32 = 3;
pub const OPT_INFO: u32 = 6;
pub const OPT_GO: u32 = 7;
pub const OPT_STRUCTURED_REPLY: u32 = 8;
pub const OPT_LIST_META_CONTEXT: u32 = 9;
pub const OPT_SET_META_CONTEXT: u32 = 10;

/// The name of an option, if it is one of these.
pub fn option_name(option: u32) -> Option<&'static str> {
    match option {
        OPT_EXPORT_NAME => Some("NBD_OPT_EXPORT_NAME"),
        OPT_ABORT => Some("NBD_OPT_ABORT"),
        OPT_LIST => Some("NBD_OPT_LIST"),
        OPT_INFO => Some("NBD_OPT_INFO"),
        OPT_GO => Some("NBD_OPT_GO"),
        OPT_STRUCTURED_REPLY => Some("NBD_OPT_STRUCTURED_REPLY"),
        OPT_LIST_META_CONTEXT => Some("NBD_OPT_LIST_META_CONTEXT"),
        OPT_SET_META_CONTEXT => Some("NBD_OPT_SET_META_CONTEXT"),
        _ => None,
    }
}

/// Replies to options.
pub const REP_ACK: u32 = 1;
pub const REP_SERVER: u32 = 2;
pub const REP_INFO: u32 = 3;
pub const REP_META_CONTEXT: u32 = 4;
pub const REP_ERR_UNSUP: u32 = (1 << 31) + 1;
pub const REP_ERR_INVALID: u32 = (1 << 31) + 3;
pub const REP_ERR_UNKNOWN: u32 = (1 << 31) + 6;
pub const REP_ERR_TOO_BIG: u32 = (1 << 31) + 9;

/// Information types.
pub const INFO_EXPORT: u16 = 0;
pub const INFO_NAME: u16 = 1;
pub const INFO_DESCRIPTION: u16 = 2;
pub const INFO_BLOCK_SIZE: u16 = 3;

/// The one metadata context, and its number on the wire.
pub const BASE_ALLOCATION: &[u8] = b"base:allocation";
pub const BASE_ALLOCATION_ID: u32 = 1;
pub const STATE_HOLE: u32 = 1 << 0;
pub const STATE_ZERO: u32 = 1 << 1;

/// Commands.
pub const CMD_READ: u16 = 0;
pub const CMD_WRITE: u16 = 1;
pub const CMD_DISC: u16 = 2;
pub const CMD_FLUSH: u16 = 3;
pub const CMD_TRIM: u16 = 4;
pub const CMD_WRITE_ZEROES: u16 = 6;
pub const CMD_BLOCK_STATUS: u16 = 7;

/// The name of a command, if it is one of these.
pub fn command_name(command: u16) -> Option<&'static str> {
    match command {
        CMD_READ => Some("NBD_CMD_READ"),
        CMD_WRITE => Some("NBD_CMD_WRITE"),
        CMD_DISC => Some("NBD_CMD_DISC"),
        CMD_FLUSH => Some("NBD_CMD_FLUSH"),
        CMD_TRIM => Some("NBD_CMD_TRIM"),
        CMD_WRITE_ZEROES => Some("NBD_CMD_WRITE_ZEROES"),
        CMD_BLOCK_STATUS => Some("NBD_CMD_BLOCK_STATUS"),
        _ => None,
    }
}

/// Command flags.
pub const CMD_FLAG_FUA: u16 = 1 << 0;
pub const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
pub const CMD_FLAG_DF: u16 = 1 << 2;
pub const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
pub const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;

/// Structured reply chunks.
pub const REPLY_FLAG_DONE: u16 = 1 << 0;
pub const REPLY_NONE: u16 = 0;
pub const REPLY_OFFSET_DATA: u16 = 1;
pub const REPLY_BLOCK_STATUS: u16 = 5;
pub const REPLY_ERROR: u16 = (1 << 15) + 1;

/// Error values.
pub const EIO: u32 = 5;
pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const EOVERFLOW: u32 = 75;
pub const ENOTSUP: u32 = 95;

/// Bytes of a request header.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of an option header.
pub const OPTION_BYTES: usize = 16;
/// The longest string that the protocol allows.
pub const MAX_STRING_BYTES: usize = 4096;

/// Advertised size constraints.
pub const MIN_BLOCK_BYTES: u32 = 512;
pub const PREFERRED_BLOCK_BYTES: u32 = 4096;
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;

/// The longest option data that is looked at; longer data is skipped and refused as too big.
pub const MAX_OPTION_BYTES: usize = 32 << 10;
/// The most option bytes that a client may send before it has chosen its export.
pub const MAX_HANDSHAKE_BYTES: u64 = 1 << 20;
/// The most options that it may send until then.
pub const MAX_OPTIONS: u32 = 256;

/// The largest request handed to the disk; longer commands are split. One content chunk is at most as long; the
/// protocol asks for 64 KiB or more. Larger ones were not faster, and a buffer of this size is still in the cache
/// when the socket copies it.
pub const PIECE_BYTES: u32 = 256 << 10;
/// The least that an unfinished request counts for, so that small ones are bounded in number.
pub const REQUEST_CHARGE_BYTES: usize = 4096;
/// Unfinished requests hold at most about this much before more is taken in, in ordinary flow.
pub const HELD_BYTES: usize = 1 << 20;
/// The same while the disk is full, so that a discard behind waiting writes is still read.
pub const HELD_BYTES_DISK_FULL: usize = 4 << 20;
/// Unsent replies hold at most about this much before more is taken in.
pub const UNSENT_BYTES: usize = 1 << 20;
/// The headers and texts of unsent replies hold at most about this much.
pub const UNSENT_SMALL_BYTES: usize = 64 << 10;
/// The most that requests and replies of all connections of a disk hold together, beyond one or two pieces of each: as
/// much as one of them may have waiting while the disk is full.
pub const SHARED_BYTES: usize = HELD_BYTES_DISK_FULL;
/// Buffers of reads that are gathered whole before their header is sent, of all connections of a disk, until they are
/// sent; half of it for each, and [`UNSENT_BYTES`] for those on their way out. Clients of that kind (the Linux kernel)
/// read at most 4 MiB at a time, unless configured otherwise. A read for which there is no space here streams.
pub const SHARED_BYTES_GATHERED: usize = 8 << 20;
/// What an unfinished request takes of [`SHARED_BYTES`] beside its buffer: its rows in our tables and in the disk's.
pub const REQUEST_COST_BYTES: usize = 512;
/// Unsent replies hold at most about this much during the handshake before more is taken in.
pub const UNSENT_HANDSHAKE_BYTES: usize = 64 << 10;
/// Extents in one block status reply. The client asks again from where they end.
pub const MAX_EXTENTS: usize = 64;
