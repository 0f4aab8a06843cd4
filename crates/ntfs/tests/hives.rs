//! Hives that hivex made: keys and values are found, and damaged ones end in a value or an error.
#![allow(clippy::unwrap_used)]

use spillway_ntfs::{Hive, NtfsError, Value};
use spillway_testkit::windows::hive;
use std::fmt::Write;

const CONTENT: &str = r#"
[\Select]
"Current"=dword:00000001

[\ControlSet001\Services\viostor]
"Start"=dword:00000000
"ImagePath"=hex(2):53,00,79,00,73,00,74,00,65,00,6d,00,33,00,32,00,5c,00,78,00,00,00

[\ControlSet001\Control\Session Manager]
"PagingFiles"=hex(7):3f,00,3a,00,5c,00,61,00,00,00,62,00,00,00,00,00
"Binary"=hex:01,02
"Domain"="example.org"
@="default"
"Nothing"=""
"#;

fn value(hive: &[u8], key: &str, name: &str) -> Result<Option<Value>, NtfsError> {
    let hive = Hive::open(hive)?;
    let key = hive.key(key)?;
    key.map_or(Ok(None), |key| hive.value(&key, name))
}

#[test]
fn values_are_found_by_key_and_name() {
    let hive = hive(CONTENT).unwrap();
    let value = |key: &str, name: &str| value(&hive, key, name).unwrap();
    let number = |key: &str, name: &str| value(key, name).and_then(|value| value.number());
    let text =
        |name: &str| value(r"ControlSet001\Control\Session Manager", name).and_then(|value| value.text());
    assert_eq!(number("Select", "Current"), Some(1));
    assert_eq!(number(r"controlset001\SERVICES\VioStor", "start"), Some(0));
    let path = value(r"ControlSet001\Services\viostor", "ImagePath").and_then(|value| value.text());
    assert_eq!(path.as_deref(), Some(r"System32\x"));
    let files =
        value(r"ControlSet001\Control\Session Manager", "PagingFiles").and_then(|value| value.texts());
    assert_eq!(files.unwrap(), [r"?:\a", "b"]);
    assert_eq!(text("Domain").as_deref(), Some("example.org"));
    assert_eq!(text("").as_deref(), Some("default"));
    assert_eq!(text("Nothing").as_deref(), Some(""));
    assert_eq!(text("Binary"), None);
    assert_eq!(number(r"ControlSet001\Control\Session Manager", "Domain"), None, "a text");
    for (key, name) in [("Select", "x"), ("Selec", "Current"), (r"Select\Current", "x"), ("", "x")] {
        assert_eq!(value(key, name), None, "{key} {name}");
    }
    assert!(!Hive::open(&hive[..]).unwrap().is_dirty());
}

#[test]
fn a_hive_that_was_not_closed_is_told() {
    let mut hive = hive(CONTENT).unwrap();
    hive[4] ^= 1;
    assert!(Hive::open(&hive[..]).unwrap().is_dirty());
}

/// Windows has lists of lists for so many keys; hivex has one list, which is cut into two here, the second without hashes.
#[test]
fn keys_with_many_keys_are_searched() {
    let mut content = String::from(CONTENT);
    (0..2000)
        .for_each(|n| writeln!(content, "\n[\\ControlSet001\\Services\\s{n}]\n\"n\"=dword:{n:08x}").unwrap());
    let mut hive = hive(&content).unwrap();
    let number = |hive: &[u8], n: u32| {
        let found = value(hive, &format!(r"ControlSet001\Services\S{n}"), "n");
        found.map(|found| found.and_then(|value| value.number()))
    };
    let u32_at = |hive: &[u8], at: usize| u32::from_le_bytes(hive[at..at + 4].try_into().unwrap());
    let all = [0, 1, 999, 1000, 1999];
    assert!(all.iter().all(|n| number(&hive, *n) == Ok(Some(*n))));

    let name = hive.windows(8).position(|part| part == b"Services").unwrap();
    let place = name - 76 + 28;
    let list = 4096 + u32_at(&hive, place) as usize + 4;
    assert_eq!(&hive[list..list + 2], b"lh");
    let items = hive[list + 4..list + 4 + 2001 * 8].to_vec();
    let first = [b"lh", &1000_u16.to_le_bytes()[..], &items[..8000]].concat();
    let offsets = items[8000..].chunks(8).flat_map(|item| &item[..4]).copied().collect::<Vec<u8>>();
    let second = [b"li", &1001_u16.to_le_bytes()[..], &offsets].concat();
    // A bin of their own behind the last one, with three cells.
    let bin = (hive.len() - 4096) as u32;
    let mut added = [b"hbin", &bin.to_le_bytes()[..], &[0; 24]].concat();
    let mut places = vec![];
    for cell in [first, second] {
        places.push(bin + added.len() as u32);
        let size = (cell.len() as i32 + 4 + 7) & !7;
        added.extend((-size).to_le_bytes());
        added.extend(&cell);
        added.resize(added.len().next_multiple_of(8), 0);
    }
    let root = bin + added.len() as u32;
    added.extend((-16_i32).to_le_bytes());
    added.extend([b"ri", &2_u16.to_le_bytes()[..]].concat());
    places.iter().for_each(|place| added.extend(place.to_le_bytes()));
    added.resize(16384, 0);
    hive.extend(added);
    let bins = hive.len() as u32 - 4096;
    hive[40..44].copy_from_slice(&bins.to_le_bytes());
    hive[place..place + 4].copy_from_slice(&root.to_le_bytes());
    assert!(all.iter().all(|n| number(&hive, *n) == Ok(Some(*n))));
    assert_eq!(number(&hive, 2000), Ok(None));
    assert!(value(&hive, r"ControlSet001\Services\viostor", "Start").unwrap().is_some());

    // A list of lists in a list of lists.
    let at = 4096 + root as usize + 8;
    hive[at..at + 4].copy_from_slice(&root.to_le_bytes());
    assert_eq!(number(&hive, 0), Err(NtfsError::Damaged("list of keys")));
}

#[test]
fn whatever_the_bytes_are_a_search_has_an_end() {
    for bytes in [vec![], vec![0; 5000], vec![0xff; 5000]] {
        assert!(Hive::open(&bytes[..]).is_err());
    }
    let hive = hive(CONTENT).unwrap();
    let used: Vec<usize> = (0..hive.len()).filter(|at| hive[*at] != 0).collect();
    let seed = std::env::var("SPILLWAY_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 1);
    println!("SPILLWAY_SEED={seed}");
    let mut random = spillway_testkit::Rng::new(seed);
    let mut found = 0;
    for _ in 0..2000 {
        let mut hive = hive.clone();
        for _ in 0..=random.below(8) {
            let at = used[random.below(used.len() as u64) as usize];
            hive[at] = [0, 1, 0x7f, 0x80, 0xff, random.below(256) as u8][random.below(6) as usize];
        }
        let cut = if random.below(8) == 0 { random.below(hive.len() as u64) as usize } else { hive.len() };
        for (key, name) in
            [("Select", "Current"), (r"ControlSet001\Services\viostor", "ImagePath"), ("x", "")]
        {
            found += usize::from(matches!(value(&hive[..cut], key, name), Ok(Some(_))));
        }
    }
    assert!((200..4000).contains(&found), "some damage matters, and some does not: {found}");
}
