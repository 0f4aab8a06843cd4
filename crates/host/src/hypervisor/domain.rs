//! A machine as a libvirt domain: its description (libvirt, formatdomain). Owns the domain's name and the metadata that
//! marks it as ours; asks libvirt nothing.
//!
//! Invariant: a name, a path or a text never becomes another element or attribute.

use super::qemu::{self, HostFiles};
use crate::error::HostError;
use spillway_api::{CatalogSpec, Hardware, Identity, Machine, Network, Ready, Tpm, Video, WatchdogAction};
use spillway_control::kvm::Accelerator;
use std::path::Path;

/// Namespace of our metadata.
pub const NAMESPACE: &str = "urn:spillway:machine";

/// Longest socket address (unix(7)), without the zero at its end.
const MOST_SOCKET_BYTES: usize = 107;

/// Refuses settings that libvirt does not support.
pub fn check_supported(spec: &CatalogSpec) -> Result<(), HostError> {
    match (&spec.ready, &spec.hardware.network) {
        (Some(Ready::Tcp(_)), Network::User) => Err(HostError::invalid(
            "ready: tcp with network user is QEMU's alone: with libvirt take a bridge, agent or serial",
        )),
        (Some(Ready::PhoneHome), Network::User) => Err(HostError::invalid(
            "ready: phone-home with network user is QEMU's alone: with libvirt take a bridge, agent or serial",
        )),
        _ => Ok(()),
    }
}

/// Refuses a machine's folder whose socket paths are too long: libvirt uses full paths.
pub fn fits(folder: &Path) -> Result<(), HostError> {
    // This is the longest of the names there.
    let path = folder.join(qemu::CONSOLE);
    let length = path.as_os_str().len();
    if length > MOST_SOCKET_BYTES {
        let message = format!(
            "{}: {length} bytes, and a socket's path has at most {MOST_SOCKET_BYTES}: give a shorter --state, or the \
             machines shorter names",
            path.display()
        );
        return Err(HostError::invalid(message));
    }
    Ok(())
}

/// Name of a machine's domain.
pub fn name(machine: &str) -> String {
    format!("spillway-{machine}")
}

/// Describes the domain of a machine in its folder, whose disk is served on `disk_socket` there.
pub fn describe(
    machine: &Machine,
    spec: &CatalogSpec,
    accelerator: &Accelerator,
    (folder, disk_socket): (&Path, &str),
    files: &HostFiles,
    ends_at_reboot: bool,
) -> String {
    let kind = match accelerator {
        Accelerator::Kvm => "kvm",
        Accelerator::Tcg(_) => "qemu",
    };
    let hardware = &spec.hardware;
    let path = |name: &Path| escape(&folder.join(name).to_string_lossy());
    let (uuid, vcpus, mib) = (escape(&machine.identity.uuid), hardware.vcpus, hardware.memory_bytes >> 20);
    let at_reboot = if ends_at_reboot { "destroy" } else { "restart" };
    let (name, disk_socket) = (escape(&name(machine.name.as_str())), path(disk_socket.as_ref()));
    // A kernel given by the host takes the first place in the boot order.
    let (kernel, boot) = match &hardware.kernel {
        Some(kernel) => (direct_boot(kernel, spec, accelerator), ""),
        None => (String::new(), "<boot order='1'/>"),
    };
    let (queues, disks) = (files.queues(spec), file_disks(folder, files));
    let machine_type = escape(hardware.machine_type.as_deref().unwrap_or(qemu::MACHINE_TYPE));
    let (firmware, features, clock) =
        (firmware(files, &path), features(files, accelerator), clock(files, accelerator));
    // A machine that wakes up verifies nothing.
    let sleep = if files.is_secure() { "  <pm><suspend-to-mem enabled='no'/></pm>\n" } else { "" };
    let (pages, cpu) = (pages(hardware), processors(hardware, accelerator));
    let networks = networks(hardware, &machine.identity);
    let (tpm, watchdog) = (tpm(hardware, &path), watchdog(hardware));
    let (schema, arguments) = arguments(hardware);
    let console = path(qemu::SERIAL.as_ref());
    let screen = hardware.video().map_or_else(
        || "    <controller type='usb' model='none'/>\n".into(),
        |video| screen(video, files, &path(Path::new(qemu::SCREEN_FOLDER).join(qemu::SCREEN).as_ref())),
    );
    format!(
        "\
<domain type='{kind}'{schema}>
  <name>{name}</name>
  <uuid>{uuid}</uuid>
  <metadata><spillway:machine xmlns:spillway='{NAMESPACE}' uuid='{uuid}'/></metadata>
  <memory unit='MiB'>{mib}</memory>
  <memoryBacking>{pages}<source type='memfd'/><access mode='shared'/></memoryBacking>
  <vcpu>{vcpus}</vcpu>
  <sysinfo type='smbios'><system>
    <entry name='manufacturer'>Spillway</entry>
    <entry name='serial'>{uuid}</entry>
    <entry name='uuid'>{uuid}</entry>
  </system></sysinfo>
  <os>
    <type arch='x86_64' machine='{machine_type}'>hvm</type>
{firmware}    <smbios mode='sysinfo'/>
{kernel}  </os>
  <features><acpi/><apic/>{features}</features>
{cpu}{clock}{sleep}  <on_poweroff>destroy</on_poweroff>
  <on_reboot>{at_reboot}</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <disk type='vhostuser' device='disk'>
      <driver name='qemu' type='raw' queues='{queues}'/>
      <source type='unix' path='{disk_socket}'><reconnect enabled='yes' timeout='1'/></source>
      <target dev='vda' bus='virtio'/>{boot}
    </disk>
{disks}{networks}{screen}{tpm}{watchdog}    <serial type='unix'><source mode='connect' path='{console}'/><target port='0'/></serial>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <rng model='virtio'><backend model='builtin'/></rng>
    <memballoon model='none'/>
  </devices>
{arguments}</domain>
"
    )
}

fn direct_boot(kernel: &str, spec: &CatalogSpec, accelerator: &Accelerator) -> String {
    let initrd =
        spec.hardware.initrd.as_ref().map(|initrd| format!("    <initrd>{}</initrd>\n", escape(initrd)));
    let (kernel, append) = (escape(kernel), escape(&qemu::append(spec, accelerator)));
    format!("    <kernel>{kernel}</kernel>\n{}    <cmdline>{append}</cmdline>\n", initrd.unwrap_or_default())
}

/// Describes UEFI firmware.
fn firmware(files: &HostFiles, path: &dyn Fn(&Path) -> String) -> String {
    let Some((uefi, variables)) = files.uefi else { return String::new() };
    let secure = if uefi.is_secure { " secure='yes'" } else { "" };
    let code = escape(&uefi.code.to_string_lossy());
    format!(
        "    <loader readonly='yes'{secure} type='pflash'>{code}</loader>\n    <nvram>{}</nvram>\n",
        path(variables)
    )
}

/// Describes what the guest is offered besides ACPI and its interrupt controller.
fn features(files: &HostFiles, accelerator: &Accelerator) -> String {
    let smm = if files.is_secure() { "<smm state='on'/>" } else { "" };
    let is_offered = files.is_windows() && *accelerator == Accelerator::Kvm;
    let hyper_v: String = qemu::HYPER_V.iter().filter_map(|interface| hyper_v(interface)).collect();
    match is_offered {
        true => format!("{smm}<hyperv mode='custom'>{hyper_v}</hyperv>"),
        false => smm.into(),
    }
}

/// Describes an interface of Hyper-V that QEMU names so. `None`: it is a clock.
fn hyper_v(interface: &str) -> Option<String> {
    let (name, value) = interface.split_once('=').unwrap_or((interface, ""));
    let name = name.trim_start_matches("hv-");
    let retries = u32::from_str_radix(value.trim_start_matches("0x"), 16).ok();
    let retries = retries.map_or(String::new(), |retries| format!(" retries='{retries}'"));
    (name != "time").then(|| format!("<{name} state='on'{retries}/>"))
}

/// Describes the clock of a guest that is Windows.
fn clock(files: &HostFiles, accelerator: &Accelerator) -> String {
    if !files.is_windows() {
        return String::new();
    }
    let hyper_v = match accelerator {
        Accelerator::Kvm => "<timer name='hypervclock' present='yes'/>",
        Accelerator::Tcg(_) => "",
    };
    format!(
        "  <clock offset='localtime'><timer name='rtc' tickpolicy='catchup'/><timer name='hpet' present='no'/>{hyper_v}</clock>\n"
    )
}

fn pages(hardware: &Hardware) -> &'static str {
    match hardware.hugepages {
        true => "<hugepages><page size='2' unit='MiB'/></hugepages>",
        false => "",
    }
}

/// Describes the processors. A model may be followed by features, each with a sign.
fn processors(hardware: &Hardware, accelerator: &Accelerator) -> String {
    let Hardware { vcpus, sockets, cpu_model, .. } = hardware;
    let usual = match accelerator {
        Accelerator::Kvm => "host",
        Accelerator::Tcg(_) => "max",
    };
    let mut words = cpu_model.as_deref().unwrap_or(usual).split(',');
    let (mode, model) = match words.next().unwrap_or(usual) {
        "host" => ("mode='host-passthrough'", String::new()),
        "max" => ("mode='maximum'", String::new()),
        model => (
            "mode='custom' match='exact' check='none'",
            format!("<model fallback='forbid'>{}</model>", escape(model)),
        ),
    };
    let feature = |word: &str| {
        let policy = if word.starts_with('-') { "disable" } else { "require" };
        format!("<feature policy='{policy}' name='{}'/>", escape(word.trim_start_matches(['+', '-'])))
    };
    let features: String = words.map(feature).collect();
    let cores = vcpus / (*sockets).max(1);
    let topology = format!("<topology sockets='{sockets}' cores='{cores}' threads='1'/>");
    format!("  <cpu {mode}>{model}{topology}{features}</cpu>\n")
}

/// Describes a screen on this socket, and what comes with it.
fn screen(video: Video, files: &HostFiles, socket: &str) -> String {
    let model = match video {
        Video::Vga => "vga",
        Video::Virtio => "virtio",
    };
    // Windows has no driver of its own for virtio's pointer.
    let (usb, pointer) = if files.is_windows() { ("qemu-xhci", "usb") } else { ("none", "virtio") };
    format!(
        "\
    <graphics type='vnc' socket='{socket}' sharePolicy='force-shared'/>
    <video><model type='{model}'/></video>
    <controller type='usb' model='{usb}'/>
    <input type='tablet' bus='{pointer}'/>
"
    )
}

/// Describes the trusted platform module, whose program listens in the machine's folder.
fn tpm(hardware: &Hardware, path: &dyn Fn(&Path) -> String) -> String {
    match hardware.tpm {
        Tpm::None => String::new(),
        Tpm::V2 => format!(
            "    <tpm model='tpm-crb'><backend type='external'><source type='unix' mode='connect' path='{}'/></backend></tpm>\n",
            path(qemu::TPM.as_ref())
        ),
    }
}

fn watchdog(hardware: &Hardware) -> String {
    let action = match hardware.watchdog {
        None => return String::new(),
        Some(WatchdogAction::Reset) => "reset",
        Some(WatchdogAction::Poweroff) => "poweroff",
        Some(WatchdogAction::Pause) => "pause",
    };
    format!("    <watchdog model='i6300esb' action='{action}'/>\n")
}

/// Describes further arguments of QEMU, with the declaration of their namespace.
fn arguments(hardware: &Hardware) -> (&'static str, String) {
    if hardware.extra_args.is_empty() {
        return ("", String::new());
    }
    let argument = |word: &String| format!("<qemu:arg value='{}'/>", escape(word));
    let arguments: String = hardware.extra_args.iter().map(argument).collect();
    let schema = " xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'";
    (schema, format!("  <qemu:commandline>{arguments}</qemu:commandline>\n"))
}

/// Describes the disks besides the first, in the order in which the guest finds them.
fn file_disks(folder: &Path, files: &HostFiles) -> String {
    let disks = [
        ("data", files.data, " discard='unmap'", ""),
        ("scratch", files.scratch, " discard='unmap'", ""),
        ("seed", files.seed, "", "<readonly/>"),
    ];
    let disks = disks.into_iter().filter_map(|(id, path, discard, more)| Some((id, path?, discard, more)));
    let disk = |((id, path, discard, more), letter): ((&str, &Path, &str, &str), char)| {
        let path = escape(&folder.join(path).to_string_lossy());
        format!(
            "\
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw' error_policy='report'{discard}/>
      <source file='{path}'/>
      <target dev='vd{letter}' bus='virtio'/><serial>{id}</serial>{more}
    </disk>
"
        )
    };
    disks.zip('b'..).map(disk).collect()
}

fn networks(hardware: &Hardware, identity: &Identity) -> String {
    let network = |(card, network): (usize, &Network)| {
        let (kind, source) = match network {
            Network::None => return String::new(),
            Network::User => ("user", String::new()),
            Network::Bridge(bridge) => ("bridge", format!("<source bridge='{}'/>", escape(bridge))),
        };
        let mac = escape(&identity.mac_of_card(card));
        format!(
            "    <interface type='{kind}'>{source}<mac address='{mac}'/><model type='virtio'/><rom enabled='no'/></interface>\n"
        )
    };
    hardware.networks().enumerate().map(network).collect()
}

/// Escapes text and attribute values (XML 1.0, 2.4 and 2.2); replaces what is no character.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&apos;"),
            '\t' | '\n' | '\r' => escaped.push_str(&format!("&#{};", u32::from(c))),
            '\0'..'\u{20}' | '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypervisor::uefi::Uefi;
    use serde_json::json;
    use spillway_api::GuestSystem;

    fn described(spec: serde_json::Value, files: &HostFiles) -> String {
        described_for(spec, files, &Accelerator::Kvm)
    }

    fn described_for(spec: serde_json::Value, files: &HostFiles, accelerator: &Accelerator) -> String {
        let machine: Machine = serde_json::from_value(json!({
            "name": "desk-001", "catalog": "desk", "number": 1, "created": "2026-01-01T00:00:00Z",
            "identity": { "uuid": "11111111-2222-4333-8444-555555555555", "mac": "02:54:00:12:34:56" },
        }))
        .unwrap();
        let spec: CatalogSpec = serde_json::from_value(spec).unwrap();
        let place = (Path::new("/run/a 'b' & <c>"), "disk.sock");
        describe(&machine, &spec, accelerator, place, files, true)
    }

    #[test]
    fn hardware_is_what_the_catalog_says() {
        let spec = json!({
            "image": "debian", "vcpus": 4, "sockets": 2, "hugepages": true, "machine_type": "pc-q35-7.2", "tpm": "2.0",
            "watchdog": "poweroff", "display": "vnc", "video": "virtio", "cpu_model": "Skylake-Server,+vmx,-hle",
            "network": { "bridge": "br0" }, "more_networks": ["user"], "extra_args": ["-device", "usb-audio,id='<'"],
        });
        let uefi = Uefi { code: "/a & b/code".into(), template: "/t".into(), is_secure: true };
        let variables = Path::new("/stores/x.variables");
        let guest = Some(GuestSystem::Windows);
        let files = HostFiles { uefi: Some((&uefi, variables)), guest, ..HostFiles::default() };
        let text = described(spec.clone(), &files);
        for part in [
            "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>",
            "<memoryBacking><hugepages><page size='2' unit='MiB'/></hugepages><source type='memfd'/>",
            "<type arch='x86_64' machine='pc-q35-7.2'>hvm</type>",
            "<loader readonly='yes' secure='yes' type='pflash'>/a &amp; b/code</loader>",
            "<nvram>/stores/x.variables</nvram>",
            "<pm><suspend-to-mem enabled='no'/></pm>",
            "<smm state='on'/><hyperv mode='custom'><relaxed state='on'/>",
            "<spinlocks state='on' retries='8191'/>",
            "<clock offset='localtime'>",
            "<timer name='hypervclock' present='yes'/>",
            "<model fallback='forbid'>Skylake-Server</model><topology sockets='2' cores='2' threads='1'/>",
            "<feature policy='require' name='vmx'/><feature policy='disable' name='hle'/>",
            "<backend type='external'><source type='unix' mode='connect' path='/run/a &apos;b&apos; &amp; &lt;c&gt;/tpm.sock'/>",
            "<watchdog model='i6300esb' action='poweroff'/>",
            "<video><model type='virtio'/></video>",
            "<controller type='usb' model='qemu-xhci'/>\n    <input type='tablet' bus='usb'/>",
            "<source bridge='br0'/><mac address='02:54:00:12:34:56'/>",
            "<interface type='user'><mac address='06:54:00:12:34:56'/>",
            "<qemu:arg value='-device'/><qemu:arg value='usb-audio,id=&apos;&lt;&apos;'/>",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = described_for(spec, &files, &Accelerator::Tcg(String::new()));
        assert!(!text.contains("hyperv"), "only KVM has these interfaces: {text}");
        let text = described(json!({ "image": "debian" }), &HostFiles::default());
        for none in ["<loader", "<tpm", "<watchdog", "<clock", "hyperv", "hugepages", "qemu:", "<smm"] {
            assert!(!text.contains(none), "{none}: {text}");
        }
        assert!(
            text.contains("<cpu mode='host-passthrough'>") && text.contains("usb' model='none'"),
            "{text}"
        );
    }

    #[test]
    fn all_that_a_catalog_says_is_in_it() {
        let spec = json!({
            "image": "debian", "vcpus": 3, "memory_bytes": 512 << 20, "network": { "bridge": "br0" },
            "kernel": "/boot/k", "initrd": "/boot/i", "append": "console=ttyS0",
        });
        let (seed, data) = (Some(Path::new("seed.img")), Some(Path::new("/data/x.raw")));
        let text = described(spec, &HostFiles { seed, data, most_queues: Some(2), ..HostFiles::default() });
        for part in [
            "<domain type='kvm'>",
            "<name>spillway-desk-001</name>",
            "<uuid>11111111-2222-4333-8444-555555555555</uuid>",
            "<memory unit='MiB'>512</memory>",
            "<vcpu>3</vcpu>",
            "queues='2'",
            "<interface type='bridge'><source bridge='br0'/><mac address='02:54:00:12:34:56'/>",
            "<kernel>/boot/k</kernel>",
            "<initrd>/boot/i</initrd>",
            "<cmdline>console=ttyS0</cmdline>",
            "<source file='/data/x.raw'/>\n      <target dev='vdb' bus='virtio'/><serial>data</serial>\n",
            "<source file='/run/a &apos;b&apos; &amp; &lt;c&gt;/seed.img'/>",
            "<target dev='vdc' bus='virtio'/><serial>seed</serial><readonly/>",
            "<on_reboot>destroy</on_reboot>",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("boot order"));
        assert!(!text.contains("<graphics") && !text.contains("<video"), "{text}");
        let text = described(json!({ "image": "debian", "display": "vnc" }), &HostFiles::default());
        let screen = "<graphics type='vnc' socket='/run/a &apos;b&apos; &amp; &lt;c&gt;/vnc/sock' sharePolicy='force-shared'/>";
        assert!(text.contains(screen) && text.contains("<video>"), "{text}");
        let text = described(json!({ "image": "debian", "network": "none" }), &HostFiles::default());
        assert!(text.contains("<boot order='1'/>"), "{text}");
        assert!(!text.contains("<interface") && !text.contains("<kernel") && !text.contains("vdb"), "{text}");
    }

    #[test]
    fn text_stays_text() {
        assert_eq!(escape("a b"), "a b");
        assert_eq!(escape("<a b='\"'>&\n\u{7}"), "&lt;a b=&apos;&quot;&apos;&gt;&amp;&#10;\u{fffd}");
        let evil = "x</cmdline><loader>/tmp/evil</loader><cmdline>";
        let text =
            described(json!({ "image": "debian", "kernel": "/k", "append": evil }), &HostFiles::default());
        assert!(!text.contains("<loader>"), "{text}");
        let socket = "path='/run/a &apos;b&apos; &amp; &lt;c&gt;/disk.sock'";
        assert!(text.contains(socket), "{text}");
    }
}
