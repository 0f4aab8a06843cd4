//! Sizes as people write them, in binary units only: `256M` is 256 x 1024 x 1024 bytes. Decimal units are refused rather
//! than taken for binary ones.
//!
//! Invariant: an accepted size is exact; nothing is rounded.

/// Error for a text that is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SizeError(String);

/// Parses `256M`, `10G`, `64KiB` or `1048576` into bytes.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim_start();
    let shift = match unit.to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        "KB" | "MB" | "GB" | "TB" => {
            let binary = format!("'{unit}' may mean two sizes: write {}iB (sizes are binary)", &unit[..1]);
            return Err(SizeError(binary));
        }
        _ => return Err(SizeError("a size is a whole number with K, M, G or T, such as 256M".into())),
    };
    if number.is_empty() {
        return Err(SizeError("a size begins with a number, such as 256M".into()));
    }
    let bytes = number.parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift));
    bytes.ok_or_else(|| SizeError("too large".into()))
}

/// Formats a size exactly, such as `256M`; as a plain number if it is no multiple of a unit.
pub fn size_text(bytes: u64) -> String {
    let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let whole = units.iter().find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    whole.map_or(bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::{parse_size, size_text};

    #[test]
    fn what_is_shown_is_read_again() {
        for (bytes, text) in [
            (0, "0"),
            (1, "1"),
            (1023, "1023"),
            (1024, "1K"),
            (1025, "1025"),
            (256 << 20, "256M"),
            (1536 << 20, "1536M"),
            (10 << 30, "10G"),
            (4 << 40, "4T"),
            (u64::MAX, "18446744073709551615"),
            (1 << 63, "8388608T"),
        ] {
            assert_eq!(size_text(bytes), text);
            assert_eq!(parse_size(text), Ok(bytes));
        }
    }

    #[test]
    fn all_spellings_are_binary() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("64K", 64 << 10),
            ("256M", 256 << 20),
            ("256m", 256 << 20),
            ("256 MiB", 256 << 20),
            ("10G", 10 << 30),
            ("4TiB", 4 << 40),
            ("16777215T", 16_777_215 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in [
            "",
            "M",
            "-1",
            "1.5G",
            "1X",
            "1GG",
            "0x10",
            "1 0",
            "10GB",
            "16777216T",
            "99999999999999999999",
            "١",
        ] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
