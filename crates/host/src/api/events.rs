//! Routes of events.

use super::App;
use super::extract::Query;
use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, Sse};
use futures_util::stream::{self, Stream};
use serde::Deserialize;
use spillway_api::{Event, List};
use std::collections::VecDeque;
use std::convert::Infallible;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list_events))
}

pub fn stream_routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(follow_events))
}

/// Which events.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Since {
    /// Those after the one with this number; all, if there is none yet with it: then an earlier daemon counted.
    #[serde(default)]
    after: u64,
}

/// What has happened lately.
#[utoipa::path(get, path = "", params(Since), responses((status = 200, body = List<Event>), super::Failure))]
async fn list_events(State(app): State<App>, Query(since): Query<Since>) -> Json<List<Event>> {
    Json(List { items: app.events.after(since.after) })
}

/// What has happened lately, then what happens, as server-sent events: `id` is an event's number, `data` the event. Who
/// connects again says which one was the last (`Last-Event-ID`, or `after`).
#[utoipa::path(get, path = "", params(Since), responses((status = 200, content_type = "text/event-stream", body = String), super::Failure))]
async fn follow_events(
    State(app): State<App>,
    Query(since): Query<Since>,
    headers: HeaderMap,
) -> Sse<impl Stream<Item = Result<sse::Event, Infallible>>> {
    let resumed = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
    let after = resumed.unwrap_or(since.after);
    let state = (app.events.last(), app.events, after, VecDeque::new());
    let events = stream::unfold(state, |(mut last, events, mut after, mut waiting)| async move {
        while waiting.is_empty() {
            // Looked at before the list is: what comes in between wakes us again.
            last.borrow_and_update();
            waiting.extend(events.after(after));
            if waiting.is_empty() {
                last.changed().await.ok()?;
            }
        }
        let event: Event = waiting.pop_front()?;
        after = event.number;
        let text = serde_json::to_string(&event).ok()?;
        let said = sse::Event::default().id(event.number.to_string()).data(text);
        Some((Ok(said), (last, events, after, waiting)))
    });
    Sse::new(events).keep_alive(KeepAlive::default())
}
