//! Reserved space in the store's files: actions that free space must be recorded even when guests have filled the file
//! system. Owns the size of the reserve and how it is created.
//!
//! The database file contains free pages, which new records use before the file grows; the write-ahead log has its blocks
//! allocated, and keeps them when it is emptied and when the program ends. Invariant: while the reserve is whole,
//! changing existing records needs no new block.

use rusqlite::{Connection, ffi};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Smallest number of free bytes: 1,024 pages. A record that grows can split its page, so the pages of all records might
/// double; the desired states of machines, which every stop changes, are a small part of them.
const LEAST_FREE_BYTES: u64 = 4 << 20;
/// Free part of the used size: one in this many.
const FREE_PART: u64 = 4;
/// Size of the log's file. The log is emptied at 1,000 pages (4 MiB); the largest change, 256 deleted machines, adds
/// about as many.
const LOG_BYTES: u64 = 12 << 20;
/// The reserve is written in steps of this size.
const PART_BYTES: u64 = 4 << 20;
/// With less free space the reserve is not filled: others need the space more.
const SPARE_BYTES: u64 = 8 << 20;

/// State of the reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveState {
    /// Complete, or nearly so.
    Whole,
    /// Partly used, without space to fill it up.
    Short,
}

/// Keeps the log's file when the database is closed: the next program would have to find space for it.
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

/// Fills the reserve if it is not whole and the file system has space.
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
    // The remaining reserve may still be enough.
    let Ok((_, free, _)) = pages(connection) else { return ReserveState::Short };
    if free >= goal / 2 && log_bytes(path) >= LOG_BYTES { ReserveState::Whole } else { ReserveState::Short }
}

/// Returns the numbers of used and free pages, and the page size.
fn pages(connection: &Connection) -> rusqlite::Result<(u64, u64, u64)> {
    let pragma = |name: &str| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let (all, free) = (pragma("page_count")?, pragma("freelist_count")?);
    let page_bytes = pragma("page_size")?.max(512);
    Ok((u64::try_from(all - free).unwrap_or(0), u64::try_from(free).unwrap_or(0), page_bytes as u64))
}

/// Creates free pages: writes content into them first, so that the file has their blocks, and deletes it in another
/// transaction. SQLite uses existing free pages before the file grows: so all of them are written, in steps, so that the
/// log does not grow.
fn make_free(connection: &Connection, pages: u64, page_bytes: u64) -> rusqlite::Result<()> {
    let mut left = pages * page_bytes;
    let mut written = Ok(());
    while left > 0 && written.is_ok() {
        let part = left.min(PART_BYTES);
        left -= part;
        let insert = "INSERT INTO reserve VALUES (zeroblob(?1))";
        written = connection.execute(insert, [part as i64]).and_then(|_| move_log(connection));
    }
    // Also after an error, since records cannot use the free pages until then.
    written.and(empty(connection))
}

/// Returns the pages of the reserve to the database, and checkpoints the log.
pub fn empty(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute("DELETE FROM reserve", [])?;
    move_log(connection)
}

/// Checkpoints the log, so that it starts from its beginning.
pub fn move_log(connection: &Connection) -> rusqlite::Result<()> {
    // The answer says how far it came. With one connection that is to the end, or to an error.
    let is_busy: i64 = connection.query_row("PRAGMA wal_checkpoint(RESTART)", [], |row| row.get(0))?;
    match is_busy {
        0 => Ok(()),
        _ => Err(rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_BUSY), None)),
    }
}

/// Extends the log's file to its largest size, with all blocks allocated. SQLite ignores what follows its last page.
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
