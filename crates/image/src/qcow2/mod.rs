//! qcow2 images, read-only. Written for this one purpose instead of taking a library for the whole format:
//! `docs/design/020-qcow2-reader.md` says why.
//!
//! `header` checks what may be a base image; `recent` is the bounded memory of metadata pages and decompressed clusters; `image` finds and reads clusters, in the thread of
//! a [`super::BaseReader`].

mod header;
mod image;
mod recent;

pub(super) use header::{HEADER_BYTES, Header, MAGIC};
pub(super) use image::Image;
