//! The console's page in Cockpit: its package, in the Cockpit of Debian without a login, in a real browser. `console/e2e/cockpit.mjs` has
//! what is done there.
//!
//! Invariant: Cockpit listens on the loopback interface alone, and everything of it ends with its test.

use crate::browser;
use crate::world::World;
use rustix::process::{Pid, Signal, kill_process};
use spillway_testkit::has_program;
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Nobody's user and group in Debian.
const NOBODY: u32 = 65534;

/// Cockpit's server, of which only the program may be installed.
fn server() -> Option<PathBuf> {
    let taken = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/tools/cockpit-ws");
    [PathBuf::from("/usr/lib/cockpit/cockpit-ws"), taken].into_iter().find(|program| program.exists())
}

/// Cockpit with a session of the user who runs it, and with the package of the console.
struct Cockpit {
    server: Child,
    url: String,
}

impl Cockpit {
    /// `None`: it cannot be had here, which is said.
    fn new(world: &World, socket: &Path, is_nobody: bool) -> Option<Cockpit> {
        let server = server().filter(|_| Path::new("/usr/share/cockpit/shell").exists());
        let Some(server) = server.filter(|_| has_program("cockpit-bridge") && has_program("dpkg-deb")) else {
            spillway_testkit::skip("Cockpit is not installed: run 'make install-deps'");
            return None;
        };
        install(world, socket);
        // A port that was free a moment ago.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new(server);
        command
            .args(["--no-tls", "--address", "127.0.0.1", "--local-session=/usr/bin/cockpit-bridge"])
            .args(["--port", &port.to_string()])
            .env("XDG_DATA_DIRS", format!("{}:/usr/share", world.path("package/usr/share").display()))
            .env("XDG_CONFIG_DIRS", world.path("etc"))
            .env("HOME", world.path("home"))
            // Otherwise the bridge starts an agent, which outlives it.
            .env("SSH_AUTH_SOCK", world.path("no-agent"))
            .current_dir("/")
            .stdout(Stdio::null());
        if is_nobody {
            command.uid(NOBODY).gid(NOBODY);
        }
        let mut cockpit =
            Cockpit { server: command.spawn().unwrap(), url: format!("http://127.0.0.1:{port}/") };
        let listens = || TcpStream::connect(("127.0.0.1", port)).ok();
        let ready = spillway_testkit::process::wait_until(Duration::from_secs(60), listens);
        assert!(ready.is_some(), "cockpit-ws does not listen: {:?}", cockpit.server.try_wait());
        Some(cockpit)
    }

    /// Does what `console/e2e/cockpit.mjs` says, to the end that is expected.
    fn browse(&self, world: &World, expected: &str) {
        let mut script = browser::script("cockpit.mjs", &self.url);
        browser::finish(script.arg(expected).env("SPILLWAY_SOCKET", world.path("sock")));
    }
}

impl Drop for Cockpit {
    fn drop(&mut self) {
        // It ends its bridge when it is asked to end.
        kill_process(Pid::from_child(&self.server), Signal::TERM).unwrap();
        self.server.wait().unwrap();
    }
}

/// Unpacks the package, and sets what an administrator sets for a daemon with another socket.
fn install(world: &World, socket: &Path) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/deb-cockpit");
    let made = Command::new(script).arg("--out").arg(world.path("deb")).args(["--compress", "none"]).output();
    let made = made.unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let package = String::from_utf8(made.stdout).unwrap();
    let unpack = Command::new("dpkg-deb").arg("-x").arg(package.trim()).arg(world.path("package")).status();
    assert!(unpack.unwrap().success());
    // The program is not installed here: no condition.
    let settings = serde_json::json!({ "conditions": [], "config": { "socket": socket } });
    std::fs::create_dir_all(world.path("etc/cockpit")).unwrap();
    std::fs::write(world.path("etc/cockpit/spillway.override.json"), settings.to_string()).unwrap();
}

#[test]
fn the_console_works_in_cockpit() {
    if !browser::can_be_had() {
        return;
    }
    let Some(world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    let options = ["--image", "golden", "--ready", "serial:^WORKS", "--ram", "4M", "--display", "vnc"];
    world.catalog("desk", 1, &options);
    std::fs::create_dir_all(world.path("state/reports/first")).unwrap();
    let report = "<!doctype html><title>r</title><style>h1 { color: #123456 }</style><h1>A report</h1>";
    std::fs::write(world.path("state/reports/first/report.html"), report).unwrap();
    let Some(cockpit) = Cockpit::new(&world, &world.path("sock"), false) else { return };
    cockpit.browse(&world, "works");
}

#[test]
fn in_cockpit_the_page_says_what_is_missing() {
    if !browser::can_be_had() {
        return;
    }
    let Some(world) = World::new("none") else { return };
    {
        let Some(cockpit) = Cockpit::new(&world, &world.path("elsewhere"), false) else { return };
        cockpit.browse(&world, "Nothing answers at");
    }
    let Some(cockpit) = Cockpit::new(&world, &world.path("sock"), true) else { return };
    cockpit.browse(&world, "You may not use");
}
