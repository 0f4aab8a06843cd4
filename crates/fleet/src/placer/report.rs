//! What the placer tells people: events, and its status. Owns the sentences, and what was told already.
//!
//! Invariant: what has not changed is told once.

use super::{Office, PlacerEvent};
use crate::Moment;
use crate::liveness::{Brake, Liveness, Reach, Standing};
use crate::placement::{Plan, Unplaced};
use crate::records::RolloutRecord;
use crate::transaction::Revision;
use crate::view::FleetView;
use spillway_api::{FleetRolloutState, Name};
use std::collections::{BTreeMap, BTreeSet};

/// What the placer knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacerStatus {
    /// Revision that created the key of the placer.
    pub term: Revision,
    /// Why no host counts as lost now, if it is so.
    pub brake: Option<Brake>,
    /// All hosts, in the order of their names.
    pub hosts: Vec<HostStatus>,
    /// Catalogs whose machines are not all placed.
    pub unplaced: Vec<Unplaced>,
    /// What rollouts wait for, by catalog.
    pub waits: BTreeMap<Name, String>,
    /// Transactions that are under way, or that the records do not show yet.
    pub transactions: usize,
}

/// What the placer knows of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostStatus {
    /// The host.
    pub host: Name,
    /// What is known of it.
    pub standing: Standing,
    /// Whether it counts as lost: its machines are, or were, replaced.
    pub is_lost: bool,
    /// Why its machines are not replaced, if it is silent and has some; of a lost host, why some are not.
    pub kept: Option<String>,
}

pub(super) fn status(office: &Office, view: &FleetView, now: Moment) -> PlacerStatus {
    let brake = office.liveness.brake(now);
    let without_record = view.shares.keys().filter(|host| !view.hosts.contains_key(*host));
    let all: BTreeSet<&Name> = view.hosts.keys().chain(without_record).collect();
    let hosts = all.into_iter().map(|host| {
        let standing = office.liveness.standing(host, now);
        let has_names = view.places.contains_key(host);
        let is_lost = office.reports.lost.contains(host);
        let kept = match is_lost {
            true => keeps_data(view, host).then(|| KEPT_BY_LOST.to_owned()),
            false => {
                why_kept(standing, office.plan.stakes.get(host), brake, has_machines(view, host), has_names)
            }
        };
        HostStatus { host: host.clone(), standing, is_lost, kept }
    });
    PlacerStatus {
        term: office.term,
        brake,
        hosts: hosts.collect(),
        unplaced: office.plan.unplaced.clone(),
        waits: office.plan.waits.clone(),
        transactions: office.flights.len(),
    }
}

fn has_machines(view: &FleetView, host: &Name) -> bool {
    view.shares.get(host).is_some_and(|shares| shares.values().any(|share| share.value.count > 0))
        || view.places.contains_key(host)
}

/// What is said of a lost host that has machines which keep data.
const KEPT_BY_LOST: &str = "those of its machines that keep data stay there, and are never made elsewhere";

/// Whether a host has machines that keep data.
fn keeps_data(view: &FleetView, host: &Name) -> bool {
    let shares = view.shares.get(host).into_iter().flatten().filter(|(_, share)| share.value.count > 0);
    let catalogs = shares.filter_map(|(catalog, _)| view.catalogs.get(catalog));
    catalogs
        .map(|catalog| &catalog.value.spec)
        .any(|spec| spec.catalog.keeps_writes() || spec.catalog.data_disk_bytes.is_some())
}

/// Why the machines of a silent host are not replaced.
fn why_kept(
    standing: Standing,
    stake: Option<&u64>,
    brake: Option<Brake>,
    has_machines: bool,
    has_names: bool,
) -> Option<String> {
    let Standing::Silent { for_ms, reach } = standing else { return None };
    let Some(lost_after_ms) = stake else {
        let text = match has_names {
            true => {
                "its machines with names of the fleet run on while it is isolated (on_isolation = keep), so that others get the names only if \
                 it is declared dead; machines that keep data are never made elsewhere"
            }
            false => "its machines keep data, and are never made elsewhere",
        };
        return has_machines.then(|| text.to_owned());
    };
    if for_ms < *lost_after_ms {
        let (now, then) = (for_ms / 1000, lost_after_ms / 1000);
        return Some(format!("it has been silent for {now} s, and counts as lost after {then} s"));
    }
    Some(match (brake, reach) {
        (Some(brake), _) => brake.to_string(),
        (None, Reach::Answers) => {
            "its daemon answers another host: only its connection to etcd is broken".into()
        }
        (None, Reach::Unknown) => "other hosts are asked whether it answers them".into(),
        (None, Reach::Unreachable) => "no other host has space for its machines".into(),
    })
}

/// What has become of a rollout.
fn progress(rollout: &RolloutRecord) -> String {
    match rollout.state {
        FleetRolloutState::Prefetch => "begins: its hosts bring the version".into(),
        FleetRolloutState::Running if rollout.at_once => "goes to all hosts at once".into(),
        FleetRolloutState::Running => format!("goes on with wave {}", rollout.wave.saturating_add(1)),
        FleetRolloutState::Paused => "is paused".into(),
        FleetRolloutState::Halted => {
            format!("has halted: {}", rollout.why.as_deref().unwrap_or("nobody has said why"))
        }
        FleetRolloutState::Aborted => "was aborted".into(),
        FleetRolloutState::Done => "has reached all hosts".into(),
    }
}

/// What was told.
#[derive(Debug, Default)]
pub(super) struct Reports {
    braked: bool,
    reached: BTreeSet<Name>,
    lost: BTreeSet<Name>,
    unplaced: BTreeMap<Name, u64>,
    /// Rollouts: generation, state and wave.
    rollouts: BTreeMap<Name, (u64, FleetRolloutState, u32)>,
}

impl Reports {
    /// What is to be told now.
    pub(super) fn news(
        &mut self,
        plan: &Plan,
        liveness: &Liveness,
        view: &FleetView,
        now: Moment,
    ) -> Vec<PlacerEvent> {
        let mut news = Vec::new();
        let over =
            plan.stakes.iter().filter_map(|(host, lost_after_ms)| match liveness.standing(host, now) {
                Standing::Silent { for_ms, reach } if for_ms >= *lost_after_ms => Some((host, reach)),
                _ => None,
            });
        let over: Vec<(&Name, Reach)> = over.collect();
        let brake = liveness.brake(now).filter(|_| !over.is_empty());
        if self.braked != brake.is_some() {
            self.braked = brake.is_some();
            let text = match brake {
                Some(brake) => {
                    format!("the machines of {} silent hosts are not replaced: {brake}", over.len())
                }
                None => "silent hosts may count as lost again".into(),
            };
            news.push(PlacerEvent { host: None, catalog: None, text });
        }
        let reached = over.iter().filter(|(_, reach)| *reach == Reach::Answers);
        let reached: BTreeSet<Name> = reached.map(|(host, _)| (*host).clone()).collect();
        for host in reached.difference(&self.reached) {
            let text = format!(
                "the machines of host '{host}' are not replaced: it has no lease, but answers another host"
            );
            news.push(PlacerEvent { host: Some(host.clone()), catalog: None, text });
        }
        // An answer that counts no more is no news, as long as the host is silent.
        self.reached.retain(|host| plan.stakes.contains_key(host));
        self.reached.extend(reached);
        for host in plan.lost.difference(&self.lost) {
            let mut text = format!("host '{host}' counts as lost: its machines are placed on other hosts");
            if keeps_data(view, host) {
                text += "; ";
                text += KEPT_BY_LOST;
            }
            news.push(PlacerEvent { host: Some(host.clone()), catalog: None, text });
        }
        self.lost.retain(|host| matches!(liveness.standing(host, now), Standing::Silent { .. }));
        self.lost.extend(plan.lost.iter().cloned());
        self.tell_unplaced(plan, &mut news);
        self.tell_rollouts(view, &mut news);
        news
    }

    fn tell_rollouts(&mut self, view: &FleetView, news: &mut Vec<PlacerEvent>) {
        self.rollouts.retain(|catalog, _| view.rollouts.contains_key(catalog));
        for (catalog, rollout) in &view.rollouts {
            let rollout = &rollout.value;
            let is = (rollout.generation, rollout.state, rollout.wave);
            let was = self.rollouts.get(catalog);
            // One that was over before this placer began is no news.
            if was == Some(&is) || (was.is_none() && !rollout.is_open()) {
                continue;
            }
            self.rollouts.insert(catalog.clone(), is);
            let text = format!("the rollout of {} {}", rollout.to, progress(rollout));
            news.push(PlacerEvent { host: None, catalog: Some(catalog.clone()), text });
        }
    }

    fn tell_unplaced(&mut self, plan: &Plan, news: &mut Vec<PlacerEvent>) {
        let mut before = std::mem::take(&mut self.unplaced);
        for unplaced in &plan.unplaced {
            if before.remove(&unplaced.catalog) != Some(unplaced.machines) {
                let (catalog, text) = (Some(unplaced.catalog.clone()), unplaced.to_string());
                news.push(PlacerEvent { host: None, catalog, text });
            }
            self.unplaced.insert(unplaced.catalog.clone(), unplaced.machines);
        }
        for catalog in before.into_keys() {
            let text = format!("all machines of catalog '{catalog}' are placed");
            news.push(PlacerEvent { host: None, catalog: Some(catalog), text });
        }
    }
}
