//! `spillway run`: a disk and a virtual machine on it, in this terminal. QEMU owns the terminal while it runs.
//!
//! Invariant: when this returns, QEMU has ended, the sockets are gone, and the terminal is as it was.

mod server;

use crate::args::Run;
use crate::error::{Exit, Failure};
use crate::{output, table};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags, Signal};
use rustix::termios::{OptionalActions, Termios};
use server::{DiskServer, Start};
use spillway_control::kvm::{self, Accelerator};
use spillway_control::{Plane, Signals, SupervisorError, default_signals, end_with_parent};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

const QEMU: &str = "qemu-system-x86_64";
/// How long QEMU may take to end when it is asked to.
const PATIENCE: Duration = Duration::from_secs(5);

/// Boots, waits for the machine's end, and shows where the I/O went. QEMU's exit code.
pub fn run(args: &Run) -> Result<ExitCode, Failure> {
    let private = private_dir()?;
    let settings = args.settings(&private.path().join("disk.sock"))?;
    for (option, file) in [("--kernel", &args.kernel), ("--initrd", &args.initrd)] {
        if let Some(file) = file {
            std::fs::File::open(file).map_err(|e| {
                Failure::usage(format!("{option} {}: cannot be read ({e}): check the path", file.display()))
            })?;
        }
    }
    let signals = Signals::new()?;
    let socket = settings.vhost_user.clone().unwrap_or_default();
    let Some(accelerator) = kvm::probe(QEMU, private.path(), signals.as_fd())? else {
        signals.take();
        return Ok(ExitCode::SUCCESS);
    };
    if let Accelerator::Tcg(why) = &accelerator {
        output::complain("notice", &format!("no KVM ({why}): the machine runs in software (TCG), slowly"));
    }
    let mut disk = DiskServer::start(settings)?;
    match disk.ready(&signals)? {
        Start::Ready => {}
        Start::Interrupted => {
            signals.take();
            return Ok(disk.stop(&signals)?.err().unwrap_or(ExitCode::SUCCESS));
        }
        Start::Failed(code) => return Ok(code),
    }

    let terminal = Terminal::save();
    let mut machine = Machine::start(args, &accelerator, &socket)?;
    let served = machine.attend(&disk, &signals);
    drop(terminal);
    let status = served?;
    let stats = match disk.stop(&signals)? {
        Ok(stats) => stats,
        // It has said why.
        Err(code) => return Ok(code),
    };
    if status.success() || stats.planes.guest != Plane::default() {
        output::print(&format!("\nspillway: where the I/O went\n{}", table::by_plane(&stats)))?;
    }
    Ok(exit_code(status))
}

/// As a shell would say it.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// A folder that only this user can enter; it goes with the value.
fn private_dir() -> Result<tempfile::TempDir, Failure> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("spillway-");
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| Path::new(dir).is_dir());
    let made = runtime.and_then(|dir| builder.tempdir_in(dir).ok());
    match made {
        Some(dir) => Ok(dir),
        None => builder.tempdir_in("/tmp").map_err(|e| {
            Failure::new(Exit::Create, format!("cannot make a private folder in /tmp: {e}: make space there"))
        }),
    }
}

/// QEMU, our child.
struct Machine {
    child: Child,
    pidfd: OwnedFd,
}

impl Machine {
    fn start(args: &Run, accelerator: &Accelerator, socket: &Path) -> Result<Machine, Failure> {
        let mut command = Command::new(QEMU);
        command.args(arguments(args, accelerator, socket));
        default_signals(&mut command);
        end_with_parent(&mut command);
        let mut child = command.spawn().map_err(|e| kvm::not_started(QEMU, e))?;
        match rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Machine { child, pidfd }),
            Err(e) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(internal(e.into()))
            }
        }
    }

    /// Waits until the machine has ended. A signal ends it, and so does the end of its disk.
    fn attend(&mut self, disk: &DiskServer, signals: &Signals) -> Result<ExitStatus, Failure> {
        let first = wait_for([self.pidfd.as_fd(), signals.as_fd(), disk.pidfd.as_fd()], None)?;
        match first {
            Some(0) => return self.child.wait().map_err(internal),
            Some(1) => _ = signals.take(),
            _ => {
                self.end_now();
                return self.child.wait().map_err(internal);
            }
        }
        // What it still writes on its way out is served.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::TERM);
        let until = Instant::now() + PATIENCE;
        if wait_for([self.pidfd.as_fd(), signals.as_fd()], Some(until))? != Some(0) {
            self.end_now();
        }
        self.child.wait().map_err(internal)
    }

    fn end_now(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Waits until one of these is readable, and says which; `None` when the time has come first.
fn wait_for<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    until: Option<Instant>,
) -> Result<Option<usize>, Failure> {
    loop {
        let mut polled = fds.each_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left
            .map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) });
        match poll(&mut polled, timeout.as_ref()) {
            Ok(0) => return Ok(None),
            Ok(_) => return Ok(polled.iter().position(|fd| !fd.revents().is_empty())),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(internal(e.into())),
        }
    }
}

fn internal(error: io::Error) -> Failure {
    SupervisorError::internal(&format!("cannot watch over {QEMU}"), error).into()
}

fn arguments(args: &Run, accelerator: &Accelerator, socket: &Path) -> Vec<OsString> {
    let (accel, cpu) = match accelerator {
        Accelerator::Kvm => ("kvm", "host"),
        Accelerator::Tcg(_) => ("tcg", "max"),
    };
    let mut chardev = OsString::from("socket,id=disk0,reconnect=1,path=");
    chardev.push(socket.display().to_string().replace(',', ",,"));
    let mib = args.memory >> 20;
    let mut list: Vec<OsString> = Vec::new();
    let mut option = |name: &str, value: OsString| list.extend([name.into(), value]);
    option("-machine", "q35,memory-backend=mem,graphics=off".into());
    option("-accel", accel.into());
    option("-cpu", cpu.into());
    option("-smp", args.vcpus.to_string().into());
    option("-m", format!("{mib}M").into());
    option("-object", format!("memory-backend-memfd,id=mem,size={mib}M,share=on").into());
    option("-chardev", chardev);
    // With --kernel the first place is the kernel's.
    let boot = if args.kernel.is_some() { "" } else { ",bootindex=0" };
    option("-device", format!("vhost-user-blk-pci,chardev=disk0,num-queues={}{boot}", args.queues()).into());
    option("-device", "virtio-rng-pci".into());
    option("-serial", "mon:stdio".into());
    option("-display", "none".into());
    let files = [("-kernel", &args.kernel), ("-initrd", &args.initrd)];
    for (name, file) in files {
        if let Some(file) = file {
            option(name, file.into());
        }
    }
    if let Some(append) = &args.append {
        option("-append", append.into());
    }
    list.extend(["-nodefaults".into(), "-no-user-config".into()]);
    list.extend(args.qemu.iter().cloned());
    list
}

/// The terminal's state, put back when this is dropped: QEMU may be killed before it does so itself.
struct Terminal {
    settings: Option<Termios>,
    flags: [Option<OFlags>; 3],
}

impl Terminal {
    fn save() -> Terminal {
        let flags = [
            rustix::fs::fcntl_getfl(io::stdin()).ok(),
            rustix::fs::fcntl_getfl(io::stdout()).ok(),
            rustix::fs::fcntl_getfl(io::stderr()).ok(),
        ];
        Terminal { settings: rustix::termios::tcgetattr(io::stdin()).ok(), flags }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(settings) = &self.settings {
            let _ = rustix::termios::tcsetattr(io::stdin(), OptionalActions::Now, settings);
        }
        // QEMU makes standard input non-blocking, and with it all that share the terminal's description.
        let [stdin, stdout, stderr] = self.flags;
        let _ = stdin.map(|flags| rustix::fs::fcntl_setfl(io::stdin(), flags));
        let _ = stdout.map(|flags| rustix::fs::fcntl_setfl(io::stdout(), flags));
        let _ = stderr.map(|flags| rustix::fs::fcntl_setfl(io::stderr(), flags));
        // The firmware's serial console turns line wrap and colours off and leaves them so.
        if rustix::termios::isatty(io::stdout()) {
            let _ = output::print("\x1b[?7h\x1b[0m");
        }
    }
}
