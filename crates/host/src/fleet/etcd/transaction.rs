//! Transactions of the records as transactions of etcd. Owns what is checked before one is sent.
//!
//! Invariant: all keys are below the prefix of the fleet.

use super::error::FleetStoreError;
use super::link::Link;
use super::request::{REQUEST_TIME, ask, of_transaction};
use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp};
use spillway_fleet::keys::Key;
use spillway_fleet::transaction::{Comparison, MOST_OPERATIONS, Outcome, Transaction, Write};
use std::collections::HashSet;

/// Carries out a transaction, once. Records with a lease get this one.
///
/// # Errors
/// See [`FleetStoreError`]; after [`FleetStoreError::Unanswered`] it may have been applied.
pub async fn commit(
    link: &Link,
    transaction: &Transaction,
    lease: Option<i64>,
) -> Result<Outcome, FleetStoreError> {
    let txn = translate(&link.prefix(), transaction, lease)?;
    let member = link.member().await?;
    let done = match ask(REQUEST_TIME, member.records().txn(txn)).await {
        Ok(answer) if answer.succeeded() => match answer.header() {
            Some(header) => Ok(Outcome::Applied(header.revision())),
            None => Err(FleetStoreError::Invalid("etcd has answered without a revision".into())),
        },
        Ok(_) => Ok(Outcome::Conflict),
        Err(failure) => {
            link.leave(&member, &failure);
            Err(of_transaction(&member.address, failure))
        }
    };
    match &done {
        Ok(_) => link.health.note_allowed(transaction),
        Err(denied @ FleetStoreError::Denied(..)) => {
            link.health.note_refused(denied.to_string(), transaction)
        }
        // These say nothing of what this host may do.
        Err(_) => {}
    }
    done
}

/// Notes whether this host may make this change now. It is not made, because two comparisons that come to it exclude each other; etcd refuses it
/// to whom it would refuse one that is made.
pub async fn look_whether_allowed(link: &Link, mut change: Transaction) {
    let never = [Comparison::Created(Key::Meta, 0), Comparison::Created(Key::Meta, 1)];
    change.comparisons.truncate(MOST_OPERATIONS - never.len());
    change.comparisons.extend(never);
    // What was to have a lease, this host may have none for.
    change.writes.iter_mut().for_each(|write| *write = Write::Delete(write.key().clone()));
    // What comes of it is noted.
    let _ = commit(link, &change, None).await;
}

fn translate(prefix: &str, transaction: &Transaction, lease: Option<i64>) -> Result<Txn, FleetStoreError> {
    let Transaction { comparisons, writes } = transaction;
    let most = comparisons.len().max(writes.len());
    if most > MOST_OPERATIONS {
        let why = format!("it has {most} comparisons or writes, and {MOST_OPERATIONS} are the most");
        return Err(FleetStoreError::Invalid(why));
    }
    let comparisons = comparisons.iter().map(|comparison| match comparison {
        Comparison::Created(key, at) => {
            Compare::create_revision(format!("{prefix}{key}"), CompareOp::Equal, *at)
        }
        Comparison::Modified(key, at) => {
            Compare::mod_revision(format!("{prefix}{key}"), CompareOp::Equal, *at)
        }
    });
    let mut written = HashSet::new();
    let mut operations = Vec::with_capacity(writes.len());
    for write in writes {
        let key = write.key();
        if !written.insert(key) {
            return Err(FleetStoreError::Invalid(format!("it writes {key} twice")));
        }
        let key = format!("{prefix}{key}");
        operations.push(match write {
            Write::Put(_, value) => TxnOp::put(key, value.clone(), None),
            Write::PutWithLease(_, value) => {
                let lease = lease.ok_or(FleetStoreError::NoLease)?;
                TxnOp::put(key, value.clone(), Some(PutOptions::new().with_lease(lease)))
            }
            Write::Delete(_) => TxnOp::delete(key, None),
        });
    }
    Ok(Txn::new().when(comparisons.collect::<Vec<_>>()).and_then(operations))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_etcd_would_refuse_is_not_sent() {
        let refused = |transaction| match translate("/spillway/site/", &transaction, None) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("it is translated"),
        };
        let comparisons = vec![Comparison::Created(Key::Meta, 0); MOST_OPERATIONS + 1];
        assert!(
            refused(Transaction { comparisons, writes: Vec::new() }).contains("129 comparisons or writes")
        );
        let writes = vec![Write::Put(Key::Meta, Vec::new()), Write::Delete(Key::Meta)];
        assert!(refused(Transaction { comparisons: Vec::new(), writes }).contains("writes meta twice"));
        let writes = vec![Write::PutWithLease(Key::Placer, Vec::new())];
        assert!(refused(Transaction { comparisons: Vec::new(), writes }).contains("no lease"));
    }
}
