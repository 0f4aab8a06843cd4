//! An NTFS volume: its first sector, its master file table, and the files that it names. Owns the search for a file's
//! attributes, which may be spread over several records.

use crate::bytes::{part, u8_at, u16_at, u32_at, u64_at, utf16};
use crate::content::{Clusters, Content, NtfsFile};
use crate::record::{ATTRIBUTE_LIST, DATA, REPARSE_POINT, Record, VOLUME_INFORMATION};
use crate::{ByteSource, NtfsError};

/// Records with fixed numbers.
const MFT: u64 = 0;
const VOLUME: u64 = 3;
const ROOT: u64 = 5;
/// Part of a reference to a file that is the number of its record.
pub(crate) const RECORD_MASK: u64 = (1 << 48) - 1;
/// Flag of a volume that needs chkdsk.
const DIRTY: u16 = 0x0001;
/// Largest cluster, record and list of attributes.
const MOST_CLUSTER_BYTES: u64 = 2 << 20;
const RECORD_BYTES: std::ops::RangeInclusive<u64> = 512..=64 << 10;
const MOST_LIST_BYTES: usize = 256 << 10;

/// A file or folder, found by its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FolderItem {
    pub(crate) record: u64,
    /// Whether it is a folder.
    pub is_folder: bool,
}

/// An NTFS volume.
pub struct NtfsVolume<S> {
    source: S,
    cluster_bytes: u64,
    record_bytes: usize,
    mft: Content,
}

impl<S: ByteSource> NtfsVolume<S> {
    /// Opens the volume that these bytes are.
    pub fn open(source: S) -> Result<NtfsVolume<S>, NtfsError> {
        let damaged = NtfsError::Damaged("first sector");
        let mut boot = [0; 512];
        source.read_at(0, &mut boot)?;
        if &boot[3..11] != b"NTFS    " {
            return Err(damaged);
        }
        let sector = u64::from(u16_at(&boot, 11)?);
        // From 0x81 on it is the negative exponent of a power of two.
        let per_cluster = match u8_at(&boot, 13)? {
            0 => return Err(damaged),
            sectors @ 1..=0x80 => u64::from(sectors),
            exponent => 1_u64.checked_shl(u32::from(exponent.wrapping_neg())).ok_or(damaged)?,
        };
        let cluster_bytes = sector.checked_mul(per_cluster).ok_or(damaged)?;
        if !sector.is_power_of_two() || !per_cluster.is_power_of_two() || !(512..=4096).contains(&sector) {
            return Err(damaged);
        }
        let record_bytes = match u8_at(&boot, 64)?.cast_signed() {
            clusters @ 1.. => cluster_bytes.checked_mul(clusters.unsigned_abs().into()).ok_or(damaged)?,
            exponent => 1_u64.checked_shl(exponent.unsigned_abs().into()).ok_or(damaged)?,
        };
        let is_sane = cluster_bytes <= MOST_CLUSTER_BYTES
            && RECORD_BYTES.contains(&record_bytes)
            && record_bytes.is_power_of_two();
        if !is_sane {
            return Err(damaged);
        }
        let record_bytes = record_bytes as usize;
        let mut first = vec![0; record_bytes];
        source.read_at(u64_at(&boot, 48)?.checked_mul(cluster_bytes).ok_or(damaged)?, &mut first)?;
        // The first record describes the beginning of the table, where the rest of its description is.
        let first = Record::new(first)?;
        let mut clusters = Clusters::default();
        clusters.push(first.find(DATA, "", 0)?.ok_or(NtfsError::Damaged("file table"))?)?;
        let mut volume = NtfsVolume { source, cluster_bytes, record_bytes, mft: Content::Clusters(clusters) };
        volume.mft = volume.attribute(MFT, DATA, "")?.ok_or(NtfsError::Damaged("file table"))?;
        Ok(volume)
    }

    /// Whether the volume is marked as in need of chkdsk. Whether it was closed is in its log, which is not read.
    pub fn is_dirty(&self) -> Result<bool, NtfsError> {
        let information = self.attribute(VOLUME, VOLUME_INFORMATION, "")?;
        let damaged = NtfsError::Damaged("volume information");
        Ok(u16_at(&self.beginning(&information.ok_or(damaged)?, 12)?, 10)? & DIRTY != 0)
    }

    /// Finds a file or folder by its path, which begins with a slash; letters may be in either case.
    pub fn find(&self, path: &str) -> Result<Option<FolderItem>, NtfsError> {
        let mut at = FolderItem { record: ROOT, is_folder: true };
        for name in path.split('/').filter(|name| !name.is_empty()) {
            if !at.is_folder {
                return Ok(None);
            }
            match self.find_in(at.record, name)? {
                Some(found) => at = found,
                None => return Ok(None),
            }
        }
        Ok(Some(at))
    }

    /// Opens a file by its path; none if there is no such file.
    pub fn open_file(&self, path: &str) -> Result<Option<NtfsFile<'_, S>>, NtfsError> {
        let Some(found) = self.find(path)?.filter(|found| !found.is_folder) else { return Ok(None) };
        // Such a file's content is elsewhere: compressed by the system, or on other storage.
        if self.attribute(found.record, REPARSE_POINT, "")?.is_some() {
            return Err(NtfsError::Unsupported("a reparse point, such as a compressed file of the system"));
        }
        let content = self.attribute(found.record, DATA, "")?.ok_or(NtfsError::Damaged("file table"))?;
        Ok(Some(NtfsFile { source: &self.source, cluster_bytes: self.cluster_bytes, content }))
    }

    pub(crate) fn cluster_bytes(&self) -> u64 {
        self.cluster_bytes
    }

    pub(crate) fn read(&self, content: &Content, at: u64, to: &mut [u8]) -> Result<(), NtfsError> {
        content.read(&self.source, self.cluster_bytes, at, to)
    }

    /// Reads at most this many bytes of the beginning.
    pub(crate) fn beginning(&self, content: &Content, most: usize) -> Result<Vec<u8>, NtfsError> {
        let len = usize::try_from(content.len_bytes()).unwrap_or(usize::MAX).min(most);
        let mut bytes = vec![0; len];
        self.read(content, 0, &mut bytes)?;
        Ok(bytes)
    }

    fn record(&self, number: u64) -> Result<Record, NtfsError> {
        let mut bytes = vec![0; self.record_bytes];
        let at = number.checked_mul(self.record_bytes as u64).ok_or(NtfsError::Unreadable)?;
        self.read(&self.mft, at, &mut bytes)?;
        Record::new(bytes)
    }

    /// Returns the content of an attribute of a file, by the attribute's type and name.
    pub(crate) fn attribute(&self, number: u64, kind: u32, name: &str) -> Result<Option<Content>, NtfsError> {
        let base = self.record(number)?;
        let Some(list) = base.find(ATTRIBUTE_LIST, "", 0)? else {
            let Some(found) = base.find(kind, name, 0)? else { return Ok(None) };
            found.check_plain()?;
            if found.is_resident()? {
                return Ok(Some(Content::Resident(found.value()?.to_vec())));
            }
            let mut clusters = Clusters::default();
            clusters.push(found)?;
            return Ok(Some(Content::Clusters(clusters)));
        };
        let list = if list.is_resident()? {
            list.value()?.to_vec()
        } else {
            let mut clusters = Clusters::default();
            clusters.push(list)?;
            self.beginning(&Content::Clusters(clusters), MOST_LIST_BYTES)?
        };
        self.spread(&list, kind, name)
    }

    /// Collects the parts of an attribute from the records that the list names.
    fn spread(&self, list: &[u8], kind: u32, name: &str) -> Result<Option<Content>, NtfsError> {
        let damaged = NtfsError::Damaged("list of attributes");
        let mut clusters = Clusters::default();
        let mut is_found = false;
        let mut rest = list;
        while !rest.is_empty() {
            let len = usize::from(u16_at(rest, 4)?);
            let item = part(rest, 0, len)?;
            rest = part(rest, len, rest.len() - len)?;
            let item_name = part(item, u8_at(item, 7)?.into(), usize::from(u8_at(item, 6)?) * 2)?;
            if u32_at(item, 0)? != kind || utf16(item_name) != name {
                continue;
            }
            let first = u64_at(item, 8)?;
            let record = self.record(u64_at(item, 16)? & RECORD_MASK)?;
            let found = record.find(kind, name, first)?.ok_or(damaged)?;
            found.check_plain()?;
            if found.is_resident()? {
                return Ok(Some(Content::Resident(found.value()?.to_vec())));
            }
            // Each part follows the one before, so the runs have an end.
            if first != clusters.clusters() || (is_found && first == 0) {
                return Err(damaged);
            }
            clusters.push(found)?;
            is_found = true;
        }
        Ok(is_found.then_some(Content::Clusters(clusters)))
    }
}
