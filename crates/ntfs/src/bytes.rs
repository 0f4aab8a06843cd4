//! Little-endian numbers and texts in untrusted bytes. Owns the checks of their bounds.

use crate::NtfsError;

const SHORT: NtfsError = NtfsError::Damaged("length of a structure");

/// Returns a part of the bytes, all of which must exist.
pub fn part(bytes: &[u8], at: usize, len: usize) -> Result<&[u8], NtfsError> {
    let end = at.checked_add(len).ok_or(SHORT)?;
    bytes.get(at..end).ok_or(SHORT)
}

/// Returns the bytes from an offset to the end.
pub fn rest(bytes: &[u8], at: usize) -> Result<&[u8], NtfsError> {
    bytes.get(at..).ok_or(SHORT)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], NtfsError> {
    part(bytes, at, N)?.try_into().map_err(|_| SHORT)
}

pub fn u8_at(bytes: &[u8], at: usize) -> Result<u8, NtfsError> {
    bytes.get(at).copied().ok_or(SHORT)
}

pub fn u16_at(bytes: &[u8], at: usize) -> Result<u16, NtfsError> {
    array(bytes, at).map(u16::from_le_bytes)
}

pub fn u32_at(bytes: &[u8], at: usize) -> Result<u32, NtfsError> {
    array(bytes, at).map(u32::from_le_bytes)
}

pub fn u64_at(bytes: &[u8], at: usize) -> Result<u64, NtfsError> {
    array(bytes, at).map(u64::from_le_bytes)
}

/// Decodes UTF-16; an odd byte at the end is ignored.
pub fn utf16(bytes: &[u8]) -> String {
    let units: Vec<u16> = bytes.chunks_exact(2).map(|unit| u16::from_le_bytes([unit[0], unit[1]])).collect();
    String::from_utf16_lossy(&units)
}

/// Decodes the one-byte form of names, Latin-1.
pub fn latin1(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}
