//! The results that are kept in `docs/studies`: what two of their files say of the same must be the same.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Figures, by the counters that they are sums of.
const SAME: [(&str, &str); 5] = [
    ("guest-reads", "planes.guest.reads"),
    ("guest-writes", "planes.guest.writes"),
    ("ram-writes", "planes.ram.writes"),
    ("overflow-writes", "planes.overflow.writes"),
    ("overflow-reads", "planes.overflow.reads"),
];

/// Rows of a file, by what stands first, what it is of, and the scenario: the mean.
fn means(path: &Path, kind: &str, columns: [&str; 4]) -> BTreeMap<(String, String), f64> {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let head = lines.next().unwrap();
    let [name, figure, scenario, mean] =
        columns.map(|column| head.iter().position(|is| *is == column).unwrap());
    let rows = lines.filter(|row| row.get(figure) == Some(&kind));
    rows.map(|row| ((row[name].into(), row[scenario].into()), row[mean].parse().unwrap())).collect()
}

#[test]
fn what_is_kept_adds_up_to_what_disks_counted() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/studies");
    let mut compared = BTreeMap::new();
    for entry in fs::read_dir(&kept).unwrap() {
        let dir = entry.unwrap().path();
        if !dir.is_dir() {
            continue;
        }
        let totals = means(&dir.join("figures.csv"), "total", ["name", "figure", "scenario", "mean"]);
        let growths = means(&dir.join("counters.csv"), "growth", ["counter", "figure", "scenario", "mean"]);
        for (figure, counter) in SAME {
            for ((_, scenario), total) in totals.iter().filter(|((name, _), _)| name == figure) {
                let growth = growths[&(counter.to_string(), scenario.clone())];
                let near = (total - growth).abs() <= 1e-6 * growth.max(1.0);
                assert!(near, "{}, {scenario}: {figure} {total}, {counter} {growth}", dir.display());
                *compared.entry(dir.clone()).or_insert(0) += 1;
            }
        }
    }
    assert!(compared.len() >= 8 && compared.values().all(|count| *count >= 10), "{compared:?}");
}
