//! Memory that caches may take. Owns who was promised how much.
//!
//! Invariant: what is guaranteed fits the budget, and what may be taken fits it as often as is allowed, but for what ran
//! before the budget was made smaller.

use crate::error::HostError;
use spillway_api::{CatalogSpec, ErrorCode, Name};
use spillway_worker::supervisor::bytes;
use std::collections::HashMap;

/// What a cache is promised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// It always has this.
    pub guarantee_bytes: u64,
    /// It may have this.
    pub limit_bytes: u64,
}

impl Need {
    /// Of a machine with these settings.
    pub fn of(spec: &CatalogSpec) -> Need {
        let limit_bytes = spec.ram_bytes().unwrap_or(0);
        Need { guarantee_bytes: spec.ram_guarantee_bytes.min(limit_bytes), limit_bytes }
    }
}

/// The budget of a host.
#[derive(Debug)]
pub struct Budget {
    total_bytes: u64,
    /// Limits may be so many percent of it together.
    overcommit_percent: u32,
    promised: HashMap<Name, Need>,
}

impl Budget {
    /// With nothing promised.
    pub fn new(total_bytes: u64, overcommit_percent: u32) -> Budget {
        Budget { total_bytes, overcommit_percent, promised: HashMap::new() }
    }

    /// Promises a machine this instead of what it was promised before, if that fits.
    pub fn promise(&mut self, name: &Name, need: Need) -> Result<(), HostError> {
        let others = || self.promised.iter().filter(|(other, _)| *other != name).map(|(_, need)| need);
        let guaranteed: u64 = others().map(|need| need.guarantee_bytes).sum();
        let limits: u64 = others().map(|need| need.limit_bytes).sum();
        let before = self.promised.get(name).copied().unwrap_or_default();
        let most = (u128::from(self.total_bytes) * u128::from(self.overcommit_percent) / 100) as u64;
        let refuse = |what: &str, wanted: u64, given: u64, most: u64, advice: &str| {
            let (wanted, given, most) = (bytes(wanted), bytes(given), bytes(most));
            let count = others().count();
            let message =
                format!("its cache {what} {wanted}, and {count} others have {given} of {most}: {advice}");
            Err(HostError::new(ErrorCode::Exhausted, message))
        };
        // What gets less fits, even where too much was promised before.
        if need.guarantee_bytes > before.guarantee_bytes
            && guaranteed + need.guarantee_bytes > self.total_bytes
        {
            let advice = "stop some, lower ram_guarantee_bytes, or raise spillwayd's --ram-budget";
            return refuse("is guaranteed", need.guarantee_bytes, guaranteed, self.total_bytes, advice);
        }
        if need.limit_bytes > before.limit_bytes && limits + need.limit_bytes > most {
            let advice = "stop some, lower ram_bytes, or raise spillwayd's --ram-budget or --overcommit";
            return refuse("may take", need.limit_bytes, limits, most, advice);
        }
        self.promised.insert(name.clone(), need);
        Ok(())
    }

    /// A machine has this, whether it fits or not: it ran before.
    pub fn note(&mut self, name: &Name, need: Need) {
        self.promised.insert(name.clone(), need);
    }

    /// A machine has nothing any more.
    pub fn give_back(&mut self, name: &Name) {
        self.promised.remove(name);
    }
}

/// The host's memory.
pub fn host_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram * u64::from(info.mem_unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(guarantee_bytes: u64, limit_bytes: u64) -> Need {
        Need { guarantee_bytes, limit_bytes }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_numbers() {
        let mut budget = Budget::new(1 << 30, 200);
        let name = |text: &str| text.parse::<Name>().unwrap();
        let mib = 1 << 20;
        budget.promise(&name("a"), need(512 * mib, 1024 * mib)).unwrap();
        budget.promise(&name("b"), need(256 * mib, 768 * mib)).unwrap();
        let error = budget.promise(&name("c"), need(257 * mib, 300 * mib)).unwrap_err();
        assert!(
            error.code == ErrorCode::Exhausted
                && error.message.contains("2 others have 768.0 MiB of 1.0 GiB"),
            "{error}"
        );
        let error = budget.promise(&name("c"), need(0, 257 * mib)).unwrap_err();
        assert!(
            error.message.contains("may take 257.0 MiB, and 2 others have 1.8 GiB of 2.0 GiB"),
            "{error}"
        );
        budget.promise(&name("c"), need(256 * mib, 256 * mib)).unwrap();
        // More for one of them, counted once; less always fits.
        budget.promise(&name("b"), need(256 * mib, 769 * mib)).unwrap_err();
        budget.promise(&name("b"), need(0, 100 * mib)).unwrap();
        budget.promise(&name("b"), need(256 * mib, 768 * mib)).unwrap();
        budget.give_back(&name("a"));
        budget.promise(&name("d"), need(512 * mib, 1024 * mib)).unwrap();
        // What ran before has it.
        budget.note(&name("e"), need(1 << 40, 1 << 40));
        budget.promise(&name("f"), need(1, 1)).unwrap_err();
        budget.promise(&name("e"), need(1 << 39, 1 << 39)).unwrap();
    }

    #[test]
    fn a_host_has_memory() {
        assert!(host_bytes() > 64 << 20);
    }
}
