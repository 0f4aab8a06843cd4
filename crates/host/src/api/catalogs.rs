//! Routes of catalogs and machines.

use super::extract::{Body, Path, Query};
use super::{App, Failure, ask};
use crate::error::HostError;
use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use spillway_api::{Catalog, CatalogSpec, Empty, List, Machine, Name, NewCatalog};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type Answer<T> = Result<Json<T>, HostError>;

pub fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list_catalogs, create_catalog)).routes(routes!(
        show_catalog,
        change_catalog,
        delete_catalog
    ))
}

pub fn machine_routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list_machines)).routes(routes!(show_machine))
}

/// All catalogs.
#[utoipa::path(get, path = "", responses((status = 200, body = List<Catalog>), Failure))]
async fn list_catalogs(State(app): State<App>) -> Answer<List<Catalog>> {
    ask(move || Ok(List { items: app.catalogs.list()? })).await
}

/// A new catalog. Its machines are recorded when this is answered.
#[utoipa::path(post, path = "", request_body = NewCatalog, responses((status = 200, body = Catalog), Failure))]
async fn create_catalog(State(app): State<App>, Body(new): Body<NewCatalog>) -> Answer<Catalog> {
    ask(move || app.catalogs.create(&new.name, &new.spec)).await
}

/// A catalog.
#[utoipa::path(get, path = "/{name}", params(("name" = Name, Path)), responses((status = 200, body = Catalog), Failure))]
async fn show_catalog(State(app): State<App>, Path(name): Path<Name>) -> Answer<Catalog> {
    ask(move || app.catalogs.get(&name)).await
}

/// Other settings of a catalog, all of them: what is left out has its usual value.
#[utoipa::path(put, path = "/{name}", params(("name" = Name, Path)), request_body = CatalogSpec, responses((status = 200, body = Catalog), Failure))]
async fn change_catalog(
    State(app): State<App>,
    Path(name): Path<Name>,
    Body(spec): Body<CatalogSpec>,
) -> Answer<Catalog> {
    ask(move || app.catalogs.change(&name, &spec)).await
}

/// Removes a catalog and its machines.
#[utoipa::path(delete, path = "/{name}", params(("name" = Name, Path)), responses((status = 200, body = Empty), Failure))]
async fn delete_catalog(State(app): State<App>, Path(name): Path<Name>) -> Answer<Empty> {
    ask(move || app.catalogs.delete(&name).map(|()| Empty {})).await
}

/// Which machines.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Which {
    /// Those of this catalog.
    #[serde(default)]
    catalog: Option<Name>,
}

/// All machines, or those of a catalog.
#[utoipa::path(get, path = "", params(Which), responses((status = 200, body = List<Machine>), Failure))]
async fn list_machines(State(app): State<App>, Query(which): Query<Which>) -> Answer<List<Machine>> {
    ask(move || Ok(List { items: app.catalogs.machines(which.catalog.as_ref())? })).await
}

/// A machine.
#[utoipa::path(get, path = "/{name}", params(("name" = Name, Path)), responses((status = 200, body = Machine), Failure))]
async fn show_machine(State(app): State<App>, Path(name): Path<Name>) -> Answer<Machine> {
    ask(move || app.catalogs.machine(&name)).await
}
