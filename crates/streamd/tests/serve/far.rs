//! A far and broken store: whatever it does, a disk gets the bytes of its image or none.

use crate::changes::{peak_bytes, until};
use crate::client::{Client, Got};
use crate::scene::{Registry, Streamd};
use spillway_image::digests::of_chunk;
use spillway_registry::job::Place;
use spillway_registry::serve::{ControlReply, ControlRequest, Fill};
use spillway_registry::{Index, chunk_key, compress};
use spillway_testkit::Rng;
use spillway_testkit::store_proxy::{Origin, StoreFault, StoreModel, StoreProxy, StoreProxySettings};
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// Chunks of each image.
const CHUNKS: u32 = 48;
/// Faults that are injected at least, without SPILLWAY_STORE_FAULTS, and those for each image: many requests at a time, since each fault
/// of a chunk is followed by a pause.
const FAULTS: u64 = 2000;
const FAULTS_OF_IMAGE: u64 = 500;

/// A chunk that needs few bytes in a registry: some are random, and the rest repeats a word.
fn chunk(image: u64, chunk: u32) -> Vec<u8> {
    let mut random = Rng::new(image << 32 | u64::from(chunk));
    let word = random.next_u64().to_le_bytes();
    let mut bytes = word.repeat(MIB / 8);
    let some = 8 * random.below(500) as usize;
    bytes[..some].as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = random.next_u64().to_le_bytes());
    bytes
}

fn index(image: u64) -> Index {
    let digests = (0..CHUNKS).map(|n| of_chunk(&chunk(image, n))).collect();
    Index { size_bytes: u64::from(CHUNKS) << 20, chunk_bytes: 1 << 20, digests }
}

/// Writes the chunks of an image to a registry. Returns its index.
fn store(folder: &Path, image: u64) -> Index {
    let index = index(image);
    for (n, digest) in (0..).zip(&index.digests) {
        let path = folder.join(chunk_key(digest));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, compress(&chunk(image, n))).unwrap();
    }
    index
}

fn serve(streamd: &Streamd, index: &Index, url: &str) {
    let list = tempfile::tempfile().unwrap();
    list.write_all_at(&index.digests.concat(), 0).unwrap();
    let digest = index.root().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let request = ControlRequest::Serve {
        digest: format!("sha256:{digest}"),
        size_bytes: index.size_bytes,
        place: Place {
            url: url.into(),
            endpoint: None,
            region: None,
            single_writer: false,
            credentials: None,
        },
        fill: Fill::Nothing,
        dry_run: false,
    };
    assert_eq!(streamd.control.control(&request, &[list.as_fd()]), ControlReply::Done);
}

/// All faults, nearly always. Most are of those after which a chunk is soon asked for again.
fn broken() -> StoreModel {
    let chances = [
        (StoreFault::FlippedBit, 0.32),
        (StoreFault::OtherObject, 0.25),
        (StoreFault::Status404, 0.1),
        (StoreFault::CutBody, 0.1),
        (StoreFault::Reset, 0.05),
        (StoreFault::Status503, 0.05),
        (StoreFault::StalledBody, 0.04),
        (StoreFault::Status500, 0.02),
        (StoreFault::Status429, 0.02),
        (StoreFault::Status403, 0.02),
    ];
    let stall_ns = Duration::from_millis(50).as_nanos() as u64;
    StoreModel { faults: chances.into(), at: "/chunks/".into(), stall_ns, ..StoreModel::default() }
}

/// Reads a whole image. Chunks that were given up are asked for again.
fn read(streamd: &Streamd, image: u64, index: &Index) {
    let mut client = Client::open_sized(&streamd.socket, &index.root(), index.size_bytes);
    (0..CHUNKS).for_each(|chunk| client.ask(chunk));
    let mut resident = 0;
    while resident < CHUNKS {
        match client.answer() {
            (n, Got::Resident) => {
                assert!(client.has(n) && client.read(n) == chunk(image, n), "image {image}, chunk {n}");
                resident += 1;
            }
            (n, Got::Damaged) => {
                assert!(!client.has(n));
                client.ask(n);
            }
            (n, Got::Passed(_)) => panic!("there is space for {n}"),
        }
    }
}

#[test]
fn no_fault_of_a_store_becomes_a_wrong_byte() {
    let seed = std::env::var("SPILLWAY_SEED").ok().map_or(3, |seed| seed.parse().unwrap());
    println!("SPILLWAY_SEED={seed}");
    let faults = std::env::var("SPILLWAY_STORE_FAULTS").map_or(FAULTS, |faults| faults.parse().unwrap());
    let images = faults.div_ceil(FAULTS_OF_IMAGE);
    let registry = Registry::new(&[]);
    let indexes: Vec<_> = (0..images).map(|image| store(&registry.shared(), image)).collect();
    let settings = StoreProxySettings::new(Origin::Folder(registry.shared()));
    let proxy = StoreProxy::start(StoreProxySettings { model: broken(), seed, ..settings }).unwrap();
    let streamd = Streamd::start(&registry, 4 << 30);
    indexes.iter().for_each(|index| serve(&streamd, index, &proxy.url()));
    thread::scope(|scope| {
        let read = |(image, index)| {
            let streamd = &streamd;
            scope.spawn(move || read(streamd, image, index))
        };
        let readers: Vec<_> = (0..).zip(&indexes).map(read).collect();
        let until = Instant::now() + Duration::from_secs(120 + faults / 100);
        while proxy.figures().total_faults() < faults {
            assert!(Instant::now() < until, "{:?}", proxy.figures().faults);
            assert!(!readers.iter().all(|reader| reader.is_finished()), "they had too few faults");
            thread::sleep(Duration::from_millis(5));
        }
        proxy.set_model(StoreModel::default()).unwrap();
    });
    let figures = proxy.figures();
    println!("{:?}", figures.faults);
    assert!(StoreFault::ALL.iter().all(|fault| figures.faults[fault] > 20), "{:?}", figures.faults);
    let cache = streamd.figures();
    assert!(cache.wrong_chunks > 0 && cache.passed_chunks == 0, "{cache:?}");
    assert_eq!(cache.store_chunks, images * u64::from(CHUNKS), "each is kept once");
}

#[test]
fn a_user_that_has_gone_is_not_answered_for_ever() {
    let registry = Registry::new(&[]);
    let [first, second] = [0, 1].map(|image| store(&registry.shared(), image));
    let proxy = StoreProxy::start(StoreProxySettings::new(Origin::Folder(registry.shared()))).unwrap();
    let streamd = Streamd::start(&registry, 3 << 20);
    [&first, &second].iter().for_each(|index| serve(&streamd, index, &proxy.url()));
    let open = |index: &Index| Client::open_sized(&streamd.socket, &index.root(), index.size_bytes);
    let mut user = open(&first);
    assert!(matches!(user.get(0), Got::Resident));
    // A chunk comes late, and who asked for it goes.
    let stall_ns = Duration::from_millis(800).as_nanos() as u64;
    let next = vec![StoreFault::StalledBody];
    proxy.set_model(StoreModel { next, at: "/chunks/".into(), stall_ns, ..StoreModel::default() }).unwrap();
    user.ask(1);
    until("the chunk is on its way", || proxy.figures().total_faults() > 0);
    drop(user);
    // Another image takes the space: the first one has another memory from then on.
    let mut other = open(&second);
    (0..3).for_each(|chunk| assert!(matches!(other.get(chunk), Got::Resident)));
    assert!(streamd.figures().evicted_chunks > 0);
    drop(other);
    until("the chunk has come", || streamd.figures().flights == 0);
    let before = streamd.figures();
    assert_eq!(before.store_chunks, 5, "it came");
    thread::sleep(Duration::from_millis(200));
    let asked = streamd.figures().cache_chunks - before.cache_chunks;
    assert!(asked < 2, "nobody asks, and {asked} chunks were found");
    let mut user = open(&first);
    assert!(matches!(user.get(1), Got::Resident) && user.has(1) && user.read(1) == chunk(0, 1));
}

#[test]
fn a_chunk_is_copied_from_any_of_very_many_places() {
    const MANY: u32 = 5000;
    let registry = Registry::new(&[]);
    let digest = store(&registry.shared(), 0).digests[0];
    let index = Index {
        size_bytes: u64::from(MANY) << 20,
        chunk_bytes: 1 << 20,
        digests: vec![digest; MANY as usize],
    };
    let proxy = StoreProxy::start(StoreProxySettings::new(Origin::Folder(registry.shared()))).unwrap();
    let streamd = Streamd::start(&registry, 1 << 30);
    serve(&streamd, &index, &proxy.url());
    let mut client = Client::open_sized(&streamd.socket, &index.root(), index.size_bytes);
    // The only place that has it is the last.
    for place in [MANY - 1, 0, MANY / 2] {
        assert!(matches!(client.get(place), Got::Resident) && client.read(place) == chunk(0, 0), "{place}");
    }
    let figures = streamd.figures();
    assert_eq!((figures.store_chunks, figures.seed_chunks), (1, 2));
}

#[test]
fn what_is_copied_at_a_time_takes_little_memory() {
    const IMAGES: u64 = 6;
    let registry = Registry::new(&[]);
    let first: Vec<_> = (0..IMAGES).map(|image| store(&registry.shared(), image)).collect();
    let proxy = StoreProxy::start(StoreProxySettings::new(Origin::Folder(registry.shared()))).unwrap();
    let streamd = Streamd::start(&registry, 4 << 30);
    for (image, index) in (0..).zip(&first) {
        serve(&streamd, index, &proxy.url());
        read(&streamd, image, index);
    }
    // The same chunks in images of another length.
    let second: Vec<_> = first
        .iter()
        .map(|index| {
            let digests = index.digests[..CHUNKS as usize - 1].to_vec();
            Index { size_bytes: u64::from(CHUNKS - 1) << 20, digests, ..*index }
        })
        .collect();
    second.iter().for_each(|index| serve(&streamd, index, &proxy.url()));
    fs::write(format!("/proc/{}/clear_refs", streamd.id()), "5").unwrap();
    let before = peak_bytes(streamd.id());
    let mut clients: Vec<_> = second
        .iter()
        .map(|index| Client::open_sized(&streamd.socket, &index.root(), index.size_bytes))
        .collect();
    clients.iter_mut().for_each(|client| (0..CHUNKS - 1).for_each(|chunk| client.ask(chunk)));
    for client in &mut clients {
        (1..CHUNKS).for_each(|_| assert!(matches!(client.answer(), (_, Got::Resident))));
    }
    let grown = (peak_bytes(streamd.id()) - before) >> 20;
    assert_eq!(streamd.figures().seed_chunks, IMAGES * u64::from(CHUNKS - 1));
    println!("{grown} MiB above {} MiB", before >> 20);
    assert!(grown < 48, "{grown} MiB");
}

#[test]
fn chunks_that_a_store_refuses_keep_no_others_from_coming() {
    // More than are asked for at a time of an image, in whatever way.
    const REFUSED: u32 = 80;
    const MANY: u32 = 100;
    let registry = Registry::new(&[]);
    let digests: Vec<_> =
        (0..3).flat_map(|image| store(&registry.shared(), image).digests).take(MANY as usize).collect();
    let index = Index { size_bytes: u64::from(MANY) << 20, chunk_bytes: 1 << 20, digests };
    let paths = index.digests.iter().map(|digest| format!("/{}", chunk_key(digest)));
    registry.web.refuse(paths.take(REFUSED as usize));
    let streamd = Streamd::start(&registry, 1 << 30);
    serve(&streamd, &index, &registry.web.url);
    let mut clients: Vec<_> =
        (0..3).map(|_| Client::open_sized(&streamd.socket, &index.root(), index.size_bytes)).collect();
    let (last, first) = clients.split_last_mut().unwrap();
    (0..REFUSED).for_each(|chunk| first[chunk as usize % 2].ask(chunk));
    until("they are refused", || registry.web.gets("/chunks/").len() == REFUSED as usize);
    for n in REFUSED..MANY {
        assert!(
            matches!(last.get(n), Got::Resident) && last.read(n) == chunk(u64::from(n / CHUNKS), n % CHUNKS)
        );
    }
    registry.web.refuse([]);
    for n in 0..REFUSED {
        assert!(matches!(first[n as usize % 2].answer(), (_, Got::Resident)), "{n}");
    }
}
