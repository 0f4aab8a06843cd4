//! Words of others in messages: what the cause of an error says, cut and escaped, since it may be anything.

use std::error::Error;

/// Longest part of another's words in a message, in characters.
const MOST_WORDS: usize = 300;

/// What the innermost cause says: the others repeat it, with much that people do not ask for.
pub fn root_cause(error: &dyn Error) -> String {
    let mut innermost = error;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    shortened(&innermost.to_string())
}

/// Words of another, for a message.
pub fn shortened(said: &str) -> String {
    let mut short: String = said.chars().take(MOST_WORDS).flat_map(char::escape_debug).collect();
    if said.chars().nth(MOST_WORDS).is_some() {
        short += "...";
    }
    short
}
