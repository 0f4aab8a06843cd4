//! Listening unix sockets. A socket has its permissions before a client can connect, and only its creator removes it. Never
//! replaces a socket that has a listener.
//!
//! Invariant: a path is removed only if it still names the socket that was examined.

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use spillway_control::{ErrorKind, SupervisorError};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The longest path that fits a unix socket's address, its final zero left out.
const MAX_PATH_BYTES: usize = 107;

/// A listening socket. Its path is removed when it is dropped.
#[derive(Debug)]
pub(super) struct Listener {
    fd: OwnedFd,
    path: PathBuf,
    identity: (u64, u64),
}

/// Who may connect.
#[derive(Clone, Debug)]
pub(super) struct Rights {
    pub mode: u32,
    pub group: Option<Gid>,
}

impl Rights {
    /// Resolves the group, given by name or number.
    pub fn new(mode: u32, group: Option<&str>) -> Result<Rights, SupervisorError> {
        let group = match group {
            None => None,
            Some(name) => Some(find_group(name).ok_or_else(|| {
                SupervisorError::new(
                    ErrorKind::Options,
                    format!(
                        "group '{name}' for --socket-group: no such group on this host: see 'getent group'"
                    ),
                )
            })?),
        };
        Ok(Rights { mode: mode & 0o777, group })
    }
}

impl Listener {
    /// Creates a socket at `path`. Replaces the socket of a server that has crashed; any other file there is an error.
    pub fn bind(path: &Path, rights: &Rights) -> Result<Listener, SupervisorError> {
        Listener::bind_as(path, rights, SocketType::STREAM)
    }

    /// Does the same for a socket of this type.
    pub fn bind_as(path: &Path, rights: &Rights, kind: SocketType) -> Result<Listener, SupervisorError> {
        if path.as_os_str().len() > MAX_PATH_BYTES {
            return Err(SupervisorError::new(
                ErrorKind::Create,
                format!(
                    "socket {}: the path has {} bytes, the most is {MAX_PATH_BYTES}: choose a shorter one",
                    path.display(),
                    path.as_os_str().len()
                ),
            ));
        }
        let cannot = |error: Errno| {
            let advice = match error {
                Errno::NOENT => "make its folder first, or choose another path",
                Errno::ACCESS | Errno::PERM => "let this user write there, or choose another path",
                _ => "choose another path",
            };
            SupervisorError::on_path(ErrorKind::Create, "cannot make socket", path, error, advice)
        };
        let address = SocketAddrUnix::new(path).map_err(cannot)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).map_err(cannot)?;
        // The new file takes this mode less the umask, so it is never wider than asked.
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(cannot)?;
        match rustix::net::bind(&fd, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path, &address)?;
                rustix::net::bind(&fd, &address).map_err(cannot)?;
            }
            result => result.map_err(cannot)?,
        }
        // Examine and change it through one fd, so that a symbolic link that replaces it is not followed.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(cannot)?;
        let stat = rustix::fs::fstat(&file).map_err(cannot)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
            return Err(refuse(
                path,
                "something else took its place: choose a path that only this user can change",
            ));
        }
        // From here on an error removes it again.
        let listener = Listener { fd, path: path.to_owned(), identity: identity(&stat) };
        if rights.group.is_some() {
            rustix::fs::chownat(&file, c"", None, rights.group, AtFlags::EMPTY_PATH).map_err(|e| {
                let advice = "choose a group of this user's for --socket-group, or start as root";
                SupervisorError::on_path(
                    ErrorKind::Create,
                    "cannot give the group to socket",
                    path,
                    e,
                    advice,
                )
            })?;
        }
        // fchmod refuses such an fd; its entry in /proc stands for the file itself.
        let entry = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::chmod(entry, Mode::from_raw_mode(rights.mode)).map_err(cannot)?;
        rustix::net::listen(&listener.fd, 128).map_err(cannot)?;
        Ok(listener)
    }

    /// Accepts a connection, blocking and close-on-exec; `None` if no client waits.
    pub fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        match rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if rustix::fs::lstat(&self.path).is_ok_and(|stat| identity(&stat) == self.identity) {
            // If this fails, a stale socket stays, which the next server replaces.
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

fn refuse(path: &Path, why: &str) -> SupervisorError {
    SupervisorError::new(ErrorKind::Create, format!("cannot make socket {}: {why}", path.display()))
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

/// Removes a socket that nobody listens on; an error for anything else.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), SupervisorError> {
    let refuse = |why: &str| refuse(path, why);
    let found = match rustix::fs::lstat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => {
            let what = format!("cannot make socket {}", path.display());
            let advice = "choose another path";
            return Err(SupervisorError::caused(ErrorKind::Create, what, io::Error::from(e), advice));
        }
    };
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Err(refuse("something that is not a socket is there: remove it, or choose another path"));
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|e| SupervisorError::internal("cannot make a socket", e))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {}
        Err(e @ (Errno::ACCESS | Errno::PERM)) => {
            let advice = "another process uses it: choose another path";
            return Err(SupervisorError::on_path(ErrorKind::Create, "cannot make socket", path, e, advice));
        }
        _ => {
            return Err(refuse(
                "another process serves it: stop that one (see 'ss -xlp'), or choose another path",
            ));
        }
    }
    // Two servers may start at once and examine the same stale socket. Rename it first, and remove it only if it is the
    // socket that was examined.
    let mut aside = path.as_os_str().to_owned();
    aside.push(format!(".stale-{}", std::process::id()));
    match rustix::fs::rename(path, &aside) {
        Ok(()) => {}
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => {
            let advice =
                "nobody serves it, but this user may not remove it: remove it, or choose another path";
            return Err(SupervisorError::on_path(ErrorKind::Create, "cannot take socket", path, e, advice));
        }
    }
    match rustix::fs::lstat(&aside) {
        Ok(stat) if identity(&stat) == identity(&found) => {
            let _ = rustix::fs::unlink(&aside);
        }
        _ => {
            let _ = rustix::fs::renameat_with(CWD, &aside, CWD, path, RenameFlags::NOREPLACE);
        }
    }
    Ok(())
}

fn find_group(name: &str) -> Option<Gid> {
    if let Ok(number) = name.parse::<u32>() {
        return (number != u32::MAX).then(|| Gid::from_raw(number));
    }
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; 64 << 10];
    let mut group = std::mem::MaybeUninit::<libc::group>::uninit();
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers are to live memory of the sizes given; `group` is read only when the call says
    // that it filled it.
    unsafe {
        let status = libc::getgrnam_r(
            name.as_ptr(),
            group.as_mut_ptr(),
            buffer.as_mut_ptr(),
            buffer.len(),
            &mut found,
        );
        (status == 0 && !found.is_null()).then(|| Gid::from_raw((*found).gr_gid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::net::{UnixListener, UnixStream};

    fn rights() -> Rights {
        Rights::new(0o600, None).unwrap()
    }

    #[test]
    fn a_socket_has_its_mode_takes_connections_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        // Wider than any usual umask leaves it.
        let listener = Listener::bind(&path, &Rights::new(0o666, None).unwrap()).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o666);
        assert!(listener.accept().unwrap().is_none());
        let _client = UnixStream::connect(&path).unwrap();
        assert!(listener.accept().unwrap().is_some());
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_served_path_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _other = UnixListener::bind(&path).unwrap();
        let error = Listener::bind(&path, &rights()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Create);
        assert!(error.to_string().contains("another process serves it"), "{error}");
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_stale_socket_is_taken_and_anything_else_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(Listener::bind(&path, &rights()).unwrap());
        std::fs::write(&path, "precious").unwrap();
        let error = Listener::bind(&path, &rights()).unwrap_err();
        assert!(error.to_string().contains("not a socket"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn anothers_socket_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let ours = Listener::bind(&path, &rights()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _theirs = UnixListener::bind(&path).unwrap();
        drop(ours);
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_path_that_cannot_be_is_an_error() {
        let long = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
        assert!(Listener::bind(&long, &rights()).unwrap_err().to_string().contains("the most is 107"));
        let missing = Path::new("/nonexistent-folder/s");
        assert!(Listener::bind(missing, &rights()).unwrap_err().to_string().contains("make its folder"));
    }

    #[test]
    fn groups_have_names_and_numbers() {
        assert_eq!(find_group("root"), Some(Gid::ROOT));
        assert_eq!(find_group("17"), Some(Gid::from_raw(17)));
        assert_eq!(find_group("no-such-group-here"), None);
        if rustix::process::geteuid().is_root() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("s");
            let _l = Listener::bind(&path, &Rights::new(0o660, Some("17")).unwrap()).unwrap();
            assert_eq!(path.metadata().unwrap().gid(), 17);
        }
    }
}
