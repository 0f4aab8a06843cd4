//! Space of a host: its budget, and what machines take of it. Owns the arithmetic.
//!
//! Invariant: nothing overflows, whatever hosts report.

use crate::records::BudgetRecord;
use serde::Serialize;
use spillway_api::Need;
use std::fmt;

/// What a machine takes of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resource {
    /// Guarantees of caches, in bytes.
    GuaranteeBytes,
    /// Limits of caches, in bytes.
    LimitBytes,
    /// Memory of guests and caches, in bytes.
    MemoryBytes,
    /// Processors.
    Vcpus,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Resource::GuaranteeBytes => "guaranteed cache",
            Resource::LimitBytes => "cache",
            Resource::MemoryBytes => "memory",
            Resource::Vcpus => "processors",
        })
    }
}

/// A resource of which a host has less left than a machine needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Shortage {
    /// What is missing.
    pub resource: Resource,
    /// What a machine needs.
    pub needed: u64,
    /// What is left.
    pub left: u64,
}

/// An amount of each resource, in the order of [`Resource`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Amounts([u64; 4]);

const RESOURCES: [Resource; 4] =
    [Resource::GuaranteeBytes, Resource::LimitBytes, Resource::MemoryBytes, Resource::Vcpus];

impl Amounts {
    pub(super) fn of_machine(need: Need) -> Amounts {
        Amounts([need.guarantee_bytes, need.limit_bytes, need.memory_bytes(), need.vcpus])
    }

    pub(super) fn of_budget(budget: &BudgetRecord) -> Amounts {
        Amounts([budget.guarantee_bytes, budget.limit_bytes, budget.memory_bytes, budget.vcpus])
    }

    /// Takes so many machines' needs of what is left.
    pub(super) fn take(&mut self, need: Amounts, machines: u32) {
        for (left, needed) in self.0.iter_mut().zip(need.0) {
            *left = left.saturating_sub(needed.saturating_mul(machines.into()));
        }
    }

    /// Machines that what is left is enough for.
    pub(super) fn fits(&self, need: Amounts) -> u32 {
        let of_each = self.0.iter().zip(need.0).filter_map(|(left, needed)| left.checked_div(needed));
        of_each.min().map_or(u32::MAX, |machines| machines.min(u32::MAX.into()) as u32)
    }

    /// The first resource that is not enough for a machine.
    pub(super) fn shortage(&self, need: Amounts) -> Option<Shortage> {
        let all = RESOURCES.into_iter().zip(need.0).zip(self.0);
        all.map(|((resource, needed), left)| Shortage { resource, needed, left })
            .find(|shortage| shortage.left < shortage.needed)
    }

    /// Memory, in sixteenths of that of a budget, rounded up.
    pub(super) fn sixteenths(&self, of: Amounts) -> u8 {
        let (left, all) = (u128::from(self.0[2]), u128::from(of.0[2]));
        if all == 0 { 0 } else { (left * 16).div_ceil(all).min(16) as u8 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scarcest_resource_counts() {
        let need = Need { guarantee_bytes: 0, limit_bytes: 2, guest_bytes: 3, vcpus: 1 };
        let need = Amounts::of_machine(need);
        let mut left = Amounts([0, 100, 50, 12]);
        assert_eq!(left.fits(need), 10, "memory");
        left.take(need, 10);
        assert_eq!(left, Amounts([0, 80, 0, 2]));
        let shortage = Shortage { resource: Resource::MemoryBytes, needed: 5, left: 0 };
        assert_eq!((left.fits(need), left.shortage(need)), (0, Some(shortage)));
        left.take(need, u32::MAX);
        assert_eq!(left, Amounts([0, 0, 0, 0]));
        assert_eq!(left.fits(Amounts::default()), u32::MAX, "what needs nothing fits always");
        let most = Amounts([u64::MAX; 4]);
        assert_eq!((most.sixteenths(most), left.sixteenths(most), left.sixteenths(left)), (16, 0, 0));
        assert_eq!(Amounts([0, 0, 49, 0]).sixteenths(Amounts([0, 0, 100, 0])), 8);
    }
}
