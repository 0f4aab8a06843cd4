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
use spillway_api::{Catalog, EventKind, Hypervisor, IsolationAction, Machine, Phase};
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

/// Ends or leaves alone what the fleet does not let run. `None`: the step goes on.
pub(super) async fn obey(
    machine: &mut MachineReconciler,
    uuid: &str,
    run: Option<&RunRecord>,
) -> Result<Option<StepOutcome>, HostError> {
    let Some(on_isolation) = machine.named else { return Ok(None) };
    let order = machine.shared.names.order(&machine.name, uuid, on_isolation);
    let vmm = match run {
        Some(run) => machine.vmm.look(run).await?,
        None => ObservedProcess::None,
    };
    let ObservedProcess::Alive(vmm) = vmm else {
        machine.shared.names.ended(&machine.name);
        if order == NameOrder::Run {
            return Ok(None);
        }
        machine.publish(Status::new(Phase::Waiting).hint(Some(WAITS.into())).settled());
        return Ok(Some(StepOutcome::Rest(WakeupConditions::until(Instant::now() + LOOK))));
    };
    if order == NameOrder::End {
        machine.raise(
            EventKind::Fleet,
            "it is ended: this host has no lease of its fleet, or another host has its name",
        );
        machine.vmm.end(&vmm).await?;
        machine.shared.names.ended(&machine.name);
        return Ok(Some(StepOutcome::Again));
    }
    Ok(None)
}

/// Notes that a VMM is about to be started, and marks it for the guard.
pub(super) fn begin(
    machine: &MachineReconciler,
    run: &RunRecord,
) -> Result<Option<Arc<GuardPage>>, HostError> {
    let Some(on_isolation) = machine.named else { return Ok(None) };
    let of_libvirt = run.hypervisor == Hypervisor::Libvirt;
    let pid_file = of_libvirt.then(|| machine.shared.libvirt.pid_file(&domain::name(machine.folder.name())));
    machine.shared.names.begin(&machine.name, &run.uuid, on_isolation, machine.folder.path(), pid_file)
}

/// Whether the guest of this run has to stay paused now. If not, it continues, and may shut down by itself.
pub(super) fn must_pause(machine: &MachineReconciler, run: &RunRecord) -> bool {
    let Some(on_isolation) = machine.named else { return false };
    let order = machine.shared.names.order(&machine.name, &run.uuid, on_isolation);
    !matches!(order, NameOrder::Run | NameOrder::GoOn)
}

/// Finds out whether a machine has a name of a fleet, if nobody has looked yet.
pub(super) async fn learn(reconciler: &mut MachineReconciler, machine: &Machine) -> Result<(), HostError> {
    if reconciler.named.is_none() {
        reconciler.named = reconciler.catalog(machine).await?.as_ref().and_then(named);
    }
    Ok(())
}

/// Looks again soon at a machine whose orders may change.
pub(super) fn with_orders(machine: &MachineReconciler, wait: WakeupConditions) -> WakeupConditions {
    if machine.named.is_some() { wait.at_most(LOOK) } else { wait }
}
