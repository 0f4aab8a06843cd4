//! Reports of the lab that are kept in the state folder, `reports/NAME/report.html`: `spillway lab run STUDY --out FOLDER` writes them
//! there. Owns their place; never writes.
//!
//! Invariant: only regular files of these names are read, through no link, and no more of them than a report has.

use crate::error::HostError;
use crate::paging::{PageBuilder, PageRequest};
use jiff::Timestamp;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use spillway_api::{ErrorCode, Name, Page, Report};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The page of a report.
const PAGE: &str = "report.html";
/// Largest page, in bytes.
const MAX_BYTES: u64 = 64 << 20;

/// The folder of the reports. A clone is the same.
#[derive(Clone)]
pub struct Reports(PathBuf);

impl Reports {
    /// Those of this state folder.
    pub fn new(state: &Path) -> Reports {
        Reports(state.join("reports"))
    }

    /// A part of the list of reports, by name.
    pub fn page(&self, part: &PageRequest) -> Result<Page<Report>, HostError> {
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(PageBuilder::new(part).page()),
            Err(e) => return Err(failed(&self.0, &e)),
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<Name>().ok());
        let mut names: Vec<Name> = names.filter(|name| *name.as_str() > *part.after.as_str()).collect();
        names.sort();
        let mut page = PageBuilder::new(part);
        // A folder without a page is no report, or not one yet.
        let mut found = names.iter().filter_map(|name| self.open(name).ok().map(|(report, _)| report));
        found.all(|report| page.add(&report.name.to_string(), report));
        Ok(page.page())
    }

    /// The page of a report, and its file.
    pub fn html(&self, name: &Name) -> Result<(Report, File), HostError> {
        let none = || HostError::new(ErrorCode::NotFound, format!("there is no report '{name}'"));
        let path = self.0.join(name.as_str()).join(PAGE);
        match self.open(name) {
            Ok(found) => Ok(found),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(none()),
            Err(e) => Err(failed(&path, &e)),
        }
    }

    fn open(&self, name: &Name) -> io::Result<(Report, File)> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let folder = openat(CWD, self.0.join(name.as_str()), flags | OFlags::DIRECTORY, Mode::empty())?;
        let file = match openat(&folder, PAGE, flags, Mode::empty()) {
            Err(Errno::LOOP) => return Err(io::ErrorKind::NotFound.into()),
            file => File::from(file?),
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::ErrorKind::NotFound.into());
        }
        if metadata.len() > MAX_BYTES {
            return Err(io::Error::other(format!(
                "it has {} bytes, and a report has at most {MAX_BYTES}",
                metadata.len()
            )));
        }
        let written = Timestamp::try_from(metadata.modified()?).map_err(io::Error::other)?;
        Ok((Report { name: name.clone(), written, bytes: metadata.len() }, file))
    }
}

fn failed(path: &Path, error: &io::Error) -> HostError {
    HostError::new(ErrorCode::Unavailable, format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::fs::symlink;

    #[test]
    fn reports_are_pages_in_folders_and_nothing_else_is_read() {
        let state = tempfile::tempdir().unwrap();
        let reports = Reports::new(state.path());
        let list = |after: &str, most| {
            let page = reports.page(&PageRequest { after: after.into(), most }).unwrap();
            (page.items.iter().map(|report| report.name.to_string()).collect::<Vec<_>>(), page.next.is_some())
        };
        assert_eq!(list("", 10), (vec![], false), "there is no folder");
        let folder = |name: &str| {
            let folder = state.path().join("reports").join(name);
            fs::create_dir_all(&folder).unwrap();
            folder
        };
        for name in ["b", "a", "No name"] {
            fs::write(folder(name).join(PAGE), format!("<p>{name}")).unwrap();
        }
        fs::write(state.path().join("secret"), "secret").unwrap();
        symlink(state.path().join("secret"), folder("link").join(PAGE)).unwrap();
        fs::create_dir(folder("folder").join(PAGE)).unwrap();
        folder("empty");
        symlink(folder("a"), state.path().join("reports/other")).unwrap();
        rustix::fs::mkfifoat(CWD, folder("pipe").join(PAGE), Mode::from_raw_mode(0o600)).unwrap();
        File::create(folder("large").join(PAGE)).unwrap().set_len(MAX_BYTES + 1).unwrap();
        assert_eq!(list("", 10), (vec!["a".into(), "b".into()], false));
        assert_eq!(list("", 1), (vec!["a".into()], true));
        assert_eq!(list("a", 1), (vec!["b".into()], false));
        let html = |name: &str| {
            let found = reports.html(&name.parse().unwrap()).map_err(|e| e.problem().code);
            found.map(|(_, mut file)| {
                let mut html = Vec::new();
                file.read_to_end(&mut html).unwrap();
                html
            })
        };
        assert_eq!(html("b"), Ok(b"<p>b".to_vec()));
        for name in ["link", "folder", "empty", "pipe", "none"] {
            assert_eq!(html(name), Err(ErrorCode::NotFound), "{name}");
        }
        assert!(html("large").is_err() && html("other").is_err());
    }
}
