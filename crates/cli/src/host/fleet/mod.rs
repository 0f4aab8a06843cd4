//! `spillway fleet`: many hosts that share catalogs. Owns the commands about the fleet itself.
//!
//! Never talks to etcd: the daemon of a host does. Invariant: nothing is decided here; the daemon's response is shown.

pub(super) mod catalog;
mod claim;
mod event;
mod help;
mod host;
mod image;
mod registry;
mod share;
mod status;
mod top;

use super::{Daemon, word};
use crate::error::Failure;
use crate::output;
use catalog::FleetCatalogCommand;
use claim::{FleetClaimOptions, FleetRelease, FleetRenew};
use clap::{Subcommand, ValueEnum};
use event::FleetEvents;
use host::FleetHostCommand;
use image::FleetImageCommand;
use registry::FleetRegistryCommand;
use spillway_api::client::Client;
use spillway_api::{Empty, FleetDetails, JoinToken, Membership, NewFleet, PlacerChange};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use top::FleetTop;

/// Path of the fleet.
const FLEET: &str = "/v1/fleet";

/// What to do with the fleet that spillwayd's host belongs to.
#[derive(Debug, Subcommand)]
pub enum FleetCommand {
    /// Make the fleet, once, on its first host
    #[command(after_help = help::INIT)]
    Init,
    /// Show the fleet as this host sees it: membership, etcd, placer, hosts, catalogs; exit code 69 if the host is no member
    #[command(after_help = help::STATUS)]
    Status,
    /// List the hosts of the fleet, and why one of them is not replaced or refuses machines
    #[command(after_help = help::HOSTS)]
    Hosts,
    /// Print a secret text with which another host joins
    #[command(after_help = help::JOIN_TOKEN)]
    JoinToken,
    /// Switch the placer on or off: whether Spillway decides which host has how many machines
    #[command(after_help = help::PLACER)]
    Placer {
        /// Whether Spillway places machines
        #[arg(value_enum, value_name = "on|off", hide_possible_values = true)]
        state: Switch,
    },
    /// Show and follow the events of all hosts
    #[command(after_help = help::EVENT)]
    Event(FleetEvents),
    /// Show where the I/O of all hosts goes, live
    #[command(after_help = help::TOP, mut_arg("by", |by| by.hide(true)))]
    Top(Box<FleetTop>),
    /// Manage a host of the fleet: cordon, drain, declare dead, remove
    #[command(subcommand)]
    Host(FleetHostCommand),
    /// Manage catalogs of the fleet: machines of one image on many hosts
    #[command(subcommand)]
    Catalog(FleetCatalogCommand),
    /// Manage registries of the fleet: places that all hosts have images from
    #[command(subcommand)]
    Registry(FleetRegistryCommand),
    /// Manage images of the fleet: versions in its registries, for its catalogs
    #[command(subcommand)]
    Image(FleetImageCommand),
    /// Claim a machine of a catalog on any host; prints HOST/MACHINE, its address if that is known, and the claim's id
    #[command(after_help = help::CLAIM)]
    Claim(FleetClaimOptions),
    /// Renew a claim, from now on
    #[command(after_help = help::RENEW)]
    Renew(FleetRenew),
    /// Release a machine: it is reset, and can be claimed again
    #[command(after_help = help::RELEASE)]
    Release(FleetRelease),
}

/// State of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Spillway places machines
    On,
    /// Another program writes the shares of the hosts
    Off,
}

/// Does it.
pub fn fleet(daemon: &Daemon, command: FleetCommand) -> Result<ExitCode, Failure> {
    let mut client = daemon.client()?;
    match command {
        FleetCommand::Init => init(daemon, &client)?,
        FleetCommand::Status => return status::status(daemon, &client),
        FleetCommand::Hosts => host::list(daemon, &client)?,
        FleetCommand::JoinToken => join_token(daemon, &client)?,
        FleetCommand::Placer { state } => placer(daemon, &client, state == Switch::On)?,
        FleetCommand::Event(args) => event::event(daemon, &client, &args)?,
        FleetCommand::Top(args) => top::top(daemon, client, *args)?,
        FleetCommand::Host(command) => host::host(daemon, &client, command)?,
        FleetCommand::Catalog(command) => return catalog::catalog(daemon, &client, command),
        FleetCommand::Registry(command) => registry::registry(daemon, &client, command)?,
        FleetCommand::Image(command) => image::image(daemon, &client, command)?,
        FleetCommand::Claim(claim) => claim.run(daemon, &mut client)?,
        FleetCommand::Renew(renew) => renew.run(daemon)?,
        FleetCommand::Release(release) => release.run(daemon)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Longest wait until the host is a member of the fleet that it has made.
const JOINED: Duration = Duration::from_secs(5);

fn init(daemon: &Daemon, client: &Client) -> Result<(), Failure> {
    let mut made: FleetDetails = client.post(FLEET, &NewFleet {})?;
    let begun = Instant::now();
    while made.membership != Membership::Member && begun.elapsed() < JOINED {
        std::thread::sleep(Duration::from_millis(100));
        made = client.get(FLEET)?;
    }
    daemon.show(&made, |made| {
        let id = made.fleet_id.as_deref().unwrap_or("-");
        format!(
            "the fleet {} is made, with the identity {id}\n{} {}; for each other host: 'spillway fleet join-token'\n",
            made.name,
            made.host,
            if made.membership == Membership::Member { "is its first member" } else { "is about to join it" },
        )
    })
}

fn join_token(daemon: &Daemon, client: &Client) -> Result<(), Failure> {
    let token: JoinToken = client.post(&format!("{FLEET}/join-tokens"), &Empty {})?;
    daemon.show(&token, |token| format!("{}\n", token.token))?;
    if !daemon.json {
        let text = "this text has all that this host shows to etcd, private key and password included: keep it in a file that only root can \
                    read, for --fleet-token of the other host's spillwayd";
        output::complain("note", text);
    }
    Ok(())
}

fn placer(daemon: &Daemon, client: &Client, enabled: bool) -> Result<(), Failure> {
    let changed: FleetDetails = client.put(&format!("{FLEET}/placer"), &PlacerChange { enabled })?;
    daemon.show(&changed, |changed| match changed.places {
        true => "the placer is on: Spillway decides which host has how many machines\n".into(),
        false => "the placer is off: hosts keep the shares that they have until another program writes others, and machines \
                  of a lost host are not replaced\n"
            .into(),
    })
}
