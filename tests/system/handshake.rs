//! Workers die while a front end and they get to know each other: it is connected once, and gets its device.
//!
//! A VMM that loses its back end in the middle of the handshake loses the disk for good. `SPILLWAY_KILLS` says how often
//! a worker is killed, as in `deaths`.

use crate::deaths::{Enough, kill_at_random, kills, seed, worker};
use crate::world::{MIB, PATIENCE, World, until, until_left};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use spillway_testkit::process::{send_signal, wait_until};
use spillway_testkit::{Driver, Rng, Server, Shape};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// How long a worker lives at most: about as long as it takes to begin and go through a handshake.
const LONGEST: Duration = Duration::from_millis(8);

#[test]
fn a_handshake_goes_on_with_the_next_worker() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.image(8 * MIB);
    let disk = world.serve(&image, &["--ram", "16M", "--overflow", "64M"]);
    let mut rng = Rng::new(seed());
    let (mut connected, mut killed) = (0, 0);
    // On a slow host more workers die in each handshake: then more of them must.
    while killed < kills() || connected < u64::from(kills()) / 4 {
        let enough = AtomicBool::new(false);
        let round = std::thread::scope(|scope| {
            let killer = scope.spawn(|| kill_at_random(&disk, kills(), LONGEST, &mut rng, &enough));
            let _enough = Enough(&enough);
            while !killer.is_finished() {
                until_left(&disk);
                let mut driver = Driver::connect_with(&disk.vhost(), Shape::default())
                    .unwrap_or_else(|e| panic!("{e:#}\n{}", disk.log()));
                driver.write_at(connected * 512, &[connected as u8 | 1; 512]).unwrap();
                connected += 1;
            }
            killer.join().unwrap()
        });
        assert_eq!(round, kills());
        killed += round;
    }
    println!("{connected} handshakes, {killed} workers killed");
    until_left(&disk);
    let mut driver = Driver::connect_with(&disk.vhost(), Shape::default()).unwrap();
    let mut content = vec![0; connected as usize * 512];
    driver.read_at(0, &mut content).unwrap();
    for (i, sector) in content.chunks(512).enumerate() {
        assert!(sector.iter().all(|&b| b == i as u8 | 1), "sector {i}");
    }
    drop(driver);
    disk.stop().unwrap();
}

/// Says these things to QEMU and returns its answers. It listens when it has made all its devices.
fn qmp(socket: &Path, commands: &[&str]) -> Vec<Value> {
    let stream = wait_until(PATIENCE, || UnixStream::connect(socket).ok()).expect("QEMU does not listen");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut lines = BufReader::new(&stream).lines();
    let mut line = || lines.next().and_then(Result::ok).expect("QEMU does not answer");
    let mut answer = || serde_json::from_str::<Value>(&line()).unwrap();
    assert!(answer()["QMP"].is_object());
    let ask = |command: &&str| {
        writeln!(&stream, "{{\"execute\":{command}}}").unwrap();
        answer()
    };
    commands.iter().map(ask).collect()
}

/// With `-S` no instruction of a guest is run: what QEMU asks of a disk is what it must know to have the device.
#[test]
fn qemu_has_its_device_whoever_dies_meanwhile() {
    const STARTS: u32 = 10;
    let Some(world) = World::new(&["qemu-system-x86_64"]) else { return };
    let image = world.image(8 * MIB);
    let mut rng = Rng::new(seed());
    let mut all = 0;
    for _ in 0..STARTS {
        // A disk whose workers have died often starts the next one later and later.
        let disk = world.serve(&image, &["--ram", "16M", "--overflow", "64M"]);
        let (vhost, socket) = (disk.vhost(), world.path("qmp"));
        let arguments = [
            "-S -nodefaults -no-user-config -display none -machine q35,memory-backend=memory -m 64M",
            "-object memory-backend-memfd,id=memory,size=64M,share=on",
            &format!("-chardev socket,id=disk,path={}", vhost.display()),
            "-device vhost-user-blk-pci,id=disk,chardev=disk",
            &format!("-qmp unix:{},server=on,wait=off", socket.display()),
        ];
        let arguments: Vec<String> = arguments.join(" ").split(' ').map(String::from).collect();
        // The first one answers nothing, then never.
        let pid = worker(&disk);
        let first = Pid::from_raw(pid as i32).unwrap();
        send_signal(first, Signal::STOP).unwrap();
        let mut qemu =
            Server::start("QEMU", "qemu-system-x86_64", &arguments, None, &world.path("qemu.log")).unwrap();
        until("QEMU has connected", &disk, || disk.figure("clients").unwrap() == 1);
        kill_process(first, Signal::KILL).unwrap();
        until("the next worker", &disk, || ![0, pid].contains(&worker(&disk)));
        let enough = AtomicBool::new(false);
        let killed = std::thread::scope(|scope| {
            let killer = scope.spawn(|| kill_at_random(&disk, u32::MAX, LONGEST, &mut rng, &enough));
            let enough = Enough(&enough);
            let realized =
                r#""qom-get","arguments":{"path":"/machine/peripheral/disk","property":"realized"}"#;
            let answers = qmp(&socket, &[r#""qmp_capabilities""#, realized, r#""quit""#]);
            assert_eq!(answers[1]["return"], true, "{answers:?}\n{}\n{}", qemu.tail(), disk.log());
            assert!(qemu.wait(PATIENCE).unwrap().success(), "{}", qemu.tail());
            assert_eq!(qemu.tail(), "", "it has connected once");
            drop(enough);
            killer.join().unwrap()
        });
        until("the last one's successor", &disk, || {
            worker(&disk) != 0 && disk.figure("clients").unwrap() == 0
        });
        all += 1 + killed;
        disk.stop().unwrap();
    }
    println!("{all} workers killed in {STARTS} handshakes");
    assert!(all >= STARTS);
}
