//! Routes of claims of a fleet: those of users, and those by which its hosts ask each other.
//!
//! Invariant: a claim whose client cannot be told of it is released, unless the client has given the request its id.

use super::extract::{Body, IdempotencyKey, Path, Query};
use super::{ApiState, ProblemResponse};
use crate::access::Undo;
use crate::access::caller::Caller;
use crate::access::delay::delayed;
use crate::access::note::RequestNote;
use crate::error::HostError;
use crate::fleet::claims::{FleetClaims, FleetUser, UserRequest};
use crate::machines::FleetRequestTerms;
use crate::machines::closed_attempts::from_unix_ms;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use spillway_api::{ErrorCode, FleetClaim, HostClaimDecision, Name, NewClaim, bounds};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type JsonResult<T> = Result<Json<T>, HostError>;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(claim_machine_of_fleet))
        .routes(routes!(claim_for_fleet))
        .routes(routes!(close_claims_of_fleet))
}

/// Returns the claims of the fleet of this host.
fn claims(app: &ApiState) -> Result<&FleetClaims, HostError> {
    let none =
        || HostError::new(ErrorCode::Conflict, "this host is in no fleet: start spillwayd with --fleet");
    app.fleet_claims.as_ref().ok_or_else(none)
}

/// Query parameters of a claim.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FleetClaimQuery {
    /// Whether nobody has sent a request with this `Idempotency-Key` before. Without it, all hosts are asked whether they have its claim before
    /// a machine is claimed. A request without a key is always a first one.
    #[serde(default)]
    first: bool,
    /// How many seconds the answer is held back until the machine is ready. Without it, or with 0, the answer comes when the machine is
    /// claimed.
    #[serde(default)]
    wait: u32,
}

/// Claims a machine of a catalog of the fleet, on one of its hosts: a ready one if there is one. `exhausted`: no host has one.
/// `unavailable`: it is not known whether one is claimed; `detail` has the id of the request, with which it can be repeated. `conflict`: the
/// claim has ended. Without an `Idempotency-Key` the daemon releases a machine of which it cannot tell the client.
#[utoipa::path(post, path = "/catalogs/{name}/claims", params(("name" = Name, Path), IdempotencyKey, FleetClaimQuery), request_body = NewClaim, responses((status = 200, body = FleetClaim), ProblemResponse))]
async fn claim_machine_of_fleet(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    note: RequestNote,
    Path(catalog): Path<Name>,
    key: IdempotencyKey,
    Query(FleetClaimQuery { first, wait }): Query<FleetClaimQuery>,
    Body(claim): Body<NewClaim>,
) -> Result<Response, HostError> {
    bounds::WAIT_SECONDS.check("wait", wait.into()).map_err(|e| HostError::invalid(e.to_string()))?;
    let claims = claims(&app)?.clone();
    let first = first || key.text().is_none();
    let id = key.text().map_or_else(|| uuid::Uuid::new_v4().to_string(), str::to_owned);
    let user = FleetUser::of(&caller);
    let is_kept = key.text().is_some();
    let claimed =
        claims.claim(UserRequest { user: user.clone(), id, is_kept, catalog, claim }, first).await?;
    note.machines([claimed.machine.machine.name.as_str()]);
    if claimed.is_repeated {
        note.repeated();
    }
    let undo = (!is_kept).then(|| UnansweredFleetClaim {
        claims: claims.clone(),
        user: user.clone(),
        claim: claimed.clone(),
        is_answered: AtomicBool::new(false),
    });
    let mut response = match wait == 0 || claimed.machine.status.settled {
        true => Json(claimed).into_response(),
        false => {
            let at_most = Duration::from_secs(wait.into());
            let later = claimed.clone();
            delayed(Json(claimed), async move { Ok(Json(claims.wait(&user, later, at_most).await?)) })
        }
    };
    if let Some(undo) = undo {
        response.extensions_mut().insert::<Arc<dyn Undo>>(Arc::new(undo));
    }
    Ok(response)
}

/// A claim that is released when this is dropped, unless it was answered.
struct UnansweredFleetClaim {
    claims: FleetClaims,
    user: FleetUser,
    claim: FleetClaim,
    is_answered: AtomicBool,
}

impl Undo for UnansweredFleetClaim {
    fn keep(&self) {
        self.is_answered.store(true, Ordering::Relaxed);
    }
}

impl Drop for UnansweredFleetClaim {
    fn drop(&mut self) {
        let (false, Ok(runtime)) =
            (self.is_answered.load(Ordering::Relaxed), tokio::runtime::Handle::try_current())
        else {
            return;
        };
        let (claims, user, claim) = (self.claims.clone(), self.user.clone(), self.claim.clone());
        runtime.spawn(async move { claims.undo(&user, &claim).await });
    }
}

/// Query parameters of an attempt to claim a machine of this host.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct HostClaimQuery {
    /// Number of the attempt: a host that has closed it makes no claim for it.
    #[serde(default)]
    #[param(minimum = 0, maximum = 9223372036854775807_u64)]
    attempt: u64,
    /// Whether only a machine that is ready is taken, whatever the body says.
    #[serde(default)]
    ready_only: bool,
    /// Epoch of this host, by the records that the host that asks knows: in another one, this host makes no claim.
    #[param(minimum = 0, maximum = 9223372036854775807_u64)]
    epoch: i64,
    /// When the request came to the host that asks, by its clock: milliseconds since 1970. One that is too old may have been closed long ago.
    #[param(minimum = 0, maximum = 9223372036854775807_u64)]
    sent_unix_ms: u64,
}

/// Query parameters that close attempts.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct CloseQuery {
    /// Attempts with lower numbers can make no claim any more.
    #[param(minimum = 0, maximum = 9223372036854775807_u64)]
    attempt: u64,
}

/// Returns the request that a host has made for one of its users.
fn request(
    caller: &Caller,
    key: &IdempotencyKey,
    catalog: Name,
    claim: NewClaim,
) -> Result<UserRequest, HostError> {
    let missing = || HostError::invalid("Idempotency-Key: give the id of the request");
    let id = key.text().ok_or_else(missing)?.to_owned();
    Ok(UserRequest { user: FleetUser::of(caller), id, is_kept: true, catalog, claim })
}

/// Asks this host for a machine of its own, for a request of its fleet. Other hosts of the fleet send this; users claim machines with
/// `/v1/fleet/catalogs/{name}/claims`.
#[utoipa::path(post, path = "/self/catalogs/{name}/claims", params(("name" = Name, Path), IdempotencyKey, HostClaimQuery), request_body = NewClaim, responses((status = 200, body = HostClaimDecision), ProblemResponse))]
async fn claim_for_fleet(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    note: RequestNote,
    Path(catalog): Path<Name>,
    key: IdempotencyKey,
    Query(HostClaimQuery { attempt, ready_only, epoch, sent_unix_ms }): Query<HostClaimQuery>,
    Body(claim): Body<NewClaim>,
) -> JsonResult<HostClaimDecision> {
    let request = request(&caller, &key, catalog, claim)?;
    let sent = from_unix_ms(sent_unix_ms);
    let terms = FleetRequestTerms { attempt, sent, epoch, ready_only, who: caller.to_string() };
    let decision = claims(&app)?.decide(&request, terms).await?;
    if let HostClaimDecision::Claimed(claim) = &decision {
        note.machines([claim.machine.machine.name.as_str()]);
        if claim.is_repeated {
            note.repeated();
        }
    }
    Ok(Json(decision))
}

/// Returns the claim that this host has made for a request of its fleet. If it has made none, earlier attempts can make none any more.
/// Other hosts of the fleet send this.
#[utoipa::path(post, path = "/self/catalogs/{name}/closed-claims", params(("name" = Name, Path), IdempotencyKey, CloseQuery), request_body = NewClaim, responses((status = 200, body = HostClaimDecision), ProblemResponse))]
async fn close_claims_of_fleet(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Path(catalog): Path<Name>,
    key: IdempotencyKey,
    Query(CloseQuery { attempt }): Query<CloseQuery>,
    Body(claim): Body<NewClaim>,
) -> JsonResult<HostClaimDecision> {
    let request = request(&caller, &key, catalog, claim)?;
    Ok(Json(claims(&app)?.close(&request, attempt).await?))
}

#[cfg(test)]
mod tests;
