//! Folders: B-trees of names. Owns the search for a name, which visits all nodes, since the order of names depends on a
//! table of the volume.

use crate::bytes::{part, rest, u8_at, u16_at, u32_at, u64_at, utf16};
use crate::record::{INDEX_ALLOCATION, INDEX_ROOT, restore};
use crate::volume::RECORD_MASK;
use crate::{ByteSource, FolderItem, NtfsError, NtfsVolume};
use std::collections::BTreeSet;

/// Name of the attributes that hold a folder.
const NAMES: &str = "$I30";
/// Size of the part of a folder that is in its record, and of a node.
const MOST_ROOT_BYTES: usize = 64 << 10;
const NODE_BYTES: std::ops::RangeInclusive<u32> = 512..=64 << 10;
/// Number of nodes of one folder: about 500,000 names.
const MOST_NODES: usize = 1 << 14;
/// Flags of an entry: it has a node below it; it is the last one, and has no name.
const HAS_NODE: u16 = 0x01;
const LAST: u16 = 0x02;
const FOLDER: u32 = 0x1000_0000;
/// Offsets of the header that precedes the entries of the root and of a node.
const ROOT_HEADER: usize = 16;
const NODE_HEADER: usize = 24;

impl<S: ByteSource> NtfsVolume<S> {
    /// Returns the entry of this name, if the folder has one.
    pub(crate) fn find_in(&self, folder: u64, name: &str) -> Result<Option<FolderItem>, NtfsError> {
        let damaged = NtfsError::Damaged("folder");
        let root = self.attribute(folder, INDEX_ROOT, NAMES)?.ok_or(damaged)?;
        let root = self.beginning(&root, MOST_ROOT_BYTES)?;
        let node_bytes = u32_at(&root, 8)?;
        let mut below = Vec::new();
        if let Some(found) = search(&root, ROOT_HEADER, name, &mut below)? {
            return Ok(Some(found));
        }
        if below.is_empty() {
            return Ok(None);
        }
        if !NODE_BYTES.contains(&node_bytes) || !node_bytes.is_power_of_two() {
            return Err(damaged);
        }
        let nodes = self.attribute(folder, INDEX_ALLOCATION, NAMES)?.ok_or(damaged)?;
        // Nodes are counted in clusters, or in sectors if they are smaller than a cluster.
        let unit = if u64::from(node_bytes) < self.cluster_bytes() { 512 } else { self.cluster_bytes() };
        let mut seen = BTreeSet::new();
        while let Some(number) = below.pop() {
            if !seen.insert(number) || seen.len() + below.len() > MOST_NODES {
                return Err(damaged);
            }
            let mut node = vec![0; node_bytes as usize];
            self.read(&nodes, number.checked_mul(unit).ok_or(damaged)?, &mut node)?;
            restore(&mut node, b"INDX")?;
            if let Some(found) = search(&node, NODE_HEADER, name, &mut below)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}

/// Searches the entries of a node, and adds the nodes below it.
fn search(
    node: &[u8],
    header: usize,
    name: &str,
    below: &mut Vec<u64>,
) -> Result<Option<FolderItem>, NtfsError> {
    let (first, len) = (u32_at(node, header)? as usize, u32_at(node, header + 4)? as usize);
    let mut entries = rest(part(node, header, len)?, first)?;
    loop {
        let (len, flags) = (usize::from(u16_at(entries, 8)?), u16_at(entries, 12)?);
        // The shortest entry has no name.
        if len < 16 {
            return Err(NtfsError::Damaged("folder"));
        }
        let entry = part(entries, 0, len)?;
        if flags & HAS_NODE != 0 {
            below.push(u64_at(entry, len - 8)?);
        }
        if flags & LAST != 0 {
            return Ok(None);
        }
        let key = rest(entry, 16)?;
        let found = utf16(part(key, 66, usize::from(u8_at(key, 64)?) * 2)?);
        if found.eq_ignore_ascii_case(name) {
            let record = u64_at(entry, 0)? & RECORD_MASK;
            return Ok(Some(FolderItem { record, is_folder: u32_at(key, 56)? & FOLDER != 0 }));
        }
        entries = rest(entries, len)?;
    }
}
