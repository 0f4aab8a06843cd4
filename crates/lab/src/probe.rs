//! What the bare disk gives under an overflow's two kinds of I/O at once: random reads beside a sequential writer.
//!
//! Owns a file of its own and the fio processes over it, both gone when it returns. Invariant: the file was written
//! whole before it is read, so that every read reaches the disk.

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::Value;
use spillway_testkit::Server;
use std::path::Path;
use std::time::Duration;

/// Seconds that are not counted at the beginning.
const RAMP_SECONDS: u32 = 1;
/// How long fio may take beyond the time that it was given.
const PATIENCE: Duration = Duration::from_secs(600);

/// What is asked of the disk.
#[derive(Clone, Copy, Debug)]
pub struct Probe<'a> {
    /// A folder on the disk.
    pub dir: &'a Path,
    /// Size of the file.
    pub file_bytes: u64,
    /// Reads in flight, 4 KiB each.
    pub depth: usize,
    /// What the writer writes a second, in pieces of 256 KiB; 0 for no writer.
    pub write_bytes_per_second: u64,
    /// How long.
    pub seconds: f64,
    /// The reader's core and the writer's.
    pub cores: [usize; 2],
}

/// What it gave.
#[derive(Clone, Debug, Serialize)]
pub struct Probed {
    /// Random reads a second.
    pub read_iops: f64,
    /// What the writer was to write.
    pub asked_write_bytes_per_second: u64,
    /// What it wrote.
    pub write_bytes_per_second: f64,
    /// How it was measured.
    pub command: String,
}

impl Probed {
    /// Whether the writer wrote what it was asked to, or nearly; else the reads had more of the disk than they should.
    pub fn writer_kept_up(&self) -> bool {
        self.write_bytes_per_second >= self.asked_write_bytes_per_second as f64 * 0.95
    }
}

impl Probe<'_> {
    /// Writes the file, measures, and removes the file.
    pub fn run(&self) -> Result<Probed> {
        let work = tempfile::Builder::new().prefix("probe.").tempdir_in(self.dir)?;
        fio(work.path(), "fill", &self.fill())?;
        let (command, found) = fio(work.path(), "reads", &self.measure())?;
        let read_iops = job(&found, "reads")?["read"]["iops"].as_f64().context("fio gave no iops")?;
        ensure!(read_iops > 0.0, "fio read nothing: {command}");
        let write_bytes_per_second = match self.write_bytes_per_second {
            0 => 0.0,
            _ => job(&found, "writes")?["write"]["bw_bytes"].as_f64().context("fio gave no bw_bytes")?,
        };
        Ok(Probed {
            read_iops,
            asked_write_bytes_per_second: self.write_bytes_per_second,
            write_bytes_per_second,
            command,
        })
    }

    fn common(&self) -> Vec<String> {
        let [a, b] = self.cores;
        [
            "--filename=probe".to_string(),
            format!("--size={}", self.file_bytes),
            "--ioengine=io_uring".into(),
            "--direct=1".into(),
            "--fixedbufs".into(),
            "--registerfiles".into(),
            format!("--cpus_allowed={a},{b}"),
            "--cpus_allowed_policy=split".into(),
        ]
        .into()
    }

    fn fill(&self) -> Vec<String> {
        let mut arguments = self.common();
        arguments.extend(["--name=fill", "--rw=write", "--bs=1m", "--iodepth=4"].map(String::from));
        arguments
    }

    fn measure(&self) -> Vec<String> {
        let mut arguments = self.common();
        arguments.extend([
            "--time_based".into(),
            format!("--runtime={:.0}ms", self.seconds * 1000.0),
            format!("--ramp_time={RAMP_SECONDS}"),
        ]);
        arguments.extend(["--name=reads", "--rw=randread", "--bs=4k", "--norandommap"].map(String::from));
        arguments.push(format!("--iodepth={}", self.depth));
        if self.write_bytes_per_second > 0 {
            arguments.extend(["--name=writes", "--rw=write", "--bs=256k", "--iodepth=2"].map(String::from));
            arguments.push(format!("--rate={}", self.write_bytes_per_second));
        }
        arguments
    }
}

/// Runs fio in a folder: its command line, and what it found.
fn fio(dir: &Path, name: &str, arguments: &[String]) -> Result<(String, Value)> {
    let output = dir.join(format!("{name}.json"));
    let mut all = vec![format!("--directory={}", dir.display())];
    all.extend([format!("--output={}", output.display()), "--output-format=json".into()]);
    all.extend_from_slice(arguments);
    let mut server = Server::start("fio", "fio", &all, None, &dir.join(format!("{name}.log")))?;
    let status = server.wait(PATIENCE)?;
    let text = std::fs::read_to_string(&output).unwrap_or_default();
    ensure!(status.success(), "{}: {status}\n{}\n{text}", server.command, server.tail());
    // Notes come before the object.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let found = serde_json::from_str(json).with_context(|| format!("fio did not print JSON:\n{text}"))?;
    let shown = spillway_testkit::process::line("fio", arguments);
    Ok((shown, found))
}

fn job<'a>(found: &'a Value, name: &str) -> Result<&'a Value> {
    let jobs = found["jobs"].as_array().context("fio reported no jobs")?;
    jobs.iter().find(|j| j["jobname"] == name).with_context(|| format!("fio reported no job '{name}'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_that_falls_behind_is_noticed() {
        let probed = |write_bytes_per_second| Probed {
            read_iops: 1.0,
            asked_write_bytes_per_second: 1000,
            write_bytes_per_second,
            command: String::new(),
        };
        assert!(probed(960.0).writer_kept_up() && probed(1010.0).writer_kept_up());
        assert!(!probed(940.0).writer_kept_up());
    }

    #[test]
    fn reads_and_a_writer_at_its_rate_leave_nothing_behind() {
        if !spillway_testkit::has_program("fio") {
            return spillway_testkit::skip("fio is not installed");
        }
        let dir = tempfile::Builder::new().tempdir_in("/var/tmp").unwrap();
        let cores = spillway_testkit::cores::available().unwrap();
        let probe = Probe {
            dir: dir.path(),
            file_bytes: 32 << 20,
            depth: 16,
            write_bytes_per_second: 8 << 20,
            seconds: 2.0,
            cores: [cores[0], cores[cores.len() - 1]],
        };
        let probed = probe.run().unwrap();
        assert!(probed.read_iops > 0.0);
        let rate = probed.write_bytes_per_second / f64::from(8 << 20);
        // A busy host writes less than the rate that was asked for, and none writes much more.
        assert!(rate > 0.0 && rate < 1.5, "{rate} of the rate that was asked for: {}", probed.command);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let alone = Probe { write_bytes_per_second: 0, seconds: 0.5, ..probe }.run().unwrap();
        assert_eq!(alone.write_bytes_per_second, 0.0);
    }
}
