//! Images through the daemon's socket, made with the real qemu-img.
#![allow(clippy::unwrap_used)]

mod common;

use common::{World, ends, refused, run};
use rustix::process::Signal;
use spillway_api::{
    Empty, ErrorCode, Image, ImageDetails, ImageImport, List, Operation, SourceFormat, StoreClass,
    StoreFolder, VersionChoice, VersionState,
};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// A disk of 8 MiB with something in it, in a format.
fn disk(world: &World, name: &str, format: SourceFormat) -> String {
    let path = world.path(name).display().to_string();
    run("qemu-img", &["create", "-q", "-f", format.as_str(), &path, "8M"]);
    run("qemu-io", &["-f", format.as_str(), "-c", "write -P 7 1M 64k", "-c", "write -P 9 7M 4k", &path]);
    path
}

fn import(world: &World, image: &str, path: &str, format: SourceFormat) -> Operation {
    let import = ImageImport { path: path.into(), format, store: None };
    world.client().post(&format!("/v1/images/{image}/versions"), &import).unwrap()
}

fn details(world: &World, image: &str) -> ImageDetails {
    world.client().get(&format!("/v1/images/{image}")).unwrap()
}

fn put(world: &World, path: &str, version: u32) -> Image {
    world.client().put(path, &VersionChoice { version }).unwrap()
}

#[test]
fn every_format_becomes_the_same_disk() {
    use SourceFormat::*;
    let world = World::new();
    for (n, format) in [Raw, Qcow2, Vmdk, Vhdx].into_iter().enumerate() {
        let path = disk(&world, &format!("disk{n}"), format);
        let begun = import(&world, "debian", &path, format);
        ends(&world.client(), &begun).unwrap();
        let details = details(&world, "debian");
        let version = &details.versions[n];
        assert_eq!((version.version, version.state), (n as u32 + 1, VersionState::Ready));
        assert_eq!(version.digest, details.versions[0].digest, "the same content");
        assert!(version.stored_bytes < MIB, "holes are kept: {}", version.stored_bytes);
        let stored = world.state().join(format!("store/images/debian/{}/disk.raw", n + 1));
        assert_eq!(std::fs::metadata(&stored).unwrap().permissions().mode() & 0o777, 0o444);
        let stored = stored.display().to_string();
        run("qemu-img", &["compare", "-f", format.as_str(), "-F", "raw", &path, &stored]);
    }
    let images: List<Image> = world.client().get("/v1/images").unwrap();
    assert_eq!((images.items.len(), images.items[0].published), (1, Some(1)), "the first publishes itself");
}

#[test]
fn versions_are_published_tagged_and_deleted() {
    let world = World::new();
    let client = world.client();
    let path = disk(&world, "disk", SourceFormat::Raw);
    for _ in 0..3 {
        ends(&client, &import(&world, "debian", &path, SourceFormat::Raw)).unwrap();
    }
    assert_eq!(put(&world, "/v1/images/debian/published", 2).published, Some(2));
    put(&world, "/v1/images/debian/tags/stable", 3);
    let error = refused(client.delete::<Empty>("/v1/images/debian/versions/2"));
    assert!(error.code == ErrorCode::InUse && error.detail.contains("published"), "{error:?}");
    let error = refused(client.delete::<Empty>("/v1/images/debian/versions/3"));
    assert!(error.code == ErrorCode::InUse && error.detail.contains("stable"), "{error:?}");
    client.delete::<Empty>("/v1/images/debian/versions/1").unwrap();
    client.delete::<Image>("/v1/images/debian/tags/stable").unwrap();
    client.delete::<Empty>("/v1/images/debian/versions/3").unwrap();
    // A number is never given twice, not after a failure either.
    ends(&client, &import(&world, "debian", &path, SourceFormat::Raw)).unwrap();
    let numbers: Vec<_> = details(&world, "debian").versions.iter().map(|v| v.version).collect();
    assert_eq!(numbers, [2, 4]);
    let error = refused(client.get::<ImageDetails>("/v1/images/debain"));
    assert_eq!((error.code, error.detail.contains("'debian'")), (ErrorCode::NotFound, true), "{error:?}");
    let error = refused(client.put::<_, Image>("/v1/images/debian/published", &VersionChoice { version: 9 }));
    assert!(error.code == ErrorCode::NotFound && error.detail.contains("2, 4"), "{error:?}");
    client.delete::<Empty>("/v1/images/debian").unwrap();
    assert_eq!(client.get::<List<Image>>("/v1/images").unwrap().items, []);
    assert_eq!(world.below(&world.state().join("store/images")), ["debian"]);
    ends(&client, &import(&world, "debian", &path, SourceFormat::Raw)).unwrap();
    assert_eq!(
        (details(&world, "debian").versions[0].version, details(&world, "debian").image.published),
        (5, Some(5))
    );
    client.delete::<Empty>("/v1/images/debian/versions/5").unwrap();
    assert_eq!(refused(client.get::<ImageDetails>("/v1/images/debian")).code, ErrorCode::NotFound);
}

/// Whatever comes first: what is published is there, and what is there is published.
#[test]
fn imports_and_deletes_at_once_leave_a_whole_image() {
    let world = World::new();
    let client = world.client();
    let path = disk(&world, "disk", SourceFormat::Raw);
    ends(&client, &import(&world, "debian", &path, SourceFormat::Raw)).unwrap();
    for round in 0..8 {
        let only = details(&world, "debian").versions[0].version;
        let begun = std::thread::scope(|scope| {
            let importing =
                [(); 2].map(|()| scope.spawn(|| import(&world, "debian", &path, SourceFormat::Raw)));
            let deleting = [(); 2].map(|()| {
                scope.spawn(|| {
                    let one = format!("/v1/images/debian/versions/{only}");
                    let path = if round % 2 == 0 { "/v1/images/debian" } else { &one };
                    world.client().delete::<Empty>(path).map_err(|e| e.to_string())
                })
            });
            deleting.into_iter().for_each(|thread| _ = thread.join().unwrap());
            importing.map(|thread| thread.join().unwrap())
        });
        for begun in &begun {
            ends(&client, begun).unwrap();
        }
        let ImageDetails { image, versions, .. } = details(&world, "debian");
        assert!(versions.iter().all(|v| v.state == VersionState::Ready), "{versions:?}");
        assert!(versions.iter().any(|v| Some(v.version) == image.published), "{image:?} {versions:?}");
        let numbers: Vec<String> = versions.iter().map(|v| v.version.to_string()).collect();
        let mut found: Vec<String> = world.below(&world.state().join("store/images/debian"));
        found.retain(|name| !name.contains('/'));
        found.sort_by_key(|name| name.parse::<u32>().unwrap());
        assert_eq!(found, numbers);
        client.delete::<Empty>("/v1/images/debian").unwrap();
        ends(&client, &import(&world, "debian", &path, SourceFormat::Raw)).unwrap();
    }
}

#[test]
fn what_is_damaged_is_found() {
    let world = World::new();
    let client = world.client();
    let path = disk(&world, "disk", SourceFormat::Raw);
    ends(&client, &import(&world, "debian", &path, SourceFormat::Raw)).unwrap();
    let verify = || client.post::<_, Operation>("/v1/images/debian/versions/1/verify", &()).unwrap();
    ends(&client, &verify()).unwrap();
    let stored = world.state().join("store/images/debian/1/disk.raw");
    std::fs::set_permissions(&stored, PermissionsExt::from_mode(0o644)).unwrap();
    let file = std::fs::File::options().write(true).open(&stored).unwrap();
    file.write_all_at(b"x", 7 * MIB + 5).unwrap();
    let error = ends(&client, &verify()).unwrap_err();
    assert!(error.detail.contains(&format!("byte {}", 7 * MIB)), "{error:?}");
    file.write_all_at(&[9], 7 * MIB + 5).unwrap();
    ends(&client, &verify()).unwrap();
    let list = stored.with_file_name("digests");
    std::fs::set_permissions(&list, PermissionsExt::from_mode(0o644)).unwrap();
    let digests = std::fs::read(&list).unwrap();
    std::fs::write(&list, &digests[..digests.len() - 1]).unwrap();
    assert!(ends(&client, &verify()).unwrap_err().detail.contains("cut off"));
    let mut other = digests.clone();
    other[9] ^= 1;
    std::fs::write(&list, &other).unwrap();
    let error = ends(&client, &verify()).unwrap_err();
    assert!(error.code == ErrorCode::Damaged && error.detail.contains("byte 0:"), "{error:?}");
    std::fs::write(&list, &digests).unwrap();
    for size in [0, 4 * MIB, 9 * MIB] {
        file.set_len(size).unwrap();
        let error = ends(&client, &verify()).unwrap_err();
        assert_eq!(error.code, ErrorCode::Damaged, "{size}: {error:?}");
    }
}

#[test]
fn hostile_files_are_refused() {
    use SourceFormat::*;
    let world = World::new();
    let client = world.client();
    let text = |path: &Path| path.display().to_string();
    let base = disk(&world, "base", Raw);
    let [backed, external, flat] = ["backed", "external", "flat.vmdk"].map(|name| text(&world.path(name)));
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &backed]);
    let data = format!("data_file={}", text(&world.path("data")));
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &data, &external, "1M"]);
    run("qemu-img", &["create", "-q", "-f", "vmdk", "-o", "subformat=monolithicFlat", &flat, "1M"]);
    std::fs::write(world.path("none"), b"QFI\xfb").unwrap();
    let [raw, pipe] = ["none", "pipe"].map(|name| text(&world.path(name)));
    run("mkfifo", &[&pipe]);
    for (path, format, why) in [
        (&backed, Qcow2, "backing file"),
        (&external, Qcow2, "another file"),
        (&flat, Vmdk, "flat-flat.vmdk"),
        (&pipe, Raw, "not a regular file"),
        (&raw, Qcow2, "ends inside its qcow2 header"),
        (&base, Qcow2, "does not begin like a qcow2 image"),
        (&base, Vmdk, "say --format raw"),
        (&backed, Vhdx, "say --format qcow2"),
        (&"/nonexistent".to_string(), Raw, "must be able to read it"),
        (&"base".to_string(), Raw, "absolute"),
        (&"/dev".to_string(), Raw, "not a regular file"),
        (&"nbd://localhost/".to_string(), Raw, "absolute"),
    ] {
        let import = ImageImport { path: path.clone(), format, store: None };
        let error = refused(client.post::<_, Operation>("/v1/images/evil/versions", &import));
        assert!(error.code == ErrorCode::Invalid && error.detail.contains(why), "{path}: {error:?}");
    }
    assert_eq!(client.get::<List<Image>>("/v1/images").unwrap().items, []);
    assert_eq!(world.below(&world.state().join("store/images")), [""; 0]);
    // What looks like another format is taken as it was said to be.
    let begun = import(&world, "plain", &backed, Raw);
    ends(&client, &begun).unwrap();
}

#[test]
fn a_full_store_leaves_nothing() {
    let mut world = World::new();
    world.client().get::<List<Image>>("/v1/images").unwrap();
    world.end(Signal::TERM);
    std::fs::create_dir_all(world.path("small")).unwrap();
    let Some(_mounted) = common::Mounted::tmpfs(&world.path("small"), "4M") else { return };
    world.start();
    let client = world.client();
    let store = StoreFolder {
        name: "small".parse().unwrap(),
        path: world.path("small/store"),
        class: StoreClass::Shared,
    };
    client.post::<_, StoreFolder>("/v1/stores", &store).unwrap();
    let path = world.path("large").display().to_string();
    std::fs::write(&path, vec![7; 8 << 20]).unwrap();
    let error = ends(&client, &import(&world, "large", &path, SourceFormat::Raw)).unwrap_err();
    assert!(error.code == ErrorCode::Exhausted && error.detail.contains("make space"), "{error:?}");
    assert_eq!(world.below(&world.path("small/store/images")), ["large"]);
    assert_eq!(client.get::<List<Image>>("/v1/images").unwrap().items, []);
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    ends(&client, &import(&world, "large", &path, SourceFormat::Raw)).unwrap();
}

#[test]
fn a_daemon_that_dies_in_the_middle_leaves_nothing() {
    let mut world = World::new();
    let path = world.path("large");
    let file = std::fs::File::create(&path).unwrap();
    for at in 0..256 {
        file.write_all_at(&vec![at as u8 | 1; MIB as usize], at * MIB).unwrap();
    }
    for delay_ms in [0, 20, 60, 120, 250] {
        let begun = import(&world, "large", path.to_str().unwrap(), SourceFormat::Raw);
        assert!(begun.id > 0);
        std::thread::sleep(Duration::from_millis(delay_ms));
        world.end(Signal::KILL);
        world.start();
        // It is killed with its daemon; to end may take it a moment.
        let gone = || (!runs_qemu_img(&path)).then_some(());
        spillway_testkit::process::wait_until(Duration::from_secs(30), gone).expect("it outlives its daemon");
        let images: List<Image> = world.client().get("/v1/images").unwrap();
        if images.items.is_empty() {
            assert_eq!(world.below(&world.state().join("store/images")), [""; 0], "after {delay_ms} ms");
        } else {
            let details = details(&world, "large");
            assert_eq!(details.versions[0].state, VersionState::Ready);
            world.client().delete::<Empty>("/v1/images/large").unwrap();
        }
    }
    let begun = import(&world, "large", path.to_str().unwrap(), SourceFormat::Raw);
    world.client().delete::<Empty>(&format!("/v1/operations/{}", begun.id)).unwrap();
    let error = ends(&world.client(), &begun).unwrap_err();
    assert_eq!(error.code, ErrorCode::Cancelled, "{error:?}");
    assert_eq!(world.below(&world.state().join("store/images")), ["large"]);
    // It ends at once, whatever goes on.
    import(&world, "large", path.to_str().unwrap(), SourceFormat::Raw);
    let begun = std::time::Instant::now();
    assert_eq!(world.end(Signal::TERM), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(5) && !world.socket().exists());
    world.start();
    assert_eq!(world.below(&world.state().join("store/images")), [""; 0]);
    // Killed while it deletes, it goes on with that.
    for delay_us in [0, 300, 1000, 3000] {
        ends(&world.client(), &import(&world, "large", path.to_str().unwrap(), SourceFormat::Raw)).unwrap();
        let client = world.client();
        let deleting = std::thread::spawn(move || client.delete::<Empty>("/v1/images/large").is_ok());
        std::thread::sleep(Duration::from_micros(delay_us));
        world.end(Signal::KILL);
        let was_answered = deleting.join().unwrap();
        world.start();
        let images: List<Image> = world.client().get("/v1/images").unwrap();
        assert!(!was_answered || images.items.is_empty());
        match images.items.is_empty() {
            true => assert_eq!(world.below(&world.state().join("store/images")), [""; 0]),
            false => world.client().delete::<Empty>("/v1/images/large").map(drop).unwrap(),
        }
    }
}

/// A process of that name that has the file open.
fn runs_qemu_img(path: &Path) -> bool {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    all.filter(|entry| {
        std::fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name == "qemu-img\n")
    })
    .filter_map(|entry| std::fs::read_dir(entry.path().join("fd")).ok())
    .flat_map(|fds| fds.flatten())
    .any(|fd| std::fs::read_link(fd.path()).is_ok_and(|at| at == path))
}

/// A file that becomes another between the look and the conversion is converted as the one that was looked at, and
/// what it names by then is not opened.
#[test]
fn a_file_that_changes_meanwhile_opens_no_other() {
    let world = World::new();
    let client = world.client();
    let secret = world.path("secret").display().to_string();
    std::fs::write(&secret, vec![b'S'; MIB as usize]).unwrap();
    let [good, evil] = ["good", "evil"].map(|name| world.path(name).display().to_string());
    run("qemu-img", &["create", "-q", "-f", "qcow2", &good, "1M"]);
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &secret, "-F", "raw", &evil]);
    let (good_bytes, evil_bytes) = (std::fs::read(&good).unwrap(), std::fs::read(&evil).unwrap());
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // In place, and by another name.
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                for bytes in [&evil_bytes, &good_bytes] {
                    std::fs::write(&good, bytes).unwrap();
                    std::fs::write(world.path("new"), bytes).unwrap();
                    std::fs::rename(world.path("new"), world.path("other")).unwrap();
                }
            }
        });
        let mut done = 0;
        for n in 0..24 {
            let path = if n % 2 == 0 { good.clone() } else { world.path("other").display().to_string() };
            let import = ImageImport { path, format: SourceFormat::Qcow2, store: None };
            let begun = client.post::<_, Operation>("/v1/images/odd/versions", &import);
            done += u32::from(begun.is_ok_and(|begun| ends(&client, &begun).is_ok()));
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        println!("{done} of 24 were imported");
        assert!(done > 0, "nothing was tried");
    });
    let images = world.state().join("store/images");
    for name in world.below(&images).iter().filter(|name| name.ends_with("disk.raw")) {
        let content = std::fs::read(images.join(name)).unwrap();
        assert!(content.iter().all(|&byte| byte == 0), "{name} has the secret");
    }
}

/// Programs that a test feeds line by line.
struct Writer(std::process::Child);

impl Writer {
    /// `qemu-io` that has an image open for writing, and has written to it.
    fn open(path: &str, format: SourceFormat) -> Writer {
        let mut child = std::process::Command::new("qemu-io")
            .args(["-f", format.as_str(), path])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"write -P 3 0 4k\n").unwrap();
        let mut stdout = String::new();
        let mut out = std::io::BufReader::new(child.stdout.as_mut().unwrap());
        while !stdout.contains("wrote") {
            assert!(std::io::BufRead::read_line(&mut out, &mut stdout).unwrap() > 0, "{stdout}");
        }
        Writer(child)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// The rule by which a base image is served: who writes to it keeps others out, and is kept out.
#[test]
fn an_image_that_is_written_to_is_not_imported() {
    use SourceFormat::*;
    let world = World::new();
    let client = world.client();
    for format in [Raw, Qcow2] {
        let path = disk(&world, &format!("used-{}", format.as_str()), format);
        let writer = Writer::open(&path, format);
        let import_it = ImageImport { path: path.clone(), format, store: None };
        let error = refused(client.post::<_, Operation>("/v1/images/torn/versions", &import_it));
        assert!(error.code == ErrorCode::InUse && error.detail.contains("open for writing"), "{error:?}");
        drop(writer);
        ends(&client, &import(&world, "torn", &path, format)).unwrap();
    }
    assert_eq!(details(&world, "torn").versions.len(), 2, "what was refused has left nothing");
    // Who comes while it is imported is kept out, by the same locks.
    let path = world.path("large");
    let file = std::fs::File::create(&path).unwrap();
    for at in 0..192 {
        file.write_all_at(&vec![at as u8 | 1; MIB as usize], at * MIB).unwrap();
    }
    let begun = import(&world, "large", path.to_str().unwrap(), Raw);
    let tried =
        std::process::Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 4k"]).arg(&path).output();
    let stderr = String::from_utf8(tried.unwrap().stderr).unwrap();
    let now: Operation = client.get(&format!("/v1/operations/{}", begun.id)).unwrap();
    assert!(now.state == spillway_api::OperationState::Running, "the import has ended too soon to tell");
    assert!(stderr.contains("Failed to get \"write\" lock"), "{stderr}");
    ends(&client, &begun).unwrap();
    drop(Writer::open(path.to_str().unwrap(), Raw));
}

#[test]
fn a_disk_larger_than_any_is_refused_where_it_is_asked_for() {
    use SourceFormat::*;
    let world = World::new();
    let client = world.client();
    for (format, size) in [(Qcow2, "5T"), (Raw, "4398046511616"), (Vhdx, "5T")] {
        let path = world.path(&format!("big-{}", format.as_str())).display().to_string();
        run("qemu-img", &["create", "-q", "-f", format.as_str(), &path, size]);
        let import = ImageImport { path, format, store: None };
        let error = refused(client.post::<_, Operation>("/v1/images/big/versions", &import));
        let names_limit = error.detail.contains("the largest disk 4.0 TiB");
        assert!(error.code == ErrorCode::Invalid && names_limit, "{format:?}: {error:?}");
    }
    assert_eq!(client.get::<List<Image>>("/v1/images").unwrap().items, []);
    let path = world.path("largest").display().to_string();
    run("qemu-img", &["create", "-q", "-f", "raw", &path, "4T"]);
    let begun = import(&world, "largest", &path, Raw);
    client.delete::<Empty>(&format!("/v1/operations/{}", begun.id)).unwrap();
    let _ = ends(&client, &begun);
}

/// One line, with the path that was given and what to do; nothing of what the daemon calls the file.
#[test]
fn what_qemu_img_refuses_is_said_in_words_for_who_asked() {
    use SourceFormat::*;
    let world = World::new();
    let client = world.client();
    let at = |name: &str| world.path(name).display().to_string();
    run("qemu-img", &["create", "-q", "-f", "raw", &at("plain"), "5M"]);
    for kind in ["monolithicFlat", "twoGbMaxExtentSparse", "streamOptimized"] {
        let option = format!("subformat={kind}");
        let to = at(&format!("{kind}.vmdk"));
        run("qemu-img", &["convert", "-f", "raw", "-O", "vmdk", "-o", &option, &at("plain"), &to]);
    }
    // A log that is not replayed: the write behind it has failed, and nobody closes it.
    run("qemu-img", &["create", "-q", "-f", "vhdx", &at("log"), "64M"]);
    let fail = format!(
        r#"json:{{"driver":"vhdx","file":{{"driver":"blkdebug","image":{{"driver":"file","filename":"{}"}},"inject-error":[{{"event":"none","iotype":"write","sector":4096,"errno":5}}]}}}}"#,
        at("log")
    );
    let _ =
        std::process::Command::new("qemu-io").args(["-c", "write -P 7 0 1M", "-c", "abort", &fail]).output();
    // Marks of qcow2: corrupt, dirty, a feature that nobody knows.
    for (name, bit) in [("corrupt", 2u8), ("dirty", 1), ("unknown", 0x40)] {
        run("qemu-img", &["create", "-q", "-f", "qcow2", &at(name), "8M"]);
        let file = std::fs::File::options().write(true).open(world.path(name)).unwrap();
        file.write_all_at(&[bit], 79).unwrap();
    }
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "compat=0.10", &at("version"), "8M"]);
    std::fs::File::options().write(true).open(world.path("version")).unwrap().write_all_at(&[9], 7).unwrap();
    for (name, whole, bytes) in
        [("short.vmdk", "streamOptimized.vmdk", 40_000), ("short.vhdx", "log", 300_000)]
    {
        let whole = std::fs::read(world.path(whole)).unwrap();
        std::fs::write(world.path(name), &whole[..bytes.min(whole.len() / 2)]).unwrap();
    }
    run("qemu-img", &["create", "-q", "-f", "vpc", &at("broken.vhd"), "8M"]);
    let broken = std::fs::File::options().write(true).open(world.path("broken.vhd")).unwrap();
    broken.write_all_at(&[0xff; 8], 16).unwrap();
    broken.set_len(600).unwrap();
    for (name, format, why) in [
        ("monolithicFlat.vmdk", Vmdk, "whose content is in monolithicFlat-flat.vmdk|make one file"),
        ("twoGbMaxExtentSparse.vmdk", Vmdk, "twoGbMaxExtentSparse-s001.vmdk"),
        ("twoGbMaxExtentSparse-s001.vmdk", Vmdk, "one part of a VMware disk"),
        ("log", Vhdx, "its log has writes|on a copy"),
        ("corrupt", Qcow2, "is marked corrupt|qemu-img check -r all"),
        ("dirty", Qcow2, "was not closed cleanly"),
        ("unknown", Qcow2, "features"),
        ("version", Qcow2, "version"),
        ("short.vmdk", Vmdk, "whole"),
        ("short.vhdx", Vhdx, ""),
        ("broken.vhd", Vpc, ""),
        ("plain", Vpc, "say --format raw"),
    ] {
        let name = world.path(name);
        let import = ImageImport { path: name.display().to_string(), format, store: None };
        let answer = client.post::<_, Operation>("/v1/images/odd/versions", &import);
        // What is damaged behind its header is found when it is read.
        let error = match answer {
            Ok(begun) => ends(&client, &begun).expect_err(&format!("{} was imported", name.display())),
            answer => refused(answer),
        };
        println!("{}", error.detail);
        assert_eq!(error.code, ErrorCode::Invalid, "{error:?}");
        assert!(error.detail.contains(name.to_str().unwrap()), "{error:?}");
        assert!(why.split('|').all(|why| error.detail.contains(why)), "{why}: {error:?}");
        assert!(!error.detail.contains('\n') && !error.detail.contains("/proc/"), "{error:?}");
    }
}

#[test]
fn a_size_that_an_import_changes_is_said() {
    use SourceFormat::*;
    let world = World::new();
    let client = world.client();
    std::fs::write(world.path("odd"), vec![7; MIB as usize + 100]).unwrap();
    run("qemu-img", &["create", "-q", "-f", "vpc", &world.path("vhd").display().to_string(), "8M"]);
    // As VirtualBox writes it: the size is what was asked for, and the cylinders hold less.
    let vhd = std::fs::File::options().read(true).write(true).open(world.path("vhd")).unwrap();
    for at in [0, vhd.metadata().unwrap().len() - 512] {
        let mut footer = [0; 512];
        vhd.read_exact_at(&mut footer, at).unwrap();
        footer[28..32].copy_from_slice(b"vbox");
        footer[48..56].copy_from_slice(&(8 * MIB + 100 * 512).to_be_bytes());
        footer[64..68].fill(0);
        let sum: u32 = footer.iter().map(|byte| u32::from(*byte)).sum();
        footer[64..68].copy_from_slice(&(!sum).to_be_bytes());
        vhd.write_all_at(&footer, at).unwrap();
    }
    disk(&world, "even", Raw);
    for (n, (name, format, note)) in [
        ("odd", Raw, Some("zeroes fill its last sector")),
        ("vhd", Vpc, Some("whole cylinders")),
        ("even", Raw, None),
    ]
    .into_iter()
    .enumerate()
    {
        let path = world.path(name).display().to_string();
        ends(&client, &import(&world, "sizes", &path, format)).unwrap();
        let version = &details(&world, "sizes").versions[n];
        match note {
            Some(note) => assert!(version.notes.len() == 1 && version.notes[0].contains(note), "{version:?}"),
            None => assert_eq!(version.notes, [""; 0]),
        }
        assert!(version.size_bytes.is_multiple_of(512));
    }
}
