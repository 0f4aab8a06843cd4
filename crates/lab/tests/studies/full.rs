//! The folder of the results has no space.

use crate::{HOST, World, object, run_record, until};
use rustix::process::geteuid;
use spillway_testkit::{Server, disk::program, skip};
use std::path::PathBuf;
use std::process::Command;

/// A small file system that nobody else uses.
struct Small {
    dir: PathBuf,
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.dir).status();
    }
}

#[test]
fn a_full_folder_loses_no_run_that_was_done() {
    let world = World::new();
    let small = Small { dir: world.path("small") };
    std::fs::create_dir(&small.dir).unwrap();
    if !geteuid().is_root() {
        return skip("a small file system can be mounted by root only");
    }
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=2M", "lab"]).arg(&small.dir).status();
    if !mounted.is_ok_and(|status| status.success()) {
        return skip("this host mounts no tmpfs");
    }
    std::fs::write(world.path("host.toml"), HOST).unwrap();
    let (study, results) = (world.path("host.toml"), small.dir.join("results"));
    let (study, out) = (study.to_str().unwrap(), results.to_str().unwrap());
    let words = world.words(&["run", study, "--out", out, "--json"]);
    let program = program().unwrap();
    let log = world.path("lab.log");
    let mut lab = Server::start("lab", program.to_str().unwrap(), &words, None, &log).unwrap();
    let first = results.join("runs/ram-1/run.json");
    until("the first run", || first.exists().then_some(()));
    // Another's file takes all that is free; a write of one byte more fails.
    let filler = small.dir.join("filler");
    let filled =
        Command::new("dd").args(["if=/dev/zero", "bs=4k"]).arg(format!("of={}", filler.display())).output();
    assert!(!filled.unwrap().status.success(), "it is full");
    let status = lab.wait(std::time::Duration::from_secs(60)).unwrap();
    assert!(!status.success());
    assert!(lab.tail().contains("free some space, then 'spillway lab resume'"), "{}", lab.tail());
    let kept = run_record(&results, "ram-1");
    assert_eq!(kept["dropped"], serde_json::Value::Null);

    std::fs::remove_file(filler).unwrap();
    let end = object(&world.lab(&["resume", out, "--json"]));
    assert_eq!((&end["kept"], &end["dropped"]), (&3.into(), &0.into()), "{end}");
    assert_eq!(run_record(&results, "ram-1"), kept);
    assert!(kept["figures"]["fio.fio-4k-x1.iops"].as_f64().unwrap() > 0.0, "{kept}");
}
