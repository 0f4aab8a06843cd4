//! `spillway` and a daemon that it asks over TCP: whom it trusts, who is let in, and what has to be done on the host itself.
#![allow(clippy::unwrap_used)]

mod daemon_world;

use daemon_world::{World, finishes};
use serde_json::Value;
use sha2::{Digest, Sha256};
use spillway_testkit::certificate;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// Only its owner can read it.
fn private(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// A daemon that listens as `localhost`; the token of each role is its word. `None`: no openssl here, which is said.
fn remote(is_ca: bool) -> Option<World> {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let [cert, key] = ["cert", "key"].map(|name| dir.path().join(name));
    if let Err(e) = certificate::make("localhost", is_ca, &cert, &key) {
        spillway_testkit::skip(&format!("openssl makes no certificate here: {e:#}"));
        return None;
    }
    Some(World::with(|folder| {
        for name in ["cert", "key"] {
            std::fs::copy(dir.path().join(name), folder.join(name)).unwrap();
        }
        let roles = ["read", "admin"].map(|role| format!("{role} {role}er {:x}\n", Sha256::digest(role)));
        private(&folder.join("tokens"), &roles.concat());
        let at = |name: &str| folder.join(name).display().to_string();
        let files = ["--tls-cert", &at("cert"), "--tls-key", &at("key"), "--tokens", &at("tokens")];
        ["--listen", "127.0.0.1:0"].into_iter().chain(files).map(str::to_owned).collect()
    }))
}

/// Where it listens: as the host that its certificate names, or another name of the same.
fn address(world: &World, host: &str) -> String {
    let port = world.ready_line.trim().rsplit_once(':').unwrap().1;
    format!("https://{host}:{port}")
}

/// The program, which will ask there with a token and the daemon's own certificate.
fn command(world: &World, address: &str, token: &str, arguments: &[&str]) -> Command {
    let mut command = world.command(arguments);
    command
        .env("SPILLWAY_SOCKET", address)
        .env("SPILLWAY_TOKEN", token)
        .env("SPILLWAY_CA", world.path("cert"));
    command
}

/// Asserts one line of refusal: its code, and words in it.
#[track_caller]
fn refuses(command: &mut Command, code: i32, words: &[&str]) {
    let (found, out, err) = finishes(command);
    assert!(found == code && out.is_empty(), "{command:?}: {found} {out}{err}");
    assert!(err.starts_with("spillway: error: ") && err.lines().count() == 1, "{command:?}: {err}");
    assert!(words.iter().all(|word| err.contains(word)), "{words:?} are not all in: {err}");
}

#[test]
fn another_hosts_daemon_is_asked_with_a_token() {
    let Some(world) = remote(false) else { return };
    let here = address(&world, "localhost");
    let ask = |token: &str, arguments: &[&str]| {
        let (code, out, err) = finishes(&mut command(&world, &here, token, arguments));
        assert_eq!((code, err.as_str()), (0, ""), "{arguments:?}: {out}");
        out
    };
    let file = world.path("a.raw");
    std::fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    let imported = ask("admin", &["image", "import", "debian", file.to_str().unwrap(), "--format", "raw"]);
    assert!(imported.contains("published"), "{imported}");
    ask("admin", &["catalog", "create", "desk", "--image", "debian", "--count", "2"]);
    for list in [["machine", "list"], ["catalog", "list"], ["image", "list"]] {
        assert_eq!(ask("read", &list), world.ok(&list));
    }
    // Options before variables, a token in a file before one that is wrong.
    private(&world.path("token"), "read\n");
    let mut explicit = world.command(&["machine", "show", "desk-001", "--json"]);
    explicit.args(["--socket", &here]).env("SPILLWAY_TOKEN", "wrong").env("SPILLWAY_CA", "/nonexistent");
    explicit.arg("--token-file").arg(world.path("token")).arg("--ca").arg(world.path("cert"));
    let (code, out, err) = finishes(&mut explicit);
    assert!(code == 0 && serde_json::from_str::<Value>(&out).unwrap()["number"] == 1, "{out}{err}");

    refuses(&mut command(&world, &here, "wrong", &["machine", "list"]), 77, &[&here, "token is not known"]);
    let create = ["catalog", "create", "x", "--image", "debian"];
    refuses(&mut command(&world, &here, "read", &create), 77, &["reader", "role 'admin'"]);
    refuses(&mut command(&world, &here, "admin", &["image", "show", "debain"]), 66, &["do you mean"]);
    // What is done on the host itself.
    for arguments in [&["doctor"][..], &["machine", "console", "desk-001"], &["machine", "stats", "desk-001"]]
    {
        refuses(&mut command(&world, &here, "admin", arguments), 2, &[&here, "own host", "socket"]);
    }
    let relative = ["image", "import", "debian", "a.raw", "--format", "raw"];
    refuses(&mut command(&world, &here, "admin", &relative), 2, &["a.raw", "whole path"]);
}

#[test]
fn nothing_is_said_to_who_cannot_be_trusted() {
    let Some(world) = remote(false) else { return };
    let here = address(&world, "localhost");
    let list = ["machine", "list"];
    let ask = |address: &str| command(&world, address, "read", &list);
    refuses(&mut ask(&here.replace("https", "http")), 2, &["http://", "say https"]);
    refuses(&mut ask("ssh://localhost"), 2, &["https://HOST:PORT"]);
    refuses(&mut ask(&address(&world, "127.0.0.1")), 77, &["not trusted", "localhost"]);
    let other = world.path("other");
    certificate::make("localhost", false, &other, &world.path("other.key")).unwrap();
    refuses(ask(&here).arg("--ca").arg(&other), 77, &["not trusted", "--ca", other.to_str().unwrap()]);
    refuses(ask(&here).arg("--ca").arg("/nonexistent"), 2, &["/nonexistent"]);
    refuses(ask(&here).arg("--ca").arg(world.path("key")), 2, &["no certificate in it"]);

    // Who asks is said, and by nobody else's token.
    refuses(ask(&here).env_remove("SPILLWAY_TOKEN"), 2, &["SPILLWAY_TOKEN", "--token-file"]);
    refuses(ask(&here).env("SPILLWAY_TOKEN", "two words"), 2, &["SPILLWAY_TOKEN", "one word"]);
    let token = world.path("token");
    std::fs::write(&token, "read").unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o644)).unwrap();
    refuses(ask(&here).arg("--token-file").arg(&token), 2, &["chmod 0600"]);
    let socket = world.path("sock").display().to_string();
    for option in ["--token-file", "--ca"] {
        refuses(ask(&socket).arg(option).arg(&token), 2, &[option, "leave one"]);
    }
    // Variables are for whom they are for.
    assert_eq!(finishes(&mut ask(&socket)).0, 0);

    // Nobody there; somebody who speaks no TLS.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let there = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let received = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = [0; 4096];
        let n = stream.read(&mut buffer).unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        buffer[..n].to_vec()
    });
    refuses(&mut ask(&there), 69, &[&there, "no TLS"]);
    assert!(!received.join().unwrap().windows(4).any(|word| word == b"read"));
    refuses(&mut ask(&there), 69, &[&there, "does spillwayd run there"]);
    refuses(&mut ask("https://no-such-host.invalid:9443"), 69, &["no-such-host.invalid"]);
}

#[test]
fn a_certificate_of_a_ca_is_no_servers() {
    let Some(world) = remote(true) else { return };
    let mut ask = command(&world, &address(&world, "localhost"), "read", &["machine", "list"]);
    refuses(&mut ask, 77, &["not trusted", "CA:FALSE"]);
}

/// What somebody exports who may not see all of it does not replace what they have not seen.
#[test]
fn an_export_without_secrets_is_not_applied() {
    let Some(world) = remote(false) else { return };
    let here = address(&world, "localhost");
    let file = world.path("a.raw");
    std::fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    world.ok(&["image", "import", "debian", file.to_str().unwrap(), "--format", "raw"]);
    let secret = world.path("secret");
    std::fs::write(&secret, "#cloud-config\npassword: hunter2\n").unwrap();
    let secret = secret.display().to_string();
    world.ok(&["catalog", "create", "desk", "--image", "debian", "--count", "2", "--user-data", &secret]);
    let before = world.ok(&["catalog", "export"]);
    for format in ["toml", "json"] {
        let export = ["catalog", "export", "--format", format];
        let (code, out, err) = finishes(&mut command(&world, &here, "read", &export));
        assert!(code == 0 && err.contains("warning: desk: user_data is left out"), "{err}");
        assert!(out.contains("redacted") && !out.contains("hunter2"), "{out}");
        let exported = world.path(&format!("exported.{format}")).display().to_string();
        std::fs::write(&exported, out.replace("2", "3")).unwrap();
        for verb in ["apply", "diff"] {
            let mut asked = command(&world, &here, "admin", &["catalog", verb, "-f", &exported]);
            refuses(&mut asked, 2, &["catalog desk: user_data was left out", "role 'operate'"]);
        }
    }
    // What stood there once is refused too, by the daemon.
    let once = before.replace("#cloud-config\npassword: hunter2\n", "(not for the role 'read')");
    assert_ne!(once, before);
    let exported = world.path("once.toml").display().to_string();
    std::fs::write(&exported, once.replace("\"\"\"\n(", "\"\"\"(")).unwrap();
    let (code, out, err) =
        finishes(&mut command(&world, &here, "admin", &["catalog", "apply", "-f", &exported]));
    assert!(code == 2 && out.contains("stays as it is") && err.contains("user_data"), "{code} {out}{err}");
    assert_eq!(world.ok(&["catalog", "export"]), before);
}
