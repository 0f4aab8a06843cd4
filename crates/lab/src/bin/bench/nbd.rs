//! NBD: a disk that QEMU reaches over NBD, as Proxmox VE and others do, beside the same disk on vhost-user.
//!
//! Owns the comparison, twice: as two disks of one guest, where fio measures; and without a guest, where qemu-storage-daemon has
//! QEMU's part of the way and this program is the client. There, a qcow2 overlay on the host's disk is the third side: what a guest
//! has without Spillway. Each round has new disks, and takes each load on one after the
//! other. Invariant: ratios are of one round, and the sides take turns at being first.

use crate::Options;
use crate::environment::{Environment, Origin};
use crate::report::{rate, time};
use crate::targets::{Serving, Target};
use anyhow::{Context, Result, bail, ensure};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use serde_json::Value;
use spillway_testkit::cores::{self, median};
use spillway_testkit::cpio::Entry;
use spillway_testkit::guest::{self, Accelerator, Guest, GuestDisk, GuestSpec, Kit};
use spillway_testkit::process::cpu_seconds;
use spillway_testkit::{Disk, Driver, End, Load, Server, Shape};
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

const SPAN_MIB: u64 = 512;
/// Longest time for a guest's boot and work, beside its loads.
const PATIENCE: Duration = Duration::from_secs(300);

/// What is measured on each disk, in this order: the first one finds it fresh.
const LOADS: [Shaped; 4] = [
    Shaped {
        name: "fresh disk, 1 MiB sequential writes",
        request_bytes: 1 << 20,
        depth: 1,
        writes: 100,
        random: false,
    },
    Shaped {
        name: "4 KiB random, 80% writes, 1 at a time",
        request_bytes: 4096,
        depth: 1,
        writes: 80,
        random: true,
    },
    Shaped {
        name: "4 KiB random, 80% writes, 16 at a time",
        request_bytes: 4096,
        depth: 16,
        writes: 80,
        random: true,
    },
    Shaped { name: "1 MiB sequential reads", request_bytes: 1 << 20, depth: 1, writes: 0, random: false },
];

/// A load, for fio and for this program.
struct Shaped {
    name: &'static str,
    request_bytes: usize,
    depth: usize,
    /// Percent of the requests that write.
    writes: u32,
    random: bool,
}

impl Shaped {
    /// Whether it writes each byte of the disk once, however long that takes.
    fn is_fill(&self) -> bool {
        self.writes == 100
    }

    fn load(&self, seconds: f64, seed: u64) -> Load {
        let fill = Load { depth: self.depth, ..Load::fill(SPAN_MIB << 20, self.request_bytes) };
        if self.is_fill() {
            return fill;
        }
        Load {
            write_share: f64::from(self.writes) / 100.0,
            random_share: if self.random { 1.0 } else { 0.0 },
            end: End::After(Duration::from_secs_f64(seconds)),
            seed,
            ..fill
        }
    }

    /// The command of fio in a guest.
    fn fio(&self, disk: &str, seconds: f64) -> String {
        let Shaped { request_bytes, depth, writes, random, .. } = self;
        let order = match (random, writes) {
            (true, _) => format!("randrw --rwmixwrite={writes}"),
            (false, 0) => "read".into(),
            (false, _) => "write".into(),
        };
        let end = match self.is_fill() {
            true => String::new(),
            false => format!(" --time_based --runtime={seconds:.1}s"),
        };
        format!(
            "fio --name=load --filename=/dev/{disk} --direct=1 --ioengine=libaio --rw={order} --bs={request_bytes} --iodepth={depth} \
             --size={SPAN_MIB}M{end} --unified_rw_reporting=1 --clat_percentiles=0 --lat_percentiles=1 --output-format=json"
        )
    }
}

/// One load, on both disks.
#[derive(Serialize)]
struct Row {
    load: &'static str,
    vhost_user: Vec<Run>,
    nbd: Vec<Run>,
    /// None in a guest.
    qcow2: Vec<Run>,
}

/// One run of a load.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Run {
    iops: f64,
    p50_ns: f64,
    p99_ns: f64,
    /// Processor time of the disk, and of QEMU's part of the way, for a request. `None` in a guest, where most is QEMU's for the guest.
    cpu_ns: Option<f64>,
}

/// All of it.
#[derive(Serialize)]
pub struct Report {
    schema: u32,
    origin: Origin,
    accelerator: &'static str,
    seconds: f64,
    guest: Vec<Row>,
    bare: Vec<Row>,
}

/// Measures both.
pub fn measure(options: &Options, environment: &Environment) -> Result<Report> {
    let kit = Kit::find().context("there is no guest: run 'make image'")?;
    let accelerator = Accelerator::probe(&kit)?;
    let seconds = options.seconds(5.0, 1.0);
    let [mut guest, mut bare] = [(); 2]
        .map(|()| LOADS.map(|load| Row { load: load.name, vhost_user: vec![], nbd: vec![], qcow2: vec![] }));
    for round in 0..options.rounds() {
        eprintln!("bench: round {}/{}, two disks of one guest", round + 1, options.rounds());
        in_guest(environment, (&kit, accelerator), seconds, round, &mut guest)?;
    }
    environment.keep_to_core()?;
    for round in 0..options.rounds() {
        eprintln!("bench: round {}/{}, without a guest", round + 1, options.rounds());
        without_guest(environment, seconds, round, &mut bare)?;
    }
    let (guest, bare) = (guest.into(), bare.into());
    Ok(Report {
        schema: 1,
        origin: environment.origin.clone(),
        accelerator: accelerator.name(),
        seconds,
        guest,
        bare,
    })
}

/// A new disk with RAM for all of it, in a folder of this name.
fn disk(environment: &Environment, dir: &Path, name: &str) -> Result<Disk> {
    let dir = dir.join(name);
    std::fs::create_dir(&dir)?;
    let base = dir.join("base.raw");
    std::fs::File::create(&base)?.set_len(SPAN_MIB << 20)?;
    Disk::start_with(&environment.spillway, &dir, &base, &["--ram", "1G", "--overflow", "1G"])
}

/// The order of the sides in a round: 0 is vhost-user, 1 is NBD, 2 is qcow2.
fn turns(round: usize, sides: usize) -> impl Iterator<Item = usize> {
    (0..sides).map(move |side| (round + side) % sides)
}

impl Row {
    fn add(&mut self, side: usize, run: Run) {
        [&mut self.vhost_user, &mut self.nbd, &mut self.qcow2][side].push(run);
    }

    /// Median of the ratios of rates within rounds: of these runs to vhost-user.
    fn ratio(&self, runs: &[Run]) -> f64 {
        let ratios = self.vhost_user.iter().zip(runs).map(|(vhost_user, run)| run.iops / vhost_user.iops);
        median(&mut ratios.collect::<Vec<_>>())
    }
}

/// One round in a guest that boots from a disk of neither kind.
fn in_guest(
    environment: &Environment,
    (kit, accelerator): (&Kit, Accelerator),
    seconds: f64,
    round: usize,
    rows: &mut [Row],
) -> Result<()> {
    let dir = tempfile::Builder::new().prefix("guest.").tempdir_in(environment.disk())?;
    let [vhost_user, nbd] = ["vhost-user", "nbd"].map(|name| disk(environment, dir.path(), name));
    let (vhost_user, nbd) = (vhost_user?, nbd?);
    let mut script = String::from("#!/bin/sh\nexec >/dev/ttyS1 2>&1\nset -e\n");
    for (at, load) in LOADS.iter().enumerate() {
        for way in turns(round, 2) {
            let fio = load.fio(["vdb", "vdc"][way], seconds);
            writeln!(script, "{fio} >/run/found\necho \"FOUND {at} {way} $(tr -d '\\n' </run/found)\"")?;
        }
    }
    let service = "[Service]\nType=oneshot\nExecStart=/bin/sh -c '/run/payload/work; echo WORK-EXIT $? >/dev/ttyS1; systemctl poweroff --force'\n\
                   [Install]\nWantedBy=multi-user.target\n";
    let spec = GuestSpec {
        dir: dir.path().into(),
        disks: vec![
            GuestDisk::Snapshot(kit.golden()),
            GuestDisk::VhostUser(vhost_user.vhost()),
            GuestDisk::Nbd(nbd.nbd()),
        ],
        system: true,
        payload: [vec![Entry::file("payload/work", 0o755, script)], guest::service("work", service)].concat(),
        memory_mib: 512,
        vcpus: 2,
        accelerator,
        reboots: false,
    };
    let mut guest = Guest::start(kit, &spec)?;
    guest.wait(PATIENCE + Duration::from_secs_f64(seconds * 2.0 * LOADS.len() as f64))?;
    let reports = guest.reports();
    ensure!(
        reports.iter().any(|line| line == "WORK-EXIT 0"),
        "the guest failed: {reports:?}\n{}",
        guest.tail()
    );
    let mut found = 0;
    for line in reports.iter().filter_map(|line| line.strip_prefix("FOUND ")) {
        let parts: Vec<&str> = line.splitn(3, ' ').collect();
        let [at, way, json] = parts[..] else { bail!("a report of the guest is incomplete: {line}") };
        let (at, way): (usize, usize) = (at.parse()?, way.parse()?);
        ensure!(way < 2, "a report of the guest names no disk: {line}");
        rows.get_mut(at)
            .context("a report of the guest names no load")?
            .add(way, run_of(&serde_json::from_str(json)?)?);
        found += 1;
    }
    ensure!(found == 2 * LOADS.len(), "the guest reported {found} runs: {reports:?}");
    vhost_user.stop()?;
    nbd.stop()
}

/// Reads a run from fio's JSON.
fn run_of(json: &Value) -> Result<Run> {
    let figure = |key: &str| {
        let figure = json.pointer(&format!("/jobs/0/mixed/{key}")).and_then(Value::as_f64);
        figure.filter(|&figure| figure > 0.0).with_context(|| format!("fio says no figure '{key}': {json}"))
    };
    Ok(Run {
        iops: figure("iops")?,
        p50_ns: figure("lat_ns/percentile/50.000000")?,
        p99_ns: figure("lat_ns/percentile/99.000000")?,
        cpu_ns: None,
    })
}

/// Starts a qemu-storage-daemon that is the client of this disk over NBD, and exports what it reads as vhost-user.
fn qemu_between(environment: &Environment, nbd: &Path, socket: &Path) -> Result<Server> {
    let (nbd, exported) = (nbd.display(), socket.display());
    let arguments = [
        "--blockdev".to_owned(),
        format!("driver=nbd,node-name=disk,server.type=unix,server.path={nbd},discard=unmap"),
        "--export".to_owned(),
        format!(
            "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={exported},writable=on"
        ),
    ];
    let program = "qemu-storage-daemon";
    let log = socket.with_extension("log");
    let mut qemu = Server::start(program, program, &arguments, Some(environment.serving()), &log)?;
    qemu.wait_for(socket, Duration::from_secs(30))?;
    Ok(qemu)
}

/// One round with this program as the client: of the disk itself, of qemu-storage-daemon as the client of another one, and of
/// qemu-storage-daemon with a file of its own.
fn without_guest(environment: &Environment, seconds: f64, round: usize, rows: &mut [Row]) -> Result<()> {
    let dir = tempfile::Builder::new().prefix("bare.").tempdir_in(environment.disk())?;
    let [vhost_user, nbd] = ["vhost-user", "nbd"].map(|name| disk(environment, dir.path(), name));
    let (vhost_user, nbd) = (vhost_user?, nbd?);
    let socket = dir.path().join("qemu");
    let mut qemu = qemu_between(environment, &nbd.nbd(), &socket)?;
    let (vhost_user_worker, nbd_worker) = (vhost_user.worker()?, nbd.worker()?);
    for worker in [vhost_user_worker, nbd_worker] {
        cores::pin_process(worker, environment.serving())?;
    }
    let shape = Shape { depth: 16, request_bytes: 1 << 20, ..Shape::default() };
    let core = Some(environment.serving());
    let mut qcow2 = Target::fresh(Serving::Qcow2Disk, SPAN_MIB << 20, environment, core, shape)?;
    let mut vhost_user_driver = Driver::connect_with(&vhost_user.vhost(), shape)?;
    let mut nbd_driver = Driver::connect_with(&socket, shape)?;
    let pids = [vec![vhost_user_worker], vec![nbd_worker, qemu.pid()], vec![qcow2.server.pid()]];
    for (load, row) in LOADS.iter().zip(rows) {
        for side in turns(round, pids.len()) {
            let used = || pids[side].iter().map(|&pid| cpu_seconds(pid)).sum::<f64>();
            let load = load.load(seconds, round as u64);
            let (before, begun) = (used(), Instant::now());
            let found = match side {
                0 => vhost_user_driver.run(&load)?,
                1 => nbd_driver.run(&load)?,
                _ => qcow2.run(&load)?,
            };
            let share = (used() - before) / begun.elapsed().as_secs_f64();
            let (p50_ns, p99_ns) = (found.p50_ns as f64, found.p99_ns as f64);
            row.add(side, Run { iops: found.iops, p50_ns, p99_ns, cpu_ns: Some(share / found.iops * 1e9) });
        }
    }
    drop((vhost_user_driver, nbd_driver));
    qemu.stop()?;
    vhost_user.stop()?;
    nbd.stop()
}

/// For people.
pub fn print(report: &Report) {
    let tables = [
        (format!("two disks of one guest ({})", report.accelerator), &report.guest),
        ("without a guest".to_owned(), &report.bare),
    ];
    for (title, rows) in tables {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        table.set_header([&title, "side", "a second", "p50", "p99", "processor", "rate to vhost-user"]);
        for row in rows {
            let sides =
                [("vhost-user", &row.vhost_user), ("NBD by QEMU", &row.nbd), ("qcow2 by QEMU", &row.qcow2)];
            for (side, runs) in sides.into_iter().filter(|(_, runs)| !runs.is_empty()) {
                let of = |figure: fn(&Run) -> f64| median(&mut runs.iter().map(figure).collect::<Vec<_>>());
                let mut cpu: Vec<f64> = runs.iter().filter_map(|run| run.cpu_ns).collect();
                let cpu = if cpu.is_empty() { "-".into() } else { time(median(&mut cpu)) };
                let ratio = format!("{:.2}", row.ratio(runs));
                let figures =
                    [rate(of(|run| run.iops)), time(of(|run| run.p50_ns)), time(of(|run| run.p99_ns))];
                table.add_row(
                    [vec![row.load.to_owned(), side.to_owned()], figures.to_vec(), vec![cpu, ratio]].concat(),
                );
            }
        }
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("\n{table}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_side_is_first_in_turn() {
        let orders: Vec<Vec<usize>> = (0..3).map(|round| turns(round, 3).collect()).collect();
        assert_eq!(orders, [[0, 1, 2], [1, 2, 0], [2, 0, 1]]);
        assert_eq!(turns(1, 2).collect::<Vec<_>>(), [1, 0]);
    }

    #[test]
    fn figures_of_a_guest_are_taken_whole_or_not_at_all() {
        let percentile = json!({ "50.000000": 1000, "99.000000": 2500 });
        let found = json!({ "jobs": [{ "mixed": { "iops": 4.5, "lat_ns": { "percentile": percentile } } }] });
        let run = Run { iops: 4.5, p50_ns: 1000.0, p99_ns: 2500.0, cpu_ns: None };
        assert_eq!(run_of(&found).unwrap(), run);
        for key in ["iops", "lat_ns"] {
            let mut less = found.clone();
            less["jobs"][0]["mixed"][key] = json!(0);
            assert!(run_of(&less).unwrap_err().to_string().contains(key));
        }
    }

    #[test]
    fn a_ratio_is_that_of_one_round() {
        let run = |iops| Run { iops, p50_ns: 1.0, p99_ns: 1.0, cpu_ns: None };
        let row =
            Row { load: "x", vhost_user: [10.0, 100.0, 1000.0].map(run).into(), nbd: vec![], qcow2: vec![] };
        assert_eq!(row.ratio(&[1.0, 50.0, 900.0].map(run)), 0.5);
    }
}
