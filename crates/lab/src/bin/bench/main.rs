//! `make bench`: Spillway and its peers, side by side, on the load of seed 004.
//!
//! Owns the order of the measurement: all disks stay up, and within a round each point is taken on every disk
//! in turn before the next point, beginning with another disk in each round. Invariant: figures that are compared
//! were taken in the same minute, in every round.

mod report;
mod targets;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use report::{Point, Report, Round, TargetLine};
use spillway_lab::cores::{self, Hardware};
use spillway_lab::process::{clean_up_when_interrupted, cpu_seconds};
use spillway_lab::{End, Load, Stamp};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};
use targets::{Kind, Place, Target};

/// Measures Spillway beside qemu-storage-daemon.
#[derive(Parser)]
#[command(name = "bench")]
struct Options {
    /// 3 s a point instead of 10.
    #[arg(long)]
    quick: bool,
    /// Seconds a point.
    #[arg(long)]
    seconds: Option<f64>,
    /// Rounds; the figures are medians over them.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Queue depths.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64])]
    depths: Vec<usize>,
    /// A directory on the disk: 15 GiB for overlay and overflow.
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// A directory on tmpfs: 3 GiB.
    #[arg(long, default_value = "/dev/shm")]
    tmpfs: PathBuf,
    /// The spillway program [default: beside this program].
    #[arg(long)]
    spillway: Option<PathBuf>,
    /// The cores that drive and serve [default: the first two].
    #[arg(long, value_delimiter = ',')]
    cores: Vec<usize>,
    /// Without Spillway: to try the peers.
    #[arg(long)]
    peers_only: bool,
    /// Where the JSON goes.
    #[arg(long, default_value = "docs/benchmarks/bench.json")]
    out: PathBuf,
    /// Exit with 1 when a figure misses its target.
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match bench(&options) {
        Ok(report) if options.check && report.checks.iter().any(|c| !c.pass) => ExitCode::from(1),
        Ok(_) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench: {e:#}");
            ExitCode::from(2)
        }
    }
}

fn bench(options: &Options) -> Result<Report> {
    let seconds = options.seconds.unwrap_or(if options.quick { 3.0 } else { 10.0 });
    let warm_up = Duration::from_secs_f64((seconds / 6.0).clamp(0.3, 1.5));
    let [driving, serving] = two_cores(options)?;
    room(&options.dir, 15 << 30)?;
    room(&options.tmpfs, 3 << 30)?;
    memory(10 << 30)?;
    let spillway = match &options.spillway {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("spillway"),
    };
    let disk = tempfile::Builder::new().prefix("spillway-bench.").tempdir_in(&options.dir)?;
    let tmpfs = tempfile::Builder::new().prefix("spillway-bench.").tempdir_in(&options.tmpfs)?;
    clean_up_when_interrupted(vec![disk.path().into(), tmpfs.path().into()])?;
    let place = Place { spillway: &spillway, disk: disk.path(), tmpfs: tmpfs.path(), core: serving };

    let peer = version("qemu-storage-daemon")?;
    let stamp = Stamp::now(&spillway);
    ensure!(
        options.peers_only || stamp.spillway.is_some(),
        "{}: does not start: run 'make bench', which builds it",
        spillway.display()
    );
    // Before this thread is kept on one core, and takes the others for missing.
    let hardware = Hardware::look(&options.dir)?;
    cores::pin(driving)?;
    let mut targets = Vec::new();
    for kind in Kind::ALL {
        if !(options.peers_only && kind.is_spillway()) {
            eprintln!("bench: starting {} and writing its disk over", kind.name());
            targets.push(Target::start(kind, &place)?);
        }
    }

    let at_rest = rest(&targets);
    let mut points: Vec<Point> = plan(options, seconds)
        .into_iter()
        .flat_map(|(name, load, kinds)| kinds.into_iter().map(move |kind| (name, load, kind)))
        .filter(|(_, _, kind)| targets.iter().any(|t| t.kind == *kind))
        .map(|(name, load, kind)| Point { name, load, kind, runs: vec![], cpu_us: vec![] })
        .collect();
    let mut rounds = Vec::new();
    for round in 0..options.rounds {
        let cross_core_before_ns = cores::cross_core_ns(driving, serving)?;
        let cold_copy_before_ns = cores::cold_copy_ns(serving)?;
        let loads: Vec<_> = points.iter().map(|p| (p.name, p.load.depth)).collect();
        for index in order(&loads, round) {
            let point = &mut points[index];
            let target = targets.iter_mut().find(|t| t.kind == point.kind).context("no such disk")?;
            let load = Load { seed: point.load.seed + round as u64 * 1000, ..point.load };
            let used = cpu_seconds(target.server.pid());
            let begin = Instant::now();
            let measured = target.measure(load, warm_up)?;
            let share = (cpu_seconds(target.server.pid()) - used) / begin.elapsed().as_secs_f64();
            eprintln!(
                "bench: round {}/{}, {} QD{}: {} {:.0} requests/s",
                round + 1,
                options.rounds,
                point.name,
                load.depth,
                point.kind.name(),
                measured.iops
            );
            point.cpu_us.push(share / measured.iops * 1e6);
            point.runs.push(measured);
        }
        rounds.push(Round {
            cross_core_before_ns,
            cross_core_after_ns: cores::cross_core_ns(driving, serving)?,
            cold_copy_before_ns,
            cold_copy_after_ns: cores::cold_copy_ns(serving)?,
        });
    }

    let lines = targets
        .iter()
        .zip(at_rest)
        .map(|(t, at_rest)| {
            // Where the program lies says nothing.
            let command = t.server.command.replace(&spillway.display().to_string(), "spillway");
            Ok(TargetLine { kind: t.kind, what: t.kind.what(), command, at_rest, stats: t.stats()? })
        })
        .collect::<Result<_>>()?;
    drop(targets);
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut report = Report {
        schema: 2,
        stamp,
        quick: options.quick,
        seconds,
        command: spillway_lab::process::line("bench", &arguments),
        hardware,
        cores: [driving, serving],
        peer,
        targets: lines,
        rounds,
        points,
        checks: vec![],
    };
    report.check();
    report.print();
    keep(&report, &options.out)?;
    Ok(report)
}

/// The points of a round, in order: name, load and the disks that take it.
fn plan(options: &Options, seconds: f64) -> Vec<(&'static str, Load, Vec<Kind>)> {
    let end = End::After(Duration::from_secs_f64(seconds));
    let fits = [Kind::Spillway, Kind::Qcow2Tmpfs, Kind::Qcow2Disk, Kind::NullCo];
    let tight = [Kind::SpillwayTight, Kind::SpillwayTighter, Kind::Qcow2Disk];
    let mut plan = Vec::new();
    for &depth in &options.depths {
        plan.push(("fits", Load::seed_004(depth, end), fits.to_vec()));
    }
    for &depth in options.depths.iter().filter(|&&d| d > 1) {
        plan.push(("tight", Load { random_share: 1.0, ..Load::seed_004(depth, end) }, tight.to_vec()));
    }
    plan
}

/// The order in which a round takes its points: each load on its disks in turn, beginning with another disk in each
/// round, so that none is always first.
fn order<L: PartialEq>(loads: &[L], round: usize) -> Vec<usize> {
    let mut order = Vec::with_capacity(loads.len());
    for disks in loads.chunk_by(PartialEq::eq) {
        let begin = order.len();
        order.extend(begin..begin + disks.len());
        order[begin..].rotate_left(round % disks.len());
    }
    order
}

/// Processor time that each process uses while nobody asks anything: used, of how much.
fn rest(targets: &[Target]) -> Vec<(f64, f64)> {
    // What was begun before (eviction, polling for more work) may end first.
    std::thread::sleep(Duration::from_secs(2));
    let before: Vec<f64> = targets.iter().map(|t| cpu_seconds(t.server.pid())).collect();
    let begin = Instant::now();
    std::thread::sleep(Duration::from_secs(4));
    let of = begin.elapsed().as_secs_f64();
    targets.iter().zip(before).map(|(t, b)| (cpu_seconds(t.server.pid()) - b, of)).collect()
}

fn two_cores(options: &Options) -> Result<[usize; 2]> {
    let there = cores::available()?;
    match options.cores[..] {
        [] => match there[..] {
            [a, b, ..] => Ok([a, b]),
            _ => bail!("bench needs two cores, one to drive and one to serve: there is {}", there.len()),
        },
        [a, b] if a != b && there.contains(&a) && there.contains(&b) => Ok([a, b]),
        _ => bail!("--cores takes two different cores of {there:?}"),
    }
}

fn room(dir: &Path, bytes: u64) -> Result<()> {
    let stat = rustix::fs::statvfs(dir).with_context(|| format!("{}: cannot be used", dir.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    ensure!(
        free >= bytes,
        "{}: bench needs {} GiB there, {:.1} are free: give another directory with --dir or --tmpfs",
        dir.display(),
        bytes >> 30,
        free as f64 / f64::from(1 << 30)
    );
    Ok(())
}

fn memory(bytes: u64) -> Result<()> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let kib: u64 = text
        .lines()
        .find(|l| l.starts_with("MemAvailable"))
        .and_then(|l| l.split_whitespace().nth(1)?.parse().ok())
        .context("/proc/meminfo has no MemAvailable")?;
    ensure!(
        kib * 1024 >= bytes,
        "bench keeps all disks up at once and needs {} GiB of memory: {:.1} are available",
        bytes >> 30,
        kib as f64 / f64::from(1 << 20)
    );
    Ok(())
}

fn version(program: &str) -> Result<String> {
    let output = Command::new(program)
        .arg("--version")
        .output()
        .with_context(|| format!("{program} cannot be started: run 'make bench', or 'make install-deps'"))?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or(program).to_string())
}

fn keep(report: &Report, out: &Path) -> Result<()> {
    if let Some(dir) = out.parent().filter(|d| !d.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir).with_context(|| format!("{}: cannot create", dir.display()))?;
    }
    let mut text = serde_json::to_string_pretty(report)?;
    text.push('\n');
    std::fs::write(out, text).with_context(|| format!("{}: cannot write", out.display()))?;
    println!("\nKept in {}", out.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_round_takes_all_points_and_begins_with_another_disk() {
        let loads = ["fits", "fits", "fits", "tight", "tight"];
        assert_eq!(super::order(&loads, 0), [0, 1, 2, 3, 4]);
        assert_eq!(super::order(&loads, 1), [1, 2, 0, 4, 3]);
        assert_eq!(super::order(&loads, 2), [2, 0, 1, 3, 4]);
    }
}
