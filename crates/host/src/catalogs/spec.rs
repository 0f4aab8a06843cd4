//! Rules about valid combinations of a catalog's settings. Owns the rules and their messages; checks nothing else.

use super::hardware;
use super::naming::NamePattern;
use crate::error::HostError;
use regex::bytes::{Regex, RegexBuilder};
use spillway_api::bounds::Bounded;
use spillway_api::{
    CatalogKind, CatalogSpec, DiskMode, GuestSystem, Name, Network, Ready, ResetEvent, VmmKind,
};
use spillway_control::{SettingFault, bytes};

const MOST_LABELS: usize = 64;
const MOST_LABEL_CHARS: usize = 256;
/// Placeholder that once replaced `user_data` for the role `read`.
const REDACTED_ONCE: &str = "(not for the role 'read')";
const MOST_USER_DATA_BYTES: usize = 16 << 10;
const MOST_KEYS: usize = 64;
/// Length of a NetBIOS name.
const MOST_WINDOWS_NAME_BYTES: usize = 15;
const MOST_KEY_BYTES: usize = 8 << 10;
const MOST_PATTERN_BYTES: usize = 256;
/// Largest memory of a compiled pattern.
const MOST_PATTERN_MEMORY_BYTES: usize = 1 << 20;

/// Returns the name pattern of the machines.
pub fn naming(name: &Name, spec: &CatalogSpec) -> Result<NamePattern, HostError> {
    NamePattern::parse(&spec.naming(name))
}

/// Compiles the pattern for a line of a serial console. The pattern is untrusted: its length and memory are bounded, and
/// matching takes linear time.
pub fn serial_pattern(text: &str) -> Result<Regex, String> {
    if text.len() > MOST_PATTERN_BYTES {
        return Err(format!("{} bytes; at most {MOST_PATTERN_BYTES} are allowed", text.len()));
    }
    let compiled = RegexBuilder::new(text).size_limit(MOST_PATTERN_MEMORY_BYTES).build();
    compiled.map_err(|e| e.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Why a setting is refused; `None`: it is allowed.
pub type Objection = Option<String>;

/// Refuses invalid settings. Returns warnings.
pub fn check(name: &Name, spec: &CatalogSpec) -> Result<Vec<String>, HostError> {
    let rules = [mode, numbers, caches, guarantee, resets, disks, machines, hardware::check, guest, labels];
    if let Some(why) = rules.iter().find_map(|rule| rule(spec)) {
        return Err(HostError::invalid(format!("catalog {name}: {why}")));
    }
    let last = naming(name, spec)?.name(spec.count.max(1))?;
    let mut warnings = windows(spec, &last);
    if spec.kind == CatalogKind::Pooled && spec.keeps_writes() {
        let mode = spec.mode().name();
        warnings.push(format!(
            "nothing resets its machines, and what they write is lost when the host restarts (mode {mode})"
        ));
    }
    if spec.ready == Some(Ready::PhoneHome) && spec.keeps_writes() {
        warnings.push(
            "cloud-init phones home at the first boot of a guest only, and disks that are kept boot again: each boot needs a script that does \
             it, or ready = agent"
                .into(),
        );
    }
    Ok(warnings)
}

/// Warns of what cloudbase-init cannot do in machines of Windows.
fn windows(spec: &CatalogSpec, machine: &Name) -> Vec<String> {
    if spec.hardware.guest != Some(GuestSystem::Windows) {
        return Vec::new();
    }
    let mut warnings = Vec::new();
    if machine.as_str().len() > MOST_WINDOWS_NAME_BYTES {
        warnings.push(format!(
            "naming: '{machine}' has more than {MOST_WINDOWS_NAME_BYTES} characters, to which cloudbase-init cuts names of Windows: several \
             machines would have the same one"
        ));
    }
    if spec.kind == CatalogKind::Pooled && spec.reset() == ResetEvent::GuestReboot {
        warnings.push(
            "reset: cloudbase-init restarts Windows to give it its name, and guest-reboot discards that name: each start would be \
             followed by another restart"
                .into(),
        );
    }
    warnings
}

/// Refuses settings that were redacted for a reader, because the redacted values would be lost.
pub fn check_not_redacted(name: &Name, spec: &CatalogSpec) -> Result<(), HostError> {
    let setting = match spec.redacted.as_slice() {
        // Files that were exported by earlier versions contain the placeholder.
        [] if spec.user_data.as_deref() == Some(REDACTED_ONCE) => "user_data",
        [] => return Ok(()),
        names => &names.join(", ").chars().take(MOST_LABEL_CHARS).collect::<String>(),
    };
    Err(HostError::invalid(format!(
        "catalog {name}: it was read with the role 'read', which may not see {setting}, and to write it back would lose that: read it again \
         with the role 'operate' or 'admin', or say what {setting} is to be and leave 'redacted' out"
    )))
}

fn mode(spec: &CatalogSpec) -> Objection {
    let mode = spec.mode();
    match (spec.kind, mode) {
        (CatalogKind::Dedicated, DiskMode::Persistent) => None,
        (CatalogKind::Dedicated, _) => {
            let word = mode.name();
            Some(format!("dedicated machines keep what is written: mode persistent, not {word}"))
        }
        (CatalogKind::Pooled, DiskMode::Persistent) => {
            Some("pooled machines forget what is written: mode persistent is for type dedicated".into())
        }
        (CatalogKind::Pooled, _) => None,
    }
}

fn caches(spec: &CatalogSpec) -> Objection {
    let mode = spec.mode();
    if let Err(fault) = spec.disk().check() {
        return Some(fault.to_string());
    }
    let unused = |setting, why| Some(SettingFault::of_mode(setting, mode, why).to_string());
    if !mode.has_ram() && spec.ram_guarantee_bytes > 0 {
        return unused("ram_guarantee_bytes", "it has no RAM tier");
    }
    if spec.verify_reads && mode == DiskMode::Ephemeral {
        return unused("verify_reads", "it writes to a private copy of the image, which has no digests");
    }
    if mode == DiskMode::Ram && spec.overflow_store.is_some() {
        return unused("overflow_store", "it has no file on a disk");
    }
    None
}

fn numbers(spec: &CatalogSpec) -> Objection {
    spec.check_bounds().err().map(|e| e.to_string())
}

fn guarantee(spec: &CatalogSpec) -> Objection {
    if spec.ram_bytes().is_some_and(|limit| spec.ram_guarantee_bytes > limit) {
        return Some("the guarantee of RAM is larger than its limit".into());
    }
    None
}

fn resets(spec: &CatalogSpec) -> Objection {
    if spec.kind == CatalogKind::Dedicated {
        let others = spec.reset.is_some_and(|reset| reset != ResetEvent::Never);
        let why = "dedicated machines are reset only on request: leave reset out";
        return others.then(|| why.into());
    }
    match (spec.mode(), spec.reset()) {
        (DiskMode::Ephemeral, ResetEvent::Never) => {
            Some("mode ephemeral's private copy goes when the machine stops: reset cannot be never".into())
        }
        (DiskMode::Ephemeral, ResetEvent::GuestReboot) => {
            Some("mode ephemeral's private copy stays over reboots: reset cannot be guest-reboot".into())
        }
        (DiskMode::Ram, ResetEvent::Never) => Some(
            "mode ram has no overflow that could keep what is written when the machine stops: reset cannot be never, or take mode ram+overflow"
                .into(),
        ),
        _ => None,
    }
}

fn disks(spec: &CatalogSpec) -> Objection {
    if spec.data_disk_store.is_some() && spec.data_disk_bytes.is_none() {
        return Some("data_disk_store is for data disks, and there are none: say data_disk_bytes".into());
    }
    if spec.scratch_disk_bytes.is_some() && spec.kind == CatalogKind::Dedicated {
        return Some("dedicated machines keep what is written: scratch disks are for pooled ones".into());
    }
    let Some(format) = &spec.scratch_format else { return None };
    let least = format.system().least_disk_bytes();
    match spec.scratch_disk_bytes {
        None => {
            Some("scratch_format is for scratch disks, and there are none: say scratch_disk_bytes".into())
        }
        Some(size) if size < least => {
            let (word, least) = (format.system().word(), bytes(least));
            Some(format!("scratch_format: {word} requires a scratch_disk_bytes of at least {least}"))
        }
        Some(_) => None,
    }
}

fn machines(spec: &CatalogSpec) -> Objection {
    if spec.warm > spec.count {
        return Some(format!(
            "warm: {} of its machines are kept warm, and count would be {}: lower warm ('spillway catalog apply'), or raise count",
            spec.warm, spec.count
        ));
    }
    if spec.warm > 0 && spec.kind == CatalogKind::Dedicated {
        return Some("warm: only pooled machines can be warm: leave warm out, or set type = pooled".into());
    }
    None
}

fn guest(spec: &CatalogSpec) -> Objection {
    if spec.hardware.vmm == VmmKind::External && spec.ready.is_some() {
        return Some("ready: external machines are ready when their disks are served: leave it out".into());
    }
    if let Some(Ready::Serial(pattern)) = &spec.ready
        && let Err(why) = serial_pattern(pattern)
    {
        return Some(format!("ready: invalid regular expression: {why}"));
    }
    if let Some(Ready::Tcp(_)) = spec.ready
        && spec.hardware.network == Network::None
    {
        return Some(
            "ready: machines without a network take no connections: say agent or serial:REGEX".into(),
        );
    }
    if (&spec.ready, &spec.hardware.network) == (&Some(Ready::PhoneHome), &Network::None) {
        return Some("ready: machines without a network cannot phone home: say agent or serial:REGEX".into());
    }
    if let Some(text) = &spec.user_data {
        if text.len() > MOST_USER_DATA_BYTES {
            return Some(format!(
                "user_data: {} bytes; at most {MOST_USER_DATA_BYTES} are allowed",
                text.len()
            ));
        }
        if text.contains(|c: char| c.is_control() && !"\n\r\t".contains(c)) {
            return Some("user_data: control characters are not allowed, except tabs and line ends".into());
        }
    }
    let line = |key: &String| {
        key.len() <= MOST_KEY_BYTES && !key.contains(char::is_control) && key.split_whitespace().count() > 1
    };
    if spec.authorized_keys.len() > MOST_KEYS || !spec.authorized_keys.iter().all(line) {
        return Some(format!(
            "authorized_keys: at most {MOST_KEYS} are allowed, each a line as ssh-keygen writes it, such as 'ssh-ed25519 AAAA... me@here'"
        ));
    }
    None
}

fn labels(spec: &CatalogSpec) -> Objection {
    let long =
        |value: &String| value.chars().count() > MOST_LABEL_CHARS || value.chars().any(char::is_control);
    (spec.labels.len() > MOST_LABELS || spec.labels.values().any(long)).then(|| {
        format!(
            "labels: at most {MOST_LABELS} are allowed, of at most {MOST_LABEL_CHARS} characters each and without control characters"
        )
    })
}

#[cfg(test)]
#[path = "spec_tests.rs"]
mod tests;
