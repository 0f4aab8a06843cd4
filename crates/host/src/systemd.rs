//! Communication with the service manager (systemd, sd_notify(3) and sd_listen_fds(3)). Owns the descriptors that were
//! passed at the start, and the notifications; knows nothing of what the daemon does.
//!
//! Invariant: without a service manager every call does nothing. A descriptor that was passed and is not used is closed,
//! and removed from the service manager's store.

#![expect(unsafe_code, reason = "for the process's variables, and descriptors that come with it")]

use rustix::io::FdFlags;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg,
};
use std::env;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::Path;
use std::time::Duration;

/// Number of the first passed descriptor.
const FIRST: RawFd = 3;
/// Highest number that is examined.
const MOST: RawFd = 64;
/// Name of our listener in the service manager's store.
const LISTENER: &str = "listener";
/// How long the service manager may leave a notification unread.
const PATIENCE: Duration = Duration::from_secs(1);
/// Interval of status notifications, if the watchdog needs none more often.
const USUAL: Duration = Duration::from_secs(10);

/// The service manager, if one started this process.
#[derive(Default)]
pub struct ServiceManager {
    socket: Option<UnixDatagram>,
    given: Vec<(String, OwnedFd)>,
    /// Whether the listener belongs to a socket unit.
    of_unit: bool,
    /// Longest interval between two watchdog notifications.
    watchdog: Option<Duration>,
}

impl ServiceManager {
    /// Returns the service manager that started this process. Removes its environment variables, which are for nobody
    /// else.
    ///
    /// # Safety
    /// No other thread runs, and nobody else has taken the passed descriptors.
    pub unsafe fn take() -> ServiceManager {
        let take = |name: &str| {
            let value = env::var_os(name);
            // SAFETY: no other thread runs.
            unsafe { env::remove_var(name) };
            value
        };
        let text = |name: &str| take(name)?.into_string().ok();
        let ours = |pid: Option<String>| pid.is_some_and(|pid| pid == std::process::id().to_string());
        let (pid, fds) = (text("LISTEN_PID"), text("LISTEN_FDS"));
        let names = text("LISTEN_FDNAMES").unwrap_or_default();
        let fds: RawFd = fds.filter(|_| ours(pid)).and_then(|fds| fds.parse().ok()).unwrap_or(0);
        let mut names = names.split(':');
        let given = (FIRST..FIRST.saturating_add(fds.clamp(0, MOST))).filter_map(|number| {
            let name = names.next().unwrap_or_default().to_owned();
            // SAFETY: the service manager says that it is open, which is checked first.
            let fd = unsafe {
                rustix::io::fcntl_getfd(BorrowedFd::borrow_raw(number)).ok()?;
                OwnedFd::from_raw_fd(number)
            };
            // It is not for processes that we start.
            rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).ok()?;
            Some((name, fd))
        });
        let given = given.collect();
        let (pid, usec) = (text("WATCHDOG_PID"), text("WATCHDOG_USEC"));
        let for_us = pid.is_none() || ours(pid);
        let watchdog = usec.filter(|_| for_us).and_then(|usec| usec.parse().ok()).filter(|usec| *usec > 0);
        let socket = take("NOTIFY_SOCKET").and_then(|address| connect(address.as_bytes()).ok());
        ServiceManager { socket, given, of_unit: false, watchdog: watchdog.map(Duration::from_micros) }
    }

    /// Returns the listener at this path that an earlier daemon or the service manager had opened. Clients that have
    /// connected meanwhile wait in its queue.
    pub fn listener(&mut self, path: &Path, complain: &mut dyn FnMut(&str)) -> Option<UnixListener> {
        let (mut of_unit, mut kept) = (None, None);
        for (name, fd) in std::mem::take(&mut self.given) {
            let place = if name == LISTENER { &mut kept } else { &mut of_unit };
            match listens_at(fd, path) {
                Some(listener) if place.is_none() => *place = Some(listener),
                _ => {
                    complain(&format!(
                        "what the service manager calls '{name}' is not our listener at {}",
                        path.display()
                    ));
                    self.say(&format!("FDSTOREREMOVE=1\nFDNAME={name}"));
                }
            }
        }
        self.of_unit = of_unit.is_some();
        let was_kept = kept.is_some();
        let kept = kept.filter(|kept| of_unit.is_none() && is_reached_by(kept, path));
        if was_kept && kept.is_none() {
            self.say(&format!("FDSTOREREMOVE=1\nFDNAME={LISTENER}"));
        }
        of_unit.or(kept)
    }

    /// Stores the listener, so that it outlives this process. Returns whether there is a service manager.
    pub fn keep(&self, listener: &impl AsFd) -> bool {
        self.of_unit
            || self.send(&format!("FDSTORE=1\nFDNAME={LISTENER}"), &[listener.as_fd()]).is_ok_and(|sent| sent)
    }

    /// Sends one or more assignments of sd_notify(3). Errors are ignored.
    pub fn say(&self, words: &str) {
        let _ = self.send(words, &[]);
    }

    fn send(&self, words: &str, fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
        let Some(socket) = &self.socket else { return Ok(false) };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        sendmsg(socket, &[IoSlice::new(words.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
        Ok(true)
    }

    /// Sends status and watchdog notifications for as long as it is polled, each time that `state` answers in time.
    /// `state` asks the parts that must not hang.
    pub async fn attend(&self, state: impl AsyncFn() -> String) {
        let pause = self.watchdog.map_or(USUAL, |watchdog| (watchdog / 3).min(USUAL));
        let mut said = String::new();
        while self.socket.is_some() {
            if let Ok(state) = tokio::time::timeout(pause, state()).await {
                if self.watchdog.is_some() {
                    self.say("WATCHDOG=1");
                }
                if state != said {
                    // A newline would begin another assignment.
                    self.say(&format!("STATUS={}", state.replace('\n', " ")));
                    said = state;
                }
            }
            tokio::time::sleep(pause).await;
        }
        std::future::pending().await
    }
}

fn connect(address: &[u8]) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    match address.strip_prefix(b"@") {
        Some(name) => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
        None => socket.connect(Path::new(std::ffi::OsStr::from_bytes(address)))?,
    }
    socket.set_write_timeout(Some(PATIENCE))?;
    Ok(socket)
}

/// Converts a descriptor that is a listening stream socket of this path.
fn listens_at(fd: OwnedFd, path: &Path) -> Option<UnixListener> {
    use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
    let is_one = socket_domain(&fd) == Ok(AddressFamily::UNIX)
        && socket_type(&fd) == Ok(SocketType::STREAM)
        && socket_acceptconn(&fd) == Ok(true);
    let listener = is_one.then(|| UnixListener::from(fd))?;
    (listener.local_addr().ok()?.as_pathname()? == path).then_some(listener)
}

/// Whether connections to the path reach this listener: another socket may have replaced it.
fn is_reached_by(listener: &UnixListener, path: &Path) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::{SocketAddrUnix, connect, socket_with};
    let knock = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&client, &SocketAddrUnix::new(path)?) {
            // The queue of the listener is full.
            Err(rustix::io::Errno::AGAIN) => Ok(()),
            other => other,
        }
    };
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    knock().is_ok() && poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&now)) == Ok(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    use std::io::{IoSliceMut, Read, Write};
    use std::os::unix::net::UnixStream;

    /// A service manager that started us, and what it hears.
    fn started_by(given: Vec<(&str, OwnedFd)>) -> (ServiceManager, UnixDatagram) {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        theirs.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let given = given.into_iter().map(|(name, fd)| (name.to_owned(), fd)).collect();
        (ServiceManager { socket: Some(ours), given, ..ServiceManager::default() }, theirs)
    }

    fn heard(service_manager: &UnixDatagram) -> (String, Vec<OwnedFd>) {
        let mut text = [0; 1000];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got =
            recvmsg(service_manager, &mut [IoSliceMut::new(&mut text)], &mut control, RecvFlags::empty());
        let n = got.unwrap().bytes;
        let fds = control.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
            _ => vec![],
        });
        let fds = fds.collect();
        (String::from_utf8(text[..n].to_vec()).unwrap(), fds)
    }

    #[test]
    fn a_listener_is_kept_and_those_who_connect_meanwhile_wait() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        let (first, kept_by) = started_by(vec![]);
        assert!(first.keep(&UnixListener::bind(&path).unwrap()));
        let (words, mut fds) = heard(&kept_by);
        assert_eq!(words, "FDSTORE=1\nFDNAME=listener");
        // Nobody has it but the service manager.
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"?").unwrap();
        let (mut second, _) = started_by(vec![("listener", fds.remove(0))]);
        let listener = second.listener(&path, &mut |_| ()).expect("it is still that of the path");
        let mut answered = 0;
        while answered == 0 {
            // One of them has only knocked.
            answered = listener.accept().unwrap().0.read(&mut [0; 10]).unwrap();
        }
    }

    #[test]
    fn what_is_stale_is_taken_out_of_the_store() {
        let dir = tempfile::tempdir().unwrap();
        let (path, elsewhere) = (dir.path().join("sock"), dir.path().join("other"));
        let bind = |path: &Path| OwnedFd::from(UnixListener::bind(path).unwrap());
        let removed = "FDSTOREREMOVE=1\nFDNAME=listener";
        // Its name is gone; somebody else has it by now; it is that of another path; it is no listener.
        let nameless = bind(&path);
        std::fs::remove_file(&path).unwrap();
        let (mut service_manager, words) = started_by(vec![("listener", nameless)]);
        assert!(service_manager.listener(&path, &mut |_| ()).is_none());
        assert_eq!(heard(&words).0, removed);
        let replaced = bind(&path);
        std::fs::remove_file(&path).unwrap();
        let _other = bind(&path);
        let (mut service_manager, words) = started_by(vec![("listener", replaced)]);
        assert!(service_manager.listener(&path, &mut |_| ()).is_none());
        assert_eq!(heard(&words).0, removed);
        for (name, fd) in
            [("listener", bind(&elsewhere)), ("stored", std::fs::File::open("/dev/null").unwrap().into())]
        {
            let (mut service_manager, words) = started_by(vec![(name, fd)]);
            assert!(service_manager.listener(&path, &mut |_| ()).is_none());
            assert_eq!(heard(&words).0, format!("FDSTOREREMOVE=1\nFDNAME={name}"));
        }
    }

    #[test]
    fn that_of_a_socket_unit_comes_before_our_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        let kept = UnixListener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let of_unit = UnixListener::bind(&path).unwrap();
        let (mut service_manager, words) =
            started_by(vec![("listener", kept.into()), ("spillwayd.socket", of_unit.into())]);
        let listener = service_manager.listener(&path, &mut |_| ()).unwrap();
        assert_eq!(heard(&words).0, "FDSTOREREMOVE=1\nFDNAME=listener");
        let _client = UnixStream::connect(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        listener.accept().expect("it is the path's own");
        // Nothing that the service manager has already.
        assert!(service_manager.keep(&listener));
        service_manager.say("READY=1");
        assert_eq!(heard(&words).0, "READY=1");
    }

    #[tokio::test]
    async fn it_is_alive_only_while_its_parts_answer() {
        let (mut service_manager, words) = started_by(vec![]);
        service_manager.watchdog = Some(Duration::from_millis(30));
        let stands_still = std::cell::Cell::new(false);
        let state = async || {
            if stands_still.get() {
                std::future::pending().await
            }
            "two\nlines".to_owned()
        };
        let attend = service_manager.attend(state);
        let mut attend = std::pin::pin!(attend);
        let listen = move || {
            let first = [(); 4].map(|()| heard(&words).0);
            (words, first)
        };
        let (words, first) = tokio::select! {
            () = &mut attend => unreachable!("it goes on"),
            heard = tokio::task::spawn_blocking(listen) => heard.unwrap(),
        };
        assert_eq!(first, ["WATCHDOG=1", "STATUS=two lines", "WATCHDOG=1", "WATCHDOG=1"]);
        stands_still.set(true);
        words.set_nonblocking(true).unwrap();
        // What was said until now: nothing is under way, whoever said it has returned.
        while words.recv(&mut [0; 100]).is_ok() {}
        let _ = tokio::time::timeout(Duration::from_millis(200), &mut attend).await;
        assert!(words.recv(&mut [0; 100]).is_err(), "a part that stands still must not look alive");
    }

    #[test]
    fn without_a_service_manager_nothing_happens() {
        let service_manager = ServiceManager::default();
        service_manager.say("READY=1");
        assert!(!service_manager.keep(&io::stdin()));
    }
}
