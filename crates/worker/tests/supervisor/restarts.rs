//! A worker dies, or makes way for another program.

use crate::world::{LATE, POISON, QUESTION, World, ask, connect, greeting, meanwhile};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn a_worker_that_dies_is_followed_by_another() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let (control, nbd, vhost) = (world.path("control"), world.path("nbd"), world.path("vhost"));
    let first = supervisor.report().worker_pid;
    meanwhile(&mut supervisor, || {
        let nbd = connect(&nbd);
        assert!(greeting(&nbd).starts_with("Nbd"));
        let vmm = connect(&vhost);
        assert_eq!(greeting(&vmm), "VhostUser 2\n");
        let mut one = connect(&control);
        let mut pid = first;
        for _ in 0..5 {
            let raw = rustix::process::Pid::from_raw(pid as i32).unwrap();
            rustix::process::kill_process(raw, rustix::process::Signal::KILL).unwrap();
            assert_eq!(
                greeting(&vmm),
                "VhostUser 2\n",
                "its connection is still open, the next worker has it"
            );
            let next = ask(&mut one, r#"{"command":"ping"}"#)["ok"]["worker_pid"].as_u64().unwrap() as u32;
            assert_ne!(next, pid);
            pid = next;
        }
        assert_eq!((&nbd).read(&mut [0]).unwrap(), 0, "an NBD client connects again");
        assert_eq!(ask(&mut one, r#"{"command":"stats"}"#)["ok"]["clients"], 1);
    });
    assert!(world.logged("SIGKILL") && world.logged("1 NBD client(s) lost the connection"));
    supervisor.stop(&[]).unwrap();
    assert_eq!(world.left(), ["base.raw"]);
}

/// The most workers that die with one message of a VMM in hand, as `docs/design/011` has it.
const MOST_DEATHS: usize = 50;

/// It takes a minute: after so many short lives the next one begins after a second's rest.
#[test]
fn a_vmm_whose_message_kills_every_worker_is_disconnected_and_the_others_outlive_more_deaths_than_that() {
    let world = World::new();
    let mut supervisor = world.serving("poisoned");
    let (nbd, vhost) = (world.path("nbd"), world.path("vhost"));
    meanwhile(&mut supervisor, || {
        // Each worker greets each VMM once, this one first.
        let mut innocent = BufReader::new(connect(&vhost));
        let mut guilty = BufReader::new(connect(&vhost));
        let greeted = |vmm: &mut BufReader<_>| {
            let mut line = String::new();
            vmm.read_line(&mut line).unwrap();
            line
        };
        assert_eq!(greeted(&mut guilty), "VhostUser 2\n");
        guilty.get_mut().write_all(&POISON).unwrap();
        let others = std::iter::from_fn(|| Some(greeted(&mut guilty))).take_while(|line| !line.is_empty());
        assert_eq!(1 + others.count(), MOST_DEATHS, "workers until it was let go");
        // That one's successor, and those of as many deaths again as make more than any one message may bring.
        for _ in 0..=MOST_DEATHS {
            assert_eq!(greeted(&mut innocent), "VhostUser 1\n");
        }
        for _ in 0..12 {
            // Its message is answered, so that no death is this one's fault.
            innocent.get_mut().write_all(&QUESTION).unwrap();
            let mut answer = [0; QUESTION.len()];
            innocent.read_exact(&mut answer).unwrap();
            assert_eq!(answer, QUESTION);
            kill(&world);
            assert_eq!(greeted(&mut innocent), "VhostUser 1\n");
        }
        let nbd = connect(&nbd);
        assert!(greeting(&nbd).starts_with("Nbd"));
        let mut control = connect(&world.path("control"));
        assert_eq!(ask(&mut control, r#"{"command":"stats"}"#)["ok"]["clients"], 2);
    });
    assert!(
        world.logged("vhost-user client 2: disconnected")
            && !world.logged("vhost-user client 1: disconnected")
    );
    supervisor.stop(&[]).unwrap();
    assert_eq!(world.left(), ["base.raw"]);
}

/// This very program under a name that is its role.
fn program(world: &World, role: &str) -> PathBuf {
    let (this, binary) = (std::env::current_exe().unwrap(), world.path(role));
    // By another process: while this one had it open to write, a child of another test could inherit that, and then nobody
    // can start it.
    assert!(Command::new("cp").args([&this, &binary]).status().unwrap().success());
    binary
}

/// Those that run of the programs in this world.
fn running(world: &World) -> Vec<PathBuf> {
    let running = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let exe = std::fs::read_link(entry.ok()?.path().join("exe")).ok()?;
        exe.starts_with(world.dir.path()).then_some(exe)
    });
    running.collect()
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "not in 20 s: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Asks for an upgrade to this very program in a role.
fn upgrade(world: &World, role: &str) -> serde_json::Value {
    let binary = program(world, role);
    let answer = upgrade_to(world, &binary);
    std::fs::remove_file(binary).unwrap();
    answer
}

fn upgrade_to(world: &World, binary: &Path) -> serde_json::Value {
    let mut control = connect(&world.path("control"));
    ask(&mut control, &serde_json::json!({ "command": "upgrade", "binary": binary }).to_string())
}

#[test]
fn another_program_takes_over_and_one_that_does_not_fit_changes_nothing() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let vhost = world.path("vhost");
    let first = supervisor.report().worker_pid;
    meanwhile(&mut supervisor, || {
        let vmm = connect(&vhost);
        assert_eq!(greeting(&vmm), "VhostUser 1\n");
        let pid = || {
            let mut control = connect(&world.path("control"));
            ask(&mut control, r#"{"command":"ping"}"#)["ok"]["worker_pid"].as_u64().unwrap()
        };
        // Who else may write to it could have it serve anything.
        let elsewhere = tempfile::tempdir().unwrap();
        let anybodys = elsewhere.path().join("anybodys");
        std::fs::copy("/usr/bin/true", &anybodys).unwrap();
        std::fs::set_permissions(&anybodys, std::fs::Permissions::from_mode(0o757)).unwrap();
        let refusals: [(&str, &dyn Fn() -> serde_json::Value); 6] = [
            ("every user can write to it", &|| upgrade_to(&world, &anybodys)),
            ("no such file", &|| upgrade_to(&world, &world.path("nothing"))),
            ("permission denied", &|| upgrade_to(&world, &world.path("base.raw"))),
            ("not a spillway-worker of a version that can take over", &|| {
                upgrade_to(&world, Path::new("/usr/bin/true"))
            }),
            ("layout", &|| upgrade(&world, "other-layout")),
            ("did not report its version within 5 s", &|| upgrade_to(&world, Path::new("/usr/bin/yes"))),
        ];
        for (why, try_it) in refusals {
            let answer = try_it();
            assert_eq!(answer["error"]["code"], "refused", "{why}: {answer}");
            assert!(answer["error"]["message"].as_str().unwrap().contains(why), "{why}: {answer}");
            assert_eq!(pid(), u64::from(first), "{why}");
        }
        let answer = upgrade(&world, "exits");
        assert!(
            answer["error"]["message"].as_str().unwrap().contains("the old program serves the disk again"),
            "{answer}"
        );
        assert_eq!(greeting(&vmm), "VhostUser 1\n", "the old program has the VMM again");
        let answer = upgrade(&world, "serves");
        assert_eq!(answer["ok"]["version"], "9.9", "{answer}");
        assert_eq!(greeting(&vmm), "VhostUser 1\n", "and now the new one");
        assert_eq!(answer["ok"]["worker_pid"], pid());
        // Its file is gone by now, and it is what is started again.
        let raw = rustix::process::Pid::from_raw(pid() as i32).unwrap();
        rustix::process::kill_process(raw, rustix::process::Signal::KILL).unwrap();
        assert_eq!(greeting(&vmm), "VhostUser 1\n");
        let exe = std::fs::read_link(format!("/proc/{}/exe", pid())).unwrap();
        assert!(exe.display().to_string().contains("serves"), "{exe:?}");
    });
    supervisor.stop(&[]).unwrap();
    assert_eq!(world.left(), ["base.raw"]);
}

/// Ends the worker that serves now, the hard way.
fn kill(world: &World) -> u64 {
    let pid = worker(world);
    let raw = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(raw, rustix::process::Signal::KILL).unwrap();
    pid
}

/// The process id of the worker; 0 between two.
fn worker(world: &World) -> u64 {
    let mut control = connect(&world.path("control"));
    ask(&mut control, r#"{"command":"ping"}"#)["ok"]["worker_pid"].as_u64().unwrap()
}

#[test]
fn a_vmm_that_leaves_between_two_workers_makes_room_for_the_next() {
    let world = World::new();
    let mut supervisor = world.serving("late");
    let vhost = world.path("vhost");
    meanwhile(&mut supervisor, || {
        for _ in 0..3 {
            let vmm = connect(&vhost);
            assert!(greeting(&vmm).starts_with("VhostUser"));
            kill(&world);
            drop(vmm);
        }
        let vmm = connect(&vhost);
        assert!(greeting(&vmm).starts_with("VhostUser"));
        let mut control = connect(&world.path("control"));
        assert_eq!(ask(&mut control, r#"{"command":"stats"}"#)["ok"]["clients"], 1);
    });
    supervisor.stop(&[]).unwrap();
    assert_eq!(world.left(), ["base.raw"]);
}

/// One VMM has left, and said more than was read yet, when the next one connects.
#[test]
fn a_vmm_that_connects_anew_at_once_is_not_one_too_many() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let vhost = world.path("vhost");
    let mut vmm = meanwhile(&mut supervisor, || {
        leave(connect(&vhost));
        // The stand-in refuses a second while there is one with an even number.
        let vmm = connect(&vhost);
        assert_eq!(greeting(&vmm), "VhostUser 2\n");
        vmm
    });
    for sent in [0, 1, 20] {
        // SET_OWNER, while nobody reads.
        (0..sent).for_each(|_| vmm.write_all(&[3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap());
        leave(vmm);
        vmm = connect(&vhost);
        meanwhile(&mut supervisor, || {
            let line = greeting(&vmm);
            assert!(line.starts_with("VhostUser"), "after {sent} messages: {line:?}");
        });
        // The next number is even again.
        leave(vmm);
        vmm = connect(&vhost);
        meanwhile(&mut supervisor, || assert!(greeting(&vmm).starts_with("VhostUser")));
    }
    leave(vmm);
    supervisor.stop(&[]).unwrap();
}

/// A child that another test forks just now may have the socket too, until it executes its program: to drop it is not
/// always to hang up.
fn leave(vmm: UnixStream) {
    vmm.shutdown(std::net::Shutdown::Both).unwrap();
}

#[test]
fn a_stop_between_two_workers_leaves_nothing() {
    let world = World::new();
    let mut supervisor = world.serving("late");
    let next = meanwhile(&mut supervisor, || {
        let dead = kill(&world);
        loop {
            match worker(&world) {
                pid if pid == dead || pid == 0 => {}
                next => break next,
            }
        }
    });
    let begun = Instant::now();
    supervisor.stop(&[]).unwrap();
    assert!(begun.elapsed() < LATE * 4, "{:?}", begun.elapsed());
    assert!(!PathBuf::from(format!("/proc/{next}")).exists());
    assert_eq!(world.left(), ["base.raw"]);
}

#[test]
fn an_upgrade_bears_another_one_and_the_death_of_the_old_worker() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let vhost = world.path("vhost");
    meanwhile(&mut supervisor, || {
        let vmm = connect(&vhost);
        assert_eq!(greeting(&vmm), "VhostUser 1\n");
        let binary = program(&world, "thinks");
        std::thread::scope(|scope| {
            let upgrade = scope.spawn(|| upgrade_to(&world, &binary));
            until("it is looked at", || !running(&world).is_empty());
            let second = upgrade_to(&world, Path::new("/usr/bin/yes"));
            assert_eq!(second["error"]["code"], "busy", "{second}");
            kill(&world);
            assert_eq!(greeting(&vmm), "VhostUser 1\n", "the old program serves the disk again for now");
            let answer = upgrade.join().unwrap();
            assert_eq!(answer["ok"]["version"], "9.9", "{answer}");
            assert_eq!(answer["ok"]["worker_pid"], worker(&world));
        });
        assert_eq!(greeting(&vmm), "VhostUser 1\n", "the new one has the VMM");
        std::fs::remove_file(binary).unwrap();
    });
    supervisor.stop(&[]).unwrap();
    assert_eq!(world.left(), ["base.raw"]);
}

#[test]
fn who_connects_during_an_upgrade_waits_for_it_and_the_pause_begins_with_the_stop() {
    let world = World::new();
    let mut supervisor = world.serving("lingers");
    let (nbd, vhost) = (world.path("nbd"), world.path("vhost"));
    meanwhile(&mut supervisor, || {
        std::thread::scope(|scope| {
            let old = worker(&world);
            let upgrade = scope.spawn(|| upgrade(&world, "serves"));
            until("the old one is told to stop", || world.logged("it lingers"));
            assert_eq!(worker(&world), old, "it lingers");
            let (nbd, vmm) = (connect(&nbd), connect(&vhost));
            assert!(greeting(&nbd).starts_with("Nbd"));
            assert!(greeting(&vmm).starts_with("VhostUser"));
            let answer = upgrade.join().unwrap();
            assert!(answer["ok"]["pause_ms"].as_u64().unwrap() >= LATE.as_millis() as u64, "{answer}");
            let mut control = connect(&world.path("control"));
            assert_eq!(ask(&mut control, r#"{"command":"stats"}"#)["ok"]["clients"], 2);
        });
    });
    supervisor.stop(&[]).unwrap();
    assert_eq!(world.left(), ["base.raw"]);
}

#[test]
fn a_reset_that_is_asked_for_before_the_next_worker_serves_is_done_once() {
    let world = World::new();
    let mut supervisor = world.serving("late");
    meanwhile(&mut supervisor, || {
        let mut control = connect(&world.path("control"));
        let dead = kill(&world);
        while [0, dead].contains(&worker(&world)) {}
        let answer = ask(&mut control, r#"{"command":"reset","force":true}"#);
        assert_eq!(answer["ok"]["generation"], 2, "{answer}");
        // Whatever else it was told comes before that.
        assert_eq!(
            ask(&mut control, r#"{"command":"set","overflow_bytes":134217728}"#)["error"],
            serde_json::Value::Null
        );
    });
    supervisor.stop(&[]).unwrap();
    let asked = world.lines.lock().unwrap().iter().filter(|line| line.contains("asked for a reset")).count();
    assert_eq!(asked, 1);
}

#[test]
fn a_stop_during_an_upgrade_leaves_nothing() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let binary = program(&world, "thinks");
    let mut control = connect(&world.path("control"));
    meanwhile(&mut supervisor, || {
        let request = serde_json::json!({ "command": "upgrade", "binary": &binary });
        control.write_all(format!("{request}\n").as_bytes()).unwrap();
        until("it is looked at", || !running(&world).is_empty());
    });
    supervisor.stop(&[]).unwrap();
    assert_eq!(running(&world), Vec::<PathBuf>::new());
    std::fs::remove_file(binary).unwrap();
    assert_eq!(world.left(), ["base.raw"]);
}
