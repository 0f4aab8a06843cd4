//! The NBD export against the real tools. A tool that is missing fails its test, unless SPILLWAY_ALLOW_SKIP=1.

#![allow(clippy::unwrap_used)]

mod common;

use common::server::Server;
use common::{DESCRIPTION, NAME, Pace};
use std::process::Command;

const MIB: usize = 1 << 20;

/// Runs a tool to its end and gives back what it printed.
fn run(tool: &str, arguments: &[&str]) -> Option<String> {
    run_in(tool, arguments, std::path::Path::new("/"))
}

fn run_in(tool: &str, arguments: &[&str], directory: &std::path::Path) -> Option<String> {
    let output =
        match Command::new("timeout").arg("60").arg(tool).args(arguments).current_dir(directory).output() {
            Ok(output) if output.status.code() != Some(127) => output,
            result => {
                let why = format!("{tool} is not installed ({result:?})");
                assert!(std::env::var_os("SPILLWAY_ALLOW_SKIP").is_some_and(|value| value == "1"), "{why}");
                println!("SKIP: {why}");
                return None;
            }
        };
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{tool} {arguments:?}: {}\n{out}\n{err}", output.status);
    Some(format!("{out}{err}"))
}

fn quiet(server: Server) {
    let complaints = server.stop();
    assert!(complaints.is_empty(), "{complaints:?}");
}

/// Bytes that differ everywhere.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut rng = common::Rng::new(seed);
    (0..len / 8).flat_map(|_| rng.next().to_le_bytes()).collect()
}

#[test]
fn nbdinfo_shows_the_export() {
    let server = Server::start(64 * MIB, Pace::AtOnce);
    let Some(json) = run("nbdinfo", &["--json", &server.uri()]) else { return };
    for expected in [
        "\"export-size\": 67108864",
        "\"protocol\": \"newstyle-fixed\"",
        "\"structured\": true",
        "\"can_multi_conn\": true",
        "\"can_trim\": true",
        "\"can_fua\": true",
        "\"can_flush\": true",
        "\"can_zero\": true",
        "\"can_fast_zero\": true",
        "\"can_df\": true",
        "\"can_cache\": false",
        "\"is_read_only\": false",
        "\"is_rotational\": false",
        "\"block_size_minimum\": 512",
        "\"block_size_preferred\": 4096",
        "\"block_size_maximum\": 33554432",
        "base:allocation",
    ] {
        assert!(json.contains(expected), "{expected} in\n{json}");
    }
    let list = run("nbdinfo", &["--list", &server.uri()]).unwrap();
    assert!(list.contains(NAME) && list.contains(DESCRIPTION), "{list}");
    let by_name = format!("nbd+unix:///{}?socket={}", NAME.replace(' ', "%20"), server.socket().display());
    assert_eq!(run("nbdinfo", &["--size", &by_name]).unwrap().trim(), "67108864");
    quiet(server);
}

#[test]
fn nbdinfo_maps_what_is_written() {
    let server = Server::start(64 * MIB, Pace::AtOnce);
    server.disk.lock().unwrap().bytes[3 * MIB..5 * MIB].fill(1);
    let Some(map) = run("nbdinfo", &["--map", &server.uri()]) else { return };
    let rows: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().take(3).collect()).collect();
    assert_eq!(
        rows,
        [["0", "3145728", "3"], ["3145728", "2097152", "0"], ["5242880", "61865984", "3"]],
        "{map}"
    );
    quiet(server);
}

#[test]
fn nbdcopy_there_and_back() {
    for pace in [Pace::AtOnce, Pace::Later] {
        let server = Server::start(48 * MIB, pace);
        let (to, back) = (server.directory().join("to"), server.directory().join("back"));
        let mut content = pattern(48 * MIB, 3);
        content[7 * MIB..20 * MIB].fill(0);
        std::fs::write(&to, &content).unwrap();
        server.disk.lock().unwrap().bytes.fill(0xee);
        let (to, back) = (to.to_str().unwrap(), back.to_str().unwrap());
        for options in [
            &["--flush", "--connections=4"][..],
            &["--connections=1", "--requests=128", "--request-size=33554432"],
            &["--synchronous", "--connections=1"],
        ] {
            server.disk.lock().unwrap().bytes.fill(0xee);
            let _ = std::fs::remove_file(back);
            let uri = server.uri();
            if run("nbdcopy", &[options, &[to, &uri]].concat()).is_none() {
                return;
            }
            assert!(server.disk.lock().unwrap().bytes == content, "{pace:?} {options:?}: copied to");
            std::fs::write(back, vec![0; content.len()]).unwrap();
            run("nbdcopy", &[options, &[&uri, back]].concat()).unwrap();
            assert!(std::fs::read(back).unwrap() == content, "{pace:?} {options:?}: copied back");
        }
        quiet(server);
    }
}

#[test]
fn qemu_io_and_qemu_img() {
    for pace in [Pace::AtOnce, Pace::Later] {
        let server = Server::start(64 * MIB, pace);
        let uri = server.uri();
        let commands = [
            "write -P 0x11 0 4096",
            "write -P 0x22 512 512",
            "read -P 0x11 0 512",
            "read -P 0x22 512 512",
            "read -P 0x11 1024 3072",
            "write -f -P 0x33 1M 32M",
            "read -P 0x33 1M 32M",
            "write -z -u 2M 1M",
            "read -P 0 2M 1M",
            "read -P 0x33 3M 30M",
            "discard 4M 4M",
            "read -P 0 4M 4M",
            "write -z 40M 24M",
            "flush",
            "aio_write -P 0x44 50M 1M",
            "aio_write -P 0x55 51M 64k",
            "aio_flush",
            "read -P 0x44 50M 1M",
            "read -P 0x55 51M 64k",
        ];
        let mut arguments = vec!["-f", "raw", "-t", "none"];
        for command in &commands {
            arguments.extend(["-c", command]);
        }
        arguments.push(&uri);
        let Some(printed) = run("qemu-io", &arguments) else { return };
        assert!(!printed.contains("verification failed") && !printed.contains("failed:"), "{printed}");
        let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]).unwrap();
        assert!(map.contains("\"zero\": true") && map.contains("\"zero\": false"), "{map}");
        let image = server.directory().join("image");
        let image = image.to_str().unwrap();
        run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, image]).unwrap();
        assert!(std::fs::read(image).unwrap() == server.disk.lock().unwrap().bytes);
        let compared = run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &uri, image]).unwrap();
        assert!(compared.contains("identical"), "{compared}");
        run("qemu-img", &["bench", "-f", "raw", "-t", "none", "-c", "2000", "-d", "32", "-w", &uri]).unwrap();
        quiet(server);
    }
}

#[test]
fn fio_verifies_its_data() {
    for (pace, size) in [(Pace::AtOnce, "4k"), (Pace::Later, "4k"), (Pace::Later, "512"), (Pace::Later, "2m")]
    {
        let server = Server::start(64 * MIB, pace);
        let uri = format!("--uri={}", server.uri());
        let block = format!("--bs={size}");
        // Blocks of 512 bytes hold the header of the check and hardly more: a part of the disk is enough.
        let amount = if size == "512" { "--size=2m" } else { "--size=32m" };
        let Some(printed) = run_in(
            "fio",
            &[
                "--name=verify",
                "--ioengine=nbd",
                &uri,
                "--rw=randrw",
                &block,
                "--iodepth=16",
                amount,
                "--verify=crc32c",
                "--verify_fatal=1",
                "--output-format=terse",
            ],
            server.directory(),
        ) else {
            return;
        };
        assert!(!printed.contains("verify: bad"), "{printed}");
        quiet(server);
    }
}

/// libnbd's Python module belongs to the system's interpreter.
fn python(server: &Server, script: &str) -> Option<String> {
    let preamble = format!("import nbd\nURI = {:?}\n", server.uri());
    run("/usr/bin/python3", &["-c", &format!("{preamble}{script}")])
}

#[test]
fn libnbd_sees_one_disk_through_many_connections() {
    let server = Server::start(64 * MIB, Pace::Later);
    let script = r#"
hs = []
for i in range(8):
    h = nbd.NBD(); h.connect_uri(URI); hs.append(h)
assert hs[0].can_multi_conn()
for i, h in enumerate(hs):
    h.pwrite(bytes([i + 1]) * 65536, i * 65536, nbd.CMD_FLAG_FUA if i % 2 else 0)
hs[3].flush()
for h in hs:
    for i in range(8):
        assert h.pread(65536, i * 65536) == bytes([i + 1]) * 65536
# Many at once on every connection.
jobs = []
for n in range(400):
    h = hs[n % 8]
    buf = nbd.Buffer.from_bytearray(bytearray([n % 251 + 1]) * 8192)
    jobs.append((h, h.aio_pwrite(buf, 1048576 + n * 8192), buf))
for h, c, _ in jobs:
    while not h.aio_command_completed(c):
        h.poll(-1)
for n in range(400):
    assert hs[(n + 3) % 8].pread(8192, 1048576 + n * 8192) == bytes([n % 251 + 1]) * 8192
for h in hs:
    h.shutdown()
"#;
    if python(&server, script).is_some() {
        quiet(server);
    }
}

#[test]
fn libnbd_trims_zeroes_and_asks_for_block_status() {
    let server = Server::start(64 * MIB, Pace::AtOnce);
    let script = r#"
h = nbd.NBD(); h.add_meta_context("base:allocation"); h.connect_uri(URI)
def status(off, n, flags=0):
    got = []
    def f(context, offset, entries, err):
        assert context == "base:allocation" and offset == off
        got.extend(entries)
    h.block_status(n, off, f, flags)
    return list(zip(got[0::2], got[1::2]))
M = 1 << 20
h.pwrite(b"x" * M, 8 * M)
assert status(7 * M, 4 * M) == [(M, 3), (M, 0), (2 * M, 3)], status(7 * M, 4 * M)
assert status(7 * M, 4 * M, nbd.CMD_FLAG_REQ_ONE) == [(M, 3)]
assert status(8 * M + 512, 512) == [(512, 0)]
h.trim(M // 2, 8 * M, nbd.CMD_FLAG_FUA)
assert status(8 * M, M) == [(M // 2, 3), (M // 2, 0)]
h.zero(M // 2, 8 * M + M // 2, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
assert h.pread(M, 8 * M) == bytes(M)
assert status(0, 64 * M) == [(64 * M, 3)]
# 32 MiB in one command, and a read that must not be fragmented.
h.pwrite(b"z" * (32 * M), 16 * M)
assert h.pread(32 * M, 16 * M) == b"z" * (32 * M)
chunks = []
h.pread_structured(65536, 16 * M, lambda buf, off, kind, err: chunks.append(len(buf)), nbd.CMD_FLAG_DF)
assert chunks == [65536], chunks
# What libnbd itself would refuse to send.
h.set_strict_mode(0)
for call, errno in [
    (lambda: h.pread(512, 64 * M), 22),
    (lambda: h.pread(512, 64 * M - 256), 22),
    (lambda: h.pread(100, 0), 22),
    (lambda: h.pwrite(b"1" * 512, 64 * M), 28),
    (lambda: h.pwrite(b"1" * 511, 0), 22),
    (lambda: h.zero(1024, 64 * M - 512), 28),
    (lambda: h.trim(1024, 64 * M - 512), 22),
    (lambda: h.cache(512, 0), 22),
]:
    try:
        call()
        raise SystemExit("no error %d" % errno)
    except nbd.Error as e:
        assert e.errnum == errno, (e, errno)
assert h.pread(512, 0) == bytes(512)
h.shutdown()
"#;
    if python(&server, script).is_some() {
        quiet(server);
    }
}

#[test]
fn libnbd_negotiates_by_hand() {
    let server = Server::start(MIB, Pace::AtOnce);
    let script = r#"
h = nbd.NBD(); h.set_opt_mode(True); h.connect_uri(URI)
names = []
assert h.opt_list(lambda n, d: names.append((n, d))) == 1, names
assert names == [("disk of a test", "a byte array")], names
h.set_export_name("nobody")
try:
    h.opt_info(); raise SystemExit("no error")
except nbd.Error: pass
h.set_export_name("disk of a test"); h.set_full_info(True)
h.opt_info()
assert h.get_canonical_export_name() == "disk of a test"
assert h.get_export_description() == "a byte array"
contexts = []
h.add_meta_context("base:")
assert h.opt_list_meta_context(lambda n: contexts.append(n)) == 1
assert contexts == ["base:allocation"]
h.opt_go()
assert h.get_size() == 1 << 20
h.shutdown()
h = nbd.NBD(); h.set_opt_mode(True); h.connect_uri(URI); h.opt_abort()
# Simple replies, and the oldest way in.
h = nbd.NBD(); h.set_request_structured_replies(False); h.connect_uri(URI)
assert not h.get_structured_replies_negotiated()
h.pwrite(b"q" * 4096, 4096); assert h.pread(4096, 4096) == b"q" * 4096
h.shutdown()
h = nbd.NBD(); h.set_handshake_flags(0); h.connect_uri(URI)
assert h.get_protocol() == "newstyle"
assert h.pread(4096, 4096) == b"q" * 4096
h.shutdown()
"#;
    if python(&server, script).is_some() {
        quiet(server);
    }
}
