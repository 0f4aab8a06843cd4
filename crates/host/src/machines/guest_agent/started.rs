//! Programs of one machine's guests that agents have started, and whose results they may still have. Owns which of them nobody waits
//! for any more: an agent keeps up to 32 MiB of outputs for each until it is asked for the result.
//!
//! Invariant: a result is given to who has started the program. A process id that is given again while a program has it belongs to
//! a guest that has restarted, so the earlier program is forgotten.

use super::channel::IsOver;
use std::sync::{Arc, Mutex, MutexGuard};

/// Most programs of a machine that are remembered although nobody waits for them. The oldest are forgotten.
const MAX_ABANDONED: usize = 16;

/// The programs. A clone is the same list.
#[derive(Clone, Default)]
pub struct StartedPrograms(Arc<Mutex<ProgramList>>);

#[derive(Default)]
struct ProgramList {
    programs: Vec<ListedProgram>,
    last_id: u64,
}

struct ListedProgram {
    /// Different for each program, unlike the process id.
    id: u64,
    pid: u64,
    /// Whether nobody waits for its end.
    is_abandoned: bool,
    /// Whether the VMM of its guest has ended.
    is_over: IsOver,
}

/// A program that was started. One that is dropped before its result was taken is abandoned.
pub struct StartedProgram {
    list: StartedPrograms,
    id: u64,
    pub pid: u64,
}

impl StartedPrograms {
    /// Adds a program that an agent has started with this process id.
    pub fn add(&self, pid: u64, is_over: &IsOver) -> StartedProgram {
        let mut list = self.list();
        list.programs.retain(|program| program.pid != pid && !(program.is_over)());
        list.last_id += 1;
        let id = list.last_id;
        list.programs.push(ListedProgram { id, pid, is_abandoned: false, is_over: Arc::clone(is_over) });
        StartedProgram { list: self.clone(), id, pid }
    }

    /// The programs that nobody waits for.
    pub fn abandoned(&self) -> Vec<StartedProgram> {
        let list = self.list();
        let abandoned = list.programs.iter().filter(|program| program.is_abandoned);
        abandoned
            .map(|program| StartedProgram { list: self.clone(), id: program.id, pid: program.pid })
            .collect()
    }

    /// Whether there are none, after those of guests that have ended were forgotten.
    pub fn is_empty(&self) -> bool {
        let mut list = self.list();
        list.programs.retain(|program| !(program.is_over)());
        list.programs.is_empty()
    }

    fn list(&self) -> MutexGuard<'_, ProgramList> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl StartedProgram {
    /// Whether its result was taken, or its process id was given again.
    pub fn is_forgotten(&self) -> bool {
        !self.list.list().programs.iter().any(|program| program.id == self.id)
    }

    /// Notes that the agent does not have it any more.
    pub fn forget(&self) {
        self.list.list().programs.retain(|program| program.id != self.id);
    }
}

impl Drop for StartedProgram {
    fn drop(&mut self) {
        let mut list = self.list.list();
        if let Some(program) = list.programs.iter_mut().find(|program| program.id == self.id) {
            program.is_abandoned = true;
        }
        let abandoned = list.programs.iter().filter(|program| program.is_abandoned);
        if abandoned.count() > MAX_ABANDONED
            && let Some(oldest) = list.programs.iter().position(|program| program.is_abandoned)
        {
            list.programs.remove(oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_process_id_that_is_given_again_belongs_to_the_last_program() {
        let (programs, runs): (_, IsOver) = (StartedPrograms::default(), Arc::new(|| false));
        let first = programs.add(7, &runs);
        let other = programs.add(8, &runs);
        let second = programs.add(7, &runs);
        assert!(first.is_forgotten() && !other.is_forgotten() && !second.is_forgotten());
        drop(first);
        assert!(programs.abandoned().is_empty());
        second.forget();
        assert!(second.is_forgotten());
    }

    #[test]
    fn abandoned_programs_are_remembered_a_bounded_number_and_while_their_vmm_runs() {
        let programs = StartedPrograms::default();
        let has_ended = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&has_ended);
        let is_over: IsOver = Arc::new(move || ended.load(Ordering::Relaxed));
        let waited = programs.add(1, &is_over);
        for pid in 2..100 {
            drop(programs.add(pid, &is_over));
        }
        let pids: Vec<_> = programs.abandoned().iter().map(|program| program.pid).collect();
        assert_eq!(pids, Vec::from_iter(100 - MAX_ABANDONED as u64..100));
        assert!(!waited.is_forgotten() && !programs.is_empty());
        has_ended.store(true, Ordering::Relaxed);
        assert!(programs.is_empty() && waited.is_forgotten());
    }
}
