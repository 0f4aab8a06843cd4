//! The audit log: one JSON line for each change that a client requests. Owns the file and the rotated files beside it,
//! and how long they are kept.
//!
//! Invariant: the line of a change is written before the response is sent. Refused and failed requests are summed up, so
//! that repeating them cannot displace lines of changes. No line contains a token or a secret setting.

use super::act::{ActionObject, RequestAction};
use super::caller::{Caller, PeerAddress};
use super::note::AuditNotes;
use super::refusals::{RefusalKind, RefusalSummary, Refusals};
use crate::events::log_line;
use jiff::Timestamp;
use serde::Serialize;
use spillway_api::ErrorCode;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

/// A file is rotated when it has this fraction of the total size, or after a day.
const PARTS: u64 = 16;
const LEAST_PART_BYTES: u64 = 64 << 10;
const PART_AGE: Duration = Duration::from_secs(86_400);
/// Longest first line whose time is read.
const MAX_LINE_BYTES: u64 = 256 << 10;

/// Settings of the audit log.
#[derive(Clone, Debug)]
pub struct AuditSettings {
    /// Path of the file. Rotated files are beside it, with the time of their last line in their names.
    pub file: Option<PathBuf>,
    /// Whether each line is also written to standard error, which the journal keeps.
    pub journal: bool,
    /// Rotated files whose last line is older are removed.
    pub keep: Duration,
    /// The oldest rotated files are removed while all files together are larger.
    pub max_bytes: u64,
}

/// The audit log. A clone is the same log.
#[derive(Clone)]
pub struct Audit(Arc<Mutex<Inner>>);

struct Inner {
    settings: AuditSettings,
    refusals: Refusals,
    /// Time of the file's first line.
    began: Option<SystemTime>,
    /// Whether writing has failed, which was logged.
    fails: bool,
}

/// A line for one request.
#[derive(Serialize)]
struct AuditLine<'a> {
    time: Timestamp,
    who: &'a str,
    role: Option<&'static str>,
    from: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    verb: &'a str,
    object: &'a ActionObject,
    #[serde(flatten)]
    noted: AuditNotes,
    /// Whether changes were recorded before the request failed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    partial: bool,
    /// `done`, or the error code of the response.
    result: ResultWord,
    status: u16,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ResultWord {
    Code(ErrorCode),
    Word(&'static str),
}

/// A line for refused requests that were counted.
#[derive(Serialize)]
struct RefusalLine {
    time: Timestamp,
    #[serde(flatten)]
    sum: RefusalSummary,
    result: &'static str,
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug)]
pub struct RequestOutcome {
    /// Status of the response.
    pub status: u16,
    /// Error code of the response, if it has one.
    pub code: Option<ErrorCode>,
    /// Whether the caller's role was sufficient, so that the request was processed.
    pub let_in: bool,
}

impl RequestOutcome {
    fn is_success(self) -> bool {
        // 101: the connection is a WebSocket from now on.
        (200..300).contains(&self.status) || self.status == 101
    }
}

impl Audit {
    /// Opens a log with these settings.
    pub fn new(settings: AuditSettings) -> Audit {
        let began = settings.file.as_deref().and_then(first_time);
        Audit(Arc::new(Mutex::new(Inner { settings, refusals: Refusals::default(), began, fails: false })))
    }

    /// Writes the line of a change that a caller has requested.
    pub fn write(&self, caller: &Caller, act: &RequestAction, noted: AuditNotes, outcome: RequestOutcome) {
        let verb = noted.verb.as_deref().unwrap_or(&act.verb).to_owned();
        let name = noted.name.clone().or_else(|| act.object.name.clone());
        let object = ActionObject { kind: act.object.kind.clone(), name };
        let mut inner = self.inner();
        if !outcome.is_success() && !noted.has_recorded {
            let kind = RefusalKind {
                who: caller.name.to_string(),
                from: caller.source.to_string(),
                verb: outcome.let_in.then(|| verb.clone()),
                object: outcome.let_in.then(|| object.clone()),
                status: outcome.status,
            };
            if !inner.refusals.record(kind, Instant::now()) {
                return;
            }
        }
        inner.line(&line(
            &caller.name,
            Some(caller.role.word()),
            caller.source,
            (&verb, &object),
            noted,
            outcome,
        ));
    }

    /// Records a request without a known token.
    pub fn write_unknown(&self, source: PeerAddress, act: &RequestAction, outcome: RequestOutcome) {
        const WHO: &str = "unknown";
        let (who, from) = (WHO.to_owned(), source.counted().to_string());
        let kind = RefusalKind { who, from, verb: None, object: None, status: outcome.status };
        let mut inner = self.inner();
        if inner.refusals.record(kind, Instant::now()) {
            inner.line(&line(WHO, None, source, (&act.verb, &act.object), AuditNotes::default(), outcome));
        }
    }

    /// Writes the counts that are due, and removes old files. Call this every few seconds.
    pub fn tick(&self) {
        let mut inner = self.inner();
        let sums = inner.refusals.due(Instant::now());
        inner.sums(sums);
        inner.tidy();
    }

    /// Writes all counts before the daemon ends.
    pub fn end(&self) {
        let mut inner = self.inner();
        let sums = inner.refusals.rest(Instant::now());
        inner.sums(sums);
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn line<'a>(
    who: &'a str,
    role: Option<&'static str>,
    source: PeerAddress,
    (verb, object): (&'a str, &'a ActionObject),
    noted: AuditNotes,
    outcome: RequestOutcome,
) -> AuditLine<'a> {
    let (uid, pid) = match source {
        PeerAddress::Local { uid, pid } => (uid, pid),
        PeerAddress::Remote(_) => (None, None),
    };
    let result = match outcome.code {
        Some(code) => ResultWord::Code(code),
        None => ResultWord::Word(if outcome.is_success() { "done" } else { "failed" }),
    };
    let partial = noted.has_recorded && !outcome.is_success();
    let (time, from, status) = (Timestamp::now(), source.to_string(), outcome.status);
    AuditLine { time, who, role, from, uid, pid, verb, object, noted, partial, result, status }
}

impl Inner {
    fn sums(&mut self, sums: Vec<RefusalSummary>) {
        for sum in sums {
            self.line(&RefusalLine { time: Timestamp::now(), sum, result: "summed up" });
        }
    }

    fn line(&mut self, line: &impl Serialize) {
        let text = serde_json::to_string(line).expect("a line is plain data");
        if self.settings.journal {
            log_line(&format!("audit {text}"));
        }
        let Some(file) = self.settings.file.clone() else { return };
        let written = self.append(&file, &format!("{text}\n"));
        if let Err(e) = &written
            && !self.fails
        {
            log_line(&format!("warning: {}: the audit log cannot be written: {e}", file.display()));
        }
        self.fails = written.is_err();
    }

    fn append(&mut self, path: &Path, text: &str) -> io::Result<()> {
        let open = || File::options().create(true).append(true).mode(0o600).open(path);
        let mut file = open()?;
        let part_bytes = (self.settings.max_bytes / PARTS).max(LEAST_PART_BYTES);
        let length = file.metadata()?.len();
        let is_old = |began: SystemTime| began.elapsed().is_ok_and(|age| age >= PART_AGE);
        if length > 0 && (length + text.len() as u64 > part_bytes || self.began.is_some_and(is_old)) {
            let now = Timestamp::now().strftime("%Y%m%dT%H%M%S.%9fZ").to_string();
            fs::rename(path, beside(path, &now))?;
            self.began = None;
            file = open()?;
            self.tidy();
        }
        self.began.get_or_insert_with(SystemTime::now);
        file.write_all(text.as_bytes())
    }

    /// Removes rotated files that are too old, and the oldest while the log is too large.
    fn tidy(&self) {
        let Some(path) = &self.settings.file else { return };
        let mut parts = parts(path);
        let is_old = |at: SystemTime| at.elapsed().is_ok_and(|age| age > self.settings.keep);
        parts.retain(|part| !(is_old(part.last) && fs::remove_file(&part.path).is_ok()));
        let current = fs::metadata(path).map_or(0, |found| found.len());
        let mut total = current + parts.iter().map(|part| part.bytes).sum::<u64>();
        for part in parts {
            if total <= self.settings.max_bytes {
                break;
            }
            if fs::remove_file(&part.path).is_ok() {
                total -= part.bytes;
                log_line(&format!(
                    "warning: {} is removed before its age: the audit log has {} bytes (--audit-size)",
                    part.path.display(),
                    self.settings.max_bytes
                ));
            }
        }
    }
}

/// A rotated file of the log.
struct RotatedFile {
    path: PathBuf,
    bytes: u64,
    /// Time of its last line.
    last: SystemTime,
}

/// Path of a rotated file, whose name ends with a time.
fn beside(path: &Path, time: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(time);
    name.into()
}

/// Lists the rotated files, oldest first.
fn parts(path: &Path) -> Vec<RotatedFile> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return Vec::new() };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let prefix = format!("{}.", name.to_string_lossy());
    let is_time = |text: &str| text.len() == 26 && text.starts_with("20") && text.ends_with('Z');
    let mut found: Vec<RotatedFile> = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_part = entry.file_name().to_str().and_then(|n| n.strip_prefix(&prefix)).is_some_and(is_time);
        let metadata = entry.metadata().ok().filter(|found| is_part && found.is_file());
        let last = metadata.as_ref().and_then(|found| found.modified().ok());
        found.extend(metadata.zip(last).map(|(metadata, last)| RotatedFile {
            path: entry.path(),
            bytes: metadata.len(),
            last,
        }));
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// Reads the time of a file's first line.
fn first_time(path: &Path) -> Option<SystemTime> {
    let mut first = String::new();
    BufReader::new(File::open(path).ok()?).take(MAX_LINE_BYTES).read_line(&mut first).ok()?;
    let line: serde_json::Value = serde_json::from_str(&first).ok()?;
    line["time"].as_str()?.parse::<Timestamp>().ok().map(SystemTime::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::caller::{Proof, Role};
    use axum::http::Method;
    use serde_json::Value;
    use std::os::unix::fs::MetadataExt;

    const DONE: RequestOutcome = RequestOutcome { status: 200, code: None, let_in: true };

    fn audit(dir: &Path, max_bytes: u64) -> Audit {
        let file = Some(dir.join("audit.log"));
        Audit::new(AuditSettings { file, journal: false, keep: Duration::from_secs(86_400 * 30), max_bytes })
    }

    fn caller(role: Role) -> Caller {
        Caller {
            name: role.word().into(),
            role,
            source: PeerAddress::Remote([192, 0, 2, 1].into()),
            proof: Proof::Token,
        }
    }

    /// All lines, oldest first.
    fn lines(dir: &Path) -> Vec<Value> {
        let path = dir.join("audit.log");
        let older = parts(&path).into_iter().map(|part| part.path);
        let text: String = older.chain([path]).map(|path| fs::read_to_string(path).unwrap()).collect();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn refused_requests_leave_every_other_line_in_place() {
        let dir = tempfile::tempdir().unwrap();
        let audit = audit(dir.path(), 1 << 20);
        let act = |n: u32| RequestAction::of(&Method::DELETE, &format!("/v1/catalogs/desk-{n}\n\"x"));
        let refused = RequestOutcome { status: 403, code: Some(ErrorCode::Forbidden), let_in: false };
        for n in 0..30_000 {
            audit.write(&caller(Role::Read), &act(n), AuditNotes::default(), refused);
            audit.write_unknown(
                PeerAddress::Remote([198, 51, 100, 7].into()),
                &act(n),
                RequestOutcome { status: 401, ..refused },
            );
            if n % 1000 == 0 {
                audit.write(&caller(Role::Admin), &act(n), AuditNotes::default(), DONE);
            }
        }
        audit.end();
        let lines = lines(dir.path());
        let count = |is: &dyn Fn(&Value) -> bool| lines.iter().filter(|line| is(line)).count();
        assert_eq!((count(&|line| line["result"] == "done"), lines.len()), (30, 34));
        for (who, code, status) in [("read", "forbidden", 403), ("unknown", "forbidden", 401)] {
            let whole = |line: &Value| line["who"] == who && line["result"] == code;
            assert_eq!(count(&|line| whole(line) && line["object"]["name"] == "desk-0\n\"x"), 1, "{who}");
            let sum = lines.iter().find(|line| line["who"] == who && line["count"].is_u64()).unwrap();
            assert_eq!((&sum["count"], &sum["status"]), (&29_999.into(), &status.into()));
        }
    }

    #[test]
    fn parts_are_kept_by_their_size_and_their_age() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        fs::write(dir.path().join("audit.log.mine"), "not ours").unwrap();
        let audit = audit(dir.path(), 256 << 10);
        let act = RequestAction::of(&Method::PUT, &format!("/v1/catalogs/{}", "é".repeat(100_000)));
        for _ in 0..2000 {
            audit.write(&caller(Role::Admin), &act, AuditNotes::default(), DONE);
        }
        let bytes = |paths: &[RotatedFile]| paths.iter().map(|part| part.bytes).sum::<u64>();
        let kept = parts(&path);
        assert!((2..8).contains(&kept.len()) && bytes(&kept) <= 256 << 10, "{} {}", kept.len(), bytes(&kept));
        assert!(lines(dir.path()).iter().all(|line| line["who"] == "admin" && line["role"] == "admin"));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let long_ago = SystemTime::now() - Duration::from_secs(86_400 * 31);
        File::options().append(true).open(&kept[0].path).unwrap().set_modified(long_ago).unwrap();
        audit.tick();
        assert_eq!(parts(&path).len(), kept.len() - 1);
        assert!(dir.path().join("audit.log.mine").exists());
    }

    #[test]
    fn a_day_is_a_part_also_over_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        for (first, more) in [(Timestamp::now(), 0), (Timestamp::now() - PART_AGE, 1)] {
            fs::write(&path, format!("{{\"time\":\"{first}\"}}\n")).unwrap();
            let act = RequestAction::of(&Method::DELETE, "/v1/catalogs/desk");
            audit(dir.path(), 1 << 30).write(&caller(Role::Admin), &act, AuditNotes::default(), DONE);
            assert_eq!(parts(&path).len(), more);
        }
    }

    #[test]
    fn a_line_says_who_did_what_to_which_object() {
        let dir = tempfile::tempdir().unwrap();
        let audit = audit(dir.path(), 1 << 20);
        let note = super::super::note::RequestNote::default();
        note.machines(["runner-001"]);
        let local = PeerAddress::Local { uid: Some(0), pid: Some(7) };
        let root = Caller { name: "uid 0".into(), role: Role::Admin, source: local, proof: Proof::Socket };
        audit.write(
            &root,
            &RequestAction::of(&Method::POST, "/v1/catalogs/runner/claims"),
            note.take(),
            DONE,
        );
        let line = lines(dir.path()).remove(0);
        assert!(line["time"].is_string(), "{line}");
        let want = serde_json::json!({ "who": "uid 0", "role": "admin", "from": "local", "uid": 0, "pid": 7,
            "verb": "claim", "object": { "kind": "catalog", "name": "runner" }, "machines": ["runner-001"],
            "result": "done", "status": 200, "time": line["time"] });
        assert_eq!(line, want);
    }
}
