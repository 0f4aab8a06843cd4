//! What can be said on the command line, and what cannot. No disk is served here.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{World, finishes, is_root, refuses, spillway, worker_program};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// It is started by the programs that know how.
#[test]
fn the_program_that_serves_is_no_command() {
    for arguments in [&[][..], &["__worker"], &["serve"], &["serve", "{}"], &["--help"]] {
        refuses(Command::new(worker_program()).args(arguments), 2, &["spillway"]);
    }
}

#[test]
fn without_the_program_that_serves_there_is_an_error_that_says_where_it_was_looked_for() {
    let world = World::new();
    let alone = world.path("spillway");
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_spillway")).arg(&alone).status().unwrap().success());
    let here = world.dir.path().to_str().unwrap();
    let mut serve = Command::new(alone);
    serve.args(["serve", "--image", "x.raw", "--nbd", "n"]).env("PATH", worker_program().parent().unwrap());
    refuses(&mut serve, 69, &["spillway-worker", here, "/usr/lib/spillway", "install"]);
}

/// As after an upgrade of the package, to one that was started before.
#[test]
fn an_order_of_another_version_is_refused_in_words() {
    let (worker, own) = (worker_program(), env!("CARGO_PKG_VERSION"));
    let order =
        r#"{"order_version":99,"program_version":"9.8.7","settings":{"unheard_of":1},"output":"sung"}"#;
    let words = [worker.to_str().unwrap(), own, "9.8.7", "restart spillwayd"];
    refuses(Command::new(&worker).args(["serve", order]), 69, &words);
}

#[test]
fn a_program_that_somebody_else_can_change_is_not_executed() {
    let world = World::new();
    let binary = world.program_for_all();
    let serves = binary.with_file_name("spillway-worker");
    let refused = |words: &[&str]| {
        let mut serve = Command::new(&binary);
        serve.args(["serve", "--mode", "ram", "--nbd", "n", "--image"]).arg(world.path("base.raw"));
        refuses(&mut serve, 69, &[&[serves.to_str().unwrap(), "not trusted"], words].concat());
    };
    std::fs::set_permissions(&serves, PermissionsExt::from_mode(0o757)).unwrap();
    refused(&["every user can write to it", "chmod go-w"]);
    if is_root() {
        std::fs::set_permissions(&serves, PermissionsExt::from_mode(0o775)).unwrap();
        refused(&["group 0 can write to it", "chmod go-w"]);
        std::fs::set_permissions(&serves, PermissionsExt::from_mode(0o755)).unwrap();
        std::os::unix::fs::chown(&serves, Some(65534), None).unwrap();
        refused(&["belongs to user 65534", "chown root"]);
    }
}

#[test]
fn an_option_that_a_mode_does_not_use_is_an_error() {
    for (mode, option, value) in [
        ("ram", "--overflow", "1G"),
        ("ram", "--overflow-dir", "/var/tmp"),
        ("ram", "--overflow-model", "m"),
        ("overflow", "--ram", "1G"),
        ("direct", "--ram", "1G"),
        ("direct", "--overflow", "1G"),
        ("direct", "--full", "fail"),
        ("direct", "--disk", "d"),
        ("direct", "--image-id", "i"),
        ("ram", "--disk", "d"),
    ] {
        refuses(
            spillway().args(["serve", "--image", "x.raw", "--nbd", "n", "--mode", mode, option, value]),
            2,
            &[option, &format!("--mode {mode}"), "leave"],
        );
    }
}

#[test]
fn an_option_that_a_mode_with_a_file_of_its_own_does_not_use_is_an_error() {
    let common = [
        ["--ram", "1G"],
        ["--overflow", "1G"],
        ["--overflow-dir", "/var/tmp"],
        ["--full", "fail"],
        ["--warn-at", "50"],
        ["--critical-at", "50"],
    ];
    let of_image = [
        ["--image", "x.raw"],
        ["--format", "raw"],
        ["--base-cache", "none"],
        ["--image-id", "i"],
        ["--base-model", "m"],
    ];
    let serve = ["serve", "--nbd", "n", "--disk", "d", "--mode"];
    for option in common {
        let persistent = [["--image", "x.raw"], option].concat();
        refuses(spillway().args(serve).arg("persistent").args(persistent), 2, &[option[0], "leave"]);
    }
    for option in common.into_iter().chain(of_image) {
        let words = [option[0], "--mode ephemeral", "leave"];
        refuses(spillway().args(serve).arg("ephemeral").args(option), 2, &words);
    }
    refuses(spillway().args(serve).arg("persistent"), 2, &["--image"]);
    for mode in ["persistent", "ephemeral"] {
        refuses(spillway().args(["serve", "--nbd", "n", "--mode", mode, "--image", "x.raw"]), 2, &["--disk"]);
    }
}

#[test]
fn words_that_cannot_be_are_refused_in_one_line() {
    let serve = ["serve", "--image", "x.raw", "--nbd", "n"];
    for (more, words) in [
        (vec![], vec![]),
        (vec!["--mode", "disk"], vec!["ram+overflow", "direct"]),
        (vec!["--format", "vmdk"], vec!["raw", "qcow2"]),
        (vec!["--base-cache", "yes"], vec!["host", "none"]),
        (vec!["--full", "crash"], vec!["pause", "fail"]),
        (vec!["--ram", "1GB"], vec!["'1GB'", "GiB"]),
        (vec!["--ram", "lots"], vec!["256M"]),
        (vec!["--overflow", "99999999999T"], vec!["too large"]),
        (vec!["--queues", "0"], vec!["--queues"]),
        (vec!["--queues", "4"], vec!["--vhost-user"]),
        (vec!["--socket-mode", "888"], vec!["octal"]),
        (vec!["--vhost-user", "n"], vec!["--vhost-user and --nbd are both n"]),
        (vec!["--kernel", "vmlinuz"], vec!["--kernel"]),
        (vec!["--no-such-option"], vec!["--no-such-option"]),
    ] {
        if !more.is_empty() {
            refuses(spillway().args(serve).args(&more), 2, &words);
        }
    }
    refuses(
        spillway().args(["serve", "--image", "x.raw"]),
        2,
        &["--vhost-user", "--nbd", "nobody could reach"],
    );
    refuses(spillway().args(["serve", "--nbd", "n"]), 2, &["--image"]);
    refuses(&mut spillway(), 2, &["requires a subcommand", "serve"]);
    refuses(spillway().env_remove("SPILLWAY_SOCKET").arg("image"), 2, &["requires a subcommand", "import"]);
    refuses(spillway().args(["run", "--image", "x.raw", "--initrd", "i"]), 2, &["--kernel"]);
    refuses(spillway().args(["run", "--image", "x.raw", "--memory", "1000"]), 2, &["--memory", "MiB"]);
    refuses(spillway().args(["run", "--image", "x.raw", "--kernel", "/nonexistent"]), 2, &["/nonexistent"]);
    for rights in [["--socket-mode", "0660"], ["--socket-group", "daemon"]] {
        refuses(spillway().args(["run", "--image", "x.raw"]).args(rights), 2, &[rights[0], "leave"]);
    }
    let dirty = ["stats", "c", "--dirty"];
    for other in [vec!["--watch"], vec!["--names", "mcsio"], vec!["--prometheus"]] {
        refuses(spillway().args(dirty).args(&other), 2, &["--dirty", other[0]]);
    }
    refuses(spillway().args(dirty).args(["--top", "0"]), 2, &["--top", "1..=4096"]);
    refuses(spillway().args(["stats", "c", "--top", "5"]), 2, &["--dirty"]);
    let prometheus = ["stats", "c", "--prometheus"];
    refuses(spillway().args(prometheus).args(["--names", "mcsio"]), 2, &["--names", "--prometheus"]);
    refuses(spillway().args(prometheus).arg("--watch"), 2, &["--watch", "--prometheus"]);
    refuses(spillway().args(["stats", "c", "--json", "--prometheus"]), 2, &["--prometheus"]);
    refuses(spillway().args(["attach", "--vhost-user", "s", "--for", "xen"]), 2, &["cloud-hypervisor"]);
}

#[test]
fn help_teaches() {
    let (code, out, err) = finishes(spillway().arg("--help"));
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("Examples:") && out.contains("Exit codes:"), "{out}");
    for command in [
        "serve",
        "run",
        "stats",
        "reset",
        "set",
        "events",
        "event",
        "upgrade",
        "attach",
        "completion",
        "top",
        "doctor",
        "man",
    ] {
        assert!(out.contains(&format!("\n  {command} ")), "{command} is not in: {out}");
        let (code, help, _) = finishes(spillway().args([command, "--help"]));
        assert!(code == 0 && help.contains("Example") && help.contains("spillway "), "{command}: {help}");
    }
    for command in
        ["create", "apply", "diff", "export", "list", "show", "scale", "update", "rollback", "delete"]
    {
        let (code, help, _) = finishes(spillway().args(["catalog", command, "--help"]));
        let example = format!("  spillway catalog {command} ");
        assert!(code == 0 && help.contains("Example") && help.contains(&example), "{command}: {help}");
    }
    // What works on the daemon's own host only offers nothing for other hosts, and refuses them.
    for command in ["console", "doctor"] {
        let (_, help, _) = finishes(spillway().args([command, "--help"]));
        assert!(
            help.contains("--socket")
                && !help.contains("--token-file")
                && !help.contains("https://HOST:PORT ["),
            "{help}"
        );
        refuses(spillway().args([command, "--socket", "https://host:1"]), 2, &["own host"]);
        refuses(spillway().args([command, "--token-file", "t"]), 2, &["--token-file"]);
    }
    assert!(!out.contains("__worker"), "{out}");
    let (code, out, _) = finishes(spillway().arg("--version"));
    assert_eq!((code, out.as_str()), (0, concat!("spillway ", env!("CARGO_PKG_VERSION"), "\n")));
}

#[test]
fn every_shell_gets_its_completions() {
    for shell in ["bash", "zsh", "fish"] {
        let (code, out, _) = finishes(spillway().args(["completion", shell]));
        assert!(code == 0 && out.contains("overflow-dir") && !out.contains("__worker"), "{shell}");
    }
    let script = finishes(spillway().args(["completion", "bash"])).1;
    // Longer than an argument can be.
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, script).unwrap();
    let (code, _, err) = finishes(Command::new("bash").arg("-n").arg(file.path()));
    assert_eq!((code, err.as_str()), (0, ""));
}

/// What spillwayd takes is tested there; here, that the line is of the token, and the token nobody else's.
#[test]
fn a_token_is_shown_with_its_line() {
    let new = || -> serde_json::Value {
        let (code, out, err) =
            finishes(spillway().args(["token", "new", "--role", "operate", "ci@x", "--json"]));
        assert_eq!((code, err.as_str()), (0, ""));
        serde_json::from_str(&out).unwrap()
    };
    let made = new();
    let token = made["token"].as_str().unwrap();
    assert!(token.len() == 64 && token != new()["token"].as_str().unwrap());
    let hashed = finishes(Command::new("sh").args(["-c", &format!("printf %s {token} | sha256sum")])).1;
    let hash = hashed.split(' ').next().unwrap();
    assert_eq!(made["line"], format!("operate ci@x {hash}"));
    refuses(spillway().args(["token", "new", "--role", "root", "x"]), 2, &["read, operate, admin"]);
    refuses(spillway().args(["token", "new", "--role", "read", "a b"]), 2, &["letters"]);
}

/// The commands that a help text lists.
fn commands(help: &str) -> Vec<String> {
    let listed =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = listed.filter_map(|line| line.strip_prefix("  ")?.split(' ').next().map(str::to_owned));
    names.filter(|name| !name.is_empty() && name != "help").collect()
}

#[test]
fn every_command_has_its_man_page() {
    let dir = tempfile::tempdir().unwrap();
    let (code, _, err) = finishes(spillway().arg("man").arg(dir.path().join("man1")));
    assert_eq!((code, err.as_str()), (0, ""));
    let mut pages = 0;
    // Commands have commands below them, and those too.
    let mut left = vec![vec!["spillway".to_owned()]];
    while let Some(command) = left.pop() {
        let name = command.join("-");
        let page = std::fs::read_to_string(dir.path().join(format!("man1/{name}.1"))).expect(&name);
        assert!(page.contains(".SH NAME") && page.contains(".SH OPTIONS"), "{name}: {page}");
        assert!(!page.contains(".SH EXTRA"), "{name}: {page}");
        pages += 1;
        let below = commands(&finishes(spillway().args(&command[1..]).arg("--help")).1);
        left.extend(below.into_iter().map(|name| [&command[..], &[name]].concat()));
    }
    assert!(pages > 40, "{pages}");
    assert_eq!(std::fs::read_dir(dir.path().join("man1")).unwrap().count(), pages, "and no other");
    assert_eq!(finishes(spillway().args(["man", "/proc/nothing"])).0, 73);
}

#[test]
fn each_vmm_gets_its_own_words() {
    for (vmm, words) in [
        (
            "qemu",
            vec!["memory-backend-memfd", "share=on", "path=/run/vm1.sock,reconnect=1", "vhost-user-blk-pci"],
        ),
        ("libvirt", vec!["<access mode='shared'/>", "type='vhostuser'", "path='/run/vm1.sock'", "reconnect"]),
        ("cloud-hypervisor", vec!["shared=on", "vhost_user=true,socket=/run/vm1.sock"]),
        ("firecracker", vec!["/drives/", r#""socket":"/run/vm1.sock""#, "does not reconnect"]),
    ] {
        let (code, out, err) =
            finishes(spillway().args(["attach", "--vhost-user", "/run/vm1.sock", "--for", vmm]));
        assert_eq!((code, err.as_str()), (0, ""), "{vmm}");
        for word in words {
            assert!(out.contains(word), "{vmm}: '{word}' is not in: {out}");
        }
    }
}

#[test]
fn a_reader_that_goes_is_no_failure_and_a_full_disk_is() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = spillway().args(["completion", "bash"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(73));
    let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
    drop(reader);
    let gone = std::process::Stdio::from(std::os::fd::OwnedFd::from(writer));
    let output = spillway().args(["completion", "bash"]).stdout(gone).output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

#[test]
fn a_control_socket_that_nobody_serves_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c");
    let asks = |command| {
        let mut spillway = spillway();
        spillway.arg(command).arg(&path).args(if command == "set" { &["--ram", "1G"][..] } else { &[] });
        spillway
    };
    let commands = ["stats", "reset", "set", "events", "upgrade"];
    for command in commands {
        refuses(&mut asks(command), 69, &["no such socket", "--control"]);
    }
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    // What another test starts holds it too, until it executes its program.
    while std::os::unix::net::UnixStream::connect(&path).is_ok() {}
    for command in commands {
        refuses(&mut asks(command), 69, &["nobody serves it"]);
    }
}

/// As podman, virsh and kubectl have it.
#[test]
fn where_the_daemon_is_can_be_said_before_the_command_and_behind_it() {
    let nowhere = "/nonexistent/before";
    for command in [
        &["machine", "list"][..],
        &["catalog", "list"],
        &["image", "list"],
        &["host", "show"],
        &["leftover", "list"],
        &["operation", "list"],
        &["event"],
        &["store", "list"],
        &["top", "--once"],
        &["advise", "--live", "desk"],
    ] {
        refuses(spillway().args(["--socket", nowhere]).args(command), 69, &[nowhere]);
        refuses(spillway().args([command[0], "--socket", nowhere]).args(&command[1..]), 69, &[nowhere]);
        refuses(spillway().args(command).args(["--socket", nowhere]), 69, &[nowhere]);
        // What is said last holds, and options before variables.
        let mut both = spillway();
        both.env("SPILLWAY_SOCKET", "/nonexistent/variable").args(["--socket", "/nonexistent/first"]);
        refuses(both.args(command).args(["--socket", nowhere]), 69, &[nowhere]);
        let mut variable = spillway();
        refuses(variable.env("SPILLWAY_SOCKET", nowhere).args(command), 69, &[nowhere]);
        let mut option = spillway();
        option.env("SPILLWAY_SOCKET", "/nonexistent/variable").args(["--socket", nowhere]);
        refuses(option.args(command), 69, &[nowhere]);
    }
    let (_, found, _) = finishes(spillway().args(["--socket", nowhere, "--json", "doctor"]));
    assert!(found.starts_with('{') && found.contains(nowhere), "{found}");
    // A host of its fleet is said as the daemon is.
    for command in [&["doctor"][..], &["machine", "console", "desk-001"], &["machine", "stats", "desk-001"]] {
        let mut before = spillway();
        refuses(before.args(["--host", "host-b"]).args(command), 2, &["own host", "host-b", "without that"]);
        refuses(spillway().env("SPILLWAY_HOST", "host-b").args(command), 2, &["SPILLWAY_HOST", "host-b"]);
    }
    refuses(spillway().args(["--host", "HOST", "machine", "list"]), 2, &["'HOST' is no name"]);
    refuses(
        spillway().args(["machine", "list"]).env("SPILLWAY_HOST", "a b"),
        2,
        &["SPILLWAY_HOST", "'a b' is no name"],
    );
    refuses(
        spillway().args(["image", "import", "d", "a.raw", "--format", "raw", "--host", "host-b"]),
        2,
        &["a.raw", "whole path"],
    );
    refuses(spillway().args(["--host", "host-b", "stats", "c"]), 2, &["--host", "leave it out"]);
    // Where it would have no effect.
    for command in [&["stats", "c"][..], &["token", "new", "--role", "read", "x"], &["completion", "bash"]] {
        refuses(spillway().args(["--socket", nowhere]).args(command), 2, &["--socket", "leave it out"]);
    }
    refuses(spillway().args(["--json", "completion", "bash"]), 2, &["--json", "after the name"]);
    refuses(spillway().args(["--json", "stats", "/nonexistent/control"]), 69, &["/nonexistent/control"]);
    refuses(spillway().args(["--ca", "x", "machine", "list"]), 2, &["--ca", "leave one"]);
    let help = finishes(spillway().arg("--help")).1;
    assert!(help.contains("--socket <SOCK>") && help.contains("--token-file <FILE>"), "{help}");
    let help = finishes(spillway().args(["machine", "list", "--help"])).1;
    assert!(help.contains("SPILLWAY_SOCKET") && help.contains("SPILLWAY_HOST"), "{help}");
}
