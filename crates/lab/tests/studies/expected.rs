//! A study that does not show what it is to show.

use crate::World;
use serde_json::Value;

const STUDY: &str = r#"
name = "host"
title = "From the host"
question = "Is it to be?"
baseline = "ram"
image = "empty:64M"
[work]
workload = "fio"
engine = "host"
profiles = ["fio-4k-x1"]
seconds = 1
size_mb = 16
[runs]
count = 1
rest_seconds = 0
[[scenario]]
name = "ram"
what = "in RAM"
disk = { mode = "ram", ram = "64M" }
[[scenario]]
name = "more"
what = "in more RAM"
disk = { mode = "ram", ram = "65M" }
[[expect]]
what = "something is written"
figure = "guest-writes"
scenario = "ram"
least = 1
[[expect]]
what = "nothing is written"
figure = "guest-writes"
scenario = "ram"
most = 0
[[expect]]
what = "it is the same"
figure = "guest-writes"
scenario = "more"
beside = "ram"
most = 1000
"#;

#[test]
fn what_does_not_hold_is_said_and_ends_with_1() {
    let world = World::new();
    let (study, results) = (world.path("host.toml"), world.path("results"));
    std::fs::write(&study, STUDY).unwrap();
    let (study, results) = (study.to_str().unwrap(), results.to_str().unwrap());
    let run = world.lab(&["run", study, "--only", "ram", "--out", results, "--json"]);
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.code() == Some(1) && said.contains("1 of 3 expectations are left out"), "{run:?}");
    let all: Value = serde_json::from_slice(&run.stdout).unwrap();
    let expected = all["expected"].as_array().unwrap();
    let holds: Vec<_> = expected.iter().map(|one| one["holds"].as_bool().unwrap()).collect();
    assert_eq!((&all["kept"], &holds[..]), (&1.into(), &[true, false][..]), "{all}");
    let again = world.lab(&["resume", results]);
    let said = String::from_utf8_lossy(&again.stdout);
    assert_eq!(again.status.code(), Some(1), "{again:?}");
    assert!(said.contains("1 of 2 expectations hold\ndoes NOT hold: nothing is written: "), "{said}");

    let other = world.path("other");
    let other = world.lab(&["run", study, "--machines", "1", "--out", other.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(other.status.success() && said.contains("3 of 3 expectations are left out"), "{other:?}");
}
