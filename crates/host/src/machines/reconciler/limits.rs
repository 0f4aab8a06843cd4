//! Limits that change while a machine runs: of its cache and its rate, by the catalog's settings and the host's memory.
//! Owns the reason why they differ from the desired ones.
//!
//! Invariant: a refusal of limits raises one event, until they are accepted.

use super::MachineReconciler;
use crate::error::HostError;
use crate::machines::run::RunRecord;
use crate::machines::{blocking, disk};
use crate::resources::budget::Need;
use spillway_api::{Catalog, CatalogSpec, ErrorCode, EventKind};
use spillway_control::{DiskSettings, Request, rate_is_met};

/// Refusals of the limits of a running machine.
#[derive(Default)]
pub struct DiskLimits {
    /// What the host's budget lacks.
    lacking: Option<Need>,
    refused: Option<LimitRefusal>,
}

/// Why a disk has refused its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
enum LimitRefusal {
    /// The host has not enough memory now.
    Memory,
    /// The disk's server does not support rates; the change that it was asked for.
    Rate(DiskSettings),
}

impl DiskLimits {
    /// Sets what the budget lacks. Returns whether that is new.
    fn set_lacking(&mut self, need: Option<Need>) -> bool {
        let is_news = need.is_some() && self.lacking != need;
        self.lacking = need;
        is_news
    }

    /// Sets why the disk refuses. Returns whether that is new.
    fn set_refusal(&mut self, why: Option<LimitRefusal>) -> bool {
        let is_news = why.is_some() && self.refused != why;
        self.refused = why;
        is_news
    }
}

/// Replaces the cache in the settings by the one that the machine is promised; `None`: it is promised none. It shrinks
/// with the others when memory is short.
fn within(spec: &CatalogSpec, promised: Need) -> Option<CatalogSpec> {
    let ram_bytes = spec.ram_bytes().map(|_| promised.limit_bytes);
    let ram_guarantee_bytes = promised.guarantee_bytes;
    let disk = DiskSettings { ram_bytes, ..spec.disk };
    (ram_bytes != Some(0)).then(|| CatalogSpec { disk, ram_guarantee_bytes, ..spec.clone() })
}

impl MachineReconciler {
    /// Applies the desired limits.
    pub(super) async fn adjust(&mut self, catalog: &Catalog, run: &mut RunRecord) -> Result<(), HostError> {
        if run.spec.grace_seconds != catalog.spec.grace_seconds {
            // The grace is needed even if the machine and its catalog are deleted.
            run.spec.grace_seconds = catalog.spec.grace_seconds;
            self.folder.save_in_background(run).await?;
        }
        let need = run.need_under(&catalog.spec);
        let spec = match self.shared.admission.promise(&self.name, need) {
            Ok(()) => {
                self.limits.set_lacking(None);
                Some(catalog.spec.clone())
            }
            Err(lacking) => {
                if self.limits.set_lacking(Some(need)) {
                    self.raise(EventKind::Memory, &format!("its limits stay as they are: {lacking}"));
                }
                within(&catalog.spec, self.shared.admission.promised(&self.name))
            }
        };
        let squeeze = self.shared.memory.squeeze();
        let Some(change) = spec.and_then(|spec| run.limit_change(&spec, squeeze)) else {
            self.limits.set_refusal(None);
            return Ok(());
        };
        // The disk would log the same refusal again.
        if self.limits.refused == Some(LimitRefusal::Rate(change)) {
            return Ok(());
        }
        let folder = self.folder.clone();
        let asked = change;
        let limits = match blocking(move || disk::ask(folder.path(), &Request::Set(asked))).await {
            // The disk continues with its old limits, and is asked again at the next step.
            Err(refused) if refused.code == ErrorCode::Conflict => {
                if self.limits.set_refusal(Some(LimitRefusal::Memory)) {
                    self.raise(EventKind::Memory, &format!("its limits stay as they are: {refused}"));
                }
                return Ok(());
            }
            set => set?,
        };
        if rate_is_met(&change, &limits) {
            self.limits.set_refusal(None);
            run.set_limits(&change);
        } else {
            run.set_limits(&DiskSettings {
                ram_bytes: change.ram_bytes,
                overflow_bytes: change.overflow_bytes,
                ..DiskSettings::default()
            });
            if self.limits.set_refusal(Some(LimitRefusal::Rate(change))) {
                let why = "its disk is served by an earlier version, which knows none: restart the machine";
                self.raise(EventKind::Disk, &format!("its rate has no limit: {why}"));
            }
        }
        self.folder.save_in_background(run).await
    }
}
