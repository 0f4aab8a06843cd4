//! A blocking client of `spillwayd`, over its socket or TCP. Owns one connection per request and no other state.
//!
//! Invariant: a response that does not come from the daemon, or is too long, causes an error, never a panic.

mod address;
mod error;
mod follow;
mod guest;
mod interrupt;
mod pages;
mod token;
mod transport;

pub use address::{Address, AddressError, HostPort};
pub use error::ClientError;
pub use follow::{Following, Lines as EventLines};
pub use pages::Pages;
pub use token::{Token, TokenError};

use crate::{ErrorCode, EventId, List, Name, PROBLEM_JSON, Page, Problem};
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
use transport::{TlsTransport, Transport};

/// Longest response.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Header with the idempotency key of a request.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";
/// Longest wait for a response, in addition to the wait that the request asks for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Formats a query such as `?catalog=desk&label=team%3Dx`; empty without parameters.
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
    transport: Transport,
    /// Host of the daemon's fleet that requests are passed on to.
    host: Option<Name>,
    runtime: tokio::runtime::Runtime,
    /// Signals that interrupt requests, if they should.
    interrupt: Option<Arc<Notify>>,
}

/// Protection of a request against being carried out twice.
enum Precondition<'a> {
    No,
    Revision(u64),
    Key(&'a str),
}

/// A request to the daemon before it is sent.
struct ApiRequest<'a> {
    method: Method,
    path: &'a str,
    body: Vec<u8>,
    content_type: &'static str,
    /// Revision that the object must have.
    revision: Option<u64>,
    /// Idempotency key.
    key: Option<&'a str>,
}

impl<'a> ApiRequest<'a> {
    fn new(method: Method, path: &'a str, body: Vec<u8>) -> ApiRequest<'a> {
        ApiRequest { method, path, body, content_type: "application/json", revision: None, key: None }
    }
}

impl Client {
    /// Creates a client of the daemon that listens on this socket.
    pub fn new(socket: &Path) -> io::Result<Client> {
        Client::by(Transport::Socket(socket.to_owned()))
    }

    /// Creates a client of a remote daemon. Its certificate must be signed by one of these (PEM), by default of the
    /// system's. The token authenticates the user.
    pub fn remote(host: HostPort, token: Token, ca: Option<&Path>) -> Result<Client, ClientError> {
        let remote = TlsTransport::new(host, token, ca)?;
        let at = remote.to_string();
        let cannot =
            |source| ClientError::Connect { at, source, hint: "has this process too many files open?" };
        Client::by(Transport::Remote(Box::new(remote))).map_err(cannot)
    }

    fn by(transport: Transport) -> io::Result<Client> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Client { transport, host: None, runtime, interrupt: None })
    }

    /// Makes the daemon pass all requests on to this host of its fleet, which carries them out for the same user.
    #[must_use]
    pub fn through_to(self, host: Name) -> Client {
        Client { host: Some(host), ..self }
    }

    /// Reads an object from the daemon (HTTP GET).
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask::<(), T>(Method::GET, path, None, Precondition::No)
    }

    /// Reads a list of at most `most` objects page by page, as needed. The path may contain a query.
    pub fn pages<T: DeserializeOwned>(&self, path: &str, most: Option<u32>) -> Pages<'_, T> {
        Pages::new(self, path, most)
    }

    /// Reads a whole list, for lists that are short.
    pub fn list<T: DeserializeOwned>(&self, path: &str) -> Result<List<T>, ClientError> {
        let mut items = Vec::new();
        for page in self.pages(path, None) {
            items.extend(page?);
        }
        Ok(List { items })
    }

    /// Reads the rest of a list after its first page.
    pub fn list_on<T: DeserializeOwned>(&self, path: &str, first: Page<T>) -> Result<List<T>, ClientError> {
        let Page { mut items, next } = first;
        for page in Pages::after(self, path, next) {
            items.extend(page?);
        }
        Ok(List { items })
    }

    /// Sends a request that creates something or acts (HTTP POST).
    pub fn post<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T, ClientError> {
        self.ask(Method::POST, path, Some(body), Precondition::No)
    }

    /// Sends such a request with an idempotency key (`Idempotency-Key`), so that it is carried out once.
    pub fn post_once<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        key: Option<&str>,
        body: &B,
    ) -> Result<T, ClientError> {
        self.ask(Method::POST, path, Some(body), key.map_or(Precondition::No, Precondition::Key))
    }

    /// Replaces an object (HTTP PUT).
    pub fn put<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T, ClientError> {
        self.ask(Method::PUT, path, Some(body), Precondition::No)
    }

    /// Replaces an object if it still has this revision (`If-Match`).
    pub fn put_if<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        revision: u64,
        body: &B,
    ) -> Result<T, ClientError> {
        self.ask(Method::PUT, path, Some(body), Precondition::Revision(revision))
    }

    /// Deletes an object.
    pub fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask::<(), T>(Method::DELETE, path, None, Precondition::No)
    }

    /// Streams the events after this one, or the last ones, and then new ones. An event of kind `lost` stands for events
    /// that were removed.
    pub fn follow(&self, after: Option<EventId>) -> Result<Following<'_>, ClientError> {
        let after = query(after.map(|id| ("after", id.to_string())));
        let path = format!("/v1/event-stream{after}");
        self.follow_request(ApiRequest::new(Method::GET, &path, Vec::new()))
    }

    /// Streams what a request with this body asks for, as server-sent events.
    pub fn follow_by<B: Serialize>(&self, path: &str, body: &B) -> Result<Following<'_>, ClientError> {
        let body = serde_json::to_vec(body).expect("a request is plain data");
        self.follow_request(ApiRequest::new(Method::POST, path, body))
    }

    fn follow_request(&self, question: ApiRequest<'_>) -> Result<Following<'_>, ClientError> {
        let (sender, answer) = self.in_time(async {
            let (sender, answer) = self.send(question).await?;
            match answer.status() {
                status if status.is_success() => Ok((sender, answer)),
                status => Err(self.refusal(status, &self.whole(answer.into_body()).await?)),
            }
        })?;
        Ok(Following { client: self, _sender: sender, body: answer.into_body(), lines: Lines::default() })
    }

    /// Copies a large response to a writer as it arrives. Returns the value of this header.
    pub fn copy(&self, path: &str, header: &str, to: &mut dyn Write) -> Result<Option<Vec<u8>>, ClientError> {
        let question = ApiRequest::new(Method::POST, path, Vec::new());
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
                Err(_) => {
                    return Err(self.broken(format!("it has sent nothing for {} s", PATIENCE.as_secs())));
                }
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
        once: Precondition<'_>,
    ) -> Result<T, ClientError> {
        let body = body.map_or_else(Vec::new, |body| serde_json::to_vec(body).expect("a body is plain data"));
        let answer = self.in_time(async {
            let (revision, key) = match once {
                Precondition::No => (None, None),
                Precondition::Revision(revision) => (Some(revision), None),
                Precondition::Key(key) => (None, Some(key)),
            };
            self.answer_to(ApiRequest { revision, key, ..ApiRequest::new(method, path, body) }).await
        })?;
        self.understood(&answer)
    }

    /// Sends a request and returns the whole response.
    async fn answer_to(&self, question: ApiRequest<'_>) -> Result<Bytes, ClientError> {
        let (_sender, answer) = self.send(question).await?;
        let (status, body) = (answer.status(), self.whole(answer.into_body()).await?);
        if status.is_success() { Ok(body) } else { Err(self.refusal(status, &body)) }
    }

    fn understood<T: DeserializeOwned>(&self, answer: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(answer).map_err(|e| self.broken(format!("its answer is not understood: {e}")))
    }

    /// Waits for a result with the usual time limit.
    fn in_time<T>(&self, asked: impl Future<Output = Result<T, ClientError>>) -> Result<T, ClientError> {
        self.within(PATIENCE, asked)
    }

    /// Waits for a result with this time limit.
    fn within<T>(
        &self,
        patience: Duration,
        asked: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        self.runtime.block_on(async {
            let asked = async {
                let asked = tokio::time::timeout(patience, asked).await;
                asked.unwrap_or_else(|_| Err(self.broken(format!("no answer in {} s", patience.as_secs()))))
            };
            let Some(interrupt) = &self.interrupt else { return asked.await };
            tokio::select! {
                asked = asked => asked,
                () = interrupt.notified() => Err(ClientError::Interrupted { at: self.transport.to_string() }),
            }
        })
    }

    /// Sends a request on a connection that ends with the sender. Returns the head and the pending body of the response.
    async fn send(
        &self,
        question: ApiRequest<'_>,
    ) -> Result<(SendRequest<Full<Bytes>>, Response<Incoming>), ClientError> {
        let ApiRequest { method, path, body, content_type, revision, key } = question;
        let stream = self.transport.connect().await?;
        let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = shaken.map_err(|e| self.broken(e.to_string()))?;
        tokio::spawn(connection);
        let path = match &self.host {
            Some(host) => format!("/v1/fleet/hosts/{host}/api{path}"),
            None => path.to_owned(),
        };
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, self.transport.host())
            .header(header::ACCEPT, format!("application/json, {PROBLEM_JSON}, */*;q=0.1"))
            .header(header::CONTENT_TYPE, content_type);
        if let Some(revision) = revision {
            request = request.header(header::IF_MATCH, format!("\"{revision}\""));
        }
        if let Some(key) = key {
            request = request.header(IDEMPOTENCY_KEY, key);
        }
        if let Transport::Remote(remote) = &self.transport {
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
            // A token was sent, so the daemon's advice to send one does not help.
            Ok(error) if error.code == ErrorCode::Unauthenticated => {
                let message =
                    format!("{}: the token is not known there: is it in its file of tokens?", self.transport);
                ClientError::Refused(Problem::new(error.code, message))
            }
            Ok(error) => ClientError::Refused(error),
            Err(_) => self.broken(format!("it answers {status}")),
        }
    }

    fn broken(&self, why: String) -> ClientError {
        ClientError::Broken { at: self.transport.to_string(), why }
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
