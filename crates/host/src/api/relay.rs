//! Routes that pass a request on to another host of the fleet, for the same user. Owns which parts of a request and a response are passed on.
//!
//! Invariant: a request is passed on once: one that has come from another host is refused. What the other host decides by is the user that
//! this daemon has identified, never what the request says of it. What is passed on is held in memory in small parts only.

mod body;
mod tunnel;

use super::fleet::{fleet, host_error};
use super::websocket::is_same_origin;
use super::{ApiState, ProblemResponse};
use crate::access::Peer;
use crate::access::caller::{Caller, Role};
use crate::error::HostError;
use crate::fleet::door::{
    CALLER_HEADER, FleetDoor, HostBody, HostClientError, Member, REACH, SELF, caller_value,
};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use body::PassedBody;
use hyper::service::Service;
use hyper::upgrade::OnUpgrade;
use hyper_util::service::TowerToHyperService;
use spillway_api::{ErrorCode, Name};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Longest time until a response begins. Requests that wait are bounded by the host that carries them out.
const RESPONSE: Duration = Duration::from_secs(2 * 3600);
/// How often it is looked whether the other host still answers, while its response is waited for, and whether the user may still have it.
const LOOK: Duration = Duration::from_millis(if cfg!(test) { 300 } else { 5000 });
/// Headers that belong to one connection (RFC 9110, 7.6.1), beside those that `Connection` names.
const OF_CONNECTION: [HeaderName; 9] = [
    header::CONNECTION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];
/// Headers of a request that say who has made it, to this daemon alone.
const OF_CALLER: [HeaderName; 10] = [
    header::AUTHORIZATION,
    header::COOKIE,
    header::EXPECT,
    header::HOST,
    header::ORIGIN,
    header::REFERER,
    HeaderName::from_static("sec-fetch-dest"),
    HeaderName::from_static("sec-fetch-mode"),
    HeaderName::from_static("sec-fetch-site"),
    HeaderName::from_static("sec-fetch-user"),
];
/// Headers of a response that are meant for a browser's dealings with the other host.
const OF_HOST: [HeaderName; 4] = [
    header::SET_COOKIE,
    header::WWW_AUTHENTICATE,
    header::STRICT_TRANSPORT_SECURITY,
    HeaderName::from_static("clear-site-data"),
];

/// The routes, with their whole paths: below another router they would not see these.
pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(get_from_host, replace_on_host, run_on_host, delete_on_host))
}

/// All other routes of this host, for requests to itself.
#[derive(Clone)]
pub struct OwnRoutes(pub Router);

/// Passes a request on to a host of the fleet, which carries it out for the same user, with the same role. The path behind `api/` is one of
/// this API. Bodies, events and WebSockets are passed on as they come. The response is that of the other host; `unavailable`, with its name and
/// address, if it cannot be reached.
#[utoipa::path(get, path = "/v1/fleet/hosts/{host}/api/{*path}", params(("host" = Name, Path), ("path" = String, Path)), responses(
    (status = 200, description = "What the other host has answered."), (status = 101, description = "The connection is a WebSocket."), ProblemResponse
))]
async fn get_from_host(
    State(app): State<ApiState>,
    Extension(own): Extension<OwnRoutes>,
    request: Request,
) -> Result<Response, HostError> {
    pass_on(&app, own, request).await
}

/// Passes a request on that replaces an object of another host.
#[utoipa::path(put, path = "/v1/fleet/hosts/{host}/api/{*path}", params(("host" = Name, Path), ("path" = String, Path)), responses(
    (status = 200, description = "What the other host has answered."), ProblemResponse
))]
async fn replace_on_host(
    State(app): State<ApiState>,
    Extension(own): Extension<OwnRoutes>,
    request: Request,
) -> Result<Response, HostError> {
    pass_on(&app, own, request).await
}

/// Passes a request on that creates something at another host, or acts on it.
#[utoipa::path(post, path = "/v1/fleet/hosts/{host}/api/{*path}", params(("host" = Name, Path), ("path" = String, Path)), responses(
    (status = 200, description = "What the other host has answered."), ProblemResponse
))]
async fn run_on_host(
    State(app): State<ApiState>,
    Extension(own): Extension<OwnRoutes>,
    request: Request,
) -> Result<Response, HostError> {
    pass_on(&app, own, request).await
}

/// Passes a request on that deletes an object of another host.
#[utoipa::path(delete, path = "/v1/fleet/hosts/{host}/api/{*path}", params(("host" = Name, Path), ("path" = String, Path)), responses(
    (status = 200, description = "What the other host has answered."), ProblemResponse
))]
async fn delete_on_host(
    State(app): State<ApiState>,
    Extension(own): Extension<OwnRoutes>,
    request: Request,
) -> Result<Response, HostError> {
    pass_on(&app, own, request).await
}

/// The user of a request that is passed on, as long as the response goes on.
#[derive(Clone)]
struct Passage {
    fleet: Arc<FleetDoor>,
    host: Name,
    member: Member,
    peer: Peer,
    headers: HeaderMap,
    role: Role,
}

impl Passage {
    /// Waits until the user may not have the response any more, or the host is no member any more, or another one.
    async fn until_over(self) {
        while self.peer.may(&self.headers, self.role)
            && self.fleet.members.get(&self.host).as_ref() == Some(&self.member)
        {
            sleep(LOOK).await;
        }
    }

    /// Waits until the host does not answer any more, twice in a row. `is_read`: a lost request may be repeated.
    async fn until_lost(&self, is_read: bool) -> HostClientError {
        let mut failed = 0;
        loop {
            sleep(LOOK).await;
            let mut question = Request::new(Body::empty());
            *question.uri_mut() = Uri::from_static(SELF);
            // Any answer shows that it goes on.
            match self.fleet.client.whole(&self.host, question, REACH).await {
                Ok(_) => failed = 0,
                Err(HostClientError::Unreachable { host, address, why, .. }) if failed == 1 => {
                    return HostClientError::Unreachable { host, address, why, is_sent: !is_read };
                }
                Err(error @ HostClientError::Unknown { .. }) => return error,
                Err(_) => failed += 1,
            }
        }
    }
}

/// Parses the path of a request: the host, and the path and query behind `api`.
fn target(uri: &Uri) -> Result<(Name, Uri), HostError> {
    let wrong = || {
        HostError::invalid("the path is /v1/fleet/hosts/HOST/api/v1/... with a path of this API behind 'api'")
    };
    let whole = uri.path_and_query().ok_or_else(wrong)?.as_str();
    let (host, path) = whole
        .strip_prefix("/v1/fleet/hosts/")
        .and_then(|rest| rest.split_once('/'))
        .and_then(|(host, rest)| Some((host, rest.strip_prefix("api")?)))
        .filter(|(_, path)| path.starts_with("/v1/"))
        .ok_or_else(wrong)?;
    let host = host.parse().map_err(|e| HostError::new(ErrorCode::NotFound, format!("{e}")))?;
    Ok((host, path.parse().map_err(|_| wrong())?))
}

async fn pass_on(app: &ApiState, own: OwnRoutes, mut request: Request) -> Result<Response, HostError> {
    let fleet = fleet(app)?;
    let nobody = || HostError::new(ErrorCode::Unauthenticated, "the caller cannot be identified");
    let caller = request.extensions_mut().remove::<Caller>().ok_or_else(nobody)?;
    let peer = request.extensions().get::<Peer>().cloned().ok_or_else(nobody)?;
    let (host, path) = target(request.uri())?;
    let user = caller_value(&caller).ok_or_else(|| {
        let message = format!(
            "{caller} has come through another host, and a request is passed on only once: ask a host for {host} directly"
        );
        HostError::invalid(message)
    })?;
    if host == fleet.host {
        return answer_here(own, request, path).await;
    }
    let Some(member) = fleet.members.get(&host) else {
        let nearest = fleet.members.nearest(host.as_str());
        return Err(host_error(&HostClientError::Unknown { host, nearest }));
    };
    let headers = request.headers().clone();
    let upgrade = is_websocket(&headers).then(|| request.extensions_mut().remove::<OnUpgrade>()).flatten();
    if upgrade.is_some() && !is_same_origin(&headers) {
        let message = "a page of another origin may not open this: open it from the daemon's own console";
        return Err(HostError::new(ErrorCode::Forbidden, message));
    }
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    let request = outgoing(request, path, user, upgrade.is_some());
    let passage = Passage { fleet, host, member, peer, headers, role: caller.role };
    let response = tokio::select! {
        response = passage.fleet.client.send(&passage.host, request, RESPONSE) => response,
        error = passage.until_lost(is_read) => Err(error),
    };
    incoming(response.map_err(|e| host_error(&e))?, upgrade, passage)
}

/// Answers a request to this host itself, without the parts of it that belong to the first route.
async fn answer_here(own: OwnRoutes, request: Request, path: Uri) -> Result<Response, HostError> {
    let (mut from, body) = request.into_parts();
    let (mut parts, ()) = Request::new(()).into_parts();
    (parts.method, parts.uri, parts.version, parts.headers) = (from.method, path, from.version, from.headers);
    if let Some(peer) = from.extensions.remove::<Peer>() {
        parts.extensions.insert(peer);
    }
    if let Some(upgrade) = from.extensions.remove::<OnUpgrade>() {
        parts.extensions.insert(upgrade);
    }
    let answered = TowerToHyperService::new(own.0).call(Request::from_parts(parts, body)).await;
    Ok(answered.unwrap_or_else(|never| match never {}))
}

fn is_websocket(headers: &HeaderMap) -> bool {
    let upgrade = headers.get(header::UPGRADE);
    upgrade.is_some_and(|protocol| protocol.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

/// Removes the headers of a connection.
fn remove_of_connection(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|text| text.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    OF_CONNECTION.iter().chain(&named).for_each(|name| _ = headers.remove(name));
}

fn add_upgrade(headers: &mut HeaderMap) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
}

/// Makes the request to the other host.
fn outgoing(request: Request, path: Uri, user: HeaderValue, is_upgrade: bool) -> Request {
    let (from, body) = request.into_parts();
    let (mut parts, ()) = Request::new(()).into_parts();
    (parts.method, parts.uri, parts.headers) = (from.method, path, from.headers);
    let headers = &mut parts.headers;
    remove_of_connection(headers);
    OF_CALLER.iter().for_each(|name| _ = headers.remove(name));
    headers.insert(CALLER_HEADER, user);
    if is_upgrade {
        add_upgrade(headers);
    }
    // What only reads has no body, and may be sent again.
    let has_body = !matches!(parts.method, Method::GET | Method::HEAD);
    if !has_body {
        headers.remove(header::CONTENT_LENGTH);
    }
    Request::from_parts(parts, if has_body { body } else { Body::empty() })
}

/// Makes the response of this host.
fn incoming(
    mut response: Response<HostBody>,
    upgrade: Option<OnUpgrade>,
    passage: Passage,
) -> Result<Response, HostError> {
    let Passage { host, member, .. } = &passage;
    let at = || format!("{host} ({})", member.address);
    if response.status() == StatusCode::UNAUTHORIZED {
        let message = format!("{} does not take this host for one of the fleet: it may not see etcd", at());
        return Err(HostError::new(ErrorCode::Unavailable, message));
    }
    let is_switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    remove_of_connection(headers);
    OF_HOST.iter().for_each(|name| _ = headers.remove(name));
    if !is_switched {
        return Ok(response
            .map(|body| Body::new(PassedBody::new(body, passage.until_over())))
            .into_response());
    }
    add_upgrade(headers);
    let Some((client, target)) = upgrade.zip(response.extensions_mut().remove::<OnUpgrade>()) else {
        let message = format!("{} has answered with another protocol, which nobody has asked for", at());
        return Err(HostError::new(ErrorCode::Unavailable, message));
    };
    tokio::spawn(tunnel::relay(client, target, passage.peer.clone(), passage.until_over()));
    Ok(response.map(|_| Body::empty()))
}

#[cfg(test)]
pub(super) mod tests;
