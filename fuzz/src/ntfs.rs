//! Bytes as an NTFS volume, and as a registry hive: whatever they are, a search ends with a value or an error, and no file
//! has more bytes than it says.

use spillway_ntfs::{ByteSource, Hive, NtfsError, NtfsVolume};

/// Most bytes that are read of one file.
const MOST_BYTES: usize = 1 << 20;
const PATHS: [&str; 5] = ["/", "/first", "/SECOND", "/folder/x", "/third"];

/// Opens the bytes as a volume, and reads files of it.
pub fn ntfs_volume(data: &[u8]) {
    let Ok(volume) = NtfsVolume::open(data) else { return };
    let _ = volume.is_dirty();
    for path in PATHS {
        let found = volume.find(path);
        let Ok(Some(file)) = volume.open_file(path) else { continue };
        assert!(matches!(found, Ok(Some(found)) if !found.is_folder), "{path} is no file");
        if let Ok(content) = file.head(MOST_BYTES) {
            assert_eq!(content.len() as u64, file.len_bytes().min(MOST_BYTES as u64));
        }
        let behind = file.read_at(file.len_bytes(), &mut [0]);
        assert_eq!(behind, Err(NtfsError::Unreadable), "a read behind the end");
        let _ = Hive::open(&file).and_then(|hive| hive.key("a"));
    }
}

/// Opens the bytes as a hive, and looks for values of it.
pub fn registry_hive(data: &[u8]) {
    let Ok(hive) = Hive::open(data) else { return };
    for path in ["", r"key", r"KEY\below", r"key\none\none"] {
        let Ok(Some(key)) = hive.key(path) else { continue };
        for name in ["", "number", "TEXT", "none"] {
            if let Ok(Some(value)) = hive.value(&key, name) {
                let (text, texts) = (value.text(), value.texts());
                assert!(text.is_none() || texts.is_some(), "a text is a list of texts");
                assert!(value.number().is_none() || texts.is_none(), "a number is no text");
            }
        }
    }
}

fn put(to: &mut [u8], at: usize, bytes: &[u8]) {
    to[at..at + bytes.len()].copy_from_slice(bytes);
}

fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

/// Size of a cluster, a record and a node: a seed has at most 8 KiB, as the inputs of libFuzzer.
const CLUSTER: usize = 512;
const DATA: u32 = 0x80;
const INDEX_ROOT: u32 = 0x90;
const INDEX_ALLOCATION: u32 = 0xa0;

/// An attribute with its content in the record.
fn resident(kind: u32, name: &str, content: &[u8]) -> Vec<u8> {
    let name_bytes = utf16(name);
    let at = (24 + name_bytes.len()).next_multiple_of(8);
    let mut bytes = vec![0; (at + content.len()).next_multiple_of(8)];
    let len = bytes.len() as u32;
    put(&mut bytes, 0, &kind.to_le_bytes());
    put(&mut bytes, 4, &len.to_le_bytes());
    put(&mut bytes, 9, &[name.len() as u8, 24, 0]);
    put(&mut bytes, 16, &(content.len() as u32).to_le_bytes());
    put(&mut bytes, 20, &(at as u16).to_le_bytes());
    put(&mut bytes, 24, &name_bytes);
    put(&mut bytes, at, content);
    bytes
}

/// An attribute with these runs, from this cluster of its content on.
fn clusters(kind: u32, name: &str, first: u64, size: u64, runs: &[u8]) -> Vec<u8> {
    let name_bytes = utf16(name);
    let at = (64 + name_bytes.len()).next_multiple_of(8);
    let mut bytes = vec![0; (at + runs.len() + 1).next_multiple_of(8)];
    let len = bytes.len() as u32;
    put(&mut bytes, 0, &kind.to_le_bytes());
    put(&mut bytes, 4, &len.to_le_bytes());
    put(&mut bytes, 8, &[1, name.len() as u8, 64, 0]);
    put(&mut bytes, 16, &first.to_le_bytes());
    put(&mut bytes, 32, &(at as u16).to_le_bytes());
    [40, 48, 56].iter().for_each(|field| put(&mut bytes, *field, &size.to_le_bytes()));
    put(&mut bytes, 64, &name_bytes);
    put(&mut bytes, at, runs);
    bytes
}

/// An entry of a folder, with a node below it if that has a number. The last entry has no name.
fn entry(record: u64, name: &str, is_folder: bool, below: Option<u64>) -> Vec<u8> {
    let mut key = if name.is_empty() { vec![] } else { vec![0; 66] };
    if !name.is_empty() {
        put(&mut key, 56, &(if is_folder { 0x1000_0000_u32 } else { 0 }).to_le_bytes());
        put(&mut key, 64, &[name.len() as u8, 1]);
        key.extend(utf16(name));
    }
    let mut bytes = vec![0; (16 + key.len()).next_multiple_of(8) + if below.is_some() { 8 } else { 0 }];
    let len = bytes.len();
    put(&mut bytes, 0, &record.to_le_bytes());
    put(&mut bytes, 8, &(len as u16).to_le_bytes());
    put(&mut bytes, 10, &(key.len() as u16).to_le_bytes());
    put(&mut bytes, 12, &[u8::from(below.is_some()) | if name.is_empty() { 2 } else { 0 }]);
    put(&mut bytes, 16, &key);
    below.iter().for_each(|below| put(&mut bytes, len - 8, &below.to_le_bytes()));
    bytes
}

/// Entries behind their header.
fn node(entries: &[Vec<u8>]) -> Vec<u8> {
    let entries = entries.concat();
    let len = (16 + entries.len()) as u32;
    [&16_u32.to_le_bytes()[..], &len.to_le_bytes(), &len.to_le_bytes(), &[0; 4], &entries].concat()
}

fn root(entries: &[Vec<u8>]) -> Vec<u8> {
    let head = [0x30_u32, 1, CLUSTER as u32, 1].map(u32::to_le_bytes).concat();
    resident(INDEX_ROOT, "$I30", &[head, node(entries)].concat())
}

/// A structure of one cluster, with the number that protects its sector.
fn protected(magic: &[u8; 4], content_at: usize, content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; CLUSTER];
    put(&mut bytes, 0, magic);
    put(&mut bytes, 4, &[48, 0, 2, 0]);
    put(&mut bytes, content_at, content);
    let end = bytes[CLUSTER - 2..].to_vec();
    put(&mut bytes, 48, &[[7, 0].to_vec(), end].concat());
    put(&mut bytes, CLUSTER - 2, &[7, 0]);
    bytes
}

fn record(attributes: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = [attributes.concat(), vec![0xff; 4]].concat();
    // The header says where they begin, and that the record is in use.
    let mut head = vec![0; 36];
    put(&mut head, 0, &[56, 0, 1, 0]);
    bytes.splice(0..0, head);
    protected(b"FILE", 20, &bytes)
}

/// A volume with a file in its record, a file in clusters, one whose clusters are listed in two records, and a folder.
pub fn volume_seeds() -> Vec<Vec<u8>> {
    let mut boot = vec![0; CLUSTER];
    put(&mut boot, 3, b"NTFS    ");
    put(&mut boot, 11, &[0, 2, 1]);
    put(&mut boot, 48, &1_u64.to_le_bytes());
    put(&mut boot, 64, &[1]);
    let item = |first: u64, record: u64| {
        let mut item = vec![0; 32];
        put(&mut item, 0, &DATA.to_le_bytes());
        put(&mut item, 4, &[32, 0, 0, 26]);
        put(&mut item, 8, &first.to_le_bytes());
        put(&mut item, 16, &record.to_le_bytes());
        item
    };
    let table = clusters(DATA, "", 0, 10 * CLUSTER as u64, &[0x11, 10, 1]);
    let names = [entry(6, "first", false, Some(0)), entry(0, "", false, None)];
    let records = [
        record(&[table]),
        record(&[]),
        record(&[]),
        record(&[resident(0x70, "", &[0; 12])]),
        record(&[]),
        record(&[root(&names), clusters(INDEX_ALLOCATION, "$I30", 0, CLUSTER as u64, &[0x11, 1, 11])]),
        record(&[resident(DATA, "", b"content")]),
        // Two clusters, of which the first is a hole, and further ones that the list of attributes names.
        record(&[
            resident(0x20, "", &[item(0, 7), item(2, 8)].concat()),
            clusters(DATA, "", 0, 1800, &[0x01, 1, 0x11, 1, 12]),
        ]),
        record(&[clusters(DATA, "", 2, 0, &[0x11, 2, 13])]),
        record(&[root(&[entry(6, "x", false, None), entry(0, "", false, None)])]),
    ];
    let below = [entry(9, "folder", true, None), entry(7, "second", false, None), entry(0, "", false, None)];
    let nodes = protected(b"INDX", 24, &{
        let mut header = node(&below);
        // The entries are behind the number that protects the sector.
        header.splice(16..16, [0; 16]);
        put(&mut header, 0, &32_u32.to_le_bytes());
        let len = header.len() as u32;
        put(&mut header, 4, &len.to_le_bytes());
        header
    });
    let content = vec![b'x'; 4 * CLUSTER];
    vec![[vec![boot], records.to_vec(), vec![nodes, content]].concat().concat()]
}

/// Hives with a key that has values and keys, in each form of a list of keys.
pub fn hive_seeds() -> Vec<Vec<u8>> {
    let hive = |form: &[u8; 2]| {
        let mut cells = vec![0; 32];
        let mut cell = |content: Vec<u8>| {
            let at = cells.len() as u32;
            let size = (content.len() + 4).next_multiple_of(8);
            cells.extend((-(size as i32)).to_le_bytes());
            cells.extend(content);
            cells.resize((at as usize) + size, 0);
            at
        };
        let key = |name: &str, keys: (u32, u32), values: (u32, u32)| {
            let mut key = vec![0; 76];
            put(&mut key, 0, b"nk\x20\0");
            let fields =
                [(20, keys.0), (28, keys.1), (36, values.0), (40, values.1), (72, name.len() as u32)];
            fields.iter().for_each(|(at, field)| put(&mut key, *at, &field.to_le_bytes()));
            [key, name.as_bytes().to_vec()].concat()
        };
        let value = |name: &str, size: u32, at: u32, kind: u32| {
            let mut value = vec![0; 20];
            put(&mut value, 0, b"vk");
            put(&mut value, 2, &(name.len() as u16).to_le_bytes());
            [(4, size), (8, at), (12, kind)]
                .iter()
                .for_each(|(at, field)| put(&mut value, *at, &field.to_le_bytes()));
            put(&mut value, 16, &[1]);
            [value, name.as_bytes().to_vec()].concat()
        };
        let text = cell(utf16("some\0texts\0\0"));
        let values = [value("number", 1 << 31 | 4, 7, 4), value("text", 24, text, 7), value("", 24, text, 1)];
        let values = values.map(&mut cell).map(u32::to_le_bytes).concat();
        let values = cell(values);
        let below = cell(key("below", (0, 0), (3, values)));
        let mut list = |of: u32| {
            let item =
                if form == b"li" { of.to_le_bytes().to_vec() } else { [of.to_le_bytes(), [0; 4]].concat() };
            let (form, item) = match form {
                b"ri" => (b"lh", item),
                form => (form, item),
            };
            let at = cell([&form[..], &[1, 0], &item].concat());
            if form == b"lh" { cell([b"ri", &[1, 0][..], &at.to_le_bytes()].concat()) } else { at }
        };
        let keys = list(below);
        let first = cell(key("key", (1, keys), (3, values)));
        let mut list = |of: u32| cell([&b"li\x01\0"[..], &of.to_le_bytes()].concat());
        let keys = list(first);
        let root = cell(key("root", (1, keys), (0, 0)));
        cells.resize(4096, 0);
        put(&mut cells, 0, b"hbin");
        let mut header = vec![0; 4096];
        put(&mut header, 0, b"regf");
        put(&mut header, 20, &[1]);
        put(&mut header, 36, &root.to_le_bytes());
        put(&mut header, 40, &4096_u32.to_le_bytes());
        [header, cells].concat()
    };
    [b"li", b"lf", b"ri"].map(hive).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seeds that are refused at once would find nothing.
    #[test]
    fn seeds_go_right() {
        let [seed] = volume_seeds().try_into().expect("one");
        assert!(seed.len() <= 8192);
        let volume = NtfsVolume::open(&seed[..]).expect("a volume");
        let read =
            |path: &str| volume.open_file(path).expect(path).map(|file| file.head(MOST_BYTES).expect(path));
        assert_eq!(read("/first").as_deref(), Some(&b"content"[..]));
        let expected = [vec![0; CLUSTER], vec![b'x'; 1800 - CLUSTER]].concat();
        assert_eq!(read("/second"), Some(expected));
        assert_eq!((read("/folder/x"), read("/third")), (read("/first"), None));
        assert_eq!(volume.is_dirty(), Ok(false));
        for seed in hive_seeds() {
            let hive = Hive::open(&seed[..]).expect("a hive");
            let key = hive.key(r"key\below").expect("a key").expect("the key");
            let value = |name: &str| hive.value(&key, name).expect(name).expect(name);
            assert_eq!(value("number").number(), Some(7));
            assert_eq!(value("text").texts().expect("texts"), ["some", "texts"]);
            assert_eq!(value("").text().as_deref(), Some("some"));
        }
    }
}
