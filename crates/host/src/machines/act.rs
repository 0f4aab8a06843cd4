//! What is asked of machines: to start, stop, restart, forget; to be somebody's for a while; to be no more. Owns the rules
//! of what may be asked; it is recorded here, and done by the machines' tasks.
//!
//! Invariant: a machine is claimed once, whoever asks at the same time.

use super::Machines;
use super::closing::is_open;
use super::tag::if_match;
use super::views::View;
use super::wanted::{Claimed, Wanted};
use crate::catalogs::whole;
use crate::error::HostError;
use crate::idempotency::Key;
use crate::images::none_is_committed;
use crate::paging::Part;
use crate::store::{Changes, Revision};
use serde::{Deserialize, Serialize};
use spillway_api::{
    Action, Catalog, CatalogSpec, ErrorCode, EventKind, MOST_NAMES, Machine, MachineAction, MachineDetails,
    Name, NewClaim, Page, Phase, Power, Selector,
};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Records written in one transaction.
pub(super) const BATCH: usize = 256;
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
    pub key: Option<Key>,
}

/// Which claim of a machine is renewed or released: whichever there is, unless more is said.
#[derive(Clone, Copy, Debug, Default)]
pub struct WhichClaim<'a> {
    /// The claim of this id alone.
    pub id: Option<&'a str>,
    /// Only if the machine still has this tag.
    pub expected: Option<Revision>,
}

/// What a claim with a key has made.
#[derive(Serialize, Deserialize)]
struct ClaimMade {
    machine: Name,
    claim: String,
}

/// What became of trying to claim a machine.
enum Tried {
    Claimed,
    /// Somebody was faster.
    Changed,
    /// The key had made a claim already.
    Before(ClaimMade),
}

impl Machines {
    /// Records what is wanted of machines; their tasks do it. The first of them, as they are now: all that are named. Each
    /// whose change was recorded is told to `note`.
    pub fn act(
        &self,
        action: &MachineAction,
        note: impl Fn(&Name),
    ) -> Result<Page<MachineDetails>, HostError> {
        let select = &action.select;
        if select.names.is_empty() && select.catalog.is_none() && select.labels.is_empty() && !select.all {
            return Err(HostError::invalid(
                "which machines? Name them, their catalog or its labels, or say all",
            ));
        }
        let catalogs: HashMap<Name, Catalog> =
            self.catalogs.list()?.into_iter().map(|catalog| (catalog.name.clone(), catalog)).collect();
        let grace = |machine: &Machine| match (action.force, action.grace_seconds) {
            (true, _) => 0,
            (false, Some(seconds)) => seconds,
            (false, None) => catalogs.get(&machine.catalog).map_or(0, |catalog| catalog.spec.grace_seconds),
        };
        let asked = |machine: &Machine, is: &Wanted| {
            if !catalogs.contains_key(&machine.catalog) {
                // An error if it cannot be read: then nobody knows what the machine keeps.
                self.shared.objects.get::<Catalog>(machine.catalog.as_str())?;
            }
            let keeps = catalogs.get(&machine.catalog).is_some_and(|c| c.spec.keeps_writes());
            if action.action == Action::Reset && keeps && !action.discard_data {
                let message = format!(
                    "{} keeps what is written: a reset throws that away: that needs discard_data",
                    machine.name
                );
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            ask(&machine.name, is, action.action, grace(machine))
        };
        // What is refused of one is refused of all, before anything is recorded.
        // Nor does one whose catalog cannot be read keep anything from all others.
        let unreadable = self.shared.objects.unreadable_names::<Catalog>();
        let unreadable: HashSet<String> =
            if select.names.is_empty() { unreadable.into_iter().collect() } else { HashSet::new() };
        let is_met = |view: &View| !unreadable.contains(view.machine.catalog.as_str());
        self.look_at(select, "", |views| {
            let mut met = views.iter().filter(|view| is_met(view));
            met.try_for_each(|view| asked(&view.machine, &view.wanted).map(drop))?;
            Ok(true)
        })?;
        self.look_at(select, "", |mut batch| {
            batch.retain(is_met);
            self.shared.objects.change(|changes| {
                for View { machine, .. } in &batch {
                    let name = machine.name.as_str();
                    if changes.get::<Machine>(name)?.is_none() {
                        return Err(HostError::not_found("machine", name, []));
                    }
                    let is = changes.get::<Wanted>(name)?.map(|wanted| wanted.value).unwrap_or_default();
                    // Written even if it is as it was: one that has failed is tried again at once.
                    changes.put(name, &asked(machine, &is)?);
                }
                match action.action {
                    Action::Start | Action::Restart => {
                        is_open(changes)?;
                        none_is_committed(changes, batch.iter().map(|view| &view.machine.name))
                    }
                    Action::Stop | Action::Reset | Action::Drain | Action::Undrain => Ok(()),
                }
            })?;
            batch.iter().for_each(|view| note(&view.machine.name));
            Ok(true)
        })?;
        self.page(select, &[], &Part { after: String::new(), most: MOST_NAMES })
    }

    /// A machine of a catalog becomes somebody's. `true`: it was so already, by an earlier request with the same key.
    pub fn claim(
        &self,
        catalog: &Name,
        claim: &NewClaim,
        by: &Claimant,
    ) -> Result<(MachineDetails, bool), HostError> {
        can_claim_so(claim)?;
        if let Some(key) = &by.key
            && let Some(made) = self.shared.objects.change(|changes| key.made::<ClaimMade>(changes))?
        {
            return Ok((self.claimed_before(&made)?, true));
        }
        let spec = self.catalogs.get(catalog)?.spec;
        can_be_claimed(catalog, &spec)?;
        if self.shared.has_no_room(&spec)? {
            let message =
                format!("the store of the overflow of '{catalog}' is nearly full: make room there first");
            return Err(HostError::new(ErrorCode::Exhausted, message));
        }
        let of = Selector { catalog: Some(catalog.clone()), ..Selector::default() };
        let mut views = self.views(&of)?;
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
                Tried::Claimed => {
                    let object = format!("machine/{}", view.machine.name);
                    self.shared.events.raise(
                        EventKind::Claimed,
                        &object,
                        format!("it is claimed by {}", by.who),
                    );
                    return Ok((self.get(&view.machine.name)?, false));
                }
                Tried::Changed => {}
                Tried::Before(made) => return Ok((self.claimed_before(&made)?, true)),
            }
        }
        let message = format!(
            "no machine of '{catalog}' is free and ready: {claimed} are claimed, {starting} start: wait, or raise its warm"
        );
        Err(HostError::new(ErrorCode::Exhausted, message))
    }

    /// The machine of a claim that a key has made, if that claim still holds.
    fn claimed_before(&self, made: &ClaimMade) -> Result<MachineDetails, HostError> {
        let machine = &made.machine;
        match self.get(machine) {
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
    fn try_to_claim(&self, seen: &View, claim: &NewClaim, by: &Claimant) -> Result<Tried, HostError> {
        let name = seen.machine.name.as_str();
        self.shared.objects.change(|changes| {
            if let Some(key) = &by.key
                && let Some(made) = key.made::<ClaimMade>(changes)?
            {
                return Ok(Tried::Before(made));
            }
            let is = changes.get::<Wanted>(name)?;
            let there = changes.get::<Machine>(name)?.is_some();
            let revision = is.as_ref().map(|wanted| wanted.revision).unwrap_or_default();
            if !there || revision != seen.revision {
                return Ok(Tried::Changed);
            }
            let mut is = is.map(|wanted| wanted.value).unwrap_or_default();
            is_open(changes)?;
            let spec = whole(changes, &seen.machine.catalog)?.spec;
            can_be_claimed(&seen.machine.catalog, &spec)?;
            match none_is_committed(changes, [&seen.machine.name]) {
                Err(committed) if committed.code == ErrorCode::Conflict => return Ok(Tried::Changed),
                looked => looked?,
            }
            let ttl = claim.ttl_seconds.or(spec.claim_ttl_seconds).or(self.shared.parts.claim_ttl_seconds);
            let owner = claim.owner.as_deref().unwrap_or(&by.owner);
            let mut claimed = Claimed::new(ttl.filter(|ttl| *ttl > 0), is.power == Power::Off, owner);
            claimed.labels = claim.labels.clone();
            if let Some(key) = &by.key {
                key.record(
                    changes,
                    &ClaimMade { machine: seen.machine.name.clone(), claim: claimed.id.clone() },
                );
            }
            is.claim = Some(claimed);
            is.start_anew(&spec);
            changes.put(name, &is);
            Ok(Tried::Claimed)
        })
    }

    /// A machine that is off and nobody's is no more, and its catalog has one less. Its data disk and its kept one stay in
    /// their store unless it is said that they go.
    pub fn delete(&self, name: &Name, with_data: bool, expected: Option<Revision>) -> Result<(), HostError> {
        let view = self.view(name)?;
        // Before what the other change may have made of it.
        self.shared.objects.change(|changes| if_match(changes, name, expected))?;
        view.is_off()?;
        if view.wanted.claim.is_some() {
            let message = format!("{name} is claimed: release it first ('spillway machine release {name}')");
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        self.catalogs.delete_machine(&view.machine, with_data, |changes| {
            if_match(changes, name, expected)?;
            view.is_as_seen(changes)?;
            none_is_committed(changes, [name])
        })
    }

    /// A machine is nobody's any more: it forgets, and is ready for the next one. With a claim's id only if it still has
    /// that one. `text` is what the event says.
    pub fn release(
        &self,
        name: &Name,
        which: WhichClaim<'_>,
        text: String,
    ) -> Result<MachineDetails, HostError> {
        let catalog = self.catalogs.get(&self.catalogs.machine(name)?.catalog)?;
        let views = self.views(&Selector { catalog: Some(catalog.name.clone()), ..Selector::default() })?;
        let free = free(&views, Some(name));
        self.shared.objects.change(|changes| {
            let (mut wanted, _) = has_claim(changes, name, which)?;
            wanted.release(&catalog.spec, free);
            changes.put(name.as_str(), &wanted);
            Ok::<_, HostError>(())
        })?;
        self.shared.events.raise(EventKind::Released, &format!("machine/{name}"), text);
        self.get(name)
    }

    /// A claim lasts so long from now on; 0: until it is released; if nothing is said, as long as it was to last before.
    /// With a claim's id only if the machine still has that one.
    pub fn renew(
        &self,
        name: &Name,
        which: WhichClaim<'_>,
        ttl_seconds: Option<u32>,
    ) -> Result<MachineDetails, HostError> {
        self.catalogs.machine(name)?;
        self.shared.objects.change(|changes| {
            let (mut wanted, mut claim) = has_claim(changes, name, which)?;
            if claim.left().is_some_and(|left| left.is_zero()) {
                let message = format!("the claim of {name} is over: claim a machine again");
                return Err(HostError::new(ErrorCode::Conflict, message));
            }
            claim.renew(ttl_seconds.or(claim.ttl_seconds).filter(|ttl| *ttl > 0));
            wanted.claim = Some(claim);
            changes.put(name.as_str(), &wanted);
            Ok(())
        })?;
        self.get(name)
    }
}

/// What is wanted of a machine that is claimed, and its claim. With an id only if it is that one.
fn has_claim(
    changes: &mut Changes,
    name: &Name,
    which: WhichClaim<'_>,
) -> Result<(Wanted, Claimed), HostError> {
    if_match(changes, name, which.expected)?;
    let wanted = changes.get::<Wanted>(name.as_str())?.map(|wanted| wanted.value);
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
fn can_claim_so(NewClaim { owner, labels, .. }: &NewClaim) -> Result<(), HostError> {
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

/// What is wanted of a machine once it was asked this.
fn ask(name: &Name, is: &Wanted, action: Action, grace_seconds: u32) -> Result<Wanted, HostError> {
    let mut wanted = Wanted { grace_seconds, ..is.clone() };
    match action {
        Action::Start | Action::Restart if is.drained && is.power == Power::Off => {
            let message = format!("{name} is drained: 'machine undrain {name}' first");
            return Err(HostError::new(ErrorCode::Conflict, message));
        }
        Action::Restart if is.power == Power::On => wanted.restarts += 1,
        Action::Start | Action::Restart => wanted.power = Power::On,
        Action::Stop => wanted.power = Power::Off,
        Action::Reset => {
            wanted.resets += 1;
            // What still shuts down is to end at once too, and not to be gone on with.
            wanted.grace_seconds = 0;
        }
        Action::Drain => wanted.drained = true,
        Action::Undrain => wanted.drained = false,
    }
    Ok(wanted)
}

/// Refuses to give away what the next one would find as the last one has left it.
fn can_be_claimed(catalog: &Name, spec: &CatalogSpec) -> Result<(), HostError> {
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
