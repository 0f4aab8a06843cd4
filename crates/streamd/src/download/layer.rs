//! A layer of an image: an archive of tar, in which a disk is looked for. Owns what counts as one.
//!
//! Invariant: nothing of the archive becomes a path; names, headers and sizes are bounded by what is read of the stream, whatever
//! they say.

use super::output::Output;
use super::packing::{Packing, plain};
use super::unsupported;
use spillway_registry::RegistryError;
use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;
use tar::{Archive, Entry};

/// Largest headers of one entry, with long names and attributes, in bytes.
const MOST_HEADER_BYTES: u64 = 1 << 20;
/// Longest name in a message, in characters.
const MOST_NAME: usize = 80;

/// A reader of which so many bytes may be read.
struct Bounded<'a> {
    inner: Box<dyn Read + 'a>,
    allowed_bytes: Rc<Cell<u64>>,
    total_bytes: Rc<Cell<u64>>,
}

impl Read for Bounded<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = self.allowed_bytes.get().min(self.total_bytes.get());
        if most == 0 && !into.is_empty() {
            return Err(io::Error::other(refused("its headers or its content are too large")));
        }
        let len = into.len().min(usize::try_from(most).unwrap_or(usize::MAX));
        let n = self.inner.read(&mut into[..len])?;
        self.allowed_bytes.set(self.allowed_bytes.get() - n as u64);
        self.total_bytes.set(self.total_bytes.get() - n as u64);
        Ok(n)
    }
}

fn refused(why: &str) -> RegistryError {
    unsupported(format!("the layer cannot be used: {why}"))
}

/// Copies the only file below `disk/` of a layer to the output. Returns whether there is one. At most so many plain bytes of the
/// layer are read.
pub fn find_disk(packed: &mut dyn Read, output: &mut Output, most_bytes: u64) -> io::Result<bool> {
    let mut beginning = Vec::new();
    packed.take(4).read_to_end(&mut beginning)?;
    let packing = Packing::of_archive(&beginning);
    let whole = io::Cursor::new(beginning).chain(packed);
    let (allowed_bytes, total_bytes) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(most_bytes)));
    let reader =
        Bounded { inner: plain(whole, packing), allowed_bytes: Rc::clone(&allowed_bytes), total_bytes };
    let mut archive = Archive::new(reader);
    let mut entries = archive.entries()?;
    let mut found: Option<String> = None;
    loop {
        allowed_bytes.set(MOST_HEADER_BYTES);
        let Some(entry) = entries.next() else { return Ok(found.is_some()) };
        let mut entry = entry?;
        allowed_bytes.set(u64::MAX);
        // Its content has holes that the archive does not contain, of any size.
        if entry.header().entry_type().is_gnu_sparse() {
            return Err(io::Error::other(refused(
                "it has a sparse file in the form of GNU tar: pack it without --sparse",
            )));
        }
        let Some(name) = name_of_disk(&mut entry)? else {
            io::copy(&mut entry, &mut io::sink())?;
            continue;
        };
        if let Some(other) = &found {
            let why = format!("it has two files below disk/, {other} and {name}: an image has one disk");
            return Err(io::Error::other(refused(&why)));
        }
        let expected = entry.size();
        if io::copy(&mut entry, output)? != expected {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the archive is cut"));
        }
        found = Some(name);
    }
}

/// The name of an entry for people, if it is a file below `disk/` and no mark that one was deleted.
fn name_of_disk(entry: &mut Entry<'_, impl Read>) -> io::Result<Option<String>> {
    let kind = entry.header().entry_type();
    if !kind.is_file() && !kind.is_contiguous() {
        return Ok(None);
    }
    let path = entry.path_bytes().into_owned();
    let mut parts = path.split(|byte| *byte == b'/').filter(|part| !matches!(part, [] | [b'.'])).peekable();
    let is_below = parts.next() == Some(b"disk") && parts.peek().is_some();
    if !is_below || parts.any(|part| part == b".." || part.starts_with(b".wh.")) {
        return Ok(None);
    }
    if let Some(records) = entry.pax_extensions()? {
        for record in records {
            if record?.key_bytes().starts_with(b"GNU.sparse.") {
                return Err(io::Error::other(refused(
                    "its disk is a sparse file in the form of GNU tar: pack it without --sparse",
                )));
            }
        }
    }
    let name = String::from_utf8_lossy(&path).chars().take(MOST_NAME).collect::<String>();
    Ok(Some(name.escape_debug().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use tar::{Builder, EntryType, Header};

    const MOST: u64 = 64 << 20;

    fn header(name: &str, kind: EntryType, bytes: u64) -> Header {
        let mut header = Header::new_gnu();
        // What the library refuses to write is written by those who mean harm.
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(kind);
        header.set_size(bytes);
        header.set_cksum();
        header
    }

    fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut builder = Builder::new(Vec::new());
        for (name, content) in files {
            builder.append(&header(name, EntryType::Regular, content.len() as u64), *content).unwrap();
        }
        builder.into_inner().unwrap()
    }

    /// Whether there is a disk, and its content; or the error.
    fn looked(mut layer: &[u8]) -> Result<(bool, Vec<u8>), String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let mut output = Output::new(File::create(&path).unwrap(), MOST);
        let found = find_disk(&mut layer, &mut output, MOST).map_err(|e| e.to_string())?;
        output.finish().unwrap();
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
        Ok((found, std::fs::read(path).unwrap()))
    }

    #[test]
    fn the_only_file_below_disk_is_the_disk() {
        for name in ["disk/a.img", "./disk/a.qcow2", "/disk/a.raw", "disk//sub/a", "disk/./a"] {
            let layer =
                archive(&[("etc/x", b"no"), (name, b"content"), ("disk/.wh.old", b""), ("disk2/x", b"no")]);
            assert_eq!(looked(&layer).unwrap(), (true, b"content".to_vec()), "{name}");
        }
        for name in [
            "disk",
            "disks/a",
            "etc/disk/a",
            "../disk/a",
            "disk/../etc/passwd",
            "/../../disk",
            "disk/.wh..wh..opq",
        ] {
            assert_eq!(looked(&archive(&[(name, b"content")])).unwrap(), (false, vec![]), "{name}");
        }
        let why = looked(&archive(&[("disk/a", b"1"), ("disk/b\x1b[2J", b"2")])).unwrap_err();
        assert!(why.contains("disk/a and disk/b\\u{1b}") && why.contains("one disk"), "{why}");
        assert_eq!(looked(&archive(&[])).unwrap(), (false, vec![]));
    }

    #[test]
    fn links_and_devices_are_no_disks() {
        for kind in
            [EntryType::Symlink, EntryType::Link, EntryType::Char, EntryType::Fifo, EntryType::Directory]
        {
            let mut builder = Builder::new(Vec::new());
            builder.append(&header("disk/a.img", kind, 0), &b""[..]).unwrap();
            assert_eq!(looked(&builder.into_inner().unwrap()).unwrap(), (false, vec![]), "{kind:?}");
        }
    }

    #[test]
    fn what_a_header_says_is_not_trusted() {
        // A size that the archive does not have, a name without end, a file of holes.
        let mut cut = archive(&[("disk/a", &[7; 4096])]);
        cut.truncate(2048);
        assert!(looked(&cut).unwrap_err().contains("cut"));
        let huge = header("disk/a", EntryType::Regular, u64::MAX >> 1);
        let layer = [huge.as_bytes(), &[7; 4096][..]].concat();
        assert!(looked(&layer).is_err());
        let long = header("././@LongLink", EntryType::GNULongName, 32 << 20);
        let layer = [long.as_bytes(), &vec![b'x'; 33 << 20][..]].concat();
        assert!(looked(&layer).unwrap_err().contains("too large"));
        let sparse = header("disk/a", EntryType::GNUSparse, 1 << 40);
        assert!(looked(&[sparse.as_bytes(), &[0xff; 1 << 16][..]].concat()).is_err());
        assert!(looked(&[b'x'; 2048]).is_err());
        // Whatever it is cut off at, or changed to.
        let whole = archive(&[("etc/x", &[1; 700]), ("disk/a", &[7; 700])]);
        (0..whole.len()).step_by(97).for_each(|len| drop(looked(&whole[..len])));
        for at in (0..whole.len()).step_by(13) {
            let mut changed = whole.clone();
            changed[at] ^= 0x55;
            let _ = looked(&changed);
        }
    }

    /// Archives of GNU tar, as it makes them with and without `--sparse`.
    #[test]
    fn sparse_files_are_refused_and_others_are_read() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("disk")).unwrap();
        let long = format!("disk/{}.img", "x".repeat(200));
        let file = File::create(dir.path().join(&long)).unwrap();
        file.set_len(8 << 20).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"content", 4 << 20).unwrap();
        for format in ["gnu", "pax"] {
            for is_sparse in [false, true] {
                let mut tar = std::process::Command::new("tar");
                tar.arg("-C").arg(dir.path()).arg(format!("--format={format}"));
                let made = tar.args(is_sparse.then_some("--sparse")).args(["-c", "disk"]).output().unwrap();
                assert!(made.status.success());
                match looked(&made.stdout) {
                    Ok((true, disk)) if !is_sparse => {
                        assert!(disk == std::fs::read(dir.path().join(&long)).unwrap(), "{format}")
                    }
                    Err(why) if is_sparse => assert!(why.contains("without --sparse"), "{format}: {why}"),
                    other => panic!("{format}, sparse {is_sparse}: {:?}", other.map(|(found, _)| found)),
                }
            }
        }
    }

    #[test]
    fn a_layer_that_grows_without_end_is_cut() {
        let zeroes = io::repeat(0).take(300 << 20);
        let first = header("etc/x", EntryType::Regular, 300 << 20);
        let endless = io::Cursor::new(first.as_bytes().to_vec()).chain(zeroes);
        let mut packed = Vec::new();
        flate2::read::GzEncoder::new(endless, flate2::Compression::fast()).read_to_end(&mut packed).unwrap();
        assert!(packed.len() < 4 << 20);
        assert!(looked(&packed).unwrap_err().contains("too large"));
    }
}
