//! Tags of machines, by which clients avoid overwriting changes of others. Owns no state.
//!
//! Invariant: a machine's tag changes with its record and with its desired state.

use super::desired_state::DesiredState;
use crate::error::HostError;
use crate::store::{Changes, Object, Revision};
use spillway_api::{Machine, Name};

/// Refuses a change if the machine's tag differs from the one the client has read. The transaction fails if the tag
/// changes before its commit.
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

/// Tag of a machine: the newer of the revisions of its record and its desired state.
pub(super) fn of(machine: Option<Object<Machine>>, wanted: Option<Object<DesiredState>>) -> Revision {
    let machine = machine.map(|machine| machine.revision).unwrap_or_default();
    machine.max(wanted.map(|wanted| wanted.revision).unwrap_or_default())
}
