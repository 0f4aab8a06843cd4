//! The shipped small study, on real machines.

use crate::browser::Browser;
use crate::{World, object, run_record, until};
use rustix::process::{Pid, Signal, kill_process};
use spillway_lab::study::METRICS;
use spillway_testkit::Server;
use spillway_testkit::disk::program;
use spillway_testkit::guest::Kit;
use std::path::Path;
use std::process::Command;

/// The process of a VMM whose command line names this folder.
fn vmm_of(folder: &Path) -> Option<Pid> {
    let folder = folder.display().to_string();
    std::fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let command = std::fs::read(entry.path().join("cmdline")).ok()?;
        let command = String::from_utf8_lossy(&command).into_owned();
        // What starts it has the same words behind its own.
        (command.starts_with("qemu-system") && command.contains(&folder)).then(|| Pid::from_raw(pid))?
    })
}

#[test]
fn a_machine_that_breaks_is_dropped_and_a_study_that_is_killed_goes_on() {
    Kit::find().expect("the guest has not been built: run 'make image'");
    let world = World::new();
    let results = world.path("results");
    let words = world.words(&["run", "small", "--out", results.to_str().unwrap(), "--json"]);
    let program = program().unwrap();
    let program = program.to_str().unwrap();
    let mut lab = Server::start("lab", program, &words, None, &world.path("lab.log")).unwrap();

    // The first machine breaks.
    let first = results.join("runs/direct-1");
    let vmm = until("the first machine", || vmm_of(&first));
    kill_process(vmm, Signal::KILL).unwrap();
    until("the record of a run that does not count", || first.join("run.json").exists().then_some(()));
    let why = run_record(&results, "direct-1")["dropped"].as_str().expect("it is dropped").to_string();
    assert!(!why.is_empty());
    let before = std::fs::read(first.join("run.json")).unwrap();

    // The study is killed in the middle of the second run.
    let second = results.join("runs/ram-16m-1");
    let vmm = until("the second machine", || vmm_of(&second));
    let refused = world.lab(&["resume", results.to_str().unwrap()]);
    assert!(!refused.status.success(), "two at once in one folder");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("at work in this folder"), "{refused:?}");
    lab.kill();
    until("the machine's end with it", || {
        rustix::process::test_kill_process(vmm)
            .err()
            .map(|_| ())
            .or_else(|| vmm_of(&second).is_none().then_some(()))
    });
    assert!(!second.join("run.json").exists(), "it was not done");

    // It goes on: what was done stays as it was.
    let end = object(&world.lab(&["resume", results.to_str().unwrap(), "--json"]));
    let reason = |run: &str| run_record(&results, run)["dropped"].to_string();
    let reasons = ["direct-1", "direct-2", "ram-16m-1", "ram-16m-2"].map(reason);
    assert_eq!((&end["kept"], &end["dropped"]), (&3.into(), &1.into()), "{end} {reasons:?}");
    assert_eq!(std::fs::read(first.join("run.json")).unwrap(), before);
    let direct = run_record(&results, "direct-2");
    assert_eq!(direct["dropped"], serde_json::Value::Null);
    let actions = direct["actions"].as_array().unwrap();
    assert!(actions.iter().any(|a| a["name"] == "logon") && actions.len() > 6, "{actions:?}");
    let samples = std::fs::read_to_string(results.join("runs/direct-2/samples.csv")).unwrap();
    let head: Vec<&str> = samples.lines().next().unwrap().split(',').collect();
    for column in METRICS.iter().flat_map(|metric| metric.columns) {
        assert!(head.contains(column), "{column}: {head:?}");
    }

    let report = Path::new(end["report"].as_str().unwrap());
    look(&world, report, &why);
    // Done is done.
    let again = object(&world.lab(&["resume", results.to_str().unwrap(), "--json"]));
    assert_eq!(again["kept"], 3);
    let strict = world.lab(&["resume", results.to_str().unwrap(), "--strict"]);
    assert_eq!(strict.status.code(), Some(1), "a run was dropped: {strict:?}");
    asked_again(&results, report);
    // Runs of two hosts are not of one study.
    let record = results.join("study.json");
    let text = std::fs::read_to_string(&record).unwrap();
    let mut other: serde_json::Value = serde_json::from_str(&text).unwrap();
    other["hardware"]["cores"] = "4096".into();
    std::fs::write(&record, other.to_string()).unwrap();
    let refused = world.lab(&["resume", results.to_str().unwrap()]);
    assert!(!refused.status.success());
    assert!(
        String::from_utf8_lossy(&refused.stderr)
            .contains("other hardware made the runs that are there (cores)")
    );
    let left = std::fs::read_dir(world.path("scratch")).unwrap().count();
    assert_eq!(left, 1, "what the killed one left, and nothing else");
    until("no machine is left behind", || vmm_of(&results).is_none().then_some(()));
}

/// What it has found can be drawn again, and compared; what can be run is listed.
fn asked_again(results: &Path, report: &Path) {
    let lab = |words: &[&str]| {
        let output = Command::new(program().unwrap()).arg("lab").args(words).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let dir = results.to_str().unwrap();
    let page = std::fs::read(report).unwrap();
    std::fs::remove_file(report).unwrap();
    assert_eq!(lab(&["report", dir]).trim(), report.to_str().unwrap());
    assert!(std::fs::read(report).unwrap() == page, "the same page");
    let same: serde_json::Value = serde_json::from_str(&lab(&["compare", dir, dir, "--json"])).unwrap();
    let rows = same["rows"].as_array().unwrap();
    assert!(rows.len() > 20 && rows.iter().all(|row| row["a"] == row["b"]), "{same}");
    assert!(lab(&["list"]).contains("seed-004"));
}

/// In a real browser: pictures of what was measured, and the run that does not count. `tests/report` looks closer.
fn look(world: &World, report: &Path, why: &str) {
    if !spillway_testkit::has_program("chromium") {
        return spillway_testkit::skip("chromium is not here: run 'make install-deps'");
    }
    let browser = Browser { dir: &world.path("scratch"), dark: false };
    let (page, complaints) = browser.dom(report);
    assert!(complaints.is_empty(), "{complaints:?}");
    assert!(page.matches("<svg").count() > 20, "{} pictures", page.matches("<svg").count());
    let why = why.lines().next().unwrap().split(['<', '>', '&', '"', '\'']).next().unwrap();
    assert!(page.contains("1 dropped") && page.contains(why), "the dropped run is named: {why}");
    assert!(browser.printed(report, &world.path("report.pdf")) > 3);
}
