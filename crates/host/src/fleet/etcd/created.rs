//! Whether records were created that this host has not seen: etcd itself is asked, whatever the host follows.
//!
//! Invariant: the answer is that of most members (a linearizable read).

use super::error::FleetStoreError;
use super::link::Link;
use super::request::{REQUEST_TIME, ask, of_transaction};
use etcd_client::GetOptions;
use spillway_fleet::transaction::Revision;

/// Whether a record of this folder was created after this revision.
///
/// # Errors
/// etcd does not say.
pub async fn is_created_after(
    link: &Link,
    folder: &str,
    revision: Revision,
) -> Result<bool, FleetStoreError> {
    let prefix = format!("{}{folder}/", link.prefix());
    let options = GetOptions::new()
        .with_prefix()
        .with_keys_only()
        .with_limit(1)
        .with_min_create_revision(revision.saturating_add(1));
    let member = link.member().await?;
    match ask(REQUEST_TIME, member.records().get(prefix, Some(options))).await {
        Ok(answer) => Ok(!answer.kvs().is_empty()),
        Err(failure) => {
            link.leave(&member, &failure);
            Err(of_transaction(&member.address, failure))
        }
    }
}
