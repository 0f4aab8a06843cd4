//! The store of a fleet's records: what the daemon has of etcd. Owns the tasks that keep the lease, ask how etcd fares, and follow the
//! records; they end with it.
//!
//! Invariant: it can be opened, and used, whether or not etcd is there.

use super::address::EtcdAddress;
use super::error::FleetStoreError;
use super::health::{EtcdHealth, keep_observing};
use super::lease::{LeaseState, keep_lease};
use super::link::Link;
use super::tls::{EtcdTls, EtcdUser};
use super::{created, follow, transaction};
use spillway_fleet::transaction::{Outcome, Revision, Transaction};
use spillway_fleet::view::Update;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// Updates that wait for who follows.
const WAITING: usize = 16;

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct FleetStoreSettings {
    /// Members of etcd, and the fleet.
    pub address: EtcdAddress,
    /// Files for TLS. None: without TLS.
    pub tls: Option<EtcdTls>,
    /// User of etcd. None: etcd asks for none.
    pub user: Option<EtcdUser>,
}

/// The records of a fleet in etcd. A clone is the same store.
#[derive(Clone)]
pub struct FleetStore {
    shared: Arc<Shared>,
}

struct Shared {
    link: Arc<Link>,
    lease: watch::Receiver<Option<LeaseState>>,
    /// Ended with the last clone.
    _tasks: JoinSet<()>,
}

impl FleetStore {
    /// Opens a store, in a runtime of tokio. Never waits for etcd: what is wrong is in [`FleetStore::health`], and in the errors of
    /// requests.
    pub fn open(settings: FleetStoreSettings) -> FleetStore {
        let (state, lease) = watch::channel(None);
        let link = Arc::new(Link::new(Arc::new(settings)));
        let mut tasks = JoinSet::new();
        tasks.spawn(keep_lease(Arc::clone(&link), state));
        tasks.spawn(keep_observing(Arc::clone(&link)));
        FleetStore { shared: Arc::new(Shared { link, lease, _tasks: tasks }) }
    }

    /// Carries out a transaction, if its comparisons hold. It is never repeated here.
    ///
    /// # Errors
    /// It was not applied, except for [`FleetStoreError::Unanswered`]: then nobody knows, and the records tell.
    pub async fn commit(&self, transaction: &Transaction) -> Result<Outcome, FleetStoreError> {
        let lease = self.shared.lease.borrow().map(|lease| lease.id);
        transaction::commit(&self.shared.link, transaction, lease).await
    }

    /// Follows the records: all of them first, and then what changes, until the receiver is dropped, also after the store is. All of them come
    /// again whenever something may have been missed. One that is read slowly makes etcd wait, not the memory grow.
    pub fn follow(&self) -> mpsc::Receiver<Update> {
        let (sender, updates) = mpsc::channel(WAITING);
        tokio::spawn(follow::follow(Arc::clone(&self.shared.link), sender));
        updates
    }

    /// The revision that has all hosts, and all that have leases: this one, if none has come since then.
    ///
    /// # Errors
    /// etcd does not say, or has older records than this revision.
    pub async fn revision_of_all_hosts(&self, revision: Revision) -> Result<Revision, FleetStoreError> {
        let link = &self.shared.link;
        let of = |folder| created::created_after(link, folder, revision);
        let (hosts, leases) = tokio::try_join!(of("hosts"), of("alive"))?;
        Ok(hosts.max(leases))
    }

    /// The lease of this host. None: there was none yet, or it has ended and there is no other one yet.
    pub fn lease(&self) -> watch::Receiver<Option<LeaseState>> {
        self.shared.lease.clone()
    }

    /// How etcd fares.
    pub fn health(&self) -> watch::Receiver<EtcdHealth> {
        self.shared.link.health.subscribe()
    }
}
