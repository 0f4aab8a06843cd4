//! Questions to one host about a claim. Owns what an answer, or its absence, says about whether the request was carried out.
//!
//! Invariant: a request counts as not sent only if the host can have got nothing of it, or has said that it carries it out in no case.

use super::{FleetClaims, UserRequest};
use crate::error::HostError;
use crate::fleet::door::{CALLER_HEADER, HostClientError};
use crate::machines::FleetRequestTerms;
use crate::machines::closed_attempts::unix_ms;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use spillway_api::client::IDEMPOTENCY_KEY;
use spillway_api::{ErrorCode, HostClaimDecision, Name, Problem};
use spillway_fleet::transaction::Revision;
use std::time::{Duration, SystemTime};

/// Longest time until a host has decided. The question is repeated after it.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });

/// A question to a host.
#[derive(Clone, Copy, Debug)]
pub(super) enum Question {
    /// Whether it has a machine.
    Claim {
        /// Number of the attempt of this request.
        attempt: u64,
        /// Whether the machine must be ready.
        ready_only: bool,
        /// When the request came, by the clock of this host.
        sent: SystemTime,
        /// Epoch of the host that is asked, by the records that this one knows.
        epoch: Revision,
    },
    /// Whether it has the claim already; attempts before this one are closed.
    Close {
        /// Number of the attempt of this request.
        attempt: u64,
    },
}

/// What has become of a question.
#[derive(Debug)]
pub(super) enum Asked {
    /// The host has decided.
    Decided(HostClaimDecision),
    /// The host has got nothing, for this reason.
    NotSent(String),
    /// Nobody knows whether the host has carried it out.
    Lost(String),
    /// The request is wrong in itself: no host will carry it out.
    Wrong(HostError),
}

impl FleetClaims {
    /// Asks a host, which may be this one.
    pub(super) async fn ask(&self, host: &Name, of: &UserRequest, question: Question) -> Asked {
        if *host == self.0.door.host {
            let decided = match question {
                Question::Claim { attempt, ready_only, sent, epoch } => {
                    let who = of.user.who.clone();
                    self.decide(of, FleetRequestTerms { attempt, sent, epoch, ready_only, who }).await
                }
                Question::Close { attempt } => self.close(of, attempt).await,
            };
            return match decided {
                Ok(decision) => Asked::Decided(decision),
                Err(e) if is_wrong(e.code) => Asked::Wrong(e),
                Err(e) => Asked::Lost(e.message),
            };
        }
        let request = match self.question(of, question) {
            Ok(request) => request,
            Err(e) => return Asked::Wrong(e),
        };
        match self.0.door.client.whole(host, request, PATIENCE).await {
            Ok((status, body)) => answer(host, status, &body),
            Err(error @ HostClientError::Unreachable { is_sent: true, .. }) => Asked::Lost(error.to_string()),
            Err(error) => Asked::NotSent(error.to_string()),
        }
    }

    fn question(&self, of: &UserRequest, question: Question) -> Result<Request<Body>, HostError> {
        let catalog = &of.catalog;
        let path = match question {
            Question::Claim { attempt, ready_only, sent, epoch } => {
                let sent = unix_ms(sent);
                format!(
                    "/v1/fleet/self/catalogs/{catalog}/claims?attempt={attempt}&ready_only={ready_only}&epoch={epoch}&sent_unix_ms={sent}"
                )
            }
            Question::Close { attempt } => {
                format!("/v1/fleet/self/catalogs/{catalog}/closed-claims?attempt={attempt}")
            }
        };
        let user = of.user.header.clone();
        let user = user.ok_or_else(|| HostError::invalid("the user has come through another host"))?;
        let body = serde_json::to_vec(&of.claim).expect("a claim is plain data");
        let request = Request::post(path)
            .header(CALLER_HEADER, user)
            .header(IDEMPOTENCY_KEY, &of.id)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body));
        request.map_err(|e| HostError::invalid(e.to_string()))
    }
}

fn answer(host: &Name, status: StatusCode, body: &[u8]) -> Asked {
    if status.is_success() {
        return match serde_json::from_slice(body) {
            Ok(decision) => Asked::Decided(decision),
            Err(e) => Asked::Lost(format!("{host}: its answer is not understood: {e}")),
        };
    }
    let problem: Option<Problem> = serde_json::from_slice(body).ok();
    let why = problem.as_ref().map_or_else(|| status.to_string(), |problem| problem.detail.clone());
    let why = format!("{host}: {why}");
    match problem {
        Some(problem) if is_wrong(problem.code) => Asked::Wrong(HostError::new(problem.code, why)),
        // It takes this host for none of the fleet, has too many requests, or does not know the question.
        _ if [401, 404, 405, 429].contains(&status.as_u16()) => Asked::NotSent(why),
        _ => Asked::Lost(why),
    }
}

/// Whether a request that is answered so is refused everywhere.
fn is_wrong(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::Invalid
            | ErrorCode::Forbidden
            | ErrorCode::KeyReused
            | ErrorCode::TooLarge
            | ErrorCode::UnsupportedMediaType
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_says_whether_the_request_may_have_been_carried_out() {
        let host: Name = "b".parse().unwrap();
        let problem = |code| serde_json::to_vec(&Problem::new(code, "why")).unwrap();
        let of = |code: ErrorCode| {
            let status = Problem::new(code, "").status;
            answer(&host, StatusCode::from_u16(status).unwrap(), &problem(code))
        };
        for code in [ErrorCode::Unauthenticated, ErrorCode::NotFound, ErrorCode::Busy] {
            assert!(matches!(of(code), Asked::NotSent(_)), "{code:?}");
        }
        for code in [ErrorCode::Internal, ErrorCode::Damaged, ErrorCode::Unavailable, ErrorCode::Timeout] {
            assert!(matches!(of(code), Asked::Lost(_)), "{code:?}");
        }
        for code in [ErrorCode::Invalid, ErrorCode::Forbidden, ErrorCode::KeyReused] {
            assert!(matches!(of(code), Asked::Wrong(_)), "{code:?}");
        }
        assert!(matches!(answer(&host, StatusCode::OK, b"{"), Asked::Lost(_)));
        let closed = answer(&host, StatusCode::OK, br#"{"result": "closed"}"#);
        assert!(matches!(closed, Asked::Decided(HostClaimDecision::Closed)));
    }
}
