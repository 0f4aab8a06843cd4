//! Routes of images.

use super::conditions::{IfMatch, IfNoneMatch, Tagged};
use super::extract::{Body, DryRun, IdempotencyKey, PageQuery, Path, Query, Wait, part, select};
use super::{ApiState, ProblemResponse, ask, ask_for};
use crate::access::caller::Caller;
use crate::access::delay::delayed;
use crate::access::note::RequestNote;
use crate::error::HostError;
use crate::idempotency::IdempotentRequest;
use crate::images::ImageChangeTerms;
use crate::paging::PageBuilder;
use crate::tags::Tag;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use spillway_api::{
    Empty, ErrorCode, Image, ImageCheck, ImageCommit, ImageDetails, ImageDownload, ImageImport,
    ImageManifest, ImagePull, ImagePush, Name, Operation, OperationState, Page, VersionChoice,
};
use std::num::NonZeroU32;
use std::time::Duration;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type JsonResult<T> = Result<Json<T>, HostError>;
pub(super) type OperationResponse = Result<Response, HostError>;
type TaggedImage = Result<Tagged<Image>, HostError>;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(list_images))
        .routes(routes!(get_image, delete_image))
        .routes(routes!(import_image))
        .routes(routes!(commit_machine))
        .routes(routes!(delete_image_version))
        .routes(routes!(verify_image_version))
        .routes(routes!(check_image_version))
        .routes(routes!(publish_image_version))
        .routes(routes!(download_image))
        .routes(routes!(pull_image))
        .routes(routes!(push_image_version))
        .routes(routes!(get_image_manifest))
        .routes(routes!(tag_image_version, untag_image_version))
}

/// Lists all images, in the order of their names.
#[utoipa::path(get, path = "", params(PageQuery), responses((status = 200, body = Page<Image>), ProblemResponse))]
async fn list_images(
    State(app): State<ApiState>,
    Query(mut pairs): Query<Vec<(String, String)>>,
) -> JsonResult<Page<Image>> {
    let part = part(&mut pairs)?;
    select(pairs, &[])?;
    ask(move || {
        let mut page = PageBuilder::new(&part);
        for image in app.images.list_after(&part.after) {
            let image = image?;
            if !page.add(image.name.clone().as_str(), image) {
                break;
            }
        }
        Ok(page.page())
    })
    .await
}

/// An image with its tag, after a change.
fn tagged((tag, image): (Tag, Image)) -> Tagged<Image> {
    Tagged(tag, image)
}

/// Returns an image with its versions.
#[utoipa::path(get, path = "/{name}", params(("name" = Name, Path)), responses((status = 200, body = ImageDetails, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn get_image(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
) -> Result<Tagged<ImageDetails>, HostError> {
    ask_for(move || {
        let details = app.images.details(&name)?;
        // What is in the cache is no part of what clients change.
        let tag = Tag::of(&details);
        Ok(Tagged(tag, ImageDetails { cached: app.images.cached(&details)?, ..details }))
    })
    .await
}

/// Deletes an image with all its versions, if none is in use.
#[utoipa::path(delete, path = "/{name}", params(("name" = Name, Path), IfMatch, DryRun), responses((status = 200, body = Empty), ProblemResponse))]
async fn delete_image(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    Query(DryRun { dry_run }): Query<DryRun>,
) -> JsonResult<Empty> {
    let terms = ImageChangeTerms { expected, dry_run, is_new: false };
    ask(move || {
        app.machines.reader.check_unused(&name, None)?;
        app.images.delete(&name, terms).map(|()| Empty {})
    })
    .await
}

/// Begins to import a new version from a file of the host. The first version creates the image and is published.
#[utoipa::path(post, path = "/{name}/versions", params(("name" = Name, Path), IdempotencyKey, Wait), request_body = ImageImport, responses(
    (status = 200, description = "The operation has ended within `wait`; its state says how.", body = Operation),
    (status = 202, description = "The operation continues; `Location` is the path to ask for it.", body = Operation, headers(("Location" = String, description = "Path of the operation on this daemon."))), ProblemResponse
))]
async fn import_image(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    note: RequestNote,
    Path(name): Path<Name>,
    key: IdempotencyKey,
    Query(wait): Query<Wait>,
    Body(import): Body<ImageImport>,
) -> OperationResponse {
    let key = key.of(&caller.name, &format!("imports/{name}"), &import);
    let (images, once) = (app.images.clone(), OperationStart { note, key, wait });
    once.begin(app, move |key| images.import(&name, import, key)).await
}

/// Begins to download an image from a web server or from an OCI registry, and to import it as a new version. Only hosts that the
/// option `--import-from` of `spillwayd` names are asked; it is `forbidden` otherwise.
#[utoipa::path(post, path = "/{name}/downloads", params(("name" = Name, Path), IdempotencyKey, Wait), request_body = ImageDownload, responses(
    (status = 200, description = "The operation has ended within `wait`; its state says how.", body = Operation),
    (status = 202, description = "The operation continues; `Location` is the path to ask for it.", body = Operation, headers(("Location" = String, description = "Path of the operation on this daemon."))), ProblemResponse
))]
async fn download_image(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    note: RequestNote,
    Path(name): Path<Name>,
    key: IdempotencyKey,
    Query(wait): Query<Wait>,
    Body(download): Body<ImageDownload>,
) -> OperationResponse {
    note.asked(&download.without_secrets());
    let key = key.of(&caller.name, &format!("downloads/{name}"), &download);
    let (images, downloads) = (app.images.clone(), app.downloads.clone());
    let once = OperationStart { note, key, wait };
    once.begin(app, move |key| images.download(&downloads, &name, &download, key)).await
}

/// How an operation is started.
struct OperationStart {
    note: RequestNote,
    /// The operation is started once for its key.
    key: IdempotentRequest,
    wait: Wait,
}

impl OperationStart {
    /// Starts an operation, or returns the one that was started with the key, as it is now.
    async fn begin(
        self,
        app: ApiState,
        begin: impl FnOnce(&IdempotentRequest) -> Result<(Operation, bool), HostError> + Send + 'static,
    ) -> OperationResponse {
        let OperationStart { note, key, wait } = self;
        wait.at_most()?;
        let keys = app.idempotency.clone();
        let (begun, is_repeated) = ask_for(move || {
            let begun = begin(&key)?;
            keys.note(&key);
            Ok(begun)
        })
        .await?;
        if !is_repeated {
            return attend(&app, begun, wait).await;
        }
        note.repeated();
        if let Some(known) = app.operations.wait(begun.id, Duration::ZERO).await {
            return attend(&app, known, wait).await;
        }
        // If the operation succeeded before it was forgotten, its version exists.
        let image = begun.image.clone().ok_or_else(|| forgotten(&begun))?;
        let images = app.images.clone();
        let version = image.version.map_or(0, NonZeroU32::get);
        let made = ask_for(move || images.size(&image.name, version)).await.map_err(|e| match e.code {
            ErrorCode::NotFound | ErrorCode::Conflict => forgotten(&begun),
            _ => e,
        });
        made?;
        let ended = Operation { state: OperationState::Done, done_bytes: begun.total_bytes, ..begun };
        Ok(Json(ended).into_response())
    }
}

fn forgotten(begun: &Operation) -> HostError {
    let Operation { id, image, what, .. } = begun;
    let image = image.as_ref().map_or_else(|| "its result".to_owned(), ToString::to_string);
    let message = format!(
        "operation {id} ({what}), which this Idempotency-Key has begun, is forgotten, and {image} is not there: take a new key to begin again"
    );
    HostError::new(ErrorCode::Conflict, message)
}

/// Responds with a started operation: when it has ended, if it does so within `wait`.
pub(super) async fn attend(app: &ApiState, begun: Operation, wait: Wait) -> OperationResponse {
    let at_most = wait.at_most()?;
    let now = app.operations.wait(begun.id, Duration::ZERO).await.unwrap_or(begun);
    if now.state.has_ended() || at_most.is_zero() {
        return Ok(respond(now));
    }
    let operations = app.operations.clone();
    Ok(delayed(respond(now.clone()), async move {
        Ok(respond(operations.wait(now.id, at_most).await.unwrap_or(now)))
    }))
}

fn respond(now: Operation) -> Response {
    let status = if now.state.has_ended() { StatusCode::OK } else { StatusCode::ACCEPTED };
    (status, [(header::LOCATION, format!("/v1/operations/{}", now.id))], Json(now)).into_response()
}

/// Begins to commit the disk of a stopped machine of mode `persistent` as a new version. The machine cannot be started
/// meanwhile.
#[utoipa::path(post, path = "/{name}/commits", params(("name" = Name, Path), IdempotencyKey, Wait), request_body = ImageCommit, responses(
    (status = 200, description = "The operation has ended within `wait`; its state says how.", body = Operation),
    (status = 202, description = "The operation continues; `Location` is the path to ask for it.", body = Operation, headers(("Location" = String, description = "Path of the operation on this daemon."))), ProblemResponse
))]
async fn commit_machine(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    note: RequestNote,
    Path(name): Path<Name>,
    key: IdempotencyKey,
    Query(wait): Query<Wait>,
    Body(commit): Body<ImageCommit>,
) -> OperationResponse {
    note.machines([commit.machine.as_str()]);
    let key = key.of(&caller.name, &format!("commits/{name}"), &commit);
    let (machines, once) = (app.machines.clone(), OperationStart { note, key, wait });
    once.begin(app, move |key| machines.commits.begin(&name, &commit, key)).await
}

/// Deletes a version, if it is not in use.
#[utoipa::path(delete, path = "/{name}/versions/{version}", params(("name" = Name, Path), ("version" = u32, Path), IfMatch, DryRun), responses((status = 200, body = Empty), ProblemResponse))]
async fn delete_image_version(
    State(app): State<ApiState>,
    Path((name, version)): Path<(Name, u32)>,
    IfMatch(expected): IfMatch,
    Query(DryRun { dry_run }): Query<DryRun>,
) -> JsonResult<Empty> {
    let terms = ImageChangeTerms { expected, dry_run, is_new: false };
    ask(move || {
        app.machines.reader.check_unused(&name, Some(version))?;
        app.images.delete_version(&name, version, terms).map(|()| Empty {})
    })
    .await
}

/// Begins to read a version again and compare it with its digests.
#[utoipa::path(post, path = "/{name}/versions/{version}/verify", params(("name" = Name, Path), ("version" = u32, Path), Wait), responses(
    (status = 200, description = "The operation has ended within `wait`; its state says how.", body = Operation),
    (status = 202, description = "The operation continues; `Location` is the path to ask for it.", body = Operation, headers(("Location" = String, description = "Path of the operation on this daemon."))), ProblemResponse
))]
async fn verify_image_version(
    State(app): State<ApiState>,
    Path((name, version)): Path<(Name, u32)>,
    Query(wait): Query<Wait>,
) -> OperationResponse {
    wait.at_most()?;
    let images = app.images.clone();
    let begun = ask_for(move || images.verify(&name, version)).await?;
    attend(&app, begun, wait).await
}

/// Checks a version for content that breaks its clones, and reports what firmware finds on its disk. A check takes some
/// seconds, at most 40. Two checks run at a time: if the response would take more than 50 s because of others, it is a
/// `conflict`; the check continues, and a later request gets its result. Results are kept: the same content is checked
/// once.
#[utoipa::path(get, path = "/{name}/versions/{version}/check", params(("name" = Name, Path), ("version" = u32, Path)), responses((status = 200, body = ImageCheck), ProblemResponse))]
async fn check_image_version(
    State(app): State<ApiState>,
    Path((name, version)): Path<(Name, u32)>,
) -> JsonResult<ImageCheck> {
    Ok(Json(app.images.check(&name, version).await?))
}

/// Begins to copy a version from a registry, or to stream it. It has the same number and digest as there. If the host has a copy
/// already, nothing is done. If it streams the version already, its residency is changed; a copy is refused then.
#[utoipa::path(post, path = "/{name}/pulls", params(("name" = Name, Path), IdempotencyKey, Wait), request_body = ImagePull, responses(
    (status = 200, description = "The operation has ended within `wait`; its state says how.", body = Operation),
    (status = 202, description = "The operation continues; `Location` is the path to ask for it.", body = Operation, headers(("Location" = String, description = "Path of the operation on this daemon."))), ProblemResponse
))]
async fn pull_image(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    note: RequestNote,
    Path(name): Path<Name>,
    key: IdempotencyKey,
    Query(wait): Query<Wait>,
    Body(pull): Body<ImagePull>,
) -> OperationResponse {
    let key = key.of(&caller.name, &format!("pulls/{name}"), &pull);
    let (images, registries) = (app.images.clone(), app.registries.clone());
    let once = OperationStart { note, key, wait };
    once.begin(app, move |key| images.pull(&registries, &name, pull, key)).await
}

/// Begins to copy a version to a registry, under the same name and number. A version that the registry has already is sent
/// as far as it is incomplete there.
#[utoipa::path(post, path = "/{name}/versions/{version}/pushes", params(("name" = Name, Path), ("version" = u32, Path), Wait), request_body = ImagePush, responses(
    (status = 200, description = "The operation has ended within `wait`; its state says how.", body = Operation),
    (status = 202, description = "The operation continues; `Location` is the path to ask for it.", body = Operation, headers(("Location" = String, description = "Path of the operation on this daemon."))), ProblemResponse
))]
async fn push_image_version(
    State(app): State<ApiState>,
    Path((name, version)): Path<(Name, u32)>,
    Query(wait): Query<Wait>,
    Body(push): Body<ImagePush>,
) -> OperationResponse {
    wait.at_most()?;
    let (images, registries) = (app.images.clone(), app.registries.clone());
    let begun = ask_for(move || images.push(&registries, &name, version, push)).await?;
    attend(&app, begun, wait).await
}

/// Returns the manifest that a version has in registries, which a signature signs.
#[utoipa::path(get, path = "/{name}/versions/{version}/manifest", params(("name" = Name, Path), ("version" = u32, Path)), responses((status = 200, body = ImageManifest), ProblemResponse))]
async fn get_image_manifest(
    State(app): State<ApiState>,
    Path((name, version)): Path<(Name, u32)>,
) -> JsonResult<ImageManifest> {
    ask(move || app.images.manifest(&name, version)).await
}

/// Publishes a version: requests without a version use this one.
#[utoipa::path(put, path = "/{name}/published", params(("name" = Name, Path), IfMatch, DryRun), request_body = VersionChoice, responses((status = 200, body = Image, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn publish_image_version(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(choice): Body<VersionChoice>,
) -> TaggedImage {
    let terms = ImageChangeTerms { expected, dry_run, is_new: false };
    ask_for(move || app.images.publish(&name, choice.version, terms)).await.map(tagged)
}

/// Sets a tag of an image to a version.
#[utoipa::path(put, path = "/{name}/tags/{tag}", params(("name" = Name, Path), ("tag" = Name, Path), IfMatch, IfNoneMatch, DryRun), request_body = VersionChoice, responses((status = 200, body = Image, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn tag_image_version(
    State(app): State<ApiState>,
    Path((name, tag)): Path<(Name, Name)>,
    IfMatch(expected): IfMatch,
    IfNoneMatch(is_new): IfNoneMatch,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(choice): Body<VersionChoice>,
) -> TaggedImage {
    let terms = ImageChangeTerms { expected, is_new, dry_run };
    ask_for(move || app.images.tag(&name, &tag, choice.version, terms)).await.map(tagged)
}

/// Removes a tag from an image.
#[utoipa::path(delete, path = "/{name}/tags/{tag}", params(("name" = Name, Path), ("tag" = Name, Path), IfMatch, DryRun), responses((status = 200, body = Image, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn untag_image_version(
    State(app): State<ApiState>,
    Path((name, tag)): Path<(Name, Name)>,
    IfMatch(expected): IfMatch,
    Query(DryRun { dry_run }): Query<DryRun>,
) -> TaggedImage {
    let terms = ImageChangeTerms { expected, dry_run, is_new: false };
    ask_for(move || app.images.untag(&name, &tag, terms)).await.map(tagged)
}
