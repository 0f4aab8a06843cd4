//! How what is wanted of a machine changes without anybody asking for it: a claim is over, a rollout comes to it. Owns the rule
//! under which it may.
//!
//! Invariant: only what nobody has changed since it was looked at is changed, and nothing is started while the host is closed.

use super::View;
use super::closing::read_closed;
use super::desired_state::DesiredState;
use crate::error::HostError;
use crate::store::{Changes, Objects};
use spillway_api::{Machine, Power};

/// The records of what is wanted, for those that decide by what they have seen.
#[derive(Clone)]
pub struct DesiredStateWriter {
    objects: Objects,
}

impl DesiredStateWriter {
    /// Of these records.
    pub fn new(objects: Objects) -> DesiredStateWriter {
        DesiredStateWriter { objects }
    }

    /// Changes what is wanted of a machine, unless somebody has since it was looked at. Whether it did.
    pub(super) fn change(&self, seen: &View, change: impl Fn(&mut DesiredState)) -> Result<bool, HostError> {
        self.objects.change(|changes| self.change_within(changes, seen, &change))
    }

    /// The same, as a part of a change.
    pub(super) fn change_within(
        &self,
        changes: &mut Changes,
        seen: &View,
        change: impl Fn(&mut DesiredState),
    ) -> Result<bool, HostError> {
        let name = seen.machine.name.as_str();
        let is = changes.get::<DesiredState>(name)?;
        // One that is gone is not to leave a desired state behind for the next one of its name.
        let machine = changes.get::<Machine>(name)?.map(|machine| machine.value.identity);
        if is.as_ref().map(|wanted| wanted.revision).unwrap_or_default() != seen.revision
            || machine.as_ref() != Some(&seen.machine.identity)
        {
            return Ok(false);
        }
        let mut wanted = is.map(|wanted| wanted.value).unwrap_or_default();
        change(&mut wanted);
        if wanted.power == Power::On && read_closed(changes)? {
            return Ok(false);
        }
        changes.put(name, &wanted);
        Ok(true)
    }
}
