//! Files of catalogs: what is read, what is refused, and that what is written is read again.

use super::*;
use spillway_api::{CatalogSpec, FleetCatalogSpec};

fn refused(text: &str) -> String {
    match parse::<CatalogSpec>(text, None) {
        Err(why) => why,
        Ok(read) => panic!("{text}: {read:?}"),
    }
}

#[test]
fn toml_and_json_say_the_same() {
    let toml = r#"
        [catalogs.lab]
        image = "debian:2"

        [catalogs.desk]
        image = "debian"
        count = 20
        mode = "ram+overflow"
        ram_bytes = "256M"
        overflow_bytes = 10737418240
        network = { bridge = "br0" }
        authorized_keys = ["ssh-ed25519 A me"]
        user_data = """
#cloud-config
"""
        [catalogs.desk.labels]
        team = "sales"
    "#;
    let json = r##" {"catalogs": {"desk": {"image": "debian", "count": 20, "mode": "ram+overflow",
        "ram_bytes": "256M", "overflow_bytes": 10737418240, "network": {"bridge": "br0"},
        "authorized_keys": ["ssh-ed25519 A me"], "user_data": "#cloud-config\n", "labels": {"team": "sales"}},
        "lab": {"image": "debian:2", "ram_bytes": null}}}"##;
    let catalogs = parse::<CatalogSpec>(toml, None).unwrap();
    assert_eq!(parse(json, None).unwrap(), catalogs);
    assert_eq!((catalogs[0].name.as_str(), catalogs[0].spec.disk.ram_bytes), ("desk", Some(256 << 20)));
    assert_eq!((catalogs[1].name.as_str(), catalogs[1].spec.count), ("lab", 0));
    // What a name says about a file counts more than how it begins.
    assert!(parse::<CatalogSpec>(json, Some(Format::Toml)).is_err());
    assert!(parse::<CatalogSpec>(toml, Some(Format::Json)).is_err());
}

#[test]
fn a_word_that_is_not_known_is_refused_with_one_that_is() {
    for (settings, why) in [
        (r#"ram = "1G""#, "no setting 'ram': do you mean 'ram_bytes'?"),
        ("grace = 5", "do you mean 'grace_seconds'?"),
        (r#"overflow_byte = "1G""#, "do you mean 'overflow_bytes'?"),
        ("cuont = 5", "do you mean 'count'?"),
        (r#"colour = "red""#, "no setting 'colour'"),
        (r#"spread = "pack""#, "spread: only catalogs of a fleet have it"),
        (r#"ram_bytes = "1GB""#, "ram_bytes: '1GB': 'GB' may mean two sizes"),
        (r#"ram_bytes = "lots""#, "ram_bytes: 'lots'"),
        ("ram_bytes = -1", "ram_bytes: "),
        ("ram_bytes = 1.5", "ram_bytes: "),
        (r#"mode = "ramm""#, "mode: unknown variant `ramm`, expected one of"),
        (r#"count = "five""#, "count: invalid type"),
        ("count = 99999999999", "count: "),
        (r#"ready = "tcp:0""#, "ready: '0' is no port"),
        ("count = 1\ncount = 2", "duplicate key"),
        ("labels = { Team = \"x\" }", "labels: 'Team' is no name"),
        ("created = 2026-01-01", "no setting 'created'"),
        ("count = 2026-01-01", "count: "),
    ] {
        let error = refused(&format!("[catalogs.desk]\nimage = \"debian\"\n{settings}\n"));
        assert!(error.contains(why), "{settings}: {error}");
        assert!(!error.contains('\n'), "{error:?}");
    }
    for (text, why) in [
        ("", "names no catalogs: begin with [catalogs.NAME]"),
        ("{}", "names no catalogs"),
        ("[catalogs]", "names no catalogs"),
        ("catalogs = 5", "names no catalogs"),
        ("[catalogs]\ndesk = 5", "catalog desk: its settings are a table"),
        ("[catalogs.desk]\ncount = 5", "catalog desk: it has no image"),
        ("[catalogs.Desk]\nimage = \"a\"", "'Desk' is no name"),
        ("[catalog.desk]\nimage = \"a\"", "no setting 'catalog': do you mean 'catalogs'?"),
        ("[catalogs.desk]\nimage = \"a\"\n\ncount = = 5", "line 4: "),
        ("[catalogs.desk]\nimage = \"a\"\n[catalogs.desk]\nimage = \"b\"", "duplicate key"),
        (r#"{"catalogs": {"a": {"image": "x"}, "a": {"image": "y"}}}"#, "'a' stands there twice"),
        (r#"{"catalogs": {"a": {"image": "x", "image": "y"}}}"#, "'image' stands there twice"),
        (r#"{"catalogs": {"a": {"image": "x"}}"#, "line 1"),
    ] {
        let error = refused(text);
        assert!(error.contains(why), "{text}: {error}");
    }
    for text in ["[", r#"{"a":"#] {
        assert!(parse::<CatalogSpec>(&text.repeat(100_000), None).is_err());
    }
}

#[test]
fn what_is_written_is_read_again() {
    let every_setting = r##"{"image": "debian:7", "residency": "boot", "count": 20, "type": "pooled", "mode": "ram+overflow",
        "ram_bytes": 268435457, "ram_guarantee_bytes": 4096, "overflow_bytes": 10737418240,
        "overflow_store": "fast", "full": "fail", "warn_at": 70, "critical_at": 95, "iops": 500, "iops_burst": 50,
        "bandwidth_bytes": 104857600, "bandwidth_burst_bytes": 1048576, "base_cache": "none", "verify_reads": true, "data_disk_bytes": 1073741824,
        "data_disk_store": "big", "scratch_disk_bytes": 1048576, "scratch_format": "ntfs:Temporary Storage", "vcpus": 4, "memory_bytes": 4294967296,
        "vmm": "external", "socket_group": "kvm", "sockets": 2, "hugepages": true, "cpu_model": "max,+avx", "machine_type": "pc-q35-7.2", "guest": "windows", "firmware": "uefi-secure", "tpm": "2.0",
        "network": {"bridge": "br0"}, "more_networks": ["user", {"bridge": "br1"}], "display": "vnc", "video": "virtio", "watchdog": "reset",
        "extra_args": ["-device", "usb-audio,id=\"x\""], "naming": "d-####", "reset": "guest-reboot", "ready": "serial:\\d+ \"login\":",
        "grace_seconds": 5, "warm": 3, "claim_ttl_seconds": 0, "autostart": true, "start_order": 2, "start_delay_seconds": 30,
        "user_data": "#cloud-config\n\tx: '''\"\"\"'\r\n",
        "authorized_keys": ["ssh-rsa A b", "ssh-rsa C d"], "kernel": "/boot/k", "initrd": "/boot/i",
        "append": "root=/dev/vda \"quiet\"", "labels": {"team": "a = \"b\"", "x": ""}}"##;
    let every: CatalogSpec = serde_json::from_str(every_setting).unwrap();
    let (all, plain) = (every.object(), CatalogSpec::defaults());
    for (name, value) in plain.object() {
        assert!(all[&name] != value || name == "type", "'{name}' is as usual: give it another value here");
    }
    let (one, other): (Name, Name) = ("desk-1".parse().unwrap(), "7".parse().unwrap());
    for format in [Format::Toml, Format::Json] {
        let text = write([(&one, &every), (&other, &plain)], format);
        let read = parse::<CatalogSpec>(&text, None).unwrap_or_else(|e| panic!("{e}: {text}"));
        let found: Vec<(&Name, &CatalogSpec)> = read.iter().map(|new| (&new.name, &new.spec)).collect();
        assert_eq!(found, [(&other, &plain), (&one, &every)], "{text}");
    }
    let text = write([(&other, &plain)], Format::Toml);
    assert_eq!(text, "[catalogs.7]\nimage = \"x\"\n");
    let text = write([(&one, &every)], Format::Toml);
    assert!(text.starts_with("[catalogs.desk-1]\nimage = \"debian:7\"\ncount = 20\n"), "{text}");
    assert!(text.contains("memory_bytes = \"4G\"") && text.contains("ram_bytes = \"268435457\""), "{text}");
}

#[test]
fn what_was_left_out_for_its_reader_is_not_read_as_nothing() {
    let mut spec: CatalogSpec =
        serde_json::from_str(r##"{"image": "debian", "user_data": "#cloud-config\n"}"##).unwrap();
    spec.redact();
    let name: Name = "desk".parse().unwrap();
    for format in [Format::Toml, Format::Json] {
        let text = write([(&name, &spec)], format);
        assert!(text.contains("redacted") && !text.contains("cloud-config"), "{text}");
        let why = refused(&text);
        assert!(
            why.starts_with("catalog desk: user_data was left out") && why.contains("role 'operate'"),
            "{why}"
        );
        // Also if the value is there, and the mark still is: one of them is wrong.
        assert!(refused(&text.replace("\"user_data\"", "5")).contains("'redacted'"));
    }
}

#[test]
fn a_file_of_a_fleet_has_the_settings_of_both() {
    let text = r#"
        [catalogs.desk]
        image = "debian:2"
        count = 5000
        memory_bytes = "2G"
        spread = "pack"
        zones = ["a", "b"]
        identity = "named"
        lost_after_seconds = 60
        on_isolation = "pause"
        min_ready = 4000
        waves = ["1", "25%", "100%"]
        [catalogs.desk.host_labels]
        gpu = "yes"
    "#;
    let catalogs = parse::<FleetCatalogSpec>(text, None).unwrap();
    let spec = &catalogs[0].spec;
    assert_eq!((spec.catalog.count, spec.fleet.lost_after_seconds), (5000, 60));
    let (all, plain) = (spec.object(), FleetCatalogSpec::defaults());
    for name in spillway_api::FleetSettings::NAMES {
        assert!(
            all.get(name) != plain.object().get(name),
            "'{name}' is as usual: give it another value here"
        );
    }
    let other: Name = "lab".parse().unwrap();
    for format in [Format::Toml, Format::Json] {
        let text = write([(&catalogs[0].name, spec), (&other, &plain)], format);
        let read = parse::<FleetCatalogSpec>(&text, None).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert_eq!((&read[0], &read[1].spec), (&catalogs[0], &plain), "{text}");
    }
    assert_eq!(write([(&other, &plain)], Format::Toml), "[catalogs.lab]\nimage = \"x\"\n");
    for (setting, why) in [
        (r#"zone = "a""#, "no setting 'zone': do you mean 'zones'?"),
        (r#"waves = ["0"]"#, "waves: a wave is a number of hosts"),
        (r#"spread = "wide""#, "spread: unknown variant"),
        ("lost_after = 45", "do you mean 'lost_after_seconds'?"),
        (r#"lost_after_seconds = "45s""#, "lost_after_seconds: invalid type"),
    ] {
        let text = format!("[catalogs.desk]\nimage = \"debian\"\n{setting}\n");
        let error = parse::<FleetCatalogSpec>(&text, None).unwrap_err();
        assert!(error.contains(why), "{setting}: {error}");
    }
}
