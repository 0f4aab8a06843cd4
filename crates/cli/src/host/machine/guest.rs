//! `spillway machine exec`, `put` and `get`: programs and files in a machine's guest.
//!
//! Invariant: a local file is whole or as it was; the exit code of `exec` is the program's, or one of those that are its own.

use crate::error::{Exit, Failure};
use crate::host::Daemon;
use crate::host::words::number;
use crate::output;
use clap::{Args, Subcommand};
use spillway_api::{
    Base64Bytes, GUEST_TIME_LIMIT_SECONDS_DEFAULT, GuestFile, GuestProgram, GuestProgramResult,
    MOST_GUEST_FILE_BYTES, MOST_GUEST_INPUT_BYTES, Name, bounds,
};
use std::collections::BTreeMap;
use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Exit code if the time limit is over, as of timeout(1).
const TIME_IS_OVER: u8 = 124;
/// Exit code if the program was not started, or its result is not known, as of podman and docker.
const NO_RESULT: u8 = 125;
/// Exit code of a program that a signal has ended, without the number of the signal, as of shells.
const BY_SIGNAL: u32 = 128;
/// Stands for standard input or output.
const STANDARD: &str = "-";

const EXEC_EXAMPLES: &str = "\
Examples:
  spillway machine exec desk-001 -- systemctl is-system-running
  There is no shell unless it is the program:
    spillway machine exec desk-001 -- sh -c 'echo $HOME; ls /tmp | wc -l'
  spillway machine exec desk-001 --time-limit 600 -- apt-get -y upgrade
  spillway machine exec -i desk-001 -- sh -s < setup.sh
  spillway machine exec win-001 -- powershell.exe -Command Get-Service

Exit codes: the program's; 128 and the number of a signal that ended it; 124: its time is over, and it
goes on; 125: it was not started, or what became of it is not known.";

const PUT_EXAMPLES: &str = "\
Examples:
  spillway machine put desk-001 setup.sh /root/setup.sh
  tar -cz site | spillway machine put desk-001 - /tmp/site.tar.gz
  A new file has the rights that the agent gives it:
    spillway machine exec desk-001 -- chmod 0755 /root/setup.sh";

const GET_EXAMPLES: &str = "\
Examples:
  spillway machine get desk-001 /etc/hostname .
  spillway machine get desk-001 /etc/os-release - | grep VERSION_ID
  spillway machine get win-001 'C:\\Windows\\debug\\netsetup.log' netsetup.log";

/// What to do in a guest.
#[derive(Debug, Subcommand)]
pub enum GuestCommand {
    /// Run a program in a machine's guest, by its guest agent
    ///
    /// The outputs are shown when the program has ended, at most the first MiB of each. The guest needs qemu-guest-agent.
    #[command(after_help = EXEC_EXAMPLES)]
    Exec(Exec),
    /// Write a file of at most 16 MiB in a machine's guest, by its guest agent
    ///
    /// Replaces a file that exists. If that fails, the file may have a part of the content.
    #[command(after_help = PUT_EXAMPLES)]
    Put {
        /// The machine
        name: Name,
        /// The file here; - is standard input
        local: PathBuf,
        /// Path of the file in the guest
        remote: String,
    },
    /// Read a file of at most 16 MiB in a machine's guest, by its guest agent
    #[command(after_help = GET_EXAMPLES)]
    Get {
        /// The machine
        name: Name,
        /// Path of the file in the guest
        remote: String,
        /// The file here, or a folder for it; - is standard output
        local: PathBuf,
    },
}

/// A program to run in a guest.
#[derive(Debug, Args)]
pub struct Exec {
    /// The machine
    name: Name,
    /// Pass standard input on, at most 64 KiB
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Set a variable; with it, the program has only the variables given. KEY alone passes on its value here [default: the
    /// agent's environment]
    #[arg(short = 'e', long = "env", value_name = "KEY=VALUE")]
    environment: Vec<String>,
    #[arg(
        long, value_name = "SECONDS", value_parser = number(&bounds::TIME_LIMIT_SECONDS),
        help = bounds::TIME_LIMIT_SECONDS.help(
            &format!("How long the end of the program is waited for [default: {GUEST_TIME_LIMIT_SECONDS_DEFAULT}]")
        )
    )]
    time_limit: Option<u32>,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    argv: Vec<String>,
}

impl GuestCommand {
    /// Does it.
    pub fn run(self, daemon: &Daemon) -> Result<ExitCode, Failure> {
        match self {
            GuestCommand::Exec(exec) => {
                return Ok(exec.run(daemon).unwrap_or_else(|failure| {
                    output::complain("error", &failure.message);
                    ExitCode::from(NO_RESULT)
                }));
            }
            GuestCommand::Put { name, local, remote } => {
                let content = if local.as_os_str() == STANDARD {
                    bounded("standard input", io::stdin(), MOST_GUEST_FILE_BYTES)?
                } else {
                    let file = File::open(&local).map_err(|e| of_file(&local, &e))?;
                    bounded(&local.display().to_string(), file, MOST_GUEST_FILE_BYTES)?
                };
                let file = daemon.client()?.write_in_guest(&name, &remote, content)?;
                daemon.show(&file, |file| format!("{}: {} bytes are written\n", file.path, file.bytes))?;
            }
            GuestCommand::Get { name, remote, local } => {
                let content = daemon.client()?.read_in_guest(&name, &remote)?;
                if local.as_os_str() == STANDARD {
                    return written(&content, io::stdout()).map(|()| ExitCode::SUCCESS);
                }
                let target = target(&local, &remote);
                store(&target, &content).map_err(|e| of_file(&target, &e))?;
                let file = GuestFile { path: remote, bytes: content.len() as u64 };
                daemon.show(&file, |file| format!("{}: {} bytes are read\n", file.path, file.bytes))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Exec {
    fn run(self, daemon: &Daemon) -> Result<ExitCode, Failure> {
        let Exec { name, stdin, environment, time_limit, argv } = self;
        let input = match stdin {
            true => Some(Base64Bytes(bounded("standard input", io::stdin(), MOST_GUEST_INPUT_BYTES)?)),
            false => None,
        };
        let environment =
            environment.iter().map(|text| variable(text)).collect::<Result<BTreeMap<_, _>, _>>()?;
        let program = GuestProgram {
            argv,
            environment: (!environment.is_empty()).then_some(environment),
            stdin_base64: input,
            time_limit_seconds: time_limit,
        };
        program.check().map_err(Failure::usage)?;
        let result = daemon.client()?.run_in_guest(&name, &program)?;
        if daemon.json {
            daemon.show(&result, |_| String::new())?;
        } else {
            show(&result)?;
        }
        if !result.ended {
            let seconds = program.time_limit().as_secs();
            let message = format!(
                "{name}: process {} has not ended within {seconds} s: it goes on, or what it has started still has its outputs open. \
                 No agent can end it: do that there ('spillway machine exec {name} -- kill {}', if it still runs)",
                result.pid, result.pid
            );
            output::complain("error", &message);
        }
        Ok(code(&result))
    }
}

/// Parses a variable. A name alone has the value that it has here.
fn variable(text: &str) -> Result<(String, String), Failure> {
    match text.split_once('=') {
        Some((name, value)) => Ok((name.into(), value.into())),
        None => {
            let value = std::env::var(text).map_err(|_| {
                Failure::usage(format!("--env {text}: there is no such variable here: give {text}=VALUE"))
            })?;
            Ok((text.into(), value))
        }
    }
}

fn show(result: &GuestProgramResult) -> Result<(), Failure> {
    written(&result.stdout_base64.0, io::stdout())?;
    // Whoever does not read errors misses this one, too.
    let _ = written(&result.stderr_base64.0, io::stderr());
    for (is_cut, what) in [(result.stdout_cut, "output"), (result.stderr_cut, "error")] {
        if is_cut {
            let text = format!(
                "the standard {what} is longer: this is its beginning; write it to a file and 'get' that"
            );
            output::complain("notice", &text);
        }
    }
    Ok(())
}

/// Exit code for a result. Those of Windows may be larger than one here.
fn code(result: &GuestProgramResult) -> ExitCode {
    let code = match (result.exit_code, result.signal) {
        _ if !result.ended => TIME_IS_OVER.into(),
        (Some(code), _) => code,
        (None, Some(signal)) => BY_SIGNAL.saturating_add(signal),
        (None, None) => NO_RESULT.into(),
    };
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}

/// Reads at most so many bytes.
fn bounded(what: &str, from: impl Read, most: usize) -> Result<Vec<u8>, Failure> {
    let mut content = Vec::new();
    let read = from.take(most as u64 + 1).read_to_end(&mut content);
    read.map_err(|e| of_file(Path::new(what), &e))?;
    if content.len() > most {
        return Err(Failure::usage(format!(
            "{what}: it has more than {} KiB, which is the most",
            most >> 10
        )));
    }
    Ok(content)
}

fn of_file(path: &Path, error: &io::Error) -> Failure {
    let exit = match error.kind() {
        io::ErrorKind::NotFound => Exit::Image,
        io::ErrorKind::PermissionDenied => Exit::Permission,
        _ => Exit::Create,
    };
    Failure::new(exit, format!("{}: {error}", path.display()))
}

/// Writes bytes. A reader that has gone is no failure.
fn written(content: &[u8], mut to: impl Write) -> Result<(), Failure> {
    match to.write_all(content).and_then(|()| to.flush()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(of_file(Path::new("standard output"), &e)),
        _ => Ok(()),
    }
}

/// Returns the local file for a file of a guest: in a folder it has the name that it has there.
fn target(local: &Path, remote: &str) -> PathBuf {
    let name = remote.rsplit(['/', '\\']).next().unwrap_or_default();
    match local.is_dir() && !["", ".", ".."].contains(&name) {
        true => local.join(name),
        false => local.to_owned(),
    }
}

/// Writes a file in full or not at all. One that replaces another has its rights, and its owner if that is allowed. What is no file,
/// such as a pipe, is written to.
fn store(target: &Path, content: &[u8]) -> io::Result<()> {
    // Of a link, what it leads to.
    let target = &match fs::canonicalize(target) {
        Err(_) if fs::symlink_metadata(target).is_ok_and(|found| found.is_symlink()) => {
            let message = "it is a link to nothing: remove it, or give the file that it names";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
        }
        found => found.unwrap_or_else(|_| target.to_owned()),
    };
    let old = fs::metadata(target).ok();
    if old.as_ref().is_some_and(|old| !old.is_file()) {
        return File::options().write(true).open(target)?.write_all(content);
    }
    let mut part = target.file_name().unwrap_or_default().to_owned();
    part.push(format!(".{}.part", std::process::id()));
    let part = target.with_file_name(part);
    let mut options = File::options();
    options.write(true).create_new(true);
    if old.is_some() {
        options.mode(0o600);
    }
    let mut file = options.open(&part)?;
    let stored = file
        .write_all(content)
        .and_then(|()| old.map_or(Ok(()), |old| take_rights(&file, &old)))
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&part, target));
    stored.inspect_err(|_| _ = fs::remove_file(&part))
}

/// Gives a file the rights of another. Nobody gets rights who had none: those of a group that it cannot have are left out.
fn take_rights(file: &File, old: &Metadata) -> io::Result<()> {
    let is_of_group = std::os::unix::fs::fchown(file, None, Some(old.gid())).is_ok();
    let _ = std::os::unix::fs::fchown(file, Some(old.uid()), None);
    let mode = old.mode() & if is_of_group { 0o777 } else { 0o707 };
    file.set_permissions(Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn result(fields: serde_json::Value) -> GuestProgramResult {
        let mut all = json!({
            "pid": 7, "ended": true, "exit_code": null, "signal": null, "stdout_base64": "", "stdout_cut": false,
            "stderr_base64": "", "stderr_cut": false,
        });
        all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        serde_json::from_value(all).unwrap()
    }

    #[test]
    fn the_exit_code_is_the_programs_or_one_of_its_own() {
        for (fields, want) in [
            (json!({ "exit_code": 0 }), 0),
            (json!({ "exit_code": 7 }), 7),
            (json!({ "exit_code": 1_000_000 }), 255),
            (json!({ "signal": 9 }), 137),
            (json!({ "signal": u32::MAX }), 255),
            (json!({ "ended": false }), TIME_IS_OVER),
        ] {
            assert_eq!(code(&result(fields.clone())), ExitCode::from(want), "{fields}");
        }
    }

    #[test]
    fn a_local_file_is_whole_or_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let names = || {
            let mut names: Vec<_> =
                fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(target(dir.path(), "/var/log/syslog"), dir.path().join("syslog"));
        assert_eq!(target(dir.path(), r"C:\a\b.txt"), dir.path().join("b.txt"));
        assert_eq!(target(dir.path(), "/etc/.."), dir.path());
        let file = dir.path().join("f");
        assert_eq!(target(&file, "/etc/x"), file);
        store(&file, b"one").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        store(&link, b"two").unwrap();
        assert_eq!(
            (fs::read(&file).unwrap(), fs::read_link(&link).unwrap()),
            (b"two".to_vec(), file.clone())
        );
        assert_eq!(names(), ["f", "link"]);
        let part = dir.path().join(format!("f.{}.part", std::process::id()));
        fs::write(&part, "of somebody else").unwrap();
        store(&file, b"three").unwrap_err();
        assert_eq!(fs::read(&file).unwrap(), b"two");
        store(Path::new("/dev/null"), b"x").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }

    #[test]
    fn a_local_file_keeps_its_rights() {
        let dir = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        let [new, usual] = ["new", "usual"].map(|name| dir.path().join(name));
        store(&new, b"one").unwrap();
        File::create(&usual).unwrap();
        assert_eq!(mode(&new), mode(&usual));
        for rights in [0o600, 0o640, 0o400, 0o755] {
            fs::set_permissions(&new, Permissions::from_mode(rights)).unwrap();
            store(&new, b"two").unwrap();
            assert_eq!((mode(&new), fs::read(&new).unwrap()), (rights, b"two".to_vec()));
        }
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&new, Some(7), Some(8)).unwrap();
            store(&new, b"three").unwrap();
            let found = fs::metadata(&new).unwrap();
            assert_eq!((found.uid(), found.gid(), mode(&new)), (7, 8, 0o755));
        }
    }

    #[test]
    fn a_link_to_nothing_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path().join("nothing"), &link).unwrap();
        let error = store(&link, b"x").unwrap_err();
        assert!(error.to_string().contains("a link to nothing"), "{error}");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_too_large_is_not_read_in_full() {
        assert_eq!(bounded("x", io::repeat(b'x').take(8), 8).unwrap(), [b'x'; 8]);
        let failure = bounded("x", io::repeat(b'x'), 1 << 10).unwrap_err();
        assert!(failure.exit == Exit::Usage && failure.message.contains("1 KiB"), "{failure}");
    }

    #[test]
    fn a_variable_has_a_value_or_that_of_here() {
        assert_eq!(variable("A=b=c").unwrap(), ("A".into(), "b=c".into()));
        assert_eq!(variable("PATH").unwrap().1, std::env::var("PATH").unwrap());
        assert!(
            variable("NO_SUCH_VARIABLE_HERE").unwrap_err().message.contains("NO_SUCH_VARIABLE_HERE=VALUE")
        );
    }
}
