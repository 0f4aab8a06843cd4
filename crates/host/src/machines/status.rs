//! What is known of a machine, for those who ask. Owns no process and decides nothing.
//!
//! Invariant: what is known is of a record that was read before the step that says so. Nothing is settled while something is
//! done about a machine, or its guest is waited for.

use super::disk;
use super::run::{DiskKind, MachineFolder, RunRecord};
use crate::error::HostError;
use crate::hypervisor::qemu;
use crate::processes::Process;
use crate::store::Revision;
use jiff::Timestamp;
use spillway_api::{Difference, ErrorCode, Hypervisor, MachineRun, MachineStatus, Phase};

/// What is known, and the record that the step looked at which found it out.
#[derive(Clone, Debug)]
pub struct ObservedMachine {
    status: MachineStatus,
    seen: Revision,
    settled: bool,
    disk: Option<DiskKind>,
    /// Why the last try has failed. It stays while the machine is tried again, until it runs, stops or waits; of one that ends
    /// by itself again and again, while it runs too.
    failure: Option<String>,
}

/// Of a machine that is off, and of which nothing was ever wanted.
impl Default for ObservedMachine {
    fn default() -> ObservedMachine {
        ObservedMachine::off(Revision::default())
    }
}

impl ObservedMachine {
    /// It is off, as the record of this revision wants it.
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
        ObservedMachine { status, seen, settled: true, disk: None, failure: None }
    }

    /// Something of it is there that this daemon has not looked at: of this run, if that can be read.
    pub fn found(run: Option<&RunRecord>, folder: &MachineFolder) -> ObservedMachine {
        let (mut known, status) = (ObservedMachine::default(), Status::new(Phase::Starting));
        let status = match run {
            Some(run) => status.of(run, folder),
            None => status,
        };
        known.update(status, Revision::default());
        known
    }

    /// Where it is on its way.
    pub fn phase(&self) -> Phase {
        self.status.phase
    }

    /// Why it has failed, if it has not run since.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// What its disk is, if there is one.
    pub fn disk(&self) -> Option<&DiskKind> {
        self.disk.as_ref()
    }

    /// Whether the record of this revision was looked at.
    pub fn has_seen(&self, wanted: Revision) -> bool {
        self.seen >= wanted
    }

    /// Whether it is what the record of this revision wants, or cannot become so.
    pub fn is_settled(&self, wanted: Revision) -> bool {
        self.settled && self.has_seen(wanted)
    }

    /// Whether it is settled of a record, and not only of there being none.
    pub fn is_recorded(&self) -> bool {
        self.settled && self.seen > Revision::default()
    }

    /// Whether it is settled and nothing of it is to run.
    pub fn is_idle(&self, wanted: Revision) -> bool {
        self.is_settled(wanted) && matches!(self.phase(), Phase::Stopped | Phase::Failed)
    }

    /// With what is wanted now.
    pub fn status(&self, wanted: Revision) -> MachineStatus {
        MachineStatus { settled: self.is_settled(wanted), ..self.status.clone() }
    }

    /// It is something else now, found out by a step that has looked at the record of this revision.
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
    }

    /// It has not become what was wanted.
    pub fn record_failure(&mut self, why: &HostError, seen: Revision) {
        self.set_phase(Phase::Failed);
        (self.status.message, self.status.code) = (Some(why.message.clone()), Some(why.code));
        (self.status.ready, self.status.permanent) = (false, why.is_permanent);
        (self.seen, self.settled, self.failure) = (seen, true, Some(why.message.clone()));
    }

    fn set_phase(&mut self, phase: Phase) {
        if self.status.phase != phase {
            (self.status.phase, self.status.since) = (phase, Some(Timestamp::now()));
        }
    }
}

/// What a machine becomes.
pub struct Status {
    phase: Phase,
    ready: bool,
    address: Option<String>,
    run: Option<MachineRun>,
    disk: Option<DiskKind>,
    settled: bool,
    /// It runs, and may end at any moment by itself: it has done so again and again.
    is_unstable: bool,
    message: Option<String>,
    code: Option<ErrorCode>,
}

impl Status {
    /// With nothing known but where it is on its way.
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

    /// For this reason.
    pub fn with_failure(self, why: &HostError) -> Status {
        Status { message: Some(why.message.clone()), code: Some(why.code), ..self }
    }

    /// Of this run.
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
            nbd_socket: (!is_ours).then(|| path(disk::NBD)),
            crashes: 0,
        });
        self
    }

    /// By these processes.
    pub fn by(mut self, disk: &Process, vmm: Option<&Process>) -> Status {
        if let Some(run) = &mut self.run {
            (run.disk_pid, run.vmm_pid) = (Some(disk.pid()), vmm.map(Process::pid));
        }
        self
    }

    /// Whether its guest is ready, and where it is then.
    pub fn ready(mut self, run: &RunRecord) -> Status {
        (self.ready, self.address) = (run.ready, run.address.clone());
        self
    }

    /// What a start would take that is something else, and how often the VMM has ended by itself.
    pub fn but(mut self, pending: Vec<Difference>, crashes: u32) -> Status {
        if let Some(run) = &mut self.run {
            (run.outdated, run.pending, run.crashes) = (!pending.is_empty(), pending, crashes);
        }
        self
    }

    /// Why it may not become ready, for people.
    pub fn hint(self, hint: Option<String>) -> Status {
        Status { message: hint.or(self.message), ..self }
    }

    /// Whether it has ended by itself again and again: then why it has failed stays known while it runs.
    pub fn unstable(self, is_unstable: bool) -> Status {
        Status { is_unstable, ..self }
    }

    /// It is what is wanted.
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
