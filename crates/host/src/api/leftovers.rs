//! Routes of files that deleted machines have left.

use super::extract::{DryRun, PageQuery, Path, Query, part, select};
use super::{ApiState, ProblemResponse, ask};
use crate::error::HostError;
use axum::Json;
use axum::extract::State;
use spillway_api::{Empty, Leftover, Page};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(list_leftovers)).routes(routes!(delete_leftover))
}

/// Lists the files that deleted machines have left, in the order of the machines' names.
#[utoipa::path(get, path = "", params(PageQuery), responses((status = 200, body = Page<Leftover>), ProblemResponse))]
async fn list_leftovers(
    State(app): State<ApiState>,
    Query(mut pairs): Query<Vec<(String, String)>>,
) -> Result<Json<Page<Leftover>>, HostError> {
    let part = part(&mut pairs)?;
    select(pairs, &[])?;
    ask(move || app.machines.leftovers.page(&part)).await
}

/// Deletes the files that a deleted machine has left, soon after the response.
#[utoipa::path(delete, path = "/{uuid}", params(("uuid" = String, Path), DryRun), responses((status = 200, body = Empty), ProblemResponse))]
async fn delete_leftover(
    State(app): State<ApiState>,
    Path(uuid): Path<String>,
    Query(DryRun { dry_run }): Query<DryRun>,
) -> Result<Json<Empty>, HostError> {
    ask(move || app.machines.leftovers.delete(&uuid, dry_run).map(|()| Empty {})).await
}
