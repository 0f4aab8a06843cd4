//! `spillway catalog apply`, `diff` and `export`, and those of fleets. Owns the outcome of each catalog in a file, and how it is reported.
//!
//! Invariant: a file that is refused changes nothing; otherwise each catalog is changed completely or not at all, based
//! on the revision that was read.

use super::compare;
use super::file::{self, Format, NewObject};
use super::kind::{CatalogObject, FileSettings};
use super::update::settle;
use crate::error::{Exit, Failure};
use crate::host::{Daemon, table};
use crate::output;
use clap::Args;
use serde::Serialize;
use spillway_api::client::{Client, ClientError, query};
use spillway_api::{Catalog, Difference, Name, Problem};
use std::path::PathBuf;
use std::process::ExitCode;

/// Options of `catalog apply`.
#[derive(Debug, Args)]
pub struct Apply {
    #[command(flatten)]
    wanted: CatalogFile,
    /// Discard data that machines keep, where the change requires it
    #[arg(long)]
    discard_data: bool,
    /// Check everything, change nothing
    #[arg(long)]
    dry_run: bool,
}

/// Options of `catalog diff`.
#[derive(Debug, Args)]
pub struct Diff {
    #[command(flatten)]
    wanted: CatalogFile,
    /// Discard data that machines keep, where the change requires it
    #[arg(long)]
    discard_data: bool,
}

/// The file of `apply` and `diff`.
#[derive(Debug, Args)]
pub struct CatalogFile {
    /// File of the catalogs, TOML or JSON by its extension or its beginning; - for standard input
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
}

/// Conditions of a change.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terms {
    /// Data that machines keep may be lost.
    pub discard_data: bool,
    /// Nothing is changed.
    pub dry_run: bool,
}

/// Options of `catalog export`.
#[derive(Debug, Args)]
pub struct Export {
    /// The catalogs [default: all]
    names: Vec<Name>,
    /// Format of the file [default: toml, with --json json]
    #[arg(long, value_enum)]
    format: Option<Format>,
}

/// Outcome of applying a catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Created,
    Changed,
    Unchanged,
    Failed,
}

/// Report of what was done, or would be done, to a catalog.
#[derive(Debug, Serialize)]
struct Report {
    name: Name,
    outcome: Outcome,
    differences: Vec<Difference>,
    warnings: Vec<String>,
    error: Option<Problem>,
}

#[derive(Debug, Serialize)]
struct Reports {
    dry_run: bool,
    items: Vec<Report>,
}

impl Apply {
    /// Applies the file and reports each catalog.
    pub fn run(self, daemon: &Daemon, client: &Client) -> Result<(), Failure> {
        let Apply { wanted, discard_data, dry_run } = self;
        wanted.bring::<Catalog>(daemon, client, Terms { discard_data, dry_run }).map(drop)
    }
}

impl Diff {
    /// Reports what applying the file would do.
    pub fn run(self, daemon: &Daemon, client: &Client) -> Result<ExitCode, Failure> {
        let Diff { wanted, discard_data } = self;
        wanted.differ::<Catalog>(daemon, client, Terms { discard_data, dry_run: true })
    }
}

impl Export {
    /// Prints the file.
    pub fn run<C: CatalogObject>(self, daemon: &Daemon, client: &Client) -> Result<(), Failure> {
        let default = if daemon.json { Format::Json } else { Format::Toml };
        let catalogs = if self.names.is_empty() {
            client.list::<C>(C::LIST)?.items
        } else {
            let each = self.names.iter().map(|name| client.get(&C::path(name)));
            each.collect::<Result<Vec<C>, _>>()?
        };
        for catalog in catalogs.iter().filter(|catalog| !catalog.spec().redacted().is_empty()) {
            let (name, redacted) = (catalog.name(), catalog.spec().redacted().join(", "));
            let text = format!(
                "{name}: {redacted} is left out, which your token may not see: apply refuses this file"
            );
            output::complain("warning", &text);
        }
        let catalogs = catalogs.iter().map(|catalog| (catalog.name(), catalog.spec()));
        output::print(&file::write(catalogs, self.format.unwrap_or(default))).map(drop)
    }
}

impl CatalogFile {
    /// Applies each catalog of the file. Returns whether none needed a change.
    pub fn bring<C: CatalogObject>(
        &self,
        daemon: &Daemon,
        client: &Client,
        terms: Terms,
    ) -> Result<bool, Failure> {
        let wanted = file::read::<C::Spec>(&self.file)?;
        let mut items = Vec::new();
        for new in &wanted {
            items.push(bring_one::<C>(client, new, terms)?);
        }
        let reports = Reports { dry_run: terms.dry_run, items };
        daemon.show(&reports, words)?;
        let items = &reports.items;
        for report in items {
            report
                .warnings
                .iter()
                .for_each(|text| output::complain("warning", &format!("{}: {text}", report.name)));
        }
        let mut failed = items.iter().filter_map(|report| report.error.as_ref());
        match failed.next() {
            Some(first) => {
                let message = match failed.count() {
                    0 => first.detail.clone(),
                    more => format!("{}; and {more} more of {} catalogs failed", first.detail, items.len()),
                };
                Err(Failure::new(first.code.exit(), message))
            }
            None => Ok(items.iter().all(|report| report.outcome == Outcome::Unchanged)),
        }
    }

    /// Reports what applying the file would do. The exit code says whether it would change anything.
    pub fn differ<C: CatalogObject>(
        &self,
        daemon: &Daemon,
        client: &Client,
        terms: Terms,
    ) -> Result<ExitCode, Failure> {
        let same = self.bring::<C>(daemon, client, Terms { dry_run: true, ..terms })?;
        Ok(if same { ExitCode::SUCCESS } else { ExitCode::from(Exit::Found as u8) })
    }
}

/// Applies one catalog. A refusal by the daemon becomes a part of the report; a failure to reach it is an error.
fn bring_one<C: CatalogObject>(
    client: &Client,
    new: &NewObject<C::Spec>,
    terms: Terms,
) -> Result<Report, Failure> {
    let flags = [("discard_data", terms.discard_data), ("dry_run", terms.dry_run)];
    let flags = flags.into_iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| (flag, "true".to_owned()));
    let mut seen = (Outcome::Failed, Vec::new());
    let brought = settle(client, &new.name, |found: Option<&C>| {
        let Some(found) = found else {
            seen = (Outcome::Created, Vec::new());
            let question = query(flags.clone().filter(|(flag, _)| *flag == "dry_run"));
            return client.post::<_, C>(&format!("{}{question}", C::LIST), new).map(Some);
        };
        let differing = C::Spec::differences(&new.name, found.spec(), &new.spec);
        if differing.is_empty() {
            seen = (Outcome::Unchanged, differing);
            return Ok(None);
        }
        seen = (Outcome::Changed, differing);
        let at = format!("{}{}", C::path(&new.name), query(flags.clone()));
        client.put_if::<_, C>(&at, found.revision(), &new.spec).map(Some)
    });
    let (outcome, differences) = seen;
    let report = Report { name: new.name.clone(), outcome, differences, warnings: Vec::new(), error: None };
    match brought {
        Ok(catalog) => {
            let warnings = catalog.map(|catalog| catalog.warnings().to_vec()).unwrap_or_default();
            Ok(Report { warnings, ..report })
        }
        Err(ClientError::Refused(error)) => {
            Ok(Report { outcome: Outcome::Failed, error: Some(error), ..report })
        }
        Err(other) => Err(other.into()),
    }
}

fn words(reports: &Reports) -> String {
    let text = reports.items.iter().map(|report| {
        let what = match (report.outcome, reports.dry_run) {
            (Outcome::Created, false) => "is made".to_owned(),
            (Outcome::Created, true) => "is new".to_owned(),
            (Outcome::Changed, false) => "is changed".to_owned(),
            (Outcome::Changed, true) => "differs".to_owned(),
            (Outcome::Unchanged, _) => "is unchanged".to_owned(),
            (Outcome::Failed, _) => {
                let why = report.error.as_ref().map_or("", |error| error.detail.as_str());
                format!("stays as it is: {why}")
            }
        };
        let rows = table(["", "", ""], report.differences.iter().map(compare::row));
        let rows: String = rows.lines().skip(1).map(|line| format!("  {line}\n")).collect();
        format!("{} {what}\n{rows}", report.name)
    });
    text.collect()
}
