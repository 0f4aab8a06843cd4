//! Identities of machines with names of the fleet, which they keep on whatever host they are.
//!
//! Owns how they are made: from the fleet, the name and the revision of the records, so that the placer needs no random numbers.
//! Invariant: no identity and no address is given twice in one fleet, nor to a name that was given up and is made again.

use crate::transaction::Revision;
use crate::view::FleetView;
use spillway_api::{Identity, Name};
use std::collections::BTreeSet;

/// Makes identities for names that have none.
pub(crate) struct Identities {
    fleet_id: String,
    revision: Revision,
    /// Addresses that machines have.
    taken: BTreeSet<String>,
}

impl Identities {
    pub(crate) fn of(view: &FleetView) -> Identities {
        let fleet_id = view.meta.as_ref().map(|meta| meta.value.fleet_id.clone()).unwrap_or_default();
        let all = view.named.values().flat_map(|names| names.values());
        let taken = all.map(|record| record.value.identity.mac.clone()).collect();
        Identities { fleet_id, revision: view.revision, taken }
    }

    /// The identity of a name that is made at this revision.
    pub(crate) fn make(&mut self, catalog: &Name, machine: &Name) -> Identity {
        for attempt in 0u64.. {
            let text = format!("{}/{catalog}/{machine}/{}/{attempt}", self.fleet_id, self.revision);
            let (uuid, address) = (mixed(&text, 1), mixed(&text, 2));
            let [a, b, c, d, e, ..] = address.to_be_bytes();
            let mac = format!("02:{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}");
            if self.taken.insert(mac.clone()) {
                return Identity { uuid: written(uuid), mac };
            }
        }
        unreachable!("there are more attempts than addresses")
    }
}

/// A number that depends on all of a text (FNV-1a of 128 bits, mixed once more).
fn mixed(text: &str, salt: u8) -> u128 {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let bytes = text.bytes().chain([salt]);
    let hash = bytes.fold(OFFSET, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME));
    let hash = (hash ^ (hash >> 65)).wrapping_mul(PRIME | 1 << 127);
    hash ^ (hash >> 61)
}

/// A UUID of version 8 (RFC 9562, 5.8): its bits are ours.
fn written(number: u128) -> String {
    let number = number & !(0xf << 76) & !(0x3 << 62) | 0x8 << 76 | 0x2 << 62;
    let text = format!("{number:032x}");
    format!("{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_of_one_machine_and_one_making() {
        let name = |text: &str| text.parse::<Name>().unwrap();
        let mut view = FleetView { revision: 5, ..FleetView::default() };
        let mut first = Identities::of(&view);
        let one = first.make(&name("desk"), &name("desk-001"));
        let two = first.make(&name("desk"), &name("desk-002"));
        assert!(one.uuid != two.uuid && one.mac != two.mac, "{one:?} {two:?}");
        assert_eq!((one.uuid.len(), &one.uuid[14..15], &one.mac[..3]), (36, "8", "02:"));
        let again = first.make(&name("desk"), &name("desk-001"));
        assert_ne!(again.mac, one.mac, "its address is taken");
        view.revision = 6;
        assert_ne!(Identities::of(&view).make(&name("desk"), &name("desk-001")).uuid, one.uuid);
        let all: BTreeSet<String> = (0..10_000)
            .map(|n| mixed(&format!("x/{n}"), 1))
            .map(|number| format!("{:x}", number >> 88))
            .collect();
        assert!(all.len() > 9_990, "{}", all.len());
    }
}
