//! Many machines: what it takes to change, delete and list them, by what the daemon itself takes.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, create, import};
use spillway_api::client::Client;
use spillway_api::{Catalog, Empty, Machine, MachineDetails, Page};
use std::collections::HashSet;
use std::time::Duration;

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

/// Bytes that a process has written.
fn written_bytes(pid: u32) -> u64 {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
    io.lines().find_map(|line| line.strip_prefix("wchar: ")).unwrap().parse().unwrap()
}

/// Until the daemon has nothing to do.
fn until_it_rests(pid: u32) {
    common::until("it rests", || {
        let before = cpu(pid);
        std::thread::sleep(Duration::from_millis(300));
        (cpu(pid) - before < Duration::from_millis(30)).then_some(())
    });
}

/// Four times as many machines take four times the processor, and not sixteen times, to delete. What is done in the database
/// is counted elsewhere; this is all that the daemon does, its tasks too, which look whether anything is left to be done.
#[test]
fn deleting_takes_time_in_proportion() {
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    let [few, many] = [FEW / 2, 2 * FEW].map(|count| {
        pool(&client, "m", count);
        until_it_rests(world.pid());
        let before = cpu(world.pid());
        client.delete::<Empty>("/v1/catalogs/m").unwrap();
        until_it_rests(world.pid());
        cpu(world.pid()) - before
    });
    println!("catalogs of {} and of {} machines were deleted in {few:?} and {many:?}", FEW / 2, 2 * FEW);
    assert!(many < few * 10, "{few:?} {many:?}");
}

/// A change writes its records and no more, however many others there are.
#[test]
fn a_change_among_many_machines_writes_no_more() {
    let world = World::new();
    import(&world, "debian", 2);
    let client = world.client();
    create(&client, "few", r#"{"image": "debian", "count": 5}"#).unwrap();
    let changes = || {
        let before = written_bytes(world.pid());
        for n in 0..20 {
            let update = serde_json::json!({ "image": format!("debian:{}", 1 + n % 2) });
            client.post::<_, Catalog>("/v1/catalogs/few/update", &update).unwrap();
        }
        written_bytes(world.pid()) - before
    };
    let among_few = changes();
    pool(&client, "m", 10_000);
    until_it_rests(world.pid());
    let among_many = changes();
    println!(
        "20 changes wrote {} KiB among few machines, {} KiB among many",
        among_few >> 10,
        among_many >> 10
    );
    // Once in a while the log is moved to its place, and the reserve filled up.
    assert!(among_many < among_few + (24 << 20), "{among_few} {among_many}");
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
    assert_eq!((page.items.len(), page.items[1].name.as_str()), (2, "few-002"));
    let second = format!("/v1/machines?limit=2&catalog=few&continue={}", page.next.unwrap());
    let page: Page<Machine> = client.get(&second).unwrap();
    assert_eq!((page.items[0].name.as_str(), page.items.len(), page.next), ("few-003", 1, None));
    let page: Page<Machine> = client.get("/v1/machines").unwrap();
    assert_eq!((page.items.len(), page.next.is_some()), (500, true));
    // One that goes on after a machine that is gone leaves nothing out.
    client.delete::<Empty>("/v1/machines/few-002").unwrap();
    let page: Page<Machine> = client.get(&second).unwrap();
    assert_eq!(page.items[0].name.as_str(), "few-003");
    // Who wants some has no more of them.
    let some = client.pages::<Machine>("/v1/machines", Some(1500)).map(|page| page.unwrap().len());
    assert_eq!(some.collect::<Vec<_>>(), [1000, 500]);
    for question in
        ["limit=0", "limit=1001", "limit=x", "limit=-1", "continue=few-002", "continue=Zg==", "continued=x"]
    {
        let error = common::refused(client.get::<Page<Machine>>(&format!("/v1/machines?{question}")));
        assert_eq!(error.code, spillway_api::ErrorCode::Invalid, "{question}: {error:?}");
    }
}
