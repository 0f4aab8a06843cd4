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
    /// Requests that are being answered, by token, and whether it is an administrator's.
    requests: BTreeMap<Arc<str>, (usize, bool)>,
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
pub struct ActiveRequest {
    slot: Arc<ConnectionSlot>,
    token: Option<TokenHolder>,
}

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

    /// Notes a request on the connection, with the owner of its token if there is one. All requests of a token at a time are as many as
    /// it may have connections, however they are spread over these.
    pub fn begin(
        self: &Arc<ConnectionSlot>,
        token: Option<(&Arc<str>, bool)>,
    ) -> Result<ActiveRequest, TooManyConnections> {
        let token = token.map(|(name, is_admin)| TokenHolder { name: Arc::clone(name), is_admin });
        let mut table = self.connections.table();
        table.begin_request(token.as_ref(), &self.connections.0.limits)?;
        let admitted = table.busy(self.id, token.as_ref(), &self.connections.0.limits);
        if admitted.is_err() {
            table.end_request(token.as_ref());
        }
        drop(table);
        admitted.map(|()| ActiveRequest { slot: Arc::clone(self), token })
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        let mut table = self.slot.connections.table();
        table.end_request(self.token.as_ref());
        let now = table.tick();
        let Some(open) = table.open.get_mut(&self.slot.id) else { return };
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

    /// Counts a request of a token.
    fn begin_request(
        &mut self,
        token: Option<&TokenHolder>,
        limits: &ConnectionLimits,
    ) -> Result<(), TooManyConnections> {
        let Some(token) = token else { return Ok(()) };
        let own = self.requests.get(&token.name).map_or(0, |(count, _)| *count);
        let others: usize =
            self.requests.values().filter(|(_, is_admin)| !is_admin).map(|(count, _)| count).sum();
        if own >= limits.of_token || !token.is_admin && others >= limits.known {
            return Err(TooManyConnections);
        }
        self.requests.insert(Arc::clone(&token.name), (own + 1, token.is_admin));
        Ok(())
    }

    fn end_request(&mut self, token: Option<&TokenHolder>) {
        let Some(token) = token else { return };
        match self.requests.get_mut(&token.name) {
            Some((count, _)) if *count > 1 => *count -= 1,
            _ => _ = self.requests.remove(&token.name),
        }
    }

    /// Marks a connection as busy with one more request. One that has none yet counts for the token of this one from now on.
    fn busy(
        &mut self,
        id: u64,
        token: Option<&TokenHolder>,
        limits: &ConnectionLimits,
    ) -> Result<(), TooManyConnections> {
        let Some(open) = self.open.get_mut(&id).filter(|open| open.state != ConnectionState::Closing) else {
            return Err(TooManyConnections);
        };
        if let ConnectionState::Busy(requests) = open.state {
            open.state = ConnectionState::Busy(requests + 1);
            return Ok(());
        }
        let (source, before) = (open.source, (open.token.clone(), open.state));
        open.state = ConnectionState::Busy(1);
        let Some(token) = token else { return Ok(()) };
        // Count the others only: this connection no longer counts where it did before.
        open.token = None;
        let same = |open: &OpenConnection| open.token.as_ref().is_some_and(|other| other.name == token.name);
        let other = |open: &OpenConnection| open.token.as_ref().is_some_and(|other| !other.is_admin);
        let mut admitted = self.close_one_for(limits.of_token, same);
        if !token.is_admin && admitted.is_ok() {
            admitted = self
                .close_one_for(limits.of_source, |open| other(open) && open.source == source)
                .and_then(|()| self.close_one_for(limits.known, other));
        }
        if let Some(open) = self.open.get_mut(&id) {
            match admitted {
                Ok(()) => open.token = Some(token.clone()),
                Err(_) => (open.token, open.state) = before,
            }
        }
        admitted
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
        // Another connection of the token has the rest.
        let (second, _busy) = known(&connections, at(3), "ci").unwrap();
        assert_eq!(second.begin(Some((&name, false))).err(), Some(TooManyConnections), "3 of a token");
        // Who asks counts, whoever has the connection.
        let admin = "admin".into();
        let beside = second.begin(Some((&admin, true)));
        assert!(beside.is_ok() && known(&connections, at(3), "ci").is_err());
        drop((beside, _busy));
        assert_eq!(connections.table().requests.get("ci").map(|(count, _)| *count), Some(2));
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
