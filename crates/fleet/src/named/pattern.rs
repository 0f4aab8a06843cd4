//! Names of a catalog's machines: a run of `#` stands for a number with that many digits.
//!
//! Owns the reading of a pattern, nothing more. Invariant: a pattern gives each number another name.

use spillway_api::Name;

/// The pattern of a catalog's names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern {
    before: String,
    digits: usize,
    after: String,
}

impl NamePattern {
    /// Reads a pattern such as `desk-###`; none: it has no run of `#`, or several.
    pub fn parse(pattern: &str) -> Option<NamePattern> {
        let from = pattern.find('#')?;
        let after = pattern[from..].trim_start_matches('#');
        let digits = pattern.len() - from - after.len();
        let pattern = NamePattern { before: pattern[..from].into(), digits, after: after.into() };
        (digits <= 9 && !pattern.after.contains('#')).then_some(pattern)
    }

    /// The name for a number, from 1 on; none: it has more digits than the pattern, or the name is none.
    pub fn name(&self, number: u32) -> Option<Name> {
        let NamePattern { before, digits, after } = self;
        let text = format!("{number:0digits$}");
        (number > 0 && text.len() == *digits).then(|| format!("{before}{text}{after}").parse().ok())?
    }

    /// Whether a name is one of this pattern.
    pub fn is_of(&self, name: &Name) -> bool {
        let rest = name.as_str().strip_prefix(self.before.as_str());
        let number = rest.and_then(|rest| rest.strip_suffix(self.after.as_str()));
        number.is_some_and(|number| {
            number.len() == self.digits && number.bytes().all(|byte| byte.is_ascii_digit())
        })
    }

    /// Whether a name may be one of both patterns.
    pub fn overlaps(&self, other: &NamePattern) -> bool {
        // In each place a character, or any digit.
        let places = |of: &NamePattern| -> Vec<Option<u8>> {
            let digits = std::iter::repeat_n(None, of.digits);
            of.before.bytes().map(Some).chain(digits).chain(of.after.bytes().map(Some)).collect()
        };
        let (own, other) = (places(self), places(other));
        own.len() == other.len()
            && own.into_iter().zip(other).all(|two| match two {
                (Some(one), Some(other)) => one == other,
                (Some(byte), None) | (None, Some(byte)) => byte.is_ascii_digit(),
                (None, None) => true,
            })
    }

    /// The highest number that it has a name for.
    pub fn most(&self) -> u32 {
        10u32.pow(self.digits.min(9) as u32) - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_overlap_if_a_name_is_of_both() {
        for (one, other, overlap) in [
            ("pc-###", "pc-###", true),
            ("pc-###", "pc-1##", true),
            ("pc-0##", "pc-1##", false),
            ("pc-###", "pc-##", false),
            ("pc-###", "pcs###", false),
            ("#-pc", "1-##", false),
            ("a#1", "a2#", true),
        ] {
            let [one, other] = [one, other].map(|pattern| NamePattern::parse(pattern).unwrap());
            assert_eq!((one.overlaps(&other), other.overlaps(&one)), (overlap, overlap), "{one:?} {other:?}");
        }
        let pattern = NamePattern::parse("pc-##x").unwrap();
        for (name, is_of) in [("pc-07x", true), ("pc-7x", false), ("pc-07", false), ("pc-a7x", false)] {
            assert_eq!(pattern.is_of(&name.parse().unwrap()), is_of, "{name}");
        }
    }

    #[test]
    fn a_number_has_one_name() {
        let pattern = NamePattern::parse("desk-###-x").unwrap();
        assert_eq!(pattern.name(7).unwrap().as_str(), "desk-007-x");
        assert_eq!((pattern.name(0), pattern.name(1000), pattern.most()), (None, None, 999));
        assert_eq!(NamePattern::parse("#").unwrap().name(5).unwrap().as_str(), "5");
        assert_eq!(NamePattern::parse("Desk-#").unwrap().name(1), None, "it is no name");
        for wrong in ["", "desk", "a#b#", "##########"] {
            assert_eq!(NamePattern::parse(wrong), None, "{wrong}");
        }
    }
}
