//! The host goes down, or is to be left alone: its machines are stopped, and none is started or given away until its next
//! start, or until somebody opens it again. Owns that record.
//!
//! Invariant: it is recorded before the first machine is stopped, and every wish that starts one has looked at it.

use super::Machines;
use super::host_start::HostStart;
use super::wanted::boot_id;
use crate::error::HostError;
use crate::store::Changes;
use spillway_api::{ErrorCode, HostAction, HostDetails, Name, Phase, Power, Selector};
use std::collections::HashMap;

/// The start of the host in which it was closed.
const NAME: &str = "closed";

/// Whether the host is closed. That it is as it is becomes a condition of the change.
pub(super) fn is_closed(changes: &mut Changes) -> Result<bool, HostError> {
    let closed = changes.get::<HostStart>(NAME)?;
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
        let closed = self.shared.objects.get::<HostStart>(NAME)?;
        Ok(HostDetails {
            closed: closed.is_some_and(|closed| closed.value.boot == boot_id()),
            hypervisor: self.shared.parts.hypervisor,
            version: env!("CARGO_PKG_VERSION").into(),
            busy: self.busy(),
        })
    }

    /// Machines of which something runs or is being started or ended, those too that are deleted.
    fn busy(&self) -> u32 {
        let is_busy = |phase| !matches!(phase, Phase::Stopped | Phase::Failed);
        let kept = self.shared.kept();
        kept.values().filter(|kept| is_busy(kept.status.borrow().phase())).count() as u32
    }

    /// Closes the host and stops all its machines, or opens it again.
    pub fn act_on_host(&self, action: HostAction) -> Result<HostDetails, HostError> {
        self.shared.objects.change(|changes| {
            match action {
                HostAction::Close => changes.put(NAME, &HostStart::this()),
                HostAction::Open => changes.delete::<HostStart>(NAME),
            }
            Ok::<_, HostError>(())
        })?;
        // What somebody else changes at the same time is looked at again.
        while action == HostAction::Close && self.stop_all()? {}
        self.host()
    }

    /// Records of all machines that they are not to run. Whether some were.
    pub(super) fn stop_all(&self) -> Result<bool, HostError> {
        let catalogs = self.catalogs.list()?;
        let graces: HashMap<Name, u32> =
            catalogs.into_iter().map(|catalog| (catalog.name, catalog.spec.grace_seconds)).collect();
        let views = self.views(&Selector::default())?;
        let mut on = views.iter().filter(|view| view.wanted.power == Power::On).peekable();
        let some = on.peek().is_some();
        for view in on {
            self.changes(view, |wanted| {
                wanted.power = Power::Off;
                wanted.grace_seconds = graces.get(&view.machine.catalog).copied().unwrap_or(0);
            })?;
        }
        Ok(some)
    }
}
