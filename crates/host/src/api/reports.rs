//! Routes of the lab's reports.

use super::extract::{PageQuery, Path, Query, part, select};
use super::{ApiState, ProblemResponse, ask, ask_for};
use crate::error::HostError;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderName, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use spillway_api::{Name, Page, Report};
use std::io::{self, Read};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// A report is a page of its own origin without scripts, whatever is in it. Its charts and styles are in the page.
const HEADERS: [(HeaderName, &str); 5] = [
    (header::CONTENT_TYPE, "text/html; charset=utf-8"),
    (
        header::CONTENT_SECURITY_POLICY,
        "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::CACHE_CONTROL, "no-cache"),
    (header::REFERRER_POLICY, "no-referrer"),
];

/// Bytes that are read at a time.
const PIECE_BYTES: u64 = 64 << 10;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(list_reports)).routes(routes!(get_report))
}

/// Lists the reports of `spillway lab` that are kept in the daemon's state folder, by name.
#[utoipa::path(get, path = "", params(PageQuery), responses((status = 200, body = Page<Report>), ProblemResponse))]
async fn list_reports(
    State(app): State<ApiState>,
    Query(mut pairs): Query<Vec<(String, String)>>,
) -> Result<Json<Page<Report>>, HostError> {
    let part = part(&mut pairs)?;
    select(pairs, &[])?;
    ask(move || app.reports.page(&part)).await
}

/// Returns the page of a report. It is sandboxed: it runs no scripts, and loads nothing.
#[utoipa::path(get, path = "/{name}/report.html", params(("name" = Name, Path)), responses((status = 200, content_type = "text/html", body = String), ProblemResponse))]
async fn get_report(State(app): State<ApiState>, Path(name): Path<Name>) -> Result<Response, HostError> {
    let (reports, reads) = (app.reports.clone(), app.stream_reads.clone());
    let (report, file) = ask_for(move || reports.html(&name)).await?;
    // In pieces, each when the client has taken the last.
    let pieces = stream::unfold(Some((file, report.bytes)), move |state| {
        let reads = reads.clone();
        async move {
            let (mut file, left) = state.filter(|(_, left)| *left > 0)?;
            let read = reads.blocking(move || {
                let mut piece = vec![0; left.min(PIECE_BYTES) as usize];
                file.read_exact(&mut piece).map(|()| (file, piece))
            });
            match read.await.unwrap_or_else(|e| Err(io::Error::other(e))) {
                Ok((file, piece)) => {
                    let left = left - piece.len() as u64;
                    Some((Ok(piece), Some((file, left))))
                }
                Err(e) => Some((Err(e), None)),
            }
        }
    });
    Ok((HEADERS, Body::from_stream(pieces)).into_response())
}
