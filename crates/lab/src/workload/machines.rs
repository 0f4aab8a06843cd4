//! Runs a workload inside of machines: starts a few at a time, tells each when to begin, and follows all until they are done.
//!
//! Owns the machines and their times. Invariants: work begins on all of them by one clock, when each is ready; one that ends, says
//! that it cannot go on, or says nothing for too long is an error with what its console said last.

use super::inside::since;
use super::lines::{Line, Lines};
use super::reported::{MachineProgress, MachineReport, is_in_time};
use super::stage::Watcher;
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::Value;
use spillway_testkit::cpio::Entry;
use spillway_testkit::guest::{Accelerator, Guest, GuestDisk, GuestSpec, Kit};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Machines that boot at the same time, when their boot is not what is measured.
const BOOTS_AT_ONCE: usize = 2;
/// Time between two reads of all reports.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);
/// Error of a machine's clock against the host's, at most.
const MOST_CLOCK_ERROR: Duration = Duration::from_secs(1);
/// A machine at work reports each second: one that reports nothing for so long hangs.
const REPORT_TIMEOUT: Duration = Duration::from_secs(120);

/// What each machine is and is to do, and how much it may report.
#[derive(Default)]
pub struct Orders {
    /// Memory of a machine.
    pub memory_mib: u32,
    /// Processors of a machine.
    pub vcpus: u32,
    /// The content of /run/payload/words.
    pub words: String,
    /// Whether to boot is all that a machine does.
    pub boot: bool,
    /// Sessions in a machine.
    pub sessions: u32,
    /// Actions of all sessions together, at least.
    pub least_actions: usize,
    /// Actions of all sessions together, at most.
    pub actions: usize,
    /// Names of fio's loads.
    pub loads: Vec<String>,
}

/// Machines, and what they are to do.
pub struct Task<'a> {
    /// Kernel and images of the guests.
    pub kit: &'a Kit,
    /// How guests run: in hardware or in software.
    pub accelerator: Accelerator,
    /// Disks of each machine.
    pub disks: Vec<Vec<GuestDisk>>,
    /// What each machine is and is to do.
    pub orders: Orders,
    /// Time between the begins of two machines.
    pub every: Duration,
    /// Folder for the folders of all machines.
    pub dir: &'a Path,
    /// When the work counts as failed.
    pub deadline: Instant,
}

/// When a machine did what, by the host's clock, from its start to the end of its work.
pub struct MachineTimeline {
    /// When QEMU was started.
    pub started: Instant,
    /// When the system was up.
    pub up: Instant,
    /// When it was told to begin.
    pub told: Instant,
    /// When it reported that it was done.
    pub done: Instant,
    /// What users did.
    pub did: Vec<UserAction>,
    /// Loads of fio that have ended.
    pub loads: Vec<FinishedLoad>,
    /// The command that started it.
    pub command: String,
}

/// Something that a user did.
pub struct UserAction {
    /// The user's session.
    pub session: u32,
    /// What the user did.
    pub name: String,
    /// When it began, by the host's clock.
    pub begin: Instant,
    /// How long it took.
    pub took: Duration,
}

/// A load of fio's that has ended.
pub struct FinishedLoad {
    /// The name of the load.
    pub name: String,
    /// When it began, by the host's clock.
    pub begin: Instant,
    /// The JSON that fio printed.
    pub json: Value,
}

/// Files in a machine's folder that only the running machine needs; they are removed with this.
struct BootFiles {
    dir: PathBuf,
}

impl BootFiles {
    /// The named pipe on which the machine is told to begin.
    fn to_guest(&self) -> PathBuf {
        self.dir.join("go.in")
    }
}

impl Drop for BootFiles {
    fn drop(&mut self) {
        for name in ["initrd.cpio", "go.in", "go.out"] {
            let _ = std::fs::remove_file(self.dir.join(name));
        }
    }
}

/// A machine that is followed.
struct Machine {
    guest: Guest,
    needed: BootFiles,
    lines: Lines,
    heard: Instant,
    course: MachineProgress,
    tie: Option<ClockTie>,
    reported: MachineReport,
}

/// Runs the work in all machines: starts them, waits until all are done, and ends them. Returns when the work began.
pub fn work(task: &Task<'_>, watch: &dyn Watcher) -> Result<(Instant, Vec<MachineTimeline>)> {
    let count = task.disks.len();
    let mut machines: Vec<Machine> = Vec::with_capacity(count);
    let mut begun: Option<Instant> = None;
    let start_of = |begun: Instant, i: usize| begun + task.every * i as u32;
    if task.orders.boot {
        watch.begin();
        begun = Some(Instant::now());
    }
    loop {
        let now = Instant::now();
        let booting = machines.iter().filter(|m| !m.course.ready).count();
        let next = machines.len();
        let may_start = match begun {
            Some(begun) => now >= start_of(begun, next),
            None => booting < BOOTS_AT_ONCE,
        };
        if next < count && may_start {
            let machine = Machine::start(task, next).with_context(|| format!("machine {next}"))?;
            watch.vmm(next as u32, machine.guest.pid());
            machines.push(machine);
        }
        for (i, machine) in machines.iter_mut().enumerate().filter(|(_, m)| m.course.done.is_none()) {
            if let Err(e) = machine.follow(i as u32, task, watch) {
                bail!("machine {i}: {e:#}\n{}", machine.guest.tail());
            }
        }
        if begun.is_none() && machines.len() == count && machines.iter().all(|m| m.course.ready) {
            watch.begin();
            begun = Some(Instant::now());
        }
        if let (Some(begun), false) = (begun, task.orders.boot) {
            for (i, machine) in machines.iter_mut().enumerate() {
                if machine.course.told.is_none() && Instant::now() >= start_of(begun, i) {
                    machine.tell().with_context(|| format!("machine {i}"))?;
                }
            }
        }
        if let (Some(begun), true) =
            (begun, machines.len() == count && machines.iter().all(|m| m.course.done.is_some()))
        {
            let end = |(i, machine): (usize, Machine)| machine.end().with_context(|| format!("machine {i}"));
            return Ok((begun, machines.into_iter().enumerate().map(end).collect::<Result<_>>()?));
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

impl Machine {
    fn start(task: &Task<'_>, number: usize) -> Result<Machine> {
        let dir = task.dir.join(format!("machine-{number}"));
        std::fs::create_dir_all(&dir).with_context(|| format!("{}: cannot make", dir.display()))?;
        // QEMU reads `go.in` and writes `go.out`: a named pipe has no limit on its path as a socket has.
        let pipe = dir.join("go");
        let needed = BootFiles { dir: dir.clone() };
        for end in ["go.in", "go.out"] {
            let path = dir.join(end);
            let _ = std::fs::remove_file(&path);
            mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0)
                .with_context(|| format!("{}: cannot make", path.display()))?;
        }
        let port = format!("pipe:{}", pipe.display());
        let guest = Guest::start_with(
            task.kit,
            &GuestSpec {
                dir: dir.clone(),
                disks: task.disks[number].clone(),
                system: true,
                payload: payload(&task.orders.words),
                memory_mib: task.orders.memory_mib,
                vcpus: task.orders.vcpus,
                accelerator: task.accelerator,
                reboots: false,
            },
            &["-serial", &port],
        )?;
        Ok(Machine {
            lines: Lines::new(&dir.join("report.log")),
            guest,
            needed,
            heard: Instant::now(),
            course: MachineProgress::default(),
            tie: None,
            reported: MachineReport::default(),
        })
    }

    fn follow(&mut self, number: u32, task: &Task<'_>, watch: &dyn Watcher) -> Result<()> {
        // Asked first: what it reported before its end is then all there.
        let ended = self.guest.ended()?;
        let (now, lines) = self.lines.read()?;
        if !lines.is_empty() {
            self.heard = now;
        }
        for line in lines {
            if let Some(said) = line.said() {
                self.tie = Some(ClockTie::of(self.tie, ClockTie { at: now, said }, self.guest.started())?);
            }
            self.course.accept(&line, now, task.orders.boot)?;
            match line {
                Line::Action { action, session, at, took_ms } => {
                    self.reported.action(&task.orders, session, action, at, took_ms)?;
                }
                Line::Inside { inside, at, begins } => {
                    let up = self.course.up.map_or(Duration::ZERO, |up| now - up);
                    let known = self.reported.counted(up, inside)?;
                    // Never later than it was heard, nor is it before it was told that it begins: clocks are tied to some milliseconds.
                    let at = self.tie.map_or(now, |tie| tie.host(at).min(now));
                    let told = self.course.told.filter(|_| begins);
                    let at = told.map_or(at, |told| at.max(told));
                    watch.inside(number, at, &known);
                }
                Line::Fio { fio, at, took_ms, json } => {
                    self.reported.load(&task.orders, fio, at, took_ms, json)?;
                }
                Line::Done { .. } => self.reported.check_complete(&task.orders)?,
                Line::Up { .. } | Line::Ready { .. } => {}
                Line::Error { error } => bail!("it cannot go on: {error}"),
            }
        }
        if self.course.done.is_some() {
            // It would write on: journals, timers. Whoever looks at its processors does so a last time.
            watch.vmm_ends(number);
            self.guest.kill_soon();
            return Ok(());
        }
        if let Some(status) = ended {
            bail!("it ended before its work was done (QEMU: {status})");
        }
        ensure!(now < task.deadline, "its work is not done, and its time is over");
        ensure!(
            self.course.up.is_none() || now - self.heard < REPORT_TIMEOUT,
            "it has said nothing for {REPORT_TIMEOUT:?}"
        );
        Ok(())
    }

    /// Tells the machine to begin.
    fn tell(&mut self) -> Result<()> {
        let path = self.needed.to_guest();
        let mut pipe = OpenOptions::new()
            .write(true)
            .open(&path)
            .with_context(|| format!("{}: cannot open", path.display()))?;
        self.course.told = Some(Instant::now());
        pipe.write_all(b"go\n").context("it cannot be told to begin")?;
        self.heard = Instant::now();
        Ok(())
    }

    /// Its life, when it is done.
    fn end(mut self) -> Result<MachineTimeline> {
        self.guest.kill();
        let (Some(done), Some(up), Some(tie)) = (self.course.done, self.course.up, self.tie) else {
            bail!("a machine was ended before it was done");
        };
        let did = self.reported.did.into_iter().map(|(session, name, begin, took_ms)| UserAction {
            session,
            name,
            begin: tie.host(begin),
            took: Duration::from_secs_f64(took_ms / 1000.0),
        });
        let loads = self.reported.loads.into_iter();
        let loads = loads.map(|(name, begin, json)| FinishedLoad { name, begin: tie.host(begin), json });
        let (did, loads): (Vec<UserAction>, Vec<FinishedLoad>) = (did.collect(), loads.collect());
        let told = self.course.told.unwrap_or(up);
        let begins = did.iter().map(|did| (&did.name, did.begin));
        for (name, begin) in begins.chain(loads.iter().map(|load| (&load.name, load.begin))) {
            is_in_time(name, since(told, begin), since(told, done))?;
        }
        Ok(MachineTimeline {
            started: self.guest.started(),
            up,
            told,
            done,
            did,
            loads,
            command: self.guest.command().into(),
        })
    }
}

/// The machine's clock, tied to the host's: a line comes late but never early, so that the one with the least delay is nearest.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ClockTie {
    /// When a line was seen.
    at: Instant,
    /// When it was said, by the machine's clock.
    said: f64,
}

impl ClockTie {
    /// After one more line of a machine that was started then. A clock that jumps ahead leaves what is said afterwards long ago.
    fn of(last: Option<ClockTie>, heard: ClockTie, started: Instant) -> Result<ClockTie> {
        let tie = last.map_or(heard, |last| last.nearer(heard));
        let said = heard.said;
        ensure!(
            tie.host(said) + MOST_CLOCK_ERROR >= started,
            "it says something at {said} s of its clock: that is before it was started"
        );
        Ok(tie)
    }

    /// Of two the one whose line came with less delay.
    fn nearer(self, other: ClockTie) -> ClockTie {
        if since(self.at, other.at) < other.said - self.said { other } else { self }
    }

    /// The host's time of one of the machine's.
    fn host(self, clock: f64) -> Instant {
        match clock >= self.said {
            true => self.at + Duration::from_secs_f64((clock - self.said).min(1e6)),
            false => {
                let before = Duration::from_secs_f64((self.said - clock).min(1e6));
                self.at.checked_sub(before).unwrap_or(self.at)
            }
        }
    }
}

/// What is added to the initrd.
fn payload(words: &str) -> Vec<Entry> {
    vec![
        Entry::file("payload/words", 0o644, words),
        Entry::file("payload/lab.pl", 0o644, include_str!("../../guest/lab.pl")),
        Entry::file("payload/session.pl", 0o644, include_str!("../../guest/session.pl")),
        Entry::file("payload/fio.pl", 0o644, include_str!("../../guest/fio.pl")),
        Entry::directory("payload/systemd"),
        Entry::file("payload/systemd/lab.service", 0o644, include_str!("../../guest/lab.service")),
        Entry::directory("payload/systemd/multi-user.target.wants"),
        Entry::link("payload/systemd/multi-user.target.wants/lab.service", "../lab.service"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_leaves_what_it_reported_and_nothing_that_it_needed() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["initrd.cpio", "go.in", "go.out", "report.log"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        drop(BootFiles { dir: dir.path().into() });
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["report.log"]);
    }

    #[test]
    fn the_line_with_the_least_delay_ties_the_clocks() {
        let at = Instant::now();
        let later = at + Duration::from_millis(1000);
        let tie = ClockTie { at, said: 10.0 };
        let less = ClockTie { at: later, said: 11.005 };
        assert_eq!(tie.nearer(less), less, "5 ms less delay");
        assert_eq!(tie.nearer(ClockTie { at: later, said: 10.995 }), tie, "5 ms more");
        assert_eq!(
            ClockTie { at: later, said: 9.9 }.nearer(ClockTie { at, said: 9.0 }),
            ClockTie { at, said: 9.0 }
        );
        let ms = |ms| Duration::from_millis(ms);
        assert_eq!((tie.host(12.5), less.host(10.505)), (at + ms(2500), at + ms(500)));
        assert_eq!(tie.host(f64::MAX), at + Duration::from_secs(1_000_000), "what no clock can say");

        let of = |last, said| ClockTie::of(last, ClockTie { at: later, said }, at);
        assert_eq!(of(Some(tie), 10.5).unwrap(), tie);
        for said in [9.0 - 1e-3, -1e9, f64::MIN] {
            of(Some(tie), said).unwrap_err();
        }
        let ahead = of(Some(tie), f64::MAX).unwrap();
        of(Some(ahead), 11.0).unwrap_err();
        of(None, f64::NAN).unwrap_err();
    }
}
