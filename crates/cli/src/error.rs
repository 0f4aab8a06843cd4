//! How the program fails: one line for people, one exit code for scripts. Never shows a backtrace.
//!
//! Invariant: the codes are documented in `spillway --help` and `docs/exit-codes.md`, and keep their meaning.

pub use spillway_control::Exit;
use spillway_control::SupervisorError;
use spillway_control::output::in_one_line;
use std::fmt;

/// The table for `--help`.
pub const EXIT_CODES: &str = "\
Exit codes:
  0   done
  1   'catalog diff', also of a fleet: a difference; 'image check --strict': an error or a warning; 'doctor': a problem;
      'lab run' and 'lab resume': a scenario has no valid run, or an expectation of the study does
      not hold; with --strict also a dropped run; 'lab predict': a prediction misses its target
  2   usage: invalid options or values
  66  the base image or a disk is missing or cannot be used; there is no object of that name
  69  not reachable: nobody serves this socket or host, or QEMU is not installed; 'fleet status': the
      host is no member of its fleet now
  70  the worker or spillwayd failed, or the host refuses a basic operation
  73  an overflow file, a disk, a socket or an image cannot be created; spillwayd's host has no memory
      or disk space left for it; no machine that can be claimed
  75  refused for now: a client is connected, the memory is not free, the object is in use
  77  permission denied; an unknown token, or a role that is not sufficient; a certificate that is not
      trusted
  130 'machine claim --wait' or 'fleet claim' was interrupted, and its claim was undone; with --key it
      may stay, and the error says so
  'run' passes on the exit code of QEMU, and 'machine exec' that of the program: see its --help.";

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

    /// The command line is invalid.
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure::new(Exit::Usage, message)
    }
}

impl From<SupervisorError> for Failure {
    fn from(error: SupervisorError) -> Failure {
        Failure::new(error.kind.exit(), error.to_string())
    }
}

impl From<clap::Error> for Failure {
    /// In one line; the usage is left to `--help`.
    fn from(error: clap::Error) -> Failure {
        Failure::usage(in_one_line(&error.to_string()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
