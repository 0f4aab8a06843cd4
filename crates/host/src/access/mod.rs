//! Authorization and audit: every request passes this check. Roles are in `caller`, actions in `act`, tokens in `tokens`,
//! limits of connections in `connections`, the audit log in `audit`.
//!
//! Invariant: a request without a sufficient role reaches no route; each change that a client requests is in the audit
//! log, whatever its outcome.

pub mod act;
pub mod audit;
pub mod caller;
pub mod connections;
pub mod note;
pub mod paced;
mod refusals;
pub mod tls;
pub mod tokens;

use crate::error::HostError;
use act::RequestAction;
use audit::{Audit, RequestOutcome};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use caller::{Caller, PeerAddress, Role};
use connections::{ActiveRequest, ConnectionSlot};
use note::RequestNote;
use spillway_api::{ErrorCode, Problem};
use std::sync::Arc;
use tokens::Tokens;
use tokio::sync::watch;

/// The peer of a connection.
#[derive(Clone)]
pub struct Peer {
    /// Origin of the connection.
    pub source: PeerAddress,
    /// Known tokens, over TCP. On the unix socket none is needed: whoever can open it may do everything.
    pub tokens: Option<Arc<Tokens>>,
    /// Slot of the connection.
    pub place: Arc<ConnectionSlot>,
}

/// Tells a route that the connection was closed before the response.
#[derive(Clone)]
pub struct ConnectionClosed(watch::Receiver<()>);

impl ConnectionClosed {
    /// Waits until the connection is closed.
    pub async fn wait(&mut self) {
        // The sender is dropped with the connection, and never sends anything.
        let _ = self.0.changed().await;
    }
}

/// An effect that is undone if the response does not reach the connection. It is a part of the response until that is
/// sent.
pub trait Undo: Send + Sync {
    /// Keeps the effect, since the response was sent.
    fn keep(&self);
}

/// Lets a request through if its role is sufficient, and writes changes to the audit log, also those of clients that do
/// not wait for the response.
pub async fn guard(State(audit): State<Audit>, mut request: Request, next: Next) -> Response {
    let act = RequestAction::of(request.method(), request.uri().path());
    let outcome = |response: &Response, let_in| RequestOutcome {
        status: response.status().as_u16(),
        code: response.extensions().get::<Problem>().map(|problem| problem.code),
        let_in,
    };
    let (caller, busy) = match identify(&request) {
        Ok(known) => known,
        Err((refusal, source)) => {
            let response = refusal.into_response();
            audit.write_unknown(source, &act, outcome(&response, false));
            return response;
        }
    };
    let busy = match busy {
        Ok(busy) => busy,
        Err(crowded) => {
            let mut response = crowded.into_response();
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            audit.write(&caller, &act, note::AuditNotes::default(), outcome(&response, false));
            return response;
        }
    };
    request.extensions_mut().insert(caller.clone());
    if act.role == Role::Read {
        let response = next.run(request).await;
        drop(busy);
        return response;
    }
    let (stays, gone) = watch::channel(());
    let note = RequestNote::default();
    request.extensions_mut().insert(note.clone());
    request.extensions_mut().insert(ConnectionClosed(gone));
    let answer = async move {
        let let_in = caller.role >= act.role;
        let response = if let_in {
            next.run(request).await
        } else {
            let role = act.role.word();
            let message = format!("{caller} may not do this: use a token with the role '{role}'");
            HostError::new(ErrorCode::Forbidden, message).into_response()
        };
        audit.write(&caller, &act, note.take(), outcome(&response, let_in));
        drop(busy);
        response
    };
    let lost = |_| HostError::new(ErrorCode::Internal, "the answer was lost").into_response();
    // Dropped with this future when the connection is closed.
    let _stays = stays;
    let mut response = tokio::spawn(answer).await.unwrap_or_else(lost);
    if let Some(undo) = response.extensions_mut().remove::<Arc<dyn Undo>>() {
        undo.keep();
    }
    response
}

type Identified = (Caller, Result<ActiveRequest, HostError>);

/// Identifies the caller, and marks the connection as busy while the request is answered.
fn identify(request: &Request) -> Result<Identified, (HostError, PeerAddress)> {
    let Some(peer) = request.extensions().get::<Peer>() else {
        let nobody = HostError::new(ErrorCode::Unauthenticated, "the caller cannot be identified");
        return Err((nobody, PeerAddress::Local { uid: None, pid: None }));
    };
    let (caller, token) = match (&peer.tokens, peer.source) {
        (None, PeerAddress::Local { uid, .. }) => {
            let name = uid.map_or_else(|| "uid unknown".to_owned(), |uid| format!("uid {uid}"));
            (Caller { name: name.into(), role: Role::Admin, source: peer.source }, false)
        }
        (tokens, source) => {
            let token = request.headers().get(header::AUTHORIZATION);
            let token = token.and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
            let known = token.and_then(|token| tokens.as_ref()?.find(token));
            let Some((name, role)) = known else {
                let message = "authenticate with the header Authorization: Bearer TOKEN";
                return Err((HostError::new(ErrorCode::Unauthenticated, message), source));
            };
            (Caller { name: name.into(), role, source }, true)
        }
    };
    let busy = peer.place.begin(token.then_some((&caller.name, caller.role == Role::Admin)));
    let busy = busy.map_err(|_| {
        let message = format!(
            "{caller} has too many requests at a time, or this daemon has: wait for an answer before you ask again"
        );
        HostError::new(ErrorCode::Busy, message)
    });
    Ok((caller, busy))
}
