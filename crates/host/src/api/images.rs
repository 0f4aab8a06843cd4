//! Routes of images.

use super::extract::{Body, Path};
use super::{App, Failure, ask};
use crate::error::HostError;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use spillway_api::{
    Empty, Image, ImageCheck, ImageCommit, ImageDetails, ImageImport, List, Name, Operation, VersionChoice,
};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type Answer<T> = Result<Json<T>, HostError>;
type Begun = Result<(StatusCode, Json<Operation>), HostError>;

pub fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_images))
        .routes(routes!(show_image, delete_image))
        .routes(routes!(import_image))
        .routes(routes!(commit_machine))
        .routes(routes!(delete_image_version))
        .routes(routes!(verify_image_version))
        .routes(routes!(check_image_version))
        .routes(routes!(publish_image_version))
        .routes(routes!(tag_image_version, untag_image_version))
}

/// All images.
#[utoipa::path(get, path = "", responses((status = 200, body = List<Image>), Failure))]
async fn list_images(State(app): State<App>) -> Answer<List<Image>> {
    ask(move || Ok(List { items: app.images.list()? })).await
}

/// An image with its versions.
#[utoipa::path(get, path = "/{name}", params(("name" = Name, Path)), responses((status = 200, body = ImageDetails), Failure))]
async fn show_image(State(app): State<App>, Path(name): Path<Name>) -> Answer<ImageDetails> {
    ask(move || app.images.details(&name)).await
}

/// Removes an image with all versions, if nobody uses one.
#[utoipa::path(delete, path = "/{name}", params(("name" = Name, Path)), responses((status = 200, body = Empty), Failure))]
async fn delete_image(State(app): State<App>, Path(name): Path<Name>) -> Answer<Empty> {
    ask(move || {
        app.machines.unused(&name, None)?;
        app.images.delete(&name).map(|()| Empty {})
    })
    .await
}

/// Begins to make a new version from a file of the host; the first one makes the image, and is published.
#[utoipa::path(post, path = "/{name}/versions", params(("name" = Name, Path)), request_body = ImageImport, responses((status = 202, body = Operation), Failure))]
async fn import_image(
    State(app): State<App>,
    Path(name): Path<Name>,
    Body(import): Body<ImageImport>,
) -> Begun {
    Ok((StatusCode::ACCEPTED, ask(move || app.images.import(&name, import)).await?))
}

/// Begins to make a new version from the disk of a machine of mode `persistent` that is off. It cannot be started meanwhile.
#[utoipa::path(post, path = "/{name}/commits", params(("name" = Name, Path)), request_body = ImageCommit, responses((status = 202, body = Operation), Failure))]
async fn commit_machine(
    State(app): State<App>,
    Path(name): Path<Name>,
    Body(commit): Body<ImageCommit>,
) -> Begun {
    Ok((StatusCode::ACCEPTED, ask(move || app.machines.commit(&name, &commit)).await?))
}

/// Removes a version, if nobody uses it.
#[utoipa::path(delete, path = "/{name}/versions/{version}", params(("name" = Name, Path), ("version" = u32, Path)), responses((status = 200, body = Empty), Failure))]
async fn delete_image_version(
    State(app): State<App>,
    Path((name, version)): Path<(Name, u32)>,
) -> Answer<Empty> {
    ask(move || {
        app.machines.unused(&name, Some(version))?;
        app.images.delete_version(&name, version).map(|()| Empty {})
    })
    .await
}

/// Begins to read a version again and compare it with its digests.
#[utoipa::path(post, path = "/{name}/versions/{version}/verify", params(("name" = Name, Path), ("version" = u32, Path)), responses((status = 202, body = Operation), Failure))]
async fn verify_image_version(State(app): State<App>, Path((name, version)): Path<(Name, u32)>) -> Begun {
    Ok((StatusCode::ACCEPTED, ask(move || app.images.verify(&name, version)).await?))
}

/// Looks into a version for what breaks its clones, and says what firmware finds on its disk. It takes some seconds, 40 at
/// most, and a minute more where other images are being checked. The result is kept: the same content is looked into once.
#[utoipa::path(get, path = "/{name}/versions/{version}/check", params(("name" = Name, Path), ("version" = u32, Path)), responses((status = 200, body = ImageCheck), Failure))]
async fn check_image_version(
    State(app): State<App>,
    Path((name, version)): Path<(Name, u32)>,
) -> Answer<ImageCheck> {
    Ok(Json(app.images.check(&name, version).await?))
}

/// Makes a version the one that those take who name none.
#[utoipa::path(put, path = "/{name}/published", params(("name" = Name, Path)), request_body = VersionChoice, responses((status = 200, body = Image), Failure))]
async fn publish_image_version(
    State(app): State<App>,
    Path(name): Path<Name>,
    Body(choice): Body<VersionChoice>,
) -> Answer<Image> {
    ask(move || app.images.publish(&name, choice.version)).await
}

/// Names a version.
#[utoipa::path(put, path = "/{name}/tags/{tag}", params(("name" = Name, Path), ("tag" = Name, Path)), request_body = VersionChoice, responses((status = 200, body = Image), Failure))]
async fn tag_image_version(
    State(app): State<App>,
    Path((name, tag)): Path<(Name, Name)>,
    Body(choice): Body<VersionChoice>,
) -> Answer<Image> {
    ask(move || app.images.tag(&name, &tag, choice.version)).await
}

/// Takes a name from a version.
#[utoipa::path(delete, path = "/{name}/tags/{tag}", params(("name" = Name, Path), ("tag" = Name, Path)), responses((status = 200, body = Image), Failure))]
async fn untag_image_version(State(app): State<App>, Path((name, tag)): Path<(Name, Name)>) -> Answer<Image> {
    ask(move || app.images.untag(&name, &tag)).await
}
