//! Clients that come, leave and misbehave, and what the worker makes of it.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;
#[path = "../../export/tests/vhost_user_blk/vmm.rs"]
mod vmm;

use common::{Memory, QUEUES, Worker, spec};
use spillway_core::Mode;
use spillway_export::vhost_user_blk::{Connection, Reply, inflight_table};
use spillway_worker::channel::{self, ClientKind, FromWorker, ToWorker};
use spillway_worker::worker::ErrorKind;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A disk of mode `ram` with room for 1 MiB, on which writes wait for space.
fn worker() -> (Worker, tempfile::TempDir) {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    (Memory::new(spec(Mode::Ram, 1 << 20, 0), dir.path()).start(), dir)
}

fn hand_over(worker: &Worker, id: u64, kind: ClientKind, socket: OwnedFd) {
    let table = inflight_table(QUEUES).unwrap();
    let fds = [socket.as_fd(), table.as_fd()];
    let with_table = usize::from(kind == ClientKind::VhostUser);
    channel::send(&worker.channel, &ToWorker::Client { id, kind }, &fds[..1 + with_table]).unwrap();
}

/// What the supervisor does with the next messages of a VMM.
fn relay(worker: &Worker, id: u64, connection: &mut Connection, messages: usize) {
    for _ in 0..messages {
        assert!(vmm::wait(connection.fd().try_clone_to_owned().unwrap(), 10));
        let packet = connection.receive().unwrap().expect("a whole message");
        let fds: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
        channel::send(&worker.channel, &ToWorker::Message { id, bytes: packet.bytes }, &fds).unwrap();
        match worker.next() {
            FromWorker::Answered { accepted: true, answer, .. } => {
                let answer = answer.map(|bytes| Reply { bytes, fd: None });
                answer.iter().for_each(|answer| connection.send(answer).unwrap());
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Waits for a line for the log with these words.
fn wait_for_event(worker: &Worker, words: &str) {
    loop {
        assert!(vmm::wait(&worker.channel, 60), "a line with {words:?}");
        match channel::receive(&worker.channel).unwrap().expect("the worker lives").0 {
            FromWorker::Event { text, .. } if text.contains(words) => return,
            FromWorker::Event { .. } => {}
            other => panic!("{other:?} instead of {words:?}"),
        }
    }
}

/// A client past its handshake, of the old kind: simple replies.
fn client(worker: &Worker, id: u64) -> UnixStream {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    hand_over(worker, id, ClientKind::Nbd, theirs.into());
    ours.read_exact(&mut [0; 18]).unwrap();
    ours.write_all(&3u32.to_be_bytes()).unwrap();
    ours.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    ours.read_exact(&mut [0; 10]).unwrap();
    ours
}

const WRITE: u16 = 1;
const DISC: u16 = 2;

fn request(command: u16, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&7u64.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes
}

/// Writes more than there is room for, and takes its leave.
fn overfill_and_leave(mut client: &UnixStream) {
    client.write_all(&request(WRITE, 0, 2 << 20)).unwrap();
    client.write_all(&vec![1; 2 << 20]).unwrap();
    client.write_all(&request(DISC, 0, 0)).unwrap();
}

/// What the worker used of a processor in one second.
fn load(worker: &Worker) -> f64 {
    let used = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", worker.child.id())).unwrap();
        let fields: Vec<&str> = stat[stat.rfind(')').unwrap()..].split(' ').collect();
        fields[12].parse::<u64>().unwrap() + fields[13].parse::<u64>().unwrap()
    };
    let (before, begun) = (used(), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    (used() - before) as f64 / rustix::param::clock_ticks_per_second() as f64 / begun.elapsed().as_secs_f64()
}

fn ends(worker: &mut Worker) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while worker.child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "the worker stays although nobody is left");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_client_that_left_while_its_write_waits_costs_no_processor_time() {
    for closes in [true, false] {
        let (mut worker, _dir) = worker();
        let client = client(&worker, 1);
        overfill_and_leave(&client);
        // It closes its socket, or only its own direction and goes on waiting for the answer.
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let waiting = (!closes).then_some(client);
        wait_for_event(&worker, "the write cache is full");
        let load = load(&worker);
        assert!(load < 0.2, "{load} of a processor, closed: {closes}");
        // Without supervisor and clients there is nobody for whom to go on.
        drop(waiting);
        drop(std::mem::replace(&mut worker.channel, channel::pair().unwrap().0));
        ends(&mut worker);
    }
}

#[test]
fn a_client_that_left_does_not_stand_in_the_way_of_a_reset() {
    let (worker, _dir) = worker();
    let client = client(&worker, 1);
    overfill_and_leave(&client);
    drop(client);
    wait_for_event(&worker, "the write cache is full");
    channel::send(&worker.channel, &ToWorker::Reset { force: false }, &[]).unwrap();
    let (mut reset, mut gone) = (false, false);
    while !(reset && gone) {
        match worker.next() {
            FromWorker::ResetDone { result } => reset = result.expect("nobody is connected") > 1,
            FromWorker::ClientGone { id: 1, error } => gone = error.is_none(),
            other => panic!("{other:?}"),
        }
    }
    worker.kill();
}

#[test]
fn a_vmm_that_says_nothing_makes_way_for_one_that_does() {
    let (worker, _dir) = worker();
    let (_mute, theirs) = UnixStream::pair().unwrap();
    hand_over(&worker, 1, ClientKind::VhostUser, theirs.into());
    let begun = Instant::now();
    match worker.next() {
        FromWorker::ClientGone { id: 1, error: Some(error) } => {
            assert_eq!(error.kind, ErrorKind::Client);
            assert!(error.text.contains("said nothing"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    assert!(begun.elapsed() > Duration::from_secs(9));
    let (vmm, socket) = vmm::Vmm::pair();
    let mut connection = Connection::new(socket.try_clone().unwrap()).unwrap();
    hand_over(&worker, 2, ClientKind::VhostUser, socket);
    vmm.send(1, &[], &[]);
    relay(&worker, 2, &mut connection, 1);
    assert!(vmm::wait(&vmm.socket, 10));
    worker.kill();
}

#[test]
fn a_broken_queue_is_told_of_while_its_vmm_stays() {
    let (worker, _dir) = worker();
    let (vmm, socket) = vmm::Vmm::pair();
    let mut connection = Connection::new(socket.try_clone().unwrap()).unwrap();
    hand_over(&worker, 1, ClientKind::VhostUser, socket);
    let memory = vmm::GuestMemory::new(vmm::MEMORY_BYTES, vmm::GPA, vmm::USER);
    let mut driver = vmm::Driver::new(16, vmm::RING_AT, false);
    let vring = |num: u32| [0, num].iter().flat_map(|n| n.to_ne_bytes()).collect::<Vec<u8>>();
    vmm.send(2, &vmm::VERSION_1.to_ne_bytes(), &[]);
    let mut region = vec![0; 8];
    region[0] = 1;
    region.extend_from_slice(&memory.region());
    vmm.send(5, &region, &[memory.fd.as_fd()]);
    vmm.send(8, &vring(16), &[]);
    let mut addresses = vring(0);
    for gpa in [driver.descriptors, driver.used, driver.available] {
        addresses.extend_from_slice(&gpa.wrapping_add(driver.user_offset).to_ne_bytes());
    }
    addresses.extend_from_slice(&[0; 8]);
    vmm.send(9, &addresses, &[]);
    let error = vmm::event();
    vmm.send(14, &0u64.to_ne_bytes(), &[error.as_fd()]);
    vmm.send(12, &0u64.to_ne_bytes(), &[driver.kick.as_fd()]);
    relay(&worker, 1, &mut connection, 6);
    driver.offer(&memory, 16);
    driver.kick();
    wait_for_event(&worker, "VMM 1: queue 0: a head lies beyond the descriptor table: 16");
    assert!(vmm::wait(&error, 10), "and the VMM by its eventfd");
    worker.kill();
}
