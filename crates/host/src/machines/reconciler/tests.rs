//! Steps of a machine's task, one by one, on a host of the test's own: a disk is a process that does nothing, and a socket that
//! notes what it is asked.

use super::*;
use crate::catalogs::CatalogChangeTerms;
use crate::machines::registry::NewTask;
use crate::machines::testing::{TestHost, spec};
use crate::resources::boots::Boot;
use crate::resources::budget::{Capacity, NO_LIMITS};
use serde_json::{Value, json};
use spillway_api::{StoreClass, StoreFolder};
use spillway_fleet::Moment;
use spillway_fleet::named::{NameOrder, NamedOrders};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::sync::Mutex;

const MIB: u64 = 1 << 20;
const NAME: &str = "desk-001";

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn reconciler(host: &TestHost) -> MachineReconciler {
    reconciler_of(host, NAME)
}

fn reconciler_of(host: &TestHost, machine: &str) -> MachineReconciler {
    let NewTask { wakeup, status } = host.shared.registry.wake_or_begin(&name(machine)).unwrap();
    MachineReconciler::new(Arc::clone(&host.shared), name(machine), wakeup, status)
}

fn caches(bytes: u64) -> Capacity {
    Capacity { ram_bytes: bytes, ..NO_LIMITS }
}

fn limit(bytes: u64) -> Need {
    Need { limit_bytes: bytes, ..Need::default() }
}

impl MachineReconciler {
    fn phase(&self) -> Phase {
        self.status.borrow().phase()
    }

    /// Steps until nothing more is to be done for now.
    async fn rest(&mut self) -> Result<(), HostError> {
        while let StepOutcome::Again = self.step().await? {}
        Ok(())
    }
}

/// What stands for a disk that is served.
struct FakeDisk {
    process: Process,
    asked: Arc<Mutex<Vec<Value>>>,
}

impl FakeDisk {
    fn new(folder: &MachineFolder) -> FakeDisk {
        let mut sleep = std::process::Command::new("sleep");
        sleep.arg("1000");
        let process = processes::start(folder.path(), disk::PROCESS, sleep).unwrap();
        let listener = UnixListener::bind(folder.path().join(disk::CONTROL)).unwrap();
        let asked = Arc::<Mutex<Vec<Value>>>::default();
        let noted = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let noted = Arc::clone(&noted);
                std::thread::spawn(move || {
                    for line in BufReader::new(&stream).lines().map_while(Result::ok) {
                        noted.lock().unwrap().push(serde_json::from_str(&line).unwrap());
                        if writeln!(&stream, "{}", json!({ "ok": {} })).is_err() {
                            break;
                        }
                    }
                });
            }
        });
        FakeDisk { process, asked }
    }

    /// The limits of its RAM tier that it was asked for since this was asked last.
    fn ram(&self) -> Vec<u64> {
        let asked = std::mem::take(&mut *self.asked.lock().unwrap());
        asked.iter().filter_map(|asked| asked["ram_bytes"].as_u64()).collect()
    }
}

impl Drop for FakeDisk {
    fn drop(&mut self) {
        let _ = self.process.end(Duration::ZERO);
    }
}

#[tokio::test]
async fn a_machine_that_has_lost_its_disk_and_its_vmm_does_not_count_as_booting() {
    let host = TestHost::new(NO_LIMITS);
    host.catalog("desk", json!({ "ready": "agent" }));
    host.want(NAME, Power::On);
    let mut reconciler = reconciler(&host);
    assert!(matches!(reconciler.step().await, Ok(StepOutcome::Again)), "its run is written down");
    let (name, catalog) = (name(NAME), name("desk"));
    host.shared.boots.note(Boot { name: &name, catalog: &catalog, is_checked: true });
    assert!(host.shared.boots.counts_until(&name).is_some());
    // The image of this host cannot be served.
    let _ = reconciler.step().await;
    assert_eq!(host.shared.boots.counts_until(&name), None);
}

/// Of a machine whose disk is served on while it is off. Nobody starts a VMM here.
#[tokio::test]
async fn a_disk_that_was_kept_is_admitted_again_and_has_its_whole_cache_again() {
    let host = TestHost::new(caches(300 * MIB));
    host.catalog("desk", json!({ "reset": "never" }));
    host.want(NAME, Power::On);
    let mut reconciler = reconciler(&host);
    assert!(matches!(reconciler.step().await, Ok(StepOutcome::Again)), "its run is written down");
    let disk = FakeDisk::new(&reconciler.folder);
    reconciler.rest().await.unwrap();
    assert_eq!((reconciler.phase(), disk.ram()), (Phase::Running, vec![]));
    host.want(NAME, Power::Off);
    reconciler.rest().await.unwrap();
    assert_eq!((reconciler.phase(), disk.ram()), (Phase::Stopped, vec![64 << 10]));
    let (others, its) = (name("desk-002"), name(NAME));
    host.shared.admission.promise(&others, limit(200 * MIB)).unwrap();
    host.want(NAME, Power::On);
    reconciler.rest().await.unwrap();
    assert_eq!((reconciler.phase(), disk.ram()), (Phase::Waiting, vec![]), "others have what it had");
    host.shared.admission.give_back(&others);
    reconciler.rest().await.unwrap();
    assert_eq!((reconciler.phase(), disk.ram()), (Phase::Running, vec![256 * MIB]));
    assert_eq!(host.shared.admission.promised(&its), limit(256 * MIB));
}

#[tokio::test]
async fn a_cache_that_is_refused_more_shrinks_with_the_others() {
    let host = TestHost::new(caches(600 * MIB));
    let catalog = host.catalog("desk", json!({}));
    host.want(NAME, Power::On);
    let mut reconciler = reconciler(&host);
    reconciler.step().await.unwrap();
    let disk = FakeDisk::new(&reconciler.folder);
    reconciler.rest().await.unwrap();
    host.shared.admission.promise(&name("desk-002"), limit(256 * MIB)).unwrap();
    host.catalogs
        .change(&catalog.name, &spec(json!({ "ram_bytes": 400 * MIB })), CatalogChangeTerms::default())
        .unwrap();
    reconciler.rest().await.unwrap();
    assert_eq!((reconciler.phase(), disk.ram()), (Phase::Running, vec![]), "there is not so much");
    host.shared.memory.look(0);
    reconciler.rest().await.unwrap();
    assert_eq!(disk.ram(), [192 * MIB], "a quarter less");
    host.shared.memory.look(u64::MAX);
    host.shared.admission.give_back(&name("desk-002"));
    reconciler.rest().await.unwrap();
    assert!(disk.ram()[0] > 256 * MIB, "it has what its catalog says as memory allows");
}

#[tokio::test]
async fn what_fails_for_good_gives_back_what_it_was_promised() {
    let host = TestHost::new(caches(300 * MIB));
    let image = host.version(1, MIB);
    host.catalog("desk", json!({}));
    host.want(NAME, Power::On);
    std::fs::write(&image, "no whole sector").unwrap();
    let mut reconciler = reconciler(&host);
    let error = reconciler.rest().await.unwrap_err();
    assert!(error.is_permanent, "{error}");
    assert_eq!(host.shared.admission.promised(&name(NAME)), Need::default());
    assert!(!reconciler.folder.has_run());
    reconciler.record_failure(&error);
    let passing = HostError::new(ErrorCode::Exhausted, "the file system is full");
    reconciler.record_failure(&passing);
    let status = reconciler.status.borrow().status(reconciler.seen);
    assert!(status.permanent && status.message.unwrap().contains("it is not tried again"));
    reconciler.rest().await.unwrap();
    assert_eq!(reconciler.phase(), Phase::Failed, "it is not tried again");
}

fn with_copies() -> TestHost {
    let host = TestHost::new(NO_LIMITS);
    let path = host.path("fast");
    host.stores.add(StoreFolder { name: name("fast"), path, class: StoreClass::Cache }, false).unwrap();
    host
}

#[tokio::test]
async fn what_can_never_be_served_takes_no_place_for_a_copy() {
    let host = with_copies();
    let mut catalog = host.catalog("desk", json!({ "mode": "ephemeral" }));
    // An earlier daemon took larger ones.
    host.version(2, 5 << 40);
    catalog.version = 2;
    host.put("desk", &catalog);
    host.want(NAME, Power::On);
    let mut reconciler = reconciler(&host);
    let error = reconciler.rest().await.unwrap_err();
    assert!(error.is_permanent && error.message.contains("the largest disk"), "{error}");
    assert!(!reconciler.folder.has_run());
    assert_eq!(host.shared.admission.promised(&name(NAME)), Need::default());
}

#[tokio::test]
async fn a_copy_that_is_queued_is_of_the_version_that_its_catalog_has_when_it_is_made() {
    let host = with_copies();
    host.catalog("desk", json!({ "mode": "ephemeral" }));
    host.want(NAME, Power::On);
    let mut reconciler = reconciler(&host);
    let stores = ["default", "fast"].map(name).into();
    let placement = &host.shared.placement;
    let turns = [placement.turn(&stores).await.unwrap(), placement.turn(&stores).await.unwrap()];
    reconciler.rest().await.unwrap();
    assert_eq!(reconciler.phase(), Phase::Placing);
    host.version(2, MIB);
    let update = serde_json::from_value(json!({ "image": "debian:2" })).unwrap();
    host.catalogs.update(&name("desk"), &update, CatalogChangeTerms::default()).unwrap();
    reconciler.rest().await.unwrap();
    drop(turns);
    let made = place::placed(&mut reconciler.placing).await;
    reconciler.finish_placing(made).await.unwrap();
    let run = reconciler.folder.load().unwrap().unwrap();
    assert_eq!(run.version, 2);
    assert_eq!(std::fs::read(run.copy.unwrap().path).unwrap(), vec![2; MIB as usize]);
    // The same when the first copy is whole already, and nobody has looked at it yet.
    host.version(3, MIB);
    let update = serde_json::from_value(json!({ "image": "debian:3" })).unwrap();
    host.catalogs.update(&name("desk"), &update, CatalogChangeTerms::default()).unwrap();
    reconciler.rest().await.unwrap();
    let made = place::placed(&mut reconciler.placing).await;
    host.version(4, MIB);
    let update = serde_json::from_value(json!({ "image": "debian:4" })).unwrap();
    host.catalogs.update(&name("desk"), &update, CatalogChangeTerms::default()).unwrap();
    reconciler.finish_placing(made).await.unwrap();
    reconciler.rest().await.unwrap();
    let made = place::placed(&mut reconciler.placing).await;
    reconciler.finish_placing(made).await.unwrap();
    let run = reconciler.folder.load().unwrap().unwrap();
    assert_eq!((run.version, std::fs::read(run.copy.unwrap().path).unwrap()[0]), (4, 4));
}

#[tokio::test]
async fn one_whose_disk_ends_again_and_again_has_failed_and_is_tried_again() {
    let host = TestHost::new(NO_LIMITS);
    host.catalog("desk", json!({}));
    host.want(NAME, Power::On);
    let mut reconciler = reconciler(&host);
    for crash in 1..=5 {
        assert!(matches!(reconciler.step().await, Ok(StepOutcome::Again)), "its run is written down");
        drop(FakeDisk::new(&reconciler.folder));
        reconciler.rest().await.unwrap();
        let failed = reconciler.status.borrow().failure().is_some();
        assert_eq!((reconciler.phase() == Phase::Failed, failed), (crash == 5, crash == 5), "{crash}");
        reconciler.attempts.not_before(Instant::now());
    }
    // Somebody wants it to be tried anew.
    host.want(NAME, Power::On);
    reconciler.step().await.unwrap();
    let disk = FakeDisk::new(&reconciler.folder);
    reconciler.rest().await.unwrap();
    assert_eq!((reconciler.phase(), disk.ram()), (Phase::Running, vec![]));
    assert!(reconciler.status.borrow().failure().is_none());
}

/// A store whose file system hangs, until this is dropped: its mark is a pipe, and to open that waits for a writer.
struct HungStore(std::path::PathBuf);

impl HungStore {
    const MARKS: [&str; 3] = [".spillway-store", "mark", "pipe"];

    fn new(path: std::path::PathBuf) -> HungStore {
        let [mark, real, _] = HungStore::MARKS.map(|file| path.join(file));
        std::fs::rename(&mark, real).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(mark).status().unwrap().success());
        HungStore(path)
    }
}

impl Drop for HungStore {
    fn drop(&mut self) {
        let [mark, real, pipe] = HungStore::MARKS.map(|file| self.0.join(file));
        std::fs::rename(&mark, &pipe).unwrap();
        std::fs::rename(real, mark).unwrap();
        std::fs::File::options().read(true).write(true).open(pipe).unwrap();
    }
}

/// With as few threads as a daemon has for many more machines.
#[test]
fn machines_in_a_store_that_hangs_stop_no_start_of_others() {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).max_blocking_threads(16).enable_all().build().unwrap();
    let host = TestHost::new(NO_LIMITS);
    let path = host.path("nas");
    host.stores.add(StoreFolder { name: name("nas"), path, class: StoreClass::Local }, false).unwrap();
    host.catalog("there", json!({ "count": 10, "overflow_store": "nas" }));
    host.catalog("kept", json!({ "count": 20, "overflow_store": "nas", "type": "dedicated" }));
    host.catalog("desk", json!({}));
    let _hung = HungStore::new(host.path("nas"));
    let begin = |machine: &str| {
        host.want(machine, Power::On);
        let mut reconciler = reconciler_of(&host, machine);
        let status = reconciler.status.subscribe();
        (runtime.spawn(async move { reconciler.rest().await }), status)
    };
    let (there, kept) = ((1..=10).map(|n| format!("there-{n:03}")), (1..=20).map(|n| format!("kept-{n:03}")));
    let begun: Vec<_> = there.chain(kept).map(|machine| begin(&machine)).collect();
    let other = async {
        for (_, mut status) in begun {
            status.wait_for(|status| status.phase() == Phase::Starting).await.unwrap();
        }
        begin(NAME).0.await.unwrap()
    };
    let ended = runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), other).await });
    let error = ended.expect("no other waits for them").unwrap_err();
    assert!(error.message.contains("/nonexistent/spillway"), "its disk is started: {error}");
}

/// Of a machine with a name of the fleet: its guest neither begins nor shuts down by itself while the fleet does not let it run.
#[tokio::test]
async fn a_guest_whose_order_is_to_end_is_not_let_go_on_and_gets_no_grace() {
    let host = TestHost::new(NO_LIMITS);
    host.catalog("desk", json!({ "grace_seconds": 60 }));
    host.want(NAME, Power::On);
    let mut reconciler = reconciler(&host);
    assert!(matches!(reconciler.step().await, Ok(StepOutcome::Again)), "its run is written down");
    let mut run = reconciler.folder.load().unwrap().unwrap();
    let take = |order: NameOrder, uuid: &str| {
        let orders = NamedOrders {
            machines: [(name(NAME), order)].into(),
            uuids: [(name(NAME), uuid.to_owned())].into(),
            has_lease: true,
            ..NamedOrders::default()
        };
        host.shared.names.take(orders, Moment(u64::MAX));
    };
    assert!(!named::must_pause(&reconciler, &run), "it has no name of the fleet");
    reconciler.named = Some(IsolationAction::Stop);
    assert!(named::must_pause(&reconciler, &run), "nobody has said anything");
    let own = run.uuid.clone();
    let cases = [
        (NameOrder::Run, &own[..], false),
        (NameOrder::GoOn, &own[..], false),
        (NameOrder::Pause, &own[..], true),
        (NameOrder::End, &own[..], true),
        (NameOrder::Run, "another machine of its name", true),
    ];
    let mut sleep = std::process::Command::new("sleep");
    sleep.arg("1000");
    let vmm = processes::start(reconciler.folder.path(), vmm::PROCESS, sleep).unwrap();
    for (order, uuid, must_pause) in cases {
        take(order, uuid);
        assert_eq!(named::must_pause(&reconciler, &run), must_pause, "{order:?} {uuid}");
        if must_pause {
            let until = reconciler.shut_down(&vmm, &mut run, Duration::from_secs(60)).await.unwrap();
            assert!(until.is_none(), "{order:?} {uuid}: it is ended at once");
        }
    }
    vmm.end(Duration::ZERO).unwrap();
}
