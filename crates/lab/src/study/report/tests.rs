//! Reports of results folders made by hand, whole and broken.

use super::figures::Figures;
use super::{Results, answer, compare, measured, results, seeds};
use crate::study::metric::named;
use crate::study::record::SCHEMA;
use crate::study::{Action, METRICS, RunFacts, RunRecord, Samples, Scenario, Study, StudyRecord};
use crate::workload;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const STUDY: &str = r#"
    name = "small"
    title = "<script>alert('title')</script>"
    question = "Is \"it\" <b>so</b>?"
    seed_document = "000"
    baseline = "direct"
    [work]
    workload = "file-copy"
    engine = "replay"
    note = "</pre><script>alert('note')</script>"
    [[scenario]]
    name = "direct"
    what = "<img src=x onerror=alert(1)>"
    disk = { mode = "direct" }
    [[scenario]]
    name = "ram-256m"
    what = "RAM"
"#;

struct Folder(TempDir);

fn write(dir: &Path) -> anyhow::Result<PathBuf> {
    Ok(super::write(dir, dir)?.page)
}

impl Folder {
    fn new(study: &str) -> Folder {
        let dir = tempfile::tempdir().unwrap();
        let record = StudyRecord {
            schema: SCHEMA,
            study: Study::parse(study).unwrap(),
            quick: false,
            begun: "2026-01-31T12:00:00Z".into(),
            command: "spillway lab run".into(),
            versions: [("spillway".to_string(), "<script>0".to_string())].into(),
            hardware: [("cpu".to_string(), "one".to_string())].into(),
        };
        fs::write(dir.path().join("study.json"), serde_json::to_string(&record).unwrap()).unwrap();
        Folder(dir)
    }

    /// A run of one machine whose overflow is written at a rate.
    fn run(&self, scenario: &str, run: u32, rate: f64) -> RunRecord {
        let mut samples = Samples::default();
        for second in -2..=10 {
            let known = BTreeMap::from([
                ("planes.overflow.writes".to_string(), 100.0 + rate * f64::from(second + 2)),
                ("ram.used_bytes".to_string(), rate * 1e6),
                ("stalls.ns".to_string(), 0.0),
            ]);
            samples.add(0, f64::from(second), &known);
        }
        let action = |took_ms| Action { machine: 0, session: 0, name: "<i>save".into(), at_s: 1.0, took_ms };
        let record = RunRecord {
            schema: SCHEMA,
            facts: RunFacts {
                scenario: scenario.into(),
                run,
                seed: 1,
                begun: "2026-01-31T12:00:00Z".into(),
                seconds: 10.0,
                engine: "replay".into(),
                machines: 1,
                dropped: None,
                commands: vec!["spillway serve </pre><script>".into()],
            },
            actions: vec![action(rate), action(rate * 3.0)],
            figures: [("boot_s".to_string(), rate), ("<script>".to_string(), 1.0)].into(),
        };
        self.put(&record, &samples);
        record
    }

    /// A run with everything that its engine and its workload leave.
    fn run_of_all(&self, study: &Study, scenario: &str) {
        let scenario = study.scenario(scenario).unwrap();
        let mut record = self.run(&scenario.name, 1, 5.0);
        record.facts.engine = study.engine(scenario).name().into();
        record.figures = figures_of(study, scenario);
        let mut samples = Samples::default();
        for second in 0..10 {
            let value = |column: &str| (column.to_string(), f64::from(second));
            let known = columns_of(study, scenario).into_iter().map(value).collect();
            samples.add(0, f64::from(second), &known);
        }
        self.put(&record, &samples);
    }

    fn put(&self, record: &RunRecord, samples: &Samples) {
        let folder = self.at(record);
        fs::create_dir_all(&folder).unwrap();
        samples.write(&mut fs::File::create(folder.join("samples.csv")).unwrap()).unwrap();
        fs::write(folder.join("run.json"), serde_json::to_string(record).unwrap()).unwrap();
    }

    fn at(&self, record: &RunRecord) -> PathBuf {
        self.path().join(format!("runs/{}-{}", record.facts.scenario, record.facts.run))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Three runs of the baseline, two of the other: one more is dropped, one is not finished.
    fn whole() -> Folder {
        Folder::whole_of(STUDY)
    }

    fn whole_of(study: &str) -> Folder {
        let folder = Folder::new(study);
        for (run, rate) in [(1, 100.0), (2, 110.0), (3, 120.0)] {
            folder.run("direct", run, rate);
        }
        for (run, rate) in [(1, 10.0), (2, 12.0)] {
            folder.run("ram-256m", run, rate);
        }
        let mut dropped = folder.run("ram-256m", 3, 9999.0);
        dropped.facts.dropped = Some("the guest <script>alert('gone')</script>".into());
        fs::write(folder.at(&dropped).join("run.json"), serde_json::to_string(&dropped).unwrap()).unwrap();
        fs::remove_file(folder.at(&dropped).join("samples.csv")).unwrap();
        fs::create_dir_all(folder.path().join("runs/ram-256m-4")).unwrap();
        folder
    }

    fn json(&self, file: &str) -> serde_json::Value {
        serde_json::from_slice(&fs::read(self.path().join(file)).unwrap()).unwrap()
    }

    /// A folder with nothing but the results of [`Folder::whole`], as they are kept.
    fn kept() -> Folder {
        let whole = Folder::whole();
        write(whole.path()).unwrap();
        let kept = Folder(tempfile::tempdir().unwrap());
        fs::copy(whole.path().join(results::FILE), kept.path().join(results::FILE)).unwrap();
        kept
    }

    fn refused(&self) -> String {
        format!("{:#}", write(self.path()).unwrap_err())
    }
}

#[test]
fn figures_are_of_whole_runs_with_their_spread() {
    let folder = Folder::whole();
    let results = Results::read(folder.path()).unwrap();
    assert_eq!((results.dropped.len(), &results.unfinished[..]), (1, &["ram-256m-4".to_string()][..]));
    let writes = named("host-writes").unwrap();
    let of = |name: &str| results.scenario(name).unwrap().figures(writes).unwrap();
    let total = of("direct").total.unwrap();
    assert_eq!((total.mean, total.low, total.high, total.runs), (1100.0, 1000.0, 1200.0, 3));
    let few = of("ram-256m").total.unwrap();
    assert_eq!((few.runs, few.relative(Some(&total))), (2, Some(0.1)));
    assert_eq!(few.overlaps(&total), Some(false));
    assert_eq!((of("direct").p95.unwrap().mean, of("direct").machines), (110.0, 1));
    let direct = results.scenario("direct").unwrap();
    let figures = |key: &str| direct.figures(named(key).unwrap());
    let used: &Figures = figures("ram-used").unwrap();
    assert_eq!((used.total, used.mean.unwrap().mean), (None, 110.0));
    assert_eq!((figures("machine-reads"), results.baseline()), (None, Some(0)));
    let save = &direct.responses["<i>save"];
    assert_eq!((save.count.mean, save.mean_ms.mean, save.worst_ms.high), (2.0, 220.0, 360.0));
}

#[test]
fn a_report_is_whole_and_holds_no_word_of_a_file_as_markup() {
    let folder = Folder::whole();
    let page = write(folder.path()).unwrap();
    let html = fs::read_to_string(&page).unwrap();
    for markup in ["<script", "<img", "<b>so", "<i>save", " src=\"", "http:", "https:", "@import", "url("] {
        assert!(!html.contains(markup), "{markup}");
    }
    for words in [
        "&lt;script&gt;alert(&#x27;gone&#x27;)",
        "not finished",
        "no guest ran",
        "Zero in all scenarios: Writes that waited",
    ] {
        assert!(html.contains(words), "{words}");
    }
    let beside = folder.path().join("report");
    let pictures = ["host-writes-lines", "host-writes-bars", "answer-1-bars", "response-1-bars"];
    for name in pictures.into_iter().chain(["response-lines", "response-bars"]) {
        let name = format!("{name}.svg");
        let svg = fs::read_to_string(beside.join(&name)).unwrap();
        assert!(
            svg.contains("prefers-color-scheme") && !svg.contains("<script") && !svg.contains("NaN"),
            "{name}"
        );
    }
    assert!(!beside.join("stalls-lines.svg").exists());
    let csv = fs::read_to_string(beside.join("figures.csv")).unwrap();
    assert!(csv.contains("host-writes,total,writes,ram-256m,110,100,120,2,0.1"), "{csv}");
    let kept = folder.json("results.json");
    let writes = &kept["scenarios"][0]["metrics"]["host-writes"];
    assert_eq!(
        (&writes["figures"]["total"]["mean"], writes["points"].as_array().unwrap().len()),
        (&1100.0.into(), 10)
    );
    assert_eq!(writes["points"][3], serde_json::json!([110.0, 100.0, 120.0, 3]));
    assert_eq!(
        fs::read_to_string(beside.join("series.csv"))
            .unwrap()
            .lines()
            .filter(|l| l.starts_with("host-writes,"))
            .count(),
        20
    );
    assert!(
        fs::read_to_string(beside.join("actions.csv"))
            .unwrap()
            .contains("<i>save,direct,worst_ms,330,300,360,3")
    );
    let text = |name: &str| fs::read_to_string(beside.join(name)).unwrap();
    // Two of each run, in its second second.
    assert!(text("series.csv").contains("\nresponse,ms,direct,1,220,200,240,3\n"), "{}", text("series.csv"));
    assert!(text("responses.csv").contains("\nram-256m,2,0,0,<i>save,1.000,"), "{}", text("responses.csv"));
    let counters = text("counters.csv");
    assert!(counters.contains("\nplanes.overflow.writes,growth,ram-256m,110,100,120,2\n"), "{counters}");
    assert!(counters.contains("\nram.used_bytes,highest,direct,110000000,"), "{counters}");
    assert!(
        html.contains("<code>planes.overflow.writes</code>") && html.contains("0 everywhere: stalls.ns.")
    );
}

#[test]
fn a_study_may_ask_for_some_metrics_only() {
    let folder = Folder::new(&STUDY.replace("[work]", "metrics = [\"host-writes\"]\n[work]"));
    folder.run("direct", 1, 5.0);
    let html = fs::read_to_string(write(folder.path()).unwrap()).unwrap();
    let beside = |name: &str| folder.path().join("report").join(name);
    assert!(
        html.contains("Writes to the host&#x27;s storage: over")
            && !html.contains("Writes to the overflow: over")
    );
    assert!(beside("host-writes-lines.svg").exists() && !beside("overflow-writes-lines.svg").exists());
    assert!(fs::read_to_string(beside("figures.csv")).unwrap().contains("\noverflow-writes,total,"));
}

#[test]
fn a_score_is_a_figure_only_where_all_runs_reached_it() {
    let folder = Folder::new(STUDY);
    let run = |scenario: &str, run: u32, sessions: Option<f64>| {
        let mut record = folder.run(scenario, run, 10.0);
        record.figures = [("score.active".to_string(), 12.0), ("replay.late".to_string(), 3.0)].into();
        record.figures.extend(sessions.map(|sessions| ("score.sessions".to_string(), sessions)));
        fs::write(folder.at(&record).join("run.json"), serde_json::to_string(&record).unwrap()).unwrap();
    };
    let page = || fs::read_to_string(write(folder.path()).unwrap()).unwrap();
    run("direct", 1, Some(6.0));
    run("direct", 2, Some(8.0));
    run("ram-256m", 1, None);
    run("ram-256m", 2, Some(9.0));
    let html = page();
    let words = "reached in 1 of 2 runs, at 9; else more than 12";
    // Of the answer, and of the score's own table.
    assert_eq!((html.matches(words).count(), html.matches("reached in 2 of 2 runs").count()), (2, 2));
    assert!(html.contains("late <small><code>replay.late</code></small>"));
    let results = Results::read(folder.path()).unwrap();
    let rows = answer::rows(&results);
    let row = rows.iter().find(|row| row.what.starts_with("Score")).unwrap();
    assert_eq!((row.scenarios[0].unwrap().mean, row.scenarios[1]), (7.0, None));
    let csv = fs::read_to_string(folder.path().join("report/figures.csv")).unwrap();
    assert!(
        csv.contains("score.sessions,workload,,direct,7,6,8,2")
            && !csv.contains("score.sessions,workload,,ram")
    );
    let notes = compare(folder.path(), folder.path()).unwrap().notes;
    assert!(notes.len() == 1 && notes[0].contains(words), "{notes:?}");
    run("ram-256m", 2, None);
    assert!(page().contains("more than 12; reached in 0 of 2 runs"));
}

#[test]
fn what_a_study_is_to_show_holds_or_does_not() {
    let expect = |figure: &str, rest: &str| {
        format!(
            "[[expect]]\nwhat = \"<b>less</b>\"\nfigure = \"{figure}\"\nscenario = \"ram-256m\"\n{rest}\n"
        )
    };
    let expectations = [
        expect("host-writes", "beside = \"direct\"\nleast = 0.1\nmost = 0.1"),
        expect("host-writes", "most = 109"),
        expect("ram-used", "most = 11"),
        expect("boot_s", "least = 11.5"),
        expect("base-reads", "least = 1"),
        expect("stalls", "beside = \"direct\"\nmost = 1"),
    ];
    let folder = Folder::whole_of(&format!("{STUDY}{}", expectations.concat()));
    // One of two runs has something that the other has not.
    let record = folder.run("ram-256m", 1, 10.0);
    let mut samples = Samples::read(&folder.at(&record).join("samples.csv")).unwrap();
    (0..=10).for_each(|s| {
        samples.add(0, f64::from(s), &[("planes.base.reads".to_string(), f64::from(s))].into())
    });
    folder.put(&record, &samples);
    let report = super::write(folder.path(), folder.path()).unwrap();
    let found: Vec<_> = report.expected.iter().map(|one| (one.found, one.holds)).collect();
    let (measured, not) = (|value, holds| (Some(value), holds), (None, false));
    let sums = [measured(0.1, true), measured(110.0, false), measured(11.0, true), measured(11.0, false)];
    assert_eq!(found, [&sums[..], &[not, not]].concat());
    let words = [0, 1, 3, 4, 5].map(|i| report.expected[i].words());
    assert_eq!(
        words,
        [
            "0.1 (110 / 1,100), to be 0.1 to 0.1",
            "110 (100 to 120), to be at most 109",
            "11 (10 to 12), to be at least 11.5",
            "not measured in every run, to be at least 1",
            "0 / 0, to be at most 1"
        ]
    );
    let html = fs::read_to_string(report.page).unwrap();
    assert_eq!((html.matches(">holds<").count(), html.matches("does not hold").count()), (2, 4));
    assert!(html.contains("&lt;b&gt;less") && !html.contains("<b>less"));
    let all = folder.json("report/findings.json");
    assert_eq!(
        (&all["expected"][0]["holds"], &all["expected"][4]["found"]),
        (&true.into(), &serde_json::Value::Null)
    );
}

#[test]
fn polling_for_a_storage_model_is_said_only_where_there_is_one() {
    let said = |study: &str| {
        let folder = Folder::new(study);
        let mut record = folder.run("direct", 1, 10.0);
        record.actions.clear();
        let mut samples = Samples::default();
        for second in 0..10 {
            let known = BTreeMap::from([("cpu.worker_s".to_string(), f64::from(second))]);
            samples.add(0, f64::from(second), &known);
        }
        folder.put(&record, &samples);
        let html = fs::read_to_string(write(folder.path()).unwrap()).unwrap();
        html.matches("the worker polls").count()
    };
    assert_eq!(said(STUDY), 0);
    let disk = "disk = { mode = \"direct\" }";
    let storage = format!("{disk}\nstorage = {{ overflow = \"sata-ssd\" }}");
    assert_eq!(said(&STUDY.replacen(disk, &storage, 1)), 2);
}

#[test]
fn a_new_report_takes_the_place_of_the_old_one_and_leaves_nothing_else() {
    let folder = Folder::whole();
    write(folder.path()).unwrap();
    fs::write(folder.path().join("report/of-before"), "").unwrap();
    fs::write(folder.path().join("report.html"), "before").unwrap();
    write(folder.path()).unwrap();
    assert!(!folder.path().join("report/of-before").exists());
    assert!(fs::read_to_string(folder.path().join("report.html")).unwrap().starts_with("<!DOCTYPE"));
    let mut left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["report", "report.html", "results.json", "runs", "study.json"]);
}

#[test]
fn one_run_has_no_spread_and_a_missing_baseline_is_said() {
    let folder = Folder::new(STUDY);
    folder.run("ram-256m", 1, 10.0);
    let html = fs::read_to_string(write(folder.path()).unwrap()).unwrap();
    assert!(html.contains("One run: no spread is known.") && html.contains("no baseline value"));
    assert!(html.contains("No whole run of: direct.") && !html.contains("NaN") && !html.contains("inf%"));
    folder.run("direct", 1, 0.0);
    let html = fs::read_to_string(write(folder.path()).unwrap()).unwrap();
    assert!(html.contains("no baseline value") && !html.contains("NaN"));
}

#[test]
fn without_a_whole_run_there_is_no_report() {
    let folder = Folder::new(STUDY);
    assert!(folder.refused().contains("no run counts: 0 dropped, 0 not finished"));
    fs::create_dir_all(folder.path().join("runs/direct-1")).unwrap();
    assert!(folder.refused().contains("1 not finished"));
    assert!(!folder.path().join("report.html").exists());
    let nothing = tempfile::tempdir().unwrap();
    assert!(
        format!("{:#}", write(nothing.path()).unwrap_err()).contains("neither study.json nor results.json")
    );
}

#[test]
fn broken_files_are_named() {
    let broken = |file: &str, text: &str, expected: &str| {
        let folder = Folder::whole();
        fs::write(folder.path().join(file), text).unwrap();
        let said = folder.refused();
        assert!(said.contains(file) && said.contains(expected), "{file}: {said}");
    };
    let samples = "runs/direct-1/samples.csv";
    broken("study.json", "{\"schema\":1", "no JSON");
    broken("study.json", "{\"schema\":2}", "another version");
    broken("runs/direct-1/run.json", "", "no JSON");
    broken("runs/direct-1/run.json", "{\"schema\":1}", "no record");
    broken(samples, "", "empty");
    broken(samples, "machine,time_s,ram.used_bytes\n0,1.0,5\n0,2.", "line 3");
    broken(samples, "machine,time_s,a\n0,NaN,5\n", "not a time of a run");
    broken(samples, "machine,time_s,a\n0,1e300,5\n", "not a time of a run");
    broken(samples, "machine,time_s,a\n7,1,5\n", "machine 7 of 1");
    let whole = Folder::whole();
    let study = fs::read_to_string(whole.path().join("study.json")).unwrap();
    broken("study.json", &study.replace("\"ram-256m\"", "\"../../up\""), "is no name");
    broken("study.json", &study.replace("\"ram-256m\"", "\"direct\""), "two scenarios");
    let folder = Folder::whole();
    fs::remove_file(folder.path().join(samples)).unwrap();
    assert!(folder.refused().contains(samples));
    let change = |change: &dyn Fn(&mut RunRecord), expected: &str| {
        let folder = Folder::whole();
        let mut record = folder.run("direct", 1, 1.0);
        let at = folder.at(&record).join("run.json");
        change(&mut record);
        fs::write(&at, serde_json::to_string(&record).unwrap()).unwrap();
        let said = folder.refused();
        assert!(said.contains("direct-1") && said.contains(expected), "{said}");
    };
    change(&|record| record.facts.run = 2, "not of this folder");
    change(&|record| record.facts.scenario = "../direct".into(), "not of this folder");
    change(&|record| record.figures = [("x".to_string(), -1.0)].into(), "an impossible figure");
    change(&|record| record.actions[0].took_ms = -5.0, "an action took an impossible time");
}

#[test]
fn a_report_from_kept_results_is_the_one_from_the_runs() {
    let (whole, kept) = (Folder::whole(), Folder::kept());
    let [from_runs, from_kept] = [&whole, &kept].map(|folder| {
        let out = tempfile::tempdir().unwrap();
        super::write(folder.path(), out.path()).unwrap();
        let read = |name: &str| fs::read_to_string(out.path().join(name)).unwrap();
        let is_kept_again = out.path().join(results::FILE).exists();
        (
            ["report.html", "report/figures.csv", "report/series.csv", "report/findings.json"].map(read),
            is_kept_again,
        )
    });
    assert!(from_runs.0 == from_kept.0);
    assert_eq!((from_runs.1, from_kept.1), (true, false));
    assert!(compare(whole.path(), kept.path()).unwrap().rows.iter().all(|row| row.a == row.b));
    // Where runs are, they are what counts.
    fs::write(whole.path().join(results::FILE), "old").unwrap();
    write(whole.path()).unwrap();
    assert_eq!(whole.json(results::FILE), kept.json(results::FILE));
}

#[test]
fn kept_results_that_are_damaged_are_refused_with_what_and_where() {
    let text = fs::read_to_string(Folder::kept().path().join(results::FILE)).unwrap();
    let refused = |text: &str| {
        let folder = Folder(tempfile::tempdir().unwrap());
        fs::write(folder.path().join(results::FILE), text).unwrap();
        let said = folder.refused();
        assert!(said.contains(&folder.path().join(results::FILE).display().to_string()), "{said}");
        assert!(!folder.path().join("report.html").exists() && !folder.path().join("report").exists());
        said
    };
    let lines = text.lines().count();
    let half = &text[..text.len() / 2];
    let cut = refused(half);
    assert!(cut.contains("no JSON") && cut.contains(&format!("line {}", half.lines().count())), "{cut}");
    assert!(refused("").contains("no JSON") && refused("[]").contains("another version"));
    assert!(
        refused(&text.replacen("\"schema\": 1", "\"schema\": 2", 1))
            .contains("its schema is 2, 1 was expected")
    );
    for (from, to, expected) in [
        ("\"counters\"", "\"counter\"", "unknown field `counter`"),
        (
            "\"host-writes\"",
            "\"host-wrytes\"",
            "scenario 'direct': no such metric is known: metric 'host-wrytes'",
        ),
        (
            "\"mean\": 1100.0",
            "\"mean\": -1100.0",
            "scenario 'direct': metric 'host-writes': an impossible figure: -1100, from 1000 to 1200",
        ),
        ("\"mean\": 1100.0", "\"mean\": null", "invalid type: null"),
        ("[110.0,100.0,120.0,3]", "[110.0,100.0,120.0,0]", "point 0: a figure of no run"),
        ("[110.0,100.0,120.0,3]", "[99.0,100.0,120.0,3]", "an impossible figure: 99, from 100 to 120"),
        ("[110.0,100.0,120.0,3]", "[110.0,100.0,120.0]", "invalid length 3"),
        ("[110.0,100.0,120.0,3]", "[110.0,100.0,1e999,3]", "number out of range"),
        (
            "\"name\": \"direct\",\n",
            "\"name\": \"other\",\n",
            "scenarios: other, ram-256m are there, but the study has direct, ram-256m",
        ),
        (
            "\"seconds_between_points\": 1",
            "\"seconds_between_points\": 0",
            "the time between two points is 0",
        ),
        (
            "\"scenario\": \"ram-256m\",\n    \"run\": 3",
            "\"scenario\": \"none\",\n    \"run\": 3",
            "dropped: no scenario 'none'",
        ),
        ("\"seconds\": 10.0", "\"seconds\": -1", "run 1 took an impossible time"),
        ("\"actions\": [\"<i>save\"]", "\"actions\": []", "action '<i>save' is not in the list"),
        ("\"baseline\": \"direct\"", "\"baseline\": \"../up\"", "study"),
    ] {
        let damaged = text.replacen(from, to, 1);
        assert!(damaged != text, "{from}");
        let said = refused(&damaged);
        assert!(said.contains(expected), "{to}: {said}");
        let where_it_is = ["line ", "scenario", "study", "dropped", "the time between", "run "];
        assert!(where_it_is.iter().any(|place| said.contains(place)), "{said}");
    }
    assert!(lines > 40 && text.lines().all(|line| line.len() < 20_000), "{lines}");
}

#[test]
fn hostile_names_stay_text_in_every_place_of_a_page() {
    const NAME: &str = "</svg></style></title>\"'><script>alert(1)</script>{{ title|safe }}{% raw %}&amp;";
    let folder = Folder::kept();
    let path = folder.path().join(results::FILE);
    let mut json = folder.json(results::FILE);
    for place in ["title", "question"] {
        json["study"]["study"][place] = NAME.into();
    }
    json["study"]["study"]["scenario"][0]["what"] = NAME.into();
    json["study"]["study"]["scenario"][0]["disk"] = serde_json::json!({ NAME: NAME });
    json["study"]["study"]["work"]["note"] = NAME.into();
    json["study"]["hardware"] = serde_json::json!({ NAME: NAME });
    json["study"]["versions"] = serde_json::json!({ NAME: NAME });
    json["study"]["command"] = NAME.into();
    json["file"] = NAME.into();
    json["actions"] = serde_json::json!([NAME]);
    json["unfinished"] = serde_json::json!([NAME]);
    json["dropped"][0]["dropped"] = NAME.into();
    for scenario in json["scenarios"].as_array_mut().unwrap() {
        let spread = serde_json::json!({"mean": 1.0, "low": 1.0, "high": 1.0, "runs": 2});
        scenario["counters"] = serde_json::json!({ NAME: spread });
        scenario["workload"] = serde_json::json!({ NAME: spread });
        let response = scenario["responses"]["<i>save"].clone();
        scenario["responses"] = serde_json::json!({ NAME: response });
        for run in scenario["runs"].as_array_mut().unwrap() {
            run["engine"] = NAME.into();
            run["begun"] = NAME.into();
            run["commands"] = serde_json::json!([NAME]);
        }
    }
    fs::write(&path, json.to_string()).unwrap();
    let html = fs::read_to_string(write(folder.path()).unwrap()).unwrap();
    assert!(!html.contains("<script") && !html.contains("alert(1)<"), "markup");
    // Title and heading, question, scenario, action, counter, workload, facts, runs...
    let escaped = "&lt;script&gt;alert(1)&lt;&#x2f;script&gt;{{ title|safe }}{% raw %}&amp;amp;";
    assert!(html.matches(escaped).count() >= 25, "{}", html.matches(escaped).count());
    for element in ["svg", "style", "title", "table", "details", "figure"] {
        let (begun, ended) = (format!("<{element}"), format!("</{element}>"));
        assert_eq!(html.matches(&begun).count(), html.matches(&ended).count(), "{element}");
    }
    for entry in fs::read_dir(folder.path().join("report")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "svg") {
            let svg = fs::read_to_string(&path).unwrap();
            assert!(!svg.contains("<script") && svg.matches("</svg>").count() == 1, "{}", path.display());
        }
    }
}

#[test]
fn values_that_are_none_are_gaps() {
    let folder = Folder::whole();
    let mut text = String::from("machine,time_s,planes.overflow.writes,ram.used_bytes\n");
    for second in 0..10 {
        let value = ["1e400", "NaN", "-4", "", "7"][second % 5];
        text += &format!("0,{second},{value},{value}\n");
    }
    fs::write(folder.path().join("runs/direct-1/samples.csv"), text).unwrap();
    let html = fs::read_to_string(write(folder.path()).unwrap()).unwrap();
    assert!(!html.contains("NaN") && !html.contains(">inf"));
}

#[test]
fn results_of_one_study_are_compared_and_others_refused() {
    let (a, b) = (Folder::whole(), Folder::whole());
    for run in [1, 2] {
        b.run("ram-256m", run, 11.0 + 40.0 * f64::from(run));
    }
    let found = compare(a.path(), b.path()).unwrap();
    let row = |scenario: &str, name: &str| {
        found.rows.iter().find(|row| row.scenario == scenario && row.name == name).unwrap()
    };
    let same = row("direct", "host-writes");
    assert_eq!((same.ratio, same.spreads_overlap), (Some(1.0), Some(true)));
    let apart = row("ram-256m", "boot_s");
    assert_eq!((apart.a.mean, apart.b.mean, apart.spreads_overlap), (11.0, 71.0, Some(false)));
    assert!(found.notes.is_empty(), "{:?}", found.notes);
    let mut record: StudyRecord = crate::study::record::read(&b.path().join("study.json")).unwrap();
    record.versions.insert("qemu".into(), "9".into());
    fs::write(b.path().join("study.json"), serde_json::to_string(&record).unwrap()).unwrap();
    let notes = compare(a.path(), b.path()).unwrap().notes;
    assert_eq!(notes, ["qemu: not said in the first, 9 in the second"]);
    let text = found.to_string();
    assert!(text.contains("645%") && text.contains("apart") && text.contains("overlap"), "{text}");
    let json = serde_json::to_value(&found).unwrap();
    assert_eq!(json["rows"].as_array().unwrap().len(), found.rows.len());
    let other = Folder::new(&STUDY.replace("\"small\"", "\"large\""));
    let said = format!("{:#}", compare(a.path(), other.path()).unwrap_err());
    assert!(said.contains("not of the same study: the name is small there and large here"), "{said}");
    let other = Folder::new(&STUDY.replace("file-copy", "boot"));
    assert!(format!("{:#}", compare(a.path(), other.path()).unwrap_err()).contains("the work is"));
}

#[test]
fn the_scale_is_said_in_both_forms_and_a_rate_in_scaled_time_does_not_count() {
    let study = crate::study::shipped().unwrap().into_iter().find(|s| s.name == "seed-002").unwrap();
    for (study, scaled) in [(study.clone(), false), (study.quick(), true)] {
        let folder = Folder::new(&toml::to_string(&study).unwrap());
        folder.run_of_all(&study, "direct");
        let html = fs::read_to_string(write(folder.path()).unwrap()).unwrap();
        assert_eq!(html.contains("Time is scaled: users&#x27; pauses are divided by"), scaled);
        let found = seeds::compare_figures(&Results::read(folder.path()).unwrap());
        let rate = found.iter().find(|one| one.what.starts_with("I/Os per second and machine")).unwrap();
        assert_eq!((rate.verdict == seeds::Verdict::NotJudged, rate.theirs.as_str()), (scaled, "100"));
    }
}

/// Figures of a run that the engine's workload leaves, and no others.
fn figures_of(study: &Study, scenario: &Scenario) -> BTreeMap<String, f64> {
    let names = workload::figures(&study.work.workload, study.engine(scenario), &study.parameters(scenario));
    names.unwrap().into_iter().map(|name| (name, 7.0)).collect()
}

/// Columns that a run's samples have.
fn columns_of(study: &Study, scenario: &Scenario) -> BTreeSet<&'static str> {
    let there = |column: &&str| measured::is_sampled(column, study, scenario);
    METRICS.iter().flat_map(|metric| metric.columns.iter().copied()).filter(there).collect()
}

#[test]
fn every_published_figure_has_one_of_ours_beside_it() {
    let shipped = crate::study::shipped().unwrap();
    for (document, count) in [
        ("000", 14),
        ("001", 7),
        ("001-desktops", 1),
        ("002", 6),
        ("002-iometer", 3),
        ("003", 10),
        ("004", 11),
        ("004-boot", 2),
    ] {
        let of = |study: &&Study| study.seed_document.as_deref() == Some(document);
        let study = shipped.iter().find(of).unwrap();
        let folder = Folder::new(&toml::to_string(study).unwrap());
        study.scenarios.iter().for_each(|scenario| folder.run_of_all(study, &scenario.name));
        let found = seeds::compare_figures(&Results::read(folder.path()).unwrap());
        let without: Vec<_> = found.iter().filter(|one| one.ours == "not measured").collect();
        assert!(found.len() == count && without.is_empty(), "{document}: {} {without:?}", found.len());
        let report = super::write(folder.path(), folder.path()).unwrap();
        let html = fs::read_to_string(report.page).unwrap();
        let other = html
            .split_once("Measured by a study of its own. ")
            .map(|(_, rest)| rest.split(':').next().unwrap());
        assert_eq!(other.is_some(), !["000", "003"].contains(&document), "{document}");
        assert!(other.is_none_or(|other| shipped.iter().any(|study| study.name == other)), "{other:?}");
        let expected = report.expected;
        assert!(!expected.is_empty() && expected.iter().all(|one| one.found.is_some()), "{expected:?}");
    }
}
