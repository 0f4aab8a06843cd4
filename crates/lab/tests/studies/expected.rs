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
"#;

#[test]
fn what_does_not_hold_is_said_and_ends_with_1() {
    let world = World::new();
    let (study, results) = (world.path("host.toml"), world.path("results"));
    std::fs::write(&study, STUDY).unwrap();
    let (study, results) = (study.to_str().unwrap(), results.to_str().unwrap());
    let run = world.lab(&["run", study, "--out", results, "--json"]);
    assert_eq!(run.status.code(), Some(1), "{run:?}");
    let all: Value = serde_json::from_slice(&run.stdout).unwrap();
    let holds = [&all["expected"][0]["holds"], &all["expected"][1]["holds"]];
    assert_eq!((&all["kept"], holds), (&1.into(), [&true.into(), &false.into()]), "{all}");
    let other = world.path("other");
    let other = world.lab(&["run", study, "--machines", "1", "--out", other.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(other.status.success() && said.contains("2 of 2 expectations are left out"), "{other:?}");
    let again = world.lab(&["resume", results]);
    let said = String::from_utf8_lossy(&again.stdout);
    assert_eq!(again.status.code(), Some(1), "{again:?}");
    assert!(said.contains("1 of 2 expectations hold\ndoes NOT hold: nothing is written: "), "{said}");
}
