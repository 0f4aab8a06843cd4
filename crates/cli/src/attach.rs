//! `spillway attach`: what to paste into a VMM's configuration. Text only; it opens nothing.
//!
//! Invariant: a path is quoted as the place that it is pasted into asks.

use crate::args::{Attach, Vmm};
use crate::error::Failure;
use std::path::Path;

/// The text for one VMM and one socket.
pub fn instructions(args: &Attach) -> Result<String, Failure> {
    let path = std::path::absolute(&args.vhost_user).map_err(|e| {
        Failure::usage(format!("--vhost-user {}: {e}: give a path", args.vhost_user.display()))
    })?;
    let text = path.to_str().filter(|t| !t.contains(|c: char| c.is_control())).ok_or_else(|| {
        Failure::usage(format!(
            "--vhost-user {}: not plain text: choose another path",
            Path::new(&path).display()
        ))
    })?;
    Ok(match args.vmm {
        Vmm::Qemu => qemu(text),
        Vmm::Libvirt => libvirt(text),
        Vmm::CloudHypervisor => cloud_hypervisor(text),
        Vmm::Firecracker => firecracker(text),
    })
}

/// For a POSIX shell.
fn shell(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if text.chars().all(plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

fn qemu(path: &str) -> String {
    let chardev = shell(&format!("socket,id=spillway0,path={},reconnect=1", path.replace(',', ",,")));
    format!(
        "\
# Add to the command line of qemu-system-x86_64. The guest's memory must be shared; keep size and -m the
# same. QEMU asks for one queue per vCPU: 'spillway serve --queues' must offer as many. Since QEMU 9.2,
# reconnect-ms=1000 stands for reconnect=1.
-m 1G \\
-machine q35,memory-backend=mem \\
-object memory-backend-memfd,id=mem,size=1G,share=on \\
-chardev {chardev} \\
-device vhost-user-blk-pci,chardev=spillway0
"
    )
}

fn libvirt(path: &str) -> String {
    let path = path.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;");
    format!(
        "\
<!-- Into <domain>: the guest's memory must be shared. -->
<memoryBacking>
  <source type='memfd'/>
  <access mode='shared'/>
</memoryBacking>

<!-- Into <devices>. queues: at most what 'spillway serve' offers (its option queues). libvirt's QEMU runs as a user of
     its own: serve with the options socket-mode 0660 and socket-group libvirt-qemu (or whichever it has), in a folder that
     it may pass through. Where AppArmor confines it, add a line to /etc/apparmor.d/local/abstractions/libvirt-qemu, with
     the socket's path: /PATH rw, -->
<disk type='vhostuser' device='disk'>
  <driver name='qemu' type='raw' queues='4'/>
  <source type='unix' path='{path}'>
    <reconnect enabled='yes' timeout='1'/>
  </source>
  <target dev='vda' bus='virtio'/>
</disk>
"
    )
}

fn cloud_hypervisor(path: &str) -> String {
    let socket = if path.contains(',') { format!("\"{path}\"") } else { path.to_owned() };
    let disk = shell(&format!("vhost_user=true,socket={socket},num_queues=4,queue_size=256"));
    format!(
        "\
# Add to the command line of cloud-hypervisor. The guest's memory must be shared. num_queues: at most what
# 'spillway serve --queues' offers.
--memory size=1G,shared=on \\
--disk {disk}
"
    )
}

fn firecracker(path: &str) -> String {
    let drive = serde_json::json!({ "drive_id": "rootfs", "socket": path, "is_root_device": true });
    format!(
        "\
# Send before the machine starts, to the socket of Firecracker's API (here /run/firecracker.sock). It uses one
# queue and does not reconnect: keep 'spillway serve' running for as long as the machine. A machine with such a
# drive cannot be snapshotted.
curl --unix-socket /run/firecracker.sock -X PUT http://localhost/drives/rootfs \\
  -H 'Content-Type: application/json' \\
  -d {}
",
        shell(&drive.to_string())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(path: &str, vmm: Vmm) -> String {
        instructions(&Attach { vhost_user: path.into(), vmm }).unwrap()
    }

    #[test]
    fn paths_are_quoted_for_where_they_go() {
        let path = "/run/it's, a <disk>&co.sock";
        assert!(text(path, Vmm::Qemu).contains(r"path=/run/it'\''s,, a <disk>&co.sock,reconnect=1'"));
        assert!(text(path, Vmm::Libvirt).contains("path='/run/it&apos;s, a &lt;disk>&amp;co.sock'"));
        assert!(text(path, Vmm::CloudHypervisor).contains(r#"socket="/run/it'\''s, a <disk>&co.sock","#));
        assert!(text(path, Vmm::Firecracker).contains(r#""socket":"/run/it'\''s, a <disk>&co.sock""#));
    }

    /// XML 1.0, 2.5: libvirt refuses all of it otherwise.
    #[test]
    fn comments_for_libvirt_are_comments() {
        let text = text("/run/vm--1.sock", Vmm::Libvirt);
        let comments: Vec<&str> =
            text.split("<!--").skip(1).filter_map(|rest| rest.split("-->").next()).collect();
        assert_eq!(comments.len(), 2);
        assert!(comments.iter().all(|comment| !comment.contains("--")), "{comments:?}");
    }

    #[test]
    fn relative_paths_become_absolute() {
        let cwd = std::env::current_dir().unwrap();
        let want = format!("path={}/vm.sock", cwd.display());
        assert!(text("vm.sock", Vmm::Qemu).contains(&want));
    }
}
