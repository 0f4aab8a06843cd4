//! `spillway host`.

use super::Daemon;
use super::machine::failed;
use super::words::word;
use crate::error::{Exit, Failure};
use clap::Subcommand;
use spillway_api::client::Client;
use spillway_api::{
    HostAction, HostBudget, HostDetails, List, MachineDetails, NewHostAction, UnreadableRecord,
};
use spillway_control::bytes;
use std::time::{Duration, Instant};

/// Interval of polling until nothing runs.
const LOOK: Duration = Duration::from_millis(200);

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
    /// Stop all machines, and start and claim none until the host is opened or starts again
    #[command(after_help = CLOSE_EXAMPLES)]
    Close {
        /// Wait until all are stopped
        #[arg(long)]
        wait: bool,
        /// With --wait: longest wait
        #[arg(long, value_name = "SECONDS", requires = "wait", default_value_t = 300)]
        timeout: u64,
    },
    /// Allow machines to start again: warm pools are filled, others start on request
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
            if wait { until_idle(&client, Instant::now() + Duration::from_secs(timeout))? } else { details }
        }
    };
    daemon.show(&details, |details| {
        let state = if details.closed { "closed: no machine starts" } else { "open" };
        let (by, busy, version) = (word(&details.hypervisor), details.busy, &details.version);
        let unreadable: String = details.unreadable.iter().map(unreadable).collect();
        let budget = budget(&details.budget);
        let users = match &details.guest_users {
            Some(users) => format!("their QEMUs have the users {users}, one for each\n"),
            None => String::new(),
        };
        format!(
            "{state}\n{busy} machines run, start or stop\nthey are run by {by}\n{users}{budget}spillwayd {version}\n{unreadable}"
        )
    })
}

/// Formats a record that the daemon cannot read.
fn unreadable(record: &UnreadableRecord) -> String {
    let UnreadableRecord { key, why, advice, .. } = record;
    format!("set aside: {key} cannot be read ({why}). {advice}\n")
}

/// Formats the budget of the host.
fn budget(budget: &HostBudget) -> String {
    let waiting = match budget.waiting {
        0 => String::new(),
        waiting => format!("waiting    {waiting} machines, until others give something back\n"),
    };
    format!(
        "memory     guests {} and RAM tiers {} of {} (the host has {}, {} of it in reserve)\n\
         RAM tiers  {} of {}; guaranteed {} of {}\n\
         vCPUs      {} of {} (the host has {})\n{waiting}",
        bytes(budget.guest_bytes),
        bytes(budget.ram_bytes),
        bytes(budget.memory_limit_bytes),
        bytes(budget.host_memory_bytes),
        bytes(budget.reserve_bytes),
        bytes(budget.ram_bytes),
        bytes(budget.ram_limit_bytes),
        bytes(budget.ram_guaranteed_bytes),
        bytes(budget.ram_guarantee_limit_bytes),
        budget.vcpus,
        budget.vcpu_limit,
        budget.host_cpus,
    )
}

/// Waits until nothing runs, including deleted machines. Fails with the number of machines that have not stopped in time.
fn until_idle(client: &Client, until: Instant) -> Result<HostDetails, Failure> {
    loop {
        let host: HostDetails = client.get("/v1/host")?;
        if host.busy == 0 {
            return Ok(host);
        }
        if Instant::now() >= until {
            let machines: List<MachineDetails> = client.list("/v1/machines")?;
            machines.items.iter().try_for_each(failed)?;
            let message = format!("{} machines have not stopped: see 'machine list'", host.busy);
            return Err(Failure::new(Exit::Refused, message));
        }
        std::thread::sleep(LOOK);
    }
}
