//! The one file that a tar archive holds, as it is read: public traces come so. Holds a block of 512 bytes.
//!
//! Invariant: an archive that is cut off or damaged, or that holds more than one file, is an error, never a short file.

use super::packed::cut_off;
use std::io::{self, Read};

const BLOCK: usize = 512;
/// Where in a header what lies.
const NAME: std::ops::Range<usize> = 0..100;
const SIZE: std::ops::Range<usize> = 124..136;
const CHECKSUM: std::ops::Range<usize> = 148..156;
const KIND: usize = 156;
const MAGIC: std::ops::Range<usize> = 257..262;
/// Most bytes of an extended header.
const MAX_EXTENDED: u64 = 64 << 10;

/// Whether a file that begins so is an archive.
pub fn is_tar(start: &[u8]) -> bool {
    start.get(MAGIC) == Some(b"ustar")
}

/// Reads an archive's file.
pub struct Untar<R: Read> {
    from: R,
    /// The file's name; none before it was found.
    name: Option<String>,
    /// Bytes of the file that are not read yet, and of the padding behind it.
    left: u64,
    padding: u64,
    ended: bool,
}

impl<R: Read> Untar<R> {
    /// Starts to read.
    pub fn new(from: R) -> Untar<R> {
        Untar { from, name: None, left: 0, padding: 0, ended: false }
    }

    /// Goes on to the next file's content. False: the archive has ended.
    fn next_file(&mut self) -> io::Result<bool> {
        // What an extended header says of the next file.
        let mut extended_size = None;
        loop {
            let mut header = [0; BLOCK];
            if !self.fill(&mut header)? || header == [0; BLOCK] {
                return Ok(false);
            }
            let size = check(&header)?;
            match header[KIND] {
                b'0' | 0 | b'7' => {
                    let name = name_of(&header);
                    if let Some(first) = &self.name {
                        return Err(bad(&format!(
                            "it holds more than one file, {first} and {name}: unpack it and import each, or several in the \
                             order of their time by `tar -xOf ARCHIVE FILE...`"
                        )));
                    }
                    self.name = Some(name);
                    self.left = extended_size.unwrap_or(size);
                    self.padding = padding(self.left);
                    return Ok(true);
                }
                b'x' => extended_size = self.extended_size(size)?,
                b'S' => return Err(bad("it holds a sparse file: unpack it first")),
                // Directories, links, long names: no content.
                _ => self.skip(size + padding(size))?,
            }
        }
    }

    /// The size that an extended header (pax) says, if it does.
    fn extended_size(&mut self, size: u64) -> io::Result<Option<u64>> {
        if size > MAX_EXTENDED {
            return Err(bad("an extended header has no end"));
        }
        let mut bytes = vec![0; size as usize];
        self.from.read_exact(&mut bytes)?;
        self.skip(padding(size))?;
        let text = String::from_utf8_lossy(&bytes);
        let extended_size =
            text.lines().find_map(|line| line.split_once(" size=").map(|(_, size)| size.parse()));
        extended_size.transpose().map_err(|_| bad("an extended header says no size"))
    }

    /// A whole block. False: there is none.
    fn fill(&mut self, block: &mut [u8; BLOCK]) -> io::Result<bool> {
        let mut done = 0;
        while done < BLOCK {
            match self.from.read(&mut block[done..]) {
                Ok(0) if done == 0 => return Ok(false),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    fn skip(&mut self, n: u64) -> io::Result<()> {
        let skipped = io::copy(&mut (&mut self.from).take(n), &mut io::sink())?;
        if skipped == n { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

impl<R: Read> Read for Untar<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.unpack(to).map_err(|e| cut_off("tar", e))
    }
}

impl<R: Read> Untar<R> {
    fn unpack(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if to.is_empty() {
            return Ok(0);
        }
        while self.left == 0 {
            if self.ended {
                return Ok(0);
            }
            let padding = std::mem::take(&mut self.padding);
            self.skip(padding)?;
            self.ended = !self.next_file()?;
            if self.ended && self.name.is_none() {
                return Err(bad("it holds no file"));
            }
        }
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(to.len());
        let n = self.from.read(&mut to[..most])?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= n as u64;
        Ok(n)
    }
}

/// What fills the last block behind so many bytes.
fn padding(size: u64) -> u64 {
    (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64
}

fn name_of(header: &[u8; BLOCK]) -> String {
    let name = header[NAME].split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(name).chars().filter(|c| !c.is_control()).collect()
}

/// Refuses a header that is none. Returns the size that it says.
fn check(header: &[u8; BLOCK]) -> io::Result<u64> {
    let sum: u64 = header
        .iter()
        .enumerate()
        .map(|(at, byte)| u64::from(if CHECKSUM.contains(&at) { b' ' } else { *byte }))
        .sum();
    if number(&header[CHECKSUM]) != Some(sum) {
        return Err(bad("a header's checksum is wrong"));
    }
    let size = number(&header[SIZE]).filter(|size| *size < 1 << 60);
    size.ok_or_else(|| bad("a header says no size"))
}

/// A number in octal digits, or, where that is too short, in bytes with the first bit set.
fn number(field: &[u8]) -> Option<u64> {
    if field.first().is_some_and(|first| first & 0x80 != 0) {
        let (rest, last) = field.split_at(field.len().checked_sub(8)?);
        let fits = rest.iter().enumerate().all(|(at, byte)| if at == 0 { *byte == 0x80 } else { *byte == 0 });
        return fits.then(|| u64::from_be_bytes(last.try_into().expect("eight bytes")));
    }
    let digits = std::str::from_utf8(field).ok()?.trim_matches(|c| c == ' ' || c == '\0');
    u64::from_str_radix(digits, 8).ok()
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("tar: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &str, kind: u8, size: usize) -> Vec<u8> {
        let mut header = vec![0; BLOCK];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[SIZE].copy_from_slice(format!("{size:011o}\0").as_bytes());
        header[KIND] = kind;
        header[MAGIC].copy_from_slice(b"ustar");
        header[CHECKSUM].fill(b' ');
        let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
        header[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        header
    }

    fn member(name: &str, kind: u8, content: &[u8]) -> Vec<u8> {
        let mut bytes = header(name, kind, content.len());
        bytes.extend(content);
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        bytes
    }

    fn archive(members: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = members.concat();
        bytes.resize(bytes.len() + 2 * BLOCK, 0);
        bytes
    }

    fn content(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        Untar::new(io::BufReader::with_capacity(7, bytes)).read_to_end(&mut out)?;
        Ok(out)
    }

    #[test]
    fn the_file_of_an_archive_comes_out() {
        for len in [1, 511, 512, 513, 5000] {
            let text = vec![b'7'; len];
            let folder = member("traces/", b'5', b"");
            let long = member("././@LongLink", b'L', b"a name of many letters\0");
            let bytes = archive(&[folder.clone(), long, member("traces/one", b'0', &text)]);
            assert!(is_tar(&bytes));
            assert_eq!(content(&bytes).unwrap(), text, "{len}");
            let pax = member("x", b'x', format!("20 mtime=1.5\n12 size={len}\n").as_bytes());
            assert_eq!(content(&archive(&[pax, member("one", b'0', &text)])).unwrap(), text, "{len}");
            for cut in (0..bytes.len() - 2 * BLOCK).step_by(61) {
                assert!(content(&bytes[..cut]).is_err(), "{len}, cut at {cut}");
            }
        }
        assert!(!is_tar(b"1538323200,12910952,128,0,1063\n"));
    }

    #[test]
    fn what_is_no_archive_of_one_file_is_an_error() {
        let (one, two) = (member("one", b'0', b"1\n"), member("two", b'0', b"2\n"));
        let error = content(&archive(&[one.clone(), two])).unwrap_err().to_string();
        assert!(error.contains("one and two") && error.contains("tar -xOf"), "{error}");
        assert!(content(&archive(&[])).unwrap_err().to_string().contains("no file"));
        assert!(content(&archive(&[member("s", b'S', b"")])).unwrap_err().to_string().contains("sparse"));
        for at in 0..BLOCK {
            let mut damaged = archive(std::slice::from_ref(&one));
            damaged[at] ^= 1;
            assert!(content(&damaged).is_err() || CHECKSUM.contains(&at), "byte {at}");
        }
        assert!(content(&vec![b'x'; 3 * BLOCK]).is_err());
    }
}
