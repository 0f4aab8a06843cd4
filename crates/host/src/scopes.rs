//! Where the processes of machines are among the host's control groups: each in a scope of its own, so that a restart of
//! the daemon's service reaches none of them, none is swapped out, and each gets its share of the disks. Owns the choice
//! between what hosts offer, and the command that puts a process there; starts no machine.
//!
//! Invariant: the choice is made once. A process is in its place before it executes its program, and keeps the number
//! that it was begun with.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use uuid::Uuid;

/// Below which all are.
const SLICE: &str = "spillway.slice";
/// Of each scope, whatever the slice's own unit says. When the host goes down the unit that is named ends machines in order,
/// and no scope is ended before it has.
const PROPERTIES: [&str; 3] = ["MemorySwapMax=0", "IOWeight=100", "Before=spillway-machines.service"];
/// How long what is in a scope may take to end when that is stopped: as long as the daemon gives a disk.
const STOP: &str = "TimeoutStopSec=40s";
const SYSTEMD_RUN: &str = "systemd-run";
/// Where a system that has nothing but version 2 has it.
const CGROUPS: &str = "/sys/fs/cgroup";
/// A prefix of the groups that we make there.
const PREFIX: &str = "spillway-";
/// Where the daemon itself goes: a group that has others below it has no process of its own (cgroups(7)).
const OWN: &str = "spillwayd";
/// Puts itself into a group, which is made, and becomes a program. What this kernel cannot limit is left.
const ENTER: &str = r#"group=$1; shift
mkdir -p "$group" || exit
[ ! -e "$group/memory.swap.max" ] || echo 0 >"$group/memory.swap.max"
[ ! -e "$group/io.weight" ] || echo "default 100" >"$group/io.weight"
echo 0 >"$group/cgroup.procs" || exit
exec "$@""#;

/// What this host offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scopes {
    /// systemd makes a scope for each process.
    Systemd,
    /// Groups below this one are ours.
    Groups(PathBuf),
    /// They stay in the daemon's own.
    None,
}

impl Scopes {
    /// What can be had here, tried out. Complains if that is nothing.
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

    /// What begins a machine's process in its place. The machine has the name of its folder.
    pub fn place(&self, folder: &Path, process: &str, command: Command) -> Command {
        // One that is not there is to be missed as itself.
        if !is_there(&command) {
            return command;
        }
        let machine = folder.file_name().unwrap_or_default().to_string_lossy();
        match self {
            Scopes::Systemd => in_scope(&machine, process, &command),
            Scopes::Groups(parent) => {
                // A group is used again. It goes when the daemon is next started.
                let group = parent.join(format!("{PREFIX}{machine}-{process}"));
                let mut shell = Command::new("/bin/sh");
                shell.args(["-c", ENTER, "sh"]).arg(group);
                followed_by(shell, &command)
            }
            Scopes::None => command,
        }
    }
}

/// A scope is never used again: that of the last process may be there still.
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

/// The wrapper, which becomes this command.
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

/// Whether the program of a command is on this host.
pub fn is_there(command: &Command) -> bool {
    let program = Path::new(command.get_program());
    // Where programs are looked for without one.
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    // One with a slash is taken as it is.
    program.components().count() > 1 && program.exists()
        || std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// A scope for a program that does nothing; else why there is none.
fn try_systemd() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("systemd takes scopes from root only".into());
    }
    let tried = in_scope("probe", "true", &Command::new("/bin/true")).output();
    let tried = tried.map_err(|e| format!("{SYSTEMD_RUN}: {e}"))?;
    let said = String::from_utf8_lossy(&tried.stderr);
    if tried.status.success() { Ok(()) } else { Err(format!("{SYSTEMD_RUN}: {}", said.trim())) }
}

/// The group below which ours may be made; else why not.
fn own_groups(systemd: bool) -> Result<PathBuf, String> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
    let root = Path::new(CGROUPS);
    let (Some(own), true) = (own, root.join("cgroup.controllers").exists()) else {
        return Err("control groups are not those of version 2".into());
    };
    let own = root.join(own);
    // The tree is systemd's but for what it gives away (systemd.resource-control(5), Delegate=).
    let is_delegated = ["trusted.delegate", "user.delegate"].iter().any(|attribute| {
        rustix::fs::getxattr(&own, *attribute, &mut [0u8; 8][..]).is_ok_and(|bytes| bytes > 0)
    });
    if systemd && !is_delegated {
        return Err(format!("{} is not delegated", own.display()));
    }
    divide(&own).map_err(|e| format!("{}: {e}", own.display()))?;
    for entry in fs::read_dir(&own).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            // The kernel keeps those that somebody is in.
            let _ = fs::remove_dir(entry.path());
        }
    }
    Ok(own)
}

/// Lets a group limit those below it.
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
