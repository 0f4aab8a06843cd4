//! What NBD clients are told of a disk's extents, whatever its image is: zero is what reads as zeroes, all that is known
//! to be zero is said to be, and a large disk with nothing in it is copied in no time.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{Server, World, finishes, qemu_io, stats};
use rustix::process::Signal;
use spillway_image::digests::{CHUNK_BYTES, Root, of_chunk};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

const UNIT: u64 = 64 << 10;
const UNITS: u64 = 512;
const SIZE: u64 = UNIT * UNITS;
/// The image ends in the middle of a block, and the disk goes on.
const IMAGE: u64 = SIZE - 5 * UNIT - 3 * 512;

/// A seeded generator, so that a failure can be run again.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

fn succeeds(command: &mut Command) -> String {
    let (code, out, err) = finishes(command);
    assert_eq!(code, 0, "{command:?}: {out}{err}");
    out
}

/// A sparse image, and for each unit whether it is zero there.
fn image(world: &World, random: &mut Random) -> (PathBuf, Vec<bool>) {
    let path = world.path("sparse.raw");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(IMAGE).unwrap();
    let mut zero = vec![true; UNITS as usize];
    let mut unit = 0;
    while unit < UNITS {
        let run = random.below(40) + 1;
        if random.below(2) == 0 {
            for unit in unit..(unit + run).min(UNITS) {
                let len = UNIT.min(IMAGE.saturating_sub(unit * UNIT));
                file.write_all_at(&vec![7; len as usize], unit * UNIT).unwrap();
                zero[unit as usize] = len == 0;
            }
        }
        unit += run;
    }
    (path, zero)
}

/// What a client is told, by unit: whether all of it is zero.
fn extents(world: &World) -> Vec<bool> {
    let map = succeeds(Command::new("nbdinfo").args(["--map", "--json"]).arg(world.nbd_uri()));
    let map: Vec<serde_json::Value> = serde_json::from_str(&map).unwrap();
    let mut zero = vec![true; UNITS as usize];
    let mut end = 0;
    for extent in map {
        let [offset, len, kind] = ["offset", "length", "type"].map(|key| extent[key].as_u64().unwrap());
        assert_eq!(offset, end, "they follow one another");
        end = offset + len;
        assert!(kind == 0 || kind == 3, "data, or a hole of zeroes: {extent}");
        if kind == 0 {
            zero[(offset / UNIT) as usize..=((end - 1) / UNIT) as usize].fill(false);
        }
    }
    assert_eq!(end, SIZE);
    zero
}

fn check(world: &World, expected: &[bool], what: &str) {
    let extents = extents(world);
    let differ: Vec<_> = (0..UNITS as usize).filter(|&unit| extents[unit] != expected[unit]).collect();
    assert!(differ.is_empty(), "{what}: units {differ:?} of {UNIT} bytes");
    // The claim, held against what the disk reads as.
    let zeroes: Vec<_> = (0..UNITS).filter(|&unit| extents[unit as usize]).collect();
    let reads: Vec<_> = zeroes.iter().map(|unit| format!("read -P 0 {} {UNIT}", unit * UNIT)).collect();
    let reads: Vec<&str> = reads.iter().map(String::as_str).collect();
    reads.chunks(100).for_each(|reads| qemu_io(world, reads));
}

/// Writes, zeroes and discards whole units.
fn use_disk(world: &World, zero: &mut [bool], random: &mut Random) {
    let mut commands = Vec::new();
    for _ in 0..40 {
        let unit = random.below(UNITS);
        let (at, to_zero) = (unit * UNIT, random.below(3) > 0);
        commands.push(match (to_zero, random.below(2)) {
            (true, 0) => format!("discard {at} {UNIT}"),
            (true, _) => format!("write -z -u {at} {UNIT}"),
            (false, _) => format!("write -P 9 {at} {UNIT}"),
        });
        zero[unit as usize] = to_zero;
    }
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    qemu_io(world, &commands);
}

#[test]
fn holes_and_unused_clusters_of_the_image_are_zero_until_they_are_written() {
    let seed = std::env::var("SPILLWAY_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0x5eed_0021);
    println!("seed {seed}: run again with SPILLWAY_SEED={seed}");
    let mut random = Random(seed | 1);
    let world = World::new();
    let (raw, zero) = image(&world, &mut random);
    let path = |name: &str| world.path(name).to_str().unwrap().to_owned();
    for (name, options) in [
        ("plain.qcow2", &[][..]),
        ("packed.qcow2", &["-c"]),
        ("small.qcow2", &["-o", "cluster_size=4k"]),
        ("whole.qcow2", &["-o", "preallocation=metadata"]),
    ] {
        let mut convert = Command::new("qemu-img");
        succeeds(
            convert.args(["convert", "-f", "raw", "-O", "qcow2"]).args(options).arg(&raw).arg(path(name)),
        );
    }
    // With digests it is known of a whole chunk, or not at all.
    let content = std::fs::read(&raw).unwrap();
    let list: Vec<_> = content.chunks(CHUNK_BYTES as usize).map(of_chunk).collect();
    let mut root = Root::new(IMAGE);
    list.iter().for_each(|digest| root.add(digest));
    std::fs::write(path("digests"), list.concat()).unwrap();
    let per_chunk = (CHUNK_BYTES / UNIT) as usize;
    let image_units = IMAGE.div_ceil(UNIT) as usize;
    let mut by_chunks = zero.clone();
    for chunk in by_chunks[..image_units].chunks_mut(per_chunk) {
        let is_hole = chunk.len() == per_chunk && chunk.iter().all(|zero| *zero);
        chunk.fill(is_hole);
    }
    // qemu-img writes the end of a file with preallocated clusters, so that it is as long as they are.
    let mut preallocated = zero.clone();
    preallocated[image_units - 1] = false;
    let sparse = path("sparse.raw");
    let images: [(&str, &str, &[&str], &[bool]); 9] = [
        (&sparse, "raw", &[], &zero),
        (&sparse, "raw", &["--base-cache", "none"], &zero),
        (&sparse, "raw", &["--mode", "direct"], &zero),
        (&sparse, "raw", &["--digests", &path("digests"), "--digest", &root.finish()], &by_chunks),
        (&path("plain.qcow2"), "qcow2", &[], &zero),
        (&path("plain.qcow2"), "qcow2", &["--base-cache", "none"], &zero),
        (&path("packed.qcow2"), "qcow2", &[], &zero),
        (&path("small.qcow2"), "qcow2", &[], &zero),
        (&path("whole.qcow2"), "qcow2", &[], &preallocated),
    ];
    for (image, format, options, expected) in images {
        let what = format!("{image} {options:?}");
        let mut expected = expected.to_vec();
        let mut serve = common::spillway();
        serve.args(["serve", "--image", image, "--format", format, "--size", &SIZE.to_string()]);
        serve.arg("--nbd").arg(world.path("nbd")).arg("--overflow-dir").arg(world.dir.path()).args(options);
        let server = Server::start(&mut serve);
        check(&world, &expected, &what);
        use_disk(&world, &mut expected, &mut random);
        check(&world, &expected, &what);
        assert_eq!(server.end(Signal::TERM).0, 0, "{what}");
    }
}

/// Read byte for byte it took more than a minute.
#[test]
fn a_tebibyte_of_nothing_is_copied_in_seconds() {
    let world = World::new();
    let (raw, qcow2) = (world.path("large.raw"), world.path("large.qcow2"));
    std::fs::File::create(&raw).unwrap().set_len(1 << 40).unwrap();
    succeeds(Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&qcow2).arg("1T"));
    for (image, format) in [(raw, "raw"), (qcow2, "qcow2")] {
        succeeds(Command::new("qemu-io").args(["-f", format, "-c", "write -P 8 700G 3M"]).arg(&image));
        let mut serve = common::spillway();
        serve.args(["serve", "--mode", "ram", "--format", format, "--image"]).arg(&image);
        let server = Server::start(
            serve.arg("--nbd").arg(world.path("nbd")).arg("--control").arg(world.path("control")),
        );
        let begun = Instant::now();
        succeeds(Command::new("nbdcopy").arg(world.nbd_uri()).arg("null:"));
        assert!(begun.elapsed() < Duration::from_secs(20), "{format}: {:?}", begun.elapsed());
        let read = stats(&world)["planes"]["guest"]["read_bytes"].as_u64().unwrap();
        assert!((3 << 20..16 << 20).contains(&read), "{format}: {read}");
        qemu_io(&world, &["read -P 8 700G 3M", "read -P 0 600G 1M"]);
        assert_eq!(server.end(Signal::TERM).0, 0);
    }
}
