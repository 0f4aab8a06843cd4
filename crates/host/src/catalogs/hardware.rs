//! Rules about valid combinations of the hardware of a catalog's machines. Owns the rules and their messages.
//!
//! Invariant: a word of these settings never becomes another option of QEMU or another element of libvirt's, except those that an
//! administrator has given as such.

use super::spec::Objection;
use spillway_api::{CatalogSpec, DisplayKind, Firmware, Hardware, Network, VmmKind};

/// Limit of the kernel for a path, and for its command line.
pub const MOST_PATH_BYTES: usize = 4095;
pub const MOST_APPEND_BYTES: usize = 2047;
const MOST_CARDS: usize = 8;
const MOST_WORD_BYTES: usize = 128;
const MOST_EXTRA_ARGS: usize = 64;
const MOST_EXTRA_ARG_BYTES: usize = 4096;
/// Machine types, and the prefixes of those with a version.
const Q35: (&str, &str) = ("q35", "pc-q35-");
const I440FX: (&str, &str) = ("pc", "pc-i440fx-");
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Returns why the hardware is refused; `None`: it is allowed.
pub fn check(spec: &CatalogSpec) -> Objection {
    let hardware = &spec.hardware;
    [external, processors, machine, memory, networks, screen, boot, extra]
        .iter()
        .find_map(|rule| rule(hardware))
}

/// The VMM of an external machine decides on its hardware.
fn external(hardware: &Hardware) -> Objection {
    let Hardware { vmm, socket_group, .. } = hardware;
    if *vmm == VmmKind::Host {
        return socket_group.is_some().then(|| "socket_group: is for vmm = external".into());
    }
    if socket_group.as_ref().is_some_and(|group| !is_word(group)) {
        return Some("socket_group: must be the name or the number of a group of the host".into());
    }
    let usual = Hardware { vmm: *vmm, socket_group: socket_group.clone(), ..Hardware::default() };
    let values = |hardware: &Hardware| serde_json::to_value(hardware).unwrap_or_default();
    let (given, usual) = (values(hardware), values(&usual));
    let settings = given.as_object()?;
    let differing = settings.iter().find(|(name, value)| usual.get(name) != Some(value))?.0;
    Some(format!("{differing}: external machines have the hardware that their VMM gives them: leave it out"))
}

fn processors(hardware: &Hardware) -> Objection {
    let Hardware { vcpus, sockets, cpu_model, .. } = hardware;
    if vcpus % sockets != 0 {
        return Some(format!(
            "sockets: {vcpus} virtual processors cannot be distributed evenly among {sockets}: change vcpus or sockets"
        ));
    }
    let feature = |word: &str| word.strip_prefix(['+', '-']).is_some_and(is_word);
    let is_model = |text: &String| {
        let mut words = text.split(',');
        text.len() <= MOST_WORD_BYTES * 8 && words.next().is_some_and(is_word) && words.all(feature)
    };
    (!cpu_model.as_ref().is_none_or(is_model)).then(|| {
        "cpu_model: must be a model of QEMU's, and after it features with + or -, such as host or Skylake-Server,+vmx,-hle"
            .into()
    })
}

fn machine(hardware: &Hardware) -> Objection {
    let Some(machine_type) = &hardware.machine_type else { return None };
    let is_of = |(alias, prefix): (&str, &str)| {
        machine_type == alias || machine_type.strip_prefix(prefix).is_some_and(is_word)
    };
    if !is_of(Q35) && !is_of(I440FX) {
        return Some(
            "machine_type: must be q35, pc, or one of these with a version, such as pc-q35-7.2".into(),
        );
    }
    (hardware.firmware == Some(Firmware::UefiSecure) && !is_of(Q35))
        .then(|| "firmware: uefi-secure requires a machine_type of q35's".into())
}

/// Whether a text is one word of letters, digits and some signs.
fn is_word(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    !text.is_empty() && text.len() <= MOST_WORD_BYTES && text.bytes().all(plain)
}

fn memory(hardware: &Hardware) -> Objection {
    (hardware.hugepages && !hardware.memory_bytes.is_multiple_of(HUGE_PAGE_BYTES))
        .then(|| "hugepages: memory_bytes must be whole huge pages of 2 MiB".into())
}

fn networks(hardware: &Hardware) -> Objection {
    let all: Vec<&Network> = hardware.networks().collect();
    if all.len() > MOST_CARDS {
        return Some(format!("more_networks: machines have at most {MOST_CARDS} network cards"));
    }
    for network in &all {
        if let Network::Bridge(bridge) = network
            && (bridge.len() > 15 || !is_word(bridge))
        {
            return Some(format!("'{}' is not a valid name of a bridge", bridge.escape_debug()));
        }
    }
    if all.len() > 1 && all.contains(&&Network::None) {
        return Some("more_networks: none is for machines without any network card".into());
    }
    (all.iter().filter(|network| ***network == Network::User).count() > 1)
        .then(|| "more_networks: only one network card can have the network user".into())
}

fn screen(hardware: &Hardware) -> Objection {
    (hardware.video.is_some() && hardware.display == DisplayKind::None)
        .then(|| "video: machines without a screen have no graphics card: set display = vnc too".into())
}

fn boot(hardware: &Hardware) -> Objection {
    for (setting, value) in [("initrd", &hardware.initrd), ("append", &hardware.append)] {
        if value.is_some() && hardware.kernel.is_none() {
            return Some(format!("{setting} requires a kernel: set kernel too"));
        }
    }
    for (setting, value) in [("kernel", &hardware.kernel), ("initrd", &hardware.initrd)] {
        let path =
            |p: &String| p.starts_with('/') && p.len() <= MOST_PATH_BYTES && !p.contains(char::is_control);
        if value.as_ref().is_some_and(|p| !path(p)) {
            return Some(format!("{setting}: must be an absolute path of at most {MOST_PATH_BYTES} bytes"));
        }
    }
    let line = |text: &String| text.len() <= MOST_APPEND_BYTES && !text.contains(char::is_control);
    if hardware.append.as_ref().is_some_and(|text| !line(text)) {
        return Some(format!("append: must be one line of at most {MOST_APPEND_BYTES} bytes"));
    }
    None
}

fn extra(hardware: &Hardware) -> Objection {
    let line = |text: &String| text.len() <= MOST_EXTRA_ARG_BYTES && !text.contains(char::is_control);
    (hardware.extra_args.len() > MOST_EXTRA_ARGS || !hardware.extra_args.iter().all(line)).then(|| {
        format!(
            "extra_args: at most {MOST_EXTRA_ARGS} are allowed, each one line of at most {MOST_EXTRA_ARG_BYTES} bytes"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn hardware_that_cannot_be_is_refused_in_words() {
        let objection = |settings: Value| {
            let mut spec = json!({ "image": "debian" });
            spec.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
            check(&serde_json::from_value(spec).unwrap())
        };
        let bridges = |number: usize| vec![json!({ "bridge": "br0" }); number];
        for allowed in [
            json!({}),
            json!({ "vcpus": 8, "sockets": 2, "cpu_model": "Skylake-Server,+vmx,-hle" }),
            json!({ "cpu_model": "host" }),
            json!({ "machine_type": "pc-i440fx-7.2", "firmware": "uefi" }),
            json!({ "machine_type": "pc-q35-7.2", "firmware": "uefi-secure", "tpm": "2.0" }),
            json!({ "hugepages": true, "memory_bytes": 1 << 30 }),
            json!({ "network": "user", "more_networks": bridges(7) }),
            json!({ "display": "vnc", "video": "virtio" }),
            json!({ "extra_args": ["-device", "usb-audio,id=x"] }),
            json!({ "vmm": "external", "socket_group": "libvirt-qemu" }),
        ] {
            assert_eq!(objection(allowed.clone()), None, "{allowed}");
        }
        for (refused, word) in [
            (json!({ "vmm": "external", "vcpus": 2 }), "vcpus: external"),
            (json!({ "vmm": "external", "tpm": "2.0" }), "tpm: external"),
            (json!({ "vmm": "external", "socket_group": "a:b" }), "socket_group"),
            (json!({ "socket_group": "kvm" }), "vmm = external"),
            (json!({ "vcpus": 3, "sockets": 2 }), "sockets"),
            (json!({ "cpu_model": "host,migratable=off" }), "cpu_model"),
            (json!({ "cpu_model": "" }), "cpu_model"),
            (json!({ "cpu_model": "max,+" }), "cpu_model"),
            (json!({ "machine_type": "microvm" }), "machine_type"),
            (json!({ "machine_type": "q35,accel=kvm" }), "machine_type"),
            (json!({ "machine_type": "pc-q35-" }), "machine_type"),
            (json!({ "machine_type": "pc", "firmware": "uefi-secure" }), "uefi-secure"),
            (json!({ "hugepages": true, "memory_bytes": 65 << 20 }), "hugepages"),
            (json!({ "more_networks": bridges(8) }), "at most 8"),
            (json!({ "more_networks": [{ "bridge": "br0,x" }] }), "name of a bridge"),
            (json!({ "more_networks": [{ "bridge": "a-name-too-long-x" }] }), "name of a bridge"),
            (json!({ "more_networks": ["user"] }), "only one"),
            (json!({ "network": "none", "more_networks": bridges(1) }), "none is for"),
            (json!({ "video": "vga" }), "display = vnc"),
            (json!({ "extra_args": ["a\nb"] }), "extra_args"),
            (json!({ "extra_args": vec!["a"; 65] }), "extra_args"),
        ] {
            let why = objection(refused.clone()).unwrap_or_default();
            assert!(why.contains(word), "{refused}: {why}");
        }
    }
}
