//! Waves of a rollout over hosts. Owns the syntax.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Hosts that have the new version when a wave of a rollout ends: a number (`1`), or a part of all hosts of the catalog (`10%`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Wave {
    /// So many hosts.
    Hosts(u32),
    /// So many of a hundred hosts, rounded up.
    Percent(u32),
}

/// Error for a text that is no wave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a wave is a number of hosts, 1 to 99999, or a part of them, 1% to 100%")]
pub struct WaveError;

impl Wave {
    /// Number of hosts, of so many; at least 1 and at most all.
    pub fn hosts(self, of: usize) -> usize {
        let hosts = match self {
            Wave::Hosts(hosts) => hosts as usize,
            Wave::Percent(percent) => of.saturating_mul(percent as usize).div_ceil(100),
        };
        hosts.max(1).min(of)
    }
}

impl FromStr for Wave {
    type Err = WaveError;

    fn from_str(text: &str) -> Result<Wave, WaveError> {
        let (digits, most, make): (_, _, fn(u32) -> Wave) = match text.strip_suffix('%') {
            Some(digits) => (digits, 100, Wave::Percent),
            None => (text, 99_999, Wave::Hosts),
        };
        let is_plain = digits.bytes().all(|b| b.is_ascii_digit()) && !digits.starts_with('0');
        let number = digits.parse::<u32>().ok().filter(|number| is_plain && (1..=most).contains(number));
        number.map(make).ok_or(WaveError)
    }
}

impl TryFrom<String> for Wave {
    type Error = WaveError;

    fn try_from(text: String) -> Result<Wave, WaveError> {
        text.parse()
    }
}

impl From<Wave> for String {
    fn from(wave: Wave) -> String {
        wave.to_string()
    }
}

impl fmt::Display for Wave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wave::Hosts(hosts) => write!(f, "{hosts}"),
            Wave::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wave_is_a_number_or_a_part_of_hosts() {
        for (text, of, hosts) in [
            ("1", 8, 1),
            ("10%", 8, 1),
            ("50%", 7, 4),
            ("100%", 7, 7),
            ("12", 8, 8),
            ("1%", 1000, 10),
            ("3", 0, 0),
        ] {
            let wave: Wave = text.parse().unwrap();
            assert_eq!((wave.hosts(of), wave.to_string().as_str()), (hosts, text));
        }
        for text in ["", "0", "0%", "101%", "%", "-1", "+1", "01", "1.5", "100000", "1 ", "10%%"] {
            assert_eq!(text.parse::<Wave>(), Err(WaveError), "{text}");
        }
        assert!(serde_json::from_str::<Wave>("\"0\"").is_err());
    }
}
