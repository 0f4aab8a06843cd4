//! `spillway` and `spillwayd` as people and scripts use them: words, JSON, exit codes.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use spillway_lab::disk;
use spillway_lab::process::wait_until;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

struct World {
    dir: tempfile::TempDir,
    daemon: Child,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let program = disk::program().unwrap().with_file_name("spillwayd");
        let mut daemon = Command::new(program);
        daemon.arg("--state").arg(dir.path().join("state")).arg("--socket").arg(dir.path().join("sock"));
        let daemon =
            daemon.stdout(std::process::Stdio::null()).spawn().expect("'make test' builds spillwayd");
        let world = World { dir, daemon };
        let listens = || world.path("sock").exists().then_some(());
        wait_until(Duration::from_secs(20), listens).expect("spillwayd does not listen");
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Exit code, standard output, standard error.
    fn spillway(&self, arguments: &[&str]) -> (i32, String, String) {
        let mut command = Command::new(disk::program().unwrap());
        command.args(arguments).env("SPILLWAY_SOCKET", self.path("sock"));
        let done = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (done.status.code().unwrap(), text(done.stdout), text(done.stderr))
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let (code, out, err) = self.spillway(arguments);
        assert_eq!(code, 0, "{arguments:?}: {out}{err}");
        out
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[arguments, &["--json"]].concat())).unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

#[test]
fn images_and_catalogs_from_the_command_line() {
    let world = World::new();
    let file = world.path("a.qcow2").display().to_string();
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &file, "64M"]).status();
    assert!(made.unwrap().success());
    let imported = world.ok(&["image", "import", "debian", &file, "--format", "qcow2"]);
    assert!(imported.contains("published") && imported.contains("64.0 MiB"), "{imported}");
    let second = world.json(&["image", "import", "debian", &file, "--format", "qcow2"]);
    assert_eq!(second["versions"][1]["version"], 2);
    world.ok(&["image", "publish", "debian:2"]);
    world.ok(&["image", "tag", "debian:1", "old"]);
    let images = world.json(&["image", "list"]);
    assert_eq!(images["items"][0]["published"], 2);
    assert_eq!(images["items"][0]["tags"]["old"], 1);
    assert!(world.ok(&["image", "verify", "debian"]).contains("debian:2 is as it was imported"));

    world.ok(&[
        "catalog", "create", "desk", "--image", "debian", "--count", "12", "--ram", "512M", "--label",
        "team=x",
    ]);
    let catalog = world.json(&["catalog", "show", "desk"]);
    assert_eq!(
        (&catalog["spec"]["ram_bytes"], &catalog["version"]),
        (&Value::from(512 << 20), &Value::from(2))
    );
    assert_eq!(world.json(&["machine", "list", "--catalog", "desk"])["items"].as_array().unwrap().len(), 12);
    world.ok(&["catalog", "scale", "desk", "3"]);
    assert_eq!(world.ok(&["machine", "list"]).lines().count(), 4, "and a line of titles");
    let (code, _, err) = world.spillway(&["catalog", "create", "x", "--image", "debian", "--reset", "never"]);
    assert!(code == 0 && err.contains("warning") && err.contains("lost when the host restarts"), "{err}");

    for (arguments, code, word) in [
        (vec!["image", "delete", "debian:1"], 75, "tagged 'old'"),
        (vec!["image", "delete", "debian:2"], 75, "published"),
        (vec!["image", "delete", "debian"], 75, "'desk'"),
        (vec!["image", "delete", "debain"], 66, "do you mean 'debian'?"),
        (vec!["image", "publish", "debian"], 2, "which version?"),
        (vec!["image", "import", "x", "/nonexistent", "--format", "raw"], 2, "/nonexistent"),
        (vec!["image", "import", "X", &file, "--format", "raw"], 2, "is no name"),
        (vec!["image", "import", "x", &file, "--format", "iso"], 2, "iso"),
        (vec!["catalog", "create", "desk", "--image", "debian"], 75, "already"),
        (vec!["catalog", "create", "y", "--image", "debian", "--mode", "persistent"], 2, "type dedicated"),
        (
            vec!["catalog", "create", "y", "--image", "debian", "--network", "bridge"],
            2,
            "user, none or bridge=NAME",
        ),
        (vec!["machine", "show", "desk-01"], 66, "desk-001"),
        (vec!["image", "list", "--socket", "/nonexistent"], 69, "is spillwayd running?"),
        (vec!["image"], 2, "import"),
    ] {
        let (found, out, err) = world.spillway(&arguments);
        assert!(found == code && out.is_empty() && err.contains(word), "{arguments:?}: {found} {out}{err}");
        assert_eq!(err.lines().count(), 1, "{arguments:?}: {err}");
    }
    let begun = world.json(&["image", "import", "debian", &file, "--format", "qcow2", "--no-wait"]);
    let id = begun["id"].to_string();
    assert!(world.ok(&["operation", "wait", &id]).contains("is done"));
    world.ok(&["operation", "cancel", &id]);
    assert!(
        world.ok(&["operation", "list"]).lines().any(|line| line.starts_with(&id) && line.ends_with("done"))
    );
    assert_eq!(world.spillway(&["operation", "cancel", "1"]).0, 66);
    world.ok(&["catalog", "delete", "desk"]);
    world.ok(&["catalog", "delete", "x"]);
    world.ok(&["image", "delete", "debian"]);
    assert_eq!(world.json(&["image", "list"])["items"], serde_json::json!([]));
}
