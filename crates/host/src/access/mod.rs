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
pub mod flow;
pub mod lingering;
pub mod note;
pub mod paced;
mod refusals;
pub mod sessions;
pub mod tls;
pub mod tokens;

use crate::error::HostError;
use crate::fleet::door::MemberPeer;
use crate::work;
use act::RequestAction;
use audit::{Audit, RequestOutcome};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use caller::{Caller, PeerAddress, Proof, Role};
use connections::{ActiveRequest, ConnectionSlot};
use note::RequestNote;
use sessions::Sessions;
use spillway_api::{ErrorCode, Problem};
use std::sync::Arc;
use tokens::Tokens;

/// The peer of a connection.
#[derive(Clone)]
pub struct Peer {
    /// Origin of the connection.
    pub source: PeerAddress,
    /// What identifies the callers of requests on the connection.
    pub authority: Authority,
    /// Slot of the connection.
    pub place: Arc<ConnectionSlot>,
}

impl Peer {
    /// Whether who has made a request has the role now.
    pub fn may(&self, headers: &HeaderMap, role: Role) -> bool {
        match &self.authority {
            Authority::Kernel => true,
            Authority::Tokens(known) => known.may(headers, role),
            Authority::Member(member) => member.may(headers, role),
        }
    }
}

/// What identifies the callers of a listener.
#[derive(Clone)]
pub enum Authority {
    /// The permissions of the unix socket: whoever can open it may do everything.
    Kernel,
    /// Tokens, and sessions that stand for them.
    Tokens(Arc<Known>),
    /// The daemon of another host of the fleet, which says who asks there.
    Member(Arc<MemberPeer>),
}

impl Authority {
    /// Returns the tokens and sessions, if the listener has them.
    pub fn known(&self) -> Option<&Arc<Known>> {
        match self {
            Authority::Tokens(known) => Some(known),
            Authority::Kernel | Authority::Member(_) => None,
        }
    }
}

/// Who is let in over TCP.
pub struct Known {
    /// The tokens.
    pub tokens: Tokens,
    /// The sessions of browsers, each of which has shown a token.
    pub sessions: Sessions,
}

impl Known {
    /// Whether who has made this request has the role now.
    pub fn may(&self, headers: &HeaderMap, role: Role) -> bool {
        self.owner(headers).is_some_and(|(_, own, _)| own >= role)
    }

    /// Who has made a request: the owner of its token; without one, of its session.
    fn owner(&self, headers: &HeaderMap) -> Option<(String, Role, Proof)> {
        match headers.get(header::AUTHORIZATION) {
            Some(value) => {
                let owner = self.tokens.find(value.to_str().ok()?.strip_prefix("Bearer ")?)?;
                Some((owner.name, owner.role, Proof::Token))
            }
            None => {
                let owner = self.sessions.find(headers, &self.tokens)?;
                Some((owner.name, owner.role, Proof::Session { left: owner.left }))
            }
        }
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
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
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
    let is_let_in = may_do(&caller, &act, is_read, request.headers());
    request.extensions_mut().insert(caller.clone());
    // The host that carries out a request that is passed on has the line in its own log.
    if act.role == Role::Read && is_read || act.is_passed_on() && is_let_in.is_ok() {
        return work::for_request(busy, next.run(request)).await;
    }
    let note = RequestNote::default();
    request.extensions_mut().insert(note.clone());
    let answer = async move {
        let let_in = is_let_in.is_ok();
        let response = match is_let_in {
            Ok(()) => next.run(request).await,
            Err(refusal) => refusal.into_response(),
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

/// Whether the caller has the role, and a page of another site has not made the request in the name of the caller.
fn may_do(caller: &Caller, act: &RequestAction, is_read: bool, headers: &HeaderMap) -> Result<(), HostError> {
    let forbidden = |message| Err(HostError::new(ErrorCode::Forbidden, message));
    if caller.role < act.role {
        let role = act.role.word();
        return forbidden(format!("{caller} may not do this: use a token with the role '{role}'"));
    }
    let by_session = matches!(caller.proof, Proof::Session { .. });
    if !is_read && !sessions::is_of_this_origin(headers).unwrap_or(!by_session) {
        return forbidden(format!(
            "a page of another site has made this request, or a program that uses the cookie of {caller}: use the console of this \
             daemon, or a token"
        ));
    }
    Ok(())
}

type Identified = (Caller, Result<ActiveRequest, HostError>);

/// Identifies the caller, and marks the connection as busy while the request is answered.
fn identify(request: &Request) -> Result<Identified, (HostError, PeerAddress)> {
    let Some(peer) = request.extensions().get::<Peer>() else {
        let nobody = HostError::new(ErrorCode::Unauthenticated, "the caller cannot be identified");
        return Err((nobody, PeerAddress::Local { uid: None, pid: None }));
    };
    let caller = match &peer.authority {
        Authority::Kernel => {
            let uid = match peer.source {
                PeerAddress::Local { uid, .. } => uid,
                PeerAddress::Remote(_) => None,
            };
            let name = uid.map_or_else(|| "uid unknown".to_owned(), |uid| format!("uid {uid}"));
            Caller { name: name.into(), role: Role::Admin, source: peer.source, proof: Proof::Socket }
        }
        Authority::Tokens(known) => {
            let Some((name, role, proof)) = known.owner(request.headers()) else {
                let message = "authenticate with the header Authorization: Bearer TOKEN, or log in to the console again";
                return Err((HostError::new(ErrorCode::Unauthenticated, message), peer.source));
            };
            Caller { name: name.into(), role, source: peer.source, proof }
        }
        Authority::Member(member) => {
            let (name, role) = member.caller(request.headers()).map_err(|refusal| (refusal, peer.source))?;
            Caller { name: name.into(), role, source: peer.source, proof: Proof::Member }
        }
    };
    // On the unix socket, connections are counted by user alone.
    let token = caller.proof != Proof::Socket;
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
        let peer = Peer { source, authority: Authority::Kernel, place: Arc::clone(&place) };
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
