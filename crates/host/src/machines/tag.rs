//! Tags of machines, by which clients avoid overwriting changes of others. Owns no state.
//!
//! Invariant: a machine's tag changes with its record, its desired power, its claim and its drain, and with each restart
//! and reset that is asked for.

use super::desired_state::DesiredState;
use crate::error::HostError;
use crate::store::Changes;
use crate::tags::Tag;
use spillway_api::{Machine, Name};

/// Refuses a change if the machine's tag differs from the one the client has read. The transaction fails if the tag
/// changes before its commit.
pub(super) fn check_tag(changes: &mut Changes, name: &Name, expected: Option<Tag>) -> Result<(), HostError> {
    if expected.is_none() {
        return Ok(());
    }
    let machine = changes.get::<Machine>(name.as_str())?;
    let wanted = changes.get::<DesiredState>(name.as_str())?.map(|wanted| wanted.value).unwrap_or_default();
    match machine {
        Some(machine) => of(&machine.value, &wanted).check(&format!("machine {name}"), expected),
        None => Err(HostError::not_found("machine", name.as_str(), [])),
    }
}

/// Tag of a machine with this desired state.
pub(super) fn of(machine: &Machine, wanted: &DesiredState) -> Tag {
    // How long its next shutdown may take is no part of what clients see.
    Tag::of(&(machine, DesiredState { grace_seconds: 0, ..wanted.clone() }))
}
