//! libvirt's hook for QEMU: this program, called as a link in the folder `qemu.d` (libvirt, docs/hooks). Owns what is done at which
//! operation of a domain whose disk is one of ours.
//!
//! Invariant: it prints nothing to standard output, which libvirt would take for a changed description; it never calls libvirt,
//! which waits for it; and what it does for a domain concerns the machine of that domain's UUID alone.

use super::act;
use super::description::{Domain, MOST_BYTES, NAMESPACE};
use crate::error::{Exit, Failure};
use crate::host::Daemon;
use spillway_api::{Action, MachineDetails, NewMachine};
use std::ffi::OsString;
use std::io::Read;
use std::path::Path;

/// Folder of hooks that libvirt calls one after the other.
const FOLDER: &str = "qemu.d";

/// Arguments of the hook, if the program was called as one.
pub fn called(mut arguments: impl Iterator<Item = OsString>) -> Option<Vec<String>> {
    let program = arguments.next()?;
    let folder = Path::new(&program).parent().and_then(Path::file_name);
    let is_hook = folder.is_some_and(|folder| folder == FOLDER);
    is_hook.then(|| arguments.map(|argument| argument.to_string_lossy().into_owned()).collect())
}

/// Does what an operation of a domain asks for. An error keeps libvirt from going on.
pub fn run(arguments: &[String]) -> Result<(), Failure> {
    let [name, operation, sub, ..] = arguments else { return Ok(()) };
    let does_something =
        [("prepare", "begin"), ("release", "end"), ("migrate", "begin"), ("restore", "begin")];
    if !does_something.contains(&(operation.as_str(), sub.as_str())) {
        return Ok(());
    }
    let mut text = String::new();
    let read = std::io::stdin().lock().take(MOST_BYTES).read_to_string(&mut text);
    let known = read.map_err(|e| e.to_string()).and_then(|_| Domain::read(&text));
    let domain = match known {
        Ok(domain) => domain,
        // A description without our mark is libvirt's to refuse.
        Err(_) if !text.contains(NAMESPACE) => return Ok(()),
        Err(why) => return Err(Failure::new(Exit::Refused, format!("domain {name}: {why}"))),
    };
    let Some(mark) = &domain.mark else { return Ok(()) };
    if !domain.has_own_disk() {
        let message = format!(
            "domain {name}: it is a copy of a domain that has a disk of spillway's, and its disk is that domain's: undefine it, and copy \
             the other one after 'spillway libvirt release'"
        );
        return if operation == "prepare" { Err(Failure::new(Exit::Refused, message)) } else { Ok(()) };
    }
    let refuse = |what: &str| {
        let message = format!(
            "domain {name}: it cannot be {what}: what it has written to its disk is on this host, and forgotten when it is turned off"
        );
        Err(Failure::new(Exit::Refused, message))
    };
    let machine = domain.machine();
    match operation.as_str() {
        "migrate" => refuse("migrated"),
        "restore" => refuse("restored"),
        "release" => {
            let client = Daemon::usual().client()?;
            act(&client, Action::Stop, &machine)
        }
        _ => {
            let client = Daemon::usual().client()?;
            let new = NewMachine { name: machine.clone(), size_bytes: None };
            let known: Result<MachineDetails, _> = client.get(&format!("/v1/machines/{machine}"));
            if known.is_err() {
                let _: MachineDetails =
                    client.post(&format!("/v1/catalogs/{}/machines", mark.catalog), &new)?;
            }
            // Its last end may have been missed, and then its disk has what was written until then.
            act(&client, Action::Stop, &machine)?;
            act(&client, Action::Start, &machine)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hook_is_known_by_the_folder_of_its_link() {
        let called = |words: &[&str]| called(words.iter().map(OsString::from));
        let words = ["/etc/libvirt/hooks/qemu.d/spillway", "web", "prepare", "begin", "-"];
        assert_eq!(called(&words).unwrap(), ["web", "prepare", "begin", "-"]);
        assert_eq!(called(&["/usr/bin/spillway", "web", "prepare", "begin"]), None);
        assert_eq!(called(&["spillway"]), None);
    }

    #[test]
    fn other_operations_read_nothing() {
        for operation in ["start", "started", "stopped", "reconnect", "attach"] {
            let words = ["web", operation, "begin", "-"].map(String::from);
            assert_eq!(run(&words), Ok(()));
        }
        assert_eq!(run(&[]), Ok(()));
    }
}
