//! A disk served by the shipped program, as tests and measurements start it.
//!
//! Knows of it what a user knows: the command line, the line that says it is ready, the figures, and its messages.
//! Invariant: a [`Disk`] that is dropped has ended.

use crate::process::{Server, wait_until};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long it may take until it is ready, and until it answers.
const PATIENCE: Duration = Duration::from_secs(30);

/// The program that belongs to this one: `SPILLWAY_PROGRAM`, or what cargo built into the same folder, together with the
/// program that serves disks. An error if one of them is not there, or was built of other sources than there are now.
pub fn program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("SPILLWAY_PROGRAM") {
        let path = PathBuf::from(path);
        ensure!(path.is_file(), "SPILLWAY_PROGRAM: {}: no such file", path.display());
        return Ok(path);
    }
    let me = std::env::current_exe().context("this program's own path is unknown")?;
    // cargo puts tests one folder deeper than programs.
    let dir = me.parent().context("this program lies in no folder")?;
    let dir = if dir.ends_with("deps") { dir.parent().unwrap_or(dir) } else { dir };
    for name in ["spillway", "spillway-worker", "spillway-streamd"] {
        check_built(&dir.join(name))?;
    }
    Ok(dir.join("spillway"))
}

/// The daemon that belongs to this program, by the rules of [`program`].
pub fn daemon_program() -> Result<PathBuf> {
    let path = program()?.with_file_name("spillwayd");
    check_built(&path)?;
    Ok(path)
}

/// Refuses a program that cargo has not built, or has built of other sources than there are now.
pub fn check_built(path: &Path) -> Result<()> {
    let what = match (path.is_file(), changed_source(path)) {
        (false, _) => "not there".to_owned(),
        (true, None) => return Ok(()),
        (true, Some(source)) => {
            format!("built before {} changed: what would be tested is not what is written", source.display())
        }
    };
    let dir = path.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    let profile = match dir {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let package = match path.file_name().and_then(|name| name.to_str()) {
        Some("spillwayd") => "spillway-host",
        Some(name) => name,
        None => "",
    };
    bail!(
        "{}: {what}: build it with 'cargo build --profile {profile} -p {package}', or set SPILLWAY_PROGRAM",
        path.display()
    );
}

/// A source that has changed, or has gone, since the program was built. By the list of all sources that cargo leaves beside it;
/// a program without one is installed, and was built of nothing that is here.
fn changed_source(program: &Path) -> Option<PathBuf> {
    let modified = |path: &Path| path.metadata().and_then(|file| file.modified()).ok();
    let built = modified(program)?;
    let list = std::fs::read_to_string(program.with_extension("d")).ok()?;
    // Blanks in names are escaped.
    let list = list.replace("\\ ", "\0");
    let sources =
        list.split_once(": ")?.1.split_whitespace().map(|name| PathBuf::from(name.replace('\0', " ")));
    sources.into_iter().find(|source| modified(source).is_none_or(|at| at > built))
}

/// A running `spillway serve` with all its sockets.
pub struct Disk {
    server: Server,
    dir: PathBuf,
    /// What it said when it was ready (`--json`).
    pub report: Value,
}

impl Disk {
    /// Serves an image: sockets and messages go to `dir`, and the overflow file too unless the mode has none or the
    /// options name another place for it.
    pub fn start(dir: &Path, image: &Path, options: &[&str]) -> Result<Disk> {
        Disk::start_with(&program()?, dir, image, options)
    }

    /// The same with a program of the caller's.
    pub fn start_with(program: &Path, dir: &Path, image: &Path, options: &[&str]) -> Result<Disk> {
        let mut arguments = vec!["--image".to_string(), image.display().to_string()];
        if !options.windows(2).any(|o| o == ["--mode", "ram"]) && !options.contains(&"--overflow-dir") {
            arguments.extend(["--overflow-dir".to_string(), dir.display().to_string()]);
        }
        arguments.extend(options.iter().map(ToString::to_string));
        Disk::serve(program, dir, &arguments)
    }

    /// Serves what the options say; sockets and messages go to `dir`.
    pub fn serve(program: &Path, dir: &Path, options: &[String]) -> Result<Disk> {
        let mut arguments: Vec<String> = ["serve", "--json"].map(String::from).to_vec();
        for (option, name) in [("--vhost-user", "vhost"), ("--nbd", "nbd"), ("--control", "control")] {
            arguments.extend([option.to_string(), dir.join(name).display().to_string()]);
        }
        arguments.extend_from_slice(options);
        let log = dir.join("spillway.log");
        let mut server = Server::start(
            "spillway",
            program.to_str().context("the program's path is not UTF-8")?,
            &arguments,
            None,
            &log,
        )?;
        let mut ended = None;
        let ready = wait_until(PATIENCE, || {
            ended = server.ended().ok().flatten();
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            let line = text.split_inclusive('\n').find(|l| l.starts_with('{') && l.ends_with('\n'));
            match line.map(serde_json::from_str) {
                Some(Ok(report)) => Some(Ok(report)),
                Some(Err(e)) => Some(Err(anyhow::Error::from(e))),
                None => ended.map(|status| Err(anyhow::anyhow!("it ended with {status}"))),
            }
        });
        let Some(ready) = ready else {
            bail!("not ready within {PATIENCE:?}\n{}\n{}", server.command, server.tail())
        };
        let report = ready.with_context(|| format!("{}\n{}", server.command, server.tail()))?;
        Ok(Disk { server, dir: dir.to_path_buf(), report })
    }

    /// The socket that a VMM connects to.
    pub fn vhost(&self) -> PathBuf {
        self.dir.join("vhost")
    }

    /// Where an NBD client connects.
    pub fn nbd(&self) -> PathBuf {
        self.dir.join("nbd")
    }

    /// The same as NBD clients write it.
    pub fn nbd_uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.nbd().display())
    }

    /// Where figures and the like are asked for.
    pub fn control(&self) -> PathBuf {
        self.dir.join("control")
    }

    /// The process that was started.
    pub fn supervisor(&self) -> u32 {
        self.server.pid()
    }

    /// The process that serves now; an error between two of them.
    pub fn worker(&self) -> Result<u32> {
        let pid = self.figure("worker_pid")?;
        ensure!(pid != 0, "no worker at the moment");
        Ok(u32::try_from(pid)?)
    }

    /// The command that started it.
    pub fn command(&self) -> &str {
        &self.server.command
    }

    /// All counters, as `spillway stats --json` prints them.
    pub fn stats(&self) -> Result<Value> {
        stats(&self.control())
    }

    /// One figure by its dotted key.
    pub fn figure(&self, key: &str) -> Result<u64> {
        figure(&self.stats()?, key)
    }

    /// What it has printed.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.dir.join("spillway.log")).unwrap_or_default())
            .into_owned()
    }

    /// Asks it to end: an error unless it ends well.
    pub fn stop(mut self) -> Result<()> {
        let status = self.server.stop()?;
        ensure!(status.success(), "spillway ended with {status}\n{}", self.server.tail());
        Ok(())
    }
}

/// What `spillway stats --json` prints, asked at the same socket: 1 ms, where a program for each look takes 11 and shares
/// this process's files for a moment.
pub fn stats(control: &Path) -> Result<Value> {
    let ask = || -> Result<Value> {
        let mut stream = UnixStream::connect(control)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"{\"command\":\"stats\"}\n")?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        let mut answer: Value = serde_json::from_str(&line).with_context(|| format!("it said '{line}'"))?;
        match answer.get_mut("ok") {
            Some(stats) => Ok(stats.take()),
            None => bail!("it said {answer}"),
        }
    };
    ask().with_context(|| format!("the figures of the disk at {}", control.display()))
}

/// What of a disk's figures says that what it did cannot be counted on, if something does.
pub fn went_wrong(stats: &Value) -> Option<String> {
    let all = [
        ("failed.requests", "requests failed"),
        ("checksum_mismatches", "blocks came back other than they were written"),
        ("restarts", "workers ended"),
        ("overflow.write_errors", "writes of the overflow failed"),
    ];
    all.into_iter().find_map(|(key, what)| match figure(stats, key) {
        Ok(0) => None,
        Ok(count) => Some(format!("{count} {what}")),
        Err(_) => Some(format!("its disk does not say how many {what}")),
    })
}

/// One figure by its dotted key.
pub fn figure(stats: &Value, key: &str) -> Result<u64> {
    let pointer = format!("/{}", key.replace('.', "/"));
    stats.pointer(&pointer).and_then(Value::as_u64).with_context(|| format!("no figure {key} in {stats}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, write};
    use std::time::SystemTime;

    #[test]
    fn a_program_that_is_older_than_a_source_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let [program, list, source] =
            ["spillwayd", "spillwayd.d", "a source.rs"].map(|name| dir.path().join(name));
        let at = |path: &Path, seconds| {
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
        };
        let refused = || check_built(&program).map_err(|e| e.to_string());
        assert!(refused().unwrap_err().contains("not there: build it with"));
        write(&program, "").unwrap();
        at(&program, 1000);
        assert_eq!(refused(), Ok(()), "it is installed");
        write(&source, "").unwrap();
        let names = format!("{}: {}\n", program.display(), source.display().to_string().replace(' ', "\\ "));
        write(&list, names).unwrap();
        at(&source, 999);
        assert_eq!(refused(), Ok(()));
        at(&source, 1001);
        let text = refused().unwrap_err();
        assert!(text.contains("a source.rs changed") && text.contains("-p spillway-host"), "{text}");
        std::fs::remove_file(&source).unwrap();
        assert!(refused().is_err(), "a source that has gone is another state");
    }
}
