//! A simulated host: its lease, what it knows of the records, and a small model of what it does with its shares.

use super::rng::Rng;
use super::sample::{self, GIB, name};
use super::store::{LeaseId, Store};
use serde_json::json;
use spillway_api::{CatalogSpec, ImageRef, Name, RolloutStrategy};
use spillway_fleet::Moment;
use spillway_fleet::agent::{WantedCatalog, WantedShares, wanted};
use spillway_fleet::election::{Identity, candidacy};
use spillway_fleet::keys::Key;
use spillway_fleet::liveness::StoreHealth;
use spillway_fleet::placer::{Placer, PlacerAction};
use spillway_fleet::records::{CatalogStatus, NextVersion, ShareRecord, StatusRecord, VersionName};
use spillway_fleet::transaction::{Comparison, Revision, Transaction, Write};
use spillway_fleet::view::FleetView;
use std::collections::BTreeMap;

const RENEW_MS: u64 = 5_000;
const STATUS_MS: u64 = 10_000;
/// Time for which a lease counts from the sending of a request to renew it.
const LEASE_COUNTS_MS: u64 = 12_000;

/// A machine, as far as rollouts are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Machine {
    version: u32,
    state: State,
    /// Whether a rollout has made it unavailable, until it is ready again.
    is_rolled: bool,
    /// Whether somebody has claimed it. It stays as it is until it is released, and starts anew then.
    is_claimed: bool,
    /// Whether it starts because it was released.
    is_released: bool,
}

impl Machine {
    fn starting(version: u32, at: u64) -> Machine {
        let state = State::Starts(at);
        Machine { version, state, is_rolled: false, is_claimed: false, is_released: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    /// It is ready, or has failed, at this time.
    Starts(u64),
    /// It starts again at this time.
    Failed(u64),
}

/// Machines of a catalog on a host.
/// Time after which each placer has seen a report: those are made every 10 s, and watches and transactions are late.
const REFUSAL_SEEN_MS: u64 = 30_000;

#[derive(Clone, Debug, Default)]
struct Machines {
    all: Vec<Machine>,
    wanted: u32,
    /// Count of its share. It refuses what is more than it wants, for some time.
    share: u32,
    generation: u64,
    version: u32,
    /// Version of its share, which it refuses for some time if it has another one.
    share_version: u32,
    batch: u32,
    max_failed: u32,
    is_held: bool,
    refuses_until: u64,
    /// How often it has refused a version, and the last one.
    refusals: u64,
    last_refused: u32,
    refused_until: u64,
    /// A version that it brings, and when that is there.
    next: Option<(u32, u64)>,
    claims: u64,
}

impl Machines {
    fn ready(&self) -> u32 {
        self.all.iter().filter(|machine| machine.state == State::Ready).count() as u32
    }

    fn failed(&self) -> u32 {
        self.all.iter().filter(|machine| matches!(machine.state, State::Failed(_))).count() as u32
    }

    /// Takes the version of its share, or refuses it for some time.
    fn take_version(&mut self, version: u32, now: u64, random: &mut Rng) {
        let is_new = self.share_version != version;
        self.share_version = version;
        let refuses = super::REFUSES.with(std::cell::Cell::get) && self.version != 0;
        if is_new && refuses && self.version != version && random.chance(10) {
            self.refuses_until = now + 3_000 + random.below(60_000);
            (self.refusals, self.last_refused) = (self.refusals + 1, version);
            self.refused_until = self.refuses_until;
        }
        if now >= self.refuses_until {
            self.version = version;
        }
    }

    /// Adds or removes machines, as a host does: those go first that are not ready, and claimed ones stay.
    fn resize(&mut self, now: u64, random: &mut Rng) {
        while self.all.len() > self.wanted as usize {
            let free = |machine: &Machine| !machine.is_claimed;
            let not_ready = self.all.iter().rposition(|of| free(of) && of.state != State::Ready);
            let Some(next) = not_ready.or_else(|| self.all.iter().rposition(free)) else { return };
            self.all.remove(next);
        }
        let new = Machine::starting(self.version, now + 2_000 + random.below(8_000));
        self.all.resize(self.wanted as usize, new);
    }

    /// Somebody claims a machine, or releases one, now and then. The host decides that alone.
    fn claim(&mut self, now: u64, random: &mut Rng) {
        let goes_on = super::CLAIMS.with(std::cell::Cell::get);
        if goes_on && random.chance(400) {
            let free = |of: &&mut Machine| of.state == State::Ready && !of.is_claimed;
            if let Some(machine) = self.all.iter_mut().find(free) {
                machine.is_claimed = true;
                self.claims += 1;
            }
        }
        let is_over = |of: &&mut Machine| of.is_claimed && (!goes_on || random.chance(2_000));
        for machine in self.all.iter_mut().filter(is_over).collect::<Vec<_>>() {
            let at = now + 2_000 + random.below(6_000);
            *machine = Machine { is_released: true, ..Machine::starting(self.version, at) };
        }
        if self.all.len() > self.wanted as usize {
            self.resize(now, random);
        }
    }

    /// What happens to its machines, and the rollout of the host: a failed machine holds its place of the batch.
    fn work(&mut self, now: u64, random: &mut Rng) {
        for machine in &mut self.all {
            match machine.state {
                State::Starts(at) if now >= at => {
                    let fails = super::is_bad(machine.version) && random.chance(2);
                    machine.state = if fails { State::Failed(now + 20_000) } else { State::Ready };
                    machine.is_rolled &= fails;
                    machine.is_released &= fails;
                }
                State::Failed(at) if now >= at => {
                    (machine.version, machine.state) = (self.version, State::Starts(now + 3_000));
                }
                _ => {}
            }
        }
        let is_old = |machine: &Machine| machine.version != self.version;
        if self.is_held || !self.all.iter().any(is_old) {
            return;
        }
        let away = self.all.len() as u32 - self.ready() - self.failed().min(self.max_failed);
        let space = self.batch.saturating_sub(away) as usize;
        let due =
            self.all.iter_mut().filter(|machine| machine.version != self.version && !machine.is_claimed);
        for machine in due.filter(|machine| machine.state == State::Ready).take(space) {
            let at = now + 2_000 + random.below(6_000);
            *machine = Machine { is_rolled: true, ..Machine::starting(self.version, at) };
        }
    }
}

pub struct Host {
    pub name: Name,
    pub zone: String,
    pub identity: Identity,
    starts: u32,
    /// Its clock: an offset, and how many thousandths it is too fast.
    pub offset: u64,
    pub drift: i64,
    /// Until when nothing of it runs, and until when its daemon does not.
    pub down_until: u64,
    pub paused_until: u64,
    /// Until when it has no connection to etcd, and to other hosts.
    pub cut_until: u64,
    pub alone_until: u64,
    /// Since when its daemon answers others.
    pub reached_since: u64,
    pub lease: Option<LeaseId>,
    renewed: Moment,
    next_renewal: u64,
    leaders: u64,
    health: StoreHealth,
    /// All records, of a host that may become the placer.
    pub view: Option<FleetView>,
    pub placer: Placer,
    candidate_at: u64,
    machines: BTreeMap<Name, Machines>,
    reported: Option<StatusRecord>,
    reported_at: u64,
    pub statuses: u64,
    seen_shares: Revision,
}

/// What a host wants of the world.
pub enum Message {
    Commit { number: Option<u64>, transaction: Transaction },
    Ask { about: Name, of: Name },
}

impl Host {
    pub fn new(number: usize, may_place: bool, random: &mut Rng) -> Host {
        let name = name(&format!("h{number}"));
        let identity = Identity { host: name.clone(), instance: "1".into() };
        Host {
            zone: format!("z{}", number % 4),
            placer: Placer::new(identity.clone()),
            name,
            identity,
            starts: 1,
            offset: random.below(1 << 30),
            drift: random.below(41) as i64 - 20,
            down_until: 0,
            paused_until: 0,
            cut_until: 0,
            alone_until: 0,
            reached_since: 0,
            lease: None,
            renewed: Moment(0),
            next_renewal: random.below(RENEW_MS),
            leaders: 0,
            health: StoreHealth::default(),
            view: may_place.then(FleetView::default),
            candidate_at: 0,
            machines: BTreeMap::new(),
            reported: None,
            reported_at: 0,
            statuses: 0,
            seen_shares: 0,
        }
    }

    pub fn clock(&self, now: u64) -> Moment {
        Moment(self.offset + (now as i64 + now as i64 * self.drift / 1000) as u64)
    }

    pub fn runs(&self, now: u64) -> bool {
        now >= self.down_until && now >= self.paused_until
    }

    pub fn has_store(&self, now: u64) -> bool {
        now >= self.cut_until
    }

    /// Whether its daemon answers others, and reaches them.
    pub fn has_peers(&self, now: u64) -> bool {
        self.runs(now) && now >= self.alone_until
    }

    /// The host is off for some time. What it knows is gone then.
    pub fn restart(&mut self, now: u64, for_ms: u64) {
        self.down_until = now + for_ms;
        self.starts += 1;
        self.identity.instance = self.starts.to_string();
        self.placer = Placer::new(self.identity.clone());
        self.lease = None;
        self.view = self.view.as_ref().map(|_| FleetView::default());
        self.reported = None;
        self.seen_shares = 0;
        self.health = StoreHealth::default();
        let machines = self.machines.values_mut().flat_map(|machines| &mut machines.all);
        machines.for_each(|machine| {
            (machine.state, machine.is_rolled) = (State::Starts(self.down_until + 2_000), false);
            machine.is_released = false;
        });
    }

    /// A turn of the daemon.
    pub fn tick(&mut self, store: &mut Store, now: u64, random: &mut Rng) -> Vec<Message> {
        if !self.runs(now) {
            return Vec::new();
        }
        let reaches = self.has_store(now) && store.has_leader(now);
        if !reaches || self.leaders != store.leaders {
            self.leaders = store.leaders;
            self.health.trouble = Some(self.clock(now));
        }
        if reaches && now >= self.next_renewal {
            self.renew(store, now);
        }
        for machines in self.machines.values_mut() {
            machines.claim(now, random);
            machines.work(now, random);
        }
        let mut messages = Vec::new();
        if self.has_store(now) {
            // Watches are late now and then.
            let late = if random.chance(4) { random.below(6) as i64 } else { 0 };
            let up_to = (store.revision - late).max(0);
            self.follow(store, up_to, now, random);
        }
        if reaches {
            messages.extend(self.report(now));
        }
        messages.extend(self.place(now));
        messages
    }

    fn renew(&mut self, store: &mut Store, now: u64) {
        self.next_renewal = now + RENEW_MS;
        let sent = self.clock(now);
        if !self.lease.is_some_and(|id| store.renew(id, now)) {
            let lease = store.grant(now);
            let alive = json!({"instance": self.identity.instance, "boot_id": "b", "address": "h:1",
                "certificate": "00", "version": "1", "hypervisor": "qemu"});
            let key = Key::Alive(self.name.clone());
            let transaction = Transaction {
                comparisons: vec![Comparison::Created(key.clone(), 0)],
                writes: vec![Write::PutWithLease(key, alive.to_string().into_bytes())],
            };
            let outcome = store.commit(&transaction, Some(lease), now);
            let is_applied = matches!(outcome, Some(spillway_fleet::transaction::Outcome::Applied(_)));
            self.lease = is_applied.then_some(lease);
        }
        if self.lease.is_some() {
            self.renewed = sent;
        }
    }

    fn follow(&mut self, store: &Store, up_to: Revision, now: u64, random: &mut Rng) {
        if let Some(view) = &mut self.view
            && let Some(update) = store.since(view.revision, up_to)
        {
            view.apply(update);
        }
        let is_over = |machines: &mut Machines| machines.refuses_until != 0 && now >= machines.refuses_until;
        let again = self.machines.values_mut().filter_map(|machines| is_over(machines).then_some(machines));
        let again = again.map(|machines| machines.refuses_until = 0).count();
        if up_to <= self.seen_shares && again == 0 {
            return;
        }
        self.seen_shares = up_to;
        let wanted = match &self.view {
            Some(view) => wanted(view, "x", &self.name, self.name.as_str()),
            None => Some(self.own(store)),
        };
        if let Some(wanted) = wanted {
            self.take(&wanted, now, random);
        }
    }

    /// What the records want of a host that does not keep all of them: rollouts are left out.
    fn own(&self, store: &Store) -> WantedShares {
        let prefix = format!("share/{}/", self.name);
        let shares = store.entries.range(prefix.clone()..).take_while(|(key, _)| key.starts_with(&prefix));
        let catalogs = shares.map(|(key, entry)| {
            let share: ShareRecord = serde_json::from_slice(&entry.value).unwrap();
            let version = std::num::NonZeroU32::new(share.version);
            let image = ImageRef { name: name("debian"), version };
            let spec = CatalogSpec { image, count: share.count, ..CatalogSpec::defaults() };
            let catalog = WantedCatalog {
                spec,
                generation: share.generation,
                strategy: RolloutStrategy::Batch(2),
                max_failed: 0,
                is_held: false,
                source: None,
                machines: None,
            };
            (name(&key[prefix.len()..]), catalog)
        });
        WantedShares { catalogs: catalogs.collect(), ..WantedShares::default() }
    }

    fn take(&mut self, wanted: &WantedShares, now: u64, random: &mut Rng) {
        for (catalog, machines) in &mut self.machines {
            if !wanted.catalogs.contains_key(catalog) {
                (machines.wanted, machines.share) = (0, 0);
                machines.resize(now, random);
            }
        }
        self.machines.retain(|catalog, of| wanted.catalogs.contains_key(catalog) || !of.all.is_empty());
        for (catalog, share) in &wanted.catalogs {
            let machines = self.machines.entry(catalog.clone()).or_default();
            let count = share.spec.count;
            machines.take_version(share.spec.image.version.unwrap().get(), now, random);
            machines.generation = share.generation;
            (machines.is_held, machines.max_failed) = (share.is_held, share.max_failed);
            let RolloutStrategy::Batch(batch) = share.strategy else { panic!("{:?}", share.strategy) };
            machines.batch = batch;
            let next = wanted.versions.get(catalog).map(|next| next.of.version);
            if machines.next.map(|(version, _)| version) != next {
                machines.next = next.map(|version| (version, now + 1_000 + random.below(20_000)));
            }
            machines.share = count;
            if count > machines.wanted && now >= machines.refuses_until {
                if super::REFUSES.with(std::cell::Cell::get) && random.chance(200) {
                    machines.refuses_until = now + 3_000 + random.below(30_000);
                } else {
                    machines.wanted = count;
                }
            }
            machines.wanted = machines.wanted.min(count);
            machines.resize(now, random);
        }
    }

    pub fn ready(&self, catalog: &Name) -> u32 {
        self.machines.get(catalog).map_or(0, Machines::ready)
    }

    /// Machines of a catalog that are ready, or would be if they had not been released.
    pub fn ready_or_released(&self, catalog: &Name) -> u32 {
        let all = self.machines.get(catalog).map_or(&[][..], |machines| &machines.all);
        all.iter().filter(|machine| machine.state == State::Ready || machine.is_released).count() as u32
    }

    /// Version that new machines of a catalog get; 0: it has none of the catalog.
    pub fn version(&self, catalog: &Name) -> u32 {
        self.machines.get(catalog).map_or(0, |machines| machines.version)
    }

    /// Whether all machines of a catalog are ready with this version, except those that are claimed or have failed.
    pub fn is_done(&self, catalog: &Name, version: u32) -> bool {
        let Some(machines) = self.machines.get(catalog).filter(|of| of.version == version) else {
            return false;
        };
        machines.all.iter().all(|machine| {
            let has_failed = matches!(machine.state, State::Failed(_));
            machine.is_claimed || has_failed || (machine.version == version && machine.state == State::Ready)
        })
    }

    /// How often a machine was claimed.
    pub fn claims(&self) -> u64 {
        self.machines.values().map(|machines| machines.claims).sum()
    }

    /// Whether it refuses a version, or has done so until lately: a placer may not have seen that it has taken it.
    pub fn refuses(&self, catalog: &Name, version: u32, now: u64) -> bool {
        let is_known =
            |of: &&Machines| of.last_refused == version && now < of.refused_until + REFUSAL_SEEN_MS;
        self.machines.get(catalog).filter(is_known).is_some()
    }

    /// How often it has refused a version.
    pub fn refusals(&self) -> u64 {
        self.machines.values().map(|machines| machines.refusals).sum()
    }

    /// What it has of a catalog, and what it has reported.
    pub fn describe(&self, catalog: &Name) -> String {
        let reported = self.reported.as_ref().and_then(|reported| reported.catalogs.get(catalog));
        format!("{:?} {reported:?} at {}", self.machines.get(catalog), self.reported_at)
    }

    /// Machines of a catalog, those that a rollout has made unavailable, and those that have this version and are ready.
    pub fn rolled(&self, catalog: &Name, version: u32) -> (u32, u32, u32) {
        let all = self.machines.get(catalog).map_or(&[][..], |machines| &machines.all);
        let rolled = all.iter().filter(|machine| machine.is_rolled).count() as u32;
        let is_done = |machine: &&Machine| machine.version == version && machine.state == State::Ready;
        (all.len() as u32, rolled, all.iter().filter(is_done).count() as u32)
    }

    /// The record of its state, if it has changed and the last one is old enough.
    fn report(&mut self, now: u64) -> Option<Message> {
        if self.reported.is_some() && now < self.reported_at + STATUS_MS {
            return None;
        }
        let catalogs = self.machines.iter().map(|(catalog, machines)| {
            let lacks = machines.share > machines.wanted || machines.share_version != machines.version;
            let refuses = now < machines.refuses_until && lacks;
            let refused = refuses.then(|| "not now".to_owned());
            let is_new =
                |machine: &&Machine| machine.version == machines.version && machine.state == State::Ready;
            // Failed ones count as that.
            let is_spared = |machine: &&Machine| {
                let has_failed = matches!(machine.state, State::Failed(_));
                machine.is_claimed && !is_new(machine) && !has_failed
            };
            let next = machines.next.map(|(version, at)| NextVersion {
                of: VersionName { image: name("debian"), version },
                is_here: now >= at && !super::is_missing(version, &self.name),
                failed: (now >= at && super::is_missing(version, &self.name))
                    .then(|| "it is not there".into()),
                waits: None,
            });
            let status = CatalogStatus {
                // A host that has never made the catalog has carried out no share of it.
                generation: if refused.is_some() && machines.all.is_empty() {
                    0
                } else {
                    machines.generation
                },
                version: machines.version,
                image: Some(name("debian")),
                count: machines.all.len() as u32,
                ready: machines.ready(),
                updated: machines.all.iter().filter(is_new).count() as u32,
                failed: machines.failed(),
                claimed: machines.all.iter().filter(|machine| machine.is_claimed).count() as u32,
                spared: machines.all.iter().filter(is_spared).count() as u32,
                refused_generation: if refused.is_some() { machines.generation } else { 0 },
                refused_version: refused
                    .is_some()
                    .then(|| VersionName { image: name("debian"), version: machines.share_version }),
                refused,
                next,
                ..CatalogStatus::default()
            };
            (catalog.clone(), status)
        });
        let mut record = StatusRecord { catalogs: catalogs.collect(), ..StatusRecord::default() };
        record.budget.memory_bytes = super::SPACE * GIB;
        (record.budget.guarantee_bytes, record.budget.limit_bytes) = (1 << 50, 1 << 50);
        record.budget.vcpus = 1 << 40;
        if self.reported.as_ref() == Some(&record) {
            return None;
        }
        assert!(self.reported.is_none() || now - self.reported_at >= STATUS_MS);
        self.statuses += 1;
        let bytes = serde_json::to_vec(&record).unwrap();
        (self.reported, self.reported_at) = (Some(record), now);
        let writes = vec![Write::Put(Key::Status(self.name.clone()), bytes)];
        Some(Message::Commit { number: None, transaction: Transaction { comparisons: Vec::new(), writes } })
    }

    /// The daemon's part in placing.
    fn place(&mut self, now: u64) -> Vec<Message> {
        let clock = self.clock(now);
        let Some(view) = &self.view else { return Vec::new() };
        let mut messages = Vec::new();
        let lease_holds = self.lease.is_some() && clock.since_ms(self.renewed) < LEASE_COUNTS_MS;
        if now >= self.candidate_at
            && let Some(transaction) = candidacy(view, &self.identity, lease_holds)
        {
            self.candidate_at = now + 2_000;
            messages.push(Message::Commit { number: None, transaction });
        }
        for action in self.placer.step(view, &self.health, clock) {
            match action {
                PlacerAction::Commit { number, transaction } => {
                    super::check_brake(view, &self.health, clock, &transaction);
                    super::rollouts::check_done(view, &self.placer, &transaction);
                    messages.push(Message::Commit { number: Some(number), transaction });
                }
                PlacerAction::Ask(ask) => {
                    let about = ask.about;
                    messages.extend(ask.of.into_iter().map(|of| Message::Ask { about: about.clone(), of }));
                }
                PlacerAction::Event(event) => super::trace(now, &event.text),
            }
        }
        messages
    }

    pub fn record(&self) -> String {
        json!({"host_id": self.name, "zone": self.zone}).to_string()
    }
}

pub fn share_of(key: &Key) -> Option<(&Name, &Name)> {
    match key {
        Key::Share(host, catalog) => Some((host, catalog)),
        _ => None,
    }
}

pub fn is_of_placer(transaction: &Transaction) -> bool {
    matches!(transaction.comparisons.first(), Some(Comparison::Created(Key::Placer, term)) if *term > 0)
}

pub fn shares_written(transaction: &Transaction) -> usize {
    transaction.writes.iter().filter(|write| share_of(sample::key_of(write)).is_some()).count()
}
