//! Routes of the registries and images of the fleet. Any host answers for all.
//!
//! Invariant: nothing is recorded for all hosts that the host that was asked cannot use itself.

use super::extract::{Body, Path};
use super::fleets::service;
use super::{ApiState, ProblemResponse, ask_for};
use crate::access::note::RequestNote;
use crate::error::HostError;
use crate::fleet::{FleetService, fleet_image, fleet_images};
use axum::Json;
use axum::extract::State;
use spillway_api::{Empty, ErrorCode, FleetImage, ImageRef, List, Name, NewFleetImage, Registry};
use spillway_fleet::changes_images as changes;
use spillway_fleet::records::ImageRecord;
use std::sync::Arc;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type JsonResult<T> = Result<Json<T>, HostError>;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(list_fleet_registries, create_fleet_registry))
        .routes(routes!(delete_fleet_registry))
        .routes(routes!(list_fleet_images, create_fleet_image))
        .routes(routes!(delete_fleet_image))
}

/// Lists the registries of the fleet, in the order of their names.
#[utoipa::path(get, path = "/registries", responses((status = 200, body = List<Registry>), ProblemResponse))]
async fn list_fleet_registries(State(app): State<ApiState>) -> JsonResult<List<Registry>> {
    let view = service(&app)?.view();
    Ok(Json(List { items: view.registries.values().map(|registry| registry.value.clone()).collect() }))
}

/// Adds a registry to the fleet, after the host that was asked has tried its address and credentials. Hosts use it when they need it. The file of
/// credentials is one of each host, at the same path. `exists`: the fleet has another one of this name.
#[utoipa::path(post, path = "/registries", request_body = Registry, responses((status = 200, body = Registry), ProblemResponse))]
async fn create_fleet_registry(
    State(app): State<ApiState>,
    note: RequestNote,
    Body(registry): Body<Registry>,
) -> JsonResult<Registry> {
    note.name(registry.name.as_str());
    let fleet = service(&app)?;
    // What is refused anyway makes no place a registry.
    fleet.check(|view| match view.registries.contains_key(&registry.name) {
        true => Ok(()),
        false => changes::add_registry(view, &registry).map(drop),
    })?;
    let registries = app.registries.clone();
    let prepared = ask_for(move || registries.prepare(registry, false)).await?;
    fleet.change(|view| changes::add_registry(view, &prepared)).await?;
    Ok(Json(prepared))
}

/// Removes a registry from the fleet. Hosts that know it keep it, and what is in it stays. `in_use`: an image of the fleet is from it.
#[utoipa::path(delete, path = "/registries/{name}", params(("name" = Name, Path)), responses((status = 200, body = Empty), ProblemResponse))]
async fn delete_fleet_registry(State(app): State<ApiState>, Path(name): Path<Name>) -> JsonResult<Empty> {
    service(&app)?.change(|view| changes::remove_registry(view, &name).map(Some)).await?;
    Ok(Json(Empty {}))
}

/// Lists the images of the fleet, in the order of their names, with the hosts that have all of them or a part.
#[utoipa::path(get, path = "/images", responses((status = 200, body = List<FleetImage>), ProblemResponse))]
async fn list_fleet_images(State(app): State<ApiState>) -> JsonResult<List<FleetImage>> {
    Ok(Json(List { items: fleet_images(&service(&app)?.view()) }))
}

/// Adds a version of an image to the fleet, from a registry of the fleet, or changes the number of hosts that have all of it. The host that was asked
/// finds out its digest and size there. Hosts get it when a catalog wants machines of it. `exists`: the fleet has another version of this number.
#[utoipa::path(post, path = "/images", request_body = NewFleetImage, responses((status = 200, body = FleetImage), ProblemResponse))]
async fn create_fleet_image(
    State(app): State<ApiState>,
    note: RequestNote,
    Body(new): Body<NewFleetImage>,
) -> JsonResult<FleetImage> {
    note.name(new.image.name.as_str());
    let fleet = service(&app)?;
    let wanted = wanted_version(&new)?;
    let registry = registry(fleet, &new.registry)?;
    let asked = ImageRef { name: new.source.name.clone(), version: wanted };
    let of_host = Arc::clone(&app);
    let found = ask_for(move || of_host.registries.resolve(&registry, &asked)).await?;
    let record = ImageRecord {
        digest: found.digest,
        registry: new.registry,
        name: new.source.name,
        size_bytes: found.size_bytes,
        full_copies: new.full_copies,
    };
    let (name, version) = (&new.image.name, found.version);
    fleet.change(|view| changes::add_image(view, name, version, &record)).await?;
    let gone = || HostError::new(ErrorCode::NotFound, format!("{name}:{version} was removed meanwhile"));
    Ok(Json(fleet_image(&fleet.view(), name, version).ok_or_else(gone)?))
}

/// The version that is wanted, if one was named.
fn wanted_version(new: &NewFleetImage) -> Result<Option<std::num::NonZeroU32>, HostError> {
    match (new.image.version, new.source.version) {
        (Some(image), Some(source)) if image != source => Err(HostError::invalid(format!(
            "{}: a version has the same number in the registry and on each host, so it cannot be {}/{}: name one of the two",
            new.image, new.registry, new.source
        ))),
        (image, source) => Ok(image.or(source)),
    }
}

fn registry(fleet: &FleetService, name: &Name) -> Result<Registry, HostError> {
    let mut found = None;
    fleet.check(|view| {
        found = Some(changes::registry(view, name)?.value.clone());
        Ok(())
    })?;
    found.ok_or_else(|| HostError::not_found("registry of the fleet", name.as_str(), []))
}

/// Removes a version of an image from the fleet. Hosts that have it keep it. `in_use`: a catalog of the fleet uses it.
#[utoipa::path(delete, path = "/images/{image}/{version}", params(("image" = Name, Path), ("version" = u32, Path)), responses((status = 200, body = Empty), ProblemResponse))]
async fn delete_fleet_image(
    State(app): State<ApiState>,
    Path((image, version)): Path<(Name, u32)>,
) -> JsonResult<Empty> {
    service(&app)?.change(|view| changes::remove_image(view, &image, version).map(Some)).await?;
    Ok(Json(Empty {}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_has_one_number() {
        let wanted = |image: &str, source: &str| {
            let new = NewFleetImage {
                image: image.parse().unwrap(),
                registry: "hub".parse().unwrap(),
                source: source.parse().unwrap(),
                full_copies: 0,
            };
            wanted_version(&new).map(|version| version.map_or(0, std::num::NonZeroU32::get))
        };
        for (image, source, version) in [("x", "y", 0), ("x:3", "y", 3), ("x", "y:3", 3), ("x:3", "y:3", 3)] {
            assert_eq!(wanted(image, source).ok(), Some(version), "{image} {source}");
        }
        let refused = wanted("x:3", "y:4").unwrap_err();
        assert!(refused.message.contains("hub/y:4") && refused.code == ErrorCode::Invalid, "{refused}");
    }
}
