//! The daemon's HTTP API: routes, requests and responses. Owns no state: asks the parts that do, on threads for blocking
//! work.
//!
//! Invariant: every response but 2xx contains a [`spillway_api::Problem`]; client data is bounded and checked
//! before use.

#![expect(unused_qualifications, reason = "the macro of routes writes paths in full")]

mod catalogs;
mod claims;
mod conditions;
mod consoles;
mod document;
mod events;
mod extract;
mod figures;
mod fleet;
mod fleet_claims;
mod fleet_images;
mod fleet_metrics;
mod fleet_seeing;
mod fleets;
mod guests;
mod host;
mod images;
mod leftovers;
mod machines;
mod metrics;
mod operations;
mod pages;
mod problem;
mod registries;
mod relay;
mod reports;
mod session;
mod stores;
mod websocket;

pub use figures::FigureAnswers;
pub use metrics::ResponseCounters;
pub use problem::complete;

use crate::access;
use crate::access::audit::Audit;
use crate::backup::StateStore;
use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::events::Events;
use crate::fleet::FleetService;
use crate::fleet::claims::FleetClaims;
use crate::fleet::door::FleetDoor;
use crate::idempotency::Idempotency;
use crate::images::Images;
use crate::machines::Machines;
use crate::operations::Operations;
use crate::registries::{Downloads, Registries};
use crate::reports::Reports;
use crate::stores::Stores;
use crate::work::{self, BoundedWork};
use axum::extract::DefaultBodyLimit;
use axum::http::Uri;
use axum::middleware;
use axum::{Extension, Json, Router};
use document::Security;
use serde::Serialize;
use spillway_api::{ErrorCode, PROBLEM_TYPES, Problem};
use std::sync::Arc;
use utoipa::{IntoResponses, OpenApi};
use utoipa_axum::router::OpenApiRouter;

/// Longest request body.
const MAX_REQUEST_BYTES: usize = 256 << 10;

/// Reads from disks, at a time, for responses that are under way.
pub const MOST_STREAM_READS: usize = 16;

/// Parts of the daemon that routes use. A clone is the same: each request has one.
pub type ApiState = Arc<ApiParts>;

/// Parts of the daemon that routes use.
pub struct ApiParts {
    /// The audit log.
    pub audit: Audit,
    /// Counters of responses.
    pub answered: ResponseCounters,
    /// The catalogs.
    pub catalogs: Catalogs,
    /// Downloads of images.
    pub downloads: Downloads,
    /// The events.
    pub events: Events,
    /// The fleet that the host is in, if it is in one.
    pub fleet: Option<Arc<FleetDoor>>,
    /// Claims of machines of that fleet.
    pub fleet_claims: Option<FleetClaims>,
    /// What the host does for that fleet.
    pub fleet_service: Option<FleetService>,
    /// Answers to questions for figures.
    pub figure_answers: FigureAnswers,
    /// Answers to requests with idempotency keys.
    pub idempotency: Idempotency,
    /// The images.
    pub images: Images,
    /// The machines.
    pub machines: Machines,
    /// The operations.
    pub operations: Operations,
    /// The registries.
    pub registries: Registries,
    /// The reports of the lab.
    pub reports: Reports,
    /// The records, for backups.
    pub state: StateStore,
    /// The store folders.
    pub stores: Stores,
    /// Reads from disks for responses that are under way.
    pub stream_reads: BoundedWork,
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "spillwayd",
        description = "Images, catalogs and machines of a host. `docs/api.md` has the rules that all requests share."
    ),
    tags(
        (name = "catalogs", description = "Sets of machines made from one image version, and their rollouts."),
        (name = "claims", description = "Exclusive use of machines for a limited time."),
        (name = "events", description = "What has happened on the host, and what happens."),
        (name = "figures", description = "Counters and gauges of all disks, as JSON and for Prometheus."),
        (name = "fleet", description = "Other hosts of the fleet: whether they are reached, and requests that are passed on to them."),
        (name = "history", description = "What the figures of the last hour and day were."),
        (name = "host", description = "The host itself: its budget, its state, and backups of its records."),
        (name = "images", description = "Images, their versions, and what is made of them."),
        (name = "leftovers", description = "Files that deleted machines have kept."),
        (name = "machines", description = "Machines of the catalogs: their state, actions and claims."),
        (name = "operations", description = "Work that continues after the request that began it."),
        (name = "problem-types", description = "Kinds of problems that error responses can have."),
        (name = "registries", description = "Buckets, folders and web servers with images that hosts share."),
        (name = "reports", description = "Reports of the lab that are kept on the host."),
        (name = "session", description = "Who the caller is, and the cookies that stand for tokens in browsers."),
        (name = "stores", description = "Folders that hold images and disks."),
    ),
    security((), ("bearerToken" = []), ("sessionCookie" = [])),
    modifiers(&Security)
)]
struct Document;

/// Error response of every route.
#[derive(IntoResponses)]
#[response(
    status = "default",
    description = "The request was not carried out; the body says why.",
    content_type = "application/problem+json"
)]
#[expect(dead_code, reason = "for the document")]
struct ProblemResponse(Problem);

fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::with_openapi(Document::openapi())
        .nest("/v1/catalogs", catalogs::routes().merge(claims::catalog_routes()))
        .nest("/v1/events", events::routes())
        .nest("/v1/event-stream", events::stream_routes())
        .nest("/v1/figures", figures::routes())
        .nest(
            "/v1/fleet",
            fleet::routes()
                .merge(fleets::routes())
                .merge(fleet_images::routes())
                .merge(fleet_claims::routes())
                .merge(fleet_seeing::routes()),
        )
        .nest("/v1/history", figures::history_routes())
        .nest("/v1/host", host::routes())
        .nest("/v1/images", images::routes())
        .nest("/v1/leftovers", leftovers::routes())
        .nest("/v1/machine-actions", machines::action_routes())
        .nest(
            "/v1/machines",
            machines::routes()
                .merge(claims::machine_routes())
                .merge(consoles::routes())
                .merge(guests::routes()),
        )
        .nest("/v1/metrics", metrics::metric_routes())
        .nest("/v1/operations", operations::routes())
        .nest(PROBLEM_TYPES, problem::routes())
        .nest("/v1/registries", registries::routes())
        .nest("/v1/reports", reports::routes())
        .nest("/v1/session", session::routes())
        .nest("/v1/stores", stores::routes())
}

/// Routes for callers who are not known yet.
fn open_routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().nest("/v1/session", session::open_routes())
}

/// Returns the OpenAPI document as JSON.
pub fn document() -> String {
    let (_, mut api) = routes().merge(relay::routes()).merge(open_routes()).split_for_parts();
    document::complete(&mut api);
    api.to_pretty_json().expect("the document is plain data")
}

/// Creates the router of the API.
pub fn router(app: ApiState) -> Router {
    let (router, _) = routes().split_for_parts();
    let (open, _) = open_routes().split_for_parts();
    let nowhere = |uri: Uri| async move {
        HostError::new(ErrorCode::NotFound, format!("there is nothing at {}", uri.path()))
    };
    let not_so = |uri: Uri| async move {
        HostError::new(ErrorCode::MethodNotAllowed, format!("{} does not take this method", uri.path()))
    };
    let guard = middleware::from_fn_with_state(app.audit.clone(), access::guard);
    let own = router
        .fallback(nowhere)
        .method_not_allowed_fallback(not_so)
        .layer(DefaultBodyLimit::max(MAX_REQUEST_BYTES))
        .layer(guard.clone())
        .merge(session::bounded(open))
        .merge(pages::routes())
        .layer(middleware::from_fn(problem::complete))
        .with_state(Arc::clone(&app));
    let (relay, _) = relay::routes().split_for_parts();
    let relay = relay
        .method_not_allowed_fallback(not_so)
        .layer(Extension(relay::OwnRoutes(own.clone())))
        .layer(guard)
        .layer(middleware::from_fn(problem::complete))
        .with_state(Arc::clone(&app));
    own.merge(relay).layer(middleware::from_fn_with_state(app.answered.clone(), metrics::count))
}

/// Calls a part of the daemon on a thread for blocking work, and responds with the result.
async fn ask<T: Serialize + Send + 'static>(
    question: impl FnOnce() -> Result<T, HostError> + Send + 'static,
) -> Result<Json<T>, HostError> {
    ask_for(question).await.map(Json)
}

/// Does the same for a result that is not a response.
async fn ask_for<T: Send + 'static>(
    question: impl FnOnce() -> Result<T, HostError> + Send + 'static,
) -> Result<T, HostError> {
    let answer = work::blocking(question).await;
    let broken =
        |e| HostError::new(ErrorCode::Internal, format!("a fault of the daemon ({e}): please report this"));
    answer.map_err(broken)?
}
