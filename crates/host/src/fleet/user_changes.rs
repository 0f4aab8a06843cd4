//! Changes of the fleet's records that people ask for, by way of any of its hosts.
//!
//! Invariant: records that are not those of the host's fleet, in a format that it knows, are changed for nobody.

use super::details;
use super::etcd::{FleetStoreError, MemberFailure};
use super::etcd_details::away;
use super::service::{FleetService, locked};
use crate::error::HostError;
use jiff::Timestamp;
use spillway_api::{ErrorCode, FleetCatalog, Name};
use spillway_fleet::changes::{self, ChangeError};
use spillway_fleet::membership::check_records;
use spillway_fleet::transaction::{Outcome, Revision, Transaction, Write};
use spillway_fleet::view::{FleetView, Versioned};
use std::time::Duration;
use tokio::sync::watch;

/// How often a change is decided anew after a conflict.
const TRIES: u32 = 5;
/// Longest wait until a change is in the view.
const SEEN: Duration = Duration::from_secs(2);

impl FleetService {
    /// Makes the fleet, with this identity.
    ///
    /// # Errors
    /// As with [`FleetService::change`]; there is a fleet already, or something is left of one.
    pub async fn init(&self, fleet_id: &str) -> Result<(), HostError> {
        self.commit(|view| {
            self.check_records(view)?;
            changes::init(view, &self.0.name, fleet_id, Timestamp::now()).map(Some).map_err(refusal)
        })
        .await
    }

    /// Carries out a change that `decide` bases on the records, and waits until this host sees it. `None` from it means that there is nothing
    /// to change.
    ///
    /// # Errors
    /// The change is refused, etcd does not answer, or others change the same again and again. `unavailable`: it may have been made, and the
    /// message says what is known.
    pub async fn change(
        &self,
        decide: impl Fn(&FleetView) -> Result<Option<Transaction>, ChangeError>,
    ) -> Result<(), HostError> {
        self.commit(|view| {
            self.check_fleet(view)?;
            let decided = decide(view).map_err(refusal)?;
            Ok(decided.map(|change| changes::in_this_fleet(view, change)))
        })
        .await
    }

    async fn commit(
        &self,
        decide: impl Fn(&FleetView) -> Result<Option<Transaction>, HostError>,
    ) -> Result<(), HostError> {
        // Just after its start a daemon has not read them yet.
        let _ = self.wait_for(1).await;
        for _ in 0..TRIES {
            let (decided, seen) = {
                let view = self.view();
                (decide(&view)?, view.revision)
            };
            let Some(transaction) = decided else { return Ok(()) };
            match self.0.store.commit(&transaction).await.map_err(store_error)? {
                Outcome::Applied(revision) => return self.wait_for(revision).await,
                // Without news it conflicts again.
                Outcome::Conflict => drop(self.wait_for(seen + 1).await),
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
        self.check_fleet(&view)?;
        look(&view).map_err(refusal)
    }

    /// Refuses what is based on records that are not those of a fleet.
    fn check_fleet(&self, view: &FleetView) -> Result<(), HostError> {
        self.check_records(view)?;
        match view.meta {
            Some(_) => Ok(()),
            None => Err(HostError::new(ErrorCode::NotFound, self.no_fleet())),
        }
    }

    /// Refuses what is based on records that were not read yet, or are not those of this fleet in a format that is known.
    fn check_records(&self, view: &FleetView) -> Result<(), HostError> {
        if view.revision == 0 {
            let why = away(&self.0.store.health().borrow());
            let why = why.unwrap_or_else(|| "etcd has not answered with all of them".into());
            let message = format!("the records of the fleet were not read yet: {why}");
            return Err(HostError::new(ErrorCode::Unavailable, message));
        }
        let joined = locked(&self.0.fleet_id).clone();
        check_records(view, joined.as_deref()).map_err(|why| HostError::new(ErrorCode::Conflict, why))
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
        let _ = self.wait_for(1).await;
        let written = {
            let view = self.view();
            self.check_fleet(&view)?;
            let decided = decide(&view).map_err(refusal)?;
            decided.and_then(|transaction| transaction.writes.into_iter().next())
        };
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

    /// Waits until the view has the revision of a change that was made; not longer than [`SEEN`].
    pub(super) async fn wait_for(&self, revision: Revision) -> Result<(), HostError> {
        see(&self.0.view, revision, SEEN).await
    }
}

/// Waits until a view has the revision of a change that was made, for this time at most.
///
/// # Errors
/// It does not have it yet: what it says of the change is not true.
async fn see(
    view: &watch::Sender<FleetView>,
    revision: Revision,
    at_most: Duration,
) -> Result<(), HostError> {
    let mut view = view.subscribe();
    let seen = tokio::time::timeout(at_most, view.wait_for(|view| view.revision >= revision)).await;
    seen.map(drop).map_err(|_| {
        let message = format!(
            "the change was made (revision {revision} of etcd), and this host has not seen it yet: do not repeat it, and look at the records later"
        );
        HostError::new(ErrorCode::Unavailable, message)
    })
}

fn refusal(e: ChangeError) -> HostError {
    HostError::new(e.code, e.message)
}

pub(super) fn store_error(e: FleetStoreError) -> HostError {
    let code = match &e {
        FleetStoreError::NoMember(_) | FleetStoreError::Unanswered(..) | FleetStoreError::Denied(..) => {
            ErrorCode::Unavailable
        }
        // RESOURCE_EXHAUSTED: too many requests at this moment.
        FleetStoreError::Refused(_, MemberFailure::Answer(8, _)) => ErrorCode::Unavailable,
        FleetStoreError::QuotaExceeded(_) => ErrorCode::Exhausted,
        FleetStoreError::NoLease | FleetStoreError::LeaseEnded(_) => ErrorCode::Conflict,
        FleetStoreError::TooLarge(..) => ErrorCode::TooLarge,
        _ => ErrorCode::Internal,
    };
    HostError::new(code, e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_fleet::view::Update;

    /// Without the error, a new catalog that the view does not have yet would be one that there is not.
    #[tokio::test]
    async fn a_change_that_is_not_seen_is_not_answered_from_the_records_before_it() {
        let view = watch::Sender::new(FleetView::default());
        view.send_modify(|view| view.apply(Update::Whole(6, Vec::new())));
        let unseen = see(&view, 7, Duration::from_millis(50)).await.unwrap_err();
        assert_eq!(unseen.code, ErrorCode::Unavailable);
        assert!(unseen.message.contains("was made (revision 7 of etcd)"), "{unseen}");
        see(&view, 6, Duration::from_millis(50)).await.unwrap();
        let waits = see(&view, 7, Duration::from_secs(20));
        let comes = async {
            tokio::task::yield_now().await;
            view.send_modify(|view| view.apply(Update::Changes(7, Vec::new())));
        };
        tokio::join!(waits, comes).0.unwrap();
    }
}
