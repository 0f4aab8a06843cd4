//! The vhost-user-blk export between a hostile front end and a disk of bytes: `vhost_messages` sends control
//! messages of any shape, `virtqueue` sets one queue up as it should be and then writes anything into its memory.

use crate::input::Input;
use crate::vmm::{self, Vmm, code, words32, words64};
use spillway_core::{Errno, GuestBuffers, Operation, Request};
use spillway_export::vhost_user_blk::{Change, DeviceConfig, Frontend};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

const DISK: usize = 256 << 10;
/// Messages or steps of one input at most.
const STEPS: usize = 512;
/// VIRTIO_F_VERSION_1, protocol features, FLUSH, CONFIG_WCE, DISCARD, WRITE_ZEROES.
const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 9 | 1 << 11 | 1 << 13 | 1 << 14;
const EVENT_IDX: u64 = 1 << 29;
const INDIRECT: u64 = 1 << 28;
/// Bytes of an in-flight table for one queue.
const INFLIGHT: u64 = 320;

/// The export with a disk of bytes behind it.
struct Rig {
    vmm: Vmm,
    frontend: Frontend,
    changes: Vec<Change>,
    disk: Vec<u8>,
    unfinished: Vec<Request>,
    /// The descriptor that came with the last reply that had one.
    received: Option<OwnedFd>,
    ended: bool,
    /// Requests that were completed, and not withdrawn.
    completed: usize,
}

impl Rig {
    fn new(queues: u16) -> Rig {
        let (vmm, socket) = Vmm::pair();
        let config = DeviceConfig { size_bytes: DISK as u64, queues, serial: "fuzz".into(), writeback: true };
        Rig {
            vmm,
            frontend: Frontend::new(socket, config, 1).expect("a connected socket is enough"),
            changes: Vec::new(),
            disk: vec![7; DISK],
            unfinished: Vec::new(),
            received: None,
            ended: false,
            completed: 0,
        }
    }

    /// Lets the export handle what was sent, and takes its replies.
    fn turn(&mut self) {
        self.ended |= self.frontend.on_readable(&mut self.changes).is_err();
        self.after_control();
    }

    fn after_control(&mut self) {
        for change in std::mem::take(&mut self.changes) {
            if let Change::Stop { queue } = change {
                while let Some(at) = self.unfinished.iter().position(|r| Frontend::queue_of(r.token) == queue)
                {
                    let request = self.unfinished.swap_remove(at);
                    self.frontend.complete(request.token, Err(Errno::CANCELED));
                }
            }
        }
        while let Some((_, _, fds)) = self.vmm.reply() {
            self.received = fds.into_iter().next().or(self.received.take());
        }
    }

    /// Takes requests, at most as many as a turn of the reactor.
    fn take(&mut self, queue: u16) {
        for _ in 0..32 {
            if !self.frontend.is_live(queue) {
                break;
            }
            let Some(request) = self.frontend.next(queue) else { break };
            let end = request.sector.checked_add(u64::from(request.sectors));
            assert!(end.is_some_and(|end| end <= (DISK / 512) as u64), "{request:?} lies outside the disk");
            assert!(self.frontend.owns(request.token) && Frontend::queue_of(request.token) == queue);
            assert!(self.unfinished.iter().all(|other| other.token != request.token), "one token twice");
            self.unfinished.push(request);
        }
    }

    /// Carries one of the unfinished requests out.
    fn finish(&mut self, which: usize) {
        if self.unfinished.is_empty() {
            return;
        }
        let at = which % self.unfinished.len();
        let request = self.unfinished.swap_remove(at);
        let result = carry_out(&mut self.frontend, &mut self.disk, &request, which);
        self.frontend.complete(request.token, result);
        self.completed += 1;
    }

    fn publish(&mut self) {
        for queue in 0..self.frontend.queue_count() {
            self.frontend.publish(queue);
        }
        if !self.ended {
            self.ended |= self.frontend.finish_stops(&mut self.changes).is_err();
            self.after_control();
        }
    }

    /// Everything comes to its end.
    fn end(mut self) {
        while !self.unfinished.is_empty() {
            self.finish(0);
        }
        self.publish();
        assert_eq!(self.frontend.unfinished(), 0, "requests that the export lost count of");
        if self.ended {
            assert!((0..self.frontend.queue_count()).all(|queue| !self.frontend.is_live(queue)));
        }
        while self.frontend.take_notice().is_some() {}
    }
}

/// Does a request on a disk of bytes, its data in two portions.
fn carry_out(
    guest: &mut impl GuestBuffers,
    disk: &mut [u8],
    request: &Request,
    split: usize,
) -> Result<(), Errno> {
    let start = request.sector as usize * 512;
    let range = &mut disk[start..start + request.sectors as usize * 512];
    let half = split % (range.len() + 1);
    match request.operation {
        Operation::Read if split % 5 == 4 => guest.zero_guest(request.token, 0, range.len() as u32),
        Operation::Read => {
            guest.copy_to_guest(request.token, half as u32, &range[half..])?;
            guest.copy_to_guest(request.token, 0, &range[..half])
        }
        Operation::Write { .. } => {
            let (head, tail) = range.split_at_mut(half);
            guest.copy_from_guest(request.token, half as u32, tail)?;
            guest.copy_from_guest(request.token, 0, head)
        }
        Operation::Flush => Ok(()),
        Operation::Discard | Operation::WriteZeroes { .. } => {
            range.fill(0);
            Ok(())
        }
    }
}

/// Control messages of any shape, without descriptors or with some, and processing in between.
pub fn vhost_messages(data: &[u8]) {
    let mut input = Input(data);
    let mut rig = Rig::new(u16::from(input.u8() % 4) + 1);
    let memory = vmm::memory(vmm::MEMORY);
    for _ in 0..STEPS {
        if input.is_empty() || rig.ended {
            break;
        }
        let kind = input.u8();
        let event = vmm::event();
        let one: [BorrowedFd<'_>; 1];
        let two: [BorrowedFd<'_>; 2];
        let fds: &[BorrowedFd<'_>] = match kind >> 5 {
            0..=3 => &[],
            4 => {
                one = [event.as_fd()];
                &one
            }
            5 => {
                one = [memory.as_fd()];
                &one
            }
            6 => {
                two = [memory.as_fd(), memory.as_fd()];
                &two
            }
            _ => match &rig.received {
                Some(fd) => {
                    one = [fd.as_fd()];
                    &one
                }
                None => &[],
            },
        };
        let sent = match kind & 31 {
            0..=23 => {
                let request = u32::from(input.u8());
                let len = input.u8() as usize;
                // Needs a reply with an odd kind.
                rig.vmm.send(request, 1 | u32::from(kind & 1) << 3, input.bytes(len), fds)
            }
            24 | 25 => {
                let len = input.u8() as usize;
                let bytes = input.bytes(len);
                bytes.is_empty() || rig.vmm.send_bytes(bytes, fds)
            }
            26 => {
                let (at, len) = (u64::from(input.u16()) % vmm::MEMORY, input.u8() as usize);
                let bytes = input.bytes(len.min((vmm::MEMORY - at) as usize));
                memory.write_all_at(bytes, at).expect("inside the memory");
                true
            }
            27 => {
                rig.finish(input.u8() as usize);
                true
            }
            28 => {
                let queue = u16::from(input.u8() % 5);
                rig.frontend.enable_notifications(queue);
                rig.frontend.kicked(queue);
                true
            }
            29 => {
                rig.frontend.disable_notifications(u16::from(input.u8() % 5));
                true
            }
            30 => {
                rig.take(u16::from(input.u8() % 4));
                true
            }
            _ => {
                rig.publish();
                true
            }
        };
        if !sent {
            break;
        }
        rig.turn();
    }
    rig.end();
}

/// One queue, set up as it should be, with memory that says anything.
pub fn virtqueue(data: &[u8]) {
    let mut input = Input(data);
    let setup = input.u8();
    let mut rig = Rig::new(1);
    let memory = vmm::memory(vmm::MEMORY);
    let features =
        FEATURES | if setup & 1 != 0 { EVENT_IDX } else { 0 } | if setup & 2 != 0 { INDIRECT } else { 0 };
    rig.vmm.send(code::SET_PROTOCOL_FEATURES, 1, &words64(&[1 << 12 | 1 << 13 | 1 << 15]), &[]);
    rig.vmm.send(code::SET_FEATURES, 1, &words64(&[features]), &[]);
    for upper in [false, true] {
        rig.vmm.send(code::ADD_MEM_REG, 1, &vmm::half(upper), &[memory.as_fd()]);
    }
    if setup & 4 != 0 {
        let size = u64::from(vmm::QUEUE) << 16 | 1;
        rig.vmm.send(code::GET_INFLIGHT_FD, 1, &words64(&[0, 0, size]), &[]);
        rig.turn();
        let table = rig.received.take().expect("a table was asked for");
        rig.vmm.send(code::SET_INFLIGHT_FD, 1, &words64(&[INFLIGHT, 0, size]), &[table.as_fd()]);
        rig.turn();
        rig.received = Some(table);
    }
    vmm::start_queue(&rig.vmm, 0);
    rig.turn();
    assert!(!rig.ended && rig.frontend.is_live(0), "{:?}", rig.frontend.take_notice());
    let inflight = rig.received.take().map(std::fs::File::from);

    let mut available = 0u16;
    let mut account = Account { sound: true, ..Account::default() };
    for _ in 0..STEPS {
        if input.is_empty() || rig.ended {
            break;
        }
        let write = |at: u64, bytes: &[u8]| memory.write_all_at(bytes, at).expect("inside the memory");
        let (used, completed) = (used_index(&memory), rig.completed);
        match input.u8() % 16 {
            // A descriptor, of the queue or of a table behind it: where, address, length, flags, next.
            0..=4 => {
                let at = u64::from(input.u8()) * 16;
                let mut descriptor = u64::from(input.u16()).to_le_bytes().to_vec();
                descriptor.extend_from_slice(
                    &(u32::from(input.u16()) * 16 + u32::from(input.u8() & 15)).to_le_bytes(),
                );
                descriptor.extend_from_slice(&u16::from(input.u8()).to_le_bytes());
                descriptor.extend_from_slice(&u16::from(input.u8()).to_le_bytes());
                write(if at >= 0x100 { 0x1000 + at - 0x100 } else { at }, &descriptor);
            }
            // A request's header: where, type, sector.
            5 | 6 => {
                let at = 0x4000 + u64::from(input.u8()) * 16;
                let mut header = u64::from(input.u8()).to_le_bytes().to_vec();
                header.extend_from_slice(&u64::from(input.u16()).to_le_bytes());
                write(at, &header);
            }
            // Makes a head available, as a driver does.
            7..=9 => {
                let head = u16::from(input.u8());
                write(vmm::AVAILABLE + 4 + u64::from(available % vmm::QUEUE) * 2, &head.to_le_bytes());
                available = available.wrapping_add(1);
                write(vmm::AVAILABLE + 2, &available.to_le_bytes());
            }
            10 => {
                let (at, len) = (u64::from(input.u16()) % vmm::MEMORY, input.u8() as usize);
                write(at, input.bytes(len.min((vmm::MEMORY - at) as usize)));
                account.sound = false;
                let mut index = [0; 2];
                memory.read_exact_at(&mut index, vmm::AVAILABLE + 2).expect("inside the memory");
                available = u16::from_le_bytes(index);
            }
            11 => {
                rig.take(0);
                account.sound &= used_index(&memory) == used;
            }
            12 => {
                rig.finish(input.u8() as usize);
                // A read into the queue itself.
                account.sound &= used_index(&memory) == used;
                account.count(rig.completed - completed);
            }
            13 => {
                rig.publish();
                rig.frontend.has_work(0);
                if input.u8() & 1 == 0 {
                    rig.frontend.enable_notifications(0);
                } else {
                    rig.frontend.disable_notifications(0);
                }
            }
            14 => {
                let (at, len) = (u64::from(input.u16()) % INFLIGHT, input.u8() as usize);
                let bytes = input.bytes(len.min((INFLIGHT - at) as usize));
                account.sound = false;
                if let Some(inflight) = &inflight {
                    // The back end seals its size, not its content.
                    let _shorter_than_that = inflight.write_at(bytes, at);
                }
            }
            _ => {
                let what = input.u8();
                let upper = what / 6 % 2 == 1;
                match what % 6 {
                    2 if !upper => account.away = true,
                    3 if !upper => (account.away, account.waiting) = (false, 0),
                    2 | 3 => {}
                    4 => (account.away, account.waiting) = (false, 0),
                    _ => account.sound = false,
                }
                let sent = match what % 6 {
                    // Another device, if the queue is stopped and the first one has come.
                    _ if what >= 252 => {
                        account.sound = false;
                        rig.vmm.send(code::SET_OWNER, 1, &[], &[])
                    }
                    0 => rig.vmm.send(code::GET_VRING_BASE, 1, &words32(&[0, 0]), &[]),
                    1 => vmm::start_queue(&rig.vmm, u32::from(available)),
                    2 => rig.vmm.send(code::REM_MEM_REG, 1, &vmm::half(upper), &[]),
                    3 => rig.vmm.send(code::ADD_MEM_REG, 1, &vmm::half(upper), &[memory.as_fd()]),
                    4 => {
                        let fds = [memory.as_fd(), memory.as_fd()];
                        rig.vmm.send(code::SET_MEM_TABLE, 1, &vmm::both_halves(), &fds)
                    }
                    _ => rig.vmm.send(code::RESET_DEVICE, 1, &[], &[]),
                };
                if !sent {
                    break;
                }
                rig.turn();
            }
        }
    }
    account.settle(&mut rig, &memory);
    rig.end();
}

/// What must have become of the requests that were taken, as long as it can be known: nobody but the export wrote
/// to the used index, and the queue was not started anew.
#[derive(Default)]
struct Account {
    sound: bool,
    /// The region with the queue is not there.
    away: bool,
    /// Requests that were completed while it was not there: they are to be done anew.
    anew: usize,
    /// Those of them since it went the last time, which still wait for it.
    waiting: usize,
}

impl Account {
    fn count(&mut self, completed: usize) {
        if self.away {
            self.anew += completed;
            self.waiting += completed;
        }
    }

    /// Each request that was taken is in the used ring, or comes once more.
    fn settle(mut self, rig: &mut Rig, memory: &std::fs::File) {
        let used = used_index(memory);
        let completed = rig.completed;
        while !rig.unfinished.is_empty() {
            rig.finish(0);
        }
        self.count(rig.completed - completed);
        if self.away && !rig.ended {
            rig.vmm.send(code::ADD_MEM_REG, 1, &vmm::half(false), &[memory.as_fd()]);
            rig.turn();
        }
        if !self.sound || rig.ended || rig.frontend.poisoned() || used_index(memory) != used {
            return;
        }
        rig.publish();
        let given_back = usize::from(used_index(memory));
        assert!(given_back + self.anew >= rig.completed, "{given_back} of {} given back", rig.completed);
        // They come before any other; as requests, or refused by now because the guest wrote over them.
        while self.away && rig.frontend.is_live(0) && rig.frontend.has_work(0) {
            rig.take(0);
            while !rig.unfinished.is_empty() {
                rig.finish(0);
            }
            rig.publish();
        }
        let more = usize::from(used_index(memory)).wrapping_sub(given_back);
        assert!(!rig.frontend.is_live(0) || more >= self.waiting, "{more} of {} came again", self.waiting);
    }
}

fn used_index(memory: &std::fs::File) -> u16 {
    let mut index = [0; 2];
    memory.read_exact_at(&mut index, vmm::USED + 2).expect("inside the memory");
    u16::from_le_bytes(index)
}
