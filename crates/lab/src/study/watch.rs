//! Samples of all disks of a run, taken once a second: their counters, the processors' time, and what the machines report of
//! themselves.
//!
//! Owns one thread, which ends with it. Invariant: what could not be read is missing in the samples, never made up; the longest
//! time without a look is known.

use super::samples::Samples;
use crate::workload::Watcher;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use spillway_testkit::process::cpu_seconds_of;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between two samples of a machine.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How long one disk may take to answer; it is asked anew with the next sample.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Samples the machines of a run in a thread of its own.
pub struct Watch {
    shared: Arc<Mutex<WatchState>>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What can be asked about a machine's disk.
#[derive(Clone, Debug)]
pub enum Source {
    /// The control socket of a disk of Spillway.
    Control(PathBuf),
    /// The process that serves a null disk, which has no counters.
    Process(u32),
}

/// What the thread and its owner share.
struct WatchState {
    /// When sampling began; times of samples count from here until the end.
    made: Instant,
    /// When the work began.
    begun: Option<Instant>,
    machines: Vec<WatchedMachine>,
    samples: Samples,
}

/// A machine that is sampled.
struct WatchedMachine {
    source: Source,
    /// A connection to the disk on which every question was answered; none after an answer that did not come in time.
    disk: Option<BufReader<UnixStream>>,
    /// Process of the VMM while it runs.
    vmm: Option<u32>,
    /// Processor seconds that the VMM has used; kept when it has ended.
    vmm_s: Option<f64>,
    /// When its disk was sampled last.
    last: Instant,
    observed: ObservedMachine,
}

/// Everything that was observed of a run.
pub struct Observations {
    /// The samples; times are seconds since the work began.
    pub samples: Samples,
    /// The machines, by number.
    pub machines: Vec<ObservedMachine>,
}

/// What was observed of one machine.
#[derive(Clone, Debug, Default)]
pub struct ObservedMachine {
    /// Its disk's counters in the last sample; null if the disk did not answer then, and for a null disk.
    pub stats: Value,
    /// The longest time between two samples while the work went on.
    pub longest_gap: Duration,
    /// Whether its counters were sampled when the work began.
    pub begin_sampled: bool,
}

impl Watch {
    /// Starts to sample the disks of machines.
    pub fn start(sources: &[Source]) -> Result<Watch> {
        let made = Instant::now();
        let machines = sources.iter().map(|source| {
            let disk = match source {
                Source::Control(control) => Some(connect(control)?),
                Source::Process(_) => None,
            };
            Ok(WatchedMachine {
                source: source.clone(),
                disk,
                vmm: None,
                vmm_s: None,
                last: made,
                observed: ObservedMachine::default(),
            })
        });
        let machines = machines.collect::<Result<Vec<WatchedMachine>>>()?;
        let shared =
            Arc::new(Mutex::new(WatchState { made, begun: None, machines, samples: Samples::default() }));
        let (stop, stopped) = mpsc::channel();
        let own = shared.clone();
        let thread = std::thread::Builder::new().name("watch".into()).spawn(move || {
            let mut next = Instant::now();
            loop {
                lock(&own).look();
                next = (next + LOOK_INTERVAL).max(Instant::now());
                let wait = next.saturating_duration_since(Instant::now());
                if stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        })?;
        Ok(Watch { shared, stop: Some(stop), thread: Some(thread) })
    }

    /// Takes the last sample and ends.
    pub fn finish(mut self) -> Observations {
        self.end();
        let mut looks = lock(&self.shared);
        looks.look();
        let begin = looks.begun.unwrap_or(looks.made);
        let shift = begin.saturating_duration_since(looks.made).as_secs_f64();
        let mut samples = std::mem::take(&mut looks.samples);
        samples.rows.iter_mut().for_each(|row| row.time_s -= shift);
        samples.rows.sort_by(|a, b| a.time_s.total_cmp(&b.time_s));
        let machines = looks.machines.iter_mut().map(|m| std::mem::take(&mut m.observed)).collect();
        Observations { samples, machines }
    }

    fn end(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end();
    }
}

impl Watcher for Watch {
    fn begin(&self) {
        let mut looks = lock(&self.shared);
        if looks.begun.is_none() {
            looks.begun = Some(Instant::now());
            looks.look();
            for machine in &mut looks.machines {
                // Gaps before the work do not count.
                machine.observed.longest_gap = Duration::ZERO;
                machine.observed.begin_sampled = machine.is_known();
            }
        }
    }

    fn vmm(&self, number: u32, pid: u32) {
        let mut looks = lock(&self.shared);
        let time_s = seconds_between(looks.made, Instant::now());
        if let Some(machine) = looks.machines.get_mut(number as usize) {
            machine.vmm = Some(pid);
            // Its use counts from 0, also what it uses before the next sample.
            looks.samples.add(number, time_s, &BTreeMap::from([("cpu.vmm_s".to_string(), 0.0)]));
        }
    }

    fn vmm_ends(&self, machine: u32) {
        if let Some(machine) = lock(&self.shared).machines.get_mut(machine as usize) {
            machine.look_at_vmm();
            // The kernel may give its process number to another process.
            machine.vmm = None;
        }
    }

    fn inside(&self, machine: u32, at: Instant, known: &BTreeMap<String, f64>) {
        let mut looks = lock(&self.shared);
        if (machine as usize) < looks.machines.len() {
            // A row of its own, at the time that the machine says; it has no other columns.
            let time_s = seconds_between(looks.made, at);
            looks.samples.add(machine, time_s, known);
        }
    }
}

impl WatchState {
    fn look(&mut self) {
        for (i, machine) in self.machines.iter_mut().enumerate() {
            let time = seconds_between(self.made, Instant::now());
            let known = machine.known();
            self.samples.add(i as u32, time, &known);
        }
    }
}

impl WatchedMachine {
    fn look_at_vmm(&mut self) {
        if let Some(pid) = self.vmm {
            // None for a VMM that has ended by itself.
            self.vmm_s = cpu_seconds_of(&[pid]).ok();
        }
    }

    fn known(&mut self) -> BTreeMap<String, f64> {
        let mut known = BTreeMap::new();
        let serves = match &self.source {
            Source::Control(control) => {
                self.observed.stats = answer(&mut self.disk, control).unwrap_or_default();
                self.observed.stats["worker_pid"].as_u64().map(|pid| pid as u32).filter(|pid| *pid > 0)
            }
            Source::Process(pid) => Some(*pid),
        };
        flatten("", &self.observed.stats, &mut known);
        if let Some(pid) = serves
            && let Ok(seconds) = cpu_seconds_of(&[pid])
        {
            known.insert("cpu.worker_s".into(), seconds);
        }
        self.look_at_vmm();
        known.extend(self.vmm_s.map(|seconds| ("cpu.vmm_s".into(), seconds)));
        let now = Instant::now();
        self.observed.longest_gap = self.observed.longest_gap.max(now.saturating_duration_since(self.last));
        if self.is_known() {
            self.last = now;
        }
        known
    }

    /// Whether the disk answered in the last sample; a null disk is not asked.
    fn is_known(&self) -> bool {
        matches!(self.source, Source::Process(_)) || !self.observed.stats.is_null()
    }
}

/// Asks a disk for its counters. A connection on which no answer came in time is dropped: a late answer would be taken for the next
/// one.
fn answer(disk: &mut Option<BufReader<UnixStream>>, control: &Path) -> Result<Value> {
    let mut connection = match disk.take() {
        Some(connection) => connection,
        None => connect(control)?,
    };
    let stats = ask(&mut connection)?;
    *disk = Some(connection);
    Ok(stats)
}

/// Negative if `to` is before `from`.
fn seconds_between(from: Instant, to: Instant) -> f64 {
    let later = to.saturating_duration_since(from).as_secs_f64();
    later - from.saturating_duration_since(to).as_secs_f64()
}

fn lock(shared: &Mutex<WatchState>) -> MutexGuard<'_, WatchState> {
    // A thread that panicked leaves whole rows.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn connect(control: &Path) -> Result<BufReader<UnixStream>> {
    let stream = UnixStream::connect(control).with_context(|| format!("{}: no disk", control.display()))?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    Ok(BufReader::new(stream))
}

fn ask(disk: &mut BufReader<UnixStream>) -> Result<Value> {
    disk.get_mut().write_all(b"{\"command\":\"stats\"}\n")?;
    let mut line = String::new();
    disk.read_line(&mut line)?;
    let mut answer: Value = serde_json::from_str(&line)?;
    let stats = answer["ok"].take();
    ensure!(stats.is_object(), "no counters");
    Ok(stats)
}

/// All numbers, by their dotted keys.
fn flatten(prefix: &str, value: &Value, known: &mut BTreeMap<String, f64>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                flatten(&key, field, known);
            }
        }
        Value::Number(number) => {
            known.insert(prefix.to_string(), number.as_f64().unwrap_or(f64::NAN));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// A disk whose sum grows by 10 with each look; it ends after so many.
    fn disk(dir: &Path, answers: u32) -> PathBuf {
        let path = dir.join(format!("disk-{answers}"));
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            for n in 1..=answers {
                let mut line = String::new();
                if stream.read_line(&mut line).unwrap() == 0 {
                    return;
                }
                let (sum, end) = (n * 10, "\n");
                let answer = format!(
                    "{{\"ok\":{{\"planes\":{{\"ram\":{{\"reads\":{sum}}}}},\"mode\":\"ram\"}}}}{end}"
                );
                stream.get_mut().write_all(answer.as_bytes()).unwrap();
            }
            std::fs::remove_file(path).unwrap();
        });
        dir.join(format!("disk-{answers}"))
    }

    #[test]
    fn disks_are_looked_at_until_they_end_and_guests_are_heard() {
        let dir = tempfile::tempdir().unwrap();
        let [good, ended, mute] = [1000, 1, 0].map(|answers| Source::Control(disk(dir.path(), answers)));
        let watch = Watch::start(&[good, ended, Source::Process(std::process::id()), mute]).unwrap();
        watch.vmm(0, std::process::id());
        watch.begin();
        let at = Instant::now() + Duration::from_secs(100);
        watch.inside(2, at, &BTreeMap::from([("inside.reads".to_string(), 7.0)]));
        watch.inside(9, at, &BTreeMap::new());
        std::thread::sleep(Duration::from_millis(20));
        watch.vmm_ends(0);
        std::thread::sleep(Duration::from_millis(20));
        let found = watch.finish();
        let of = |machine: u32, column: &str| -> Vec<(f64, f64)> {
            let rows = found.samples.rows.iter().filter(|row| row.machine == machine);
            rows.filter_map(|row| Some((row.time_s, found.samples.value(row, column)?))).collect()
        };
        // At its start, when the work began, in the end.
        let reads = of(0, "planes.ram.reads");
        assert!(reads.len() >= 2 && reads.windows(2).all(|pair| pair[1].1 == pair[0].1 + 10.0), "{reads:?}");
        assert_eq!(of(1, "planes.ram.reads").len(), 1, "what is not known is missing");
        let inside = of(2, "inside.reads");
        assert!(inside.len() == 1 && (inside[0].0 - 100.0).abs() < 10.0 && inside[0].1 == 7.0, "{inside:?}");
        // What a VMM has used stays known when it has ended.
        let used = of(0, "cpu.vmm_s");
        // Nothing when it was started, and then at each look.
        assert_eq!(used[0].1, 0.0);
        let times = |of: &[(f64, f64)]| of.iter().map(|(time_s, _)| *time_s).collect::<Vec<_>>();
        assert_eq!(times(&used[1..]), times(&reads[reads.len() + 1 - used.len()..]));
        assert!(of(1, "cpu.vmm_s").is_empty());
        assert!(of(2, "cpu.worker_s").len() == reads.len() && of(0, "cpu.worker_s").is_empty());
        assert!(reads.iter().any(|(time_s, _)| time_s.abs() < 0.1), "the begin is a sample");
        let [good, ended, null, mute] = &found.machines[..] else { panic!("four") };
        assert_eq!(good.stats["mode"], "ram");
        assert!(ended.stats.is_null() && null.stats.is_null(), "no counters of an earlier time");
        assert_eq!([good.begin_sampled, mute.begin_sampled, null.begin_sampled], [true, false, true]);
        assert!(ended.longest_gap > good.longest_gap && ended.longest_gap >= Duration::from_millis(20));
    }

    #[test]
    fn an_answer_that_is_late_is_not_the_next_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let listener = UnixListener::bind(&path).unwrap();
        let late = std::thread::spawn(move || {
            let (first, _) = listener.accept().unwrap();
            let mut second = BufReader::new(listener.accept().unwrap().0);
            // Nobody may be there any more.
            let _ = (&first).write_all(b"{\"ok\":{\"n\":1}}\n");
            second.read_line(&mut String::new()).unwrap();
            second.get_mut().write_all(b"{\"ok\":{\"n\":2}}\n").unwrap();
        });
        let first = connect(&path).unwrap();
        first.get_ref().set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let mut disk = Some(first);
        assert!(answer(&mut disk, &path).is_err() && disk.is_none());
        assert_eq!(answer(&mut disk, &path).unwrap()["n"], 2);
        late.join().unwrap();
    }
}
