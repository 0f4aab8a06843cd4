//! Routes of the host itself.

use super::extract::Body;
use super::{App, Failure, ask};
use crate::access::note::Note;
use crate::backup::STATE_HEADER;
use crate::error::HostError;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use spillway_api::{ErrorCode, HostAction, HostDetails, NewHostAction};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type};
use utoipa::{PartialSchema, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(show_host, act_on_host)).routes(routes!(back_up))
}

/// The host.
#[utoipa::path(get, path = "", responses((status = 200, body = HostDetails), Failure))]
async fn show_host(State(app): State<App>) -> Result<Json<HostDetails>, HostError> {
    ask(move || app.machines.gate.details()).await
}

/// The bytes of a SQLite database, for the document.
struct DatabaseFile;

impl PartialSchema for DatabaseFile {
    fn schema() -> RefOr<Schema> {
        let binary = SchemaFormat::KnownFormat(KnownFormat::Binary);
        ObjectBuilder::new().schema_type(Type::String).format(Some(binary)).into()
    }
}

impl ToSchema for DatabaseFile {}

/// Copies the records of the host as they are now: a SQLite database, for `spillwayd restore`. It has secrets: the SSH host keys
/// of machines, and what guests are told. The folder that it is of comes in the header `Spillway-State`.
#[utoipa::path(post, path = "/backup", responses(
    (status = 200, content_type = "application/vnd.sqlite3", body = inline(DatabaseFile)), Failure
))]
async fn back_up(State(app): State<App>) -> Result<Response, HostError> {
    let state = app.state;
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/vnd.sqlite3")),
        (HeaderName::from_static(STATE_HEADER), state.header()),
    ];
    let copied = tokio::task::spawn_blocking(move || state.store.copy()).await;
    let broken = |e| HostError::new(ErrorCode::Internal, format!("a fault of the daemon: {e}"));
    Ok((headers, copied.map_err(broken)??).into_response())
}

/// Closes the host, which stops its machines, or opens it. It is done after the answer.
#[utoipa::path(post, path = "", request_body = NewHostAction, responses((status = 200, body = HostDetails), Failure))]
async fn act_on_host(
    State(app): State<App>,
    note: Note,
    Body(asked): Body<NewHostAction>,
) -> Result<Json<HostDetails>, HostError> {
    note.verb(match asked.action {
        HostAction::Close => "close",
        HostAction::Open => "open",
    });
    ask(move || app.machines.gate.act(asked.action)).await
}
