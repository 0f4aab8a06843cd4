//! The host goes down, or is to be left alone: its machines are stopped, and none is started or given away until its next
//! start, or until somebody opens it again. Owns that record.
//!
//! Invariant: it is recorded before the first machine is stopped, and every wish that starts one has looked at it.

use super::Machines;
use super::wanted::boot_id;
use crate::error::HostError;
use crate::store::{Changes, Kind};
use serde::{Deserialize, Serialize};
use spillway_api::{Action, ErrorCode, HostAction, HostDetails, MachineAction, Selector};

/// Since when, in starts of the host.
#[derive(Serialize, Deserialize)]
struct Closed {
    boot: String,
}

impl Kind for Closed {
    const PREFIX: &'static str = "closed/";
    const WORD: &'static str = "host";
}

const NAME: &str = "host";

/// Whether the host is closed. That it is as it is becomes a condition of the change.
pub(super) fn is_closed(changes: &mut Changes) -> Result<bool, HostError> {
    let closed = changes.get::<Closed>(NAME)?;
    Ok(closed.is_some_and(|closed| closed.value.boot == boot_id()))
}

/// Refuses while the host is closed.
pub(super) fn is_open(changes: &mut Changes) -> Result<(), HostError> {
    match is_closed(changes)? {
        false => Ok(()),
        true => {
            let message = "the host is closed, since it goes down or somebody has closed it: 'spillway host open' first";
            Err(HostError::new(ErrorCode::Conflict, message))
        }
    }
}

impl Machines {
    /// Whether machines may start.
    pub fn host(&self) -> Result<HostDetails, HostError> {
        let closed = self.shared.objects.get::<Closed>(NAME)?;
        Ok(HostDetails {
            closed: closed.is_some_and(|closed| closed.value.boot == boot_id()),
            hypervisor: self.shared.parts.hypervisor,
            version: env!("CARGO_PKG_VERSION").into(),
        })
    }

    /// Closes the host and stops all its machines, or opens it again.
    pub fn act_on_host(&self, action: HostAction) -> Result<HostDetails, HostError> {
        self.shared.objects.change(|changes| {
            match action {
                HostAction::Close => changes.put(NAME, &Closed { boot: boot_id() }),
                HostAction::Open => changes.delete::<Closed>(NAME),
            }
            Ok::<_, HostError>(())
        })?;
        if action == HostAction::Close {
            let select = Selector { all: true, ..Selector::default() };
            let (action, force) = (Action::Stop, false);
            self.act(&MachineAction { action, select, force, discard_data: false, grace_seconds: None })?;
        }
        self.host()
    }
}
