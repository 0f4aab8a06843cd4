//! The command line: its options, what they mean, and which of them go together. Never opens anything.
//!
//! Invariant: an option that would have no effect is an error, so that nobody believes in one that does nothing.

mod disk;
pub mod settings;

use crate::advise::{self, Advise};
use crate::console::ConsoleOptions;
use crate::error::{EXIT_CODES, Failure};
use crate::examples::{
    ATTACH_EXAMPLES, CONSOLE_EXAMPLES, DOCTOR_EXAMPLES, EVENT_EXAMPLES, EVENTS_EXAMPLES, RESET_EXAMPLES,
    RUN_EXAMPLES, SERVE_EXAMPLES, SET_EXAMPLES, STATS_EXAMPLES, TOP_EXAMPLES, UPGRADE_EXAMPLES,
};
use crate::host::{
    self, CatalogCommand, Daemon, FleetCommand, GlobalDaemonOptions, HostCommand, ImageCommand,
    LeftoverCommand, LibvirtCommand, MachineCommand, OperationCommand, RegistryCommand, StoreCommand,
};
use crate::lab::LabCommand;
use crate::man::ManOptions;
use crate::storage_model::StorageModelCommand;
use crate::token::TokenCommand;
use crate::top::Top;
use crate::trace::TraceCommand;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use disk::{Disk, MAX_QUEUES};
use settings::LimitOptions;
use spillway_control::{Dirty, ServeSettings};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Disposable disks for virtual machines: a shared, read-only base image, a bounded RAM write cache, and an
/// overflow to local disk.
#[derive(Debug, Parser)]
#[command(name = "spillway", version, after_help = format!("{EXAMPLES}\n\n{EXIT_CODES}"))]
pub struct Cli {
    /// Where the daemon is.
    #[command(flatten)]
    before: GlobalDaemonOptions,
    /// What to do.
    #[command(subcommand)]
    command: Command,
}

impl Cli {
    /// Reads the command line. If a subcommand is missing the error lists those that exist.
    pub fn read() -> Result<Cli, clap::Error> {
        // Clap would print the whole help instead.
        fn without_help(command: clap::Command) -> clap::Command {
            command.arg_required_else_help(false).mut_subcommands(without_help)
        }
        let mut matches = without_help(Cli::command()).try_get_matches()?;
        Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut Cli::command()))
    }

    /// What to do, with what was said before it.
    pub fn asked(self) -> Result<Command, Failure> {
        let Cli { before, mut command } = self;
        match &mut command {
            Command::Catalog { daemon, .. }
            | Command::Machine { daemon, .. }
            | Command::Libvirt { daemon, .. }
            | Command::Fleet { daemon, .. }
            | Command::Host { daemon, .. }
            | Command::Leftover { daemon, .. }
            | Command::Image { daemon, .. }
            | Command::Operation { daemon, .. }
            | Command::Registry { daemon, .. }
            | Command::Event { daemon, .. }
            | Command::Store { daemon, .. }
            | Command::Top { daemon, .. }
            | Command::Console { daemon, .. }
            | Command::Doctor { daemon }
            | Command::Advise(Advise { daemon, .. }) => daemon.or(before),
            Command::Serve(Serve { json, .. })
            | Command::Stats(Stats { json, .. })
            | Command::Set(Set { json, .. })
            | Command::Events(Events { json, .. })
            | Command::Upgrade(Upgrade { json, .. }) => *json |= before.json()?,
            Command::Run(_)
            | Command::Reset(_)
            | Command::Trace { .. }
            | Command::Lab { .. }
            | Command::StorageModel { .. }
            | Command::Token { .. }
            | Command::Attach(_)
            | Command::Completion { .. }
            | Command::Man(_) => {
                if before.json()? {
                    return Err(Failure::usage(
                        "this command takes no --json before its name: give it after the name if the command has it (see --help)",
                    ));
                }
            }
        }
        Ok(command)
    }
}

const EXAMPLES: &str = "\
Examples:
  Boot a throw-away machine from an image, in this terminal:
    spillway run --image debian.qcow2
  Serve a disk to a VMM, with figures at any time:
    spillway serve --image debian.raw --vhost-user /run/vm1.sock --control /run/vm1.ctl
    spillway attach --vhost-user /run/vm1.sock --for qemu
    spillway stats /run/vm1.ctl --watch";

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve one disk until SIGTERM or Ctrl-C
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(Serve),
    /// Boot a virtual machine on a disk, its serial console in this terminal
    #[command(after_help = RUN_EXAMPLES)]
    Run(Run),
    /// Show where the I/O of a disk went
    #[command(after_help = STATS_EXAMPLES)]
    Stats(Stats),
    /// Discard everything that was written to a disk: it is the base image again
    #[command(after_help = RESET_EXAMPLES)]
    Reset(Reset),
    /// Change the limits of a disk while it is used
    #[command(after_help = SET_EXAMPLES)]
    Set(Set),
    /// Follow the events of a disk: nearly full, full, degraded, restarted...
    #[command(after_help = EVENTS_EXAMPLES)]
    Events(Events),
    /// Replace the program that serves a disk by another version, while its machine runs
    #[command(after_help = UPGRADE_EXAMPLES)]
    Upgrade(Upgrade),
    /// Manage catalogs: sets of machines made from one image
    Catalog {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: CatalogCommand,
    },
    /// Manage machines: start, stop, reset, claim, delete
    Machine {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: MachineCommand,
    },
    /// Give domains of libvirt disposable disks
    Libvirt {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: LibvirtCommand,
    },
    /// Show the host, close it for maintenance, open it again
    Host {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: HostCommand,
    },
    /// Manage a fleet: hosts that share catalogs by records in etcd, and replace machines of hosts that are lost
    Fleet {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: Box<FleetCommand>,
    },
    /// List and delete files that deleted machines left behind
    Leftover {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: LeftoverCommand,
    },
    /// Manage images and their versions: import, publish, check, push, pull, delete
    Image {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: ImageCommand,
    },
    /// List, await and cancel long operations: imports, commits, pushes, verifications
    Operation {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: OperationCommand,
    },
    /// Show and follow the events of the host: machines, catalogs, stores
    #[command(after_help = EVENT_EXAMPLES)]
    Event {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// Which.
        #[command(flatten)]
        events: host::Events,
    },
    /// Manage registries: stores of images that hosts share
    Registry {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: RegistryCommand,
    },
    /// Manage stores: the folders in which spillwayd keeps images and disks
    Store {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// What to do.
        #[command(subcommand)]
        command: StoreCommand,
    },
    /// Print an address at which one browser can use the web console of spillwayd, until Ctrl-C
    #[command(after_help = CONSOLE_EXAMPLES, mut_args(host::only_local))]
    Console {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// How.
        #[command(flatten)]
        console: ConsoleOptions,
    },
    /// Show where the I/O of all machines goes, live
    #[command(after_help = TOP_EXAMPLES)]
    Top {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
        /// How.
        #[command(flatten)]
        top: Top,
    },
    /// Record the requests of a disk as a trace, import traces of other tools, replay them
    Trace {
        /// What to do.
        #[command(subcommand)]
        command: TraceCommand,
    },
    /// Run benchmark studies, which compare scenarios under the same workload on real machines
    Lab {
        /// What to do.
        #[command(subcommand)]
        command: LabCommand,
    },
    /// Recommend a limit for the RAM tier, from traces of requests
    #[command(after_help = advise::EXAMPLES)]
    Advise(Advise),
    /// Create storage models, which make a disk as slow as a given device, for measurements
    StorageModel {
        /// What to do.
        #[command(subcommand)]
        command: StorageModelCommand,
    },
    /// Check that this host meets the requirements of machines and disks, and say how to fix what is missing
    #[command(after_help = DOCTOR_EXAMPLES, mut_args(host::only_local))]
    Doctor {
        /// Where it is.
        #[command(flatten)]
        daemon: Daemon,
    },
    /// Create tokens, which give access to spillwayd over TCP
    Token {
        /// What to do.
        #[command(subcommand)]
        command: TokenCommand,
    },
    /// Print the configuration with which a VMM uses a disk
    #[command(after_help = ATTACH_EXAMPLES)]
    Attach(Attach),
    /// Print the completion script for a shell
    #[command(after_help = "Example:\n  spillway completion bash > /etc/bash_completion.d/spillway")]
    Completion {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Write the man pages, one for each command, into a folder
    #[command(after_help = "Example:\n  spillway man /usr/local/share/man/man1")]
    Man(ManOptions),
}

/// Options of `serve`.
#[derive(Debug, Args)]
pub struct Serve {
    #[command(flatten)]
    pub disk: Disk,
    /// Print one JSON object, instead of a line of text, when the disk is ready
    #[arg(long)]
    pub json: bool,
}

/// Options of `run`.
#[derive(Debug, Args)]
pub struct Run {
    #[command(flatten)]
    pub disk: Disk,
    /// Memory of the machine, in whole MiB
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size, default_value = "1G")]
    pub memory: u64,
    /// Processors of the machine
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_QUEUES), default_value_t = 1)]
    pub vcpus: u16,
    /// Kernel to boot instead of the disk's boot loader
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk of that kernel
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initrd: Option<PathBuf>,
    /// Command line of that kernel
    #[arg(long, value_name = "STRING", requires = "kernel", allow_hyphen_values = true)]
    pub append: Option<String>,
    /// More arguments for QEMU
    #[arg(last = true, value_name = "QEMU ARGS")]
    pub qemu: Vec<OsString>,
}

/// Options of `stats`.
#[derive(Debug, Args)]
pub struct Stats {
    /// Control socket of the disk
    #[arg(value_name = "SOCK")]
    pub control: PathBuf,
    /// Print all counters and gauges as one JSON object
    #[arg(long, conflicts_with = "prometheus")]
    pub json: bool,
    /// Print all counters and gauges in Prometheus text format, once
    #[arg(long)]
    pub prometheus: bool,
    /// Print only the counters of another product, under its names: mcsio is Citrix MCS storage optimization (table or --json)
    #[arg(long, value_name = "NAMES")]
    pub names: Option<Names>,
    /// Print again every second until Ctrl-C: a table with rates, or with --json one object a line
    #[arg(long)]
    pub watch: bool,
    /// Print the ranges that the guest wrote most since the last reset, to find what fills the cache (table or --json)
    #[arg(long, conflicts_with_all = ["prometheus", "names", "watch"])]
    pub dirty: bool,
    /// Print how much would have overflowed at every size of the RAM tier since the worker started, estimated from a sample
    /// (table or --json)
    #[arg(long, conflicts_with_all = ["prometheus", "names", "watch", "dirty"])]
    pub curve: bool,
    /// With --dirty: number of ranges, those with most writes first [default: 20]
    #[arg(long, value_name = "N", requires = "dirty", value_parser = clap::value_parser!(u32).range(1..=i64::from(Dirty::MAX_ROWS)))]
    pub top: Option<u32>,
}

/// Vocabularies of figures.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Names {
    /// Citrix MCS Storage Driver
    Mcsio,
}

/// Options of `reset`.
#[derive(Debug, Args)]
pub struct Reset {
    /// Control socket of the disk
    #[arg(value_name = "SOCK")]
    pub control: PathBuf,
    /// Disconnect all clients first, after their accepted requests are completed
    #[arg(long)]
    pub force: bool,
    /// Required in mode persistent: discard the data that the disk keeps
    #[arg(long)]
    pub discard_data: bool,
}

/// Options of `set`.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("what").required(true).multiple(true)
    .args(["ram", "overflow", "full", "warn_at", "critical_at", "iops", "iops_burst", "bandwidth", "bandwidth_burst"])))]
pub struct Set {
    /// Control socket of the disk
    #[arg(value_name = "SOCK")]
    pub control: PathBuf,
    /// What is to change.
    #[command(flatten)]
    pub limits: LimitOptions,
    /// Print the new settings as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Options of `events`.
#[derive(Debug, Args)]
pub struct Events {
    /// Control socket of the disk
    #[arg(value_name = "SOCK")]
    pub control: PathBuf,
    /// Print one JSON object a line: kind, text, unix_ms
    #[arg(long)]
    pub json: bool,
}

/// Options of `upgrade`.
#[derive(Debug, Args)]
pub struct Upgrade {
    /// Control socket of the disk
    #[arg(value_name = "SOCK")]
    pub control: PathBuf,
    /// Path of the new spillway-worker [default: the one that is installed with this program]
    #[arg(long, value_name = "PATH")]
    pub binary: Option<PathBuf>,
    /// Print one JSON object: version, worker_pid, pause_ms
    #[arg(long)]
    pub json: bool,
}

/// Options of `attach`.
#[derive(Debug, Args)]
pub struct Attach {
    /// vhost-user socket of the disk, as given to 'spillway serve'
    #[arg(long, value_name = "SOCK")]
    pub vhost_user: PathBuf,
    /// Which VMM
    #[arg(long = "for", value_name = "VMM")]
    pub vmm: Vmm,
}

/// VMMs that can take a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Vmm {
    Qemu,
    Libvirt,
    CloudHypervisor,
    Firecracker,
}

impl Serve {
    /// Returns the settings of the disk to serve, or an error if the options contradict each other.
    pub fn settings(&self) -> Result<ServeSettings, Failure> {
        let settings = self.disk.settings();
        settings.check()?;
        Ok(settings)
    }
}

impl Run {
    /// The disk of a machine of our own, whose socket is at this path unless it was said, or why these do not go together.
    pub fn settings(&self, socket: &Path) -> Result<ServeSettings, Failure> {
        if self.memory == 0 || !self.memory.is_multiple_of(1 << 20) {
            return Err(Failure::usage(
                "--memory is not a whole number of MiB: write, for instance, 1G or 512M",
            ));
        }
        let given = self.disk.settings();
        if given.sockets().iter().all(|(_, path)| path.is_none()) {
            let rights = [
                ("--socket-mode", given.socket_mode.is_some()),
                ("--socket-group", given.socket_group.is_some()),
            ];
            if let Some((option, _)) = rights.into_iter().find(|(_, given)| *given) {
                return Err(Failure::usage(format!(
                    "{option} is for sockets that others connect to: give --vhost-user, --nbd or --control, or \
                     leave {option} out"
                )));
            }
        }
        let settings = ServeSettings {
            queues: Some(self.queues()),
            // Its private socket has another path each time.
            identity: Some(given.identity().into()),
            vhost_user: Some(given.vhost_user.clone().unwrap_or_else(|| socket.into())),
            ..given
        };
        settings.check()?;
        Ok(settings)
    }

    /// Request queues between the machine and its disk.
    pub fn queues(&self) -> u16 {
        self.disk.queues.unwrap_or(self.vcpus)
    }
}

impl Stats {
    /// Whether these go together.
    pub fn check(&self) -> Result<(), Failure> {
        let refuse = |option: &str, why: &str| {
            Err(Failure::usage(format!("{option} is not for --prometheus: {why}: leave one of them out")))
        };
        match self.prometheus {
            true if self.names.is_some() => refuse("--names", "those are no names that Prometheus takes"),
            true if self.watch => refuse("--watch", "a scrape is of one moment, and who scrapes repeats it"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_well_formed() {
        Cli::command().debug_assert();
    }

    fn run(more: &[&str]) -> ServeSettings {
        let words = ["spillway", "run", "--image", "i.raw"].iter().chain(more);
        match Cli::try_parse_from(words).unwrap().asked().unwrap() {
            Command::Run(args) => args.settings(Path::new("private")).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_machine_has_the_same_disk_at_each_start() {
        assert_eq!(run(&[]).identity(), Path::new("i.raw"));
        assert_eq!(run(&["--control", "c"]).identity(), Path::new("c"));
        assert_eq!(run(&["--control", "c", "--vhost-user", "v"]).identity(), Path::new("v"));
    }

    #[test]
    fn a_machine_has_a_queue_for_each_processor_unless_told_otherwise() {
        assert_eq!(run(&[]).queues(), 1);
        assert_eq!(run(&["--vcpus", "4"]).queues(), 4);
        assert_eq!(run(&["--vcpus", "4", "--queues", "2"]).queues(), 2);
    }
}
