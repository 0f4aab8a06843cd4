//! What `deploy/` has: rules and a dashboard that are right in themselves and ask for metrics that there are; units and scripts that do
//! what they are for.
#![allow(clippy::unwrap_used)]

mod daemon_world;

use daemon_world::World;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn deploy(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name)
}

/// None: it is not here, which is said.
fn promtool() -> Option<Command> {
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/tools/promtool");
    if spillway_testkit::has_program("promtool") {
        return Some(Command::new("promtool"));
    }
    if ours.is_file() {
        return Some(Command::new(ours));
    }
    spillway_testkit::skip("promtool is not here: run 'make install-deps'");
    None
}

/// The metrics that a text names.
fn named(text: &str) -> BTreeSet<String> {
    let part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c| !part(c)).filter(|word| word.starts_with("spillway_"));
    words.map(str::to_owned).collect()
}

#[test]
fn rules_are_right_and_fire_when_they_are_to() {
    let Some(mut check) = promtool() else { return };
    let done = check.args(["check", "rules"]).arg(deploy("prometheus-rules.yml")).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let done = promtool()
        .unwrap()
        .args(["test", "rules"])
        .arg(deploy("prometheus-rules.test.yml"))
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    let rules = std::fs::read_to_string(deploy("prometheus-rules.yml")).unwrap();
    let tests = std::fs::read_to_string(deploy("prometheus-rules.test.yml")).unwrap();
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() > 5);
    for alert in alerts {
        assert!(tests.contains(&format!("alertname: {alert}")), "{alert} has no test");
    }
}

#[test]
fn rules_and_dashboard_ask_for_metrics_that_there_are() {
    let world = World::new();
    let metrics = world.metrics();
    let there: BTreeSet<String> = metrics
        .lines()
        .filter_map(|line| Some(line.strip_prefix("# TYPE ")?.split(' ').next()?.to_owned()))
        .collect();
    for file in ["prometheus-rules.yml", "prometheus-rules.test.yml", "grafana-dashboard.json"] {
        let asked = named(&std::fs::read_to_string(deploy(file)).unwrap());
        let unknown: Vec<&String> = asked.difference(&there).collect();
        assert!(asked.len() > 5 && unknown.is_empty(), "{file}: {unknown:?}");
    }
    let documented = std::fs::read_to_string(deploy("../docs/counters.md")).unwrap();
    for metric in there.iter().filter(|metric| !metric.starts_with("spillway_machine_")) {
        let short = metric.replace("spillway_catalog_", "..._");
        let of_writes = metric.contains("guest_write");
        assert!(
            documented.contains(metric) || documented.contains(&short) || of_writes,
            "{metric} is not in counters.md"
        );
    }
    let Some(mut check) = promtool() else { return };
    let mut check =
        check.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    check.stdin.take().unwrap().write_all(metrics.as_bytes()).unwrap();
    let done = check.wait_with_output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
}

/// Asks as the unit does, with these variables of the service manager's, a daemon of this world.
fn ask_host(variables: &[(&str, &str)], arguments: &[&str]) -> std::process::Output {
    let mut ask = Command::new(deploy("ask-host"));
    let programs = spillway_testkit::disk::program().unwrap();
    let path = format!("{}:{}", programs.parent().unwrap().display(), std::env::var("PATH").unwrap());
    ask.args(arguments).env("PATH", path).env_remove("SPILLWAY_SOCKET").envs(variables.iter().copied());
    ask.output().unwrap()
}

#[test]
fn the_host_is_closed_by_asking_the_daemon_where_it_listens() {
    let world = World::new();
    let socket = world.path("sock").display().to_string();
    let closed = || world.json(&["host", "show"])["closed"] == true;
    let (apart, joined) =
        (format!("--hypervisor none --socket {socket} --overcommit 200"), format!("--socket={socket}"));
    for variables in [
        &[("SPILLWAYD_OPTIONS", apart.as_str())][..],
        &[("SPILLWAYD_OPTIONS", joined.as_str()), ("SPILLWAY_SOCKET", "/nonexistent")],
        &[("SPILLWAYD_OPTIONS", "--hypervisor none"), ("SPILLWAY_SOCKET", socket.as_str())],
    ] {
        for (action, is_closed) in [(&["close", "--wait"][..], true), (&["open"], false)] {
            let done = ask_host(variables, action);
            assert!(done.status.success(), "{variables:?}: {}", String::from_utf8_lossy(&done.stderr));
            assert_eq!(closed(), is_closed, "{variables:?}");
        }
    }
    // Where all daemons listen if nothing is said.
    let nobody = ask_host(&[("SPILLWAYD_OPTIONS", "")], &["show", "--token-file", "/nonexistent"]);
    assert!(String::from_utf8_lossy(&nobody.stderr).contains("/run/spillway/spillwayd.sock"), "{nobody:?}");
    // Both units read the same file.
    for unit in ["spillwayd.service", "spillway-machines.service"] {
        let text = std::fs::read_to_string(deploy(unit)).unwrap();
        assert!(text.contains("\nEnvironmentFile=-/etc/default/spillwayd\n"), "{unit}");
        assert!(
            unit != "spillwayd.service" || text.contains("\nExecReload=/bin/sh -c 'kill -HUP $$MAINPID'\n")
        );
        assert!(
            unit == "spillwayd.service"
                || text.matches("=/usr/lib/spillway/ask-host ").count()
                    + text.matches("=-/usr/lib/spillway/ask-host ").count()
                    == 2
        );
    }
}

#[test]
fn the_dashboard_can_be_imported() {
    let text = std::fs::read_to_string(deploy("grafana-dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert!(ids.len() == panels.len() && panels.len() > 10);
    let variables: BTreeSet<&str> = dashboard["templating"]["list"]
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v["name"].as_str().unwrap())
        .collect();
    assert_eq!(variables, ["catalog", "datasource", "instance"].into());
    for panel in panels {
        let place = &panel["gridPos"];
        assert!(place["x"].as_u64().unwrap() + place["w"].as_u64().unwrap() <= 24, "{panel}");
        for target in panel["targets"].as_array().unwrap() {
            let expr = target["expr"].as_str().unwrap();
            let (open, close) = (expr.matches(['(', '{']).count(), expr.matches([')', '}']).count());
            assert!(open == close && expr.contains("$instance"), "{expr}");
        }
    }
}

/// With systemd's programs stood in for by ones that start and end the disk.
#[test]
fn the_hook_of_proxmox_serves_a_disk_while_its_machine_runs() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let at = |name: &str| dir.path().join(name);
    let (programs, pid) = (spillway_testkit::disk::program().unwrap(), at("pid").display().to_string());
    let start = "while [ \"${1#--}\" != \"$1\" ]; do shift; done; \"$@\" >/dev/null 2>&1 & echo $!";
    let asked = at("asked").display().to_string();
    for (name, does) in [
        ("systemd-run", format!("printf '%s\\n' \"$@\" >{asked}; {start} >{pid}")),
        ("systemctl", format!("[ ! -e {pid} ] || {{ kill $(cat {pid}); rm {pid}; }}")),
    ] {
        std::fs::write(at(name), format!("#!/bin/sh\n{does}\n")).unwrap();
        std::fs::set_permissions(at(name), PermissionsExt::from_mode(0o755)).unwrap();
    }
    std::fs::write(at("image.raw"), vec![1; 1 << 20]).unwrap();
    let image = at("image.raw").display().to_string();
    std::fs::write(at("101"), format!("OPTIONS=\"--image {image} --ram 1M --overflow-dir /var/tmp\"\n"))
        .unwrap();
    let path = format!("{}:{}:/bin:/usr/bin", dir.path().display(), programs.parent().unwrap().display());
    let hook = |machine: &str, phase: &str| {
        let mut hook = Command::new(deploy("proxmox-hook"));
        hook.args([machine, phase]).env("PATH", &path).env("SPILLWAY_VM_RUN", at("run"));
        hook.env("SPILLWAY_VM_OPTIONS", dir.path()).output().unwrap()
    };
    let started = hook("101", "pre-start");
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    assert!(at("run/101.sock").exists(), "the disk is there before the machine");
    has_what_the_daemon_gives_a_disk(&std::fs::read_to_string(asked).unwrap());
    assert!(hook("101", "post-stop").status.success());
    let gone = spillway_testkit::process::wait_until(std::time::Duration::from_secs(30), || {
        (!at("run/101.sock").exists()).then_some(())
    });
    assert!(gone.is_some(), "the disk ends with the machine");
    assert!(!hook("102", "pre-start").status.success(), "a machine without options does not start");
}

/// By its unit, and by the scope of each process (`spillway_host::scopes`).
fn has_what_the_daemon_gives_a_disk(asked: &str) {
    let properties: BTreeSet<&str> =
        asked.lines().filter_map(|word| word.strip_prefix("--property=")).collect();
    let unit = std::fs::read_to_string(deploy("spillwayd.service")).unwrap();
    let (_, sandbox) = unit.split_once("# What follows holds for disks and VMMs too").unwrap();
    let (sandbox, _) = sandbox.split_once("[Install]").unwrap();
    let is_setting = |line: &&str| !line.starts_with('#') && line.contains('=');
    // Images of Proxmox may be block devices.
    let sandbox = sandbox.lines().filter(is_setting).filter(|line| !line.starts_with("Device"));
    let limits = ["LimitNOFILE=", "LimitMEMLOCK=", "TasksMax=", "UMask="];
    let limits = unit.lines().filter(|line| limits.iter().any(|limit| line.starts_with(limit)));
    let of_scope = ["MemorySwapMax=0", "IOWeight=100", "TimeoutStopSec=40s"];
    let expected: Vec<&str> = sandbox.chain(limits).chain(of_scope).collect();
    assert!(expected.len() > 20, "{expected:?}");
    for property in expected {
        assert!(properties.contains(property), "{property} is not in {properties:?}");
    }
    // The server ends its worker itself, and the guests end before their disks.
    assert!(properties.contains("KillMode=mixed") && properties.contains("Before=pve-guests.service"));
    assert!(asked.contains("--service-type=exec\n"), "a program that is not there is an error of the hook");
}

/// It has what Proxmox loads, where Proxmox looks for it, and nothing that another package has.
#[test]
fn the_package_of_the_plugin_for_proxmox_has_the_plugin() {
    if !spillway_testkit::has_program("dpkg-deb") {
        return spillway_testkit::skip("dpkg-deb is not installed: this needs Debian");
    }
    let dir = tempfile::tempdir().unwrap();
    let run = |command: &mut Command| {
        let done = command.output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    };
    let make = || {
        let mut deb = Command::new(deploy("../scripts/deb-proxmox"));
        run(deb.arg("--out").arg(dir.path()).args(["--compress", "none"])).trim().to_owned()
    };
    let package = make();
    assert!(package.ends_with("_all.deb") && package.contains("libpve-storage-spillway_"), "{package}");
    let bytes = std::fs::read(&package).unwrap();
    assert!(std::fs::read(make()).unwrap() == bytes, "the same files give the same bytes");
    let tree = dir.path().join("unpacked");
    run(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&tree));
    let listed = run(Command::new("find").arg(&tree).args(["-type", "f", "-printf", "%m %P\\n"]));
    let files: BTreeSet<&str> = listed.lines().collect();
    let place = "usr/share/perl5/PVE/Storage/Custom/SpillwayPlugin.pm";
    let doc = "usr/share/doc/libpve-storage-spillway";
    let expected =
        [format!("644 {place}"), format!("644 {doc}/changelog.gz"), format!("644 {doc}/copyright")];
    assert_eq!(files, expected.iter().map(String::as_str).collect());
    let plugin = std::fs::read(deploy("proxmox/SpillwayPlugin.pm")).unwrap();
    assert!(std::fs::read(tree.join(place)).unwrap() == plugin);
    // Its package is that of its folder: Proxmox makes the one of the other.
    assert!(plugin.starts_with(b"package PVE::Storage::Custom::SpillwayPlugin;\n"));
    let field = |name: &str| run(Command::new("dpkg-deb").args(["-f", &package, name])).trim().to_owned();
    let version = field("Version");
    assert_eq!(field("Architecture"), "all");
    let depends = field("Depends");
    let spillway = format!("spillway (= {version})");
    for wanted in ["libpve-storage-perl (>= 8)", "libjson-perl", &spillway] {
        assert!(depends.split(", ").any(|one| one == wanted), "{depends}");
    }
    // The daemons that load the plugin are told of it, the one for high availability, too.
    let control = dir.path().join("control");
    run(Command::new("dpkg-deb").arg("-e").arg(&package).arg(&control));
    let triggers = std::fs::read_to_string(control.join("triggers")).unwrap();
    assert_eq!(triggers, "activate-noawait pve-api-updates\n");
    // VMs start after the daemon, and end before their disks.
    for unit in ["spillwayd.service", "spillway-machines.service"] {
        let unit = std::fs::read_to_string(deploy(unit)).unwrap();
        let before = |line: &str| line.starts_with("Before=") && line.contains("pve-guests.service");
        assert!(unit.lines().any(before), "{unit}");
    }
}
