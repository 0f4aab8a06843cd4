//! What a file is packed in, by its name: gzip, tar, both, or nothing.
//!
//! Owns the choice. Invariant: content never decides it; content can only contradict the name, and then that is said.

use super::gunzip::Gunzip;
use super::untar::{Untar, is_tar};
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

const BUFFER: usize = 256 << 10;
/// Bytes that are looked at.
const START: u64 = 512;

/// How files begin that are packed in a way that is not taken, or under another name: how, and what to do.
const PACKED: [(&[u8], &str, &str); 6] = [
    (&[0x1F, 0x8B], "gzip", "let its name end in .gz or .tgz, or give what zcat prints on standard input"),
    (b"PK\x03\x04", "zip", "unpack it first"),
    (&[0x28, 0xB5, 0x2F, 0xFD], "zstd", "give what zstdcat prints on standard input"),
    (&[0xFD, b'7', b'z', b'X', b'Z'], "xz", "give what xzcat prints on standard input"),
    (b"BZh", "bzip2", "give what bzcat prints on standard input"),
    (&[b'7', b'z', 0xBC, 0xAF], "7-Zip", "unpack it first"),
];

/// The text of a file of this name.
pub fn unpack(name: &Path, from: impl Read + 'static) -> io::Result<Box<dyn BufRead>> {
    let name = name.file_name().unwrap_or_default().to_string_lossy();
    let ends = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
    let from = BufReader::with_capacity(BUFFER, from);
    let plain: Box<dyn Read> = match ends(&[".gz", ".tgz"]) {
        true => Box::new(Gunzip::new(from)),
        false => Box::new(from),
    };
    let (start, plain) = peek(plain)?;
    let tar = ends(&[".tar", ".tar.gz", ".tgz"]);
    if tar != is_tar(&start) {
        return Err(bad(match tar {
            true => "it is named as a tar archive and is none",
            false => {
                "it is a tar archive: let its name end in .tar, .tar.gz or .tgz, or give what `tar -xOf ARCHIVE` prints on \
                 standard input"
            }
        }));
    }
    if tar {
        let (start, text) = peek(Untar::new(plain))?;
        return refuse_packed(&start).map(|()| text);
    }
    refuse_packed(&start).map(|()| plain)
}

/// The first bytes, which are read again afterwards.
fn peek(mut from: impl Read + 'static) -> io::Result<(Vec<u8>, Box<dyn BufRead>)> {
    let mut start = Vec::new();
    (&mut from).take(START).read_to_end(&mut start)?;
    let again = Cursor::new(start.clone()).chain(from);
    Ok((start, Box::new(BufReader::with_capacity(BUFFER, again))))
}

fn refuse_packed(start: &[u8]) -> io::Result<()> {
    match PACKED.iter().find(|(begin, ..)| start.starts_with(begin)) {
        Some((_, how, advice)) => Err(bad(&format!("it is packed by {how}: {advice}"))),
        None => Ok(()),
    }
}

/// In words for people what a reader says of a file that ends too early.
pub(super) fn cut_off(how: &str, error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => bad(&format!("{how}: it is cut off")),
        _ => error,
    }
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(name: &str, bytes: &[u8]) -> Result<String, String> {
        let mut text = String::new();
        let from = unpack(Path::new(name), Cursor::new(bytes.to_vec()));
        let read = from.and_then(|mut from| from.read_to_string(&mut text));
        read.map(|_| text).map_err(|e| e.to_string())
    }

    #[test]
    fn a_name_that_says_something_else_than_the_content_is_an_error() {
        assert_eq!(text("-", b"1,2\n").as_deref(), Ok("1,2\n"));
        assert_eq!(text("a.csv", b"").as_deref(), Ok(""));
        for (name, bytes, word) in [
            ("a.csv", &b"\x1F\x8B\x08"[..], ".gz"),
            ("a.csv", b"PK\x03\x04", "zip"),
            ("-", b"BZh9", "bzcat"),
            ("a.gz", b"1,2,3,4,5,6,7,8\n", "not packed by gzip"),
            ("a.gz", b"1,2\n", "cut off"),
            ("a.tgz", b"1,2,3,4,5,6,7,8\n", "not packed by gzip"),
            ("a.tar", b"1,2\n", "is none"),
        ] {
            let error = text(name, bytes).unwrap_err();
            assert!(error.contains(word), "{name}: {error}");
        }
        let mut archive = [0; 1024];
        archive[257..262].copy_from_slice(b"ustar");
        assert!(text("a.csv", &archive).unwrap_err().contains("tar -xOf"));
        assert!(text("a.tar", &archive).unwrap_err().contains("checksum"));
    }
}
