//! A report, looked at in a real browser: what a person would stumble over fails here.
#![allow(clippy::unwrap_used)]

mod browser;
mod kept;
mod synthetic;

use browser::Browser;
use serde_json::Value;
use spillway_lab::study::report;
use std::fs;
use std::path::Path;
use synthetic::Synthetic;

/// Writes a page that looks at a report, beside it.
fn looking(dir: &Path) -> std::path::PathBuf {
    let mut pictures = String::new();
    for entry in fs::read_dir(dir.join("report")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.ends_with(".svg") {
            pictures += &format!("<img src=\"report/{name}\" width=\"50\">\n");
        }
    }
    assert!(pictures.lines().count() > 20, "{pictures}");
    let page = dir.join("look.html");
    fs::write(&page, include_str!("look.html").replace("PICTURES", &pictures)).unwrap();
    page
}

/// What the page found.
fn found(dom: &str) -> Value {
    let json = dom.split_once("<pre id=\"found\">").unwrap().1.split_once("</pre>").unwrap().0;
    serde_json::from_str(json).unwrap_or_else(|e| panic!("{e}: {json}"))
}

fn look(made: &Synthetic, spoil: impl Fn(&Path)) {
    if !spillway_testkit::has_program("chromium") {
        return spillway_testkit::skip("chromium is not here: run 'make install-deps'");
    }
    let dir = tempfile::tempdir().unwrap();
    made.write(dir.path());
    spoil(dir.path());
    let report = report::write(dir.path(), dir.path()).unwrap().page;
    let page = looking(dir.path());
    for dark in [false, true] {
        let (dom, complaints) = Browser { dir: dir.path(), dark }.dom(&page);
        assert!(complaints.is_empty(), "{complaints:?}");
        let found = found(&dom);
        assert_eq!(found["files"], Value::Array(vec![]), "pictures that are none");
        let frames = found["frames"].as_array().unwrap();
        assert_eq!(frames.len(), 2);
        for frame in frames {
            let at = format!("{} pixels wide, dark: {dark}", frame["width"]);
            assert_eq!(frame["problems"], Value::Array(vec![]), "{at}");
            assert_eq!(frame["dark"], dark, "{at}");
            assert_eq!(
                (&frame["fetched"], &frame["scripts"], &frame["scroll"]),
                (&0.into(), &0.into(), &0.into()),
                "{at}"
            );
            assert!(frame["pictures"].as_u64().unwrap() > 20, "{at}: {frame}");
            assert!(
                frame["words"].as_u64().unwrap() > 300 && frame["least"].as_f64().unwrap() >= 4.5,
                "{at}: {frame}"
            );
            let chapters =
                ["What was asked", "The answer", "Host view", "Machine view", "Cache view", "User view"];
            let last = ["Beside the published figures", "How it was measured"];
            assert_eq!(frame["chapters"], serde_json::json!([&chapters[..], &last[..]].concat()), "{at}");
        }
    }
    let pages = Browser { dir: dir.path(), dark: true }.printed(&report, &dir.path().join("report.pdf"));
    assert!((5..=40).contains(&pages), "{pages} pages");
}

#[test]
fn three_runs_of_one_machine_with_a_dropped_one() {
    look(&synthetic::knowledge_worker(), |dir| {
        let at = dir.join("runs/ram-512m-3/run.json");
        let mut record: spillway_lab::study::RunRecord = spillway_lab::study::record::read(&at).unwrap();
        record.facts.dropped = Some("<script>alert('the guest broke')</script>".into());
        fs::write(&at, serde_json::to_string(&record).unwrap()).unwrap();
        fs::remove_file(dir.join("runs/ram-256m-2/run.json")).unwrap();
    });
}

#[test]
fn one_run_of_six_scenarios_that_lie_far_apart() {
    look(&synthetic::fleet(), |_| ());
}
