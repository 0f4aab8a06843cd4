//! Claims of machines: a machine is somebody's for a while. Owns the rules of which machine is given away, and for how long.
//!
//! Invariant: a machine is claimed once, whoever asks at the same time.

use super::closing::require_open;
use super::desired_state::{ClaimRecord, DesiredState};
use super::host::SpaceWatch;
use super::tag::if_match;
use super::views::{MachineReader, View};
use crate::catalogs::{Catalogs, whole};
use crate::error::HostError;
use crate::events::Events;
use crate::idempotency::IdempotentRequest;
use crate::images::check_none_committed;
use crate::store::{Changes, Objects, Revision};
use serde::{Deserialize, Serialize};
use spillway_api::{
    CatalogSpec, ErrorCode, EventKind, Machine, MachineDetails, Name, NewClaim, Phase, Power, Selector,
};
use std::collections::BTreeMap;
use std::sync::Arc;

const MOST_OWNER_CHARACTERS: usize = 128;
const MOST_CLAIM_LABELS: usize = 16;
const MOST_LABEL_CHARACTERS: usize = 256;

/// Who claims a machine.
#[derive(Clone, Debug)]
pub struct Claimant {
    /// For people: who asks, and from where.
    pub who: String,
    /// The owner of the claim, if the claim does not say it.
    pub owner: String,
    /// It is made once with this key.
    pub key: Option<IdempotentRequest>,
}

/// Which claim of a machine is renewed or released: whichever there is, unless more is said.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClaimSelector<'a> {
    /// The claim of this id alone.
    pub id: Option<&'a str>,
    /// Only if the machine still has this tag.
    pub expected: Option<Revision>,
}

/// What a claim with a key has made.
#[derive(Serialize, Deserialize)]
struct KeyedClaim {
    machine: Name,
    claim: String,
}

/// What became of trying to claim a machine.
enum ClaimAttempt {
    Claimed,
    /// Somebody was faster.
    Conflict,
    /// The key had made a claim already.
    Repeated(KeyedClaim),
}

/// Gives machines away, and takes them back.
#[derive(Clone)]
pub struct Claims {
    reader: MachineReader,
    catalogs: Catalogs,
    objects: Objects,
    events: Events,
    space: Arc<SpaceWatch>,
    /// How long a claim lasts of which neither it nor its catalog says that; `None`: until it is released.
    ttl_seconds: Option<u32>,
}

impl Claims {
    /// Of these machines.
    pub(super) fn new(
        reader: MachineReader,
        catalogs: Catalogs,
        objects: Objects,
        events: Events,
        space: Arc<SpaceWatch>,
        ttl_seconds: Option<u32>,
    ) -> Claims {
        Claims { reader, catalogs, objects, events, space, ttl_seconds }
    }

    /// A machine of a catalog becomes somebody's. `true`: it was so already, by an earlier request with the same key.
    pub fn claim(
        &self,
        catalog: &Name,
        claim: &NewClaim,
        by: &Claimant,
    ) -> Result<(MachineDetails, bool), HostError> {
        check_new_claim(claim)?;
        if let Some(key) = &by.key
            && let Some(made) = self.objects.change(|changes| key.made::<KeyedClaim>(changes))?
        {
            return Ok((self.repeated_claim(&made)?, true));
        }
        let spec = self.catalogs.get(catalog)?.spec;
        check_claimable(catalog, &spec)?;
        if self.space.is_nearly_full(&spec)? {
            let message =
                format!("the store of the overflow of '{catalog}' is nearly full: make room there first");
            return Err(HostError::new(ErrorCode::Exhausted, message));
        }
        let of = Selector { catalog: Some(catalog.clone()), ..Selector::default() };
        let mut views = self.reader.views(&of)?;
        let free = |view: &View| view.wanted.claim.is_none() && !view.wanted.drained;
        let claimed = views.iter().filter(|view| view.wanted.claim.is_some()).count();
        let starting =
            views.iter().filter(|view| free(view) && view.wanted.power == Power::On && !is_ready(view));
        let starting = starting.count();
        // One that was started before its catalog lost its data disks has its own still.
        let has_data = |view: &View| {
            let mut pending = view.status.run.iter().flat_map(|run| &run.pending);
            is_ready(view) && pending.any(|next| next.setting == "data_disk_bytes")
        };
        views.retain(|view| free(view) && (claim.any || is_ready(view)) && !has_data(view));
        // Those first that are ready, and of these those that have the newest version; then those that start, and last those
        // that have failed to.
        views.sort_by_key(|view| {
            let outdated = view.status.run.as_ref().is_none_or(|run| run.outdated);
            let failed = view.status.phase == Phase::Failed;
            (!is_ready(view), failed, view.wanted.power == Power::Off, outdated, view.machine.number)
        });
        for view in views {
            match self.try_to_claim(&view, claim, by)? {
                ClaimAttempt::Claimed => {
                    let object = format!("machine/{}", view.machine.name);
                    self.events.raise(EventKind::Claimed, &object, format!("it is claimed by {}", by.who));
                    return Ok((self.reader.get(&view.machine.name)?, false));
                }
                ClaimAttempt::Conflict => {}
                ClaimAttempt::Repeated(made) => return Ok((self.repeated_claim(&made)?, true)),
            }
        }
        let message = format!(
            "no machine of '{catalog}' is free and ready: {claimed} are claimed, {starting} start: wait, or raise its warm"
        );
        Err(HostError::new(ErrorCode::Exhausted, message))
    }

    /// The machine of a claim that a key has made, if that claim still holds.
    fn repeated_claim(&self, made: &KeyedClaim) -> Result<MachineDetails, HostError> {
        let machine = &made.machine;
        match self.reader.get(machine) {
            Ok(found) if found.claim.as_ref().is_some_and(|claim| claim.id == made.claim) => Ok(found),
            Err(e) if e.code != ErrorCode::NotFound => Err(e),
            _ => {
                let message = format!(
                    "the claim that this Idempotency-Key has made, of {machine}, is over: take a new key for a new claim"
                );
                Err(HostError::new(ErrorCode::Conflict, message))
            }
        }
    }

    /// Claims a machine, if it is still as it was seen.
    fn try_to_claim(&self, seen: &View, claim: &NewClaim, by: &Claimant) -> Result<ClaimAttempt, HostError> {
        let name = seen.machine.name.as_str();
        self.objects.change(|changes| {
            if let Some(key) = &by.key
                && let Some(made) = key.made::<KeyedClaim>(changes)?
            {
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
            if let Some(key) = &by.key {
                key.record(
                    changes,
                    &KeyedClaim { machine: seen.machine.name.clone(), claim: claimed.id.clone() },
                );
            }
            is.claim = Some(claimed);
            is.start_fresh(&spec);
            changes.put(name, &is);
            Ok(ClaimAttempt::Claimed)
        })
    }

    /// A machine is nobody's any more: it forgets, and is ready for the next one. With a claim's id only if it still has
    /// that one. `text` is what the event says.
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

    /// A claim lasts so long from now on; 0: until it is released; if nothing is said, as long as it was to last before.
    /// With a claim's id only if the machine still has that one.
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

/// What is wanted of a machine that is claimed, and its claim. With an id only if it is that one.
fn claimed_state(
    changes: &mut Changes,
    name: &Name,
    which: ClaimSelector<'_>,
) -> Result<(DesiredState, ClaimRecord), HostError> {
    if_match(changes, name, which.expected)?;
    let wanted = changes.get::<DesiredState>(name.as_str())?.map(|wanted| wanted.value);
    let claimed = wanted.and_then(|wanted| wanted.claim.clone().map(|claim| (wanted, claim)));
    let (wanted, claim) =
        claimed.ok_or_else(|| HostError::new(ErrorCode::Conflict, format!("nobody has claimed {name}")))?;
    if which.id.is_some_and(|id| claim.id != id) {
        let message = format!("that claim of {name} is over: it is somebody else's now");
        return Err(HostError::new(ErrorCode::Conflict, message));
    }
    Ok((wanted, claim))
}

/// Refuses a claim whose words cannot be.
fn check_new_claim(NewClaim { owner, labels, .. }: &NewClaim) -> Result<(), HostError> {
    let is_plain = |text: &str, most| text.chars().count() <= most && !text.chars().any(char::is_control);
    if owner.as_ref().is_some_and(|owner| owner.is_empty() || !is_plain(owner, MOST_OWNER_CHARACTERS)) {
        return Err(HostError::invalid(format!(
            "owner: 1 to {MOST_OWNER_CHARACTERS} printable characters can be"
        )));
    }
    let are_plain =
        |labels: &BTreeMap<Name, String>| labels.values().all(|v| is_plain(v, MOST_LABEL_CHARACTERS));
    if labels.len() > MOST_CLAIM_LABELS || !are_plain(labels) {
        return Err(HostError::invalid(format!(
            "labels: {MOST_CLAIM_LABELS} can be, of {MOST_LABEL_CHARACTERS} printable characters each"
        )));
    }
    Ok(())
}

/// How many run, or are to, and are nobody's; but for this one.
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

/// Refuses to give away what the next one would find as the last one has left it.
fn check_claimable(catalog: &Name, spec: &CatalogSpec) -> Result<(), HostError> {
    let refuse = |why: &str| {
        let message = format!("the machines of '{catalog}' {why}: start one by its name");
        Err(HostError::new(ErrorCode::Conflict, message))
    };
    if spec.keeps_writes() {
        return refuse("keep what is written, and a claim ends with a machine that forgets");
    }
    if spec.data_disk_bytes.is_some() {
        return refuse("have data disks, which keep what is written over every reset");
    }
    Ok(())
}
