//! NTFS volumes and registry hives as Windows has them, made by ntfs-3g and hivex: for tests of what reads them.
//!
//! Needs no root and mounts nothing: Debian's ntfs-3g and libwin-hivex-perl, and python3. Invariant: what is made is made by
//! others than those who read it, except for the few bytes of an empty hive.

use anyhow::{Context, Result, ensure};
use std::io::Write;
use std::path::Path;
use std::process::Command;

/// Copies a folder into a volume with ntfs-3g's library.
const COPY: &str = include_str!("windows_copy.py");

/// How files are laid out on a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileLayout {
    /// Each file in one piece, as far as the library does so.
    Whole,
    /// Every few KiB of a file apart from those before. Half of the volume is taken by a folder `filler`.
    Scattered,
}

/// Makes a file of this size a volume with the content of a folder. Further options are mkntfs's.
pub fn ntfs_volume(
    to: &Path,
    size_bytes: u64,
    tree: &Path,
    layout: FileLayout,
    options: &[&str],
) -> Result<()> {
    std::fs::File::create(to)?.set_len(size_bytes)?;
    let mut mkntfs = Command::new("/usr/sbin/mkntfs");
    run(mkntfs.args(["--quick", "--quiet", "--force"]).args(options).arg(to), "ntfs-3g")?;
    let scattered = if layout == FileLayout::Scattered { "1" } else { "0" };
    run(Command::new("python3").args(["-c", COPY]).arg(to).arg(tree).arg(scattered), "ntfs-3g")?;
    Ok(())
}

/// Returns a hive with these keys and values, in the text form of regedit without its first line; the keys begin with
/// `\`.
pub fn hive(content: &str) -> Result<Vec<u8>> {
    let mut hive = tempfile::NamedTempFile::new()?;
    hive.write_all(&empty_hive())?;
    let mut text = tempfile::NamedTempFile::new()?;
    writeln!(text, "Windows Registry Editor Version 5.00\n")?;
    for line in content.lines() {
        // The keys above a key must exist.
        let key = line.strip_prefix('[').unwrap_or_default();
        for (at, _) in key.match_indices('\\').skip(1) {
            writeln!(text, "\n[{}]\n", &key[..at])?;
        }
        writeln!(text, "{line}")?;
    }
    let mut merge = Command::new("hivexregedit");
    run(merge.arg("--merge").arg(hive.path()).arg(text.path()), "libwin-hivex-perl")?;
    Ok(std::fs::read(hive.path())?)
}

fn run(command: &mut Command, package: &str) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done =
        command.output().with_context(|| format!("{program} cannot be started (Debian: {package})"))?;
    ensure!(
        done.status.success(),
        "{program}: {}{}",
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr)
    );
    Ok(())
}

/// A hive with a root key and its security descriptor, and space for more.
fn empty_hive() -> Vec<u8> {
    const ROOT: u32 = 0x20;
    const SECURITY: u32 = 0x80;
    const FREE: u32 = 0xc0;
    let mut bytes = vec![0; 8192];
    let mut put = |at: u32, what: &[u8]| bytes[at as usize..at as usize + what.len()].copy_from_slice(what);
    let mut words = |at: u32, words: &[u32]| {
        words.iter().zip(0..).for_each(|(word, n)| put(at + n * 4, &word.to_le_bytes()));
    };
    // Numbers of the last change, version 1.3, the root's place, the size of the cells.
    words(4, &[1, 1, 0, 0, 1, 3, 0, 1, ROOT, 4096, 1]);
    words(4096 + 4, &[0, 4096]);
    // Cells that are in use have a negative size. The root has no parent, no keys, no values and no class.
    let none = u32::MAX;
    let at = 4096 + ROOT;
    words(at, &[(ROOT.wrapping_sub(SECURITY))]);
    words(at + 20, &[none, 0, 0, none, none, 0, none, SECURITY, none]);
    let at = 4096 + SECURITY;
    words(at, &[(SECURITY.wrapping_sub(FREE)), 0]);
    // A list of one, that one key uses: an empty descriptor, relative to itself.
    words(at + 8, &[SECURITY, SECURITY, 1, 20, 0x8000_0001, 0, 0, 0, 0]);
    words(4096 + FREE, &[4096 - FREE]);
    put(0, b"regf");
    put(4096, b"hbin");
    put(4096 + ROOT + 4, b"nk\x2c\0");
    put(4096 + ROOT + 4 + 72, &[4, 0, 0, 0, b'R', b'O', b'O', b'T']);
    put(4096 + SECURITY + 4, b"sk");
    let sum = bytes[..508]
        .chunks_exact(4)
        .fold(0, |sum, word| sum ^ u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    bytes[508..512].copy_from_slice(&sum.to_le_bytes());
    bytes
}
