//! Reads files of an ext2/3/4 file system in an image, with debugfs in a confined process. Owns its commands.
//!
//! Invariant: output is bounded: in time by one deadline for all commands, in length for each; only names that need no
//! quotes are passed to debugfs.

use super::volumes::Extent;
use crate::confined::{Confined, path_of};
use crate::error::HostError;
use spillway_api::ErrorCode;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::rc::Rc;
use std::time::Instant;

/// Largest file that is read as text.
const MOST_TEXT_BYTES: usize = 256 << 10;
/// Longest listing of a folder.
const MOST_LISTED_BYTES: usize = 1 << 20;

/// An entry of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FolderEntry {
    /// Name, of letters, digits and a few signs.
    pub name: String,
    /// Kind of the entry.
    pub kind: FileKind,
    /// Size of a file.
    pub size_bytes: u64,
}

/// Kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A link or a special file.
    Other,
}

/// A file system in an image.
pub struct Reader<'a> {
    disk: &'a File,
    offset_bytes: u64,
    until: Instant,
    folders: RefCell<BTreeMap<String, Listing>>,
}

/// Listing of a folder.
#[derive(Clone)]
struct Listing {
    entries: Rc<[FolderEntry]>,
    /// Whether it is complete.
    is_whole: bool,
}

impl<'a> Reader<'a> {
    /// Opens the file system at this offset, to be read until this time.
    pub fn new(disk: &'a File, volume: &Extent, until: Instant) -> Reader<'a> {
        Reader { disk, offset_bytes: volume.offset_bytes, until, folders: RefCell::default() }
    }

    /// Lists a folder; empty if it does not exist. Links in the path are followed within the file system.
    pub fn list(&self, folder: &str) -> Result<Rc<[FolderEntry]>, HostError> {
        Ok(self.listing(folder)?.entries)
    }

    fn listing(&self, folder: &str) -> Result<Listing, HostError> {
        if let Some(known) = self.folders.borrow().get(folder) {
            return Ok(known.clone());
        }
        let listing = match self.may_be(folder)? {
            true => {
                // With the slash a link at the end of the path is followed too.
                let at = if folder.ends_with('/') { folder.to_owned() } else { format!("{folder}/") };
                let output = self.output_of("ls -p", &at, MOST_LISTED_BYTES)?;
                let entries = String::from_utf8_lossy(&output).lines().filter_map(entry).collect();
                Listing { entries, is_whole: output.len() < MOST_LISTED_BYTES }
            }
            false => Listing { entries: Rc::new([]), is_whole: true },
        };
        self.folders.borrow_mut().insert(folder.to_owned(), listing.clone());
        Ok(listing)
    }

    /// Whether a folder may exist, by the listing of its parent: most of the folders that are checked do not exist.
    fn may_be(&self, folder: &str) -> Result<bool, HostError> {
        let Some((above, name)) = folder.rsplit_once('/').filter(|(_, name)| !name.is_empty()) else {
            return Ok(true);
        };
        let above = self.listing(if above.is_empty() { "/" } else { above })?;
        let is_one = |entry: &FolderEntry| entry.name == name && entry.kind != FileKind::File;
        Ok(!above.is_whole || above.entries.iter().any(is_one))
    }

    /// Returns an entry by its path, if it exists.
    pub fn find(&self, path: &str) -> Result<Option<FolderEntry>, HostError> {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let folder = if folder.is_empty() { "/" } else { folder };
        Ok(self.list(folder)?.iter().find(|entry| entry.name == name).cloned())
    }

    /// Whether an entry exists at this path.
    pub fn has(&self, path: &str) -> Result<bool, HostError> {
        Ok(self.find(path)?.is_some())
    }

    /// Returns the beginning of a file's text; `None` if it is no file.
    pub fn text(&self, path: &str) -> Result<Option<String>, HostError> {
        match self.find(path)? {
            Some(FolderEntry { kind: FileKind::File, .. }) => {}
            _ => return Ok(None),
        }
        let output = self.output_of("cat", path, MOST_TEXT_BYTES)?;
        Ok(Some(String::from_utf8_lossy(&output).into_owned()))
    }

    /// Passes a file's content to `hear` in pieces, until that returns `false`.
    pub fn stream(&self, path: &str, hear: impl FnMut(&[u8]) -> bool) -> Result<(), HostError> {
        self.ask("cat", path, hear)
    }

    /// Deadline of all reads.
    pub fn until(&self) -> Instant {
        self.until
    }

    fn output_of(&self, verb: &str, path: &str, most_bytes: usize) -> Result<Vec<u8>, HostError> {
        let mut output = Vec::new();
        self.ask(verb, path, |part| {
            let space = most_bytes - output.len();
            output.extend_from_slice(&part[..part.len().min(space)]);
            part.len() <= space
        })?;
        Ok(output)
    }

    fn ask(&self, verb: &str, path: &str, hear: impl FnMut(&[u8]) -> bool) -> Result<(), HostError> {
        if !path.split('/').all(|name| name.is_empty() || is_plain(name)) {
            let message = format!("debugfs cannot be given the name '{}'", path.escape_debug());
            return Err(HostError::new(ErrorCode::Internal, message));
        }
        let debugfs = Confined::new("debugfs", self.until.saturating_duration_since(Instant::now()))
            // Without this debugfs would start a pager that outlives it.
            .env("DEBUGFS_PAGER", "__none__")
            // Skip the bitmaps: they may be damaged, and take long to read.
            .arg("-c")
            .arg("-R")
            .arg(format!("{verb} {path}"))
            .arg(format!("{}?offset={}", path_of(self.disk), self.offset_bytes))
            .may_read(self.disk);
        read_output(debugfs, hear).map(drop)
    }
}

/// Runs a program until it ends or `hear` returns `false`. Returns whether it succeeded.
pub fn read_output(program: Confined, mut hear: impl FnMut(&[u8]) -> bool) -> Result<bool, HostError> {
    let mut enough = false;
    let outcome = program.run(|part| {
        enough = !hear(part);
        if enough { Err(HostError::new(ErrorCode::Cancelled, "enough was heard")) } else { Ok(()) }
    });
    match outcome {
        Err(_) if enough => Ok(true),
        outcome => outcome.map(|outcome| outcome.success),
    }
}

/// Parses a line of `ls -p`: `/inode/mode/user/group/name/size/`.
fn entry(line: &str) -> Option<FolderEntry> {
    let mut fields = line.strip_prefix('/')?.split('/');
    let mode = u32::from_str_radix(fields.nth(1)?, 8).ok()?;
    let name = fields.nth(2)?;
    let size_bytes = fields.next()?.parse().unwrap_or(0);
    let kind = match mode >> 12 {
        0o10 => FileKind::File,
        0o04 => FileKind::Folder,
        _ => FileKind::Other,
    };
    is_plain(name).then(|| FolderEntry { name: name.to_owned(), kind, size_bytes })
}

/// Whether a name is safe for debugfs, a terminal and a reader.
fn is_plain(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+~@:,".contains(&byte);
    !name.is_empty() && name != "." && name != ".." && name.len() <= 255 && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_taken_apart_line_by_line() {
        let file = FolderEntry { name: "fstab".into(), kind: FileKind::File, size_bytes: 37 };
        assert_eq!(entry("/16/100644/0/0/fstab/37/"), Some(file));
        let folder = entry("/13/040755/0/0/boot//").unwrap();
        assert_eq!((folder.kind, folder.size_bytes), (FileKind::Folder, 0));
        assert_eq!(entry("/12/120777/0/0/bin/7/").unwrap().kind, FileKind::Other);
        for line in [
            "",
            "/",
            "debugfs: x",
            "/2/040755/0/0/.//",
            "/2/040755/0/0/..//",
            "/2/9/0/0/a/1/",
            "/2/100644/0/0/a b/1/",
            "/2/100644/0/0/a\"b/1/",
            "/2/100644/0/0/\u{1b}[2J/1/",
            "/2/100644/0/0/",
        ] {
            assert_eq!(entry(line), None, "{line}");
        }
    }
}
