//! What the worker gives up before it serves anybody: rights, paths, system calls. Owns the list of calls; never
//! makes a missing feature of the host a reason not to serve.
//!
//! Invariant: what is given up is given up for every thread. Rights go while there is one thread, those made later
//! inherit that; the filter of system calls takes hold of all there are.

use super::engine::Kind;
use super::uring::UNREGISTER_FILES;
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetStatus, Scope,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::collections::BTreeMap;
use std::ffi::c_long;

/// Gives up capabilities, whatever an `execve` could give back, memory dumps, the runtime's signal handlers of faults and every
/// path. To be called while there is one thread. What the host cannot do goes into `notices`. Returns the version of the
/// Landlock that holds from here on; 0 for none.
pub fn drop_rights(notices: &mut Vec<String>) -> u32 {
    let mut weaker = |what: &str, why: &dyn std::fmt::Display| {
        notices.push(format!("the sandbox is weaker: {what} ({why})"));
    };
    if let Err(e) = rustix::thread::set_no_new_privs(true) {
        weaker("a program that it executes may gain rights", &e);
    }
    // 0 is no limit for a program that takes dumps through a pipe; 1 keeps the kernel from any.
    let most = getrlimit(Resource::Core).maximum.map_or(1, |most| most.min(1));
    if let Err(e) = setrlimit(Resource::Core, Rlimit { current: Some(most), maximum: Some(most) }) {
        weaker("a crash may write guests' memory to a core file", &e);
    }
    die_of_faults();
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    // An ambient capability goes with its permitted one.
    if let Err(e) = rustix::thread::set_capabilities(None, sets) {
        weaker("it keeps its capabilities", &e);
    }
    let status = no_paths();
    match &status {
        Ok(RulesetStatus::FullyEnforced) => {}
        Ok(RulesetStatus::PartiallyEnforced) => weaker(
            "this kernel's Landlock is old",
            &"files it covers, but not all of devices, network and signals",
        ),
        Ok(RulesetStatus::NotEnforced) => {
            weaker("this kernel has no Landlock", &"5.13 has it, if it is enabled")
        }
        Err(e) => weaker("Landlock cannot be applied", &e),
    }
    match status {
        Ok(RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced) => landlock_version(),
        Ok(RulesetStatus::NotEnforced) | Err(_) => 0,
    }
}

/// The version of this kernel's Landlock (its ABI); 0 if it has none, or none that is enabled.
pub fn landlock_version() -> u32 {
    // linux/landlock.h: LANDLOCK_CREATE_RULESET_VERSION.
    let (none, flags) = (std::ptr::null::<libc::c_void>(), 1u32);
    // SAFETY: with this flag it makes nothing and reads no memory.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, 0usize, flags) };
    u32::try_from(version).unwrap_or(0)
}

/// Landlock with an empty list of exceptions.
fn no_paths() -> Result<RulesetStatus, landlock::RulesetError> {
    let abi = ABI::V6;
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?
        .restrict_self()?;
    Ok(status.ruleset)
}

/// Memory faults end the process. The runtime's signal handlers take each for one that comes again when they return, so that one
/// that was sent would be lost; what they tell of a stack that overflowed, the supervisor tells by the signal.
fn die_of_faults() {
    for fault in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: the default action runs no code of this process. It is valid for both, so that it cannot fail.
        unsafe { libc::signal(fault, libc::SIG_DFL) };
    }
}

/// Leaves every thread the system calls that the worker makes. Any other ends the process: a bug or an intruder, and
/// neither is to go on; the few by which libraries look at files of the host are refused instead.
pub fn filter_calls(engine: Kind, notices: &mut Vec<String>) {
    let applied = programs(engine)
        .and_then(|programs| programs.iter().try_for_each(|p| seccompiler::apply_filter_all_threads(p)));
    if let Err(e) = applied {
        notices.push(format!(
            "the worker has no filter of system calls: {e}; check the kernel and the container"
        ));
    }
}

/// The refusals, then the list.
fn programs(engine: Kind) -> Result<[BpfProgram; 2], seccompiler::Error> {
    let arch = std::env::consts::ARCH.try_into()?;
    let compile = |rules: Rules, others, matched| -> Result<BpfProgram, seccompiler::BackendError> {
        SeccompFilter::new(rules, others, matched, arch)?.try_into()
    };
    let refused: Rules = REFUSED.iter().map(|&call| (call, Vec::new())).collect();
    let mut allowed = conditional(engine)?;
    let of_engine = match engine {
        Kind::IoUring => OF_IO_URING,
        Kind::Threads => OF_THREADS,
    };
    allowed.extend(ALLOWED.iter().chain(of_engine).chain(REFUSED).map(|&call| (call, Vec::new())));
    Ok([
        compile(refused, SeccompAction::Allow, SeccompAction::Errno(libc::EACCES as u32))?,
        compile(allowed, SeccompAction::KillProcess, SeccompAction::Allow)?,
    ])
}

/// Rules by call; none means always.
type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// linux/prctl.h.
const PR_GET_AUXV: u64 = 0x4155_5856;

/// Calls of which only some uses are allowed: one of the values for the argument, compared under a mask.
fn conditional(engine: Kind) -> Result<Rules, seccompiler::BackendError> {
    let whole = u64::from(u32::MAX);
    let executable = libc::PROT_EXEC as u64;
    let this_process = u64::from(std::process::id());
    let fcntl = [
        libc::F_GETFD,
        libc::F_SETFD,
        libc::F_GETFL,
        libc::F_SETFL,
        libc::F_DUPFD_CLOEXEC,
        libc::F_ADD_SEALS,
        libc::F_GET_SEALS,
    ];
    let mut uses: Vec<(c_long, u8, u64, Vec<u64>)> = vec![
        // No memory that can be executed.
        (libc::SYS_mmap, 2, executable, vec![0]),
        (libc::SYS_mprotect, 2, executable, vec![0]),
        (libc::SYS_fcntl, 1, whole, fcntl.map(|c| c as u64).to_vec()),
        (libc::SYS_ioctl, 1, whole, vec![libc::FIONBIO]),
        // abort(3), and a fault that is not the guest's.
        (libc::SYS_tgkill, 0, whole, vec![this_process]),
        // A thread's name, by the thread; where the kernel's clock is to be read, by rustix.
        (libc::SYS_prctl, 0, whole, vec![libc::PR_SET_NAME as u64, PR_GET_AUXV]),
    ];
    if engine == Kind::IoUring {
        // The end: the ring's files are released before the process ends.
        uses.push((libc::SYS_io_uring_register, 1, whole, vec![u64::from(UNREGISTER_FILES)]));
    }
    let mut rules = Rules::new();
    for (call, argument, mask, values) in uses {
        let rule = |value| {
            let under = SeccompCmpOp::MaskedEq(mask);
            let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, under, value)?;
            SeccompRule::new(vec![condition])
        };
        rules.insert(call, values.into_iter().map(rule).collect::<Result<_, _>>()?);
    }
    Ok(rules)
}

/// How libraries look at the host's files on their own: the C library for the number of processors, a panic for its
/// backtrace. They go on without.
const REFUSED: &[c_long] = &[
    libc::SYS_openat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_readlinkat,
    libc::SYS_faccessat,
    libc::SYS_getcwd,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
];

const ALLOWED: &[c_long] = &[
    // Memory.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    // Files that it was given: reads that do not wait, the base image's reader's, holes.
    libc::SYS_close,
    libc::SYS_fallocate,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_preadv2,
    libc::SYS_pwritev,
    // Sockets and eventfds that it was given.
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_getsockopt,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_write,
    libc::SYS_writev,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    // The in-flight table of a VMM.
    libc::SYS_ftruncate,
    libc::SYS_memfd_create,
    // A guest's interrupts (AIO raises an eventfd without waiting).
    libc::SYS_io_destroy,
    libc::SYS_io_getevents,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    // Time and chance.
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_getrandom,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    // Threads: those that it has; none is made any more.
    libc::SYS_exit,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    // Signals and the end.
    libc::SYS_exit_group,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
];

const OF_IO_URING: &[c_long] = &[libc::SYS_io_uring_enter];

const OF_THREADS: &[c_long] = &[libc::SYS_fdatasync, libc::SYS_pwritev2];
