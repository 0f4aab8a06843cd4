//! Routes of stores.

use super::extract::Body;
use super::{App, Failure, ask};
use crate::access::note::Note;
use crate::error::HostError;
use axum::Json;
use axum::extract::State;
use spillway_api::{List, StoreDetails, StoreFolder};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list_stores, add_store))
}

/// All stores.
#[utoipa::path(get, path = "", responses((status = 200, body = List<StoreDetails>), Failure))]
async fn list_stores(State(app): State<App>) -> Result<Json<List<StoreDetails>>, HostError> {
    ask(move || Ok(List { items: app.machines.space.details()? })).await
}

/// A new store.
#[utoipa::path(post, path = "", request_body = StoreFolder, responses((status = 200, body = StoreFolder), Failure))]
async fn add_store(
    State(app): State<App>,
    note: Note,
    Body(store): Body<StoreFolder>,
) -> Result<Json<StoreFolder>, HostError> {
    note.name(store.name.as_str());
    ask(move || app.stores.add(store)).await
}
