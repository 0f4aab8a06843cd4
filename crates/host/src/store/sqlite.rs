//! The embedded store: one SQLite file. Owns the file's tables; knows no kind of object.
//!
//! Invariant: watchers hear of a transaction after it is durable, in the order of the revisions. A file that a later version
//! has written is left as it is.

use super::reserve::{self, ReserveState};
use super::{
    ChangeNotice, Expect, Revision, Store, StoreEntry, StoreError, Summary, THIS_WRITER, Transaction, Writer,
};
use rusqlite::{Connection, OpenFlags, OptionalExtension, TransactionBehavior, params};
use std::path::{Path, PathBuf};
#[cfg(test)]
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use std::sync::{Mutex, MutexGuard};
use tokio::sync::broadcast;

/// Transactions that a slow watcher may lie behind.
const BACKLOG: usize = 4096;
/// The version of the tables.
const TABLES_VERSION: i64 = 2;
/// While the reserve is short a transaction may add so many bytes for each record that it changes: what stops, resets or
/// deletes something adds less, and what makes something adds more.
const SMALL_BYTES: i64 = 128;

/// The store in one file.
pub struct SqliteStore {
    path: PathBuf,
    writer: Writer,
    inner: Mutex<Inner>,
    changes: broadcast::Sender<ChangeNotice>,
}

struct Inner {
    connection: Connection,
    reserve: ReserveState,
}

impl SqliteStore {
    /// Opens the file, which is made if there is none. It belongs to this process alone from then on.
    pub fn open(path: &Path) -> Result<SqliteStore, StoreError> {
        SqliteStore::open_as(path, THIS_WRITER)
    }

    /// The same for a program of this version.
    pub fn open_as(path: &Path, writer: Writer) -> Result<SqliteStore, StoreError> {
        let connection = Connection::open(path)?;
        connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        // In WAL mode only this makes a commit durable when it returns.
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update(None, "journal_size_limit", -1)?;
        make_tables(&connection, path, writer)?;
        claim(&connection, path, writer)?;
        reserve::keep_log(&connection)?;
        // A program that was killed may have left it in use.
        let has_left: i64 = connection.query_row("SELECT COUNT(*) FROM reserve", [], |row| row.get(0))?;
        if has_left > 0 {
            reserve::empty(&connection)?;
        }
        let reserve = reserve::fill_up(&connection, path);
        let inner = Mutex::new(Inner { connection, reserve });
        Ok(SqliteStore { path: path.to_owned(), writer, inner, changes: broadcast::channel(BACKLOG).0 })
    }

    /// Fills up what is kept for actions that free room, if it is no longer whole.
    pub fn fill_reserve(&self) -> ReserveState {
        let mut inner = self.inner();
        inner.reserve = reserve::fill_up(&inner.connection, &self.path);
        inner.reserve
    }

    /// All of a file that no program has open. It stays as it is: what is read by a later program is not claimed by it.
    pub fn copy_of(path: &Path) -> Result<Vec<u8>, StoreError> {
        let mut connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
        // Before anything is read: the log keeps its room.
        connection.query_row("SELECT COUNT(*) FROM sqlite_schema", [], |_| Ok(()))?;
        reserve::keep_log(&connection)?;
        Ok(connection.serialize("main")?.to_vec())
    }

    /// Makes a copy that was written to a file one that needs no other file, and looks whether it is whole and whether this
    /// program can read it. `of` is what it is a copy of, for people.
    pub fn finish_copy(path: &Path, of: &Path) -> Result<Summary, StoreError> {
        let damaged = |why: String| StoreError::Copy { why };
        let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        let unread = |e: rusqlite::Error| match e.sqlite_error_code() {
            Some(rusqlite::ErrorCode::NotADatabase | rusqlite::ErrorCode::DatabaseCorrupt) => {
                damaged(e.to_string())
            }
            _ => e.into(),
        };
        connection.pragma_update(None, "journal_mode", "DELETE").map_err(unread)?;
        let checked: String =
            connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).map_err(unread)?;
        if checked != "ok" {
            return Err(damaged(checked));
        }
        let tables: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
        if tables == 0 {
            return Err(damaged("it has no records".into()));
        }
        let writer = match tables {
            // Who wrote records was not kept then.
            1 => String::new(),
            _ => check_writer(&connection, of, THIS_WRITER, tables)?
                .map_or_else(String::new, |(_, program)| program),
        };
        let records = connection.query_row("SELECT COUNT(*) FROM objects", [], |row| row.get::<_, i64>(0))?;
        let revision = head(&connection)?;
        connection.close().map_err(|(_, e)| e)?;
        Ok(Summary { records: u64::try_from(records).unwrap_or(0), revision, writer })
    }

    /// All of it, as it is between two transactions: the bytes of a database file.
    pub fn copy(&self) -> Result<Vec<u8>, StoreError> {
        let mut inner = self.inner();
        Ok(inner.connection.serialize("main")?.to_vec())
    }

    /// Counts the steps of SQLite's virtual machine from now on: what is done for a request, whatever else the host does.
    #[cfg(test)]
    pub(crate) fn count_steps(&self) -> Arc<AtomicU64> {
        let steps = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&steps);
        let step = move || {
            count.fetch_add(1, Ordering::Relaxed);
            false
        };
        self.inner().connection.progress_handler(1, Some(step)).unwrap();
        steps
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // A panic in the middle of a transaction has rolled it back.
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Carries it out, durably.
    fn carry_out(&self, connection: &mut Connection, wanted: &Transaction) -> Result<Revision, StoreError> {
        let sql = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for (key, expect) in &wanted.expects {
            let mut statement = sql.prepare_cached("SELECT revision FROM objects WHERE key = ?1")?;
            let found: Option<i64> = statement.query_row([key], |row| row.get(0)).optional()?;
            let holds = match (expect, found) {
                (Expect::Absent, None) => true,
                (Expect::Unchanged(expected), Some(found)) => revision(found) == *expected,
                _ => false,
            };
            if !holds {
                return Err(StoreError::Conflict(key.clone()));
            }
        }
        let next = Revision(head(&sql)?.0 + 1);
        for (key, value) in &wanted.changes {
            match value {
                Some(value) => {
                    let mut statement =
                        sql.prepare_cached("INSERT OR REPLACE INTO objects VALUES (?1, ?2, ?3, ?4)")?;
                    statement.execute(params![key, value, next.0 as i64, self.writer.records])?;
                }
                None => _ = sql.prepare_cached("DELETE FROM objects WHERE key = ?1")?.execute([key])?,
            }
        }
        sql.execute("UPDATE head SET revision = ?1", [next.0 as i64])?;
        sql.commit()?;
        Ok(next)
    }
}

impl Store for SqliteStore {
    fn get(&self, key: &str) -> Result<Option<StoreEntry>, StoreError> {
        let inner = self.inner();
        let mut statement = inner
            .connection
            .prepare_cached("SELECT key, value, revision, version FROM objects WHERE key = ?1")?;
        Ok(statement.query_row([key], entry).optional()?)
    }

    fn list(&self, prefix: &str) -> Result<(Vec<StoreEntry>, Revision), StoreError> {
        let mut inner = self.inner();
        let transaction = inner.connection.transaction()?;
        let head = head(&transaction)?;
        let mut statement = transaction.prepare_cached(
            "SELECT key, value, revision, version FROM objects WHERE key >= ?1 AND key < ?2 ORDER BY key",
        )?;
        let rows = statement.query_map([prefix, &end_of(prefix)], entry)?;
        let entries = rows.collect::<Result<_, _>>()?;
        Ok((entries, head))
    }

    fn page(&self, prefix: &str, after: &str, most: usize) -> Result<Vec<StoreEntry>, StoreError> {
        let inner = self.inner();
        let mut statement = inner.connection.prepare_cached(
            "SELECT key, value, revision, version FROM objects WHERE key > ?1 AND key < ?2 ORDER BY key LIMIT ?3",
        )?;
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let rows = statement.query_map(params![prefix.max(after), end_of(prefix), most], entry)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn count(&self, prefix: &str) -> Result<u64, StoreError> {
        let inner = self.inner();
        let mut statement =
            inner.connection.prepare_cached("SELECT count(*) FROM objects WHERE key >= ?1 AND key < ?2")?;
        let count: i64 = statement.query_row([prefix, &end_of(prefix)], |row| row.get(0))?;
        Ok(count as u64)
    }

    fn commit(&self, transaction: &Transaction) -> Result<Revision, StoreError> {
        let mut inner = self.inner();
        let Inner { connection, reserve } = &mut *inner;
        if *reserve == ReserveState::Short {
            *reserve = reserve::fill_up(connection, &self.path);
            if *reserve == ReserveState::Short && adds_much(connection, transaction)? {
                return Err(StoreError::Full);
            }
        }
        let next = match self.carry_out(connection, transaction) {
            // The log is full of what is not in its place yet.
            Err(StoreError::Full) if reserve::move_log(connection).is_ok() => {
                self.carry_out(connection, transaction)?
            }
            done => done?,
        };
        // Still under the lock, so that nobody hears of a later one first. That nobody listens is no error.
        let keys = transaction.changes.iter().map(|(key, _)| key.clone()).collect();
        let _ = self.changes.send(ChangeNotice { revision: next, keys });
        *reserve = reserve::fill_up(connection, &self.path);
        Ok(next)
    }

    fn watch(&self) -> broadcast::Receiver<ChangeNotice> {
        self.changes.subscribe()
    }
}

/// The tables of a new file; of an earlier one those that it has not.
fn make_tables(connection: &Connection, path: &Path, writer: Writer) -> Result<(), StoreError> {
    let found: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    let new = "CREATE TABLE objects (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL,
                                     version INTEGER NOT NULL) WITHOUT ROWID;
               CREATE TABLE head (revision INTEGER NOT NULL);
               INSERT INTO head VALUES (0);";
    // Records had no version of their own yet.
    let earlier = "ALTER TABLE objects ADD COLUMN version INTEGER NOT NULL DEFAULT 1;";
    let tables = match found {
        TABLES_VERSION => return Ok(()),
        0 => new,
        1 => earlier,
        found => return Err(other_tables(path, found, writer)),
    };
    connection.execute_batch(&format!(
        "BEGIN IMMEDIATE;
         {tables}
         CREATE TABLE writers (version INTEGER PRIMARY KEY, program TEXT NOT NULL);
         CREATE TABLE reserve (room BLOB NOT NULL);
         PRAGMA user_version = {TABLES_VERSION};
         COMMIT;"
    ))?;
    Ok(())
}

/// Writes down which version of the records is the newest in the file, and who writes it. Refuses one that is newer than
/// what this program reads.
fn claim(connection: &Connection, path: &Path, writer: Writer) -> Result<(), StoreError> {
    match check_writer(connection, path, writer, TABLES_VERSION)? {
        Some((found, program)) if found == i64::from(writer.records) && program == writer.program => Ok(()),
        _ => {
            let write = "INSERT OR REPLACE INTO writers VALUES (?1, ?2)";
            connection.execute(write, params![writer.records, writer.program])?;
            Ok(())
        }
    }
}

/// Who wrote the newest records in a file, and their version. Refuses those that are newer than what this program reads.
fn check_writer(
    connection: &Connection,
    path: &Path,
    writer: Writer,
    tables: i64,
) -> Result<Option<(i64, String)>, StoreError> {
    if tables != TABLES_VERSION {
        return Err(other_tables(path, tables, writer));
    }
    let newest = "SELECT version, program FROM writers ORDER BY version DESC LIMIT 1";
    let newest: Option<(i64, String)> =
        connection.query_row(newest, [], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
    match newest {
        Some((found, program)) if found > i64::from(writer.records) => Err(StoreError::Newer {
            path: path.to_owned(),
            writer: program,
            found,
            program: writer.program,
            known: writer.records,
        }),
        newest => Ok(newest),
    }
}

fn other_tables(path: &Path, found: i64, writer: Writer) -> StoreError {
    StoreError::Tables { path: path.to_owned(), found, program: writer.program, known: TABLES_VERSION }
}

/// Whether a transaction makes the store larger by more than what frees something does.
fn adds_much(connection: &Connection, transaction: &Transaction) -> Result<bool, StoreError> {
    let mut statement =
        connection.prepare_cached("SELECT length(key) + length(value) FROM objects WHERE key = ?1")?;
    let mut added = 0;
    for (key, value) in &transaction.changes {
        let before: i64 = statement.query_row([key], |row| row.get(0)).optional()?.unwrap_or(0);
        let after = value.as_ref().map_or(0, |value| key.len() + value.len());
        added += i64::try_from(after).unwrap_or(i64::MAX).saturating_sub(before);
    }
    Ok(added > SMALL_BYTES.saturating_mul(transaction.changes.len() as i64))
}

fn entry(row: &rusqlite::Row<'_>) -> rusqlite::Result<StoreEntry> {
    let (key, value, version) = (row.get(0)?, row.get(1)?, row.get(3)?);
    Ok(StoreEntry { key, value, revision: revision(row.get(2)?), version })
}

fn head(connection: &Connection) -> Result<Revision, StoreError> {
    let head = connection.prepare_cached("SELECT revision FROM head")?.query_row([], |row| row.get(0))?;
    Ok(revision(head))
}

fn revision(stored: i64) -> Revision {
    Revision(stored as u64)
}

/// The first key after all that begin so. Keys are ASCII. That there is always one lets SQLite end its search there: a
/// condition that may have none makes it read on to the end of the table, which holds all machines.
fn end_of(prefix: &str) -> String {
    let mut end = prefix.to_owned();
    match end.pop() {
        Some(last) => end.push(char::from(last as u8 + 1)),
        None => end.push('\u{80}'),
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(store: &SqliteStore, prefix: &str, numbers: std::ops::Range<u32>) {
        let changes = numbers.map(|n| (format!("{prefix}{n:06}"), Some(b"1".to_vec()))).collect();
        store.commit(&Transaction { expects: vec![], changes }).unwrap();
    }

    /// What reads or writes few records does the same whatever else is recorded: each of many changes does so, under one
    /// lock.
    #[test]
    fn a_short_list_and_a_change_among_many_records_take_no_more_steps() {
        let dir = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(&dir.path().join("db")).unwrap();
        let steps = store.count_steps();
        put(&store, "a/", 0..1);
        put(&store, "y/", 0..1);
        let change = || {
            let seen = store.get("a/000000").unwrap().unwrap().revision;
            let expects = vec![("a/000000".to_owned(), Expect::Unchanged(seen))];
            let changes = vec![("a/000000".to_owned(), Some(b"2".to_vec()))];
            store.commit(&Transaction { expects, changes }).unwrap();
        };
        let requests: [(&str, &dyn Fn()); 5] = [
            ("get", &|| assert!(store.get("a/000000").unwrap().is_some())),
            ("list", &|| assert_eq!(store.list("a/").unwrap().0.len(), 1)),
            ("page", &|| assert_eq!(store.page("a/", "", 100).unwrap().len(), 1)),
            ("count", &|| assert_eq!(store.count("a/").unwrap(), 1)),
            ("change", &change),
        ];
        let count = |request: &dyn Fn()| {
            let before = steps.load(Ordering::Relaxed);
            request();
            steps.load(Ordering::Relaxed) - before
        };
        // The first of each makes its statements.
        requests.iter().for_each(|(_, request)| request());
        let few = requests.map(|(name, request)| (name, count(request)));
        (0..40).for_each(|part| put(&store, "m/", 2500 * part..2500 * (part + 1)));
        let many = requests.map(|(name, request)| (name, count(request)));
        assert_eq!(few, many);
        assert!(few.iter().all(|(_, steps)| (1..1000).contains(steps)), "{few:?}");
        assert!(count(&|| assert_eq!(store.list("m/").unwrap().0.len(), 100_000)) > 100_000, "it counts");
    }
}
