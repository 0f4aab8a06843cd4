//! Names of machines from a pattern: a run of `#` stands for a number with that many digits.
//!
//! Invariant: a pattern gives each number a different name, and every name is a valid host name.

use crate::error::HostError;
use spillway_api::Name;

/// A valid pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern {
    before: String,
    digits: usize,
    after: String,
}

impl NamePattern {
    /// Parses a pattern such as `desk-###`.
    pub fn parse(pattern: &str) -> Result<NamePattern, HostError> {
        let refuse = |why: &str| HostError::invalid(format!("naming '{}': {why}", pattern.escape_debug()));
        let Some(from) = pattern.find('#') else {
            return Err(refuse("it needs a run of # for the number, such as desk-###"));
        };
        let after = pattern[from..].trim_start_matches('#');
        let digits = pattern.len() - from - after.len();
        if after.contains('#') || digits > 9 {
            return Err(refuse("it takes one run of # for the number, 9 of them at most"));
        }
        let naming = NamePattern { before: pattern[..from].into(), digits, after: after.into() };
        naming.name(1).map_err(|e| refuse(&e.message))?;
        Ok(naming)
    }

    /// Returns the number in a name of this pattern.
    pub fn number(&self, name: &Name) -> Option<u32> {
        let digits = name.as_str().strip_prefix(self.before.as_str())?.strip_suffix(self.after.as_str())?;
        let number = digits.parse().ok().filter(|_| digits.len() == self.digits)?;
        (number > 0).then_some(number)
    }

    /// Returns the name for a number, from 1 on.
    pub fn name(&self, number: u32) -> Result<Name, HostError> {
        let text = format!("{}{number:0width$}{}", self.before, self.after, width = self.digits);
        if number.to_string().len() > self.digits {
            let message = format!(
                "{number} has more digits than the naming '{}{}{}' has #: give it more",
                self.before,
                "#".repeat(self.digits),
                self.after
            );
            return Err(HostError::invalid(message));
        }
        text.parse().map_err(|e: spillway_api::NameError| HostError::invalid(e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_become_names() {
        let naming = NamePattern::parse("desk-###").unwrap();
        assert_eq!(naming.name(7).unwrap().as_str(), "desk-007");
        assert_eq!(naming.name(999).unwrap().as_str(), "desk-999");
        let number = |name: &str| naming.number(&name.parse().unwrap());
        assert_eq!(
            ["desk-007", "desk-000", "desk-7", "desk-0x7", "lab-007"].map(number),
            [Some(7), None, None, None, None]
        );
        assert!(naming.name(1000).unwrap_err().message.contains("more digits"));
        assert_eq!(NamePattern::parse("#x").unwrap().name(5).unwrap().as_str(), "5x");
        for pattern in
            ["", "desk", "a#b#", "Desk-#", "-#", "#-", "a_#", "##########", &format!("{}#", "x".repeat(63))]
        {
            assert!(NamePattern::parse(pattern).is_err(), "{pattern}");
        }
    }
}
