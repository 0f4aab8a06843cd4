//! A front end that asks for all that it may have at once, of a disk that is full: what it can make the worker hold is
//! bounded, and every request ends well once there is space.
//!
//! The front end is written from the specifications alone. It reaches its memory as a file, which the worker has mapped.

use crate::deaths::worker;
use crate::world::{MIB, World, qemu_io, until};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{pread, pwrite, write};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process};
use spillway_testkit::footprint::anonymous_bytes;
use spillway_testkit::{Disk, Driver, Rng, Shape};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// As many as there may be, and as long.
const QUEUES: u64 = 64;
const SIZE: u64 = 1024;
/// Each queue uses so many tables, each of them the longest that is taken, for all its heads.
const TABLES: u64 = 4;
const TABLE_BYTES: u64 = 1024 * 16;
/// Pieces of data in a table: as many as there can be with header and status, or one, so that there are many requests.
const PIECES: [u64; 2] = [1022, 1];
const BLOCK: u64 = 4096;

// Where things are in guest memory.
const RING_BYTES: u64 = 32 << 10;
const AVAILABLE: u64 = 16 << 10;
const USED: u64 = 20 << 10;
const TABLES_AT: u64 = 4 * MIB;
const DATA_AT: u64 = 8 * MIB;
const HEADERS_AT: u64 = 9 * MIB;
const MEMORY_BYTES: u64 = 10 * MIB;
/// User addresses are others than guest addresses.
const USER: u64 = 1 << 40;

const RAM: u64 = 16 * MIB;
/// Where on the disk the tables' blocks begin.
const BLOCKS_AT: u64 = 32 * MIB;
/// What the worker may take for all that: 4 MiB for the heads of its queues, 2 MiB for requests and 256 KiB for those of each
/// queue, and one that is let in at the last moment for each queue.
const MOST_BYTES: u64 = 24 * MIB;

struct Hostile {
    socket: UnixStream,
    memory: OwnedFd,
    kicks: Vec<OwnedFd>,
}

impl Hostile {
    /// Connects, with all queues set up.
    fn connect(socket: &Path) -> Hostile {
        let memory = memfd_create("hostile", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, MEMORY_BYTES).unwrap();
        let kick = |_| eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let front = Hostile {
            socket: UnixStream::connect(socket).unwrap(),
            memory,
            kicks: (0..QUEUES).map(kick).collect(),
        };
        // Version 1 and indirect descriptors; then owner and memory.
        front.tell(2, &words(&[1 << 32 | 1 << 28]), None);
        front.tell(3, &[], None);
        front.tell(5, &words(&[1, 0, MEMORY_BYTES, USER, 0]), Some(front.memory.as_fd()));
        for (queue, kick) in (0..QUEUES).zip(&front.kicks) {
            let ring = USER + queue * RING_BYTES;
            front.tell(8, &words(&[SIZE << 32 | queue]), None);
            front.tell(10, &words(&[queue]), None);
            front.tell(9, &words(&[queue, ring, ring + USED, ring + AVAILABLE, 0]), None);
            front.tell(12, &words(&[queue]), Some(kick.as_fd()));
        }
        front
    }

    fn tell(&self, request: u32, payload: &[u8], fd: Option<BorrowedFd<'_>>) {
        let mut bytes = [request, 1, payload.len() as u32].map(u32::to_ne_bytes).concat();
        bytes.extend(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if let Some(fd) = &fd {
            assert!(control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd))));
        }
        let sent = sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
        assert_eq!(sent.unwrap(), bytes.len());
    }

    /// GET_FEATURES: when the answer is there all that was said before is carried out.
    fn is_heard(&mut self) {
        self.tell(1, &[], None);
        self.socket.read_exact(&mut [0; 20]).unwrap();
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        assert_eq!(pwrite(&self.memory, bytes, at).unwrap(), bytes.len());
    }

    fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert_eq!(pread(&self.memory, &mut bytes, at).unwrap(), len);
        bytes
    }

    /// Makes all heads of all queues available: writes of a block for each table, in so many pieces.
    fn offer(&self, content: &[u8], pieces: u64) {
        self.put(DATA_AT, content);
        for table in 0..QUEUES * TABLES {
            let (header, data) = (HEADERS_AT + table * 32, DATA_AT + table * BLOCK);
            self.put(header, &words(&[1, (BLOCKS_AT + table * BLOCK) / 512]));
            self.put(header + 16, &[0xEE]);
            let len = |i| if i + 1 < pieces { 4 } else { BLOCK - i * 4 };
            let all = std::iter::once((header, 16, NEXT))
                .chain((0..pieces).map(|i| (data + i * 4, len(i), NEXT)))
                .chain([(header + 16, 1, WRITABLE)]);
            let entries: Vec<u8> = all
                .zip(1..)
                .flat_map(|((at, len, flags), next)| words(&[at, next << 48 | flags << 32 | len]))
                .collect();
            self.put(TABLES_AT + table * TABLE_BYTES, &entries);
        }
        for (queue, kick) in (0..QUEUES).zip(&self.kicks) {
            let ring = queue * RING_BYTES;
            let entry = |head| {
                words(&[
                    TABLES_AT + table_of(queue, head) * TABLE_BYTES,
                    INDIRECT << 32 | ((pieces + 2) * 16),
                ])
            };
            self.put(ring, &(0..SIZE).flat_map(entry).collect::<Vec<u8>>());
            let heads: Vec<u8> = (0..SIZE as u16).flat_map(u16::to_le_bytes).collect();
            self.put(ring + AVAILABLE + 4, &heads);
            self.put(ring + AVAILABLE + 2, &(SIZE as u16).to_le_bytes());
            write(kick, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Requests of a queue that were given back.
    fn used(&self, queue: u64) -> u64 {
        let index = self.get(queue * RING_BYTES + USED + 2, 2);
        u64::from(u16::from_le_bytes(index.try_into().unwrap()))
    }

    /// All requests have ended, each once and well.
    fn check(&self) {
        for queue in 0..QUEUES {
            let mut heads: Vec<u32> = self
                .get(queue * RING_BYTES + USED + 4, SIZE as usize * 8)
                .chunks_exact(8)
                .map(|element| u32::from_le_bytes(element[..4].try_into().unwrap()))
                .collect();
            heads.sort_unstable();
            assert!(heads.iter().copied().eq(0..SIZE as u32), "queue {queue}: {heads:?}");
        }
        for table in 0..QUEUES * TABLES {
            assert_eq!(self.get(HEADERS_AT + table * 32 + 16, 1), [0], "table {table}");
        }
    }
}

const NEXT: u64 = 1;
const WRITABLE: u64 = 2;
const INDIRECT: u64 = 4;

fn table_of(queue: u64, head: u64) -> u64 {
    queue * TABLES + head % TABLES
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Whether a process sleeps.
fn sleeps(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
}

/// Waits until the worker has taken what it takes, and sleeps. How many requests that is.
fn takes_what_it_can(disk: &Disk, mut look: impl FnMut()) -> u64 {
    let mut last = (0, 0);
    until("the worker takes no more", disk, || {
        look();
        let (taken, pid) = (disk.figure("inflight").unwrap(), worker(disk));
        let is_same = taken >= QUEUES && last.0 == taken && sleeps(pid);
        last = (taken, if is_same { last.1 + 1 } else { 0 });
        last.1 >= 5
    });
    last.0
}

#[test]
fn what_a_hostile_guest_makes_the_worker_hold_is_bounded() {
    for pieces in PIECES {
        let Some(world) = World::new(&["qemu-io"]) else { return };
        all_that_it_may(&world, pieces);
    }
}

fn all_that_it_may(world: &World, pieces: u64) {
    let image = world.blank(8 * MIB);
    let queues = QUEUES.to_string();
    let disk = world.serve(&image, &["--size", "64M", "--mode", "ram", "--ram", "16M", "--queues", &queues]);
    qemu_io(&disk, &["write -P 1 0 16M"]);
    assert_eq!(disk.figure("ram.used_bytes").unwrap(), RAM);
    let mut content = vec![0; (QUEUES * TABLES * BLOCK) as usize];
    let mut rng = Rng::new(91);
    content.as_chunks_mut().0.iter_mut().for_each(|word| *word = rng.next_u64().to_le_bytes());

    let before = anonymous_bytes(worker(&disk)).unwrap();
    let mut front = Hostile::connect(&disk.vhost());
    front.is_heard();
    front.offer(&content, pieces);
    let mut most = 0;
    let mut look = || {
        let grown = anonymous_bytes(worker(&disk)).unwrap().saturating_sub(before);
        assert!(grown <= MOST_BYTES, "{grown} bytes for the requests of a guest, {MOST_BYTES} allowed");
        most = most.max(grown);
    };
    let taken = takes_what_it_can(&disk, &mut look);
    assert!(disk.log().contains("the write cache is full"), "{}", disk.log());

    // The next worker takes them again, and no more.
    let first = worker(&disk);
    kill_process(Pid::from_raw(first as i32).unwrap(), Signal::KILL).unwrap();
    until("the next worker", &disk, || ![0, first].contains(&worker(&disk)));
    let again = takes_what_it_can(&disk, &mut look);
    assert!((0..QUEUES).all(|queue| front.used(queue) == 0), "there is no space yet");

    qemu_io(&disk, &["discard 0 8M"]);
    until("all requests end", &disk, || {
        look();
        (0..QUEUES).all(|queue| front.used(queue) == SIZE)
    });
    println!(
        "{pieces} pieces: {taken} requests taken, {again} by the next worker, at most {most} bytes for them"
    );
    front.check();
    drop(front);
    until("the front end has left", &disk, || disk.figure("clients").unwrap() == 0);
    let mut driver = Driver::connect_with(&disk.vhost(), Shape::default()).unwrap();
    let mut read = vec![0; content.len()];
    driver.read_at(BLOCKS_AT, &mut read).unwrap();
    assert!(read == content, "what was written is there");
    drop(driver);
    disk.stop().unwrap();
}
