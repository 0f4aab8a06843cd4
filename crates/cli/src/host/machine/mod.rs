//! `spillway machine`.

mod action;
mod guest;
mod table;

pub use action::{failed, wait};

use super::claim::{CLAIM_EXAMPLES, Claim, Renew, release};
use super::console::console;
use super::words::{number, word};
use super::{Daemon, Labels, Limit};
use crate::error::{Exit, Failure};
use crate::host::words::size;
use crate::{attach, dirty};
use action::{EndOptions, MachineSelection, OnceOption, SelectorOptions, act, delete, drain};
use clap::Subcommand;
use guest::GuestCommand;
use serde_json::json;
use spillway_api::client::Client;
use spillway_api::{
    Action, DirtyRanges, MachineDetails, MachineRun, MachineSize, Name, NewMachine, bounds, size_text,
};
use std::process::ExitCode;
use table::{COLUMNS, page, row};

const START_EXAMPLES: &str = "\
Examples:
  spillway machine start desk-001 desk-002 --wait
  spillway machine start --catalog desk
  spillway machine restart --label team=support --grace 300
  A job that may ask twice restarts once:
    spillway machine restart desk-001 --key \"job-$CI_JOB_ID\"";

const ADD_EXAMPLES: &str = "\
Examples:
  A disk for a virtual machine that libvirt, Proxmox VE or a script starts:
    spillway catalog create vms --image debian --vmm external --socket-group libvirt-qemu
    spillway machine add vms web-7 --size 40G
    spillway machine start web-7 --wait
    spillway machine attach web-7 --for qemu";

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
        /// Only machines that this owner has claimed, such as ci or 'uid 1000'
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
    /// Add a machine to a catalog with --vmm external. Does nothing if it is there already
    #[command(after_help = ADD_EXAMPLES)]
    Add {
        /// The catalog
        catalog: Name,
        /// Name of the machine
        name: Name,
        #[arg(
            long, value_name = "SIZE", value_parser = size(&bounds::DISK_BYTES),
            help = bounds::DISK_BYTES.help("Size of its disk, at least the image's [default: the image's]")
        )]
        size: Option<u64>,
    },
    /// Make the disk of an external machine that is off larger
    Resize {
        /// The machine
        name: Name,
        #[arg(value_parser = size(&bounds::DISK_BYTES), help = bounds::DISK_BYTES.help("New size of its disk as a whole"))]
        size: u64,
    },
    /// Start machines
    #[command(after_help = START_EXAMPLES)]
    Start(MachineSelection),
    /// Shut machines down and discard their data, unless the catalog has reset = never
    Stop {
        /// The machines to act on.
        #[command(flatten)]
        which: MachineSelection,
        /// How the machines are ended.
        #[command(flatten)]
        how: EndOptions,
    },
    /// Shut machines down and start them again; their disks are reset, unless the catalog has reset = never
    Restart {
        /// The machines to act on.
        #[command(flatten)]
        which: MachineSelection,
        /// How the machines are ended.
        #[command(flatten)]
        how: EndOptions,
    },
    /// End machines at once and discard their data; machines that ran start again, stopped ones stay off
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
        /// The idempotency key.
        #[command(flatten)]
        once: OnceOption,
    },
    /// Allow drained machines to be started and claimed again
    Undrain {
        /// The machines to act on.
        #[command(flatten)]
        which: SelectorOptions,
        /// The idempotency key.
        #[command(flatten)]
        once: OnceOption,
    },
    /// Connect to a machine's serial console; Ctrl-] leaves it
    ///
    /// Shows the last 256 KiB that the guest has written, and then what it writes. Several clients can be connected at a
    /// time. One of them has the keyboard: the first that types, until it leaves. While another one has it, Ctrl-T takes it.
    /// Input that does not come from a terminal waits until the keyboard is free.
    Console {
        /// The machine
        name: Name,
        /// Take the keyboard from another client
        #[arg(long)]
        take: bool,
    },
    /// Programs and files in its guest.
    #[command(flatten)]
    Guest(GuestCommand),
    /// Print the configuration with which a VMM that another program starts uses a machine's disk
    Attach {
        /// The machine
        name: Name,
        /// Which VMM
        #[arg(long = "for", value_name = "VMM")]
        vmm: crate::args::Vmm,
    },
    /// Show where a machine's I/O went
    ///
    /// The figures are read from the machine's disk itself, so this works only on the host that the machine runs on. With
    /// --dirty, spillwayd is asked, which works from other hosts, too.
    Stats {
        /// The machine
        name: Name,
        /// Show how much would have overflowed at every size of the RAM tier since the disk's worker started, from a sample
        #[arg(long)]
        curve: bool,
        /// Show the ranges that the guest wrote most since the last reset
        #[arg(long, conflicts_with = "curve")]
        dirty: bool,
        #[arg(
            long, value_name = "N", requires = "dirty", value_parser = number(&bounds::LIMIT),
            help = bounds::LIMIT.help("With --dirty: number of ranges, those with most writes first")
        )]
        top: Option<u32>,
    },
}

/// Does it.
pub fn machine(daemon: &Daemon, command: MachineCommand) -> Result<ExitCode, Failure> {
    match command {
        MachineCommand::Guest(command) => command.run(daemon),
        command => on_host(daemon, command).map(|()| ExitCode::SUCCESS),
    }
}

fn on_host(daemon: &Daemon, command: MachineCommand) -> Result<(), Failure> {
    let mut client = daemon.client()?;
    match command {
        MachineCommand::Guest(command) => command.run(daemon).map(drop),
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
        MachineCommand::Add { catalog, name, size } => {
            let new = NewMachine { name, size_bytes: size };
            let machine: MachineDetails = client.post(&format!("/v1/catalogs/{catalog}/machines"), &new)?;
            daemon.show(&machine, |machine| format!("{} is there\n", machine.machine.name))
        }
        MachineCommand::Resize { name, size } => {
            let machine: MachineDetails =
                client.put(&format!("/v1/machines/{name}/size"), &MachineSize { size_bytes: size })?;
            let text = |machine: &MachineDetails| {
                format!(
                    "the disk of {} has {} from its next start on\n",
                    machine.machine.name,
                    size_text(size)
                )
            };
            daemon.show(&machine, text)
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
        MachineCommand::Console { name, take } => {
            daemon.local("a console")?;
            let socket = run(&client, &name)?.console_socket;
            let none = || {
                Failure::new(Exit::Refused, format!("{name} has no console here: who runs its VMM has it"))
            };
            console(&socket.ok_or_else(none)?, take)
        }
        MachineCommand::Attach { name, vmm } => {
            let vhost_user = run(&client, &name)?.disk_socket;
            let text = attach::instructions(&crate::args::Attach { vhost_user, vmm })?;
            daemon.show(&json!({ "instructions": text }), |_| text.clone())
        }
        MachineCommand::Stats { name, dirty: true, top, .. } => {
            let limit = top.map(|top| format!("?limit={top}")).unwrap_or_default();
            let ranges: DirtyRanges = client.get(&format!("/v1/machines/{name}/dirty-ranges{limit}"))?;
            daemon.show(&ranges, dirty::of_machine)
        }
        MachineCommand::Stats { name, curve, .. } => {
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
