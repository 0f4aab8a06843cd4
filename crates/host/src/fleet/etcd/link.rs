//! The one connection to etcd that all requests use, and the change to another member. Owns which member is asked.
//!
//! Invariants: at most one member is in use. Whoever waits for a connection waits for at most two rounds of all members.

use super::error::{FleetStoreError, MemberFailure};
use super::health::{Health, Observation};
use super::member::Member;
use super::random_below;
use super::store::FleetStoreSettings;
use futures_util::stream::{FuturesUnordered, StreamExt};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// How long a member may take to connect before the next one is tried beside it.
const HEAD_START: Duration = Duration::from_millis(250);

/// Time between the end of a round that failed and the next one.
const DISTANCE: Duration = Duration::from_millis(200);

/// The connection.
pub struct Link {
    settings: Arc<FleetStoreSettings>,
    state: Mutex<LinkState>,
    /// How etcd fares.
    pub health: Health,
}

struct LinkState {
    member: Option<Arc<Member>>,
    /// Member that was asked last, which is tried after the others.
    last: Option<usize>,
    /// When the last round has failed, and why.
    failed: Option<(Instant, FleetStoreError)>,
}

impl Link {
    /// Connects to nobody yet.
    pub fn new(settings: Arc<FleetStoreSettings>) -> Link {
        let state = Mutex::new(LinkState { member: None, last: None, failed: None });
        Link { settings, state, health: Health::new() }
    }

    /// Prefix of the fleet's keys.
    pub fn prefix(&self) -> String {
        spillway_fleet::keys::Key::prefix(&self.settings.address.fleet)
    }

    /// The member to ask, connected.
    ///
    /// # Errors
    /// None can be used.
    pub async fn member(&self) -> Result<Arc<Member>, FleetStoreError> {
        let asked = Instant::now();
        let mut state = self.state.lock().await;
        if let Some(member) = state.member.as_ref().filter(|member| !member.is_left()) {
            return Ok(Arc::clone(member));
        }
        // Those who have waited for a round that failed do not wait for another one, and rounds keep a distance.
        if let Some((at, error)) = &state.failed
            && (*at > asked || at.elapsed() < DISTANCE)
        {
            return Err(error.clone());
        }
        if let Some(member) = state.member.take() {
            state.last = Some(member.index);
        }
        match self.connect(state.last).await {
            Ok((member, observation)) => {
                let member = Arc::new(member);
                self.health.observe(&member.address, observation);
                state.member = Some(Arc::clone(&member));
                Ok(member)
            }
            Err(error) => {
                self.health.note_away(error.to_string());
                state.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// Tries all members, the last one after the others, each with a head start. The first that can be used counts.
    async fn connect(&self, last: Option<usize>) -> Result<(Member, Observation), FleetStoreError> {
        let members = &self.settings.address.members;
        let mut tries: FuturesUnordered<_> = order(members.len(), last, random_below)
            .into_iter()
            .enumerate()
            .map(|(place, index)| async move { (index, self.try_one(index, place).await) })
            .collect();
        let mut failures = vec![None; members.len()];
        while let Some((index, tried)) = tries.next().await {
            match tried {
                Ok(connected) => return Ok(connected),
                Err(failure) => failures[index] = Some((members[index].clone(), failure)),
            }
        }
        let failures: Vec<_> = failures.into_iter().flatten().collect();
        // All of them have the same users.
        match failures.iter().find(|(_, why)| matches!(why, MemberFailure::Denied(_))) {
            Some((member, why)) => Err(FleetStoreError::Denied(member.clone(), why.clone())),
            None => Err(FleetStoreError::NoMember(failures)),
        }
    }

    async fn try_one(&self, index: usize, place: usize) -> Result<(Member, Observation), MemberFailure> {
        tokio::time::sleep(HEAD_START * u32::try_from(place).unwrap_or(u32::MAX)).await;
        let (member, observation) = Member::connect(&self.settings, index).await?;
        match self.health.is_earlier_term(observation.cluster, observation.term) {
            Some(failure) => Err(failure),
            None => Ok((member, observation)),
        }
    }

    /// Takes what a member has said about itself, unless it has stood still: then it is left.
    pub fn observe(&self, member: &Arc<Member>, observation: Observation) {
        match self.health.is_earlier_term(observation.cluster, observation.term) {
            Some(failure) => self.leave(member, &failure),
            None => self.health.observe(&member.address, observation),
        }
    }

    /// Leaves a member for the next one, if the failure is its own, or one of the credentials that this connection was made with. All that is
    /// in progress there ends.
    pub fn leave(&self, member: &Member, failure: &MemberFailure) {
        let is_refused = failure.renews_after().is_some_and(|age| member.age() >= age);
        if !(failure.is_of_the_member() || is_refused) || !member.leave() {
            return;
        }
        if matches!(
            failure,
            MemberFailure::Silent(_) | MemberFailure::NoLeader | MemberFailure::EarlierTerm(..)
        ) {
            self.health.note_trouble();
        }
    }
}

/// The members in the order in which they are tried: at random, so that hosts that leave a member together do not all come to the next one,
/// and the last one after the others.
fn order(members: usize, last: Option<usize>, random_below: impl Fn(u64) -> u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..members).filter(|index| Some(*index) != last).collect();
    for place in (1..order.len()).rev() {
        let other = random_below(place as u64 + 1);
        order.swap(place, usize::try_from(other).unwrap_or(0));
    }
    order.extend(last);
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn hosts_leave_a_member_for_different_ones() {
        let firsts: BTreeSet<usize> = (0..200).map(|_| order(5, Some(2), random_below)[0]).collect();
        assert_eq!(firsts, BTreeSet::from([0, 1, 3, 4]));
        for last in [None, Some(0), Some(4)] {
            let mut order = order(5, last, random_below);
            assert!(last.is_none_or(|last| order[4] == last), "{order:?}");
            order.sort_unstable();
            assert_eq!(order, [0, 1, 2, 3, 4]);
        }
        assert_eq!((order(1, Some(0), random_below), order(1, None, random_below)), (vec![0], vec![0]));
    }
}
