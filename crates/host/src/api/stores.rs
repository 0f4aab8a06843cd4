//! Routes of stores.

use super::extract::{Body, DryRun, PageQuery, Query, part, select};
use super::{ApiState, ProblemResponse, ask};
use crate::access::note::RequestNote;
use crate::error::HostError;
use crate::paging::PageBuilder;
use axum::Json;
use axum::extract::State;
use spillway_api::{Page, StoreDetails, StoreFolder};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(list_stores, create_store))
}

/// Lists all stores, in the order of their names.
#[utoipa::path(get, path = "", params(PageQuery), responses((status = 200, body = Page<StoreDetails>), ProblemResponse))]
async fn list_stores(
    State(app): State<ApiState>,
    Query(mut pairs): Query<Vec<(String, String)>>,
) -> Result<Json<Page<StoreDetails>>, HostError> {
    let part = part(&mut pairs)?;
    select(pairs, &[])?;
    ask(move || {
        let mut page = PageBuilder::new(&part);
        let mut later =
            app.machines.space.details()?.into_iter().filter(|store| store.name.as_str() > &*part.after);
        later.all(|store| page.add(store.name.clone().as_str(), store));
        Ok(page.page())
    })
    .await
}

/// Creates a store.
#[utoipa::path(post, path = "", params(DryRun), request_body = StoreFolder, responses((status = 200, body = StoreFolder), ProblemResponse))]
async fn create_store(
    State(app): State<ApiState>,
    note: RequestNote,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(store): Body<StoreFolder>,
) -> Result<Json<StoreFolder>, HostError> {
    note.name(store.name.as_str());
    ask(move || app.stores.add(store, dry_run)).await
}
