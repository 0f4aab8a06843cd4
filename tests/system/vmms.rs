//! QEMU and what it may do with a disk: memory that it does not share, a device that is unplugged and plugged in again,
//! requests of any length.
//!
//! Its firmware is the guest: SeaBIOS reads the first sector of each disk. Owns the command lines of these machines.

use crate::world::{DEADLINE, MIB, PATIENCE, World, until, until_left};
use serde_json::Value;
use spillway_testkit::{Disk, Driver, Rng, Server, Shape};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

pub const MEMFD: &str = "-object memory-backend-memfd,id=memory,size=128M,share=";

/// A machine with SeaBIOS and this disk, of which no kernel ever runs.
pub fn qemu(world: &World, disk: &Disk, memory: &str, more: &str) -> Server {
    let line = format!(
        "-machine pc,accel=tcg{} -m 128M -nodefaults -no-user-config -display none {memory} \
         -chardev socket,id=disk,path={} {more}",
        if memory.is_empty() { "" } else { ",memory-backend=memory" },
        disk.vhost().display()
    );
    let arguments: Vec<String> = line.split_whitespace().map(String::from).collect();
    Server::start("QEMU", "qemu-system-x86_64", &arguments, None, &world.path("qemu.log")).unwrap()
}

/// QEMU's monitor.
pub struct Monitor {
    stream: BufReader<UnixStream>,
    /// Messages that nobody has asked for yet: an event may come before the answer to a command.
    unheard: Vec<Value>,
}

impl Monitor {
    pub fn connect(qemu: &mut Server, socket: &Path) -> Monitor {
        qemu.wait_for(socket, PATIENCE).unwrap();
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut monitor = Monitor { stream: BufReader::new(stream), unheard: Vec::new() };
        monitor.hear("QMP");
        monitor.tell(r#""qmp_capabilities""#);
        monitor
    }

    /// The next message that has this key.
    pub fn hear(&mut self, key: &str) -> Value {
        if let Some(at) = self.unheard.iter().position(|message| !message[key].is_null()) {
            return self.unheard.remove(at);
        }
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line).expect("QEMU says nothing");
            let message: Value = serde_json::from_str(&line).unwrap();
            assert!(message["error"].is_null(), "{message}");
            if !message[key].is_null() {
                return message;
            }
            self.unheard.push(message);
        }
    }

    pub fn tell(&mut self, command: &str) {
        writeln!(self.stream.get_mut(), "{{\"execute\":{command}}}").unwrap();
        self.hear("return");
    }

    /// The device has gone. What it consists of says so, too.
    fn hear_deleted(&mut self, device: &str) {
        let is_it =
            |message: &Value| message["event"] == "DEVICE_DELETED" && message["data"]["device"] == device;
        while !is_it(&self.hear("event")) {}
    }
}

#[test]
fn memory_that_a_vmm_does_not_share_is_told_in_words() {
    let Some(world) = World::new(&["qemu-system-x86_64"]) else { return };
    let disk = world.serve(&world.blank(8 * MIB), &["--ram", "16M", "--overflow", "64M"]);
    let device = "-device vhost-user-blk-pci,chardev=disk,num-queues=1";
    for (memory, sign) in [("", "no memory"), (&*format!("{MEMFD}off"), "is empty")] {
        let before = disk.log().len();
        let mut machine = qemu(&world, &disk, memory, device);
        until(sign, &disk, || {
            let log = disk.log();
            log[before..].contains("memory is not shared") && log[before..].contains(sign)
        });
        for advice in ["share=on", "<access mode='shared'/>", "shared=on"] {
            assert!(disk.log()[before..].contains(advice), "{}", disk.log());
        }
        machine.kill();
        until_left(&disk);
    }
    // Shared memory gives no reason to say so.
    let before = disk.log().len();
    let mut machine = qemu(&world, &disk, &format!("{MEMFD}on"), device);
    until("its firmware has read", &disk, || disk.figure("planes.guest.reads").unwrap() > 0);
    assert!(!disk.log()[before..].contains("shared"), "{}", disk.log());
    machine.kill();
    until_left(&disk);
    disk.stop().unwrap();
}

#[test]
fn a_disk_is_unplugged_and_plugged_in_again_on_its_connection() {
    let Some(world) = World::new(&["qemu-system-x86_64"]) else { return };
    let options = ["--ram", "16M", "--overflow", "64M", "--queues", "4"];
    let disk = world.serve(&world.blank(8 * MIB), &options);
    let socket = world.path("qmp");
    let more = format!(
        "-device vhost-user-blk-pci,id=first,chardev=disk,num-queues=4 -qmp unix:{},server=on,wait=off",
        socket.display()
    );
    let mut machine = qemu(&world, &disk, &format!("{MEMFD}on"), &more);
    let mut monitor = Monitor::connect(&mut machine, &socket);
    let reads = || disk.figure("planes.guest.reads").unwrap();
    until("the firmware has read the first", &disk, || reads() > 0);
    let mut name = "first".to_string();
    for queues in [1, 4, 2] {
        // No system runs that would let it go: the next reset takes it.
        monitor.tell(&format!(r#""device_del","arguments":{{"id":"{name}"}}"#));
        monitor.tell(r#""system_reset""#);
        monitor.hear_deleted(&name);
        let before = reads();
        name = format!("with-{queues}");
        monitor.tell(&format!(
            r#""device_add","arguments":{{"driver":"vhost-user-blk-pci","id":"{name}","chardev":"disk","num-queues":{queues}}}"#
        ));
        monitor.tell(r#""system_reset""#);
        until("the firmware has read the next", &disk, || reads() > before);
    }
    assert_eq!(disk.log().matches("notice").count(), 0, "{}", disk.log());
    assert_eq!(machine.tail(), "");
    drop(monitor);
    machine.kill();
    until_left(&disk);
    disk.stop().unwrap();
}

/// What UEFI's driver does with a file: one descriptor, however long. Through the overflow, and zeroes.
#[test]
fn a_descriptor_may_be_as_long_as_the_driver_likes() {
    const LONG: usize = 96 * MIB as usize;
    let Some(world) = World::new(&[]) else { return };
    for mode in [&["--ram", "32M", "--overflow", "512M"][..], &["--mode", "direct"]] {
        let mut options = vec!["--size", "2G"];
        options.extend_from_slice(mode);
        let disk = world.serve(&world.image(40 * MIB), &options);
        let shape = Shape { depth: 2, request_bytes: LONG, deadline: DEADLINE, ..Shape::default() };
        let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
        // The image and what is beyond its end, in one.
        let mut content = vec![0xee; LONG];
        driver.read_at(0, &mut content).unwrap();
        let mut expected = std::fs::read(world.path("base.raw")).unwrap();
        expected.resize(LONG, 0);
        assert!(content == expected, "{mode:?}");
        let mut written = vec![0u8; LONG];
        let mut rng = Rng::new(7);
        written.as_chunks_mut().0.iter_mut().for_each(|word| *word = rng.next_u64().to_le_bytes());
        let at = 20 * MIB + 512;
        driver.write_at(at, &written).unwrap();
        driver.read_at(at, &mut content).unwrap();
        assert!(content == written, "{mode:?}");
        driver.flush().unwrap();
        driver.read_at(0, &mut content).unwrap();
        expected[at as usize..].copy_from_slice(&written[..LONG - at as usize]);
        assert!(content == expected, "{mode:?}");
        drop(driver);
        until_left(&disk);
        disk.stop().unwrap();
    }
}
