//! The web console of a host of a fleet, in a real browser: `console/e2e/fleet.mjs` has what is done there.
//!
//! Invariant: the browser shares the network of the test, in which nobody else is.

use crate::world::{Host, World};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The sources of the console.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../console")
}

/// Whether browser and scripts can be had here. If not, it is said.
fn can_be_had() -> bool {
    if !Path::new("/usr/bin/chromium").exists() {
        spillway_testkit::skip("Debian's chromium is not installed: run 'make install-deps'");
        return false;
    }
    let installed = Command::new(sources().join("../scripts/console")).arg("--install").status().unwrap();
    match installed.code() {
        Some(0) => true,
        Some(77) => {
            spillway_testkit::skip("npm is not installed: run 'make install-deps'");
            false
        }
        failed => panic!("scripts/console --install: {failed:?}"),
    }
}

/// `spillway console` of a host, and the address that it has printed.
struct Console {
    program: Child,
    url: String,
}

impl Console {
    fn of(host: &Host) -> Console {
        let mut program = Command::new(spillway_testkit::disk::program().unwrap())
            .args(["console", "--json"])
            .env("SPILLWAY_SOCKET", host.socket())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(program.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
        Console { program, url: said["url"].as_str().unwrap().to_owned() }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.program.kill().unwrap();
        self.program.wait().unwrap();
    }
}

/// The pages show hosts and shares, a click cordons a host, and the machines and consoles of another host are shown and used.
#[test]
fn the_console_of_a_host_shows_the_fleet_and_its_other_hosts() {
    // Before the test leaves the host's network: what is missing may have to be got.
    if !can_be_had() {
        return;
    }
    let Some(world) = World::new(2) else { return };
    world.import("tiny", "v1");
    world.create("desk", &world.spec("tiny:1", 4, json!({})));
    world.until("all machines are ready", |world| world.ready_count("desk") == 4);
    let console = Console::of(&world.hosts[0]);
    let done = Command::new("node")
        .arg(sources().join("e2e/fleet.mjs"))
        .env("SPILLWAY_CONSOLE_URL", &console.url)
        .env("SPILLWAY", spillway_testkit::disk::program().unwrap())
        .env("SPILLWAY_SOCKET", world.hosts[0].socket())
        .output()
        .unwrap();
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (steps, errors) = (said(&done.stdout), said(&done.stderr));
    assert!(done.status.success(), "fleet.mjs: {}\n{errors}\n{steps}", done.status);
    println!("{steps}");
}
