//! The engine `guest`: work inside of real machines, one for each disk.
//!
//! Owns what machines are told, and how their times become a run's. Invariant: what is counted from outside holds all that they
//! asked: they are ended when their work is done, and ask nothing more.

use super::fio::{FioFigures, FioRun, command as fio_command, runs};
use super::machines::{MachineTimeline, Orders, Task, work};
use super::score;
use super::settings::{Fio, Sessions, WorkloadSettings};
use super::stage::{Stage, WorkDisk, WorkResult};
use crate::study::Action;
use anyhow::{Context, Result, ensure};
use spillway_testkit::guest::GuestDisk;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// Runs the workload inside of machines.
pub fn run(settings: &WorkloadSettings, stage: &Stage<'_>) -> Result<WorkResult> {
    let on_root = settings.on_root();
    let null = stage.disks.iter().any(|disk| matches!(disk, WorkDisk::Null { .. }));
    ensure!(
        !null || !on_root,
        "a null disk holds no system, so that only fio can work on it, and on no files"
    );
    let golden = GuestDisk::Snapshot(stage.kit.golden());
    let disks = stage.disks.iter().map(|disk| match disk {
        WorkDisk::Served { vhost } if on_root => vec![GuestDisk::VhostUser(vhost.clone())],
        WorkDisk::Served { vhost } | WorkDisk::Null { vhost } => {
            vec![golden.clone(), GuestDisk::VhostUser(vhost.clone())]
        }
    });
    let task = Task {
        kit: stage.kit,
        accelerator: stage.accelerator,
        disks: disks.collect(),
        orders: orders(settings, stage.seed, on_root && !null),
        every: start_interval(settings),
        dir: stage.dir,
        deadline: stage.deadline,
    };
    let (begun, lives) = work(&task, stage.watch)?;
    work_result(settings, stage, begun, &lives)
}

/// The time between the begins of two machines.
pub fn start_interval(settings: &WorkloadSettings) -> Duration {
    Duration::from_secs_f64(match settings {
        WorkloadSettings::Boot(boot) => boot.start_every_s,
        // In a machine with many sessions it is the sessions that log on one after the other.
        WorkloadSettings::Sessions(sessions) if sessions.sessions == 1 => sessions.logon_every_s,
        WorkloadSettings::Sessions(_) | WorkloadSettings::Fio(_) => 0.0,
    })
}

/// What each machine is to do.
pub fn orders(settings: &WorkloadSettings, seed: u64, on_root: bool) -> Orders {
    let (memory_mib, vcpus) = settings.machine();
    let orders =
        Orders { memory_mib, vcpus, words: guest_words(settings, seed, on_root), ..Orders::default() };
    match settings {
        WorkloadSettings::Boot(_) => Orders { boot: true, ..orders },
        WorkloadSettings::Sessions(of) => {
            // A logon, and files may be copied after each action; where they are all that is done, some are.
            let (all, each) = (of.sessions as usize, of.actions as usize);
            let least_actions = if of.works() { all * (1 + each) } else { all };
            Orders { sessions: of.sessions, least_actions, actions: all * (1 + 2 * each), ..orders }
        }
        WorkloadSettings::Fio(fio) => {
            let fill = fio.fill.then(|| "fill".into());
            Orders { loads: fill.into_iter().chain(runs(fio).iter().map(FioRun::name)).collect(), ..orders }
        }
    }
}

fn guest_words(settings: &WorkloadSettings, seed: u64, on_root: bool) -> String {
    // Perl's integers have a sign.
    let seed = seed & (u64::MAX >> 1);
    let disk = if on_root { "vda" } else { "vdb" };
    let mut text = format!("disk {disk}\nseed {seed}\n");
    // Writing to a string does not fail.
    let _ = match settings {
        WorkloadSettings::Boot(_) => writeln!(text, "work boot"),
        WorkloadSettings::Sessions(sessions) => write!(text, "{}", session_words(sessions)),
        WorkloadSettings::Fio(fio) => write!(text, "{}", fio_words(fio, on_root, seed)),
    };
    text
}

fn session_words(sessions: &Sessions) -> String {
    let Sessions { actions, pace, profile_mb, documents_mb, mail_mb, cache_mb, file_copy_mb, .. } = sessions;
    let Sessions { sessions, logon_every_s, .. } = sessions;
    format!(
        "work session\nsessions {sessions}\nlogon_every_s {logon_every_s}\nactions {actions}\npace {pace}\n\
         profile_mb {profile_mb}\ndocuments_mb {documents_mb}\nmail_mb {mail_mb}\ncache_mb {cache_mb}\n\
         file_copy_mb {file_copy_mb}\n"
    )
}

fn fio_words(fio: &Fio, on_root: bool, seed: u64) -> String {
    let file = if on_root { "/srv/fio.dat" } else { "/dev/vdb" };
    let mut text = String::from("work fio\n");
    let all = runs(fio);
    let span_mb = all.iter().map(|run| run.size_mb).max();
    if let (true, Some(span_mb)) = (fio.fill, span_mb) {
        let _ = writeln!(
            text,
            "fio fill --filename={file} --rw=write --bs=1m --size={span_mb}m --direct=1 --ioengine=libaio --iodepth=4"
        );
    }
    for run in all {
        let _ = writeln!(text, "fio {} {}", run.name(), fio_command(&run, file, fio.seconds, seed));
    }
    text
}

fn work_result(
    settings: &WorkloadSettings,
    stage: &Stage<'_>,
    begun: Instant,
    lives: &[MachineTimeline],
) -> Result<WorkResult> {
    let mut done = WorkResult::default();
    let mean =
        |of: &dyn Fn(&MachineTimeline) -> f64| lives.iter().map(of).sum::<f64>() / lives.len().max(1) as f64;
    done.figures.insert("boot_s".into(), mean(&|life| (life.up - life.started).as_secs_f64()));
    for (machine, life) in lives.iter().enumerate() {
        let machine = machine as u32;
        done.commands.push(life.command.clone());
        if matches!(settings, WorkloadSettings::Boot(_)) {
            let took_ms = (life.up - life.started).as_secs_f64() * 1000.0;
            let at_s = since(begun, life.started);
            done.actions.push(Action { machine, session: 0, name: "boot".into(), at_s, took_ms });
        }
        for did in &life.did {
            done.actions.push(Action {
                machine,
                session: did.session,
                name: did.name.clone(),
                at_s: since(begun, did.begin),
                took_ms: did.took.as_secs_f64() * 1000.0,
            });
        }
        for load in &life.loads {
            let path = stage.dir.join(format!("machine-{machine}/fio-{}.json", load.name));
            std::fs::write(&path, load.json.to_string())
                .with_context(|| format!("{}: cannot write", path.display()))?;
        }
    }
    done.actions.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    match settings {
        WorkloadSettings::Fio(fio) => {
            for run in runs(fio) {
                let name = run.name();
                let mut began_s = f64::INFINITY;
                let found = lives.iter().map(|life| {
                    let load = life.loads.iter().find(|load| load.name == name);
                    let load = load.with_context(|| format!("fio has said nothing of '{name}'"))?;
                    began_s = began_s.min(since(begun, load.begin));
                    FioFigures::from_json(&load.json).with_context(|| format!("what fio says of '{name}'"))
                });
                let found = found.collect::<Result<Vec<_>>>()?;
                FioFigures::add_figures(&found, &name, began_s, &mut done.figures);
            }
        }
        WorkloadSettings::Sessions(sessions) => {
            score::figures(&done.actions, sessions.threshold_ms, &mut done.figures)
        }
        WorkloadSettings::Boot(_) => {}
    }
    Ok(done)
}

/// Seconds from one instant to another, negative if that was before.
pub fn since(from: Instant, to: Instant) -> f64 {
    match to.checked_duration_since(from) {
        Some(later) => later.as_secs_f64(),
        None => -(from - to).as_secs_f64(),
    }
}
