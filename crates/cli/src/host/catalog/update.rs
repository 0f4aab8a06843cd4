//! `spillway catalog update`, `rollback` and `scale`. Owns how a change is tried again when somebody else was faster.

use super::kind::CatalogObject;
use super::{path, versions, warn};
use crate::error::Failure;
use crate::host::words::number;
use crate::host::{Daemon, leftover};
use clap::Args;
use spillway_api::client::{Client, ClientError};
use spillway_api::{
    Catalog, CatalogRollback, CatalogSpec, CatalogUpdate, ErrorCode, ImageRef, Name, RolloutStrategy, bounds,
};

/// How often a change is decided anew.
const TRIES: u32 = 16;

/// Options of `catalog update`.
#[derive(Debug, Args)]
pub struct Update {
    /// The catalog
    name: Name,
    /// The image: debian follows the published version, debian:2 does not
    #[arg(long, value_name = "IMAGE[:VERSION]")]
    image: ImageRef,
    /// When machines take it
    #[command(flatten)]
    how: RolloutOptions,
}

/// Options of `catalog rollback`.
#[derive(Debug, Args)]
pub struct Rollback {
    /// The catalog
    name: Name,
    /// The version [default: the one before the present one]
    #[arg(long, value_name = "VERSION", value_parser = number(&bounds::VERSION))]
    to: Option<u32>,
    /// When machines take it
    #[command(flatten)]
    how: RolloutOptions,
}

/// When machines take another version.
#[derive(Debug, Args)]
struct RolloutOptions {
    /// When machines take the version: next-start (at their next start), now (all are restarted) or batch=K (K at a time are
    /// restarted)
    #[arg(long, value_name = "STRATEGY", default_value = "next-start")]
    rollout: RolloutStrategy,
    #[arg(
        long, value_name = "SECONDS", value_parser = number(&bounds::CLAIM_GRACE_SECONDS),
        help = bounds::CLAIM_GRACE_SECONDS.help("After how long claimed machines are restarted too [default: when they are released]")
    )]
    claim_grace: Option<u32>,
    #[arg(
        long, value_name = "SECONDS", value_parser = number(&bounds::DEADLINE_SECONDS),
        help = bounds::DEADLINE_SECONDS.help("How long the rollout may make no progress before it counts as stalled [default: 600]")
    )]
    deadline: Option<u32>,
    #[arg(
        long, value_name = "N", value_parser = number(&bounds::MACHINES), default_value_t = 0,
        help = bounds::MACHINES.help("Number of machines that may fail; with more, the rollout waits until they work again")
    )]
    max_failed: u32,
    /// Discard data that machines keep, where the change requires it
    #[arg(long)]
    discard_data: bool,
    /// Check everything, change nothing
    #[arg(long)]
    dry_run: bool,
}

impl Update {
    /// Asks for it: what it is decided on, the daemon looks at itself.
    pub fn run(self, daemon: &Daemon, client: &Client) -> Result<(), Failure> {
        let RolloutOptions { rollout, claim_grace, deadline, max_failed, discard_data, dry_run } = self.how;
        let update = CatalogUpdate {
            image: self.image,
            rollout,
            claim_grace_seconds: claim_grace,
            deadline_seconds: deadline,
            max_failed,
            discard_data,
        };
        let at = format!("{}/update?dry_run={dry_run}", path(&self.name));
        report(daemon, &client.post(&at, &update)?, dry_run)
    }
}

impl Rollback {
    /// Asks for it.
    pub fn run(self, daemon: &Daemon, client: &Client) -> Result<(), Failure> {
        let RolloutOptions { rollout, claim_grace, deadline, max_failed, discard_data, dry_run } = self.how;
        let rollback = CatalogRollback {
            to: self.to,
            rollout,
            claim_grace_seconds: claim_grace,
            deadline_seconds: deadline,
            max_failed,
            discard_data,
        };
        let at = format!("{}/rollback?dry_run={dry_run}", path(&self.name));
        report(daemon, &client.post(&at, &rollback)?, dry_run)
    }
}

/// Changes how many machines there are, on these terms of the interface; or asks whether that can be.
pub fn scale(
    daemon: &Daemon,
    client: &Client,
    name: &Name,
    count: u32,
    (terms, dry_run): (&str, bool),
) -> Result<(), Failure> {
    let path = format!("{}{terms}", path(name));
    let mut shrinks = false;
    let changed = settle(client, name, |found: Option<&Catalog>| {
        let Some(found) = found else { return client.get(&self::path(name)) };
        shrinks = count < found.spec.count;
        client.put_if(&path, found.revision, &CatalogSpec { count, ..found.spec.clone() })
    })?;
    warn(&changed);
    daemon.show(&changed, |changed| {
        let has = if dry_run { "can have" } else { "has" };
        format!("{} {has} {} machines\n", changed.name, changed.spec.count)
    })?;
    match shrinks && !dry_run {
        true => leftover::tell(client, |left| left.catalog == *name),
        false => Ok(()),
    }
}

fn report(daemon: &Daemon, catalog: &Catalog, dry_run: bool) -> Result<(), Failure> {
    warn(catalog);
    daemon.show(catalog, |catalog| {
        let would = if dry_run { "nothing is changed; it can be that " } else { "" };
        format!("{}: {would}{}\n", catalog.name, versions(catalog))
    })
}

/// Decides on a catalog as it is, and again as long as somebody else changes it meanwhile.
pub fn settle<C: CatalogObject, T>(
    client: &Client,
    name: &Name,
    mut decide: impl FnMut(Option<&C>) -> Result<T, ClientError>,
) -> Result<T, ClientError> {
    let mut found = look::<C>(client, name)?;
    for _ in 1..TRIES {
        match decide(found.as_ref()) {
            Err(ClientError::Refused(error))
                if [ErrorCode::Conflict, ErrorCode::PreconditionFailed, ErrorCode::Exists]
                    .contains(&error.code) =>
            {
                let revision = found.map(|catalog| catalog.revision());
                found = look(client, name)?;
                if found.as_ref().map(C::revision) == revision {
                    return Err(ClientError::Refused(error));
                }
            }
            decided => return decided,
        }
    }
    decide(found.as_ref())
}

fn look<C: CatalogObject>(client: &Client, name: &Name) -> Result<Option<C>, ClientError> {
    match client.get(&C::path(name)) {
        Err(ClientError::Refused(error)) if error.code == ErrorCode::NotFound => Ok(None),
        found => found.map(Some),
    }
}
