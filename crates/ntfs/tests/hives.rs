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

/// hivex puts so many keys into lists of lists.
#[test]
fn keys_with_many_keys_are_searched() {
    let mut content = String::from(CONTENT);
    (0..2000)
        .for_each(|n| writeln!(content, "[\\ControlSet001\\Services\\s{n}]\n\"n\"=dword:{n:08x}").unwrap());
    let hive = hive(&content).unwrap();
    for n in [0, 1, 999, 1999] {
        let found = value(&hive, &format!(r"ControlSet001\Services\S{n}"), "n").unwrap();
        assert_eq!(found.and_then(|value| value.number()), Some(n));
    }
    assert_eq!(value(&hive, r"ControlSet001\Services\s2000", "n").unwrap(), None);
    assert!(value(&hive, r"ControlSet001\Services\viostor", "Start").unwrap().is_some());
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
