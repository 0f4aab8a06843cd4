//! Who may do what at a control socket that is open to other users.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{Server, World, finishes, is_root, refuses, spillway};
use serde_json::Value;
use spillway_testkit::skip;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const NOBODY: u32 = 65534;

#[test]
fn only_the_user_that_serves_and_root_choose_what_runs() {
    if !is_root() {
        return skip("only root can act as another user");
    }
    let world = World::new();
    let binary = world.program_for_all();
    let serves = binary.with_file_name("spillway-worker");
    let control = world.path("control");
    // A program that would leave a trace, were it ever started.
    let (theirs, trace) = (world.path("theirs"), world.path("trace"));
    std::fs::write(&theirs, format!("#!/bin/sh\necho started >{}\n", trace.display())).unwrap();
    std::fs::set_permissions(&theirs, PermissionsExt::from_mode(0o755)).unwrap();

    let ask = |user: u32, command: &str| {
        let mut ask = Command::new(&binary);
        ask.uid(user).gid(user).arg(command).arg(&control);
        ask
    };
    let worker = |user: u32| -> Value {
        let (code, out, err) = finishes(ask(user, "stats").arg("--json"));
        assert_eq!((code, err.as_str()), (0, ""));
        serde_json::from_str::<Value>(&out).unwrap()["worker_pid"].clone()
    };
    let upgrade = |user: u32, to: &Path| {
        let mut upgrade = ask(user, "upgrade");
        upgrade.arg("--binary").arg(to);
        upgrade
    };

    let server = Server::start(
        spillway()
            .arg("serve")
            .arg("--image")
            .arg(world.path("base.raw"))
            .args(["--mode", "ram", "--socket-mode", "0666", "--nbd"])
            .arg(world.path("nbd"))
            .arg("--control")
            .arg(&control),
    );
    // The socket is theirs to look through, and no more than that.
    let first = worker(NOBODY);
    for program in [&theirs, &serves] {
        refuses(
            &mut upgrade(NOBODY, program),
            75,
            &["an upgrade needs the user that serves the disk, or root"],
        );
    }
    assert!(!trace.exists(), "it was started");
    assert_eq!(worker(NOBODY), first);
    // The one who serves may.
    let (code, _, err) = finishes(&mut upgrade(0, &serves));
    assert_eq!((code, err.as_str()), (0, ""));
    assert_ne!(worker(NOBODY), first);
    let (code, text) = server.end(rustix::process::Signal::TERM);
    assert_eq!(code, 0, "{text}");
}

/// root serves all users' disks as well as its own; any other only its own.
#[test]
fn root_may_choose_for_a_user_that_serves() {
    if !is_root() {
        return skip("only root can act as another user");
    }
    let world = World::new();
    let binary = world.program_for_all();
    std::fs::set_permissions(world.dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let control = world.path("control");
    let mut serve = Command::new(&binary);
    serve.uid(NOBODY).gid(NOBODY).arg("serve").arg("--image").arg(world.path("base.raw"));
    serve.args(["--mode", "ram", "--socket-mode", "0666", "--nbd"]).arg(world.path("nbd"));
    let _server = Server::start(serve.arg("--control").arg(&control));
    for (user, may) in [(NOBODY - 1, false), (NOBODY, true), (0, true)] {
        let mut upgrade = Command::new(&binary);
        upgrade.uid(user).gid(user).arg("upgrade").arg(&control);
        let (code, _, err) = finishes(&mut upgrade);
        assert_eq!(code == 0, may, "user {user}: {err}");
    }
}
