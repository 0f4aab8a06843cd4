//! What the worker is given, what is handed on to it, how it ends.

use crate::world::{BABBLE, World, ask, connect, greeting, meanwhile};
use spillway_control::{Client, ErrorKind, Mode, ServeSettings};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[test]
fn the_worker_gets_the_disk_and_nothing_else() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let lines = world.lines.lock().unwrap().join("\n");
    let mut words = lines.lines().next().unwrap().split(' ');
    assert_eq!(words.next(), Some("ram+overflow"));
    assert!(
        words.next().is_some_and(|serial| serial.starts_with("spillway-") && serial.len() <= 20),
        "{lines}"
    );
    let shape: Vec<_> = words.collect();
    assert_eq!((shape.len(), shape[1], shape[3]), (5, "1048576", "67112960+"), "{lines}");
    assert!(shape[0].ends_with('+') && shape[2].ends_with('+') && shape[4] == "4096+", "{lines}");
    // stdin, stdout, stderr, the channel, and the directory that is read.
    assert!(lines.contains("group true fds 5"), "{lines}");
    supervisor.stop(&[]).unwrap();
    assert_eq!(world.left(), ["base.raw"]);
}

#[test]
fn clients_reach_the_worker_and_a_second_vmm_is_its_decision() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let (vhost, nbd) = (world.path("vhost"), world.path("nbd"));
    meanwhile(&mut supervisor, || {
        let first = connect(&nbd);
        assert_eq!(greeting(&first), "Nbd 1\n");
        let vmm = connect(&vhost);
        assert_eq!(greeting(&vmm), "VhostUser 2\n");
        assert_eq!(greeting(&connect(&vhost)), "", "the second VMM");
        let second = connect(&nbd);
        assert_eq!(greeting(&second), "Nbd 4\n");
        let mut control = connect(&world.path("control"));
        assert_eq!(ask(&mut control, r#"{"command":"stats"}"#)["ok"]["clients"], 3);
    });
    assert!(world.logged("vhost-user client 3: refused: a VMM is connected"));
    supervisor.stop(&[]).unwrap();
}

#[test]
fn the_control_socket_answers_many_at_once() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let (control, nbd) = (world.path("control"), world.path("nbd"));
    meanwhile(&mut supervisor, || {
        // One that says nothing, one that says half a line, one that never reads.
        let _silent = connect(&control);
        connect(&control).write_all(b"{\"comm").unwrap();
        let mut deaf = connect(&control);
        deaf.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        while deaf.write_all(b"{\"command\":\"stats\"}\n").is_ok() {}

        let mut one = connect(&control);
        let pong = ask(&mut one, r#"{"command":"ping"}"#);
        assert_eq!(pong["ok"]["pid"], std::process::id());
        assert_eq!(pong["ok"]["size_bytes"], 8 << 20);
        let stats = ask(&mut one, r#"{"command":"stats"}"#);
        assert_eq!(
            (&stats["ok"]["schema"], &stats["ok"]["planes"]["guest"]["reads"]),
            (&1.into(), &7.into())
        );
        assert_eq!(ask(&mut one, "nonsense")["error"]["code"], "invalid");

        assert_eq!(ask(&mut one, r#"{"command":"reset"}"#)["ok"]["generation"], 2);
        let mut client = connect(&nbd);
        assert!(greeting(&client).starts_with("Nbd"));
        let mut two = connect(&control);
        let refused = ask(&mut two, r#"{"command":"reset"}"#);
        assert_eq!(
            (&refused["error"]["code"], &refused["error"]["message"]),
            (&"refused".into(), &"a client is connected".into())
        );
        assert_eq!(ask(&mut two, r#"{"command":"reset","force":true}"#)["ok"]["generation"], 2);
        assert_eq!(client.read(&mut [0]).unwrap(), 0, "forced: disconnected");
        assert_eq!(ask(&mut two, r#"{"command":"stats"}"#)["ok"]["clients"], 0);
    });
    supervisor.stop(&[]).unwrap();
}

#[test]
fn recorders_come_and_go_and_the_worker_is_told_of_the_first_and_the_last() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let control = world.path("control");
    let wait_for_log = |what: &str| {
        let begun = Instant::now();
        while !world.logged(what) {
            assert!(begun.elapsed() < Duration::from_secs(10), "not told: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let times = |what: &str| world.lines.lock().unwrap().iter().filter(|line| line.contains(what)).count();
    meanwhile(&mut supervisor, || {
        let record = || Client::connect(&control).unwrap().trace().unwrap();
        let first = record();
        assert_eq!((&first.disk["size_bytes"], &first.disk["live_bytes"]), (&(8 << 20).into(), &0.into()));
        wait_for_log("recorded: true");
        let second = record();
        drop(first);
        // Who records asks nothing more, and others are served.
        let mut other = connect(&control);
        assert_eq!(ask(&mut other, r#"{"command":"ping"}"#)["ok"]["size_bytes"], 8 << 20);
        assert_eq!((times("recorded: true"), times("recorded: false")), (1, 0));
        drop(second);
        wait_for_log("recorded: false");
        let third = record();
        // What it was given it can read, and not write.
        assert!(rustix::fs::fcntl_getfl(third.memory()).unwrap().contains(rustix::fs::OFlags::RDONLY));
        assert!(rustix::io::pwrite(third.memory(), b"x", 0).is_err());
    });
    supervisor.stop(&[]).unwrap();
}

#[test]
fn questions_for_the_curve_are_answered_one_after_the_other() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let control = world.path("control");
    meanwhile(&mut supervisor, || {
        let mut peers: Vec<_> = (0..20).map(|_| connect(&control)).collect();
        for _ in 0..5 {
            for (i, peer) in peers.iter_mut().enumerate() {
                writeln!(peer, "{{\"command\":\"curve\",\"goal\":{}}}", i as f64 / 20.0).unwrap();
            }
            for (i, peer) in peers.iter_mut().enumerate() {
                let mut line = String::new();
                BufReader::new(peer).read_line(&mut line).unwrap();
                let answer: serde_json::Value = serde_json::from_str(&line).unwrap();
                assert_eq!(answer["ok"]["goal"], i as f64 / 20.0, "{answer}");
            }
        }
        let mut one = connect(&control);
        assert_eq!(ask(&mut one, r#"{"command":"curve","goal":1.5}"#)["error"]["code"], "invalid");
    });
    supervisor.stop(&[]).unwrap();
}

/// A worker that was taken over says what nobody asked for, without end: the log stays short, and nothing comes of it.
#[test]
fn what_a_worker_says_unasked_changes_nothing_and_does_not_fill_the_log() {
    let world = World::new();
    let begun = Instant::now();
    let mut supervisor = world.serving("babbles");
    let control = world.path("control");
    meanwhile(&mut supervisor, || {
        while !world.logged("that was all") {
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut one = connect(&control);
        let stats = ask(&mut one, r#"{"command":"stats"}"#);
        assert_eq!((&stats["ok"]["engine"], &stats["ok"]["landlock"]), (&"threads".into(), &0.into()));
        assert_eq!(ask(&mut one, r#"{"command":"reset"}"#)["ok"]["generation"], 2);
    });
    // A hundred of its events in a second, and as many of what it says otherwise.
    let most = 2 * 100 * (begun.elapsed().as_secs() as usize + 2);
    let lines = world.lines.lock().unwrap().len();
    assert!((1..most).contains(&lines) && most < 3 * BABBLE as usize, "{lines} lines, {most} may be");
    supervisor.stop(&[]).unwrap();
}

#[test]
fn too_many_control_connections_are_told_so() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let control = world.path("control");
    meanwhile(&mut supervisor, || {
        let held: Vec<_> = (0..32).map(|_| connect(&control)).collect();
        let mut line = String::new();
        BufReader::new(connect(&control)).read_line(&mut line).unwrap();
        assert!(line.contains("\"busy\""), "{line}");
        drop(held);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !ask_once(&control).contains("\"ok\"") {
            assert!(Instant::now() < deadline, "the places were not given free");
        }
    });
    supervisor.stop(&[]).unwrap();
}

fn ask_once(control: &PathBuf) -> String {
    let mut stream = connect(control);
    let _ = stream.write_all(b"{\"command\":\"ping\"}\n");
    greeting(&stream)
}

#[test]
fn clients_beyond_the_bound_are_turned_away_and_the_vmm_is_not() {
    let world = World::new();
    let mut supervisor = world.serving("serves");
    let (vhost, nbd) = (world.path("vhost"), world.path("nbd"));
    meanwhile(&mut supervisor, || {
        let held: Vec<_> = (0..16).map(|_| connect(&nbd)).collect();
        assert!(held.iter().all(|client| greeting(client).starts_with("Nbd")));
        assert_eq!(greeting(&connect(&nbd)), "");
        // The stand-in refuses it, by then for its own reasons: it got that far.
        assert_eq!(greeting(&connect(&vhost)), "");
    });
    assert!(world.logged("16 NBD clients are connected") && world.logged("refused: a VMM is connected"));
    supervisor.stop(&[]).unwrap();
}

#[test]
fn a_worker_that_does_not_come_up_is_an_error_that_says_why() {
    for (role, why) in [("fails", "no io_uring on this host"), ("exits", "before it served (exit status: 3)")]
    {
        let world = World::new();
        let mut supervisor = world.start(role, world.options()).unwrap();
        let error = supervisor.ready(&[]).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Internal);
        assert!(error.to_string().contains(why), "{role}: {error}");
        drop(supervisor);
        assert_eq!(world.left(), ["base.raw"]);
    }
}

#[test]
fn a_worker_that_closes_its_channel_is_ended() {
    let world = World::new();
    let mut supervisor = world.start("closes", world.options()).unwrap();
    let pid = supervisor.report().worker_pid;
    let error = supervisor.ready(&[]).unwrap_err();
    assert!(error.to_string().contains("closed its channel"), "{error}");
    assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
}

#[test]
fn a_worker_that_does_not_stop_is_ended_at_the_second_signal() {
    let world = World::new();
    let mut supervisor = world.serving("hangs");
    let pid = supervisor.report().worker_pid;
    let (mut signal, stop) = UnixStream::pair().unwrap();
    signal.write_all(b".").unwrap();
    let begun = Instant::now();
    supervisor.stop(&[stop.as_fd()]).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
    assert_eq!(world.left(), ["base.raw"]);
}

#[test]
fn each_mode_gets_what_it_has() {
    for (mode, shape) in [(Mode::Ram, 4), (Mode::Overflow, 4), (Mode::Direct, 4), (Mode::RamOverflow, 5)] {
        let world = World::new();
        let mut supervisor = world.start("serves", world.options_in(mode)).unwrap();
        supervisor.ready(&[]).unwrap();
        let line = world.lines.lock().unwrap()[0].clone();
        assert_eq!(line.split(' ').count(), 2 + shape, "{line}");
        if mode == Mode::Direct {
            // The disk, and a block that it never uses; then its lifeline.
            assert!(line.ends_with(&format!(" {}+ 4096+", 8388608 + 4096)), "{line}");
        }
        supervisor.stop(&[]).unwrap();
    }
    let world = World::new();
    let named = |mode| ServeSettings {
        disk: Some(world.path("disk")),
        overflow_dir: None,
        image: (mode == Mode::Persistent).then(|| world.path("base.raw")),
        ..world.options_in(mode)
    };
    let mut supervisor = world.start("serves", named(Mode::Persistent)).unwrap();
    supervisor.ready(&[]).unwrap();
    // In front of the disk its header and maps.
    assert!(world.logged(&format!(" {}+ 4096+", (516 << 20) + 8388608 + 4096)));
    supervisor.stop(&[]).unwrap();
    drop(supervisor);
    std::fs::copy(world.path("base.raw"), world.path("disk")).unwrap();
    let mut supervisor = world.start("serves", named(Mode::Ephemeral)).unwrap();
    assert!(world.path("disk").exists(), "nobody serves it yet");
    supervisor.ready(&[]).unwrap();
    assert!(!world.path("disk").exists());
    // In the place of the image the disk itself.
    assert!(world.logged(&format!(" {0}+ {0}+ 4096+", 8388608 + 4096)));
    supervisor.stop(&[]).unwrap();
}

#[test]
fn an_error_leaves_no_file_behind() {
    let world = World::new();
    std::fs::write(world.path("control"), "in the way").unwrap();
    let error = world.start("serves", world.options()).err().unwrap();
    assert_eq!(error.kind, ErrorKind::Create);
    assert_eq!(world.left(), ["base.raw", "control"]);
}
