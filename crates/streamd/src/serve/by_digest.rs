//! Which chunks of an image have a digest. Owns the order of the chunks by their digests: 4 bytes a chunk.

use spillway_image::digests::ChunkDigest;
use spillway_registry::Index;

/// The order.
pub struct ByDigest(Vec<u32>);

impl ByDigest {
    /// Of the chunks of an index.
    pub fn of(index: &Index) -> ByDigest {
        let mut order: Vec<u32> = (0..index.digests.len() as u32).collect();
        order.sort_unstable_by_key(|chunk| (index.digests[*chunk as usize], *chunk));
        ByDigest(order)
    }

    /// The chunks of the same index with this digest.
    pub fn find(&self, index: &Index, digest: &ChunkDigest) -> &[u32] {
        let of = |chunk: &u32| &index.digests[*chunk as usize];
        let from = self.0.partition_point(|chunk| of(chunk) < digest);
        let len = self.0[from..].partition_point(|chunk| of(chunk) == digest);
        &self.0[from..from + len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_finds_all_chunks_of_a_digest() {
        let digests = [5, 1, 5, 9, 0, 5].map(|n| [n; 32]).to_vec();
        let index = Index { size_bytes: 6 << 20, chunk_bytes: 1 << 20, digests };
        let by_digest = ByDigest::of(&index);
        for (digest, chunks) in [(0, &[4][..]), (1, &[1]), (5, &[0, 2, 5]), (9, &[3]), (7, &[]), (255, &[])] {
            assert_eq!(by_digest.find(&index, &[digest; 32]), chunks, "{digest}");
        }
    }
}
