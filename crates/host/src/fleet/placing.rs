//! The placer of this daemon: tries for the election, carries out what the placer decides, and asks other hosts what it wants to know.
//!
//! Owns the requests that are under way. Invariant: the placer hears of the end of each transaction and question that it has asked for,
//! or of the time that they may take.

use super::etcd::{FleetStore, now, random_below};
use super::service::FleetService;
use jiff::Timestamp;
use spillway_api::{EventKind, HostState, Name, PlacerHostReport, PlacerReport};
use spillway_fleet::Moment;
use spillway_fleet::election::{Identity, candidacy};
use spillway_fleet::liveness::{Ask, Reach, Standing, StoreHealth};
use spillway_fleet::placement::{Unplaced, Why};
use spillway_fleet::placer::{Placer, PlacerAction, PlacerEvent, PlacerStatus};
use spillway_fleet::transaction::{Outcome, Transaction};
use spillway_fleet::view::FleetView;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};

/// Interval of steps without news.
const TICK: Duration = Duration::from_millis(500);
/// Longest pause before this daemon tries to become the placer, in milliseconds: all of them see at the same time that there is none.
const MOST_PAUSE_MS: u64 = 1_000;
/// Transactions that are under way at the same time.
const MOST_AT_ONCE: usize = 16;
/// Answers that wait for the placer.
const WAITING: usize = 1024;

/// What has come of an action of the placer.
enum News {
    Ended(u64, Option<Outcome>),
    Answered { about: Name, by: Name, reaches: bool },
}

/// Runs the placer for as long as the daemon runs.
pub(super) async fn place(service: FleetService, own: Identity) {
    let (sender, mut news) = mpsc::channel(WAITING);
    let at_once = Arc::new(Semaphore::new(MOST_AT_ONCE));
    let (mut view, lease, health) = (service.subscribe(), service.store().lease(), service.store().health());
    let mut placer = Placer::new(own.clone());
    let mut turn = Turn::default();
    loop {
        placer.note_time_of_day(Timestamp::now());
        let holds = lease.borrow().is_some_and(|lease| lease.is_valid(now()));
        let health = StoreHealth { trouble: health.borrow().trouble };
        let (candidacy, actions, status) = {
            let view = view.borrow_and_update();
            let nothing = FleetView::default();
            // A placer of records that were restored from a backup, or of another fleet, would write them to all hosts.
            let view = if service.holds_still() || !service.is_own_fleet(&view) { &nothing } else { &*view };
            let actions = placer.step(view, &health, now());
            (candidacy(view, &own, holds), actions, placer.status(view))
        };
        service.keep_knowledge(status.map(|status| knowledge(&status)).unwrap_or_default());
        let (candidacy, pause) = turn.take(candidacy);
        if let Some(transaction) = candidacy {
            // The records tell who has won.
            let _ = service.store().commit(&transaction).await;
        }
        for action in actions {
            match action {
                PlacerAction::Commit { number, transaction } => {
                    let (store, turn) = (service.store().clone(), Arc::clone(&at_once));
                    tokio::spawn(commit(store, turn, number, transaction, sender.clone()));
                }
                PlacerAction::Ask(Ask { about, of }) => {
                    for by in of {
                        let (door, about, sender) =
                            (Arc::clone(service.door()), about.clone(), sender.clone());
                        tokio::spawn(async move {
                            // A question that has failed is no answer: who asks may be cut off itself.
                            if let Some(reaches) = door.ask_about(&about, &by).await {
                                let _ = sender.send(News::Answered { about, by, reaches }).await;
                            }
                        });
                    }
                }
                PlacerAction::Event(event) => tell(&service, &event),
            }
        }
        tokio::select! {
            _ = view.changed() => {}
            Some(some) = news.recv() => {
                take(&mut placer, some);
                while let Ok(more) = news.try_recv() {
                    take(&mut placer, more);
                }
            }
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// When this daemon tries to become the placer: some time after it has seen that there is none, if there is none then.
#[derive(Default)]
struct Turn(Option<Moment>);

impl Turn {
    /// Returns the transaction to send now, and the time until the next look.
    fn take(&mut self, candidacy: Option<Transaction>) -> (Option<Transaction>, Duration) {
        let Some(transaction) = candidacy else {
            self.0 = None;
            return (None, TICK);
        };
        let at = *self.0.get_or_insert_with(|| now().after_ms(random_below(MOST_PAUSE_MS)));
        let left_ms = at.since_ms(now());
        if left_ms > 0 {
            return (None, TICK.min(Duration::from_millis(left_ms)));
        }
        self.0 = None;
        (Some(transaction), TICK)
    }
}

fn take(placer: &mut Placer, news: News) {
    match news {
        News::Ended(number, outcome) => placer.ended(number, outcome),
        News::Answered { about, by, reaches } => placer.answered(&about, &by, reaches),
    }
}

async fn commit(
    store: FleetStore,
    turn: Arc<Semaphore>,
    number: u64,
    transaction: Transaction,
    news: mpsc::Sender<News>,
) {
    let Ok(_turn) = turn.acquire().await else { return };
    // Whatever the error: the records tell, and the placer decides anew.
    let outcome = store.commit(&transaction).await.ok();
    let _ = news.send(News::Ended(number, outcome)).await;
}

fn tell(service: &FleetService, event: &PlacerEvent) {
    let object = match (&event.catalog, &event.host) {
        (Some(catalog), _) => format!("catalog/{catalog}"),
        (None, Some(host)) => format!("host/{host}"),
        (None, None) => "fleet".into(),
    };
    service.events().raise(EventKind::Fleet, &object, event.text.clone());
}

/// What people are told of what the placer knows.
fn knowledge(status: &PlacerStatus) -> PlacerReport {
    let state = |standing: Standing| match standing {
        Standing::Alive => HostState::Alive,
        Standing::Silent { reach: Reach::Answers, .. } => HostState::Isolated,
        Standing::Silent { .. } | Standing::Unreadable => HostState::Silent,
        Standing::DeclaredDead { .. } | Standing::Removed { .. } => HostState::Lost,
        Standing::NeverSeen => HostState::Absent,
    };
    let hosts = status.hosts.iter().map(|host| {
        let state = if host.is_lost { HostState::Lost } else { state(host.standing) };
        (host.host.clone(), PlacerHostReport { state, reason: host.kept.clone() })
    });
    let unplaced = status.unplaced.iter().map(|unplaced| (unplaced.catalog.clone(), reasons(unplaced)));
    PlacerReport {
        hosts: hosts.collect(),
        brake: status.brake.as_ref().map(ToString::to_string),
        unplaced: unplaced.collect(),
        unplaced_more: status.unplaced.iter().filter_map(more_hosts).collect(),
        waits: status.waits.clone(),
    }
}

/// Why no host gets a machine, by host.
fn reasons(unplaced: &Unplaced) -> BTreeMap<Name, String> {
    let Why::Hosts { hosts, .. } = &unplaced.why;
    hosts.iter().map(|(host, obstacle)| (host.clone(), obstacle.to_string())).collect()
}

/// How many hosts are left out of these reasons, if any.
fn more_hosts(unplaced: &Unplaced) -> Option<(Name, u32)> {
    let Why::Hosts { more, .. } = &unplaced.why;
    (*more > 0).then(|| (unplaced.catalog.clone(), u32::try_from(*more).unwrap_or(u32::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_daemon_tries_after_a_pause_and_only_while_there_is_no_placer() {
        let mut turn = Turn(Some(now().after_ms(60_000)));
        let candidacy = || Some(Transaction::default());
        assert_eq!(turn.take(candidacy()), (None, TICK), "others may be faster");
        assert_eq!(turn.take(None), (None, TICK));
        assert_eq!(turn.0, None, "another one was");
        assert_eq!(Turn(Some(now())).take(candidacy()).0, candidacy());
        let begun = now();
        while turn.take(candidacy()).0.is_none() {
            assert!(now().since_ms(begun) < 10 * MOST_PAUSE_MS, "its turn comes");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(turn.0, None, "the next attempt has a pause of its own");
    }
}
