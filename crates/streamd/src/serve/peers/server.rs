//! Sends chunks to other hosts, as an uncompressed store of desync. Owns the bounds of their connections.
//!
//! Invariant: only bytes that were compared with their digest are sent. They are read while chunks cannot be removed. A chunk that is
//! missing is fetched from the store alone, and only as an owner.

use super::members::{CertificateDigest, Members};
use super::{MAY_FETCH, Peers, Wanted, count};
use crate::serve::cache::{Brought, Cache, ServedImage};
use crate::serve::seeds::{MOST_PLACES, MOST_TRIED, places};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt::set_tcp_user_timeout;
use spillway_image::digests::{ChunkDigest, hex, unhex};
use std::cmp::Reverse;
use std::convert::Infallible;
use std::io;
use std::net::TcpListener as StdListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;

/// Connections at a time.
const MOST_CONNECTIONS: usize = 512;
/// Connections that have not shown their certificate yet.
const MOST_HANDSHAKES: usize = 64;
/// Longest time of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Longest time between the end of an answer and that of the next request's header, and longest time in which a host takes nothing of
/// what it is sent.
const IDLE: Duration = Duration::from_secs(30);
/// Longest time that a host waits for the store: shorter than that of a whole request.
const STORE: Duration = Duration::from_secs(20);
/// Largest header, in bytes.
const MOST_HEADER_BYTES: usize = 16 << 10;
/// Most lines of a header.
const MOST_HEADER_LINES: usize = 32;
/// Chunks that are looked for in files at a time.
const MOST_LOOKS: usize = 16;
/// Bytes of a chunk that are read at a time. With two of them for each of the connections, these take at most 256 MiB; a chunk that could
/// not be kept is in memory whole.
const PIECE: u64 = 256 << 10;
/// Pieces of a chunk that are read and not yet sent.
const PIECES: usize = 2;

/// Body of an answer.
type Answer = UnsyncBoxBody<Bytes, io::Error>;

/// Where other hosts come in.
pub struct Entrance {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    /// Who is let in, if certificates are not signed by an authority.
    members: Option<Members>,
}

impl Entrance {
    /// Accepts from a listener that must not block, in this runtime.
    pub fn new(
        listener: StdListener,
        config: Arc<ServerConfig>,
        members: Option<Members>,
    ) -> Result<Entrance, String> {
        let listener = TcpListener::from_std(listener).map_err(|e| format!("--peer-listen: {e}"))?;
        Ok(Entrance { listener, acceptor: TlsAcceptor::from(config), members })
    }
}

/// Serves other hosts. Never returns.
pub async fn serve(cache: Arc<Cache>, peers: Arc<Peers>, entrance: Entrance) {
    let (looks, members) = (Arc::new(Semaphore::new(MOST_LOOKS)), entrance.members.clone());
    let server = Arc::new(Server { cache, peers, members, looks });
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let handshakes = Arc::new(Semaphore::new(MOST_HANDSHAKES));
    loop {
        let Ok((stream, _)) = entrance.listener.accept().await else {
            sleep(crate::serve::OUT_OF_DESCRIPTORS).await;
            continue;
        };
        // Beyond the limits, the connection is closed: the other side goes on with another source.
        let taken = (Arc::clone(&handshakes).try_acquire_owned(), Arc::clone(&places).try_acquire_owned());
        let (Ok(handshake), Ok(place)) = taken else { continue };
        let (server, acceptor) = (Arc::clone(&server), entrance.acceptor.clone());
        tokio::spawn(async move {
            let _ = stream.set_nodelay(true);
            let _ = set_tcp_user_timeout(&stream, IDLE.as_millis() as u32);
            let greeted = timeout(HANDSHAKE, acceptor.accept(stream)).await;
            drop(handshake);
            if let Ok(Ok(stream)) = greeted {
                server.connection(stream).await;
            }
            drop(place);
        });
    }
}

struct Server {
    cache: Arc<Cache>,
    peers: Arc<Peers>,
    members: Option<Members>,
    /// What is looked for in files. Disks do not wait for these.
    looks: Arc<Semaphore>,
}

/// Bytes of the upload limit for an answer. They are given back if there is none, also if the other side has gone meanwhile.
struct Taken<'a> {
    peers: &'a Peers,
    bytes: u64,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.peers.upload.give_back(self.bytes);
    }
}

/// What a request asks for.
enum Asked {
    Chunk(ChunkDigest),
    Have(ChunkDigest),
}

/// Where a chunk is.
struct Found {
    image: Arc<ServedImage>,
    wanted: Wanted,
    is_resident: bool,
}

/// Where the bytes of an answer are.
#[derive(Clone)]
enum Content {
    File(Arc<ChunkFile>),
    Memory(Bytes),
}

/// A chunk in the file of an image.
struct ChunkFile {
    image: Arc<ServedImage>,
    chunk: usize,
    /// It is not in memory: what follows is read in another thread.
    is_cold: AtomicBool,
}

impl Server {
    async fn connection(self: Arc<Server>, stream: tokio_rustls::server::TlsStream<TcpStream>) {
        let shown = stream.get_ref().1.peer_certificates().and_then(|shown| shown.first());
        let shown = shown.map(CertificateDigest::of);
        let service = service_fn(|request| {
            let server = Arc::clone(&self);
            async move {
                // A host that was let in may have been removed since.
                match server.admits(shown) {
                    true => Ok::<_, Infallible>(server.answer(&request).await),
                    false => Ok(status(StatusCode::FORBIDDEN)),
                }
            }
        });
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(IDLE);
        http.max_buf_size(MOST_HEADER_BYTES).max_headers(MOST_HEADER_LINES);
        // However it ends, the other side knows.
        let _ = http.serve_connection(TokioIo::new(stream), service).await;
    }

    fn admits(&self, shown: Option<CertificateDigest>) -> bool {
        self.members.as_ref().is_none_or(|members| shown.is_some_and(|shown| members.admits(&shown)))
    }

    async fn answer(self: &Arc<Server>, request: &Request<Incoming>) -> Response<Answer> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let refused =
                Response::builder().status(StatusCode::METHOD_NOT_ALLOWED).header(ALLOW, "GET, HEAD");
            return refused.body(nothing()).expect("it is complete");
        }
        if !request.body().is_end_stream() {
            return status(StatusCode::BAD_REQUEST);
        }
        let is_head = request.method() == Method::HEAD;
        match asked(request.uri().path()) {
            Some(Asked::Chunk(digest)) => {
                self.chunk(digest, is_head, request.headers().contains_key(MAY_FETCH)).await
            }
            Some(Asked::Have(root)) => self.have(root, is_head).await,
            None => status(StatusCode::NOT_FOUND),
        }
    }

    async fn have(&self, root: ChunkDigest, is_head: bool) -> Response<Answer> {
        let Some(image) = self.cache.image(&root) else { return status(StatusCode::NOT_FOUND) };
        match tokio::task::spawn_blocking(move || image.cached.residency_bits()).await {
            Ok(bits) => {
                let len = bits.len() as u64;
                let whole = if is_head { nothing() } else { full(bits) };
                content(len, whole)
            }
            Err(_) => status(StatusCode::INTERNAL_SERVER_ERROR),
        }
    }

    async fn chunk(&self, digest: ChunkDigest, is_head: bool, may_fetch: bool) -> Response<Answer> {
        let Some(found) = self.find(digest).await else { return status(StatusCode::NOT_FOUND) };
        let len = found.wanted.len;
        if is_head {
            let there = || content(len, nothing());
            return if found.is_resident { there() } else { status(StatusCode::NOT_FOUND) };
        }
        // That it is missing is normal, and tells the other side to ask somebody else.
        let is_given = found.is_resident || may_fetch && self.peers.is_owner(&found.wanted);
        if !is_given {
            return status(StatusCode::NOT_FOUND);
        }
        if let Err(wait) = self.peers.upload.take(len, Instant::now()) {
            count(&self.peers.counts.refused_uploads, 1);
            let seconds = wait.as_secs() + 1;
            let refused = Response::builder().status(StatusCode::SERVICE_UNAVAILABLE);
            return refused.header(RETRY_AFTER, seconds).body(nothing()).expect("it is complete");
        }
        let mut taken = Taken { peers: &self.peers, bytes: len };
        match self.bring(found).await {
            Some(bytes) => {
                taken.bytes = 0;
                content(len, sending(Arc::clone(&self.peers), bytes, len))
            }
            None => status(StatusCode::NOT_FOUND),
        }
    }

    /// Looks for a chunk in all images: where it is or, if it is nowhere, where it belongs.
    async fn find(&self, digest: ChunkDigest) -> Option<Found> {
        let images = self.cache.images();
        // Each step elsewhere wakes a thread, which on an idle host takes longer than the search.
        let (found, may_be_in_files) = look(&images, &digest)?;
        if !may_be_in_files {
            return Some(found);
        }
        let turn = Arc::clone(&self.looks).acquire_owned().await.ok()?;
        let in_files = tokio::task::spawn_blocking(move || {
            // Also if the other side has gone.
            let _turn = turn;
            look_in_files(&images, &digest)
        });
        in_files.await.ok()?.or(Some(found))
    }

    /// The bytes of a chunk, from the store if they are not here.
    async fn bring(&self, found: Found) -> Option<Content> {
        let chunk = found.wanted.chunk;
        if !found.is_resident {
            let brought = timeout(STORE, self.cache.bring_from_store(&found.image, chunk)).await;
            match brought {
                Ok(Brought::Resident) => {}
                Ok(Brought::Passed(bytes)) => return Some(Content::Memory(bytes)),
                Ok(Brought::Damaged(_)) | Err(_) => return None,
            }
        }
        let (image, chunk) = (found.image, chunk as usize);
        Some(Content::File(Arc::new(ChunkFile { image, chunk, is_cold: AtomicBool::new(false) })))
    }
}

fn asked(path: &str) -> Option<Asked> {
    let (folder, name) = path.strip_prefix('/')?.split_once('/')?;
    let digest = unhex(name).filter(|digest| hex(digest) == name)?;
    match folder {
        "have" => Some(Asked::Have(digest)),
        folder if folder == &name[..4] => Some(Asked::Chunk(digest)),
        _ => None,
    }
}

/// A place of a chunk that was compared or, if there is none, one where it belongs, and whether it may be in a file.
fn look(images: &[Arc<ServedImage>], digest: &ChunkDigest) -> Option<(Found, bool)> {
    let (mut left, mut may_be_in_files) = (MOST_PLACES, false);
    for image in images {
        let places = image.find(digest);
        let (few, more) = places.split_at(places.len().min(left));
        let residency = image.cached.residency();
        if let Some(chunk) = few.iter().find(|chunk| residency.has(u64::from(**chunk))) {
            return Some((found(image, *chunk, true)?, false));
        }
        may_be_in_files |= !more.is_empty() || few.iter().any(|chunk| image.cached.may_have(*chunk as usize));
        left -= few.len();
    }
    // If it has to be fetched: from a store that answers, and where it is whole, if the digest is also that of an image's short end.
    let belongs = images.iter().filter_map(|image| found(image, *image.find(digest).first()?, false));
    let best = belongs.min_by_key(|found| (found.image.is_store_silent(), Reverse(found.wanted.len)))?;
    Some((best, may_be_in_files))
}

/// A place where a chunk is in the file. Of those that may have it, few are tried: more would be wrong, too.
fn look_in_files(images: &[Arc<ServedImage>], digest: &ChunkDigest) -> Option<Found> {
    let may_have = places(images, digest).filter(|(image, chunk)| image.cached.may_have(*chunk as usize));
    let is_there = |(image, chunk): &(&Arc<ServedImage>, u32)| {
        // What cannot be read is not there.
        matches!(image.cached.verify(*chunk as usize), Ok(true))
    };
    let (image, chunk) = may_have.take(MOST_TRIED).find(is_there)?;
    found(image, chunk, true)
}

fn found(image: &Arc<ServedImage>, chunk: u32, is_resident: bool) -> Option<Found> {
    Some(Found { image: Arc::clone(image), wanted: image.wanted(chunk)?, is_resident })
}

fn status(status: StatusCode) -> Response<Answer> {
    Response::builder().status(status).body(nothing()).expect("it is complete")
}

fn content(len: u64, body: Answer) -> Response<Answer> {
    let answer = Response::builder().header(CONTENT_LENGTH, len);
    answer.header(CONTENT_TYPE, "application/octet-stream").body(body).expect("it is complete")
}

fn nothing() -> Answer {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

fn full(bytes: Vec<u8>) -> Answer {
    Full::new(Bytes::from(bytes)).map_err(|never| match never {}).boxed_unsync()
}

/// A body that is read piece by piece: the next one while the other side takes this one.
fn sending(peers: Arc<Peers>, content: Content, len: u64) -> Answer {
    let pieces = stream::iter((0..len).step_by(PIECE as usize));
    let read =
        pieces.map(move |at| piece(content.clone(), at, PIECE.min(len - at) as usize)).buffered(PIECES);
    let mut left = len;
    let sent = read.map_ok(move |piece| {
        left -= piece.len() as u64;
        count(&peers.counts.uploaded_bytes, piece.len() as u64);
        count(&peers.counts.uploaded_chunks, u64::from(left == 0));
        Frame::data(piece)
    });
    StreamBody::new(sent).boxed_unsync()
}

/// # Errors
/// The chunk was removed meanwhile: the answer is broken off.
async fn piece(content: Content, at: u64, len: usize) -> io::Result<Bytes> {
    match content {
        Content::Memory(bytes) => Ok(bytes.slice(at as usize..at as usize + len)),
        Content::File(file) => file.read(at, len).await.map(Bytes::from),
    }
}

impl ChunkFile {
    async fn read(self: Arc<ChunkFile>, at: u64, len: usize) -> io::Result<Vec<u8>> {
        // Without a step to another thread, as long as no disk is waited for.
        if !self.is_cold.load(Ordering::Relaxed) {
            let mut bytes = vec![0; len];
            if self.image.cached.read_resident_now(self.chunk, at, &mut bytes) {
                return Ok(bytes);
            }
            self.is_cold.store(true, Ordering::Relaxed);
        }
        let read = tokio::task::spawn_blocking(move || {
            let mut bytes = vec![0; len];
            match self.image.cached.read_resident(self.chunk, at, &mut bytes)? {
                true => Ok(bytes),
                false => Err(io::ErrorKind::NotFound.into()),
            }
        });
        read.await.map_err(io::Error::other)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_chunks_and_images_are_understood() {
        let name = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        assert!(
            matches!(asked(&format!("/0123/{name}")), Some(Asked::Chunk(digest)) if hex(&digest) == name)
        );
        assert!(matches!(asked(&format!("/have/{name}")), Some(Asked::Have(digest)) if hex(&digest) == name));
        let upper = name.to_uppercase();
        for path in [
            "",
            "/",
            "/have",
            "/have/",
            "/have/..",
            &format!("/{name}"),
            &format!("0123/{name}"),
            &format!("/1234/{name}"),
            &format!("/0123/{name}.cacnk"),
            &format!("/0123/{upper}"),
            &format!("/have/{}", &name[1..]),
            &format!("/have/{name}/"),
            &format!("//have/{name}"),
        ] {
            assert!(asked(path).is_none(), "{path}");
        }
    }
}
