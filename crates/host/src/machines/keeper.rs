//! What brings a machine to what is wanted of it: one task for each that runs or is to. Owns the conversation with its
//! VMM, and how often it has failed lately; what is wanted, and what runs, it looks up anew at every step.
//!
//! Invariant: a step may be broken off anywhere and done again: what it has recorded and what runs say where it was. What runs
//! is asked again and again, and what cannot be recorded of it stays known until it can: no step hangs on one event.

mod end;
mod place;
mod start;

use super::firmware::Firmware;
use super::placing::Made;
use super::run::{Folder, Run};
use super::status::{ObservedMachine, Status};
use super::vmm::{self, Vmm};
use super::wanted::Wanted;
use super::{Shared, blocking, disk};
use crate::error::HostError;
use crate::hypervisor::qmp::Event;
use crate::processes::{self, Process, Seen};
use crate::resources::budget::Need;
use crate::store::{Object, Revision};
use spillway_api::{Catalog, ErrorCode, EventKind, Hypervisor, Machine, Name, Phase, Power};
use spillway_control::{DiskSettings, Request, rate_is_met};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

/// Between two tries of what does not work: twice as long after each.
const RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// A VMM that has run so long does not fail at once.
const STABLE: Duration = Duration::from_secs(60);
/// How often it looks although nothing has happened.
const TICK: Duration = Duration::from_secs(30);

/// Before what an earlier machine has left, and could not be removed, is tried again.
const AGAIN: Duration = Duration::from_secs(10);

/// The task.
pub struct Keeper {
    shared: Arc<Shared>,
    name: Name,
    folder: Folder,
    poke: Arc<Notify>,
    status: watch::Sender<ObservedMachine>,
    vmm: Vmm,
    /// What its disk says.
    disk: disk::DiskEvents,
    /// It is recorded that its disk, which is kept, has been served.
    is_made: bool,
    /// Makes its private copy of the image.
    placing: Option<place::Placing>,
    /// Finds out when its guest is ready.
    probe: Option<JoinHandle<Option<String>>>,
    /// What that has found out and is not recorded yet: it is ready, and perhaps where it is.
    answered: Option<Option<String>>,
    /// When the VMM was started, by this daemon.
    begun: Option<Instant>,
    /// It is not started again before.
    not_before: Option<Instant>,
    /// Things that have not worked since it last ran for a while.
    failures: u32,
    crashes: u32,
    /// It was told that its VMM has ended by itself.
    is_told_of_end: bool,
    /// What was wanted, and the catalog's revision, when it failed in a way that no other try mends.
    given_up: Option<(Revision, u64)>,
    /// The revision of its catalog that the last step looked at.
    catalog_seen: u64,
    /// Whether its guest stays at its firmware.
    firmware: Firmware,
    /// It was told that something of an earlier machine of its name cannot be removed.
    is_left: bool,
    /// Why its limits are not those that are wanted.
    refused: Option<Refused>,
    /// It was told that it waits for space in the host's budget.
    waits: bool,
    /// What the last step looked at.
    seen: Revision,
}

/// Who refuses limits that are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Refused {
    /// The budget, so much.
    Budget(Need),
    /// The disk: the host has not enough memory at this moment.
    Disk,
    /// The disk, which knows no rates, when it was asked for this.
    Rate(DiskSettings),
}

/// What a step comes to.
enum Next {
    /// There is more to do.
    Again,
    /// Nothing until something happens.
    Rest(Wait),
    /// Nothing of the machine is left.
    Over,
}

/// What was heard while it waited.
enum Wakeup {
    Vmm(Event),
    Disk(String),
    /// It is ready, and perhaps there.
    Ready(Option<String>),
    /// Its copy is made, or cannot be.
    Placed(Result<Option<Made>, HostError>),
}

/// What is waited for, besides being told and what the VMM says.
struct Wait {
    disk: Option<OwnedFd>,
    vmm: Option<OwnedFd>,
    until: Instant,
}

impl Wait {
    fn until(until: Instant) -> Wait {
        Wait { disk: None, vmm: None, until }
    }

    fn at_most(self, time: Duration) -> Wait {
        Wait { until: self.until.min(Instant::now() + time), ..self }
    }

    fn for_end_of(disk: Option<&Process>, vmm: Option<&Process>) -> Result<Wait, HostError> {
        let watch = |process: Option<&Process>| process.map(Process::watch).transpose();
        Ok(Wait { disk: watch(disk)?, vmm: watch(vmm)?, until: Instant::now() + TICK })
    }
}

/// What a step is decided on.
struct Sight {
    machine: Option<Machine>,
    wanted: Wanted,
    revision: Revision,
    run: Result<ObservedRun, HostError>,
}

/// What there is of a run.
struct ObservedRun {
    run: Option<Run>,
    /// Something runs, and its record cannot be read.
    damaged: Option<HostError>,
}

impl ObservedRun {
    fn look(folder: &Folder) -> Result<ObservedRun, HostError> {
        match folder.load() {
            Err(e) if e.code == ErrorCode::Damaged => {
                let damaged = end::is_alive(folder)?.then_some(e);
                Ok(ObservedRun { run: None, damaged })
            }
            run => Ok(ObservedRun { run: run?, damaged: None }),
        }
    }
}

impl Keeper {
    pub fn new(
        shared: Arc<Shared>,
        name: Name,
        poke: Arc<Notify>,
        status: watch::Sender<ObservedMachine>,
    ) -> Keeper {
        let folder = Folder::of(&shared.parts.folder, &name);
        let vmm = Vmm::new(folder.clone(), Arc::clone(&shared.libvirt));
        Keeper {
            shared,
            name,
            folder,
            poke,
            status,
            vmm,
            disk: disk::DiskEvents::default(),
            is_made: false,
            placing: None,
            probe: None,
            answered: None,
            begun: None,
            not_before: None,
            failures: 0,
            crashes: 0,
            is_told_of_end: false,
            given_up: None,
            catalog_seen: 0,
            firmware: Firmware::default(),
            is_left: false,
            refused: None,
            waits: false,
            seen: Revision::default(),
        }
    }

    /// Until nothing of the machine is left to keep.
    pub async fn keep(mut self) {
        loop {
            let pokes = self.shared.pokes(&self.name);
            let wait = match self.step().await {
                Ok(Next::Again) => continue,
                Ok(Next::Rest(wait)) if self.is_left => wait.at_most(AGAIN),
                Ok(Next::Rest(wait)) => wait,
                Ok(Next::Over) if self.shared.let_go(&self.name, pokes) => return,
                Ok(Next::Over) => continue,
                Err(error) => self.has_failed(&error),
            };
            let noted = match self.wait(wait).await {
                // What is to be recorded of these two the next step records, and the one after that if it cannot.
                Some(Wakeup::Vmm(event)) => {
                    self.vmm.hear(&event);
                    Ok(())
                }
                Some(Wakeup::Ready(address)) => {
                    self.answered = Some(address);
                    Ok(())
                }
                Some(Wakeup::Disk(text)) => {
                    self.raise(EventKind::Disk, &text);
                    Ok(())
                }
                Some(Wakeup::Placed(made)) => self.is_placed(made).await,
                None => Ok(()),
            };
            if let Err(error) = noted {
                let until = self.has_failed(&error).until;
                // Not again before the pause is over, whatever wakes it; what is final waits for a change.
                self.not_before = self.given_up.is_none().then_some(until);
            }
        }
    }

    async fn step(&mut self) -> Result<Next, HostError> {
        let Sight { machine, wanted, revision, run } = self.look().await?;
        if self.seen != revision {
            // Somebody wants something: what has failed is tried at once.
            (self.not_before, self.failures, self.seen) = (None, 0, revision);
        }
        let ObservedRun { run, damaged } = run?;
        let stranger = |machine: &Machine| run.as_ref().is_some_and(|run| run.uuid != machine.identity.uuid);
        match machine {
            Some(machine) if wanted.power == Power::On && !stranger(&machine) => {
                damaged.map_or(Ok(()), Err)?;
                self.bring_up(&machine, &wanted, run).await
            }
            Some(machine) if !stranger(&machine) => self.bring_down(&wanted, run, Some(&machine)).await,
            // Of another machine, which had this one's name before, or of one that is no more.
            machine => match self.bring_down(&wanted, run, None).await? {
                Next::Over if machine.is_some() && wanted.power == Power::On => Ok(Next::Again),
                next => Ok(next),
            },
        }
    }

    async fn look(&self) -> Result<Sight, HostError> {
        let (shared, name, folder) = (Arc::clone(&self.shared), self.name.clone(), self.folder.clone());
        blocking(move || {
            let (machine, wanted) = loop {
                let machine = shared.objects.get::<Machine>(name.as_str())?;
                let wanted = shared.objects.get::<Wanted>(name.as_str())?;
                // Both go together. One that is deleted between the two would be one that is off, and its guest have no grace.
                let still = shared.objects.get::<Machine>(name.as_str())?.map(|machine| machine.revision);
                if still == machine.as_ref().map(|machine| machine.revision) {
                    break (machine.map(|machine| machine.value), wanted);
                }
            };
            let (wanted, revision) =
                wanted.map_or_else(Default::default, |w: Object<_>| (w.value, w.revision));
            Ok(Sight { machine, wanted, revision, run: ObservedRun::look(&folder) })
        })
        .await
    }

    /// Towards a machine that runs.
    async fn bring_up(
        &mut self,
        machine: &Machine,
        wanted: &Wanted,
        run: Option<Run>,
    ) -> Result<Next, HostError> {
        if let Some(until) = self.not_before.filter(|until| *until > Instant::now()) {
            return Ok(Next::Rest(Wait::until(until)));
        }
        if self.has_given_up(machine).await? {
            return Ok(Next::Rest(Wait::until(Instant::now() + TICK)));
        }
        if run.is_none() && !self.waits {
            // Before the catalog is read: a rollout takes what says that it runs at its word.
            self.say(Status::new(Phase::Starting));
        }
        self.dispose(Some(&machine.identity.uuid)).await;
        let Some(catalog) = self.catalog(machine).await? else {
            // Its machines go with it.
            return self.bring_down(wanted, run, None).await;
        };
        self.catalog_seen = catalog.revision;
        let Some(mut run) = run else {
            let need = Need::of(&catalog.spec, self.shared.parts.hypervisor);
            if let Some(status) = self.admit(need, Need::default()) {
                self.say(status);
                return Ok(Next::Rest(Wait::until(Instant::now() + TICK)));
            }
            self.begin_run(machine, &catalog, wanted).await?;
            return Ok(Next::Again);
        };
        let vmm = self.vmm.look(&run).await?;
        let Some(disk) = disk::find(&self.folder).await? else {
            return self.bring_up_disk(machine, &catalog, run, vmm).await;
        };
        if run.kept.is_some() && !self.is_made {
            let (shared, name) = (Arc::clone(&self.shared), self.name.clone());
            self.is_made = blocking(move || shared.disk_is_made(name.as_str())).await?;
        }
        self.disk.listen(self.folder.path()).await;
        match vmm {
            Seen::None if run.hypervisor == Hypervisor::None => {
                let is_asked = wanted.resets > run.resets || wanted.restarts > run.restarts;
                if is_asked || !run.ready && run.is_outdated(&catalog) {
                    return self.power_cycle(machine, &catalog, run, wanted, disk).await;
                }
                self.adjust(&catalog, &mut run).await?;
                if !run.ready {
                    run.ready = true;
                    self.folder.save_in_background(&run).await?;
                }
                Ok(Next::Rest(self.rests(&catalog, &run, &disk, None).await?))
            }
            Seen::None if run.is_outdated(&catalog) || wanted.resets > run.resets => {
                self.power_cycle(machine, &catalog, run, wanted, disk).await
            }
            Seen::None => {
                // One whose disk was served on while it was off had given its memory back.
                let need = run.need();
                if let Some(status) = self.admit(need, need.without_guest()) {
                    self.say(status.of(&run, &self.folder).by(&disk, None));
                    return Ok(Next::Rest(Wait::for_end_of(Some(&disk), None)?));
                }
                self.say(Status::new(Phase::Starting).of(&run, &self.folder));
                // What it was told before belongs to the last one.
                (run.ending, run.asked, run.ready, run.address) = (None, false, false, None);
                run.port = self.port_for(&run)?;
                run.user = self.shared.users().take(&self.name, &run.uuid)?;
                self.folder.save_in_background(&run).await?;
                self.start_vmm(machine, &run).await?;
                Ok(Next::Again)
            }
            Seen::Ended => self.vmm_has_ended(machine, &catalog, run, wanted, disk).await,
            Seen::Alive(vmm) => {
                let heard = self.vmm.attach(&vmm, &mut run).await;
                if run.ending.is_some() || wanted.resets > run.resets {
                    self.say(Status::new(Phase::Stopping).of(&run, &self.folder));
                    self.vmm.end(&vmm).await?;
                    return Ok(Next::Again);
                }
                if wanted.restarts > run.restarts {
                    self.say(Status::new(Phase::Stopping).of(&run, &self.folder));
                    if let Some(until) = self.vmm.shut_down(&vmm, &mut run, wanted.grace()).await? {
                        return Ok(Next::Rest(Wait { until, ..Wait::for_end_of(Some(&disk), Some(&vmm))? }));
                    }
                    self.vmm.end(&vmm).await?;
                    return Ok(Next::Again);
                }
                heard?;
                if self.begun.is_some_and(|begun| begun.elapsed() > STABLE) {
                    self.failures = 0;
                }
                let heeds_until = self.vmm.goes_on(&mut run, wanted.grace()).await?;
                self.adjust(&catalog, &mut run).await?;
                let ready = if run.spec.ready.is_none() { Some(None) } else { self.answered.clone() };
                if let (false, Some(address)) = (run.ready, ready) {
                    self.is_ready(address).await?;
                    return Ok(Next::Again);
                }
                self.probe(machine, &run);
                let wait = self.rests(&catalog, &run, &disk, Some(&vmm)).await?;
                let wait = wait.at_most(self.firmware.next_look());
                Ok(Next::Rest(Wait { until: heeds_until.unwrap_or(wait.until).min(wait.until), ..wait }))
            }
        }
    }

    /// It is as it is wanted.
    async fn rests(
        &mut self,
        catalog: &Catalog,
        run: &Run,
        disk: &Process,
        vmm: Option<&Process>,
    ) -> Result<Wait, HostError> {
        let status = Status::new(Phase::Running).of(run, &self.folder).by(disk, vmm).ready(run);
        let hint = match vmm {
            Some(_) => self.firmware.look(&self.folder, run).await,
            None => None,
        };
        let status = status.but(run.pending(catalog), self.crashes).hint(hint);
        self.say(if run.ready { status.settled() } else { status });
        let folder = self.folder.clone();
        blocking(move || {
            [disk::PROCESS, vmm::PROCESS].iter().for_each(|name| processes::bound_log(folder.path(), name));
            Ok(())
        })
        .await?;
        Wait::for_end_of(Some(disk), vmm)
    }

    /// What can change while it runs: the limits of its cache, by the catalog's wish and the host's memory.
    async fn adjust(&mut self, catalog: &Catalog, run: &mut Run) -> Result<(), HostError> {
        if run.spec.grace_seconds != catalog.spec.grace_seconds {
            // Should its machine be deleted, and its catalog with it.
            run.spec.grace_seconds = catalog.spec.grace_seconds;
            self.folder.save_in_background(run).await?;
        }
        let need = run.need_under(&catalog.spec);
        let promised = self.shared.promise(&self.name, need);
        if let Err(refused) = promised {
            self.is_refused(Refused::Budget(need), &refused);
            return Ok(());
        }
        let Some(wish) = run.wish(&catalog.spec, self.shared.squeeze()) else {
            self.refused = None;
            return Ok(());
        };
        // It would tell of it each time that it is asked.
        if self.refused == Some(Refused::Rate(wish)) {
            return Ok(());
        }
        let folder = self.folder.clone();
        let asked = wish;
        let limits = match blocking(move || disk::ask(folder.path(), &Request::Set(asked))).await {
            // It serves on, and is asked again at the next step.
            Err(refused) if refused.code == ErrorCode::Conflict => {
                self.is_refused(Refused::Disk, &refused);
                return Ok(());
            }
            set => set?,
        };
        if rate_is_met(&wish, &limits) {
            self.refused = None;
            run.has_limits(&wish);
        } else {
            let why = "its disk is served by an earlier version, which knows none: restart the machine";
            run.has_limits(&DiskSettings {
                ram_bytes: wish.ram_bytes,
                overflow_bytes: wish.overflow_bytes,
                ..DiskSettings::default()
            });
            self.is_refused(Refused::Rate(wish), &HostError::new(ErrorCode::Conflict, why));
        }
        self.folder.save_in_background(run).await
    }

    /// Promises the machine what it needs of the host. If that does not fit it waits, and this is what it is then; whoever
    /// gives enough back wakes it. While it waits it is promised at most what it `holds`: what its last run had is for others.
    fn admit(&mut self, need: Need, holds: Need) -> Option<Status> {
        let Err(lacking) = self.shared.promise(&self.name, need) else {
            self.waits = false;
            return None;
        };
        self.shared.lower(&self.name, holds);
        if !self.waits {
            self.raise(EventKind::Waiting, &format!("it waits: {lacking}"));
        }
        self.waits = true;
        Some(Status::new(Phase::Waiting).because(&lacking).settled())
    }

    /// Its limits stay as they are, which is told once.
    fn is_refused(&mut self, by: Refused, why: &HostError) {
        if self.refused.as_ref() != Some(&by) {
            let (kind, what) = match by {
                Refused::Rate(_) => (EventKind::Disk, "its rate has no limit"),
                Refused::Budget(_) | Refused::Disk => (EventKind::Memory, "its limits stay as they are"),
            };
            self.raise(kind, &format!("{what}: {why}"));
        }
        self.refused = Some(by);
    }

    /// Until something happens. What was said.
    async fn wait(&mut self, wait: Wait) -> Option<Wakeup> {
        tokio::select! {
            () = self.poke.notified() => None,
            () = processes::ended(wait.disk) => None,
            () = processes::ended(wait.vmm) => None,
            () = tokio::time::sleep_until(wait.until.into()) => None,
            event = self.vmm.event() => event.map(Wakeup::Vmm),
            text = self.disk.next() => text.map(Wakeup::Disk),
            made = place::placed(&mut self.placing) => Some(Wakeup::Placed(made)),
            address = start::answered(&mut self.probe) => Some(Wakeup::Ready(address)),
        }
    }

    /// What earlier machines of its name have left is not its: it starts whether that can be removed or not. What it leaves
    /// itself, should it be deleted now, is kept: it may run.
    pub(super) async fn dispose(&mut self, uuid: Option<&str>) {
        let (shared, name, uuid) = (Arc::clone(&self.shared), self.name.clone(), uuid.map(str::to_owned));
        let disposed = blocking(move || shared.dispose(&name, uuid.as_deref())).await;
        if let (Err(e), false) = (&disposed, self.is_left) {
            self.raise(
                EventKind::Failed,
                &format!("what an earlier machine of its name has left stays: {e}"),
            );
        }
        self.is_left = disposed.is_err();
    }

    async fn catalog(&self, machine: &Machine) -> Result<Option<Catalog>, HostError> {
        let (shared, name) = (Arc::clone(&self.shared), machine.catalog.clone());
        let found = blocking(move || Ok(shared.objects.get::<Catalog>(name.as_str())?)).await?;
        Ok(found.map(|catalog| catalog.value))
    }

    /// Whether it has failed in a way that no other try mends, and nothing has changed since.
    async fn has_given_up(&mut self, machine: &Machine) -> Result<bool, HostError> {
        let Some((wanted, catalog)) = self.given_up else { return Ok(false) };
        let now = self.catalog(machine).await?.map(|catalog| catalog.revision);
        if (self.seen, now) == (wanted, Some(catalog)) {
            return Ok(true);
        }
        self.given_up = None;
        Ok(false)
    }

    fn say(&self, status: Status) {
        self.status.send_modify(|known| known.becomes(status, self.seen));
        self.shared.stir.notify_one();
    }

    fn raise(&self, kind: EventKind, text: &str) {
        self.shared.events.raise(kind, &format!("machine/{}", self.name), text);
    }

    fn has_failed(&mut self, error: &HostError) -> Wait {
        let mut error = error.clone();
        if error.is_permanent {
            error.message.push_str(
                "; it is not tried again before 'machine start', or another setting or image of its catalog",
            );
            self.given_up = Some((self.seen, self.catalog_seen));
        }
        let seen = self.seen;
        self.status.send_modify(|known| known.fails(&error, seen));
        self.raise(EventKind::Failed, &error.message);
        match self.given_up {
            Some(_) => Wait::until(Instant::now() + TICK),
            None => Wait::until(Instant::now() + self.pause()),
        }
    }

    fn has_crashed(&mut self, why: &str) {
        self.crashes += 1;
        self.raise(EventKind::Crashed, why);
        self.not_before = Some(Instant::now() + self.pause());
    }

    fn pause(&mut self) -> Duration {
        let pause = RETRY.saturating_mul(1 << self.failures.min(6)).min(LONGEST_RETRY);
        self.failures += 1;
        pause
    }
}
