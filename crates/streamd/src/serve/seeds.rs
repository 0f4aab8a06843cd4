//! Chunks that are on this host already, in another image or at another place of the same one: they are copied, and neither other
//! hosts nor the registry are asked. Owns the search.
//!
//! Invariant: only bytes that were compared with the digest of the wanted chunk are returned. What they are read from may be
//! removed or overwritten meanwhile: the comparison decides.

use super::cache::ServedImage;
use super::peers::Wanted;
use std::sync::Arc;

/// Places that are read for a chunk before other hosts and the registry are asked: more of them would be wrong, too.
const MOST_TRIED: usize = 3;

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
    places(images, wanted).take(MOST_TRIED).find_map(|place| {
        // A place that cannot be read is none: the chunk is brought from elsewhere.
        let bytes = place.image.cached.read_verified(place.chunk as usize).ok()??;
        Some(Seed { place, bytes })
    })
}

/// Whether a chunk of an image is neither where it belongs nor in these images. Reads no file.
pub fn is_far(image: &ServedImage, images: &[Arc<ServedImage>], wanted: &Wanted) -> bool {
    !image.cached.may_have(wanted.chunk as usize) && places(images, wanted).next().is_none()
}

/// The places whose digest is the one of the chunk, and that may be in a file.
fn places(images: &[Arc<ServedImage>], wanted: &Wanted) -> impl Iterator<Item = Place> {
    images.iter().flat_map(move |image| {
        let found = image.find(&wanted.digest).iter().copied();
        let others = found.filter(move |chunk| !(image.is(&wanted.root) && *chunk == wanted.chunk));
        others.filter_map(move |chunk| {
            let number = chunk as usize;
            // A digest of another length belongs to other bytes.
            let is_candidate =
                image.cached.index().len_of(number) == wanted.len && image.cached.may_have(number);
            is_candidate.then(|| Place { image: Arc::clone(image), chunk })
        })
    })
}
