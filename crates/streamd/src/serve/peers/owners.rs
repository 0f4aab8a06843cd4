//! Which hosts own a chunk: they alone ask the store for it, and the others ask them. Owns the order of hosts for each chunk.
//!
//! Invariant: the order follows from the names and the digest alone, so that hosts with the same list agree without talking. A host
//! that goes takes only its own chunks with it (rendezvous hashing).

use spillway_image::digests::{ChunkDigest, of_chunk};
use std::cmp::Reverse;

/// Owners of a chunk.
pub const OWNERS: usize = 2;

/// The place of a host in the order for a chunk: the highest is the first owner.
pub fn score(name: &str, chunk: &ChunkDigest) -> u64 {
    let mixed = of_chunk(&[name.as_bytes(), chunk].concat());
    u64::from_be_bytes(std::array::from_fn(|n| mixed[n]))
}

/// The owners among these hosts, of which this is the score: the first one first.
pub fn owners<T>(hosts: impl Iterator<Item = T>, score: impl Fn(&T) -> u64) -> Vec<T> {
    let mut ordered: Vec<_> = hosts.map(|host| (Reverse(score(&host)), host)).collect();
    ordered.sort_by_key(|(score, _)| *score);
    ordered.into_iter().map(|(_, host)| host).take(OWNERS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_testkit::Rng;

    const CHUNKS: usize = 10_000;

    fn names() -> Vec<String> {
        (1..=8).map(|n| format!("https://host-{n}.example.org:9444")).collect()
    }

    fn chunks() -> Vec<ChunkDigest> {
        let mut random = Rng::new(11);
        (0..CHUNKS).map(|_| of_chunk(&random.next_u64().to_le_bytes())).collect()
    }

    fn of(hosts: &[String], chunk: &ChunkDigest) -> Vec<String> {
        owners(hosts.iter(), |name| score(name, chunk)).into_iter().cloned().collect()
    }

    #[test]
    fn chunks_are_spread_evenly() {
        let (names, chunks) = (names(), chunks());
        for rank in 0..OWNERS {
            for name in &names {
                let owned = chunks.iter().filter(|chunk| of(&names, chunk)[rank] == *name).count();
                let fair = CHUNKS / names.len();
                assert!(owned.abs_diff(fair) * 5 < fair, "{name} is owner {rank} of {owned} chunks");
            }
        }
    }

    #[test]
    fn a_host_that_goes_takes_only_its_own_chunks_with_it() {
        let (names, chunks) = (names(), chunks());
        for gone in &names {
            let left: Vec<_> = names.iter().filter(|name| *name != gone).cloned().collect();
            for chunk in &chunks {
                let (before, after) = (of(&names, chunk), of(&left, chunk));
                // Who stays is an owner as before, in the same order.
                let stays: Vec<_> = before.iter().filter(|name| *name != gone).collect();
                assert!(stays.iter().zip(&after).all(|(before, after)| *before == after));
                assert!(before.contains(gone) || before == after);
            }
        }
    }

    #[test]
    fn the_order_of_the_list_does_not_matter() {
        let names = names();
        let turned: Vec<_> = names.iter().rev().cloned().collect();
        for chunk in &chunks()[..100] {
            assert_eq!(of(&names, chunk), of(&turned, chunk));
        }
        assert_eq!(of(&names[..1], &[7; 32]), names[..1]);
        assert!(of(&[], &[7; 32]).is_empty());
    }
}
