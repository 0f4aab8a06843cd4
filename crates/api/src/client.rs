//! A client of `spillwayd`'s socket that waits for each answer. Owns a connection for each question and no state.
//!
//! Invariant: an answer that is not the daemon's, or too long, is an error, not a panic.

use crate::ErrorBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;

/// Longest answer that is taken.
const MAX_ANSWER_BYTES: usize = 64 << 20;
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

/// Why there is no answer, or the answer is no.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody could be asked.
    #[error("{}: {source}: {hint}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// The answer was cut off, or is not one of the daemon's.
    #[error("{}: {why}: is it spillwayd's socket?", path.display())]
    Broken {
        /// The socket.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The daemon says no.
    #[error(transparent)]
    Refused(ErrorBody),
}

/// The client.
pub struct Client {
    socket: PathBuf,
    runtime: tokio::runtime::Runtime,
}

impl Client {
    /// For the daemon that listens there.
    pub fn new(socket: &Path) -> io::Result<Client> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Client { socket: socket.to_owned(), runtime })
    }

    /// Asks for an object.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask::<(), T>(Method::GET, path, None, None)
    }

    /// Asks for something to be done.
    pub fn post<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T, ClientError> {
        self.ask(Method::POST, path, Some(body), None)
    }

    /// Puts an object in its place.
    pub fn put<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T, ClientError> {
        self.ask(Method::PUT, path, Some(body), None)
    }

    /// Puts an object in its place if what is there is still of this revision; else it is a conflict.
    pub fn put_if<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        revision: u64,
        body: &B,
    ) -> Result<T, ClientError> {
        self.ask(Method::PUT, path, Some(body), Some(revision))
    }

    /// Asks for an object to be no more.
    pub fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask::<(), T>(Method::DELETE, path, None, None)
    }

    fn ask<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&B>,
        revision: Option<u64>,
    ) -> Result<T, ClientError> {
        let body = body.map_or_else(Vec::new, |body| serde_json::to_vec(body).expect("a body is plain data"));
        let answer = self.runtime.block_on(async {
            let asked = tokio::time::timeout(PATIENCE, self.exchange(method, path, body, revision)).await;
            asked.unwrap_or_else(|_| Err(self.broken(format!("no answer in {} s", PATIENCE.as_secs()))))
        })?;
        serde_json::from_slice(&answer).map_err(|e| self.broken(format!("its answer is not understood: {e}")))
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
        revision: Option<u64>,
    ) -> Result<Bytes, ClientError> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|e| self.not_connected(e))?;
        let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = shaken.map_err(|e| self.broken(e.to_string()))?;
        // It ends with the sender.
        tokio::spawn(connection);
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "localhost")
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(revision) = revision {
            request = request.header(header::IF_MATCH, format!("\"{revision}\""));
        }
        let request = request.body(Full::<Bytes>::from(body)).map_err(|e| self.broken(e.to_string()))?;
        let answer = sender.send_request(request).await.map_err(|e| self.broken(e.to_string()))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
        let body = body.map_err(|e| self.broken(e.to_string()))?.to_bytes();
        if status.is_success() {
            return Ok(body);
        }
        match serde_json::from_slice(&body) {
            Ok(error) => Err(ClientError::Refused(error)),
            Err(_) => Err(self.broken(format!("it answers {status}"))),
        }
    }

    fn broken(&self, why: String) -> ClientError {
        ClientError::Broken { path: self.socket.clone(), why }
    }

    fn not_connected(&self, source: io::Error) -> ClientError {
        let hint = match source.kind() {
            io::ErrorKind::PermissionDenied => "run as root or as a member of the socket's group",
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                "is spillwayd running? Say where it listens with --socket or SPILLWAY_SOCKET"
            }
            _ => "check the path",
        };
        ClientError::Connect { path: self.socket.clone(), source, hint }
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
