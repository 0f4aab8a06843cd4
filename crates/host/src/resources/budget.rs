//! The host's budget for machines: memory for guests and caches, and processors. Owns the promises, and the queue of
//! waiting machines.
//!
//! Invariant: the promises fit the host's capacity, except for machines that ran before the capacity was reduced. Each
//! call takes constant time in the number of machines, apart from the names of waiting ones.

use crate::error::HostError;
pub use spillway_api::Need;
use spillway_api::{ErrorCode, HostBudget, Name};
use spillway_control::bytes;
use std::collections::HashMap;

/// Capacity of a host for machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Memory that the guarantees of all caches may take together.
    pub ram_bytes: u64,
    /// Limits of all caches together, in percent of that.
    pub ram_percent: u32,
    /// Memory of the host.
    pub host_bytes: u64,
    /// Memory that machines do not get.
    pub reserve_bytes: u64,
    /// Guests and limits of caches together, in percent of the rest.
    pub memory_percent: u32,
    /// Processors of the host.
    pub host_cpus: u32,
    /// Processors of all guests together, in percent of those.
    pub vcpu_percent: u32,
}

/// Capacity of a host with enough of everything.
#[cfg(test)]
pub(crate) const NO_LIMITS: Capacity = Capacity {
    ram_bytes: u64::MAX,
    ram_percent: 100,
    host_bytes: u64::MAX,
    reserve_bytes: 0,
    memory_percent: 100,
    host_cpus: u32::MAX,
    vcpu_percent: 100,
};

/// One of the resources in the budget.
struct BudgetLine {
    /// The component of a need.
    of: fn(Need) -> u64,
    /// Capacity.
    most: u64,
    /// Whether it is measured in bytes.
    is_size: bool,
    /// Name of the resource.
    what: &'static str,
    advice: &'static str,
}

impl BudgetLine {
    fn text(&self, value: u64) -> String {
        if self.is_size { bytes(value) } else { value.to_string() }
    }
}

/// The most that all machines of a host may take together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapacityLimits {
    /// Guarantees of caches, in bytes.
    pub guarantee_bytes: u64,
    /// Limits of caches, in bytes.
    pub limit_bytes: u64,
    /// Memory of guests, and limits of caches, in bytes.
    pub memory_bytes: u64,
    /// Processors of guests.
    pub vcpus: u64,
}

impl Capacity {
    /// Returns the most that all machines may take together.
    pub fn most(&self) -> CapacityLimits {
        let [guarantee, limit, memory, vcpus] = self.lines().map(|line| line.most);
        CapacityLimits { guarantee_bytes: guarantee, limit_bytes: limit, memory_bytes: memory, vcpus }
    }

    fn memory_limit_bytes(&self) -> u64 {
        percent(self.host_bytes.saturating_sub(self.reserve_bytes), self.memory_percent)
    }

    fn lines(&self) -> [BudgetLine; 4] {
        let size = |of, most, what, advice| BudgetLine { of, most, is_size: true, what, advice };
        [
            size(
                |need| need.guarantee_bytes,
                self.ram_bytes,
                "guaranteed cache",
                "lower ram_guarantee_bytes, or raise spillwayd's --ram-budget",
            ),
            size(
                |need| need.limit_bytes,
                percent(self.ram_bytes, self.ram_percent),
                "cache",
                "lower ram_bytes, or raise spillwayd's --ram-budget or --overcommit",
            ),
            size(
                Need::memory_bytes,
                self.memory_limit_bytes(),
                "memory for guest and cache",
                "lower memory_bytes, or raise spillwayd's --memory-overcommit or lower its --memory-reserve",
            ),
            BudgetLine {
                of: |need| need.vcpus,
                most: percent(self.host_cpus.into(), self.vcpu_percent),
                is_size: false,
                what: "processors",
                advice: "lower vcpus, or raise spillwayd's --vcpu-overcommit",
            },
        ]
    }

    /// Returns the resource that is insufficient for this need beside `others`. A need that does not exceed the one
    /// before always fits.
    fn lacks(&self, others: Need, before: Need, need: Need) -> Option<BudgetLine> {
        self.lines().into_iter().find(|line| {
            let (before, need) = ((line.of)(before), (line.of)(need));
            need > before && (line.of)(others).saturating_add(need) > line.most
        })
    }

    /// Refuses a need that would not fit even on an otherwise empty host.
    pub fn fits_alone(&self, need: Need) -> Result<(), HostError> {
        let Some(line) = self.lacks(Need::default(), Need::default(), need) else { return Ok(()) };
        let (wanted, most) = (line.text((line.of)(need)), line.text(line.most));
        let (what, advice) = (line.what, line.advice);
        let message =
            format!("a machine needs {wanted} of {what}, and this host has {most} in all: {advice}");
        Err(HostError::new(ErrorCode::Exhausted, message))
    }

    /// Returns a message with the number of machines that can run at the same time, if that is less than `count`.
    pub fn fewer(&self, need: Need, count: u32) -> Option<String> {
        let fit = |line: &BudgetLine| line.most.checked_div((line.of)(need)).unwrap_or(u64::MAX);
        let line = self.lines().into_iter().min_by_key(fit)?;
        let fit = fit(&line);
        (fit < count.into()).then(|| {
            let (each, most) = (line.text((line.of)(need)), line.text(line.most));
            let (what, advice) = (line.what, line.advice);
            format!(
                "of its {count} machines {fit} can run at a time, the others wait: each needs {each} of {what}, and this \
                 host has {most}: {advice}"
            )
        })
    }
}

fn percent(value: u64, percent: u32) -> u64 {
    u64::try_from(u128::from(value) * u128::from(percent) / 100).unwrap_or(u64::MAX)
}

/// A waiting machine and its need.
#[derive(Debug)]
struct Waiter {
    /// Position in the queue; earlier ones are lower.
    turn: u64,
    need: Need,
}

/// The budget of a host.
#[derive(Debug)]
pub struct Budget {
    capacity: Capacity,
    promised: HashMap<Name, Need>,
    /// Sum of all promises.
    sum: Need,
    waiting: HashMap<Name, Waiter>,
    turns: u64,
}

impl Budget {
    /// Creates a budget without promises.
    pub fn new(capacity: Capacity) -> Budget {
        Budget { capacity, promised: HashMap::new(), sum: Need::default(), waiting: HashMap::new(), turns: 0 }
    }

    /// Replaces a machine's promise if the new one fits; else the machine waits. Returns the waiting machines that may
    /// fit now.
    pub fn promise(&mut self, name: &Name, need: Need) -> Result<Vec<Name>, HostError> {
        let before = self.promised(name);
        let others = self.sum.without(before);
        if let Some(line) = self.capacity.lacks(others, before, need) {
            let (wanted, given) = (line.text((line.of)(need)), line.text((line.of)(others)));
            let count = self.promised.len() - usize::from(self.promised.contains_key(name));
            let (what, most, advice) = (line.what, line.text(line.most), line.advice);
            let message = format!(
                "it needs {wanted} of {what}, and {count} others have {given} of {most}: stop some, {advice}"
            );
            let turn = self.turns;
            self.turns += 1;
            self.waiting.entry(name.clone()).or_insert(Waiter { turn, need }).need = need;
            return Err(HostError::new(ErrorCode::Exhausted, message));
        }
        self.note(name, need);
        let is_less = self.capacity.lines().iter().any(|line| (line.of)(need) < (line.of)(before));
        Ok(if is_less { self.next() } else { Vec::new() })
    }

    /// Records the need of a machine that runs already, whether it fits or not.
    pub fn note(&mut self, name: &Name, need: Need) {
        self.waiting.remove(name);
        let before = self.promised.insert(name.clone(), need).unwrap_or_default();
        self.sum = self.sum.without(before).and(need);
    }

    /// Returns what a machine is promised.
    pub fn promised(&self, name: &Name) -> Need {
        self.promised.get(name).copied().unwrap_or_default()
    }

    /// Lowers the promise of a waiting machine to at most this. Returns the waiting machines that may fit now.
    pub fn lower(&mut self, name: &Name, most: Need) -> Vec<Name> {
        let Some(before) = self.promised.get(name).copied() else { return Vec::new() };
        let after = before.at_most(most);
        if after == before {
            return Vec::new();
        }
        self.sum = self.sum.without(before).and(after);
        if after == Need::default() {
            self.promised.remove(name);
        } else {
            self.promised.insert(name.clone(), after);
        }
        self.next()
    }

    /// Removes a machine's promise and its place in the queue. Returns the waiting machines that may fit now.
    pub fn give_back(&mut self, name: &Name) -> Vec<Name> {
        self.waiting.remove(name);
        let Some(had) = self.promised.remove(name) else { return Vec::new() };
        self.sum = self.sum.without(had);
        self.next()
    }

    /// Returns the waiting machines that would fit, in the order of the queue, each beside those before it.
    fn next(&self) -> Vec<Name> {
        let mut waiting: Vec<(&Name, &Waiter)> = self.waiting.iter().collect();
        waiting.sort_by_key(|(_, waiter)| waiter.turn);
        let mut sum = self.sum;
        let mut next = Vec::new();
        for (name, waiter) in waiting {
            let before = self.promised.get(name).copied().unwrap_or_default();
            let others = sum.without(before);
            if self.capacity.lacks(others, before, waiter.need).is_none() {
                sum = others.and(waiter.need);
                next.push(name.clone());
            }
        }
        next
    }

    /// Describes the budget and how much of it is promised.
    pub fn describe(&self) -> HostBudget {
        let Capacity { ram_bytes, ram_percent, host_bytes, reserve_bytes, host_cpus, .. } = self.capacity;
        let [.., processors] = self.capacity.lines();
        HostBudget {
            host_memory_bytes: host_bytes,
            reserve_bytes,
            memory_limit_bytes: self.capacity.memory_limit_bytes(),
            guest_bytes: self.sum.guest_bytes,
            ram_bytes: self.sum.limit_bytes,
            ram_limit_bytes: percent(ram_bytes, ram_percent),
            ram_guaranteed_bytes: self.sum.guarantee_bytes,
            ram_guarantee_limit_bytes: ram_bytes,
            host_cpus,
            vcpus: self.sum.vcpus,
            vcpu_limit: processors.most,
            waiting: self.waiting.len() as u32,
        }
    }
}

/// Memory of the host.
pub fn host_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram * u64::from(info.mem_unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn caches(guarantee_bytes: u64, limit_bytes: u64) -> Need {
        Need { guarantee_bytes, limit_bytes, ..Need::default() }
    }

    fn guest(guest_bytes: u64, vcpus: u64) -> Need {
        Need { limit_bytes: 256 * MIB, guest_bytes, vcpus, ..Need::default() }
    }

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn budget(ram_percent: u32, host_bytes: u64) -> Budget {
        Budget::new(Capacity {
            ram_bytes: GIB,
            ram_percent,
            host_bytes,
            reserve_bytes: GIB,
            memory_percent: 100,
            host_cpus: 2,
            vcpu_percent: 400,
        })
    }

    #[test]
    fn a_cache_that_does_not_fit_is_refused_with_numbers() {
        let mut budget = budget(200, 64 * GIB);
        budget.promise(&name("a"), caches(512 * MIB, 1024 * MIB)).unwrap();
        budget.promise(&name("b"), caches(256 * MIB, 768 * MIB)).unwrap();
        let error = budget.promise(&name("c"), caches(257 * MIB, 300 * MIB)).unwrap_err();
        assert!(
            error.code == ErrorCode::Exhausted
                && error.message.contains("2 others have 768.0 MiB of 1.0 GiB"),
            "{error}"
        );
        let error = budget.promise(&name("c"), caches(0, 257 * MIB)).unwrap_err();
        assert!(
            error.message.contains("needs 257.0 MiB of cache, and 2 others have 1.8 GiB of 2.0 GiB"),
            "{error}"
        );
        budget.promise(&name("c"), caches(256 * MIB, 256 * MIB)).unwrap();
        // More for one of them, counted once; less always fits.
        budget.promise(&name("b"), caches(256 * MIB, 769 * MIB)).unwrap_err();
        budget.promise(&name("b"), caches(0, 100 * MIB)).unwrap();
        budget.promise(&name("b"), caches(256 * MIB, 768 * MIB)).unwrap();
        budget.give_back(&name("a"));
        budget.promise(&name("d"), caches(512 * MIB, 1024 * MIB)).unwrap();
        // What ran before has it.
        budget.note(&name("e"), caches(1 << 40, 1 << 40));
        budget.promise(&name("f"), caches(1, 1)).unwrap_err();
        budget.promise(&name("e"), caches(1 << 39, 1 << 39)).unwrap();
    }

    #[test]
    fn guests_have_memory_and_processors_beside_the_caches() {
        let mut budget = budget(400, 11 * GIB);
        for n in 0..4 {
            budget.promise(&name(&format!("m{n}")), guest(2 * GIB, 1)).unwrap();
        }
        let error = budget.promise(&name("x"), guest(2 * GIB, 1)).unwrap_err();
        let why = "it needs 2.2 GiB of memory for guest and cache, and 4 others have 9.0 GiB of 10.0 GiB: stop some, lower";
        assert!(error.code == ErrorCode::Exhausted && error.message.starts_with(why), "{error}");
        let error = budget.promise(&name("y"), guest(64 * MIB, 5)).unwrap_err();
        assert!(error.message.starts_with("it needs 5 of processors, and 4 others have 4 of 8"), "{error}");
        let described = budget.describe();
        assert_eq!((described.guest_bytes, described.ram_bytes), (8 * GIB, GIB));
        assert_eq!((described.memory_limit_bytes, described.reserve_bytes), (10 * GIB, GIB));
        assert_eq!((described.vcpus, described.vcpu_limit, described.waiting), (4, 8, 2));
        // Overcommitted by choice.
        budget.capacity.memory_percent = 200;
        budget.promise(&name("x"), guest(2 * GIB, 1)).unwrap();
        assert_eq!(budget.describe().waiting, 1);
    }

    #[test]
    fn who_waits_is_next_in_the_order_of_coming_if_it_fits() {
        let mut budget = budget(400, 7 * GIB);
        let guest = |gib: u64| Need { guest_bytes: gib * GIB, ..Need::default() };
        budget.promise(&name("a"), guest(4)).unwrap();
        budget.promise(&name("b"), guest(2)).unwrap();
        for (waiter, gib) in [("large", 6), ("two", 2), ("three", 3), ("one", 1)] {
            budget.promise(&name(waiter), guest(gib)).unwrap_err();
        }
        // Asked again it keeps its place.
        budget.promise(&name("two"), guest(2)).unwrap_err();
        assert_eq!(budget.give_back(&name("nobody")), []);
        assert_eq!(budget.give_back(&name("one")), [], "it had nothing, and waits no more");
        budget.promise(&name("one"), guest(1)).unwrap_err();
        assert_eq!(budget.give_back(&name("a")), [name("two"), name("one")]);
        budget.promise(&name("two"), guest(2)).unwrap();
        budget.promise(&name("one"), guest(1)).unwrap();
        // One that needs less than before makes space too.
        assert_eq!(budget.promise(&name("b"), guest(0)).unwrap(), [name("three")]);
        assert_eq!(budget.describe().waiting, 2);
    }

    /// Machines that all want more than before would else keep each other from having any.
    #[test]
    fn who_waits_keeps_nothing_of_what_its_last_run_had() {
        let mut budget = budget(400, 9 * GIB);
        let guest = |gib: u64| Need { guest_bytes: gib * GIB, ..caches(0, 0) };
        let names = ["a", "b", "c", "d"].map(name);
        names.iter().for_each(|name| _ = budget.promise(name, guest(2)).unwrap());
        budget.promise(&names[0], guest(4)).unwrap_err();
        assert_eq!(budget.lower(&names[0], Need::default()), [], "the others have too much still");
        budget.promise(&names[1], guest(5)).unwrap_err();
        // Both have ended: the first can have what it wants, and then the second cannot.
        assert_eq!(budget.lower(&names[1], Need::default()), [names[0].clone()]);
        budget.promise(&names[0], guest(4)).unwrap();
        assert_eq!(budget.lower(&names[1], Need::default()), [], "it has nothing more to give");
        // One whose disk is served keeps what that has, and none is given more by it.
        let both = Need { limit_bytes: 64 * MIB, ..guest(2) };
        budget.note(&names[2], both);
        budget.lower(&names[2], Need { limit_bytes: 128 * MIB, ..both }.without_guest());
        assert_eq!(budget.promised[&names[2]], caches(0, 64 * MIB));
    }

    #[test]
    fn what_can_never_fit_is_known_before_it_is_tried() {
        let capacity = budget(100, 24 * GIB).capacity;
        let error = capacity.fits_alone(guest(24 * GIB, 1)).unwrap_err();
        let why = "a machine needs 24.2 GiB of memory for guest and cache, and this host has 23.0 GiB in all";
        assert!(error.message.starts_with(why), "{error}");
        capacity.fits_alone(guest(8 * GIB, 1)).unwrap();
        assert!(capacity.fits_alone(guest(u64::MAX, u64::MAX)).is_err());
        let warning = capacity.fewer(guest(8 * GIB, 1), 40).unwrap();
        assert!(
            warning
                .starts_with("of its 40 machines 2 can run at a time, the others wait: each needs 8.2 GiB")
        );
        assert_eq!(capacity.fewer(guest(8 * GIB, 1), 2), None);
        assert_eq!(capacity.fewer(Need::default(), u32::MAX), None);
    }

    /// The same steps among many take as long as among few: else starting all of them takes the square of that. By the
    /// medians of pairs that are measured in turn, with a wide margin: whatever else the host does slows both.
    #[test]
    fn promises_do_not_slow_down_with_their_number() {
        let [mut few, mut many] = [1_000, 100_000].map(|count| {
            let mut budget = Budget::new(NO_LIMITS);
            (0..count).for_each(|n| budget.note(&name(&format!("m{n}")), guest(0, 0)));
            budget
        });
        let names: Vec<Name> = (0..100).map(|n| name(&format!("x{n}"))).collect();
        let took = |budget: &mut Budget| {
            let begun = std::time::Instant::now();
            names.iter().for_each(|name| assert!(budget.promise(name, guest(MIB, 1)).is_ok()));
            names.iter().for_each(|name| assert_eq!(budget.give_back(name), []));
            begun.elapsed()
        };
        let pairs: Vec<_> = (0..41).map(|_| (took(&mut few), took(&mut many))).collect();
        let median = |of: fn(&(std::time::Duration, std::time::Duration)) -> std::time::Duration| {
            let mut all: Vec<_> = pairs.iter().map(of).collect();
            all.sort();
            all[all.len() / 2]
        };
        let (few, many) = (median(|pair| pair.0), median(|pair| pair.1));
        assert!(many < few * 20, "{few:?} {many:?}");
    }

    #[test]
    fn a_host_has_memory() {
        assert!(host_bytes() > 64 << 20);
    }
}
