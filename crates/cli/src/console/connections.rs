//! The connections of the relay. Owns how many there are, and which is closed for a newer one.
//!
//! Invariant: connections on which nothing was asked keep no browser out.

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};

/// Connections at a time.
const MOST: usize = 256;

/// All connections. A clone is the same.
#[derive(Clone, Default)]
pub struct Connections(Arc<Mutex<ConnectionTable>>);

#[derive(Default)]
struct ConnectionTable {
    /// In the order in which they came, with the stream as long as nothing was asked.
    open: BTreeMap<u64, Option<TcpStream>>,
    next_id: u64,
}

/// A place for a connection, which is free again when this is dropped.
pub struct ConnectionPlace {
    connections: Connections,
    id: u64,
}

impl Connections {
    /// Admits a connection. If there are so many, the one that has waited longest for a request is closed. `None`: there is
    /// none that waits.
    pub fn admit(&self, browser: &TcpStream) -> Option<ConnectionPlace> {
        let silent = browser.try_clone().ok()?;
        let mut table = self.table();
        if table.open.len() >= MOST {
            let (&oldest, _) = table.open.iter().find(|(_, silent)| silent.is_some())?;
            if let Some(Some(oldest)) = table.open.remove(&oldest) {
                // Its thread reads the end.
                let _ = oldest.shutdown(Shutdown::Both);
            }
        }
        let id = table.next_id;
        table.next_id += 1;
        table.open.insert(id, Some(silent));
        drop(table);
        Some(ConnectionPlace { connections: self.clone(), id })
    }

    /// Whether there are none.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.table().open.is_empty()
    }

    fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl ConnectionPlace {
    /// Keeps the connection, on which something was asked, to its end. False: it was closed before.
    pub fn keep(&self) -> bool {
        let mut table = self.connections.table();
        let kept = table.open.get_mut(&self.id);
        kept.map(|silent| *silent = None).is_some()
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.connections.table().open.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpListener;
    use std::time::Duration;

    #[test]
    fn the_oldest_that_asks_nothing_goes_and_no_other() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connections = Connections::default();
        let connect = || {
            let browser = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            browser.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
            let (ours, _) = listener.accept().unwrap();
            (connections.admit(&ours), browser, ours)
        };
        let is_closed = |browser: &mut TcpStream| browser.read(&mut [0]).is_ok_and(|read| read == 0);
        let mut all: Vec<_> = (0..MOST).map(|_| connect()).collect();
        let keep = |place: &Option<ConnectionPlace>| place.as_ref().unwrap().keep();
        assert!(keep(&all[0].0));
        all.push(connect());
        let closed: Vec<usize> = (0..all.len()).filter(|n| is_closed(&mut all[*n].1)).collect();
        assert_eq!(closed, [1]);
        assert_eq!(all.iter().filter(|(place, ..)| keep(place)).count(), MOST, "all but the closed one");
        assert!(connect().0.is_none(), "something was asked on each of them");
        all.pop();
        assert!(connect().0.is_some());
        drop(all);
        assert!(connections.is_empty());
    }
}
