//! Routes of the host itself.

use super::extract::Body;
use super::{App, Failure, ask};
use crate::access::note::Note;
use crate::error::HostError;
use axum::Json;
use axum::extract::State;
use spillway_api::{HostAction, HostDetails, NewHostAction};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(show_host, act_on_host))
}

/// The host.
#[utoipa::path(get, path = "", responses((status = 200, body = HostDetails), Failure))]
async fn show_host(State(app): State<App>) -> Result<Json<HostDetails>, HostError> {
    ask(move || app.machines.host()).await
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
    ask(move || app.machines.act_on_host(asked.action)).await
}
