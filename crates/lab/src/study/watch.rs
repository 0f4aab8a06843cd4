//! The look at all disks of a run, once a second, from the side: their counters, the processors' time, and what the
//! machines say of themselves.
//!
//! Owns one thread, which ends with it. Invariant: what could not be read is missing in the samples, never made up; the longest
//! time without a look is known.

use super::samples::Samples;
use crate::process::cpu_seconds_of;
use crate::workload::Watcher;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks.
const STEP: Duration = Duration::from_secs(1);
/// How long one disk may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// A look from the side.
pub struct Watch {
    shared: Arc<Mutex<Seen>>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What was seen.
#[derive(Default)]
struct Seen {
    made: Option<Instant>,
    begun: Option<Instant>,
    last: Option<Instant>,
    longest_gap: Duration,
    machines: Vec<Machine>,
    samples: Samples,
}

/// One of them.
#[derive(Default)]
struct Machine {
    /// Its disk's control socket; none for a null disk.
    disk: Option<BufReader<UnixStream>>,
    vmm: Option<u32>,
    inside: BTreeMap<String, f64>,
    /// What the disk said last.
    stats: Value,
}

/// What was found in the end.
pub struct Found {
    /// Everything that was seen; times are since the work began.
    pub samples: Samples,
    /// The last counters of each machine's disk; null for a null disk.
    pub stats: Vec<Value>,
    /// The longest time without a look while the work went on.
    pub longest_gap: Duration,
}

impl Watch {
    /// Begins to look at the disks behind these control sockets; `None` for a machine without one.
    pub fn start(controls: &[Option<PathBuf>]) -> Result<Watch> {
        let machines = controls.iter().map(|control| {
            let disk = control.as_deref().map(connect).transpose()?;
            Ok(Machine { disk, ..Machine::default() })
        });
        let machines = machines.collect::<Result<Vec<Machine>>>()?;
        let seen = Seen { made: Some(Instant::now()), machines, ..Seen::default() };
        let shared = Arc::new(Mutex::new(seen));
        let (stop, stopped) = mpsc::channel();
        let own = shared.clone();
        let thread = std::thread::Builder::new().name("watch".into()).spawn(move || {
            let mut next = Instant::now();
            loop {
                lock(&own).look();
                next = (next + STEP).max(Instant::now());
                let wait = next.saturating_duration_since(Instant::now());
                if stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        })?;
        Ok(Watch { shared, stop: Some(stop), thread: Some(thread) })
    }

    /// A last look. Nothing is looked at any more.
    pub fn finish(mut self) -> Found {
        self.end();
        let mut seen = lock(&self.shared);
        seen.look();
        let begin = seen.begun.or(seen.made).unwrap_or_else(Instant::now);
        let shift = seen.made.map_or(0.0, |made| begin.saturating_duration_since(made).as_secs_f64());
        let mut samples = std::mem::take(&mut seen.samples);
        samples.rows.iter_mut().for_each(|row| row.time_s -= shift);
        let stats = seen.machines.iter_mut().map(|m| m.stats.take()).collect();
        Found { samples, stats, longest_gap: seen.longest_gap }
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
        let mut seen = lock(&self.shared);
        if seen.begun.is_none() {
            seen.begun = Some(Instant::now());
            seen.look();
            seen.longest_gap = Duration::ZERO;
        }
    }

    fn now_s(&self) -> f64 {
        let (seen, now) = (lock(&self.shared), Instant::now());
        match seen.begun {
            Some(begun) => now.saturating_duration_since(begun).as_secs_f64(),
            None => 0.0,
        }
    }

    fn vmm(&self, machine: u32, pid: u32) {
        if let Some(machine) = lock(&self.shared).machines.get_mut(machine as usize) {
            machine.vmm = Some(pid);
        }
    }

    fn inside(&self, machine: u32, known: &BTreeMap<String, f64>) {
        if let Some(machine) = lock(&self.shared).machines.get_mut(machine as usize) {
            machine.inside.extend(known.iter().map(|(name, value)| (name.clone(), *value)));
        }
    }
}

impl Seen {
    fn look(&mut self) {
        let now = Instant::now();
        if let Some(last) = self.last.replace(now) {
            self.longest_gap = self.longest_gap.max(now.saturating_duration_since(last));
        }
        for (i, machine) in self.machines.iter_mut().enumerate() {
            let time = self.made.map_or(0.0, |made| made.elapsed().as_secs_f64());
            let known = machine.known();
            self.samples.add(i as u32, time, &known);
        }
    }
}

impl Machine {
    fn known(&mut self) -> BTreeMap<String, f64> {
        let mut known = self.inside.clone();
        if let Some(disk) = &mut self.disk
            && let Ok(stats) = ask(disk)
        {
            flatten("", &stats, &mut known);
            if let Some(pid) = stats["worker_pid"].as_u64().filter(|pid| *pid > 0)
                && let Ok(seconds) = cpu_seconds_of(&[pid as u32])
            {
                known.insert("cpu.worker_s".into(), seconds);
            }
            self.stats = stats;
        }
        if let Some(seconds) = self.vmm.and_then(|pid| cpu_seconds_of(&[pid]).ok()) {
            known.insert("cpu.vmm_s".into(), seconds);
        }
        known
    }
}

fn lock(shared: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    // What a thread that panicked has left are samples, whole rows of them.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn connect(control: &Path) -> Result<BufReader<UnixStream>> {
    let stream = UnixStream::connect(control).with_context(|| format!("{}: no disk", control.display()))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
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
                let answer = format!(
                    "{{\"ok\":{{\"planes\":{{\"ram\":{{\"reads\":{}}}}},\"mode\":\"ram\"}}}}\n",
                    n * 10
                );
                stream.get_mut().write_all(answer.as_bytes()).unwrap();
            }
        });
        path
    }

    #[test]
    fn disks_are_looked_at_until_they_end_and_guests_are_heard() {
        let dir = tempfile::tempdir().unwrap();
        let controls = [Some(disk(dir.path(), 1000)), Some(disk(dir.path(), 1)), None];
        let watch = Watch::start(&controls).unwrap();
        watch.vmm(0, std::process::id());
        watch.inside(2, &BTreeMap::from([("inside.reads".to_string(), 7.0)]));
        assert_eq!(watch.now_s(), 0.0);
        watch.begin();
        let found = watch.finish();
        let of = |machine: u32, column: &str| -> Vec<f64> {
            let rows = found.samples.rows.iter().filter(|row| row.machine == machine);
            rows.filter_map(|row| found.samples.value(row, column)).collect()
        };
        // At its start, when the work began, in the end.
        let reads = of(0, "planes.ram.reads");
        assert!(reads.len() >= 2 && reads.windows(2).all(|pair| pair[1] == pair[0] + 10.0), "{reads:?}");
        assert_eq!(of(1, "planes.ram.reads").len(), 1, "what is not known is missing");
        assert!(of(2, "inside.reads").contains(&7.0));
        assert!(!of(0, "cpu.vmm_s").is_empty() && of(1, "cpu.vmm_s").is_empty());
        assert!(found.samples.rows.iter().any(|row| row.time_s.abs() < 0.1), "the begin is a sample");
        assert_eq!(found.stats[0]["mode"], "ram");
    }
}
