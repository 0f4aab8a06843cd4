//! The report of a host: what it has of the fleet's catalogs and images. Owns what is left out of one that is too long.
//!
//! Invariant: a report that leaves something out says so.

use super::shares::{Refusal, ShareReconciler, UnfinishedShares};
use crate::error::HostError;
use crate::events::Events;
use spillway_api::{EventKind, Name, Need};
use spillway_fleet::records::{BudgetRecord, CatalogStatus, MOST_STATUS_BYTES, StatusRecord};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Steps in which the part of an image is reported, in thousandths.
const PART_STEP: u32 = 50;
/// Bytes that a reason has at least when others are shortened.
const LEAST_REASON_BYTES: usize = 16;

/// Whether the last report left something out. A clone is the same.
#[derive(Clone, Default)]
pub struct ReportCut(Arc<AtomicBool>);

impl ReportCut {
    /// Raises an event when reports begin to leave something out.
    fn note(&self, status: &StatusRecord, events: &Events) {
        if !self.0.swap(status.is_cut, Ordering::Relaxed) && status.is_cut {
            let text = format!(
                "the report of this host to the fleet has more than {MOST_STATUS_BYTES} bytes: it leaves out images, and then the last \
                 catalogs, which the fleet takes for empty here. Give the host fewer catalogs"
            );
            events.raise(EventKind::Failed, "host", text);
        }
    }
}

impl ShareReconciler {
    /// Returns the report of the host.
    ///
    /// # Errors
    /// The records of the host cannot be read.
    pub fn status(&self, left: &UnfinishedShares) -> Result<StatusRecord, HostError> {
        let mut status = StatusRecord::default();
        let mut own = Need::default();
        for catalog in self.catalogs.list()? {
            if !self.is_of_fleet(&catalog) {
                let need = Need::of(&catalog.spec, self.hypervisor);
                own = own.and(need.times(catalog.spec.count));
                continue;
            }
            let counts = self.machines.counts(&catalog)?;
            let owner = catalog.fleet.as_ref();
            let of = CatalogStatus {
                generation: owner.map_or(0, |owner| owner.generation),
                version: catalog.version,
                count: counts.count,
                ready: counts.ready,
                off: counts.off,
                updated: counts.updated,
                claimed: counts.claimed,
                spared: counts.spared,
                failed: counts.failed,
                image: Some(catalog.spec.image.name.clone()),
                refused: None,
                refused_generation: 0,
                refused_version: None,
                waiting: None,
                next: None,
            };
            status.catalogs.insert(catalog.name, of);
        }
        for (name, Refusal { why, of: share }) in &left.refused {
            let of = status.catalogs.entry(name.clone()).or_default();
            of.refused = Some(why.clone());
            if let Some((generation, version)) = share {
                (of.refused_generation, of.refused_version) = (*generation, Some(version.clone()));
            }
        }
        for (name, why) in &left.waiting {
            status.catalogs.entry(name.clone()).or_default().waiting = Some(why.clone());
        }
        for (name, next) in &left.versions {
            status.catalogs.entry(name.clone()).or_default().next = Some(next.clone());
        }
        let most = self.capacity.most();
        status.budget = BudgetRecord {
            guarantee_bytes: most.guarantee_bytes.saturating_sub(own.guarantee_bytes),
            limit_bytes: most.limit_bytes.saturating_sub(own.limit_bytes),
            memory_bytes: most.memory_bytes.saturating_sub(own.memory_bytes()),
            vcpus: most.vcpus.saturating_sub(own.vcpus),
        };
        Ok(fitting(status))
    }
}

impl ShareReconciler {
    /// Adds to a report how much the host has of these versions of images.
    ///
    /// # Errors
    /// The records of the host cannot be read.
    pub fn with_images(
        &self,
        mut status: StatusRecord,
        images: &BTreeSet<(Name, u32)>,
    ) -> Result<StatusRecord, HostError> {
        for (name, version) in images {
            let Some((part, is_whole)) = self.images.part(name, *version)? else { continue };
            let reference = format!("{name}:{version}");
            // While it comes, not each chunk is news.
            let part = if part < 1000 { part - part % PART_STEP } else { part };
            status.images.insert(reference.clone(), part);
            if is_whole {
                status.whole.insert(reference);
            }
        }
        let status = fitting(status);
        self.cut.note(&status, &self.events);
        Ok(status)
    }
}

/// Shortens the report until it may be written: reasons go first, then images, then counts of catalogs, the last ones first.
fn fitting(mut status: StatusRecord) -> StatusRecord {
    let bytes = |status: &StatusRecord| serde_json::to_vec(status).map_or(usize::MAX, |bytes| bytes.len());
    while bytes(&status) > MOST_STATUS_BYTES {
        let reasons = status.catalogs.values_mut().flat_map(|of| {
            let next = of.next.as_mut().map(|next| [next.failed.as_mut(), next.waits.as_mut()]);
            [of.refused.as_mut(), of.waiting.as_mut()].into_iter().chain(next.into_iter().flatten())
        });
        let longest = reasons.flatten().max_by_key(|why| why.len());
        if let Some(why) = longest.filter(|why| why.len() > LEAST_REASON_BYTES) {
            let half = (0..=why.len() / 2).rev().find(|at| why.is_char_boundary(*at));
            why.truncate(half.unwrap_or(0));
            continue;
        }
        status.is_cut = true;
        match status.images.pop_last() {
            Some((image, _)) => drop(status.whole.remove(&image)),
            None if status.catalogs.pop_last().is_some() => {}
            // Nothing is left that could be left out.
            None => break,
        }
    }
    status
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
