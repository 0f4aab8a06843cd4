//! The list of a base image's digests, for the worker to compare with. Owns the look at it before anything runs.
//!
//! Invariant: the list that a worker gets is the one that the image's digest names, and nobody can change it any more.

use super::error::{ErrorKind, SupervisorError};
use super::memory;
use crate::base::OpenedImage;
use crate::base::digests::{Root, list_bytes};
use crate::channel::ImageFormat;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// What an image is compared with as it is read.
#[derive(Clone, Debug)]
pub struct Digests {
    /// The file of its chunks' digests, 32 bytes each.
    pub list: PathBuf,
    /// The image's digest: `sha256:` and 64 hexadecimal digits.
    pub root: String,
}

impl Digests {
    pub(super) fn load(&self, image: &OpenedImage) -> Result<OwnedFd, SupervisorError> {
        let path = self.list.display();
        let refuse = |why: String| SupervisorError::new(ErrorKind::Image, format!("digests {path}: {why}"));
        if image.format != ImageFormat::Raw {
            return Err(refuse("digests are of raw images: leave --digests out or use a raw image".into()));
        }
        let size_bytes = image.virtual_size_bytes;
        let len = list_bytes(size_bytes);
        let mut list = Vec::new();
        let read = File::open(&self.list).and_then(|file| file.take(len + 1).read_to_end(&mut list));
        read.map_err(|e| refuse(format!("they cannot be read: {e}")))?;
        if list.len() as u64 != len {
            return Err(refuse(format!(
                "an image of {size_bytes} bytes has {len} bytes of them: is it another's?"
            )));
        }
        let mut root = Root::new(size_bytes);
        let (digests, _) = list.as_chunks();
        digests.iter().for_each(|digest| root.add(digest));
        let found = root.finish();
        if found != self.root {
            return Err(refuse(format!("they are of the image {found}, not of {}", self.root)));
        }
        memory::create_fixed("spillway-digests", &list)
    }
}
