//! Durations as people write them: `90s`, `30m`, `2h`, `7d`. Owns the syntax.
//!
//! Invariant: a text that is not a duration, or exceeds 32 bits of seconds, is refused, and so is a number without a unit.

const FORMS: &str = "a time is a number with its unit s, m, h or d, such as 90s, 30m, 2h or 7d";

/// Parses a duration such as `90s`, `30m`, `2h` or `7d` into seconds, at least 1.
pub fn parse_seconds(text: &str) -> Result<u32, String> {
    let (number, unit) = match text.char_indices().next_back() {
        Some((at, 's')) => (&text[..at], 1),
        Some((at, 'm')) => (&text[..at], 60),
        Some((at, 'h')) => (&text[..at], 3600),
        Some((at, 'd')) => (&text[..at], 86_400),
        _ => return Err(FORMS.into()),
    };
    let whole = number.bytes().all(|b| b.is_ascii_digit()).then(|| number.parse::<u32>().ok()).flatten();
    let seconds = whole.and_then(|number| number.checked_mul(unit)).filter(|seconds| *seconds > 0);
    seconds.ok_or_else(|| FORMS.into())
}

/// Parses the duration of a claim; `none` (0) means that it has no end.
pub fn parse_ttl(text: &str) -> Result<u32, String> {
    match text {
        "none" => Ok(0),
        _ => parse_seconds(text).map_err(|why| format!("{why}, or none")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_number_and_a_unit() {
        for (text, seconds) in [("1s", 1), ("90s", 90), ("30m", 1800), ("2h", 7200), ("7d", 604_800)] {
            assert_eq!((parse_seconds(text), parse_ttl(text)), (Ok(seconds), Ok(seconds)));
        }
        for text in
            ["", "0", "5", "0s", "h", "-1", "+1", "1.5h", "1w", "é", "2hé", "5000000000", "1193047h", "none "]
        {
            assert!(parse_seconds(text).is_err() && parse_ttl(text).is_err(), "{text}");
        }
        assert_eq!(parse_ttl("none"), Ok(0));
        assert!(parse_seconds("none").is_err());
    }
}
