//! Opening a base image, in the supervisor. Owns the checks that a person hears about before anything runs; reads
//! no more of the image than its first bytes, and never writes.
//!
//! Invariant: the format is what was said, by argument or by the extensions `.raw` and `.qcow2`. Content never
//! decides it; content can only contradict it.

use super::aligned::{AlignedBuf, dio_align};
use super::error::{ImageError, ImageErrorKind};
use super::lock;
use super::qcow2::{HEADER_BYTES, Header, MAGIC};
use rustix::fs::{FileType, Mode, OFlags, fcntl_setfl, fstat, open};
use rustix::io::{Errno, pread};
use spillway_layout::{BaseCache, ImageFormat};
use spillway_layout::{MAX_DISK_BYTES, bytes_in_words};
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// A base image, opened and checked.
#[derive(Debug)]
pub struct OpenedImage {
    /// Open for reading only; O_DIRECT with [`BaseCache::None`].
    pub file: OwnedFd,
    /// Format of the image.
    pub format: ImageFormat,
    /// Size that a disk sees of it: a positive multiple of 512.
    pub virtual_size_bytes: u64,
}

/// Opens a base image read-only and checks what can be checked at once. While the file is open, QEMU's programs
/// refuse to open the image for writing. With [`BaseCache::None`] the file is
/// open O_DIRECT, whatever its format.
///
/// # Errors
/// See [`ImageErrorKind`]; each says what to do.
pub fn open_image(
    path: &Path,
    format: Option<ImageFormat>,
    cache: BaseCache,
) -> Result<OpenedImage, ImageError> {
    open_and_check(path, format, cache).map_err(|error| error.of(path))
}

fn open_and_check(
    path: &Path,
    format: Option<ImageFormat>,
    cache: BaseCache,
) -> Result<OpenedImage, ImageError> {
    let said = format;
    let format = match said {
        Some(format) => format,
        None => format_by_extension(path)?,
    };
    let direct = cache == BaseCache::None;
    let (mut file, is_device) = open_file(path, direct)?;
    let file_bytes = file.seek(SeekFrom::End(0)).map_err(|e| ImageError::io("cannot be measured", &e))?;
    if file_bytes == 0 {
        return Err(ImageError::new(
            ImageErrorKind::Size,
            "is empty",
            "check that it was downloaded or built completely",
        ));
    }
    if !is_device {
        lock::keep_writers_out(&file, path)?;
    }
    let start = read_start(&file, direct)?;

    let virtual_size_bytes = match format {
        ImageFormat::Qcow2 => Header::parse(&start, file_bytes)?.virtual_size,
        ImageFormat::Raw => {
            if said.is_none() && start.starts_with(&MAGIC) {
                return Err(ImageError::new(
                    ImageErrorKind::Format,
                    "is named raw but begins like a qcow2 image",
                    "say which it is with --format qcow2 or --format raw",
                ));
            }
            if !is_device && !file_bytes.is_multiple_of(512) {
                let up = file_bytes.next_multiple_of(512);
                return Err(ImageError::new(
                    ImageErrorKind::Size,
                    format!("has {file_bytes} bytes, not a multiple of 512"),
                    format!(
                        "check that it is complete, then extend it with `truncate -s {up}` or \
                         `qemu-img resize -f raw`"
                    ),
                ));
            }
            file_bytes
        }
    };
    if let Some(fault) = size_fault(virtual_size_bytes) {
        let advice = "make a smaller image";
        return Err(ImageError::new(ImageErrorKind::Size, fault, advice));
    }
    Ok(OpenedImage { file: file.into(), format, virtual_size_bytes })
}

/// Why no disk can be of so many bytes, as a predicate of the image; none if one can.
pub fn size_fault(size_bytes: u64) -> Option<String> {
    let (has, most) = (bytes_in_words(size_bytes), bytes_in_words(MAX_DISK_BYTES));
    let has = if has == most { format!("{size_bytes} bytes") } else { has };
    (size_bytes > MAX_DISK_BYTES).then(|| format!("has {has}, and the largest disk {most}"))
}

/// Returns what makes a qcow2 header invalid: a contradiction, or a flag that the image was not closed or must be
/// repaired. An unsupported feature is not such a fault.
pub fn qcow2_damage(file: &File, path: &Path) -> Option<ImageError> {
    let file_bytes = file.metadata().ok()?.len();
    let start = read_start(file, false).ok()?;
    match Header::parse(&start, file_bytes) {
        Err(error) if error.kind() == ImageErrorKind::Damaged => Some(error.of(path)),
        _ => None,
    }
}

fn format_by_extension(path: &Path) -> Result<ImageFormat, ImageError> {
    match path.extension().and_then(|e| e.to_str()) {
        Some("raw") => Ok(ImageFormat::Raw),
        Some("qcow2") => Ok(ImageFormat::Qcow2),
        _ => Err(ImageError::new(
            ImageErrorKind::Format,
            "has neither the extension .raw nor .qcow2, and its format is never guessed",
            "say it with --format raw or --format qcow2",
        )),
    }
}

/// Opens a regular file or block device. The second value says that it is a device.
fn open_file(path: &Path, direct: bool) -> Result<(File, bool), ImageError> {
    // A look before opening: opening alone can act on a device or wait for the other end of a pipe. The look
    // after it is the one that counts.
    let kind = rustix::fs::stat(path).map_err(|e| open_error(e, false))?.st_mode;
    check_kind(kind)?;
    let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    if direct {
        flags |= OFlags::DIRECT;
    }
    let fd = open(path, flags, Mode::empty()).map_err(|e| open_error(e, direct))?;
    let kind = fstat(&fd).map_err(|e| open_error(e, false))?.st_mode;
    check_kind(kind)?;
    // Without NONBLOCK from here on: io_uring would return EAGAIN instead of reading.
    let flags = if direct { OFlags::DIRECT } else { OFlags::empty() };
    fcntl_setfl(&fd, flags).map_err(|e| open_error(e, direct))?;
    Ok((File::from(fd), FileType::from_raw_mode(kind) == FileType::BlockDevice))
}

fn check_kind(mode: u32) -> Result<(), ImageError> {
    let what = match FileType::from_raw_mode(mode) {
        FileType::RegularFile | FileType::BlockDevice => return Ok(()),
        FileType::Directory => "is a folder",
        FileType::Fifo => "is a pipe",
        FileType::Socket => "is a socket",
        FileType::CharacterDevice => "is a character device",
        _ => "is neither a file nor a block device",
    };
    let advice = "name the image itself, a regular file or a block device";
    Err(ImageError::new(ImageErrorKind::NotAFile, what, advice))
}

fn open_error(error: Errno, direct: bool) -> ImageError {
    match error {
        Errno::NOENT | Errno::NOTDIR => {
            ImageError::new(ImageErrorKind::Missing, "does not exist", "check the path given with --image")
        }
        Errno::ACCESS | Errno::PERM => ImageError::new(
            ImageErrorKind::Permission,
            "may not be read by this user",
            "give read permission on the file, and search permission on the folders above it",
        ),
        Errno::INVAL | Errno::OPNOTSUPP if direct => direct_error(),
        error => ImageError::io("cannot be opened", &error.into()),
    }
}

fn direct_error() -> ImageError {
    ImageError::new(
        ImageErrorKind::Direct,
        "cannot be read past the page cache, as --base-cache none asks: its file system refuses O_DIRECT",
        "use --base-cache host, or put the image on a file system that has O_DIRECT (ext4, xfs)",
    )
}

/// The first [`HEADER_BYTES`], or fewer if there are fewer. With O_DIRECT it is also the proof that reads work.
fn read_start(file: &File, direct: bool) -> Result<Vec<u8>, ImageError> {
    let align = if direct { dio_align(file.as_fd()) as usize } else { 1 };
    let len = HEADER_BYTES.next_multiple_of(align);
    let mut buf = AlignedBuf::new(len, align);
    let start = buf.as_mut_slice();
    let mut done = 0;
    while done < HEADER_BYTES {
        match pread(file, &mut start[done..], done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            // Past the page cache a read that starts at the file's end, unaligned, is refused: it ended before.
            Err(Errno::INVAL) if direct && done > 0 => break,
            Err(Errno::INVAL) if direct => return Err(direct_error()),
            Err(error) => return Err(ImageError::io("cannot be read", &error.into())),
        }
    }
    Ok(start[..done.min(HEADER_BYTES)].to_vec())
}
