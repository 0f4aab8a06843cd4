//! What a disk is asked is recorded as it was asked, its curve goes along, and both say what the disk has done.

use crate::deaths::Enough;
use crate::world::{DEADLINE, MIB, World, succeeds, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use spillway_testkit::disk::{figure, program};
use spillway_testkit::{Disk, Driver, End, Load, Server, Shape};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SPAN: u64 = 64 * MIB;
const SHAPE: Shape = Shape { queues: 2, depth: 32, request_bytes: 256 << 10, deadline: DEADLINE };

fn spillway(words: &[&str]) -> Command {
    let mut command = Command::new(program().unwrap());
    command.args(words);
    command
}

fn json(command: &mut Command) -> Value {
    serde_json::from_str(&succeeds(command)).unwrap()
}

/// Somebody who records, and has begun to.
fn record(world: &World, disk: &Disk, name: &str) -> (Server, PathBuf) {
    let (file, log, control) = (world.path(name), world.path(&format!("{name}.log")), disk.control());
    let words = ["trace", "record", control.to_str().unwrap(), "--out", file.to_str().unwrap(), "--json"];
    let words: Vec<String> = words.iter().map(ToString::to_string).collect();
    let recorder =
        Server::start("recorder", program().unwrap().to_str().unwrap(), &words, None, &log).unwrap();
    // The file comes after the ring.
    until("somebody records", disk, || file.exists());
    (recorder, file)
}

/// It is enough. What the recorder said.
fn ends(mut recorder: Server) -> Value {
    kill_process(Pid::from_raw(recorder.pid() as i32).unwrap(), Signal::INT).unwrap();
    let status = recorder.wait(Duration::from_secs(20)).unwrap();
    assert!(status.success(), "{}", recorder.tail());
    let output = recorder.tail();
    serde_json::from_str(output.lines().find(|line| line.starts_with('{')).expect("one object")).unwrap()
}

fn info(trace: &Path) -> Value {
    json(spillway(&["trace", "info", "--json"]).arg(trace))
}

#[test]
fn what_is_recorded_is_what_was_asked_and_says_what_the_disk_did() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.blank(SPAN);
    let disk = world.serve(&image, &["--ram", "24M", "--overflow", "256M"]);
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    let (first, trace) = record(&world, &disk, "first.trace");
    let (second, beside) = record(&world, &disk, "second.trace");
    let load = Load { span_bytes: SPAN, ..Load::seed_004(32, End::Count(60_000)) };
    let load = Load {
        random_share: 0.5,
        skew: Some(spillway_testkit::Skew { of_requests: 0.9, to_blocks: 0.3 }),
        ..load
    };
    let measured = driver.run(&load).unwrap();
    let writes = measured.requests - measured.reads;
    // Of 16 blocks the last 12 are zeroes, and take no space; what is given up and flushed is told too.
    let mut content = vec![0; 64 << 10];
    content[..16 << 10].fill(7);
    driver.write_at(SPAN - 2 * MIB, &content).unwrap();
    driver.discard(0, MIB).unwrap();
    driver.write_zeroes(MIB, MIB, false).unwrap();
    driver.flush().unwrap();
    let stats = disk.stats().unwrap();
    let summary = ends(first);
    assert_eq!(ends(second)["lost"], 0);
    assert_eq!(summary["lost"], 0);

    let recorded = info(&trace);
    assert_eq!(recorded["end"], "whole");
    assert_eq!(
        (&recorded["disk_bytes"], &recorded["reads"]["requests"]),
        (&SPAN.into(), &measured.reads.into())
    );
    assert_eq!(recorded["reads"]["bytes"], figure(&stats, "planes.guest.read_bytes").unwrap());
    assert_eq!(recorded["writes"]["requests"], writes + 1);
    assert_eq!(recorded["writes"]["bytes"], writes * 4096 + (16 << 10));
    assert_eq!(recorded["write_zeroes"]["bytes"], MIB + (48 << 10));
    assert_eq!((&recorded["discards"]["bytes"], &recorded["flushes"]["requests"]), (&MIB.into(), &1.into()));
    for key in ["reads", "writes", "write_zeroes", "discards", "flushes"] {
        assert_eq!(recorded[key], info(&beside)[key]);
    }

    // The same by those who count: beside the disk, exactly, and in miniature, which does what the disk does. An LRU cache,
    // which does not promote what is read and does not spare what was used twice, would do something else.
    let written = figure(&stats, "planes.guest.written_bytes").unwrap() as f64;
    let evicted = figure(&stats, "evictions.blocks").unwrap() as f64 * 4096.0;
    assert!(evicted > written / 10.0, "it was evicted: {stats}");
    let live = json(spillway(&["stats", "--curve", "--json"]).arg(disk.control()));
    let by = |method: &str| {
        let all = json(spillway(&["advise", "--json", "--method", method]).arg(&trace));
        assert_eq!((&all["traces"][0]["curve"], all["traces"].as_array().unwrap().len()), (&all["curve"], 1));
        all
    };
    let curves =
        [("live", live.clone()), ("lru", by("lru")), ("sampled", by("sampled")), ("policy", by("policy"))];
    let expected = curves.each_ref().map(|(name, curve)| {
        let expected = at(curve, 24 * MIB);
        println!("{name}: {expected} bytes evicted of {written} written; the disk did {evicted}");
        expected / written
    });
    let [live_share, lru, sampled, policy] = expected;
    assert!((policy - evicted / written).abs() < 0.05, "{policy}: {:#}", curves[3].1);
    assert!((live_share - lru).abs() < 0.10 && (sampled - lru).abs() < 0.10, "{expected:?}");
    assert_eq!(live["totals"]["written_blocks"], curves[1].1["totals"]["written_blocks"]);
    assert!(live["memory_bytes"].as_u64().unwrap() < MIB, "{}", live["memory_bytes"]);
    let picture = world.path("curves.svg");
    let advise = ["advise", "--budget", "64M", "--svg", picture.to_str().unwrap()];
    let table = succeeds(spillway(&advise).arg(&trace).arg(&trace));
    assert!(table.contains("nothing overflows from") && table.contains("its share of 64.0 MiB"), "{table}");
    let drawn = std::fs::read_to_string(picture).unwrap();
    assert!(drawn.starts_with("<svg ") && drawn.contains("its share of the budget"), "{drawn}");
    let scraped = succeeds(spillway(&["stats", "--prometheus"]).arg(disk.control()));
    assert!(scraped.contains("ram_bytes=\"67108864\"} 0\n"), "all of the disk fits: {scraped}");
    assert!(succeeds(spillway(&["stats", "--curve"]).arg(disk.control())).contains("RAM tier"));
    // All that it holds has come since it began; what the next worker finds there has not.
    let fill = |key: &str| {
        figure(&json(spillway(&["stats", "--curve", "--json"]).arg(disk.control())), key).unwrap()
    };
    // Its two tiers are read one after the other, and a block may go from one to the other between.
    let holds = |bytes: u64| {
        until("what it holds is told", &disk, || {
            let stats = disk.stats().unwrap();
            let tiers = ["ram.used_bytes", "overflow.used_bytes"].map(|key| figure(&stats, key).unwrap());
            tiers[0] + tiers[1] == bytes
        });
    };
    let before = fill("fill.grown_bytes");
    assert!(before > 0);
    holds(before);
    drop(driver);
    let worker = disk.worker().unwrap();
    kill_process(Pid::from_raw(worker as i32).unwrap(), Signal::KILL).unwrap();
    until("another worker", &disk, || disk.worker().is_ok_and(|pid| pid != worker && pid != 0));
    // Whoever answers a handshake serves, and keeps a curve.
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    let left = fill("fill.left_bytes");
    assert_eq!(fill("fill.grown_bytes"), 0);
    holds(before);
    driver.write_at(0, &[9; 64 << 10]).unwrap();
    assert_eq!(fill("fill.grown_bytes"), 64 << 10, "that was given up before");
    assert_eq!(left - fill("fill.left_bytes"), 64 << 10);
    holds(before + (64 << 10));
    drop(driver);
    disk.stop().unwrap();
}

/// What a curve says of a size between two of its points.
fn at(curve: &Value, ram_bytes: u64) -> f64 {
    let points: Vec<(f64, f64)> = curve["curve"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| (p["ram_bytes"].as_f64().unwrap(), p["overflow_write_bytes"].as_f64().unwrap()))
        .collect();
    let ram = ram_bytes as f64;
    let i = points.partition_point(|p| p.0 < ram).clamp(1, points.len() - 1);
    let ((x0, y0), (x1, y1)) = (points[i - 1], points[i]);
    y0 + (y1 - y0) * ((ram - x0) / (x1 - x0)).clamp(0.0, 1.0)
}

#[test]
fn a_trace_is_asked_again_at_its_pace_or_another() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.blank(SPAN);
    let disk = world.serve(&image, &["--ram", "24M", "--overflow", "256M"]);
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    let (recorder, trace) = record(&world, &disk, "trace");
    let load = Load { span_bytes: SPAN, ..Load::seed_004(8, End::Count(20_000)) };
    let begun = std::time::Instant::now();
    driver.run(&load).unwrap();
    // A pause, which is part of its pace.
    std::thread::sleep(Duration::from_secs(2));
    driver.write_at(0, &vec![5; 2 << 20]).unwrap();
    driver.discard(4 * MIB, MIB).unwrap();
    driver.flush().unwrap();
    let took = begun.elapsed().as_secs_f64();
    ends(recorder);
    let evicted = disk.figure("evictions.blocks").unwrap();
    drop(driver);
    disk.stop().unwrap();

    for (speed, times) in [("1", 1.0), ("4", 4.0), ("full", f64::INFINITY)] {
        let disk = world.serve(&image, &["--ram", "24M", "--overflow", "256M"]);
        let replay = ["trace", "replay", "--json", "--speed", speed, "--to", disk.vhost().to_str().unwrap()]
            .map(String::from);
        let again = world.path(&format!("again-{times}"));
        let (recorder, _) = record(&world, &disk, again.file_name().unwrap().to_str().unwrap());
        let done = json(Command::new(program().unwrap()).args(replay).arg(&trace));
        ends(recorder);
        let figure = |key: &str| done[key].as_u64().unwrap();
        assert_eq!((figure("failed"), figure("left_out")), (0, 0), "{done}");
        let seconds = done["seconds"].as_f64().unwrap();
        let late = if times == 1.0 { took + 3.0 } else { 2.0 };
        assert!(seconds >= 2.0 / times && seconds < late, "{speed}: {done}");
        // The same requests, in the same order.
        let (was, is) = (info(&trace), info(&again));
        for key in ["reads", "writes", "discards", "flushes"] {
            assert_eq!(was[key]["bytes"], is[key]["bytes"], "{speed} {key}");
        }
        let now = disk.figure("evictions.blocks").unwrap();
        assert!(now.abs_diff(evicted) * 20 <= 20_000, "{speed}: {now} blocks evicted, and {evicted} before");
        disk.stop().unwrap();
    }
    // A disk that is too small is not asked.
    let small = world.serve(&world.blank(MIB), &["--ram", "24M"]);
    let refused = spillway(&["trace", "replay", "--to"]).arg(small.vhost()).arg(&trace).output().unwrap();
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && stderr.contains("must be as large"), "{stderr}");
    small.stop().unwrap();
}

#[test]
fn a_recording_goes_on_over_deaths_of_the_worker_and_ends_with_its_disk() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.blank(SPAN);
    let disk = world.serve(&image, &["--ram", "96M"]);
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    let (recorder, trace) = record(&world, &disk, "trace");
    let load = Load { span_bytes: SPAN, ..Load::seed_004(32, End::Count(5000)) };
    driver.run(&load).unwrap();
    for _ in 0..3 {
        let before = disk.worker().unwrap();
        kill_process(Pid::from_raw(before as i32).unwrap(), Signal::KILL).unwrap();
        until("another worker", &disk, || disk.worker().is_ok_and(|now| now != before && now != 0));
        driver.run(&load).unwrap();
    }
    drop(driver);
    // The file's name is taken; and one that nobody ended, since the disk has, is whole.
    let taken = spillway(&["trace", "record"]).arg(disk.control()).arg("--out").arg(&trace).output().unwrap();
    assert_eq!(taken.status.code(), Some(73), "{taken:?}");
    disk.stop().unwrap();
    let mut recorder = recorder;
    assert!(recorder.wait(Duration::from_secs(20)).unwrap().success(), "{}", recorder.tail());
    let summary = info(&trace);
    let requests =
        summary["reads"]["requests"].as_u64().unwrap() + summary["writes"]["requests"].as_u64().unwrap();
    assert_eq!((requests, &summary["end"]), (20_000, &"whole".into()), "{summary}");
}

/// Another program takes over, three times in the middle of requests: the worker that ends has published what it took, and
/// the next one is asked no more than the rest.
#[test]
fn a_recording_goes_on_over_upgrades_and_has_every_request_once() {
    let Some(world) = World::new(&[]) else { return };
    let image = world.blank(SPAN);
    let disk = world.serve(&image, &["--ram", "96M"]);
    let mut driver = Driver::connect_with(&disk.vhost(), SHAPE).unwrap();
    let (recorder, trace) = record(&world, &disk, "trace");
    let is_over = AtomicBool::new(false);
    let mut asked = [0; 2];
    std::thread::scope(|scope| {
        let upgrader = scope.spawn(|| {
            let _over = Enough(&is_over);
            for _ in 0..3 {
                let before = disk.worker().unwrap();
                succeeds(spillway(&["upgrade"]).arg(disk.control()));
                until("another worker", &disk, || disk.worker().is_ok_and(|now| now != before && now != 0));
            }
        });
        let mut seed = 0;
        while !is_over.load(Ordering::Relaxed) {
            let load = Load { span_bytes: SPAN, seed, ..Load::seed_004(32, End::Count(2000)) };
            let measured = driver.run(&load).unwrap();
            asked = [asked[0] + measured.reads, asked[1] + measured.requests - measured.reads];
            seed += 1;
        }
        upgrader.join().unwrap();
    });
    assert_eq!(ends(recorder)["lost"], 0);
    let summary = info(&trace);
    assert_eq!(
        (&summary["reads"]["requests"], &summary["writes"]["requests"], &summary["end"]),
        (&asked[0].into(), &asked[1].into(), &"whole".into()),
        "{summary}"
    );
    drop(driver);
    disk.stop().unwrap();
}

#[test]
fn what_others_have_recorded_is_imported() {
    let Some(world) = World::new(&[]) else { return };
    let file = world.path("a.csv");
    std::fs::write(
        &file,
        "0,W,0,8192,1577808000000000\n0,R,4096,4096,1577808000000100\n1,R,0,4096,1577808000000200\n",
    )
    .unwrap();
    let trace = world.path("a.trace");
    let mut import = spillway(&["trace", "import", "--format", "alibaba", "--device", "0", "--out"]);
    succeeds(import.arg(&trace).arg(&file));
    let summary = info(&trace);
    assert_eq!((&summary["reads"]["requests"], &summary["writes"]["bytes"]), (&1.into(), &8192.into()));
    assert_eq!(summary["begin_unix_us"], 1_577_808_000_000_000_u64);
    // Of two devices one must be named, and what is no trace is none; nothing is left of either.
    for words in [&["trace", "import", "--format", "alibaba"][..], &["trace", "import", "--format", "msr"]] {
        let (out, mut import) = (world.path("none"), spillway(words));
        let refused = import.arg("--out").arg(&out).arg(&file).output().unwrap();
        let stderr = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(66) && stderr.contains("line "), "{stderr}");
    }
    let refused = spillway(&["advise"]).arg(&file).output().unwrap();
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(66) && stderr.contains("--format"), "{stderr}");
}
