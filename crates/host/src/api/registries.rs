//! Routes of registries.

use super::extract::{Body, DryRun, PageQuery, Path, Query, Wait, part, select};
use super::images::{OperationResponse, attend};
use super::{ApiState, ProblemResponse, ask, ask_for};
use crate::access::note::RequestNote;
use crate::error::HostError;
use crate::paging::PageBuilder;
use axum::Json;
use axum::extract::State;
use spillway_api::{Empty, ImageRef, Name, Operation, Page, Registry, RegistryCheck, RegistryCollection};
use std::num::NonZeroU32;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type JsonResult<T> = Result<Json<T>, HostError>;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(list_registries, create_registry))
        .routes(routes!(get_registry, delete_registry))
        .routes(routes!(check_registry))
        .routes(routes!(collect_registry))
        .routes(routes!(delete_registry_image))
}

/// Lists all registries, in the order of their names.
#[utoipa::path(get, path = "", params(PageQuery), responses((status = 200, body = Page<Registry>), ProblemResponse))]
async fn list_registries(
    State(app): State<ApiState>,
    Query(mut pairs): Query<Vec<(String, String)>>,
) -> JsonResult<Page<Registry>> {
    let part = part(&mut pairs)?;
    select(pairs, &[])?;
    ask(move || {
        let mut page = PageBuilder::new(&part);
        let mut later =
            app.registries.list()?.into_iter().filter(|registry| registry.name.as_str() > &*part.after);
        later.all(|registry| page.add(registry.name.clone().as_str(), registry));
        Ok(page.page())
    })
    .await
}

/// Adds a registry, after its address and credentials were tried.
#[utoipa::path(post, path = "", params(DryRun), request_body = Registry, responses((status = 200, body = Registry), ProblemResponse))]
async fn create_registry(
    State(app): State<ApiState>,
    note: RequestNote,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(registry): Body<Registry>,
) -> JsonResult<Registry> {
    note.name(registry.name.as_str());
    ask(move || app.registries.add(registry, dry_run)).await
}

/// Returns a registry.
#[utoipa::path(get, path = "/{name}", params(("name" = Name, Path)), responses((status = 200, body = Registry), ProblemResponse))]
async fn get_registry(State(app): State<ApiState>, Path(name): Path<Name>) -> JsonResult<Registry> {
    ask(move || app.registries.get(&name)).await
}

/// Forgets a registry. What is in it stays.
#[utoipa::path(delete, path = "/{name}", params(("name" = Name, Path), DryRun), responses((status = 200, body = Empty), ProblemResponse))]
async fn delete_registry(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    Query(DryRun { dry_run }): Query<DryRun>,
) -> JsonResult<Empty> {
    ask(move || app.registries.remove(&name, dry_run)).await
}

/// Tries the address and credentials of a registry, and lists the images in it. It writes an object and deletes it again,
/// except on a web server. It takes at most 45 s.
#[utoipa::path(post, path = "/{name}/check", params(("name" = Name, Path)), responses((status = 200, body = RegistryCheck), ProblemResponse))]
async fn check_registry(State(app): State<ApiState>, Path(name): Path<Name>) -> JsonResult<RegistryCheck> {
    ask(move || app.registries.check(&name)).await
}

/// Begins to count the garbage of a registry: chunks and images that no version needs. With `delete`, garbage is recorded,
/// and what an earlier collection had recorded is deleted.
#[utoipa::path(post, path = "/{name}/collections", params(("name" = Name, Path), Wait), request_body = RegistryCollection, responses(
    (status = 200, description = "The operation has ended within `wait`; its state says how.", body = Operation),
    (status = 202, description = "The operation continues; `Location` is the path to ask for it.", body = Operation, headers(("Location" = String, description = "Path of the operation on this daemon."))), ProblemResponse
))]
async fn collect_registry(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    Query(wait): Query<Wait>,
    Body(order): Body<RegistryCollection>,
) -> OperationResponse {
    wait.at_most()?;
    let registries = app.registries.clone();
    let begun = ask_for(move || registries.collect(&name, order)).await?;
    attend(&app, begun, wait).await
}

/// Deletes a version of an image from a registry. Its chunks stay until a collection of garbage. Hosts that stream the
/// version cannot get missing chunks after that, and the registry does not know which hosts stream it.
#[utoipa::path(delete, path = "/{name}/images/{image}/{version}", params(("name" = Name, Path), ("image" = Name, Path), ("version" = u32, Path)), responses((status = 200, body = Empty), ProblemResponse))]
async fn delete_registry_image(
    State(app): State<ApiState>,
    Path((name, image, version)): Path<(Name, Name, u32)>,
) -> JsonResult<Empty> {
    let image = ImageRef { name: image, version: NonZeroU32::new(version) };
    ask(move || app.registries.forget_image(&name, &image)).await
}
