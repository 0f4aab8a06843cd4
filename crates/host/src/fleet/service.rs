//! The fleet of this host as the daemon runs it: follows the records, keeps the membership, carries out shares, reports, and changes
//! records for people.
//!
//! Owns the tasks for that and the view of the records. Invariant: without etcd nothing on the host changes: shares that were read before are
//! carried out as they were.

use super::claims::{BehindView, ClaimParts, FleetClaims, MOST_UNDONE, OwnEpoch};
use super::copies::look_after_images;
use super::door::FleetDoor;
use super::etcd::{FleetStore, now};
use super::etcd_details::away;
use super::placing::place;
use super::record::FleetMembership;
use super::restored::SeenRecords;
use super::share_pace::SharePace;
use super::shares::{Refusal, ShareReconciler, UnfinishedShares};
use super::token::EtcdAccess;
use super::user_changes::store_error;
use crate::error::HostError;
use crate::events::Events;
use crate::idempotency::Idempotency;
use crate::machines::Machines;
use crate::store::Objects;
use crate::streaming::Streaming;
use crate::work::blocking;
use spillway_api::{ErrorCode, EventKind, Name, PlacerReport};
use spillway_fleet::agent::{WantedShares, wanted};
use spillway_fleet::election::Identity;
use spillway_fleet::membership::{HostMembership, KnownLease, Standing, check_records, takes_part};
use spillway_fleet::transaction::{Outcome, Revision};
use spillway_fleet::view::FleetView;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};

/// Interval of the membership, and of looks at what is wanted.
const TICK: Duration = Duration::from_secs(1);

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
    /// Identity of the host.
    pub(super) host_id: String,
    /// What the host has seen of the records.
    pub(super) seen: Arc<SeenRecords>,
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
    /// The same as it is recorded.
    pub record: FleetMembership,
}

impl FleetService {
    /// Begins to take part in the fleet.
    pub fn begin(parts: FleetParts) -> FleetService {
        let FleetParts { etcd, store, door, events, objects, reconciler, streaming, membership, record } =
            parts;
        let own = membership.own();
        let identity = Identity { host: own.name.clone(), instance: own.alive.instance.clone() };
        let inner = Inner {
            name: reconciler.fleet.clone(),
            host: own.name.clone(),
            host_id: own.host_id.clone(),
            seen: Arc::new(SeenRecords::new(objects.clone(), &record)),
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

    /// Whether the host may act on these records: it has joined their fleet, is a member by them, and nothing keeps it from taking part.
    pub(super) fn takes_part(&self, view: &FleetView) -> bool {
        self.acting_fleet().is_some_and(|id| takes_part(view, &id, &self.0.host, &self.0.host_id))
    }

    /// What these records want of the host; `None` if they say nothing, or the host may not act on them.
    pub(super) fn wanted(&self, view: &FleetView) -> Option<WantedShares> {
        wanted(view, &self.acting_fleet()?, &self.0.host, &self.0.host_id)
    }

    /// Whether these are the records of the fleet that the host has joined, in a format that it knows.
    pub(super) fn is_own_fleet(&self, view: &FleetView) -> bool {
        let joined = locked(&self.0.fleet_id).clone();
        joined.is_some_and(|joined| check_records(view, Some(&joined)).is_ok())
    }

    /// Whether the host holds still, because etcd has older records than it has acted on.
    pub(super) fn holds_still(&self) -> bool {
        self.0.seen.restored().is_some()
    }

    /// Identity of the fleet that the host has joined, if it is known that the host may take part: this daemon was a member of it, and may be one
    /// again. Before that, another host may run with this identity.
    fn acting_fleet(&self) -> Option<String> {
        let may_act = matches!(*self.0.standing.borrow(), Standing::Member { .. } | Standing::Isolated);
        locked(&self.0.fleet_id).clone().filter(|_| may_act && !self.holds_still())
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

    /// Returns the epoch of this host as long as its lease is certainly valid.
    pub fn own_epoch(&self) -> OwnEpoch {
        let (standing, lease) = (self.0.standing.subscribe(), self.0.store.lease());
        let seen = Arc::clone(&self.0.seen);
        Arc::new(move || match *standing.borrow() {
            Standing::Member { epoch } if seen.restored().is_none() => {
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
            all_hosts: {
                let store = self.0.store.clone();
                Arc::new(move |revision| {
                    let store = store.clone();
                    Box::pin(async move { store.revision_of_all_hosts(revision).await.map_err(store_error) })
                })
            },
            taken: BehindView::default(),
            departures: BehindView::default(),
            clock: Mutex::default(),
            undone: Semaphore::new(MOST_UNDONE),
        })
    }

    /// Keeps what the placer knows, for people.
    pub(super) fn keep_knowledge(&self, knowledge: PlacerReport) {
        *locked(&self.0.knowledge) = knowledge;
    }

    /// Writes what this host has to write to be a member.
    async fn take_part(self, mut membership: HostMembership) {
        let (mut view, mut lease) = (self.0.view.subscribe(), self.0.store.lease());
        loop {
            let known =
                lease.borrow_and_update().map(|lease| KnownLease { id: lease.id, until: lease.valid_until });
            self.0.seen.record_hold().await;
            if let Some(restored) = self.0.seen.restored() {
                membership.hold(restored.to_string());
            }
            let (standing, transaction) = membership.step(&view.borrow_and_update(), known, now());
            self.settle(standing, membership.fleet_id()).await;
            if let Some(transaction) = transaction {
                match self.0.store.commit(&transaction).await {
                    // Without it, the next step writes the same again.
                    Ok(Outcome::Applied(revision)) => drop(self.wait_for(revision).await),
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
        let before = self.0.standing.borrow().clone();
        // Each step comes here, and who waits for another standing is not to be woken for the same one.
        self.0.standing.send_if_modified(|is| std::mem::replace(is, standing.clone()) != standing);
        if matches!(standing, Standing::Member { .. }) {
            self.keep_fleet_id(fleet_id, before != standing).await;
        }
        if before == standing {
            return;
        }
        let fleet = &self.0.name;
        let text = match &standing {
            Standing::Member { epoch } => {
                Some(format!("this host is a member of the fleet {fleet} (epoch {epoch})"))
            }
            Standing::Isolated => Some(format!(
                "this host has lost its connection to the fleet {fleet}; its machines run on, but for named ones that are paused or ended then: {}",
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

    /// Records which fleet the host has joined, once. What fails is tried again with the next step; `tells` of it.
    async fn keep_fleet_id(&self, fleet_id: Option<&str>, tells: bool) {
        let Some(fleet_id) = fleet_id.map(str::to_owned) else { return };
        if locked(&self.0.fleet_id).as_ref() == Some(&fleet_id) {
            return;
        }
        let (objects, kept) = (self.0.objects.clone(), fleet_id.clone());
        match blocking(move || FleetMembership::join(&objects, &kept)).await {
            Ok(Ok(())) => *locked(&self.0.fleet_id) = Some(fleet_id),
            Ok(Err(e)) if tells => {
                self.0.events.raise(EventKind::Failed, "host", format!("the fleet: {}", e.message));
            }
            Ok(Err(_)) | Err(_) => {}
        }
    }

    /// Carries out the shares of this host as they change, and again while something is left.
    async fn carry_out(self) {
        let mut view = self.0.view.subscribe();
        let mut standing = self.0.standing.subscribe();
        let mut pace = SharePace::default();
        // Before which shares their revision was recorded.
        let mut recorded = None;
        let mut failure = None;
        loop {
            standing.borrow_and_update();
            let (shares, revision) = {
                let view = view.borrow_and_update();
                (self.wanted(&view), view.revision)
            };
            if let Some(shares) = shares.filter(|shares| pace.is_due(shares, Instant::now())) {
                let is_new = recorded.as_ref() != Some(&shares);
                let is_left = match self.reconcile(&shares, is_new.then_some(revision)).await {
                    Ok(unfinished) => {
                        (recorded, failure) = (Some(shares.clone()), None);
                        self.tell_refusals(&unfinished);
                        let is_left = !unfinished.is_empty();
                        *locked(&self.0.unfinished) = unfinished;
                        is_left
                    }
                    Err(e) => {
                        let text = format!("shares of the fleet: {}", e.message);
                        if failure.as_ref() != Some(&text) {
                            self.0.events.raise(EventKind::Failed, "host", text.clone());
                        }
                        failure = Some(text);
                        true
                    }
                };
                pace.note(shares, is_left, Instant::now());
            }
            tokio::select! {
                _ = view.changed() => {}
                _ = standing.changed() => {}
                () = tokio::time::sleep(TICK) => {}
            }
        }
    }

    /// Carries out shares. If they are others than before, the revision of their records is recorded first.
    async fn reconcile(
        &self,
        shares: &WantedShares,
        revision: Option<Revision>,
    ) -> Result<UnfinishedShares, HostError> {
        if let Some(revision) = revision {
            self.0.seen.act_on(revision).await?;
        }
        let (reconciler, shares) = (self.0.reconciler.clone(), shares.clone());
        let broken = |e| HostError::new(ErrorCode::Internal, format!("a fault of the daemon ({e})"));
        blocking(move || reconciler.reconcile(&shares)).await.map_err(broken)?
    }

    /// Raises an event for each new reason why a share is not carried out.
    fn tell_refusals(&self, unfinished: &UnfinishedShares) {
        let before = locked(&self.0.unfinished).refused.clone();
        for (catalog, Refusal { why, .. }) in &unfinished.refused {
            if before.get(catalog).is_some_and(|before| before.why == *why) {
                continue;
            }
            let text = format!("this host does not carry out its share of the fleet's catalog: {why}");
            self.0.events.raise(EventKind::Failed, &format!("catalog/{catalog}"), text);
        }
    }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
