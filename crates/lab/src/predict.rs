//! How near the advisor comes: the curve from one recording, beside what disks of other sizes do when they are asked the same.
//!
//! Owns which sizes are compared, and how far off is counted: |predicted - measured| as a share of the bytes that the guest wrote.
//! Invariant: what is measured is the product's own counters when eviction is at rest after the last request, on a fresh disk each.

use crate::replay::{Replayed, Speed, replay};
use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::Value;
use spillway_advisor::trace::TraceReader;
use spillway_testkit::disk::{figure, went_wrong};
use spillway_testkit::{Disk, Driver, Shape};
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// The methods of the advisor, and how far each may be off.
pub const METHODS: [(&str, f64); 3] = [("policy", 0.05), ("lru", 0.05), ("sampled", 0.10)];
/// Sizes that are compared, as shares of the one from which on nothing overflows.
pub const SHARES: [f64; 4] = [0.2, 0.4, 0.6, 0.8];
const MIB: u64 = 1 << 20;
/// Eviction that has done nothing for so long is at rest.
const REST: Duration = Duration::from_secs(1);
/// The least RAM tier that is compared.
const LEAST_BYTES: u64 = 8 * MIB;

/// Bytes that leave the RAM tier and come back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Moved {
    /// Evicted.
    pub evicted_bytes: f64,
    /// Read from the overflow for requests.
    pub read_bytes: f64,
}

impl Moved {
    /// As shares of what was written.
    pub fn shares(self, written_bytes: u64) -> Moved {
        let of = |bytes: f64| bytes / (written_bytes as f64).max(1.0);
        Moved { evicted_bytes: of(self.evicted_bytes), read_bytes: of(self.read_bytes) }
    }

    /// How far off this is, as shares of what was written.
    pub fn off(self, measured: Moved, written_bytes: f64) -> (f64, f64) {
        let off = |a: f64, b: f64| (a - b).abs() / written_bytes.max(1.0);
        (off(self.evicted_bytes, measured.evicted_bytes), off(self.read_bytes, measured.read_bytes))
    }
}

/// A curve of the advisor.
pub struct Curve {
    points: Vec<(f64, Moved)>,
    /// From where on nothing overflows.
    pub zero_overflow_bytes: u64,
}

impl Curve {
    /// What `spillway advise` says of a trace.
    pub fn of(spillway: &Path, trace: &Path, method: &str) -> Result<Curve> {
        let output =
            Command::new(spillway).args(["advise", "--json", "--method", method]).arg(trace).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "spillway advise {}: {said}", trace.display());
        let all: Value = serde_json::from_slice(&output.stdout).context("spillway advise printed no JSON")?;
        Curve::read(&all)
    }

    /// From the advisor's JSON.
    pub fn read(said: &Value) -> Result<Curve> {
        let number = |value: &Value, key: &str| value[key].as_f64().with_context(|| format!("no {key}"));
        let points = said["curve"].as_array().context("no curve")?.iter().map(|point| {
            let evicted_bytes = number(point, "overflow_write_bytes")?;
            let read_bytes = number(point, "overflow_read_bytes")?;
            Ok((number(point, "ram_bytes")?, Moved { evicted_bytes, read_bytes }))
        });
        let points: Vec<_> = points.collect::<Result<_>>()?;
        ensure!(points.len() > 1, "a curve of {} points", points.len());
        Ok(Curve { points, zero_overflow_bytes: number(said, "zero_overflow_bytes")? as u64 })
    }

    /// At a size: on the line between the two points beside it, as a reader of the curve would.
    pub fn at(&self, ram_bytes: u64) -> Moved {
        let ram = ram_bytes as f64;
        let i = self.points.partition_point(|p| p.0 < ram).clamp(1, self.points.len() - 1);
        let ((x0, a), (x1, b)) = (self.points[i - 1], self.points[i]);
        let part = if x1 > x0 { ((ram - x0) / (x1 - x0)).clamp(0.0, 1.0) } else { 0.0 };
        let on = |a: f64, b: f64| a + (b - a) * part;
        Moved {
            evicted_bytes: on(a.evicted_bytes, b.evicted_bytes),
            read_bytes: on(a.read_bytes, b.read_bytes),
        }
    }
}

/// The sizes that are compared, for a curve: whole MiB.
pub fn sizes(zero_overflow_bytes: u64) -> Vec<u64> {
    let size = |share: f64| ((zero_overflow_bytes as f64 * share) as u64 / MIB * MIB).max(LEAST_BYTES);
    let mut sizes: Vec<u64> = SHARES.iter().map(|share| size(*share)).collect();
    sizes.dedup();
    sizes
}

/// What a disk has moved once eviction is at rest, and what its guest has written. The reserve that eviction keeps free is behind
/// a load that asks as fast as it is answered, and is made up after it.
pub fn settled(disk: &Disk) -> Result<(Moved, u64)> {
    let end = Instant::now() + Duration::from_secs(60);
    let mut before = measured(&disk.stats()?)?;
    loop {
        std::thread::sleep(REST);
        let stats = disk.stats()?;
        if let Some(wrong) = went_wrong(&stats) {
            bail!("{wrong}");
        }
        let now = measured(&stats)?;
        if now == before {
            return Ok(now);
        }
        ensure!(Instant::now() < end, "eviction goes on a minute after the last request");
        before = now;
    }
}

fn measured(stats: &Value) -> Result<(Moved, u64)> {
    let evicted = figure(stats, "evictions.blocks")? * 4096;
    let read =
        figure(stats, "planes.overflow.read_bytes")?.saturating_sub(figure(stats, "collector.read_bytes")?);
    let moved = Moved { evicted_bytes: evicted as f64, read_bytes: read as f64 };
    Ok((moved, figure(stats, "planes.guest.written_bytes")?))
}

/// Asks a fresh disk of this size what the trace holds.
pub fn replayed(
    spillway: &Path,
    trace: &Path,
    image: &Path,
    ram_bytes: u64,
    speed: Speed,
    scratch: &Path,
) -> Result<(Moved, u64, Replayed)> {
    let dir = tempfile::Builder::new().prefix("predict.").tempdir_in(scratch)?;
    let ram = ram_bytes.to_string();
    let disk = Disk::start_with(spillway, dir.path(), image, &["--ram", &ram, "--overflow", "40G"])?;
    let shape = Shape { queues: 1, depth: 64, request_bytes: 1 << 20, deadline: Duration::from_secs(600) };
    let mut driver = Driver::connect_with(&disk.vhost(), shape)?;
    let reader = TraceReader::new(BufReader::with_capacity(256 << 10, File::open(trace)?))?;
    let done = replay(&mut driver, reader, speed, |_, _| {})?;
    ensure!(done.failed == 0, "{} requests failed", done.failed);
    let (moved, written) = settled(&disk)?;
    drop(driver);
    disk.stop()?;
    Ok((moved, written, done))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_curve_is_read_between_its_points() {
        let point = |ram: u64, evicted: u64| json!({"ram_bytes": ram, "overflow_write_bytes": evicted, "overflow_read_bytes": evicted / 10});
        let said =
            json!({"curve": [point(0, 1000), point(100, 500), point(200, 0)], "zero_overflow_bytes": 200});
        let curve = Curve::read(&said).unwrap();
        assert_eq!(curve.at(50), Moved { evicted_bytes: 750.0, read_bytes: 75.0 });
        assert_eq!(curve.at(100).evicted_bytes, 500.0);
        assert_eq!(curve.at(9000).evicted_bytes, 0.0);
        let off = curve.at(50).off(Moved { evicted_bytes: 700.0, read_bytes: 100.0 }, 1000.0);
        assert!((off.0 - 0.05).abs() < 1e-9 && (off.1 - 0.025).abs() < 1e-9, "{off:?}");
        assert!(Curve::read(&json!({"curve": []})).is_err());
    }

    #[test]
    fn sizes_are_whole_and_none_is_compared_twice() {
        assert_eq!(sizes(1000 * MIB), [200, 400, 600, 800].map(|mib| mib * MIB));
        assert_eq!(sizes(16 * MIB), [8 * MIB, 9 * MIB, 12 * MIB]);
    }
}
