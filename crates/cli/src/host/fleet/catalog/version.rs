//! `spillway fleet catalog update` and `rollback`.
//!
//! Invariant: a version is asked for by its number, and of the image that the catalog has.

use super::rollout::page;
use super::{dry, path, versions};
use crate::error::Failure;
use crate::host::Daemon;
use crate::host::words::number;
use clap::Args;
use spillway_api::client::Client;
use spillway_api::{
    FleetCatalog, FleetCatalogRollback, FleetCatalogUpdate, ImageRef, Name, RolloutStrategy, bounds,
};

/// Options of `fleet catalog update`.
#[derive(Debug, Args)]
pub struct Update {
    /// The catalog
    name: Name,
    /// The image with its version, such as debian:3
    #[arg(long, value_name = "IMAGE:VERSION")]
    image: ImageRef,
    /// When machines of a host take the version: next-start (at their next start), now (all are restarted) or batch=K (K at a
    /// time are restarted) [default: as before]
    #[arg(long, value_name = "STRATEGY")]
    rollout: Option<RolloutStrategy>,
    #[arg(
        long, value_name = "N", value_parser = number(&bounds::MACHINES), default_value_t = 0,
        help = bounds::MACHINES.help("Number of machines that may fail; with more, the rollout halts")
    )]
    max_failed: u32,
    #[arg(
        long, value_name = "SECONDS", value_parser = number(&bounds::DEADLINE_SECONDS),
        help = bounds::DEADLINE_SECONDS.help("How long the rollout may make no progress before it halts [default: 600]")
    )]
    deadline: Option<u32>,
    /// Check everything, change nothing
    #[arg(long)]
    dry_run: bool,
}

/// Options of `fleet catalog rollback`.
#[derive(Debug, Args)]
pub struct Rollback {
    /// The catalog
    name: Name,
    /// The version [default: the one before the present one, or before a rollout that has not reached all hosts]
    #[arg(long, value_name = "VERSION", value_parser = number(&bounds::VERSION))]
    to: Option<u32>,
    /// Check everything, change nothing
    #[arg(long)]
    dry_run: bool,
}

impl Update {
    /// Asks for it.
    pub fn run(self, daemon: &Daemon, client: &Client) -> Result<(), Failure> {
        let found: FleetCatalog = client.get(&path(&self.name))?;
        let version = version(&self.image, &found)?;
        let update = FleetCatalogUpdate {
            version,
            strategy: self.rollout,
            max_failed: self.max_failed,
            deadline_seconds: self.deadline,
        };
        let at = format!("{}/update{}", path(&self.name), dry(self.dry_run));
        report(daemon, &client.post(&at, &update)?, self.dry_run)
    }
}

/// Version that is asked for.
fn version(image: &ImageRef, catalog: &FleetCatalog) -> Result<u32, Failure> {
    let (name, has) = (&catalog.name, &catalog.spec.catalog.image.name);
    if image.name != *has {
        return Err(Failure::usage(format!(
            "{name} has the image {has}, and an update changes its version: change the image itself with 'spillway fleet catalog \
             apply'"
        )));
    }
    let version = image.version.ok_or_else(|| {
        Failure::usage(format!(
            "which version of {has}? {name} has {}: give one, such as {has}:{}",
            catalog.version,
            catalog.version.saturating_add(1)
        ))
    })?;
    Ok(version.get())
}

impl Rollback {
    /// Asks for it.
    pub fn run(self, daemon: &Daemon, client: &Client) -> Result<(), Failure> {
        let at = format!("{}/rollback{}", path(&self.name), dry(self.dry_run));
        report(daemon, &client.post(&at, &FleetCatalogRollback { to: self.to })?, self.dry_run)
    }
}

fn report(daemon: &Daemon, catalog: &FleetCatalog, dry_run: bool) -> Result<(), Failure> {
    daemon.show(catalog, |catalog| {
        let would = if dry_run { "nothing is changed; it can be that " } else { "" };
        let keeps = match catalog.spec.catalog.keeps_writes() {
            true => "disks that keep their data stay on their version\n",
            false => "",
        };
        let rollout = catalog.rollout.as_ref().filter(|_| !dry_run).map_or(String::new(), page);
        format!("{}: {would}{}\n{rollout}{keeps}", catalog.name, versions(catalog))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_update_is_to_a_version_of_the_image_that_the_catalog_has() {
        let catalog = serde_json::from_value(json!({
            "name": "desk", "revision": 7, "spec": { "image": "debian" }, "version": 3, "strategy": "now",
            "generation": 1, "history": [], "created": "2026-01-01T00:00:00Z", "shares": [], "unplaced": 0,
        }))
        .unwrap();
        let asked = |image: &str| version(&image.parse().unwrap(), &catalog);
        assert_eq!(asked("debian:4"), Ok(4));
        assert!(asked("debian").unwrap_err().message.contains("desk has 3: give one, such as debian:4"));
        assert!(asked("ubuntu:4").unwrap_err().message.contains("desk has the image debian"));
    }
}
