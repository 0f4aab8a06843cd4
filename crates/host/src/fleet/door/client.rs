//! Requests to other hosts of the fleet. Owns how their daemons are reached, and the time limits.
//!
//! Invariant: nothing is sent before the other end has proved to be the host that is meant. Each wait has an end, and answers that are kept
//! in memory are bounded. A request that may have been carried out is not sent again, unless it only reads.

use super::identity::Identity;
use super::members::{Member, Members};
use super::pool::{HostBody, Place, Pool};
use super::verify::client_config;
use axum::body::{Body, Bytes};
use http_body_util::{BodyExt, Limited};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use spillway_api::{FleetSelf, Name};
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{self, AlertDescription, CertificateError};

/// Longest time to connect, including the search for the address.
const CONNECT: Duration = Duration::from_secs(1);
/// Longest time of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(2);
/// Longest answer that is kept in memory.
const MOST_ANSWER_BYTES: usize = 1 << 20;
/// Bytes of a connection that are read ahead.
const BUFFER_BYTES: usize = 64 << 10;
/// Name in handshakes, which neither side looks at.
const NO_NAME: &str = "spillwayd";
/// Path of what a host says of itself.
pub const SELF: &str = "/v1/fleet/self";
/// What the daemon of a host does that has proved to be the one that is meant, and does not let this host in.
const REFUSES: &str =
    "it does not take the certificate of this host for one of the fleet: it may not see etcd";

/// Why a host has not answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostClientError {
    /// The fleet has no such host.
    #[error("there is no host '{host}' in the fleet{}", .nearest.as_ref().map_or_else(String::new, |near| format!(": do you mean '{near}'?")))]
    Unknown {
        /// Name that was asked for.
        host: Name,
        /// Name of a host that is like it.
        nearest: Option<String>,
    },
    /// The daemon of the host was not reached, or has not answered.
    #[error("{host} ({address}): {why}{}", if *.is_sent { ". The request may have been carried out" } else { "" })]
    Unreachable {
        /// Name of the host.
        host: Name,
        /// Its address.
        address: String,
        /// What has happened.
        why: String,
        /// Whether the request had been sent.
        is_sent: bool,
    },
}

/// What comes of the question whether the daemon of a host is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It answers.
    Answers,
    /// It runs, and refuses this host, for this reason.
    Refuses(String),
    /// It does not answer, for this reason.
    Silent(String),
}

/// Client of the daemons of other hosts. A clone is the same.
#[derive(Clone)]
pub struct HostClient {
    identity: Identity,
    members: Members,
    pool: Pool,
}

/// An attempt to send a request that has failed.
struct Failed {
    why: String,
    /// The request, if nothing of it was sent.
    unsent: Option<Request<Body>>,
}

/// Why a request over a connection that was opened for it has no answer.
#[derive(Debug)]
pub(super) struct Unanswered {
    pub(super) why: String,
    /// Whether the other end may have carried it out.
    pub(super) is_sent: bool,
}

/// A connection that nothing was sent over. The other end refuses this host only after the handshake is complete on this side (TLS 1.3).
pub(super) struct NewConnection {
    sender: SendRequest<Body>,
    /// What the connection ends with.
    pub(super) end: JoinHandle<hyper::Result<()>>,
}

impl HostClient {
    /// A client that shows the certificate of this host.
    pub fn new(identity: &Identity, members: Members) -> HostClient {
        HostClient { identity: identity.clone(), members, pool: Pool::default() }
    }

    /// Sends a request, and waits so long for the head of the response. The target of the request is a path.
    ///
    /// # Errors
    /// The host is unknown, or has not answered.
    pub async fn send(
        &self,
        host: &Name,
        mut request: Request<Body>,
        patience: Duration,
    ) -> Result<Response<HostBody>, HostClientError> {
        let member = self.member(host)?;
        request.headers_mut().insert(header::HOST, HeaderValue::from_static(NO_NAME));
        let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
        let again = is_read.then(|| {
            let (mut parts, ()) = Request::new(()).into_parts();
            parts.method = request.method().clone();
            parts.uri = request.uri().clone();
            parts.headers = request.headers().clone();
            parts
        });
        let mut is_sent = false;
        let sending = async {
            // The other end may close a connection that waits at any time.
            if let Some(sender) = self.pool.take(host, &member).await {
                is_sent = true;
                match self.over(host, &member, sender, request).await {
                    Ok(response) => return Ok(response),
                    Err(Failed { unsent: Some(unsent), .. }) => request = unsent,
                    Err(Failed { why, unsent: None }) => {
                        let parts = again.ok_or(why)?;
                        request = Request::from_parts(parts, Body::empty());
                    }
                }
                is_sent = false;
            }
            let connection = self.connect(&member).await?;
            is_sent = true;
            self.over_new(host, &member, connection, request).await.map_err(|failed| {
                is_sent = failed.is_sent;
                failed.why
            })
        };
        let answered = timeout(patience, sending).await;
        let answered = answered
            .unwrap_or_else(|_| Err(format!("it has not answered within {} s", patience.as_secs_f32())));
        let is_sent = is_sent && !is_read;
        answered.map_err(|why| unreachable_host(host, &member, why, is_sent))
    }

    /// Asks for an object, and waits so long for all of it.
    ///
    /// # Errors
    /// The host is unknown, or has not answered, or has no such object.
    pub async fn get<T: DeserializeOwned>(
        &self,
        host: &Name,
        path: &str,
        patience: Duration,
    ) -> Result<T, HostClientError> {
        let body = self.get_bytes(host, path, patience).await?;
        serde_json::from_slice(&body).or_else(|e| {
            let why = format!("its answer is not understood: {e}");
            Err(unreachable_host(host, &self.member(host)?, why, false))
        })
    }

    /// The same, as it is sent.
    ///
    /// # Errors
    /// As with [`HostClient::get`].
    pub async fn get_bytes(
        &self,
        host: &Name,
        path: &str,
        patience: Duration,
    ) -> Result<Bytes, HostClientError> {
        let member = self.member(host)?;
        let failed = |why: String| unreachable_host(host, &member, why, false);
        let request = Request::get(path).body(Body::empty()).map_err(|e| failed(e.to_string()))?;
        let (status, body) = self.whole(host, request, patience).await?;
        if !status.is_success() {
            return Err(failed(format!("it answers {status}")));
        }
        Ok(body)
    }

    /// Asks whether the daemon of a host is there, and waits so long.
    ///
    /// # Errors
    /// The host is unknown: nobody was asked.
    pub async fn look(&self, host: &Name, patience: Duration) -> Result<Presence, HostClientError> {
        let member = self.member(host)?;
        let request = Request::get(SELF).body(Body::empty());
        let request = request.map_err(|e| unreachable_host(host, &member, e.to_string(), false))?;
        let (status, body) = match self.whole(host, request, patience).await {
            Ok(answer) => answer,
            Err(error @ HostClientError::Unknown { .. }) => return Err(error),
            Err(HostClientError::Unreachable { why, .. }) if why == REFUSES => {
                return Ok(Presence::Refuses(why));
            }
            Err(error) => return Ok(Presence::Silent(error.to_string())),
        };
        // Whatever it answers, it is there, unless it takes itself for another host.
        if !status.is_success() {
            return Ok(Presence::Refuses(format!("it answers {status}")));
        }
        Ok(match serde_json::from_slice::<FleetSelf>(&body) {
            Ok(found) if found.host != *host => Presence::Silent(format!("it calls itself {}", found.host)),
            _ => Presence::Answers,
        })
    }

    /// Sends a request, and waits so long for the whole answer, of at most 1 MiB.
    ///
    /// # Errors
    /// The host is unknown, or has not answered.
    pub async fn whole(
        &self,
        host: &Name,
        request: Request<Body>,
        patience: Duration,
    ) -> Result<(StatusCode, Bytes), HostClientError> {
        let member = self.member(host)?;
        let is_sent = !matches!(*request.method(), Method::GET | Method::HEAD);
        let until = Instant::now() + patience;
        // It knows whether the request was sent when the time is over.
        let response = self.send(host, request, patience).await?;
        let status = response.status();
        let body = timeout_at(until, Limited::new(response.into_body(), MOST_ANSWER_BYTES).collect()).await;
        let why = match body {
            Ok(Ok(body)) => return Ok((status, body.to_bytes())),
            Ok(Err(e)) => format!("its answer: {e}"),
            Err(_) => format!("its answer is not complete within {} s", patience.as_secs_f32()),
        };
        Err(unreachable_host(host, &member, why, is_sent))
    }

    fn member(&self, host: &Name) -> Result<Member, HostClientError> {
        let unknown =
            || HostClientError::Unknown { host: host.clone(), nearest: self.members.nearest(host.as_str()) };
        self.members.get(host).ok_or_else(unknown)
    }

    /// Sends a request over a connection.
    async fn over(
        &self,
        host: &Name,
        member: &Member,
        mut sender: SendRequest<Body>,
        request: Request<Body>,
    ) -> Result<Response<HostBody>, Failed> {
        match sender.try_send_request(request).await {
            Ok(response) => {
                let is_kept = response.status() != StatusCode::SWITCHING_PROTOCOLS;
                let place = is_kept.then(|| Place {
                    pool: self.pool.clone(),
                    host: host.clone(),
                    member: member.clone(),
                    sender,
                });
                Ok(response.map(|body| HostBody::new(body, place)))
            }
            Err(mut e) => {
                let unsent = e.take_message();
                Err(Failed { why: broken(e.error()), unsent })
            }
        }
    }

    /// Sends a request over a connection that was opened for it.
    pub(super) async fn over_new(
        &self,
        host: &Name,
        member: &Member,
        connection: NewConnection,
        request: Request<Body>,
    ) -> Result<Response<HostBody>, Unanswered> {
        match self.over(host, member, connection.sender, request).await {
            Ok(response) => Ok(response),
            // It was over before: its sender knows that alone.
            Err(Failed { why, unsent: Some(_) }) => {
                let why = match connection.end.await {
                    Ok(Err(reason)) => broken(&reason),
                    _ => why,
                };
                Err(Unanswered { why, is_sent: false })
            }
            // Who refuses this host reads no request of it.
            Err(Failed { why, unsent: None }) => Err(Unanswered { is_sent: why != REFUSES, why }),
        }
    }

    /// Opens a connection.
    pub(super) async fn connect(&self, member: &Member) -> Result<NewConnection, String> {
        let stream = match timeout(CONNECT, TcpStream::connect(&member.address)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(e)) => return Err(format!("cannot connect: {e}")),
            Err(_) => return Err(format!("cannot connect within {} s", CONNECT.as_secs())),
        };
        let _ = stream.set_nodelay(true);
        let stream = self.greet(member, stream).await?;
        let mut builder = http1::Builder::new();
        builder.max_buf_size(BUFFER_BYTES);
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(|e| broken(&e))?;
        Ok(NewConnection { sender, end: tokio::spawn(connection.with_upgrades()) })
    }

    async fn greet(&self, member: &Member, stream: TcpStream) -> Result<TlsStream<TcpStream>, String> {
        let config = client_config(&self.identity, member.certificate);
        let name = ServerName::try_from(NO_NAME).expect("it is a name");
        let greeting = TlsConnector::from(Arc::new(config)).connect(name, stream);
        match timeout(HANDSHAKE, greeting).await {
            Ok(greeted) => greeted.map_err(|e| broken(&e)),
            Err(_) => Err(format!("it does not answer within {} s of the connection", HANDSHAKE.as_secs())),
        }
    }

    /// Number of idle connections to a host.
    #[cfg(test)]
    pub(super) fn idle(&self, host: &Name) -> usize {
        self.pool.idle(host)
    }
}

fn unreachable_host(host: &Name, member: &Member, why: String, is_sent: bool) -> HostClientError {
    HostClientError::Unreachable { host: host.clone(), address: member.address.clone(), why, is_sent }
}

/// Says why a connection has failed: the innermost reason, and for refused certificates what that means.
fn broken(error: &(dyn Error + 'static)) -> String {
    let mut inner = error;
    loop {
        let tls = inner.downcast_ref::<rustls::Error>().or_else(|| {
            let inner = inner.downcast_ref::<io::Error>()?;
            inner.get_ref()?.downcast_ref()
        });
        match tls {
            Some(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
                return "another program answers there: its certificate is not the one that the fleet has of this host".into();
            }
            Some(rustls::Error::AlertReceived(
                AlertDescription::UnknownCA
                | AlertDescription::CertificateUnknown
                | AlertDescription::BadCertificate
                | AlertDescription::CertificateRequired,
            )) => {
                return REFUSES.into();
            }
            _ => {}
        }
        match inner.source() {
            Some(source) => inner = source,
            None => return inner.to_string(),
        }
    }
}
