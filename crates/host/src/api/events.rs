//! Routes of events.

use super::extract::Query;
use super::{ApiState, ask};
use crate::error::HostError;
use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, Sse};
use futures_util::stream::{self, Stream};
use serde::Deserialize;
use spillway_api::{Event, EventId, List};
use std::collections::VecDeque;
use std::convert::Infallible;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(list_events))
}

pub fn stream_routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(stream_events))
}

/// Query parameters that select events.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct EventQuery {
    /// Lists the oldest 4,096 events after the event with this id; the last 4,096 if it is left out
    #[serde(default)]
    #[param(value_type = Option<String>)]
    after: Option<EventId>,
}

/// Lists what has happened on the host, oldest first. Events are kept for a week, also over restarts of the daemon, as
/// long as all of them take at most 64 MiB. If some of the selected events were removed, the first item is an event of
/// kind `lost`. A client that repeats the request with the last id until nothing comes misses no event.
#[utoipa::path(get, path = "", params(EventQuery), responses((status = 200, body = List<Event>), super::ProblemResponse))]
async fn list_events(
    State(app): State<ApiState>,
    Query(since): Query<EventQuery>,
) -> Result<Json<List<Event>>, HostError> {
    ask(move || Ok(List { items: app.events.after(since.after) })).await
}

/// Streams past and new events as server-sent events: `id` is an event's id, `data` the event. A client that reconnects
/// gives the last id (`Last-Event-ID`, or `after`) and gets all later events, also those from before a restart of the
/// daemon. If some of these were removed, the first event is of kind `lost`.
#[utoipa::path(get, path = "", params(EventQuery), responses((status = 200, content_type = "text/event-stream", body = String), super::ProblemResponse))]
async fn stream_events(
    State(app): State<ApiState>,
    Query(since): Query<EventQuery>,
    headers: HeaderMap,
) -> Sse<impl Stream<Item = Result<sse::Event, Infallible>>> {
    let resumed = headers.get("last-event-id").map(|id| {
        // An id that is not ours matches no known event.
        id.to_str().ok().and_then(|id| id.parse().ok()).unwrap_or(EventId { history: 0, number: 0 })
    });
    let after = resumed.or(since.after);
    let state = (app.events.last(), app.events, app.stream_reads, after, VecDeque::new());
    let events = stream::unfold(state, |(mut last, events, reads, mut after, mut waiting)| async move {
        while waiting.is_empty() {
            // Mark the value as seen before the list is read: an event in between wakes us again.
            last.borrow_and_update();
            let (past, after) = (events.clone(), after);
            // The events may have to be read from the disk.
            waiting.extend(reads.blocking(move || past.after(after)).await.ok()?);
            if waiting.is_empty() {
                last.changed().await.ok()?;
            }
        }
        let event: Event = waiting.pop_front()?;
        after = Some(event.id);
        let text = serde_json::to_string(&event).ok()?;
        let said = sse::Event::default().id(event.id.to_string()).data(text);
        Some((Ok(said), (last, events, reads, after, waiting)))
    });
    Sse::new(events).keep_alive(KeepAlive::default())
}
