//! What stands behind a proxy: a store that speaks HTTP, or a folder. Owns how either is asked, and the bounds of what it answers.
//!
//! Invariant: a request reaches the store with the method, the address, the headers and the body that the client sent, except for
//! headers that are of a connection. So a signature of S3, which covers `Host`, stays valid: the client signs the proxy's address,
//! and the store sees that.

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use hyper::http::{request, response};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use std::error::Error;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Longest time that a store is waited for.
const PATIENCE: Duration = Duration::from_secs(60);
/// Largest body that is passed on, in bytes.
pub const MOST_BODY_BYTES: usize = 512 << 20;

/// Why a store has not answered.
pub type OriginError = Box<dyn Error + Send + Sync>;

/// What stands behind a proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A store at this `HOST:PORT`, which speaks HTTP without TLS.
    Http(String),
    /// The files of this folder, which are only read.
    Folder(PathBuf),
}

impl Origin {
    /// The store at `http://HOST:PORT`.
    ///
    /// # Errors
    /// The text is another address, in words.
    pub fn http(url: &str) -> Result<Origin, String> {
        let rest = url.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
        let authority = rest.filter(|rest| rest.contains(':') && !rest.contains(['/', '@']));
        let authority = authority.ok_or_else(|| format!("'{url}' is not http://HOST:PORT"))?;
        Ok(Origin::Http(authority.to_owned()))
    }

    /// Asks it, and reads the whole answer.
    pub async fn ask(&self, head: &request::Parts, body: Bytes) -> Result<Response<Bytes>, OriginError> {
        match self {
            Origin::Http(authority) => timeout(PATIENCE, forward(authority, head, body)).await?,
            Origin::Folder(folder) => {
                let file = if matches!(head.method, Method::GET | Method::HEAD) {
                    path_of(folder, head.uri.path())
                } else {
                    return Ok(empty(StatusCode::METHOD_NOT_ALLOWED));
                };
                let Some(file) = file else { return Ok(empty(StatusCode::NOT_FOUND)) };
                let read = tokio::task::spawn_blocking(move || std::fs::read(file)).await?;
                Ok(read.map_or_else(|_| empty(StatusCode::NOT_FOUND), |bytes| of_file(&head.method, bytes)))
            }
        }
    }
}

/// An answer without a body.
pub fn empty(status: StatusCode) -> Response<Bytes> {
    let mut answer = Response::new(Bytes::new());
    *answer.status_mut() = status;
    answer
}

fn of_file(method: &Method, bytes: Vec<u8>) -> Response<Bytes> {
    let length = HeaderValue::from(bytes.len());
    let mut answer = Response::new(if *method == Method::HEAD { Bytes::new() } else { bytes.into() });
    answer.headers_mut().insert(CONTENT_LENGTH, length);
    answer
}

/// The file of a path, which may not leave the folder.
fn path_of(folder: &Path, path: &str) -> Option<PathBuf> {
    let decoded = decode(path)?;
    let below = Path::new(decoded.trim_start_matches('/'));
    let is_plain = below.components().all(|part| matches!(part, Component::Normal(_)));
    is_plain.then(|| folder.join(below))
}

/// Takes `%2F` and the like for what it stands for.
fn decode(path: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                (digit()? << 4 | digit()?) as u8
            }
            _ => byte,
        });
    }
    String::from_utf8(bytes).ok().filter(|path| !path.contains('\0'))
}

/// Removes what is of one connection alone.
fn remove_hops(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    let keep_alive = HeaderName::from_static("keep-alive");
    for name in named.into_iter().chain([CONNECTION, keep_alive, TE, TRAILER, TRANSFER_ENCODING, UPGRADE]) {
        headers.remove(name);
    }
}

async fn forward(
    authority: &str,
    head: &request::Parts,
    body: Bytes,
) -> Result<Response<Bytes>, OriginError> {
    let stream = TcpStream::connect(authority).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // It ends when the answer has been read.
    tokio::spawn(async move { _ = connection.await });
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = head.uri.path_and_query().map_or("/", |path| path.as_str()).parse()?;
    *request.headers_mut() = head.headers.clone();
    remove_hops(request.headers_mut());
    // The body is here already.
    request.headers_mut().remove(EXPECT);
    if !request.headers().contains_key(HOST) {
        request.headers_mut().insert(HOST, authority.parse()?);
    }
    let (head, body) = sender.send_request(request).await?.into_parts();
    let body = Limited::new(body, MOST_BODY_BYTES).collect().await?.to_bytes();
    Ok(Response::from_parts(without_hops(head), body))
}

fn without_hops(mut head: response::Parts) -> response::Parts {
    remove_hops(&mut head.headers);
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_does_not_leave_its_folder() {
        let folder = Path::new("/srv");
        assert_eq!(path_of(folder, "/names/debian/1"), Some("/srv/names/debian/1".into()));
        assert_eq!(path_of(folder, "/a%40b"), Some("/srv/a@b".into()));
        for path in ["/../etc/passwd", "/a/%2e%2e/b", "/%00", "/%2", "/%zz", "/a/%2e%2e%2fb", "/%ff"] {
            assert_eq!(path_of(folder, path), None, "{path}");
        }
    }

    #[test]
    fn an_origin_is_a_host_and_a_port() {
        assert_eq!(Origin::http("http://127.0.0.1:9000/"), Ok(Origin::Http("127.0.0.1:9000".into())));
        for url in ["https://a:1", "http://a", "http://a:1/b", "http://u@a:1", "a:1"] {
            assert!(Origin::http(url).unwrap_err().contains("http://HOST:PORT"), "{url}");
        }
    }
}
