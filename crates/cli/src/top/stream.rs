//! The cache of streamed images in `spillway top`: how full it is, where chunks come from, who waits for them. Draws nothing.
//!
//! Invariant: a rate is of the time between two moments of the same process; without two there is none.

use super::rows::Moments;
use serde::Serialize;
use spillway_api::{CatalogFigures, Figure, Figures, StreamFigures};
use spillway_control::bytes;

/// The cache of the host, and the disks that read from it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StreamSummary {
    pub used_bytes: u64,
    pub limit_bytes: u64,
    /// Bytes that a registry need not send.
    pub saved_bytes: u64,
    /// Chunks that reads of disks wait for.
    pub chunks_missing: u64,
    /// Disks whose reads have waited for 10 seconds or more.
    pub disks_stalled: u64,
    /// `null` before there are two moments.
    pub chunk_rates: Option<ChunkRates>,
}

/// Chunks a second, by where they were.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ChunkRates {
    /// In the cache of this host.
    pub cache: f64,
    /// In another image on this host.
    pub seed: f64,
    /// On another host.
    pub peer: f64,
    /// In a registry.
    pub store: f64,
}

impl StreamSummary {
    /// What is so now; none if the host streams no images.
    pub fn of(moments: &Moments) -> Option<StreamSummary> {
        let now = moments.last()?;
        let StreamFigures { used_bytes, limit_bytes, .. } = now.stream?;
        let rates = moments.previous().and_then(|(seconds, before)| chunk_rates(before, now, seconds));
        Some(StreamSummary {
            used_bytes,
            limit_bytes,
            saved_bytes: now.stream_saved_bytes(),
            chunks_missing: sum(now, |catalog| catalog.levels.chunks_missing),
            disks_stalled: sum(now, |catalog| catalog.levels.stalled),
            chunk_rates: rates,
        })
    }

    /// Lines of at most 80 columns.
    pub fn lines(&self) -> [String; 2] {
        let rate = |of: fn(&ChunkRates) -> f64| {
            self.chunk_rates.as_ref().map_or("-".into(), |rates| format!("{:.0}", of(rates)))
        };
        [
            format!(
                "stream cache {} of {}  saved {}  missing {}  stalled {}",
                bytes(self.used_bytes),
                bytes(self.limit_bytes),
                bytes(self.saved_bytes),
                self.chunks_missing,
                self.disks_stalled,
            ),
            format!(
                "chunks/s  cache {}  seed {}  peer {}  store {}",
                rate(|r| r.cache),
                rate(|r| r.seed),
                rate(|r| r.peer),
                rate(|r| r.store),
            ),
        ]
    }
}

fn sum(figures: &Figures, of: fn(&CatalogFigures) -> u64) -> u64 {
    figures.catalogs.iter().map(of).sum()
}

/// Rates between two moments; none if the process that brings chunks is another one, or was not there.
fn chunk_rates(before: &Figures, now: &Figures, seconds: f64) -> Option<ChunkRates> {
    let (was, is) = (before.stream?.counters, now.stream?.counters);
    if is.is_behind(&was) {
        return None;
    }
    let found = |figures| sum(figures, |catalog| catalog.counters.chunks_found);
    // It is less after a catalog was deleted.
    let found = found(now).saturating_sub(found(before));
    let grown = is.since(&was);
    let by_second = |chunks: u64| chunks as f64 / seconds;
    Some(ChunkRates {
        cache: by_second(grown.cache_chunks + found),
        seed: by_second(grown.seed_chunks),
        peer: by_second(grown.peer_chunks),
        store: by_second(grown.store_chunks),
    })
}

#[cfg(test)]
pub mod tests {
    use super::super::rows::tests::moment;
    use super::*;
    use spillway_api::StreamCounters;

    const GIB: u64 = 1 << 30;

    /// A moment of a host whose disks have found so many chunks in the cache, and whose other chunks came in these numbers.
    pub fn streamed(second: u64, found: u64, [cache, seed, peer, store]: [u64; 4]) -> Figures {
        let mut figures = moment(second, &[("desk-1", 0, 0)]);
        let catalog = &mut figures.catalogs[0];
        (catalog.counters.chunks_found, catalog.counters.chunks_found_bytes) = (found, found << 20);
        (catalog.levels.chunks_missing, catalog.levels.stalled) = (8192, 100);
        let counters = StreamCounters {
            cache_chunks: cache,
            cache_bytes: cache << 20,
            seed_chunks: seed,
            seed_bytes: seed << 20,
            peer_chunks: peer,
            peer_bytes: peer << 20,
            store_chunks: store,
            store_bytes: store << 20,
            ..StreamCounters::default()
        };
        let (used_bytes, limit_bytes) = (999 * GIB, 1000 * GIB);
        figures.stream = Some(StreamFigures { used_bytes, limit_bytes, inflight: 3, counters });
        figures
    }

    fn summary(all: impl IntoIterator<Item = Figures>) -> Option<StreamSummary> {
        let mut moments = Moments::default();
        all.into_iter().for_each(|figures| moments.add(figures));
        StreamSummary::of(&moments)
    }

    #[test]
    fn chunks_are_counted_by_where_they_were() {
        assert_eq!(summary([]), None);
        assert_eq!(summary([moment(0, &[])]), None, "nothing is streamed");
        let first = streamed(0, 100, [1, 0, 5, 7]);
        let one = summary([first.clone()]).unwrap();
        assert_eq!((one.saved_bytes, one.chunk_rates), (106 << 20, None));
        assert_eq!(one.lines()[1], "chunks/s  cache -  seed -  peer -  store -");
        let two = summary([first.clone(), streamed(2, 300, [3, 20, 45, 27])]).unwrap();
        let rates = ChunkRates { cache: 101.0, seed: 10.0, peer: 20.0, store: 10.0 };
        assert_eq!((two.chunk_rates, two.saved_bytes), (Some(rates), 368 << 20));
        assert_eq!((two.chunks_missing, two.disks_stalled), (8192, 100));
        assert_eq!(
            two.lines(),
            [
                "stream cache 999.0 GiB of 1000.0 GiB  saved 368.0 MiB  missing 8192  stalled 100",
                "chunks/s  cache 101  seed 10  peer 20  store 10",
            ]
        );
        // Another process begins at 0, and one that was not there has no rates.
        assert_eq!(summary([first.clone(), streamed(2, 300, [0, 0, 0, 1])]).unwrap().chunk_rates, None);
        let came = summary([moment(0, &[]), streamed(1, 0, [9; 4])]).unwrap();
        assert_eq!(came.chunk_rates, None);
        // A catalog that was deleted takes its counts with it.
        let fewer = summary([first, streamed(1, 50, [1, 0, 5, 8])]).unwrap();
        assert_eq!(fewer.chunk_rates.map(|rates| (rates.cache, rates.store)), Some((0.0, 1.0)));
    }

    #[test]
    fn the_lines_fit_into_80_columns() {
        let large = streamed(1, 900 << 20, [999_999; 4]);
        let seen = summary([streamed(0, 0, [0; 4]), large]).unwrap();
        for line in seen.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}
