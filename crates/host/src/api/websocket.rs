//! WebSockets of the API: who may open one, why one ends, and the pings. Owns nothing of what is passed on.
//!
//! Invariant: each end that the client does not cause has a code and a reason, and each handshake of closing is ended (RFC 6455, 5.5.1).
//! A client has its place until its connection is closed.

use crate::access::Peer;
use crate::access::caller::{Caller, Role};
use crate::error::HostError;
use crate::machines::console::ClientPlace;
use axum::body::Bytes;
use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, WebSocketUpgrade, close_code};
use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use spillway_api::ErrorCode;
use std::future::pending;
use std::time::Duration;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, timeout};

/// Longest message of a client.
pub(super) const MAX_MESSAGE_BYTES: usize = 16 << 10;
/// Most bytes that wait for a client. Answers to pings wait there too, and a client may send pings and read nothing. Larger than what is
/// flushed at a time, and one message more.
const MAX_UNSENT_BYTES: usize = 512 << 10;
/// Interval of pings. A client that answers none until the next one is due has ended.
const PING: Duration = Duration::from_secs(30);
/// Longest time of the closing handshake.
const GOODBYE: Duration = Duration::from_secs(2);

/// Why a WebSocket ends.
pub(super) struct Ending {
    pub code: u16,
    pub reason: &'static str,
}

/// RFC 6455, 5.5.2: a ping has to be answered. No matter of rights: the client may come again.
const NO_ANSWER: Ending = Ending { code: close_code::PROTOCOL, reason: "the client does not answer pings" };
const NO_RIGHT: Ending = Ending { code: close_code::POLICY, reason: "the session has ended, or its token" };
const REPLACED: Ending =
    Ending { code: close_code::AGAIN, reason: "the connection is needed for a newer one" };
const GIVEN_UP: Ending = Ending {
    code: close_code::AGAIN,
    reason: "all places were taken, and an administrator has this one now",
};
pub(super) const NOT_UNDERSTOOD: Ending = Ending {
    code: close_code::UNSUPPORTED,
    reason: "a message is not understood: see docs/api.md for what this WebSocket takes",
};
pub(super) const TOO_LONG: Ending =
    Ending { code: close_code::SIZE, reason: "a message is longer than 16 KiB, or the connection is broken" };

/// A request for a WebSocket, of a program or of a page of the daemon's own. A browser lets any page ask for one, with the
/// cookies of this daemon's.
pub(super) struct Opening {
    pub upgrade: WebSocketUpgrade,
    pub caller: Caller,
    pub peer: Peer,
    pub headers: HeaderMap,
}

impl<S: Send + Sync> FromRequestParts<S> for Opening {
    type Rejection = HostError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Opening, HostError> {
        if !is_same_origin(&parts.headers) {
            let message = "a page of another origin may not open this: open it from the daemon's own console";
            return Err(HostError::new(ErrorCode::Forbidden, message));
        }
        let upgrade = WebSocketUpgrade::from_request_parts(parts, state).await;
        let upgrade = upgrade.map_err(|e| {
            HostError::invalid(format!("no valid request for a WebSocket: {}", e.body_text()))
        })?;
        let upgrade = upgrade.max_message_size(MAX_MESSAGE_BYTES).max_frame_size(MAX_MESSAGE_BYTES);
        let upgrade = upgrade.max_write_buffer_size(MAX_UNSENT_BYTES);
        let nobody = || HostError::new(ErrorCode::Unauthenticated, "the caller cannot be identified");
        let caller = parts.extensions.get::<Caller>().cloned().ok_or_else(nobody)?;
        let peer = parts.extensions.get::<Peer>().cloned().ok_or_else(nobody)?;
        Ok(Opening { upgrade, caller, peer, headers: parts.headers.clone() })
    }
}

impl<S: Send + Sync> OptionalFromRequestParts<S> for Opening {
    type Rejection = HostError;

    /// `None`: the request is not for a WebSocket.
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Option<Opening>, HostError> {
        let upgrade = parts.headers.get(header::UPGRADE);
        match upgrade.is_some_and(|protocol| protocol.as_bytes().eq_ignore_ascii_case(b"websocket")) {
            true => <Opening as FromRequestParts<S>>::from_request_parts(parts, state).await.map(Some),
            false => Ok(None),
        }
    }
}

/// Whether the header `Origin` is absent, or has the host and port of the header `Host`.
pub(super) fn is_same_origin(headers: &HeaderMap) -> bool {
    let mut origins = headers.get_all(header::ORIGIN).iter();
    let Some(origin) = origins.next() else { return true };
    let (Ok(origin), Some(Ok(host))) = (origin.to_str(), headers.get(header::HOST).map(|host| host.to_str()))
    else {
        return false;
    };
    let authority = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
    origins.next().is_none() && authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
}

/// Whether a WebSocket goes on. `Err(None)`: the client has ended it.
pub(super) type Step = Result<(), Option<Ending>>;

/// What says that a WebSocket has to end, whatever is passed on: its client answers no ping, or may not look and type any
/// more, or its place is needed.
pub(super) struct Watch {
    peer: Peer,
    /// The request's, which say who the client is.
    headers: HeaderMap,
    /// The role that it needs.
    role: Role,
    /// Its place among the clients of a machine's console or screen; `None` for events.
    place: Option<ClientPlace>,
    pings: Interval,
    /// Whether something has come since the last ping.
    pub is_answered: bool,
}

impl Watch {
    pub fn new(peer: Peer, headers: HeaderMap, role: Role, place: Option<ClientPlace>) -> Watch {
        Watch::with_pings(peer, headers, role, place, PING)
    }

    pub fn with_pings(
        peer: Peer,
        headers: HeaderMap,
        role: Role,
        place: Option<ClientPlace>,
        each: Duration,
    ) -> Watch {
        let mut pings = interval_at(Instant::now() + each, each);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Watch { peer, headers, role, place, pings, is_answered: true }
    }

    /// Waits until a ping is due. Cancel safe.
    pub async fn due(&mut self) -> Step {
        tokio::select! {
            _ = self.pings.tick() => Ok(()),
            () = self.peer.place.closed() => Err(Some(REPLACED)),
            () = given_up(self.place.as_ref()) => Err(Some(GIVEN_UP)),
        }
    }

    /// Sends a ping. `is_held`: nothing of the client is received now, so it may have answered.
    pub async fn ping(&mut self, socket: &mut WebSocket, is_held: bool) -> Step {
        if !self.peer.may(&self.headers, self.role) {
            return Err(Some(NO_RIGHT));
        }
        if !std::mem::replace(&mut self.is_answered, false) && !is_held {
            return Err(Some(NO_ANSWER));
        }
        send(socket, Message::Ping(Bytes::new())).await
    }
}

/// Waits until somebody else gets this place.
async fn given_up(place: Option<&ClientPlace>) {
    match place {
        Some(place) => place.closed().await,
        None => pending().await,
    }
}

/// Sends a message.
pub(super) async fn send(socket: &mut WebSocket, message: Message) -> Step {
    socket.send(message).await.map_err(|_| None)
}

/// Ends the closing handshake, which the client has begun if there is no reason, closes the connection, and gives its place back.
pub(super) async fn say_goodbye(mut socket: WebSocket, ending: Option<Ending>, watch: Watch) {
    let goodbye = async {
        if let Some(Ending { code, reason }) = ending {
            let frame = CloseFrame { code, reason: Utf8Bytes::from_static(reason) };
            let _ = socket.send(Message::Close(Some(frame))).await;
        }
        // The answer to the client's part is sent meanwhile.
        while let Some(Ok(_)) = socket.recv().await {}
    };
    let _ = timeout(GOODBYE, goodbye).await;
    drop((socket, watch));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_another_origin_is_told_by_its_header() {
        let case = |host: Option<&'static str>, origins: &[&'static str]| {
            let mut headers = HeaderMap::new();
            host.map(|host| headers.insert(header::HOST, host.parse().unwrap()));
            for origin in origins {
                headers.append(header::ORIGIN, origin.parse().unwrap());
            }
            is_same_origin(&headers)
        };
        let host = Some("host.example:9443");
        assert!(case(host, &[]) && case(None, &[]), "no browser");
        assert!(case(host, &["https://host.example:9443"]) && case(host, &["https://HOST.example:9443"]));
        assert!(case(Some("127.0.0.1:4000"), &["http://127.0.0.1:4000"]));
        for foreign in [
            "https://host.example",
            "https://host.example:9444",
            "https://evil.example",
            "https://host.example:9443.evil.example",
            "https://evil.example/host.example:9443",
            "host.example:9443",
            "null",
            "",
        ] {
            assert!(!case(host, &[foreign]), "{foreign}");
        }
        let own = "https://host.example:9443";
        assert!(!case(host, &[own, "https://evil.example"]) && !case(None, &[own]));
    }
}
