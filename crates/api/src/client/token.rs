//! Access tokens for remote daemons. Owns the text, and never shows it.
//!
//! Invariant: a token is a valid header value, and a file with a token is not readable by others.

use super::ClientError;
use hyper::header::HeaderValue;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Longest token that spillwayd accepts.
const MAX_TOKEN_BYTES: usize = 512;

/// Access token that is sent with each request.
#[derive(Clone)]
pub struct Token(HeaderValue);

/// Error for a text that is not a token. It does not contain the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a token is one word of printable ASCII, 512 bytes at most, as 'spillway token new' prints it")]
pub struct TokenError;

impl Token {
    /// Parses a token, without white space around it.
    pub fn new(text: &str) -> Result<Token, TokenError> {
        let text = text.trim_ascii();
        let is_word =
            (1..=MAX_TOKEN_BYTES).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
        let mut value = is_word.then(|| HeaderValue::try_from(format!("Bearer {text}")).ok()).flatten();
        value.iter_mut().for_each(|value| value.set_sensitive(true));
        value.map(Token).ok_or(TokenError)
    }

    /// Reads a file that contains a token and nothing else, and that nobody else may read or write.
    pub fn load(path: &Path) -> Result<Token, ClientError> {
        let read = || {
            let file = File::open(path)?;
            if file.metadata()?.mode() & 0o027 != 0 {
                let why = "others may read it, or its group write it: chmod 0600";
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            let mut text = String::new();
            // Read more than the longest token, to detect a longer one.
            file.take(2 * MAX_TOKEN_BYTES as u64).read_to_string(&mut text)?;
            Token::new(&text).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
        };
        read().map_err(|source| ClientError::File { path: path.to_owned(), source })
    }

    /// Value of the header `Authorization`.
    pub(super) fn header(&self) -> &HeaderValue {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_a_word_and_is_not_shown() {
        let token = Token::new(" secret\n").unwrap();
        assert_eq!(token.header(), "Bearer secret");
        assert!(!format!("{token:?} {:?}", token.header()).contains("secret"));
        for text in ["", "\n", "two words", "a\nb", "é", "a\0", &"x".repeat(MAX_TOKEN_BYTES + 1)] {
            assert!(Token::new(text).is_err(), "{text:?}");
        }
    }
}
