//! Records of the master file table and the attributes in them. Owns their layout, and the numbers that protect sectors
//! against torn writes ("fixups").

use crate::NtfsError;
use crate::bytes::{part, rest, u8_at, u16_at, u32_at, u64_at, utf16};

/// Types of attributes.
pub const ATTRIBUTE_LIST: u32 = 0x20;
pub const VOLUME_INFORMATION: u32 = 0x70;
pub const DATA: u32 = 0x80;
pub const INDEX_ROOT: u32 = 0x90;
pub const INDEX_ALLOCATION: u32 = 0xa0;
pub const REPARSE_POINT: u32 = 0xc0;
const END: u32 = 0xffff_ffff;

/// Flag of a record that is in use.
const IN_USE: u16 = 0x0001;
/// Flags of an attribute whose content is not stored as it is.
const COMPRESSED: u16 = 0x00ff;
const ENCRYPTED: u16 = 0x4000;
/// Distance of the fixups.
const STRIDE: usize = 512;
/// Shortest headers of attributes with the content in the record, and elsewhere.
const RESIDENT_BYTES: usize = 24;
const ELSEWHERE_BYTES: usize = 64;
/// Number of runs of one attribute in one record: a record of 64 KiB cannot hold more.
const MOST_RUNS: usize = 1 << 15;

/// A record of the master file table.
pub struct Record(Vec<u8>);

impl Record {
    /// Checks a record that was read.
    pub fn new(mut bytes: Vec<u8>) -> Result<Record, NtfsError> {
        restore(&mut bytes, b"FILE")?;
        match u16_at(&bytes, 22)? & IN_USE {
            0 => Err(NtfsError::Damaged("reference to a file")),
            _ => Ok(Record(bytes)),
        }
    }

    /// Returns its attributes; an error is the last item.
    pub fn attributes(&self) -> impl Iterator<Item = Result<Attribute<'_>, NtfsError>> {
        let mut at = u16_at(&self.0, 20).map(usize::from);
        std::iter::from_fn(move || {
            let next = at.and_then(|at| self.attribute(at)).transpose()?;
            // Every attribute is longer than nothing, so there is an end.
            at = match &next {
                Ok(attribute) => at.map(|at| at + attribute.0.len()),
                Err(_) => Ok(self.0.len()),
            };
            Some(next)
        })
    }

    fn attribute(&self, at: usize) -> Result<Option<Attribute<'_>>, NtfsError> {
        if at >= self.0.len() || u32_at(&self.0, at)? == END {
            return Ok(None);
        }
        let len = u32_at(&self.0, at + 4)? as usize;
        if len < RESIDENT_BYTES {
            return Err(NtfsError::Damaged("attribute"));
        }
        part(&self.0, at, len).map(Attribute).map(Some)
    }

    /// Returns the attribute of this type and name whose content begins with this cluster.
    pub fn find(&self, kind: u32, name: &str, first: u64) -> Result<Option<Attribute<'_>>, NtfsError> {
        for attribute in self.attributes() {
            let attribute = attribute?;
            if attribute.kind()? == kind && attribute.name()? == name && attribute.first_cluster()? == first {
                return Ok(Some(attribute));
            }
        }
        Ok(None)
    }
}

/// Restores the last two bytes of each sector, which were replaced by a number when the structure was written.
pub fn restore(bytes: &mut [u8], magic: &[u8; 4]) -> Result<(), NtfsError> {
    let damaged = NtfsError::Damaged("file table");
    if !bytes.starts_with(magic) {
        return Err(damaged);
    }
    let (at, count) = (usize::from(u16_at(bytes, 4)?), usize::from(u16_at(bytes, 6)?));
    if count != bytes.len() / STRIDE + 1 {
        return Err(damaged);
    }
    let number = u16_at(bytes, at)?;
    for n in 1..count {
        let original = u16_at(bytes, at + 2 * n)?;
        let end = n * STRIDE - 2;
        if u16_at(bytes, end)? != number {
            return Err(NtfsError::Damaged("last write"));
        }
        bytes[end..end + 2].copy_from_slice(&original.to_le_bytes());
    }
    Ok(())
}

/// An attribute with its header.
#[derive(Clone, Copy)]
pub struct Attribute<'a>(&'a [u8]);

impl<'a> Attribute<'a> {
    fn kind(self) -> Result<u32, NtfsError> {
        u32_at(self.0, 0)
    }

    fn name(self) -> Result<String, NtfsError> {
        let (len, at) = (u8_at(self.0, 9)?, u16_at(self.0, 10)?);
        Ok(utf16(part(self.0, at.into(), usize::from(len) * 2)?))
    }

    /// Whether the content is in the record.
    pub fn is_resident(self) -> Result<bool, NtfsError> {
        Ok(u8_at(self.0, 8)? == 0)
    }

    /// Returns an error if the content is stored in another form. Content in the record is never compressed; on the root of a folder
    /// both flags mean that new files there get them.
    pub fn check_plain(self) -> Result<(), NtfsError> {
        let flags = u16_at(self.0, 12)?;
        if flags & COMPRESSED != 0 && !self.is_resident()? {
            return Err(NtfsError::Unsupported("compressed"));
        }
        if flags & ENCRYPTED != 0 && self.kind()? == DATA {
            return Err(NtfsError::Unsupported("encrypted"));
        }
        Ok(())
    }

    /// Returns the content of a resident attribute.
    pub fn value(self) -> Result<&'a [u8], NtfsError> {
        part(self.0, u16_at(self.0, 20)?.into(), u32_at(self.0, 16)? as usize)
    }

    fn first_cluster(self) -> Result<u64, NtfsError> {
        if self.is_resident()? { Ok(0) } else { u64_at(self.0, 16) }
    }

    /// Returns the size of the content, and how much of its beginning was ever written, in bytes. Only the first part of
    /// a content that is spread over several records has them.
    pub fn sizes(self) -> Result<(u64, u64), NtfsError> {
        part(self.0, 0, ELSEWHERE_BYTES)?;
        let (size, written) = (u64_at(self.0, 48)?, u64_at(self.0, 56)?);
        Ok((size, written.min(size)))
    }

    /// Returns the runs of clusters: length, and place on the volume; none if they were never written. A run begins with
    /// a byte that has the widths of both numbers; a place is relative to the one before.
    pub fn runs(self) -> Result<Vec<(u64, Option<u64>)>, NtfsError> {
        let damaged = NtfsError::Damaged("list of clusters");
        let mut rest = rest(self.0, u16_at(self.0, 32)?.into())?;
        let mut found = Vec::new();
        let mut place = 0_i64;
        while let Some((&widths, after)) = rest.split_first() {
            let (len_width, place_width) = (usize::from(widths & 0x0f), usize::from(widths >> 4));
            if widths == 0 {
                break;
            }
            if !(1..=8).contains(&len_width) || place_width > 8 || found.len() >= MOST_RUNS {
                return Err(damaged);
            }
            let len = number(part(after, 0, len_width)?);
            let len = u64::try_from(len).ok().filter(|len| *len > 0).ok_or(damaged)?;
            let at = match place_width {
                0 => None,
                _ => {
                    let by = number(part(after, len_width, place_width)?);
                    place = place.checked_add(by).ok_or(damaged)?;
                    Some(u64::try_from(place).map_err(|_| damaged)?)
                }
            };
            found.push((len, at));
            rest = part(after, len_width + place_width, after.len() - len_width - place_width)?;
        }
        Ok(found)
    }
}

/// Decodes a signed number of up to eight bytes.
fn number(bytes: &[u8]) -> i64 {
    let sign = bytes.last().map_or(0, |last| if last & 0x80 == 0 { 0 } else { 0xff });
    let mut all = [sign; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    i64::from_le_bytes(all)
}
