//! QEMU stops, continues and resets a machine while a read of the base image waits for its store.
//!
//! The machine's only program is its boot sector. It reads one block and shows it on the debug console. The store takes
//! [`LATENCY`] for each read, so the firmware's read of the boot sector waits for it, and then the program's read of the block.
//! Owns the program. Invariant: nothing is shown but what the disk holds.

use crate::vmms::{MEMFD, Monitor, qemu};
use crate::world::{MIB, World, until, until_left};
use spillway_testkit::Disk;
use spillway_testkit::disk::program;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long a read of the base image takes.
const LATENCY: Duration = Duration::from_secs(5);
/// Within this time QEMU must answer, although a read waits longer.
const PROMPT: Duration = Duration::from_secs(1);

/// Loaded at 0x7c00, in real mode:
///
/// ```text
///    cld; xor ax, ax; mov ds, ax; mov ss, ax; mov sp, 0x7c00
///    mov si, 0x7c40; mov ah, 0x42; int 0x13                 # read what the packet says
/// 1: jc 1b
///    mov si, 0x8000; mov cx, 4096; mov dx, 0xe9
/// 2: lodsb; out dx, al; loop 2b
/// 3: hlt; jmp 3b
/// ```
const CODE: [u8; 35] = [
    0xfc, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0xbe, 0x40, 0x7c, 0xb4, 0x42, 0xcd, 0x13,
    0x72, 0xfe, 0xbe, 0x00, 0x80, 0xb9, 0x00, 0x10, 0xba, 0xe9, 0x00, 0xac, 0xee, 0xe2, 0xfc, 0xf4, 0xeb,
    0xfd,
];
/// 8 sectors from number [`SHOWN`] on, to 0:0x8000.
const PACKET: [u8; 16] =
    [16, 0, 8, 0, 0x00, 0x80, 0, 0, (SHOWN % 256) as u8, (SHOWN / 256) as u8, 0, 0, 0, 0, 0, 0];
const PACKET_AT: usize = 0x40;
const SHOWN: usize = 2048;

/// The image, and what the program shows of it.
fn image(world: &World) -> (std::path::PathBuf, Vec<u8>) {
    let image = world.image(4 * MIB);
    let mut content = std::fs::read(&image).unwrap();
    content[..CODE.len()].copy_from_slice(&CODE);
    content[PACKET_AT..PACKET_AT + PACKET.len()].copy_from_slice(&PACKET);
    content[510..512].copy_from_slice(&[0x55, 0xaa]);
    std::fs::write(&image, &content).unwrap();
    let shown = content[SHOWN * 512..][..4096].to_vec();
    assert_ne!(shown, content[..4096]);
    (image, shown)
}

/// Waits until the guest waits for a read, and for nothing else.
fn until_it_reads(disk: &Disk) {
    until("a read waits", disk, || disk.figure("inflight").unwrap() == 1);
}

/// QEMU carries the command out, and answers questions after it, at once.
#[track_caller]
fn prompt(monitor: &mut Monitor, disk: &Disk, command: &str) {
    let begun = Instant::now();
    monitor.tell(command);
    // A reset is carried out after its answer.
    monitor.tell(r#""query-status""#);
    let took = begun.elapsed();
    assert!(took < PROMPT, "{command} took {took:?}\n{}", disk.log());
}

fn until_shown(disk: &Disk, console: &Path, expected: &[u8]) {
    let shown = || std::fs::read(console).unwrap_or_default();
    until("the block is shown", disk, || shown().len() >= expected.len());
    assert!(shown() == expected, "something else was shown");
}

#[test]
fn a_machine_stops_goes_on_and_is_reset_while_a_read_waits_for_the_image() {
    let Some(world) = World::new(&["qemu-system-x86_64"]) else { return };
    let (image, expected) = image(&world);
    let model = world.path("model");
    let mut create = Command::new(program().unwrap());
    let latency = format!("latency={}s", LATENCY.as_secs());
    crate::world::succeeds(create.args(["storage-model", "create", &latency]).arg(&model));
    let model = model.display().to_string();
    let options = ["--ram", "16M", "--overflow", "64M", "--base-cache", "none", "--base-model", &model];
    let disk = world.serve(&image, &options);
    let before = disk.log().len();
    let (socket, console) = (world.path("qmp"), world.path("console"));
    let more = format!(
        "-device vhost-user-blk-pci,chardev=disk,num-queues=1 -qmp unix:{},server=on,wait=off -debugcon file:{}",
        socket.display(),
        console.display()
    );
    let mut machine = qemu(&world, &disk, &format!("{MEMFD}on"), &more);
    let mut monitor = Monitor::connect(&mut machine, &socket);

    until_it_reads(&disk);
    prompt(&mut monitor, &disk, r#""stop""#);
    prompt(&mut monitor, &disk, r#""cont""#);
    // The boot sector was read right, as it runs: it reads the block.
    until_shown(&disk, &console, &expected);

    // What waits when the machine is reset is not answered; the next boot goes well.
    prompt(&mut monitor, &disk, r#""system_reset""#);
    until_it_reads(&disk);
    prompt(&mut monitor, &disk, r#""system_reset""#);
    until_it_reads(&disk);
    prompt(&mut monitor, &disk, r#""stop""#);
    prompt(&mut monitor, &disk, r#""system_reset""#);
    prompt(&mut monitor, &disk, r#""cont""#);
    until_shown(&disk, &console, &[&expected[..], &expected].concat());

    assert_eq!(disk.figure("failed.requests").unwrap(), 0);
    assert_eq!(disk.log()[before..].matches("notice").count(), 0, "{}", disk.log());
    drop(monitor);
    machine.kill();
    until_left(&disk);
    disk.stop().unwrap();
}
