//! Tags of machines: what a client names that must not overwrite somebody else's change. Owns no state.
//!
//! Invariant: a machine's tag is another one after each change of its record or of what is wanted of it.

use super::desired_state::DesiredState;
use crate::error::HostError;
use crate::store::{Changes, Object, Revision};
use spillway_api::{Machine, Name};

/// Refuses a change of a machine that has another tag than the client has read. That the tag stays becomes a condition.
pub(super) fn if_match(
    changes: &mut Changes,
    name: &Name,
    expected: Option<Revision>,
) -> Result<(), HostError> {
    if expected.is_none() {
        return Ok(());
    }
    let machine = changes.get::<Machine>(name.as_str())?;
    let found = of(machine, changes.get::<DesiredState>(name.as_str())?);
    HostError::if_match(&format!("machine {name}"), expected, found)
}

/// The tag of a machine: the newer one of its record's revision and of what is wanted of it.
pub(super) fn of(machine: Option<Object<Machine>>, wanted: Option<Object<DesiredState>>) -> Revision {
    let machine = machine.map(|machine| machine.revision).unwrap_or_default();
    machine.max(wanted.map(|wanted| wanted.revision).unwrap_or_default())
}
