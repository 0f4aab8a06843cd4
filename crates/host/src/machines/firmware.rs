//! Whether a guest has come past its firmware: a machine whose disk has no boot loader runs, and never says why it is not
//! ready. Owns when the disk's counters are looked at, and the words.
//!
//! Invariant: a disk is asked for as long as its guest has read next to nothing of it, and not again after that.

use super::blocking::blocking;
use super::disk;
use super::run::{MachineFolder, RunRecord};
use spillway_control::{Request, Stats, bytes};
use std::time::{Duration, Instant};

/// How long a guest may take before something is said.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at a guest that is not past it.
const AGAIN: Duration = Duration::from_secs(10);
/// Firmware reads tables and a few folders; a boot loader reads a kernel.
const FIRMWARE_BYTES: u64 = 1 << 20;

/// One that is past it is not looked at for its firmware's sake.
const DONE: Duration = Duration::from_secs(86_400);

/// What is known of a guest.
#[derive(Debug, Default)]
pub struct Firmware {
    /// Since when its VMM runs, as far as this daemon knows.
    since: Option<Instant>,
    /// It has read more than firmware does.
    is_past: bool,
}

impl Firmware {
    /// Its VMM starts.
    pub fn begins(&mut self) {
        *self = Firmware { since: Some(Instant::now()), is_past: false };
    }

    /// Why its guest may never be ready, if that can be told.
    pub async fn look(&mut self, folder: &MachineFolder, run: &RunRecord) -> Option<String> {
        let since = *self.since.get_or_insert_with(Instant::now);
        // A kernel from outside may need nothing of the disk.
        self.is_past |= run.ready && (run.spec.ready.is_some() || run.spec.kernel.is_some());
        if self.is_past || since.elapsed() < PATIENCE {
            return None;
        }
        let folder = folder.clone();
        let asked = blocking(move || disk::ask(folder.path(), &Request::Stats)).await.ok()?;
        let guest = serde_json::from_value::<Stats>(asked).ok()?.planes.guest;
        self.is_past = guest.read_bytes >= FIRMWARE_BYTES || guest.writes > 0;
        (!self.is_past).then(|| hint(guest.read_bytes, since.elapsed(), run.spec.kernel.is_some()))
    }

    /// When it is to be looked at again at the latest.
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
