//! The order of hosts for a thing, by rendezvous hashing. Owns the hash.
//!
//! Invariant: the order follows from the names alone, on every host and in every version of the program. A host that goes or comes changes
//! no order among the others. The hash is no protection from who chooses names: all who write to etcd are trusted.

/// The place of a host in the order for a thing: the highest comes first.
pub(crate) fn score(thing: &str, host: &str) -> u64 {
    // FNV-1a, with a byte between the two that neither has.
    let bytes = thing.bytes().chain([0]).chain(host.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    mix(mix(hash))
}

/// Makes each bit depend on each other one (the finalizer of splitmix64).
fn mix(hash: u64) -> u64 {
    let mut mixed = hash.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_spread_evenly_and_never_changes() {
        let hosts: Vec<String> = (0..10).map(|n| format!("host-{n}")).collect();
        let mut firsts = [0; 10];
        for thing in 0..10_000 {
            let thing = format!("thing-{thing}");
            let first = (0..hosts.len()).max_by_key(|n| score(&thing, &hosts[*n])).unwrap();
            firsts[first] += 1;
        }
        assert!(firsts.iter().all(|count| (900..1100).contains(count)), "{firsts:?}");
        assert_ne!(score("ab", "c"), score("a", "bc"));
        // Hosts of two versions must agree.
        assert_eq!(score("debian", "host-a"), 13_163_005_894_175_306_482);
    }
}
