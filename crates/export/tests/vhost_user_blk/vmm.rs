//! A tiny VMM and guest driver, written from the specifications only: memfd guest memory, control messages as
//! bytes, a driver for split virtqueues, and a disk that is a `Vec<u8>`. Shares no code with the export.

#![allow(dead_code)]

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use spillway_core::{Errno, GuestBuffers, Operation, Request};
use spillway_export::vhost_user_blk::{
    Change, Connection, DeviceConfig, Disconnect, Error, Frontend, Handled, Packet, Record, inflight_table,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU16, Ordering, fence};

pub const DISK_BYTES: u64 = 1 << 20;
pub const GPA: u64 = 0x1_0000_0000;
/// User addresses differ from guest addresses, so that mixing them up shows.
pub const USER: u64 = 0x7f00_0000_0000;

pub const F_NEXT: u16 = 1;
pub const F_WRITE: u16 = 2;
pub const F_INDIRECT: u16 = 4;
pub const EVENT_IDX: u64 = 1 << 29;
pub const INDIRECT: u64 = 1 << 28;
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
pub const FLUSH: u64 = 1 << 9;
pub const CONFIG_WCE: u64 = 1 << 11;
pub const VERSION_1: u64 = 1 << 32;
pub const ALL_FEATURES: u64 = EVENT_IDX | INDIRECT | PROTOCOL_FEATURES | FLUSH | CONFIG_WCE | VERSION_1;
pub const REPLY_ACK: u64 = 1 << 3;

/// `SPILLWAY_SEED`, or the clock's; printed, so that a failure can be run again.
pub fn seed(name: &str) -> u64 {
    let clock =
        || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = std::env::var("SPILLWAY_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(clock);
    println!("{name}: SPILLWAY_SEED={seed}");
    seed
}

/// xorshift64*.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// One piece of guest memory.
pub struct GuestMemory {
    pub fd: OwnedFd,
    base: *mut u8,
    pub len: u64,
    pub gpa: u64,
    pub user: u64,
}

// SAFETY: plain shared memory; tests order their accesses through the ring.
unsafe impl Send for GuestMemory {}
// SAFETY: as above.
unsafe impl Sync for GuestMemory {}

impl GuestMemory {
    pub fn new(len: u64, gpa: u64, user: u64) -> GuestMemory {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        GuestMemory::of(fd, len, gpa, user)
    }

    pub fn of(fd: OwnedFd, len: u64, gpa: u64, user: u64) -> GuestMemory {
        // SAFETY: a new mapping.
        let base = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            mmap(std::ptr::null_mut(), len as usize, protection, MapFlags::SHARED, &fd, 0).unwrap()
        };
        GuestMemory { fd, base: base.cast(), len, gpa, user }
    }

    pub fn at(&self, gpa: u64) -> *mut u8 {
        assert!(gpa >= self.gpa && gpa - self.gpa < self.len, "{gpa:#x}");
        self.base.wrapping_add((gpa - self.gpa) as usize)
    }

    pub fn write(&self, gpa: u64, bytes: &[u8]) {
        assert!(gpa - self.gpa + bytes.len() as u64 <= self.len);
        // SAFETY: inside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(gpa), bytes.len()) }
    }

    pub fn read(&self, gpa: u64, len: usize) -> Vec<u8> {
        assert!(gpa - self.gpa + len as u64 <= self.len);
        let mut bytes = vec![0; len];
        // SAFETY: inside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(self.at(gpa), bytes.as_mut_ptr(), len) }
        bytes
    }

    pub fn u16(&self, gpa: u64) -> &AtomicU16 {
        // SAFETY: inside the mapping, and tests use even addresses.
        unsafe { &*self.at(gpa).cast::<AtomicU16>() }
    }

    /// The region as a message carries it.
    pub fn region(&self) -> Vec<u8> {
        [self.gpa, self.len, self.user, 0].iter().flat_map(|n| n.to_ne_bytes()).collect()
    }
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        // SAFETY: base and len are the mapping's.
        unsafe { munmap(self.base.cast(), self.len as usize).unwrap() }
    }
}

/// The VMM's end of the control socket.
pub struct Vmm {
    pub socket: OwnedFd,
}

impl Vmm {
    pub fn pair() -> (Vmm, OwnedFd) {
        let flags = SocketFlags::CLOEXEC;
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        (Vmm { socket: a }, b)
    }

    pub fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            [request, flags, payload.len() as u32].iter().flat_map(|n| n.to_ne_bytes()).collect();
        bytes.extend_from_slice(payload);
        bytes
    }

    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let sent = sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
        assert_eq!(sent.unwrap(), bytes.len());
    }

    pub fn send(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send_bytes(&Vmm::message(request, 1, payload), fds);
    }

    /// The next reply, if it has arrived: request, payload, descriptors.
    pub fn reply(&self) -> Option<(u32, Vec<u8>, Vec<OwnedFd>)> {
        let mut header = [0; 12];
        let mut fds = Vec::new();
        if self.receive(&mut header, &mut fds) == 0 {
            return None;
        }
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!(word(4), 1 | 4, "version and reply flag");
        let mut payload = vec![0; word(8) as usize];
        if !payload.is_empty() {
            assert_eq!(self.receive(&mut payload, &mut fds), payload.len());
        }
        Some((word(0), payload, fds))
    }

    fn receive(&self, to: &mut [u8], fds: &mut Vec<OwnedFd>) -> usize {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let len = to.len();
        match recvmsg(&self.socket, &mut [IoSliceMut::new(to)], &mut control, flags) {
            Ok(received) => {
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(more) = message {
                        fds.extend(more);
                    }
                }
                assert!(received.bytes == 0 || received.bytes == len);
                received.bytes
            }
            Err(rustix::io::Errno::AGAIN) => 0,
            Err(e) => panic!("{e}"),
        }
    }
}

pub fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// Takes an eventfd's count; 0 if there is none.
pub fn drain(fd: impl AsFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(fd, &mut count) {
        Ok(8) => u64::from_ne_bytes(count),
        Err(rustix::io::Errno::AGAIN) => 0,
        other => panic!("{other:?}"),
    }
}

/// Waits until it is readable; false after so many seconds.
pub fn wait(fd: impl AsFd, seconds: i64) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: seconds, tv_nsec: 0 })).unwrap() == 1
}

/// A guest's side of one queue.
pub struct Driver {
    pub size: u16,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    pub user_offset: u64,
    pub free: Vec<u16>,
    pub available_index: u16,
    pub used_index: u16,
    pub event_idx: bool,
    pub kick: OwnedFd,
    pub call: OwnedFd,
}

/// A buffer of a chain: address, length, device-writable.
pub type Buffer = (u64, u32, bool);

impl Driver {
    /// A queue whose areas lie from `at` on, which takes `Driver::bytes(size)`.
    pub fn new(size: u16, at: u64, event_idx: bool) -> Driver {
        let entries = u64::from(size);
        let available = at + entries * 16;
        let used = (available + entries * 2 + 6).next_multiple_of(4);
        Driver {
            size,
            descriptors: at,
            available,
            used,
            user_offset: USER.wrapping_sub(GPA),
            free: (0..size).rev().collect(),
            available_index: 0,
            used_index: 0,
            event_idx,
            kick: event(),
            call: event(),
        }
    }

    pub fn set_descriptor(
        memory: &GuestMemory,
        table: u64,
        index: u16,
        buffer: Buffer,
        flags: u16,
        next: u16,
    ) {
        let (address, len, writable) = buffer;
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(&(flags | if writable { F_WRITE } else { 0 }).to_le_bytes());
        bytes.extend_from_slice(&next.to_le_bytes());
        memory.write(table + u64::from(index) * 16, &bytes);
    }

    /// Writes a chain, of descriptors of this queue or in a table at `table`. Returns its head.
    pub fn chain(&mut self, memory: &GuestMemory, buffers: &[Buffer], table: Option<u64>) -> u16 {
        if let Some(table) = table {
            for (index, &buffer) in (0..).zip(buffers) {
                let last = usize::from(index) + 1 == buffers.len();
                let flags = if last { 0 } else { F_NEXT };
                Driver::set_descriptor(memory, table, index, buffer, flags, index + 1);
            }
            let head = self.free.pop().expect("a free descriptor");
            let buffer = (table, buffers.len() as u32 * 16, false);
            Driver::set_descriptor(memory, self.descriptors, head, buffer, F_INDIRECT, 0);
            return head;
        }
        let indices: Vec<u16> = buffers.iter().map(|_| self.free.pop().expect("a free descriptor")).collect();
        for (at, &buffer) in buffers.iter().enumerate() {
            let next = indices.get(at + 1).copied();
            let flags = if next.is_some() { F_NEXT } else { 0 };
            Driver::set_descriptor(memory, self.descriptors, indices[at], buffer, flags, next.unwrap_or(0));
        }
        indices[0]
    }

    /// Puts a head in the available ring and moves the index.
    pub fn offer(&mut self, memory: &GuestMemory, head: u16) {
        let slot = self.available + 4 + u64::from(self.available_index % self.size) * 2;
        memory.u16(slot).store(head, Ordering::Relaxed);
        self.available_index = self.available_index.wrapping_add(1);
        memory.u16(self.available + 2).store(self.available_index, Ordering::Release);
    }

    /// Whether the device wants to be told of what was offered since `old` (2.7.10.1).
    pub fn must_kick(&self, memory: &GuestMemory, old: u16) -> bool {
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = memory.u16(self.used + 4 + u64::from(self.size) * 8).load(Ordering::Relaxed);
            let new = self.available_index;
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            memory.u16(self.used).load(Ordering::Relaxed) & 1 == 0
        }
    }

    pub fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// The next used element: head and length. The caller frees the descriptors.
    pub fn take_used(&mut self, memory: &GuestMemory) -> Option<(u16, u32)> {
        if memory.u16(self.used + 2).load(Ordering::Acquire) == self.used_index {
            return None;
        }
        let at = self.used + 4 + u64::from(self.used_index % self.size) * 8;
        self.used_index = self.used_index.wrapping_add(1);
        let bytes = memory.read(at, 8);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        Some((u16::try_from(word(0)).unwrap(), word(4)))
    }

    /// Asks for an interrupt at the next used element, or for none. True: there is one already (2.7.7).
    pub fn want_interrupt(&self, memory: &GuestMemory, wanted: bool) -> bool {
        if self.event_idx {
            let event = if wanted { self.used_index } else { self.used_index.wrapping_sub(1) };
            memory.u16(self.available + 4 + u64::from(self.size) * 2).store(event, Ordering::Relaxed);
        } else {
            memory.u16(self.available).store(u16::from(!wanted), Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        memory.u16(self.used + 2).load(Ordering::Acquire) != self.used_index
    }
}

pub fn config() -> DeviceConfig {
    DeviceConfig { size_bytes: DISK_BYTES, queues: 16, serial: "spillway-test".into(), writeback: true }
}

/// A disk on which each sector is different.
fn content() -> Vec<u8> {
    let mut disk = vec![0; DISK_BYTES as usize];
    for (n, sector) in disk.chunks_mut(512).enumerate() {
        sector.fill(n as u8);
        sector[n % 512] = !(n as u8);
        sector[..2].copy_from_slice(&(n as u16).to_le_bytes());
    }
    disk
}

/// VMM, guest memory, one queue, the export, and a disk.
pub struct Rig {
    pub vmm: Vmm,
    pub memory: GuestMemory,
    pub driver: Driver,
    pub frontend: Frontend,
    pub changes: Vec<Change>,
    pub disk: Vec<u8>,
    pub features: u64,
    pub relay: Option<Relay>,
}

pub const RING_AT: u64 = GPA;
/// Where tests put headers, tables and data.
pub const SCRATCH: u64 = GPA + 0x10000;
pub const MEMORY_BYTES: u64 = 4 << 20;
/// Where the data of [`Rig::offer`] comes to.
pub const READ_DATA: u64 = SCRATCH + 4096;

/// What a supervisor does: holds the socket, relays, remembers.
pub struct Relay {
    connection: Connection,
    pub record: Record,
    table: OwnedFd,
    socket: OwnedFd,
}

impl Relay {
    fn resume(&self, changes: &mut Vec<Change>) -> Frontend {
        let (socket, table) = (self.socket.try_clone().unwrap(), self.table.try_clone().unwrap());
        let mut frontend = Frontend::resume(socket, config(), 1, table).unwrap();
        changes.clear();
        for packet in self.record.packets() {
            frontend.replay(copy(packet), changes).unwrap();
        }
        frontend
    }
}

fn copy(packet: &Packet) -> Packet {
    let fds = packet.fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    Packet { bytes: packet.bytes.clone(), fds }
}

impl Rig {
    /// One whose messages come through a supervisor; not set up.
    pub fn relayed(size: u16, features: u64) -> Rig {
        let mut rig = Rig::unconnected(size, features);
        let (vmm, socket) = Vmm::pair();
        rig.vmm = vmm;
        let relay = Relay {
            connection: Connection::new(socket.try_clone().unwrap()).unwrap(),
            record: Record::default(),
            table: inflight_table(config().queues).unwrap(),
            socket,
        };
        rig.frontend = relay.resume(&mut rig.changes);
        rig.relay = Some(relay);
        rig
    }

    /// The process that served dies, and the next one goes on.
    pub fn die(&mut self) {
        self.frontend = self.relay.as_ref().expect("relayed").resume(&mut self.changes);
    }

    /// What the VMM has sent is handled. In a relayed rig the process dies before each message, and is asked again.
    fn pump(&mut self) {
        let Some(relay) = &mut self.relay else {
            return self.frontend.on_readable(&mut self.changes).unwrap();
        };
        while let Some(packet) = relay.connection.receive().unwrap() {
            // One dies with the message carried out and nobody knowing, the next one hears it again.
            let _ = self.frontend.on_message(copy(&packet), &mut self.changes);
            self.frontend = relay.resume(&mut self.changes);
            let answer = match self.frontend.on_message(copy(&packet), &mut self.changes).unwrap() {
                Handled::Accepted(answer) => {
                    relay.record.update(packet, answer.as_ref().map(|a| &a.bytes[..]));
                    answer
                }
                Handled::Refused(answer) => answer,
                Handled::Pending => panic!("nothing is unfinished"),
            };
            answer.iter().for_each(|answer| relay.connection.send(answer).unwrap());
        }
    }

    /// Everything set up and live: queue 0 with `size` descriptors.
    pub fn new(size: u16, features: u64) -> Rig {
        let mut rig = Rig::unconnected(size, features);
        rig.negotiate();
        rig.add_memory();
        rig.start_queue(0);
        assert!(rig.frontend.is_live(0), "{:?}", rig.frontend.take_notice());
        rig
    }

    pub fn unconnected(size: u16, features: u64) -> Rig {
        let (vmm, socket) = Vmm::pair();
        Rig {
            vmm,
            memory: GuestMemory::new(MEMORY_BYTES, GPA, USER),
            driver: Driver::new(size, RING_AT, features & EVENT_IDX != 0),
            frontend: Frontend::new(socket, config(), 1).unwrap(),
            changes: Vec::new(),
            disk: content(),
            features,
            relay: None,
        }
    }

    /// Connects anew, as after a crash of the back end: the same memory and driver, another session.
    pub fn reconnect(&mut self) {
        let (vmm, socket) = Vmm::pair();
        self.vmm = vmm;
        self.frontend = Frontend::new(socket, config(), 2).unwrap();
        self.changes.clear();
        self.negotiate();
        self.add_memory();
    }

    /// Sends and lets the export handle it.
    pub fn tell(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.vmm.send(request, payload, fds);
        self.pump();
    }

    pub fn ask(&mut self, request: u32, payload: &[u8]) -> Vec<u8> {
        self.tell(request, payload, &[]);
        let (answered, payload, _) = self.vmm.reply().expect("a reply");
        assert_eq!(answered, request);
        payload
    }

    /// Sends with need_reply; whether it was carried out.
    pub fn try_tell(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        self.vmm.send_bytes(&Vmm::message(request, 1 | 8, payload), fds);
        self.pump();
        let (answered, payload, _) = self.vmm.reply().expect("an acknowledgement");
        assert_eq!(answered, request);
        u64::from_ne_bytes(payload.try_into().unwrap()) == 0
    }

    pub fn negotiate(&mut self) {
        let features = self.features.to_ne_bytes();
        self.tell(3, &[], &[]);
        self.tell(2, &features, &[]);
        if self.features & PROTOCOL_FEATURES != 0 {
            let offered = self.ask(15, &[]);
            self.tell(16, &offered, &[]);
        }
    }

    pub fn add_memory(&mut self) {
        let mut payload = vec![0; 8];
        payload.extend_from_slice(&self.memory.region());
        let fd = self.memory.fd.try_clone().unwrap();
        self.tell(37, &payload, &[fd.as_fd()]);
    }

    pub fn vring(index: u32, num: u32) -> Vec<u8> {
        [index, num].iter().flat_map(|n| n.to_ne_bytes()).collect()
    }

    pub fn vring_address(&self, index: u32) -> Vec<u8> {
        let offset = self.driver.user_offset;
        let mut payload: Vec<u8> = Rig::vring(index, 0);
        let areas = [self.driver.descriptors, self.driver.used, self.driver.available];
        for address in areas.map(|gpa| gpa.wrapping_add(offset)) {
            payload.extend_from_slice(&address.to_ne_bytes());
        }
        payload.extend_from_slice(&[0; 8]);
        payload
    }

    /// Sets the driver's queue up from its present base.
    pub fn start_queue(&mut self, base: u16) {
        self.start_queue_as(0, base);
    }

    /// The same as the queue of this number.
    pub fn start_queue_as(&mut self, index: u32, base: u16) {
        self.tell(8, &Rig::vring(index, u32::from(self.driver.size)), &[]);
        self.tell(10, &Rig::vring(index, u32::from(base)), &[]);
        let addresses = self.vring_address(index);
        self.tell(9, &addresses, &[]);
        let (kick, call) = (self.driver.kick.try_clone().unwrap(), self.driver.call.try_clone().unwrap());
        self.tell(13, &u64::from(index).to_ne_bytes(), &[call.as_fd()]);
        self.tell(12, &u64::from(index).to_ne_bytes(), &[kick.as_fd()]);
        if self.features & PROTOCOL_FEATURES != 0 {
            self.tell(18, &Rig::vring(index, 1), &[]);
        }
    }

    /// Does one request on the disk. Reads and writes go in two steps, to try `at`.
    pub fn perform(&mut self, request: &Request) -> Result<(), Errno> {
        perform(&mut self.frontend, &mut self.disk, request)
    }

    /// Processes queue 0 once, as the reactor does. The requests that were taken.
    pub fn process(&mut self) -> Vec<Request> {
        let mut taken = Vec::new();
        while let Some(request) = self.frontend.next(0) {
            let result = self.perform(&request);
            self.frontend.complete(request.token, result);
            taken.push(request);
        }
        self.frontend.publish(0);
        taken
    }

    /// Offers a read of sector `n`, one of a few under way at a time. Its data comes to [`READ_DATA`] + `n` sectors.
    pub fn offer(&mut self, n: u64) -> u16 {
        let header = SCRATCH + n * 32;
        self.memory.write(header, &Rig::header(0, n));
        self.memory.write(header + 16, &[0xee]);
        let buffers = [(header, 16, false), (READ_DATA + n * 512, 512, true), (header + 16, 1, true)];
        let head = self.driver.chain(&self.memory, &buffers, None);
        self.driver.offer(&self.memory, head);
        head
    }

    /// Does a request that was taken, and gives it to the export to be answered.
    pub fn finish(&mut self, request: &Request) {
        let result = self.perform(request);
        self.frontend.complete(request.token, result);
    }

    pub fn header(kind: u32, sector: u64) -> Vec<u8> {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend_from_slice(&[0; 4]);
        header.extend_from_slice(&sector.to_le_bytes());
        header
    }

    /// Offers a chain and processes the queue: the status byte at `status`, and the used length. `None` if it
    /// was not answered.
    pub fn run(&mut self, buffers: &[Buffer], table: Option<u64>, status: u64) -> Option<(u8, u32)> {
        self.memory.write(status, &[0xee]);
        let free = self.driver.free.clone();
        let head = self.driver.chain(&self.memory, buffers, table);
        self.driver.offer(&self.memory, head);
        self.process();
        let used = self.driver.take_used(&self.memory)?;
        assert_eq!(used.0, head);
        assert_eq!(self.driver.take_used(&self.memory), None);
        self.driver.free = free;
        Some((self.memory.read(status, 1)[0], used.1))
    }

    /// The usual request of three buffers: header at `SCRATCH`, status at `SCRATCH + 16`, data behind.
    pub fn simple(&mut self, kind: u32, sector: u64, data: Option<Buffer>) -> Option<(u8, u32)> {
        self.memory.write(SCRATCH, &Rig::header(kind, sector));
        let mut buffers = vec![(SCRATCH, 16, false)];
        buffers.extend(data);
        buffers.push((SCRATCH + 16, 1, true));
        self.run(&buffers, None, SCRATCH + 16)
    }
}

/// Does one request on a disk of bytes.
pub fn perform(frontend: &mut impl GuestBuffers, disk: &mut [u8], request: &Request) -> Result<(), Errno> {
    let start = request.sector as usize * 512;
    let len = request.sectors as usize * 512;
    let range = &mut disk[start..start + len];
    let half = len / 3;
    match request.operation {
        Operation::Read => {
            let (a, b) = range.split_at(half);
            frontend.copy_to_guest(request.token, half as u32, b)?;
            frontend.copy_to_guest(request.token, 0, a)
        }
        Operation::Write { .. } => {
            let (a, b) = range.split_at_mut(half);
            frontend.copy_from_guest(request.token, half as u32, b)?;
            frontend.copy_from_guest(request.token, 0, a)
        }
        Operation::Flush => Ok(()),
        Operation::Discard | Operation::WriteZeroes { .. } => {
            range.fill(0);
            Ok(())
        }
    }
}

pub fn fault(result: Result<(), Disconnect>) -> Error {
    match result {
        Err(Disconnect::Fault(error)) => error,
        other => panic!("not a fault: {other:?}"),
    }
}
