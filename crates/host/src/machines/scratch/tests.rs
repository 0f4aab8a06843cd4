//! Scratch disks as others read them: blkid, the file systems' own checks, and the reader of NTFS that examines images.

use super::super::{TEMPLATES, empty};
use super::*;
use spillway_ntfs::{ByteSource, NtfsError, NtfsVolume};
use spillway_testkit::{has_program, skip};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Command;
use std::time::Instant;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A store, and the path of a scratch disk in it.
fn store() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let disk = dir.path().join(super::super::FOLDER).join("desk-001.raw");
    (dir, disk)
}

fn format(text: &str) -> ScratchFormat {
    text.parse().unwrap()
}

fn said(program: &str, arguments: &[&str], file: &Path) -> String {
    let done = Command::new(program).env("LC_ALL", "C").args(arguments).arg(file).output().unwrap();
    let text = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(done.status.success(), "{program}: {text}");
    text
}

/// What the reader of images reads.
struct Bytes<'a>(&'a File);

impl ByteSource for Bytes<'_> {
    fn len_bytes(&self) -> u64 {
        self.0.metadata().unwrap().len()
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), NtfsError> {
        self.0.read_exact_at(buffer, at).map_err(|_| NtfsError::Damaged("file"))
    }
}

/// The partition of a scratch disk, as a file of its own.
fn volume(disk: &Path) -> tempfile::NamedTempFile {
    let (from, to) = (File::open(disk).unwrap(), tempfile::NamedTempFile::new_in("/var/tmp").unwrap());
    let bytes = from.metadata().unwrap().len() - 2 * MIB;
    to.as_file().set_len(bytes).unwrap();
    copying::copy(&from, MIB..MIB + bytes, to.as_file(), 0, |_| Ok(()), |e| panic!("{e}")).unwrap();
    to
}

fn has_mkntfs() -> bool {
    let has = has_program("mkntfs") || Path::new("/usr/sbin/mkntfs").is_file();
    if !has {
        skip("ntfs-3g is not installed: run 'make install-deps'");
    }
    has
}

#[test]
fn ntfs_is_what_other_readers_take_it_for() {
    if !has_mkntfs() {
        return;
    }
    let (_dir, disk) = store();
    for bytes in [64 * MIB, GIB + MIB] {
        empty(&disk, bytes, Some(&format("ntfs:Temporary Storage"))).unwrap();
        assert_eq!(disk.metadata().unwrap().len(), bytes);
        let table = said("/usr/sbin/blkid", &["-p", "-o", "export"], &disk);
        assert!(table.contains("PTTYPE=gpt"), "{table}");
        let volume = volume(&disk);
        let found = said("/usr/sbin/blkid", &["-p", "-o", "export"], volume.path());
        for line in ["TYPE=ntfs", "LABEL=Temporary\\ Storage"] {
            assert!(found.lines().any(|found| found == line), "{line}: {found}");
        }
        let details = said("ntfsinfo", &["-m"], volume.path());
        // The last cluster of the partition has the copy of the first sector.
        let clusters = format!("Volume Size in Clusters: {}", (bytes - 2 * MIB) / 4096 - 1);
        for line in ["Volume Name: Temporary Storage", "Cluster Size: 4096", &clusters] {
            assert!(details.lines().any(|found| found.trim() == line), "{line}: {details}");
        }
        let opened = NtfsVolume::open(Bytes(volume.as_file())).unwrap();
        assert!(!opened.is_dirty().unwrap() && opened.find("/$Extend").unwrap().is_some());
        // The boot sector says where the partition is (hidden sectors).
        let mut hidden = [0; 4];
        volume.as_file().read_exact_at(&mut hidden, 28).unwrap();
        assert_eq!(u32::from_le_bytes(hidden), 2048);
    }
}

#[test]
fn ext4_is_clean_and_has_its_label() {
    let (_dir, disk) = store();
    for bytes in [16 * MIB, GIB] {
        empty(&disk, bytes, Some(&format("ext4:scratch"))).unwrap();
        let volume = volume(&disk);
        let found = said("/usr/sbin/blkid", &["-p", "-o", "export"], volume.path());
        assert!(found.contains("TYPE=ext4") && found.contains("LABEL=scratch"), "{found}");
        said("/usr/sbin/e2fsck", &["-f", "-n"], volume.path());
    }
}

/// As the kernel and the firmware read it: both tables, with their sums.
#[test]
fn the_partition_table_is_whole() {
    if !has_program("sfdisk") && !Path::new("/usr/sbin/sfdisk").is_file() {
        return skip("sfdisk is not installed: run 'make install-deps'");
    }
    let (_dir, disk) = store();
    for (text, kind) in [
        ("ntfs:x", "EBD0A0A2-B9E5-4433-87C0-68B6B72699C7"),
        ("ext4:x", "0FC63DAF-8483-4772-8E79-3D69D8477DE4"),
    ] {
        if text.starts_with("ntfs") && !has_mkntfs() {
            return;
        }
        empty(&disk, 64 * MIB, Some(&format(text))).unwrap();
        let verified = said("/usr/sbin/sfdisk", &["--verify"], &disk);
        assert!(verified.contains("No errors detected"), "{verified}");
        let found: serde_json::Value =
            serde_json::from_str(&said("/usr/sbin/sfdisk", &["--json"], &disk)).unwrap();
        let table = &found["partitiontable"];
        assert_eq!((&table["label"], &table["lastlba"]), (&"gpt".into(), &(64 * 2048 - 34).into()));
        let partition = &table["partitions"][0];
        assert_eq!((&partition["start"], &partition["size"]), (&2048.into(), &(62 * 2048).into()));
        assert_eq!((&partition["type"], &partition["name"]), (&kind.into(), &"scratch".into()));
        // The second table alone is enough.
        let file = File::options().write(true).open(&disk).unwrap();
        file.write_all_at(&[0; 512], 512).unwrap();
        let repaired = said("/usr/sbin/sfdisk", &["--json"], &disk);
        assert!(repaired.contains(kind), "{repaired}");
    }
}

/// The guest of one run cannot change what the next one gets.
#[test]
fn each_reset_brings_the_same_disk_again() {
    let (dir, disk) = store();
    let scratch = format("ext4:scratch");
    let read = || fs::read(&disk).unwrap();
    empty(&disk, 16 * MIB, Some(&scratch)).unwrap();
    let first = read();
    let file = File::options().write(true).open(&disk).unwrap();
    (0..16).for_each(|at| file.write_all_at(&[7; 4096], at * MIB + 5000).unwrap());
    empty(&disk, 16 * MIB, Some(&scratch)).unwrap();
    assert!(read() == first);
    // It is blank without a format, as it was.
    empty(&disk, 16 * MIB, None).unwrap();
    assert!(read() == vec![0; 16 << 20]);
    let templates = || fs::read_dir(dir.path().join(TEMPLATES)).unwrap().count();
    assert_eq!(templates(), 1, "no file of the work is left");
    for n in 0..2 * MOST_TEMPLATES as u64 {
        empty(&disk, (17 + n) * MIB, Some(&scratch)).unwrap();
    }
    assert_eq!(templates(), MOST_TEMPLATES);
}

#[test]
fn a_template_is_sparse_and_so_is_its_copy() {
    if !has_mkntfs() {
        return;
    }
    let (_dir, disk) = store();
    for gib in [1, 16, 64] {
        let begun = Instant::now();
        empty(&disk, gib * GIB, Some(&format("ntfs:Temporary Storage"))).unwrap();
        let made = begun.elapsed();
        let begun = Instant::now();
        empty(&disk, gib * GIB, Some(&format("ntfs:Temporary Storage"))).unwrap();
        let written = disk.metadata().unwrap().blocks() * 512;
        println!("{gib} GiB: {made:?} once, then {:?} a reset, {} KiB", begun.elapsed(), written >> 10);
        assert!(written < 80 * MIB, "{written}");
    }
}

#[test]
fn a_program_that_fails_is_named() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let volume = dir.path().join("volume");
    File::create(&volume).unwrap();
    let error = make_file_system(&volume, &format("ext4:x")).unwrap_err();
    assert!(error.message.starts_with("mke2fs cannot format a scratch disk: "), "{}", error.message);
}
