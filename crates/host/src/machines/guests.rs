//! What clients ask of guests by their agents: programs, and files. Owns how many do that at a time.
//!
//! Invariant: what a guest answers is of the run that it was asked in: a VMM that ends meanwhile ends the call. The calls, and the
//! memory for what guests say, are bounded.

use super::guest_agent::{AgentCall, AgentError, GuestAgent, file, program};
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

/// Most calls at a time. One keeps up to 2 MiB of outputs.
const MAX_CALLS: usize = 64;
/// Most calls of one machine at a time.
const MAX_CALLS_OF_MACHINE: usize = 8;
/// Most files at a time, each of which is in memory.
const MAX_FILES: usize = 8;
/// Most answers that are received at a time. Others wait for their turn.
const MAX_ANSWERS: usize = 16;

/// The guests of all machines.
pub struct Guests {
    reader: MachineReader,
    catalogs: Catalogs,
    folders: MachineFolders,
    libvirt: Arc<Libvirt>,
    places: Places,
    files: Arc<Semaphore>,
    answers: Arc<Semaphore>,
}

/// Memory for a file, which is free again when this is dropped.
pub struct FilePlace(#[expect(dead_code, reason = "it is held")] OwnedSemaphorePermit);

/// A call to the guest of one run of a machine.
pub struct GuestCall {
    name: Name,
    call: AgentCall,
    _place: CallPlace,
}

/// The calls of each machine, and of all. A clone is the same table.
#[derive(Clone, Default)]
struct Places(Arc<Mutex<BTreeMap<Name, MachineCalls>>>);

#[derive(Default)]
struct MachineCalls {
    count: usize,
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// A place among the calls, which is free again when this is dropped.
struct CallPlace {
    places: Places,
    name: Name,
}

impl Guests {
    /// Creates the guests of these machines.
    pub(super) fn new(reader: MachineReader, catalogs: Catalogs, shared: &MachineServices) -> Guests {
        let (folders, libvirt) = (shared.folders.clone(), Arc::clone(&shared.libvirt));
        let [files, answers] = [MAX_FILES, MAX_ANSWERS].map(|most| Arc::new(Semaphore::new(most)));
        Guests { reader, catalogs, folders, libvirt, places: Places::default(), files, answers }
    }

    /// Takes memory for a file, before that is received.
    pub fn file_place(&self) -> Result<FilePlace, HostError> {
        Arc::clone(&self.files).try_acquire_owned().map(FilePlace).map_err(|_| {
            let message = format!(
                "{MAX_FILES} files of guests are on their way, which is the most: try again in a moment"
            );
            HostError::new(ErrorCode::Busy, message)
        })
    }

    /// Begins a call to the guest of a machine that runs. Refused for a VMM that is not the daemon's: it has not the agent's
    /// channel either.
    pub async fn call(&self, name: &Name) -> Result<GuestCall, HostError> {
        let (reader, catalogs, asked) = (self.reader.clone(), self.catalogs.clone(), name.clone());
        let folder = self.folders.of(name);
        let (agent, vmm) = {
            let libvirt = Arc::clone(&self.libvirt);
            let folder = folder.clone();
            blocking(move || {
                let hypervisor = check_runs(&reader, &catalogs, &asked)?;
                let agent = match hypervisor {
                    Hypervisor::Libvirt => {
                        let run = folder.load()?.ok_or_else(|| off(&asked))?;
                        GuestAgent::Libvirt(libvirt, run.uuid)
                    }
                    Hypervisor::Qemu | Hypervisor::None => GuestAgent::Socket,
                };
                match processes::look(folder.path(), vmm::PROCESS)? {
                    ObservedProcess::Alive(process) => Ok((agent, process)),
                    ObservedProcess::None | ObservedProcess::Ended => Err(off(&asked)),
                }
            })
            .await?
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
        let (place, turn) = self.places.take(name)?;
        let is_over = Box::new(move || vmm.ends_within(Duration::ZERO));
        let call = AgentCall { agent, folder, turn, answers: Arc::clone(&self.answers), is_over };
        Ok(GuestCall { name: name.clone(), call, _place: place })
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
    /// Starts a program. Returns its id in the guest.
    pub async fn start(&self, asked: &GuestProgram) -> Result<u64, HostError> {
        asked.check().map_err(HostError::invalid)?;
        let question: Value = program::question(asked).ok_or_else(|| {
            let message = format!(
                "argv, environment and stdin_base64 take more than {} KiB together: put larger data into a file first",
                MOST_GUEST_COMMAND_BYTES >> 10
            );
            HostError::new(ErrorCode::TooLarge, message)
        })?;
        let started = program::start(&self.call, &question).await;
        started.map_err(|e| self.failed(e, "the program cannot be started"))
    }

    /// Waits until a program has ended, at most so long.
    pub async fn wait(&self, pid: u64, limit: Duration) -> Result<GuestProgramResult, HostError> {
        let ended = program::wait(&self.call, pid, limit).await;
        ended.map_err(|e| self.failed(e, &format!("what became of its process {pid} is not known")))
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

impl Places {
    fn take(&self, name: &Name) -> Result<(CallPlace, Arc<tokio::sync::Mutex<()>>), HostError> {
        let busy = |message: String| HostError::new(ErrorCode::Busy, message);
        let mut table = self.table();
        if table.values().map(|calls| calls.count).sum::<usize>() >= MAX_CALLS {
            return Err(busy(format!(
                "{MAX_CALLS} programs and files of guests are waited for, which is the most: wait for one of them"
            )));
        }
        let calls = table.entry(name.clone()).or_default();
        if calls.count >= MAX_CALLS_OF_MACHINE {
            return Err(busy(format!(
                "{MAX_CALLS_OF_MACHINE} programs and files of {name} are waited for, which is the most: wait for one of them"
            )));
        }
        calls.count += 1;
        Ok((CallPlace { places: self.clone(), name: name.clone() }, Arc::clone(&calls.turn)))
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<Name, MachineCalls>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for CallPlace {
    fn drop(&mut self) {
        let mut table = self.places.table();
        if let Some(calls) = table.get_mut(&self.name) {
            calls.count -= 1;
            if calls.count == 0 {
                table.remove(&self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calls_of_a_machine_and_of_all_are_bounded() {
        let places = Places::default();
        let name = |n: usize| format!("desk-{n:03}").parse::<Name>().unwrap();
        let refused = |n: usize| places.take(&name(n)).err().map(|e| (e.code, e.message));
        let mut taken: Vec<_> = (0..MAX_CALLS_OF_MACHINE).map(|_| places.take(&name(0)).unwrap()).collect();
        let (code, message) = refused(0).unwrap();
        assert!(code == ErrorCode::Busy && message.contains("of desk-000"), "{message}");
        assert!(taken.iter().all(|(_, turn)| Arc::ptr_eq(turn, &taken[0].1)), "one asks at a time");
        taken.extend((MAX_CALLS_OF_MACHINE..MAX_CALLS).map(|n| places.take(&name(n)).unwrap()));
        let (code, message) = refused(1).unwrap();
        assert!(code == ErrorCode::Busy && message.starts_with("64 programs"), "{message}");
        taken.pop();
        drop(places.take(&name(1)).unwrap());
        drop(taken);
        assert!(places.table().is_empty());
    }
}
