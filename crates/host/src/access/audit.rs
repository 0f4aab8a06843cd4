//! The audit log: one JSON line for each change that somebody asked for. Owns the file and the one before it.
//!
//! Invariant: a line is written whole before the change is answered, and holds neither body nor header of the request.

use crate::events::say;
use axum::http::Method;
use jiff::Timestamp;
use serde::Serialize;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// A file that is longer becomes the older one of two.
const MAX_FILE_BYTES: u64 = 8 << 20;
/// Of a path so much is kept.
const MAX_PATH_CHARACTERS: usize = 512;

/// The log. A clone is the same.
#[derive(Clone)]
pub struct Audit(Arc<Mutex<Inner>>);

struct Inner {
    path: PathBuf,
    most_bytes: u64,
    /// Writing it has failed, which was said.
    fails: bool,
}

#[derive(Serialize)]
struct Line<'a> {
    time: Timestamp,
    who: &'a str,
    method: &'a str,
    path: &'a str,
    status: u16,
}

impl Audit {
    /// In this file.
    pub fn new(path: &Path) -> Audit {
        Audit::with(path, MAX_FILE_BYTES)
    }

    fn with(path: &Path, most_bytes: u64) -> Audit {
        Audit(Arc::new(Mutex::new(Inner { path: path.to_owned(), most_bytes, fails: false })))
    }

    /// A change was asked for, and so it was answered.
    pub fn write(&self, who: &str, method: &Method, path: &str, status: u16) {
        let path: String = path.chars().take(MAX_PATH_CHARACTERS).collect();
        let line = Line { time: Timestamp::now(), who, method: method.as_str(), path: &path, status };
        let text = format!("{}\n", serde_json::to_string(&line).expect("a line is plain data"));
        let mut inner = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let written = inner.append(&text);
        if let Err(e) = &written
            && !inner.fails
        {
            say(&format!("warning: {}: changes are not written down: {e}", inner.path.display()));
        }
        inner.fails = written.is_err();
    }
}

impl Inner {
    fn append(&self, text: &str) -> io::Result<()> {
        let open = || File::options().create(true).append(true).mode(0o600).open(&self.path);
        let mut file = open()?;
        if file.metadata()?.len() > self.most_bytes {
            let mut older = self.path.clone().into_os_string();
            older.push(".1");
            fs::rename(&self.path, older)?;
            file = open()?;
        }
        file.write_all(text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole_and_the_files_two() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        let audit = Audit::with(&path, 1000);
        for n in 0..40 {
            audit.write("uid 0", &Method::POST, &format!("/v1/catalogs/{n}\n\"x"), 200);
        }
        audit.write("uid 0", &Method::PUT, &"é".repeat(100_000), 403);
        let mut files: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        files.sort();
        assert_eq!(files, ["audit.log", "audit.log.1"]);
        let text = fs::read_to_string(&path).unwrap();
        for line in text.lines() {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            assert!(line["who"] == "uid 0" && line["time"].is_string() && line["status"].is_u64(), "{line}");
        }
        assert!(text.lines().last().unwrap().len() < 3000);
        let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap());
        assert_eq!(mode & 0o777, 0o600);
    }
}
