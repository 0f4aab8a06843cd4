//! Views of machines: their records, desired states and observed states together. Owns no state.
//!
//! Invariant: the observed state in a view is at least as new as the record in it. Machines are read in chunks, so that
//! neither the memory nor the time that readers block writers grows with their number.

use super::blocking::blocking;
use super::desired_state::{ClaimRecord, DesiredState};
use super::registry::MachineRegistry;
use super::run::DiskKind;
use super::status::ObservedMachine;
use super::tag;
use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::paging::{PageBuilder, PageRequest};
use crate::store::{Object, Objects, Revision};
use crate::tags::Tag;
use spillway_api::{
    Catalog, ErrorCode, MOST_NAMES, Machine, MachineDetails, MachineStatus, Name, Page, Phase, Selector,
    VmmKind,
};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// Number of machines that are read together.
pub(super) const CHUNK: usize = 256;

/// A machine with its desired and observed state.
pub(super) struct View {
    pub machine: Machine,
    pub wanted: DesiredState,
    pub revision: Revision,
    pub status: MachineStatus,
    /// Whether the machine's task has read the desired state.
    pub is_seen: bool,
    /// Why the machine has failed, if it has not run since.
    pub failure: Option<String>,
    pub disk: Option<DiskKind>,
}

impl View {
    fn of(machine: Machine, wanted: Option<&Object<DesiredState>>, registry: &MachineRegistry) -> View {
        let (wanted, revision) = wanted.map_or_else(Default::default, |w| (w.value.clone(), w.revision));
        let known = registry.observed(&machine.name);
        let (status, is_seen) = (known.status(revision), known.has_seen(revision));
        let (failure, disk) = (known.failure().map(str::to_owned), known.disk().cloned());
        View { machine, wanted, revision, status, is_seen, failure, disk }
    }

    /// Tag of the machine.
    fn tag(&self) -> Tag {
        tag::of(&self.machine, &self.wanted)
    }

    /// Converts the view for the API.
    pub fn details(self) -> MachineDetails {
        let View { machine, wanted, status, .. } = self;
        let claim = wanted.claim.as_ref().map(ClaimRecord::describe);
        MachineDetails { machine, power: wanted.power, claim, drained: wanted.drained, status }
    }
}

/// Groups machines by their catalog.
pub fn by_catalog(views: Vec<View>) -> HashMap<Name, Vec<View>> {
    let mut of: HashMap<Name, Vec<View>> = HashMap::new();
    for view in views {
        of.entry(view.machine.catalog.clone()).or_default().push(view);
    }
    of
}

/// Reads views of machines.
#[derive(Clone)]
pub struct MachineReader {
    objects: Objects,
    catalogs: Catalogs,
    registry: Arc<MachineRegistry>,
}

impl MachineReader {
    /// Creates the reader of these records.
    pub(super) fn new(objects: Objects, catalogs: Catalogs, registry: Arc<MachineRegistry>) -> MachineReader {
        MachineReader { objects, catalogs, registry }
    }

    /// Returns a page of the selected machines that these owners have claimed, in the order of their names.
    pub fn page(
        &self,
        selector: &Selector,
        owners: &[String],
        part: &PageRequest,
    ) -> Result<Page<MachineDetails>, HostError> {
        let mut page = PageBuilder::new(part);
        let is_theirs = |view: &View| {
            let has = |owner: &String| view.wanted.claim.as_ref().is_some_and(|claim| claim.owner == *owner);
            owners.iter().all(has)
        };
        self.look_at(selector, &part.after, |views| {
            Ok(views.into_iter().filter(is_theirs).all(|view| {
                let name = view.machine.name.clone();
                page.add(name.as_str(), view.details())
            }))
        })?;
        Ok(page.page())
    }

    /// Returns all selected machines, in the order of their names.
    pub(super) fn views(&self, selector: &Selector) -> Result<Vec<View>, HostError> {
        let mut all = Vec::new();
        self.look_at(selector, "", |views| {
            all.extend(views);
            Ok(true)
        })?;
        Ok(all)
    }

    /// Returns a catalog.
    pub(super) fn catalog(&self, name: &Name) -> Result<Catalog, HostError> {
        self.catalogs.get(name)
    }

    /// Returns one machine.
    pub fn get(&self, name: &Name) -> Result<MachineDetails, HostError> {
        Ok(self.view(name)?.details())
    }

    pub(super) fn view(&self, name: &Name) -> Result<View, HostError> {
        let machine = self.catalogs.machine(name)?;
        let wanted = self.objects.get::<DesiredState>(name.as_str())?;
        Ok(View::of(machine, wanted.as_ref(), &self.registry))
    }

    /// Calls `look` with the selected machines after this name, chunk by chunk in the order of their names, until it
    /// returns that it has enough.
    pub(super) fn look_at(
        &self,
        selector: &Selector,
        after: &str,
        mut look: impl FnMut(Vec<View>) -> Result<bool, HostError>,
    ) -> Result<(), HostError> {
        let catalogs = self.chosen_catalogs(selector)?;
        let is_chosen =
            |machine: &Machine| catalogs.as_ref().is_none_or(|chosen| chosen.contains(&machine.catalog));
        if !selector.names.is_empty() {
            return self.look_at_named(selector, after, is_chosen, look);
        }
        // The names of a catalog's machines begin alike, and never change: others are not read.
        let prefix = self.name_prefix(selector)?;
        let mut next = Some(after.max(&prefix).to_owned());
        while let Some(after) = next.filter(|after| after.starts_with(&prefix)) {
            let page = self.objects.page::<Machine>(&after, CHUNK)?;
            let machines = page.objects.into_iter().map(|machine| machine.value).filter(is_chosen);
            let views = self.views_of(machines.collect(), &after, page.next.as_deref())?;
            if !views.is_empty() && !look(views)? {
                return Ok(());
            }
            next = page.next;
        }
        Ok(())
    }

    /// What the names of all selected machines begin with.
    fn name_prefix(&self, selector: &Selector) -> Result<String, HostError> {
        let Some(name) = &selector.catalog else { return Ok(String::new()) };
        let spec = self.catalogs.get(name)?.spec;
        if spec.hardware.vmm == VmmKind::External {
            // Machines may have been added by other names.
            return Ok(String::new());
        }
        Ok(spec.naming(name).split('#').next().unwrap_or_default().to_owned())
    }

    /// Does the same for machines that are selected by name.
    fn look_at_named(
        &self,
        selector: &Selector,
        after: &str,
        is_chosen: impl Fn(&Machine) -> bool,
        mut look: impl FnMut(Vec<View>) -> Result<bool, HostError>,
    ) -> Result<(), HostError> {
        let names: BTreeSet<&Name> = selector.names.iter().collect();
        if names.len() > MOST_NAMES {
            let count = names.len();
            let message =
                format!("{count} names; a request may have at most {MOST_NAMES}: send several requests");
            return Err(HostError::new(ErrorCode::TooLarge, message));
        }
        let machines = names.into_iter().filter(|name| name.as_str() > after);
        let machines = machines.map(|name| self.catalogs.machine(name)).collect::<Result<Vec<_>, _>>()?;
        let machines: Vec<Machine> = machines.into_iter().filter(is_chosen).collect();
        for chunk in machines.chunks(CHUNK) {
            let view = |machine: &Machine| {
                let wanted = self.objects.get::<DesiredState>(machine.name.as_str())?;
                Ok(View::of(machine.clone(), wanted.as_ref(), &self.registry))
            };
            if !look(chunk.iter().map(view).collect::<Result<_, HostError>>()?)? {
                break;
            }
        }
        Ok(())
    }

    /// Returns the catalogs whose machines are selected; `None`: all.
    fn chosen_catalogs(&self, selector: &Selector) -> Result<Option<HashSet<Name>>, HostError> {
        let named = selector.catalog.as_ref().map(|name| self.catalogs.get(name)).transpose()?;
        match (named, selector.labels.is_empty()) {
            (None, true) => Ok(None),
            (Some(catalog), _) => {
                let name = selector.chooses(&catalog).then_some(catalog.name);
                Ok(Some(name.into_iter().collect()))
            }
            (None, false) => {
                let catalogs = self.catalogs.list()?.into_iter();
                let chosen = catalogs.filter(|catalog| selector.chooses(catalog));
                Ok(Some(chosen.map(|catalog| catalog.name).collect()))
            }
        }
    }

    /// Waits until a machine has reached its desired state, or this time has passed, and returns it with its tag.
    pub async fn wait(&self, name: &Name, at_most: Duration) -> Result<(Tag, MachineDetails), HostError> {
        let until = tokio::time::Instant::now() + at_most;
        loop {
            // Subscribe first, so that no later change is missed.
            let status = self.registry.subscribe(name);
            let (reader, asked) = (self.clone(), name.clone());
            let found = blocking(move || reader.view(&asked)).await?;
            if found.status.settled || tokio::time::Instant::now() >= until {
                return Ok((found.tag(), found.details()));
            }
            let changes = async {
                match status {
                    // An error means that the state was forgotten.
                    Some(mut status) => _ = status.changed().await,
                    None => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            };
            let _ = tokio::time::timeout_at(until, changes).await;
        }
    }

    /// Waits until what an earlier daemon has left of each machine is examined, for this time at most.
    pub async fn wait_for_examinations(&self, at_most: Duration) {
        let _ = tokio::time::timeout(at_most, self.registry.wait_for_examinations()).await;
    }

    /// Summary of all machines in one line, for people.
    pub async fn summary(&self) -> String {
        let objects = self.objects.clone();
        let count = blocking(move || Ok(objects.count::<Machine>()?)).await;
        match count {
            Ok(count) => {
                let is_running = |_: &Name, known: &ObservedMachine| known.phase() == Phase::Running;
                let running = self.registry.count(is_running);
                format!("{running} of {count} machines running")
            }
            Err(e) => format!("machines cannot be listed: {}", e.message),
        }
    }

    /// Refuses if a machine runs this version, or any version of the image.
    pub fn check_unused(&self, image: &Name, version: Option<u32>) -> Result<(), HostError> {
        self.look_at(&Selector::default(), "", |views| {
            for View { machine, status, .. } in views {
                let uses = |run: &spillway_api::MachineRun| {
                    run.image == *image && version.is_none_or(|v| run.version == v)
                };
                if let Some(run) = status.run.filter(uses) {
                    let message =
                        format!("{image}:{}: the machine '{}' runs with it", run.version, machine.name);
                    return Err(HostError::new(ErrorCode::InUse, message));
                }
            }
            Ok(true)
        })
    }

    /// Returns the machines after this name and up to `last`, with their desired states. Machines whose desired state
    /// cannot be read are left out: nothing acts on them.
    fn views_of(
        &self,
        mut machines: Vec<Machine>,
        after: &str,
        last: Option<&str>,
    ) -> Result<Vec<View>, HostError> {
        let mut wanted: HashMap<String, Object<DesiredState>> = HashMap::new();
        let mut read_to = (!machines.is_empty()).then(|| after.to_owned());
        while let Some(from) = read_to.take_if(|name| last.is_none_or(|last| name.as_str() < last)) {
            let page = self.objects.page::<DesiredState>(&from, CHUNK)?;
            wanted.extend(page.objects.into_iter().map(|wanted| (wanted.name.clone(), wanted)));
            read_to = page.next;
        }
        let unreadable: HashSet<String> =
            self.objects.unreadable_names::<DesiredState>().into_iter().collect();
        machines.retain(|machine| !unreadable.contains(machine.name.as_str()));
        let view = |machine: Machine| {
            let wanted = wanted.get(machine.name.as_str());
            View::of(machine, wanted, &self.registry)
        };
        Ok(machines.into_iter().map(view).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::testing::TestHost;
    use crate::resources::budget::NO_LIMITS;
    use crate::store::StoredRecord;
    use serde::{Deserialize, Serialize};
    use serde_json::json;

    /// A record that is no machine: who reads it sets it aside.
    #[derive(Serialize, Deserialize)]
    struct NoMachine;

    impl StoredRecord for NoMachine {
        const PREFIX: &'static str = Machine::PREFIX;
        const WORD: &'static str = Machine::WORD;
    }

    #[test]
    fn for_one_catalog_machines_of_others_are_not_read() {
        let host = TestHost::new(NO_LIMITS);
        for (catalog, count) in [("desk", 3), ("desk-z", 1), ("a", 1), ("e", CHUNK), ("z", 1)] {
            host.catalog(catalog, json!({ "count": count, "naming": format!("{catalog}-####") }));
        }
        host.put("a-0002", &NoMachine);
        host.put("z-0002", &NoMachine);
        let names = |catalog: Option<&str>, after: &str| {
            let selector =
                Selector { catalog: catalog.map(|name| name.parse().unwrap()), ..Selector::default() };
            let mut names = Vec::new();
            host.reader
                .look_at(&selector, after, |views| {
                    names.extend(views.into_iter().map(|view| view.machine.name.to_string()));
                    Ok(true)
                })
                .unwrap();
            names
        };
        assert_eq!(names(Some("desk"), ""), ["desk-0001", "desk-0002", "desk-0003"]);
        assert_eq!(names(Some("desk"), "desk-0002"), ["desk-0003"]);
        assert_eq!(names(Some("desk"), "z"), [""; 0]);
        assert_eq!(names(Some("desk-z"), "a"), ["desk-z-0001"]);
        assert_eq!(host.objects.unreadable_names::<Machine>(), [""; 0]);
        assert_eq!((names(Some("e"), "").len(), names(None, "").len()), (CHUNK, CHUNK + 6));
        assert_eq!(host.objects.unreadable_names::<Machine>(), ["a-0002", "z-0002"]);
    }
}
