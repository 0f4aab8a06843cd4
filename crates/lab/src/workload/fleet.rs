//! The engine `replay`: one recorded machine, asked of many disks again, as if each were the machine's.
//!
//! All disks first get what its boot asked, a few at a time and as fast as they answer: what that leaves is the same. Then the work
//! begins, on each disk as much later as its machine's logon is, and from there on requests begin as they were recorded. No pause
//! of a user is shortened, and nothing waits for a slow answer: what is late is late.
//!
//! **Response time of an action**: from when it was due until the last of its requests has completed. Its requests are all those of
//! its machine that were recorded between its begin and its end: also what the system did meanwhile, and in a machine of several
//! sessions what others did. What a program computed after its last request is not in it; an action that asked nothing of the disk
//! has none, and is counted.
//!
//! Invariant: every request of the recording is asked of every disk once, in the recorded order.

use super::inside::{since, start_interval};
use super::recording::{RecordedAction, Recording, whole};
use super::score;
use super::settings::WorkloadSettings;
use super::stage::{Stage, WorkDisk, WorkResult};
use crate::replay::{Pace, Replayed, Speed, replay_at};
use crate::study::Action;
use anyhow::{Context, Result, bail, ensure};
use spillway_advisor::trace::TraceReader;
use spillway_testkit::driver::{Driver, Shape};
use std::fs::File;
use std::io::BufReader;
use std::iter::{Peekable, from_fn};
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Disks that get their boot at the same time.
const AT_ONCE: usize = 2;
/// Most requests under way, as in a machine's queue.
const DEPTH: usize = 128;
/// The largest request that is asked in one piece.
const REQUEST_BYTES: usize = 2 << 20;

/// What its figures are called, whatever the work.
pub const REPLAYED: [&str; 4] =
    ["replay.requests", "replay.late", "replay.seconds", "replay.actions_without_requests"];

/// What the replay on one disk came to.
struct Part {
    replayed: Replayed,
    boot_requests: u64,
    actions: Vec<Action>,
    /// Actions that have no requests in the recording.
    without: u64,
}

/// Replays the recording on all disks.
pub fn run(workload: &str, settings: &WorkloadSettings, stage: &Stage<'_>) -> Result<WorkResult> {
    let recording = stage.recording.context("there is no recording to replay")?;
    ensure!(
        recording.actions.workload == workload,
        "the recording is of '{}', not of '{workload}'",
        recording.actions.workload
    );
    let speed = match settings {
        WorkloadSettings::Boot(boot) => boot.speed,
        WorkloadSettings::Sessions(sessions) => sessions.speed,
        WorkloadSettings::Fio(_) => bail!("fio's loads are not replayed"),
    };
    // A study that is faster has its logons faster, too.
    let every = match speed {
        Speed::Times(times) => start_interval(settings).div_f64(times),
        Speed::Full => Duration::ZERO,
    };
    whole(&recording.trace)?;
    let parts = replay_all(recording, speed, every, stage)?;
    let mut done = WorkResult::default();
    let sum = |of: fn(&Part) -> u64| parts.iter().map(of).sum::<u64>() as f64;
    let longest = parts.iter().map(|p| p.replayed.seconds).fold(0.0, f64::max);
    let values = [
        sum(|p| p.boot_requests + p.replayed.requests),
        sum(|p| p.replayed.late),
        longest,
        sum(|p| p.without),
    ];
    done.figures.extend(REPLAYED.map(String::from).into_iter().zip(values));
    done.actions = parts.into_iter().flat_map(|part| part.actions).collect();
    done.actions.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    match settings {
        WorkloadSettings::Boot(_) if !done.actions.is_empty() => {
            let took: f64 = done.actions.iter().map(|a| a.took_ms / 1000.0).sum();
            done.figures.insert("boot_s".into(), took / done.actions.len() as f64);
        }
        WorkloadSettings::Sessions(sessions) => {
            score::figures(&done.actions, sessions.threshold_ms, &mut done.figures)
        }
        _ => {}
    }
    Ok(done)
}

fn replay_all(recording: &Recording, speed: Speed, every: Duration, stage: &Stage<'_>) -> Result<Vec<Part>> {
    let sockets = stage.disks.iter().enumerate().map(|(i, disk)| match disk {
        WorkDisk::Served { vhost } => Ok(vhost),
        WorkDisk::Null { .. } => {
            bail!("machine {i}: a null disk keeps nothing, so that nothing can be replayed on it")
        }
    });
    let sockets: Vec<_> = sockets.collect::<Result<_>>()?;
    let gates: [Mutex<()>; AT_ONCE] = Default::default();
    std::thread::scope(|scope| {
        let (told, tell): (Sender<bool>, Receiver<bool>) = channel();
        let mut machines = Vec::new();
        for (i, socket) in sockets.into_iter().enumerate() {
            let (go, start) = channel();
            let (told, gate) = (told.clone(), &gates[i % AT_ONCE]);
            let machine = Machine { number: i as u32, recording, speed, deadline: stage.deadline };
            let thread = scope.spawn(move || {
                let booted = {
                    let _turn = gate.lock();
                    machine.boot(socket)
                };
                // Whoever waits for it is told in any case.
                let _ = told.send(booted.is_ok());
                let (driver, events, boot_requests) = booted?;
                // None: the boot of another went wrong.
                let Ok((begun, at)) = start.recv() else { return Ok(None) };
                machine.work(driver, events, boot_requests, begun, at).map(Some)
            });
            machines.push((go, thread));
        }
        // Only the threads are left to tell: one that panics must not be waited for.
        drop(told);
        let all_up = (0..machines.len()).all(|_| tell.recv() == Ok(true));
        if all_up {
            stage.watch.begin();
            let begun = Instant::now();
            for (i, (go, _)) in machines.iter().enumerate() {
                // One that is not there to hear it says why when it is joined.
                let _ = go.send((begun, begun + every * i as u32));
            }
        }
        // Those that wait for the begin must not wait for ever.
        let threads: Vec<_> = machines.into_iter().map(|(_, thread)| thread).collect();
        let ended = threads.into_iter().enumerate().map(|(i, thread)| match thread.join() {
            Ok(part) => part.with_context(|| format!("machine {i}")),
            Err(_) => bail!("machine {i}: its thread has panicked"),
        });
        // All are waited for before one's error is told.
        let ended: Vec<Result<Option<Part>>> = ended.collect();
        ended.into_iter().filter_map(Result::transpose).collect()
    })
}

type Events = Peekable<TraceReader<BufReader<File>>>;

#[derive(Clone, Copy)]
struct Machine<'a> {
    number: u32,
    recording: &'a Recording,
    speed: Speed,
    deadline: Instant,
}

impl Machine<'_> {
    /// Replays what the machine asked before its work, as fast as the disk answers.
    fn boot(&self, vhost: &Path) -> Result<(Driver, Events, u64)> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let shape = Shape { queues: 1, depth: DEPTH, request_bytes: REQUEST_BYTES, deadline: left };
        let mut driver = Driver::connect_with(vhost, shape)?;
        let trace = &self.recording.trace;
        let what = || trace.display().to_string();
        let file = File::open(trace).with_context(what)?;
        let reader = TraceReader::new(BufReader::with_capacity(256 << 10, file)).with_context(what)?;
        let mut events = reader.peekable();
        let until_us = self.recording.actions.begin_us;
        let before = from_fn(|| events.next_if(|e| e.as_ref().map_or(true, |e| e.time_us < until_us)));
        let pace = Pace { until: Some(self.deadline), ..Pace::now(Speed::Full) };
        let replayed = replay_at(&mut driver, before, &pace, |_, _| (), |_, _| ()).context("its boot")?;
        ensure!(replayed.failed == 0, "its boot: {} requests have failed", replayed.failed);
        Ok((driver, events, replayed.requests))
    }

    /// Replays the work, which begins at `start`.
    fn work(
        &self,
        mut driver: Driver,
        mut events: Events,
        boot_requests: u64,
        begun: Instant,
        start: Instant,
    ) -> Result<Part> {
        let from_us = self.recording.actions.begin_us;
        // Many of them wait on few processors: none keeps one busy with it.
        let pace =
            Pace { speed: self.speed, start, from_us, spin: Duration::ZERO, until: Some(self.deadline) };
        let mut answers = Answers::new(&self.recording.actions.actions);
        let replayed =
            replay_at(&mut driver, &mut events, &pace, |_, _| (), |at, now| answers.ended(at, now))?;
        ensure!(replayed.failed == 0, "{} requests have failed", replayed.failed);
        let (actions, without) = answers.actions(self.number, &pace, begun);
        Ok(Part { replayed, boot_requests, actions, without })
    }
}

/// Finds the response time of each action: when the last of its requests was completed.
struct Answers<'a> {
    actions: &'a [RecordedAction],
    /// The longest time that an action took in the recording.
    longest_us: u64,
    last: Vec<Option<Instant>>,
}

impl<'a> Answers<'a> {
    fn new(actions: &'a [RecordedAction]) -> Answers<'a> {
        let longest_us = actions.iter().map(|a| a.end_us.saturating_sub(a.begin_us)).max().unwrap_or(0);
        Answers { actions, longest_us, last: vec![None; actions.len()] }
    }

    /// Takes the completion of a request that was recorded at `time_us`.
    fn ended(&mut self, time_us: u64, now: Instant) {
        let after = self.actions.partition_point(|a| a.begin_us <= time_us);
        for i in (0..after).rev() {
            let action = &self.actions[i];
            if action.begin_us.saturating_add(self.longest_us) < time_us {
                break;
            }
            if time_us <= action.end_us {
                self.last[i] = self.last[i].max(Some(now));
            }
        }
    }

    /// Returns the actions with their response times, and how many had no requests. At full speed there are none: no request was due at a time.
    fn actions(&self, machine: u32, pace: &Pace, begun: Instant) -> (Vec<Action>, u64) {
        let mut actions = Vec::new();
        for (action, last) in self.actions.iter().zip(&self.last) {
            if let (Some(due), Some(last)) = (pace.due(action.begin_us), last) {
                actions.push(Action {
                    machine,
                    session: action.session,
                    name: action.name.clone(),
                    at_s: since(begun, due),
                    took_ms: since(due, *last).max(0.0) * 1000.0,
                });
            }
        }
        (actions, self.last.iter().filter(|last| last.is_none()).count() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(session: u32, name: &str, begin_us: u64, end_us: u64) -> RecordedAction {
        RecordedAction { session, name: name.into(), begin_us, end_us }
    }

    #[test]
    fn a_response_ends_with_the_last_request_of_its_time() {
        let all = [
            recorded(0, "open", 1_000_000, 1_500_000),
            recorded(1, "save", 1_200_000, 1_300_000),
            recorded(0, "edit", 2_000_000, 2_000_100),
        ];
        let mut answers = Answers::new(&all);
        let begun = Instant::now();
        let start = begun + Duration::from_secs(15);
        let pace =
            Pace { speed: Speed::Times(2.0), start, from_us: 900_000, spin: Duration::ZERO, until: None };
        let at = |ms| start + Duration::from_millis(ms);
        answers.ended(999_999, at(9000));
        answers.ended(1_000_000, at(60));
        answers.ended(1_250_000, at(700));
        answers.ended(1_400_000, at(300));
        answers.ended(1_600_000, at(9000));
        let (actions, without) = answers.actions(7, &pace, begun);
        assert_eq!(without, 1, "the edit asked nothing");
        let got: Vec<_> = actions.iter().map(|a| (a.name.as_str(), a.session, a.took_ms.round())).collect();
        // Due after 50 and 150 ms.
        assert_eq!(got, [("open", 0, 650.0), ("save", 1, 550.0)]);
        assert_eq!((actions[0].machine, (actions[0].at_s * 1000.0).round()), (7, 15_050.0));
        let full = Pace { speed: Speed::Full, ..pace };
        assert!(answers.actions(7, &full, begun).0.is_empty());
    }
}
