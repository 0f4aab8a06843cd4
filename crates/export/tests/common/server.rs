//! A tiny NBD server for real clients: one thread, `poll`, a unix socket, the byte-array disk.

use super::{Disk, Pace, Rng};
use rustix::event::{PollFd, PollFlags, poll};
use spillway_export::nbd::{Budget, Connection, ExportInfo};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A running server; ends with its value.
pub struct Server {
    directory: tempfile::TempDir,
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    pub disk: Arc<Mutex<Disk>>,
    /// Why connections ended, other than by their client's leave.
    pub complaints: Arc<Mutex<Vec<String>>>,
}

impl Server {
    pub fn start(size: usize, pace: Pace) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("s")).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let mut disk = Disk::new(size);
        disk.pace = pace;
        disk.keep_log = false;
        let disk = Arc::new(Mutex::new(disk));
        let complaints = Arc::new(Mutex::new(Vec::new()));
        let thread = std::thread::spawn({
            let (disk, complaints) = (disk.clone(), complaints.clone());
            move || serve(&listener, &stopped, size, &disk, &complaints)
        });
        Server { directory, stop: Some(stop), thread: Some(thread), disk, complaints }
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("s")
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket().display())
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Ends the server; panics if it has panicked.
    pub fn stop(mut self) -> Vec<String> {
        self.stop = None;
        self.thread.take().unwrap().join().expect("the server did not panic");
        self.complaints.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(
    listener: &UnixListener,
    stopped: &UnixStream,
    size: usize,
    disk: &Mutex<Disk>,
    complaints: &Mutex<Vec<String>>,
) {
    listener.set_nonblocking(true).unwrap();
    let mut rng = Rng::new(1);
    let mut connections: Vec<(u16, Connection)> = Vec::new();
    let budget = Budget::new();
    let mut next_id = 0u16;
    loop {
        let ready: Vec<PollFlags> = {
            let mut fds = vec![
                PollFd::new(stopped, PollFlags::IN | PollFlags::HUP),
                PollFd::new(listener, PollFlags::IN),
            ];
            for (_, connection) in &connections {
                let mut flags = PollFlags::HUP;
                flags.set(PollFlags::IN, connection.wants_read());
                flags.set(PollFlags::OUT, connection.wants_write());
                fds.push(PollFd::from_borrowed_fd(connection.fd(), flags));
            }
            let waiting = !disk.lock().unwrap().waiting.is_empty();
            let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut fds, waiting.then_some(&at_once)).unwrap();
            fds.iter().map(PollFd::revents).collect()
        };
        if !ready[0].is_empty() {
            return;
        }
        let disk = &mut *disk.lock().unwrap();
        let mut ended = Vec::new();
        for ((id, connection), flags) in connections.iter_mut().zip(&ready[2..]) {
            if let Err(reason) = serve_one(*id, connection, *flags, disk, &mut rng) {
                if !reason.is_ordinary() {
                    complaints.lock().unwrap().push(reason.to_string());
                }
                ended.push(*id);
            }
        }
        disk.waiting
            .retain(|request| !ended.contains(&spillway_export::nbd::token_connection(request.token)));
        connections.retain(|(id, _)| !ended.contains(id));
        while let Ok((socket, _)) = listener.accept() {
            let info = ExportInfo {
                size_bytes: size as u64,
                name: super::NAME.into(),
                description: super::DESCRIPTION.into(),
            };
            let mut connection = Connection::new(socket.into(), info, next_id, &budget).unwrap();
            connection.flush_output().unwrap();
            connections.push((next_id, connection));
            next_id = next_id.wrapping_add(1);
        }
    }
}

fn serve_one(
    id: u16,
    connection: &mut Connection,
    flags: PollFlags,
    disk: &mut Disk,
    rng: &mut Rng,
) -> Result<(), spillway_export::nbd::Disconnect> {
    if flags.contains(PollFlags::OUT) {
        connection.on_writable()?;
    }
    if flags.intersects(PollFlags::IN | PollFlags::ERR) && connection.wants_read() {
        connection.on_readable()?;
    }
    if flags.contains(PollFlags::HUP) {
        connection.on_hangup()?;
    }
    loop {
        while let Some(work) = connection.next() {
            disk.work(connection, work);
        }
        // Some of what waits, in any order; the rest in later turns.
        let mine: Vec<usize> = (0..disk.waiting.len())
            .filter(|&at| spillway_export::nbd::token_connection(disk.waiting[at].token) == id)
            .collect();
        if mine.is_empty() {
            break;
        }
        let index = mine[rng.below(mine.len() as u64) as usize];
        disk.complete_at(connection, index);
        if rng.chance(30) {
            break;
        }
    }
    connection.flush_output()
}
