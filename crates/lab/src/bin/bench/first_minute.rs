//! The first minute of a disk: what nobody has written to yet, requests larger than a block, clients that sleep, hosts that
//! are busy. Beside the peers, and beside what the host's kernel allows.
//!
//! Owns the rows and the order of the measurement. Invariant: the sides of a row are measured one after the other, in
//! each round beginning with another; each figure is of a disk that was started for it, and what is compared are pairs
//! of the same round.

use crate::Options;
use crate::environment::Environment;
use crate::first_minute_report::{Report, Row, Side, checks_of};
use crate::targets::{Serving, Target};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use spillway_testkit::cores;
use spillway_testkit::{End, Load, Server, Shape};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const GIB: f64 = (1u64 << 30) as f64;
/// What a row writes to a fresh disk.
const SPAN: u64 = 1 << 30;
/// Disks at once in the row of many, and what each writes.
const MANY: usize = 20;
const SPAN_OF_MANY: u64 = 96 * MIB;
/// A disk with RAM for all of it.
const IN_RAM: Serving = Serving::Spillway { ram_bytes: 2 << 30, overflow_bytes: 4 << 30 };

/// What else runs on the cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Host {
    /// Nothing.
    Quiet,
    /// A process on each of the two cores that never stops computing.
    Busy,
}

/// Where driver and server run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Each on a core of its own.
    Apart,
    /// Both on one core.
    Together,
    /// Where the host's scheduler puts them.
    Anywhere,
}

/// Measures one or more sides of a row.
type Take = fn(&Environment) -> Result<Vec<(&'static str, f64)>>;

/// A row to be measured.
struct Plan {
    key: &'static str,
    title: &'static str,
    unit: &'static str,
    hosts: &'static [Host],
    place: Place,
    takes: &'static [Take],
}

const BOTH: &[Host] = &[Host::Quiet, Host::Busy];
const QUIET: &[Host] = &[Host::Quiet];

const PLANS: &[Plan] = &[
    Plan {
        key: "fresh-sequential",
        title: "Fresh disk: 1 MiB sequential writes, one at a time, by a client that sleeps",
        unit: "GiB/s",
        hosts: BOTH,
        place: Place::Apart,
        takes: &[
            |g| sequential(g, IN_RAM, ["spillway", "spillway, the same again"]),
            |g| sequential(g, Serving::Qcow2Tmpfs, ["qcow2 on tmpfs", "qcow2 on tmpfs, the same again"]),
            bare_limits,
        ],
    },
    Plan {
        key: "fresh-deep",
        title: "Fresh disk: 512 KiB sequential writes, 64 at a time, p50",
        unit: "ms",
        hosts: BOTH,
        place: Place::Apart,
        takes: &[
            |g| deep(g, IN_RAM, ["spillway", "spillway, the same again"]),
            |g| deep(g, Serving::Direct, ["mode direct", "mode direct, the same again"]),
        ],
    },
    Plan {
        key: "fresh-random",
        title: "Fresh disk: 4 KiB random writes, 16 at a time",
        unit: "k/s",
        hosts: BOTH,
        place: Place::Apart,
        takes: &[|g| random(g, IN_RAM, "spillway"), |g| random(g, Serving::Qcow2Tmpfs, "qcow2 on tmpfs")],
    },
    Plan {
        key: "fresh-many",
        title: "20 fresh disks at once: 1 MiB sequential writes, one at a time each",
        unit: "GiB/s",
        hosts: QUIET,
        place: Place::Anywhere,
        takes: &[|g| many(g, MANY_IN_RAM, "spillway"), |g| many(g, Serving::Qcow2Tmpfs, "qcow2 on tmpfs")],
    },
    Plan {
        key: "nbd-64k",
        title: "NBD: sequential reads of 64 KiB, 8 at a time",
        unit: "GiB/s",
        hosts: QUIET,
        place: Place::Anywhere,
        takes: NBD_64K,
    },
    Plan {
        key: "nbd-256k",
        title: "NBD: sequential reads of 256 KiB, 8 at a time",
        unit: "GiB/s",
        hosts: QUIET,
        place: Place::Anywhere,
        takes: NBD_256K,
    },
    Plan {
        key: "nbd-1m",
        title: "NBD: sequential reads of 1 MiB, 4 at a time",
        unit: "GiB/s",
        hosts: QUIET,
        place: Place::Anywhere,
        takes: NBD_1M,
    },
    Plan {
        key: "asleep",
        title: "A client that sleeps until it is told: 4 KiB random writes, one at a time, p50",
        unit: "us",
        hosts: QUIET,
        place: Place::Anywhere,
        takes: &[
            |g| asleep(g, IN_RAM, None, "spillway"),
            |g| asleep(g, Serving::Qcow2Tmpfs, None, "qcow2 on tmpfs"),
            |g| asleep(g, Serving::NullCo, None, "null-co, stores nothing"),
        ],
    },
    Plan {
        key: "asleep-together",
        title: "The same with the client and the disk on one core",
        unit: "us",
        hosts: QUIET,
        place: Place::Together,
        takes: &[
            |g| asleep(g, IN_RAM, Some(g.cores[0]), "spillway"),
            |g| asleep(g, Serving::Qcow2Tmpfs, Some(g.cores[0]), "qcow2 on tmpfs"),
            |g| asleep(g, Serving::NullCo, Some(g.cores[0]), "null-co, stores nothing"),
        ],
    },
];

const MANY_IN_RAM: Serving = Serving::Spillway { ram_bytes: 128 * MIB, overflow_bytes: 256 * MIB };
const NBD_64K: &[Take] = &[|g| nbd(g, true, 64, 8, "spillway"), |g| nbd(g, false, 64, 8, "qcow2 on tmpfs")];
const NBD_256K: &[Take] =
    &[|g| nbd(g, true, 256, 8, "spillway"), |g| nbd(g, false, 256, 8, "qcow2 on tmpfs")];
const NBD_1M: &[Take] =
    &[|g| nbd(g, true, 1024, 4, "spillway"), |g| nbd(g, false, 1024, 4, "qcow2 on tmpfs")];

/// Measures all of it. The thread that calls it must not be kept to a core.
pub fn measure(options: &Options, environment: &Environment) -> Result<Report> {
    let mut rows: Vec<Row> = Vec::new();
    for round in 0..options.first_minute_rounds() {
        for host in BOTH {
            let _busy = (*host == Host::Busy).then(|| busy(environment)).transpose()?;
            let plans = PLANS.iter().filter(|p| p.hosts.contains(host) && options.takes_row(p.key));
            for plan in plans {
                take(plan, *host, round, environment, &mut rows)?;
            }
        }
        if options.takes_row("demo") && (!options.quick || round == 0) {
            demo(environment, &mut rows)?;
        }
    }
    let checks = checks_of(&rows);
    Ok(Report { schema: 1, origin: environment.origin.clone(), rows, checks })
}

/// Takes a row once.
fn take(plan: &Plan, host: Host, round: usize, environment: &Environment, rows: &mut Vec<Row>) -> Result<()> {
    let found = std::thread::scope(|scope| {
        let taking = scope.spawn(|| {
            if plan.place != Place::Anywhere {
                environment.keep_to_core()?;
            }
            let mut found = Vec::new();
            for i in 0..plan.takes.len() {
                found.extend(plan.takes[(i + round) % plan.takes.len()](environment)?);
            }
            anyhow::Ok(found)
        });
        taking.join().map_err(|_| anyhow::anyhow!("the measuring thread panicked"))?
    });
    let found = found.with_context(|| plan.title.to_string())?;
    let words: Vec<_> = found.iter().map(|(name, figure)| format!("{name} {figure:.2}")).collect();
    eprintln!("bench: round {}, {host:?}: {}: {} {}", round + 1, plan.title, words.join(", "), plan.unit);
    let row = match rows.iter_mut().find(|r| r.key == plan.key && r.host == host) {
        Some(row) => row,
        None => {
            let (key, title, unit) = (plan.key, plan.title, plan.unit);
            rows.push(Row { key, title, unit, host, sides: vec![] });
            rows.last_mut().context("pushed above")?
        }
    };
    add(row, found);
    Ok(())
}

fn add(row: &mut Row, found: Vec<(&'static str, f64)>) {
    for (name, figure) in found {
        match row.sides.iter_mut().find(|s| s.name == name) {
            Some(side) => side.runs.push(figure),
            None => row.sides.push(Side { name, runs: vec![figure] }),
        }
    }
}

/// Ends the processes that keep the cores busy.
struct Busy(Vec<Child>);

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn busy(environment: &Environment) -> Result<Busy> {
    let mut busy = Busy(Vec::new());
    for core in environment.cores {
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "taskset", "-c", &core.to_string()])
            .args(["sh", "-c", "while :; do :; done"])
            .stdin(Stdio::null())
            .spawn()
            .context("setpriv, taskset and sh are needed")?;
        busy.0.push(child);
    }
    Ok(busy)
}

fn fresh(serving: Serving, environment: &Environment, depth: usize, request_bytes: usize) -> Result<Target> {
    let shape = Shape { depth, request_bytes, ..Shape::default() };
    Target::fresh(serving, SPAN, environment, Some(environment.serving()), shape)
}

fn sequential(
    environment: &Environment,
    serving: Serving,
    names: [&'static str; 2],
) -> Result<Vec<(&'static str, f64)>> {
    let mut disk = fresh(serving, environment, 1, MIB as usize)?;
    let load = Load { depth: 1, ..Load::fill(SPAN, MIB as usize) };
    names.into_iter().map(|name| Ok((name, SPAN as f64 / disk.run_asleep(&load)?.seconds / GIB))).collect()
}

fn deep(
    environment: &Environment,
    serving: Serving,
    names: [&'static str; 2],
) -> Result<Vec<(&'static str, f64)>> {
    let mut disk = fresh(serving, environment, 64, 512 << 10)?;
    let load = Load { depth: 64, ..Load::fill(SPAN, 512 << 10) };
    names.into_iter().map(|name| Ok((name, disk.run(&load)?.p50_ns as f64 / 1e6))).collect()
}

fn random(
    environment: &Environment,
    serving: Serving,
    name: &'static str,
) -> Result<Vec<(&'static str, f64)>> {
    let mut disk = fresh(serving, environment, 16, 4096)?;
    let load = Load {
        write_share: 1.0,
        random_share: 1.0,
        span_bytes: SPAN,
        ..Load::seed_004(16, End::Count(SPAN / 4096 / 4))
    };
    Ok(vec![(name, disk.run(&load)?.iops / 1e3)])
}

fn asleep(
    environment: &Environment,
    serving: Serving,
    core: Option<usize>,
    name: &'static str,
) -> Result<Vec<(&'static str, f64)>> {
    let shape = Shape { depth: 1, request_bytes: 128 << 10, ..Shape::default() };
    let span = 64 * MIB;
    let mut disk = Target::fresh(serving, span, environment, core, shape)?;
    disk.run(&Load { depth: 1, ..Load::fill(span, 128 << 10) })?;
    let end = End::Count(20_000);
    let load = Load { write_share: 1.0, random_share: 1.0, span_bytes: span, ..Load::seed_004(1, end) };
    disk.run_asleep(&load)?;
    Ok(vec![(name, disk.run_asleep(&load)?.p50_ns as f64 / 1e3)])
}

/// All disks are there before the first one is written to; the time is until the last one is done.
fn many(environment: &Environment, serving: Serving, name: &'static str) -> Result<Vec<(&'static str, f64)>> {
    let shape = Shape { depth: 1, request_bytes: MIB as usize, ..Shape::default() };
    let load = Load { depth: 1, ..Load::fill(SPAN_OF_MANY, MIB as usize) };
    let disks: Result<Vec<Target>> =
        (0..MANY).map(|_| Target::fresh(serving, SPAN_OF_MANY, environment, None, shape)).collect();
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let runs: Vec<_> = disks?
            .into_iter()
            .map(|mut disk| scope.spawn(move || disk.run_asleep(&load).map(|_| disk)))
            .collect();
        // They are ended after the clock has stopped.
        let done: Vec<_> = runs.into_iter().map(|run| run.join()).collect();
        let seconds = begin.elapsed().as_secs_f64();
        for run in done {
            run.map_err(|_| anyhow::anyhow!("a driving thread panicked"))??;
        }
        Ok(vec![(name, (MANY as u64 * SPAN_OF_MANY) as f64 / seconds / GIB)])
    })
}

/// Reads what was written before, through fio's NBD client.
fn nbd(
    environment: &Environment,
    ours: bool,
    kib: u64,
    depth: u32,
    name: &'static str,
) -> Result<Vec<(&'static str, f64)>> {
    let serving = if ours { IN_RAM } else { Serving::Qcow2Tmpfs };
    let shape = Shape { depth: 8, request_bytes: MIB as usize, ..Shape::default() };
    let mut disk = Target::fresh(serving, SPAN, environment, None, shape)?;
    disk.run(&Load::fill(SPAN, MIB as usize))?;
    let uri = format!("nbd+unix:///{}?socket={}", if ours { "" } else { "nbd" }, disk.nbd().display());
    let output = Command::new("fio")
        .args(["--name=nbd", "--ioengine=nbd", "--rw=read", "--time_based", "--runtime=2", "--ramp_time=1"])
        .args([&format!("--uri={uri}"), &format!("--bs={kib}k"), &format!("--iodepth={depth}")])
        .args([&format!("--size={SPAN}"), "--output-format=json"])
        .stdin(Stdio::null())
        .output()
        .context("fio cannot be started: run 'make install-deps'")?;
    ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let json: serde_json::Value = serde_json::from_str(&text[text.find('{').unwrap_or(0)..])?;
    let rate = json["jobs"][0]["read"]["bw_bytes"].as_f64().context("fio did not say how much it read")?;
    Ok(vec![(name, rate / GIB)])
}

/// What the kernel allows one thread, and one for another.
fn bare_limits(environment: &Environment) -> Result<Vec<(&'static str, f64)>> {
    let [stored, copied] = cores::memory_limits(environment.serving())?;
    let handed_over = cores::memory_limit_handed_over(environment.serving(), environment.cores[0])?;
    Ok(vec![
        ("pwrite of 512 KiB into new memory", stored / GIB),
        ("the same pwrite for a client that sleeps", handed_over / GIB),
        ("memcpy to memory that is there", copied / GIB),
    ])
}

/// The demo's machines: the 99th percentile of their writes by scenario.
fn demo(environment: &Environment, rows: &mut Vec<Row>) -> Result<()> {
    let program = std::env::current_exe()?.with_file_name("demo");
    let out = environment.disk().join("demo.json");
    let name = program.to_str().context("the program's path is not UTF-8")?;
    let arguments = ["--out".to_string(), out.display().to_string()];
    let log = environment.disk().join("demo.log");
    let mut demo = Server::start("demo", name, &arguments, None, &log)?;
    let status = demo.wait(Duration::from_secs(900))?;
    ensure!(status.success(), "demo: {status}\n{}", demo.tail());
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&out)?)?;
    let outcomes = json["outcomes"].as_array().context("the demo kept no outcomes")?;
    let sides = [("direct", "mode direct"), ("RAM 256M", "RAM 256M"), ("RAM 512M", "RAM 512M")];
    let mut found = Vec::new();
    for (scenario, side) in sides {
        let outcome = outcomes.iter().find(|o| o["name"] == scenario).context("a scenario is missing")?;
        let ns = outcome["stats"]["latency"]["write"]["p99_ns"].as_f64().context("no write latency")?;
        found.push((side, ns / 1e6));
    }
    eprintln!("bench: the demo's write p99: {found:?} ms");
    match rows.iter_mut().find(|r| r.key == "demo") {
        Some(row) => add(row, found),
        None => {
            let title = "The demo's machines (make demo): their writes, p99";
            let mut row = Row { key: "demo", title, unit: "ms", host: Host::Quiet, sides: vec![] };
            add(&mut row, found);
            rows.push(row);
        }
    }
    Ok(())
}
