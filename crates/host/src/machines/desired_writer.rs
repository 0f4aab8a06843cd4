//! Changes of desired states that no client asked for: a claim expires, a rollout restarts a machine. Owns the rule under
//! which they are allowed.
//!
//! Invariant: a desired state is changed only if nobody has changed it since it was read, and nothing is started while
//! the host is closed.

use super::View;
use super::closing::read_closed;
use super::desired_state::DesiredState;
use crate::error::HostError;
use crate::store::{Changes, Objects};
use spillway_api::{Machine, Power};

/// Writes desired states on behalf of the daemon.
#[derive(Clone)]
pub struct DesiredStateWriter {
    objects: Objects,
}

impl DesiredStateWriter {
    /// Creates the writer of these records.
    pub fn new(objects: Objects) -> DesiredStateWriter {
        DesiredStateWriter { objects }
    }

    /// Changes a machine's desired state unless it has changed since `seen`. Returns whether it was changed.
    pub(super) fn change(&self, seen: &View, change: impl Fn(&mut DesiredState)) -> Result<bool, HostError> {
        self.objects.change(|changes| self.change_within(changes, seen, &change))
    }

    /// Does the same as a part of a larger transaction.
    pub(super) fn change_within(
        &self,
        changes: &mut Changes,
        seen: &View,
        change: impl Fn(&mut DesiredState),
    ) -> Result<bool, HostError> {
        let name = seen.machine.name.as_str();
        let is = changes.get::<DesiredState>(name)?;
        // A deleted machine must not leave a desired state for the next machine with its name.
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
