//! Routes that show what happens on all hosts of the fleet: events, figures, and where Prometheus finds these.
//!
//! Invariant: a host that does not answer keeps nobody waiting for longer than its deadline.

use super::extract::{Body, Query};
use super::fleets::service;
use super::{ApiState, ProblemResponse};
use crate::access::Peer;
use crate::access::caller::Role;
use crate::error::HostError;
use crate::fleet::events;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures_util::StreamExt;
use serde::Deserialize;
use spillway_api::{
    ErrorCode, Figures, FleetEvent, FleetEventRequest, FleetFigures, HostFigures, List, Name,
    PrometheusTargets, bounds,
};
use std::collections::BTreeMap;
use std::convert::Infallible;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Events that are listed unless another number is asked for.
const USUAL_EVENTS: u64 = 100;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(list_fleet_events))
        .routes(routes!(stream_fleet_events))
        .routes(routes!(get_fleet_figures))
        .routes(routes!(list_prometheus_targets))
}

/// Query parameters of the list of events.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FleetEventQuery {
    /// Largest number of events in the answer; 100 by default.
    limit: Option<u64>,
}

/// Lists the last events of all hosts together, oldest first by the clocks of their hosts. Hosts that do not answer are at the end, with the
/// reasons.
#[utoipa::path(get, path = "/events", params(FleetEventQuery), responses((status = 200, body = List<FleetEvent>), ProblemResponse))]
async fn list_fleet_events(
    State(app): State<ApiState>,
    Query(FleetEventQuery { limit }): Query<FleetEventQuery>,
) -> Result<Json<List<FleetEvent>>, HostError> {
    let limit = limit.unwrap_or(USUAL_EVENTS);
    bounds::LIMIT.check("limit", limit).map_err(|e| HostError::invalid(e.to_string()))?;
    let items = events::newest(service(&app)?, usize::try_from(limit).unwrap_or(usize::MAX)).await;
    Ok(Json(List { items }))
}

/// Streams the events of all hosts as server-sent events; `data` is the host with its event. A client that keeps the id of the last event
/// of each host, and gives them as `after`, goes on where it was, with any host: of each host all later events come, or an event of kind
/// `lost`. Events of different hosts come in the order in which they arrive.
#[utoipa::path(post, path = "/event-stream", request_body = FleetEventRequest, responses((status = 200, content_type = "text/event-stream", body = String), ProblemResponse))]
async fn stream_fleet_events(
    State(app): State<ApiState>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    Body(request): Body<FleetEventRequest>,
) -> Result<Response, HostError> {
    let events = events::follow(service(&app)?.clone(), request);
    let said = |event: FleetEvent| {
        let text = serde_json::to_string(&event).unwrap_or_default();
        Ok::<_, Infallible>(sse::Event::default().data(text))
    };
    let may_read = super::events::may_not_read(peer, headers, Role::Read);
    let stream = events.map(said).take_until(Box::pin(may_read));
    Ok(Sse::new(stream).keep_alive(KeepAlive::default()).into_response())
}

/// Returns the figures of all hosts, by catalog and without single machines. Hosts that do not answer within 3 s have a reason instead.
#[utoipa::path(get, path = "/figures", responses((status = 200, body = FleetFigures), ProblemResponse))]
async fn get_fleet_figures(State(app): State<ApiState>) -> Result<Json<FleetFigures>, HostError> {
    let service = service(&app)?;
    let hosts = service.hosts().await;
    let names: Vec<Name> = hosts.iter().map(|host| host.name.clone()).collect();
    let mut answers: BTreeMap<Name, Result<Figures, String>> =
        service.ask_all(&names, "/v1/figures?machines=false").await.into_iter().collect();
    let hosts = hosts.into_iter().map(|host| {
        let answer = answers.remove(&host.name).unwrap_or_else(|| Err("it was not asked".into()));
        let (figures, unreachable) = match answer {
            Ok(figures) => (Some(figures), None),
            Err(why) => (None, Some(why)),
        };
        HostFigures { host: host.name, zone: host.zone, state: host.state, figures, unreachable }
    });
    Ok(Json(FleetFigures { hosts: hosts.collect() }))
}

/// Lists the hosts for Prometheus (HTTP service discovery). All figures are read through the host that was asked, with the token that was
/// accepted here.
#[utoipa::path(get, path = "/prometheus-targets", responses((status = 200, body = Vec<PrometheusTargets>), ProblemResponse))]
async fn list_prometheus_targets(
    State(app): State<ApiState>,
    headers: HeaderMap,
) -> Result<Json<Vec<PrometheusTargets>>, HostError> {
    let target =
        headers.get(header::HOST).and_then(|host| host.to_str().ok()).filter(|host| !host.is_empty());
    let target = target.ok_or_else(|| HostError::new(ErrorCode::Invalid, "the request has no Host"))?;
    let of = |host: spillway_api::FleetHost| {
        let labels = [
            ("__metrics_path__", format!("/v1/fleet/hosts/{}/api/v1/metrics", host.name)),
            ("instance", host.name.to_string()),
            ("zone", host.zone.to_string()),
        ];
        let labels = labels.into_iter().map(|(name, value)| (name.to_owned(), value));
        PrometheusTargets { targets: vec![target.to_owned()], labels: labels.collect() }
    };
    Ok(Json(service(&app)?.hosts().await.into_iter().map(of).collect()))
}
