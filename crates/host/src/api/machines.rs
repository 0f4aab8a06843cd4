//! Routes of machines.

use super::conditions::{IfMatch, Tagged};
use super::extract::{Body, IdempotencyKey, PageQuery, Path, Query, Wait, part, select};
use super::{ApiState, ProblemResponse, ask, ask_for};
use crate::access::caller::{Caller, Role};
use crate::access::delay::delayed;
use crate::access::note::RequestNote;
use crate::catalogs::ChangedBy;
use crate::error::HostError;
use crate::machines::MachineDeleteTerms;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use spillway_api::{
    Action, DirtyRanges, DiskCurve, DiskLatency, Empty, ErrorCode, MachineAction, MachineDetails,
    MachineSize, Name, Page, bounds,
};
use spillway_control::Dirty;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type JsonResult<T> = Result<Json<T>, HostError>;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(list_machines))
        .routes(routes!(get_machine, delete_machine))
        .routes(routes!(replace_machine_size))
        .routes(routes!(get_machine_curve))
        .routes(routes!(get_machine_latency))
        .routes(routes!(list_dirty_ranges))
}

pub fn action_routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(run_machine_action))
}

/// Query parameters that select machines.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "for the document")]
struct MachineQuery {
    /// Lists only machines of this catalog.
    catalog: Option<Name>,
    /// Lists only machines whose catalog has this label, `KEY=VALUE`; if given several times, with all of them.
    #[param(required = false)]
    label: Vec<String>,
    /// Lists only machines that this owner has claimed.
    owner: Option<String>,
}

/// Lists all machines, or those of certain catalogs or owners.
#[utoipa::path(get, path = "", params(MachineQuery, PageQuery), responses((status = 200, body = Page<MachineDetails>), ProblemResponse))]
async fn list_machines(
    State(app): State<ApiState>,
    Query(mut pairs): Query<Vec<(String, String)>>,
) -> JsonResult<Page<MachineDetails>> {
    let part = part(&mut pairs)?;
    let owners = pairs.extract_if(.., |(word, _)| word == "owner");
    let owners: Vec<String> = owners.map(|(_, owner)| owner).collect();
    let selector = select(pairs, &["catalog", "label", "owner"])?;
    ask(move || app.machines.reader.page(&selector, &owners, &part)).await
}

/// Returns a machine. With `wait` the response comes when the machine has reached its desired state.
#[utoipa::path(get, path = "/{name}", params(("name" = Name, Path), Wait), responses((status = 200, body = MachineDetails, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn get_machine(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    Query(wait): Query<Wait>,
) -> Result<Tagged<MachineDetails>, HostError> {
    let at_most = wait.at_most()?;
    let (tag, machine) = app.machines.reader.wait(&name, at_most).await?;
    Ok(Tagged(tag, machine))
}

/// Goal of the recommended RAM tier.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct CurveQuery {
    /// Share of the written bytes that the RAM tier should absorb, from 0 to 1; 0.95 by default.
    goal: Option<f64>,
}

/// Returns what every size of a machine's RAM tier would have done since its disk's worker started. `conflict`: its disk
/// is not served.
#[utoipa::path(get, path = "/{name}/curve", params(("name" = Name, Path), CurveQuery), responses((status = 200, body = DiskCurve), ProblemResponse))]
async fn get_machine_curve(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    Query(CurveQuery { goal }): Query<CurveQuery>,
) -> Result<Response, HostError> {
    let curve = app.machines.curves.of(&name, goal).await?;
    Ok(Json(&*curve).into_response())
}

/// Returns how long the requests of a machine's disk took, as histograms whose counts only grow. The difference of two answers
/// has the percentiles of the time between. `conflict`: its disk is not served.
#[utoipa::path(get, path = "/{name}/latency", params(("name" = Name, Path)), responses((status = 200, body = DiskLatency), ProblemResponse))]
async fn get_machine_latency(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
) -> Result<Response, HostError> {
    let latency = app.machines.disks.latency(&name).await?;
    Ok(Json(&*latency).into_response())
}

/// Largest number of ranges.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RangeQuery {
    /// Largest number of ranges in the answer; 20 by default.
    #[serde(default = "some_ranges")]
    limit: u32,
}

fn some_ranges() -> u32 {
    Dirty::ROWS_DEFAULT
}

/// Lists the ranges of a machine's disk that its guest has written most since the last reset, in descending order.
/// `conflict`: its disk is not served.
#[utoipa::path(get, path = "/{name}/dirty-ranges", params(("name" = Name, Path), RangeQuery), responses((status = 200, body = DirtyRanges), ProblemResponse))]
async fn list_dirty_ranges(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    Query(RangeQuery { limit }): Query<RangeQuery>,
) -> Result<Json<DirtyRanges>, HostError> {
    bounds::LIMIT.check("limit", limit.into()).map_err(|e| HostError::invalid(e.to_string()))?;
    Ok(Json(app.machines.disks.dirty_ranges(&name, limit).await?))
}

/// Gives the disk of an external machine that is off another size, which is at least as large as before.
#[utoipa::path(put, path = "/{name}/size", params(("name" = Name, Path)), request_body = MachineSize, responses((status = 200, body = MachineDetails), ProblemResponse))]
async fn replace_machine_size(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    Body(size): Body<MachineSize>,
) -> JsonResult<MachineDetails> {
    ask(move || app.machines.actions.resize(&name, size.size_bytes)).await
}

/// Conditions of the deletion.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DeleteTerms {
    /// With `true` the machine's data disk and kept disk are deleted too; else their files stay in their store.
    #[serde(default)]
    with_data: bool,
    /// With `true` the request is checked in full and nothing is deleted.
    #[serde(default)]
    dry_run: bool,
}

/// Deletes a machine that is off and not claimed. Its catalog's count goes down by one.
#[utoipa::path(delete, path = "/{name}", params(("name" = Name, Path), IfMatch, DeleteTerms), responses((status = 200, body = Empty), ProblemResponse))]
async fn delete_machine(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    Query(DeleteTerms { with_data, dry_run }): Query<DeleteTerms>,
) -> JsonResult<Empty> {
    let terms = MachineDeleteTerms { expected, with_data, dry_run, by: ChangedBy::People };
    ask(move || app.machines.actions.delete(&name, terms).map(|()| Empty {})).await
}

/// Verb of an action.
fn word(action: &Action) -> &'static str {
    match action {
        Action::Start => "start",
        Action::Stop => "stop",
        Action::Restart => "restart",
        Action::Reset => "reset",
        Action::Drain => "drain",
        Action::Undrain => "undrain",
    }
}

/// Records the desired state of machines, which reach it after the response, or while that is delayed by `wait`. Responds
/// with the first 1,000 of these machines as they are; `next` continues with `GET /v1/machines` of the same catalog and
/// labels. To discard data that machines keep requires the role `admin`.
#[utoipa::path(post, path = "", params(IdempotencyKey, Wait), request_body = MachineAction, responses((status = 200, body = Page<MachineDetails>), ProblemResponse))]
async fn run_machine_action(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    note: RequestNote,
    key: IdempotencyKey,
    Query(wait): Query<Wait>,
    Body(action): Body<MachineAction>,
) -> Result<Response, HostError> {
    let until = tokio::time::Instant::now() + wait.at_most()?;
    note.verb(word(&action.action));
    if action.discard_data && caller.role < Role::Admin {
        let message = "this discards data that machines keep: use a token with the role 'admin'";
        return Err(HostError::new(ErrorCode::Forbidden, message));
    }
    let key = key.of(&caller.name, "machine-actions", &action);
    let reader = app.machines.reader.clone();
    let mut page = ask_for(move || {
        let note_one = |name: &Name| note.recorded(name.as_str());
        let (page, is_repeated) = app.machines.actions.act(&action, &key, note_one)?;
        app.idempotency.note(&key);
        if is_repeated {
            note.repeated();
        }
        Ok(page)
    })
    .await?;
    let is_decided = |page: &Page<MachineDetails>| page.items.iter().all(|machine| machine.status.settled);
    if is_decided(&page) || until <= tokio::time::Instant::now() {
        return Ok(Json(page).into_response());
    }
    Ok(delayed(StatusCode::OK, async move {
        for machine in page.items.iter_mut().filter(|machine| !machine.status.settled) {
            // Wait for one after the other, with one deadline. A machine that is deleted meanwhile is returned as it was.
            let left = until.saturating_duration_since(tokio::time::Instant::now());
            if left.is_zero() {
                break;
            }
            match reader.wait(&machine.machine.name, left).await {
                Err(gone) if gone.code == ErrorCode::NotFound => {}
                waited => *machine = waited?.1,
            }
        }
        Ok(Json(page))
    }))
}
