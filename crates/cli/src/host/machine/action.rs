//! Actions on machines and their deletion: which machines, what is sent, what is waited for.
//!
//! Invariant: a refusal for one machine of a deletion does not stop the others.

use super::get;
use super::table::rows;
use crate::error::{Exit, Failure};
use crate::host::words::{label, number, word};
use crate::host::{Daemon, leftover};
use clap::Args;
use serde::Serialize;
use spillway_api::client::{Client, ClientError, query};
use spillway_api::{
    Action, Empty, ErrorCode, List, MOST_NAMES, MachineAction, MachineDetails, Name, Page, Phase, Power,
    Problem, Selector, bounds,
};
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// Longest `--key` for more machines than fit into a request: a number is added to it for each further request, and the
/// daemon takes 128 characters.
const MOST_KEY_CHARACTERS: usize = 120;

/// Which machines.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("which").required(true).multiple(true).args(["names", "catalog", "label", "all"])))]
pub struct SelectorOptions {
    /// Machines
    names: Vec<Name>,
    /// Only machines of this catalog
    #[arg(long, value_name = "NAME")]
    catalog: Option<Name>,
    /// Those whose catalog has this label; may be given more than once
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    label: Vec<(Name, String)>,
    /// All machines of the host
    #[arg(long, conflicts_with_all = ["names", "catalog", "label"])]
    all: bool,
}

impl From<SelectorOptions> for Selector {
    fn from(which: SelectorOptions) -> Selector {
        let labels = which.label.into_iter().collect();
        Selector { names: which.names, catalog: which.catalog, labels, all: which.all }
    }
}

/// The idempotency key of an action.
#[derive(Debug, Args)]
pub struct OnceOption {
    /// Idempotency key: repeating the action with it within a day does nothing more
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
}

/// Which machines, and whether to wait for them.
#[derive(Debug, Args)]
pub struct MachineSelection {
    /// The machines to act on.
    #[command(flatten)]
    selected: SelectorOptions,
    /// The idempotency key.
    #[command(flatten)]
    once: OnceOption,
    /// Wait until the machines have reached their desired state
    #[arg(long)]
    wait: bool,
    /// With --wait: longest wait
    #[arg(long, value_name = "SECONDS", requires = "wait", default_value_t = 300)]
    timeout: u64,
}

/// How machines are ended.
#[derive(Debug, Default, Args)]
pub struct EndOptions {
    /// Of a reset.
    #[arg(skip)]
    pub(super) discard_data: bool,
    /// End them at once, as if power failed
    #[arg(long, conflicts_with = "grace")]
    pub(super) force: bool,
    #[arg(
        long, value_name = "SECONDS", value_parser = number(&bounds::GRACE_SECONDS),
        help = bounds::GRACE_SECONDS.help("How long a guest may take to shut down before it is ended [default: as its catalog says]")
    )]
    pub(super) grace: Option<u32>,
}

pub(super) fn act(
    daemon: &Daemon,
    client: &Client,
    action: Action,
    which: MachineSelection,
    how: EndOptions,
) -> Result<(), Failure> {
    let select = which.selected.into();
    let EndOptions { discard_data, force, grace } = how;
    let asked = MachineAction { action, select, force, discard_data, grace_seconds: grace };
    let mut machines = ask(client, asked, &which.once)?;
    if which.wait {
        let until = Instant::now() + Duration::from_secs(which.timeout);
        machines.items.iter_mut().try_for_each(|machine| wait(client, machine, until))?;
    }
    daemon.show(&machines, |machines| rows(&machines.items))?;
    let waited = || machines.items.iter().filter(|_| which.wait);
    waited().try_for_each(failed)?;
    waited().filter(|_| action == Action::Stop).try_for_each(runs_again)
}

/// Fails if the machine should run again by now.
fn runs_again(machine: &MachineDetails) -> Result<(), Failure> {
    match machine.power {
        Power::Off => Ok(()),
        Power::On => {
            let message = format!(
                "{} runs again: it was started since, or its catalog keeps it warm ('machine drain' keeps a machine off)",
                machine.machine.name
            );
            Err(Failure::new(Exit::Refused, message))
        }
    }
}

/// Result of deleting a machine.
#[derive(Serialize)]
struct DeletionReport {
    name: Name,
    /// Reason why the machine still exists.
    error: Option<Problem>,
}

/// Deletes machines. A refusal for one does not stop the others.
pub(super) fn delete(
    daemon: &Daemon,
    client: &Client,
    selected: SelectorOptions,
    with_data: bool,
) -> Result<(), Failure> {
    let mut items = Vec::new();
    for name in selected.names(client)? {
        let error = match client.delete::<Empty>(&format!("/v1/machines/{name}?with_data={with_data}")) {
            Ok(Empty {}) => None,
            Err(ClientError::Refused(error)) => Some(error),
            Err(other) => return Err(other.into()),
        };
        items.push(DeletionReport { name, error });
    }
    let deleted = List { items };
    daemon.show(&deleted, |deleted| {
        let line = |DeletionReport { name, error }: &DeletionReport| match error {
            None => format!("{name} is deleted\n"),
            Some(why) => format!("{name} stays: {why}\n"),
        };
        deleted.items.iter().map(line).collect()
    })?;
    let gone: HashSet<&Name> =
        deleted.items.iter().filter(|deleted| deleted.error.is_none()).map(|deleted| &deleted.name).collect();
    leftover::tell(client, |left| gone.contains(&left.machine))?;
    let mut stay = deleted.items.iter().filter_map(|deleted| deleted.error.as_ref());
    let Some(first) = stay.next() else { return Ok(()) };
    let message = match stay.count() {
        0 => first.detail.clone(),
        more => format!("{}; and {more} more of {} machines stay", first.detail, deleted.items.len()),
    };
    Err(Failure::new(first.code.exit(), message))
}

impl SelectorOptions {
    /// Returns the names of the selected machines: the given ones, or those that match the other options.
    fn names(self, client: &Client) -> Result<Vec<Name>, Failure> {
        if self.catalog.is_none() && self.label.is_empty() && !self.all {
            return Ok(self.names);
        }
        let catalog = self.catalog.map(|catalog| ("catalog", catalog.to_string()));
        let labels = self.label.iter().map(|(key, value)| ("label", format!("{key}={value}")));
        let which = query(catalog.into_iter().chain(labels));
        // A name that does not exist is an error, not a mismatch.
        self.names.iter().try_for_each(|name| get(client, name).map(drop))?;
        let found: List<MachineDetails> = client.list(&format!("/v1/machines{which}"))?;
        let found = found.items.into_iter().map(|machine| machine.machine.name);
        let named: HashSet<&Name> = self.names.iter().collect();
        Ok(found.filter(|name| named.is_empty() || named.contains(name)).collect())
    }
}

pub(super) fn drain(
    daemon: &Daemon,
    client: &Client,
    action: Action,
    which: SelectorOptions,
    once: &OnceOption,
) -> Result<(), Failure> {
    let select = which.into();
    let asked = MachineAction { action, select, force: false, discard_data: false, grace_seconds: None };
    daemon.show(&ask(client, asked, once)?, |machines| rows(&machines.items))
}

/// Sends an action for machines and returns all of them. More names than fit into a request take several requests, each
/// with a key of its own.
fn ask(client: &Client, asked: MachineAction, once: &OnceOption) -> Result<List<MachineDetails>, Failure> {
    let labels = asked.select.labels.iter().map(|(key, value)| ("label", format!("{key}={value}")));
    let catalog = asked.select.catalog.iter().map(|catalog| ("catalog", catalog.to_string()));
    let others = format!("/v1/machines{}", query(catalog.chain(labels)));
    let mut items = Vec::new();
    let names = asked.select.names.clone();
    let parts = if names.is_empty() { vec![&names[..]] } else { names.chunks(MOST_NAMES).collect() };
    if let Some(key) = once.key.as_ref().filter(|key| parts.len() > 1 && key.len() > MOST_KEY_CHARACTERS) {
        let length = key.len();
        return Err(Failure::usage(format!(
            "--key: {length} characters: with more than {MOST_NAMES} machines at most {MOST_KEY_CHARACTERS} are allowed"
        )));
    }
    for (n, part) in parts.into_iter().enumerate() {
        let select = Selector { names: part.to_vec(), ..asked.select.clone() };
        let asked = MachineAction { select, ..asked.clone() };
        let key = once.key.as_ref().map(|key| if n == 0 { key.clone() } else { format!("{key}/{n}") });
        let page: Page<MachineDetails> = client.post_once("/v1/machine-actions", key.as_deref(), &asked)?;
        items.extend(client.list_on(&others, page)?.items);
    }
    Ok(List { items })
}

/// Fails if the machine has not reached its desired state.
pub fn failed(machine: &MachineDetails) -> Result<(), Failure> {
    match machine.status.phase {
        Phase::Failed | Phase::Waiting => {
            let why = machine.status.message.as_deref().unwrap_or("it has failed");
            let code = machine.status.code.unwrap_or(ErrorCode::Internal);
            Err(Failure::new(code.exit(), format!("{}: {why}", machine.machine.name)))
        }
        _ => Ok(()),
    }
}

/// Waits until a machine has reached its desired state.
pub fn wait(client: &Client, machine: &mut MachineDetails, until: Instant) -> Result<(), Failure> {
    while !machine.status.settled {
        let left = until.saturating_duration_since(Instant::now()).as_secs();
        if left == 0 {
            let (name, phase) = (&machine.machine.name, word(&machine.status.phase));
            let why = match &machine.status.message {
                Some(message) => format!("{name} is {phase} still: {message}"),
                None => format!("{name} is {phase} still: see 'machine show {name}'"),
            };
            return Err(Failure::new(Exit::Refused, why));
        }
        let path = format!("/v1/machines/{}?wait={}", machine.machine.name, left.min(10));
        *machine = client.get(&path)?;
    }
    Ok(())
}
