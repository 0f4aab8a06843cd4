//! Sizes as people write them. Binary only: `256M` is 256 x 1024 x 1024 bytes, and decimal spellings are refused
//! rather than taken for binary ones.
//!
//! Invariant: what is accepted is exact; nothing is rounded.

/// Why a text is no size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SizeError(String);

/// Reads `256M`, `10G`, `64KiB`, `1048576`: bytes.
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

#[cfg(test)]
mod tests {
    use super::parse_size;

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
