//! Checks whether an initrd contains the driver of virtio disks. An initrd is a sequence of cpio archives, the last of
//! which may be compressed. Owns the parser; confined programs decompress.
//!
//! Invariant: nothing is stored but the compressed part, of at most [`MOST_COMPRESSED_BYTES`].

use super::reader::{Reader, read_output};
use crate::confined::Confined;
use crate::error::HostError;
use rustix::fs::{MemfdFlags, memfd_create};
use spillway_api::ErrorCode;
use std::fs::File;
use std::io::{Seek, Write};
use std::time::Instant;

/// Largest initrd.
const MOST_COMPRESSED_BYTES: usize = 256 << 20;
/// Offset beyond the end of any initrd.
const MOST_DECOMPRESSED_BYTES: u64 = 1 << 30;
/// File name of the module, compressed or not, and its line in the list of built-in modules.
const DRIVER: &[u8] = b"virtio_blk.ko";

/// Whether the driver is in the initrd.
#[derive(Debug, PartialEq, Eq)]
pub enum DriverPresence {
    /// The driver is there.
    Conversion,
    /// The driver is missing.
    Missing,
    /// The initrd could not be read, for this reason.
    Unknown(String),
}

/// Searches an initrd for the driver.
pub fn driver(reader: &Reader, path: &str) -> Result<DriverPresence, HostError> {
    let mut walk = ArchiveWalker::default();
    let mut compressed = None;
    let mut trouble = None;
    let failed =
        |e: std::io::Error| HostError::new(ErrorCode::Internal, format!("no memory for an initrd: {e}"));
    reader.stream(path, |part| {
        let rest = walk.take(part);
        if !rest.is_empty() && trouble.is_none() {
            trouble = keep(&mut compressed, &rest).err();
        }
        trouble.is_none() && !walk.found && !walk.is_lost && kept_bytes(&compressed) < MOST_COMPRESSED_BYTES
    })?;
    if let Some(trouble) = trouble {
        return Err(failed(trouble));
    }
    let unknown = |why: &str| Ok(DriverPresence::Unknown(why.to_owned()));
    match compressed {
        _ if walk.found => Ok(DriverPresence::Conversion),
        _ if walk.is_lost => unknown("it is not a cpio archive"),
        None if walk.archives == 0 => unknown("it is empty"),
        None => Ok(DriverPresence::Missing),
        Some((_, bytes)) if bytes >= MOST_COMPRESSED_BYTES => unknown("it is too large"),
        Some((mut file, _)) => {
            file.rewind().map_err(failed)?;
            decompressed(file, &walk.magic, reader.until())
        }
    }
}

type Compressed = Option<(File, usize)>;

fn kept_bytes(compressed: &Compressed) -> usize {
    compressed.as_ref().map_or(0, |(_, bytes)| *bytes)
}

fn keep(compressed: &mut Compressed, part: &[u8]) -> std::io::Result<()> {
    if compressed.is_none() {
        *compressed = Some((memfd_create("initrd", MemfdFlags::CLOEXEC)?.into(), 0));
    }
    if let Some((file, bytes)) = compressed {
        file.write_all(part)?;
        *bytes += part.len();
    }
    Ok(())
}

/// File names are uncompressed in an archive; the lists of modules name only what is present or built in.
fn decompressed(file: File, magic: &[u8], until: Instant) -> Result<DriverPresence, HostError> {
    let program = match magic {
        [0x1f, 0x8b, ..] => "gzip",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd",
        [0xfd, b'7', b'z', b'X', ..] | [0x5d, 0, 0, ..] => "xz",
        [0x02, 0x21, 0x4c, 0x18, ..] | [0x04, 0x22, 0x4d, 0x18, ..] => "lz4",
        [b'B', b'Z', b'h', ..] => "bzip2",
        _ => return Ok(DriverPresence::Unknown("how it is compressed is not known".into())),
    };
    let mut seen = 0;
    let mut found = false;
    let mut tail = Vec::new();
    let decompress =
        Confined::new(program, until.saturating_duration_since(Instant::now())).arg("-dc").stdin(file);
    let decompressed = read_output(decompress, |part| {
        seen += part.len() as u64;
        tail.extend_from_slice(part);
        found = tail.windows(DRIVER.len()).any(|window| window == DRIVER);
        tail.drain(..tail.len().saturating_sub(DRIVER.len() - 1));
        !found && seen < MOST_DECOMPRESSED_BYTES
    });
    match decompressed {
        _ if found => Ok(DriverPresence::Conversion),
        Err(e) if e.code == ErrorCode::Unavailable => Ok(DriverPresence::Unknown(e.message)),
        Err(e) => Err(e),
        Ok(true) if seen < MOST_DECOMPRESSED_BYTES => Ok(DriverPresence::Missing),
        Ok(_) => Ok(DriverPresence::Unknown(format!("{program} cannot read all of it"))),
    }
}

/// Parser of uncompressed archives, which takes them in pieces.
#[derive(Default)]
struct ArchiveWalker {
    /// Number of bytes to skip.
    skip: u64,
    /// Incomplete header or magic number.
    head: Vec<u8>,
    /// Offset in the archive, for alignment.
    at: u64,
    archives: u32,
    between: bool,
    is_compressed: bool,
    magic: Vec<u8>,
    found: bool,
    is_lost: bool,
}

/// Size of a header in the format "newc".
const HEADER_BYTES: usize = 110;
const MAGIC_BYTES: usize = 6;
/// Longest name.
const MOST_NAME_BYTES: u64 = 4096;

impl ArchiveWalker {
    /// Parses a piece. Returns its compressed rest.
    fn take(&mut self, mut part: &[u8]) -> Vec<u8> {
        let mut rest = Vec::new();
        while !part.is_empty() && !self.found && !self.is_lost {
            if self.is_compressed {
                rest.extend_from_slice(part);
                break;
            }
            if self.skip > 0 {
                let n = (part.len() as u64).min(self.skip) as usize;
                self.pass(&mut part, n);
                self.skip -= n as u64;
                continue;
            }
            // Archives are padded with any number of zeroes.
            if self.head.is_empty() && (self.between || self.archives == 0) && part[0] == 0 {
                self.pass(&mut part, 1);
                continue;
            }
            let byte = part[0];
            self.head.push(byte);
            self.pass(&mut part, 1);
            if self.head.len() == MAGIC_BYTES && !is_newc(&self.head) {
                if self.archives > 0 && !self.between {
                    self.is_lost = true;
                } else {
                    self.is_compressed = true;
                    self.magic = std::mem::take(&mut self.head);
                    rest.extend_from_slice(&self.magic);
                }
            } else if self.head.len() >= HEADER_BYTES {
                self.member();
            }
        }
        rest
    }

    fn pass(&mut self, part: &mut &[u8], n: usize) {
        *part = &part[n..];
        self.at += n as u64;
    }

    /// Parses a complete header, with its name if that is complete.
    fn member(&mut self) {
        let [Some(size), Some(name_bytes)] = [54, 94].map(|at| hexadecimal(&self.head[at..at + 8])) else {
            self.is_lost = true;
            return;
        };
        if name_bytes == 0 || name_bytes > MOST_NAME_BYTES {
            self.is_lost = true;
            return;
        }
        let whole = HEADER_BYTES + name_bytes as usize;
        if self.head.len() < whole {
            return;
        }
        if self.archives == 0 || self.between {
            self.archives += 1;
        }
        let name = &self.head[HEADER_BYTES..];
        self.found = name.windows(DRIVER.len()).any(|window| window == DRIVER);
        self.between = name == b"TRAILER!!!\0";
        // Name and content are each padded to four bytes.
        let header = (whole as u64).next_multiple_of(4) - whole as u64;
        self.skip = if self.between { 0 } else { header + size.next_multiple_of(4) };
        self.head.clear();
    }
}

fn is_newc(head: &[u8]) -> bool {
    head.starts_with(b"070701") || head.starts_with(b"070702")
}

fn hexadecimal(digits: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_testkit::cpio::{Entry, archive};

    fn names(names: &[&str]) -> Vec<u8> {
        let entries: Vec<Entry> = names.iter().map(|name| Entry::file(name, 0o644, "content")).collect();
        archive(&entries).unwrap()
    }

    /// The same whatever the pieces are.
    fn walk(bytes: &[u8]) -> (ArchiveWalker, Vec<u8>) {
        let [(whole, rest), (_, by_bytes)] = [bytes.len().max(1), 1].map(|piece| {
            let mut walk = ArchiveWalker::default();
            let rest: Vec<u8> = bytes.chunks(piece).flat_map(|part| walk.take(part)).collect();
            (walk, rest)
        });
        assert_eq!(rest, by_bytes);
        (whole, rest)
    }

    #[test]
    fn archives_follow_each_other_and_the_last_may_be_compressed() {
        let plain = names(&["a", "lib/modules/6/kernel/drivers/block/virtio_blk.ko.xz"]);
        assert!(walk(&plain).0.found);
        let early = names(&["kernel/x86/microcode/GenuineIntel.bin", "b"]);
        let (after, rest) = walk(&early);
        assert!(!after.found && !after.is_lost && after.archives == 1 && rest.is_empty());
        let zeroes = vec![0; 300];
        assert!(walk(&[&early[..], &zeroes, &plain].concat()).0.found);
        let compressed = b"\x28\xb5\x2f\xfdwhatever";
        for before in [vec![], early.clone(), [&early[..], &zeroes, &early].concat()] {
            let (after, rest) = walk(&[&before[..], compressed].concat());
            assert!(!after.found && !after.is_lost && after.is_compressed);
            assert_eq!((rest.as_slice(), &after.magic[..4]), (&compressed[..], &compressed[..4]));
        }
    }

    #[test]
    fn what_is_no_archive_leads_nowhere() {
        for (what, bytes) in [
            ("a length that is none", [b"070701", &[b'z'; 104][..]].concat()),
            ("no name", [b"070701", &[b'0'; 104][..]].concat()),
            ("a name without end", [b"070701", &[b'f'; 104][..]].concat()),
            ("a member that is none", [&names(&["a"])[..124], b"garbage garbage"].concat()),
        ] {
            assert!(walk(&bytes).0.is_lost, "{what}");
        }
        assert!(!walk(&[]).0.is_lost);
    }
}
