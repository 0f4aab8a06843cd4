//! A virtio-blk request (5.2.6): what its header asks for, and whether that is valid. Pure functions of bytes and
//! lengths; never touches guest memory.
//!
//! Invariant: a submission lies inside the disk, and has as many data bytes as its sectors.

use super::config::{Device, MAX_DATA_BYTES, MAX_RANGE_SECTORS};
use spillway_core::{Errno, Operation, SECTOR_BYTES};

/// Bytes of the request header: type, reserved, sector.
pub(super) const HEADER_BYTES: usize = 16;
/// Bytes of `struct virtio_blk_discard_write_zeroes`.
pub(super) const RANGE_BYTES: usize = 16;

const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const T_GET_ID: u32 = 8;
const T_DISCARD: u32 = 11;
const T_WRITE_ZEROES: u32 = 13;
const FLAG_UNMAP: u32 = 1;

/// The status byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

impl Status {
    /// The status for an errno: the protocol has only these.
    pub(super) fn of(errno: Errno) -> Status {
        if errno == Errno::NOT_SUPPORTED { Status::Unsupported } else { Status::IoError }
    }
}

/// The types of request that this device knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Fill the device-writable data.
    In,
    /// Take the device-readable data.
    Out,
    Flush,
    GetId,
    Discard,
    WriteZeroes,
}

/// A request header, copied out of guest memory once.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestHeader {
    /// `None`: a type that this device does not know.
    pub kind: Option<Kind>,
    pub sector: u64,
}

impl RequestHeader {
    #[inline(always)]
    pub(super) fn parse(bytes: &[u8; HEADER_BYTES]) -> RequestHeader {
        let (words, sector) = bytes.split_at(8);
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let kind = match word(&words[..4]) {
            T_IN => Some(Kind::In),
            T_OUT => Some(Kind::Out),
            T_FLUSH => Some(Kind::Flush),
            T_GET_ID => Some(Kind::GetId),
            T_DISCARD => Some(Kind::Discard),
            T_WRITE_ZEROES => Some(Kind::WriteZeroes),
            _ => None,
        };
        RequestHeader { kind, sector: u64::from_le_bytes(sector.try_into().expect("eight bytes")) }
    }
}

/// A request for the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Submission {
    pub operation: Operation,
    pub sector: u64,
    pub sectors: u32,
}

#[inline(always)]
fn inside(device: &Device, sector: u64, sectors: u64) -> bool {
    sector <= device.capacity_sectors && sectors <= device.capacity_sectors - sector
}

/// A read or a write of `data_bytes`. `None`: it is invalid, an I/O error (5.2.6.2).
#[inline(always)]
pub(super) fn transfer(device: &Device, write: bool, sector: u64, data_bytes: u64) -> Option<Submission> {
    let sectors = data_bytes / SECTOR_BYTES;
    if data_bytes == 0
        || !data_bytes.is_multiple_of(SECTOR_BYTES)
        || data_bytes > MAX_DATA_BYTES
        || !inside(device, sector, sectors)
    {
        return None;
    }
    let operation = if write { Operation::Write { fua: device.write_through } } else { Operation::Read };
    Some(Submission { operation, sector, sectors: sectors as u32 })
}

/// A discard (`zeroes` false) or write-zeroes of the one range that may come with it. `Err` is the answer to
/// give at once: errors, and success for an empty range.
pub(super) fn range(device: &Device, zeroes: bool, bytes: &[u8; RANGE_BYTES]) -> Result<Submission, Status> {
    let (sector, rest) = bytes.split_at(8);
    let sector = u64::from_le_bytes(sector.try_into().expect("eight bytes"));
    let sectors = u32::from_le_bytes(rest[..4].try_into().expect("four bytes"));
    let flags = u32::from_le_bytes(rest[4..].try_into().expect("four bytes"));
    // 5.2.6.2: unknown flags, and `unmap` on a discard, are not supported.
    let known = if zeroes { FLAG_UNMAP } else { 0 };
    if flags & !known != 0 {
        return Err(Status::Unsupported);
    }
    if sectors > MAX_RANGE_SECTORS || !inside(device, sector, u64::from(sectors)) {
        return Err(Status::IoError);
    }
    if sectors == 0 {
        return Err(Status::Ok);
    }
    let operation =
        if zeroes { Operation::WriteZeroes { fua: device.write_through } } else { Operation::Discard };
    Ok(Submission { operation, sector, sectors })
}
