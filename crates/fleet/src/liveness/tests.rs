//! Tests of when a host counts as silent, reached, lost, dead.

use super::*;
use crate::sample::{Fleet, name};
use serde_json::json;

const OWN: &str = "h0";

struct Seen {
    fleet: Fleet,
    liveness: Liveness,
    health: StoreHealth,
    now: Moment,
    stakes: BTreeMap<Name, u64>,
}

impl Seen {
    /// Hosts h0 to hN, alive, in zones z0 and z1.
    fn of(hosts: usize) -> Seen {
        let mut fleet = Fleet::new();
        (0..hosts).for_each(|n| fleet.host(&format!("h{n}"), &format!("z{}", n % 2)));
        let health = StoreHealth::default();
        let mut seen = Seen {
            fleet,
            liveness: Liveness::default(),
            health,
            now: Moment(1_000_000),
            stakes: BTreeMap::new(),
        };
        seen.after(0);
        seen
    }

    /// Steps of a second until so many milliseconds have passed. The questions that came.
    fn after(&mut self, ms: u64) -> Vec<Ask> {
        let mut asks = Vec::new();
        let end = self.now.after_ms(ms);
        loop {
            self.liveness.tick(&self.health, self.now);
            self.liveness.observe(self.fleet.view(), self.now);
            asks.extend(self.liveness.asks(&self.stakes, self.fleet.view(), &name(OWN), self.now));
            if self.now == end {
                return asks;
            }
            self.now = self.now.after_ms(1000).min(end);
        }
    }

    fn standing(&self, host: &str) -> Standing {
        self.liveness.standing(&name(host), self.now)
    }

    fn reach(&self, host: &str) -> Reach {
        let Standing::Silent { reach, .. } = self.standing(host) else { panic!("it is not silent") };
        reach
    }

    fn at_stake(mut self, host: &str) -> Seen {
        self.stakes.insert(name(host), 45_000);
        self
    }
}

#[test]
fn silence_counts_from_the_last_renewal_that_is_possible() {
    let mut seen = Seen::of(4);
    assert_eq!(seen.standing("h1"), Standing::Alive);
    seen.fleet.end_lease("h1");
    seen.after(0);
    assert_eq!(seen.standing("h1"), Standing::Silent { for_ms: 15_000, reach: Reach::Unknown });
    seen.after(7_000);
    assert_eq!(seen.standing("h1"), Standing::Silent { for_ms: 22_000, reach: Reach::Unknown });
    seen.fleet.begin_lease("h1");
    seen.after(0);
    assert_eq!(seen.standing("h1"), Standing::Alive);
    seen.fleet.end_lease("h1");
    seen.after(0);
    assert_eq!(seen.standing("h1"), Standing::Silent { for_ms: 15_000, reach: Reach::Unknown });
    seen.after(60_000);
    // It is there and gone between two looks.
    seen.fleet.begin_lease("h1");
    seen.fleet.end_lease("h1");
    seen.after(1_000);
    assert_eq!(seen.standing("h1"), Standing::Silent { for_ms: 16_000, reach: Reach::Unknown });
}

#[test]
fn a_new_placer_counts_from_its_own_first_look() {
    let mut seen = Seen::of(4);
    seen.fleet.end_lease("h1");
    seen.liveness = Liveness::default();
    seen.after(0);
    assert_eq!(seen.standing("h1"), Standing::Silent { for_ms: 0, reach: Reach::Unknown });
}

#[test]
fn a_host_that_never_was_there_is_not_silent() {
    let mut seen = Seen::of(4);
    seen.fleet.set("hosts/new", json!({"host_id": "n", "zone": "z"}));
    seen.after(0);
    assert_eq!(seen.standing("new"), Standing::NeverSeen);
    seen.fleet.budget("new", 1);
    seen.after(0);
    assert_eq!(seen.standing("new"), Standing::Silent { for_ms: 0, reach: Reach::Unknown });
}

#[test]
fn the_brake_holds_if_more_than_a_third_are_silent_and_two_at_least() {
    for (hosts, silent, holds) in
        [(2, 1, false), (3, 1, false), (3, 2, true), (6, 2, false), (6, 3, true), (9, 3, false), (9, 4, true)]
    {
        let mut seen = Seen::of(hosts);
        // Neither of them counts.
        seen.fleet.set("hosts/new", json!({"host_id": "n", "zone": "z"}));
        seen.fleet.host("dead", "z");
        seen.fleet.end_lease("dead");
        seen.fleet.set("hosts/dead", json!({"dead_epoch": seen.fleet.revision()}));
        (0..silent).for_each(|n| seen.fleet.end_lease(&format!("h{n}")));
        seen.after(0);
        let brake = holds.then_some(Brake::ManySilent { silent, of: hosts });
        assert_eq!(seen.liveness.brake(seen.now), brake, "{silent} of {hosts}");
    }
}

#[test]
fn the_brake_holds_for_half_a_minute_after_trouble_of_the_store() {
    let mut seen = Seen::of(4).at_stake("h1");
    seen.fleet.end_lease("h1");
    seen.health.trouble = Some(seen.now.after_ms(35_000));
    seen.after(35_000);
    assert_eq!(seen.liveness.brake(seen.now), Some(Brake::StoreTrouble));
    // A daemon that has forgotten it must not hurry.
    seen.health.trouble = None;
    assert_eq!(seen.after(29_000), [], "nobody is asked while no answer counts");
    assert_eq!(seen.liveness.brake(seen.now), Some(Brake::StoreTrouble));
    assert_eq!(seen.after(1_000).len(), 1);
    assert_eq!(seen.liveness.brake(seen.now), None);
}

#[test]
fn two_others_are_asked_before_a_host_is_lost() {
    let mut seen = Seen::of(8).at_stake("h1");
    seen.fleet.end_lease("h1");
    assert_eq!(seen.after(24_000), [], "it has been silent for 39 s");
    let asks = seen.after(1_000);
    let [Ask { about, of }] = &asks[..] else { panic!("{asks:?}") };
    assert_eq!((about, of.len()), (&name("h1"), 2));
    let zones: Vec<_> = of.iter().map(|host| seen.fleet.view().hosts[host].value.zone.as_str()).collect();
    assert_eq!(zones, ["z1", "z0"], "one of its zone and one of another");
    assert!(!of.contains(about) && !of.contains(&name(OWN)));
    assert_eq!(seen.reach("h1"), Reach::Unknown);
    // One says no, the other does not answer.
    seen.liveness.answered(about, &of[0], false, seen.now);
    seen.liveness.answered(about, &of[0], false, seen.now);
    seen.after(4_000);
    assert_eq!(seen.reach("h1"), Reach::Unknown);
    seen.after(1_000);
    assert_eq!(seen.reach("h1"), Reach::Unreachable);
    assert_eq!(seen.after(9_000), []);
    assert_eq!(seen.reach("h1"), Reach::Unreachable);
    assert_eq!(seen.after(1_000).len(), 1, "the answers count no more, and are asked for again");
    assert_eq!(seen.reach("h1"), Reach::Unknown);
}

#[test]
fn a_host_that_answers_another_is_not_lost_and_is_asked_about_ever_less() {
    let mut seen = Seen::of(8).at_stake("h1");
    seen.fleet.end_lease("h1");
    let mut rounds = Vec::new();
    let begin = seen.now;
    for _ in 0..600 {
        for Ask { about, of } in seen.after(1_000) {
            seen.liveness.answered(&about, &of[1], true, seen.now);
            seen.liveness.answered(&about, &of[0], false, seen.now);
            assert_eq!(seen.reach("h1"), Reach::Answers);
            rounds.push((seen.now.since_ms(begin), of));
        }
        assert_ne!(seen.reach("h1"), Reach::Unreachable);
    }
    let times: Vec<u64> = rounds.iter().map(|(at, _)| at / 1000).collect();
    assert_eq!(times, [25, 40, 65, 110, 195, 360]);
    let askers: BTreeSet<_> = rounds.iter().flat_map(|(_, of)| of).collect();
    assert!(askers.len() > 2, "others are asked in other rounds");
    seen.fleet.begin_lease("h1");
    seen.after(0);
    seen.fleet.end_lease("h1");
    assert_eq!(seen.after(25_000).len(), 1, "a new silence begins anew");
}

#[test]
fn a_placer_that_nobody_answers_knows_nothing() {
    let mut seen = Seen::of(8).at_stake("h1");
    seen.fleet.end_lease("h1");
    let mut asked = BTreeSet::new();
    for _ in 0..100 {
        seen.after(1_000).into_iter().for_each(|ask| asked.extend(ask.of));
        // What comes from others than those that were asked is no answer.
        seen.liveness.answered(&name("h1"), &name("h1"), false, seen.now);
        assert_eq!(seen.reach("h1"), Reach::Unknown);
    }
    assert!(asked.len() > 2, "others are asked");
}

#[test]
fn all_that_there_are_are_asked_where_there_are_not_two_others() {
    for (hosts, asked) in [(1, 0), (2, 1), (3, 2), (4, 2)] {
        let mut seen = Seen::of(hosts);
        let last = format!("h{}", hosts - 1);
        seen.stakes.insert(name(&last), 45_000);
        seen.fleet.end_lease(&last);
        let asks = seen.after(25_000);
        assert_eq!(asks.first().map_or(0, |ask| ask.of.len()), asked, "{hosts} hosts");
        assert_eq!(asks.first().is_some_and(|ask| ask.of.contains(&name(OWN))), (2..=3).contains(&hosts));
    }
}

#[test]
fn a_placer_that_stood_still_asks_anew() {
    let mut seen = Seen::of(8).at_stake("h1");
    seen.fleet.end_lease("h1");
    let asks = seen.after(25_000);
    seen.liveness.answered(&name("h1"), &asks[0].of[0], false, seen.now);
    // The other answer may have come meanwhile, and may stand behind this step.
    seen.now = seen.now.after_ms(20_000);
    assert_eq!(seen.after(0).len(), 1);
    assert_eq!(seen.reach("h1"), Reach::Unknown);
}

#[test]
fn a_declaration_counts_until_the_host_has_a_later_epoch() {
    let mut seen = Seen::of(4);
    let epoch = seen.fleet.view().alive[&name("h1")].created;
    seen.fleet.set("hosts/h1", json!({ "dead_epoch": epoch }));
    seen.after(0);
    assert_eq!(seen.standing("h1"), Standing::DeclaredDead { for_ms: 0 }, "even while its lease lasts");
    seen.fleet.end_lease("h1");
    seen.after(2000);
    assert_eq!(seen.standing("h1"), Standing::DeclaredDead { for_ms: 17_000 });
    seen.fleet.begin_lease("h1");
    seen.after(0);
    assert_eq!(seen.standing("h1"), Standing::Alive);
    seen.fleet.end_lease("h1");
    seen.after(0);
    assert!(matches!(seen.standing("h1"), Standing::Silent { .. }), "that was another epoch");
}

#[test]
fn what_cannot_be_read_is_neither_alive_nor_silent() {
    for key in ["alive/h1", "hosts/h1"] {
        let mut seen = Seen::of(4);
        seen.fleet.catalog("desk", 1, json!({}));
        seen.fleet.share("h1", "desk", 1);
        seen.fleet.put(key, "{");
        seen.after(100_000);
        assert_eq!(seen.standing("h1"), Standing::Unreadable, "{key}");
    }
    let mut seen = Seen::of(4);
    seen.fleet.catalog("desk", 1, json!({}));
    seen.fleet.share("h1", "desk", 1);
    seen.fleet.delete("hosts/h1");
    seen.after(0);
    assert_eq!(seen.standing("h1"), Standing::Removed { for_ms: 0 }, "its lease lasts");
    seen.fleet.end_lease("h1");
    seen.after(0);
    seen.after(2_000);
    assert_eq!(seen.standing("h1"), Standing::Removed { for_ms: 17_000 });
}
