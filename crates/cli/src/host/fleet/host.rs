//! `spillway fleet host` and `fleet hosts`. Owns the wait for a host that is drained.
//!
//! Invariant: a wait ends only when the host has reported that no machine is left that can be replaced elsewhere, or with an error.

use super::share::{ShareTotals, by_catalog, refusals};
use super::{FLEET, help};
use crate::error::{Exit, Failure};
use crate::host::{Daemon, table, word};
use crate::output;
use clap::{Args, Subcommand};
use spillway_api::client::Client;
use spillway_api::{
    Empty, FleetCatalog, FleetHost, FleetHostAction, FleetHostChange, FleetShare, HostState, IdentityKind,
    IsolationAction, List, Name,
};
use spillway_control::bytes;
use std::time::{Duration, Instant};

/// Interval of polling. Hosts report at most once in ten seconds.
const LOOK: Duration = Duration::from_secs(2);

/// What to do with a host of the fleet.
#[derive(Debug, Subcommand)]
pub enum FleetHostCommand {
    /// Show a host: its state, and what it has of each catalog
    #[command(after_help = help::HOST_SHOW)]
    Show {
        /// The host
        #[arg(value_name = "HOST")]
        name: Name,
    },
    /// Give a host no further machines; those that it has stay
    #[command(after_help = help::CORDON)]
    Cordon {
        /// The host
        #[arg(value_name = "HOST")]
        name: Name,
    },
    /// Give a host machines again, after it was cordoned or drained
    Uncordon {
        /// The host
        #[arg(value_name = "HOST")]
        name: Name,
    },
    /// Replace the machines of a host on other hosts, those that nobody has claimed first
    #[command(after_help = help::DRAIN)]
    Drain(Drain),
    /// Say that a host does not run any more: its machines are replaced at once
    #[command(after_help = help::DECLARE_DEAD)]
    DeclareDead {
        /// The host
        #[arg(value_name = "HOST")]
        name: Name,
    },
    /// Remove a host that is not alive from the fleet
    #[command(after_help = help::REMOVE)]
    Remove {
        /// The host
        #[arg(value_name = "HOST")]
        name: Name,
    },
}

/// Options of `fleet host drain`.
#[derive(Debug, Args)]
pub struct Drain {
    /// The host
    #[arg(value_name = "HOST")]
    name: Name,
    /// Wait until the host has only machines that are claimed or keep data
    #[arg(long)]
    wait: bool,
    /// With --wait: longest wait
    #[arg(long, value_name = "SECONDS", requires = "wait", default_value_t = 300)]
    timeout: u64,
}

/// Does it.
pub fn host(daemon: &Daemon, client: &Client, command: FleetHostCommand) -> Result<(), Failure> {
    match command {
        FleetHostCommand::Show { name } => daemon.show(&client.get(&path(&name))?, page),
        FleetHostCommand::Cordon { name } => {
            let host = change(client, &name, FleetHostAction::Cordon)?;
            daemon.show(&host, |_| format!("{name} gets no further machines; those that it has stay\n"))
        }
        FleetHostCommand::Uncordon { name } => {
            let host = change(client, &name, FleetHostAction::Uncordon)?;
            daemon.show(&host, |_| format!("{name} gets machines again\n"))
        }
        FleetHostCommand::Drain(drain) => drain.run(daemon, client),
        FleetHostCommand::DeclareDead { name } => {
            let host = change(client, &name, FleetHostAction::DeclareDead)?;
            let kept = kept(&host, &catalogs(client)?);
            daemon.show(&host, |_| {
                format!(
                    "{name} counts as lost from now on: its machines are replaced on other hosts at once. If it comes back, it \
                     gives up those that it has: claimed ones when they are released, the others at once\n{}",
                    kept_words(&kept)
                )
            })
        }
        FleetHostCommand::Remove { name } => {
            let removed: Empty = client.delete(&path(&name))?;
            daemon.show(&removed, |_| {
                format!(
                    "{name} is removed from the fleet. What is on the host itself stays as it is until its daemon starts with the options of \
                     the fleet: then it joins again, and gives up the machines of the fleet that it has. To keep them there, run 'spillwayd \
                     leave-fleet' on it first\n"
                )
            })
        }
    }
}

/// Lists the hosts.
pub fn list(daemon: &Daemon, client: &Client) -> Result<(), Failure> {
    let hosts: List<FleetHost> = client.list(&format!("{FLEET}/hosts"))?;
    daemon.show(&hosts, |hosts| rows(&hosts.items))
}

impl Drain {
    fn run(self, daemon: &Daemon, client: &Client) -> Result<(), Failure> {
        let name = &self.name;
        let mut host = change(client, name, FleetHostAction::Drain)?;
        let mut all = catalogs(client)?;
        if self.wait {
            let until = Instant::now() + Duration::from_secs(self.timeout);
            let mut told = String::new();
            loop {
                match progress(&host, &all)? {
                    Progress::Done => break,
                    Progress::Going(text) if text != told => {
                        output::complain("notice", &text);
                        told = text;
                    }
                    Progress::Going(_) => {}
                }
                if Instant::now() >= until {
                    let message = format!(
                        "{told} after {} s (--timeout): the drain goes on, see 'spillway fleet host show {name}'",
                        self.timeout
                    );
                    return Err(Failure::new(Exit::Refused, message));
                }
                std::thread::sleep(LOOK);
                (host, all) = (client.get(&path(name))?, catalogs(client)?);
            }
        }
        let kept = kept(&host, &all);
        daemon.show(&host, |host| {
            let goes = host.shares.iter().filter(|share| !keeps_data(share, &all));
            let claimed = ShareTotals::of(goes).claimed;
            let what = match (self.wait, claimed) {
                (false, _) => format!(
                    "{name} is draining: its machines are replaced on other hosts, and it gives up its own as those get ready. \
                     Claimed ones stay until they are released\n"
                ),
                (true, 0) => format!("{name} is drained: its machines are replaced on other hosts\n"),
                (true, claimed) => format!(
                    "{name} is drained: its machines are replaced on other hosts, but for {claimed} that are claimed: these stay \
                     until they are released\n"
                ),
            };
            format!("{what}{}{}", kept_words(&kept), name_words(host, &all))
        })
    }
}

fn path(name: &Name) -> String {
    format!("{FLEET}/hosts/{name}")
}

fn change(client: &Client, name: &Name, action: FleetHostAction) -> Result<FleetHost, Failure> {
    Ok(client.post(&path(name), &FleetHostChange { action })?)
}

fn catalogs(client: &Client) -> Result<Vec<FleetCatalog>, Failure> {
    Ok(client.list(&format!("{FLEET}/catalogs"))?.items)
}

/// How far a drain is.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// Only machines that are claimed or keep data are left.
    Done,
    /// Others are left, as this text says.
    Going(String),
}

/// Whether machines of a share keep data: they stay on their host.
fn keeps_data(share: &FleetShare, catalogs: &[FleetCatalog]) -> bool {
    let catalog = catalogs.iter().find(|catalog| catalog.name == share.catalog);
    catalog.is_some_and(|catalog| catalog.spec.keeps_data())
}

fn progress(host: &FleetHost, catalogs: &[FleetCatalog]) -> Result<Progress, Failure> {
    let name = &host.name;
    let refuse = |why: &str| Err(Failure::new(Exit::Refused, format!("{name} {why}")));
    if !host.draining {
        return refuse("is not drained any more: somebody has ended it ('fleet host uncordon')");
    }
    if matches!(host.state, HostState::Lost | HostState::Absent) {
        return refuse(
            "does not report what it has, since it is not alive: its machines are replaced as those of a lost host",
        );
    }
    let shares = || host.shares.iter().filter(|share| !keeps_data(share, catalogs));
    let is_done = shares().all(|share| share.wanted == 0 && share.count <= share.claimed);
    if is_done && host.state == HostState::Alive {
        return Ok(Progress::Done);
    }
    let ShareTotals { count, claimed, .. } = ShareTotals::of(shares());
    let mut text = format!("{name} has {count} machines that are to go, {claimed} of them claimed");
    if host.state != HostState::Alive {
        text += &format!("; it is {}, and gives nothing up", word(&host.state));
    }
    let of_host = |catalog: &&FleetCatalog| shares().any(|share| share.catalog == catalog.name);
    for catalog in catalogs.iter().filter(|catalog| catalog.unplaced > 0).filter(of_host) {
        text += &format!(
            "; {} machines of {} fit on no other host ('spillway fleet catalog show {}')",
            catalog.unplaced, catalog.name, catalog.name
        );
    }
    Ok(Progress::Going(text))
}

/// Catalogs that keep data, with the number of their machines on the host.
fn kept(host: &FleetHost, catalogs: &[FleetCatalog]) -> Vec<(Name, u32)> {
    let kept = host.shares.iter().filter(|share| keeps_data(share, catalogs));
    let kept = kept.map(|share| (share.catalog.clone(), share.wanted.max(share.count)));
    kept.filter(|(_, machines)| *machines > 0).collect()
}

fn kept_words(kept: &[(Name, u32)]) -> String {
    let line = |(catalog, machines): &(Name, u32)| {
        format!(
            "{catalog}: {machines} machines keep data, which is on this host alone: they are not replaced\n"
        )
    };
    kept.iter().map(line).collect()
}

/// What becomes of machines with names of the fleet.
fn name_words(host: &FleetHost, catalogs: &[FleetCatalog]) -> String {
    let named = host.shares.iter().filter_map(|share| {
        let catalog = catalogs.iter().find(|catalog| catalog.name == share.catalog)?;
        let settings = &catalog.spec.fleet;
        let machines = share.wanted.max(share.count);
        (settings.identity == IdentityKind::Named && machines > 0).then_some((
            share,
            machines,
            settings.on_isolation,
        ))
    });
    let line = |(share, machines, on_isolation): (&FleetShare, u32, IsolationAction)| {
        let name = &share.catalog;
        let lost = match on_isolation {
            IsolationAction::Keep => {
                "they run on while the host is isolated, and go elsewhere only if it is declared dead"
            }
            IsolationAction::Pause | IsolationAction::Stop => {
                "they end when the host has no lease, and go elsewhere when it is lost"
            }
        };
        format!(
            "{name}: {machines} machines have names of the fleet. A name is off until another host has it, and stays here while none \
             has space; {lost}\n"
        )
    };
    named.map(line).collect()
}

/// Formats the state of a host, such as `alive, draining`.
fn state(host: &FleetHost) -> String {
    let marks = [("cordoned", host.cordoned), ("draining", host.draining), ("report cut", host.report_cut)];
    let marks = marks.into_iter().filter(|(_, is)| *is).map(|(mark, _)| mark.to_owned());
    [word(&host.state)].into_iter().chain(marks).collect::<Vec<_>>().join(", ")
}

fn memory(host: &FleetHost) -> String {
    match host.memory_bytes {
        Some(all) => format!("{} of {}", bytes(host.used_bytes), bytes(all)),
        None => format!("{} of ?", bytes(host.used_bytes)),
    }
}

fn rows(hosts: &[FleetHost]) -> String {
    let row = |host: &FleetHost| {
        let ShareTotals { wanted, count, ready, claimed, .. } = ShareTotals::of(&host.shares);
        let version = host.version.clone().unwrap_or_else(|| "-".into());
        let machines = format!("{count} of {wanted}");
        let (ready, claimed) = (ready.to_string(), claimed.to_string());
        let (name, zone) = (host.name.to_string(), host.zone.to_string());
        [name, zone, state(host), machines, ready, claimed, memory(host), version]
    };
    let columns = ["NAME", "ZONE", "STATE", "MACHINES", "READY", "CLAIMED", "MEMORY", "VERSION"];
    let mut text = table(columns, hosts.iter().map(row));
    let reasons: String = hosts.iter().map(reasons).collect();
    if !reasons.is_empty() {
        text += &format!("\n{reasons}");
    }
    text
}

/// Formats why a host is not replaced, and what it refuses.
fn reasons(host: &FleetHost) -> String {
    let why = host.reason.as_ref().map_or(String::new(), |reason| format!("{}: {reason}\n", host.name));
    format!("{why}{}", refusals(&host.shares))
}

fn page(host: &FleetHost) -> String {
    let labels: Vec<String> = host.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let labels = if labels.is_empty() { "-".into() } else { labels.join(", ") };
    let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
    let text = format!(
        "{}, {}\nzone     {}\nlabels   {labels}\naddress  {}\nversion  {}, machines are run by {}\nepoch    {}\nmemory   {}\n{}",
        host.name,
        state(host),
        host.zone,
        or_none(&host.address),
        or_none(&host.version),
        host.hypervisor.as_ref().map_or("-".into(), word),
        host.epoch.map_or("-".into(), |epoch| epoch.to_string()),
        memory(host),
        reasons(host),
    );
    if host.shares.is_empty() { text } else { format!("{text}\n{}", by_catalog(&host.shares)) }
}

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
