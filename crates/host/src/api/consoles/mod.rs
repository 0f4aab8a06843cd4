//! WebSockets to what a machine shows: its serial console, and its screen. Owns what is passed on, and the rules that both
//! share: the origin of the page that asks, pings, the end.
//!
//! Invariant: each WebSocket has a line in the audit log when it opens and another one when it ends, and it is closed with
//! code 1001 and a reason when the machine's run ends. What waits for a slow side is bounded.

use super::extract::Path;
use super::{ApiState, ProblemResponse, ask_for};
use crate::access::Peer;
use crate::access::act::RequestAction;
use crate::access::audit::{Audit, RequestOutcome};
use crate::access::caller::{Caller, Role};
use crate::access::note::AuditNotes;
use crate::error::HostError;
use crate::machines::console::{ClientPlace, ConsoleClient, Screen, View};
use axum::Extension;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, WebSocketUpgrade, close_code};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::Response;
use serde::Deserialize;
use spillway_api::{ErrorCode, Name};
use spillway_control::console::{FromHub, Keyboard, MAX_DATA_BYTES, ToHub};
use std::collections::VecDeque;
use std::time::Duration;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Longest message of a client.
const MAX_MESSAGE_BYTES: usize = 16 << 10;
/// Most bytes of a screen in one message.
const SCREEN_BYTES: usize = 32 << 10;
/// Interval of pings. A client that answers none until the next one is due has ended.
const PING: Duration = Duration::from_secs(30);
/// Longest wait for the client's part of the closing handshake.
const GOODBYE: Duration = Duration::from_secs(2);
/// The subprotocol of a screen, as noVNC and websockify name it.
const BINARY: &str = "binary";

/// Why a WebSocket ends.
struct Ending {
    code: u16,
    reason: &'static str,
}

const RUN_ENDED: Ending = Ending { code: close_code::AWAY, reason: "the machine's run has ended" };
const NO_ANSWER: Ending = Ending { code: close_code::POLICY, reason: "the client does not answer pings" };
const NO_RIGHT: Ending = Ending { code: close_code::POLICY, reason: "the session has ended, or its token" };
const REPLACED: Ending =
    Ending { code: close_code::AGAIN, reason: "the connection is needed for a newer one" };
const NOT_UNDERSTOOD: Ending = Ending {
    code: close_code::UNSUPPORTED,
    reason: "a message is not understood: see docs/api.md for what this WebSocket takes",
};
const TOO_LONG: Ending =
    Ending { code: close_code::SIZE, reason: "a message is longer than 16 KiB, or the connection is broken" };
const CROWDED: Ending =
    Ending { code: close_code::AGAIN, reason: "the console has as many clients as it can have" };

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(open_machine_console)).routes(routes!(open_machine_screen))
}

/// Opens a machine's serial console as a WebSocket, which requires the role `operate`. The daemon sends what the guest has
/// written, at most the last 256 KiB, and then what it writes, as binary messages, and `{"keyboard": "yours"}`, `"free"` or
/// `"taken"` as text at the start and at each change. The client sends keys as binary messages, which count if the keyboard
/// is its own or free, and `{"take": true}` to take it. `{"lost": N}`: N bytes were lost, because the client reads too
/// slowly. The daemon closes with code 1001 when the machine's run ends.
#[utoipa::path(get, path = "/{name}/console", params(("name" = Name, Path)), responses((status = 101, description = "The connection is a WebSocket."), ProblemResponse))]
async fn open_machine_console(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    Extension(caller): Extension<Caller>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, HostError> {
    let upgrade = check(&headers, upgrade)?;
    let (folder, place) = admit(&app, &name, View::Console).await?;
    let client = ConsoleClient::connect(&folder).map_err(|e| unreachable_view(&name, "console", &e))?;
    let relay = Relay { audit: app.audit, caller, peer, name, view: View::Console, _place: place };
    Ok(upgrade.on_upgrade(async move |mut socket| {
        let ending = relay_console(&mut socket, &client, &relay.peer, headers).await;
        relay.end(socket, ending).await;
    }))
}

/// Opens a machine's screen as a WebSocket, which requires the role `operate` and a catalog whose `display` is `vnc`. Both
/// sides send the RFB protocol (RFC 6143) as binary messages; the subprotocol is `binary`. The daemon closes with code 1001
/// when the machine's run ends.
#[utoipa::path(get, path = "/{name}/screen", params(("name" = Name, Path)), responses((status = 101, description = "The connection is a WebSocket."), ProblemResponse))]
async fn open_machine_screen(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    Extension(caller): Extension<Caller>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, HostError> {
    let upgrade = check(&headers, upgrade)?.protocols([BINARY]);
    let (folder, place) = admit(&app, &name, View::Screen).await?;
    let screen = Screen::connect(&folder).await.map_err(|e| unreachable_view(&name, "screen", &e))?;
    let relay = Relay { audit: app.audit, caller, peer, name, view: View::Screen, _place: place };
    Ok(upgrade.on_upgrade(async move |mut socket| {
        let ending = relay_screen(&mut socket, &screen, &relay.peer, headers).await;
        relay.end(socket, ending).await;
    }))
}

/// Refuses what is no WebSocket, and what a page of another origin has opened: a browser lets any page do that, with the
/// cookies of this daemon's.
fn check(
    headers: &HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<WebSocketUpgrade, HostError> {
    if !is_same_origin(headers) {
        let message = "a page of another origin may not open this: open it from the daemon's own console";
        return Err(HostError::new(ErrorCode::Forbidden, message));
    }
    let upgrade =
        upgrade.map_err(|e| HostError::invalid(format!("this is a WebSocket: {}", e.body_text())))?;
    Ok(upgrade.max_message_size(MAX_MESSAGE_BYTES).max_frame_size(MAX_MESSAGE_BYTES))
}

/// Whether the header `Origin` is absent, or has the host and port of the header `Host`.
fn is_same_origin(headers: &HeaderMap) -> bool {
    let mut origins = headers.get_all(header::ORIGIN).iter();
    let Some(origin) = origins.next() else { return true };
    let (Ok(origin), Some(Ok(host))) = (origin.to_str(), headers.get(header::HOST).map(|host| host.to_str()))
    else {
        return false;
    };
    let authority = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
    origins.next().is_none() && authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
}

async fn admit(
    app: &ApiState,
    name: &Name,
    view: View,
) -> Result<(std::path::PathBuf, ClientPlace), HostError> {
    let (consoles, name) = (app.machines.consoles.clone(), name.clone());
    ask_for(move || consoles.admit(&name, view)).await
}

fn unreachable_view(name: &Name, view: &str, error: &std::io::Error) -> HostError {
    HostError::new(ErrorCode::Unavailable, format!("the {view} of {name} cannot be reached: {error}"))
}

/// What belongs to a WebSocket until its end.
struct Relay {
    audit: Audit,
    caller: Caller,
    peer: Peer,
    name: Name,
    view: View,
    _place: ClientPlace,
}

impl Relay {
    /// Closes the WebSocket, and writes the line of its end.
    async fn end(self, mut socket: WebSocket, ending: Option<Ending>) {
        let act = RequestAction {
            verb: format!("close {} of", self.view.word()),
            ..RequestAction::of(&Method::GET, &format!("/v1/machines/{}/{}", self.name, self.view.word()))
        };
        let status = StatusCode::SWITCHING_PROTOCOLS.as_u16();
        let outcome = RequestOutcome { status, code: None, let_in: true };
        let (audit, caller) = (self.audit.clone(), self.caller.clone());
        let written = tokio::task::spawn_blocking(move || {
            audit.write(&caller, &act, AuditNotes::default(), outcome);
        });
        let _ = written.await;
        let goodbye = async {
            let Some(Ending { code, reason }) = ending else { return };
            let frame = CloseFrame { code, reason: Utf8Bytes::from_static(reason) };
            let _ = socket.send(Message::Close(Some(frame))).await;
            while let Some(Ok(_)) = socket.recv().await {}
        };
        let _ = tokio::time::timeout(GOODBYE, goodbye).await;
    }
}

/// Pings a client, and notices that it does not answer, or may not look and type any more.
struct Pings<'a> {
    due: Interval,
    is_answered: bool,
    peer: &'a Peer,
    /// The request's, which say who the client is.
    headers: HeaderMap,
}

impl Pings<'_> {
    fn new(peer: &Peer, headers: HeaderMap) -> Pings<'_> {
        let mut due = interval_at(Instant::now() + PING, PING);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Pings { due, is_answered: true, peer, headers }
    }

    /// Sends the next ping. Returns why the WebSocket ends, if it does.
    async fn next(&mut self, socket: &mut WebSocket) -> Result<(), Option<Ending>> {
        if !self.peer.known.as_ref().is_none_or(|known| known.may(&self.headers, Role::Operate)) {
            return Err(Some(NO_RIGHT));
        }
        if !std::mem::replace(&mut self.is_answered, false) {
            return Err(Some(NO_ANSWER));
        }
        send(socket, Message::Ping(axum::body::Bytes::new())).await
    }
}

/// Sends a message. An error: the client has ended.
async fn send(socket: &mut WebSocket, message: Message) -> Result<(), Option<Ending>> {
    socket.send(message).await.map_err(|_| None)
}

/// A message of a client for a console.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConsoleCommand {
    take: bool,
}

/// Passes a console on until it ends. Returns why it does; `None`: the client has ended.
async fn relay_console(
    socket: &mut WebSocket,
    client: &ConsoleClient,
    peer: &Peer,
    headers: HeaderMap,
) -> Option<Ending> {
    let mut pings = Pings::new(peer, headers);
    // What waits for the hub, which waits for the guest. No further message is received meanwhile.
    let mut packets: VecDeque<Vec<u8>> = VecDeque::new();
    loop {
        let step = tokio::select! {
            packet = client.receive() => match packet {
                Ok(packet) => show(socket, &packet).await,
                Err(_) => Err(Some(RUN_ENDED)),
            },
            sent = send_first(client, &packets), if !packets.is_empty() => match sent {
                Ok(()) => {
                    packets.pop_front();
                    Ok(())
                }
                Err(_) => Err(Some(RUN_ENDED)),
            },
            message = socket.recv(), if packets.is_empty() => {
                pings.is_answered = true;
                heed(message, &mut packets)
            }
            _ = pings.due.tick() => {
                pings.is_answered |= !packets.is_empty();
                pings.next(socket).await
            }
            () = peer.place.closed() => Err(Some(REPLACED)),
        };
        if let Err(ending) = step {
            return ending;
        }
    }
}

async fn send_first(client: &ConsoleClient, packets: &VecDeque<Vec<u8>>) -> std::io::Result<()> {
    match packets.front().and_then(|packet| ToHub::parse(packet)) {
        Some(message) => client.send(message).await,
        None => Ok(()),
    }
}

/// Passes a packet of the hub on to a client.
async fn show(socket: &mut WebSocket, packet: &[u8]) -> Result<(), Option<Ending>> {
    let text = match FromHub::parse(packet) {
        Some(FromHub::Output(output)) => {
            return send(socket, Message::Binary(output.to_vec().into())).await;
        }
        Some(FromHub::Keyboard(Keyboard::Yours)) => r#"{"keyboard": "yours"}"#.to_owned(),
        Some(FromHub::Keyboard(Keyboard::Free)) => r#"{"keyboard": "free"}"#.to_owned(),
        Some(FromHub::Keyboard(Keyboard::Taken)) => r#"{"keyboard": "taken"}"#.to_owned(),
        Some(FromHub::Lost(bytes)) => format!(r#"{{"lost": {bytes}}}"#),
        Some(FromHub::Full) => return Err(Some(CROWDED)),
        Some(FromHub::Begin) | None => return Ok(()),
    };
    send(socket, Message::Text(text.into())).await
}

/// Turns a message of a client into packets for the hub.
fn heed(
    message: Option<Result<Message, axum::Error>>,
    packets: &mut VecDeque<Vec<u8>>,
) -> Result<(), Option<Ending>> {
    match message {
        Some(Ok(Message::Binary(keys))) => {
            packets.extend(keys.chunks(MAX_DATA_BYTES).map(|piece| ToHub::Input(piece).packet()));
            Ok(())
        }
        Some(Ok(Message::Text(text))) => match serde_json::from_str(&text) {
            Ok(ConsoleCommand { take: true }) => {
                packets.push_back(ToHub::Take.packet());
                Ok(())
            }
            Ok(ConsoleCommand { take: false }) => Ok(()),
            Err(_) => Err(Some(NOT_UNDERSTOOD)),
        },
        Some(Ok(Message::Ping(_) | Message::Pong(_))) => Ok(()),
        Some(Err(_)) => Err(Some(TOO_LONG)),
        Some(Ok(Message::Close(_))) | None => Err(None),
    }
}

/// Passes a screen on until it ends. Returns why it does; `None`: the client has ended.
async fn relay_screen(
    socket: &mut WebSocket,
    screen: &Screen,
    peer: &Peer,
    headers: HeaderMap,
) -> Option<Ending> {
    let mut pings = Pings::new(peer, headers);
    let mut buffer = vec![0; SCREEN_BYTES];
    // What waits for the VMM. No further message is received meanwhile.
    let mut waiting = axum::body::Bytes::new();
    loop {
        let step = tokio::select! {
            read = screen.read(&mut buffer) => match read {
                Ok(length) if length > 0 => {
                    send(socket, Message::Binary(buffer[..length].to_vec().into())).await
                }
                _ => Err(Some(RUN_ENDED)),
            },
            sent = screen.write(&waiting), if !waiting.is_empty() => match sent {
                Ok(length) => {
                    waiting = waiting.slice(length.min(waiting.len())..);
                    Ok(())
                }
                Err(_) => Err(Some(RUN_ENDED)),
            },
            message = socket.recv(), if waiting.is_empty() => {
                pings.is_answered = true;
                match message {
                    Some(Ok(Message::Binary(data))) => {
                        waiting = data;
                        Ok(())
                    }
                    Some(Ok(Message::Text(_))) => Err(Some(NOT_UNDERSTOOD)),
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => Ok(()),
                    Some(Err(_)) => Err(Some(TOO_LONG)),
                    Some(Ok(Message::Close(_))) | None => Err(None),
                }
            }
            _ = pings.due.tick() => {
                pings.is_answered |= !waiting.is_empty();
                pings.next(socket).await
            }
            () = peer.place.closed() => Err(Some(REPLACED)),
        };
        if let Err(ending) = step {
            return ending;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_another_origin_is_told_by_its_header() {
        let case = |host: Option<&'static str>, origins: &[&'static str]| {
            let mut headers = HeaderMap::new();
            host.map(|host| headers.insert(header::HOST, host.parse().unwrap()));
            for origin in origins {
                headers.append(header::ORIGIN, origin.parse().unwrap());
            }
            is_same_origin(&headers)
        };
        let host = Some("host.example:9443");
        assert!(case(host, &[]) && case(None, &[]), "no browser");
        assert!(case(host, &["https://host.example:9443"]) && case(host, &["https://HOST.example:9443"]));
        assert!(case(Some("127.0.0.1:4000"), &["http://127.0.0.1:4000"]));
        for foreign in [
            "https://host.example",
            "https://host.example:9444",
            "https://evil.example",
            "https://host.example:9443.evil.example",
            "https://evil.example/host.example:9443",
            "host.example:9443",
            "null",
            "",
        ] {
            assert!(!case(host, &[foreign]), "{foreign}");
        }
        let own = "https://host.example:9443";
        assert!(!case(host, &[own, "https://evil.example"]) && !case(None, &[own]));
    }

    #[test]
    fn keys_are_cut_and_anything_else_ends_it() {
        let heeded = |message| {
            let mut packets = VecDeque::new();
            heed(Some(Ok(message)), &mut packets).map(|()| packets.into_iter().map(|p| p.len()).collect())
        };
        let lengths = |message| heeded(message).map_err(drop);
        assert_eq!(lengths(Message::Binary(vec![1; MAX_MESSAGE_BYTES].into())), Ok(vec![8193, 8193]));
        assert_eq!(lengths(Message::Binary(vec![].into())), Ok(vec![]));
        assert_eq!(lengths(Message::Text(r#"{"take": true}"#.into())), Ok(vec![1]));
        assert_eq!(lengths(Message::Text(r#"{"take": false}"#.into())), Ok(vec![]));
        for text in ["", "{}", "[]", r#"{"take": 1}"#, r#"{"take": true, "more": 1}"#] {
            let ending = heeded(Message::Text(text.into())).unwrap_err().expect("a reason");
            assert_eq!(ending.code, close_code::UNSUPPORTED, "{text}");
        }
        assert!(heeded(Message::Close(None)).unwrap_err().is_none());
    }
}
