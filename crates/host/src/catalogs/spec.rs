//! What goes with what in a catalog. Owns the rules and their words; looks at nothing else.

use super::naming::Naming;
use crate::error::HostError;
use spillway_api::{CatalogKind, CatalogSpec, DiskMode, Name, Network, RAM_BYTES_DEFAULT, ResetEvent};

/// Machines of a catalog.
const MOST_MACHINES: u32 = 100_000;
const LEAST_MEMORY_BYTES: u64 = 64 << 20;
const MOST_LABELS: usize = 64;
const MOST_LABEL_CHARS: usize = 256;

/// Where the disks' writes go.
pub fn mode(spec: &CatalogSpec) -> DiskMode {
    let usual = match spec.kind {
        CatalogKind::Pooled => DiskMode::RamOverflow,
        CatalogKind::Dedicated => DiskMode::Persistent,
    };
    spec.mode.unwrap_or(usual)
}

/// The names of its machines.
pub fn naming(name: &Name, spec: &CatalogSpec) -> Result<Naming, HostError> {
    match &spec.naming {
        Some(pattern) => Naming::parse(pattern),
        None => Naming::parse(&format!("{name}-###")),
    }
}

/// Refuses what cannot be; says what may not be meant so.
pub fn check(name: &Name, spec: &CatalogSpec) -> Result<Vec<String>, HostError> {
    let refuse = |why: &str| Err(HostError::invalid(format!("catalog {name}: {why}")));
    let mode = mode(spec);
    let word =
        serde_json::to_value(mode).ok().and_then(|word| Some(word.as_str()?.to_owned())).unwrap_or_default();
    match (spec.kind, mode) {
        (CatalogKind::Dedicated, DiskMode::Persistent) => {}
        (CatalogKind::Dedicated, _) => {
            return refuse(&format!("dedicated machines keep what is written: mode persistent, not {word}"));
        }
        (CatalogKind::Pooled, DiskMode::Persistent) => {
            return refuse("pooled machines forget what is written: mode persistent is for type dedicated");
        }
        (CatalogKind::Pooled, _) => {}
    }
    let has_ram = matches!(mode, DiskMode::RamOverflow | DiskMode::Ram);
    let has_overflow = matches!(mode, DiskMode::RamOverflow | DiskMode::Overflow);
    if !has_ram && (spec.ram_bytes.is_some() || spec.ram_guarantee_bytes > 0) {
        return refuse(&format!("mode {word} has no RAM tier: leave ram out"));
    }
    if !has_overflow && spec.overflow_bytes.is_some() {
        return refuse(&format!("mode {word} has no overflow: leave it out"));
    }
    if spec.ram_guarantee_bytes > spec.ram_bytes.unwrap_or(RAM_BYTES_DEFAULT) {
        return refuse("the guarantee of RAM is larger than its limit");
    }
    if spec.count > MOST_MACHINES {
        return refuse(&format!("{} machines: {MOST_MACHINES} can be", spec.count));
    }
    naming(name, spec)?.name(spec.count.max(1))?;
    if spec.warm > spec.count {
        return refuse(&format!("{} warm machines of {}: there are not so many", spec.warm, spec.count));
    }
    if !(1..=255).contains(&spec.vcpus) {
        return refuse(&format!("{} processors: 1 to 255 can be", spec.vcpus));
    }
    if spec.memory_bytes < LEAST_MEMORY_BYTES || !spec.memory_bytes.is_multiple_of(1 << 20) {
        return refuse(&format!("{} bytes of memory: whole MiB from 64 on can be", spec.memory_bytes));
    }
    if let Network::Bridge(bridge) = &spec.network {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        if bridge.is_empty() || bridge.len() > 15 || !bridge.bytes().all(plain) {
            return refuse(&format!("'{}' is no name of a bridge", bridge.escape_debug()));
        }
    }
    let long =
        |value: &String| value.chars().count() > MOST_LABEL_CHARS || value.chars().any(char::is_control);
    if spec.labels.len() > MOST_LABELS || spec.labels.values().any(long) {
        return refuse(&format!(
            "labels: {MOST_LABELS} can be, of {MOST_LABEL_CHARS} characters each, none of them for control"
        ));
    }
    let mut warnings = Vec::new();
    if spec.kind == CatalogKind::Pooled && spec.reset == ResetEvent::Never {
        warnings.push(format!(
            "nothing resets its machines, and what they write is lost when the host restarts (mode {word})"
        ));
    }
    Ok(warnings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(json: &str) -> CatalogSpec {
        serde_json::from_str(json).unwrap()
    }

    fn of(json: &str) -> Result<Vec<String>, String> {
        check(&"desk".parse().unwrap(), &spec(json)).map_err(|e| e.message)
    }

    #[test]
    fn what_can_be_is_taken() {
        for json in [
            r#"{"image": "debian"}"#,
            r#"{"image": "debian:3", "count": 999, "warm": 999, "mode": "ram", "ram_bytes": 1048576}"#,
            r#"{"image": "debian", "type": "dedicated", "mode": "persistent", "count": 5}"#,
            r#"{"image": "debian", "mode": "ephemeral", "network": {"bridge": "br0"}}"#,
            r#"{"image": "debian", "count": 5000, "naming": "d####", "labels": {"team": "x"}}"#,
        ] {
            assert_eq!(of(json), Ok(vec![]), "{json}");
        }
        assert_eq!(of(r#"{"image": "debian", "reset": "never"}"#).unwrap().len(), 1);
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_reason() {
        for (json, why) in [
            (r#"{"image": "debian", "type": "dedicated", "mode": "ram"}"#, "keep what is written"),
            (r#"{"image": "debian", "mode": "persistent"}"#, "forget what is written"),
            (r#"{"image": "debian", "mode": "ephemeral", "ram_bytes": 5}"#, "no RAM tier"),
            (r#"{"image": "debian", "mode": "ram", "overflow_bytes": 5}"#, "no overflow"),
            (r#"{"image": "debian", "ram_guarantee_bytes": 999999999999}"#, "larger than its limit"),
            (r#"{"image": "debian", "count": 1000}"#, "more digits"),
            (r#"{"image": "debian", "count": 100001, "naming": "d######"}"#, "100000 can be"),
            (r#"{"image": "debian", "count": 1, "warm": 2}"#, "not so many"),
            (r#"{"image": "debian", "vcpus": 0}"#, "1 to 255"),
            (r#"{"image": "debian", "memory_bytes": 1000}"#, "whole MiB"),
            (r#"{"image": "debian", "network": {"bridge": "a b"}}"#, "no name of a bridge"),
            (r#"{"image": "debian", "labels": {"a": "\u0007"}}"#, "control"),
        ] {
            let error = of(json).unwrap_err();
            assert!(error.contains(why), "{json}: {error}");
        }
        for json in [
            r#"{"image": "debian", "ram": 5}"#,
            r#"{}"#,
            r#"{"image": "debian:0"}"#,
            r#"{"image": "debian", "count": -1}"#,
        ] {
            assert!(serde_json::from_str::<CatalogSpec>(json).is_err(), "{json}");
        }
    }
}
