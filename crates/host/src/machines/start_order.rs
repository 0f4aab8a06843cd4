//! The order in which catalogs start their machines with the daemon. Owns when each machine was first seen ready or failed.
//!
//! Invariant: no machine waits for ever. The machines of an order wait for those of lower orders, and no longer once none
//! of these has become ready or failed for [`PATIENCE`], which counts from the start of the daemon: the order is one of a boot.

use super::View;
use super::reconciler::CRASHES;
use super::registry::MachineRegistry;
use crate::store::Revision;
use spillway_api::{Catalog, MachineStatus, Name, Phase, Power};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long the next order waits after the last machine of this one that became ready or failed.
const PATIENCE: Duration = Duration::from_secs(600);

/// A machine that starts with the daemon.
struct Member<'a> {
    name: &'a Name,
    order: u32,
    delay: Duration,
    /// Whether it is ready or has failed.
    is_settled: bool,
}

/// What a machine waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderWait {
    /// Number of machines of lower orders that are neither ready nor failed.
    pub before: usize,
    /// When the wait ends, if that is known.
    pub until: Option<Instant>,
}

/// What people read of a machine that waits.
impl fmt::Display for OrderWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.before {
            0 => f.write_str("it starts after its catalog's start_delay_seconds"),
            1 => f.write_str("it waits for 1 machine of a lower start_order to be ready"),
            others => write!(f, "it waits for {others} machines of a lower start_order to be ready"),
        }
    }
}

/// Machines of the same order.
struct Level {
    /// When the machines of lower orders were all ready or failed, or were given up. `None`: they are not yet.
    released: Option<Instant>,
    /// Number of machines of lower orders that are neither.
    before: usize,
    is_lowest: bool,
}

/// The order as it was last seen.
struct Observed {
    /// When this daemon began.
    begun: Instant,
    levels: BTreeMap<u32, Level>,
    /// When each machine was first seen ready or failed.
    settled: HashMap<Name, Instant>,
}

/// Orders the starts of machines.
pub struct StartOrder {
    observed: Mutex<Observed>,
    registry: Arc<MachineRegistry>,
}

impl StartOrder {
    /// Creates an order that lets each machine start.
    pub fn new(registry: Arc<MachineRegistry>) -> StartOrder {
        let observed = Observed { begun: Instant::now(), levels: BTreeMap::new(), settled: HashMap::new() };
        StartOrder { observed: Mutex::new(observed), registry }
    }

    /// Whether the machines of some of these catalogs start before those of others.
    pub fn is_used(catalogs: &[Catalog]) -> bool {
        let mut orders = catalogs.iter().filter(|c| c.spec.autostart).map(|c| c.spec.start_order);
        orders.next().is_some_and(|first| orders.any(|other| other != first))
    }

    /// Looks at the machines of these catalogs, and wakes those that may start now. Returns when to look again at the
    /// latest.
    pub fn update<'a>(
        &self,
        catalogs: &'a [Catalog],
        views: impl Fn(&Name) -> &'a [View],
    ) -> Option<Instant> {
        let by_itself = catalogs.iter().filter(|catalog| catalog.spec.autostart);
        let members = by_itself.flat_map(|catalog| {
            let (order, delay) = (catalog.spec.start_order, catalog.spec.start_delay_seconds);
            let delay = Duration::from_secs(delay.into());
            let starts = |view: &&View| {
                let is_on = view.wanted.power == Power::On || view.revision == Revision::default();
                is_on && !view.wanted.drained
            };
            let member = move |view: &'a View| Member {
                name: &view.machine.name,
                order,
                delay,
                is_settled: is_settled(&view.status),
            };
            views(&catalog.name).iter().filter(starts).map(member)
        });
        let (released, next) = self.lock().update(&members.collect::<Vec<_>>(), Instant::now());
        self.registry.wake(&released);
        next
    }

    /// Whether this machine of this order may start; its catalog waits this long after the machines of lower orders. One that
    /// was ready or failed once has had its turn.
    pub fn may_start(&self, name: &Name, order: u32, delay_seconds: u32) -> Result<(), OrderWait> {
        self.lock().may_start(name, order, Duration::from_secs(delay_seconds.into()), Instant::now())
    }

    fn lock(&self) -> MutexGuard<'_, Observed> {
        self.observed.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Whether a machine is ready, or will hardly be soon. One whose start has failed is tried again, and may be ready then.
fn is_settled(status: &MachineStatus) -> bool {
    let crashes = status.run.as_ref().map_or(0, |run| run.crashes);
    match status.phase {
        Phase::Failed => status.permanent || usize::try_from(crashes).is_ok_and(|crashes| crashes >= CRASHES),
        Phase::Waiting => true,
        _ => status.ready,
    }
}

impl Observed {
    /// Returns the machines that may start now, and when to look again.
    fn update(&mut self, members: &[Member<'_>], now: Instant) -> (Vec<Name>, Option<Instant>) {
        let mut of: BTreeMap<u32, Vec<&Member<'_>>> = BTreeMap::new();
        let mut settled = HashMap::new();
        for member in members {
            of.entry(member.order).or_default().push(member);
            if let Some(at) = self.settled.get(member.name).copied().or(member.is_settled.then_some(now)) {
                settled.insert(member.name.clone(), at);
            }
        }
        self.settled = settled;
        let before = std::mem::take(&mut self.levels);
        let (mut woken, mut next) = (Vec::new(), None::<Instant>);
        let (mut released, mut left, mut is_lowest) = (Some(self.begun), 0, true);
        for (order, members) in of {
            if released.is_some() && before.get(&order).is_none_or(|level| level.released.is_none()) {
                woken.extend(members.iter().map(|member| member.name.clone()));
            }
            self.levels.insert(order, Level { released, before: left, is_lowest });
            let settled = members.iter().filter_map(|member| self.settled.get(member.name));
            let last = settled.clone().max().copied();
            let unsettled = members.len() - settled.count();
            if let Some(at) = released {
                let delay = members.iter().map(|member| member.delay).max().filter(|_| !is_lowest);
                let begins = at + delay.unwrap_or_default();
                let until = last.map_or(begins, |last| last.max(begins)) + PATIENCE;
                released = match unsettled {
                    0 => Some(last.map_or(at, |last| last.max(at))),
                    _ if now >= until => Some(until),
                    _ => {
                        next = Some(until);
                        None
                    }
                };
            }
            left = if released.is_some() { 0 } else { left + unsettled };
            is_lowest = false;
        }
        (woken, next)
    }

    fn may_start(&self, name: &Name, order: u32, delay: Duration, now: Instant) -> Result<(), OrderWait> {
        if self.settled.contains_key(name) {
            return Ok(());
        }
        let Some(level) = self.levels.get(&order).filter(|level| !level.is_lowest) else { return Ok(()) };
        match level.released.map(|released| released + delay) {
            Some(until) if until <= now => Ok(()),
            until => Err(OrderWait { before: level.before, until }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host in imagined time, whose machines are `order-number`.
    struct World {
        observed: Observed,
        now: Instant,
        machines: Vec<(Name, bool)>,
        delay: Duration,
    }

    impl World {
        fn new(machines: &[&str], delay_seconds: u64) -> World {
            let now = Instant::now();
            let machines = machines.iter().map(|name| (name.parse().unwrap(), false)).collect();
            let observed = Observed { begun: now, levels: BTreeMap::new(), settled: HashMap::new() };
            World { observed, now, machines, delay: Duration::from_secs(delay_seconds) }
        }

        fn settles(&mut self, name: &str) {
            let found = self.machines.iter_mut().find(|(machine, _)| machine.as_str() == name).unwrap();
            found.1 = true;
        }

        /// The orders whose machines are woken.
        fn look(&mut self) -> Vec<u32> {
            let order = |name: &Name| name.as_str().split('-').next().unwrap().parse::<u32>().unwrap();
            let member = |(name, is_settled): &'_ (Name, bool)| (name.clone(), *is_settled);
            let machines: Vec<(Name, bool)> = self.machines.iter().map(member).collect();
            let members: Vec<Member<'_>> = machines
                .iter()
                .map(|(name, is_settled)| Member {
                    name,
                    order: order(name),
                    delay: self.delay,
                    is_settled: *is_settled,
                })
                .collect();
            let (woken, _) = self.observed.update(&members, self.now);
            let mut woken: Vec<u32> = woken.iter().map(order).collect();
            woken.dedup();
            woken
        }

        fn may(&self, order: u32) -> Result<(), OrderWait> {
            self.may_again(&format!("{order}-new"))
        }

        fn may_again(&self, name: &str) -> Result<(), OrderWait> {
            let order = name.split('-').next().unwrap().parse().unwrap();
            self.observed.may_start(&name.parse().unwrap(), order, self.delay, self.now)
        }

        fn passes(&mut self, seconds: u64) {
            self.now += Duration::from_secs(seconds);
        }
    }

    #[test]
    fn the_machines_of_an_order_start_when_those_before_it_are_ready_or_have_failed() {
        let mut world = World::new(&["0-1", "0-2", "5-1", "7-1"], 30);
        assert_eq!(world.look(), [0]);
        assert_eq!(world.may(0), Ok(()), "nothing is before it, and no delay");
        assert_eq!(world.may(5), Err(OrderWait { before: 2, until: None }));
        assert_eq!(world.may(7), Err(OrderWait { before: 3, until: None }));
        world.settles("0-2");
        world.passes(10);
        assert_eq!((world.look(), world.may(5)), (vec![], Err(OrderWait { before: 1, until: None })));
        world.settles("0-1");
        world.passes(10);
        assert_eq!(world.look(), [5]);
        let until = Some(world.now + Duration::from_secs(30));
        assert_eq!(world.may(5), Err(OrderWait { before: 0, until }));
        world.passes(29);
        world.look();
        assert!(world.may(5).is_err());
        world.passes(1);
        assert_eq!((world.may(5), world.may(7)), (Ok(()), Err(OrderWait { before: 1, until: None })));
        // One that was ready and restarts is not waited for again.
        world.machines[0].1 = false;
        world.look();
        assert_eq!(world.may(5), Ok(()));
    }

    #[test]
    fn one_that_is_tried_again_soon_has_not_failed() {
        use crate::error::HostError;
        use crate::machines::run::MachineFolder;
        use crate::machines::status::ObservedMachine;
        use spillway_api::ErrorCode;
        let folder = MachineFolder::of("/nonexistent".as_ref(), &"desk-001".parse().unwrap());
        let run = serde_json::from_value(serde_json::json!({
            "uuid": "u", "boot": "b", "image": "debian", "version": 1, "spec": { "image": "debian" },
            "hypervisor": "qemu", "restarts": 0, "resets": 0, "queues": 1, "asked": false, "ready": false,
        }));
        let run = run.unwrap();
        let passing = HostError::new(ErrorCode::Exhausted, "no port is free");
        for (why, crashes, settles) in [
            (passing.clone(), 0, false),
            (passing.clone(), 4, false),
            (passing.clone(), 5, true),
            (passing.permanent(), 0, true),
        ] {
            let mut machine = ObservedMachine::found(Some(&run), &folder);
            assert!(!is_settled(&machine.status(Revision::default())));
            machine.record_failure(&why, Revision::default());
            machine.set_crashes(crashes);
            let status = machine.status(Revision::default());
            assert_eq!((status.phase, is_settled(&status)), (Phase::Failed, settles), "{why} {crashes}");
        }
    }

    #[test]
    fn nothing_waits_for_ever() {
        let mut world = World::new(&["0-1", "0-2", "1-1", "2-1"], 60);
        world.look();
        world.passes(599);
        world.settles("0-1");
        assert!(world.look().is_empty(), "one of them makes progress");
        world.passes(599);
        assert!(world.look().is_empty());
        world.passes(1);
        assert_eq!(world.look(), [1]);
        assert!(world.may(1).is_err());
        world.passes(60);
        assert_eq!((world.may(1), world.may(2).is_err()), (Ok(()), true));
        world.passes(599);
        assert!(world.look().is_empty());
        world.passes(1);
        assert_eq!(world.look(), [2], "600 s after the machines of order 1 could begin");
    }

    #[test]
    fn one_that_was_ready_once_starts_again_whatever_the_others_do() {
        let mut world = World::new(&["0-1", "1-1", "1-2"], 0);
        world.settles("1-1");
        world.look();
        world.machines[1].1 = false;
        world.look();
        assert_eq!(world.may_again("1-1"), Ok(()));
        assert_eq!(world.may_again("1-2"), Err(OrderWait { before: 1, until: None }));
    }

    #[test]
    fn what_runs_when_a_daemon_begins_is_waited_for_by_nobody() {
        let mut world = World::new(&["0-1", "1-1"], 0);
        world.settles("0-1");
        assert_eq!(world.look(), [0, 1]);
        assert_eq!((world.may(1), world.may(9)), (Ok(()), Ok(())));
        // A machine that its catalog gets later waits for none but its own start.
        world.passes(5000);
        world.machines.push(("0-2".parse().unwrap(), false));
        world.look();
        assert_eq!(world.may(1), Ok(()));
    }
}
