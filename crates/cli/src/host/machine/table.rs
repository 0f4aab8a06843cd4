//! How machines are printed: as rows of a list, and as a page.

use crate::host::catalog::compare::change_text;
use crate::host::words::{shortened, word};
use crate::host::{claim, table};
use spillway_api::{DisplayKind, MachineDetails, Phase, Power, Rate, size_text};
use std::path::PathBuf;

/// The columns of a list of machines.
pub(super) const COLUMNS: [&str; 4] = ["NAME", "CATALOG", "STATE", "IMAGE"];

/// Longest part of a reason that fits into the table, in characters. 'machine show' shows all of it.
const MOST_REASON: usize = 40;

pub(super) fn rows(machines: &[MachineDetails]) -> String {
    table(COLUMNS, machines.iter().map(row))
}

/// Formats the row of a machine in a list.
pub(super) fn row(machine: &MachineDetails) -> [String; COLUMNS.len()] {
    let run = machine.status.run.as_ref();
    let image = run.map_or("-".into(), |run| {
        let next = if run.outdated { " (next start: another)" } else { "" };
        format!("{}:{}{next}", run.image, run.version)
    });
    let mut state = match (&machine.status.message, machine.status.phase) {
        (Some(message), phase) => format!("{}: {}", word(&phase), shortened(message, MOST_REASON)),
        (None, Phase::Stopped) if machine.power == Power::On => word(&Phase::Starting),
        (None, Phase::Running) if machine.status.ready => "ready".into(),
        (None, phase) => word(&phase),
    };
    if let Some(claim) = &machine.claim {
        state.push_str(", claimed by ");
        state.push_str(&claim.owner);
    }
    if machine.drained {
        state.push_str(", drained");
    }
    [machine.machine.name.to_string(), machine.machine.catalog.to_string(), state, image]
}

/// Formats everything about a machine.
pub(super) fn page(machine: &MachineDetails) -> String {
    let mut lines = vec![
        ("name", machine.machine.name.to_string()),
        ("catalog", machine.machine.catalog.to_string()),
        ("wanted", word(&machine.power)),
        (
            "state",
            match machine.status.permanent {
                true => format!("{}, for good", word(&machine.status.phase)),
                false => word(&machine.status.phase),
            },
        ),
        ("MAC", machine.machine.identity.mac.clone()),
        ("UUID", machine.machine.identity.uuid.clone()),
    ];
    lines
        .extend(machine.status.since.map(|since| ("since", since.strftime("%Y-%m-%d %H:%M:%S").to_string())));
    lines.extend(machine.status.message.clone().map(|message| ("why", message)));
    lines.push(("ready", if machine.status.ready { "yes" } else { "no" }.into()));
    lines.extend(machine.status.address.clone().map(|address| ("address", address)));
    lines.extend(machine.claim.as_ref().map(|claim| ("claimed", claim::words(claim))));
    if machine.drained {
        lines.push(("drained", "yes".into()));
    }
    if let Some(run) = &machine.status.run {
        let path = |path: &PathBuf| path.display().to_string();
        lines.push(("image", format!("{}:{}", run.image, run.version)));
        let limits = [("RAM tier", run.ram_bytes), ("overflow", run.overflow_bytes)];
        let limits = limits.into_iter().filter_map(|(name, limit)| Some((name, limit?)));
        lines.extend(limits.map(|(name, limit)| (name, format!("up to {}", size_text(limit)))));
        if run.rate != Rate::default() {
            lines.push(("rate", run.rate.to_string()));
        }
        lines.push(("run by", word(&run.hypervisor)));
        lines.extend(run.disk_pid.map(|pid| ("disk process", pid.to_string())));
        lines.extend(run.vmm_pid.map(|pid| ("VMM process", pid.to_string())));
        lines.push(("disk", path(&run.disk_socket)));
        lines.push(("control", path(&run.control_socket)));
        lines.extend(run.console_socket.iter().map(|socket| ("console", path(socket))));
        if run.display != DisplayKind::None {
            lines.push(("screen", word(&run.display)));
        }
        lines.extend(run.nbd_socket.iter().map(|socket| ("NBD", path(socket))));
        lines.push(("crashes", run.crashes.to_string()));
        let pending = run.pending.iter();
        lines.extend(pending.map(|next| ("next start", format!("{} {}", next.setting, change_text(next)))));
    }
    lines.iter().map(|(name, value)| format!("{name:<14}{value}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_reason_is_cut_in_the_table_and_whole_on_the_page() {
        let why = "its overflow cannot be created: no space left on the device of /var/lib/spillway/overflow";
        let machine = serde_json::json!({
            "name": "desk-001", "catalog": "desk", "number": 1, "created": "2026-01-01T00:00:00Z", "power": "on", "drained": false,
            "identity": { "uuid": "u", "mac": "m" },
            "status": { "phase": "failed", "ready": false, "settled": true, "permanent": false, "message": why },
        });
        let machine: MachineDetails = serde_json::from_value(machine).unwrap();
        let [_, _, state, _] = row(&machine);
        assert_eq!(state, "failed: its overflow cannot be created: no space...");
        assert!(page(&machine).contains(why));
    }
}
