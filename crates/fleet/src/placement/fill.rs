//! The order in which hosts get machines, and in which they give them up. Owns both orders.
//!
//! Invariant: the time depends on the number of machines only up to a bound: a count that nobody can want makes larger steps.

use super::space::Amounts;
use spillway_api::Spread;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Steps in which a number of machines is divided, about: up to twice as many are single machines.
const STEPS: u64 = 1 << 16;

/// A host that may get machines.
pub(super) struct Candidate {
    pub(super) host: usize,
    pub(super) zone: usize,
    pub(super) need: Amounts,
    pub(super) budget: Amounts,
    pub(super) left: Amounts,
    /// Part of the boot set that it has, in thousandths.
    pub(super) boot_set: u32,
    /// Machines of the catalog that it has.
    pub(super) count: u32,
    /// Machines of the catalog that it has names for.
    pub(super) most: u32,
}

/// Order of candidates of a zone; the greatest is first.
type Score = (u8, i64, i64, Reverse<usize>);

impl Candidate {
    fn score(&self, spread: Spread, number: usize) -> Score {
        let left = self.left.sixteenths(self.budget);
        let (count, boot_set) = (i64::from(self.count), i64::from(self.boot_set));
        match spread {
            // A few small machines are not a sixteenth of a host, and are on several hosts all the same.
            Spread::Even => (left, -count, boot_set, Reverse(number)),
            Spread::Pack => (16 - left, boot_set, count, Reverse(number)),
        }
    }

    /// Machines that it has space for, and names.
    fn fits(&self) -> u32 {
        self.left.fits(self.need).min(self.most.saturating_sub(self.count))
    }
}

/// Gives machines to candidates one after the other. `zones` has the machines of the catalog in each zone. Machines that fit nowhere are
/// returned.
pub(super) fn raise(candidates: &mut [Candidate], mut zones: Vec<u64>, machines: u64, spread: Spread) -> u64 {
    let mut heaps: Vec<BinaryHeap<(Score, usize)>> = zones.iter().map(|_| BinaryHeap::new()).collect();
    for (n, candidate) in candidates.iter().enumerate() {
        if candidate.fits() > 0 {
            heaps[candidate.zone].push((candidate.score(spread, n), n));
        }
    }
    let nonempty = (0..zones.len()).filter(|zone| !heaps[*zone].is_empty());
    let mut order: BinaryHeap<Reverse<(u64, usize)>> =
        nonempty.map(|zone| Reverse((zones[zone], zone))).collect();
    let step = (machines / STEPS).max(1);
    let mut missing = machines;
    while missing > 0 {
        let Some(Reverse((_, zone))) = order.pop() else { break };
        let (_, n) = heaps[zone].pop().expect("a zone without candidates is not put back");
        let candidate = &mut candidates[n];
        let most = step.min(missing).min(u64::from(u32::MAX - candidate.count)) as u32;
        let given = candidate.fits().min(most);
        candidate.left.take(candidate.need, given);
        candidate.count += given;
        zones[zone] += u64::from(given);
        missing -= u64::from(given);
        if given > 0 && candidate.fits() > 0 {
            heaps[zone].push((candidate.score(spread, n), n));
        }
        if !heaps[zone].is_empty() {
            order.push(Reverse((zones[zone], zone)));
        }
    }
    missing
}

/// A host that may give up machines.
pub(super) struct Giver {
    pub(super) zone: usize,
    pub(super) count: u32,
    /// Machines that somebody has claimed.
    pub(super) claimed: u32,
}

/// Takes machines from hosts: of the zone with most machines, of the host in it with most; claimed ones only when no host has others.
/// `zones` has the machines of the catalog in each zone. Machines that nobody could give up are returned.
pub(super) fn lower(givers: &mut [Giver], mut zones: Vec<u64>, machines: u64) -> u64 {
    let step = (machines / STEPS).max(1);
    let mut surplus = machines;
    for least in [Giver::kept_if_claimed, |_: &Giver| 0] {
        let mut heaps: Vec<BinaryHeap<(u32, usize)>> = zones.iter().map(|_| BinaryHeap::new()).collect();
        for (n, giver) in givers.iter().enumerate().filter(|(_, giver)| giver.count > least(giver)) {
            heaps[giver.zone].push((giver.count, n));
        }
        let nonempty = (0..zones.len()).filter(|zone| !heaps[*zone].is_empty());
        let mut order: BinaryHeap<(u64, Reverse<usize>)> =
            nonempty.map(|zone| (zones[zone], Reverse(zone))).collect();
        while surplus > 0 {
            let Some((_, Reverse(zone))) = order.pop() else { break };
            let (_, n) = heaps[zone].pop().expect("a zone without givers is not put back");
            let giver = &mut givers[n];
            let taken = step.min(surplus).min((giver.count - least(giver)).into()) as u32;
            giver.count -= taken;
            surplus -= u64::from(taken);
            zones[zone] = zones[zone].saturating_sub(taken.into());
            if giver.count > least(giver) {
                heaps[zone].push((giver.count, n));
            }
            if !heaps[zone].is_empty() {
                order.push((zones[zone], Reverse(zone)));
            }
        }
    }
    surplus
}

impl Giver {
    fn kept_if_claimed(&self) -> u32 {
        self.claimed.min(self.count)
    }
}
