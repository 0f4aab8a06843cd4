//! Record of a run: what a machine was started with, in the file `run.json` in its folder below `run/machines`. Owns the
//! file and the names of the folders.
//!
//! Invariant: the file is complete before anything that it names is started, and is removed first when none of that runs
//! any more. Once it exists it can be rewritten on a full file system. It is valid for one boot of the host, so its
//! durability over a power loss does not matter.

use super::desired_state::boot_id;
use super::{blocking, scratch};
use crate::error::HostError;
use crate::images::BootChoice;
use crate::resources::budget::Need;
use crate::resources::memory::CachePressure;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use spillway_api::{
    Catalog, CatalogSpec, Difference, DiskMode, ErrorCode, Hypervisor, Name, Rate, differences,
};
use spillway_control::DiskSettings;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use utoipa::ToSchema;

const FILE: &str = "run.json";
/// Previous version of the file, which the next write overwrites: its blocks are allocated already.
const SPARE: &str = "run.json.new";
/// Space for values that are added during a run: the address, the reason of the end.
const SLACK_BYTES: usize = 1024;
/// Block size of common file systems.
const BLOCK_BYTES: usize = 4096;

/// Record of a run. A run lasts from the start of a fresh disk to the end of that disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunRecord {
    /// UUID of the machine. Another machine may have its name by now.
    pub uuid: String,
    /// Id of the host's boot. The processes of an earlier boot have ended.
    pub boot: String,
    /// Name of the image.
    pub image: Name,
    /// Version of the image.
    pub version: u32,
    /// Settings of the run.
    pub spec: CatalogSpec,
    /// Hypervisor of the VMM.
    pub hypervisor: Hypervisor,
    /// The machine's restart counter that this run satisfies.
    pub restarts: u64,
    /// The machine's reset counter that this run satisfies.
    pub resets: u64,
    /// Current limit of the RAM tier, if it has one.
    pub ram_bytes: Option<u64>,
    /// Current limit of the overflow, if it has one.
    pub overflow_bytes: Option<u64>,
    /// Current rate limit of the disk.
    #[serde(default)]
    pub rate: Rate,
    /// Number of queues that the disk's server offers to a VMM.
    pub queues: u32,
    /// Path of the kept disk, in mode `persistent`.
    #[schema(value_type = Option<String>)]
    pub kept: Option<PathBuf>,
    /// Private copy of the image, in mode `ephemeral`.
    pub copy: Option<PrivateCopy>,
    /// Path of the data disk.
    #[schema(value_type = Option<String>)]
    pub data: Option<PathBuf>,
    /// Path of the scratch disk, which is emptied by each reset.
    #[schema(value_type = Option<String>)]
    pub scratch: Option<PathBuf>,
    /// Why the VMM has ended or is being ended, if it reported that.
    pub ending: Option<VmmEnding>,
    /// Whether the guest was asked to shut down.
    pub asked: bool,
    /// Whether the guest has become ready since the VMM started.
    pub ready: bool,
    /// Whether the guest's processors were stopped because its disk waits for chunks of the image.
    #[serde(default)]
    pub held: bool,
    /// Address of the guest, if it is known.
    pub address: Option<String>,
    /// Port of the host's loopback that QEMU forwards to the guest's readiness port.
    pub port: Option<u16>,
    /// Secret of this boot, with which the guest phones home.
    #[serde(default)]
    pub phone_secret: Option<String>,
    /// User and group id that the VMM runs as; `None`: as the daemon.
    #[serde(default)]
    pub user: Option<u32>,
    /// What was chosen where the image decides.
    #[serde(default)]
    pub boot_choice: BootChoice,
}

/// Properties of a disk that decide whether new settings discard its data.
#[derive(Clone, Debug)]
pub struct DiskKind {
    pub image: Name,
    pub mode: DiskMode,
    pub keeps_writes: bool,
    /// Whether the run has a data disk beside it.
    pub has_data: bool,
}

impl DiskKind {
    /// Whether these settings keep the disk's data. The disk stays on its version then.
    pub fn stays(&self, spec: &CatalogSpec) -> bool {
        let is_same = (spec.mode(), &spec.image.name) == (self.mode, &self.image);
        self.keeps_writes && spec.keeps_writes() && is_same
    }
}

impl RunRecord {
    /// Whether a restart would change anything.
    pub fn is_outdated(&self, catalog: &Catalog) -> bool {
        !self.pending(catalog).is_empty()
    }

    /// What a restart would change. A disk that keeps its data stays on its version.
    pub fn pending(&self, catalog: &Catalog) -> Vec<Difference> {
        let version = if self.disk_stays(&catalog.spec) { self.version } else { catalog.version };
        self.differences(catalog, &self.next(&catalog.spec), version)
    }

    /// Whether a restart with a reset would change anything.
    pub fn is_outdated_after_reset(&self, catalog: &Catalog) -> bool {
        !self.differences(catalog, &catalog.spec, catalog.version).is_empty()
    }

    /// Differences of these settings and this version from the run, except those that apply while it runs.
    fn differences(&self, catalog: &Catalog, spec: &CatalogSpec, version: u32) -> Vec<Difference> {
        let mut differences = differences(&catalog.name, &self.spec, spec);
        differences.retain(|difference| !difference.live && difference.setting != "image");
        for secret in differences.iter_mut().filter(|difference| difference.setting == "user_data") {
            (secret.now, secret.then) = Default::default();
        }
        if (&self.image, self.version) != (&spec.image.name, version) {
            let image = |name: &Name, version: u32| format!("{name}:{version}").into();
            let (now, then) = (image(&self.image, self.version), image(&spec.image.name, version));
            differences.insert(0, Difference { setting: "image".into(), now, then, live: false });
        }
        differences
    }

    /// Whether these settings keep the disk's data.
    pub fn disk_stays(&self, spec: &CatalogSpec) -> bool {
        self.disk_kind().stays(spec)
    }

    /// Properties of the disk.
    pub fn disk_kind(&self) -> DiskKind {
        let (mode, keeps_writes) = (self.spec.mode(), self.spec.keeps_writes());
        DiskKind { image: self.image.clone(), mode, keeps_writes, has_data: self.data.is_some() }
    }

    /// Settings of the next start: a disk that is still served keeps its properties.
    pub fn next(&self, spec: &CatalogSpec) -> CatalogSpec {
        if !self.keeps_disk_while_off() || !self.disk_stays(spec) {
            return spec.clone();
        }
        let CatalogSpec { overflow_store, disk: DiskSettings { full, base_cache, .. }, verify_reads, .. } =
            self.spec.clone();
        let disk = DiskSettings { full, base_cache, ..spec.disk };
        CatalogSpec { overflow_store, disk, verify_reads, ..spec.clone() }
    }

    /// What the run is promised now: the limit of its cache may have been raised or lowered since the start.
    pub fn need(&self) -> Need {
        let need = Need::of(&self.spec, self.hypervisor);
        Need { limit_bytes: need.limit_bytes.max(self.ram_bytes.unwrap_or(0)), ..need }
    }

    /// What the run should be promised under these settings: its guest keeps the memory that it was started with.
    pub fn need_under(&self, spec: &CatalogSpec) -> Need {
        let Need { guest_bytes, vcpus, .. } = Need::of(&self.spec, self.hypervisor);
        Need { guest_bytes, vcpus, ..Need::of(spec, self.hypervisor) }
    }

    /// Change of the limits that the disk should be asked for, given the catalog's settings and the host's memory
    /// pressure.
    pub fn limit_change(&self, spec: &CatalogSpec, squeeze: CachePressure) -> Option<DiskSettings> {
        if spec.mode() != self.spec.mode() {
            return None;
        }
        // Without an overflow nothing can be evicted to shrink a cache.
        let squeezed = |bytes: u64| match spec.overflow_bytes() {
            Some(_) => squeeze.limit_bytes(Need::of(spec, self.hypervisor)),
            None => bytes,
        };
        let limits = (spec.ram_bytes().map(squeezed), spec.overflow_bytes(), spec.rate());
        let (ram_bytes, overflow_bytes, rate) = limits;
        let differs = (self.ram_bytes, self.overflow_bytes, self.rate) != limits;
        let limits = DiskSettings { ram_bytes, overflow_bytes, ..DiskSettings::default() };
        differs.then(|| limits.with_rate(rate))
    }

    /// Records the limits that the disk has accepted.
    pub fn set_limits(&mut self, change: &DiskSettings) {
        (self.ram_bytes, self.overflow_bytes) = (change.ram_bytes, change.overflow_bytes);
        self.rate = change.rate();
    }

    /// Whether the disk is served while the machine is off, because only its process keeps the data.
    pub fn keeps_disk_while_off(&self) -> bool {
        self.spec.keeps_writes() && self.kept.is_none()
    }

    /// Whether the run writes to files that outlive it.
    pub fn keeps_files(&self) -> bool {
        self.kept.is_some() || self.data.is_some()
    }

    /// Whether the end of the run discards everything that its guest has written.
    pub fn keeps_nothing(&self) -> bool {
        !self.keeps_disk_while_off() && !self.keeps_files()
    }

    /// Whether the host has booted since: data that was not durable is lost, and removed files may be back.
    pub fn is_of_another_boot(&self) -> bool {
        self.boot != boot_id()
    }

    /// Empties the scratch disk, and formats it.
    pub fn empty_scratch(&self) -> Result<(), HostError> {
        match (&self.scratch, self.spec.scratch_disk_bytes) {
            (Some(path), Some(bytes)) => scratch::empty(path, bytes, self.spec.scratch_format.as_ref()),
            _ => Ok(()),
        }
    }
}

/// A private copy of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PrivateCopy {
    /// Path of the copy, until the disk's process has unlinked it.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Whether it shares extents with the image, so that each write of the guest allocates space.
    pub is_shared: bool,
}

/// Why a VMM ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmmEnding {
    /// The guest has shut down.
    GuestShutdown,
    /// The guest reboots.
    GuestReboot,
}

/// The folders in which machines run.
#[derive(Clone, Debug)]
pub struct MachineFolders(PathBuf);

impl MachineFolders {
    /// Creates the value for this parent folder.
    pub fn new(path: PathBuf) -> MachineFolders {
        MachineFolders(path)
    }

    /// Creates the parent folder if it does not exist.
    pub fn make(&self) -> Result<(), HostError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.0);
        made.map_err(|e| self.failed("cannot be made", &e))
    }

    /// Returns a machine's folder.
    pub fn of(&self, name: &Name) -> MachineFolder {
        MachineFolder::of(&self.0, name)
    }

    /// Folder for files of virsh. It is no machine's: that is no name of one.
    pub fn virsh_cache(&self) -> PathBuf {
        self.0.join(".virsh")
    }

    /// Names of the machines that have a folder.
    pub fn names(&self) -> Result<Vec<Name>, HostError> {
        let failed = |e: io::Error| self.failed("cannot be read", &e);
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.0).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            names.extend(name.to_str().and_then(|name| name.parse().ok()));
        }
        Ok(names)
    }

    /// Returns the records of all runs that can be read. A machine's task reports a record that cannot.
    pub fn runs(&self) -> Result<Vec<(Name, RunRecord)>, HostError> {
        let run = |name| {
            let run = self.of(&name).load().ok().flatten();
            run.map(|run| (name, run))
        };
        Ok(self.names()?.into_iter().filter_map(run).collect())
    }

    /// Names of the machines that may run and whose records cannot be read.
    pub fn unreadable(&self) -> Result<Vec<Name>, HostError> {
        Ok(self.names()?.into_iter().filter(|name| self.of(name).load().is_err()).collect())
    }

    fn failed(&self, what: &str, error: &io::Error) -> HostError {
        HostError::new(ErrorCode::Internal, format!("{} {what}: {error}", self.0.display()))
    }
}

/// A machine's folder.
#[derive(Clone, Debug)]
pub struct MachineFolder(PathBuf);

impl MachineFolder {
    /// Returns a machine's folder below the folder of all machines.
    pub fn of(machines: &Path, name: &Name) -> MachineFolder {
        MachineFolder(machines.join(name.as_str()))
    }

    /// Name of the machine.
    pub fn name(&self) -> &str {
        self.0.file_name().and_then(|name| name.to_str()).unwrap_or_default()
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether a record of a run exists, readable or not.
    pub fn has_run(&self) -> bool {
        self.0.join(FILE).exists()
    }

    /// Reads the record of the run, if there is one.
    pub fn load(&self) -> Result<Option<RunRecord>, HostError> {
        match fs::read(self.0.join(FILE)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(self.failed("cannot be read", e)),
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| self.damaged(&e)),
        }
    }

    /// Creates the folder if it does not exist.
    pub fn make(&self) -> Result<(), HostError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.0);
        made.map_err(|e| self.failed("cannot be made", e))
    }

    /// Writes the record of the run.
    pub fn save(&self, run: &RunRecord) -> Result<(), HostError> {
        let mut text = serde_json::to_vec_pretty(run).expect("a run is plain data");
        let (file, spare) = (self.0.join(FILE), self.0.join(SPARE));
        let mut write = || {
            let of = |path: &Path| fs::metadata(path).map_or(0, |found| found.len() as usize);
            // JSON ignores trailing spaces. The file never shrinks, so that the next version fits into its blocks.
            text.resize((text.len() + SLACK_BYTES).next_multiple_of(BLOCK_BYTES).max(of(&file)), b' ');
            overwrite(&spare, &text)?;
            match renameat_with(CWD, &spare, CWD, &file, RenameFlags::EXCHANGE) {
                Ok(()) => return Ok(()),
                // There is no previous file yet, or the file system cannot exchange names, and the previous file is
                // created each time.
                Err(Errno::NOENT | Errno::INVAL | Errno::NOSYS) => fs::rename(&spare, &file)?,
                Err(e) => return Err(e.into()),
            }
            overwrite(&spare, &text)
        };
        write().map_err(|e| self.failed("cannot be written", e))
    }

    /// Writes the record on a thread for blocking work.
    pub async fn save_in_background(&self, run: &RunRecord) -> Result<(), HostError> {
        let (folder, run) = (self.clone(), run.clone());
        blocking(move || folder.save(&run)).await
    }

    /// Removes the folder with all files, the record of the run first. Returns whether it existed.
    pub fn remove(&self) -> Result<bool, HostError> {
        let absent = |e: io::Error| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) };
        let remove = || {
            fs::remove_file(self.0.join(FILE)).or_else(absent)?;
            let entries = match fs::read_dir(&self.0) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
                entries => entries?,
            };
            for entry in entries {
                let entry = entry?;
                match entry.file_type()?.is_dir() {
                    true => fs::remove_dir_all(entry.path()).or_else(absent)?,
                    false => fs::remove_file(entry.path()).or_else(absent)?,
                }
            }
            fs::remove_dir(&self.0).map(|()| true)
        };
        remove().map_err(|e| self.failed("cannot be removed", e))
    }

    fn damaged(&self, error: &serde_json::Error) -> HostError {
        let (path, name) = (self.0.join(FILE), self.name());
        let message = format!(
            "{} is damaged: {error}: 'spillway machine stop {name}' ends its processes, and 'spillway machine start {name}' then starts it anew",
            path.display()
        );
        HostError::new(ErrorCode::Damaged, message)
    }

    fn failed(&self, what: &str, error: io::Error) -> HostError {
        let code = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::Exhausted,
            _ => ErrorCode::Internal,
        };
        HostError::new(code, format!("{} {what}: {error}", self.0.display()))
    }
}

/// Overwrites a file in place: if it is long enough, no block is allocated.
fn overwrite(path: &Path, text: &[u8]) -> io::Result<()> {
    let file = File::options().create(true).truncate(false).write(true).open(path)?;
    file.write_all_at(text, 0)?;
    file.set_len(text.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn catalog(settings: Value, version: u32) -> Catalog {
        let mut spec = json!({ "image": "debian" });
        spec.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        serde_json::from_value(json!({
            "name": "desk", "spec": spec, "version": version, "history": [], "warnings": [],
            "created": "2026-01-01T00:00:00Z"
        }))
        .unwrap()
    }

    fn run(settings: Value, kept: Option<&str>) -> RunRecord {
        let spec = catalog(settings, 1).spec;
        serde_json::from_value(json!({
            "uuid": "u", "boot": "b", "image": "debian", "version": 1, "spec": spec, "hypervisor": "qemu",
            "restarts": 0, "resets": 0, "queues": 1, "kept": kept, "asked": false, "ready": true,
        }))
        .unwrap()
    }

    #[test]
    fn a_disk_that_is_served_on_stays_what_it_is_and_the_rest_is_taken() {
        let still = run(json!({ "reset": "never", "vcpus": 1 }), None);
        let same = catalog(json!({ "reset": "never", "vcpus": 1 }), 2);
        assert!(!still.is_outdated(&same) && still.is_outdated_after_reset(&same), "it stays on its version");
        let other = json!({ "reset": "never", "vcpus": 2, "full": "fail", "data_disk_bytes": 1 << 20 });
        let mut renewed = still.clone();
        assert!(still.is_outdated(&catalog(other.clone(), 2)));
        renewed.spec = still.next(&catalog(other.clone(), 2).spec);
        assert_eq!((renewed.spec.hardware.vcpus, renewed.spec.disk.full), (2, still.spec.disk.full));
        assert!(!renewed.is_outdated(&catalog(other, 2)), "once it has them there is nothing more to take");
        for gone in [json!({ "reset": "never", "mode": "direct" }), json!({ "reset": "power-cycle" })] {
            let gone = catalog(gone, 1);
            assert!(!still.disk_stays(&gone.spec) && still.is_outdated(&gone));
            assert_eq!(still.next(&gone.spec), gone.spec);
        }
        // One that has a file of its own is served anew, with all that its catalog says.
        let own = run(json!({ "type": "dedicated" }), Some("/disk"));
        let next = catalog(json!({ "type": "dedicated", "base_cache": "none" }), 1);
        assert!(own.disk_stays(&next.spec) && own.next(&next.spec) == next.spec && own.is_outdated(&next));
    }

    #[test]
    fn a_disk_that_does_not_stay_takes_the_catalogs_version() {
        let own = run(json!({ "type": "dedicated" }), Some("/disk"));
        let other = catalog(json!({ "type": "dedicated", "image": "windows" }), 3);
        assert_eq!(own.pending(&other)[0].then, "windows:3");
        assert_eq!(own.pending(&catalog(json!({ "type": "dedicated" }), 3)), [], "it stays on its own");
        let pooled = run(json!({}), None);
        let kept = catalog(json!({ "reset": "never" }), 3);
        assert_eq!(pooled.pending(&kept)[0].then, "debian:3");
    }

    #[test]
    fn what_a_stop_discards_is_what_nothing_keeps() {
        let with_data =
            RunRecord { data: Some("/d".into()), ..run(json!({ "data_disk_bytes": 1 << 20 }), None) };
        let dedicated = run(json!({ "type": "dedicated" }), Some("/k"));
        for keeps in [with_data, dedicated, run(json!({ "reset": "never" }), None)] {
            assert!(!keeps.keeps_nothing(), "{keeps:?}");
        }
        assert!(run(json!({}), None).keeps_nothing());
        assert!(run(json!({ "reset": "guest-reboot", "scratch_disk_bytes": 1 << 20 }), None).keeps_nothing());
    }

    #[test]
    fn what_the_next_start_takes_is_said_one_by_one() {
        let run = run(json!({ "vcpus": 1, "user_data": "a secret" }), None);
        let taken_now = json!({
            "vcpus": 1, "user_data": "a secret", "mode": "ram+overflow", "ram_bytes": 1 << 30, "warm": 3,
            "image": "debian:1", "naming": "desk-###", "grace_seconds": 5, "labels": { "a": "b" }, "autostart": true,
            "residency": "full",
        });
        assert_eq!(run.pending(&catalog(taken_now, 1)), []);
        let taken_later = json!({ "vcpus": 2, "user_data": "another", "network": "none" });
        let pending = run.pending(&catalog(taken_later, 2));
        let pending: Vec<_> = pending.iter().map(|d| (d.setting.as_str(), &d.now, &d.then)).collect();
        let (null, one, two) = (Value::Null, json!(1), json!(2));
        let (user, none) = (json!("user"), json!("none"));
        let (before, after) = (json!("debian:1"), json!("debian:2"));
        assert_eq!(
            pending,
            [
                ("image", &before, &after),
                ("network", &user, &none),
                ("user_data", &null, &null),
                ("vcpus", &one, &two)
            ]
        );
    }

    #[test]
    fn what_was_promised_is_the_larger_of_what_it_had_and_has() {
        let mut run = run(json!({ "ram_bytes": 64 << 20, "ram_guarantee_bytes": 16 << 20 }), None);
        let guest = Need { guest_bytes: 1 << 30, vcpus: 1, ..Need::default() };
        for (now, limit_bytes) in [(None, 64 << 20), (Some(16 << 20), 64 << 20), (Some(96 << 20), 96 << 20)] {
            run.ram_bytes = now;
            assert_eq!(run.need(), Need { guarantee_bytes: 16 << 20, limit_bytes, ..guest });
        }
        let more = catalog(json!({ "ram_bytes": 128 << 20, "memory_bytes": 4_u64 << 30, "vcpus": 4 }), 1);
        let caches = Need { guarantee_bytes: 0, limit_bytes: 128 << 20, ..guest };
        assert_eq!(run.need_under(&more.spec), caches, "its guest has what it was started with");
        run.hypervisor = Hypervisor::None;
        assert_eq!((run.need().guest_bytes, run.need().vcpus), (0, 0), "somebody else's guest");
    }
}
