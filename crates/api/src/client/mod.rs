//! A client of `spillwayd` that waits for each answer, at its socket or over TCP. Owns a connection for each question
//! and no state.
//!
//! Invariant: an answer that is not the daemon's, or too long, is an error, not a panic.

mod address;
mod error;
mod follow;
mod interrupt;
mod pages;
mod token;
mod way;

pub use address::{Address, AddressError, HostPort};
pub use error::ClientError;
pub use follow::Following;
pub use pages::Pages;
pub use token::{Token, TokenError};

use crate::{ErrorCode, EventId, List, PROBLEM_JSON, Page, Problem};
use follow::Lines;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use way::{Remote, Way};

/// Longest answer that is taken.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// The header that names a request, so that it is done once.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";
/// How long an answer may take unless the question says how long it waits.
const PATIENCE: Duration = Duration::from_secs(60);

/// What follows a path: `?catalog=desk&label=team%3Dx`, and nothing if there is nothing to say.
pub fn query<'a>(pairs: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let plain = |b: &u8| b.is_ascii_alphanumeric() || b"-_.~".contains(b);
    let letter = |b: u8| if plain(&b) { char::from(b).to_string() } else { format!("%{b:02X}") };
    let pairs = pairs.into_iter().enumerate().map(|(n, (name, value))| {
        let value: String = value.bytes().map(letter).collect();
        format!("{}{name}={value}", if n == 0 { '?' } else { '&' })
    });
    pairs.collect()
}

/// Client of the daemon's API, over a unix socket or TLS.
pub struct Client {
    way: Way,
    runtime: tokio::runtime::Runtime,
    /// Signals that end the waiting, if it is to be ended by them.
    interrupt: Option<Arc<Notify>>,
}

/// How a question is kept from being done twice.
enum Once<'a> {
    No,
    Revision(u64),
    Key(&'a str),
}

/// A request to the daemon before it is sent.
struct Question<'a> {
    method: Method,
    path: &'a str,
    body: Vec<u8>,
    /// It counts only for this revision.
    revision: Option<u64>,
    /// It is done once, however often it is asked with this key.
    key: Option<&'a str>,
}

impl Client {
    /// For the daemon that listens on this socket.
    pub fn new(socket: &Path) -> io::Result<Client> {
        Client::by(Way::Socket(socket.to_owned()))
    }

    /// For the daemon of another host, known by a certificate that one of these (PEM) has signed; of the system's, if
    /// nothing is said. It knows who asks by a token.
    pub fn remote(host: HostPort, token: Token, ca: Option<&Path>) -> Result<Client, ClientError> {
        let remote = Remote::new(host, token, ca)?;
        let at = remote.to_string();
        let cannot =
            |source| ClientError::Connect { at, source, hint: "has this process too many files open?" };
        Client::by(Way::Remote(Box::new(remote))).map_err(cannot)
    }

    fn by(way: Way) -> io::Result<Client> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Client { way, runtime, interrupt: None })
    }

    /// Reads an object from the daemon (HTTP GET).
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask::<(), T>(Method::GET, path, None, Once::No)
    }

    /// Asks for a list that comes in pages, `most` objects of it at most: a page when it is needed. The path may have a query.
    pub fn pages<T: DeserializeOwned>(&self, path: &str, most: Option<u32>) -> Pages<'_, T> {
        Pages::new(self, path, most)
    }

    /// Asks for a list that comes in pages: all of it at once, for lists that are short.
    pub fn list<T: DeserializeOwned>(&self, path: &str) -> Result<List<T>, ClientError> {
        let mut items = Vec::new();
        for page in self.pages(path, None) {
            items.extend(page?);
        }
        Ok(List { items })
    }

    /// The same, after a page that has come already.
    pub fn list_on<T: DeserializeOwned>(&self, path: &str, first: Page<T>) -> Result<List<T>, ClientError> {
        let Page { mut items, next } = first;
        for page in Pages::after(self, path, next) {
            items.extend(page?);
        }
        Ok(List { items })
    }

    /// Asks for something to be done.
    pub fn post<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T, ClientError> {
        self.ask(Method::POST, path, Some(body), Once::No)
    }

    /// Asks for something to be done, which is done once however often it is asked with this key (`Idempotency-Key`).
    pub fn post_once<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        key: Option<&str>,
        body: &B,
    ) -> Result<T, ClientError> {
        self.ask(Method::POST, path, Some(body), key.map_or(Once::No, Once::Key))
    }

    /// Puts an object in its place.
    pub fn put<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T, ClientError> {
        self.ask(Method::PUT, path, Some(body), Once::No)
    }

    /// Puts an object in its place if what is there is still of this revision (`If-Match`); else nothing is done.
    pub fn put_if<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        revision: u64,
        body: &B,
    ) -> Result<T, ClientError> {
        self.ask(Method::PUT, path, Some(body), Once::Revision(revision))
    }

    /// Asks for an object to be no more.
    pub fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask::<(), T>(Method::DELETE, path, None, Once::No)
    }

    /// What has happened since this event, or lately, then what happens. What is not known any more is told by an event of
    /// kind `lost`.
    pub fn follow(&self, after: Option<EventId>) -> Result<Following<'_>, ClientError> {
        let after = query(after.map(|id| ("after", id.to_string())));
        let path = format!("/v1/event-stream{after}");
        let question =
            Question { method: Method::GET, path: &path, body: Vec::new(), revision: None, key: None };
        let (sender, answer) = self.in_time(async {
            let (sender, answer) = self.send(question).await?;
            match answer.status() {
                status if status.is_success() => Ok((sender, answer)),
                status => Err(self.refusal(status, &self.whole(answer.into_body()).await?)),
            }
        })?;
        Ok(Following { client: self, _sender: sender, body: answer.into_body(), lines: Lines::default() })
    }

    /// Asks for something that may be large, and writes it as it comes. What its answer says in this header.
    pub fn copy(&self, path: &str, header: &str, to: &mut dyn Write) -> Result<Option<Vec<u8>>, ClientError> {
        let question = Question { method: Method::POST, path, body: Vec::new(), revision: None, key: None };
        let (_sender, answer) = self.in_time(async {
            let (sender, answer) = self.send(question).await?;
            match answer.status() {
                status if status.is_success() => Ok((sender, answer)),
                status => Err(self.refusal(status, &self.whole(answer.into_body()).await?)),
            }
        })?;
        let said = answer.headers().get(header).map(|value| value.as_bytes().to_vec());
        let mut body = answer.into_body();
        loop {
            let frame = self.runtime.block_on(async { tokio::time::timeout(PATIENCE, body.frame()).await });
            let frame = match frame {
                Err(_) => return Err(self.broken(format!("it is silent for {} s", PATIENCE.as_secs()))),
                Ok(None) => return Ok(said),
                Ok(Some(frame)) => frame.map_err(|e| self.broken(e.to_string()))?,
            };
            if let Ok(bytes) = frame.into_data() {
                to.write_all(&bytes)
                    .map_err(|e| self.broken(format!("its answer cannot be written: {e}")))?;
            }
        }
    }

    fn ask<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&B>,
        once: Once<'_>,
    ) -> Result<T, ClientError> {
        let body = body.map_or_else(Vec::new, |body| serde_json::to_vec(body).expect("a body is plain data"));
        let answer = self.in_time(async {
            let (revision, key) = match once {
                Once::No => (None, None),
                Once::Revision(revision) => (Some(revision), None),
                Once::Key(key) => (None, Some(key)),
            };
            let (_sender, answer) = self.send(Question { method, path, body, revision, key }).await?;
            let (status, body) = (answer.status(), self.whole(answer.into_body()).await?);
            if status.is_success() { Ok(body) } else { Err(self.refusal(status, &body)) }
        })?;
        serde_json::from_slice(&answer).map_err(|e| self.broken(format!("its answer is not understood: {e}")))
    }

    /// Waits, but not for ever.
    fn in_time<T>(&self, asked: impl Future<Output = Result<T, ClientError>>) -> Result<T, ClientError> {
        self.runtime.block_on(async {
            let asked = async {
                let asked = tokio::time::timeout(PATIENCE, asked).await;
                asked.unwrap_or_else(|_| Err(self.broken(format!("no answer in {} s", PATIENCE.as_secs()))))
            };
            let Some(interrupt) = &self.interrupt else { return asked.await };
            tokio::select! {
                asked = asked => asked,
                () = interrupt.notified() => Err(ClientError::Interrupted { at: self.way.to_string() }),
            }
        })
    }

    /// Asks, on a connection that ends with the sender. The head of the answer, and what is to come of it.
    async fn send(
        &self,
        question: Question<'_>,
    ) -> Result<(SendRequest<Full<Bytes>>, Response<Incoming>), ClientError> {
        let Question { method, path, body, revision, key } = question;
        let stream = self.way.connect().await?;
        let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = shaken.map_err(|e| self.broken(e.to_string()))?;
        tokio::spawn(connection);
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, self.way.host())
            .header(header::ACCEPT, format!("application/json, {PROBLEM_JSON}, */*;q=0.1"))
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(revision) = revision {
            request = request.header(header::IF_MATCH, format!("\"{revision}\""));
        }
        if let Some(key) = key {
            request = request.header(IDEMPOTENCY_KEY, key);
        }
        if let Way::Remote(remote) = &self.way {
            request = request.header(header::AUTHORIZATION, remote.token.header());
        }
        let request = request.body(Full::<Bytes>::from(body)).map_err(|e| self.broken(e.to_string()))?;
        let answer = sender.send_request(request).await.map_err(|e| self.broken(e.to_string()))?;
        Ok((sender, answer))
    }

    async fn whole(&self, body: Incoming) -> Result<Bytes, ClientError> {
        let body = Limited::new(body, MAX_ANSWER_BYTES).collect().await;
        Ok(body.map_err(|e| self.broken(e.to_string()))?.to_bytes())
    }

    fn refusal(&self, status: StatusCode, body: &[u8]) -> ClientError {
        match serde_json::from_slice::<Problem>(body) {
            // A token was sent: that it says who it is, is not what is missing.
            Ok(error) if error.code == ErrorCode::Unauthenticated => {
                let message =
                    format!("{}: the token is not known there: is it in its file of tokens?", self.way);
                ClientError::Refused(Problem::new(error.code, message))
            }
            Ok(error) => ClientError::Refused(error),
            Err(_) => self.broken(format!("it answers {status}")),
        }
    }

    fn broken(&self, why: String) -> ClientError {
        ClientError::Broken { at: self.way.to_string(), why }
    }
}

#[cfg(test)]
mod tests {
    use super::query;

    #[test]
    fn a_query_carries_any_text() {
        assert_eq!(query([]), "");
        let pairs = [("a", "desk-1".to_owned()), ("label", "k=1&2 %é".to_owned())];
        assert_eq!(query(pairs), "?a=desk-1&label=k%3D1%262%20%25%C3%A9");
    }
}
