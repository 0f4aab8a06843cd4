//! The seed disk as others read it: another FAT reader's words, blkid, ssh-keygen.

use super::*;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};

struct Parts {
    name: Name,
    identity: Identity,
    host_key: HostKey,
    cards: Vec<String>,
}

impl Parts {
    fn new() -> Parts {
        let identity =
            Identity { uuid: "8e5b3c1a-0d3b-4c5e-9f60-3a1d8c2b7e4f".into(), mac: "52:54:00:12:34:56".into() };
        let cards = [0, 1].map(|card| identity.mac_of_card(card)).to_vec();
        Parts { name: "desk-001".parse().unwrap(), identity, host_key: host_key().unwrap(), cards }
    }

    fn seed(&self) -> Seed<'_> {
        Seed {
            name: &self.name,
            identity: &self.identity,
            host_key: &self.host_key,
            cards: &self.cards,
            authorized_keys: &[],
            user_data: None,
            phone_home: None,
        }
    }
}

fn files(disk: Vec<u8>) -> BTreeMap<String, String> {
    let system = FileSystem::new(Cursor::new(disk), FsOptions::new()).unwrap();
    let read = |entry: fatfs::DirEntry<'_, _>| {
        let mut content = String::new();
        entry.to_file().read_to_string(&mut content).unwrap();
        (entry.file_name(), content)
    };
    system.root_dir().iter().map(|entry| read(entry.unwrap())).collect()
}

fn cloud_config(text: &str) -> Value {
    serde_json::from_str(text.strip_prefix("#cloud-config\n").unwrap()).unwrap()
}

#[test]
fn the_files_say_who_the_machine_is() {
    let parts = Parts::new();
    let keys = ["ssh-ed25519 AAAA me@here".to_owned()];
    let files = files(Seed { authorized_keys: &keys, ..parts.seed() }.disk().unwrap());
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    assert_eq!(names, ["meta-data", "network-config", "user-data", "vendor-data"]);
    let meta: Value = serde_json::from_str(&files["meta-data"]).unwrap();
    assert_eq!(meta["instance-id"], "iid-8e5b3c1a-0d3b-4c5e-9f60-3a1d8c2b7e4f");
    assert_eq!((&meta["local-hostname"], &meta["public-keys"][0]), (&json!("desk-001"), &json!(keys[0])));
    let vendor = cloud_config(&files["vendor-data"]);
    assert_eq!((&vendor["hostname"], &vendor["preserve_hostname"]), (&json!("desk-001"), &json!(false)));
    assert_eq!(vendor["ssh_deletekeys"], true);
    assert_eq!(vendor["ssh_keys"]["ed25519_private"], parts.host_key.private);
    assert_eq!(vendor["ssh_keys"]["ed25519_public"], parts.host_key.public);
    assert_eq!(files["user-data"], "#cloud-config\n");
    let network: Value = serde_json::from_str(&files["network-config"]).unwrap();
    assert_eq!(network["version"], 2);
    assert_eq!(network["ethernets"]["eth0"]["match"]["macaddress"], "52:54:00:12:34:56");
    assert_eq!(network["ethernets"]["eth0"]["dhcp4"], true);
    assert_eq!(network["ethernets"]["eth1"]["match"]["macaddress"], "56:54:00:12:34:56");
    assert_eq!(network["ethernets"]["eth1"]["set-name"], "eth1");
}

#[test]
fn without_a_network_no_card_is_named() {
    let parts = Parts::new();
    let files = files(Seed { cards: &[], ..parts.seed() }.disk().unwrap());
    assert_eq!(
        serde_json::from_str::<Value>(&files["network-config"]).unwrap(),
        json!({ "version": 2, "ethernets": {} })
    );
}

#[test]
fn user_data_is_the_operators_byte_for_byte() {
    let parts = Parts::new();
    let long = "x".repeat(MOST_USER_DATA_BYTES);
    for text in ["", "#!/bin/sh\necho \"--==\" '{}' \r\n\u{fffd}", "#cloud-config\nhostname: other\n", &long]
    {
        let found = files(Seed { user_data: Some(text), ..parts.seed() }.disk().unwrap());
        assert!(found["user-data"] == text, "{} bytes", text.len());
        assert_eq!(cloud_config(&found["vendor-data"])["hostname"], "desk-001");
    }
    let longer = format!("{long}x");
    let error = Seed { user_data: Some(&longer), ..parts.seed() }.disk().unwrap_err();
    assert_eq!(error.code, ErrorCode::TooLarge);
    let keys = ["ssh-ed25519 AAAA\nssh-ed25519 BBBB".to_owned()];
    let error = Seed { authorized_keys: &keys, ..parts.seed() }.disk().unwrap_err();
    assert_eq!(error.code, ErrorCode::Invalid);
}

#[test]
fn the_same_machine_has_the_same_disk() {
    let mut parts = Parts::new();
    let disk = parts.seed().disk().unwrap();
    assert_eq!(disk.len(), SEED_BYTES);
    assert!(disk == parts.seed().disk().unwrap());
    let system = FileSystem::new(Cursor::new(disk.clone()), FsOptions::new()).unwrap();
    for entry in system.root_dir().iter().map(Result::unwrap) {
        assert_eq!(entry.modified().date, Date { year: 1980, month: 1, day: 1 }, "{}", entry.file_name());
    }
    drop(system);
    parts.identity.uuid = "9e5b3c1a-0d3b-4c5e-9f60-3a1d8c2b7e4f".into();
    let other = parts.seed().disk().unwrap();
    assert!(disk != other);
    let serial = |disk| FileSystem::new(Cursor::new(disk), FsOptions::new()).unwrap().volume_id();
    assert_eq!((serial(disk), serial(other)), (0x8e5b_3c1a, 0x9e5b_3c1a));
    parts.identity.uuid = "none".into();
    assert_eq!(parts.seed().disk().unwrap_err().code, ErrorCode::Internal);
}

#[test]
fn blkid_finds_it_as_cloud_init_does() {
    let parts = Parts::new();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("seed");
    std::fs::write(&path, parts.seed().disk().unwrap()).unwrap();
    let done = Command::new("/usr/sbin/blkid").args(["-p", "-o", "export"]).arg(&path).output().unwrap();
    let said = String::from_utf8(done.stdout).unwrap();
    for line in ["LABEL=CIDATA", "TYPE=vfat", "UUID=8E5B-3C1A", "VERSION=FAT12"] {
        assert!(said.lines().any(|found| found == line), "{line}: {said}");
    }
    assert!(!said.contains("PTTYPE"), "it must not be taken for a partitioned disk: {said}");
}

#[test]
fn a_host_key_is_one_that_openssh_reads_and_no_other_machine_has() {
    let [one, other] = [host_key().unwrap(), host_key().unwrap()];
    assert_ne!(one.public, other.public);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    let file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(&path);
    file.unwrap().write_all(one.private.as_bytes()).unwrap();
    let done = Command::new("ssh-keygen").arg("-y").arg("-f").arg(&path).stdin(Stdio::null()).output();
    let done = done.unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(String::from_utf8(done.stdout).unwrap().trim_end(), one.public);
    assert!(one.public.starts_with("ssh-ed25519 ") && !one.public.contains('\n'));
    assert!(!format!("{one:?}").contains("PRIVATE"), "a secret is not shown");
}

#[test]
fn the_guest_is_told_where_to_phone_unless_its_operator_has_a_phone_home_of_their_own() {
    let parts = Parts::new();
    let url = "http://10.0.2.100/phone-home/secret";
    for (user_data, is_ours) in [
        (None, true),
        (Some("#cloud-config\npackages: [vim]\n"), true),
        (Some("#cloud-config\nphone_home:\n  url: http://site/\n"), false),
    ] {
        let seed = Seed { phone_home: Some(url), user_data, ..parts.seed() };
        let files = files(seed.disk().unwrap());
        let meta: Value = serde_json::from_str(&files["meta-data"]).unwrap();
        assert_eq!(meta["phone_home_url"], url);
        let vendor = cloud_config(&files["vendor-data"]);
        assert_eq!(vendor["phone_home"]["url"] == url, is_ours, "{user_data:?}");
    }
    let files = files(parts.seed().disk().unwrap());
    assert!(!files["meta-data"].contains("phone") && !files["vendor-data"].contains("phone"));
}
