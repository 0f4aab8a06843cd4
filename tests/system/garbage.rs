//! Nonsense on the sockets: it ends its own connection, costs nothing that stays, and nobody else notices.

use crate::world::{MIB, PATIENCE, World, fio_ends, until};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use spillway_testkit::footprint::fds;
use spillway_testkit::process::wait_until;
use spillway_testkit::{Disk, Driver, End, Mixed, Oracle, Rng, Shape};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const DISK: u64 = 128 * MIB;
const SHAPE: Shape =
    Shape { queues: 2, depth: 16, request_bytes: 1 << 20, deadline: Duration::from_secs(30) };

/// What a real client of this socket might begin with.
fn beginning(vhost: bool, rng: &mut Rng) -> Vec<u8> {
    if vhost {
        // A header: request, flags with the version, size; and as much of a body as chance has it.
        let request = 1 + rng.below(45) as u32;
        let size = [0, 8, 12, 40, 56, 4096, u32::MAX][rng.below(7) as usize];
        let mut bytes = [request, 1 | (rng.below(16) as u32) << 2, size].map(u32::to_le_bytes).concat();
        bytes.extend((0..rng.below(u64::from(size.min(64)) + 1)).map(|_| rng.next_u64() as u8));
        bytes
    } else {
        // The client's flags, then an option with a length that it may not keep.
        let mut bytes = 3u32.to_be_bytes().to_vec();
        bytes.extend(b"IHAVEOPT");
        bytes.extend((1 + rng.below(12) as u32).to_be_bytes());
        bytes.extend([0u32, 4, 16, 4096, u32::MAX][rng.below(5) as usize].to_be_bytes());
        bytes.extend((0..rng.below(32)).map(|_| rng.next_u64() as u8));
        bytes
    }
}

/// One connection of nonsense: noise, or the beginning of something sensible, cut anywhere, with fds that nobody
/// asked for. Errors are the server's right.
fn disturb(socket: &Path, vhost: bool, rng: &mut Rng) -> Option<UnixStream> {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let mut bytes = beginning(vhost, rng);
    match rng.below(4) {
        0 => bytes = (0..rng.below(300)).map(|_| rng.next_u64() as u8).collect(),
        1 => bytes.truncate(rng.below(bytes.len() as u64 + 1) as usize),
        2 => (0..rng.below(6)).for_each(|_| bytes.extend(beginning(vhost, rng))),
        _ => {}
    }
    let file = std::fs::File::open("/proc/self/status").unwrap();
    let many: Vec<BorrowedFd<'_>> = vec![file.as_fd(); rng.below(10) as usize];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(10))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !many.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
    }
    let _ = sendmsg(&stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    match rng.below(4) {
        // Left open, and silent.
        0 => return Some(stream),
        // Left without a word.
        1 => {}
        // Half closed: the server must end it.
        _ => {
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut answer = vec![0; 4096];
            while matches!(stream.read(&mut answer), Ok(n) if n > 0) {}
        }
    }
    None
}

fn open_fds(disk: &Disk) -> (usize, usize) {
    (fds(disk.supervisor()).unwrap(), fds(disk.worker().unwrap()).unwrap())
}

#[test]
fn nonsense_disturbs_nobody_and_leaves_nothing() {
    let Some(world) = World::new(&["fio"]) else { return };
    let image = world.image(32 * MIB);
    let options = ["--size", "128M", "--ram", "16M", "--overflow", "300M"];
    let disk = world.serve(&image, &options);
    let mut oracle = Oracle::with_base(DISK, 81, &image).unwrap();
    let mut rng = Rng::new(82);
    let mixed = |seed, end| Mixed {
        start_bytes: 0,
        span_bytes: 64 * MIB,
        largest_bytes: 256 << 10,
        depth: 16,
        end,
        seed,
    };

    // What is opened on first use is open.
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    driver.run_mixed(&mixed(83, End::Count(2000)), &mut oracle).unwrap();
    drop(driver);
    until("the VMM has left", &disk, || disk.figure("clients").unwrap() == 0);
    let (at_rest, worker) = (open_fds(&disk), disk.worker().unwrap());

    // Where a VMM is expected, and none is there; an NBD client is served meanwhile.
    let noisy = ["--rw=randwrite", "--bsrange=4k-64k", "--offset=64M", "--size=64M", "--loops=2"];
    let fio = world.fio("beside", &disk, &noisy);
    for _ in 0..300 {
        // Held open it would keep the place, until it says something wrong: here it is dropped.
        drop(disturb(&disk.vhost(), true, &mut rng));
    }

    // Around a VMM at work.
    let mut driver = None;
    let connected = wait_until(PATIENCE, || {
        driver = Driver::connect_with(&disk.vhost(), SHAPE).ok();
        driver.is_some().then_some(())
    });
    assert!(connected.is_some(), "a VMM gets in once the nonsense has left\n{}", disk.log());
    let mut driver = driver.unwrap();
    std::thread::scope(|scope| {
        let load =
            scope.spawn(|| driver.run_mixed(&mixed(84, End::After(Duration::from_secs(3))), &mut oracle));
        let mut held = Vec::new();
        let mut n = 0;
        while n < 400 || !load.is_finished() {
            let vhost = n % 2 == 0;
            held.extend(disturb(&if vhost { disk.vhost() } else { disk.nbd() }, vhost, &mut rng));
            n += 1;
            // Fewer than there may be, so that who means it still gets in.
            if held.len() > 40 {
                held.clear();
            }
        }
        load.join().unwrap().unwrap();
    });
    fio_ends(fio);
    driver.write_zeroes(64 * MIB, 64 * MIB, false).unwrap();
    oracle.zeroed(64 * MIB, 64 * MIB);
    driver.verify(&oracle).unwrap();
    drop(driver);
    until("every connection is let go of", &disk, || {
        disk.figure("clients").unwrap() == 0 && open_fds(&disk) == at_rest
    });
    assert_eq!(disk.figure("inflight").unwrap(), 0);
    assert!(Path::new(&format!("/proc/{worker}")).exists(), "the worker is still the first");
    disk.stop().unwrap();
}
