//! A machine's disk: a process `spillway-worker` in the machine's folder, controlled over its control socket. Owns the
//! settings and the names of the sockets.
//!
//! Invariant: no call waits longer than its deadline for a disk that does not answer.

use super::look;
use super::run::{MachineFolder, RunRecord};
use crate::error::HostError;
use crate::hypervisor::qemu;
use crate::images::BaseFile;
use crate::json_lines::JsonLines;
use crate::processes::{self, ObservedProcess, Process};
use crate::scopes::Scopes;
use crate::short_path::ShortPath;
use serde::Serialize;
use spillway_api::{DiskMode, ErrorCode, Hypervisor};
use spillway_control::console::ConsoleSockets;
use spillway_control::program::{OTHER_VERSION, ServeOrder, ServeOutput, check_program};
use spillway_control::{
    BaseCache, Client, Digests, DiskAtRest, DiskSettings, ErrorKind, ImageFormat, Request, ServeSettings,
};
use spillway_image::{ImageErrorKind, open_image};
use std::future::pending;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Name of the process.
pub const PROCESS: &str = "disk";
/// Name of the vhost-user socket.
pub const SOCKET: &str = "disk.sock";
/// Name of the NBD socket, for machines whose VMM is started by somebody else.
pub const NBD: &str = "disk.nbd";
/// Name of the control socket.
pub const CONTROL: &str = "disk.ctl";
/// Longest time until the disk is ready.
const READY: Duration = Duration::from_secs(60);
/// Longest time until the disk ends when it is asked to. A disk that is kept has data to write first.
const END: Duration = Duration::from_secs(30);
/// Longest time until the control socket accepts a subscription.
const LISTEN: Duration = Duration::from_secs(5);
/// Longest event line of a disk.
const MAX_EVENT_BYTES: usize = 64 << 10;
const LOOK: Duration = Duration::from_millis(2);
/// Kinds of events: chunks of the image do not come, and do again.
const CHUNKS_MISSING: &str = "chunks-missing";
const CHUNKS_ARRIVE: &str = "chunks-arrive";

/// Files and programs that a disk is made of.
#[derive(Clone, Debug)]
pub struct DiskSource {
    /// The program `spillway-worker`.
    pub program: PathBuf,
    /// The image's version, in raw format.
    pub base: BaseFile,
    /// Size that the disk was given; `None`: the image's.
    pub size_bytes: Option<u64>,
    /// Id of the image version, which protects a kept disk from being served on another image.
    pub image_id: String,
    /// List of the image's digests and the digest of the list, if reads are verified.
    pub digests: Option<(PathBuf, String)>,
    /// Folder for the overflow or the difference file.
    pub overflow: PathBuf,
}

/// Starts the disk and waits until it serves.
pub fn start(
    folder: &Path,
    run: &RunRecord,
    source: &DiskSource,
    scopes: &Scopes,
) -> Result<Process, HostError> {
    // At each start: the package may have been upgraded meanwhile.
    let mut command = Command::new(check_program(&source.program)?);
    command.args(order(run, source).arguments()?);
    let process = processes::start(folder, PROCESS, scopes.place(folder, PROCESS, command))?;
    let until = Instant::now() + READY;
    while let Err(e) = ask(folder, &Request::Ping) {
        if process.ends_within(LOOK) {
            return Err(not_served(&processes::last_words(folder, PROCESS)));
        }
        if Instant::now() > until {
            let _ = process.end(Duration::ZERO);
            return Err(HostError::new(ErrorCode::Internal, format!("its disk is not ready: {e}")));
        }
    }
    Ok(process)
}

/// The error of a disk whose program has ended with these words.
fn not_served(said: &str) -> HostError {
    let says = |words: &[&str]| words.iter().any(|word| said.contains(word));
    let code = match () {
        () if says(&[OTHER_VERSION]) => ErrorCode::Unavailable,
        () if says(&["memory", "make space"]) => ErrorCode::Exhausted,
        () => ErrorCode::Internal,
    };
    HostError::new(code, format!("its disk cannot be served: {said}"))
}

/// Refuses a disk that can never be served, before it is started: its process would fail each time with a less helpful
/// message.
pub fn check_servable(run: &RunRecord, base: &BaseFile) -> Result<(), HostError> {
    let size_bytes = match (&base.streamed, &run.copy) {
        (Some(_), None) => base.size_bytes,
        // A disk of mode `ephemeral` reads only its own copy.
        (_, Some(copy)) => openable(&copy.path, BaseCache::Host)?,
        (None, None) => openable(&base.path, run.spec.disk.base_cache())?,
    };
    // The file will be created, or its file system is not mounted.
    let Some(own) = run.kept.as_deref().filter(|own| own.exists()) else { return Ok(()) };
    match DiskAtRest::open(own, &image_id(run), size_bytes) {
        Err(e) if e.kind == ErrorKind::Image => Err(HostError::from(e).permanent()),
        // Any other fault may be temporary, and the disk's process reports it.
        _ => Ok(()),
    }
}

/// Size of an image, if its file can be opened.
fn openable(image: &Path, cache: BaseCache) -> Result<u64, HostError> {
    let opened = open_image(image, Some(ImageFormat::Raw), cache).map_err(|e| {
        use ImageErrorKind::{InUse, Io, Missing, Permission};
        let error = HostError::new(ErrorCode::Damaged, e.to_string());
        match e.kind() {
            Missing | Permission | InUse | Io => error,
            _ => error.permanent(),
        }
    })?;
    Ok(opened.virtual_size_bytes)
}

/// Id of the image version of a run's disk.
pub fn image_id(run: &RunRecord) -> String {
    format!("{}:{}", run.image, run.version)
}

/// Returns the disk's process if it is alive.
pub async fn find(folder: &MachineFolder) -> Result<Option<Process>, HostError> {
    Ok(match look(folder, PROCESS).await? {
        ObservedProcess::Alive(process) => Some(process),
        ObservedProcess::None | ObservedProcess::Ended => None,
    })
}

/// Ends the disk's process. Data that is not kept is lost.
pub fn end(process: &Process) -> Result<(), HostError> {
    process.end(END)
}

/// Resets the disk: discards what was written. Clients that are still connected are disconnected.
pub fn reset(folder: &Path) -> Result<(), HostError> {
    ask(folder, &Request::Reset { force: true, discard_data: false }).map(drop)
}

/// Sends a request to the disk's supervisor.
pub fn ask(folder: &Path, request: &Request) -> Result<serde_json::Value, HostError> {
    let socket = ShortPath::of(folder, CONTROL)?;
    let answer = Client::connect(socket.path()).and_then(|mut client| client.ask(request));
    Ok(answer?)
}

/// Events of a disk, while the daemon is subscribed to them. Owns what is known of a state that they tell of.
#[derive(Default)]
pub struct DiskEvents {
    lines: Option<JsonLines>,
    is_stalled: bool,
}

impl DiskEvents {
    /// Subscribes if there is no subscription yet. If the disk refuses, the next step tries again.
    pub async fn listen(&mut self, folder: &Path) {
        if self.lines.is_some() {
            return;
        }
        let connect = async {
            let socket = ShortPath::of(folder, CONTROL).map_err(io::Error::other)?;
            let mut lines = JsonLines::connect(socket.path(), MAX_EVENT_BYTES).await?;
            lines.send(&serde_json::to_value(Request::Events)?).await?;
            lines.next().await?;
            io::Result::Ok(lines)
        };
        self.lines = tokio::time::timeout(LISTEN, connect).await.ok().and_then(Result::ok);
        if self.lines.is_some() {
            // What was the case before is told by no event.
            let folder = folder.to_owned();
            let asked = tokio::task::spawn_blocking(move || ask(&folder, &Request::Stats));
            let stats = asked.await.ok().and_then(Result::ok);
            self.is_stalled = stats.is_some_and(|stats| stats["chunks"]["stalled"] == 1);
        }
    }

    /// Whether reads of the disk have waited for a chunk of its image for so long that its guest must not go on.
    pub fn is_stalled(&self) -> bool {
        self.is_stalled
    }

    /// Waits for the next event; `None`: the connection has ended. Never returns without a subscription. Cancel safe.
    pub async fn next(&mut self) -> Option<String> {
        let Some(lines) = &mut self.lines else { return pending().await };
        match lines.next().await {
            Ok(line) => {
                let word = |name: &str| line["event"][name].as_str().unwrap_or_default();
                match word("kind") {
                    CHUNKS_MISSING => self.is_stalled = true,
                    CHUNKS_ARRIVE => self.is_stalled = false,
                    _ => {}
                }
                Some(word("text").to_owned())
            }
            Err(_) => {
                self.lines = None;
                None
            }
        }
    }
}

/// The order that the server of the disk is started with.
fn order(run: &RunRecord, source: &DiskSource) -> ServeOrder {
    let mode = run.spec.mode();
    let is_copy = mode == DiskMode::Ephemeral;
    let limits =
        DiskSettings { ram_bytes: run.ram_bytes, overflow_bytes: run.overflow_bytes, ..run.spec.disk() };
    // QEMU asks for one queue per processor.
    let has_vmm = run.hypervisor != Hypervisor::None;
    let digests = source.digests.clone().filter(|_| !is_copy);
    let settings = ServeSettings {
        settings: limits.with_rate(run.rate),
        image: (!is_copy).then(|| source.base.path.clone()),
        streamed: source.base.streamed.clone().filter(|_| !is_copy),
        format: (!is_copy).then_some(ImageFormat::Raw),
        digests: digests.map(|(list, root)| Digests { list, root }),
        disk: run.kept.clone().or(run.copy.as_ref().map(|copy| copy.path.clone())),
        image_id: (mode == DiskMode::Persistent).then(|| source.image_id.clone()),
        overflow_dir: (mode.has_file() && !mode.has_named_file()).then(|| source.overflow.clone()),
        vhost_user: Some(SOCKET.into()),
        control: Some(CONTROL.into()),
        nbd: (!has_vmm).then(|| NBD.into()),
        console: has_vmm.then(|| ConsoleSockets { clients: qemu::CONSOLE.into(), vmm: qemu::SERIAL.into() }),
        // An image may have grown beyond it.
        size_bytes: source.size_bytes.map(|bytes| bytes.max(source.base.size_bytes)),
        queues: u16::try_from(run.queues).ok().filter(|_| has_vmm),
        ..ServeSettings::default()
    };
    ServeOrder { settings, output: ServeOutput::Line }
}

/// Returns the API's word for a value of a plain enumeration.
pub fn word<T: Serialize>(value: T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        other => unreachable!("a plain enumeration is a word, not {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use spillway_control::persistent_file::{DATA_AT, Header};
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_program_that_anybody_can_change_or_of_another_version_serves_no_disk() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("spillway-worker");
        std::fs::write(&program, "").unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o757)).unwrap();
        let source = DiskSource {
            program,
            base: BaseFile { path: "image".into(), streamed: None, size_bytes: 512 },
            size_bytes: None,
            image_id: "golden:1".into(),
            digests: None,
            overflow: dir.path().into(),
        };
        let run: RunRecord = serde_json::from_value(json!({
            "uuid": "u", "boot": "b", "image": "golden", "version": 1, "hypervisor": "none",
            "spec": { "image": "golden" }, "restarts": 0, "resets": 0, "queues": 1, "asked": false, "ready": false,
        }))
        .unwrap();
        let error = start(dir.path(), &run, &source, &Scopes::None).unwrap_err();
        assert_eq!(error.code, ErrorCode::Unavailable);
        assert!(error.to_string().contains("every user can write to it"), "{error}");
        let other = not_served(&format!("spillway: error: /x, which is of version 2, {OTHER_VERSION} 1"));
        assert_eq!((other.code, not_served("what?").code), (ErrorCode::Unavailable, ErrorCode::Internal));
    }

    #[test]
    fn what_no_other_try_could_serve_is_refused_for_good() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let [image, own] = ["image", "own"].map(|name| dir.path().join(name));
        let run = |version: u32, mode: &str| -> RunRecord {
            serde_json::from_value(json!({
                "uuid": "u", "boot": "b", "image": "golden", "version": version, "hypervisor": "none",
                "spec": { "image": "golden", "mode": mode }, "restarts": 0, "resets": 0, "queues": 1,
                "kept": (mode == "persistent").then_some(&own), "copy": (mode == "ephemeral").then(|| json!({ "path": own, "size_bytes": 1 << 20, "is_shared": false })),
                "asked": false, "ready": false,
            }))
            .unwrap()
        };
        let base = BaseFile { path: image.clone(), streamed: None, size_bytes: 1 << 20 };
        let is_final = |run: &RunRecord| check_servable(run, &base).map_err(|e| e.is_permanent);
        assert_eq!(is_final(&run(1, "ram")), Err(false), "its store may come back");
        for (bytes, expected) in
            [(0, Err(true)), (1000, Err(true)), ((4 << 40) + 512, Err(true)), (1 << 20, Ok(()))]
        {
            File::create(&image).unwrap().set_len(bytes).unwrap();
            assert_eq!(is_final(&run(1, "ram")), expected, "{bytes}");
        }
        assert_eq!(is_final(&run(1, "persistent")), Ok(()), "it is made when it is served");
        let header = Header {
            sequence: 1,
            size_bytes: 1 << 20,
            base_bytes: 1 << 20,
            cache: None,
            identity: "id=golden:1".into(),
        };
        let file = File::create(&own).unwrap();
        // The file of a disk has one block more.
        file.set_len(DATA_AT + (1 << 20) + 4096).unwrap();
        file.write_all_at(&header.encode(), header.slot_at()).unwrap();
        assert_eq!(is_final(&run(1, "persistent")), Ok(()));
        assert_eq!(is_final(&run(2, "persistent")), Err(true), "it is of another version");
        file.write_all_at(&[0xff; 8192], 0).unwrap();
        assert_eq!(is_final(&run(1, "persistent")), Err(true), "it is damaged");
        // What a copy was made of may be gone.
        std::fs::remove_file(&image).unwrap();
        for (bytes, expected) in [(0, Err(true)), (1000, Err(true)), (1 << 20, Ok(()))] {
            File::create(&own).unwrap().set_len(bytes).unwrap();
            assert_eq!(is_final(&run(1, "ephemeral")), expected, "{bytes}");
        }
    }
}
