//! What a machine at work reports, line by line, as it comes.
//!
//! Owns how far its report has been read. Invariant: a line is looked at once, when all of it is there; one that cannot be
//! understood is an error, never passed over.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The longest line: what fio says of one load takes some 20 KB.
const MOST_BYTES: usize = 1 << 20;
/// The longest report: a million actions take some 90 MB, as many seconds 110.
const MOST_REPORT_BYTES: u64 = 256 << 20;

/// One line. Times are seconds of the machine's own clock.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Line {
    /// The machine is up.
    Up {
        /// When.
        up: f64,
    },
    /// It waits for the word to begin.
    Ready {
        /// Since when.
        ready: f64,
    },
    /// Somebody did something.
    Action {
        /// What.
        action: String,
        /// Who.
        session: u32,
        /// When it began.
        at: f64,
        /// How long it took.
        took_ms: f64,
    },
    /// What the kernel has counted.
    Inside {
        /// By name.
        inside: BTreeMap<String, f64>,
        /// When.
        at: f64,
        /// It has been told to begin, and does so now.
        begins: bool,
    },
    /// A load of fio's has ended.
    Fio {
        /// Its name.
        fio: String,
        /// When it began.
        at: f64,
        /// How long it took.
        took_ms: f64,
        /// What fio says.
        json: Value,
    },
    /// The work is done.
    Done {
        /// Since when.
        done: f64,
    },
    /// The machine cannot go on.
    Error {
        /// Why.
        error: String,
    },
}

impl Line {
    /// When it was said, by the machine's clock.
    pub fn said(&self) -> Option<f64> {
        match self {
            Line::Up { up } => Some(*up),
            Line::Ready { ready } => Some(*ready),
            Line::Done { done } => Some(*done),
            Line::Action { at, took_ms, .. } | Line::Fio { at, took_ms, .. } => Some(at + took_ms / 1000.0),
            Line::Inside { at, .. } => Some(*at),
            Line::Error { .. } => None,
        }
    }
}

/// A report that is being written.
pub struct Lines {
    path: PathBuf,
    file: Option<File>,
    read_bytes: u64,
    part: Vec<u8>,
}

impl Lines {
    /// From its begin.
    pub fn new(path: &Path) -> Lines {
        Lines { path: path.into(), file: None, read_bytes: 0, part: Vec::new() }
    }

    /// The lines that have come since the last time, and when that was seen.
    pub fn read(&mut self) -> Result<(Instant, Vec<Line>)> {
        let what = || format!("{}: cannot read", self.path.display());
        if self.file.is_none() {
            self.file = Some(File::open(&self.path).with_context(what)?);
        }
        if let Some(file) = &mut self.file {
            let read = file.take(MOST_BYTES as u64).read_to_end(&mut self.part).with_context(what)?;
            self.read_bytes += read as u64;
        }
        let now = Instant::now();
        let whole = self.part.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        let path = self.path.display();
        ensure!(self.read_bytes <= MOST_REPORT_BYTES, "{path}: more than {MOST_REPORT_BYTES} bytes");
        let longest = self.part.split(|&b| b == b'\n').map(<[u8]>::len).max();
        ensure!(longest < Some(MOST_BYTES), "{path}: a line of more than {MOST_BYTES} bytes");
        let bytes: Vec<u8> = self.part.drain(..whole).collect();
        let lines = bytes.split(|&b| b == b'\n').map(|l| l.trim_ascii()).filter(|l| !l.is_empty());
        let parse = |line: &[u8]| {
            serde_json::from_slice(line).with_context(|| {
                let start = &line[..line.len().min(200)];
                format!("{}: not understood: '{}'", self.path.display(), String::from_utf8_lossy(start))
            })
        };
        Ok((now, lines.map(parse).collect::<Result<_>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn lines_are_read_once_and_whole() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut lines = Lines::new(file.path());
        let mut say = |text: &str| {
            file.as_file().write_all(text.as_bytes()).unwrap();
            lines.read().map(|(_, lines)| lines)
        };
        assert!(say("").unwrap().is_empty());
        assert!(say("{\"up\":1.5").unwrap().is_empty());
        let seen =
            say("}\r\n{\"action\":\"save\",\"session\":2,\"at\":3.0,\"took_ms\":500.0}\n{\"inside\":{\"rea")
                .unwrap();
        assert!(matches!(seen[..], [Line::Up { up: 1.5 }, Line::Action { session: 2, .. }]), "{seen:?}");
        assert_eq!(seen[1].said(), Some(3.5));
        let seen =
            say("ds\":7},\"at\":4.5,\"begins\":true}\n{\"fio\":\"a\",\"at\":1.0,\"took_ms\":1.0,\"json\":{\"jobs\":[]}}\n")
                .unwrap();
        assert!(
            matches!(&seen[..], [Line::Inside { inside, at: 4.5, begins: true }, Line::Fio { .. }] if inside["reads"] == 7.0)
        );
        assert!(
            matches!(&say("{\"error\":\"no space\"}\n").unwrap()[..], [Line::Error { error }] if error == "no space")
        );
        let error = format!("{:#}", say("Segmentation fault\n").unwrap_err());
        assert!(error.contains("not understood: 'Segmentation fault'"), "{error}");
    }

    #[test]
    fn no_line_and_no_report_is_longer_than_it_can_be() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = |lines: &mut Lines| (0..9).find_map(|_| lines.read().err()).unwrap().to_string();
        file.as_file().write_all(&vec![b'x'; MOST_BYTES / 2]).unwrap();
        let mut lines = Lines::new(file.path());
        lines.read().unwrap();
        file.as_file().write_all(&vec![b'x'; MOST_BYTES]).unwrap();
        file.as_file().write_all(b"\n{}\n").unwrap();
        assert!(error(&mut lines).contains("a line of more than"));
        file.as_file().set_len(0).unwrap();
        let mut lines = Lines { read_bytes: MOST_REPORT_BYTES, ..Lines::new(file.path()) };
        lines.read().unwrap();
        file.as_file().set_len(1).unwrap();
        assert!(error(&mut lines).contains("more than 268435456 bytes"));
    }
}
