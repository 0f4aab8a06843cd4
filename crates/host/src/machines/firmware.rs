//! Detects guests that do not get past their firmware: a machine whose disk has no boot loader runs but is never ready.
//! Owns when the disk's counters are read, and the message.
//!
//! Invariant: a disk is asked only while its guest has read next to nothing of it.

use super::blocking::blocking;
use super::disk;
use super::run::{MachineFolder, RunRecord};
use spillway_control::{Request, Stats, bytes};
use std::time::{Duration, Instant};

/// Time that a guest gets before a hint is given.
const PATIENCE: Duration = Duration::from_secs(30);
/// Interval between two checks of a guest that is still in its firmware.
const AGAIN: Duration = Duration::from_secs(10);
/// Firmware reads tables and a few folders; a boot loader reads a kernel, which is more than this.
const FIRMWARE_BYTES: u64 = 1 << 20;

/// Interval for a guest that is past its firmware: effectively never.
const DONE: Duration = Duration::from_secs(86_400);

/// Progress of a guest past its firmware.
#[derive(Debug, Default)]
pub struct Firmware {
    /// When its VMM started, as far as this daemon knows.
    since: Option<Instant>,
    /// Whether the guest has read more than firmware does.
    is_past: bool,
}

impl Firmware {
    /// Starts to watch a VMM that has just started.
    pub fn begins(&mut self) {
        *self = Firmware { since: Some(Instant::now()), is_past: false };
    }

    /// Returns a hint why the guest may never be ready, if there is one.
    pub async fn look(&mut self, folder: &MachineFolder, run: &RunRecord) -> Option<String> {
        let since = *self.since.get_or_insert_with(Instant::now);
        // A guest whose kernel is given by the host may need nothing from the disk.
        self.is_past |= run.ready && (run.spec.ready.is_some() || run.spec.hardware.kernel.is_some());
        if self.is_past || since.elapsed() < PATIENCE {
            return None;
        }
        let folder = folder.clone();
        let asked = blocking(move || disk::ask(folder.path(), &Request::Stats)).await.ok()?;
        let guest = serde_json::from_value::<Stats>(asked).ok()?.planes.guest;
        self.is_past = guest.read_bytes >= FIRMWARE_BYTES || guest.writes > 0;
        (!self.is_past).then(|| hint(guest.read_bytes, since.elapsed(), run.spec.hardware.kernel.is_some()))
    }

    /// Returns the time until the next check.
    pub fn next_look(&self) -> Duration {
        match self.since {
            _ if self.is_past => DONE,
            Some(since) => PATIENCE.saturating_sub(since.elapsed()).max(AGAIN),
            None => PATIENCE,
        }
    }
}

fn hint(read_bytes: u64, since: Duration, has_kernel: bool) -> String {
    let (read, seconds) = (bytes(read_bytes), since.as_secs());
    match has_kernel {
        false => format!(
            "its guest has read {read} of its disk in {seconds} s: its firmware finds no boot loader there, or waits \
             ('image check' says what it finds; a catalog can have a kernel)"
        ),
        true => format!(
            "its guest has read {read} of its disk in {seconds} s: its kernel has not come to mount it (see 'machine console')"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_looked_at_when_something_could_be_said() {
        let mut firmware = Firmware::default();
        assert_eq!(firmware.next_look(), PATIENCE);
        firmware.begins();
        assert!(firmware.next_look() <= PATIENCE && firmware.next_look() >= AGAIN);
        firmware.is_past = true;
        assert_eq!(firmware.next_look(), DONE);
        firmware.begins();
        assert!(!firmware.is_past, "the next one may be another");
    }

    #[test]
    fn what_is_said_depends_on_who_starts_the_guest() {
        let said = |has_kernel| hint(512, Duration::from_secs(31), has_kernel);
        assert!(said(false).contains("512 B") && said(false).contains("no boot loader"));
        assert!(said(true).contains("its kernel has not come to mount it"));
    }
}
