//! A registry on a web server, and the program that serves its images.

use crate::client::Client;
use crate::web::Web;
use serde_json::{Value, json};
use spillway_image::digests::of_chunk;
use spillway_registry::Index;
use spillway_registry::job::Place;
use spillway_registry::serve::{
    CONTROL, CacheFigures, ControlReply, ControlRequest, Fill, ImageFigures, PeerOrder, ServeOrder, USERS,
};
use spillway_testkit::Rng;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
pub const SIZE: u64 = 10 * MIB + 512;
/// Part of a small cache's budget in which the file system keeps where the chunks are.
pub const RECORDS: u64 = 64 << 10;
pub const CHUNKS: u32 = 11;

pub fn chunk_len(chunk: u32) -> u64 {
    (SIZE - u64::from(chunk) * MIB).min(MIB)
}

/// An image that was pushed.
pub struct Image {
    bytes: Vec<u8>,
    pub root: [u8; 32],
}

impl Image {
    pub fn chunk(&self, chunk: u32) -> &[u8] {
        let at = (u64::from(chunk) * MIB) as usize;
        &self.bytes[at..at + chunk_len(chunk) as usize]
    }

    pub fn digest(&self) -> String {
        format!("sha256:{}", self.root.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }

    pub fn zero_chunks(&self) -> u32 {
        CHUNKS - self.data_chunks()
    }

    pub fn data_chunks(&self) -> u32 {
        (0..CHUNKS).filter(|chunk| self.chunk(*chunk).iter().any(|byte| *byte != 0)).count() as u32
    }
}

/// A registry with images.
pub struct Registry {
    dir: tempfile::TempDir,
    pub images: Vec<Image>,
    pub web: Web,
}

/// Content of an image, of which two chunks are zeroes.
pub fn content(seed: u64) -> Vec<u8> {
    let mut random = Rng::new(seed);
    let mut bytes = vec![0; SIZE as usize];
    let words = bytes.as_chunks_mut::<8>().0.iter_mut().enumerate();
    for (_, word) in words.filter(|(at, _)| !matches!((at * 8) >> 20, 3 | 6)) {
        *word = random.next_u64().to_le_bytes();
    }
    bytes
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_spillway-streamd"))
}

impl Registry {
    /// With images of other content each.
    pub fn new(seeds: &[u64]) -> Registry {
        Registry::of(seeds.iter().map(|seed| content(*seed)).collect())
    }

    /// With these images.
    pub fn of(contents: Vec<Vec<u8>>) -> Registry {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let shared = dir.path().join("registry");
        [shared.clone(), dir.path().join("cache")].iter().for_each(|folder| fs::create_dir(folder).unwrap());
        job(&place(&format!("file://{}", shared.display())), &json!("found"));
        let mut images = Vec::new();
        for (n, bytes) in contents.into_iter().enumerate() {
            let digests: Vec<_> = bytes.chunks(MIB as usize).map(of_chunk).collect();
            let (disk, list) = (dir.path().join("disk"), dir.path().join("digests"));
            fs::write(&disk, &bytes).unwrap();
            fs::write(&list, digests.concat()).unwrap();
            let push = json!({ "push": {
                "name": "debian", "version": n + 1, "disk": disk, "digests": list, "size_bytes": SIZE, "signature": null,
                "id": format!("push-{n}"),
            } });
            job(&place(&format!("file://{}", shared.display())), &push);
            let root = Index { size_bytes: SIZE, chunk_bytes: MIB, digests }.root();
            images.push(Image { bytes, root });
        }
        let web = Web::new(&shared);
        Registry { dir, images, web }
    }

    /// Its objects.
    pub fn shared(&self) -> PathBuf {
        self.dir.path().join("registry")
    }

    pub fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }
}

fn place(url: &str) -> Value {
    json!({ "url": url, "endpoint": null, "region": null, "single_writer": false, "credentials": null })
}

pub fn place_of(registry: &Registry) -> Place {
    place_at(&registry.web.url)
}

pub fn place_at(url: &str) -> Place {
    serde_json::from_value(place(url)).unwrap()
}

fn job(place: &Value, work: &Value) {
    let mut job = program().arg("job").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let order = json!({ "registry": { "place": place, "work": work } }).to_string();
    job.stdin.take().unwrap().write_all(order.as_bytes()).unwrap();
    let done = job.wait_with_output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
}

fn order_of(folder: &Path, budget_bytes: u64, peers: Option<PeerOrder>) -> String {
    let order = ServeOrder {
        cache: folder.join("cache"),
        budget_bytes,
        // No second request, which would be counted.
        hedge_milliseconds: 600_000,
        fill_bytes_per_second: 1 << 40,
        folders: vec![],
        peers,
    };
    serde_json::to_string(&order).unwrap()
}

/// The program, serving.
pub struct Streamd {
    child: Child,
    pub socket: PathBuf,
    pub control: Client,
}

impl Streamd {
    /// With a cache for so many bytes of chunks.
    pub fn start(registry: &Registry, budget_bytes: u64) -> Streamd {
        Streamd::start_unswept(registry, budget_bytes).swept()
    }

    pub fn swept(self) -> Streamd {
        assert_eq!(self.control.control(&ControlRequest::Sweep { others: vec![] }, &[]), ControlReply::Done);
        self
    }

    /// The same, before anything is kept.
    pub fn start_unswept(registry: &Registry, budget_bytes: u64) -> Streamd {
        Streamd::start_in(registry, registry.dir.path(), budget_bytes + RECORDS, None)
    }

    /// The same in another folder than the registry's, and with other hosts.
    pub fn start_in(
        registry: &Registry,
        folder: &Path,
        budget_bytes: u64,
        peers: Option<PeerOrder>,
    ) -> Streamd {
        [USERS, CONTROL].iter().for_each(|socket| _ = fs::remove_file(folder.join(socket)));
        let mut program = program();
        program.args(["serve", &order_of(folder, budget_bytes, peers)]).current_dir(folder);
        let child = program.stderr(File::create(folder.join("log")).unwrap()).spawn().unwrap();
        let (socket, control) = (folder.join(USERS), folder.join(CONTROL));
        let until = Instant::now() + Duration::from_secs(30);
        while !control.exists() {
            assert!(Instant::now() < until, "it does not listen");
            thread::sleep(Duration::from_millis(2));
        }
        // It listens a moment after its socket is there.
        let control = loop {
            match Client::try_connect(&control) {
                Some(control) => break control,
                None => assert!(Instant::now() < until, "it does not listen"),
            }
        };
        let streamd = Streamd { child, socket, control };
        for n in 0..registry.images.len() {
            assert_eq!(streamd.serve(registry, n, Fill::Nothing), ControlReply::Done);
        }
        streamd
    }

    /// What the program says when it cannot serve with these hosts.
    pub fn refuses(folder: &Path, peers: PeerOrder) -> String {
        fs::create_dir_all(folder.join("cache")).unwrap();
        let mut program = program();
        program.args(["serve", &order_of(folder, 0, Some(peers))]).current_dir(folder);
        let ended = program.output().unwrap();
        assert!(!ended.status.success());
        String::from_utf8(ended.stderr).unwrap()
    }

    pub fn figures(&self) -> CacheFigures {
        match self.control.control(&ControlRequest::Figures, &[]) {
            ControlReply::Figures(figures) => figures,
            other => panic!("{other:?}"),
        }
    }

    /// Stops the process, or lets it go on.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let process = rustix::process::Pid::from_child(&self.child);
        spillway_testkit::process::send_signal(process, signal).unwrap();
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Names an image as the daemon does.
    pub fn serve(&self, registry: &Registry, n: usize, fill: Fill) -> ControlReply {
        self.serve_from(registry, n, fill, place_of(registry))
    }

    /// The same, with the chunks at this place.
    pub fn serve_from(&self, registry: &Registry, n: usize, fill: Fill, place: Place) -> ControlReply {
        let image = &registry.images[n];
        let list = tempfile::tempfile().unwrap();
        let digests: Vec<_> = image.bytes.chunks(MIB as usize).map(of_chunk).collect();
        list.write_all_at(&digests.concat(), 0).unwrap();
        let request =
            ControlRequest::Serve { digest: image.digest(), size_bytes: SIZE, place, fill, dry_run: false };
        self.control.control(&request, &[list.as_fd()])
    }

    /// What is in the cache of an image.
    pub fn image(&self, registry: &Registry, n: usize) -> ImageFigures {
        match self.control.control(&ControlRequest::Image { digest: registry.images[n].digest() }, &[]) {
            ControlReply::Image(figures) => figures,
            other => panic!("{other:?}"),
        }
    }

    /// Serves an image no longer.
    pub fn forget(&self, registry: &Registry, n: usize) -> ControlReply {
        self.control.control(&ControlRequest::Forget { digest: registry.images[n].digest() }, &[])
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Streamd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Files of the cache with content of images.
fn disks(cache: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().path().join("disk.raw"))
}

/// Space that the images take in the cache.
pub fn blocks_bytes(cache: &Path) -> u64 {
    disks(cache).map(|disk| fs::metadata(disk).unwrap().blocks() * 512).sum()
}

/// Writes over a chunk of an image in the cache.
pub fn overwrite(registry: &Registry, n: usize, chunk: u32) {
    let root: String = registry.images[n].root.iter().map(|byte| format!("{byte:02x}")).collect();
    let disk = File::options().write(true).open(registry.cache().join(root).join("disk.raw")).unwrap();
    disk.write_all_at(&vec![0xa5; chunk_len(chunk) as usize], u64::from(chunk) * MIB).unwrap();
}

/// Changes some bytes of each file.
pub fn damage(cache: &Path, random: &mut Rng) {
    for path in disks(cache) {
        let file = File::options().write(true).open(path).unwrap();
        for _ in 0..8 {
            file.write_all_at(&random.next_u64().to_le_bytes(), random.below(SIZE - 8)).unwrap();
        }
    }
}
