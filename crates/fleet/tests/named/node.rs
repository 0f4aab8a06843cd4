//! A host of the simulation: its clock, its daemon with the true membership, placer and decisions about names, its VMMs and its guard.

use crate::Removed;
use crate::sample::{identity, name};
use crate::store::Store;
use spillway_api::{Hypervisor, IsolationAction, Name};
use spillway_fleet::Moment;
use spillway_fleet::membership::{HostMembership, KnownLease, OwnHost, Standing};
use spillway_fleet::named::{Belief, HostNames, NameOrder, NamedOrders, RunningName};
use spillway_fleet::placer::Placer;
use spillway_fleet::records::AliveRecord;
use spillway_fleet::transaction::Transaction;
use spillway_fleet::view::FleetView;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// QEMU waits for the command to begin (`-S`).
    Waiting,
    Running,
    Paused,
}

pub struct Vmm {
    pub on_isolation: IsolationAction,
    pub uuid: String,
    pub phase: Phase,
    /// When it has ended, if it was killed.
    pub ends: Option<u64>,
}

/// A daemon's process.
pub struct Daemon {
    /// Number of the process among all of the simulation.
    pub number: u64,
    pub membership: HostMembership,
    pub names: HostNames,
    pub placer: Placer,
    pub view: FleetView,
    /// Changes of the log that the view has.
    pub followed: usize,
    pub lease: Option<KnownLease>,
    pub renews_next: Moment,
    /// When the request to renew that is open was sent.
    pub renewing: Option<Moment>,
    /// Whether a transaction of the membership is open, or one for names that were given up.
    pub writes: bool,
    pub releases: bool,
    pub tries: bool,
    /// What it had decided when it was stopped.
    pub decided: Option<(NamedOrders, Option<Transaction>)>,
}

/// What becomes a VMM.
#[derive(Clone, Debug)]
pub struct Fork {
    pub machine: Name,
    pub on_isolation: IsolationAction,
    pub uuid: String,
}

pub struct Node {
    pub host: Name,
    /// Identity of the host in its records. Another node has them if they were copied.
    pub host_id: String,
    /// Whether its daemon hangs for ever. What runs there goes on until the guard ends it.
    pub is_retired: bool,
    pub rate: f64,
    pub offset: f64,
    /// Number of this boot among all of the simulation.
    pub boot: u64,
    /// The boot that the records of the host are of.
    pub recorded_boot: u64,
    pub is_off: bool,
    pub paused_until: u64,
    /// When the whole host has gone on after it had stood still.
    pub resumed: u64,
    pub stopped_until: u64,
    pub cut_until: u64,
    pub lag_ms: u64,
    pub daemon: Option<Daemon>,
    pub begins_at: u64,
    pub ticks_at: u64,
    /// Highest epoch, as recorded on the host.
    pub highest: i64,
    /// What the guard's file says.
    pub deadline: Moment,
    pub vmms: BTreeMap<Name, Vmm>,
    /// Forked processes that have not executed QEMU yet.
    pub forked: BTreeMap<Name, IsolationAction>,
    /// Machines that somebody has claimed until this moment.
    pub claimed: BTreeMap<Name, u64>,
}

impl Node {
    pub fn new(host: &str, boot: u64, rate: f64) -> Node {
        Node {
            host: name(host),
            host_id: format!("host of boot {boot}"),
            is_retired: false,
            rate,
            offset: 1_000_000.0,
            boot,
            recorded_boot: boot,
            is_off: false,
            paused_until: 0,
            resumed: 0,
            stopped_until: 0,
            cut_until: 0,
            lag_ms: 100,
            daemon: None,
            begins_at: 0,
            ticks_at: 0,
            highest: 0,
            deadline: Moment(0),
            vmms: BTreeMap::new(),
            forked: BTreeMap::new(),
            claimed: BTreeMap::new(),
        }
    }

    pub fn clock(&self, now: u64) -> Moment {
        Moment((self.offset + self.rate * now as f64) as u64)
    }

    pub fn runs(&self, now: u64) -> bool {
        !self.is_off && now >= self.paused_until
    }

    pub fn daemon_runs(&self, now: u64) -> bool {
        self.runs(now) && now >= self.stopped_until && !self.is_retired && self.daemon.is_some()
    }

    /// Another machine with the records of this one.
    pub fn copy(&self, boot: u64, rate: f64) -> Node {
        let (host_id, recorded_boot, highest) = (self.host_id.clone(), self.recorded_boot, self.highest);
        Node { host_id, recorded_boot, highest, ..Node::new(self.host.as_str(), boot, rate) }
    }

    /// Whether all that runs there, or is about to, is ended by the guard.
    pub fn is_guarded(&self) -> bool {
        let of_vmms = self.vmms.values().map(|vmm| vmm.on_isolation);
        of_vmms.chain(self.forked.values().copied()).all(|of| of != IsolationAction::Keep)
    }

    pub fn begin_daemon(&mut self, number: u64, removed: Removed) {
        let instance = format!("{number}");
        let alive = AliveRecord {
            instance: instance.clone(),
            boot_id: self.boot.to_string(),
            address: "h:1".into(),
            certificate: "00".into(),
            version: "1".into(),
            hypervisor: Hypervisor::Qemu,
            lease: 0,
            peers: None,
        };
        let own = OwnHost {
            name: self.host.clone(),
            host_id: self.host_id.clone(),
            zone: name("z"),
            labels: BTreeMap::new(),
            alive,
        };
        let election = spillway_fleet::election::Identity { instance, ..identity(self.host.as_str()) };
        let names = HostNames::new(self.host.clone(), self.highest, self.deadline);
        let is_other = self.recorded_boot != self.boot && removed != Removed::Boot;
        self.daemon = Some(Daemon {
            number,
            membership: HostMembership::new(own, None),
            names: if is_other { names.of_other_boot() } else { names },
            placer: Placer::new(election),
            view: FleetView::default(),
            followed: 0,
            lease: None,
            renews_next: Moment(0),
            renewing: None,
            writes: false,
            releases: false,
            tries: false,
            decided: None,
        });
    }

    /// The host loses its power.
    pub fn crash(&mut self) {
        self.is_off = true;
        self.daemon = None;
        self.vmms.clear();
        self.forked.clear();
        self.claimed.clear();
        self.deadline = Moment(0);
        (self.paused_until, self.stopped_until) = (0, 0);
    }

    pub fn follow(&mut self, store: &Store, now: u64) {
        let made_by = now.saturating_sub(self.lag_ms);
        let Some(daemon) = self.daemon.as_mut().filter(|_| now >= self.cut_until) else { return };
        while let Some(update) = store.change(daemon.followed, made_by) {
            daemon.view.apply(update.clone());
            daemon.followed += 1;
        }
    }

    /// What the daemon decides now, what it confirms, and what its membership has to write.
    pub fn decide(
        &mut self,
        now: u64,
        removed: Removed,
    ) -> (NamedOrders, Option<Transaction>, Option<Transaction>) {
        let clock = self.clock(now);
        let running = self.vmms.iter();
        let running: BTreeMap<Name, RunningName> = running
            .map(|(name, vmm)| {
                let uuid = Some(vmm.uuid.clone());
                (name.clone(), RunningName { on_isolation: vmm.on_isolation, uuid })
            })
            .collect();
        let present: BTreeSet<Name> = self.vmms.keys().chain(self.forked.keys()).cloned().collect();
        let daemon = self.daemon.as_mut().unwrap();
        let lease = match removed {
            // It believes what it was once told.
            Removed::Lease => daemon.lease.map(|lease| KnownLease { until: clock.after_ms(10_000), ..lease }),
            _ => daemon.lease,
        };
        let (standing, change) = daemon.membership.step(&daemon.view, lease, clock);
        let belief = match (standing, lease) {
            (Standing::Member { epoch }, Some(lease)) => Some(Belief { epoch, until: lease.until }),
            _ => None,
        };
        let orders = match (removed, belief) {
            // It takes what an earlier epoch was given.
            (Removed::Epoch, Some(belief)) => {
                let mut view = daemon.view.clone();
                let places = view.places.get_mut(&self.host).into_iter().flat_map(BTreeMap::values_mut);
                places.for_each(|place| place.value.epoch = belief.epoch);
                let names = view.named.values_mut().flat_map(BTreeMap::values_mut);
                let own = names.filter(|name| name.value.host.as_ref() == Some(&self.host));
                own.for_each(|name| name.value.epoch = belief.epoch);
                daemon.names.step(&view, Some(belief), &running, clock)
            }
            _ => daemon.names.step(&daemon.view, belief, &running, clock),
        };
        let mut gone = daemon.names.leaving(&daemon.view);
        gone.retain(|machine, _| !present.contains(machine));
        let releases = daemon.names.confirm(&daemon.view, belief, &gone, clock);
        (orders, releases, change)
    }

    /// Carries out what was decided. Machines whose processes are to be forked are returned.
    pub fn carry_out(&mut self, orders: &NamedOrders, now: u64, ends_in: u64) -> Vec<Fork> {
        if let (Some(epoch), Some(daemon)) = (orders.record_epoch, &mut self.daemon) {
            self.highest = epoch;
            daemon.names.recorded(epoch);
        }
        if let (true, Some(daemon)) = (orders.record_boot, &mut self.daemon) {
            self.recorded_boot = self.boot;
            daemon.names.recorded_boot();
        }
        if let Some(deadline) = orders.deadline {
            self.deadline = deadline;
        }
        let view = self.daemon.as_ref().map(|daemon| &daemon.view);
        let places = view.and_then(|view| view.places.get(&self.host)).cloned().unwrap_or_default();
        let mut starts = Vec::new();
        for ((_, machine), place) in &places {
            let is_there = self.vmms.contains_key(machine) || self.forked.contains_key(machine);
            let (uuid, on_isolation) = (place.value.identity.uuid.clone(), place.value.on_isolation);
            if orders.order(machine, Some(&uuid), on_isolation) == NameOrder::Run && !is_there {
                starts.push(Fork { machine: machine.clone(), on_isolation, uuid });
            }
        }
        for (machine, vmm) in &mut self.vmms {
            let place = places.iter().find(|((_, of), _)| of == machine).map(|(_, place)| &place.value);
            let is_claimed = self.claimed.get(machine).is_some_and(|until| now < *until);
            // One that is given up goes when its claim has ended; one that is given to others at once.
            let is_given_up = place.is_none_or(|place| place.is_leaving && !is_claimed);
            // It was forked before the host stood still, with the settings of that time: the catalog's batches restart it.
            let is_outdated =
                place.is_some_and(|place| place.on_isolation != vmm.on_isolation) && !is_claimed;
            match orders.order(machine, Some(&vmm.uuid), vmm.on_isolation) {
                _ if is_given_up => vmm.ends = vmm.ends.or(Some(now + ends_in)),
                NameOrder::End => vmm.ends = vmm.ends.or(Some(now + ends_in)),
                NameOrder::Run if is_outdated => vmm.ends = vmm.ends.or(Some(now + ends_in)),
                NameOrder::Run => vmm.phase = Phase::Running,
                NameOrder::Pause if vmm.phase == Phase::Running => vmm.phase = Phase::Paused,
                NameOrder::Pause | NameOrder::GoOn => {}
            }
        }
        starts
    }

    /// What the guard does, and the kernel.
    pub fn guard(&mut self, now: u64, ends_in: u64, removed: Removed) -> usize {
        let late_ms = if removed == Removed::Margin { 40_000 } else { 0 };
        let is_over = self.clock(now) >= self.deadline.after_ms(late_ms) && removed != Removed::Guard;
        let mut killed = 0;
        for vmm in self.vmms.values_mut().filter(|_| is_over) {
            if vmm.on_isolation != IsolationAction::Keep && vmm.ends.is_none() {
                vmm.ends = Some(now + ends_in);
                killed += 1;
            }
        }
        self.vmms.retain(|_, vmm| vmm.ends.is_none_or(|ends| now < ends));
        killed
    }
}
