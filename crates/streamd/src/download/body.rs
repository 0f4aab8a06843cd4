//! The body of an answer as a blocking reader. Owns its bound, its digest, and what went wrong while it was received.
//!
//! Invariant: not one byte more than the bound is passed on, and every byte that is passed on is in the digest.

use super::{damaged, unsupported};
use crate::causes::root_cause;
use crate::job::say;
use reqwest::Response;
use sha2::{Digest, Sha256};
use spillway_image::digests::hex;
use spillway_registry::job::JobMessage;
use spillway_registry::{RegistryError, RegistryErrorKind};
use std::io::{self, Read};
use std::sync::{Arc, OnceLock};
use tokio::runtime::Handle;

/// Bytes between two lines of progress.
const STEP_BYTES: u64 = 16 << 20;

/// What went wrong with a body. Readers above it wrap its errors in theirs.
#[derive(Clone, Default)]
pub struct Faults(Arc<OnceLock<RegistryError>>);

impl Faults {
    fn record(&self, error: RegistryError) -> io::Error {
        io::Error::other(self.0.get_or_init(|| error).clone())
    }

    /// Explains an error of a reader above the body, or of the file to which it is written.
    pub fn explain(&self, shown: &str, error: &io::Error) -> RegistryError {
        if let Some(fault) = self.0.get() {
            return fault.clone();
        }
        if let Some(own) = error.get_ref().and_then(|inner| inner.downcast_ref::<RegistryError>()) {
            return RegistryError::new(own.kind, format!("{shown}: {}", own.message));
        }
        match error.raw_os_error() {
            Some(_) => crate::job::local(format!("{shown}: the download cannot be written: {error}")),
            None => damaged(format!("{shown}: it cannot be unpacked: {error}")),
        }
    }
}

/// A body that is being received. It is read on a thread that may block.
pub struct Body {
    answer: Response,
    runtime: Handle,
    shown: String,
    part: io::Cursor<Vec<u8>>,
    sha256: Sha256,
    received_bytes: u64,
    most_bytes: u64,
    faults: Faults,
}

impl Body {
    /// The body of an answer, which is refused if its server says that it has more bytes than this.
    pub fn new(answer: Response, shown: &str, most_bytes: u64) -> Result<Body, RegistryError> {
        if answer.content_length().is_some_and(|bytes| bytes > most_bytes) {
            return Err(too_large(shown, most_bytes));
        }
        Ok(Body {
            answer,
            runtime: Handle::current(),
            shown: shown.to_owned(),
            part: io::Cursor::default(),
            sha256: Sha256::new(),
            received_bytes: 0,
            most_bytes,
            faults: Faults::default(),
        })
    }

    /// Tells the daemon how much there is to receive, if that is known.
    pub fn say_total(&self) {
        if let Some(bytes) = self.answer.content_length() {
            say(&JobMessage::Total(bytes));
        }
    }

    /// What goes wrong with it, also later.
    pub fn faults(&self) -> Faults {
        self.faults.clone()
    }

    /// Receives the next part. There is none at the end.
    fn next_part(&mut self) -> Result<Option<Vec<u8>>, RegistryError> {
        let received = self.runtime.block_on(self.answer.chunk());
        let part = received.map_err(|e| {
            let why = root_cause(&e.without_url());
            let bytes = self.received_bytes;
            let message = format!("{}: the answer ended after {bytes} bytes: {why}: try again", self.shown);
            RegistryError::new(RegistryErrorKind::Unreachable, message)
        })?;
        let Some(part) = part else { return Ok(None) };
        let before = self.received_bytes;
        self.received_bytes += part.len() as u64;
        if self.received_bytes > self.most_bytes {
            return Err(too_large(&self.shown, self.most_bytes));
        }
        self.sha256.update(&part);
        if before / STEP_BYTES != self.received_bytes / STEP_BYTES {
            say(&JobMessage::Progress(self.received_bytes));
        }
        Ok(Some(part.to_vec()))
    }

    /// Receives what nobody has read. Returns the SHA-256 of the whole body, as hexadecimal digits.
    pub fn finish(mut self) -> io::Result<String> {
        io::copy(&mut self, &mut io::sink())?;
        Ok(hex(&self.sha256.finalize()))
    }
}

fn too_large(shown: &str, most_bytes: u64) -> RegistryError {
    unsupported(format!("{shown}: it has more than {most_bytes} bytes, which is the most that is downloaded"))
}

impl Read for Body {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.part.position() == self.part.get_ref().len() as u64 {
            match self.next_part() {
                Ok(Some(part)) => self.part = io::Cursor::new(part),
                Ok(None) => return Ok(0),
                Err(e) => return Err(self.faults.record(e)),
            }
        }
        self.part.read(into)
    }
}
