//! The words of each workload: its parameters, their defaults, and what they may be.
//!
//! Owns names, defaults and bounds; docs/design/044-session-workloads.md has their sources. Invariant: whatever got through here can
//! be done; nothing is looked at twice.

use super::fio::{self, PROFILES};
use super::fleet::REPLAYED;
use crate::replay::Speed;
use crate::study::Engine;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;

/// What responses may exceed their baseline by, in milliseconds, where a study says nothing else.
pub const THRESHOLD_MS: f64 = 1000.0;

/// Space for files on the golden image, with a reserve.
const SPACE_MB: u32 = 1200;

/// A workload with its parameters.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkloadSettings {
    /// A machine comes up.
    Boot(Boot),
    /// Users work.
    Sessions(Sessions),
    /// A generator's load.
    Fio(Fio),
}

/// What every workload with machines has.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Boot {
    /// Memory of a machine.
    pub memory_mb: u32,
    /// Its processors.
    pub vcpus: u32,
    /// How much later each machine starts than the one before.
    pub start_every_s: f64,
    /// How fast a recording is asked.
    #[serde(deserialize_with = "speed")]
    pub speed: Speed,
}

impl Default for Boot {
    fn default() -> Boot {
        Boot { memory_mb: 768, vcpus: 1, start_every_s: 0.0, speed: Speed::Times(1.0) }
    }
}

/// What users do, how much of it, and how fast.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sessions {
    /// Memory of a machine.
    pub memory_mb: u32,
    /// Its processors.
    pub vcpus: u32,
    /// How fast a recording is asked.
    #[serde(deserialize_with = "speed")]
    pub speed: Speed,
    /// Sessions in one machine.
    pub sessions: u32,
    /// Between two logons: of a machine's sessions, or of machines.
    pub logon_every_s: f64,
    /// Actions of a session after its logon.
    pub actions: u32,
    /// By what all pauses of users are divided.
    pub pace: f64,
    /// First-time profile that a logon writes.
    pub profile_mb: u32,
    /// Documents of a session.
    pub documents_mb: u32,
    /// Its mail file.
    pub mail_mb: u32,
    /// Its browser's cache.
    pub cache_mb: u32,
    /// Files copied during a session, besides.
    pub file_copy_mb: u32,
    /// By how much response may exceed the baseline until it counts as degraded.
    pub threshold_ms: f64,
}

impl Default for Sessions {
    fn default() -> Sessions {
        Sessions {
            memory_mb: 768,
            vcpus: 1,
            speed: Speed::Times(1.0),
            sessions: 1,
            logon_every_s: 0.0,
            actions: 60,
            pace: 1.0,
            profile_mb: 5,
            documents_mb: 24,
            mail_mb: 32,
            cache_mb: 16,
            file_copy_mb: 0,
            threshold_ms: THRESHOLD_MS,
        }
    }
}

/// Files copied and nothing else.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct FileCopy {
    memory_mb: u32,
    vcpus: u32,
    #[serde(deserialize_with = "speed")]
    speed: Speed,
    megabytes: u32,
    actions: u32,
    pace: f64,
}

impl Default for FileCopy {
    fn default() -> FileCopy {
        FileCopy {
            memory_mb: 768,
            vcpus: 1,
            speed: Speed::Times(1.0),
            megabytes: 256,
            actions: 32,
            pace: 1.0,
        }
    }
}

/// Loads of fio's kind.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fio {
    /// Memory of a machine.
    pub memory_mb: u32,
    /// Its processors.
    pub vcpus: u32,
    /// Names of profiles, in the order in which they run.
    pub profiles: Vec<String>,
    /// How long each runs.
    pub seconds: u32,
    /// The span that it runs over; else the profile's own.
    pub size_mb: Option<u32>,
    /// Whether the span is written once before.
    pub fill: bool,
    /// Whether each runs a second time through the file system's page cache.
    pub buffered: bool,
    /// On what.
    pub on: FioTarget,
}

/// What fio runs on inside of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FioTarget {
    /// The second disk itself.
    Disk,
    /// A file on the root's file system.
    Files,
}

impl Default for Fio {
    fn default() -> Fio {
        Fio {
            memory_mb: 768,
            vcpus: 1,
            profiles: vec!["iometer-citrix".into()],
            seconds: 60,
            size_mb: None,
            fill: true,
            buffered: false,
            on: FioTarget::Disk,
        }
    }
}

impl WorkloadSettings {
    /// Reads and checks them.
    pub fn of(
        workload: &str,
        engine: Engine,
        parameters: &BTreeMap<String, toml::Value>,
    ) -> Result<WorkloadSettings> {
        let words = WorkloadSettings::read(workload, engine, parameters)
            .with_context(|| format!("workload '{workload}', engine '{}'", engine.name()))?;
        words.check().with_context(|| format!("workload '{workload}'"))?;
        Ok(words)
    }

    fn read(
        workload: &str,
        engine: Engine,
        parameters: &BTreeMap<String, toml::Value>,
    ) -> Result<WorkloadSettings> {
        let not = |other: Engine, why: &str| {
            ensure!(engine != other, "it cannot be done there: {why}");
            Ok(())
        };
        let has = |word: &str| parameters.contains_key(word);
        let none_of = |words: &[&str]| match words.iter().find(|w| has(w)) {
            Some(word) => bail!("unknown word '{word}'"),
            None => Ok(()),
        };
        if engine != Engine::Replay && workload != "fio" {
            none_of(&["speed"])?;
        }
        Ok(match workload {
            "boot" => {
                not(Engine::Host, "the host boots no machine without a guest: 'guest' or 'replay'")?;
                WorkloadSettings::Boot(parse(parameters)?)
            }
            "file-copy" => {
                not(Engine::Host, "files are copied inside of a machine: 'guest' or 'replay'")?;
                let copy: FileCopy = parse(parameters)?;
                WorkloadSettings::Sessions(Sessions {
                    memory_mb: copy.memory_mb,
                    vcpus: copy.vcpus,
                    speed: copy.speed,
                    actions: copy.actions,
                    pace: copy.pace,
                    file_copy_mb: copy.megabytes,
                    profile_mb: 0,
                    documents_mb: 0,
                    mail_mb: 0,
                    cache_mb: 0,
                    ..Sessions::default()
                })
            }
            "knowledge-worker" => {
                not(Engine::Host, "users work inside of a machine: 'guest' or 'replay'")?;
                none_of(&["sessions", "logon_every_s"])?;
                WorkloadSettings::Sessions(parse(parameters)?)
            }
            "session-host" => {
                not(Engine::Host, "users work inside of a machine: 'guest' or 'replay'")?;
                let mut words: Sessions = parse(parameters)?;
                words.sessions = if has("sessions") { words.sessions } else { 4 };
                words.logon_every_s = if has("logon_every_s") { words.logon_every_s } else { 30.0 };
                WorkloadSettings::Sessions(words)
            }
            "logon-storm" => {
                not(Engine::Host, "users work inside of machines: 'guest' or 'replay'")?;
                none_of(&["sessions"])?;
                let mut words: Sessions = parse(parameters)?;
                words.actions = if has("actions") { words.actions } else { 12 };
                words.logon_every_s = if has("logon_every_s") { words.logon_every_s } else { 15.0 };
                WorkloadSettings::Sessions(words)
            }
            "fio" => {
                not(
                    Engine::Replay,
                    "its load is what the disk can do, which no recording has: 'guest' or 'host'",
                )?;
                let fio: Fio = parse(parameters)?;
                ensure!(
                    engine == Engine::Guest || !fio.buffered,
                    "buffered: the host has no page cache in front of a disk; engine 'guest'"
                );
                if engine == Engine::Host {
                    none_of(&["on", "memory_mb", "vcpus"])?;
                }
                WorkloadSettings::Fio(fio)
            }
            _ => bail!("there is no such workload: {}", super::WORKLOADS.join(", ")),
        })
    }

    /// Memory and processors of a machine.
    pub fn machine(&self) -> (u32, u32) {
        match self {
            WorkloadSettings::Boot(w) => (w.memory_mb, w.vcpus),
            WorkloadSettings::Sessions(w) => (w.memory_mb, w.vcpus),
            WorkloadSettings::Fio(w) => (w.memory_mb, w.vcpus),
        }
    }

    /// Whether it needs a system or its files on the disk, and not only the disk.
    pub fn on_root(&self) -> bool {
        match self {
            WorkloadSettings::Boot(_) | WorkloadSettings::Sessions(_) => true,
            WorkloadSettings::Fio(fio) => fio.on == FioTarget::Files || fio.buffered,
        }
    }

    /// The names of the figures that it leaves in any case, other than scores.
    pub fn figures(&self, engine: Engine) -> Vec<String> {
        let mut all: Vec<String> = match engine {
            Engine::Guest => vec!["boot_s".into()],
            Engine::Replay => REPLAYED.map(String::from).into(),
            Engine::Host => Vec::new(),
        };
        // Without a pace nothing is answered late, and a logon that writes nothing may ask nothing of the disk.
        let waits = |speed| engine == Engine::Replay && speed != Speed::Full;
        match self {
            WorkloadSettings::Boot(boot) if waits(boot.speed) => all.push("boot_s".into()),
            WorkloadSettings::Sessions(sessions) if sessions.works() => {
                if engine == Engine::Guest || (waits(sessions.speed) && sessions.profile_mb > 0) {
                    all.push("logon_s".into());
                }
            }
            WorkloadSettings::Fio(fio) => {
                all.extend(fio::runs(fio).iter().flat_map(|run| fio::names(&run.name())))
            }
            WorkloadSettings::Boot(_) | WorkloadSettings::Sessions(_) => {}
        }
        all
    }

    fn check(&self) -> Result<()> {
        let (memory_mb, vcpus) = self.machine();
        within("memory_mb", memory_mb, 256, 65536)?;
        within("vcpus", vcpus, 1, 64)?;
        match self {
            WorkloadSettings::Boot(boot) => within("start_every_s", boot.start_every_s, 0.0, 3600.0),
            WorkloadSettings::Sessions(sessions) => sessions.check(),
            WorkloadSettings::Fio(fio) => fio.check(),
        }
    }
}

impl Sessions {
    /// Whether users log on and work, and not only copy files.
    pub fn works(&self) -> bool {
        [self.documents_mb, self.mail_mb, self.cache_mb].into_iter().any(|mb| mb > 0)
    }

    fn check(&self) -> Result<()> {
        within("sessions", self.sessions, 1, 200)?;
        within("logon_every_s", self.logon_every_s, 0.0, 3600.0)?;
        within("actions", self.actions, 1, 100_000)?;
        within("pace", self.pace, 0.01, 10_000.0)?;
        within("threshold_ms", self.threshold_ms, 1.0, 1e6)?;
        for (name, megabytes) in [
            ("profile_mb", self.profile_mb),
            ("documents_mb", self.documents_mb),
            ("mail_mb", self.mail_mb),
            ("cache_mb", self.cache_mb),
            ("file_copy_mb", self.file_copy_mb),
        ] {
            within(name, megabytes, 0, SPACE_MB)?;
        }
        // Documents are there twice while they are saved, and once more compressed.
        let session =
            self.profile_mb + self.documents_mb * 3 / 2 + self.mail_mb + self.cache_mb + self.file_copy_mb;
        let all = u64::from(session) * u64::from(self.sessions);
        ensure!(
            all <= u64::from(SPACE_MB),
            "{} sessions take {all} MB of files (profile_mb, half as much again as documents_mb, mail_mb, cache_mb, \
             file_copy_mb of each), and the golden image has space for {SPACE_MB}",
            self.sessions
        );
        Ok(())
    }
}

impl Fio {
    fn check(&self) -> Result<()> {
        ensure!(!self.profiles.is_empty(), "profiles: none");
        for name in &self.profiles {
            ensure!(
                PROFILES.iter().any(|p| p.name == name),
                "profiles: there is no '{name}': {}",
                PROFILES.map(|p| p.name).join(", ")
            );
            ensure!(self.profiles.iter().filter(|p| *p == name).count() == 1, "profiles: '{name}' twice");
        }
        within("seconds", self.seconds, 1, 86_400)?;
        if let Some(size_mb) = self.size_mb {
            let most = if self.on == FioTarget::Files || self.buffered { SPACE_MB } else { 1 << 20 };
            within("size_mb", size_mb, 16, most)?;
        } else {
            let large =
                PROFILES.iter().find(|p| self.profiles.iter().any(|n| n == p.name) && p.size_mb > SPACE_MB);
            if let (Some(profile), true) = (large, self.on == FioTarget::Files || self.buffered) {
                bail!(
                    "size_mb: '{}' runs over {} MB, and the file system has space for {SPACE_MB}: say a smaller one",
                    profile.name,
                    profile.size_mb
                );
            }
        }
        Ok(())
    }
}

fn parse<T: for<'a> Deserialize<'a>>(parameters: &BTreeMap<String, toml::Value>) -> Result<T> {
    let table: toml::Table = parameters.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
    Ok(toml::Value::Table(table).try_into()?)
}

fn within<T: PartialOrd + std::fmt::Display>(name: &str, value: T, least: T, most: T) -> Result<()> {
    // Also false of what is no number.
    ensure!(value >= least && value <= most, "{name}: from {least} to {most}, not {value}");
    Ok(())
}

fn speed<'de, D: Deserializer<'de>>(from: D) -> Result<Speed, D::Error> {
    let value = toml::Value::deserialize(from)?;
    let times = match &value {
        toml::Value::String(word) if word == "full" => return Ok(Speed::Full),
        toml::Value::Integer(times) => Some(*times as f64),
        toml::Value::Float(times) => Some(*times),
        _ => None,
    };
    match times {
        Some(times) if (0.001..=1e6).contains(&times) => Ok(Speed::Times(times)),
        _ => Err(serde::de::Error::custom(format!("speed: from 0.001 to 1000000, or \"full\", not {value}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(workload: &str, engine: Engine, text: &str) -> Result<WorkloadSettings> {
        let table: toml::Table = toml::from_str(text).unwrap();
        WorkloadSettings::of(workload, engine, &table.into_iter().collect())
    }

    #[test]
    fn every_workload_stands_without_a_word() {
        for workload in super::super::WORKLOADS {
            let fits =
                [Engine::Guest, Engine::Replay, Engine::Host].map(|engine| of(workload, engine, "").is_ok());
            let want = if workload == "fio" { [true, false, true] } else { [true, true, false] };
            assert_eq!(fits, want, "{workload}");
        }
        let WorkloadSettings::Sessions(host) = of("session-host", Engine::Guest, "").unwrap() else {
            panic!()
        };
        assert_eq!((host.sessions, host.logon_every_s), (4, 30.0));
        let WorkloadSettings::Sessions(storm) = of("logon-storm", Engine::Replay, "speed = 'full'").unwrap()
        else {
            panic!()
        };
        assert_eq!((storm.sessions, storm.logon_every_s, storm.speed), (1, 15.0, Speed::Full));
        let WorkloadSettings::Sessions(copy) = of("file-copy", Engine::Guest, "megabytes = 64").unwrap()
        else {
            panic!()
        };
        assert_eq!((copy.file_copy_mb, copy.mail_mb, copy.profile_mb), (64, 0, 0));
    }

    #[test]
    fn a_null_disk_is_for_a_load_of_the_disk_itself() {
        let fits = |workload: &str, engine, text: &str| {
            let table: toml::Table = toml::from_str(text).unwrap();
            super::super::check(workload, engine, &table.into_iter().collect(), true).is_ok()
        };
        assert!(fits("fio", Engine::Guest, ""));
        for (workload, engine, text) in [
            ("fio", Engine::Host, ""),
            ("fio", Engine::Guest, "on = 'files'\nsize_mb = 64"),
            ("fio", Engine::Guest, "buffered = true\nsize_mb = 64"),
            ("boot", Engine::Guest, ""),
            ("boot", Engine::Replay, ""),
        ] {
            assert!(of(workload, engine, text).is_ok() && !fits(workload, engine, text), "{workload} {text}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        use Engine::{Guest, Host, Replay};
        for (workload, engine, text, named) in [
            ("boots", Guest, "", "boots"),
            ("boot", Guest, "actions = 3", "actions"),
            ("boot", Guest, "speed = 2", "speed"),
            ("boot", Replay, "speed = 0", "speed"),
            ("boot", Replay, "speed = nan", "speed"),
            ("boot", Replay, "speed = 'fast'", "speed"),
            ("boot", Replay, "vcpus = -1", "vcpus"),
            ("boot", Guest, "start_every_s = inf", "start_every_s"),
            ("file-copy", Guest, "mail_mb = 3", "mail_mb"),
            ("knowledge-worker", Guest, "sessions = 2", "sessions"),
            ("knowledge-worker", Guest, "pace = 0", "pace"),
            ("knowledge-worker", Guest, "pace = nan", "pace"),
            ("knowledge-worker", Guest, "actions = 'many'", "actions"),
            ("knowledge-worker", Guest, "documents_mb = 1199", "documents_mb"),
            ("session-host", Guest, "sessions = 100", "100 sessions"),
            ("logon-storm", Replay, "sessions = 2", "sessions"),
            ("fio", Host, "buffered = true", "buffered"),
            ("fio", Host, "on = 'files'", "on"),
            ("fio", Guest, "on = 'moon'", "moon"),
            ("fio", Guest, "profiles = []", "profiles"),
            ("fio", Guest, "profiles = ['iometer']", "iometer"),
            ("fio", Guest, "profiles = ['fio-4k-x1', 'fio-4k-x1']", "twice"),
            ("fio", Guest, "buffered = true", "size_mb"),
            ("fio", Guest, "size_mb = 1300\non = 'files'", "size_mb"),
            ("fio", Guest, "seconds = 0", "seconds"),
        ] {
            let error = format!("{:#}", of(workload, engine, text).unwrap_err());
            assert!(error.contains(named), "{workload} {text}: {error}");
        }
    }
}
