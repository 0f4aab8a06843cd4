//! What `spillway doctor` looks at. Owns what is enough of each thing.
//!
//! Invariant: what cannot be found out is a notice that says so, never a silent ok.

use super::Finding;
use crate::error::Failure;
use crate::host::Daemon;
use rustix::process::{Resource, getrlimit};
use spillway_api::client::{Client, ClientError};
use spillway_api::{Figures, HostDetails, Hypervisor, StoreDetails};
use spillway_control::kvm::{self, Accelerator};
use spillway_control::program::{self, Probe};
use spillway_control::{SupervisorError, bytes, output_within};
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const QEMU: &str = "qemu-system-x86_64";
/// Less memory than this for one machine and its disk is none.
const LEAST_MEMORY_BYTES: u64 = 512 << 20;
/// Linux AIO requests of one disk's VMM.
const AIO_OF_A_DISK: u64 = 17;
/// What io_uring's buffers took of the limit on locked memory before Linux 5.12.
const LEAST_MEMLOCK_BYTES: u64 = 8 << 20;
/// The version of Landlock from which on nothing is lacking.
const LANDLOCK: u32 = 6;
/// How long a program may take to say its version.
const DEADLINE: Duration = Duration::from_secs(10);
/// statfs(2).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// All of it, and whether spillwayd could be asked.
pub fn all(daemon: &Daemon) -> Result<(Vec<Finding>, bool), Failure> {
    let root = Path::new("/");
    let mut found = Vec::new();
    let qemu = version("qemu", QEMU, "apt-get install qemu-system-x86", "machines cannot run");
    found.push(if qemu.advice.is_none() {
        kvm()
    } else {
        Finding::notice("kvm", "cannot be probed without QEMU", "install QEMU first")
    });
    found.push(qemu);
    found.push(version("qemu-img", "qemu-img", "apt-get install qemu-utils", "images cannot be imported"));
    found.push(debugfs(root));
    let probed = program::probe();
    found.push(worker(probed.as_ref()));
    found.extend(probed.iter().map(|probe| io_uring(&probe.io_uring)));
    found.push(aio(root));
    found.push(huge_pages(root));
    found.push(memlock(getrlimit(Resource::Memlock).current));
    found.push(memory(root));
    found.push(swap(root));
    found.extend(probed.iter().map(|probe| landlock(probe.landlock)));
    found.push(seccomp(root));
    found.push(cgroup(root));
    let (socket, client) = socket(daemon)?;
    found.push(socket);
    let is_asked = client.is_some();
    let stores = client.as_ref().and_then(|client| client.list::<StoreDetails>("/v1/stores").ok());
    let folders: Vec<PathBuf> = match stores {
        Some(stores) => stores.items.into_iter().map(|store| store.path).collect(),
        None => ["/var/lib/spillway", "/var/tmp"]
            .map(PathBuf::from)
            .into_iter()
            .filter(|path| path.is_dir())
            .collect(),
    };
    found.extend(folders.iter().map(|folder| space(folder)));
    let host = client.as_ref().and_then(|client| client.get::<HostDetails>("/v1/host").ok());
    found.extend(host.as_ref().map(guest_users));
    if let Some(records) = host.filter(|host| !host.unreadable.is_empty()).map(|host| host.unreadable) {
        let keys: Vec<&str> = records.iter().map(|record| record.key.as_str()).collect();
        let text = format!("records cannot be read, and their objects are not changed: {}", keys.join(", "));
        found.push(Finding::problem(
            "records",
            text,
            "see the reason and the remedy of each in 'spillway host show'",
        ));
    }
    if let Some(figures) = client.and_then(|client| client.get::<Figures>("/v1/figures").ok()) {
        found.push(machines(&figures));
    }
    Ok((found, is_asked))
}

fn kvm() -> Finding {
    let advice = "load kvm_intel or kvm_amd, switch virtualization on in the firmware (in a virtual machine: nested), and be in the group kvm";
    let probed = || -> Result<Option<Accelerator>, String> {
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        // Nobody interrupts it.
        let (quiet, _other) = UnixStream::pair().map_err(|e| e.to_string())?;
        kvm::probe(QEMU, dir.path(), quiet.as_fd()).map_err(|e| e.to_string())
    };
    match probed() {
        Ok(Some(Accelerator::Kvm)) => Finding::ok("kvm", "a guest ran on it"),
        Ok(Some(Accelerator::Tcg(why))) => {
            Finding::notice("kvm", format!("guests run in software, many times slower: {why}"), advice)
        }
        Ok(None) => Finding::notice("kvm", "the probe was interrupted", "try again"),
        Err(why) => Finding::notice("kvm", format!("cannot be probed: {why}"), advice),
    }
}

/// A program's first line about itself.
fn version(check: &'static str, program: &str, install: &str, without: &str) -> Finding {
    let done = output_within(Command::new(program).arg("--version").stdin(Stdio::null()), DEADLINE);
    match done {
        Ok(done) if done.status.success() => {
            let text = String::from_utf8_lossy(&done.stdout);
            Finding::ok(check, text.lines().next().unwrap_or("it does not say its version").trim())
        }
        Ok(done) => {
            Finding::problem(check, format!("{program} --version: {}: {without}", done.status), install)
        }
        Err(e) => Finding::problem(check, format!("{program}: {e}: {without}"), install),
    }
}

fn debugfs(root: &Path) -> Finding {
    let found = ["usr/sbin/debugfs", "sbin/debugfs"]
        .into_iter()
        .map(|path| root.join(path))
        .find(|path| path.is_file());
    match found {
        Some(path) => Finding::ok("debugfs", path.display().to_string()),
        None => Finding::notice(
            "debugfs",
            "is not here: 'image check' cannot look into images",
            "apt-get install e2fsprogs",
        ),
    }
}

fn io_uring(usable: &Result<(), String>) -> Finding {
    match usable {
        Ok(()) => Finding::ok("io_uring", "can be used"),
        Err(why) => Finding::notice(
            "io_uring",
            format!("{why}: threads do the I/O of files, with more processor time"),
            "sysctl kernel.io_uring_disabled=0, and allow it in the container's seccomp profile",
        ),
    }
}

fn aio(root: &Path) -> Finding {
    let number = |name: &str| read(root, &format!("proc/sys/fs/{name}"))?.parse::<u64>().ok();
    let (Some(most), Some(used)) = (number("aio-max-nr"), number("aio-nr")) else {
        return Finding::problem(
            "aio",
            "this kernel has no Linux AIO: no VMM can have a disk",
            "use a kernel with CONFIG_AIO",
        );
    };
    let disks = most.saturating_sub(used) / AIO_OF_A_DISK;
    let text = format!("enough for {disks} more disks of VMMs");
    match disks {
        0 => Finding::problem("aio", text, "sysctl fs.aio-max-nr=1048576"),
        1..=99 => Finding::notice("aio", text, "sysctl fs.aio-max-nr=1048576"),
        _ => Finding::ok("aio", text),
    }
}

fn huge_pages(root: &Path) -> Finding {
    const FILE: &str = "sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let advice = format!("echo advise > /{FILE}");
    let Some(text) = read(root, FILE) else {
        return Finding::notice(
            "huge-pages",
            "this kernel has none for shared memory",
            "use one with CONFIG_TRANSPARENT_HUGEPAGE",
        );
    };
    // The one that holds is in brackets.
    let word = text.split('[').nth(1).and_then(|rest| rest.split(']').next()).unwrap_or("");
    match word {
        "never" | "deny" | "" => Finding::notice(
            "huge-pages",
            "off for shared memory: a disk in RAM is about a tenth slower",
            advice,
        ),
        word => Finding::ok("huge-pages", format!("{word} for shared memory")),
    }
}

fn memlock(limit: Option<u64>) -> Finding {
    match limit {
        Some(limit) if limit < LEAST_MEMLOCK_BYTES => Finding::notice(
            "memlock",
            format!("{} may be locked: kernels before 5.12 want more for io_uring", bytes(limit)),
            "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited",
        ),
        Some(limit) => Finding::ok("memlock", format!("{} may be locked", bytes(limit))),
        None => Finding::ok("memlock", "unlimited"),
    }
}

fn meminfo(root: &Path, key: &str) -> Option<u64> {
    let text = read(root, "proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn memory(root: &Path) -> Finding {
    let (Some(available), Some(total)) = (meminfo(root, "MemAvailable"), meminfo(root, "MemTotal")) else {
        return Finding::notice("memory", "/proc/meminfo does not say what is available", "mount /proc");
    };
    let text = format!("{} of {} available", bytes(available), bytes(total));
    if available < LEAST_MEMORY_BYTES {
        return Finding::problem("memory", text, "stop machines, or lower their memory or ram_bytes");
    }
    Finding::ok("memory", text)
}

fn swap(root: &Path) -> Finding {
    match meminfo(root, "SwapTotal") {
        Some(0) => Finding::ok("swap", "there is none"),
        Some(total) => Finding::notice(
            "swap",
            format!("{}: what guests write to RAM may go to it, slowly and unseen", bytes(total)),
            "swapoff -a, or MemorySwapMax=0 in the unit",
        ),
        None => Finding::notice("swap", "/proc/meminfo does not say", "mount /proc"),
    }
}

/// The program that serves disks.
fn worker(probed: Result<&Probe, &SupervisorError>) -> Finding {
    let own = env!("CARGO_PKG_VERSION");
    let advice = "install spillway, spillwayd and spillway-worker of one version";
    match probed {
        Ok(probe) if probe.version == own => Finding::ok("worker", format!("version {own}")),
        Ok(probe) => {
            Finding::problem("worker", format!("version {}, and this is {own}", probe.version), advice)
        }
        Err(e) => Finding::problem("worker", e.to_string(), advice),
    }
}

fn landlock(version: u32) -> Finding {
    let advice = "use Linux 6.12 or later, with landlock in the kernel's lsm= list";
    match version {
        0 => Finding::notice(
            "landlock",
            "this kernel has none: workers and qemu-img are confined by system calls alone",
            advice,
        ),
        1..LANDLOCK => Finding::notice(
            "landlock",
            format!("version {version}: it covers files, not all of devices, network and signals"),
            advice,
        ),
        _ => Finding::ok("landlock", format!("version {version}")),
    }
}

fn seccomp(root: &Path) -> Finding {
    let actions = read(root, "proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    if actions.split_whitespace().any(|action| action == "kill_process") {
        return Finding::ok("seccomp", "filters of system calls can be set");
    }
    Finding::notice(
        "seccomp",
        "no filters of system calls: workers are less confined",
        "use a kernel with CONFIG_SECCOMP_FILTER",
    )
}

fn cgroup(root: &Path) -> Finding {
    let Some(controllers) = read(root, "sys/fs/cgroup/cgroup.controllers") else {
        return Finding::notice(
            "cgroup",
            "version 2 is not mounted: memory limits of units are not seen by disks",
            "boot with systemd.unified_cgroup_hierarchy=1",
        );
    };
    match controllers.split_whitespace().any(|controller| controller == "memory") {
        true => Finding::ok("cgroup", "version 2, with the memory controller"),
        false => Finding::notice(
            "cgroup",
            "version 2 without the memory controller",
            "boot with cgroup_enable=memory",
        ),
    }
}

/// The daemon's socket, and the daemon if it answers.
fn socket(daemon: &Daemon) -> Result<(Finding, Option<Client>), Failure> {
    let path = daemon.local("doctor")?;
    let client = daemon.client()?;
    let rights = fs::metadata(&path).ok().filter(|found| found.file_type().is_socket());
    let rights = rights.map(|found| found.permissions().mode() & 0o777);
    let path = path.display();
    let asked = client.list::<StoreDetails>("/v1/stores");
    let has_answered = asked.is_ok();
    let finding = match asked {
        Ok(_) if rights.is_some_and(|rights| rights & 0o002 != 0) => Finding::problem(
            "spillwayd",
            format!("{path} can be used by everybody on this host, and who can use it is root here"),
            "start it with --socket-mode 0600, or 0660 and a group",
        ),
        Ok(_) => Finding::ok("spillwayd", format!("answers on {path} ({:04o})", rights.unwrap_or(0))),
        Err(ClientError::Connect { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            let advice = "run as root or as a member of the socket's group";
            Finding::problem("spillwayd", format!("{path}: permission denied"), advice)
        }
        Err(ClientError::Connect { .. }) => {
            let advice = "systemctl start spillwayd, or say where it listens with --socket";
            Finding::notice("spillwayd", format!("nobody listens on {path}"), advice)
        }
        Err(e) => Finding::problem("spillwayd", e.to_string(), "see journalctl -u spillwayd"),
    };
    Ok((finding, has_answered.then_some(client)))
}

fn space(folder: &Path) -> Finding {
    let at = folder.display();
    let (Ok(space), Ok(kind)) = (rustix::fs::statvfs(folder), rustix::fs::statfs(folder)) else {
        return Finding::problem(
            "space",
            format!("{at}: cannot be looked at"),
            "mount it, or give the right --state",
        );
    };
    let (size, free) = (space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize);
    if kind.f_type == TMPFS_MAGIC {
        return Finding::problem(
            "space",
            format!("{at} is in memory: no overflow can be there"),
            "use a folder on a local disk",
        );
    }
    enough(&at.to_string(), size, free)
}

fn enough(at: &str, size: u64, free: u64) -> Finding {
    let text = format!("{at}: {} of {} free", bytes(free), bytes(size));
    let advice = "delete image versions that nobody uses, or add a store on a larger disk";
    match free {
        _ if free < size / 20 => Finding::problem("space", text, advice),
        _ if free < size / 5 => Finding::notice("space", text, advice),
        _ => Finding::ok("space", text),
    }
}

/// By which users machines' QEMUs run.
fn guest_users(host: &HostDetails) -> Finding {
    match (&host.guest_users, host.hypervisor) {
        (Some(range), _) => {
            Finding::ok("guest-users", format!("each machine's QEMU runs as a user of its own, of {range}"))
        }
        (None, Hypervisor::Libvirt) => Finding::ok("guest-users", "machines' QEMUs run as libvirt's user"),
        (None, Hypervisor::None) => Finding::ok("guest-users", "spillwayd starts no QEMU"),
        (None, Hypervisor::Qemu) => Finding::notice(
            "guest-users",
            "machines' QEMUs run as spillwayd's own user: a guest that breaks out of its QEMU has all that spillwayd has",
            "run spillwayd as root, without --guest-users none: each gets a user of its own",
        ),
    }
}

fn machines(figures: &Figures) -> Finding {
    let sum = |of: fn(&spillway_api::CatalogFigures) -> u64| figures.catalogs.iter().map(of).sum::<u64>();
    let (full, failed) = (sum(|c| c.levels.full), sum(|c| c.machines.failed));
    let (unresponsive, degraded) = (sum(|c| c.unresponsive_disks), sum(|c| c.levels.degraded));
    let text = format!(
        "{} run, {failed} failed; write caches: {full} full, {} nearly full, {degraded} degraded, {unresponsive} unresponsive",
        sum(|c| c.machines.running),
        sum(|c| c.levels.warning),
    );
    match () {
        () if full + failed + degraded > 0 => {
            Finding::problem("machines", text, "see 'spillway machine list' and 'spillway top'")
        }
        () if unresponsive + sum(|c| c.levels.warning) > 0 => {
            Finding::notice("machines", text, "see 'spillway top'")
        }
        () => Finding::ok("machines", text),
    }
}

fn read(root: &Path, path: &str) -> Option<String> {
    fs::read_to_string(root.join(path)).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    /// A host with these files.
    fn host(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn files_of_the_host_are_read_as_they_are_written() {
        use State::{Notice, Ok, Problem};
        const MEMINFO: &str = "proc/meminfo";
        const SHMEM: &str = "sys/kernel/mm/transparent_hugepage/shmem_enabled";
        type Check = fn(&Path) -> Finding;
        type Files = &'static [(&'static str, &'static str)];
        let cases: [(Check, Files, State, &str); 17] = [
            (swap, &[(MEMINFO, "MemTotal: 1 kB\nSwapTotal:       0 kB\n")], Ok, "none"),
            (swap, &[(MEMINFO, "SwapTotal:  1048576 kB\n")], Notice, "1.0 GiB"),
            (swap, &[], Notice, "does not say"),
            (
                memory,
                &[(MEMINFO, "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")],
                Ok,
                "4.0 GiB of 8.0 GiB",
            ),
            (memory, &[(MEMINFO, "MemTotal: 8388608 kB\nMemAvailable: 1024 kB\n")], Problem, "1.0 MiB"),
            (memory, &[(MEMINFO, "nonsense")], Notice, "does not say"),
            (huge_pages, &[(SHMEM, "always within_size [advise] never deny force\n")], Ok, "advise"),
            (huge_pages, &[(SHMEM, "always within_size advise [never] deny force\n")], Notice, "off"),
            (huge_pages, &[], Notice, "has none"),
            (aio, &[("proc/sys/fs/aio-max-nr", "65536\n"), ("proc/sys/fs/aio-nr", "0\n")], Ok, "3855"),
            (
                aio,
                &[("proc/sys/fs/aio-max-nr", "65536\n"), ("proc/sys/fs/aio-nr", "65535\n")],
                Problem,
                "0 more",
            ),
            (aio, &[], Problem, "no Linux AIO"),
            (
                seccomp,
                &[("proc/sys/kernel/seccomp/actions_avail", "kill_process kill_thread trap errno\n")],
                Ok,
                "filters",
            ),
            (seccomp, &[], Notice, "no filters"),
            (cgroup, &[("sys/fs/cgroup/cgroup.controllers", "cpu memory pids\n")], Ok, "memory"),
            (cgroup, &[("sys/fs/cgroup/cgroup.controllers", "cpu\n")], Notice, "without"),
            (debugfs, &[("usr/sbin/debugfs", "")], Ok, "debugfs"),
        ];
        for (check, files, state, word) in cases {
            let dir = host(files);
            let found = check(dir.path());
            assert!(found.state == state && found.text.contains(word), "{files:?}: {found:?}");
            assert_eq!(found.advice.is_none(), state == Ok, "{found:?}");
        }
    }

    #[test]
    fn qemus_that_run_as_the_daemon_does_are_told_of() {
        let budget = serde_json::json!({
            "host_memory_bytes": 0, "reserve_bytes": 0, "memory_limit_bytes": 0, "guest_bytes": 0, "ram_bytes": 0,
            "ram_limit_bytes": 0, "ram_guaranteed_bytes": 0, "ram_guarantee_limit_bytes": 0, "host_cpus": 1,
            "vcpus": 0, "vcpu_limit": 0, "waiting": 0
        });
        let state = |hypervisor: &str, guest_users: Option<&str>| {
            let host = serde_json::json!({
                "closed": false, "busy": 0, "hypervisor": hypervisor, "guest_users": guest_users, "version": "1",
                "unreadable": [], "budget": budget
            });
            super::guest_users(&serde_json::from_value(host).unwrap()).state
        };
        assert_eq!(state("qemu", Some("100000-165535")), State::Ok);
        assert_eq!(state("qemu", None), State::Notice);
        assert_eq!([state("libvirt", None), state("none", None)], [State::Ok, State::Ok]);
    }

    #[test]
    fn what_is_enough() {
        use State::{Notice, Ok, Problem};
        let gib = 1u64 << 30;
        assert_eq!([4, 10, 50].map(|free| enough("x", 100 * gib, free * gib).state), [Problem, Notice, Ok]);
        assert_eq!([0, 3, 6, 9].map(|version| landlock(version).state), [Notice, Notice, Ok, Ok]);
        assert_eq!([Some(65536), Some(8 << 20), None].map(|limit| memlock(limit).state), [Notice, Ok, Ok]);
        assert_eq!(io_uring(&Err("no".into())).state, Notice);
        assert_eq!(version("qemu", "/nonexistent/qemu", "install it", "nothing runs").state, Problem);
        assert_eq!(space(Path::new("/nonexistent")).state, Problem);
    }
}
