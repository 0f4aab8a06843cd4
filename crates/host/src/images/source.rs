//! Inspects a file before its import: its format, the size of its disk, whether its content is in other files. Owns the
//! parsing of the first and last bytes of qcow2, VMDK, VHD and VHDX files; qemu-img reads the rest.
//!
//! Invariant: the format is the requested one; the content can contradict it but never chooses it. No length is trusted,
//! and at most some kilobytes are read.

use spillway_api::SourceFormat;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Longest descriptor of a VMware disk.
const MOST_DESCRIPTOR_BYTES: u64 = 64 << 10;
/// Size of the beginning that is inspected.
const HEAD_BYTES: usize = 512;
/// Footer of a VHD: the last bytes of the file; a dynamic one has a copy at its start.
const FOOTER_BYTES: u64 = 512;
const SECTOR_BYTES: u64 = 512;

/// Facts that a file states about itself.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct SourceFacts {
    /// Size of the disk, if the file records one.
    pub recorded_bytes: Option<u64>,
    /// Note about what the user may not expect.
    pub note: Option<String>,
}

/// Inspects a file that should have this format.
///
/// # Errors
/// Why it cannot be imported, and what to do.
pub fn look(file: &File, format: SourceFormat) -> Result<SourceFacts, String> {
    let file_bytes = file.metadata().map_or(0, |metadata| metadata.len());
    let head = read(file, 0, HEAD_BYTES);
    let footer = footer(file, &head, file_bytes);
    let found = kind(file, &head, footer.is_some());
    let is_said = match (format, &found) {
        (SourceFormat::Raw, None) => true,
        (SourceFormat::Raw, Some(found)) => {
            let note = format!("the file begins like {}, and was taken as raw, as was said", found.name);
            return Ok(SourceFacts { recorded_bytes: Some(file_bytes), note: Some(note) });
        }
        (said, Some(found)) => found.format == Some(said),
        (_, None) => false,
    };
    if !is_said {
        let said = format.as_str();
        return Err(match found {
            Some(ContentKind { name, format: Some(other), .. }) => {
                format!("it is {name}: say --format {}", other.as_str())
            }
            Some(ContentKind { name, advice, .. }) => format!("it is {name}: {advice}"),
            None => format!(
                "it does not begin like a {said} image: if it is the plain bytes of a disk say --format raw"
            ),
        });
    }
    let recorded_bytes = match format {
        SourceFormat::Raw => Some(file_bytes),
        SourceFormat::Qcow2 => number_be(&head, 24),
        SourceFormat::Vmdk => vmdk(file, &head)?,
        SourceFormat::Vpc => vhd(&footer.unwrap_or_default())?,
        SourceFormat::Vhdx => None,
    };
    Ok(SourceFacts { recorded_bytes, note: None })
}

/// Format that content is recognised as.
struct ContentKind {
    name: &'static str,
    /// Format to import it as.
    format: Option<SourceFormat>,
    advice: &'static str,
}

fn kind(file: &File, head: &[u8], has_footer: bool) -> Option<ContentKind> {
    const UNPACK: &str = "unpack it first";
    const CONVERT: &str = "convert it first with 'qemu-img convert -O qcow2 OLD NEW'";
    let known = [
        (&b"QFI\xfb"[..], "a qcow2 image", Some(SourceFormat::Qcow2), ""),
        (b"KDMV", "a VMDK", Some(SourceFormat::Vmdk), ""),
        (b"COWD", "a VMDK of an old ESX", Some(SourceFormat::Vmdk), ""),
        (b"vhdxfile", "a VHDX", Some(SourceFormat::Vhdx), ""),
        (b"<<< Oracle VM VirtualBox Disk Image >>>", "a VDI of VirtualBox", None, CONVERT),
        (b"WithoutFreeSpace", "a disk of Parallels", None, CONVERT),
        (b"WithouFreSpacExt", "a disk of Parallels", None, CONVERT),
        (b"QED\0", "a QED image", None, CONVERT),
        (b"\x1f\x8b", "compressed with gzip", None, UNPACK),
        (b"\xfd7zXZ\0", "compressed with xz", None, UNPACK),
        (b"\x28\xb5\x2f\xfd", "compressed with zstd", None, UNPACK),
        (b"BZh", "compressed with bzip2", None, UNPACK),
        (b"PK\x03\x04", "a zip archive", None, UNPACK),
        (b"7z\xbc\xaf\x27\x1c", "a 7z archive", None, UNPACK),
    ];
    let begins = known.into_iter().find(|(magic, ..)| head.starts_with(magic));
    if let Some((_, name, format, advice)) = begins {
        return Some(ContentKind { name, format, advice });
    }
    let kind = |name, format, advice| Some(ContentKind { name, format, advice });
    if is_descriptor(head) {
        return kind("the descriptor of a VMware disk", Some(SourceFormat::Vmdk), "");
    }
    if has_footer {
        return kind("a VHD", Some(SourceFormat::Vpc), "");
    }
    if head.get(257..262) == Some(b"ustar") {
        return kind("a tar archive (an OVA is one)", None, UNPACK);
    }
    let mark = read(file, 32769, 5);
    if mark == b"CD001" {
        return kind("a CD or DVD (ISO 9660)", None, "install from it into a disk, and import that");
    }
    None
}

/// Comments may precede the words by which qemu-img recognises a descriptor.
fn is_descriptor(head: &[u8]) -> bool {
    let text = String::from_utf8_lossy(head);
    let mut lines = text.lines().map(str::trim);
    text.starts_with("# Disk DescriptorFile")
        || text.starts_with('#')
            && lines
                .find(|line| !line.is_empty() && !line.starts_with('#'))
                .is_some_and(|line| line.starts_with("version="))
}

/// Returns the size that a VMDK records.
fn vmdk(file: &File, head: &[u8]) -> Result<Option<u64>, String> {
    if !head.starts_with(b"KDMV") {
        if head.starts_with(b"COWD") {
            return Ok(None);
        }
        return Err(elsewhere(&descriptor(file, 0, MOST_DESCRIPTOR_BYTES)));
    }
    let (capacity, at, len) = (number(head, 12), number(head, 28), number(head, 36));
    let sectors = |sectors: Option<u64>| sectors.and_then(|sectors| sectors.checked_mul(SECTOR_BYTES));
    let at = sectors(at).filter(|at| *at > 0);
    let len = sectors(len).unwrap_or(0).min(MOST_DESCRIPTOR_BYTES);
    let text = at.map_or_else(String::new, |at| descriptor(file, at, len));
    if !text.contains("createType") {
        return Err("it is one part of a VMware disk that is split into several files: make one file of them where they all \
                    are, 'qemu-img convert -f vmdk -O qcow2 DISK.vmdk DISK.qcow2' with the small file that names the others, \
                    and import that"
            .into());
    }
    let setting = |name: &str| {
        let mut values =
            text.lines().filter_map(|line| line.trim().strip_prefix(name)?.trim_start().strip_prefix('='));
        values.next().map(|value| shown(value.trim().trim_matches('"')))
    };
    if let Some(parent) = setting("parentFileNameHint") {
        return Err(format!(
            "it is a snapshot, and has only what was written over {parent}: delete the snapshot or clone the machine, and import \
             the whole disk"
        ));
    }
    let extents: Option<u64> = extents(&text).map(|(sectors, _)| sectors).try_fold(0u64, u64::checked_add);
    Ok(sectors(extents.filter(|extents| *extents > 0)).or(sectors(capacity)))
}

/// Message about a descriptor without its content.
fn elsewhere(text: &str) -> String {
    let names: Vec<String> = extents(text).map(|(_, name)| name).collect();
    let files = match names.as_slice() {
        [] => "other files".to_owned(),
        [one] => one.clone(),
        [first, others @ ..] => format!("{first} and {} more", others.len()),
    };
    format!(
        "it is the descriptor of a VMware disk, whose content is in {files}: make one file of them where they all are, \
         'qemu-img convert -f vmdk -O qcow2 DISK.vmdk DISK.qcow2', and import that"
    )
}

/// Parses the extents of a descriptor, lines such as `RW 8192 SPARSE "disk-s001.vmdk"`, into sectors and names.
fn extents(text: &str) -> impl Iterator<Item = (u64, String)> {
    text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let is_extent = matches!(words.next(), Some("RW" | "RDONLY" | "NOACCESS"));
        let sectors = words.next()?.parse().ok()?;
        let name = line.split('"').nth(1).unwrap_or_default();
        is_extent.then(|| (sectors, shown(name)))
    })
}

/// Makes an untrusted name printable.
fn shown(name: &str) -> String {
    name.chars().take(80).collect::<String>().escape_debug().to_string()
}

fn descriptor(file: &File, at: u64, len: u64) -> String {
    let bytes = read(file, at, len as usize);
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Returns the size in the footer of a VHD ("Virtual Hard Disk Image Format Specification", 1.0).
fn vhd(footer: &[u8]) -> Result<Option<u64>, String> {
    const DIFFERENCING: u64 = 4;
    // qemu-img would read it as if it contained the whole disk.
    if number_be(footer, 56).map(|both| both & 0xffff_ffff) == Some(DIFFERENCING) {
        return Err("it is a differencing VHD, and has only what was written over its parent: merge it with that first".into());
    }
    Ok(number_be(footer, 48))
}

fn footer(file: &File, head: &[u8], file_bytes: u64) -> Option<Vec<u8>> {
    let is_one = |bytes: &[u8]| bytes.len() as u64 == FOOTER_BYTES && bytes.starts_with(b"conectix");
    if is_one(head) {
        return Some(head.to_vec());
    }
    let last = read(file, file_bytes.checked_sub(FOOTER_BYTES)?, FOOTER_BYTES as usize);
    is_one(&last).then_some(last)
}

/// Reads up to `len` bytes.
fn read(file: &File, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut done = 0;
    while done < len {
        match file.read_at(&mut bytes[done..], at.saturating_add(done as u64)) {
            Ok(n @ 1..) => done += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            _ => break,
        }
    }
    bytes.truncate(done);
    bytes
}

fn eight(bytes: &[u8], at: usize) -> Option<[u8; 8]> {
    bytes.get(at..at + 8)?.try_into().ok()
}

fn number(bytes: &[u8], at: usize) -> Option<u64> {
    eight(bytes, at).map(u64::from_le_bytes)
}

fn number_be(bytes: &[u8], at: usize) -> Option<u64> {
    eight(bytes, at).map(u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::process::Command;

    fn qemu_img(dir: &Path, arguments: &[&str]) {
        let done = Command::new("qemu-img").args(arguments).current_dir(dir).output().unwrap();
        assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    }

    fn looked(path: &Path, format: SourceFormat) -> Result<SourceFacts, String> {
        look(&File::open(path).unwrap(), format)
    }

    #[test]
    fn each_format_is_known_by_its_beginning_and_records_its_size() {
        use SourceFormat::{Qcow2, Raw, Vhdx, Vmdk, Vpc};
        let dir = tempfile::tempdir().unwrap();
        let formats = [Raw, Qcow2, Vmdk, Vhdx, Vpc];
        for format in formats {
            qemu_img(dir.path(), &["create", "-q", "-f", format.as_str(), format.as_str(), "8M"]);
        }
        for format in formats {
            let path = dir.path().join(format.as_str());
            let source = looked(&path, format).unwrap();
            let expected = match format {
                Vhdx => None,
                // The nearest number of cylinders, heads and sectors.
                Vpc => source.recorded_bytes.filter(|bytes| (8 << 20..9 << 20).contains(bytes)),
                _ => Some(8 << 20),
            };
            assert_eq!((source.recorded_bytes, source.note), (expected, None), "{format:?}");
            for other in formats.into_iter().filter(|other| *other != format) {
                let looked = looked(&path, other);
                match (other, format) {
                    (Raw, _) => assert!(looked.unwrap().note.unwrap().contains("taken as raw"), "{format:?}"),
                    (_, Raw) => assert!(looked.unwrap_err().contains("say --format raw"), "{other:?}"),
                    _ => {
                        let why = looked.unwrap_err();
                        assert!(
                            why.ends_with(&format!("say --format {}", format.as_str())),
                            "{other:?}: {why}"
                        );
                    }
                }
            }
        }
        let fixed = ["create", "-q", "-f", "vpc", "-o", "subformat=fixed", "fixed", "8M"];
        qemu_img(dir.path(), &fixed);
        assert!(looked(&dir.path().join("fixed"), Vpc).unwrap().recorded_bytes.is_some());
    }

    #[test]
    fn parts_of_vmware_disks_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let raw = dir.path().join("raw");
        File::create(&raw).unwrap().set_len(5 << 20).unwrap();
        for (kind, part) in [
            ("monolithicFlat", "monolithicFlat-flat.vmdk"),
            ("twoGbMaxExtentSparse", "twoGbMaxExtentSparse-s001.vmdk"),
            ("twoGbMaxExtentFlat", "twoGbMaxExtentFlat-f001.vmdk"),
        ] {
            let name = format!("{kind}.vmdk");
            let option = format!("subformat={kind}");
            qemu_img(dir.path(), &["convert", "-f", "raw", "-O", "vmdk", "-o", &option, "raw", &name]);
            let why = looked(&dir.path().join(&name), SourceFormat::Vmdk).unwrap_err();
            assert!(why.contains(part) && why.contains("qemu-img convert"), "{why}");
            let of_part = looked(&dir.path().join(part), SourceFormat::Vmdk).unwrap_err();
            let expected =
                if kind.ends_with("Sparse") { "one part of a VMware disk" } else { "--format raw" };
            assert!(of_part.contains(expected), "{kind}: {of_part}");
        }
        for kind in ["monolithicSparse", "streamOptimized"] {
            let option = format!("subformat={kind}");
            qemu_img(dir.path(), &["convert", "-f", "raw", "-O", "vmdk", "-o", &option, "raw", kind]);
            let source = looked(&dir.path().join(kind), SourceFormat::Vmdk).unwrap();
            assert_eq!(source.recorded_bytes, Some(5 << 20), "{kind}");
        }
        qemu_img(
            dir.path(),
            &["create", "-q", "-f", "vmdk", "-b", "monolithicSparse", "-F", "vmdk", "delta"],
        );
        let why = looked(&dir.path().join("delta"), SourceFormat::Vmdk).unwrap_err();
        assert!(why.contains("snapshot") && why.contains("monolithicSparse"), "{why}");
    }

    #[test]
    fn what_only_has_changes_or_is_packed_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut footer = vec![0; 512];
        footer[..8].copy_from_slice(b"conectix");
        footer[63] = 4;
        std::fs::write(&path, &footer).unwrap();
        assert!(looked(&path, SourceFormat::Vpc).unwrap_err().contains("differencing"));
        let mut tar = vec![0; 512];
        tar[257..262].copy_from_slice(b"ustar");
        for (bytes, word) in [
            (tar, "OVA"),
            (b"\x1f\x8b and more".to_vec(), "gzip"),
            (b"<<< Oracle VM VirtualBox Disk Image >>>\n".to_vec(), "VDI"),
            (b"# a comment\nversion=1\nRW 10 FLAT \"a\x1b[2J\"".to_vec(), "--format vmdk"),
        ] {
            std::fs::write(&path, &bytes).unwrap();
            assert!(looked(&path, SourceFormat::Qcow2).unwrap_err().contains(word), "{word}");
            assert!(looked(&path, SourceFormat::Raw).unwrap().note.is_some(), "{word}");
        }
        // Whatever it is cut off at.
        let whole = dir.path().join("whole");
        qemu_img(dir.path(), &["create", "-q", "-f", "vmdk", "whole", "8M"]);
        let whole = std::fs::read(whole).unwrap();
        for len in [0, 1, 4, 12, 28, 36, 44, 511, 512, 600, 1024] {
            std::fs::write(&path, &whole[..len]).unwrap();
            let _ = looked(&path, SourceFormat::Vmdk);
        }
    }
}
