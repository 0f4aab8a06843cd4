//! Many machines: what it takes to delete and to list them.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, create, import};
use spillway_api::client::Client;
use spillway_api::{Empty, Machine, MachineDetails, Page};
use std::collections::HashSet;
use std::time::{Duration, Instant};

const FEW: u32 = 6_000;

/// A catalog of so many machines, each of which was wanted to be off: so there is a record of that, too.
fn pool(client: &Client, name: &str, count: u32) {
    let spec = format!(r#"{{"image": "debian", "count": {count}, "naming": "{name}-#####"}}"#);
    create(client, name, &spec).unwrap();
    let stop = serde_json::json!({ "action": "stop", "select": { "catalog": name } });
    client.post::<_, Page<MachineDetails>>("/v1/machine-actions", &stop).unwrap();
}

/// The most memory that a process has had.
fn peak_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// The processor time that a process has taken.
fn cpu(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // User and system time, in ticks of 10 ms.
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}

/// Twice as many machines take twice as long, and not four times, to delete: all at once, and one by one.
#[test]
fn deleting_takes_time_in_proportion() {
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    let mut took = Vec::new();
    for count in [FEW, 2 * FEW] {
        pool(&client, "m", count);
        let (begun, before) = (Instant::now(), cpu(world.pid()));
        client.delete::<Empty>("/v1/catalogs/m").unwrap();
        let whole = begun.elapsed();
        // Their tasks have looked whether anything is left to be done.
        common::until("it rests", || {
            let before = cpu(world.pid());
            std::thread::sleep(Duration::from_millis(300));
            (cpu(world.pid()) - before < Duration::from_millis(30)).then_some(())
        });
        took.push((whole, cpu(world.pid()) - before));
    }
    println!("catalogs of {FEW} and twice as many were deleted in (wall, processor) {took:?}");
    let (few, many) = (took[0], took[1]);
    assert!(many.0 < few.0 * 3 && many.1 < few.1 * 3, "{took:?}");
    let mut took = Vec::new();
    for count in [FEW, 2 * FEW] {
        pool(&client, "m", count);
        let mut paces: Vec<Duration> = (1..=100)
            .map(|n| {
                let begun = Instant::now();
                client.delete::<Empty>(&format!("/v1/machines/m-{n:05}")).unwrap();
                begun.elapsed()
            })
            .collect();
        paces.sort();
        took.push(paces[50]);
        client.delete::<Empty>("/v1/catalogs/m").unwrap();
    }
    println!("one of them in {took:?}");
    assert!(took[1] < took[0] * 3, "{took:?}");
}

/// Whoever lists, and how many at a time, costs the daemon a page each.
#[test]
fn lists_come_in_pages() {
    let world = World::new();
    import(&world, "debian", 1);
    pool(&world.client(), "m", 2 * FEW);
    create(&world.client(), "few", r#"{"image": "debian", "count": 3}"#).unwrap();
    let before = peak_bytes(world.pid());
    std::thread::scope(|scope| {
        for _ in 0..30 {
            scope.spawn(|| {
                let all = world.client().list::<MachineDetails>("/v1/machines").unwrap().items;
                let names: HashSet<&str> = all.iter().map(|machine| machine.machine.name.as_str()).collect();
                assert_eq!((all.len(), names.len()), (2 * FEW as usize + 3, all.len()));
                assert!(all.is_sorted_by_key(|machine| machine.machine.name.clone()));
            });
        }
    });
    let grown = peak_bytes(world.pid()) - before;
    println!("30 lists of {} machines took {} MiB", 2 * FEW, grown >> 20);
    assert!(grown < 128 << 20, "{} MiB", grown >> 20);
    // A page is as long as it is asked to be, and says how to go on.
    let client = world.client();
    let page: Page<Machine> = client.get("/v1/machines?limit=2&catalog=few").unwrap();
    assert_eq!((page.items.len(), page.next.as_deref()), (2, Some("few-002")));
    let page: Page<Machine> = client.get("/v1/machines?limit=2&catalog=few&continue=few-002").unwrap();
    assert_eq!((page.items[0].name.as_str(), page.items.len(), page.next), ("few-003", 1, None));
    let page: Page<Machine> = client.get("/v1/machines").unwrap();
    assert_eq!((page.items.len(), page.next.is_some()), (500, true));
    // One that goes on after a machine that is gone leaves nothing out.
    client.delete::<Empty>("/v1/machines/few-002").unwrap();
    let page: Page<Machine> = client.get("/v1/machines?limit=2&catalog=few&continue=few-002").unwrap();
    assert_eq!(page.items[0].name.as_str(), "few-003");
    for question in ["limit=0", "limit=1001", "limit=x", "limit=-1", "continue=a%0Ab", "continued=x"] {
        let error = common::refused(client.get::<Page<Machine>>(&format!("/v1/machines?{question}")));
        assert_eq!(error.code, spillway_api::ErrorCode::Invalid, "{question}: {error:?}");
    }
}
