//! A process behind the worker's sandbox tries to break out. The process is this very program, executed again.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

use spillway_worker::worker::{Kind, sandbox};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

const ATTEMPT: &str = "SPILLWAY_SANDBOX_ATTEMPT";
const ENGINE: &str = "SPILLWAY_SANDBOX_ENGINE";
const ONLY_RIGHTS: &str = "SPILLWAY_SANDBOX_ONLY_RIGHTS";

/// What the prisoner's end says.
const SUCCEEDED: i32 = 100;
const REFUSED: i32 = 101;

/// The ways out: name, and what must become of one who tries.
const ATTEMPTS: &[(&str, End)] = &[
    ("nothing at all", End::Succeeds),
    ("write to an fd that it has", End::Succeeds),
    ("more memory", End::Succeeds),
    ("panic", End::Refused),
    ("open a file", End::Refused),
    ("look at a file", End::Refused),
    ("make a socket", End::Killed),
    ("connect a socket that it has", End::Killed),
    ("accept", End::Killed),
    ("execute", End::Killed),
    ("fork", End::Killed),
    ("start a thread", End::Killed),
    ("ptrace", End::Killed),
    ("read another's memory", End::Killed),
    ("executable memory", End::Killed),
    ("make memory executable", End::Killed),
    ("another io_uring", End::Killed),
    ("change an io_uring", End::Killed),
    ("kill its parent", End::Killed),
    ("a signal to its parent by tgkill", End::Killed),
    ("mount", End::Killed),
    ("become somebody", End::Killed),
    ("take the fd of another", End::Killed),
    ("type into a terminal", End::Killed),
    ("the calls of another architecture", End::Killed),
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Succeeds,
    Refused,
    Killed,
}

/// Not a test of its own: what the prisoner executes.
#[test]
fn prisoner() {
    let Ok(attempt) = std::env::var(ATTEMPT) else { return };
    let engine = match std::env::var(ENGINE).unwrap().as_str() {
        "threads" => Kind::Threads,
        _ => Kind::IoUring,
    };
    let listener = UnixListener::bind(std::env::temp_dir().join(format!("prison-{}", std::process::id())));
    let (fd, socket) = (listener.unwrap(), UnixStream::pair().unwrap().0);
    let memory = executable_page();
    let mut notices = Vec::new();
    sandbox::drop_rights(&mut notices);
    if std::env::var_os(ONLY_RIGHTS).is_none() {
        sandbox::filter_calls(engine, &mut notices);
    }
    assert!(notices.iter().all(|n| n.contains("Landlock")), "{notices:?}");
    let done = attempt_to(&attempt, fd.as_raw_fd(), socket.as_raw_fd(), memory);
    // SAFETY: it does not return.
    unsafe { libc::_exit(if done { SUCCEEDED } else { REFUSED }) };
}

/// A page that could be made executable.
fn executable_page() -> *mut libc::c_void {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice.
    unsafe { libc::mmap(std::ptr::null_mut(), 4096, prot, flags, -1, 0) }
}

/// Whether it could.
fn attempt_to(what: &str, listener: i32, socket: i32, page: *mut libc::c_void) -> bool {
    let path = c"/etc/hostname".as_ptr();
    let null = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: each call is given memory of its own, or none; most are not expected to return.
    unsafe {
        match what {
            "nothing at all" => true,
            "write to an fd that it has" => libc::write(2, b"x".as_ptr().cast(), 0) == 0,
            "more memory" => vec![1u8; 64 << 20].iter().all(|&b| b == 1),
            // It is told of and caught: nothing on its way is missing from the list.
            "panic" => std::panic::catch_unwind(|| panic!("as a bug would")).is_ok(),
            "open a file" => libc::open(path, libc::O_RDONLY) >= 0,
            "look at a file" => libc::access(path, libc::R_OK) == 0,
            "make a socket" => libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0) >= 0,
            "connect a socket that it has" => libc::connect(socket, null.cast(), 0) == 0,
            "accept" => libc::accept(listener, null.cast(), null.cast()) >= 0,
            "execute" => libc::execve(c"/bin/true".as_ptr(), null.cast(), null.cast()) == 0,
            "fork" => libc::fork() >= 0,
            "start a thread" => {
                let flags = libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_FS;
                libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) >= 0
            }
            "ptrace" => libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) == 0,
            "read another's memory" => {
                libc::process_vm_readv(libc::getppid(), null.cast(), 0, null.cast(), 0, 0) >= 0
            }
            "executable memory" => {
                let (prot, flags) =
                    (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                libc::mmap(null, 4096, prot, flags, -1, 0) != libc::MAP_FAILED
            }
            "make memory executable" => libc::mprotect(page, 4096, libc::PROT_READ | libc::PROT_EXEC) == 0,
            "another io_uring" => libc::syscall(libc::SYS_io_uring_setup, 1, page) >= 0,
            "change an io_uring" => libc::syscall(libc::SYS_io_uring_register, 0, 0, 0, 0) >= 0,
            "kill its parent" => libc::kill(libc::getppid(), 0) == 0,
            "a signal to its parent by tgkill" => {
                let parent = std::os::unix::process::parent_id();
                libc::syscall(libc::SYS_tgkill, parent, parent, 0) == 0
            }
            "mount" => libc::mount(path, path, path, 0, null) == 0,
            // Past the C library, which wants to take all threads along.
            "become somebody" => libc::syscall(libc::SYS_setuid, 1000) == 0,
            "take the fd of another" => libc::syscall(libc::SYS_pidfd_getfd, 0, 0, 0) >= 0,
            "type into a terminal" => libc::ioctl(0, libc::TIOCSTI, b"x".as_ptr()) == 0,
            #[cfg(target_arch = "x86_64")]
            "the calls of another architecture" => {
                // getpid of i386.
                let mut number = 20u64;
                std::arch::asm!("int 0x80", inout("rax") number, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
                number as i64 > 0
            }
            #[cfg(not(target_arch = "x86_64"))]
            "the calls of another architecture" => libc::syscall(1 << 30) >= 0,
            other => panic!("{other}: no such attempt"),
        }
    }
}

fn imprison(attempt: &str, engine: &str, only_rights: bool) -> (End, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "prisoner", "--nocapture"]).env(ATTEMPT, attempt).env(ENGINE, engine);
    let dir = tempfile::tempdir().unwrap();
    // A panic prints a backtrace: it looks at files for that.
    command.env("TMPDIR", dir.path()).env("RUST_BACKTRACE", "1");
    if only_rights {
        command.env(ONLY_RIGHTS, "1");
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let end = match (output.status.code(), output.status.signal()) {
        (Some(SUCCEEDED), _) => End::Succeeds,
        (Some(REFUSED), _) => End::Refused,
        (_, Some(libc::SIGSYS)) => End::Killed,
        _ => panic!("{attempt}: {}: {text}", output.status),
    };
    (end, text)
}

#[test]
fn nobody_gets_out() {
    for engine in ["io_uring", "threads"] {
        for &(attempt, end) in ATTEMPTS {
            let (got, text) = imprison(attempt, engine, false);
            assert_eq!(got, end, "{attempt}, {engine}: {text}");
        }
    }
}

/// The second wall, should the first have a hole: without the filter of system calls.
#[test]
fn without_the_filter_there_are_still_no_paths_and_no_rights() {
    for attempt in ["open a file", "execute", "mount", "become somebody"] {
        if attempt == "become somebody" && !rustix::process::geteuid().is_root() {
            continue;
        }
        assert_eq!(imprison(attempt, "io_uring", true).0, End::Refused, "{attempt}");
    }
    assert_eq!(
        imprison("make a socket", "io_uring", true).0,
        End::Succeeds,
        "that is the filter's to refuse"
    );
}
