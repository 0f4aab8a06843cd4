//! Raw images that are compared with their digests as they are read.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use spillway_image::digests::{CHUNK_BYTES, OF_ZEROES, list_bytes, of_chunk};
use spillway_image::{BaseReader, Extent, ExtentKind, Finished, open_image};
use spillway_layout::{BaseCache, ImageFormat};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

const CHUNK: usize = CHUNK_BYTES as usize;
/// Three chunks, of which the second is zeroes, and a short one.
const SIZE: usize = 3 * CHUNK + 512;

fn image(dir: &Path) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..SIZE).map(|at| ((at * 31) >> 9) as u8 | 1).collect();
    bytes[CHUNK..2 * CHUNK].fill(0);
    fs::write(dir.join("image.raw"), &bytes).unwrap();
    let list: Vec<u8> = bytes.chunks(CHUNK).flat_map(of_chunk).collect();
    assert_eq!(list.len() as u64, list_bytes(SIZE as u64));
    fs::write(dir.join("digests"), list).unwrap();
    bytes
}

fn start(dir: &Path, cache: BaseCache) -> BaseReader {
    let opened = open_image(&dir.join("image.raw"), Some(ImageFormat::Raw), cache).unwrap();
    let list = File::open(dir.join("digests")).unwrap();
    BaseReader::checked(opened.file, opened.virtual_size_bytes, cache == BaseCache::None, list.into())
        .unwrap()
}

fn read(reader: &mut BaseReader, offset: usize, len: usize) -> Finished {
    reader.submit(1, offset as u64, len as u32, Vec::new());
    wait(reader)
}

fn wait(reader: &mut BaseReader) -> Finished {
    let begun = Instant::now();
    loop {
        match reader.finished() {
            Some(finished) => return finished,
            None => assert!(begun.elapsed() < Duration::from_secs(60), "no answer"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/var/tmp").unwrap()
}

#[test]
fn what_is_good_is_said_to_be_plain() {
    for cache in [BaseCache::Host, BaseCache::None] {
        let dir = dir();
        let bytes = image(dir.path());
        let mut reader = start(dir.path(), cache);
        let plain = |finished: &Finished| {
            let of = |e: &Extent| {
                let plain = e.kind == ExtentKind::Raw { file_offset: e.offset };
                assert!(plain || e.kind == ExtentKind::Zero);
                (e.offset as usize, e.len as usize, plain)
            };
            finished.extents.iter().map(of).collect::<Vec<_>>()
        };
        let (zeroes, rest) = ((CHUNK, CHUNK, false), (2 * CHUNK, CHUNK + 512, true));
        // The end, then two chunks at once; what is asked for lies in the middle of them.
        for (offset, len, good) in [
            (3 * CHUNK, 512, vec![(3 * CHUNK, 512, true)]),
            (CHUNK + 512, 512, vec![zeroes]),
            (2 * CHUNK - 4096, 8192, vec![zeroes, rest]),
            (CHUNK + 512, 512, vec![zeroes, rest]),
            (10 * 512, 65536, vec![(0, CHUNK, true), zeroes, rest]),
        ] {
            let finished = read(&mut reader, offset, len);
            assert_eq!(finished.result, Ok(()), "{cache:?} {offset}");
            assert!(finished.buffer == bytes[offset..offset + len], "{cache:?} {offset}");
            assert_eq!((plain(&finished), finished.damaged_at), (good, None), "{cache:?} {offset}");
        }
        let beyond = read(&mut reader, SIZE - 512, 1024);
        assert_eq!((beyond.result, beyond.extents.len()), (Err(libc::EINVAL), 0));
    }
}

#[test]
fn what_differs_is_handed_out_to_nobody_and_told_once() {
    for (at, change) in [(0, 1), (3 * CHUNK - 1, 128), (SIZE - 1, 4)] {
        let dir = dir();
        let bytes = image(dir.path());
        let file = File::options().write(true).open(dir.path().join("image.raw")).unwrap();
        file.write_all_at(&[bytes[at] ^ change], at as u64).unwrap();
        let mut reader = start(dir.path(), BaseCache::Host);
        let bad = at / CHUNK;
        for round in 0..2 {
            for chunk in 0..4 {
                let finished = read(&mut reader, chunk * CHUNK, 512);
                let is_bad = chunk == bad;
                assert_eq!(finished.result, if is_bad { Err(libc::EIO) } else { Ok(()) }, "{at} {chunk}");
                let expected = (is_bad && round == 0).then_some((bad * CHUNK) as u64);
                assert_eq!(finished.damaged_at, expected, "{at} {chunk}");
                assert!(finished.extents.iter().all(|e| e.end() <= at as u64 || e.offset > at as u64));
            }
        }
        // A read that touches both a good chunk and a bad one fails as a whole.
        let before = bad.saturating_sub(usize::from(bad > 0)) * CHUNK + CHUNK - 256;
        if bad > 0 {
            assert_eq!(read(&mut reader, before, 512).result, Err(libc::EIO), "{at}");
        }
        // Once the store gives the right bytes again they are taken.
        file.write_all_at(&[bytes[at]], at as u64).unwrap();
        let finished = read(&mut reader, bad * CHUNK, 512);
        assert_eq!(finished.result, Ok(()), "{at}");
    }
}

#[test]
fn a_file_that_has_become_shorter_is_an_error() {
    let dir = dir();
    image(dir.path());
    let mut reader = start(dir.path(), BaseCache::Host);
    File::options().write(true).open(dir.path().join("image.raw")).unwrap().set_len(CHUNK as u64).unwrap();
    assert_eq!(read(&mut reader, 0, 512).result, Ok(()));
    assert_eq!(read(&mut reader, 2 * CHUNK, 512).result, Err(libc::EIO));
    assert_eq!(read(&mut reader, 3 * CHUNK, 512).result, Err(libc::EIO));
}

/// The store is not asked for what the digests say is zero, so that it cannot damage it either; what else is there it
/// is not known to be.
#[test]
fn chunks_of_zeroes_are_known_by_their_digest() {
    assert_eq!(of_chunk(&vec![0; CHUNK]), OF_ZEROES);
    let dir = dir();
    image(dir.path());
    let file = File::options().write(true).open(dir.path().join("image.raw")).unwrap();
    file.write_all_at(&[1; 512], CHUNK as u64).unwrap();
    let mut reader = start(dir.path(), BaseCache::Host);
    reader.submit_map(2, 0, SIZE as u64);
    let finished = wait(&mut reader);
    let zeroes = Extent { offset: CHUNK_BYTES, len: CHUNK_BYTES, kind: ExtentKind::Zero };
    assert_eq!((finished.job, finished.extents), (2, vec![zeroes]));
    let finished = read(&mut reader, CHUNK, 4096);
    assert!(finished.result == Ok(()) && finished.buffer == [0; 4096] && finished.store_reads.is_empty());
}
