//! Finds and reads clusters. Owns the tables' pages and the decompressed clusters that it keeps, both bounded;
//! never trusts an entry: what does not lie inside the file, or has bits that mean nothing, is an I/O error of
//! the read that needed it.
//!
//! Invariant: a byte that is handed out is the image's. Where the file ends before a cluster does, the read
//! fails; missing bytes never read as zeroes.

use super::header::{Compression, HEADER_BYTES, Header};
use super::recent::Recent;
use crate::error::ImageError;
use crate::extents::{Extent, ExtentKind, MOST_EXTENTS};
use crate::holes::FileHoles;
use crate::reader::Contents;
use crate::source::{Source, StoreRead};
use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};
use rustix::io::Errno;
use std::fs::File;
use std::io;

/// Metadata is read and kept in pages of this size, at multiples of it in the file.
const PAGE_BYTES: u64 = 4096;
/// 512 KiB of metadata: the tables of 4 GiB at clusters of 64 KiB.
const PAGES: usize = 128;
const PAGE_ENTRIES: u64 = PAGE_BYTES / 8;
/// Decompressed clusters that are kept.
const CLUSTER_CACHE_BYTES: u64 = 4 << 20;
const MOST_CLUSTERS: u64 = 256;
/// A buffer for compressed bytes that is larger than this is given back at once.
const LARGE_INPUT_BYTES: usize = 256 * 1024;

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;

/// An open image.
pub struct Image {
    header: Header,
    holes: FileHoles,
    tables: Tables,
    clusters: Recent,
    inflate: Inflate,
}

/// The file, and the pages of its L1 and L2 tables.
struct Tables {
    source: Source,
    pages: Recent,
}

/// Decompresses clusters: with zstd if there is one, else deflate.
struct Inflate {
    deflate: Box<DecompressorOxide>,
    zstd: Option<zstd_safe::DCtx<'static>>,
    input: Vec<u8>,
}

/// Where one cluster, or a run of them that lies in one piece, is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Zero,
    /// Plain bytes from this offset of the file on.
    Plain(u64),
    /// Compressed bytes: offset, and an upper limit of their number.
    Compressed(u64, u64),
}

fn corrupt() -> io::Error {
    Errno::IO.into()
}

impl Image {
    /// Reads the header of an image that the supervisor has accepted.
    pub fn open(file: File, direct: bool) -> Result<Image, ImageError> {
        let again =
            file.try_clone().map_err(|e| ImageError::resources("cannot be opened a second time", &e))?;
        let mut source = Source::new(file, direct).map_err(|e| ImageError::io("cannot be measured", &e))?;
        let mut start = [0; HEADER_BYTES];
        let n = source.read(&mut start, 0).map_err(|e| ImageError::io("cannot be read", &e))?;
        let header = Header::parse(&start[..n], source.bytes())?;
        // Past the page cache means past every cache: one cluster of scratch, never looked up.
        let kept =
            if direct { 1 } else { (CLUSTER_CACHE_BYTES >> header.cluster_bits).clamp(1, MOST_CLUSTERS) };
        let zstd = match header.compression {
            Compression::Deflate => None,
            Compression::Zstd => {
                let no_memory = || {
                    let source = Errno::NOMEM.into();
                    ImageError::resources("cannot be decompressed", &source)
                };
                Some(zstd_safe::DCtx::try_create().ok_or_else(no_memory)?)
            }
        };
        Ok(Image {
            holes: FileHoles::new(again, source.bytes()),
            tables: Tables { source, pages: Recent::new(PAGE_BYTES as usize, PAGES) },
            clusters: Recent::new(header.cluster_bytes() as usize, kept as usize),
            inflate: Inflate { deflate: Box::default(), zstd, input: Vec::new() },
            header,
        })
    }

    /// Size that a disk sees.
    pub fn virtual_size(&self) -> u64 {
        self.header.virtual_size
    }

    /// The place of `offset`, and for how many bytes (1 to `most`) it goes on in one piece: to the end of its L2
    /// table's page at the farthest, or over untouched L2 tables. A compressed run ends with its cluster.
    fn run(&mut self, offset: u64, most: u64) -> io::Result<(Place, u64)> {
        let header = self.header;
        let coverage = header.l2_coverage();
        let l1_index = offset / coverage;
        let Some(l2_offset) = self.tables.l2_table(&header, l1_index)? else {
            let mut end = (l1_index + 1).saturating_mul(coverage);
            let page_end = (l1_index / PAGE_ENTRIES + 1) * PAGE_ENTRIES;
            for next in l1_index + 1..page_end {
                if end - offset >= most || !matches!(self.tables.l2_table(&header, next), Ok(None)) {
                    break;
                }
                end = end.saturating_add(coverage);
            }
            return Ok((Place::Zero, (end - offset).min(most)));
        };
        let cluster = header.cluster_bytes();
        let mut index = offset % coverage / cluster;
        let inside = offset % cluster;
        let first = self.tables.place(&header, l2_offset, index)?;
        let mut len = cluster - inside;
        let last = ((index / PAGE_ENTRIES + 1) * PAGE_ENTRIES).min(header.l2_entries());
        while len < most && index + 1 < last && !matches!(first, Place::Compressed(..)) {
            index += 1;
            let goes_on = match (first, self.tables.place(&header, l2_offset, index)) {
                (Place::Zero, Ok(Place::Zero)) => true,
                (Place::Plain(start), Ok(Place::Plain(next))) => next == start + inside + len,
                _ => false,
            };
            if !goes_on {
                break;
            }
            len += cluster;
        }
        let place = match first {
            Place::Plain(start) => Place::Plain(start + inside),
            same => same,
        };
        Ok((place, len.min(most)))
    }

    /// A whole decompressed cluster.
    fn cluster(&mut self, file_offset: u64, most: u64) -> io::Result<&[u8]> {
        if self.tables.source.direct() {
            self.clusters.forget();
        }
        let (source, inflate) = (&mut self.tables.source, &mut self.inflate);
        self.clusters.get(file_offset, |out| inflate.cluster(source, file_offset, most, out))
    }
}

impl Contents for Image {
    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > self.header.virtual_size) {
            return Err(Errno::INVAL.into());
        }
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let (place, run) = self.run(at, (out.len() - done) as u64)?;
            let to = &mut out[done..done + run as usize];
            match place {
                Place::Zero => to.fill(0),
                Place::Plain(file_offset) => self.tables.source.read_exact(to, file_offset)?,
                Place::Compressed(file_offset, most) => {
                    let skip = (at % self.header.cluster_bytes()) as usize;
                    let cluster = self.cluster(file_offset, most)?;
                    to.copy_from_slice(&cluster[skip..skip + to.len()]);
                }
            }
            done += run as usize;
        }
        Ok(())
    }

    /// From the cluster of `offset` on, as far as one page of its L2 table tells.
    fn extents(&mut self, offset: u64) -> Vec<Extent> {
        let header = self.header;
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = offset - offset % header.cluster_bytes();
        let page_coverage = header.cluster_bytes() * header.l2_entries().min(PAGE_ENTRIES);
        let end = (at - at % page_coverage).saturating_add(page_coverage).min(header.virtual_size);
        while at < end {
            // A run of untouched L2 tables may go on far beyond the page, a cluster never does.
            let Ok((place, len)) = self.run(at, header.virtual_size - at) else { break };
            let kind = match place {
                Place::Zero => ExtentKind::Zero,
                Place::Plain(file_offset) => ExtentKind::Raw { file_offset },
                Place::Compressed(..) => ExtentKind::Compressed,
            };
            let next = Extent { offset: at, len, kind };
            at += len;
            let whole = match kind {
                // The reactor reads these by itself, so the file must hold them.
                ExtentKind::Raw { file_offset } => {
                    let held = self.tables.source.bytes();
                    if file_offset.checked_add(len).is_some_and(|end| end <= held) {
                        // Clusters that were reserved and never written are holes.
                        self.holes.split(next, file_offset).all(|piece| push(&mut extents, piece))
                    } else {
                        true
                    }
                }
                _ => push(&mut extents, next),
            };
            if !whole {
                break;
            }
        }
        extents
    }

    fn take_traffic(&mut self) -> Vec<StoreRead> {
        self.tables.source.take_traffic()
    }
}

/// Adds an extent. False: there are as many as are said at a time.
fn push(extents: &mut Vec<Extent>, next: Extent) -> bool {
    let full = extents.len() == MOST_EXTENTS;
    match extents.last_mut() {
        Some(last) if last.joins(&next) => last.len += next.len,
        _ if full => return false,
        _ => extents.push(next),
    }
    true
}

impl Tables {
    /// The table entry at this offset of the file, a multiple of 8.
    fn entry(&mut self, at: u64) -> io::Result<u64> {
        if at.checked_add(8).is_none_or(|end| end > self.source.bytes()) {
            return Err(corrupt());
        }
        let source = &mut self.source;
        let page_at = at - at % PAGE_BYTES;
        let page = self.pages.get(page_at, |page| {
            let held = (source.bytes() - page_at).min(PAGE_BYTES) as usize;
            source.read_exact(&mut page[..held], page_at)
        })?;
        let at = (at % PAGE_BYTES) as usize;
        Ok(u64::from_be_bytes(page[at..at + 8].try_into().expect("entries do not cross pages")))
    }

    /// Where an L2 table lies; `None` where there is none, or past the end of the image.
    fn l2_table(&mut self, header: &Header, l1_index: u64) -> io::Result<Option<u64>> {
        if l1_index >= header.virtual_size.div_ceil(header.l2_coverage()) {
            return Ok(None);
        }
        let entry = self.entry(header.l1_offset + l1_index * 8)?;
        let offset = entry & OFFSET_MASK;
        if entry & !(OFFSET_MASK | COPIED) != 0 || !offset.is_multiple_of(header.cluster_bytes()) {
            return Err(corrupt());
        }
        Ok((offset != 0).then_some(offset))
    }

    /// What an L2 table says of one cluster.
    fn place(&mut self, header: &Header, l2_offset: u64, index: u64) -> io::Result<Place> {
        let entry = self.entry(l2_offset + index * 8)?;
        if entry & COMPRESSED != 0 {
            // The lower bits are a byte offset, the upper ones the number of further sectors.
            let offset_bits = 62 - (header.cluster_bits - 8);
            let offset = entry & ((1 << offset_bits) - 1);
            let sectors = ((entry & !(COPIED | COMPRESSED)) >> offset_bits) + 1;
            let place = Place::Compressed(offset, sectors * 512 - offset % 512);
            return if offset == 0 { Err(corrupt()) } else { Ok(place) };
        }
        let offset = entry & OFFSET_MASK;
        let known = OFFSET_MASK | COPIED | if header.version >= 3 { ZERO } else { 0 };
        if entry & !known != 0 || !offset.is_multiple_of(header.cluster_bytes()) {
            return Err(corrupt());
        }
        Ok(if entry & ZERO != 0 || offset == 0 { Place::Zero } else { Place::Plain(offset) })
    }
}

impl Inflate {
    /// Reads at most `most` compressed bytes and fills `out`, a whole cluster, from them. What follows the
    /// cluster's own stream is ignored: `most` is counted in sectors.
    fn cluster(
        &mut self,
        source: &mut Source,
        file_offset: u64,
        most: u64,
        out: &mut [u8],
    ) -> io::Result<()> {
        // At most two clusters: the width of the field.
        self.input.resize(most as usize, 0);
        let held = source.read(&mut self.input, file_offset)?;
        let input = &self.input[..held];
        let whole = match &mut self.zstd {
            Some(zstd) => inflate_zstd(zstd, input, out),
            None => {
                self.deflate.init();
                let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
                let (status, _, written) = decompress(&mut self.deflate, input, out, 0, flags);
                // With the output full, what is left of the stream does not matter.
                matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput) && written == out.len()
            }
        };
        if self.input.capacity() > LARGE_INPUT_BYTES {
            self.input = Vec::new();
        }
        if whole { Ok(()) } else { Err(corrupt()) }
    }
}

/// Decompresses frame after frame until the output is full.
fn inflate_zstd(zstd: &mut zstd_safe::DCtx<'_>, mut input: &[u8], out: &mut [u8]) -> bool {
    let mut done = 0;
    while done < out.len() && !input.is_empty() {
        let Ok(frame) = zstd_safe::find_frame_compressed_size(input) else { return false };
        if frame == 0 || frame > input.len() {
            return false;
        }
        let Ok(n) = zstd.decompress(&mut out[done..], &input[..frame]) else { return false };
        done += n;
        input = &input[frame..];
    }
    done == out.len()
}
