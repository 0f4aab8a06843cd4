//! Closing the host for a shutdown or maintenance: its machines are stopped, and none is started or claimed until its
//! next start, or until a client opens it again. Owns the record of that.
//!
//! Invariant: the record is written before the first machine is stopped, and every change that starts a machine checks
//! it.

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
use crate::tags::Tag;
use spillway_api::{ErrorCode, HostAction, HostDetails, Name, Phase, Power, Selector};
use std::collections::HashMap;
use std::sync::Arc;

/// Name of the record, whose value is the start of the host in which it was closed.
const NAME: &str = "closed";

/// Seconds that a guest gets to shut down if its catalog cannot be read.
const GRACE_SECONDS: u32 = 60;

/// Returns whether the host is closed. The transaction fails if that changes before its commit.
pub(super) fn read_closed(changes: &mut Changes) -> Result<bool, HostError> {
    is_of_this_start(changes.get::<HostStart>(NAME))
}

/// Whether the host was closed since its last start. A record that cannot be read counts as closed until the host is
/// opened.
fn is_of_this_start(closed: Result<Option<Object<HostStart>>, StoreError>) -> Result<bool, HostError> {
    match closed {
        Err(StoreError::Unreadable { .. }) => Ok(true),
        closed => Ok(closed?.is_some_and(|closed| closed.value.boot == boot_id())),
    }
}

/// Returns an error while the host is closed.
pub(super) fn require_open(changes: &mut Changes) -> Result<(), HostError> {
    match read_closed(changes)? {
        false => Ok(()),
        true => {
            let message = "the host is closed, by a shutdown or by request: run 'spillway host open' first";
            Err(HostError::new(ErrorCode::Conflict, message))
        }
    }
}

/// Closes and opens the host for machines.
#[derive(Clone)]
pub struct HostGate {
    shared: Arc<MachineServices>,
    reader: MachineReader,
    catalogs: Catalogs,
    desired: DesiredStateWriter,
}

impl HostGate {
    /// Creates the gate for these machines.
    pub fn new(
        shared: Arc<MachineServices>,
        reader: MachineReader,
        catalogs: Catalogs,
        desired: DesiredStateWriter,
    ) -> HostGate {
        HostGate { shared, reader, catalogs, desired }
    }

    /// Describes the host, including whether machines may start. The tag is of that alone: clients can change nothing
    /// else.
    pub fn details(&self) -> Result<(Tag, HostDetails), HostError> {
        let unreadable = self.shared.objects.set_aside_below("");
        let closed = self.is_closed()?;
        let details = HostDetails {
            closed,
            hypervisor: self.shared.parts.hypervisor,
            guest_users: self.shared.parts.guest_users.map(|range| range.to_string()),
            version: env!("CARGO_PKG_VERSION").into(),
            busy: self.busy()?,
            unreadable: unreadable.into_iter().map(Unreadable::describe).collect(),
            budget: self.shared.admission.describe(),
        };
        Ok((Tag::of(&closed), details))
    }

    /// Whether the host is closed.
    pub fn is_closed(&self) -> Result<bool, HostError> {
        is_of_this_start(self.shared.objects.get::<HostStart>(NAME))
    }

    /// Counts the machines with a process that runs, starts or ends, including deleted machines. A failed machine counts
    /// as long as it has a record of a run.
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

    /// Closes the host and stops all machines, or opens it again.
    pub fn act(&self, action: HostAction, expected: Option<Tag>) -> Result<(Tag, HostDetails), HostError> {
        self.shared.objects.change(|changes| {
            Tag::of(&read_closed(changes)?).check("the host", expected)?;
            match action {
                HostAction::Close => changes.put(NAME, &HostStart::this()),
                HostAction::Open => changes.delete::<HostStart>(NAME),
            }
            Ok::<_, HostError>(())
        })?;
        // Repeat this for machines that a client changed at the same time.
        while action == HostAction::Close && self.stop_all()? {}
        self.details()
    }

    /// Records that all machines should be off, while the host is closed. Returns whether any was on.
    pub fn stop_all(&self) -> Result<bool, HostError> {
        let catalogs = self.catalogs.list()?;
        let graces: HashMap<Name, u32> =
            catalogs.into_iter().map(|catalog| (catalog.name, catalog.spec.grace_seconds)).collect();
        let mut on = self.reader.views(&Selector::default())?;
        on.retain(|view| view.wanted.power == Power::On);
        for batch in on.chunks(BATCH) {
            let is_still_closed = self.shared.objects.change(|changes| {
                // The host may have been opened meanwhile, and machines started again.
                if !read_closed(changes)? {
                    return Ok::<_, HostError>(false);
                }
                for view in batch {
                    // Use the default if the catalog cannot be read.
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
