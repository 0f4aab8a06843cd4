//! Programs under measurement, as children. Owns their processes; never ends one that it did not start.
//!
//! Invariant: a [`Server`] that is dropped has ended, and has been waited for.

use crate::daemon::end_machines;
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// When this program is interrupted or asked to end, removes these directories, with the machines that run below them, and
/// ends at once; its servers follow it. Once in a program.
pub fn clean_up_when_interrupted(directories: Vec<PathBuf>) -> Result<()> {
    ctrlc::set_handler(move || {
        for directory in &directories {
            end_machines(directory);
            let _ = std::fs::remove_dir_all(directory);
        }
        std::process::exit(130);
    })
    .context("cannot listen for signals")
}

/// Time within which a stopped process stands still.
const STILL_WITHIN: Duration = Duration::from_secs(20);

/// Sends a process a signal. After SIGSTOP it waits until all threads stand still: one of them takes the signal when it runs next, on a
/// busy host some time later, and until then the others go on.
pub fn send_signal(pid: Pid, signal: Signal) -> Result<()> {
    kill_process(pid, signal).with_context(|| format!("process {pid} cannot be sent {signal:?}"))?;
    if signal != Signal::STOP {
        return Ok(());
    }
    let stands_still = || all_stand_still(pid).then_some(());
    wait_until(STILL_WITHIN, stands_still).with_context(|| format!("process {pid} does not stand still"))
}

/// Whether all threads of a process are stopped, traced or ended.
fn all_stand_still(pid: Pid) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())) else { return true };
    threads.flatten().all(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // The name before it may contain anything.
        stat.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with(['T', 't', 'Z', 'X']))
    })
}

/// The least and the longest time between two looks of a wait.
const LEAST: Duration = Duration::from_millis(2);
const LONGEST: Duration = Duration::from_millis(500);

/// Waits until `done` gives something; `None` when the deadline has passed. A look that takes long, as one that starts a
/// program does, is taken less often: a tenth of the time at most goes to looking, and the rest to what is waited for.
pub fn wait_until<T>(deadline: Duration, done: impl FnMut() -> Option<T>) -> Option<T> {
    look_until(deadline, done, |look| (9 * look).clamp(LEAST, LONGEST))
}

/// The same, however long a look takes: for a moment that is measured, or for what is soon over.
pub fn wait_closely<T>(deadline: Duration, done: impl FnMut() -> Option<T>) -> Option<T> {
    look_until(deadline, done, |_| LEAST)
}

fn look_until<T>(
    deadline: Duration,
    mut done: impl FnMut() -> Option<T>,
    pause: impl Fn(Duration) -> Duration,
) -> Option<T> {
    let until = Instant::now() + deadline;
    loop {
        let look = Instant::now();
        if let Some(value) = done() {
            return Some(value);
        }
        let now = Instant::now();
        if now >= until {
            return None;
        }
        std::thread::sleep(pause(now - look));
    }
}

/// A command line that can be printed and pasted.
pub fn line(program: &str, arguments: &[String]) -> String {
    let plain =
        |s: &str| !s.is_empty() && s.chars().all(|c| c.is_ascii_alphanumeric() || "-_=.,/:+@%".contains(c));
    std::iter::once(program)
        .chain(arguments.iter().map(String::as_str))
        .map(|s| if plain(s) { s.to_string() } else { format!("'{}'", s.replace('\'', "'\\''")) })
        .collect::<Vec<_>>()
        .join(" ")
}

/// A child process whose messages go to a file.
pub struct Server {
    child: Child,
    name: String,
    log: PathBuf,
    /// The command line, for reports.
    pub command: String,
}

impl Server {
    /// Starts a program; with `core`, on that processor core only. It is asked to end when the calling thread
    /// ends, so that nothing is left behind by a program that is killed.
    pub fn start(
        name: &str,
        program: &str,
        arguments: &[String],
        core: Option<usize>,
        log: &Path,
    ) -> Result<Server> {
        let mut all = vec![program.to_string()];
        if let Some(core) = core {
            all.splice(0..0, ["taskset".to_string(), "-c".to_string(), core.to_string()]);
        }
        all.extend_from_slice(arguments);
        let (first, rest) = all.split_first().context("no program")?;
        let file = File::create(log).with_context(|| format!("{}: cannot create", log.display()))?;
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "TERM", first])
            .args(rest)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("{name}: cannot start {first}"))?;
        Ok(Server { child, name: name.into(), log: log.into(), command: line(first, rest) })
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The last lines of its messages.
    pub fn tail(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    /// Waits until a file is there that it is to make; of a socket, until it listens. An error when it ended before.
    pub fn wait_for(&mut self, path: &Path, deadline: Duration) -> Result<()> {
        let state = wait_until(deadline, || {
            if is_ready(path) {
                return Some(None);
            }
            self.child.try_wait().ok().flatten().map(Some)
        });
        let what = match state {
            Some(None) => return Ok(()),
            Some(Some(status)) => format!("ended with {status} before it was ready"),
            None => format!("{} was not ready within {deadline:?}", path.display()),
        };
        bail!("{}: {what}\n{}\n{}", self.name, self.command, self.tail())
    }

    /// Whether it has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("{}: cannot be waited for", self.name))
    }

    /// Waits for it to end by itself.
    pub fn wait(&mut self, deadline: Duration) -> Result<ExitStatus> {
        match wait_until(deadline, || self.ended().transpose()) {
            Some(status) => status,
            None => bail!("{}: did not end within {deadline:?}\n{}", self.name, self.tail()),
        }
    }

    /// Stops it (SIGSTOP) until it is asked to end.
    pub fn pause(&mut self) -> Result<()> {
        ensure!(self.ended()?.is_none(), "{}: has ended\n{}", self.name, self.tail());
        send_signal(Pid::from_child(&self.child), Signal::STOP)
            .with_context(|| format!("{}: cannot be stopped", self.name))
    }

    /// Lets it go on after [`Server::pause`].
    pub fn resume(&mut self) -> Result<()> {
        ensure!(self.ended()?.is_none(), "{}: has ended\n{}", self.name, self.tail());
        kill_process(Pid::from_child(&self.child), Signal::CONT)
            .with_context(|| format!("{}: cannot go on", self.name))
    }

    /// Kills it and does not wait: it must be killed or dropped after that.
    pub fn kill_soon(&mut self) {
        let _ = self.child.kill();
    }

    /// Kills it and waits.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks it to end (SIGTERM) and waits, also for one that was stopped (SIGSTOP); kills it when it does not.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        if let Some(status) = self.ended()? {
            return Ok(status);
        }
        let pid = Pid::from_child(&self.child);
        for signal in [Signal::TERM, Signal::CONT] {
            kill_process(pid, signal).with_context(|| format!("{}: cannot be asked to end", self.name))?;
        }
        if let Some(status) = wait_until(Duration::from_secs(20), || self.ended().transpose()) {
            return status;
        }
        self.kill();
        bail!("{}: did not end within 20 s of SIGTERM and was killed\n{}", self.name, self.tail())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

/// Whether a file is there, and listens if it is a socket, by the name that it was bound by: it has the name some time
/// before. Whoever tried it by a connection might take that of the only client.
fn is_ready(path: &Path) -> bool {
    /// `__SO_ACCEPTCON` of the kernel's `linux/net.h`, in the fourth column.
    const LISTENS: u32 = 1 << 16;
    let Ok(metadata) = path.metadata() else { return false };
    if !metadata.file_type().is_socket() {
        return true;
    }
    let sockets = std::fs::read("/proc/net/unix").unwrap_or_default();
    String::from_utf8_lossy(&sockets).lines().any(|line| {
        // Seven columns and the path, which may hold spaces.
        let flags = line.split_whitespace().nth(3).and_then(|flags| u32::from_str_radix(flags, 16).ok());
        flags.is_some_and(|flags| flags & LISTENS != 0)
            && path.to_str().is_some_and(|path| line.ends_with(&format!(" {path}")))
    })
}

/// Processor time that a process and its children, by process id, have used until now: user and system.
pub fn cpu_seconds(pid: u32) -> f64 {
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    family(pid).iter().filter_map(|&p| stat(p)).map(|s| s.ticks as f64 / ticks).sum()
}

/// Processor time that these processes have used until now, without their children: user and system. An error when
/// one of them is gone.
pub fn cpu_seconds_of(pids: &[u32]) -> Result<f64> {
    let ticks =
        pids.iter().map(|&p| stat(p).map(|s| s.ticks).with_context(|| format!("process {p} is gone")));
    Ok(ticks.sum::<Result<u64>>()? as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Bytes that the kernel read from and wrote to block devices for a process and its children until now, what it
/// read ahead included; memory files do not count. `None` where this user may not know.
pub fn storage_bytes(pid: u32) -> Option<(u64, u64)> {
    let mut sum = (0, 0);
    for member in family(pid) {
        let text = std::fs::read_to_string(format!("/proc/{member}/io")).ok()?;
        let field = |name: &str| text.lines().find_map(|l| l.strip_prefix(name)?.trim().parse::<u64>().ok());
        sum = (sum.0 + field("read_bytes:")?, sum.1 + field("write_bytes:")?);
    }
    Some(sum)
}

struct Stat {
    parent: u32,
    ticks: u64,
}

fn stat(pid: u32) -> Option<Stat> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in parentheses and may hold anything.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    Some(Stat {
        parent: fields.get(1)?.parse().ok()?,
        ticks: fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?,
    })
}

/// A process and its descendants.
fn family(pid: u32) -> Vec<u32> {
    let mut parents = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        if let Some(p) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok())
            && let Some(s) = stat(p)
        {
            parents.push((p, s.parent));
        }
    }
    let mut all = vec![pid];
    let mut i = 0;
    while let Some(&of) = all.get(i) {
        all.extend(parents.iter().filter(|(_, parent)| *parent == of).map(|(p, _)| *p));
        i += 1;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn a_server_that_was_stopped_hears_that_it_is_to_end() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let mut server = Server::start("sleeper", "sleep", &["600".into()], None, &log).unwrap();
        server.pause().unwrap();
        let state = || std::fs::read_to_string(format!("/proc/{}/stat", server.pid())).unwrap_or_default();
        wait_until(Duration::from_secs(20), || state().contains(") T ").then_some(())).unwrap();
        // Not by the kill that comes 20 s later.
        assert_eq!(server.stop().unwrap().signal(), Some(Signal::TERM.as_raw()));
        assert!(server.pause().is_err());
    }

    #[test]
    fn a_server_that_ends_early_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let arguments = ["-c".to_string(), "echo no disk here; exit 3".to_string()];
        let mut server = Server::start("shell", "sh", &arguments, None, &log).unwrap();
        let error =
            server.wait_for(&dir.path().join("none"), Duration::from_secs(20)).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("no disk here"), "{error}");
    }

    #[test]
    fn a_server_is_ready_when_its_socket_listens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a socket");
        let log = dir.path().join("log");
        let mut server = Server::start("sleep", "sleep", &["100".to_string()], None, &log).unwrap();
        let unix = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&unix, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        let early = server.wait_for(&path, Duration::from_millis(50)).unwrap_err().to_string();
        assert!(early.contains("a socket was not ready within 50ms"), "{early}");
        listen(&unix, 1).unwrap();
        server.wait_for(&path, Duration::from_secs(20)).unwrap();
    }

    #[test]
    fn a_dropped_server_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let server =
            Server::start("sleep", "sleep", &["100".to_string()], None, &dir.path().join("log")).unwrap();
        let pid = server.pid();
        assert!(stat(pid).is_some());
        drop(server);
        assert!(stat(pid).is_none());
    }

    #[test]
    fn a_server_ends_with_the_thread_that_started_it() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let start = || Server::start("sleep", "sleep", &["100".to_string()], None, &log).unwrap();
        let mut server = std::thread::scope(|s| {
            s.spawn(|| {
                let server = start();
                // It asks to end with its parent before it becomes what it is to be.
                let name = format!("/proc/{}/comm", server.pid());
                let begun = wait_until(Duration::from_secs(20), || {
                    std::fs::read_to_string(&name).is_ok_and(|n| n.trim() == "sleep").then_some(())
                });
                begun.map(|()| server)
            })
            .join()
            .unwrap()
            .unwrap()
        });
        assert!(!server.wait(Duration::from_secs(20)).unwrap().success());
    }

    #[test]
    fn processor_time_includes_children() {
        let dir = tempfile::tempdir().unwrap();
        let busy = "(while :; do :; done) & echo ready; wait";
        let log = dir.path().join("log");
        let server = Server::start("shell", "sh", &["-c".into(), busy.into()], None, &log).unwrap();
        let used = wait_until(Duration::from_secs(20), || (cpu_seconds(server.pid()) > 0.1).then_some(()));
        for child in family(server.pid()).into_iter().skip(1) {
            kill_process(Pid::from_raw(child as i32).unwrap(), Signal::KILL).unwrap();
        }
        assert!(used.is_some());
    }

    #[test]
    fn storage_bytes_are_those_of_the_device() {
        let dir = tempfile::Builder::new().tempdir_in("/var/tmp").unwrap();
        let script = "dd if=/dev/zero of=$0 bs=1M count=8 oflag=direct 2>/dev/null; echo done >$0.done; exec sleep 100";
        let file = dir.path().join("f");
        let arguments = ["-c".to_string(), script.to_string(), file.display().to_string()];
        let mut server = Server::start("shell", "sh", &arguments, None, &dir.path().join("log")).unwrap();
        server.wait_for(&dir.path().join("f.done"), Duration::from_secs(20)).unwrap();
        let Some((_, written)) = storage_bytes(server.pid()) else {
            return crate::skip("/proc/PID/io cannot be read");
        };
        assert!(written >= 8 << 20, "{written}");
    }

    #[test]
    fn a_printed_command_line_is_quoted_where_it_must_be() {
        let arguments = ["a=b".to_string(), "two words".to_string(), "it's".to_string()];
        assert_eq!(line("x", &arguments), r#"x a=b 'two words' 'it'\''s'"#);
    }
}
