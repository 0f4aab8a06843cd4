//! Routes of what deleted machines have left.

use super::extract::Path;
use super::{App, Failure, ask};
use crate::error::HostError;
use axum::Json;
use axum::extract::State;
use spillway_api::{Empty, Leftover, List};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list_leftovers)).routes(routes!(delete_leftover))
}

/// What deleted machines have left, in the order of their names.
#[utoipa::path(get, path = "", responses((status = 200, body = List<Leftover>), Failure))]
async fn list_leftovers(State(app): State<App>) -> Result<Json<List<Leftover>>, HostError> {
    ask(move || Ok(List { items: app.machines.leftovers()? })).await
}

/// Removes the files that a deleted machine has left: soon after the answer.
#[utoipa::path(delete, path = "/{uuid}", params(("uuid" = String, Path)), responses((status = 200, body = Empty), Failure))]
async fn delete_leftover(State(app): State<App>, Path(uuid): Path<String>) -> Result<Json<Empty>, HostError> {
    ask(move || app.machines.delete_leftover(&uuid).map(|()| Empty {})).await
}
