//! Signals that interrupt a waiting client, so that the program can clean up. Owns no state: tokio receives the
//! signals.
//!
//! Invariant: a signal that this process was started to ignore (nohup, a shell's background job) stays ignored.

use super::Client;
use std::io;
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

impl Client {
    /// Makes signals that would end the process (SIGINT, SIGTERM, SIGHUP) end the current or the next request with
    /// [`super::ClientError::Interrupted`], one request per signal.
    pub fn interruptible(&mut self) -> io::Result<()> {
        let interrupt = Arc::new(Notify::new());
        let ignored = ignored();
        let _runtime = self.runtime.enter();
        for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
            if ignored & (1 << (kind.as_raw_value() - 1)) != 0 {
                continue;
            }
            let (mut signals, interrupt) = (signal(kind)?, Arc::clone(&interrupt));
            self.runtime.spawn(async move {
                while signals.recv().await.is_some() {
                    interrupt.notify_one();
                }
            });
        }
        self.interrupt = Some(interrupt);
        Ok(())
    }
}

/// Returns the signals that this process ignores, one bit for each; none if that cannot be read.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
