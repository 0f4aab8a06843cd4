//! The daemon's sockets, and the connections on them. Owns how connections are accepted and served; knows no route.
//!
//! Invariant: connections are bounded in number, in the time that they may be idle, and in the time that they may leave a
//! response unread.

use crate::access::caller::PeerAddress;
use crate::access::connections::{ConnectionLimits, ConnectionSlot, Connections};
use crate::access::flow::{Flow, track};
use crate::access::lingering::LingeringStream;
use crate::access::paced::{PacedStream, ReaderLimits};
use crate::access::tls::{RemoteListener, speaks_http_2};
use crate::access::{Authority, Peer};
use crate::api;
use crate::failure::Failure;
use crate::fleet::door::FleetListener;
use crate::state_folder::TAKEOVER_DEADLINE;
use anyhow::{Context, Result, bail};
use axum::response::Response;
use axum::{Router, middleware};
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::fs::Mode;
use std::convert::Infallible;
use std::fs;
use std::future::pending;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixListener};
use tokio_rustls::server::TlsStream;

/// Longest time until a request's head is complete, from the start of the connection or the end of the last response.
const HEAD: Duration = Duration::from_secs(30);
/// Minimum speed at which a response must be read.
const PACE: ReaderLimits = ReaderLimits { stall: Duration::from_secs(30), bytes_a_second: 16 << 10 };
/// Requests at a time on a connection with HTTP/2, and bytes of the head of each.
const MOST_STREAMS: u32 = 128;
const MOST_HEAD_BYTES: u32 = 8 << 10;
/// Pause before the next connection is accepted after descriptors ran out.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);

/// Accepts connections on the unix socket.
pub async fn accept(listener: UnixListener, router: Router) {
    let connections = Connections::new(ConnectionLimits::LOCAL);
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors: wait until others are closed.
            tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
            continue;
        };
        let who = stream.peer_cred().ok();
        let source =
            PeerAddress::Local { uid: who.as_ref().map(|who| who.uid()), pid: who.and_then(|who| who.pid()) };
        // All connections of that user are busy: refuse this one.
        let Ok(place) = connections.admit(source) else { continue };
        let peer = Peer { source, authority: Authority::Kernel, place: Arc::clone(&place) };
        tokio::spawn(until_closed(place, serve(stream, router.clone(), peer)));
    }
}

/// Accepts connections over TCP, if there is a listener.
pub async fn accept_remote(door: Option<Arc<RemoteListener>>, router: Router) {
    let Some(door) = door else { return pending().await };
    let router = router.layer(middleware::from_fn(track)).layer(middleware::from_fn(api::complete));
    let connections = Connections::new(ConnectionLimits::REMOTE);
    loop {
        let Some(stranger) = door.next().await else {
            tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
            continue;
        };
        let source = PeerAddress::Remote(stranger.address.ip());
        let Ok(place) = connections.admit(source) else { continue };
        let authority = Authority::Tokens(Arc::clone(&door.known));
        let peer = Peer { source, authority, place: Arc::clone(&place) };
        let router = router.clone();
        tokio::spawn(until_closed(place, async move {
            match stranger.greet().await {
                Some(stream) if speaks_http_2(&stream) => serve_http_2(stream, router, peer).await,
                Some(stream) => serve(stream, router, peer).await,
                None => {}
            }
        }));
    }
}

/// Accepts connections of other hosts of the fleet, if there is a listener.
pub async fn accept_fleet(door: Option<Arc<FleetListener>>, router: Router) {
    let Some(door) = door else { return pending().await };
    let router = router.layer(middleware::from_fn(track)).layer(middleware::from_fn(api::complete));
    let connections = Connections::new(ConnectionLimits::REMOTE);
    loop {
        let Some(stranger) = door.next().await else {
            tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
            continue;
        };
        let source = PeerAddress::Remote(stranger.address.ip());
        let Ok(place) = connections.admit(source) else { continue };
        let (router, kept) = (router.clone(), Arc::clone(&place));
        tokio::spawn(until_closed(place, async move {
            let Some((stream, member)) = stranger.greet().await else { return };
            let peer = Peer { source, authority: Authority::Member(Arc::new(member)), place: kept };
            match speaks_http_2(&stream) {
                true => serve_http_2(stream, router, peer).await,
                false => serve(stream, router, peer).await,
            }
        }));
    }
}

/// Serves a connection until it ends, or until it is closed for another one.
async fn until_closed(place: Arc<ConnectionSlot>, answering: impl Future<Output = ()>) {
    tokio::select! {
        () = answering => {}
        () = place.closed() => {}
    }
}

/// What answers the requests of a connection. All connections share one router: to give each of them layers of its own would copy all
/// routes each time, which costs more than most requests do.
struct Answers {
    router: TowerToHyperService<Router>,
    peer: Peer,
    /// What is under way, with HTTP/2.
    flow: Option<Flow>,
}

impl Service<Request<Incoming>> for Answers {
    type Response = Response;
    type Error = Infallible;
    type Future = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.peer.clone());
        if let Some(flow) = &self.flow {
            request.extensions_mut().insert(flow.clone());
        }
        self.router.call(request)
    }
}

/// Serves a connection with HTTP/2 until it ends. Browsers have many requests at a time, and few connections.
async fn serve_http_2(stream: TlsStream<TcpStream>, router: Router, peer: Peer) {
    let flow = Flow::begun();
    let answers = Answers { router: TowerToHyperService::new(router), peer, flow: Some(flow.clone()) };
    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(MOST_STREAMS)
        .max_header_list_size(MOST_HEAD_BYTES)
        .keep_alive_interval(HEAD)
        .keep_alive_timeout(HEAD)
        .serve_connection(TokioIo::new(PacedStream::new(stream, PACE)), answers);
    tokio::select! {
        _ = connection => {}
        () = flow.is_over() => {}
    }
}

/// Serves a connection with HTTP/1.1 until it ends, or until it has become a WebSocket, which is served by its own task.
async fn serve(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, router: Router, peer: Peer) {
    let answers = Answers { router: TowerToHyperService::new(router), peer, flow: None };
    let stream = LingeringStream::new(PacedStream::new(stream, PACE));
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .serve_connection(TokioIo::new(stream), answers);
    let _ = connection.with_upgrades().await;
}

/// Creates the socket so that nobody can connect before its permissions are set. Replaces a socket without a listener.
pub fn listen(path: &Path, mode: u32) -> Result<std::os::unix::net::UnixListener> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| {
            format!("{}: cannot create the folder of the socket: give another --socket", folder.display())
        })?;
    }
    let until = Instant::now() + TAKEOVER_DEADLINE;
    while std::os::unix::net::UnixStream::connect(path).is_ok() {
        // As with the lock: a process that the last daemon was starting may hold it.
        if Instant::now() > until {
            bail!(Failure::refused(format!(
                "{}: another process listens there: stop it, or give another --socket",
                path.display()
            )));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    match fs::symlink_metadata(path) {
        Ok(found) if !std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => {
            bail!(Failure::usage(format!(
                "{}: exists and is not a socket: remove it, or give another --socket",
                path.display()
            )))
        }
        Ok(_) => fs::remove_file(path).with_context(|| {
            format!("{}: cannot remove the old socket: give another --socket", path.display())
        })?,
        Err(_) => {}
    }
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let listener = std::os::unix::net::UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener
        .with_context(|| format!("{}: cannot create the socket: give another --socket", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    Ok(listener)
}
