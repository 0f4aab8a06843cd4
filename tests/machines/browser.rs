//! The web console in a real browser, before a real daemon and real guests: `console/e2e` has what is done there.
//!
//! Invariant: what a browser does here goes to this daemon alone; a script that ends with an error fails its test with all it has said.

use crate::world::World;
use rustix::thread::{UnshareFlags, unshare_unsafe};
use serde_json::Value;
use sha2::{Digest, Sha256};
use spillway_testkit::certificate;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// The sources of the console.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../console")
}

/// Whether browser and scripts can be had here. If not, it is said. What this thread starts then is alone on its network.
pub fn can_be_had() -> bool {
    static INSTALLED: OnceLock<Option<i32>> = OnceLock::new();
    if !Path::new("/usr/bin/chromium").exists() {
        spillway_testkit::skip("Debian's chromium is not installed: run 'make install-deps'");
        return false;
    }
    let install =
        || Command::new(sources().join("../scripts/console")).arg("--install").status().unwrap().code();
    match INSTALLED.get_or_init(install) {
        Some(0) => {
            leave_the_hosts_network();
            true
        }
        Some(77) => {
            spillway_testkit::skip("npm is not installed: run 'make install-deps'");
            false
        }
        failed => panic!("scripts/console --install: {failed:?}"),
    }
}

/// From here on this thread, and what it starts, has a network of its own, in which nobody else is. A browser gives up its requests when
/// an interface of the host comes or goes, as many do in other tests.
fn leave_the_hosts_network() {
    // SAFETY: no other thread depends on which network this one has.
    #[expect(unsafe_code, reason = "rustix marks it so for what else can be left")]
    let left = unsafe { unshare_unsafe(UnshareFlags::NEWNET) };
    match left {
        Ok(()) => {
            let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
            assert!(up.success(), "ip link set lo up: {up}");
        }
        Err(e) => println!("the browser shares the host's network, whose changes disturb it: {e}"),
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

/// Does what a script of `console/e2e` says, in a browser that is let in by `spillway console`.
fn browse(world: &mut World, script: &str) {
    let console = Console::of(world);
    run(world, script, &[("SPILLWAY_CONSOLE_URL", &console.url)]);
}

/// Runs a script. It may ask for what it cannot do itself, in lines that begin with "ask: ", and goes on when that is done.
fn run(world: &mut World, script: &str, environment: &[(&str, &str)]) {
    let program = spillway_testkit::disk::program().unwrap();
    let optimised = program.parent().is_some_and(|dir| dir.ends_with("release"));
    let mut node = Command::new("node")
        .arg(sources().join("e2e").join(script))
        .envs(environment.iter().copied())
        .env("SPILLWAY", program)
        .env("SPILLWAY_SOCKET", world.path("sock"))
        .env("SPILLWAY_KERNEL", world.path("vmlinuz"))
        .env("SPILLWAY_INITRD", world.path("initrd"))
        .env("SPILLWAY_DAEMON_PID", world.daemon_pid().to_string())
        .env("SPILLWAY_MACHINES", world.machines())
        .env("SPILLWAY_BUDGETS", if optimised { "1" } else { "0" })
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut errors = node.stderr.take().unwrap();
    let errors = std::thread::spawn(move || {
        let mut said = String::new();
        errors.read_to_string(&mut said).map(|_| said)
    });
    let mut answers = node.stdin.take().unwrap();
    let mut said = String::new();
    for line in BufReader::new(node.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        let Some(asked) = line.strip_prefix("ask: ") else {
            said += &format!("{line}\n");
            continue;
        };
        match asked {
            "kill the daemon" => world.kill_daemon(),
            "start the daemon" => world.start_daemon(),
            "remove the token operate" => {
                write_tokens(world, &["read", "admin"]);
                world.reload_daemon();
            }
            other => panic!("{script} asks for {other:?}"),
        }
        answers.write_all(b"done\n").unwrap();
    }
    let status = node.wait().unwrap();
    println!("{script}:\n{said}");
    let errors = errors.join().unwrap().unwrap();
    // In this order: whoever has only the first lines knows the step, and the error.
    let step = said.lines().last().unwrap_or("nothing was done");
    let error = errors.find("failed: ").or_else(|| errors.find("Error")).map_or("", |at| &errors[at..]);
    let error: String = error.lines().take(30).map(|line| format!("{line}\n")).collect();
    let steps = failed_steps(&said);
    assert!(status.success(), "{script}: {status}, at: {step}\n{error}{steps}\n{errors}\n{said}");
}

/// What a script says of the steps that failed (TAP: a line "not ok", and indented ones after it).
fn failed_steps(said: &str) -> String {
    let mut is_of_failed = false;
    let lines = said.lines().filter(|line| {
        is_of_failed = line.trim_start().starts_with("not ok") || is_of_failed && line.starts_with(' ');
        is_of_failed
    });
    lines.map(|line| format!("{line}\n")).collect()
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

#[test]
fn a_catalog_is_made_filled_sized_and_updated() {
    if !can_be_had() {
        return;
    }
    let Some(mut world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    world.import("golden", "version-2");
    browse(&mut world, "catalog.mjs");
}

/// A boot sector that says "UP" on the serial port, and then shows each key that is pressed, with the firmware's help. Its cursor is
/// hidden: it would blink.
const SHOWS_KEYS: [u8; 39] = [
    0xb8, 0xe3, 0x00, 0x31, 0xd2, 0xcd, 0x14, // mov ax, 0x00e3; xor dx, dx; int 0x14
    0xb8, 0x55, 0x01, 0xcd, 0x14, // mov ax, 0x0155 ("U"); int 0x14
    0xb8, 0x50, 0x01, 0xcd, 0x14, // mov ax, 0x0150 ("P"); int 0x14
    0xb8, 0x0a, 0x01, 0xcd, 0x14, // mov ax, 0x010a (a new line); int 0x14
    0xb4, 0x01, 0xb9, 0x07, 0x26, 0xcd, 0x10, // mov ah, 1; mov cx, 0x2607; int 0x10
    0xb4, 0x00, 0xcd, 0x16, // mov ah, 0; int 0x16
    0xb4, 0x0e, 0xcd, 0x10, // mov ah, 0x0e; int 0x10
    0xeb, 0xf6, // jmp back to int 0x16's mov
];

#[test]
fn a_released_machine_has_forgotten_and_a_key_changes_its_screen() {
    if !can_be_had() {
        return;
    }
    let Some(mut world) = World::new("qemu") else { return };
    world.import("golden", "version-1");
    world.catalog("desk", 1, &["--image", "golden", "--ready", "serial:^WORKS"]);
    let mut disk = SHOWS_KEYS.to_vec();
    disk.resize(510, 0);
    disk.extend([0x55, 0xaa]);
    disk.resize(1 << 20, 0);
    std::fs::write(world.path("keys.raw"), disk).unwrap();
    world.ok(&["image", "import", "keys", world.path("keys.raw").to_str().unwrap(), "--format", "raw"]);
    let options = [
        "--image",
        "keys",
        "--display",
        "vnc",
        "--memory",
        "64M",
        "--network",
        "none",
        "--ready",
        "serial:UP",
    ];
    world.ok(&[&["catalog", "create", "screen", "--count", "1"], &options[..]].concat());
    world.ok(&["machine", "start", "--all"]);
    browse(&mut world, "machine.mjs");
}

/// What consoles cost the daemon, and many machines the browser. The budgets hold as they are for optimised programs (`SPILLWAY_PROGRAM`);
/// for others several times as much is allowed.
#[test]
fn consoles_cost_little_with_many_machines() {
    if !can_be_had() {
        return;
    }
    let Some(mut world) = World::new("none") else { return };
    world.import("golden", "version-1");
    let image = ["--image", "golden", "--naming", "many-####"];
    let tiers = ["--count", "200", "--ram", "1M", "--overflow", "16M"];
    world.ok(&[&["catalog", "create", "many"], &image[..], &tiers].concat());
    browse(&mut world, "many.mjs");
}

/// A daemon with three machines, and a browser with an empty cache.
#[test]
fn the_first_paint_comes_soon() {
    if !can_be_had() {
        return;
    }
    let Some((mut world, _)) = over_tls() else { return };
    browse(&mut world, "paint.mjs");
}

/// Tokens of the names of their roles, each of which is also its value.
fn write_tokens(world: &World, roles: &[&str]) {
    let line = |role: &&str| format!("{role} {role} {:x}\n", Sha256::digest(role));
    let file = world.path("tokens");
    std::fs::write(&file, roles.iter().map(line).collect::<String>()).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A daemon with an image, three machines of a catalog, and a listener over TLS, and the console's address there. `None`: that
/// cannot be had here, which is said.
fn over_tls() -> Option<(World, String)> {
    over_tls_with(&[])
}

/// The same, with more options of the daemon.
fn over_tls_with(more: &[&str]) -> Option<(World, String)> {
    let mut world = World::new("none")?;
    let [cert, key, tokens] = ["cert", "key", "tokens"].map(|name| world.path(name).display().to_string());
    if let Err(e) = certificate::make("localhost", false, Path::new(&cert), Path::new(&key)) {
        spillway_testkit::skip(&format!("openssl makes no certificate here: {e:#}"));
        return None;
    }
    write_tokens(&world, &["read", "operate", "admin"]);
    let port = free_port();
    let listen = format!("127.0.0.1:{port}");
    let options = ["--listen", &listen, "--tls-cert", &cert, "--tls-key", &key, "--tokens", &tokens];
    world.options.extend(options.iter().chain(more).map(|&option| option.to_owned()));
    world.kill_daemon();
    world.start_daemon();
    world.import("golden", "version-1");
    let image = ["--image", "golden", "--count", "3"];
    world.ok(&[&["catalog", "create", "desk"], &image[..], &["--ram", "8M", "--overflow", "64M"]].concat());
    world.ok(&["machine", "start", "--all", "--wait"]);
    Some((world, format!("https://localhost:{port}/console/")))
}

/// Over TLS with a token, as from an operator's desk.
#[test]
fn every_page_is_clean_and_behaves() {
    if !can_be_had() {
        return;
    }
    let port = free_port().to_string();
    let rule = format!("http://127.0.0.1:{port},local");
    let Some((mut world, url)) = over_tls_with(&["--import-from", &rule]) else { return };
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/studies/seed-003");
    let reports = world.path("state/reports/seed-003");
    world.ok(&["lab", "report", results.to_str().unwrap(), "--out", reports.to_str().unwrap()]);
    let [file, registries] = ["image.raw", "registries"].map(|name| world.path(name).display().to_string());
    let given = [
        ("SPILLWAY_IMAGE_FILE", file.as_str()),
        ("SPILLWAY_REGISTRY_FOLDER", &registries),
        ("SPILLWAY_DOWNLOAD_PORT", &port),
        ("SPILLWAY_REPORT", "seed-003"),
    ];
    run(&mut world, "run.mjs", &[&with_token(&url)[..], &given].concat());
}

#[test]
fn who_is_not_let_in_does_nothing() {
    if !can_be_had() {
        return;
    }
    let Some((mut world, url)) = over_tls() else { return };
    let hostile = world.path("<img src=x onerror=alert(1)>.raw");
    std::fs::write(&hostile, vec![0; 1 << 20]).unwrap();
    world.ok(&["image", "import", "hostile", hostile.to_str().unwrap(), "--format", "raw"]);
    let console = Console::of(&world);
    let [cert, key] = ["cert", "key"].map(|name| world.path(name).display().to_string());
    let tls = [("SPILLWAY_TLS_URL", url.as_str()), ("SPILLWAY_CERT", &cert), ("SPILLWAY_KEY", &key)];
    run(&mut world, "doors.mjs", &[&tls[..], &[("SPILLWAY_CONSOLE_URL", &console.url)]].concat());
}

#[test]
fn a_daemon_that_dies_under_open_pages_is_missed_by_none() {
    if !can_be_had() {
        return;
    }
    let Some((mut world, _)) = over_tls() else { return };
    browse(&mut world, "away.mjs");
}

/// What a page over TLS needs to sign in.
fn with_token(url: &str) -> [(&str, &str); 2] {
    [("SPILLWAY_CONSOLE_URL", url), ("SPILLWAY_CONSOLE_TOKEN", "admin")]
}

/// Events come by streams there, and the daemon knows no session after its death.
#[test]
fn a_daemon_that_dies_over_tls_is_missed_by_none() {
    if !can_be_had() {
        return;
    }
    let Some((mut world, url)) = over_tls() else { return };
    run(&mut world, "away.mjs", &with_token(&url));
}

#[test]
fn who_signs_in_again_goes_on_where_they_were() {
    if !can_be_had() {
        return;
    }
    let Some((mut world, url)) = over_tls() else { return };
    run(&mut world, "session.mjs", &with_token(&url));
}
