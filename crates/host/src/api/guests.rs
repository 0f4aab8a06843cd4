//! Routes of guests: programs that run in them, and files that are written and read.
//!
//! Invariant: arguments, variables, input and content are in no log: they may be secret.

use super::extract::{Path, Query, SecretBody, raw_body};
use super::{ApiState, ProblemResponse};
use crate::access::delay::delayed;
use crate::access::note::RequestNote;
use crate::error::HostError;
use crate::machines::{FilePlace, GuestCall};
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::json;
use spillway_api::{
    GuestFile, GuestProgram, GuestProgramResult, MOST_GUEST_FILE_BYTES, MOST_GUEST_PATH_BYTES, Name,
};
use std::time::Duration;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type};
use utoipa::{IntoParams, PartialSchema, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Longest time until a file is received.
const BODY: Duration = Duration::from_secs(60);

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(run_machine_program))
        .routes(routes!(replace_machine_file, get_machine_file))
}

/// Bytes of a file, for the OpenAPI document.
struct FileContent;

impl PartialSchema for FileContent {
    fn schema() -> RefOr<Schema> {
        let binary = SchemaFormat::KnownFormat(KnownFormat::Binary);
        ObjectBuilder::new().schema_type(Type::String).format(Some(binary)).into()
    }
}

impl ToSchema for FileContent {}

/// Which file.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FileQuery {
    /// Path of the file in the guest, as its agent opens it: 1 to 4096 bytes.
    #[param(min_length = 1, max_length = 4096)]
    path: String,
}

impl FileQuery {
    fn checked(self) -> Result<String, HostError> {
        match (1..=MOST_GUEST_PATH_BYTES).contains(&self.path.len()) && !self.path.contains('\0') {
            true => Ok(self.path),
            false => {
                let most = MOST_GUEST_PATH_BYTES;
                Err(HostError::invalid(format!(
                    "path: give the path of a file, of 1 to {most} bytes without zero bytes"
                )))
            }
        }
    }
}

/// Runs a program in a machine's guest by the guest agent, which needs the role `operate`. The response comes when the program has
/// ended, or its time limit is over. `conflict`: the machine does not run, its VMM is external, the agent refuses, or the machine
/// or its guest was stopped, restarted or reset meanwhile. `unavailable`: no agent answers, or the result was lost; the problem says
/// whether the program may have been started. `busy`: 8 calls of this machine, or 64 of all, are under way.
#[utoipa::path(post, path = "/{name}/exec", params(("name" = Name, Path)), request_body = GuestProgram, responses((status = 200, body = GuestProgramResult), ProblemResponse))]
async fn run_machine_program(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    note: RequestNote,
    SecretBody(program): SecretBody<GuestProgram>,
) -> Result<Response, HostError> {
    note.asked(
        &json!({ "program": program.argv.first(), "time_limit_seconds": program.time_limit().as_secs() }),
    );
    let call = app.machines.guests.call(&name).await?;
    let started = call.start(&program).await?;
    let limit = program.time_limit();
    drop(program);
    // The program runs, whoever waits for its end.
    Ok(delayed(StatusCode::OK, async move { call.wait(started, limit).await.map(Json) }))
}

/// Writes a file of at most 16 MiB in a machine's guest by the guest agent, in place of what it had, which needs the role `operate`.
/// If that fails the file may have a part of the content. Files of a machine are written and read one after the other. The problems
/// are those of `exec`; `too_large`: the content has more bytes; `busy`: also if files of this or other machines take the place of
/// this one.
#[utoipa::path(put, path = "/{name}/files", params(("name" = Name, Path), FileQuery), request_body(content = inline(FileContent), content_type = "application/octet-stream"), responses((status = 200, body = GuestFile), ProblemResponse))]
async fn replace_machine_file(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    Query(query): Query<FileQuery>,
    request: Request,
) -> Result<Json<GuestFile>, HostError> {
    let path = query.checked()?;
    let call = app.machines.guests.call(&name).await?;
    let _place = call.file_place().await?;
    let content = raw_body(request.into_body(), MOST_GUEST_FILE_BYTES, BODY).await?;
    call.write(&path, &content).await?;
    Ok(Json(GuestFile { path, bytes: content.len() as u64 }))
}

/// Reads a file of at most 16 MiB in a machine's guest by the guest agent, which needs the role `operate`. The problems are those of
/// `exec`; `not_found`: the agent says that there is no such file; `conflict`: it is larger, or does not end.
#[utoipa::path(get, path = "/{name}/files", params(("name" = Name, Path), FileQuery), responses(
    (status = 200, content_type = "application/octet-stream", body = inline(FileContent)), ProblemResponse
))]
async fn get_machine_file(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    Query(query): Query<FileQuery>,
) -> Result<Response, HostError> {
    let path = query.checked()?;
    let call = app.machines.guests.call(&name).await?;
    let place = call.file_place().await?;
    let content = call.read(&path).await?;
    let body = Body::from(Bytes::from_owner(HeldContent { content, _place: place, _call: call }));
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], body).into_response())
}

/// The content of a file until it is sent.
struct HeldContent {
    content: Vec<u8>,
    _place: FilePlace,
    _call: GuestCall,
}

impl AsRef<[u8]> for HeldContent {
    fn as_ref(&self) -> &[u8] {
        &self.content
    }
}
