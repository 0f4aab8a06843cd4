//! Tests of the rules of placing, each with the placer on a store that answers at once.

use super::*;
use crate::driver::Driver;
use crate::sample::{GIB, name};
use serde_json::json;

/// Hosts with space for 64 machines each, in the zone of the same place.
fn hosts(of: &[(&str, &str)]) -> Driver {
    let mut driver = Driver::new();
    of.iter().for_each(|(host, zone)| driver.fleet.host(host, zone));
    driver
}

fn placed(hosts: &[(&str, &str)], count: u32) -> Driver {
    placed_with(hosts, count, json!({}))
}

fn placed_with(of: &[(&str, &str)], count: u32, settings: serde_json::Value) -> Driver {
    let mut driver = hosts(of);
    driver.fleet.catalog("desk", count, settings);
    driver.settle();
    driver.fleet.report_all_ready();
    assert_eq!(driver.settle(), 0);
    driver
}

fn recount(driver: &mut Driver, count: u32) -> usize {
    driver.fleet.catalog("desk", count, json!({}));
    driver.settle()
}

fn obstacles(driver: &Driver) -> Vec<(String, Obstacle)> {
    let unplaced = driver.status().unplaced;
    let [Unplaced { why: Why::Hosts { hosts, .. }, .. }] = &unplaced[..] else { panic!("{unplaced:?}") };
    hosts.iter().map(|(host, obstacle)| (host.to_string(), obstacle.clone())).collect()
}

#[test]
fn machines_go_to_the_zone_with_fewest_and_the_host_with_most_memory() {
    let mut driver = hosts(&[("a", "x"), ("b", "x"), ("c", "y")]);
    driver.fleet.budget("b", 128 * GIB);
    driver.fleet.catalog("desk", 96, json!({}));
    driver.settle();
    assert_eq!(driver.counts("desk", ["a", "b", "c"]), [16, 32, 48]);
    assert_eq!(driver.settle(), 0, "and nothing more is to be written");
}

#[test]
fn a_full_zone_leaves_the_rest_to_others() {
    let driver = placed(&[("a", "x"), ("b", "x"), ("c", "y")], 180);
    assert_eq!(driver.counts("desk", ["a", "b", "c"]), [58, 58, 64]);
}

#[test]
fn packing_fills_one_host_after_the_other() {
    let driver = placed_with(&[("a", "x"), ("b", "x"), ("c", "x")], 100, json!({"spread": "pack"}));
    let mut counts = driver.counts("desk", ["a", "b", "c"]);
    counts.sort_unstable();
    assert_eq!(counts, [0, 36, 64]);
}

#[test]
fn few_machines_are_not_all_on_one_host() {
    let driver = placed(&[("a", "x"), ("b", "x"), ("c", "x")], 3);
    assert_eq!(driver.counts("desk", ["a", "b", "c"]), [1, 1, 1]);
}

#[test]
fn of_equal_hosts_the_one_with_more_of_the_boot_set_is_first() {
    let mut driver = hosts(&[("a", "x"), ("b", "x"), ("c", "x")]);
    driver.fleet.set("status/b", json!({"images": {"debian:1": 900}}));
    driver.fleet.set("status/c", json!({"images": {"debian:1": 100, "debian:2": 1000}}));
    driver.fleet.catalog("desk", 2, json!({}));
    driver.settle();
    assert_eq!(driver.counts("desk", ["a", "b", "c"]), [0, 1, 1]);
    driver.fleet.catalog("one", 1, json!({"spread": "pack"}));
    driver.settle();
    assert_eq!(driver.counts("one", ["a", "b", "c"]), [0, 1, 0]);
}

#[test]
fn a_host_gets_no_more_machines_than_it_has_names_for() {
    let mut driver = hosts(&[("a", "x"), ("b", "x")]);
    driver.fleet.catalog("desk", 20, json!({"naming": "x-#"}));
    driver.settle();
    assert_eq!((driver.counts("desk", ["a", "b"]), driver.status().unplaced[0].machines), ([9, 9], 2));
    let why = driver.status().unplaced[0].to_string();
    assert!(
        why.contains("host 'a' has 9 machines of the catalog, and no names for more: give 'naming' more #"),
        "{why}"
    );
    let long = "l".repeat(60);
    driver.fleet.catalog(&long, 2, json!({}));
    driver.settle();
    assert_eq!(driver.counts(&long, ["a", "b"]), [0, 0]);
    let why = driver.status().unplaced.iter().map(ToString::to_string).collect::<String>();
    assert!(
        why.contains("host 'a' makes names of more than 63 characters: give a shorter 'naming'"),
        "{why}"
    );
}

#[test]
fn each_filter_keeps_machines_away() {
    let all =
        [("a", "x"), ("b", "y"), ("c", "x"), ("d", "x"), ("e", "x"), ("f", "x"), ("g", "x"), ("h", "x")];
    let mut driver = hosts(&all);
    all.iter().for_each(|(host, _)| {
        driver.fleet.set(&format!("hosts/{host}"), json!({"labels": {"gpu": "yes"}}));
    });
    driver.fleet.set("hosts/c", json!({"labels": {"gpu": "no"}}));
    driver.fleet.set("hosts/d", json!({"is_cordoned": true}));
    driver.fleet.set("hosts/e", json!({"is_draining": true}));
    driver.fleet.end_lease("f");
    driver.fleet.delete("status/g");
    driver.fleet.budget("h", GIB - 1);
    driver.fleet.catalog("desk", 70, json!({"zones": ["x", "zp"], "host_labels": {"gpu": "yes"}}));
    driver.settle();
    assert_eq!((driver.fleet.count("a", "desk"), driver.fleet.total("desk")), (64, 64));
    let lacks = |needed, left| Obstacle::Lacks(Shortage { resource: Resource::MemoryBytes, needed, left });
    let why = [
        ("a", lacks(GIB, 0)),
        ("b", Obstacle::OtherZone),
        ("c", Obstacle::LacksLabel(name("gpu"))),
        ("d", Obstacle::Cordoned),
        ("e", Obstacle::Draining),
        ("f", Obstacle::NotAlive),
        ("g", Obstacle::NoStatus),
        ("h", lacks(GIB, GIB - 1)),
        ("p", Obstacle::LacksLabel(name("gpu"))),
    ];
    // What was just written is said once the records have it.
    driver.after_s(1);
    assert_eq!(obstacles(&driver), why.map(|(host, obstacle)| (host.to_owned(), obstacle)));
    let text = driver.status().unplaced[0].to_string();
    assert!(text.starts_with("6 machines of catalog 'desk' are on no host: host 'a' has 0.0 GiB of memory left, and a machine needs 1.0 GiB; host 'b' is in none"), "{text}");
    assert!(driver.events.contains(&text), "{:?}", driver.events);
    driver.fleet.budget("h", 6 * GIB);
    driver.settle();
    assert_eq!((driver.fleet.count("h", "desk"), driver.status().unplaced), (6, vec![]));
    assert_eq!(driver.events.last().unwrap(), "all machines of catalog 'desk' are placed");
}

#[test]
fn an_explanation_names_a_bounded_number_of_hosts() {
    let mut driver = Driver::new();
    (0..99).for_each(|n| driver.fleet.host(&format!("h{n}"), "x"));
    driver.fleet.catalog("desk", 1, json!({"zones": ["nowhere"]}));
    driver.settle();
    let unplaced = driver.status().unplaced;
    let Why::Hosts { hosts, more } = &unplaced[0].why;
    assert_eq!((hosts.len(), *more), (MOST_EXPLAINED, 100 - MOST_EXPLAINED));
}

#[test]
fn every_resource_of_a_budget_counts() {
    for (resource, settings) in [
        ("vcpus", json!({"vcpus": 4})),
        ("limit_bytes", json!({})),
        ("guarantee_bytes", json!({"ram_guarantee_bytes": GIB / 4})),
    ] {
        let mut driver = hosts(&[("a", "x")]);
        let needed = match resource {
            "vcpus" => 4,
            "limit_bytes" => GIB / 2,
            _ => GIB / 4,
        };
        let mut budget = driver.fleet.json("status/a")["budget"].clone();
        budget[resource] = json!(needed * 3 + 1);
        driver.fleet.set("status/a", json!({ "budget": budget }));
        driver.fleet.catalog("desk", 10, settings);
        driver.settle();
        assert_eq!(driver.fleet.count("a", "desk"), 3, "{resource}");
    }
}

#[test]
fn a_host_without_a_hypervisor_needs_no_memory_for_guests() {
    let mut driver = hosts(&[("a", "x")]);
    driver.fleet.set("alive/a", json!({"hypervisor": "none"}));
    driver.fleet.catalog("desk", 200, json!({}));
    driver.settle();
    assert_eq!(driver.fleet.count("a", "desk"), 128);
}

#[test]
fn a_host_that_is_well_keeps_what_it_has() {
    let mut driver = placed(&[("a", "x")], 30);
    driver.fleet.host("b", "y");
    assert_eq!(driver.settle(), 0, "a new host is no reason to move machines");
    driver.fleet.set("hosts/a", json!({"is_cordoned": true}));
    driver.fleet.budget("a", GIB);
    assert_eq!(driver.settle(), 0, "nor is a cordon, or a smaller budget");
    recount(&mut driver, 31);
    assert_eq!(driver.counts("desk", ["a", "b"]), [30, 1]);
}

#[test]
fn machines_that_stay_behind_take_space() {
    let mut driver = placed(&[("a", "x"), ("b", "x")], 100);
    recount(&mut driver, 10);
    // Claimed machines stay until they are released.
    driver.fleet.report("a", "desk", json!({"count": 50, "claimed": 50, "ready": 50, "generation": 2}));
    driver.fleet.report("b", "desk", json!({"count": 5, "generation": 2}));
    driver.fleet.catalog("more", 70, json!({}));
    driver.settle();
    assert_eq!(driver.counts("more", ["a", "b"]), [14, 56]);
}

#[test]
fn surplus_is_taken_from_the_zone_and_the_host_with_most() {
    let mut driver = hosts(&[("a", "x"), ("b", "x"), ("c", "y")]);
    driver.fleet.catalog("desk", 60, json!({}));
    [("a", 25), ("b", 15), ("c", 20)].iter().for_each(|(host, n)| driver.fleet.share(host, "desk", *n));
    assert_eq!(driver.settle(), 0);
    recount(&mut driver, 50);
    assert_eq!(driver.counts("desk", ["a", "b", "c"]), [15, 15, 20], "20 more in zone x than in y");
    recount(&mut driver, 20);
    assert_eq!(driver.counts("desk", ["a", "b", "c"]), [5, 5, 10]);
    recount(&mut driver, 0);
    assert_eq!(driver.fleet.shares(), [], "a share of 0 is deleted");
}

#[test]
fn claimed_machines_are_the_last_that_go() {
    let mut driver = placed(&[("a", "x"), ("b", "y")], 20);
    driver.fleet.report("a", "desk", json!({"count": 10, "ready": 10, "claimed": 9}));
    recount(&mut driver, 11);
    assert_eq!(driver.counts("desk", ["a", "b"]), [9, 2]);
    recount(&mut driver, 8);
    assert_eq!(driver.counts("desk", ["a", "b"]), [8, 0]);
}

#[test]
fn machines_of_a_draining_host_are_placed_elsewhere_and_go_as_those_are_ready() {
    let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "x")], 60);
    driver.fleet.set("hosts/a", json!({"is_draining": true}));
    driver.settle();
    assert_eq!(driver.counts("desk", ["a", "b", "c"]), [20, 30, 30]);
    driver.fleet.report("b", "desk", json!({"count": 30, "ready": 27}));
    driver.settle();
    assert_eq!(driver.counts("desk", ["a", "b", "c"]), [13, 30, 30], "27 and 20 are ready elsewhere");
    driver.fleet.report("b", "desk", json!({"count": 30, "ready": 10}));
    driver.settle();
    assert_eq!(driver.counts("desk", ["a", "b", "c"]), [13, 30, 30], "a share of such a host never rises");
    driver.fleet.report_all_ready();
    driver.settle();
    assert_eq!(driver.counts("desk", ["a", "b", "c"]), [0, 30, 30]);
}

#[test]
fn a_draining_host_keeps_what_has_no_space_elsewhere() {
    let mut driver = placed(&[("a", "x"), ("b", "x")], 100);
    driver.fleet.set("hosts/a", json!({"is_draining": true}));
    driver.settle();
    driver.fleet.report_all_ready();
    driver.settle();
    assert_eq!(driver.counts("desk", ["a", "b"]), [36, 64]);
}

#[test]
fn of_too_many_machines_those_of_draining_hosts_go_first() {
    let mut driver = placed(&[("a", "x"), ("b", "x")], 40);
    driver.fleet.set("hosts/a", json!({"is_draining": true}));
    driver.fleet.catalog("desk", 20, json!({}));
    driver.settle();
    assert_eq!(driver.counts("desk", ["a", "b"]), [0, 20]);
}

#[test]
fn machines_leave_hosts_that_the_catalog_may_not_use_any_more() {
    let mut driver = placed(&[("a", "x"), ("b", "y")], 20);
    driver.fleet.catalog("desk", 20, json!({"zones": ["y"]}));
    driver.settle();
    assert_eq!(driver.counts("desk", ["a", "b"]), [10, 20]);
    driver.fleet.report_all_ready();
    driver.settle();
    assert_eq!(driver.counts("desk", ["a", "b"]), [0, 20]);
}

#[test]
fn a_new_generation_is_written_to_all_shares() {
    let mut driver = placed(&[("a", "x"), ("b", "y")], 20);
    driver.fleet.set("catalogs/desk", json!({"generation": 4}));
    assert_eq!(driver.settle(), 2);
    let share = json!({"count": 10, "version": 1, "generation": 4, "image": "debian"});
    assert_eq!(driver.fleet.json("share/b/desk"), share);
}

#[test]
fn shares_of_a_deleted_catalog_are_deleted() {
    let mut driver = placed(&[("a", "x"), ("b", "y")], 20);
    driver.fleet.put("catalogs/desk", "{");
    driver.transactions.clear();
    driver.settle();
    assert_eq!(driver.transactions, [], "one that cannot be read is there");
    driver.fleet.delete("catalogs/desk");
    driver.settle();
    assert_eq!(driver.fleet.shares(), []);
}

#[test]
fn machines_of_a_deleted_catalog_take_space_until_they_are_gone() {
    let mut driver = placed(&[("a", "x")], 60);
    driver.fleet.delete("catalogs/desk");
    driver.fleet.catalog("more", 30, json!({}));
    driver.settle();
    assert_eq!((driver.fleet.count("a", "desk"), driver.fleet.count("a", "more")), (0, 4));
    driver.fleet.report("a", "desk", json!({"count": 40}));
    driver.settle();
    assert_eq!(driver.fleet.count("a", "more"), 24);
    driver.fleet.set("status/a", json!({"catalogs": {}}));
    driver.settle();
    assert_eq!(driver.fleet.count("a", "more"), 30);
}

#[test]
fn a_lost_hosts_machines_are_placed_elsewhere_in_one_transaction() {
    let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "x"), ("d", "x")], 60);
    driver.fleet.end_lease("a");
    driver.settle();
    assert_eq!(driver.after_s(29), 0);
    assert_eq!(driver.kept("a").unwrap(), "it has been silent for 44 s, and counts as lost after 45 s");
    driver.transactions.clear();
    driver.after_s(1);
    assert_eq!(driver.counts("desk", ["a", "b", "c", "d"]), [0, 20, 20, 20]);
    assert_eq!((driver.transactions.len(), driver.transactions[0].writes.len()), (1, 4));
    assert!(
        driver.events.contains(&"host 'a' counts as lost: its machines are placed on other hosts".into())
    );
    driver.fleet.begin_lease("a");
    assert_eq!(driver.after_s(1), 0, "it comes back, and others keep what they have");
}

#[test]
fn lost_after_is_the_catalogs_own() {
    let mut driver = hosts(&[("a", "x"), ("b", "x"), ("c", "x"), ("d", "x")]);
    driver.fleet.catalog("fast", 40, json!({"lost_after_seconds": 1}));
    driver.fleet.catalog("slow", 40, json!({"lost_after_seconds": 120}));
    driver.settle();
    driver.fleet.end_lease("a");
    driver.after_s(4);
    assert_eq!(driver.counts("fast", ["a"]), [10], "20 s at least");
    driver.after_s(2);
    assert_eq!([driver.counts("fast", ["a"]), driver.counts("slow", ["a"])], [[0], [10]]);
    driver.after_s(98);
    assert_eq!(driver.counts("slow", ["a"]), [10]);
    // The second question is asked after a pause.
    driver.after_s(30);
    assert_eq!(driver.counts("slow", ["a"]), [0]);
}

#[test]
fn a_host_that_others_reach_or_that_the_brake_saves_is_not_replaced() {
    let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "x"), ("d", "x")], 60);
    driver.reaches = Some(true);
    driver.fleet.end_lease("a");
    assert_eq!(driver.after_s(300), 0);
    let text = "the machines of host 'a' are not replaced: it has no lease, but answers another host";
    assert_eq!(driver.events, [text], "it is said once");
    driver.reaches = Some(false);
    driver.fleet.end_lease("b");
    driver.events.clear();
    assert_eq!(driver.after_s(600), 0);
    let why = "2 of 5 hosts are silent at the same time, so that etcd or the network may be the fault";
    assert_eq!(driver.kept("a").unwrap(), why);
    assert_eq!(driver.events, [format!("the machines of 1 silent hosts are not replaced: {why}")]);
    driver.fleet.begin_lease("b");
    driver.after_s(330);
    assert_eq!(driver.counts("desk", ["a", "b", "c", "d"]), [0, 20, 20, 20]);
}

#[test]
fn trouble_of_the_store_keeps_hosts_from_being_replaced() {
    let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "x"), ("d", "x")], 60);
    driver.fleet.end_lease("a");
    for _ in 0..100 {
        driver.health.trouble = Some(driver.now);
        assert_eq!(driver.after_s(1), 0);
    }
    assert_eq!(driver.after_s(29), 0);
    driver.after_s(6);
    assert_eq!(driver.fleet.count("a", "desk"), 0);
}

#[test]
fn trouble_after_the_answers_counts_as_well() {
    let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "x"), ("d", "x")], 60);
    driver.fleet.end_lease("a");
    driver.settle();
    driver.after_s(28);
    assert_eq!(driver.asks.len(), 1);
    driver.health.trouble = Some(driver.now);
    assert_eq!((driver.after_s(6), driver.fleet.count("a", "desk")), (0, 15));
}

#[test]
fn a_declared_death_needs_no_wait_and_no_question() {
    let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "x"), ("d", "x")], 60);
    driver.health.trouble = Some(driver.now);
    ["b", "c"].iter().for_each(|host| driver.fleet.end_lease(host));
    let epoch = driver.fleet.view().alive[&name("a")].created;
    driver.fleet.end_lease("a");
    driver.fleet.set("hosts/a", json!({ "dead_epoch": epoch }));
    driver.settle();
    assert_eq!(driver.counts("desk", ["a", "b", "c", "d"]), [0, 15, 15, 30]);
    assert_eq!(driver.asks, []);
}

#[test]
fn a_removed_host_loses_its_shares() {
    let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "x")], 60);
    ["hosts/a", "alive/a", "status/a"].iter().for_each(|key| driver.fleet.delete(key));
    driver.settle();
    assert_eq!(driver.counts("desk", ["a", "b", "c"]), [0, 30, 30]);
}

#[test]
fn machines_that_keep_data_are_placed_once_and_never_replaced() {
    for settings in [json!({"type": "dedicated"}), json!({"data_disk_bytes": GIB})] {
        let mut driver = placed_with(&[("a", "x"), ("b", "x"), ("c", "x"), ("d", "x")], 40, settings.clone());
        assert_eq!(driver.fleet.total("desk"), 40);
        let before = driver.fleet.counts("desk");
        driver.fleet.end_lease("a");
        driver.fleet.set("hosts/b", json!({"is_draining": true}));
        driver.fleet.delete("hosts/c");
        let epoch = driver.fleet.view().alive[&name("d")].created;
        driver.fleet.set("hosts/d", json!({ "dead_epoch": epoch }));
        driver.after_s(200);
        assert_eq!(driver.fleet.counts("desk"), before, "{settings}");
        assert_eq!(driver.asks, []);
        let why = "its machines keep data, and are never made elsewhere";
        assert_eq!(driver.kept("a").unwrap(), why);
    }
}

#[test]
fn a_lost_host_with_machines_that_keep_data_too_says_so() {
    let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "x"), ("d", "x")], 40);
    driver.fleet.catalog("own", 4, json!({"type": "dedicated"}));
    driver.settle();
    driver.fleet.report_all_ready();
    driver.settle();
    assert_eq!(driver.counts("own", ["a"]), [1]);
    driver.fleet.end_lease("a");
    driver.after_s(100);
    assert_eq!((driver.counts("desk", ["a"]), driver.counts("own", ["a"])), ([0], [1]));
    let why = "those of its machines that keep data stay there, and are never made elsewhere";
    assert_eq!(driver.kept("a").unwrap(), why);
    let text = format!("host 'a' counts as lost: its machines are placed on other hosts; {why}");
    assert!(driver.events.contains(&text), "{:?}", driver.events);
}

#[test]
fn a_lost_host_keeps_what_has_no_space_elsewhere() {
    let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "x"), ("d", "x")], 236);
    driver.fleet.end_lease("a");
    driver.after_s(31);
    assert_eq!(driver.counts("desk", ["a", "b", "c", "d"]), [44, 64, 64, 64]);
    assert_eq!(driver.status().unplaced[0].machines, 44);
    driver.fleet.begin_lease("a");
    driver.settle();
    assert_eq!((driver.fleet.total("desk"), driver.status().unplaced), (236, vec![]));
}

#[test]
fn what_cannot_be_read_is_left_alone() {
    let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "x")], 30);
    driver.fleet.put("share/a/desk", "[]");
    driver.fleet.put("alive/b", "{}");
    recount(&mut driver, 90);
    assert_eq!(driver.counts("desk", ["a", "b", "c"]), [0, 10, 64]);
    assert_eq!(driver.fleet.entries["share/a/desk"].value, b"[]");
    driver.after_s(100);
    assert_eq!(driver.counts("desk", ["b"]), [10]);
}

/// Its host keeps its machines, which are made nowhere else.
#[test]
fn what_a_share_that_cannot_be_read_stands_for_is_there() {
    let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "x")], 30);
    let share = driver.fleet.json("share/a/desk");
    driver.fleet.put("share/a/desk", "[]");
    assert_eq!((driver.settle(), driver.counts("desk", ["b", "c"])), (0, [10, 10]));
    recount(&mut driver, 40);
    assert_eq!(driver.counts("desk", ["b", "c"]), [15, 15], "10 more");
    // It may be a share of none.
    recount(&mut driver, 31);
    assert_eq!(driver.counts("desk", ["b", "c"]), [15, 15]);
    recount(&mut driver, 20);
    assert_eq!(driver.counts("desk", ["b", "c"]), [10, 10]);
    recount(&mut driver, 30);
    // Machines of other catalogs do not get its space.
    driver.fleet.catalog("more", 200, json!({}));
    driver.settle();
    assert_eq!(driver.counts("more", ["a", "b", "c"]), [54, 54, 54]);
    let first = driver.transactions.len();
    driver.fleet.put("share/a/desk", &share.to_string());
    assert_eq!((driver.settle(), driver.counts("desk", ["a", "b", "c"])), (1, [10, 10, 10]));
    assert_eq!(driver.transactions.len(), first + 1, "only its generation was written");
    // A host that drains gives its machines up when somebody can tell it.
    driver.fleet.delete("catalogs/more");
    driver.settle();
    driver.fleet.put("share/a/desk", "[]");
    driver.fleet.set("hosts/a", json!({"is_draining": true}));
    driver.settle();
    assert_eq!(driver.counts("desk", ["b", "c"]), [15, 15]);
}

/// Neither its share nor anything else says how many machines it has.
#[test]
fn a_share_that_cannot_be_read_counts_whatever_else_of_its_host_cannot_be_read() {
    for what in ["its host", "no report", "a report without the catalog"] {
        let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "x")], 30);
        let share = driver.fleet.json("share/a/desk");
        driver.fleet.put("share/a/desk", "[]");
        match what {
            "its host" => _ = driver.fleet.put("hosts/a", "{"),
            "no report" => driver.fleet.delete("status/a"),
            _ => _ = driver.fleet.set("status/a", json!({"catalogs": {}})),
        }
        assert_eq!((driver.settle(), driver.counts("desk", ["b", "c"])), (0, [10, 10]), "{what}");
        assert_eq!((driver.after_s(120), driver.counts("desk", ["b", "c"])), (0, [10, 10]), "{what}");
        // It may be a share of none.
        recount(&mut driver, 15);
        assert_eq!(driver.counts("desk", ["b", "c"]), [8, 7], "{what}");
        recount(&mut driver, 30);
        driver.fleet.put("share/a/desk", &share.to_string());
        driver.settle();
        assert_eq!(driver.fleet.total("desk"), 30, "{what}");
    }
    // Of a host that somebody has removed nothing counts.
    let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "x")], 30);
    driver.fleet.put("share/a/desk", "[]");
    ["hosts/a", "alive/a", "status/a"].iter().for_each(|key| driver.fleet.delete(key));
    driver.settle();
    assert_eq!(driver.counts("desk", ["b", "c"]), [15, 15]);
}

/// Nobody has been told to make its machines.
#[test]
fn a_lost_host_keeps_its_share_while_nothing_can_be_raised() {
    let mut driver = placed(&[("a", "x"), ("b", "y"), ("c", "z"), ("d", "z")], 40);
    let (share, before) = (driver.fleet.json("share/a/desk"), driver.counts("desk", ["b", "c", "d"]));
    driver.fleet.put("share/a/desk", "[]");
    driver.fleet.delete("status/a");
    // Another catalog is raised as ever.
    driver.fleet.catalog("more", 40, json!({}));
    driver.settle();
    assert_eq!(driver.fleet.total("more"), 40);
    driver.reaches = Some(false);
    driver.fleet.end_lease("b");
    driver.after_s(100);
    assert_eq!(driver.counts("desk", ["b", "c", "d"]), before);
    assert_eq!(driver.counts("more", ["b"]), [0]);
    driver.fleet.put("share/a/desk", &share.to_string());
    driver.fleet.report_all_ready();
    driver.after_s(60);
    assert_eq!((driver.counts("desk", ["b"]), driver.fleet.total("desk")), ([0], 40));
}

#[test]
fn a_host_is_lost_whatever_of_it_cannot_be_read() {
    let mut driver = placed(&[("a", "x"), ("b", "y"), ("c", "z"), ("d", "z")], 40);
    driver.fleet.put("share/a/desk", "[]");
    driver.fleet.delete("status/a");
    driver.reaches = Some(false);
    driver.fleet.end_lease("a");
    driver.after_s(100);
    assert_eq!(driver.counts("desk", ["b", "c", "d"]).iter().sum::<u32>(), 40);
    assert!(
        driver.status().hosts.iter().any(|host| host.host == name("a") && host.is_lost),
        "and people hear of it"
    );
}

#[test]
fn an_unknown_share_is_no_reason_to_empty_its_zone() {
    let mut driver = placed(&[("a", "x"), ("b", "x"), ("c", "y")], 40);
    driver.fleet.put("share/a/desk", "[]");
    driver.fleet.delete("status/a");
    let before = driver.counts("desk", ["b", "c"]);
    assert_eq!(before, [10, 20]);
    recount(&mut driver, 20);
    assert_eq!(driver.counts("desk", ["b", "c"]), [10, 10]);
}

#[test]
fn counts_that_nobody_can_want_take_no_time() {
    let mut driver = hosts(&[("a", "x"), ("b", "y")]);
    driver.fleet.set("alive/a", json!({"hypervisor": "none"}));
    driver.fleet.catalog("desk", u32::MAX, json!({"mode": "direct", "naming": "x-#########"}));
    driver.fleet.catalog("small", 3, json!({}));
    ["a", "b"].iter().for_each(|host| driver.fleet.share(host, "small", u32::MAX));
    driver.fleet.report("b", "small", json!({"count": u32::MAX, "ready": u32::MAX, "claimed": u32::MAX}));
    driver.settle();
    assert_eq!((driver.fleet.total("small"), driver.fleet.total("desk")), (3, 999_999_999));
}
