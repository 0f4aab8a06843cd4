//! After a reset nothing of what was written is left, however often: what is read is the base image.
//!
//! `SPILLWAY_RESETS` says how often (200; a soak takes 10,000).

use crate::deaths::{seed, worker};
use crate::world::{MIB, World, succeeds, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use spillway_testkit::cores::median;
use spillway_testkit::disk::{figure, program};
use spillway_testkit::footprint::memfd_bytes;
use spillway_testkit::{Disk, Driver, Load, Rng, Shape};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

/// Beyond the image the disk reads as zeroes.
const IMAGE: u64 = 8 * MIB;
const DISK: u64 = 12 * MIB;
/// Writes in a generation, of 32 KiB in the mean: more than the RAM tier.
const WRITES: u64 = 64;

/// An NBD client that does one thing after the other.
struct Client(UnixStream);

impl Client {
    fn connect(disk: &Disk) -> Client {
        let mut socket = UnixStream::connect(disk.nbd()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut greeting = [0; 18];
        socket.read_exact(&mut greeting).unwrap();
        assert_eq!(greeting[..16], *b"NBDMAGICIHAVEOPT");
        // Fixed newstyle without zeroes; the export without a name.
        socket.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
        let mut export = [0; 10];
        socket.read_exact(&mut export).unwrap();
        assert_eq!(export[..8], DISK.to_be_bytes());
        Client(socket)
    }

    fn request(&mut self, command: u16, offset: u64, len: usize) {
        let mut request = [0; 28];
        request[..4].copy_from_slice(&0x2560_9513u32.to_be_bytes());
        request[6..8].copy_from_slice(&command.to_be_bytes());
        request[16..24].copy_from_slice(&offset.to_be_bytes());
        request[24..].copy_from_slice(&u32::try_from(len).unwrap().to_be_bytes());
        self.0.write_all(&request).unwrap();
    }

    fn succeeded(&mut self) {
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..8], *b"\x67\x44\x66\x98\0\0\0\0", "magic and error");
    }

    fn read(&mut self, offset: u64, to: &mut [u8]) {
        self.request(0, offset, to.len());
        self.succeeded();
        self.0.read_exact(to).unwrap();
    }

    fn write(&mut self, offset: u64, from: &[u8]) {
        self.request(1, offset, from.len());
        self.0.write_all(from).unwrap();
        self.succeeded();
    }

    /// Says good-bye.
    fn leave(mut self) {
        self.request(2, 0, 0);
        self.was_left();
    }

    /// The other side has closed.
    fn was_left(mut self) {
        assert!(matches!(self.0.read(&mut [0; 1]), Ok(0) | Err(_)));
    }
}

#[test]
fn after_each_of_many_resets_the_disk_is_the_base_image() {
    let Some(world) = World::new(&[]) else { return };
    let resets = std::env::var("SPILLWAY_RESETS").ok().and_then(|n| n.parse().ok()).unwrap_or(200u64);
    let path = world.image(IMAGE);
    let mut image = std::fs::read(&path).unwrap();
    image.resize(DISK as usize, 0);
    let disk = world.serve(&path, &["--size", "12M", "--ram", "1M", "--overflow", "24M"]);
    let mut rng = Rng::new(seed());
    let mut client = Client::connect(&disk);
    let mut content = vec![0; MIB as usize];
    for generation in 1..=resets {
        let canary: Vec<u8> = generation.to_le_bytes().repeat(8192);
        for _ in 0..WRITES {
            // Places and lengths in sectors: many blocks are written in part, and completed from the image.
            let len = (1 + rng.below(128)) * 512;
            let offset = rng.below((DISK - len) / 512 + 1) * 512;
            client.write(offset, &canary[..len as usize]);
            let back = &mut content[..len as usize];
            client.read(offset, back);
            assert!(
                back == &canary[..len as usize],
                "generation {generation}: at {offset}, before the reset"
            );
        }
        let mut reset = Command::new(program().unwrap());
        reset.arg("reset").arg(disk.control());
        // Either way of a machine's end.
        if generation % 2 == 0 {
            client.leave();
            until("the client has gone", &disk, || disk.figure("clients").unwrap() == 0);
            succeeds(&mut reset);
        } else {
            succeeds(reset.arg("--force"));
            client.was_left();
        }
        client = Client::connect(&disk);
        for (i, expected) in image.chunks(MIB as usize).enumerate() {
            let offset = i as u64 * MIB;
            client.read(offset, &mut content);
            if let Some(at) = content.chunks(512).zip(expected.chunks(512)).position(|(c, e)| c != e) {
                let found = u64::from_le_bytes(content[at * 512..][..8].try_into().unwrap());
                panic!(
                    "after the reset of generation {generation}, at {}: {found:#x}",
                    offset + at as u64 * 512
                );
            }
        }
    }
    let stats = disk.stats().unwrap();
    assert_eq!(figure(&stats, "resets").unwrap(), resets);
    assert_eq!(figure(&stats, "generation").unwrap(), resets + 1);
    // Each generation was in both tiers.
    assert!(figure(&stats, "evictions.blocks").unwrap() > 64 * resets, "{stats}");
    assert_eq!(figure(&stats, "failed.requests").unwrap(), 0);
    let held = || memfd_bytes(&[disk.supervisor()], "spillway-data").unwrap();
    until("memory is back", &disk, || held() == 0);
    drop(client);
    disk.stop().unwrap();
}

/// Asks for a reset by force, and how long the answer takes.
fn reset_by_force(disk: &Disk) -> (u64, f64) {
    let mut control = UnixStream::connect(disk.control()).unwrap();
    let begun = Instant::now();
    control.write_all(b"{\"command\":\"reset\",\"force\":true}\n").unwrap();
    let mut line = String::new();
    BufReader::new(control).read_line(&mut line).unwrap();
    let ms = begun.elapsed().as_secs_f64() * 1e3;
    let answer: Value = serde_json::from_str(&line).unwrap();
    (answer["ok"]["generation"].as_u64().unwrap_or_else(|| panic!("{line}{}", disk.log())), ms)
}

/// The kernel takes a while to take a dead worker's memory apart, and what it had begun to write to the overflow may land
/// until then: who resets the disk waits for neither, but for the next worker.
#[test]
fn a_reset_right_after_a_death_waits_for_the_next_worker_alone() {
    const FILLED: u64 = 1280 * MIB;
    let Some(world) = World::new(&[]) else { return };
    let image = world.image(16 * MIB);
    let disk = world.serve(&image, &["--size", "1280M", "--ram", "1G", "--overflow", "1G"]);
    let mut times = [Vec::new(), Vec::new()];
    for generation in 2..8 {
        let (queues, depth) = (1, 16);
        let shape = Shape { queues, depth, request_bytes: 1 << 20, deadline: Duration::from_secs(30) };
        let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
        driver.run(&Load::fill(FILLED, 1 << 20)).unwrap();
        assert!(disk.figure("overflow.used_bytes").unwrap() > 0, "a segment is open");
        // Every second one.
        let dies = generation % 2;
        if dies == 1 {
            kill_process(Pid::from_raw(worker(&disk) as i32).unwrap(), Signal::KILL).unwrap();
        }
        let (now, ms) = reset_by_force(&disk);
        assert_eq!(now, generation);
        times[dies as usize].push(ms);
        drop(driver);
        until("memory is back", &disk, || memfd_bytes(&[disk.supervisor()], "spillway-data").unwrap() == 0);
    }
    assert_eq!(disk.figure("restarts").unwrap(), 3);
    let [lives, died] = &mut times;
    println!("resets with a worker that lives: {lives:.1?} ms; right after a death: {died:.1?} ms");
    assert!(lives.iter().all(|&ms| ms < 100.0) && died.iter().all(|&ms| ms < 1000.0), "{lives:?}, {died:?}");
    assert!(median(lives) < 10.0 && median(died) < 75.0, "{lives:?}, {died:?}");
    disk.stop().unwrap();
}
