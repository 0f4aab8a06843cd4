//! Secrets that nobody can guess.

use rustix::rand::{GetRandomFlags, getrandom};
use std::io;

/// 32 random bytes as hexadecimal digits.
///
/// # Errors
/// The kernel has no random bytes.
pub fn random() -> io::Result<String> {
    let mut bytes = [0; 32];
    let mut filled = 0;
    while filled < bytes.len() {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_has_64_digits_and_is_another_one_each_time() {
        let [one, other] = [random().unwrap(), random().unwrap()];
        assert!(one != other && one.len() == 64 && one.bytes().all(|digit| digit.is_ascii_hexdigit()));
    }
}
