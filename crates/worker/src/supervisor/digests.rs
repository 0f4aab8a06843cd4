//! The list of a base image's digests, for the worker to compare with. Owns the look at it before anything runs.
//!
//! Invariant: the list that a worker gets is the one that the image's digest names, and nobody can change it any more.

use super::memory;
use spillway_control::{Digests, ErrorKind, SupervisorError};
use spillway_image::OpenedImage;
use spillway_image::digests::{Root, list_bytes};
use spillway_layout::ImageFormat;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;

pub(super) fn load(digests: &Digests, image: &OpenedImage) -> Result<OwnedFd, SupervisorError> {
    let path = digests.list.display();
    let refuse = |why: String| SupervisorError::new(ErrorKind::Image, format!("digests {path}: {why}"));
    if image.format != ImageFormat::Raw {
        return Err(refuse("digests are of raw images: leave --digests out or use a raw image".into()));
    }
    let size_bytes = image.virtual_size_bytes;
    let len = list_bytes(size_bytes);
    let mut list = Vec::new();
    let read = File::open(&digests.list).and_then(|file| file.take(len + 1).read_to_end(&mut list));
    read.map_err(|e| {
        let advice = "let this user read them, or leave --digests out";
        SupervisorError::caused(ErrorKind::Image, format!("digests {path}: they cannot be read"), e, advice)
    })?;
    if list.len() as u64 != len {
        return Err(refuse(format!(
            "an image of {size_bytes} bytes has {len} bytes of them: is it another's?"
        )));
    }
    let mut root = Root::new(size_bytes);
    let (chunks, _) = list.as_chunks();
    chunks.iter().for_each(|digest| root.add(digest));
    let found = root.finish();
    if found != digests.root {
        return Err(refuse(format!("they are of the image {found}, not of {}", digests.root)));
    }
    memory::create_fixed("spillway-digests", &list)
}
