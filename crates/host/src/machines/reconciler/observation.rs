//! What a step decides on: the machine, its desired state and its run, as they are now.
//!
//! Invariant: the machine and its desired state belong together.

use super::end;
use crate::error::HostError;
use crate::machines::blocking;
use crate::machines::desired_state::DesiredState;
use crate::machines::run::{MachineFolder, RunRecord};
use crate::machines::shared::MachineServices;
use crate::machines::{disk, vmm};
use crate::processes;
use crate::store::{Object, Revision};
use spillway_api::{ErrorCode, Machine, Name};
use std::sync::Arc;

/// State that a step decides on.
pub struct Observation {
    pub machine: Option<Machine>,
    pub wanted: DesiredState,
    /// Revision of the desired state.
    pub revision: Revision,
    pub run: Result<ObservedRun, HostError>,
}

/// State of a run.
pub struct ObservedRun {
    pub run: Option<RunRecord>,
    /// Error of the run's record, if it cannot be read while something may run.
    pub damaged: Option<HostError>,
}

impl ObservedRun {
    fn read(folder: &MachineFolder) -> Result<ObservedRun, HostError> {
        match folder.load() {
            Err(e) if e.code == ErrorCode::Damaged => {
                let damaged = end::is_alive(folder)?.then_some(e);
                Ok(ObservedRun { run: None, damaged })
            }
            run => Ok(ObservedRun { run: run?, damaged: None }),
        }
    }
}

impl Observation {
    /// Reads the records and the run of a machine.
    pub async fn read(
        shared: Arc<MachineServices>,
        name: Name,
        folder: MachineFolder,
    ) -> Result<Observation, HostError> {
        blocking(move || {
            [disk::PROCESS, vmm::PROCESS].iter().for_each(|name| processes::bound_log(folder.path(), name));
            let (machine, wanted) = loop {
                let machine = shared.objects.get::<Machine>(name.as_str())?;
                let wanted = shared.objects.get::<DesiredState>(name.as_str())?;
                // Read both together. Otherwise a machine that is deleted between the two reads would count as off, and
                // its guest would get no grace.
                let still = shared.objects.get::<Machine>(name.as_str())?.map(|machine| machine.revision);
                if still == machine.as_ref().map(|machine| machine.revision) {
                    break (machine.map(|machine| machine.value), wanted);
                }
            };
            let (wanted, revision) =
                wanted.map_or_else(Default::default, |w: Object<_>| (w.value, w.revision));
            Ok(Observation { machine, wanted, revision, run: ObservedRun::read(&folder) })
        })
        .await
    }
}
