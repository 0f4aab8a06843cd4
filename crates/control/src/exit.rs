//! Exit codes of the programs. Invariant: they keep their meaning, which `spillway --help` and `docs/exit-codes.md` say.

use crate::error::ErrorKind;

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
    /// EX_CANTCREAT: an overflow file or a socket cannot be made; the host has no space for an image or a machine.
    Create = 73,
    /// EX_TEMPFAIL: refused for now: a client is connected, or the memory is not free.
    Refused = 75,
    /// EX_NOPERM: the operating system, or spillwayd, refuses access; or nobody can say that it is spillwayd.
    Permission = 77,
    /// A signal has ended what was waited for (128 and SIGINT, as shells say it).
    Interrupted = 130,
}

impl ErrorKind {
    /// With what a program ends that fails so.
    pub fn exit(self) -> Exit {
        match self {
            ErrorKind::Options => Exit::Usage,
            ErrorKind::Image => Exit::Image,
            ErrorKind::Memory | ErrorKind::InUse | ErrorKind::Refused => Exit::Refused,
            ErrorKind::Create => Exit::Create,
            ErrorKind::Permission => Exit::Permission,
            ErrorKind::Internal => Exit::Internal,
            ErrorKind::Unavailable => Exit::Unavailable,
        }
    }
}
