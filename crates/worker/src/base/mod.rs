//! Base images: the read-only images that disks start from. Owns opening them (supervisor) and reading them
//! (worker); never writes one, never guesses a format, never follows a backing or data file.
//!
//! Invariant: nothing here blocks the reactor. [`RawImage::read_now`] answers at once or not at all, and
//! [`Qcow2Reader`] does its waiting and decompressing in a thread of its own.

mod aligned;
mod error;
mod extents;
mod lock;
mod open;
mod qcow2;
mod raw;

pub use aligned::dio_align;
pub use error::{ImageError, ImageErrorKind};
pub use extents::{Extent, ExtentCache, ExtentKind};
pub(crate) use lock::is_locked_by_qemu;
pub use open::{OpenedImage, open_image};
pub use qcow2::{Finished, MAX_JOB_BYTES, Qcow2Reader};
pub use raw::RawImage;

/// The base image of a disk, as its worker reads it.
pub enum BaseImage {
    /// Plain bytes: read at once, or by the reactor's own asynchronous reads on the file.
    Raw(RawImage),
    /// Read by a thread, which also says where plain clusters lie in the file.
    Qcow2(Qcow2Reader),
}

impl BaseImage {
    /// Size that a disk sees of it.
    pub fn size_bytes(&self) -> u64 {
        match self {
            BaseImage::Raw(image) => image.size_bytes(),
            BaseImage::Qcow2(reader) => reader.size_bytes(),
        }
    }
}
