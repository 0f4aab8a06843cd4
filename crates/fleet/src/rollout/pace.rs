//! The next step of a rollout: whether it halts, goes on with the next wave or ends, which hosts get the version, and how many of their
//! machines may be unavailable.
//!
//! Owns these rules. Invariant: no host gets the version beyond the wave, and none whose machines `min_ready` needs, by what hosts have
//! reported.

use super::tracker::Tracker;
use super::{has_carried_out, is_done, is_lazy};
use crate::Moment;
use crate::records::{CatalogRecord, CatalogStatus, RolloutRecord, ShareRecord, VersionName};
use crate::rendezvous::score;
use jiff::Timestamp;
use spillway_api::{DEADLINE_SECONDS_DEFAULT, FleetRolloutState, Name, RolloutStrategy};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// A host that has machines of the catalog.
pub(crate) struct Member<'a> {
    pub(crate) name: &'a Name,
    pub(crate) is_alive: bool,
    /// Whether it gives its machines up, and has the version: it counts among the hosts of the waves until they are gone. Nobody counts on
    /// its machines, so that it may restart them as it likes.
    pub(crate) is_leaving: bool,
    pub(crate) share: &'a ShareRecord,
    /// Number of machines that it is to have from now on.
    pub(crate) count: u32,
    pub(crate) status: Option<&'a CatalogStatus>,
}

/// All that a step depends on.
pub(crate) struct Scene<'a> {
    pub(crate) catalog: &'a CatalogRecord,
    /// The rollout of the version that the catalog is to have, if it has a record.
    pub(crate) record: Option<&'a RolloutRecord>,
    pub(crate) tracker: Option<&'a Tracker>,
    pub(crate) members: Vec<Member<'a>>,
    /// Hosts that count as lost, with their shares.
    pub(crate) lost: Vec<(&'a Name, &'a ShareRecord)>,
    /// Hosts that have machines and are no members, lost ones among them, with their shares, unless those cannot be read: nobody waits for
    /// them, and others may be about to get what they have.
    pub(crate) apart: Vec<(&'a Name, Option<&'a ShareRecord>)>,
    /// A host that is about to get its first machines. It is a member once it has its share.
    pub(crate) raised: Option<&'a Name>,
    /// Machines that no host has space for. None count if a host refuses the catalog: perhaps no host can make them with the version before.
    pub(crate) unplaced: u64,
    /// Whether a share is being written, be it of a host that is no member any more: it may be about to get the version.
    pub(crate) is_busy: bool,
    pub(crate) now: Moment,
}

/// What is to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Steps {
    /// Members whose shares get the version that is rolled out, or keep it, with the most machines that may be unavailable.
    pub(crate) shares: BTreeMap<usize, Option<u32>>,
    /// The record as it is to become. Its times are left to who writes it.
    pub(crate) record: Option<RolloutRecord>,
    /// What the rollout waits for.
    pub(crate) waits: Option<String>,
    /// Time after which it halts, in milliseconds.
    pub(crate) next_in_ms: Option<u64>,
}

/// Decides the next step.
pub(crate) fn decide(scene: &Scene<'_>) -> Steps {
    let Some(record) = scene.record else { return begin(scene) };
    let Some(tracker) = scene.tracker else { return reopen(scene, record) };
    let pace = Pace { scene, record, tracker, to: &record.to };
    match record.state {
        FleetRolloutState::Prefetch => pace.prefetch(),
        FleetRolloutState::Running => pace.run(),
        FleetRolloutState::Paused | FleetRolloutState::Halted | FleetRolloutState::Aborted => {
            Steps::default()
        }
        FleetRolloutState::Done => reopen(scene, record),
    }
}

/// Makes the record of a rollout that nobody has begun: somebody else has changed the catalog.
fn begin(scene: &Scene<'_>) -> Steps {
    let to = VersionName::of_catalog(scene.catalog);
    let mut others: Vec<(VersionName, u64)> = Vec::new();
    let apart = scene.apart.iter().filter_map(|(_, share)| *share);
    let shares = scene.members.iter().map(|member| member.share).chain(apart);
    for share in shares.filter(|share| !to.is_in(share, scene.catalog)) {
        let (has, count) = (share.version_name(scene.catalog), u64::from(share.count));
        match others.iter_mut().find(|(other, _)| *other == has) {
            Some((_, all)) => *all += count,
            None => others.push((has, count)),
        }
    }
    let Some((from, _)) = others.into_iter().max_by_key(|(_, count)| *count) else { return Steps::default() };
    let record = RolloutRecord {
        from,
        to,
        generation: scene.catalog.generation,
        state: FleetRolloutState::Prefetch,
        why: None,
        wave: 0,
        hosts: 0,
        at_once: false,
        max_failed: 0,
        tolerated: 0,
        deadline_seconds: DEADLINE_SECONDS_DEFAULT,
        resumes: 0,
        since: Timestamp::UNIX_EPOCH,
        changed: Timestamp::UNIX_EPOCH,
    };
    Steps { record: Some(record), ..Steps::default() }
}

/// Goes on if a host has another version although the rollout was done: it was drained, or silent.
fn reopen(scene: &Scene<'_>, record: &RolloutRecord) -> Steps {
    let is_whole = scene.members.iter().all(|member| record.to.is_in(member.share, scene.catalog));
    if record.state != FleetRolloutState::Done || is_whole {
        return Steps::default();
    }
    Steps {
        // Whoever has the version is done: it was given in an earlier wave.
        record: Some(RolloutRecord {
            state: FleetRolloutState::Running,
            wave: record.wave.saturating_add(1),
            hosts: number(scene.members.len()),
            ..record.clone()
        }),
        ..Steps::default()
    }
}

fn number(hosts: usize) -> u32 {
    u32::try_from(hosts).unwrap_or(u32::MAX)
}

struct Pace<'a> {
    scene: &'a Scene<'a>,
    record: &'a RolloutRecord,
    tracker: &'a Tracker,
    to: &'a VersionName,
}

impl Pace<'_> {
    fn to_state(&self, state: FleetRolloutState) -> Steps {
        Steps { record: Some(RolloutRecord { state, why: None, ..self.record.clone() }), ..Steps::default() }
    }

    fn halt(&self, why: String) -> Steps {
        let (state, why) = (FleetRolloutState::Halted, Some(why));
        Steps { record: Some(RolloutRecord { state, why, ..self.record.clone() }), ..Steps::default() }
    }

    fn is_started(&self, member: &Member<'_>) -> bool {
        self.to.is_in(member.share, self.scene.catalog)
    }

    fn has_version(&self, member: &Member<'_>) -> bool {
        let status = member.status;
        let brought = status.and_then(|status| status.next.as_ref());
        self.is_started(member)
            || status.is_some_and(|status| self.to.is_taken(status))
            || brought.is_some_and(|next| next.is_here && next.of == *self.to)
    }

    /// Why a host cannot get the version.
    fn no_version(&self) -> Option<String> {
        self.scene.members.iter().filter(|member| !self.is_started(member)).find_map(|member| {
            let next = member.status?.next.as_ref().filter(|next| next.of == *self.to)?;
            let why = next.failed.as_ref()?;
            Some(format!("host '{}' cannot get {}: {why}", member.name, self.to))
        })
    }

    /// What a host waits for to get the version, if it has said that.
    fn why_missing<'m>(&self, member: &Member<'m>) -> Option<&'m str> {
        let next = member.status?.next.as_ref().filter(|next| next.of == *self.to)?;
        next.waits.as_deref()
    }

    fn prefetch(&self) -> Steps {
        if let Some(why) = self.no_version() {
            return self.halt(why);
        }
        let members = self.scene.members.iter();
        let mut missing = members.filter(|member| member.is_alive && !self.has_version(member));
        let Some(first) = missing.next() else {
            return match self.unreached() {
                Some(why) => self.waiting(Steps { waits: Some(why), ..Steps::default() }),
                None => self.begin_waves(),
            };
        };
        let waits = match missing.clone().count() {
            0 => format!("host '{}' does not have {} yet", first.name, self.to),
            more => format!("host '{}' and {more} more do not have {} yet", first.name, self.to),
        };
        // Of those that say why they wait, the first.
        let said = |member: &Member<'_>| Some(format!(" ('{}': {})", member.name, self.why_missing(member)?));
        let waits = waits + &std::iter::once(first).chain(missing).find_map(said).unwrap_or_default();
        self.waiting(Steps { waits: Some(waits), ..Steps::default() })
    }

    /// Begins the waves. Hosts that have the version already, of a rollout that is resumed, first get batches that may be.
    fn begin_waves(&self) -> Steps {
        let steps = self.allot(0);
        if steps.shares.is_empty() && !self.scene.is_busy {
            let Scene { members, apart, .. } = self.scene;
            // Somebody who resumes it has seen which hosts are left.
            let left = if self.record.resumes == 0 { apart.len() } else { 0 };
            let (state, hosts) = (FleetRolloutState::Running, number(members.len() + left));
            let record = RolloutRecord { state, hosts, why: None, ..self.record.clone() };
            return Steps { record: Some(record), ..Steps::default() };
        }
        self.waiting(Steps { waits: Some("shares are being written".into()), ..steps })
    }

    /// Halts what waits for too long. Where there are no machines nothing can make progress.
    fn waiting(&self, steps: Steps) -> Steps {
        let deadline_ms = u64::from(self.record.deadline_seconds) * 1000;
        let waited_ms = self.scene.now.since_ms(self.tracker.moved);
        let is_nowhere = self.scene.members.is_empty() && self.scene.apart.is_empty();
        if self.record.at_once || is_nowhere {
            return steps;
        }
        if waited_ms >= deadline_ms {
            let why = steps.waits.as_deref().unwrap_or("nothing is known of its hosts");
            return self.halt(format!("no progress in {} s: {why}", self.record.deadline_seconds));
        }
        let left_ms = deadline_ms - waited_ms;
        Steps { next_in_ms: Some(steps.next_in_ms.map_or(left_ms, |next| next.min(left_ms))), ..steps }
    }

    fn run(&self) -> Steps {
        if let Some(why) = self.fault().filter(|_| !self.record.at_once) {
            return self.halt(why);
        }
        let members = &self.scene.members;
        let started = members.iter().filter(|member| self.is_started(member)).count();
        let is_undone =
            |member: &&Member<'_>| self.is_started(member) && !self.tracker.done.contains(member.name);
        let undone = members.iter().find(is_undone);
        let waves = &self.scene.catalog.spec.fleet.waves;
        if self.scene.is_busy {
            return self
                .waiting(Steps { waits: Some("shares are being written".into()), ..Steps::default() });
        }
        if undone.is_none() && started == members.len() {
            return match self.unreached().or_else(|| self.unspread()) {
                Some(why) => self.waiting(Steps { waits: Some(why), ..Steps::default() }),
                None => self.to_state(FleetRolloutState::Done),
            };
        }
        if undone.is_none() && started >= self.record.most_hosts(waves, members.len()) {
            let mut next = RolloutRecord { wave: self.record.wave + 1, ..self.record.clone() };
            while next.most_hosts(waves, members.len()) <= started {
                next.wave += 1;
            }
            return Steps { record: Some(next), ..Steps::default() };
        }
        let free = self.record.most_hosts(waves, members.len()).saturating_sub(started);
        let mut steps = self.allot(free);
        let nexts = [steps.next_in_ms, self.young_ms()];
        steps.next_in_ms = nexts.into_iter().flatten().min();
        steps.waits = match undone {
            Some(member) => Some(self.why_undone(member)),
            None => steps.waits.or_else(|| self.why_none_is_next()),
        };
        self.waiting(steps)
    }

    /// Why there is more to come although all members are through: otherwise hosts that get machines next would get an untried version,
    /// all of them at once.
    fn unreached(&self) -> Option<String> {
        let Scene { members, apart, raised, unplaced, .. } = self.scene;
        if self.record.at_once {
            return None;
        }
        if let Some(name) = raised {
            return Some(format!("host '{name}' is about to get its first machines"));
        }
        // A catalog that is to have no machines has none to try it with, and nobody gets any.
        let is_wanted = self.scene.catalog.spec.catalog.count > 0;
        if let Some((name, _)) = apart.first().filter(|_| members.is_empty() && is_wanted) {
            return Some(format!(
                "no host keeps its machines: host '{name}' is to give them up, is lost, or has a share that cannot be read"
            ));
        }
        let is_nowhere = *unplaced > 0 && members.is_empty();
        is_nowhere.then(|| format!("its {unplaced} machines are on no host"))
    }

    /// The same if only hosts of this wave are left: machines of those that have gone, or are to, would all begin with the version elsewhere.
    fn unspread(&self) -> Option<String> {
        let (known, reached) = (self.record.hosts as usize, self.scene.members.len());
        let most = self.record.most_hosts(&self.scene.catalog.spec.fleet.waves, known);
        let is_open = self.scene.unplaced > 0 && most < known && reached < known;
        is_open.then(|| {
            let (to, unplaced) = (self.to, self.scene.unplaced);
            format!("{reached} of {known} hosts have {to}, and {unplaced} machines are on no host")
        })
    }

    /// Why the rollout halts.
    fn fault(&self) -> Option<String> {
        if let Some(why) = self.no_version() {
            return Some(why);
        }
        let is_hit = |(name, share): &&(&Name, &ShareRecord)| {
            self.to.is_in(share, self.scene.catalog) && !self.tracker.done.contains(*name)
        };
        if let Some((name, _)) = self.scene.lost.iter().find(is_hit) {
            return Some(format!("host '{name}' was lost before its machines were ready with {}", self.to));
        }
        let mut failed = 0;
        let mut first = None;
        for member in self.scene.members.iter().filter(|member| self.is_started(member)) {
            let Some(status) = member.status else { continue };
            let is_known = member.is_alive && self.young_ms().is_none();
            let refuses = is_known && status.refuses_version(self.to, member.share);
            if let Some(why) = status.refused.as_ref().filter(|_| refuses) {
                return Some(format!("host '{}' refuses {}: {why}", member.name, self.to));
            }
            let before = self.tracker.failed_before.get(member.name).copied().unwrap_or(0);
            let here = if self.to.is_taken(status) { status.failed.saturating_sub(before) } else { 0 };
            failed += u64::from(here);
            first = first.or(Some(member.name).filter(|_| here > 0));
        }
        let first = first.filter(|_| failed > u64::from(self.record.most_failed()))?;
        Some(format!("{failed} machines have failed with {}, the first of them on host '{first}'", self.to))
    }

    /// For how long what hosts refuse may be from before the rollout began, or was resumed, in milliseconds.
    fn young_ms(&self) -> Option<u64> {
        self.tracker.young_ms(self.scene.now)
    }

    fn why_undone(&self, member: &Member<'_>) -> String {
        let (name, to) = (member.name, self.to);
        match member.status {
            _ if !member.is_alive => format!("host '{name}' is silent"),
            Some(status) if to.is_taken(status) => {
                let CatalogStatus { updated, count, failed, .. } = status;
                let failed = if *failed > 0 { format!(", and {failed} have failed") } else { String::new() };
                format!("host '{name}' has {updated} of {count} machines ready with {to}{failed}")
            }
            Some(CatalogStatus { refused: Some(why), .. }) => {
                format!("host '{name}' refuses its share: {why}")
            }
            Some(CatalogStatus { waiting: Some(why), .. }) => format!("host '{name}' waits: {why}"),
            _ => format!("host '{name}' has not begun with {to}"),
        }
    }

    fn why_none_is_next(&self) -> Option<String> {
        let member = self.scene.members.iter().find(|member| !self.is_started(member))?;
        let (name, to) = (member.name, self.to);
        Some(match member.status.and_then(|status| status.refused.as_ref()) {
            _ if !member.is_alive => format!("host '{name}' is silent"),
            _ if !self.has_version(member) => match self.why_missing(member) {
                Some(why) => format!("host '{name}' does not have {to} yet: {why}"),
                None => format!("host '{name}' does not have {to} yet"),
            },
            Some(why) => format!("host '{name}' refuses its share: {why}"),
            None => format!("host '{name}' is about to get {to}"),
        })
    }

    /// How many of so many ready machines may be restarted. Without a limit there is nothing to count. It is less than 0 if some are missing:
    /// those that come back are no room for others then.
    fn spare(&self, ready: u64) -> i64 {
        match self.scene.catalog.spec.fleet.min_ready {
            0 => i64::MAX,
            least => i64::try_from(ready).unwrap_or(i64::MAX).saturating_sub(least.into()),
        }
    }

    /// Gives the version to so many further hosts at most, and lets all that have it make as many machines unavailable as `min_ready`
    /// leaves.
    fn allot(&self, free: usize) -> Steps {
        let all = || self.scene.members.iter().enumerate();
        let members = || all().filter(|(_, member)| !member.is_leaving);
        let min_ready = self.scene.catalog.spec.fleet.min_ready;
        let alive = members().map(|(_, member)| member).filter(|member| member.is_alive);
        // Those that are surplus now go first, and are ready no longer.
        let ready: u64 =
            alive.map(|of| u64::from(of.status.map_or(0, |status| status.ready.min(of.count)))).sum();
        let mut spare = self.spare(ready);
        let mut steps = Steps::default();
        let held = all().filter(|(_, member)| member.is_leaving && member.share.batch.is_some());
        steps.shares.extend(held.map(|(n, _)| (n, None)));
        let runs = |member: &Member<'_>| self.is_started(member) && member.share.batch != Some(0);
        // What nobody knows to have ended, and nobody knows to have begun: it holds nobody, and nobody gets more because of it.
        let mut unsettled = 0;
        for (_, member) in members().filter(|(_, member)| !runs(member) && min_ready > 0) {
            // What it was told before it has perhaps done, and not reported.
            if let Some(left_ms) = self.tracker.unsettled_ms(member.name, self.scene.now) {
                let exposed = self.exposed(member, u32::MAX);
                match self.tracker.has_stopped(member.name) {
                    true => spare = spare.saturating_sub_unsigned(exposed),
                    false => unsettled += exposed,
                }
                steps.next_in_ms = Some(steps.next_in_ms.map_or(left_ms, |next| next.min(left_ms)));
            }
        }
        for (n, member) in members().filter(|(_, member)| runs(member)) {
            let exposed = self.exposed(member, member.share.batch.unwrap_or(u32::MAX));
            let fits = spare >= 0 && exposed <= spare.unsigned_abs();
            let is_done = is_done(self.scene.catalog, self.record, member.share, member.status);
            if !fits && !is_done && !self.takes_none(member) {
                steps.shares.insert(n, Some(0));
            }
            spare = spare.saturating_sub_unsigned(exposed);
            // A larger batch of before, of another version, may still be in progress.
            if let Some(left_ms) =
                self.tracker.unsettled_ms(member.name, self.scene.now).filter(|_| min_ready > 0)
            {
                unsettled += self.exposed(member, u32::MAX).saturating_sub(exposed);
                steps.next_in_ms = Some(steps.next_in_ms.map_or(left_ms, |next| next.min(left_ms)));
            }
        }
        if spare > 0 {
            spare = spare.saturating_sub_unsigned(unsettled).max(0);
        }
        for (n, member) in members() {
            let is_settled =
                self.tracker.unsettled_ms(member.name, self.scene.now).is_none() || min_ready == 0;
            if !self.is_started(member) || runs(member) || !is_settled {
                continue;
            }
            let batch = self.batch_within(member, spare);
            if batch != Some(0) {
                spare = spare.saturating_sub_unsigned(self.exposed(member, batch.unwrap_or(u32::MAX)));
                steps.shares.insert(n, batch);
            }
        }
        self.give(free, ready, spare, &mut steps);
        steps
    }

    /// Gives the version to so many further hosts at most. `ready`: machines that are ready. `spare`: how many of them may be restarted.
    fn give(&self, mut free: usize, ready: u64, mut spare: i64, steps: &mut Steps) {
        let min_ready = self.scene.catalog.spec.fleet.min_ready;
        let members = self.scene.members.iter().enumerate();
        let mut next: Vec<(usize, &Member<'_>)> =
            members.filter(|(_, of)| !of.is_leaving && self.is_next(of)).collect();
        let to = self.to.to_string();
        // One that refuses something is perhaps not well: it is no host to try a version on first.
        let refuses = |member: &Member<'_>| member.status.is_some_and(|status| status.refused.is_some());
        next.sort_by_key(|(_, member)| (refuses(member), Reverse(score(&to, member.name.as_str()))));
        for (n, member) in next {
            if free == 0 {
                break;
            }
            let batch = self.batch_within(member, spare);
            // On the way back, what starts anyway takes the version at once, and the host says what is left to restart. So it does if there is
            // no room at all: perhaps those that are not ready become so with this version.
            let starts = |status: &CatalogStatus| status.count > status.ready.saturating_add(status.off);
            let starts = spare < 0 && member.status.is_some_and(starts);
            if batch == Some(0) && !self.record.at_once && !starts {
                steps.waits.get_or_insert_with(|| {
                    format!(
                        "{ready} machines are ready, and {min_ready} are to stay so (min_ready): host '{}' can restart none",
                        member.name
                    )
                });
                continue;
            }
            free -= 1;
            spare = spare.saturating_sub_unsigned(self.exposed(member, batch.unwrap_or(u32::MAX)));
            steps.shares.insert(n, batch);
        }
    }

    /// Whether a host can get the version now.
    fn is_next(&self, member: &Member<'_>) -> bool {
        // A version that it has not taken may be why it refuses, and another one mends that.
        let has = member.share.version_name(self.scene.catalog);
        let refuses = member.status.is_some_and(|status| status.refused.is_some() && has.is_taken(status));
        let has_version = self.record.at_once || self.has_version(member) && !refuses;
        !self.is_started(member) && has_version && member.is_alive
    }

    /// The largest batch of a host with which no more ready machines become unavailable than this; none: as the strategy says. If there is less
    /// than no room, the host restarts none.
    fn batch_within(&self, member: &Member<'_>, spare: i64) -> Option<u32> {
        if self.takes_none(member) {
            return None;
        }
        let Ok(spare) = u64::try_from(spare) else { return Some(0) };
        if self.exposed(member, u32::MAX) <= spare {
            return None;
        }
        let most = u32::try_from(spare).unwrap_or(u32::MAX);
        let away = member.status.map_or(0, |status| self.away(status));
        // A batch of which so many are unavailable already takes only the rest.
        let fits = [most.saturating_add(away), most];
        let fits = fits.into_iter().find(|batch| self.exposed(member, *batch) <= spare);
        Some(fits.unwrap_or(0))
    }

    /// Machines that are not ready although they should be, and that hold places of the batch for certain.
    fn away(&self, status: &CatalogStatus) -> u32 {
        let CatalogStatus { count, ready, off, claimed, failed, .. } = *status;
        let others = claimed.saturating_add(failed.min(self.record.most_failed()));
        count.saturating_sub(ready).saturating_sub(off).saturating_sub(others)
    }

    /// Whether this rollout makes no ready machine of a host unavailable, whatever its batch is and whatever else happens there.
    fn takes_none(&self, member: &Member<'_>) -> bool {
        let Some(status) = member.status.filter(|_| member.is_alive) else { return true };
        let has_begun = has_carried_out(self.scene.catalog, member.share, status);
        let is_through = match has_begun {
            true => self.is_started(member) && self.tracker.done.contains(member.name),
            false => self.tracker.idle.contains(member.name),
        };
        is_lazy(self.scene.catalog) || is_through || status.ready == 0
    }

    /// Ready machines of a host that this rollout may make unavailable at any time, with such a batch.
    fn exposed(&self, member: &Member<'_>, batch: u32) -> u64 {
        let Some(status) = member.status.filter(|_| !self.takes_none(member)) else { return 0 };
        let has_begun = has_carried_out(self.scene.catalog, member.share, status);
        let CatalogStatus { count, ready, off, updated, spared, failed, .. } = *status;
        let batch = match self.scene.catalog.strategy {
            RolloutStrategy::Batch(machines) => machines.min(batch),
            RolloutStrategy::Now | RolloutStrategy::NextStart => batch,
        };
        let (left, goes) = match self.is_started(member) && has_begun {
            // A claimed machine takes the version when it is released, and is not restarted for it.
            true => {
                let left = count.saturating_sub(updated).saturating_sub(spared);
                (left, ready.saturating_sub(updated.saturating_sub(off)))
            }
            // Which of them have the version that comes is not known, nor which are claimed then.
            false => (count, ready),
        };
        let restarted = batch.min(left).saturating_sub(self.away(status));
        let failing = self.record.most_failed().saturating_sub(failed);
        restarted.saturating_add(if left > 0 { failing } else { 0 }).min(goes).into()
    }
}
