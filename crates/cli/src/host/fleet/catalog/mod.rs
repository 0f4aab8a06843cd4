//! `spillway fleet catalog`: the commands of `spillway catalog`, for catalogs whose machines are on many hosts.
//!
//! Owns the pages; files, and what `apply` does, are those of `spillway catalog`. Invariant: a change is based on the revision that was
//! read.

pub mod rollout;
pub mod settings;
mod version;

use super::share::{ShareTotals, by_host, refusals};
use super::{FLEET, help, word};
use crate::error::Failure;
use crate::host::catalog::apply::{CatalogFile, Export, Terms};
use crate::host::catalog::compare::value_text;
use crate::host::catalog::kind::CatalogObject;
use crate::host::catalog::settings::not_with_file;
use crate::host::catalog::update::settle;
use crate::host::words::number;
use crate::host::{Daemon, Labels, Limit, table};
use crate::output;
use clap::{Args, Subcommand};
use rollout::FleetRolloutCommand;
use settings::FleetCreate;
use spillway_api::client::{Client, query};
use spillway_api::{Empty, FleetCatalog, FleetHost, List, Name, bounds, settings as settings_of};
use std::process::ExitCode;
use version::{Rollback, Update};

/// What to do with catalogs of the fleet.
#[derive(Debug, Subcommand)]
pub enum FleetCatalogCommand {
    /// Create a catalog of the fleet: a number of machines of an image, on many hosts
    #[command(after_help = help::CREATE, mut_args(not_with_file))]
    Create(Box<FleetCreate>),
    /// Create and change catalogs of the fleet to match a file
    #[command(after_help = help::APPLY)]
    Apply(Apply),
    /// Show what apply would change; exit code 1 if it would change anything
    #[command(after_help = help::DIFF)]
    Diff {
        /// The file.
        #[command(flatten)]
        wanted: CatalogFile,
    },
    /// Print catalogs of the fleet as a file for apply
    #[command(after_help = help::EXPORT)]
    Export(Export),
    /// List catalogs of the fleet
    #[command(after_help = help::LIST)]
    List {
        /// Labels that a catalog must have.
        #[command(flatten)]
        labels: Labels,
        /// The bound of the list.
        #[command(flatten)]
        limit: Limit,
    },
    /// Show a catalog: its settings, its machines on each host, and which find no host
    #[command(after_help = help::SHOW)]
    Show {
        /// The catalog
        name: Name,
    },
    /// Change the number of machines on all hosts together
    #[command(after_help = help::SCALE)]
    Scale {
        /// The catalog
        name: Name,
        /// New number of machines
        #[arg(value_parser = number(&bounds::MACHINES))]
        count: u32,
        /// Check everything, change nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Change the version of the machines' image
    #[command(after_help = help::UPDATE)]
    Update(Update),
    /// Return to an earlier version of the catalog
    #[command(after_help = help::ROLLBACK)]
    Rollback(Rollback),
    /// Pause, resume or abort the rollout of a version over the hosts
    #[command(after_help = help::ROLLOUT)]
    Rollout {
        /// What to do.
        #[command(subcommand)]
        command: FleetRolloutCommand,
    },
    /// Delete a catalog of the fleet, and its machines on all hosts
    #[command(after_help = help::DELETE)]
    Delete {
        /// The catalog
        name: Name,
    },
}

/// Options of `fleet catalog apply`.
#[derive(Debug, Args)]
pub struct Apply {
    #[command(flatten)]
    wanted: CatalogFile,
    /// Check everything, change nothing
    #[arg(long)]
    dry_run: bool,
}

/// Does it.
pub fn catalog(daemon: &Daemon, client: &Client, command: FleetCatalogCommand) -> Result<ExitCode, Failure> {
    match command {
        FleetCatalogCommand::Create(create) => create.run(daemon, client)?,
        FleetCatalogCommand::Apply(Apply { wanted, dry_run }) => {
            wanted.bring::<FleetCatalog>(daemon, client, Terms { discard_data: false, dry_run }).map(drop)?;
        }
        FleetCatalogCommand::Diff { wanted } => {
            return wanted.differ::<FleetCatalog>(daemon, client, Terms::default());
        }
        FleetCatalogCommand::Export(export) => export.run::<FleetCatalog>(daemon, client)?,
        FleetCatalogCommand::List { labels, limit } => list(daemon, client, &labels, limit)?,
        FleetCatalogCommand::Show { name } => show(daemon, client, &client.get(&path(&name))?)?,
        FleetCatalogCommand::Scale { name, count, dry_run } => scale(daemon, client, &name, count, dry_run)?,
        FleetCatalogCommand::Update(update) => update.run(daemon, client)?,
        FleetCatalogCommand::Rollback(rollback) => rollback.run(daemon, client)?,
        FleetCatalogCommand::Rollout { command } => rollout::rollout(daemon, client, command)?,
        FleetCatalogCommand::Delete { name } => {
            let deleted: Empty = client.delete(&path(&name))?;
            daemon.show(&deleted, |_| {
                format!("{name} is deleted: each host gives its machines up, claimed ones when they are released\n")
            })?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn path(name: &Name) -> String {
    <FleetCatalog as CatalogObject>::path(name)
}

/// Query of a dry run; none otherwise.
fn dry(dry_run: bool) -> String {
    query(dry_run.then(|| ("dry_run", "true".to_owned())))
}

fn list(daemon: &Daemon, client: &Client, labels: &Labels, limit: Limit) -> Result<(), Failure> {
    let mut catalogs: List<FleetCatalog> = client.list(FleetCatalog::LIST)?;
    catalogs.items.retain(|catalog| labels.fit(&catalog.spec.catalog.labels));
    catalogs.items.truncate(limit.most());
    daemon.show(&catalogs, |catalogs| {
        let row = |catalog: &FleetCatalog| {
            let (spec, totals) = (&catalog.spec.catalog, ShareTotals::of(&catalog.shares));
            let hosts = catalog.shares.iter().filter(|share| share.wanted > 0).count();
            let numbers = [u64::from(spec.count), totals.ready, catalog.unplaced.into(), hosts as u64];
            let [count, ready, unplaced, hosts] = numbers.map(|number| number.to_string());
            let image = format!("{}:{}", spec.image.name, catalog.version);
            let mode = spec.mode().name().to_owned();
            let rollout = rollout::short(catalog.rollout.as_ref());
            [catalog.name.to_string(), image, count, ready, unplaced, hosts, word(&spec.kind), mode, rollout]
        };
        let columns = ["NAME", "IMAGE", "MACHINES", "READY", "UNPLACED", "HOSTS", "TYPE", "MODE", "ROLLOUT"];
        table(columns, catalogs.items.iter().map(row))
    })
}

/// Shows everything about a catalog, with the zones of its hosts.
fn show(daemon: &Daemon, client: &Client, catalog: &FleetCatalog) -> Result<(), Failure> {
    let hosts: List<FleetHost> = match daemon.json {
        true => List { items: Vec::new() },
        false => client.list(&format!("{FLEET}/hosts"))?,
    };
    daemon.show(catalog, |catalog| page(catalog, &hosts.items))
}

fn page(catalog: &FleetCatalog, hosts: &[FleetHost]) -> String {
    let (spec, totals) = (&catalog.spec, ShareTotals::of(&catalog.shares));
    let mut text = format!("{}, {}\n", catalog.name, versions(catalog));
    text += &format!(
        "{} of {} machines are ready, {} are claimed, {} have failed, {} find no host\n",
        totals.ready, spec.catalog.count, totals.claimed, totals.failed, catalog.unplaced
    );
    text += &catalog.rollout.as_ref().map_or(String::new(), rollout::page);
    if spec.keeps_data() {
        text += "they keep data, each on its host: they stay there, and are not replaced when the host is drained or lost\n";
    }
    let settings = settings_of(&spec.with_defaults(&catalog.name));
    let rows = settings.iter().filter(|(_, value)| !value.is_null());
    let rows = rows.map(|(name, value)| [name.clone(), value_text(name, value)]);
    text += &format!("\n{}\n", table(["SETTING", "VALUE"], rows));
    let history = catalog.history.iter().map(|entry| {
        [format!("{}:{}", entry.image, entry.version), entry.since.strftime("%Y-%m-%d %H:%M").to_string()]
    });
    text += &table(["HISTORY", "SINCE"], history);
    if !catalog.shares.is_empty() {
        let zone = |host: &Name| hosts.iter().find(|one| one.name == *host).map(|host| &host.zone);
        text += &format!("\n{}", by_host(&catalog.shares, zone));
    }
    let refused = refusals(&catalog.shares);
    if !refused.is_empty() {
        text += &format!("\n{refused}");
    }
    if !catalog.unplaced_because.is_empty() {
        let rows =
            catalog.unplaced_because.iter().map(|(host, why)| [host.to_string(), why.replace('\n', " ")]);
        text += &format!("\n{}", table(["NO SPACE ON", "WHY"], rows));
        if catalog.unplaced_more_hosts > 0 {
            text += &format!("and on {} further hosts\n", catalog.unplaced_more_hosts);
        }
    } else if catalog.unplaced > 0 {
        text += "\nwhy is not known: the host that places has not looked yet, or does not answer ('spillway fleet status')\n";
    }
    text
}

/// Describes which version machines take, and how.
fn versions(catalog: &FleetCatalog) -> String {
    format!(
        "machines take {}:{}, on each host with rollout {}",
        catalog.spec.catalog.image.name, catalog.version, catalog.strategy
    )
}

fn scale(daemon: &Daemon, client: &Client, name: &Name, count: u32, dry_run: bool) -> Result<(), Failure> {
    let at = format!("{}{}", path(name), dry(dry_run));
    let mut keeps = None;
    let changed: FleetCatalog = settle(client, name, |found: Option<&FleetCatalog>| {
        let Some(found) = found else { return client.get(&path(name)) };
        keeps = Some(found.spec.keeps_data() && count < found.spec.catalog.count);
        let mut spec = found.spec.clone();
        spec.catalog.count = count;
        client.put_if(&at, found.revision(), &spec)
    })?;
    daemon.show(&changed, |changed| {
        let has = if dry_run { "can have" } else { "has" };
        format!("{} {has} {} machines on all hosts together\n", changed.name, changed.spec.catalog.count)
    })?;
    if keeps == Some(true) && !dry_run {
        output::complain(
            "note",
            &format!(
                "what removed machines of {name} kept stays on their hosts: 'spillway leftover list' there"
            ),
        );
    }
    Ok(())
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
