//! Claims of machines: a claim assigns a machine to an owner for a while. Owns the rules that choose the machine, and how
//! long a claim lasts.
//!
//! Invariant: a machine has one claim at most, however many clients ask at the same time.

use super::closed_attempts::ClosedAttemptLog;
use super::closing::require_open;
use super::desired_state::{ClaimRecord, DesiredState};
use super::host::SpaceWatch;
use super::tag::check_tag;
use super::views::{MachineReader, View};
use crate::catalogs::{Catalogs, whole};
use crate::error::HostError;
use crate::events::Events;
use crate::idempotency::IdempotentRequest;
use crate::images::check_none_committed;
use crate::store::{Changes, Objects, Revision};
use crate::tags::Tag;
use serde::{Deserialize, Serialize};
use spillway_api::{
    CatalogSpec, ErrorCode, EventKind, Machine, MachineDetails, Name, NewClaim, Phase, Power, Selector,
};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;

const MOST_OWNER_CHARACTERS: usize = 128;
const MOST_CLAIM_LABELS: usize = 16;
const MOST_LABEL_CHARACTERS: usize = 256;
/// Text of the event of a release of which no client knows.
pub const UNANSWERED: &str = "it is released: the client that claimed it got no answer";

/// The client that claims a machine.
#[derive(Clone, Debug)]
pub struct Claimant {
    /// User and address of the client, for people.
    pub who: String,
    /// Owner of the claim if the request names none.
    pub owner: String,
    /// The request: the claim is made once for its key.
    pub request: IdempotentRequest,
    /// For a claim of the host's fleet: what must hold when the claim is made. Runs in the transaction that makes it.
    pub permit: Option<ClaimPermit>,
}

/// Refuses a claim, or says what is recorded with it.
#[derive(Clone)]
pub struct ClaimPermit(pub PermitCheck);

/// The check of a [`ClaimPermit`].
pub type PermitCheck = Arc<dyn Fn(&mut Changes) -> Result<FleetMark, HostError> + Send + Sync>;

impl fmt::Debug for ClaimPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimPermit").finish_non_exhaustive()
    }
}

/// What is recorded with a claim of the host's fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetMark {
    /// Epoch of the host when it made the claim.
    pub epoch: i64,
    /// Number of the attempt that made it.
    pub attempt: u64,
}

/// Selects the claim to renew or release. Without a field set, it is the current claim of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClaimSelector<'a> {
    /// Only the claim with this id.
    pub id: Option<&'a str>,
    /// Only if the machine still has this tag.
    pub expected: Option<Tag>,
}

/// The claim that a request with an idempotency key has made.
#[derive(Serialize, Deserialize)]
pub(crate) struct KeyedClaim {
    pub(super) machine: Name,
    pub(crate) claim: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) fleet: Option<FleetMark>,
}

/// Result of trying to claim one machine.
enum ClaimAttempt {
    Claimed(KeyedClaim),
    /// Another client changed the machine first.
    Conflict,
    /// A request with the same key has made a claim already.
    Repeated(KeyedClaim),
}

/// The claim of a machine has ended before its client was answered.
pub fn claim_ended(machine: &str) -> HostError {
    HostError::new(ErrorCode::Conflict, format!("{machine}: its claim has ended meanwhile"))
}

/// Claims machines for clients, and releases them.
#[derive(Clone)]
pub struct Claims {
    pub(super) reader: MachineReader,
    catalogs: Catalogs,
    pub(super) objects: Objects,
    /// Attempts that the fleet has closed.
    pub(super) closed: ClosedAttemptLog,
    events: Events,
    space: Arc<SpaceWatch>,
    /// Duration of a claim if neither the claim nor its catalog gives one; `None`: until it is released.
    ttl_seconds: Option<u32>,
}

impl Claims {
    /// Creates the claims of the machines that `reader` sees.
    pub(super) fn new(
        reader: MachineReader,
        catalogs: Catalogs,
        objects: Objects,
        events: Events,
        space: Arc<SpaceWatch>,
        ttl_seconds: Option<u32>,
    ) -> Claims {
        let closed = ClosedAttemptLog::new(objects.clone());
        Claims { reader, catalogs, objects, closed, events, space, ttl_seconds }
    }

    /// Claims a machine of a catalog. The flag is `true` if an earlier request with the same key made the claim.
    pub fn claim(
        &self,
        catalog: &Name,
        claim: &NewClaim,
        by: &Claimant,
    ) -> Result<(MachineDetails, bool), HostError> {
        check_new_claim(claim)?;
        if let Some((made, _)) = self.objects.change(|changes| made_claim(&by.request, changes))? {
            return Ok((self.repeated_claim(&made)?, true));
        }
        let spec = self.catalogs.get(catalog)?.spec;
        check_claimable(catalog, &spec)?;
        if self.space.is_nearly_full(&spec)? {
            let message =
                format!("the store of the overflow of '{catalog}' is nearly full: make space there first");
            return Err(HostError::new(ErrorCode::Exhausted, message));
        }
        let of = Selector { catalog: Some(catalog.clone()), ..Selector::default() };
        let mut views = self.reader.views(&of)?;
        let free = |view: &View| view.wanted.claim.is_none() && !view.wanted.drained;
        let claimed = views.iter().filter(|view| view.wanted.claim.is_some()).count();
        let starting =
            views.iter().filter(|view| free(view) && view.wanted.power == Power::On && !is_ready(view));
        let starting = starting.count();
        // A machine that was started under other settings of its catalog may have a disk that keeps what somebody wrote.
        let keeps = |view: &View| view.disk.as_ref().is_some_and(|disk| disk.keeps_writes || disk.has_data);
        let kept = views.iter().filter(|view| free(view) && keeps(view)).count();
        views.retain(|view| free(view) && (claim.any || is_ready(view)) && !keeps(view));
        // Order: ready machines first, those with the newest version before others; then starting machines; last those
        // that failed to start.
        views.sort_by_key(|view| {
            let outdated = view.status.run.as_ref().is_none_or(|run| run.outdated);
            let failed = view.status.phase == Phase::Failed;
            (!is_ready(view), failed, view.wanted.power == Power::Off, outdated, view.machine.number)
        });
        for view in views {
            match self.try_to_claim(&view, claim, by)? {
                ClaimAttempt::Claimed(made) => {
                    let object = format!("machine/{}", view.machine.name);
                    let text = match &claim.owner {
                        Some(owner) => format!("it is claimed for {owner} by {}", by.who),
                        None => format!("it is claimed by {}", by.who),
                    };
                    self.events.raise(EventKind::Claimed, &object, text);
                    let held = self.held(&made);
                    if held.is_err() && !by.request.has_key() {
                        // Nobody else knows of it. If the records cannot be read here either, people see it on the machine.
                        let which = ClaimSelector { id: Some(&made.claim), expected: None };
                        let _ = self.release(&made.machine, which, UNANSWERED.to_owned());
                    }
                    let machine = held?.ok_or_else(|| claim_ended(made.machine.as_str()))?;
                    return Ok((machine, false));
                }
                ClaimAttempt::Conflict => {}
                ClaimAttempt::Repeated(made) => return Ok((self.repeated_claim(&made)?, true)),
            }
        }
        let mut message =
            format!("no machine of '{catalog}' is free and ready: {claimed} are claimed, {starting} start");
        if kept > 0 {
            message += &format!(", {kept} keep their data until they are restarted");
        }
        message += match claim.any {
            true => ": wait for a release, or raise its count ('spillway catalog scale')",
            false => ": take one that is not ready and wait for it (any; --wait), or raise its warm",
        };
        Err(HostError::new(ErrorCode::Exhausted, message))
    }

    /// Returns the machine that an earlier request with this key claimed, if that claim still holds.
    fn repeated_claim(&self, made: &KeyedClaim) -> Result<MachineDetails, HostError> {
        let over = || {
            let message = format!(
                "the claim that this Idempotency-Key has made, of {}, is over: take a new key for a new claim",
                made.machine
            );
            HostError::new(ErrorCode::Conflict, message)
        };
        self.held(made)?.ok_or_else(over)
    }

    /// The machine of a claim, as long as it has this claim.
    fn held(&self, made: &KeyedClaim) -> Result<Option<MachineDetails>, HostError> {
        match self.reader.get(&made.machine) {
            Ok(found) => {
                let is_held = found.claim.as_ref().is_some_and(|claim| claim.id == made.claim);
                Ok(Some(found).filter(|_| is_held))
            }
            Err(e) if e.code == ErrorCode::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Claims a machine unless its records have changed since `seen`.
    fn try_to_claim(&self, seen: &View, claim: &NewClaim, by: &Claimant) -> Result<ClaimAttempt, HostError> {
        let name = seen.machine.name.as_str();
        self.objects.change(|changes| {
            if let Some((made, _)) = made_claim(&by.request, changes)? {
                return Ok(ClaimAttempt::Repeated(made));
            }
            let is = changes.get::<DesiredState>(name)?;
            let there = changes.get::<Machine>(name)?.is_some();
            let revision = is.as_ref().map(|wanted| wanted.revision).unwrap_or_default();
            if !there || revision != seen.revision {
                return Ok(ClaimAttempt::Conflict);
            }
            let mut is = is.map(|wanted| wanted.value).unwrap_or_default();
            require_open(changes)?;
            let fleet = by.permit.as_ref().map(|permit| (permit.0)(changes)).transpose()?;
            let spec = whole(changes, &seen.machine.catalog)?.spec;
            check_claimable(&seen.machine.catalog, &spec)?;
            match check_none_committed(changes, [&seen.machine.name]) {
                Err(committed) if committed.code == ErrorCode::Conflict => return Ok(ClaimAttempt::Conflict),
                looked => looked?,
            }
            let ttl = claim.ttl_seconds.or(spec.claim_ttl_seconds).or(self.ttl_seconds);
            let owner = claim.owner.as_deref().unwrap_or(&by.owner);
            let mut claimed = ClaimRecord::new(ttl.filter(|ttl| *ttl > 0), is.power == Power::Off, owner);
            claimed.labels = claim.labels.clone();
            let made = KeyedClaim { machine: seen.machine.name.clone(), claim: claimed.id.clone(), fleet };
            by.request.record(changes, &made);
            is.claim = Some(claimed);
            is.start_fresh(&spec);
            changes.put(name, &is);
            Ok(ClaimAttempt::Claimed(made))
        })
    }

    /// Releases a machine: it discards what was written and becomes ready for the next claim. With a claim's id, only if
    /// the machine still has that claim. `text` is the text of the event.
    pub fn release(
        &self,
        name: &Name,
        which: ClaimSelector<'_>,
        text: String,
    ) -> Result<MachineDetails, HostError> {
        let catalog = self.catalogs.get(&self.catalogs.machine(name)?.catalog)?;
        let views =
            self.reader.views(&Selector { catalog: Some(catalog.name.clone()), ..Selector::default() })?;
        let free = free(&views, Some(name));
        self.objects.change(|changes| {
            let (mut wanted, _) = claimed_state(changes, name, which)?;
            wanted.release(&catalog.spec, free);
            changes.put(name.as_str(), &wanted);
            Ok::<_, HostError>(())
        })?;
        self.events.raise(EventKind::Released, &format!("machine/{name}"), text);
        self.reader.get(name)
    }

    /// Renews a claim for `ttl_seconds` from now: 0 means until it is released, `None` as long as before. With a claim's
    /// id, only if the machine still has that claim.
    pub fn renew(
        &self,
        name: &Name,
        which: ClaimSelector<'_>,
        ttl_seconds: Option<u32>,
    ) -> Result<MachineDetails, HostError> {
        self.catalogs.machine(name)?;
        self.objects.change(|changes| {
            let (mut wanted, mut claim) = claimed_state(changes, name, which)?;
            if claim.remaining().is_some_and(|left| left.is_zero()) {
                let message = format!("the claim of {name} is over: claim a machine again");
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            claim.renew(ttl_seconds.or(claim.ttl_seconds).filter(|ttl| *ttl > 0));
            wanted.claim = Some(claim);
            changes.put(name.as_str(), &wanted);
            Ok(())
        })?;
        self.reader.get(name)
    }
}

/// Returns the desired state of a claimed machine, and its claim. Fails if the machine has no claim, or not the one with
/// this id.
fn claimed_state(
    changes: &mut Changes,
    name: &Name,
    which: ClaimSelector<'_>,
) -> Result<(DesiredState, ClaimRecord), HostError> {
    check_tag(changes, name, which.expected)?;
    let wanted = changes.get::<DesiredState>(name.as_str())?.map(|wanted| wanted.value);
    let claimed = wanted.and_then(|wanted| wanted.claim.clone().map(|claim| (wanted, claim)));
    let (wanted, claim) =
        claimed.ok_or_else(|| HostError::new(ErrorCode::Conflict, format!("nobody has claimed {name}")))?;
    if which.id.is_some_and(|id| claim.id != id) {
        let message = format!("{name} has another claim now: the one with this id has ended");
        return Err(HostError::new(ErrorCode::Conflict, message));
    }
    Ok((wanted, claim))
}

/// Returns the claim that a request with an idempotency key has made, if the key is not old or the machine still has the claim.
pub(crate) fn made_claim(
    request: &IdempotentRequest,
    changes: &mut Changes,
) -> Result<Option<(KeyedClaim, Revision)>, HostError> {
    request.made_while(changes, |changes, made: &KeyedClaim| {
        let wanted = changes.get::<DesiredState>(made.machine.as_str())?;
        Ok(wanted.and_then(|wanted| wanted.value.claim).is_some_and(|claim| claim.id == made.claim))
    })
}

/// Ids of the claims that the machines of a host have.
///
/// # Errors
/// The records cannot be read.
pub fn held_claims(objects: &Objects) -> Result<HashSet<String>, HostError> {
    let wanted = objects.list::<DesiredState>()?.into_iter();
    Ok(wanted.filter_map(|wanted| wanted.value.claim.map(|claim| claim.id)).collect())
}

/// Refuses an owner or labels that are too long or not printable.
fn check_new_claim(NewClaim { owner, labels, .. }: &NewClaim) -> Result<(), HostError> {
    let is_plain = |text: &str, most| text.chars().count() <= most && !text.chars().any(char::is_control);
    if owner.as_ref().is_some_and(|owner| owner.is_empty() || !is_plain(owner, MOST_OWNER_CHARACTERS)) {
        return Err(HostError::invalid(format!(
            "owner: 1 to {MOST_OWNER_CHARACTERS} printable characters are allowed"
        )));
    }
    let are_plain =
        |labels: &BTreeMap<Name, String>| labels.values().all(|v| is_plain(v, MOST_LABEL_CHARACTERS));
    if labels.len() > MOST_CLAIM_LABELS || !are_plain(labels) {
        return Err(HostError::invalid(format!(
            "labels: {MOST_CLAIM_LABELS} are allowed, of {MOST_LABEL_CHARACTERS} printable characters each"
        )));
    }
    Ok(())
}

/// Counts the machines that run or will run and are not claimed, except `but`.
pub(super) fn free<'a>(views: impl IntoIterator<Item = &'a View>, but: Option<&Name>) -> usize {
    let is_free = |view: &&View| {
        let wanted = &view.wanted;
        wanted.power == Power::On
            && wanted.claim.is_none()
            && !wanted.drained
            && Some(&view.machine.name) != but
    };
    views.into_iter().filter(is_free).count()
}

fn is_ready(view: &View) -> bool {
    view.wanted.power == Power::On && view.status.settled && view.status.ready
}

/// Refuses claims on a catalog whose machines keep data from one claim to the next.
fn check_claimable(catalog: &Name, spec: &CatalogSpec) -> Result<(), HostError> {
    let refuse = |why: &str| {
        let message =
            format!("the machines of '{catalog}' cannot be claimed, since they {why}: start one by its name");
        Err(HostError::new(ErrorCode::Conflict, message))
    };
    if spec.keeps_writes() {
        return refuse("keep their data, and a claim ends with a reset");
    }
    if spec.data_disk_bytes.is_some() {
        return refuse("have data disks, which keep their data at every reset");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::testing::TestHost;
    use crate::resources::budget::NO_LIMITS;
    use crate::store::failing::FailingStore;
    use serde_json::json;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Whoever has a key can repeat the request.
    #[tokio::test]
    async fn a_claim_that_cannot_be_read_is_released_if_its_request_has_no_key() {
        let is_made = Arc::<AtomicBool>::default();
        let (made, read) = (Arc::clone(&is_made), Arc::clone(&is_made));
        let is_wanted = |key: &str| key.starts_with(<DesiredState as crate::store::StoredRecord>::PREFIX);
        let host = TestHost::with_store(NO_LIMITS, |store| {
            let commits = move |transaction: &crate::store::Transaction| {
                made.store(transaction.changes.iter().any(|(key, _)| is_wanted(key)), Ordering::SeqCst);
                true
            };
            // The first read after the claim was made fails.
            let reads = move |key: &str| !(is_wanted(key) && read.swap(false, Ordering::SeqCst));
            Arc::new(FailingStore::new(store, commits).reading(reads))
        });
        host.catalog("desk", json!({ "count": 1 }));
        let space = SpaceWatch::watched(host.stores.clone(), host.shared.events.clone());
        let (reader, catalogs) = (host.reader.clone(), host.catalogs.clone());
        let (objects, events) = (host.objects.clone(), host.shared.events.clone());
        let claims = Claims::new(reader, catalogs, objects, events, space, None);
        let (desk, claim) = ("desk".parse().unwrap(), NewClaim { any: true, ..NewClaim::default() });
        let keyed = IdempotentRequest::new("ci", "claims/desk", "1", &claim);
        for (request, held) in [(IdempotentRequest::default(), 0), (keyed, 1)] {
            is_made.store(false, Ordering::SeqCst);
            let by = Claimant { who: "ci".into(), owner: "ci".into(), request, permit: None };
            assert!(claims.claim(&desk, &claim, &by).is_err());
            is_made.store(false, Ordering::SeqCst);
            assert_eq!(held_claims(&host.objects).unwrap().len(), held);
        }
    }
}
