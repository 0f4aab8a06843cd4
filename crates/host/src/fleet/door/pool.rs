//! Connections to other hosts that wait for the next request, and the bodies of responses, which give them back. Owns both.
//!
//! Invariant: a host has at most [`MOST_IDLE`] of these, for at most [`LONGEST_IDLE`] and only as long as its address and certificate stay the
//! same. A response that is not read to its end closes its connection.

use super::members::Member;
use axum::body::{Body, Bytes};
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::SendRequest;
use spillway_api::Name;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

/// Idle connections to a host.
const MOST_IDLE: usize = 2;
/// Longest time that a connection is idle: the other end closes it after 30 s.
const LONGEST_IDLE: Duration = Duration::from_secs(20);
/// Longest wait until a connection that was used is ready again.
const READY: Duration = Duration::from_millis(100);

/// The idle connections. A clone is the same.
#[derive(Clone, Default)]
pub(super) struct Pool(Arc<Mutex<BTreeMap<Name, Vec<Idle>>>>);

struct Idle {
    member: Member,
    sender: SendRequest<Body>,
    since: Instant,
}

impl Idle {
    fn is_usable(&self) -> bool {
        !self.sender.is_closed() && self.since.elapsed() < LONGEST_IDLE
    }
}

impl Pool {
    /// Takes a connection to this host, if there is one.
    pub async fn take(&self, host: &Name, member: &Member) -> Option<SendRequest<Body>> {
        loop {
            let idle = {
                let mut hosts = self.hosts();
                let idle = hosts.get_mut(host)?.pop();
                hosts.retain(|_, list| !list.is_empty());
                idle?
            };
            if idle.member != *member || !idle.is_usable() {
                continue;
            }
            let mut sender = idle.sender;
            if matches!(tokio::time::timeout(READY, sender.ready()).await, Ok(Ok(()))) {
                return Some(sender);
            }
        }
    }

    fn put(&self, place: Place) {
        let Place { host, member, sender, .. } = place;
        let mut hosts = self.hosts();
        hosts.retain(|_, list| {
            list.retain(Idle::is_usable);
            !list.is_empty()
        });
        let list = hosts.entry(host).or_default();
        if list.len() < MOST_IDLE {
            list.push(Idle { member, sender, since: Instant::now() });
        }
    }

    fn hosts(&self) -> MutexGuard<'_, BTreeMap<Name, Vec<Idle>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of idle connections to a host.
    #[cfg(test)]
    pub fn idle(&self, host: &Name) -> usize {
        self.hosts().get(host).map_or(0, Vec::len)
    }
}

/// A connection in use, and where it belongs.
pub(super) struct Place {
    pub pool: Pool,
    pub host: Name,
    pub member: Member,
    pub sender: SendRequest<Body>,
}

/// Body of a response, which holds its connection until it was read.
pub struct HostBody {
    body: Incoming,
    place: Option<Place>,
}

impl HostBody {
    /// `place`: where the connection goes after the body; `None` for one that is not used again.
    pub(super) fn new(body: Incoming, place: Option<Place>) -> HostBody {
        let mut body = HostBody { body, place };
        body.give_back_at_end();
        body
    }

    fn give_back_at_end(&mut self) {
        if self.body.is_end_stream() {
            self.give_back();
        }
    }

    fn give_back(&mut self) {
        if let Some(place) = self.place.take() {
            place.pool.clone().put(place);
        }
    }
}

impl HttpBody for HostBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        match &frame {
            Some(Ok(_)) => self.give_back_at_end(),
            Some(Err(_)) => self.place = None,
            None => self.give_back(),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
