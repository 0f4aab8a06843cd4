//! `spillway catalog rollout`, and the format of a rollout. Decides nothing.

use super::path;
use crate::error::Failure;
use crate::host::table;
use crate::host::words::word;
use crate::output;
use clap::Subcommand;
use spillway_api::client::Client;
use spillway_api::{Catalog, Name, Rollout, RolloutAction, RolloutChange, RolloutState};

/// What to do with a rollout.
#[derive(Debug, Subcommand)]
pub enum RolloutCommand {
    /// Restart no further machine; those that were restarted already continue to start
    Pause {
        /// The catalog
        name: Name,
    },
    /// Continue after a pause
    Resume {
        /// The catalog
        name: Name,
    },
    /// End the rollout: machines that have the version keep it, the others take it at their next start
    Abort {
        /// The catalog
        name: Name,
    },
}

/// Does it.
pub fn rollout(daemon: &super::Daemon, client: &Client, command: RolloutCommand) -> Result<(), Failure> {
    let (name, action) = match command {
        RolloutCommand::Pause { name } => (name, RolloutAction::Pause),
        RolloutCommand::Resume { name } => (name, RolloutAction::Resume),
        RolloutCommand::Abort { name } => (name, RolloutAction::Abort),
    };
    let catalog: Catalog = client.post(&format!("{}/rollout", path(&name)), &RolloutChange { action })?;
    let image = format!("{}:{}", catalog.spec.image.name, catalog.version);
    daemon.show(&catalog, |_| match action {
        RolloutAction::Pause => format!("{name}: the rollout of {image} is paused\n"),
        RolloutAction::Resume => format!("{name}: the rollout of {image} continues\n"),
        RolloutAction::Abort => format!(
            "{name}: the rollout has ended: machines that have {image} keep it, the others take it at their next start\n"
        ),
    })?;
    if action == RolloutAction::Abort && !daemon.json {
        let back =
            format!("'spillway catalog rollback {name} --rollout now' takes all back to the version before");
        output::complain("note", &back);
    }
    Ok(())
}

/// Formats a rollout in short, such as `batch=5, 7 of 20, stalled`.
pub fn short(rollout: &Rollout) -> String {
    let strategy = rollout.strategy;
    match &rollout.progress {
        Some(progress) => {
            format!("{strategy}, {} of {}, {}", progress.done, progress.of, word(&progress.state))
        }
        None => strategy.to_string(),
    }
}

/// Formats the progress of a rollout and the machines in the way.
pub fn page(catalog: &Name, rollout: &Rollout) -> String {
    let Some(progress) = &rollout.progress else { return "the rollout begins\n".into() };
    let mut text = format!(
        "the rollout is {}: {} of {} machines are done, {} restart, {} have failed, {} are claimed\n",
        word(&progress.state),
        progress.done,
        progress.of,
        progress.restarting,
        progress.failed,
        progress.waiting
    );
    if let Some(reason) = &progress.reason {
        text += &format!("  {reason}\n");
    }
    if progress.state == RolloutState::Stalled {
        text += &format!(
            "  remove the cause, and the rollout continues; or 'spillway catalog rollback {catalog}', or '... rollout abort {catalog}'\n"
        );
    }
    if !progress.in_the_way.is_empty() {
        let rows =
            progress.in_the_way.iter().map(|one| [one.machine.to_string(), one.why.replace('\n', " ")]);
        text.push('\n');
        text += &table(["IN THE WAY", "WHY"], rows);
    }
    text
}
