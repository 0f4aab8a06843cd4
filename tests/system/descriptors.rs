//! A VMM that hands over descriptors of anything: of other kinds of files, and of files that can be neither looked at nor
//! closed, because the program of their file system, its own, does not answer.

use crate::fuse::Fuse;
use crate::world::{DEADLINE, MIB, PATIENCE, World, qemu_io, until};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use spillway_testkit::{Disk, Driver, End, Mixed, Oracle, Shape, skip};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

const SHAPE: Shape = Shape { queues: 1, depth: 16, request_bytes: 1 << 20, deadline: DEADLINE };
/// Where a driver writes.
const SPAN: u64 = 16 * MIB;
const REFUSED: &str = "neither an eventfd nor shared memory";

/// Connects as a VMM, sends one message with descriptors, and sees its connection end.
#[track_caller]
fn hand_over(disk: &Disk, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut stream = UnixStream::connect(disk.vhost()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let bytes = [&[request, 1, payload.len() as u32].map(u32::to_ne_bytes).concat(), payload].concat();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    // One that is turned away may find its connection closed already.
    let _ = sendmsg(&stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    match stream.read(&mut [0]) {
        Ok(n) => assert_eq!(n, 0, "{request}: an answer"),
        Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{request}"),
    }
}

/// The message of each kind that takes descriptors, and one that takes none.
fn messages() -> [(u32, Vec<u8>); 7] {
    let numbers = |numbers: &[u64]| numbers.iter().flat_map(|n| n.to_ne_bytes()).collect::<Vec<u8>>();
    let region = [0, MIB, 0, 0];
    [
        (3, vec![]),
        (5, numbers(&[&[1], &region[..]].concat())),
        (12, numbers(&[0])),
        (13, numbers(&[0])),
        (14, numbers(&[0])),
        (32, numbers(&[4096, 0, 1 | 8 << 16])),
        (37, numbers(&[&[0], &region[..]].concat())),
    ]
}

/// How often VMMs were refused in words.
fn refusals(disk: &Disk) -> usize {
    disk.log().matches(REFUSED).count()
}

fn serves(disk: &Disk, oracle: &mut Oracle, seed: u64) {
    assert_eq!(disk.figure("restarts").unwrap(), 0);
    qemu_io(disk, &["write -P 7 64M 1M", "read -P 7 64M 1M"]);
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    let span_bytes = SPAN;
    let mixed =
        Mixed { start_bytes: 0, span_bytes, largest_bytes: 64 << 10, depth: 8, end: End::Count(500), seed };
    driver.run_mixed(&mixed, oracle).unwrap();
    drop(driver);
    until("the VMM has left", disk, || disk.figure("clients").unwrap() == 0);
}

#[test]
fn other_kinds_of_files_are_refused_in_words_and_the_disk_serves_on() {
    let Some(world) = World::new(&["qemu-io"]) else { return };
    let image = world.blank(128 * MIB);
    let disk = world.serve(&image, &["--ram", "32M", "--overflow", "300M"]);
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    let kinds: [OwnedFd; 4] = [
        rustix::pipe::pipe().unwrap().1,
        tempfile::tempfile_in(world.dir()).unwrap().into(),
        UnixStream::pair().unwrap().0.into(),
        epoll,
    ];
    let mut tried = 0;
    for kind in &kinds {
        for (request, payload) in messages() {
            hand_over(&disk, request, &payload, &[kind.as_fd()]);
            tried += 1;
            until("it is refused in words", &disk, || refusals(&disk) == tried);
        }
    }
    serves(&disk, &mut Oracle::new(SPAN, 1), 1);
    disk.stop().unwrap();
}

#[test]
fn files_that_can_be_neither_looked_at_nor_closed_hold_up_nobody() {
    let Some(world) = World::new(&["qemu-io", "mount", "umount"]) else { return };
    if !rustix::process::geteuid().is_root() {
        return skip("only root can mount a file system that never answers");
    }
    let image = world.blank(128 * MIB);
    let disk = world.serve(&image, &["--ram", "32M", "--overflow", "300M"]);
    let fuse = match Fuse::mount(&world.path("fuse"), vec![disk.supervisor(), disk.worker().unwrap()]) {
        Ok(fuse) => fuse,
        Err(why) => return skip(&why),
    };
    for (tried, (request, payload)) in (1..).zip(messages()) {
        hand_over(&disk, request, &payload, &[fuse.file().as_fd()]);
        until("it is refused in words", &disk, || refusals(&disk) == tried);
    }
    let mut oracle = Oracle::new(SPAN, 2);
    serves(&disk, &mut oracle, 2);
    // Who brings so many that they could use up what the supervisor may have open is not let in any more.
    for _ in 0..32 {
        hand_over(&disk, 3, &[], &[fuse.file().as_fd(); 8]);
    }
    until("VMMs are turned away", &disk, || disk.log().contains("cannot be closed"));
    assert!(refusals(&disk) < 20, "it took all:\n{}", disk.log());
    qemu_io(&disk, &["read -P 7 64M 1M"]);
    // The program ends: they can be closed, and VMMs are served.
    drop(fuse);
    until("a VMM is taken", &disk, || Driver::connect_with(&disk.vhost(), SHAPE).is_ok());
    serves(&disk, &mut oracle, 3);
    disk.stop().unwrap();
}
