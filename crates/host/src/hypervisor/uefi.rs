//! UEFI firmware of this host, as its packages describe it (QEMU, docs/interop/firmware.json): a file of code, which all machines
//! share, and a template of the variables, of which each machine has its own copy. Owns the choice among descriptions; copies
//! nothing.
//!
//! Invariant: a description in `/etc` replaces one of the same name in `/usr/share`, an empty one hides it, and of those that fit the
//! first by name is taken: the order that QEMU's documentation prescribes.

use crate::error::HostError;
use serde::Deserialize;
use spillway_api::{ErrorCode, Firmware};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders of descriptions; a later one takes precedence.
const FOLDERS: [&str; 2] = ["/usr/share/qemu/firmware", "/etc/qemu/firmware"];
/// Longest description that is read.
const MOST_BYTES: u64 = 64 << 10;
const ARCHITECTURE: &str = "x86_64";
const SECURE_BOOT: &str = "secure-boot";
/// The template of the variables contains the certificates that programs are verified with.
const ENROLLED: &str = "enrolled-keys";
/// Code that runs only in confidential guests.
const CONFIDENTIAL: [&str; 3] = ["amd-sev-es", "amd-sev-snp", "intel-tdx"];

/// UEFI firmware for machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uefi {
    /// The code.
    pub code: PathBuf,
    /// The variables that a new machine begins with.
    pub template: PathBuf,
    /// Whether it verifies what it starts, and protects its variables by system management mode.
    pub is_secure: bool,
}

/// Returns the firmware for machines of this type; `None`: they have a BIOS.
pub fn find(firmware: Firmware, machine_type: &str) -> Result<Option<Uefi>, HostError> {
    match firmware {
        Firmware::Bios => Ok(None),
        Firmware::Uefi | Firmware::UefiSecure => {
            find_in(&FOLDERS.map(Path::new), firmware == Firmware::UefiSecure, machine_type).map(Some)
        }
    }
}

fn find_in(folders: &[&Path], is_secure: bool, machine_type: &str) -> Result<Uefi, HostError> {
    let mut files = BTreeMap::<OsString, PathBuf>::new();
    for folder in folders {
        // A folder that does not exist describes nothing.
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "json") {
                files.insert(entry.file_name(), entry.path());
            }
        }
    }
    let mut described = files.values().filter_map(|path| Description::read(path));
    let found = described.find_map(|description| description.fits(is_secure, machine_type));
    found.ok_or_else(|| {
        let kind = if is_secure { "UEFI firmware with Secure Boot" } else { "UEFI firmware" };
        let message = format!(
            "no {kind} for machines of type {machine_type} is described in {}: install it (Debian: ovmf)",
            FOLDERS.join(" or ")
        );
        HostError::new(ErrorCode::Unavailable, message)
    })
}

/// The parts of a description that matter here.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Description {
    interface_types: Vec<String>,
    mapping: Mapping,
    targets: Vec<Target>,
    features: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Mapping {
    device: String,
    executable: Option<Flash>,
    nvram_template: Option<Flash>,
}

#[derive(Debug, Deserialize)]
struct Flash {
    filename: PathBuf,
    format: String,
}

#[derive(Debug, Deserialize)]
struct Target {
    architecture: String,
    /// Patterns of machine types, with `*`.
    machines: Vec<String>,
}

impl Description {
    /// Reads a description. One that cannot be read describes nothing, as an empty one does.
    fn read(path: &Path) -> Option<Description> {
        let is_short = fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() <= MOST_BYTES);
        let text = is_short.then(|| fs::read(path).ok()).flatten()?;
        serde_json::from_slice(&text).ok()
    }

    /// Returns the firmware if it is of this kind and for this machine type.
    fn fits(self, is_secure: bool, machine_type: &str) -> Option<Uefi> {
        let has = |feature: &str| self.features.iter().any(|name| name == feature);
        let is_of_kind = match is_secure {
            true => has(SECURE_BOOT) && has(ENROLLED),
            false => !has(SECURE_BOOT),
        };
        let is_usable = self.interface_types.iter().any(|name| name == "uefi")
            && self.mapping.device == "flash"
            && !CONFIDENTIAL.iter().any(|feature| has(feature))
            && self.targets.iter().any(|target| {
                target.architecture == ARCHITECTURE
                    && target.machines.iter().any(|pattern| matches(pattern, machine_type))
            });
        let raw = |flash: Option<Flash>| {
            flash
                .filter(|flash| flash.format == "raw" && flash.filename.is_file())
                .map(|flash| flash.filename)
        };
        let (code, template) = (raw(self.mapping.executable)?, raw(self.mapping.nvram_template)?);
        (is_of_kind && is_usable).then_some(Uefi { code, template, is_secure })
    }
}

/// Whether a machine type is one of this pattern, in which a `*` at the end stands for any rest. The aliases `q35` and `pc` are the
/// newest of their types.
fn matches(pattern: &str, machine_type: &str) -> bool {
    let whole = match machine_type {
        "q35" => "pc-q35-",
        "pc" => "pc-i440fx-",
        other => other,
    };
    match pattern.strip_suffix('*') {
        Some(beginning) => whole.starts_with(beginning),
        None => whole == pattern,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn describe(folder: &Path, name: &str, features: &[&str], change: impl FnOnce(&mut Value)) {
        let file = |suffix: &str| {
            let path = folder.join(format!("{name}.{suffix}"));
            fs::write(&path, "").unwrap();
            json!({ "filename": path, "format": "raw" })
        };
        let mut description = json!({
            "description": "test", "interface-types": ["uefi"], "features": features, "tags": [],
            "mapping": { "device": "flash", "executable": file("code"), "nvram-template": file("vars") },
            "targets": [{ "architecture": "x86_64", "machines": ["pc-q35-*"] }],
        });
        change(&mut description);
        fs::write(folder.join(format!("{name}.json")), description.to_string()).unwrap();
    }

    #[test]
    fn the_first_that_fits_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let [usr, etc] = ["usr", "etc"].map(|name| dir.path().join(name));
        for folder in [&usr, &etc] {
            fs::create_dir(folder).unwrap();
        }
        let secure = ["secure-boot", "enrolled-keys", "requires-smm"];
        describe(&usr, "10-bios", &[], |d| d["interface-types"] = json!(["bios"]));
        describe(&usr, "20-other", &[], |d| d["targets"][0]["architecture"] = "aarch64".into());
        describe(&usr, "30-qcow2", &[], |d| d["mapping"]["executable"]["format"] = "qcow2".into());
        describe(&usr, "40-gone", &[], |d| {
            d["mapping"]["nvram-template"]["filename"] = "/nonexistent".into()
        });
        describe(&usr, "50-sev", &["amd-sev-es"], |_| ());
        describe(&usr, "60-no-keys", &["secure-boot"], |_| ());
        describe(&usr, "70-secure", &secure, |_| ());
        describe(&usr, "80-plain", &[], |_| ());
        describe(&usr, "90-plain", &[], |_| ());
        fs::write(usr.join("00-damaged.json"), "{").unwrap();
        let folders = [usr.as_path(), &etc];
        let code = |secure, of: &str| find_in(&folders, secure, of).map(|found| found.code);
        assert_eq!(code(true, "q35").unwrap(), usr.join("70-secure.code"));
        assert_eq!(code(false, "pc-q35-7.2").unwrap(), usr.join("80-plain.code"));
        let none = code(false, "pc").unwrap_err();
        assert!(none.message.contains("type pc ") && none.message.contains("ovmf"), "{none}");
        // The host's administrator hides one, and replaces another.
        fs::write(etc.join("80-plain.json"), "").unwrap();
        describe(&etc, "90-plain", &[], |_| ());
        assert_eq!(code(false, "q35").unwrap(), etc.join("90-plain.code"));
    }
}
