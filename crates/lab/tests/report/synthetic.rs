//! A results folder as a study would leave it, from made-up machines with the real types.
//!
//! Invariant: what it holds comes from its seed alone.

use spillway_lab::study::record::SCHEMA;
use spillway_lab::study::{Action, RunFacts, RunRecord, Samples, Study, StudyRecord};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// What is made up.
pub struct Synthetic {
    /// A study's file.
    pub study: String,
    /// Of each run.
    pub seconds: u32,
    /// Runs of each scenario.
    pub runs: u32,
    /// Of each scenario, by name: the share of writes that reach the host's storage.
    pub through: BTreeMap<&'static str, f64>,
    /// Figures of the workload, by scenario.
    pub figures: BTreeMap<&'static str, Vec<(&'static str, f64)>>,
}

/// Numbers from 0 to 1.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as f64 / f64::from(1u32 << 31)
    }
}

impl Synthetic {
    /// Writes it to a folder that is there.
    pub fn write(&self, dir: &Path) {
        let study = Study::parse(&self.study).unwrap();
        let words =
            |pairs: &[(&str, &str)]| pairs.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
        let record = StudyRecord {
            schema: SCHEMA,
            study: study.clone(),
            quick: true,
            begun: "2026-01-31T12:00:00Z".into(),
            command: "spillway lab run studies/seed-000.toml --quick".into(),
            versions: words(&[("spillway", "0.1.0 (8dd494c)"), ("qemu", "7.2.19"), ("fio", "3.33")]),
            hardware: words(&[
                ("cpu", "AMD EPYC 7B13, 2 cores"),
                ("RAM", "7.8 GiB"),
                ("disk", "virtio, ext4"),
                ("guests", "TCG: no hardware virtualization"),
            ]),
        };
        fs::write(dir.join("study.json"), serde_json::to_string_pretty(&record).unwrap()).unwrap();
        fs::write(dir.join("study.toml"), &self.study).unwrap();
        for scenario in &study.scenarios {
            for run in 1..=self.runs {
                let engine = study.engine(scenario).name();
                self.run(dir, (&scenario.name, run), scenario.machines, engine);
            }
        }
    }

    fn run(&self, dir: &Path, (name, run): (&str, u32), machines: u32, engine: &str) {
        let mut dice = Dice(u64::from(run) * 977 + name.len() as u64);
        (0..8).for_each(|_| _ = dice.roll());
        let through = self.through.get(name).copied().unwrap_or(1.0);
        let (mut samples, mut actions) = (Samples::default(), Vec::new());
        for machine in 0..machines {
            let mut sums: BTreeMap<String, f64> = BTreeMap::new();
            let mut ram: f64 = 0.0;
            for second in -3..=self.seconds as i32 {
                let busy = if second % 30 < 6 { 8.0 } else { 1.0 } * (0.6 + 0.8 * dice.roll());
                let (reads, writes) = (40.0 * busy, 90.0 * busy);
                let late = (f64::from(second) / f64::from(self.seconds)).powi(2);
                let overflow = if through >= 1.0 { writes } else { writes * through * late * 0.2 };
                let mut add = |key: &str, by: f64| *sums.entry(key.to_string()).or_insert(5000.0) += by;
                for (key, by) in [
                    ("planes.guest.reads", reads),
                    ("planes.guest.writes", writes),
                    ("planes.ram.reads", reads * 0.2 * (1.0 - through)),
                    ("planes.ram.writes", if through >= 1.0 { 0.0 } else { writes }),
                    ("planes.overflow.reads", reads * 0.1 * through),
                    ("planes.overflow.writes", overflow),
                    ("planes.overflow.read_bytes", reads * 0.1 * through * 4096.0),
                    ("planes.overflow.written_bytes", overflow * 16_384.0),
                    ("planes.base.reads", reads),
                    ("planes.base.store_reads", reads * 0.7 * (0.6 + 0.4 * through)),
                    ("planes.base.store_read_bytes", reads * 9000.0),
                    ("cpu.worker_s", 0.02 * busy),
                    ("cpu.vmm_s", 0.3 + 0.05 * busy),
                    ("stalls.ns", 0.0),
                    ("evictions.blocks", overflow * 4.0),
                ] {
                    add(key, by);
                }
                if engine == "guest" {
                    for (key, by) in [("reads", reads), ("writes", writes), ("cpu_s", 0.3)] {
                        add(&format!("inside.{key}"), by);
                    }
                }
                ram = (ram + writes * 4096.0 * (1.0 - through)).min(256e6);
                sums.insert("ram.used_bytes".into(), ram);
                samples.add(machine, f64::from(second) + 0.03 * dice.roll(), &sums);
            }
            for (i, action) in
                ["logon", "open", "edit", "save", "compress"].into_iter().cycle().take(40).enumerate()
            {
                let usual = [4200.0, 310.0, 12.0, 55.0, 1400.0][i % 5];
                let took_ms = usual * (0.5 + dice.roll()) * (0.4 + 0.6 * through);
                let at_s = i as f64 * 3.0;
                actions.push(Action { machine, session: 0, name: action.into(), at_s, took_ms });
            }
        }
        let figures = self.figures.get(name).into_iter().flatten();
        let figures =
            figures.map(|(key, value)| (key.to_string(), value * (0.95 + 0.1 * dice.roll()))).collect();
        let record = RunRecord {
            schema: SCHEMA,
            facts: RunFacts {
                scenario: name.into(),
                run,
                seed: u64::from(run),
                begun: "2026-01-31T12:00:00Z".into(),
                seconds: f64::from(self.seconds) + 31.4,
                engine: engine.into(),
                machines,
                dropped: None,
                commands: vec![format!("spillway serve --mode ram+overflow --ram 256M --socket {name}.sock")],
            },
            actions,
            figures,
        };
        write_run(dir, &record, Some(&samples));
    }
}

/// Puts a run into a results folder.
pub fn write_run(dir: &Path, record: &RunRecord, samples: Option<&Samples>) {
    let folder = dir.join(format!("runs/{}-{}", record.facts.scenario, record.facts.run));
    fs::create_dir_all(&folder).unwrap();
    if let Some(samples) = samples {
        samples.write(&mut fs::File::create(folder.join("samples.csv")).unwrap()).unwrap();
    }
    fs::write(folder.join("run.json"), serde_json::to_string(record).unwrap()).unwrap();
}

/// After the published measurement of one machine and two sizes of RAM; with what a file may say to break a page.
pub fn knowledge_worker() -> Synthetic {
    let study = r#"
        name = "seed-000"
        title = "One knowledge worker & a file copy: what does a <RAM cache> change?"
        question = "Does a cache of 256 or 512 MB take reads and writes off the host's storage, and what does it cost in processor time? One machine, one user, who opens, edits and saves documents while 256 MB of files are copied."
        seed_document = "000"
        baseline = "direct"
        [work]
        workload = "file-copy"
        engine = "guest"
        copied = "256M"
        [runs]
        count = 3
        [[scenario]]
        name = "direct"
        what = "Every write in place in a difference file; <script>alert('what')</script>"
        disk = { mode = "direct", base-cache = "none" }
        storage = { base = "sata-ssd", overflow = "sata-ssd" }
        [[scenario]]
        name = "ram-256m"
        what = "256 MB of RAM, then the overflow"
        disk = { mode = "ram+overflow", ram = "256M", overflow = "10G" }
        storage = { base = "sata-ssd", overflow = "sata-ssd" }
        [[scenario]]
        name = "ram-512m"
        what = "512 MB of RAM, then the overflow"
        disk = { mode = "ram+overflow", ram = "512M", overflow = "10G" }
        storage = { base = "sata-ssd", overflow = "sata-ssd" }
    "#;
    Synthetic {
        study: study.into(),
        seconds: 150,
        runs: 3,
        through: [("direct", 1.0), ("ram-256m", 0.4), ("ram-512m", 0.1)].into(),
        figures: [
            ("direct", vec![("boot_s", 31.0), ("logon_s", 4.2)]),
            ("ram-256m", vec![("boot_s", 24.0), ("logon_s", 2.9)]),
            ("ram-512m", vec![("boot_s", 24.1), ("logon_s", 2.7)]),
        ]
        .into(),
    }
}

/// A fleet and generators beside each other: many scenarios with long names, far apart, in one run each.
pub fn fleet() -> Synthetic {
    let scenario = |name: &str, engine: &str, machines: u32, mode: &str| {
        format!(
            "[[scenario]]\nname = \"{name}\"\nwhat = \"Cache as its name says\"\nmachines = {machines}\n\
             engine = \"{engine}\"\ndisk = {{ mode = \"{mode}\", overflow = \"4G\" }}\n"
        )
    };
    let long = "ram-3g-with-a-name-as-long-as-a-name-of-a-scenario-can-be-60";
    let study = format!(
        "name = \"seed-004\"\ntitle = \"What happens when the RAM is full?\"\nquestion = \"Does it fall?\"\n\
         seed_document = \"004\"\nbaseline = \"direct\"\nscale = {{ factor = 4.0, of = \"RAM and working set\" }}\n\
         [work]\nworkload = \"iometer-citrix\"\nengine = \"replay\"\n[runs]\ncount = 1\n{}{}{}{}{}{}",
        scenario("direct", "host", 4, "direct"),
        scenario("ram-3g", "host", 4, "ram+overflow"),
        scenario("ram-1g", "host", 4, "ram+overflow"),
        scenario(long, "replay", 4, "ram+overflow"),
        scenario("guest-null", "guest", 1, "ram"),
        scenario("guest-ram-3g", "guest", 1, "ram+overflow"),
    );
    let fio = |iops: f64| {
        vec![
            ("fio.iometer-citrix.iops", iops),
            ("fio.iometer-citrix.mb_s", iops * 0.004_096),
            ("fio.iometer-citrix.mean_ms", 64_000.0 / iops),
            ("fio.iometer-citrix.p99_ms", 190_000.0 / iops),
            ("score.sessions", 3.0 + iops / 20_000.0),
        ]
    };
    Synthetic {
        study,
        seconds: 700,
        runs: 1,
        through: [("direct", 1.0), ("ram-3g", 1e-6), ("ram-1g", 0.2), (long, 0.01)].into(),
        figures: [
            ("direct", fio(461.0)),
            ("ram-3g", fio(402_113.0)),
            ("ram-1g", fio(2860.0)),
            ("guest-null", fio(61_000.0)),
            ("guest-ram-3g", fio(58_000.0)),
        ]
        .into(),
    }
}
