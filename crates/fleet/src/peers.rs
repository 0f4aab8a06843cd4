//! With which hosts a host exchanges chunks of streamed images. Owns the division of large fleets into groups.
//!
//! Invariant: two hosts with the same list are in each other's group, or both are not.

use crate::rendezvous::score;
use spillway_api::Name;

/// Hosts of a group, on average. Each host of a group is asked what it has, and each group asks the registry once for each chunk.
pub const GROUP: usize = 64;

/// Returns the hosts of the group of a host, itself among them if it is in the list.
pub fn group<'a>(hosts: impl Iterator<Item = &'a Name> + Clone, own: &Name) -> Vec<&'a Name> {
    let groups = hosts.clone().count().div_ceil(GROUP).max(1);
    let of_own = number(own, groups);
    hosts.filter(|host| number(host, groups) == of_own).collect()
}

/// The group of a host. When there is one group more, only its hosts have changed theirs.
fn number(host: &Name, groups: usize) -> usize {
    (0..groups).max_by_key(|group| score(&format!("group-{group}"), host.as_str())).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn hosts(count: usize) -> Vec<Name> {
        (0..count).map(|n| format!("host-{n}").parse().unwrap()).collect()
    }

    #[test]
    fn a_small_fleet_is_one_group() {
        let hosts = hosts(GROUP);
        assert_eq!(group(hosts.iter(), &hosts[7]).len(), GROUP);
        let stranger = "x".parse().unwrap();
        assert_eq!(group(hosts.iter(), &stranger).len(), GROUP);
        assert!(group([].iter(), &stranger).is_empty());
    }

    #[test]
    fn a_large_fleet_is_divided_and_everybody_agrees() {
        let hosts = hosts(1000);
        let groups: BTreeSet<Vec<&Name>> = hosts.iter().map(|own| group(hosts.iter(), own)).collect();
        assert_eq!(groups.len(), 1000usize.div_ceil(GROUP));
        assert_eq!(groups.iter().map(Vec::len).sum::<usize>(), 1000);
        let sizes: Vec<_> = groups.iter().map(Vec::len).collect();
        assert!(sizes.iter().all(|size| (GROUP / 2..GROUP * 2).contains(size)), "{sizes:?}");
        for own in hosts.iter().step_by(37) {
            let group = group(hosts.iter(), own);
            assert!(group.contains(&own) && groups.contains(&group));
        }
    }

    #[test]
    fn one_group_more_moves_few_hosts() {
        let hosts = hosts(1000);
        let moved = hosts.iter().filter(|host| number(host, 16) != number(host, 17));
        let to_last = |host: &&Name| number(host, 17) == 16;
        assert!(moved.clone().all(|host| to_last(&host)) && moved.count() < 120);
    }
}
