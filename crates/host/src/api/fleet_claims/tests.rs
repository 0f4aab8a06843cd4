//! Claims of a fleet: the routes of several daemons, with real TLS on the loopback network, and answers that are lost or late.

use super::*;
use crate::api::relay::tests::{Answer, ask, name, settings};
use crate::api::{ApiParts, ApiState, router};
use crate::daemon::{self, DaemonSettings};
use crate::fleet::claims::{BehindView, ClaimParts};
use crate::fleet::door::{CALLER_HEADER, FleetDoor, FleetListener, Identity, Member};
use crate::machines::closed_attempts::{FIRST_REPEAT, unix_ms};
use crate::serving::{accept, accept_fleet};
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use serde_json::{Value, json};
use spillway_api::{FleetOwner, List, MachineDetails, Operation};
use spillway_fleet::Moment;
use spillway_fleet::claim::{Candidate, TakenMachines, candidates};
use spillway_fleet::view::{Entry, FleetView, Update};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::unix::fs::PermissionsExt;
use std::sync::Mutex;
use std::sync::atomic::AtomicI64;
use std::time::SystemTime;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{Notify, watch};

/// What happens to a question of another host.
#[derive(Clone)]
enum Fault {
    /// Nothing.
    Pass,
    /// It is carried out, and never answered.
    LoseAnswer,
    /// It never arrives.
    LoseQuestion,
    /// It is carried out when this is notified, however long that takes.
    Hold(Arc<Notify>),
}

/// A host with the routes of its daemon.
struct Host {
    name: Name,
    dir: tempfile::TempDir,
    identity: Identity,
    door: Arc<FleetDoor>,
    app: ApiState,
    address: Mutex<String>,
    /// 0: it has no valid lease.
    epoch: Arc<AtomicI64>,
    view: watch::Sender<FleetView>,
    /// Revision of etcd at which a host has got a lease that it may not have seen. Below 0: etcd does not answer.
    newest: Arc<AtomicI64>,
    /// How often it has asked etcd for that.
    looks: Arc<AtomicI64>,
    faults: Arc<Mutex<VecDeque<Fault>>>,
    /// Questions of other hosts that it has got.
    asked: Arc<Mutex<Vec<String>>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Drop for Host {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

impl Host {
    /// Starts a host with so many machines of the catalog `desk`. None of them ever runs.
    async fn new(host: &str, machines: u32) -> Host {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let identity = Identity::open(dir.path(), &name(host)).unwrap();
        let door = Arc::new(FleetDoor::new(name(host), &identity));
        // There is none, unless a test makes one.
        let settings = DaemonSettings { program: dir.path().join("spillway-worker"), ..settings(dir.path()) };
        let app = daemon::app_of(&settings, Some(Arc::clone(&door))).unwrap();
        let (epoch, view) = (Arc::new(AtomicI64::new(7)), watch::Sender::new(FleetView::default()));
        let (own, newest) = (Arc::clone(&epoch), Arc::<AtomicI64>::default());
        let looks = Arc::<AtomicI64>::default();
        let (of_etcd, looked) = (Arc::clone(&newest), Arc::clone(&looks));
        let claims = FleetClaims::begin(ClaimParts {
            fleet: name("site"),
            door: Arc::clone(&door),
            machines: app.machines.clone(),
            idempotency: app.idempotency.clone(),
            view: view.subscribe(),
            epoch: Arc::new(move || Some(own.load(Ordering::SeqCst)).filter(|epoch| *epoch > 0)),
            all_hosts: Arc::new(move |revision| {
                looked.fetch_add(1, Ordering::SeqCst);
                let newest = of_etcd.load(Ordering::SeqCst);
                let away = || HostError::new(ErrorCode::Unavailable, "etcd is away");
                Box::pin(async move { if newest < 0 { Err(away()) } else { Ok(revision.max(newest)) } })
            }),
            taken: BehindView::default(),
            departures: BehindView::default(),
            undone: tokio::sync::Semaphore::new(crate::fleet::claims::MOST_UNDONE),
            clock: Mutex::default(),
        });
        let parts = Arc::into_inner(app).unwrap();
        let app: ApiState = Arc::new(ApiParts { fleet_claims: Some(claims), ..parts });
        let faults: Arc<Mutex<VecDeque<Fault>>> = Arc::default();
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let (of_layer, all) = (Arc::clone(&faults), Arc::clone(&asked));
        let faulty = router(Arc::clone(&app)).layer(from_fn(move |request: Request, next: Next| {
            all.lock().unwrap().push(request.uri().to_string());
            let fault = request
                .uri()
                .path()
                .starts_with("/v1/fleet/self/catalogs")
                .then(|| of_layer.lock().unwrap().pop_front());
            async move {
                match fault.flatten() {
                    None | Some(Fault::Pass) => next.run(request).await,
                    Some(Fault::LoseQuestion) => std::future::pending().await,
                    Some(Fault::LoseAnswer) => {
                        next.run(request).await;
                        std::future::pending().await
                    }
                    // As one that is in a queue, and whose client has gone.
                    Some(Fault::Hold(until)) => {
                        let later = async move {
                            until.notified().await;
                            next.run(request).await
                        };
                        tokio::spawn(later).await.unwrap()
                    }
                }
            }
        }));
        let listener =
            FleetListener::open(([127, 0, 0, 1], 0).into(), &identity, door.members.clone()).await.unwrap();
        let address = Mutex::new(listener.address().unwrap().to_string());
        let socket = UnixListener::bind(dir.path().join("sock")).unwrap();
        let tasks = vec![
            tokio::spawn(accept_fleet(Some(Arc::new(listener)), faulty)),
            tokio::spawn(accept(socket, router(Arc::clone(&app)))),
        ];
        let host = Host {
            name: name(host),
            dir,
            identity,
            door,
            app,
            address,
            epoch,
            view,
            newest,
            looks,
            faults,
            asked,
            tasks,
        };
        host.import().await;
        let spec = json!({ "image": "debian:1", "count": machines, "ram_bytes": 1 << 26 });
        let owner = FleetOwner { fleet: name("site"), generation: 1, named: None };
        let spec = serde_json::from_value(spec).unwrap();
        host.app.catalogs.create_for_fleet(&name("desk"), &spec, owner).unwrap();
        host
    }

    async fn import(&self) {
        let disk = self.dir.path().join("disk");
        std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
        let import = json!({ "path": disk, "format": "raw" }).to_string();
        let begun: Operation = self.send("POST", "/v1/images/debian/versions", "", &import).await.json();
        let ended = self.send("GET", &format!("/v1/operations/{}?wait=30", begun.id), "", "").await;
        assert_eq!(ended.json::<Value>()["state"]["phase"], "done", "{ended:?}");
    }

    async fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let stream = UnixStream::connect(self.dir.path().join("sock")).await.unwrap();
        let headers = format!("content-type: application/json\r\n{headers}");
        ask(stream, method, path, &headers, body).await
    }

    /// Claims any machine, by a request with this id. `first`: nobody has sent it before.
    async fn claim(&self, id: &str, first: bool) -> Answer {
        let path = format!("/v1/fleet/catalogs/desk/claims{}", if first { "?first=true" } else { "" });
        self.send("POST", &path, &format!("idempotency-key: {id}\r\n"), r#"{"any": true}"#).await
    }

    /// Claims any machine without a key. The answer does not come soon: the machine's start goes on for longer. Without a program it would fail
    /// at once, and the client would be told of that.
    async fn claim_slowly(&self, fleet: &Fleet) -> UnixStream {
        Host::claim_slowly_by(fleet, self, "/v1/fleet/catalogs/desk/claims").await
    }

    /// The same at this host, by this route.
    async fn claim_slowly_by(fleet: &Fleet, at: &Host, path: &str) -> UnixStream {
        for host in &fleet.0 {
            let program = host.dir.path().join("spillway-worker");
            std::fs::write(&program, "#!/bin/sh\nexec sleep 5\n").unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let mut stream = UnixStream::connect(at.dir.path().join("sock")).await.unwrap();
        let request = format!(
            "POST {path}?wait=30 HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n{{\"any\": true}}"
        );
        tokio::io::AsyncWriteExt::write_all(&mut stream, request.as_bytes()).await.unwrap();
        stream
    }

    /// Machines of the host that are claimed.
    async fn claimed(&self) -> Vec<MachineDetails> {
        let all: List<MachineDetails> = self.send("GET", "/v1/machines", "", "").await.json();
        all.items.into_iter().filter(|machine| machine.claim.is_some()).collect()
    }

    async fn until(&self, what: &str, is: impl Fn() -> bool) {
        let wait = async {
            while !is() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), wait).await.expect(what);
    }

    /// Its record while it has a lease.
    fn alive(&self) -> Value {
        json!({ "instance": "i", "boot_id": "b", "address": *self.address.lock().unwrap(), "version": "1",
            "certificate": self.identity.digest().to_string(), "hypervisor": "none" })
    }

    /// Gives it a record of the fleet.
    fn tell(&self, revision: i64, created: i64, key: &str, value: &Value) {
        let entry = Entry { value: value.to_string().into_bytes(), created, modified: revision };
        let change = vec![(key.to_owned(), Some(entry))];
        self.view.send_modify(|view| view.apply(Update::Changes(revision, change)));
    }

    /// Whether other hosts have asked it for claims that it has made.
    fn is_closed(&self) -> bool {
        self.asked.lock().unwrap().iter().any(|asked| asked.contains("/closed-claims"))
    }

    fn fail(&self, faults: impl IntoIterator<Item = Fault>) {
        self.faults.lock().unwrap().extend(faults);
    }
}

/// A fleet of such hosts.
struct Fleet(Vec<Host>);

impl Fleet {
    /// So many machines of each host.
    async fn new(machines: &[u32]) -> Fleet {
        let mut hosts = Vec::new();
        for (number, machines) in machines.iter().enumerate() {
            hosts.push(
                Host::new(&format!("host-{}", ["a", "b", "c", "d", "e", "f"][number]), *machines).await,
            );
        }
        let fleet = Fleet(hosts);
        fleet.show(&BTreeSet::new(), 7);
        fleet
    }

    /// Gives all hosts the records of the fleet, at this revision. `gone` have no lease.
    fn show(&self, gone: &BTreeSet<&str>, revision: i64) {
        let mut entries = Vec::new();
        let mut put = |key: String, value: Value| {
            entries
                .push((key, Entry { value: value.to_string().into_bytes(), created: 7, modified: revision }));
        };
        let spec = json!({ "image": "debian:1", "count": 9, "ram_bytes": 1 << 26, "lost_after_seconds": 20 });
        put(
            "catalogs/desk".into(),
            json!({ "spec": spec, "version": 1, "generation": 1, "history": [], "created": "2026-01-01T00:00:00Z" }),
        );
        for host in &self.0 {
            let name = &host.name;
            put(format!("hosts/{name}"), json!({ "host_id": name, "zone": "z" }));
            let budget = json!({ "guarantee_bytes": 1, "limit_bytes": 1, "memory_bytes": 1, "vcpus": 1 });
            let desk = json!({ "generation": 1, "count": 4 });
            put(format!("status/{name}"), json!({ "budget": budget, "catalogs": { "desk": desk } }));
            if !gone.contains(name.as_str()) {
                put(format!("alive/{name}"), host.alive());
            }
        }
        let member = |host: &Host| {
            let address = host.address.lock().unwrap().clone();
            (
                host.name.clone(),
                Member { address, certificate: host.identity.digest(), epoch: 7, peers: None },
            )
        };
        for host in &self.0 {
            host.door.members.replace(self.0.iter().map(member).collect::<BTreeMap<_, _>>());
            host.view.send_modify(|view| {
                view.apply(Update::Whole(revision, entries.clone()));
                assert!(view.unreadable.is_empty(), "{:?}", view.unreadable);
            });
        }
    }

    /// Gives all hosts a record that was created at this revision.
    fn tell(&self, revision: i64, key: &str, value: &Value) {
        self.0.iter().for_each(|host| host.tell(revision, revision, key, value));
    }

    /// A host is silent, and somebody declares it dead.
    fn lose(&self, host: &Host) {
        host.fail(std::iter::repeat_n(Fault::LoseQuestion, 100));
        let dead = json!({ "host_id": host.name, "zone": "z", "dead_epoch": 7 });
        self.tell(11, &format!("hosts/{}", host.name), &dead);
    }

    /// It is back, with another lease.
    fn bring_back(&self, host: &Host) {
        host.faults.lock().unwrap().clear();
        host.epoch.store(12, Ordering::SeqCst);
        self.tell(12, &format!("alive/{}", host.name), &host.alive());
    }

    /// All claimed machines, with their hosts.
    async fn claimed(&self) -> Vec<(String, String)> {
        let mut all = Vec::new();
        for host in &self.0 {
            let claimed = host.claimed().await.into_iter();
            all.extend(claimed.map(|machine| (host.name.to_string(), machine.machine.name.to_string())));
        }
        all
    }

    /// Waits until so many machines are claimed.
    async fn until_claimed(&self, count: usize) {
        let held = async {
            while self.claimed().await.len() != count {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), held).await.expect("claims are made and undone");
    }

    /// An id whose request goes to this host first, and then to the next ones.
    fn id_for(&self, hosts: &[&str]) -> String {
        let view = self.0[0].view.borrow().clone();
        let first = |id: &String| {
            order_of(&view, id).iter().zip(hosts).all(|(candidate, host)| candidate.host.as_str() == *host)
        };
        (0..10_000).map(|number| format!("r{number}")).find(first).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_has_one_claim_through_whichever_host_it_comes() {
    let fleet = Fleet::new(&[2, 2, 2]).await;
    let mut seen = BTreeSet::new();
    let mut fences: BTreeMap<String, Vec<spillway_api::ClaimFence>> = BTreeMap::new();
    for number in 0..6 {
        let id = format!("job-{number}");
        let through = &fleet.0[number % 3];
        let claim: FleetClaim = through.claim(&id, true).await.json();
        assert!(!claim.is_repeated && claim.request == id, "{claim:?}");
        assert_eq!(claim.machine.claim.as_ref().unwrap().id, claim.claim);
        let owner = &claim.machine.claim.as_ref().unwrap().owner;
        assert_eq!(
            *owner,
            format!("uid {}", rustix::process::getuid().as_raw()),
            "not with the host it came through"
        );
        assert!(seen.insert((claim.host.clone(), claim.machine.machine.name.clone())));
        assert_eq!(claim.fence.host_epoch, 7);
        fences.entry(claim.host.to_string()).or_default().push(claim.fence);
        for again in &fleet.0 {
            let repeated: FleetClaim = again.claim(&id, false).await.json();
            assert!(repeated.is_repeated, "{repeated:?}");
            assert_eq!(
                (&repeated.claim, &repeated.host, repeated.fence),
                (&claim.claim, &claim.host, claim.fence)
            );
        }
    }
    assert!(fences.values().all(|fences| fences.is_sorted_by(|a, b| a < b)), "{fences:?}");
    assert_eq!(fleet.claimed().await.len(), 6);
    let none = fleet.0[0].claim("job-6", true).await;
    assert_eq!((none.status, none.json::<Value>()["code"].as_str()), (409, Some("exhausted")), "{none:?}");
    // The same id with another body is another request.
    let body = r#"{"any": true, "owner": "eve"}"#;
    let path = "/v1/fleet/catalogs/desk/claims";
    let reused = fleet.0[1].send("POST", path, "idempotency-key: job-1\r\n", body).await;
    assert_eq!(reused.status, 422, "{reused:?}");
    // A claim that has ended is not made anew.
    let claim: FleetClaim = fleet.0[0].claim("job-1", false).await.json();
    let release = format!(
        "/v1/fleet/hosts/{}/api/v1/machines/{}/claim?claim={}",
        claim.host, claim.machine.machine.name, claim.claim
    );
    assert_eq!(fleet.0[0].send("DELETE", &release, "", "").await.status, 200);
    for host in &fleet.0 {
        let over = host.claim("job-1", false).await;
        assert!(over.status == 409 && over.detail().contains("is over"), "{over:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_found_and_a_lost_question_is_asked_again() {
    let fleet = Fleet::new(&[4, 4]).await;
    let [a, b] = &fleet.0[..] else { panic!() };
    let id = fleet.id_for(&["host-b"]);
    b.fail([Fault::LoseAnswer]);
    let claim: FleetClaim = a.claim(&id, true).await.json();
    assert_eq!((claim.host.as_str(), claim.is_repeated), ("host-b", false), "the same request has made it");
    // Whoever sends it again has not, whatever he says.
    let again: FleetClaim = a.claim(&id, true).await.json();
    assert_eq!((&again.claim, again.is_repeated), (&claim.claim, true));
    assert_eq!(fleet.claimed().await.len(), 1);
    let next = (0..)
        .map(|n| format!("n{n}"))
        .find(|id| fleet.0[0].view.borrow().alive.len() == 2 && first_of(&fleet, id) == "host-b")
        .unwrap();
    b.fail([Fault::LoseQuestion, Fault::LoseQuestion]);
    b.asked.lock().unwrap().clear();
    let claim: FleetClaim = a.claim(&next, true).await.json();
    assert_eq!((claim.host.as_str(), claim.is_repeated), ("host-b", false));
    assert_eq!(fleet.claimed().await.len(), 2);
    // All questions say when the request came, not when they were sent: an old one may have been closed long ago.
    let asked = b.asked.lock().unwrap().clone();
    let sent: Vec<_> = asked.iter().filter_map(|asked| asked.split_once("&sent_unix_ms=")).collect();
    assert!(sent.len() == 2 && sent[0].1 == sent[1].1, "{asked:?}");
}

fn first_of(fleet: &Fleet, id: &str) -> String {
    let view = fleet.0[0].view.borrow().clone();
    order_of(&view, id)[0].host.to_string()
}

/// Hosts in the order in which a request with this id goes to them.
fn order_of(view: &FleetView, id: &str) -> Vec<Candidate> {
    candidates(view, &name("desk"), id, true, &TakenMachines::default(), Moment(0))
}

/// Without the numbers of attempts, the late one claims a second machine.
#[tokio::test(flavor = "multi_thread")]
async fn a_question_that_arrives_late_claims_nothing() {
    let fleet = Fleet::new(&[4, 4]).await;
    let [a, b] = &fleet.0[..] else { panic!() };
    let (id, late) = (fleet.id_for(&["host-b"]), Arc::new(Notify::new()));
    // The first host of the order has none by then: another one gives the machine.
    b.fail([Fault::Hold(Arc::clone(&late))]);
    let machines: Vec<Name> = all_machines(b).await;
    let drain = json!({ "action": "drain", "select": { "names": machines } }).to_string();
    assert_eq!(b.send("POST", "/v1/machine-actions", "", &drain).await.status, 200);
    let claim: FleetClaim = a.claim(&id, true).await.json();
    assert_eq!(claim.host.as_str(), "host-a");
    let undrain = drain.replace("drain", "undrain");
    assert_eq!(b.send("POST", "/v1/machine-actions", "", &undrain).await.status, 200);
    late.notify_one();
    // It is answered when this later one is: the records of a host change one after the other.
    let (now, key) = (unix_ms(SystemTime::now()), format!("idempotency-key: {id}\r\n"));
    let path = |attempt: u64, sent: u64| {
        format!("/v1/fleet/self/catalogs/desk/claims?attempt={attempt}&epoch=7&sent_unix_ms={sent}")
    };
    let refused = b.send("POST", &path(0, now), &key, r#"{"any": true}"#).await;
    assert_eq!(refused.json::<Value>()["result"], "superseded");
    // One that was under way for so long that its end may be forgotten claims nothing, either.
    for (attempt, sent) in [(1, now - 3_600_000), (FIRST_REPEAT, now)] {
        let stale = b.send("POST", &path(attempt, sent), &key, r#"{"any": true}"#).await;
        assert_eq!(stale.json::<Value>()["result"], "stale", "{attempt}");
    }
    tokio::time::timeout(Duration::from_secs(10), async {
        while Arc::strong_count(&late) > 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .expect("the late question is carried out");
    assert_eq!(fleet.claimed().await.len(), 1);
}

/// A repeat that its host came too late for has claimed a machine elsewhere.
#[tokio::test(flavor = "multi_thread")]
async fn a_question_that_was_sent_before_its_host_got_its_lease_claims_nothing() {
    let fleet = Arc::new(Fleet::new(&[2, 2]).await);
    let [a, b] = &fleet.0[..] else { panic!() };
    let (id, late) = (fleet.id_for(&["host-b"]), Arc::new(Notify::new()));
    b.fail([Fault::Hold(Arc::clone(&late))]);
    let (earlier, of_request) = (Arc::clone(&fleet), id.clone());
    let earlier = tokio::spawn(async move { earlier.0[0].claim(&of_request, true).await });
    b.until("it is asked", || b.faults.lock().unwrap().is_empty()).await;
    fleet.lose(b);
    let claim: FleetClaim = earlier.await.unwrap().json();
    assert_eq!((claim.host.as_str(), a.claimed().await.len()), ("host-a", 1));
    fleet.bring_back(b);
    late.notify_one();
    b.until("the late question is carried out", || Arc::strong_count(&late) == 1).await;
    assert_eq!(b.claimed().await.len(), 0);
    // Nor one of a repeat that has closed this host in its epoch before.
    let key = "idempotency-key: another\r\n";
    let close = format!("/v1/fleet/self/catalogs/desk/closed-claims?attempt={FIRST_REPEAT}");
    assert_eq!(b.send("POST", &close, key, r#"{"any": true}"#).await.status, 200);
    for (epoch, result) in [(7, "stale"), (12, "claimed")] {
        let now = unix_ms(SystemTime::now());
        let path = format!(
            "/v1/fleet/self/catalogs/desk/claims?attempt={FIRST_REPEAT}&epoch={epoch}&sent_unix_ms={now}"
        );
        let decided = b.send("POST", &path, key, r#"{"any": true}"#).await;
        assert_eq!(decided.json::<Value>()["result"], result, "{epoch}: {decided:?}");
    }
}

/// The repeat that was read before it could not close the host that has come since.
#[tokio::test(flavor = "multi_thread")]
async fn a_first_request_that_is_read_after_its_repeat_claims_nothing_at_a_host_that_is_new() {
    let fleet = Fleet::new(&[2, 2, 2]).await;
    let [a, b, c] = &fleet.0[..] else { panic!() };
    let id = fleet.id_for(&["host-c"]);
    fleet.lose(c);
    let claim: FleetClaim = b.claim(&id, false).await.json();
    fleet.bring_back(c);
    let late: FleetClaim = a.claim(&id, true).await.json();
    assert_eq!((late.claim, late.is_repeated), (claim.claim, true));
    assert_eq!(fleet.claimed().await.len(), 1);
}

/// One that has got a lease while the others were closed may have been closed under the lease before.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_claims_at_no_host_that_is_newer_than_its_closing() {
    let fleet = Fleet::new(&[2, 2]).await;
    let [a, b] = &fleet.0[..] else { panic!() };
    let id = fleet.id_for(&["host-b"]);
    b.epoch.store(12, Ordering::SeqCst);
    a.tell(11, 12, "alive/host-b", &b.alive());
    let claim: FleetClaim = a.claim(&id, false).await.json();
    assert_eq!(claim.host.as_str(), "host-a");
}

/// A host whose clock is wrong makes no first request slower.
#[tokio::test(flavor = "multi_thread")]
async fn a_first_request_passes_over_a_host_that_takes_it_for_old() {
    let fleet = Arc::new(Fleet::new(&[1, 1]).await);
    let [a, b] = &fleet.0[..] else { panic!() };
    b.epoch.store(9, Ordering::SeqCst);
    let claim: FleetClaim = a.claim(&fleet.id_for(&["host-b"]), true).await.json();
    assert_eq!((claim.host.as_str(), b.is_closed()), ("host-a", false));
    // It has the only machine that is left.
    let earlier = Arc::clone(&fleet);
    let earlier = tokio::spawn(async move { earlier.0[0].claim("x", true).await });
    b.until("it is carried out as a repeat", || b.is_closed()).await;
    fleet.tell(9, "alive/host-b", &b.alive());
    let claim: FleetClaim = earlier.await.unwrap().json();
    assert_eq!((claim.host.as_str(), claim.is_repeated), ("host-b", false));
}

/// Its client may have sent it long ago, and have repeated it at another daemon. Nobody has sent again what has no key.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_stood_still_carries_out_first_requests_with_keys_as_repeats() {
    let fleet = Fleet::new(&[4, 4]).await;
    let [a, b] = &fleet.0[..] else { panic!() };
    a.app.fleet_claims.as_ref().unwrap().stand_still();
    let unkeyed = a.send("POST", "/v1/fleet/catalogs/desk/claims", "", r#"{"any": true}"#).await;
    assert_eq!((unkeyed.status, b.is_closed()), (200, false), "{unkeyed:?}");
    a.claim("x", true).await.json::<FleetClaim>();
    assert!(b.is_closed());
}

/// A client that waits for a free machine sends a request again that has claimed nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_first_request_that_was_closed_is_carried_out_as_a_repeat() {
    let fleet = Fleet::new(&[1, 1]).await;
    let [a, b] = &fleet.0[..] else { panic!() };
    let id = fleet.id_for(&["host-b"]);
    let all = |action: &str| json!({ "action": action, "select": { "catalog": "desk" } }).to_string();
    for host in [a, b] {
        assert_eq!(host.send("POST", "/v1/machine-actions", "", &all("drain")).await.status, 200);
    }
    b.fail([Fault::LoseQuestion]);
    let none = a.claim(&id, true).await;
    assert_eq!((none.status, none.json::<Value>()["code"].as_str()), (409, Some("exhausted")), "{none:?}");
    assert_eq!(b.send("POST", "/v1/machine-actions", "", &all("undrain")).await.status, 200);
    let claim: FleetClaim = a.claim(&id, true).await.json();
    assert_eq!((claim.host.as_str(), claim.is_repeated), ("host-b", false));
}

/// Its client may have been told by the repeat that nothing is claimed.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_was_repeated_meanwhile_claims_nothing_any_more() {
    let fleet = Arc::new(Fleet::new(&[1, 1]).await);
    let [a, b] = &fleet.0[..] else { panic!() };
    let id = fleet.id_for(&["host-b"]);
    let all = |action: &str| json!({ "action": action, "select": { "catalog": "desk" } }).to_string();
    let act = async |action: &str| {
        for host in &fleet.0 {
            assert_eq!(host.send("POST", "/v1/machine-actions", "", &all(action)).await.status, 200);
        }
    };
    for is_first in [true, false] {
        act("drain").await;
        // The repeat closes all hosts while a question of the earlier request is under way.
        b.fail([Fault::LoseQuestion]);
        let (earlier, of_request) = (Arc::clone(&fleet), format!("{id}-{is_first}"));
        let earlier = tokio::spawn(async move { earlier.0[0].claim(&of_request, is_first).await });
        b.until("it is asked", || b.faults.lock().unwrap().is_empty()).await;
        let none = b.claim(&format!("{id}-{is_first}"), false).await;
        assert_eq!(
            (none.status, none.json::<Value>()["code"].as_str()),
            (409, Some("exhausted")),
            "{none:?}"
        );
        act("undrain").await;
        let earlier = earlier.await.unwrap();
        assert!(earlier.status == 503 && earlier.detail().contains("repeated by others"), "{earlier:?}");
        assert_eq!(fleet.claimed().await, [], "first: {is_first}");
    }
    a.claim(&id, false).await.json::<FleetClaim>();
}

/// It came later, by the clock of its daemon, but may have been sent before.
#[tokio::test(flavor = "multi_thread")]
async fn a_first_request_claims_nothing_after_any_repeat() {
    let fleet = Fleet::new(&[1, 1]).await;
    let [a, b] = &fleet.0[..] else { panic!() };
    let all = |action: &str| json!({ "action": action, "select": { "catalog": "desk" } }).to_string();
    for host in [a, b] {
        assert_eq!(host.send("POST", "/v1/machine-actions", "", &all("drain")).await.status, 200);
    }
    assert_eq!(b.claim("x", false).await.status, 409);
    for host in [a, b] {
        assert_eq!(host.send("POST", "/v1/machine-actions", "", &all("undrain")).await.status, 200);
    }
    let late = a.claim("x", true).await;
    assert!(late.status == 503 && late.detail().contains("repeated by others"), "{late:?}");
    assert_eq!(fleet.claimed().await, []);
    a.claim("x", false).await.json::<FleetClaim>();
}

/// A host that it does not know of may have the claim.
#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_know_all_hosts_repeats_nothing() {
    let fleet = Arc::new(Fleet::new(&[2, 2]).await);
    let [a, b] = &fleet.0[..] else { panic!() };
    a.newest.store(12, Ordering::SeqCst);
    let late = a.claim("x", false).await;
    assert!(late.status == 503 && late.detail().contains("sees the records of the fleet late"), "{late:?}");
    assert_eq!(fleet.claimed().await, []);
    let claim: FleetClaim = a.claim("y", true).await.json();
    assert!(!claim.is_repeated, "nobody has seen this one before");
    // Nor does it give up a host.
    let id = fleet.id_for(&["host-b"]);
    b.fail(std::iter::repeat_n(Fault::LoseQuestion, 100));
    let (earlier, of_request) = (Arc::clone(&fleet), id.clone());
    let earlier = tokio::spawn(async move { earlier.0[0].claim(&of_request, true).await });
    b.until("it is asked", || b.faults.lock().unwrap().len() < 100).await;
    fleet.lose(b);
    let unknown = earlier.await.unwrap();
    assert!(unknown.status == 503 && unknown.detail().contains("may be back"), "{unknown:?}");
    // What it has not seen comes while it waits for that.
    let (late, of_request) = (Arc::clone(&fleet), id.clone());
    let late = tokio::spawn(async move { late.0[0].claim(&of_request, false).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    a.view.send_modify(|view| view.apply(Update::Changes(12, Vec::new())));
    let claim: FleetClaim = late.await.unwrap().json();
    assert!(!claim.is_repeated);
    let claim: FleetClaim = a.claim(&id, true).await.json();
    assert_eq!(claim.host.as_str(), "host-a");
}

/// Hosts join at any time, and etcd may be away for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_know_that_a_host_is_lost_looks_again() {
    for newest in [-1, 100] {
        let fleet = Arc::new(Fleet::new(&[2, 2]).await);
        let [a, b] = &fleet.0[..] else { panic!() };
        let id = fleet.id_for(&["host-b"]);
        a.newest.store(newest, Ordering::SeqCst);
        b.fail([Fault::LoseQuestion]);
        let earlier = Arc::clone(&fleet);
        let earlier = tokio::spawn(async move { earlier.0[0].claim(&id, true).await });
        b.until("it is asked", || b.faults.lock().unwrap().is_empty()).await;
        fleet.lose(b);
        a.until("etcd is asked", || a.looks.load(Ordering::SeqCst) > 0).await;
        a.newest.store(0, Ordering::SeqCst);
        a.view.send_modify(|view| view.apply(Update::Changes(newest.max(13), Vec::new())));
        let claim: FleetClaim = earlier.await.unwrap().json();
        assert_eq!(claim.host.as_str(), "host-a", "{newest}");
    }
}

/// Its client has to know that it can be repeated, and how.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_after_a_lost_answer_has_the_id_of_the_request() {
    let fleet = Arc::new(Fleet::new(&[1, 1]).await);
    let [a, b] = &fleet.0[..] else { panic!() };
    for what in ["no valid lease", "etcd is away"] {
        let id =
            (0..).map(|n| format!("{n}-{}", what.len())).find(|id| first_of(&fleet, id) == "host-b").unwrap();
        b.fail([Fault::Pass, Fault::LoseQuestion]);
        let (earlier, of_request) = (Arc::clone(&fleet), id.clone());
        let earlier = tokio::spawn(async move { earlier.0[0].claim(&of_request, false).await });
        b.until("it is asked", || b.faults.lock().unwrap().is_empty()).await;
        match what {
            "etcd is away" => a.newest.store(-1, Ordering::SeqCst),
            _ => a.epoch.store(0, Ordering::SeqCst),
        }
        let unknown = earlier.await.unwrap();
        assert!(unknown.status == 503 && unknown.detail().contains(what), "{unknown:?}");
        assert!(unknown.detail().contains(&format!("--key {id})")), "{unknown:?}");
        a.epoch.store(7, Ordering::SeqCst);
    }
}

/// Nobody else could ever end it.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_nobody_has_an_id_of_is_released() {
    let fleet = Fleet::new(&[0, 1]).await;
    let [a, b] = &fleet.0[..] else { panic!() };
    b.fail([Fault::LoseAnswer]);
    b.fail(std::iter::repeat_n(Fault::LoseQuestion, 100));
    let unknown = a.send("POST", "/v1/fleet/catalogs/desk/claims", "", r#"{"any": true}"#).await;
    assert!(unknown.status == 503 && unknown.detail().contains("is released"), "{unknown:?}");
    assert_eq!(b.claimed().await.len(), 1);
    b.faults.lock().unwrap().clear();
    fleet.until_claimed(0).await;
}

/// It comes back with its claims.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_host_is_asked_for_a_claim_that_nobody_has_an_id_of() {
    let fleet = Arc::new(Fleet::new(&[1, 1]).await);
    let [a, b] = &fleet.0[..] else { panic!() };
    // Whatever the id is, this host is asked last.
    let mut status = serde_json::to_value(&a.view.borrow().statuses[&a.name].value).unwrap();
    status["catalogs"]["desk"]["claimed"] = json!(4);
    fleet.tell(8, "status/host-a", &status);
    b.fail([Fault::LoseAnswer]);
    let asks = Arc::clone(&fleet);
    let path = "/v1/fleet/catalogs/desk/claims";
    let asked = tokio::spawn(async move { asks.0[0].send("POST", path, "", r#"{"any": true}"#).await });
    b.until("it is asked", || b.faults.lock().unwrap().is_empty()).await;
    fleet.lose(b);
    let claim: FleetClaim = asked.await.unwrap().json();
    assert_eq!((claim.host.as_str(), fleet.claimed().await.len()), ("host-a", 2));
    fleet.bring_back(b);
    fleet.until_claimed(1).await;
    assert_eq!(a.claimed().await.len(), 1);
}

/// Somebody else may have claimed the machine meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_ends_while_its_machine_starts_is_not_answered_with_another_one() {
    let fleet = Fleet::new(&[0, 1]).await;
    let [a, b] = &fleet.0[..] else { panic!() };
    for (host, path) in [(b, "/v1/catalogs/desk/claims"), (a, "/v1/fleet/catalogs/desk/claims")] {
        let stream = Host::claim_slowly_by(&fleet, host, path).await;
        fleet.until_claimed(1).await;
        if path.starts_with("/v1/fleet") {
            let waits = || b.asked.lock().unwrap().iter().any(|asked| asked.contains("?wait="));
            b.until("the machine is waited for", waits).await;
        }
        let machine = b.claimed().await.remove(0);
        let path = format!("/v1/machines/{}/claim", machine.machine.name);
        assert_eq!(b.send("DELETE", &path, "", "").await.status, 200);
        // Where it can be claimed again at once, the answer would show the next claim.
        let _ = b.send("POST", "/v1/catalogs/desk/claims", "", r#"{"any": true}"#).await;
        let ended = answer_of(stream).await;
        assert!(ended.contains(" 409 ") && ended.contains("its claim has ended"), "{ended}");
        for machine in b.claimed().await {
            let path = format!("/v1/machines/{}/claim", machine.machine.name);
            assert_eq!(b.send("DELETE", &path, "", "").await.status, 200);
        }
    }
}

/// The answer would be that there is no such machine, as if its name had been wrong.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_machine_is_removed_while_it_starts_has_ended() {
    let fleet = Fleet::new(&[1]).await;
    let a = &fleet.0[0];
    let stream = Host::claim_slowly_by(&fleet, a, "/v1/catalogs/desk/claims").await;
    fleet.until_claimed(1).await;
    let removed = a.send("DELETE", "/v1/catalogs/desk?force=true", "", "").await;
    assert_eq!(removed.status, 200, "{removed:?}");
    let ended = answer_of(stream).await;
    assert!(ended.contains(" 409 ") && ended.contains("its claim has ended"), "{ended}");
}

async fn answer_of(mut stream: UnixStream) -> String {
    let mut text = String::new();
    let read = tokio::io::AsyncReadExt::read_to_string(&mut stream, &mut text);
    tokio::time::timeout(Duration::from_secs(40), read).await.expect("it is answered").unwrap();
    text
}

/// Without the bound, the request waits for each silent host in turn.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_ends_though_hosts_are_silent() {
    let fleet = Fleet::new(&[1; 6]).await;
    let id = fleet.id_for(&["host-b", "host-c", "host-d", "host-e", "host-f"]);
    let [a, silent @ ..] = &fleet.0[..] else { panic!() };
    // Its handshakes have no end.
    let deaf = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    for host in silent {
        *host.address.lock().unwrap() = deaf.local_addr().unwrap().to_string();
    }
    fleet.show(&BTreeSet::new(), 9);
    let late = a.claim(&id, true).await;
    assert!(late.status == 503 && late.detail().contains("the request has claimed nothing"), "{late:?}");
    assert!(late.detail().contains("host-c"), "it says why: {late:?}");
    assert_eq!(a.claimed().await.len(), 0);
}

async fn all_machines(host: &Host) -> Vec<Name> {
    let all: List<MachineDetails> = host.send("GET", "/v1/machines", "", "").await.json();
    all.items.into_iter().map(|machine| machine.machine.name).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_silent_host_has_done_is_not_guessed() {
    let fleet = Fleet::new(&[4, 4, 4, 4]).await;
    let id = fleet.id_for(&["host-d", "host-c"]);
    let [a, b, c, d] = &fleet.0[..] else { panic!() };
    // It has claimed a machine, and nobody hears of it again.
    d.fail([Fault::LoseAnswer]);
    d.fail(std::iter::repeat_n(Fault::LoseQuestion, 100));
    let unknown = a.claim(&id, true).await;
    assert_eq!(unknown.status, 503, "{unknown:?}");
    assert!(unknown.detail().contains(&format!("--key {id})")), "{unknown:?}");
    // Neither does another host guess, nor one whose lease has just ended.
    assert_eq!(b.claim(&id, false).await.status, 503);
    fleet.show(&BTreeSet::from(["host-d"]), 9);
    assert_eq!(b.claim(&id, false).await.status, 503);
    assert_eq!(fleet.claimed().await.len(), 1);
    // A host that is certainly dead has no claims.
    let entry = |value: Value| Entry { value: value.to_string().into_bytes(), created: 7, modified: 11 };
    let dead = entry(json!({ "host_id": "host-d", "zone": "z", "dead_epoch": 7 }));
    for host in &fleet.0 {
        let change = vec![("hosts/host-d".to_owned(), Some(dead.clone()))];
        host.view.send_modify(|view| view.apply(Update::Changes(11, change)));
    }
    let claim: FleetClaim = b.claim(&id, false).await.json();
    assert_eq!((claim.host.as_str(), claim.is_repeated), ("host-c", false));
    assert_eq!((c.claimed().await.len(), d.claimed().await.len()), (1, 1));
    // It comes back. The claim of the later attempt counts.
    d.faults.lock().unwrap().clear();
    let again: FleetClaim = a.claim(&id, false).await.json();
    assert_eq!((again.host.as_str(), &again.claim), ("host-c", &claim.claim));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_without_lease_takes_no_claims_of_the_fleet() {
    let fleet = Fleet::new(&[4, 4]).await;
    let [a, b] = &fleet.0[..] else { panic!() };
    let id = fleet.id_for(&["host-b"]);
    b.epoch.store(0, Ordering::SeqCst);
    let claim: FleetClaim = a.claim(&id, true).await.json();
    assert_eq!(claim.host.as_str(), "host-a");
    // It can still ask others, but does not know whether it knows all of them.
    let claim: FleetClaim = b.claim("x", true).await.json();
    assert_eq!(claim.host.as_str(), "host-a");
    let repeated = b.claim("x", false).await;
    assert!(repeated.status == 503 && repeated.detail().contains("no valid lease"), "{repeated:?}");
    a.epoch.store(0, Ordering::SeqCst);
    let none = a.claim("y", true).await;
    assert!(none.status == 503 && none.detail().contains("host-b has no valid lease"), "{none:?}");
    assert_eq!(b.claimed().await.len(), 0);
    // Local claims go on, and the claims that there are.
    let own = b.send("POST", "/v1/catalogs/desk/claims", "", r#"{"any": true}"#).await;
    assert_eq!(own.status, 200, "{own:?}");
    a.epoch.store(9, Ordering::SeqCst);
    let again: FleetClaim = a.claim(&id, false).await.json();
    assert_eq!((again.fence.host_epoch, again.is_repeated), (7, true), "the fence is that of the claim");
}

#[tokio::test(flavor = "multi_thread")]
async fn repeats_at_the_same_time_make_one_claim() {
    let fleet = Arc::new(Fleet::new(&[4, 4, 4]).await);
    for round in 0..10 {
        let id = format!("same-{round}");
        let mut asked = tokio::task::JoinSet::new();
        for number in 0..6 {
            let (fleet, id) = (Arc::clone(&fleet), id.clone());
            asked.spawn(async move { fleet.0[number % 3].claim(&id, false).await });
        }
        let mut claims = BTreeSet::new();
        while let Some(answer) = asked.join_next().await {
            let answer = answer.unwrap();
            match answer.status {
                200 => _ = claims.insert(answer.json::<FleetClaim>().claim),
                503 => {}
                other => panic!("{other}: {answer:?}"),
            }
        }
        let claim: FleetClaim = fleet.0[0].claim(&id, false).await.json();
        claims.insert(claim.claim);
        assert_eq!((claims.len(), fleet.claimed().await.len()), (1, round + 1), "{claims:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_claim_is_refused_and_a_claim_of_nobody_is_undone() {
    let fleet = Fleet::new(&[1, 1]).await;
    let [a, b] = &fleet.0[..] else { panic!() };
    let path = "/v1/fleet/catalogs/desk/claims";
    for (headers, query) in [("", "?repeated=true"), ("", "?first=no"), ("", "?wait=31"), ("", "?again=1")] {
        assert_eq!(a.send("POST", &format!("{path}{query}"), headers, "{}").await.status, 400, "{query}");
    }
    let unknown = a.send("POST", "/v1/fleet/catalogs/dask/claims", "", "{}").await;
    assert!(unknown.status == 404 && unknown.detail().contains("'desk'"), "{unknown:?}");
    let relayed = a.send("POST", &format!("/v1/fleet/hosts/host-b/api{path}"), "", "{}").await;
    assert!(relayed.status == 400 && relayed.detail().contains("without --host"), "{relayed:?}");
    let mut question =
        Request::post("/v1/fleet/self/catalogs/desk/claims").body(axum::body::Body::from("{}")).unwrap();
    for (header, value) in
        [(CALLER_HEADER, "read ann"), ("idempotency-key", "x"), ("content-type", "application/json")]
    {
        question.headers_mut().insert(header, value.parse().unwrap());
    }
    let (status, _) = a.door.client.whole(&b.name, question, Duration::from_secs(10)).await.unwrap();
    assert_eq!(status.as_u16(), 403);
    // The client goes away before it is told of the machine.
    let stream = a.claim_slowly(&fleet).await;
    fleet.until_claimed(1).await;
    drop(stream);
    fleet.until_claimed(0).await;
}

/// Otherwise a host that is away for a moment keeps a claim that nobody knows of.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_of_nobody_is_undone_when_its_host_answers_again() {
    let fleet = Fleet::new(&[0, 1]).await;
    let [a, b] = &fleet.0[..] else { panic!() };
    let stream = a.claim_slowly(&fleet).await;
    fleet.until_claimed(1).await;
    // It hangs up.
    let (listener, asked) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), Arc::<AtomicI64>::default());
    let away = listener.local_addr().unwrap().to_string();
    let count = Arc::clone(&asked);
    let hangs_up = tokio::spawn(async move {
        while listener.accept().await.is_ok() {
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    let here = std::mem::replace(&mut *b.address.lock().unwrap(), away);
    fleet.show(&BTreeSet::new(), 9);
    drop(stream);
    let again = async {
        while asked.load(Ordering::SeqCst) < 2 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), again).await.expect("it is asked again");
    *b.address.lock().unwrap() = here;
    fleet.show(&BTreeSet::new(), 10);
    fleet.until_claimed(0).await;
    hangs_up.abort();
}
