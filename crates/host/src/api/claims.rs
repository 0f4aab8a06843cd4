//! Routes of claims, by which a client gets a machine for a while.
//!
//! Invariant: a claim whose client cannot be told of it is released, unless the request has an idempotency key.

use super::conditions::IfMatch;
use super::extract::{Body, IdempotencyKey, Path, Query, Wait};
use super::{ApiState, ProblemResponse, ask, ask_for};
use crate::access::Undo;
use crate::access::caller::Caller;
use crate::access::delay::delayed;
use crate::access::note::RequestNote;
use crate::error::HostError;
use crate::machines::{ClaimSelector, Claimant, Machines, UNANSWERED, claim_ended};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use spillway_api::{ClaimRenewal, ErrorCode, MachineDetails, Name, NewClaim};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type JsonResult<T> = Result<Json<T>, HostError>;

pub fn catalog_routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(claim_machine))
}

pub fn machine_routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(renew_claim, release_machine))
}

/// Claims a machine of a catalog, a ready one if there is one. `exhausted`: there is none. If the connection is closed
/// before the response the claim is released, unless the request has an `Idempotency-Key`. `conflict`: the claim has ended while the
/// machine was waited for.
#[utoipa::path(post, path = "/{name}/claims", params(("name" = Name, Path), IdempotencyKey, Wait), request_body = NewClaim, responses((status = 200, body = MachineDetails), ProblemResponse))]
async fn claim_machine(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    note: RequestNote,
    Path(catalog): Path<Name>,
    key: IdempotencyKey,
    Query(wait): Query<Wait>,
    Body(claim): Body<NewClaim>,
) -> Result<Response, HostError> {
    let held = wait.at_most()?;
    let request = key.of(&caller.name, &format!("claims/{catalog}"), &claim);
    let by = Claimant { who: caller.to_string(), owner: caller.name.to_string(), request, permit: None };
    let (machines, reader) = (app.machines.clone(), app.machines.reader.clone());
    let (machine, given_up) = ask_for(move || {
        let (machine, is_repeated) = machines.claims.claim(&catalog, &claim, &by)?;
        note.machines([machine.machine.name.as_str()]);
        if is_repeated {
            note.repeated();
        }
        app.idempotency.note(&by.request);
        let stays = is_repeated || by.request.has_key();
        let given_up = if stays { None } else { UnansweredClaim::of(&machines, &machine) };
        Ok((machine, given_up))
    })
    .await?;
    let mut response = match held.is_zero() || machine.status.settled {
        true => Json(machine).into_response(),
        false => {
            let (name, claim) =
                (machine.machine.name.clone(), machine.claim.as_ref().map(|claim| claim.id.clone()));
            delayed(Json(machine), async move {
                match reader.wait(&name, held).await {
                    Ok((_, waited)) if waited.claim.as_ref().map(|claim| &claim.id) == claim.as_ref() => {
                        Ok(Json(waited))
                    }
                    Err(e) if e.code != ErrorCode::NotFound => Err(e),
                    _ => Err(claim_ended(name.as_str())),
                }
            })
        }
    };
    if let Some(given_up) = given_up {
        response.extensions_mut().insert::<Arc<dyn Undo>>(Arc::new(given_up));
    }
    Ok(response)
}

/// A claim that is released when this is dropped, unless it was answered.
struct UnansweredClaim {
    machines: Machines,
    machine: Name,
    claim: String,
    is_answered: AtomicBool,
}

impl UnansweredClaim {
    fn of(machines: &Machines, machine: &MachineDetails) -> Option<UnansweredClaim> {
        let claim = machine.claim.as_ref()?.id.clone();
        let (machines, machine) = (machines.clone(), machine.machine.name.clone());
        Some(UnansweredClaim { machines, machine, claim, is_answered: AtomicBool::new(false) })
    }
}

impl Undo for UnansweredClaim {
    fn keep(&self) {
        self.is_answered.store(true, Ordering::Relaxed);
    }
}

impl Drop for UnansweredClaim {
    fn drop(&mut self) {
        let (false, Ok(runtime)) =
            (self.is_answered.load(Ordering::Relaxed), tokio::runtime::Handle::try_current())
        else {
            return;
        };
        let (machines, machine, claim) = (self.machines.clone(), self.machine.clone(), self.claim.clone());
        runtime.spawn_blocking(move || {
            let which = ClaimSelector { id: Some(&claim), expected: None };
            // An error means that the claim has ended already.
            let _ = machines.claims.release(&machine, which, UNANSWERED.to_owned());
        });
    }
}

/// Query parameters that select a claim.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ClaimQuery {
    /// Id of the claim; the current one if it is left out.
    claim: Option<String>,
}

/// Renews a claim from now on. With the id of a claim only if the machine still has that claim, else this is a
/// `conflict`.
#[utoipa::path(put, path = "/{name}/claim", params(("name" = Name, Path), IfMatch, ClaimQuery), request_body = ClaimRenewal, responses((status = 200, body = MachineDetails), ProblemResponse))]
async fn renew_claim(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    Query(which): Query<ClaimQuery>,
    Body(renewal): Body<ClaimRenewal>,
) -> JsonResult<MachineDetails> {
    ask(move || {
        let which = ClaimSelector { id: which.claim.as_deref(), expected };
        app.machines.claims.renew(&name, which, renewal.ttl_seconds)
    })
    .await
}

/// Releases a machine, which is reset. With the id of a claim only if the machine still has that claim, else this is a
/// `conflict`.
#[utoipa::path(delete, path = "/{name}/claim", params(("name" = Name, Path), IfMatch, ClaimQuery), responses((status = 200, body = MachineDetails), ProblemResponse))]
async fn release_machine(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    Query(which): Query<ClaimQuery>,
) -> JsonResult<MachineDetails> {
    let text = format!("it is released by {caller}");
    ask(move || {
        let which = ClaimSelector { id: which.claim.as_deref(), expected };
        app.machines.claims.release(&name, which, text)
    })
    .await
}
