//! The way in over TCP: TLS, tokens, roles, and what is written down of changes.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, create, import};
use rustix::process::Signal;
use serde_json::Value;
use sha2::{Digest, Sha256};
use spillway_api::client::{Address, Client, Token};
use spillway_api::{
    Catalog, CatalogSpec, Empty, ErrorCode, Event, EventKind, List, NewCatalog, NewSession, Problem, Session,
    SessionProof, SessionRole,
};
use spillway_testkit::certificate;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// A daemon that listens, with a token for each role: its word. `None`: no openssl here, which is said.
fn remote() -> Option<World> {
    remote_with(|_| Vec::new())
}

/// The same with more options.
fn remote_with(more: impl FnOnce(&World) -> Vec<String>) -> Option<World> {
    let mut world = World::unstarted();
    if let Err(e) = certificate::make("localhost", false, &world.path("cert"), &world.path("key")) {
        spillway_testkit::skip(&format!("openssl makes no certificate here: {e:#}"));
        return None;
    }
    let [cert, key, tokens] = ["cert", "key", "tokens"].map(|name| world.path(name).display().to_string());
    let lines =
        ["read", "operate", "admin"].map(|role| format!("{role} {role}er {:x}\n", Sha256::digest(role)));
    std::fs::write(&tokens, lines.concat()).unwrap();
    private(&tokens);
    let options = ["--listen", "127.0.0.1:0", "--tls-cert", &cert, "--tls-key", &key, "--tokens", &tokens];
    let options = options.map(str::to_owned).into_iter().chain(more(&world)).collect();
    world.start_with(options);
    Some(world)
}

fn private(path: &str) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

fn tcp(world: &World) -> TcpStream {
    tcp_from(world, 1)
}

/// From an address of the loopback network.
fn tcp_from(world: &World, last: u8) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let address: SocketAddr = world.ready_line.trim().rsplit_once("https://").unwrap().1.parse().unwrap();
    let fd = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&fd, &SocketAddr::from(([127, 0, 0, last], 0))).unwrap();
    connect(&fd, &address).unwrap();
    let stream = TcpStream::from(fd);
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

type Tls = StreamOwned<ClientConnection, TcpStream>;

/// Speaks TLS with the daemon, whose certificate is checked.
fn tls(world: &World) -> Tls {
    tls_over(world, tcp(world))
}

fn tls_over(world: &World, stream: TcpStream) -> Tls {
    tls_with(stream, world, &[])
}

/// The same, with these protocols to choose from.
fn tls_with(stream: TcpStream, world: &World, protocols: &[Vec<u8>]) -> Tls {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(world.path("cert")).unwrap()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols.to_vec();
    let client = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
    StreamOwned::new(client, stream)
}

/// The status of an answer to a request with these lines in its head.
fn ask(world: &World, method: &str, path: &str, lines: &str, body: &[u8]) -> u16 {
    let text = answer(world, method, path, lines, body);
    text.split(' ').nth(1).unwrap_or_else(|| panic!("{method} {path}: {text:?}")).parse().unwrap()
}

/// All of that answer.
fn answer(world: &World, method: &str, path: &str, lines: &str, body: &[u8]) -> String {
    answer_over(tls(world), method, path, lines, body)
}

fn answer_over(mut stream: Tls, method: &str, path: &str, lines: &str, body: &[u8]) -> String {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{lines}content-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    // It may have answered before all of it was sent.
    let _ = stream.write_all(body);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn token(word: &str) -> String {
    format!("authorization: Bearer {word}\r\n")
}

#[test]
fn who_has_no_token_gets_nothing_and_roles_hold() {
    let Some(world) = remote() else { return };
    let nobody =
        ["", "authorization: Bearer\r\n", "authorization: Basic YTpi\r\n", "authorization: bearer admin\r\n"];
    for lines in nobody.map(str::to_owned).into_iter().chain(["wrong", "adminer", "admin "].map(token)) {
        let want = if lines.ends_with("admin \r\n") { 200 } else { 401 };
        // A space at a header's end is none of its value's.
        assert_eq!(ask(&world, "GET", "/v1/images", &lines, b""), want, "{lines:?}");
    }
    assert_eq!(ask(&world, "GET", "/v1/metrics?token=admin", "", b""), 401);
    let act = br#"{"action": "stop", "select": {"names": ["desk-001"]}}"#;
    let store = br#"{"name": "s", "path": "relative", "class": "local"}"#;
    // 404 and 400 are of those who were let through.
    for (role, get, post, put) in
        [("read", 200, 403, 403), ("operate", 200, 404, 403), ("admin", 200, 404, 400)]
    {
        assert_eq!(ask(&world, "GET", "/v1/metrics", &token(role), b""), get, "{role}");
        assert_eq!(ask(&world, "POST", "/v1/machine-actions", &token(role), act), post, "{role}");
        assert_eq!(ask(&world, "POST", "/v1/stores", &token(role), store), put, "{role}");
    }
    // Of refusals the first of a kind: of who is not known, and of a token whose role is not enough.
    let written = world.audit();
    let seen: Vec<(&str, u64)> = written
        .iter()
        .map(|line| (line["who"].as_str().unwrap(), line["status"].as_u64().unwrap()))
        .collect();
    let want = [
        ("unknown", 401),
        ("reader", 403),
        ("operateer", 404),
        ("operateer", 403),
        ("adminer", 404),
        ("adminer", 400),
    ];
    assert_eq!(seen, want);
    assert!(written.iter().all(|line| line["from"] == "127.0.0.1"), "{written:?}");
    let asked = &written.iter().find(|line| line["who"] == "adminer").unwrap();
    assert_eq!((&asked["verb"], &asked["object"]["kind"]), (&"stop".into(), &"machine".into()), "{asked}");
    assert_eq!(asked["asked"]["select.names"], serde_json::json!(["desk-001"]), "{asked}");
    let text = std::fs::read_to_string(world.state().join("audit.log")).unwrap();
    assert!(!text.contains("Bearer"), "{text}");
}

/// A WebSocket begins as a GET, and whoever has one types.
#[test]
fn who_may_only_read_gets_no_console_and_no_screen() {
    let Some(world) = remote() else { return };
    let upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
                   sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    for view in ["console", "screen"] {
        let path = format!("/v1/machines/desk-001/{view}");
        // 400: the role suffices, and the request is no WebSocket, as it has 'connection: close'.
        for (role, status) in [("read", 403), ("operate", 400), ("admin", 400)] {
            let lines = token(role) + upgrade;
            assert_eq!(ask(&world, "GET", &path, &lines, b""), status, "{role} {view}");
            assert_eq!(ask(&world, "GET", &format!("{path}?x=1"), &lines, b""), status, "{role} {view}");
        }
        assert_eq!(ask(&world, "HEAD", &path, &token("read"), b""), 403, "{view}");
    }
    let written = world.audit();
    let is_it = |line: &&Value| line["verb"] == "open console of" && line["who"] == "operateer";
    assert!(written.iter().any(|line| is_it(&line) && line["status"] == 400), "{written:?}");
}

/// The client of a role, who speaks TLS with the daemon too.
fn client(world: &World, role: &str) -> Client {
    let port = world.ready_line.trim().rsplit_once(':').unwrap().1;
    let Ok(Address::Remote(there)) = Address::parse(format!("https://localhost:{port}").as_ref()) else {
        panic!("{}", world.ready_line)
    };
    Client::remote(there, Token::new(role).unwrap(), Some(&world.path("cert"))).unwrap()
}

#[test]
fn the_client_asks_and_follows_events_over_tcp() {
    let Some(world) = remote() else { return };
    import(&world, "debian", 1);
    let catalog = create(&client(&world, "admin"), "desk", r#"{"image": "debian", "count": 1}"#).unwrap();
    // Decided on what is not so any more: the revision comes along.
    let stale = client(&world, "admin").put_if::<_, Catalog>("/v1/catalogs/desk", 0, &catalog.spec);
    assert_eq!(common::refused(stale).code, ErrorCode::PreconditionFailed);
    assert_eq!(common::machines(&client(&world, "read"), "desk"), common::machines(&world.client(), "desk"));
    let refused = client(&world, "read").delete::<Empty>("/v1/catalogs/desk");
    assert_eq!(common::refused(refused).code, ErrorCode::Forbidden);
    let refused = common::refused(client(&world, "nobody").get::<List<Event>>("/v1/events"));
    assert!(refused.code == ErrorCode::Unauthenticated && refused.detail.contains("localhost"), "{refused}");
    assert_eq!(
        common::refused(client(&world, "nobody").follow(None).map(drop)).code,
        ErrorCode::Unauthenticated
    );

    // There is no program that could serve its disk.
    let reader = client(&world, "read");
    let mut following = reader.follow(None).unwrap();
    let start = serde_json::json!({ "action": "start", "select": { "names": ["desk-001"] } });
    client(&world, "operate").post::<_, Value>("/v1/machine-actions", &start).unwrap();
    let reset = serde_json::json!({ "action": "reset", "select": { "all": true }, "discard_data": true });
    let refused = client(&world, "operate").post::<_, Value>("/v1/machine-actions", &reset);
    let refused = common::refused(refused);
    assert!(refused.code == ErrorCode::Forbidden && refused.detail.contains("'admin'"), "{refused}");
    // A store may be nearly full here, and that is told too.
    let mut next = || loop {
        let event = following.next_event().unwrap().unwrap();
        if event.kind != EventKind::Space {
            return event;
        }
    };
    let first = next();
    // A retry that fails in the same way is no event. It is one again when somebody wants something.
    for action in ["stop", "start"] {
        let wanted = serde_json::json!({ "action": action, "select": { "names": ["desk-001"] } });
        client(&world, "operate").post::<_, Value>("/v1/machine-actions", &wanted).unwrap();
    }
    let second = std::iter::repeat_with(&mut next).find(|event| event.kind == EventKind::Failed).unwrap();
    assert_eq!((first.kind, first.object.as_str()), (EventKind::Failed, "machine/desk-001"));
    assert_eq!((second.kind, second.object.as_str()), (EventKind::Failed, "machine/desk-001"));
    assert!(first.id.number < second.id.number);
}

/// The cookie that an answer sets, and what it says of it.
fn cookie_of(answer: &str) -> (String, &str) {
    let line = answer.lines().find_map(|line| line.strip_prefix("set-cookie: ")).expect("it sets one");
    let (pair, attributes) = line.split_once("; ").unwrap();
    (format!("cookie: {pair}\r\n"), attributes)
}

fn log_in(world: &World, role: &str, lines: &str) -> String {
    let body = serde_json::json!({ "token": role }).to_string();
    answer(
        world,
        "POST",
        "/v1/session",
        &format!("content-type: application/json\r\n{lines}"),
        body.as_bytes(),
    )
}

#[test]
fn a_browser_shows_its_token_once() {
    let Some(world) = remote() else { return };
    let opened = log_in(&world, "operate", "sec-fetch-site: same-origin\r\n");
    assert!(opened.starts_with("HTTP/1.1 200 "), "{opened}");
    let (cookie, attributes) = cookie_of(&opened);
    assert!(cookie.starts_with("cookie: __Host-spillway="), "{cookie}");
    assert_eq!(attributes, "Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age=43200");
    let shown = answer(&world, "GET", "/v1/session", &cookie, b"");
    let session: Session = serde_json::from_str(shown.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!((session.caller.as_str(), session.role), ("operateer", SessionRole::Operate));
    assert!(session.by == SessionProof::Session && session.seconds_left.unwrap() > 43_000, "{session:?}");

    // A page of another site may not do anything with it, and neither may who does not say what page it is.
    let start = br#"{"action": "start", "select": {"all": true}}"#;
    let act = |lines: &str| ask(&world, "POST", "/v1/machine-actions", lines, start);
    for (site, status) in [("same-origin", 200), ("same-site", 403), ("cross-site", 403), ("none", 403)] {
        assert_eq!(act(&format!("{cookie}sec-fetch-site: {site}\r\n")), status, "{site}");
    }
    assert_eq!(act(&cookie), 403);
    assert_eq!(act(&token("operate")), 200, "a program says nothing of pages");
    assert_eq!(act(&(token("operate") + "sec-fetch-site: cross-site\r\n")), 403);
    assert_eq!(log_in(&world, "operate", "sec-fetch-site: cross-site\r\n").split(' ').nth(1), Some("403"));
    // The role holds, and a header counts more than a cookie.
    let own = format!("{cookie}sec-fetch-site: same-origin\r\n");
    assert_eq!(ask(&world, "DELETE", "/v1/catalogs/desk", &own, b""), 403);
    assert_eq!(ask(&world, "GET", "/v1/images", &(cookie.clone() + &token("wrong")), b""), 401);

    assert_eq!(ask(&world, "DELETE", "/v1/session", &cookie, b""), 403, "only the console logs out");
    let ended = answer(&world, "DELETE", "/v1/session", &own, b"");
    assert!(ended.starts_with("HTTP/1.1 200 ") && cookie_of(&ended).1.ends_with("; Max-Age=0"), "{ended}");
    assert_eq!(ask(&world, "GET", "/v1/session", &cookie, b""), 401);
    let audit = std::fs::read_to_string(world.path("state/audit.log")).unwrap();
    let count = |text: &str| audit.lines().filter(|line| line.contains(text)).count();
    assert_eq!((count(r#""verb":"log in""#), count(r#""verb":"log out""#)), (2, 1), "{audit}");
    assert!(!audit.contains("\"operate\"}") && !audit.contains(cookie.trim()), "no secret is in it: {audit}");
}

#[test]
fn who_shows_no_token_that_is_known_gets_no_session() {
    let Some(mut world) = remote() else { return };
    for wrong in ["", "wrong", "adminer"] {
        let refused = log_in(&world, wrong, "");
        assert!(refused.starts_with("HTTP/1.1 401 ") && !refused.contains("set-cookie"), "{refused}");
    }
    for body in ["", "{}", r#"{"token": 1}"#, r#"{"token": "admin", "role": "admin"}"#] {
        assert_eq!(ask(&world, "POST", "/v1/session", "", body.as_bytes()), 400, "{body}");
    }
    assert_eq!(ask(&world, "POST", "/v1/session", "", &[b' '; 5000]), 413);
    let refused = world.client().post::<_, Session>("/v1/session", &NewSession { token: "admin".into() });
    assert_eq!(common::refused(refused).code, ErrorCode::Conflict);
    let local: Session = world.client().get("/v1/session").unwrap();
    assert_eq!((local.role, local.by), (SessionRole::Admin, SessionProof::Socket));

    // It ends with its token, and with the daemon.
    let (cookie, _) = cookie_of(&log_in(&world, "admin", ""));
    let is_open = |world: &World| ask(world, "GET", "/v1/session", &cookie, b"") == 200;
    assert!(is_open(&world));
    assert_eq!(world.end(Signal::TERM), Some(0));
    world.start();
    assert!(!is_open(&world));
}

#[test]
fn a_browser_has_one_connection_for_all_of_its_tabs() {
    let Some(world) = remote() else { return };
    let address = world.ready_line.trim().rsplit_once("https://127.0.0.1").unwrap().1;
    let at = |path: &str| format!("https://localhost{address}{path}");
    let mut curl = Command::new("curl");
    curl.args(["--http2", "-s", "-Z", "--parallel-max", "40", "--max-time", "4", "-o", "/dev/null"]);
    curl.args([
        "-w",
        "%{http_version} %{http_code} %{num_connects} %{time_total}\n",
        "-H",
        token("read").trim_end(),
    ]);
    curl.arg("--cacert").arg(world.path("cert"));
    // The first opens the connection, on which all others wait for each other's ends if they do not share it.
    let streams = (0..20).map(|_| at("/v1/event-stream"));
    for url in [at("/v1/session")].into_iter().chain(streams).chain((0..5).map(|_| at("/v1/session"))) {
        curl.arg(url).args(["-o", "/dev/null"]);
    }
    let done = String::from_utf8(curl.output().unwrap().stdout).unwrap();
    let rows: Vec<Vec<&str>> = done.lines().map(|line| line.split(' ').collect()).collect();
    assert!(rows.len() == 26 && rows.iter().all(|row| row[..2] == ["2", "200"]), "{done}");
    assert_eq!(rows.iter().map(|row| row[2].parse::<u32>().unwrap()).sum::<u32>(), 1, "{done}");
    let refused = Command::new("curl")
        .args(["--http2", "-s", "-H", token("read").trim_end(), &at("/v1/images/none")])
        .arg("--cacert")
        .arg(world.path("cert"))
        .output();
    let refused: Problem = serde_json::from_slice(&refused.unwrap().stdout).unwrap();
    assert!(refused.code == ErrorCode::NotFound && refused.detail.contains("'none'"), "{refused}");
    let soon = rows.iter().filter(|row| row[3].parse::<f64>().unwrap() < 3.0).count();
    assert_eq!(soon, 6, "{done}");
}

#[test]
fn what_guests_are_told_is_not_for_those_who_only_read() {
    let Some(world) = remote() else { return };
    import(&world, "debian", 1);
    let spec = r##"{"image": "debian", "user_data": "#cloud-config\npassword: hunter2\n"}"##;
    create(&world.client(), "desk", spec).unwrap();
    for (role, sees) in [("read", false), ("operate", true), ("admin", true)] {
        for path in ["/v1/catalogs", "/v1/catalogs/desk"] {
            let text = answer(&world, "GET", path, &token(role), b"");
            assert!(text.contains("desk") && text.contains("hunter2") == sees, "{role} {path}: {text}");
        }
    }

    // What was read so is not written back: it would lose what was left out.
    let admin = client(&world, "admin");
    let whole: Catalog = admin.get("/v1/catalogs/desk").unwrap();
    let redacted: Catalog = client(&world, "read").get("/v1/catalogs/desk").unwrap();
    assert_eq!(
        (redacted.spec.user_data.as_deref(), &*redacted.spec.redacted),
        (None, &["user_data".to_owned()][..])
    );
    let once = CatalogSpec { user_data: Some("(not for the role 'read')".into()), ..whole.spec.clone() };
    for (n, spec) in [redacted.spec, once].into_iter().enumerate() {
        let spec = CatalogSpec { count: 2, ..spec };
        let changed = admin.put::<_, Catalog>("/v1/catalogs/desk", &spec).map(drop);
        let new = NewCatalog { name: format!("copy{n}").parse().unwrap(), spec };
        let made = admin.post::<_, Catalog>("/v1/catalogs", &new).map(drop);
        for error in [common::refused(changed), common::refused(made)] {
            assert_eq!(error.code, ErrorCode::Invalid, "{error}");
            assert!(error.detail.contains("user_data") && error.detail.contains("role 'operate'"), "{error}");
        }
    }
    assert_eq!(admin.get::<List<Catalog>>("/v1/catalogs").unwrap().items, [whole]);
    // Nor is it in the log.
    let text = std::fs::read_to_string(world.state().join("audit.log")).unwrap();
    assert!(text.contains("user_data") && !text.contains("hunter2"), "{text}");
}

#[test]
fn changes_on_the_socket_are_written_down_with_their_user() {
    let world = World::new();
    let ask = |head: &str| {
        let mut stream = UnixStream::connect(world.socket()).unwrap();
        stream
            .write_all(format!("{head} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes())
            .unwrap();
        stream.read_to_end(&mut Vec::new()).unwrap();
    };
    ask("GET /v1/images");
    ask("DELETE /v1/operations/7?secret=1");
    let uid = rustix::process::getuid().as_raw();
    let written = world.audit();
    assert_eq!(written.len(), 1, "{written:?}");
    let line = &written[0];
    let want = serde_json::json!({ "time": line["time"], "who": format!("uid {uid}"), "role": "admin", "from": "local",
        "uid": uid, "pid": std::process::id(), "verb": "cancel", "object": { "kind": "operation", "name": "7" },
        "result": "not_found", "status": 404 });
    assert_eq!(*line, want);
}

/// Of those who go before the answer comes: what was done is written down.
#[test]
fn changes_of_those_who_do_not_wait_are_written_down() {
    let world = World::new();
    for n in 0..60 {
        let mut stream = UnixStream::connect(world.socket()).unwrap();
        let path = world.path("stores").join(n.to_string());
        let body = serde_json::json!({ "name": format!("s{n}"), "path": path, "class": "local" }).to_string();
        let head = format!("POST /v1/stores HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        // In the middle of what is done, if it is begun at all.
        thread::sleep(Duration::from_micros(50 * n));
    }
    let client = world.client();
    let done = || client.get::<Value>("/v1/stores").unwrap()["items"].as_array().unwrap().len() - 1;
    let written = || world.audit().iter().filter(|line| line["status"] == 200).count();
    // What was begun ends.
    let all = || (done() > 0 && written() == done()).then_some(());
    let found = spillway_testkit::process::wait_until(Duration::from_secs(10), all);
    found.unwrap_or_else(|| panic!("{} are done, {} written down", done(), written()));
}

#[test]
fn what_is_no_tls_or_too_much_or_too_slow_disturbs_nobody() {
    let Some(world) = remote() else { return };
    let mut plain = tcp(&world);
    plain.write_all(b"GET /v1/images HTTP/1.1\r\nhost: x\r\nauthorization: Bearer admin\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!String::from_utf8_lossy(&answer).contains("HTTP/1.1"), "{answer:?}");
    let large = vec![b' '; 300 << 10];
    assert_eq!(ask(&world, "POST", "/v1/catalogs", &token("admin"), &large), 413);
    assert_eq!(ask(&world, "POST", "/v1/catalogs", "", &large), 401);
    // Silent before TLS, after it, in the middle of a head and of a body.
    let idle: Vec<TcpStream> = (0..20).map(|_| tcp(&world)).collect();
    let slow: Vec<_> = [
        "",
        "GET /v1/im",
        "POST /v1/stores HTTP/1.1\r\nauthorization: Bearer admin\r\ncontent-length: 100\r\n\r\n{",
    ]
    .map(|beginning| {
        let mut stream = tls(&world);
        stream.write_all(beginning.as_bytes()).unwrap();
        stream.flush().unwrap();
        stream
    })
    .into();
    assert_eq!(ask(&world, "GET", "/v1/images", &token("read"), b""), 200);
    drop((idle, slow));
}

#[test]
fn a_door_without_a_lock_is_not_opened() {
    let Some(world) = remote() else { return };
    let start = |options: &[&str]| {
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_spillwayd"));
        daemon
            .arg("--state")
            .arg(world.path("other"))
            .arg("--socket")
            .arg(world.path("other.sock"))
            .args(options);
        let done = daemon.args(["--hypervisor", "none"]).output().unwrap();
        assert!(!done.status.success(), "{options:?}");
        String::from_utf8(done.stderr).unwrap()
    };
    let [cert, key, tokens] = ["cert", "key", "tokens"].map(|name| world.path(name).display().to_string());
    assert!(start(&["--listen", "127.0.0.1:0"]).contains("--tls-cert"));
    assert!(start(&["--listen", "127.0.0.1:0", "--tls-cert", &cert, "--tls-key", &key]).contains("--tokens"));
    assert!(start(&["--tokens", &tokens]).contains("--listen"));
    let all = |cert: &str, key: &str, tokens: &str| {
        start(&["--listen", "127.0.0.1:0", "--tls-cert", cert, "--tls-key", key, "--tokens", tokens])
    };
    assert!(all(&key, &key, &tokens).contains("--tls-cert"));
    assert!(all(&cert, &cert, &tokens).contains("--tls-key"));
    std::fs::set_permissions(world.path("tokens"), std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(all(&cert, &key, &tokens).contains("chmod 0600"));
    private(&tokens);
    std::fs::set_permissions(world.path("key"), std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(all(&cert, &key, &tokens).contains("chmod 0600"));
}

/// A request on a connection that stays.
fn send(stream: &mut Tls, path: &str, role: &str) {
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n{}\r\n", token(role)).as_bytes()).unwrap();
    stream.flush().unwrap();
}

/// Reads a response's head, and a part of its body.
fn head(stream: &mut Tls) -> String {
    let mut text = vec![0; 4096];
    let n = stream.read(&mut text).unwrap();
    String::from_utf8_lossy(&text[..n]).into_owned()
}

/// Whoever connects and says nothing, or reads nothing, keeps nobody else out: neither from there nor from elsewhere.
#[test]
fn idle_and_slow_connections_keep_no_administrator_out() {
    let Some(world) = remote() else { return };
    import(&world, "debian", 1);
    create(&world.client(), "desk", r#"{"image": "debian", "count": 500}"#).unwrap();
    let admin_from = |last| {
        let begun = Instant::now();
        let text =
            answer_over(tls_over(&world, tcp_from(&world, last)), "GET", "/v1/images", &token("admin"), b"");
        assert!(text.starts_with("HTTP/1.1 200 "), "from {last}: {text}");
        // Not only when the deadlines of others have come.
        assert!(begun.elapsed() < Duration::from_secs(8), "from {last}: {:?}", begun.elapsed());
    };
    // Before TLS: more than may be of one address, and more than may be of all.
    let idle: Vec<TcpStream> =
        (2..8).flat_map(|last| (0..150).map(move |_| last)).map(|last| tcp_from(&world, last)).collect();
    (1..4).for_each(admin_from);
    // After authentication: idle ones, ones that follow events, ones that leave a large answer unread; the
    // administrator's own too.
    let mut identified = Vec::new();
    for role in ["read", "admin"] {
        for n in 0..70 {
            let mut stream = tls(&world);
            send(&mut stream, ["/v1/images", "/v1/event-stream", "/v1/machines"][n % 3], role);
            if n % 3 == 0 {
                assert!(head(&mut stream).contains(" 200 "));
            }
            identified.push(stream);
        }
    }
    (1..4).for_each(admin_from);
    assert_eq!(ask(&world, "GET", "/v1/images", &token("read"), b""), 200);
    drop((idle, identified));
}

/// A frame of HTTP/2 (RFC 9113, 4.1).
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

/// How long a connection with HTTP/2 stays open whose client sends this, answers each ping, and reads nothing of what it asks for.
fn stays_open(world: &World, first: &[u8]) -> Duration {
    let (begun, mut stream) = (Instant::now(), tls_with(tcp(world), world, &[b"h2".to_vec()]));
    stream.sock.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(first).unwrap();
    loop {
        let mut head = [0; 9];
        if stream.read_exact(&mut head).is_err() {
            return begun.elapsed();
        }
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        stream.read_exact(&mut payload).unwrap();
        // A ping, and settings that are no answer (6.5, 6.7).
        let answer = match (head[3], head[4] & 1) {
            (6, 0) => frame(6, 1, 0, &payload),
            (4, 0) => frame(4, 1, 0, &[]),
            _ => continue,
        };
        // Who has not said what it speaks says nothing else.
        if first.is_empty() {
            continue;
        }
        if stream.write_all(&answer).is_err() {
            return begun.elapsed();
        }
    }
}

#[test]
fn idle_and_slow_connections_with_http_2_end() {
    let Some(world) = remote() else { return };
    let preface = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(4, 0, 0, &[0, 4, 0, 0, 0, 0])].concat();
    // Literal header fields, none indexed (RFC 7541, 6.2.2).
    let field = |name: &str, value: &str| {
        [&[0, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
    };
    let fields =
        [(":method", "GET"), (":scheme", "https"), (":authority", "x"), (":path", "/console/app.js")];
    let fields = fields.map(|(name, value)| field(name, value)).concat();
    // END_STREAM and END_HEADERS: it asks for much, with a window of 0.
    let asks = [&preface[..], &frame(1, 5, 1, &fields)].concat();
    thread::scope(|scope| {
        for (what, first) in [("silent", &[][..]), ("idle", &preface), ("reads nothing", &asks)] {
            let world = &world;
            scope.spawn(move || {
                let open = stays_open(world, first);
                let range = Duration::from_secs(25)..Duration::from_secs(45);
                assert!(range.contains(&open), "{what}: {open:?}");
            });
        }
    });
}

/// Requests that are being answered are not broken off: what is too much is refused, and of administrators only their own.
#[test]
fn too_many_requests_of_a_token_are_refused_and_of_others_none() {
    let Some(world) = remote_with(|world| vec!["--worker".into(), world.sleeper()]) else { return };
    import(&world, "debian", 1);
    create(&world.client(), "desk", r#"{"image": "debian", "count": 1}"#).unwrap();
    let start = serde_json::json!({ "action": "start", "select": { "names": ["desk-001"] } });
    world.client().post::<_, Value>("/v1/machine-actions", &start).unwrap();
    let waits = "/v1/machines/desk-001?wait=30";
    let waiter = || {
        let mut stream = tls(&world);
        send(&mut stream, waits, "read");
        stream
    };
    let mut waiting: Vec<Tls> = (0..64).map(|_| waiter()).collect();
    // While one of them has not been read yet, it is closed for a newer connection: another one takes its place.
    let refused = || {
        let text = answer(&world, "GET", "/v1/images", &token("read"), b"");
        if !text.contains(" 200 ") {
            return Some(text);
        }
        waiting.push(waiter());
        None
    };
    let refused = spillway_testkit::process::wait_until(Duration::from_secs(10), refused).unwrap();
    assert!(refused.starts_with("HTTP/1.1 429 ") && refused.contains("connection: close"), "{refused}");
    assert!(refused.contains(r#""code":"busy""#) && refused.contains("reader from 127.0.0.1"), "{refused}");
    for role in ["operate", "admin"] {
        assert_eq!(ask(&world, "GET", "/v1/images", &token(role), b""), 200, "{role}");
    }
    drop(waiting);
    let again = || (ask(&world, "GET", "/v1/images", &token("read"), b"") == 200).then_some(());
    spillway_testkit::process::wait_until(Duration::from_secs(10), again).expect("the places are free again");
}

/// 30,000 requests of a token that may only read: they are counted, and every other line is in its place.
#[test]
fn refused_requests_push_nothing_out_of_the_audit_log() {
    const MANY: usize = 30_000;
    let Some(mut world) = remote_with(|_| vec!["--audit-size".into(), "1M".into()]) else { return };
    let store = |n: u32| {
        let path = world.path("stores").join(n.to_string());
        let body = serde_json::json!({ "name": format!("s{n}"), "path": path, "class": "local" });
        client(&world, "admin").post::<_, Value>("/v1/stores", &body).unwrap();
    };
    store(1);
    let mut stream = tls(&world);
    let (mut refused, mut buffer) = (0, vec![0; 1 << 16]);
    let batch = format!("DELETE /v1/catalogs/desk HTTP/1.1\r\nhost: x\r\n{}\r\n", token("read")).repeat(100);
    for _ in 0..MANY / 100 {
        stream.write_all(batch.as_bytes()).unwrap();
        stream.flush().unwrap();
        let mut text = Vec::new();
        let count = |text: &[u8]| text.windows(13).filter(|part| *part == b"HTTP/1.1 403 ").count();
        while count(&text) < 100 || !text.ends_with(b"}") {
            let n = stream.read(&mut buffer).unwrap();
            assert!(n > 0, "{refused} were answered");
            text.extend_from_slice(&buffer[..n]);
        }
        refused += 100;
    }
    store(2);
    world.end(Signal::TERM);
    let lines = world.audit();
    let made: Vec<&Value> =
        lines.iter().filter(|line| line["verb"] == "create").map(|line| &line["object"]["name"]).collect();
    assert_eq!(made, ["s1", "s2"]);
    let (first, sums): (Vec<&Value>, Vec<&Value>) =
        lines.iter().filter(|line| line["who"] == "reader").partition(|line| line["count"].is_null());
    assert_eq!((first.len(), &first[0]["verb"]), (1, &"delete".into()), "{first:?}");
    let counted: u64 = sums.iter().map(|line| line["count"].as_u64().unwrap()).sum();
    assert_eq!((counted as usize, lines.len()), (MANY - 1, 3 + sums.len()));
}

#[test]
fn a_change_says_what_it_has_changed_in_which_object() {
    let mut world = World::unstarted();
    world.start_with(vec![
        "--audit".into(),
        world.path("log").display().to_string(),
        "--audit".into(),
        "journal".into(),
    ]);
    import(&world, "debian", 2);
    let local = world.client();
    let made =
        create(&local, "desk", r##"{"image": "debian", "count": 2, "user_data": "hunter2"}"##).unwrap();
    let spec = CatalogSpec { count: 3, grace_seconds: 5, user_data: Some("hunter3".into()), ..made.spec };
    local.put::<_, Catalog>("/v1/catalogs/desk?discard_data=true", &spec).unwrap();
    local
        .post::<_, Catalog>("/v1/catalogs/desk/update", &serde_json::json!({ "image": "debian:2" }))
        .unwrap();
    local.post::<_, Value>("/v1/host", &serde_json::json!({ "action": "close" })).unwrap();
    assert!(world.audit().is_empty(), "it is another file");
    let text = std::fs::read_to_string(world.path("log")).unwrap();
    assert!(!text.contains("hunter"), "{text}");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let line = |verb: &str| {
        lines.iter().rfind(|line| line["verb"] == verb).unwrap_or_else(|| panic!("{verb}: {text}"))
    };
    assert_eq!(line("import")["object"], serde_json::json!({ "kind": "image", "name": "debian" }));
    assert_eq!(line("create")["object"], serde_json::json!({ "kind": "catalog", "name": "desk" }));
    let fields = |verb: &str| line(verb)["changed"].clone();
    assert_eq!(
        fields("create"),
        serde_json::json!([
            { "field": "count", "old": null, "new": 2 }, { "field": "image", "old": null, "new": "debian" },
            { "field": "user_data", "old": null, "new": "(secret)" },
        ])
    );
    assert_eq!(
        fields("change"),
        serde_json::json!([
            { "field": "count", "old": 2, "new": 3 }, { "field": "grace_seconds", "old": 60, "new": 5 },
            { "field": "user_data", "old": "(secret)", "new": "(secret)" },
        ])
    );
    assert_eq!(line("change")["asked"]["query"], "discard_data=true");
    assert_eq!(
        fields("update"),
        serde_json::json!([
            { "field": "image", "old": "debian", "new": "debian:2" }, { "field": "version", "old": 1, "new": 2 },
        ])
    );
    assert_eq!(line("close")["object"]["kind"], "host");
}

/// The status of an answer on a connection that stays.
fn ask_on(stream: &mut Tls, role: &str) -> u16 {
    send(stream, "/v1/operations", role);
    let (mut answer, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        let n = stream.read(&mut buffer).unwrap();
        assert!(n > 0, "{:?}", String::from_utf8_lossy(&answer));
        answer.extend_from_slice(&buffer[..n]);
        let text = String::from_utf8_lossy(&answer);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length =
            head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
        if body.len() >= length.unwrap_or(0) {
            return text.split(' ').nth(1).unwrap().parse().unwrap();
        }
    }
}

#[test]
fn a_hangup_makes_it_read_tokens_and_certificate_again() {
    let Some(mut world) = remote() else { return };
    let mut stays = tls(&world);
    assert_eq!((ask_on(&mut stays, "admin"), ask_on(&mut stays, "new")), (200, 401));
    let tokens = world.path("tokens").display().to_string();
    let write = |name: &str| {
        std::fs::write(&tokens, format!("admin {name} {:x}\n", Sha256::digest(name))).unwrap();
        private(&tokens);
    };
    let mut follows = tls(&world);
    send(&mut follows, "/v1/event-stream", "admin");
    assert!(head(&mut follows).starts_with("HTTP/1.1 200"));
    let until = |what: &str, is: &mut dyn FnMut() -> bool| {
        let found = spillway_testkit::process::wait_until(Duration::from_secs(20), || is().then_some(()));
        found.unwrap_or_else(|| panic!("{what}"));
    };
    // Another token and another certificate: those who are known hold at once, on old connections too.
    write("new");
    let [cert, key] = ["cert", "key"].map(|name| world.path(name));
    let old = std::fs::read(&cert).unwrap();
    certificate::make("localhost", false, &cert, &key).unwrap();
    assert_ne!(old, std::fs::read(&cert).unwrap());
    assert_eq!(
        (ask_on(&mut stays, "admin"), ask_on(&mut stays, "new")),
        (200, 401),
        "nobody has asked for it"
    );
    world.signal(Signal::HUP);
    until("the new token is not known", &mut || ask_on(&mut stays, "new") == 200);
    assert_eq!(ask_on(&mut stays, "admin"), 401, "one that was taken away");
    // Who follows with it has the last piece of the stream, and no events of later.
    until("a stream goes on without its token", &mut || head(&mut follows).ends_with("0\r\n\r\n"));
    // By the certificate that is in the file now.
    assert_eq!(ask(&world, "GET", "/v1/images", &token("new"), b""), 200);

    // What cannot be used changes nothing, and is told; nor does the half that could be.
    let failures = |world: &World| -> Vec<String> {
        let events: List<Event> = world.client().get("/v1/events").unwrap();
        events.items.into_iter().filter(|event| event.object == "host").map(|event| event.text).collect()
    };
    std::fs::write(&key, "no key").unwrap();
    write("newer");
    world.signal(Signal::HUP);
    until("a key that is none is not told of", &mut || failures(&world).len() == 1);
    std::fs::write(&tokens, "nonsense\n").unwrap();
    world.signal(Signal::HUP);
    until("tokens that are none are not told of", &mut || failures(&world).len() == 2);
    let events = failures(&world);
    assert!(events[0].contains("--tls-key") && events[0].contains("stay as they were"), "{events:?}");
    assert!(events[1].contains("--tokens") && events[1].contains("line 1"), "{events:?}");
    assert_eq!(["new", "newer", "nonsense"].map(|role| ask_on(&mut stays, role)), [200, 401, 401]);
    assert_eq!(ask(&world, "GET", "/v1/images", &token("new"), b""), 200);

    // A daemon that listens nowhere else goes on too.
    world.end(Signal::KILL);
    world.start_with(vec![]);
    world.signal(Signal::HUP);
    world.client().get::<Value>("/v1/images").unwrap();
    assert_eq!(world.end(Signal::TERM), Some(0));
}
