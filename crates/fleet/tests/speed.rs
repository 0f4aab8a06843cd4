//! How long placing takes in a fleet of 1,000 hosts. `SPILLWAY_HOSTS=N` sets the number of hosts.
//!
//! The limits are of programs as users have them, and hold as they are with `cargo test --release -p spillway-fleet --test speed`. Where
//! programs have all checks in them, twice as much is allowed.
#![allow(clippy::unwrap_used)]

#[path = "common/driver.rs"]
mod driver;
#[path = "common/sample.rs"]
mod sample;

use driver::Driver;
use sample::{GIB, name};
use serde_json::json;
use spillway_api::Name;
use spillway_fleet::Moment;
use spillway_fleet::view::Shares;
use std::time::Duration;

/// The limit for this build.
fn limit(of_release: Duration) -> Duration {
    if cfg!(debug_assertions) { 2 * of_release } else { of_release }
}

#[test]
fn a_thousand_hosts_are_decided_on_in_time() {
    let hosts = std::env::var("SPILLWAY_HOSTS").map_or(1000, |text| text.parse::<usize>().unwrap());
    let machines = 5 * hosts as u32;
    let mut driver = Driver::new();
    for n in 0..hosts {
        driver.fleet.host(&format!("h{n}"), &format!("z{}", n % 5));
        driver.fleet.budget(&format!("h{n}"), 64 * GIB);
    }
    (0..10).for_each(|n| driver.fleet.catalog(&format!("c{n}"), machines, json!({})));
    let mut timed = Timed::default();
    timed.settle(&mut driver);
    let (all, writes) = (timed.all, timed.writes);
    println!(
        "{} machines on {hosts} hosts: {all:?} in {} steps, {writes} writes",
        machines * 10,
        timed.steps
    );
    for n in 0..10 {
        assert_eq!(driver.fleet.total(&format!("c{n}")), u64::from(machines));
    }
    driver.fleet.report_all_ready();
    timed = Timed::default();
    timed.settle(&mut driver);
    assert_eq!(timed.writes, 0);
    println!("one pass after news: {:?}", timed.all);
    let nothing = Timed::default().settle(&mut driver);
    println!("a step without news: {nothing:?}");
    let lost = (1..4).map(|n| lose(&mut driver, &format!("h{n}"))).min().unwrap();
    assert_eq!((0..10).map(|n| driver.fleet.total(&format!("c{n}"))).sum::<u64>(), u64::from(machines) * 10);
    assert!(all < limit(Duration::from_secs(2)), "{all:?}");
    assert!(lost < limit(Duration::from_millis(50)), "{lost:?}");
}

/// Each name is compared with those of other catalogs, which may have been made at the same time.
#[test]
fn names_of_two_large_catalogs_are_given_in_time() {
    let mut driver = Driver::new();
    (0..1000).for_each(|n| driver.fleet.host(&format!("h{n}"), &format!("z{}", n % 5)));
    for catalog in ["a", "b"] {
        let settings =
            json!({"identity": "named", "on_isolation": "stop", "naming": format!("{catalog}-#####")});
        driver.fleet.catalog(catalog, 25_000, settings);
    }
    let begin = processor_time();
    let commits = driver.step();
    let first = processor_time() - begin;
    let writes: usize = commits.iter().map(|(_, transaction)| transaction.writes.len()).sum();
    println!("the first step of 50000 names on 1000 hosts: {first:?}, {writes} writes");
    assert!(writes > 2_000, "{writes}");
    assert!(first < limit(Duration::from_secs(2)), "{first:?}");
}

/// Somebody has written all shares anew, in a form that is not known here.
#[test]
fn shares_that_cannot_be_read_are_looked_up_in_time() {
    let mut driver = Driver::new();
    (0..1000).for_each(|n| driver.fleet.host(&format!("h{n}"), "z"));
    (0..10).for_each(|n| driver.fleet.catalog(&format!("c{n}"), 1000, json!({})));
    let named = json!({ "identity": "named", "on_isolation": "pause" });
    (0..30).for_each(|n| driver.fleet.catalog(&format!("n{n}"), 0, named.clone()));
    for (host, catalog) in (0..10_000).map(|n| (n % 1000, n / 1000)) {
        driver.fleet.put(&format!("share/h{host}/c{catalog}"), "[]");
    }
    let all = (0..3).map(|_| {
        driver.fleet.set("hosts/h0", json!({"is_cordoned": true}));
        let begin = processor_time();
        assert!(driver.step().is_empty());
        processor_time() - begin
    });
    let least = all.min().unwrap();
    println!("one pass over 10000 shares that cannot be read: {least:?}");
    assert!(least < limit(Duration::from_millis(100)), "{least:?}");
}

/// A host is lost, and its machines are placed on others.
fn lose(driver: &mut Driver, host: &str) -> Duration {
    let machines: u32 = driver.fleet.view().shares[&name(host)].values().map(|share| share.value.count).sum();
    let before = driver.fleet.view().shares.clone();
    driver.fleet.end_lease(host);
    driver.settle();
    driver.after_s(29);
    driver.now = Moment(driver.now.0 + 1000);
    let mut timed = Timed::default();
    timed.settle(driver);
    let Timed { all, steps, writes, transactions } = timed;
    println!(
        "a lost host with {machines} machines: {all:?} in {steps} steps, {transactions} transactions, {writes} writes"
    );
    assert!(!driver.fleet.view().shares.contains_key(&name(host)));
    let after = &driver.fleet.view().shares;
    let is_changed = |(of, shares): &(&Name, &Shares)| before.get(of) != Some(shares);
    let raised = after.iter().filter(is_changed).map(|(of, shares)| {
        shares
            .iter()
            .filter(|(catalog, share)| before.get(of).and_then(|all| all.get(catalog)) != Some(share))
            .count()
    });
    let changed = raised.sum::<usize>() + before[&name(host)].len();
    assert!(writes <= changed, "one for each share that changes: {writes}, {changed}");
    driver.fleet.report_all_ready();
    driver.settle();
    all
}

/// Time that this thread has had on a processor, so that other programs are no failure.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
}

/// What the placer alone takes, without the store.
#[derive(Default)]
struct Timed {
    all: Duration,
    steps: usize,
    writes: usize,
    transactions: usize,
}

impl Timed {
    /// Steps after each transaction, as if the records showed each of them at once.
    fn settle(&mut self, driver: &mut Driver) -> Duration {
        let mut open = Vec::new();
        loop {
            let begin = processor_time();
            let commits = driver.step();
            self.all += processor_time() - begin;
            self.steps += 1;
            open.extend(commits);
            if open.is_empty() {
                return self.all;
            }
            let (number, transaction) = open.remove(0);
            self.writes += transaction.writes.len();
            self.transactions += 1;
            let outcome = driver.fleet.commit(&transaction);
            driver.placer.ended(number, Some(outcome));
        }
    }
}
