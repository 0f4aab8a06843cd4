//! `spillway host`.

use super::Daemon;
use super::machine::wait_for_all_to_stop;
use super::words::word;
use crate::error::Failure;
use clap::Subcommand;
use spillway_api::client::Client;
use spillway_api::{HostAction, HostDetails, NewHostAction};
use std::time::{Duration, Instant};

const CLOSE_EXAMPLES: &str = "\
Examples:
  spillway host close --wait                 # before work on the host: all guests are asked to shut down
  spillway host open
The next start of the host opens it too.";

/// What to do with the host.
#[derive(Debug, Subcommand)]
pub enum HostCommand {
    /// Show whether machines may start
    Show,
    /// Stop all machines, and start or give away none until the host is opened or starts again
    #[command(after_help = CLOSE_EXAMPLES)]
    Close {
        /// Wait until all are stopped
        #[arg(long)]
        wait: bool,
        /// With --wait: how long at most
        #[arg(long, value_name = "SECONDS", requires = "wait", default_value_t = 300)]
        timeout: u64,
    },
    /// Let machines start again: pools are filled, others start when somebody wants them
    Open,
}

/// Does it.
pub fn host(daemon: &Daemon, command: HostCommand) -> Result<(), Failure> {
    let client = daemon.client()?;
    let ask = |client: &Client, action| -> Result<HostDetails, Failure> {
        Ok(client.post("/v1/host", &NewHostAction { action })?)
    };
    let details = match command {
        HostCommand::Show => client.get("/v1/host")?,
        HostCommand::Open => ask(&client, HostAction::Open)?,
        HostCommand::Close { wait, timeout } => {
            let details = ask(&client, HostAction::Close)?;
            if wait {
                wait_for_all_to_stop(&client, Instant::now() + Duration::from_secs(timeout))?;
            }
            details
        }
    };
    daemon.show(&details, |details| {
        let state = if details.closed { "closed: no machine starts" } else { "open" };
        format!("{state}\nmachines are run by {}\nspillwayd {}\n", word(&details.hypervisor), details.version)
    })
}
