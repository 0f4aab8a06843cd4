//! When a figure was measured, and with which Spillway. Never names a path.

use serde::Serialize;
use std::fmt;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

/// What every kept result begins with.
#[derive(Clone, Debug, Serialize)]
pub struct Stamp {
    /// Seconds since 1970.
    pub unix_time: u64,
    /// The same as `2026-01-31T12:00:00Z`.
    pub date: String,
    /// The program's name and version; `None` where it does not start.
    pub spillway: Option<String>,
    /// The sources' commit, `-dirty` behind it if they had changed; `None` outside a git checkout.
    pub commit: Option<String>,
}

/// This moment, as `2026-01-31T12:00:00Z`.
pub fn now() -> String {
    date(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()))
}

impl Stamp {
    /// Now, with the program at this path.
    pub fn now(spillway: &Path) -> Stamp {
        let unix_time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let mut git = Command::new("git");
        git.args(["-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--tags", "--dirty"]);
        Stamp {
            unix_time,
            date: date(unix_time),
            spillway: output(Command::new(spillway).arg("--version")),
            commit: output(&mut git),
        }
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (spillway, commit) = (self.spillway.as_deref(), self.commit.as_deref());
        write!(f, "{}, {}, {}", spillway.unwrap_or("no spillway"), commit.unwrap_or("no commit"), self.date)
    }
}

/// The first line that a command that succeeds prints.
pub fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).lines().next()?.trim().to_string())
}

/// A moment in UTC, by the Gregorian calendar.
fn date(unix_time: u64) -> String {
    let (mut days, seconds) = (unix_time / 86_400, unix_time % 86_400);
    let leap = |y: u64| (y.is_multiple_of(4) && !y.is_multiple_of(100)) || y.is_multiple_of(400);
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year}-{:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates_follow_the_calendar() {
        for (unix_time, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(date(unix_time), text);
        }
    }
}
