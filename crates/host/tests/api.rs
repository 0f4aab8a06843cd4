//! What the interface refuses, asked over the raw socket.
#![allow(clippy::unwrap_used)]

mod common;

use common::World;
use rustix::process::Signal;
use spillway_api::{ErrorBody, ErrorCode};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

/// Asks, and gives the status and the body.
fn ask(world: &World, method: &str, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
    ask_with(world, method, path, "", body)
}

/// The same with more lines in the head, each with its end.
fn ask_with(world: &World, method: &str, path: &str, lines: &str, body: &[u8]) -> (u16, Vec<u8>) {
    let mut stream = UnixStream::connect(world.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{lines}content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    // It may have answered before all of it was sent.
    let _ = stream.write_all(body);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let text = String::from_utf8_lossy(&answer);
    let status =
        text.split(' ').nth(1).unwrap_or_else(|| panic!("{method} {path}: {text:?}")).parse().unwrap();
    let at = answer.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
    (status, answer[at..].to_vec())
}

fn refused(world: &World, method: &str, path: &str, body: &[u8]) -> (u16, ErrorBody) {
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
        ("GET", "/", "", 404, NotFound, "nothing at /"),
        ("GET", "/v1/images/../../etc/passwd", "", 404, NotFound, "nothing at"),
        ("GET", "/v1/images/..%2f..%2fetc", "", 400, Invalid, "is no name"),
        ("GET", "/v1/images/%00", "", 400, Invalid, "is no name"),
        ("GET", "/v1/images/%ff", "", 400, Invalid, "UTF-8"),
        ("GET", "/v1/images/Debian", "", 400, Invalid, "is no name"),
        ("DELETE", "/v1/images", "", 405, Invalid, "method"),
        ("DELETE", "/v1/images/debian/versions/-1", "", 400, Invalid, "-1"),
        ("DELETE", "/v1/images/debian/versions/4294967296", "", 400, Invalid, "4294967296"),
        ("DELETE", "/v1/images/debian/versions/1", "", 404, NotFound, "no image 'debian'"),
        ("GET", "/v1/operations/1", "", 404, NotFound, "operation 1"),
        ("GET", "/v1/operations/1?wait=5", "", 400, Invalid, "wait"),
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
        assert_eq!((found, error.code), (status, code), "{method} {path} {error:?}");
        assert!(error.message.contains(word), "{method} {path} {error:?}");
    }
    // Nothing of it has done anything, and it still answers.
    assert_eq!(ask(&world, "GET", "/v1/images", b""), (200, b"{\"items\":[]}".to_vec()));
}

#[test]
fn a_revision_is_a_number() {
    let world = World::new();
    for (value, status) in [
        ("\"12\"", 404),
        ("12", 404),
        ("", 400),
        ("*", 400),
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
        let error: ErrorBody = serde_json::from_slice(&body).unwrap();
        assert_eq!(error.message.contains("If-Match"), status == 400, "{value:?}: {error:?}");
    }
}

#[test]
fn stores_do_not_share_files() {
    let world = World::new();
    let add = |name: &str, path: &str| {
        let path = world.path(path).display().to_string();
        let body = serde_json::json!({ "name": name, "path": path, "class": "shared" }).to_string();
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
    let at_once = std::thread::scope(|scope| {
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
    assert!(second("other", "sock").contains("somebody listens there"));
    std::fs::write(world.path("file"), "mine").unwrap();
    assert!(second("other", "file").contains("no socket"));
    assert_eq!(std::fs::read(world.path("file")).unwrap(), b"mine");
    // A folder of somebody else's, mistyped, stays as it is.
    let foreign = world.path("foreign");
    std::fs::create_dir(&foreign).unwrap();
    std::fs::write(foreign.join("file"), "mine").unwrap();
    std::fs::set_permissions(&foreign, std::fs::Permissions::from_mode(0o755)).unwrap();
    let rights = mode(foreign.join("file"));
    assert!(second("foreign", "third").contains("holds 'file'"));
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
    let silent: Vec<UnixStream> = (0..200)
        .map(|n| {
            let mut stream = UnixStream::connect(world.socket()).unwrap();
            let said = ["", "GET /v1/im", "POST /v1/stores HTTP/1.1\r\ncontent-length: 100\r\n\r\n{"][n % 3];
            stream.write_all(said.as_bytes()).unwrap();
            stream
        })
        .collect();
    assert_eq!(ask(&world, "GET", "/v1/images", b"").0, 200);
    let begun = std::time::Instant::now();
    assert_eq!(world.end(Signal::TERM), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(5));
    drop(silent);
}

/// `docs/api/openapi.json` is what the program says. With `SPILLWAY_WRITE=1` it is written.
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
    let says = |option| {
        let done = Command::new(env!("CARGO_BIN_EXE_spillwayd")).arg(option).output().unwrap();
        assert!(done.status.success(), "{option}");
        String::from_utf8(done.stdout).unwrap()
    };
    let (help, page) = (says("--help"), says("--print-man"));
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
