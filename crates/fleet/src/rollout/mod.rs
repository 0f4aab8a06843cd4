//! Rollouts of a version over the hosts of a catalog, in waves: what the record of one means, and how far each host is.
//!
//! Owns the order of the hosts and the meaning of what they report. [`Tracker`] remembers, and `pace` decides.
//!
//! Invariant: which hosts have the version follows from their shares alone.

mod changes;
mod pace;
mod tracker;

pub(crate) use changes::deleted;
pub use changes::{RolloutTerms, begun, change_rollout};
pub(crate) use pace::{Member, Scene, Steps, decide};
pub(crate) use tracker::observe;
pub use tracker::{Tracker, Trackers};

use crate::records::{CatalogRecord, CatalogStatus, RolloutRecord, ShareRecord, VersionName};
use crate::view::{FleetView, Versioned};
use spillway_api::{FleetRolloutState, Name, RolloutStrategy, Wave};

impl VersionName {
    /// The version that all machines of a catalog are to get.
    pub fn of_catalog(catalog: &CatalogRecord) -> VersionName {
        VersionName { image: catalog.spec.catalog.image.name.clone(), version: catalog.version }
    }

    /// Whether a catalog is to have this version.
    pub fn is_of(&self, catalog: &CatalogRecord) -> bool {
        self.version == catalog.version && self.image == catalog.spec.catalog.image.name
    }

    /// Whether machines of this share are to have the version. A share without an image is of the catalog's.
    pub fn is_in(&self, share: &ShareRecord, catalog: &CatalogRecord) -> bool {
        let image = share.image.as_ref().unwrap_or(&catalog.spec.catalog.image.name);
        self.version == share.version && self.image == *image
    }

    /// Whether new machines of this host get the version.
    pub fn is_taken(&self, status: &CatalogStatus) -> bool {
        self.version == status.version && status.image.as_ref().is_none_or(|image| *image == self.image)
    }
}

impl ShareRecord {
    /// The version of the share.
    pub fn version_name(&self, catalog: &CatalogRecord) -> VersionName {
        let image = self.image.as_ref().unwrap_or(&catalog.spec.catalog.image.name);
        VersionName { image: image.clone(), version: self.version }
    }
}

impl RolloutRecord {
    /// Number of hosts that may have the version, of so many that have machines.
    pub fn most_hosts(&self, waves: &[Wave], hosts: usize) -> usize {
        match waves.get(self.wave as usize) {
            Some(wave) if !self.at_once => wave.hosts(hosts),
            _ => hosts,
        }
    }

    /// Number of waves: after those of the settings come all hosts that are left.
    pub fn waves(&self, waves: &[Wave]) -> u32 {
        let is_whole = waves.last() == Some(&Wave::Percent(100));
        let all = waves.len() + usize::from(!is_whole);
        if self.at_once { 1 } else { u32::try_from(all).unwrap_or(u32::MAX) }
    }

    /// Whether it has not reached all hosts.
    pub fn is_open(&self) -> bool {
        self.state != FleetRolloutState::Done
    }

    /// Whether hosts restart no machine because of it. One that is resumed brings the version again, before it goes on.
    pub fn is_held(&self) -> bool {
        use FleetRolloutState::{Done, Running};
        !matches!(self.state, Running | Done)
    }

    /// Whether hosts bring the version before they get it.
    pub fn brings(&self) -> bool {
        use FleetRolloutState::{Prefetch, Running};
        matches!(self.state, Prefetch | Running) && !self.at_once
    }

    /// Machines that may fail.
    pub fn most_failed(&self) -> u32 {
        self.max_failed.saturating_add(self.tolerated)
    }

    /// Version of machines on a host that had none.
    pub fn fresh(&self) -> &VersionName {
        if self.is_open() && !self.at_once { &self.from } else { &self.to }
    }
}

/// The rollout of a catalog, if there is one of the version that the catalog is to have.
pub fn current<'a>(
    view: &'a FleetView,
    name: &Name,
    catalog: &CatalogRecord,
) -> Option<&'a Versioned<RolloutRecord>> {
    view.rollouts.get(name).filter(|rollout| rollout.value.to.is_of(catalog))
}

/// Whether machines get another version only when somebody else starts them.
pub fn is_lazy(catalog: &CatalogRecord) -> bool {
    catalog.strategy == RolloutStrategy::NextStart || catalog.spec.catalog.keeps_writes()
}

/// Whether a report is of the version of a share. A version that comes back has another generation, so that no earlier report counts.
fn has_carried_out(catalog: &CatalogRecord, share: &ShareRecord, status: &CatalogStatus) -> bool {
    share.version_name(catalog).is_taken(status) && status.generation >= share.generation
}

/// Whether all machines of a host are ready or off with the version of its share, except claimed ones. Failed ones are waited for only on
/// the way back: otherwise it is decided elsewhere how many may fail. If machines take the version at their next start, it is enough that
/// new ones do.
pub fn is_done(
    catalog: &CatalogRecord,
    rollout: &RolloutRecord,
    share: &ShareRecord,
    status: Option<&CatalogStatus>,
) -> bool {
    let Some(status) = status.filter(|status| has_carried_out(catalog, share, status)) else { return false };
    let failed = if rollout.at_once { 0 } else { status.failed };
    let through = status.updated.saturating_add(status.spared).saturating_add(failed);
    is_lazy(catalog) || (status.count >= share.count && through >= status.count)
}

#[cfg(test)]
mod tests;
