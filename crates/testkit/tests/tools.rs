//! The scripts that bring programs for tests: several tests ask for the same one at the same time, in threads and in processes.
//!
//! Python and Go are stand-ins here: they note each installation, and fail where another one installs into the same folder.

#![allow(clippy::unwrap_used, reason = "a test ends where a step fails")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Installs into `$1` what `$2...` are called, if nobody else does so.
const INSTALL: &str = r#"
install() {
    local to=$1 name
    shift
    mkdir -p "$to" && mkdir "$to/busy" || exit 1
    sleep 0.1
    for name in "$@"; do printf '#!/bin/sh\n' >"$to/$name" && chmod +x "$to/$name"; done
    echo "$*" >>"$INSTALLED"
    rmdir "$to/busy"
}
"#;
/// `python3 -m venv FOLDER`, and `FOLDER/bin/pip install ...`.
const PYTHON: &str = r#"
mkdir -p "$3/bin"
cp "$0" "$3/bin/python3"
printf '#!/bin/bash\nexec "%s" "${0%%/*}"\n' "$PIP" >"$3/bin/pip"
chmod +x "$3/bin/pip"
"#;
const PIP: &str = r#"install "$1" moto_server cloudbase-init"#;
/// `go mod init`, `go get`, `go build ... -o FILE MODULE`, and `GOBIN=FOLDER go install MODULE@VERSION`.
const GO: &str = r#"
case $1 in
build)
    while [ "$1" != -o ]; do shift; done
    install "${2%/*}" "${2##*/}" ;;
install) install "$GOBIN" versitygw ;;
esac
"#;

fn program(path: &Path, text: &str) {
    std::fs::write(path, format!("#!/bin/bash\n{INSTALL}{text}")).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn who_asks_at_the_same_time_gets_what_one_installs() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts");
    for (script, arguments) in [
        ("cloudbase-init", &[][..]),
        ("s3-server", &["moto"]),
        ("s3-server", &["versitygw"]),
        ("etcd-3.6", &[]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let [scripts, programs, installed] =
            ["scripts", "programs", "installed"].map(|of| dir.path().join(of));
        std::fs::create_dir(&scripts).unwrap();
        std::fs::create_dir(&programs).unwrap();
        for (name, text) in [("python3", PYTHON), ("pip", PIP), ("go", GO)] {
            program(&programs.join(name), text);
        }
        std::fs::copy(sources.join(script), scripts.join(script)).unwrap();
        let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
        let start = || {
            let mut command = Command::new(scripts.join(script));
            command.args(arguments).env("PATH", &path).env("PIP", programs.join("pip"));
            command
                .env("INSTALLED", &installed)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let all: Vec<_> = (0..5).map(|_| start()).collect();
        let mut said = Vec::new();
        for one in all {
            let done = one.wait_with_output().unwrap();
            assert!(done.status.success(), "{script}: {}", String::from_utf8_lossy(&done.stderr));
            said.push(String::from_utf8(done.stdout).unwrap());
        }
        let tool = Path::new(said[0].trim());
        assert!(tool.exists() && tool.starts_with(dir.path()), "{script}: {tool:?}");
        assert!(said.iter().all(|one| *one == said[0]), "{script}: {said:?}");
        let installed = std::fs::read_to_string(&installed).unwrap();
        assert_eq!(installed.lines().count(), 1, "{script}: {installed}");
    }
}
