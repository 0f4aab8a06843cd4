//! What is done before it may be: completions of stores that are as slow as a storage model says, and when each is due. Owns
//! the models and what is held; a disk without a model has none of this.
//!
//! Invariant: what is held is answered once, no earlier than it is due, in the order in which it is.

use super::engine::{Done, File, Tag};
use super::error::{Error, ErrorKind};
use spillway_control::storage_model::Model;
use spillway_core::{Errno, OpId};
use spillway_image::StoreRead;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::os::fd::OwnedFd;

/// What is due so soon is polled for: a sleep may end later than it should by as much.
const SOON_NS: u64 = 40_000;
/// What is asked in one turn, each where the last ended, is one request for each so many bytes: the block layer of a host
/// would merge it, and the core cuts what a guest asks in parts.
const MERGED_BYTES: u64 = 256 << 10;

/// The models of a disk that has any.
pub(super) struct Models {
    base: Option<Model>,
    overflow: Option<Model>,
    /// What the disk's files are called on the device: no other disk's are.
    disk_id: u64,
    /// The last of each kind: reads of the base image, of the overflow, and writes.
    runs: [Run; 3],
    /// Completions that came early, by when they are due.
    early: BinaryHeap<Reverse<(u64, Tag, i32)>>,
    /// Reads by the base image's thread, by operation.
    jobs: HashMap<u32, Job>,
}

/// Requests of one turn that are one on the device, and when that is due.
#[derive(Clone, Copy, Default)]
struct Run {
    at_ns: u64,
    from: u64,
    end: u64,
    due_ns: u64,
}

/// A read by the base image's thread: since when, and what came of it.
struct Job {
    since_ns: u64,
    came: Option<Result<Vec<u8>, Errno>>,
}

impl Models {
    /// Of the base image's store, and of the overflow or difference file's. `None`: there is none.
    pub fn open(
        base: Option<OwnedFd>,
        overflow: Option<OwnedFd>,
        disk_id: u64,
    ) -> Result<Option<Box<Models>>, Error> {
        let open = |fd: Option<OwnedFd>| {
            fd.map(Model::open).transpose().map_err(|e| {
                Error::new(ErrorKind::Resources, "the memory of a storage model cannot be used").because(e)
            })
        };
        let (base, overflow) = (open(base)?, open(overflow)?);
        let any = base.is_some() || overflow.is_some();
        let (runs, early, jobs) = (Default::default(), BinaryHeap::new(), HashMap::new());
        Ok(any.then(|| Box::new(Models { base, overflow, disk_id, runs, early, jobs })))
    }

    /// A read of a store begins: when it is due. 0: when it is done.
    pub fn begin_read(&mut self, now_ns: u64, file: File, offset: u64, len: u64) -> u64 {
        match file {
            File::Base => self.begin(0, now_ns, offset, len),
            File::Overflow => self.begin(1, now_ns, offset, len),
        }
    }

    /// The same for a write.
    pub fn begin_write(&mut self, now_ns: u64, offset: u64, len: u64) -> u64 {
        self.begin(2, now_ns, offset, len)
    }

    fn begin(&mut self, kind: usize, now_ns: u64, offset: u64, len: u64) -> u64 {
        let (model, file) = if kind == 0 { (&self.base, 0) } else { (&self.overflow, 1) };
        let Some(model) = model else { return 0 };
        let run = &mut self.runs[kind];
        if (run.at_ns, run.end) != (now_ns, offset) {
            *run = Run { at_ns: now_ns, from: offset, end: offset, due_ns: 0 };
        }
        let begun = (run.end - run.from).div_ceil(MERGED_BYTES);
        run.end = offset.saturating_add(len);
        let requests = (run.end - run.from).div_ceil(MERGED_BYTES) - begun;
        let file = self.disk_id.wrapping_mul(2).wrapping_add(file);
        run.due_ns = run.due_ns.max(model.begin(now_ns, file, offset, len, requests));
        run.due_ns
    }

    /// Keeps a completion until it is due.
    pub fn hold(&mut self, due_ns: u64, tag: Tag, result: i32) {
        self.early.push(Reverse((due_ns, tag, result)));
    }

    /// Completions of reads that are.
    pub fn held_reads(&self) -> usize {
        self.early.iter().filter(|Reverse((_, tag, _))| matches!(tag, Tag::Read(_))).count()
    }

    /// When to wake for what is due next.
    pub fn wake_ns(&self) -> Option<u64> {
        self.early.peek().map(|Reverse((due_ns, ..))| due_ns.saturating_sub(SOON_NS))
    }

    /// The base image's thread gets a read.
    pub fn job(&mut self, op: OpId, since_ns: u64) {
        if self.base.is_some() {
            self.jobs.insert(op.0, Job { since_ns, came: None });
        }
    }

    /// Reads that the thread has, or has done, and that are not answered.
    pub fn jobs(&self) -> usize {
        self.jobs.len()
    }

    /// The thread has done one, with these reads of the store one after the other. Its content is given back, unless it is held.
    pub fn job_done(
        &mut self,
        op: OpId,
        now_ns: u64,
        reads: &[StoreRead],
        came: Result<Vec<u8>, Errno>,
    ) -> Option<Result<Vec<u8>, Errno>> {
        let Some(since_ns) = self.jobs.get(&op.0).map(|job| job.since_ns) else { return Some(came) };
        let begin = |read: &StoreRead| self.begin_read(since_ns, File::Base, read.offset, read.len);
        let due_ns = reads.iter().map(begin).max().unwrap_or(0);
        // At once they would share the latency.
        let latency_ns = self.base.as_ref().map_or(0, |model| model.parameters().latency_ns);
        let more = reads.len().saturating_sub(1) as u64;
        let due_ns = due_ns.saturating_add(latency_ns.saturating_mul(more));
        if due_ns <= now_ns {
            self.jobs.remove(&op.0);
            return Some(came);
        }
        self.jobs.insert(op.0, Job { since_ns, came: Some(came) });
        self.hold(due_ns, Tag::Job(op.0), 0);
        None
    }

    /// What was held and is due.
    pub fn take_due(&mut self, now_ns: u64, out: &mut Vec<Done>) {
        while let Some(&Reverse((due_ns, tag, result))) = self.early.peek()
            && due_ns <= now_ns
        {
            self.early.pop();
            out.push(Done { tag, result, more: false });
        }
    }

    /// A read of the thread's that was held is due: what came.
    pub fn job_due(&mut self, n: u32) -> Option<Result<Vec<u8>, Errno>> {
        self.jobs.remove(&n)?.came
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_control::storage_model::Parameters;
    use std::io::Write;

    fn model(parameters: Parameters) -> OwnedFd {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&Model::file(parameters)).unwrap();
        file.into()
    }

    #[test]
    fn a_job_takes_what_its_reads_of_the_store_take_and_nothing_without_any() {
        let latency = Parameters { latency_ns: 1000, ..Parameters::default() };
        let mut models = Models::open(Some(model(latency)), None, 7).unwrap().unwrap();
        models.job(OpId(1), 5000);
        models.job(OpId(2), 5000);
        models.job(OpId(3), 5000);
        assert_eq!(models.begin_write(5000, 0, 4096), 0, "that store has no model");
        assert!(models.job_done(OpId(1), 5100, &[], Ok(vec![1])).is_some());
        let read = |offset| StoreRead { offset, len: 4096 };
        assert!(models.job_done(OpId(2), 5100, &[read(0), read(1 << 20)], Ok(vec![2])).is_none());
        assert_eq!(models.early.peek(), Some(&Reverse((7000, Tag::Job(2), 0))));
        assert!(models.job_done(OpId(3), 9000, &[read(0)], Ok(vec![3])).is_some(), "it took longer");
        assert_eq!((models.jobs(), models.wake_ns()), (1, Some(0)));
        assert!(Models::open(None, None, 7).unwrap().is_none());
    }

    #[test]
    fn what_goes_on_where_the_last_ended_is_one_request_for_each_256_kib() {
        let one_in_a_second = Parameters { iops: 1, ..Parameters::default() };
        let model = model(one_in_a_second);
        let mut models = Models::open(None, Some(model), 7).unwrap().unwrap();
        const SECOND: u64 = 1_000_000_000;
        let mut write = |now_s: u64, at_kib: u64, kib: u64| {
            models.begin_write(now_s * SECOND, at_kib << 10, kib << 10).div_ceil(SECOND)
        };
        // 1 MiB in parts of 192 KiB, from the tenth second on.
        let parts = [0, 192, 384, 576, 768, 960].map(|at| write(10, at, 192.min(1024 - at)));
        assert_eq!(parts, [10, 11, 12, 12, 13, 13]);
        assert_eq!(write(10, 2048, 4), 14, "elsewhere");
        assert_eq!(write(12, 2052, 4), 15, "later");
        assert_eq!(models.begin_read(100 * SECOND, File::Overflow, 0, 4096), 100 * SECOND);
    }
}
