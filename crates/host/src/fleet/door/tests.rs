//! Who is let in, and whom a host speaks to: real TLS on the loopback network.

use super::identity::new_certificate;
use super::verify::{client_config, server_config};
use super::*;
use crate::serving::accept_fleet;
use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::routing::get;
use http_body_util::BodyExt;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls::client::Resumption;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, ServerName};
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::rustls::version::TLS12;
use tokio_rustls::rustls::{ClientConfig, HandshakeKind, RootCertStore};
use tokio_rustls::{TlsAcceptor, TlsConnector};

const PATIENCE: Duration = Duration::from_secs(20);

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn identity(host: &str) -> Identity {
    let dir = tempfile::tempdir().unwrap();
    Identity::open(dir.path(), &name(host)).unwrap()
}

/// A host with an own certificate and an address.
fn member(identity: &Identity, address: SocketAddr, epoch: i64) -> Member {
    Member { address: address.to_string(), certificate: identity.digest(), epoch, peers: None }
}

fn list<const N: usize>(members: [(&str, Member); N]) -> BTreeMap<Name, Member> {
    members.into_iter().map(|(host, member)| (name(host), member)).collect()
}

const NOWHERE: ([u8; 4], u16) = ([127, 0, 0, 1], 1);

/// Host b, with routes of the test's own, and host a, which asks it.
struct World {
    a: Identity,
    b: Identity,
    /// The list of both.
    members: Members,
    address: SocketAddr,
    /// Requests that b has answered.
    answered: Arc<AtomicUsize>,
}

impl World {
    async fn new() -> World {
        let answered = Arc::<AtomicUsize>::default();
        let count = Arc::clone(&answered);
        let big = || async {
            Body::from_stream(futures_util::stream::repeat_with(|| Ok::<_, String>(vec![7; 1 << 16])))
        };
        let count = move || async move { (count.fetch_add(1, Ordering::Relaxed) + 1).to_string() };
        let routes = Router::new().route("/", get(count.clone()).post(count)).route("/big", get(big));
        World::with(routes, answered).await
    }

    async fn with(routes: Router, answered: Arc<AtomicUsize>) -> World {
        let (a, b, members) = (identity("host-a"), identity("host-b"), Members::default());
        let listener = FleetListener::open(([127, 0, 0, 1], 0).into(), &b, members.clone()).await.unwrap();
        let address = listener.address().unwrap();
        tokio::spawn(accept_fleet(Some(Arc::new(listener)), routes));
        members
            .replace(list([("host-a", member(&a, NOWHERE.into(), 1)), ("host-b", member(&b, address, 1))]));
        World { a, b, members, address, answered }
    }

    fn client(&self) -> HostClient {
        HostClient::new(&self.a, self.members.clone())
    }

    /// What b answers to a client with these settings.
    async fn answer(&self, config: ClientConfig) -> std::io::Result<String> {
        let stream = TcpStream::connect(self.address).await?;
        let name = ServerName::try_from("host-b").unwrap();
        let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: b\r\nconnection: close\r\n\r\n").await?;
        let mut answer = String::new();
        tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer)).await??;
        Ok(answer)
    }
}

/// A certificate of one host with the key of another.
fn mismatched(certificate: &Identity, key: &Identity) -> Identity {
    let mut wrong = certificate.clone();
    let shown = &certificate.shown;
    wrong.shown = Arc::new(CertifiedKey::new(shown.cert.clone(), Arc::clone(&key.shown.key)));
    wrong
}

async fn ask(client: &HostClient, host: &str) -> Result<String, HostClientError> {
    let request = Request::get("/").body(Body::empty()).unwrap();
    let (_, body) = client.whole(&name(host), request, PATIENCE).await?;
    Ok(String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn strangers_end_in_the_handshake() {
    let world = World::new().await;
    let digest = world.b.digest();
    let answer = world.answer(client_config(&world.a, digest)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");

    let stranger = identity("host-a");
    let nobody = {
        let mut config = client_config(&world.a, digest);
        config.client_auth_cert_resolver =
            ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(RootCertStore::empty())
                .with_no_client_auth()
                .client_auth_cert_resolver;
        config
    };
    // Each host that a member has talked to has its certificate.
    let replayed = client_config(&mismatched(&world.a, &stranger), digest);
    let old = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS12])
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(Arc::clone(&world.a.shown))));
    for (who, config) in [
        ("without a certificate", nobody),
        ("with a certificate of its own", client_config(&stranger, digest)),
        ("with a member's certificate and another key", replayed),
        ("with TLS 1.2", old),
    ] {
        assert!(world.answer(config).await.is_err(), "{who}");
    }
    let mut plain = TcpStream::connect(world.address).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\nhost: b\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, plain.read_to_end(&mut answer)).await.unwrap();
    assert!(!answer.starts_with(b"HTTP"), "plain text");
    assert_eq!(world.answered.load(Ordering::Relaxed), 1, "only the member got to the routes");
}

/// Whatever has come first at either end: its request, or that it is refused.
#[tokio::test]
async fn who_is_refused_learns_that() {
    let world = World::new().await;
    let stranger = HostClient::new(&identity("host-a"), world.members.clone());
    let (host, b) = (name("host-b"), world.members.get(&name("host-b")).unwrap());
    let request = || Request::get("/").body(Body::empty()).unwrap();
    let refused = stranger.whole(&host, request(), PATIENCE).await.unwrap_err().to_string();
    assert!(refused.contains("does not take the certificate"), "{refused}");
    let connection = stranger.connect(&b).await.unwrap();
    let until = Instant::now() + PATIENCE;
    while !connection.end.is_finished() {
        assert!(Instant::now() < until, "it is not refused");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let failed = stranger.over_new(&host, &b, connection, request()).await.err().unwrap();
    assert!(refused.ends_with(&failed.why) && !failed.is_sent, "{failed:?}");
    // What comes after the refusal does not reset the connection.
    let pieces = futures_util::stream::unfold(0, async |n| {
        tokio::time::sleep(Duration::from_millis(20)).await;
        (n < 10).then(|| (Ok::<_, String>(vec![7; 1000]), n + 1))
    });
    let big = Request::post("/").body(Body::from_stream(pieces)).unwrap();
    let failed = stranger.over_new(&host, &b, stranger.connect(&b).await.unwrap(), big).await.err().unwrap();
    assert!(refused.ends_with(&failed.why) && !failed.is_sent, "{failed:?}");
    assert_eq!(world.answered.load(Ordering::Relaxed), 0);
}

/// Otherwise a claim that one host has refused to hear is asked of no other one.
#[tokio::test]
async fn only_what_may_have_been_read_counts_as_sent() {
    let world = World::new().await;
    let host = name("host-b");
    let sent = async |client: &HostClient, patience: Duration| {
        let post = Request::post("/").body(Body::from("x")).unwrap();
        let error = client.whole(&host, post, patience).await.unwrap_err();
        let HostClientError::Unreachable { is_sent, .. } = error else { panic!("{error}") };
        assert_eq!(error.to_string().contains("may have been carried out"), is_sent, "{error}");
        is_sent
    };
    let stranger = HostClient::new(&identity("host-a"), world.members.clone());
    assert!(!sent(&stranger, PATIENCE).await, "it is refused");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let b = member(&world.b, listener.local_addr().unwrap(), 1);
    world.members.replace(list([("host-a", member(&world.a, NOWHERE.into(), 1)), ("host-b", b)]));
    assert!(!sent(&world.client(), Duration::from_millis(300)).await, "there was no handshake yet");
    // It reads the request, and says nothing.
    let acceptor = TlsAcceptor::from(Arc::new(server_config(&world.b, world.members.clone())));
    let read = tokio::spawn(async move {
        loop {
            let Ok(mut stream) = acceptor.accept(listener.accept().await.unwrap().0).await else { continue };
            if stream.read(&mut [0; 4096]).await.is_ok_and(|bytes| bytes > 0) {
                return;
            }
        }
    });
    assert!(sent(&world.client(), PATIENCE).await, "it was read, and not answered");
    read.await.unwrap();
}

/// Whoever resumed a session would show no certificate.
#[tokio::test]
async fn a_session_cannot_be_resumed() {
    let world = World::new().await;
    let mut config = client_config(&world.a, world.b.digest());
    // As a client that keeps tickets.
    config.resumption = Resumption::in_memory_sessions(8);
    let connector = TlsConnector::from(Arc::new(config));
    for _ in 0..3 {
        let stream = TcpStream::connect(world.address).await.unwrap();
        let mut stream = connector.connect(ServerName::try_from("host-b").unwrap(), stream).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: b\r\nconnection: close\r\n\r\n").await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
        assert_eq!(stream.get_ref().1.handshake_kind(), Some(HandshakeKind::Full));
    }
}

/// Programs that answer at the address of a member, and are none, get nothing.
#[tokio::test]
async fn a_host_speaks_to_the_certificate_that_it_knows() {
    let world = World::new().await;
    let stranger = identity("host-b");
    for (who, shown) in [
        ("its own certificate", stranger.clone()),
        ("a member's with another key", mismatched(&world.b, &stranger)),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(server_config(&shown, world.members.clone())));
        let got = tokio::spawn(async move {
            let stream = listener.accept().await.unwrap().0;
            let Ok(mut stream) = acceptor.accept(stream).await else { return 0 };
            stream.read(&mut [0; 16]).await.unwrap_or(0)
        });
        let b = Member { address: address.to_string(), ..world.members.get(&name("host-b")).unwrap() };
        world.members.replace(list([("host-a", member(&world.a, NOWHERE.into(), 1)), ("host-b", b)]));
        let refused = ask(&world.client(), "host-b").await.unwrap_err();
        let HostClientError::Unreachable { is_sent, address: at, .. } = &refused else { panic!("{refused}") };
        assert!(!is_sent && *at == address.to_string(), "{who}: {refused}");
        assert_eq!(tokio::time::timeout(PATIENCE, got).await.unwrap().unwrap(), 0, "{who}");
    }
}

#[tokio::test]
async fn connections_are_used_again_and_few_are_kept() {
    let world = World::new().await;
    let client = world.client();
    for n in 1..=3 {
        assert_eq!(ask(&client, "host-b").await.unwrap(), n.to_string());
    }
    assert_eq!(client.idle(&name("host-b")), 1, "one connection for all of them");
    let many = (0..8).map(|_| ask(&client, "host-b"));
    assert!(futures_util::future::join_all(many).await.iter().all(Result::is_ok));
    assert_eq!(client.idle(&name("host-b")), 2);
    // A host that has come back is another one.
    let a = world.members.get(&name("host-a")).unwrap();
    world.members.replace(list([("host-a", a), ("host-b", member(&world.b, NOWHERE.into(), 2))]));
    assert!(ask(&client, "host-b").await.is_err(), "the old connections are not used");
    let HostClientError::Unknown { nearest, .. } = ask(&client, "host-c").await.unwrap_err() else {
        panic!()
    };
    assert!(nearest.is_some());
}

#[tokio::test]
async fn a_connection_that_the_host_has_closed_is_not_used() {
    let world = World::new().await;
    let client = world.client();
    ask(&client, "host-b").await.unwrap();
    let post = || Request::post("/").body(Body::from("x")).unwrap();
    // A daemon that was restarted: the same certificate, and the old connections are gone.
    let first = client.whole(&name("host-b"), post(), PATIENCE).await.unwrap();
    assert_eq!(first.0, 200);
    let listener =
        FleetListener::open(([127, 0, 0, 1], 0).into(), &world.b, world.members.clone()).await.unwrap();
    let address = listener.address().unwrap();
    let serving = tokio::spawn(async move {
        // Answers once, and closes.
        loop {
            let Some((mut stream, _)) = listener.next().await.unwrap().greet().await else { continue };
            let _ = stream.read(&mut [0; 4096]).await;
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n1").await;
            let _ = stream.shutdown().await;
        }
    });
    let a = world.members.get(&name("host-a")).unwrap();
    world.members.replace(list([("host-a", a), ("host-b", member(&world.b, address, 2))]));
    for _ in 0..20 {
        assert_eq!(ask(&client, "host-b").await.unwrap(), "1");
    }
    serving.abort();
}

#[tokio::test]
async fn a_host_that_is_stopped_is_waited_for_no_longer_than_it_is_said() {
    let world = World::new().await;
    // The kernel connects for a process that is stopped; nobody answers.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let b = member(&world.b, listener.local_addr().unwrap(), 1);
    world.members.replace(list([("host-b", b)]));
    let begun = Instant::now();
    let request = Request::get("/").body(Body::empty()).unwrap();
    let refused = world.client().send(&name("host-b"), request, Duration::from_secs(60)).await.err().unwrap();
    assert!(refused.to_string().contains("does not answer within 2 s"), "{refused}");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let begun = Instant::now();
    let request = Request::get("/").body(Body::empty()).unwrap();
    let refused =
        world.client().whole(&name("host-b"), request, Duration::from_millis(300)).await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_millis(1900), "{refused}");
}

#[tokio::test]
async fn answers_that_are_kept_are_bounded() {
    let world = World::new().await;
    let request = Request::get("/big").body(Body::empty()).unwrap();
    let refused = world.client().whole(&name("host-b"), request, PATIENCE).await.unwrap_err();
    assert!(refused.to_string().contains("limit"), "{refused}");
    // As a stream it goes on.
    let request = Request::get("/big").body(Body::empty()).unwrap();
    let mut body = world.client().send(&name("host-b"), request, PATIENCE).await.unwrap().into_body();
    let mut bytes = 0;
    while bytes < 8 << 20 {
        bytes += body.frame().await.unwrap().unwrap().into_data().unwrap().len();
    }
}

#[test]
fn a_certificate_names_its_host() {
    let (certificate, key) = new_certificate(&name("host-a")).unwrap();
    let is_named = |text: &[u8]| certificate.windows(text.len()).any(|part| part == text);
    assert!(is_named(b"host-a") && !is_named(b"host-b"));
    assert!(matches!(PrivateKeyDer::from(key), PrivateKeyDer::Pkcs8(_)));
}

/// Requests over HTTP/2 reach the same routes.
#[tokio::test]
async fn members_may_speak_http_2() {
    let world = World::new().await;
    let mut config = client_config(&world.a, world.b.digest());
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::connect(world.address).await.unwrap();
    let host = ServerName::try_from("host-b").unwrap();
    let stream = TlsConnector::from(Arc::new(config)).connect(host, stream).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let io = hyper_util::rt::TokioIo::new(stream);
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(hyper_util::rt::TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    for n in ["1", "2"] {
        let request = Request::get("https://host-b/").body(Body::empty()).unwrap();
        let body = sender.send_request(request).await.unwrap().into_body().collect().await.unwrap();
        assert_eq!(body.to_bytes(), n);
    }
}
