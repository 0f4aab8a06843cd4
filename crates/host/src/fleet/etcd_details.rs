//! Describes how etcd fares, for people. Decides nothing.

use super::etcd::{EtcdAlarm, EtcdHealth, EtcdReach};
use spillway_api::EtcdStatus;
use spillway_fleet::transaction::Revision;

/// Why etcd is not reached, or does not tell of changes; `None` if it does.
pub(super) fn away(health: &EtcdHealth) -> Option<String> {
    match &health.reach {
        EtcdReach::Reached { .. } => health.follow_failure.clone(),
        EtcdReach::Away { why, .. } => Some(why.clone()),
    }
}

/// The same, or why etcd has refused the last change of this host.
pub(super) fn away_or_refused(health: &EtcdHealth) -> Option<String> {
    away(health).or_else(|| health.write_failure.clone())
}

/// Describes etcd, whose members are these, at the revision that this host has seen.
pub(super) fn etcd_status(members: &[String], health: &EtcdHealth, revision: Revision) -> EtcdStatus {
    let connected = match &health.reach {
        EtcdReach::Reached { member, .. } => Some(member.clone()),
        EtcdReach::Away { .. } => None,
    };
    let alarms = health.last.iter().flat_map(|last| &last.alarms).map(|alarm| alarm_text(*alarm).to_owned());
    let trouble: Vec<String> = away_or_refused(health).into_iter().chain(alarms).collect();
    EtcdStatus {
        members: members.to_vec(),
        connected,
        version: health.last.as_ref().map(|last| last.version.clone()),
        trouble: (!trouble.is_empty()).then(|| trouble.join("; ")),
        revision,
    }
}

/// What an alarm of etcd means.
fn alarm_text(alarm: EtcdAlarm) -> &'static str {
    match alarm {
        EtcdAlarm::NoSpace => {
            "its database has reached its quota, so that nothing can be changed (alarm NOSPACE): compact and defragment it, then \
             disarm the alarm"
        }
        EtcdAlarm::Corrupt => "a member has found its data damaged (alarm CORRUPT): replace that member",
    }
}
