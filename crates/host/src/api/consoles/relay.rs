//! What is passed on between a client's WebSocket and a machine's console or screen, until one of them ends.
//!
//! Invariant: what waits for a slow side is bounded by [`MAX_WAITING_BYTES`]: no further message is received meanwhile.

use crate::api::websocket::{Ending, NOT_UNDERSTOOD, Step, TOO_LONG, Watch, send};
use crate::machines::console::{ConsoleClient, Screen};
use axum::body::Bytes;
use axum::extract::ws::{Message, WebSocket, close_code};
use serde::Deserialize;
use spillway_control::console::{FromHub, Keyboard, MAX_DATA_BYTES, ToHub};
use std::collections::VecDeque;
use std::io;

/// Bytes of a client that wait for a guest that takes none. A client that closes is heard as long as fewer wait.
const MAX_WAITING_BYTES: usize = 64 << 10;
/// Memory that each message takes beside its bytes.
const MESSAGE_COST: usize = 64;
/// Most bytes of a screen in one message.
const SCREEN_BYTES: usize = 32 << 10;
const RUN_ENDED: Ending = Ending { code: close_code::AWAY, reason: "the machine's run has ended" };
const CROWDED: Ending =
    Ending { code: close_code::AGAIN, reason: "the console has as many clients as it can have" };

/// Whether so much waits that nothing more may be received.
fn is_full<T: AsRef<[u8]>>(waiting: &VecDeque<T>) -> bool {
    waiting.iter().map(|message| message.as_ref().len() + MESSAGE_COST).sum::<usize>() >= MAX_WAITING_BYTES
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
