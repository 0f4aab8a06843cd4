//! Users that VMMs run as: each running machine has its own, so that a guest that breaks out of its VMM reaches neither
//! the host nor another machine. Owns the range of user ids and their assignment.
//!
//! Invariant: no two machines have the same user at the same time. A user of the range has no name, no home and no
//! rights.

use crate::error::HostError;
use crate::scopes::followed_by;
use spillway_api::{ErrorCode, Hypervisor, Name};
use spillway_control::kvm::Accelerator;
use spillway_control::output_within;
use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::Duration;

/// Program that drops privileges before it executes another (util-linux, setpriv(1)).
const SETPRIV: &str = "setpriv";
/// How long it may take to start a program that does nothing.
const TRIAL: Duration = Duration::from_secs(30);
/// Device of KVM.
const KVM: &str = "/dev/kvm";
/// User and group -1 mean "unchanged" to the kernel (setresuid(2)).
const NOBODY: u32 = u32::MAX;
/// Lower ids belong to the system, its services and its people (login.defs(5)).
const FIRST: u32 = 65_536;

/// Range of user ids, and of group ids with the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserRange {
    first: u32,
    last: u32,
}

impl UserRange {
    /// Default range. It lies above the ranges of containers (subuid(5), systemd's 524,288 to 1,879,048,191) and
    /// directories (SSSD's 200,000 to 2,000,200,000), and below 2^31 and the range at systemd's end.
    pub const DEFAULT: UserRange = UserRange { first: 2_100_000_000, last: 2_100_065_535 };

    /// Whether the range contains this id.
    pub fn has(self, user: u32) -> bool {
        (self.first..=self.last).contains(&user)
    }

    fn len(self) -> u64 {
        u64::from(self.last - self.first) + 1
    }

    /// Lists entries in the host's files that assign ids of the range to somebody else, one line each.
    pub fn conflicts(self, root: &Path) -> Vec<String> {
        let mut found = Vec::new();
        for (file, is_range) in [("passwd", false), ("group", false), ("subuid", true), ("subgid", true)] {
            let text = fs::read_to_string(root.join("etc").join(file)).unwrap_or_default();
            for line in text.lines().filter(|line| !line.starts_with('#')) {
                let mut fields = line.split(':');
                let name = fields.next().unwrap_or_default();
                // The format is NAME:FIRST:COUNT, or NAME:PASSWORD:NUMBER.
                let mut number = || fields.next().and_then(|number| number.parse::<u32>().ok());
                let (a, b) = (number(), number());
                let taken = if is_range { a.zip(b) } else { b.map(|number| (number, 1)) };
                if let Some((first, count)) = taken
                    && count > 0
                    && first <= self.last
                    && first.saturating_add(count - 1) >= self.first
                {
                    found.push(format!("/etc/{file} gives numbers of {self} to {name}"));
                }
            }
        }
        found
    }
}

impl FromStr for UserRange {
    type Err = String;

    fn from_str(text: &str) -> Result<UserRange, String> {
        let numbers =
            text.split_once('-').and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
        match numbers {
            Some((first, last)) if FIRST <= first && first <= last && last < NOBODY => {
                Ok(UserRange { first, last })
            }
            Some(_) => Err(format!(
                "users of guests are a range between {FIRST} and {}, where neither people nor services are",
                NOBODY - 1
            )),
            None => Err(format!("users of guests are a range such as {}, or none", UserRange::DEFAULT)),
        }
    }
}

impl fmt::Display for UserRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// Setting for the users of VMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserChoice {
    /// The default range, if the daemon may change users.
    Usual,
    /// This range.
    Range(UserRange),
    /// None: VMMs run as the daemon.
    DaemonsOwn,
}

impl FromStr for UserChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<UserChoice, String> {
        if text == "none" { Ok(UserChoice::DaemonsOwn) } else { text.parse().map(UserChoice::Range) }
    }
}

impl UserChoice {
    /// Returns the range to use, after a test; `None`: VMMs run as the daemon, or as whoever starts them decides.
    /// Complains about risks.
    pub fn settle(
        self,
        hypervisor: Hypervisor,
        complain: &mut dyn FnMut(&str),
    ) -> Result<Option<UserRange>, String> {
        let is_root = rustix::process::geteuid().is_root();
        let range = match (self, hypervisor) {
            (UserChoice::Range(_), Hypervisor::Libvirt | Hypervisor::None) => {
                return Err("--guest-users is for --hypervisor qemu: leave it out".into());
            }
            (_, Hypervisor::Libvirt | Hypervisor::None) => return Ok(None),
            (UserChoice::Range(_), _) if !is_root => {
                return Err("--guest-users takes a spillwayd that is root: leave it out".into());
            }
            (UserChoice::Usual, _) if !is_root => return Ok(None),
            (UserChoice::DaemonsOwn, _) => {
                if is_root {
                    complain(
                        "--guest-users none: machines' QEMUs run as root, and a guest that breaks out of its QEMU has this host",
                    );
                }
                return Ok(None);
            }
            (UserChoice::Usual, _) => UserRange::DEFAULT,
            (UserChoice::Range(range), _) => range,
        };
        range.conflicts(Path::new("/")).iter().for_each(|conflict| {
            complain(&format!(
                "{conflict}, who could come to guests of ours: give another range with --guest-users"
            ));
        });
        let mut trial = run_as(&Command::new("true"), range.last, None);
        let tried = output_within(trial.stdin(Stdio::null()), TRIAL);
        let why = match tried {
            Ok(done) if done.status.success() => return Ok(Some(range)),
            Ok(done) => String::from_utf8_lossy(&done.stderr).trim().to_owned(),
            Err(e) => format!("{SETPRIV} (Debian: util-linux): {e}"),
        };
        Err(format!(
            "no program can be started as user {}: {why}: give users that this host has with --guest-users, or none",
            range.last
        ))
    }
}

/// Assignment of users to machines.
#[derive(Debug)]
pub struct GuestUsers {
    range: Option<UserRange>,
    of: HashMap<Name, u32>,
}

impl GuestUsers {
    /// Creates an empty assignment. Without a range VMMs run as the daemon.
    pub fn new(range: Option<UserRange>) -> GuestUsers {
        GuestUsers { range, of: HashMap::new() }
    }

    /// Notes the user of a running machine, and the group with the same number.
    pub fn note(&mut self, machine: &Name, user: u32) {
        // Also note ids of another range than today's, since the machine runs.
        if user >= FIRST && user != NOBODY {
            self.of.insert(machine.clone(), user);
        }
    }

    /// Returns the user of a machine, which keeps it until `give_back`; `None`: its VMM runs as the daemon.
    pub fn take(&mut self, machine: &Name, uuid: &str) -> Result<Option<u32>, HostError> {
        let Some(range) = self.range else {
            self.of.remove(machine);
            return Ok(None);
        };
        if let Some(user) = self.of.get(machine).filter(|user| range.has(**user)) {
            return Ok(Some(*user));
        }
        // The search starts at a position that depends on the machine: it usually gets the same user again, and files of
        // a former user do not fall to the next machine that starts.
        let digits: String = uuid.chars().filter(char::is_ascii_hexdigit).take(8).collect();
        let begin = u64::from_str_radix(&digits, 16).unwrap_or(0) % range.len();
        let candidates = (0..range.len()).map(|i| range.first + ((begin + i) % range.len()) as u32);
        // One candidate more than there are users in use.
        let mut candidates = candidates.take(self.of.len() + 1);
        let free = candidates.find(|user| !self.of.values().any(|taken| taken == user));
        let user = free.ok_or_else(|| {
            let message = format!(
                "each of the users {range} has a machine that runs: stop machines, or give more (spillwayd --guest-users)"
            );
            HostError::new(ErrorCode::Exhausted, message)
        })?;
        self.of.insert(machine.clone(), user);
        Ok(Some(user))
    }

    /// Frees the user of a machine of which nothing runs.
    pub fn give_back(&mut self, machine: &Name) {
        self.of.remove(machine);
    }
}

/// Wraps a command to run as this user, in its group and one more, without any capability.
pub fn run_as(command: &Command, user: u32, group: Option<u32>) -> Command {
    let mut setpriv = Command::new(SETPRIV);
    setpriv.arg(format!("--reuid={user}")).arg(format!("--regid={user}"));
    match group {
        Some(group) => setpriv.arg(format!("--groups={group}")),
        None => setpriv.arg("--clear-groups"),
    };
    setpriv.args(["--inh-caps=-all", "--no-new-privs", "--"]);
    followed_by(setpriv, command)
}

/// Returns the group that gives access to the devices of an accelerator; `None`: it needs none.
pub fn device_group(accelerator: &Accelerator) -> Result<Option<u32>, HostError> {
    match accelerator {
        Accelerator::Tcg(_) => Ok(None),
        Accelerator::Kvm => {
            let found = fs::metadata(KVM).map_err(|e| {
                HostError::new(ErrorCode::Unavailable, format!("{KVM} cannot be looked at: {e}"))
            })?;
            group_of(found.mode(), found.gid())
        }
    }
}

/// Decides by the permissions and the group of KVM's device.
fn group_of(mode: u32, group: u32) -> Result<Option<u32>, HostError> {
    match mode & 0o066 {
        rights if rights & 0o006 == 0o006 => Ok(None),
        // Root's group would give more than this device.
        rights if rights & 0o060 == 0o060 && group != 0 => Ok(Some(group)),
        _ => {
            let message = format!(
                "{KVM} is for root alone, and machines' VMMs run as users of their own: give it a group \
                 ('chgrp kvm {KVM}; chmod 660 {KVM}', which udev's rules do), or start spillwayd with --guest-users none"
            );
            Err(HostError::new(ErrorCode::Unavailable, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "00000001-2222-4333-8444-555555555555";

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    #[test]
    fn a_range_is_where_nobody_else_is() {
        let range: UserRange = "100000-100002".parse().unwrap();
        assert_eq!((range.to_string().as_str(), range.len()), ("100000-100002", 3));
        assert_eq!(UserRange::DEFAULT.to_string().parse(), Ok(UserRange::DEFAULT));
        for wrong in
            ["", "none", "100000", "100002-100000", "1000-2000", "0-99999", "100000-4294967295", "-", "1-2-3"]
        {
            assert!(wrong.parse::<UserRange>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn who_is_asked_for_users_says_whether_there_are_any() {
        let range: UserRange = "100000-100002".parse().unwrap();
        let mut told = Vec::new();
        let mut settle = |choice: &str, hypervisor| {
            let choice = if choice.is_empty() { UserChoice::Usual } else { choice.parse().unwrap() };
            choice.settle(hypervisor, &mut |line| told.push(line.to_owned()))
        };
        for other in [Hypervisor::Libvirt, Hypervisor::None] {
            assert_eq!((settle("", other), settle("none", other)), (Ok(None), Ok(None)));
            assert!(settle("100000-100002", other).unwrap_err().contains("--hypervisor qemu"));
        }
        if rustix::process::geteuid().is_root() {
            assert_eq!(settle("", Hypervisor::Qemu), Ok(Some(UserRange::DEFAULT)));
            assert_eq!(settle("100000-100002", Hypervisor::Qemu), Ok(Some(range)));
            assert_eq!(settle("none", Hypervisor::Qemu), Ok(None));
            assert!(told.last().unwrap().contains("run as root"), "{told:?}");
        } else {
            assert_eq!(
                (settle("", Hypervisor::Qemu), settle("none", Hypervisor::Qemu)),
                (Ok(None), Ok(None))
            );
            assert!(settle("100000-100002", Hypervisor::Qemu).unwrap_err().contains("is root"));
        }
    }

    #[test]
    fn two_machines_never_have_the_same_user() {
        let mut users = GuestUsers::new(Some("100000-100002".parse().unwrap()));
        // An earlier daemon gave it that one, which is where the next would begin to look.
        users.note(&name("old"), 100_001);
        assert_eq!(users.take(&name("a"), UUID).unwrap(), Some(100_002));
        assert_eq!(users.take(&name("b"), UUID).unwrap(), Some(100_000), "it goes round");
        assert_eq!(users.take(&name("a"), UUID).unwrap(), Some(100_002), "it keeps its own");
        let full = users.take(&name("c"), UUID).unwrap_err();
        assert!(full.code == ErrorCode::Exhausted && full.message.contains("100000-100002"), "{full}");
        users.give_back(&name("old"));
        assert_eq!(users.take(&name("c"), UUID).unwrap(), Some(100_001));
        // Of a folder that is root's.
        users.note(&name("d"), 0);
        assert_eq!(users.of.len(), 3);
    }

    #[test]
    fn one_of_another_range_is_replaced_when_its_vmm_starts_again() {
        let mut users = GuestUsers::new(Some("100000-100002".parse().unwrap()));
        users.note(&name("a"), 200_000);
        assert_eq!(users.take(&name("a"), UUID).unwrap(), Some(100_001));
        let mut none = GuestUsers::new(None);
        none.note(&name("a"), 200_000);
        assert_eq!(none.take(&name("a"), UUID).unwrap(), None);
    }

    #[test]
    fn numbers_that_somebody_has_are_told() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        let range: UserRange = "100000-165535".parse().unwrap();
        assert_eq!(range.conflicts(root.path()), [""; 0]);
        for (file, text) in [
            ("passwd", "root:x:0:0::/root:/bin/sh\nfar:x:120000:1::/:/bin/sh\nbad:x:y\n"),
            ("group", "kvm:x:104:\n"),
            ("subuid", "# eve:100000:1\nann:165535:65536\nbob:34464:65536\nnone:100000:0\n"),
            ("subgid", "ann:4294967295:4294967295\n"),
        ] {
            fs::write(root.path().join("etc").join(file), text).unwrap();
        }
        let found = range.conflicts(root.path());
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("/etc/passwd") && found[0].ends_with("far"), "{found:?}");
        assert!(found[1].contains("/etc/subuid") && found[1].ends_with("ann"), "{found:?}");
    }

    #[test]
    fn the_device_is_reached_by_its_group_and_never_by_roots() {
        assert_eq!(group_of(0o20666, 104).unwrap(), None);
        assert_eq!(group_of(0o20660, 104).unwrap(), Some(104));
        for (mode, group) in [(0o20660, 0), (0o20600, 104), (0o20640, 104), (0o20600, 0)] {
            assert!(group_of(mode, group).unwrap_err().message.contains("--guest-users none"), "{mode:o}");
        }
    }

    #[test]
    fn rights_go_before_the_program_begins() {
        let mut program = Command::new("qemu");
        program.args(["-name", "a b"]);
        let command = run_as(&program, 100_000, Some(104));
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        let expected =
            ["--reuid=100000", "--regid=100000", "--groups=104", "--inh-caps=-all", "--no-new-privs", "--"];
        assert_eq!(command.get_program(), SETPRIV);
        assert_eq!(
            (&words[..6], &words[6..]),
            (&expected.map(Into::into)[..], &["qemu", "-name", "a b"].map(Into::into)[..])
        );
        assert!(run_as(&program, 1, None).get_args().any(|word| word == "--clear-groups"));
    }
}
