//! Observed state of a machine, for clients. Owns no process and decides nothing.
//!
//! Invariant: a state carries the revision of the desired state that its step has read. A machine is not settled while a
//! step acts on it, or while its guest is not ready yet.

use super::disk;
use super::run::{DiskKind, MachineFolder, RunRecord};
use crate::error::HostError;
use crate::hypervisor::qemu;
use crate::processes::Process;
use crate::store::Revision;
use jiff::Timestamp;
use spillway_api::{Difference, DisplayKind, ErrorCode, Hypervisor, MachineRun, MachineStatus, Phase};

/// Observed state of a machine, and the revision of the desired state that the observing step has read.
#[derive(Clone, Debug)]
pub struct ObservedMachine {
    status: MachineStatus,
    seen: Revision,
    settled: bool,
    /// Whether this daemon has examined what is there of the machine.
    examined: bool,
    disk: Option<DiskKind>,
    /// Why the last attempt has failed. It is cleared when the machine runs, stops or waits; for a machine that crashes
    /// repeatedly it stays while it runs.
    failure: Option<String>,
}

/// State of a machine that is off and has no desired state.
impl Default for ObservedMachine {
    fn default() -> ObservedMachine {
        ObservedMachine::off(Revision::default())
    }
}

impl ObservedMachine {
    /// Creates the state of a machine that is off, as the desired state of this revision says.
    pub fn off(seen: Revision) -> ObservedMachine {
        let status = MachineStatus {
            phase: Phase::Stopped,
            settled: false,
            since: None,
            ready: false,
            address: None,
            message: None,
            code: None,
            permanent: false,
            run: None,
        };
        ObservedMachine { status, seen, settled: true, examined: true, disk: None, failure: None }
    }

    /// Creates the state of a machine with a folder that no step has examined yet; of this run, if its record can be
    /// read.
    pub fn found(run: Option<&RunRecord>, folder: &MachineFolder) -> ObservedMachine {
        let (mut known, status) = (ObservedMachine::default(), Status::new(Phase::Starting));
        let status = match run {
            Some(run) => status.of(run, folder),
            None => status,
        };
        known.update(status, Revision::default());
        known.examined = false;
        known
    }

    /// Whether this daemon has examined what is there of the machine.
    pub fn is_examined(&self) -> bool {
        self.examined
    }

    /// Current phase.
    pub fn phase(&self) -> Phase {
        self.status.phase
    }

    /// Why the machine has failed, if it has not run since.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Properties of the disk, if there is one.
    pub fn disk(&self) -> Option<&DiskKind> {
        self.disk.as_ref()
    }

    /// Whether the desired state of this revision was read.
    pub fn has_seen(&self, wanted: Revision) -> bool {
        self.seen >= wanted
    }

    /// Whether the machine has reached the desired state of this revision, or never can.
    pub fn is_settled(&self, wanted: Revision) -> bool {
        self.settled && self.has_seen(wanted)
    }

    /// Whether the machine is settled with a desired state, and not only without one.
    pub fn is_recorded(&self) -> bool {
        self.settled && self.seen > Revision::default()
    }

    /// Whether the machine is settled and off.
    pub fn is_idle(&self, wanted: Revision) -> bool {
        self.is_settled(wanted) && matches!(self.phase(), Phase::Stopped | Phase::Failed)
    }

    /// Converts the state for the API, given the revision of the desired state.
    pub fn status(&self, wanted: Revision) -> MachineStatus {
        MachineStatus { settled: self.is_settled(wanted), ..self.status.clone() }
    }

    /// Sets the status, observed by a step that has read the desired state of this revision.
    pub fn update(&mut self, status: Status, seen: Revision) {
        self.set_phase(status.phase);
        if !status.is_unstable && !matches!(status.phase, Phase::Starting | Phase::Stopping) {
            self.failure = None;
        }
        (self.status.message, self.status.code) = (status.message, status.code);
        self.status.permanent = false;
        (self.status.ready, self.status.address) = (status.ready, status.address);
        self.status.run = status.run;
        (self.seen, self.settled, self.disk) = (seen, status.settled, status.disk);
        self.examined = true;
    }

    /// Records a failure to reach the desired state.
    pub fn record_failure(&mut self, why: &HostError, seen: Revision) {
        self.set_phase(Phase::Failed);
        (self.status.message, self.status.code) = (Some(why.message.clone()), Some(why.code));
        (self.status.ready, self.status.permanent) = (false, why.is_permanent);
        (self.seen, self.settled, self.failure) = (seen, true, Some(why.message.clone()));
        self.examined = true;
    }

    /// Sets the number of crashes of the machine's run.
    pub fn set_crashes(&mut self, crashes: u32) {
        if let Some(run) = &mut self.status.run {
            run.crashes = crashes;
        }
    }

    fn set_phase(&mut self, phase: Phase) {
        if self.status.phase != phase {
            (self.status.phase, self.status.since) = (phase, Some(Timestamp::now()));
        }
    }
}

/// New status of a machine, which a step publishes.
pub struct Status {
    phase: Phase,
    ready: bool,
    address: Option<String>,
    run: Option<MachineRun>,
    disk: Option<DiskKind>,
    settled: bool,
    /// Whether the machine has crashed repeatedly and may crash again.
    is_unstable: bool,
    message: Option<String>,
    code: Option<ErrorCode>,
}

impl Status {
    /// Creates a status with a phase and nothing else.
    pub fn new(phase: Phase) -> Status {
        Status {
            phase,
            ready: false,
            address: None,
            run: None,
            disk: None,
            settled: false,
            is_unstable: false,
            message: None,
            code: None,
        }
    }

    /// Adds the reason.
    pub fn with_failure(self, why: &HostError) -> Status {
        Status { message: Some(why.message.clone()), code: Some(why.code), ..self }
    }

    /// Adds what is known of this run.
    pub fn of(mut self, run: &RunRecord, folder: &MachineFolder) -> Status {
        let path = |name| folder.path().join(name);
        let is_ours = run.hypervisor != Hypervisor::None;
        self.disk = Some(run.disk_kind());
        self.run = Some(MachineRun {
            image: run.image.clone(),
            version: run.version,
            outdated: false,
            pending: Vec::new(),
            ram_bytes: run.ram_bytes,
            overflow_bytes: run.overflow_bytes,
            rate: run.rate,
            hypervisor: run.hypervisor,
            disk_pid: None,
            vmm_pid: None,
            disk_socket: path(disk::SOCKET),
            control_socket: path(disk::CONTROL),
            console_socket: is_ours.then(|| path(qemu::CONSOLE)),
            display: if is_ours { run.spec.hardware.display } else { DisplayKind::None },
            nbd_socket: (!is_ours).then(|| path(disk::NBD)),
            crashes: 0,
        });
        self
    }

    /// Adds the ids of these processes.
    pub fn by(mut self, disk: &Process, vmm: Option<&Process>) -> Status {
        if let Some(run) = &mut self.run {
            (run.disk_pid, run.vmm_pid) = (Some(disk.pid()), vmm.map(Process::pid));
        }
        self
    }

    /// Adds whether the guest is ready, and its address.
    pub fn ready(mut self, run: &RunRecord) -> Status {
        (self.ready, self.address) = (run.ready, run.address.clone());
        self
    }

    /// Adds what a restart would change.
    pub fn with_pending(mut self, pending: Vec<Difference>) -> Status {
        if let Some(run) = &mut self.run {
            (run.outdated, run.pending) = (!pending.is_empty(), pending);
        }
        self
    }

    /// Adds the number of crashes.
    pub fn with_crashes(mut self, crashes: u32) -> Status {
        if let Some(run) = &mut self.run {
            run.crashes = crashes;
        }
        self
    }

    /// Adds a hint why the machine may never be ready.
    pub fn hint(self, hint: Option<String>) -> Status {
        Status { message: hint.or(self.message), ..self }
    }

    /// Marks a machine that crashes repeatedly, so that its failure stays known while it runs.
    pub fn unstable(self, is_unstable: bool) -> Status {
        Status { is_unstable, ..self }
    }

    /// Marks the machine as settled.
    pub fn settled(self) -> Status {
        Status { settled: true, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(known: &ObservedMachine, wanted: u64) -> (Phase, bool) {
        let status = known.status(Revision(wanted));
        (status.phase, status.settled)
    }

    #[test]
    fn it_is_settled_of_what_was_seen_while_nothing_is_done() {
        let mut known = ObservedMachine::default();
        assert_eq!(seen(&known, 0), (Phase::Stopped, true), "nothing was ever wanted of it");
        assert_eq!(seen(&known, 1), (Phase::Stopped, false), "nobody has looked at that yet");
        assert!(!known.is_recorded());
        known.update(Status::new(Phase::Starting), Revision(0));
        assert_eq!(seen(&known, 0), (Phase::Starting, false));
        for (phase, is_idle) in [(Phase::Running, false), (Phase::Stopped, true)] {
            known.update(Status::new(phase).settled(), Revision(5));
            assert_eq!((seen(&known, 5), seen(&known, 6)), ((phase, true), (phase, false)));
            assert_eq!((known.is_idle(Revision(5)), known.is_idle(Revision(6))), (is_idle, false));
            assert!(known.is_recorded());
        }
        // Its guest is waited for; it is wanted, and another one of its name has ended.
        for phase in [Phase::Stopping, Phase::Running, Phase::Stopped] {
            known.update(Status::new(phase), Revision(5));
            assert_eq!(seen(&known, 5), (phase, false));
            assert!(!known.is_recorded());
            // A rollout knows by this what it may restart.
            assert_eq!((known.has_seen(Revision(5)), known.has_seen(Revision(6))), (true, false));
        }
        known.record_failure(&HostError::invalid("it cannot").permanent(), Revision(7));
        assert!(known.status(Revision(7)).permanent);
        known.update(Status::new(Phase::Starting), Revision(7));
        assert!(!known.status(Revision(7)).permanent);
        known.record_failure(&HostError::invalid("it cannot"), Revision(7));
        assert!(!known.status(Revision(7)).permanent);
        assert_eq!((seen(&known, 7), seen(&known, 8)), ((Phase::Failed, true), (Phase::Failed, false)));
        // A rollout counts it as failed while it is tried again.
        for (phase, has_failed) in
            [(Phase::Starting, true), (Phase::Running, false), (Phase::Starting, false)]
        {
            known.update(Status::new(phase), Revision(8));
            assert_eq!(known.failure().is_some(), has_failed, "{phase:?}");
        }
        known.record_failure(&HostError::invalid("it crashes"), Revision(8));
        known.update(Status::new(Phase::Running).unstable(true), Revision(8));
        assert!(known.failure().is_some(), "it may end at any moment");
        known.update(Status::new(Phase::Running), Revision(8));
        assert!(known.failure().is_none());
    }

    #[test]
    fn since_when_it_is_off_is_not_known_of_what_was_off_before() {
        let mut known = ObservedMachine::off(Revision(3));
        let since = |known: &ObservedMachine| known.status(Revision(4)).since;
        known.update(Status::new(Phase::Stopped).settled(), Revision(4));
        assert_eq!(since(&known), None);
        known.update(Status::new(Phase::Starting), Revision(4));
        assert!(since(&known).is_some());
    }
}
