//! QEMU's command line, as words.

use super::*;
use serde_json::{Value, json};
use std::fs::File;

fn descriptor() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

/// The command of a machine with these settings, its options and their values one after the other.
fn words(settings: Value, accelerator: &Accelerator, files: &HostFiles) -> Vec<String> {
    let machine: Machine = serde_json::from_value(json!({
        "name": "desk-001", "catalog": "desk", "number": 1, "created": "2026-01-01T00:00:00Z",
        "identity": { "uuid": "11111111-2222-4333-8444-555555555555", "mac": "02:00:00:12:34:56" },
    }))
    .unwrap();
    let mut spec = json!({ "image": "debian" });
    spec.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    let spec: CatalogSpec = serde_json::from_value(spec).unwrap();
    let tap = |network: &Network| matches!(network, Network::Bridge(_)).then(descriptor);
    let handles = Handles {
        monitor: descriptor(),
        console: None,
        agent: descriptor(),
        data: None,
        scratch: None,
        seed: None,
        kernel: None,
        initrd: None,
        phone: None,
        variables: files.uefi.map(|_| descriptor()),
        taps: spec.hardware.networks().map(tap).collect(),
    };
    let command = command(&machine, &spec, accelerator, "disk.sock", files, &handles, false);
    command.get_args().map(|word| word.to_string_lossy().into_owned()).collect()
}

/// Values of an option.
fn values<'a>(words: &'a [String], option: &str) -> Vec<&'a str> {
    words.windows(2).filter(|pair| pair[0] == option).map(|pair| pair[1].as_str()).collect()
}

#[test]
fn a_plain_machine_has_what_it_always_had() {
    let words = words(json!({ "vcpus": 4 }), &Accelerator::Kvm, &HostFiles::default());
    assert_eq!(values(&words, "-machine"), ["q35,memory-backend=memory,graphics=off,usb=off"]);
    assert_eq!((values(&words, "-cpu"), values(&words, "-accel")), (vec!["host"], vec!["kvm"]));
    assert_eq!(values(&words, "-smp"), ["cpus=4,sockets=1,cores=4,threads=1"]);
    assert_eq!(values(&words, "-netdev"), ["user,id=network0"]);
    for none in ["pflash", "tpm", "watchdog", "i6300esb", "-rtc", "hugetlb", "VGA"] {
        assert!(!words.iter().any(|word| word.contains(none)), "{none}: {words:?}");
    }
}

#[test]
fn windows_has_the_clock_the_pointer_and_the_interfaces_that_it_needs() {
    let windows = HostFiles { guest: Some(GuestSystem::Windows), ..HostFiles::default() };
    let settings = json!({ "display": "vnc", "cpu_model": "Skylake-Server,-hle" });
    let found = words(settings.clone(), &Accelerator::Kvm, &windows);
    assert!(values(&found, "-machine")[0].ends_with(",hpet=off"), "{found:?}");
    assert_eq!(values(&found, "-rtc"), ["base=localtime,driftfix=slew"]);
    let cpu = values(&found, "-cpu")[0];
    assert!(cpu.starts_with("Skylake-Server,-hle,hv-relaxed,") && cpu.contains(",hv-stimer,"), "{cpu}");
    let devices = values(&found, "-device");
    assert!(devices.contains(&"usb-tablet") && !devices.contains(&"virtio-tablet-pci"), "{devices:?}");
    // Only KVM has these interfaces.
    let found = words(settings, &Accelerator::Tcg(String::new()), &windows);
    assert_eq!(values(&found, "-cpu"), ["Skylake-Server,-hle"]);
}

#[test]
fn hardware_is_what_the_catalog_says() {
    let settings = json!({
        "vcpus": 4, "sockets": 2, "hugepages": true, "machine_type": "pc-q35-7.2", "tpm": "2.0", "watchdog": "pause",
        "display": "vnc", "video": "virtio", "network": { "bridge": "br0" }, "more_networks": ["user", { "bridge": "br1" }],
        "extra_args": ["-device", "usb-audio,id=a b"],
    });
    let uefi = Uefi { code: "/a,b/code".into(), template: "/t".into(), is_secure: true };
    let variables = Path::new("/unused");
    let files = HostFiles { uefi: Some((&uefi, variables)), forward: Some((1, 22)), ..HostFiles::default() };
    let found = words(settings, &Accelerator::Tcg(String::new()), &files);
    assert_eq!(values(&found, "-machine"), ["pc-q35-7.2,memory-backend=memory,graphics=on,usb=off,smm=on"]);
    assert_eq!(values(&found, "-smp"), ["cpus=4,sockets=2,cores=2,threads=1"]);
    assert!(values(&found, "-object")[0].ends_with(",share=on,hugetlb=on,hugetlbsize=2M"));
    let flash: Vec<_> =
        values(&found, "-drive").into_iter().filter(|drive| drive.contains("pflash")).collect();
    assert!(flash[0].ends_with("readonly=on,file=/a,,b/code"), "a comma is no other option: {flash:?}");
    assert!(flash[1].contains("unit=1") && flash[1].contains("file=/dev/fdset/100"), "{flash:?}");
    assert_eq!(
        values(&found, "-global"),
        ["driver=cfi.pflash01,property=secure,value=on", "ICH9-LPC.disable_s3=1"]
    );
    assert_eq!(values(&found, "-tpmdev"), ["emulator,id=tpm,chardev=tpm"]);
    assert!(values(&found, "-action")[0].ends_with(",watchdog=pause"));
    let cards: Vec<_> =
        values(&found, "-device").into_iter().filter(|device| device.starts_with("virtio-net")).collect();
    let macs = ["02:00:00:12:34:56", "06:00:00:12:34:56", "0a:00:00:12:34:56"];
    assert_eq!(cards.len(), macs.len());
    for (card, mac) in cards.iter().zip(macs) {
        assert!(card.contains(&format!("mac={mac},")), "{cards:?}");
    }
    // The port is forwarded on the first card's network, and that is a bridge.
    assert!(!found.iter().any(|word| word.contains("hostfwd")), "{found:?}");
    assert_eq!(found[found.len() - 2..], ["-device", "usb-audio,id=a b"]);
}
