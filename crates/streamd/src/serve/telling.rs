//! What is told in the log again and again while it goes on. Owns how often.

use super::cache::locked;
use std::fmt::Display;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Interval of messages, at least.
const EACH: Duration = Duration::from_secs(60);

/// Messages of one kind.
#[derive(Default)]
pub struct Telling(Mutex<Option<Instant>>);

impl Telling {
    /// Tells something, unless something was told less than a minute ago.
    pub fn tell(&self, text: impl Display) {
        let mut told = locked(&self.0);
        if told.is_none_or(|at| at.elapsed() >= EACH) {
            *told = Some(Instant::now());
            eprintln!("spillway-streamd: {text}");
        }
    }
}
