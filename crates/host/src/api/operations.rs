//! Routes of operations.

use super::extract::{Path, Query, wait as held};
use super::{App, Failure};
use crate::error::HostError;
use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use spillway_api::{Empty, ErrorCode, List, Operation};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list_operations)).routes(routes!(show_operation, cancel_operation))
}

/// How long to wait.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Wait {
    /// Answer when it has ended, or after so many seconds.
    #[serde(default)]
    wait_seconds: u32,
}

/// What goes on, and what has ended lately.
#[utoipa::path(get, path = "", responses((status = 200, body = List<Operation>), Failure))]
async fn list_operations(State(app): State<App>) -> Json<List<Operation>> {
    Json(List { items: app.operations.list() })
}

/// How far an operation is.
#[utoipa::path(get, path = "/{id}", params(("id" = u64, Path), Wait), responses((status = 200, body = Operation), Failure))]
async fn show_operation(
    State(app): State<App>,
    Path(id): Path<u64>,
    Query(wait): Query<Wait>,
) -> Result<Json<Operation>, HostError> {
    let found = app.operations.wait(id, held(wait.wait_seconds)?).await;
    found.map(Json).ok_or_else(|| none(id))
}

/// Asks an operation to stop: it fails as soon as it can, and leaves nothing behind.
#[utoipa::path(delete, path = "/{id}", params(("id" = u64, Path)), responses((status = 200, body = Empty), Failure))]
async fn cancel_operation(State(app): State<App>, Path(id): Path<u64>) -> Result<Json<Empty>, HostError> {
    if app.operations.cancel(id) { Ok(Json(Empty {})) } else { Err(none(id)) }
}

fn none(id: u64) -> HostError {
    let message = format!("there is no operation {id}: they are forgotten when spillwayd ends");
    HostError::new(ErrorCode::NotFound, message)
}
