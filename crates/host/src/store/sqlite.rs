//! The embedded store: one SQLite file. Owns the file's schema; knows no kind of object.
//!
//! Invariant: watchers hear of a transaction after it is durable, in the order of the revisions.

use super::{Changed, Entry, Expect, Revision, Store, StoreError, Transaction};
use rusqlite::{Connection, OptionalExtension, Row, params};
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use tokio::sync::broadcast;

/// Transactions that a slow watcher may lie behind.
const BACKLOG: usize = 4096;
/// Of the tables.
const SCHEMA_VERSION: i64 = 1;

/// The store in one file.
pub struct SqliteStore {
    connection: Mutex<Connection>,
    changes: broadcast::Sender<Changed>,
}

impl SqliteStore {
    /// Opens the file, which is made if there is none. It belongs to this process alone from then on.
    pub fn open(path: &Path) -> Result<SqliteStore, StoreError> {
        let connection = Connection::open(path)?;
        connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        // In WAL mode only this makes a commit durable when it returns.
        connection.pragma_update(None, "synchronous", "FULL")?;
        let version: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
        if version == 0 {
            connection.execute_batch(&format!(
                "BEGIN IMMEDIATE;
                 CREATE TABLE objects (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID;
                 CREATE TABLE head (revision INTEGER NOT NULL);
                 INSERT INTO head VALUES (0);
                 PRAGMA user_version = {SCHEMA_VERSION};
                 COMMIT;"
            ))?;
        } else if version != SCHEMA_VERSION {
            return Err(StoreError::Version { found: version, known: SCHEMA_VERSION });
        }
        Ok(SqliteStore { connection: Mutex::new(connection), changes: broadcast::channel(BACKLOG).0 })
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // A panic in the middle of a transaction has rolled it back.
        self.connection.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Store for SqliteStore {
    fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        let connection = self.connection();
        let mut statement =
            connection.prepare_cached("SELECT value, revision FROM objects WHERE key = ?1")?;
        let entry = statement.query_row([key], |row| {
            Ok(Entry { key: key.to_owned(), value: row.get(0)?, revision: revision(row.get(1)?) })
        });
        Ok(entry.optional()?)
    }

    fn list(&self, prefix: &str) -> Result<(Vec<Entry>, Revision), StoreError> {
        let mut connection = self.connection();
        let transaction = connection.transaction()?;
        let head = head(&transaction)?;
        let mut statement = transaction.prepare_cached(
            "SELECT key, value, revision FROM objects WHERE key >= ?1 AND key < ?2 ORDER BY key",
        )?;
        let rows = statement.query_map([prefix, &end_of(prefix)], entry)?;
        let entries = rows.collect::<Result<_, _>>()?;
        Ok((entries, head))
    }

    fn page(&self, prefix: &str, after: &str, most: usize) -> Result<Vec<Entry>, StoreError> {
        let connection = self.connection();
        let mut statement = connection.prepare_cached(
            "SELECT key, value, revision FROM objects WHERE key > ?1 AND key < ?2 ORDER BY key LIMIT ?3",
        )?;
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let rows = statement.query_map(params![prefix.max(after), end_of(prefix), most], entry)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn count(&self, prefix: &str) -> Result<u64, StoreError> {
        let connection = self.connection();
        let mut statement =
            connection.prepare_cached("SELECT count(*) FROM objects WHERE key >= ?1 AND key < ?2")?;
        let count: i64 = statement.query_row([prefix, &end_of(prefix)], |row| row.get(0))?;
        Ok(count as u64)
    }

    fn commit(&self, transaction: &Transaction) -> Result<Revision, StoreError> {
        let mut connection = self.connection();
        let sql = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        for (key, expect) in &transaction.expects {
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
        for (key, value) in &transaction.changes {
            match value {
                Some(value) => {
                    let mut statement =
                        sql.prepare_cached("INSERT OR REPLACE INTO objects VALUES (?1, ?2, ?3)")?;
                    statement.execute(params![key, value, next.0 as i64])?;
                }
                None => _ = sql.prepare_cached("DELETE FROM objects WHERE key = ?1")?.execute([key])?,
            }
        }
        sql.execute("UPDATE head SET revision = ?1", [next.0 as i64])?;
        sql.commit()?;
        // Still under the lock, so that nobody hears of a later one first. That nobody listens is no error.
        let keys = transaction.changes.iter().map(|(key, _)| key.clone()).collect();
        let _ = self.changes.send(Changed { revision: next, keys });
        Ok(next)
    }

    fn watch(&self) -> broadcast::Receiver<Changed> {
        self.changes.subscribe()
    }
}

fn entry(row: &Row) -> Result<Entry, rusqlite::Error> {
    Ok(Entry { key: row.get(0)?, value: row.get(1)?, revision: revision(row.get(2)?) })
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
