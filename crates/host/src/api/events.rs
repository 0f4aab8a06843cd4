//! Routes of events.

use super::extract::Query;
use super::websocket::{Ending, NOT_UNDERSTOOD, Opening, TOO_LONG, Watch, say_goodbye, send};
use super::{ApiState, ask};
use crate::access::Peer;
use crate::access::caller::Role;
use crate::error::HostError;
use crate::events::MOST_AT_ONCE;
use axum::extract::State;
use axum::extract::ws::{Message, WebSocket, close_code};
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures_util::StreamExt;
use futures_util::stream::{self, Stream};
use serde::Deserialize;
use spillway_api::{Event, EventId, List, bounds};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::time::Duration;
use tokio::time::sleep;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// How often it is looked whether who follows the events may still read. A WebSocket's pings do that for it.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// Most events that wait for a client: a client may have many streams, and read none.
const MOST_WAITING: usize = 64;
const NO_MORE: Ending = Ending { code: close_code::ERROR, reason: "the events cannot be read" };

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
    /// Lists the oldest events after the event with this id
    #[serde(default)]
    #[param(value_type = Option<String>)]
    after: Option<EventId>,
    /// Lists the last events before the event with this id
    #[serde(default)]
    #[param(value_type = Option<String>)]
    before: Option<EventId>,
    /// Largest number of events in the answer; 4,096 by default.
    limit: Option<u64>,
}

/// Query parameters of the stream.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct StreamQuery {
    /// Begins after the event with this id
    #[serde(default)]
    #[param(value_type = Option<String>)]
    after: Option<EventId>,
    /// Without `after`: number of past events with which the stream begins; 4,096 by default.
    limit: Option<u64>,
}

fn checked(limit: Option<u64>) -> Result<usize, HostError> {
    let Some(limit) = limit else { return Ok(MOST_AT_ONCE) };
    bounds::LIMIT.check("limit", limit).map_err(|e| HostError::invalid(e.to_string()))?;
    Ok(limit as usize)
}

/// Lists what has happened on the host, oldest first: the last events, those after one, or those before one. Events are kept
/// for a week, also over restarts of the daemon, as long as all of them take at most 64 MiB. A client that repeats the request
/// with the last id as `after` until nothing comes misses no event: if some were removed, the first item is an event of kind
/// `lost`. With the first id as `before` it gets older events, until nothing comes.
#[utoipa::path(get, path = "", params(EventQuery), responses((status = 200, body = List<Event>), super::ProblemResponse))]
async fn list_events(
    State(app): State<ApiState>,
    Query(EventQuery { after, before, limit }): Query<EventQuery>,
) -> Result<Json<List<Event>>, HostError> {
    let most = checked(limit)?;
    // As consoles ask again and again: nothing has to be read.
    if before.is_none() && after.is_some_and(|after| app.events.is_last(after)) {
        return Ok(Json(List { items: Vec::new() }));
    }
    let items = move || match (after, before) {
        (None, None) => Ok(app.events.newest(most).1),
        (Some(after), None) => Ok(app.events.after(after, most)),
        (None, Some(before)) => app.events.before(before, most),
        (Some(_), Some(_)) => Err(HostError::invalid("give after or before, not both")),
    };
    ask(move || Ok(List { items: items()? })).await
}

/// Streams past and new events as server-sent events: `id` is an event's id, `data` the event. A client that reconnects
/// gives the last id (`Last-Event-ID`, or `after`) and gets all later events, also those from before a restart of the
/// daemon. If some of these were removed, the first event is of kind `lost`. A request for a WebSocket gets one, with the
/// same events as text messages; the client sends nothing.
#[utoipa::path(get, path = "", params(StreamQuery), responses((status = 200, content_type = "text/event-stream", body = String), (status = 101, description = "The connection is a WebSocket."), super::ProblemResponse))]
async fn stream_events(
    State(app): State<ApiState>,
    Query(StreamQuery { after, limit }): Query<StreamQuery>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    asked: Option<Opening>,
) -> Result<Response, HostError> {
    let most = checked(limit)?;
    let resumed = headers.get("last-event-id").map(|id| {
        // An id that is not ours matches no known event.
        id.to_str().ok().and_then(|id| id.parse().ok()).unwrap_or(EventId { history: 0, number: 0 })
    });
    let events = follow(&app, resumed.or(after), most);
    Ok(match asked {
        Some(asked) => tell(asked, events),
        None => {
            let said = |(id, text): (EventId, String)| {
                Ok::<_, Infallible>(sse::Event::default().id(id.to_string()).data(text))
            };
            Sse::new(events.map(said).take_until(Box::pin(may_not_read(peer, headers, Role::Read))))
                .keep_alive(KeepAlive::default())
                .into_response()
        }
    })
}

/// Waits until who asks may not read any more: the token or the session is gone.
pub(super) async fn may_not_read(peer: Peer, headers: HeaderMap, role: Role) {
    while peer.may(&headers, role) {
        sleep(LOOK_AGAIN).await;
    }
}

/// The events after this one, or the last ones, and those that happen from now on, as JSON.
fn follow(
    app: &ApiState,
    after: Option<EventId>,
    most: usize,
) -> impl Stream<Item = (EventId, String)> + use<> {
    let state = (app.events.last(), app.events.clone(), app.stream_reads.clone(), after, VecDeque::new());
    stream::unfold(state, move |(mut last, events, reads, mut after, mut waiting)| async move {
        while waiting.is_empty() {
            // Mark the value as seen before the list is read: an event in between wakes us again.
            last.borrow_and_update();
            let past = events.clone();
            // The events may have to be read from the disk.
            let read = move || match after {
                Some(after) => (after, past.after(after, MOST_WAITING)),
                // Where they begin. They are read from there, few at a time, as the client takes them.
                None => (past.before_newest(most), Vec::new()),
            };
            let has_begun = after.is_some();
            let (read_to, found) = reads.blocking(read).await.ok()?;
            after = Some(read_to);
            waiting.extend(found);
            if has_begun && waiting.is_empty() {
                last.changed().await.ok()?;
            }
        }
        let event: Event = waiting.pop_front()?;
        after = Some(event.id);
        let text = serde_json::to_string(&event).ok()?;
        Some(((event.id, text), (last, events, reads, after, waiting)))
    })
}

/// Lets a connection become a WebSocket that tells of events.
fn tell(asked: Opening, events: impl Stream<Item = (EventId, String)> + Send + 'static) -> Response {
    let Opening { upgrade, peer, headers, .. } = asked;
    upgrade.on_upgrade(async move |mut socket| {
        let mut watch = Watch::new(peer, headers, Role::Read, None);
        let ending = send_events(&mut socket, pin!(events), &mut watch).await;
        say_goodbye(socket, ending, watch).await;
    })
}

/// Sends events until the WebSocket ends. Returns why it does; `None`: the client has ended.
async fn send_events(
    socket: &mut WebSocket,
    mut events: Pin<&mut impl Stream<Item = (EventId, String)>>,
    watch: &mut Watch,
) -> Option<Ending> {
    loop {
        let step = tokio::select! {
            event = events.next() => match event {
                Some((_, text)) => send(socket, Message::Text(text.into())).await,
                None => Err(Some(NO_MORE)),
            },
            message = socket.recv() => {
                watch.is_answered = true;
                match message {
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => Ok(()),
                    Some(Ok(Message::Text(_) | Message::Binary(_))) => Err(Some(NOT_UNDERSTOOD)),
                    Some(Err(_)) => Err(Some(TOO_LONG)),
                    Some(Ok(Message::Close(_))) | None => Err(None),
                }
            }
            due = watch.due() => match due {
                Ok(()) => watch.ping(socket, false).await,
                ending => ending,
            },
        };
        if let Err(ending) = step {
            return ending;
        }
    }
}
