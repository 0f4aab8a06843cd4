//! The fleet of this host as the daemon runs it: follows the records, keeps the membership, carries out shares, reports, and changes
//! records for people.
//!
//! Owns the tasks for that and the view of the records. Invariant: without etcd nothing on the host changes: shares that were read before are
//! carried out as they were.

use super::claims::{ClaimParts, FleetClaims, OwnEpoch};
use super::copies::look_after_images;
use super::details;
use super::door::{FleetDoor, Member};
use super::etcd::{FleetStore, FleetStoreError, now};
use super::etcd_details::away;
use super::image_details::reported;
use super::placing::place;
use super::record::FleetMembership;
use super::shares::{ShareReconciler, UnfinishedShares};
use super::token::EtcdAccess;
use crate::error::HostError;
use crate::events::Events;
use crate::idempotency::Idempotency;
use crate::machines::Machines;
use crate::store::Objects;
use crate::streaming::Streaming;
use crate::work::blocking;
use spillway_api::{ErrorCode, EventKind, FleetCatalog, Name, PlacerReport};
use spillway_fleet::Moment;
use spillway_fleet::agent::wanted;
use spillway_fleet::changes::ChangeError;
use spillway_fleet::election::Identity;
use spillway_fleet::keys::Key;
use spillway_fleet::membership::{HostMembership, KnownLease, Standing};
use spillway_fleet::records::StatusRecord;
use spillway_fleet::transaction::{Comparison, Outcome, Revision, Transaction, Write};
use spillway_fleet::view::{FleetView, Update, Versioned};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// Interval of the membership, and of shares that wait for something.
const TICK: Duration = Duration::from_secs(1);
/// Interval of looks at shares that are carried out: what somebody has changed on the host is brought back.
const REST: Duration = Duration::from_secs(30);
/// Interval of looks at what the machines do.
const LOOK: Duration = Duration::from_secs(2);
/// Least time between two reports, in milliseconds.
const REPORT_MS: u64 = 10_000;
/// How often a change is decided anew after a conflict.
const TRIES: u32 = 5;
/// Longest wait until a change is in the view.
const SEEN: Duration = Duration::from_secs(2);

/// The fleet of this host. A clone is the same.
#[derive(Clone)]
pub struct FleetService(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) name: Name,
    pub(super) host: Name,
    pub(super) etcd: EtcdAccess,
    pub(super) store: FleetStore,
    pub(super) door: Arc<FleetDoor>,
    pub(super) events: Events,
    pub(super) objects: Objects,
    pub(super) reconciler: ShareReconciler,
    pub(super) view: watch::Sender<FleetView>,
    pub(super) standing: watch::Sender<Standing>,
    pub(super) unfinished: Mutex<UnfinishedShares>,
    pub(super) knowledge: Mutex<PlacerReport>,
    /// Identity of the fleet that the host has joined.
    pub(super) fleet_id: Mutex<Option<String>>,
}

/// What a service is made of.
pub struct FleetParts {
    /// How etcd is reached.
    pub etcd: EtcdAccess,
    /// Records of the fleet.
    pub store: FleetStore,
    /// Connections to other hosts.
    pub door: Arc<FleetDoor>,
    /// Events of the host.
    pub events: Events,
    /// Records of the host.
    pub objects: Objects,
    /// Carries out shares.
    pub reconciler: ShareReconciler,
    /// What brings chunks of streamed images.
    pub streaming: Streaming,
    /// Membership of the host.
    pub membership: HostMembership,
}

impl FleetService {
    /// Begins to take part in the fleet.
    pub fn begin(parts: FleetParts) -> FleetService {
        let FleetParts { etcd, store, door, events, objects, reconciler, streaming, membership } = parts;
        let own = membership.own();
        let identity = Identity { host: own.name.clone(), instance: own.alive.instance.clone() };
        let inner = Inner {
            name: reconciler.fleet.clone(),
            host: own.name.clone(),
            etcd,
            store,
            door,
            events,
            objects,
            reconciler,
            view: watch::Sender::new(FleetView::default()),
            standing: watch::Sender::new(Standing::Connecting),
            unfinished: Mutex::default(),
            knowledge: Mutex::default(),
            fleet_id: Mutex::new(membership.fleet_id().map(str::to_owned)),
        };
        let service = FleetService(Arc::new(inner));
        tokio::spawn(place(service.clone(), identity));
        tokio::spawn(look_after_images(service.clone(), streaming));
        tokio::spawn(service.clone().follow());
        tokio::spawn(service.clone().take_part(membership));
        tokio::spawn(service.clone().carry_out());
        tokio::spawn(service.clone().report());
        service
    }

    /// The records, as this host has seen them last.
    pub fn view(&self) -> watch::Ref<'_, FleetView> {
        self.0.view.borrow()
    }

    /// The same, for who waits for changes.
    pub(super) fn subscribe(&self) -> watch::Receiver<FleetView> {
        self.0.view.subscribe()
    }

    /// Records of the fleet.
    pub(super) fn store(&self) -> &FleetStore {
        &self.0.store
    }

    /// Identity of the fleet that the host has joined, unless it may not take part.
    pub(super) fn joined(&self) -> Option<String> {
        let is_refused = matches!(*self.0.standing.borrow(), Standing::Refused(_));
        locked(&self.0.fleet_id).clone().filter(|_| !is_refused)
    }

    /// Connections to other hosts.
    pub(super) fn door(&self) -> &Arc<FleetDoor> {
        &self.0.door
    }

    /// Events of the host.
    pub(super) fn events(&self) -> &Events {
        &self.0.events
    }

    /// Carries out shares.
    pub(super) fn reconciler(&self) -> &ShareReconciler {
        &self.0.reconciler
    }

    /// Name of this host.
    pub(super) fn host_name(&self) -> &Name {
        &self.0.host
    }

    /// Identity of the fleet that the host has joined, unless it may not take part.
    pub(super) fn fleet_id(&self) -> Option<String> {
        let is_refused = matches!(*self.0.standing.borrow(), Standing::Refused(_));
        locked(&self.0.fleet_id).clone().filter(|_| !is_refused)
    }

    /// Returns the epoch of this host as long as its lease is certainly valid.
    pub fn own_epoch(&self) -> OwnEpoch {
        let (standing, lease) = (self.0.standing.subscribe(), self.0.store.lease());
        Arc::new(move || match *standing.borrow() {
            Standing::Member { epoch } => {
                let is_valid = lease.borrow().is_some_and(|lease| lease.is_valid(now()));
                is_valid.then_some(epoch)
            }
            _ => None,
        })
    }

    /// Begins to claim machines of the fleet for users.
    pub fn claims(&self, machines: Machines, idempotency: Idempotency) -> FleetClaims {
        FleetClaims::begin(ClaimParts {
            fleet: self.0.name.clone(),
            door: Arc::clone(&self.0.door),
            machines,
            idempotency,
            view: self.subscribe(),
            epoch: self.own_epoch(),
            taken: Mutex::default(),
            departures: Mutex::default(),
        })
    }

    /// Keeps what the placer knows, for people.
    pub(super) fn keep_knowledge(&self, knowledge: PlacerReport) {
        *locked(&self.0.knowledge) = knowledge;
    }

    /// Carries out a change that `decide` bases on the records, and waits until this host sees it. `None` from it means that there is nothing
    /// to change.
    ///
    /// # Errors
    /// The change is refused, etcd does not answer, or others change the same again and again.
    pub async fn change(
        &self,
        decide: impl Fn(&FleetView) -> Result<Option<Transaction>, ChangeError>,
    ) -> Result<(), HostError> {
        for _ in 0..TRIES {
            let (decided, seen) = {
                let view = self.view();
                self.check_read(&view)?;
                (decide(&view).map_err(refusal)?, view.revision)
            };
            let Some(transaction) = decided else { return Ok(()) };
            match self.0.store.commit(&transaction).await.map_err(store_error)? {
                Outcome::Applied(revision) => {
                    self.wait_for(revision).await;
                    return Ok(());
                }
                Outcome::Conflict => self.wait_for(seen + 1).await,
            }
        }
        let message = "others change the same record of the fleet at this time: try again";
        Err(HostError::new(ErrorCode::Conflict, message))
    }

    /// Checks something by the records.
    ///
    /// # Errors
    /// It is refused, or the records were not read yet.
    pub fn check(&self, look: impl FnOnce(&FleetView) -> Result<(), ChangeError>) -> Result<(), HostError> {
        let view = self.view();
        self.check_read(&view)?;
        look(&view).map_err(refusal)
    }

    fn check_read(&self, view: &FleetView) -> Result<(), HostError> {
        if view.revision != 0 {
            return Ok(());
        }
        let why = away(&self.0.store.health().borrow()).unwrap_or_default();
        let message = format!("the records of the fleet were not read yet: {why}");
        Err(HostError::new(ErrorCode::Unavailable, message))
    }

    /// Changes a catalog, and returns it as it is then. With `dry_run` nothing is changed, and it is returned as it would be.
    ///
    /// # Errors
    /// As with [`FleetService::change`].
    pub async fn change_catalog(
        &self,
        name: &Name,
        dry_run: bool,
        decide: impl Fn(&FleetView) -> Result<Option<Transaction>, ChangeError>,
    ) -> Result<FleetCatalog, HostError> {
        if !dry_run {
            self.change(decide).await?;
            return self.catalog(name).await;
        }
        let decided = decide(&self.view()).map_err(refusal)?;
        let written = decided.and_then(|transaction| transaction.writes.into_iter().next());
        let Some(Write::Put(_, value)) = written else { return self.catalog(name).await };
        let damaged = |e| HostError::new(ErrorCode::Internal, format!("a record of the fleet: {e}"));
        let value = serde_json::from_slice(&value).map_err(damaged)?;
        let view = self.view();
        let modified = view.catalogs.get(name).map_or(0, |catalog| catalog.modified);
        Ok(details::catalog(
            &view,
            name,
            &Versioned { value, created: modified, modified },
            &self.own_placer_report(),
        ))
    }

    /// Waits until the view has this revision; not longer than [`SEEN`].
    async fn wait_for(&self, revision: Revision) {
        let mut view = self.0.view.subscribe();
        let _ = tokio::time::timeout(SEEN, view.wait_for(|view| view.revision >= revision)).await;
    }

    /// Takes the records as they come.
    async fn follow(self) {
        let mut updates = self.0.store.follow();
        while let Some(update) = updates.recv().await {
            let is_alive =
                |(key, _): &(String, Option<_>)| key.starts_with("alive/") || key.starts_with("hosts/");
            let has_members = match &update {
                Update::Whole(..) => true,
                Update::Changes(_, changes) => changes.iter().any(is_alive),
            };
            self.0.view.send_modify(|view| view.apply(update));
            if !has_members {
                continue;
            }
            let view = self.view();
            // One whose lease has ended may still answer. Only who is removed is no member any more.
            let earlier =
                view.hosts.keys().filter_map(|name| Some((name.clone(), self.0.door.members.get(name)?)));
            let mut members: BTreeMap<Name, Member> = earlier.collect();
            // A record that cannot be read is no member.
            members.extend(view.alive.iter().filter_map(|(name, alive)| {
                Some((name.clone(), Member::of(&alive.value, alive.created).ok()?))
            }));
            self.0.door.members.replace(members);
        }
    }

    /// Writes what this host has to write to be a member.
    async fn take_part(self, mut membership: HostMembership) {
        let (mut view, mut lease) = (self.0.view.subscribe(), self.0.store.lease());
        loop {
            let known =
                lease.borrow_and_update().map(|lease| KnownLease { id: lease.id, until: lease.valid_until });
            let (standing, transaction) = membership.step(&view.borrow_and_update(), known, now());
            self.settle(standing, membership.fleet_id()).await;
            if let Some(transaction) = transaction {
                match self.0.store.commit(&transaction).await {
                    Ok(Outcome::Applied(revision)) => self.wait_for(revision).await,
                    // The records tell; or the next step says what is wrong.
                    Ok(Outcome::Conflict) | Err(_) => tokio::time::sleep(TICK).await,
                }
                continue;
            }
            tokio::select! {
                _ = view.changed() => {}
                _ = lease.changed() => {}
                () = tokio::time::sleep(TICK) => {}
            }
        }
    }

    /// Keeps the standing, and tells of it if it is another one.
    async fn settle(&self, standing: Standing, fleet_id: Option<&str>) {
        let before = self.0.standing.send_replace(standing.clone());
        if before == standing {
            return;
        }
        let fleet = &self.0.name;
        let text = match &standing {
            Standing::Member { epoch } => {
                self.keep_fleet_id(fleet_id).await;
                Some(format!("this host is a member of the fleet {fleet} (epoch {epoch})"))
            }
            Standing::Isolated => Some(format!(
                "this host has lost its connection to the fleet {fleet}; its machines run on: {}",
                away(&self.0.store.health().borrow()).unwrap_or_else(|| "its lease has ended".into())
            )),
            Standing::Refused(why) => {
                Some(format!("this host does not take part in the fleet {fleet}: {why}"))
            }
            Standing::NoFleet => Some(self.no_fleet()),
            Standing::Connecting | Standing::Joining => None,
        };
        if let Some(text) = text {
            self.0.events.raise(EventKind::Fleet, "host", text);
        }
    }

    /// Records which fleet the host has joined, once.
    async fn keep_fleet_id(&self, fleet_id: Option<&str>) {
        let Some(fleet_id) = fleet_id.map(str::to_owned) else { return };
        if locked(&self.0.fleet_id).as_ref() == Some(&fleet_id) {
            return;
        }
        let (objects, kept) = (self.0.objects.clone(), fleet_id.clone());
        match blocking(move || FleetMembership::join(&objects, &kept)).await {
            Ok(Ok(())) => *locked(&self.0.fleet_id) = Some(fleet_id),
            Ok(Err(e)) => self.0.events.raise(EventKind::Failed, "host", format!("the fleet: {}", e.message)),
            Err(_) => {}
        }
    }

    /// Carries out the shares of this host as they change, and again while something is left.
    async fn carry_out(self) {
        let mut view = self.0.view.subscribe();
        let mut standing = self.0.standing.subscribe();
        let mut before = None;
        loop {
            let is_refused = matches!(*standing.borrow_and_update(), Standing::Refused(_));
            let fleet_id = locked(&self.0.fleet_id).clone();
            let shares = {
                let view = view.borrow_and_update();
                fleet_id.filter(|_| !is_refused).and_then(|id| wanted(&view, &id, &self.0.host))
            };
            let is_done = before == shares && locked(&self.0.unfinished).is_empty();
            if let Some(shares) = shares.filter(|_| !is_done) {
                let (reconciler, asked) = (self.0.reconciler.clone(), shares.clone());
                match blocking(move || reconciler.reconcile(&asked)).await {
                    Ok(Ok(unfinished)) => {
                        self.tell_refusals(&unfinished);
                        *locked(&self.0.unfinished) = unfinished;
                        before = Some(shares);
                    }
                    Ok(Err(e)) => {
                        before = None;
                        self.0.events.raise(
                            EventKind::Failed,
                            "host",
                            format!("shares of the fleet: {}", e.message),
                        );
                    }
                    Err(_) => before = None,
                }
            }
            let is_left = before.is_none() || !locked(&self.0.unfinished).is_empty();
            tokio::select! {
                _ = view.changed() => {}
                _ = standing.changed() => {}
                () = tokio::time::sleep(if is_left { TICK } else { REST }) => before = None,
            }
        }
    }

    /// Raises an event for each new reason why a share is not carried out.
    fn tell_refusals(&self, unfinished: &UnfinishedShares) {
        let before = locked(&self.0.unfinished).refused.clone();
        for (catalog, why) in
            unfinished.refused.iter().filter(|(catalog, why)| before.get(*catalog) != Some(why))
        {
            let text = format!("this host does not carry out its share of the fleet's catalog: {why}");
            self.0.events.raise(EventKind::Failed, &format!("catalog/{catalog}"), text);
        }
    }

    /// Reports what the host has, when it has changed.
    async fn report(self) {
        let mut last: Option<Moment> = None;
        loop {
            tokio::time::sleep(LOOK).await;
            let epoch = match *self.0.standing.borrow() {
                Standing::Member { epoch } => epoch,
                _ => continue,
            };
            if last.is_some_and(|last| now().since_ms(last) < REPORT_MS) {
                continue;
            }
            let (reconciler, unfinished) = (self.0.reconciler.clone(), locked(&self.0.unfinished).clone());
            let images = reported(&self.view());
            let status = blocking(move || {
                reconciler.status(&unfinished).and_then(|status| reconciler.with_images(status, &images))
            });
            let Ok(Ok(status)) = status.await else { continue };
            let is_known =
                |view: &FleetView| view.statuses.get(&self.0.host).is_some_and(|is| is.value == status);
            if is_known(&self.view()) {
                continue;
            }
            last = Some(now());
            // The next round repeats what fails.
            if self.0.store.commit(&report(&self.0.host, epoch, &status)).await.is_err() {
                last = None;
            }
        }
    }
}

/// Writes the report of a host, as long as it is a member with this epoch.
fn report(host: &Name, epoch: Revision, status: &StatusRecord) -> Transaction {
    let value = serde_json::to_vec(status).expect("a record is plain data");
    Transaction {
        comparisons: vec![Comparison::Created(Key::Alive(host.clone()), epoch)],
        writes: vec![Write::Put(Key::Status(host.clone()), value)],
    }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refusal(e: ChangeError) -> HostError {
    HostError::new(e.code, e.message)
}

fn store_error(e: FleetStoreError) -> HostError {
    let code = match &e {
        FleetStoreError::NoMember(_) | FleetStoreError::Unanswered(..) => ErrorCode::Unavailable,
        FleetStoreError::QuotaExceeded(_) => ErrorCode::Exhausted,
        FleetStoreError::NoLease | FleetStoreError::LeaseEnded(_) => ErrorCode::Conflict,
        FleetStoreError::TooLarge(..) => ErrorCode::TooLarge,
        _ => ErrorCode::Internal,
    };
    HostError::new(code, e.to_string())
}
