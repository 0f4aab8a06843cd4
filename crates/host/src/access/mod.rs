//! Authorization and audit: every request passes this check. Roles are in `caller`, actions in `act`, tokens in `tokens`,
//! limits of connections in `connections`, the audit log in `audit`, delayed responses in `delay`.
//!
//! Invariant: a request without a sufficient role reaches no route; each change that a client requests is in the audit
//! log as soon as it is decided, whatever its outcome, and whether or not the client waits for more.

pub mod act;
pub mod audit;
pub mod caller;
pub mod connections;
pub mod delay;
pub mod lingering;
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
    let note = RequestNote::default();
    request.extensions_mut().insert(note.clone());
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
        (response, busy)
    };
    // What is decided is decided to its end. Only the delay ends when the connection is closed, since it is a part of
    // this future.
    let Ok((mut response, _busy)) = tokio::spawn(answer).await else {
        return HostError::new(ErrorCode::Internal, "the answer was lost").into_response();
    };
    let undo = response.extensions_mut().remove::<Arc<dyn Undo>>();
    let response = delay::wait(response).await;
    if let Some(undo) = undo.filter(|_| response.status().is_success()) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use audit::AuditSettings;
    use axum::Router;
    use axum::body::Body;
    use axum::middleware::from_fn_with_state;
    use axum::routing::post;
    use connections::{ConnectionLimits, Connections};
    use futures_util::FutureExt;
    use hyper::service::Service;
    use hyper_util::service::TowerToHyperService;
    use std::future::pending;
    use std::time::Duration;
    use tokio::sync::watch;

    /// A request that waits has its line, and nothing of it goes on when its connection is closed.
    #[tokio::test]
    async fn a_wait_begins_after_the_line_and_ends_with_the_connection() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("audit.log");
        let settings = AuditSettings {
            file: Some(file.clone()),
            journal: false,
            keep: Duration::from_secs(86_400),
            max_bytes: 1 << 20,
        };
        let waits = watch::Sender::new(());
        let waiting = waits.clone();
        let route = async move || {
            let waiter = waiting.subscribe();
            delay::delayed("now", async move {
                pending::<()>().await;
                drop(waiter);
                Ok("later")
            })
        };
        let router = Router::new()
            .route("/v1/machine-actions", post(route))
            .layer(from_fn_with_state(Audit::new(settings), guard));
        let source = PeerAddress::Local { uid: Some(0), pid: None };
        let place = Connections::new(ConnectionLimits::LOCAL).admit(source).unwrap();
        let peer = Peer { source, tokens: None, place: Arc::clone(&place) };
        let request = Request::post("/v1/machine-actions").extension(peer).body(Body::empty()).unwrap();
        let mut answer = Box::pin(TowerToHyperService::new(router).call(request));
        let is_written =
            || std::fs::read_to_string(&file).is_ok_and(|text| text.contains(r#""result":"done""#));
        let written = async {
            while !is_written() {
                tokio::select! {
                    _ = &mut answer => panic!("it does not wait"),
                    () = tokio::task::yield_now() => {}
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(30), written).await.expect("the line is written first");
        assert!((&mut answer).now_or_never().is_none(), "it waits");
        assert_eq!(waits.receiver_count(), 1);
        drop(answer);
        assert_eq!((waits.receiver_count(), Arc::strong_count(&place)), (0, 1));
    }
}
