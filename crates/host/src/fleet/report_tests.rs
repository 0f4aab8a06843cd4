//! Tests of what a report leaves out, and of what says so.

use super::*;
use serde_json::json;
use spillway_fleet::records::{NextVersion, VersionName};
use std::collections::BTreeMap;

/// A report of so many catalogs, whose numbers are as long as they get, with reasons of so many characters.
fn report(catalogs: usize, reason: usize) -> StatusRecord {
    let next: NextVersion = serde_json::from_value(
        json!({ "image": "windows-11-desktop", "version": 1234, "waits": "é".repeat(reason) }),
    )
    .unwrap();
    let of = CatalogStatus {
        generation: 1234,
        version: 1233,
        image: Some("windows-11-desktop".parse().unwrap()),
        count: 1234,
        ready: 1100,
        off: 120,
        updated: 1002,
        claimed: 640,
        spared: 14,
        failed: 13,
        refused: Some("é".repeat(reason)),
        refused_generation: 1234,
        refused_version: Some(VersionName { image: "windows-11-desktop".parse().unwrap(), version: 1234 }),
        waiting: None,
        next: Some(next),
    };
    let name = |n: usize| format!("desktops-of-department-{n}").parse().unwrap();
    StatusRecord {
        catalogs: (0..catalogs).map(|n| (name(n), of.clone())).collect(),
        ..StatusRecord::default()
    }
}

fn bytes(status: &StatusRecord) -> usize {
    serde_json::to_vec(status).unwrap().len()
}

#[test]
fn a_report_of_forty_catalogs_loses_none() {
    let mut status = report(40, 200);
    status.images = (0..400).map(|n| (format!("image-{n}:1"), 1000)).collect();
    status.whole = status.images.keys().cloned().collect();
    let whole = status.clone();
    let status = fitting(status);
    assert!(bytes(&status) <= MOST_STATUS_BYTES);
    assert_eq!(status.catalogs.len(), 40, "reasons are shortened first, and images go before");
    assert!(status.images.len() < 400 && status.images.keys().eq(&status.whole) && status.is_cut);
    let counts = |of: &CatalogStatus| CatalogStatus { refused: None, next: None, ..of.clone() };
    assert!(status.catalogs.values().map(counts).eq(whole.catalogs.values().map(counts)));
    assert!(status.catalogs.values().all(|of| of.refused.is_some()), "what is refused stays refused");
}

#[test]
fn shorter_reasons_alone_are_no_cut() {
    let status = fitting(report(20, 200));
    assert!(bytes(&status) <= MOST_STATUS_BYTES && !status.is_cut);
    assert!(bytes(&report(20, 200)) > MOST_STATUS_BYTES);
    assert!(!serde_json::to_string(&status).unwrap().contains("is_cut"));
}

#[test]
fn what_never_fits_is_cut_to_the_first_catalogs() {
    let status = fitting(report(500, 0));
    assert!(status.is_cut && bytes(&status) <= MOST_STATUS_BYTES && status.catalogs.len() > 40);
    let all = report(500, 0).catalogs;
    assert!(status.catalogs.iter().eq(all.iter().take(status.catalogs.len())));
}

#[test]
fn an_event_says_when_reports_begin_to_be_cut() {
    let dir = tempfile::tempdir().unwrap();
    let events = Events::open(&dir.path().join("events"), &mut |why| panic!("{why}"));
    let cut = ReportCut::default();
    let mut told = BTreeMap::new();
    for (step, is_cut) in [false, true, true, false, true].into_iter().enumerate() {
        cut.note(&StatusRecord { is_cut, ..StatusRecord::default() }, &events);
        told.insert(
            step,
            events.newest(10).1.iter().filter(|event| event.text.contains("leaves out")).count(),
        );
    }
    assert_eq!(told.into_values().collect::<Vec<_>>(), [0, 1, 1, 1, 2]);
}
