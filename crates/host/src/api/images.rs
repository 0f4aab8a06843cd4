//! Routes of images.

use super::extract::{Body, IdempotencyKey, Path};
use super::{App, Failure, ask, ask_for};
use crate::access::caller::Caller;
use crate::access::note::Note;
use crate::error::HostError;
use crate::idempotency::Key;
use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use spillway_api::{
    Empty, ErrorCode, Image, ImageCheck, ImageCommit, ImageDetails, ImageImport, List, Name, Operation,
    VersionChoice,
};
use std::time::Duration;
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
        app.machines.reader.unused(&name, None)?;
        app.images.delete(&name).map(|()| Empty {})
    })
    .await
}

/// Begins to make a new version from a file of the host; the first one makes the image, and is published.
#[utoipa::path(post, path = "/{name}/versions", params(("name" = Name, Path), IdempotencyKey), request_body = ImageImport, responses((status = 202, body = Operation), Failure))]
async fn import_image(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    note: Note,
    Path(name): Path<Name>,
    key: IdempotencyKey,
    Body(import): Body<ImageImport>,
) -> Begun {
    let key = key.of(&caller.name, &format!("imports/{name}"), &import);
    let images = app.images.clone();
    begin_once(app, note, key, move || images.import(&name, import)).await
}

/// Begins an operation, unless the key has begun it already: then it is that one, as it is now.
async fn begin_once(
    app: App,
    note: Note,
    key: Option<Key>,
    begin: impl FnOnce() -> Result<Operation, HostError> + Send + 'static,
) -> Begun {
    let keys = app.idempotency.clone();
    let (begun, is_repeated) = ask_for(move || keys.once(key.as_ref(), begin)).await?;
    if !is_repeated {
        return Ok((StatusCode::ACCEPTED, Json(begun)));
    }
    note.repeated();
    let known = app.operations.wait(begun.id, Duration::ZERO).await;
    let forgotten = || {
        let message = format!(
            "operation {} ({}), which this Idempotency-Key has begun, is forgotten: look whether the version is there, and take a new key to begin again",
            begun.id, begun.what
        );
        HostError::new(ErrorCode::Conflict, message)
    };
    Ok((StatusCode::ACCEPTED, Json(known.ok_or_else(forgotten)?)))
}

/// Begins to make a new version from the disk of a machine of mode `persistent` that is off. It cannot be started meanwhile.
#[utoipa::path(post, path = "/{name}/commits", params(("name" = Name, Path), IdempotencyKey), request_body = ImageCommit, responses((status = 202, body = Operation), Failure))]
async fn commit_machine(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    note: Note,
    Path(name): Path<Name>,
    key: IdempotencyKey,
    Body(commit): Body<ImageCommit>,
) -> Begun {
    note.machines([commit.machine.as_str()]);
    let key = key.of(&caller.name, &format!("commits/{name}"), &commit);
    let machines = app.machines.clone();
    begin_once(app, note, key, move || machines.commits.begin(&name, &commit)).await
}

/// Removes a version, if nobody uses it.
#[utoipa::path(delete, path = "/{name}/versions/{version}", params(("name" = Name, Path), ("version" = u32, Path)), responses((status = 200, body = Empty), Failure))]
async fn delete_image_version(
    State(app): State<App>,
    Path((name, version)): Path<(Name, u32)>,
) -> Answer<Empty> {
    ask(move || {
        app.machines.reader.unused(&name, Some(version))?;
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
/// most. Two checks run at a time: where the answer takes more than 50 s for the sake of others it is a conflict, the check goes
/// on, and a later request has its result. The result is kept: the same content is looked into once.
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
