//! The parts of a disk that outlive a worker: its settings and its fds. Never serves a request.
//!
//! Invariant: a [`Disk`] is complete: any worker can be started from it alone.

use super::chunks::{self, OpenedStream};
use super::overflow::{self, Direct, OverflowFile};
use super::{Log, digests, ephemeral, memory, model, persistent};
use crate::channel::{Start, ToWorker};
use rustix::fs::fstat;
use spillway_control::persistent::PersistentFile;
use spillway_control::{DiskSettings, ErrorKind, ServeSettings, SupervisorError};
use spillway_core::{BLOCK_BYTES, DiskSpec, Layout, LogShape, Mode};
use spillway_image::{ImageError, ImageErrorKind, OpenedImage, open_image, release_lock};
use spillway_layout::{ImageFormat, persistent_file};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Returns a random number to identify a disk.
fn random() -> Result<u64, SupervisorError> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| SupervisorError::internal("cannot get a random number", e))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// A disk that is served.
#[derive(Debug)]
pub(super) struct Disk {
    pub spec: DiskSpec,
    pub format: ImageFormat,
    pub meta: OwnedFd,
    start: Start,
    image: OwnedFd,
    /// The digests of its chunks.
    digests: Option<OwnedFd>,
    /// The memory that says which chunks of a streamed image are there.
    residency: Option<OwnedFd>,
    pub data: Option<OwnedFd>,
    overflow: Option<OverflowFile>,
    base_model: Option<OwnedFd>,
    overflow_model: Option<OwnedFd>,
}

impl Disk {
    /// Opens and creates all files and memory of the disk.
    pub fn prepare(options: &ServeSettings, log: &mut Log) -> Result<Disk, SupervisorError> {
        let stream = match &options.streamed {
            Some(at) => Some(chunks::open(at, options.settings.base_cache())?),
            None => None,
        };
        let (streamed, residency, chunk_bytes) = match stream {
            Some(OpenedStream { image, residency, chunk_bytes, .. }) => {
                (Some(image), Some(residency), Some(chunk_bytes))
            }
            None => (None, None, None),
        };
        let (image, spec, overflow) = match options.mode() {
            Mode::Ephemeral => Disk::prepare_ephemeral(options)?,
            Mode::Persistent => Disk::prepare_persistent(options, streamed, log)?,
            _ => Disk::prepare_disposable(options, streamed, log)?,
        };
        let data = match spec.mode.has_ram() {
            true => Some(memory::create_data(spec.ram_limit_bytes)?),
            false => None,
        };
        let base_model = match &options.base_model {
            Some(path) => Some(model::of_base(path, options.image(), &image.file)?),
            None => None,
        };
        let overflow_model = options.overflow_model.as_deref().map(model::open).transpose()?;
        for (plane, path) in [("base image", &options.base_model), ("overflow", &options.overflow_model)] {
            if let Some(path) = path {
                log(&format!("the store of its {plane} is as slow as storage model {}", path.display()));
            }
        }
        let digests = options.digests.as_ref().map(|digests| digests::load(digests, &image)).transpose()?;
        let start = Start {
            predecessors: 0,
            disk_id: random()?,
            size_bytes: spec.size_bytes,
            base_bytes: spec.base_bytes,
            settings: options.settings.with_defaults(),
            format: image.format,
            digests: digests.is_some(),
            chunk_bytes,
            base_model: base_model.is_some(),
            overflow_model: overflow_model.is_some(),
            nbd: options.nbd.is_some(),
            export: format!("run-{}", std::process::id()),
            queues: options.queues(),
            serial: serial(options.identity()),
            writeback: true,
        };
        let meta = memory::create_meta(Layout::of(&spec).len_bytes())?;
        let (format, image) = (image.format, image.file);
        Ok(Disk {
            spec,
            format,
            meta,
            start,
            image,
            digests,
            residency,
            data,
            overflow,
            base_model,
            overflow_model,
        })
    }

    /// Prepares a disk whose overflow, if any, is a file without a name.
    fn prepare_disposable(
        options: &ServeSettings,
        streamed: Option<OpenedImage>,
        log: &mut Log,
    ) -> Result<Parts, SupervisorError> {
        let image = base_image(options, streamed)?;
        let spec = spec(options, image.virtual_size_bytes, None)?;
        if spec.mode.has_ram() {
            memory::check_ram_limit(spec.ram_limit_bytes, 0)?;
        }
        check_lengths(&spec, spec.file_bytes())?;
        let overflow = match spec.mode.has_file() {
            true => {
                let direct = match spec.mode {
                    Mode::Direct => Direct::Needed,
                    _ => Direct::Wanted,
                };
                let limit_bytes = spec.file_bytes() - BLOCK_BYTES as u64;
                Some(overflow::create(options.overflow_dir(), spec.file_bytes(), limit_bytes, direct, log)?)
            }
            false => None,
        };
        Ok((image, spec, overflow))
    }

    fn prepare_persistent(
        options: &ServeSettings,
        streamed: Option<OpenedImage>,
        log: &mut Log,
    ) -> Result<Parts, SupervisorError> {
        let path = own_file(options)?;
        let image = base_image(options, streamed)?;
        let identity =
            persistent::identity(&image.file, options.image_id.as_deref(), image.virtual_size_bytes)?;
        let file = PersistentFile::open(path)?;
        let spec = spec(options, image.virtual_size_bytes, file.size_bytes())?;
        file.check(path, spec.size_bytes, spec.base_bytes, &identity)?;
        check_lengths(&spec, persistent_file::DATA_AT + spec.file_bytes())?;
        let file = persistent::make_ready(file, path, &spec, &identity, log)?;
        Ok((image, spec, Some(file)))
    }

    /// Prepares a disk that is a full copy. Its file is passed in place of the image too, which is never read.
    fn prepare_ephemeral(options: &ServeSettings) -> Result<Parts, SupervisorError> {
        let path = own_file(options)?;
        let (file, copied_bytes) = ephemeral::open(path)?;
        let spec = spec(options, 0, Some(copied_bytes))?;
        check_lengths(&spec, spec.file_bytes())?;
        let file = ephemeral::make_ready(file, path, &spec, copied_bytes)?;
        let again =
            file.fd.try_clone().map_err(|e| SupervisorError::internal("cannot duplicate an fd", e))?;
        let image = OpenedImage { file: again, format: ImageFormat::Raw, virtual_size_bytes: 0 };
        Ok((image, spec, Some(file)))
    }

    /// In mode `ephemeral`, removes the name of the file once the disk is served.
    pub fn take_name(&self, options: &ServeSettings) -> Result<(), SupervisorError> {
        match (&self.overflow, self.spec.mode) {
            (Some(file), Mode::Ephemeral) => ephemeral::take_name(own_file(options)?, file),
            _ => Ok(()),
        }
    }

    /// The first message for a worker, with its fds in the order that [`Start`] names.
    pub fn start_message(
        &self,
        lifeline: BorrowedFd<'_>,
        predecessors: &[BorrowedFd<'_>],
    ) -> Result<(ToWorker, Vec<OwnedFd>), SupervisorError> {
        let overflow = self.overflow.as_ref().map(|overflow| &overflow.fd);
        let (base_model, overflow_model) = (self.base_model.as_ref(), self.overflow_model.as_ref());
        let base = [Some(&self.image), self.digests.as_ref(), self.residency.as_ref()];
        let files = [Some(&self.meta)].into_iter().chain(base).chain([self.data.as_ref(), overflow]);
        let held = files.chain([base_model, overflow_model]);
        let held = held.flatten().map(AsFd::as_fd);
        let all = held.chain([lifeline]).chain(predecessors.iter().copied());
        let fds: Result<Vec<_>, _> = all.map(|fd| fd.try_clone_to_owned()).collect();
        let fds = fds.map_err(|e| SupervisorError::internal("cannot pass the disk to the worker", e))?;
        let start = Start { predecessors: predecessors.len() as u8, ..self.start.clone() };
        Ok((ToWorker::Start(start), fds))
    }

    /// Whether an image that was opened again is in the same file as the disk's.
    pub fn is_same_image(&self, image: &OpenedImage, chunk_bytes: u64) -> bool {
        let file = |fd| fstat(fd).map(|found| (found.st_dev, found.st_ino)).ok();
        let same_file = file(&self.image).is_some_and(|own| file(&image.file) == Some(own));
        same_file && self.start.chunk_bytes == Some(chunk_bytes)
    }

    /// Sets the memory that says which chunks are there, for later workers.
    pub fn set_residency(&mut self, residency: OwnedFd) {
        self.residency = Some(residency);
    }

    /// Sets the file of a streamed image, for later workers.
    pub fn set_image(&mut self, file: OwnedFd) {
        self.image = file;
    }

    /// The settings in effect.
    pub fn settings(&self) -> DiskSettings {
        self.start.settings
    }

    /// Checks that the host has the memory and file space for these settings; `held_bytes` of the RAM tier are allocated
    /// already. Extends the overflow file if needed, but leaves the settings in effect as they are.
    pub fn make_room_for(&mut self, settings: &DiskSettings, held_bytes: u64) -> Result<(), SupervisorError> {
        let spec = self.spec_with(settings);
        spec.check().map_err(|e| SupervisorError::new(ErrorKind::Options, e))?;
        if settings.ram_bytes() > self.spec.ram_limit_bytes {
            memory::check_ram_limit(settings.ram_bytes(), held_bytes)?;
        }
        if settings.overflow_bytes() > self.spec.overflow_limit_bytes
            && let Some(file) = &self.overflow
        {
            memory::check_file_size_limit(spec.file_bytes())?;
            file.lengthen(spec.file_bytes())?;
        }
        Ok(())
    }

    fn spec_with(&self, settings: &DiskSettings) -> DiskSpec {
        DiskSpec {
            ram_limit_bytes: settings.ram_bytes(),
            overflow_limit_bytes: settings.overflow_bytes(),
            full: settings.full(),
            ..self.spec
        }
    }

    /// Sets the settings in effect, also for later workers.
    pub fn set(&mut self, settings: DiskSettings) {
        self.spec = self.spec_with(&settings);
        self.start.settings = settings;
    }

    /// Stores the guest's choice of the write-back mode for later workers.
    pub fn remember_writeback(&mut self, writeback: bool) {
        self.start.writeback = writeback;
    }

    /// Request queues offered to a VMM.
    pub fn queues(&self) -> u16 {
        self.start.queues
    }

    /// Whether the overflow file is written past the page cache.
    pub fn overflow_direct(&self) -> bool {
        self.overflow.as_ref().is_some_and(|file| file.direct)
    }

    /// Bytes that the private copy of mode `ephemeral` occupies in its file system: its file may have holes.
    pub fn occupied_bytes(&self) -> Option<u64> {
        let file = self.overflow.as_ref().filter(|_| self.spec.mode == Mode::Ephemeral)?;
        let found = fstat(&file.fd).ok()?;
        u64::try_from(found.st_blocks).ok().map(|blocks| blocks * 512)
    }

    /// Releases the locks of the image. The io_uring of a killed worker may keep its fd open after the process has ended.
    pub fn release_image(&self) {
        release_lock(&self.image);
    }

    /// The serial number that the guest sees.
    pub fn serial(&self) -> &str {
        &self.start.serial
    }
}

/// What each mode prepares: the image, the description of the disk, and its file.
type Parts = (OpenedImage, DiskSpec, Option<OverflowFile>);

/// The image: the one that was opened where it is streamed, else the file.
fn base_image(
    options: &ServeSettings,
    streamed: Option<OpenedImage>,
) -> Result<OpenedImage, SupervisorError> {
    match streamed {
        Some(image) => Ok(image),
        None => {
            open_image(options.image(), options.format, options.settings.base_cache()).map_err(image_error)
        }
    }
}

fn own_file(options: &ServeSettings) -> Result<&Path, SupervisorError> {
    options.disk.as_deref().ok_or_else(|| {
        SupervisorError::new(
            ErrorKind::Options,
            format!("mode {} needs a file: name it with --disk", options.mode()),
        )
    })
}

fn check_lengths(spec: &DiskSpec, file_bytes: u64) -> Result<(), SupervisorError> {
    let meta_bytes = Layout::of(spec).len_bytes();
    memory::check_file_size_limit(meta_bytes.max(file_bytes).max(spec.ram_limit_bytes))
}

/// `own_bytes` is the size that the disk's own file has.
fn spec(
    options: &ServeSettings,
    image_bytes: u64,
    own_bytes: Option<u64>,
) -> Result<DiskSpec, SupervisorError> {
    let spec = DiskSpec {
        size_bytes: options.size_bytes.or(own_bytes).unwrap_or(image_bytes),
        base_bytes: image_bytes,
        mode: options.mode(),
        full: options.settings.full(),
        ram_limit_bytes: options.settings.ram_bytes(),
        overflow_limit_bytes: options.settings.overflow_bytes(),
        shape: LogShape::default(),
    };
    spec.check().map_err(|e| SupervisorError::new(ErrorKind::Options, e))?;
    Ok(spec)
}

fn image_error(error: ImageError) -> SupervisorError {
    let kind = match error.kind() {
        ImageErrorKind::Permission => ErrorKind::Permission,
        _ => ErrorKind::Image,
    };
    SupervisorError::of(kind, error)
}

/// Derives the serial number from the disk's path: it is the same at every start, so that /dev/disk/by-id does not change.
fn serial(identity: &Path) -> String {
    // A relative path names another disk in another folder.
    let path = std::path::absolute(identity).unwrap_or_else(|_| identity.to_owned());
    let mut hash = 0xcbf2_9ce4_8422_2325_u64; // FNV-1a
    for byte in path.as_os_str().as_encoded_bytes() {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("spillway-{:08x}", (hash >> 32) as u32 ^ hash as u32)
}
