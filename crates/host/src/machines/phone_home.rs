//! Machines that say themselves that they are ready, by an HTTP POST to a URL with a secret. Owns the secrets
//! that are answered to, and the listener for machines in bridges.
//!
//! Invariant: a guest reaches nothing but this: it can tell that its own machine is ready, and no more. What it sends is
//! bounded in length, rate and time, and discarded.

use super::run::RunRecord;
use crate::error::HostError;
use crate::events::Events;
use crate::hypervisor::qemu;
use crate::short_path::ShortPath;
use spillway_api::{ErrorCode, EventKind, Network};
use std::collections::HashMap;
use std::fmt::Write;
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{sleep, timeout};

/// Number of random bytes of a secret.
const SECRET_BYTES: usize = 32;
/// First part of the path of a URL.
const PATH: &str = "/phone-home/";
/// Pause before the next connection to a machine's own door.
const PAUSE: Duration = Duration::from_millis(500);
/// Bytes that are read at a time, and the pause after them: a guest that sends much costs no more than one that sends little.
const PIECE_BYTES: usize = 4 << 10;
const LOOK: Duration = Duration::from_millis(20);
/// Connections to the listener at a time, and the time of each.
const MOST_CALLS: usize = 64;
const CALL_TIME: Duration = Duration::from_secs(10);
/// Longest head of a request to the listener, and longest body: what is longer is cut off.
const MOST_HEAD_BYTES: usize = 8 << 10;
const MOST_BODY_BYTES: usize = 64 << 10;
/// Delay before a listener that failed is tried again.
const AGAIN: Duration = Duration::from_secs(10);

const TAKEN: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
const UNKNOWN: &str = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
const TRY_AGAIN: &str = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// Creates the secret of a boot.
pub fn secret() -> Result<String, HostError> {
    let mut bytes = [0; SECRET_BYTES];
    // So few bytes are never cut short.
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())
        .map_err(|e| HostError::new(ErrorCode::Internal, format!("no secret can be made: {e}")))?;
    let mut text = String::with_capacity(2 * SECRET_BYTES);
    bytes.iter().for_each(|byte| _ = write!(text, "{byte:02x}"));
    Ok(text)
}

/// Whether the machine has a door of its own in QEMU's user network.
pub fn has_own_door(run: &RunRecord) -> bool {
    qemu::phones(&run.spec)
}

/// Returns the URL to which the guest of this run phones; `None`: it does not.
pub fn url(run: &RunRecord, listener: Option<SocketAddr>) -> Result<Option<String>, HostError> {
    let Some(secret) = &run.phone_secret else { return Ok(None) };
    let host = match (&run.spec.hardware.network, listener) {
        (Network::User, _) => qemu::PHONE_ADDRESS.to_owned(),
        (Network::Bridge(_), Some(listener)) => listener.to_string(),
        (Network::Bridge(_) | Network::None, _) => {
            let why = "its guest cannot phone home: start spillwayd with --phone-home ADDRESS:PORT";
            return Err(HostError::invalid(why));
        }
    };
    Ok(Some(format!("http://{host}{PATH}{secret}")))
}

/// Answers the calls through the machine's own door, and notes each of them. QEMU passes on what the guest sends there, of all its
/// connections, and nothing of where one ends. So the first line of the right request is searched for in whatever comes.
///
/// What the guest sends while no daemon listens is lost. A daemon that adopts the machine lets it try again.
pub async fn answer_at_door(folder: &Path, secret: &str, is_adopted: bool, called: &Notify) {
    let mut may_wait = is_adopted;
    loop {
        let could_wait = may_wait;
        let _ = listen_at(folder, secret, &mut may_wait, called).await;
        // Nobody listens between two connections, so the first one is followed by the next at once.
        if may_wait == could_wait {
            sleep(PAUSE).await;
        }
    }
}

/// Answers calls until the connection ends. A guest that may wait for the answer to a call that was lost is told to try again, over a
/// connection that ends a moment later: QEMU discards what no guest has waited for, which would be the answer to its next call.
async fn listen_at(folder: &Path, secret: &str, may_wait: &mut bool, called: &Notify) -> io::Result<()> {
    let socket = ShortPath::of(folder, qemu::PHONE).map_err(io::Error::other)?;
    let mut stream = UnixStream::connect(socket.path()).await?;
    let wanted = format!("POST {PATH}{secret} HTTP/1.");
    let mut seen = Vec::with_capacity(PIECE_BYTES + wanted.len());
    let mut piece = [0; PIECE_BYTES];
    let mut first = 0;
    if *may_wait {
        stream.write_all(TRY_AGAIN.as_bytes()).await?;
        *may_wait = false;
        match timeout(PAUSE, stream.read(&mut piece)).await {
            Ok(length) => first = length?,
            Err(_) => return Ok(()),
        }
    }
    loop {
        let length = match std::mem::take(&mut first) {
            0 => stream.read(&mut piece).await?,
            length => length,
        };
        if length == 0 {
            return Ok(());
        }
        seen.extend_from_slice(&piece[..length]);
        while let Some(at) = seen.windows(wanted.len()).position(|part| part == wanted.as_bytes()) {
            seen.drain(..at + wanted.len());
            // A guest that does not read the answer has called nevertheless.
            called.notify_one();
            timeout(PAUSE, stream.write_all(TAKEN.as_bytes())).await??;
        }
        // A line may be cut anywhere.
        seen.drain(..seen.len().saturating_sub(wanted.len()));
        sleep(LOOK).await;
    }
}

/// Guests whose calls are answered, by secret.
#[derive(Default)]
pub struct PhoneCalls {
    expected: Mutex<HashMap<String, Arc<Notify>>>,
}

/// Removes an expected guest.
struct Expected<'a>(&'a PhoneCalls, &'a str);

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        self.0.lock().remove(self.1);
    }
}

impl PhoneCalls {
    /// Lets the listener answer the calls with this secret and note each of them, until this is dropped.
    pub async fn answer_to(&self, secret: &str, called: Arc<Notify>) {
        self.lock().insert(secret.to_owned(), called);
        let _expected = Expected(self, secret);
        pending().await
    }

    /// Takes calls at this address, for as long as the daemon runs. The address may come and go with its bridge.
    pub async fn listen(self: Arc<Self>, address: SocketAddr, events: Events) {
        let mut told = false;
        loop {
            match TcpListener::bind(address).await {
                Ok(listener) => {
                    told = false;
                    self.accept(listener).await;
                }
                Err(e) if !told => {
                    told = true;
                    let text = format!("machines cannot phone home: {address} cannot be listened at: {e}");
                    events.raise(EventKind::Failed, "host", text);
                }
                Err(_) => {}
            }
            sleep(AGAIN).await;
        }
    }

    /// Takes calls until the listener fails.
    async fn accept(self: &Arc<Self>, listener: TcpListener) {
        let places = Arc::new(Semaphore::new(MOST_CALLS));
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return pending().await };
            let Ok((stream, _)) = listener.accept().await else { return };
            let calls = Arc::clone(self);
            tokio::spawn(async move {
                let _place = place;
                let _ = timeout(CALL_TIME, calls.answer(stream)).await;
            });
        }
    }

    /// Reads one request and answers it.
    async fn answer(&self, mut stream: TcpStream) -> io::Result<()> {
        let mut head = Vec::new();
        let end = loop {
            if let Some(end) = head.windows(4).position(|part| part == b"\r\n\r\n") {
                break end + 4;
            }
            if head.len() >= MOST_HEAD_BYTES {
                return Ok(());
            }
            if (&mut stream).take((MOST_HEAD_BYTES - head.len()) as u64).read_buf(&mut head).await? == 0 {
                return Ok(());
            }
        };
        let is_taken = self.take(&head[..end]);
        // A body that was not read would make the answer get lost.
        let mut left = body_bytes(&head[..end]).saturating_sub(head.len() - end).min(MOST_BODY_BYTES);
        let mut piece = [0; PIECE_BYTES];
        while left > 0 {
            let most = left.min(PIECE_BYTES);
            let length = stream.read(&mut piece[..most]).await?;
            if length == 0 {
                break;
            }
            left -= length;
        }
        stream.write_all(if is_taken { TAKEN } else { UNKNOWN }.as_bytes()).await?;
        stream.shutdown().await
    }

    /// Whether this is the head of a request with the secret of a guest that runs.
    fn take(&self, head: &[u8]) -> bool {
        let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
        let line = std::str::from_utf8(line).unwrap_or_default();
        let Some(target) = line.strip_prefix("POST ").and_then(|line| line.split_once(" HTTP/1.")) else {
            return false;
        };
        let secret = target.0.strip_prefix(PATH).unwrap_or_default();
        let call = self.lock().get(secret).cloned();
        call.inspect(|call| call.notify_one()).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Notify>>> {
        self.expected.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Length of the body, as the head of a request gives it; 0 if it does not.
fn body_bytes(head: &[u8]) -> usize {
    let text = String::from_utf8_lossy(head);
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let length = fields.find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    length.and_then(|(_, value)| value.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;
    use tokio::time::Instant;

    const BRIEF: Duration = Duration::from_millis(200);

    fn request(method: &str, path: &str, body: &str) -> String {
        let length = body.len();
        format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{body}")
    }

    #[test]
    fn a_secret_is_not_the_same_twice() {
        let (one, other) = (secret().unwrap(), secret().unwrap());
        assert!(one.len() == 2 * SECRET_BYTES && one != other);
    }

    #[tokio::test]
    async fn a_call_through_the_machines_door_is_found_in_whatever_it_sends() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join(qemu::PHONE)).unwrap();
        for (sent, is_called) in [
            (request("POST", "/phone-home/abc", "hostname=x"), true),
            (format!("{}{}", "\0".repeat(100_000), request("POST", "/phone-home/abc", "")), true),
            (format!("POST /phone-home/ab{}", request("POST", "/phone-home/abc", "")), true),
            (request("POST", "/phone-home/abd", "") + &request("GET", "/phone-home/abc", ""), false),
            (request("POST", "/v1/machines", "/phone-home/abc"), false),
        ] {
            let called = Notify::new();
            let answering = answer_at_door(dir.path(), "abc", false, &called);
            let guest = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                // In pieces, as they may come.
                for piece in sent.as_bytes().chunks(4099) {
                    stream.write_all(piece).await.unwrap();
                }
                let mut answer = [0; 15];
                let answered = timeout(BRIEF * 20, stream.read_exact(&mut answer));
                if is_called {
                    answered.await.unwrap().unwrap();
                    assert_eq!(&answer, b"HTTP/1.1 200 OK");
                }
                sleep(BRIEF).await;
            };
            let begun = Instant::now();
            let is_found = tokio::select! {
                ((), is_found) = async {
                    tokio::join!(guest, async {
                        timeout(if is_called { BRIEF * 20 } else { BRIEF * 2 }, called.notified()).await.is_ok()
                    })
                } => is_found,
                () = answering => false,
            };
            assert_eq!(is_found, is_called, "{:?} {:?}", &sent[..sent.len().min(80)], begun.elapsed());
        }
    }

    /// Sends a call through a door, and returns the status of the answer.
    async fn status(stream: &mut UnixStream) -> String {
        stream.write_all(request("POST", "/phone-home/abc", "").as_bytes()).await.unwrap();
        answer(stream).await
    }

    /// Returns the status of the next answer.
    async fn answer(stream: &mut UnixStream) -> String {
        let mut text = String::new();
        while !text.ends_with("\r\n\r\n") {
            let byte = timeout(CALL_TIME, stream.read_u8()).await.expect("there is an answer").unwrap();
            text.push(byte.into());
        }
        text.split(' ').nth(1).unwrap().to_owned()
    }

    /// Does this as the guest at the machine's door while its calls are answered.
    async fn at_door(is_adopted: bool, guest: impl AsyncFnOnce(UnixListener, &Notify)) {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join(qemu::PHONE)).unwrap();
        let called = Notify::new();
        tokio::select! {
            () = answer_at_door(dir.path(), "abc", is_adopted, &called) => {}
            () = guest(listener, &called) => {}
        }
    }

    #[tokio::test]
    async fn each_call_through_the_machines_door_is_answered() {
        at_door(false, async |listener, called| {
            let (mut stream, _) = listener.accept().await.unwrap();
            for _ in 0..3 {
                assert_eq!(status(&mut stream).await, "200");
                called.notified().await;
            }
            // Two at once, as guests that do not wait may send them.
            let both = request("POST", "/phone-home/abc", "").repeat(2);
            stream.write_all(both.as_bytes()).await.unwrap();
            assert_eq!([answer(&mut stream).await, answer(&mut stream).await], ["200", "200"]);
            // QEMU may close the connection.
            drop(stream);
            let (mut stream, _) = listener.accept().await.unwrap();
            assert_eq!(status(&mut stream).await, "200");
        })
        .await;
    }

    #[tokio::test]
    async fn a_guest_that_called_while_nobody_listened_is_told_to_try_again() {
        at_door(true, async |listener, called| {
            let (mut stream, _) = listener.accept().await.unwrap();
            assert_eq!(answer(&mut stream).await, "503");
            assert_eq!(status(&mut stream).await, "200");
            called.notified().await;
            assert_eq!(status(&mut stream).await, "200");
        })
        .await;
    }

    #[tokio::test]
    async fn a_guest_that_calls_a_while_after_the_adoption_gets_no_answer_to_an_earlier_call() {
        at_door(true, async |listener, called| {
            let (mut stream, _) = listener.accept().await.unwrap();
            assert_eq!(answer(&mut stream).await, "503");
            assert_eq!(
                timeout(CALL_TIME, stream.read_u8()).await.unwrap().unwrap_err().kind(),
                io::ErrorKind::UnexpectedEof
            );
            let (mut stream, _) = listener.accept().await.unwrap();
            assert_eq!(status(&mut stream).await, "200");
            called.notified().await;
        })
        .await;
    }

    /// Sends each of these to a listener of its own, one after the other, where calls with the secret `abc` are answered. Returns the
    /// answers, and whether there was a call.
    async fn call(sent: &[&str]) -> (Vec<String>, bool) {
        let calls = Arc::<PhoneCalls>::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (answering, called) = (Arc::clone(&calls), Arc::<Notify>::default());
        let noted = Arc::clone(&called);
        let answering = tokio::spawn(async move { answering.answer_to("abc", noted).await });
        while calls.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        let taking = Arc::clone(&calls);
        let serving = tokio::spawn(async move { taking.accept(listener).await });
        let mut answers = Vec::new();
        for sent in sent {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let _ = stream.write_all(sent.as_bytes()).await;
            let mut answer = String::new();
            let _ = timeout(CALL_TIME / 2, stream.read_to_string(&mut answer)).await;
            answers.push(answer.lines().next().unwrap_or_default().to_owned());
        }
        serving.abort();
        answering.abort();
        let _ = answering.await;
        assert!(calls.lock().is_empty(), "its secret is worth nothing afterwards");
        (answers, timeout(BRIEF, called.notified()).await.is_ok())
    }

    #[tokio::test]
    async fn the_listener_answers_each_call_of_a_guest() {
        let request = request("POST", "/phone-home/abc", "");
        let (answers, is_called) = call(&[&request, &request, &request]).await;
        assert!(is_called && answers == ["HTTP/1.1 200 OK"; 3], "{answers:?}");
    }

    #[tokio::test]
    async fn the_listener_takes_a_call_with_the_secret_of_a_guest_that_runs_and_nothing_else() {
        let (ok, unknown) = ("HTTP/1.1 200 OK", "HTTP/1.1 404 Not Found");
        let long = format!("POST /phone-home/abc HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(9000));
        for (sent, answer, is_called) in [
            (request("POST", "/phone-home/abc", "instance_id=x"), ok, true),
            (request("POST", "/phone-home/abc", &"x".repeat(MOST_BODY_BYTES)), ok, true),
            (request("POST", "/phone-home/abcd", ""), unknown, false),
            (request("POST", "/phone-home/", ""), unknown, false),
            (request("GET", "/phone-home/abc", ""), unknown, false),
            (request("GET", "/v1/machines", ""), unknown, false),
            ("POST /phone-home/abc HTTP/2\r\n\r\n".to_owned(), unknown, false),
            ("\u{0}\r\n\r\n".to_owned(), unknown, false),
            (long, "", false),
        ] {
            let found = call(&[&sent]).await;
            assert_eq!(found, (vec![answer.to_owned()], is_called), "{:?}", &sent[..sent.len().min(60)]);
        }
    }

    #[test]
    fn a_body_is_as_long_as_it_says_or_nothing() {
        for (head, bytes) in [
            ("POST / HTTP/1.1\r\ncontent-LENGTH: 12\r\n\r\n", 12),
            ("POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 0),
            ("POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 0),
            ("POST / HTTP/1.1\r\n\r\n", 0),
        ] {
            assert_eq!(body_bytes(head.as_bytes()), bytes, "{head:?}");
        }
    }
}
