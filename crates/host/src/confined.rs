//! Runs other programs on untrusted files so that they can do no harm. Owns the confinement of the child; knows nothing
//! of the program's purpose.
//!
//! Invariant: the child can open nothing but the files that were passed as descriptors, the folders that it may
//! change, and the system's programs and libraries; it creates no socket and no device; it outlives neither this process
//! nor its deadline, and its output is bounded.

#![expect(unsafe_code, reason = "between fork and exec")]

use crate::error::HostError;
use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, Scope,
};
use rustix::process::{Resource, Rlimit, Signal};
use rustix::thread::{CapabilitySet, CapabilitySets};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use spillway_api::ErrorCode;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Parts of the system that every program may read and execute.
const SYSTEM: [&str; 6] = ["/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache"];
/// What else a program reads that looks up names of hosts and checks certificates.
const LOOKUPS: [&str; 7] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/ssl/certs",
];
/// Largest output of a program.
const MOST_SAID_BYTES: usize = 1 << 20;
/// Largest address space of a program.
const MEMORY_BYTES: u64 = 4 << 30;
/// System calls that no program needs to read files.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_mknodat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mknod,
    libc::SYS_kill,
    libc::SYS_tkill,
    // abort(3) ends the process all the same.
    libc::SYS_tgkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_open_by_handle_at,
    libc::SYS_add_key,
    libc::SYS_keyctl,
    libc::SYS_request_key,
];

/// Commands that name who gets the signals of a file: linux/fcntl.h, asm-generic/sockios.h.
const F_SETOWN_EX: i32 = 15;
const FIOSETOWN: u64 = 0x8901;
const SIOCSPGRP: u64 = 0x8902;

/// A program with its files and its deadline.
pub struct Confined<'a> {
    command: Command,
    program: String,
    reads: Vec<&'a File>,
    writes: Vec<PathBuf>,
    changes: Vec<PathBuf>,
    has_network: bool,
    stdin: Option<File>,
    deadline: Duration,
}

/// Result of a program.
pub struct ConfinedOutput {
    /// Whether it ended with status 0.
    pub success: bool,
    /// Standard output.
    pub said: Vec<u8>,
    /// End of its standard error, for people.
    pub complaint: String,
}

/// Path by which a program opens a file that was passed to it.
pub fn path_of(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Whether the kernel can confine file access (Landlock).
pub fn is_supported() -> bool {
    // SAFETY: with this flag the call reads no memory and creates nothing.
    let version = unsafe {
        // linux/landlock.h: LANDLOCK_CREATE_RULESET_VERSION.
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0usize, 1u32)
    };
    version > 0
}

impl<'a> Confined<'a> {
    /// Prepares a program of the system.
    pub fn new(program: &str, deadline: Duration) -> Confined<'a> {
        let mut command = Command::new(program);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
        Confined {
            command,
            program: program.to_owned(),
            reads: vec![],
            writes: vec![],
            changes: vec![],
            has_network: false,
            stdin: None,
            deadline,
        }
    }

    /// Adds an argument.
    pub fn arg(mut self, argument: impl AsRef<std::ffi::OsStr>) -> Confined<'a> {
        self.command.arg(argument);
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: &str, value: &str) -> Confined<'a> {
        self.command.env(name, value);
        self
    }

    /// Passes a file that the program may read at [`path_of`] it.
    pub fn may_read(mut self, file: &'a File) -> Confined<'a> {
        self.reads.push(file);
        self
    }

    /// Adds a file that the program may change, or a folder whose files it may change.
    pub fn may_write(mut self, path: &Path) -> Confined<'a> {
        self.writes.push(path.to_owned());
        self
    }

    /// Adds a folder in which the program may also create and remove files and folders.
    pub fn may_change(mut self, path: &Path) -> Confined<'a> {
        self.changes.push(path.to_owned());
        self
    }

    /// Allows connections to other hosts, over IP and nothing else, and what looks up their names.
    pub fn with_network(mut self) -> Confined<'a> {
        self.has_network = true;
        self
    }

    /// Sets the standard input; there is none by default.
    pub fn stdin(mut self, file: File) -> Confined<'a> {
        self.stdin = Some(file);
        self
    }

    /// Runs the program to its end. Calls `hear` with each piece of its standard output, and now and then with nothing;
    /// an error of it ends the program.
    pub fn run(
        mut self,
        mut hear: impl FnMut(&[u8]) -> Result<(), HostError>,
    ) -> Result<ConfinedOutput, HostError> {
        let mut ruleset = Some(self.ruleset()?);
        let filter = filter(self.has_network).map_err(|e| self.cannot(&e))?;
        let given: Vec<i32> = self.reads.iter().map(|file| file.as_raw_fd()).collect();
        let parent = rustix::process::getpid();
        let confine = move || -> io::Result<()> {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            if rustix::process::getppid() != Some(parent) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            rustix::process::setsid()?;
            let limit = |bytes| Rlimit { current: Some(bytes), maximum: Some(bytes) };
            rustix::process::setrlimit(Resource::As, limit(MEMORY_BYTES))?;
            rustix::process::setrlimit(Resource::Core, limit(0))?;
            for &fd in &given {
                // SAFETY: a number and a constant.
                if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            // Without new privileges, executing the program does not restore root's.
            rustix::thread::set_no_new_privs(true)?;
            let has = rustix::thread::capabilities(None)?;
            let kept = CapabilitySet::DAC_OVERRIDE & has.permitted;
            let sets =
                CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
            rustix::thread::set_capabilities(None, sets)?;
            let ruleset = ruleset.take().ok_or(io::ErrorKind::Other)?;
            ruleset.restrict_self().map_err(|_| io::ErrorKind::PermissionDenied)?;
            seccompiler::apply_filter(&filter).map_err(|_| io::ErrorKind::PermissionDenied)?;
            Ok(())
        };
        // SAFETY: between fork and exec it only makes system calls; ruleset, filter and list were made before.
        unsafe { self.command.pre_exec(confine) };
        let stdin = self.stdin.take().map_or_else(Stdio::null, Stdio::from);
        self.command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = self.command.spawn().map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => HostError::new(
                ErrorCode::Unavailable,
                format!("{} is not installed (Debian: {})", self.program, package(&self.program)),
            ),
            _ => self.cannot(&format!("cannot be started: {e}")),
        })?;
        let mut child = Running(child);
        child.attend(Instant::now() + self.deadline, &mut hear, &|why| self.cannot(&why))
    }

    fn cannot(&self, why: &str) -> HostError {
        HostError::new(ErrorCode::Internal, format!("{}: {why}", self.program))
    }

    fn ruleset(&self) -> Result<RulesetCreated, HostError> {
        let build = || {
            let read = AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::Execute;
            let mut ruleset = Ruleset::default()
                .set_compatibility(CompatLevel::BestEffort)
                .handle_access(AccessFs::from_all(ABI::V5))?
                .scope(Scope::Signal)?
                .create()?;
            for path in SYSTEM.iter().map(Path::new).filter(|path| path.exists()) {
                let access = if path.is_dir() { read } else { AccessFs::ReadFile.into() };
                ruleset = ruleset.add_rule(PathBeneath::new(PathFd::new(path)?, access))?;
            }
            // The program itself may be elsewhere.
            let program = Path::new(&self.program);
            if program.is_absolute() {
                let access = AccessFs::ReadFile | AccessFs::Execute;
                ruleset = ruleset.add_rule(PathBeneath::new(PathFd::new(program)?, access))?;
            }
            let names = LOOKUPS.iter().map(Path::new).filter(|path| self.has_network && path.exists());
            for path in names {
                let access = if path.is_dir() { read } else { AccessFs::ReadFile.into() };
                ruleset = ruleset.add_rule(PathBeneath::new(PathFd::new(path)?, access))?;
            }
            for file in &self.reads {
                let access: BitFlags<AccessFs> = AccessFs::ReadFile.into();
                ruleset = ruleset.add_rule(PathBeneath::new(*file, access))?;
            }
            let write = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
            for path in &self.writes {
                ruleset = ruleset.add_rule(PathBeneath::new(PathFd::new(path)?, write))?;
            }
            let change = write
                | AccessFs::ReadDir
                | AccessFs::MakeReg
                | AccessFs::MakeDir
                | AccessFs::RemoveFile
                | AccessFs::RemoveDir
                | AccessFs::Refer;
            for path in &self.changes {
                ruleset = ruleset.add_rule(PathBeneath::new(PathFd::new(path)?, change))?;
            }
            let null = AccessFs::ReadFile | AccessFs::WriteFile;
            Ok::<_, anyhow::Error>(ruleset.add_rule(PathBeneath::new(PathFd::new("/dev/null")?, null))?)
        };
        build().map_err(|e| self.cannot(&format!("cannot be confined: {e:#}")))
    }
}

/// Debian package of a program.
fn package(program: &str) -> &str {
    match program {
        "qemu-img" => "qemu-utils",
        "debugfs" | "mke2fs" => "e2fsprogs",
        "mkntfs" => "ntfs-3g",
        "xz" => "xz-utils",
        other => other,
    }
}

/// Calls that a program with a network may make. A pair of sockets reaches nobody else.
const OF_NETWORK: [libc::c_long; 3] = [libc::SYS_socket, libc::SYS_socketpair, libc::SYS_connect];

/// Builds a filter that makes these calls fail with an error, and those that end other processes. With a network, sockets of IP can be made, and no others: a
/// socket of this host would reach what trusts this user.
fn filter(has_network: bool) -> Result<BpfProgram, String> {
    let arch = std::env::consts::ARCH.try_into().map_err(|e| format!("{e}"))?;
    let refused = REFUSED.iter().filter(|call| !has_network || !OF_NETWORK.contains(call));
    let mut rules: BTreeMap<libc::c_long, Vec<SeccompRule>> =
        refused.map(|&call| (call, Vec::new())).collect();
    if has_network {
        let differs = |family: libc::c_int| {
            SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, family as u64)
        };
        let of_ip = [libc::AF_INET, libc::AF_INET6].map(differs);
        let of_ip = of_ip.into_iter().collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())?;
        rules.insert(libc::SYS_socket, vec![SeccompRule::new(of_ip).map_err(|e| e.to_string())?]);
    }
    // Another process is not ended by its limits, or by signals of a file that it owns.
    let is = |argument, value: u64| {
        let equal = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value);
        equal.and_then(|equal| SeccompRule::new(vec![equal])).map_err(|e| e.to_string())
    };
    let another = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, 0);
    let another = another.and_then(|another| SeccompRule::new(vec![another])).map_err(|e| e.to_string())?;
    rules.insert(libc::SYS_prlimit64, vec![another]);
    let owners = [libc::F_SETOWN, F_SETOWN_EX].map(|command| is(1, command as u64));
    rules.insert(libc::SYS_fcntl, owners.into_iter().collect::<Result<_, _>>()?);
    let owners = [FIOSETOWN, SIOCSPGRP].map(|command| is(1, command));
    rules.insert(libc::SYS_ioctl, owners.into_iter().collect::<Result<_, _>>()?);
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch).map_err(|e| e.to_string())?;
    filter.try_into().map_err(|e: seccompiler::BackendError| e.to_string())
}

/// A child process that is killed when this is dropped.
struct Running(Child);

impl Running {
    fn attend(
        &mut self,
        until: Instant,
        hear: &mut dyn FnMut(&[u8]) -> Result<(), HostError>,
        cannot: &dyn Fn(String) -> HostError,
    ) -> Result<ConfinedOutput, HostError> {
        let mut stdout = self.0.stdout.take().ok_or_else(|| cannot("no standard output".into()))?;
        let mut stderr = self.0.stderr.take().ok_or_else(|| cannot("no standard error".into()))?;
        let complaint = std::thread::spawn(move || {
            let mut kept = Vec::new();
            let mut part = [0; 4096];
            while let Ok(n @ 1..) = stderr.read(&mut part) {
                kept.extend_from_slice(&part[..n]);
                let surplus = kept.len().saturating_sub(4096);
                kept.drain(..surplus);
            }
            String::from_utf8_lossy(&kept).trim().to_owned()
        });
        let mut said = Vec::new();
        let mut part = [0; 4096];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(cannot("it took too long".into()));
            }
            let wait = left.min(Duration::from_millis(200));
            let wait = rustix::time::Timespec { tv_sec: 0, tv_nsec: wait.as_nanos() as i64 };
            let mut fds = [rustix::event::PollFd::new(&stdout, rustix::event::PollFlags::IN)];
            match rustix::event::poll(&mut fds, Some(&wait)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {
                    hear(&[])?;
                    continue;
                }
                Ok(_) => {}
                Err(e) => return Err(cannot(e.to_string())),
            }
            let n = stdout.read(&mut part).map_err(|e| cannot(e.to_string()))?;
            if n == 0 {
                break;
            }
            hear(&part[..n])?;
            if said.len() + n <= MOST_SAID_BYTES {
                said.extend_from_slice(&part[..n]);
            }
        }
        let status = self.0.wait().map_err(|e| cannot(e.to_string()))?;
        let complaint = complaint.join().unwrap_or_default();
        Ok(ConfinedOutput { success: status.success(), said, complaint })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn confined(program: &str) -> Confined<'_> {
        Confined::new(program, Duration::from_secs(20))
    }

    fn on(_: &[u8]) -> Result<(), HostError> {
        Ok(())
    }

    #[test]
    fn it_reads_what_it_was_given_and_nothing_else() {
        assert!(is_supported(), "this test needs Landlock");
        let dir = tempfile::tempdir().unwrap();
        let [mine, other] = ["mine", "other"].map(|name| dir.path().join(name));
        [&mine, &other].into_iter().for_each(|path| std::fs::write(path, "content").unwrap());
        let file = File::open(&mine).unwrap();
        let done = confined("cat").arg(path_of(&file)).may_read(&file).run(on).unwrap();
        assert!(done.success && done.said == b"content", "{}", done.complaint);
        for path in [&mine, &other, Path::new("/etc/passwd"), Path::new("/proc/self/environ")] {
            let done = confined("cat").arg(path).run(on).unwrap();
            // The file itself may be read, by whatever name.
            assert!(
                !done.success && done.complaint.contains("denied"),
                "{}: {}",
                path.display(),
                done.complaint
            );
        }
        let out = dir.path().join("out");
        std::fs::create_dir(&out).unwrap();
        std::fs::write(out.join("there"), "").unwrap();
        let copy = |to: &Path| {
            confined("cp").arg(path_of(&file)).arg(to).may_read(&file).may_write(&out).run(on).unwrap()
        };
        assert!(copy(&out.join("there")).success);
        assert_eq!(std::fs::read(out.join("there")).unwrap(), b"content");
        assert!(!copy(&out.join("new")).success && !copy(&other).success);
    }

    #[test]
    fn it_has_no_rights_sockets_or_devices() {
        let dir = tempfile::tempdir().unwrap();
        let python =
            |code: &str| confined("python3").arg("-c").arg(code).may_write(dir.path()).run(on).unwrap();
        let done = python("print(open('/dev/null').read() == '')");
        assert!(done.success && done.said == b"True\n", "{}", done.complaint);
        let node = format!("import os; os.mknod('{}/disk', 0o60600, os.makedev(8, 0))", dir.path().display());
        let signal = format!(
            "import ctypes, os; ctypes.CDLL(None).syscall({}, os.getppid(), os.getppid(), 0); \
             ctypes.CDLL(None).perror(b'signal'); raise SystemExit(1)",
            libc::SYS_tgkill
        );
        for code in [
            "import socket; socket.socket(socket.AF_UNIX)",
            "import socket; socket.socket(socket.AF_INET)",
            "import os; os.kill(1, 0)",
            "import os; os.chroot('/usr')",
            "import os; os.setuid(12345)",
            "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
            "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
            "import fcntl, os, struct; fcntl.fcntl(0, 15, struct.pack('ii', 1, os.getppid()))",
            "import fcntl, os, struct; fcntl.ioctl(0, 0x8901, struct.pack('i', os.getppid()))",
            &signal,
            &node,
        ] {
            let done = python(code);
            assert!(!done.success && done.complaint.contains("not permitted"), "{code}: {}", done.complaint);
        }
        let done = python("import os; os.abort()");
        assert!(!done.success && !done.complaint.contains("Traceback"), "{}", done.complaint);
        let done = python(
            "import fcntl, resource; print(fcntl.fcntl(0, fcntl.F_GETFL), resource.getrlimit(resource.RLIMIT_CPU))",
        );
        assert!(done.success && !done.said.is_empty(), "{}", done.complaint);
    }

    #[test]
    fn with_a_network_it_reaches_hosts_and_no_socket_of_this_one() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let python = |code: &str| confined("python3").arg("-c").arg(code).with_network().run(on).unwrap();
        let done = python(&format!(
            "import socket; socket.create_connection(('localhost', {port})); print('there')"
        ));
        assert!(done.success && done.said == b"there\n", "{}", done.complaint);
        for code in [
            "import socket; socket.socket(socket.AF_UNIX)",
            "import socket; socket.socket(socket.AF_NETLINK)",
            "import socket; socket.socket(socket.AF_INET).bind(('127.0.0.1', 0))",
        ] {
            let done = python(code);
            assert!(!done.success && done.complaint.contains("not permitted"), "{code}: {}", done.complaint);
        }
    }

    #[test]
    fn it_ends_when_its_time_is_up_or_nobody_wants_it_any_more() {
        let stop = || HostError::new(ErrorCode::Cancelled, "told to stop");
        let begun = Instant::now();
        let late = Confined::new("sleep", Duration::from_millis(50)).arg("100").run(on);
        assert!(late.is_err_and(|e| e.message.contains("too long")));
        let told = confined("sleep").arg("100").run(|_| Err(stop()));
        assert!(told.is_err_and(|e| e.code == ErrorCode::Cancelled));
        let mut heard = 0;
        let loud = confined("yes").run(|said| {
            heard += said.len();
            if heard < 64 << 20 { Ok(()) } else { Err(stop()) }
        });
        assert!(loud.is_err_and(|e| e.code == ErrorCode::Cancelled));
        assert!(begun.elapsed() < Duration::from_secs(20));
        let gone = confined("no-such-program").run(on);
        assert!(gone.is_err_and(|e| e.code == ErrorCode::Unavailable));
    }

    #[test]
    fn what_it_says_is_bounded() {
        let zero = File::open("/dev/zero").unwrap();
        let head = confined("head").arg("-c").arg("5000000").arg(path_of(&zero)).may_read(&zero);
        let done = head.run(on).unwrap();
        assert!(done.success && done.said.len() <= MOST_SAID_BYTES);
    }
}
