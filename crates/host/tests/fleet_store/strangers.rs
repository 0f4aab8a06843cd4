//! Wrong certificates, users without rights, and servers that are not the etcd that is needed: each is said, with what to do.

use crate::scene::{
    PREFIX, Told, apply_at_last, cluster, put, refusal, settings, until, version, with_both, writing,
};
use futures_util::stream::{self, Stream, StreamExt};
use http_body_util::StreamBody;
use hyper::body::{Bytes, Frame, Incoming};
use hyper::http::{HeaderMap, HeaderValue};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use spillway_fleet::view::Update;
use spillway_host::fleet::etcd::{
    EtcdTls, EtcdUser, FleetStore, FleetStoreError, FleetStoreSettings, MemberFailure,
};
use spillway_testkit::certificate::Authority;
use spillway_testkit::etcd::{EtcdOptions, EtcdProgram};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

with_both!(certificates_must_be_right a_user_needs_rights a_password_may_be_changed a_permission_may_be_missing);

const SOON: Duration = Duration::from_secs(10);

/// Why the only member cannot be used.
async fn member_refusal(settings: FleetStoreSettings) -> (MemberFailure, FleetStoreError) {
    let error = refusal(&FleetStore::open(settings)).await;
    let FleetStoreError::NoMember(members) = &error else { panic!("{error:?}") };
    let [(_, why)] = &members[..] else { panic!("{error:?}") };
    (why.clone(), error)
}

async fn certificates_must_be_right(program: EtcdProgram) {
    let options = EtcdOptions { tls: true, ..EtcdOptions::default() };
    let Some(cluster) = cluster(1, program, &options) else { return };
    let file = |name: &str| Some(cluster.tls_file(name));
    let identity = || file("client.crt").zip(file("client.key"));
    let with = |tls| FleetStoreSettings { tls, ..settings(&cluster.addresses()) };
    let store = FleetStore::open(with(Some(EtcdTls { authorities: file("ca.crt"), identity: identity() })));
    let told = Told::by(store.follow());
    let revision = apply_at_last(&store, vec![put("a", "by TLS")]).await;
    until("the update", SOON, || told.lock().unwrap().revision >= revision).await;

    let dir = tempfile::tempdir().unwrap();
    let other = Authority::new(dir.path()).unwrap();
    let (why, error) =
        member_refusal(with(Some(EtcdTls { authorities: Some(other.certificate()), identity: identity() })))
            .await;
    assert!(matches!(why, MemberFailure::UntrustedCertificate(_)) && error.is_permanent(), "{error}");
    assert!(error.to_string().contains("--fleet-tls"), "{error}");
    let (why, error) =
        member_refusal(with(Some(EtcdTls { authorities: file("ca.crt"), identity: None }))).await;
    // It says why, or closes the connection before that has been read.
    let is_refused = |why| matches!(why, MemberFailure::CertificateRefused(_) | MemberFailure::Closed(_));
    assert!(is_refused(why) && error.to_string().contains("--fleet-tls ca=FILE,cert=FILE"), "{error:?}");
    // Signed by another authority.
    let foreign = (dir.path().join("crt"), dir.path().join("key"));
    other.sign("DNS:host", &foreign.0, &foreign.1).unwrap();
    let (why, error) =
        member_refusal(with(Some(EtcdTls { authorities: file("ca.crt"), identity: Some(foreign) }))).await;
    assert!(is_refused(why), "{error:?}");
    // A key that is none of the certificate.
    let mixed = file("client.crt").zip(Some(dir.path().join("key")));
    let (why, error) =
        member_refusal(with(Some(EtcdTls { authorities: file("ca.crt"), identity: mixed }))).await;
    assert!(matches!(why, MemberFailure::File(..)) && error.is_permanent(), "{error:?}");
    // Without TLS, etcd closes the connection.
    let (why, error) = member_refusal(with(None)).await;
    assert!(matches!(why, MemberFailure::Closed(_)), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_without_tls_is_said() {
    let Some(cluster) = cluster(1, EtcdProgram::Debian34, &EtcdOptions::default()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let authorities = Some(Authority::new(dir.path()).unwrap().certificate());
    let tls = Some(EtcdTls { authorities, identity: None });
    let (why, error) = member_refusal(FleetStoreSettings { tls, ..settings(&cluster.addresses()) }).await;
    assert!(matches!(why, MemberFailure::NoTls | MemberFailure::Closed(_)), "{error:?}");
    assert!(error.to_string().contains("TLS"), "{error}");
}

/// A server that wants TLS closes a connection without it. If it has left bytes unread, the system resets the connection. Both must be said in
/// the same way.
#[tokio::test]
async fn a_server_that_closes_connections_is_said() {
    // An empty SETTINGS frame (RFC 9113, section 6.5).
    const GREETING: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
    for (greeting, bytes_read) in
        [("", 0), ("", 1), ("", 1_000), ("greets", 0), ("greets", 1), ("greets", 1_000)]
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                if !greeting.is_empty() {
                    stream.write_all(GREETING).await.unwrap();
                }
                // What it was sent is there, and it takes no more than this of it.
                stream.readable().await.unwrap();
                let _ = stream.read(&mut vec![0; bytes_read]).await;
            }
        });
        let (why, error) = member_refusal(settings(&address)).await;
        assert!(matches!(why, MemberFailure::Closed(_)), "{greeting} {bytes_read}: {error:?}");
        assert!(error.to_string().contains("--fleet-tls"), "{error}");
    }
}

async fn a_user_needs_rights(program: EtcdProgram) {
    let Some(cluster) = cluster(1, program, &EtcdOptions::default()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let user = |name: &str, password: &str| {
        let path = dir.path().join(format!("{name}-{password}"));
        std::fs::write(&path, format!("{password}\n")).unwrap();
        FleetStoreSettings {
            user: Some(EtcdUser { name: name.into(), password: path }),
            ..settings(&cluster.addresses())
        }
    };
    for command in [
        "user add root:secret",
        "user grant-role root root",
        "user add host:word",
        "role add fleet",
        "role grant-permission fleet readwrite --prefix=true /spillway/site/",
        "user grant-role host fleet",
        "user add nobody:word",
        "auth enable",
    ] {
        let words: Vec<&str> = command.split(' ').collect();
        cluster.ctl(&words).unwrap();
    }
    let store = FleetStore::open(user("host", "word"));
    let told = Told::by(store.follow());
    let revision = apply_at_last(&store, vec![put("a", "as a user")]).await;
    until("the update", SOON, || told.lock().unwrap().revision >= revision).await;
    assert!(store.lease().wait_for(Option::is_some).await.is_ok());

    let error = refusal(&FleetStore::open(user("host", "wrong"))).await;
    assert!(matches!(error, FleetStoreError::Denied(..)) && error.is_permanent(), "{error:?}");
    let nobody = FleetStore::open(user("nobody", "word"));
    let denied = nobody.commit(&writing(vec![put("a", "x")])).await.unwrap_err();
    assert!(matches!(denied, FleetStoreError::Denied(..)) && denied.is_permanent(), "{denied:?}");
    assert!(denied.to_string().contains("Look at --fleet-user"), "{denied}");
    let stranger = FleetStore::open(settings(&cluster.addresses()));
    let denied = stranger.commit(&writing(vec![put("a", "x")])).await.unwrap_err();
    assert!(matches!(denied, FleetStoreError::Denied(..)), "{denied:?}");
    let _following = stranger.follow();
    let mut health = stranger.health();
    let is_said = health.wait_for(|health| {
        health.follow_failure.as_ref().is_some_and(|why| why.contains("refuses the user"))
    });
    tokio::time::timeout(SOON, is_said).await.unwrap().unwrap();
    let as_root = ["--user=root:secret", "get", PREFIX, "--prefix", "--keys-only"];
    assert_eq!(cluster.ctl(&as_root).unwrap().trim(), "/spillway/site/status/a");
}

/// Somebody changes the password in etcd and in the file, while the daemon runs.
async fn a_password_may_be_changed(program: EtcdProgram) {
    let Some(cluster) = cluster(1, program, &EtcdOptions::default()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let password = dir.path().join("password");
    std::fs::write(&password, "before\n").unwrap();
    for command in [
        "user add root:secret",
        "user grant-role root root",
        "user add host:before",
        "role add fleet",
        "role grant-permission fleet readwrite --prefix=true /spillway/site/",
        "user grant-role host fleet",
        "auth enable",
    ] {
        let words: Vec<&str> = command.split(' ').collect();
        cluster.ctl(&words).unwrap();
    }
    let user = Some(EtcdUser { name: "host".into(), password: password.clone() });
    let store = FleetStore::open(FleetStoreSettings { user, ..settings(&cluster.addresses()) });
    let told = Told::by(store.follow());
    let revision = apply_at_last(&store, vec![put("a", "before")]).await;
    until("the update", SOON, || told.lock().unwrap().revision >= revision).await;
    let as_root = |words: &[&str]| cluster.ctl(&[&["--user=root:secret"], words].concat()).unwrap();
    // etcdctl takes the password from a terminal, or from its input.
    as_root(&["user", "delete", "host"]);
    as_root(&["user", "add", "host:after"]);
    as_root(&["user", "grant-role", "host", "fleet"]);
    let error = refusal(&store).await;
    assert!(matches!(error, FleetStoreError::Denied(..) | FleetStoreError::Refused(..)), "{error:?}");
    std::fs::write(&password, "after\n").unwrap();
    let revision = apply_at_last(&store, vec![put("a", "after")]).await;
    until("the update", SOON, || told.lock().unwrap().revision >= revision).await;
}

/// Otherwise each host logs in and lists all records every 3 s, until somebody has granted it.
async fn a_permission_may_be_missing(program: EtcdProgram) {
    let Some(cluster) = cluster(1, program, &EtcdOptions::default()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let password = dir.path().join("password");
    std::fs::write(&password, "word").unwrap();
    for command in [
        "user add root:secret",
        "user grant-role root root",
        "user add host:word",
        "role add fleet",
        "role grant-permission fleet read --prefix=true /spillway/site/",
        "user grant-role host fleet",
        "auth enable",
    ] {
        let words: Vec<&str> = command.split(' ').collect();
        cluster.ctl(&words).unwrap();
    }
    let user = Some(EtcdUser { name: "host".into(), password });
    let store = FleetStore::open(FleetStoreSettings { user, ..settings(&cluster.addresses()) });
    let told = Told::by(store.follow());
    until("the list", SOON, || told.lock().unwrap().wholes == 1).await;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(5) {
        let error = refusal(&store).await;
        assert!(matches!(error, FleetStoreError::Denied(..)), "{error:?}");
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    assert_eq!(told.lock().unwrap().wholes, 1, "the connection is the same");
    let mut health = store.health();
    let said = health.borrow().write_failure.clone().unwrap_or_default();
    assert!(said.contains("permission denied") && said.contains("--fleet-user"), "{said}");
    let grant = ["role", "grant-permission", "fleet", "readwrite", "--prefix=true", PREFIX];
    cluster.ctl(&[&["--user=root:secret"], &grant[..]].concat()).unwrap();
    // Nobody changes anything.
    let is_over = health.wait_for(|health| health.write_failure.is_none());
    tokio::time::timeout(4 * SOON, is_over).await.unwrap().unwrap();
    let revision = apply_at_last(&store, vec![put("a", "granted")]).await;
    until("the update", SOON, || told.lock().unwrap().revision >= revision).await;
}

/// What a server answers to a method: messages, after which the stream stays open if it is a watch. None: it has no such method.
type Answers = Arc<dyn Fn(&str) -> Option<Vec<Vec<u8>>> + Send + Sync>;

/// A server of gRPC. Its address.
async fn server(answers: impl Fn(&str) -> Option<Vec<Vec<u8>>> + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let answers: Answers = Arc::new(answers);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let answers = Arc::clone(&answers);
            let service = service_fn(move |request| std::future::ready(answer(&answers, request)));
            tokio::spawn(
                http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service),
            );
        }
    });
    address
}

type Body = StreamBody<Pin<Box<dyn Stream<Item = Result<Frame<Bytes>, Infallible>> + Send>>>;

fn answer(answers: &Answers, request: Request<Incoming>) -> Result<Response<Body>, hyper::http::Error> {
    let path = request.uri().path().to_owned();
    let found = answers(&path);
    let status = HeaderValue::from_static(if found.is_some() { "0" } else { "12" });
    let messages = found.unwrap_or_default().into_iter().map(|message| {
        // Not compressed, and the length.
        let mut bytes = vec![0];
        bytes.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
        bytes.extend(message);
        Ok(Frame::data(bytes.into()))
    });
    let messages = stream::iter(messages.collect::<Vec<_>>());
    let end = stream::once(async move {
        if path.ends_with("/Watch") {
            // What the client sends is not refused meanwhile.
            let _request = request;
            std::future::pending::<()>().await;
        }
        Ok(Frame::trailers(HeaderMap::from_iter([("grpc-status".parse().unwrap(), status)])))
    });
    let body: Pin<Box<dyn Stream<Item = _> + Send>> = Box::pin(messages.chain(end));
    Response::builder().header("content-type", "application/grpc").body(StreamBody::new(body))
}

/// A server that answers each question with a status of these bytes.
async fn status_server(status: Vec<u8>) -> String {
    server(move |_| Some(vec![status.clone()])).await
}

/// A field of a message: its number, and its bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
}

/// A header: cluster, member, and revision.
const HEADER: [u8; 6] = [1 << 3, 1, 2 << 3, 1, 3 << 3, 5];

/// A status: header, version, and identity of the leader.
fn status(header: &[u8], version: &str, leader: u8) -> Vec<u8> {
    [field(1, header), field(2, version.as_bytes()), vec![4 << 3, leader]].concat()
}

#[tokio::test]
async fn what_is_not_the_etcd_that_is_needed_is_refused() {
    let open = async |status: Vec<u8>| FleetStore::open(settings(&status_server(status).await));
    assert_eq!(version(&open(status(&HEADER, "3.4.0", 1)).await).await, "3.4.0");
    let failure = async |status: Vec<u8>| match refusal(&open(status).await).await {
        FleetStoreError::NoMember(members) => members[0].1.clone(),
        other => panic!("{other:?}"),
    };
    // kine says that it is this etcd, and fills in no header.
    let kine = failure(status(&[], "3.5.13", 0)).await;
    assert!(kine == MemberFailure::Kine && kine.is_permanent() && kine.to_string().contains("Use etcd 3.4"));
    let old = failure(status(&HEADER, "3.3.27", 1)).await;
    assert!(old == MemberFailure::TooOld("3.3.27".into()) && old.is_permanent());
    assert_eq!(failure(status(&HEADER, "none", 1)).await, MemberFailure::TooOld("none".into()));
    assert_eq!(failure(status(&HEADER, "3.6.0", 0)).await, MemberFailure::NoLeader);
    // Bytes that are no message.
    let strange = failure(vec![0xff; 40]).await;
    assert!(!strange.is_permanent(), "{strange:?}");
}

#[tokio::test]
async fn a_watch_that_is_cancelled_or_strange_is_begun_again() {
    let header = || field(1, &HEADER);
    let created = [header(), vec![3 << 3, 1]].concat();
    let compacted = [header(), vec![4 << 3, 1, 5 << 3, 6]].concat();
    let cancelled = [header(), vec![4 << 3, 1]].concat();
    // Events of a kind that is not known, one without a record, and one that is older than the list.
    let record = |revision: u8| {
        let numbers = vec![2 << 3, revision, 3 << 3, revision];
        field(2, &[field(1, b"/spillway/site/status/x"), numbers].concat())
    };
    let event = |revision| [vec![1 << 3, 77], record(revision)].concat();
    let event_message = |revision| [header(), field(11, &event(revision))].concat();
    let strange = [header(), field(11, &[]), field(11, &event(9))].concat();
    for (what, message, changes) in [
        ("compacted", vec![compacted], 0),
        ("cancelled", vec![cancelled], 0),
        ("back in time", vec![event_message(4)], 0),
        ("strange, and then back in time", vec![strange, event_message(8)], 1),
    ] {
        let watch = [vec![created.clone()], message].concat();
        let list = header();
        let address = server(move |path| match path.rsplit('/').next().unwrap() {
            "Status" => Some(vec![status(&HEADER, "3.4.0", 1)]),
            "Range" => Some(vec![list.clone()]),
            "Watch" => Some(watch.clone()),
            _ => None,
        });
        let mut updates = FleetStore::open(settings(&address.await)).follow();
        let mut seen = Vec::new();
        // Sooner than silence would be noticed twice.
        let begun_again = async {
            while seen.iter().filter(|update| matches!(update, Update::Whole(5, _))).count() < 3 {
                seen.push(updates.recv().await.unwrap());
            }
        };
        assert!(tokio::time::timeout(Duration::from_millis(2_500), begun_again).await.is_ok(), "{what}");
        let told =
            seen.iter().filter(|update| matches!(update, Update::Changes(9, changes) if changes.len() == 1));
        assert!(told.count() >= changes, "{what}: {seen:?}");
        assert_eq!(
            seen.iter().any(|update| matches!(update, Update::Changes(..))),
            changes > 0,
            "{what}: {seen:?}"
        );
    }
}
