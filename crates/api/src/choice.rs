//! Which parts of figures an answer has: by their names, with dots between a group and its part.
//!
//! Invariant: what is not chosen is absent, and so is a number that was chosen by its name while it is 0: of hundreds of machines, most are.
//! No group is absent: it may be empty.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// Which parts of a group are chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// None of them.
    #[default]
    Nothing,
    /// All of them, or the number that it is.
    All,
    /// Of each part what is chosen, in the order of the parts.
    Parts(Vec<Choice>),
}

impl Choice {
    /// What is chosen of a part of this group, which has so many.
    fn part(&mut self, at: usize, of: usize) -> Option<&mut Choice> {
        if *self == Choice::Nothing {
            *self = Choice::Parts(vec![Choice::Nothing; of]);
        }
        match self {
            Choice::Parts(parts) => parts.get_mut(at),
            Choice::Nothing | Choice::All => None,
        }
    }

    /// Chooses a part of this group too. It is `P`, of so many.
    pub(crate) fn choose<P: Choosable>(&mut self, at: usize, of: usize, path: &[&str]) -> bool {
        match self.part(at, of) {
            Some(part) => P::choose(part, path),
            // It is chosen already, if it exists.
            None => P::choose(&mut Choice::Nothing, path),
        }
    }
}

/// A number, or a group of them.
pub trait Choosable: Serialize {
    /// Chooses the part at this path of names, or all. False: there is no such part.
    fn choose(choice: &mut Choice, path: &[&str]) -> bool;

    /// Whether it is a number, and 0.
    fn is_zero(&self) -> bool {
        false
    }

    /// Serialises the parts of a group that are chosen.
    fn serialize_parts<M: SerializeMap>(&self, parts: &[Choice], map: &mut M) -> Result<(), M::Error>;
}

/// The part of a group that is chosen, for serialisation.
#[derive(Clone, Copy, Debug)]
pub struct Chosen<'a, T>(pub &'a T, pub &'a Choice);

impl<T: Choosable> Serialize for Chosen<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let parts: &[Choice] = match self.1 {
            Choice::All => return self.0.serialize(serializer),
            Choice::Parts(parts) => parts,
            Choice::Nothing => &[],
        };
        let mut map = serializer.serialize_map(None)?;
        self.0.serialize_parts(parts, &mut map)?;
        map.end()
    }
}

/// Adds a part to what is serialised of a group, if something of it is chosen.
pub(crate) fn serialize_part<M: SerializeMap, P: Choosable>(
    map: &mut M,
    name: &'static str,
    part: &P,
    choice: Option<&Choice>,
) -> Result<(), M::Error> {
    match choice {
        None | Some(Choice::Nothing) => Ok(()),
        Some(_) if part.is_zero() => Ok(()),
        Some(choice) => map.serialize_entry(name, &Chosen(part, choice)),
    }
}

/// Makes numbers choosable.
macro_rules! numbers {
    ($($type:ty),+) => {$(
        impl Choosable for $type {
            fn choose(choice: &mut Choice, path: &[&str]) -> bool {
                *choice = Choice::All;
                path.is_empty()
            }

            fn is_zero(&self) -> bool {
                *self == Self::default()
            }

            fn serialize_parts<M: SerializeMap>(&self, _: &[Choice], _: &mut M) -> Result<(), M::Error> {
                Ok(())
            }
        }
    )+};
}

numbers!(u64, crate::figures::Greatest);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DiskCounters, DiskLevels, PlaneCounters};
    use serde_json::json;

    #[test]
    fn what_is_chosen_is_there_and_nothing_else() {
        let guest = PlaneCounters { reads: 1, writes: 2, read_bytes: 3, written_bytes: 4 };
        let counters = DiskCounters { guest, ram: guest, stalls: 5, ..DiskCounters::default() };
        let chosen = |paths: &[&str]| {
            let mut choice = Choice::Nothing;
            for path in paths {
                let path: Vec<&str> = path.split('.').collect();
                assert!(DiskCounters::choose(&mut choice, &path), "{path:?}");
            }
            serde_json::to_value(Chosen(&counters, &choice)).unwrap()
        };
        assert_eq!(chosen(&[]), json!({}));
        assert_eq!(
            chosen(&["stalls", "guest.writes", "guest.reads"]),
            json!({ "stalls": 5, "guest": { "reads": 1, "writes": 2 } })
        );
        assert_eq!(chosen(&["throttled_ns", "overflow.reads"]), json!({ "overflow": {} }), "they are 0");
        assert_eq!(chosen(&["overflow"])["overflow"]["reads"], 0, "a group has all of its parts");
        for paths in [&["ram.reads", "ram"], &["ram", "ram.reads"]] {
            assert_eq!(chosen(paths), json!({ "ram": guest }), "a group has its parts");
        }
        let mut all = Choice::Nothing;
        assert!(DiskCounters::choose(&mut all, &[]));
        assert_eq!(serde_json::to_value(Chosen(&counters, &all)).unwrap(), json!(counters));
    }

    #[test]
    fn what_does_not_exist_cannot_be_chosen() {
        for path in [&["guests"][..], &["guest", "bytes"], &["stalls", "x"], &[""], &["guest", "reads", "x"]]
        {
            assert!(!DiskCounters::choose(&mut Choice::Nothing, path), "{path:?}");
            assert!(!DiskCounters::choose(&mut Choice::All, path), "{path:?}");
        }
        assert!(DiskLevels::choose(&mut Choice::Nothing, &["chunk_wait_p99_ns"]));
    }
}
