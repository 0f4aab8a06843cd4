//! The web console in a real browser, before a real daemon and real guests: `console/e2e` has what is done there.
//!
//! Invariant: what a browser does here goes to this daemon alone; a script that ends with an error fails its test with all it has said.

use crate::world::World;
use serde_json::Value;
use sha2::{Digest, Sha256};
use spillway_testkit::certificate;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// The sources of the console.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../console")
}

/// Whether browser and scripts can be had here. If not, it is said.
pub fn can_be_had() -> bool {
    static INSTALLED: OnceLock<Option<i32>> = OnceLock::new();
    if !Path::new("/usr/bin/chromium").exists() {
        spillway_testkit::skip("Debian's chromium is not installed: run 'make install-deps'");
        return false;
    }
    let install =
        || Command::new(sources().join("../scripts/console")).arg("--install").status().unwrap().code();
    match INSTALLED.get_or_init(install) {
        Some(0) => true,
        Some(77) => {
            spillway_testkit::skip("npm is not installed: run 'make install-deps'");
            false
        }
        failed => panic!("scripts/console --install: {failed:?}"),
    }
}

/// `spillway console` of a world, and the address that it has printed.
struct Console {
    program: Child,
    url: String,
}

impl Console {
    fn of(world: &World) -> Console {
        let mut program = Command::new(spillway_testkit::disk::program().unwrap())
            .args(["console", "--json"])
            .env("SPILLWAY_SOCKET", world.path("sock"))
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

/// A script of `console/e2e`, for a console at this address.
pub fn script(name: &str, url: &str) -> Command {
    let mut script = Command::new("node");
    script.arg(sources().join("e2e").join(name));
    script.env("SPILLWAY_CONSOLE_URL", url).env("SPILLWAY", spillway_testkit::disk::program().unwrap());
    script
}

/// Runs a script to its end, which has to be a good one.
pub fn finish(script: &mut Command) {
    let done = script.output().unwrap();
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        done.status.success(),
        "{script:?}: {}\n{}\n{}",
        done.status,
        said(&done.stdout),
        said(&done.stderr)
    );
}

/// Does what a script of `console/e2e` says, in a browser that is let in.
fn browse(world: &World, name: &str) {
    let console = Console::of(world);
    let mut script = script(name, &console.url);
    script.env("SPILLWAY_SOCKET", world.path("sock"));
    script.env("SPILLWAY_KERNEL", world.path("vmlinuz")).env("SPILLWAY_INITRD", world.path("initrd"));
    finish(&mut script);
}

#[test]
fn a_catalog_is_made_filled_sized_and_updated() {
    if !can_be_had() {
        return;
    }
    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    world.import("golden", "version-2");
    browse(&world, "catalog.mjs");
}

/// Over TLS with a token, as from an operator's desk.
#[test]
fn every_page_is_clean_and_behaves() {
    if !can_be_had() {
        return;
    }
    let Some(mut world) = World::new("none") else { return };
    let [cert, key, tokens] = ["cert", "key", "tokens"].map(|name| world.path(name).display().to_string());
    if let Err(e) = certificate::make("localhost", false, Path::new(&cert), Path::new(&key)) {
        return spillway_testkit::skip(&format!("openssl makes no certificate here: {e:#}"));
    }
    std::fs::write(&tokens, format!("admin admin {:x}\n", Sha256::digest("admin"))).unwrap();
    std::fs::set_permissions(&tokens, std::fs::Permissions::from_mode(0o600)).unwrap();
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let listen = format!("127.0.0.1:{port}");
    let options = ["--listen", &listen, "--tls-cert", &cert, "--tls-key", &key, "--tokens", &tokens];
    world.options.extend(options.map(str::to_owned));
    world.kill_daemon();
    world.start_daemon();
    world.import("golden", "version-1");
    world.ok(&[
        "catalog",
        "create",
        "desk",
        "--image",
        "golden",
        "--count",
        "3",
        "--ram",
        "8M",
        "--overflow",
        "64M",
    ]);
    world.ok(&["machine", "start", "--all", "--wait"]);
    let url = format!("https://localhost:{port}/console/");
    finish(script("run.mjs", &url).env("SPILLWAY_CONSOLE_TOKEN", "admin"));
}
