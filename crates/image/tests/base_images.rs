//! Base images against the real `qemu-img` and `qemu-io`: what QEMU wrote must read back byte for byte, what may
//! not be a base image must be refused in clear words, and a damaged image must cost a read, never the worker.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spillway_image::{
    BaseImage, BaseReader, Extent, ExtentCache, ExtentKind, Finished, ImageErrorKind, RawImage, open_image,
};
use spillway_layout::{BaseCache, ImageFormat};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// Longest wait for one answer: its end is a hang.
const DEADLINE: Duration = Duration::from_secs(60);

// ---- Tools ----------------------------------------------------------------------------------------------------

/// A seeded generator, so that a failure can be run again.
struct Random(u64);

impl Random {
    fn new(default: u64) -> Random {
        let seed = std::env::var("SPILLWAY_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(default);
        println!("seed {seed}: run again with SPILLWAY_SEED={seed}");
        Random(seed | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

fn run(program: &str, args: &[&str]) {
    let once = || Command::new(program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    let mut out = once();
    // To make a LUKS image qemu-img times its key derivation, and gives up when the host is too busy for that.
    for _ in 0..50 {
        if !String::from_utf8_lossy(&out.stderr).contains("Unable to get accurate CPU usage") {
            break;
        }
        out = once();
    }
    assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A temporary folder on a real disk: O_DIRECT and the page cache are part of what is tested.
fn dir() -> TempDir {
    tempfile::Builder::new().prefix("spillway-base-").tempdir_in("/var/tmp").unwrap()
}

/// Content with everything in it: noise, text that compresses, zeroes, in runs of odd length.
fn content(random: &mut Random, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let run = (random.below(300) as usize + 1) * 512;
        match random.below(4) {
            0 => bytes.resize(bytes.len() + run * 2, 0),
            1 => bytes.extend((0..run).map(|i| b"the golden image "[(i / 3) % 17])),
            2 => bytes.extend((0..run / 8).flat_map(|i| (i as u64 / 5).to_le_bytes())),
            _ => bytes.extend((0..run / 8).flat_map(|_| random.next().to_le_bytes())),
        }
    }
    bytes.truncate(len);
    bytes
}

fn make_raw(dir: &Path, bytes: &[u8]) -> PathBuf {
    let path = dir.join("content.raw");
    fs::write(&path, bytes).unwrap();
    path
}

fn convert(raw: &Path, to: &Path, options: &[&str]) {
    let mut args = vec!["convert", "-f", "raw", "-O", "qcow2"];
    args.extend(options);
    args.extend([text(raw), text(to)]);
    run("qemu-img", &args);
}

fn start(path: &Path, cache: BaseCache) -> BaseReader {
    let opened = open_image(path, None, cache).unwrap();
    assert_eq!(opened.format, ImageFormat::Qcow2);
    BaseReader::qcow2(opened.file, opened.virtual_size_bytes, cache == BaseCache::None).unwrap()
}

/// The next finished job; panics when none comes.
fn wait(reader: &mut BaseReader) -> Finished {
    loop {
        if let Some(done) = reader.finished() {
            return done;
        }
        let timeout = Timespec { tv_sec: DEADLINE.as_secs() as i64, tv_nsec: 0 };
        let wake = reader.wake_fd();
        let ready = poll(&mut [PollFd::new(&wake, PollFlags::IN)], Some(&timeout)).unwrap();
        assert!(ready > 0, "no answer within {DEADLINE:?}");
    }
}

fn read(reader: &mut BaseReader, offset: u64, len: u32) -> Finished {
    reader.submit(7, offset, len, Vec::new());
    let done = wait(reader);
    assert_eq!((done.job, done.buffer.len()), (7, len as usize));
    done
}

/// Compares the whole image, then random ranges with many jobs at a time.
fn compare(path: &Path, cache: BaseCache, expected: &[u8], random: &mut Random) {
    let mut reader = start(path, cache);
    assert_eq!(reader.size_bytes(), expected.len() as u64);
    for at in (0..expected.len()).step_by(256 * 1024) {
        let len = (expected.len() - at).min(256 * 1024);
        let done = read(&mut reader, at as u64, len as u32);
        assert_eq!(done.result, Ok(()));
        assert!(done.buffer == expected[at..at + len], "{} differs in {at}+{len}", path.display());
    }
    let sectors = expected.len() as u64 / 512;
    // Past the page cache each of them goes to the disk.
    let jobs = if cache == BaseCache::None { 25 } else { 100 };
    let mut asked = HashMap::new();
    for job in 0..jobs {
        let first = random.below(sectors);
        let count = (random.below(512) + 1).min(sectors - first);
        asked.insert(job, (first as usize * 512, count as usize * 512));
        reader.submit(job, first * 512, count as u32 * 512, vec![0xee; random.below(9000) as usize]);
    }
    assert_eq!(reader.unfinished(), jobs as usize);
    while !asked.is_empty() {
        let done = wait(&mut reader);
        let (at, len) = asked.remove(&done.job).expect("each job comes back once");
        assert_eq!(done.result, Ok(()));
        assert!(done.buffer == expected[at..at + len], "{} differs in {at}+{len}", path.display());
    }
    assert_eq!(reader.unfinished(), 0);
    assert!(reader.finished().is_none());
}

/// Reads the image by its extents, as the reactor does: plain stretches straight from the file.
fn compare_by_extents(path: &Path, expected: &[u8], random: &mut Random) -> [usize; 4] {
    let mut reader = start(path, BaseCache::Host);
    let mut cache = ExtentCache::new();
    let mut seen = [0; 4];
    for _ in 0..800 {
        let first = random.below(expected.len() as u64 / 512) * 512;
        let len = ((random.below(64) + 1) * 512).min(expected.len() as u64 - first);
        let mut at = first;
        while at < first + len {
            let rest = first + len - at;
            let Some(extent) = cache.lookup(at) else {
                seen[3] += 1;
                let done = read(&mut reader, at, rest as u32);
                assert_eq!(done.result, Ok(()));
                assert!(!done.extents.is_empty() && done.extents.len() <= 64);
                done.extents.into_iter().for_each(|extent| cache.insert(extent));
                assert!(cache.lookup(at).is_some(), "what was read is known afterwards");
                continue;
            };
            let n = rest.min(extent.len) as usize;
            let range = at as usize..at as usize + n;
            match extent.kind {
                ExtentKind::Zero => {
                    seen[0] += 1;
                    assert!(expected[range].iter().all(|b| *b == 0));
                }
                ExtentKind::Raw { file_offset } => {
                    seen[1] += 1;
                    let mut bytes = vec![0; n];
                    if reader.file().read_now(&mut bytes, file_offset).is_none() {
                        let file = File::from(reader.file().fd().try_clone_to_owned().unwrap());
                        file.read_exact_at(&mut bytes, file_offset).unwrap();
                    }
                    assert!(bytes == expected[range]);
                }
                ExtentKind::Compressed => {
                    seen[2] += 1;
                    let done = read(&mut reader, at, n as u32);
                    assert!(done.buffer == expected[range]);
                }
            }
            at += n as u64;
        }
    }
    seen
}

fn refused(path: &Path, format: Option<ImageFormat>, kind: ImageErrorKind, words: &[&str]) {
    let error = open_image(path, format, BaseCache::Host).expect_err("it must be refused");
    let message = error.to_string();
    assert_eq!(error.kind(), kind, "{message}");
    assert!(message.contains(text(path)), "{message}");
    assert!(!message.contains('\n'), "{message}");
    for word in words {
        assert!(message.contains(word), "'{word}' is missing in: {message}");
    }
}

fn poke(path: &Path, at: u64, bytes: &[u8]) {
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

// ---- What QEMU writes reads back ------------------------------------------------------------------------------

#[test]
fn every_kind_of_qcow2_reads_as_qemu_wrote_it() {
    let dir = dir();
    let mut random = Random::new(0x5eed_0001);
    // The size is a multiple of neither a block nor a cluster.
    let bytes = content(&mut random, (4 << 20) + 3 * 512);
    let raw = make_raw(dir.path(), &bytes);
    let kinds: &[&[&str]] = &[
        &["-o", "compat=0.10"],
        &["-o", "compat=1.1"],
        &["-o", "compat=0.10", "-c"],
        &["-o", "cluster_size=512"],
        &["-o", "cluster_size=4k"],
        &["-o", "cluster_size=2M"],
        &["-c"],
        &["-c", "-o", "cluster_size=512"],
        &["-c", "-o", "cluster_size=4k"],
        &["-c", "-o", "cluster_size=2M"],
        &["-c", "-o", "compression_type=zstd"],
        &["-c", "-o", "compression_type=zstd,cluster_size=4k"],
        &["-c", "-o", "compression_type=zstd,cluster_size=2M"],
        &["-o", "preallocation=metadata"],
        &["-o", "preallocation=falloc"],
        &["-o", "preallocation=full"],
        &["-o", "lazy_refcounts=on"],
        &["-o", "refcount_bits=1"],
        &["-W", "-m", "8"],
        &["-S", "0"],
    ];
    for (i, options) in kinds.iter().enumerate() {
        println!("{options:?}");
        let path = dir.path().join(format!("{i}.qcow2"));
        convert(&raw, &path, options);
        compare(&path, BaseCache::Host, &bytes, &mut random);
        compare(&path, BaseCache::None, &bytes, &mut random);
        let seen = compare_by_extents(&path, &bytes, &mut random);
        println!("zero, raw, compressed, asked: {seen:?}");
        assert_eq!(seen[2] > 0, options.contains(&"-c"));
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn an_image_written_by_a_machine_reads_as_qemu_reads_it() {
    let dir = dir();
    let mut random = Random::new(0x5eed_0002);
    for (i, options) in
        ["compat=0.10", "cluster_size=64k", "cluster_size=4k", "cluster_size=2M"].iter().enumerate()
    {
        let path = dir.path().join(format!("{i}.qcow2"));
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, text(&path), "64M"]);
        // Compressed clusters first (QEMU compresses into untouched ones only), then scattered writes, discards
        // and zeroes over and between them, with snapshots.
        for round in 0..3 {
            let mut commands: Vec<String> = Vec::new();
            if round == 0 {
                commands.extend((0..8).map(|i| format!("write -c -P {} {} 2M", i + 100, i * (6 << 20))));
                // This one stays: nothing below reaches so far.
                commands.push("write -c -P 77 62M 2M".into());
            }
            for _ in 0..40 {
                let at = random.below(60 << 20) / 512 * 512;
                let len = (random.below(400) + 1) * 512;
                commands.push(match random.below(5) {
                    0 => format!("discard {at} {len}"),
                    1 => format!("write -z {at} {len}"),
                    2 => format!("write -z -u {at} {len}"),
                    _ => format!("write -P {} {at} {len}", random.below(255) + 1),
                });
            }
            let mut args = vec!["-f", "qcow2", "-d", "unmap", text(&path)];
            args.extend(commands.iter().flat_map(|c| ["-c", c.as_str()]));
            run("qemu-io", &args);
            run("qemu-img", &["snapshot", "-c", &format!("round{round}"), text(&path)]);
        }
        let raw = dir.path().join("expected.raw");
        run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", text(&path), text(&raw)]);
        let bytes = fs::read(&raw).unwrap();
        compare(&path, BaseCache::Host, &bytes, &mut random);
        compare(&path, BaseCache::None, &bytes, &mut random);
        let seen = compare_by_extents(&path, &bytes, &mut random);
        assert!(seen.iter().all(|n| *n > 0), "{seen:?}");
    }
}

#[test]
fn sizes_at_the_edges_of_the_format_read_as_qemu_reads_them() {
    let dir = dir();
    let mut random = Random::new(0x5eed_0009);
    // One sector; a sector more or less than a cluster, than what one L2 table covers, than a page of entries.
    for (cluster, size) in [
        ("64k", 512),
        ("64k", 65536 - 512),
        ("64k", 65536 + 512),
        ("2M", 512),
        ("512", 32 * 1024 - 512),
        ("512", 32 * 1024 + 512),
        ("512", (2 << 20) + 512),
        ("4k", 512 * 4096 - 512),
        ("4k", 512 * 4096 + 512),
    ] {
        println!("{cluster} {size}");
        let bytes = content(&mut random, size);
        let raw = make_raw(dir.path(), &bytes);
        for option in [&[][..], &["-c"]] {
            // The thread of a reader that was dropped may hold its file, and QEMU's lock on it, for a moment longer.
            let path = dir.path().join(format!("edge-{cluster}-{size}{}.qcow2", option.concat()));
            let cluster = format!("cluster_size={cluster}");
            convert(&raw, &path, &[&["-o", &cluster], option].concat());
            compare(&path, BaseCache::Host, &bytes, &mut random);
            compare(&path, BaseCache::None, &bytes, &mut random);
            compare_by_extents(&path, &bytes, &mut random);
        }
    }
}

#[test]
fn a_sparse_image_of_one_tebibyte_is_read_at_once() {
    let dir = dir();
    let path = dir.path().join("sparse.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", text(&path), "1T"]);
    run("qemu-io", &["-f", "qcow2", text(&path), "-c", "write -P 0x5a 700G 1M"]);
    let mut reader = start(&path, BaseCache::Host);
    assert_eq!(reader.size_bytes(), 1 << 40);
    let mut cache = ExtentCache::new();
    let (mut at, mut jobs) = (0u64, 0);
    let mut plain = 0;
    while at < 1 << 40 {
        let done = read(&mut reader, at, 4096);
        assert_eq!(done.result, Ok(()));
        let byte = if (700 << 30..(700 << 30) + (1 << 20)).contains(&at) { 0x5a } else { 0 };
        assert!(done.buffer.iter().all(|b| *b == byte), "at {at}");
        for extent in done.extents {
            cache.insert(extent);
        }
        let extent = cache.lookup(at).unwrap();
        if matches!(extent.kind, ExtentKind::Raw { .. }) {
            plain += extent.len;
        }
        at += extent.len;
        jobs += 1;
    }
    // 2048 L2 tables, one of them there: its pages and the holes around it.
    assert!(jobs < 100, "{jobs} jobs for an image with one MiB in it");
    assert_eq!(plain, 1 << 20);
    assert_eq!(at, 1 << 40);
    // Right at the end, and over it.
    assert_eq!(read(&mut reader, (1 << 40) - 512, 512).result, Ok(()));
    for (offset, len) in [((1 << 40) - 512, 1024), (1 << 40, 512), (u64::MAX - 511, 512), (0, 512 * 1024)] {
        reader.submit(1, offset, len, Vec::new());
        assert_eq!(wait(&mut reader).result, Err(libc::EINVAL));
    }
}

// ---- Raw ------------------------------------------------------------------------------------------------------

/// Drops a file from the page cache until a look finds it gone: the kernel keeps pages that something else holds at that
/// moment, such as its own scan for cold memory.
fn until_dropped(file: &File, mut is_gone: impl FnMut() -> bool) {
    for _ in 0..1000 {
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        if is_gone() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the page cache keeps the file");
}

#[test]
fn a_raw_image_gives_what_is_in_the_page_cache_and_no_more() {
    let dir = dir();
    let mut random = Random::new(0x5eed_0003);
    let bytes = content(&mut random, (4 << 20) + 512);
    let path = make_raw(dir.path(), &bytes);
    let opened = open_image(&path, None, BaseCache::Host).unwrap();
    assert_eq!((opened.format, opened.virtual_size_bytes), (ImageFormat::Raw, bytes.len() as u64));
    let image = RawImage::new(opened.file, opened.virtual_size_bytes, false);
    assert_eq!((image.dio_align(), image.direct()), (1, false));

    let mut buf = vec![0; 100_000];
    for _ in 0..500 {
        let at = random.below(bytes.len() as u64 - 1) as usize;
        let len = (random.below(buf.len() as u64) as usize + 1).min(bytes.len() - at);
        assert_eq!(image.read_now(&mut buf[..len], at as u64).unwrap().unwrap(), len);
        assert!(buf[..len] == bytes[at..at + len]);
    }
    // The last block is partial: a read over the end is short by exactly what is not there.
    let last = bytes.len() as u64 - 512;
    assert_eq!(image.read_now(&mut buf[..4096], last).unwrap().unwrap(), 512);
    assert_eq!(image.read_now(&mut buf[..4096], last + 512).unwrap().unwrap(), 0);
    assert_eq!(image.read_now(&mut buf[..4096], u64::MAX - 4096).unwrap().unwrap(), 0);

    // Not in the page cache: nothing, rather than a wait.
    let file = File::open(&path).unwrap();
    file.sync_all().unwrap();
    until_dropped(&file, || image.read_now(&mut buf[..4096], 1 << 20).is_none());

    // Cut off while in use: an error, never zeroes and never less than asked.
    let bytes_now = OpenOptions::new().write(true).open(&path).unwrap();
    bytes_now.set_len(1 << 20).unwrap();
    file.read_exact_at(&mut buf[..8192], (1 << 20) - 8192).unwrap();
    assert!(image.read_now(&mut buf[..8192], (1 << 20) - 4096).is_none_or(|read| read.is_err()));
    assert!(image.read_now(&mut buf[..8192], 2 << 20).unwrap().is_err());
}

#[test]
fn past_the_page_cache_nothing_is_at_hand_and_alignment_is_told() {
    let dir = dir();
    let mut random = Random::new(0x5eed_0004);
    let bytes = content(&mut random, (1 << 20) + 512);
    let path = make_raw(dir.path(), &bytes);
    let opened = open_image(&path, None, BaseCache::None).unwrap();
    let flags = rustix::fs::fcntl_getfl(&opened.file).unwrap();
    assert!(flags.contains(rustix::fs::OFlags::DIRECT) && !flags.contains(rustix::fs::OFlags::NONBLOCK));
    let image = RawImage::new(opened.file, opened.virtual_size_bytes, true);
    assert!(image.dio_align() >= 512 && image.dio_align().is_power_of_two());
    assert!(image.read_now(&mut [0; 4096], 0).is_none());
    assert_eq!(BaseImage::Raw { image, holes: None }.size_bytes(), bytes.len() as u64);
}

// ---- Counting what reaches the store --------------------------------------------------------------------------

#[test]
fn only_what_the_page_cache_does_not_hold_counts_as_store_reads() {
    let dir = dir();
    let mut random = Random::new(0x5eed_0005);
    let bytes = content(&mut random, 8 << 20);
    let raw = make_raw(dir.path(), &bytes);
    let path = dir.path().join("image.qcow2");
    convert(&raw, &path, &["-S", "0"]);
    let file = File::open(&path).unwrap();
    file.sync_all().unwrap();
    until_dropped(&file, || {
        let mut reader = start(&path, BaseCache::Host);
        let cold = read(&mut reader, 4 << 20, 65536);
        let warm = read(&mut reader, 4 << 20, 65536);
        assert_eq!(warm.store_reads, []);
        cold.store_reads.iter().map(|read| read.len).sum::<u64>() >= 65536
    });

    // With O_DIRECT each read counts, again and again. The tables are kept.
    let mut reader = start(&path, BaseCache::None);
    let first = read(&mut reader, 4 << 20, 65536);
    let second = read(&mut reader, 4 << 20, 65536);
    assert!(first.store_reads.len() > second.store_reads.len());
    let [second] = second.store_reads[..] else { panic!("{:?}", second.store_reads) };
    assert_eq!(second.len, 65536);
    let ExtentKind::Raw { file_offset } = first.extents[0].kind else { panic!("{:?}", first.extents) };
    assert_eq!(second.offset, file_offset + (4 << 20) - first.extents[0].offset);

    // A decompressed cluster is kept, but not past the page cache.
    let packed = dir.path().join("packed.qcow2");
    fs::write(&raw, vec![7u8; 4 << 20]).unwrap();
    convert(&raw, &packed, &["-c"]);
    for (cache, again) in [(BaseCache::Host, false), (BaseCache::None, true)] {
        let mut reader = start(&packed, cache);
        read(&mut reader, 1 << 20, 4096);
        assert_eq!(read(&mut reader, (1 << 20) + 4096, 4096).store_reads.is_empty(), !again);
    }
}

#[test]
fn an_image_in_memory_is_always_at_hand_and_has_no_store() {
    let dir = tempfile::Builder::new().prefix("spillway-base-").tempdir_in("/dev/shm").unwrap();
    let mut random = Random::new(0x5eed_000a);
    let bytes = content(&mut random, (2 << 20) + 512);
    let raw = make_raw(dir.path(), &bytes);
    let opened = open_image(&raw, None, BaseCache::Host).unwrap();
    let image = RawImage::new(opened.file, opened.virtual_size_bytes, false);
    assert!(image.in_memory());
    let mut buf = vec![0; 65536];
    assert_eq!(image.read_now(&mut buf, 1 << 20).unwrap().unwrap(), 65536);
    assert!(buf == bytes[1 << 20..(1 << 20) + 65536]);

    let path = dir.path().join("image.qcow2");
    convert(&raw, &path, &[]);
    compare(&path, BaseCache::Host, &bytes, &mut random);
    let mut reader = start(&path, BaseCache::Host);
    let done = read(&mut reader, 1 << 20, 65536);
    assert_eq!((done.result, done.store_reads), (Ok(()), vec![]));
}

// ---- The thread -----------------------------------------------------------------------------------------------

fn reader_threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter(|task| {
            let comm = task.as_ref().unwrap().path().join("comm");
            fs::read_to_string(comm).is_ok_and(|name| name.trim() == "base-reader")
        })
        .count()
}

/// Re-runs one test of this file in a process of its own, where nothing else has reader threads.
fn alone(test: &str) -> bool {
    if std::env::var_os("SPILLWAY_ALONE").is_some() {
        return true;
    }
    let out = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env("SPILLWAY_ALONE", "1")
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    false
}

#[test]
fn the_thread_ends_with_its_reader_and_the_wake_fd_rests() {
    if !alone("the_thread_ends_with_its_reader_and_the_wake_fd_rests") {
        return;
    }
    let dir = dir();
    let raw = make_raw(dir.path(), &vec![3; 4 << 20]);
    let path = dir.path().join("image.qcow2");
    convert(&raw, &path, &["-c"]);
    let readable = |reader: &BaseReader| {
        let wake = reader.wake_fd();
        poll(&mut [PollFd::new(&wake, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    };
    let mut reader = start(&path, BaseCache::Host);
    assert!(!readable(&reader));
    // A thread has its name once it runs.
    read(&mut reader, 0, 512);
    assert_eq!(reader_threads(), 1);
    for round in 0..200 {
        for job in 0..round % 7 + 1 {
            reader.submit(job, job * 4096, 4096, Vec::new());
        }
        for job in 0..round % 7 + 1 {
            assert_eq!(wait(&mut reader).job, job, "in order");
        }
        // The last wake may come after its job was taken; one more look ends it.
        let deadline = std::time::Instant::now() + DEADLINE;
        while readable(&reader) {
            assert!(reader.finished().is_none());
            assert!(std::time::Instant::now() < deadline, "the wake fd stays readable with nothing to take");
        }
    }
    // Dropped with work queued: it ends all the same.
    for job in 0..256 {
        reader.submit(job, 0, 256 * 1024, Vec::new());
    }
    drop(reader);
    let deadline = std::time::Instant::now() + DEADLINE;
    while reader_threads() > 0 {
        assert!(std::time::Instant::now() < deadline, "the thread does not end");
        std::thread::yield_now();
    }
}

// ---- What is refused ------------------------------------------------------------------------------------------

#[test]
fn images_that_need_another_file_or_a_key_are_refused() {
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    let raw = make_raw(dir.path(), &vec![1; 1 << 20]);
    let create = |path: &Path, options: &[&str]| {
        let mut args = vec!["create", "-q", "-f", "qcow2"];
        args.extend(options);
        args.extend([text(path), "1M"]);
        run("qemu-img", &args);
    };
    use ImageErrorKind::{Damaged, Unsupported};

    create(&at("backed.qcow2"), &["-b", text(&raw), "-F", "raw"]);
    refused(&at("backed.qcow2"), None, Unsupported, &["backing file", "qemu-img convert"]);

    create(&at("data.qcow2"), &["-o", &format!("data_file={}", text(&at("data.bin")))]);
    refused(&at("data.qcow2"), None, Unsupported, &["another file", "qemu-img convert"]);

    let secret = "secret,id=s,data=abc";
    let luks = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    create(&at("luks.qcow2"), &["--object", secret, "-o", luks]);
    refused(&at("luks.qcow2"), None, Unsupported, &["encrypted"]);

    create(&at("sub.qcow2"), &["-o", "extended_l2=on"]);
    refused(&at("sub.qcow2"), None, Unsupported, &["extended_l2", "qemu-img convert"]);

    let plain = at("plain.qcow2");
    let set = |byte: u64, value: u8, kind, words: &[&str]| {
        convert(&raw, &plain, &[]);
        poke(&plain, byte, &[value]);
        refused(&plain, None, kind, words);
    };
    set(79, 1, Damaged, &["dirty", "qemu-img check -r"]);
    set(79, 2, Damaged, &["corrupt", "qemu-img check -r"]);
    set(79, 8, Unsupported, &["compression type"]);
    set(104, 1, Unsupported, &["compression type"]);
    set(79, 32, Unsupported, &["0x20"]);
    set(72, 0x80, Unsupported, &["0x8000000000000000"]);
    set(7, 4, Unsupported, &["version 4"]);
    set(23, 8, Damaged, &["2^8"]);
    set(23, 22, Damaged, &["2^22"]);
    set(31, 1, ImageErrorKind::Size, &["multiple of 512", "qemu-img resize"]);
    set(103, 103, Damaged, &["header"]);
    set(40, 1, Damaged, &["L1 table"]);
    set(47, 1, Damaged, &["L1 table"]);
    set(24, 1, Damaged, &["L1 table"]);
    set(0, b'X', ImageErrorKind::Format, &["not a qcow2 image", "--format raw", "qemu-img convert"]);

    for len in [4, 71, 100, 111] {
        convert(&raw, &plain, &[]);
        OpenOptions::new().write(true).open(&plain).unwrap().set_len(len).unwrap();
        refused(&plain, None, Damaged, &[]);
    }
}

#[test]
fn bad_paths_formats_and_sizes_say_what_to_do() {
    use ImageErrorKind::{Format, Missing, NotAFile, Size};
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    refused(&at("none.raw"), None, Missing, &["does not exist"]);
    refused(&at("none.raw").join("below.raw"), None, Missing, &["does not exist"]);

    fs::create_dir(at("dir.raw")).unwrap();
    refused(&at("dir.raw"), None, NotAFile, &["folder"]);
    run("mkfifo", &[text(&at("pipe.raw"))]);
    refused(&at("pipe.raw"), None, NotAFile, &["pipe"]);
    refused(Path::new("/dev/null"), Some(ImageFormat::Raw), NotAFile, &["character device"]);

    fs::write(at("empty.raw"), []).unwrap();
    refused(&at("empty.raw"), None, Size, &["empty"]);
    fs::write(at("empty.qcow2"), []).unwrap();
    refused(&at("empty.qcow2"), None, Size, &["empty"]);
    fs::write(at("odd.raw"), [1; 1000]).unwrap();
    refused(&at("odd.raw"), None, Size, &["1000 bytes", "truncate -s 1024", "qemu-img resize"]);
    fs::write(at("short.raw"), [1; 7]).unwrap();
    refused(&at("short.raw"), None, Size, &["7 bytes"]);

    let raw = make_raw(dir.path(), &[1; 4096]);
    for name in ["image.img", "image", "image.RAW", "image.vmdk"] {
        fs::copy(&raw, at(name)).unwrap();
        refused(&at(name), None, Format, &["--format"]);
        assert!(open_image(&at(name), Some(ImageFormat::Raw), BaseCache::Host).is_ok());
    }
    refused(&raw, Some(ImageFormat::Qcow2), Format, &["not a qcow2 image"]);

    // A guest can write qcow2's magic at the start of its raw disk: then a person must say what it is.
    convert(&raw, &at("named.raw"), &[]);
    refused(&at("named.raw"), None, Format, &["begins like a qcow2", "--format"]);
    let opened = open_image(&at("named.raw"), Some(ImageFormat::Raw), BaseCache::Host).unwrap();
    let file_bytes = fs::metadata(at("named.raw")).unwrap().len();
    assert_eq!((opened.format, opened.virtual_size_bytes), (ImageFormat::Raw, file_bytes));
    let opened = open_image(&at("named.raw"), Some(ImageFormat::Qcow2), BaseCache::Host).unwrap();
    assert_eq!((opened.format, opened.virtual_size_bytes), (ImageFormat::Qcow2, 4096));
}

#[test]
fn an_image_is_opened_for_reading_only() {
    let dir = dir();
    let path = make_raw(dir.path(), &[1; 4096]);
    let opened = open_image(&path, None, BaseCache::Host).unwrap();
    assert!(File::from(opened.file).write_at(b"x", 0).is_err());
}

#[test]
fn no_permission_and_no_o_direct_are_said_in_words() {
    let dir = dir();
    let path = make_raw(dir.path(), &[1; 4096]);
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o000)).unwrap();
    // Root may read everything: then there is nothing to see.
    if File::open(&path).is_err() {
        refused(&path, None, ImageErrorKind::Permission, &["permission"]);
    }
    // /proc is the one file system that is everywhere and has no O_DIRECT.
    let error = open_image(Path::new("/proc/version"), Some(ImageFormat::Raw), BaseCache::None).unwrap_err();
    assert!(matches!(error.kind(), ImageErrorKind::Direct | ImageErrorKind::Size), "{error}");
    let shm = tempfile::Builder::new().suffix(".raw").tempfile_in("/dev/shm").unwrap();
    shm.as_file().set_len(4096).unwrap();
    match open_image(shm.path(), None, BaseCache::None) {
        Ok(_) => println!("this kernel's tmpfs has O_DIRECT"),
        Err(error) => {
            assert_eq!(error.kind(), ImageErrorKind::Direct);
            assert!(error.to_string().contains("--base-cache host"), "{error}");
        }
    }
}

#[test]
fn a_worker_refuses_an_image_that_changed_since_it_was_opened() {
    let dir = dir();
    let raw = make_raw(dir.path(), &[1; 8192]);
    let path = dir.path().join("image.qcow2");
    convert(&raw, &path, &[]);
    let opened = open_image(&path, None, BaseCache::Host).unwrap();
    let again: OwnedFd = opened.file.as_fd().try_clone_to_owned().unwrap();
    let error = BaseReader::qcow2(again, 4096, false).err().unwrap();
    assert_eq!(error.kind(), ImageErrorKind::Changed);
    let words = error.to_string();
    assert!(words.contains("8192") && words.contains("4096"), "{words}");
    poke(&path, 79, &[4]);
    let error = BaseReader::qcow2(opened.file, 8192, false).err().unwrap();
    assert_eq!(error.kind(), ImageErrorKind::Unsupported);
    assert!(error.to_string().contains("another file"), "{error}");
}

// ---- Damaged images -------------------------------------------------------------------------------------------

/// Panics of reader threads: they would otherwise look like an I/O error.
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn count_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().name() == Some("base-reader") {
            PANICS.fetch_add(1, Ordering::SeqCst);
        }
        before(info);
    }));
}

/// Reads all of it, whatever comes; each job must come back. Returns how many reads failed.
fn read_whatever(path: &Path, cache: BaseCache, len: u32) -> usize {
    let Ok(opened) = open_image(path, Some(ImageFormat::Qcow2), cache) else { return 1 };
    let size = opened.virtual_size_bytes;
    let Ok(mut reader) = BaseReader::qcow2(opened.file, size, cache == BaseCache::None) else { return 1 };
    let size = size.min(1 << 20);
    let mut failed = 0;
    let mut jobs = 0;
    for at in (0..size).step_by(len as usize) {
        reader.submit(at, at, len.min((size - at) as u32), Vec::new());
        jobs += 1;
    }
    for _ in 0..jobs {
        let done = wait(&mut reader);
        if let Err(errno) = done.result {
            assert!([libc::EIO, libc::EINVAL].contains(&errno), "errno {errno}");
            failed += 1;
        }
    }
    failed
}

#[test]
fn a_truncated_image_fails_only_where_something_is_missing() {
    let dir = dir();
    let mut random = Random::new(0x5eed_0006);
    let bytes: Vec<u8> = (0..(1 << 20) / 8).flat_map(|_| random.next().to_le_bytes()).collect();
    let raw = make_raw(dir.path(), &bytes);
    for options in [
        &["-S", "0"][..],
        &["-c"],
        &["-S", "0", "-o", "cluster_size=4k"],
        &["-c", "-o", "compression_type=zstd"],
    ] {
        let whole = dir.path().join("whole.qcow2");
        convert(&raw, &whole, options);
        let image = fs::read(&whole).unwrap();
        let path = dir.path().join("cut.qcow2");
        let mut right = 0;
        for cut in 1..60 {
            let len = image.len() - (image.len() * cut / 60).max(1);
            fs::write(&path, &image[..len]).unwrap();
            let Ok(opened) = open_image(&path, None, BaseCache::Host) else { continue };
            let mut reader = BaseReader::qcow2(opened.file, opened.virtual_size_bytes, false).unwrap();
            let mut wrong = 0;
            for at in (0..bytes.len()).step_by(4096) {
                let done = read(&mut reader, at as u64, 4096);
                match done.result {
                    Ok(()) => {
                        assert!(done.buffer == bytes[at..at + 4096], "a cut image gives wrong data at {at}");
                        right += 1;
                    }
                    Err(errno) => {
                        assert_eq!(errno, libc::EIO);
                        wrong += 1;
                    }
                }
                for extent in done.extents {
                    if let ExtentKind::Raw { file_offset } = extent.kind {
                        assert!(file_offset + extent.len <= len as u64, "an extent past the end of the file");
                    }
                }
            }
            // Anything beyond the last cluster's padding that is missing must show.
            assert!(wrong > 0 || cut == 1, "{options:?} cut by {cut}/60 reads as if it were whole");
        }
        assert!(right > 1000, "{right}");
    }
}

#[test]
fn flipped_bits_cost_a_read_and_never_the_thread() {
    count_panics();
    let dir = dir();
    let mut random = Random::new(0x5eed_0007);
    let flips = std::env::var("SPILLWAY_FLIPS").ok().and_then(|s| s.parse().ok()).unwrap_or(400);
    let bytes = content(&mut random, 384 * 1024);
    let raw = make_raw(dir.path(), &bytes);
    let kinds: &[&[&str]] = &[
        &["-o", "compat=0.10,cluster_size=4k"],
        &["-o", "cluster_size=512"],
        &["-c"],
        &["-c", "-o", "cluster_size=4k"],
        &["-c", "-o", "compression_type=zstd"],
        &["-c", "-o", "compression_type=zstd,cluster_size=4k"],
    ];
    let (mut failed, mut whole) = (0, 0);
    for (i, options) in kinds.iter().enumerate() {
        // A file of its own: the thread before may not have let go of its image's lock yet.
        let path = dir.path().join(format!("{i}.qcow2"));
        convert(&raw, &path, options);
        assert_eq!(read_whatever(&path, BaseCache::Host, 65536), 0);
        let image = fs::read(&path).unwrap();
        let be64 = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap()) as usize;
        let l1 = be64(40);
        let l2 = be64(l1) & 0x00ff_ffff_ffff_fe00;
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        for i in 0..flips {
            let at = match i % 5 {
                0 => random.below(112) as usize,
                1 => l1 + random.below(8) as usize,
                2 | 3 => l2 + random.below(8 * 96) as usize,
                _ => random.below(image.len() as u64) as usize,
            };
            let at = at.min(image.len() - 1);
            let flipped = match random.below(4) {
                0 => random.next() as u8,
                1 => 0xff,
                _ => image[at] ^ (1 << random.below(8)),
            };
            file.write_all_at(&[flipped], at as u64).unwrap();
            let cache = if i % 16 == 0 { BaseCache::None } else { BaseCache::Host };
            if read_whatever(&path, cache, 32768) > 0 {
                failed += 1
            } else {
                whole += 1
            }
            assert_eq!(PANICS.load(Ordering::SeqCst), 0, "{options:?}: byte {at} = {flipped:#x} panics");
            file.write_all_at(&image[at..=at], at as u64).unwrap();
        }
        // Whole stretches of noise over the tables and the data.
        for _ in 0..flips / 10 {
            let at = [l1, l2, random.below(image.len() as u64) as usize][random.below(3) as usize];
            let noise: Vec<u8> = (0..64).flat_map(|_| random.next().to_le_bytes()).collect();
            let end = (at + noise.len()).min(image.len());
            file.write_all_at(&noise[..end - at], at as u64).unwrap();
            read_whatever(&path, BaseCache::Host, 32768);
            assert_eq!(PANICS.load(Ordering::SeqCst), 0, "{options:?}: noise at {at} panics");
            file.write_all_at(&image[at..end], at as u64).unwrap();
        }
        assert_eq!(read_whatever(&path, BaseCache::Host, 65536), 0, "restored");
    }
    println!("{failed} flips failed a read, {whole} did not");
    assert!(failed > 100 && whole > 100, "{failed} {whole}");
}

#[test]
fn a_bad_entry_fails_its_own_cluster_only() {
    let dir = dir();
    let mut random = Random::new(0x5eed_0008);
    let bytes: Vec<u8> = (0..(1 << 20) / 8).flat_map(|_| random.next().to_le_bytes()).collect();
    let raw = make_raw(dir.path(), &bytes);
    let path = dir.path().join("image.qcow2");
    convert(&raw, &path, &[]);
    let image = fs::read(&path).unwrap();
    let be64 = |at: u64| u64::from_be_bytes(image[at as usize..at as usize + 8].try_into().unwrap());
    let l2 = be64(be64(40)) & 0x00ff_ffff_ffff_fe00;
    let good = be64(l2 + 5 * 8);
    let bad = [
        good | 2,                        // a reserved bit
        good | 1 << 60,                  // another
        good | 512,                      // not at a cluster
        (1 << 40) | 1 << 63,             // far past the end of the file
        1 << 62 | 1 << 40,               // compressed, past the end
        1 << 62 | 0x1234,                // compressed, but what is there is not
        1 << 62 | 0x3fff << 48 | 0x1234, // the same, as long as can be
    ];
    for entry in bad {
        poke(&path, l2 + 5 * 8, &u64::to_be_bytes(entry));
        let mut reader = start(&path, BaseCache::Host);
        for cluster in 0..16u64 {
            let done = read(&mut reader, cluster * 65536 + 512, 4096);
            let at = cluster as usize * 65536 + 512;
            if cluster == 5 {
                assert_eq!(done.result, Err(libc::EIO), "entry {entry:#x}");
            } else {
                assert_eq!(done.result, Ok(()));
                assert!(done.buffer == bytes[at..at + 4096]);
            }
            for extent in done.extents {
                let end = extent.offset + extent.len;
                let over = extent.offset < 6 * 65536 && end > 5 * 65536;
                assert!(!over || extent.kind == ExtentKind::Compressed, "{entry:#x}: {extent:?}");
            }
        }
        // A read over it fails as a whole.
        assert_eq!(read(&mut reader, 4 * 65536, 256 * 1024).result, Err(libc::EIO));
    }
}

// ---- Writers are kept away ------------------------------------------------------------------------------------

#[test]
fn qemu_cannot_write_to_an_image_in_use_and_an_image_being_written_is_refused() {
    let dir = dir();
    let raw = make_raw(dir.path(), &vec![1; 1 << 20]);
    let path = dir.path().join("image.qcow2");
    convert(&raw, &path, &[]);
    let before = fs::read(&path).unwrap();
    let write = || {
        let out =
            Command::new("qemu-io").args(["-f", "qcow2", text(&path), "-c", "write -P 9 0 64k"]).output();
        out.unwrap().status.success()
    };
    // Two readers, and QEMU as a third, get along.
    let first = open_image(&path, None, BaseCache::Host).unwrap();
    let second = open_image(&path, None, BaseCache::None).unwrap();
    run("qemu-img", &["check", "-q", text(&path)]);
    // The fd that went to another process, so to speak, keeps the lock.
    let kept = first.file.try_clone().unwrap();
    drop((first, second));
    assert!(!write());
    assert!(fs::read(&path).unwrap() == before);
    drop(kept);
    assert!(write());

    let mut writer = Command::new("qemu-io")
        .args(["-f", "qcow2", text(&path)])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // Once it answers a read it has the image open.
    writer.stdin.as_mut().unwrap().write_all(b"read 0 512\n").unwrap();
    let mut answer = [0; 1];
    writer.stdout.as_mut().unwrap().read_exact(&mut answer).unwrap();
    let error = open_image(&path, None, BaseCache::Host).expect_err("a writer goes unnoticed");
    assert_eq!(error.kind(), ImageErrorKind::InUse, "{error}");
    drop(writer.stdin.take());
    writer.wait().unwrap();
    assert!(open_image(&path, None, BaseCache::Host).is_ok());
}

// ---- Holes of raw images --------------------------------------------------------------------------------------

/// All extents of a raw image, as those who ask for them get them.
fn holes(path: &Path, cache: BaseCache) -> Vec<Extent> {
    let opened = open_image(path, Some(ImageFormat::Raw), cache).unwrap();
    let size = opened.virtual_size_bytes;
    let mut reader = BaseReader::holes(opened.file, size, cache == BaseCache::None).unwrap();
    let mut extents: Vec<Extent> = Vec::new();
    let mut at = 0;
    while at < size {
        reader.submit_map(1, at, size - at);
        let done = wait(&mut reader);
        assert!((1..=64).contains(&done.extents.len()) && done.store_reads.is_empty());
        for extent in done.extents {
            assert_eq!(extent.offset, at, "they follow one another");
            assert!(extent.len > 0 && extent.len % 512 == 0);
            at = extent.end();
            extents.push(extent);
        }
    }
    assert_eq!(at, size);
    extents
}

#[test]
fn holes_of_a_raw_image_are_zero_and_nothing_else_is() {
    let dir = dir();
    let mut random = Random::new(0x5eed_0022);
    let path = dir.path().join("sparse.raw");
    let size = (32 << 20) + 512;
    let file = File::create(&path).unwrap();
    file.set_len(size).unwrap();
    for _ in 0..300 {
        let at = random.below(size / 512) * 512;
        let bytes = vec![random.below(255) as u8 + 1; (random.below(40) + 1) as usize * 512];
        file.write_all_at(&bytes[..bytes.len().min((size - at) as usize)], at).unwrap();
    }
    let content = fs::read(&path).unwrap();
    for cache in [BaseCache::Host, BaseCache::None] {
        let extents = holes(&path, cache);
        let (mut zero, mut plain) = (0, 0);
        for extent in &extents {
            let bytes = &content[extent.offset as usize..extent.end() as usize];
            match extent.kind {
                ExtentKind::Zero => {
                    assert!(bytes.iter().all(|byte| *byte == 0), "{extent:?}");
                    zero += extent.len;
                }
                ExtentKind::Raw { file_offset } => {
                    assert_eq!(file_offset, extent.offset);
                    plain += extent.len;
                }
                ExtentKind::Compressed => panic!("{extent:?}"),
            }
        }
        assert!(zero > size / 2 && plain > 1 << 20 && extents.len() > 64, "{zero} {plain} {}", extents.len());
    }
}

/// A file that has become shorter has no hole where it ended: reads there fail.
#[test]
fn what_the_file_has_lost_is_no_hole() {
    let dir = dir();
    let path = dir.path().join("cut.raw");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let opened = open_image(&path, Some(ImageFormat::Raw), BaseCache::Host).unwrap();
    let mut reader = BaseReader::holes(opened.file, 1 << 20, false).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    reader.submit_map(1, 0, 1 << 20);
    let extents = wait(&mut reader).extents;
    assert!(extents.iter().all(|extent| extent.kind != ExtentKind::Zero), "{extents:?}");
    assert_eq!(extents.last().map(Extent::end), Some(1 << 20));
}
