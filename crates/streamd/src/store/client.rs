//! The HTTP client of stores. Owns the bounds of what an answer may make this process hold, and that no answer leads it elsewhere.
//!
//! Invariants: only the content of an object is passed on as it comes, and who asked bounds it. Everything else is received
//! whole and bounded, and of what tells an error the rest is dropped. A redirect is an error: the address was given by an administrator,
//! and where it leads was not.

use crate::causes::shortened;
use futures_util::TryStreamExt;
use futures_util::future::BoxFuture;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};
use reqwest::header::{CONTENT_LENGTH, LOCATION};
use reqwest::redirect::Policy;
use reqwest::{Client, Method};
use std::io;
use std::time::Duration;
use tokio::time::timeout;

const CONNECT: Duration = Duration::from_secs(10);
/// Longest answer that is not the content of an object, in bytes: a list of 1,000 keys has less than half of that.
const MOST_ANSWER: usize = 4 << 20;
/// Longest part that is read of an answer that tells an error, in bytes.
const MOST_ERROR: usize = 64 << 10;
/// Longest time for the text of an error.
const ERROR_PATIENCE: Duration = Duration::from_secs(2);

/// Makes the client.
#[derive(Debug)]
pub struct Connector {
    /// Whether addresses without TLS are asked.
    pub may_be_plain: bool,
    /// Longest time without a byte of an answer. There is no limit for a whole body: one that makes progress is not ended.
    pub silence: Duration,
}

impl HttpConnector for Connector {
    // The options are those of this crate's own client.
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let builder = Client::builder()
            .user_agent(concat!("spillway-streamd/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT)
            .read_timeout(self.silence)
            .redirect(Policy::none())
            .https_only(!self.may_be_plain)
            .http1_only()
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate();
        let client = builder
            .build()
            .map_err(|e| object_store::Error::Generic { store: "HTTP client", source: Box::new(e) })?;
        Ok(HttpClient::new(Bounded(client)))
    }
}

#[derive(Debug)]
struct Bounded(Client);

impl HttpService for Bounded {
    fn call<'a, 'b>(&'a self, request: HttpRequest) -> BoxFuture<'b, Result<HttpResponse, HttpError>>
    where
        'a: 'b,
        Self: 'b,
    {
        let is_content = request.method() == Method::GET && request.uri().query().is_none();
        // An answer to this has no body, and says how long that would be.
        let is_head = request.method() == Method::HEAD;
        Box::pin(async move {
            let answer = self.0.call(request).await?;
            let is_good = answer.status().is_success();
            if let Some(place) = answer.headers().get(LOCATION).filter(|_| answer.status().is_redirection()) {
                let place = shortened(&String::from_utf8_lossy(place.as_bytes()));
                let message = format!(
                    "it redirects to {place}, and redirects are not followed: if that is right, give the address to which it leads"
                );
                return Err(HttpError::new(HttpErrorKind::Unknown, io::Error::other(message)));
            }
            if is_head || (is_content && is_good) {
                return Ok(answer);
            }
            let (mut parts, body) = answer.into_parts();
            let most = if is_good { MOST_ANSWER } else { MOST_ERROR };
            let (mut bytes, mut rest) = (Vec::new(), body.bytes_stream());
            let received = async {
                while bytes.len() <= most
                    && let Some(part) = rest.try_next().await?
                {
                    bytes.extend_from_slice(&part);
                }
                Ok::<_, HttpError>(())
            };
            match is_good {
                true => received.await?,
                // Its status says enough: what has come of its text will do.
                false => _ = timeout(ERROR_PATIENCE, received).await,
            }
            if is_good && bytes.len() > most {
                let message = format!("its answer has more than {most} bytes");
                return Err(HttpError::new(HttpErrorKind::Decode, io::Error::other(message)));
            }
            bytes.truncate(most);
            // What tells an error is for people, and may be in any code.
            if !is_good {
                bytes = String::from_utf8_lossy(&bytes).into_owned().into_bytes();
            }
            parts.headers.remove(CONTENT_LENGTH);
            Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(bytes)))
        })
    }
}
