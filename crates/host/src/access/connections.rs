//! Limits of open connections on one listener: how many a peer and a token may have, and which is closed to admit
//! another. Owns the table of connections; reads and writes none of them.
//!
//! A connection is *waiting* while the daemon waits for its client (handshake, request, a response that is being read,
//! events that are followed), and *busy* from the end of a request's head to the start of its response. When a limit is
//! reached, the connection that has waited longest is closed; the new one is refused only if none is waiting.
//!
//! Invariant: a waiting connection never keeps another one out, a peer's connections never keep another peer's out before
//! authentication, and those of other roles never keep an administrator's out after it.

use super::caller::PeerAddress;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Maximum numbers of connections.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Per peer, before authentication.
    pub unknown_of_source: usize,
    /// Of all peers, before authentication.
    pub unknown: usize,
    /// Per token, after authentication.
    pub of_token: usize,
    /// Per peer, after authentication, without administrators.
    pub of_source: usize,
    /// Of all tokens, after authentication, without administrators.
    pub known: usize,
}

impl ConnectionLimits {
    /// Limits over TCP. Administrators have slots for the connections of their tokens beside `known`, as a reserve.
    pub const REMOTE: ConnectionLimits =
        ConnectionLimits { unknown_of_source: 128, unknown: 512, of_token: 64, of_source: 128, known: 192 };
    /// Limits on the unix socket, where the kernel identifies callers: everybody there is an administrator, and nobody
    /// has a token.
    pub const LOCAL: ConnectionLimits = ConnectionLimits {
        unknown_of_source: 512,
        unknown: 2048,
        of_token: 512,
        of_source: 512,
        known: 2048,
    };
}

/// Interval of log lines about connections that were closed for others.
const SAY_EACH: Duration = Duration::from_secs(60);

/// The table of open connections. A clone is the same table.
#[derive(Clone)]
pub struct Connections(Arc<Inner>);

struct Inner {
    limits: ConnectionLimits,
    table: Mutex<ConnectionTable>,
}

#[derive(Default)]
struct ConnectionTable {
    /// Counts changes of state: a smaller value has waited longer.
    clock: u64,
    open: BTreeMap<u64, OpenConnection>,
    said: Option<Instant>,
}

struct OpenConnection {
    source: PeerAddress,
    token: Option<TokenHolder>,
    state: ConnectionState,
    close: Arc<Notify>,
}

#[derive(Clone, PartialEq, Eq)]
struct TokenHolder {
    name: Arc<str>,
    is_admin: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ConnectionState {
    /// Waiting since this value of the table's clock.
    Waiting(u64),
    /// With so many requests, of which only HTTP/2 has more than one at a time.
    Busy(usize),
    /// Told to close.
    Closing,
}

/// Slot of one connection, which is freed when this is dropped.
pub struct ConnectionSlot {
    connections: Connections,
    id: u64,
    close: Arc<Notify>,
}

/// A request that is being answered, until this is dropped.
pub struct ActiveRequest(Arc<ConnectionSlot>);

/// Error: no connection could be closed to admit this one.
#[derive(Debug, PartialEq, Eq)]
pub struct TooManyConnections;

impl Connections {
    /// Creates an empty table.
    pub fn new(limits: ConnectionLimits) -> Connections {
        Connections(Arc::new(Inner { limits, table: Mutex::default() }))
    }

    /// Admits a new connection.
    pub fn admit(&self, source: PeerAddress) -> Result<Arc<ConnectionSlot>, TooManyConnections> {
        let (source, limits) = (source.counted(), &self.0.limits);
        let mut table = self.table();
        let of_source = |open: &OpenConnection| open.token.is_none() && open.source == source;
        table.close_one_for(limits.unknown_of_source, of_source)?;
        if table.count(|open| open.token.is_none()) >= limits.unknown {
            // Close one of the peer that has the most.
            let mut counts: BTreeMap<PeerAddress, usize> = BTreeMap::new();
            let unknown = table.open.values().filter(|open| open.token.is_none());
            unknown.for_each(|open| *counts.entry(open.source).or_default() += 1);
            let most = counts.into_iter().max_by_key(|(_, count)| *count).map(|(source, _)| source);
            table.close_oldest(|open| open.token.is_none() && Some(open.source) == most)?;
        }
        let (id, close) = (table.tick(), Arc::new(Notify::new()));
        let open = OpenConnection {
            source,
            token: None,
            state: ConnectionState::Waiting(id),
            close: Arc::clone(&close),
        };
        table.open.insert(id, open);
        drop(table);
        Ok(Arc::new(ConnectionSlot { connections: self.clone(), id, close }))
    }

    fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        self.0.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl ConnectionSlot {
    /// Waits until the connection has to be closed.
    pub async fn closed(&self) {
        self.close.notified().await;
    }

    /// Notes a request on the connection, with the owner of its token if there is one.
    pub fn begin(
        self: &Arc<ConnectionSlot>,
        token: Option<(&Arc<str>, bool)>,
    ) -> Result<ActiveRequest, TooManyConnections> {
        let limits = &self.connections.0.limits;
        let mut table = self.connections.table();
        let Some(open) = table.open.get_mut(&self.id).filter(|open| open.state != ConnectionState::Closing)
        else {
            return Err(TooManyConnections);
        };
        if let ConnectionState::Busy(requests) = open.state {
            return self.begin_beside(&mut table, requests);
        }
        let (source, before) = (open.source, (open.token.clone(), open.state));
        open.state = ConnectionState::Busy(1);
        if let Some((name, is_admin)) = token {
            let token = TokenHolder { name: Arc::clone(name), is_admin };
            // Count the others only: this connection no longer counts where it did before.
            open.token = None;
            let same =
                |open: &OpenConnection| open.token.as_ref().is_some_and(|other| other.name == token.name);
            let other = |open: &OpenConnection| open.token.as_ref().is_some_and(|other| !other.is_admin);
            let mut admitted = table.close_one_for(limits.of_token, same);
            if !is_admin && admitted.is_ok() {
                admitted = table
                    .close_one_for(limits.of_source, |open| other(open) && open.source == source)
                    .and_then(|()| table.close_one_for(limits.known, other));
            }
            if let Some(open) = table.open.get_mut(&self.id) {
                match admitted {
                    Ok(()) => open.token = Some(token),
                    Err(_) => (open.token, open.state) = before,
                }
            }
            admitted?;
        }
        Ok(ActiveRequest(Arc::clone(self)))
    }

    /// Notes a request beside others of the connection. All requests of a token at a time are as many as it may have connections, however
    /// they are spread over these.
    fn begin_beside(
        self: &Arc<ConnectionSlot>,
        table: &mut ConnectionTable,
        requests: usize,
    ) -> Result<ActiveRequest, TooManyConnections> {
        let limits = &self.connections.0.limits;
        let token = table.open.get(&self.id).and_then(|open| open.token.clone());
        let same = |open: &OpenConnection| {
            open.token.as_ref().map(|token| &token.name) == token.as_ref().map(|token| &token.name)
        };
        let other = |open: &OpenConnection| open.token.as_ref().is_some_and(|other| !other.is_admin);
        let is_admin = token.as_ref().is_none_or(|token| token.is_admin);
        if table.requests(same) >= limits.of_token || !is_admin && table.requests(other) >= limits.known {
            return Err(TooManyConnections);
        }
        if let Some(open) = table.open.get_mut(&self.id) {
            open.state = ConnectionState::Busy(requests + 1);
        }
        Ok(ActiveRequest(Arc::clone(self)))
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let mut table = self.0.connections.table();
        let now = table.tick();
        let Some(open) = table.open.get_mut(&self.0.id) else { return };
        if let ConnectionState::Busy(requests) = open.state {
            open.state = match requests {
                0 | 1 => ConnectionState::Waiting(now),
                _ => ConnectionState::Busy(requests - 1),
            };
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.connections.table().open.remove(&self.id);
    }
}

impl ConnectionTable {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn count(&self, is: impl Fn(&OpenConnection) -> bool) -> usize {
        self.open.values().filter(|open| open.state != ConnectionState::Closing && is(open)).count()
    }

    /// Requests at a time on these connections.
    fn requests(&self, is: impl Fn(&OpenConnection) -> bool) -> usize {
        let requests = |open: &OpenConnection| match open.state {
            ConnectionState::Busy(requests) => requests,
            ConnectionState::Waiting(_) | ConnectionState::Closing => 0,
        };
        self.open.values().filter(|open| is(open)).map(requests).sum()
    }

    /// Makes sure that one more of these connections can be admitted: closes the one that has waited longest if the limit
    /// is reached.
    fn close_one_for(
        &mut self,
        most: usize,
        is: impl Fn(&OpenConnection) -> bool,
    ) -> Result<(), TooManyConnections> {
        match self.count(&is) < most {
            true => Ok(()),
            false => self.close_oldest(is),
        }
    }

    /// Tells the connection of these that has waited longest to close.
    fn close_oldest(&mut self, is: impl Fn(&OpenConnection) -> bool) -> Result<(), TooManyConnections> {
        let waiting = self.open.values_mut().filter(|open| is(open)).filter_map(|open| match open.state {
            ConnectionState::Waiting(since) => Some((since, open)),
            ConnectionState::Busy(_) | ConnectionState::Closing => None,
        });
        let (_, oldest) = waiting.min_by_key(|(since, _)| *since).ok_or(TooManyConnections)?;
        oldest.state = ConnectionState::Closing;
        oldest.close.notify_one();
        let whose = oldest
            .token
            .as_ref()
            .map_or_else(|| "no token".to_owned(), |token| format!("token {}", token.name));
        let text = format!("a connection of {} ({whose}) is closed for a newer one", oldest.source);
        if self.said.is_none_or(|said| said.elapsed() >= SAY_EACH) {
            self.said = Some(Instant::now());
            crate::events::log_line(&format!("warning: {text}; no further line for a minute"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: ConnectionLimits =
        ConnectionLimits { unknown_of_source: 3, unknown: 5, of_token: 3, of_source: 4, known: 5 };

    fn at(last: u8) -> PeerAddress {
        PeerAddress::Remote([192, 0, 2, last].into())
    }

    fn is_closed(place: &ConnectionSlot) -> bool {
        let table = place.connections.table();
        table.open[&place.id].state == ConnectionState::Closing
    }

    fn closed(places: &[Arc<ConnectionSlot>]) -> Vec<bool> {
        places.iter().map(|place| is_closed(place)).collect()
    }

    fn known(
        connections: &Connections,
        source: PeerAddress,
        token: &str,
    ) -> Result<(Arc<ConnectionSlot>, ActiveRequest), TooManyConnections> {
        let place = connections.admit(source)?;
        let busy = place.begin(Some((&token.into(), token.starts_with("admin"))))?;
        Ok((place, busy))
    }

    #[test]
    fn of_strangers_the_one_that_waits_longest_goes_and_of_who_has_most() {
        let connections = Connections::new(SMALL);
        let places: Vec<_> = (0..3).map(|_| connections.admit(at(1)).unwrap()).collect();
        let fourth = connections.admit(at(1)).unwrap();
        assert_eq!((closed(&places), is_closed(&fourth)), (vec![true, false, false], false));
        // Two others come, then the table is full: the source that has most gives one.
        let others: Vec<_> = (2..5).map(|last| connections.admit(at(last)).unwrap()).collect();
        assert_eq!((closed(&places), closed(&others)), (vec![true, true, false], vec![false; 3]));
        drop(places);
        let last = connections.admit(at(1)).unwrap();
        assert!(!is_closed(&last) && !is_closed(&fourth));
        let table = connections.table();
        assert_eq!(table.open.len(), 5);
    }

    #[test]
    fn a_token_that_has_all_its_connections_loses_the_idle_ones_first() {
        let connections = Connections::new(SMALL);
        let mut has: Vec<_> = (0..3).map(|_| known(&connections, at(1), "ci").unwrap()).collect();
        assert!(known(&connections, at(1), "ci").is_err(), "all of them are busy");
        assert!(known(&connections, at(1), "cd").is_ok(), "another token of that source");
        let (idle, busy) = has.remove(1);
        drop(busy);
        let (_new, _busy) = known(&connections, at(2), "ci").unwrap();
        assert!(is_closed(&idle) && has.iter().all(|(place, _)| !is_closed(place)));
        // What was told to end is not gone on with.
        assert!(idle.begin(None).is_err());
    }

    #[test]
    fn administrators_have_places_that_nobody_else_takes() {
        let connections = Connections::new(SMALL);
        let busy: Vec<_> = [(1, "a"), (1, "a"), (1, "b"), (1, "b"), (2, "c")]
            .map(|(n, t)| known(&connections, at(n), t).unwrap())
            .into();
        assert!(known(&connections, at(2), "d").is_err(), "all places of others are taken");
        assert!(known(&connections, at(1), "e").is_err(), "all places of that source, too");
        let admins: Vec<_> = (0..3).map(|_| known(&connections, at(1), "admin").unwrap()).collect();
        assert!(busy.iter().chain(&admins).all(|(place, _)| !is_closed(place)));
        drop(busy);
        // Idle ones stay until their place is needed.
        assert!(known(&connections, at(2), "d").is_ok());
    }

    #[test]
    fn a_connection_is_counted_once_whatever_its_requests_say() {
        let connections = Connections::new(SMALL);
        let (first, _busy) = known(&connections, at(1), "ci").unwrap();
        for _ in 0..10 {
            for token in ["ci", "cd"] {
                drop(first.begin(Some((&token.into(), false))).unwrap());
            }
        }
        assert_eq!(connections.table().count(|open| open.token.is_some()), 1);
    }

    #[test]
    fn requests_beside_each_other_count_as_connections_do() {
        let connections = Connections::new(SMALL);
        let (first, busy) = known(&connections, at(1), "ci").unwrap();
        let name = "ci".into();
        let more: Vec<_> = (0..2).map(|_| first.begin(Some((&name, false))).unwrap()).collect();
        assert_eq!(first.begin(Some((&name, false))).err(), Some(TooManyConnections), "3 of a token");
        // Nobody closes it as long as one of them is answered.
        drop(busy);
        assert!(first.begin(Some((&name, false))).is_ok());
        drop(more);
        let others: Vec<_> = (0..3).map(|_| known(&connections, at(2), "other").unwrap()).collect();
        let _busy: Vec<_> = (0..2).map(|_| first.begin(Some((&name, false))).unwrap()).collect();
        assert_eq!(first.begin(Some((&name, false))).err(), Some(TooManyConnections), "5 of all");
        drop(others);
        assert!(first.begin(Some((&name, false))).is_ok());
    }

    #[test]
    fn on_the_socket_a_user_closes_only_what_is_theirs() {
        let connections = Connections::new(ConnectionLimits { unknown_of_source: 2, ..SMALL });
        let user = |uid| PeerAddress::Local { uid: Some(uid), pid: Some(1) };
        let root = connections.admit(user(0)).unwrap();
        let working: Vec<_> = (0..2).map(|_| connections.admit(user(7)).unwrap()).collect();
        let busy: Vec<_> = working.iter().map(|place| place.begin(None).unwrap()).collect();
        assert!(connections.admit(user(7)).is_err(), "all of that user's are busy");
        assert!(connections.admit(user(0)).is_ok() && !is_closed(&root));
        drop(busy);
        assert!(connections.admit(user(7)).is_ok() && is_closed(&working[0]));
    }
}
