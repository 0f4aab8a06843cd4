//! `spillway leftover`.

use super::{Daemon, Limit};
use crate::error::Failure;
use crate::output;
use clap::Subcommand;
use serde::Serialize;
use spillway_api::client::Client;
use spillway_api::{Empty, Leftover, List};
use spillway_control::bytes;

const DELETE_EXAMPLE: &str = "\
Example:
  spillway leftover list
  spillway leftover delete 6a9c0a1e-5a51-4a8c-9d0e-6c1f2a7d3b10";

/// What to do with what deleted machines have left.
#[derive(Debug, Subcommand)]
pub enum LeftoverCommand {
    /// List the files that deleted machines have left
    List {
        /// The bound of the list.
        #[command(flatten)]
        limit: Limit,
    },
    /// Delete these files; no other machine uses them
    #[command(after_help = DELETE_EXAMPLE)]
    Delete {
        /// UUIDs of the deleted machines
        #[arg(required = true)]
        uuids: Vec<String>,
    },
}

/// Does it.
pub fn leftover(daemon: &Daemon, command: LeftoverCommand) -> Result<(), Failure> {
    let client = daemon.client()?;
    match command {
        LeftoverCommand::List { limit } => daemon.show_pages(
            client.pages("/v1/leftovers", limit.limit),
            ["MACHINE", "UUID", "DELETED", "OF", "SIZE", "FILE"],
            rows,
        ),
        LeftoverCommand::Delete { uuids } => delete(daemon, &client, &uuids),
    }
}

/// Deletion report.
#[derive(Serialize)]
struct DeletionReport {
    uuid: String,
}

/// Deletes the files of machines, and shows those that are deleted. The first refusal ends it.
fn delete(daemon: &Daemon, client: &Client, uuids: &[String]) -> Result<(), Failure> {
    let mut items = Vec::new();
    let outcome = uuids.iter().try_for_each(|uuid| {
        let uuid = uuid.to_lowercase();
        client.delete::<Empty>(&format!("/v1/leftovers/{uuid}"))?;
        items.push(DeletionReport { uuid });
        Ok(())
    });
    daemon.show(&List { items }, |deleted| {
        deleted.items.iter().map(|DeletionReport { uuid }| format!("{uuid} is deleted\n")).collect()
    })?;
    outcome
}

/// Prints a notice about files that the deleted machines have left.
pub fn tell(client: &Client, is_of: impl Fn(&Leftover) -> bool) -> Result<(), Failure> {
    let mut count = 0;
    for page in client.pages::<Leftover>("/v1/leftovers", None) {
        count += page?.iter().filter(|left| is_of(left)).count();
    }
    if count > 0 {
        let text = format!("what {count} deleted machines kept is still there: 'spillway leftover list'");
        output::complain("note", &text);
    }
    Ok(())
}

/// Formats one line for each file.
fn rows(left: &Leftover) -> Vec<[String; 6]> {
    let disk = left.disk.as_ref().map(|disk| (format!("{}:{}", disk.image, disk.version), &disk.path));
    let data = left.data_disk.as_ref().map(|path| ("-".to_owned(), path));
    let size = left.allocated_bytes.map_or("-".into(), bytes);
    let row = |(of, path): (String, &std::path::PathBuf)| {
        let (machine, deleted) = (left.machine.to_string(), format!("{:.0}", left.deleted));
        [machine, left.uuid.clone(), deleted, of, size.clone(), path.display().to_string()]
    };
    disk.into_iter().chain(data).map(row).collect()
}
