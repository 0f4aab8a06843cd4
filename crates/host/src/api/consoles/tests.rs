//! Who may open a WebSocket of a console, and how it ends: with a hub, tokens and clients of the test's own.

use super::*;
use crate::access::audit::AuditSettings;
use crate::access::caller::{PeerAddress, Proof};
use crate::access::connections::{ConnectionLimits, ConnectionSlot, Connections};
use crate::access::sessions::Sessions;
use crate::access::tokens::Tokens;
use crate::access::{Authority, Known, Peer};
use crate::api::websocket::MAX_MESSAGE_BYTES;
use crate::hypervisor::qemu;
use crate::machines::console::Clients;
use axum::extract::ws::{Message, close_code};
use axum::routing::get;
use axum::{Extension, Router};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, accept, bind, listen, recv, send, socket,
};
use sha2::{Digest, Sha256};
use spillway_control::console::{FromHub, MAX_DATA_BYTES, ToHub};
use spillway_testkit::process::wait_until;
use spillway_testkit::websocket::{self, Message as Received, WebSocket};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::UnixListener;

const PATIENCE: Duration = Duration::from_secs(20);
const PING: Duration = Duration::from_secs(1);

#[test]
fn keys_are_cut_and_anything_else_ends_it() {
    let heeded = |message| {
        let mut packets = VecDeque::new();
        relay::heed(Some(Ok(message)), &mut packets).map(|()| packets.into_iter().map(|p| p.len()).collect())
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

/// A socket at which a machine's console is a WebSocket of an operator's, with a hub and tokens of the test's own.
struct World {
    dir: tempfile::TempDir,
    /// Takes connections, and says nothing.
    hub: OwnedFd,
    console: Arc<TestConsole>,
    _runtime: tokio::runtime::Runtime,
}

/// What each request needs.
struct TestConsole {
    folder: PathBuf,
    audit: Audit,
    clients: Clients,
    known: Arc<Known>,
    place: Arc<ConnectionSlot>,
}

/// Writes a file with this token of the role `operate`.
fn tokens(dir: &Path, secret: &str) -> Tokens {
    tokens_of(dir, secret, "operate")
}

fn tokens_of(dir: &Path, secret: &str, role: &str) -> Tokens {
    let path = dir.join("tokens");
    let mut options = std::fs::File::options();
    let mut file = options.create(true).write(true).truncate(true).mode(0o600).open(&path).unwrap();
    let line = format!("{role} {secret}er {:x}\n", Sha256::digest(secret));
    std::io::Write::write_all(&mut file, line.as_bytes()).unwrap();
    Tokens::load(&path).unwrap()
}

fn name() -> Name {
    "desk-001".parse().unwrap()
}

fn operator() -> Caller {
    let source = PeerAddress::Remote([192, 0, 2, 1].into());
    Caller { name: "anner".into(), role: Role::Operate, source, proof: Proof::Token }
}

async fn answer(Extension(console): Extension<Arc<TestConsole>>, asked: Opening) -> Response {
    let place = console.clients.take(&name(), View::Console, false).unwrap();
    let hub = Shown::Console(ConsoleClient::connect(&console.folder).unwrap());
    let watch = Watch::with_pings(asked.peer, asked.headers, ROLE, Some(place), PING);
    let end = EndLine::new(console.audit.clone(), asked.caller, &name(), View::Console);
    begin(asked.upgrade, hub, watch, end)
}

impl World {
    fn new() -> World {
        World::with(true)
    }

    /// `upgrades`: whether connections can become WebSockets.
    fn with(upgrades: bool) -> World {
        let dir = tempfile::tempdir().unwrap();
        let hub = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        bind(&hub, &SocketAddrUnix::new(dir.path().join(qemu::CONSOLE)).unwrap()).unwrap();
        listen(&hub, 9).unwrap();
        let known = Known { tokens: tokens(dir.path(), "ann"), sessions: Sessions::default() };
        let file = Some(dir.path().join("audit.log"));
        let audit = AuditSettings { file, journal: false, keep: PATIENCE, max_bytes: 1 << 20 };
        let console = Arc::new(TestConsole {
            folder: dir.path().to_owned(),
            audit: Audit::new(audit),
            clients: Clients::default(),
            known: Arc::new(known),
            place: Connections::new(ConnectionLimits::REMOTE).admit(operator().source).unwrap(),
        });
        let peer = Peer {
            source: operator().source,
            authority: Authority::Tokens(Arc::clone(&console.known)),
            place: Arc::clone(&console.place),
        };
        let router = Router::new().route("/", get(answer)).layer(Extension(Arc::clone(&console)));
        let router = router.layer(Extension(peer)).layer(Extension(operator()));
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _context = runtime.enter();
        let listener = UnixListener::bind(dir.path().join("sock")).unwrap();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = TowerToHyperService::new(router.clone());
                let connection = hyper::server::conn::http1::Builder::new();
                let connection = connection.serve_connection(TokioIo::new(stream), service);
                tokio::spawn(async move {
                    match upgrades {
                        true => connection.with_upgrades().await,
                        false => connection.await,
                    }
                });
            }
        });
        drop(_context);
        World { dir, hub, console, _runtime: runtime }
    }

    fn open(&self) -> WebSocket {
        let authorized = ("Authorization", "Bearer ann");
        websocket::open(&self.dir.path().join("sock"), "/", &[authorized]).unwrap().expect("it opens")
    }

    /// Waits for the line of an end, of which there is one.
    fn has_line(&self) {
        let read = || std::fs::read_to_string(self.dir.path().join("audit.log")).unwrap_or_default();
        wait_until(PATIENCE, || (!read().is_empty()).then_some(())).expect("a line");
        let line: serde_json::Value = serde_json::from_str(&read()).expect("one line");
        let seen = (&line["verb"], &line["object"]["name"], &line["who"]);
        assert_eq!(seen, (&"close console of".into(), &"desk-001".into(), &"anner".into()));
    }
}

/// Receives until the end. Returns its code and reason.
fn end(socket: &mut WebSocket) -> (u16, String) {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        match socket.receive(PATIENCE).unwrap() {
            Some(Received::Close(code, reason)) => return (code, reason),
            Some(Received::Gone) => panic!("it is gone without a word"),
            _ => {}
        }
    }
    panic!("it does not end");
}

#[test]
fn a_client_that_closes_gets_its_answer() {
    let world = World::new();
    let mut socket = world.open();
    socket.close(4001, "I have seen enough").unwrap();
    assert_eq!(end(&mut socket), (4001, "I have seen enough".into()));
    assert_eq!(socket.receive(PATIENCE).unwrap(), Some(Received::Gone));
    world.has_line();
}

/// Sends keys to a hub that reads nothing, until it takes no more. Returns how many packets it took.
fn packets_until_full(world: &World) -> usize {
    let client = spillway_control::console::connect(&world.dir.path().join(qemu::CONSOLE), true).unwrap();
    let packet = ToHub::Input(&[b'x'; MAX_DATA_BYTES]).packet();
    (0..).find(|_| send(&client, &packet, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_err()).unwrap()
}

#[test]
fn a_client_that_closes_gets_its_answer_although_its_guest_takes_no_keys() {
    let world = World::new();
    let taken = packets_until_full(&world);
    let mut socket = world.open();
    // Four packets more than the hub takes.
    (0..taken + 4).for_each(|_| socket.binary(&[b'x'; MAX_DATA_BYTES]).unwrap());
    let begun = Instant::now();
    socket.close(4001, "I have seen enough").unwrap();
    assert_eq!(end(&mut socket), (4001, "I have seen enough".into()));
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    world.has_line();
}

#[test]
fn no_more_keys_are_received_than_can_wait() {
    let world = World::new();
    let mut socket = world.open();
    socket.limit_writes(PING).unwrap();
    let most = 4 << 20;
    let sent = (0..most / MAX_DATA_BYTES).find(|_| socket.binary(&[b'x'; MAX_DATA_BYTES]).is_err());
    assert!(sent.is_some(), "{most} bytes were received, and no key was taken");
}

#[test]
fn a_client_has_its_place_until_its_connection_is_closed() {
    let world = World::new();
    let _sockets: Vec<_> = (0..8).map(|_| world.open()).collect();
    let take = || world.console.clients.take(&name(), View::Console, false);
    let connection = accept(&world.hub).unwrap();
    send(&connection, &FromHub::Full.packet(), SendFlags::NOSIGNAL).unwrap();
    // The relay has left the hub. Its client does not answer the goodbye.
    let left = recv(&connection, &mut [0; 1][..], RecvFlags::empty()).unwrap();
    assert_eq!(left.1, 0);
    assert!(wait_until(PING / 2, || take().ok()).is_none(), "the client is still connected");
    wait_until(PATIENCE, || take().ok()).expect("its place is free");
}

#[test]
fn what_never_came_to_be_a_websocket_has_its_line_too() {
    let world = World::with(false);
    let mut socket = world.open();
    assert_eq!(socket.receive(PATIENCE).unwrap(), Some(Received::Gone));
    world.has_line();
}

/// Each ping of a client is answered, and who reads no answer must not fill the daemon's memory with them.
#[test]
fn answers_that_a_client_does_not_read_are_few() {
    let world = World::new();
    let mut socket = world.open();
    socket.limit_writes(PING).unwrap();
    // Until the daemon's own ping waits for the client.
    let sent = (0..1_000_000).take_while(|_| socket.ping(&[b'x'; 125]).is_ok()).count();
    assert!(sent > 20_000, "{sent} pings were received");
    while let Ok(Some(Received::Text(_) | Received::Binary(_))) = socket.receive(PING) {}
    assert!(socket.pongs < sent / 2, "{} answers to {sent} pings were kept", socket.pongs);
}

/// An operator that has become a reader may look at nothing any more.
#[test]
fn a_client_that_may_not_operate_any_more_is_closed_at_the_next_ping() {
    let world = World::new();
    let mut socket = world.open();
    assert_eq!(socket.receive(PING * 2).unwrap(), None, "it may operate");
    world.console.known.tokens.become_those(tokens_of(world.dir.path(), "ann", "read"));
    assert_eq!(end(&mut socket), (1008, "the session has ended, or its token".into()));
}

#[test]
fn a_client_that_answers_no_ping_is_closed() {
    let world = World::new();
    let (mut good, mut dead) = (world.open(), world.open());
    dead.answers_pings = false;
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(good.receive(PING * 4).unwrap(), None, "it goes on"));
        assert_eq!(end(&mut dead), (1002, "the client does not answer pings".into()));
    });
}

#[test]
fn a_client_whose_token_is_gone_is_closed_at_the_next_ping() {
    let world = World::new();
    let mut socket = world.open();
    assert_eq!(socket.receive(PING * 2).unwrap(), None, "its token is known");
    world.console.known.tokens.become_those(tokens(world.dir.path(), "bob"));
    assert_eq!(end(&mut socket), (1008, "the session has ended, or its token".into()));
}

#[test]
fn a_client_of_a_hub_that_has_its_most_is_told_to_come_again() {
    let world = World::new();
    let mut socket = world.open();
    let connection = accept(&world.hub).unwrap();
    send(&connection, &FromHub::Full.packet(), SendFlags::NOSIGNAL).unwrap();
    assert_eq!(end(&mut socket), (1013, "the console has as many clients as it can have".into()));
}

#[test]
fn an_operator_whose_place_is_needed_is_told_so() {
    let world = World::new();
    let mut sockets: Vec<_> = (0..8).map(|_| world.open()).collect();
    let take = |is_admin| world.console.clients.take(&name(), View::Console, is_admin);
    assert!(take(false).is_err());
    let _admin = take(true).expect("an administrator gets one");
    let words = "all places were taken, and an administrator has this one now";
    assert_eq!(end(&mut sockets[0]), (1013, words.into()));
    assert_eq!(sockets[7].receive(PING).unwrap(), None, "the others go on");
}
