//! Curves of all machines, which show what other sizes of the RAM tier would have done. They are read from all disks at
//! the same time, and seldom. Owns the last answers.
//!
//! Invariant: for the curves of all machines, the last curve of a disk that does not answer is used; a disk that is not served any more is left out. Nobody
//! waits longer than [`PATIENCE`] for disks. A curve never stands for another machine or catalog that has got the same name.

use super::one_disk::check_served;
use super::recent::RecentAnswers;
use super::{FRESH as MOMENT, PATIENCE, answer, ask_all, connect};
use crate::error::HostError;
use crate::machines::run::MachineFolders;
use crate::machines::views::MachineReader;
use crate::machines::{View, blocking};
use jiff::Timestamp;
use spillway_api::{CatalogCurve, CurveFigures, DiskCurve, ErrorCode, Name, Selector};
use spillway_control::Request;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How long an answer is reused: a curve changes within hours, and the disk's worker pauses to compute it.
const FRESH: Duration = Duration::from_secs(30);

/// Disks whose curves are added for a catalog: more of them would hardly change it.
const MOST_DISKS: usize = 256;

/// Curves by machine.
pub type CurvesByMachine = BTreeMap<Name, MachineCurve>;

/// The curve of a machine.
#[derive(Clone)]
pub struct MachineCurve {
    /// Its catalog.
    pub catalog: Name,
    pub figures: CurveFigures,
    /// UUID of the machine.
    uuid: String,
}

/// Collects the curves of machines' disks.
pub struct CurveCollector {
    reader: MachineReader,
    folders: MachineFolders,
    /// By machine, with its UUID, and by the bits of the goal.
    of_machines: RecentAnswers<(Name, String, Option<u64>), DiskCurve>,
    /// By catalog, with the time at which it was created.
    of_catalogs: RecentAnswers<(Name, Timestamp), CatalogCurve>,
    /// Last answer, and its time.
    last: tokio::sync::Mutex<Option<(Instant, Arc<CurvesByMachine>)>>,
}

impl CurveCollector {
    /// Creates the collector of these machines.
    pub fn new(reader: MachineReader, folders: MachineFolders) -> CurveCollector {
        let (of_machines, of_catalogs) = (RecentAnswers::new(MOMENT), RecentAnswers::new(FRESH));
        CurveCollector { reader, folders, of_machines, of_catalogs, last: tokio::sync::Mutex::default() }
    }

    /// Reads the curve of one machine from its disk. Whoever asks the same within a moment gets the same answer.
    pub async fn of(&self, name: &Name, goal: Option<f64>) -> Result<Arc<DiskCurve>, HostError> {
        if goal.is_some_and(|goal| !(0.0..=1.0).contains(&goal)) {
            return Err(HostError::new(ErrorCode::Invalid, "a goal is a share: 0 to 1"));
        }
        let (reader, of) = (self.reader.clone(), name.clone());
        let view = blocking(move || reader.view(&of)).await?;
        check_served(&view)?;
        let question = (name.clone(), view.machine.identity.uuid, goal.map(f64::to_bits));
        self.of_machines.get(question, self.read(name, goal)).await
    }

    async fn read(&self, name: &Name, goal: Option<f64>) -> Result<DiskCurve, HostError> {
        let asked = ask_for(self.folders.of(name).path().to_owned(), goal);
        let why = match tokio::time::timeout(PATIENCE, asked).await {
            Ok(Ok(curve)) => return Ok(curve),
            Ok(Err(e)) => format!(
                "{name}: its disk gives no curve: {e}: try again, or restart the machine if its disk is of an earlier version"
            ),
            Err(_) => format!("{name}: its disk has not answered in {} ms: try again", PATIENCE.as_millis()),
        };
        Err(HostError::new(ErrorCode::Unavailable, why))
    }

    /// Returns the sum of the curves of a catalog's machines, at most about half a minute old.
    pub async fn of_catalog(&self, name: &Name) -> Result<Arc<CatalogCurve>, HostError> {
        let (reader, of) = (self.reader.clone(), name.clone());
        let created = blocking(move || Ok(reader.catalog(&of)?.created)).await?;
        self.of_catalogs.get((name.clone(), created), self.sum_of(name)).await
    }

    async fn sum_of(&self, name: &Name) -> Result<CatalogCurve, HostError> {
        let (reader, of) = (self.reader.clone(), name.clone());
        let selector = Selector { catalog: Some(of), ..Selector::default() };
        let mut views = blocking(move || reader.views(&selector)).await?;
        views.retain(has_curve);
        let machines = views.len();
        if machines == 0 {
            let message = format!("no machine of {name} is served that has a RAM tier: start one first");
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        let until = Instant::now() + PATIENCE;
        let asked = ask_all(&self.folders, views.iter().take(MOST_DISKS), until, ask).await;
        let curves: Vec<DiskCurve> = asked.into_iter().map(|(_, curve)| curve).collect();
        CatalogCurve::sum(&curves, machines).ok_or_else(|| {
            let message = format!("no disk of {name} has answered in {} ms", PATIENCE.as_millis());
            HostError::new(ErrorCode::Unavailable, message)
        })
    }

    /// Returns the curves of all machines that have a RAM tier, at most about half a minute old.
    pub async fn all(&self) -> Result<Arc<CurvesByMachine>, HostError> {
        let mut last = self.last.lock().await;
        if let Some((at, curves)) = &*last
            && at.elapsed() < FRESH
        {
            return Ok(Arc::clone(curves));
        }
        let reader = self.reader.clone();
        let views = blocking(move || reader.views(&Selector::default())).await?;
        let served: Vec<&View> = views.iter().filter(|view| has_curve(view)).collect();
        let until = Instant::now() + PATIENCE;
        let mut curves = CurvesByMachine::new();
        let known = last.as_ref().map(|(_, known)| known);
        for view in &served {
            let before = known.and_then(|known| known.get(&view.machine.name));
            if let Some(of) = before.filter(|of| of.uuid == view.machine.identity.uuid) {
                curves.insert(view.machine.name.clone(), of.clone());
            }
        }
        for (view, curve) in ask_all(&self.folders, served.into_iter(), until, ask).await {
            let machine = &view.machine;
            let (catalog, uuid) = (machine.catalog.clone(), machine.identity.uuid.clone());
            let curve = MachineCurve { catalog, figures: CurveFigures::from(&curve), uuid };
            curves.insert(machine.name.clone(), curve);
        }
        let curves = Arc::new(curves);
        *last = Some((Instant::now(), Arc::clone(&curves)));
        Ok(curves)
    }
}

fn has_curve(view: &View) -> bool {
    view.status.run.as_ref().is_some_and(|run| run.disk_pid.is_some() && run.ram_bytes.is_some())
}

async fn ask(folder: PathBuf) -> io::Result<DiskCurve> {
    ask_for(folder, None).await
}

async fn ask_for(folder: PathBuf, goal: Option<f64>) -> io::Result<DiskCurve> {
    answer(&mut connect(&folder).await?, &Request::Curve { goal }).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::disk::CONTROL;
    use crate::machines::run::RunRecord;
    use crate::machines::status::{ObservedMachine, Status};
    use crate::machines::testing::TestHost;
    use crate::processes::{ObservedProcess, adopt};
    use crate::resources::budget::NO_LIMITS;
    use crate::store::Revision;
    use serde_json::json;
    use spillway_api::{Catalog, Machine, Phase};
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    /// A catalog `desk` of one machine, whose disk is the test's own.
    struct World {
        host: TestHost,
        curves: CurveCollector,
        /// How often the disk was asked.
        asked: Arc<AtomicU32>,
        /// Whether it answers.
        answers: Arc<AtomicBool>,
    }

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    impl World {
        fn new() -> World {
            let host = TestHost::new(NO_LIMITS);
            host.catalog("desk", json!({ "count": 1 }));
            let folders = MachineFolders::new(host.path("machines"));
            let folder = folders.of(&name("desk-001"));
            std::fs::create_dir(folder.path()).unwrap();
            let run: RunRecord = serde_json::from_value(json!({
                "uuid": "u", "boot": "b", "image": "debian", "version": 1, "hypervisor": "none", "spec": { "image": "debian" },
                "restarts": 0, "resets": 0, "queues": 1, "asked": false, "ready": false, "ram_bytes": 1 << 20,
            }))
            .unwrap();
            let program = std::env::args().next().unwrap();
            let ObservedProcess::Alive(own) =
                adopt(folder.path(), "disk", std::process::id(), &program).unwrap()
            else {
                panic!("it is this process");
            };
            let mut known = ObservedMachine::default();
            known.update(Status::new(Phase::Running).of(&run, &folder).by(&own, None), Revision::default());
            host.shared.registry.begin_with([(name("desk-001"), known)]);
            let (asked, answers) = (Arc::<AtomicU32>::default(), Arc::new(AtomicBool::new(true)));
            let listener = UnixListener::bind(folder.path().join(CONTROL)).unwrap();
            let curves = CurveCollector::new(host.reader.clone(), folders);
            let world = World { host, curves, asked, answers };
            world.serve(listener);
            world
        }

        fn serve(&self, listener: UnixListener) {
            let (asked, answers) = (Arc::clone(&self.asked), Arc::clone(&self.answers));
            std::thread::spawn(move || {
                let mut unanswered = Vec::new();
                for stream in listener.incoming() {
                    let mut stream = BufReader::new(stream.unwrap());
                    stream.read_line(&mut String::new()).unwrap();
                    asked.fetch_add(1, Ordering::Relaxed);
                    match answers.load(Ordering::Relaxed) {
                        true => writeln!(stream.get_mut(), "{}", json!({ "ok": curve() })).unwrap(),
                        false => unanswered.push(stream),
                    }
                }
            });
        }

        fn asked(&self) -> u32 {
            self.asked.load(Ordering::Relaxed)
        }
    }

    fn curve() -> serde_json::Value {
        json!({ "seconds": 1.0, "sampled_one_in": 1.0, "curve": [], "zero_overflow_bytes": 0, "knee_bytes": null,
            "recommended_bytes": 0, "goal": 0.95, "memory_bytes": 0, "fill": { "seconds": 1.0, "grown_bytes": 0, "left_bytes": 0 },
            "totals": { "written_blocks": 0, "read_blocks": 0, "base_read_blocks": 0, "new_blocks": 0, "peak_live_blocks": 0 } })
    }

    #[tokio::test]
    async fn a_catalog_of_the_same_name_is_another_one() {
        let world = World::new();
        let desk = name("desk");
        let first = world.curves.of_catalog(&desk).await.unwrap();
        let again = world.curves.of_catalog(&desk).await.unwrap();
        assert!(Arc::ptr_eq(&first, &again) && world.asked() == 1);
        let catalog = world.host.catalogs.get(&desk).unwrap();
        world.host.put("desk", &Catalog { created: Timestamp::UNIX_EPOCH, ..catalog });
        world.curves.of_catalog(&desk).await.unwrap();
        assert_eq!(world.asked(), 2);
    }

    #[tokio::test]
    async fn a_machine_of_the_same_name_is_another_one() {
        let world = World::new();
        let desk = name("desk-001");
        assert!(world.curves.all().await.unwrap().contains_key(&desk));
        world.answers.store(false, Ordering::Relaxed);
        let expire = || async {
            let mut last = world.curves.last.lock().await;
            last.as_mut().unwrap().0 -= FRESH;
        };
        expire().await;
        assert!(
            world.curves.all().await.unwrap().contains_key(&desk),
            "the last one of a disk that does not answer"
        );
        let mut machine = world.host.catalogs.machine(&desk).unwrap();
        machine.identity.uuid = "another".into();
        world.host.put::<Machine>("desk-001", &machine);
        expire().await;
        assert!(world.curves.all().await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_disk_that_does_not_answer_is_not_asked_each_time_and_holds_nobody() {
        let world = World::new();
        world.answers.store(false, Ordering::Relaxed);
        let begun = Instant::now();
        for _ in 0..9 {
            let error = world.curves.of_catalog(&name("desk")).await.unwrap_err();
            assert_eq!(error.code, ErrorCode::Unavailable, "{error}");
        }
        assert_eq!(world.asked(), 1);
        let error = world.curves.of(&name("desk-001"), None).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::Unavailable, "{error}");
        assert!(begun.elapsed() < 4 * PATIENCE, "{:?}", begun.elapsed());
        world.answers.store(true, Ordering::Relaxed);
        tokio::time::sleep(MOMENT).await;
        let curve = world.curves.of(&name("desk-001"), Some(0.5)).await.unwrap();
        assert_eq!(curve.seconds, 1.0);
    }
}
