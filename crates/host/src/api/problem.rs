//! Problem details (RFC 9457): bodies of error responses, and routes that describe the kinds of problems.
//!
//! Invariant: every response with a status of 400 or higher has a body of type `application/problem+json`, whoever made
//! the response.

use super::extract::Path;
use super::{ApiState, ProblemResponse};
use crate::error::HostError;
use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use spillway_api::{ErrorCode, List, PROBLEM_JSON, Problem, ProblemType};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Longest path that a problem contains.
const MAX_INSTANCE_BYTES: usize = 1024;
/// Seconds after which a request that was refused because of others may be repeated.
const RETRY_AFTER: &str = "1";

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(list_problem_types)).routes(routes!(get_problem_type))
}

/// Lists the kinds of problems that error responses can have, in the order of their statuses.
#[utoipa::path(get, path = "", responses((status = 200, body = List<ProblemType>), ProblemResponse))]
async fn list_problem_types() -> Json<List<ProblemType>> {
    Json(List { items: ErrorCode::ALL.map(ErrorCode::describe).into() })
}

/// Describes a kind of problem: the `type` of a problem leads here.
#[utoipa::path(get, path = "/{code}", params(("code" = ErrorCode, Path)), responses((status = 200, body = ProblemType), ProblemResponse))]
async fn get_problem_type(Path(code): Path<ErrorCode>) -> Json<ProblemType> {
    Json(code.describe())
}

impl IntoResponse for HostError {
    /// Responds with the status and the problem; `complete` adds the path and makes the body.
    fn into_response(self) -> Response {
        let problem = self.problem();
        let mut response = status(&problem).into_response();
        response.extensions_mut().insert(problem);
        response
    }
}

fn status(problem: &Problem) -> StatusCode {
    StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// Gives each error response its body. Responses of libraries contain nothing but their status.
pub async fn complete(request: Request, next: Next) -> Response {
    let path = Some(request.uri().path()).filter(|path| path.len() <= MAX_INSTANCE_BYTES).map(str::to_owned);
    let mut response = next.run(request).await;
    let found = response.status();
    let is_complete = response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == PROBLEM_JSON);
    if !found.is_client_error() && !found.is_server_error() || is_complete {
        return response;
    }
    let problem = response.extensions_mut().remove::<Problem>().unwrap_or_else(|| {
        let reason = found.canonical_reason().unwrap_or("no reason is known");
        let detail = format!("the request was refused: {reason}");
        Problem { status: found.as_u16(), ..Problem::new(ErrorCode::of_status(found.as_u16()), detail) }
    });
    let body = serde_json::to_vec(&Problem { instance: path, ..problem.clone() });
    let (mut parts, _) = response.into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    parts.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
    match problem.code {
        ErrorCode::Unauthenticated => {
            parts
                .headers
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"spillwayd\""));
        }
        ErrorCode::Busy => {
            parts.headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
        }
        _ => {}
    }
    Response::from_parts(parts, Body::from(body.expect("a problem is plain data")))
}
