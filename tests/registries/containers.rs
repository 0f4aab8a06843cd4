//! Images from OCI registries: Debian's docker-registry, to which the test pushes what it has made, and one that is none.

use crate::daemon_world::World;
use crate::downloads::{ran, sha256};
use crate::replies::{Replies, answer};
use crate::scene::{Serving, assert_nothing_left, digest, files, host_with, refused, start, write_image};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// A registry that ends with its test, and the folder in which layers are made.
struct Registry {
    _server: Serving,
    port: u16,
    dir: tempfile::TempDir,
}

fn program() -> PathBuf {
    let taken = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/tools/docker-registry");
    if taken.exists() { taken } else { "docker-registry".into() }
}

impl Registry {
    /// With more lines of its settings.
    fn new(more: &str) -> Registry {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let settings = dir.path().join("settings.yml");
        let storage = dir.path().join("storage").display().to_string();
        let text = format!(
            "version: 0.1\nlog:\n  level: info\nstorage:\n  filesystem:\n    rootdirectory: {storage}\n\
             http:\n  addr: 127.0.0.1:{port}\n{more}"
        );
        fs::write(&settings, text).unwrap();
        let mut command = Command::new(program());
        command.arg("serve").arg(&settings);
        let server = start(&mut command, |line| line.contains("listening on").then(String::new));
        Registry { _server: server, port, dir }
    }

    fn rule(&self) -> String {
        format!("http://127.0.0.1:{},local", self.port)
    }

    fn url(&self, reference: &str) -> String {
        format!("oci://127.0.0.1:{}/{reference}", self.port)
    }

    fn curl(&self, arguments: &[&str], path: &str) -> String {
        let url =
            if path.contains("://") { path.into() } else { format!("http://127.0.0.1:{}{path}", self.port) };
        let done = Command::new("curl")
            .args(["-sSf", "-H", "Authorization: any"])
            .args(arguments)
            .arg(&url)
            .output();
        let done = done.unwrap();
        assert!(done.status.success(), "{url}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    }

    /// Pushes a blob. Returns its descriptor.
    fn blob(&self, repository: &str, kind: &str, content: &[u8]) -> Value {
        let file = self.dir.path().join("blob");
        fs::write(&file, content).unwrap();
        let digest = format!("sha256:{}", sha256(content));
        let begun = self.curl(&["-X", "POST", "-D", "-"], &format!("/v2/{repository}/blobs/uploads/"));
        let to = begun.lines().find_map(|line| line.strip_prefix("Location: ")).unwrap().trim();
        let data = format!("@{}", file.display());
        let octets = "Content-Type: application/octet-stream";
        self.curl(&["-X", "PUT", "-H", octets, "--data-binary", &data], &format!("{to}&digest={digest}"));
        json!({ "mediaType": kind, "digest": digest, "size": content.len() })
    }

    /// Pushes a manifest under a tag or its digest. Returns its descriptor.
    fn manifest(&self, repository: &str, tag: Option<&str>, kind: &str, manifest: &Value) -> Value {
        let (text, file) = (manifest.to_string(), self.dir.path().join("manifest"));
        fs::write(&file, &text).unwrap();
        let digest = format!("sha256:{}", sha256(text.as_bytes()));
        let (header, data) = (format!("Content-Type: {kind}"), format!("@{}", file.display()));
        let path = format!("/v2/{repository}/manifests/{}", tag.unwrap_or(&digest));
        self.curl(&["-X", "PUT", "-H", &header, "--data-binary", &data], &path);
        json!({ "mediaType": kind, "digest": digest, "size": text.len() })
    }

    /// Pushes an image of these layers. Returns its descriptor.
    fn image(&self, repository: &str, tag: Option<&str>, config: &str, layers: &[(&str, Vec<u8>)]) -> Value {
        let layers: Vec<_> =
            layers.iter().map(|(kind, content)| self.blob(repository, kind, content)).collect();
        let config = self.blob(repository, config, b"{}");
        let manifest =
            json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers });
        self.manifest(repository, tag, MANIFEST, &manifest)
    }

    /// An archive with files of these names.
    fn layer(&self, files: &[(&str, &[u8])]) -> Vec<u8> {
        let [archive, content] = ["layer.tar", "content"].map(|name| self.dir.path().join(name));
        let _ = fs::remove_file(&archive);
        ran(Command::new("tar").args(["-cf"]).arg(&archive).args(["-T", "/dev/null"]));
        for (name, bytes) in files {
            fs::write(&content, bytes).unwrap();
            let rename = format!("--transform=s|.*|{name}|");
            ran(Command::new("tar")
                .arg("-rPf")
                .arg(&archive)
                .arg(rename)
                .arg("-C")
                .arg(self.dir.path())
                .arg("content"));
        }
        fs::read(archive).unwrap()
    }

    /// The same bytes, packed by a program.
    fn packed(&self, program: &str, plain: &[u8]) -> Vec<u8> {
        let file = self.dir.path().join("plain");
        fs::write(&file, plain).unwrap();
        Command::new(program).args(["-q", "-c"]).arg(&file).output().unwrap().stdout
    }

    /// The file in which the registry keeps a blob.
    fn kept(&self, descriptor: &Value) -> PathBuf {
        let digest = descriptor["digest"].as_str().unwrap().trim_start_matches("sha256:");
        let blobs = self.dir.path().join("storage/docker/registry/v2/blobs/sha256");
        blobs.join(&digest[..2]).join(digest).join("data")
    }
}

/// A disk, as a file and as bytes.
fn disk(dir: &Path) -> (String, Vec<u8>) {
    let path = dir.join("disk.raw");
    write_image(&path, 1);
    (path.display().to_string(), fs::read(&path).unwrap())
}

fn qcow2(dir: &Path) -> Vec<u8> {
    ran(Command::new("qemu-img")
        .args(["convert", "-f", "raw", "-O", "qcow2", "disk.raw", "disk.qcow2"])
        .current_dir(dir));
    fs::read(dir.join("disk.qcow2")).unwrap()
}

fn import(host: &World, name: &str, url: &str, format: &str) -> String {
    host.ok(&["image", "import", name, url, "--format", format]);
    digest(host, name, 1)
}

#[test]
fn the_disk_of_a_container_disk_is_imported() {
    let registry = Registry::new("");
    let host = host_with(&[&registry.rule()]);
    let (file, raw) = disk(registry.dir.path());
    let qcow2 = qcow2(registry.dir.path());
    let expected = import(&host, "file", &file, "raw");
    let base = registry.layer(&[("etc/os-release", b"ID=none"), ("disk/old.img", b"of an earlier layer")]);
    let last = registry.layer(&[("disk/.wh.old.img", b""), ("etc/x", b"x")]);
    let gzip = format!("{LAYER}+gzip");
    let zstd = format!("{LAYER}+zstd");
    let plain = registry.layer(&[("./disk/disk.img", &raw)]);
    let with_qcow2 = registry.layer(&[("disk/disk.qcow2", &qcow2)]);
    type Files<'a> = Vec<(&'a str, Vec<u8>)>;
    let images: [(&str, &str, Files); 4] = [
        ("plain", "raw", vec![(LAYER, plain.clone())]),
        (
            "gzip",
            "qcow2",
            vec![
                (&gzip, registry.packed("gzip", &base)),
                (&gzip, registry.packed("gzip", &with_qcow2)),
                (LAYER, last),
            ],
        ),
        ("zstd", "raw", vec![(&zstd, registry.packed("zstd", &plain))]),
        // Some programs name them wrongly.
        ("wrong", "raw", vec![(LAYER, registry.packed("gzip", &plain))]),
    ];
    for (tag, format, layers) in images {
        let pushed = registry.image("disks/debian", Some(tag), CONFIG, &layers);
        let (url, named) = (registry.url(&format!("disks/debian:{tag}")), pushed["digest"].as_str().unwrap());
        assert_eq!(import(&host, tag, &url, format), expected, "{tag}");
        let origin = host.json(&["image", "show", tag])["versions"][0]["origin"].clone();
        assert_eq!(origin, json!({ "kind": "import", "path": format!("{url}@{named}"), "format": format }));
        let again = registry.url(&format!("disks/debian@{named}"));
        assert_eq!(import(&host, &format!("{tag}-again"), &again, format), expected);
        host.ok(&["image", "verify", tag]);
    }
    // A file as an artifact, which no archive is around.
    let kind = "application/vnd.example.disk";
    registry.image("disks/artifact", Some("latest"), "application/vnd.oci.empty.v1+json", &[(kind, qcow2)]);
    assert_eq!(import(&host, "artifact", &registry.url("disks/artifact"), "qcow2"), expected);
    let digest = "a".repeat(64);
    let arguments =
        ["image", "import", "x", &registry.url("disks/debian:plain"), "--format", "raw", "--sha256", &digest];
    refused(&host, &arguments, 2, &["@sha256:HEX"]);
}

#[test]
fn an_index_gives_the_image_of_this_platform() {
    let registry = Registry::new("");
    let host = host_with(&[&registry.rule()]);
    let (file, raw) = disk(registry.dir.path());
    let expected = import(&host, "file", &file, "raw");
    let of = |platform: &str, content: &[u8]| {
        let (os, architecture) = platform.split_once('/').unwrap();
        let mut image =
            registry.image("multi", None, CONFIG, &[(LAYER, registry.layer(&[("disk/a", content)]))]);
        image["platform"] = json!({ "os": os, "architecture": architecture });
        image
    };
    let index = |tag: &str, manifests: &[Value]| {
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests });
        registry.manifest("multi", Some(tag), INDEX, &index)
    };
    let (arm, amd, proof) =
        (of("linux/arm64", &[1; 4096]), of("linux/amd64", &raw), of("unknown/unknown", &[2; 512]));
    let pushed = index("latest", &[arm.clone(), proof, amd.clone()]);
    assert_eq!(import(&host, "x", &registry.url("multi"), "raw"), expected);
    let path = host.json(&["image", "show", "x"])["versions"][0]["origin"]["path"].clone();
    assert_eq!(path, format!("{}@{}", registry.url("multi"), pushed["digest"].as_str().unwrap()));
    index("others", &[arm]);
    let refuse = |url: &str, code, words: &[&str]| {
        refused(&host, &["image", "import", "y", url, "--format", "raw"], code, words);
        assert_nothing_left(&host, "y");
    };
    refuse(&registry.url("multi:others"), 2, &["linux/amd64", "but for: linux/arm64"]);
    refuse(&registry.url("multi:none"), 66, &["no such image"]);
    refuse(&registry.url("none"), 66, &["no such image"]);
    refuse(&registry.url(&format!("multi@sha256:{}", "0".repeat(64))), 66, &["no such image"]);
    // The manifest of the platform is damaged in the registry.
    let kept = registry.kept(&amd);
    let good = fs::read_to_string(&kept).unwrap();
    fs::write(&kept, good.replace("schemaVersion", "SchemaVersion")).unwrap();
    let (code, _, said) = host.spillway(&["image", "import", "y", &registry.url("multi"), "--format", "raw"]);
    assert!([69, 70].contains(&code) && said.contains(&registry.url("multi")), "{code} {said}");
    assert_nothing_left(&host, "y");
}

#[test]
fn what_is_no_container_disk_is_refused_and_leaves_nothing() {
    let registry = Registry::new("");
    let host = host_with(&[&registry.rule()]);
    let push =
        |tag: &str, config: &str, layers: &[(&str, Vec<u8>)]| registry.image("a", Some(tag), config, layers);
    let layer = |files: &[(&str, &[u8])]| (LAYER, registry.layer(files));
    push("two", CONFIG, &[layer(&[("disk/a.img", &[7; 4096]), ("disk/b.img", &[7; 4096])])]);
    push("none", CONFIG, &[layer(&[("etc/x", b"x"), ("disks/a.img", b"x")])]);
    push("empty", CONFIG, &[layer(&[("disk/a.img", b"")])]);
    push("artifact", "application/vnd.example", &[layer(&[("x", b"x")]), ("application/x", vec![7; 512])]);
    push("rubbish", CONFIG, &[(LAYER, vec![b'x'; 10_000])]);
    push("cut", CONFIG, &[(LAYER, registry.layer(&[("disk/a.img", &[7; 100_000])])[..50_000].to_vec())]);
    let packed = registry.packed("gzip", &registry.layer(&[("disk/a.img", &[7; 100_000])]));
    push("cut-gzip", CONFIG, &[(LAYER, packed[..packed.len() / 2].to_vec())]);
    for (tag, code, word) in [
        ("two", 2, "disk/a.img and disk/b.img"),
        ("none", 2, "has no disk"),
        ("empty", 70, "is empty"),
        ("artifact", 2, "artifact of 2 files"),
        ("rubbish", 70, "cannot be unpacked"),
        ("cut", 70, "cannot be unpacked"),
        ("cut-gzip", 70, "cannot be unpacked"),
    ] {
        let url = registry.url(&format!("a:{tag}"));
        refused(&host, &["image", "import", "x", &url, "--format", "raw"], code, &[word, &url]);
        assert_nothing_left(&host, "x");
    }
    // Names that lead elsewhere are none of a disk, and nothing is written where they say.
    let outside = host.path("outside");
    let bad = outside.display().to_string();
    let up = format!("disk/{}{bad}", "../".repeat(20));
    let names = [&bad[..], &up, "../../../outside", "disk/../../outside", "/disk/../outside"];
    let evil: Vec<(&str, &[u8])> = names.iter().map(|name| (*name, &b"evil"[..])).collect();
    push("paths", CONFIG, &[layer(&[&evil[..], &[("disk/good.img", &[7; 4096])]].concat())]);
    import(&host, "paths", &registry.url("a:paths"), "raw");
    assert!(
        !outside.exists() && fs::read(host.path("state/store/images/paths/1/disk.raw")).unwrap() == [7; 4096]
    );
    // A blob that is not what its name says: changed, longer, shorter, away.
    let pushed = push("damaged", CONFIG, &[layer(&[("disk/a.img", &[7; 100_000])])]);
    let manifest: Value = serde_json::from_slice(&fs::read(registry.kept(&pushed)).unwrap()).unwrap();
    let blob = registry.kept(&manifest["layers"][0]);
    let good = fs::read(&blob).unwrap();
    let mut changed = good.clone();
    changed[5000] ^= 1;
    let longer = [&good[..], b"x"].concat();
    let url = registry.url("a:damaged");
    for (bytes, codes) in [(&changed[..], [70, 70]), (&good[..60_000], [69, 70]), (&longer, [2, 70])] {
        fs::write(&blob, bytes).unwrap();
        let (code, _, said) = host.spillway(&["image", "import", "x", &url, "--format", "raw"]);
        assert!(codes.contains(&code) && said.contains(&url), "{code} {said}");
        assert_nothing_left(&host, "x");
    }
    fs::remove_file(&blob).unwrap();
    refused(&host, &["image", "import", "x", &url, "--format", "raw"], 66, &["not all of it"]);
    fs::write(&blob, good).unwrap();
    host.ok(&["image", "import", "x", &url, "--format", "raw"]);
    assert_eq!(files(&host.path("state/store/images/x")).len(), 2);
}

#[test]
fn a_token_for_everybody_is_taken_and_given_to_nobody_else() {
    const TOKEN: &str = "token-of-the-test";
    let tokens = Replies::new(|asked, to| match asked.path.split('?').next() {
        Some("/token") => answer(to, "200 OK", "", format!("{{\"token\":\"{TOKEN}\"}}").as_bytes()),
        _ => answer(to, "404 Not Found", "", b""),
    });
    let registry =
        Registry::new(&format!("auth:\n  silly:\n    realm: {}\n    service: hub\n", tokens.url("/token")));
    let (_, raw) = disk(registry.dir.path());
    let layer = registry.layer(&[("disk/a.img", &raw)]);
    registry.image("a/b", Some("latest"), CONFIG, &[(LAYER, layer)]);
    let url = registry.url("a/b");
    let host = host_with(&[&registry.rule()]);
    let refused_here = ["image", "import", "x", &url, "--format", "raw"];
    refused(&host, &refused_here, 77, &["a token for it", "--import-from http://127.0.0.1:"]);
    assert_eq!(tokens.asked(), []);
    let host = host_with(&[&registry.rule(), &format!("http://127.0.0.1:{},local", tokens.port)]);
    import(&host, "x", &url, "raw");
    let asked = tokens.asked();
    assert!(
        asked[0].path.contains("service=hub") && asked[0].path.contains("repository%3Aa%2Fb%3Apull"),
        "{asked:?}"
    );
    for file in files(&host.path("state")) {
        let bytes = fs::read(&file).unwrap();
        assert!(!bytes.windows(TOKEN.len()).any(|part| part == TOKEN.as_bytes()), "{}", file.display());
    }
    // Blobs that are elsewhere are asked for without the token.
    let elsewhere = Replies::new(|_, to| answer(to, "200 OK", "", &[7; 4096]));
    let (port, of_tokens) = (elsewhere.port, tokens.url("/token"));
    let of_blob = sha256(&[7; 4096]);
    let manifest = json!({ "schemaVersion": 2, "layers":
        [{ "mediaType": "application/x", "digest": format!("sha256:{of_blob}"), "size": 4096 }] });
    let hub = Replies::new(move |asked, to| match asked.authorization.as_deref() {
        None => answer(
            to,
            "401 Unauthorized",
            &format!("WWW-Authenticate: Bearer realm=\"{of_tokens}\"\r\n"),
            b"",
        ),
        Some(_) if asked.path.contains("/manifests/") => {
            answer(to, "200 OK", "", manifest.to_string().as_bytes())
        }
        Some(_) => {
            answer(to, "307 Temporary Redirect", &format!("Location: http://127.0.0.1:{port}/blob\r\n"), b"")
        }
    });
    let rules = [hub.port, tokens.port, port].map(|port| format!("http://127.0.0.1:{port},local"));
    let host = host_with(&rules.each_ref().map(String::as_str));
    import(&host, "x", &format!("oci://127.0.0.1:{}/a", hub.port), "raw");
    assert_eq!(hub.asked().last().unwrap().authorization.as_deref(), Some("Bearer token-of-the-test"));
    assert!(
        elsewhere.asked().iter().all(|asked| asked.authorization.is_none()) && !elsewhere.asked().is_empty()
    );
    // One that wants a password.
    let closed =
        Replies::new(|_, to| answer(to, "401 Unauthorized", "WWW-Authenticate: Basic realm=\"x\"\r\n", b""));
    let host = host_with(&[&format!("http://127.0.0.1:{},local", closed.port)]);
    let url = format!("oci://127.0.0.1:{}/a", closed.port);
    refused(
        &host,
        &["image", "import", "x", &url, "--format", "raw"],
        69,
        &["credentials for registries are not supported"],
    );
    assert_nothing_left(&host, "x");
}
