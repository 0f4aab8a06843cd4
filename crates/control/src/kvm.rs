//! Whether KVM really runs guests here. `/dev/kvm` alone does not tell: there are hosts where it opens, firmware
//! and a boot sector run, and yet every kernel hangs, because each instruction is emulated. So a guest is run that
//! goes to 64-bit mode as a kernel does, works for some hundredths of a second, and says so.
//!
//! Invariant: the probe ends within its deadline, whatever the guest does.

use crate::{ErrorKind, SupervisorError, default_signals, end_with_parent};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::process::{Command, Stdio};

const DEADLINE: Timespec = Timespec { tv_sec: 3, tv_nsec: 0 };
/// What the guest writes to QEMU's debug-exit device at port 0xf4; QEMU then exits with twice this plus one.
const GREETING: u8 = 0x15;

/// The guest: a boot sector, loaded at 0x7c00.
#[rustfmt::skip]
const CODE: [u8; 0x63] = [
    // 16-bit: no interrupts, flat segments
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0,
    // three page tables from 0x1000 on, cleared: the first 2 MiB map to themselves
    0xbf, 0x00, 0x10, 0xb9, 0x00, 0x18, 0xfc, 0xf3, 0xab,
    0xc7, 0x06, 0x00, 0x10, 0x03, 0x20,
    0xc7, 0x06, 0x00, 0x20, 0x03, 0x30,
    0xc6, 0x06, 0x00, 0x30, 0x83,
    // cr3 = 0x1000, cr4 = PAE
    0x66, 0xb8, 0x00, 0x10, 0x00, 0x00, 0x0f, 0x22, 0xd8,
    0xb8, 0x20, 0x00, 0x0f, 0x22, 0xe0,
    // EFER: long mode
    0x66, 0xb9, 0x80, 0x00, 0x00, 0xc0, 0x0f, 0x32, 0x80, 0xcc, 0x01, 0x0f, 0x30,
    // lgdt [0x7c73]; cr0: paging and protection; to the 64-bit segment
    0x0f, 0x01, 0x16, 0x73, 0x7c,
    0x0f, 0x20, 0xc0, 0x66, 0x0d, 0x01, 0x00, 0x00, 0x80, 0x0f, 0x22, 0xc0,
    0xea, 0x53, 0x7c, 0x08, 0x00,
    // 64-bit: count 2^26 down
    0xb9, 0x00, 0x00, 0x00, 0x04, 0xff, 0xc9, 0x75, 0xfc,
    // the greeting, then halt for good
    0xb0, GREETING, 0xe6, 0xf4, 0xf4, 0xeb, 0xfd,
];
/// At 0x7c63: the table of segments (none, 64-bit code), then its length and address for lgdt.
const SEGMENTS: [u8; 22] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x9a, 0x20, 0, 15, 0, 0x63, 0x7c, 0, 0];

/// How to run guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// In hardware.
    Kvm,
    /// In software; why.
    Tcg(String),
}

/// What came of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Worked,
    /// What it did instead.
    Failed(String),
    /// Nobody wants to know any more.
    Interrupted,
}

/// Runs the probe with this QEMU, its file in `dir`. `None` when `wake` was readable first.
pub fn probe(qemu: &str, dir: &Path, wake: BorrowedFd<'_>) -> Result<Option<Accelerator>, SupervisorError> {
    if let Err(e) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        return Ok(Some(Accelerator::Tcg(format!("/dev/kvm: {e}"))));
    }
    Ok(match run_guest(qemu, "kvm", dir, wake)? {
        Outcome::Worked => Some(Accelerator::Kvm),
        Outcome::Failed(why) => Some(Accelerator::Tcg(why)),
        Outcome::Interrupted => None,
    })
}

fn run_guest(
    qemu: &str,
    accelerator: &str,
    dir: &Path,
    wake: BorrowedFd<'_>,
) -> Result<Outcome, SupervisorError> {
    let disk = dir.join("probe.raw");
    std::fs::write(&disk, boot_sector()).map_err(|e| {
        let what = format!("cannot write {} for the KVM probe", disk.display());
        SupervisorError::caused(ErrorKind::Create, what, e, "make space there")
    })?;

    let mut command = Command::new(qemu);
    command
        .args(["-accel", accelerator, "-machine", "pc", "-nodefaults", "-no-user-config", "-display", "none"])
        .args(["-m", "16", "-no-reboot", "-device", "isa-debug-exit,iobase=0xf4,iosize=1"])
        .arg("-drive")
        .arg(format!("file={},format=raw,if=ide", disk.display().to_string().replace(',', ",,")))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    default_signals(&mut command);
    end_with_parent(&mut command);
    let mut child = command.spawn().map_err(|e| not_started(qemu, e))?;
    let ended = rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).and_then(|pidfd| {
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN), PollFd::from_borrowed_fd(wake, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&DEADLINE))?;
        Ok(fds.map(|fd| !fd.revents().is_empty()))
    });
    if !matches!(ended, Ok([true, _])) {
        let _ = child.kill();
    }
    let cannot = |e: io::Error| SupervisorError::internal("cannot wait for the KVM probe", e);
    let status = child.wait().map_err(cannot)?;
    Ok(match ended.map_err(|e| cannot(e.into()))? {
        [true, _] if status.code() == Some(i32::from(GREETING) << 1 | 1) => Outcome::Worked,
        [true, _] => Outcome::Failed(format!("a test guest did not run: QEMU ended with {status}")),
        [false, true] => Outcome::Interrupted,
        [false, false] => Outcome::Failed(format!("a test guest was not done in {} s", DEADLINE.tv_sec)),
    })
}

/// QEMU could not be executed.
pub fn not_started(qemu: &str, error: io::Error) -> SupervisorError {
    let advice = "install QEMU (Debian: apt install qemu-system-x86)";
    SupervisorError::caused(ErrorKind::Unavailable, format!("cannot start {qemu}"), error, advice)
}

fn boot_sector() -> [u8; 512] {
    let mut sector = [0; 512];
    sector[..CODE.len()].copy_from_slice(&CODE);
    sector[0x63..0x63 + SEGMENTS.len()].copy_from_slice(&SEGMENTS);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;

    /// Software runs it everywhere, so a failure with KVM is KVM's.
    #[test]
    fn the_guest_does_its_work_and_says_so() {
        let (quiet, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let outcome = run_guest("qemu-system-x86_64", "tcg", dir.path(), quiet.as_fd());
        assert_eq!(outcome.unwrap(), Outcome::Worked);
    }

    #[test]
    fn a_signal_is_no_verdict() {
        let (wake, mut signal) = std::os::unix::net::UnixStream::pair().unwrap();
        signal.write_all(b".").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let outcome = run_guest("qemu-system-x86_64", "tcg", dir.path(), wake.as_fd());
        assert_eq!(outcome.unwrap(), Outcome::Interrupted);
    }

    #[test]
    fn a_qemu_that_does_not_run_it_is_found_out() {
        let (quiet, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let outcome = run_guest("/bin/true", "kvm", dir.path(), quiet.as_fd()).unwrap();
        assert!(matches!(&outcome, Outcome::Failed(why) if why.contains("exit status: 0")), "{outcome:?}");
        let missing = run_guest("/nonexistent/qemu", "kvm", dir.path(), quiet.as_fd()).unwrap_err();
        assert!(
            missing.kind == ErrorKind::Unavailable && missing.to_string().contains("install QEMU"),
            "{missing}"
        );
    }
}
