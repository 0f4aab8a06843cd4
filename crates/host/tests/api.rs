//! What the interface refuses, asked over the raw socket.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, ask_with, create, head_and_body, import, tag, until};
use rustix::process::Signal;
use serde_json::{Value, json};
use spillway_api::client::ClientError;
use spillway_api::{
    Catalog, CatalogSpec, ErrorCode, Event, EventId, Figures, HISTORY_SERIES, History, List, MachineDetails,
    Operation, OperationState, Page, Power, Problem, ProblemType,
};
use spillway_testkit::websocket::{self, Message, WebSocket};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread;
use std::time::Duration;

/// Asks, and gives the status and the body.
fn ask(world: &World, method: &str, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
    ask_with(world, method, path, "", body)
}

fn refused(world: &World, method: &str, path: &str, body: &[u8]) -> (u16, Problem) {
    let (status, body) = ask(world, method, path, body);
    let error = serde_json::from_slice(&body);
    (
        status,
        error.unwrap_or_else(|e| panic!("{method} {path}: {status} {e}: {}", String::from_utf8_lossy(&body))),
    )
}

#[test]
fn what_cannot_be_is_refused_in_words() {
    let world = World::new();
    let import = "/v1/images/debian/versions";
    let large = vec![b' '; 300 << 10];
    use ErrorCode::*;
    for (method, path, body, status, code, word) in [
        ("GET", "/v1", "", 404, NotFound, "nothing at /v1"),
        ("GET", "/console/..%2fapp.js", "", 404, NotFound, "no file"),
        ("GET", "/v1/images/../../etc/passwd", "", 404, NotFound, "nothing at"),
        ("GET", "/v1/images/..%2f..%2fetc", "", 400, Invalid, "is no name"),
        ("GET", "/v1/images/%00", "", 400, Invalid, "is no name"),
        ("GET", "/v1/images/%ff", "", 400, Invalid, "UTF-8"),
        ("GET", "/v1/images/Debian", "", 400, Invalid, "is no name"),
        ("DELETE", "/v1/images", "", 405, MethodNotAllowed, "method"),
        ("DELETE", "/v1/images/debian/versions/-1", "", 400, Invalid, "-1"),
        ("DELETE", "/v1/images/debian/versions/4294967296", "", 400, Invalid, "4294967296"),
        ("DELETE", "/v1/images/debian/versions/1", "", 404, NotFound, "no image 'debian'"),
        ("GET", "/v1/operations/1", "", 404, NotFound, "operation 1"),
        ("GET", "/v1/operations/1?wait=31", "", 400, Invalid, "wait: allowed is 0 to 30"),
        ("GET", "/v1/operations/1?wait_seconds=1", "", 400, Invalid, "wait_seconds"),
        ("GET", "/v1/problem-types/no", "", 400, Invalid, "no"),
        ("POST", import, "", 400, Invalid, "body"),
        ("POST", import, "{", 400, Invalid, "body"),
        ("POST", import, "[]", 400, Invalid, "body"),
        ("POST", import, r#"{"path": "/x", "format": "iso"}"#, 400, Invalid, "iso"),
        (
            "POST",
            import,
            r#"{"path": "/x", "format": "raw", "backing": 1}"#,
            400,
            Invalid,
            "unknown field `backing`",
        ),
        ("POST", import, r#"{"path": "/x", "format": "raw"} x"#, 400, Invalid, "trailing"),
        ("POST", import, r#"{"path": "/dev/zero", "format": "raw", "store": "no"}"#, 400, Invalid, "regular"),
        (
            "POST",
            import,
            r#"{"path": "/etc/passwd", "format": "raw", "store": "defalt"}"#,
            404,
            NotFound,
            "'default'",
        ),
        ("POST", import, std::str::from_utf8(&large).unwrap(), 413, TooLarge, "body"),
        ("POST", "/v1/stores", r#"{"name": "s", "path": "x", "class": "local"}"#, 400, Invalid, "absolute"),
        (
            "POST",
            "/v1/stores",
            r#"{"name": "s", "path": "/proc/x", "class": "local"}"#,
            400,
            Invalid,
            "/proc/x",
        ),
    ] {
        let (found, error) = refused(&world, method, path, body.as_bytes());
        assert_eq!((found, error.status, error.code), (status, status, code), "{method} {path} {error:?}");
        let (address, instance) = (format!("/v1/problem-types/{}", code.word()), path.split('?').next());
        assert_eq!((&error.address, error.instance.as_deref()), (&address, instance), "{method} {path}");
        assert!(error.detail.contains(word), "{method} {path} {error:?}");
    }
    // Nothing of it has done anything, and it still answers.
    assert_eq!(ask(&world, "GET", "/v1/images", b""), (200, b"{\"items\":[]}".to_vec()));
}

/// Whoever refuses a request, the answer is a problem, and has what HTTP wants beside it.
#[test]
fn every_refusal_is_a_problem() {
    let world = World::new();
    let large = vec![b' '; 300 << 10];
    let stores = "/v1/stores";
    for (method, path, lines, body, status, line) in [
        ("GET", "/v1/images/x", "", "", 404, ""),
        ("PATCH", stores, "", "", 405, "allow: "),
        ("POST", stores, "content-type: application/x-www-form-urlencoded\r\n", "{}", 415, ""),
        ("POST", stores, "content-type: \u{e9}\r\n", "{}", 415, ""),
        ("POST", stores, "content-type: application/json; charset=utf-8\r\n", "{", 400, ""),
        ("POST", stores, "content-type: application/merge-patch+json\r\n", "{", 400, ""),
        ("POST", stores, "", std::str::from_utf8(&large).unwrap(), 413, ""),
        ("HEAD", "/v1/images/x", "", "", 404, ""),
        ("GET", "/v1/images?limit=x", "", "", 400, ""),
        ("POST", "/v1/catalogs/x/claims", "idempotency-key: a b\r\n", "{}", 400, ""),
    ] {
        let (head, found) = head_and_body(&world, method, path, lines, body.as_bytes());
        let starts = head.starts_with(&format!("http/1.1 {status} "));
        assert!(
            starts && head.contains("content-type: application/problem+json\r\n"),
            "{method} {path}: {head}"
        );
        assert!(head.contains(line), "{method} {path}: {head}");
        if method != "HEAD" {
            let problem: Problem = serde_json::from_slice(&found).unwrap();
            assert_eq!((problem.status, problem.code.status()), (status, status), "{method} {path}");
        }
    }
    // The kind of a problem can be looked up where it says.
    let (_, missing) = refused(&world, "GET", "/v1/images/x", b"");
    let (status, kind) = ask(&world, "GET", &missing.address, b"");
    assert_eq!((status, serde_json::from_slice(&kind).ok()), (200, Some(ErrorCode::NotFound.describe())));
    let kinds: List<ProblemType> = world.client().get("/v1/problem-types").unwrap();
    assert_eq!(kinds.items.len(), ErrorCode::ALL.len());
}

#[test]
fn an_object_has_a_tag_and_who_names_another_changes_nothing() {
    let world = World::new();
    import(&world, "debian", 2);
    let client = world.client();
    create(&client, "desk", r#"{"image": "debian", "count": 2}"#).unwrap();
    let tag = |path: &str| tag(&world, path);
    let image = "/v1/images/debian";
    let (machine, host) = ("/v1/machines/desk-002", "/v1/host");
    let close = r#"{"action": "close"}"#;
    let open = r#"{"action": "open"}"#;
    let spec = r#"{"image": "debian", "count": 2, "labels": {"a": "b"}}"#;
    for (read, method, path, body) in [
        ("/v1/catalogs/desk", "PUT", "/v1/catalogs/desk", spec),
        (image, "PUT", "/v1/images/debian/tags/gold", r#"{"version": 1}"#),
        (image, "PUT", "/v1/images/debian/published", r#"{"version": 2}"#),
        (image, "DELETE", "/v1/images/debian/tags/gold", ""),
        (image, "DELETE", "/v1/images/debian/versions/1", ""),
        (host, "POST", host, close),
        (host, "POST", host, open),
        (machine, "DELETE", machine, ""),
        ("/v1/catalogs/desk", "DELETE", "/v1/catalogs/desk", ""),
        (image, "DELETE", image, ""),
    ] {
        let before = tag(read);
        let other = "if-match: \"999999\"\r\n";
        let (status, body_of) = ask_with(&world, method, path, other, body.as_bytes());
        let problem: Problem = serde_json::from_slice(&body_of).unwrap();
        assert_eq!((status, problem.code), (412, ErrorCode::PreconditionFailed), "{method} {path}");
        assert!(problem.detail.contains(&before), "{problem:?} {before}");
        assert_eq!(tag(read), before, "{method} {path}");
        if path.ends_with("versions/1") {
            // It is in the history of a catalog.
            continue;
        }
        let mine = format!("if-match: {before}\r\n");
        let (status, body_of) = ask_with(&world, method, path, &mine, body.as_bytes());
        assert!(status == 200, "{method} {path}: {}", String::from_utf8_lossy(&body_of));
        if method != "DELETE" || read != path {
            assert_ne!(tag(read), before, "{method} {path}");
        }
    }
}

#[test]
fn what_must_be_new_does_not_replace_and_a_dry_run_changes_nothing() {
    let world = World::new();
    import(&world, "debian", 2);
    import(&world, "other", 1);
    let client = world.client();
    create(&client, "desk", r#"{"image": "debian", "count": 1}"#).unwrap();
    let gold = "/v1/images/debian/tags/gold";
    let only_new = "if-none-match: *\r\n";
    let name = |lines: &str, version: u32| {
        let body = format!(r#"{{"version": {version}}}"#);
        ask_with(&world, "PUT", gold, lines, body.as_bytes()).0
    };
    assert_eq!([name("if-none-match: \"1\"\r\n", 1), name(only_new, 1), name(only_new, 2)], [400, 200, 412]);
    // What cannot be is refused, what can be is answered, and nothing is stored.
    let state = || {
        let get = |path: &str| ask(&world, "GET", path, b"").1;
        ["/v1/catalogs/desk", "/v1/images/debian", "/v1/images/other", "/v1/machines", "/v1/stores"]
            .map(|path| String::from_utf8(get(path)).unwrap())
    };
    let before = state();
    let folder = world.path("other").display().to_string();
    let full = world.state().display().to_string();
    let store = |path: &str| json!({ "name": "other", "path": path, "class": "local" }).to_string();
    for (method, path, body, status) in [
        ("POST", "/v1/catalogs", r#"{"name": "lab", "spec": {"image": "debian"}}"#, 200),
        ("POST", "/v1/catalogs", r#"{"name": "desk", "spec": {"image": "debian"}}"#, 409),
        ("PUT", "/v1/catalogs/desk", r#"{"image": "debian:2"}"#, 200),
        ("POST", "/v1/catalogs/desk/update", r#"{"image": "debian:2", "rollout": "now"}"#, 200),
        ("POST", "/v1/catalogs/desk/update", r#"{"image": "debian:3"}"#, 404),
        ("POST", "/v1/catalogs/desk/rollback", "{}", 404),
        ("PUT", "/v1/images/debian/published", r#"{"version": 2}"#, 200),
        ("PUT", "/v1/images/debian/published", r#"{"version": 3}"#, 404),
        ("PUT", gold, r#"{"version": 2}"#, 200),
        ("POST", "/v1/stores", &store(&folder), 200),
        ("POST", "/v1/stores", &store(&full), 409),
        ("POST", "/v1/stores", &store("/usr"), 400),
        ("DELETE", "/v1/machines/desk-001", "", 200),
        ("DELETE", "/v1/machines/desk-002", "", 404),
        ("DELETE", "/v1/catalogs/desk", "", 200),
        ("DELETE", "/v1/catalogs/lab", "", 404),
        ("DELETE", gold, "", 200),
        ("DELETE", "/v1/images/debian/tags/none", "", 404),
        ("DELETE", "/v1/images/debian/versions/2", "", 200),
        ("DELETE", "/v1/images/debian/versions/1", "", 409),
        ("DELETE", "/v1/images/debian", "", 409),
        ("DELETE", "/v1/images/other", "", 200),
        ("DELETE", "/v1/leftovers/none", "", 404),
    ] {
        let (found, answer) = ask(&world, method, &format!("{path}?dry_run=true"), body.as_bytes());
        assert_eq!(found, status, "{method} {path} {body}: {}", String::from_utf8_lossy(&answer));
    }
    assert_eq!(state(), before);
    assert!(!world.path("other").exists());
}

#[test]
fn an_answer_that_waits_has_what_was_asked_for() {
    let world = World::new();
    let disk = world.path("disk").display().to_string();
    common::run("truncate", &["-s", "1M", &disk]);
    let import = json!({ "path": disk, "format": "raw" }).to_string();
    let versions = "/v1/images/debian/versions";
    let (head, body) = head_and_body(&world, "POST", &format!("{versions}?wait=30"), "", import.as_bytes());
    let operation: Operation = serde_json::from_slice(&body).unwrap();
    assert!(
        head.starts_with("http/1.1 200 ") && operation.state == OperationState::Done,
        "{head} {operation:?}"
    );
    assert!(head.contains(&format!("location: /v1/operations/{}\r\n", operation.id)), "{head}");
    let (status, _) = ask(&world, "POST", &format!("{versions}?wait=31"), import.as_bytes());
    assert_eq!(status, 400);
    let operations = world.client().list::<Operation>("/v1/operations").unwrap();
    assert_eq!(operations.items.len(), 1, "what cannot wait so long is not begun");
    create(&world.client(), "desk", r#"{"image": "debian", "count": 2}"#).unwrap();
    let stop = br#"{"action": "stop", "select": {"catalog": "desk"}}"#;
    let (_, body) = ask(&world, "POST", "/v1/machine-actions?wait=30", stop);
    let page: Page<MachineDetails> = serde_json::from_slice(&body).unwrap();
    assert!(page.items.len() == 2 && page.items.iter().all(|machine| machine.status.settled), "{page:?}");
}

/// A client that waits, or a daemon that ends meanwhile, leaves no change that is not in the log.
#[test]
fn a_change_is_written_down_before_its_request_waits() {
    let mut world = World::unstarted();
    world.start_with(vec!["--worker".into(), world.sleeper()]);
    import(&world, "debian", 1);
    create(&world.client(), "desk", r#"{"image": "debian", "count": 1}"#).unwrap();
    let body = r#"{"action": "start", "select": {"catalog": "desk"}}"#;
    let mut stream = UnixStream::connect(world.socket()).unwrap();
    let head = format!(
        "POST /v1/machine-actions?wait=30 HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    let is_line = |line: &Value| line["verb"] == "start" && line["result"] == "done";
    until("the line", || world.audit().iter().any(is_line).then_some(()));
    stream.set_nonblocking(true).unwrap();
    let answer = stream.read(&mut [0; 1]).map_err(|e| e.kind());
    assert_eq!(answer, Err(ErrorKind::WouldBlock), "it still waits");
    world.end(Signal::KILL);
    assert!(world.audit().iter().any(is_line));
}

/// Whoever does not know whether an action was taken asks again with its key.
#[test]
fn an_action_with_a_key_is_taken_once() {
    let mut world = World::unstarted();
    world.start_with(vec!["--worker".into(), world.sleeper()]);
    import(&world, "debian", 1);
    create(&world.client(), "desk", r#"{"image": "debian", "count": 2}"#).unwrap();
    let act = |world: &World, action: &str, lines: &str| {
        let body = format!(r#"{{"action": "{action}", "select": {{"names": ["desk-001"]}}}}"#);
        let (status, body) = ask_with(world, "POST", "/v1/machine-actions", lines, body.as_bytes());
        let page: Option<Page<MachineDetails>> = serde_json::from_slice(&body).ok();
        (status, page.map(|page| page.items[0].power))
    };
    let (mine, on, off) = ("idempotency-key: job-1\r\n", (200, Some(Power::On)), (200, Some(Power::Off)));
    assert_eq!(act(&world, "start", mine), on);
    assert_eq!(act(&world, "stop", ""), off);
    assert_eq!(act(&world, "start", mine), off, "it was started once");
    assert_eq!(act(&world, "stop", mine), (422, None));
    world.end(Signal::KILL);
    world.start();
    assert_eq!(act(&world, "start", mine), off, "nor does another daemon");
    assert!(world.audit().iter().any(|line| line["verb"] == "start" && line["repeated"] == true));
    assert_eq!(act(&world, "start", "idempotency-key: job-2\r\n"), on);
}

#[test]
fn a_tag_is_a_number_in_quotes() {
    let world = World::new();
    for (value, status) in [
        ("\"12\"", 404),
        ("12", 404),
        ("", 400),
        ("*", 404),
        ("\"\"", 400),
        ("\"1", 400),
        ("W/\"1\"", 400),
        ("\"1\", \"2\"", 400),
        ("-1", 400),
        ("+1", 400),
        ("18446744073709551616", 400),
        ("\u{e9}", 400),
        ("1\r\nif-match: 1", 400),
    ] {
        let line = format!("if-match: {value}\r\n");
        let (found, body) = ask_with(&world, "DELETE", "/v1/catalogs/desk", &line, b"");
        assert_eq!(found, status, "{value:?}: {}", String::from_utf8_lossy(&body));
        let error: Problem = serde_json::from_slice(&body).unwrap();
        assert_eq!(error.detail.contains("If-Match"), status == 400, "{value:?}: {error:?}");
    }
}

#[test]
fn stores_do_not_share_files() {
    let world = World::new();
    let add = |name: &str, path: &str| {
        let path = world.path(path).display().to_string();
        let body = json!({ "name": name, "path": path, "class": "shared" }).to_string();
        ask(&world, "POST", "/v1/stores", body.as_bytes()).0
    };
    assert_eq!(add("one", "one"), 200);
    std::os::unix::fs::symlink(world.path("one"), world.path("link")).unwrap();
    let refused = [
        ("one", "other"),
        ("two", "one"),
        ("two", "one/below/it"),
        ("two", "link"),
        ("two", "link/below"),
        ("two", ""),
    ];
    for (name, path) in refused {
        assert_eq!(add(name, path), 409, "{name} {path}");
    }
    assert!(!world.path("other").exists() && !world.path("one/below").exists(), "nothing is made in vain");
    std::fs::create_dir(world.path("full")).unwrap();
    std::fs::write(world.path("full/file"), "mine").unwrap();
    assert_eq!((add("two", "full"), add("two", "x/../two")), (400, 400));
    let at_once = thread::scope(|scope| {
        let adding = ["a", "b", "c", "d"].map(|name| scope.spawn(|| add(name, "at/once")));
        adding.map(|thread| thread.join().unwrap()).iter().filter(|status| **status == 200).count()
    });
    assert_eq!(at_once, 1);
    assert_eq!(add("two", "two"), 200);
    assert_eq!(std::fs::metadata(world.path("two")).unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn nobody_else_gets_in() {
    let mut world = World::new();
    let mode = |path: std::path::PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(world.socket()), mode(world.state())), (0o600, 0o700));
    let second = |state: &str, socket: &str| {
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_spillwayd"));
        daemon.arg("--state").arg(world.path(state)).arg("--socket").arg(world.path(socket));
        let done = daemon.output().unwrap();
        assert!(!done.status.success());
        String::from_utf8(done.stderr).unwrap()
    };
    assert!(second("state", "other").contains("another spillwayd has this folder"));
    assert!(second("other", "sock").contains("another process listens there"));
    std::fs::write(world.path("file"), "mine").unwrap();
    assert!(second("other", "file").contains("is not a socket"));
    assert_eq!(std::fs::read(world.path("file")).unwrap(), b"mine");
    // A folder of somebody else's, mistyped, stays as it is.
    let foreign = world.path("foreign");
    std::fs::create_dir(&foreign).unwrap();
    std::fs::write(foreign.join("file"), "mine").unwrap();
    std::fs::set_permissions(&foreign, std::fs::Permissions::from_mode(0o755)).unwrap();
    let rights = mode(foreign.join("file"));
    assert!(second("foreign", "third").contains("has 'file' in it"));
    assert_eq!((mode(foreign.clone()), mode(foreign.join("file"))), (0o755, rights));
    // What a killed one has left is taken.
    world.end(Signal::KILL);
    assert!(world.socket().exists());
    world.start();
    assert_eq!(ask(&world, "GET", "/v1/stores", b"").0, 200);
}

/// Who says nothing, or half of something, takes a place and no more.
#[test]
fn silent_clients_do_not_stop_the_others() {
    let mut world = World::new();
    let idle: Vec<UnixStream> = (0..200)
        .map(|n| {
            let mut stream = UnixStream::connect(world.socket()).unwrap();
            let beginning =
                ["", "GET /v1/im", "POST /v1/stores HTTP/1.1\r\ncontent-length: 100\r\n\r\n{"][n % 3];
            stream.write_all(beginning.as_bytes()).unwrap();
            stream
        })
        .collect();
    assert_eq!(ask(&world, "GET", "/v1/images", b"").0, 200);
    let begun = std::time::Instant::now();
    assert_eq!(world.end(Signal::TERM), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(5));
    drop(idle);
}

/// `docs/api/openapi.json` is what the program says. With `SPILLWAY_WRITE=1` it is written.
#[test]
fn figures_are_selected_and_are_not_sent_twice() {
    let world = World::new();
    import(&world, "debian", 1);
    for name in ["desk", "lab"] {
        create(&world.client(), name, r#"{"image": "debian", "count": 2}"#).unwrap();
    }
    let of = |query: &str| -> Figures { world.client().get(&format!("/v1/figures{query}")).unwrap() };
    let names = |figures: &Figures| figures.catalogs.iter().map(|of| of.name.to_string()).collect::<Vec<_>>();
    // They may be of a moment ago.
    until("both catalogs have figures", || (names(&of("")) == ["desk", "lab"]).then_some(()));
    assert_eq!(names(&of("?catalog=lab")), ["lab"]);
    assert!(names(&of("?catalog=none")).is_empty() && names(&of("?machine=lab-009")).is_empty());
    assert_eq!(refused(&world, "GET", "/v1/figures?machine=..", b"").0, 400);

    let (head, _) = head_and_body(&world, "GET", "/v1/figures?catalog=desk", "", b"");
    let tag = head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap();
    // The time of the figures is another one by now.
    thread::sleep(Duration::from_millis(500));
    let again = |query: &str, tag: &str| {
        ask_with(&world, "GET", &format!("/v1/figures{query}"), &format!("if-none-match: {tag}\r\n"), b"").0
    };
    assert_eq!((again("?catalog=desk", tag), again("?catalog=desk", "\"0\"")), (304, 200));
    assert_eq!(again("?catalog=lab", tag), 200, "a tag is of one question");
    let catalog: Catalog = world.client().get("/v1/catalogs/desk").unwrap();
    let more = CatalogSpec { count: 3, ..catalog.spec };
    world.client().put_if::<_, Catalog>("/v1/catalogs/desk", catalog.revision, &more).unwrap();
    until("the figures have changed", || (again("?catalog=desk", tag) == 200).then_some(()));
}

#[test]
fn the_console_is_served_to_whoever_asks() {
    let world = World::new();
    let get = |path: &str, lines: &str| {
        let (head, body) = head_and_body(&world, "GET", path, lines, b"");
        let value = |name: &str| {
            let line = head.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
            line.unwrap_or_default().to_owned()
        };
        let status: u16 = head.split(' ').nth(1).unwrap().parse().unwrap();
        let policy = value("content-security-policy");
        (
            status,
            [value("location"), value("content-type"), value("content-encoding"), value("etag"), policy],
            body,
        )
    };
    for path in ["/", "/console"] {
        let (status, [location, ..], _) = get(path, "");
        assert_eq!((status, location.as_str()), (303, "/console/"), "{path}");
    }
    let (status, [_, kind, _, _, policy], page) = get("/console/", "");
    assert!(
        status == 200 && kind.starts_with("text/html") && String::from_utf8(page).unwrap().contains("app.js")
    );
    assert!(
        policy.starts_with("default-src 'none'; script-src 'self';") && !policy.contains("unsafe"),
        "{policy}"
    );
    assert!(policy.contains("frame-ancestors 'self'"), "{policy}");
    let (status, [_, kind, coding, tag, _], plain) = get("/console/app.js", "");
    assert_eq!((status, kind.as_str(), coding.as_str()), (200, "text/javascript; charset=utf-8", ""));
    let (_, [_, _, coding, zipped_tag, _], zipped) = get("/console/app.js", "accept-encoding: br, gzip\r\n");
    assert!(coding == "gzip" && zipped.len() * 2 < plain.len() && tag != zipped_tag);
    let unchanged = get("/console/app.js", &format!("if-none-match: {tag}\r\n"));
    assert_eq!((unchanged.0, unchanged.2.len()), (304, 0));
    assert_eq!(get("/console/app.js", &format!("if-none-match: {zipped_tag}\r\n")).0, 200);
    assert_eq!(get("/console/none.js", "").0, 404);
    assert_eq!(ask(&world, "POST", "/console/", b"").0, 405);
}

#[test]
fn a_history_begins_with_the_daemon() {
    let world = World::new();
    let history = || world.client().get::<History>("/v1/history").unwrap();
    let kept = || Some(history()).filter(|history| !history.series[0].values.is_empty());
    let history = until("the first figures are kept", kept);
    assert_eq!(history.step_seconds, 10);
    assert_eq!(history.series.iter().map(|series| series.name.as_str()).collect::<Vec<_>>(), HISTORY_SERIES);
    assert_eq!(history.series[0].values[0], None, "a rate needs two");
    for (query, status) in [
        ("?catalog=none", 404),
        ("?machine=none", 404),
        ("?catalog=a&machine=b", 400),
        ("?seconds=0", 400),
        ("?seconds=86401", 400),
        ("?minutes=1", 400),
    ] {
        assert_eq!(refused(&world, "GET", &format!("/v1/history{query}"), b"").0, status, "{query}");
    }
}

#[test]
fn events_are_listed_from_both_ends() {
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    create(&client, "desk", r#"{"image": "debian", "count": 1}"#).unwrap();
    let of = |query: &str| client.get::<List<Event>>(&format!("/v1/events{query}")).unwrap().items;
    // There is no program that could serve its disk: each attempt to start it is an event.
    let all = until("four events", || {
        for power in ["start", "stop"] {
            let action = json!({ "action": power, "select": { "names": ["desk-001"] } });
            let _: Page<MachineDetails> = client.post("/v1/machine-actions", &action).unwrap();
        }
        Some(of("")).filter(|events| events.len() >= 4)
    });
    let ids = |events: &[Event]| events.iter().map(|event| event.id).collect::<Vec<EventId>>();
    let all = ids(&all);
    let two = of(&format!("?limit=2&after={}", all[0]));
    assert_eq!(ids(&two), all[1..3], "the oldest after it");
    assert_eq!(ids(&of(&format!("?limit=2&before={}", all[3]))), all[1..3], "the last before it");
    assert_eq!(ids(&of(&format!("?before={}", all[2]))), all[..2]);
    assert!(of(&format!("?before={}", all[0])).is_empty());
    let last = of("?limit=1");
    assert!(last.len() == 1 && last[0].id.number >= all[3].number);
    let foreign = EventId { history: all[0].history ^ 1, ..all[0] };
    for (query, status) in [
        (format!("before={foreign}"), 404),
        (format!("before={}&after={}", all[1], all[0]), 400),
        ("limit=0".into(), 400),
        ("limit=1001".into(), 400),
        ("before=7".into(), 400),
    ] {
        assert_eq!(refused(&world, "GET", &format!("/v1/events?{query}"), b"").0, status, "{query}");
    }
    assert_eq!(refused(&world, "GET", "/v1/event-stream?limit=0", b"").0, 400);
    // A stream begins with so many, and goes on with what happens.
    let mut stream = UnixStream::connect(world.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(b"GET /v1/event-stream?limit=1 HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut told = Vec::new();
    let mut read_until = |count: usize| {
        let mut part = [0; 4096];
        while told.windows(4).filter(|bytes| bytes == b"id: ").count() < count {
            let n = stream.read(&mut part).unwrap();
            assert_ne!(n, 0, "{}", String::from_utf8_lossy(&told));
            told.extend_from_slice(&part[..n]);
        }
        String::from_utf8_lossy(&told).into_owned()
    };
    let text = read_until(1);
    assert!(!text.contains(&format!("id: {}\n", all[2])), "{text}");
    let action = json!({ "action": "start", "select": { "names": ["desk-001"] } });
    let _: Page<MachineDetails> = client.post("/v1/machine-actions", &action).unwrap();
    read_until(2);
}

/// As the pages of `spillway console` have them.
#[test]
fn events_come_over_a_websocket_too() {
    let world = World::new();
    import(&world, "debian", 1);
    let client = world.client();
    let make = |name| create(&client, name, r#"{"image": "debian", "count": 1}"#).unwrap();
    make("desk");
    let start = |name: &str| {
        let action = json!({ "action": "start", "select": { "names": [name] } });
        let _: Page<MachineDetails> = client.post("/v1/machine-actions", &action).unwrap();
    };
    start("desk-001");
    let past = until("an event", || {
        Some(client.get::<List<Event>>("/v1/events").unwrap().items).filter(|events| !events.is_empty())
    });
    let open = |query: &str, headers: &[(&str, &str)]| {
        websocket::open(&world.socket(), &format!("/v1/event-stream{query}"), headers).unwrap()
    };
    let mut socket = open("?limit=1", &[]).unwrap();
    let next = |socket: &mut WebSocket| match socket.receive(Duration::from_secs(20)).unwrap() {
        Some(Message::Text(text)) => serde_json::from_str::<Event>(&text).unwrap(),
        other => panic!("{other:?}"),
    };
    let first = next(&mut socket);
    assert!(first.id.number >= past.last().unwrap().id.number, "{first:?}");
    make("pool");
    start("pool-001");
    let later = next(&mut socket);
    assert_eq!(later.id.number, first.id.number + 1, "{later:?}");
    // Another one goes on behind an event.
    let mut again = open(&format!("?after={}", first.id), &[]).unwrap();
    assert_eq!(next(&mut again).id, later.id);
    again.close(4001, "enough").unwrap();
    socket.binary(b"x").unwrap();
    for (socket, code) in [(&mut again, 4001), (&mut socket, 1003)] {
        let end = loop {
            match socket.receive(Duration::from_secs(20)).unwrap() {
                Some(Message::Text(_)) => {}
                other => break other,
            }
        };
        assert!(matches!(&end, Some(Message::Close(of, _)) if *of == code), "{end:?}");
    }
    // A page of another origin may not listen, and who asks for another protocol gets the stream.
    let Err(foreign) = open("", &[("Origin", "https://evil.example")]) else { panic!("it opens") };
    assert!(foreign.starts_with("HTTP/1.1 403 "), "{foreign}");
    let mut stream = UnixStream::connect(world.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let asked = b"GET /v1/event-stream HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n";
    stream.write_all(asked).unwrap();
    let mut head = [0; 15];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 200 OK");
}

#[test]
fn a_host_in_no_fleet_says_so() {
    let world = World::new();
    let client = world.client().through_to("host-b".parse().unwrap());
    let asked = [
        client.get::<Value>("/v1/images").map(drop),
        client.post::<_, Value>("/v1/host", &json!({ "action": "close" })).map(drop),
        client.delete::<Value>("/v1/images/debian").map(drop),
        client.follow(None).map(drop),
    ];
    for refused in asked {
        let Err(ClientError::Refused(problem)) = refused else { panic!("{refused:?}") };
        assert_eq!((problem.code, problem.status), (ErrorCode::Conflict, 409));
        assert_eq!(problem.detail, "this host is in no fleet: start spillwayd with --fleet");
        assert!(problem.instance.unwrap().starts_with("/v1/fleet/hosts/host-b/api/v1/"));
    }
}

#[test]
fn the_document_is_the_one_that_is_checked_in() {
    let done = Command::new(env!("CARGO_BIN_EXE_spillwayd")).arg("--print-openapi").output().unwrap();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api/openapi.json");
    if std::env::var_os("SPILLWAY_WRITE").is_some() {
        std::fs::write(path, &done.stdout).unwrap();
    }
    let kept = std::fs::read(path).unwrap();
    assert!(kept == done.stdout, "docs/api/openapi.json is another: run this test with SPILLWAY_WRITE=1");
}

#[test]
fn the_manual_page_has_every_option() {
    let text = |option| {
        let done = Command::new(env!("CARGO_BIN_EXE_spillwayd")).arg(option).output().unwrap();
        assert!(done.status.success(), "{option}");
        String::from_utf8(done.stdout).unwrap()
    };
    let (help, page) = (text("--help"), text("--print-man"));
    for part in [".TH spillwayd 8 ", ".SH NAME", ".SH SYNOPSIS", ".SH OPTIONS", "audit.log"] {
        assert!(page.contains(part), "{part}: {page}");
    }
    let options = help.lines().filter_map(|line| line.trim_start().split("--").nth(1)?.split(' ').next());
    let options: Vec<String> = options.map(|option| option.replace('-', "\\-")).collect();
    assert!(options.len() > 14, "{help}");
    for option in options {
        assert!(page.contains(&format!("\\-\\-{option}")), "{option}: {page}");
    }
}
