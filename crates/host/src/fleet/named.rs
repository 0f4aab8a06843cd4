//! Machines with names of the fleet on this host: what they may do follows from the lease and the records, again and again. Owns the task for
//! that, the guard's deadline, and the confirmations of what was given up.
//!
//! Invariant: the deadline moves on only by a decision that was made with a valid lease, and an epoch that is recorded on the host. A
//! daemon that stands still moves it to a moment that follows from its last renewal, whenever it goes on.

use super::etcd::{FleetStore, LeaseState, now};
use super::record::FleetMembership;
use super::service::FleetService;
use crate::error::HostError;
use crate::events::Events;
use crate::guard;
use crate::machines::NameGate;
use crate::scopes::Scopes;
use crate::store::Objects;
use crate::work::blocking;
use spillway_api::{EventKind, IsolationAction, Machine, Name};
use spillway_fleet::Moment;
use spillway_fleet::named::{Belief, HostNames, NamedOrders, VALID_MS};
use spillway_fleet::transaction::{Revision, Transaction};
use spillway_fleet::view::FleetView;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Interval of decisions without news.
const TICK: Duration = Duration::from_millis(250);
/// Interval of looks at the guard, in milliseconds.
const GUARD_MS: u64 = 500;

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
}

impl NameKeeper {
    /// Runs for as long as the daemon runs.
    pub async fn keep(self, service: FleetService) {
        let (mut view, mut lease) = (service.subscribe(), service.store().lease());
        let deadline = self.gate.existing_page().map_or(Moment(0), |page| page.deadline());
        let mut names = HostNames::new(self.host.clone(), self.highest_epoch, deadline);
        let (mut looked, mut told) = (Moment(0), None);
        loop {
            let held = *lease.borrow_and_update();
            let (orders, belief, leaving, has_guarded) = {
                let view = view.borrow_and_update();
                let belief = self.belief(&view, held, service.takes_part(&view));
                let leaving = leaving(&view, &self.host);
                // None of them is confirmed before it was looked for.
                let orders = names.step(&view, belief, &self.gate.running(), &leaving, now());
                let has_guarded = orders.on_isolation.values().any(|action| *action != IsolationAction::Keep);
                (orders, belief, leaving, has_guarded)
            };
            if has_guarded && now().since_ms(looked) >= GUARD_MS {
                looked = now();
                self.look_at_guard(&mut told).await;
            }
            self.take(&mut names, orders, belief).await;
            if !leaving.is_empty() && belief.is_some() {
                let present = self.present(&leaving).await;
                let releases = {
                    let view = view.borrow();
                    names.step(&view, belief, &self.gate.running(), &present, now()).releases
                };
                release(service.store(), releases).await;
            }
            tokio::select! {
                _ = view.changed() => {}
                _ = lease.changed() => {}
                () = tokio::time::sleep(TICK) => {}
            }
        }
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
        self.gate.take(orders, belief.map_or(Moment(0), |belief| belief.until));
    }

    /// Starts the guard if none runs.
    async fn look_at_guard(&self, told: &mut Option<String>) {
        let begun = match self.gate.page() {
            Ok(page) if guard::is_fresh(&page) => Ok(()),
            Ok(_) => {
                let (machines, scopes) = (self.gate.folder().to_owned(), self.scopes.clone());
                blocking(move || guard::begin(&machines, &scopes)).await.unwrap_or(Ok(()))
            }
            Err(e) => Err(e),
        };
        let why = begun.err().map(|e: HostError| e.message);
        if let Some(why) = why.as_ref().filter(|why| told.as_ref() != Some(why)) {
            let text = format!("no machine with a name of the fleet can start: {why}");
            self.events.raise(EventKind::Failed, "host", text);
        }
        *told = why;
    }

    /// Of these machines, those of which anything is left on the host.
    async fn present(&self, machines: &BTreeSet<Name>) -> BTreeSet<Name> {
        let (objects, folder, asked) =
            (self.objects.clone(), self.gate.folder().to_owned(), machines.clone());
        let running = self.gate.running();
        let look = move || -> BTreeSet<Name> {
            let is_there = |name: &Name| {
                // What cannot be read may be there.
                let record = objects.get::<Machine>(name.as_str()).map_or(true, |found| found.is_some());
                record || folder.join(name.as_str()).exists() || running.contains_key(name)
            };
            asked.into_iter().filter(is_there).collect()
        };
        blocking(look).await.unwrap_or_else(|_| machines.clone())
    }
}

/// Machines that the host is to give up.
fn leaving(view: &FleetView, host: &Name) -> BTreeSet<Name> {
    let places = view.places.get(host).into_iter().flatten();
    places.filter(|(_, place)| place.value.is_leaving).map(|((_, machine), _)| machine.clone()).collect()
}

async fn release(store: &FleetStore, releases: Vec<Transaction>) {
    for transaction in releases {
        // The records tell. What was not written is decided again.
        if store.commit(&transaction).await.is_err() {
            return;
        }
    }
}
