//! How a child process is started: one that serves or runs a machine, or one that prints something and ends. Owns the
//! settings between fork and exec.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Most bytes that a program of [`output_within`] may print to each stream.
const MOST_OUTPUT_BYTES: usize = 64 << 10;

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

/// Runs a program to its end, and returns its output. Returns an error if it cannot be started, prints more than 64 KiB, or
/// has not ended within this time; then its process group is killed. It ends with the calling thread.
pub fn output_within(command: &mut Command, deadline: Duration) -> io::Result<Output> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    end_with_parent(command);
    let mut child = command.spawn()?;
    let pid = Pid::from_child(&child);
    let [stdout, stderr] = match listen(&mut child, deadline) {
        Ok(output) => output,
        Err(e) => {
            let _ = kill_process_group(pid, Signal::KILL);
            // A process that waits for a device ends only when the device responds.
            std::thread::spawn(move || child.wait());
            return Err(e);
        }
    };
    Ok(Output { status: child.wait()?, stdout, stderr })
}

/// Returns what a child prints to standard output and standard error until it has ended.
fn listen(child: &mut Child, deadline: Duration) -> io::Result<[Vec<u8>; 2]> {
    let until = Instant::now() + deadline;
    let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let streams = [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)];
    let mut open: Vec<(usize, File)> = streams.into_iter().flatten().map(File::from).enumerate().collect();
    let mut output = [Vec::new(), Vec::new()];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut polled: Vec<PollFd> =
            open.iter().map(|(_, stream)| PollFd::new(stream, PollFlags::IN)).collect();
        // A child that has closed both may still run.
        if open.is_empty() {
            polled.push(PollFd::new(&pidfd, PollFlags::IN));
        }
        match poll(&mut polled, Some(&left)) {
            Ok(0) => {
                let text = format!("it was not done in {} s", deadline.as_secs_f64());
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            Ok(_) if open.is_empty() => return Ok(output),
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let ready = polled.iter().position(|fd| !fd.revents().is_empty());
        let Some(at) = ready else { continue };
        let (stream, file) = &mut open[at];
        let mut part = [0; 4096];
        let n = file.read(&mut part)?;
        output[*stream].extend_from_slice(&part[..n]);
        if output[*stream].len() > MOST_OUTPUT_BYTES {
            let text = format!("it prints more than {} KiB", MOST_OUTPUT_BYTES >> 10);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        if n == 0 {
            open.remove(at);
        }
    }
}
