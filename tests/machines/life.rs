//! From start to stop, and what comes between, the same with every hypervisor.

use crate::world::{self, World, is_alive, kill, signal};
use rustix::process::Signal;

mod qemu {
    #[test]
    fn a_machine_starts_forgets_and_stops() {
        super::a_machine_starts_forgets_and_stops("qemu");
    }

    #[test]
    fn what_ends_by_itself_comes_back_or_stays_off() {
        super::what_ends_by_itself_comes_back_or_stays_off("qemu");
    }

    #[test]
    fn daemons_come_and_go_and_guests_do_not_notice() {
        super::daemons_come_and_go_and_guests_do_not_notice("qemu");
    }

    #[test]
    fn a_machine_has_what_is_its_own_and_what_is_nobodys() {
        super::a_machine_has_what_is_its_own_and_what_is_nobodys("qemu");
    }

    #[test]
    fn disks_keep_what_their_mode_keeps() {
        super::disks_keep_what_their_mode_keeps("qemu");
    }
}

mod libvirt {
    #[test]
    fn a_machine_starts_forgets_and_stops() {
        super::a_machine_starts_forgets_and_stops("libvirt");
    }

    #[test]
    fn what_ends_by_itself_comes_back_or_stays_off() {
        super::what_ends_by_itself_comes_back_or_stays_off("libvirt");
    }

    #[test]
    fn daemons_come_and_go_and_guests_do_not_notice() {
        super::daemons_come_and_go_and_guests_do_not_notice("libvirt");
    }

    #[test]
    fn a_machine_has_what_is_its_own_and_what_is_nobodys() {
        super::a_machine_has_what_is_its_own_and_what_is_nobodys("libvirt");
    }

    #[test]
    fn disks_keep_what_their_mode_keeps() {
        super::disks_keep_what_their_mode_keeps("libvirt");
    }
}

fn a_machine_starts_forgets_and_stops(hypervisor: &'static str) {
    let Some(world) = World::new(hypervisor) else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 2, &["--image", "golden"]);
    assert_eq!(world.machine("desk-001")["status"]["phase"], "stopped");
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    let first = world.machine("desk-001");
    assert_eq!(
        (&first["status"]["phase"], &first["status"]["run"]["version"]),
        (&"running".into(), &1.into())
    );
    assert_eq!(world.machine("desk-002")["status"]["phase"], "stopped");
    assert!(world.tell("desk-001", "state", "STATE").starts_with("STATE image=version-1 mark= "));
    world.tell("desk-001", "markmine", "MARKED");
    assert!(world.tell("desk-001", "state", "STATE").contains("mark=mine "));

    // A reboot from within is no power cycle, and the same VMM goes on.
    assert!(world.reboot("desk-001").contains("mark=mine "));
    assert_eq!(world.pid("desk-001", "vmm_pid"), first["status"]["run"]["vmm_pid"].as_u64().unwrap() as u32);

    // A restart is: another VMM on the same disk server, whose disk has forgotten.
    world.ok(&["machine", "restart", "desk-001", "--force", "--wait"]);
    assert!(world.tell("desk-001", "state", "STATE").contains("mark= "));
    assert_ne!(world.pid("desk-001", "vmm_pid"), first["status"]["run"]["vmm_pid"].as_u64().unwrap() as u32);
    assert_eq!(
        world.pid("desk-001", "disk_pid"),
        first["status"]["run"]["disk_pid"].as_u64().unwrap() as u32
    );

    world.ok(&["machine", "stop", "desk-001", "--force", "--wait"]);
    assert_eq!(world.machine("desk-001")["status"]["phase"], "stopped");
    assert_eq!(world.processes(), [""; 0]);
    assert_eq!(std::fs::read_dir(world.machines()).unwrap().count(), 0);
}

fn what_ends_by_itself_comes_back_or_stays_off(hypervisor: &'static str) {
    let Some(world) = World::new(hypervisor) else { return };
    world.import("golden", "version-1");
    world.catalog("kiosk", 1, &["--image", "golden", "--reset", "guest-reboot", "--grace", "10"]);
    world.ok(&["machine", "start", "kiosk-001", "--wait"]);
    world.tell("kiosk-001", "markmine", "MARKED");
    let first = world.pid("kiosk-001", "vmm_pid");
    // The reset that the catalog names.
    world.say("kiosk-001", "reboot");
    world.until("kiosk-001", "another VMM", |m| {
        m["status"]["phase"] == "running" && m["status"]["run"]["vmm_pid"] != first
    });
    assert!(world.tell("kiosk-001", "state", "STATE").contains("mark= "));
    assert_eq!(world.machine("kiosk-001")["status"]["run"]["crashes"], 0);

    // Killed from outside: it is wanted, so it comes back, clean.
    world.tell("kiosk-001", "markmine", "MARKED");
    let second = world.pid("kiosk-001", "vmm_pid");
    kill(second);
    world.until("kiosk-001", "another VMM", |m| {
        m["status"]["phase"] == "running" && m["status"]["run"]["crashes"] == 1
    });
    assert!(world.tell("kiosk-001", "state", "STATE").contains("mark= "));

    // So does a disk, with its machine.
    let (disk, vmm) = (world.pid("kiosk-001", "disk_pid"), world.pid("kiosk-001", "vmm_pid"));
    kill(disk);
    world.until("kiosk-001", "another disk", |m| {
        m["status"]["phase"] == "running" && m["status"]["run"]["disk_pid"] != disk
    });
    assert!(!is_alive(vmm));
    assert!(world.tell("kiosk-001", "state", "STATE").contains("mark= "));

    // Asked to stop, which this guest cannot hear, and wanted again before its time was over: it goes on.
    let vmm = world.pid("kiosk-001", "vmm_pid");
    let is_asked = || {
        let run = std::fs::read(world.machines().join("kiosk-001/run.json")).unwrap();
        serde_json::from_slice::<serde_json::Value>(&run).unwrap()["asked"] == true
    };
    let until = |what: &str, is: &dyn Fn() -> bool| {
        spillway_testkit::process::wait_until(world::BOOT, || is().then_some(())).expect(what);
    };
    world.ok(&["machine", "stop", "kiosk-001"]);
    until("it is not asked", &is_asked);
    world.ok(&["machine", "start", "kiosk-001", "--wait"]);
    assert_eq!(world.pid("kiosk-001", "vmm_pid"), vmm);
    until("it counts as asked for ever", &|| !is_asked());
    // Who shuts down inside wants it off.
    world.say("kiosk-001", "poweroff");
    world.until("kiosk-001", "stopped", |m| m["status"]["phase"] == "stopped" && m["power"] == "off");
    assert_eq!(world.processes(), [""; 0]);
}

fn daemons_come_and_go_and_guests_do_not_notice(hypervisor: &'static str) {
    let Some(mut world) = World::new(hypervisor) else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 2, &["--image", "golden"]);
    world.ok(&["machine", "start", "--catalog", "desk", "--wait"]);
    let pids = |world: &World| {
        ["desk-001", "desk-002"].map(|name| (world.pid(name, "disk_pid"), world.pid(name, "vmm_pid")))
    };
    let before = pids(&world);
    world.tell("desk-001", "markmine", "MARKED");
    for _ in 0..3 {
        world.kill_daemon();
        if let Some(libvirtd) = world.libvirtd() {
            libvirtd.kill();
            libvirtd.start();
        }
        world.start_daemon();
        for name in ["desk-001", "desk-002"] {
            world.until(name, "running", |m| m["status"]["phase"] == "running");
        }
        assert_eq!(pids(&world), before);
    }
    assert!(world.tell("desk-001", "state", "STATE").contains("mark=mine "));
    // What it shut down while nobody listened.
    world.kill_daemon();
    world.say("desk-002", "poweroff");
    let hangs = if hypervisor == "qemu" { before[0].1 } else { 0 };
    if hangs > 0 {
        signal(hangs, Signal::STOP);
    }
    world.start_daemon();
    world.until("desk-002", "stopped", |m| m["status"]["phase"] == "stopped");
    // A VMM that does not answer has its time, and is ended.
    if hangs > 0 {
        world.ok(&["machine", "stop", "desk-001", "--grace", "1", "--wait"]);
        let gone = || (!is_alive(hangs)).then_some(());
        spillway_testkit::process::wait_until(std::time::Duration::from_secs(20), gone).expect("it hangs on");
    }
    // What is recorded as gone is gone.
    world.ok(&["catalog", "delete", "desk"]);
    let none = || world.processes().is_empty().then_some(());
    spillway_testkit::process::wait_until(std::time::Duration::from_secs(20), none)
        .expect("something is left");
}

fn a_machine_has_what_is_its_own_and_what_is_nobodys(hypervisor: &'static str) {
    let Some(world) = World::new(hypervisor) else { return };
    world.import("golden", "version-1");
    let temp = world.path("temp");
    world.ok(&["store", "add", "temp", temp.to_str().unwrap(), "--class", "temp"]);
    let disks = ["--image", "golden", "--data-disk", "32M", "--scratch-disk", "16M", "--grace", "2"];
    world.catalog("desk", 2, &disks);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    let uuid = world.machine("desk-001")["identity"]["uuid"].as_str().unwrap().to_owned();
    // In this order: its disk, data, scratch, seed.
    let seed = world.tell("desk-001", "seedvdd", "SEED");
    assert!(seed.contains(&format!("iid-{uuid}")) && seed.contains("ssh-ed25519 AAAA"), "{seed}");
    for disk in ["vdb", "vdc"] {
        world.tell("desk-001", &format!("put{disk}"), "PUT");
        assert_eq!(world.tell("desk-001", &format!("get{disk}"), "GOT"), "GOT kept");
    }
    world.ok(&["machine", "restart", "desk-001", "--force", "--wait"]);
    assert_eq!(world.tell("desk-001", "getvdb", "GOT"), "GOT kept");
    assert_eq!(world.tell("desk-001", "getvdc", "GOT"), "GOT");
    assert_eq!(world.tell("desk-001", "seedvdd", "SEED"), seed, "it is who it was");

    // It grows at the next start; what was in it is still there.
    let toml = world.ok(&["catalog", "export", "desk"]).replace("\"32M\"", "\"64M\"");
    let toml = toml.replace("33554432", "67108864");
    std::fs::write(world.path("desk.toml"), toml).unwrap();
    world.ok(&["catalog", "apply", "-f", world.path("desk.toml").to_str().unwrap()]);
    world.until("desk-001", "outdated", |m| m["status"]["run"]["outdated"] == true);
    world.ok(&["machine", "stop", "desk-001", "--force", "--wait"]);
    assert_eq!(std::fs::read_dir(temp.join("scratch")).unwrap().count(), 0);
    world.ok(&["machine", "start", "--catalog", "desk", "--wait"]);
    assert_eq!(world.tell("desk-001", "sizevdb", "SIZE"), "SIZE 131072");
    assert_eq!(world.tell("desk-001", "getvdb", "GOT"), "GOT kept");
    assert_eq!(world.tell("desk-002", "getvdb", "GOT"), "GOT");

    // Kept when its machine goes, unless somebody says otherwise.
    let data = || {
        let files = std::fs::read_dir(world.path("state/store/data")).unwrap();
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>()
    };
    let gone = |what: &str, is: &dyn Fn() -> bool| {
        let is = || is().then_some(());
        spillway_testkit::process::wait_until(std::time::Duration::from_secs(20), is)
            .unwrap_or_else(|| panic!("{what}"));
    };
    world.ok(&["catalog", "scale", "desk", "1"]);
    gone("a machine is left", &|| !world.machines().join("desk-002").exists());
    assert_eq!(data().len(), 2);
    world.ok(&["catalog", "delete", "desk", "--with-data"]);
    gone("a data disk is left", &|| data().len() == 1 && !data()[0].contains(&uuid));
    gone("a process is left", &|| world.processes().is_empty());
}

#[test]
fn caches_have_a_budget_and_give_way_when_the_host_is_short() {
    let Some(mut world) = World::new("none") else { return };
    world.kill_daemon();
    world.options = ["--ram-budget", "100M", "--overcommit", "100"].map(String::from).into();
    world.start_daemon();
    world.import("golden", "version-1");
    world.ok(&[
        "catalog",
        "create",
        "desk",
        "--image",
        "golden",
        "--count",
        "2",
        "--ram",
        "64M",
        "--ram-guarantee",
        "16M",
    ]);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    let (code, _, err) = world.spillway(&["machine", "start", "desk-002", "--wait"]);
    assert!(
        code == 73 && err.contains("needs 64.0 MiB of cache, and 1 others have 64.0 MiB of 100.0 MiB"),
        "{code} {err}"
    );
    // Smaller ones fit, the one that runs included.
    let export = world
        .ok(&["catalog", "export", "desk"])
        .replace("\"64M\"", "\"48M\"")
        .replace("67108864", "50331648");
    std::fs::write(world.path("desk.toml"), export).unwrap();
    world.ok(&["catalog", "apply", "-f", world.path("desk.toml").to_str().unwrap()]);
    let limit = |world: &World, name: &str| {
        let stats = world.ok(&["machine", "stats", name, "--json"]);
        let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
        stats["ram"]["limit_bytes"].as_u64().unwrap() >> 20
    };
    let until = |world: &World, mib: u64| {
        let is = || (limit(world, "desk-001") == mib).then_some(());
        spillway_testkit::process::wait_until(std::time::Duration::from_secs(30), is)
            .unwrap_or_else(|| panic!("{} instead of {mib} MiB", limit(world, "desk-001")));
    };
    until(&world, 48);
    world.until("desk-002", "running", |m| m["status"]["phase"] == "running");

    // As if nothing were available: down to the guarantee, and back.
    world.kill_daemon();
    world.options.extend(["--memory-floor", "1T"].map(String::from));
    world.start_daemon();
    world.until("desk-001", "running", |m| m["status"]["phase"] == "running");
    until(&world, 16);
    let disk = world.pid("desk-001", "disk_pid");
    world.kill_daemon();
    world.options.truncate(4);
    world.start_daemon();
    world.until("desk-001", "running", |m| m["status"]["phase"] == "running");
    until(&world, 48);
    assert_eq!(world.pid("desk-001", "disk_pid"), disk);
}

#[test]
fn limits_that_the_host_cannot_give_now_are_asked_for_again() {
    let Some(mut world) = World::new("none") else { return };
    world.kill_daemon();
    world.options = ["--ram-budget", "8T", "--memory-overcommit", "10000"].map(String::from).into();
    world.start_daemon();
    world.import("golden", "version-1");
    let create = ["catalog", "create", "desk", "--image", "golden", "--count", "1", "--ram", "64M"];
    world.ok(&create);
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    let limit = || {
        let stats = world.ok(&["machine", "stats", "desk-001", "--json"]);
        let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
        stats["ram"]["limit_bytes"].as_u64().unwrap() >> 20
    };
    let until = |what: &str, is: &dyn Fn() -> bool| {
        let is = || is().then_some(());
        spillway_testkit::process::wait_until(std::time::Duration::from_secs(30), is).expect(what);
    };
    for ram in ["500G", "600G"] {
        world.set("desk", &[&format!("ram_bytes = \"{ram}\"")]);
        until("it is not refused", &|| world.events("its limits stay as they are") == 1);
        assert_eq!((limit(), &world.machine("desk-001")["status"]["phase"]), (64, &"running".into()));
    }
    world.set("desk", &["ram_bytes = \"48M\""]);
    until("its limit stays", &|| limit() == 48);
    world.set("desk", &["ram_bytes = \"700G\""]);
    until("it is not refused again", &|| world.events("its limits stay as they are") == 2);
}

#[test]
fn a_catalogs_rate_holds_for_disks_that_run_and_that_start() {
    let Some(world) = World::new("none") else { return };
    world.import("golden", "version-1");
    let create = ["catalog", "create", "desk", "--image", "golden", "--count", "1", "--mode", "direct"];
    // A burst of 50 ms: what a busy host is late by is made up for.
    world.ok(&[&create[..], &["--iops", "200", "--iops-burst", "10"]].concat());
    world.ok(&["machine", "start", "desk-001", "--wait"]);
    let rate = || world.machine("desk-001")["status"]["run"]["rate"].clone();
    assert_eq!((&rate()["iops"], &rate()["bandwidth_bytes"]), (&200.into(), &0.into()));
    // So many requests, each beginning where another did.
    let seconds = |requests: &str| {
        let socket = world.machine("desk-001")["status"]["run"]["nbd_socket"].as_str().unwrap().to_owned();
        let begun = std::time::Instant::now();
        let bench = ["bench", "-f", "raw", "-c", requests, "-d", "4", "-S", "0"];
        let bench = std::process::Command::new("qemu-img")
            .args(bench)
            .arg(format!("nbd+unix:///?socket={socket}"))
            .output()
            .unwrap();
        assert!(bench.status.success(), "{bench:?}");
        begun.elapsed().as_secs_f64()
    };
    let limited = seconds("400");
    assert!((1.9..4.0).contains(&limited), "{limited} s for 400 requests");
    let disk = world.pid("desk-001", "disk_pid");
    let until = |iops: u64| {
        let is = || (rate()["iops"] == iops).then_some(());
        spillway_testkit::process::wait_until(std::time::Duration::from_secs(20), is)
            .expect("it is not told");
    };
    let set = |iops: u64| {
        world.set("desk", &[&format!("iops = {iops}")]);
        until(iops);
    };
    set(0);
    let free = seconds("400");
    assert!(free < 1.0, "{free} s for 400 requests");
    assert_eq!(world.pid("desk-001", "disk_pid"), disk, "it is the same one");
    set(400);
    world.ok(&["machine", "restart", "desk-001", "--force", "--wait"]);
    assert_eq!(rate()["iops"], 400);
    // What has no RAM tier has no curve to advise by; it is told of.
    let advised = world.ok(&["advise", "--live", "desk"]);
    assert!(advised.contains("no machine of desk runs that has"), "{advised}");
    let shown = world.ok(&["machine", "show", "desk-001"]);
    assert!(shown.contains("at most 400 requests/s"), "{shown}");
    let limited = seconds("800");
    assert!((1.8..4.0).contains(&limited), "{limited} s for 800 requests");
    // The curve of one that has a RAM tier.
    world.ok(&["catalog", "create", "pool", "--image", "golden", "--count", "2", "--ram", "8M"]);
    world.ok(&["machine", "start", "pool-001", "--wait"]);
    let socket = world.machine("pool-001")["status"]["run"]["nbd_socket"].as_str().unwrap().to_owned();
    let write = ["-f", "raw", "-c", "write -P 5 0 12M", &format!("nbd+unix:///?socket={socket}")];
    assert!(std::process::Command::new("qemu-io").args(write).status().unwrap().success());
    let advised = world.json(&["advise", "--live", "pool"]);
    let one = &advised["machines"][0];
    assert_eq!((advised["machines"].as_array().unwrap().len(), &one["machine"]), (1, &"pool-001".into()));
    assert_eq!((&one["ram_bytes"], &one["written_bytes"]), (&(8 << 20).into(), &(12 << 20).into()));
    assert!(one["seconds_to_full"].as_u64().is_some(), "12 MiB in these seconds, and room is finite: {one}");
    assert!(
        one["overflow_write_bytes"].as_u64().unwrap() > 2 << 20
            && one["next_saves_bytes"] == one["overflow_write_bytes"],
        "{one}"
    );
    let curve: serde_json::Value =
        serde_json::from_str(&world.get("/v1/machines/pool-001/curve?goal=0.5")).unwrap();
    assert_eq!((&curve["goal"], &curve["totals"]["written_blocks"]), (&0.5.into(), &3072.into()));
    assert!(world.ok(&["advise", "--live", "pool"]).contains("pool-001"));
    // And for Prometheus, by catalog and by machine: 64 MiB would have been enough. What has no RAM tier is left out.
    let metrics = world.ask("GET", "/v1/metrics?machines=true", "").1;
    for labels in [r#"catalog{catalog="pool""#, r#"machine{catalog="pool",machine="pool-001""#] {
        let (of, labels) = labels.split_once('{').unwrap();
        for (name, value) in [
            ("overflow_written_bytes", r#",ram_bytes="67108864"} 0"#.to_owned()),
            ("written_bytes", format!("}} {}", 12 << 20)),
            ("zero_overflow_bytes", format!("}} {}", curve["zero_overflow_bytes"])),
        ] {
            let sample = format!("\nspillway_{of}_curve_{name}{{{labels}{value}\n");
            assert!(metrics.contains(&sample), "{sample} is not in {metrics}");
        }
    }
    assert!(!metrics.contains(r#"curve_written_bytes{catalog="desk""#), "{metrics}");
    assert!(world.ok(&["machine", "stats", "pool-001", "--curve"]).contains("nothing overflows from"));
    let (code, _, err) = world.spillway(&["machine", "stats", "pool-002", "--curve"]);
    assert_ne!(code, 0, "it is off: {err}");
}

fn disks_keep_what_their_mode_keeps(hypervisor: &'static str) {
    let Some(mut world) = World::new(hypervisor) else { return };
    world.import("golden", "version-1");
    let cache = world.path("cache");
    world.catalog("own", 1, &["--image", "golden", "--type", "dedicated"]);
    world.catalog("still", 1, &["--image", "golden", "--reset", "never"]);
    let (code, _, err) = world.spillway(&["machine", "start", "own-001"]);
    assert_eq!(code, 0, "{err}");
    world.catalog("copy", 1, &["--image", "golden", "--mode", "ephemeral"]);
    let (code, _, err) = world.spillway(&["machine", "start", "copy-001", "--wait"]);
    assert!(code == 73 && err.contains("no store is of class cache or temp"), "{code} {err}");
    world.ok(&["store", "add", "cache", cache.to_str().unwrap(), "--class", "cache"]);
    // Why a disk is kept is not the hypervisor's concern, nor what is in it after a reboot: that is seen with one of them.
    let is_libvirt = hypervisor == "libvirt";
    let kept = if is_libvirt { &["own-001"][..] } else { &["own-001", "still-001"] };
    let all = [kept, &["copy-001"]].concat();
    let rebooted = if is_libvirt { kept } else { &all };
    world.ok(&[&["machine", "start", "--wait"][..], &all].concat());
    for name in &all {
        world.tell(name, "markmine", "MARKED");
    }
    for name in rebooted {
        // A reboot from within changes nothing, whatever the mode.
        assert!(world.reboot(name).contains("mark=mine "), "{name}");
    }
    assert_eq!(std::fs::read_dir(cache.join("copies")).unwrap().count(), 0, "its server has it");
    // Other settings reach what is kept too, with a restart as after a stop: its guest, not its disk.
    let has = |world: &World, mib: u64| {
        for name in kept {
            assert_eq!(world.tell(name, "sizevdb", "SIZE"), format!("SIZE {}", mib << 11), "{name}");
            assert!(world.tell(name, "state", "STATE").starts_with("STATE image=version-1 mark=mine "));
            assert_eq!(world.machine(name)["status"]["run"]["outdated"], false, "{name}");
        }
    };
    for catalog in ["own", "still"] {
        world.set(catalog, &["vcpus = 2", "data_disk_bytes = \"32M\""]);
    }
    for name in kept {
        world.until(name, "outdated", |m| m["status"]["run"]["outdated"] == true);
    }
    world.ok(&[&["machine", "restart", "--force", "--wait"][..], kept].concat());
    has(&world, 32);
    for catalog in ["own", "still"] {
        world.set(catalog, &["data_disk_bytes = \"64M\""]);
    }
    // Another version for those that are made anew; the others stay on theirs.
    world.import("golden", "version-2");
    world.ok(&["image", "publish", "golden:2"]);
    world.ok(&[&["machine", "stop", "--force", "--wait"][..], &all].concat());
    let domains = world.libvirtd().map(|libvirtd| libvirtd.domains()).unwrap_or_default();
    assert_eq!(domains, [""; 0], "a stopped machine is no domain, whether its disk is kept or not");
    world.kill_daemon();
    world.start_daemon();
    world.ok(&[&["machine", "start", "--wait"][..], &all].concat());
    for (name, state) in [
        ("own-001", "STATE image=version-1 mark=mine "),
        ("still-001", "STATE image=version-1 mark=mine "),
        ("copy-001", "STATE image=version-2 mark= "),
    ] {
        if all.contains(&name) {
            let found = world.tell(name, "state", "STATE");
            assert!(found.starts_with(state), "{name}: {found}");
        }
    }
    has(&world, 64);
    for name in kept {
        let (code, _, err) = world.spillway(&["machine", "reset", name]);
        assert!(code == 75 && err.contains("discard"), "{code} {err}");
        world.ok(&["machine", "reset", name, "--discard-data", "--wait"]);
        let found = world.tell(name, "state", "STATE");
        assert!(found.starts_with("STATE image=version-2 mark= "), "{name}: {found}");
    }
    world.ok(&["machine", "stop", "--force", "--wait", "own-001", "copy-001"]);
    let disks = || std::fs::read_dir(world.path("state/store/disks")).unwrap().count();
    assert_eq!(disks(), 1);
    world.ok(&["catalog", "delete", "own", "--with-data"]);
    spillway_testkit::process::wait_until(std::time::Duration::from_secs(20), || {
        (disks() == 0).then_some(())
    })
    .expect("the disk is left");
}
