//! Writes the reports of this host to its fleet: what it has, and what its machines do. Owns when that is done.
//!
//! Invariant: two attempts to write a report are at least [`REPORT_MS`] apart, whatever comes of the first, and a report that says nothing
//! new is not written.

use super::etcd::now;
use super::image_details::reported;
use super::service::{FleetService, locked};
use crate::work::blocking;
use spillway_api::Name;
use spillway_fleet::Moment;
use spillway_fleet::keys::Key;
use spillway_fleet::membership::Standing;
use spillway_fleet::records::StatusRecord;
use spillway_fleet::transaction::{Comparison, Revision, Transaction, Write};
use std::time::Duration;

/// Interval of looks at what the machines do.
const LOOK: Duration = Duration::from_secs(2);
/// Least time between two reports, in milliseconds.
const REPORT_MS: u64 = 10_000;

impl FleetService {
    /// Reports what the host has, when it has changed.
    pub(super) async fn report(self) {
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
            let is_new = {
                let view = self.view();
                // The records may be those of another fleet by now.
                let known = view.statuses.get(&self.0.host);
                self.takes_part(&view) && known.is_none_or(|known| known.value != status)
            };
            if !is_new {
                continue;
            }
            last = Some(now());
            // A later round repeats what fails: the record is not what it should be.
            let _ = self.0.store.commit(&report(&self.0.host, epoch, &status)).await;
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
