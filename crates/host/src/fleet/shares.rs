//! Carries out the shares of this host: catalogs of the fleet become catalogs of the host, with its counts and versions.
//!
//! Owns the order of the steps. Invariant: what is not the fleet's on this host is not touched, and what the records do not say stays as it
//! is. Each step may be repeated.

use super::boot_set_waits::BootSetWaits;
use super::pulls::FleetPulls;
use super::report::ReportCut;
use crate::catalogs::{CatalogChangeTerms, Catalogs, ChangedBy, PlacedLeft, place_machines};
use crate::error::HostError;
use crate::events::Events;
use crate::idempotency::IdempotentRequest;
use crate::images::Images;
use crate::machines::MachineShares;
use crate::registries::Registries;
use crate::resources::budget::Capacity;
use spillway_api::{
    Catalog, CatalogSpec, CatalogUpdate, ErrorCode, FleetOwner, Hypervisor, ImagePull, ImageRef,
    IsolationAction, Name, Residency, Rollout, RolloutAction, RolloutStrategy, VersionState, differences,
};
use spillway_fleet::agent::{ImageSource, WantedCatalog, WantedShares, WantedVersion};
use spillway_fleet::named::PlacedMachine;
use spillway_fleet::records::{NextVersion, VersionName};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Instant;

/// Longest reason in the report of a host, in characters.
pub(super) const MOST_REASON_CHARACTERS: usize = 200;

/// Carries out the shares of a host.
#[derive(Clone)]
pub struct ShareReconciler {
    /// Name of the fleet.
    pub fleet: Name,
    /// Catalogs of the host.
    pub catalogs: Catalogs,
    /// Machines of the host.
    pub machines: MachineShares,
    /// Images of the host.
    pub images: Images,
    /// Registries of the host.
    pub registries: Registries,
    /// Pulls of images that were begun.
    pub pulls: FleetPulls,
    /// Versions that are waited for because of their boot sets.
    pub boot_sets: BootSetWaits,
    /// Budget of the host.
    pub capacity: Capacity,
    /// What runs machines on the host.
    pub hypervisor: Hypervisor,
    /// Events of the host.
    pub events: Events,
    /// Whether its reports leave something out.
    pub cut: ReportCut,
}

/// What a host does not do although it is to do it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why, for people.
    pub why: String,
    /// Generation and version of the share, if it can be read.
    pub of: Option<(u64, VersionName)>,
}

/// Shares that are not carried out, by catalog.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnfinishedShares {
    /// What the host refuses.
    pub refused: BTreeMap<Name, Refusal>,
    /// What the host waits for.
    pub waiting: BTreeMap<Name, String>,
    /// Versions that the host is to have before they are rolled out.
    pub versions: BTreeMap<Name, NextVersion>,
}

impl UnfinishedShares {
    /// Whether nothing is left to do.
    pub fn is_empty(&self) -> bool {
        self.refused.is_empty() && self.waiting.is_empty() && self.versions.values().all(|next| next.is_here)
    }

    /// `last`: why the last pull of the version has failed, if it has. It is said while the next one is under way, so that the report stays the
    /// same from one pull to the next: another one is a write to etcd.
    fn note_version(
        &mut self,
        catalog: &Name,
        of: &VersionName,
        done: Result<(), HostError>,
        last: Option<String>,
    ) {
        let short = |why: &str| why.chars().take(MOST_REASON_CHARACTERS).collect();
        let (failed, waits) = match &done {
            Ok(()) => (None, None),
            Err(e) if e.code == ErrorCode::Conflict => (None, last.as_deref().map(short)),
            Err(e) if e.code == ErrorCode::Unavailable => (None, Some(short(&e.message))),
            Err(e) => (Some(short(&e.message)), None),
        };
        let next = NextVersion { of: of.clone(), is_here: done.is_ok(), failed, waits };
        self.versions.insert(catalog.clone(), next);
    }

    /// `wanted`: what the share says, if there is one.
    fn note(&mut self, catalog: &Name, done: Result<(), HostError>, wanted: Option<&WantedCatalog>) {
        let Err(e) = done else { return };
        let why: String = e.message.chars().take(MOST_REASON_CHARACTERS).collect();
        // What another step does at this time, or a registry that is away.
        if matches!(e.code, ErrorCode::Conflict | ErrorCode::Unavailable) {
            self.waiting.insert(catalog.clone(), why);
        } else {
            let of = wanted.map(|wanted| (wanted.generation, version_of(wanted)));
            self.refused.insert(catalog.clone(), Refusal { why, of });
        }
    }
}

/// Whether the machines of a catalog have names of the fleet.
fn is_named(catalog: &Catalog) -> bool {
    catalog.fleet.as_ref().is_some_and(|owner| owner.named.is_some())
}

/// The version that machines of a share are to have.
fn version_of(wanted: &WantedCatalog) -> VersionName {
    let image = &wanted.spec.image;
    VersionName { image: image.name.clone(), version: image.version.map_or(0, NonZeroU32::get) }
}

/// So many machines are to be given up, and cannot be yet.
fn still_claimed(machines: u32) -> HostError {
    let message = match machines {
        1 => "1 machine is to leave this host and cannot yet: it is claimed, or its disk is being copied"
            .into(),
        _ => format!(
            "{machines} machines are to leave this host and cannot yet: they are claimed, or their disks are being copied"
        ),
    };
    HostError::new(ErrorCode::Conflict, message)
}

impl ShareReconciler {
    /// Brings the catalogs of the fleet on this host to what is wanted. Returns the shares that could not carried out.
    ///
    /// # Errors
    /// The records of the host cannot be read.
    pub fn reconcile(&self, wanted: &WantedShares) -> Result<UnfinishedShares, HostError> {
        let unknown = wanted.unknown.iter().map(|(name, why)| {
            let why = why.clone();
            (name.clone(), Refusal { why, of: None })
        });
        let mut left = UnfinishedShares { refused: unknown.collect(), ..UnfinishedShares::default() };
        let there: BTreeMap<Name, Catalog> =
            self.catalogs.list()?.into_iter().map(|catalog| (catalog.name.clone(), catalog)).collect();
        let leaving = |name: &Name| wanted.leaving.get(name).map_or(&[][..], |machines| machines);
        for (name, wanted) in &wanted.catalogs {
            let done = match there.get(name) {
                None if wanted.spec.count == 0 => Ok(()),
                None => self.create(name, wanted),
                Some(catalog) if !self.is_of_fleet(catalog) => {
                    let message = format!("the host has a catalog '{name}' of its own");
                    Err(HostError::new(ErrorCode::Exists, message))
                }
                Some(catalog) if is_named(catalog) != wanted.machines.is_some() => {
                    self.replace(catalog, wanted, leaving(name))
                }
                Some(catalog) if wanted.machines.is_some() => self.change_named(catalog, wanted),
                Some(catalog) if wanted.spec.count == 0 => self.give_up_all(catalog, &[]),
                Some(catalog) => self.change(catalog, wanted).and_then(|()| self.check_count(name, wanted)),
            };
            left.note(name, done, Some(wanted));
        }
        let is_left = |catalog: &&Catalog| {
            let is_known = wanted.catalogs.contains_key(&catalog.name);
            self.is_of_fleet(catalog) && !is_known && !wanted.unknown.contains_key(&catalog.name)
        };
        for catalog in there.values().filter(is_left) {
            left.note(&catalog.name, self.give_up_all(catalog, leaving(&catalog.name)), None);
        }
        self.boot_sets.retain(wanted);
        for (name, WantedVersion { of, source, residency }) in &wanted.versions {
            let brought = self.bring(of, source.as_ref(), *residency);
            let brought = brought.and_then(|()| {
                let lacks = self.images.lacks_boot_set(&of.image, of.version)?;
                match self.boot_sets.waits(of, lacks, Instant::now()) {
                    true => Err(HostError::new(
                        ErrorCode::Conflict,
                        format!("the boot set of {of} is being brought"),
                    )),
                    false => Ok(()),
                }
            });
            let last = self.pulls.last_failure(&of.image, of.version);
            left.note_version(name, of, brought, last);
        }
        Ok(left)
    }

    pub(super) fn is_of_fleet(&self, catalog: &Catalog) -> bool {
        catalog.fleet.as_ref().is_some_and(|owner| owner.fleet == self.fleet)
    }

    fn create(&self, name: &Name, wanted: &WantedCatalog) -> Result<(), HostError> {
        self.bring_image(wanted)?;
        let named = wanted.machines.as_ref().map(|machines| {
            machines.first().map_or(IsolationAction::default(), |machine| machine.on_isolation)
        });
        let owner = FleetOwner { fleet: self.fleet.clone(), generation: wanted.generation, named };
        self.catalogs.create_for_fleet(name, &wanted.spec, owner)?;
        self.place(name, wanted.machines.as_deref())
    }

    /// Makes the machines of a catalog those that the fleet has placed here, and changes settings and version.
    fn change_named(&self, is: &Catalog, wanted: &WantedCatalog) -> Result<(), HostError> {
        let placed = self.place(&is.name, wanted.machines.as_deref());
        if wanted.spec.count == 0 && placed.is_ok() {
            return self.give_up_all(is, &[]);
        }
        // A claimed machine that is to leave keeps the others from nothing, and a rollout waits for the host until it has the version, too.
        let changed = self.change(&self.catalogs.get(&is.name)?, wanted);
        placed.and(changed)
    }

    /// Makes the machines of a catalog these, if it has machines with names of the fleet.
    fn place(&self, name: &Name, placed: Option<&[PlacedMachine]>) -> Result<(), HostError> {
        let Some(placed) = placed else { return Ok(()) };
        let PlacedLeft { claimed, waiting } = place_machines(&self.catalogs, name, placed)?;
        match (claimed.first(), waiting.first()) {
            (Some(machine), _) => Err(HostError::new(
                ErrorCode::Conflict,
                format!(
                    "{machine} is claimed, and leaves this host when it is released ({} such machines)",
                    claimed.len()
                ),
            )),
            (None, Some(machine)) => {
                let message = format!("an earlier machine of the name {machine} is being removed");
                Err(HostError::new(ErrorCode::Conflict, message))
            }
            (None, None) => Ok(()),
        }
    }

    /// Changes settings, count and version, in steps: those who give up machines choose which.
    fn change(&self, is: &Catalog, wanted: &WantedCatalog) -> Result<(), HostError> {
        let (name, generation) = (&is.name, wanted.generation);
        let by = ChangedBy::Fleet { generation };
        let terms = CatalogChangeTerms { by, ..CatalogChangeTerms::default() };
        // Whatever else cannot be done, its rollout goes on no further.
        let is = match &is.rollout {
            Some(rollout) if wanted.is_held && !rollout.paused => {
                self.hold(is, wanted, terms)?;
                &self.catalogs.get(name)?
            }
            _ => is,
        };
        let mut count = is.spec.count;
        if wanted.machines.is_none() && wanted.spec.count < count {
            count = self.machines.shrink(name, wanted.spec.count, generation)?;
        }
        // Claimed machines beyond the count stay until they are released.
        let count = if wanted.machines.is_some() { count } else { count.max(wanted.spec.count) };
        let settings = CatalogSpec {
            image: is.spec.image.clone(),
            count,
            warm: wanted.spec.warm.min(count),
            ..wanted.spec.clone()
        };
        let has_image = settings.image.name == wanted.spec.image.name;
        let is_carried_out = is.fleet.as_ref().is_some_and(|owner| owner.generation == generation);
        if has_image && (!is_carried_out || !differences(name, &is.spec, &settings).is_empty()) {
            self.catalogs.change(name, &settings, terms)?;
        }
        let strategy = if wanted.spec.keeps_writes() { RolloutStrategy::NextStart } else { wanted.strategy };
        let is_as_wanted = |rollout: &Rollout| {
            let is_same = rollout.strategy == strategy && rollout.max_failed == wanted.max_failed;
            is_same || wanted.is_held
        };
        if is.spec.image == wanted.spec.image && is.rollout.as_ref().is_none_or(is_as_wanted) {
            return self.hold(is, wanted, terms);
        }
        self.bring_image(wanted)?;
        let update = CatalogUpdate {
            image: wanted.spec.image.clone(),
            rollout: strategy,
            claim_grace_seconds: None,
            deadline_seconds: None,
            max_failed: wanted.max_failed,
            discard_data: false,
        };
        let paused = CatalogChangeTerms { paused: wanted.is_held, ..terms };
        self.catalogs.update(name, &update, paused)?;
        Ok(())
    }

    /// Pauses the rollout of the host, or lets it go on.
    fn hold(&self, is: &Catalog, wanted: &WantedCatalog, terms: CatalogChangeTerms) -> Result<(), HostError> {
        let action = match &is.rollout {
            Some(rollout) if !rollout.paused && wanted.is_held => RolloutAction::Pause,
            Some(rollout) if rollout.paused && !wanted.is_held => RolloutAction::Resume,
            _ => return Ok(()),
        };
        match self.catalogs.change_rollout(&is.name, action, terms) {
            // It has just ended.
            Err(e) if e.code == ErrorCode::Conflict => Ok(()),
            done => done.map(drop),
        }
    }

    /// Gives up a catalog that was deleted and made again with machines of the other kind, and makes the new one when nothing of it is left.
    fn replace(
        &self,
        is: &Catalog,
        wanted: &WantedCatalog,
        leaving: &[PlacedMachine],
    ) -> Result<(), HostError> {
        let left = self.give_up(is, leaving)?;
        if left > 0 {
            let message = format!(
                "an earlier catalog '{}' of the fleet, whose machines had {} of the fleet, has {left} machines here, which somebody has claimed",
                is.name,
                if is_named(is) { "names" } else { "no names" },
            );
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        if wanted.spec.count == 0 { Ok(()) } else { self.create(&is.name, wanted) }
    }

    /// Refuses while a catalog has more machines than it is to have: a claimed one is given up when it is released.
    fn check_count(&self, name: &Name, wanted: &WantedCatalog) -> Result<(), HostError> {
        match self.catalogs.get(name)?.spec.count.saturating_sub(wanted.spec.count) {
            0 => Ok(()),
            left => Err(still_claimed(left)),
        }
    }

    /// Gives up a catalog as [`ShareReconciler::give_up`] does. Refuses while machines of it are left.
    fn give_up_all(&self, catalog: &Catalog, leaving: &[PlacedMachine]) -> Result<(), HostError> {
        match self.give_up(catalog, leaving)? {
            0 => Ok(()),
            left => Err(still_claimed(left)),
        }
    }

    /// Gives up the machines of a catalog, and the catalog when none is left. `leaving`: those that the fleet has placed here by their names, and
    /// takes back. Returns how many machines are left.
    fn give_up(&self, catalog: &Catalog, leaving: &[PlacedMachine]) -> Result<u32, HostError> {
        let generation = catalog.fleet.as_ref().map_or(0, |owner| owner.generation);
        let by = ChangedBy::Fleet { generation };
        self.place(&catalog.name, is_named(catalog).then_some(leaving))?;
        let left = self.machines.shrink(&catalog.name, 0, generation)?;
        if left == 0 {
            self.catalogs
                .delete(&catalog.name, CatalogChangeTerms { by, ..CatalogChangeTerms::default() })?;
        }
        Ok(left)
    }

    /// Refuses until the host has the version of a catalog's image. Begins to bring it from the fleet's registry.
    fn bring_image(&self, wanted: &WantedCatalog) -> Result<(), HostError> {
        self.bring(&version_of(wanted), wanted.source.as_ref(), wanted.spec.residency)
    }

    /// Refuses until the host has a version. Begins to bring it from the fleet's registry.
    pub(super) fn bring(
        &self,
        of: &VersionName,
        source: Option<&ImageSource>,
        residency: Option<Residency>,
    ) -> Result<(), HostError> {
        let (name, number) = (&of.image, of.version);
        let there = self.images.details(name).ok();
        let there = there.iter().flat_map(|image| &image.versions).find(|version| version.version == number);
        match (there, source) {
            (Some(version), Some(source)) if version.digest.as_ref() != Some(&source.image.digest) => {
                let message = format!(
                    "the host has a {name}:{number} of its own, with another digest than the fleet's: delete it, or give it another name"
                );
                Err(HostError::new(ErrorCode::Exists, message))
            }
            (Some(version), _) if version.state == VersionState::Ready => {
                self.pulls.succeeded(name, number);
                Ok(())
            }
            (Some(_), _) => Err(self.pulls.under_way(name, number)),
            (None, Some(source)) => self.pull(name, number, source, residency),
            (None, None) => {
                let message =
                    format!("the host has no {name}:{number}, and the fleet knows no registry that has it");
                Err(HostError::new(ErrorCode::NotFound, message))
            }
        }
    }

    fn pull(
        &self,
        name: &Name,
        number: u32,
        source: &ImageSource,
        residency: Option<Residency>,
    ) -> Result<(), HostError> {
        self.pulls.check(name, number, |id| self.images.operation(id))?;
        self.add_registry(source)?;
        let record = &source.image;
        let image = ImageRef { name: record.name.clone(), version: NonZeroU32::new(number) };
        let residency = Some(residency.unwrap_or(Residency::Boot));
        let pull = ImagePull { registry: record.registry.clone(), image, store: None, residency };
        let (operation, _) = self.images.pull(&self.registries, name, pull, &IdempotentRequest::default())?;
        self.pulls.begun(name, number, operation.id);
        Err(self.pulls.under_way(name, number))
    }

    /// Adds a registry of the fleet to those of the host.
    fn add_registry(&self, source: &ImageSource) -> Result<(), HostError> {
        let name = &source.image.registry;
        let missing = || HostError::not_found("registry of the fleet", name.as_str(), []);
        let wanted = source.registry.as_ref().ok_or_else(missing)?;
        let there = self.registries.list()?;
        match there.iter().find(|registry| registry.name == *name) {
            None => self.registries.add(wanted.clone(), false).map(drop),
            Some(there) if there.url == wanted.url && there.endpoint == wanted.endpoint => Ok(()),
            Some(there) => {
                let message = format!(
                    "the host has a registry '{name}' of its own, at {}, and the fleet's is at {}: remove the host's",
                    there.url, wanted.url
                );
                Err(HostError::new(ErrorCode::Exists, message))
            }
        }
    }
}

#[cfg(test)]
#[path = "shares_tests.rs"]
mod tests;
