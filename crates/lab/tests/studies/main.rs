//! Studies as their user runs them: real machines, one that breaks, a study that is killed and goes on, a folder that is full.
#![allow(clippy::unwrap_used, reason = "a test ends where a step fails")]

#[path = "../report/browser.rs"]
mod browser;
mod expected;
mod full;
mod machines;

use serde_json::Value;
use spillway_testkit::disk::program;
use spillway_testkit::process::wait_until;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

/// A study of three runs of a second, without a machine.
const HOST: &str = r#"
name = "host"
title = "From the host"
question = "Is anything lost?"
baseline = "ram"
image = "empty:64M"
[work]
workload = "fio"
engine = "host"
profiles = ["fio-4k-x1"]
seconds = 1
size_mb = 16
[runs]
count = 3
rest_seconds = 0
[[scenario]]
name = "ram"
what = "in RAM"
disk = { mode = "ram", ram = "64M" }
"#;

/// A folder on a disk that has O_DIRECT, for results and for what runs need.
struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> World {
        World { dir: tempfile::Builder::new().prefix("spw-lab").tempdir_in("/var/tmp").unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The words of `spillway lab`, with where runs put what they need.
    fn words(&self, words: &[&str]) -> Vec<String> {
        let scratch = self.path("scratch");
        std::fs::create_dir_all(&scratch).unwrap();
        let scratch = scratch.display().to_string();
        let all = [&["lab"], words, &["--scratch", &scratch]].concat();
        all.into_iter().map(String::from).collect()
    }

    fn lab(&self, words: &[&str]) -> Output {
        Command::new(program().unwrap()).args(self.words(words)).output().unwrap()
    }
}

/// What it printed when it ended well: one object.
fn object(output: &Output) -> Value {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}\n{err}"))
}

fn until<T>(what: &str, done: impl FnMut() -> Option<T>) -> T {
    wait_until(Duration::from_secs(400), done).unwrap_or_else(|| panic!("never: {what}"))
}

fn run_record(results: &Path, run: &str) -> Value {
    let path = results.join("runs").join(run).join("run.json");
    serde_json::from_slice(&std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
        .unwrap()
}
