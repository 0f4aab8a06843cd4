//! What of the host machines are promised: who does not fit waits, with the reason, and starts when others give it back.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, create, import, refused, until};
use rustix::process::Signal;
use spillway_api::client::Client;
use spillway_api::{Catalog, ErrorCode, Event, EventKind, HostDetails, List, MachineDetails, Page, Phase};

fn act(client: &Client, action: &str, name: &str) {
    let asked = serde_json::json!({ "action": action, "select": { "names": [name] }, "force": true });
    client.post::<_, Page<MachineDetails>>("/v1/machine-actions", &asked).unwrap();
}

fn becomes(client: &Client, name: &str, phase: Phase) -> MachineDetails {
    until(&format!("{name} becomes {phase:?}"), || {
        let machine: MachineDetails = client.get(&format!("/v1/machines/{name}")).unwrap();
        Some(machine).filter(|machine| machine.status.phase == phase)
    })
}

/// With both drivers, whatever the disks are: a machine that is promised something fails, since no disk can be served here.
#[test]
fn guests_that_do_not_fit_wait_for_those_that_do() {
    for hypervisor in ["qemu", "libvirt"] {
        let mut world = World::unstarted();
        // So much that 1 GiB and its cache of 256 MiB fits, and not twice.
        let options = ["--hypervisor", hypervisor, "--memory-reserve", "0", "--vcpu-overcommit", "10000"];
        world.start_with(options.map(str::to_owned).to_vec());
        let client = world.client();
        let host: HostDetails = client.get("/v1/host").unwrap();
        let (memory, cpus) = (host.budget.host_memory_bytes, host.budget.host_cpus);
        assert_eq!((host.budget.memory_limit_bytes, host.budget.vcpu_limit), (memory, u64::from(cpus) * 100));
        import(&world, "debian", 1);
        // Two thirds of the host each.
        let each = (memory / 3 * 2) >> 20 << 20;
        let spec = |more: &str| format!(r#"{{"image": "debian", "count": 2, "memory_bytes": {each}{more}}}"#);
        let pool = create(&client, "pool", &spec("")).unwrap();
        assert!(pool.warnings[0].contains("of its 2 machines 1 can run at a time"), "{:?}", pool.warnings);
        create(&client, "own", &spec(r#", "type": "dedicated""#)).unwrap();
        act(&client, "start", "pool-001");
        becomes(&client, "pool-001", Phase::Failed);
        for name in ["pool-002", "own-001"] {
            act(&client, "start", name);
            let waits = becomes(&client, name, Phase::Waiting);
            let (why, code) = (waits.status.message.unwrap(), waits.status.code);
            assert!(why.contains("of memory for guest and cache, and 1 others have"), "{why}");
            assert_eq!(
                (code, waits.status.settled),
                (Some(ErrorCode::Exhausted), true),
                "nobody waits for it in vain"
            );
        }
        let host: HostDetails = client.get("/v1/host").unwrap();
        assert_eq!((host.budget.guest_bytes, host.budget.waiting, host.budget.vcpus), (each, 2, 1));
        if hypervisor == "libvirt" {
            // There is none here that could say that nothing of it runs.
            continue;
        }
        // It is woken when the other one is no more wanted.
        act(&client, "stop", "pool-001");
        becomes(&client, "pool-002", Phase::Failed);
        becomes(&client, "own-001", Phase::Waiting);
        act(&client, "stop", "pool-002");
        becomes(&client, "own-001", Phase::Failed);
        act(&client, "stop", "own-001");
        becomes(&client, "own-001", Phase::Stopped);
        let host: HostDetails = client.get("/v1/host").unwrap();
        assert_eq!((host.budget.guest_bytes, host.budget.waiting, host.budget.vcpus), (0, 0, 0));
        let events: List<Event> = client.get("/v1/events").unwrap();
        let count = events.items.iter().filter(|event| event.kind == EventKind::Waiting).count();
        assert_eq!(count, 2, "each is told of once");
    }
}

/// Guests that somebody else runs are not counted; their caches are.
#[test]
fn caches_that_do_not_fit_wait() {
    let mut world = World::unstarted();
    world.start_with(["--ram-budget", "400M"].map(str::to_owned).to_vec());
    let client = world.client();
    import(&world, "debian", 1);
    create(&client, "desk", r#"{"image": "debian", "count": 2, "memory_bytes": 17592186044416}"#).unwrap();
    act(&client, "start", "desk-001");
    becomes(&client, "desk-001", Phase::Failed);
    act(&client, "start", "desk-002");
    let waits = becomes(&client, "desk-002", Phase::Waiting);
    let why = waits.status.message.unwrap();
    assert!(
        why.starts_with("it needs 256.0 MiB of cache, and 1 others have 256.0 MiB of 400.0 MiB"),
        "{why}"
    );
    // A smaller cache for all of them, taken at once.
    let spec = r#"{"image": "debian", "count": 2, "ram_bytes": 67108864, "memory_bytes": 17592186044416}"#;
    let spec: serde_json::Value = serde_json::from_str(spec).unwrap();
    client.put::<_, Catalog>("/v1/catalogs/desk", &spec).unwrap();
    becomes(&client, "desk-002", Phase::Failed);
}

#[test]
fn what_can_never_run_here_is_refused_with_a_figure() {
    let mut world = World::unstarted();
    world.start_with(["--hypervisor", "qemu"].map(str::to_owned).to_vec());
    let client = world.client();
    import(&world, "debian", 1);
    let of = |settings: &str| format!(r#"{{"image": "debian", "count": 1, {settings}}}"#);
    for (settings, code, why) in [
        (r#""memory_bytes": 9223372036854775808"#, ErrorCode::Invalid, "memory_bytes: allowed is 64M to 16T"),
        (r#""vcpus": 0"#, ErrorCode::Invalid, "vcpus: allowed is 1 to 255"),
        (r#""vcpus": 1000000"#, ErrorCode::Invalid, "vcpus: allowed is 1 to 255"),
        (r#""iops": 18446744073709551615"#, ErrorCode::Invalid, "iops: allowed is 0 to"),
        (
            r#""memory_bytes": 17592186044416"#,
            ErrorCode::Exhausted,
            "16.0 TiB of memory for guest and cache, and this",
        ),
    ] {
        let error = refused(create(&client, "desk", &of(settings)));
        assert!(error.code == code && error.detail.contains(why), "{settings}: {error:?}");
    }
    let made = create(&client, "desk", &of(r#""memory_bytes": 67108864"#)).unwrap();
    assert_eq!(made.warnings, [""; 0]);
    let larger: serde_json::Value = serde_json::from_str(&of(r#""memory_bytes": 17592186044416"#)).unwrap();
    let error = refused(client.put::<_, Catalog>("/v1/catalogs/desk", &larger));
    assert_eq!(error.code, ErrorCode::Exhausted);
}

/// Nobody knows what a run has whose record cannot be read; others are not given it.
#[test]
fn a_run_whose_record_is_damaged_keeps_its_memory() {
    let mut world = World::unstarted();
    let sleeper = world.sleeper();
    world.start_with(["--ram-budget", "400M", "--worker", &sleeper].map(str::to_owned).to_vec());
    import(&world, "debian", 1);
    create(&world.client(), "desk", r#"{"image": "debian", "count": 2}"#).unwrap();
    act(&world.client(), "start", "desk-001");
    let run = world.state().join("run/machines/desk-001/run.json");
    let disk = world.state().join("run/machines/desk-001/disk.process");
    // It has recorded itself: its name is in parentheses. The daemon records the host's boot before that.
    let is_started = || run.exists() && std::fs::read(&disk).is_ok_and(|record| record.contains(&b')'));
    until("its disk is started", || is_started().then_some(()));
    world.end(Signal::KILL);
    std::fs::write(&run, "{").unwrap();
    world.start();
    let client = world.client();
    act(&client, "start", "desk-002");
    becomes(&client, "desk-002", Phase::Waiting);
    let host: HostDetails = client.get("/v1/host").unwrap();
    assert_eq!((host.budget.ram_bytes, host.budget.waiting), (256 << 20, 1));
    // It is ended, and others may have what it had.
    act(&client, "stop", "desk-001");
    becomes(&client, "desk-001", Phase::Stopped);
    becomes(&client, "desk-002", Phase::Starting);
}
