//! The commands that ask `spillwayd`. Owns how it is found, how its refusals end this program, and how lists look.
//!
//! Invariant: nothing is decided here; what the daemon says is shown.

mod catalog;
mod console;
mod image;
mod machine;
mod operation;
mod progress;
mod store;
mod words;

pub use words::word;

pub use catalog::{CatalogCommand, catalog};
pub use image::{ImageCommand, image};
pub use machine::{MachineCommand, machine};
pub use operation::{OperationCommand, operation};
pub use store::{StoreCommand, store};

use crate::error::{Exit, Failure};
use crate::output;
use clap::Args;
use comfy_table::{Table, presets};
use serde::Serialize;
use spillway_api::client::{self, Client, ClientError};
use spillway_api::{ErrorCode, Name};
use std::io;
use std::path::{Path, PathBuf};

/// Where the daemon is.
#[derive(Debug, Args)]
pub struct Daemon {
    /// Socket that spillwayd listens on
    #[arg(long, global = true, value_name = "SOCK", env = spillway_api::SOCKET_VARIABLE, default_value = spillway_api::DEFAULT_SOCKET)]
    pub socket: PathBuf,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
}

/// Which objects of a list.
#[derive(Debug, Args)]
pub struct Labels {
    /// Those with this label; again for more, all of which must be there
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = words::label)]
    labels: Vec<(Name, String)>,
}

impl Labels {
    /// As the interface is asked, with what else is asked.
    fn query<'a>(&self, more: impl IntoIterator<Item = (&'a str, String)>) -> String {
        let labels = self.labels.iter().map(|(key, value)| ("label", format!("{key}={value}")));
        client::query(more.into_iter().chain(labels))
    }
}

impl Daemon {
    /// The socket.
    pub fn path(&self) -> &Path {
        // A variable that is set to nothing says nothing.
        let empty = self.socket.as_os_str().is_empty();
        if empty { Path::new(spillway_api::DEFAULT_SOCKET) } else { &self.socket }
    }

    /// Who asks it.
    pub fn client(&self) -> Result<Client, Failure> {
        Client::new(self.path())
            .map_err(|e| Failure::new(Exit::Internal, format!("cannot ask spillwayd: {e}")))
    }

    /// Shows an answer: as JSON, or in words.
    fn show<T: Serialize>(&self, answer: &T, words: impl FnOnce(&T) -> String) -> Result<(), Failure> {
        let text = if self.json {
            format!("{}\n", serde_json::to_string_pretty(answer).expect("an answer is plain data"))
        } else {
            words(answer)
        };
        output::print(&text).map(drop)
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        let exit = match &error {
            ClientError::Connect { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Exit::Permission
            }
            ClientError::Connect { .. } | ClientError::Broken { .. } => Exit::Unavailable,
            ClientError::Refused(refusal) => exit(refusal.code),
        };
        Failure::new(exit, error.to_string())
    }
}

fn exit(code: ErrorCode) -> Exit {
    match code {
        ErrorCode::Invalid | ErrorCode::TooLarge => Exit::Usage,
        ErrorCode::Unauthenticated | ErrorCode::Forbidden => Exit::Permission,
        ErrorCode::NotFound => Exit::Image,
        ErrorCode::Exists | ErrorCode::InUse | ErrorCode::Conflict | ErrorCode::Cancelled => Exit::Refused,
        ErrorCode::Exhausted => Exit::Create,
        ErrorCode::Unavailable => Exit::Unavailable,
        ErrorCode::Internal | ErrorCode::Damaged => Exit::Internal,
    }
}

/// Columns with a line above, without frames: as people know it from other tools.
pub fn table<const N: usize>(columns: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(columns);
    rows.into_iter().for_each(|row| _ = table.add_row(row));
    table.column_iter_mut().for_each(|column| _ = column.set_padding((0, 2)));
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}
