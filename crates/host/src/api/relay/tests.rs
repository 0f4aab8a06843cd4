//! Requests that one host passes on to another: two daemons' routes, with real TLS on the loopback network.

use super::*;
use crate::access::Known;
use crate::access::tls::{Remote, RemoteListener};
use crate::access::tokens::Tokens;
use crate::api::{ApiState, router};
use crate::daemon::{self, DaemonSettings};
use crate::fleet::door::{FleetListener, Identity, Presence};
use crate::guest_users::UserChoice;
use crate::serving::{accept, accept_fleet, accept_remote};
use axum::routing::get;
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use spillway_api::{FleetSelf, Hypervisor, Problem, Session, SessionProof, SessionRole};
use spillway_testkit::websocket::{self, Message};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

const PATIENCE: Duration = Duration::from_secs(20);
const LOOPBACK: ([u8; 4], u16) = ([127, 0, 0, 1], 0);

pub(crate) fn name(text: &str) -> Name {
    text.parse().unwrap()
}

pub(crate) fn settings(dir: &Path) -> DaemonSettings {
    DaemonSettings {
        state: dir.to_owned(),
        socket: dir.join("sock"),
        socket_mode: 0o600,
        remote: None,
        hypervisor: Hypervisor::None,
        accelerator: None,
        libvirt_uri: String::new(),
        guest_users: UserChoice::DaemonsOwn,
        program: "/nonexistent/spillway-worker".into(),
        ram_budget_bytes: None,
        overcommit_percent: 100,
        memory_reserve_bytes: None,
        memory_overcommit_percent: 100,
        vcpu_overcommit_percent: 800,
        boots_at_once: None,
        boot_patience: PATIENCE,
        phone_home: None,
        memory_floor_bytes: None,
        audit: Vec::new(),
        audit_keep: Duration::from_secs(86_400),
        audit_max_bytes: 1 << 20,
        stream_cache: None,
        stream_cache_bytes: 1 << 20,
        stream_fill_bytes_per_second: 1 << 20,
        peers: None,
        import_from: Vec::new(),
        fleet: None,
        claim_ttl_seconds: None,
    }
}

fn write_private(path: &Path, text: &str) {
    let mut options = std::fs::File::options();
    let mut file = options.create(true).write(true).truncate(true).mode(0o600).open(path).unwrap();
    std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
}

/// A host with all its listeners.
struct TestHost {
    dir: tempfile::TempDir,
    door: Option<Arc<FleetDoor>>,
    identity: Identity,
    /// Address for other hosts, and for clients with a token.
    fleet: SocketAddr,
    remote: SocketAddr,
    known: Arc<Known>,
    events: crate::events::Events,
}

impl TestHost {
    async fn new(host: &str, is_in_fleet: bool) -> TestHost {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let identity = Identity::open(dir.path(), &name(host)).unwrap();
        let door = is_in_fleet.then(|| Arc::new(FleetDoor::new(name(host), &identity)));
        let app: ApiState = daemon::app_of(&settings(dir.path()), door.clone()).unwrap();
        let events = app.events.clone();
        let router = router(app);
        let members = door.as_ref().map(|door| door.members.clone()).unwrap_or_default();
        let listener = FleetListener::open(LOOPBACK.into(), &identity, members).await.unwrap();
        let fleet = listener.address().unwrap();
        tokio::spawn(accept_fleet(Some(Arc::new(listener)), router.clone()));
        tokio::spawn(accept(UnixListener::bind(dir.path().join("sock")).unwrap(), router.clone()));
        let tokens = dir.path().join("tokens");
        write_private(&tokens, &format!("read nobody {:x}\n", Sha256::digest("nobody else")));
        let pem = |name: &str| dir.path().join("fleet").join(name);
        let remote =
            Remote { address: LOOPBACK.into(), certificate: pem("cert.pem"), key: pem("key.pem"), tokens };
        let remote_listener = RemoteListener::open(remote).await.unwrap();
        let remote = remote_listener.address().unwrap();
        let known = Arc::clone(&remote_listener.known);
        tokio::spawn(accept_remote(Some(Arc::new(remote_listener)), router));
        let host = TestHost { dir, door, identity, fleet, remote, known, events };
        host.tokens(&[("read", "ann"), ("operate", "bob"), ("admin", "eve")]);
        host
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("sock")
    }

    fn member(&self, epoch: i64) -> Member {
        Member { address: self.fleet.to_string(), certificate: self.identity.digest(), epoch, peers: None }
    }

    fn members(&self, members: &[(&str, Member)]) {
        let members = members.iter().map(|(host, member)| (name(host), member.clone()));
        self.door.as_ref().unwrap().members.replace(members.collect::<BTreeMap<_, _>>());
    }

    /// The lines of the audit log of this user.
    fn audit(&self, who: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.dir.path().join("audit.log")).unwrap_or_default();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["who"] == who).collect()
    }

    /// The answer to a request on the unix socket.
    async fn local(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        ask(UnixStream::connect(self.socket()).await.unwrap(), method, path, headers, body).await
    }

    /// Writes the file of tokens, which are the names of their users.
    fn tokens(&self, tokens: &[(&str, &str)]) {
        let lines = tokens.iter().map(|(role, user)| format!("{role} {user} {:x}\n", Sha256::digest(user)));
        write_private(&self.dir.path().join("tokens"), &lines.collect::<String>());
        self.known.tokens.become_those(Tokens::load(&self.dir.path().join("tokens")).unwrap());
    }

    /// The answer to a request over TCP, with a token.
    async fn remote(&self, token: &str, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let headers = format!("authorization: Bearer {token}\r\n{headers}");
        ask(self.tls().await, method, path, &headers, body).await
    }

    /// A connection over TCP.
    async fn tls(&self) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        let file = self.dir.path().join("fleet/cert.pem");
        roots.add(CertificateDer::from_pem_file(file).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(self.remote).await.unwrap();
        let host = ServerName::try_from("host-a").unwrap();
        TlsConnector::from(Arc::new(config)).connect(host, stream).await.unwrap()
    }
}

/// Two hosts of a fleet.
async fn pair() -> (TestHost, TestHost) {
    let (a, b) = (TestHost::new("host-a", true).await, TestHost::new("host-b", true).await);
    for host in [&a, &b] {
        host.members(&[("host-a", a.member(11)), ("host-b", b.member(12))]);
    }
    (a, b)
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json<T: serde::de::DeserializeOwned>(&self) -> T {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    pub(crate) fn detail(&self) -> String {
        self.json::<Problem>().detail
    }
}

pub(crate) async fn ask(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> Answer {
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ =
        tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("it answers in time");
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{method} {path}: {answer:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let body = match head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        false => body.to_owned(),
        // Its length, one part, and the end.
        true => body.split("\r\n").nth(1).unwrap_or_default().to_owned(),
    };
    Answer { status, head: head.to_owned(), body }
}

const SESSION: &str = "/v1/fleet/hosts/host-b/api/v1/session";
const FORGED: &str = "Spillway-Caller: admin root\r\n";

#[tokio::test(flavor = "multi_thread")]
async fn another_host_knows_who_asks() {
    let (a, b) = pair().await;
    let session: Session = a.local("GET", SESSION, "", "").await.json();
    let expected = format!("uid {} (at host-a)", rustix::process::getuid().as_raw());
    assert_eq!((session.caller, session.by), (expected, SessionProof::Fleet));
    for (token, role) in
        [("ann", SessionRole::Read), ("bob", SessionRole::Operate), ("eve", SessionRole::Admin)]
    {
        for headers in ["", FORGED] {
            let session: Session = a.remote(token, "GET", SESSION, headers, "").await.json();
            let found = (session.caller, session.role, session.by);
            assert_eq!(found, (format!("{token} (at host-a)"), role, SessionProof::Fleet), "{headers:?}");
        }
    }
    // The same host, by the same path.
    let here = SESSION.replace("host-b", "host-a");
    let session: Session = a.remote("ann", "GET", &here, FORGED, "").await.json();
    assert_eq!((session.caller.as_str(), session.by), ("ann", SessionProof::Token));
    // The header alone counts for nothing.
    let session: Session = b.local("GET", "/v1/session", FORGED, "").await.json();
    assert_eq!(session.by, SessionProof::Socket);
    let session: Session = a.remote("ann", "GET", "/v1/session", FORGED, "").await.json();
    assert_eq!((session.caller.as_str(), session.role), ("ann", SessionRole::Read));
    for path in ["/v1/session", SESSION, "/v1/fleet/self"] {
        assert_eq!(a.remote("nobody", "GET", path, FORGED, "").await.status, 401, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_host_that_carries_it_out_checks_the_role_and_writes_it_down() {
    let (a, b) = pair().await;
    let path = "/v1/fleet/hosts/host-b/api/v1/machine-actions";
    let start = json!({ "action": "start", "select": { "names": ["desk-001"] } }).to_string();
    // 404 is of those who were let through: there is no such machine.
    for (token, status) in [("ann", 403), ("bob", 404), ("eve", 404)] {
        let answer = a.remote(token, "POST", path, "content-type: application/json\r\n", &start).await;
        assert_eq!(answer.status, status, "{token}: {answer:?}");
        let lines = b.audit(&format!("{token} (at host-a)"));
        assert_eq!((lines.len(), &lines[0]["status"]), (1, &status.into()), "{lines:?}");
        assert_eq!(lines[0]["from"], "127.0.0.1");
        assert!(a.audit(token).is_empty(), "it has not carried it out");
    }
    let store = format!("/v1/fleet/hosts/host-b/api/v1/stores/{}", "s");
    assert_eq!(a.remote("bob", "DELETE", &store, "", "").await.status, 403);
    assert_eq!(a.remote("eve", "DELETE", &store, "", "").await.status, 404);
    // The same host checks it, too.
    let here = path.replace("host-b", "host-a");
    assert_eq!(
        a.remote("ann", "POST", &here, "content-type: application/json\r\n", &start).await.status,
        403
    );
    assert_eq!(a.audit("ann").len(), 1);
    // Conditions pass, and cookies and tokens do not.
    let tag = a.local("GET", "/v1/fleet/hosts/host-b/api/v1/host", "", "").await;
    assert!(tag.head.to_ascii_lowercase().contains("\r\netag: "), "{tag:?}");
    let close = json!({ "action": "close" }).to_string();
    let host = "/v1/fleet/hosts/host-b/api/v1/host";
    let headers = "content-type: application/json\r\nif-match: \"77\"\r\n";
    assert_eq!(a.remote("eve", "POST", host, headers, &close).await.status, 412);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_passed_on_once() {
    let (a, b) = pair().await;
    for last in ["host-a", "host-b"] {
        let twice = format!("/v1/fleet/hosts/host-b/api/v1/fleet/hosts/{last}/api/v1/session");
        let answer = a.local("GET", &twice, "", "").await;
        assert_eq!(answer.status, 400, "{answer:?}");
        assert!(answer.detail().contains("only once"), "{answer:?}");
    }
    // Neither does a host pass on to itself what it has passed on to itself.
    let here = "/v1/fleet/hosts/host-a/api/v1/fleet/hosts/host-b/api/v1/session";
    assert_eq!(a.local("GET", here, "", "").await.status, 404);
    drop(b);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_passed_on_is_refused_in_words() {
    let (a, _b) = pair().await;
    let unknown = a.local("GET", "/v1/fleet/hosts/host-c/api/v1/session", "", "").await;
    assert_eq!(unknown.status, 404);
    assert!(unknown.detail().contains("do you mean 'host-"), "{unknown:?}");
    for path in
        ["/v1/fleet/hosts/host-b/api/", "/v1/fleet/hosts/HOST/api/v1/session", "/v1/fleet/hosts/host-b/api"]
    {
        assert_eq!(a.local("GET", path, "", "").await.status, 404, "{path}");
    }
    assert_eq!(a.local("GET", "/v1/fleet/hosts/host-b/api/index.html", "", "").await.status, 400);
    // Nobody answers: the kernel connects for a process that is stopped.
    let stopped = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = stopped.local_addr().unwrap().to_string();
    a.members(&[("host-a", a.member(1)), ("host-b", Member { address: address.clone(), ..a.member(2) })]);
    let begun = Instant::now();
    let lost = a.local("GET", SESSION, "", "").await;
    assert_eq!(lost.status, 503);
    assert!(lost.detail().starts_with(&format!("host-b ({address}): ")), "{lost:?}");
    let reach: Value = a.local("GET", "/v1/fleet/reach/host-b", "", "").await.json();
    assert_eq!(reach["reaches"], false, "{reach}");
    assert!(begun.elapsed() < Duration::from_secs(15));

    let alone = TestHost::new("host-a", false).await;
    for path in [SESSION, "/v1/fleet/self", "/v1/fleet/reach/host-b"] {
        let answer = alone.local("GET", path, "", "").await;
        assert_eq!(answer.status, 409, "{path}");
        assert_eq!(answer.detail(), "this host is in no fleet: start spillwayd with --fleet");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_say_whom_they_reach() {
    let (a, b) = pair().await;
    let own: FleetSelf = a.local("GET", "/v1/fleet/self", "", "").await.json();
    assert_eq!((own.host, own.epoch), (name("host-a"), Some(11)));
    let reach: Value = a.local("GET", "/v1/fleet/reach/host-b", "", "").await.json();
    assert_eq!(reach, json!({ "host": "host-b", "reaches": true }));
    assert_eq!(a.local("GET", "/v1/fleet/reach/host-c", "", "").await.status, 404);
    // As another daemon asks for it, which asks for itself.
    let client = &a.door.as_ref().unwrap().client;
    let reach: Value = client.get(&name("host-b"), "/v1/fleet/reach/host-a", PATIENCE).await.unwrap();
    assert_eq!(reach["reaches"], true);
    // A host that does not see the other one in etcd lets it in no more.
    b.members(&[("host-b", b.member(12))]);
    let reach: Value = a.local("GET", "/v1/fleet/reach/host-b", "", "").await.json();
    assert_eq!(reach["reaches"], true, "its machines run");
    let refused = a.local("GET", SESSION, "", "").await;
    assert_eq!(refused.status, 503, "not 401: the user is known {refused:?}");
}

/// The host that a user has asked knows when the user may not read any more; the other one does not.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_ends_with_the_token_that_it_was_asked_for_with() {
    let (a, b) = pair().await;
    b.events.raise(spillway_api::EventKind::Failed, "host", "first");
    let mut stream = a.tls().await;
    let path = "/v1/fleet/hosts/host-b/api/v1/event-stream";
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ann\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    let mut buffer = [0; 4096];
    while !text.contains("\"first\"") {
        let length = tokio::time::timeout(PATIENCE, stream.read(&mut buffer)).await.unwrap().unwrap();
        assert!(length > 0, "{text}");
        text += std::str::from_utf8(&buffer[..length]).unwrap();
    }
    a.tokens(&[("admin", "eve")]);
    let ended = async { while stream.read(&mut buffer).await.is_ok_and(|length| length > 0) {} };
    // Long before the other host would say something.
    tokio::time::timeout(Duration::from_secs(10), ended).await.expect("it ends");
}

/// A connection of a member that is one no more is open, and good for nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_removed_member_is_refused_on_an_open_connection() {
    let (a, b) = pair().await;
    let stream = TcpStream::connect(b.fleet).await.unwrap();
    let config = crate::fleet::door::test_client_config(&a.identity, b.identity.digest());
    let host = ServerName::try_from("host-b").unwrap();
    let mut stream = TlsConnector::from(Arc::new(config)).connect(host, stream).await.unwrap();
    let mut status = async || {
        stream.write_all(b"GET /v1/session HTTP/1.1\r\nhost: b\r\n\r\n").await.unwrap();
        let mut text = String::new();
        while !text.ends_with('}') {
            let mut buffer = [0; 4096];
            let length = tokio::time::timeout(PATIENCE, stream.read(&mut buffer)).await.unwrap().unwrap();
            assert!(length > 0, "the connection has ended: {text}");
            text += std::str::from_utf8(&buffer[..length]).unwrap();
        }
        text.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(status().await, "200");
    b.members(&[("host-b", b.member(12))]);
    assert_eq!(status().await, "401");
    b.members(&[("host-b", b.member(12)), ("host-a", a.member(11))]);
    assert_eq!(status().await, "200");
}

/// Host b with routes of the test's own.
async fn with_routes(routes: Router) -> TestHost {
    let a = TestHost::new("host-a", true).await;
    let dir = tempfile::tempdir().unwrap();
    let b = Identity::open(dir.path(), &name("host-b")).unwrap();
    let members = a.door.as_ref().unwrap().members.clone();
    let listener = FleetListener::open(LOOPBACK.into(), &b, members).await.unwrap();
    let address = listener.address().unwrap().to_string();
    tokio::spawn(accept_fleet(Some(Arc::new(listener)), routes));
    a.members(&[
        ("host-a", a.member(1)),
        ("host-b", Member { address, certificate: b.digest(), epoch: 2, peers: None }),
    ]);
    a
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_of_a_connection_and_of_the_caller_stay_here() {
    let echo = async |headers: HeaderMap, body: String| {
        let text =
            |(name, value): (&HeaderName, &HeaderValue)| format!("{name}: {}", value.to_str().unwrap());
        let headers: Vec<String> = headers.iter().map(text).collect();
        let own = [("set-cookie", "a=b"), ("connection", "x-hop"), ("x-hop", "1"), ("etag", "\"7\"")];
        (own, axum::Json(json!({ "headers": headers, "body": body })))
    };
    let a = with_routes(Router::new().route("/v1/echo", get(echo).put(echo))).await;
    let kept = "idempotency-key: k\r\nif-match: \"7\"\r\nif-none-match: *\r\nlast-event-id: 1-2\r\ncontent-type: text/plain\r\n";
    let others = "cookie: a=b\r\norigin: https://x\r\nreferer: https://x/y\r\nsec-fetch-site: same-origin\r\nte: trailers\r\n\
                  connection: x-named\r\nx-named: 1\r\nkeep-alive: timeout=5\r\nproxy-authorization: x\r\nspillway-caller: admin root\r\n";
    for method in ["GET", "PUT"] {
        let path = "/v1/fleet/hosts/host-b/api/v1/echo?a=%20b";
        let answer = a.remote("bob", method, path, &format!("{kept}{others}"), "the body").await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let found: Value = answer.json();
        let mut headers: Vec<&str> =
            found["headers"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        headers.sort_unstable();
        let length = if method == "PUT" { "content-length: 8\r\n" } else { "" };
        let expected = format!("{kept}{length}host: spillwayd\r\nspillway-caller: operate bob");
        let mut expected: Vec<&str> = expected.split("\r\n").collect();
        expected.sort_unstable();
        assert_eq!(headers, expected, "{method}");
        assert_eq!(found["body"], if method == "PUT" { "the body" } else { "" });
        let head = answer.head.to_ascii_lowercase();
        assert!(
            head.contains("etag: \"7\"") && !head.contains("set-cookie") && !head.contains("x-hop"),
            "{head}"
        );
    }
}

const PIECE: usize = 64 << 10;
const PIECES: i64 = 4096;
/// What sockets and connections on the way may hold.
const MOST_ON_THE_WAY: i64 = 512;

/// 256 MiB pass through a daemon, and only what is in buffers is ahead of who reads.
#[tokio::test(flavor = "multi_thread")]
async fn large_bodies_are_passed_on_in_small_parts() {
    let ahead = Arc::<AtomicI64>::default();
    let made = Arc::clone(&ahead);
    let body = move || async move {
        let pieces = stream::iter(0..PIECES).map(move |_| {
            made.fetch_add(1, Ordering::Relaxed);
            Ok::<_, String>(vec![7; PIECE])
        });
        Body::from_stream(pieces)
    };
    let taken = Arc::<AtomicI64>::default();
    let (counted, sent) = (Arc::clone(&taken), Arc::<AtomicI64>::default());
    let most_sent = Arc::<AtomicI64>::default();
    let (seen, most) = (Arc::clone(&sent), Arc::clone(&most_sent));
    let take = move |body: Body| async move {
        let mut pieces = body.into_data_stream();
        while let Some(Ok(piece)) = pieces.next().await {
            let taken = counted.fetch_add(piece.len() as i64, Ordering::Relaxed);
            most.fetch_max(seen.load(Ordering::Relaxed) - taken, Ordering::Relaxed);
            tokio::task::yield_now().await;
        }
        counted.load(Ordering::Relaxed).to_string()
    };
    let a = with_routes(Router::new().route("/v1/large", get(body).put(take))).await;
    let path = "/v1/fleet/hosts/host-b/api/v1/large";

    let mut stream = UnixStream::connect(a.socket()).await.unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let (mut buffer, mut read) = (vec![0; PIECE], 0_i64);
    loop {
        let length = tokio::time::timeout(PATIENCE, stream.read(&mut buffer)).await.unwrap().unwrap();
        if length == 0 {
            break;
        }
        read += length as i64;
        let waiting = ahead.load(Ordering::Relaxed) - read / PIECE as i64;
        assert!(waiting < MOST_ON_THE_WAY, "{waiting} pieces are on the way");
    }
    assert!(read > PIECES * PIECE as i64, "{read}");

    let mut stream = UnixStream::connect(a.socket()).await.unwrap();
    let length = PIECES * PIECE as i64;
    let head =
        format!("PUT {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    for _ in 0..PIECES {
        stream.write_all(&buffer).await.unwrap();
        sent.fetch_add(PIECE as i64, Ordering::Relaxed);
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.ends_with(&length.to_string()), "{answer}");
    let most = most_sent.load(Ordering::Relaxed) / PIECE as i64;
    assert!(most < MOST_ON_THE_WAY, "{most} pieces were on the way");
}

/// A host that stops while it carries a request out ends the wait; one that only takes its time does not.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_stops_meanwhile_is_not_waited_for() {
    let slow = || async {
        sleep(LOOK * 8).await;
        "at last"
    };
    let a = with_routes(Router::new().route("/v1/slow", get(slow).post(slow))).await;
    let answer = a.local("GET", "/v1/fleet/hosts/host-b/api/v1/slow", "", "").await;
    assert_eq!((answer.status, answer.body.as_str()), (200, "at last"));
    // It answers nothing, not even whether it is there.
    let a = with_routes(Router::new().fallback(std::future::pending::<String>)).await;
    for method in ["GET", "POST"] {
        let answer = a.local(method, "/v1/fleet/hosts/host-b/api/v1/slow", "", "").await;
        assert_eq!(answer.status, 503, "{answer:?}");
        assert!(answer.detail().starts_with("host-b ("), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_answer_says_that_a_host_is_not_reached() {
    let (a, b) = pair().await;
    let door = a.door.as_ref().unwrap();
    let ask = async |about: &str, by: &str| door.ask_about(&name(about), &name(by)).await;
    assert_eq!(ask("host-b", "host-a").await, Some(true));
    assert_eq!(ask("host-a", "host-b").await, Some(true));
    // Neither has heard of it, and one of them is the one that asks.
    assert_eq!(ask("host-c", "host-a").await, None);
    assert_eq!(ask("host-c", "host-b").await, None);
    // Nobody listens there any more.
    let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
    let gone = Member { address, ..a.member(3) };
    for host in [&a, &b] {
        let both = [("host-a", a.member(11)), ("host-b", b.member(12)), ("host-c", gone.clone())];
        host.members(&both);
    }
    assert_eq!(ask("host-c", "host-a").await, Some(false));
    assert_eq!(ask("host-c", "host-b").await, Some(false));
    // Who is asked does not answer.
    assert_eq!(ask("host-b", "host-c").await, None);
    // One that has never let this host in runs all the same.
    let (a, b) = pair().await;
    b.members(&[("host-b", b.member(12))]);
    let door = a.door.as_ref().unwrap();
    let presence = door.client.look(&name("host-b"), PATIENCE).await.unwrap();
    assert!(matches!(presence, Presence::Refuses(_)), "{presence:?}");
    assert_eq!(door.ask_about(&name("host-b"), &name("host-a")).await, Some(true));
}

/// What a client leaves alone ends at the other host, too: it decides what that means.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_ends_its_request_at_the_other_host() {
    struct Waiting(Arc<AtomicUsize>);
    impl Drop for Waiting {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let waiting = Arc::<AtomicUsize>::default();
    let count = Arc::clone(&waiting);
    let wait = move || async move {
        count.fetch_add(1, Ordering::Relaxed);
        let _waiting = Waiting(count);
        std::future::pending::<String>().await
    };
    let a = with_routes(Router::new().route("/v1/wait", get(wait.clone()).post(wait))).await;
    for method in ["GET", "POST"] {
        let mut stream = UnixStream::connect(a.socket()).await.unwrap();
        let head = format!(
            "{method} /v1/fleet/hosts/host-b/api/v1/wait HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let is = async |number| {
            let until = Instant::now() + PATIENCE;
            while waiting.load(Ordering::Relaxed) != number {
                assert!(Instant::now() < until, "{method}: {number}");
                sleep(Duration::from_millis(5)).await;
            }
        };
        is(1).await;
        drop(stream);
        is(0).await;
    }
}

fn event(message: Option<Message>) -> Value {
    match message {
        Some(Message::Text(text)) => serde_json::from_str(&text).unwrap(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn websockets_are_passed_on_until_their_host_leaves() {
    let (a, b) = pair().await;
    let raise = |text: &str| b.events.raise(spillway_api::EventKind::Failed, "host", text);
    let path = "/v1/fleet/hosts/host-b/api/v1/event-stream?limit=1";
    let open = async |path: &'static str, origin: &'static str| {
        let socket = a.socket();
        let headers = [("Origin", origin), ("Spillway-Caller", "admin root"), ("Cookie", "a=b")];
        tokio::task::spawn_blocking(move || websocket::open(&socket, path, &headers).unwrap()).await.unwrap()
    };
    let foreign = open(path, "https://evil.example").await.unwrap_err();
    assert!(foreign.starts_with("HTTP/1.1 403 "), "{foreign}");
    raise("first");
    for path in [path, "/v1/fleet/hosts/host-a/api/v1/fleet/self"] {
        let opened = open(path, "http://host.example").await;
        let Ok(mut socket) = opened else {
            assert!(path.contains("self"), "{opened:?}");
            continue;
        };
        let receive = |socket: &mut websocket::WebSocket| {
            tokio::task::block_in_place(|| socket.receive(PATIENCE).unwrap())
        };
        assert_eq!(event(receive(&mut socket))["text"], "first");
        raise("second");
        assert_eq!(event(receive(&mut socket))["text"], "second");
        socket.close(4001, "enough").unwrap();
        assert!(matches!(receive(&mut socket), Some(Message::Close(4001, _))));
    }
    let mut socket = open(path, "http://host.example").await.unwrap();
    a.members(&[("host-a", a.member(11))]);
    let ended = tokio::task::block_in_place(|| {
        loop {
            match socket.receive(PATIENCE) {
                Ok(Some(Message::Text(_))) => {}
                ended => break ended,
            }
        }
    });
    assert!(matches!(ended, Ok(Some(Message::Gone)) | Err(_)), "{ended:?}");
}
