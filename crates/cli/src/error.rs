//! How the program fails: one line for people, one exit code for scripts. Never shows a backtrace.
//!
//! Invariant: the codes are documented in `spillway --help` and `docs/exit-codes.md`, and keep their meaning.

use spillway_worker::supervisor::{ErrorKind, SupervisorError};
use std::fmt;

/// Exit codes, in the numbers of BSD's sysexits(3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Not a failure: 'catalog diff' has found a difference, as diff(1) says it; 'image check --strict', or 'doctor', has found something; a study's runs do not count.
    Found = 1,
    /// The command line cannot be.
    Usage = 2,
    /// EX_NOINPUT: the base image, or an object of spillwayd's, is missing or cannot be used.
    Image = 66,
    /// EX_UNAVAILABLE: the control socket, or a program that is needed, is not to be had.
    Unavailable = 69,
    /// EX_SOFTWARE: the worker failed, or the host did something that it never should.
    Internal = 70,
    /// EX_CANTCREAT: an overflow file or a socket cannot be made; the host has no room for an image or a machine.
    Create = 73,
    /// EX_TEMPFAIL: refused for now: a client is connected, or the memory is not free.
    Refused = 75,
    /// EX_NOPERM: the operating system, or spillwayd, refuses access; or nobody can say that it is spillwayd.
    Permission = 77,
    /// A signal has ended what was waited for (128 and SIGINT, as shells say it).
    Interrupted = 130,
}

/// The table for `--help`.
pub const EXIT_CODES: &str = "\
Exit codes:
  0   done
  1   'catalog diff': something differs; 'image check --strict' has found something; 'doctor' a problem;
      'lab run' and 'lab resume': a scenario has no run that counts, something that the study
      expects does not hold, with --strict one was dropped;
      'lab predict': the advisor is farther off than it may be
  2   usage: the options cannot be
  66  the base image or a disk is missing or cannot be used; there is no object of that name
  69  not reachable: nobody serves this socket or host, or QEMU is not installed
  70  the worker or spillwayd failed, or the host refuses what every program may have
  73  an overflow file, a disk, a socket or an image cannot be made; spillwayd's host has no room for
      this: the memory of its caches, a store
  75  refused for now: a client is connected, the memory is not free, somebody uses it
  77  permission denied; a token that is not known or not enough, a certificate that is not trusted
  130 'machine claim --wait' was interrupted, and has given up what it had claimed
  'run' passes on the exit code of QEMU.";

/// Why the program fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// For scripts.
    pub exit: Exit,
    /// For people: what, where, what to do.
    pub message: String,
}

impl Failure {
    /// A failure.
    pub fn new(exit: Exit, message: impl Into<String>) -> Failure {
        Failure { exit, message: message.into() }
    }

    /// The command line cannot be.
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure::new(Exit::Usage, message)
    }
}

impl From<SupervisorError> for Failure {
    fn from(error: SupervisorError) -> Failure {
        let exit = match error.kind {
            ErrorKind::Options => Exit::Usage,
            ErrorKind::Image => Exit::Image,
            ErrorKind::Memory | ErrorKind::InUse => Exit::Refused,
            ErrorKind::Create => Exit::Create,
            ErrorKind::Permission => Exit::Permission,
            ErrorKind::Internal => Exit::Internal,
            ErrorKind::Unavailable => Exit::Unavailable,
            ErrorKind::Refused => Exit::Refused,
        };
        Failure::new(exit, error.message)
    }
}

impl From<clap::Error> for Failure {
    /// Folds clap's paragraphs into one line; the usage below them is left to `--help`.
    fn from(error: clap::Error) -> Failure {
        let text = error.to_string();
        let text = text.split("\n\nUsage:").next().unwrap_or(&text);
        let text = text.split("\n\nFor more information").next().unwrap_or(text);
        let paragraphs: Vec<String> =
            text.split("\n\n").map(|p| p.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        let line = paragraphs.join("; ");
        Failure::usage(format!("{}: see --help", line.strip_prefix("error: ").unwrap_or(&line)))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
