//! Room in the store's files that nobody else can take: what frees room must be recorded, also where guests have filled the
//! file system. Owns how much is kept and how it is made.
//!
//! The database file holds free pages, which new records take before the file grows; the write-ahead log has its blocks
//! already, and keeps them when it is emptied and when the program ends. Invariant: while the reserve is whole, a change of
//! records that are there needs no block that its file does not have.

use rusqlite::{Connection, ffi};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Free pages of the database are at least these: 1,024. A record that grows can split its page, so that the pages of all
/// records may double; those of what is wanted of machines, which every stop changes, are a small part of all.
const LEAST_FREE_BYTES: u64 = 4 << 20;
/// Of what is used, so much is kept free.
const FREE_PART: u64 = 4;
/// The log is emptied when it has 1,000 pages (4 MiB); the largest change, 256 machines that are deleted, has about as many
/// more.
const LOG_BYTES: u64 = 12 << 20;
/// The reserve is written in parts of this size.
const PART_BYTES: u64 = 4 << 20;
/// With less left the reserve is not filled up: that would only take what others need just now.
const SPARE_BYTES: u64 = 8 << 20;

/// How the reserve is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveState {
    /// It has what it should have, or nearly so.
    Whole,
    /// Part of it is used, and there is no room to fill it up.
    Short,
}

/// Keeps the log's file when the database is closed: the next program would have to find room for it.
#[expect(unsafe_code, reason = "SQLite takes this by a pointer only")]
pub fn keep_log(connection: &Connection) -> rusqlite::Result<()> {
    let mut keep: std::ffi::c_int = 1;
    // SAFETY: the handle is that of an open connection that nobody else uses now; the number lives longer than the call.
    let code = unsafe {
        ffi::sqlite3_file_control(
            connection.handle(),
            c"main".as_ptr(),
            ffi::SQLITE_FCNTL_PERSIST_WAL,
            (&raw mut keep).cast(),
        )
    };
    match code {
        ffi::SQLITE_OK => Ok(()),
        code => Err(rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)),
    }
}

/// Fills the reserve up if it is no longer whole and the file system has room.
pub fn fill_up(connection: &Connection, path: &Path) -> ReserveState {
    let Ok((used, free, page_bytes)) = pages(connection) else { return ReserveState::Short };
    let goal = (LEAST_FREE_BYTES / page_bytes).max(used / FREE_PART);
    let log_is_short = log_bytes(path) < LOG_BYTES;
    if free >= goal - goal / 4 && !log_is_short {
        return ReserveState::Whole;
    }
    let missing = goal.saturating_sub(free);
    let takes = missing * page_bytes + if log_is_short { LOG_BYTES } else { 0 };
    if has_room(path, takes + SPARE_BYTES) {
        let filled = lengthen_log(path).is_ok() && make_free(connection, goal, page_bytes).is_ok();
        if filled {
            return ReserveState::Whole;
        }
    }
    // What is left may do still.
    let Ok((_, free, _)) = pages(connection) else { return ReserveState::Short };
    if free >= goal / 2 && log_bytes(path) >= LOG_BYTES { ReserveState::Whole } else { ReserveState::Short }
}

/// Pages that are used and that are free, and the size of one.
fn pages(connection: &Connection) -> rusqlite::Result<(u64, u64, u64)> {
    let pragma = |name: &str| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let (all, free) = (pragma("page_count")?, pragma("freelist_count")?);
    let page_bytes = pragma("page_size")?.max(512);
    Ok((u64::try_from(all - free).unwrap_or(0), u64::try_from(free).unwrap_or(0), page_bytes as u64))
}

/// Makes so many pages free. They are written with content first, so that the file has their blocks, and given back by
/// another transaction. SQLite takes the pages that are free already before the file grows: so all of them are written, and
/// some at a time, so that the log does not grow.
fn make_free(connection: &Connection, pages: u64, page_bytes: u64) -> rusqlite::Result<()> {
    let mut left = pages * page_bytes;
    let mut written = Ok(());
    while left > 0 && written.is_ok() {
        let part = left.min(PART_BYTES);
        left -= part;
        let insert = "INSERT INTO reserve VALUES (zeroblob(?1))";
        written = connection.execute(insert, [part as i64]).and_then(|_| move_log(connection));
    }
    // Also after an error: until then records cannot take what was free before.
    written.and(empty(connection))
}

/// Gives the pages of the reserve back to the database, and moves all that is in the log to its place.
pub fn empty(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute("DELETE FROM reserve", [])?;
    move_log(connection)
}

/// Moves what is in the log to its place, so that the log begins anew.
pub fn move_log(connection: &Connection) -> rusqlite::Result<()> {
    // The answer says how far it came: with one connection, to the end or to an error.
    let is_busy: i64 = connection.query_row("PRAGMA wal_checkpoint(RESTART)", [], |row| row.get(0))?;
    match is_busy {
        0 => Ok(()),
        _ => Err(rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_BUSY), None)),
    }
}

/// The log's file is as long as it may have to be, and has all of its blocks. What is behind its last page SQLite ignores.
fn lengthen_log(path: &Path) -> io::Result<()> {
    let log = File::options().write(true).open(log_path(path))?;
    let zeroes = vec![0; 1 << 20];
    let mut at = log.metadata()?.len();
    while at < LOG_BYTES {
        let part = (LOG_BYTES - at).min(zeroes.len() as u64) as usize;
        log.write_all_at(&zeroes[..part], at)?;
        at += part as u64;
    }
    log.sync_all()
}

fn log_bytes(path: &Path) -> u64 {
    std::fs::metadata(log_path(path)).map_or(0, |log| log.len())
}

fn log_path(path: &Path) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push("-wal");
    path.into()
}

fn has_room(path: &Path, bytes: u64) -> bool {
    let folder = path.parent().unwrap_or(Path::new("/"));
    crate::resources::space::of(folder).is_ok_and(|(_, free)| free >= bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is missing is added to what is free, and is not made of it: else each change of a record would write the reserve
    /// anew, in vain.
    #[test]
    fn a_reserve_that_was_used_is_whole_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        let connection = Connection::open(&path).unwrap();
        connection.pragma_update(None, "journal_mode", "WAL").unwrap();
        connection
            .execute_batch(
                "CREATE TABLE reserve (room BLOB NOT NULL); CREATE TABLE records (record BLOB NOT NULL)",
            )
            .unwrap();
        assert_eq!(fill_up(&connection, &path), ReserveState::Whole);
        let goal =
            |(used, _, page_bytes): (u64, u64, u64)| (LEAST_FREE_BYTES / page_bytes).max(used / FREE_PART);
        let mut filled = 0;
        // The first quarter is used without anything being written; then it is filled up. Some is used often, then much at once.
        for records in [1, 200, 100, 10, 300, 6000, 6000, 1000] {
            let many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
                        INSERT INTO records SELECT zeroblob(4000) FROM n";
            connection.execute(many, [records]).unwrap();
            move_log(&connection).unwrap();
            let (before, written) = (pages(&connection).unwrap(), connection.total_changes());
            // As long as the largest change has made it.
            let log = log_bytes(&path).max(LOG_BYTES);
            assert_eq!(fill_up(&connection, &path), ReserveState::Whole);
            let after = pages(&connection).unwrap();
            let is_filled = connection.total_changes() != written;
            assert_eq!(is_filled, before.1 < goal(before) - goal(before) / 4, "{before:?} {after:?}");
            filled += u32::from(is_filled);
            assert!(after.1 >= goal(after) - goal(after) / 4, "{before:?} {after:?}");
            // At once nothing is missing any more.
            let written = connection.total_changes();
            assert_eq!(fill_up(&connection, &path), ReserveState::Whole);
            assert_eq!(connection.total_changes(), written, "{after:?}");
            assert!(log_bytes(&path) <= log, "{} after {log}", log_bytes(&path));
        }
        assert!(filled >= 3, "{filled}");
    }
}
