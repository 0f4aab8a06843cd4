//! Images from web servers: what is downloaded, what is refused, and that nothing half-made stays.

use crate::daemon_world::{World, finishes};
use crate::replies::{Replies, answer};
use crate::scene::{SIZE, assert_nothing_left, digest, files, host_with, refused, start, web, write_image};
use sha2::{Digest, Sha256};
use spillway_testkit::{certificate, process::wait_until};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

pub fn ran(command: &mut Command) {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    wait_until(Duration::from_secs(30), || is_so().then_some(())).expect(what);
}

/// No version, and no file of one.
fn assert_nothing_made(host: &World, name: &str) {
    assert_nothing_left(host, name);
    let images = host.json(&["image", "list"]);
    let named = images["items"].as_array().unwrap().iter().find(|image| image["name"] == name);
    if let Some(image) = named {
        let shown = host.json(&["image", "show", name]);
        assert_eq!(shown["versions"], serde_json::json!([]), "{image}");
    }
}

#[test]
fn raw_qcow2_and_packed_images_become_the_same_version() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let raw = dir.path().join("disk.raw");
    write_image(&raw, 1);
    let sh = |script: &str| ran(Command::new("sh").args(["-ec", script]).current_dir(dir.path()));
    sh("qemu-img convert -f raw -O qcow2 disk.raw disk.qcow2; gzip -k disk.raw; zstd -q disk.qcow2");
    let server = web(dir.path());
    let host = host_with(&[&format!("{},local", server.url)]);
    host.ok(&["image", "import", "file", &raw.display().to_string(), "--format", "raw"]);
    let expected = digest(&host, "file", 1);
    for (name, file, format) in [
        ("a", "disk.raw", "raw"),
        ("b", "disk.qcow2", "qcow2"),
        ("c", "disk.raw.gz", "raw"),
        ("d", "disk.qcow2.zst", "qcow2"),
    ] {
        let url = format!("{}/{file}", server.url);
        let of_file = sha256(&fs::read(dir.path().join(file)).unwrap());
        host.ok(&["image", "import", name, &url, "--format", format, "--sha256", &of_file]);
        assert_eq!(digest(&host, name, 1), expected, "{file}");
        let version = &host.json(&["image", "show", name])["versions"][0];
        assert_eq!(version["origin"]["path"], url);
        assert_eq!((&version["size_bytes"], &version["state"]), (&SIZE.into(), &"ready".into()));
        let folder = host.path(&format!("state/store/images/{name}/1"));
        let names: Vec<_> = files(&folder).iter().map(|path| path.file_name().unwrap().to_owned()).collect();
        assert_eq!(names, ["digests", "disk.raw"]);
        assert!(fs::metadata(folder.join("disk.raw")).unwrap().len() == SIZE);
        host.ok(&["image", "verify", name]);
    }
    // The next version of an image that there is.
    host.ok(&["image", "import", "file", &format!("{}/disk.raw", server.url), "--format", "raw"]);
    assert_eq!(digest(&host, "file", 2), expected);
    refused(
        &host,
        &["image", "import", "x", &format!("{}/disk.raw.xz", server.url), "--format", "raw"],
        2,
        &["unpack it"],
    );
    refused(
        &host,
        &["image", "import", "x", "/nowhere", "--format", "raw", "--sha256", "12"],
        2,
        &["sha256sum"],
    );
}

#[test]
fn what_a_server_does_wrong_is_told_and_leaves_nothing() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let good = dir.path().join("good.raw");
    write_image(&good, 1);
    let backed = dir.path().join("backed.qcow2");
    let mut qemu = Command::new("qemu-img");
    ran(qemu.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "/etc/passwd"]).arg(&backed).arg("1M"));
    let (good, backed) = (fs::read(&good).unwrap(), fs::read(backed).unwrap());
    let of_good = sha256(&good);
    let server = Replies::new(move |asked, to| match asked.path.as_str() {
        "/good" => answer(to, "200 OK", "", &good),
        "/backed" => answer(to, "200 OK", "", &backed),
        "/cut" => {
            write!(to, "HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n")?;
            to.write_all(&good[..5 << 20])
        }
        "/cut-chunks" => {
            write!(to, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\n")?;
            to.write_all(&good[..256])
        }
        "/huge" => write!(to, "HTTP/1.1 200 OK\r\nContent-Length: 5497558138880\r\n\r\n"),
        "/empty" => answer(to, "200 OK", "", b""),
        "/secret" => answer(to, "403 Forbidden", "", b"no"),
        "/busy" => answer(to, "503 Service Unavailable", "", b"later"),
        "/loop" => answer(to, "302 Found", "Location: /loop\r\n", b""),
        "/nowhere" => answer(to, "301 Moved Permanently", "", b""),
        "/file" => answer(to, "302 Found", "Location: file:///etc/passwd\r\n", b""),
        "/rubbish" => to.write_all(b"no HTTP at all\r\n\r\n"),
        "/bad.gz" => answer(to, "200 OK", "", b"\x1f\x8b\x08 rubbish"),
        _ => answer(to, "404 Not Found", "", b""),
    });
    let host = host_with(&[&format!("http://127.0.0.1:{},local", server.port)]);
    for (path, format, code, words) in [
        ("/missing", "raw", 66, &["does not exist", "correct the address"][..]),
        ("/cut", "raw", 69, &["ended after 5242880 bytes", "try again"]),
        ("/cut-chunks", "raw", 69, &["ended after", "try again"]),
        ("/huge", "raw", 2, &["more than 4398046511104 bytes"]),
        ("/empty", "raw", 70, &["is empty"]),
        ("/secret", "raw", 69, &["403", "import the file"]),
        ("/busy", "raw", 69, &["503", "later"]),
        ("/loop", "raw", 2, &["redirects more than"]),
        ("/nowhere", "raw", 2, &["redirects to nowhere"]),
        ("/file", "raw", 2, &["not of a web server"]),
        ("/rubbish", "raw", 69, &["is it up"]),
        ("/bad.gz", "raw", 70, &["cannot be unpacked"]),
        ("/good", "qcow2", 2, &["not imported as qcow2", "--format raw"]),
        ("/backed", "qcow2", 2, &["backing file"]),
    ] {
        let url = server.url(path);
        let words: Vec<_> = words.iter().copied().chain([url.as_str()]).collect();
        refused(&host, &["image", "import", "x", &url, "--format", format], code, &words);
        assert_nothing_made(&host, "x");
    }
    let (url, wrong) = (server.url("/good"), "0".repeat(64));
    let import = |digest: &str| {
        ["image", "import", "x", &url, "--format", "raw", "--sha256", digest].map(str::to_owned)
    };
    let arguments = import(&wrong);
    refused(&host, &arguments.each_ref().map(String::as_str), 70, &[&of_good, &wrong, &url]);
    assert_nothing_made(&host, "x");
    host.ok(&import(&of_good.to_uppercase()).each_ref().map(String::as_str));
    host.ok(&["image", "verify", "x"]);
    // Nobody listens.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let host = host_with(&[&format!("http://127.0.0.1:{closed},local"), "http://no-such-host.invalid"]);
    let import = |url: &str, words: &[&str]| {
        refused(&host, &["image", "import", "x", url, "--format", "raw"], 69, words)
    };
    import(&format!("http://127.0.0.1:{closed}/x"), &["is it up"]);
    import("http://no-such-host.invalid/x", &["no-such-host.invalid cannot be looked up"]);
}

#[test]
fn only_hosts_that_the_administrator_names_are_asked() {
    let other = Replies::new(|_, to| answer(to, "200 OK", "", &[7; 4096]));
    let port = other.port;
    let server = Replies::new(move |asked, to| {
        let to_other = format!("Location: http://127.0.0.1:{port}/x?token=s3cret\r\n");
        let to_name = format!("Location: http://localhost:{port}/x\r\n");
        match asked.path.as_str() {
            "/good" => answer(to, "200 OK", "", &[7; 4096]),
            "/other" => answer(to, "302 Found", &to_other, b""),
            "/name" => answer(to, "307 Temporary Redirect", &to_name, b""),
            "/inside" => {
                answer(to, "302 Found", "Location: http://169.254.169.254/latest/meta-data/\r\n", b"")
            }
            "/user" => answer(to, "302 Found", "Location: http://a:s3cret@127.0.0.1/x\r\n", b""),
            "/same" => answer(to, "302 Found", "Location: good\r\n", b""),
            _ => answer(to, "404 Not Found", "", b""),
        }
    });
    let import = |host: &World, url: &str, code, words: &[&str]| {
        let arguments = ["image", "import", "x", url, "--format", "raw"];
        refused(host, &arguments, code, words);
        let (_, _, said) = host.spillway(&arguments);
        assert!(!said.contains("s3cret"), "{said}");
        assert_nothing_made(host, "x");
    };
    let here = server.port;
    let none = host_with(&[]);
    import(&none, &server.url("/good"), 77, &["--import-from http://127.0.0.1:", "spillwayd"]);
    import(&none, "https://example.org/x?token=s3cret", 77, &["--import-from example.org"]);
    import(&none, "oci://quay.io/containerdisks/debian", 77, &["--import-from quay.io"]);
    import(&none, "https://a:s3cret@example.org/x", 2, &["no user and password"]);
    import(&none, "ftp://example.org/x", 2, &["https://HOST/PATH"]);
    // A public host by its rule; what its name or its address means here is looked at before anything is sent.
    let any = host_with(&["*", &format!("http://localhost:{here}"), &format!("http://127.0.0.1:{here}")]);
    import(&any, &server.url("/good"), 77, &["address 127.0.0.1", ",local"]);
    import(
        &any,
        &format!("http://localhost:{here}/good"),
        77,
        &["is one of this host", "http://localhost:", ",local"],
    );
    for host in [
        "localhost",
        "127.0.0.1",
        "127.1",
        "2130706433",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "169.254.169.254",
        "0.0.0.0",
    ] {
        import(&any, &format!("https://{host}:{here}/x"), 77, &["its address"]);
    }
    assert_eq!(server.asked(), []);
    let local = host_with(&[
        &format!("http://127.0.0.1:{here},local"),
        &format!("http://localhost:{here},local"),
        &format!("http://localhost:{port}"),
        "http://169.254.169.254",
    ]);
    import(
        &local,
        &server.url("/other"),
        77,
        &["leads to http://127.0.0.1:", "--import-from http://127.0.0.1:"],
    );
    import(&local, &server.url("/name"), 77, &["leads to http://localhost:", "is one of this host"]);
    import(&local, &server.url("/inside"), 77, &["169.254.169.254", "for this host alone"]);
    import(&local, &server.url("/user"), 2, &["a user or a password"]);
    assert_eq!(other.asked(), []);
    local.ok(&["image", "import", "x", &server.url("/same"), "--format", "raw"]);
    local.ok(&["image", "import", "x", &format!("http://localhost:{here}/good"), "--format", "raw"]);
}

#[test]
fn what_follows_a_question_mark_is_kept_nowhere() {
    const SECRET: &str = "signature-of-the-test";
    let server = Replies::new(|asked, to| match asked.path.as_str() {
        "/good?s=signature-of-the-test" => answer(to, "200 OK", "", &[7; 4096]),
        _ => answer(to, "404 Not Found", "", b""),
    });
    let host = host_with(&[&format!("http://127.0.0.1:{},local", server.port)]);
    host.ok(&[
        "image",
        "import",
        "x",
        &server.url(&format!("/good?s={SECRET}")),
        "--format",
        "raw",
        "--key",
        "k",
    ]);
    let with_user = format!("http://me:{SECRET}@127.0.0.1/x");
    for (url, expected) in [(server.url(&format!("/bad?s={SECRET}")), 66), (with_user, 2)] {
        let (code, _, said) = host.spillway(&["image", "import", "y", &url, "--format", "raw"]);
        assert!(code == expected && !said.contains(SECRET), "{code} {said}");
    }
    let shown = [
        host.ok(&["image", "show", "x", "--json"]),
        host.ok(&["operation", "list", "--json"]),
        host.ok(&["event", "--json"]),
        fs::read_to_string(host.path("state/audit.log")).unwrap(),
    ];
    assert!(shown[0].contains("/good\"") && shown.iter().all(|text| !text.contains(SECRET)), "{shown:?}");
    for file in files(&host.path("state")) {
        let bytes = fs::read(&file).unwrap();
        assert!(!bytes.windows(SECRET.len()).any(|part| part == SECRET.as_bytes()), "{}", file.display());
    }
}

/// A server that sends a part and goes on when it is told to.
fn halting() -> (Replies, Arc<(Mutex<bool>, Condvar)>) {
    let goes_on = Arc::new((Mutex::new(false), Condvar::new()));
    let waits = Arc::clone(&goes_on);
    let server = Replies::new(move |_, to| {
        write!(to, "HTTP/1.1 200 OK\r\nContent-Length: 8388608\r\n\r\n")?;
        to.write_all(&[7; 4 << 20])?;
        drop(waits.1.wait_while(waits.0.lock().unwrap(), |goes_on| !*goes_on).unwrap());
        to.write_all(&[7; 4 << 20])
    });
    (server, goes_on)
}

#[test]
fn a_download_is_cancelled_and_does_not_outlive_its_daemon() {
    let (server, goes_on) = halting();
    let mut host = host_with(&[&format!("http://127.0.0.1:{},local", server.port)]);
    let begin = |host: &World| {
        host.ok(&["image", "import", "x", &server.url("/disk"), "--format", "raw", "--no-wait"]);
        let download = |host: &World| {
            let all = files(&host.path("state/store/images/x"));
            all.iter().any(|path| {
                path.ends_with("download") && fs::metadata(path).is_ok_and(|found| found.len() > 1 << 20)
            })
        };
        until("a part of it comes", || download(host));
    };
    begin(&host);
    let operations = host.json(&["operation", "list"]);
    let id = operations["items"][0]["id"].to_string();
    assert_eq!(host.json(&["image", "show", "x"])["versions"][0]["state"], "importing");
    host.ok(&["operation", "cancel", &id]);
    until("nothing is left", || files(&host.path("state/store/images/x")).is_empty());
    until("it has ended", || {
        let operations = host.json(&["operation", "list"]).to_string();
        operations.contains("it was cancelled") && !operations.contains("running")
    });
    assert_nothing_made(&host, "x");
    begin(&host);
    host.kill();
    host.start();
    assert_nothing_made(&host, "x");
    assert_eq!(files(&host.path("state/store/images/x")), Vec::<std::path::PathBuf>::new());
    *goes_on.0.lock().unwrap() = true;
    goes_on.1.notify_all();
    host.ok(&["image", "import", "x", &server.url("/disk"), "--format", "raw"]);
}

#[test]
fn a_store_is_not_filled() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let (image, mounted) = (dir.path().join("image"), dir.path().join("store"));
    fs::create_dir(&mounted).unwrap();
    File::create(&image).unwrap().set_len(128 << 20).unwrap();
    ran(Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(&image));
    if !Command::new("mount").args(["-o", "loop"]).args([&image, &mounted]).status().unwrap().success() {
        return spillway_testkit::skip("mounting an image is not allowed here");
    }
    struct Mounted<'a>(&'a Path);
    impl Drop for Mounted<'_> {
        fn drop(&mut self) {
            let _ = Command::new("umount").args(["-l"]).arg(self.0).status();
        }
    }
    let _mounted = Mounted(&mounted);
    let _ = fs::remove_dir(mounted.join("lost+found"));
    let server = Replies::new(|_, to| {
        write!(to, "HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n")?;
        (0..1024).try_for_each(|_| to.write_all(&[7; 1 << 20]))
    });
    let host = host_with(&[&format!("http://127.0.0.1:{},local", server.port)]);
    host.ok(&["store", "add", "small", &mounted.display().to_string(), "--class", "shared"]);
    let arguments = ["image", "import", "x", &server.url("/disk"), "--format", "raw", "--store", "small"];
    refused(&host, &arguments, 73, &["all but full", "make space"]);
    assert_eq!(files(&mounted.join("images")), Vec::<std::path::PathBuf>::new());
    assert_nothing_made(&host, "x");
}

/// The program itself, with a certificate that only the test trusts.
#[test]
fn over_tls_the_certificate_is_checked_and_a_redirect_does_not_leave_it() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let [certificate, key, to] = ["cert.pem", "key.pem", "to"].map(|name| dir.path().join(name));
    certificate::make("localhost", false, &certificate, &key).unwrap();
    let head = |status: &str, header: &str| format!("HTTP/1.0 {status}\r\n{header}\r\n\r\n").into_bytes();
    let disk = [head("200 OK", "Content-Length: 70000"), vec![7; 70_000]].concat();
    fs::write(dir.path().join("disk.raw"), disk).unwrap();
    fs::write(dir.path().join("down"), head("302 Found", "Location: http://localhost/x")).unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    // Its files are whole answers.
    let mut openssl = Command::new("openssl");
    openssl.args([
        "s_server",
        "-HTTP",
        "-accept",
        &format!("127.0.0.1:{port}"),
        "-cert",
        "cert.pem",
        "-key",
        "key.pem",
    ]);
    openssl.current_dir(dir.path()).stdin(Stdio::null());
    let _server = start(&mut openssl, |line| line.contains("ACCEPT").then(String::new));
    // Beside it the system's are trusted, of which none has signed it.
    let [other, of_other] = ["other.pem", "other-key.pem"].map(|name| dir.path().join(name));
    certificate::make("localhost", false, &other, &of_other).unwrap();
    let download = |path: &str, trusted: &Path| {
        File::create(&to).unwrap();
        let order = serde_json::json!({ "download": {
            "url": format!("https://localhost:{port}{path}"), "to": to, "sha256": null,
            "rules": [format!("localhost:{port},local"), "http://localhost,local"], "most_bytes": 1 << 20,
        }});
        let program = spillway_testkit::disk::program().unwrap().with_file_name("spillway-streamd");
        let mut job = Command::new(program);
        job.arg("job").env("SSL_CERT_FILE", trusted);
        job.env_remove("SSL_CERT_DIR").stdin(Stdio::piped());
        let mut child = job.stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(order.to_string().as_bytes()).unwrap();
        let mut said = String::new();
        child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        (child.wait().unwrap().success(), said)
    };
    let results = [("/disk.raw", &certificate), ("/down", &certificate), ("/disk.raw", &other)];
    let results = results.map(|(path, trusted)| download(path, trusted));
    let [(is_done, said), down, unknown] = results;
    assert!(is_done && said.contains("downloaded"), "{said}");
    assert!(!down.0 && down.1.contains("has no TLS") && down.1.contains("forbidden"), "{}", down.1);
    assert!(!unknown.0 && unknown.1.contains("certificate"), "{}", unknown.1);
}

#[test]
fn the_rules_are_checked_when_the_daemon_starts() {
    let daemon = spillway_testkit::disk::daemon_program().unwrap();
    for rule in ["ftp://host", "host/path", "*.example.org", "host,remote"] {
        let (code, _, said) = finishes(Command::new(&daemon).args(["--import-from", rule]));
        assert!(code == 2 && said.contains("--import-from"), "{code} {said}");
    }
}
