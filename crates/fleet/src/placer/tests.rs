//! Tests of what the placer remembers between steps: its transactions, refusals and its term.

use super::*;
use crate::driver::Driver;
use crate::sample::{Fleet, GIB, identity, name};
use serde_json::json;

fn driver(hosts: usize, machines: u32) -> Driver {
    let mut driver = Driver::new();
    (0..hosts).for_each(|n| driver.fleet.host(&format!("h{n}"), "x"));
    driver.fleet.catalog("desk", machines, json!({}));
    driver
}

fn refuse(driver: &mut Driver, host: &str, count: u32) {
    driver.fleet.report(
        host,
        "desk",
        json!({"count": count, "ready": count, "refused": "its image is missing", "refused_generation": 1}),
    );
}

#[test]
fn only_the_placer_does_something_and_only_if_spillway_places() {
    let mut driver = driver(2, 10);
    driver.fleet.placer("h0");
    assert_eq!((driver.settle(), driver.placer.status(driver.fleet.view())), (0, None));
    driver.fleet.placer("p");
    driver.fleet.set("meta", json!({"placer": false}));
    assert_eq!(driver.settle(), 0);
    driver.fleet.set("meta", json!({"placer": true}));
    assert_eq!(driver.settle(), 2);
}

#[test]
fn each_transaction_compares_the_term_and_what_it_was_decided_on() {
    let mut driver = driver(3, 9);
    let (_, transaction) = driver.step().remove(0);
    let view = driver.fleet.view().clone();
    let term = view.placer.as_ref().unwrap().created;
    assert_eq!(transaction.comparisons[0], Comparison::Created(Key::Placer, term));
    let changes = [
        |fleet: &mut Fleet| _ = fleet.placer("p"),
        |fleet: &mut Fleet| _ = fleet.set("hosts/h1", json!({"is_cordoned": true})),
        |fleet: &mut Fleet| _ = fleet.set("catalogs/desk", json!({"generation": 2})),
        |fleet: &mut Fleet| fleet.share("h2", "desk", 1),
    ];
    for (n, change) in changes.iter().enumerate() {
        let mut driver = self::driver(3, 9);
        let (_, transaction) = driver.step().remove(0);
        change(&mut driver.fleet);
        assert_eq!(driver.fleet.commit(&transaction), Outcome::Conflict, "{n}");
    }
    assert!(matches!(driver.fleet.commit(&transaction), Outcome::Applied(_)));
}

#[test]
fn a_host_that_comes_back_at_the_last_moment_is_not_replaced() {
    let mut driver = driver(4, 40);
    driver.settle();
    driver.fleet.end_lease("h1");
    driver.settle();
    driver.after_s(29);
    driver.now = driver.now.after_ms(1000);
    let (number, transaction) = driver.step().remove(0);
    driver.fleet.begin_lease("h1");
    let outcome = driver.fleet.commit(&transaction);
    assert_eq!(outcome, Outcome::Conflict);
    driver.placer.ended(number, Some(outcome));
    assert_eq!((driver.after_s(3), driver.fleet.count("h1", "desk")), (0, 10));
}

#[test]
fn what_is_under_way_counts_until_the_records_have_it() {
    let mut driver = driver(2, 100);
    let commits = driver.step();
    assert_eq!((commits.len(), driver.step().len()), (1, 0));
    // A second catalog finds the space that is left, and no more.
    driver.fleet.catalog("more", 50, json!({}));
    let (_, more) = driver.step().remove(0);
    let stale = driver.fleet.view().clone();
    let (number, desk) = &commits[0];
    let outcome = driver.fleet.commit(desk);
    driver.placer.ended(*number, Some(outcome));
    assert_eq!(driver.placer.step(&stale, &driver.health, driver.now), [], "the records do not show it yet");
    driver.fleet.commit(&more);
    assert_eq!((driver.fleet.total("desk"), driver.fleet.total("more")), (100, 28));
    driver.after_s(1);
    assert_eq!(driver.fleet.total("more"), 28);
}

#[test]
fn a_conflict_is_decided_again_once_the_records_are_newer_or_a_second_has_passed() {
    let mut driver = driver(2, 10);
    let stale = driver.fleet.view().clone();
    let (number, transaction) = driver.step().remove(0);
    driver.fleet.set("hosts/h1", json!({"is_cordoned": true}));
    let outcome = driver.fleet.commit(&transaction);
    driver.placer.ended(number, Some(outcome));
    let step = |driver: &mut Driver| driver.placer.step(&stale, &driver.health, driver.now).len();
    assert_eq!(step(&mut driver), 0, "the same records would lead to the same conflict");
    driver.now = driver.now.after_ms(1000);
    assert_eq!(step(&mut driver), 1, "it may have been the restore of an older store");
    driver.placer.ended(2, Some(Outcome::Conflict));
    driver.settle();
    assert_eq!(driver.counts("desk", ["h0", "h1"]), [10, 0]);
}

/// Steps for so many seconds, while each transaction conflicts that writes this key. The most transactions of a step.
fn after_s_without(driver: &mut Driver, seconds: u64, stuck: &str) -> usize {
    let mut most = 0;
    for _ in 0..seconds {
        for _ in 0..100 {
            let commits = driver.step();
            most = most.max(commits.len());
            for (number, transaction) in commits {
                let mut keys = transaction.writes.iter().map(crate::sample::key_of);
                let is_stuck = keys.any(|key| key.to_string() == stuck);
                let outcome = if is_stuck { Outcome::Conflict } else { driver.fleet.commit(&transaction) };
                driver.placer.ended(number, Some(outcome));
            }
        }
        driver.now = driver.now.after_ms(1000);
    }
    most
}

/// Somebody changes the catalog while its shares are being written: all of these transactions conflict, and the next ones are as large.
#[test]
fn a_conflict_of_a_moment_divides_no_transactions() {
    let mut driver = driver(150, 300);
    let first = driver.step();
    assert_eq!(first.len(), 3);
    driver.fleet.catalog("desk", 450, json!({}));
    for (number, transaction) in &first {
        let outcome = driver.fleet.commit(transaction);
        assert_eq!(outcome, Outcome::Conflict);
        driver.placer.ended(*number, Some(outcome));
    }
    let again = driver.step();
    assert_eq!(again.len(), 3);
    // It conflicts once more.
    let (number, transaction) = &again[0];
    driver.placer.ended(*number, Some(Outcome::Conflict));
    again[1..].iter().for_each(|(number, transaction)| {
        let outcome = driver.fleet.commit(transaction);
        driver.placer.ended(*number, Some(outcome));
    });
    assert_eq!(driver.step().len(), transaction.writes.len());
}

#[test]
fn a_change_that_conflicts_each_time_keeps_no_others_from_being_written() {
    let mut driver = driver(10, 20);
    driver.fleet.catalog("build", 10, json!({}));
    driver.fleet.catalog("names", 20, json!({"identity": "named", "on_isolation": "stop"}));
    let stuck = driver.step();
    assert_eq!(stuck.len(), 2, "shares, and names");
    stuck.iter().for_each(|(number, _)| driver.placer.ended(*number, Some(Outcome::Conflict)));
    after_s_without(&mut driver, 20, "share/h3/desk");
    assert_eq!((driver.fleet.total("desk"), driver.fleet.total("build")), (18, 10));
    assert_eq!(driver.fleet.view().named[&name("names")].len(), 20);
    // Changes of another catalog go on, and many at the same time.
    driver.fleet.catalog("more", 10, json!({}));
    assert!(after_s_without(&mut driver, 1, "share/h3/desk") <= 2);
    assert_eq!(driver.fleet.total("more"), 10);
    driver.settle();
    driver.after_s(2);
    assert_eq!(driver.fleet.total("desk"), 20);
    // The same with a name.
    driver.fleet.catalog("names", 30, json!({"identity": "named", "on_isolation": "stop"}));
    after_s_without(&mut driver, 20, "named/names/names-023");
    assert_eq!(driver.fleet.view().named[&name("names")].len(), 29);
    // After a while they are written together again.
    driver.after_s(30);
    driver.fleet.catalog("desk", 60, json!({}));
    assert_eq!(driver.step().len(), 1);
}

/// Others get the machines of a lost host although one of them cannot be told.
#[test]
fn machines_of_a_lost_host_are_raised_after_a_conflict() {
    let mut driver = driver(6, 60);
    driver.settle();
    driver.fleet.end_lease("h1");
    driver.settle();
    driver.after_s(29);
    after_s_without(&mut driver, 10, "share/h3/desk");
    let [h1, h2, h3, h4] = driver.counts("desk", ["h1", "h2", "h3", "h4"]);
    assert_eq!([h1, h2, h3, h4], [0, 12, 10, 12]);
    driver.after_s(2);
    assert_eq!(driver.fleet.total("desk"), 60);
}

#[test]
fn without_an_answer_the_records_tell() {
    for what in ["applied", "not applied", "nothing newer is seen"] {
        let mut driver = driver(2, 10);
        let (number, transaction) = driver.step().remove(0);
        driver.placer.ended(number, None);
        match what {
            "applied" => {
                driver.fleet.commit(&transaction);
                assert_eq!(driver.after_s(60), 0);
            }
            "not applied" => {
                driver.fleet.set("hosts/h0", json!({ "is_cordoned": false }));
                assert_eq!(driver.after_s(9), 0, "it may still be applied");
                assert_eq!(driver.after_s(2), 2);
            }
            _ => {
                assert_eq!(driver.after_s(29), 0, "it may have been applied");
                assert_eq!(driver.after_s(2), 2);
            }
        }
        assert_eq!(driver.fleet.total("desk"), 10, "{what}");
    }
    let mut driver = driver(2, 10);
    driver.step();
    assert_eq!(driver.after_s(29), 0, "nobody has told its end");
    assert_eq!(driver.after_s(2), 2);
}

#[test]
fn others_are_raised_no_sooner_than_the_lost_ones_are_lowered() {
    // 200 machines of one host go to 150 others: more than a transaction takes.
    let mut driver = driver(150, 0);
    (0..150).for_each(|n| driver.fleet.budget(&format!("h{n}"), 2 * GIB));
    (0..150).for_each(|n| driver.fleet.report(&format!("h{n}"), "desk", json!({})));
    driver.fleet.host("last", "x");
    driver.fleet.budget("last", 200 * GIB);
    driver.fleet.catalog("desk", 200, json!({}));
    driver.fleet.share("last", "desk", 200);
    assert_eq!(driver.settle(), 0);
    driver.fleet.end_lease("last");
    driver.settle();
    driver.after_s(29);
    driver.now = driver.now.after_ms(1000);
    let commits = driver.step();
    assert_eq!(commits.len(), 1, "what does not fit waits");
    assert_eq!(driver.step().len(), 0);
    let (number, transaction) = &commits[0];
    assert!(transaction.writes.contains(&Write::Delete(Key::Share(name("last"), name("desk")))));
    let outcome = driver.fleet.commit(transaction);
    driver.placer.ended(*number, Some(outcome));
    assert!((62..=124).contains(&driver.fleet.total("desk")));
    driver.settle();
    assert_eq!(driver.fleet.total("desk"), 200);
}

#[test]
fn a_host_that_refuses_is_passed_over_for_ever_longer_times() {
    let mut driver = driver(2, 60);
    driver.settle();
    driver.fleet.report("h1", "desk", json!({"count": 30, "ready": 30}));
    refuse(&mut driver, "h0", 12);
    driver.settle();
    assert_eq!(driver.counts("desk", ["h0", "h1"]), [12, 48]);
    // There is space nowhere else.
    driver.fleet.catalog("desk", 84, json!({}));
    driver.settle();
    assert_eq!((driver.counts("desk", ["h0", "h1"]), driver.status().unplaced[0].machines), ([12, 64], 8));
    let mut pauses = Vec::new();
    let mut since = driver.now;
    for _ in 0..4 {
        while driver.fleet.count("h0", "desk") == 12 {
            driver.after_s(1);
        }
        pauses.push(driver.now.since_ms(since) / 1000);
        since = driver.now;
        driver.fleet.report(
            "h0",
            "desk",
            json!({"count": 12, "generation": 1, "refused": "no", "refused_generation": 2}),
        );
        driver.settle();
        assert_eq!(driver.fleet.count("h0", "desk"), 12);
        // It does what its share says now. That is less than it has refused.
        driver.fleet.report("h0", "desk", json!({"count": 11, "ready": 11, "generation": 2}));
        driver.settle();
        assert_eq!(driver.fleet.count("h0", "desk"), 12, "and makes what is missing");
        driver.fleet.report("h0", "desk", json!({"count": 12, "ready": 12, "generation": 2}));
        driver.settle();
    }
    assert_eq!(pauses, [10, 20, 40, 80]);
    while driver.fleet.count("h0", "desk") == 12 {
        driver.after_s(1);
    }
    driver.fleet.report("h0", "desk", json!({"count": 20, "ready": 20, "generation": 2}));
    driver.settle();
    driver.fleet.catalog("desk", 85, json!({}));
    driver.settle();
    driver.fleet.report(
        "h0",
        "desk",
        json!({"count": 20, "generation": 2, "refused": "no", "refused_generation": 3}),
    );
    driver.settle();
    assert_eq!(driver.fleet.count("h0", "desk"), 20);
    driver.after_s(10);
    assert_eq!(
        driver.fleet.count("h0", "desk"),
        21,
        "it has taken one meanwhile, so that the pause is short again"
    );
}

#[test]
fn a_refusal_of_an_earlier_share_is_none() {
    let mut driver = driver(1, 10);
    refuse(&mut driver, "h0", 0);
    driver.settle();
    driver.after_s(5);
    assert_eq!(driver.fleet.count("h0", "desk"), 10, "it was reported before the share was written");
    driver.fleet.catalog("desk", 11, json!({}));
    driver.settle();
    refuse(&mut driver, "h0", 0);
    driver.after_s(5);
    assert_eq!(driver.fleet.count("h0", "desk"), 11, "it was about another generation");
}

/// A host that has never had the catalog reports it without a generation.
#[test]
fn a_host_that_cannot_make_a_catalog_is_passed_over() {
    let mut driver = driver(2, 20);
    driver.settle();
    let refused = json!({"generation": 0, "version": 0, "refused": "no bridge br0", "refused_generation": 1});
    driver.fleet.report("h0", "desk", refused);
    driver.fleet.report("h1", "desk", json!({"count": 10, "ready": 10}));
    driver.settle();
    assert_eq!(driver.counts("desk", ["h0", "h1"]), [0, 20]);
}

#[test]
fn the_declaration_of_a_host_that_has_come_back_is_ended() {
    let mut driver = driver(4, 40);
    driver.settle();
    let epoch = driver.fleet.view().alive[&name("h1")].created;
    driver.fleet.set("hosts/h1", json!({ "dead_epoch": epoch, "labels": {"a": "b"} }));
    driver.settle();
    assert_eq!(driver.fleet.json("hosts/h1")["dead_epoch"], json!(epoch), "it has not come back");
    driver.fleet.end_lease("h1");
    driver.fleet.begin_lease("h1");
    assert_eq!(driver.settle(), 1);
    let record = driver.fleet.json("hosts/h1");
    assert_eq!((&record["dead_epoch"], &record["labels"]), (&json!(null), &json!({"a": "b"})));
}

#[test]
fn who_is_elected_has_seen_since_when_a_host_is_silent() {
    // Another daemon was the placer before, or this one; or the host was back between two looks.
    for (before, has_missed_a_lease) in [("h0", false), ("p", false), ("h0", true)] {
        let mut driver = driver(4, 40);
        driver.settle();
        driver.fleet.placer(before);
        driver.after_s(1);
        driver.fleet.end_lease("h1");
        driver.after_s(10);
        if has_missed_a_lease {
            driver.fleet.begin_lease("h1");
            driver.fleet.end_lease("h1");
        }
        driver.fleet.placer("p");
        // Of the 45 s, the lease has lasted 15.
        assert_eq!(driver.after_s(if has_missed_a_lease { 30 } else { 20 }), 0, "{before}");
        driver.after_s(1);
        assert_eq!(driver.fleet.count("h1", "desk"), 0, "{before}");
    }
}

#[test]
fn an_end_of_an_unknown_transaction_is_ignored() {
    let mut placer = Placer::new(identity("p"));
    placer.ended(7, None);
    let mut driver = driver(1, 1);
    driver.settle();
    driver.placer.ended(7, Some(Outcome::Conflict));
    driver.placer.answered(&name("h0"), &name("h0"), false);
    assert_eq!(driver.after_s(5), 0);
}

#[test]
fn what_is_being_lowered_counts_until_it_is_lowered() {
    let mut driver = driver(2, 128);
    driver.settle();
    driver.fleet.catalog("desk", 100, json!({}));
    let lowered = driver.step();
    assert_eq!(lowered.len(), 1);
    // Somebody wants them back, and others as well. The transaction will conflict.
    driver.fleet.catalog("desk", 128, json!({}));
    driver.fleet.catalog("more", 10, json!({}));
    driver.fleet.host("h2", "x");
    driver.fleet.budget("h2", GIB);
    let (number, more) = driver.step().remove(0);
    let outcome = driver.fleet.commit(&more);
    driver.placer.ended(number, Some(outcome));
    driver.placer.ended(lowered[0].0, Some(driver.fleet.commit(&lowered[0].1)));
    assert_eq!(driver.counts("more", ["h0", "h1", "h2"]), [0, 0, 1]);
    assert_eq!(driver.fleet.total("desk"), 128);
}

#[test]
fn what_is_being_raised_is_no_reason_to_lower_others() {
    let mut driver = driver(1, 20);
    driver.settle();
    driver.fleet.set("hosts/h0", json!({"is_cordoned": true}));
    driver.fleet.host("h1", "x");
    driver.fleet.catalog("desk", 30, json!({}));
    let raised = driver.step();
    // The transaction will conflict.
    driver.fleet.catalog("desk", 25, json!({}));
    driver.step();
    assert_eq!(driver.fleet.commit(&raised[0].1), Outcome::Conflict);
    driver.placer.ended(raised[0].0, Some(Outcome::Conflict));
    driver.after_s(2);
    assert_eq!(driver.counts("desk", ["h0", "h1"]), [20, 5]);
}

#[test]
fn what_was_decided_before_the_placer_was_switched_off_is_not_applied() {
    let mut driver = driver(2, 10);
    let settings = json!({"identity": "named", "on_isolation": "stop"});
    driver.fleet.catalog("names", 2, settings);
    let decided = driver.step();
    assert_eq!(decided.len(), 2, "shares, and names: {decided:?}");
    driver.fleet.set("meta", json!({"placer": false}));
    for (_, transaction) in decided {
        assert_eq!(driver.fleet.commit(&transaction), Outcome::Conflict, "{transaction:?}");
    }
}
