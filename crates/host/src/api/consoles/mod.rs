//! WebSockets to what a machine shows: its serial console, and its screen. Owns who may open one, and the lines of the
//! audit log; what is passed on is in `relay`.
//!
//! Invariant: each WebSocket that was opened has a line in the audit log for that, and another one for its end, also if
//! it never came to be one.

mod relay;

use super::extract::Path;
use super::websocket::{Opening, Watch, say_goodbye};
use super::{ApiState, ProblemResponse, ask_for};
use crate::access::act::RequestAction;
use crate::access::audit::{Audit, RequestOutcome};
use crate::access::caller::{Caller, Role};
use crate::access::note::AuditNotes;
use crate::error::HostError;
use crate::machines::console::{ConsoleClient, Screen, View};
use axum::extract::State;
use axum::extract::ws::WebSocketUpgrade;
use axum::http::{Method, StatusCode};
use axum::response::Response;
use spillway_api::{ErrorCode, Name};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The role that whoever looks at a machine, and types, needs all the time.
const ROLE: Role = Role::Operate;
/// The subprotocol of a screen, as noVNC and websockify name it.
const BINARY: &str = "binary";

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
    asked: Opening,
) -> Result<Response, HostError> {
    asked.open(app, name, View::Console).await
}

/// Opens a machine's screen as a WebSocket, which requires the role `operate` and a catalog whose `display` is `vnc`. Both
/// sides send the RFB protocol (RFC 6143) as binary messages; the subprotocol is `binary`. The daemon closes with code 1001
/// when the machine's run ends.
#[utoipa::path(get, path = "/{name}/screen", params(("name" = Name, Path)), responses((status = 101, description = "The connection is a WebSocket."), ProblemResponse))]
async fn open_machine_screen(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    asked: Opening,
) -> Result<Response, HostError> {
    asked.open(app, name, View::Screen).await
}

impl Opening {
    /// Takes a place among the machine's clients, and begins.
    async fn open(self, app: ApiState, name: Name, view: View) -> Result<Response, HostError> {
        let Opening { upgrade, caller, peer, headers } = self;
        let (consoles, of, is_admin) =
            (app.machines.consoles.clone(), name.clone(), caller.role == Role::Admin);
        let (folder, place) = ask_for(move || consoles.admit(&of, view, is_admin)).await?;
        let (shown, upgrade) = match view {
            View::Console => (ConsoleClient::connect(&folder).map(Shown::Console), upgrade),
            View::Screen => (Screen::connect(&folder).await.map(Shown::Screen), upgrade.protocols([BINARY])),
        };
        let shown = shown.map_err(|e| {
            let message = format!("the {} of {name} cannot be reached: {e}", view.word());
            HostError::new(ErrorCode::Unavailable, message)
        })?;
        let end = EndLine::new(app.audit.clone(), caller, &name, view);
        Ok(begin(upgrade, shown, Watch::new(peer, headers, ROLE, Some(place)), end))
    }
}

/// Lets a connection become a WebSocket, and relays until that ends.
fn begin(upgrade: WebSocketUpgrade, shown: Shown, mut watch: Watch, end: EndLine) -> Response {
    upgrade.on_upgrade(async move |mut socket| {
        let ending = match &shown {
            Shown::Console(hub) => relay::console(&mut socket, hub, &mut watch).await,
            Shown::Screen(screen) => relay::screen(&mut socket, screen, &mut watch).await,
        };
        drop((shown, end));
        say_goodbye(socket, ending, watch).await;
    })
}

/// The connection to what a machine shows.
enum Shown {
    Console(ConsoleClient),
    Screen(Screen),
}

/// The line of a WebSocket's end in the audit log, which is written when this is dropped: whatever has ended it, and also
/// if its connection was gone before it became one.
struct EndLine {
    audit: Audit,
    caller: Caller,
    act: RequestAction,
}

impl EndLine {
    fn new(audit: Audit, caller: Caller, name: &Name, view: View) -> EndLine {
        let view = view.word();
        let act = RequestAction {
            verb: format!("close {view} of"),
            ..RequestAction::of(&Method::GET, &format!("/v1/machines/{name}/{view}"))
        };
        EndLine { audit, caller, act }
    }
}

impl Drop for EndLine {
    fn drop(&mut self) {
        let status = StatusCode::SWITCHING_PROTOCOLS.as_u16();
        let outcome = RequestOutcome { status, code: None, let_in: true };
        self.audit.write(&self.caller, &self.act, AuditNotes::default(), outcome);
    }
}

#[cfg(test)]
mod tests;
