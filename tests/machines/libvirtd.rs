//! A libvirtd of a test's own: as root in a mount namespace, in which its folders are empty and it runs QEMU as a user of
//! its own, as on any host; as another user that user's session. Owns both; everything ends with the value.

use rustix::process::{Pid, Signal};
use spillway_testkit::process::wait_until;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Empty folders; the user that Debian's package makes, if it is not installed; a `/dev/kvm` that this user may open, as
/// udev makes it: where it may not, libvirt probes QEMU again and again; and settings: no cgroups, whose names the libvirtd
/// of another test has as well, and no second daemon for logs.
const NAMESPACE: &str = r#"
set -e
for folder in /run/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt /etc/libvirt; do
    mkdir -p $folder
    mount -t tmpfs -o mode=0755 tmpfs $folder
done
if ! getent passwd libvirt-qemu >/dev/null; then
    cp /etc/passwd /etc/group "$1"
    echo 'libvirt-qemu:x:64055:64055::/nonexistent:/bin/false' >> "$1/passwd"
    echo 'libvirt-qemu:x:64055:' >> "$1/group"
    mount --bind "$1/passwd" /etc/passwd
    mount --bind "$1/group" /etc/group
fi
if [ -c /dev/kvm ]; then
    mount -t tmpfs -o mode=0755,dev tmpfs "$1"
    mknod -m 0666 "$1/kvm" c $(stat -c '0x%t 0x%T' /dev/kvm)
    mount --bind "$1/kvm" /dev/kvm
fi
echo 'auth_unix_rw = "none"' > /etc/libvirt/libvirtd.conf
printf 'stdio_handler = "file"\ncgroup_controllers = []\n' > /etc/libvirt/qemu.conf
echo ready
exec cat
"#;

pub struct Libvirtd {
    dir: PathBuf,
    /// Holds the namespace, until its input ends.
    namespace: Option<Child>,
    daemon: Option<Child>,
}

impl Libvirtd {
    /// One that runs, whose files are in this folder. `None`: there is none here, which is said.
    pub fn new(dir: &Path) -> Option<Libvirtd> {
        if ["/usr/sbin/libvirtd", "/usr/bin/virsh"].iter().any(|program| !Path::new(program).exists()) {
            spillway_testkit::skip("libvirt is not installed: run 'make install-deps'");
            return None;
        }
        std::fs::create_dir(dir).unwrap();
        let namespace = rustix::process::geteuid().is_root().then(|| {
            let mut unshare = Command::new("unshare");
            unshare.args(["--mount", "--propagation", "private", "sh", "-c", NAMESPACE, "sh"]).arg(dir);
            let mut holder = unshare.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            let mut ready = String::new();
            BufReader::new(holder.stdout.take().unwrap()).read_line(&mut ready).unwrap();
            assert_eq!(ready, "ready\n", "a namespace for libvirtd");
            holder
        });
        let mut libvirtd = Libvirtd { dir: dir.to_owned(), namespace, daemon: None };
        libvirtd.start();
        Some(libvirtd)
    }

    pub fn uri(&self) -> &'static str {
        if self.namespace.is_some() { "qemu:///system" } else { "qemu:///session" }
    }

    /// A program that finds this libvirtd.
    pub fn command(&self, program: &Path) -> Command {
        match &self.namespace {
            Some(holder) => {
                let mut command = Command::new("nsenter");
                command.args(["--mount", "--target", &holder.id().to_string(), "--"]).arg(program);
                command
            }
            None => {
                let mut command = Command::new(program);
                command.env("HOME", &self.dir).env("LIBVIRT_AUTOSTART", "0");
                for name in ["XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"] {
                    command.env(name, &self.dir);
                }
                command
            }
        }
    }

    pub fn start(&mut self) {
        let log = File::options().create(true).append(true).open(self.dir.join("log")).unwrap();
        let mut libvirtd = self.command("/usr/sbin/libvirtd".as_ref());
        if self.namespace.is_some() {
            // By default it is beside the folders.
            libvirtd.args(["--pid-file", "/run/libvirt/libvirtd.pid"]);
        }
        let libvirtd = libvirtd.stdin(Stdio::null()).stderr(log.try_clone().unwrap()).stdout(log);
        self.daemon = Some(libvirtd.spawn().unwrap());
        let socket = self.runtime().join("libvirt-sock");
        let listens = || UnixStream::connect(&socket).is_ok().then_some(());
        wait_until(Duration::from_secs(30), listens)
            .unwrap_or_else(|| panic!("libvirtd does not listen at {}: {}", socket.display(), self.log()));
    }

    /// Where its sockets are, as seen from here.
    fn runtime(&self) -> PathBuf {
        match &self.namespace {
            Some(holder) => PathBuf::from(format!("/proc/{}/root/run/libvirt", holder.id())),
            None => self.dir.join("libvirt"),
        }
    }

    /// Where it notes the processes of domains, and what they are.
    fn pids(&self) -> PathBuf {
        self.runtime().join(if self.namespace.is_some() { "qemu" } else { "qemu/run" })
    }

    /// At once, as by a crash.
    pub fn kill(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    pub fn pid(&self) -> u32 {
        self.daemon.as_ref().unwrap().id()
    }

    /// What virsh answers.
    pub fn virsh(&self, arguments: &[&str]) -> String {
        let mut virsh = self.command("/usr/bin/virsh".as_ref());
        let done = virsh.args(["--quiet", "--connect", self.uri()]).args(arguments).output().unwrap();
        assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    }

    /// The names of all domains.
    pub fn domains(&self) -> Vec<String> {
        let names = self.virsh(&["list", "--all", "--name"]);
        names.lines().map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect()
    }

    /// What it has said.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }
}

impl Drop for Libvirtd {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        // What it has begun is nobody's child; its QEMUs have namespaces of their own.
        let kill = |pid: i32| _ = rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
        for entry in std::fs::read_dir(self.pids()).into_iter().flatten().flatten() {
            if entry.path().extension() != Some("pid".as_ref())
                || !entry.path().with_extension("xml").exists()
            {
                continue;
            }
            let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
            if let Ok(pid) = text.trim().parse() {
                kill(pid);
            }
        }
        let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
        if let Some(mut holder) = self.namespace.take() {
            let ours = namespace(&holder.id().to_string());
            for entry in std::fs::read_dir("/proc").unwrap().flatten() {
                let name = entry.file_name();
                let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
                if ours.is_some() && namespace(name.to_str().unwrap()) == ours {
                    kill(pid);
                }
            }
            let _ = holder.wait();
        }
    }
}
