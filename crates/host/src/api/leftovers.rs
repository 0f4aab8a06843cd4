//! Routes of what deleted machines have left.

use super::extract::{PartOfList, Path, Query, part, select};
use super::{App, Failure, ask};
use crate::error::HostError;
use axum::Json;
use axum::extract::State;
use spillway_api::{Empty, Leftover, Page};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list_leftovers)).routes(routes!(delete_leftover))
}

/// What deleted machines have left, in the order of their names.
#[utoipa::path(get, path = "", params(PartOfList), responses((status = 200, body = Page<Leftover>), Failure))]
async fn list_leftovers(
    State(app): State<App>,
    Query(mut pairs): Query<Vec<(String, String)>>,
) -> Result<Json<Page<Leftover>>, HostError> {
    let part = part(&mut pairs)?;
    select(pairs, &[])?;
    ask(move || app.machines.leftovers.page(&part)).await
}

/// Removes the files that a deleted machine has left: soon after the answer.
#[utoipa::path(delete, path = "/{uuid}", params(("uuid" = String, Path)), responses((status = 200, body = Empty), Failure))]
async fn delete_leftover(State(app): State<App>, Path(uuid): Path<String>) -> Result<Json<Empty>, HostError> {
    ask(move || app.machines.leftovers.delete(&uuid).map(|()| Empty {})).await
}
