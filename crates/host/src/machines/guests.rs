//! What clients ask of guests by their agents: programs, and files. Owns how many do that at a time.
//!
//! Invariant: what a guest answers is of the run that it was asked in: a VMM that ends meanwhile ends the call. The calls, and the
//! memory for what guests say, are bounded.

use super::guest_agent::{AgentCall, AgentChannel, AgentError, GuestAgent, StartedProgram, file, program};
use super::run::MachineFolders;
use super::shared::MachineServices;
use super::views::MachineReader;
use super::{blocking, vmm};
use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::hypervisor::libvirt::Libvirt;
use crate::processes::{self, ObservedProcess, Process};
use serde_json::Value;
use spillway_api::{
    ErrorCode, GuestProgram, GuestProgramResult, Hypervisor, MOST_GUEST_COMMAND_BYTES, Name, VmmKind,
};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Most calls at a time. One keeps up to 2 MiB of outputs.
const MAX_CALLS: usize = 64;
/// Most calls of one machine at a time.
const MAX_CALLS_OF_MACHINE: usize = 8;
/// Most files at a time, each of which is in memory.
const MAX_FILES: usize = 8;
/// Most files of one machine at a time. One is on its way to or from the guest, and one to or from a client.
const MAX_FILES_OF_MACHINE: usize = 2;
/// Longest wait for the files of other calls of the machine.
const FILE_PATIENCE: Duration = Duration::from_secs(60);
/// Most answers that are received at a time. Others wait for their turn.
const MAX_ANSWERS: usize = 16;

/// The guests of all machines.
pub struct Guests {
    reader: MachineReader,
    catalogs: Catalogs,
    folders: MachineFolders,
    libvirt: Arc<Libvirt>,
    calls: GuestCalls,
    files: Arc<Semaphore>,
    answers: Arc<Semaphore>,
}

/// Memory for a file, which is free again when this is dropped.
#[expect(dead_code, reason = "they are held")]
pub struct FilePlace {
    of_all: OwnedSemaphorePermit,
    of_machine: OwnedSemaphorePermit,
}

/// A call to the guest of one run of a machine.
pub struct GuestCall {
    name: Name,
    call: AgentCall,
    files: Arc<Semaphore>,
    place: CallPlace,
}

/// The calls of each machine, and of all. A clone is the same table.
#[derive(Clone, Default)]
pub struct GuestCalls(Arc<Mutex<BTreeMap<Name, MachineCalls>>>);

/// The calls of a machine. They are kept while there is one, or its agent may have results that nobody waits for.
struct MachineCalls {
    count: usize,
    channel: Arc<AgentChannel>,
    files: Arc<Semaphore>,
}

/// A place among the calls, which is free again when this is dropped.
struct CallPlace {
    calls: GuestCalls,
    name: Name,
    channel: Arc<AgentChannel>,
    files: Arc<Semaphore>,
}

impl Guests {
    /// Creates the guests of these machines.
    pub(super) fn new(reader: MachineReader, catalogs: Catalogs, shared: &MachineServices) -> Guests {
        let (folders, libvirt) = (shared.folders.clone(), Arc::clone(&shared.libvirt));
        let calls = shared.guests.calls.clone();
        let [files, answers] = [MAX_FILES, MAX_ANSWERS].map(|most| Arc::new(Semaphore::new(most)));
        Guests { reader, catalogs, folders, libvirt, calls, files, answers }
    }

    /// Begins a call to the guest of a machine that runs. Refused for a VMM that is not the daemon's: it has not the agent's
    /// channel either.
    pub async fn call(&self, name: &Name) -> Result<GuestCall, HostError> {
        let (reader, catalogs, asked) = (self.reader.clone(), self.catalogs.clone(), name.clone());
        let folder = self.folders.of(name);
        let (hypervisor, uuid, vmm) = {
            let folder = folder.clone();
            blocking(move || {
                let hypervisor = check_runs(&reader, &catalogs, &asked)?;
                let run = folder.load()?.ok_or_else(|| off(&asked))?;
                match processes::look(folder.path(), vmm::PROCESS)? {
                    ObservedProcess::Alive(process) => Ok((hypervisor, run.uuid, process)),
                    ObservedProcess::None | ObservedProcess::Ended => Err(off(&asked)),
                }
            })
            .await?
        };
        let agent = match hypervisor {
            // The process was alive before and is looked at again before it is asked: this is its run.
            Hypervisor::Libvirt => {
                let run = self.libvirt.run_of(&uuid).await?.ok_or_else(|| off(name))?;
                GuestAgent::Libvirt(Arc::clone(&self.libvirt), run)
            }
            Hypervisor::Qemu | Hypervisor::None => GuestAgent::Socket,
        };
        self.begin(name, agent, folder.path().to_owned(), vmm)
    }

    fn begin(
        &self,
        name: &Name,
        agent: GuestAgent,
        folder: PathBuf,
        vmm: Process,
    ) -> Result<GuestCall, HostError> {
        let place = self.calls.take(name)?;
        let is_over = Arc::new(move || vmm.ends_within(Duration::ZERO));
        let (channel, answers) = (Arc::clone(&place.channel), Arc::clone(&self.answers));
        let call = AgentCall::new(agent, folder, channel, answers, is_over);
        Ok(GuestCall { name: name.clone(), call, files: Arc::clone(&self.files), place })
    }
}

fn off(name: &Name) -> HostError {
    let message = format!("{name} does not run: start it first ('spillway machine start {name} --wait')");
    HostError::new(ErrorCode::Conflict, message)
}

/// Returns what runs a machine; an error if it does not run, or the daemon does not run it.
fn check_runs(reader: &MachineReader, catalogs: &Catalogs, name: &Name) -> Result<Hypervisor, HostError> {
    let machine = reader.get(name)?;
    let is_external = match &machine.status.run {
        Some(run) => run.hypervisor == Hypervisor::None,
        None => catalogs.get(&machine.machine.catalog)?.spec.hardware.vmm == VmmKind::External,
    };
    if is_external {
        let message = format!(
            "{name} has a VMM that another program runs, and so has its guest agent: ask it there ('virsh qemu-agent-command', \
             'qm guest exec')"
        );
        return Err(HostError::new(ErrorCode::Conflict, message));
    }
    match machine.status.run {
        Some(run) if run.vmm_pid.is_some() => Ok(run.hypervisor),
        _ => Err(off(name)),
    }
}

impl GuestCall {
    /// Takes memory for a file, before that is received. Waits for other files of the machine.
    pub async fn file_place(&self) -> Result<FilePlace, HostError> {
        let busy = |message: String| HostError::new(ErrorCode::Busy, message);
        let of_machine = timeout(FILE_PATIENCE, Arc::clone(&self.place.files).acquire_owned()).await;
        let Ok(Ok(of_machine)) = of_machine else {
            return Err(busy(format!(
                "{MAX_FILES_OF_MACHINE} files of {} are on their way, which is the most: try again when one has arrived",
                self.name
            )));
        };
        let of_all = Arc::clone(&self.files).try_acquire_owned().map_err(|_| {
            busy(format!(
                "{MAX_FILES} files of guests are on their way, which is the most: try again in a moment"
            ))
        })?;
        Ok(FilePlace { of_all, of_machine })
    }

    /// Starts a program.
    pub async fn start(&self, asked: &GuestProgram) -> Result<StartedProgram, HostError> {
        asked.check().map_err(HostError::invalid)?;
        let question: Value = program::question(asked).ok_or_else(|| {
            let message = format!(
                "argv, environment and stdin_base64 take more than {} KiB together: put larger data into a file first",
                MOST_GUEST_COMMAND_BYTES >> 10
            );
            HostError::new(ErrorCode::TooLarge, message)
        })?;
        let started = program::start(&self.call, &question).await;
        started.map_err(|e| {
            let may_run = self.call.is_sent() && !matches!(e, AgentError::Refused(_));
            let what = match may_run {
                true => "it is not known whether the program was started",
                false => "the program cannot be started",
            };
            self.failed(e, what)
        })
    }

    /// Waits until a program has ended, at most so long.
    pub async fn wait(
        &self,
        program: StartedProgram,
        limit: Duration,
    ) -> Result<GuestProgramResult, HostError> {
        let ended = program::wait(&self.call, &program, limit).await;
        ended.map_err(|e| self.failed(e, &format!("what became of its process {} is not known", program.pid)))
    }

    /// Reads a file.
    pub async fn read(&self, path: &str) -> Result<Vec<u8>, HostError> {
        file::read(&self.call, path).await.map_err(|e| self.failed(e, "the file cannot be read"))
    }

    /// Writes a file.
    pub async fn write(&self, path: &str, content: &[u8]) -> Result<(), HostError> {
        let written = file::write(&self.call, path, content).await;
        written.map_err(|e| self.failed(e, "the file cannot be written in full"))
    }

    fn failed(&self, error: AgentError, what: &str) -> HostError {
        error.of(&self.name, what)
    }
}

impl GuestCalls {
    fn take(&self, name: &Name) -> Result<CallPlace, HostError> {
        let busy = |message: String| HostError::new(ErrorCode::Busy, message);
        let mut table = self.table();
        table.retain(|_, calls| calls.is_needed());
        if table.values().map(|calls| calls.count).sum::<usize>() >= MAX_CALLS {
            return Err(busy(format!(
                "{MAX_CALLS} programs and files of guests are waited for, which is the most: wait for one of them"
            )));
        }
        let calls = table.entry(name.clone()).or_insert_with(|| MachineCalls {
            count: 0,
            channel: Arc::default(),
            files: Arc::new(Semaphore::new(MAX_FILES_OF_MACHINE)),
        });
        if calls.count >= MAX_CALLS_OF_MACHINE {
            return Err(busy(format!(
                "{MAX_CALLS_OF_MACHINE} programs and files of {name} are waited for, which is the most: wait for one of them"
            )));
        }
        calls.count += 1;
        let (channel, files) = (Arc::clone(&calls.channel), Arc::clone(&calls.files));
        Ok(CallPlace { calls: self.clone(), name: name.clone(), channel, files })
    }

    /// Ends the calls of a machine whose guest is asked to shut down: its agent has one client at a time.
    pub fn end_of(&self, name: &Name) {
        if let Some(calls) = self.table().get(name) {
            calls.channel.end_calls();
        }
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<Name, MachineCalls>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl MachineCalls {
    fn is_needed(&self) -> bool {
        self.count > 0 || !self.channel.programs.is_empty()
    }
}

impl Drop for CallPlace {
    fn drop(&mut self) {
        let mut table = self.calls.table();
        if let Some(calls) = table.get_mut(&self.name) {
            calls.count -= 1;
            if !calls.is_needed() {
                table.remove(&self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn name(n: usize) -> Name {
        format!("desk-{n:03}").parse().unwrap()
    }

    #[test]
    fn the_calls_of_a_machine_and_of_all_are_bounded() {
        let places = GuestCalls::default();
        let refused = |n: usize| places.take(&name(n)).err().map(|e| (e.code, e.message));
        let mut taken: Vec<_> = (0..MAX_CALLS_OF_MACHINE).map(|_| places.take(&name(0)).unwrap()).collect();
        let (code, message) = refused(0).unwrap();
        assert!(code == ErrorCode::Busy && message.contains("of desk-000"), "{message}");
        let is_shared = |place: &CallPlace| Arc::ptr_eq(&place.channel, &taken[0].channel);
        assert!(taken.iter().all(is_shared), "one asks at a time");
        taken.extend((MAX_CALLS_OF_MACHINE..MAX_CALLS).map(|n| places.take(&name(n)).unwrap()));
        let (code, message) = refused(1).unwrap();
        assert!(code == ErrorCode::Busy && message.starts_with("64 programs"), "{message}");
        taken.pop();
        drop(places.take(&name(1)).unwrap());
        drop(taken);
        assert!(places.table().is_empty());
    }

    #[test]
    fn abandoned_programs_are_remembered_until_their_vmm_ends() {
        let calls = GuestCalls::default();
        let has_ended = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&has_ended);
        let place = calls.take(&name(0)).unwrap();
        drop(place.channel.programs.add(7, &(Arc::new(move || ended.load(Ordering::Relaxed)) as _)));
        drop(place);
        assert_eq!(calls.take(&name(0)).unwrap().channel.programs.abandoned().len(), 1);
        has_ended.store(true, Ordering::Relaxed);
        drop(calls.take(&name(1)).unwrap());
        assert!(calls.table().is_empty());
    }

    fn call_of(n: usize, calls: &GuestCalls, files: &Arc<Semaphore>) -> GuestCall {
        let (place, answers) = (calls.take(&name(n)).unwrap(), Arc::new(Semaphore::new(1)));
        let channel = Arc::clone(&place.channel);
        let call =
            AgentCall::new(GuestAgent::Socket, "/nonexistent".into(), channel, answers, Arc::new(|| false));
        GuestCall { name: name(n), call, files: Arc::clone(files), place }
    }

    #[tokio::test]
    async fn files_of_one_machine_leave_memory_for_those_of_others() {
        let (calls, files) = (GuestCalls::default(), Arc::new(Semaphore::new(MAX_FILES)));
        // A call lasts as long as its file.
        let two = [call_of(0, &calls, &files), call_of(0, &calls, &files)];
        let mut held = vec![two[0].file_place().await.unwrap(), two[1].file_place().await.unwrap()];
        let third = call_of(0, &calls, &files);
        let soon = Duration::from_millis(50);
        assert!(timeout(soon, third.file_place()).await.is_err(), "it waits for the other two");
        call_of(1, &calls, &files).file_place().await.unwrap();
        let first = held.pop().unwrap();
        let (waited, ()) = tokio::join!(third.file_place(), async { drop(first) });
        held.push(waited.unwrap());
        for n in 2.. {
            match call_of(n, &calls, &files).file_place().await {
                Ok(place) => held.push(place),
                Err(error) => {
                    assert!(error.message.starts_with("8 files of guests"), "{error}");
                    break;
                }
            }
        }
        assert_eq!(held.len(), MAX_FILES);
    }
}
