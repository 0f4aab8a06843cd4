//! What was written is what is read, with a working set several times the RAM tier.

use crate::world::{MIB, World, fio_ends, succeeds, until_left};
use spillway_testkit::{Disk, Driver, End, Mixed, Oracle, Rng, Shape};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

/// Four times the RAM tier.
const SET: u64 = 128 * MIB;
const MODES: [&[&str]; 3] = [
    &["--ram", "32M", "--overflow", "400M"],
    &["--mode", "overflow", "--overflow", "400M"],
    &["--mode", "direct"],
];

const ENGINES: [&str; 2] = ["io_uring", "threads"];

fn overflowed(disk: &Disk) {
    let written = disk.figure("planes.overflow.written_bytes").unwrap();
    assert!(written >= SET / 2, "{written} bytes is no working set beyond the RAM");
    assert_eq!(disk.figure("checksum_mismatches").unwrap(), 0);
}

#[test]
fn fio_finds_every_checksum_of_a_set_four_times_the_ram() {
    let Some(world) = World::new(&["fio"]) else { return };
    let image = world.image(16 * MIB);
    for (mode, engine) in MODES.into_iter().flat_map(|m| ENGINES.map(|e| (m, e))) {
        let disk = world.serve_by(engine, &image, &[mode, &["--size", "128M"]].concat());
        // Requests at any sector: most begin and end inside a block.
        let sizes = ["--bsrange=512-256k", "--blockalign=512", "--rw=randwrite", "--size=128M"];
        fio_ends(world.fio("odd", &disk, &sizes));
        let pieces = ["--bssplit=4k/60:16k/20:64k/10:1m/10", "--rw=randrw", "--size=128M", "--loops=2"];
        fio_ends(world.fio("blocks", &disk, &pieces));
        overflowed(&disk);
        disk.stop().unwrap();
    }
}

#[test]
fn blkverify_finds_no_difference_to_a_plain_file() {
    let Some(world) = World::new(&["qemu-io", "qemu-img"]) else { return };
    let image = world.image(16 * MIB);
    let mut rng = Rng::new(21);
    for mode in MODES {
        let disk = world.serve(&image, &[mode, &["--size", "128M"]].concat());
        let reference = world.path("reference.raw");
        std::fs::copy(&image, &reference).unwrap();
        std::fs::OpenOptions::new().write(true).open(&reference).unwrap().set_len(SET).unwrap();

        let mut script = String::new();
        for at in (0..SET).step_by(2 << 20) {
            writeln!(script, "write -P {} {at} 2M", 1 + rng.below(255)).unwrap();
        }
        for _ in 0..600 {
            let sectors = 1 << rng.below(13) | rng.below(16);
            let at = rng.below(SET / 512 - sectors) * 512;
            let len = sectors * 512;
            match rng.below(10) {
                0..5 => writeln!(script, "write -P {} {at} {len}", 1 + rng.below(255)).unwrap(),
                // blkverify has no request for zeroes: as data they are no less to be found.
                5 => writeln!(script, "write -P 0 {at} {len}").unwrap(),
                6 => writeln!(script, "flush").unwrap(),
                _ => writeln!(script, "read {at} {len}").unwrap(),
            }
        }
        let options = format!(
            "driver=blkverify,test.driver=raw,test.file.driver=nbd,test.file.server.type=unix,\
             test.file.server.path={},raw.driver=file,raw.filename={}",
            disk.nbd().display(),
            reference.display()
        );
        let mut qemu_io = Command::new("timeout")
            .args(["100", "qemu-io", "--image-opts", &options])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        qemu_io.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        let output = qemu_io.wait_with_output().unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !text.contains("failed"), "{mode:?}: {text}");
        assert!(!text.contains("mismatch"), "{mode:?}: {text}");
        let mut compare = Command::new("qemu-img");
        compare.args(["compare", "-f", "raw", "-F", "raw"]).arg(&reference).arg(disk.nbd_uri());
        succeeds(&mut compare);
        overflowed(&disk);
        disk.stop().unwrap();
    }
}

/// Requests of every kind and size over several queues, each byte checked, then the whole disk once more, by
/// the next connection.
#[test]
fn an_oracle_agrees_on_every_kind_of_base_image() {
    let Some(world) = World::new(&["qemu-img"]) else { return };
    let raw = world.image(96 * MIB);
    let images =
        [raw.clone(), world.qcow2(&raw, "plain.qcow2", &[]), world.qcow2(&raw, "compressed.qcow2", &["-c"])];
    let shape = Shape { queues: 4, depth: 24, request_bytes: 4 << 20, ..Shape::default() };
    for (i, image) in images.iter().enumerate() {
        for (j, cache) in ["host", "none"].into_iter().enumerate() {
            let seed = 100 + 2 * i as u64 + j as u64;
            let before = std::fs::read(image).unwrap();
            let options = ["--size", "128M", "--ram", "32M", "--overflow", "300M", "--base-cache", cache];
            let disk = world.serve(image, &options);
            let mut oracle = Oracle::with_base(SET, seed, &raw).unwrap();
            let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
            // A connection of odd requests, then one of many small ones on what the first has left.
            let mut mixed = Mixed {
                start_bytes: 0,
                span_bytes: SET,
                largest_bytes: 4 << 20,
                depth: 24,
                end: End::Count(900),
                seed,
            };
            let what = format!("seed {seed}, {}, {cache}", image.display());
            driver.run_mixed(&mixed, &mut oracle).unwrap_or_else(|e| panic!("{what}: {e:#}"));
            drop(driver);
            until_left(&disk);
            let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
            (mixed.largest_bytes, mixed.seed) = (16 << 10, seed + 1000);
            mixed.end = End::Count(6000);
            driver.run_mixed(&mixed, &mut oracle).unwrap_or_else(|e| panic!("{what}: {e:#}"));
            driver.verify(&oracle).unwrap_or_else(|e| panic!("{what}: {e:#}"));
            overflowed(&disk);
            assert!(
                disk.figure("merges.base_bytes").unwrap() + disk.figure("merges.overflow_bytes").unwrap() > 0
            );
            drop(driver);
            disk.stop().unwrap();
            assert!(std::fs::read(image).unwrap() == before, "{what}: the image has changed");
        }
    }
}

/// The modes without both tiers, with the same requests.
#[test]
fn an_oracle_agrees_in_every_mode() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.image(48 * MIB);
    let shape = Shape { queues: 3, depth: 24, request_bytes: 1 << 20, ..Shape::default() };
    let modes: [&[&str]; 3] = [
        &["--mode", "ram", "--ram", "160M"],
        &["--mode", "overflow", "--overflow", "300M"],
        &["--mode", "direct"],
    ];
    for (seed, (mode, engine)) in (200..).zip(modes.into_iter().flat_map(|m| ENGINES.map(|e| (m, e)))) {
        let disk = world.serve_by(engine, &image, &[mode, &["--size", "128M"]].concat());
        let mut oracle = Oracle::with_base(SET, seed, &image).unwrap();
        let mut driver = Driver::connect_with(&disk.vhost(), shape).unwrap();
        let mixed = Mixed {
            start_bytes: 0,
            span_bytes: SET,
            largest_bytes: 1 << 20,
            depth: 24,
            end: End::Count(5000),
            seed,
        };
        driver
            .run_mixed(&mixed, &mut oracle)
            .unwrap_or_else(|e| panic!("seed {seed}, {mode:?}, {engine}: {e:#}"));
        driver.verify(&oracle).unwrap_or_else(|e| panic!("seed {seed}, {mode:?}, {engine}: {e:#}"));
        drop(driver);
        disk.stop().unwrap();
    }
}
