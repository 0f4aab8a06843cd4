//! The seed disk as Windows has it: what cloudbase-init, as it is published, reads of it and does, with the configuration that
//! we hand out. Windows itself is a stand-in (`cloudbase_init/windows.py`): nothing here was run on Windows.
#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use spillway_api::Identity;
use spillway_host::seed::{HostKey, Seed};
use spillway_testkit::{has_program, skip};
use std::path::{Path, PathBuf};
use std::process::Command;

const MACS: [&str; 2] = ["52:54:00:12:34:56", "56:54:00:12:34:56"];
const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl me@here";
/// Where the stand-in's page file is once it is on the scratch disk: it has this host's separator of paths.
const ON_SCRATCH: &str = "T:\\/pagefile.sys";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The Python that has cloudbase-init.
fn python() -> Option<String> {
    for program in ["mcopy", "mlabel"] {
        if !has_program(program) {
            skip(&format!("cloudbase-init: {program} is not installed: run 'make install-deps'"));
            return None;
        }
    }
    let done = Command::new(root().join("scripts/cloudbase-init")).output().unwrap();
    if !done.status.success() {
        let why = String::from_utf8_lossy(&done.stderr);
        skip(&format!(
            "cloudbase-init cannot be installed: {}",
            why.trim().lines().last().unwrap_or("no reason")
        ));
        return None;
    }
    Some(String::from_utf8(done.stdout).unwrap().trim().to_owned())
}

/// What a Windows machine of this name does with its seed disk. `page_file` is where its image has the page file.
fn run(name: &str, user_data: Option<&str>, page_file: &str, folder: &Path) -> Option<Value> {
    let python = python()?;
    let seed = Seed {
        phone_home: None,
        name: &name.parse().unwrap(),
        identity: &Identity { uuid: "8e5b3c1a-0d3b-4c5e-9f60-3a1d8c2b7e4f".into(), mac: MACS[0].into() },
        host_key: &HostKey { private: "private".into(), public: "public".into() },
        cards: &MACS.map(str::to_owned),
        authorized_keys: &[KEY.to_owned()],
        user_data,
    };
    let disk = folder.join("seed.img");
    std::fs::write(&disk, seed.disk().unwrap()).unwrap();
    let mut command = Command::new(python);
    command.arg("-B").arg(root().join("crates/host/tests/cloudbase_init/windows.py"));
    command.arg(root().join("deploy/windows/cloudbase-init.conf")).arg(disk).arg(folder).arg(page_file);
    let done = command.env("TMPDIR", folder).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Some(serde_json::from_slice(&done.stdout).unwrap())
}

/// Names of the calls of a boot that change something.
fn calls(boot: &Value) -> Vec<&str> {
    boot.as_array().unwrap().iter().map(|call| call[0].as_str().unwrap()).collect()
}

#[test]
fn it_reads_who_the_machine_is() {
    let dir = tempfile::tempdir().unwrap();
    let text = "#cloud-config\nwrite_files: []\n";
    let Some(found) = run("desk-001", Some(text), ON_SCRATCH, dir.path()) else { return };
    let service = &found["service"];
    assert_eq!(service["files"], json!(["meta-data", "network-config", "user-data", "vendor-data"]));
    assert_eq!(service["instance"], "iid-8e5b3c1a-0d3b-4c5e-9f60-3a1d8c2b7e4f");
    assert_eq!((&service["name"], &service["keys"]), (&json!("desk-001"), &json!([KEY])));
    assert_eq!(service["user data"], text);
    assert_eq!(service["cards"], json!([["eth0", MACS[0], true], ["eth1", MACS[1], true]]));
    assert_eq!(service["addresses"], 0, "all are by DHCP, which is Windows' own default");
    assert_eq!(found["errors"], json!([]));
}

/// The image has its page file on the scratch disk already, as docs/how-to/windows.md has it made.
#[test]
fn a_reset_machine_restarts_once_and_is_then_itself() {
    let dir = tempfile::tempdir().unwrap();
    let written = dir.path().join("guest/operator");
    let text = format!("#cloud-config\nwrite_files:\n- path: {}\n  content: was here\n", written.display());
    let Some(found) = run("desk-001", Some(&text), ON_SCRATCH, dir.path()) else { return };
    let boots = found["boots"].as_array().unwrap();
    assert_eq!(boots.len(), 2, "{boots:?}");
    assert_eq!(calls(&boots[0]), ["disks online", "trim", "name", "reboot"]);
    assert_eq!((&boots[0][1], &boots[0][2]), (&json!(["trim", true]), &json!(["name", "desk-001"])));
    let rest = ["user", "group", "card", "enable", "card", "enable", "end"];
    assert_eq!(calls(&boots[1]), rest);
    assert_eq!(
        (&boots[1][2], &boots[1][4]),
        (&json!(["card", "Ethernet", "eth0"]), &json!(["card", "Ethernet 2", "eth1"]))
    );
    let files =
        json!({ "guest/Admin/.ssh/authorized_keys": format!("{KEY}\n"), "guest/operator": "was here" });
    assert_eq!(found["files"], files);
    assert_eq!(found["errors"], json!([]));
    // What `ready = "serial:..."` of the page waits for is there once, at the end of the last boot.
    let console: Vec<&str> =
        found["console"].as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect();
    let ready: Vec<usize> = (0..console.len())
        .filter(|&line| console[line].contains("cloudbaseinit.init [-] Plugins execution done"))
        .collect();
    let restart = console.iter().position(|line| line.contains("Rebooting")).unwrap();
    assert!(ready.len() == 1 && ready[0] > restart, "{console:#?}");
}

#[test]
fn an_image_with_its_page_file_elsewhere_costs_another_restart_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let Some(found) = run("desk-001", None, "C:\\pagefile.sys", dir.path()) else { return };
    let boots = found["boots"].as_array().unwrap();
    assert_eq!(boots.len(), 3, "{boots:?}");
    assert_eq!(calls(&boots[1]), ["page files", "reboot"]);
    assert_eq!(boots[1][0][1][0][0], ON_SCRATCH);
    assert_eq!(calls(&boots[2]).last(), Some(&"end"));
    // Without user-data of the operator there is a file without settings, which it takes for a mistake and passes over.
    let complaints = found["errors"].as_array().unwrap();
    assert!(
        complaints.len() == 1 && complaints[0].as_str().unwrap().contains("Empty yaml"),
        "{complaints:?}"
    );
}

/// Two machines would have one name: NetBIOS has 15 characters.
#[test]
fn a_long_name_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let Some(found) = run("windows-desktop-001", None, ON_SCRATCH, dir.path()) else { return };
    assert_eq!(found["boots"][0][2], json!(["name", "windows-desktop"]));
}

#[test]
fn each_option_of_our_configuration_exists() {
    let dir = tempfile::tempdir().unwrap();
    let Some(found) = run("desk-001", None, ON_SCRATCH, dir.path()) else { return };
    assert_eq!(found["unknown"], json!([]));
}
