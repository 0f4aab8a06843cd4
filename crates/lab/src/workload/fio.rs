//! The loads that fio generates, by name, as the published measurements had them.
//!
//! Owns what each is; who runs it is fio inside of a machine, or the lab's own generator from the host: Debian's fio
//! (3.33, without libblkio) has no engine for vhost-user. Invariant: both ask for the same sizes, shares and depths.

use super::settings::Fio;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use spillway_testkit::load::Measured;
use std::collections::BTreeMap;

/// A load that fio and the lab's own generator can run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Profile {
    /// Its name in studies.
    pub name: &'static str,
    /// Bytes in a request, in KiB.
    pub request_kib: u32,
    /// Of a hundred requests, those that write.
    pub write_percent: u32,
    /// Of a hundred requests, those that go anywhere; the others follow the one before.
    pub random_percent: u32,
    /// Processes that ask at the same time.
    pub workers: u32,
    /// Requests that each has in flight.
    pub depth: u32,
    /// The span that it runs over.
    pub size_mb: u32,
}

/// All profiles.
pub const PROFILES: [Profile; 5] = [
    // Seed 004.
    Profile {
        name: "iometer-citrix",
        request_kib: 4,
        write_percent: 80,
        random_percent: 90,
        workers: 4,
        depth: 16,
        size_mb: 2560,
    },
    // Moyle's, of seed 002, with the 8 workers of seed 003.
    Profile {
        name: "iometer-vdi",
        request_kib: 4,
        write_percent: 80,
        random_percent: 80,
        workers: 8,
        depth: 32,
        size_mb: 1024,
    },
    // Seed 003.
    Profile {
        name: "fio-4k-x1",
        request_kib: 4,
        write_percent: 100,
        random_percent: 100,
        workers: 1,
        depth: 1,
        size_mb: 1024,
    },
    Profile {
        name: "fio-64k-x16",
        request_kib: 64,
        write_percent: 100,
        random_percent: 100,
        workers: 16,
        depth: 16,
        size_mb: 1024,
    },
    Profile {
        name: "fio-1m-x1",
        request_kib: 1024,
        write_percent: 100,
        random_percent: 100,
        workers: 1,
        depth: 1,
        size_mb: 1024,
    },
];

/// A run of fio: a profile and how it is run.
#[derive(Clone, Copy, Debug)]
pub struct FioRun {
    /// The load.
    pub profile: Profile,
    /// Size of the file or of the part of the disk that is used.
    pub size_mb: u32,
    /// Whether requests go through the guest's page cache.
    pub buffered: bool,
}

impl FioRun {
    /// The name that its figures begin with.
    pub fn name(&self) -> String {
        format!("{}{}", self.profile.name, if self.buffered { "-buffered" } else { "" })
    }
}

/// All runs, in their order: each profile, and then the same through the page cache if that is asked for.
pub fn runs(fio: &Fio) -> Vec<FioRun> {
    let profiles = fio.profiles.iter().filter_map(|name| PROFILES.into_iter().find(|p| p.name == name));
    let ways: &[bool] = if fio.buffered { &[false, true] } else { &[false] };
    let run = |profile: Profile, buffered| FioRun {
        profile,
        size_mb: fio.size_mb.unwrap_or(profile.size_mb),
        buffered,
    };
    profiles.flat_map(|profile| ways.iter().map(move |&buffered| run(profile, buffered))).collect()
}

/// fio's options for a load on a file or device.
pub fn command(run: &FioRun, file: &str, seconds: u32, seed: u64) -> String {
    let Profile { request_kib, write_percent, random_percent, workers, depth, .. } = run.profile;
    let rw = match write_percent {
        100 => "--rw=randwrite".into(),
        // fio knows a share of random requests for mixed loads.
        _ => format!("--rw=randrw --rwmixwrite={write_percent} --percentage_random={random_percent}"),
    };
    // Buffered as seed 003's source of its commands has it: the end of a run is when all is on the disk.
    let how = match run.buffered {
        true => "--direct=0 --ioengine=posixaio --end_fsync=1",
        false => "--direct=1 --ioengine=libaio",
    };
    format!(
        "--filename={file} {rw} --bs={request_kib}k --size={}m --numjobs={workers} --iodepth={depth} {how} --time_based \
         --runtime={seconds} --norandommap --randrepeat=1 --allrandrepeat=1 --randseed={} --group_reporting \
         --unified_rw_reporting=1 --lat_percentiles=1 --percentile_list=50:99",
        run.size_mb,
        seed & (u64::MAX >> 1)
    )
}

/// The highest value that a figure of fio can have: bytes in a second, or a latency in ns.
const MOST: f64 = 1e15;

/// The figures of one run of fio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FioFigures {
    iops: f64,
    bytes_s: f64,
    mean_ms: f64,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
}

impl FioFigures {
    /// Reads them from fio's JSON.
    pub fn from_json(json: &Value) -> Result<FioFigures> {
        let figure = |key: &str| {
            let figure = json.pointer(&format!("/jobs/0/mixed/{key}")).and_then(Value::as_f64);
            let figure = figure.with_context(|| format!("no figure '{key}'"))?;
            ensure!((0.0..MOST).contains(&figure), "'{key}' cannot be {figure}");
            Ok(figure)
        };
        Ok(FioFigures {
            iops: figure("iops")?,
            bytes_s: figure("bw_bytes")?,
            mean_ms: figure("lat_ns/mean")? / 1e6,
            p50_ms: figure("lat_ns/percentile/50.000000")? / 1e6,
            p99_ms: figure("lat_ns/percentile/99.000000")? / 1e6,
            max_ms: figure("lat_ns/max")? / 1e6,
        })
    }

    /// Takes them from the lab's own generator.
    pub fn from_measured(measured: &Measured, request_bytes: usize) -> FioFigures {
        FioFigures {
            iops: measured.iops,
            bytes_s: measured.iops * request_bytes as f64,
            mean_ms: measured.mean_ns / 1e6,
            p50_ms: measured.p50_ns as f64 / 1e6,
            p99_ms: measured.p99_ns as f64 / 1e6,
            max_ms: measured.max_ns as f64 / 1e6,
        }
    }

    /// Adds the figures of all machines together: when the first began, sums of rates, the mean of all requests; of percentiles,
    /// which cannot be added, the worst.
    pub fn add_figures(found: &[FioFigures], name: &str, began_s: f64, figures: &mut BTreeMap<String, f64>) {
        let sum = |of: fn(&FioFigures) -> f64| found.iter().map(of).sum::<f64>();
        let most = |of: fn(&FioFigures) -> f64| found.iter().map(of).fold(0.0, f64::max);
        let iops = sum(|f| f.iops);
        let mean_ms = if iops > 0.0 { sum(|f| f.mean_ms * f.iops) / iops } else { 0.0 };
        let values = [
            // A report has no figures below 0.
            began_s.max(0.0),
            iops,
            sum(|f| f.bytes_s) / 1e6,
            mean_ms,
            most(|f| f.p50_ms),
            most(|f| f.p99_ms),
            most(|f| f.max_ms),
        ];
        figures.extend(names(name).into_iter().zip(values));
    }
}

/// The names of a run's figures.
pub fn names(load: &str) -> [String; 7] {
    ["began_s", "iops", "mb_s", "mean_ms", "p50_ms", "p99_ms", "max_ms"]
        .map(|last| format!("fio.{load}.{last}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_becomes_the_options_of_its_seed() {
        let fio = Fio { buffered: true, size_mb: Some(512), ..Fio::default() };
        let all = runs(&fio);
        assert_eq!(
            all.iter().map(FioRun::name).collect::<Vec<_>>(),
            ["iometer-citrix", "iometer-citrix-buffered"]
        );
        let direct = command(&all[0], "/dev/vdb", 600, 8);
        for option in [
            "--rwmixwrite=80",
            "--percentage_random=90",
            "--bs=4k",
            "--numjobs=4",
            "--iodepth=16",
            "--size=512m",
            "--direct=1",
        ] {
            assert!(direct.split(' ').any(|o| o == option), "{option}: {direct}");
        }
        assert!(command(&all[1], "/srv/f", 1, 8).contains("--direct=0 --ioengine=posixaio --end_fsync=1"));
    }

    #[test]
    fn figures_of_machines_are_added_where_they_can_be() {
        let found = |iops, ms| FioFigures {
            iops,
            bytes_s: iops * 4096.0,
            mean_ms: ms,
            p50_ms: ms,
            p99_ms: ms,
            max_ms: ms,
        };
        let mut figures = BTreeMap::new();
        FioFigures::add_figures(&[found(100.0, 1.0), found(300.0, 5.0)], "p", -0.001, &mut figures);
        let of = |key: &str| figures[&format!("fio.p.{key}")];
        assert_eq!((of("began_s"), of("iops"), of("mean_ms"), of("p99_ms")), (0.0, 400.0, 4.0, 5.0));
        assert!((of("mb_s") - 1.6384).abs() < 1e-9);
        let said = serde_json::json!({"jobs": [{"mixed": {"iops": 10.5, "bw_bytes": 43008, "lat_ns":
            {"mean": 2e6, "max": 9_000_000, "percentile": {"50.000000": 1_000_000, "99.000000": 8_000_000}}}}]});
        let want =
            FioFigures { iops: 10.5, bytes_s: 43008.0, mean_ms: 2.0, p50_ms: 1.0, p99_ms: 8.0, max_ms: 9.0 };
        assert_eq!(FioFigures::from_json(&said).unwrap(), want);
        assert!(FioFigures::from_json(&serde_json::json!({"jobs": []})).is_err());
        for wrong in [-1.0, 1e300] {
            let mut said = said.clone();
            said["jobs"][0]["mixed"]["lat_ns"]["max"] = wrong.into();
            let error = format!("{:#}", FioFigures::from_json(&said).unwrap_err());
            assert!(error.contains("lat_ns/max"), "{error}");
        }
    }
}
