//! Keys of objects. Owns where each kind of object is, and reads back what a key names.

use spillway_image::digests::{ChunkDigest, hex, unhex};

/// The format of a registry.
pub const FORMAT: &str = "spillway.json";
/// Folder of the chunks.
pub const CHUNKS: &str = "chunks";
/// Folder of the images.
pub const IMAGES: &str = "images";
/// Folder of the names.
pub const NAMES: &str = "names";
/// Folder of the intents of pushes.
pub const UPLOADS: &str = "uploads";
/// Folder of the garbage collection.
pub const GC: &str = "gc";

/// Key of a chunk.
pub fn chunk_key(digest: &ChunkDigest) -> String {
    let hex = hex(digest);
    format!("{CHUNKS}/{}/{hex}.cacnk", &hex[..4])
}

/// The digest in the key of a chunk; `None` if it is the key of something else.
pub fn chunk_of(key: &str) -> Option<ChunkDigest> {
    let hex = key.rsplit('/').next()?.strip_suffix(".cacnk")?;
    let digest = unhex(hex)?;
    (chunk_key(&digest) == key).then_some(digest)
}

/// Key of an image's manifest.
pub fn manifest_key(root: &ChunkDigest) -> String {
    format!("{IMAGES}/{}/image.json", hex(root))
}

/// Key of an image's index.
pub fn index_key(root: &ChunkDigest) -> String {
    format!("{IMAGES}/{}/image.caibx", hex(root))
}

/// Key of the boot sets of an image.
pub fn boot_key(root: &ChunkDigest) -> String {
    format!("{IMAGES}/{}/boot.json", hex(root))
}

/// Key of a signature.
pub fn signature_key(root: &ChunkDigest, name: &str, version: u32) -> String {
    format!("{IMAGES}/{}/{name}@{version}.minisig", hex(root))
}

/// The image that a key below `images` belongs to.
pub fn image_of(key: &str) -> Option<ChunkDigest> {
    unhex(key.strip_prefix(IMAGES)?.strip_prefix('/')?.split('/').next()?)
}

/// Key of a version's name.
pub fn name_key(name: &str, version: u32) -> String {
    format!("{NAMES}/{name}/{version}")
}

/// Name and version in a key below `names`.
pub fn name_of(key: &str) -> Option<(&str, u32)> {
    let (name, version) = key.strip_prefix(NAMES)?.strip_prefix('/')?.split_once('/')?;
    let number = version.parse().ok().filter(|number| *number > 0)?;
    (is_name(name) && name_key(name, number) == key).then_some((name, number))
}

/// Key of an intent.
pub fn intent_key(id: &str) -> String {
    format!("{UPLOADS}/{id}.caibx")
}

/// Key of a list of candidates.
pub fn candidates_key(seconds: i64, id: &str) -> String {
    format!("{GC}/{seconds}-{id}.json")
}

/// Time of a list of candidates.
pub fn candidates_of(key: &str) -> Option<i64> {
    key.strip_prefix(GC)?.strip_prefix('/')?.strip_suffix(".json")?.split_once('-')?.0.parse().ok()
}

/// Key of a deletion in progress.
pub fn deleting_key(id: &str) -> String {
    format!("{GC}/{id}.deleting")
}

/// Whether the key is that of a deletion in progress.
pub fn is_deleting(key: &str) -> bool {
    key.ends_with(".deleting")
}

/// Whether a text is a name of an image: a label of RFC 1123, as everywhere in Spillway.
pub fn is_name(text: &str) -> bool {
    let plain = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    let ends = [bytes.first(), bytes.last()].into_iter().all(|b| b.is_some_and(plain));
    ends && bytes.len() <= 63 && bytes.iter().all(|b| plain(b) || *b == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_they_are_made() {
        let digest = std::array::from_fn(|n| n as u8 * 7);
        assert_eq!(chunk_of(&chunk_key(&digest)), Some(digest));
        assert_eq!(image_of(&signature_key(&digest, "debian", 3)), Some(digest));
        assert_eq!(name_of(&name_key("debian", 3)), Some(("debian", 3)));
        assert_eq!(candidates_of(&candidates_key(17, "a-b")), Some(17));
        let upper = chunk_key(&digest).replace("a.cacnk", "A.cacnk").replace("00", "0A");
        let strange = [
            "chunks/0000/1.cacnk",
            &upper,
            "chunks/../x.cacnk",
            "names/debian/0",
            "names/debian/01",
            "names/debian/+1",
            "names/a/b/1",
            "names/../1",
            "names/Debian/1",
            "images/x/image.json",
        ];
        for key in strange {
            assert_eq!((chunk_of(key), name_of(key), image_of(key)), (None, None, None), "{key}");
        }
    }
}
