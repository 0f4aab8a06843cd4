//! Steps of machines with names of a fleet: what they do while the fleet does not let them run here.
//!
//! Invariant: nothing of such a machine is started without an order, which is asked for anew before each start and before its guest goes on.

use super::{MachineReconciler, StepOutcome, WakeupConditions};
use crate::error::HostError;
use crate::guard::GuardPage;
use crate::hypervisor::domain;
use crate::machines::run::RunRecord;
use crate::machines::status::Status;
use crate::processes::ObservedProcess;
use spillway_api::{Catalog, EventKind, Hypervisor, IsolationAction, Phase};
use spillway_fleet::named::NameOrder;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of looks at orders that nobody tells of: a lease ends by itself.
const LOOK: Duration = Duration::from_millis(500);
/// Why a machine does not start.
const WAITS: &str = "it has a name of the fleet, and starts when the fleet says that this host has it";
/// Why a machine that runs does nothing.
pub(super) const PAUSED: &str =
    "its guest is paused: this host has no lease of its fleet, and another host may get the machine's name";

/// What is done with the machines of a catalog when their host is isolated, if they have names of a fleet.
pub(super) fn named(catalog: &Catalog) -> Option<IsolationAction> {
    catalog.fleet.as_ref().and_then(|owner| owner.named)
}

impl MachineReconciler {
    /// Ends or leaves alone what the fleet does not let run. `None`: the step goes on.
    pub(super) async fn obey(&mut self, run: Option<&RunRecord>) -> Result<Option<StepOutcome>, HostError> {
        let Some(on_isolation) = self.named else { return Ok(None) };
        let order = self.shared.names.order(&self.name, on_isolation);
        let vmm = match run {
            Some(run) => self.vmm.look(run).await?,
            None => ObservedProcess::None,
        };
        let ObservedProcess::Alive(vmm) = vmm else {
            self.shared.names.ended(&self.name);
            if order == NameOrder::Run {
                return Ok(None);
            }
            self.publish(Status::new(Phase::Waiting).hint(Some(WAITS.into())).settled());
            return Ok(Some(StepOutcome::Rest(WakeupConditions::until(Instant::now() + LOOK))));
        };
        if order == NameOrder::End {
            self.raise(
                EventKind::Fleet,
                "it is ended: this host has no lease of its fleet, or another host has its name",
            );
            self.vmm.end(&vmm).await?;
            self.shared.names.ended(&self.name);
            return Ok(Some(StepOutcome::Again));
        }
        Ok(None)
    }

    /// Notes that a VMM is about to be started, and marks it for the guard.
    pub(super) fn begin_named(&self, run: &RunRecord) -> Result<Option<Arc<GuardPage>>, HostError> {
        let Some(on_isolation) = self.named else { return Ok(None) };
        let of_libvirt = run.hypervisor == Hypervisor::Libvirt;
        let pid_file = of_libvirt.then(|| self.shared.libvirt.pid_file(&domain::name(self.folder.name())));
        self.shared.names.begin(&self.name, &run.uuid, on_isolation, self.folder.path(), pid_file)
    }

    /// Whether the guest must not run now.
    pub(super) fn must_pause(&self) -> bool {
        let order = self.named.map(|on_isolation| self.shared.names.order(&self.name, on_isolation));
        order == Some(NameOrder::Pause)
    }

    /// Looks again soon at a machine whose orders may change.
    pub(super) fn with_orders(&self, wait: WakeupConditions) -> WakeupConditions {
        if self.named.is_some() { wait.at_most(LOOK) } else { wait }
    }
}
