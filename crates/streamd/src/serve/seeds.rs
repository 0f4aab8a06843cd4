//! Chunks that are on this host already, in another image or at another place of the same one: they are copied, and neither other
//! hosts nor the registry are asked. Owns the search.
//!
//! Invariant: only bytes that were compared with the digest of the wanted chunk are returned. What they are read from may be
//! removed or overwritten meanwhile: the comparison decides.

use super::cache::ServedImage;
use super::peers::Wanted;
use spillway_image::digests::ChunkDigest;
use std::sync::Arc;

/// Places that are read for a chunk before other hosts and the registry are asked: more of them would be wrong, too.
pub const MOST_TRIED: usize = 3;
/// Places of a chunk that are looked at in the thread that serves everybody: a hostile image may have millions.
pub const MOST_PLACES: usize = 4096;

/// Where a copy of a chunk may be.
pub struct Place {
    /// The image.
    pub image: Arc<ServedImage>,
    /// Number of the chunk in that image.
    pub chunk: u32,
}

/// A chunk that was found, and its bytes.
pub struct Seed {
    /// Where it was found.
    pub place: Place,
    /// Its content.
    pub bytes: Vec<u8>,
}

/// Where a chunk is on this host.
pub enum Found {
    /// In the file of its image, where it belongs.
    Here,
    /// At another place.
    Elsewhere(Seed),
    /// Nowhere that was tried.
    Nowhere,
}

/// Looks for a chunk of an image: first where it belongs, then in these images.
pub fn look(image: &ServedImage, images: &[Arc<ServedImage>], wanted: &Wanted) -> Found {
    // What cannot be read is not there.
    if matches!(image.cached.verify(wanted.chunk as usize), Ok(true)) {
        return Found::Here;
    }
    find(images, wanted).map_or(Found::Nowhere, Found::Elsewhere)
}

/// Reads a wanted chunk from these images. None: no place that was tried has it.
fn find(images: &[Arc<ServedImage>], wanted: &Wanted) -> Option<Seed> {
    candidates(images, wanted).take(MOST_TRIED).find_map(|place| {
        // A place that cannot be read is none: the chunk is brought from elsewhere.
        let bytes = place.image.cached.read_verified(place.chunk as usize).ok()??;
        Some(Seed { place, bytes })
    })
}

/// Whether a chunk of an image is neither where it belongs nor in these images. Reads no file, and takes microseconds: if there are very
/// many places to look at, it is not far.
pub fn is_far(image: &ServedImage, images: &[Arc<ServedImage>], wanted: &Wanted) -> bool {
    !image.cached.may_have(wanted.chunk as usize)
        && places(images, &wanted.digest).nth(MOST_PLACES).is_none()
        && candidates(images, wanted).next().is_none()
}

/// The chunks with a digest, wherever they are.
pub fn places<'a>(
    images: &'a [Arc<ServedImage>],
    digest: &'a ChunkDigest,
) -> impl Iterator<Item = (&'a Arc<ServedImage>, u32)> + Clone {
    images.iter().flat_map(move |image| image.find(digest).iter().map(move |chunk| (image, *chunk)))
}

/// The places of a chunk, other than its own, that may be in a file.
fn candidates<'a>(images: &'a [Arc<ServedImage>], wanted: &'a Wanted) -> impl Iterator<Item = Place> + 'a {
    let others = places(images, &wanted.digest)
        .filter(|(image, chunk)| !(image.is(&wanted.root) && *chunk == wanted.chunk));
    others.filter_map(|(image, chunk)| {
        let number = chunk as usize;
        // A digest of another length belongs to other bytes.
        let is_candidate = image.cached.index().len_of(number) == wanted.len && image.cached.may_have(number);
        is_candidate.then(|| Place { image: Arc::clone(image), chunk })
    })
}
