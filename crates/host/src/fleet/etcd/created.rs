//! Whether records were created that this host has not seen: etcd itself is asked, whatever the host follows.
//!
//! Invariant: the answer is that of most members (a linearizable read).

use super::error::FleetStoreError;
use super::link::Link;
use super::request::{REQUEST_TIME, ask, of_transaction};
use etcd_client::{GetOptions, SortOrder, SortTarget};
use spillway_fleet::transaction::Revision;

/// The revision that created the newest record of this folder; the given one if none was created after it. Not the revision that etcd has: where
/// others use it, too, the records of the fleet may never get there.
///
/// # Errors
/// etcd does not say, or has older records than the given revision.
pub async fn created_after(
    link: &Link,
    folder: &str,
    revision: Revision,
) -> Result<Revision, FleetStoreError> {
    let prefix = format!("{}{folder}/", link.prefix());
    let options = GetOptions::new()
        .with_prefix()
        .with_keys_only()
        .with_limit(1)
        .with_sort(SortTarget::Create, SortOrder::Descend)
        .with_min_create_revision(revision.saturating_add(1));
    let member = link.member().await?;
    match ask(REQUEST_TIME, member.records().get(prefix, Some(options))).await {
        Ok(answer) => {
            let now = answer.header().map_or(0, |header| header.revision());
            if now < revision {
                let why = format!("etcd is at revision {now}, and this host has seen {revision}");
                return Err(FleetStoreError::Invalid(why));
            }
            Ok(answer.kvs().first().map_or(revision, |newest| newest.create_revision().max(revision)))
        }
        Err(failure) => {
            link.leave(&member, &failure);
            Err(of_transaction(&member.address, failure))
        }
    }
}
