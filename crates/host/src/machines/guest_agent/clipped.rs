//! Lines of a guest agent whose long texts are shortened while they are received. An agent sends all that a program has written in
//! one line, of which only the beginning is kept. Owns the bytes of an incomplete line.
//!
//! Invariant: the memory for a line is bounded whatever is received. A line that was JSON is JSON when it is shortened, if its long
//! texts are ASCII without pairs of escapes, as base64 is; other long texts may be cut in a character, which makes it invalid.

/// Longest text of a line that is kept whole, in bytes: base64 of a little more than is kept of an output, so that what is too
/// long is known.
pub const MAX_TEXT_BYTES: usize = (spillway_api::MOST_GUEST_OUTPUT_BYTES / 3 + 1) * 4;
/// Longest shortened line: two outputs, and what names them.
pub const MAX_LINE_BYTES: usize = 2 * MAX_TEXT_BYTES + (64 << 10);
/// Bytes of an escape (RFC 8259, 7): `\u` and four digits.
const ESCAPE_BYTES: usize = 6;

/// A line that does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineTooLong;

/// Receives lines.
#[derive(Debug)]
pub struct ClippedLine {
    line: Vec<u8>,
    /// Longest line.
    max_bytes: usize,
    /// Number of bytes of the text that is being received; `None`: it is not in a text.
    text_bytes: Option<usize>,
    /// Whether the last byte was a backslash in a text.
    is_escaped: bool,
    /// Whether the rest of the text is left out.
    is_clipped: bool,
}

impl ClippedLine {
    /// Creates one for lines that have at most so many bytes when they are shortened.
    pub fn new(max_bytes: usize) -> ClippedLine {
        ClippedLine { line: Vec::new(), max_bytes, text_bytes: None, is_escaped: false, is_clipped: false }
    }

    /// Takes bytes up to the end of a line. Returns how many, and the line if it is complete.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(usize, Option<Vec<u8>>), LineTooLong> {
        for (n, byte) in bytes.iter().enumerate() {
            if *byte == b'\n' {
                let line = std::mem::replace(self, ClippedLine::new(self.max_bytes)).line;
                return Ok((n + 1, Some(line)));
            }
            self.push(*byte)?;
        }
        Ok((bytes.len(), None))
    }

    fn push(&mut self, byte: u8) -> Result<(), LineTooLong> {
        match &mut self.text_bytes {
            None => {
                if byte == b'"' {
                    self.text_bytes = Some(0);
                }
            }
            Some(_) if byte == b'"' && !self.is_escaped => {
                (self.text_bytes, self.is_clipped) = (None, false);
            }
            Some(length) => {
                *length += 1;
                // An escape is kept whole or not at all.
                let needs = if byte == b'\\' && !self.is_escaped { ESCAPE_BYTES } else { 1 };
                self.is_clipped |= !self.is_escaped && *length + needs - 1 > MAX_TEXT_BYTES;
                self.is_escaped = byte == b'\\' && !self.is_escaped;
                if self.is_clipped {
                    return Ok(());
                }
            }
        }
        if self.line.len() >= self.max_bytes {
            return Err(LineTooLong);
        }
        self.line.push(byte);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn lines(bytes: &[u8], piece: usize) -> Result<Vec<Value>, LineTooLong> {
        let (mut line, mut found) = (ClippedLine::new(MAX_LINE_BYTES), Vec::new());
        for mut piece in bytes.chunks(piece) {
            while !piece.is_empty() {
                let (taken, whole) = line.take(piece)?;
                piece = &piece[taken..];
                found.extend(whole.map(|line| serde_json::from_slice(&line).unwrap()));
            }
        }
        Ok(found)
    }

    #[test]
    fn a_long_text_is_shortened_and_the_line_stays_json() {
        let short = json!({ "return": { "out-data": "a\"b\\\u{1}", "exited": true } });
        for piece in [1, 7, 1 << 20] {
            assert_eq!(
                lines(format!("{short}\n{short}\n").as_bytes(), piece).unwrap(),
                [short.clone(), short.clone()]
            );
        }
        let long = "x".repeat(MAX_TEXT_BYTES + 9_000_000);
        let sent = json!({ "return": { "out-data": long, "err-data": long, "exitcode": 7 } });
        let found = lines(format!("{sent}\n{short}\n").as_bytes(), 4096).unwrap();
        assert_eq!(found[0]["return"]["out-data"].as_str().unwrap().len(), MAX_TEXT_BYTES);
        assert_eq!(found[0]["return"]["err-data"].as_str().unwrap().len(), MAX_TEXT_BYTES);
        assert_eq!((&found[0]["return"]["exitcode"], &found[1]), (&7.into(), &short));
    }

    #[test]
    fn an_escape_at_the_limit_is_not_cut_in_two() {
        for before in MAX_TEXT_BYTES - 8..=MAX_TEXT_BYTES + 1 {
            for escape in ["\\u0041", "\\\\", "\\\"", "\\n"] {
                let text = format!("{}{escape}{escape}tail", "x".repeat(before));
                let found = lines(format!("{{\"a\":\"{text}\",\"b\":1}}\n").as_bytes(), 1 << 16).unwrap();
                assert_eq!(found[0]["b"], 1, "{before} {escape}");
                assert!(found[0]["a"].as_str().unwrap().len() <= MAX_TEXT_BYTES);
            }
        }
    }

    #[test]
    fn a_line_of_many_texts_or_none_is_bounded() {
        let many = format!("[{}", "\"xxxxxxxx\",".repeat(MAX_LINE_BYTES / 8));
        assert_eq!(lines(many.as_bytes(), 4096), Err(LineTooLong));
        assert_eq!(lines(&vec![b'['; MAX_LINE_BYTES + 1], 4096), Err(LineTooLong));
    }
}
