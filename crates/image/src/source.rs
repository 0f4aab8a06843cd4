//! The image file under a reader. Owns positioned reads, with or without O_DIRECT, and the list of those
//! that reached the store; never writes, never opens anything.
//!
//! Invariant: a read that the host's page cache served is not counted; any other is. Where the file system
//! cannot tell (no RWF_NOWAIT), a read counts, unless the file system is memory itself.

use super::aligned::{AlignedBuf, dio_align};
use super::raw::lies_in_memory;
use rustix::io::{Errno, ReadWriteFlags, pread, preadv2};
use std::fs::File;
use std::io::{self, IoSliceMut, Seek, SeekFrom};
use std::os::fd::AsFd;

/// Largest single read with O_DIRECT.
const BOUNCE_BYTES: usize = 256 * 1024;

/// A read that reached the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreRead {
    /// Its first byte in the file.
    pub offset: u64,
    /// How many came.
    pub len: u64,
}

/// An image file.
pub struct Source {
    file: File,
    bytes: u64,
    bounce: Option<Bounce>,
    in_memory: bool,
    traffic: Vec<StoreRead>,
}

/// What O_DIRECT reads go through.
struct Bounce {
    align: usize,
    buf: AlignedBuf,
}

impl Source {
    /// `direct` says that the file is open O_DIRECT.
    pub fn new(mut file: File, direct: bool) -> io::Result<Source> {
        let bytes = file.seek(SeekFrom::End(0))?;
        let bounce = direct.then(|| {
            let align = dio_align(file.as_fd()) as usize;
            Bounce { align, buf: AlignedBuf::new(BOUNCE_BYTES.max(align), align) }
        });
        let in_memory = lies_in_memory(file.as_fd());
        Ok(Source { file, bytes, bounce, in_memory, traffic: Vec::new() })
    }

    /// Size of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether reads go past the page cache.
    pub fn direct(&self) -> bool {
        self.bounce.is_some()
    }

    /// The reads of the store since the last call.
    pub fn take_traffic(&mut self) -> Vec<StoreRead> {
        let traffic = std::mem::take(&mut self.traffic);
        if self.in_memory { Vec::new() } else { traffic }
    }

    /// Fills `buf` from the file. Returns less than its length only where the file ends.
    pub fn read(&mut self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        match &mut self.bounce {
            Some(bounce) => bounce.read(&self.file, buf, offset, &mut self.traffic),
            None => read_cached(&self.file, buf, offset, &mut self.traffic),
        }
    }

    /// As [`Self::read`], where the file must hold all of it.
    pub fn read_exact(&mut self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        if self.read(buf, offset)? == buf.len() { Ok(()) } else { Err(Errno::IO.into()) }
    }
}

fn read_cached(file: &File, buf: &mut [u8], offset: u64, traffic: &mut Vec<StoreRead>) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        let at = offset + done as u64;
        let rest = &mut buf[done..];
        let n = match preadv2(file, &mut [IoSliceMut::new(rest)], at, ReadWriteFlags::NOWAIT) {
            Ok(n) => n,
            Err(Errno::AGAIN | Errno::OPNOTSUPP) => {
                let n = retry(|| pread(file, &mut *rest, at))?;
                traffic.push(StoreRead { offset: at, len: n as u64 });
                n
            }
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        if n == 0 {
            break;
        }
        done += n;
    }
    Ok(done)
}

impl Bounce {
    fn read(
        &mut self,
        file: &File,
        buf: &mut [u8],
        offset: u64,
        traffic: &mut Vec<StoreRead>,
    ) -> io::Result<usize> {
        let bounce = self.buf.as_mut_slice();
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let skip = (at % self.align as u64) as usize;
            let rest = buf.len() - done;
            let wanted = (skip + rest).next_multiple_of(self.align).min(bounce.len());
            let n = retry(|| pread(file, &mut bounce[..wanted], at - skip as u64))?;
            traffic.push(StoreRead { offset: at - skip as u64, len: n as u64 });
            let taken = n.saturating_sub(skip).min(rest);
            buf[done..done + taken].copy_from_slice(&bounce[skip..skip + taken]);
            done += taken;
            // A short direct read ends at the end of the file; going on from there would not be aligned.
            if n < wanted {
                break;
            }
        }
        Ok(done)
    }
}

fn retry(mut read: impl FnMut() -> rustix::io::Result<usize>) -> io::Result<usize> {
    loop {
        match read() {
            Err(Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}
