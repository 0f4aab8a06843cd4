//! How a child process is started that serves or runs a machine, and how one is asked that only says something. Owns what is
//! set between fork and exec.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Most that a program may say which is asked by [`output_within`].
const MOST_SAID_BYTES: usize = 64 << 10;

/// Makes a child end when this thread does, however that ends. For a child that must not outlive us.
pub fn end_with_parent(command: &mut Command) {
    let parent = rustix::process::getpid();
    // SAFETY: only system calls on plain numbers between fork and exec.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before this was asked: then nobody would end this child.
            match rustix::process::getppid() {
                Some(pid) if pid == parent => Ok(()),
                _ => Err(Errno::SRCH.into()),
            }
        });
    }
}

/// Makes a child start with no signal blocked, whatever this process blocks.
pub fn default_signals(command: &mut Command) {
    // SAFETY: sigemptyset and sigprocmask are async-signal-safe and touch only this stack.
    unsafe {
        command.pre_exec(|| {
            let mut none = std::mem::MaybeUninit::uninit();
            libc::sigemptyset(none.as_mut_ptr());
            if libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut()) < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

/// Runs a program that says something and ends, and returns what it says. An error if it cannot be started, says more than
/// 64 KiB, or has not ended within this time; then it has been killed, with all that it has started.
pub fn output_within(command: &mut Command, deadline: Duration) -> io::Result<Output> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn()?;
    let pid = Pid::from_child(&child);
    let said = listen(&mut child, deadline);
    if said.is_err() {
        let _ = kill_process_group(pid, Signal::KILL);
    }
    let status = child.wait()?;
    let [stdout, stderr] = said?;
    Ok(Output { status, stdout, stderr })
}

/// What a child says on standard output and standard error until it has ended.
fn listen(child: &mut Child, deadline: Duration) -> io::Result<[Vec<u8>; 2]> {
    let until = Instant::now() + deadline;
    let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let streams = [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)];
    let mut open: Vec<(usize, File)> = streams.into_iter().flatten().map(File::from).enumerate().collect();
    let mut said = [Vec::new(), Vec::new()];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut polled: Vec<PollFd> =
            open.iter().map(|(_, stream)| PollFd::new(stream, PollFlags::IN)).collect();
        // Whoever has closed both may still run.
        if open.is_empty() {
            polled.push(PollFd::new(&pidfd, PollFlags::IN));
        }
        match poll(&mut polled, Some(&left)) {
            Ok(0) => {
                let text = format!("it was not done in {} s", deadline.as_secs_f64());
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            Ok(_) if open.is_empty() => return Ok(said),
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let ready = polled.iter().position(|fd| !fd.revents().is_empty());
        let Some(at) = ready else { continue };
        let (stream, file) = &mut open[at];
        let mut part = [0; 4096];
        let n = file.read(&mut part)?;
        said[*stream].extend_from_slice(&part[..n]);
        if said[*stream].len() > MOST_SAID_BYTES {
            let text = format!("it says more than {} KiB", MOST_SAID_BYTES >> 10);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        if n == 0 {
            open.remove(at);
        }
    }
}
