//! Tests of the rules for names, each with the placer on a store that answers at once.

use super::*;
use crate::driver::Driver;
use crate::sample::{GIB, name};
use serde_json::{Value, json};
use spillway_api::{Identity, IsolationAction};

/// Hosts with space for 64 machines each, and a catalog of names that are paused when their host is isolated.
fn named(hosts: &[&str], count: u32, settings: Value) -> Driver {
    let mut driver = Driver::new();
    hosts.iter().for_each(|host| driver.fleet.host(host, "z"));
    let mut all = json!({"identity": "named", "on_isolation": "pause"});
    for (setting, value) in settings.as_object().unwrap() {
        all[setting] = value.clone();
    }
    driver.fleet.catalog("desk", count, all);
    driver.settle();
    driver
}

fn recount(driver: &mut Driver, count: u32) {
    driver.fleet.catalog("desk", count, json!({"identity": "named", "on_isolation": "pause"}));
    driver.settle();
}

/// Where each name is: `a` if it is there, `a!` if it is to leave, `-` if it is on no host.
fn places(driver: &Driver) -> Vec<String> {
    let Some(names) = driver.fleet.view().named.get(&name("desk")) else { return Vec::new() };
    let of = |(machine, record): (&Name, &Versioned<NamedRecord>)| {
        let NamedRecord { host, epoch, state, identity, .. } = &record.value;
        let Some(host) = host else { return "-".to_owned() };
        let place = driver.fleet.view().place(host, &name("desk"), machine);
        if let Some(place) = place {
            assert_eq!((place.value.epoch, &place.value.identity), (*epoch, identity));
            assert_eq!(place.value.is_leaving, *state == NameState::Leaving);
        }
        match (state, place.is_some()) {
            (NameState::Placed, true) => host.to_string(),
            (NameState::Leaving, true) => format!("{host}!"),
            (_, false) => format!("{host}?"),
            other => panic!("{other:?}"),
        }
    };
    names.iter().map(of).collect()
}

fn count(driver: &Driver, place: &str) -> usize {
    places(driver).iter().filter(|is| *is == place).count()
}

fn identity(driver: &Driver, machine: &str) -> Identity {
    driver.fleet.view().name(&name("desk"), &name(machine)).unwrap().value.identity.clone()
}

/// The host confirms that nothing runs any more of what it was to give up.
fn confirm(driver: &mut Driver, host: &str) {
    let places = driver.fleet.view().places.get(&name(host)).cloned().unwrap_or_default();
    for ((catalog, machine), _) in places.iter().filter(|(_, place)| place.value.is_leaving) {
        driver.fleet.delete(&format!("place/{host}/{catalog}/{machine}"));
    }
    driver.settle();
}

#[test]
fn names_are_given_once_and_share_the_budget_with_other_machines() {
    let mut driver = named(&["a", "b"], 100, json!({}));
    assert_eq!((count(&driver, "a"), count(&driver, "b")), (50, 50));
    assert!(driver.transactions.iter().all(|transaction| transaction.writes.len() <= 80));
    assert_eq!(driver.settle(), 0, "and nothing more is to be written");
    let record = &driver.fleet.view().name(&name("desk"), &name("desk-007")).unwrap().value;
    assert_eq!((record.number, record.on_isolation), (7, IsolationAction::Pause));
    driver.fleet.catalog("any", 100, json!({}));
    driver.settle();
    assert_eq!(driver.counts("any", ["a", "b"]), [14, 14], "64 machines fit on each");
    recount(&mut driver, 110);
    assert_eq!(places(&driver).len(), 100);
    let unplaced: Vec<u64> = driver.status().unplaced.iter().map(|unplaced| unplaced.machines).collect();
    assert!(unplaced.contains(&10), "{unplaced:?}");
}

#[test]
fn a_name_that_should_not_be_goes_when_its_host_has_confirmed_that() {
    let mut driver = named(&["a", "b"], 4, json!({}));
    recount(&mut driver, 3);
    assert_eq!(places(&driver).iter().filter(|is| is.ends_with('!')).count(), 1, "{:?}", places(&driver));
    assert_eq!(driver.after_s(300), 0, "nothing more happens");
    let host = places(&driver)[3].trim_end_matches('!').to_owned();
    let before = identity(&driver, "desk-004");
    recount(&mut driver, 4);
    assert_eq!(places(&driver)[3], host, "it may stay after all");
    recount(&mut driver, 3);
    confirm(&mut driver, &host);
    assert_eq!(places(&driver).len(), 3);
    recount(&mut driver, 4);
    assert_ne!(identity(&driver, "desk-004"), before, "it is another machine");
    driver.fleet.delete("catalogs/desk");
    driver.settle();
    confirm(&mut driver, "a");
    confirm(&mut driver, "b");
    assert_eq!(places(&driver), [""; 0]);
}

#[test]
fn names_of_a_lost_host_go_elsewhere_with_their_identity_after_the_whole_time() {
    let mut driver = named(&["a", "b", "c", "d"], 4, json!({}));
    let of_a = places(&driver).iter().position(|host| host == "a").unwrap();
    let machine = format!("desk-{:03}", of_a + 1);
    let before = identity(&driver, &machine);
    driver.fleet.end_lease("a");
    driver.settle();
    assert_eq!((driver.after_s(44), count(&driver, "a")), (0, 1), "its machines may still run");
    driver.after_s(2);
    assert_eq!(count(&driver, "a"), 0);
    assert_eq!(identity(&driver, &machine), before);
    assert!(!driver.fleet.view().places.contains_key(&name("a")));
    let mut longer = named(&["a", "b", "c", "d"], 4, json!({"lost_after_seconds": 100}));
    longer.fleet.end_lease("a");
    longer.settle();
    assert_eq!((longer.after_s(84), count(&longer, "a")), (0, 1));
    longer.after_s(2);
    assert_eq!(count(&longer, "a"), 0);
}

#[test]
fn what_keeps_other_machines_from_being_replaced_keeps_names_too() {
    let mut driver = named(&["a", "b", "c", "d"], 4, json!({}));
    driver.reaches = Some(true);
    driver.fleet.end_lease("a");
    driver.settle();
    assert_eq!((driver.after_s(200), count(&driver, "a")), (0, 1), "it answers another host");
    driver.reaches = Some(false);
    driver.fleet.end_lease("b");
    driver.fleet.end_lease("c");
    driver.settle();
    assert_eq!((driver.after_s(200), count(&driver, "a")), (0, 1), "too many are silent");
}

#[test]
fn machines_that_run_on_are_replaced_only_if_their_host_is_declared_dead() {
    let mut driver = named(&["a", "b", "c", "d"], 4, json!({"on_isolation": "keep"}));
    driver.fleet.end_lease("a");
    driver.settle();
    assert_eq!((driver.after_s(1000), count(&driver, "a")), (0, 1));
    assert!(driver.kept("a").unwrap().contains("declared dead"), "{:?}", driver.kept("a"));
    let revision = driver.fleet.revision();
    driver.fleet.set("hosts/a", json!({"dead_epoch": revision}));
    driver.settle();
    assert_eq!(count(&driver, "a"), 0);
}

#[test]
fn a_host_that_was_dead_in_an_earlier_epoch_is_not_dead_again() {
    let mut driver = named(&["a", "b", "c", "d"], 4, json!({}));
    driver.fleet.end_lease("a");
    let revision = driver.fleet.revision();
    driver.fleet.begin_lease("a");
    driver.settle();
    driver.fleet.end_lease("a");
    driver.fleet.set("hosts/a", json!({"dead_epoch": revision}));
    // Another placer, which has seen nothing of that.
    driver.fleet.placer("p");
    driver.settle();
    assert_eq!((driver.after_s(30), count(&driver, "a")), (0, 1));
}

#[test]
fn a_host_that_comes_back_keeps_the_names_that_others_have_not_got() {
    let mut driver = named(&["a", "b", "c", "d"], 4, json!({}));
    driver.fleet.end_lease("a");
    driver.settle();
    driver.after_s(20);
    let epoch = driver.fleet.begin_lease("a");
    driver.settle();
    let names = &driver.fleet.view().named[&name("desk")];
    let of_a: Vec<_> = names.values().filter(|of| of.value.host == Some(name("a"))).collect();
    assert_eq!((of_a.len(), of_a[0].value.epoch), (1, epoch));
    assert_eq!(count(&driver, "a"), 1);
}

#[test]
fn a_host_that_is_back_in_time_is_not_robbed_by_a_late_transaction() {
    let mut driver = named(&["a", "b", "c", "d"], 4, json!({}));
    driver.fleet.end_lease("a");
    driver.settle();
    driver.after_s(44);
    driver.now = driver.now.after_ms(2000);
    let mut late = driver.step();
    late.extend(driver.step());
    assert!(!late.is_empty());
    driver.fleet.begin_lease("a");
    for (_, transaction) in late {
        assert_eq!(driver.fleet.commit(&transaction), crate::transaction::Outcome::Conflict);
    }
}

#[test]
fn a_draining_host_gives_names_up_as_far_as_others_have_space() {
    let mut driver = named(&["a", "b"], 8, json!({}));
    driver.fleet.budget("b", 6 * GIB);
    driver.settle();
    driver.fleet.set("hosts/a", json!({"is_draining": true}));
    driver.settle();
    assert_eq!((count(&driver, "a!"), count(&driver, "a"), count(&driver, "b")), (2, 2, 4));
    confirm(&mut driver, "a");
    assert_eq!((count(&driver, "a"), count(&driver, "b")), (2, 6));
    driver.fleet.budget("b", 64 * GIB);
    driver.settle();
    driver.fleet.set("hosts/a", json!({"is_draining": false}));
    driver.settle();
    assert_eq!((count(&driver, "a"), count(&driver, "b")), (2, 6), "what is well stays where it is");
}

#[test]
fn a_change_of_on_isolation_counts_once_the_host_has_ended_the_machine() {
    let mut driver = named(&["a", "b", "c", "d"], 1, json!({"on_isolation": "keep"}));
    recount(&mut driver, 1);
    let host = places(&driver)[0].trim_end_matches('!').to_owned();
    assert!(places(&driver)[0].ends_with('!'), "{:?}", places(&driver));
    driver.fleet.end_lease(&host);
    driver.settle();
    assert_eq!(
        (driver.after_s(300), places(&driver)[0].clone()),
        (0, format!("{host}!")),
        "it runs on there"
    );
    driver.fleet.begin_lease(&host);
    driver.settle();
    confirm(&mut driver, &host);
    let record = &driver.fleet.view().name(&name("desk"), &name("desk-001")).unwrap().value;
    assert_eq!((record.on_isolation, record.state), (IsolationAction::Pause, NameState::Placed));
}

#[test]
fn what_somebody_has_deleted_is_written_again() {
    let mut driver = named(&["a"], 2, json!({}));
    driver.fleet.delete("place/a/desk/desk-001");
    assert_eq!(places(&driver), ["a?", "a"]);
    driver.settle();
    assert_eq!(places(&driver), ["a", "a"]);
    driver.fleet.put("named/desk/desk-002", "{");
    assert_eq!(driver.settle(), 0, "what cannot be read is left alone");
    recount(&mut driver, 3);
    assert_eq!(places(&driver), ["a", "a"], "of 1 and 3");
}

#[test]
fn a_host_that_has_refused_the_catalog_gets_no_names() {
    let mut driver = named(&["a", "b"], 0, json!({}));
    // It has never had the catalog, so that it reports no generation.
    let refused = json!({"generation": 0, "version": 0, "refused": "no bridge br0", "refused_generation": 2});
    driver.fleet.report("a", "desk", refused);
    recount(&mut driver, 4);
    assert_eq!((count(&driver, "a"), count(&driver, "b")), (0, 4));
}

/// etcd may have ended its lease right after it had renewed it.
#[test]
fn a_host_that_is_said_to_be_dead_keeps_its_names_until_its_guard_has_ended_them() {
    let mut driver = named(&["a", "b", "c", "d"], 4, json!({}));
    driver.fleet.end_lease("a");
    driver.settle();
    let revision = driver.fleet.revision();
    driver.fleet.set("hosts/a", json!({"dead_epoch": revision}));
    assert_eq!(
        (driver.after_s(34), count(&driver, "a")),
        (0, 1),
        "32 s after its last renewal, and a margin"
    );
    driver.after_s(2);
    assert_eq!(count(&driver, "a"), 0);
    // Later nobody waits.
    let mut late = named(&["a", "b", "c", "d"], 4, json!({"lost_after_seconds": 100}));
    late.fleet.end_lease("a");
    late.settle();
    late.after_s(36);
    let revision = late.fleet.revision();
    late.fleet.set("hosts/a", json!({"dead_epoch": revision}));
    late.settle();
    assert_eq!(count(&late, "a"), 0);
}

#[test]
fn another_on_isolation_ends_a_batch_of_machines_at_a_time() {
    let mut driver = named(&["a", "b"], 20, json!({"on_isolation": "keep"}));
    recount(&mut driver, 20);
    let is_changed = |driver: &Driver| {
        let names = &driver.fleet.view().named[&name("desk")];
        names.values().all(|of| of.value.on_isolation == IsolationAction::Pause)
    };
    let mut batches = 0;
    while !is_changed(&driver) {
        assert_eq!(count(&driver, "a!") + count(&driver, "b!"), 2, "{:?}", places(&driver));
        let host = if count(&driver, "a!") > 0 { "a" } else { "b" };
        confirm(&mut driver, host);
        batches += 1;
    }
    assert!(batches >= 10, "{batches}");
    assert_eq!(count(&driver, "a") + count(&driver, "b"), 20);
}

#[test]
fn two_catalogs_that_were_made_at_the_same_time_share_no_name() {
    let mut driver = named(&["a", "b"], 3, json!({"naming": "pc-##"}));
    driver.fleet.catalog("other", 5, json!({"identity": "named", "naming": "pc-##"}));
    driver.settle();
    let names = |catalog: &str| driver.fleet.view().named[&name(catalog)].keys().cloned().collect::<Vec<_>>();
    assert_eq!((names("desk").len(), names("other")), (3, vec![name("pc-04"), name("pc-05")]));
}

/// Neither does the order in which they were made count, nor that their patterns are others.
#[test]
fn catalogs_whose_patterns_overlap_share_no_name_in_one_plan() {
    let mut driver = Driver::new();
    let settings = |naming: &str| json!({"identity": "named", "on_isolation": "stop", "naming": naming});
    driver.fleet.catalog("desk", 120, settings("pc-###"));
    driver.fleet.catalog("other", 5, settings("pc-1##"));
    driver.settle();
    driver.fleet.host("a", "z");
    driver.fleet.host("b", "z");
    driver.fleet.host("c", "z");
    driver.settle();
    let view = driver.fleet.view();
    let (desk, other) = (&view.named[&name("desk")], view.named.get(&name("other")));
    let twice = other.into_iter().flat_map(|names| names.keys()).find(|name| desk.contains_key(*name));
    assert_eq!((desk.len(), twice), (120, None));
    // Nor while a transaction is under way.
    let mut driver = Driver::new();
    driver.fleet.host("a", "z");
    driver.fleet.catalog("desk", 3, settings("pc-##"));
    let open = driver.step();
    driver.fleet.catalog("other", 3, settings("pc-##"));
    driver.settle();
    open.iter().for_each(|(_, transaction)| _ = driver.fleet.commit(transaction));
    driver.settle();
    let names = |of: &str| driver.fleet.view().named.get(&name(of)).map_or(0, BTreeMap::len);
    assert_eq!((names("desk"), names("other")), (3, 0));
}

/// The same holds if its record is gone: whoever has declared it dead removes it next.
#[test]
fn a_host_that_was_removed_keeps_its_names_until_its_guard_has_ended_them() {
    for by_another in [false, true] {
        let mut driver = named(&["a", "b", "c", "d"], 4, json!({}));
        driver.fleet.end_lease("a");
        driver.settle();
        driver.fleet.delete("hosts/a");
        if by_another {
            driver.restart();
        }
        // Who has not seen it alive does not know for how long it has been silent.
        let kept_s = if by_another { 49 } else { 34 };
        assert_eq!((driver.after_s(kept_s), count(&driver, "a")), (0, 1));
        driver.after_s(3);
        assert_eq!(count(&driver, "a"), 0, "by another: {by_another}");
    }
}

/// It is back, and gone again before the records say so.
#[test]
fn a_host_that_was_back_since_it_was_said_to_be_dead_is_not_dead() {
    for (action, kept_s) in [("pause", 44), ("keep", 1000)] {
        let mut driver = named(&["a", "b", "c", "d"], 4, json!({"on_isolation": action}));
        driver.fleet.end_lease("a");
        driver.settle();
        let revision = driver.fleet.revision();
        driver.fleet.begin_lease("a");
        let renewed = driver.step();
        driver.fleet.end_lease("a");
        driver.fleet.set("hosts/a", json!({"dead_epoch": revision}));
        for (number, transaction) in renewed {
            let outcome = driver.fleet.commit(&transaction);
            driver.placer.ended(number, Some(outcome));
        }
        driver.settle();
        assert_eq!((driver.after_s(kept_s), count(&driver, "a")), (0, 1), "{action}");
        driver.after_s(2);
        assert_eq!(count(&driver, "a"), usize::from(action == "keep"));
    }
}

/// Somebody has deleted its places, too, so that its names alone tell of it.
#[test]
fn a_host_of_which_only_names_are_left_may_run_them_still() {
    let mut driver = named(&["a", "b"], 2, json!({}));
    driver.fleet.end_lease("a");
    let of_a = places(&driver).iter().position(|host| host == "a").unwrap() + 1;
    for key in ["hosts/a", "status/a", "share/a/desk", &format!("place/a/desk/desk-{of_a:03}")] {
        driver.fleet.delete(key);
    }
    driver.restart();
    driver.settle();
    assert_eq!((driver.after_s(49), count(&driver, "a?")), (0, 1));
    driver.after_s(3);
    assert_eq!(count(&driver, "b"), 2);
}

/// Whoever has its name by now does not run them, and cannot say that the other one does not.
#[test]
fn a_host_that_joins_under_the_name_of_a_removed_one_waits_for_that() {
    for is_leaving in [false, true] {
        let mut driver = named(&["a", "b", "c", "d"], 4, json!({}));
        if is_leaving {
            driver.fleet.set("hosts/a", json!({"is_draining": true}));
            driver.settle();
        }
        let is = if is_leaving { "a!" } else { "a" };
        driver.fleet.end_lease("a");
        driver.fleet.delete("hosts/a");
        driver.settle();
        driver.after_s(2);
        driver.fleet.host("a", "z");
        driver.settle();
        let epoch = driver.fleet.view().alive[&name("a")].created;
        let is_new = |driver: &Driver| {
            let names = driver.fleet.view().named[&name("desk")].values();
            names.filter(|of| of.value.epoch == epoch).count() == 1
        };
        let machines = (driver.after_s(34), count(&driver, is), is_new(&driver));
        assert_eq!(machines, (0, 1, false), "the other one may run it");
        driver.after_s(2);
        assert_eq!((count(&driver, "a"), is_new(&driver)), (1, true));
    }
}

#[test]
fn names_leave_a_host_that_refuses_the_catalog_and_has_no_machine_of_it() {
    let mut driver = named(&["a", "b"], 4, json!({}));
    let refused = |count: u32| json!({"generation": 0, "count": count, "refused": "no bridge br0", "refused_generation": 1});
    driver.fleet.report("a", "desk", refused(1));
    driver.settle();
    assert_eq!(count(&driver, "a"), 2, "one runs, and nobody knows which");
    driver.fleet.report("a", "desk", refused(0));
    driver.settle();
    assert_eq!(count(&driver, "a!"), 2);
    // It has nothing to refuse any more, and says so before it gives the names up.
    driver.fleet.report("a", "desk", json!({"generation": 1}));
    driver.settle();
    assert_eq!(count(&driver, "a!"), 2);
    confirm(&mut driver, "a");
    assert_eq!(count(&driver, "b"), 4);
    // If the other refuses, too, they go back and forth more and more seldom.
    let mut writes = 0;
    for _ in 0..3600 {
        for host in ["a", "b"] {
            driver.fleet.report(host, "desk", refused(0));
            confirm(&mut driver, host);
        }
        writes += driver.after_s(1);
    }
    assert!(writes < 400, "{writes} writes in an hour");
}

#[test]
fn a_share_that_cannot_be_read_keeps_no_other_one_waiting() {
    let mut driver = named(&["a", "b"], 4, json!({}));
    driver.fleet.put("share/a/desk", "{");
    driver.fleet.catalog("any", 4, json!({}));
    recount(&mut driver, 8);
    driver.after_s(5);
    assert_eq!(driver.counts("any", ["a", "b"]), [2, 2]);
    assert_eq!((count(&driver, "a"), driver.fleet.count("b", "desk")), (2, 6), "it gets no further names");
    assert_eq!(driver.after_s(120), 0);
}

#[test]
fn another_on_isolation_takes_no_name_off_a_host_that_would_not_get_it_again() {
    let of_all =
        [json!({"is_draining": true}), json!({"is_cordoned": true}), json!({}), json!({"zone": "y"})];
    for settings in of_all {
        let mut driver = named(&["a", "b"], 4, json!({"on_isolation": "stop", "zones": ["z"]}));
        driver.fleet.budget("b", 2 * GIB);
        driver.settle();
        if settings == json!({}) {
            let refused = json!({"count": 2, "refused": "no bridge br0", "refused_generation": 2});
            driver.fleet.report("a", "desk", refused);
        }
        driver.fleet.set("hosts/a", settings);
        let changed = json!({"identity": "named", "on_isolation": "pause", "zones": ["z"]});
        driver.fleet.catalog("desk", 4, changed);
        driver.settle();
        for _ in 0..10 {
            confirm(&mut driver, "a");
            confirm(&mut driver, "b");
        }
        assert_eq!((count(&driver, "a"), count(&driver, "b")), (2, 2), "{:?}", places(&driver));
        assert_eq!(driver.status().unplaced.len(), 0);
        driver.fleet.budget("b", 4 * GIB);
        driver.settle();
        for _ in 0..10 {
            confirm(&mut driver, "a");
            confirm(&mut driver, "b");
        }
        assert_eq!(count(&driver, "b"), 4, "{:?}", places(&driver));
    }
}

#[test]
fn another_on_isolation_counts_on_a_full_host_too() {
    let mut driver = named(&["a"], 64, json!({"on_isolation": "stop"}));
    assert_eq!(count(&driver, "a"), 64);
    recount(&mut driver, 64);
    for _ in 0..64 {
        assert!(count(&driver, "a") >= 62, "{:?}", places(&driver));
        confirm(&mut driver, "a");
    }
    let names = driver.fleet.view().named[&name("desk")].values();
    assert_eq!(names.filter(|of| of.value.on_isolation == IsolationAction::Pause).count(), 64);
}

/// Others may get the space that a name leaves, or the host has less than it had, or reports it later than it confirms.
#[test]
fn names_that_have_nowhere_to_go_count_for_the_batch_of_another_on_isolation() {
    let named_by = |action: &str| json!({"identity": "named", "on_isolation": action});
    for what in ["another catalog", "a smaller budget", "late reports"] {
        let mut driver = named(&["a"], 64, json!({"on_isolation": "stop"}));
        match what {
            "another catalog" => driver.fleet.catalog("aaa", 20, named_by("stop")),
            "a smaller budget" => driver.fleet.budget("a", 50 * GIB),
            _ => driver.fleet.report("a", "desk", json!({"count": 64, "ready": 64})),
        }
        driver.settle();
        recount(&mut driver, 64);
        assert_eq!((count(&driver, "a!"), count(&driver, "a")), (2, 62), "{what}");
        for _ in 0..20 {
            confirm(&mut driver, "a");
            assert_eq!((count(&driver, "a"), driver.after_s(1)), (62, 0), "{what}: {:?}", places(&driver));
        }
        // They get space, and the next ones leave.
        match what {
            "late reports" => driver.fleet.report("a", "desk", json!({"count": 62, "ready": 62})),
            _ => driver.fleet.host("b", "z"),
        }
        driver.settle();
        let down = count(&driver, "a!") + count(&driver, "a?") + count(&driver, "b!");
        assert_eq!(
            (down, count(&driver, "a") + count(&driver, "b")),
            (2, 62),
            "{what}: {:?}",
            places(&driver)
        );
    }
}

/// Whoever has claimed one may keep it for hours.
#[test]
fn claimed_machines_that_are_to_leave_do_not_stop_another_on_isolation() {
    let mut driver = named(&["a", "b"], 20, json!({"on_isolation": "keep"}));
    driver.fleet.report("a", "desk", json!({"count": 10, "claimed": 2}));
    recount(&mut driver, 20);
    let leave = |driver: &Driver| count(driver, "a!") + count(driver, "b!");
    assert_eq!((leave(&driver), count(&driver, "a!")), (2, 2));
    assert_eq!((driver.after_s(59), leave(&driver)), (0, 2), "nobody knows yet which ones are claimed");
    driver.after_s(2);
    assert_eq!(leave(&driver), 4);
    // The others go, and the claimed ones stay.
    assert_eq!((driver.after_s(120), leave(&driver)), (0, 4), "only two are claimed");
}

#[test]
fn names_that_should_not_be_reserve_nothing_elsewhere() {
    let mut driver = named(&["a", "b"], 8, json!({}));
    driver.fleet.budget("a", 8 * GIB);
    driver.fleet.budget("b", 8 * GIB);
    recount(&mut driver, 0);
    assert_eq!((count(&driver, "a!"), count(&driver, "b!")), (4, 4));
    driver.fleet.set("hosts/a", json!({"is_draining": true}));
    driver.fleet.catalog("any", 4, json!({}));
    driver.settle();
    assert_eq!(driver.counts("any", ["a", "b"]), [0, 4]);
}

/// The host leaves the whole catalog as it is.
#[test]
fn a_host_with_a_place_that_cannot_be_read_gets_no_names() {
    let mut driver = named(&["a", "b"], 4, json!({}));
    let of_a = places(&driver).iter().position(|host| host == "a").unwrap() + 1;
    driver.fleet.put(&format!("place/a/desk/desk-{of_a:03}"), "{");
    recount(&mut driver, 8);
    let names = &driver.fleet.view().named[&name("desk")];
    let of = |host: &str| names.values().filter(|of| of.value.host == Some(name(host))).count();
    assert_eq!((of("a"), of("b")), (2, 6));
    assert_eq!(driver.fleet.count("b", "desk"), 6);
}

/// Another catalog of the same pattern has it, perhaps.
#[test]
fn a_name_whose_record_cannot_be_read_is_given_to_nobody() {
    let mut driver = named(&["a", "b"], 1, json!({"naming": "pc-###"}));
    driver.fleet.put("named/desk/pc-001", "[]");
    driver.fleet.catalog(
        "more",
        2,
        json!({"identity": "named", "on_isolation": "pause", "naming": "pc-###"}),
    );
    driver.settle();
    let more: Vec<String> =
        driver.fleet.view().named[&name("more")].keys().map(|machine| machine.to_string()).collect();
    assert_eq!(more, ["pc-002"]);
}
