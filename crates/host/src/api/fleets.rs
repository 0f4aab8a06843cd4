//! Routes of the fleet: what it is, its hosts and its catalogs. Any host answers for all.
//!
//! Invariant: a change is answered when the host that was asked sees it itself.

use super::conditions::{IfMatch, Tagged};
use super::extract::{Body, DryRun, Path, Query};
use super::{ApiState, ProblemResponse};
use crate::access::caller::{Caller, Role};
use crate::access::note::RequestNote;
use crate::catalogs::{check_not_redacted, check_spec};
use crate::error::HostError;
use crate::fleet::FleetService;
use crate::store::Revision;
use crate::tags::Tag;
use axum::extract::State;
use axum::{Extension, Json};
use jiff::Timestamp;
use spillway_api::{
    CatalogSpec, Empty, ErrorCode, FleetCatalog, FleetCatalogRollback, FleetCatalogSpec, FleetCatalogUpdate,
    FleetDetails, FleetHost, FleetHostAction, FleetHostChange, JoinToken, List, Name, NewFleet,
    NewFleetCatalog, PlacerChange, PlacerReport, RolloutAction, RolloutChange,
};
use spillway_fleet::changes;
use spillway_fleet::rollout::change_rollout;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type JsonResult<T> = Result<Json<T>, HostError>;
type TaggedCatalog = Result<Tagged<FleetCatalog>, HostError>;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(get_fleet, create_fleet))
        .routes(routes!(get_placer_report, change_fleet_placer))
        .routes(routes!(create_join_token))
        .routes(routes!(list_fleet_hosts))
        .routes(routes!(get_fleet_host, change_fleet_host, delete_fleet_host))
        .routes(routes!(list_fleet_catalogs, create_fleet_catalog))
        .routes(routes!(get_fleet_catalog, replace_fleet_catalog, delete_fleet_catalog))
        .routes(routes!(update_fleet_catalog))
        .routes(routes!(roll_back_fleet_catalog))
        .routes(routes!(change_fleet_rollout))
}

/// Returns what the host does for its fleet.
pub(super) fn service(app: &ApiState) -> Result<&FleetService, HostError> {
    let none =
        || HostError::new(ErrorCode::Conflict, "this host is in no fleet: start spillwayd with --fleet");
    app.fleet_service.as_ref().ok_or_else(none)
}

/// Returns the fleet as this host sees it.
#[utoipa::path(get, path = "", responses((status = 200, body = FleetDetails), ProblemResponse))]
async fn get_fleet(State(app): State<ApiState>) -> JsonResult<FleetDetails> {
    Ok(Json(service(&app)?.describe().await))
}

/// Makes the fleet that the daemon was started for. Hosts that wait for it join. `exists`: there is one already.
#[utoipa::path(post, path = "", request_body = NewFleet, responses((status = 200, body = FleetDetails), ProblemResponse))]
async fn create_fleet(State(app): State<ApiState>, Body(_): Body<NewFleet>) -> JsonResult<FleetDetails> {
    let fleet = service(&app)?;
    let fleet_id = uuid::Uuid::new_v4().to_string();
    fleet.init(&fleet_id).await?;
    Ok(Json(fleet.describe().await))
}

/// Returns what this host knows as the one that places; nothing if it is not.
#[utoipa::path(get, path = "/placer", responses((status = 200, body = PlacerReport), ProblemResponse))]
async fn get_placer_report(State(app): State<ApiState>) -> JsonResult<PlacerReport> {
    Ok(Json(service(&app)?.own_placer_report()))
}

/// Switches the placer on or off. While it is off, another program writes the shares.
#[utoipa::path(put, path = "/placer", request_body = PlacerChange, responses((status = 200, body = FleetDetails), ProblemResponse))]
async fn change_fleet_placer(
    State(app): State<ApiState>,
    Body(PlacerChange { enabled }): Body<PlacerChange>,
) -> JsonResult<FleetDetails> {
    let fleet = service(&app)?;
    fleet.change(|view| changes::set_placer(view, enabled).map(Some)).await?;
    Ok(Json(fleet.describe().await))
}

/// Makes a token by which another host can join: the address of etcd, with the files and the password that this host uses for it. It is a
/// secret.
#[utoipa::path(post, path = "/join-tokens", request_body = Empty, responses((status = 200, body = JoinToken), ProblemResponse))]
async fn create_join_token(State(app): State<ApiState>, Body(_): Body<Empty>) -> JsonResult<JoinToken> {
    Ok(Json(JoinToken { token: service(&app)?.join_token().await? }))
}

/// Lists the hosts of the fleet, in the order of their names.
#[utoipa::path(get, path = "/hosts", responses((status = 200, body = List<FleetHost>), ProblemResponse))]
async fn list_fleet_hosts(State(app): State<ApiState>) -> JsonResult<List<FleetHost>> {
    Ok(Json(List { items: service(&app)?.hosts().await }))
}

/// Returns a host of the fleet.
#[utoipa::path(get, path = "/hosts/{host}", params(("host" = Name, Path)), responses((status = 200, body = FleetHost), ProblemResponse))]
async fn get_fleet_host(State(app): State<ApiState>, Path(host): Path<Name>) -> JsonResult<FleetHost> {
    Ok(Json(service(&app)?.host(&host).await?))
}

/// Carries out an action on a host of the fleet. `conflict`: a host that renews its lease cannot be declared dead.
#[utoipa::path(post, path = "/hosts/{host}", params(("host" = Name, Path)), request_body = FleetHostChange, responses((status = 200, body = FleetHost), ProblemResponse))]
async fn change_fleet_host(
    State(app): State<ApiState>,
    Path(host): Path<Name>,
    note: RequestNote,
    Body(FleetHostChange { action }): Body<FleetHostChange>,
) -> JsonResult<FleetHost> {
    note.verb(match action {
        FleetHostAction::Cordon => "cordon",
        FleetHostAction::Uncordon => "uncordon",
        FleetHostAction::Drain => "drain",
        FleetHostAction::DeclareDead => "declare dead",
    });
    let fleet = service(&app)?;
    fleet.change(|view| changes::change_host(view, &host, action).map(Some)).await?;
    Ok(Json(fleet.host(&host).await?))
}

/// Removes a host that is not alive from the fleet, with its shares. What is on it stays as it is. `conflict`: it is alive.
#[utoipa::path(delete, path = "/hosts/{host}", params(("host" = Name, Path)), responses((status = 200, body = Empty), ProblemResponse))]
async fn delete_fleet_host(State(app): State<ApiState>, Path(host): Path<Name>) -> JsonResult<Empty> {
    service(&app)?.change(|view| changes::remove_host(view, &host).map(Some)).await?;
    Ok(Json(Empty {}))
}

/// Removes what is passed on to guests for callers who may only read.
fn seen_by(role: Role, mut catalog: FleetCatalog) -> FleetCatalog {
    if role == Role::Read {
        catalog.spec.catalog.redact();
    }
    catalog
}

fn tagged(catalog: FleetCatalog) -> Tagged<FleetCatalog> {
    Tagged(Revision(catalog.revision.unsigned_abs()).into(), catalog)
}

/// Lists the catalogs of the fleet, in the order of their names.
#[utoipa::path(get, path = "/catalogs", responses((status = 200, body = List<FleetCatalog>), ProblemResponse))]
async fn list_fleet_catalogs(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
) -> JsonResult<List<FleetCatalog>> {
    let catalogs = service(&app)?.catalogs().await.into_iter();
    Ok(Json(List { items: catalogs.map(|catalog| seen_by(caller.role, catalog)).collect() }))
}

/// Returns a catalog of the fleet.
#[utoipa::path(get, path = "/catalogs/{name}", params(("name" = Name, Path)), responses((status = 200, body = FleetCatalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn get_fleet_catalog(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<Name>,
) -> TaggedCatalog {
    Ok(tagged(seen_by(caller.role, service(&app)?.catalog(&name).await?)))
}

/// Creates a catalog of the fleet. The placer distributes its machines over the hosts.
#[utoipa::path(post, path = "/catalogs", params(DryRun), request_body = NewFleetCatalog, responses((status = 200, body = FleetCatalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn create_fleet_catalog(
    State(app): State<ApiState>,
    note: RequestNote,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(new): Body<NewFleetCatalog>,
) -> TaggedCatalog {
    note.name(new.name.as_str());
    check_settings(&new.name, &new.spec)?;
    let fleet = service(&app)?;
    let create = |view: &_| changes::create_catalog(view, &new.name, &new.spec, Timestamp::now()).map(Some);
    fleet.change_catalog(&new.name, dry_run, create).await.map(tagged)
}

/// Refuses settings that no host could have.
fn check_settings(name: &Name, spec: &FleetCatalogSpec) -> Result<(), HostError> {
    check_not_redacted(name, &spec.catalog)?;
    // Each host gets a part of the machines, under names of its own.
    let naming = spec.catalog.naming.clone().unwrap_or_else(|| format!("{name}-######"));
    check_spec(name, &CatalogSpec { naming: Some(naming), ..spec.catalog.clone() }).map(drop)
}

/// The revision that a catalog must have.
fn revision(expected: Option<Tag>) -> Result<Option<i64>, HostError> {
    let refused = || HostError::invalid("If-Match: this is no tag of a catalog of a fleet");
    expected.map(|tag| i64::try_from(tag.number()).map_err(|_| refused())).transpose()
}

/// Replaces all settings of a catalog of the fleet; a setting that is left out gets its default.
#[utoipa::path(put, path = "/catalogs/{name}", params(("name" = Name, Path), IfMatch, DryRun), request_body = FleetCatalogSpec, responses((status = 200, body = FleetCatalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn replace_fleet_catalog(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(spec): Body<FleetCatalogSpec>,
) -> TaggedCatalog {
    check_settings(&name, &spec)?;
    let expected = revision(expected)?;
    let fleet = service(&app)?;
    let replace = |view: &_| changes::replace_catalog(view, &name, &spec, expected, Timestamp::now());
    fleet.change_catalog(&name, dry_run, replace).await.map(tagged)
}

/// Deletes a catalog of the fleet. Hosts give up its machines, those that nobody has claimed first.
#[utoipa::path(delete, path = "/catalogs/{name}", params(("name" = Name, Path)), responses((status = 200, body = Empty), ProblemResponse))]
async fn delete_fleet_catalog(State(app): State<ApiState>, Path(name): Path<Name>) -> JsonResult<Empty> {
    service(&app)?.change(|view| changes::delete_catalog(view, &name).map(Some)).await?;
    Ok(Json(Empty {}))
}

/// Moves a catalog of the fleet to another version of its image. Hosts bring the version, and get it in waves.
#[utoipa::path(post, path = "/catalogs/{name}/update", params(("name" = Name, Path), IfMatch, DryRun), request_body = FleetCatalogUpdate, responses((status = 200, body = FleetCatalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn update_fleet_catalog(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(update): Body<FleetCatalogUpdate>,
) -> TaggedCatalog {
    let expected = revision(expected)?;
    let fleet = service(&app)?;
    let change =
        |view: &_| changes::update_catalog(view, &name, &update, expected, Timestamp::now()).map(Some);
    fleet.change_catalog(&name, dry_run, change).await.map(tagged)
}

/// Moves a catalog of the fleet back to a version of its history; by default to the one before, or to the one before a rollout that has
/// not reached all hosts. Hosts that have another version get it at once, without waves.
#[utoipa::path(post, path = "/catalogs/{name}/rollback", params(("name" = Name, Path), DryRun), request_body = FleetCatalogRollback, responses((status = 200, body = FleetCatalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn roll_back_fleet_catalog(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(FleetCatalogRollback { to }): Body<FleetCatalogRollback>,
) -> TaggedCatalog {
    let fleet = service(&app)?;
    let back = |view: &_| changes::roll_back_catalog(view, &name, to, Timestamp::now()).map(Some);
    fleet.change_catalog(&name, dry_run, back).await.map(tagged)
}

/// Pauses, resumes or aborts the rollout of a catalog of the fleet. `conflict`: none is in progress, or it was aborted.
#[utoipa::path(post, path = "/catalogs/{name}/rollout", params(("name" = Name, Path)), request_body = RolloutChange, responses((status = 200, body = FleetCatalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn change_fleet_rollout(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    note: RequestNote,
    Body(RolloutChange { action }): Body<RolloutChange>,
) -> TaggedCatalog {
    note.verb(match action {
        RolloutAction::Pause => "pause rollout",
        RolloutAction::Resume => "resume rollout",
        RolloutAction::Abort => "abort rollout",
    });
    let fleet = service(&app)?;
    fleet.change(|view| change_rollout(view, &name, action, Timestamp::now())).await?;
    Ok(tagged(fleet.catalog(&name).await?))
}
