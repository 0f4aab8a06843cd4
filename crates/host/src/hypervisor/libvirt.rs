//! libvirt, through its client `virsh`: one process per command, and one for events. Owns the connection settings and the
//! bounds of answers; knows no machine.
//!
//! Invariant: a libvirtd that is missing, hangs or restarts causes an error with that reason, never an endless wait.

use crate::error::HostError;
use serde_json::Value;
use spillway_api::ErrorCode;
use spillway_control::{default_signals, end_with_parent};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, Once};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, OnceCell};
use tokio::time::timeout;

const PROGRAM: &str = "virsh";
/// What virsh writes before it reads a command from its input.
const PROMPT: &str = "virsh # ";
/// Longest time of an answer. libvirt itself waits up to 30 seconds for a QEMU that it starts.
const PATIENCE: Duration = Duration::from_secs(60);
const MOST_ANSWER_BYTES: u64 = 8 << 20;
const MOST_COMPLAINT_BYTES: u64 = 4 << 10;
const MOST_LINE_BYTES: u64 = 64 << 10;
/// Pause between two subscriptions to events.
const PAUSE: Duration = Duration::from_secs(1);
/// How long after its end a domain's shutdown event may arrive.
const LATENESS: Duration = Duration::from_secs(2);

/// A libvirt daemon.
pub struct Libvirt {
    program: String,
    uri: String,
    /// Cache of the virsh processes that read commands from their input.
    cache: PathBuf,
    owner: OnceCell<Option<(u32, u32)>>,
    listening: Once,
    shutdowns: Arc<ShutdownReasons>,
}

/// Reasons of shutdowns, as reported by QEMU, of the domains of interest.
#[derive(Default)]
struct ShutdownReasons {
    reasons: Mutex<HashMap<String, Option<String>>>,
    news: Notify,
}

/// State of a domain in libvirt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DomainState {
    /// The domain does not exist.
    Absent,
    /// The domain runs.
    On,
    /// The domain is off, for this reason (`virsh domstate --reason`).
    Off(String),
}

impl Libvirt {
    /// Creates the client. It connects when it is first used. `cache` is a folder of its own for files of virsh, which may not
    /// exist.
    pub fn new(uri: String, cache: PathBuf) -> Libvirt {
        Libvirt::by(PROGRAM.into(), uri, cache)
    }

    /// Creates a client that runs another program in place of virsh.
    pub fn by(program: String, uri: String, cache: PathBuf) -> Libvirt {
        let (owner, listening) = (OnceCell::new(), Once::new());
        Libvirt { program, uri, cache, owner, listening, shutdowns: Arc::default() }
    }

    /// Runs a virsh command and returns its output.
    pub async fn ask(&self, command: &[&str]) -> Result<String, HostError> {
        let what = command.first().copied().unwrap_or_default();
        let (is_done, answer, complaint) = self.talk(what, command, None).await?;
        if is_done { Ok(answer) } else { Err(self.refused(what, &complaint)) }
    }

    /// Returns what names the present run of the domain with this UUID for `ask_agent`; `None`: it is off. A later run has another
    /// id.
    pub async fn run_of(&self, uuid: &str) -> Result<Option<String>, HostError> {
        let id = self.ask(&["domid", uuid]).await?;
        // If no domain has the id any more, virsh looks for one of that name. None has a name with a sign.
        Ok(id.trim().parse::<u32>().ok().map(|id| format!("+{id}")))
    }

    /// Asks the guest agent of a domain, which has so long to answer. What it is asked may be secret, so it is no argument, which
    /// every user of the host could read, but input of virsh.
    pub async fn ask_agent(
        &self,
        domain: &str,
        patience: Duration,
        question: &Value,
    ) -> Result<String, HostError> {
        let what = "qemu-agent-command";
        let line = format!("{what} {domain} --timeout {} '{}'\n", patience.as_secs(), quotable(question));
        let (_, answer, complaint) = self.talk(what, &[], Some(&line)).await?;
        // virsh succeeds whatever becomes of a command of its input.
        spoken(&answer).map(str::to_owned).ok_or_else(|| self.refused(what, &complaint))
    }

    /// Runs virsh with these arguments, and this line as input. Returns whether it has succeeded, and what it has written to its
    /// standard output and error.
    async fn talk(
        &self,
        what: &str,
        command: &[&str],
        line: Option<&str>,
    ) -> Result<(bool, String, String), HostError> {
        let unavailable = |why: &str| self.cannot(ErrorCode::Unavailable, what, why);
        let mut virsh = self.virsh(command);
        if line.is_some() {
            virsh.stdin(Stdio::piped());
            self.keep_no_history(&mut virsh);
        }
        let mut virsh = tokio::process::Command::from(virsh);
        let mut child = virsh.kill_on_drop(true).spawn().map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => unavailable("virsh is not installed (Debian: libvirt-clients)"),
            _ => unavailable(&format!("virsh cannot be started: {e}")),
        })?;
        let (input, answer, complaint) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let talk = async {
            let write = async {
                if let (Some(mut input), Some(line)) = (input, line) {
                    // One that has ended has said why.
                    let _ = input.write_all(line.as_bytes()).await;
                }
            };
            let read = async {
                tokio::join!(read(answer, MOST_ANSWER_BYTES), read(complaint, MOST_COMPLAINT_BYTES))
            };
            let ((), said) = tokio::join!(write, read);
            (child.wait().await, said)
        };
        let Ok((status, (answer, complaint))) = timeout(PATIENCE, talk).await else {
            return Err(unavailable(&format!("libvirtd has not answered for {} s", PATIENCE.as_secs())));
        };
        Ok((status.map_err(|e| unavailable(&e.to_string()))?.success(), answer, complaint))
    }

    /// Prepares a virsh that reads commands from its input. It takes them for those of a person, and would write each to the history
    /// in the user's cache.
    fn keep_no_history(&self, virsh: &mut Command) {
        virsh.env("XDG_CACHE_HOME", &self.cache).env("VIRSH_HISTSIZE", "0").env("INPUTRC", "/dev/null");
        // Without this variable the socket of a user's libvirtd is looked for in the cache.
        virsh.env("XDG_RUNTIME_DIR", user_runtime_folder());
        // One that is started here would have this environment.
        virsh.env("LIBVIRT_AUTOSTART", "0");
    }

    fn cannot(&self, code: ErrorCode, what: &str, why: &str) -> HostError {
        HostError::new(code, format!("libvirt ({}): {what}: {why}", self.uri))
    }

    fn refused(&self, what: &str, complaint: &str) -> HostError {
        let words: Vec<&str> =
            complaint.lines().map(|line| line.trim_start_matches("error: ").trim()).collect();
        let code = match complaint.contains("failed to connect") {
            true => ErrorCode::Unavailable,
            false => ErrorCode::Internal,
        };
        self.cannot(code, what, &words.join(": "))
    }

    /// Returns the state of the domain with this UUID.
    pub async fn state(&self, uuid: &str) -> Result<DomainState, HostError> {
        match self.ask(&["domstate", uuid, "--reason"]).await {
            Ok(said) => Ok(state(&said)),
            Err(e) if e.code == ErrorCode::Unavailable => Err(e),
            // Error messages of libvirtd are localized, so the list of domains decides.
            Err(e) => {
                match self.ask(&["list", "--all", "--uuid"]).await?.lines().any(|line| line.trim() == uuid) {
                    true => Err(e),
                    false => Ok(DomainState::Absent),
                }
            }
        }
    }

    /// User and group that libvirt runs QEMU as; `None`: our own.
    pub async fn owner(&self) -> Result<Option<(u32, u32)>, HostError> {
        let ask = async { Ok(owner(&self.ask(&["capabilities"]).await?)) };
        self.owner.get_or_try_init(|| ask).await.copied()
    }

    /// Path of the file with a domain's process id.
    pub fn pid_file(&self, domain: &str) -> PathBuf {
        let of_user = self.uri.ends_with("/session") && !rustix::process::geteuid().is_root();
        let folder = match of_user {
            true => user_runtime_folder().join("libvirt/qemu/run"),
            false => PathBuf::from("/run/libvirt/qemu"),
        };
        folder.join(format!("{domain}.pid"))
    }

    /// Starts to note why the guest of this domain ends.
    pub fn listen_to(&self, domain: &str) {
        self.shutdowns.reasons().insert(domain.to_owned(), None);
        self.listening.call_once(|| {
            let virsh = Libvirt::by(self.program.clone(), self.uri.clone(), self.cache.clone());
            let shutdowns = Arc::clone(&self.shutdowns);
            // The child ends with the thread that started it, so it needs its own.
            std::thread::spawn(move || {
                loop {
                    virsh.read_events(&shutdowns);
                    std::thread::sleep(PAUSE);
                }
            });
        });
    }

    /// Whether shutdowns of this domain are noted.
    pub fn listens_to(&self, domain: &str) -> bool {
        self.shutdowns.reasons().contains_key(domain)
    }

    /// Returns why the guest of a domain has ended, from QEMU's `SHUTDOWN` event. The event may arrive a little after the
    /// end.
    pub async fn reason(&self, domain: &str) -> Option<String> {
        let wait = async {
            loop {
                let news = self.shutdowns.news.notified();
                if let reason @ Some(_) = self.shutdowns.reasons().get(domain)?.clone() {
                    return reason;
                }
                news.await;
            }
        };
        timeout(LATENESS, wait).await.unwrap_or(None)
    }

    /// Stops noting shutdowns of this domain.
    pub fn forget(&self, domain: &str) {
        self.shutdowns.reasons().remove(domain);
    }

    /// Reads events until libvirtd ends or refuses.
    fn read_events(&self, shutdowns: &ShutdownReasons) {
        let mut virsh = self.virsh(&["qemu-monitor-event", "--event", "SHUTDOWN", "--loop"]);
        end_with_parent(&mut virsh);
        let Ok(mut child) = virsh.stderr(Stdio::null()).spawn() else { return };
        if let Some(output) = child.stdout.take() {
            let mut output = BufReader::new(output);
            let mut line = Vec::new();
            while output.by_ref().take(MOST_LINE_BYTES).read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                if let Some((domain, reason)) = shutdown(&String::from_utf8_lossy(&line)) {
                    shutdowns.note(&domain, reason);
                }
                line.clear();
            }
        }
        let _ = child.kill();
        let _ = child.wait();
    }

    fn virsh(&self, command: &[&str]) -> Command {
        let mut virsh = Command::new(&self.program);
        default_signals(&mut virsh);
        virsh.args(["--quiet", "--connect", &self.uri]).args(command).env("LC_ALL", "C");
        virsh.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        virsh
    }
}

impl ShutdownReasons {
    /// The first reason counts: QEMU reports another when libvirtd then ends it.
    fn note(&self, domain: &str, reason: String) {
        if let Some(known) = self.reasons().get_mut(domain) {
            known.get_or_insert(reason);
        }
        self.news.notify_waiters();
    }

    fn reasons(&self) -> MutexGuard<'_, HashMap<String, Option<String>>> {
        self.reasons.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

async fn read(stream: Option<impl AsyncRead + Unpin>, most_bytes: u64) -> String {
    let mut said = Vec::new();
    if let Some(mut stream) = stream {
        let _ = (&mut stream).take(most_bytes).read_to_end(&mut said).await;
        // Read on, so that a process with more output can end.
        let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    }
    String::from_utf8_lossy(&said).into_owned()
}

/// Formats a question so that it can stand between single quotes in a line of virsh's input: in ASCII, since virsh may take other
/// bytes for keys.
fn quotable(question: &Value) -> String {
    let mut text = String::new();
    for c in question.to_string().chars() {
        match c {
            '\'' => text += "\\u0027",
            ' '..='~' => text.push(c),
            _ => {
                let mut units = [0; 2];
                c.encode_utf16(&mut units).iter().for_each(|unit| text += &format!("\\u{unit:04x}"));
            }
        }
    }
    text
}

/// Finds the answer of an agent in what virsh writes: its prompt, its input again, and the answer in a line of its own.
fn spoken(output: &str) -> Option<&str> {
    let plain = |line: &str| line.trim_start_matches(PROMPT).starts_with('{');
    output.lines().rfind(|line| plain(line)).map(|line| line.trim_start_matches(PROMPT))
}

fn state(said: &str) -> DomainState {
    match said.trim().split_once(" (") {
        Some(("shut off", reason)) => DomainState::Off(reason.trim_end_matches(')').to_owned()),
        _ => DomainState::On,
    }
}

/// Parses user and group of the base label from `virsh capabilities` (libvirt, drvqemu: DAC).
fn owner(capabilities: &str) -> Option<(u32, u32)> {
    let (_, rights) = capabilities.split_once("<model>dac</model>")?;
    let (rights, _) = rights.split_once("</secmodel>")?;
    let (_, label) = rights.split_once("<baselabel")?.1.split_once('>')?;
    let (user, group) = label.split_once('<')?.0.strip_prefix('+')?.split_once(":+")?;
    Some((user.parse().ok()?, group.parse().ok()?))
}

/// Parses domain and reason from a line of `virsh qemu-monitor-event`.
fn shutdown(line: &str) -> Option<(String, String)> {
    let (domain, details) = line.split_once(" for domain '")?.1.split_once("': ")?;
    let details: Value = serde_json::from_str(details.trim()).ok()?;
    Some((domain.to_owned(), details["reason"].as_str()?.to_owned()))
}

/// Folder of a user's libvirtd (XDG Base Directory: `XDG_RUNTIME_DIR`, else the cache).
fn user_runtime_folder() -> PathBuf {
    let folder = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = || {
        folder("XDG_CACHE_HOME")
            .unwrap_or_else(|| folder("HOME").unwrap_or_else(|| Path::new("/").into()).join(".cache"))
    };
    folder("XDG_RUNTIME_DIR").unwrap_or_else(cache)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(uri: &str) -> Libvirt {
        Libvirt::new(uri.into(), "/nonexistent".into())
    }

    #[test]
    fn what_virsh_says_is_understood() {
        assert_eq!(state("running (booted)\n\n"), DomainState::On);
        assert_eq!(state("in shutdown (unknown)\n"), DomainState::On);
        assert_eq!(state("shut off (crashed)\n\n"), DomainState::Off("crashed".into()));
        let line = "event SHUTDOWN at 1795368940.970306 for domain 'spillway-a': {\"guest\":true,\"reason\":\"guest-reset\"}\n";
        assert_eq!(shutdown(line), Some(("spillway-a".into(), "guest-reset".into())));
        for nonsense in ["", "events received: 3", "event X for domain 'a': {", "event X for domain 'a': {}"]
        {
            assert_eq!(shutdown(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn an_agents_question_is_a_line_for_virsh_and_its_answer_is_found() {
        let question = serde_json::json!({ "a": "it's \u{1f600}\n\u{7f}é\t\\" });
        let text = quotable(&question);
        assert!(text.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b'\''), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), question);
        let answer = "{\"return\":{\"a\":\"virsh # {\"}}";
        for output in [
            format!("virsh # qemu-agent-command u '{{\"a\":1}}'\n{answer}\n\nvirsh # \n"),
            format!("virsh # {answer}\n\nvirsh # \n"),
            format!("{answer}\n"),
        ] {
            assert_eq!(spoken(&output), Some(answer), "{output}");
        }
        assert_eq!(spoken("virsh # qemu-agent-command u '{}'\n\nvirsh # \n"), None);
    }

    #[test]
    fn the_group_of_its_qemu_is_found() {
        let label = |label: &str| {
            format!(
                "<secmodel><model>apparmor</model><baselabel type='kvm'>x:+7</baselabel></secmodel><secmodel>
                 <model>dac</model><doi>0</doi><baselabel type='kvm'>{label}</baselabel></secmodel>"
            )
        };
        assert_eq!(owner(&label("+64055:+993")), Some((64055, 993)));
        assert_eq!(owner(&label("nobody")), None);
        // That of a user runs QEMU as this user, and says nothing of it.
        assert_eq!(owner("<secmodel><model>none</model></secmodel>"), None);
    }

    #[tokio::test]
    async fn a_libvirt_that_is_not_there_says_so() {
        let libvirt = at("qemu+unix:///system?socket=/nonexistent/socket");
        let error = libvirt.state("11111111-2222-4333-8444-555555555555").await.unwrap_err();
        assert_eq!(error.code, ErrorCode::Unavailable, "{error}");
        assert!(error.message.contains("/nonexistent/socket"), "{error}");
    }

    #[tokio::test]
    async fn what_an_agent_is_asked_is_kept_in_no_file() {
        if !Path::new("/usr/bin/virsh").exists() {
            spillway_testkit::skip("virsh is not installed (Debian: libvirt-clients)");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let libvirt = Libvirt::new("test:///default".into(), dir.path().to_owned());
        let secret = format!("secret-{}-{:?}", std::process::id(), std::time::SystemTime::now());
        let question = serde_json::json!({ "execute": secret });
        let run = libvirt.run_of("6695eb01-f6a4-8304-79aa-97f2502e193f").await.unwrap().unwrap();
        let error = libvirt.ask_agent(&run, Duration::from_secs(1), &question).await.unwrap_err();
        assert!(error.message.contains("not supported"), "it has come to this domain: {error}");
        let own = dir.path().join("libvirt/virsh/history");
        assert_eq!(std::fs::read_to_string(own).unwrap_or_default(), "");
        let users = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let users = users.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
        if let Some(users) = users {
            let kept = std::fs::read_to_string(users.join("libvirt/virsh/history")).unwrap_or_default();
            assert!(!kept.contains("secret-"), "it is in the history of the user");
        }
    }

    #[tokio::test]
    async fn the_first_reason_counts_and_only_of_whom_is_listened_to() {
        let libvirt = at("qemu:///system");
        libvirt.shutdowns.reasons().insert("spillway-a".into(), None);
        for (domain, reason) in
            [("spillway-a", "guest-reset"), ("spillway-a", "host-signal"), ("b", "guest-shutdown")]
        {
            libvirt.shutdowns.note(domain, reason.into());
        }
        assert_eq!(libvirt.reason("spillway-a").await.as_deref(), Some("guest-reset"));
        assert_eq!(libvirt.reason("b").await, None);
    }
}
