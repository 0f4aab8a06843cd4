//! `predict`: the table that sets the advisor's curve beside disks of other sizes, for some kinds of work.
//!
//! Owns the kinds of work and the table. Invariant: each curve is of one recording; every other figure is of a fresh disk.

use crate::studies::{hardware, prepare, versions};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::json;
use spillway_advisor::{Event, Operation};
use spillway_lab::predict::{Curve, METHODS, Moved, replayed, settled, sizes};
use spillway_lab::replay::{Speed, replay};
use spillway_lab::stamp;
use spillway_lab::study::{Engine, Lab, watch::Source, watch::Watch};
use spillway_lab::workload::{self, RecordStage, Stage, WorkDisk};
use spillway_testkit::{Disk, Driver, Rng, Server, Shape};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Options of `predict`.
#[derive(Debug, clap::Args)]
pub struct Predict {
    /// Folder for the table, predictions.md, and all figures, predictions.json
    #[arg(long)]
    out: PathBuf,
    /// Runs of fresh machines for each size
    #[arg(long, default_value_t = 2)]
    fresh: u32,
    /// Only these kinds of work
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// A folder on a disk
    #[arg(long, default_value = "/var/tmp")]
    scratch: PathBuf,
}

/// A kind of work, fixed by count.
struct Subject {
    name: &'static str,
    work: Kind,
}

enum Kind {
    /// In a machine: a workload of this name, with these parameters.
    Machine(&'static str),
    /// Not in a machine: requests of 4 KiB.
    Pattern(Pattern),
}

/// So many percent of its requests are random, and so many are writes.
#[derive(Clone, Copy)]
struct Pattern {
    random: u64,
    writes: u64,
}

const SUBJECTS: [Subject; 6] = [
    Subject { name: "file-copy", work: Kind::Machine("megabytes = 256\nactions = 16\npace = 100") },
    Subject { name: "knowledge-worker", work: Kind::Machine("actions = 60\npace = 100") },
    Subject {
        name: "session-host",
        work: Kind::Machine("sessions = 6\nlogon_every_s = 2\nactions = 12\npace = 100"),
    },
    Subject { name: "iometer-citrix", work: Kind::Pattern(Pattern { random: 90, writes: 80 }) },
    Subject { name: "iometer-vdi", work: Kind::Pattern(Pattern { random: 80, writes: 80 }) },
    // Of all the others little is read back.
    Subject { name: "half-reads", work: Kind::Pattern(Pattern { random: 100, writes: 50 }) },
];

/// Requests and span of a pattern.
const REQUESTS: u64 = 600_000;
const SPAN_BYTES: u64 = 2560 << 20;
const DISK_BYTES: u64 = 4 << 30;
/// Where less than this share of the written bytes is read back, a share of that says nothing.
const LEAST_READ: f64 = 0.01;
/// The longest that one machine may take.
const LIMIT: Duration = Duration::from_secs(900);
/// The RAM tier of the disk that is recorded: nothing leaves it.
const RECORDED_RAM: &str = "6G";

/// One size of one kind of work.
#[derive(Serialize)]
struct SizePrediction {
    ram_bytes: u64,
    written_bytes: u64,
    measured: Moved,
    /// How long the replay took.
    seconds: f64,
    /// Its requests that began more than a millisecond late.
    late: u64,
    /// By method: what it said, and how far off that is, as shares of the written bytes.
    predicted: BTreeMap<&'static str, (Moved, (f64, f64))>,
    /// Fresh runs: what they moved and wrote.
    fresh: Vec<(Moved, u64)>,
}

/// The predictions for all sizes of one kind of work.
#[derive(Serialize)]
struct SubjectPredictions {
    name: &'static str,
    requests: u64,
    zero_overflow_bytes: u64,
    lines: Vec<SizePrediction>,
}

/// Makes the table.
pub fn predict(args: &Predict) -> Result<ExitCode> {
    // What takes long must not end for want of a place.
    let put = |name: &str, text: &str| {
        let path = args.out.join(name);
        std::fs::write(&path, text).with_context(|| format!("{}: cannot write", path.display()))
    };
    std::fs::create_dir_all(&args.out).with_context(|| format!("{}: cannot make", args.out.display()))?;
    let lab = prepare(&args.scratch)?;
    let (begun, hardware, versions) = (stamp::now(), hardware(&args.scratch, &lab)?, versions(&lab));
    let said = Instant::now();
    let say = |what: &str| eprintln!("predict: [{:>5.0} s] {what}", said.elapsed().as_secs_f64());
    let chosen = |s: &&Subject| args.only.is_empty() || args.only.iter().any(|name| name == s.name);
    for name in &args.only {
        ensure!(SUBJECTS.iter().any(|s| s.name == name), "'{name}' is not a kind of work of this table");
    }
    let mut all = Vec::new();
    for subject in SUBJECTS.iter().filter(chosen) {
        all.push(predict_subject(subject, args.fresh, &lab, &say).with_context(|| subject.name.to_string())?);
    }
    let whole = json!({
        "schema": 1, "begun": begun, "hardware": hardware, "versions": versions, "found": all,
    });
    let text = table(&all, &hardware, &versions);
    println!("{text}");
    put("predictions.json", &(serde_json::to_string_pretty(&whole)? + "\n"))?;
    put("predictions.md", &text)?;
    // An LRU cache is not what the product is.
    let held = |method: &str| method != "lru";
    let off = METHODS.iter().filter(|(method, most)| held(method) && worst(&all, method).0 > *most);
    Ok(if off.count() > 0 { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

fn predict_subject(
    subject: &Subject,
    fresh: u32,
    lab: &Lab,
    say: &dyn Fn(&str),
) -> Result<SubjectPredictions> {
    let dir = tempfile::Builder::new().prefix("predict.").tempdir_in(&lab.scratch)?;
    say(&format!("{}: one run is recorded", subject.name));
    let image = match subject.work {
        Kind::Pattern(_) => {
            let path = dir.path().join("empty.raw");
            File::create(&path)?.set_len(DISK_BYTES)?;
            path
        }
        Kind::Machine(_) => lab.kit.golden(),
    };
    let trace = record(subject, lab, dir.path(), &image)?;
    let curves = METHODS.map(|(method, _)| Curve::of(&lab.spillway, &trace, method).map(|c| (method, c)));
    let curves = curves.into_iter().collect::<Result<Vec<_>>>()?;
    let zero_overflow_bytes =
        curves.iter().find(|(method, _)| *method == "lru").map_or(0, |c| c.1.zero_overflow_bytes);
    let (mut lines, mut requests) = (Vec::new(), 0);
    // Eviction is behind a load that no machine would ask so fast.
    let speed = if matches!(subject.work, Kind::Pattern(_)) { Speed::Full } else { Speed::Times(1.0) };
    for ram_bytes in sizes(zero_overflow_bytes) {
        say(&format!("{}: {} MiB", subject.name, ram_bytes >> 20));
        let (measured, written_bytes, done) =
            replayed(&lab.spillway, &trace, &image, ram_bytes, speed, dir.path())?;
        requests = done.requests;
        let predicted = curves.iter().map(|(method, curve)| {
            let said = curve.at(ram_bytes);
            (*method, (said, said.off(measured, written_bytes as f64)))
        });
        let predicted = predicted.collect();
        let fresh = (0..fresh).map(|n| fresh_run(subject, lab, dir.path(), &image, ram_bytes, n));
        let fresh = fresh.collect::<Result<_>>()?;
        let (seconds, late) = (done.seconds, done.late);
        lines.push(SizePrediction { ram_bytes, written_bytes, measured, seconds, late, predicted, fresh });
    }
    Ok(SubjectPredictions { name: subject.name, requests, zero_overflow_bytes, lines })
}

/// One run, recorded: a trace.
fn record(subject: &Subject, lab: &Lab, dir: &Path, image: &Path) -> Result<PathBuf> {
    let recording = dir.join("recording");
    std::fs::create_dir(&recording)?;
    let asked = match subject.work {
        Kind::Machine(text) => {
            let stage = RecordStage {
                kit: &lab.kit,
                accelerator: lab.accelerator,
                program: &lab.spillway,
                parameters: &parameters(text)?,
                seed: 1,
                scratch: lab.scratch.path(),
                dir: &recording,
                deadline: Instant::now() + LIMIT,
            };
            return Ok(workload::record(subject.name, &stage)?.trace);
        }
        Kind::Pattern(asked) => asked,
    };
    let disk = Disk::start_with(&lab.spillway, &recording, image, &["--ram", RECORDED_RAM])?;
    let trace = recording.join("trace");
    let words =
        ["trace", "record", &disk.control().display().to_string(), "--out", &trace.display().to_string()];
    let (words, log) = (words.map(String::from), recording.join("recorder.log"));
    let program = lab.spillway.display().to_string();
    let mut recorder = Server::start("spillway trace record", &program, &words, None, &log)?;
    recorder.wait_for(&trace, Duration::from_secs(20))?;
    ask(&disk, asked, 1)?;
    let status = recorder.stop()?;
    ensure!(status.success(), "spillway trace record: {status}\n{}", recorder.tail());
    disk.stop()?;
    Ok(trace)
}

fn parameters(text: &str) -> Result<BTreeMap<String, toml::Value>> {
    let table: toml::Table = toml::from_str(text)?;
    Ok(table.into_iter().collect())
}

/// Asks a disk a pattern.
fn ask(disk: &Disk, asked: Pattern, seed: u64) -> Result<()> {
    let shape = Shape { queues: 1, depth: 64, request_bytes: 4096, deadline: Duration::from_secs(600) };
    let mut driver = Driver::connect_with(&disk.vhost(), shape)?;
    let done = replay(&mut driver, pattern(asked, seed), Speed::Full, |_, _| {})?;
    ensure!(done.failed == 0, "{} requests failed", done.failed);
    Ok(())
}

/// Its requests, each block that is not random after the one before.
fn pattern(asked: Pattern, seed: u64) -> impl Iterator<Item = Result<Event>> {
    let (mut rng, mut next) = (Rng::new(seed), 0);
    (0..REQUESTS).map(move |_| {
        if rng.below(100) < asked.random {
            next = rng.below(SPAN_BYTES / 4096) * 4096;
        }
        let offset_bytes = next;
        next = (next + 4096) % SPAN_BYTES;
        let operation = if rng.below(100) < asked.writes { Operation::Write } else { Operation::Read };
        Ok(Event { time_us: 0, operation, offset_bytes, len_bytes: 4096 })
    })
}

/// The same work again, by a machine of its own: the same choices, at other times.
fn fresh_run(
    subject: &Subject,
    lab: &Lab,
    dir: &Path,
    image: &Path,
    ram_bytes: u64,
    number: u32,
) -> Result<(Moved, u64)> {
    let own = tempfile::Builder::new().prefix("fresh.").tempdir_in(dir)?;
    let ram = ram_bytes.to_string();
    let disk = Disk::start_with(&lab.spillway, own.path(), image, &["--ram", &ram, "--overflow", "40G"])?;
    let text = match subject.work {
        Kind::Pattern(asked) => {
            ask(&disk, asked, 2 + u64::from(number))?;
            return settled(&disk);
        }
        Kind::Machine(text) => text,
    };
    let watch = Watch::start(&[Source::Control(disk.control())])?;
    let stage = Stage {
        kit: &lab.kit,
        accelerator: lab.accelerator,
        parameters: &parameters(text)?,
        seed: 1,
        dir: own.path(),
        disks: &[WorkDisk::Served { vhost: disk.vhost() }],
        recording: None,
        watch: &watch,
        deadline: Instant::now() + LIMIT,
    };
    workload::run(subject.name, Engine::Guest, &stage)?;
    settled(&disk)
}

/// One sentence on the worst: beside replays, and beside machines that did the work again.
fn farthest(all: &[SubjectPredictions]) -> String {
    let of = |(method, _): (&str, f64)| {
        let (replays, fresh) = worst(all, method);
        let fresh = fresh.map_or(String::new(), |fresh| format!(" and {fresh:.3} from fresh runs"));
        format!("`{method}` {replays:.3} from replays{fresh}")
    };
    format!("Greatest differences: {}.", METHODS.map(of).join("; "))
}

/// How far off a method was at worst: beside replays, and beside fresh runs, if there were any.
fn worst(all: &[SubjectPredictions], method: &str) -> (f64, Option<f64>) {
    let (mut replays, mut fresh) = (0.0_f64, None);
    for line in all.iter().flat_map(|found| &found.lines) {
        let Some((said, off)) = line.predicted.get(method) else { continue };
        replays = replays.max(off.0).max(off.1);
        let said = said.shares(line.written_bytes);
        for (moved, written) in &line.fresh {
            let off = said.off(moved.shares(*written), 1.0);
            fresh = Some(fresh.unwrap_or(0.0_f64).max(off.0).max(off.1));
        }
    }
    (replays, fresh)
}

/// One sentence on what is read back, which is little beside what is written: of that itself, how far off the policy is.
fn of_what_is_read(all: &[SubjectPredictions]) -> String {
    let mut most = 0.0_f64;
    let mut farthest: Option<(f64, &str, u64)> = None;
    for (found, line) in all.iter().flat_map(|found| found.lines.iter().map(move |line| (found, line))) {
        let share = line.measured.shares(line.written_bytes).read_bytes;
        most = most.max(share);
        let Some((_, (_, off))) = line.predicted.get("policy").filter(|_| share >= LEAST_READ) else {
            continue;
        };
        if farthest.is_none_or(|(farthest, ..)| off / share > farthest) {
            farthest = Some((off / share, found.name, line.ram_bytes >> 20));
        }
    }
    let farthest = farthest.map_or(String::new(), |(off, name, mib)| {
        format!(
            " Where at least {:.0}% is read back, `policy` differs by at most {:.0}% of the bytes read back ({name}, {mib} MiB).",
            LEAST_READ * 100.0,
            off * 100.0
        )
    });
    format!("At most {:.1}% of the bytes written are read back.{farthest}", most * 100.0)
}

/// Head of the page.
const HEAD: &str = r#"# Predictions of the advisor, compared with measurements

The lab records one run of each workload on a disk that holds everything in RAM. From this recording, `spillway advise` computes a curve with each of its methods. Then
the recording is replayed on fresh disks of four smaller RAM sizes. Each disk counts what it evicts, until eviction is at rest, and what it reads back for requests.

| column | meaning |
| --- | --- |
| measured | what the replay evicted or read back, as a percentage of the bytes that the guest wrote |
| fresh | least and greatest value of runs of the same work at that size on new machines, whose requests come at other times |
| policy, lru, sampled | predictions of the methods: `policy` simulates the eviction policy of Spillway on a scale model; `lru` simulates a cache that evicts the least recently used block; `sampled` is LRU on a sample of the blocks |
| off | \|predicted - measured\| as a share of the bytes written. The target is at most 0.05, for `sampled` at most 0.10. Greater values are bold |

Spillway keeps blocks that are written repeatedly, so that it evicts less than LRU. This is the difference between `policy` and `lru`.

- Recordings of machines are replayed at their own pace. The patterns of IOMeter and half-reads (as many reads as writes, all random) are sent from the host as fast as the
  disk replies. Their fresh runs use other random numbers.
- The session hosts of seed 001 write 1 to 4 GB. The six sessions here write a tenth of 1 GB, and all sizes are reduced accordingly.
- If the write of a zero block has to wait, the recording contains it as data, and a replay writes it as data. Therefore the replays of file-copy evict slightly more than
  its fresh runs.

"#;

/// The table, for `docs/`.
fn table(
    all: &[SubjectPredictions],
    hardware: &BTreeMap<String, String>,
    versions: &BTreeMap<String, String>,
) -> String {
    let mut out = String::from(HEAD);
    let list = |map: &BTreeMap<String, String>| {
        map.iter().map(|(k, v)| format!("{k} {v}")).collect::<Vec<_>>().join("; ")
    };
    let _ = writeln!(out, "Made by `spillway lab predict`. {}. {}.\n", list(hardware), list(versions));
    let _ = writeln!(out, "{} {}\n", farthest(all), of_what_is_read(all));
    let percent = |part: f64, written: u64| 100.0 * part / (written as f64).max(1.0);
    for found in all {
        let _ = writeln!(
            out,
            "## {}\n\n{} requests, {} MB written; nothing is evicted from {} MiB on.\n\n\
             | RAM MiB | | measured % | fresh % | policy % | off | lru % | off | sampled % | off |\n\
             | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
            found.name,
            found.requests,
            found.lines.first().map_or(0, |line| line.written_bytes / 1_000_000),
            found.zero_overflow_bytes.div_ceil(1 << 20)
        );
        for line in &found.lines {
            for evicted in [true, false] {
                let part = |moved: &Moved| if evicted { moved.evicted_bytes } else { moved.read_bytes };
                let fresh: Vec<f64> =
                    line.fresh.iter().map(|(moved, written)| percent(part(moved), *written)).collect();
                let least = fresh.iter().copied().fold(f64::INFINITY, f64::min);
                let fresh = match fresh.iter().copied().fold(0.0, f64::max) {
                    _ if fresh.is_empty() => "-".into(),
                    most => format!("{least:.1} to {most:.1}"),
                };
                let _ = write!(
                    out,
                    "| {} | {} | {:.1} | {fresh} |",
                    line.ram_bytes >> 20,
                    if evicted { "evicted" } else { "read back" },
                    percent(part(&line.measured), line.written_bytes),
                );
                for (method, most) in METHODS {
                    let Some((said, off)) = line.predicted.get(method) else { continue };
                    let off = if evicted { off.0 } else { off.1 };
                    let mark = if off > most { "**" } else { "" };
                    let _ = write!(
                        out,
                        " {:.1} | {mark}{off:.3}{mark} |",
                        percent(part(said), line.written_bytes)
                    );
                }
                out.push('\n');
            }
        }
        out.push('\n');
    }
    out
}
