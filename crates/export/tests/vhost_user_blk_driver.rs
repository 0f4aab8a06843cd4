//! The export against an independent driver: the crate `virtio-driver` (libblkio's), over a real socket, with
//! a reactor of a few lines. What it needs of the protocol is not what our own test driver believes it to be.

#![allow(clippy::unwrap_used, reason = "a test may end at what it did not expect")]

#[path = "vhost_user_blk/vmm.rs"]
mod vmm;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spillway_core::GuestBuffers;
use spillway_export::vhost_user_blk::{Change, DeviceConfig, Disconnect, Frontend};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use virtio_driver::{
    EventFd, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};
use vmm::{GuestMemory, Random, perform, seed};

const DISK_BYTES: u64 = 8 << 20;
const QUEUES: u16 = 4;

/// Serves one connection until it ends, sleeping when there is nothing to do. Returns the disk.
fn serve(listener: &UnixListener, mut disk: Vec<u8>) -> Vec<u8> {
    let (socket, _) = listener.accept().unwrap();
    let config = DeviceConfig {
        size_bytes: DISK_BYTES,
        queues: QUEUES,
        serial: "independent".into(),
        writeback: true,
    };
    let mut frontend = Frontend::new(socket.into(), config, 7).unwrap();
    let mut kicks: BTreeMap<u16, RawFd> = BTreeMap::new();
    let mut changes = Vec::new();
    loop {
        let mut more = false;
        for queue in 0..QUEUES {
            frontend.disable_notifications(queue);
            while let Some(request) = frontend.next(queue) {
                let result = perform(&mut frontend, &mut disk, &request);
                frontend.complete(request.token, result);
            }
            frontend.publish(queue);
            more |= frontend.enable_notifications(queue);
        }
        let wait = Timespec { tv_sec: if more { 0 } else { 60 }, tv_nsec: 0 };
        let mut fds = vec![PollFd::from_borrowed_fd(frontend.fd(), PollFlags::IN)];
        // SAFETY: the frontend holds them open until it says Unkick.
        let kick_fds: Vec<_> = kicks.values().map(|&fd| unsafe { BorrowedFd::borrow_raw(fd) }).collect();
        fds.extend(kick_fds.iter().map(|&fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        poll(&mut fds, Some(&wait)).unwrap();
        for (fd, kick) in fds[1..].iter().zip(&kick_fds) {
            if fd.revents().contains(PollFlags::IN) {
                rustix::io::read(kick, &mut [0; 8]).unwrap();
            }
        }
        match frontend.on_readable(&mut changes) {
            Ok(()) => {}
            Err(Disconnect::Left) => return disk,
            Err(disconnect) => panic!("{disconnect}"),
        }
        for change in changes.drain(..) {
            match change {
                Change::Kick { queue, fd } => drop(kicks.insert(queue, fd)),
                Change::Unkick { queue } => drop(kicks.remove(&queue)),
                Change::Stop { .. } | Change::Poll { .. } => {}
            }
        }
    }
}

struct Client {
    transport: Box<VirtioBlkTransport>,
    memory: GuestMemory,
    call: Vec<Arc<EventFd>>,
}

impl Client {
    fn connect(path: &str, features: VirtioFeatureFlags) -> Client {
        let features = features.bits() | VirtioBlkFeatureFlags::all().bits();
        let transport = Box::new(VhostUser::new(path, features).unwrap());
        Client { transport, memory: GuestMemory::new(1 << 20, 0, 0), call: Vec::new() }
    }

    /// A piece of the memory that the device can see.
    fn buffer(&self, at: u64, len: usize) -> &'static mut [u8] {
        // SAFETY: inside the mapping, which lives as long as the test; the driver wants slices.
        unsafe { std::slice::from_raw_parts_mut(self.memory.at(at), len) }
    }
}

/// Waits for one completion, sleeping on the call eventfd.
fn finished(client: &Client, queue: &mut VirtioBlkQueue<'_, u64>, index: u16) -> (u64, i32) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        queue.set_used_notif_enabled(true);
        if let Some(completion) = queue.completions().next() {
            return (completion.context, completion.ret);
        }
        assert!(Instant::now() < deadline, "no completion: a lost wake-up");
        let call = &client.call[usize::from(index)];
        let mut fds = [PollFd::new(call, PollFlags::IN)];
        if poll(&mut fds, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })).unwrap() == 1 {
            call.read().unwrap();
        }
    }
}

fn with_driver(
    features: VirtioFeatureFlags,
    test: impl FnOnce(&Client, &mut [VirtioBlkQueue<'_, u64>]),
) -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let disk: Vec<u8> = (0..DISK_BYTES).map(|at| (at / 4096) as u8).collect();
    let server: JoinHandle<Vec<u8>> = std::thread::spawn(move || serve(&listener, disk));
    {
        let mut client = Client::connect(path.to_str().unwrap(), features);
        let address = client.memory.at(0) as usize;
        let (len, fd) = (client.memory.len as usize, client.memory.fd.as_raw_fd());
        let mut queues =
            VirtioBlkQueue::setup_queues(&mut *client.transport, usize::from(QUEUES), 128).unwrap();
        client.transport.map_mem_region(address, len, fd, 0).unwrap();
        client.call = (0..usize::from(QUEUES)).map(|q| client.transport.get_completion_fd(q)).collect();
        test(&client, &mut queues);
        drop(queues);
        client.transport.unmap_mem_region(address, len).unwrap();
        assert!(client.memory.fd.as_fd().as_raw_fd() >= 0);
    }
    server.join().unwrap()
}

#[test]
fn sees_the_disk_that_was_offered() {
    with_driver(VirtioFeatureFlags::VERSION_1, |client, queues| {
        assert_eq!(queues.len(), usize::from(QUEUES));
        let config = client.transport.get_config().unwrap();
        assert_eq!(u64::from(config.capacity), DISK_BYTES / 512);
        assert_eq!(u32::from(config.blk_size), 512);
        assert_eq!(u32::from(config.seg_max), 126);
        assert_eq!(u16::from(config.num_queues), QUEUES);
        assert_eq!(config.write_zeroes_may_unmap, 1);
    });
}

#[test]
fn random_operations_on_all_queues_leave_what_a_model_says() {
    let event_idx = VirtioFeatureFlags::RING_EVENT_IDX;
    let indirect = VirtioFeatureFlags::RING_INDIRECT_DESC;
    let version = VirtioFeatureFlags::VERSION_1;
    for features in [version, version | event_idx, version | indirect, version | event_idx | indirect] {
        let mut model: Vec<u8> = (0..DISK_BYTES).map(|at| (at / 4096) as u8).collect();
        let disk = with_driver(features, |client, queues| {
            let mut random = Random::new(seed("random_operations"));
            for n in 0..2500 {
                let index = random.below(u64::from(QUEUES)) as u16;
                let queue = &mut queues[usize::from(index)];
                let len = 512 * (1 + random.below(64)) as usize;
                let offset = 512 * random.below(DISK_BYTES / 512 - 64);
                let range = offset as usize..offset as usize + len;
                let at = random.below(1000) * 512;
                let buffer = client.buffer(at, len);
                let kind = random.below(6);
                match kind {
                    0 | 1 => {
                        buffer.fill(0xee);
                        queue.read(offset, buffer, n).unwrap();
                    }
                    2 => {
                        buffer.fill_with(|| random.next() as u8);
                        model[range.clone()].copy_from_slice(buffer);
                        queue.write(offset, buffer, n).unwrap();
                    }
                    3 => {
                        model[range.clone()].fill(0);
                        queue.write_zeroes(offset, len as u64, random.one_in(2), n).unwrap();
                    }
                    4 => {
                        model[range.clone()].fill(0);
                        queue.discard(offset, len as u64, n).unwrap();
                    }
                    _ => queue.flush(n).unwrap(),
                }
                if queue.avail_notif_needed() {
                    client.transport.get_submission_notifier(usize::from(index)).notify().unwrap();
                }
                assert_eq!(finished(client, queue, index), (n, 0));
                if kind < 2 {
                    assert!(*buffer == model[range], "operation {n}");
                }
            }
        });
        assert!(disk == model);
    }
}

#[test]
fn beyond_the_end_is_an_error_and_the_queue_goes_on() {
    with_driver(VirtioFeatureFlags::VERSION_1, |client, queues| {
        for (offset, works) in [(DISK_BYTES - 512, true), (DISK_BYTES, false), (DISK_BYTES - 512, true)] {
            queues[0].read(offset, client.buffer(0, 512), 1).unwrap();
            client.transport.get_submission_notifier(0).notify().unwrap();
            let (_, ret) = finished(client, &mut queues[0], 0);
            assert_eq!(ret == 0, works, "{offset}: {ret}");
        }
    });
}
