//! Storage models that a disk is put on: their files, opened with care. Owns no arithmetic (`storage_model`).
//!
//! Invariant: what is returned is a regular file that holds a model, whose time is that of this start of the host.

use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use spillway_control::storage_model::Model;
use spillway_control::{ErrorKind, SupervisorError, named, page_cache};
use std::os::fd::OwnedFd;
use std::path::Path;

const ADVICE: &str = "make one with 'spillway storage-model create'";

fn refuse(path: &Path, what: &str) -> SupervisorError {
    SupervisorError::new(ErrorKind::Options, format!("storage model {}: {what}: {ADVICE}", path.display()))
}

/// Opens a model's file.
pub(super) fn open(path: &Path) -> Result<OwnedFd, SupervisorError> {
    let cannot = |e: Errno| {
        let advice = "make one with 'spillway storage-model create' that this user may read and write";
        SupervisorError::on_path(ErrorKind::Options, "cannot open storage model", path, e, advice)
    };
    let check_kind = |mode| match FileType::from_raw_mode(mode) {
        FileType::RegularFile => Ok(()),
        _ => Err(refuse(path, "it is not a regular file")),
    };
    // A look before opening: opening alone can act on a device.
    check_kind(rustix::fs::stat(path).map_err(cannot)?.st_mode)?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let fd = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).map_err(cannot)?;
    check_kind(rustix::fs::fstat(&fd).map_err(cannot)?.st_mode)?;
    let model = Model::open(&fd).map_err(|e| {
        SupervisorError::caused(ErrorKind::Options, format!("storage model {}", path.display()), e, ADVICE)
    })?;
    model.begin_boot(page_cache::boot_id());
    Ok(fd)
}

/// The same for a base image's store: the image must have one.
pub(super) fn of_base(path: &Path, image: &Path, file: &OwnedFd) -> Result<OwnedFd, SupervisorError> {
    let shape = rustix::fs::fstatfs(file)
        .map_err(|e| SupervisorError::internal("cannot look at the base image's file system", e))?;
    match named::in_memory(&shape) {
        None => open(path),
        Some(name) => Err(SupervisorError::new(
            ErrorKind::Options,
            format!(
                "base image {}: it is on {name}, which is memory: no read of it reaches a store: put it on a disk, or \
                 leave --base-model out",
                image.display()
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_control::storage_model::Parameters;

    #[test]
    fn only_a_model_is_taken_for_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model");
        let refused = |word: &str| {
            let error = open(&path).unwrap_err();
            assert!(error.kind == ErrorKind::Options && error.to_string().contains(word), "{error}");
            assert!(error.to_string().contains("storage-model create"), "{error}");
        };
        refused("no such file");
        std::fs::write(&path, [0; 100]).unwrap();
        refused("it has 100 bytes");
        std::fs::write(&path, [1; 5000]).unwrap();
        refused("begins with other bytes");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        refused("not a regular file");
        std::fs::remove_dir(&path).unwrap();
        std::fs::write(&path, Model::file(Parameters { iops: 7, ..Parameters::default() })).unwrap();
        let fd = open(&path).unwrap();
        assert_eq!(Model::open(&fd).unwrap().parameters().iops, 7);
    }
}
