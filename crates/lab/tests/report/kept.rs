//! The results that are kept in `docs/studies`: each is rendered to its report from `results.json` alone.
//!
//! Invariant: a figure that a report shows is a figure of the results.

use serde_json::Value;
use spillway_lab::study::report::{self, Results};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Metrics, and the disks' counters that they are sums of.
const SAME: [(&str, &str); 5] = [
    ("guest-reads", "planes.guest.reads"),
    ("guest-writes", "planes.guest.writes"),
    ("ram-writes", "planes.ram.writes"),
    ("overflow-writes", "planes.overflow.writes"),
    ("overflow-reads", "planes.overflow.reads"),
];

/// The folders of all studies that are kept.
fn kept() -> Vec<PathBuf> {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/studies");
    let mut folders: Vec<PathBuf> = fs::read_dir(all).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.retain(|path| path.is_dir());
    folders.sort();
    assert!(folders.len() >= 8, "{folders:?}");
    folders
}

fn json(path: &Path) -> Value {
    let text = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// All files below a folder, by their paths in it.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => _ = found.insert(path.strip_prefix(dir).unwrap().into(), fs::read(&path).unwrap()),
            }
        }
    }
    found
}

/// Rows of a CSV file without quotes: what stands in some columns, and what stands from another column on.
fn rows(text: &[u8], key: &[usize], rest: usize) -> BTreeMap<String, String> {
    let text = std::str::from_utf8(text).unwrap();
    let row = |line: &str| {
        let fields: Vec<&str> = line.split(',').collect();
        let key: Vec<&str> = key.iter().map(|column| fields[*column]).collect();
        (key.join(","), fields[rest..].join(","))
    };
    text.lines().skip(1).map(row).collect()
}

fn spread(of: &Value) -> String {
    let number = |name: &str| of[name].as_f64().unwrap();
    format!("{},{},{},{}", number("mean"), number("low"), number("high"), of["runs"])
}

#[test]
fn each_study_renders_its_figures_and_the_same_each_time() {
    for dir in kept() {
        let [first, second] = [(), ()].map(|()| {
            let out = tempfile::tempdir().unwrap();
            let report =
                report::write(&dir, out.path()).unwrap_or_else(|e| panic!("{}: {e:#}", dir.display()));
            assert_eq!(report.page, out.path().join("report.html"));
            files(out.path())
        });
        assert!(first == second, "{}: two reports of the same results differ", dir.display());
        assert!(first.len() > 10, "{:?}", first.keys());
        let results = json(&dir.join("results.json"));
        let html = String::from_utf8_lossy(&first[Path::new("report.html")]);
        assert!(html.starts_with("<!DOCTYPE html>") && html.ends_with("</html>\n") && !html.contains("NaN"));
        let title = results["study"]["study"]["title"].as_str().unwrap();
        assert!(html.contains(&format!("<title>{title}</title>")));
        shows_the_figures_of(&dir, &results, &first);
    }
}

/// The figures of a report are the figures of its results, and no others.
fn shows_the_figures_of(dir: &Path, results: &Value, report: &BTreeMap<PathBuf, Vec<u8>>) {
    let csv = |name: &str, key: &[usize], rest| rows(&report[&Path::new("report").join(name)], key, rest);
    let (figures, counters) = (csv("figures.csv", &[0, 1, 3], 4), csv("counters.csv", &[0, 2], 3));
    let (series, actions) = (csv("series.csv", &[0, 2, 3], 4), csv("actions.csv", &[0, 1, 2], 3));
    let step = results["seconds_between_points"].as_u64().unwrap();
    let (mut compared, mut points) = (0, 0);
    let mut same = |rows: &BTreeMap<String, String>, key: String, expected: &Value| {
        let found = rows.get(&key).unwrap_or_else(|| panic!("{}: no row {key}", dir.display()));
        assert!(found.starts_with(&spread(expected)), "{}: {key}: {found}", dir.display());
        compared += 1;
    };
    for scenario in results["scenarios"].as_array().unwrap() {
        let name = scenario["name"].as_str().unwrap();
        let of = |field: &str| scenario[field].as_object().unwrap();
        for (key, metric) in of("metrics") {
            for (figure, expected) in metric["figures"].as_object().unwrap() {
                if expected.is_object() {
                    same(&figures, format!("{key},{figure},{name}"), expected);
                }
            }
            for (i, point) in metric["points"].as_array().unwrap().iter().enumerate() {
                let Some(point) = point.as_array() else { continue };
                let row = &series[&format!("{key},{name},{}", i as u64 * step)];
                let mean = row.split(',').next().unwrap().parse().unwrap();
                assert_eq!(point[0].as_f64(), Some(mean), "{}: {key}, {name}, {i}", dir.display());
                points += 1;
            }
        }
        for (key, expected) in of("workload") {
            same(&figures, format!("{key},workload,{name}"), expected);
        }
        for (key, expected) in of("counters") {
            same(&counters, format!("{key},{name}"), expected);
        }
        for (action, response) in of("responses") {
            for (figure, expected) in response.as_object().unwrap() {
                same(&actions, format!("{action},{name},{figure}"), expected);
            }
        }
    }
    let rows = figures.len() + counters.len() + actions.len();
    assert_eq!(compared, rows, "{}: rows that are no figures of the results", dir.display());
    assert!(compared > 400 && points > 200, "{}: {compared} {points}", dir.display());
}

#[test]
fn what_is_kept_adds_up_to_what_disks_counted() {
    for dir in kept() {
        let results = json(&dir.join("results.json"));
        let mut compared = 0;
        for scenario in results["scenarios"].as_array().unwrap() {
            for (metric, counter) in SAME {
                let total = &scenario["metrics"][metric]["figures"]["total"]["mean"];
                let Some(total) = total.as_f64() else { continue };
                let growth = scenario["counters"][counter]["mean"].as_f64().unwrap();
                let near = (total - growth).abs() <= 1e-6 * growth.max(1.0);
                assert!(
                    near,
                    "{}, {}: {metric} {total}, {counter} {growth}",
                    dir.display(),
                    scenario["name"]
                );
                compared += 1;
            }
        }
        assert!(compared >= 10, "{}: {compared}", dir.display());
    }
}

#[test]
fn a_kept_file_is_as_it_is_written() {
    for dir in kept() {
        let path = dir.join("results.json");
        let mut written = Vec::new();
        Results::read(&dir).unwrap().write(&mut written).unwrap();
        if std::env::var_os("SPILLWAY_WRITE").is_some_and(|value| value == "1") {
            fs::write(&path, &written).unwrap();
        }
        let same = fs::read(&path).unwrap() == written;
        assert!(same, "{}: SPILLWAY_WRITE=1 writes it in the form of this version", path.display());
    }
}
