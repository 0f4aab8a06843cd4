//! The rules of a catalog, one by one: what can be, and what is refused with which words.

use super::*;
use crate::catalogs::hardware::{MOST_APPEND_BYTES, MOST_PATH_BYTES};

fn spec(json: &str) -> CatalogSpec {
    serde_json::from_str(json).unwrap_or_else(|e| panic!("{json}: {e}"))
}

fn of(spec: &CatalogSpec) -> Result<Vec<String>, String> {
    check(&"desk".parse().unwrap(), spec).map_err(|e| e.message)
}

#[test]
fn what_can_be_is_taken() {
    for json in [
        r#"{"image": "debian"}"#,
        r#"{"image": "debian:3", "count": 999, "warm": 999, "mode": "ram", "ram_bytes": 1048576}"#,
        r#"{"image": "debian", "ram_bytes": 65536, "ram_guarantee_bytes": 65536, "overflow_bytes": 16777216}"#,
        r#"{"image": "debian", "ram_guarantee_bytes": 268435456}"#,
        r#"{"image": "debian", "type": "dedicated", "mode": "persistent", "count": 5, "reset": "never"}"#,
        r#"{"image": "debian", "type": "dedicated", "data_disk_bytes": 1048576, "data_disk_store": "big"}"#,
        r#"{"image": "debian", "mode": "ephemeral", "network": {"bridge": "br0"}, "ready": "tcp:22"}"#,
        r#"{"image": "debian", "mode": "direct", "overflow_store": "disk", "reset": "guest-reboot"}"#,
        r#"{"image": "debian", "count": 5000, "naming": "d####", "labels": {"team": "x"}}"#,
        r#"{"image": "debian", "data_disk_bytes": 4398046511104, "scratch_disk_bytes": 1073741824}"#,
        r#"{"image": "debian", "scratch_disk_bytes": 67108864, "scratch_format": "ntfs:Temporary Storage"}"#,
        r#"{"image": "debian", "scratch_disk_bytes": 16777216, "scratch_format": "ext4:scratch"}"#,
        r#"{"image": "debian", "kernel": "/boot/vmlinuz", "initrd": "/boot/initrd", "append": "root=/dev/vda quiet"}"#,
        r##"{"image": "debian", "user_data": "#cloud-config\npackages:\n\t- fio\r\n", "network": "none", "ready": "agent"}"##,
        r#"{"image": "debian", "authorized_keys": ["ssh-ed25519 AAAAC3 me@here"], "ready": "serial:login: $"}"#,
        r#"{"image": "debian", "grace_seconds": 0}"#,
    ] {
        assert_eq!(of(&spec(json)), Ok(vec![]), "{json}");
    }
    for mode in ["ram+overflow", "overflow", "direct"] {
        let json = format!(r#"{{"image": "debian", "mode": "{mode}", "reset": "never"}}"#);
        let warnings = of(&spec(&json)).unwrap();
        assert!(warnings.len() == 1 && warnings[0].contains("lost when the host restarts"), "{warnings:?}");
    }
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    for (settings, why) in [
        // Type and mode.
        (r#""type": "dedicated", "mode": "ram""#, "keep what is written: mode persistent"),
        (r#""type": "dedicated", "mode": "ephemeral""#, "keep what is written: mode persistent"),
        (r#""mode": "persistent""#, "forget what is written"),
        // The write cache.
        (r#""mode": "ephemeral", "ram_bytes": 1048576"#, "excludes a write cache"),
        (r#""mode": "ephemeral", "ram_guarantee_bytes": 4096"#, "no RAM tier"),
        (r#""mode": "ephemeral", "overflow_bytes": 16777216"#, "excludes a write cache"),
        (r#""mode": "ephemeral", "full": "fail""#, "excludes a write cache"),
        (r#""mode": "overflow", "ram_bytes": 1048576"#, "no RAM tier"),
        (r#""mode": "direct", "full": "fail""#, "no write cache that could be full"),
        (r#""type": "dedicated", "ram_bytes": 1048576"#, "not for `mode` persistent: it has no RAM tier"),
        (r#""mode": "ram", "overflow_bytes": 16777216"#, "no overflow"),
        (r#""mode": "ram", "overflow_store": "fast""#, "no file on a disk"),
        (r#""ram_guarantee_bytes": 268435457"#, "larger than its limit"),
        (r#""ram_bytes": 65536, "ram_guarantee_bytes": 65537"#, "larger than its limit"),
        (r#""ram_bytes": 65535"#, "64K to 4T"),
        (r#""ram_bytes": 18446744073709551615"#, "64K to 4T"),
        (r#""overflow_bytes": 16777215"#, "16M to 4T"),
        (r#""overflow_bytes": 18446744073709551615"#, "16M to 4T"),
        // Resets.
        (r#""type": "dedicated", "reset": "power-cycle""#, "only on request"),
        (r#""mode": "ephemeral", "reset": "never""#, "goes when the machine stops"),
        (r#""mode": "ephemeral", "reset": "guest-reboot""#, "stays over reboots"),
        (r#""mode": "ram", "reset": "never""#, "no overflow that could keep"),
        // Other disks.
        (r#""data_disk_bytes": 0"#, "whole MiB"),
        (r#""data_disk_bytes": 1048577"#, "whole MiB"),
        (r#""scratch_disk_bytes": 4398047559680"#, "1M to 4T, whole MiB"),
        (r#""data_disk_store": "big""#, "there are none"),
        (r#""type": "dedicated", "scratch_disk_bytes": 1048576"#, "for pooled ones"),
        // Machines.
        (r#""count": 1000"#, "more digits"),
        (r#""count": 100001, "naming": "d######""#, "0 to 100000, not"),
        (r#""count": 1, "warm": 2"#, "2 of its machines are kept warm, and count would be 1"),
        (r#""type": "dedicated", "count": 1, "warm": 1"#, "only pooled machines can be warm"),
        (r#""vcpus": 0"#, "1 to 255"),
        (r#""memory_bytes": 1000"#, "whole MiB"),
        (r#""grace_seconds": 3601"#, "0 to 3600, not"),
        (r#""network": {"bridge": "a b"}"#, "not a valid name of a bridge"),
        (r#""labels": {"a": "\u0007"}"#, "control"),
        // Boot and guest.
        (r#""initrd": "/i""#, "requires a kernel"),
        (r#""append": "quiet""#, "requires a kernel"),
        (r#""kernel": "vmlinuz""#, "absolute path"),
        (r#""kernel": "/k\n""#, "absolute path"),
        (r#""kernel": "/k", "initrd": "../i""#, "initrd: must be an absolute path"),
        (r#""kernel": "/k", "append": "a\nb""#, "one line"),
        (r#""ready": "serial:(""#, "invalid regular expression"),
        (r#""ready": "serial:(a{1000}){1000}""#, "invalid regular expression"),
        (r#""ready": "tcp:22", "network": "none""#, "no connections"),
        (r#""user_data": "a\u0000b""#, "control characters are not allowed"),
        (r#""authorized_keys": [""]"#, "as ssh-keygen writes it"),
        (r#""authorized_keys": ["ssh-ed25519 A\nssh-rsa B"]"#, "as ssh-keygen writes it"),
    ] {
        let json = format!(r#"{{"image": "debian", {settings}}}"#);
        let error = of(&spec(&json)).unwrap_err();
        assert!(error.contains(why), "{json}: {error}");
    }
    for json in [
        r#"{"image": "debian", "ram": 5}"#,
        r#"{}"#,
        r#"{"image": "debian:0"}"#,
        r#"{"image": "debian", "count": -1}"#,
        r#"{"image": "debian", "ready": "tcp:0"}"#,
        r#"{"image": "debian", "data_disk_bytes": -1}"#,
    ] {
        assert!(serde_json::from_str::<CatalogSpec>(json).is_err(), "{json}");
    }
}

#[test]
fn what_cloudbase_init_cannot_do_is_warned_of() {
    let warnings = |settings: &str| of(&spec(&format!(r#"{{"image": "desk", {settings}}}"#))).unwrap();
    let windows = |settings: &str| warnings(&format!(r#""guest": "windows", {settings}"#));
    assert_eq!(windows(r#""count": 999, "naming": "desktops-of-###""#), [""; 0]);
    let [cut] = windows(r#""count": 999, "naming": "windows-desk-###""#).try_into().unwrap();
    assert!(cut.contains("'windows-desk-999' has more than 15 characters"), "{cut}");
    let [restarts] = windows(r#""reset": "guest-reboot""#).try_into().unwrap();
    assert!(restarts.contains("another restart"), "{restarts}");
    assert_eq!(warnings(r#""naming": "windows-desk-###", "reset": "guest-reboot""#), [""; 0]);
}

#[test]
fn a_format_needs_a_scratch_disk_of_its_size() {
    let with = |settings: &str| format!(r#"{{"image": "debian", {settings}}}"#);
    for (settings, why) in [
        (r#""scratch_format": "ext4:x""#, "there are none: say scratch_disk_bytes"),
        (
            r#""scratch_format": "ntfs:x", "scratch_disk_bytes": 66060288"#,
            "ntfs requires a scratch_disk_bytes of at least 64",
        ),
        (
            r#""scratch_format": "ext4:x", "scratch_disk_bytes": 15728640"#,
            "ext4 requires a scratch_disk_bytes of at least 16",
        ),
    ] {
        let error = of(&spec(&with(settings))).unwrap_err();
        assert!(error.contains(why), "{settings}: {error}");
    }
    let unreadable = with(r#""scratch_disk_bytes": 67108864, "scratch_format": "ntfs:""#);
    assert!(serde_json::from_str::<CatalogSpec>(&unreadable).is_err());
}

#[test]
fn what_a_guest_is_given_is_bounded() {
    let base = spec(r#"{"image": "debian", "kernel": "/k"}"#);
    let text = |length: usize| "x".repeat(length);
    let key = |length: usize| format!("ssh-rsa {}", text(length - 8));
    type Set = fn(&mut CatalogSpec, String);
    let cases: [(usize, Set); 4] = [
        (MOST_USER_DATA_BYTES, |spec, text| spec.user_data = Some(text)),
        (MOST_APPEND_BYTES, |spec, text| spec.hardware.append = Some(text)),
        (MOST_PATTERN_BYTES, |spec, text| spec.ready = Some(Ready::Serial(text))),
        (MOST_LABEL_CHARS, |spec, text| _ = spec.labels.insert("k".parse().unwrap(), text)),
    ];
    for (most, set) in cases {
        let with = |length| {
            let mut spec = base.clone();
            set(&mut spec, text(length));
            of(&spec)
        };
        assert!(with(most).is_ok() && with(most + 1).is_err(), "{most}");
    }
    let keys =
        |number, length| of(&CatalogSpec { authorized_keys: vec![key(length); number], ..base.clone() });
    assert!(keys(MOST_KEYS, MOST_KEY_BYTES).is_ok());
    assert!(keys(MOST_KEYS + 1, 20).is_err() && keys(1, MOST_KEY_BYTES + 1).is_err());
    let path = |length| {
        let mut spec = base.clone();
        spec.hardware.kernel = Some(format!("/{}", text(length - 1)));
        of(&spec)
    };
    assert!(path(MOST_PATH_BYTES).is_ok() && path(MOST_PATH_BYTES + 1).is_err());
}

#[test]
fn a_console_is_matched_as_bytes() {
    let pattern = serial_pattern("^login: ?$").unwrap();
    assert!(pattern.is_match(b"login: ") && !pattern.is_match(b"\xff login: "));
    assert!(serial_pattern("ready").unwrap().is_match(b"\xff\xfe ready"));
}
