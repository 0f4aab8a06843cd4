//! Base images: the read-only images that disks start from. Owns opening them (supervisor) and reading them
//! (worker); never writes one, never guesses a format, never follows a backing or data file.
//!
//! Invariant: nothing here blocks the reactor. [`RawImage::read_now`] answers at once or not at all, and
//! [`BaseReader`] does its waiting, decompressing and comparing in a thread of its own.

mod aligned;
pub mod asks;
mod checked;
pub mod digests;
mod error;
mod extents;
mod holes;
mod lock;
mod open;
mod qcow2;
mod raw;
mod reader;
mod residency;
mod source;
mod streamed;

pub use aligned::dio_align;
pub use error::{ImageError, ImageErrorKind};
pub use extents::{Extent, ExtentCache, ExtentKind};
pub use lock::keep_writers_out;
pub use lock::{is_locked_by_qemu, release as release_lock};
pub use open::{OpenedImage, open_image, qcow2_damage, size_fault};
pub use raw::RawImage;
pub use reader::{BaseReader, Finished, MAX_JOB_BYTES};
pub use residency::{Residency, ResidencyWriter};
pub use source::StoreRead;
pub use spillway_layout::MAX_DISK_BYTES;
pub use streamed::{Arrival, StreamedImage};

use spillway_layout::ImageFormat;
use std::os::fd::OwnedFd;

/// The base image of a disk, as its worker reads it.
pub enum BaseImage {
    /// Plain bytes: read at once, or by the reactor's own asynchronous reads on the file.
    Raw {
        /// The file.
        image: RawImage,
        /// A thread that only finds out where the file has holes, for those who ask for that.
        holes: Option<BaseReader>,
    },
    /// Read by a thread, which also says what lies plain in the file and may be read there from now on.
    Read(BaseReader),
    /// Read as plain bytes, as far as they are there; the rest is asked for.
    Streamed(StreamedImage),
}

impl BaseImage {
    /// An image that is whole, as the supervisor has opened and measured it; `direct` says that its file is open O_DIRECT. With
    /// `digests` a raw image is compared with them. `holes`: somebody will ask which parts of it are zero.
    pub fn open(
        file: OwnedFd,
        format: ImageFormat,
        size_bytes: u64,
        direct: bool,
        digests: Option<OwnedFd>,
        holes: bool,
    ) -> Result<BaseImage, ImageError> {
        match (format, digests) {
            (ImageFormat::Qcow2, _) => BaseReader::qcow2(file, size_bytes, direct).map(BaseImage::Read),
            (ImageFormat::Raw, Some(digests)) => {
                BaseReader::checked(file, size_bytes, direct, digests).map(BaseImage::Read)
            }
            (ImageFormat::Raw, None) => {
                let again = file
                    .try_clone()
                    .map_err(|e| ImageError::resources("cannot be opened a second time", &e))?;
                let asked = holes && size_bytes > 0;
                let holes = asked.then(|| BaseReader::holes(again, size_bytes, direct)).transpose()?;
                Ok(BaseImage::Raw { image: RawImage::new(file, size_bytes, direct), holes })
            }
        }
    }

    /// Size that a disk sees of it.
    pub fn size_bytes(&self) -> u64 {
        match self {
            BaseImage::Raw { image, .. } => image.size_bytes(),
            BaseImage::Read(reader) => reader.size_bytes(),
            BaseImage::Streamed(image) => image.file().size_bytes(),
        }
    }

    /// Its file.
    pub fn file(&self) -> &RawImage {
        match self {
            BaseImage::Raw { image, .. } => image,
            BaseImage::Read(reader) => reader.file(),
            BaseImage::Streamed(image) => image.file(),
        }
    }

    /// Its thread, if it has one.
    pub fn reader(&self) -> Option<&BaseReader> {
        match self {
            BaseImage::Raw { holes, .. } => holes.as_ref(),
            BaseImage::Read(reader) => Some(reader),
            BaseImage::Streamed(_) => None,
        }
    }

    /// The same, to ask it for something.
    pub fn reader_mut(&mut self) -> Option<&mut BaseReader> {
        match self {
            BaseImage::Raw { holes, .. } => holes.as_mut(),
            BaseImage::Read(reader) => Some(reader),
            BaseImage::Streamed(_) => None,
        }
    }
}
