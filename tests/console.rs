//! `spillway console`: whom its relay lets in to a real daemon, and what it passes.
#![allow(clippy::unwrap_used)]

mod daemon_world;

use daemon_world::{World, finishes};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

/// A relay, and the address that it has printed.
struct Console {
    program: Child,
    port: u16,
    folder: String,
    key: String,
}

impl Console {
    fn of(world: &World) -> Console {
        let mut command = world.command(&["console", "--json"]);
        let mut program = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(program.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said: Value = serde_json::from_str(&line).unwrap();
        let url = said["url"].as_str().unwrap().to_owned();
        let port = said["port"].as_u64().unwrap() as u16;
        let path = url.strip_prefix(&format!("http://127.0.0.1:{port}/")).unwrap();
        let (folder, key) = path.split_once("/console/?key=").unwrap();
        Console { program, port, folder: folder.into(), key: key.into() }
    }

    /// Sends a request as it is; returns status and all of the answer.
    fn send(&self, text: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).and_then(|word| word.parse().ok());
        (status.unwrap_or_else(|| panic!("{answer:?}")), answer)
    }

    fn get(&self, path: &str, lines: &str) -> (u16, String) {
        let (folder, port) = (&self.folder, self.port);
        self.send(&format!("GET /{folder}{path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n{lines}\r\n"))
    }

    /// Logs in with the address; returns the line of the cookie.
    fn log_in(&self) -> String {
        let (status, answer) = self.get(&format!("/console/?key={}", self.key), "");
        let to = format!("\r\nlocation: /{}/console/\r\n", self.folder);
        assert!(status == 303 && answer.contains(&to), "{answer}");
        let cookie = answer.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap();
        let (pair, attributes) = cookie.split_once("; ").unwrap();
        // Other ports of this host never get it: they do not know the folder.
        assert_eq!(attributes, format!("Path=/{}/; HttpOnly; SameSite=Strict", self.folder));
        format!("cookie: theme=dark; {pair}\r\n")
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.program.kill().unwrap();
        self.program.wait().unwrap();
    }
}

#[test]
fn the_address_lets_one_browser_in() {
    let world = World::new();
    let console = Console::of(&world);
    assert_eq!(console.get("/v1/session", "").0, 401, "nobody is in yet");
    for elsewhere in ["/v1/session", "/console/", "/", &format!("/{}", console.folder)] {
        let request = format!("GET {elsewhere} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        assert_eq!(console.send(&request).0, 401, "{elsewhere}");
    }
    assert_eq!(console.get("/console/?key=wrong", "").0, 401);
    let cookie = console.log_in();
    let (status, answer) = console.get("/v1/session", &cookie);
    assert!(
        status == 200 && answer.contains(r#""role":"admin""#) && answer.contains(r#""by":"socket""#),
        "{answer}"
    );
    // It is used up for others.
    assert_eq!(console.get(&format!("/console/?key={}", console.key), "").0, 401);
    let (other, mut wrong) = (Console::of(&world), cookie.clone());
    assert_eq!(other.get("/v1/session", &cookie).0, 401);
    wrong.replace_range(cookie.len() - 4..cookie.len() - 2, "zz");
    assert_eq!(console.get("/v1/session", &wrong).0, 401);
    // It is passed on as it comes, not at its end.
    let mut stream = TcpStream::connect(("127.0.0.1", console.port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let follow =
        format!("GET /{}/v1/event-stream HTTP/1.1\r\nhost: localhost\r\n{cookie}\r\n", console.folder);
    stream.write_all(follow.as_bytes()).unwrap();
    let mut head = [0; 12];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
}

#[test]
fn pages_of_others_get_nothing() {
    let world = World::new();
    let console = Console::of(&world);
    let cookie = console.log_in();
    let folder = &console.folder;
    let with_host = |host: &str| {
        console.send(&format!("GET /{folder}/v1/session HTTP/1.1\r\nhost: {host}\r\n{cookie}\r\n")).0
    };
    for host in ["127.0.0.1", "localhost", "[::1]", "localhost:1", "127.0.0.1:65535", "[::1]:2"] {
        assert_eq!(with_host(host), 200, "{host}");
    }
    for host in
        ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "localhost@evil", "", "::1"]
    {
        assert_eq!(with_host(host), 421, "{host}");
    }
    assert_eq!(with_host("localhost\r\nhost: localhost"), 421, "two names");
    let act = |lines: &str| {
        let body = r#"{"action": "start", "select": {"all": true}}"#;
        let length = body.len();
        console.send(&format!(
            "POST /{folder}/v1/machine-actions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n{cookie}{lines}\r\n{body}"
        ))
    };
    let site = |word: &str| format!("sec-fetch-site: {word}\r\n");
    assert_eq!(act(&site("same-origin")).0, 200);
    for lines in
        [String::new(), site("cross-site"), site("same-site"), site("none"), site("same-origin").repeat(2)]
    {
        assert_eq!(act(&lines).0, 403, "{lines}");
    }
    let upgrade = |origin: &str| {
        let lines = format!("{cookie}connection: upgrade\r\nupgrade: websocket\r\n{origin}");
        console.get("/v1/session", &lines).0
    };
    assert_eq!((upgrade(""), upgrade("origin: http://evil.example\r\n")), (403, 403));
    assert_eq!(
        upgrade(&format!("origin: http://127.0.0.1:{}\r\n", console.port)),
        200,
        "the daemon has the last word"
    );
    // A second request on the same connection is nobody's.
    let two = format!(
        "GET /{folder}/v1/session HTTP/1.1\r\nhost: localhost\r\n{cookie}\r\nGET /v1/host HTTP/1.1\r\nhost: x\r\n\r\n"
    );
    let (status, answer) = console.send(&two);
    assert!(status == 200 && answer.matches("HTTP/1.1").count() == 1, "{answer}");
    let upgraded =
        format!("{cookie}connection: upgrade\r\nupgrade: websocket\r\norigin: http://localhost\r\n");
    let two = format!(
        "GET /{folder}/v1/session HTTP/1.1\r\nhost: localhost\r\n{upgraded}\r\nGET /v1/host HTTP/1.1\r\nhost: x\r\n\r\n"
    );
    let (status, answer) = console.send(&two);
    assert!(status == 200 && answer.matches("HTTP/1.1").count() == 1, "{answer}");
}

#[test]
fn a_daemon_that_is_away_is_said_and_one_that_is_back_is_asked() {
    let mut world = World::new();
    let console = Console::of(&world);
    let cookie = console.log_in();
    world.kill();
    let (status, answer) = console.get("/v1/session", &cookie);
    assert!(status == 502 && answer.contains("is it running?"), "{answer}");
    let (code, out, err) = finishes(&mut world.command(&["console"]));
    assert!(code == 69 && out.is_empty() && err.contains("spillwayd"), "{code} {out}{err}");
    world.start();
    assert_eq!(console.get("/v1/session", &cookie).0, 200);
    let (code, _, err) = finishes(world.command(&["console"]).args(["--port", &console.port.to_string()]));
    assert!(code == 73 && err.contains("give another --port"), "{code} {err}");
}
