//! Mode `persistent` as its users see it: what was written is there after stops, kills and power losses of the program's own
//! making, and the wrong image, size or server is refused in words.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod common;

use common::{Server, World, alive, finishes, qemu_io, refuses, spillway, stats, until};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use spillway_control::persistent_file::DURABLE_AT;
use spillway_control::{Content, DiskAtRest, SupervisorError};
use spillway_testkit::process::send_signal;
use spillway_testkit::{Ask, Driver, Shape, has_program, skip};
use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const MIB: u64 = 1 << 20;
/// What the page before the durable map begins with while a reset is not in that map.
const MARK: &[u8] = b"SPILLWAY: RESET\n";

/// What the image's bytes at an offset are.
fn sector(offset: u64) -> u64 {
    offset / 512 % 251
}

/// `serve` of the disk in this folder.
fn persistent(world: &World) -> Command {
    let mut command = spillway();
    command.args(["serve", "--mode", "persistent"]);
    command.arg("--image").arg(world.path("base.raw")).arg("--disk").arg(world.path("disk"));
    command.arg("--nbd").arg(world.path("nbd")).arg("--control").arg(world.path("control"));
    command
}

fn stop(server: Server) {
    let (code, text) = server.end(Signal::TERM);
    assert_eq!((code, text.as_str()), (0, "spillway: notice: all that was written is on the medium\n"));
}

#[test]
fn what_was_written_is_there_at_the_next_start() {
    let world = World::new();
    let server = Server::start(&mut persistent(&world));
    assert_eq!(server.report["disk"], world.path("disk").to_str().unwrap());
    let serial = server.report["serial"].clone();
    qemu_io(&world, &["write -P 7 1M 64k", "write -P 8 5120 512", "discard 2M 1M", "read -P 0 2M 1M"]);
    stop(server);
    assert_eq!(world.left(), ["base.raw", "disk"]);
    for grown in [false, true] {
        let mut command = persistent(&world);
        if grown {
            command.args(["--size", "64M"]);
        }
        let server = Server::start(&mut command);
        let size = if grown { 64 * MIB } else { 16 * MIB };
        assert_eq!((&server.report["size_bytes"], &server.report["serial"]), (&size.into(), &serial));
        // Of the block that was written in part the rest is the image's.
        let around = format!("read -P {} 4608 512", sector(4608));
        qemu_io(&world, &["read -P 7 1M 64k", "read -P 8 5120 512", &around, "read -P 0 2M 1M"]);
        qemu_io(&world, &[&format!("read -P {} {} 512", sector(9 * MIB), 9 * MIB)]);
        if grown {
            qemu_io(&world, &["read -P 0 16M 48M", "write -P 9 63M 1M"]);
        }
        stop(server);
    }
    refuses(persistent(&world).args(["--size", "32M"]), 2, &["67108864 bytes", "does not shrink", "--size"]);
    let server = Server::start(&mut persistent(&world));
    assert_eq!(server.report["size_bytes"], 64 * MIB, "the size that it has, not the image's");
    qemu_io(&world, &["read -P 9 63M 1M", "read -P 7 1M 64k"]);
    stop(server);
}

#[test]
fn one_server_at_a_time() {
    let world = World::new();
    let server = Server::start(&mut persistent(&world));
    let pid = format!("process {} (spillway", server.pid().as_raw_nonzero());
    let mut second = persistent(&world);
    second.arg("--vhost-user").arg(world.path("other"));
    refuses(&mut second, 75, &["in use by", &pid, "--disk"]);
    // A worker that serves on without its supervisor has it still.
    let mut client = holding(&world);
    let worker = server.worker_pid();
    let mut server = server;
    rustix::process::kill_process(server.pid(), Signal::KILL).unwrap();
    server.child.wait().unwrap();
    refuses(&mut persistent(&world), 75, &["in use by a worker whose supervisor", "last client"]);
    client.kill().unwrap();
    client.wait().unwrap();
    until("the worker leaves with its last client", || !alive(worker));
    stop(Server::start(&mut persistent(&world)));
}

/// A client that stays, once it has written, and has not flushed.
fn holding(world: &World) -> Child {
    let written = stats(world)["planes"]["guest"]["writes"].as_u64().unwrap();
    let mut client = Command::new("qemu-io");
    client.args(["-t", "writeback", "-f", "raw", "-c", "write -P 9 6M 4k", "-c", "sleep 60000"]);
    let child = client.arg(world.nbd_uri()).stdout(Stdio::null()).spawn().unwrap();
    until("it has written", || stats(world)["planes"]["guest"]["writes"] != written);
    child
}

#[test]
fn the_wrong_image_is_refused() {
    let world = World::new();
    stop(Server::start(&mut persistent(&world)));
    let image = world.path("base.raw");
    let modified = image.metadata().unwrap().modified().unwrap();
    let touch = |to| std::fs::File::options().write(true).open(&image).unwrap().set_modified(to).unwrap();
    touch(modified + std::time::Duration::from_secs(5));
    refuses(&mut persistent(&world), 66, &["made from another image", "size=16777216 mtime=", "--image-id"]);
    touch(modified);
    stop(Server::start(&mut persistent(&world)));
    refuses(persistent(&world).args(["--image-id", "desk:7"]), 66, &["another image", "id=desk:7"]);
    refuses(persistent(&world).args(["--image-id", "two\nlines"]), 2, &["--image-id", "a line"]);
    // An id that was given is what counts.
    let other = |command: &mut Command| {
        let (program, disk) = (command.get_program().to_owned(), world.path("other"));
        let args: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        let mut command = Command::new(program);
        let was = world.path("disk");
        command.args(args.into_iter().map(|a| if Path::new(&a) == was { disk.clone().into() } else { a }));
        command.args(["--image-id", "desk:7"]);
        command
    };
    stop(Server::start(&mut other(&mut persistent(&world))));
    touch(modified + std::time::Duration::from_secs(9));
    stop(Server::start(&mut other(&mut persistent(&world))));
    refuses(persistent(&world).arg("--disk").arg(world.path("base.raw")), 2, &["--disk"]);
}

#[test]
fn what_is_no_disk_is_left_alone() {
    let world = World::new();
    let disk = world.path("disk");
    let refused = |code, words: &[&str]| refuses(&mut persistent(&world), code, words);
    for content in [vec![], vec![0; 100], vec![7; 1 << 20]] {
        std::fs::write(&disk, &content).unwrap();
        refused(66, &["not a disk of mode persistent", "not changed"]);
        assert_eq!(std::fs::read(&disk).unwrap(), content);
    }
    std::fs::remove_file(&disk).unwrap();
    std::fs::create_dir(&disk).unwrap();
    refused(73, &["not a regular file"]);
    std::fs::remove_dir(&disk).unwrap();
    stop(Server::start(&mut persistent(&world)));
    let file = std::fs::File::options().read(true).write(true).open(&disk).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(len - 8192).unwrap();
    refused(66, &["cut short"]);
    file.set_len(len).unwrap();
    // The header that counts, so that the other counts, which is there only from the second start on.
    let spoil = |at: u64| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    };
    spoil(4096 + 40);
    refused(66, &["header is damaged", "checksum"]);
    spoil(4096 + 40);
    stop(Server::start(&mut persistent(&world)));
    spoil(40);
    stop(Server::start(&mut persistent(&world)));
    // A block in no state: in the live map, which counts while this kernel runs.
    file.write_all_at(&[0b0011_0000], 2 << 20).unwrap();
    refused(66, &["map is damaged, at block 2"]);
    file.write_all_at(&[0], 2 << 20).unwrap();
    file.write_all_at(b"hello", 258 << 20).unwrap();
    refused(66, &["mark of a reset"]);
}

#[test]
fn a_reset_is_meant_or_refused() {
    let world = World::new();
    let server = Server::start(&mut persistent(&world));
    qemu_io(&world, &["write -P 7 0 8M", "flush"]);
    let reset = |more: &[&str]| {
        let mut command = spillway();
        command.arg("reset").arg(world.path("control")).args(more);
        command
    };
    refuses(&mut reset(&["--force"]), 75, &["mode persistent", "--discard-data"]);
    qemu_io(&world, &["read -P 7 0 8M"]);
    let (code, out, _) = finishes(&mut reset(&["--discard-data"]));
    assert_eq!((code, out.as_str()), (0, "generation 2\n"));
    let image = format!("read -P {} 0 512", 0);
    qemu_io(&world, &[&image, &format!("read -P {} 4M 512", sector(4 * MIB)), "write -P 5 1M 64k"]);
    assert_eq!(server.end(Signal::TERM).0, 0);
    let mut server = Server::start(&mut persistent(&world));
    qemu_io(&world, &[&image, &format!("read -P {} 4M 512", sector(4 * MIB)), "read -P 5 1M 64k"]);
    // Everything dies after a reset, whether its mark is on the medium still or not, or before it has changed more than the mark:
    // whoever opens the disk finishes it.
    for is_marked_alone in [false, true] {
        qemu_io(&world, &["write -P 7 0 8M", "flush"]);
        if !is_marked_alone {
            assert_eq!(finishes(&mut reset(&["--discard-data"])).0, 0);
        }
        kill_both(server);
        if is_marked_alone {
            let disk = std::fs::File::options().write(true).open(world.path("disk")).unwrap();
            disk.write_all_at(MARK, DURABLE_AT).unwrap();
        }
        let begun = persistent(&world).arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut begun = begun.unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(begun.stdout.take().unwrap()), &mut line)
            .unwrap();
        qemu_io(
            &world,
            &[
                &image,
                &format!("read -P {} 4M 512", sector(4 * MIB)),
                &format!("read -P {} 1M 512", sector(MIB)),
            ],
        );
        rustix::process::kill_process(Pid::from_child(&begun), Signal::TERM).unwrap();
        let end = begun.wait_with_output().unwrap();
        let stderr = String::from_utf8(end.stderr).unwrap();
        let is_finished = stderr.contains("a reset that had begun is finished");
        assert!(end.status.success() && (is_finished || !is_marked_alone), "{stderr}");
        server = Server::start(&mut persistent(&world));
    }
    stop(server);
}

/// Supervisor and worker at once.
fn kill_both(mut server: Server) {
    let pids = [server.pid(), server.worker_pid()];
    pids.iter().for_each(|pid| rustix::process::kill_process(*pid, Signal::KILL).unwrap());
    server.child.wait().unwrap();
    // Its adoptive parent takes it in its own time, but it runs no more.
    until("the worker is dead", || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pids[1].as_raw_nonzero()));
        stat.map_or(true, |stat| stat.rsplit_once(')').unwrap().1.starts_with(" Z"))
    });
}

/// What a block of the image begins with.
fn image_of(block: u64) -> u64 {
    u64::from_le_bytes([(block * 8 % 251) as u8; 8])
}

/// A random writer, all processes killed under it: what was acknowledged is there, flushed or not, again and again.
#[test]
fn what_was_acknowledged_survives_the_death_of_all() {
    const BLOCKS: u64 = 4096;
    const ROUNDS: u64 = 8;
    let mut seed = std::process::id().into();
    println!("seed {seed}");
    let mut below = move |n: u64| {
        seed = u64::wrapping_mul(seed, 6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % n
    };
    for engine in ["io_uring", "threads"] {
        let world = World::new();
        let serve = || {
            let mut command = persistent(&world);
            command.arg("--vhost-user").arg(world.path("vhost")).env("SPILLWAY_ENGINE", engine);
            command
        };
        // What a block may hold: the last acknowledged, and what was under way when all died.
        let mut versions: HashMap<u64, Vec<u64>> = HashMap::new();
        let (mut version, mut flushes) = (0u64, 0u64);
        for round in 0..ROUNDS {
            let server = Server::start(&mut serve());
            let shape = Shape { depth: 16, request_bytes: 4096, ..Shape::default() };
            let mut driver = Driver::connect_with(&world.path("vhost"), shape).unwrap();
            for (&block, allowed) in &mut versions {
                let mut content = vec![0; 4096];
                driver.read_at(block * 4096, &mut content).unwrap();
                let found = u64::from_le_bytes(content[..8].try_into().unwrap());
                assert!(allowed.contains(&found), "round {round}, block {block}: {found:x} of {allowed:x?}");
                let whole = found.to_le_bytes().repeat(512) == content || found == image_of(block);
                assert!(whole, "round {round}, block {block} is torn");
                *allowed = vec![found];
            }
            // The last one ends well.
            let (writes, last) = (500 + below(3_000), round == ROUNDS - 1);
            let mut under_way: HashMap<usize, Option<(u64, u64)>> = HashMap::new();
            let mut reap = |driver: &mut Driver, under_way: &mut HashMap<usize, Option<(u64, u64)>>| {
                let done: Vec<usize> = under_way.keys().copied().filter(|&b| driver.is_finished(b)).collect();
                for buffer in done {
                    assert_eq!(driver.finish(buffer, |_| {}).unwrap(), 0);
                    if let Some((block, version)) = under_way.remove(&buffer).unwrap() {
                        versions.insert(block, vec![version]);
                    }
                }
            };
            for _ in 0..writes {
                while driver.in_flight() == 16 {
                    reap(&mut driver, &mut under_way);
                }
                if below(50) == 0 {
                    let buffer = driver.start(Ask::Flush, |_| {}).unwrap();
                    under_way.insert(buffer, None);
                    flushes += 1;
                    continue;
                }
                let block = below(BLOCKS);
                if under_way.values().flatten().any(|&(other, _)| other == block) {
                    continue;
                }
                version += 1;
                let bytes = version.to_le_bytes().repeat(512);
                let ask = Ask::Write { offset: block * 4096, len: 4096 };
                let buffer = driver.start(ask, |to| to[..4096].copy_from_slice(&bytes)).unwrap();
                under_way.insert(buffer, Some((block, version)));
            }
            if last {
                while !under_way.is_empty() {
                    reap(&mut driver, &mut under_way);
                }
                drop(driver);
                stop(server);
                continue;
            }
            kill_both(server);
            // What it had answered before it died counts.
            reap(&mut driver, &mut under_way);
            for (block, version) in under_way.into_values().flatten() {
                versions.entry(block).or_insert_with(|| vec![image_of(block)]).push(version);
            }
        }
        println!("{engine}: {version} writes, {flushes} flushes, {} deaths of all", ROUNDS - 1);
    }
}

/// A worker dies alone: the machine sees a pause, and all is there; its successor does not take the map for flushed.
#[test]
fn a_worker_that_dies_is_followed_by_another() {
    let world = World::new();
    let server = Server::start(&mut persistent(&world));
    let mut last = server.worker_pid();
    for round in 1..6 {
        qemu_io(&world, &[&format!("write -P {round} {round}M 1M"), "discard 8M 1M"]);
        rustix::process::kill_process(last, Signal::KILL).unwrap();
        let serving = || stats(&world)["worker_pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32));
        until("another worker", || serving().is_some_and(|pid| pid != last));
        last = serving().unwrap();
        for earlier in 1..=round {
            qemu_io(&world, &[&format!("read -P {earlier} {earlier}M 1M"), "read -P 0 8M 1M"]);
        }
    }
    assert_eq!(server.end(Signal::TERM).0, 0);
    // A boot later: only what is on the medium counts, and a clean stop has brought all of it there.
    forget_boot(&world.path("disk"));
    let server = Server::start(&mut persistent(&world));
    qemu_io(&world, &["read -P 5 5M 1M", "read -P 0 8M 1M"]);
    stop(server);
}

/// As if another kernel had served it: its live map does not count.
fn forget_boot(disk: &Path) {
    let file = std::fs::File::options().read(true).write(true).open(disk).unwrap();
    for at in [0, 4096] {
        let mut header = [0; 512];
        file.read_exact_at(&mut header, at).unwrap();
        if header == [0; 512] {
            continue;
        }
        header[48] ^= 0xff;
        header[20..24].fill(0);
        let checksum = crc32c::crc32c(&header);
        header[20..24].copy_from_slice(&checksum.to_le_bytes());
        file.write_all_at(&header, at).unwrap();
    }
    // What was in memory is gone.
    file.write_all_at(&[0xff; 4096], 2 << 20).unwrap();
}

/// After another boot the map is that of the last FLUSH: what was written since, to places new to the disk, is the image's.
#[test]
fn after_another_boot_what_was_flushed_counts() {
    let world = World::new();
    let server = Server::start(&mut persistent(&world));
    qemu_io(&world, &["write -P 7 1M 64k", "discard 3M 64k", "flush"]);
    // Its FUA is a promise too.
    qemu_io(&world, &["write -f -P 6 5M 64k"]);
    let mut client = holding(&world);
    kill_both(server);
    let _ = client.kill();
    client.wait().unwrap();
    forget_boot(&world.path("disk"));
    let server = Server::start(&mut persistent(&world));
    qemu_io(&world, &["read -P 7 1M 64k", "read -P 0 3M 64k", "read -P 6 5M 64k"]);
    qemu_io(&world, &[&format!("read -P {} 6M 512", sector(6 * MIB))]);
    stop(server);
}

/// What nobody has flushed is on the medium after a clean stop, and after the end of a worker that was left alone.
#[test]
fn a_clean_end_flushes() {
    for orphaned in [false, true] {
        let world = World::new();
        let mut server = Server::start(&mut persistent(&world));
        let mut client = holding(&world);
        let worker = server.worker_pid();
        if orphaned {
            rustix::process::kill_process(server.pid(), Signal::KILL).unwrap();
            server.child.wait().unwrap();
        } else {
            assert_eq!(server.end(Signal::TERM).0, 0);
        }
        client.kill().unwrap();
        client.wait().unwrap();
        until("the worker has gone", || !alive(worker));
        forget_boot(&world.path("disk"));
        let server = Server::start(&mut persistent(&world));
        qemu_io(&world, &["read -P 9 6M 4k"]);
        stop(server);
    }
}

/// A worker that has no time to flush is an error, not a clean end.
#[test]
fn an_end_that_does_not_flush_is_said() {
    let world = World::new();
    let server = Server::start(&mut persistent(&world));
    let worker = server.worker_pid();
    send_signal(worker, Signal::STOP).unwrap();
    let (code, text) = server.end(Signal::TERM);
    assert!(code == 70 && text.contains("may not be on the medium"), "{code} {text}");
    until("the worker has gone", || !alive(worker));
    stop(Server::start(&mut persistent(&world)));
}

fn strace_runs() -> bool {
    finishes(Command::new("sh").args(["-c", "strace -o /dev/null true; echo $?"])).1.ends_with("0\n")
}

/// Runs `serve` with faults in the supervisor's system calls on the disk's file, each in strace's words. Stops it if it serves
/// nevertheless. Returns whether the last of the faults happened.
fn serve_with_faults(world: &World, serve: &Command, faults: &[&str]) -> bool {
    let trace = world.path("trace");
    let mut strace = Command::new("strace");
    strace.arg("-o").arg(&trace).arg("-P").arg(world.path("disk"));
    faults.iter().for_each(|fault| _ = strace.args(["-e", &format!("inject={fault}")]));
    strace.arg(serve.get_program()).args(serve.get_args()).arg("--json");
    let output = strace.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut started = output.spawn().unwrap();
    let mut line = String::new();
    let mut stdout = std::io::BufReader::new(started.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
    if let Ok(report) = serde_json::from_str::<Value>(&line) {
        let pid = Pid::from_raw(report["pid"].as_i64().unwrap() as i32).unwrap();
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
    }
    started.wait().unwrap();
    let trace = std::fs::read_to_string(&trace).unwrap();
    let call = format!("{}(", faults.last().unwrap().split(':').next().unwrap());
    let failed = |line: &str| line.starts_with(&call) && line.contains("(INJECTED)");
    trace.contains("+++ killed by SIGKILL") || trace.lines().any(failed)
}

/// Starts a disk in every state that an interrupted start can leave: each system call that changes the file is the last one, or
/// fails. Flushed content must survive, although the header names the page cache and the live map is not to be used:
/// - The file was overwritten with a snapshot whose live map is older than its durable map. Only its seal shows this.
/// - The interrupted start could not read the seal of a file that was not overwritten.
#[test]
fn an_interrupted_start_keeps_what_was_flushed() {
    const LEN: u64 = 4 * MIB;
    const LIVE_AT: u64 = 2 << 20;
    if !strace_runs() || !has_program("qemu-io") {
        return skip("strace does not run here, or there is no qemu-io");
    }
    let world = World::new();
    let serve = || {
        let mut command = persistent(&world);
        command.args(["--image-id", "golden:1"]);
        command
    };
    let server = Server::start(&mut serve());
    qemu_io(&world, &[&format!("write -P 0xaa 0 {LEN}"), "flush"]);
    stop(server);
    let (disk, snapshot) = (world.path("disk"), world.path("snapshot"));
    let copy = |from: &Path, to: &Path| {
        assert!(Command::new("cp").arg("--sparse=always").args([from, to]).status().unwrap().success());
    };
    copy(&disk, &snapshot);
    let older = std::fs::File::options().write(true).open(&snapshot).unwrap();
    older.write_all_at(&[0; 4096], LIVE_AT).unwrap();
    let mut starts = 0;
    for is_overwritten in [true, false] {
        for (call, ways) in [
            ("ioctl", &["signal=KILL", "error=EIO"][..]),
            ("fallocate", &["signal=KILL", "error=EIO", "error=ENOSPC"]),
            ("pwrite64", &["signal=KILL", "error=EIO", "error=ENOSPC"]),
            ("fsync", &["signal=KILL", "error=EIO"]),
            ("fdatasync", &["signal=KILL", "error=EIO"]),
        ] {
            for way in ways {
                for nth in 1.. {
                    let mut faults = vec![format!("{call}:{way}:when={nth}")];
                    if is_overwritten {
                        copy(&snapshot, &disk);
                    } else if call == "ioctl" {
                        break;
                    } else {
                        faults.insert(0, "ioctl:error=EIO".into());
                    }
                    let faults: Vec<&str> = faults.iter().map(String::as_str).collect();
                    let happened = serve_with_faults(&world, &serve(), &faults);
                    starts += 1;
                    println!("overwritten: {is_overwritten}, {faults:?}, happened: {happened}");
                    let mut own = 0;
                    let at_rest = DiskAtRest::open(&disk, "golden:1", 16 * MIB).unwrap();
                    let listed = at_rest.parts(|part| {
                        own += if matches!(part.content, Content::Own { .. }) { part.len } else { 0 };
                        Ok::<_, SupervisorError>(())
                    });
                    listed.unwrap();
                    assert_eq!(own, LEN, "bytes of the disk's own, while nobody serves it");
                    drop(at_rest);
                    let server = Server::start(&mut serve());
                    qemu_io(&world, &[&format!("read -P 0xaa 0 {LEN}")]);
                    stop(server);
                    if !happened {
                        assert!(nth > 1 || call == "fdatasync", "{call} of the disk's file is not seen");
                        break;
                    }
                }
            }
        }
    }
    println!("{starts} starts");
}

/// FLUSH reaches the medium: the calls are counted.
#[test]
fn a_flush_is_an_fdatasync() {
    if !strace_runs() {
        return skip("strace does not run here");
    }
    let world = World::new();
    let trace = world.path("trace");
    let serve = persistent(&world);
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-e", "trace=fdatasync,pwritev2", "-o"]).arg(&trace);
    strace.arg(serve.get_program()).args(serve.get_args()).env("SPILLWAY_ENGINE", "threads");
    let server = Server::start(&mut strace);
    let calls = || {
        let text = std::fs::read_to_string(&trace).unwrap();
        let ended = |l: &&str| {
            l.contains("fdatasync(") && l.ends_with("= 0") || l.contains("<... fdatasync resumed>")
        };
        let of_map = format!(", {}, 0", (258u64 << 20) + 4096);
        let durable = |l: &&str| l.contains("pwritev2(") && l.contains(&of_map);
        (text.lines().filter(ended).count(), text.lines().filter(durable).count())
    };
    // The drain of a new server has one of its own; qemu-io flushes as it leaves.
    let of = |command: &str| {
        let before = calls();
        let mut client = Command::new("qemu-io");
        client.args(["-t", "writeback", "-f", "raw", "-c", command]).arg(world.nbd_uri());
        assert_eq!(finishes(&mut client).0, 0);
        let now = calls();
        (now.0 - before.0, now.1 - before.1)
    };
    of("read 0 512");
    assert_eq!(of("write -P 1 0 4096"), (2, 1), "data, page of the map");
    assert_eq!(of("write -P 2 0 4096"), (1, 0), "the map has not changed");
    assert_eq!(of("discard 0 4096"), (2, 1));
    drop(server);
}
