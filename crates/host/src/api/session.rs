//! Routes of sessions. The one that opens a session is outside the guard, as who calls it is not known yet: it writes its own line in
//! the audit log.

use super::extract::Body;
use super::{ApiState, ProblemResponse};
use crate::access::act::RequestAction;
use crate::access::audit::RequestOutcome;
use crate::access::caller::{Caller, Proof, Role};
use crate::access::note::AuditNotes;
use crate::access::sessions::{LIFETIME, is_of_this_origin, no_cookie};
use crate::access::{Authority, Known, Peer};
use crate::error::HostError;
use axum::extract::{DefaultBodyLimit, Extension, FromRequest, Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use spillway_api::{Empty, ErrorCode, NewSession, Session, SessionProof, SessionRole};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Longest body with a token.
const MAX_BODY_BYTES: usize = 4 << 10;
/// Longest time until it is complete.
const BODY: Duration = Duration::from_secs(5);
/// The path of a session.
const PATH: &str = "/v1/session";

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(get_session, delete_session))
}

/// The route that a caller may use whom nobody knows yet.
pub fn open_routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(create_session))
}

/// Bounds what such a caller may send.
pub fn bounded(router: Router<ApiState>) -> Router<ApiState> {
    router.layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
}

/// Returns who the caller is, and what it may do.
#[utoipa::path(get, path = "", responses((status = 200, body = Session), ProblemResponse))]
async fn get_session(Extension(caller): Extension<Caller>) -> Json<Session> {
    Json(session(&caller))
}

/// Opens a session for a token: the response sets a cookie, `__Host-spillway`, that stands for the token for 12 hours. A request with the
/// cookie that changes something needs `Sec-Fetch-Site: same-origin`, which browsers send for the console's own pages. The session ends
/// with its token, and when the daemon is restarted. Only over TCP: on the unix socket there is nobody to log in.
#[utoipa::path(post, path = "", request_body = NewSession, security(()), responses((status = 200, body = Session, headers(("Set-Cookie" = String, description = "The cookie of the session, for requests of the same browser."))), ProblemResponse))]
async fn create_session(
    State(app): State<ApiState>,
    Extension(peer): Extension<Peer>,
    request: Request,
) -> Response {
    let act = RequestAction { verb: "log in".into(), ..RequestAction::of(&Method::DELETE, PATH) };
    let none = |message| Err(HostError::new(ErrorCode::Conflict, message));
    let opened = match &peer.authority {
        Authority::Kernel => none("the unix socket needs no session: its permissions decide who may use it"),
        Authority::Member(_) => none("sessions are of one host: log in to it, and not through another one"),
        Authority::Tokens(known) => log_in(known, &peer, request).await,
    };
    let (response, caller) = match opened {
        Ok((caller, cookie)) => {
            (([(header::SET_COOKIE, cookie)], Json(session(&caller))).into_response(), Some(caller))
        }
        Err(refusal) => (refusal.into_response(), None),
    };
    let code = response.extensions().get::<spillway_api::Problem>().map(|problem| problem.code);
    let outcome = RequestOutcome { status: response.status().as_u16(), code, let_in: caller.is_some() };
    match caller {
        Some(caller) => app.audit.write(&caller, &act, AuditNotes::default(), outcome),
        None => app.audit.write_unknown(peer.source, &act, outcome),
    }
    response
}

async fn log_in(known: &Arc<Known>, peer: &Peer, request: Request) -> Result<(Caller, String), HostError> {
    let headers = &request.headers().clone();
    // Nobody knows yet who asks: what waits for a body is bounded for each address.
    let _place = known.sessions.place(peer.source).ok_or_else(|| {
        HostError::new(ErrorCode::Busy, "too many requests to log in are under way: wait for an answer")
    })?;
    let late = |_| HostError::new(ErrorCode::Timeout, "the request's body did not come within 5 s");
    let Body::<NewSession>(new) = timeout(BODY, Body::from_request(request, &())).await.map_err(late)??;
    let token = new.token.as_str();
    // Whoever is logged in by another site's page would work under a stranger's name.
    if is_of_this_origin(headers) == Some(false) {
        return Err(HostError::new(ErrorCode::Forbidden, "a page of another site has made this request"));
    }
    let unknown = || {
        HostError::new(ErrorCode::Unauthenticated, "this token is not known: 'spillway token new' makes one")
    };
    let owner = known.tokens.find(token).ok_or_else(unknown)?;
    if !known.sessions.may_open(owner.hash) {
        let message = format!("token {} has logged in often within some minutes: wait a little", owner.name);
        return Err(HostError::new(ErrorCode::Busy, message));
    }
    // Who logs in again leaves nothing open behind.
    known.sessions.close(headers);
    let id = known.sessions.open(owner.hash);
    let id = id
        .map_err(|e| HostError::new(ErrorCode::Unavailable, format!("no random bytes for a session: {e}")))?;
    let proof = Proof::Session { left: LIFETIME };
    Ok((Caller { name: owner.name.into(), role: owner.role, source: peer.source, proof }, id.cookie()))
}

/// Ends the session of the request's cookie.
#[utoipa::path(delete, path = "", responses((status = 200, body = Empty), ProblemResponse))]
async fn delete_session(Extension(peer): Extension<Peer>, headers: HeaderMap) -> Response {
    let is_closed = peer.authority.known().is_some_and(|known| known.sessions.close(&headers));
    if !is_closed {
        return HostError::new(ErrorCode::Conflict, "the request belongs to no session").into_response();
    }
    ([(header::SET_COOKIE, no_cookie())], Json(Empty {})).into_response()
}

fn session(caller: &Caller) -> Session {
    let (by, left) = match caller.proof {
        Proof::Socket => (SessionProof::Socket, None),
        Proof::Token => (SessionProof::Token, None),
        Proof::Session { left } => (SessionProof::Session, Some(left)),
        Proof::Member => (SessionProof::Fleet, None),
    };
    let role = match caller.role {
        Role::Read => SessionRole::Read,
        Role::Operate => SessionRole::Operate,
        Role::Admin => SessionRole::Admin,
    };
    Session { caller: caller.name.to_string(), role, by, seconds_left: left.map(|left| left.as_secs()) }
}
