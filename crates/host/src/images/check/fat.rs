//! Finds programs for UEFI firmware on a FAT file system. Owns the parser of FAT12, FAT16 and FAT32, for the folders
//! below `/EFI` (UEFI 2.10, 13.3; Microsoft's "FAT32 File System Specification" 1.03).
//!
//! Invariant: the image is untrusted. Nothing outside the volume is read, no chain is followed further than a folder may
//! extend, and the list is bounded.

use super::volumes::{Extent, read, u16_at, u32_at};
use std::fs::File;

/// Largest folder that is read.
const MOST_FOLDER_BYTES: usize = 64 << 10;
/// Number of folders below `/EFI`, and of programs in all of them.
const MOST_FOLDERS: usize = 32;
const MOST_PROGRAMS: usize = 64;
const ENTRY_BYTES: usize = 32;
/// Attributes of an entry: a label or a part of a long name; a folder.
const LABEL: u8 = 0x08;
const FOLDER: u8 = 0x10;

/// A FAT file system, as its first sector describes it.
struct Fat<'a> {
    disk: &'a File,
    volume: &'a Extent,
    cluster_bytes: u64,
    fat_at: u64,
    data_at: u64,
    width: FatWidth,
    clusters: u64,
    root: FolderLocation,
}

/// Bits of an entry of the allocation table.
#[derive(Clone, Copy)]
enum FatWidth {
    Twelve,
    Sixteen,
    ThirtyTwo,
}

/// Location of a folder.
#[derive(Clone, Copy)]
enum FolderLocation {
    /// Root folder of FAT12 and FAT16.
    Fixed { at: u64, len: u64 },
    /// Chain of clusters that begins with this one.
    Chain(u64),
}

/// An entry of a folder.
struct FatEntry {
    name: String,
    is_folder: bool,
    first: u64,
}

/// Returns the paths of programs in the folders below `/EFI`, by their short names.
pub fn efi_programs(disk: &File, volume: &Extent) -> Vec<String> {
    let Some(fat) = Fat::open(disk, volume) else { return vec![] };
    let mut found = Vec::new();
    let named = |entry: &&FatEntry| entry.is_folder && entry.name == "EFI";
    let Some(efi) = fat.list(fat.root).iter().find(named).map(|entry| entry.first) else { return found };
    for folder in
        fat.list(FolderLocation::Chain(efi)).iter().filter(|entry| entry.is_folder).take(MOST_FOLDERS)
    {
        for entry in fat.list(FolderLocation::Chain(folder.first)) {
            if !entry.is_folder && entry.name.ends_with(".EFI") && found.len() < MOST_PROGRAMS {
                found.push(format!("/EFI/{}/{}", folder.name, entry.name));
            }
        }
    }
    found
}

impl<'a> Fat<'a> {
    fn open(disk: &'a File, volume: &'a Extent) -> Option<Fat<'a>> {
        let boot = read_within(disk, volume, 0, 512)?;
        let sector = u64::from(u16_at(&boot, 11));
        let per_cluster = u64::from(boot[13]);
        let reserved = u64::from(u16_at(&boot, 14));
        let (tables, root_entries) = (u64::from(boot[16]), u64::from(u16_at(&boot, 17)));
        let either = |short: usize, long: usize| match u16_at(&boot, short) {
            0 => u64::from(u32_at(&boot, long)),
            sectors => u64::from(sectors),
        };
        let (sectors, table_sectors) = (either(19, 32), either(22, 36));
        let is_sane = (512..=4096).contains(&sector)
            && sector.is_power_of_two()
            && per_cluster.is_power_of_two()
            && reserved > 0
            && (1..=4).contains(&tables)
            && table_sectors > 0;
        is_sane.then_some(())?;
        // All of these are below 2^32, and the sum of the products is below 2^40.
        let root_sectors = (root_entries * ENTRY_BYTES as u64).div_ceil(sector);
        let data_sector = reserved + tables * table_sectors + root_sectors;
        let clusters = sectors.checked_sub(data_sector)? / per_cluster;
        let (width, root) = match clusters {
            0 => return None,
            ..4085 if root_entries > 0 => (FatWidth::Twelve, None),
            ..65525 if root_entries > 0 => (FatWidth::Sixteen, None),
            _ => (FatWidth::ThirtyTwo, Some(u64::from(u32_at(&boot, 44)))),
        };
        let fixed = FolderLocation::Fixed {
            at: (reserved + tables * table_sectors) * sector,
            len: root_entries * ENTRY_BYTES as u64,
        };
        Some(Fat {
            disk,
            volume,
            cluster_bytes: per_cluster * sector,
            fat_at: reserved * sector,
            data_at: data_sector * sector,
            width,
            clusters,
            root: root.map_or(fixed, FolderLocation::Chain),
        })
    }

    fn list(&self, folder: FolderLocation) -> Vec<FatEntry> {
        let bytes = match folder {
            FolderLocation::Fixed { at, len } => {
                read_within(self.disk, self.volume, at, (len as usize).min(MOST_FOLDER_BYTES))
                    .unwrap_or_default()
            }
            FolderLocation::Chain(first) => self.chain(first),
        };
        bytes.chunks_exact(ENTRY_BYTES).take_while(|entry| entry[0] != 0).filter_map(entry).collect()
    }

    /// Reads the beginning of a chain of clusters.
    fn chain(&self, first: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut cluster = first;
        while (2..self.clusters + 2).contains(&cluster) && bytes.len() < MOST_FOLDER_BYTES {
            let at = self.data_at + (cluster - 2) * self.cluster_bytes;
            let len = (self.cluster_bytes as usize).min(MOST_FOLDER_BYTES - bytes.len());
            let Some(part) = read_within(self.disk, self.volume, at, len) else { break };
            bytes.extend_from_slice(&part);
            let Some(next) = self.next(cluster) else { break };
            cluster = next;
        }
        bytes
    }

    fn next(&self, cluster: u64) -> Option<u64> {
        let entry = |at: u64, len| read_within(self.disk, self.volume, self.fat_at + at, len);
        Some(match self.width {
            FatWidth::Twelve => {
                let pair = u16_at(&entry(cluster + cluster / 2, 2)?, 0);
                let number = if cluster.is_multiple_of(2) { pair & 0x0fff } else { pair >> 4 };
                // Larger numbers mark the end of a chain; they are beyond the last cluster.
                u64::from(if number >= 0xff8 { u16::MAX } else { number })
            }
            FatWidth::Sixteen => u64::from(u16_at(&entry(cluster * 2, 2)?, 0)),
            FatWidth::ThirtyTwo => u64::from(u32_at(&entry(cluster * 4, 4)?, 0) & 0x0fff_ffff),
        })
    }
}

fn entry(bytes: &[u8]) -> Option<FatEntry> {
    let attributes = bytes[11];
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-~$!@#%&()^".contains(&byte);
    let word = |part: &[u8]| {
        let end = part.iter().rposition(|byte| *byte != b' ').map_or(0, |last| last + 1);
        let word = &part[..end];
        word.iter().all(|byte| plain(*byte)).then(|| String::from_utf8_lossy(word).to_ascii_uppercase())
    };
    let (name, extension) = (word(&bytes[..8])?, word(&bytes[8..11])?);
    (attributes & LABEL == 0 && !name.is_empty()).then(|| FatEntry {
        name: if extension.is_empty() { name } else { format!("{name}.{extension}") },
        is_folder: attributes & FOLDER != 0,
        first: u64::from(u16_at(bytes, 20)) << 16 | u64::from(u16_at(bytes, 26)),
    })
}

/// Reads bytes of a volume, which must be completely inside it.
fn read_within(disk: &File, volume: &Extent, at: u64, len: usize) -> Option<Vec<u8>> {
    let end = at.checked_add(len as u64)?;
    (end <= volume.size_bytes).then_some(())?;
    read(disk, volume.offset_bytes.checked_add(at)?, len)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::io::{Read, Seek, SeekFrom, Write};
    use std::os::unix::fs::FileExt;

    /// A file system of this kind at this place of a file, with these files.
    pub fn format(file: &File, offset: u64, size: u64, kind: fatfs::FatType, files: &[&str]) {
        let part = PageRequest { file, offset, at: 0, size };
        let options = fatfs::FormatVolumeOptions::new().fat_type(kind);
        fatfs::format_volume(part.again(), options).unwrap();
        let system = fatfs::FileSystem::new(part, fatfs::FsOptions::new()).unwrap();
        for path in files {
            let mut folder = system.root_dir();
            let (folders, name) = path.rsplit_once('/').unwrap();
            for name in folders.split('/').filter(|name| !name.is_empty()) {
                folder = folder.create_dir(name).unwrap();
            }
            folder.create_file(name).unwrap().write_all(b"MZ").unwrap();
        }
    }

    struct PageRequest<'a> {
        file: &'a File,
        offset: u64,
        at: u64,
        size: u64,
    }

    impl PageRequest<'_> {
        fn again(&self) -> PageRequest<'_> {
            PageRequest { file: self.file, ..*self }
        }
    }

    impl Read for PageRequest<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let n = self.file.read_at(buffer, self.offset + self.at)?;
            self.at += n as u64;
            Ok(n)
        }
    }

    impl Write for PageRequest<'_> {
        fn write(&mut self, buffer: &[u8]) -> std::io::Result<usize> {
            let n = self.file.write_at(buffer, self.offset + self.at)?;
            self.at += n as u64;
            Ok(n)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Seek for PageRequest<'_> {
        fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
            self.at = match to {
                SeekFrom::Start(at) => at,
                SeekFrom::Current(by) => self.at.checked_add_signed(by).unwrap(),
                SeekFrom::End(by) => self.size.checked_add_signed(by).unwrap(),
            };
            Ok(self.at)
        }
    }

    const MIB: u64 = 1 << 20;
    const KINDS: [(fatfs::FatType, u64); 3] = [
        (fatfs::FatType::Fat12, 2 * MIB),
        (fatfs::FatType::Fat16, 20 * MIB),
        (fatfs::FatType::Fat32, 80 * MIB),
    ];

    #[test]
    fn programs_are_found_on_each_kind_of_fat() {
        for (kind, size) in KINDS {
            let file = tempfile::tempfile().unwrap();
            file.set_len(MIB + size).unwrap();
            let many: Vec<String> = (0..40).map(|n| format!("/EFI/many/file{n}")).collect();
            let mut files = vec!["/EFI/BOOT/BOOTX64.EFI", "/EFI/debian/grubx64.efi", "/other/x.efi"];
            files.extend(many.iter().map(String::as_str));
            files.push("/EFI/many/last.efi");
            format(&file, MIB, size, kind, &files);
            let volume = Extent {
                partition: Some(1),
                offset_bytes: MIB,
                size_bytes: size,
                is_efi: true,
                is_bios: false,
            };
            let mut found = efi_programs(&file, &volume);
            found.sort();
            let expected = ["/EFI/BOOT/BOOTX64.EFI", "/EFI/DEBIAN/GRUBX64.EFI", "/EFI/MANY/LAST.EFI"];
            assert_eq!(found, expected, "{kind:?}");
            let shorter = Extent { size_bytes: 1000, ..volume };
            assert_eq!(efi_programs(&file, &shorter), [""; 0], "not beyond its end");
        }
    }

    #[test]
    fn whatever_the_bytes_are_the_list_has_an_end() {
        let seed = std::env::var("SPILLWAY_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 1);
        println!("SPILLWAY_SEED={seed}");
        let mut state = seed;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        };
        for (kind, size) in &KINDS[..2] {
            let file = tempfile::tempfile().unwrap();
            file.set_len(*size).unwrap();
            format(&file, 0, *size, *kind, &["/EFI/BOOT/BOOTX64.EFI", "/EFI/debian/grubx64.efi"]);
            let mut head = vec![0; 128 << 10];
            file.read_exact_at(&mut head, 0).unwrap();
            let used: Vec<usize> = (0..head.len()).filter(|at| head[*at] != 0).collect();
            for _ in 0..1500 {
                let mut bytes = head.clone();
                for _ in 0..=random() % 8 {
                    let at = match random() % 2 {
                        0 => random() as usize % 64,
                        _ => used[random() as usize % used.len()],
                    };
                    bytes[at] = [0, 1, 0x7f, 0xff, random() as u8][random() as usize % 5];
                }
                file.write_all_at(&bytes, 0).unwrap();
                let volume = Extent {
                    partition: None,
                    offset_bytes: 0,
                    size_bytes: *size,
                    is_efi: false,
                    is_bios: false,
                };
                assert!(efi_programs(&file, &volume).len() <= MOST_PROGRAMS);
            }
        }
    }
}
