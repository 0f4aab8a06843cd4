//! Partition table of formatted scratch disks: a GPT with one partition (UEFI 2.10, 5.2.3 and 5.3). Owns the layout.
//!
//! Invariant: the table is a function of the kind and the size. Windows remembers a drive letter by the partition's GUID, so it
//! is the same on each scratch disk, after each reset.

use flate2::Crc;
use spillway_api::FileSystem;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use uuid::{Uuid, uuid};

/// Size of a logical block.
pub const SECTOR_BYTES: u64 = 512;
/// Offset of the partition. The same space at the end of the disk has the second table.
pub const START_BYTES: u64 = 1 << 20;

const ENTRIES: u64 = 128;
const ENTRY_BYTES: u64 = 128;
const TABLE_SECTORS: u64 = ENTRIES * ENTRY_BYTES / SECTOR_BYTES;
const HEADER_BYTES: usize = 92;
const BASIC_DATA: Uuid = uuid!("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7");
const LINUX: Uuid = uuid!("0fc63daf-8483-4772-8e79-3d69d8477de4");
const DISK: Uuid = uuid!("6c8d5f0e-0f1c-4f0b-9c52-2f6d0d3b7a10");
const PARTITION: Uuid = uuid!("6c8d5f0e-0f1c-4f0b-9c52-2f6d0d3b7a11");
const NAME: &str = "scratch";

/// Size of the partition of a disk of this size.
pub fn volume_bytes(disk_bytes: u64) -> u64 {
    disk_bytes - 2 * START_BYTES
}

/// Writes the table, twice as it has to be, to a disk that reads as zeroes there.
pub fn write(disk: &File, system: FileSystem, bytes: u64) -> io::Result<()> {
    let sectors = bytes / SECTOR_BYTES;
    let (first, last) = (1, sectors - 1);
    let table = entries(system, bytes);
    disk.write_all_at(&protective(sectors), 0)?;
    disk.write_all_at(&header(&table, [first, last, first + 1], sectors), first * SECTOR_BYTES)?;
    disk.write_all_at(&table, (first + 1) * SECTOR_BYTES)?;
    let second = last - TABLE_SECTORS;
    disk.write_all_at(&table, second * SECTOR_BYTES)?;
    disk.write_all_at(&header(&table, [last, first, second], sectors), last * SECTOR_BYTES)
}

/// First sector: a partition over the whole disk, for programs that do not know GPT.
fn protective(sectors: u64) -> Vec<u8> {
    let mut sector = vec![0; SECTOR_BYTES as usize];
    let size = u32::try_from(sectors - 1).unwrap_or(u32::MAX);
    sector[446..454].copy_from_slice(&[0, 0, 2, 0, 0xee, 0xff, 0xff, 0xff]);
    sector[454..458].copy_from_slice(&1u32.to_le_bytes());
    sector[458..462].copy_from_slice(&size.to_le_bytes());
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

/// Table of partitions.
fn entries(system: FileSystem, bytes: u64) -> Vec<u8> {
    let kind = match system {
        FileSystem::Ntfs => BASIC_DATA,
        FileSystem::Ext4 => LINUX,
    };
    let first = START_BYTES / SECTOR_BYTES;
    let last = first + volume_bytes(bytes) / SECTOR_BYTES - 1;
    let mut table = vec![0; (ENTRIES * ENTRY_BYTES) as usize];
    table[..16].copy_from_slice(&kind.to_bytes_le());
    table[16..32].copy_from_slice(&PARTITION.to_bytes_le());
    table[32..40].copy_from_slice(&first.to_le_bytes());
    table[40..48].copy_from_slice(&last.to_le_bytes());
    for (unit, place) in NAME.encode_utf16().zip(table[56..128].chunks_exact_mut(2)) {
        place.copy_from_slice(&unit.to_le_bytes());
    }
    table
}

/// Header of a table. `places` are the sectors of this header, of the other one, and of the table.
fn header(table: &[u8], places: [u64; 3], sectors: u64) -> Vec<u8> {
    let [own, other, entries] = places;
    let usable = [2 + TABLE_SECTORS, sectors - 2 - TABLE_SECTORS];
    let mut header = b"EFI PART".to_vec();
    header.extend([0x0001_0000, HEADER_BYTES as u32, 0, 0].iter().flat_map(|n| n.to_le_bytes()));
    header.extend([own, other, usable[0], usable[1]].iter().flat_map(|n| n.to_le_bytes()));
    header.extend(DISK.to_bytes_le());
    header.extend(entries.to_le_bytes());
    header.extend([ENTRIES as u32, ENTRY_BYTES as u32, sum(table)].iter().flat_map(|n| n.to_le_bytes()));
    let checked = sum(&header);
    header[16..20].copy_from_slice(&checked.to_le_bytes());
    header.resize(SECTOR_BYTES as usize, 0);
    header
}

fn sum(bytes: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(bytes);
    crc.sum()
}
