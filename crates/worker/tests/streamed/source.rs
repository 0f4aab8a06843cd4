//! The part of `spillway-streamd`: an image of which the test decides what is there, what comes and when.

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix,
    SocketType, accept, bind, listen, recv, sendmsg, shutdown, socket,
};
use spillway_image::ResidencyWriter;
use spillway_image::asks::{Answer, Opened, answer, asked, opens};
use spillway_testkit::Rng;
use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

pub const CHUNK: u64 = 1 << 20;
pub const CHUNKS: u32 = 16;
/// The last chunk is shorter.
pub const SIZE: u64 = 15 * CHUNK + 512 * 9;
pub const ROOT: [u8; 32] = [7; 32];

/// What is answered about a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gives {
    Chunks,
    Passes,
    Damaged,
    /// Nothing, for now.
    Nothing,
}

struct State {
    gives: Gives,
    file: File,
    residency: Arc<ResidencyWriter>,
    connections: Vec<Arc<OwnedFd>>,
    /// All questions, in order.
    asked: Vec<u32>,
    /// Questions that were not answered, with where they came from.
    held: Vec<(Arc<OwnedFd>, u32)>,
    listener: Option<Arc<OwnedFd>>,
}

#[derive(Clone)]
pub struct Source {
    folder: PathBuf,
    pub content: Arc<Vec<u8>>,
    state: Arc<Mutex<State>>,
}

fn new_file(folder: &Path) -> File {
    let path = folder.join("disk.raw");
    let _old = std::fs::remove_file(&path);
    let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(SIZE).unwrap();
    file
}

fn new_residency() -> Arc<ResidencyWriter> {
    Arc::new(ResidencyWriter::new(CHUNKS.into()).unwrap())
}

fn send(connection: &OwnedFd, packet: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(fds)));
    // The worker may have gone.
    let _ = sendmsg(connection, &[IoSlice::new(packet)], &mut ancillary, SendFlags::NOSIGNAL);
}

impl Source {
    pub fn new(folder: &Path) -> Source {
        let mut random = Rng::new(11);
        let content: Vec<u8> = (0..SIZE / 8).flat_map(|_| random.next_u64().to_le_bytes()).collect();
        let state = State {
            gives: Gives::Chunks,
            file: new_file(folder),
            residency: new_residency(),
            connections: Vec::new(),
            asked: Vec::new(),
            held: Vec::new(),
            listener: None,
        };
        let source = Source {
            folder: folder.to_owned(),
            content: Arc::new(content),
            state: Arc::new(Mutex::new(state)),
        };
        source.listen();
        source
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.join("streamd.sock")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn chunk(&self, chunk: u32) -> &[u8] {
        let from = (u64::from(chunk) * CHUNK) as usize;
        &self.content[from..(from + CHUNK as usize).min(SIZE as usize)]
    }

    /// The process is there.
    pub fn listen(&self) {
        let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(self.socket()).unwrap()).unwrap();
        listen(&listener, 16).unwrap();
        let listener = Arc::new(listener);
        self.state().listener = Some(Arc::clone(&listener));
        let source = self.clone();
        thread::spawn(move || {
            while let Ok(connection) = accept(&*listener) {
                let source = source.clone();
                thread::spawn(move || source.serve(Arc::new(connection)));
            }
        });
    }

    /// The process dies. Its successor knows nothing of what is in the file.
    pub fn die(&self) {
        let mut state = self.state();
        std::fs::remove_file(self.socket()).unwrap();
        // A shutdown ends the accept, too.
        let gone = state.listener.take().into_iter().chain(state.connections.drain(..)).collect::<Vec<_>>();
        gone.iter().for_each(|socket| _ = shutdown(&**socket, Shutdown::Both));
        state.held.clear();
        state.residency = new_residency();
    }

    /// Its files are lost, too.
    pub fn lose_files(&self) {
        self.state().file = new_file(&self.folder);
    }

    /// Device and number of the file that it has now.
    pub fn file(&self) -> (u64, u64) {
        let found = self.state().file.metadata().unwrap();
        (found.dev(), found.ino())
    }

    pub fn set(&self, gives: Gives) {
        let mut state = self.state();
        state.gives = gives;
        for (connection, chunk) in std::mem::take(&mut state.held) {
            self.reply(&mut state, &connection, chunk);
        }
    }

    pub fn asked(&self) -> Vec<u32> {
        self.state().asked.clone()
    }

    fn serve(&self, connection: Arc<OwnedFd>) {
        let mut packet = [0; 64];
        let mut next =
            || recv(&*connection, &mut packet[..], RecvFlags::empty()).map(|(len, _)| packet[..len].to_vec());
        let Ok(first) = next() else { return };
        assert_eq!(opens(&first), Some(ROOT));
        {
            let mut state = self.state();
            let file = File::open(self.folder.join("disk.raw")).unwrap();
            let opened = Opened { size_bytes: SIZE, chunk_bytes: CHUNK };
            send(&connection, &opened.packet(), &[file.as_fd(), state.residency.memory()]);
            state.connections.push(Arc::clone(&connection));
        }
        while let Ok(packet) = next()
            && let Some(chunk) = asked(&packet)
        {
            let mut state = self.state();
            state.asked.push(chunk);
            self.reply(&mut state, &connection, chunk);
        }
    }

    fn reply(&self, state: &mut State, connection: &Arc<OwnedFd>, chunk: u32) {
        match state.gives {
            Gives::Nothing => state.held.push((Arc::clone(connection), chunk)),
            Gives::Chunks => {
                state.file.write_all_at(self.chunk(chunk), u64::from(chunk) * CHUNK).unwrap();
                state.residency.set(chunk.into());
                send(connection, &answer(chunk, Answer::Resident), &[]);
            }
            Gives::Passes => {
                let file: File = memfd_create("chunk", MemfdFlags::CLOEXEC).unwrap().into();
                file.write_all_at(self.chunk(chunk), 0).unwrap();
                send(connection, &answer(chunk, Answer::Passed), &[file.as_fd()]);
            }
            Gives::Damaged => send(connection, &answer(chunk, Answer::Damaged), &[]),
        }
    }
}
