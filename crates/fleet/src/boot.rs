//! Boot sets that hosts share: which chunks of an image machines of a catalog read until they are ready. Owns the form of their records, and
//! when a host writes one.
//!
//! Invariant: a set is advice, and bounded. What cannot be decoded is no record; numbers beyond the image are for its readers to leave out.

use crate::changes::put;
use crate::keys::{ImageDigest, Key};
use crate::transaction::Transaction;
use crate::view::FleetView;
use serde::{Deserialize, Serialize};
use spillway_api::Name;
use std::collections::HashSet;

/// Most chunks of a set.
pub const MOST_CHUNKS: usize = 8192;
/// Longest record, in bytes.
pub const MOST_BYTES: usize = 64 << 10;
/// Most bytes of a list of chunks before they are written as digits.
const MOST_CODED_BYTES: usize = 32_000;
/// Boots after which a set is known well enough for others, and those after which it replaces one of fewer boots.
pub const FIRST_BOOTS: u32 = 2;
/// The same, for the set that stays.
pub const ALL_BOOTS: u32 = 5;

/// Record `boot/DIGEST/CATALOG`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BootForm", into = "BootForm")]
pub struct BootRecord {
    /// Boots of one host that the set comes from.
    pub boots: u32,
    /// Numbers of chunks, in the order of their first use, each once.
    pub chunks: Vec<u32>,
}

/// How a record is written.
#[derive(Serialize, Deserialize)]
struct BootForm {
    boots: u32,
    /// Bytes, as pairs of hexadecimal digits: the differences between each number and the one before it, which is 0 for the first one. A
    /// difference d is written as 2d, or as -2d - 1 if it is below 0, in groups of 7 bits, lowest first; bit 7 of a byte says that another
    /// one follows (LEB128).
    chunks: String,
}

impl From<BootRecord> for BootForm {
    fn from(record: BootRecord) -> BootForm {
        let mut bytes = Vec::with_capacity(record.chunks.len() * 2);
        let mut before = 0;
        for chunk in record.chunks.iter().take(MOST_CHUNKS) {
            let coded = code(i64::from(*chunk) - before);
            before = i64::from(*chunk);
            if bytes.len() + coded.len() > MOST_CODED_BYTES {
                break;
            }
            bytes.extend(coded);
        }
        BootForm { boots: record.boots, chunks: bytes.iter().map(|byte| format!("{byte:02x}")).collect() }
    }
}

/// The bytes of a difference.
fn code(difference: i64) -> Vec<u8> {
    let (mut bytes, mut left) = (Vec::new(), ((difference << 1) ^ (difference >> 63)).cast_unsigned());
    while left >= 0x80 {
        bytes.push((left & 0x7f) as u8 | 0x80);
        left >>= 7;
    }
    bytes.push(left as u8);
    bytes
}

fn read_digits(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let byte = |[high, low]: &[u8; 2]| Some((digit(*high)? << 4 | digit(*low)?) as u8);
    rest.is_empty().then(|| pairs.iter().map(byte).collect())?
}

impl TryFrom<BootForm> for BootRecord {
    type Error = String;

    fn try_from(form: BootForm) -> Result<BootRecord, String> {
        if form.chunks.len() > MOST_BYTES {
            return Err(format!("the list of chunks has more than {MOST_BYTES} characters"));
        }
        let bytes =
            read_digits(&form.chunks).ok_or("the list of chunks is no pairs of hexadecimal digits")?;
        Ok(BootRecord { boots: form.boots, chunks: decode(&bytes)? })
    }
}

fn decode(bytes: &[u8]) -> Result<Vec<u32>, String> {
    let (mut chunks, mut seen, mut before) = (Vec::new(), HashSet::new(), 0i64);
    let mut rest = bytes.iter();
    while rest.len() > 0 {
        let (mut coded, mut shift) = (0u64, 0);
        loop {
            let byte = *rest.next().ok_or("the list of chunks ends within a number")?;
            coded |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                break;
            }
            shift += 7;
            // 33 bits are enough for each difference.
            if shift > 28 {
                return Err("the list of chunks has a number that is too long".into());
            }
        }
        let difference = (coded >> 1).cast_signed() ^ -(coded & 1).cast_signed();
        before += difference;
        let chunk =
            u32::try_from(before).map_err(|_| "the list of chunks has a number that none can have")?;
        if chunks.len() == MOST_CHUNKS {
            return Err(format!("the list has more than {MOST_CHUNKS} chunks"));
        }
        if seen.insert(chunk) {
            chunks.push(chunk);
        }
    }
    Ok(chunks)
}

/// Decides whether a host that has recorded so many boots writes its set: the first one that has two boots does, and the first one that has
/// five replaces it. Only sets of the fleet's images and catalogs are written.
pub fn publish(
    view: &FleetView,
    digest: &ImageDigest,
    catalog: &Name,
    set: &BootRecord,
) -> Option<Transaction> {
    let is_of_fleet = view.catalogs.get(catalog).is_some_and(|catalog| {
        let image = &catalog.value.spec.catalog.image.name;
        let mut versions = view.images.iter().filter(|((name, _), _)| name == image);
        versions.any(|(_, version)| ImageDigest::of(&version.value.digest).as_ref() == Some(digest))
    });
    let key = Key::Boot(digest.clone(), catalog.clone());
    // A record that cannot be read may be one of a later version.
    if !is_of_fleet || set.chunks.is_empty() || view.unreadable.contains_key(&key.to_string()) {
        return None;
    }
    let there = view.boots.get(&(digest.clone(), catalog.clone()));
    let is_due = match there {
        None => set.boots >= FIRST_BOOTS,
        Some(there) => set.boots >= ALL_BOOTS && there.value.boots < ALL_BOOTS,
    };
    is_due.then(|| put(key, there.map_or(0, |there| there.modified), set))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Fleet, name};
    use crate::transaction::Outcome;
    use serde_json::{Value, json};

    fn record(boots: u32, chunks: impl Into<Vec<u32>>) -> BootRecord {
        BootRecord { boots, chunks: chunks.into() }
    }

    fn round_trip(record: &BootRecord) -> (usize, BootRecord) {
        let text = serde_json::to_string(record).unwrap();
        (text.len(), serde_json::from_str(&text).unwrap())
    }

    #[test]
    fn a_set_is_written_compactly_and_read_as_it_was() {
        for chunks in [vec![], vec![0], vec![u32::MAX, 0, u32::MAX - 1, 7], vec![3, 2, 1, 64, 63, 8191]] {
            let set = record(2, chunks);
            assert_eq!(round_trip(&set).1, set);
        }
        let run: Vec<u32> = (1000..1000 + MOST_CHUNKS as u32).collect();
        let (bytes, read) = round_trip(&record(5, run.clone()));
        assert!(bytes < 16_500 && read.chunks == run, "{bytes}");
        // Of the largest image that there can be in 4 TiB, the worst.
        let far: Vec<u32> =
            (0..MOST_CHUNKS as u32).map(|n| if n % 2 == 0 { n } else { (1 << 22) - n }).collect();
        let (bytes, read) = round_trip(&record(5, far.clone()));
        assert!(bytes < MOST_BYTES && read.chunks.len() >= 7990 && far.starts_with(&read.chunks), "{bytes}");
        // What no image has is cut, too.
        let far: Vec<u32> =
            (0..MOST_CHUNKS as u32).map(|n| if n % 2 == 0 { n } else { u32::MAX - n }).collect();
        let (bytes, read) = round_trip(&record(5, far.clone()));
        assert!(bytes < MOST_BYTES && far.starts_with(&read.chunks), "{bytes}");
        let more: Vec<u32> = (0..MOST_CHUNKS as u32 + 1).collect();
        assert_eq!(round_trip(&record(5, more)).1.chunks.len(), MOST_CHUNKS);
    }

    #[test]
    fn hostile_records_are_refused() {
        let read = |bytes: &[u8]| {
            let form = json!({ "boots": 2, "chunks": bytes.iter().map(|byte| format!("{byte:02X}")).collect::<String>() });
            serde_json::from_value::<BootRecord>(form).map_err(|e| e.to_string())
        };
        assert_eq!(read(&[2, 0, 0, 2]).unwrap().chunks, [1, 2], "each once");
        for (bytes, why) in [
            (&[0x80][..], "ends within a number"),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff], "too long"),
            (&[1], "none can have"),
            (&[0xfe, 0xff, 0xff, 0xff, 0x3f], "none can have"),
            (&vec![0; MOST_CHUNKS + 1][..], ""),
            (&vec![2; MOST_CHUNKS + 1][..], "more than 8192 chunks"),
        ] {
            match read(bytes) {
                Ok(set) => assert!(why.is_empty() && set.chunks == [0], "{why}"),
                Err(e) => assert!(e.contains(why) && !why.is_empty(), "{e}"),
            }
        }
        for form in [
            json!({ "boots": 2, "chunks": "0" }),
            json!({ "boots": 2, "chunks": "é0" }),
            json!({ "boots": -1, "chunks": "" }),
        ] {
            assert!(serde_json::from_value::<BootRecord>(form).is_err());
        }
        let long = json!({ "boots": 2, "chunks": "A".repeat(MOST_BYTES + 4) });
        assert!(serde_json::from_value::<BootRecord>(long).unwrap_err().to_string().contains("characters"));
    }

    #[test]
    fn the_first_host_with_two_boots_writes_and_one_with_five_replaces_it() {
        let mut fleet = Fleet::new();
        let digest: ImageDigest = "ab".repeat(32).parse().unwrap();
        let (desk, lab) = (name("desk"), name("lab"));
        let of =
            |fleet: &Fleet, catalog: &Name, set: &BootRecord| publish(fleet.view(), &digest, catalog, set);
        let two = record(2, [4, 2]);
        assert_eq!(of(&fleet, &desk, &two), None, "the fleet has no such catalog");
        fleet.catalog("desk", 3, json!({}));
        assert_eq!(of(&fleet, &desk, &two), None, "the fleet has no such image");
        let image =
            json!({ "digest": digest.with_kind(), "registry": "hub", "name": "debian", "size_bytes": 1 });
        fleet.put("images/debian/1", &image.to_string());
        assert_eq!(of(&fleet, &lab, &two), None);
        assert_eq!(of(&fleet, &desk, &record(1, [4, 2])), None);
        assert_eq!(of(&fleet, &desk, &record(2, [])), None);
        let (first, other) = (of(&fleet, &desk, &two).unwrap(), of(&fleet, &desk, &record(2, [9])).unwrap());
        assert!(matches!(fleet.commit(&first), Outcome::Applied(_)));
        assert_eq!(fleet.commit(&other), Outcome::Conflict, "the second one comes too late");
        assert_eq!(of(&fleet, &desk, &record(4, [9])), None);
        let better = of(&fleet, &desk, &record(5, [1])).unwrap();
        assert!(matches!(fleet.commit(&better), Outcome::Applied(_)));
        assert_eq!(fleet.view().boots[&(digest.clone(), desk.clone())].value, record(5, [1]));
        assert_eq!(of(&fleet, &desk, &record(5, [2])), None);
        fleet.put(&format!("boot/{digest}/desk"), &Value::Null.to_string());
        assert_eq!(of(&fleet, &desk, &record(5, [2])), None, "nobody knows what that is");
    }
}
