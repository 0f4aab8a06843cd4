//! Text from files and programs, made fit for one line.

/// Replaces control characters, which neither a terminal nor a line of a page or picture may receive, by spaces.
pub fn plain(words: &str) -> String {
    words.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_become_spaces() {
        assert_eq!(plain("a\u{0}\nb\u{1b}[1m"), "a  b [1m");
    }
}
