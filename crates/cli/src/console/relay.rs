//! The relay between a browser and the daemon's socket. Owns who is let in; knows nothing of what passes.
//!
//! Invariant: a request reaches the daemon only if it names this host, carries the cookie, and was made by the console's own pages. Each
//! connection carries one request. An answer that comes before all of its request was read reaches the browser: closing a connection with
//! unread data resets it, so what still comes is read for [`LINGER`].

use super::connections::{ConnectionPlace, Connections};
use super::head::{Head, HeadError, Source};
use sha2::{Digest, Sha256};
use spillway_control::secret;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Longest time until a request's head has come.
const HEAD: Duration = Duration::from_secs(10);
/// Longest time, and most data, that is read after an answer.
const LINGER: Duration = Duration::from_secs(2);
const MOST_UNREAD_BYTES: u64 = 1 << 20;
/// Name of the cookie.
const COOKIE: &str = "spillway-console";

/// Lets one browser in.
pub struct Relay {
    socket: PathBuf,
    port: u16,
    /// What the address contains, and whether it was used.
    key: String,
    is_used: AtomicBool,
    /// What the browser's cookie contains.
    session: String,
    /// All that the browser asks for is below this folder. A cookie of this host goes to all of its ports, but only for its own path:
    /// whoever listens on another port here never sees it.
    folder: String,
    connections: Connections,
}

/// An answer of the relay's own.
struct Refusal {
    status: &'static str,
    why: String,
}

impl Refusal {
    fn new(status: &'static str, why: impl Into<String>) -> Refusal {
        Refusal { status, why: why.into() }
    }
}

impl Relay {
    /// A relay to this socket, on this port.
    pub fn new(socket: PathBuf, port: u16) -> io::Result<Relay> {
        let [key, session, folder] = [secret::random()?, secret::random()?, secret::random()?];
        let (is_used, connections) = (AtomicBool::new(false), Connections::default());
        Ok(Relay { socket, port, key, is_used, session, folder, connections })
    }

    /// The address that lets a browser in, once.
    pub fn address(&self) -> String {
        format!("http://127.0.0.1:{}/{}/console/?key={}", self.port, self.folder, self.key)
    }

    /// Serves all connections. Never returns.
    pub fn serve(self, listener: &TcpListener) {
        let relay = Arc::new(self);
        loop {
            let Ok((browser, _)) = listener.accept() else {
                // Out of descriptors: some are closed soon.
                thread::sleep(Duration::from_millis(100));
                continue;
            };
            let Some(place) = relay.connections.admit(&browser) else { continue };
            let relay = Arc::clone(&relay);
            let connection = move || {
                // A browser that goes away is no fault.
                let _ = relay.answer(browser, &place);
            };
            // Without a thread the connection is closed.
            let _ = thread::Builder::new().name("relay".into()).spawn(connection);
        }
    }

    fn answer(&self, mut browser: TcpStream, place: &ConnectionPlace) -> io::Result<()> {
        browser.set_nodelay(true)?;
        // A browser that reads nothing holds nothing for longer.
        browser.set_write_timeout(Some(HEAD))?;
        let mut head = match Head::read(&mut browser, HEAD) {
            Ok(head) => head,
            Err(HeadError::Gone) => return Ok(()),
            Err(HeadError::Invalid(why)) => {
                return refuse(&mut browser, &Refusal::new("400 Bad Request", why));
            }
        };
        // Nothing is said of what is elsewhere: that would say who has found the folder.
        let is_below = head.leave_folder(&self.folder);
        let has_key = is_below && self.has_key(&head);
        let may = self.lets_in(&head, is_below);
        if let (false, Err(refusal)) = (has_key, &may) {
            return refuse(&mut browser, refusal);
        }
        // Only what the browser asks for has its place to the end: anybody on this host can connect.
        if !place.keep() {
            return Ok(());
        }
        if has_key && !self.is_used.swap(true, Ordering::Relaxed) {
            let folder = &self.folder;
            let cookie = format!("{COOKIE}={}; Path=/{folder}/; HttpOnly; SameSite=Strict", self.session);
            let answer = format!(
                "HTTP/1.1 303 See Other\r\nlocation: /{folder}/console/\r\nset-cookie: {cookie}\r\ncache-control: no-store\r\n\
                 content-length: 0\r\nconnection: close\r\n\r\n"
            );
            browser.write_all(answer.as_bytes())?;
            linger(&mut browser);
            return Ok(());
        }
        if let Err(refusal) = may {
            return refuse(&mut browser, &refusal);
        }
        let Ok(mut daemon) = UnixStream::connect(&self.socket) else {
            let why = format!("spillwayd does not answer at {}: is it running?", self.socket.display());
            return refuse(&mut browser, &Refusal::new("502 Bad Gateway", why));
        };
        browser.set_read_timeout(None)?;
        // A daemon that has closed the connection may have answered before.
        let _ = daemon.write_all(&head.onward());
        pass(browser, daemon)
    }

    /// Whether the request is for the printed address.
    fn has_key(&self, head: &Head) -> bool {
        let has_key = head.parameter("key").is_some_and(|key| is_same(key, &self.key));
        has_key
            && head.method == "GET"
            && head.target.starts_with("/console/?")
            && names_this_host(head).is_some()
    }

    fn lets_in(&self, head: &Head, is_below: bool) -> Result<(), Refusal> {
        // A name of somebody else's that leads here would give their pages our cookie's origin (DNS rebinding).
        let Some(host) = names_this_host(head) else {
            let why = "this console is at 127.0.0.1 or localhost, and at no other name";
            return Err(Refusal::new("421 Misdirected Request", why));
        };
        if !is_below || !head.cookie(COOKIE).is_some_and(|session| is_same(session, &self.session)) {
            let why = "open the address that 'spillway console' has printed. It lets one browser in: for another one, run it again";
            return Err(Refusal::new("401 Unauthorized", why));
        }
        let other_page = || Refusal::new("403 Forbidden", "a page of another site has made this request");
        if !matches!(head.method.as_str(), "GET" | "HEAD")
            && head.only("sec-fetch-site") != Some("same-origin")
        {
            return Err(other_page());
        }
        let own = format!("http://{host}");
        if head.is_upgrade() && head.only("origin") != Some(own.as_str()) {
            return Err(other_page());
        }
        Ok(())
    }
}

/// The host that a request names, with its port, if it is this one. A tunnel may have another port.
fn names_this_host(head: &Head) -> Option<&str> {
    let host = head.only("host")?;
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    ["127.0.0.1", "localhost", "[::1]"].contains(&name).then_some(host)
}

/// Passes all that comes, in both directions, until the daemon has answered or the browser is gone.
fn pass(browser: TcpStream, daemon: UnixStream) -> io::Result<()> {
    let (mut from_browser, mut to_daemon) = (browser.try_clone()?, daemon.try_clone()?);
    let (up_ends, up_ended) = mpsc::channel::<()>();
    let up = thread::Builder::new().name("relay up".into()).spawn(move || {
        let _ends = up_ends;
        if copy_soon(&mut from_browser, &mut to_daemon).is_err() {
            // The daemon takes nothing more.
            let _ = io::copy(&mut from_browser.take(MOST_UNREAD_BYTES), &mut io::sink());
        }
        // The browser is gone: so is who waits for an answer.
        let _ = to_daemon.shutdown(Shutdown::Both);
    })?;
    let (mut from_daemon, mut to_browser) = (daemon, browser);
    let passed = copy_soon(&mut from_daemon, &mut to_browser);
    let _ = to_browser.shutdown(Shutdown::Write);
    let _ = from_daemon.shutdown(Shutdown::Both);
    let _ = up_ended.recv_timeout(LINGER);
    let _ = to_browser.shutdown(Shutdown::Both);
    let _ = up.join();
    passed
}

/// Ends a connection whose request may not have been read to its end, after the answer.
fn linger(browser: &mut TcpStream) {
    let until = Instant::now() + LINGER;
    let _ = browser.shutdown(Shutdown::Write);
    let (mut buffer, mut read) = ([0; 4096], 0);
    while let Ok(n @ 1..) = browser.read_until(&mut buffer, until)
        && read < MOST_UNREAD_BYTES
    {
        read += n as u64;
    }
}

/// Passes each piece on as soon as it comes.
fn copy_soon(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            n => to.write_all(&buffer[..n])?,
        }
    }
}

/// An answer that is no page: nothing of the request is in it.
fn refuse(browser: &mut TcpStream, refusal: &Refusal) -> io::Result<()> {
    let body = serde_json::json!({ "title": refusal.status, "detail": refusal.why }).to_string();
    let answer = format!(
        "HTTP/1.1 {}\r\ncontent-type: application/problem+json\r\nx-content-type-options: nosniff\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n{body}\n",
        refusal.status,
        body.len() + 1
    );
    browser.write_all(answer.as_bytes())?;
    linger(browser);
    Ok(())
}

/// Compares secrets: the time says nothing of where they differ.
fn is_same(given: &str, secret: &str) -> bool {
    Sha256::digest(given) == Sha256::digest(secret)
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_testkit::process::wait_until;
    use std::os::unix::net::UnixListener;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// A relay in front of a daemon that answers each connection with this text, and reads nothing.
    struct World {
        _dir: tempfile::TempDir,
        port: u16,
        folder: String,
        session: String,
        connections: Connections,
    }

    impl World {
        fn new(answer: String) -> World {
            let dir = tempfile::tempdir().unwrap();
            let socket = dir.path().join("sock");
            let daemon = UnixListener::bind(&socket).unwrap();
            thread::spawn(move || {
                for stream in daemon.incoming() {
                    stream.unwrap().write_all(answer.as_bytes()).unwrap();
                }
            });
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = listener.local_addr().unwrap().port();
            let relay = Relay::new(socket, port).unwrap();
            let (folder, session) = (relay.folder.clone(), relay.session.clone());
            let connections = relay.connections.clone();
            thread::spawn(move || relay.serve(&listener));
            World { _dir: dir, port, folder, session, connections }
        }

        /// Sends a request with a body of so many bytes, and reads the answer when the relay has closed the connection.
        fn ask(&self, cookie: &str, body_bytes: usize) -> String {
            let mut browser = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
            browser.set_read_timeout(Some(PATIENCE)).unwrap();
            let (port, folder, body) = (self.port, &self.folder, "x".repeat(body_bytes));
            let request = format!(
                "POST /{folder}/v1/x HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nSec-Fetch-Site: same-origin\r\nCookie: {COOKIE}={cookie}\r\n\
                 Content-Length: {body_bytes}\r\n\r\n{body}"
            );
            browser.write_all(request.as_bytes()).unwrap();
            assert_ne!(browser.peek(&mut [0]).unwrap(), 0, "there is an answer");
            wait_until(PATIENCE, || self.connections.is_empty().then_some(())).expect("it is closed");
            let mut answer = String::new();
            browser.read_to_string(&mut answer).unwrap();
            answer
        }
    }

    #[test]
    fn an_answer_that_comes_before_the_whole_request_was_read_is_not_lost() {
        // More than the browser's side takes before it reads.
        let body = "y".repeat(300 << 10);
        let answer = format!("HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n\r\n{body}");
        let world = World::new(answer.clone());
        for body_bytes in [1, MOST_UNREAD_BYTES as usize / 2] {
            assert!(world.ask(&world.session, body_bytes) == answer, "{body_bytes}");
            let refused = world.ask("another", body_bytes);
            assert!(
                refused.contains("401 Unauthorized") && refused.ends_with("}\n"),
                "{body_bytes}: {refused}"
            );
        }
    }

    #[test]
    fn strangers_do_not_take_the_places_of_the_browser() {
        let world = World::new("HTTP/1.1 200 OK\r\n\r\n".into());
        let request = format!("GET /{}/v1/x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", world.folder);
        let strangers = (0..300).map(|_| {
            let mut stranger = TcpStream::connect(("127.0.0.1", world.port)).unwrap();
            stranger.write_all(request.as_bytes()).unwrap();
            stranger
        });
        // They do not close their connections, so the relay reads on for a while.
        let strangers: Vec<_> = strangers.collect();
        assert!(world.ask(&world.session, 1).starts_with("HTTP/1.1 200 OK"));
        drop(strangers);
    }

    #[test]
    fn who_sends_without_end_is_not_read_for_ever() {
        let world = World::new("HTTP/1.1 200 OK\r\n\r\n".into());
        let begun = Instant::now();
        for (cookie, pause) in
            [(world.session.as_str(), 0), ("another", 0), (&world.session, 50), ("another", 50)]
        {
            let mut browser = TcpStream::connect(("127.0.0.1", world.port)).unwrap();
            let (port, folder) = (world.port, &world.folder);
            let head = format!(
                "GET /{folder}/v1/x HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {COOKIE}={cookie}\r\n\r\n"
            );
            browser.write_all(head.as_bytes()).unwrap();
            while browser.write_all(&[0; 1024]).is_ok() {
                thread::sleep(Duration::from_millis(pause));
            }
        }
        assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    }
}
