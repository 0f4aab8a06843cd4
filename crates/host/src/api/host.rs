//! Routes of the host itself.

use super::conditions::{IfMatch, Tagged};
use super::extract::Body;
use super::{ApiState, ProblemResponse, ask_for};
use crate::access::note::RequestNote;
use crate::backup::STATE_HEADER;
use crate::error::HostError;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use spillway_api::{ErrorCode, HostAction, HostDetails, NewHostAction};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type};
use utoipa::{PartialSchema, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(get_host, change_host)).routes(routes!(create_backup))
}

/// Returns the state of the host.
#[utoipa::path(get, path = "", responses((status = 200, body = HostDetails, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn get_host(State(app): State<ApiState>) -> Result<Tagged<HostDetails>, HostError> {
    let (tag, host) = ask_for(move || app.machines.gate.details()).await?;
    Ok(Tagged(tag, host))
}

/// Bytes of a SQLite database, for the OpenAPI document.
struct DatabaseFile;

impl PartialSchema for DatabaseFile {
    fn schema() -> RefOr<Schema> {
        let binary = SchemaFormat::KnownFormat(KnownFormat::Binary);
        ObjectBuilder::new().schema_type(Type::String).format(Some(binary)).into()
    }
}

impl ToSchema for DatabaseFile {}

/// Copies the records of the host as they are now: a SQLite database, for `spillwayd restore`. It contains secrets: the
/// SSH host keys of machines, and data for guests. The header `Spillway-State` names the state folder.
#[utoipa::path(post, path = "/backup", responses(
    (status = 200, content_type = "application/vnd.sqlite3", body = inline(DatabaseFile)), ProblemResponse
))]
async fn create_backup(State(app): State<ApiState>) -> Result<Response, HostError> {
    let state = app.state.clone();
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/vnd.sqlite3")),
        (HeaderName::from_static(STATE_HEADER), state.header()),
    ];
    let copied = tokio::task::spawn_blocking(move || state.store.copy()).await;
    let broken = |e| HostError::new(ErrorCode::Internal, format!("a fault of the daemon: {e}"));
    Ok((headers, copied.map_err(broken)??).into_response())
}

/// Closes the host, which stops its machines, or opens it again. The machines stop after the response.
#[utoipa::path(post, path = "", params(IfMatch), request_body = NewHostAction, responses((status = 200, body = HostDetails, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn change_host(
    State(app): State<ApiState>,
    IfMatch(expected): IfMatch,
    note: RequestNote,
    Body(asked): Body<NewHostAction>,
) -> Result<Tagged<HostDetails>, HostError> {
    note.verb(match asked.action {
        HostAction::Close => "close",
        HostAction::Open => "open",
    });
    let (tag, host) = ask_for(move || app.machines.gate.act(asked.action, expected)).await?;
    Ok(Tagged(tag, host))
}
