//! The disks of machines, whose counters are read. Owns for each a connection, and a window on the memory in which it counts:
//! reading that costs neither a call of the kernel nor the disk's own time, and goes on when who answers for the disk hangs.
//!
//! Invariant: a connection is in the table while nothing is asked over it. One whose answer has not come in time is gone: a late
//! answer is nobody's.

use super::accounts::{DiskId, DiskReport};
use super::{all_of, answer, connect, strange};
use crate::json_lines::JsonLines;
use crate::machines::View;
use crate::machines::run::MachineFolders;
use crate::processes;
use rustix::process::Pid;
use spillway_api::{DiskCounters, DiskLevels, Greatest, Name, PlaneCounters};
use spillway_control::{Plane, Request, Response, Stats, Window};
use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;
use tokio::time::Instant;

/// How often a disk is asked: whether it answers, and for what its memory does not tell.
const ASK: Duration = Duration::from_secs(5);

/// The disks that are read.
#[derive(Default)]
pub struct DiskReaders(Mutex<HashMap<Name, DiskReader>>);

/// A disk that has answered.
struct DiskReader {
    id: DiskId,
    /// `None`: its memory was not passed, and it is asked for it again.
    window: Option<Window>,
    /// `None`: it is being asked, or has not answered.
    lines: Option<JsonLines>,
    /// When it has answered, and the space that its overflow file took then.
    answered: Instant,
    file_bytes: u64,
}

impl DiskReader {
    /// Connects, and asks for the first time. Returns what it has said as well.
    async fn connect(folder: PathBuf) -> io::Result<(DiskReader, DiskReport)> {
        let mut lines = connect(&folder).await?;
        let pid = lines.peer_pid().and_then(Pid::from_raw).ok_or_else(|| strange("nobody is there"))?;
        let begun = processes::begins(pid)?.ok_or_else(|| strange("it has ended"))?;
        let id = DiskId { pid: pid.as_raw_nonzero().get(), begun };
        let window = window(&mut lines).await?;
        let stats = ask(&mut lines).await?;
        let (answered, file_bytes) = (Instant::now(), stats.overflow.file_bytes);
        Ok((DiskReader { id, window, lines: Some(lines), answered, file_bytes }, report(id, &stats)))
    }

    /// The window, if the disk counts where this version looks. Before its first worker has made it, it counts nowhere.
    fn window(&self) -> Option<&Window> {
        self.window.as_ref().filter(|window| window.is_of_this_version())
    }

    /// What it counts now, without asking it.
    fn look(&self) -> Option<DiskReport> {
        let mut stats = self.window()?.read_sums();
        stats.overflow.file_bytes = self.file_bytes;
        Some(DiskReport { is_said: false, ..report(self.id, &stats) })
    }

    fn is_due(&self) -> bool {
        self.window().is_none() || self.lines.is_none() || self.answered.elapsed() >= ASK
    }
}

/// The memory of a disk's counters; `None` if it is not passed, as by earlier versions.
async fn window(lines: &mut JsonLines) -> io::Result<Option<Window>> {
    lines.send(&serde_json::to_value(Request::Counters)?).await?;
    let (_, memory) = lines.next_with_fd::<Response>().await?;
    Ok(memory.and_then(|memory| Window::open(memory).ok()))
}

async fn ask(lines: &mut JsonLines) -> io::Result<Stats> {
    answer(lines, &Request::Stats).await
}

/// What a disk has said.
enum Answer {
    /// For the first time.
    First(DiskReader, Box<DiskReport>),
    /// Again, over the same connection.
    Again(JsonLines, Box<Stats>, Option<Window>),
}

impl DiskReaders {
    fn table(&self) -> MutexGuard<'_, HashMap<Name, DiskReader>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Connects to the disks of these machines that are served and not connected to, and asks those that have said nothing for long.
    /// Returns the machines whose disks have not answered before `until`, and what those have said whose memory cannot be seen.
    pub async fn keep<'a>(
        &self,
        folders: &MachineFolders,
        views: &'a [View],
        until: Instant,
    ) -> (HashSet<Name>, Vec<(&'a View, DiskReport)>) {
        let due = self.take_due(views);
        // A disk that starts or ends need not answer.
        let there = due.iter().filter(|(view, _)| disk_pid(view).is_some());
        let mut silent: HashSet<Name> = there.map(|(view, _)| view.machine.name.clone()).collect();
        let asked = due.into_iter().map(|(view, lines)| {
            let folder = folders.of(&view.machine.name).path().to_owned();
            let has_window =
                self.table().get(&view.machine.name).is_some_and(|reader| reader.window.is_some());
            let asking = async move {
                let Some(mut lines) = lines else {
                    let (reader, report) = DiskReader::connect(folder).await?;
                    return Ok(Answer::First(reader, Box::new(report)));
                };
                let window = if has_window { None } else { window(&mut lines).await? };
                let stats = ask(&mut lines).await?;
                Ok(Answer::Again(lines, Box::new(stats), window))
            };
            (view, asking)
        });
        let mut reports = Vec::new();
        // All at once: each has a connection of its own anyway, and disks that hang take no place of others.
        for (view, answer) in all_of(asked, until).await {
            silent.remove(&view.machine.name);
            reports.extend(self.take(&view.machine.name, answer).map(|report| (view, report)));
        }
        (silent, reports)
    }

    /// Returns the machines whose disks are due to be asked, with the connection to each disk; `None` where there is no connection yet.
    /// Forgets the disks of machines that have none, or another one, now.
    fn take_due<'a>(&self, views: &'a [View]) -> Vec<(&'a View, Option<JsonLines>)> {
        let mut table = self.table();
        let pids: HashMap<&Name, Option<u32>> =
            views.iter().map(|view| (&view.machine.name, disk_pid(view))).collect();
        table.retain(|name, disk| pids.get(name).is_some_and(|pid| *pid == Some(disk.id.pid as u32)));
        let served = views.iter().filter(|view| view.status.run.is_some());
        let due = served.filter_map(|view| match table.get_mut(&view.machine.name) {
            None => Some((view, None)),
            Some(disk) => disk.is_due().then(|| (view, disk.lines.take())),
        });
        due.collect()
    }

    /// Notes what a disk has said. Returns it if its memory cannot be seen.
    fn take(&self, machine: &Name, answer: Answer) -> Option<DiskReport> {
        let mut table = self.table();
        match answer {
            Answer::First(reader, report) => {
                let is_seen = reader.window().is_some();
                table.insert(machine.clone(), reader);
                (!is_seen).then_some(*report)
            }
            Answer::Again(lines, stats, window) => {
                let reader = table.get_mut(machine)?;
                reader.lines = Some(lines);
                reader.window = reader.window.take().or(window);
                (reader.answered, reader.file_bytes) = (Instant::now(), stats.overflow.file_bytes);
                reader.window().is_none().then(|| report(reader.id, &stats))
            }
        }
    }

    /// What the disk of a machine counts now, without asking it, if it can be seen so.
    pub fn look(&self, machine: &Name) -> Option<DiskReport> {
        self.table().get(machine)?.look()
    }

    /// The same of the disk with this process id, which is about to end: it is forgotten.
    pub fn look_last(&self, machine: &Name, pid: u32) -> Option<DiskReport> {
        // What the table has of another disk of the machine is of no use either.
        let reader = self.table().remove(machine)?;
        reader.look().filter(|report| report.disk.pid as u32 == pid)
    }
}

fn disk_pid(view: &View) -> Option<u32> {
    view.status.run.as_ref()?.disk_pid
}

/// Asks the disk of a folder once.
pub async fn ask_once(folder: PathBuf) -> io::Result<DiskReport> {
    Ok(DiskReader::connect(folder).await?.1)
}

fn report(disk: DiskId, stats: &Stats) -> DiskReport {
    DiskReport { disk, is_said: true, counters: counters(stats), levels: levels(stats) }
}

fn counters(s: &Stats) -> DiskCounters {
    let plane = |p: &Plane| PlaneCounters {
        reads: p.reads,
        writes: p.writes,
        read_bytes: p.read_bytes,
        written_bytes: p.written_bytes,
    };
    let base = &s.planes.base;
    DiskCounters {
        guest: plane(&s.planes.guest),
        ram: plane(&s.planes.ram),
        overflow: plane(&s.planes.overflow),
        base: PlaneCounters {
            reads: base.reads,
            writes: base.writes,
            read_bytes: base.read_bytes,
            written_bytes: base.written_bytes,
        },
        zero: plane(&s.planes.zero),
        base_store_reads: base.store_reads,
        base_store_read_bytes: base.store_read_bytes,
        evicted_blocks: s.evictions.blocks,
        stalls: s.stalls.count,
        stall_ns: s.stalls.ns,
        throttled_ns: s.throttled.ns,
        failed_requests: s.failed.requests,
        overflow_write_errors: s.overflow.write_errors,
        overflow_read_errors: s.overflow.read_errors,
        checksum_mismatches: s.checksum_mismatches,
        resets: s.resets,
        worker_restarts: s.restarts,
        read_count: s.latency.read.count,
        read_ns: s.latency.read.sum_ns,
        write_count: s.latency.write.count,
        write_ns: s.latency.write.sum_ns,
        chunks_asked: s.chunks.asked,
        chunks_found: s.chunks.found,
        chunks_found_bytes: s.chunks.found_bytes,
        chunk_waits: s.latency.chunk.count,
        chunk_wait_ns: s.latency.chunk.sum_ns,
        chunk_stalls: s.chunks.stalls,
    }
}

fn levels(s: &Stats) -> DiskLevels {
    DiskLevels {
        ram_used_bytes: s.ram.used_bytes,
        ram_limit_bytes: s.ram.limit_bytes,
        overflow_used_bytes: s.overflow.used_bytes,
        overflow_file_bytes: s.overflow.file_bytes,
        overflow_limit_bytes: s.overflow.limit_bytes,
        map_bytes: s.map.bytes,
        inflight: s.inflight,
        waiting: s.waiting,
        warning: u64::from(s.level > 0),
        critical: u64::from(s.level > 1),
        full: u64::from(s.is_full > 0),
        degraded: u64::from(s.degraded > 0),
        chunks_missing: s.chunks.missing,
        stalled: s.chunks.stalled,
        chunk_wait_p99_ns: Greatest(s.latency.chunk.p99_ns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::disk::CONTROL;
    use crate::machines::testing::TestHost;
    use crate::resources::budget::NO_LIMITS;
    use serde_json::{Value, json};
    use spillway_api::{MachineRun, Selector};
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    /// A host whose machines have these disks, which the test serves: `None` does not answer, others have the counters.
    struct World {
        _host: TestHost,
        folders: MachineFolders,
        views: Vec<View>,
        readers: DiskReaders,
        _silent: Vec<UnixListener>,
    }

    impl World {
        fn new(disks: &[Option<Stats>]) -> World {
            let host = TestHost::new(NO_LIMITS);
            host.catalog("desk", json!({ "count": disks.len() }));
            let folders = MachineFolders::new(host.path("machines"));
            let mut views = host.reader.views(&Selector::default()).unwrap();
            let mut silent = Vec::new();
            for (view, disk) in views.iter_mut().zip(disks) {
                let folder = folders.of(&view.machine.name);
                std::fs::create_dir(folder.path()).unwrap();
                let listener = UnixListener::bind(folder.path().join(CONTROL)).unwrap();
                view.status.run = Some(run(std::process::id()));
                match disk {
                    Some(stats) => serve(listener, stats.clone()),
                    None => silent.push(listener),
                }
            }
            World { _host: host, folders, views, readers: DiskReaders::default(), _silent: silent }
        }

        /// The numbers of the machines that did not answer, and what the others have written.
        async fn keep(&self, patience: Duration) -> (Vec<u32>, Vec<(u32, u64)>) {
            let (silent, reports) =
                self.readers.keep(&self.folders, &self.views, Instant::now() + patience).await;
            let number = |view: &View| view.machine.number;
            let is_silent = |view: &&View| silent.contains(&view.machine.name);
            let mut written: Vec<_> = reports
                .iter()
                .map(|(view, report)| (number(view), report.counters.guest.written_bytes))
                .collect();
            written.sort_unstable();
            (self.views.iter().filter(is_silent).map(number).collect(), written)
        }
    }

    /// The run of a machine whose disk has this process id.
    fn run(pid: u32) -> MachineRun {
        serde_json::from_value(json!({
            "image": "debian", "version": 1, "outdated": false, "pending": [], "ram_bytes": 1, "overflow_bytes": 1,
            "rate": {}, "hypervisor": "none", "disk_pid": pid, "vmm_pid": null, "disk_socket": "d", "control_socket": "c",
            "console_socket": null, "display": "none", "nbd_socket": null, "crashes": 0,
        }))
        .unwrap()
    }

    /// Answers as a disk whose memory is not passed, and which has counted this.
    fn serve(listener: UnixListener, stats: Stats) {
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = BufReader::new(stream.unwrap());
                let mut line = String::new();
                while stream.read_line(&mut line).is_ok_and(|n| n > 0) {
                    let asked: Value = serde_json::from_str(&line).unwrap();
                    let answer = if asked == json!(Request::Stats) { json!(stats) } else { Value::Null };
                    writeln!(stream.get_mut(), "{}", json!({ "ok": answer })).unwrap();
                    line.clear();
                }
            }
        });
    }

    fn written(bytes: u64) -> Option<Stats> {
        let mut stats = Stats::default();
        stats.planes.guest.written_bytes = bytes;
        Some(stats)
    }

    #[tokio::test]
    async fn disks_that_hang_keep_no_others_from_being_asked() {
        let mut disks = vec![None; 300];
        disks.push(written(7));
        let world = World::new(&disks);
        for _ in 0..2 {
            let (silent, said) = world.keep(Duration::from_secs(2)).await;
            assert_eq!((silent.len(), said), (300, vec![(301, 7)]));
        }
    }

    #[tokio::test]
    async fn who_has_another_disk_is_asked_anew() {
        let mut world = World::new(&[written(1), written(2)]);
        let patience = Duration::from_secs(20);
        assert_eq!(world.keep(patience).await, (vec![], vec![(1, 1), (2, 2)]));
        // What the table has is of the disks with these process ids.
        world.views[0].status.run = Some(run(1));
        world.views[1].status.run = None;
        assert_eq!(world.keep(patience).await, (vec![], vec![(1, 1)]));
        assert!(world.readers.table().contains_key(&world.views[0].machine.name));
        assert!(!world.readers.table().contains_key(&world.views[1].machine.name));
        assert!(world.readers.look(&world.views[0].machine.name).is_none(), "its memory cannot be seen");
    }
}
