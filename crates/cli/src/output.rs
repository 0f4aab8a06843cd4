//! Writing to the terminal, with the failures of this program.

use crate::error::Failure;
pub use spillway_control::output::complain;

/// Writes text to standard output. `false`: nobody reads it any more.
pub fn print(text: &str) -> Result<bool, Failure> {
    Ok(spillway_control::output::print(text)?)
}
