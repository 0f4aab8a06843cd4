//! Programs and files in guests, by a real qemu-guest-agent: the one of this host, with its libraries.

use crate::world::{BOOT, World};
use serde_json::Value;
use spillway_testkit::cpio::Entry;
use spillway_testkit::process::wait_until;
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

const NAME: &str = "desk-001";
const SHELL: [&str; 3] = ["/bin/busybox", "sh", "-c"];

/// The agent as files for a guest; `None`: it is not installed, which is said.
fn agent() -> Option<Vec<Entry>> {
    let program = "/usr/sbin/qemu-ga";
    let Ok(content) = fs::read(program) else {
        spillway_testkit::skip("qemu-ga is not installed (Debian: qemu-guest-agent)");
        return None;
    };
    let listed = Command::new("ldd").arg(program).output().expect("ldd is there wherever programs are");
    let listed = String::from_utf8(listed.stdout).unwrap();
    let mut entries = vec![Entry::directory("payload/ga"), Entry::file("payload/ga/qemu-ga", 0o755, content)];
    for path in listed.split_whitespace().filter(|word| word.starts_with('/')) {
        let name = path.rsplit('/').next().unwrap();
        let name = if name.starts_with("ld-") { "ld.so" } else { name };
        entries.push(Entry::file(&format!("payload/ga/{name}"), 0o755, fs::read(path).unwrap()));
    }
    Some(entries)
}

/// A world with a machine whose guest has no agent yet.
fn world(hypervisor: &'static str) -> Option<World> {
    let world = World::with_files(hypervisor, agent()?)?;
    world.import("golden", "version-1");
    world.catalog("desk", 1, &["--image", "golden", "--ready", "serial:^WORKS"]);
    world.ok(&["machine", "start", NAME, "--wait"]);
    Some(world)
}

fn exec(world: &World, options: &[&str], words: &[&str]) -> (i32, String, String) {
    world.spillway(&[&["machine", "exec", NAME], options, &["--"], words].concat())
}

fn shell(world: &World, script: &str) -> (i32, String, String) {
    exec(world, &[], &[&SHELL[..], &[script]].concat())
}

fn start_agent(world: &World) {
    world.tell(NAME, "ga", "STARTED");
    let answers = wait_until(BOOT, || (shell(world, "true").0 == 0).then_some(()));
    answers.unwrap_or_else(|| panic!("the agent does not answer: {:?}", shell(world, "true")));
}

fn programs_run(world: &World) {
    assert_eq!(shell(world, "echo out; echo err >&2; exit 7"), (7, "out\n".into(), "err\n".into()));
    assert_eq!(shell(world, "kill -9 $$").0, 128 + 9);
    let (code, _, err) = exec(world, &[], &["/no/such/program"]);
    assert!(code == 125 && err.contains("No such file"), "{code} {err}");
    let quoted = r#"it's "quoted" \ ünï €🦀"#;
    let said = exec(world, &["-e", &format!("V={quoted}")], &["/bin/busybox", "env"]);
    assert_eq!(said, (0, format!("V={quoted}\n"), String::new()));
    let (code, _, err) = exec(world, &["--time-limit", "1"], &["/bin/busybox", "sleep", "600"]);
    assert!(code == 124 && err.contains("kill"), "{code} {err}");
    // What a program reads is what it was given, to its end.
    let mut cat = world.command(&["machine", "exec", "-i", NAME, "--", "/bin/busybox", "sha256sum"]);
    let mut cat = cat.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    cat.stdin.take().unwrap().write_all(&[7; 64 << 10]).unwrap();
    let sum = String::from_utf8(cat.wait_with_output().unwrap().stdout).unwrap();
    assert_eq!(sum, format!("{}  -\n", sha256(&[7; 64 << 10])));
    let (code, out, _) =
        exec(world, &["--json"], &[&SHELL[..], &["head -c 2000000 /dev/zero; echo e >&2"]].concat());
    let result: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (code, &result["exit_code"], &result["stdout_cut"], &result["stderr_cut"]),
        (0, &0.into(), &true.into(), &false.into())
    );
    assert_eq!(result["stdout_base64"].as_str().unwrap().len(), (1_usize << 20).div_ceil(3) * 4);
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn files_are_written_and_read(world: &World) {
    let (local, back) = (world.path("local"), world.path("back"));
    let [local, back] = [&local, &back].map(|path| path.to_str().unwrap());
    let mut content = vec![0; 600_001];
    let mut random = fs::File::open("/dev/urandom").unwrap();
    std::io::Read::read_exact(&mut random, &mut content).unwrap();
    fs::write(local, &content).unwrap();
    world.ok(&["machine", "put", NAME, local, "/tmp/it's a file"]);
    assert_eq!(shell(world, "sha256sum < \"/tmp/it's a file\"").1, format!("{}  -\n", sha256(&content)));
    world.ok(&["machine", "get", NAME, "/tmp/it's a file", back]);
    assert!(fs::read(back).unwrap() == content);
    fs::write(local, "shorter").unwrap();
    world.ok(&["machine", "put", NAME, local, "/tmp/it's a file"]);
    assert_eq!(world.ok(&["machine", "get", NAME, "/tmp/it's a file", "-"]), "shorter");
    let (code, _, err) = world.spillway(&["machine", "get", NAME, "/no/such/file", back]);
    assert!(code == 66 && err.contains("No such file"), "{code} {err}");
    assert!(fs::read(back).unwrap() == content, "it is as it was");
    let (code, _, err) = world.spillway(&["machine", "put", NAME, local, "/no/such/folder/file"]);
    assert!(code == 66 && err.contains("No such file"), "{code} {err}");
}

/// The line of the audit log of the first program, and what is in none.
fn is_audited(world: &World) {
    let text = fs::read_to_string(world.path("state/audit.log")).unwrap();
    for verb in ["run a program in", "write a file of", "read a file of"] {
        let parsed = |line: &str| serde_json::from_str::<Value>(line).ok();
        let is_it = |line: &Value| line["verb"] == verb && line["result"] == "done";
        let line = text.lines().filter_map(parsed).find(is_it).unwrap_or_else(|| panic!("{verb}: {text}"));
        assert_eq!(line["object"]["name"], NAME, "{line}");
    }
    assert!(
        text.contains(r#""program":"/bin/busybox""#) && !text.contains("exit 7") && !text.contains("quoted")
    );
}

/// Neither virsh nor anybody else keeps what an agent is asked.
fn is_in_no_history(world: &World) {
    let secret = format!("secret-{}-{}", std::process::id(), world.path("").display());
    assert_eq!(shell(world, &format!("echo '{secret}'")).1, format!("{secret}\n"));
    let own = fs::read_to_string(world.machines().join(".virsh/libvirt/virsh/history"));
    assert_eq!(own.unwrap_or_default(), "");
    let home = std::env::var_os("HOME").map(|home| std::path::PathBuf::from(home).join(".cache"));
    let users = std::env::var_os("XDG_CACHE_HOME").map(std::path::PathBuf::from).or(home);
    for cache in users.into_iter().chain([world.path("lv")]) {
        let kept = fs::read_to_string(cache.join("libvirt/virsh/history")).unwrap_or_default();
        assert!(!kept.contains(&secret), "{}", cache.display());
    }
}

fn a_reset_ends_it(world: &World) {
    let words = ["machine", "exec", NAME, "--time-limit", "3600", "--", "/bin/busybox", "sleep", "3599"];
    let waits = world.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let runs = wait_until(BOOT, || (shell(world, "ps | grep -q '[s]leep 3599'").0 == 0).then_some(()));
    runs.expect("it runs, and others are answered meanwhile");
    world.ok(&["machine", "reset", NAME, "--wait"]);
    let ended = waits.wait_with_output().unwrap();
    let err = String::from_utf8(ended.stderr).unwrap();
    assert!(ended.status.code() == Some(125) && err.contains("reset meanwhile"), "{:?} {err}", ended.status);
}

fn what_cannot_be_asked_says_so(world: &World) {
    // It has none yet.
    let (code, _, err) = shell(world, "true");
    assert!(code == 125 && err.contains("qemu-guest-agent"), "{code} {err}");
    world.ok(&["machine", "stop", NAME, "--force", "--wait"]);
    let (code, _, err) = shell(world, "true");
    assert!(code == 125 && err.contains("start it first"), "{code} {err}");
    let (code, _, err) = world.spillway(&["machine", "get", NAME, "/etc/passwd", "-"]);
    assert!(code == 75 && err.contains("start it first"), "{code} {err}");
}

fn a_guest_is_asked(hypervisor: &'static str) {
    let Some(world) = world(hypervisor) else { return };
    start_agent(&world);
    programs_run(&world);
    files_are_written_and_read(&world);
    is_audited(&world);
    is_in_no_history(&world);
    a_reset_ends_it(&world);
    what_cannot_be_asked_says_so(&world);
}

#[test]
fn programs_and_files_of_a_qemus_guest() {
    a_guest_is_asked("qemu");
}

#[test]
fn programs_and_files_of_a_domains_guest() {
    a_guest_is_asked("libvirt");
}

#[test]
fn an_external_machine_is_asked_where_its_vmm_is() {
    let Some(world) = World::new("none") else { return };
    world.import("golden", "version-1");
    world.ok(&["catalog", "create", "vms", "--image", "golden", "--vmm", "external"]);
    world.ok(&["machine", "add", "vms", "web-7"]);
    for _ in 0..2 {
        let (code, _, err) = world.spillway(&["machine", "exec", "web-7", "--", "true"]);
        assert!(code == 125 && err.contains("another program runs"), "{code} {err}");
        world.ok(&["machine", "start", "web-7", "--wait"]);
    }
}
