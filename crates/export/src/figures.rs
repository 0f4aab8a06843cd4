//! The numbers that an error is about, as both protocols show them. Owns their form and nothing else.
//!
//! Invariant: figures are plain numbers, so that an error that holds them is copied and never allocates.

use std::fmt;

/// What was found, and what would have been right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Figures {
    /// No number matters.
    #[default]
    None,
    /// A number that is wrong as such.
    Found(u64),
    /// A set of bits, or an address: shown in hexadecimal.
    Bits(u64),
    /// Another number than the one that was expected.
    Unequal {
        /// The number.
        found: u64,
        /// What it has to be.
        expected: u64,
    },
    /// More than the largest number that is allowed.
    Above {
        /// The number.
        found: u64,
        /// The largest that is allowed.
        most: u64,
    },
    /// Less than the smallest number that is allowed.
    Below {
        /// The number.
        found: u64,
        /// The smallest that is allowed.
        least: u64,
    },
}

impl fmt::Display for Figures {
    /// Follows a sentence: begins with a colon unless there is nothing to show.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Figures::None => Ok(()),
            Figures::Found(found) => write!(f, ": {found}"),
            Figures::Bits(bits) => write!(f, ": {bits:#x}"),
            Figures::Unequal { found, expected } => write!(f, ": {found} instead of {expected}"),
            Figures::Above { found, most } => write!(f, ": {found}, at most {most} is allowed"),
            Figures::Below { found, least } => write!(f, ": {found}, at least {least} is needed"),
        }
    }
}

/// The operating system's reason, behind a sentence.
pub(crate) struct Cause(pub Option<rustix::io::Errno>);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |errno| write!(f, ": {errno}"))
    }
}
