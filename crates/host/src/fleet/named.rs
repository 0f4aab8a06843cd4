//! Machines with names of the fleet on this host: what they may do follows from the lease and the records, again and again. Owns the tasks for
//! that and for the guard, the guard's deadline, and the confirmations of what was given up.
//!
//! Invariant: the deadline moves on only by a decision that was made with a valid lease, and an epoch that is recorded on the host. A
//! daemon that stands still moves it to a moment that follows from its last renewal, whenever it goes on. Nothing is confirmed that was not
//! looked for.

use super::etcd::{LeaseState, now};
use super::record::FleetMembership;
use super::service::{FleetService, locked};
use crate::events::Events;
use crate::guard::GuardKeeper;
use crate::machines::NameGate;
use crate::scopes::Scopes;
use crate::store::Objects;
use crate::work::blocking;
use spillway_api::{EventKind, Machine, Name};
use spillway_fleet::Moment;
use spillway_fleet::named::{Belief, HostNames, NamedOrders, VALID_MS};
use spillway_fleet::transaction::Revision;
use spillway_fleet::view::FleetView;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinHandle;

/// Interval of decisions without news.
const TICK: Duration = Duration::from_millis(250);
/// Interval of looks at the guard.
const GUARD: Duration = Duration::from_millis(500);

/// Keeps the names of a host.
pub(super) struct NameKeeper {
    /// Name of the host.
    pub host: Name,
    /// Identity of the daemon's process.
    pub instance: String,
    /// Orders for machines.
    pub gate: Arc<NameGate>,
    /// Control groups of processes.
    pub scopes: Scopes,
    /// Records of the host.
    pub objects: Objects,
    /// Events of the host.
    pub events: Events,
    /// Highest epoch that the host has recorded.
    pub highest_epoch: Revision,
    /// Boot of the host, and the file of its records ([`boot_of_records`](super::record::boot_of_records)).
    pub boot: String,
    /// Whether the records of the host are of another boot.
    pub is_other_boot: bool,
}

impl NameKeeper {
    /// Runs for as long as the daemon runs.
    pub async fn keep(self, service: FleetService) {
        // A folder that does not answer keeps nobody else waiting.
        tokio::spawn(keep_guard(Arc::clone(&self.gate), self.scopes.clone(), self.events.clone()));
        let (mut view, mut lease) = (service.subscribe(), service.store().lease());
        let deadline = self.gate.existing_page().map_or(Moment(0), |page| page.deadline());
        let names = HostNames::new(self.host.clone(), self.highest_epoch, deadline);
        let mut names = if self.is_other_boot { names.of_other_boot() } else { names };
        let mut told = None;
        let mut looking: Option<JoinHandle<BTreeMap<Name, Revision>>> = None;
        loop {
            let held = *lease.borrow_and_update();
            let (orders, belief, leaving) = {
                let view = view.borrow_and_update();
                let belief = self.belief(&view, held, service.takes_part(&view));
                let orders = names.step(&view, belief, &self.gate.running(), now());
                (orders, belief, names.leaving(&view))
            };
            self.tell(orders.refusal.clone(), &mut told);
            self.take(&mut names, orders, belief).await;
            if looking.is_none() && !leaving.is_empty() && belief.is_some() {
                looking = Some(tokio::spawn(self.gone(leaving)));
            }
            let looked = async {
                match &mut looking {
                    Some(looking) => looking.await,
                    None => std::future::pending().await,
                }
            };
            // A disk that does not answer keeps no order waiting.
            tokio::select! {
                _ = view.changed() => {}
                _ = lease.changed() => {}
                () = tokio::time::sleep(TICK) => {}
                gone = looked => {
                    looking = None;
                    // The records may be later ones by now, and what was not written is decided again.
                    let release = {
                        let view = view.borrow();
                        let belief = belief.filter(|_| service.takes_part(&view));
                        names.confirm(&view, belief, &gone.unwrap_or_default(), now())
                    };
                    if let Some(release) = release {
                        let _ = service.store().commit(&release).await;
                    }
                }
            }
        }
    }

    /// Says why nothing is started, once.
    fn tell(&self, why: Option<String>, told: &mut Option<String>) {
        if let Some(why) = why.clone().filter(|_| *told != why) {
            self.events.raise(EventKind::Fleet, "host", why);
        }
        *told = why;
    }

    /// The epoch that goes with the present lease.
    fn belief(&self, view: &FleetView, lease: Option<LeaseState>, takes_part: bool) -> Option<Belief> {
        let (lease, alive) = (lease?, view.alive.get(&self.host)?);
        let is_own = alive.value.instance == self.instance && alive.value.lease == lease.id;
        // etcd may grant more time than was asked for, and end the lease earlier: the placer waits for what was asked for.
        let until = lease.valid_until.min(lease.renewed.after_ms(VALID_MS));
        (is_own && takes_part && now() < until).then_some(Belief { epoch: alive.created, until })
    }

    /// Carries out what was decided.
    async fn take(&self, names: &mut HostNames, orders: NamedOrders, belief: Option<Belief>) {
        if let Some(epoch) = orders.record_epoch {
            let objects = self.objects.clone();
            // What cannot be recorded is tried again with the next step.
            if let Ok(Ok(())) = blocking(move || FleetMembership::enter(&objects, epoch)).await {
                names.recorded(epoch);
            }
        }
        if let Some(deadline) = orders.deadline
            && let Some(page) = self.gate.existing_page()
        {
            page.set_deadline(deadline);
        }
        if orders.record_boot {
            let (objects, boot) = (self.objects.clone(), self.boot.clone());
            if let Ok(Ok(())) = blocking(move || FleetMembership::settle(&objects, &boot)).await {
                names.recorded_boot();
            }
        }
        self.gate.take(orders, belief.map_or(Moment(0), |belief| belief.until));
    }

    /// Of these machines, those of which nothing is left on the host.
    fn gone(
        &self,
        leaving: BTreeMap<Name, Revision>,
    ) -> impl Future<Output = BTreeMap<Name, Revision>> + use<> {
        let (objects, gate) = (self.objects.clone(), Arc::clone(&self.gate));
        async move {
            // What is claimed leaves perhaps in hours.
            tokio::time::sleep(TICK).await;
            let looked = blocking(move || {
                let running = gate.running();
                let leaving = leaving.into_iter().filter(|(name, _)| !running.contains_key(name));
                look_for(&objects, gate.folder(), leaving.collect())
            });
            looked.await.unwrap_or_default()
        }
    }
}

/// Of these machines, those of which neither a record nor a folder is there. What cannot be read may be there.
fn look_for(objects: &Objects, folder: &Path, leaving: BTreeMap<Name, Revision>) -> BTreeMap<Name, Revision> {
    if std::fs::read_dir(folder).is_err() {
        return BTreeMap::new();
    }
    let is_gone = |name: &Name| {
        objects.get::<Machine>(name.as_str()).is_ok_and(|found| found.is_none())
            && !folder.join(name.as_str()).try_exists().unwrap_or(true)
    };
    leaving.into_iter().filter(|(name, _)| is_gone(name)).collect()
}

/// Keeps a guard while a machine needs one, and its page.
async fn keep_guard(gate: Arc<NameGate>, scopes: Scopes, events: Events) {
    let keeper = Arc::new(Mutex::new(GuardKeeper::new(gate.folder(), scopes)));
    loop {
        if gate.needs_guard() {
            let (of, keeper) = (Arc::clone(&gate), Arc::clone(&keeper));
            let said = blocking(move || tend_guard(&of, &mut locked(&keeper))).await;
            said.into_iter().flatten().for_each(|text| events.raise(EventKind::Failed, "host", text));
        }
        tokio::time::sleep(GUARD).await;
    }
}

/// Looks after the guard and its page. Returns what people should know.
fn tend_guard(gate: &NameGate, keeper: &mut GuardKeeper) -> Vec<String> {
    const RESTORED: &str = "the page of the guard of machines with names of the fleet was removed or replaced: it was made again";
    gate.look_again();
    let restored = gate.restore_page();
    let said = restored.as_ref().is_ok_and(|is_restored| *is_restored).then(|| RESTORED.to_owned());
    let page = restored.and_then(|_| gate.page());
    let page = page.as_ref().map(|page| &**page).map_err(Clone::clone);
    said.into_iter().chain(keeper.tend(page)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::testing::TestHost;
    use crate::resources::budget::NO_LIMITS;
    use serde_json::json;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_cannot_be_read_is_not_gone() {
        let host = TestHost::new(NO_LIMITS);
        let names =
            ["desk-001", "desk-002", "desk-003", "desk-004"].map(|name| name.parse::<Name>().unwrap());
        let leaving: BTreeMap<Name, Revision> = names.iter().cloned().zip(1..).collect();
        let folder = host.path("folders");
        let look = || look_for(&host.objects, &folder, leaving.clone()).into_values().collect::<Vec<_>>();
        assert!(look().is_empty(), "there is no folder of machines");
        std::fs::create_dir(&folder).unwrap();
        assert_eq!(look(), [1, 2, 3, 4]);
        let machine = json!({
            "name": "desk-001", "catalog": "desk", "number": 1, "created": "2026-01-01T00:00:00Z",
            "identity": { "uuid": "u", "mac": "02:00:00:00:00:01" },
        });
        host.put("desk-001", &serde_json::from_value::<Machine>(machine).unwrap());
        std::fs::create_dir(folder.join("desk-002")).unwrap();
        // To look at it fails, and not because it is not there.
        symlink("desk-003", folder.join("desk-003")).unwrap();
        assert_eq!(look(), [4]);
    }
}
