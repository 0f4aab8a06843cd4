//! Control groups of machines' processes: each has its own scope, so that a restart of the daemon's service does not
//! affect it, it is not swapped out, and it gets its share of the disks. Owns the choice between what hosts offer, and
//! the command that places a process; starts no machine.
//!
//! Invariant: the choice is made once. A process is in its group before it executes its program, and keeps its process
//! id.

use spillway_control::output_within;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use uuid::Uuid;

/// Slice of all scopes.
const SLICE: &str = "spillway.slice";
/// Properties of each scope, whatever the slice's own unit says. At a shutdown the named unit ends machines in order,
/// before any scope is ended.
const PROPERTIES: [&str; 3] = ["MemorySwapMax=0", "IOWeight=100", "Before=spillway-machines.service"];
/// How long the processes of a scope may take to end: as long as the daemon gives a disk.
const STOP: &str = "TimeoutStopSec=40s";
const SYSTEMD_RUN: &str = "systemd-run";
/// How long systemd may take to create a scope.
const TRIAL: Duration = Duration::from_secs(120);
/// Root of the control groups of version 2.
const CGROUPS: &str = "/sys/fs/cgroup";
/// Prefix of the groups that we create.
const PREFIX: &str = "spillway-";
/// Group of the daemon itself: a group with children has no process of its own (cgroups(7)).
const OWN: &str = "spillwayd";
/// Enters a group, which is created, and executes a program. Skips limits that this kernel does not have.
const ENTER: &str = r#"group=$1; shift
mkdir -p "$group" || exit
[ ! -e "$group/memory.swap.max" ] || echo 0 >"$group/memory.swap.max"
[ ! -e "$group/io.weight" ] || echo "default 100" >"$group/io.weight"
echo 0 >"$group/cgroup.procs" || exit
exec "$@""#;

/// How processes are placed on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scopes {
    /// systemd creates a scope for each process.
    Systemd,
    /// Our own groups below this one.
    Groups(PathBuf),
    /// Processes stay in the daemon's group.
    None,
}

impl Scopes {
    /// Finds out what works on this host. Complains if nothing does.
    pub fn choose(complain: &mut dyn FnMut(&str)) -> Scopes {
        let systemd = Path::new("/run/systemd/system").exists();
        let no_systemd = match systemd {
            true => try_systemd(),
            false => Err("there is no systemd".to_owned()),
        };
        let Err(no_systemd) = no_systemd else { return Scopes::Systemd };
        match own_groups(systemd) {
            Ok(groups) => Scopes::Groups(groups),
            Err(no_groups) => {
                complain(&format!(
                    "machines get no scopes of their own ({no_systemd}; {no_groups}): they may be swapped out, and share the daemon's control group"
                ));
                Scopes::None
            }
        }
    }

    /// Wraps the command of a machine's process so that it is placed. The machine has the name of its folder.
    pub fn place(&self, folder: &Path, process: &str, command: Command) -> Command {
        // A missing program must be reported under its own name.
        if !is_there(&command) {
            return command;
        }
        let machine = folder.file_name().unwrap_or_default().to_string_lossy();
        match self {
            Scopes::Systemd => in_scope(&machine, process, &command),
            Scopes::Groups(parent) => {
                // The group is reused, and removed at the daemon's next start.
                let group = parent.join(format!("{PREFIX}{machine}-{process}"));
                let mut shell = Command::new("/bin/sh");
                shell.args(["-c", ENTER, "sh"]).arg(group);
                followed_by(shell, &command)
            }
            Scopes::None => command,
        }
    }
}

/// A scope's name is never reused: that of the last process may still exist.
fn in_scope(machine: &str, process: &str, command: &Command) -> Command {
    let id = Uuid::new_v4().simple().to_string();
    let mut run = Command::new(SYSTEMD_RUN);
    run.args(["--scope", "--collect", "--quiet", "--no-ask-password", "--slice", SLICE]);
    run.arg(format!("--unit=spillway-{machine}-{process}-{}.scope", &id[..8]));
    run.arg(format!("--description=Spillway: {process} of {machine}"));
    for property in PROPERTIES.iter().chain([&STOP]) {
        run.args(["--property", property]);
    }
    run.arg("--");
    followed_by(run, command)
}

/// Appends a command to a wrapper that executes it.
pub fn followed_by(mut wrapper: Command, command: &Command) -> Command {
    wrapper.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapper.env(name, value),
            None => wrapper.env_remove(name),
        };
    }
    wrapper
}

/// Whether the program of a command exists on this host.
pub fn is_there(command: &Command) -> bool {
    let program = Path::new(command.get_program());
    // Default search path.
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    // A path with a slash is used as it is.
    program.components().count() > 1 && program.exists()
        || std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Creates a scope for a program that does nothing, as a test.
fn try_systemd() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("systemd takes scopes from root only".into());
    }
    let tried = output_within(&mut in_scope("probe", "true", &Command::new("/bin/true")), TRIAL);
    let tried = tried.map_err(|e| format!("{SYSTEMD_RUN}: {e}"))?;
    let said = String::from_utf8_lossy(&tried.stderr);
    if tried.status.success() { Ok(()) } else { Err(format!("{SYSTEMD_RUN}: {}", said.trim())) }
}

/// Returns the group below which we may create groups.
fn own_groups(systemd: bool) -> Result<PathBuf, String> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
    let root = Path::new(CGROUPS);
    let (Some(own), true) = (own, root.join("cgroup.controllers").exists()) else {
        return Err("control groups are not those of version 2".into());
    };
    let own = root.join(own);
    // systemd owns the tree, except for what it delegates (systemd.resource-control(5), Delegate=).
    let is_delegated = ["trusted.delegate", "user.delegate"].iter().any(|attribute| {
        rustix::fs::getxattr(&own, *attribute, &mut [0u8; 8][..]).is_ok_and(|bytes| bytes > 0)
    });
    if systemd && !is_delegated {
        return Err(format!("{} is not delegated", own.display()));
    }
    divide(&own).map_err(|e| format!("{}: {e}", own.display()))?;
    for entry in fs::read_dir(&own).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            // The kernel keeps those with processes.
            let _ = fs::remove_dir(entry.path());
        }
    }
    Ok(own)
}

/// Enables controllers for the children of a group.
fn divide(own: &Path) -> std::io::Result<()> {
    let enable = || fs::write(own.join("cgroup.subtree_control"), "+memory +io");
    enable().or_else(|_| {
        let daemon = own.join(OWN);
        fs::create_dir_all(&daemon)?;
        fs::write(daemon.join("cgroup.procs"), "0")?;
        enable()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    fn disk() -> Command {
        let mut command = Command::new("/bin/echo");
        command.args(["a b", "$c", "%d"]).env("NAME", "value").env_remove("OTHER");
        command
    }

    #[test]
    fn a_scope_has_the_machines_name_and_is_never_used_again() {
        let folder = Path::new("/x/machines/desk-001");
        let [one, two] = [(); 2].map(|()| Scopes::Systemd.place(folder, "disk", disk()));
        let words = |command: &Command| -> Vec<String> {
            command.get_args().map(|word| word.to_string_lossy().into_owned()).collect()
        };
        let unit = |words: &[String]| words.iter().find(|word| word.starts_with("--unit=")).unwrap().clone();
        let (first, second) = (words(&one), words(&two));
        assert!(
            unit(&first).starts_with("--unit=spillway-desk-001-disk-") && unit(&first).ends_with(".scope")
        );
        assert_ne!(unit(&first), unit(&second));
        assert_eq!(first[first.len() - 5..], ["--", "/bin/echo", "a b", "$c", "%d"]);
        let variables: Vec<_> = one.get_envs().collect();
        assert_eq!(variables, [(OsStr::new("NAME"), Some(OsStr::new("value"))), (OsStr::new("OTHER"), None)]);
    }

    #[test]
    fn a_group_is_entered_before_the_program_begins() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path().join("spillway-desk-001-disk");
        // Plain files stand for the kernel's.
        fs::create_dir(&group).unwrap();
        fs::write(group.join("memory.swap.max"), "max").unwrap();
        let scopes = Scopes::Groups(dir.path().to_owned());
        let done = scopes.place(Path::new("/x/desk-001"), "disk", disk()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&done.stdout), "a b $c %d\n");
        assert_eq!(fs::read_to_string(group.join("cgroup.procs")).unwrap(), "0\n");
        assert_eq!(fs::read_to_string(group.join("memory.swap.max")).unwrap(), "0\n");
        assert!(!group.join("io.weight").exists());
    }

    #[test]
    fn a_program_that_is_missing_is_missed_as_itself() {
        let missing = Scopes::Systemd.place(Path::new("/x/y"), "disk", Command::new("/nonexistent/program"));
        assert_eq!(missing.get_program(), "/nonexistent/program");
        let found = Scopes::Systemd.place(Path::new("/x/y"), "vmm", Command::new("true"));
        assert_eq!(found.get_program(), SYSTEMD_RUN);
        assert_eq!(Scopes::None.place(Path::new("/x/y"), "vmm", Command::new("true")).get_program(), "true");
    }
}
