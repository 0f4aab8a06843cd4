//! Whether KVM really runs guests here. `/dev/kvm` alone does not tell: there are hosts where it opens, firmware
//! and a boot sector run, and yet every kernel hangs, because each instruction is emulated. So a guest is run that
//! goes to 64-bit mode as a kernel does, works for some hundredths of a second, and says so.
//!
//! Invariant: the probe ends within its deadline, whatever the guest does.

use crate::error::{Exit, Failure};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};
use spillway_worker::supervisor::default_signals;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
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

/// Runs the probe with this QEMU. `wake`: give up when it is readable.
pub fn probe(qemu: &str, wake: BorrowedFd<'_>) -> Result<Accelerator, Failure> {
    if let Err(e) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        return Ok(Accelerator::Tcg(format!("/dev/kvm: {e}")));
    }
    Ok(match run_guest(qemu, "kvm", wake)? {
        None => Accelerator::Kvm,
        Some(why) => Accelerator::Tcg(why),
    })
}

/// Runs the guest. `None`: it worked; else what it did instead.
fn run_guest(qemu: &str, accelerator: &str, wake: BorrowedFd<'_>) -> Result<Option<String>, Failure> {
    let internal = |what: &str, e: io::Error| Failure::new(Exit::Internal, format!("{what}: {e}"));
    let mut disk = tempfile::Builder::new()
        .prefix("spillway-probe-")
        .tempfile()
        .map_err(|e| internal("cannot make a temporary file for the KVM probe", e))?;
    disk.write_all(&boot_sector())
        .map_err(|e| internal("cannot write a temporary file for the KVM probe", e))?;

    let mut command = Command::new(qemu);
    command
        .args(["-accel", accelerator, "-machine", "pc", "-nodefaults", "-no-user-config", "-display", "none"])
        .args(["-m", "16", "-no-reboot", "-device", "isa-debug-exit,iobase=0xf4,iosize=1"])
        .arg("-drive")
        .arg(format!(
            "file={},format=raw,if=ide,snapshot=on",
            disk.path().display().to_string().replace(',', ",,")
        ))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    default_signals(&mut command);
    let mut child = command.spawn().map_err(|e| not_started(qemu, &e))?;
    let ended = rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).and_then(|pidfd| {
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN), PollFd::from_borrowed_fd(wake, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&DEADLINE))?;
        Ok(!fds[0].revents().is_empty())
    });
    if !matches!(ended, Ok(true)) {
        let _ = child.kill();
    }
    let status = child.wait().map_err(|e| internal("cannot wait for the KVM probe", e))?;
    Ok(match ended {
        Ok(true) if status.code() == Some(i32::from(GREETING) << 1 | 1) => None,
        Ok(true) => Some(format!("a test guest did not run: QEMU ended with {status}")),
        _ => Some(format!("a test guest was not done in {} s", DEADLINE.tv_sec)),
    })
}

/// QEMU could not be executed.
pub fn not_started(qemu: &str, error: &io::Error) -> Failure {
    let advice = "install QEMU (Debian: apt install qemu-system-x86)";
    Failure::new(Exit::Unavailable, format!("cannot start {qemu}: {error}: {advice}"))
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
    use std::os::fd::AsFd;

    /// Software runs it everywhere, so a failure with KVM is KVM's.
    #[test]
    fn the_guest_does_its_work_and_says_so() {
        let (quiet, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(run_guest("qemu-system-x86_64", "tcg", quiet.as_fd()), Ok(None));
    }

    #[test]
    fn a_qemu_that_does_not_run_it_is_found_out() {
        let (quiet, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let why = run_guest("/bin/true", "kvm", quiet.as_fd()).unwrap().unwrap();
        assert!(why.contains("exit status: 0"), "{why}");
        let missing = run_guest("/nonexistent/qemu", "kvm", quiet.as_fd()).unwrap_err();
        assert!(missing.exit == Exit::Unavailable && missing.message.contains("install QEMU"), "{missing}");
    }
}
