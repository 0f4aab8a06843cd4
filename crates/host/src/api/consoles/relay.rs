//! What is passed on between a client's WebSocket and a machine's console or screen, until one of them ends. Owns the
//! reasons for an end, and the pings.
//!
//! Invariant: what waits for a slow side is bounded by [`MAX_WAITING_BYTES`]: no further message is received meanwhile. Each end that the
//! client does not cause has a code and a reason, and each handshake of closing is ended (RFC 6455, 5.5.1). A client has its place until
//! its connection is closed.

use crate::access::Peer;
use crate::access::caller::Role;
use crate::machines::console::{ClientPlace, ConsoleClient, Screen};
use axum::body::Bytes;
use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, close_code};
use axum::http::HeaderMap;
use serde::Deserialize;
use spillway_control::console::{FromHub, Keyboard, MAX_DATA_BYTES, ToHub};
use std::collections::VecDeque;
use std::io;
use std::time::Duration;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, timeout};

/// Longest message of a client.
pub(super) const MAX_MESSAGE_BYTES: usize = 16 << 10;
/// Bytes of a client that wait for a guest that takes none. A client that closes is heard as long as fewer wait.
const MAX_WAITING_BYTES: usize = 64 << 10;
/// Memory that each message takes beside its bytes.
const MESSAGE_COST: usize = 64;
/// Most bytes of a screen in one message.
const SCREEN_BYTES: usize = 32 << 10;
/// Interval of pings. A client that answers none until the next one is due has ended.
const PING: Duration = Duration::from_secs(30);
/// Longest time of the closing handshake.
const GOODBYE: Duration = Duration::from_secs(2);

/// Why a WebSocket ends.
pub(super) struct Ending {
    pub code: u16,
    reason: &'static str,
}

const RUN_ENDED: Ending = Ending { code: close_code::AWAY, reason: "the machine's run has ended" };
const NO_ANSWER: Ending = Ending { code: close_code::POLICY, reason: "the client does not answer pings" };
const NO_RIGHT: Ending = Ending { code: close_code::POLICY, reason: "the session has ended, or its token" };
const REPLACED: Ending =
    Ending { code: close_code::AGAIN, reason: "the connection is needed for a newer one" };
const GIVEN_UP: Ending = Ending {
    code: close_code::AGAIN,
    reason: "all places were taken, and an administrator has this one now",
};
const NOT_UNDERSTOOD: Ending = Ending {
    code: close_code::UNSUPPORTED,
    reason: "a message is not understood: see docs/api.md for what this WebSocket takes",
};
const TOO_LONG: Ending =
    Ending { code: close_code::SIZE, reason: "a message is longer than 16 KiB, or the connection is broken" };
const CROWDED: Ending =
    Ending { code: close_code::AGAIN, reason: "the console has as many clients as it can have" };

/// Whether a WebSocket goes on. `Err(None)`: the client has ended it.
type Step = Result<(), Option<Ending>>;

/// What says that a WebSocket has to end, whatever is passed on: its client answers no ping, or may not look and type any
/// more, or its place is needed.
pub(super) struct Watch {
    peer: Peer,
    /// The request's, which say who the client is.
    headers: HeaderMap,
    place: ClientPlace,
    pings: Interval,
    is_answered: bool,
}

impl Watch {
    pub fn new(peer: Peer, headers: HeaderMap, place: ClientPlace) -> Watch {
        Watch::with_pings(peer, headers, place, PING)
    }

    pub fn with_pings(peer: Peer, headers: HeaderMap, place: ClientPlace, each: Duration) -> Watch {
        let mut pings = interval_at(Instant::now() + each, each);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Watch { peer, headers, place, pings, is_answered: true }
    }

    /// Waits until a ping is due. Cancel safe.
    async fn due(&mut self) -> Step {
        tokio::select! {
            _ = self.pings.tick() => Ok(()),
            () = self.peer.place.closed() => Err(Some(REPLACED)),
            () = self.place.closed() => Err(Some(GIVEN_UP)),
        }
    }

    /// Sends a ping. `is_held`: nothing of the client is received now, so it may have answered.
    async fn ping(&mut self, socket: &mut WebSocket, is_held: bool) -> Step {
        if !self.peer.known.as_ref().is_none_or(|known| known.may(&self.headers, Role::Operate)) {
            return Err(Some(NO_RIGHT));
        }
        if !std::mem::replace(&mut self.is_answered, false) && !is_held {
            return Err(Some(NO_ANSWER));
        }
        send(socket, Message::Ping(Bytes::new())).await
    }
}

/// Sends a message.
async fn send(socket: &mut WebSocket, message: Message) -> Step {
    socket.send(message).await.map_err(|_| None)
}

/// Whether so much waits that nothing more may be received.
fn is_full<T: AsRef<[u8]>>(waiting: &VecDeque<T>) -> bool {
    waiting.iter().map(|message| message.as_ref().len() + MESSAGE_COST).sum::<usize>() >= MAX_WAITING_BYTES
}

/// Ends the closing handshake, which the client has begun if there is no reason, closes the connection, and gives its place back.
pub(super) async fn say_goodbye(mut socket: WebSocket, ending: Option<Ending>, watch: Watch) {
    let goodbye = async {
        if let Some(Ending { code, reason }) = ending {
            let frame = CloseFrame { code, reason: Utf8Bytes::from_static(reason) };
            let _ = socket.send(Message::Close(Some(frame))).await;
        }
        // The answer to the client's part is sent meanwhile.
        while let Some(Ok(_)) = socket.recv().await {}
    };
    let _ = timeout(GOODBYE, goodbye).await;
    drop((socket, watch));
}

/// A message of a client for a console.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConsoleCommand {
    take: bool,
}

/// Passes a console on until it ends. Returns why it does; `None`: the client has ended.
pub(super) async fn console(
    socket: &mut WebSocket,
    hub: &ConsoleClient,
    watch: &mut Watch,
) -> Option<Ending> {
    // What waits for the hub, which waits for the guest.
    let mut packets: VecDeque<Vec<u8>> = VecDeque::new();
    loop {
        let step = tokio::select! {
            packet = hub.receive() => match packet {
                Ok(packet) => show(socket, &packet).await,
                Err(_) => Err(Some(RUN_ENDED)),
            },
            // A hub that takes nothing more may have said something before.
            _ = send_first(hub, &packets), if !packets.is_empty() => {
                packets.pop_front();
                Ok(())
            }
            message = socket.recv(), if !is_full(&packets) => {
                watch.is_answered = true;
                heed(message, &mut packets)
            }
            due = watch.due() => match due {
                Ok(()) => watch.ping(socket, is_full(&packets)).await,
                ending => ending,
            },
        };
        if let Err(ending) = step {
            return ending;
        }
    }
}

async fn send_first(hub: &ConsoleClient, packets: &VecDeque<Vec<u8>>) -> io::Result<()> {
    match packets.front().and_then(|packet| ToHub::parse(packet)) {
        Some(message) => hub.send(message).await,
        None => Ok(()),
    }
}

/// Passes a packet of the hub on to a client.
async fn show(socket: &mut WebSocket, packet: &[u8]) -> Step {
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
pub(super) fn heed(message: Option<Result<Message, axum::Error>>, packets: &mut VecDeque<Vec<u8>>) -> Step {
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
pub(super) async fn screen(socket: &mut WebSocket, screen: &Screen, watch: &mut Watch) -> Option<Ending> {
    let mut buffer = vec![0; SCREEN_BYTES];
    // What waits for the VMM.
    let mut waiting: VecDeque<Bytes> = VecDeque::new();
    loop {
        let step = tokio::select! {
            read = screen.read(&mut buffer) => match read {
                Ok(length) if length > 0 => {
                    send(socket, Message::Binary(buffer[..length].to_vec().into())).await
                }
                _ => Err(Some(RUN_ENDED)),
            },
            sent = write_first(screen, &waiting), if !waiting.is_empty() => match sent {
                Ok(length) => {
                    take(&mut waiting, length);
                    Ok(())
                }
                Err(_) => Err(Some(RUN_ENDED)),
            },
            message = socket.recv(), if !is_full(&waiting) => {
                watch.is_answered = true;
                match message {
                    Some(Ok(Message::Binary(data))) => {
                        // Nothing can be written of an empty one.
                        waiting.extend((!data.is_empty()).then_some(data));
                        Ok(())
                    }
                    Some(Ok(Message::Text(_))) => Err(Some(NOT_UNDERSTOOD)),
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => Ok(()),
                    Some(Err(_)) => Err(Some(TOO_LONG)),
                    Some(Ok(Message::Close(_))) | None => Err(None),
                }
            }
            due = watch.due() => match due {
                Ok(()) => watch.ping(socket, is_full(&waiting)).await,
                ending => ending,
            },
        };
        if let Err(ending) = step {
            return ending;
        }
    }
}

async fn write_first(screen: &Screen, waiting: &VecDeque<Bytes>) -> io::Result<usize> {
    screen.write(waiting.front().map_or(&[], |data| data)).await
}

/// Takes bytes of the first message, which were written.
fn take(waiting: &mut VecDeque<Bytes>, length: usize) {
    if let Some(data) = waiting.pop_front().filter(|data| length < data.len()) {
        waiting.push_front(data.slice(length..));
    }
}
