//! Tests of the guard with real processes, which it ends from a thread.

use super::lookout::FOLDERS_MS;
use super::*;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Longest time for something to happen, however busy the host is.
const PATIENCE: Duration = Duration::from_secs(10);

struct World {
    dir: tempfile::TempDir,
    page: GuardPage,
    ended: mpsc::Receiver<()>,
}

impl World {
    fn new(deadline_ms: u64) -> World {
        let dir = tempfile::tempdir().unwrap();
        let machines = dir.path().join("machines");
        fs::create_dir(&machines).unwrap();
        let page = open(&machines).unwrap();
        page.set_deadline(now().after_ms(deadline_ms));
        let (sender, ended) = mpsc::channel();
        std::thread::spawn(move || {
            guard(&machines, 0).unwrap();
            let _ = sender.send(());
        });
        World { dir, page, ended }
    }

    fn machine(&self, name: &str, is_marked: bool) -> Process {
        self.start(name, is_marked).unwrap()
    }

    fn start(&self, name: &str, is_marked: bool) -> Result<Process, HostError> {
        let folder = self.dir.path().join("machines").join(name);
        fs::create_dir_all(&folder).unwrap();
        if is_marked {
            let on_isolation = spillway_api::IsolationAction::Stop;
            GuardMark { uuid: "u".into(), on_isolation, pid_file: None }.write(&folder).unwrap();
        }
        let mut sleep = Command::new("sleep");
        sleep.arg("1000");
        processes::start(&folder, crate::machines::VMM_PROCESS, sleep)
    }
}

impl World {
    fn machines(&self) -> PathBuf {
        self.dir.path().join("machines")
    }

    fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !holds() {
            assert!(Instant::now() < until, "not so within {PATIENCE:?}: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Without marks nothing is left to guard.
        let marks = marked(&self.machines()).unwrap().into_iter().flatten();
        marks.for_each(|folder| GuardMark::remove(&folder).unwrap());
        fs::remove_file(page_path(&self.machines())).unwrap();
        self.ended.recv_timeout(PATIENCE).expect("a guard without a page ends");
    }
}

fn is_alive(process: &Process) -> bool {
    !process.ends_within(Duration::ZERO)
}

#[test]
fn marked_machines_end_at_the_deadline_and_what_appears_after_it() {
    let world = World::new(60_000);
    let (own, other) = (world.machine("a", true), world.machine("b", false));
    let begun = Instant::now();
    world.page.set_deadline(now().after_ms(700));
    assert!(own.ends_within(PATIENCE));
    assert!(begun.elapsed() >= Duration::from_millis(500), "not before the deadline");
    // Perhaps before somebody has seen that it runs.
    let ends = match world.start("c", true) {
        Ok(later) => later.ends_within(PATIENCE),
        Err(e) => e.message.contains("ended at once"),
    };
    assert!(ends, "the deadline is still over");
    fs::write(world.dir.path().join("machines/d"), "no folder").unwrap();
    let damaged = world.machine("e", false);
    fs::write(world.dir.path().join("machines/e").join(MARK), "{").unwrap();
    assert!(damaged.ends_within(PATIENCE), "a mark that cannot be read is one");
    assert!(is_alive(&other), "who is not marked is nobody's business");
    world.page.set_deadline(now().after_ms(60_000));
    std::thread::sleep(INTERVAL * 2);
    let again = world.machine("a", true);
    assert!(!again.ends_within(INTERVAL * 10));
    assert!(is_fresh(&world.page, &world.machines()));
    [other, again].iter().for_each(Process::kill);
}

#[test]
fn a_process_of_another_start_time_is_left_alone() {
    let world = World::new(60_000);
    let own = world.machine("a", false);
    let record =
        world.dir.path().join("machines/a").join(format!("{}.process", crate::machines::VMM_PROCESS));
    let text = fs::read_to_string(&record).unwrap();
    let (before, after) = text.rsplit_once(')').unwrap();
    let mut fields: Vec<&str> = after.split_whitespace().collect();
    fields[19] = "1";
    fs::write(&record, format!("{before}) {}", fields.join(" "))).unwrap();
    let on_isolation = spillway_api::IsolationAction::Stop;
    let folder = world.machines().join("a");
    GuardMark { uuid: "u".into(), on_isolation, pid_file: None }.write(&folder).unwrap();
    let other = world.machine("b", true);
    world.page.set_deadline(now());
    assert!(other.ends_within(PATIENCE), "the guard has looked");
    assert!(!own.ends_within(INTERVAL * 10), "its number is somebody else's");
    own.kill();
}

#[test]
fn a_vmm_of_libvirt_is_found_by_its_number_and_its_machine() {
    let world = World::new(60_000);
    let folder = world.dir.path().join("machines/a");
    fs::create_dir(&folder).unwrap();
    let pid_file = world.dir.path().join("a.pid");
    let on_isolation = spillway_api::IsolationAction::Stop;
    let mark = |uuid: &str| GuardMark { uuid: uuid.into(), on_isolation, pid_file: Some(pid_file.clone()) };
    let mut child = Command::new("sleep").arg("1234").spawn().unwrap();
    fs::write(&pid_file, child.id().to_string()).unwrap();
    mark("other").write(&folder).unwrap();
    world.page.set_deadline(now());
    std::thread::sleep(INTERVAL * 5);
    assert!(child.try_wait().unwrap().is_none(), "it is another machine's");
    mark("1234").write(&folder).unwrap();
    let until = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "it is not ended");
        std::thread::sleep(INTERVAL);
    }
}

#[test]
fn a_process_is_not_executed_past_the_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let page = Arc::new(open(&dir.path().join("machines")).unwrap());
    let begin = || {
        let mut sleep = Command::new("sleep");
        sleep.arg("1000");
        processes::start_until(dir.path(), "vmm", sleep, &[], Some(Arc::clone(&page)))
    };
    let refused = begin().unwrap_err();
    assert!(refused.message.contains("lease"), "{refused}");
    page.set_deadline(now().after_ms(60_000));
    begin().unwrap().kill();
}

/// The folder of a machine whose file system hangs until this is dropped: its record is a pipe, and to open that waits for a writer.
struct HungFolder(PathBuf);

impl HungFolder {
    fn new(world: &World) -> HungFolder {
        let folder = world.machines().join("hung");
        fs::create_dir(&folder).unwrap();
        let record = folder.join(format!("{}.process", crate::machines::VMM_PROCESS));
        assert!(Command::new("mkfifo").arg(&record).status().unwrap().success());
        let on_isolation = spillway_api::IsolationAction::Stop;
        GuardMark { uuid: "u".into(), on_isolation, pid_file: None }.write(&folder).unwrap();
        HungFolder(record)
    }
}

impl Drop for HungFolder {
    fn drop(&mut self) {
        let aside = self.0.with_extension("aside");
        fs::rename(&self.0, &aside).unwrap();
        drop(fs::File::options().read(true).write(true).open(aside).unwrap());
    }
}

#[test]
fn a_disk_that_hangs_keeps_nobody_from_killing_what_is_known_and_no_guard_counts_meanwhile() {
    let world = World::new(60_000);
    let own = world.machine("a", true);
    let looks = || is_fresh(&world.page, &world.machines());
    world.until("it looks", looks);
    // It knows the machine after the next look.
    std::thread::sleep(Duration::from_millis(2 * FOLDERS_MS));
    let hung = HungFolder::new(&world);
    world.until("it reads no folders", || !looks());
    assert!(is_alive(&own));
    world.page.set_deadline(now());
    assert!(own.ends_within(PATIENCE), "it was known");
    drop(hung);
    world.until("it looks again", looks);
}

#[test]
fn folders_that_cannot_be_read_are_no_folders_without_marks() {
    let dir = tempfile::tempdir().unwrap();
    let machines = dir.path().join("machines");
    assert!(marked(&machines).unwrap().is_empty(), "there are no machines");
    fs::write(&machines, "no folder").unwrap();
    assert!(marked(&machines).is_err());
    fs::remove_file(&machines).unwrap();
    fs::create_dir_all(machines.join("a")).unwrap();
    fs::write(machines.join("b"), "no folder").unwrap();
    assert!(marked(&machines).unwrap().is_empty());
    // To follow it fails, and not because it is not there.
    std::os::unix::fs::symlink("c", machines.join("c")).unwrap();
    let found = marked(&machines).unwrap();
    assert!(matches!(&found[..], [Err(UnknownMark { folder, .. })] if folder.ends_with("c")), "{found:?}");
    assert!(find(&machines.join("c")).is_err());
    let page = open(&machines).unwrap();
    let killer = Killer::default();
    let mut lookout = GuardLookout::new(&machines, &page, &killer, (0, kind(&machines)));
    let looks = |lookout: &mut GuardLookout<'_>| {
        lookout.look();
        is_fresh(&page, &machines)
    };
    std::thread::scope(|scope| {
        scope.spawn(|| killer.run(&page));
        let until = Instant::now() + Duration::from_secs(1);
        while Instant::now() < until {
            assert!(!looks(&mut lookout), "it has not read all");
        }
        fs::remove_file(machines.join("c")).unwrap();
        assert!(looks(&mut lookout));
        killer.stop();
    });
}

#[test]
fn a_guard_whose_page_is_gone_ends_what_runs_first() {
    let world = World::new(60_000);
    let own = world.machine("a", true);
    world.until("it looks", || is_fresh(&world.page, &world.machines()));
    std::thread::sleep(Duration::from_millis(2 * FOLDERS_MS));
    let page = page_path(&world.machines());
    fs::remove_file(&page).unwrap();
    assert!(world.ended.recv_timeout(Duration::from_secs(1)).is_err(), "something runs that it guards");
    world.page.set_deadline(now());
    assert!(own.ends_within(PATIENCE));
    fs::write(page, "for the end of the test").unwrap();
}
