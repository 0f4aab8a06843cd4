//! Volumes that mkntfs and ntfs-3g's library made: each file is found and reads as it was written, whatever the clusters,
//! the layout and the number of files; and damaged ones end in a value or an error.
#![allow(clippy::unwrap_used)]

use spillway_ntfs::{ByteSource, NtfsError, NtfsVolume};
use spillway_testkit::windows::{FileLayout, ntfs_volume};
use std::path::Path;

const MIB: u64 = 1 << 20;

fn content(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|n| (n / 7 + n / 4096 * 3) as u8 ^ seed).collect()
}

fn put(tree: &Path, path: &str, content: &[u8]) {
    let path = tree.join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, content).unwrap();
}

fn image(tree: &Path, size: u64, layout: FileLayout, options: &[&str]) -> Vec<u8> {
    let to = tempfile::NamedTempFile::new().unwrap();
    ntfs_volume(to.path(), size, tree, layout, options).unwrap();
    std::fs::read(to.path()).unwrap()
}

/// Content of a file, or why there is none.
fn read(image: &[u8], path: &str) -> Result<Option<Vec<u8>>, NtfsError> {
    let volume = NtfsVolume::open(image)?;
    volume.open_file(path)?.map(|file| file.head(usize::MAX)).transpose()
}

#[test]
fn files_are_found_and_read_as_they_were_written() {
    let tree = tempfile::tempdir().unwrap();
    let files = [
        ("Windows/System32/config/SYSTEM", content(300_000, 1)),
        ("Windows/System32/drivers/viostor.sys", content(5000, 2)),
        ("Program Files/Cloudbase Solutions/a.conf", content(100, 3)),
        ("empty", vec![]),
    ];
    files.iter().for_each(|(path, content)| put(tree.path(), path, content));
    // Clusters, and sectors: small ones, the usual ones, and large ones, in which nodes of folders are counted in sectors.
    for options in [&["-c", "512"][..], &[], &["-c", "65536"], &["-s", "4096", "-c", "4096"]] {
        let image = image(tree.path(), 32 * MIB, FileLayout::Whole, options);
        for (path, content) in &files {
            assert_eq!(read(&image, path).unwrap().as_ref(), Some(content), "{options:?} {path}");
        }
        let volume = NtfsVolume::open(&image[..]).unwrap();
        let found = |path: &str| volume.find(path).unwrap().map(|found| found.is_folder);
        assert_eq!(found("/WINDOWS/system32/Config/system"), Some(false));
        assert_eq!(found("/windows/SYSTEM32/"), Some(true));
        assert_eq!(found("/"), Some(true));
        for path in ["/Windows/System33", "/empty/x", "/Windows/System32/config/SYSTEM/x", "/x/y"] {
            assert_eq!(found(path), None, "{path}");
        }
        assert!(volume.open_file("/Windows").unwrap().is_none(), "a folder is no file");
        assert_eq!(volume.is_dirty(), Ok(false));
        let file = volume.open_file("/Windows/System32/config/SYSTEM").unwrap().unwrap();
        let mut part = vec![0; 10_000];
        file.read_at(123_457, &mut part).unwrap();
        assert_eq!(part, files[0].1[123_457..133_457]);
        assert_eq!(file.read_at(299_999, &mut part), Err(NtfsError::Unreadable), "behind its end");
        assert_eq!(file.read_at(u64::MAX, &mut part), Err(NtfsError::Unreadable));
    }
}

/// Such files have their list of clusters in many records; such folders have many nodes.
#[test]
fn scattered_files_and_large_folders_are_read() {
    let tree = tempfile::tempdir().unwrap();
    let [first, second] = [1, 2].map(|seed| content(3 << 20, seed));
    put(tree.path(), "config/SYSTEM", &first);
    put(tree.path(), "config/SOFTWARE", &second);
    (0..1000).for_each(|n| put(tree.path(), &format!("many/file number {n}"), b""));
    put(tree.path(), "many/last", b"last");
    let image = image(tree.path(), 32 * MIB, FileLayout::Scattered, &[]);
    assert_eq!(read(&image, "/config/SYSTEM").unwrap(), Some(first));
    assert_eq!(read(&image, "/config/SOFTWARE").unwrap(), Some(second));
    let volume = NtfsVolume::open(&image[..]).unwrap();
    for n in [0, 7, 499, 999] {
        assert!(volume.find(&format!("/many/FILE number {n}")).unwrap().is_some(), "{n}");
    }
    assert!(volume.find("/many/file number 1000").unwrap().is_none());
    assert_eq!(read(&image, "/many/last").unwrap(), Some(b"last".to_vec()));
}

/// Offset of an attribute in a record.
fn attribute(record: &[u8], kind: u8) -> Option<usize> {
    let mut at = usize::from(record[20]);
    while record[at] != kind {
        if record[at] == 0xff {
            return None;
        }
        at += usize::from(u16::from_le_bytes([record[at + 4], record[at + 5]]));
    }
    Some(at)
}

/// Sets flags of an attribute of the file or folder with this name.
fn set_flags(image: &mut [u8], name: &str, kind: u8, flags: u16) {
    let name: Vec<u8> = name.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let is_its = |record: &&mut [u8]| {
        // The name follows the header of the attribute and 66 bytes of its content.
        let at = record.starts_with(b"FILE").then(|| attribute(record, 0x30)).flatten();
        at.is_some_and(|at| {
            usize::from(record[at + 24 + 64]) * 2 == name.len() && record[at + 24 + 66..].starts_with(&name)
        })
    };
    let record = image.chunks_exact_mut(1024).find(is_its).unwrap();
    let at = attribute(record, kind).unwrap();
    record[at + 12..at + 14].copy_from_slice(&flags.to_le_bytes());
}

/// A folder has these flags for the files that are made in it.
#[test]
fn flags_count_where_they_say_how_the_content_is_stored() {
    const COMPRESSED: u16 = 0x0001;
    const ENCRYPTED: u16 = 0x4000;
    const DATA: u8 = 0x80;
    const INDEX_ROOT: u8 = 0x90;
    let tree = tempfile::tempdir().unwrap();
    put(tree.path(), "System32/SYSTEM", &content(40_000, 1));
    put(tree.path(), "System32/short", b"short");
    (0..200).for_each(|n| put(tree.path(), &format!("System32/other file {n}"), b""));
    let mut image = image(tree.path(), 8 * MIB, FileLayout::Whole, &[]);
    set_flags(&mut image, "System32", INDEX_ROOT, COMPRESSED | ENCRYPTED);
    set_flags(&mut image, "short", DATA, COMPRESSED);
    assert_eq!(read(&image, "/System32/SYSTEM"), Ok(Some(content(40_000, 1))));
    assert_eq!(read(&image, "/System32/short"), Ok(Some(b"short".to_vec())), "it is in its record");
    for (flag, why) in [(COMPRESSED, "compressed"), (ENCRYPTED, "encrypted")] {
        set_flags(&mut image, "SYSTEM", DATA, flag);
        assert_eq!(read(&image, "/System32/SYSTEM"), Err(NtfsError::Unsupported(why)));
    }
}

#[test]
fn what_is_no_volume_is_refused() {
    for bytes in [vec![], vec![0; 100], vec![0; 4096], vec![0xff; 4096]] {
        assert!(NtfsVolume::open(&bytes[..]).is_err());
    }
    let tree = tempfile::tempdir().unwrap();
    put(tree.path(), "a", b"a");
    let image = image(tree.path(), 8 * MIB, FileLayout::Whole, &[]);
    for (at, byte) in
        [(3, b'X'), (13, 0), (13, 3), (13, 0x81), (11, 7), (12, 0x80), (64, 0), (64, 0x80), (55, 0x7f)]
    {
        let mut image = image.clone();
        image[at] = byte;
        assert!(NtfsVolume::open(&image[..]).is_err(), "{at} {byte}");
    }
}

/// Bytes of the file table, of folders and of the first sector are changed, a few at a time.
#[test]
fn whatever_the_bytes_are_a_search_has_an_end() {
    let tree = tempfile::tempdir().unwrap();
    put(tree.path(), "Windows/System32/config/SYSTEM", &content(40_000, 1));
    put(tree.path(), "Windows/System32/config/SOFTWARE", &content(40_000, 2));
    (0..60).for_each(|n| put(tree.path(), &format!("Windows/System32/a longer name of a file {n}"), b""));
    let image = image(tree.path(), 4 * MIB, FileLayout::Whole, &[]);
    let used: Vec<usize> = (0..image.len()).filter(|at| image[*at] != 0).collect();
    // Structures, which are few of all bytes: sectors of records and nodes.
    let is_structure = |at: &&usize| {
        let record = *at & !1023;
        let node = *at & !4095;
        image[record..].starts_with(b"FILE") || image[node..].starts_with(b"INDX") || **at < 512
    };
    let structures: Vec<usize> = used.iter().filter(is_structure).copied().collect();
    assert!(structures.len() > 3000, "{}", structures.len());
    let mut random = spillway_testkit::Rng::new(seed());
    let mut read_well = 0;
    for _ in 0..500 {
        let mut image = image.clone();
        for _ in 0..=random.below(40) {
            let from = if random.below(8) == 0 { &used } else { &structures };
            let at = from[random.below(from.len() as u64) as usize];
            image[at] = [0, 1, 0x7f, 0x80, 0xff, random.below(256) as u8][random.below(6) as usize];
        }
        for path in ["/Windows/System32/config/SYSTEM", "/windows/system32/config/software", "/nothing"] {
            let read = read(&image, path);
            read_well += usize::from(matches!(read, Ok(Some(content)) if content.len() == 40_000));
        }
        let _ = NtfsVolume::open(&image[..]).map(|volume| volume.is_dirty());
    }
    assert!((100..1000).contains(&read_well), "some damage matters, and some does not: {read_well}");
}

fn seed() -> u64 {
    let seed = std::env::var("SPILLWAY_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 1);
    println!("SPILLWAY_SEED={seed}");
    seed
}
