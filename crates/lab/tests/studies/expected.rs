//! A study that does not show what it is to show.

use crate::{HOST, World};
use serde_json::Value;

const MORE: &str = r#"
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
    std::fs::write(&study, format!("{HOST}{MORE}")).unwrap();
    let (study, results) = (study.to_str().unwrap(), results.to_str().unwrap());
    let run = world.lab(&["run", study, "--runs", "1", "--only", "ram", "--out", results, "--json"]);
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.code() == Some(1) && stderr.contains("1 of 3 expectations are left out"), "{run:?}");
    let all: Value = serde_json::from_slice(&run.stdout).unwrap();
    let expected = all["expected"].as_array().unwrap();
    let holds: Vec<_> = expected.iter().map(|one| one["holds"].as_bool().unwrap()).collect();
    assert_eq!((&all["kept"], &holds[..]), (&1.into(), &[true, false][..]), "{all}");
    let again = world.lab(&["resume", results]);
    let stdout = String::from_utf8_lossy(&again.stdout);
    assert_eq!(again.status.code(), Some(1), "{again:?}");
    assert!(stdout.contains("1 of 2 expectations hold\ndoes NOT hold: nothing is written: "), "{stdout}");

    let other = world.path("other");
    let other = other.to_str().unwrap();
    let other = world.lab(&["run", study, "--runs", "1", "--machines", "1", "--out", other]);
    let stderr = String::from_utf8_lossy(&other.stderr);
    assert!(other.status.success() && stderr.contains("3 of 3 expectations are left out"), "{other:?}");
}
