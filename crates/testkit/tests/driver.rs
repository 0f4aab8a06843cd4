//! The driver against a vhost-user-blk server that is not ours, so that a fault found with it lies in the disk.

#![allow(clippy::unwrap_used, reason = "a test ends where a step fails")]

use spillway_testkit::{Driver, End, Load, Oracle, Server, Shape, has_program, skip};
use std::path::{Path, PathBuf};
use std::time::Duration;

const DISK_BYTES: u64 = 64 << 20;

struct Peer {
    _server: Server,
    socket: PathBuf,
    image: PathBuf,
    _dir: tempfile::TempDir,
}

fn peer() -> Option<Peer> {
    if !has_program("qemu-storage-daemon") {
        skip("driver: qemu-storage-daemon is not installed");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk.raw");
    std::fs::File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
    let socket = dir.path().join("vhost.sock");
    let arguments = [
        "--blockdev".into(),
        format!("driver=file,node-name=f,filename={},discard=unmap", image.display()),
        "--blockdev".into(),
        "driver=raw,node-name=d,file=f,discard=unmap".into(),
        "--export".into(),
        format!(
            "type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={},writable=on",
            socket.display()
        ),
    ];
    let mut server =
        Server::start("peer", "qemu-storage-daemon", &arguments, None, &dir.path().join("log")).unwrap();
    server.wait_for(&socket, Duration::from_secs(20)).unwrap();
    Some(Peer { _server: server, socket, image, _dir: dir })
}

fn shape(depth: usize) -> Shape {
    Shape { depth, request_bytes: 64 << 10, ..Shape::default() }
}

fn file_at(path: &Path, offset: u64, len: usize) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let mut content = vec![0; len];
    std::fs::File::open(path).unwrap().read_exact_at(&mut content, offset).unwrap();
    content
}

#[test]
fn single_requests_reach_the_image() {
    let Some(peer) = peer() else { return };
    let mut driver = Driver::connect_with(&peer.socket, shape(4)).unwrap();
    assert_eq!(driver.capacity_bytes(), DISK_BYTES);
    let content: Vec<u8> = (0..200 << 10).map(|i| (i % 251) as u8).collect();
    driver.write_at(512, &content).unwrap();
    driver.flush().unwrap();
    assert_eq!(file_at(&peer.image, 512, content.len()), content);
    let mut back = vec![0; content.len()];
    driver.read_at(512, &mut back).unwrap();
    assert_eq!(back, content);
    driver.write_zeroes(1024, 4096, true).unwrap();
    driver.discard(8192, 8192).unwrap();
    driver.read_at(1024, &mut back[..4096]).unwrap();
    assert!(back[..4096].iter().all(|&b| b == 0));
}

#[test]
fn a_request_that_the_disk_refuses_is_an_error_and_the_connection_goes_on() {
    let Some(peer) = peer() else { return };
    let mut driver = Driver::connect_with(&peer.socket, shape(4)).unwrap();
    let error = driver.write_at(DISK_BYTES, &[1; 512]).unwrap_err();
    let source = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
    assert_eq!(source, Some(5), "{error:#}");
    driver.write_at(0, &[1; 512]).unwrap();
}

#[test]
fn a_checked_load_passes_and_finds_a_byte_that_was_changed_behind_its_back() {
    let Some(peer) = peer() else { return };
    let mut driver = Driver::connect_with(&peer.socket, shape(32)).unwrap();
    let mut oracle = Oracle::new(DISK_BYTES, 11);
    let load = Load {
        request_bytes: 1536,
        discard_share: 0.0,
        span_bytes: 4 << 20,
        end: End::Count(20_000),
        ..Load::seed_004(32, End::Count(0))
    };
    let measured = driver.run_checked(&load, &mut oracle).unwrap();
    assert_eq!(measured.requests, 20_000);
    assert!(measured.p50_ns > 0 && measured.p50_ns <= measured.p99_ns && measured.p99_ns <= measured.max_ns);
    let mut content = vec![0; 64 << 10];
    for (offset, len) in oracle.pieces(64 << 10) {
        driver.read_at(offset, &mut content[..len]).unwrap();
        oracle.check(offset, &content[..len]).unwrap();
    }
    let mut byte = file_at(&peer.image, 1 << 20, 1);
    byte[0] ^= 1;
    {
        use std::os::unix::fs::FileExt;
        std::fs::OpenOptions::new()
            .write(true)
            .open(&peer.image)
            .unwrap()
            .write_all_at(&byte, 1 << 20)
            .unwrap();
    }
    driver.read_at(1 << 20, &mut content[..4096]).unwrap();
    let error = oracle.check(1 << 20, &content[..4096]).unwrap_err().to_string();
    assert!(error.contains("sector 2048 is wrong"), "{error}");
}

#[test]
fn a_timed_load_ends_in_time_and_counts_what_completed() {
    let Some(peer) = peer() else { return };
    let mut driver = Driver::connect_with(&peer.socket, shape(16)).unwrap();
    let load = Load { span_bytes: 16 << 20, ..Load::seed_004(16, End::After(Duration::from_millis(300))) };
    let begin = std::time::Instant::now();
    let measured = driver.run(&load).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert!(measured.requests > 100, "{measured:?}");
    assert!((measured.iops - measured.requests as f64 / 0.3).abs() < 1.0);
    let reads = measured.reads as f64 / measured.requests as f64;
    assert!((reads - 0.2).abs() < 0.1, "{reads}");
}
