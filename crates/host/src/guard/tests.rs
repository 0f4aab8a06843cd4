//! Tests of the guard with real processes, which it ends from a thread.

use super::*;
use std::sync::mpsc;
use std::time::Instant;

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
            run(&machines).unwrap();
            let _ = sender.send(());
        });
        World { dir, page, ended }
    }

    fn machine(&self, name: &str, is_marked: bool) -> Process {
        let folder = self.dir.path().join("machines").join(name);
        fs::create_dir_all(&folder).unwrap();
        if is_marked {
            let on_isolation = spillway_api::IsolationAction::Stop;
            GuardMark { uuid: "u".into(), on_isolation, pid_file: None }.write(&folder).unwrap();
        }
        let mut sleep = Command::new("sleep");
        sleep.arg("1000");
        processes::start(&folder, crate::machines::VMM_PROCESS, sleep).unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        fs::remove_file(folder(&self.dir.path().join("machines")).join(PAGE)).unwrap();
        self.ended.recv_timeout(Duration::from_secs(5)).expect("a guard without a page ends");
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
    assert!(own.ends_within(Duration::from_secs(5)));
    assert!(begun.elapsed() >= Duration::from_millis(500), "not before the deadline");
    let later = world.machine("c", true);
    assert!(later.ends_within(Duration::from_secs(1)), "the deadline is still over");
    fs::write(world.dir.path().join("machines/d"), "no folder").unwrap();
    let damaged = world.machine("e", false);
    fs::write(world.dir.path().join("machines/e").join(MARK), "{").unwrap();
    assert!(damaged.ends_within(Duration::from_secs(1)), "a mark that cannot be read is one");
    assert!(is_alive(&other), "who is not marked is nobody's business");
    world.page.set_deadline(now().after_ms(60_000));
    std::thread::sleep(INTERVAL * 2);
    let again = world.machine("a", true);
    assert!(!again.ends_within(INTERVAL * 10));
    assert!(is_fresh(&world.page));
    [other, again].iter().for_each(Process::kill);
}

#[test]
fn a_process_of_another_start_time_is_left_alone() {
    let world = World::new(60_000);
    let own = world.machine("a", true);
    let record =
        world.dir.path().join("machines/a").join(format!("{}.process", crate::machines::VMM_PROCESS));
    let text = fs::read_to_string(&record).unwrap();
    let (before, after) = text.rsplit_once(')').unwrap();
    let mut fields: Vec<&str> = after.split_whitespace().collect();
    fields[19] = "1";
    fs::write(&record, format!("{before}) {}", fields.join(" "))).unwrap();
    // What it knew before is forgotten with the next look at the folders.
    std::thread::sleep(Duration::from_millis(FOLDERS_MS + 200));
    world.page.set_deadline(now());
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
    let until = Instant::now() + Duration::from_secs(5);
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "it is not ended");
        std::thread::sleep(INTERVAL);
    }
}

#[test]
fn a_process_is_not_executed_past_the_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let page = std::sync::Arc::new(open(&dir.path().join("machines")).unwrap());
    let begin = || {
        let mut sleep = Command::new("sleep");
        sleep.arg("1000");
        processes::start_until(dir.path(), "vmm", sleep, &[], Some(std::sync::Arc::clone(&page)))
    };
    let refused = begin().unwrap_err();
    assert!(refused.message.contains("lease"), "{refused}");
    page.set_deadline(now().after_ms(60_000));
    begin().unwrap().kill();
}
