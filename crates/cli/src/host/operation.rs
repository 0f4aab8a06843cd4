//! `spillway operation`.

use super::{Daemon, Limit, progress};
use crate::error::Failure;
use clap::Subcommand;
use spillway_api::{Empty, Operation, OperationState};

/// What to do with operations.
#[derive(Debug, Subcommand)]
pub enum OperationCommand {
    /// List operations in progress, and those that have ended lately
    List {
        /// The bound of the list.
        #[command(flatten)]
        limit: Limit,
    },
    /// Wait until an operation has ended
    Wait {
        /// Number of the operation
        id: u64,
    },
    /// Cancel an operation: it leaves nothing behind
    Cancel {
        /// Number of the operation
        id: u64,
    },
}

/// Does it.
pub fn operation(daemon: &Daemon, command: OperationCommand) -> Result<(), Failure> {
    let client = daemon.client()?;
    match command {
        OperationCommand::List { limit } => {
            let operations = client.pages("/v1/operations", limit.limit);
            daemon.show_pages(operations, ["NUMBER", "WHAT", "STATE"], |operation: &Operation| {
                let state = match &operation.state {
                    OperationState::Running if operation.total_bytes > 0 => {
                        format!("{}%", operation.done_bytes * 100 / operation.total_bytes)
                    }
                    OperationState::Running => "running".into(),
                    OperationState::Done => "done".into(),
                    OperationState::Failed { error } => format!("failed: {error}"),
                };
                vec![[operation.id.to_string(), operation.what.clone(), state]]
            })
        }
        OperationCommand::Wait { id } => {
            let begun: Operation = client.get(&format!("/v1/operations/{id}"))?;
            let done = progress::wait(&client, &begun)?;
            daemon.show(&done, |done| format!("{} is done\n", done.what))
        }
        OperationCommand::Cancel { id } => {
            let told: Empty = client.delete(&format!("/v1/operations/{id}"))?;
            daemon.show(&told, |_| format!("operation {id} is told to stop\n"))
        }
    }
}
