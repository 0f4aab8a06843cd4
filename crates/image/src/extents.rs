//! Cache of extents: where the bytes of an image lie in its file, as far as its reader has reported. Owns a bounded
//! number of extents; never reads the image.
//!
//! Invariant: extents in the cache do not overlap, and there are never more than [`ExtentCache::MAX_EXTENTS`].
//! The image is immutable, so none of them goes stale.

use std::collections::BTreeMap;

/// Most extents that are said at a time.
pub(super) const MOST_EXTENTS: usize = 64;

/// Kind of an extent's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Plain bytes in the file, from this offset on. The file holds all of them.
    Raw {
        /// Byte offset in the image file.
        file_offset: u64,
    },
    /// Reads as zeroes.
    Zero,
    /// Compressed: only the reader can read it.
    Compressed,
}

/// A stretch of the image that is of one kind and lies in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte, as the disk sees it.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Kind of the content.
    pub kind: ExtentKind,
}

impl Extent {
    /// The byte after the last.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// The part of the extent from `offset` on, which lies inside.
    fn from(&self, offset: u64) -> Extent {
        let skip = offset - self.offset;
        let kind = match self.kind {
            ExtentKind::Raw { file_offset } => {
                ExtentKind::Raw { file_offset: file_offset.saturating_add(skip) }
            }
            same => same,
        };
        Extent { offset, len: self.len - skip, kind }
    }

    /// Whether `next` goes on where this one ends, on the disk and in the file.
    pub(super) fn joins(&self, next: &Extent) -> bool {
        self.end() == next.offset
            && match (self.kind, next.kind) {
                (ExtentKind::Raw { file_offset: a }, ExtentKind::Raw { file_offset: b }) => {
                    a.checked_add(self.len) == Some(b)
                }
                (a, b) => a == b,
            }
    }
}

/// A bounded map of extents. When it is full it starts anew: the reader says them again.
#[derive(Default)]
pub struct ExtentCache {
    by_offset: BTreeMap<u64, Extent>,
}

impl ExtentCache {
    /// Most extents that are kept, about 1 MiB of them.
    pub const MAX_EXTENTS: usize = 16 * 1024;

    /// An empty cache.
    pub fn new() -> ExtentCache {
        ExtentCache::default()
    }

    /// Number of extents kept.
    pub fn len(&self) -> usize {
        self.by_offset.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_offset.is_empty()
    }

    /// Returns the part of a cached extent from `offset` on.
    #[inline]
    pub fn lookup(&self, offset: u64) -> Option<Extent> {
        let (_, found) = self.by_offset.range(..=offset).next_back()?;
        (offset < found.end()).then(|| found.from(offset))
    }

    /// Keeps an extent that the reader has said.
    pub fn insert(&mut self, extent: Extent) {
        if extent.len == 0 {
            return;
        }
        let mut new = extent;
        if let Some((_, before)) = self.by_offset.range(..=new.offset).next_back() {
            let before = *before;
            if before.end() >= new.end() {
                return;
            }
            if before.end() > new.offset {
                new = new.from(before.end());
            }
            if before.joins(&new) {
                new = Extent { offset: before.offset, len: new.end() - before.offset, kind: before.kind };
            }
        }
        while let Some((&offset, after)) = self.by_offset.range(new.offset..).next() {
            let after = *after;
            if after.offset > new.end() || (after.offset == new.end() && !new.joins(&after)) {
                break;
            }
            if after.offset < new.end() && after.end() > new.end() {
                new.len = after.offset - new.offset;
                if !new.joins(&after) {
                    break;
                }
            }
            self.by_offset.remove(&offset);
            new.len = new.end().max(after.end()) - new.offset;
        }
        if self.by_offset.len() >= Self::MAX_EXTENTS {
            self.by_offset.clear();
        }
        if new.len > 0 {
            self.by_offset.insert(new.offset, new);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(offset: u64, len: u64, file_offset: u64) -> Extent {
        Extent { offset, len, kind: ExtentKind::Raw { file_offset } }
    }

    #[test]
    fn a_lookup_begins_where_it_is_asked() {
        let mut cache = ExtentCache::new();
        cache.insert(raw(4096, 8192, 1 << 20));
        assert_eq!(cache.lookup(4095), None);
        assert_eq!(cache.lookup(5000), Some(raw(5000, 8192 - 904, (1 << 20) + 904)));
        assert_eq!(cache.lookup(12288), None);
    }

    #[test]
    fn neighbours_join_only_in_line() {
        let mut cache = ExtentCache::new();
        cache.insert(raw(0, 100, 1000));
        cache.insert(raw(100, 100, 1100));
        assert_eq!(cache.len(), 1);
        cache.insert(raw(200, 100, 5000));
        assert_eq!(cache.len(), 2);
        cache.insert(Extent { offset: 300, len: 50, kind: ExtentKind::Zero });
        cache.insert(Extent { offset: 350, len: 50, kind: ExtentKind::Compressed });
        assert_eq!(cache.len(), 4);
        assert_eq!(cache.lookup(150), Some(raw(150, 50, 1150)));
    }

    #[test]
    fn full_means_anew_and_never_more() {
        let mut cache = ExtentCache::new();
        for i in 0..3 * ExtentCache::MAX_EXTENTS as u64 {
            cache.insert(raw(i * 512, 512, (i * 7919) << 12));
            assert!(cache.len() <= ExtentCache::MAX_EXTENTS);
            assert_eq!(cache.lookup(i * 512), Some(raw(i * 512, 512, (i * 7919) << 12)));
        }
    }

    /// Pieces of one fixed image, inserted in any order and overlap, always look up as that image has it.
    #[test]
    fn random_pieces_agree_with_the_image() {
        const UNITS: u64 = 400;
        let mut random = 0x1234_5678_9abc_def1u64;
        let mut next = move || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        for _ in 0..12 {
            // The image: runs of kinds, some of them in line with the run before.
            let mut image: Vec<ExtentKind> = Vec::new();
            while (image.len() as u64) < UNITS {
                let base = (next() % 1000) << 30;
                let run = next() % 20 + 1;
                let kind = next() % 3;
                for i in 0..run {
                    image.push(match kind {
                        0 => ExtentKind::Zero,
                        1 => ExtentKind::Compressed,
                        _ => ExtentKind::Raw { file_offset: base + i * 512 },
                    });
                }
            }
            image.truncate(UNITS as usize);
            let unit = |i: u64| Extent { offset: i * 512, len: 512, kind: image[i as usize] };
            let mut cache = ExtentCache::new();
            for _ in 0..600 {
                let first = next() % UNITS;
                let mut piece = unit(first);
                let most = next() % 30 + 1;
                for i in first + 1..(first + most).min(UNITS) {
                    if !piece.joins(&unit(i)) {
                        break;
                    }
                    piece.len += 512;
                }
                cache.insert(piece);
                assert_eq!(cache.lookup(first * 512).map(|e| e.kind), Some(piece.kind));
                let mut end = 0;
                for extent in cache.by_offset.values() {
                    assert!(extent.offset >= end && extent.len > 0);
                    end = extent.end();
                }
                for i in 0..UNITS {
                    if let Some(found) = cache.lookup(i * 512) {
                        assert_eq!(found.kind, image[i as usize]);
                        for at in (0..found.len).step_by(512) {
                            assert!(unit(i + at / 512).kind == found.from(found.offset + at).kind);
                        }
                    }
                }
            }
        }
    }
}
