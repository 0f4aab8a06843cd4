//! What another version has already is copied from it.

use crate::client::{Client, Got};
use crate::scene::{self, CHUNKS, RECORDS, Registry, Streamd, blocks_bytes, chunk_len, content};
use crate::web::Fault;
use spillway_registry::serve::{ControlReply, Fill};
use spillway_testkit::Rng;
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// The chunk that the second version has anew, and one whose content it has at another place, too.
const NEW: u32 = 2;
const MOVED: (u32, u32) = (4, 7);

fn chunk_of(bytes: &mut [u8], chunk: u32) -> &mut [u8] {
    let at = (u64::from(chunk) * MIB) as usize;
    &mut bytes[at..at + chunk_len(chunk) as usize]
}

/// A registry with two versions of an image.
fn two_versions() -> Registry {
    let first = content(1);
    let mut second = first.clone();
    chunk_of(&mut second, NEW).fill(9);
    let moved = chunk_of(&mut second, MOVED.0).to_vec();
    chunk_of(&mut second, MOVED.1).copy_from_slice(&moved);
    Registry::of(vec![first, second])
}

/// Asks for a chunk of an image, which must be right. Returns whether it is kept.
fn right(registry: &Registry, n: usize, client: &mut Client, chunk: u32) -> bool {
    let (bytes, is_kept) = match client.get(chunk) {
        Got::Resident => (client.read(chunk), true),
        Got::Passed(bytes) => (bytes, false),
        Got::Damaged => panic!("{chunk} of {n}"),
    };
    assert!(bytes == registry.images[n].chunk(chunk), "{chunk} of {n}");
    is_kept
}

fn unchanged() -> impl Iterator<Item = u32> {
    (0..CHUNKS).filter(|chunk| *chunk != NEW)
}

#[test]
fn only_what_is_new_in_a_version_is_fetched() {
    let registry = two_versions();
    let streamd = Streamd::start(&registry, 1 << 30);
    let mut first = Client::open(&streamd.socket, &registry.images[0].root);
    assert!((0..CHUNKS).all(|chunk| right(&registry, 0, &mut first, chunk)));
    assert_eq!(streamd.figures().seed_chunks, 0);
    registry.web.set(Fault::Refuses);
    registry.web.forget();
    let mut second = Client::open(&streamd.socket, &registry.images[1].root);
    assert!(unchanged().all(|chunk| right(&registry, 1, &mut second, chunk)));
    let copied = unchanged().filter(|chunk| !matches!(chunk, 3 | 6));
    let (chunks, bytes) = copied.fold((0, 0), |(n, bytes), chunk| (n + 1, bytes + chunk_len(chunk)));
    let figures = streamd.figures();
    assert_eq!((figures.seed_chunks, figures.seed_bytes, figures.wrong_chunks), (chunks, bytes, 0));
    assert_eq!(figures.used_bytes, blocks_bytes(&registry.cache()));
    second.ask(NEW);
    thread::sleep(Duration::from_millis(300));
    assert!(!second.has(NEW));
    registry.web.set(Fault::None);
    assert!(matches!(second.answer(), (NEW, Got::Resident)));
    assert!(second.read(NEW) == registry.images[1].chunk(NEW));
    assert_eq!(registry.web.gets("/chunks/").len(), 1);
}

#[test]
fn a_place_of_the_same_image_will_do() {
    let registry = two_versions();
    let streamd = Streamd::start(&registry, 1 << 30);
    let mut client = Client::open(&streamd.socket, &registry.images[1].root);
    assert!(right(&registry, 1, &mut client, MOVED.0));
    registry.web.set(Fault::Refuses);
    assert!(right(&registry, 1, &mut client, MOVED.1));
}

#[test]
fn what_is_wrong_in_another_version_is_never_copied() {
    let registry = two_versions();
    for is_started_again in [false, true] {
        let mut streamd = Streamd::start(&registry, 1 << 30);
        let mut first = Client::open(&streamd.socket, &registry.images[0].root);
        assert!((0..CHUNKS).all(|chunk| right(&registry, 0, &mut first, chunk)));
        for chunk in [0, 5, CHUNKS - 1] {
            scene::overwrite(&registry, 0, chunk);
        }
        if is_started_again {
            drop(first);
            streamd.kill();
            streamd = Streamd::start(&registry, 1 << 30);
        }
        registry.web.forget();
        let mut second = Client::open(&streamd.socket, &registry.images[1].root);
        assert!(unchanged().all(|chunk| right(&registry, 1, &mut second, chunk)));
        assert_eq!(registry.web.gets("/chunks/").len(), 3, "the registry has them");
        drop((second, streamd));
        std::fs::remove_dir_all(registry.cache()).unwrap();
        std::fs::create_dir(registry.cache()).unwrap();
    }
}

#[test]
fn chunks_of_a_version_that_nobody_uses_move_to_the_next() {
    let registry = two_versions();
    let budget = 8 * MIB + 4096;
    let streamd = Streamd::start(&registry, budget);
    let mut first = Client::open(&streamd.socket, &registry.images[0].root);
    assert!((0..CHUNKS).all(|chunk| right(&registry, 0, &mut first, chunk)));
    assert_eq!(streamd.figures().used_bytes, budget);
    registry.web.set(Fault::Refuses);
    // As long as somebody uses it, the chunks are only passed on.
    let mut second = Client::open(&streamd.socket, &registry.images[1].root);
    assert!(!right(&registry, 1, &mut second, 0) && !second.has(0));
    drop(first);
    // The moved one comes first: then its other place is copied from this image.
    let order = [MOVED.0].into_iter().chain(unchanged().filter(|chunk| *chunk != MOVED.0));
    for chunk in order.filter(|chunk| *chunk != MOVED.1) {
        assert!(right(&registry, 1, &mut second, chunk), "{chunk}");
        let (counted, taken) = (streamd.figures().used_bytes, blocks_bytes(&registry.cache()));
        assert!(counted <= budget && taken <= budget + RECORDS, "{counted} {taken}");
    }
    assert_eq!(streamd.figures().seed_chunks, 1 + 7);
    assert_eq!(streamd.figures().evicted_chunks, 7);
}

#[test]
fn what_is_brought_before_anybody_asks_is_copied_too() {
    let registry = two_versions();
    let streamd = Streamd::start(&registry, 1 << 30);
    let until = |n: usize, unfilled: u64| {
        let deadline = Instant::now() + Duration::from_secs(30);
        while streamd.image(&registry, n).unfilled_chunks != unfilled {
            assert!(Instant::now() < deadline, "{:?}", streamd.image(&registry, n));
            thread::sleep(Duration::from_millis(5));
        }
    };
    assert_eq!(streamd.serve(&registry, 0, Fill::Chunks(vec![0, 1, 5])), ControlReply::Done);
    until(0, 0);
    registry.web.set(Fault::Refuses);
    assert_eq!(streamd.serve(&registry, 1, Fill::Chunks(vec![5, 0, 1])), ControlReply::Done);
    until(1, 0);
    registry.web.set(Fault::None);
    assert_eq!(streamd.serve(&registry, 0, Fill::All), ControlReply::Done);
    until(0, 0);
    registry.web.forget();
    assert_eq!(streamd.serve(&registry, 1, Fill::All), ControlReply::Done);
    until(1, 0);
    assert_eq!(registry.web.gets("/chunks/").len(), 1);
}

#[test]
fn no_byte_is_wrong_while_what_is_copied_is_removed() {
    let mut contents = vec![content(1)];
    for n in 1..4 {
        let mut next = contents[0].clone();
        chunk_of(&mut next, n).fill(n as u8);
        contents.push(next);
    }
    let registry = Registry::of(contents);
    let budget = 12 * MIB;
    let streamd = Streamd::start(&registry, budget);
    thread::scope(|scope| {
        for thread in 0..4 {
            let (registry, streamd) = (&registry, &streamd);
            scope.spawn(move || {
                let mut random = Rng::new(thread);
                for _ in 0..12 {
                    let n = random.below(4) as usize;
                    let mut client = Client::open(&streamd.socket, &registry.images[n].root);
                    let from = random.below(u64::from(CHUNKS)) as u32;
                    (0..CHUNKS).for_each(|n| client.ask((n + from) % CHUNKS));
                    for _ in 0..CHUNKS {
                        let bytes = match client.answer() {
                            (chunk, Got::Resident) => (chunk, client.read(chunk)),
                            (chunk, Got::Passed(bytes)) => (chunk, bytes),
                            (chunk, Got::Damaged) => panic!("{chunk} of {n}"),
                        };
                        assert!(bytes.1 == registry.images[n].chunk(bytes.0), "{} of {n}", bytes.0);
                    }
                    assert!(blocks_bytes(&registry.cache()) <= budget + RECORDS);
                }
            });
        }
    });
    let figures = streamd.figures();
    assert!(
        figures.seed_chunks > 0 && figures.evicted_chunks > 0 && figures.wrong_chunks == 0,
        "{figures:?}"
    );
}
