//! `spillway catalog`.

pub(super) mod apply;
pub(super) mod compare;
pub(super) mod file;
pub mod hardware;
mod help;
pub(super) mod kind;
mod rollout;
pub(super) mod settings;
pub(super) mod update;

use super::words::{number, word};
use super::{Daemon, Labels, Limit, leftover, table};
use crate::error::Failure;
use crate::output;
use apply::{Apply, Diff, Export};
use clap::Subcommand;
use compare::value_text;
use kind::CatalogObject;
use rollout::RolloutCommand;
use settings::Create;
use spillway_api::client::{Client, query};
use spillway_api::{Catalog, Empty, Name, RolloutStrategy, bounds, settings};
use std::process::ExitCode;
use update::{Rollback, Update};

/// What to do with catalogs.
#[derive(Debug, Subcommand)]
pub enum CatalogCommand {
    /// Create a catalog: a number of machines of an image
    #[command(after_help = help::CREATE, mut_args(settings::not_with_file))]
    Create(Box<Create>),
    /// Create and change catalogs to match a file
    #[command(after_help = help::APPLY)]
    Apply(Apply),
    /// Show what apply would change; exit code 1 if it would change anything
    #[command(after_help = help::DIFF)]
    Diff(Diff),
    /// Print catalogs as a file for apply
    #[command(after_help = help::EXPORT)]
    Export(Export),
    /// List catalogs
    #[command(after_help = help::LIST)]
    List {
        /// Labels that a catalog must have.
        #[command(flatten)]
        labels: Labels,
        /// The bound of the list.
        #[command(flatten)]
        limit: Limit,
    },
    /// Show a catalog and all its settings
    #[command(after_help = help::SHOW)]
    Show {
        /// The catalog
        name: Name,
    },
    /// Change the number of machines; those with the highest numbers are removed
    #[command(after_help = help::SCALE)]
    Scale {
        /// The catalog
        name: Name,
        /// New number of machines
        #[arg(value_parser = number(&bounds::MACHINES))]
        count: u32,
        /// Delete the kept files of removed machines too; else they stay in their store
        #[arg(long)]
        with_data: bool,
        /// Also if machines are claimed
        #[arg(long)]
        force: bool,
        /// Check everything, change nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Change the version of the machines' image, or the image
    #[command(after_help = help::UPDATE)]
    Update(Update),
    /// Return to an earlier version of the catalog, and stay at it
    #[command(after_help = help::ROLLBACK)]
    Rollback(Rollback),
    /// Pause, resume or abort a rollout
    #[command(subcommand, after_help = help::ROLLOUT)]
    Rollout(RolloutCommand),
    /// Delete a catalog and its machines
    #[command(after_help = help::DELETE)]
    Delete {
        /// The catalog
        name: Name,
        /// Delete the kept files of the machines too; else they stay in their store
        #[arg(long)]
        with_data: bool,
        /// Also if machines are claimed
        #[arg(long)]
        force: bool,
    },
}

/// Does it.
pub fn catalog(daemon: &Daemon, command: CatalogCommand) -> Result<ExitCode, Failure> {
    let client = daemon.client()?;
    match command {
        CatalogCommand::Create(create) => create.run(daemon, &client)?,
        CatalogCommand::Apply(apply) => apply.run(daemon, &client)?,
        CatalogCommand::Diff(diff) => return diff.run(daemon, &client),
        CatalogCommand::Export(export) => export.run::<Catalog>(daemon, &client)?,
        CatalogCommand::List { labels, limit } => list(daemon, &client, &labels, limit)?,
        CatalogCommand::Show { name } => show(daemon, &client.get(&path(&name))?)?,
        CatalogCommand::Scale { name, count, with_data, force, dry_run } => {
            let terms = [("with_data", with_data), ("force", force), ("dry_run", dry_run)];
            let terms = query(terms.map(|(term, is)| (term, is.to_string())));
            update::scale(daemon, &client, &name, count, (&terms, dry_run))?;
        }
        CatalogCommand::Update(update) => update.run(daemon, &client)?,
        CatalogCommand::Rollback(rollback) => rollback.run(daemon, &client)?,
        CatalogCommand::Rollout(command) => rollout::rollout(daemon, &client, command)?,
        CatalogCommand::Delete { name, with_data, force } => {
            let deleted: Empty =
                client.delete(&format!("{}?with_data={with_data}&force={force}", path(&name)))?;
            daemon.show(&deleted, |_| format!("{name} is deleted\n"))?;
            leftover::tell(&client, |left| left.catalog == name)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Path of a catalog.
fn path(name: &Name) -> String {
    <Catalog as CatalogObject>::path(name)
}

fn warn(catalog: &Catalog) {
    catalog.warnings.iter().for_each(|warning| output::complain("warning", warning));
}

fn list(daemon: &Daemon, client: &Client, labels: &Labels, limit: Limit) -> Result<(), Failure> {
    let catalogs = client.pages(&format!("/v1/catalogs{}", labels.query([])), limit.limit);
    daemon.show_pages(
        catalogs,
        ["NAME", "IMAGE", "MACHINES", "TYPE", "MODE", "ROLLOUT"],
        |catalog: &Catalog| {
            let spec = &catalog.spec;
            let image = format!("{}:{}", spec.image.name, catalog.version);
            let rollout = catalog.rollout.as_ref().map_or("-".into(), rollout::short);
            let mode = spec.mode().name().to_owned();
            vec![[catalog.name.to_string(), image, spec.count.to_string(), word(&spec.kind), mode, rollout]]
        },
    )
}

/// Formats everything about a catalog. The settings are the ones of a file.
fn show(daemon: &Daemon, catalog: &Catalog) -> Result<(), Failure> {
    daemon.show(catalog, |catalog| {
        let settings = settings(&catalog.spec.with_defaults(&catalog.name));
        let rows = settings.iter().filter(|(_, value)| !value.is_null());
        let mut text = format!("{}, {}\n\n", catalog.name, versions(catalog));
        if let Some(rollout) = &catalog.rollout {
            text += &format!("{}\n", rollout::page(&catalog.name, rollout));
        }
        text +=
            &table(["SETTING", "VALUE"], rows.map(|(name, value)| [name.clone(), value_text(name, value)]));
        text.push('\n');
        let history = catalog.history.iter().map(|entry| {
            [format!("{}:{}", entry.image, entry.version), entry.since.strftime("%Y-%m-%d %H:%M").to_string()]
        });
        text + &table(["HISTORY", "SINCE"], history)
    })
}

/// Describes which version machines take, and when.
fn versions(catalog: &Catalog) -> String {
    let image = format!("{}:{}", catalog.spec.image.name, catalog.version);
    match &catalog.rollout {
        Some(rollout) => {
            let how = match rollout.strategy {
                RolloutStrategy::NextStart => "at their next start".into(),
                RolloutStrategy::Now => "now".into(),
                RolloutStrategy::Batch(machines) => format!("{machines} at a time"),
            };
            let grace = match rollout.claim_grace_seconds {
                Some(seconds) => format!("claimed ones after {seconds} s"),
                None => "claimed ones when they are released".into(),
            };
            format!("machines take {image} {how}, {grace}")
        }
        None => format!("machines take {image} at their next start"),
    }
}
