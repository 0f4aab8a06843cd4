//! A host with images, and the stores that it shares them through.

use crate::daemon_world::World;
use spillway_testkit::{Rng, disk};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

pub const MIB: u64 = 1 << 20;
/// Size of the test's image: some chunks, and one that is shorter.
pub const SIZE: u64 = 24 * MIB + 512;
/// Places with data: chunks of the image.
pub const DATA: [u64; 7] = [0, 1, 2, 5, 9, 17, 24];

/// A host that knows `spillway-streamd`.
pub fn host() -> World {
    host_with(&[])
}

/// The same, which may download from where these rules say.
pub fn host_with(rules: &[&str]) -> World {
    World::with(|_| {
        let worker = disk::program().unwrap().with_file_name("spillway-worker");
        let rules = rules.iter().flat_map(|rule| ["--import-from".to_owned(), (*rule).to_owned()]);
        ["--worker".into(), worker.display().to_string()].into_iter().chain(rules).collect()
    })
}

/// The command fails with this code, and says these words.
pub fn refused(host: &World, arguments: &[&str], code: i32, words: &[&str]) {
    let (found, out, err) = host.spillway(arguments);
    assert_eq!(found, code, "{arguments:?}: {out}{err}");
    words.iter().for_each(|word| assert!(err.contains(word), "{arguments:?}: {err}: {word}"));
}

/// Writes a disk image: random data in the second half of some chunks, the rest zeroes. `version` decides the content of the last
/// of them.
pub fn write_image(path: &Path, version: u64) {
    let file = File::create(path).unwrap();
    file.set_len(SIZE).unwrap();
    for chunk in DATA {
        let seed = if chunk == 17 { 1000 + version } else { chunk };
        let mut random = Rng::new(seed);
        let at = chunk * MIB + if chunk == 24 { 0 } else { MIB / 2 };
        let words = (SIZE.min((chunk + 1) * MIB) - at) / 8;
        let bytes: Vec<u8> = (0..words).flat_map(|_| random.next_u64().to_le_bytes()).collect();
        file.write_all_at(&bytes, at).unwrap();
    }
}

/// Imports an image of this version. Returns the file that it was imported from.
pub fn import(host: &World, name: &str, version: u64) -> PathBuf {
    let path = host.path(&format!("{name}-{version}.raw"));
    write_image(&path, version);
    host.ok(&["image", "import", name, &path.display().to_string(), "--format", "raw"]);
    path
}

/// The digest of a version, of this host.
pub fn digest(host: &World, name: &str, version: u64) -> String {
    let shown = host.json(&["image", "show", name]);
    let versions = shown["versions"].as_array().unwrap();
    let found = versions.iter().find(|found| found["version"] == version);
    found.unwrap_or_else(|| panic!("no {name}:{version}: {shown}"))["digest"].as_str().unwrap().to_owned()
}

/// The disk of a version in the default store.
pub fn disk_of(host: &World, name: &str, version: u64) -> PathBuf {
    host.path(&format!("state/store/images/{name}/{version}/disk.raw"))
}

/// Nothing half-made is left of a pull.
pub fn assert_nothing_left(host: &World, name: &str) {
    let folder = host.path(&format!("state/store/images/{name}"));
    let left: Vec<_> =
        fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    assert!(left.iter().all(|path| path.extension().is_none()), "{left:?}");
}

/// A server that ends with its test.
pub struct Serving {
    child: Child,
    pub url: String,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a server, and waits until it says its address.
pub fn start(command: &mut Command, address: impl Fn(&str) -> Option<String>) -> Serving {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut serving = Serving { child, url: String::new() };
    let child = &mut serving.child;
    let (said, heard) = std::sync::mpsc::channel();
    let streams: [Box<dyn Read + Send>; 2] =
        [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
    for stream in streams {
        let said = said.clone();
        // It reads to the end, so that the server is never held up by what it says.
        std::thread::spawn(move || {
            BufReader::new(stream).lines().map_while(Result::ok).for_each(|line| _ = said.send(line))
        });
    }
    drop(said);
    let mut all = String::new();
    for line in heard.iter() {
        all += &format!("{line}\n");
        if let Some(url) = address(&line) {
            serving.url = url;
            return serving;
        }
    }
    panic!("{command:?} has ended: {all}");
}

/// A web server of a folder.
pub fn web(folder: &Path) -> Serving {
    let mut python = Command::new("python3");
    python.args(["-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory"]).arg(folder);
    start(&mut python, |line| {
        let port = line.split("port ").nth(1)?.split(' ').next()?;
        Some(format!("http://127.0.0.1:{port}"))
    })
}

/// A server of S3 with a bucket `images`, and its credentials.
pub struct S3 {
    pub server: Serving,
    pub credentials: PathBuf,
    /// Whether it looks at signatures of requests.
    pub checks: bool,
}

pub const ACCESS_KEY: &str = "AKIDTEST";
pub const SECRET_KEY: &str = "verysecretkeyoftests";

/// The program of the server: moto, or what `SPILLWAY_S3_SERVER` names.
fn s3_program() -> &'static (String, PathBuf) {
    static PROGRAM: OnceLock<(String, PathBuf)> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let which = std::env::var("SPILLWAY_S3_SERVER").unwrap_or_else(|_| "moto".into());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/s3-server");
        let done = Command::new(script).arg(&which).stderr(Stdio::inherit()).output().unwrap();
        assert!(done.status.success(), "scripts/s3-server {which}");
        (which, String::from_utf8(done.stdout).unwrap().trim().into())
    })
}

pub fn s3(world: &World) -> S3 {
    let credentials = write_credentials(world, "credentials", SECRET_KEY);
    let (which, program) = s3_program();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let mut command = Command::new(program);
    let server = if which == "moto" {
        command.args(["-H", "127.0.0.1", "-p", &port]);
        start(&mut command, |line| line.contains("Running on").then(|| format!("http://127.0.0.1:{port}")))
    } else {
        let folder = world.path("s3");
        fs::create_dir(&folder).unwrap();
        command.env("ROOT_ACCESS_KEY", ACCESS_KEY).env("ROOT_SECRET_KEY", SECRET_KEY);
        command.args(["--port", &format!("127.0.0.1:{port}"), "posix"]).arg(&folder);
        let url = format!("http://127.0.0.1:{port}");
        start(&mut command, |line| line.contains(&port).then(|| url.clone()))
    };
    // A bucket is made with a signed request there, and by anybody here.
    match which.as_str() {
        "moto" => {
            let done =
                Command::new("curl").args(["-sf", "-X", "PUT", &format!("{}/images", server.url)]).status();
            assert!(done.unwrap().success());
        }
        _ => fs::create_dir(world.path("s3/images")).unwrap(),
    }
    S3 { server, credentials, checks: which != "moto" }
}

/// A file of credentials that nobody else reads.
pub fn write_credentials(world: &World, name: &str, secret: &str) -> PathBuf {
    let path = world.path(name);
    let text = format!("[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {secret}\n");
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

impl S3 {
    /// Adds it as a registry.
    pub fn add(&self, host: &World, name: &str) {
        self.add_at(host, name, "s3://images/golden", &self.server.url);
    }

    /// Adds a part of it at the address of a proxy in front of it.
    pub fn add_at(&self, host: &World, name: &str, url: &str, endpoint: &str) {
        let credentials = self.credentials.display().to_string();
        host.ok(&["registry", "add", name, url, "--endpoint", endpoint, "--credentials", &credentials]);
    }
}

/// A folder as a registry. Returns the folder.
pub fn folder(host: &World, name: &str) -> PathBuf {
    let folder = host.path(name);
    fs::create_dir(&folder).unwrap();
    host.ok(&["registry", "add", name, &format!("file://{}", folder.display())]);
    folder
}

/// All files below a folder.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}
