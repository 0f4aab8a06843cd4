//! `spillway fleet catalog rollout`, and what pages say of a rollout over hosts.
//!
//! Owns the sentences. Invariant: figures are those that the daemon has answered with.

use super::path;
use crate::error::Failure;
use crate::host::{Daemon, word};
use crate::output;
use clap::Subcommand;
use spillway_api::client::Client;
use spillway_api::{FleetCatalog, FleetRollout, FleetRolloutState, Name, RolloutAction, RolloutChange};

/// What to do with a rollout over hosts.
#[derive(Debug, Subcommand)]
pub enum FleetRolloutCommand {
    /// Give no further host the version, and restart no further machine
    Pause {
        /// The catalog
        name: Name,
    },
    /// Continue after a pause, or after the rollout has halted: machines that have failed by now are accepted
    Resume {
        /// The catalog
        name: Name,
    },
    /// End the rollout: hosts that have the version keep it, the others keep theirs
    Abort {
        /// The catalog
        name: Name,
    },
}

/// Does it.
pub fn rollout(daemon: &Daemon, client: &Client, command: FleetRolloutCommand) -> Result<(), Failure> {
    let (name, action) = match command {
        FleetRolloutCommand::Pause { name } => (name, RolloutAction::Pause),
        FleetRolloutCommand::Resume { name } => (name, RolloutAction::Resume),
        FleetRolloutCommand::Abort { name } => (name, RolloutAction::Abort),
    };
    let catalog: FleetCatalog =
        client.post(&format!("{}/rollout", path(&name)), &RolloutChange { action })?;
    daemon.show(&catalog, |catalog| catalog.rollout.as_ref().map_or(String::new(), page))?;
    if action == RolloutAction::Abort && !daemon.json {
        let back =
            format!("'spillway fleet catalog rollback {name}' takes all hosts back to the version before");
        output::complain("note", &back);
    }
    Ok(())
}

/// Formats a rollout in short, such as `3 of 8, halted`; nothing if it has ended.
pub fn short(rollout: Option<&FleetRollout>) -> String {
    match rollout {
        Some(rollout) if rollout.state != FleetRolloutState::Done => {
            format!("{} of {}, {}", rollout.hosts_done, rollout.hosts, word(&rollout.state))
        }
        _ => "-".into(),
    }
}

/// Formats how far a rollout is.
pub fn page(rollout: &FleetRollout) -> String {
    let FleetRollout { from_image, from_version, to_image, to_version, wave, waves, hosts, .. } = rollout;
    let (to, since) = (format!("{to_image}:{to_version}"), rollout.since.strftime("%Y-%m-%d %H:%M"));
    if rollout.state == FleetRolloutState::Done {
        return format!("the rollout of {to} of {since} has reached all hosts\n");
    }
    let mut text = format!(
        "the rollout of {to} (before: {from_image}:{from_version}): {}, wave {wave} of {waves}, {} of {hosts} hosts have it, {} are done, \
         {} machines have failed; since {since}\n",
        word(&rollout.state),
        rollout.hosts_started,
        rollout.hosts_done,
        rollout.failed,
    );
    if let Some(reason) = &rollout.reason {
        text += &format!("  {}\n", reason.replace('\n', " "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rollout(state: &str) -> FleetRollout {
        serde_json::from_value(json!({
            "state": state, "reason": "2 machines have failed", "from_image": "debian", "from_version": 3,
            "to_image": "debian", "to_version": 4, "wave": 1, "waves": 4, "hosts_started": 1, "hosts_done": 0,
            "hosts": 8, "failed": 2, "max_failed": 0, "deadline_seconds": 600, "since": "2026-01-01T00:00:00Z",
            "changed": "2026-01-01T00:00:00Z",
        }))
        .unwrap()
    }

    #[test]
    fn the_page_says_how_far_it_is_and_why_it_has_halted() {
        assert_eq!(
            page(&rollout("halted")),
            "the rollout of debian:4 (before: debian:3): halted, wave 1 of 4, 1 of 8 hosts have it, 0 are done, 2 machines have failed; \
             since 2026-01-01 00:00\n  2 machines have failed\n"
        );
        assert_eq!(
            page(&rollout("done")),
            "the rollout of debian:4 of 2026-01-01 00:00 has reached all hosts\n"
        );
        let shorts = [Some(&rollout("halted")), Some(&rollout("done")), None].map(short);
        assert_eq!(shorts, ["0 of 8, halted", "-", "-"]);
    }
}
