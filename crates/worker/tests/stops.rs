//! A VMM stops its queues while the base image cannot be read: every read of it takes [`LATENCY`]. A worker, a supervisor's part
//! and a guest's driver.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;
#[path = "../../export/tests/vhost_user_blk/vmm.rs"]
mod vmm;

use common::{Memory, QUEUES, Worker, spec};
use spillway_core::Mode;
use spillway_export::vhost_user_blk::{Connection, Packet, Record, Reply, inflight_table};
use spillway_worker::channel::{self, ClientKind, FromWorker, ToWorker};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use vmm::{Driver, GPA, GuestMemory, USER, Vmm};

const LATENCY: Duration = Duration::from_secs(3);
/// How soon a stop is answered that does not wait for the image.
const PROMPT: Duration = Duration::from_secs(1);
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);

const SIZE: u16 = 16;
const BLOCK: usize = 4096;
/// What a queue has of the guest's memory: its ring, and from [`BUFFERS`] on the buffers of each request in their order.
const SHARE: u64 = 1 << 20;
const BUFFERS: u64 = 0x10000;
/// A header, a status byte, and a block of data behind them.
const BUFFER: u64 = 2 * BLOCK as u64;

/// GET_INFLIGHT_FD's table, as the VMM keeps it.
struct Table {
    description: Vec<u8>,
    memory: GuestMemory,
}

impl Table {
    /// How many requests of queue 0 are marked.
    fn marked(&self) -> usize {
        (0..u64::from(SIZE)).filter(|head| self.memory.read(16 + head * 16, 1) == [1]).count()
    }
}

struct Machine {
    disk: Memory,
    worker: Worker,
    vmm: Vmm,
    connection: Connection,
    socket: OwnedFd,
    own_table: OwnedFd,
    record: Record,
    guest: GuestMemory,
    drivers: Vec<Driver>,
    /// Requests that each driver has offered.
    offered: [u64; QUEUES as usize],
    table: Option<Table>,
    _dir: tempfile::TempDir,
}

fn vring(index: u16, num: u16) -> Vec<u8> {
    [index, num].iter().flat_map(|&n| u32::from(n).to_ne_bytes()).collect()
}

fn driver(queue: u16) -> Driver {
    Driver::new(SIZE, GPA + u64::from(queue) * SHARE, false)
}

impl Machine {
    /// With a table of requests in flight, or without.
    fn start(with_table: bool) -> Machine {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let disk = Memory::new(spec(Mode::Ram, 16 << 20, 0), dir.path()).slow_base(dir.path(), LATENCY);
        let worker = disk.start();
        let (vmm, socket) = Vmm::pair();
        let mut machine = Machine {
            disk,
            worker,
            vmm,
            connection: Connection::new(socket.try_clone().unwrap()).unwrap(),
            socket,
            own_table: inflight_table(QUEUES).unwrap(),
            record: Record::default(),
            guest: GuestMemory::new(u64::from(QUEUES) * SHARE, GPA, USER),
            drivers: (0..QUEUES).map(driver).collect(),
            offered: [0; QUEUES as usize],
            table: None,
            _dir: dir,
        };
        machine.hand_over();
        machine.tell(2, &(vmm::VERSION_1 | vmm::PROTOCOL_FEATURES).to_ne_bytes(), &[]);
        let offered = machine.tell(15, &[], &[]).unwrap().0;
        machine.tell(16, &offered, &[]);
        if with_table {
            machine.make_table();
        }
        let region = [vec![0; 8], machine.guest.region()].concat();
        let fd = machine.guest.fd.try_clone().unwrap();
        machine.tell(37, &region, &[fd.as_fd()]);
        machine.start_queues([0; QUEUES as usize]);
        machine
    }

    /// The worker gets the connection.
    fn hand_over(&self) {
        let message = ToWorker::Client { id: 1, kind: ClientKind::VhostUser };
        channel::send(&self.worker.channel, &message, &[self.socket.as_fd(), self.own_table.as_fd()])
            .unwrap();
    }

    /// The VMM sends a message, and the supervisor relays it. Returns the answer.
    fn tell(
        &mut self,
        request: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        self.vmm.send(request, payload, fds);
        let packet = self.connection.receive().unwrap().expect("a whole message");
        self.relay(1, &packet);
        let (accepted, answer, fd) = loop {
            match channel::receive(&self.worker.channel).unwrap().expect("the worker lives") {
                (FromWorker::Answered { accepted, answer, .. }, fds) => {
                    break (accepted, answer, fds.into_iter().next());
                }
                (FromWorker::Event { .. }, _) => {}
                other => panic!("{other:?}"),
            }
        };
        assert!(accepted, "message {request}");
        self.record.update(packet, answer.as_deref());
        let bytes = answer?;
        self.connection.send(&Reply { bytes, fd }).unwrap();
        let (answered, payload, fds) = self.vmm.reply().unwrap();
        assert_eq!(answered, request);
        Some((payload, fds.into_iter().next()))
    }

    fn relay(&self, id: u64, packet: &Packet) {
        let fds: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
        let message = ToWorker::Message { id, bytes: packet.bytes.clone() };
        channel::send(&self.worker.channel, &message, &fds).unwrap();
    }

    /// The worker dies, and another one goes on.
    fn kill_worker(&mut self) {
        std::mem::replace(&mut self.worker, self.disk.start()).kill();
        self.hand_over();
        for packet in self.record.packets() {
            let fds: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
            let message = ToWorker::Replay { id: 1, bytes: packet.bytes.clone() };
            channel::send(&self.worker.channel, &message, &fds).unwrap();
        }
    }

    fn make_table(&mut self) {
        let mut wanted = vec![0; 16];
        wanted.extend_from_slice(&QUEUES.to_ne_bytes());
        wanted.extend_from_slice(&SIZE.to_ne_bytes());
        wanted.resize(24, 0);
        let (description, fd) = self.tell(31, &wanted, &[]).unwrap();
        let len = u64::from_ne_bytes(description[..8].try_into().unwrap());
        let memory = GuestMemory::of(fd.expect("it comes with the table"), len, 0, 0);
        self.table = Some(Table { description, memory });
    }

    /// The VMM sets its queues up, as QEMU does it at the start of a machine and when it goes on.
    fn start_queues(&mut self, bases: [u16; QUEUES as usize]) {
        if let Some(table) = &self.table {
            let (description, fd) = (table.description.clone(), table.memory.fd.try_clone().unwrap());
            self.tell(32, &description, &[fd.as_fd()]);
        }
        for (queue, base) in (0..QUEUES).zip(bases) {
            let driver = &self.drivers[usize::from(queue)];
            let (kick, call) = (driver.kick.try_clone().unwrap(), driver.call.try_clone().unwrap());
            let mut addresses = vring(queue, 0);
            for gpa in [driver.descriptors, driver.used, driver.available] {
                addresses.extend_from_slice(&gpa.wrapping_add(driver.user_offset).to_ne_bytes());
            }
            addresses.extend_from_slice(&[0; 8]);
            self.tell(8, &vring(queue, SIZE), &[]);
            self.tell(10, &vring(queue, base), &[]);
            self.tell(9, &addresses, &[]);
            self.tell(13, &u64::from(queue).to_ne_bytes(), &[call.as_fd()]);
            self.tell(12, &u64::from(queue).to_ne_bytes(), &[kick.as_fd()]);
            self.tell(18, &vring(queue, 1), &[]);
        }
    }

    /// GET_VRING_BASE: the index, and how long the answer took.
    fn stop(&mut self, queue: u16) -> (u16, Duration) {
        let begun = Instant::now();
        let (state, _) = self.tell(11, &vring(queue, 0), &[]).unwrap();
        (u32::from_ne_bytes(state[4..].try_into().unwrap()) as u16, begun.elapsed())
    }

    /// Offers a read, or a write of bytes 0x77, of so many sectors. Returns where its data is, behind its status byte.
    fn offer(&mut self, queue: u16, is_write: bool, sector: u64, sectors: u32) -> u64 {
        let i = usize::from(queue);
        let at = GPA + u64::from(queue) * SHARE + BUFFERS + self.offered[i] * BUFFER;
        self.offered[i] += 1;
        let data = at + BLOCK as u64;
        self.guest.write(at, &vmm::Rig::header(u32::from(is_write), sector));
        self.guest.write(data - 1, &[0xee]);
        self.guest.write(data, &[if is_write { 0x77 } else { 0xee }; BLOCK]);
        let buffers = [(at, 16, false), (data, sectors * 512, !is_write), (data - 1, 1, true)];
        let driver = &mut self.drivers[i];
        let head = driver.chain(&self.guest, &buffers, None);
        driver.offer(&self.guest, head);
        driver.kick();
        data
    }

    /// Waits for so many answers of a queue, and looks that there are no more. Returns their heads in order.
    fn used(&mut self, queue: u16, count: usize) -> Vec<u16> {
        let (mut heads, begun) = (Vec::new(), Instant::now());
        let driver = &mut self.drivers[usize::from(queue)];
        while heads.len() < count {
            match driver.take_used(&self.guest) {
                Some((head, _)) => heads.push(head),
                None => assert!(begun.elapsed() < PATIENCE && vmm::wait(&driver.call, 60), "{heads:?}"),
            }
            vmm::drain(&driver.call);
        }
        assert_eq!(driver.take_used(&self.guest), None);
        heads
    }

    /// All that belongs to a queue.
    fn share(&self, queue: u16) -> Vec<u8> {
        self.guest.read(GPA + u64::from(queue) * SHARE, SHARE as usize)
    }

    /// Three requests of queue 0 that wait for the image: a read, a write of a part of a block, and a read of that block, which
    /// waits behind the write. Returns where their data is.
    fn three_wait(&mut self) -> [u64; 3] {
        let data = [self.offer(0, false, 24, 8), self.offer(0, true, 41, 1), self.offer(0, false, 40, 8)];
        let begun = Instant::now();
        while self.table.as_ref().is_some_and(|table| table.marked() < 3) {
            assert!(begun.elapsed() < PATIENCE, "they are not taken");
            std::thread::yield_now();
        }
        data
    }

    /// Waits until each read that has begun by now has ended, by one that begins now.
    fn until_reads_have_ended(&mut self) {
        let data = self.offer(1, false, 800, 8);
        self.used(1, 1);
        assert_eq!(self.guest.read(data, BLOCK), [100 + 1; BLOCK]);
    }
}

#[test]
fn requests_that_wait_for_the_image_are_done_when_the_queue_starts_again() {
    for kills in [false, true] {
        let mut machine = Machine::start(true);
        let data = machine.three_wait();
        let (base, took) = machine.stop(0);
        assert!(base == 3 && took < PROMPT, "{base} after {took:?}");
        let table = machine.table.as_ref().unwrap();
        assert_eq!(table.marked(), 3);
        let before = machine.share(0);
        if kills {
            machine.kill_worker();
        }
        machine.until_reads_have_ended();
        assert!(machine.share(0) == before, "memory of a queue that was stopped was written");

        let (base, _) = machine.stop(1);
        machine.start_queues([3, base]);
        if kills {
            machine.kill_worker();
        }
        let mut heads = machine.used(0, 3);
        heads.sort_unstable();
        heads.dedup();
        assert_eq!(heads.len(), 3, "each once");
        for data in data {
            assert_eq!(machine.guest.read(data - 1, 1), [0], "its status");
        }
        assert_eq!(machine.guest.read(data[0], BLOCK), [3 + 1; BLOCK]);
        let mut block = [5 + 1; BLOCK];
        block[512..1024].fill(0x77);
        assert_eq!(machine.guest.read(data[2], BLOCK), block);
        assert_eq!(machine.table.as_ref().unwrap().marked(), 0);
        machine.worker.kill();
    }
}

#[test]
fn requests_of_before_a_reset_of_the_device_are_never_answered() {
    let mut machine = Machine::start(true);
    let old = machine.three_wait();
    let (base, took) = machine.stop(0);
    assert!(base == 3 && took < PROMPT, "{base} after {took:?}");
    let (base, _) = machine.stop(1);
    // The guest's next driver has a new ring, and uses the same heads again. QEMU makes a new table.
    machine.guest.write(GPA, &[0; BUFFERS as usize]);
    machine.drivers[0] = driver(0);
    machine.make_table();
    machine.start_queues([0, base]);
    machine.offered[0] = 8;
    let data = machine.offer(0, false, 56, 8);
    assert_eq!(machine.used(0, 1).len(), 1);
    machine.until_reads_have_ended();
    assert_eq!(machine.drivers[0].take_used(&machine.guest), None);
    assert_eq!(machine.guest.read(data, BLOCK), [7 + 1; BLOCK]);
    for (data, content) in old.into_iter().zip([0xee, 0x77, 0xee]) {
        assert_eq!(machine.guest.read(data - 1, 1), [0xee], "its status");
        assert_eq!(machine.guest.read(data, BLOCK), [content; BLOCK]);
    }
    // What was not answered was not done.
    let block = machine.offer(0, false, 40, 8);
    assert_eq!(machine.used(0, 1).len(), 1);
    assert_eq!(machine.guest.read(block, BLOCK), [5 + 1; BLOCK]);
    machine.worker.kill();
}

#[test]
fn a_vmm_without_a_table_waits_until_its_requests_are_done() {
    let mut machine = Machine::start(false);
    let data = machine.offer(0, false, 24, 8);
    // The turn that serves the second of these has taken it: a queue that stops takes none.
    for _ in 0..2 {
        machine.offer(1, true, 800, 8);
        machine.used(1, 1);
    }
    let (base, took) = machine.stop(0);
    assert!(base == 1 && took > PROMPT, "{base} after {took:?}");
    assert_eq!(machine.used(0, 1).len(), 1);
    assert_eq!(machine.guest.read(data, BLOCK), [3 + 1; BLOCK]);
    machine.worker.kill();
}

#[test]
fn a_vmm_that_leaves_is_let_go_at_once() {
    let mut machine = Machine::start(true);
    machine.three_wait();
    let before = machine.share(0);
    let begun = Instant::now();
    channel::send(&machine.worker.channel, &ToWorker::Left { id: 1, error: None }, &[]).unwrap();
    assert!(matches!(machine.worker.next(), FromWorker::ClientGone { id: 1, error: None }));
    assert!(begun.elapsed() < PROMPT);
    assert!(machine.share(0) == before);
    machine.worker.kill();
}
