//! The host goes down, or is to be left alone: its machines are stopped, and none is started or given away until its next
//! start, or until somebody opens it again. Owns that record.
//!
//! Invariant: it is recorded before the first machine is stopped, and every change that starts one has looked at it.

use super::act::BATCH;
use super::desired_state::{DesiredState, boot_id};
use super::desired_writer::DesiredStateWriter;
use super::host_start::HostStart;
use super::shared::MachineServices;
use super::status::ObservedMachine;
use super::views::MachineReader;
use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::store::{Changes, Object, Revision, StoreError, Unreadable};
use spillway_api::{ErrorCode, HostAction, HostDetails, Name, Phase, Power, Selector};
use std::collections::HashMap;
use std::sync::Arc;

/// The start of the host in which it was closed.
const NAME: &str = "closed";

/// What a guest has to shut down whose catalog cannot be read.
const GRACE_SECONDS: u32 = 60;

/// Whether the host is closed. That it is as it is becomes a condition of the change.
pub(super) fn read_closed(changes: &mut Changes) -> Result<bool, HostError> {
    is_of_this_start(changes.get::<HostStart>(NAME))
}

/// A mark that cannot be read closes the host, until somebody opens it.
fn is_of_this_start(closed: Result<Option<Object<HostStart>>, StoreError>) -> Result<bool, HostError> {
    match closed {
        Err(StoreError::Unreadable { .. }) => Ok(true),
        closed => Ok(closed?.is_some_and(|closed| closed.value.boot == boot_id())),
    }
}

/// The revision of the mark. One that cannot be read, as one that is not there, has none.
fn tag(closed: Result<Option<Object<HostStart>>, StoreError>) -> Result<Revision, HostError> {
    match closed {
        Err(StoreError::Unreadable { .. }) => Ok(Revision::default()),
        closed => Ok(closed?.map(|closed| closed.revision).unwrap_or_default()),
    }
}

/// Refuses while the host is closed.
pub(super) fn require_open(changes: &mut Changes) -> Result<(), HostError> {
    match read_closed(changes)? {
        false => Ok(()),
        true => {
            let message = "the host is closed, since it goes down or somebody has closed it: 'spillway host open' first";
            Err(HostError::new(ErrorCode::Conflict, message))
        }
    }
}

/// The gate by which machines come to run on the host: open, or closed.
#[derive(Clone)]
pub struct HostGate {
    shared: Arc<MachineServices>,
    reader: MachineReader,
    catalogs: Catalogs,
    desired: DesiredStateWriter,
}

impl HostGate {
    /// Of the machines that these see and change.
    pub fn new(
        shared: Arc<MachineServices>,
        reader: MachineReader,
        catalogs: Catalogs,
        desired: DesiredStateWriter,
    ) -> HostGate {
        HostGate { shared, reader, catalogs, desired }
    }

    /// Whether machines may start, and what else there is to know of the host.
    pub fn details(&self) -> Result<HostDetails, HostError> {
        let unreadable = self.shared.objects.set_aside_below("");
        Ok(HostDetails {
            closed: self.is_closed()?,
            hypervisor: self.shared.parts.hypervisor,
            guest_users: self.shared.parts.guest_users.map(|range| range.to_string()),
            version: env!("CARGO_PKG_VERSION").into(),
            busy: self.busy()?,
            unreadable: unreadable.into_iter().map(Unreadable::describe).collect(),
            budget: self.shared.admission.describe(),
        })
    }

    /// Whether the host is closed.
    pub fn is_closed(&self) -> Result<bool, HostError> {
        is_of_this_start(self.shared.objects.get::<HostStart>(NAME))
    }

    /// Machines of which something runs or is being started or ended, those too that are deleted. Of one that has failed
    /// something may run as long as there is a record of it.
    fn busy(&self) -> Result<u32, HostError> {
        let wanted = self.shared.objects.list::<DesiredState>()?;
        let revisions: HashMap<String, Revision> =
            wanted.into_iter().map(|wanted| (wanted.name, wanted.revision)).collect();
        let is_busy = |name: &Name, known: &ObservedMachine| {
            let wanted = revisions.get(name.as_str()).copied().unwrap_or_default();
            let has_failed = known.phase() == Phase::Failed;
            !known.is_idle(wanted) || has_failed && self.shared.folders.of(name).has_run()
        };
        Ok(self.shared.registry.count(is_busy) as u32)
    }

    /// The tag of the host: another one after it was closed or opened.
    pub fn tag(&self) -> Result<Revision, HostError> {
        tag(self.shared.objects.get::<HostStart>(NAME))
    }

    /// Closes the host and stops all its machines, or opens it again.
    pub fn act(&self, action: HostAction, expected: Option<Revision>) -> Result<HostDetails, HostError> {
        self.shared.objects.change(|changes| {
            if expected.is_some() {
                HostError::if_match("the host", expected, tag(changes.get::<HostStart>(NAME))?)?;
            }
            match action {
                HostAction::Close => changes.put(NAME, &HostStart::this()),
                HostAction::Open => changes.delete::<HostStart>(NAME),
            }
            Ok::<_, HostError>(())
        })?;
        // What somebody else changes at the same time is looked at again.
        while action == HostAction::Close && self.stop_all()? {}
        self.details()
    }

    /// Records of all machines that they are not to run, while the host is closed. Whether some were.
    pub fn stop_all(&self) -> Result<bool, HostError> {
        let catalogs = self.catalogs.list()?;
        let graces: HashMap<Name, u32> =
            catalogs.into_iter().map(|catalog| (catalog.name, catalog.spec.grace_seconds)).collect();
        let mut on = self.reader.views(&Selector::default())?;
        on.retain(|view| view.wanted.power == Power::On);
        for batch in on.chunks(BATCH) {
            let is_still_closed = self.shared.objects.change(|changes| {
                // Somebody may have opened it meanwhile, and started what is stopped here.
                if !read_closed(changes)? {
                    return Ok::<_, HostError>(false);
                }
                for view in batch {
                    // Of one whose catalog cannot be read nobody knows better.
                    let grace_seconds = graces.get(&view.machine.catalog).copied().unwrap_or(GRACE_SECONDS);
                    self.desired.change_within(changes, view, |wanted| {
                        (wanted.power, wanted.grace_seconds) = (Power::Off, grace_seconds);
                    })?;
                }
                Ok(true)
            })?;
            if !is_still_closed {
                return Ok(false);
            }
        }
        Ok(!on.is_empty())
    }
}
