//! Routes of operations.

use super::extract::{PageQuery, Path, Query, Wait, part, select};
use super::{ApiState, ProblemResponse};
use crate::error::HostError;
use crate::paging::PageBuilder;
use axum::Json;
use axum::extract::State;
use spillway_api::{Empty, ErrorCode, Operation, Page};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(list_operations)).routes(routes!(get_operation, cancel_operation))
}

/// Lists operations in progress and those that have ended lately, oldest first.
#[utoipa::path(get, path = "", params(PageQuery), responses((status = 200, body = Page<Operation>), ProblemResponse))]
async fn list_operations(
    State(app): State<ApiState>,
    Query(mut pairs): Query<Vec<(String, String)>>,
) -> Result<Json<Page<Operation>>, HostError> {
    let part = part(&mut pairs)?;
    select(pairs, &[])?;
    let after = part.after.parse().unwrap_or(0);
    let mut page = PageBuilder::new(&part);
    let mut later = app.operations.list().into_iter().filter(|operation| operation.id > after);
    later.all(|operation| page.add(&operation.id.to_string(), operation));
    Ok(Json(page.page()))
}

/// Returns the progress of an operation. With `wait` the response comes when the operation has ended.
#[utoipa::path(get, path = "/{id}", params(("id" = u64, Path), Wait), responses((status = 200, body = Operation), ProblemResponse))]
async fn get_operation(
    State(app): State<ApiState>,
    Path(id): Path<u64>,
    Query(wait): Query<Wait>,
) -> Result<Json<Operation>, HostError> {
    let found = app.operations.wait(id, wait.at_most()?).await;
    found.map(Json).ok_or_else(|| none(id))
}

/// Cancels an operation: it fails as soon as it can, and leaves nothing behind.
#[utoipa::path(delete, path = "/{id}", params(("id" = u64, Path)), responses((status = 200, body = Empty), ProblemResponse))]
async fn cancel_operation(
    State(app): State<ApiState>,
    Path(id): Path<u64>,
) -> Result<Json<Empty>, HostError> {
    if app.operations.cancel(id) { Ok(Json(Empty {})) } else { Err(none(id)) }
}

fn none(id: u64) -> HostError {
    let message = format!("there is no operation {id}: spillwayd forgets operations when it ends");
    HostError::new(ErrorCode::NotFound, message)
}
