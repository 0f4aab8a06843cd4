//! Finds the volumes of a disk and their contents: partition tables (MBR with logical partitions, GPT) and the first
//! bytes of file systems. Owns all parsing of image structures in this process, except FAT.
//!
//! Invariant: an image is untrusted. Every length is checked before it is used, every chain is bounded, a volume is
//! inside the disk; whatever the bytes are, the result is a list.

use spillway_api::{PartitionTable, VolumeContent};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Number of partitions that are examined.
const MOST_PARTITIONS: usize = 128;
/// Offset of the superblock of ext2/3/4.
const EXT_SUPERBLOCK: u64 = 1024;
/// Size of the code in the first sector, before the disk's signature and the table.
const CODE_BYTES: usize = 440;
/// Type of an EFI system partition (UEFI 2.10, 5.3.3): C12A7328-F81F-11D2-BA4B-00A0C93EC93B, as stored.
const EFI_TYPE: [u8; 16] =
    [0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b];
/// Type of an EFI system partition in an MBR (5.2.2).
const MBR_EFI_TYPE: u8 = 0xef;
/// Types of partitions that hold the second part of a BIOS boot loader, as stored: GRUB's BIOS boot partition
/// (21686148-6449-6E6F-744E-656564454649) and FreeBSD's freebsd-boot (83BD6B9D-7F41-11DC-BE0B-001560B84F0F).
const BIOS_TYPES: [[u8; 16]; 2] = [
    *b"Hah!IdontNeedEFI",
    [0x9d, 0x6b, 0xbd, 0x83, 0x41, 0x7f, 0xdc, 0x11, 0xbe, 0x0b, 0x00, 0x15, 0x60, 0xb8, 0x4f, 0x0f],
];
/// Attribute "legacy BIOS bootable" of a partition in a GPT (5.3.3).
const LEGACY_BIOS: u64 = 1 << 2;
/// Mark of the active partition in an MBR.
const ACTIVE: u8 = 0x80;
/// Flag of discard in the default mount options (`s_default_mount_opts`).
const EXT_DEFAULT_DISCARD: u32 = 0x0400;

/// A volume's place on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Number in the partition table. None: the whole disk.
    pub partition: Option<u32>,
    /// Offset of its start.
    pub offset_bytes: u64,
    /// Length; what exceeds the disk is cut off.
    pub size_bytes: u64,
    /// Whether the table marks it as the EFI system partition.
    pub is_efi: bool,
    /// Whether a GPT says that a BIOS can go on with it: by its type or its attribute.
    pub is_bios: bool,
}

/// Returns the partitions of a disk, or the whole disk if there are none, and the kind of table.
pub fn volumes(disk: &File) -> (PartitionTable, Vec<Extent>) {
    let size_bytes = disk.metadata().map_or(0, |metadata| metadata.len());
    let whole = Extent { partition: None, offset_bytes: 0, size_bytes, is_efi: false, is_bios: false };
    let mut found = gpt(disk, 512);
    if found.is_empty() {
        found = gpt(disk, 4096);
    }
    let mut table = PartitionTable::Gpt;
    // The first sector of these file systems resembles a table.
    if found.is_empty()
        && !matches!(
            content(disk, &whole),
            VolumeContent::Fat | VolumeContent::Ntfs | VolumeContent::Bitlocker
        )
    {
        (table, found) = (PartitionTable::Mbr, mbr(disk));
    }
    found.retain_mut(|extent| {
        extent.size_bytes = extent.size_bytes.min(size_bytes.saturating_sub(extent.offset_bytes));
        extent.size_bytes > 0
    });
    found.truncate(MOST_PARTITIONS);
    if found.is_empty() { (PartitionTable::None, vec![whole]) } else { (table, found) }
}

/// Whether the first sector contains code for a BIOS, which checks only the mark at the sector's end; zeroes do nothing.
pub fn has_bios_code(disk: &File) -> bool {
    let Some(sector) = read(disk, 0, 512) else { return false };
    sector[510..] == [0x55, 0xaa] && sector[..CODE_BYTES].iter().any(|&byte| byte != 0)
}

/// Whether the first sector marks a partition as active, which code there goes on with.
pub fn has_active_partition(disk: &File) -> bool {
    table(disk, 0).is_some_and(|entries| entries.iter().any(|entry| entry.kind != 0 && entry.is_active))
}

/// Recognises the content of a volume.
pub fn content(disk: &File, volume: &Extent) -> VolumeContent {
    use VolumeContent::{Bitlocker, Btrfs, Ext, Fat, Luks, Lvm, Ntfs, Squashfs, Swap, Unknown, Xfs};
    let magics: [(u64, &[u8], VolumeContent); 15] = [
        (EXT_SUPERBLOCK + 56, b"\x53\xef", Ext),
        (0, b"XFSB", Xfs),
        (0x1_0040, b"_BHRfS_M", Btrfs),
        (3, b"NTFS    ", Ntfs),
        (3, b"-FVE-FS-", Bitlocker),
        (0, b"LUKS\xba\xbe", Luks),
        (0, b"LABELONE", Lvm),
        (512, b"LABELONE", Lvm),
        (1024, b"LABELONE", Lvm),
        (1536, b"LABELONE", Lvm),
        (4086, b"SWAPSPACE2", Swap),
        (0, b"hsqs", Squashfs),
        (54, b"FAT12   ", Fat),
        (54, b"FAT16   ", Fat),
        (82, b"FAT32   ", Fat),
    ];
    let holds = |(at, magic, _): &&(u64, &[u8], _)| {
        let end = at + magic.len() as u64;
        end <= volume.size_bytes
            && read(disk, volume.offset_bytes + at, magic.len()).as_deref() == Some(magic)
    };
    magics.iter().find(holds).map_or(Unknown, |(_, _, content)| *content)
}

/// Whether ext2/3/4 is mounted with discard by default.
pub fn ext_discards(disk: &File, volume: &Extent) -> bool {
    let options = read(disk, volume.offset_bytes + EXT_SUPERBLOCK + 0x100, 4);
    options.is_some_and(|bytes| u32_at(&bytes, 0) & EXT_DEFAULT_DISCARD != 0)
}

/// Parses a GPT (UEFI 2.10, 5.3): the header in the second sector gives the place, number and size of the entries.
fn gpt(disk: &File, sector_bytes: u64) -> Vec<Extent> {
    let Some(header) = read(disk, sector_bytes, 92) else { return vec![] };
    let (at, count, entry_bytes) = (u64_at(&header, 72), u32_at(&header, 80), u32_at(&header, 84) as usize);
    if !header.starts_with(b"EFI PART") || !(128..=4096).contains(&entry_bytes) {
        return vec![];
    }
    let count = (count as usize).min(MOST_PARTITIONS);
    let entry = |n: usize| {
        let at = at.checked_mul(sector_bytes)?.checked_add((n * entry_bytes) as u64)?;
        let entry = read(disk, at, 56)?;
        let (first, last) = (u64_at(&entry, 32), u64_at(&entry, 40));
        let sectors = last.checked_sub(first)?.checked_add(1)?;
        let is_used = entry[..16].iter().any(|&byte| byte != 0);
        is_used.then_some(())?;
        Some(Extent {
            partition: Some(n as u32 + 1),
            offset_bytes: first.checked_mul(sector_bytes)?,
            size_bytes: sectors.checked_mul(sector_bytes)?,
            is_efi: entry[..16] == EFI_TYPE,
            is_bios: BIOS_TYPES.iter().any(|kind| entry[..16] == *kind)
                || u64_at(&entry, 48) & LEGACY_BIOS != 0,
        })
    };
    (0..count).filter_map(entry).collect()
}

/// Parses the table of the first sector, and the chain of logical partitions in an extended one.
fn mbr(disk: &File) -> Vec<Extent> {
    let Some(primary) = table(disk, 0) else { return vec![] };
    let mut found = Vec::new();
    for (n, entry) in primary.iter().enumerate() {
        match entry.kind {
            0 => {}
            0x05 | 0x0f | 0x85 => logical(disk, u64::from(entry.first), &mut found),
            _ => found.push(entry.extent(n as u32 + 1, 0)),
        }
    }
    found
}

fn logical(disk: &File, extended: u64, found: &mut Vec<Extent>) {
    let mut at = extended;
    // A chain may be a loop: its length is bounded.
    for number in 5..5 + MOST_PARTITIONS as u32 {
        let Some([own, next, ..]) = table(disk, at) else { return };
        if own.kind != 0 {
            found.push(own.extent(number, at));
        }
        if next.kind == 0 || next.first == 0 {
            return;
        }
        at = extended + u64::from(next.first);
    }
}

/// An entry of such a table.
#[derive(Clone, Copy)]
struct PartitionEntry {
    is_active: bool,
    kind: u8,
    first: u32,
    sectors: u32,
}

impl PartitionEntry {
    /// Converts it, relative to a sector.
    fn extent(self, partition: u32, from: u64) -> Extent {
        Extent {
            partition: Some(partition),
            offset_bytes: (from + u64::from(self.first)) * 512,
            size_bytes: u64::from(self.sectors) * 512,
            is_efi: self.kind == MBR_EFI_TYPE,
            is_bios: false,
        }
    }
}

fn table(disk: &File, sector: u64) -> Option<[PartitionEntry; 4]> {
    let sector = read(disk, sector * 512, 512)?;
    (sector[510..] == [0x55, 0xaa]).then_some(())?;
    Some([446, 462, 478, 494].map(|at| PartitionEntry {
        is_active: sector[at] == ACTIVE,
        kind: sector[at + 4],
        first: u32_at(&sector, at + 8),
        sectors: u32_at(&sector, at + 12),
    }))
}

/// Reads bytes, all of which must exist.
pub fn read(disk: &File, at: u64, len: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    disk.read_exact_at(&mut bytes, at).ok()?;
    Some(bytes)
}

/// Reads a little-endian number that must exist.
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Reads a little-endian number that must exist.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|n| bytes[at + n]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|n| bytes[at + n]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    fn disk(size: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(size).unwrap();
        file
    }

    fn sfdisk(script: &str) -> tempfile::NamedTempFile {
        let file = disk(64 << 20);
        let mut child = Command::new("/usr/sbin/sfdisk");
        let mut child = child.arg("-q").arg(file.path()).stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
        file
    }

    fn extent(partition: u32, offset_mib: u64, size_mib: u64) -> Extent {
        Extent {
            partition: Some(partition),
            offset_bytes: offset_mib << 20,
            size_bytes: size_mib << 20,
            is_efi: false,
            is_bios: false,
        }
    }

    #[test]
    fn partitions_are_where_sfdisk_put_them() {
        let gpt = sfdisk("label: gpt\nstart=2048, size=16384\nstart=18432, size=32768\n");
        assert_eq!(volumes(gpt.as_file()).1, [extent(1, 1, 8), extent(2, 9, 16)]);
        let mbr = sfdisk(
            "label: dos\nstart=2048, size=16384, type=83\nstart=18432, size=81920, type=5\n\
             start=20480, size=16384, type=83\nstart=38912, size=16384, type=83\n",
        );
        assert_eq!(volumes(mbr.as_file()).1, [extent(1, 1, 8), extent(5, 10, 8), extent(6, 19, 8)]);
        // What a file system left behind before the first partition does not count; FAT has no table.
        mbr.as_file().write_all_at(b"\x53\xef", 1080).unwrap();
        assert_eq!(volumes(mbr.as_file()).1.len(), 3);
        mbr.as_file().write_all_at(b"\0\0", 1080).unwrap();
        mbr.as_file().write_all_at(b"FAT16   ", 54).unwrap();
        assert_eq!(volumes(mbr.as_file()).1.len(), 1);
        let none = disk(1 << 20);
        let whole =
            Extent { partition: None, offset_bytes: 0, size_bytes: 1 << 20, is_efi: false, is_bios: false };
        assert_eq!(volumes(none.as_file()).1, [whole]);
        assert_eq!(volumes(disk(0).as_file()).1.len(), 1);
        // Cut off in the middle of the second.
        gpt.as_file().set_len(12 << 20).unwrap();
        assert_eq!(volumes(gpt.as_file()).1, [extent(1, 1, 8), extent(2, 9, 3)]);
    }

    #[test]
    fn tables_and_code_of_the_first_sector_are_told_apart() {
        let gpt = sfdisk("label: gpt\nstart=2048, size=16384, type=U\nstart=18432, size=16384\n");
        let mbr = sfdisk("label: dos\nstart=2048, size=16384, type=ef\nstart=18432, size=16384, type=83\n");
        for (file, table) in [(&gpt, PartitionTable::Gpt), (&mbr, PartitionTable::Mbr)] {
            let (found, extents) = volumes(file.as_file());
            assert_eq!((found, extents[0].is_efi, extents[1].is_efi), (table, true, false));
            assert!(!has_bios_code(file.as_file()), "a table is no code");
            file.as_file().write_all_at(&[0xeb, 0x63], 0).unwrap();
            assert!(has_bios_code(file.as_file()));
            file.as_file().write_all_at(&[0], 511).unwrap();
            assert!(!has_bios_code(file.as_file()), "without its mark");
        }
        assert_eq!(volumes(disk(1 << 20).as_file()).0, PartitionTable::None);
        assert!(!has_bios_code(disk(100).as_file()));
    }

    #[test]
    fn contents_are_known_by_their_first_bytes() {
        let file = disk(1 << 20);
        let volume = Extent {
            partition: Some(1),
            offset_bytes: 4096,
            size_bytes: 256 << 10,
            is_efi: false,
            is_bios: false,
        };
        for (at, magic, expected) in [
            (0x438, &b"\x53\xef"[..], VolumeContent::Ext),
            (0, b"XFSB", VolumeContent::Xfs),
            (0x1_0040, b"_BHRfS_M", VolumeContent::Btrfs),
            (3, b"NTFS    ", VolumeContent::Ntfs),
            (0, b"LUKS\xba\xbe", VolumeContent::Luks),
            (512, b"LABELONE", VolumeContent::Lvm),
            (4086, b"SWAPSPACE2", VolumeContent::Swap),
            (82, b"FAT32   ", VolumeContent::Fat),
        ] {
            file.as_file().write_all_at(magic, 4096 + at).unwrap();
            assert_eq!(content(file.as_file(), &volume), expected);
            let shorter = Extent { size_bytes: at + magic.len() as u64 - 1, ..volume };
            assert_eq!(content(file.as_file(), &shorter), VolumeContent::Unknown, "not beyond its end");
            file.as_file().write_all_at(&vec![0; magic.len()], 4096 + at).unwrap();
        }
    }

    #[test]
    fn a_chain_of_logical_partitions_has_an_end() {
        let file = disk(8 << 20);
        let mut sector = [0; 512];
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        // One in the extended partition, and the next link is this one.
        for (at, kind, first) in [(446, 0x83, 1u32), (462, 5, 1)] {
            sector[at + 4] = kind;
            sector[at + 8..at + 12].copy_from_slice(&first.to_le_bytes());
            sector[at + 12..at + 16].copy_from_slice(&8u32.to_le_bytes());
        }
        file.as_file().write_all_at(&sector, 512 * 101).unwrap();
        sector[446 + 4] = 5;
        sector[446 + 8..446 + 12].copy_from_slice(&100u32.to_le_bytes());
        file.as_file().write_all_at(&sector, 0).unwrap();
        sector[446 + 4] = 0;
        file.as_file().write_all_at(&sector, 512 * 100).unwrap();
        let found = volumes(file.as_file()).1;
        assert!(found.len() <= MOST_PARTITIONS && found.len() > 10, "{}", found.len());
    }

    /// Tables of which some bytes are changed, or all: the answer is within the disk.
    #[test]
    fn no_table_leads_out_of_the_disk() {
        let seed = std::env::var("SPILLWAY_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 1);
        println!("SPILLWAY_SEED={seed}");
        let mut state = seed;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        };
        let gpt = sfdisk("label: gpt\nstart=2048, size=16384\n");
        let mbr = sfdisk("label: dos\nstart=2048, size=16384, type=5\nstart=4096, size=2048, type=83\n");
        for file in [gpt, mbr] {
            let mut head = vec![0; 4096];
            file.as_file().read_exact_at(&mut head, 0).unwrap();
            for round in 0..2000 {
                let mut bytes = head.clone();
                for _ in 0..=random() % 12 {
                    let edges = [0, 1, 0x7f, 0x80, 0xff, random() as u8];
                    // Where the tables are.
                    let at = if random() % 2 == 0 { 446 + random() % 66 } else { 512 + random() % 700 };
                    bytes[at as usize] = edges[random() as usize % edges.len()];
                }
                if round % 50 == 0 {
                    bytes.iter_mut().for_each(|byte| *byte = random() as u8);
                    bytes[510..520].copy_from_slice(b"\x55\xaaEFI PART");
                }
                file.as_file().write_all_at(&bytes, 0).unwrap();
                let found = volumes(file.as_file()).1;
                assert!(!found.is_empty() && found.len() <= MOST_PARTITIONS);
                for volume in &found {
                    assert!(volume.offset_bytes + volume.size_bytes <= 64 << 20, "{volume:?}");
                    content(file.as_file(), volume);
                    ext_discards(file.as_file(), volume);
                }
            }
        }
    }
}
