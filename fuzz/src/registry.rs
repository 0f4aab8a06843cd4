//! A registry whose objects the input has changed: what is resolved is the image that its digest names, what is signed is what the key
//! has signed, and a collection of garbage or a push harms no name.
//!
//! The first byte of the input says how the registry is used; the others are changes to a registry with one signed image, as
//! [`Store::change`] reads them.

use crate::input::Input;
use spillway_image::digests::ChunkDigest;
use spillway_registry::{
    ChunkSource, CollectOrder, Index, ListedObject, MOST_BOOT_CHUNKS, Manifest, Objects, PublicKey,
    PushOrder, RegistryError, RegistryErrorKind, boot_sets, chunk_key, collect, index_of, is_name, name_key,
    probe, push, resolve, versions,
};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

const NOW: i64 = 1_000_000_000;
const HOUR: i64 = 3600;
const CHUNK: u64 = 1 << 20;
/// Most objects that are listed below one folder.
const MOST_CHANGES: usize = 64;

/// A key that was made for this, and what it has signed: the manifest of [`image`] as `debian:1`.
const KEY: &str = "RWRzfZb6sW8XvnYMadvOEy0hD6sk+873+pbXFcj9k9YgPzEoO8OpMojN";
const SIGNATURE: &str = "untrusted comment: signature from minisign secret key
RURzfZb6sW8XvmOCFN+c0Cnc2JauG5v5qvz2qZtC4xV9b6hx6pHenoJJcsNn1MKnWMSfDr7693w2UX1wywRPgMNSQFpWPD+FFwM=
trusted comment: spillway debian:1 sha256:64d2cf8af356cfb61cb220c62d4897372e2d905baaaa466dae4cc6ebdb3ffe4c
+B6TeB3z5Xd5KtA6l9ZFvrlMEkT6SFX/0Q0XoYa3gzv388DQKe1MqtmbmtGSciPulZU5ieFLc+bAr1hao/iaAA==
";

fn image() -> Index {
    Index { size_bytes: 2 * CHUNK + 512, chunk_bytes: CHUNK, digests: vec![[1; 32], [2; 32], [3; 32]] }
}

fn other_image() -> Index {
    Index { size_bytes: 2 * CHUNK, chunk_bytes: CHUNK, digests: vec![[2; 32], [9; 32]] }
}

fn hex(digest: &ChunkDigest) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Objects in memory, with the time of their last write.
struct Store(Mutex<BTreeMap<String, (Vec<u8>, i64)>>);

impl Store {
    fn objects(&self) -> MutexGuard<'_, BTreeMap<String, (Vec<u8>, i64)>> {
        self.0.lock().expect("a panic ends the process")
    }

    /// The registry before its changes: an image with its name, garbage that was recorded, and an interrupted push.
    fn new() -> Store {
        let image = image();
        let folder = format!("images/{}", hex(&image.root()));
        let manifest = Manifest::of(&image);
        let old = format!("{{\"chunks\":[\"{}\"],\"images\":[],\"intents\":[]}}", hex(&[8; 32]));
        let boot = "{\"catalogs\":{\"desk\":[2,0],\"other\":[1]}}";
        let mut objects: BTreeMap<String, Vec<u8>> = [
            ("spillway.json".to_owned(), b"{\"format\":1}\n".to_vec()),
            ("names/debian/1".into(), format!("{{\"digest\":\"{}\"}}", manifest.digest).into_bytes()),
            (format!("{folder}/image.json"), manifest.to_bytes()),
            (format!("{folder}/image.caibx"), image.to_bytes()),
            (format!("{folder}/debian@1.minisig"), SIGNATURE.into()),
            (format!("{folder}/boot.json"), boot.into()),
            ("uploads/push-0.caibx".into(), other_image().to_bytes()),
            ("gc/999000000-a.json".into(), old.clone().into_bytes()),
            ("gc/b.deleting".into(), old.into_bytes()),
        ]
        .into();
        let chunks =
            image.digests.iter().chain([&[8; 32]]).map(|digest| (chunk_key(digest), b"frame".to_vec()));
        objects.extend(chunks);
        let old = NOW - 1000 * HOUR;
        Store(Mutex::new(objects.into_iter().map(|(key, bytes)| (key, (bytes, old))).collect()))
    }

    /// Makes one change to an object: which, what, and how old it is then.
    fn change(&self, input: &mut Input<'_>) {
        let (which, what) = (input.u8(), input.u8());
        let mut objects = self.objects();
        let key = match which {
            0..=239 => objects.keys().nth(usize::from(which) % objects.len().max(1)).cloned(),
            _ => {
                const FOLDERS: [&str; 8] =
                    ["names", "names/debian", "images", "chunks", "gc", "uploads", "", "probe"];
                let len = usize::from(input.u8());
                let text = String::from_utf8_lossy(input.bytes(len)).into_owned();
                Some(format!("{}/{text}", FOLDERS[usize::from(which) % FOLDERS.len()]))
            }
        };
        let Some(key) = key else { return };
        let (bytes, modified) = objects.entry(key.clone()).or_insert((Vec::new(), NOW - 1000 * HOUR));
        match what % 6 {
            0 => {
                let len = usize::from(input.u16());
                *bytes = input.bytes(len).to_vec();
            }
            1 => {
                let (at, with) = (usize::from(input.u16()), input.u8());
                let len = bytes.len().max(1);
                if let Some(byte) = bytes.get_mut(at % len) {
                    *byte ^= with;
                }
            }
            2 => bytes.truncate(usize::from(input.u16())),
            3 => {
                let len = usize::from(input.u8());
                bytes.extend_from_slice(input.bytes(len));
            }
            4 => *modified = NOW - i64::from(input.u16()) * HOUR,
            _ => drop(objects.remove(&key)),
        }
    }
}

impl Objects for Store {
    async fn get(&self, key: &str, most_bytes: u64) -> Result<Option<Vec<u8>>, RegistryError> {
        let found = self.objects().get(key).map(|(bytes, _)| bytes.clone());
        match found {
            Some(bytes) if bytes.len() as u64 > most_bytes => {
                Err(RegistryError::new(RegistryErrorKind::Damaged, format!("{key} is too large")))
            }
            found => Ok(found),
        }
    }

    async fn exists(&self, key: &str) -> Result<bool, RegistryError> {
        Ok(self.objects().contains_key(key))
    }

    async fn put(&self, key: &str, content: Vec<u8>) -> Result<(), RegistryError> {
        self.objects().insert(key.into(), (content, NOW));
        Ok(())
    }

    async fn create(&self, key: &str, content: Vec<u8>) -> Result<bool, RegistryError> {
        let is_new = !self.objects().contains_key(key);
        if is_new {
            self.objects().insert(key.into(), (content, NOW));
        }
        Ok(is_new)
    }

    async fn list(&self, folder: &str) -> Result<Vec<ListedObject>, RegistryError> {
        let prefix = format!("{folder}/");
        let objects = self.objects();
        let below = objects.iter().filter(|(key, _)| key.starts_with(&prefix));
        let listed = below.map(|(key, (bytes, modified))| ListedObject {
            key: key.clone(),
            modified_seconds: *modified,
            size_bytes: bytes.len() as u64,
        });
        Ok(listed.collect())
    }

    async fn delete(&self, keys: Vec<String>) -> Result<(), RegistryError> {
        keys.iter().for_each(|key| drop(self.objects().remove(key)));
        Ok(())
    }

    async fn pause(&self, _seconds: u64) {}
}

/// Frames of a push.
struct Frames;

impl ChunkSource for Frames {
    async fn frame(&self, _chunk: usize) -> Result<Vec<u8>, RegistryError> {
        Ok(b"frame".to_vec())
    }

    fn settled(&self, _bytes: u64) {}
}

/// The result of something that never waits for long.
fn done<T>(work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..1_000_000 {
        if let Poll::Ready(done) = work.as_mut().poll(&mut context) {
            return done;
        }
    }
    panic!("it waits for ever");
}

/// Changes a registry, and uses it.
pub fn registry_manifest(data: &[u8]) {
    let Some((&kind, changes)) = data.split_first() else { return };
    parse(changes);
    let (mut input, store) = (Input(changes), Store::new());
    for _ in 0..MOST_CHANGES {
        if input.is_empty() {
            break;
        }
        store.change(&mut input);
    }
    match kind % 4 {
        0 => read(&store),
        1 => pushed(&store),
        _ => garbage(&store, kind % 4 == 3),
    }
}

/// The bytes themselves, as whatever has no key.
fn parse(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(key) = PublicKey::parse(&text) {
        assert_eq!(PublicKey::parse(key.as_str()).expect("it is a key").as_str(), key.as_str());
    }
    if is_name(&text) {
        assert!(text.len() <= 63 && !text.contains(['/', '.', '%']));
    }
    let root = image().root();
    if let Ok(manifest) = Manifest::parse(data, &root) {
        assert_eq!(manifest.digest, format!("sha256:{}", hex(&root)));
        assert_eq!(Manifest::parse(&manifest.to_bytes(), &root).as_ref(), Ok(&manifest));
        assert!(manifest.index_bytes() > 0 && manifest.chunk_bytes == CHUNK);
    }
}

/// What is read is what its digest says, or refused.
fn read(store: &Store) {
    let root = image().root();
    let manifest =
        |root: &ChunkDigest| store.objects().get(&format!("images/{}/image.json", hex(root))).cloned();
    for version in [None, Some(1), Some(2)] {
        let Ok(found) = done(resolve(store, "debian", version, &[])) else { continue };
        assert_eq!((found.index.root(), version.unwrap_or(found.version)), (found.root, found.version));
        assert_eq!(
            manifest(&found.root).map(|(bytes, _)| bytes),
            Some(Manifest::of(&found.index).to_bytes())
        );
    }
    let keys = [PublicKey::parse(KEY).expect("it is a key")];
    for version in [1, 2] {
        if let Ok(found) = done(resolve(store, "debian", Some(version), &keys)) {
            assert_eq!((found.version, found.index), (1, image()), "only this was signed");
        }
    }
    let sets = done(boot_sets(store, &root)).unwrap_or_default();
    assert!(sets.catalogs.len() <= 64 && sets.chunks().len() <= MOST_BOOT_CHUNKS);
    assert!(sets.catalogs.values().all(|chunks| chunks.len() <= MOST_BOOT_CHUNKS));
    let before = store.objects().clone();
    let _ = done(probe(store, Some("x")));
    let mut after = store.objects().clone();
    after.remove("probe/x");
    assert!(
        before
            .iter()
            .filter(|(key, _)| *key != "probe/x")
            .all(|(key, object)| after.get(key) == Some(object))
    );
}

/// All names whose image can be read.
fn named(store: &Store) -> Vec<(String, u32, Index)> {
    let mut found = Vec::new();
    for name in ["debian", "a"] {
        for version in done(versions(store, name)).expect("the store does not fail") {
            if let Ok(image) = done(resolve(store, name, Some(version), &[])) {
                found.push((name.to_owned(), version, image.index));
            }
        }
    }
    found
}

/// Collects garbage as far as that goes: nothing goes that a name needs, and nothing at all if something cannot be read. In two passes,
/// or in a first one that only looks.
fn garbage(store: &Store, only_looks: bool) {
    let named = named(store);
    let needed: Vec<String> =
        named.iter().flat_map(|(.., index)| index.digests.iter().map(chunk_key)).collect();
    for hours in [0, 48] {
        let before = store.objects().clone();
        let id = format!("pass-{hours}");
        let deletes = !only_looks || hours > 0;
        let order = CollectOrder {
            clock: || NOW + hours * HOUR,
            grace_seconds: 168 * HOUR,
            gap_seconds: 24 * HOUR,
            deletes,
            id: &id,
        };
        let is_done = done(collect(store, &order)).is_ok();
        let after = store.objects().clone();
        for (key, object) in &before {
            let is_there = after.get(key) == Some(object);
            assert!(is_there || !needed.contains(key), "{key} is needed");
            assert!(is_there || !key.starts_with("names/"), "{key} is a name");
            assert!(is_there || deletes && is_done, "{key} has gone");
        }
    }
    for (name, version, index) in &named {
        let found = done(resolve(store, name, Some(*version), &[])).expect("a name keeps its image");
        assert_eq!(found.index, *index, "a name keeps its image");
    }
}

/// A push that succeeds has a name with its image.
fn pushed(store: &Store) {
    let index = other_image();
    for version in [1, 7] {
        let order =
            PushOrder { name: "debian", version, index: &index, signature: Some(SIGNATURE), id: "ours" };
        if done(push(store, &Frames, &order)).is_ok() {
            let found = done(resolve(store, "debian", Some(version), &[])).expect("it was pushed");
            assert_eq!((found.root, found.index), (index.root(), index.clone()));
            assert_eq!(done(index_of(store, &index.root())).as_ref(), Ok(&index));
            assert!(store.objects().contains_key(&name_key("debian", version)));
        }
    }
}

/// Changes to each object, of each kind.
pub fn seeds() -> Vec<Vec<u8>> {
    let replace =
        |which: u8, bytes: &[u8]| [&[which, 0][..], &(bytes.len() as u16).to_le_bytes(), bytes].concat();
    let add = |which: u8, key: &str, bytes: &[u8]| {
        [&[which, 0, key.len() as u8][..], key.as_bytes(), &(bytes.len() as u16).to_le_bytes(), bytes]
            .concat()
    };
    let other = other_image();
    let other_manifest = Manifest::of(&other);
    let folder = hex(&other.root());
    let named = format!("{{\"digest\":\"{}\"}}", other_manifest.digest);
    let second = [
        add(242, &format!("{folder}/image.json"), &other_manifest.to_bytes()),
        add(242, &format!("{folder}/image.caibx"), &other.to_bytes()),
        add(241, "2", named.as_bytes()),
    ]
    .concat();
    let list = format!(
        "{{\"chunks\":[\"{}\"],\"images\":[\"{folder}\"],\"intents\":[\"names/debian/1\"]}}",
        hex(&[1; 32])
    );
    let mut changes = vec![
        vec![],
        KEY.into(),
        Manifest::of(&image()).to_bytes(),
        second.clone(),
        [second, add(244, "999000001-z.json", list.as_bytes()), add(244, "z.deleting", list.as_bytes())]
            .concat(),
        add(241, "01", named.as_bytes()),
        add(243, "0000/x", b"frame"),
        add(245, "x.caibx", &image().to_bytes()),
        // An older object and a younger one.
        vec![0, 4, 1, 0, 5, 4, 0xff, 0xff],
    ];
    // The objects in the order of their keys: each deleted, cut, changed in a byte, and without meaning.
    let objects = Store::new().objects().len() as u8;
    changes.extend((0..objects).flat_map(|n| {
        [vec![n, 5], vec![n, 2, 9, 0], vec![n, 1, 20, 0, 1], replace(n, b"{}"), vec![n, 3, 1, b' ']]
    }));
    (0..4).flat_map(|kind| changes.iter().map(move |changes| [&[kind], &changes[..]].concat())).collect()
}
