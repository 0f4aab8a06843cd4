//! What the process gives up before it receives anything: rights, paths, system calls. Owns the lists; never makes a missing
//! feature of the host a reason not to serve.
//!
//! Invariant: it is left connections over IP, its two sockets and the port for other hosts, which were opened before, and the files
//! of the cache; of the rest of the host, what looks up names and checks certificates, and folders that are registries, all of them
//! only to be read.

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use spillway_registry::serve::ServeOrder;
use std::collections::BTreeMap;
use std::path::Path;

/// What the C library reads to look up names, and what certificates are checked with.
const READ: [&str; 12] = [
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/nsswitch.conf",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ssl/certs",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/share/ca-certificates",
];

/// System calls that it has no use for, and that would reach others.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_mknodat,
    libc::SYS_kill,
    libc::SYS_tkill,
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

/// Gives up what is not needed. To be called while there is one thread. Returns what the host could not do.
pub fn confine(order: &ServeOrder) -> Vec<String> {
    let mut notices = Vec::new();
    let mut weaker = |what: &str, why: &dyn std::fmt::Display| {
        notices.push(format!("the sandbox is weaker: {what} ({why})"));
    };
    if let Err(e) = rustix::thread::set_no_new_privs(true) {
        weaker("a program that it executes may gain rights", &e);
    }
    if let Err(e) = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }) {
        weaker("a crash may write credentials to a core file", &e);
    }
    match restrict_paths(order) {
        Ok(RulesetStatus::FullyEnforced) => {}
        Ok(RulesetStatus::PartiallyEnforced) => {
            weaker("this kernel's Landlock is old", &"it covers files only")
        }
        Ok(RulesetStatus::NotEnforced) => weaker("this kernel has no Landlock", &"5.13 has it"),
        Err(e) => weaker("Landlock cannot be applied", &e),
    }
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    if let Err(e) = rustix::thread::set_capabilities(None, sets) {
        weaker("it keeps its capabilities", &e);
    }
    let filtered =
        filter().and_then(|program| seccompiler::apply_filter(&program).map_err(|e| e.to_string()));
    if let Err(e) = filtered {
        weaker("it has no filter of system calls", &e);
    }
    notices
}

fn restrict_paths(order: &ServeOrder) -> Result<RulesetStatus, String> {
    let abi = ABI::V6;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let change = read
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeDir
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir;
    let build = || {
        let mut ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(abi))?
            .scope(Scope::from_all(abi))?
            .create()?;
        let folders = order.folders.iter().map(AsRef::as_ref);
        for path in READ.iter().map(Path::new).chain(folders).filter(|path| path.exists()) {
            let access: BitFlags<AccessFs> = if path.is_dir() { read } else { AccessFs::ReadFile.into() };
            ruleset = ruleset.add_rule(PathBeneath::new(PathFd::new(path)?, access))?;
        }
        ruleset = ruleset.add_rule(PathBeneath::new(PathFd::new(&order.cache)?, change))?;
        Ok::<_, anyhow::Error>(ruleset.restrict_self()?.ruleset)
    };
    build().map_err(|e| format!("{e:#}"))
}

/// A filter that refuses these calls, those that end other processes, and sockets of other families than IP: one of this host would reach what
/// trusts this user.
fn filter() -> Result<BpfProgram, String> {
    let arch = std::env::consts::ARCH.try_into().map_err(|e| format!("{e}"))?;
    let mut rules: BTreeMap<libc::c_long, Vec<SeccompRule>> =
        REFUSED.iter().map(|&call| (call, Vec::new())).collect();
    let differs = |family: libc::c_int| {
        SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, family as u64)
    };
    let of_ip = [libc::AF_INET, libc::AF_INET6].map(differs);
    let of_ip = of_ip.into_iter().collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())?;
    rules.insert(libc::SYS_socket, vec![SeccompRule::new(of_ip).map_err(|e| e.to_string())?]);
    // abort(3) of its own.
    let this_process = u64::from(std::process::id());
    let another = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, this_process);
    let of_another =
        another.and_then(|another| SeccompRule::new(vec![another])).map_err(|e| e.to_string())?;
    rules.insert(libc::SYS_tgkill, vec![of_another]);
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
