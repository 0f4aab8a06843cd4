//! Errors of the worker: why it cannot serve its disk or carry out a message. Owns the error type and its text; never
//! decides what follows from an error.
//!
//! Invariant: an error is as wide as a pointer, so that the results of what the loop calls in every turn are no wider than
//! what they return when nothing fails.

use serde::{Deserialize, Serialize};
use spillway_export::{Figures, nbd, vhost_user_blk};
use std::borrow::Cow;
use std::fmt;

/// Kind of an error, for programs: few and stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// The host has no memory, thread or file descriptor left, or refuses to give any.
    Resources,
    /// The engine that does the I/O cannot be made, or has failed.
    Engine,
    /// The channel to the supervisor has failed, or what came over it is not what has to come.
    Channel,
    /// The memory or the file that holds the disk is not what it has to be.
    Disk,
    /// The base image cannot be read.
    Image,
    /// Written data may not have reached the medium.
    Store,
    /// A setting or a limit has a value that it cannot have.
    Settings,
    /// A client breaks a rule of its protocol, or is too slow.
    Client,
    /// The request is not possible now.
    Refused,
}

/// Cause of an error.
type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why something that the worker was to do could not be done.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct Error(Box<Details>);

#[derive(Debug, thiserror::Error)]
#[error("{}{reason}{figures}{}{}", Object(.object.as_deref()), Part(.source.as_ref()), Part(.advice.as_ref()))]
struct Details {
    kind: ErrorKind,
    /// Description of the error, for people.
    reason: &'static str,
    /// Object of the error.
    object: Option<Cow<'static, str>>,
    /// The numbers that are wrong, and those that would be right.
    figures: Figures,
    /// Cause of the error.
    source: Option<Source>,
    /// Advice on what to do.
    advice: Option<&'static str>,
}

/// The object, before what is wrong with it.
struct Object<'a>(Option<&'a str>);

impl fmt::Display for Object<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |object| write!(f, "{object}: "))
    }
}

/// A part that follows the sentence, if it is set.
struct Part<'a, T>(Option<&'a T>);

impl<T: fmt::Display> fmt::Display for Part<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |part| write!(f, ": {part}"))
    }
}

impl Error {
    /// An error without an object, figures, a source and advice.
    #[cold]
    pub fn new(kind: ErrorKind, reason: &'static str) -> Error {
        let (object, figures, source, advice) = (None, Figures::None, None, None);
        Error(Box::new(Details { kind, reason, object, figures, source, advice }))
    }

    /// Says what it is about.
    pub fn of(mut self, object: impl Into<Cow<'static, str>>) -> Error {
        self.0.object = Some(object.into());
        self
    }

    /// Says which numbers are wrong.
    pub fn figures(mut self, figures: Figures) -> Error {
        self.0.figures = figures;
        self
    }

    /// Says what it was caused by.
    pub fn because(mut self, source: impl Into<Source>) -> Error {
        self.0.source = Some(source.into());
        self
    }

    /// Says what to do about it.
    pub fn advice(mut self, advice: &'static str) -> Error {
        self.0.advice = Some(advice);
        self
    }

    /// Kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The error in the form that is sent to the other process.
    pub fn report(&self) -> ReportedError {
        ReportedError::new(self.kind(), self.to_string())
    }
}

/// An error of the other process, as it crosses the channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub struct ReportedError {
    /// For programs.
    pub kind: ErrorKind,
    /// For people: what failed, on which object, why, and what to do.
    pub text: String,
}

impl ReportedError {
    /// Creates an error to send to the other process.
    pub fn new(kind: ErrorKind, text: impl Into<String>) -> ReportedError {
        ReportedError { kind, text: text.into() }
    }
}

/// Why the connection of a client has ended, or is about to.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionEnd {
    /// The client has left, as clients do.
    #[error("the client has left")]
    Left,
    /// A VMM's session has failed.
    #[error(transparent)]
    Vmm(vhost_user_blk::Disconnect),
    /// An NBD client's session has failed.
    #[error(transparent)]
    Nbd(nbd::Disconnect),
    /// The worker ends the connection.
    #[error(transparent)]
    Worker(#[from] Error),
    /// The supervisor, which reads the socket of a VMM, ends the connection.
    #[error(transparent)]
    Supervisor(#[from] ReportedError),
}

impl ConnectionEnd {
    /// The error to send to the supervisor; `None` if the client has disconnected by itself.
    pub fn report(&self) -> Option<ReportedError> {
        match self {
            ConnectionEnd::Left => None,
            ConnectionEnd::Worker(error) => Some(error.report()),
            ConnectionEnd::Supervisor(error) => Some(error.clone()),
            ConnectionEnd::Vmm(_) | ConnectionEnd::Nbd(_) => {
                Some(ReportedError::new(ErrorKind::Client, self.to_string()))
            }
        }
    }
}

impl From<vhost_user_blk::Disconnect> for ConnectionEnd {
    fn from(why: vhost_user_blk::Disconnect) -> ConnectionEnd {
        match why {
            vhost_user_blk::Disconnect::Left => ConnectionEnd::Left,
            why => ConnectionEnd::Vmm(why),
        }
    }
}

impl From<nbd::Disconnect> for ConnectionEnd {
    fn from(why: nbd::Disconnect) -> ConnectionEnd {
        if why.is_ordinary() { ConnectionEnd::Left } else { ConnectionEnd::Nbd(why) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;
    use std::io;

    #[test]
    fn an_error_says_what_failed_on_which_object_why_and_what_to_do() {
        let error = Error::new(ErrorKind::Disk, "it is too short")
            .of("the disk's memory `meta`")
            .figures(Figures::Below { found: 4096, least: 8192 });
        assert_eq!(
            error.to_string(),
            "the disk's memory `meta`: it is too short: 4096, at least 8192 is needed"
        );
        assert!(error.source().is_none());
        let error = Error::new(ErrorKind::Store, "the last writes may be lost")
            .because(io::Error::from_raw_os_error(libc::EIO))
            .advice("look after the store");
        assert_eq!(
            error.to_string(),
            "the last writes may be lost: Input/output error (os error 5): look after the store"
        );
        assert_eq!(error.source().unwrap().to_string(), "Input/output error (os error 5)");
        assert_eq!(error.report().kind, ErrorKind::Store);
    }

    #[test]
    fn a_result_is_no_wider_than_what_it_returns_when_nothing_fails() {
        assert_eq!(size_of::<Result<(), Error>>(), size_of::<usize>());
        assert_eq!(size_of::<Result<bool, Error>>(), 2 * size_of::<usize>());
    }

    #[test]
    fn a_client_that_leaves_by_itself_is_not_reported() {
        assert_eq!(ConnectionEnd::from(nbd::Disconnect::Closed).report(), None);
        assert_eq!(ConnectionEnd::from(vhost_user_blk::Disconnect::Left).report(), None);
        let error = Error::new(ErrorKind::Client, "it is too slow");
        let reported = ConnectionEnd::from(error).report().unwrap();
        assert_eq!(reported, ReportedError::new(ErrorKind::Client, "it is too slow"));
    }
}
