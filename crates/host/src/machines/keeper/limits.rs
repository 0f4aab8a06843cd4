//! What can change while a machine runs: the limits of its cache and its rate, by the catalog's wish and the host's memory. Owns
//! why they are not those that are wanted.
//!
//! Invariant: who refuses limits is told of once, until they are taken.

use super::Keeper;
use crate::error::HostError;
use crate::machines::run::Run;
use crate::machines::{blocking, disk};
use crate::resources::budget::Need;
use spillway_api::{Catalog, ErrorCode, EventKind};
use spillway_worker::supervisor::{LimitChange, Request};

/// The limits of a machine that runs.
#[derive(Default)]
pub struct Limits {
    refused: Option<Refused>,
}

/// Who refuses limits that are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Refused {
    /// The budget, so much.
    Budget(Need),
    /// The disk: the host has not enough memory at this moment.
    Disk,
    /// The disk, which knows no rates, when it was asked for this.
    Rate(LimitChange),
}

impl Limits {
    /// They stay as they are. Whether that is news.
    fn are_refused(&mut self, by: &Refused) -> bool {
        let is_news = self.refused.as_ref() != Some(by);
        self.refused = Some(by.clone());
        is_news
    }

    /// They are what is wanted.
    fn are_met(&mut self) {
        self.refused = None;
    }
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
        if let Err(refused) = self.shared.admission.promise(&self.name, need) {
            self.is_refused(Refused::Budget(need), &refused);
            return Ok(());
        }
        let Some(wish) = run.wish(&catalog.spec, self.shared.memory.squeeze()) else {
            self.limits.are_met();
            return Ok(());
        };
        // It would tell of it each time that it is asked.
        if self.limits.refused == Some(Refused::Rate(wish.clone())) {
            return Ok(());
        }
        let folder = self.folder.clone();
        let asked = wish.clone();
        let limits = match blocking(move || disk::ask(folder.path(), &Request::Set(asked))).await {
            // It serves on, and is asked again at the next step.
            Err(refused) if refused.code == ErrorCode::Conflict => {
                self.is_refused(Refused::Disk, &refused);
                return Ok(());
            }
            set => set?,
        };
        if wish.rate_is_met(&limits) {
            self.limits.are_met();
            run.has_limits(&wish);
        } else {
            let why = "its disk is served by an earlier version, which knows none: restart the machine";
            run.has_limits(&LimitChange {
                ram_bytes: wish.ram_bytes,
                overflow_bytes: wish.overflow_bytes,
                ..LimitChange::default()
            });
            self.is_refused(Refused::Rate(wish), &HostError::new(ErrorCode::Conflict, why));
        }
        self.folder.save_in_background(run).await
    }

    /// Its limits stay as they are, which is told once.
    fn is_refused(&mut self, by: Refused, why: &HostError) {
        let (kind, what) = match by {
            Refused::Rate(_) => (EventKind::Disk, "its rate has no limit"),
            Refused::Budget(_) | Refused::Disk => (EventKind::Memory, "its limits stay as they are"),
        };
        if self.limits.are_refused(&by) {
            self.raise(kind, &format!("{what}: {why}"));
        }
    }
}
