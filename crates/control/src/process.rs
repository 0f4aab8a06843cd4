//! How a child process is started that serves or runs a machine. Owns what is set between fork and exec.

use rustix::io::Errno;
use rustix::process::Signal;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

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
