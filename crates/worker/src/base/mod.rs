//! Base images: the read-only images that disks start from. Owns opening them (supervisor) and reading them
//! (worker); never writes one, never guesses a format, never follows a backing or data file.
//!
//! Invariant: nothing here blocks the reactor. [`RawImage::read_now`] answers at once or not at all, and
//! [`BaseReader`] does its waiting, decompressing and comparing in a thread of its own.

mod aligned;
mod checked;
pub mod digests;
mod error;
mod extents;
mod lock;
mod open;
mod qcow2;
mod raw;
mod reader;
mod source;

pub use aligned::dio_align;
pub use error::{ImageError, ImageErrorKind};
pub use extents::{Extent, ExtentCache, ExtentKind};
pub(crate) use lock::is_locked_by_qemu;
pub use lock::keep_writers_out;
pub use open::{OpenedImage, open_image, qcow2_damage, size_fault};
pub use raw::RawImage;
pub use reader::{BaseReader, Finished, MAX_JOB_BYTES};
pub use source::StoreRead;
pub use spillway_core::MAX_DISK_BYTES;

/// The base image of a disk, as its worker reads it.
pub enum BaseImage {
    /// Plain bytes: read at once, or by the reactor's own asynchronous reads on the file.
    Raw(RawImage),
    /// Read by a thread, which also says what lies plain in the file and may be read there from now on.
    Read(BaseReader),
}

impl BaseImage {
    /// Size that a disk sees of it.
    pub fn size_bytes(&self) -> u64 {
        match self {
            BaseImage::Raw(image) => image.size_bytes(),
            BaseImage::Read(reader) => reader.size_bytes(),
        }
    }
}
