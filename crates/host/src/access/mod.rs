//! Who may ask what. Owns roles, and what each route needs; tokens are in `tokens`, the audit log in `audit`.
//!
//! Invariant: a request whose role is not known to be enough reaches no route; each change that somebody known asks for
//! is a line in the audit log, whatever came of it.

pub mod audit;
pub mod tls;
pub mod tokens;

use crate::error::HostError;
use audit::Audit;
use axum::extract::{Request, State};
use axum::http::{Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use spillway_api::ErrorCode;
use std::net::SocketAddr;
use std::sync::Arc;
use tokens::Tokens;

/// What somebody may ask; each may what those before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// To see.
    Read,
    /// To start, stop, reset, claim and release machines.
    Operate,
    /// Everything.
    Admin,
}

impl Role {
    /// For people and files.
    fn word(self) -> &'static str {
        match self {
            Role::Read => "read",
            Role::Operate => "operate",
            Role::Admin => "admin",
        }
    }

    /// Of its word.
    pub fn of(word: &str) -> Option<Role> {
        [Role::Read, Role::Operate, Role::Admin].into_iter().find(|role| role.word() == word)
    }
}

/// Where a connection comes from.
#[derive(Clone)]
pub enum Peer {
    /// The unix socket: who can open it may do everything. The user, by the kernel's word.
    Local(Option<u32>),
    /// TCP: each request has a token.
    Remote(Arc<Tokens>, SocketAddr),
}

/// Lets a request through if its role is enough, and writes changes down: also those of clients that do not wait for the
/// answer.
pub async fn guard(State(audit): State<Audit>, mut request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let (who, role) = match known(&request) {
        Ok(known) => known,
        // Not in the audit log: whoever reaches the port could push out of it what is there.
        Err(refusal) => return refusal.into_response(),
    };
    let needed = needed(&method, &path);
    request.extensions_mut().insert(role);
    if needed == Role::Read {
        return next.run(request).await;
    }
    let answer = async move {
        let response = if role >= needed {
            next.run(request).await
        } else {
            let role = needed.word();
            let message = format!("{who} may not do this: it takes a token with the role '{role}'");
            HostError::new(ErrorCode::Forbidden, message).into_response()
        };
        audit.write(&who, &method, &path, response.status().as_u16());
        response
    };
    let lost = |_| HostError::new(ErrorCode::Internal, "the answer was lost").into_response();
    tokio::spawn(answer).await.unwrap_or_else(lost)
}

/// Who asks, for the log, and what they may.
fn known(request: &Request) -> Result<(String, Role), HostError> {
    match request.extensions().get::<Peer>() {
        Some(Peer::Local(Some(uid))) => Ok((format!("uid {uid}"), Role::Admin)),
        Some(Peer::Local(None)) => Ok(("uid unknown".into(), Role::Admin)),
        Some(Peer::Remote(tokens, address)) => {
            let token = request.headers().get(header::AUTHORIZATION);
            let token = token.and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
            let known = token.and_then(|token| tokens.find(token));
            let (name, role) = known.ok_or_else(|| {
                HostError::new(ErrorCode::Unauthenticated, "say who asks: Authorization: Bearer TOKEN")
            })?;
            Ok((format!("{name} from {}", address.ip()), role))
        }
        None => Err(HostError::new(ErrorCode::Unauthenticated, "nobody knows who asks")),
    }
}

/// What a request takes. What is not named here takes most.
fn needed(method: &Method, path: &str) -> Role {
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    match (method, parts.as_slice()) {
        (&Method::GET | &Method::HEAD, _) => Role::Read,
        (&Method::POST, ["v1", "machine-actions"] | ["v1", "catalogs", _, "claims"]) => Role::Operate,
        (&Method::DELETE, ["v1", "machines", _, "claim"]) => Role::Operate,
        _ => Role::Admin,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_by_route() {
        for (method, path, role) in [
            (Method::GET, "/v1/images", Role::Read),
            (Method::GET, "/anything", Role::Read),
            (Method::POST, "/v1/machine-actions", Role::Operate),
            (Method::POST, "/v1/catalogs/desk/claims", Role::Operate),
            (Method::DELETE, "/v1/machines/desk-1/claim", Role::Operate),
            (Method::DELETE, "/v1/machines/desk-1", Role::Admin),
            (Method::POST, "/v1/images/debian/commits", Role::Admin),
            (Method::POST, "/v1/catalogs", Role::Admin),
            (Method::DELETE, "/v1/catalogs/claims", Role::Admin),
            (Method::PUT, "/v1/machine-actions", Role::Admin),
            (Method::POST, "/v1/machine-actions/x", Role::Admin),
            (Method::OPTIONS, "/v1/images", Role::Admin),
        ] {
            assert_eq!(needed(&method, path), role, "{method} {path}");
        }
        assert!(Role::Read < Role::Operate && Role::Operate < Role::Admin);
        assert_eq!(Role::of("root"), None);
    }
}
