//! A machine as a libvirt domain: its description (libvirt, formatdomain). Owns the domain's name and the metadata that
//! marks it as ours; asks libvirt nothing.
//!
//! Invariant: a name, a path or a text never becomes another element or attribute.

use super::qemu::{self, HostFiles};
use crate::error::HostError;
use spillway_api::{CatalogSpec, DisplayKind, Machine, Network, Ready};
use spillway_control::kvm::Accelerator;
use std::path::Path;

/// Namespace of our metadata.
pub const NAMESPACE: &str = "urn:spillway:machine";

/// Longest socket address (unix(7)), without the zero at its end.
const MOST_SOCKET_BYTES: usize = 107;

/// Refuses settings that libvirt does not support.
pub fn check_supported(spec: &CatalogSpec) -> Result<(), HostError> {
    match (&spec.ready, &spec.network) {
        (Some(Ready::Tcp(_)), Network::User) => Err(HostError::invalid(
            "ready: tcp with network user is QEMU's alone: with libvirt take a bridge, agent or serial",
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
    let (kind, cpu) = match accelerator {
        Accelerator::Kvm => ("kvm", "host-passthrough"),
        Accelerator::Tcg(_) => ("qemu", "maximum"),
    };
    let path = |name: &Path| escape(&folder.join(name).to_string_lossy());
    let (uuid, vcpus, mib) = (escape(&machine.identity.uuid), spec.vcpus, spec.memory_bytes >> 20);
    let at_reboot = if ends_at_reboot { "destroy" } else { "restart" };
    let (name, disk_socket) = (escape(&name(machine.name.as_str())), path(disk_socket.as_ref()));
    // A kernel given by the host takes the first place in the boot order.
    let (kernel, boot) = match &spec.kernel {
        Some(kernel) => (direct_boot(kernel, spec, accelerator), ""),
        None => (String::new(), "<boot order='1'/>"),
    };
    let (queues, disks) = (files.queues(spec), file_disks(folder, files));
    let network = network(&spec.network, &machine.identity.mac);
    let console = path(qemu::SERIAL.as_ref());
    let screen = match spec.display {
        DisplayKind::None => String::new(),
        DisplayKind::Vnc => screen(&path(Path::new(qemu::SCREEN_FOLDER).join(qemu::SCREEN).as_ref())),
    };
    format!(
        "\
<domain type='{kind}'>
  <name>{name}</name>
  <uuid>{uuid}</uuid>
  <metadata><spillway:machine xmlns:spillway='{NAMESPACE}' uuid='{uuid}'/></metadata>
  <memory unit='MiB'>{mib}</memory>
  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
  <vcpu>{vcpus}</vcpu>
  <sysinfo type='smbios'><system>
    <entry name='manufacturer'>Spillway</entry>
    <entry name='serial'>{uuid}</entry>
    <entry name='uuid'>{uuid}</entry>
  </system></sysinfo>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <smbios mode='sysinfo'/>
{kernel}  </os>
  <features><acpi/><apic/></features>
  <cpu mode='{cpu}'><topology sockets='1' cores='{vcpus}' threads='1'/></cpu>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>{at_reboot}</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <disk type='vhostuser' device='disk'>
      <driver name='qemu' type='raw' queues='{queues}'/>
      <source type='unix' path='{disk_socket}'><reconnect enabled='yes' timeout='1'/></source>
      <target dev='vda' bus='virtio'/>{boot}
    </disk>
{disks}{network}{screen}    <serial type='unix'><source mode='connect' path='{console}'/><target port='0'/></serial>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <rng model='virtio'><backend model='builtin'/></rng>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
  </devices>
</domain>
"
    )
}

fn direct_boot(kernel: &str, spec: &CatalogSpec, accelerator: &Accelerator) -> String {
    let initrd = spec.initrd.as_ref().map(|initrd| format!("    <initrd>{}</initrd>\n", escape(initrd)));
    let (kernel, append) = (escape(kernel), escape(&qemu::append(spec, accelerator)));
    format!("    <kernel>{kernel}</kernel>\n{}    <cmdline>{append}</cmdline>\n", initrd.unwrap_or_default())
}

/// Describes a screen on this socket.
fn screen(socket: &str) -> String {
    format!(
        "\
    <graphics type='vnc' socket='{socket}' sharePolicy='force-shared'/>
    <video><model type='vga'/></video>
    <input type='tablet' bus='virtio'/>
"
    )
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

fn network(network: &Network, mac: &str) -> String {
    let (kind, source) = match network {
        Network::None => return String::new(),
        Network::User => ("user", String::new()),
        Network::Bridge(bridge) => ("bridge", format!("<source bridge='{}'/>", escape(bridge))),
    };
    let mac = escape(mac);
    format!(
        "    <interface type='{kind}'>{source}<mac address='{mac}'/><model type='virtio'/><rom enabled='no'/></interface>\n"
    )
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
    use serde_json::json;

    fn described(spec: serde_json::Value, files: &HostFiles) -> String {
        let machine: Machine = serde_json::from_value(json!({
            "name": "desk-001", "catalog": "desk", "number": 1, "created": "2026-01-01T00:00:00Z",
            "identity": { "uuid": "11111111-2222-4333-8444-555555555555", "mac": "52:54:00:12:34:56" },
        }))
        .unwrap();
        let spec: CatalogSpec = serde_json::from_value(spec).unwrap();
        describe(
            &machine,
            &spec,
            &Accelerator::Kvm,
            (Path::new("/run/a 'b' & <c>"), "disk.sock"),
            files,
            true,
        )
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
            "<interface type='bridge'><source bridge='br0'/><mac address='52:54:00:12:34:56'/>",
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
