//! `spillway machine`.

use super::catalog::compare::change_text;
use super::claim::{self, CLAIM_EXAMPLES, Claim, Renew, release};
use super::console::console;
use super::words::{label, number, word};
use super::{Daemon, Labels, Limit, exit, leftover, table};
use crate::error::{Exit, Failure};
use crate::{attach, output};
use clap::{Args, Subcommand};
use serde::Serialize;
use spillway_api::client::{Client, ClientError, query};
use spillway_api::{
    Action, Empty, ErrorCode, List, MOST_NAMES, MachineAction, MachineDetails, MachineRun, Name, Page, Phase,
    Power, Problem, Rate, Selector, bounds, size_text,
};
use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The columns of a list of machines.
const COLUMNS: [&str; 4] = ["NAME", "CATALOG", "STATE", "IMAGE"];

/// Longest `--key` for more machines than fit into a request: a number is added to it for each further request, and the
/// daemon takes 128 characters.
const MOST_KEY_CHARACTERS: usize = 120;

const START_EXAMPLES: &str = "\
Examples:
  spillway machine start desk-001 desk-002 --wait
  spillway machine start --catalog desk
  spillway machine restart --label team=support --grace 300
  A job that may ask twice restarts once:
    spillway machine restart desk-001 --key \"job-$CI_JOB_ID\"";

const DELETE_EXAMPLES: &str = "\
Examples:
  spillway machine delete desk-003
  spillway machine delete --label team=support --with-data";

/// What to do with machines.
#[derive(Debug, Subcommand)]
pub enum MachineCommand {
    /// List machines
    List {
        /// Only machines of this catalog
        #[arg(long, value_name = "NAME")]
        catalog: Option<Name>,
        /// Only machines that this owner has claimed
        #[arg(long, value_name = "NAME")]
        owner: Option<String>,
        /// Labels that the catalog of a machine must have.
        #[command(flatten)]
        labels: Labels,
        /// The bound of the list.
        #[command(flatten)]
        limit: Limit,
    },
    /// Show a machine
    Show {
        /// The machine
        name: Name,
    },
    /// Start machines
    #[command(after_help = START_EXAMPLES)]
    Start(MachineSelection),
    /// Shut machines down; their data is discarded, unless their mode keeps it
    Stop {
        /// The machines to act on.
        #[command(flatten)]
        which: MachineSelection,
        /// How.
        #[command(flatten)]
        how: EndOptions,
    },
    /// Shut machines down and start them again; their disks are reset if the catalog resets at a power cycle
    Restart {
        /// The machines to act on.
        #[command(flatten)]
        which: MachineSelection,
        /// How.
        #[command(flatten)]
        how: EndOptions,
    },
    /// End machines at once and start them again on a fresh disk
    Reset {
        /// The machines to act on.
        #[command(flatten)]
        which: MachineSelection,
        /// Discard data that machines keep
        #[arg(long)]
        discard_data: bool,
    },
    /// Delete machines that are off and not claimed; lowers the count of their catalog
    #[command(after_help = DELETE_EXAMPLES)]
    Delete {
        /// The machines to act on.
        #[command(flatten)]
        selected: SelectorOptions,
        /// Delete their data disks and kept disks too; else the files stay in their store
        #[arg(long)]
        with_data: bool,
    },
    /// Claim a machine of a catalog; prints its name, its address if that is known, and the claim's id
    #[command(after_help = CLAIM_EXAMPLES)]
    Claim(Claim),
    /// Renew a claim, from now on
    Renew(Renew),
    /// Release a machine: it is reset, and can be claimed again
    Release {
        /// The machine
        name: Name,
        /// Only if the machine still has the claim of this id, which 'claim' printed
        #[arg(long, value_name = "ID")]
        claim: Option<String>,
    },
    /// Stop machines as soon as they are not claimed, and keep them from being started and claimed
    Drain {
        /// The machines to act on.
        #[command(flatten)]
        which: SelectorOptions,
        /// Once.
        #[command(flatten)]
        once: OnceOption,
    },
    /// Allow drained machines to be started and claimed again
    Undrain {
        /// The machines to act on.
        #[command(flatten)]
        which: SelectorOptions,
        /// Once.
        #[command(flatten)]
        once: OnceOption,
    },
    /// Connect to a machine's serial console; Ctrl-] ends the connection
    Console {
        /// The machine
        name: Name,
    },
    /// Print the configuration with which a VMM that another program starts uses a machine's disk
    Attach {
        /// The machine
        name: Name,
        /// Which VMM
        #[arg(long = "for", value_name = "VMM")]
        vmm: crate::args::Vmm,
    },
    /// Show where a machine's I/O went
    Stats {
        /// The machine
        name: Name,
        /// Show how much would have overflowed at every size of the RAM tier since the disk's worker started, from a sample
        #[arg(long)]
        curve: bool,
    },
}

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
    /// Once.
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
    discard_data: bool,
    /// End them at once, as if power failed
    #[arg(long, conflicts_with = "grace")]
    force: bool,
    #[arg(
        long, value_name = "SECONDS", value_parser = number(&bounds::GRACE_SECONDS),
        help = bounds::GRACE_SECONDS.help("How long a guest may take to shut down before it is ended [default: as its catalog says]")
    )]
    grace: Option<u32>,
}

/// Does it.
pub fn machine(daemon: &Daemon, command: MachineCommand) -> Result<(), Failure> {
    let mut client = daemon.client()?;
    match command {
        MachineCommand::List { catalog, owner, labels, limit } => {
            let catalog = catalog.map(|catalog| ("catalog", catalog.to_string()));
            let which = labels.query(catalog.into_iter().chain(owner.map(|owner| ("owner", owner))));
            let machines = client.pages(&format!("/v1/machines{which}"), limit.limit);
            daemon.show_pages(machines, COLUMNS, |machine| vec![row(machine)])
        }
        MachineCommand::Show { name } => daemon.show(&get(&client, &name)?, page),
        MachineCommand::Start(which) => act(daemon, &client, Action::Start, which, EndOptions::default()),
        MachineCommand::Stop { which, how } => act(daemon, &client, Action::Stop, which, how),
        MachineCommand::Restart { which, how } => act(daemon, &client, Action::Restart, which, how),
        MachineCommand::Reset { which, discard_data } => {
            act(daemon, &client, Action::Reset, which, EndOptions { discard_data, ..EndOptions::default() })
        }
        MachineCommand::Delete { selected, with_data } => delete(daemon, &client, selected, with_data),
        MachineCommand::Claim(claim) => claim.run(daemon, &mut client),
        MachineCommand::Renew(renew) => renew.run(daemon, &client),
        MachineCommand::Release { name, claim } => {
            let machine = release(&client, &name, claim.as_deref())?;
            daemon.show(&machine, |machine| format!("{} is released\n", machine.machine.name))
        }
        MachineCommand::Drain { which, once } => drain(daemon, &client, Action::Drain, which, &once),
        MachineCommand::Undrain { which, once } => drain(daemon, &client, Action::Undrain, which, &once),
        MachineCommand::Console { name } => {
            daemon.local("a console")?;
            let socket = run(&client, &name)?.console_socket;
            let none = || {
                Failure::new(Exit::Refused, format!("{name} has no console here: who runs its VMM has it"))
            };
            console(&socket.ok_or_else(none)?)
        }
        MachineCommand::Attach { name, vmm } => {
            let vhost_user = run(&client, &name)?.disk_socket;
            output::print(&attach::instructions(&crate::args::Attach { vhost_user, vmm })?).map(drop)
        }
        MachineCommand::Stats { name, curve } => {
            daemon.local("'machine stats'")?;
            let control = run(&client, &name)?.control_socket;
            let json = daemon.json;
            let args = crate::args::Stats {
                control,
                json,
                prometheus: false,
                names: None,
                watch: false,
                dirty: false,
                curve,
                top: None,
            };
            crate::stats::stats(&args)
        }
    }
}

fn get(client: &Client, name: &Name) -> Result<MachineDetails, Failure> {
    Ok(client.get(&format!("/v1/machines/{name}"))?)
}

/// Returns what a machine runs with, if its disk is served.
fn run(client: &Client, name: &Name) -> Result<MachineRun, Failure> {
    let found = get(client, name)?;
    let run = found.status.run.filter(|run| run.disk_pid.is_some());
    let phase = word(&found.status.phase);
    run.ok_or_else(|| Failure::new(Exit::Refused, format!("{name} is {phase}: start it first")))
}

fn act(
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
                "{} runs again: somebody has started it since, or its catalog keeps so many warm ('machine drain' keeps one off)",
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
fn delete(
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
    Err(Failure::new(exit(first.code), message))
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

fn drain(
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
            Err(Failure::new(exit(code), format!("{}: {why}", machine.machine.name)))
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

fn rows(machines: &[MachineDetails]) -> String {
    table(COLUMNS, machines.iter().map(row))
}

/// Formats the row of a machine in a list.
fn row(machine: &MachineDetails) -> [String; COLUMNS.len()] {
    let run = machine.status.run.as_ref();
    let image = run.map_or("-".into(), |run| {
        let next = if run.outdated { " (next start: another)" } else { "" };
        format!("{}:{}{next}", run.image, run.version)
    });
    let mut state = match (&machine.status.message, machine.status.phase) {
        (Some(message), _) => format!("{}: {message}", word(&machine.status.phase)),
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
fn page(machine: &MachineDetails) -> String {
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
        lines.extend(run.nbd_socket.iter().map(|socket| ("NBD", path(socket))));
        lines.push(("crashes", run.crashes.to_string()));
        let pending = run.pending.iter();
        lines.extend(pending.map(|next| ("next start", format!("{} {}", next.setting, change_text(next)))));
    }
    lines.iter().map(|(name, value)| format!("{name:<14}{value}\n")).collect()
}
