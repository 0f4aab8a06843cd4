//! Where a request's parts lie in guest memory, by `viostor`'s structures: header and status byte side by side in the SRB
//! extension, the indirect table at 8 bytes past a multiple of 16, the ranges of a discard behind it.
//!
//! Owns the map of the guest's memory, and how a buffer is cut into segments; does no I/O. Invariant: no two requests share a byte.

/// Bytes of a page, the unit in which Windows' buffers are scattered.
pub(super) const PAGE: u64 = 4096;
/// `VIRTIO_MAX_SG`: 512 segments of data (`MAX_PHYS_SEGMENTS`), header, status, and one more.
pub(super) const MOST_PARTS: u64 = 515;
/// `MAX_DISCARD_SEGMENTS`.
pub(super) const MOST_RANGES: usize = 16;
/// Pages of a request's data: more than the longest transfer needs, and a power of two.
const DATA_PAGES: u64 = 128;
/// Bytes of the longest data.
pub(super) const DATA_BYTES: u64 = DATA_PAGES * PAGE;

/// Of `SRB_EXTENSION` on x64: `vbr` has a list entry of 16 bytes and a pointer before the header.
const HEADER_AT: u64 = 24;
const STATUS_AT: u64 = 40;
/// Behind `vbr` (48 bytes), `id`, `out`, `in`, `queue_number`, `fua` (72 in all), and `sg` of 16 bytes a part.
const TABLE_AT: u64 = 72 + MOST_PARTS * 16;
const RANGES_AT: u64 = TABLE_AT + MOST_PARTS * 16;
/// Bytes of an extension.
pub(super) const EXTENSION_BYTES: u64 = RANGES_AT + MOST_RANGES as u64 * 16;
/// From one extension to the next: each begins at a multiple of 16.
pub(super) const EXTENSION_STEP: u64 = EXTENSION_BYTES.next_multiple_of(16);

/// A part of guest memory, as a descriptor names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Segment {
    pub at: u64,
    pub bytes: u32,
}

/// How the pages of a buffer lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scatter {
    /// No two that follow each other are adjacent.
    Pages,
    /// Four and four are.
    Runs,
    /// All are, as in a large page.
    Whole,
}

/// The memory of one request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Its extension.
    pub extension: u64,
    /// Its pages.
    pub data: u64,
}

impl Place {
    pub(super) fn header(&self) -> Segment {
        Segment { at: self.extension + HEADER_AT, bytes: 16 }
    }

    pub(super) fn status(&self) -> Segment {
        Segment { at: self.extension + STATUS_AT, bytes: 1 }
    }

    pub(super) fn table(&self) -> u64 {
        self.extension + TABLE_AT
    }

    pub(super) fn ranges(&self, count: usize) -> Segment {
        Segment { at: self.extension + RANGES_AT, bytes: count as u32 * 16 }
    }

    /// A buffer of so many bytes, `lead` bytes into its first page.
    pub(super) fn segments(&self, scatter: Scatter, lead: u64, bytes: u64) -> Vec<Segment> {
        assert!(lead < PAGE && lead + bytes <= DATA_BYTES, "{bytes} bytes from {lead} on do not fit");
        let mut segments: Vec<Segment> = Vec::new();
        let mut at = lead;
        while at < lead + bytes {
            let page = at / PAGE;
            let page = match scatter {
                Scatter::Pages => (page * 51 + 17) % DATA_PAGES,
                Scatter::Runs => (page / 4 * 19 + 5) % (DATA_PAGES / 4) * 4 + page % 4,
                Scatter::Whole => page,
            };
            let here = self.data + page * PAGE + at % PAGE;
            let len = (PAGE - at % PAGE).min(lead + bytes - at);
            match segments.last_mut() {
                Some(last) if last.at + u64::from(last.bytes) == here => last.bytes += len as u32,
                _ => segments.push(Segment { at: here, bytes: len as u32 }),
            }
            at += len;
        }
        segments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extension_is_as_the_compiler_lays_it_out() {
        assert_eq!((TABLE_AT, RANGES_AT, EXTENSION_BYTES), (8312, 16552, 16808));
        let place = Place { extension: 0x10_0000, data: 0 };
        assert_eq!(place.table() % 16, 8);
        assert_eq!(place.status().at, place.header().at + 16);
    }

    #[test]
    fn a_buffer_is_cut_where_its_pages_are_not_adjacent() {
        let place = Place { extension: 0, data: 1 << 20 };
        let count = |scatter, lead, bytes| place.segments(scatter, lead, bytes).len();
        assert_eq!(count(Scatter::Pages, 0, 125 * PAGE), 125);
        assert_eq!(count(Scatter::Pages, 4, 125 * PAGE), 126);
        assert_eq!(count(Scatter::Whole, 4, 125 * PAGE), 1);
        assert_eq!(count(Scatter::Runs, 0, 16 * PAGE), 4);
        for scatter in [Scatter::Pages, Scatter::Runs, Scatter::Whole] {
            let mut segments = place.segments(scatter, 2052, 126 * PAGE);
            assert_eq!(segments.iter().map(|s| u64::from(s.bytes)).sum::<u64>(), 126 * PAGE);
            segments.sort_by_key(|s| s.at);
            assert!(segments.windows(2).all(|w| w[0].at + u64::from(w[0].bytes) <= w[1].at));
        }
    }
}
