//! A placer on a store that answers at once, for tests of its rules.
#![allow(dead_code, clippy::unwrap_used)]

use crate::sample::{Fleet, check, identity, name};
use spillway_fleet::Moment;
use spillway_fleet::liveness::{Ask, StoreHealth};
use spillway_fleet::placer::{Placer, PlacerAction, PlacerStatus};
use spillway_fleet::transaction::{Outcome, Transaction};

pub struct Driver {
    pub fleet: Fleet,
    pub placer: Placer,
    pub now: Moment,
    pub health: StoreHealth,
    /// Whether the hosts that are asked say that they reach a silent host; none: they do not answer.
    pub reaches: Option<bool>,
    pub asks: Vec<Ask>,
    pub events: Vec<String>,
    pub transactions: Vec<Transaction>,
}

impl Driver {
    /// The daemon of host `p`, which has no space for machines, is the placer.
    pub fn new() -> Driver {
        let mut fleet = Fleet::new();
        fleet.host("p", "zp");
        fleet.budget("p", 0);
        fleet.placer("p");
        Driver::of(fleet)
    }

    pub fn of(fleet: Fleet) -> Driver {
        Driver {
            fleet,
            placer: Placer::new(identity("p")),
            now: Moment(1_000_000),
            health: StoreHealth::default(),
            reaches: Some(false),
            asks: Vec::new(),
            events: Vec::new(),
            transactions: Vec::new(),
        }
    }

    /// A daemon that was just started is elected.
    pub fn restart(&mut self) {
        self.placer = Placer::new(identity("p"));
        self.fleet.placer("p");
    }

    /// One step. The transactions are not carried out.
    pub fn step(&mut self) -> Vec<(u64, Transaction)> {
        let mut commits = Vec::new();
        for action in self.placer.step(self.fleet.view(), &self.health, self.now) {
            match action {
                PlacerAction::Commit { number, transaction } => {
                    check(&transaction);
                    commits.push((number, transaction));
                }
                PlacerAction::Ask(ask) => self.asks.push(ask),
                PlacerAction::Event(event) => self.events.push(event.text),
            }
        }
        for Ask { about, of } in self.asks.clone().iter().rev().take(1) {
            if let Some(reaches) = self.reaches {
                of.iter().for_each(|by| self.placer.answered(about, by, reaches));
            }
        }
        commits
    }

    /// Steps the membership until it has nothing more to write. The number of writes.
    pub fn settle(&mut self) -> usize {
        let mut writes = 0;
        for _ in 0..1000 {
            let commits = self.step();
            if commits.is_empty() {
                return writes;
            }
            for (number, transaction) in commits {
                let outcome = self.fleet.commit(&transaction);
                if matches!(outcome, Outcome::Applied(_)) {
                    writes += transaction.writes.len();
                }
                self.placer.ended(number, Some(outcome));
                self.transactions.push(transaction);
            }
        }
        panic!("the placer does not come to rest");
    }

    /// Time passes, with steps of a second.
    pub fn after_s(&mut self, seconds: u64) -> usize {
        let mut writes = 0;
        for _ in 0..seconds {
            self.now = self.now.after_ms(1000);
            writes += self.settle();
        }
        writes
    }

    pub fn status(&self) -> PlacerStatus {
        self.placer.status(self.fleet.view()).unwrap()
    }

    /// Counts of a catalog's shares of these hosts.
    pub fn counts<const N: usize>(&self, catalog: &str, hosts: [&str; N]) -> [u32; N] {
        hosts.map(|host| self.fleet.count(host, catalog))
    }

    /// Why a host is not replaced.
    pub fn kept(&self, host: &str) -> Option<String> {
        let status = self.status().hosts.into_iter().find(|status| status.host == name(host));
        status.unwrap().kept
    }
}
