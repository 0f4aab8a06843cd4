//! What a connection with HTTP/2 has under way. The protocol lets a client ask for much and read nothing, and the stream below shows
//! none of it: [`super::paced`] sees only bytes that the client has allowed to be sent. Owns the counts of requests and bytes.
//!
//! Invariant: a connection that nothing is asked on, or whose client reads none of what is ready, ends within 30 s and a moment;
//! and what is ready for its client is bounded.

use crate::error::HostError;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::body::{Frame, SizeHint};
use spillway_api::ErrorCode;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;

/// Longest time without a request, and longest time in which a client reads nothing of what is ready.
const LONGEST: Duration = Duration::from_secs(30);
/// How often that is looked at.
const LOOK: Duration = Duration::from_secs(2);
/// Most bytes of responses that are ready for a client. One more response may be as large as it is.
const MOST_READY_BYTES: usize = 4 << 20;
/// Responses are handed over in pieces of this size: each shows that the client reads.
const PIECE_BYTES: usize = 16 << 10;

/// The counts of a connection. A clone is the same.
#[derive(Clone)]
pub struct Flow(Arc<Counts>);

struct Counts {
    /// Requests whose response has not been handed over.
    requests: AtomicUsize,
    /// Since when responses have something to hand over, and pieces were handed over and not sent. Each for itself: what is read of one
    /// says nothing of the others.
    ready: Mutex<BTreeMap<u64, Instant>>,
    next_id: AtomicU64,
    /// Bytes of both.
    ready_bytes: AtomicUsize,
    /// When a request has begun or ended.
    moved: Mutex<Instant>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Flow {
    /// Of a new connection.
    pub fn begun() -> Flow {
        Flow(Arc::new(Counts {
            requests: AtomicUsize::new(0),
            ready: Mutex::default(),
            next_id: AtomicU64::new(0),
            ready_bytes: AtomicUsize::new(0),
            moved: Mutex::new(Instant::now()),
        }))
    }

    fn moves(&self) {
        *locked(&self.0.moved) = Instant::now();
    }

    fn is_full(&self) -> bool {
        self.0.ready_bytes.load(Ordering::Relaxed) >= MOST_READY_BYTES
    }

    /// Returns when the connection has been idle, or one of its responses unread, for too long.
    pub async fn is_over(&self) {
        loop {
            tokio::time::sleep(LOOK).await;
            let is_idle = self.0.requests.load(Ordering::Relaxed) == 0;
            let is_old = |since: &Instant| since.elapsed() >= LONGEST;
            if is_idle && is_old(&locked(&self.0.moved)) || locked(&self.0.ready).values().any(is_old) {
                return;
            }
        }
    }
}

/// Counts a request of a connection with HTTP/2, and its response.
pub async fn track(request: Request, next: Next) -> Response {
    let Some(flow) = request.extensions().get::<Flow>().cloned() else { return next.run(request).await };
    let place = Place::new(&flow);
    let unread = || {
        let message = "the responses before this one have not been read: read them before you ask again";
        HostError::new(ErrorCode::Busy, message).into_response()
    };
    // Refused before anything is done.
    if flow.is_full() {
        return unread();
    }
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    let response = next.run(request).await;
    let bytes = response.body().size_hint().lower() as usize;
    // Many may have been asked for before the first was there.
    if is_read && bytes > PIECE_BYTES && flow.is_full() {
        return unread();
    }
    response.map(|body| {
        Body::new(Tracked { ready: Some(Ready::new(&flow, bytes)), body, rest: Bytes::new(), place })
    })
}

/// A request, until its response has been handed over.
struct Place(Flow);

impl Place {
    fn new(flow: &Flow) -> Place {
        flow.moves();
        flow.0.requests.fetch_add(1, Ordering::Relaxed);
        Place(flow.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.moves();
        self.0.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Something that its client can read, until it is read.
struct Ready {
    flow: Flow,
    id: u64,
    bytes: usize,
}

impl Ready {
    fn new(flow: &Flow, bytes: usize) -> Ready {
        let id = flow.0.next_id.fetch_add(1, Ordering::Relaxed);
        locked(&flow.0.ready).insert(id, Instant::now());
        flow.0.ready_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ready { flow: flow.clone(), id, bytes }
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        locked(&self.flow.0.ready).remove(&self.id);
        self.flow.0.ready_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The body of a response.
struct Tracked {
    body: Body,
    /// What of the last part is left.
    rest: Bytes,
    /// There is something to hand over, as far as is known. None: the daemon is waited for.
    ready: Option<Ready>,
    place: Place,
}

impl Tracked {
    fn flow(&self) -> &Flow {
        &self.place.0
    }
}

/// A piece that was handed over.
struct Piece {
    bytes: Bytes,
    _ready: Ready,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl HttpBody for Tracked {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Pending => {
                    self.ready = None;
                    return Poll::Pending;
                }
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Poll::Ready(end) => return Poll::Ready(end),
            }
        }
        let length = self.rest.len().min(PIECE_BYTES);
        let bytes = self.rest.split_to(length);
        let flow = self.flow().clone();
        self.ready = Some(Ready::new(&flow, self.rest.len() + self.body.size_hint().lower() as usize));
        let piece = Piece { bytes, _ready: Ready::new(&flow, length) };
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, mut hint) = (self.rest.len() as u64, self.body.size_hint());
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + rest);
        }
        hint.set_lower(hint.lower() + rest);
        hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::{FutureExt, StreamExt, stream};

    fn tracked(flow: &Flow, body: Body) -> Body {
        let bytes = body.size_hint().lower() as usize;
        let place = Place::new(flow);
        Body::new(Tracked { ready: Some(Ready::new(flow, bytes)), body, rest: Bytes::new(), place })
    }

    fn counts(flow: &Flow) -> [usize; 3] {
        let load = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        [load(&flow.0.requests), locked(&flow.0.ready).len(), load(&flow.0.ready_bytes)]
    }

    #[test]
    fn a_response_is_counted_until_its_last_piece_is_sent() {
        let flow = Flow::begun();
        let mut body = tracked(&flow, Body::from(vec![1; 40_000])).into_data_stream();
        assert_eq!(counts(&flow), [1, 1, 40_000]);
        let first = body.next().now_or_never().unwrap().unwrap().unwrap();
        assert_eq!((first.len(), counts(&flow)), (PIECE_BYTES, [1, 2, 40_000]));
        let more: Vec<_> = body.by_ref().collect::<Vec<_>>().now_or_never().unwrap();
        drop(body);
        assert_eq!((more.len(), counts(&flow)), (2, [0, 3, 40_000]), "it was not sent");
        drop(more);
        assert_eq!(counts(&flow), [0, 1, PIECE_BYTES]);
        drop(first);
        assert_eq!(counts(&flow), [0, 0, 0]);
    }

    #[test]
    fn events_that_are_waited_for_are_not_ready() {
        let flow = Flow::begun();
        let events = stream::iter([Ok::<_, axum::Error>("event")]).chain(stream::pending());
        let mut body = tracked(&flow, Body::from_stream(events)).into_data_stream();
        drop(body.next().now_or_never().unwrap());
        assert_eq!(counts(&flow)[1], 1, "nobody has asked whether there is more");
        assert!(body.next().now_or_never().is_none());
        assert_eq!(counts(&flow), [1, 0, 0]);
    }
}
