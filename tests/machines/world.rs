//! A daemon of the test's own, the command line that asks it, and guests that answer on their consoles.

use crate::libvirtd::Libvirtd;
use rustix::process::{Pid, Signal};
use serde_json::Value;
use spillway_testkit::console::Console;
use spillway_testkit::cpio::{Entry, archive};
use spillway_testkit::disk;
use spillway_testkit::guest::{Accelerator, Kit};
use spillway_testkit::process::wait_until;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a guest may take to come up in software on a busy host.
pub const BOOT: Duration = Duration::from_secs(400);

/// What a guest does: it says which image it runs on and what it finds where it writes, and obeys.
const GUEST: &str = r#"#!/bin/busybox sh
stty -F /dev/ttyS0 -echo 2>/dev/null
exec </dev/ttyS0 >/dev/ttyS0
answer() { echo "$* #$tag"; }
case "$(dd if=/dev/vda bs=64 count=1 2>/dev/null | head -n 1)" in ends*) poweroff -f ;; esac
echo WORKS
while read -r word tag; do
    case "$word" in
    state)
        image=$(dd if=/dev/vda bs=64 count=1 2>/dev/null | head -n 1)
        mark=$(dd if=/dev/vda bs=4096 skip=1 count=1 2>/dev/null | head -n 1)
        answer "STATE image=$image mark=$mark boot=$(cat /proc/sys/kernel/random/boot_id)" ;;
    mark*)
        { echo "${word#mark}"; } | dd of=/dev/vda bs=4096 seek=1 conv=notrunc,fsync,sync 2>/dev/null
        answer MARKED ;;
    get*) answer "GOT $(dd "if=/dev/${word#get}" bs=4096 count=1 2>/dev/null | head -n 1)" ;;
    put*) { echo kept; } | dd "of=/dev/${word#put}" bs=4096 conv=notrunc,fsync,sync 2>/dev/null; answer PUT ;;
    flood) yes "$(head -c 79 /dev/zero | tr '\0' x)" | head -n 9000; answer FLOODED ;;
    fill*)
        dd if=/dev/urandom of=/dev/vda bs=1M seek=1 "count=${word#fill}" conv=notrunc,fsync 2>/dev/null
        answer FILLED ;;
    all) answer "READ $(cat /dev/vda | wc -c)" ;;
    size*) answer "SIZE $(cat "/sys/block/${word#size}/size")" ;;
    seed*) answer "SEED $(grep -ao 'iid-[0-9a-f-]*' "/dev/${word#seed}") $(grep -ao 'ssh-ed25519 [^"]*' "/dev/${word#seed}")" ;;
    hardware)
        answer "HARDWARE pci=$(cat /sys/bus/pci/devices/*/device | tr '\n' ',') sockets=$(sed -n 's/^physical id.*: //p' /proc/cpuinfo | sort -u | wc -l)" ;;
    hang)
        # Starts the watchdog, of both stages, and feeds it no more (i6300ESB, datasheet 15.3 and 15.4).
        dog=$(dirname "$(grep -l 0x25ab /sys/bus/pci/devices/*/device)")
        echo 1 >"$dog/enable"
        base=$(head -n 1 "$dog/resource" | cut -d' ' -f1)
        at() { printf '0x%x' $((base + $1)); }
        unlock() { devmem "$(at 12)" 16 0x80; devmem "$(at 12)" 16 0x86; }
        for stage in 0 4; do unlock; devmem "$(at $stage)" 32 64; done
        answer BYE
        printf '\002' | dd of="$dog/config" bs=1 seek=104 conv=notrunc 2>/dev/null
        unlock; devmem "$(at 12)" 16 0x100 ;;
    login)
        # As on any other machine: of the user ann, with a password. It is over when she leaves.
        mkdir -p /etc
        echo "ann:$(mkpasswd sesame):1000:1000::/:/bin/sh" >/etc/passwd
        setsid getty -L 115200 ttyS0 vt100
        # The end of her session has hung up the line.
        exec </dev/ttyS0 >/dev/ttyS0
        stty -F /dev/ttyS0 -echo
        answer LEFT ;;
    agent)
        # Stands for qemu-guest-agent, which these guests have not.
        exec 3<>"$(ls /dev/vport*)"
        while :; do
            # While nobody is connected to its other end, the port has ended.
            read -r question <&3 || { usleep 50000; continue; }
            case "$question" in
            *guest-sync-delimited*) id=${question##*\"id\":}; printf '\377{"return":%s}\n' "${id%%[!0-9]*}" >&3 ;;
            *guest-sync*) id=${question##*\"id\":}; echo "{\"return\":${id%%[!0-9]*}}" >&3 ;;
            *guest-ping*) echo '{"return":{}}' >&3 ;;
            *guest-shutdown*) poweroff -f ;;
            esac
        done &
        answer AGENT ;;
    ga)
        # A real one, from the files that a test adds.
        /payload/ga/ld.so --library-path /payload/ga /payload/ga/qemu-ga -m virtio-serial -p "$(ls /dev/vport*)" -t /tmp >/dev/null 2>&1 &
        answer STARTED ;;
    reboot | poweroff) answer BYE; sleep 1; $word -f ;;
    esac
done
"#;

pub struct World {
    dir: tempfile::TempDir,
    daemon: Option<Child>,
    hypervisor: &'static str,
    /// More options of the daemon.
    pub options: Vec<String>,
    libvirtd: Option<Libvirtd>,
}

/// How guests run here. Found out once for all daemons: that takes a processor for seconds where KVM runs nothing.
fn accelerator() -> &'static str {
    static FOUND: OnceLock<&str> = OnceLock::new();
    FOUND.get_or_init(|| match Accelerator::probe(&Kit::find().expect("it was found before")).unwrap() {
        Accelerator::Kvm => "kvm",
        Accelerator::Tcg => "tcg",
    })
}

impl World {
    /// With a daemon. `None`: the guests have not been built, or there is no such hypervisor, which is said.
    pub fn new(hypervisor: &'static str) -> Option<World> {
        World::with_files(hypervisor, Vec::new())
    }

    /// With more files in the guests, below `payload`.
    pub fn with_files(hypervisor: &'static str, files: Vec<Entry>) -> Option<World> {
        let Some(kit) = Kit::find() else {
            spillway_testkit::skip("the guest image is not built: run 'make image'");
            return None;
        };
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        // The way to the daemon's folder is not the daemon's to open.
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        let libvirtd = match hypervisor {
            "libvirt" => Some(Libvirtd::new(&dir.path().join("lv"))?),
            _ => None,
        };
        let mut initrd = std::fs::read(kit.initrd()).unwrap();
        initrd.resize(initrd.len().next_multiple_of(4), 0);
        let mut payload = vec![Entry::directory("payload"), Entry::file("payload/run", 0o755, GUEST)];
        payload.extend(files);
        initrd.extend(archive(&payload).unwrap());
        std::fs::write(dir.path().join("initrd"), initrd).unwrap();
        std::fs::copy(kit.kernel(), dir.path().join("vmlinuz")).unwrap();
        let mut world = World { dir, daemon: None, hypervisor, libvirtd, options: Vec::new() };
        world.start_daemon();
        Some(world)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The folder that machines run in.
    pub fn machines(&self) -> PathBuf {
        self.path("state/run/machines")
    }

    pub fn start_daemon(&mut self) {
        let program = disk::daemon_program().unwrap();
        let mut daemon = match &self.libvirtd {
            Some(libvirtd) => libvirtd.command(&program),
            None => Command::new(program),
        };
        if let Some(libvirtd) = &self.libvirtd {
            daemon.args(["--libvirt-uri", libvirtd.uri()]);
        }
        daemon.arg("--state").arg(self.path("state")).arg("--socket").arg(self.path("sock"));
        if self.hypervisor != "none" && !self.options.iter().any(|option| option == "--accelerator") {
            daemon.args(["--accelerator", accelerator()]);
        }
        let mut daemon = daemon
            .args(["--hypervisor", self.hypervisor])
            .args(&self.options)
            .stdout(Stdio::piped())
            .spawn()
            .expect("'make test' builds spillwayd");
        // To connect tells nothing: a child that the last one was starting may still have its socket.
        let mut line = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("ready"), "{line:?}");
        self.daemon = Some(daemon);
    }

    pub fn daemon_pid(&self) -> u32 {
        self.daemon.as_ref().unwrap().id()
    }

    /// Lets it read its tokens again.
    pub fn reload_daemon(&self) {
        let pid = Pid::from_child(self.daemon.as_ref().unwrap());
        rustix::process::kill_process(pid, Signal::HUP).unwrap();
    }

    /// Kills it, if that has not been done, and waits for its end.
    pub fn kill_daemon(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    /// The libvirtd that runs its machines, if one does.
    pub fn libvirtd(&mut self) -> Option<&mut Libvirtd> {
        self.libvirtd.as_mut()
    }

    /// An image's next version: a disk that begins with this line.
    pub fn import(&self, image: &str, line: &str) {
        let file = self.path("image.raw");
        let mut content = format!("{line}\n").into_bytes();
        content.resize(16 << 20, 0);
        std::fs::write(&file, content).unwrap();
        self.ok(&["image", "import", image, file.to_str().unwrap(), "--format", "raw"]);
    }

    /// Gives a catalog more settings, as lines of its file.
    pub fn set(&self, catalog: &str, settings: &[&str]) {
        let file = self.ok(&["catalog", "export", catalog]);
        let named = |line: &str| line.split_once(" = ").map(|(name, _)| name.to_owned());
        let is_set = |line: &str| settings.iter().any(|other| named(other) == named(line));
        let mut lines: Vec<&str> =
            file.lines().filter(|line| named(line).is_none() || !is_set(line)).collect();
        let head = lines.iter().position(|line| line.starts_with('[')).expect("a table") + 1;
        lines.splice(head..head, settings.iter().copied());
        std::fs::write(self.path("set.toml"), lines.join("\n")).unwrap();
        self.ok(&["catalog", "apply", "-f", self.path("set.toml").to_str().unwrap()]);
    }

    /// A catalog of guests that answer, with more options.
    pub fn catalog(&self, name: &str, count: u32, options: &[&str]) {
        let (count, kernel, initrd) = (count.to_string(), self.path("vmlinuz"), self.path("initrd"));
        let common = [
            "catalog",
            "create",
            name,
            "--count",
            &count,
            "--memory",
            "256M",
            "--network",
            "none",
            "--kernel",
            kernel.to_str().unwrap(),
            "--initrd",
            initrd.to_str().unwrap(),
            "--append",
            "console=ttyS0 quiet loglevel=4 panic=1 cryptomgr.notests nokaslr",
        ];
        self.ok(&[&common[..], options].concat());
    }

    /// A command that asks this daemon.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(disk::program().unwrap());
        command.args(arguments).env("SPILLWAY_SOCKET", self.path("sock"));
        command
    }

    /// Exit code, standard output, standard error.
    pub fn spillway(&self, arguments: &[&str]) -> (i32, String, String) {
        let done = self.command(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (done.status.code().unwrap(), text(done.stdout), text(done.stderr))
    }

    pub fn ok(&self, arguments: &[&str]) -> String {
        let (code, out, err) = self.spillway(arguments);
        assert_eq!(code, 0, "{arguments:?}: {out}{err}");
        out
    }

    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[arguments, &["--json"]].concat())).unwrap()
    }

    /// Asks the daemon itself: the head of its answer, which is a good one, and the body.
    pub fn ask(&self, method: &str, path: &str, body: &str) -> (String, String) {
        let (head, body) = self.ask_for_any(method, path, body);
        assert!(head.starts_with("HTTP/1.1 200"), "{head}\n{body}");
        (head, body)
    }

    /// The status of the daemon's answer, whatever it is.
    pub fn status(&self, path: &str) -> u16 {
        let (head, _) = self.ask_for_any("GET", path, "");
        head.split(' ').nth(1).unwrap().parse().unwrap()
    }

    fn ask_for_any(&self, method: &str, path: &str, body: &str) -> (String, String) {
        let mut stream = UnixStream::connect(self.path("sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_owned(), body.to_owned())
    }

    pub fn get(&self, path: &str) -> String {
        self.ask("GET", path, "").1
    }

    /// How many events there were whose text has this.
    pub fn events(&self, text: &str) -> usize {
        let events = self.object("/v1/events");
        let is_it = |event: &&Value| event["text"].as_str().unwrap().contains(text);
        events["items"].as_array().unwrap().iter().filter(is_it).count()
    }

    /// What the daemon has at this path. Whoever waits for something asks so: a command line for each look would take the
    /// processors that the guests are waited for with.
    pub fn object(&self, path: &str) -> Value {
        serde_json::from_str(&self.get(path)).unwrap_or_else(|e| panic!("{path} is no JSON: {e}"))
    }

    pub fn machine(&self, name: &str) -> Value {
        self.object(&format!("/v1/machines/{name}"))
    }

    /// All machines, or those of a catalog.
    pub fn list(&self, catalog: Option<&str>) -> Vec<Value> {
        let query = catalog.map(|name| format!("?catalog={name}")).unwrap_or_default();
        let mut page = self.object(&format!("/v1/machines{query}"));
        assert!(page["next"].is_null(), "more than a page");
        page["items"].as_array_mut().map(std::mem::take).expect("a list")
    }

    /// Waits until a machine is so.
    pub fn until(&self, name: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let found = wait_until(BOOT, || Some(self.machine(name)).filter(&is));
        found.unwrap_or_else(|| panic!("{name} is not {what}: {:#}", self.machine(name)))
    }

    pub fn pid(&self, name: &str, which: &str) -> u32 {
        self.machine(name)["status"]["run"][which].as_u64().unwrap_or_else(|| panic!("{name}: no {which}"))
            as u32
    }

    /// Says a word to a guest until it answers with a line that begins so; that line.
    pub fn tell(&self, name: &str, word: &str, answer: &str) -> String {
        self.tell_slow(name, word, answer, Duration::from_secs(1))
    }

    /// The same for what takes a guest so long: it is told again when nothing was heard for that time.
    pub fn tell_slow(&self, name: &str, word: &str, answer: &str, mut patience: Duration) -> String {
        let until = Instant::now() + BOOT;
        loop {
            // It may be that of a VMM that is about to end.
            let silence = || Err(String::new());
            let patient = patience.min(until.saturating_duration_since(Instant::now()));
            let conversation = self.console(name).map(|c| converse(c, word, answer, patient, until));
            let reply = match conversation.unwrap_or_else(silence) {
                Ok(line) => return line,
                Err(reply) => reply,
            };
            let late = Instant::now() >= until;
            assert!(!late, "{name} does not answer '{word}' but '{reply}': {:#}", self.machine(name));
            if !reply.is_empty() {
                // It answers earlier ones still: to be told more often than it can answer makes it never catch up.
                patience *= 2;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Tells a guest to reboot or to power itself off: it does so once, and its answer may take it a while.
    pub fn say(&self, name: &str, word: &str) {
        self.tell_slow(name, word, "BYE", BOOT / 6);
    }

    /// Lets a guest reboot, and waits until it has. What it says of its disk then.
    pub fn reboot(&self, name: &str) -> String {
        let boot = |state: &str| state.split_once("boot=").map(|(_, boot)| boot.to_owned());
        let before = boot(&self.tell(name, "state", "STATE")).expect("it says which boot it is");
        self.say(name, "reboot");
        let until = Instant::now() + BOOT;
        loop {
            let state = self.tell(name, "state", "STATE");
            if boot(&state).is_some_and(|boot| boot != before) {
                return state;
            }
            assert!(Instant::now() < until, "{name} does not reboot");
        }
    }

    /// A client of a machine's console.
    pub fn console(&self, name: &str) -> Option<Console> {
        Console::connect(&self.machines().join(name).join("console.sock")).ok()
    }

    /// What runs of its machines: every process of [`World::local_processes`], every domain.
    pub fn processes(&self) -> Vec<String> {
        let mut found = self.local_processes();
        found.extend(self.libvirtd.iter().flat_map(Libvirtd::domains));
        found
    }

    /// Every process that works in this world's folder, every QEMU whose command line names it. Nobody else is asked, who
    /// might not answer.
    fn local_processes(&self) -> Vec<String> {
        let folder = self.dir.path().canonicalize().unwrap();
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            let works_there =
                std::fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(&folder));
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            let is_its_qemu = line.contains("qemu-system") && line.contains(folder.to_str().unwrap());
            if works_there || is_its_qemu {
                found.push(format!("{pid} {line}"));
            }
        }
        found
    }
}

/// Its answer; an error is what else was heard until nothing was for so long, or it was too late.
fn converse(
    mut console: Console,
    word: &str,
    answer: &str,
    patience: Duration,
    until: Instant,
) -> Result<String, String> {
    // What it says late to an earlier word is no answer to this one.
    static WORDS: AtomicU32 = AtomicU32::new(1);
    let tag = format!(" #{}", WORDS.fetch_add(1, Ordering::Relaxed));
    // What is kept of earlier words comes first.
    let mut heard_at = Instant::now();
    let keys = format!("{word}{}\n", tag.replace('#', ""));
    if console.take().and_then(|()| console.keys(keys.as_bytes())).is_err() {
        return Err(String::new());
    }
    let mut own_from = None;
    loop {
        let before = console.output.len();
        let _ = console.receive(Duration::from_millis(50));
        if own_from.is_none() && console.keyboard == Some(b'y') {
            own_from = Some(before);
        }
        if console.output.len() > before {
            heard_at = Instant::now();
        }
        let text = console.text();
        if console.has_ended || heard_at.elapsed() >= patience || Instant::now() >= until {
            return Err(String::from_utf8_lossy(&console.output[own_from.unwrap_or(before)..]).into_owned());
        }
        let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
        let mut answers = whole.lines().filter_map(|line| line.trim().strip_suffix(&tag));
        if let Some(line) = answers.find(|line| line.starts_with(answer)) {
            return Ok(line.trim().to_owned());
        }
    }
}

fn qemu_io(world: &World, machine: &str, command: &str) -> bool {
    let socket =
        world.machine(machine)["status"]["run"]["nbd_socket"].as_str().unwrap_or_default().to_owned();
    let nbd = format!("nbd+unix:///?socket={socket}");
    Command::new("qemu-io").args(["-f", "raw", "-c", command, &nbd]).output().unwrap().status.success()
}

/// Fills a place of a machine's disk with this byte, where a client of the disk writes instead of a guest.
pub fn write(world: &World, machine: &str, byte: u8) {
    assert!(qemu_io(world, machine, &format!("write -P {byte} 1M 64k")), "{machine} {byte}");
}

/// Whether that place has this byte.
pub fn reads(world: &World, machine: &str, byte: u8) -> bool {
    qemu_io(world, machine, &format!("read -P {byte} 1M 64k"))
}

pub fn kill(pid: u32) {
    signal(pid, Signal::KILL);
}

pub fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    spillway_testkit::process::send_signal(pid, signal).unwrap();
}

pub fn is_alive(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in std::fs::read_dir(self.machines()).into_iter().flatten().flatten() {
                for log in ["disk.log", "vmm.log"] {
                    let text = std::fs::read_to_string(name.path().join(log)).unwrap_or_default();
                    eprintln!("{} {log}: {text}", name.path().display());
                }
            }
            if let Some(libvirtd) = &self.libvirtd {
                eprintln!("libvirtd: {}", libvirtd.log());
            }
        }
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        for process in self.local_processes() {
            if let Some(pid) =
                process.split(' ').next().and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw)
            {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        }
    }
}
