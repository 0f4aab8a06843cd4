//! What can change while a machine runs: the limits of its cache and its rate, by the catalog's settings and the host's memory. Owns
//! why they are not those that are wanted.
//!
//! Invariant: who refuses limits is told of once, until they are taken.

use super::Keeper;
use crate::error::HostError;
use crate::machines::run::Run;
use crate::machines::{blocking, disk};
use crate::resources::budget::Need;
use spillway_api::{Catalog, CatalogSpec, ErrorCode, EventKind};
use spillway_control::{DiskSettings, Request, rate_is_met};

/// The limits of a machine that runs.
#[derive(Default)]
pub struct Limits {
    /// What the host has not enough of.
    lacking: Option<Need>,
    refused: Option<Refused>,
}

/// Why a disk does not have limits that it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Refused {
    /// The host has not enough memory at this moment.
    Memory,
    /// It knows no rates; what it was asked.
    Rate(DiskSettings),
}

impl Limits {
    /// Whether the host has enough of what is wanted. `true`: it has not, which is news.
    fn budget_lacks(&mut self, need: Option<Need>) -> bool {
        let is_news = need.is_some() && self.lacking != need;
        self.lacking = need;
        is_news
    }

    /// Whether the disk has what it was asked for. `true`: it has not, which is news.
    fn disk_refuses(&mut self, why: Option<Refused>) -> bool {
        let is_news = why.is_some() && self.refused != why;
        self.refused = why;
        is_news
    }
}

/// Settings with the cache that a machine is promised instead of the one that it would have: it shrinks with the others when
/// memory is short. `None`: it is promised none.
fn within(spec: &CatalogSpec, promised: Need) -> Option<CatalogSpec> {
    let ram_bytes = spec.ram_bytes().map(|_| promised.limit_bytes);
    let ram_guarantee_bytes = promised.guarantee_bytes;
    let disk = DiskSettings { ram_bytes, ..spec.disk };
    (ram_bytes != Some(0)).then(|| CatalogSpec { disk, ram_guarantee_bytes, ..spec.clone() })
}

impl Keeper {
    /// Brings the limits to what is wanted.
    pub(super) async fn adjust(&mut self, catalog: &Catalog, run: &mut Run) -> Result<(), HostError> {
        if run.spec.grace_seconds != catalog.spec.grace_seconds {
            // Should its machine be deleted, and its catalog with it.
            run.spec.grace_seconds = catalog.spec.grace_seconds;
            self.folder.save_in_background(run).await?;
        }
        let need = run.need_under(&catalog.spec);
        let spec = match self.shared.admission.promise(&self.name, need) {
            Ok(()) => {
                self.limits.budget_lacks(None);
                Some(catalog.spec.clone())
            }
            Err(lacking) => {
                if self.limits.budget_lacks(Some(need)) {
                    self.raise(EventKind::Memory, &format!("its limits stay as they are: {lacking}"));
                }
                within(&catalog.spec, self.shared.admission.promised(&self.name))
            }
        };
        let squeeze = self.shared.memory.squeeze();
        let Some(change) = spec.and_then(|spec| run.change_to(&spec, squeeze)) else {
            self.limits.disk_refuses(None);
            return Ok(());
        };
        // It would tell of it each time that it is asked.
        if self.limits.refused == Some(Refused::Rate(change.clone())) {
            return Ok(());
        }
        let folder = self.folder.clone();
        let asked = change.clone();
        let limits = match blocking(move || disk::ask(folder.path(), &Request::Set(asked))).await {
            // It serves on, and is asked again at the next step.
            Err(refused) if refused.code == ErrorCode::Conflict => {
                if self.limits.disk_refuses(Some(Refused::Memory)) {
                    self.raise(EventKind::Memory, &format!("its limits stay as they are: {refused}"));
                }
                return Ok(());
            }
            set => set?,
        };
        if rate_is_met(&change, &limits) {
            self.limits.disk_refuses(None);
            run.has_limits(&change);
        } else {
            run.has_limits(&DiskSettings {
                ram_bytes: change.ram_bytes,
                overflow_bytes: change.overflow_bytes,
                ..DiskSettings::default()
            });
            if self.limits.disk_refuses(Some(Refused::Rate(change))) {
                let why = "its disk is served by an earlier version, which knows none: restart the machine";
                self.raise(EventKind::Disk, &format!("its rate has no limit: {why}"));
            }
        }
        self.folder.save_in_background(run).await
    }
}
