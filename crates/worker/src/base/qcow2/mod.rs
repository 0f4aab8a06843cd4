//! qcow2 images, read-only. Written for this one purpose instead of taking a library for the whole format:
//! `docs/design/020-qcow2-reader.md` says why.
//!
//! `header` checks what may be a base image; `source` reads the file and counts what reached the store; `recent`
//! is the bounded memory of metadata pages and decompressed clusters; `image` finds and reads clusters;
//! `reader` is the thread. Only the reader and the header's check are shown outside.

mod header;
mod image;
mod reader;
mod recent;
mod source;

pub(super) use header::{HEADER_BYTES, Header, MAGIC};
pub use reader::{Finished, MAX_JOB_BYTES, Qcow2Reader};
