//! Archives in the form that the kernel unpacks as an initrd ("newc"). It unpacks several in a row, so that files
//! can be added to an initrd by appending an archive.
//!
//! Owns the form only. Invariant: an archive is a multiple of 4 bytes long, so that another may follow.

use anyhow::{Context, Result};

/// One file for an archive.
#[derive(Clone, Debug)]
pub struct Entry {
    path: String,
    mode: u32,
    content: Vec<u8>,
}

impl Entry {
    /// A file, with its permissions.
    pub fn file(path: &str, mode: u32, content: impl Into<Vec<u8>>) -> Entry {
        Entry { path: path.into(), mode: 0o100_000 | mode, content: content.into() }
    }

    /// A directory. Those above a file must come before it.
    pub fn directory(path: &str) -> Entry {
        Entry { path: path.into(), mode: 0o040_755, content: vec![] }
    }

    /// A symbolic link.
    pub fn link(path: &str, to: &str) -> Entry {
        Entry { path: path.into(), mode: 0o120_777, content: to.into() }
    }
}

/// The archive of some entries. All belong to root.
pub fn archive(entries: &[Entry]) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    let end = Entry { path: "TRAILER!!!".into(), mode: 0, content: vec![] };
    for (i, entry) in entries.iter().chain(std::iter::once(&end)).enumerate() {
        let size = u32::try_from(entry.content.len())
            .with_context(|| format!("{}: too large for an initrd", entry.path))?;
        let fields = [
            i as u32 + 1, // inode
            entry.mode,
            0, // user
            0, // group
            1, // links
            0, // time
            size,
            0, // device of the file system
            0,
            0, // device that the file is
            0,
            entry.path.len() as u32 + 1,
            0, // checksum, unused
        ];
        out.extend_from_slice(b"070701");
        for field in fields {
            out.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        out.extend_from_slice(entry.path.as_bytes());
        out.push(0);
        pad(&mut out);
        out.extend_from_slice(&entry.content);
        pad(&mut out);
    }
    Ok(out)
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn cpio_unpacks_two_archives_in_a_row() {
        if !crate::has_program("cpio") {
            crate::skip("cpio is not installed");
            return;
        }
        let first = archive(&[Entry::directory("a"), Entry::file("a/run", 0o755, "one")]).unwrap();
        let second = archive(&[Entry::link("a/link", "run")]).unwrap();
        for (bytes, want) in [(first, "a\na/run\n"), (second, "a/link\n")] {
            assert!(bytes.len().is_multiple_of(4));
            let mut child = Command::new("cpio")
                .args(["-t", "--quiet"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            child.stdin.take().unwrap().write_all(&bytes).unwrap();
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success());
            assert_eq!(String::from_utf8_lossy(&output.stdout), want);
        }
    }
}
