//! Descriptors that a machine's QEMU inherits: listening sockets, the connection of its console, files and the tap device. Owns the socket files in the
//! machine's folder.
//!
//! Invariant: the VMM cannot write to the machine's folder, so it cannot mislead other processes by its contents.

use crate::error::HostError;
use crate::hypervisor::bridge;
use crate::hypervisor::qemu::{self, AGENT, Handles, MONITOR, PHONE, SERIAL};
use crate::short_path::ShortPath;
use rustix::fs::{CWD, Mode, OFlags, fchmod, openat};
use spillway_api::{CatalogSpec, ErrorCode, Network};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// The machine's disks that are files of the host.
pub struct Disks {
    pub data: Option<PathBuf>,
    pub scratch: Option<PathBuf>,
    pub seed: Option<PathBuf>,
    /// The variables of UEFI firmware.
    pub variables: Option<PathBuf>,
}

/// Opens all descriptors with the daemon's rights.
pub fn open(folder: &Path, spec: &CatalogSpec, disks: &Disks) -> Result<Handles, HostError> {
    let disk = |path: &Option<PathBuf>, writes| path.as_deref().map(|path| file(path, writes)).transpose();
    let host_file =
        |path: &Option<String>| path.as_ref().map(|path| readable(Path::new(path), folder)).transpose();
    Ok(Handles {
        monitor: listener(folder, MONITOR)?,
        console: connection(folder, SERIAL)?,
        agent: listener(folder, AGENT)?,
        phone: qemu::phones(spec).then(|| listener(folder, PHONE)).transpose()?,
        data: disk(&disks.data, true)?,
        scratch: disk(&disks.scratch, true)?,
        seed: disk(&disks.seed, false)?,
        kernel: host_file(&spec.hardware.kernel)?,
        initrd: host_file(&spec.hardware.initrd)?,
        variables: disk(&disks.variables, true)?,
        taps: spec.hardware.networks().map(tap).collect::<Result<_, _>>()?,
    })
}

fn tap(network: &Network) -> Result<Option<OwnedFd>, HostError> {
    match network {
        Network::Bridge(bridge) => bridge::tap(bridge).map(Some),
        Network::User | Network::None => Ok(None),
    }
}

/// Creates a listening socket in place of the last VMM's.
pub fn listener(folder: &Path, name: &str) -> Result<OwnedFd, HostError> {
    let failed = |e: io::Error| failed(&folder.join(name), "cannot be made", e);
    let socket = ShortPath::of(folder, name)?;
    match std::fs::remove_file(socket.path()) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
        _ => {}
    }
    Ok(UnixListener::bind(socket.path()).map_err(failed)?.into())
}

/// Connects to a socket of the disk's supervisor. `None`: it has none.
fn connection(folder: &Path, name: &str) -> Result<Option<OwnedFd>, HostError> {
    let socket = ShortPath::of(folder, name)?;
    match UnixStream::connect(socket.path()) {
        Ok(connected) => Ok(Some(connected.into())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(failed(&folder.join(name), "cannot be connected to", e)),
    }
}

fn file(path: &Path, writes: bool) -> Result<OwnedFd, HostError> {
    let opened = File::options().read(true).write(writes).open(path);
    Ok(opened.map_err(|e| failed(path, "cannot be opened", e))?.into())
}

/// Opens a kernel or initrd. QEMU opens it again through the descriptor, so the folders above it do not matter, but
/// QEMU's own rights do: a file that not everybody may read is copied to an unnamed file.
fn readable(path: &Path, folder: &Path) -> Result<OwnedFd, HostError> {
    let cannot = |e| failed(path, "cannot be read", e);
    // Opening a pipe without a writer would block.
    let open = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
    let mut original = open.map_err(cannot)?;
    let found = original.metadata().map_err(cannot)?;
    if !found.is_file() {
        return Err(HostError::invalid(format!("{} is no file", path.display())));
    }
    if found.mode() & 0o004 != 0 {
        return Ok(original.into());
    }
    let mut copy = || -> io::Result<File> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let mut copy = File::from(openat(CWD, folder, flags, Mode::from_raw_mode(0o600))?);
        io::copy(&mut original, &mut copy)?;
        fchmod(&copy, Mode::from_raw_mode(0o444))?;
        Ok(copy)
    };
    let copied = copy().map_err(|e| failed(path, &format!("cannot be copied to {}", folder.display()), e))?;
    Ok(copied.into())
}

fn failed(path: &Path, what: &str, error: io::Error) -> HostError {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::Exhausted,
        _ => ErrorCode::Internal,
    };
    HostError::new(code, format!("{} {what}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_kernel_is_what_everybody_may_read_and_stays_where_it_is() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let kernel = dir.path().join("vmlinuz");
        fs::write(&kernel, "a kernel").unwrap();
        for (rights, is_copied) in [(0o644, false), (0o600, true)] {
            fs::set_permissions(&kernel, Permissions::from_mode(rights)).unwrap();
            let opened = readable(&kernel, dir.path()).unwrap();
            // As QEMU opens it.
            let mut again = File::open(format!("/proc/self/fd/{}", opened.as_raw_fd())).unwrap();
            let mut text = String::new();
            again.read_to_string(&mut text).unwrap();
            let found = again.metadata().unwrap();
            assert_eq!((text.as_str(), found.mode() & 0o004), ("a kernel", 0o004), "{rights:o}");
            assert_eq!(found.ino() != fs::metadata(&kernel).unwrap().ino(), is_copied, "{rights:o}");
            assert_eq!(fs::metadata(&kernel).unwrap().mode() & 0o777, rights, "the host's own is left alone");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "a copy has no name");
        assert!(readable(dir.path(), dir.path()).unwrap_err().message.contains("is no file"));
        let pipe = dir.path().join("pipe");
        rustix::fs::mkfifoat(CWD, &pipe, Mode::from_raw_mode(0o600)).unwrap();
        assert!(
            readable(&pipe, dir.path()).unwrap_err().message.contains("is no file"),
            "nobody writes to it"
        );
        assert!(
            readable(Path::new("/nonexistent/vmlinuz"), dir.path())
                .unwrap_err()
                .message
                .contains("/nonexistent")
        );
    }

    #[test]
    fn a_socket_listens_in_place_of_the_last_one() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let first = listener(dir.path(), "x.sock").unwrap();
        let _second = listener(dir.path(), "x.sock").unwrap();
        drop(first);
        UnixStream::connect(dir.path().join("x.sock")).unwrap();
    }
}
